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

# Of two words: the pairs of their lowest nibbles, second lowest and so on, as bf16 of value 2^-126 times E2M1, subnormal for 0.5; the
# scale ($10) has the rest.
_E2M1_PAIRS = """{
.reg .b32 a, b, s, t;
prmt.b32 a, $8, $9, 0x5410;
prmt.b32 b, $8, $9, 0x7632;
shl.b32 s, a, 12;
and.b32 s, s, 0x80008000;
shl.b32 t, a, 6;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $0, t, $10;
shl.b32 s, a, 8;
and.b32 s, s, 0x80008000;
shl.b32 t, a, 2;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $1, t, $10;
shl.b32 s, a, 4;
and.b32 s, s, 0x80008000;
shr.b32 t, a, 2;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $2, t, $10;
mov.b32 s, a;
and.b32 s, s, 0x80008000;
shr.b32 t, a, 6;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $3, t, $10;
shl.b32 s, b, 12;
and.b32 s, s, 0x80008000;
shl.b32 t, b, 6;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $4, t, $10;
shl.b32 s, b, 8;
and.b32 s, s, 0x80008000;
shl.b32 t, b, 2;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $5, t, $10;
shl.b32 s, b, 4;
and.b32 s, s, 0x80008000;
shr.b32 t, b, 2;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $6, t, $10;
mov.b32 s, b;
and.b32 s, s, 0x80008000;
shr.b32 t, b, 6;
and.b32 t, t, 0x01C001C0;
or.b32 t, t, s;
mul.rn.bf16x2 $7, t, $10;
}"""
# Of two words: the pairs of their lowest bytes and so on, as bf16 of value 2^-120 times E4M3; the scale ($6) has the rest.
_E4M3_PAIRS = """{
.reg .b32 a, s, t;
prmt.b32 a, $4, $5, 0x4000;
and.b32 s, a, 0x80008000;
shr.b32 t, a, 4;
and.b32 t, t, 0x07F007F0;
or.b32 t, t, s;
mul.rn.bf16x2 $0, t, $6;
prmt.b32 a, $4, $5, 0x5010;
and.b32 s, a, 0x80008000;
shr.b32 t, a, 4;
and.b32 t, t, 0x07F007F0;
or.b32 t, t, s;
mul.rn.bf16x2 $1, t, $6;
prmt.b32 a, $4, $5, 0x6020;
and.b32 s, a, 0x80008000;
shr.b32 t, a, 4;
and.b32 t, t, 0x07F007F0;
or.b32 t, t, s;
mul.rn.bf16x2 $2, t, $6;
prmt.b32 a, $4, $5, 0x7030;
and.b32 s, a, 0x80008000;
shr.b32 t, a, 4;
and.b32 t, t, 0x07F007F0;
or.b32 t, t, s;
mul.rn.bf16x2 $3, t, $6;
}"""


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _bf16, _round_fp8, _sigmoid, _power, _e2m1, _e4m3, _short_power, _sixteen, _fp4_dot, _fp8_dot, _gated
    global E2M1_PAIRS, E4M3_PAIRS
    import triton
    import triton.language as tl

    E2M1_PAIRS, E4M3_PAIRS = tl.constexpr(_E2M1_PAIRS), tl.constexpr(_E4M3_PAIRS)
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
    def _short_power(byte, LIFT: tl.constexpr):
        """2^(byte - 127 + LIFT - 64) as bf16: what undoes the exponent of a bit trick, 2^-64 small; bytes up to 254 - LIFT + 64 hold."""
        e = tl.minimum(byte.to(tl.int32), 318 - LIFT)
        return ((e + (LIFT - 64)) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def _sixteen(v, i: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
        """The i-th of four bf16 in an int64."""
        if FAST:
            y = (v >> (16 * i)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            y = ((v >> (16 * i)).to(tl.int32) << 16).to(tl.float32, bitcast=True).to(DOT)
        return y

    @triton.jit
    def _fp4_dot(
        acc, packed, scales, where, swhere, mask, smask, u, v, BN: tl.constexpr, G: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr
    ):
        """acc + BN rows of G groups of 32 times 32 * G rows of x; FAST: 2^-64 times that.

        A word has eight channels. Channel i of all words is one product, so nothing is ever put in order. where [BN, G, 4] in words; u and
        v [4 * G, rows] int64 are channels 0 to 3 and 4 to 7 of x at these words.
        """
        code = tl.load(packed + where, mask=mask, other=0)
        scale = tl.load(scales + swhere, mask=smask, other=127)
        if FAST:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                E2M1_PAIRS,
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
                args=[code, tl.broadcast_to(_short_power(scale, 126)[:, :, None], [BN, G, 4])],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        else:
            power = _power(scale)[:, :, None]
            c0 = (_e2m1(code) * power).to(DOT)
            c1 = (_e2m1(code >> 4) * power).to(DOT)
            c2 = (_e2m1(code >> 8) * power).to(DOT)
            c3 = (_e2m1(code >> 12) * power).to(DOT)
            c4 = (_e2m1(code >> 16) * power).to(DOT)
            c5 = (_e2m1(code >> 20) * power).to(DOT)
            c6 = (_e2m1(code >> 24) * power).to(DOT)
            c7 = (_e2m1(code >> 28) * power).to(DOT)
        acc = tl.dot(tl.reshape(c0, [BN, 4 * G]), _sixteen(u, 0, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c1, [BN, 4 * G]), _sixteen(u, 1, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c2, [BN, 4 * G]), _sixteen(u, 2, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c3, [BN, 4 * G]), _sixteen(u, 3, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c4, [BN, 4 * G]), _sixteen(v, 0, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c5, [BN, 4 * G]), _sixteen(v, 1, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c6, [BN, 4 * G]), _sixteen(v, 2, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c7, [BN, 4 * G]), _sixteen(v, 3, DOT, FAST), acc)
        return acc

    @triton.jit
    def _e4m3(code):
        """Low byte of int32 -> fp32."""
        a = code & 0x7F
        v = tl.where(a < 8, a.to(tl.float32) * 0.001953125, ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True))
        return tl.where((code & 0x80) != 0, -v, v)

    @triton.jit
    def _fp8_dot(
        acc, codes, scales, where, swhere, mask, smask, v, BN: tl.constexpr, G: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr
    ):
        """As `_fp4_dot`, four channels a word: where [BN, G, 8] in words, v [8 * G, rows] int64."""
        code = tl.load(codes + where, mask=mask, other=0)
        scale = tl.load(scales + swhere, mask=smask, other=127)
        if FAST:
            c0, c1, c2, c3 = tl.inline_asm_elementwise(
                E4M3_PAIRS,
                "=&r,=&r,=&r,=&r,r,r,r",
                args=[code, tl.broadcast_to(_short_power(scale, 120)[:, :, None], [BN, G, 8])],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=2,
            )
        else:
            power = _power(scale)[:, :, None]
            c0 = (_e4m3(code) * power).to(DOT)
            c1 = (_e4m3(code >> 8) * power).to(DOT)
            c2 = (_e4m3(code >> 16) * power).to(DOT)
            c3 = (_e4m3(code >> 24) * power).to(DOT)
        acc = tl.dot(tl.reshape(c0, [BN, 8 * G]), _sixteen(v, 0, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c1, [BN, 8 * G]), _sixteen(v, 1, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c2, [BN, 8 * G]), _sixteen(v, 2, DOT, FAST), acc)
        acc = tl.dot(tl.reshape(c3, [BN, 8 * G]), _sixteen(v, 3, DOT, FAST), acc)
        return acc

    @triton.jit
    def _gated(gate, up, w, limit, BN: tl.constexpr, ROWS: tl.constexpr, CLAMP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr):
        """SwiGLU of two products [BN, ROWS], times w [ROWS], FP8-rounded for the second linear."""
        if FAST:
            gate = gate * 18446744073709551616.0
            up = up * 18446744073709551616.0
        a = _bf16(gate, EXACT)
        b = _bf16(up, EXACT)
        if CLAMP:
            a = tl.where(a > limit, limit, a)
            b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
        y = tl.reshape(_bf16(w[None, :] * (a * _sigmoid(a) * b), EXACT), [BN // 32, 32, ROWS])
        q, bits = _round_fp8(y, tl.max(tl.abs(y), 1)[:, None, :])
        return tl.reshape(q * bits.to(tl.float32, bitcast=True), [BN, ROWS]).to(tl.bfloat16)

    @triton.jit
    def route(
        x, gate, bias, bias_image, image, position, partial, arrived, indices, weights, n, temperature, factor,
        D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
        SPLITS: tl.constexpr, TR: tl.constexpr, MASKED: tl.constexpr, PADDED: tl.constexpr, NORMALISE: tl.constexpr, DOT: tl.constexpr,
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
                active = trow < n
                if PADDED:
                    active = tl.load(position + trow, mask=trow < n, other=-1) >= 0
                for k in tl.static_range(TOPK):
                    best = tl.argmax(left, 1, tie_break_left=True)
                    chosen = every[None, :] == best[:, None]
                    w = tl.sum(tl.where(chosen, score, 0.0), 1)
                    total += w
                    left = tl.where(chosen, float("-inf"), left)
                    tl.store(indices + trow * TOPK + k, tl.where(active, best.to(tl.int32), -1), mask=trow < n)
                    tl.store(weights + trow * TOPK + k, tl.where(active, w, 0.0), mask=trow < n)
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
            other = tl.load(indices + at, mask=at < count, other=-1)
            before += tl.sum(((other >= 0) & (other < e)).to(tl.int32), 0)
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
        x, packed, scales, codes, code_scales, indices, weights, h, count, n, limit,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, AP: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, SLOTS: tl.constexpr,
        ROWS: tl.constexpr, CLAMP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (assignment, BN channels): the first assignment of an expert works for all of its rows, 16 at a time.

        After the assignments come SLOTS programs that share the BN channels of the shared expert, for all rows. x is
        int64 [n, D/4], four bf16 each; weights are int32: packed [E, 2I, D/8], codes [2I, D/4]: gate rows, then up rows.
        h [count + n, I] bf16, FP8-rounded.
        """
        mine = tl.program_id(0)
        if mine < count:
            expert = tl.load(indices + mine)
            all_slots = tl.arange(0, AP)
            same = tl.load(indices + all_slots, mask=all_slots < count, other=-1) == expert
            if (expert >= 0) & (tl.min(tl.where(same, all_slots, AP), 0) == mine):
                rank = tl.cumsum(same.to(tl.int32), 0) - 1
                rows = tl.sum((same & (all_slots < count)).to(tl.int32), 0)
                channel = tl.program_id(1) * BN + tl.arange(0, BN)
                base = expert.to(tl.int64) * (2 * I) + channel
                word = tl.arange(0, 4)
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
                        where = base[:, None, None] * (D // 8) + (group[:, None] * 4 + word[None, :])[None, :, :]
                        swhere = base[:, None] * (D // 32) + group[None, :]
                        wide = inside[:, :, None]
                        four = g * 4 + tl.arange(0, 4 * G)
                        at = x + token[None, :] * (D // 4) + four[:, None] * 2
                        there = live[None, :] & (four < D // 8)[:, None]
                        u = tl.load(at, mask=there, other=0)
                        v = tl.load(at + 1, mask=there, other=0)
                        gate = _fp4_dot(gate, packed, scales, where, swhere, wide, inside, u, v, BN, G, DOT, FAST)
                        where += I * (D // 8)
                        swhere += I * (D // 32)
                        up = _fp4_dot(up, packed, scales, where, swhere, wide, inside, u, v, BN, G, DOT, FAST)
                    w = tl.load(weights + slot, mask=live, other=0.0)
                    y = _gated(gate, up, w, limit, BN, 16, CLAMP, FAST, EXACT)
                    tl.store(h + slot[None, :] * I + channel[:, None], y, mask=live[None, :] & (channel < I)[:, None])
                    first += 16
        else:
            BS: tl.constexpr = BN // SLOTS
            schannel = tl.program_id(1) * BN + (mine - count) * BS + tl.arange(0, BS)
            inner = tl.arange(0, 8)
            start = 0
            while start < n:
                row = start + tl.arange(0, ROWS)
                used = tl.load(indices + row * TOPK, mask=row < n, other=-1)
                if tl.max(used, 0) >= 0:
                    sgate = tl.zeros([BS, ROWS], tl.float32)
                    sup = tl.zeros([BS, ROWS], tl.float32)
                    for g in range(0, D // 32, G):
                        sgroup = g + tl.arange(0, G)
                        sin = (schannel < I)[:, None] & (sgroup < D // 32)[None, :]
                        swhere8 = schannel[:, None, None] * (D // 4) + (sgroup[:, None] * 8 + inner[None, :])[None, :, :]
                        sat = (schannel // 32)[:, None] * (D // 32) + sgroup[None, :]
                        dim = g * 8 + tl.arange(0, 8 * G)
                        quad = tl.load(
                            x + row[None, :] * (D // 4) + dim[:, None], mask=(row < n)[None, :] & (dim < D // 4)[:, None], other=0
                        )
                        wide8 = sin[:, :, None]
                        sgate = _fp8_dot(sgate, codes, code_scales, swhere8, sat, wide8, sin, quad, BS, G, DOT, FAST)
                        swhere8 += I * (D // 4)
                        sat += (I // 32) * (D // 32)
                        sup = _fp8_dot(sup, codes, code_scales, swhere8, sat, wide8, sin, quad, BS, G, DOT, FAST)
                    z = _gated(sgate, sup, tl.full([ROWS], 1.0, tl.float32), limit, BS, ROWS, CLAMP, FAST, EXACT)
                    tl.store(h + (count + row)[None, :] * I + schannel[:, None], z, mask=(row < n)[None, :] & (schannel < I)[:, None])
                start += ROWS

    @triton.jit
    def expert_down(
        h, packed, scales, codes, code_scales, indices, parts, arrived, out, count, n,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, AP: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
        SLOTS: tl.constexpr, ROWS: tl.constexpr, TR: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
        EXACT: tl.constexpr,
    ):  # fmt: skip
        """As `expert_up`, into parts [count + n, D] bf16; the last program to arrive at a run of channels sums them for all rows, in
        ascending order of the experts, the shared expert's after them. h is int64 [count + n, I/4], four
        bf16 each; weights are int32."""
        mine = tl.program_id(0)
        channel = tl.program_id(1) * BN + tl.arange(0, BN)
        if mine < count:
            expert = tl.load(indices + mine)
            all_slots = tl.arange(0, AP)
            same = tl.load(indices + all_slots, mask=all_slots < count, other=-1) == expert
            if (expert >= 0) & (tl.min(tl.where(same, all_slots, AP), 0) == mine):
                rank = tl.cumsum(same.to(tl.int32), 0) - 1
                rows = tl.sum((same & (all_slots < count)).to(tl.int32), 0)
                base = expert.to(tl.int64) * D + channel
                word = tl.arange(0, 4)
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
                        where = base[:, None, None] * (I // 8) + (group[:, None] * 4 + word[None, :])[None, :, :]
                        swhere = base[:, None] * (I // 32) + group[None, :]
                        four = g * 4 + tl.arange(0, 4 * G)
                        at = h + slot[None, :] * (I // 4) + four[:, None] * 2
                        there = live[None, :] & (four < I // 8)[:, None]
                        u = tl.load(at, mask=there, other=0)
                        v = tl.load(at + 1, mask=there, other=0)
                        acc = _fp4_dot(acc, packed, scales, where, swhere, inside[:, :, None], inside, u, v, BN, G, DOT, FAST)
                    if FAST:
                        acc = acc * 18446744073709551616.0
                    to = parts + slot[None, :] * D + channel[:, None]
                    tl.store(to, _bf16(acc, EXACT).to(tl.bfloat16), mask=live[None, :] & (channel < D)[:, None])
                    first += 16
        else:
            BS: tl.constexpr = BN // SLOTS
            schannel = tl.program_id(1) * BN + (mine - count) * BS + tl.arange(0, BS)
            inner = tl.arange(0, 8)
            start = 0
            while start < n:
                row = start + tl.arange(0, ROWS)
                used = tl.load(indices + row * TOPK, mask=row < n, other=-1)
                if tl.max(used, 0) >= 0:
                    sacc = tl.zeros([BS, ROWS], tl.float32)
                    for g in range(0, I // 32, G):
                        sgroup = g + tl.arange(0, G)
                        sin = (schannel < D)[:, None] & (sgroup < I // 32)[None, :]
                        swhere8 = schannel[:, None, None] * (I // 4) + (sgroup[:, None] * 8 + inner[None, :])[None, :, :]
                        sat = (schannel // 32)[:, None] * (I // 32) + sgroup[None, :]
                        dim = g * 8 + tl.arange(0, 8 * G)
                        there = (row < n)[None, :] & (dim < I // 4)[:, None]
                        quad = tl.load(h + (count + row)[None, :] * (I // 4) + dim[:, None], mask=there, other=0)
                        sacc = _fp8_dot(sacc, codes, code_scales, swhere8, sat, sin[:, :, None], sin, quad, BS, G, DOT, FAST)
                    if FAST:
                        sacc = sacc * 18446744073709551616.0
                    sto = parts + (count + row)[None, :] * D + schannel[:, None]
                    tl.store(sto, _bf16(sacc, EXACT).to(tl.bfloat16), mask=(row < n)[None, :] & (schannel < D)[:, None])
                start += ROWS
        tl.debug_barrier()
        if tl.atomic_add(arrived + tl.program_id(1), 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(arrived + tl.program_id(1), 0)  # for the next launch
            tl.debug_barrier()
            k = tl.arange(0, KP)
            r = 0
            while r < n:
                trow = r + tl.arange(0, TR)
                some = (trow < n)[:, None] & (k < TOPK)[None, :]
                e = tl.load(indices + trow[:, None] * TOPK + k[None, :], mask=some, other=1 << 30)
                place = tl.sum((e[:, None, :] < e[:, :, None]).to(tl.int32), 2)
                mask = (trow < n)[:, None] & (channel < D)[None, :]
                active = mask & (tl.min(e, 1) >= 0)[:, None]
                total = tl.zeros([TR, BN], tl.float32)
                for t in tl.static_range(TOPK):
                    tslot = trow * TOPK + tl.sum(tl.where(place == t, k[None, :], 0), 1)
                    from_ = parts + tslot[:, None] * D + channel[None, :]
                    total += tl.load(from_, mask=active, other=0.0, cache_modifier=".cg").to(tl.float32)
                if SHARED:
                    from_ = parts + (count + trow)[:, None] * D + channel[None, :]
                    total += tl.load(from_, mask=active, other=0.0, cache_modifier=".cg").to(tl.float32)
                tl.store(out + trow[:, None] * D + channel[None, :], _bf16(total, EXACT).to(tl.bfloat16), mask=mask)
                r += TR

    @triton.jit
    def fp8_linear(
        x, codes, scales, out, partial, arrived, n, row_stride,
        K: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
        SPLITS: tl.constexpr, ROWS: tl.constexpr, ROUND: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (BN outputs, ROWS rows, CHUNK groups of 32 inputs). Outputs O / GROUPS at a time have K inputs of their own in a row.

        x is int64, four bf16 each, and row_stride counts those; codes [O, K/4] int32, scales [O/32, K/32].
        ROUND: the output is FP8-rounded after its rounding to bf16. partial [SPLITS, n, O] fp32.
        """
        channel = tl.program_id(0) * BN + tl.arange(0, BN)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        split = tl.program_id(2)
        live = row < n
        some = channel < O
        of = (tl.program_id(0) * BN) // (O // GROUPS)  # BN divides a group's outputs, or there is one group
        lane = tl.arange(0, 8)
        source = row.to(tl.int64) * row_stride + of * (K // 4)
        acc = tl.zeros([BN, ROWS], tl.float32)
        for g in range(0, CHUNK, G):
            group = split * CHUNK + g + tl.arange(0, G)
            inside = some[:, None] & (group < K // 32)[None, :]
            where = channel.to(tl.int64)[:, None, None] * (K // 4) + (group[:, None] * 8 + lane[None, :])[None, :, :]
            swhere = (channel // 32)[:, None] * (K // 32) + group[None, :]
            dim = (split * CHUNK + g) * 8 + tl.arange(0, 8 * G)
            v = tl.load(x + source[None, :] + dim[:, None], mask=live[None, :] & (dim < K // 4)[:, None], other=0)
            acc = _fp8_dot(acc, codes, scales, where, swhere, inside[:, :, None], inside, v, BN, G, DOT, FAST)
        if FAST:
            acc = acc * 18446744073709551616.0
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
                acc = tl.zeros([BN, ROWS], tl.float32)
                for s in range(SPLITS):
                    acc += tl.load(partial + s * n * O + at, mask=mask, other=0.0, cache_modifier=".cg")
            y = _bf16(acc, EXACT)
            if ROUND:
                z = tl.reshape(y, [BN // 32, 32, ROWS])
                q, bits = _round_fp8(z, tl.max(tl.abs(z), 1)[:, None, :])
                y = tl.reshape(q * bits.to(tl.float32, bitcast=True), [BN, ROWS])
            tl.store(out + at, y.to(tl.bfloat16), mask=mask)

    names = {"route": route, "sort": sort, "expert_up": expert_up, "expert_down": expert_down, "fp8_linear": fp8_linear}
    return SimpleNamespace(**names, tl=tl, cdiv=triton.cdiv)
