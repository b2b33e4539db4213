"""Entries of ratio 1 of many rows on Hopper, in Gluon: the same operation as `store.entry_store`, whose documentation holds here.

One program a multiprocessor keeps all of `wk` in shared memory and takes tile after tile of ROWS rows; the rows of the next tile are read
while a tile is worked on. Normed rows go to shared memory, where the tensor cores multiply them by `wk` while the same rows are quantised:
there a thread has all pairs of a group, so that a scale is computed once and codes are stored eight bytes at a time.

Measured on an H200 with a cold L2 cache, beside `store`'s kernel: 2,048 rows 13 us (16), 8,192 rows 15 us (18), 65,536 rows 68 us (107).
That is 22 % of the speed of a copy at 8,192 rows, where a copy of as many bytes takes 6.5 us itself, and 37 % at 65,536. A row takes some
370 instructions of a warp, but a multiprocessor issues only two of five that it could: of a tile's 13,000 cycles half pass while rows are
multiplied and quantised, where all four groups of warps read all rows from shared memory for their columns, and the rest in steps that wait
for each other. Without the product 65,536 rows took 55 us, without anything but reading, storing and the barriers 31 us.
"""

# mypy: ignore-errors
# The body of a kernel is Gluon, whose values have other types than the Python that it looks like.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from forebay.model.ops.kernels import dependent, store_codes

