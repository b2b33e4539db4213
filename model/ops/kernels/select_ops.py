"""Top-k selection of bf16 scores on a GPU: ties to the lower column, ascending output, no synchronisation with the host.

A long row is not searched whole. With G columns a run, an entry among the k best lies in one of the k best runs, ordered by their largest
score and, where those are equal, by their place: each better run holds a better entry. So one pass takes the maxima of the runs, a second
chooses k runs, and a third chooses k columns among k * G. This is exact whatever the scores are, ties included. The scores are read from
memory once; the searches run over a few ten thousand numbers of each row.

The reference is `ops.select.select_top` with widths of None. A score of NaN counts as +inf, and -inf is never chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.kernels import select

DIRECT = 4096  # columns up to which a row is searched whole
TILE = 8192  # columns of one program of the maxima


class Scratch(NamedTuple):
    """Memory of one selection over [n, m] scores; the captured graph of a step keeps it.

    maxima: [n, runs] bf16. groups: [n, k] int32, the chosen runs. Both are empty where rows are searched whole. size: columns of a run.
    """

    maxima: Tensor
    groups: Tensor
    size: int


def scratch(n: int, m: int, k: int, device: torch.device | str) -> Scratch:
    """Memory for selecting k of m columns in each of n rows."""
    size = run_size(m, k)
    runs = -(-m // size) if size else 0
    return Scratch(
        torch.empty((n, runs), dtype=torch.bfloat16, device=device),
        torch.empty((n, k if size else 0), dtype=torch.int32, device=device),
        size,
    )


def run_size(m: int, k: int) -> int:
    """Columns of a run: a power of two near sqrt(m / k), where both searches are equally long; 0 where the row is searched whole."""
    if m <= max(DIRECT, 4 * k):
        return 0
    size = 2
    while size * size * k < m:
        size *= 2
    return size


def top_columns(scores: Tensor, visible: Tensor | None, k: int, out: Tensor, memory: Scratch | None = None, *, unit: int = 1) -> Tensor:
    """The k best visible columns of each row.

    Floor: 2 bytes a score, read once: 64 x 1M take 31 us at 4.2 TB/s.

    Args:
        scores: [n, m] bf16, the last dimension contiguous; -inf is not chosen.
        visible: [n] int32, how many entries a row sees; None is all columns.
        out: [n, k] int32; ascending columns, -1 filled at the end. Returned.
        memory: `scratch(n, m, k, device)`; None allocates it.
        unit: entries per column (8 where a column is a block of candidates).
    """
    memory = memory or scratch(scores.shape[0], scores.shape[1], k, scores.device)
    if not memory.size:
        return _choose(scores, visible, k, out, unit=unit)
    run_maxima(scores, visible, memory.size, memory.maxima, unit=unit)
    _choose(memory.maxima, visible, k, memory.groups, unit=unit * memory.size)
    return _choose(scores, visible, k, out, groups=memory.groups, size=memory.size, unit=unit)


def top_candidates(scores: Tensor, blocks: Tensor, size: int, k: int, out: Tensor, memory: Scratch | None = None) -> Tensor:
    """The k best entries of each row among those of its candidate blocks.

    Args:
        scores: [n, blocks * size] bf16 of the entries of `blocks` in order, -inf where there is none. `visible` is already in them.
        blocks: [n, blocks] int32, ascending, -1 at the end.
        k: at most blocks * size; a smaller pool needs `ops.select.select_top`, which goes on outside of it.
        out: [n, k] int32, entries of the sequence, ascending, -1 filled. Returned.
        memory: `scratch(n, blocks * size, k, device)`; None allocates it.
    """
    if k > scores.shape[1]:
        raise ValueError(f"k = {k} is more than the {scores.shape[1]} entries of the candidate blocks")
    memory = memory or scratch(scores.shape[0], scores.shape[1], k, scores.device)
    if not memory.size:
        return _choose(scores, None, k, out, blocks=blocks, block_size=size)
    run_maxima(scores, None, memory.size, memory.maxima)
    _choose(memory.maxima, None, k, memory.groups)
    return _choose(scores, None, k, out, groups=memory.groups, size=memory.size, blocks=blocks, block_size=size)


def run_maxima(scores: Tensor, visible: Tensor | None, size: int, out: Tensor, *, pin: bool = False, unit: int = 1) -> Tensor:
    """Largest visible score of each run of `size` columns, -inf where it has none; the reference is `ops.select.block_maxima`.

    Floor: 2 bytes read a score and 2 / size written.

    Args:
        scores: [n, m] bf16. visible: [n] int32 or None. size: a power of two. unit: as of `top_columns`.
        out: [n, ceil(m / size)] bf16. Returned.
        pin: +inf for the run of the newest visible entry, so that it is always chosen.
    """
    n, m = scores.shape
    runs = -(-m // size)
    rows = max(1, min(TILE // size, _power(runs)))
    if n and runs:
        _kernels().maxima[(-(-runs // rows), n)](
            scores.view(torch.int16), scores if visible is None else visible, out.view(torch.int16),
            scores.stride(0), out.stride(0), m, runs,
            SIZE=size, ROWS=rows, VISIBLE=visible is not None, PIN=pin, UNIT=unit, num_warps=8,
        )  # fmt: skip
    return out


def _choose(
    scores: Tensor,
    visible: Tensor | None,
    k: int,
    out: Tensor,
    *,
    groups: Tensor | None = None,
    size: int = 0,
    blocks: Tensor | None = None,
    block_size: int = 0,
    unit: int = 1,
) -> Tensor:
    n, m = scores.shape
    if out.dtype != torch.int32 or out.shape != (n, k) or scores.dtype != torch.bfloat16 or scores.stride(1) != 1:
        raise ValueError(f"need bf16 scores with contiguous rows and int32 out of shape {(n, k)}")
    columns = m if groups is None else groups.shape[1] * size
    block = min(8192, max(_power(columns), 16))
    if n:
        _kernels().choose[(n,)](
            scores.view(torch.int16), scores if visible is None else visible, scores if groups is None else groups,
            scores if blocks is None else blocks, out,
            scores.stride(0), 0 if groups is None else groups.stride(0), 0 if blocks is None else blocks.stride(0), out.stride(0),
            m, columns, k, UNIT=unit, VISIBLE=visible is not None, GROUP=size, SIZE=block_size, K=_power(k), BLOCK=block,
            num_warps=16 if block >= 4096 else 4,
        )  # fmt: skip
    return out


def _power(x: int) -> int:
    """The smallest power of two from x on."""
    return 1 << max(0, x - 1).bit_length()


def _kernels() -> SimpleNamespace:
    return select.load(os.environ.get("TRITON_INTERPRET") == "1")


def bench_cases() -> list[tuple[str, Callable[[str], tuple[object, ...]], Callable[..., object], int, int]]:
    """(name, inputs on a device, run, bytes at least, FLOPs) at the sizes of the model."""

    def case(n: int, m: int, k: int, unit: int) -> tuple[str, Callable[[str], tuple[object, ...]], Callable[..., object], int, int]:
        def inputs(device: str) -> tuple[object, ...]:
            scores = torch.randn((n, m), device=device).to(torch.bfloat16)
            visible = torch.full((n,), m * unit, dtype=torch.int32, device=device)
            return scores, visible, k, torch.empty((n, k), dtype=torch.int32, device=device), scratch(n, m, k, device), unit

        def run(scores: Tensor, visible: Tensor, k: int, out: Tensor, memory: Scratch, unit: int) -> Tensor:
            return top_columns(scores, visible, k, out, memory, unit=unit)

        return f"top {k} of {n} x {m}", inputs, run, 2 * n * m + 4 * n * k, 0

    million = 1 << 20
    return [
        case(1, million, 512, 1),
        case(64, million, 512, 1),
        case(64, million // 8, 512, 1),
        case(4096, 16384, 512, 1),
        case(1, million // 8, 2048, 8),
        case(64, million // 8, 2048, 8),
    ]
