"""Sparse attention of a step's rows over stored window rows and entries, with sink and both rotations (spec/model.md §3.4)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.model.config import MAIN_KV_GROUP, QUANT_GROUP
from forebay.model.ops.kernels import attend as kernels

PROCESSORS = 132  # of an H200
MAX_HEADS = 64


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
    """Parts of a split softmax: values [n, splits, heads, dim], tops and sums [n, splits, heads], all fp32."""

    values: Tensor
    tops: Tensor
    sums: Tensor


class Plan(NamedTuple):
    """How a call is divided, and the knobs of its kernel.

    Attributes:
        tiles: tiles of keys that one program takes; 0: all of a row's.
        window_splits, splits: how many programs share a row's window, and how many it has in all.
        tile: keys of a tile. warps, stages: of the kernel.
        packed: decode keys as pairs of bf16 (the interpreter never does); otherwise one by one in fp32.
    """

    tiles: int = 0
    window_splits: int = 1
    splits: int = 1
    tile: int = 64
    warps: int = 8
    stages: int = 1
    packed: bool = True


def tuned(window: int, topk: int, *, tiles: int = 0, tile: int = 64, warps: int = 8, stages: int = 1, packed: bool = True) -> Plan:
    """The plan with these knobs for windows of `window` keys and lists of `topk` entries."""
    if not tiles:
        return Plan(0, 1, 1, tile, warps, stages, packed)
    near, far = -(-window // (tile * tiles)), -(-topk // (tile * tiles))
    return Plan(tiles, near, near + far, tile, warps, stages, packed)


def tuning_space(rows: int) -> list[dict[str, Any]]:
    """Knobs of `tuned` worth timing for so many rows at the real dimensions, the likeliest first.

    Few rows are divided among many programs; from a row a processor on, only the kernel itself is left to choose.
    """
    names = ("tiles", "tile", "warps", "stages", "packed")
    if rows <= 16:
        small = [(1, 32, 8, s, True) for s in (1, 2)] if rows <= 4 else []
        found = small + [(t, 64, w, 1, True) for t in (1, 2) for w in (8, 16)] + [(1, 64, 8, 1, False)]
    else:
        found = [(0, 64, 8, s, True) for s in (1, 2, 3)] + [(0, 64, 16, 1, True)]
        found += [(0, 32, 8, 1, True), (0, 32, 8, 3, True), (0, 64, 8, 1, False)]
        if rows < PROCESSORS:
            found += [(t, 64, w, 1, True) for t in (4, 5, 2) for w in (8, 16)]
    return [dict(zip(names, knobs, strict=True)) for knobs in found]


def plan(rows: int, window: int, topk: int, processors: int = PROCESSORS) -> Plan:
    """The split with the least estimated time, in units of a tile's: tiles on the busiest processor, one for joining, and 128 KB a part."""
    whole = tuned(window, topk)
    near, far = -(-window // whole.tile), -(-topk // whole.tile)
    best, least = whole, float(-(-rows // processors) * (near + far))
    for tiles in (4, 2, 1):
        mine = tuned(window, topk, tiles=tiles)
        cost = -(-rows * mine.splits // processors) * tiles + 1.0 + rows * mine.splits / 50
        if mine.splits > 1 and cost < least:
            best, least = mine, cost
    return best


def scratch(rows: int, heads: int, dim: int, splits: int, device: torch.device | str) -> Scratch | None:
    """Working memory of `attend` for a plan with so many splits; None when it needs none."""
    if splits == 1:
        return None
    shape = (rows, splits, heads)
    values = torch.empty((*shape, dim), dtype=torch.float32, device=device)
    return Scratch(values, torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.float32, device=device))


def attend(
    q: Tensor, rings: Tensor, fresh: Tensor, entries: Entries | None, sink: Tensor, scale: float, rows: Rows, out: Tensor,
    split: Plan | None = None, parts: Scratch | None = None, *, rotate: bool = True, tuning: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """`rope.rotate` of q, `sparse_attention` over a row's window keys, oldest first, then its entries in list order, `rope.rotate` back.

    Equal to those three up to the order of fp32 sums and fused multiplications; with a split plan, exponentials are rounded relative to
    other maxima (2^-8). Window key j of a row at position i: max(floor, i - W + 1) <= j <= i; from `start` on it is row offset + j - start
    of `fresh`, before that row j % W of the sequence's ring. A row at position -1 without entries gives zeros.

    Launches one kernel, or two where the plan has several parts a row, with grids that depend on shapes alone.

    Floor: a row reads topk * (D/2 + D/16) + W * (D + D/32) bytes of keys and 4 * H * D of q and out: 345 KB for 512 + 128 keys, 64 heads
    and D = 512; 0.08 us a row at 4.2 TB/s, and 84 MFLOP, 0.11 us at 786 TFLOP/s.

    Args:
        q: [n, heads, dim] bf16, contiguous, at most 64 heads; dim a multiple of 32.
        rings: [slots, W, dim + dim/32] uint8, this layer's part of the window pool; only its first stride is free.
        fresh: [rows of the batch, dim + dim/32] uint8, their window rows of this layer.
        entries: None for a layer that has only its window.
        scale: positive. sink: [heads] fp32. out: like q.
        split: of `plan` or `tuned`, by default `plan` for these sizes. parts: of `scratch` for it; allocated here when missing, so give it
            under a graph.
        rotate: whether q is still to be rotated.
        tuning: knobs of `tuned`, instead of `split`.
    """
    n, heads, dim = q.shape
    window, row_bytes = rings.shape[1:]
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
        split = plan(n, window, topk)
    if parts is None:
        parts = scratch(n, heads, dim, split.splits, q.device)
    values, tops, sums = (rows.turn, rows.turn, rows.turn) if parts is None else parts
    padded, words = max(16, _power(heads)), max(16, _power(dim // 4))
    some = entries or Entries(rows.span, rings, 1, 0, 0)
    k.attend[(n, split.splits)](
        q, out, values, tops, sums, rows.turn, sink,
        rows.position, rows.span, rows.start, rows.offset, rows.floor, rows.slot, rows.table, some.selected, rings, fresh, some.pool,
        scale * 2.0**48 * math.log2(math.e), rings.stride(0), rows.table.shape[1],
        H=heads, HP=padded, D=dim, WP=words, R=turned, W=window, RB=row_bytes,
        TOPK=topk, PER_BLOCK=some.per_block, BLOCK_BYTES=some.pool.stride(0), CODES=some.codes, SCALES=some.scales,
        BK=split.tile, TILES=split.tiles, WINDOW_SPLITS=split.window_splits, SPLITS=split.splits, ROTATE=rotate,
        PACKED=split.packed and not interpreted, FP4=kernels.FP4_PAIRS, FP8=kernels.FP8_PAIRS, STAGES=split.stages,
        DOT=k.tl.float32 if interpreted else k.tl.bfloat16, num_warps=split.warps if padded == 64 and words == 128 else 4, num_stages=2,
    )  # fmt: skip
    if split.splits > 1:
        k.combine[(n, heads)](
            out, values, tops, sums, rows.turn, sink,
            H=heads, D=dim, WP=words, R=turned, SPLITS=split.splits, num_warps=2 if words >= 64 else 1,
        )  # fmt: skip


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
        sink, out, split = torch.zeros(HEADS, device=device), torch.empty_like(q), plan(n, WINDOW, TOPK)
        entries = Entries(selected, pool, BLOCK, codes, scales)
        parts = scratch(n, HEADS, DIM, split.splits, device)
        return q, window_rows(spans, WINDOW), window_rows(n), entries, sink, DIM**-0.5, rows, out, split, parts

    return make
