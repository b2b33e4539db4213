"""The Triton kernel behind `moe_ops.fp8_linear`; see `skinny`."""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import SimpleNamespace

from forebay.model.ops.kernels import skinny


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, _axis, _bf16, _round_fp8, _start8, _sums8, _to, _total
    found = skinny.load(interpreted)
    tl, jit = found.tl, found.jit
    _axis, _bf16, _round_fp8, _start8, _sums8, _to, _total = attrgetter(
        "_axis", "_bf16", "_round_fp8", "_start8", "_sums8", "_to", "_total",
    )(found)  # fmt: skip

    @jit
    def fp8_linear(
        x, codes, scales, out, n, row_stride,
        K: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
        ROUND: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr,
        TOTALS: tl.constexpr,
    ):  # fmt: skip
        """Program (M outputs, N rows). Outputs O / GROUPS at a time have K inputs of their own in a row.

        x is int32, two bf16 each, and row_stride counts those; codes [O, K/2] int16, scales [O/32, K/32].
        ROUND: the output is FP8-rounded after its rounding to bf16.
        """
        tile = tl.program_id(0) * M
        first = tl.program_id(1) * N
        row = first + _axis(N, 3, 4, INPUTS)
        x += tile // (O // GROUPS) * (K // 2)  # M divides a group's outputs
        codes += tile.to(tl.int64) * (K // 2)
        scales += tile // 32 * (K // 32)
        code, scale = _start8(codes, scales, K, KW, M, C, WEIGHTS)
        acc = _sums8(code, scale, codes, scales, x, row.to(tl.int64) * row_stride, row < n, K, KW, M, C, N, FAST, WEIGHTS, INPUTS, SUMS)
        y = _bf16(_total(acc, FAST), EXACT)
        if ROUND:
            z = tl.reshape(y, [M // 32, 32, N])
            q, bits = _round_fp8(z, tl.expand_dims(tl.max(tl.abs(z), 1), 1))
            y = _to(tl.reshape(q * bits.to(tl.float32, bitcast=True), [M, N]), TOTALS)
        channel = tile + _axis(M, 0, 2, TOTALS)
        to = first + _axis(N, 1, 2, TOTALS)
        tl.store(out + to * O + channel, y.to(tl.bfloat16), mask=(to < n) & (channel < O))

    return SimpleNamespace(fp8_linear=fp8_linear)
