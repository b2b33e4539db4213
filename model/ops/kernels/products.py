"""Products of stored FP4 and FP8 weights with many rows, on tensor cores: what `gemm`'s kernels for experts do inside.

Weights are the left factor, so that they go from registers to the tensor cores: while one step's product runs, the next step's codes are
widened. For that, a thread must hold the codes of exactly the channels that it feeds; so channels are taken in another order, in which
nothing has to move between threads. In each STEP of them, channel c is at place (c % 4) * STEP / 4 + c // 4: place p * STEP / 4 + u is
byte p of the u-th word of FP8 codes, and nibble p or p + 4 of the (u // 2)-th word of FP4 codes. The rows come in that order; where their
channels do not fill the last 128, the others are zero.

Factors are bf16 on a GPU, which holds FP8 and FP4 values with their scales exactly, and fp32 in Triton's interpreter, whose bf16 product is
wrong. There (`EXACT`, see `streams`) codes are widened by plain arithmetic, on a GPU by bit tricks on pairs of them: the bits of a code as
the sign, exponent and mantissa of a bf16 far too small, times a power of two that makes up for it, but for 2^-64, which the sums get. This
is exact for scales from 2^-58 to 2^65.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import settled

# Nibbles p and p + 4 of a word ($1) as bf16 of 2^-126 times E2M1, subnormal for 0.5; the scale ($3, twice) has the rest. $5 is
# 2^(12 - 4 p): a product by it is a shift by other units of the processor than those that mask.
_E2M1_PAIR = """{
.reg .b32 s, t;
mul.lo.u32 s, $1, $5;
shr.u32 t, s, 6;
and.b32 s, s, 0x80008000;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $0, t, $3;
}"""
# Byte p of two words ($1 and $2, with $5 choosing the byte) as bf16 of 2^-120 times E4M3.
_E4M3_PAIR = """{
.reg .b32 a, s, t;
prmt.b32 a, $1, $2, $5;
and.b32 s, a, 0x80008000;
shr.u32 t, a, 4;
and.b32 t, t, 0x07F007F0;
or.b32 t, t, s;
mul.rn.bf16x2 $0, t, $3;
}"""
# What differs between the channels of a thread: multipliers of `_E2M1_PAIR`, choices of `_E4M3_PAIR`, and places of a scale in a word.
TABLE = (4096, 256, 16, 1, 0x4000, 0x5010, 0x6020, 0x7030, 0, 8, 16, 24)


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The helpers by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _power, _e2m1, _e4m3, _exponents, _fp4_weights, _fp4_product, _fp4_products, _fp8_product, _settled
    global E2M1_PAIR, E4M3_PAIR
    import triton
    import triton.language as tl

    E2M1_PAIR, E4M3_PAIR = tl.constexpr(_E2M1_PAIR), tl.constexpr(_E4M3_PAIR)
    _settled = settled.load(interpreted)._settled

    @triton.jit
    def _power(byte):
        """E8M0 byte -> fp32; byte 0 is 2^-127."""
        e = byte.to(tl.int32)
        return tl.where(e == 0, 0x400000, e << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _e2m1(code):
        """Low four bits of int32 -> fp32: as the sign, exponent and mantissa of a number 2^126 too small, subnormal for 0.5."""
        return (((code << 22) & 0x1C00000) | (code >> 3 << 31)).to(tl.float32, bitcast=True) * 8.507059173023462e37

    @triton.jit
    def _e4m3(code):
        """Low byte of int32 -> fp32."""
        a = code & 0x7F
        v = tl.where(a < 8, a.to(tl.float32) * 0.001953125, ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True))
        return tl.where((code & 0x80) != 0, -v, v)

    @triton.jit
    def _exponents(scales, row, k, table, K: tl.constexpr, STEP: tl.constexpr, DUP: tl.constexpr):
        """Of the groups of 32 channels from k to k + STEP: E8M0 bytes as int32 [rows, STEP / 32]. A row's bytes are read as words where
        they are whole words, DUP times: fewer loads than threads are not done ahead of time, nor are those of bytes."""
        G: tl.constexpr = STEP // 32
        if K % 128 == 0:
            some = tl.arange(0, DUP)
            word = tl.load(scales + row[:, None] * (K // 128) + k // 128 + (some // DUP)[None, :])
            place = some[:, None] * (G // DUP) + tl.arange(0, G // DUP)[None, :]
            if STEP < 128:
                place += k % 128 // 32
            shift = tl.load(table + 8 + place)
            e = tl.reshape((word[:, :, None] >> shift[None, :, :]) & 255, [row.shape[0], G])
        else:
            group = k // 32 + tl.arange(0, G)
            e = tl.load(scales + row[:, None] * (K // 32) + group[None, :], mask=(group < K // 32)[None, :], other=127).to(tl.int32)
        return e

    @triton.jit
    def _fp4_weights(
        packed, scales, table, factor, row, k, K: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, DUP: tl.constexpr,
        DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Channels k to k + STEP of rows `row` [BN] of int32 packed [rows, K/8], in their order; 2^-64 of them unless EXACT."""
        G: tl.constexpr = STEP // 32
        word = k // 8 + tl.arange(0, 4 * G)
        if K % 128 == 0:
            code = tl.load(packed + row[:, None] * (K // 8) + word[None, :])
        else:
            code = tl.load(packed + row[:, None] * (K // 8) + word[None, :], mask=(word < K // 8)[None, :], other=0)
        code = tl.broadcast_to(code[:, None, :, None], [BN, 4, 4 * G, 2])
        e = _exponents(scales, row, k, table, K, STEP, DUP)
        if EXACT:
            nibble = code >> (tl.arange(0, 4)[None, :, None, None] * 4 + tl.arange(0, 2)[None, None, None, :] * 16)
            power = tl.reshape(tl.broadcast_to(_power(e)[:, None, :, None, None], [BN, 4, G, 4, 2]), [BN, 4, 4 * G, 2])
            w = (_e2m1(nibble) * power).to(DOT)
        else:
            power = (e * 0x800080 + 0x1F001F00)[:, None, :, None, None]  # two bf16: 2^(e - 127 + 126 - 64)
            power = tl.reshape(tl.broadcast_to(power, [BN, 4, G, 4, 2]), [BN, 4, 4 * G, 2])
            w = tl.inline_asm_elementwise(E2M1_PAIR, "=r,r,r,r,r,r,r", args=[code, power, factor], dtype=tl.bfloat16, is_pure=True, pack=2)
        return tl.reshape(w, [BN, STEP])

    @triton.jit
    def _fp4_product(
        x, packed, scales, table, source, row, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
        STAGES: tl.constexpr, DUP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Rows `row` [BN] of int32 packed [rows, K/8] times rows `source` [BM] of x -> [BN, BM] fp32."""
        KP: tl.constexpr = (K + 127) // 128 * 128
        # Numbers that differ between the channels of a thread are read from memory: of what is loaded, the compiler makes a copy that is
        # laid out as the product needs it; of what is computed it does not, and would rather move the widened weights.
        factor = tl.broadcast_to(tl.load(table + tl.arange(0, 4))[None, :, None, None], [BN, 4, STEP // 8, 2])
        acc = tl.zeros([BN, BM], tl.float32)
        for k in tl.range(0, KP, STEP, num_stages=STAGES):
            w = _fp4_weights(packed, scales, table, factor, row, k, K, BN, STEP, DUP, DOT, EXACT)
            acc = _settled(tl.dot(w, tl.load(x + source[None, :] * KP + k + tl.arange(0, STEP)[:, None]).to(DOT), acc), EXACT)
        if not EXACT:
            acc = acc * 18446744073709551616.0
        return acc

    @triton.jit
    def _fp4_products(
        x, packed, scales, table, source, source2, row, K: tl.constexpr, BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr,
        STEP: tl.constexpr, STAGES: tl.constexpr, DUP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """`_fp4_product` for BM and for BM2 rows of x, widening weights once: sizes of one product are powers of two."""
        KP: tl.constexpr = (K + 127) // 128 * 128
        factor = tl.broadcast_to(tl.load(table + tl.arange(0, 4))[None, :, None, None], [BN, 4, STEP // 8, 2])
        acc = tl.zeros([BN, BM], tl.float32)
        acc2 = tl.zeros([BN, BM2], tl.float32)
        for k in tl.range(0, KP, STEP, num_stages=STAGES):
            w = _fp4_weights(packed, scales, table, factor, row, k, K, BN, STEP, DUP, DOT, EXACT)
            channel = k + tl.arange(0, STEP)[:, None]
            acc = tl.dot(w, tl.load(x + source[None, :] * KP + channel).to(DOT), acc)
            acc2 = _settled(tl.dot(w, tl.load(x + source2[None, :] * KP + channel).to(DOT), acc2), EXACT)
            acc = _settled(acc, EXACT)
        if not EXACT:
            acc = acc * 18446744073709551616.0
            acc2 = acc2 * 18446744073709551616.0
        return acc, acc2

    @triton.jit
    def _fp8_product(
        x, codes, scales, table, source, row, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
        STAGES: tl.constexpr, DUP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """As `_fp4_product`, of int32 codes [rows, K/4] with a scale for 32 rows and 32 channels."""
        KP: tl.constexpr = (K + 127) // 128 * 128
        G: tl.constexpr = STEP // 32
        choice = tl.broadcast_to(tl.load(table + 4 + tl.arange(0, 4))[None, :, None], [BN, 4, 8 * G])
        acc = tl.zeros([BN, BM], tl.float32)
        for k in tl.range(0, KP, STEP, num_stages=STAGES):
            word = k // 4 + tl.arange(0, 8 * G)
            if K % 128 == 0:
                code = tl.load(codes + row[:, None] * (K // 4) + word[None, :])
            else:
                code = tl.load(codes + row[:, None] * (K // 4) + word[None, :], mask=(word < K // 4)[None, :], other=0)
            code = tl.broadcast_to(code[:, None, :], [BN, 4, 8 * G])
            e = _exponents(scales, row // 32, k, table, K, STEP, DUP)
            if EXACT:
                power = tl.reshape(tl.broadcast_to(_power(e)[:, None, :, None], [BN, 4, G, 8]), [BN, 4, 8 * G])
                w = (_e4m3(code >> (tl.arange(0, 4) * 8)[None, :, None]) * power).to(DOT)
            else:
                power = (e * 0x800080 + 0x1C001C00)[:, None, :, None]  # two bf16: 2^(e - 127 + 120 - 64)
                power = tl.reshape(tl.broadcast_to(power, [BN, 4, G, 8]), [BN, 4, 8 * G])
                w = tl.inline_asm_elementwise(
                    E4M3_PAIR, "=r,r,r,r,r,r,r", args=[code, power, choice], dtype=tl.bfloat16, is_pure=True, pack=2
                )
            v = tl.load(x + source[None, :] * KP + k + tl.arange(0, STEP)[:, None]).to(DOT)
            acc = _settled(tl.dot(tl.reshape(w, [BN, STEP]), v, acc), EXACT)
        if not EXACT:
            acc = acc * 18446744073709551616.0
        return acc

    names = {"fp4_product": _fp4_product, "fp4_products": _fp4_products, "fp8_product": _fp8_product}
    return SimpleNamespace(**names, power=_power, e4m3=_e4m3)
