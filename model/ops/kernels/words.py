"""Words for kernels in Triton: tensors of pairs of bf16 numbers, and what is done to them before they are stored as FP8 or FP4.

Neighbouring channels are a pair, which rotations turn together and of which FP4 makes a byte. A word is 32 bits with the two numbers of a
pair, the even channel's below.

What is done for every channel decides how fast a kernel is that only stores, so on a GPU it is few instructions for whole words. They give
the same bits as the integer arithmetic that the interpreter does instead, which has no assembly and whose casts are wrong. There a
magnitude with m mantissa bits and least exponent l is q steps of 2^(max(exponent, l) - m), where adding 1.5 * 2^23 rounds q to even at
ties, and its code is (exponent - l) * 2^m + q, with carries into the exponent included. A cast to bf16 of one number, not of a pair, would
be one of the slowest instructions there are.

A tie between FP4 codes times a scale has 7 bits and a number x has 8, so x / scale is a tie or further from any than half a step of bf16
there: the product of x and the scale's reciprocal, even if that is not the nearest one, has the quotient's code once rounded to bf16.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

# $0: four E4M3 codes. $1, $2: words of the numbers that they stand for. $3, $4: words. $5, $6: the scale's inverse as a pair, NaN makes all
# of them NaN. $7, $8: the scale.
FP8 = """{
.reg .b32 p, q, a, b, c, d;
.reg .b16 e, f, g, h, i, j;
mul.rn.bf16x2 p, $3, $5;
mul.rn.bf16x2 q, $4, $6;
shl.b32 a, p, 16;
and.b32 b, p, 0xFFFF0000;
shl.b32 c, q, 16;
and.b32 d, q, 0xFFFF0000;
cvt.rn.satfinite.e4m3x2.f32 e, b, a;
cvt.rn.satfinite.e4m3x2.f32 f, d, c;
mov.b32 $0, {e, f};
cvt.rn.f16x2.e4m3x2 p, e;
cvt.rn.f16x2.e4m3x2 q, f;
mov.b32 {g, h}, p;
mov.b32 {i, j}, q;
cvt.f32.f16 a, g;
cvt.f32.f16 b, h;
cvt.f32.f16 c, i;
cvt.f32.f16 d, j;
mul.rn.f32 a, a, $7;
mul.rn.f32 b, b, $7;
mul.rn.f32 c, c, $8;
mul.rn.f32 d, d, $8;
cvt.rn.bf16x2.f32 $1, b, a;
cvt.rn.bf16x2.f32 $2, d, c;
}"""

# Ends each of the ways to make the codes of a word.
LEAST = """min.u16x2 x, x, m;
min.u16x2 y, y, seven;
min.u16x2 x, x, y;
shr.b32 y, $W, 12;
lop3.b32 T, x, y, 0x00070007, 0xE4;
"""
# One word $W with the inverse $I of its scale -> T with a pair of E2M1 codes in bits 0-3 and 16-19, and other bits elsewhere. In bf16 192
# and up count in ones: 2z + 192 counts steps of the smallest numbers, z + 194 and z / 2 + 196 those of the next two sizes, from codes 2 and
# 4 on; the least of the three, and 7, is the code.
_PAIR = (
    """and.b32 m, $W, 0x7FFF7FFF;
