"""The Triton kernels behind `moe_ops.fp8_linear`; see `skinny`.

Reading the weights is all the work there is, so a program's first rounds of codes and its scales are on their way before it waits for the
kernel that makes its inputs (`dependent`). Codes come by a ring in shared memory, deep enough that a round's latency is never waited for.
Of several rows, inputs are loaded a round ahead.

One row's inputs come to shared memory whole, and take the weights' scales, which the outputs of a program share, and 2^56 (decoded weights
are 2^-120 of themselves, and sums get 2^64 back). Then a weight is decoded by one and a half instructions, exactly as long as such an input
is a normal bf16. Inputs lie there as the tensor cores read them: first channels of elements, and second ones.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from forebay.model.ops.kernels import fragments, skinny

# Two codes each of two elements -> pairs of 2^-120 times E4M3, the first codes and the second. $3 is 16: where the compiler does not know
# that, it multiplies by other units of the processor than those that mask.
E4M3 = """{
.reg .b32 m, c;
and.b32 m, $2, 0x00FF00FF;
mad.lo.u32 m, m, $3, 0x78007800;
and.b32 $0, m, 0x87F087F0;
shr.b32 c, $2, 4;
and.b32 c, c, 0x07F007F0;
lop3.b32 $1, $2, 0x80008000, c, 0xEA;
}"""


class HeldLayouts(NamedTuple):
    """How all scales and inputs of a program come from memory."""

    scales: Any = None
    inputs: Any = None
    lines: Any = None  # weights [M, KW * C * 8] on their way to shared memory
    taken: Any = None  # and from there, as a product has them


@cache
def layouts(interpreted: bool, kw: int, mw: int, m: int, c: int) -> HeldLayouts:
    """For the shape of a product, as in `fragments`."""
    if interpreted:
        return HeldLayouts()
    from triton.experimental.gluon import language as gl

    warps, weights = kw * mw, fragments.layouts(False, kw, mw, m, c, 8).weights
    along = min(32, kw * c)

    def flat(bases: list[list[int]]) -> list[list[int]]:
        return [[row, (part * c + chunk) * 8 + element] for part, row, chunk, element in bases]

    return HeldLayouts(
        gl.BlockedLayout([1, 1, 1], [1, 8, 4], [warps, 1, 1], [2, 1, 0]),
        gl.BlockedLayout([1, 1, 1, 4], [1, 4, 4, 2], [warps, 1, 1, 1], [3, 2, 1, 0]),
        gl.BlockedLayout([1, 8], [32 // along, along], [warps, 1], [1, 0]),
        gl.DistributedLinearLayout(flat(weights.reg_bases), flat(weights.lane_bases), flat(weights.warp_bases), [], [m, kw * c * 8]),
    )


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, gl, _await, _axis, _bf16, _commit, _copy, _dot, _multiply, _parts2, _ring, _round_fp8, _short_power, _take, _to
    global _total, _wait, _zeros, of_scales, PAIRS, _hold_scales, _scale, _row_scales, _inputs, _held, _hold, _half, _lines
    global _product, _round
    found = skinny.load(interpreted)
    tl, jit = found.tl, found.jit
    (
        _await, _axis, _bf16, _commit, _copy, _dot, _parts2, _ring, _round_fp8, _short_power, _take, _to, _total, _wait, _zeros,
        of_scales,
    ) = attrgetter(
        "_await", "_axis", "_bf16", "_commit", "_copy", "_dot", "_parts2", "_ring", "_round_fp8", "_short_power", "_take", "_to",
        "_total", "_wait", "_zeros", "of_scales",
    )(found)  # fmt: skip
    _multiply = skinny._multiply

    if interpreted:

        @jit
        def _hold_scales(
            scales, CHUNKS: tl.constexpr, STEPS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr
        ):  # fmt: skip
            """The scales of all rounds, for `_scale`."""
            return 0

        @jit
        def _scale(held, scales, i, CHUNKS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, WEIGHTS: tl.constexpr):
            """Round i's scales, one for each chunk, [KW, 1, C]."""
            chunk = i * (KW * C) + _axis(KW, 0, 3, WEIGHTS) * C + _axis(C, 2, 3, WEIGHTS)
            return tl.load(scales + chunk // 2, mask=chunk < CHUNKS, other=127)
    else:
        from triton.experimental.gluon import language as gl

        PAIRS = tl.constexpr(E4M3)

        @jit
        def _hold_scales(scales, CHUNKS: tl.constexpr, STEPS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr):
            WHOLE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
            PARTS: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            chunk = (_axis(STEPS, 0, 3, HELD) * KW + _axis(KW, 1, 3, HELD)) * C + _axis(C, 2, 3, HELD)
            held = gl.allocate_shared_memory(gl.uint8, [STEPS, KW, C], WHOLE)
            held.store(gl.load(scales + chunk // 2, mask=chunk < CHUNKS, other=127))
            return held._reinterpret(gl.uint8, [STEPS, KW, C], PARTS)

        @jit
        def _scale(held, scales, i, CHUNKS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, WEIGHTS: tl.constexpr):
            return gl.expand_dims(held.index(i).load(gl.SliceLayout(1, of_scales(WEIGHTS))), 1)

        @jit
        def _row_scales(scales, CHUNKS: tl.constexpr, STEPS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr):
            """The scales of all rounds, one for each chunk."""
            OF: tl.constexpr = gl.SliceLayout(3, HELD)
            chunk = (_axis(STEPS, 0, 3, OF) * KW + _axis(KW, 1, 3, OF)) * C + _axis(C, 2, 3, OF)
            return gl.load(scales + chunk // 2, mask=chunk < CHUNKS, other=127)

        @jit
        def _inputs(x, CHUNKS: tl.constexpr, STEPS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr):
            """A row's inputs: even channels and odd ones."""
            chunk = (_axis(STEPS, 0, 4, HELD) * KW + _axis(KW, 1, 4, HELD)) * C + _axis(C, 2, 4, HELD)
            at = chunk * 8 + _axis(8, 3, 4, HELD)
            return _parts2(gl.load(x + at, mask=(chunk < CHUNKS) & (at >= 0), other=0))

        @jit
        def _held(STEPS: tl.constexpr, KW: tl.constexpr, C: tl.constexpr):
            """Room for one of the two, as a whole and as rounds."""
            WHOLE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
            ROUND: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
            held = gl.allocate_shared_memory(gl.bfloat16, [STEPS, KW, C, 8], WHOLE)
            return held, held._reinterpret(gl.bfloat16, [STEPS, KW, C, 8], ROUND)

        @jit
        def _hold(even, odd, first, second, scale):
            """Inputs times the weights' scales, for `_round`."""
            power, _ = gl.broadcast(gl.expand_dims(_short_power(scale, 120), 3), first)
            even.store(first * power)
            odd.store(second * power)

        @jit
        def _half(held, i, N: tl.constexpr, INPUTS: tl.constexpr):
            """Round i's inputs, as those of N equal rows."""
            v, _ = gl.broadcast(gl.expand_dims(held.index(i).load(gl.SliceLayout(3, INPUTS)), 3), _axis(N, 3, 4, INPUTS))
            return v

        @jit
        def _lines(STAGES: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
            """As `_ring`, where rows lie as in memory, but for the two halves of 128 bytes, which trade places in every other row: so
            that eight lanes, of two rows, read all of the 128 bytes that come at a time."""
            LAYOUT: tl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [1, 0])
            return gl.allocate_shared_memory(gl.int16, [STAGES, M, KW * C * 8], LAYOUT)

        @jit
        def _product(
            acc, ring, stage, even, odd, i, factor, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
            WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr, TAKEN: tl.constexpr,
        ):  # fmt: skip
            """A stage's codes times round i's inputs."""
            if TAKEN is None:
                code = ring.index(stage).load(WEIGHTS)
            else:
                code = gl.permute(gl.reshape(ring.index(stage).load(TAKEN), [M, KW, C, 8]), [1, 0, 2, 3])
                code = gl.convert_layout(code, WEIGHTS, assert_trivial=True)
            sixteen, code = gl.broadcast(factor + _axis(M, 1, 4, WEIGHTS) * 0, code)
            first, second = gl.inline_asm_elementwise(
                PAIRS, "=&r,=&r,r,r,r", args=[code, sixteen], dtype=(gl.bfloat16,) * 2, is_pure=True, pack=2
            )
            acc = _dot(acc, first, _half(even, i, N, INPUTS), KW, M, C, N, SUMS)
            return _dot(acc, second, _half(odd, i, N, INPUTS), KW, M, C, N, SUMS)

        @jit
        def _round(
            acc, ring, codes, even, odd, where, chunk, factor, i,
            CHUNKS: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
            WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr,
        ):  # fmt: skip
            STEP: tl.constexpr = KW * C
            _wait(STAGES - 2)
            if STAGES * STEP < CHUNKS + STEP:  # not all are in the ring from the start
                j = i + STAGES - 1
                _copy(ring, j % STAGES, codes + j * (STEP * 8) + where, (chunk < CHUNKS - j * STEP) & (where >= 0))
            _commit()
            return _product(acc, ring, i % STAGES, even, odd, i, factor, KW, M, C, N, WEIGHTS, INPUTS, SUMS, None)

        @jit
        def fp8_one(
            x, codes, scales, out, factor,
            K: tl.constexpr, O: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr,
            WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr, HELD_INPUTS: tl.constexpr,
            LINES: tl.constexpr, TAKEN: tl.constexpr,
        ):  # fmt: skip
            """As `fp8_linear` for one row of few inputs, where a program takes a tile of M outputs after another: then all programs run
            from the start, and leave room for those of the next kernel. The ring holds a tile's weights."""
            CHUNKS: tl.constexpr = K // 16
            STEP: tl.constexpr = KW * C
            STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
            TILES: tl.constexpr = O // M
            tile = gl.program_id(0)
            ring = _lines(STEPS, KW, M, C)
            chunk = _axis(STEP * 8, 1, 2, LINES) // 8
            where = _axis(M, 0, 2, LINES) * (K // 2) + _axis(STEP * 8, 1, 2, LINES)
            from_ = codes + tile.to(gl.int64) * (M * K // 2)
            for s in gl.static_range(STEPS - 1):
                _copy(ring, s, from_ + s * (STEP * 8) + where, (chunk < CHUNKS - s * STEP) & (where >= 0))
                _commit()
            scale = _row_scales(scales + tile * M // 32 * (K // 32), CHUNKS, ROUNDS, KW, C, HELD_INPUTS)
            even, evens = _held(ROUNDS, KW, C)
            odd, odds = _held(ROUNDS, KW, C)
            _await()
            first, second = _inputs(x, CHUNKS, ROUNDS, KW, C, HELD_INPUTS)
            while tile < TILES:
                _hold(even, odd, first, second, scale)
                following = tile + gl.num_programs(0)
                real = gl.minimum(following, TILES - 1)
                scale = _row_scales(scales + real * M // 32 * (K // 32), CHUNKS, ROUNDS, KW, C, HELD_INPUTS)
                next_from = codes + real.to(gl.int64) * (M * K // 2)
                acc = _zeros(KW, M, N, SUMS)
                for i in gl.static_range(STEPS):
                    _wait(STEPS - 2)
                    if i == 0:  # this tile's last round
                        there = (chunk < CHUNKS - (STEPS - 1) * STEP) & (where >= 0)
                        _copy(ring, STEPS - 1, from_ + (STEPS - 1) * (STEP * 8) + where, there)
                    else:
                        there = (chunk < CHUNKS - (i - 1) * STEP) & (where >= 0) & (following < TILES)
                        _copy(ring, i - 1, next_from + (i - 1) * (STEP * 8) + where, there)
                    _commit()
                    acc = _product(acc, ring, i, evens, odds, i, factor, KW, M, C, N, WEIGHTS, INPUTS, SUMS, TAKEN)
                channel = tile * M + _axis(M, 0, 2, TOTALS)
                row = _axis(N, 1, 2, TOTALS)
                gl.store(out + channel + row * O, _total(acc, True).to(gl.bfloat16), mask=(row < 1) & (channel < O))
                from_ = next_from
                tile = following
            _wait(0)

    @jit
    def fp8_linear(
        x, codes, scales, out, n, row_stride, factor,
        K: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
        STAGES: tl.constexpr, ROUNDS: tl.constexpr, ONE: tl.constexpr, ROUND: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr,
        WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr, HELD_SCALES: tl.constexpr,
        HELD_INPUTS: tl.constexpr,
    ):  # fmt: skip
        """Program (M outputs, N rows), M up to 32. Outputs O / GROUPS at a time have K inputs of their own in a row.

        x is int32, two bf16 each, and row_stride counts those; codes [O, K/2] int16, scales [O/32, K/32]. ROUNDS: a power of two.
        ONE: there is one row. factor: 16. ROUND: the output is FP8-rounded after its rounding to bf16.
        """
        CHUNKS: tl.constexpr = K // 16
        STEP: tl.constexpr = KW * C
        STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
        tile = tl.program_id(0) * M
        first = tl.program_id(1) * N
        row = first + _axis(N, 3, 4, INPUTS)
        x += tile // (O // GROUPS) * (K // 2)  # M divides a group's outputs
        codes += tile.to(tl.int64) * (K // 2)
        scales += tile // 32 * (K // 32)
        ring = _ring(STAGES, KW, M, C)
        chunk = _axis(KW, 0, 4, WEIGHTS) * C + _axis(C, 2, 4, WEIGHTS)
        where = _axis(M, 1, 4, WEIGHTS) * (K // 2) + chunk * 8 + _axis(8, 3, 4, WEIGHTS)
        for s in tl.static_range(STAGES - 1):
            _copy(ring, s, codes + s * (STEP * 8) + where, (chunk < CHUNKS - s * STEP) & (where >= 0))
            _commit()
        acc = _zeros(KW, M, N, SUMS)
        if ONE and FAST:
            scale = _row_scales(scales, CHUNKS, ROUNDS, KW, C, HELD_INPUTS)
            _await()
            first_x, second_x = _inputs(x, CHUNKS, ROUNDS, KW, C, HELD_INPUTS)
            even, evens = _held(ROUNDS, KW, C)
            odd, odds = _held(ROUNDS, KW, C)
            _hold(even, odd, first_x, second_x, scale)
            if STEPS <= 8:
                for i in tl.static_range(STEPS):
                    acc = _round(
                        acc, ring, codes, evens, odds, where, chunk, factor, i, CHUNKS, KW, M, C, N, STAGES, WEIGHTS, INPUTS, SUMS
                    )  # fmt: skip
            else:
                for i in range(STEPS):
                    acc = _round(
                        acc, ring, codes, evens, odds, where, chunk, factor, i, CHUNKS, KW, M, C, N, STAGES, WEIGHTS, INPUTS, SUMS
                    )  # fmt: skip
        else:
            held_scales = _hold_scales(scales, CHUNKS, ROUNDS, KW, C, HELD_SCALES)
            xchunk = _axis(KW, 0, 4, INPUTS) * C + _axis(C, 1, 4, INPUTS)
            at = row.to(tl.int64) * row_stride + xchunk * 8 + _axis(8, 2, 4, INPUTS)
            _await()
            v = tl.load(x + at, mask=(row < n) & (xchunk < CHUNKS), other=0)
            for i in range(STEPS):
                next_v = tl.load(x + (i + 1) * (STEP * 8) + at, mask=(row < n) & (xchunk < CHUNKS - (i + 1) * STEP), other=0)
                _wait(STAGES - 2)
                code = _take(ring, i % STAGES, codes + i * (STEP * 8) + where, (chunk < CHUNKS - i * STEP) & (where >= 0), WEIGHTS)
                scale = _scale(held_scales, scales, i, CHUNKS, KW, C, WEIGHTS)
                if STAGES <= STEPS:
                    j = i + STAGES - 1
                    _copy(ring, j % STAGES, codes + j * (STEP * 8) + where, (chunk < CHUNKS - j * STEP) & (where >= 0))
                _commit()
                acc = _multiply(acc, v, code, scale, 8, KW, M, C, N, FAST, SUMS)
                v = next_v
        _wait(0)
        y = _bf16(_total(acc, FAST), EXACT)
        if ROUND:
            z = tl.reshape(y, [M // 32, 32, N])
            q, bits = _round_fp8(z, tl.expand_dims(tl.max(tl.abs(z), 1), 1))
            y = _to(tl.reshape(q * bits.to(tl.float32, bitcast=True), [M, N]), TOTALS)
        channel = tile + _axis(M, 0, 2, TOTALS)
        to = first + _axis(N, 1, 2, TOTALS)
        tl.store(out + to * O + channel, y.to(tl.bfloat16), mask=(to < n) & (channel < O))

    return SimpleNamespace(fp8_linear=fp8_linear, **({} if interpreted else {"fp8_one": fp8_one}))
