"""Storing KV on a GPU: window rows as FP8, entries of kv sources as FP4, each in one pass from the projections to the cache's bytes.

Inputs of a step, all on the device: `position` [n] int64; `span` [n] int32, the sequence of each row, -1 for a row that pads a batch and
writes nothing but its own fresh row; and per sequence, int32: `start` and `stop`, its positions in the batch; `offset`, its first row;
`slot`, its window slot; `floor`, the lowest position read in a window; `write_from`, the position below which no entry is written; `table`
[spans, blocks], its blocks of the pool. Nothing here waits for the device or allocates, so every call can be captured in a graph.

The kernels are in `store`, and run on CPU tensors too while TRITON_INTERPRET=1; that for many entries on Hopper is in `store_wide`. Bytes
equal those of `formats`, `rms_norm`, `rope` and `compress`, but where a sum in another order moves a number across the border of two codes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from forebay.model.ops.kernels.case import Case

log = logging.getLogger(__name__)
MANY = 2048  # rows from which tiles are made for throughput
# Window rows and latents of a program, warps, channels at a time of either.
WINDOW_FEW, WINDOW_MANY = (1, 1, 4, 512, 2048), (4, 4, 4, 256, 256)
# Entries of a program, warps, channels at a time, and for how many times those `wk` is read ahead; of ratio 1 or, GATED, 2.
ENTRIES_FEW, ENTRIES_MANY = (16, 8, 128, 4), (64, 8, 64, 1)
GATED_FEW, GATED_MANY = (16, 8, 128, 4), (32, 16, 128, 0)
WIDE = MANY  # entries of ratio 1 from which `store_wide` stores them, where it can


def tuning_space() -> dict[str, tuple[tuple[int, ...], ...]]:
    """Module constants that a sweep may set, and values worth trying."""
    return {
        "WINDOW_FEW": ((1, 1, 4, 512, 2048), (1, 1, 8, 512, 2048), (1, 1, 4, 256, 256)),
        "WINDOW_MANY": ((4, 4, 4, 256, 256), (8, 8, 8, 256, 256), (2, 2, 2, 256, 256), (4, 8, 4, 256, 256)),
        "ENTRIES_FEW": ((16, 8, 128, 4), (16, 16, 128, 4), (16, 8, 128, 1)),
        "ENTRIES_MANY": ((64, 8, 64, 1), (64, 8, 128, 0), (32, 8, 64, 0)),
        "GATED_FEW": ((16, 8, 128, 4), (16, 16, 128, 4), (16, 8, 128, 1)),
        "GATED_MANY": ((32, 16, 128, 0), (32, 8, 128, 0), (16, 8, 128, 0)),
    }


@dataclass(frozen=True)
class Step:
    """Rows of a step, as above."""

    position: Tensor
    span: Tensor
    start: Tensor
    stop: Tensor
    offset: Tensor
    slot: Tensor
    floor: Tensor
    write_from: Tensor
    table: Tensor

    @property
    def alone(self) -> bool:
        """Whether there are as many sequences as rows, one each: then no row reads what another one's or its own row replaces in a ring."""
        return self.start.numel() == self.position.numel()


@dataclass(frozen=True)
class SourcePlanes:
    """Where a source's entries lie: `ratio`, entries per block, and the byte offset of each plane in a block (`cache.layout`)."""

    ratio: int
    per_block: int
    main_codes: int
    main_scales: int
    index_codes: int
    index_scales: int


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> SimpleNamespace:
    from forebay.model.ops.kernels import store

    return store.load(_interpreted())