shl.b32 x, m, 16;
and.b32 y, m, 0xFFFF0000;
mul.rn.f32 x, x, $I;
mul.rn.f32 y, y, $I;
cvt.rn.bf16x2.f32 m, y, x;
fma.rn.bf16x2 x, m, two, one;
fma.rn.bf16x2 y, m, half, four;
add.rn.bf16x2 m, m, most;
"""
    + LEAST
)


def of_four(pair: str) -> str:
    """A byte for each of four words $1-$4, whose factors follow, four by four."""
    head = """{
.reg .b32 m, x, y, t0, t1, t2, t3, two, half, one, most, four, seven;
mov.b32 two, 0x40004000;
mov.b32 half, 0x3F003F00;
mov.b32 one, 0x43404340;
mov.b32 most, 0x43424342;
mov.b32 four, 0x43444344;
mov.b32 seven, 0x43474347;
"""
    tail = """prmt.b32 x, t0, t1, 0x6240;
prmt.b32 y, t2, t3, 0x6240;
prmt.b32 m, x, y, 0x5410;
prmt.b32 x, x, y, 0x7632;
shl.b32 x, x, 4;
lop3.b32 $0, m, x, 0x0F0F0F0F, 0xE4;
}"""
    for i in range(4):
        named = pair.replace("T,", f"t{i},")
        for name, first in (("$W", 1), ("$I", 5), ("$L", 9), ("$H", 13)):
            named = named.replace(name, f"${first + i}")
        head += named
    return head + tail


# $0: a byte for each of the four words $1-$4 with inverses $5-$8.
FP4 = of_four(_PAIR)


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The functions by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, _even, _odd, _pair, _upper, _largest, CODES8, CODES4
    import triton
    import triton.language as tl

    CODES8, CODES4 = tl.constexpr(FP8), tl.constexpr(FP4)

    @triton.jit
    def _even(w):
        return (w << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def _odd(w):
        return (w & -65536).to(tl.float32, bitcast=True)

    if interpreted:

        @triton.jit
        def _pair(a, b):
            """Words of two numbers, rounded to bf16."""
            a = a.to(tl.int32, bitcast=True)
            b = b.to(tl.int32, bitcast=True)
            a = tl.where((a & 0x7FFFFFFF) > 0x7F800000, a | 0x400000, a + 0x7FFF + ((a >> 16) & 1))
            b = tl.where((b & 0x7FFFFFFF) > 0x7F800000, b | 0x400000, b + 0x7FFF + ((b >> 16) & 1))
            return ((a >> 16) & 0xFFFF) | (b & -65536)

        @triton.jit
        def _largest(w):
            """fp32 bits of the largest magnitude along the last axis; of bit patterns, so that NaN is the largest."""
            return tl.max(tl.maximum((w << 16) & 0x7FFFFFFF, w & 0x7FFF0000), len(w.shape) - 1)

        @triton.jit
        def _fp8(w, inverse, power):
            """Pairs of E4M3 codes as int16, and words of the numbers that they stand for. inverse, power: of the scale, as fp32 bits."""
            for i in tl.static_range(2):
                raw = (w << 16) if i == 0 else (w & -65536)
                z = (raw & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse.to(tl.float32, bitcast=True)
                bad = z != z
                e = tl.maximum(z.to(tl.int32, bitcast=True) >> 23, 121)
                wide = tl.where(bad, 0.0, z) * ((257 - e) << 23).to(tl.float32, bitcast=True) + 12582912.0
                code = ((e - 121) * 8 + wide.to(tl.int32, bitcast=True) - 0x4B400000) | ((raw >> 24) & 0x80)
                # q times its step times the scale, and the sign as it was, also that of zero.
                near = (wide - 12582912.0) * ((e - 3) << 23).to(tl.float32, bitcast=True) * power.to(tl.float32, bitcast=True)
                near = tl.where(bad, 0x7FC00000, near.to(tl.int32, bitcast=True) | (raw & -2147483648))
                code = tl.where(bad, 0x7F, code)
                if i == 0:
                    even_code = code
                    even_near = near
            return (even_code | (code << 8)).to(tl.int16), ((even_near >> 16) & 0xFFFF) | (near & -65536)

        @triton.jit
        def _scale4(top):
            """E4M3 code of a main entry's scale, whose largest magnitude has these bits, and its inverse, as fp32 bits."""
            scale = tl.minimum(top.to(tl.float32, bitcast=True) * 0.1666666716337204, 448.0)
            e = tl.maximum(scale.to(tl.int32, bitcast=True) >> 23, 121)
            wide = scale * ((257 - e) << 23).to(tl.float32, bitcast=True) + 12582912.0
            scale = (wide - 12582912.0) * ((e - 3) << 23).to(tl.float32, bitcast=True)
            return (e - 121) * 8 + wide.to(tl.int32, bitcast=True) - 0x4B400000, (1.0 / scale).to(tl.int32, bitcast=True)

        @triton.jit
        def _fp4(w, inverse):
            """Bytes of pairs of E2M1 codes. inverse: of the scale, as fp32 bits."""
            for i in tl.static_range(2):
                raw = (w << 16) if i == 0 else (w & -65536)
                z = ((raw & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
                z = tl.minimum((z + 0x7FFF + ((z >> 16) & 1)) & -65536, 0x40C00000)
                e = tl.maximum(z >> 23, 127)
                q = z.to(tl.float32, bitcast=True) * ((255 - e) << 23).to(tl.float32, bitcast=True) + 12582912.0
                code = ((e - 127) * 2 + q.to(tl.int32, bitcast=True) - 0x4B400000) | ((raw >> 28) & 8)
                if i == 0:
                    even_code = code
            return (even_code | (code << 4)).to(tl.int8)

        @triton.jit
        def _shares(d):
            """Softmax of two gates with the difference d: of the larger and of the smaller."""
            e = tl.exp(-tl.abs(d))
            inverse = 1.0 / (1.0 + e)
            return inverse, e * inverse

        @triton.jit
        def _here(x):
            """A factor that was read ahead."""
            return x

        @triton.jit
        def _factor(w):
            """Words as a factor of a product."""
            wide = tl.join(_even(w), _odd(w))
            return tl.reshape(wide, [w.shape[0], 2 * w.shape[1]])
    else:

        @triton.jit
        def _pair(a, b):
            return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1)

        @triton.jit
        def _upper(a, b):
            return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)

        @triton.jit
        def _largest(w):
            w = tl.reduce(w & 0x7FFF7FFF, len(w.shape) - 1, _upper)
            return tl.maximum(w << 16, w & -65536)

        @triton.jit
        def _fp8(w, inverse, power):
            inverse = inverse | ((inverse >> 16) & 0xFFFF)
            return tl.inline_asm_elementwise(
                CODES8, "=&r,=&r,=&r,r,r,r,r,r,r", [w, inverse, power], dtype=(tl.int16, tl.int32), is_pure=True, pack=2
            )

        @triton.jit
        def _scale4(top):
            scale = (top.to(tl.float32, bitcast=True) * 0.1666666716337204).to(tl.float8e4nv)
            return scale.to(tl.uint8, bitcast=True).to(tl.int32), (1.0 / scale.to(tl.float32)).to(tl.int32, bitcast=True)

        @triton.jit
        def _fp4(w, inverse):
            return tl.inline_asm_elementwise(CODES4, "=&r,r,r,r,r,r,r,r,r", [w, inverse], dtype=tl.int8, is_pure=True, pack=4)

        @triton.jit
        def _shares(d):
            return tl.inline_asm_elementwise(
                """{
                .reg .f32 e, s;
                abs.f32 e, $2;
                mul.f32 e, e, 0fBFB8AA3B;
                ex2.approx.ftz.f32 e, e;
                add.f32 s, e, 0f3F800000;
                rcp.approx.ftz.f32 s, s;
                mul.f32 $1, e, s;
                mov.f32 $0, s;
                }""",
                "=&f,=&f,f", [d], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip

        @triton.jit
        def _here(x):  # otherwise Triton would have it wait for the reading and go to shared memory at once
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)

        @triton.jit
        def _factor(w):
            even = w.to(tl.int16).to(tl.bfloat16, bitcast=True)
            odd = (w >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            w = tl.reshape(tl.join(even, odd), [w.shape[0], 2 * w.shape[1]])
            # It does nothing, but Triton would choose worse layouts if it saw where this comes from.
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=tl.bfloat16, is_pure=False, pack=2)

    names = "_even", "_odd", "_pair", "_largest", "_fp8", "_scale4", "_fp4", "_shares", "_factor", "_here"
    made = locals() | globals()
    return SimpleNamespace(**{name: made[name] for name in names})
