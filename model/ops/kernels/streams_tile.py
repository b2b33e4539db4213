"""What `streams_wide` does to a tile of rows, in Gluon: which thread has what of it, mixing, the product, the norm; and coefficients.

What a warp mixes is, as its threads hold it, a factor of its product: each of eight warps has 16 of the columns, and the order of the
inputs of a product is free. Rows of a tile are permuted for the product, so that a half warp reads from all banks.
"""

# mypy: ignore-errors
# The body of a kernel is Gluon, whose values have other types than the Python that it looks like.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma

from forebay.model.ops.kernels import streams

streams.load(False)
_sigmoid, _fp8_codes, _matrix = (gluon.jit(getattr(streams, name).fn) for name in ("_sigmoid", "_fp8_codes", "_matrix"))

COLUMNS, TILE, STREAMS, COUNT = 128, 16, 4, 24
PLACES = 8  # for the sums of a turn: whoever writes to one again knows that all have read it
SUMS = 32  # columns of sums: coefficients, then the square
C, R, N, NP, P = gl.constexpr(COLUMNS), gl.constexpr(TILE), gl.constexpr(COUNT), gl.constexpr(SUMS), gl.constexpr(PLACES)
# What changed its name after Triton 3.6.
bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Of mixing warps: a thread has four columns of rows r and r + 8.
MIX = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [2, 0], [4, 0], [1, 0]], [[0, 16], [0, 32], [0, 64]], [], [16, 128]
    )
)
LINE = gl.constexpr(gl.SliceLayout(1, MIX))
# Of the same rows, numbers of a row.
MATRIX = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 0], [0, 0], [2, 0], [4, 0], [1, 0]], [[0, 0], [0, 0], [0, 0]], [], [16, 16]
    )
)
FOUR = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [2, 0], [4, 0], [1, 0]], [[0, 0], [0, 0], [0, 0]], [], [16, 4])
)
# fn: units of 16 columns, then a coefficient; streams, then columns.
FN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [64, 64]
    )
)
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 2))
# Of the other warps.
NORM = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0]], [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]], [[4, 0], [8, 0]], [], [16, 128]
    )
)
UNITS = gl.constexpr(  # eight warps' sums of eight coefficients
    gl.DistributedLinearLayout(
        [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0]], [[0, 4, 0], [0, 8, 0]], [], [8, 16, 8]
    )
)
SQUARES = gl.constexpr(  # the same of squares
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0], [8, 0], [0, 0]], [[0, 0], [0, 0]], [], [16, 8])
)
TILES_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
MATRIX_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
FOUR_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
TILES_LAYOUT = gl.constexpr(TILES_SHARED)
PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@triton.constexpr_function
def inner_layout(splits):
    """[R, splits]: what all programs have summed, with rows as in NORM."""
    registers, lanes = [[0, 1], [0, 2], [2, 0]], [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]]
    if splits < 64:
        registers, lanes[3] = [[0, 1], [2, 0]], [0, 16]
        lanes = [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[4, 0], [8, 0]], [], [16, splits])


