"""The Triton kernels behind `gemm_ops`: FP8 weights widened to bf16, and a mixture of experts for many rows.

`prepare` puts the input in the order of channels that `products` explains, `grouped_up` what it hands to `grouped_down`. D and I channels
are kept as DP and IP, the next multiples of 128. See `streams` for `EXACT`.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import products, streams

SIZES = ("n", "count", "slots")  # no number of rows must make the compiler work again


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _bf16, _round_fp8, _sigmoid, _power, _e4m3, _fp4_product, _fp4_products, _fp8_product, _glu
    global _finish_up, _finish_down, _routed_up, _routed_up_twice, _routed_down, _routed_down_twice, _scales_of
    import triton
    import triton.language as tl

    helpers = products.load(interpreted)
    _power, _e4m3, _fp4_product, _fp8_product = helpers.power, helpers.e4m3, helpers.fp4_product, helpers.fp8_product
    _fp4_products = helpers.fp4_products
    streams.load(interpreted)
    _bf16, _round_fp8, _sigmoid = streams._bf16, streams._round_fp8, streams._sigmoid

    @triton.jit
    def _glu(gate, up, w, limit, CLAMP: tl.constexpr, EXACT: tl.constexpr):
        """`swiglu` of gate and up rounded to bf16, with the routing weight w; fp32 that bf16 holds."""
        a = _bf16(gate, EXACT)
        b = _bf16(up, EXACT)
        if CLAMP:
            a = tl.where(a > limit, limit, a)
            b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
        return _bf16(w * (a * _sigmoid(a) * b), EXACT)

    @triton.jit
    def _finish_up(
        acc, w, live, to, h, limit, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, CLAMP: tl.constexpr,
        EXACT: tl.constexpr,
    ):  # fmt: skip
        """SwiGLU of BN / 2 channels, FP8-rounded, into rows `to` of h. In acc eight channels of gate and their eight of up alternate, which
        the same threads hold."""
        IP: tl.constexpr = (I + 127) // 128 * 128
        HALF: tl.constexpr = BN // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BN // 16, 2, 8, BM]), (0, 2, 3, 1)))
        v = _glu(tl.reshape(gate, [HALF, BM]), tl.reshape(up, [HALF, BM]), w[None, :], limit, CLAMP, EXACT)
        if I % 128 != 0:
            v = tl.where((tl.program_id(0) * HALF + tl.arange(0, HALF) < I)[:, None], v, 0.0)
        v = tl.reshape(v, [HALF // 32, 32, BM])
        q, bits = _round_fp8(v, tl.max(tl.abs(v), 1)[:, None, :])
        U: tl.constexpr = STEP // 4 if STEP < HALF else HALF // 4
        BLOCKS: tl.constexpr = HALF // 4 // U
        v = tl.reshape(q * bits.to(tl.float32, bitcast=True), [BLOCKS, U, 4, BM])
        v = tl.permute(v, (3, 0, 2, 1)).to(tl.bfloat16)
        word = tl.program_id(0) * (HALF // 4)
        begin = tl.multiple_of(word // (STEP // 4) * STEP + word % (STEP // 4), U)
        block = tl.arange(0, BLOCKS)[None, :, None, None] * STEP
        at = block + tl.arange(0, 4)[None, None, :, None] * (STEP // 4) + tl.arange(0, U)[None, None, None, :]
        tl.store(h + begin + to.to(tl.int64)[:, None, None, None] * IP + at, v, mask=live[:, None, None, None])

    @triton.jit
    def _finish_down(acc, live, to, parts, channel, D: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr):
        at = parts + to.to(tl.int64)[None, :] * D + channel[:, None]
        if D % BN == 0:
            tl.store(at, _bf16(acc, EXACT).to(tl.bfloat16), mask=live[None, :])
        else:
            tl.store(at, _bf16(acc, EXACT).to(tl.bfloat16), mask=live[None, :] & (channel < D)[:, None])

    @triton.jit(do_not_specialize=["O"])
    def widen(codes, scales, out, O, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr):
        """Program (BR rows, BK columns) of codes [O, K] with scales [O/32, K/32] -> bf16 [O, K]."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        column = tl.program_id(1) * BK + tl.arange(0, BK)
        mask = (row < O)[:, None] & (column < K)[None, :]
        at = row.to(tl.int64)[:, None] * K + column[None, :]
        code = tl.load(codes + at, mask=mask, other=0)
        if EXACT:
            w = _e4m3(code.to(tl.int32))
        else:
            w = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        power = _power(tl.load(scales + (row // 32)[:, None] * (K // 32) + (column // 32)[None, :], mask=mask, other=127))
        tl.store(out + at, (w * power).to(tl.bfloat16), mask=mask)

    @triton.jit(do_not_specialize=["count"])
    def round_rows(y, count, B: tl.constexpr):
        """Program: B groups of 32 bf16 values, FP8-rounded in place."""
        group = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = (group < count)[:, None]
        v = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        q, bits = _round_fp8(v, tl.max(tl.abs(v), 1)[:, None])
        tl.store(y + at, (q * bits.to(tl.float32, bitcast=True)).to(tl.bfloat16), mask=mask)

    @triton.jit(do_not_specialize=SIZES)
    def prepare(
        indices, order, tiles, x, pairs, n, count, slots,
        E: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BA: tl.constexpr, BU: tl.constexpr, ROWS: tl.constexpr,
        STEP: tl.constexpr,
    ):  # fmt: skip
        """Programs 0 to E - 1 sort: expert e's assignments, ascending, into their part of `order`, and its tiles of BM of them into `tiles`
        [3, slots]: expert, first and one past the last in `order`. An expert has a fixed run of tiles, those it does not need of expert -1.

        The other programs bring BU words (of four bf16, int64) of ROWS rows of x [n, D/4] into the order of the products: pairs [n, DP]
        int16.
        """
        e = tl.program_id(0)
        if e < E:
            place = tl.arange(0, BA)
            lower = tl.zeros([BA], tl.int32)
            same = tl.zeros([BA], tl.int32)
            start = 0
            while start < count:
                other = tl.load(indices + start + place, mask=start + place < count, other=-1)
                lower += ((other >= 0) & (other < e)).to(tl.int32)
                same += (other == e).to(tl.int32)
                start += BA
            before = tl.sum(lower, 0)
            stop = before + tl.sum(same, 0)
            tile = before // BM + e
            after = tl.where(e == E - 1, slots, stop // BM + e + 1)
            at = tile
            while at < after:
                where = at + tl.arange(0, 64)
                first = before + (where - tile) * BM
                mask = where < after
                tl.store(tiles + where, tl.where(first < stop, e, -1), mask=mask)
                tl.store(tiles + slots + where, first, mask=mask)
                tl.store(tiles + 2 * slots + where, tl.zeros([64], tl.int32) + stop, mask=mask)
                at += 64
            start = 0
            while start < count:
                mine = (tl.load(indices + start + place, mask=start + place < count, other=-1) == e).to(tl.int32)
                tl.store(order + before + tl.cumsum(mine, 0) - 1, start + place, mask=mine != 0)
                before += tl.sum(mine, 0)
                start += BA
        else:
            DP: tl.constexpr = (D + 127) // 128 * 128
            row = ((e - E) // PARTS * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            word = ((e - E) % PARTS * BU + tl.arange(0, BU))[None, :]
            v = tl.load(x + row * (D // 4) + word, mask=(row < n) & (word < D // 4), other=0)
            U: tl.constexpr = STEP // 4
            to = pairs + row * DP + word // U * STEP + word % U
            for p in tl.static_range(4):
                tl.store(to + p * U, (v >> (16 * p)).to(tl.int16), mask=(row < n) & (word < DP // 4))

    @triton.jit
    def _scales_of(scales, rows, K: tl.constexpr):
        """Where the scales of a row begin, which are words where a row of them is whole words."""
        if K % 128 == 0:
            at = scales + rows * (K // 128)
        else:
            at = scales + rows * (K // 32)
        return at

    @triton.jit
    def _routed_up(
        x, packed, scales, table, order, weights, h, rows, first, stop, limit, row,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
        STAGES: tl.constexpr, DUP: tl.constexpr, CLAMP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        place = first + tl.arange(0, BM)
        slot = tl.load(order + tl.minimum(place, stop - 1))
        packed += rows * (D // 8)
        scales = _scales_of(scales, rows, D)
        acc = _fp4_product(x, packed, scales, table, slot // TOPK, row, D, BM, BN, STEP, STAGES, DUP, DOT, EXACT)
        _finish_up(acc, tl.load(weights + slot), place < stop, place, h, limit, I, BM, BN, STEP, CLAMP, EXACT)

    @triton.jit
    def _routed_up_twice(
        x, packed, scales, table, order, weights, h, rows, first, stop, limit, row,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
        STAGES: tl.constexpr, DUP: tl.constexpr, CLAMP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        place = first + tl.arange(0, BM)  # all of them live
        place2 = first + BM + tl.arange(0, BM2)
        slot = tl.load(order + place)
        slot2 = tl.load(order + tl.minimum(place2, stop - 1))
        packed += rows * (D // 8)
        scales = _scales_of(scales, rows, D)
        acc, acc2 = _fp4_products(x, packed, scales, table, slot // TOPK, slot2 // TOPK, row, D, BM, BM2, BN, STEP, STAGES, DUP, DOT, EXACT)
        _finish_up(acc, tl.load(weights + slot), place < stop, place, h, limit, I, BM, BN, STEP, CLAMP, EXACT)
        _finish_up(acc2, tl.load(weights + slot2), place2 < stop, place2, h, limit, I, BM2, BN, STEP, CLAMP, EXACT)

    @triton.jit
    def _routed_down(
        h, packed, scales, table, order, parts, rows, first, stop, channel, row,
        D: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
        DUP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        place = first + tl.arange(0, BM)
        source = tl.minimum(place, stop - 1)
        packed += rows * (I // 8)
        scales = _scales_of(scales, rows, I)
        acc = _fp4_product(h, packed, scales, table, source, row, I, BM, BN, STEP, STAGES, DUP, DOT, EXACT)
        _finish_down(acc, place < stop, tl.load(order + source), parts, channel, D, BN, EXACT)

    @triton.jit
    def _routed_down_twice(
        h, packed, scales, table, order, parts, rows, first, stop, channel, row,
        D: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
        STAGES: tl.constexpr, DUP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        place = first + tl.arange(0, BM)
        place2 = first + BM + tl.arange(0, BM2)
        source2 = tl.minimum(place2, stop - 1)
        packed += rows * (I // 8)
        scales = _scales_of(scales, rows, I)
        acc, acc2 = _fp4_products(h, packed, scales, table, place, source2, row, I, BM, BM2, BN, STEP, STAGES, DUP, DOT, EXACT)
        _finish_down(acc, place < stop, tl.load(order + place), parts, channel, D, BN, EXACT)
        _finish_down(acc2, place2 < stop, tl.load(order + source2), parts, channel, D, BN, EXACT)

    @triton.jit(do_not_specialize=[*SIZES, "shared"])
    def grouped_up(
        x, packed, scales, codes, code_scales, table, order, tiles, weights, h, limit, n, count, slots, shared,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
        STAGES: tl.constexpr, DUP: tl.constexpr, SHARED_STAGES: tl.constexpr, QUARTERS: tl.constexpr, SHARED: tl.constexpr,
        CLAMP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (BN / 2 channels of gate and of up, tile of BM rows). The first `shared` tiles are rows of the shared expert, codes [2I,
        D/4] int32; the others those of `tiles`, packed [E, 2I, D/8] int32. x and h as the module says: [n, DP] -> [count + n, IP],
        FP8-rounded, at an assignment's place in `order`; the shared expert's rows follow. A tile that is half empty is worked as half a
        tile, with QUARTERS one that is a quarter empty as three quarters."""
        tile = tl.program_id(1)
        i = tl.arange(0, BN)
        channel = tl.program_id(0) * (BN // 2) + i // 16 * 8 + i % 8
        if I % 128 != 0:
            channel = tl.minimum(channel, I - 1)
        row = channel + i // 8 % 2 * I
        if tile < shared:
            if SHARED:
                place = tile * BM + tl.arange(0, BM)
                source = tl.minimum(place, n - 1)
                acc = _fp8_product(x, codes, code_scales, table, source, row, D, BM, BN, STEP, SHARED_STAGES, DUP, DOT, EXACT)
                _finish_up(acc, tl.full([BM], 1.0, tl.float32), place < n, count + place, h, limit, I, BM, BN, STEP, CLAMP, EXACT)
        else:
            expert = tl.load(tiles + tile - shared)
            first = tl.load(tiles + slots + tile - shared)
            stop = tl.load(tiles + 2 * slots + tile - shared)
            rows = expert.to(tl.int64) * (2 * I)
            HALF: tl.constexpr = BM // 2 if BM >= 32 else BM
            MOST: tl.constexpr = BM // 4 * 3 if QUARTERS else HALF
            if expert >= 0:
                if first + HALF >= stop:
                    _routed_up(
                        x, packed, scales, table, order, weights, h, rows, first, stop, limit, row, D, I, TOPK, HALF, BN, STEP, STAGES, DUP,
                        CLAMP, DOT, EXACT,
                    )  # fmt: skip
                elif first + MOST < stop:
                    _routed_up(
                        x, packed, scales, table, order, weights, h, rows, first, stop, limit, row, D, I, TOPK, BM, BN, STEP, STAGES, DUP,
                        CLAMP, DOT, EXACT,
                    )  # fmt: skip
                if QUARTERS:  # noqa: SIM102 (a branch that is not compiled otherwise)
                    if (first + HALF < stop) & (first + MOST >= stop):
                        _routed_up_twice(
                            x, packed, scales, table, order, weights, h, rows, first, stop, limit, row, D, I, TOPK, HALF, HALF // 2, BN,
                            STEP, STAGES, DUP, CLAMP, DOT, EXACT,
                        )  # fmt: skip

    @triton.jit(do_not_specialize=[*SIZES, "shared"])
    def grouped_down(
        h, packed, scales, codes, code_scales, table, order, tiles, parts, n, count, slots, shared,
        D: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, DUP: tl.constexpr,
        SHARED_STAGES: tl.constexpr, QUARTERS: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (BN channels, tile of BM rows), as `grouped_up`: h [count + n, IP], packed [E, D, I/8], codes [D, I/4] -> parts [count +
        n, D] bf16, an assignment's at its own number."""
        tile = tl.program_id(1)
        channel = tl.program_id(0) * BN + tl.arange(0, BN)
        row = channel
        if D % BN != 0:
            row = tl.minimum(row, D - 1)
        if tile < shared:
            if SHARED:
                place = tile * BM + tl.arange(0, BM)
                source = count + tl.minimum(place, n - 1)
                acc = _fp8_product(h, codes, code_scales, table, source, row, I, BM, BN, STEP, SHARED_STAGES, DUP, DOT, EXACT)
                _finish_down(acc, place < n, count + place, parts, channel, D, BN, EXACT)
        else:
            expert = tl.load(tiles + tile - shared)
            first = tl.load(tiles + slots + tile - shared)
            stop = tl.load(tiles + 2 * slots + tile - shared)
            rows = expert.to(tl.int64) * D
            HALF: tl.constexpr = BM // 2 if BM >= 32 else BM
            MOST: tl.constexpr = BM // 4 * 3 if QUARTERS else HALF
            if expert >= 0:
                if first + HALF >= stop:
                    _routed_down(
                        h, packed, scales, table, order, parts, rows, first, stop, channel, row, D, I, HALF, BN, STEP, STAGES, DUP, DOT,
                        EXACT,
                    )  # fmt: skip
                elif first + MOST < stop:
                    _routed_down(
                        h, packed, scales, table, order, parts, rows, first, stop, channel, row, D, I, BM, BN, STEP, STAGES, DUP, DOT,
                        EXACT,
                    )  # fmt: skip
                if QUARTERS:  # noqa: SIM102 (a branch that is not compiled otherwise)
                    if (first + HALF < stop) & (first + MOST >= stop):
                        _routed_down_twice(
                            h, packed, scales, table, order, parts, rows, first, stop, channel, row, D, I, HALF, HALF // 2, BN, STEP,
                            STAGES, DUP, DOT, EXACT,
                        )  # fmt: skip

    @triton.jit
    def combine(
        parts, indices, shared, out, D: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, BD: tl.constexpr, SHARED: tl.constexpr,
        EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (row, BD channels): the row's parts in ascending order of the experts, then the shared one. A row of -1 gives zeros."""
        row = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BD + tl.arange(0, BD)
        mask = channel < D
        k = tl.arange(0, KP)
        e = tl.load(indices + row * TOPK + k, mask=k < TOPK, other=1 << 30)
        place = tl.sum((e[None, :] < e[:, None]).to(tl.int32), 1)
        real = (channel < D) & (tl.zeros([BD], tl.int32) + tl.min(e, 0) >= 0)
        total = tl.zeros([BD], tl.float32)
        for t in tl.static_range(TOPK):
            slot = row * TOPK + tl.sum(tl.where(place == t, k, 0), 0)
            total += tl.load(parts + slot * D + channel, mask=real, other=0.0).to(tl.float32)
        if SHARED:
            total += tl.load(shared + row * D + channel, mask=real, other=0.0).to(tl.float32)
        tl.store(out + row * D + channel, _bf16(total, EXACT).to(tl.bfloat16), mask=mask)

    names = {"widen": widen, "round_rows": round_rows, "prepare": prepare, "up": grouped_up, "down": grouped_down, "combine": combine}
    return SimpleNamespace(**names, tl=tl)
