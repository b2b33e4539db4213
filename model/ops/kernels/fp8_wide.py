"""The Triton kernel behind `moe_ops.fp8_linear` for more than 16 rows; see `skinny`.

With so many rows, activations are most of what a multiprocessor reads, so the warps of a program share them in shared memory, and pairs
of neighbouring channels go to the tensor cores as they lie there; the weights are decoded into such pairs.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from forebay.model.ops.kernels import fragments, skinny

# The four E4M3 codes of a word -> two pairs of 2^-120 times their values, the first two and the last two; the scale ($3) has the rest.
E4M3_PAIRS = """{
.reg .b32 a, s;
prmt.b32 a, $2, 0, 0x1404;
shr.b32 s, a, 4;
and.b32 s, s, 0x07F007F0;
lop3.b32 a, a, 0x80008000, s, 0xEA;
mul.rn.bf16x2 $0, a, $3;
prmt.b32 a, $2, 0, 0x3424;
shr.b32 s, a, 4;
and.b32 s, s, 0x07F007F0;
lop3.b32 a, a, 0x80008000, s, 0xEA;
mul.rn.bf16x2 $1, a, $3;
}"""


class WideLayouts(NamedTuple):
    """As `fragments.Layouts`; source: how rows of activations come from memory; inputs: how a warp has them."""

    weights: Any = None
    source: Any = None
    inputs: Any = None
    sums: Any = None
    totals: Any = None


@cache
def layouts(interpreted: bool, mw: int, m: int, n: int) -> WideLayouts:
    """For mw warps in turns of 16 of the m rows, 64 channels at a time and n rows of activations."""
    if interpreted:
        return WideLayouts()
    from triton.experimental.gluon import language as gl

    found, bits = fragments.layouts(False, 1, mw, m, 4, n), mw.bit_length() - 1
    more = [[value, 0] for value in (8 << i for i in range(n.bit_length() - 4))]
    inputs = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *more], lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * bits, block_bases=[], shape=[n, 64],
    )  # fmt: skip
    return WideLayouts(found.weights, gl.BlockedLayout([1, 8], [4, 8], [mw, 1], [1, 0]), inputs, found.sums, found.totals)


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, gl, mma, PAIRS, _pool, _pairs, _product
    global _await, _axis, _barrier, _bf16, _commit, _copy, _e4m3, _power, _ring, _round_fp8, _short_power, _take, _to
    global _total, _wait, _zeros, of_scales
    found = skinny.load(interpreted)
    tl, jit = found.tl, found.jit
    (
        _await, _axis, _barrier, _bf16, _commit, _copy, _e4m3, _power, _ring, _round_fp8, _short_power, _take, _to,
        _total, _wait, _zeros, of_scales,
    ) = attrgetter(
        "_await", "_axis", "_barrier", "_bf16", "_commit", "_copy", "_e4m3", "_power", "_ring", "_round_fp8", "_short_power",
        "_take", "_to", "_total", "_wait", "_zeros", "of_scales",
    )(found)  # fmt: skip
    PAIRS = tl.constexpr(E4M3_PAIRS)

    if interpreted:

        @jit
        def _pool(STAGES: tl.constexpr, N: tl.constexpr):
            return 0

        @jit
        def _pairs(code, scale, M: tl.constexpr):
            code = code.to(tl.int32)
            power = tl.expand_dims(_power(scale), 3)
            both = tl.join(_e4m3(code) * power, _e4m3(code >> 8) * power)
            first, second = tl.split(tl.permute(tl.reshape(both, [1, M, 4, 4, 2, 2]), [0, 1, 2, 3, 5, 4]))
            return tl.reshape(first, [1, M, 32]), tl.reshape(second, [1, M, 32])

        @jit
        def _product(acc, a, b, N: tl.constexpr, SUMS: tl.constexpr):
            return tl.dot(a, tl.reshape(b, [1, 32, N]).to(tl.float32), acc, input_precision="ieee")
    else:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma

        @jit
        def _pool(STAGES: tl.constexpr, N: tl.constexpr):
            LAYOUT: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
            return gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 64], LAYOUT)

        @jit
        def _pairs(code, scale, M: tl.constexpr):
            s, code = gl.broadcast(gl.expand_dims(_short_power(scale, 120), 3), code)
            first, second = gl.inline_asm_elementwise(PAIRS, "=&r,=&r,r,r", args=[code, s], dtype=(gl.bfloat16,) * 2, is_pure=True, pack=2)
            return gl.reshape(first, [1, M, 32]), gl.reshape(second, [1, M, 32])

        @jit
        def _product(acc, a, b, N: tl.constexpr, SUMS: tl.constexpr):
            a = gl.convert_layout(a, gl.DotOperandLayout(0, SUMS, 8), assert_trivial=False)
            b = gl.convert_layout(gl.reshape(b, [1, 32, N]), gl.DotOperandLayout(1, SUMS, 8), assert_trivial=False)
            return mma(a, b, acc)

    @jit
    def fp8_wide(
        x, codes, scales, out, partial, arrived, n, row_stride,
        K: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
        STAGES: tl.constexpr, ROUND: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr, SOURCE: tl.constexpr,
        INPUTS: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr,
    ):  # fmt: skip
        """Program (M outputs, N rows, STEPS times 64 inputs). Outputs O / GROUPS at a time have K inputs of their own in a row.

        x bf16, row_stride numbers apart; codes [O, K/2] int16, scales [O/32, K/32]. ROUND: the output is FP8-rounded after its rounding to
        bf16. partial [PARTS, n, O] fp32.
        """
        tile = tl.program_id(0) * M
        first = tl.program_id(1) * N
        begin = tl.program_id(2) * STEPS
        x += tile // (O // GROUPS) * K + begin * 64  # M divides a group's outputs, or there is one group
        codes += tile.to(tl.int64) * (K // 2) + begin * 32
        wrow = _axis(M, 1, 4, WEIGHTS)
        chunk = _axis(4, 2, 4, WEIGHTS)
        where = wrow * (K // 2) + chunk * 8 + _axis(8, 3, 4, WEIGHTS)
        srow = _axis(M, 1, 3, of_scales(WEIGHTS))
        schunk = _axis(4, 2, 3, of_scales(WEIGHTS))
        scales += (tile // 32) * (K // 32) + begin * 2
        swhere = srow // 32 * (K // 32) + schunk // 2
        row = first + _axis(N, 0, 2, SOURCE)
        dim = _axis(64, 1, 2, SOURCE)
        xwhere = row.to(tl.int64) * row_stride + dim
        ring = _ring(STAGES, 1, M, 4)
        pool = _pool(STAGES, N)
        acc = _zeros(1, M, N, SUMS)
        for s in tl.static_range(STAGES - 1):
            at = begin + s
            _copy(ring, s, codes + s * 32 + where, (tile + wrow < O) & (chunk < K // 16 - at * 4) & (s < STEPS) & (where >= 0))
        scale = tl.load(scales + swhere, mask=(tile + srow < O) & (schunk < K // 16 - begin * 4), other=127)
        _await()
        for s in tl.static_range(STAGES - 1):
            at = begin + s
            _copy(pool, s, x + s * 64 + xwhere, (row < n) & (dim < K - at * 64) & (s < STEPS))
            _commit()
        for i in range(STEPS):
            at = begin + i
            next_scale = tl.load(
                scales + (i + 1) * 2 + swhere, mask=(tile + srow < O) & (schunk < K // 16 - (at + 1) * 4) & (i + 1 < STEPS), other=127
            )
            _wait(STAGES - 2)
            code = _take(ring, i % STAGES, codes + i * 32 + where, (tile + wrow < O) & (chunk < K // 16 - at * 4) & (where >= 0), WEIGHTS)
            v = _take(pool, i % STAGES, x + i * 64 + xwhere, (row < n) & (dim < K - at * 64), INPUTS)
            j = i + STAGES - 1
            to = begin + j
            _copy(ring, j % STAGES, codes + j * 32 + where, (tile + wrow < O) & (chunk < K // 16 - to * 4) & (j < STEPS) & (where >= 0))
            _copy(pool, j % STAGES, x + j * 64 + xwhere, (row < n) & (dim < K - to * 64) & (j < STEPS))
            _commit()
            a0, a1 = _pairs(code, scale, M)
            b0, b1 = tl.split(tl.permute(tl.reshape(v, [N, 4, 4, 2, 2]), [1, 2, 4, 0, 3]))
            acc = _product(acc, a0, b0, N, SUMS)
            acc = _product(acc, a1, b1, N, SUMS)
            scale = next_scale
        _wait(0)
        y = _total(acc, FAST)
        channel = tile + _axis(M, 0, 2, TOTALS)
        to_row = first + _axis(N, 1, 2, TOTALS)
        mask = (to_row < n) & (channel < O)
        offset = to_row * O + channel
        before = PARTS - 1
        if PARTS > 1:
            tl.store(partial + tl.program_id(2) * n * O + offset, y, mask=mask)
            _barrier()
            meeting = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            before = tl.atomic_add(meeting, 1, sem="acq_rel")
        if before == PARTS - 1:
            if PARTS > 1:
                tl.store(meeting, 0)  # for the next launch
                _barrier()
                y = y * 0.0
                for p in range(PARTS):
                    y += tl.load(partial + p * n * O + offset, mask=mask, other=0.0, cache_modifier=".cg")
            y = _bf16(y, EXACT)
            if ROUND:
                z = tl.reshape(y, [M // 32, 32, N])
                q, bits = _round_fp8(z, tl.expand_dims(tl.max(tl.abs(z), 1), 1))
                y = _to(tl.reshape(q * bits.to(tl.float32, bitcast=True), [M, N]), TOTALS)
            tl.store(out + offset, y.to(tl.bfloat16), mask=mask)

    return SimpleNamespace(fp8_wide=fp8_wide)
