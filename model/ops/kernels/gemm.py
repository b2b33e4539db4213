"""The Triton kernels behind `gemm_ops`: FP8 weights widened to bf16, and MXFP4 experts for many rows (sorted assignments, tensor cores).

Factors are bf16 on a GPU, which holds FP8 and FP4 values with their scales exactly, and fp32 in Triton's interpreter, whose bf16 product is
wrong. Weights are the left factor, so that they reach the tensor cores from registers, where they are widened; even and odd channels
are kept apart, as a byte holds one of each, and the rows they meet are split the same way beforehand. See `streams` for `EXACT`.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import streams


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _bf16, _round_fp8, _sigmoid, _power, _e2m1, _fp4_tile, _glu, _tile
    import triton
    import triton.language as tl

    streams.load(interpreted)
    _bf16, _round_fp8, _sigmoid = streams._bf16, streams._round_fp8, streams._sigmoid

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
    def _fp4_tile(packed, scales, where, swhere, mask, smask, BN: tl.constexpr, G: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr):
        """BN rows of G groups of 32: even and odd channels, [BN, 16 * G] each."""
        code = tl.load(packed + where, mask=mask, other=0)
        power = _power(tl.load(scales + swhere, mask=smask, other=127))[:, :, None]
        if EXACT:
            low = (_e2m1(code.to(tl.int32)) * power).to(DOT)
            high = (_e2m1(code.to(tl.int32) >> 4) * power).to(DOT)
        else:
            # `_e2m1` two at a time, as bf16: 3.5 instructions a weight, where the above has 11 and 3.7 take as long as reading it
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, k, s, t;
                mov.b32 k, 0x7E807E80;
                prmt.b32 a, $4, 0, 0x4140;
                prmt.b32 b, $4, 0, 0x4342;
                shl.b32 s, a, 12;
                and.b32 s, s, 0x80008000;
                shl.b32 t, a, 6;
                and.b32 t, t, 0x01C001C0;
                or.b32 t, t, s;
                mul.rn.bf16x2 t, t, k;
                mul.rn.bf16x2 $0, t, $5;
                shl.b32 s, b, 12;
                and.b32 s, s, 0x80008000;
                shl.b32 t, b, 6;
                and.b32 t, t, 0x01C001C0;
                or.b32 t, t, s;
                mul.rn.bf16x2 t, t, k;
                mul.rn.bf16x2 $1, t, $6;
                shl.b32 s, a, 8;
                and.b32 s, s, 0x80008000;
                shl.b32 t, a, 2;
                and.b32 t, t, 0x01C001C0;
                or.b32 t, t, s;
                mul.rn.bf16x2 t, t, k;
                mul.rn.bf16x2 $2, t, $5;
                shl.b32 s, b, 8;
                and.b32 s, s, 0x80008000;
                shl.b32 t, b, 2;
                and.b32 t, t, 0x01C001C0;
                or.b32 t, t, s;
                mul.rn.bf16x2 t, t, k;
                mul.rn.bf16x2 $3, t, $6;
                }""",
                "=&r,=&r,=&r,=&r,r,r,r",
                args=[code, tl.broadcast_to(power.to(tl.bfloat16), [BN, G, 16])],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        return tl.reshape(low, [BN, 16 * G]), tl.reshape(high, [BN, 16 * G])

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
    def _tile(offsets, tile, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
        """Expert of a tile of BM assignments, first assignment, one past the expert's last; the expert is E past the last tile."""
        every = tl.arange(0, EP)
        start = tl.load(offsets + every, mask=every < E, other=0)
        stop = tl.load(offsets + every + 1, mask=every < E, other=0)
        tiles = (stop - start + BM - 1) // BM
        through = tl.cumsum(tiles, 0)
        expert = tl.sum(((through <= tile) & (every < E)).to(tl.int32), 0)
        mine = every == expert
        before = tl.sum(tl.where(mine, through - tiles, 0), 0)
        first = tl.sum(tl.where(mine, start, 0), 0) + (tile - before) * BM
        return expert, first, tl.sum(tl.where(mine, stop, 0), 0)

    @triton.jit
    def widen(codes, scales, out, O, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr):
        """Program (BR rows, BK columns) of codes [O, K] with scales [O/32, K/32] -> bf16 [O, K]."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        column = tl.program_id(1) * BK + tl.arange(0, BK)
        mask = (row < O)[:, None] & (column < K)[None, :]
        at = row.to(tl.int64)[:, None] * K + column[None, :]
        code = tl.load(codes + at, mask=mask, other=0)
        if EXACT:
            a = (code & 0x7F).to(tl.int32)
            w = tl.where(a < 8, a.to(tl.float32) * 0.001953125, ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True))
            w = tl.where(code > 127, -w, w)
        else:
            w = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        power = _power(tl.load(scales + (row // 32)[:, None] * (K // 32) + (column // 32)[None, :], mask=mask, other=127))
        tl.store(out + at, (w * power).to(tl.bfloat16), mask=mask)

    @triton.jit
    def split(x, out, n, D: tl.constexpr, BD: tl.constexpr):
        """Program (row, BD pairs): x int32 [n, D/2], a pair of bf16 each -> int16 [n, 2, D/2], even channels, then odd."""
        row = tl.program_id(0).to(tl.int64)
        pair = tl.program_id(1) * BD + tl.arange(0, BD)
        v = tl.load(x + row * (D // 2) + pair, mask=pair < D // 2, other=0)
        tl.store(out + row * D + pair, v.to(tl.int16), mask=pair < D // 2)
        tl.store(out + row * D + D // 2 + pair, (v >> 16).to(tl.int16), mask=pair < D // 2)

    @triton.jit
    def round_rows(y, count, B: tl.constexpr):
        """Program: B groups of 32 bf16 values, FP8-rounded in place."""
        group = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = (group < count)[:, None]
        v = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        q, bits = _round_fp8(v, tl.max(tl.abs(v), 1)[:, None])
        tl.store(y + at, (q * bits.to(tl.float32, bitcast=True)).to(tl.bfloat16), mask=mask)

    @triton.jit
    def glu(x, h, count, limit, I: tl.constexpr, B: tl.constexpr, CLAMP: tl.constexpr, EXACT: tl.constexpr):
        """Program: B groups of 32 channels of [n, 2I], gate and up -> h [n, I], FP8-rounded: a shared expert."""
        group = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
        row = group // (I // 32)
        channel = (group % (I // 32))[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = (group < count)[:, None]
        at = row[:, None] * (2 * I) + channel
        gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + at + I, mask=mask, other=0.0).to(tl.float32)
        v = _glu(gate, up, 1.0, limit, CLAMP, EXACT)
        q, bits = _round_fp8(v, tl.max(tl.abs(v), 1)[:, None])
        tl.store(h + row[:, None] * I + channel, (q * bits.to(tl.float32, bitcast=True)).to(tl.bfloat16), mask=mask)

    @triton.jit
    def grouped_up(
        x, packed, scales, order, offsets, weights, h, limit,
        D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        G: tl.constexpr, CLAMP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (BN channels, BM sorted assignments). x [n, 2, D/2], packed [E, 2I, D/2] -> h [assignments, 2, I/2] as `split` has it,
        FP8-rounded, at the assignment's place in `order`."""
        expert, first, stop = _tile(offsets, tl.program_id(1), E, EP, BM)
        if expert < E:
            place = first + tl.arange(0, BM)
            live = place < stop
            slot = tl.load(order + place, mask=live, other=0)
            source = (slot // TOPK).to(tl.int64) * D
            channel = tl.program_id(0) * BN + tl.arange(0, BN)
            base = expert.to(tl.int64) * (2 * I) + channel
            pair = tl.arange(0, 16)
            half = tl.arange(0, 16 * G)
            gate = tl.zeros([BN, BM], tl.float32)
            up = tl.zeros([BN, BM], tl.float32)
            for g in range(0, D // 32, G):
                group = g + tl.arange(0, G)
                inside = (channel < I)[:, None] & (group < D // 32)[None, :]
                where = base[:, None, None] * (D // 2) + (group[:, None] * 16 + pair[None, :])[None, :, :]
                swhere = base[:, None] * (D // 32) + group[None, :]
                dim = g * 16 + half
                some = live[None, :] & (dim < D // 2)[:, None]
                even = tl.load(x + source[None, :] + dim[:, None], mask=some, other=0.0).to(DOT)
                odd = tl.load(x + source[None, :] + dim[:, None] + D // 2, mask=some, other=0.0).to(DOT)
                low, high = _fp4_tile(packed, scales, where, swhere, inside[:, :, None], inside, BN, G, DOT, EXACT)
                gate = tl.dot(low, even, gate)
                gate = tl.dot(high, odd, gate)
                low, high = _fp4_tile(
                    packed, scales, where + I * (D // 2), swhere + I * (D // 32), inside[:, :, None], inside, BN, G, DOT, EXACT
                )
                up = tl.dot(low, even, up)
                up = tl.dot(high, odd, up)
            w = tl.load(weights + slot, mask=live, other=0.0)
            v = tl.reshape(_glu(gate, up, w[None, :], limit, CLAMP, EXACT), [BN // 32, 32, BM])
            q, bits = _round_fp8(v, tl.max(tl.abs(v), 1)[:, None, :])
            v = tl.reshape(q * bits.to(tl.float32, bitcast=True), [BN, BM])
            to = h + place.to(tl.int64)[None, :] * I + ((channel % 2) * (I // 2) + channel // 2)[:, None]
            tl.store(to, v.to(tl.bfloat16), mask=live[None, :] & (channel < I)[:, None])

    @triton.jit
    def grouped_down(
        h, packed, scales, order, offsets, parts,
        D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
        DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (BN channels, BM sorted assignments): h as `grouped_up` leaves it, packed [E, D, I/2] -> parts [assignments, D] bf16,
        each at its own number."""
        expert, first, stop = _tile(offsets, tl.program_id(1), E, EP, BM)
        if expert < E:
            place = first + tl.arange(0, BM)
            live = place < stop
            slot = tl.load(order + place, mask=live, other=0)
            source = place.to(tl.int64) * I
            channel = tl.program_id(0) * BN + tl.arange(0, BN)
            base = expert.to(tl.int64) * D + channel
            pair = tl.arange(0, 16)
            half = tl.arange(0, 16 * G)
            acc = tl.zeros([BN, BM], tl.float32)
            for g in range(0, I // 32, G):
                group = g + tl.arange(0, G)
                inside = (channel < D)[:, None] & (group < I // 32)[None, :]
                where = base[:, None, None] * (I // 2) + (group[:, None] * 16 + pair[None, :])[None, :, :]
                swhere = base[:, None] * (I // 32) + group[None, :]
                dim = g * 16 + half
                some = live[None, :] & (dim < I // 2)[:, None]
                even = tl.load(h + source[None, :] + dim[:, None], mask=some, other=0.0).to(DOT)
                odd = tl.load(h + source[None, :] + dim[:, None] + I // 2, mask=some, other=0.0).to(DOT)
                low, high = _fp4_tile(packed, scales, where, swhere, inside[:, :, None], inside, BN, G, DOT, EXACT)
                acc = tl.dot(low, even, acc)
                acc = tl.dot(high, odd, acc)
            to = parts + slot.to(tl.int64)[None, :] * D + channel[:, None]
            tl.store(to, _bf16(acc, EXACT).to(tl.bfloat16), mask=live[None, :] & (channel < D)[:, None])

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

    names = {"widen": widen, "split": split, "round_rows": round_rows, "glu": glu, "up": grouped_up, "down": grouped_down}
    return SimpleNamespace(**names, combine=combine, tl=tl)