@cache
def _wide_kernel(device: torch.device) -> ModuleType | None:
    """The kernel for many entries of ratio 1, or None: it needs a Hopper GPU, and a Triton that has Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from forebay.model.ops.kernels import store_wide
    except (ImportError, AttributeError) as error:
        log.warning("the kernel that stores many entries does not fit this Triton, the slower one runs: %s", error)
        return None
    return store_wide


def _options() -> dict[str, Any]:
    from forebay.model.ops.kernels import dependent

    return dict(dependent.load(_interpreted()).OPTIONS)


def _power(x: int) -> int:
    return 1 << (x - 1).bit_length()


def turn_table(position: Tensor, freqs: Tensor, ratio: int, out: Tensor) -> None:
    """Rotation of each row, for `store_window` (ratio 1) and of the group it belongs to, for `store_entries`.

    Made once per step and frequency table. Differs from `rope.rope_table` by up to 1.2e-7.

    Args:
        position: [n] int64. freqs: [pairs] fp32.
        out: [n, 2, pairs] fp32, the cosines and sines of `position // ratio * ratio`.
    Floor: 8 * pairs bytes a row (256 B at 32 pairs).
    """
    n, pairs = position.numel(), freqs.numel()
    if n:
        k = _kernels()
        k.turn_table[(k.cdiv(n, 8),)](position, freqs, out, n, R=ratio, PAIRS=pairs, PP=_power(pairs), BR=8, num_warps=4, **_options())


def store_window(
    low_q: Tensor,
    low_kv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    turn: Tensor,
    eps: float,
    step: Step,
    fresh: Tensor,
    ring: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    values: Tensor | None = None,
) -> None:
    """Both halves of a layer's input projection on their way on: window KV normed, rotated and stored; query latent normed and rounded.

    Args:
        low_q: [n, q_lora] bf16, low_kv: [n, dim] bf16; each may be a slice of columns of one product.
        q_norm: [q_lora], kv_norm: [dim], bf16 or fp32.
        turn: of `turn_table`, ratio 1.
        fresh: [n, dim + dim/32] uint8, out: E4M3 codes, then E8M0 scales, of this layer's rows.
        ring: [slots, window, dim + dim/32] uint8, this layer's rings: rows that later steps read go there too, for a step whose rows are
            `alone`; another row of its sequence might still read what a row replaces. None: `keep_window`, later.
        codes, scales: [n, q_lora] and [n, q_lora/32] uint8, out: the query latent as FP8.
        values: [n, q_lora] bf16, out: the numbers that `codes` and `scales` stand for.
    Floor: at 1,280 and 512 channels 3,584 B read, 528 B written for the window (1,056 B with `ring`), 1,320 B for codes, 2,560 B for
    values; 256 B of rotations a row.
    """
    n, dim, lora = low_kv.shape[0], low_kv.shape[1], low_q.shape[1]
    if not n:
        return
    k = _kernels()
    rows = WINDOW_MANY if n >= MANY else WINDOW_FEW
    k.window_store[(k.cdiv(n, rows[0]) + k.cdiv(n, rows[1]),)](
        low_q, low_kv, low_q.stride(0), low_kv.stride(0), q_norm, kv_norm, turn, step.position, step.span, step.stop, step.slot,
        fresh, fresh if ring is None else ring, 0 if ring is None else ring.stride(0),
        fresh if codes is None else codes, fresh if scales is None else scales, low_q if values is None else values, n, eps,
        Q=lora, CQ=min(rows[4], max(32, _power(lora))), KV=dim, CK=min(rows[3], max(32, _power(dim))), PAIRS=turn.shape[-1],
        ROW=fresh.shape[1],
        WINDOW=1 if ring is None else ring.shape[1], RING=ring is not None, CODES=codes is not None, VALUES=values is not None,
        BK=rows[0], BQ=rows[1], EARLY=n < MANY, num_warps=rows[2], enable_fp_fusion=False, **_options(),
    )  # fmt: skip


def keep_window(fresh: Tensor, rings: Tensor, step: Step) -> None:
    """Copy the last `window` rows of every sequence into its rings, of any number of layers at once: after their attention, which may
    read what they replace.

    Args: fresh [layers, n, row] uint8, contiguous; rings [slots, layers, window, row] uint8 (a slice of the pool).
    Floor: 2 * 528 B a kept row.
    """
    layers, n, row = fresh.shape
    window = rings.shape[2]
    if not n:
        return
    word: torch.dtype = torch.uint8
    if all(size % 4 == 0 for size in (row, *rings.stride()[:2], rings.storage_offset(), fresh.storage_offset())):
        word = torch.int32
    there, here = rings.view(word), fresh.view(word)
    k, words = _kernels(), here.shape[2]
    k.keep_window[(k.cdiv(n * words, 1024), layers)](
        here, there, there.stride(0), there.stride(1), step.position, step.span, step.stop, step.slot, n, WORDS=words, WINDOW=window,
        BLOCK=1024, num_warps=4, **_options(),
    )  # fmt: skip


def acting_rows(position: Tensor, start: Tensor, stop: Tensor, ratio: int, write_from: Tensor | None = None) -> Tensor:
    """For the host: which rows `store_entries` has something to do for. position, start, stop, write_from [n]: of each row -> [k] int32.

    Those that complete an entry, not below the write floor where it is given, and of each sequence the one that keeps its open token.
    A batch inside a graph passes all its rows instead.
    """
    last = stop - 1
    done = position % ratio == ratio - 1
    if write_from is not None:
        done &= position // ratio >= write_from // ratio
    if ratio > 1:
        done |= (position == torch.where(start % 2 == 1, start, last)) & (last % 2 == 0)
    return done.nonzero().flatten().to(torch.int32)


def store_entries(
    source: Tensor,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    turn: Tensor,
    eps: float,
    step: Step,
    rows: Tensor,
    pool: Tensor,
    planes: SourcePlanes,
    pending: Tensor | None = None,
) -> None:
    """The compressor of one source after its projections: pool, norm, main entry; index key by `wk`, norm; rotate both and store as FP4.

    Args:
        source: ratio 1: [n, dim] bf16. Ratio 2: [n, 2 * dim] fp32, k then gate.
        norm: [dim]; wk: [index dim, dim] bf16; k_norm: [index dim].
        turn: of `turn_table` with this ratio, indexed by row.
        rows: [m] int32, rows in any order, -1 for none: `acting_rows` or more. Each at most once.
        pool: [blocks, block bytes] uint8.
        pending: ratio 2: [slots, 1, 2, dim] fp32, this source's open tokens, read and written.
    Floor at 512 and 128 channels: ratio 1, 1,024 B read and 356 B written an entry, 131 KFLOP; ratio 2, 8,192 B read and 356 B written
    an entry. `wk`, 128 KB, is read from L2 by every tile, but by `store_wide` once a multiprocessor. On an H200
    with a cold L2 cache: ratio 1, 22 % of the speed of a copy at 8,192 rows and 37 % at 65,536; ratio 2, 38 and 47 %.
    """
    if planes.ratio not in (1, 2):
        raise ValueError(f"ratio must be 1 or 2 for the compressor's kernel, got {planes.ratio}")
    if planes.ratio == 2 and pending is None:
        raise ValueError("a source of ratio 2 needs pending")
    m, dim, index = rows.numel(), norm.numel(), k_norm.numel()
    if not m:
        return
    wide = None if _interpreted() or planes.ratio == 2 or m < WIDE else _wide_kernel(source.device)
    if wide is not None and (dim, index, turn.shape[-1], source.dtype, wk.dtype) == wide.SHAPE:
        programs = torch.cuda.get_device_properties(source.device).multi_processor_count
        wide.entry_store[(min(programs, -(-m // wide.ROWS)),)](
            source, source.stride(0), norm, wk, k_norm, turn, rows, m, step.position, step.span, step.write_from,
            step.table, step.table.stride(0), pool, pool.stride(0),
            planes.main_codes, planes.main_scales, planes.index_codes, planes.index_scales, eps,
            PER_BLOCK=planes.per_block, num_warps=wide.WARPS, enable_fp_fusion=False, **_options(),
        )  # fmt: skip
        return
    k = _kernels()
    few, many = (ENTRIES_FEW, ENTRIES_MANY) if planes.ratio == 1 else (GATED_FEW, GATED_MANY)
    tile, warps, chunk, ahead = many if m >= MANY else few
    k.entry_store[(k.cdiv(m, tile),)](
        source, source.stride(0), norm, wk, k_norm, turn, rows, m, step.position, step.span,
        step.start, step.stop, step.offset, step.write_from, step.slot, step.table, step.table.stride(0),
        source if pending is None else pending, 0 if pending is None else pending.stride(0), pool, pool.stride(0),
        planes.main_codes, planes.main_scales, planes.index_codes, planes.index_scales, eps,
        R=planes.ratio, DIM=dim, CH=min(chunk, max(32, _power(dim))), INDEX=index, IP=max(32, _power(index)), PAIRS=turn.shape[-1],
        PER_BLOCK=planes.per_block, BR=tile, AHEAD=ahead, DOT=k.tl.float32 if _interpreted() else k.tl.bfloat16, num_warps=warps,
        enable_fp_fusion=False, **_options(),
    )  # fmt: skip


def bench_cases() -> list[Case]:
    """Decode and prefill batches at the real dimensions; the largest is more than a step has, and shows throughput without the launch."""
    cases: list[Case] = []
    for n in (1, 64, 8192, 65536):
        window_bytes = n * (3584 + 528 + 2560 + 256) + (n * 528 if n <= 64 else 0)
        cases.append(Case(f"store_window n={n}", partial(_bench_inputs, n, 1), _bench_window, window_bytes, 0))
        if n <= 8192:
            cases.append(Case(f"keep_window n={n}", partial(_bench_inputs, n, 1), _bench_keep, 1056 * n, 0))
        for ratio in (1, 2):
            entries = n if n <= 64 else n // ratio
            size = entries * ((1024 if ratio == 1 else 8192) + 356 + 256) + 131072
            cases.append(
                Case(f"store_entries ratio={ratio} n={n}", partial(_bench_inputs, n, ratio), _bench_entries, size, 131072 * entries)
            )
    return cases


def _bench_inputs(n: int, ratio: int, device: torch.device) -> tuple[SimpleNamespace]:
    """Up to 64 rows: as many sequences, each at an odd position. More: 64 sequences of like length."""
    spans = min(n, 64)
    length = n // spans
    g = torch.Generator(device).manual_seed(n)
    start = torch.full((spans,), 4097 if length == 1 else 4096)
    position = (start[:, None] + torch.arange(length)).flatten()
    span = torch.arange(spans).repeat_interleave(length)
    i32 = [x.to(device, torch.int32) for x in (span, start, start + length, torch.arange(spans) * length, torch.arange(spans) + 1)]
    per_block, size = 128 // ratio, 113920
    blocks = 33 + length // 128
    table = torch.randperm(spans * blocks, generator=g, device=device).view(spans, blocks).to(torch.int32)
    i32 += [torch.zeros_like(i32[1]), torch.zeros_like(i32[1]), table]
    step = Step(position.to(device), *i32)
    wide = torch.randn((n, 1792), generator=g, device=device).bfloat16()
    bytes_ = per_block * 256, per_block * 288, per_block * 352
    turn = torch.empty((n, 2, 32), device=device)
    turn_table(step.position, torch.logspace(0, -4, 32, device=device), ratio, turn)
    source = torch.randn((n, 512 * ratio), generator=g, device=device).to(torch.bfloat16 if ratio == 1 else torch.float32)
    rows = acting_rows(position, start[span], start[span] + length, ratio).to(device)
    one = torch.ones(1280, dtype=torch.bfloat16, device=device)
    bench = SimpleNamespace(
        step=step, wide=wide, turn=turn, source=source, rows=rows, n=n,
        q_norm=one[:1280], kv_norm=one[:512], k_norm=one[:128], wk=torch.randn((128, 512), generator=g, device=device).bfloat16(),
        fresh=torch.empty((n, 528), dtype=torch.uint8, device=device),
        ring=torch.zeros((spans + 1, 128, 528), dtype=torch.uint8, device=device),
        values=torch.empty((n, 1280), dtype=torch.bfloat16, device=device),
        pool=torch.zeros((spans * blocks, size), dtype=torch.uint8, device=device),
        planes=SourcePlanes(ratio, per_block, 0, *bytes_), pending=torch.zeros((spans + 1, 1, 2, 512), device=device),
    )  # fmt: skip
    return (bench,)


def _bench_window(b: SimpleNamespace) -> None:
    ring = b.ring if b.n <= 64 else None
    q, kv = b.wide[:, :1280], b.wide[:, 1280:]
    store_window(q, kv, b.q_norm, b.kv_norm, b.turn, 1e-6, b.step, b.fresh, ring, values=b.values)


def _bench_keep(b: SimpleNamespace) -> None:
    keep_window(b.fresh[None], b.ring[:, None], b.step)


def _bench_entries(b: SimpleNamespace) -> None:
    pending = b.pending if b.planes.ratio == 2 else None
    store_entries(b.source, b.kv_norm, b.wk, b.k_norm, b.turn, 1e-6, b.step, b.rows, b.pool, b.planes, pending)
