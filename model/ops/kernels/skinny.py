"""Products of many weight rows, packed in FP4 or FP8, with few rows of activations: what the kernels of `moe_ops` are made of.

Such a product takes as long as reading the weights does, if decoding keeps up: a multiprocessor of an H200 may spend some four
instructions on a weight in that time. So a thread loads 16 bytes of codes at a time, one run along the inputs (a chunk), decodes them by
two or three instructions a weight, and hands the registers to the tensor cores as they are. That is possible since a sum does not care
for the order of its inputs: a 16-bit element has the codes of 4 (FP4) or 2 (FP8) channels, the i-th channels of all elements are one
product, and the order of the elements is the one in which `mma` wants them. Only then does the compiler see nothing to move between
threads: the layouts are given (`fragments`), in Gluon (`dialect`).

Tensors are weights [KW, M, C, 8] (KW warps share the inputs, each has C chunks of 8 elements of M rows), activations [KW, C, 8, N] and
sums [KW, M, N]. `FAST` is whether weights are decoded by the packed instructions (exact for scales from 2^-58 to 2^65) or, as in the
interpreter, by plain arithmetic.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import SimpleNamespace

from forebay.model.ops.kernels import dialect

# Four codes each of two elements -> the two elements' first codes as a pair of bf16, their second and so on, 2^-126 times E2M1 (subnormal
# for 0.5); the scale ($5, as an operand of each element, with $6 for the second) has the rest. The product puts a copy of the code's sign
# at bit 15 and of the others at 8 to 6.
E2M1 = """{
.reg .b32 m, c;
and.b32 m, $4, 0x000F000F;
mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0;
mul.rn.bf16x2 $0, m, $5;
and.b32 m, $4, 0x00F000F0;
mul.lo.u32 m, m, 0x104;
and.b32 m, m, 0x81C081C0;
mul.rn.bf16x2 $1, m, $5;
shr.b32 c, $4, 8;
and.b32 m, c, 0x000F000F;
mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0;
mul.rn.bf16x2 $2, m, $5;
and.b32 m, c, 0x00F000F0;
mul.lo.u32 m, m, 0x104;
and.b32 m, m, 0x81C081C0;
mul.rn.bf16x2 $3, m, $5;
}"""
# Two codes each of two elements -> pairs of 2^-120 times E4M3; the scale ($3, and $4) has the rest. The sum carries the sign from bit 11
# to 15.
E4M3 = """{
.reg .b32 m, c;
and.b32 m, $2, 0x00FF00FF;
mad.lo.u32 m, m, 16, 0x78007800;
and.b32 m, m, 0x87F087F0;
mul.rn.bf16x2 $0, m, $3;
shr.b32 c, $2, 8;
and.b32 m, c, 0x00FF00FF;
mad.lo.u32 m, m, 16, 0x78007800;
and.b32 m, m, 0x87F087F0;
mul.rn.bf16x2 $1, m, $3;
}"""
# An E8M0 byte, no more than so large, to bf16 with that much more exponent, twice.
SCALE = "{{.reg .b32 m; and.b32 m, $1, 255; min.u32 m, m, {}; mad.lo.u32 $0, m, 0x800080, {};}}"


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """What `dialect.load` has, and products, by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, PAIRS4, PAIRS8, PAIR126, PAIR120
    global _folded, of_eights, _zeros, _dot, _parts2, _parts4, _copy, _commit, _wait, _take, _axis, of_scales
    global _total, _power, _short_power, _scale_pair, _e2m1, _e4m3, _decode4, _decode8, _multiply, _spots, _begin, _sums, _read
    found = dialect.load(interpreted)
    tl, jit = found.tl, found.jit
    PAIRS4, PAIRS8 = tl.constexpr(E2M1), tl.constexpr(E4M3)
    PAIR126, PAIR120 = tl.constexpr(SCALE.format(192, 62 * 0x800080)), tl.constexpr(SCALE.format(198, 56 * 0x800080))
    _folded, of_eights, _zeros, _dot, _parts2, _parts4, _copy, _commit, _wait, _take, _axis, of_scales = attrgetter(
        "_folded", "of_eights", "_zeros", "_dot", "_parts2", "_parts4", "_copy", "_commit", "_wait", "_take", "_axis", "of_scales",
    )(found)  # fmt: skip

    @jit
    def _total(acc, FAST: tl.constexpr):
        """Sums of the warps that share the inputs, [M, N]; of numbers 2^-64 small where FAST."""
        y = tl.sum(acc, 0)
        if FAST:
            y = y * 18446744073709551616.0
        return y

    @jit
    def _power(byte):
        """E8M0 byte -> fp32; byte 0 is 2^-127."""
        e = byte.to(tl.int32)
        return tl.where(e == 0, 0x400000, e << 23).to(tl.float32, bitcast=True)

    @jit
    def _short_power(byte, LIFT: tl.constexpr):
        """2^(byte - 127 + LIFT - 64) as bf16: what undoes the exponent of a bit trick, 2^-64 small; bytes up to 254 - LIFT + 64 hold."""
        e = tl.minimum(byte.to(tl.int32), 318 - LIFT)
        return ((e + (LIFT - 64)) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)

    @jit
    def _scale_pair(byte, LIFT: tl.constexpr):
        """As `_short_power`, twice in an int32."""
        if LIFT == 126:
            return tl.inline_asm_elementwise(PAIR126, "=r,r", args=[byte], dtype=tl.int32, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(PAIR120, "=r,r", args=[byte], dtype=tl.int32, is_pure=True, pack=1)

    @jit
    def _e2m1(code):
        """Low four bits of int32 -> fp32: as the sign, exponent and mantissa of a number 2^126 too small, subnormal for 0.5."""
        return (((code << 22) & 0x1C00000) | (code >> 3 << 31)).to(tl.float32, bitcast=True) * 8.507059173023462e37

    @jit
    def _e4m3(code):
        """Low byte of int32 -> fp32."""
        a = code & 0x7F
        v = tl.where(a < 8, a.to(tl.float32) * 0.001953125, ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True))
        return tl.where((code & 0x80) != 0, -v, v)

    @jit
    def _decode4(code, scale, FAST: tl.constexpr):
        """Elements [KW, M, C, 8] of four E2M1 codes and scales [KW, M, C] -> four factors."""
        if FAST:
            s, code = tl.broadcast(tl.expand_dims(_scale_pair(scale, 126), 3), code)
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                PAIRS4, "=&r,=&r,=&r,=&r,r,r,r", args=[code, s], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        else:
            power = tl.expand_dims(_power(scale), 3)
            code = code.to(tl.int32)
            c0 = _e2m1(code) * power
            c1 = _e2m1(code >> 4) * power
            c2 = _e2m1(code >> 8) * power
            c3 = _e2m1(code >> 12) * power
        return c0, c1, c2, c3

    @jit
    def _decode8(code, scale, FAST: tl.constexpr):
        """Elements [KW, M, C, 8] of two E4M3 codes and scales [KW, M, C] -> two factors."""
        if FAST:
            s, code = tl.broadcast(tl.expand_dims(_scale_pair(scale, 120), 3), code)
            c0, c1 = tl.inline_asm_elementwise(PAIRS8, "=&r,=&r,r,r,r", args=[code, s], dtype=(tl.bfloat16,) * 2, is_pure=True, pack=2)
        else:
            power = tl.expand_dims(_power(scale), 3)
            code = code.to(tl.int32)
            c0 = _e4m3(code) * power
            c1 = _e4m3(code >> 8) * power
        return c0, c1

    @jit
    def _multiply(
        acc, x, code, scale,
        BITS: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr, SUMS: tl.constexpr,
    ):  # fmt: skip
        if BITS == 4:
            c0, c1, c2, c3 = _decode4(code, scale, FAST)
            x0, x1, x2, x3 = _parts4(x)
            acc = _dot(acc, c0, x0, KW, M, C, N, SUMS)
            acc = _dot(acc, c1, x1, KW, M, C, N, SUMS)
            acc = _dot(acc, c2, x2, KW, M, C, N, SUMS)
            acc = _dot(acc, c3, x3, KW, M, C, N, SUMS)
        else:
            c0, c1 = _decode8(code, scale, FAST)
            x0, x1 = _parts2(x)
            acc = _dot(acc, c0, x0, KW, M, C, N, SUMS)
            acc = _dot(acc, c1, x1, KW, M, C, N, SUMS)
        return acc

    @jit
    def _spots(
        BITS: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, apart, PAIR: tl.constexpr,
        WEIGHTS: tl.constexpr,
    ):  # fmt: skip
        """Where a round's codes and scales lie from the first row's first on, and which chunk of a row each is."""
        chunk = _axis(KW, 0, 4, WEIGHTS) * C + _axis(C, 2, 4, WEIGHTS)
        schunk = _axis(KW, 0, 3, of_scales(WEIGHTS)) * C + _axis(C, 2, 3, of_scales(WEIGHTS))
        # in 64 bits, and scales' also as sums, so that what differs between a thread's rows becomes a part of instructions
        row = _axis(M, 1, 4, WEIGHTS)
        if PAIR:
            row += row // (M // 2) * (apart - M // 2)
        where = row.to(tl.int64) * (K * BITS // 16) + (chunk * 8 + _axis(8, 3, 4, WEIGHTS))
        if BITS == 4:
            SCALES: tl.constexpr = of_scales(of_eights(WEIGHTS))
            seight = _axis(M // 8, 1, 4, SCALES)
            if PAIR:
                seight += seight // (M // 16) * ((apart - M // 2) // 8)
            swhere = _axis(8, 2, 4, SCALES) * (K // 32) + _axis(KW, 0, 4, SCALES) * C + _axis(C, 3, 4, SCALES)
            swhere = _folded(swhere.to(tl.int64) + seight.to(tl.int64) * (K // 4), [KW, M, C], of_scales(WEIGHTS))
        else:
            srow = _axis(M, 1, 3, of_scales(WEIGHTS))
            if PAIR:
                swhere = (srow % (M // 2) // 32 + srow // (M // 2) * (apart // 32)) * (K // 32) + schunk // 2
            else:
                swhere = srow // 32 * (K // 32) + schunk // 2
        return chunk, where, schunk, swhere

    @jit
    def _begin(
        ring, codes, apart,
        BITS: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, PAIR: tl.constexpr, STAGES: tl.constexpr,
        WEIGHTS: tl.constexpr,
    ):  # fmt: skip
        """The first rounds of codes on their way into the ring, for `_sums`."""
        chunk, where, _, _ = _spots(BITS, K, KW, M, C, apart, PAIR, WEIGHTS)
        for s in tl.static_range(STAGES - 1):
            _copy(ring, s, codes + s * KW * C * 8 + where, (chunk < K * BITS // 128 - s * KW * C) & (where >= 0))
            _commit()

    @jit
    def _sums(
        ring, codes, scales, apart, x, offset,
        BITS: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, PAIR: tl.constexpr,
        STAGES: tl.constexpr, FAST: tl.constexpr, WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr,
    ):  # fmt: skip
        """M rows of K weights, the second half of which with PAIR are `apart` rows behind the first, times N rows of x: [KW, M, N].

        codes and scales point to the first row, in elements of 16 bits and bytes. x has an element's channels in an integer, int64 for E2M1
        and int32 for E4M3; row i begins at offset [N], along the last of four axes. Codes come by a ring of STAGES rounds in shared
        memory, which `_begin` has filled; scales and x are read a round ahead (in the last round what has been read is read again).
        """
        CHUNKS: tl.constexpr = K * BITS // 128
        STEP: tl.constexpr = KW * C
        STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
        EVEN: tl.constexpr = CHUNKS % STEP == 0
        chunk, where, schunk, swhere = _spots(BITS, K, KW, M, C, apart, PAIR, WEIGHTS)
        xchunk = _axis(KW, 0, 4, INPUTS) * C + _axis(C, 1, 4, INPUTS)
        at = offset + (xchunk * 8 + _axis(8, 2, 4, INPUTS))
        acc = _zeros(KW, M, N, SUMS)
        if N <= 8:
            v = _read(x + at, xchunk, CHUNKS, 0, EVEN)
        scale = _read(scales + swhere, schunk, CHUNKS, 127, EVEN)
        stage = 0
        before = STAGES - 1
        coming = codes + (STAGES - 1) * STEP * 8
        for i in range(STEPS):
            ahead = tl.minimum(i + 1, STEPS - 1)
            if N <= 8:
                next_v = _read(x + ahead * (STEP * 8) + at, xchunk, CHUNKS - ahead * STEP, 0, EVEN)
            else:  # they would take too many registers
                v = _read(x + i * (STEP * 8) + at, xchunk, CHUNKS - i * STEP, 0, EVEN)
            next_scale = _read(scales + ahead * (STEP * 4 // BITS) + swhere, schunk, CHUNKS - ahead * STEP, 127, EVEN)
            _wait(STAGES - 2)
            code = _take(ring, stage, codes + i * (STEP * 8) + where, (chunk < CHUNKS - i * STEP) & (where >= 0), WEIGHTS)
            j = i + STAGES - 1
            if EVEN:
                _copy(ring, before, coming + where, (where >= 0) & (j < STEPS))
            else:
                _copy(ring, before, coming + where, (chunk < CHUNKS - j * STEP) & (where >= 0))
            _commit()
            coming += STEP * 8
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
            acc = _multiply(acc, v, code, scale, BITS, KW, M, C, N, FAST, SUMS)
            if N <= 8:
                v = next_v
            scale = next_scale
        _wait(0)
        return acc

    @jit
    def _read(pointers, chunk, left, other: tl.constexpr, EVEN: tl.constexpr):
        """What is at the pointers; `other` from the chunk `left` on."""
        if EVEN:
            v = tl.load(pointers)
        else:
            v = tl.load(pointers, mask=chunk < left, other=other)
        return v

    more = ("_total", "_power", "_short_power", "_e4m3", "_begin", "_sums")
    return SimpleNamespace(**vars(found), **{name: globals()[name] for name in more})
