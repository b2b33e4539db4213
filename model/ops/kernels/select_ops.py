"""Top-k selection of bf16 scores on a GPU: ties to the lower column, ascending output, no synchronisation with the host.

A long row is not searched whole. With G columns a run, an entry among the k best lies in one of the k best runs, ordered by their largest
score and, where those are equal, by their place: each better run holds a better entry. So a first kernel takes the maxima of the runs, by
many programs, and a second, by one program a row, chooses k runs and then k columns among k * G. This is exact whatever the scores are,
ties included; the scores are read from memory once, and those of the chosen runs again.

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

from forebay.model.ops.kernels import dependent, select
from forebay.model.ops.kernels.case import Case

MOST = 4096  # columns that can be chosen
MIN_TILE = 32
RUNS = 16384  # the most runs of a row
TILE = 16384  # columns of a row that a program holds at a time
DIRECT = 32768  # columns up to which a row is searched whole
DIRECT_MANY = 262144  # the same for MANY rows and more, which keep the device busy by themselves
MANY = 132
WARPS = 8  # of a search
WIDE_WARPS = 16  # the same where many columns are chosen, or runs first, to halve the code, which a step finds outside of the cache
WIDE = 1024  # so many columns
MANY_WARPS = 4  # for many rows
MANY_TILE = 2048  # for many rows, where so few hold enough parts
PARTS = 4  # parts for each column that is chosen, whose maxima bound the search
MAXIMA_TILE = 8192  # columns of one program of the maxima
MAXIMA_WARPS = 8


def tuning_space() -> dict[str, tuple[int, ...]]:
    """Module constants that a sweep may set, and values worth trying; `Scratch` depends on RUNS, DIRECT, DIRECT_MANY and MANY."""
    return {
        "TILE": (4096, 8192, 16384),
        "RUNS": (8192, 16384),
        "DIRECT": (16384, 32768, 65536),
        "WARPS": (4, 8, 16),
        "WIDE_WARPS": (8, 16),
        "MANY_WARPS": (2, 4, 8),
        "MANY_TILE": (2048, 4096),
        "PARTS": (2, 4),
        "MAXIMA_TILE": (4096, 8192, 16384),
        "MAXIMA_WARPS": (4, 8),
    }


class Scratch(NamedTuple):
    """Memory of one selection over [n, m] scores; the captured graph of a step keeps it.

    size: columns of a run, 0 where rows are searched whole; maxima and groups are empty then. maxima: [n, runs] bf16, empty where those
    given will do. groups: [n, chosen runs] int32. short: [n, s] int32, the columns that a search comes down to.
    """

    size: int
    maxima: Tensor
    groups: Tensor
    short: Tensor


def scratch(n: int, m: int, k: int, device: torch.device | str, *, size: int = 0) -> Scratch:
    """Memory for selecting k of m columns in each of n rows. size: of the runs whose maxima are given to `top_columns`, if they are."""
    if k > MOST:
        raise ValueError(f"k must be at most {MOST}, got {k}")
    width = run_size(n, m, size)
    chosen = k + (size > 0) if width else 0
    return Scratch(
        width,
        torch.empty((n, -(-m // width) if width > size else 0), dtype=torch.bfloat16, device=device),
        torch.empty((n, chosen), dtype=torch.int32, device=device),
        torch.empty((n, 2 * _power(max(k, chosen))), dtype=torch.int32, device=device),
    )


def run_size(n: int, m: int, given: int = 0) -> int:
    """Columns of a run: a power of two, at least that of the maxima that are given; 0 where the rows are searched whole."""
    if m <= (DIRECT_MANY if n >= MANY else DIRECT):
        return 0
    return max(8, given, _power(-(-m // RUNS)))


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
    return _top(scores, visible, k, out, memory, unit, maxima, size, None, 0)


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
    return _top(scores, None, k, out, memory, 1, None, 0, blocks, size)


def _top(
    scores: Tensor, visible: Tensor | None, k: int, out: Tensor, memory: Scratch, unit: int, maxima: Tensor | None, size: int,
    blocks: Tensor | None, block_size: int,
) -> Tensor:  # fmt: skip
    n, m = scores.shape
    if out.dtype != torch.int32 or out.shape != (n, k) or scores.dtype != torch.bfloat16 or scores.stride(1) != 1:
        raise ValueError(f"need bf16 scores with contiguous rows and int32 out of shape {(n, k)}")
    if not (n and k and m):
        return out.fill_(-1)
    width, best, groups, short = memory
    chosen = groups.shape[1]
    held = TILE if width else max(MIN_TILE, min(max(MANY_TILE, 2 * _power(k)) if n >= MANY else TILE, _power(m)))
    whole = max(TILE, 2 * chosen * width)
    if width and maxima is not None and width == size:
        best = maxima
    elif width and maxima is not None:
        run_maxima(maxima, visible, width // size, best, unit=unit * size, skip=whole // size)
    elif width:
        run_maxima(scores, visible, width, best, unit=unit, skip=whole)
    most = MANY_WARPS if n >= MANY and not width else WIDE_WARPS if width or k > WIDE else WARPS
    warps = max(1, min(most, held // 256))
    v, runs, room = min(8, width or 8), -(-m // (width or 1)), short.shape[1]
    none = scores
    _kernels().choose[(n,)](
        scores.view(torch.int16), none if visible is None else visible, best.view(torch.int16), groups, short,
        none if blocks is None else blocks, out,
        scores.stride(0), best.stride(0), groups.stride(0), short.stride(0), 0 if blocks is None else blocks.stride(0), out.stride(0),
        m, k, chosen, whole,
        UNIT=unit, VISIBLE=visible is not None, LONG=width > 0, WIDTH=max(1, width), V=v, WHOLE=m % v == 0,
        LANES=held // v, ONCE=m <= held, PARTS=_parts(k, held, warps), SHORT=room,
        RUN_WHOLE=runs % 8 == 0, RUN_ONCE=runs <= TILE, RUN_PARTS=_parts(chosen, TILE, warps),
        SIZE=block_size, K=_power(k), CHOSEN=_power(chosen),
        num_warps=warps, **dependent.load(_interpreted()).OPTIONS,
    )  # fmt: skip
    return out


def _parts(k: int, held: int, warps: int) -> int:
    """Parts of a tile whose maxima bound a search for k columns: one thread has all columns of a part, in lanes of 8."""
    return min(held, max(PARTS * _power(k), 256 * warps))


def run_maxima(
    scores: Tensor, visible: Tensor | None, size: int, out: Tensor, *, pin: bool = False, unit: int = 1, skip: int = 0
) -> Tensor:
    """Largest visible score of each run of `size` columns; the reference is `ops.select.block_maxima`.

    Floor: 2 bytes read a visible score and 2 / size written.

    Args:
        scores: [n, m] bf16. visible: [n] int32 or None. size: a power of two. unit: as of `top_columns`.
        out: [n, ceil(m / size)] bf16. Returned. Runs that a row sees nothing of may be left as they are.
        pin: +inf for the run of the newest visible entry, so that it is always chosen.
        skip: rows that see so many columns or fewer are left as they are.
    """
    n, m = scores.shape
    runs = -(-m // size)
    rows = max(1, min(MAXIMA_TILE // size, _power(runs)))
    if n and runs:
        _kernels().maxima[(-(-runs // rows), n)](
            scores.view(torch.int16), scores if visible is None else visible, out.view(torch.int16),
            scores.stride(0), out.stride(0), m, runs, skip,
            SIZE=size, ROWS=rows, VISIBLE=visible is not None, PIN=pin, UNIT=unit, WHOLE=m % size == 0, ASM=not _interpreted(),
            num_warps=MAXIMA_WARPS, **dependent.load(_interpreted()).OPTIONS,
        )  # fmt: skip
    return out


def _power(x: int) -> int:
    """The smallest power of two from x on."""
    return 1 << max(0, x - 1).bit_length()


def _kernels() -> SimpleNamespace:
    return select.load(_interpreted())


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


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
