"""Roundings and other small parts of Triton kernels, for compiled ones and those in Triton's interpreter.

triton is optional, so nothing here exists before `load` is called. `EXACT` is set in the interpreter, where a store to bf16 cuts off
instead of rounding. Helpers are globals, since a kernel sees no closures.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The functions by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _bf16, _sigmoid, _round_fp8, _fp8_codes
    import triton
    import triton.language as tl

    @triton.jit
    def _bf16(x, EXACT: tl.constexpr):
        """fp32 -> fp32 that bf16 holds, to nearest even."""
        if EXACT:
            bits = x.to(tl.int32, bitcast=True)
            y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            y = tl.where(x == x, y, x)
        else:
            y = x.to(tl.bfloat16).to(tl.float32)
        return y

    @triton.jit
    def _sigmoid(x):
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def _round_fp8(v, amax):
        """v fp32 in groups whose largest magnitude amax is broadcast to v: (v / scale) rounded to E4M3 values, bits of the scale.

        A number with 3 mantissa bits and least exponent -6 is rounded to multiples of its last place, to even at ties, by adding and taking
        away 1.5 * 2^23: no cast to FP8, which the interpreter gets wrong. NaN stays NaN.
        """
        bits = ((tl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        v = v * ((254 << 23) - bits).to(tl.float32, bitcast=True)
        step = (tl.maximum((v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, 121) - 3) << 23
        q = (v * ((254 << 23) - step).to(tl.float32, bitcast=True) + 12582912.0 - 12582912.0) * step.to(tl.float32, bitcast=True)
        return q, bits

    @triton.jit
    def _fp8_codes(q, v):
        """E4M3 bits of the E4M3 values q, with the sign of v, which q has lost at zero; NaN gives 0x7F."""
        a = tl.abs(q)
        code = tl.where(a < 0.015625, (a * 512.0).to(tl.int32), (a.to(tl.int32, bitcast=True) >> 20) - 960)
        code = tl.where(q == q, code, 0x7F)
        return (code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)

    return SimpleNamespace(_bf16=_bf16, _sigmoid=_sigmoid, _round_fp8=_round_fp8, _fp8_codes=_fp8_codes)