@triton.constexpr_function
def share_layout(rows, splits):
    """[rows, splits, SUMS] of what is summed over splits."""
    registers = [[0, 0, 1], [0, 0, 2]]
    places = [[1 << i, 0, 0] for i in range(rows.bit_length() - 1)] + [[0, 4 << i, 0] for i in range(splits.bit_length() - 3)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(registers + places[2:], lanes, places[:2], [], [rows, splits, 32])


@gluon.jit
def _bf16(x):
    """fp32 -> bf16, two at once: one by one is a slow instruction."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _fp32(x):
    """bf16 -> fp32, two at once, by two instructions where the compiler takes four."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def _again(x, zero):
    """x bf16 in other registers: for a product, rows take turns in them, and the compiler would copy them for each of its parts."""
    return gl.inline_asm_elementwise("or.b32 $0, $1, $2;", "=r,r,r", [x, zero], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _mixed(x0, x1, x2, x3, o, h, c):
    return _bf16(h * o + (c[0] * x0 + c[1] * x1 + c[2] * x2 + c[3] * x3))


@gluon.jit
def _round_fp8(c, top):
    """c bf16 in groups whose largest magnitude is top, fp32: E4M3 values times the scale, bf16, and bits of the scale.

    As `rounding._round_fp8`, but for numbers below 2^122, by adding 192 last places of the result to c itself, two at once: with 8 bits in
    all, a sum has those of the result.
    """
    bits = ((gl.maximum(top, 1e-4) * (1.0 / 448.0)).to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    least = ((bits - (6 << 23)) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    c, least = gl.broadcast(c, least)
    q = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 large;
        and.b32 large, $1, 0x7F807F80;
        max.u16x2 large, large, $2;
        add.u32 large, large, 0x02400240;
        add.rn.bf16x2 $0, $1, large;
        sub.rn.bf16x2 $0, $0, large;
        }
        """,
        "=&r,r,r", [c, least], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
    return q, bits


@gluon.jit
def _line(x):
    return gl.convert_layout(x, LINE, assert_trivial=True)[:, None]


@gluon.jit
def _apart(t):
    """[R, 4] -> four [R, 1]."""
    even, odd = gl.split(t.reshape([16, 2, 2]))
    t0, t2 = gl.split(even)
    t1, t3 = gl.split(odd)
    return _line(t0), _line(t1), _line(t2), _line(t3)


@gluon.jit
def _columns(t):
    """comb [R, 16] -> its columns, each as four [R, 1]."""
    even, odd = gl.split(t.reshape([16, 4, 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return _apart(c0), _apart(c1), _apart(c2), _apart(c3)


@gluon.jit
def _right(w):
    """[units and coefficients, streams and columns] bf16 -> [units, inputs, coefficients]: `_left` has the same order of inputs."""
    w = w.reshape([8, 8, 4, 4, 2, 2]).permute((0, 2, 4, 3, 5, 1)).reshape([8, 64, 8])
    return gl.convert_layout(w, RIGHT, assert_trivial=True)


@gluon.jit
def _left(b0, b1, b2, b3):
    """Four streams [R, C] -> [units, R permuted, inputs]."""
    t = gl.join(gl.join(b0, b2), gl.join(b1, b3)).reshape([2, 2, 2, 2, 8, 4, 2, 2, 4])
    t = t.permute((4, 0, 3, 1, 2, 8, 6, 5, 7)).reshape([8, 16, 64])
    return gl.convert_layout(t, LEFT, assert_trivial=True)


@gluon.jit
def _cut(w):
    """w fp32 = high + middle + low, each of 8 bits and so exact in bf16."""
    rest = w - (w.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    least = rest - (rest.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    high = (w.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    middle = (rest.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    low = (least.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return _right(high), _right(middle), _right(low)


@gluon.jit
def _projection(fn, first, j, D: gl.constexpr):
    """Coefficients 8 * j to 8 * j + 7 of the program's columns of fn."""
    a = gl.arange(0, 64, gl.SliceLayout(1, FN))
    k = gl.arange(0, 64, gl.SliceLayout(0, FN))
    at = fn + ((j * 8 + a % 8) * (4 * D) + a // 8 * 16)[:, None] + (k // 16 * D + first + k % 16)[None, :]
    return _cut(gl.load(at))


@gluon.jit
def _summed(t, w0, w1, w2):
    acc = gl.zeros([8, 16, 8], gl.float32, PRODUCT)
    acc = mma_v2(t, w2, acc)
    acc = mma_v2(t, w1, acc)
    return mma_v2(t, w0, acc)


@gluon.jit
def _row(i, group, groups):
    """First row of a group's i-th tile."""
    return (i * groups + group) * R


@gluon.jit
def _copy(streams, y, post, comb, pre, row, first, slot, some, t0, t1, t2, t3, ys, combs, posts, pres, full, D: gl.constexpr):
    ready = full.index(slot)
    mbarrier.expect(ready, 16 * (128 * 2 * 5 + 24 * 4), pred=some)
    bring(streams, [row, first], ready, t0.index(slot), pred=some)
    bring(streams, [row, D + first], ready, t1.index(slot), pred=some)
    bring(streams, [row, 2 * D + first], ready, t2.index(slot), pred=some)
    bring(streams, [row, 3 * D + first], ready, t3.index(slot), pred=some)
    bring(y, [row, first], ready, ys.index(slot), pred=some)
    bring(comb, [row, 0], ready, combs.index(slot), pred=some)
    bring(post, [row, 0], ready, posts.index(slot), pred=some)
    bring(pre, [row, 0], ready, pres.index(slot), pred=some)


@gluon.jit
def _normed(c, f, gain, row, first, n, x, rounded, codes, scales, D: gl.constexpr, ROUNDED: gl.constexpr, CODES: gl.constexpr):
    """Writes a tile's input: c [R, C] bf16 times the norm's factor f [R, 1] and weight, and its rounding."""
    r = gl.arange(0, 16, gl.SliceLayout(1, NORM))
    dim = first + gl.arange(0, 128, gl.SliceLayout(0, NORM))
    long = row.to(gl.int64)
    mask = (row + r < n)[:, None]
    to = long * D + (r[:, None] * D + dim[None, :])
    c = _bf16(gain * (_fp32(c) * f))
    gl.store(x + to, c, mask=mask)
    if ROUNDED or CODES:
        v = _fp32(c).reshape([16, 4, 32])
        q, bits = _round_fp8(c.reshape([16, 4, 32]), gl.max(gl.abs(v), 2)[:, :, None])
        if ROUNDED:
            gl.store(rounded + to, gl.convert_layout(q.reshape([16, 128]), NORM, assert_trivial=True), mask=mask)
        if CODES:
            code = _fp8_codes(q.to(gl.float32) * ((254 << 23) - bits).to(gl.float32, bitcast=True), v)
            gl.store(codes + to, gl.convert_layout(code.reshape([16, 128]), NORM, assert_trivial=True), mask=mask)
            power = gl.max(bits >> 23, 2).to(gl.uint8)
            r = gl.arange(0, 16, gl.SliceLayout(1, power.type.layout))
            g = first // 32 + gl.arange(0, 4, gl.SliceLayout(0, power.type.layout))
            gl.store(scales + (long + r)[:, None] * (D // 32) + g[None, :], power, mask=(row + r < n)[:, None])


@gluon.jit
def _put(u, at, j, split, SPLITS: gl.constexpr):
    """A program's sums of coefficients 8 * j to 8 * j + 7, [warps, R permuted, 8], to where all programs' are."""
    m = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, UNITS)))
    col = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, UNITS)))
    row = (m & 8) | ((m & 2) << 1) | ((m & 1) << 1) | ((m & 4) >> 2)
    gl.store(at + ((row * SPLITS + split) * NP)[:, None] + (j * 8 + col)[None, :], gl.sum(u.load(UNITS), 0))


