"""Sparse attention of many rows on Hopper, in Gluon: the same operation as `attend`'s, whose documentation holds here too.

A processor takes one row at a time. Four warps decode its keys, tile after tile, into shared memory; two groups of four warps multiply.
Each group holds half the channels of the output for all heads. They take turns with scores: the first group computes those of even
tiles, the second those of odd ones, and both multiply all probabilities, which meet in shared memory, with their half of the values. A
tile's maxima are those of the tile before or larger, so both groups know by how much an output shrinks. While one group computes
probabilities, the other keeps the tensor cores busy; that is why the second group starts behind the first.

Keys' codes are read one or two steps of 32 keys ahead of their decoding, the numbers of their blocks and of the entries some steps
before, and the memory of entries is asked for as soon as it is known, since it is scattered and far. Eight lanes of a warp decode eight
keys, so that their 16-byte stores fall into all banks of a swizzled tile. As in `attend`, the channels of eight codes stand in the order
0 4 1 5 2 6 3 7.

What is behind a barrier's wait is written by other warps: `full` and `empty` hand tiles over, `told` a tile's maxima and probabilities
(and, third, that the first group's scores are through), `ready` the queries, and when their memory may take the output. Phases follow
from counts of tiles and rows, which go on from row to row.

Descriptors of matrices in shared memory, if their place is a constant, are computed before the loops and then spill; `zero` is opaque.
"""

# mypy: ignore-errors
# The body of a kernel is Gluon, whose values have other types than the Python that it looks like.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from forebay.model.ops.kernels import attend

FP4 = gl.constexpr(attend.FP4_PAIRS)
FP8 = gl.constexpr(attend.FP8_PAIRS)
DIM, HEADS = 512, 64  # of the network this is for; fewer heads are padded
BK = gl.constexpr(64)  # keys of a tile
SUB = gl.constexpr(32)  # keys that are decoded at once
HP = gl.constexpr(HEADS)
HALF_D = gl.constexpr(DIM // 2)
# What changed its name after Triton 3.6.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def layout(registers: list[list[int]], lanes: list[list[int]], shape: list[int]) -> gl.constexpr:
    """For four warps, which stand eight rows apart."""
    rest = [0] * (len(shape) - 1)
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, [[8, *rest], [16, *rest]], [], shape))


