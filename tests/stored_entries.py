"""Rows and spans of a step, and a compressor and memory of the reference, for tests of the kernels that store KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

import ptx
from forebay.model.batch import ForwardBatch, HalfState, Span
from forebay.model.compressor import Compressor
from forebay.model.memory import CacheMemory
from forebay.model.ops.backend import SERVING
from forebay.model.ops.kernels import store_ops
from forebay.model.ops.kernels.store_ops import SourcePlanes, Step
from forebay.model.ops.linear import PlainWeight, TileCache, bf16_linear, fp32_linear
from forebay.model.ops.rope import inverse_frequencies, rope_table

EPS = 1e-6
SPANS = [(0, 1), (5, 6), (6, 7), (3, 12), (4, 5), (7, 10), (16, 33), (9, 11)]  # of even and odd starts, ends and lengths


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * len(shape) + shape[-1])) * scale


def step_of(spans: list[tuple[int, int]], write_from: list[int] | None = None, table: Tensor | None = None) -> Step:
    position = torch.cat([torch.arange(a, b) for a, b in spans])
    span = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor([b - a for a, b in spans])).int()
    start, stop = (torch.tensor(x, dtype=torch.int32) for x in zip(*spans, strict=True))
    length, none = stop - start, torch.zeros_like(start)
    return Step(
        position, span, start, stop, (length.cumsum(0) - length).int(), torch.arange(len(spans), 0, -1).int(), none,
        none if write_from is None else torch.tensor(write_from, dtype=torch.int32),
        torch.zeros((len(spans), 1), dtype=torch.int32) if table is None else table,
    )  # fmt: skip


def table_of(position: Tensor, freqs: Tensor, ratio: int = 1) -> Tensor:
    """What `turn_table` makes, with the reference's cosines and sines."""
    return torch.stack(rope_table(position // ratio * ratio, freqs), 1)


def nearly(here: Tensor, there: Tensor, most: float = 0.003) -> None:
    """Equal but for the few codes that a sum in another order moves."""
    assert here.shape == there.shape
    assert (here != there).double().mean() <= most


class Case:
    """A compressor and a memory of the reference, and the same memory once more for the kernel."""

    def __init__(self, ratio: int, dim: int, index: int, pairs: int, spans: list[tuple[int, int]], floors: list[int] | None = None) -> None:
        self.ratio, self.pairs, self.tokens, self.floors = ratio, pairs, 8, floors or [0] * len(spans)
        per_block = self.tokens // ratio
        rows = dim // 2, dim // 16, index // 2, index // 32
        offsets = [16 + per_block * sum(rows[:i]) for i in range(4)]  # another source's bytes come before
        blocks = 5 * len(spans) + 1
        self.pool = torch.full((blocks, offsets[3] + per_block * rows[3] + 8), 3, dtype=torch.uint8)
        self.planes = SourcePlanes(ratio, per_block, *offsets)
        table = torch.randperm(blocks, generator=torch.Generator().manual_seed(4))[: 5 * len(spans)].view(-1, 5).int()
        self.step = step_of(spans, self.floors, table)
        self.n, self.freqs = self.step.position.numel(), inverse_frequencies(2 * pairs, 10000.0)
        self.pending = random(len(spans) + 1, 2, 1, 2, dim, seed=8)
        self.ring = torch.zeros((len(spans) + 1, 1, 8, dim + dim // 32), dtype=torch.uint8)
        names = "main_codes", "main_scales", "index_codes", "index_scales"
        views = [self.pool[:, o : o + per_block * r].unflatten(1, (per_block, r)) for o, r in zip(offsets, rows, strict=True)]
        sources = cast(Any, {3: SimpleNamespace(**dict(zip(names, views, strict=True)))})
        self.memory = CacheMemory(self.tokens, sources, self.ring[..., :dim], self.ring[..., dim:], self.pending, {3: 1})
        parts = [
            Span(a, b, f, 0, 0, 0, None, int(slot), blocks.tolist())
            for (a, b), f, slot, blocks in zip(spans, self.floors, self.step.slot, table, strict=True)
        ]
        batch = ForwardBatch(torch.zeros(self.n, dtype=torch.int64), torch.zeros((self.n, 1)).long(), parts, self.memory, 8)
        self.state = HalfState(batch.encoder, parts, batch.tables, self.memory, None)
        made = Compressor.__new__(Compressor)
        cache = TileCache(1 << 24)
        made.plan = cast(Any, SimpleNamespace(index=3, ratio=ratio))
        made.layer, made.ratio, made.eps, made.freqs, made.ops = 3, ratio, EPS, self.freqs, SERVING
        made.wkv = PlainWeight(random(dim, 16, seed=1), cache)
        made.wgate = PlainWeight(random(dim, 16, seed=2, scale=0.5), cache) if ratio > 1 else None
        made.norm = random(dim, seed=3).bfloat16()
        made.wk, made.k_norm = PlainWeight(random(index, dim, seed=5).bfloat16(), cache), random(index, seed=6)
        self.compressor = made

    def check(self, x: Tensor, rows: Tensor | None = None, most: float = 0.003) -> None:
        c, pool, pending = self.compressor, self.pool.clone(), self.pending.clone()
        if c.wgate is None:
            source = bf16_linear(x, c.wkv)
        else:
            source = torch.cat((fp32_linear(x, c.wkv), fp32_linear(x, c.wgate)), 1)
        turn = table_of(self.step.position, self.freqs, self.ratio)
        if rows is None:
            s, floors = self.step.span.long(), torch.tensor(self.floors)
            rows = store_ops.acting_rows(self.step.position, self.step.start[s], self.step.stop[s], self.ratio, floors[s])
        store_ops.store_entries(
            source, c.norm, c.wk.weight, c.k_norm, turn, EPS, self.step, rows, pool, self.planes,
            pending[:, 1] if self.ratio > 1 else None,
        )  # fmt: skip
        before = self.pool.clone()
        c.write(x, self.state)
        assert torch.equal(pending, self.pending)
        written = self.pool != before
        assert written.any()
        nearly(pool[written], self.pool[written], most)
        assert torch.equal(pool[:, :16], before[:, :16])
        changed = (pool != before) & ~written
        assert changed.sum() <= most * written.sum()  # a code that happens to be what lay there


def words(even: Tensor, odd: Tensor) -> Tensor:
    """Two bf16 numbers each."""
    return (ptx.patterns(even) >> 16) | (ptx.patterns(odd) & 0xFFFF0000)


EVERY = (torch.arange(65536) << 16).to(torch.int32).view(torch.float32)  # of bf16
