"""The Triton kernels behind `moe_ops`: the router, experts and FP8 linears for few rows, where reading the weights is what takes time.

Products are weight tile [BN, BK] times rows^T [BK, 16]: the many output channels are the long side of the tensor cores' tile, and the
weights go to it from registers. Factors are cast to `DOT`: bf16 on a GPU, which holds FP8 and FP4 weights with their scales exactly,
fp32 in Triton's interpreter, whose bf16 product is wrong. See `streams` for `EXACT`.
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
    global tl, triton, _bf16, _round_fp8, _sigmoid, _power, _e2m1, _fp4_tile
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
    def route(
        x, gate, bias, bias_image, image, partial, arrived, indices, weights, n, temperature, factor,
        D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
        SPLITS: tl.constexpr, TR: tl.constexpr, MASKED: tl.constexpr, NORMALISE: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """Program (16 rows, BE experts, columns): a part of the logits; the last of the rows chooses. partial [SPLITS, n, E] fp32."""
        block = tl.program_id(0)
        row = block * 16 + tl.arange(0, 16)
        expert = tl.program_id(1) * BE + tl.arange(0, BE)
        split = tl.program_id(2)
        live = row < n
        acc = tl.zeros([BE, 16], tl.float32)
        for b in range(0, CHUNK, BK):
            dim = split * CHUNK + b + tl.arange(0, BK)
            inside = dim < D
            w = tl.load(gate + expert[:, None] * D + dim[None, :], mask=(expert < E)[:, None] & inside[None, :], other=0.0).to(DOT)
            v = tl.load(x + row.to(tl.int64)[None, :] * D + dim[:, None], mask=live[None, :] & inside[:, None], other=0.0).to(DOT)
            acc = tl.dot(w, v, acc)
        where = (split * n + row)[None, :] * E + expert[:, None]
        tl.store(partial + where, acc, mask=live[None, :] & (expert < E)[:, None])
        tl.debug_barrier()
        last = tl.num_programs(1) * SPLITS - 1
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == last:
            tl.store(arrived + block, 0)  # for the next launch
            tl.debug_barrier()
            every = tl.arange(0, EP)
            real = (every < E)[None, :]
            for r in range(0, 16, TR):
                trow = block * 16 + r + tl.arange(0, TR)
                tlive = (trow < n)[:, None]
                logit = tl.zeros([TR, EP], tl.float32)
                for s in tl.static_range(SPLITS):
                    at = (s * n + trow)[:, None] * E + every[None, :]
                    logit += tl.load(partial + at, mask=tlive & real, other=0.0, cache_modifier=".cg")
                logit = logit / temperature
                # log1p(t) as log(u) * t / (u - 1) with u = 1 + t rounded: no builtin has it
                t = tl.exp(-tl.abs(logit))
                u = 1.0 + t
                tail = tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
                score = tl.sqrt(tl.maximum(logit, 0.0) + tail)
                lean = tl.load(bias + every, mask=every < E, other=0.0)[None, :] + tl.zeros([TR, 1], tl.float32)
                if MASKED:
                    other = tl.load(bias_image + every, mask=every < E, other=0.0)[None, :]
                    lean = tl.where(tl.load(image + trow, mask=trow < n, other=0)[:, None] != 0, other, lean)
                left = tl.where(real, score + lean, float("-inf"))
                left = tl.where(left == left, left, float("-inf"))  # a NaN loses; its row has NaN logits in the end
                total = tl.zeros([TR], tl.float32)
                for k in tl.static_range(TOPK):
                    best = tl.argmax(left, 1, tie_break_left=True)
                    chosen = every[None, :] == best[:, None]
                    w = tl.sum(tl.where(chosen, score, 0.0), 1)
                    total += w
                    left = tl.where(chosen, float("-inf"), left)
                    tl.store(indices + trow * TOPK + k, best.to(tl.int32), mask=trow < n)
                    tl.store(weights + trow * TOPK + k, w, mask=trow < n)
                tl.debug_barrier()
                if NORMALISE:
                    factors = (1.0 / (total + 1e-20)) * factor
                else:
                    factors = tl.zeros([TR], tl.float32) + factor
                for k in tl.static_range(TOPK):
                    w = tl.load(weights + trow * TOPK + k, mask=trow < n, other=0.0)
                    tl.store(weights + trow * TOPK + k, w * factors, mask=trow < n)

    @triton.jit
    def sort(indices, order, offsets, count, BA: tl.constexpr):
        """Program e: where expert e's assignments begin, and their numbers in ascending order. offsets [experts + 1]."""
        e = tl.program_id(0)
        before = 0
        start = 0
        while start < count:
            at = start + tl.arange(0, BA)
            before += tl.sum((tl.load(indices + at, mask=at < count, other=1 << 30) < e).to(tl.int32), 0)
            start += BA
        tl.store(offsets + e, before)
        start = 0
        while start < count:
            at = start + tl.arange(0, BA)
            mine = (tl.load(indices + at, mask=at < count, other=-1) == e).to(tl.int32)
            tl.store(order + before + tl.cumsum(mine, 0) - 1, at, mask=mine != 0)
            before += tl.sum(mine, 0)
            start += BA
        if e == tl.num_programs(0) - 1:
            tl.store(offsets + e + 1, before)

    @triton.jit
    def expert_up(
        x, packed, scales, indices, weights, h, count, limit,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, AP: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
        CLAMP: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (assignment, BN channels): the first assignment of an expert works for all of its rows, 16 at a time.

        x is int32 [n, D/2], a pair of bf16 each. packed [E, 2I, D/2]: gate rows, then up rows. h [count, I], FP8-rounded.
        """
        mine = tl.program_id(0)
        expert = tl.load(indices + mine)
        all_slots = tl.arange(0, AP)
        same = tl.load(indices + all_slots, mask=all_slots < count, other=-1) == expert
        if tl.min(tl.where(same, all_slots, AP), 0) == mine:
            rank = tl.cumsum(same.to(tl.int32), 0) - 1
            rows = tl.sum(same.to(tl.int32), 0)
            channel = tl.program_id(1) * BN + tl.arange(0, BN)
            base = expert.to(tl.int64) * (2 * I) + channel
            pair = tl.arange(0, 16)
            lane = tl.arange(0, 16)
            first = 0
            while first < rows:
                hit = same[:, None] & (rank[:, None] == first + lane[None, :])
                slot = tl.sum(tl.where(hit, all_slots[:, None], 0), 0)
                live = first + lane < rows
                token = (slot // TOPK).to(tl.int64)
                gate = tl.zeros([BN, 16], tl.float32)
                up = tl.zeros([BN, 16], tl.float32)
                for g in range(0, D // 32, G):
                    group = g + tl.arange(0, G)
                    inside = (channel < I)[:, None] & (group < D // 32)[None, :]
                    where = base[:, None, None] * (D // 2) + (group[:, None] * 16 + pair[None, :])[None, :, :]
                    swhere = base[:, None] * (D // 32) + group[None, :]
                    wide = inside[:, :, None]
                    half = g * 16 + tl.arange(0, 16 * G)
                    v = tl.load(x + token[None, :] * (D // 2) + half[:, None], mask=live[None, :] & (half < D // 2)[:, None], other=0)
                    even = (v << 16).to(tl.float32, bitcast=True).to(DOT)
                    odd = (v & -65536).to(tl.float32, bitcast=True).to(DOT)
                    low, high = _fp4_tile(packed, scales, where, swhere, wide, inside, BN, G, DOT, EXACT)
                    gate = tl.dot(low, even, gate)
                    gate = tl.dot(high, odd, gate)
                    low, high = _fp4_tile(packed, scales, where + I * (D // 2), swhere + I * (D // 32), wide, inside, BN, G, DOT, EXACT)
                    up = tl.dot(low, even, up)
                    up = tl.dot(high, odd, up)
                a = _bf16(gate, EXACT)
                b = _bf16(up, EXACT)
                if CLAMP:
                    a = tl.where(a > limit, limit, a)
                    b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
                w = tl.load(weights + slot, mask=live, other=0.0)
                y = tl.reshape(_bf16(w[None, :] * (a * _sigmoid(a) * b), EXACT), [BN // 32, 32, 16])
                q, bits = _round_fp8(y, tl.max(tl.abs(y), 1)[:, None, :])
                y = tl.reshape(q * bits.to(tl.float32, bitcast=True), [BN, 16])
                tl.store(h + slot[None, :] * I + channel[:, None], y.to(tl.bfloat16), mask=live[None, :] & (channel < I)[:, None])
                first += 16

    @triton.jit
    def expert_down(
        h, packed, scales, indices, shared, parts, arrived, out, count, n,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, AP: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
        TR: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """As `expert_up`, into parts [count, D] bf16; the last assignment to arrive at a run of channels sums them for all rows, in
        ascending order of the experts, the shared expert's output [n, D] after them. h is int32 [count, I/2], a pair of bf16 each."""
        mine = tl.program_id(0)
        expert = tl.load(indices + mine)
        all_slots = tl.arange(0, AP)
        same = tl.load(indices + all_slots, mask=all_slots < count, other=-1) == expert
        channel = tl.program_id(1) * BN + tl.arange(0, BN)
        if tl.min(tl.where(same, all_slots, AP), 0) == mine:
            rank = tl.cumsum(same.to(tl.int32), 0) - 1
            rows = tl.sum(same.to(tl.int32), 0)
            base = expert.to(tl.int64) * D + channel
            pair = tl.arange(0, 16)
            lane = tl.arange(0, 16)
            first = 0
            while first < rows:
                hit = same[:, None] & (rank[:, None] == first + lane[None, :])
                slot = tl.sum(tl.where(hit, all_slots[:, None], 0), 0)
                live = first + lane < rows
                acc = tl.zeros([BN, 16], tl.float32)
                for g in range(0, I // 32, G):
                    group = g + tl.arange(0, G)
                    inside = (channel < D)[:, None] & (group < I // 32)[None, :]
                    where = base[:, None, None] * (I // 2) + (group[:, None] * 16 + pair[None, :])[None, :, :]
                    swhere = base[:, None] * (I // 32) + group[None, :]
                    half = g * 16 + tl.arange(0, 16 * G)
                    v = tl.load(h + slot[None, :] * (I // 2) + half[:, None], mask=live[None, :] & (half < I // 2)[:, None], other=0)
                    even = (v << 16).to(tl.float32, bitcast=True).to(DOT)
                    odd = (v & -65536).to(tl.float32, bitcast=True).to(DOT)
                    low, high = _fp4_tile(packed, scales, where, swhere, inside[:, :, None], inside, BN, G, DOT, EXACT)
                    acc = tl.dot(low, even, acc)
                    acc = tl.dot(high, odd, acc)
                to = parts + slot[None, :] * D + channel[:, None]
                tl.store(to, _bf16(acc, EXACT).to(tl.bfloat16), mask=live[None, :] & (channel < D)[:, None])
                first += 16
        tl.debug_barrier()
        if tl.atomic_add(arrived + tl.program_id(1), 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(arrived + tl.program_id(1), 0)  # for the next launch
            tl.debug_barrier()
            k = tl.arange(0, KP)
            r = 0
            while r < n:
                row = r + tl.arange(0, TR)
                some = (row < n)[:, None] & (k < TOPK)[None, :]
                e = tl.load(indices + row[:, None] * TOPK + k[None, :], mask=some, other=1 << 30)
                place = tl.sum((e[:, None, :] < e[:, :, None]).to(tl.int32), 2)
                mask = (row < n)[:, None] & (channel < D)[None, :]
                total = tl.zeros([TR, BN], tl.float32)
                for t in tl.static_range(TOPK):
                    slot = row * TOPK + tl.sum(tl.where(place == t, k[None, :], 0), 1)
                    at = parts + slot[:, None] * D + channel[None, :]
                    total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
                if SHARED:
                    total += tl.load(shared + row[:, None] * D + channel[None, :], mask=mask, other=0.0).to(tl.float32)
                tl.store(out + row[:, None] * D + channel[None, :], _bf16(total, EXACT).to(tl.bfloat16), mask=mask)
                r += TR

    @triton.jit
    def fp8_linear(
        x, codes, scales, out, partial, arrived, n, row_stride,
        K: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
        SPLITS: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (BN outputs, 16 rows, CHUNK groups of 32 inputs). Outputs O / GROUPS at a time have K inputs of their own in a row.

        codes [O, K], scales [O/32, K/32]. ROUND: the output is FP8-rounded after its rounding to bf16. partial [SPLITS, n, O] fp32.
        """
        channel = tl.program_id(0) * BN + tl.arange(0, BN)
        row = tl.program_id(1) * 16 + tl.arange(0, 16)
        split = tl.program_id(2)
        live = row < n
        some = channel < O
        of = (tl.program_id(0) * BN) // (O // GROUPS)  # BN divides a group's outputs, or there is one group
        lane = tl.arange(0, 32)
        source = row.to(tl.int64) * row_stride + of * K
        acc = tl.zeros([BN, 16], tl.float32)
        for g in range(0, CHUNK, G):
            group = split * CHUNK + g + tl.arange(0, G)
            inside = some[:, None] & (group < K // 32)[None, :]
            where = channel.to(tl.int64)[:, None, None] * K + (group[:, None] * 32 + lane[None, :])[None, :, :]
            code = tl.load(codes + where, mask=inside[:, :, None], other=0)
            if EXACT:
                a = (code & 0x7F).to(tl.int32)
                w = tl.where(a < 8, a.to(tl.float32) * 0.001953125, ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True))
                w = tl.where(code > 127, -w, w)
            else:
                w = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            power = _power(tl.load(scales + (channel // 32)[:, None] * (K // 32) + group[None, :], mask=inside, other=127))
            w = tl.reshape((w * power[:, :, None]).to(DOT), [BN, 32 * G])
            dim = (split * CHUNK + g) * 32 + tl.arange(0, 32 * G)
            v = tl.load(x + source[None, :] + dim[:, None], mask=live[None, :] & (dim < K)[:, None], other=0.0).to(DOT)
            acc = tl.dot(w, v, acc)
        at = row[None, :] * O + channel[:, None]
        mask = live[None, :] & some[:, None]
        before = SPLITS - 1
        if SPLITS > 1:
            tl.store(partial + split * n * O + at, acc, mask=mask)
            tl.debug_barrier()
            meeting = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            before = tl.atomic_add(meeting, 1, sem="acq_rel")
        if before == SPLITS - 1:
            if SPLITS > 1:
                tl.store(meeting, 0)  # for the next launch
                tl.debug_barrier()
                acc = tl.zeros([BN, 16], tl.float32)
                for s in range(SPLITS):
                    acc += tl.load(partial + s * n * O + at, mask=mask, other=0.0, cache_modifier=".cg")
            y = _bf16(acc, EXACT)
            if ROUND:
                z = tl.reshape(y, [BN // 32, 32, 16])
                q, bits = _round_fp8(z, tl.max(tl.abs(z), 1)[:, None, :])
                y = tl.reshape(q * bits.to(tl.float32, bitcast=True), [BN, 16])
            tl.store(out + at, y.to(tl.bfloat16), mask=mask)

    names = {"route": route, "sort": sort, "expert_up": expert_up, "expert_down": expert_down, "fp8_linear": fp8_linear}
    return SimpleNamespace(**names, tl=tl, cdiv=triton.cdiv)
