"""Top-k selection of bf16 scores on a GPU: ties to the lower column, ascending output, no synchronisation with the host.

A long row is not searched whole. With G columns a run, an entry among the k best lies in one of the k best runs, ordered by their largest
score and, where those are equal, by their place: each better run holds a better entry. So one pass takes the maxima of the runs, a second
chooses k runs, and a third chooses k columns among k * G. This is exact whatever the scores are, ties included. The scores are read from
memory once; the searches run over numbers that one program keeps in registers.

Rows may have any number of columns behind those that `visible` says, as in a captured graph: neither time nor result depends on them.

The reference is `ops.select.select_top` with widths of None. A score of NaN counts as +inf, and -inf is never chosen, but where a row sees
k columns or fewer: those are all chosen, and their scores not read.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.kernels import select
from forebay.model.ops.kernels.case import Case

LIMIT = 32768  # columns that one program can search; 16,384 need no spilling of registers, but long rows more launches
DIRECT = 16384  # columns up to which a row is searched whole; at most LIMIT
TILE = 8192  # columns of one program of the maxima
MAXIMA_WARPS = 8
LANES = 32  # columns a thread of a search; registers allow about 64


def tuning_space() -> dict[str, tuple[int, ...]]:
    """Module constants that a sweep may set, and values worth trying; `Scratch` depends on LIMIT and DIRECT."""
    return {
        "LIMIT": (16384, 32768),
        "DIRECT": (4096, 8192, 16384),
        "TILE": (4096, 8192, 16384),
        "MAXIMA_WARPS": (4, 8),
        "LANES": (8, 16, 32, 64),
    }


class Scratch(NamedTuple):
    """Memory of one selection over [n, m] scores; the captured graph of a step keeps it.

    size: columns of a run, 0 where rows are searched whole; maxima and groups are empty then. maxima: [n, runs] bf16, empty if given.
    groups: [n, chosen runs] int32. inner: for choosing the runs, where those are many.
    """

    size: int
    maxima: Tensor
    groups: Tensor
    inner: Scratch | None = None


def scratch(n: int, m: int, k: int, device: torch.device | str, *, size: int = 0) -> Scratch:
    """Memory for selecting k of m columns in each of n rows. size: of the runs whose maxima are given to `top_columns`, if they are."""
    given = size > 0 and m > DIRECT
    size = size if given else run_size(m, k)
    if not size:
        none = torch.empty((n, 0), dtype=torch.int32, device=device)
        return Scratch(0, none.to(torch.bfloat16), none)
    runs, chosen = -(-m // size), k + given
    return Scratch(
        size,
        torch.empty((n, 0 if given else runs), dtype=torch.bfloat16, device=device),
        torch.empty((n, chosen), dtype=torch.int32, device=device),
        scratch(n, runs, chosen, device) if runs > DIRECT else None,
    )


def run_size(m: int, k: int) -> int:
    """Columns of a run: a power of two near sqrt(m / k), where both searches are equally long; 0 where the row is searched whole."""
    if m <= max(DIRECT, 4 * k) and _power(m) <= LIMIT:
        return 0
    if 2 * _power(k) > LIMIT:
        raise ValueError(f"k must be at most {LIMIT // 2} for rows of {m} columns, got {k}")
    size = 2
    while size * size * k < m and 2 * size * _power(k) <= LIMIT:
        size *= 2
    return size


def top_columns(
    scores: Tensor,
    visible: Tensor | None,
    k: int,
    out: Tensor,
    memory: Scratch | None = None,
    *,
    unit: int = 1,
    maxima: Tensor | None = None,
    size: int = 8,
) -> Tensor:
    """The k best visible columns of each row.

    Floor: 2 bytes a visible score, read once: 64 x 1M take 31 us at 4.2 TB/s. With `maxima`, 2 / size bytes a score.

    Args:
        scores: [n, m] bf16, the last dimension contiguous; -inf is not chosen.
        visible: [n] int32, how many entries a row sees; None is all columns. What lies behind them may be anything.
        out: [n, k] int32; ascending columns, -1 filled at the end. Returned.
        memory: `scratch(n, m, k, device)`, with `size` if `maxima` are given; None allocates it.
        unit: entries per column (8 where a column is a block of candidates).
        maxima: [n, ceil(m / size)] bf16, the largest score of each `size` columns (a power of two) as far as they are visible, where these
            are known already: of a long row, only runs that matter are read then. One maximum of a row may be too large, as that of
            a pinned run is: one more run is chosen, so that none is missed.
    """
    memory = memory or scratch(scores.shape[0], scores.shape[1], k, scores.device, size=0 if maxima is None else size)
    return _top(scores, visible, k, out, memory, unit, maxima, None, 0)


def top_candidates(scores: Tensor, blocks: Tensor, size: int, k: int, out: Tensor, memory: Scratch | None = None) -> Tensor:
    """The k best entries of each row among those of its candidate blocks.

    Floor: 2 bytes a score (32 KB a row of 2,048 blocks of 8).

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
    return _top(scores, None, k, out, memory, 1, None, blocks, size)


