"""The mHC step of many rows on Hopper, in Gluon: the same operation as `streams.step`'s whole mix, whose documentation holds here too.

A program has 128 columns of every stream, and keeps its part of fn in registers, as the tensor cores take it. Rows pass by, 16 at a time:
the tensor memory accelerator brings tiles of 16 rows some tiles ahead, and takes the new streams away from where the old ones were
(`_carry`, one warp). Eight warps mix and multiply (`_mix`), and wait for no other processor. What must wait for other programs is one
turn of TILES tiles late or more, and the collapsed input is in shared memory until then. Four warps add sums of the product and of
squares up over the eight and write them to where all programs' are (`_sums`). One warp tells the other programs and waits for theirs
(`_meet`), which by itself takes most of the time that a turn has. Four warps norm and round (`_norm`). Coefficients are made in the end,
from sums of whole rows in `raw`.

What is behind a barrier's wait is written by other warps: `full` tells that a tile is there, `mixed` that its new streams are, `told`
that its sums are, `free` that their room may be written again; `summed` that a turn's sums are in memory, `known` that those of all
programs are, and `kept` that the room of the turn's collapsed input is free.
"""

# mypy: ignore-errors
# The body of a kernel is Gluon, whose values have other types than the Python that it looks like.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from forebay.model.ops.kernels.streams_tile import (
    COLUMNS,
    FOUR,
    FOUR_SHARED,
    MATRIX,
    MATRIX_SHARED,
    MIX,
    NORM,
    NP,
    PLACES,
    PLAIN2,
    PLAIN3,
    SQUARES,
    STREAMS,
    SUMS,
    TILE,
    TILES_LAYOUT,
    TILES_SHARED,
    C,
    N,
    P,
    R,
    _again,
    _apart,
    _bf16,
    _coefficients,
    _columns,
    _copy,
    _fp32,
    _left,
    _mixed,
    _normed,
    _projection,
    _put,
    _row,
    _summed,
    inner_layout,
    share_layout,
)

__all__ = ["COLUMNS", "FOUR_SHARED", "MATRIX_SHARED", "PLACES", "STREAMS", "SUMS", "TILE", "TILES_SHARED", "step_wide"]

