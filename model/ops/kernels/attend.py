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

Programs that share a row's heads leave their parts in memory and count themselves; the last ones to come (HELPERS) wait for each other and
join all parts, in their order, each for a SHARE of the heads. So the result does not depend on which ones these are, and counters are zero
again behind every launch.

Keys are older than queries. So a program that has only one tile (LONE) loads and decodes it before it waits for the kernel that makes the
queries (`dependent`), and has no loop; others read the indices of their first tile by then.

A decoded tile goes through one more instruction, which does nothing: without it Triton 3.6 fails on a reshaped tensor that goes to shared
memory, and, unless the instruction counts as impure, decodes it twice, once in the layout of each product, where heads are few.

Operands of products are bf16 on a GPU and fp32 in Triton's interpreter (DOT), whose bf16 product and bf16 cast are wrong; where bf16 is
stored it is rounded by bit arithmetic there. The interpreter has no inline assembly either (PACKED); the tests emulate its instructions.
Tiles are loaded as groups by keys by words, since Triton gives neighbouring threads the first dimension after the contiguous last one.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import SimpleNamespace

from forebay.model.ops.kernels import attend_keys, dependent

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
    global tl, triton, _await, near_codes, near_keys, near_tile, far_codes, far_keys, far_tile
    import triton
    import triton.language as tl

    _await, keys = dependent.load(interpreted)._await, attend_keys.load(interpreted)
    near_codes, near_keys, near_tile, far_codes, far_keys, far_tile = attrgetter(
        "near_codes", "near_keys", "near_tile", "far_codes", "far_keys", "far_tile"
    )(keys)

    # Of what differs between layers and steps, little is compiled in: a server compiles for few numbers of rows, at its start.
    @triton.jit(do_not_specialize=["max_blocks", "tiles"])
    def attend(
        q, out, part, part_top, part_sum, arrived, turn, sink, position, span, start, offset, floor, slot, table, selected, rings, fresh,
        pool, codes, scales, scale, slot_stride, max_blocks, tiles,
        H: tl.constexpr, HB: tl.constexpr, HP: tl.constexpr, HJ: tl.constexpr, D: tl.constexpr, WP: tl.constexpr, R: tl.constexpr,
        W: tl.constexpr, RB: tl.constexpr, TOPK: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, BK: tl.constexpr,
        SPLITS: tl.constexpr, ROTATE: tl.constexpr, PACKED: tl.constexpr, FP4: tl.constexpr, FP8: tl.constexpr,
        STAGES: tl.constexpr, DOT: tl.constexpr, HELPERS: tl.constexpr, SHARE: tl.constexpr, LONE: tl.constexpr,
    ):  # fmt: skip
        """Row program_id(0), heads HB * program_id(2) on; with SPLITS > 1 only the program_id(1)-th `tiles` tiles of BK keys.

        Tiles are numbered from the window's oldest key, and those of entries follow. HP and WP are HB heads and words, D / 4, padded to
        powers of two; parts are joined HJ heads at a time. Window rows of RB bytes are read 4 bytes at a time where RB allows that. LONE:
        a program has one tile.
        """
        NEAR: tl.constexpr = (W + BK - 1) // BK
        row = tl.program_id(0).to(tl.int64)
        begin = tl.program_id(1) * tiles
        head = tl.program_id(2) * HB + tl.arange(0, HP)
        alive = (tl.arange(0, HP) < HB) & (head < H)
        dim = tl.arange(0, WP * 2)
        live = alive[:, None] & (dim < D)[None, :]
        live_high = alive[:, None] & (dim < D - WP * 2)[None, :]
        # All this is older than the queries, and so are keys: a program's only tile is there before they are. What does not depend on
        # another load comes first, as none of it is in a cache any more.
        lanes = tl.arange(0, BK)
        t = tl.maximum(begin - NEAR, 0) * BK + lanes
        here = tl.load(position + row)
        s = tl.load(span + row)
        if TOPK > 0:
            entry = tl.load(selected + row * TOPK + t, mask=t < TOPK, other=-1)
        here = here.to(tl.int32)
        s = tl.maximum(s, 0).to(tl.int64)
        first = tl.load(start + s)
        lowest = tl.load(floor + s)
        fresh_row = tl.load(offset + s)
        ring = tl.load(slot + s)
        if TOPK > 0:  # indices are read ahead of the codes that they lead to
            far = tl.minimum(here + 1, TOPK)  # a row chooses among at most as many entries as it has positions
            entry = tl.where(t < far, entry, -1)
            block = tl.load(table + s * max_blocks + tl.maximum(entry, 0) // PER_BLOCK, mask=entry >= 0, other=0)
        lowest = tl.maximum(here - W + 1, lowest)
        fresh_row -= first
        ring = rings + ring.to(tl.int64) * slot_stride
        if LONE:
            key = lowest + begin * BK + tl.arange(0, BK)
            if TOPK == 0 or begin < NEAR:
                k_low, k_high, seen = near_tile(ring, fresh, key, here, first, fresh_row, D, WP, W, RB, BK, PACKED, FP8, DOT)
            else:
                k_low, k_high, seen = far_tile(pool, codes, scales, block, entry, D, WP, PER_BLOCK, BLOCK_BYTES, BK, PACKED, FP4, DOT)
        _await()
        at = (row * H + head)[:, None] * D + dim[None, :]
        x_low = tl.load(q + at, mask=live, other=0.0)
        x_high = tl.load(q + WP * 2 + at, mask=live_high, other=0.0)
        for half in tl.static_range(2):
            x = x_low if half == 0 else x_high
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
        # Only an operand that comes from a load is taken from shared memory; in registers the queries would drive out the output.
        tl.debug_barrier()
        at = (row * H + head)[:, None] * D + dim[None, :]
        query = tl.load(out + at, mask=live, other=0.0).to(DOT)
        query_high = tl.load(out + WP * 2 + at, mask=live_high, other=0.0).to(DOT)
        top = tl.full([HP], -1e20, tl.float32)
        total = tl.zeros([HP], tl.float32)
        o = tl.zeros([HP, WP * 2], tl.float32)
        o_high = tl.zeros([HP, WP * 2], tl.float32)

        if LONE:
            score = tl.dot(query, tl.trans(k_low))
            score = tl.dot(query_high, tl.trans(k_high), score)
            score = tl.where(seen[None, :], score, float("-inf"))
            top = tl.maximum(top, tl.max(score, 1))
            p = tl.exp2((score - top[:, None]) * scale)
            total += tl.sum(p, 1)
            if tl.float32 == DOT:
                bits = p.to(tl.int32, bitcast=True)
                p = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            p = p.to(DOT)
            o = tl.dot(p, k_low, o)
            o_high = tl.dot(p, k_high, o_high)
        else:
            end = tl.cdiv(here - lowest + 1, BK)
            if SPLITS > 1:
                end = tl.minimum(end, begin + tiles)
            for tile in tl.range(begin, end, num_stages=1, disable_licm=True):
                key = lowest + tile * BK + tl.arange(0, BK)
                seen = key <= here
                c_low, e_low = near_codes(ring, fresh, key, here, first, fresh_row, 0, D, WP, W, RB, BK)  # both are on their way before
                c_high, e_high = near_codes(ring, fresh, key, here, first, fresh_row, 1, D, WP, W, RB, BK)  # the first is decoded
                k_low = near_keys(c_low, e_low, WP, BK, PACKED, FP8, DOT)
                score = tl.dot(query, tl.trans(k_low))
                k_high = near_keys(c_high, e_high, WP, BK, PACKED, FP8, DOT)
                score = tl.dot(query_high, tl.trans(k_high), score)
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
                o_high = tl.dot(p, k_high, o_high * decay[:, None])

            if TOPK > 0:
                end = tl.cdiv(far, BK)
                if SPLITS > 1:
                    end = tl.minimum(end, begin + tiles - NEAR)
                for tile in tl.range(tl.maximum(begin - NEAR, 0), end, num_stages=STAGES, disable_licm=True):
                    seen = entry >= 0
                    c_low, e_low = far_codes(pool, codes, scales, block, entry, 0, D, WP, PER_BLOCK, BLOCK_BYTES)
                    c_high, e_high = far_codes(pool, codes, scales, block, entry, 1, D, WP, PER_BLOCK, BLOCK_BYTES)
                    t = tile * BK + BK + lanes
                    entry = tl.load(selected + row * TOPK + t, mask=t < far, other=-1)
                    k_low = far_keys(c_low, e_low, WP, BK, PACKED, FP4, DOT)
                    score = tl.dot(query, tl.trans(k_low))
                    k_high = far_keys(c_high, e_high, WP, BK, PACKED, FP4, DOT)
                    score = tl.dot(query_high, tl.trans(k_high), score)
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
                    o_high = tl.dot(p, k_high, o_high * decay[:, None])

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
            meeting = arrived + 2 * (row * tl.num_programs(2) + tl.program_id(2))
            before = tl.atomic_add(meeting, 1, sem="acq_rel")
        if SPLITS == 1 or before >= SPLITS - HELPERS:
            helper = 0
            if SPLITS > 1:
                helper = before - (SPLITS - HELPERS)
                seen_parts = before + 1
                while seen_parts < SPLITS:  # those that this waits for are among the last too, so they run or will
                    seen_parts = tl.atomic_add(meeting, 0, sem="acq_rel")
                tl.debug_barrier()
            for run in tl.range(0, (SHARE + HJ - 1) // HJ, num_stages=1):  # a name that was used above must keep its type in here
                lane = run * HJ + tl.arange(0, HJ)
                share = lane < SHARE
                lane += helper * SHARE
                ours = tl.program_id(2) * HB + lane
                there = share & (lane < HB) & (ours < H)
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
            if SPLITS > 1:
                done = tl.atomic_add(meeting + 1, 1, sem="acq_rel")
                if done == HELPERS - 1:  # for the next launch
                    tl.store(meeting, 0)
                    tl.store(meeting + 1, 0)

    return SimpleNamespace(attend=attend, tl=tl)