_await = dependent.load(False)._await_gluon
MAIN, POWER, SCALE = (gl.constexpr(text) for text in (store_codes.FP4_SPLIT, store_codes.FP4_POWER, store_codes.SCALE_SPLIT))
ROWS, WARPS = 64, 16  # of a tile, of a program
DIM, INDEX, PAIRS = 512, 128, 32  # of the network this is for
SHAPE = DIM, INDEX, PAIRS, torch.bfloat16, torch.bfloat16  # with what rows and `wk` are
WORDS, KEY_WORDS, TURNED = gl.constexpr(DIM // 2), gl.constexpr(INDEX // 2), gl.constexpr(PAIRS)
HEIGHT = gl.constexpr(ROWS)
# What changed its name after Triton 3.6.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def spread(columns: int, run: int) -> gl.constexpr:
    """A thread has `run` words side by side of a row, and more of the same row: eight threads stand side by side, then come rows."""
    bits = [1 << i for i in range(columns.bit_length() - 1)]
    lanes = [[0, b] for b in bits if run <= b < 8 * run] + [[1, 0], [2, 0]]
    return gl.constexpr(
        gl.DistributedLinearLayout(
            [[0, b] for b in bits if b < run or b >= 8 * run], lanes, [[4, 0], [8, 0], [16, 0], [32, 0]], [], [ROWS, columns]
        )
    )


READ, GROUPS = spread(DIM // 2, 4), spread(64, 8)  # words as they are read, and as they are quantised, 64 at a time
LINE = gl.constexpr(gl.SliceLayout(1, GROUPS))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, WARPS // 4], instr_shape=[16, 512 // WARPS, 16]))
FACTOR = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _even(w):
    return (w << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _odd(w):
    return (w & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pair(a, b):
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _upper(a, b):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest(w):
    """fp32 bits of the largest magnitude along the last axis; of bit patterns, so that NaN is the largest."""
    w = gl.reduce(w & 0x7FFF7FFF, 2, _upper)
    return gl.maximum(w << 16, w & -65536)


@gluon.jit
def _root(square, SIZE: gl.constexpr, eps):
    """What a row is multiplied by in its norm, from the sum of its squares. SIZE is a power of two."""
    mean = square * (1.0 / SIZE)
    return gl.div_rn(gl.full_like(mean, 1.0), gl.sqrt_rn(mean + eps))


@gluon.jit
def _squares(w, square):
    """Adds words' squares."""
    return gl.fma(_odd(w), _odd(w), gl.fma(_even(w), _even(w), square))


@gluon.jit
def _normed(w, r, weights):
    """weights: of even and of odd channels, in shared memory."""
    layout: gl.constexpr = gl.SliceLayout(0, w.type.layout)
    even, odd = weights.index(0).load(layout)[None, :], weights.index(1).load(layout)[None, :]
    return _pair(even * (_even(w) * r[:, None]), odd * (_odd(w) * r[:, None]))


@gluon.jit
def _turned(w, turn, row):
    """64 words of rows, of which the last PAIRS are rotated."""
    pair = gl.arange(0, 64, gl.SliceLayout(0, GROUPS)) - (64 - TURNED)
    turned = (pair >= 0)[None, :]
    at = turn + row.to(gl.int64)[:, None] * (2 * TURNED) + pair[None, :]
    cosine, sine = gl.load(at, mask=turned, other=1.0), gl.load(at + TURNED, mask=turned, other=0.0)
    even, odd = _even(w), _odd(w)
    return gl.where(turned, _pair(even * cosine - odd * sine, odd * cosine + even * sine), w)


@gluon.jit
def _words(tile, COLUMNS: gl.constexpr):
    """A tile of bf16 in shared memory as words."""
    if RENAMED:
        tile = tile.reinterpret(gl.int32, [HEIGHT, COLUMNS], TILE_WORDS)
    else:
        tile = tile._reinterpret(gl.int32, [HEIGHT, COLUMNS], TILE_WORDS)
    return tile


@gluon.jit
def _put(to, first, x, done):
    """Stores bytes of rows at `to`, the `first` and so on."""
    layout: gl.constexpr = x.type.layout
    to = gl.convert_layout(to, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    done = gl.convert_layout(done, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    gl.store(to + (first + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout)))[None, :], x, mask=done)


@gluon.jit
def _store_main(w, first, codes, scales, done):
    """64 words of rows from word `first` on: groups of 8 with an E4M3 scale."""
    w = w.reshape([HEIGHT, 8, 8])
    byte, high, low = gl.inline_asm_elementwise(
        SCALE, "=&r,=&r,=&r,r", [_largest(w)], dtype=(gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    high, w = gl.broadcast(high[:, :, None], w)
    low, w = gl.broadcast(low[:, :, None], w)
    packed = gl.inline_asm_elementwise(MAIN, "=&r" + ",r" * 12, [w, high, low], dtype=gl.int8, is_pure=True, pack=4)
    _put(codes, first, packed.reshape([HEIGHT, 64]).to(gl.uint8, bitcast=True), done)
    _put(scales, first // 8, byte.to(gl.uint8), done)


@gluon.jit
def _store_key(w, codes, scales, done):
    """Words of index keys: groups of 16 with a power of two."""
    w = w.reshape([HEIGHT, 4, 16])
    top = _largest(w)
    bad = top >= 0x7F800000
    power = gl.maximum(gl.where(bad, 0, top).to(gl.float32, bitcast=True), 7.052966104933725e-38) * (1.0 / 6.0)
    power = (power.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    byte = gl.where(bad, 255, power >> 23).to(gl.uint8)
    inverse = (254 << 23) - power
    half = gl.where(inverse == 0x00800000, 0x00400000, inverse - 0x00800000)
    inverse, w = gl.broadcast((inverse | (inverse >> 16))[:, :, None], w)
    half, w = gl.broadcast((half | (half >> 16))[:, :, None], w)
    factors = [w, inverse, inverse + 0x00800080, half]
    packed = gl.inline_asm_elementwise(POWER, "=&r" + ",r" * 16, factors, dtype=gl.int8, is_pure=True, pack=4)
    _put(codes, 0, packed.reshape([HEIGHT, KEY_WORDS]).to(gl.uint8, bitcast=True), done)
    _put(scales, 0, byte, done)


@gluon.jit
def _listed(rows, tile, m):
    lane = tile * HEIGHT + gl.arange(0, HEIGHT, LINE)
    return gl.load(rows + lane, mask=lane < m, other=-1)


@gluon.jit
def _placed(listed, span, position):
    """Sequences and positions of rows; those that do not count are read like others, and not stored."""
    row = gl.maximum(listed, 0)
    return gl.load(span + row), gl.maximum(gl.load(position + row), 0).to(gl.int32)


@gluon.jit
def _read(source, stride, listed):
    row = gl.convert_layout(gl.maximum(listed, 0), gl.SliceLayout(1, READ), assert_trivial=True)
    at = source.to(gl.pointer_type(gl.int32), bitcast=True) + row.to(gl.int64)[:, None] * (stride // 2)
    return gl.load(at + gl.arange(0, WORDS, gl.SliceLayout(0, READ))[None, :])


@gluon.jit
def _weights(norm, SIZE: gl.constexpr):
    """A norm's weights, bf16 or fp32, of even and of odd channels."""
    pair = gl.arange(0, SIZE, FLAT)
    return gl.load(norm + 2 * pair).to(gl.float32), gl.load(norm + 2 * pair + 1).to(gl.float32)


@gluon.jit(do_not_specialize=["m", "table_stride"])
def entry_store(
    source, source_stride, norm, wk, k_norm, turn, rows, m, position, span, floor, table, table_stride, pool, block_bytes,
    main_codes, main_scales, index_codes, index_scales, eps, PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """Tiles program_id(0), and every num_programs(0)-th from there."""
    factors = gl.allocate_shared_memory(gl.bfloat16, [2 * KEY_WORDS, 2 * WORDS], TILE)
    normed = gl.allocate_shared_memory(gl.bfloat16, [HEIGHT, 2 * WORDS], TILE)
    keys = gl.allocate_shared_memory(gl.int32, [HEIGHT, KEY_WORDS], TILE_WORDS)
    weights = gl.allocate_shared_memory(gl.float32, [2, WORDS], PLAIN)
    key_weights = gl.allocate_shared_memory(gl.float32, [2, KEY_WORDS], PLAIN)
    pid, programs = gl.program_id(0), gl.num_programs(0)
    listed = _listed(rows, pid, m)
    at = wk + gl.arange(0, 32, gl.SliceLayout(1, FACTOR))[:, None] * (2 * WORDS)
    at += gl.arange(0, 2 * WORDS, gl.SliceLayout(0, FACTOR))[None, :]
    f0, f1 = gl.load(at), gl.load(at + 64 * WORDS)
    f2, f3 = gl.load(at + 128 * WORDS), gl.load(at + 192 * WORDS)
    even, odd = _weights(norm, WORDS)
    key_even, key_odd = _weights(k_norm, KEY_WORDS)
    listed1 = _listed(rows, pid + programs, m)
    owner, place = _placed(listed, span, position)
    _await()
    x = _read(source, source_stride, listed)
    factors.slice(0, 32, 0).store(f0)
    factors.slice(32, 32, 0).store(f1)
    factors.slice(64, 32, 0).store(f2)
    factors.slice(96, 32, 0).store(f3)
    weights.index(0).store(even)
    weights.index(1).store(odd)
    key_weights.index(0).store(key_even)
    key_weights.index(1).store(key_odd)
    barrier()
    for tile in range(pid, (m + HEIGHT - 1) // HEIGHT, programs):
        a, b = gl.split(x.reshape([HEIGHT, 4, 64]).permute((0, 2, 1)).reshape([HEIGHT, 64, 2, 2]))
        x0, x2 = gl.split(a)
        x1, x3 = gl.split(b)
        square = gl.full([HEIGHT, 64], 0.0, gl.float32, x0.type.layout)
        square = gl.sum(_squares(x3, _squares(x2, _squares(x1, _squares(x0, square)))), 1)
        r = gl.convert_layout(_root(square, 2 * WORDS, eps), gl.SliceLayout(1, READ), assert_trivial=True)
        _words(normed, WORDS).store(_normed(x, r, weights))
        # What is asked for now is needed in the next tile, or at the end of this one; before the barrier, as it would be put off.
        x = _read(source, source_stride, listed1)
        owner1, place1 = _placed(listed1, span, position)
        listed2 = _listed(rows, tile + 2 * programs, m)
        live = (listed >= 0) & (owner >= 0)
        owner = gl.maximum(owner, 0)
        done = live & (place >= gl.load(floor + owner))
        block = gl.load(table + owner.to(gl.int64) * table_stride + place // PER_BLOCK, mask=done, other=0)
        base, inside, row = pool + block.to(gl.int64) * block_bytes, place % PER_BLOCK, gl.maximum(listed, 0)
        fence_async_shared()
        barrier()
        acc = gl.zeros([HEIGHT, 2 * KEY_WORDS], gl.float32, PRODUCT)
        acc = warpgroup_mma(normed, factors.permute((1, 0)), acc, use_acc=False, is_async=True)
        for first in gl.static_range(0, WORDS, 64):
            w = _words(normed, WORDS).slice(first, 64, 1).load(GROUPS)
            if first + 64 == WORDS:
                w = _turned(w, turn, row)
            _store_main(w, first, base + main_codes + inside * WORDS, base + main_scales + inside * (WORDS // 8), done)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        a, b = gl.split(acc.reshape([HEIGHT, KEY_WORDS, 2]))
        keys.store(_pair(a, b))
        barrier()
        w = keys.load(GROUPS)
        r = _root(gl.sum(_squares(w, gl.full([HEIGHT, KEY_WORDS], 0.0, gl.float32, GROUPS)), 1), 2 * KEY_WORDS, eps)
        w = _turned(_normed(w, r, key_weights), turn, row)
        _store_key(w, base + index_codes + inside * KEY_WORDS, base + index_scales + inside * (KEY_WORDS // 16), done)
        listed, owner, place, listed1 = listed1, owner1, place1, listed2