@gluon.jit
def _number(line, scale, base, k, f, live):
    return gl.load(line + k, mask=live, other=0.0, cache_modifier=".cg") * f * gl.load(scale + k) + gl.load(base + k)


@gluon.jit
def _coefficients(
    group, groups, turns, split, n, raw, scale, base, new_pre, new_post, new_comb, eps, hc_eps,
    D: gl.constexpr, TILES: gl.constexpr, TR: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    """Of all rows that this program has put into `raw`, one a thread."""
    V: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for k in range(0, gl.maximum(turns * TR, 1), 128):
        j = k + gl.arange(0, 128, V)
        r = split * TR + j % TR
        row = _row(j // TR * TILES + r // R, group, groups) + r % R
        live = (j < turns * TR) & (r < R * TILES) & (row < n)
        line = raw + row * NP
        square = gl.load(line + 24, mask=live, other=1.0, cache_modifier=".cg")
        f = gl.rsqrt(square / (4 * D) + eps)
        for k in gl.static_range(4):
            gl.store(new_pre + row * 4 + k, _sigmoid(_number(line, scale, base, k, f, live)) + hc_eps, mask=live)
            gl.store(new_post + row * 4 + k, 2.0 * _sigmoid(_number(line, scale, base, 4 + k, f, live)), mask=live)
        _matrix(
            _number(line, scale, base, 8, f, live), _number(line, scale, base, 9, f, live),
            _number(line, scale, base, 10, f, live), _number(line, scale, base, 11, f, live),
            _number(line, scale, base, 12, f, live), _number(line, scale, base, 13, f, live),
            _number(line, scale, base, 14, f, live), _number(line, scale, base, 15, f, live),
            _number(line, scale, base, 16, f, live), _number(line, scale, base, 17, f, live),
            _number(line, scale, base, 18, f, live), _number(line, scale, base, 19, f, live),
            _number(line, scale, base, 20, f, live), _number(line, scale, base, 21, f, live),
            _number(line, scale, base, 22, f, live), _number(line, scale, base, 23, f, live),
            row, live, new_comb, hc_eps, 4, ITERATIONS, False,
        )  # fmt: skip