# Lanes: eight rows, then four places in a row. A thread reads 16 bytes at once.
WORDS4 = layout([[0, 1], [0, 2], [0, 16]], [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]], [32, 32])  # keys, words of 8 FP4 codes
GROUPS4 = layout([[0, 0, 1], [0, 1, 0], [0, 8, 0]], [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 2, 0], [0, 4, 0]], [32, 16, 2])
WORDS8 = layout([[0, 1], [0, 2], [0, 16], [0, 32]], [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]], [32, 64])  # keys, words of 4 FP8 codes
GROUPS8 = layout([[0, 0, 1], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 0, 2], [0, 1, 0]], [32, 8, 4])
LINES = layout([], [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]], [32, 4])  # keys, lines of memory
ROWS = layout(  # heads, channels
    [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [32, 0]], [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]], [64, 256]
)
PAIRS = layout(  # the same as pairs of channels
    [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 16, 0], [0, 32, 0], [0, 64, 0], [32, 0, 0]],
    [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 4, 0], [0, 8, 0]],
    [64, 128, 2],
)
SCORE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
OUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _reach(row, position, span, floor, W: gl.constexpr, TOPK: gl.constexpr):
    """A row's position, sequence, lowest window key, and numbers of tiles: an even number in all, as groups take turns; at least two."""
    here = gl.load(position + row).to(gl.int32)
    s = gl.maximum(gl.load(span + row), 0).to(gl.int64)
    lowest = gl.maximum(here - W + 1, gl.load(floor + s))
    near = gl.maximum((here - lowest + BK) // BK, 1)
    far = gl.maximum((gl.minimum(here + 1, TOPK) + BK - 1) // BK, 0)
    return here, s, lowest, near + ((near + far) & 1), far


@gluon.jit
def _rotated(x, row, turn, R: gl.constexpr, SIGN: gl.constexpr):
    """Half the channels of all heads, as pairs, the last R rotated."""
    x = gl.convert_layout(x.reshape([HP, 128, 2]), PAIRS).to(gl.float32)
    pair = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    turned = pair >= 128 - R // 2
    at = turn + row * R + pair - (128 - R // 2)
    cosine = gl.load(at, mask=turned, other=1.0)[None, :]
    sine = gl.load(at + R // 2, mask=turned, other=0.0)[None, :] * SIGN
    even, odd = gl.split(x)
    return gl.join(even * cosine - odd * sine, odd * cosine + even * sine).to(gl.bfloat16).reshape([HP, HALF_D])


@gluon.jit
def _shrunk(o, decay):
    return o * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]


@gluon.jit
def _multiply(
    HALF: gl.constexpr, n, q, out, turn, sink, position, span, floor, scale, qs, ks, ps, bias, tops, sums, full, empty, told, ready,
    H: gl.constexpr, R: gl.constexpr, W: gl.constexpr, TOPK: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Group HALF: channels HALF_D * HALF on, and scores of every second tile from the HALF-th on."""
    head = gl.arange(0, HP, gl.SliceLayout(1, ROWS))
    dim = gl.arange(0, HALF_D, gl.SliceLayout(0, ROWS))
    heads = gl.arange(0, HP, gl.SliceLayout(1, SCORE))
    t = gl.program_id(0) * 0  # pairs of tiles so far
    rows = t
    for number in range(gl.program_id(0), n, gl.num_programs(0)):
        row = number.to(gl.int64)
        at = (row * H + head)[:, None] * (2 * HALF_D) + (HALF * HALF_D + dim)[None, :]
        x = gl.load(q + at, mask=(head < H)[:, None], other=0.0)
        reach = _reach(row, position, span, floor, W, TOPK)
        if ROTATE and HALF == 1:
            x = _rotated(x, row, turn, R, 1.0)
        x = x.reshape([HP, 32, 2, 4]).permute((0, 1, 3, 2)).reshape([HP, HALF_D])
        qs.index(HALF).store(gl.convert_layout(x, ROWS))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(0), count=1)
        top = gl.full([HP], -1e30, gl.float32, gl.SliceLayout(1, SCORE))
        total = gl.full([HP], 0.0, gl.float32, gl.SliceLayout(1, SCORE))
        o = gl.zeros([HP, HALF_D], gl.float32, OUT)
        mbarrier.wait(ready.index(0), rows & 1)
        for _ in range((reach[3] + reach[4]) // 2):
            phase = t & 1
            mbarrier.wait(full.index(HALF), phase)
            if HALF == 1:
                mbarrier.wait(told.index(2), phase)
            zero = gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [t], dtype=gl.int32, is_pure=True, pack=1)
            score = gl.zeros([HP, BK], gl.float32, SCORE)
            score = warpgroup_mma(qs.index(zero), ks.index(zero + HALF * 2).permute((1, 0)), score, use_acc=False, is_async=True)
            score = warpgroup_mma(qs.index(zero + 1), ks.index(zero + HALF * 2 + 1).permute((1, 0)), score, is_async=True)
            seen = bias.index(HALF).load(gl.SliceLayout(0, SCORE)) == 0.0
            if HALF == 1:  # the tile before this one, while the scores are computed
                mbarrier.wait(told.index(0), phase)
                before = tops.index(0).load(gl.SliceLayout(1, SCORE))
                decay = gl.exp2((top - before) * scale)
                total = total * decay
                o = warpgroup_mma(ps.index(zero), ks.index(zero + HALF), _shrunk(o, decay), is_async=True)
                score = warpgroup_mma_wait(1, deps=(score,))
            else:
                before = top
                score = warpgroup_mma_wait(0, deps=(score,))
                barrier()
                mbarrier.arrive(told.index(2), count=1)
            score = gl.where(seen[None, :], score, float("-inf"))
            top = gl.maximum(before, gl.max(score, 1))
            p = gl.exp2((score - top[:, None]) * scale)
            decay = gl.exp2((before - top) * scale)
            total = total * decay + gl.sum(p, 1)
            tops.index(HALF).store(top)
            ps.index(HALF).store(p.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            mbarrier.arrive(told.index(HALF), count=1)
            if HALF == 1:
                o = warpgroup_mma_wait(0, deps=(o,))
                barrier()
                mbarrier.arrive(empty.index(0), count=1)
            o = warpgroup_mma(ps.index(zero + HALF), ks.index(zero + HALF * 3), _shrunk(o, decay), is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            barrier()
            mbarrier.arrive(empty.index(HALF), count=1)
            if HALF == 0:
                mbarrier.wait(told.index(1), phase)
                before = top
                top = tops.index(1).load(gl.SliceLayout(1, SCORE))
                decay = gl.exp2((before - top) * scale)
                total = total * decay
                o = warpgroup_mma(ps.index(zero + 1), ks.index(zero + 2), _shrunk(o, decay), is_async=True)
                o = warpgroup_mma_wait(0, deps=(o,))
                barrier()
                mbarrier.arrive(empty.index(1), count=1)
            t += 1
        sums.index(HALF).store(total)
        barrier()
        mbarrier.arrive(ready.index(1), count=1)
        z = gl.load(sink + heads, mask=heads < H, other=0.0) * 1.4426950408889634
        top = top * scale
        mbarrier.wait(ready.index(1), rows & 1)
        total += sums.index(1 - HALF).load(gl.SliceLayout(1, SCORE))
        # Not by a common maximum: `top` is a product, and fused with the subtraction of its own rounded value it leaves what was rounded
        # away, which for large scores is no small number.
        decay = gl.exp2(gl.minimum(top - z, 0.0))
        factor = decay * 281474976710656.0 / (total * decay + gl.exp2(gl.minimum(z - top, 0.0)))
        qs.index(HALF).store(_shrunk(o, factor).to(gl.bfloat16))
        barrier()
        x = qs.index(HALF).load(ROWS)
        x = x.reshape([HP, 32, 4, 2]).permute((0, 1, 3, 2)).reshape([HP, HALF_D])
        if HALF == 1:
            x = _rotated(x, row, turn, R, -1.0)
        gl.store(out + at, gl.convert_layout(x, ROWS), mask=(head < H)[:, None])
        barrier()
        rows += 1


@gluon.jit
def _part(ks, number, SUB_NUMBER: gl.constexpr):
    """Half the channels of 32 keys of a tile, in 32-bit words."""
    keys = ks.index(number)
    if RENAMED:
        keys = keys.reinterpret(gl.int32, [BK, HALF_D // 2], TILE_WORDS)
    else:
        keys = keys._reinterpret(gl.int32, [BK, HALF_D // 2], TILE_WORDS)
    return keys.slice(SUB_NUMBER * SUB, SUB, 0)


@gluon.jit
def _window_words(ring, offset, HALF: gl.constexpr):
    """Codes and scales of half the channels of 32 window rows, which are `offset` words from the ring's start."""
    column = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(0, WORDS8))
    c = gl.load(ring.to(gl.pointer_type(gl.int32), bitcast=True) + offset[:, None] + column[None, :])
    offset = gl.convert_layout(offset, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS8))) * 4
    column = 2 * HALF_D + HALF * 8 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS8)))
    return c, gl.load(ring + offset[:, None] + column[None, :])


