"""Triton kernels of sparse attention over FP8 window rows and FP4 entries; `attend_ops` documents what they compute.

A key is decoded in registers straight from its stored bytes. A thread reads words of 4 codes, 16 bits of FP4 or 32 of FP8, and decodes
two neighbouring words at once: code j of both becomes one packed pair of bf16 numbers, its bits put in place and multiplied by the
group's scale, which is exact (2 + 4 significant bits). So that the pairs can be stored as they are, the 8 channels of two words stand
in the order 0 4 1 5 2 6 3 7 wherever scores and outputs are computed. Queries are written in that order to where the output will be and
loaded again (all programs of a row write the same there); outputs are put back in order when they leave. A decoded tile goes to shared
memory once and serves both the score product and the value product; its two halves of the channels come one after the other, which is
what fits in registers beside the output.

Keys are decoded to 2^-48 of their value, so that a factor overflows only where a window's scale is above 2^55; scores and output are
multiplied by 2^48 again, which is exact. Maxima are kept of scores as they are: a product that is fused with a subtraction has no rounding
of its own, so the largest score minus its rounded multiple would not be 0. Behind the loops they are in units of log 2.

Programs that share a row's heads leave their parts in memory and count themselves; the one that comes last joins all parts, its own too,
in their order. So the result does not depend on which one that is, and counters are zero again behind every launch.

A decoded tile goes through one more instruction, which does nothing: without it Triton 3.6 fails on a reshaped tensor that goes to shared
memory, and, unless the instruction counts as impure, decodes it twice, once in the layout of each product, where heads are few.

Operands of products are bf16 on a GPU and fp32 in Triton's interpreter (DOT), whose bf16 product and bf16 cast are wrong; where bf16 is
stored it is rounded by bit arithmetic there. The interpreter has no inline assembly either (PACKED); the tests emulate its instructions.
Tiles are loaded as groups by keys by words, since Triton gives neighbouring threads the first dimension after the contiguous last one.
Helpers and globals are avoided since the interpreter sees neither closures nor nested functions.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

# $0-$3: code j of two words of four E2M1 codes, bf16x2. $4: both words. $5: the scale twice. The three bits of a magnitude read as bf16
# at bit 6 are 2^-126 of its value.
FP4_PAIRS = """{
.reg .b32 m0, m1, m2, m3, s0, s1, s2;
shl.b32 m0, $4, 6;
shl.b32 m1, $4, 2;
shr.b32 m2, $4, 2;
shr.b32 m3, $4, 6;
shl.b32 s0, $4, 12;
shl.b32 s1, $4, 8;
shl.b32 s2, $4, 4;
and.b32 m0, m0, 0x01C001C0;
and.b32 m1, m1, 0x01C001C0;
and.b32 m2, m2, 0x01C001C0;
and.b32 m3, m3, 0x01C001C0;
lop3.b32 m0, s0, 0x80008000, m0, 0xEA;
lop3.b32 m1, s1, 0x80008000, m1, 0xEA;
lop3.b32 m2, s2, 0x80008000, m2, 0xEA;
lop3.b32 m3, $4, 0x80008000, m3, 0xEA;
mul.rn.bf16x2 $0, m0, $5;
mul.rn.bf16x2 $1, m1, $5;
mul.rn.bf16x2 $2, m2, $5;
mul.rn.bf16x2 $3, m3, $5;
}"""

# The same of two words $4 and $5 of four E4M3 codes, with the scale in $6. The seven bits of a magnitude read as bf16 at bit 4 are 2^-120
# of its value.
FP8_PAIRS = """{
.reg .b32 x0, x1, x2, x3, m0, m1, m2, m3;
prmt.b32 x0, $4, $5, 0x4400;
prmt.b32 x1, $4, $5, 0x5511;
prmt.b32 x2, $4, $5, 0x6622;
prmt.b32 x3, $4, $5, 0x7733;
shr.b32 m0, x0, 4;
shr.b32 m1, x1, 4;
shr.b32 m2, x2, 4;
shr.b32 m3, x3, 4;
and.b32 m0, m0, 0x07F007F0;
and.b32 m1, m1, 0x07F007F0;
and.b32 m2, m2, 0x07F007F0;
and.b32 m3, m3, 0x07F007F0;
lop3.b32 m0, x0, 0x80008000, m0, 0xEA;
lop3.b32 m1, x1, 0x80008000, m1, 0xEA;
lop3.b32 m2, x2, 0x80008000, m2, 0xEA;
lop3.b32 m3, x3, 0x80008000, m3, 0xEA;
mul.rn.bf16x2 $0, m0, $6;
mul.rn.bf16x2 $1, m1, $6;
mul.rn.bf16x2 $2, m2, $6;
mul.rn.bf16x2 $3, m3, $6;
}"""


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton
    import triton
    import triton.language as tl

    # Of what differs between layers and steps, little is compiled in: a server compiles for few numbers of rows, at its start.
    @triton.jit(do_not_specialize=["max_blocks", "tiles"])
    def attend(
        q, out, part, part_top, part_sum, arrived, turn, sink, position, span, start, offset, floor, slot, table, selected, rings, fresh,
        pool, codes, scales, scale, slot_stride, max_blocks, tiles,
        H: tl.constexpr, HB: tl.constexpr, HP: tl.constexpr, HJ: tl.constexpr, D: tl.constexpr, WP: tl.constexpr, R: tl.constexpr,
        W: tl.constexpr, RB: tl.constexpr, TOPK: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, BK: tl.constexpr,
        SPLITS: tl.constexpr, ROTATE: tl.constexpr, PACKED: tl.constexpr, FP4: tl.constexpr, FP8: tl.constexpr,
        STAGES: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """Row program_id(0), heads HB * program_id(2) on; with SPLITS > 1 only the program_id(1)-th `tiles` tiles of BK keys.

        Tiles are numbered from the window's oldest key, and those of entries follow. HP and WP are HB heads and words, D / 4, padded to
        powers of two; parts are joined HJ heads at a time. Window rows of RB bytes are read 4 bytes at a time where RB allows that.
        """
        WORDS: tl.constexpr = D // 4
        NEAR: tl.constexpr = (W + BK - 1) // BK
        row = tl.program_id(0).to(tl.int64)
        begin = tl.program_id(1) * tiles
        head = tl.program_id(2) * HB + tl.arange(0, HP)
        alive = (tl.arange(0, HP) < HB) & (head < H)
        dim = tl.arange(0, WP * 2)
        live = alive[:, None] & (dim < D)[None, :]
        live_high = alive[:, None] & (dim < D - WP * 2)[None, :]
        here = tl.load(position + row).to(tl.int32)
        s = tl.maximum(tl.load(span + row), 0).to(tl.int64)
        first = tl.load(start + s)
        lowest = tl.maximum(here - W + 1, tl.load(floor + s))
        fresh_row = tl.load(offset + s) - first
        ring = rings + tl.load(slot + s).to(tl.int64) * slot_stride
        if TOPK > 0:  # indices are read ahead of the codes that they lead to
            lanes = tl.arange(0, BK)
            far = tl.minimum(here + 1, TOPK)  # a row chooses among at most as many entries as it has positions
            t = tl.maximum(begin - NEAR, 0) * BK + lanes
            entry = tl.load(selected + row * TOPK + t, mask=t < far, other=-1)
        for half in tl.static_range(2):
            at = (row * H + head)[:, None] * D + (half * WP * 2 + dim)[None, :]
            x = tl.load(q + at, mask=live if half == 0 else live_high, other=0.0)
            if ROTATE and half * WP + WP > (D - R) // 2:
                pair = half * WP + tl.arange(0, WP)
                turned = (pair >= (D - R) // 2) & (pair < D // 2)
                at = turn + row * R + pair - (D - R) // 2
                cosine = tl.load(at, mask=turned, other=1.0)[None, :]
                sine = tl.load(at + R // 2, mask=turned, other=0.0)[None, :]
                even, odd = tl.split(tl.reshape(x.to(tl.float32), [HP, WP, 2]))
                x = tl.reshape(tl.join(even * cosine - odd * sine, odd * cosine + even * sine), [HP, WP * 2])
                if tl.float32 == DOT:
                    bits = x.to(tl.int32, bitcast=True)
                    x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            x = tl.reshape(tl.permute(tl.reshape(x.to(DOT), [HP, WP // 4, 2, 4]), (0, 1, 3, 2)), [HP, WP * 2])
            at = (row * H + head)[:, None] * D + (half * WP * 2 + dim)[None, :]
            some = live if half == 0 else live_high
            if tl.float32 == DOT:
                tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=some)
            else:
                tl.store(out + at, x, mask=some)
        if TOPK > 0:
            block = tl.load(table + s * max_blocks + tl.maximum(entry, 0) // PER_BLOCK, mask=entry >= 0, other=0)
        # Only an operand that comes from a load is taken from shared memory; in registers the queries would drive out the output.
        tl.debug_barrier()
        at = (row * H + head)[:, None] * D + dim[None, :]
        query = tl.load(out + at, mask=live, other=0.0).to(DOT)
        query_high = tl.load(out + WP * 2 + at, mask=live_high, other=0.0).to(DOT)
        top = tl.full([HP], -1e20, tl.float32)
        total = tl.zeros([HP], tl.float32)
        o = tl.zeros([HP, WP * 2], tl.float32)
        o_high = tl.zeros([HP, WP * 2], tl.float32)

        end = tl.cdiv(here - lowest + 1, BK)
        if SPLITS > 1:
            end = tl.minimum(end, begin + tiles)
        for tile in tl.range(begin, end, num_stages=1, disable_licm=True):
            key = lowest + tile * BK + tl.arange(0, BK)
            seen = key <= here
            new = seen & (key >= first)
            old = seen & (key < first)
            old_row = (tl.maximum(key, 0) % W)[None, :]
            new_row = tl.where(new, fresh_row + key, 0).to(tl.int64)[None, :]
            for half in tl.static_range(2):  # both halves are on their way before the first is decoded
                group = half * (WP // 16) + tl.arange(0, WP // 16)
                column = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
                has = (group < WORDS // 8)[:, None]
                if RB % 4 == 0:
                    words = ring.to(tl.pointer_type(tl.int32), bitcast=True) + old_row[:, :, None] * (RB // 4) + column[:, None, :]
                    c = tl.load(words, mask=(old[None, :] & has)[:, :, None], other=0)
                    words = fresh.to(tl.pointer_type(tl.int32), bitcast=True) + new_row[:, :, None] * (RB // 4) + column[:, None, :]
                    c |= tl.load(words, mask=(new[None, :] & has)[:, :, None], other=0)
                else:
                    c = tl.zeros([WP // 16, BK, 8], tl.int32)
                    for j in tl.static_range(4):
                        byte = old_row[:, :, None] * RB + column[:, None, :] * 4 + j
                        c |= tl.load(ring + byte, mask=(old[None, :] & has)[:, :, None], other=0).to(tl.int32) << (8 * j)
                        byte = new_row[:, :, None] * RB + column[:, None, :] * 4 + j
                        c |= tl.load(fresh + byte, mask=(new[None, :] & has)[:, :, None], other=0).to(tl.int32) << (8 * j)
                e = tl.load(ring + old_row * RB + D + group[:, None], mask=old[None, :] & has, other=0)
                e |= tl.load(fresh + new_row * RB + D + group[:, None], mask=new[None, :] & has, other=0)
                if half == 0:
                    c_low = c
                    e_low = e
            for half in tl.static_range(2):
                if half == 0:
                    c_high = c
                    e_high = e
                    c = c_low
                    e = e_low
                else:
                    c = c_high
                    e = e_high
                # 2^72 = 2^120 of a magnitude's bits, times 2^-48.
                f = ((e.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 4.722366482869645e21)[:, :, None]
                if PACKED:
                    k0, k1, k2, k3 = tl.inline_asm_elementwise(
                        FP8, "=&r,=&r,=&r,=&r,r,r,r", [c, f.to(tl.bfloat16)],
                        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
                    )  # fmt: skip
                else:
                    k0 = (((c << 20) & 0x07F00000) | ((c << 24) & -2147483648)).to(tl.float32, bitcast=True) * f
                    k1 = (((c << 12) & 0x07F00000) | ((c << 16) & -2147483648)).to(tl.float32, bitcast=True) * f
                    k2 = (((c << 4) & 0x07F00000) | ((c << 8) & -2147483648)).to(tl.float32, bitcast=True) * f
                    k3 = (((c >> 4) & 0x07F00000) | (c & -2147483648)).to(tl.float32, bitcast=True) * f
                k = tl.join(tl.join(k0.to(DOT), k2.to(DOT)), tl.join(k1.to(DOT), k3.to(DOT)))
                k = tl.permute(tl.reshape(k, [WP // 16, BK, 4, 2, 4]), (1, 0, 2, 4, 3))
                k = tl.reshape(k, [BK, WP * 2])
                if tl.float32 != DOT:
                    k = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [k], dtype=tl.bfloat16, is_pure=False, pack=2)
                if half == 0:
                    k_low = k
                    score = tl.dot(query, tl.trans(k))
                else:
                    score = tl.dot(query_high, tl.trans(k), score)
            score = tl.where(seen[None, :], score, float("-inf"))
            above = tl.maximum(top, tl.max(score, 1))
            p = tl.exp2((score - above[:, None]) * scale)
            decay = tl.exp2((top - above) * scale)
            total = total * decay + tl.sum(p, 1)
            top = above
            if tl.float32 == DOT:
                bits = p.to(tl.int32, bitcast=True)
                p = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            p = p.to(DOT)
            o = tl.dot(p, k_low, o * decay[:, None])
            o_high = tl.dot(p, k, o_high * decay[:, None])

        if TOPK > 0:
            words = pool.to(tl.pointer_type(tl.int16), bitcast=True)
            end = tl.cdiv(far, BK)
            if SPLITS > 1:
                end = tl.minimum(end, begin + tiles - NEAR)
            for tile in tl.range(tl.maximum(begin - NEAR, 0), end, num_stages=STAGES, disable_licm=True):
                seen = entry >= 0
                place = tl.maximum(entry, 0) % PER_BLOCK
                code_row = block.to(tl.int64) * (BLOCK_BYTES // 2) + (codes // 2 + place * WORDS)
                scale_row = block.to(tl.int64) * BLOCK_BYTES + (scales + place * (WORDS // 4))
                t = tile * BK + BK + lanes
                entry = tl.load(selected + row * TOPK + t, mask=t < far, other=-1)
                for half in tl.static_range(2):
                    group = half * (WP // 8) + tl.arange(0, WP // 8)
                    column = (group * 4)[:, None] + tl.arange(0, 4)[None, :]
                    mask = seen[None, :] & (group < WORDS // 4)[:, None]
                    c = tl.load(words + code_row[None, :, None] + column[:, None, :], mask=mask[:, :, None], other=0)
                    e = tl.load(pool + scale_row[None, :] + group[:, None], mask=mask, other=0)
                    if half == 0:
                        c_low = c
                        e_low = e
                for half in tl.static_range(2):
                    if half == 0:
                        c_high = c
                        e_high = e
                        c = c_low
                        e = e_low
                    else:
                        c = c_high
                        e = e_high
                    # 2^99 * 2^99 = 2^120 of an E4M3 pattern read as fp32, times 2^126 of an E2M1 pattern, times 2^-48.
                    f = ((e.to(tl.int32) & 127) << 20).to(tl.float32, bitcast=True) * 6.338253001141147e29 * 6.338253001141147e29
                    f = f[:, :, None]
                    if PACKED:
                        k0, k1, k2, k3 = tl.inline_asm_elementwise(
                            FP4, "=&r,=&r,=&r,=&r,r,r", [c, f.to(tl.bfloat16)],
                            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
                        )  # fmt: skip
                    else:
                        c = c.to(tl.int32)
                        k0 = (((c << 22) & 0x01C00000) | ((c << 28) & -2147483648)).to(tl.float32, bitcast=True) * f
                        k1 = (((c << 18) & 0x01C00000) | ((c << 24) & -2147483648)).to(tl.float32, bitcast=True) * f
                        k2 = (((c << 14) & 0x01C00000) | ((c << 20) & -2147483648)).to(tl.float32, bitcast=True) * f
                        k3 = (((c << 10) & 0x01C00000) | ((c << 16) & -2147483648)).to(tl.float32, bitcast=True) * f
                    k = tl.join(tl.join(k0.to(DOT), k2.to(DOT)), tl.join(k1.to(DOT), k3.to(DOT)))
                    k = tl.permute(tl.reshape(k, [WP // 8, BK, 2, 2, 4]), (1, 0, 2, 4, 3))
                    k = tl.reshape(k, [BK, WP * 2])
                    if tl.float32 != DOT:
                        k = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [k], dtype=tl.bfloat16, is_pure=False, pack=2)
                    if half == 0:
                        k_low = k
                        score = tl.dot(query, tl.trans(k))
                    else:
                        score = tl.dot(query_high, tl.trans(k), score)
                block = tl.load(table + s * max_blocks + tl.maximum(entry, 0) // PER_BLOCK, mask=entry >= 0, other=0)
                score = tl.where(seen[None, :], score, float("-inf"))
                above = tl.maximum(top, tl.max(score, 1))
                p = tl.exp2((score - above[:, None]) * scale)
                decay = tl.exp2((top - above) * scale)
                total = total * decay + tl.sum(p, 1)
                top = above
                if tl.float32 == DOT:
                    bits = p.to(tl.int32, bitcast=True)
                    p = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                p = p.to(DOT)
                o = tl.dot(p, k_low, o * decay[:, None])
                o_high = tl.dot(p, k, o_high * decay[:, None])

        top *= scale
        z = tl.load(sink + head, mask=alive, other=0.0) * 1.4426950408889634
        before = SPLITS - 1
        if SPLITS > 1:
            mine = (row * SPLITS + tl.program_id(1)) * H + head
            tl.store(part_top + mine, top, mask=alive)
            tl.store(part_sum + mine, total, mask=alive)
            tl.store(part + mine[:, None] * D + dim[None, :], o, mask=live)
            tl.store(part + WP * 2 + mine[:, None] * D + dim[None, :], o_high, mask=live_high)
            tl.debug_barrier()
            meeting = arrived + row * tl.num_programs(2) + tl.program_id(2)
            before = tl.atomic_add(meeting, 1, sem="acq_rel")
        if SPLITS == 1 or before == SPLITS - 1:
            if SPLITS > 1:
                tl.store(meeting, 0)  # for the next launch
                tl.debug_barrier()
            for run in tl.range(0, HP // HJ, num_stages=1):  # a name that was used above must keep its type in here
                lane = run * HJ + tl.arange(0, HJ)
                ours = tl.program_id(2) * HB + lane
                there = (lane < HB) & (ours < H)
                if SPLITS > 1:  # nothing between these loads waits for another, so they are all under way together
                    sunk = tl.load(sink + ours, mask=there, other=0.0) * 1.4426950408889634
                    highest = sunk
                    for i in tl.static_range(SPLITS):
                        of = (row * SPLITS + i) * H + ours
                        highest = tl.maximum(highest, tl.load(part_top + of, mask=there, other=0.0, cache_modifier=".cg"))
                    joined = tl.exp2(sunk - highest)
                    y_low = tl.zeros([HJ, WP * 2], tl.float32)
                    y_high = tl.zeros([HJ, WP * 2], tl.float32)
                    for i in tl.static_range(SPLITS):
                        of = (row * SPLITS + i) * H + ours
                        weight = tl.exp2(tl.load(part_top + of, mask=there, other=0.0, cache_modifier=".cg") - highest)
                        joined += tl.load(part_sum + of, mask=there, other=0.0, cache_modifier=".cg") * weight
                        to = of[:, None] * D + dim[None, :]
                        has = there[:, None] & (dim < D)[None, :]
                        y_low += tl.load(part + to, mask=has, other=0.0, cache_modifier=".cg") * weight[:, None]
                        has = there[:, None] & (dim < D - WP * 2)[None, :]
                        y_high += tl.load(part + WP * 2 + to, mask=has, other=0.0, cache_modifier=".cg") * weight[:, None]
                    factor = 281474976710656.0 / joined
                else:
                    y_low = o
                    y_high = o_high
                    decay = tl.exp2(tl.minimum(top - z, 0.0))
                    factor = decay * 281474976710656.0 / (total * decay + tl.exp2(tl.minimum(z - top, 0.0)))
                for half in tl.static_range(2):
                    y = (y_low if half == 0 else y_high) * factor[:, None]
                    if tl.float32 == DOT:
                        bits = y.to(tl.int32, bitcast=True)
                        y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                    y = tl.reshape(tl.permute(tl.reshape(y.to(DOT), [HJ, WP // 4, 4, 2]), (0, 1, 3, 2)), [HJ, WP, 2])
                    pair = half * WP + tl.arange(0, WP)
                    if half * WP + WP > (D - R) // 2:
                        turned = (pair >= (D - R) // 2) & (pair < D // 2)
                        angle = turn + row * R + pair - (D - R) // 2
                        cosine = tl.load(angle, mask=turned, other=1.0)[None, :]
                        sine = tl.load(angle + R // 2, mask=turned, other=0.0)[None, :]
                        a, b = tl.split(y.to(tl.float32))
                        y = tl.join(a * cosine + b * sine, b * cosine - a * sine)
                    target = (row * H + ours)[:, None] * D + (half * WP * 2 + dim)[None, :]
                    wanted = there[:, None] & (dim < D - half * WP * 2)[None, :]
                    y = tl.reshape(y, [HJ, WP * 2])
                    if tl.float32 == DOT:
                        bits = y.to(tl.int32, bitcast=True)
                        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
                        tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + target, bits, mask=wanted)
                    else:
                        tl.store(out + target, y.to(DOT), mask=wanted)

    return SimpleNamespace(attend=attend, tl=tl)
