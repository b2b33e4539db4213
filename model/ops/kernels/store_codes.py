"""Assembly that makes FP4 codes of words (`words`) where a thread has all of a group, whose scale it then computes once.

Magnitudes of the two numbers of a word are multiplied by the scale's inverse at once. A bf16 number cannot hold the inverse of an E4M3
scale, but the sum of two can: a product by both is wrong by less than 2^-16 of itself, and it takes fifteen times that to make another
code, as a tie between codes times a scale has 7 bits and a number 8; ties stay ties. Inverses of powers of two are exact, so that there the
sums that count steps (see `words`) are single operations.
"""

from __future__ import annotations

from forebay.model.ops.kernels.words import LEAST, of_four

_SPLIT = (
    """and.b32 m, $W, 0x7FFF7FFF;
mul.rn.bf16x2 x, m, $L;
fma.rn.bf16x2 m, m, $I, x;
fma.rn.bf16x2 x, m, two, one;
fma.rn.bf16x2 y, m, half, four;
add.rn.bf16x2 m, m, most;
"""
    + LEAST
)
_POWER = (
    """and.b32 m, $W, 0x7FFF7FFF;
fma.rn.bf16x2 x, m, $L, one;
fma.rn.bf16x2 y, m, $H, four;
fma.rn.bf16x2 m, m, $I, most;
"""
    + LEAST
)


# $0: four bytes of pairs of codes. $1-$4: words. $5-$8, $9-$12: pairs of bf16 numbers whose sum is the scale's inverse, the larger first.
FP4_SPLIT = of_four(_SPLIT)
# The same for a power of two. $5-$8: its inverse as a pair, $9-$12: twice that, $13-$16: half.
FP4_POWER = of_four(_POWER)
# $0: E4M3 code of a main entry's scale. $1, $2: its inverse, as FP4_SPLIT takes it. $3: fp32 bits of the largest magnitude.
SCALE_SPLIT = """{
.reg .b32 a, b;
.reg .b16 e, l, h;
.reg .pred p;
setp.gt.s32 p, $3, 0x7F800000;
selp.b32 a, 0, $3, p;
max.s32 a, a, 0x3C400000;
mul.rn.f32 a, a, 0f3E2AAAAB;
mov.b32 b, 0;
cvt.rn.satfinite.e4m3x2.f32 e, b, a;
cvt.rn.f16x2.e4m3x2 b, e;
cvt.u32.u16 a, e;
selp.b32 $0, 0x7F, a, p;
mov.b32 {l, h}, b;
cvt.f32.f16 a, l;
rcp.approx.ftz.f32 a, a;
cvt.rn.bf16x2.f32 $1, a, a;
and.b32 b, $1, 0xFFFF0000;
sub.rn.f32 a, a, b;
cvt.rn.bf16x2.f32 $2, a, a;
}"""
