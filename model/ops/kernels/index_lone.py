"""Index scores of lone rows on Hopper, in Gluon: the same operation as `index.scan` with one row a tile, whose documentation holds here.

A scan of one row is short and reads memory all the while, so what counts is how soon it begins to read and how little it does for a key.
The first thing that a program does is to have the tensor memory accelerator copy its first pages; of what these need (the tile, what it
sees, numbers of pages) nothing waits for anything else, if the first tile's row is row 0 of span 0. Instructions are fetched and queries
read while keys are under way. Few pages at a time, though: copies come in the order they were asked for, and the last of the programs that
share a multiprocessor would wait for all pages of the first. A page's room is given to a later page once its bytes are in registers.

A warp multiplies 16 keys at a time. A thread's registers hold, of its keys, a quarter of each group's packed codes, which is where the
tensor cores want the decoded slots. The four groups' products are asked for one behind the other, then scaled and added. Heads are summed
by tensor products of each warp's own, which gave the same bits as those of `index.scan` for a million keys.

`_await` comes behind the first copies: keys, tables, tiles and visible numbers must be older than the kernel before.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102
# The body of a kernel is Gluon, whose values have other types than the Python that it looks like. It knows no starred values, and what
# is known when it is compiled must be a condition of its own.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait

from forebay.model.ops.kernels import dependent, index

_await = dependent.load(False)._await_gluon
FOURS = gl.constexpr(index.E2M1)
RUN = gl.constexpr(8)  # columns of a block of candidates
# What changed its name after Triton 3.6.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Two keys lie in a line of 128 bytes. Lanes: four words of a group, which key, lines; registers: bytes, groups, eights of keys.
CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [4, 0]], [[0, 4], [0, 8], [0, 64], [1, 0], [2, 0]], [[8, 0], [16, 0]], [], [32, 128]
    )
)
# Of the same keys, all four groups' scales.
SCALES = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
WORDS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))  # a thread has a key's four scales, 32 keys are a line
DOTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 32]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, DOTS, 4))
PARTS = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
# Scores: each lane has one. Warps, lines of eight keys, which eight (those of the other half of 64 follow).
LAST = gl.constexpr(
    gl.DistributedLinearLayout([], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 4])
)
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
SLOTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2))
CODE_LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
FACTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SCALE_LINES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles(tile_first, tile_rows, span, visible, count, rows, TILES: gl.constexpr):
    """First rows, spans and visible numbers of all tiles; nothing waits for `tile_first` where tile i's row is row i."""
    # Every warp has all of them, so that sums over tiles take no barrier.
    tile = gl.arange(0, TILES, gl.BlockedLayout([1 if TILES < 32 else TILES // 32], [32], [4], [0]))
    there = tile < count
    guess = there & (tile < rows)
    first = gl.load(tile_first + tile, mask=there, other=0)
    many = gl.load(tile_rows + tile, mask=there, other=0)
    line = gl.load(span + tile, mask=guess, other=0)
    seen = gl.load(visible + tile, mask=guess, other=0)
    wrong = there & (first != tile)
    line = gl.load(span + first, mask=wrong, other=line)
    seen = gl.load(visible + first, mask=wrong, other=seen)
    return first, line, gl.where(many > 0, seen, 0)


@gluon.jit
def _pick(piece, first, line, seen, pieces, ends):
    """Of the tile that has a piece: its row, span, visible number, first piece, and the one behind its last."""
    mine = (ends > piece) & (ends - pieces <= piece)
    row, line, seen = gl.sum(gl.where(mine, first, 0), 0), gl.sum(gl.where(mine, line, 0), 0), gl.sum(gl.where(mine, seen, 0), 0)
    return row, line, seen, gl.sum(gl.where(mine, ends - pieces, 0), 0), gl.sum(gl.where(mine, ends, 0), 0)


@gluon.jit
def _copy(
    codes, scales, page, piece, kept, words, full, stage, some, KEYS: gl.constexpr, ENTRIES: gl.constexpr, LINES: gl.constexpr
):  # fmt: skip
    mbarrier.expect(full.index(stage), KEYS * 68, pred=some)
    line = page * LINES
    part = 0 if KEYS == ENTRIES else piece % (ENTRIES // KEYS)
    load(codes, [line + part * (KEYS // 2), 0], full.index(stage), kept.index(stage), pred=some)
    load(scales, [line + part * (KEYS // 32), 0], full.index(stage), words.index(stage), pred=some)


@gluon.jit
def _query(q, weights, row, slots, H: gl.constexpr):
    """Puts a row's queries, by groups, into shared memory; its heads' weights times their powers, bf16."""
    head = gl.arange(0, 32, gl.SliceLayout(1, QUERY))
    slot = gl.arange(0, 32, gl.SliceLayout(0, QUERY))
    at = (row.to(gl.int64) * H + head)[:, None] * 144 + slot[None, :]
    live = (head < H)[:, None]
    x0, x1 = gl.load(q + at, mask=live, other=0), gl.load(q + at + 32, mask=live, other=0)
    x2, x3 = gl.load(q + at + 64, mask=live, other=0), gl.load(q + at + 96, mask=live, other=0)
    head = gl.arange(0, 32, gl.SliceLayout(0, DOTS))
    weight = gl.load(weights + row.to(gl.int64) * H + head, mask=head < H, other=0.0).to(gl.float32)
    power = (q + (row.to(gl.int64) * H + head) * 144 + 128).to(gl.pointer_type(gl.float32), bitcast=True)
    weight *= gl.load(power, mask=head < H, other=0.0)
    barrier()  # no warp multiplies by the row before any more
    slots.index(0).store(x0.to(gl.float8e5, bitcast=True))
    slots.index(1).store(x1.to(gl.float8e5, bitcast=True))
    slots.index(2).store(x2.to(gl.float8e5, bitcast=True))
    slots.index(3).store(x3.to(gl.float8e5, bitcast=True))
    fence_async_shared()
    barrier()
    return weight.to(gl.bfloat16)


@gluon.jit
def _group(low, high):
    keys = gl.join(low, high).permute((0, 2, 1)).reshape([64, 32]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(keys, OPERAND, assert_trivial=True)


@gluon.jit
def _decoded(packed):
    """Packed codes [lines, 128] of 64 keys -> E4M3 operands of the four groups, [64, 32] each."""
    low, high = gl.inline_asm_elementwise(
        FOURS,
        "=&r,=r,r", [packed], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4,
    )  # fmt: skip
    low_even, low_odd = gl.split(low.reshape([64, 2, 2, 16]).permute((0, 3, 1, 2)))
    high_even, high_odd = gl.split(high.reshape([64, 2, 2, 16]).permute((0, 3, 1, 2)))
    low0, low2 = gl.split(low_even)
    low1, low3 = gl.split(low_odd)
    high0, high2 = gl.split(high_even)
    high1, high3 = gl.split(high_odd)
    return _group(low0, high0), _group(low1, high1), _group(low2, high2), _group(low3, high3)


@gluon.jit
def _powers(word, KEYS: gl.constexpr):
    """Words of four scales [lines, 32] -> powers of two, fp32 [KEYS, 4]."""
    s0 = ((word << 23) & 0x7F800000).to(gl.float32, bitcast=True)
    s1 = ((word << 15) & 0x7F800000).to(gl.float32, bitcast=True)
    s2 = ((word << 7) & 0x7F800000).to(gl.float32, bitcast=True)
    s3 = ((word >> 1) & 0x7F800000).to(gl.float32, bitcast=True)
    return gl.join(gl.join(s0, s2), gl.join(s1, s3)).reshape([KEYS, 4])


@gluon.jit
def _rowwise(power):
    return gl.convert_layout(power, gl.SliceLayout(1, DOTS), assert_trivial=True)[:, None]


@gluon.jit
def _scores(packed, powers, slots, weight):
    """Packed codes and scales [64, 4] of 64 keys -> their scores, fp32 of bf16 values, [warps, eights, 8, copies]."""
    zero = gl.zeros([64, 32], gl.float32, DOTS)
    k0, k1, k2, k3 = _decoded(packed)
    even, odd = gl.split(powers.reshape([64, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    d0 = warpgroup_mma(k0, slots.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    d1 = warpgroup_mma(k1, slots.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
    d2 = warpgroup_mma(k2, slots.index(2).permute((1, 0)), zero, use_acc=False, is_async=True)
    d3 = warpgroup_mma(k3, slots.index(3).permute((1, 0)), zero, use_acc=False, is_async=True)
    d0 = warpgroup_mma_wait(3, deps=(d0,))
    total = d0 * _rowwise(s0)
    d1 = warpgroup_mma_wait(2, deps=(d1,))
    total += d1 * _rowwise(s1)
    d2 = warpgroup_mma_wait(1, deps=(d2,))
    total += d2 * _rowwise(s2)
    d3 = warpgroup_mma_wait(0, deps=(d3,))
    total += d3 * _rowwise(s3)
    total, w = gl.broadcast(total, weight[None, :])
    part = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, z;
        mov.b32 z, 0x80008000;
        cvt.rn.relu.bf16x2.f32 a, $2, $1;
        fma.rn.bf16x2 $0, a, $3, z;
        }
        """,
        "=r,r,r,r", [total, w], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
    part = gl.convert_layout(part, PARTS, assert_trivial=True)
    ones = gl.full([32, 8], 1.0, gl.bfloat16, gl.DotOperandLayout(1, SUMS, 2))
    sums = mma_v2(part, ones, gl.zeros([64, 8], gl.float32, SUMS))
    sums, _ = gl.split(sums.reshape([64, 4, 2]))  # all columns are alike
    return gl.split(sums.reshape([4, 2, 8, 4]).permute((0, 2, 3, 1)))


@gluon.jit
def _put(
    a, b, begin, mine, row, out, maxima, out_stride, maxima_stride, columns, KEYS: gl.constexpr, MAXIMA: gl.constexpr
):  # fmt: skip
    """Scores of a piece from entry `begin` on: a, b of its first 64 keys and its last, each a pair: eights of even and of odd numbers."""
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, LAST)))[None, :][None, :, :]
    place = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, LAST)))[:, None][None, :, :] + (t & 1) * 8 + (t >> 1) * 64
    entry = begin + place + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAST)))[:, None][:, :, None] * 16
    a0, a1 = gl.convert_layout(a[0], LAST, assert_trivial=True), gl.convert_layout(a[1], LAST, assert_trivial=True)
    b0, b1 = gl.convert_layout(b[0], LAST, assert_trivial=True), gl.convert_layout(b[1], LAST, assert_trivial=True)
    score = gl.where(t < 2, gl.where(t == 0, a0, a1), gl.where(t == 2, b0, b1)).to(gl.bfloat16).to(gl.float32)
    score = gl.where(entry < mine, score, float("-inf"))
    some = (entry < columns) & (t < KEYS // 32)
    gl.store(out + row.to(gl.int64) * out_stride + entry, score.to(gl.bfloat16), mask=some)
    if MAXIMA:
        best = gl.max(gl.where(score == score, score, float("inf")), 1)
        t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAST)))[None, :]
        run = begin // RUN + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, LAST)))[:, None] * 2 + (t & 1) + (t >> 1) * 8
        best = gl.where((run == (mine - 1) // RUN) & (run * RUN < mine), float("inf"), best)
        some = (run * RUN < columns) & (t < KEYS // 32)
        gl.store(maxima + row.to(gl.int64) * maxima_stride + run, best.to(gl.bfloat16), mask=some)


@gluon.jit(do_not_specialize=["table_stride", "out_stride", "maxima_stride", "columns", "count", "rows", "blocks"])
def scan(
    q, weights, codes, scales, table, tile_first, tile_rows, span, visible, out, maxima,
    table_stride, out_stride, maxima_stride, columns, count, rows, blocks,
    H: gl.constexpr, KEYS: gl.constexpr, ENTRIES: gl.constexpr, LINES: gl.constexpr, MAXIMA: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A piece is KEYS keys, 64 or 128, of one page. One tile: every program takes every num_programs-th piece; more: a run of all pieces.

    codes: descriptor of lines of 128 bytes, copied KEYS / 2 at once. scales: of lines of 32 words, copied KEYS / 32 at once.
    LINES: from a page to the next. rows: of `visible`. blocks: of a line of the table.
    """
    PER: gl.constexpr = ENTRIES // KEYS
    kept = gl.allocate_shared_memory(gl.uint8, [STAGES, KEYS // 2, 128], codes.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS // 32, 32], scales.layout)
    factors = gl.allocate_shared_memory(gl.float32, [KEYS, 4], FACTORS)
    slots = gl.allocate_shared_memory(gl.float8e5, [4, 32, 32], SLOTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pid, programs = gl.program_id(0), gl.num_programs(0)
    if TILES == 1:
        piece, step = pid, programs
        row, many = gl.load(tile_first), gl.load(tile_rows)
        line, seen = gl.load(span), gl.load(visible)
        pages = ()
        places = ()  # pieces within their tile
        for i in gl.static_range(STAGES + 1):
            places = places + (piece + i * step,)
            pages = pages + (gl.load(table + (piece + i * step) // PER, mask=(piece + i * step) // PER < blocks, other=0),)
        seen = gl.where(many > 0, gl.load(visible + row, mask=row != 0, other=seen), 0)
        line = gl.where(many > 0, gl.load(span + row, mask=row != 0, other=line), 0)  # padding is of no span
        guess = pages
        pages = ()
        base = table + line.to(gl.int64) * table_stride
        for i in gl.static_range(STAGES + 1):
            some = ((piece + i * step) // PER < blocks) & (line != 0)
            pages = pages + (gl.load(base + (piece + i * step) // PER, mask=some, other=guess[i]),)
        begin, end, behind, stop = 0, 0, 0, (gl.minimum(seen, columns) + KEYS - 1) // KEYS
    else:
        firsts, lines, sights = _tiles(tile_first, tile_rows, span, visible, count, rows, TILES)
        pieces = (gl.minimum(sights, columns) + KEYS - 1) // KEYS
        ends = gl.associative_scan(pieces, 0, _add)
        total = gl.sum(pieces, 0).to(gl.int64)
        piece, step = (total * pid // programs).to(gl.int32), 1
        stop = (total * (pid + 1) // programs).to(gl.int32)
        row, line, seen, begin, end = _pick(piece, firsts, lines, sights, pieces, ends)
        # What is being copied is a page of another tile at times.
        base, behind, upto = table + line.to(gl.int64) * table_stride, begin, end
        pages = ()
        places = ()
        for i in gl.static_range(STAGES + 1):
            if piece + i >= upto and piece + i < stop:
                _, line, _, behind, upto = _pick(piece + i, firsts, lines, sights, pieces, ends)
                base = table + line.to(gl.int64) * table_stride
            places = places + (piece + i - behind,)
            pages = pages + (gl.load(base + (piece + i - behind) // PER, mask=piece + i < stop, other=0),)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        _copy(codes, scales, pages[i], places[i], kept, words, full, i, piece + i * step < stop, KEYS, ENTRIES, LINES)
    page = pages[STAGES]
    _await()
    weight = _query(q, weights, row, slots, H)
    stage = 0
    phase = 0
    for number in range(piece, stop, step):
        if TILES > 1:
            if number >= end:
                row, _, seen, begin, end = _pick(number, firsts, lines, sights, pieces, ends)
                weight = _query(q, weights, row, slots, H)
        mbarrier.wait(full.index(stage), phase)
        packed = kept.index(stage).slice(0, 32, 0).load(CODES)
        if KEYS == 128:
            packed2 = kept.index(stage).slice(32, 32, 0).load(CODES)
        factors.store(_powers(words.index(stage).load(WORDS), KEYS))
        ahead = number + STAGES * step
        _copy(codes, scales, page, ahead - behind, kept, words, full, stage, ahead < stop, KEYS, ENTRIES, LINES)
        ahead += step
        if TILES > 1:
            if ahead >= upto and ahead < stop:
                _, line, _, behind, upto = _pick(ahead, firsts, lines, sights, pieces, ends)
                base = table + line.to(gl.int64) * table_stride
        page = gl.load(base + (ahead - behind) // PER, mask=ahead < stop, other=0)
        a = _scores(packed, factors.slice(0, 64, 0).load(SCALES), slots, weight)
        if KEYS == 128:
            b = _scores(packed2, factors.slice(64, 64, 0).load(SCALES), slots, weight)
        else:
            b = a
        _put(a, b, (number - begin) * KEYS, seen, row, out, maxima, out_stride, maxima_stride, columns, KEYS, MAXIMA)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
