"""Made-up attention over stored rows and entries, decoded key by key, for the tests of both kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.kernels import attend_ops
from forebay.model.ops.kernels.attend_ops import Entries, Plan, Rows
from forebay.model.ops.rope import inverse_frequencies, rotate, turn_at
from forebay.model.ops.sparse_attention import sparse_attention


@dataclass(frozen=True)
class Shape:
    heads: int
    dim: int
    rope: int
    window: int
    topk: int
    ratio: int = 1
    magnitude: float = 1.0


TINY = Shape(2, 32, 8, 8, 8, 2)
DEMO = Shape(8, 128, 32, 64, 40, 2)
LONG = Shape(4, 128, 16, 130, 100)  # three tiles of window and two of entries, the last of both in part
REAL = Shape(64, 512, 64, 128, 512)


class Problem:
    """Three sequences: one in the middle of a long text, one that begins here, and one whose window has a floor; and padding."""

    spans = ((300, 2, 0), (0, 2, 0), (250, 1, 245))  # first position, rows, floor

    def __init__(self, shape: Shape, spans: tuple[tuple[int, int, int], ...] | None = None, padding: int = 1) -> None:
        self.shape, spans = shape, self.spans if spans is None else spans
        g = torch.Generator().manual_seed(shape.dim + shape.topk)
        n = sum(count for _, count, _ in spans) + padding
        self.q = torch.randn((n, shape.heads, shape.dim), generator=g).mul(shape.magnitude).bfloat16()
        self.sink, self.scale = torch.randn(shape.heads, generator=g), shape.dim**-0.5

        def window_rows(*lead: int) -> Tensor:
            codes, scales = formats.fp8_encode(torch.randn((*lead, shape.dim), generator=g) * 2 ** torch.randn((*lead, 1), generator=g))
            return torch.cat((codes, scales), -1)

        slots, layers, layer = 5, 2, 1
        self.rings = window_rows(slots, layers, shape.window)[:, layer]
        self.fresh = window_rows(n)
        # A pool of blocks with another plane before the codes, and bytes between the planes that belong to nobody.
        per_block = 16 // shape.ratio
        codes = per_block * 48
        scales = codes + per_block * shape.dim // 2 + 32
        pool = torch.full((80, scales + per_block * shape.dim // 16 + 48), 255, dtype=torch.uint8)
        packed, factors = formats.main_encode(torch.randn((80, per_block, shape.dim), generator=g) * 3)
        pool[:, codes : codes + per_block * shape.dim // 2] = packed.flatten(1)
        pool[:, scales : scales + per_block * shape.dim // 16] = factors.flatten(1)
        self.packed, self.factors = packed, factors
        table = torch.stack([torch.randperm(79, generator=g)[:40] + 1 for _ in spans]).int()
        selected = torch.full((n, shape.topk), -1, dtype=torch.int32)
        span, position, start, offset, floor = [], [], [], [], []
        row = 0
        for number, (first, count, lowest) in enumerate(spans):
            start.append(first)
            offset.append(row)
            floor.append(lowest)
            for i in range(first, first + count):
                span.append(number)
                position.append(i)
                stored = (i + 1) // shape.ratio
                chosen = torch.randperm(stored, generator=g)[: shape.topk].sort()[0]
                selected[row, : len(chosen)] = chosen
                row += 1
        span += [-1] * padding
        position += [-1] * padding
        turn = turn_at(torch.tensor(position).clamp(min=0), inverse_frequencies(shape.rope, 10000.0))

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        slot = int32([3, 1, 4][: len(spans)])
        self.turn = turn
        both = torch.stack((turn.cos[:, ::2], turn.sin[:, 1::2]), 1)
        self.rows = Rows(torch.tensor(position), int32(span), int32(start), int32(offset), int32(floor), slot, table, both)
        self.entries: Entries | None = Entries(selected, pool, per_block, codes, scales)

    def expected(self) -> Tensor:
        """Key by key."""
        shape, rows = self.shape, self.rows
        slots = shape.window + (0 if self.entries is None else shape.topk)
        kv, valid = torch.zeros((len(self.q), slots, shape.dim)), torch.zeros((len(self.q), slots), dtype=torch.bool)
        for row, (i, s) in enumerate(zip(rows.position.tolist(), rows.span.tolist(), strict=True)):
            lowest = max(int(rows.floor[s]), i - shape.window + 1)
            for t, j in enumerate(range(lowest, i + 1)):
                if j >= int(rows.start[s]):
                    stored = self.fresh[int(rows.offset[s]) + j - int(rows.start[s])]
                else:
                    stored = self.rings[int(rows.slot[s]), j % shape.window]
                kv[row, t], valid[row, t] = formats.fp8_decode(stored[None, : shape.dim], stored[None, shape.dim :])[0], True
            if self.entries is not None:
                for t, entry in enumerate(self.entries.selected[row].tolist()):
                    if entry >= 0:
                        block, place = int(rows.table[s, entry // self.entries.per_block]), entry % self.entries.per_block
                        kv[row, shape.window + t] = formats.main_decode(self.packed[block, place], self.factors[block, place])
                        valid[row, shape.window + t] = True
        q = rotate(self.q, self.turn)
        return rotate(sparse_attention(q, kv, valid, self.sink, self.scale), self.turn, inverse=True)

    def found(self, split: Plan | None = None) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        attend_ops.attend(self.q, self.rings, self.fresh, self.entries, self.sink, self.scale, self.rows, out, split)
        return out


def assert_near(found: Tensor, expected: Tensor, limit: float = 4e-3) -> None:
    """Two bf16 roundings may fall the other way (2^-8 of a number); of the whole, less than `limit`."""
    assert found.isfinite().all()
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= limit, float(error)