def _top(
    scores: Tensor, visible: Tensor | None, k: int, out: Tensor, memory: Scratch, unit: int, maxima: Tensor | None,
    blocks: Tensor | None, block_size: int,
) -> Tensor:  # fmt: skip
    if not memory.size:
        return _choose(scores, visible, k, out, unit=unit, blocks=blocks, block_size=block_size)
    best, groups = memory.maxima if maxima is None else maxima, memory.groups
    if maxima is None:
        run_maxima(scores, visible, memory.size, best, unit=unit, skip=groups.shape[1])
    inner = memory.inner or Scratch(0, best, groups)
    _top(best, visible, groups.shape[1], groups, inner, unit * memory.size, None, None, 0)
    return _choose(scores, visible, k, out, groups=groups, size=memory.size, unit=unit, blocks=blocks, block_size=block_size)


def run_maxima(
    scores: Tensor, visible: Tensor | None, size: int, out: Tensor, *, pin: bool = False, unit: int = 1, skip: int = 0
) -> Tensor:
    """Largest visible score of each run of `size` columns; the reference is `ops.select.block_maxima`.

    Floor: 2 bytes read a visible score and 2 / size written.

    Args:
        scores: [n, m] bf16. visible: [n] int32 or None. size: a power of two. unit: as of `top_columns`.
        out: [n, ceil(m / size)] bf16. Returned. Runs that a row sees nothing of may be left as they are.
        pin: +inf for the run of the newest visible entry, so that it is always chosen.
        skip: rows that see so many runs or fewer are left as they are, since all of those will be chosen.
    """
    n, m = scores.shape
    runs = -(-m // size)
    rows = max(1, min(TILE // size, _power(runs)))
    if n and runs:
        _kernels().maxima[(-(-runs // rows), n)](
            scores.view(torch.int16), scores if visible is None else visible, out.view(torch.int16),
            scores.stride(0), out.stride(0), m, runs, skip,
            SIZE=size, ROWS=rows, VISIBLE=visible is not None, PIN=pin, UNIT=unit, WHOLE=m % size == 0, num_warps=MAXIMA_WARPS,
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
    width = size or 8
    runs = -(-m // width) if groups is None else groups.shape[1]
    if _power(runs) * width > LIMIT:
        raise ValueError(f"at most {LIMIT} columns can be searched at once, got {runs} runs of {width}")
    if n and k:
        _kernels().choose[(n,)](
            scores.view(torch.int16), scores if visible is None else visible, scores if groups is None else groups,
            scores if blocks is None else blocks, out,
            scores.stride(0), 0 if groups is None else groups.stride(0), 0 if blocks is None else blocks.stride(0), out.stride(0),
            m, runs, k, UNIT=unit, VISIBLE=visible is not None, GROUPED=groups is not None, WIDTH=width, RUNS=_power(runs),
            WHOLE=m % width == 0, SIZE=block_size, K=_power(k), num_warps=max(4, min(16, _power(runs) * width // (32 * LANES))),
        )  # fmt: skip
    return out


def _power(x: int) -> int:
    """The smallest power of two from x on."""
    return 1 << max(0, x - 1).bit_length()


def _kernels() -> SimpleNamespace:
    return select.load(os.environ.get("TRITON_INTERPRET") == "1")


def bench_cases() -> list[Case]:
    """Sizes of the model: rows of up to 1M entries, blocks of candidates, candidates; rows that see little of their capacity."""

    def case(n: int, m: int, k: int, unit: int = 1, seen: int = 0, given: bool = False) -> Case:
        seen = seen or m

        def inputs(device: torch.device) -> tuple[Any, ...]:
            scores = torch.randn((n, m), device=device).to(torch.bfloat16)
            visible = torch.full((n,), seen * unit, dtype=torch.int32, device=device)
            maxima = scores.view(n, -1, 8).amax(2) if given else None
            out = torch.empty((n, k), dtype=torch.int32, device=device)
            return scores, visible, k, out, scratch(n, m, k, device, size=8 if given else 0), unit, maxima

        def run(scores: Tensor, visible: Tensor, k: int, out: Tensor, memory: Scratch, unit: int, maxima: Tensor | None) -> Tensor:
            return top_columns(scores, visible, k, out, memory, unit=unit, maxima=maxima)

        name = f"top {k} of {n} x {m}" + (f", {seen} visible" if seen < m else "") + (", maxima given" if given else "")
        return Case(name, inputs, run, n * (seen * 2 // (8 if given else 1) + 4 * k), 0)

    million = 1 << 20
    return [
        case(1, million, 512),
        case(64, million, 512),
        case(1, million, 512, given=True),
        case(64, million, 512, given=True),
        case(1, million, 512, seen=4096),
        case(1, million // 2, 512, seen=2048),
        case(64, million // 8, 512),
        case(1, 16384, 512),
        case(4096, 16384, 512),
        case(1, million // 8, 2048, unit=8),
        case(64, million // 8, 2048, unit=8),
    ]
