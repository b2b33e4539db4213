"""The indexer on a GPU: rounded queries, and scores of keys that stay FP4 in the pool.

References: `ops.rope.rotate` then `ops.formats.index_round` for queries, `ops.index_score.index_scores` over `ops.gather.gather_index` for
scores. The sum over heads is taken in a fixed order that is not the reference's, so a score may be one ulp of bf16 off where the fp32 sum
lies next to a tie; it does not depend on how many keys or rows are scored.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.kernels import index
from forebay.model.ops.rope import Turn

KEYS = 128  # keys of one program


class Keys(NamedTuple):
    """Index keys of one source, as `CacheMemory` has them.

    codes: [blocks, entries, dim / 2] uint8. scales: [blocks, entries, dim / 32] uint8. table: [spans, blocks of a span] int32.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor


class Tiles(NamedTuple):
    """Runs of rows that share a scan: rows first[t] to first[t] + rows[t] - 1 belong to one span. Both [tiles] int32.

    Decode has a tile for each span; a tile of 0 rows (padding of a captured graph) does nothing.
    """

    first: Tensor
    rows: Tensor


def round_queries(q: Tensor, turn: Turn, out: Tensor) -> Tensor:
    """Index queries rotated and rounded to FP4 values, [n, heads, dim] bf16 -> bf16 (exact); `out` may not be `q`.

    Floor: 4 bytes a channel, 16 KB a row of 32 heads of 128.
    """
    n, heads, dim = q.shape
    if n:  # without fused multiply-add, as the reference rounds both products of the rotation
        _kernels().queries[(n,)](
            q, turn.cos, turn.sin, out, H=heads, HP=_power(heads), D=dim, W=turn.cos.shape[1], num_warps=4, enable_fp_fusion=False
        )
    return out


def score_keys(
    q: Tensor,
    weights: Tensor,
    keys: Keys,
    tiles: Tiles,
    span: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    maxima: Tensor | None = None,
    size: int = 8,
) -> Tensor:
    """Scores of all keys that a row sees; column i is entry i.

    Floor: 68 bytes a key of 128 channels, once for each tile (1M keys: 17 us at 4.2 TB/s), and 2 bytes a score; 2 * heads * dim FLOPs a
    score.

    Args:
        q: [n, heads, dim] bf16, of `round_queries`. weights: [n, heads] bf16.
        span: [n] int32. visible: [n] int32, ascending within a tile.
        out: [n, m] bf16. Columns that a row does not see are -inf or, behind what its whole tile sees, left as they are. Returned.
        maxima: [n, ceil(m / size)] bf16 for the candidates: the best of each `size` columns, +inf for the newest; left alike.
    """
    return _score(q, weights, keys, tiles, span, visible, out, None, maxima, size)


def score_candidates(
    q: Tensor, weights: Tensor, keys: Keys, tiles: Tiles, span: Tensor, visible: Tensor, blocks: Tensor, size: int, out: Tensor
) -> Tensor:
    """Scores of the entries of each row's candidate blocks: column c is entry blocks[row, c // size] * size + c % size.

    Floor: 70 bytes an entry (2,048 blocks of 8: 1.1 MB a row); 2 * heads * dim FLOPs a score.

    Args:
        tiles: one row each. blocks: [n, pool] int32, -1 where there is none. Others as of `score_keys`.
        out: [n, pool * size] bf16, -inf where there is no visible entry. Returned.
    """
    return _score(q, weights, keys, tiles, span, visible, out, blocks, None, size)


def _score(
    q: Tensor,
    weights: Tensor,
    keys: Keys,
    tiles: Tiles,
    span: Tensor,
    visible: Tensor,
    out: Tensor,
    blocks: Tensor | None,
    maxima: Tensor | None,
    size: int,
) -> Tensor:
    import triton.language as tl

    heads, dim = q.shape[1:]
    columns, count = out.shape[1], tiles.first.shape[0]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if columns and count:
        _kernels().scores[(-(-columns // KEYS), count)](
            q, weights, keys.codes, keys.scales, keys.table, out if blocks is None else blocks, tiles.first, tiles.rows, span, visible, out,
            out if maxima is None else maxima, keys.codes.stride(0), keys.codes.stride(1), keys.scales.stride(0), keys.scales.stride(1),
            keys.table.stride(0), 0 if blocks is None else blocks.stride(0), out.stride(0), 0 if maxima is None else maxima.stride(0),
            columns, H=heads, HP=max(16, _power(heads)), D=dim, ENTRIES=keys.codes.shape[1], SIZE=size, RESTRICTED=blocks is not None,
            MAXIMA=maxima is not None, BK=KEYS, DOT=tl.float32 if interpreted else tl.bfloat16, ROUND=interpreted, num_warps=4,
        )  # fmt: skip
    return out


def _power(x: int) -> int:
    """The smallest power of two from x on."""
    return 1 << max(0, x - 1).bit_length()


def _kernels() -> SimpleNamespace:
    return index.load(os.environ.get("TRITON_INTERPRET") == "1")


def bench_cases() -> list[tuple[str, Callable[[str], tuple[object, ...]], Callable[..., object], int, int]]:
    """(name, inputs on a device, run, bytes at least, FLOPs) at the sizes of the model: 32 heads of 128, 128 entries a block."""

    def case(
        spans: int, rows: int, m: int, restricted: bool
    ) -> tuple[str, Callable[[str], tuple[object, ...]], Callable[..., object], int, int]:
        n = spans * rows
        columns = 2048 * 8 if restricted else m

        def inputs(device: str) -> tuple[object, ...]:
            pages = spans * m // 128 + 1
            pool = torch.randint(0, 256, (pages, 113_920), dtype=torch.uint8, device=device)
            codes = pool.as_strided((pages, 128, 64), (113_920, 64, 1), 36_864)
            scales = pool.as_strided((pages, 128, 4), (113_920, 4, 1), 45_056)
            scales.copy_(torch.randint(118, 124, scales.shape, dtype=torch.uint8, device=device))
            table = (torch.randperm(pages - 1, device=device) + 1).to(torch.int32).view(spans, -1)
            q = torch.randint(-6, 7, (n, 32, 128), device=device).to(torch.bfloat16)
            weights = torch.rand((n, 32), device=device).to(torch.bfloat16)
            step = 1 if restricted else rows
            first = torch.arange(0, n, step, dtype=torch.int32, device=device)
            span = torch.arange(n, dtype=torch.int32, device=device) // rows
            visible = torch.full((n,), m, dtype=torch.int32, device=device)
            blocks = torch.rand((n, m // 8), device=device).topk(2048).indices.sort().values.to(torch.int32) if restricted else None
            out = torch.empty((n, columns), dtype=torch.bfloat16, device=device)
            return q, weights, Keys(codes, scales, table), Tiles(first, torch.full_like(first, step)), span, visible, blocks, out

        def run(
            q: Tensor, weights: Tensor, keys: Keys, tiles: Tiles, span: Tensor, visible: Tensor, blocks: Tensor | None, out: Tensor
        ) -> Tensor:
            if blocks is None:
                return score_keys(q, weights, keys, tiles, span, visible, out)
            return score_candidates(q, weights, keys, tiles, span, visible, blocks, 8, out)

        read = n * columns * 68 if restricted else spans * m * 68
        name = f"index {'candidates' if restricted else 'scan'}, {spans} x {rows} rows, {m} keys"
        return name, inputs, run, read + 2 * n * columns, 2 * 32 * 128 * n * columns

    million = 1 << 20
    return [case(1, 1, million, False), case(8, 1, million // 8, False), case(1, 64, 65536, False), case(8, 1, million // 8, True)]