@gluon.jit
def _decode_window(c, e, keys):
    f = ((e.to(gl.int32) << 23).to(gl.float32, bitcast=True) * 4.722366482869645e21).to(gl.bfloat16)
    f = f.to(gl.uint16, bitcast=True).to(gl.int32)
    low, high = gl.split(c.reshape([SUB, 8, 4, 2]))
    low, high = gl.convert_layout(low, GROUPS8), gl.convert_layout(high, GROUPS8)
    f, low = gl.broadcast((f | (f << 16))[:, :, None], low)
    k0, k1, k2, k3 = gl.inline_asm_elementwise(
        FP8, "=&r,=&r,=&r,=&r,r,r,r", [low, high, f], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    keys.store(gl.join(gl.join(k0, k2), gl.join(k1, k3)).reshape([SUB, HALF_D // 2]))


@gluon.jit
def _decode_entries(c, e, keys):
    f = ((e.to(gl.int32) & 127) << 20).to(gl.float32, bitcast=True) * 6.338253001141147e29 * 6.338253001141147e29
    f = f.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
    c = gl.convert_layout(c.reshape([SUB, 16, 2]), GROUPS4)
    f, c = gl.broadcast((f | (f << 16))[:, :, None], c)
    k0, k1, k2, k3 = gl.inline_asm_elementwise(
        FP4, "=&r,=&r,=&r,=&r,r,r", [c, f], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    keys.store(gl.join(gl.join(k0, k2), gl.join(k1, k3)).reshape([SUB, HALF_D // 2]))


@gluon.jit
def _chosen(row, step, selected, TOPK: gl.constexpr):
    """The `step`-th 32 of a row's entries."""
    t = step * SUB + gl.arange(0, SUB, gl.SliceLayout(1, WORDS4))
    return gl.load(selected + row * TOPK + t, mask=t < TOPK, other=-1)


@gluon.jit
def _block(entry, blocks, PER_BLOCK: gl.constexpr):
    return gl.load(blocks + gl.maximum(entry, 0) // PER_BLOCK, mask=entry >= 0, other=0)


@gluon.jit
def _ask(entry, block, coded, scaled, PER_BLOCK: gl.constexpr, BLOCK_BYTES: gl.constexpr):
    """Has entries brought to the L2 cache; block 0 is asked for where there is none."""
    line = gl.arange(0, 4, gl.SliceLayout(0, LINES))[None, :]
    place = gl.convert_layout(gl.maximum(entry, 0) % PER_BLOCK, gl.SliceLayout(1, LINES))[:, None]
    at = gl.where(line < 2, coded.to(gl.int64) + place * HALF_D + line * 128, scaled.to(gl.int64) + place * (HALF_D // 8))
    at += gl.convert_layout(block, gl.SliceLayout(1, LINES))[:, None].to(gl.int64) * BLOCK_BYTES
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _entry_words(entry, block, coded, scaled, PER_BLOCK: gl.constexpr, BLOCK_BYTES: gl.constexpr):
    """Codes and scales of both halves of the channels of 32 entries."""
    seen, place, block = entry >= 0, gl.maximum(entry, 0) % PER_BLOCK, block.to(gl.int64)
    at = block * (BLOCK_BYTES // 4) + place * (HALF_D // 4)
    at = coded + at[:, None] + gl.arange(0, 32, gl.SliceLayout(0, WORDS4))[None, :]
    c0 = gl.load(at, mask=seen[:, None], other=0)
    c1 = gl.load(at + 32, mask=seen[:, None], other=0)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, GROUPS4))
    at = gl.convert_layout(block * BLOCK_BYTES + place * (HALF_D // 8), layout)
    at = scaled + at[:, None] + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS4)))[None, :]
    mask = gl.convert_layout(seen, layout)[:, None]
    return c0, c1, gl.load(at, mask=mask, other=0), gl.load(at + 16, mask=mask, other=0)


@gluon.jit
def _decode(
    n, position, span, start, offset, floor, slot, table, selected, rings, fresh, pool, codes, scales, slot_stride, max_blocks,
    ks, bias, full, empty, W: gl.constexpr, RB: gl.constexpr, TOPK: gl.constexpr, PER_BLOCK: gl.constexpr, BLOCK_BYTES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    coded, scaled = (pool + codes).to(gl.pointer_type(gl.int32), bitcast=True), pool + scales
    t = gl.program_id(0) * 0  # tiles so far
    for number in range(gl.program_id(0), n, gl.num_programs(0)):
        row = number.to(gl.int64)
        if TOPK > 0:
            entry0, entry1, entry2 = _chosen(row, 0, selected, TOPK), _chosen(row, 1, selected, TOPK), _chosen(row, 2, selected, TOPK)
            entry3, entry4 = _chosen(row, 3, selected, TOPK), _chosen(row, 4, selected, TOPK)
        here, s, lowest, near, far = _reach(row, position, span, floor, W, TOPK)
        first = gl.load(start + s)
        fresh_row = gl.load(offset + s) - first
        ring = rings + gl.load(slot + s).to(gl.int64) * slot_stride
        away = (fresh.to(gl.int64) - ring.to(gl.int64)) // 4  # words
        if TOPK > 0:
            blocks = table + s * max_blocks
            c0, c1, e0, e1 = _entry_words(entry0, _block(entry0, blocks, PER_BLOCK), coded, scaled, PER_BLOCK, BLOCK_BYTES)
            block1, block2 = _block(entry1, blocks, PER_BLOCK), _block(entry2, blocks, PER_BLOCK)
            block3 = _block(entry3, blocks, PER_BLOCK)
            if AHEAD == 2:
                d0, d1, f0, f1 = _entry_words(entry1, block1, coded, scaled, PER_BLOCK, BLOCK_BYTES)
            else:
                _ask(entry1, block1, coded, scaled, PER_BLOCK, BLOCK_BYTES)
            _ask(entry2, block2, coded, scaled, PER_BLOCK, BLOCK_BYTES)
        for tile in range(near):
            stage = t & 1
            mbarrier.wait(empty.index(stage), ((t >> 1) & 1) ^ 1)
            for sub in gl.static_range(2):
                key = lowest + tile * BK + sub * SUB + gl.arange(0, SUB, gl.SliceLayout(1, WORDS8))
                bias.index(stage).slice(sub * SUB, SUB, 0).store(gl.where(key <= here, 0.0, 1.0))
                key = gl.minimum(key, here)  # what stands behind the row's last key is not seen, and there need be nothing
                place = (gl.maximum(key, 0) % W * (RB // 4)).to(gl.int64)
                place = gl.where(key >= first, away + (fresh_row + key).to(gl.int64) * (RB // 4), place)
                place = gl.multiple_of(gl.where(here >= 0, place, 0), 4)
                w0, x0 = _window_words(ring, place, 0)
                w1, x1 = _window_words(ring, place, 1)
                _decode_window(w0, x0, _part(ks, stage * 2, sub))
                _decode_window(w1, x1, _part(ks, stage * 2 + 1, sub))
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(stage), count=1)
            t += 1
        if TOPK > 0:
            for tile in range(far):
                stage = t & 1
                mbarrier.wait(empty.index(stage), ((t >> 1) & 1) ^ 1)
                for sub in gl.static_range(2):
                    # Of what comes next, whatever can be asked for is.
                    if AHEAD == 2:
                        n0, n1, m0, m1 = _entry_words(entry2, block2, coded, scaled, PER_BLOCK, BLOCK_BYTES)
                    else:
                        n0, n1, m0, m1 = _entry_words(entry1, block1, coded, scaled, PER_BLOCK, BLOCK_BYTES)
                    _ask(entry3, block3, coded, scaled, PER_BLOCK, BLOCK_BYTES)
                    seen = entry0 >= 0
                    entry0, entry1, entry2, entry3 = entry1, entry2, entry3, entry4
                    block1, block2, block3 = block2, block3, _block(entry3, blocks, PER_BLOCK)
                    entry4 = _chosen(row, tile * 2 + sub + 5, selected, TOPK)
                    bias.index(stage).slice(sub * SUB, SUB, 0).store(gl.where(seen, 0.0, 1.0))
                    _decode_entries(c0, e0, _part(ks, stage * 2, sub))
                    _decode_entries(c1, e1, _part(ks, stage * 2 + 1, sub))
                    if AHEAD == 2:
                        c0, c1, e0, e1 = d0, d1, f0, f1
                        d0, d1, f0, f1 = n0, n1, m0, m1
                    else:
                        c0, c1, e0, e1 = n0, n1, m0, m1
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(stage), count=1)
                t += 1


@gluon.jit(do_not_specialize=["n"])
def attend_wide(
    n, q, out, turn, sink, position, span, start, offset, floor, slot, table, selected, rings, fresh, pool, codes, scales, scale,
    slot_stride, max_blocks,
    H: gl.constexpr, R: gl.constexpr, W: gl.constexpr, RB: gl.constexpr, TOPK: gl.constexpr, PER_BLOCK: gl.constexpr,
    BLOCK_BYTES: gl.constexpr, ROTATE: gl.constexpr, REGISTERS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Rows program_id(0), and every num_programs(0)-th from there.

    Multiplying warps have REGISTERS each thread. Entries are read AHEAD, 1 or 2, steps before they are decoded.
    """
    qs = gl.allocate_shared_memory(gl.bfloat16, [2, HP, HALF_D], TILE)
    ks = gl.allocate_shared_memory(gl.bfloat16, [4, BK, HALF_D], TILE)  # halves of two tiles
    ps = gl.allocate_shared_memory(gl.bfloat16, [2, HP, BK], TILE)
    bias = gl.allocate_shared_memory(gl.float32, [2, BK], LINE)
    tops = gl.allocate_shared_memory(gl.float32, [2, HP], LINE)
    sums = gl.allocate_shared_memory(gl.float32, [2, HP], LINE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=2)
    for i in gl.static_range(3):
        mbarrier.init(told.index(i), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_decode, (n, position, span, start, offset, floor, slot, table, selected, rings, fresh, pool, codes, scales, slot_stride,
                       max_blocks, ks, bias, full, empty, W, RB, TOPK, PER_BLOCK, BLOCK_BYTES, AHEAD)),
            (_multiply, (gl.constexpr(0), n, q, out, turn, sink, position, span, floor, scale, qs, ks, ps, bias, tops, sums, full, empty,
                         told, ready, H, R, W, TOPK, ROTATE)),
            (_multiply, (gl.constexpr(1), n, q, out, turn, sink, position, span, floor, scale, qs, ks, ps, bias, tops, sums, full, empty,
                         told, ready, H, R, W, TOPK, ROTATE)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
