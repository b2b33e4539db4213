"""Sparse attention of a step's rows over stored window rows and entries, with sink and both rotations (spec/model.md §3.4)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.model.config import MAIN_KV_GROUP, QUANT_GROUP
from forebay.model.ops.kernels import attend as kernels
from forebay.model.ops.kernels import dependent
from forebay.model.ops.kernels.moe_ops import Meeting, processors

log = logging.getLogger(__name__)

PROCESSORS = 132  # of an H200
MAX_HEADS = 64
MAX_SPLITS = 16
HELPERS = 4  # programs of a row's heads that join its parts together
DEPENDENT_ROWS = 64  # up to which it begins before the kernel before is over
WIDE_DIM, WIDE_HEADS = 512, 32  # what the kernel for many rows is for: this dimension, and more heads than these


@dataclass(frozen=True)
class Rows:
    """The rows of a step and where their keys are, on the device. All int32 but `position`.

    Attributes:
        position: [n] int64; -1 for a row that only pads the batch: it has no window keys.
        span: [n], number of the row's sequence in the tensors below; any number, such as -1, for a row that pads.
        start, offset: [spans], first position of the sequence in this batch, and its row.
        floor: [spans], the first position that may be read in a window (of the half whose layers these are); not negative.
        slot: [spans], window slot. table: [spans, blocks], pool blocks.
        turn: [n, 2, pairs] fp32, cosines and sines of the rows' positions, as `store_ops.turn_table` makes them.
    """

    position: Tensor
    span: Tensor
    start: Tensor
    offset: Tensor
    floor: Tensor
    slot: Tensor
    table: Tensor
    turn: Tensor


@dataclass(frozen=True)
class Entries:
    """Chosen entries of a source.

    Attributes:
        selected: [n, topk] int32, -1 for none.
        pool: [blocks, block bytes] uint8. per_block: entries of a block.
        codes, scales: byte offsets of the source's planes in a block; codes even.
    """

    selected: Tensor
    pool: Tensor
    per_block: int
    codes: int
    scales: int


class Scratch(NamedTuple):
    """Where programs that share a row meet.

    Attributes:
        values: [n, splits, heads, dim] fp32, tops and sums: [n, splits, heads] fp32, the parts.
        arrived: [2 * n * runs of heads] int32 counters, zero between launches.
    """

    values: Tensor
    tops: Tensor
    sums: Tensor
    arrived: Tensor


class Plan(NamedTuple):
    """How a call is divided, and the knobs of its kernel.

    Attributes:
        tiles: tiles of keys that one program takes, of the window's and then the entries'. splits: how many programs share a row's.
        heads: heads of a program; 0: all. From 64 on, products use the wide instructions of the tensor cores.
        tile: keys of a tile. warps, stages: of the kernel.
        packed: decode keys as pairs of bf16 (the interpreter never does); otherwise one by one in fp32.
        wide: take the kernel for many rows, where there is one (`wide_kernel`); it knows none of the other knobs.
    """

    tiles: int = 0
    splits: int = 1
    heads: int = 0
    tile: int = 64
    warps: int = 8
    stages: int = 1
    packed: bool = True
    wide: bool = False


def tuned(
    window: int, topk: int, *, tiles: int = 0, heads: int = 0, tile: int = 64, warps: int = 8, stages: int = 1, packed: bool = True,
    wide: bool = False,
) -> Plan:  # fmt: skip
    """The plan with these knobs for windows of `window` keys and lists of `topk` entries; no tiles: all of a row's."""
    every = -(-window // tile) - (-topk // tile)
    return Plan(tiles, -(-every // tiles) if tiles else 1, heads, tile, warps, stages, packed, wide)


def tuning_space(rows: int) -> list[dict[str, Any]]:
    """Knobs of `tuned` worth timing for so many rows at the real dimensions, the likeliest first.

    Few rows are divided among many programs; from a row a processor on, only the kernel itself is left to choose.
    """
    names = ("tiles", "heads", "tile", "warps", "stages", "packed")
    if rows <= 4:
        found = [(t, h, 64, w, 1, True) for w in (8, 4) for h in (16, 8) for t in (1, 2)] + [(1, 16, 128, 8, 1, True)]
    elif rows <= 16:
        found = [(t, h, 64, 8, 1, True) for t, h in ((3, 16), (2, 16), (4, 16), (5, 16), (2, 32), (3, 32), (5, 32))]
    elif rows < PROCESSORS:
        found = [(t, h, 64, 8, 1, True) for t, h in ((5, 32), (5, 64), (0, 16), (0, 32), (0, 64), (4, 64), (3, 64))]
    else:
        found = [(0, 64, 64, 8, s, True) for s in (1, 2, 3)] + [(0, 64, 64, 16, 1, True)]
        found += [(0, 64, 32, 8, 1, True), (0, 64, 32, 8, 3, True), (0, 32, 64, 8, 1, True), (0, 64, 64, 8, 1, False)]
    return ([{"wide": True}] if rows > 32 else []) + [dict(zip(names, knobs, strict=True)) for knobs in found]


@lru_cache(1024)
def plan(rows: int, heads: int, dim: int, window: int, topk: int, processors: int = PROCESSORS, *, wide: bool = True) -> Plan:
    """The division with the least estimated time in microseconds, from what an H200 has shown at the real dimensions.

    A program takes 2.2 and 1 for each 9 heads; for a tile 4.2 with up to 16 heads (decoding the keys, mostly), 5.1 with 32 and 5.5 with
    64. The last program of a row joins parts at 45 GB/s. Programs that share a row all run at once.
    The kernel for many rows, which needs `wide`, takes 3 and, for each row of a processor, 4 and 3.2 for each tile.
    """
    best, least = Plan(), math.inf
    if wide and dim == WIDE_DIM and heads > WIDE_HEADS:
        every = -(-window // best.tile) - (-topk // best.tile)
        best, least = Plan(wide=True), 3.0 + -(-rows // processors) * (4.0 + 3.2 * every)
    for count in sorted({heads, *(h for h in (32, 16, 8) if h < heads)}, reverse=True):
        runs, each = -(-heads // count), 4.2 if count <= 16 else 5.1 if count <= 32 else 5.5
        every = -(-window // best.tile) - (-topk // best.tile)
        for tiles in (0, *range(every // 2 + 1, 0, -1)):
            mine = tuned(window, topk, tiles=tiles, heads=count)
            programs = rows * mine.splits * runs
            if mine.splits > MAX_SPLITS or (mine.splits > 1 and programs > processors):
                break
            cost = -(-programs // processors) * (2.2 + count / 9 + each * (tiles or every))
            if mine.splits > 1:
                cost += mine.splits * count * dim * 4 / 45e3
            if cost < least:
                best, least = mine, cost
    return best


def scratch(rows: int, heads: int, dim: int, splits: int, device: torch.device | str) -> Scratch | None:
    """Working memory of `attend` for a plan with so many splits; None when it needs none."""
    if splits == 1:
        return None
    return borrowed(Meeting(rows * splits * heads * (dim + 2), 2 * rows * heads, device), rows, heads, dim, splits)


def borrowed(meeting: Meeting, rows: int, heads: int, dim: int, splits: int) -> Scratch | None:
    """The same in buffers that kernels of one stream share.

    Raises:
        ValueError: they are too small.
    """
    if splits == 1:
        return None
    size, shape = rows * splits * heads, (rows, splits, heads)
    meeting.check(size * (dim + 2), 2 * rows * heads)
    values, tops, sums = meeting.partial[: size * (dim + 2)].split((size * dim, size, size))
    return Scratch(values.view(*shape, dim), tops.view(shape), sums.view(shape), meeting.arrived)


def attend(
    q: Tensor, rings: Tensor, fresh: Tensor, entries: Entries | None, sink: Tensor, scale: float, rows: Rows, out: Tensor,
    split: Plan | None = None, parts: Scratch | None = None, *, rotate: bool = True, tuning: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """`rope.rotate` of q, `sparse_attention` over a row's window keys, oldest first, then its entries in list order, `rope.rotate` back.

    Equal to those three up to the order of fp32 sums and fused multiplications; with a split plan, exponentials are rounded relative to
    other maxima (2^-8). Window key j of a row at position i: max(floor, i - W + 1) <= j <= i; from `start` on it is row offset + j - start
    of `fresh`, before that row j % W of the sequence's ring. Entries behind the first i + 1 of a row's list are not looked at, as there are
    no more. A row at position -1 gives zeros.

    Launches one kernel with a grid that depends on shapes alone. Results do not depend on the order in which its programs end. On a GPU it
    reads all but q while the kernel launched right before it still runs (`dependent`), which must therefore not be one that writes these.

    Floor: a row reads topk * (D/2 + D/16) + W * (D + D/32) bytes of keys and 4 * H * D of q and out: 345 KB for 512 + 128 keys, 64 heads
    and D = 512; 0.08 us a row at 4.2 TB/s, and 84 MFLOP, 0.11 us at 786 TFLOP/s.

    Args:
        q: [n, heads, dim] bf16, contiguous, at most 64 heads; dim a multiple of 32.
        rings: [slots, W, dim + dim/32] uint8, this layer's part of the window pool; only its first stride is free.
        fresh: [rows of the batch, dim + dim/32] uint8, their window rows of this layer.
        entries: None for a layer that has only its window.
        scale: positive. sink: [heads] fp32. out: like q.
        split: of `plan` or `tuned`, by default `plan` for these sizes. Where a wide one cannot be, `plan`'s best other is taken.
        parts: of `scratch` or `borrowed` for it; made here when missing, so give it under a graph.
        rotate: whether q is still to be rotated.
        tuning: knobs of `tuned`, instead of `split`.
    """
    n, heads, dim = q.shape
    window, row_bytes = rings.shape[1:]
    if split is not None and split.splits > MAX_SPLITS:
        raise ValueError(f"a row has at most {MAX_SPLITS} parts, got {split.splits}")
    if heads > MAX_HEADS:
        raise ValueError(f"attend takes at most {MAX_HEADS} heads, got {heads}")
    if dim % QUANT_GROUP or row_bytes != dim + dim // QUANT_GROUP:
        raise ValueError(f"dim must be a multiple of {QUANT_GROUP} and a window row must have dim * 33/32 bytes, got {dim} and {row_bytes}")
    if n == 0:
        return
    turned = 2 * rows.turn.shape[2]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    k = kernels.load(interpreted)
    topk = 0 if entries is None else entries.selected.shape[1]
    if tuning is not None:
        split = tuned(window, topk, **tuning)
    elif split is None:
        split = plan(n, heads, dim, window, topk)
    some = entries or Entries(rows.span, rings, 1, 0, 0)
    if split.wide:
        wide = None if interpreted or dim != WIDE_DIM else wide_kernel(q.device)
        # It reads 16 bytes at a time, the ring and the fresh rows as one memory.
        places = rings.data_ptr(), fresh.data_ptr(), rings.stride(0), some.pool.data_ptr(), some.pool.stride(0), some.codes
        if wide is not None and not any(place % 16 for place in places):
            wide[(min(n, PROCESSORS),)](
                n, q, out, rows.turn, sink, rows.position, rows.span, rows.start, rows.offset, rows.floor, rows.slot, rows.table,
                some.selected, rings, fresh, some.pool, some.codes, some.scales, scale * 2.0**48 * math.log2(math.e),
                rings.stride(0), rows.table.shape[1], H=heads, R=turned, W=window, RB=row_bytes, TOPK=topk, PER_BLOCK=some.per_block,
                BLOCK_BYTES=some.pool.stride(0), ROTATE=rotate, REGISTERS=192, AHEAD=2, num_warps=4,
            )  # fmt: skip
            return
        split = plan(n, heads, dim, window, topk, wide=False)
    if parts is None:
        parts = scratch(n, heads, dim, split.splits, q.device)
    values, tops, sums, arrived = (rows.turn, rows.turn, rows.turn, rows.span) if parts is None else parts
    count = min(split.heads or heads, heads)
    padded, words = max(16, _power(count)), max(16, _power(dim // 4))
    # Those who wait for each other must all find room at once.
    runs = -(-heads // count)
    waiting = split.splits > 1 and not interpreted and n * split.splits * runs <= processors(q.device)
    helpers = min(HELPERS, split.splits) if waiting else 1
    share = -(-count // helpers)
    joined = min(padded if helpers == 1 else _power(share), 64 if split.splits <= 2 else 32 if split.splits <= 4 else 16)  # by registers
    k.attend[(n, split.splits, runs)](
        q, out, values, tops, sums, arrived, rows.turn, sink,
        rows.position, rows.span, rows.start, rows.offset, rows.floor, rows.slot, rows.table, some.selected, rings, fresh, some.pool,
        some.codes, some.scales, scale * 2.0**48 * math.log2(math.e), rings.stride(0), rows.table.shape[1], split.tiles,
        H=heads, HB=count, HP=padded, HJ=joined, D=dim, WP=words, R=turned, W=window, RB=row_bytes,
        TOPK=topk, PER_BLOCK=some.per_block, BLOCK_BYTES=some.pool.stride(0), BK=split.tile, SPLITS=split.splits,
        ROTATE=rotate, PACKED=split.packed and not interpreted, FP4=kernels.FP4_PAIRS, FP8=kernels.FP8_PAIRS, STAGES=split.stages,
        DOT=k.tl.float32 if interpreted else k.tl.bfloat16,
        HELPERS=helpers, SHARE=share if helpers > 1 else padded, LONE=split.splits > 1 and split.tiles == 1,
        num_warps=split.warps if words == 128 else 4, num_stages=2,
        # Before many rows comes a library's product, and whether that lets others begin early is its own business.
        **(dependent.load(interpreted).OPTIONS if n <= DEPENDENT_ROWS else {}),
    )  # fmt: skip


@cache
def wide_kernel(device: torch.device) -> Any | None:
    """The kernel for many rows, or None: it needs a Hopper GPU, and a Triton that has Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from forebay.model.ops.kernels import attend_wide
    except (ImportError, AttributeError) as error:
        log.warning("the attention kernel for many rows does not fit this Triton, the slower one runs: %s", error)
        return None
    return attend_wide.attend_wide


def _power(n: int) -> int:
    """The smallest power of two not below n."""
    return 1 << (n - 1).bit_length()


class Case(NamedTuple):
    """One row of `forebay bench kernels`: what must be moved and computed at least by `run(*make_inputs(device))`."""

    name: str
    make_inputs: Callable[[torch.device], tuple[Any, ...]]
    run: Callable[..., None]
    bytes_floor: int
    flops: int


HEADS, DIM, ROPE, WINDOW, TOPK, BLOCK, BLOCK_BYTES, ROW = 64, 512, 64, 128, 512, 128, 113_920, 528


def bench_cases() -> list[Case]:
    """The real network's Reuse layers: entries of ratio 1 on random pages (codes are random bytes), windows half fresh for many rows."""
    cases = []
    for n in (1, 8, 32, 64, 128, 512, 2048):
        keys = TOPK * (DIM // 2 + DIM // MAIN_KV_GROUP) + WINDOW * ROW
        cases.append(Case(f"attend {n}", _inputs(n), attend, n * (keys + 4 * HEADS * DIM), n * 4 * (TOPK + WINDOW) * HEADS * DIM))
    return cases


def _inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
    def make(device: torch.device) -> tuple[Any, ...]:
        g = torch.Generator(device).manual_seed(n)
        spans, blocks = min(n, 64), 1024

        def below(bound: int, *shape: int) -> Tensor:
            return torch.randint(bound, shape, generator=g, device=device, dtype=torch.int32)

        def window_rows(*shape: int) -> Tensor:
            rows = below(127, *shape, ROW).to(torch.uint8)  # 127 is NaN
            rows[..., DIM:] = 118 + rows[..., DIM:] % 4
            return rows

        per = n // spans
        span = torch.arange(n, device=device, dtype=torch.int32) // per
        start = torch.full((spans,), 60_000, device=device, dtype=torch.int32)
        offset = torch.arange(spans, device=device, dtype=torch.int32) * per
        position = 60_000 + torch.arange(n, device=device) % per
        pool = torch.randint(256, (16_384, BLOCK_BYTES), generator=g, device=device, dtype=torch.uint8)
        codes, scales = 0, BLOCK * DIM // 2  # a source of ratio 1 at the start of its block
        pool[:, scales : scales + BLOCK * DIM // MAIN_KV_GROUP] %= 64
        table = below(16_384, spans, blocks)
        selected = torch.stack([torch.randperm(60_000, generator=g, device=device)[:TOPK].sort()[0] for _ in range(n)]).to(torch.int32)
        angle = torch.rand((n, ROPE // 2), generator=g, device=device)
        turn = torch.stack((angle.cos(), angle.sin()), 1)
        slot = torch.arange(spans, device=device, dtype=torch.int32)
        rows = Rows(position, span, start, offset, torch.zeros_like(start), slot, table, turn)
        q = torch.randn((n, HEADS, DIM), generator=g, device=device).bfloat16()
        sink, out, split = torch.zeros(HEADS, device=device), torch.empty_like(q), plan(n, HEADS, DIM, WINDOW, TOPK)
        entries = Entries(selected, pool, BLOCK, codes, scales)
        parts = scratch(n, HEADS, DIM, split.splits, device)
        return q, window_rows(spans, WINDOW), window_rows(n), entries, sink, DIM**-0.5, rows, out, split, parts

    return make