# What changed its name after Triton 3.6.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
take = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _carry(
    streams, out, y, post, comb, pre, group, groups, first, count, t0, t1, t2, t3, ys, combs, posts, pres, full, mixed,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Has tiles brought and taken away."""
    for i in gl.static_range(STAGES):
        _copy(streams, y, post, comb, pre, _row(i, group, groups), first, i, i < count, t0, t1, t2, t3, ys, combs, posts, pres, full, D)
    stage, phase = count * 0, count * 0
    for i in range(count):
        mbarrier.wait(mixed.index(stage), phase)
        row = _row(i, group, groups)
        take(out, [row, first], t0.index(stage))
        take(out, [row, D + first], t1.index(stage))
        take(out, [row, 2 * D + first], t2.index(stage))
        take(out, [row, 3 * D + first], t3.index(stage))
        tma.store_wait(4)  # the tile before this one: when its new streams have been read, its room is for another
        ahead = i - 1 + STAGES
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        some = (i > 0) & (ahead < count)
        _copy(streams, y, post, comb, pre, _row(ahead, group, groups), first, before, some, t0, t1, t2, t3, ys, combs, posts, pres, full, D)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    tma.store_wait(0)


@gluon.jit
def _mix(
    fn, first, count, t0, t1, t2, t3, ys, combs, posts, pres, cs, s0, s1, s2, squares, insides, full, mixed, told, free, kept,
    D: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    u0, u1, u2 = _projection(fn, first, 0, D)
    v0, v1, v2 = _projection(fn, first, 1, D)
    w0, w1, w2 = _projection(fn, first, 2, D)
    # Nothing, which the compiler does not know.
    zero = gl.inline_asm_elementwise("shr.u32 $0, $1, 31;", "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    zero = gl.full([16, 128], zero.to(gl.int16).to(gl.bfloat16, bitcast=True), gl.bfloat16, MIX)
    stage, phase, slot, round, turn, late = 0, 0, 0, 1, 0, 1
    for i in range(count):
        mbarrier.wait(full.index(stage), phase)
        h0, h1, h2, h3 = _apart(posts.index(stage).load(FOUR))
        c0, c1, c2, c3 = _columns(combs.index(stage).load(MATRIX))
        x0, x1 = _fp32(t0.index(stage).load(MIX)), _fp32(t1.index(stage).load(MIX))
        x2, x3 = _fp32(t2.index(stage).load(MIX)), _fp32(t3.index(stage).load(MIX))
        o = _fp32(ys.index(stage).load(MIX))
        b0 = _mixed(x0, x1, x2, x3, o, h0, c0)
        b1 = _mixed(x0, x1, x2, x3, o, h1, c1)
        b2 = _mixed(x0, x1, x2, x3, o, h2, c2)
        b3 = _mixed(x0, x1, x2, x3, o, h3, c3)
        p0, p1, p2, p3 = _apart(pres.index(stage).load(FOUR))
        t0.index(stage).store(b0)  # each thread where it has read
        t1.index(stage).store(b1)
        t2.index(stage).store(b2)
        t3.index(stage).store(b3)
        t = _left(_again(b0, zero), _again(b1, zero), _again(b2, zero), _again(b3, zero))
        u = _summed(t, u0, u1, u2)
        v = _summed(t, v0, v1, v2)
        w = _summed(t, w0, w1, w2)
        x0, x1, x2, x3 = _fp32(b0), _fp32(b1), _fp32(b2), _fp32(b3)
        c = _bf16(p0 * x0 + p1 * x1 + p2 * x2 + p3 * x3)
        square = gl.sum((x0 * x0 + x1 * x1 + (x2 * x2 + x3 * x3)).reshape([16, 8, 16]), 2)
        f = _fp32(c)
        inside = gl.sum((f * f).reshape([16, 8, 16]), 2)
        sub = i % TILES
        if sub == 0:
            mbarrier.wait(kept.index(turn), late)
        cs.index(turn * TILES + sub).store(c)
        mbarrier.wait(free.index(slot), round)
        s0.index(slot).store(u)
        s1.index(slot).store(v)
        s2.index(slot).store(w)
        squares.index(slot).store(square)
        insides.index(slot).store(inside)
        fence_async_shared()
        barrier()
        mbarrier.arrive(mixed.index(stage), count=1)
        mbarrier.arrive(told.index(slot), count=1)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
        slot += 1
        round = gl.where(slot == SLOTS, round ^ 1, round)
        slot = gl.where(slot == SLOTS, 0, slot)
        if sub == TILES - 1:
            turn += 1
            late = gl.where(turn == KEPT, late ^ 1, late)
            turn = gl.where(turn == KEPT, 0, turn)


@gluon.jit
def _sums(
    scale, base, new_pre, new_post, new_comb, partial, raw, n, group, groups, split, count, turns, eps, hc_eps,
    s0, s1, s2, squares, insides, told, free, summed, known,
    D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr, LATE: gl.constexpr, SPLITS: gl.constexpr,
    SP: gl.constexpr, TR: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    """Adds up over warps and, of the program's share of rows, over programs; in the end, makes coefficients of that."""
    BR: gl.constexpr = R * TILES
    WORDS: gl.constexpr = BR * (SPLITS * NP + SP)
    H: gl.constexpr = share_layout(TR, SP)
    slot, phase, turn, met, round = group * 0, group * 0, group * 0, group * 0, group * 0
    last = turns * TILES + LATE
    for i in range(-1, last + 1):
        sub = i % TILES
        if (i >= 0) & (i < count):
            place = group * P + i // TILES % P
            at = partial + (place * WORDS + sub * (R * SPLITS * NP))
            mbarrier.wait(told.index(slot), phase)
            _put(s0.index(slot), at, 0, split, SPLITS)
            _put(s1.index(slot), at, 1, split, SPLITS)
            _put(s2.index(slot), at, 2, split, SPLITS)
            r = gl.arange(0, 16, gl.SliceLayout(1, SQUARES))
            col = gl.arange(0, 8, gl.SliceLayout(0, SQUARES))[None, :]
            square = gl.sum(squares.index(slot).load(SQUARES), 1)
            square = gl.where(col == 0, square[:, None], 0.0)  # whole sectors: parts of them made 4,096 rows 11 us slower
            gl.store(at + ((r * SPLITS + split) * NP + 24)[:, None] + col, square)
            inner = partial + (place * WORDS + BR * SPLITS * NP + sub * (R * SP))
            gl.store(inner + r * SP + split, gl.sum(insides.index(slot).load(SQUARES), 1))
            barrier()
            mbarrier.arrive(free.index(slot), count=1)
            slot += 1
            phase = gl.where(slot == SLOTS, phase ^ 1, phase)
            slot = gl.where(slot == SLOTS, 0, slot)
            if (sub == TILES - 1) | (i == count - 1):
                mbarrier.arrive(summed.index(turn), count=1)
                turn = gl.where(turn == KEPT - 1, 0, turn + 1)
        if (i >= TILES + LATE) & (sub == LATE % TILES):
            u = (i - LATE) // TILES - 1
            mbarrier.wait(known.index(met), round)
            met += 1
            round = gl.where(met == KEPT, round ^ 1, round)
            met = gl.where(met == KEPT, 0, met)
            at = partial + (group * P + u % P) * WORDS
            r = split * TR + gl.arange(0, TR, gl.SliceLayout(1, gl.SliceLayout(2, H)))
            part = gl.arange(0, SP, gl.SliceLayout(0, gl.SliceLayout(2, H)))
            col = gl.arange(0, NP, gl.SliceLayout(0, gl.SliceLayout(1, H)))
            there = ((r < BR)[:, None] & (part < SPLITS)[None, :])[:, :, None]
            whole = at + ((r * SPLITS)[:, None] + part[None, :])[:, :, None] * NP + col[None, None, :]
            whole = gl.sum(gl.load(whole, mask=there, other=0.0, cache_modifier=".cg"), 1)
            r = split * TR + gl.arange(0, TR, gl.SliceLayout(1, gl.SliceLayout(1, H)))
            row = _row(u * TILES + r // R, group, groups) + r % R
            here = (r < BR) & (row < n)
            gl.store(raw + (row * NP)[:, None] + col[None, :], whole, mask=here[:, None] & (col <= N)[None, :])
        if (i < 0) | (i == last):  # at first without rows: in the end, the instructions are in the cache
            barrier()
            _coefficients(
                group, groups, gl.where(i < 0, 0, turns), split, n, raw, scale, base, new_pre, new_post, new_comb, eps, hc_eps,
                D, TILES, TR, ITERATIONS,
            )  # fmt: skip


@gluon.jit
def _meet(arrived, group, split, turns, summed, known, SPLITS: gl.constexpr, KEPT: gl.constexpr):
    """Tells the other programs of a row block that this one's sums are there, and this one when all are."""
    mine = gl.where(split == 0, 1024 - (SPLITS - 1), 1)
    # Whoever comes last makes it a multiple: before this program comes, it is as now but for those that have come.
    goal = gl.load(arrived + group) & -1024
    turn, phase = group * 0, group * 0
    for _ in range(turns):
        mbarrier.wait(summed.index(turn), phase)
        gl.atomic_add(arrived + group, mine, sem="release")
        goal += 1024
        seen = goal - 1
        while seen - goal < 0:
            seen = gl.atomic_add(arrived + group, 0, sem="acquire")
        barrier()
        mbarrier.arrive(known.index(turn), count=1)
        turn += 1
        phase = gl.where(turn == KEPT, phase ^ 1, phase)
        turn = gl.where(turn == KEPT, 0, turn)


@gluon.jit
def _norm(
    norm, x, rounded, codes, scales, partial, n, group, groups, first, turns, eps, cs, known, kept,
    D: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, SPLITS: gl.constexpr, SP: gl.constexpr, ROUNDED: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """Norms and rounds the collapsed input."""
    BR: gl.constexpr = R * TILES
    WORDS: gl.constexpr = BR * (SPLITS * NP + SP)
    INNER: gl.constexpr = inner_layout(SP)
    gain = gl.load(norm + first + gl.arange(0, 128, gl.SliceLayout(0, NORM))).to(gl.float32)[None, :]
    r = gl.arange(0, 16, gl.SliceLayout(1, INNER))
    part = gl.arange(0, SP, gl.SliceLayout(0, INNER))
    turn, phase = group * 0, group * 0
    for u in range(turns):
        mbarrier.wait(known.index(turn), phase)
        at = partial + ((group * P + u % P) * WORDS + BR * SPLITS * NP)
        every = ()
        for k in gl.static_range(TILES):
            inner = at + ((k * R + r) * SP)[:, None] + part[None, :]
            every = every + (gl.load(inner, mask=(part < SPLITS)[None, :], other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        for k in gl.static_range(TILES):
            f = gl.rsqrt(gl.sum(every[k], 1) / D + eps)
            f = gl.convert_layout(f, gl.SliceLayout(1, NORM), assert_trivial=True)[:, None]
            c = cs.index(turn * TILES + k).load(NORM)
            _normed(c, f, gain, _row(u * TILES + k, group, groups), first, n, x, rounded, codes, scales, D, ROUNDED, CODES)
        barrier()
        mbarrier.arrive(kept.index(turn), count=1)
        turn += 1
        phase = gl.where(turn == KEPT, phase ^ 1, phase)
        turn = gl.where(turn == KEPT, 0, turn)


@gluon.jit(do_not_specialize=["n", "groups"])
def step_wide(
    streams, out, y, post, comb, pre, fn, scale, base, norm, x, rounded, codes, scales, new_pre, new_post, new_comb, partial, raw, arrived,
    n, groups, eps, hc_eps,
    D: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr, SPLITS: gl.constexpr,
    SP: gl.constexpr, TR: gl.constexpr, ITERATIONS: gl.constexpr, ROUNDED: gl.constexpr, CODES: gl.constexpr, LATE: gl.constexpr,
    REGISTERS: gl.constexpr, NORM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program (group, split): C columns of the tiles group, group + groups, ... of R rows, TILES a turn.

    Descriptors: streams, out [n, 4 * D] and y [n, D], by tiles [R, C]; comb [n, 16]; post, pre [n, 4].
    All of the grid must be on the device.
    partial [groups, PLACES]: sums [rows of a turn, SPLITS, SUMS], then squares of the collapsed input [rows of a turn, SP]. raw [n, SUMS]:
    sums of whole rows. arrived [groups]: counters of meetings, which grow by 1024 each. TR: rows of a turn that a program sums up.
    """
    gl.static_assert(2 * KEPT <= P, "a place would be written to before all have read it")
    gl.static_assert(LATE < KEPT * TILES - 1, "a turn would be waited for when the next of its kind is there")
    # Each with a room of its own: between two uses of the same, the compiler puts a barrier.
    t0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, C], TILES_LAYOUT)
    t1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, C], TILES_LAYOUT)
    t2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, C], TILES_LAYOUT)
    t3 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, C], TILES_LAYOUT)
    ys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, C], TILES_LAYOUT)
    combs = gl.allocate_shared_memory(gl.float32, [STAGES, R, 16], comb.layout)
    posts = gl.allocate_shared_memory(gl.float32, [STAGES, R, 4], post.layout)
    pres = gl.allocate_shared_memory(gl.float32, [STAGES, R, 4], pre.layout)
    cs = gl.allocate_shared_memory(gl.bfloat16, [KEPT * TILES, R, C], TILES_LAYOUT)
    s0 = gl.allocate_shared_memory(gl.float32, [SLOTS, 8, R, 8], PLAIN3)
    s1 = gl.allocate_shared_memory(gl.float32, [SLOTS, 8, R, 8], PLAIN3)
    s2 = gl.allocate_shared_memory(gl.float32, [SLOTS, 8, R, 8], PLAIN3)
    squares = gl.allocate_shared_memory(gl.float32, [SLOTS, R, 8], PLAIN2)
    insides = gl.allocate_shared_memory(gl.float32, [SLOTS, R, 8], PLAIN2)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mixed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    kept = gl.allocate_shared_memory(gl.int64, [KEPT, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [KEPT, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [KEPT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(mixed.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(KEPT):
        mbarrier.init(kept.index(i), count=1)
        mbarrier.init(summed.index(i), count=1)
        mbarrier.init(known.index(i), count=1)
    fence_async_shared()
    barrier()
    split = gl.program_id(0) % SPLITS
    group = gl.program_id(0) // SPLITS
    first = split * C
    tiles = (n + R - 1) // R
    count = (tiles - group + groups - 1) // groups
    turns = (count + TILES - 1) // TILES
    gl.warp_specialize(
        [
            (_mix, (fn, first, count, t0, t1, t2, t3, ys, combs, posts, pres, cs, s0, s1, s2, squares, insides, full, mixed, told,
                    free, kept, D, TILES, STAGES, SLOTS, KEPT)),
            (_sums, (scale, base, new_pre, new_post, new_comb, partial, raw, n, group, groups, split, count, turns, eps, hc_eps,
                     s0, s1, s2, squares, insides, told, free, summed, known, D, TILES, SLOTS, KEPT, LATE, SPLITS, SP, TR, ITERATIONS)),
            (_norm, (norm, x, rounded, codes, scales, partial, n, group, groups, first, turns, eps, cs, known, kept,
                     D, TILES, KEPT, SPLITS, SP, ROUNDED, CODES)),
            (_carry, (streams, out, y, post, comb, pre, group, groups, first, count, t0, t1, t2, t3, ys, combs, posts, pres, full,
                      mixed, D, STAGES)),
            (_meet, (arrived, group, split, turns, summed, known, SPLITS, KEPT)),
        ],
        [4, 4, 1, 1],
        [REGISTERS, NORM_REGISTERS, 24, 24],
    )  # fmt: skip
