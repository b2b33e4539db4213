"""Triton kernels of sparse attention over FP8 window rows and FP4 entries; `attend_ops` documents what they compute.

A key is decoded in registers straight from its stored bytes. A thread reads words of 4 codes, 16 bits of FP4 or 32 of FP8, decodes the
four of each word as four tensors, and joins them in channel order, for which no number has to leave its thread. A decoded tile goes to
shared memory once and serves both the score product and the value product; its two halves of the channels come one after the other,
which is what fits in registers beside the output. Keys are decoded to 2^-8 of their value, which plain fp32
arithmetic on the raw bits allows without overflow; scores and output are multiplied by 2^8 again, which is exact.

Operands of products are bf16 on a GPU and fp32 in Triton's interpreter (DOT), whose bf16 product and bf16 cast are wrong; where bf16 is
stored it is rounded by bit arithmetic. Helpers and globals are avoided since the interpreter sees neither closures nor nested functions.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton
    import triton
    import triton.language as tl

    @triton.jit
    def attend(
        q, out, part, part_top, part_sum, cos, sin, sink, position, span, start, offset, floor, slot, table, selected, rings, fresh, pool,
        scale, slot_stride, max_blocks,
        H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, WP: tl.constexpr, R: tl.constexpr, W: tl.constexpr, RB: tl.constexpr,
        TOPK: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
        BK: tl.constexpr, TILES: tl.constexpr, WINDOW_SPLITS: tl.constexpr, SPLITS: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """Row program_id(0), all heads; with SPLITS > 1 only the program_id(1)-th TILES tiles of BK keys, whose part `combine` joins.

        The first WINDOW_SPLITS parts are of the window, the others of the entries. HP and WP are heads and words, D / 4, padded to powers
        of two. Window rows of RB bytes are read 4 bytes at a time where RB allows that.
        """
        WORDS: tl.constexpr = D // 4
        row = tl.program_id(0).to(tl.int64)
        part_id = tl.program_id(1)
        head = tl.arange(0, HP)
        dim = tl.arange(0, WP * 2)
        at = (row * H + head)[:, None] * D + dim[None, :]
        live = (head < H)[:, None] & (dim < D)[None, :]
        live_high = (head < H)[:, None] & (dim < D - WP * 2)[None, :]
        query = tl.load(q + at, mask=live, other=0.0).to(DOT)
        query_high = tl.load(q + WP * 2 + at, mask=live_high, other=0.0).to(DOT)
        here = tl.load(position + row).to(tl.int32)
        s = tl.load(span + row).to(tl.int64)
        top = tl.full([HP], -1e30, tl.float32)
        total = tl.zeros([HP], tl.float32)
        o = tl.zeros([HP, WP * 2], tl.float32)
        o_high = tl.zeros([HP, WP * 2], tl.float32)

        if SPLITS == 1 or part_id < WINDOW_SPLITS:
            first = tl.load(start + s)
            lowest = tl.maximum(here - W + 1, tl.load(floor + s))
            fresh_row = tl.load(offset + s) - first
            ring = rings + tl.load(slot + s).to(tl.int64) * slot_stride
            for tile in tl.range(0, TILES if SPLITS > 1 else (W + BK - 1) // BK, num_stages=1, disable_licm=True):
                t = tile * BK + tl.arange(0, BK)
                if SPLITS > 1:
                    t += part_id * TILES * BK
                key = lowest + t
                seen = key <= here
                new = seen & (key >= first)
                old = seen & (key < first)
                old_row = (tl.maximum(key, 0) % W)[:, None]
                new_row = tl.where(new, fresh_row + key, 0)[:, None]
                for half in tl.static_range(2):
                    group = half * (WP // 16) + tl.arange(0, WP // 16)
                    column = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
                    has = (group < WORDS // 8)[None, :]
                    if RB % 4 == 0:
                        words = ring.to(tl.pointer_type(tl.int32), bitcast=True) + old_row[:, :, None] * (RB // 4) + column[None]
                        c = tl.load(words, mask=(old[:, None] & has)[:, :, None], other=0)
                        words = fresh.to(tl.pointer_type(tl.int32), bitcast=True) + new_row[:, :, None] * (RB // 4) + column[None]
                        c |= tl.load(words, mask=(new[:, None] & has)[:, :, None], other=0)
                    else:
                        c = tl.zeros([BK, WP // 16, 8], tl.int32)
                        for j in tl.static_range(4):
                            byte = old_row[:, :, None] * RB + column[None] * 4 + j
                            c |= tl.load(ring + byte, mask=(old[:, None] & has)[:, :, None], other=0).to(tl.int32) << (8 * j)
                            byte = new_row[:, :, None] * RB + column[None] * 4 + j
                            c |= tl.load(fresh + byte, mask=(new[:, None] & has)[:, :, None], other=0).to(tl.int32) << (8 * j)
                    e = tl.load(ring + old_row * RB + D + group[None, :], mask=old[:, None] & has, other=0).to(tl.int32)
                    e |= tl.load(fresh + new_row * RB + D + group[None, :], mask=new[:, None] & has, other=0).to(tl.int32)
                    f = (e << 23).to(tl.float32, bitcast=True)[:, :, None]
                    # 2^112 = 2^120 of an E4M3 pattern read as fp32, times 2^-8.
                    k0 = ((c << 20) & 0x07F00000) | ((c << 24) & -2147483648)
                    k0 = (k0.to(tl.float32, bitcast=True) * 5.192296858534828e33 * f).to(DOT)
                    k1 = ((c << 12) & 0x07F00000) | ((c << 16) & -2147483648)
                    k1 = (k1.to(tl.float32, bitcast=True) * 5.192296858534828e33 * f).to(DOT)
                    k2 = ((c << 4) & 0x07F00000) | ((c << 8) & -2147483648)
                    k2 = (k2.to(tl.float32, bitcast=True) * 5.192296858534828e33 * f).to(DOT)
                    k3 = ((c >> 4) & 0x07F00000) | (c & -2147483648)
                    k3 = (k3.to(tl.float32, bitcast=True) * 5.192296858534828e33 * f).to(DOT)
                    k = tl.reshape(tl.join(tl.join(k0, k2), tl.join(k1, k3)), [BK, WP * 2])
                    if half == 0:
                        k_low = k
                        score = tl.dot(query, tl.trans(k))
                    else:
                        score = tl.dot(query_high, tl.trans(k), score)
                score = tl.where(seen[None, :], score * scale, float("-inf"))
                above = tl.maximum(top, tl.max(score, 1))
                p = tl.exp(score - above[:, None])
                decay = tl.exp(top - above)
                total = total * decay + tl.sum(p, 1)
                top = above
                if tl.float32 == DOT:
                    bits = p.to(tl.int32, bitcast=True)
                    p = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                p = p.to(DOT)
                o = tl.dot(p, k_low, o * decay[:, None])
                o_high = tl.dot(p, k, o_high * decay[:, None])

        if TOPK > 0 and (SPLITS == 1 or part_id >= WINDOW_SPLITS):
            words = pool.to(tl.pointer_type(tl.int16), bitcast=True)
            for tile in tl.range(0, TILES if SPLITS > 1 else (TOPK + BK - 1) // BK, disable_licm=True):
                t = tile * BK + tl.arange(0, BK)
                if SPLITS > 1:
                    t += (part_id - WINDOW_SPLITS) * TILES * BK
                entry = tl.load(selected + row * TOPK + t, mask=t < TOPK, other=-1)
                seen = entry >= 0
                entry = tl.maximum(entry, 0)
                block = tl.load(table + s * max_blocks + entry // PER_BLOCK, mask=seen, other=0).to(tl.int64)
                place = entry % PER_BLOCK
                code_row = block * (BLOCK_BYTES // 2) + (CODES // 2 + place * WORDS)
                scale_row = block * BLOCK_BYTES + (SCALES + place * (WORDS // 4))
                for half in tl.static_range(2):
                    group = half * (WP // 8) + tl.arange(0, WP // 8)
                    column = (group * 4)[:, None] + tl.arange(0, 4)[None, :]
                    mask = seen[:, None] & (group < WORDS // 4)[None, :]
                    c = tl.load(words + code_row[:, None, None] + column[None], mask=mask[:, :, None], other=0).to(tl.int32)
                    e = tl.load(pool + scale_row[:, None] + group[None, :], mask=mask, other=0).to(tl.int32)
                    # 2^118 * 2^120 = 2^120 of an E4M3 pattern read as fp32, times 2^126 of an E2M1 pattern, times 2^-8.
                    f = ((e & 127) << 20).to(tl.float32, bitcast=True) * 3.32306998946229e35 * 1.329227995784916e36
                    f = f[:, :, None]
                    k0 = ((c << 22) & 0x01C00000) | ((c << 28) & -2147483648)
                    k0 = (k0.to(tl.float32, bitcast=True) * f).to(DOT)
                    k1 = ((c << 18) & 0x01C00000) | ((c << 24) & -2147483648)
                    k1 = (k1.to(tl.float32, bitcast=True) * f).to(DOT)
                    k2 = ((c << 14) & 0x01C00000) | ((c << 20) & -2147483648)
                    k2 = (k2.to(tl.float32, bitcast=True) * f).to(DOT)
                    k3 = ((c << 10) & 0x01C00000) | ((c << 16) & -2147483648)
                    k3 = (k3.to(tl.float32, bitcast=True) * f).to(DOT)
                    k = tl.reshape(tl.join(tl.join(k0, k2), tl.join(k1, k3)), [BK, WP * 2])
                    if half == 0:
                        k_low = k
                        score = tl.dot(query, tl.trans(k))
                    else:
                        score = tl.dot(query_high, tl.trans(k), score)
                score = tl.where(seen[None, :], score * scale, float("-inf"))
                above = tl.maximum(top, tl.max(score, 1))
                p = tl.exp(score - above[:, None])
                decay = tl.exp(top - above)
                total = total * decay + tl.sum(p, 1)
                top = above
                if tl.float32 == DOT:
                    bits = p.to(tl.int32, bitcast=True)
                    p = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                p = p.to(DOT)
                o = tl.dot(p, k_low, o * decay[:, None])
                o_high = tl.dot(p, k, o_high * decay[:, None])

        if SPLITS > 1:
            here = (row * SPLITS + part_id) * H + head
            tl.store(part_top + here, top, mask=head < H)
            tl.store(part_sum + here, total, mask=head < H)
            at = here[:, None] * D + dim[None, :]
            tl.store(part + at, o, mask=live)
            tl.store(part + WP * 2 + at, o_high, mask=live_high)
        else:
            z = tl.load(sink + head, mask=head < H, other=0.0)
            above = tl.maximum(top, z)
            decay = tl.exp(top - above)
            factor = decay * 256.0 / (total * decay + tl.exp(z - above))
            for half in tl.static_range(2):
                if half == 1:
                    o = o_high
                bits = (o * factor[:, None]).to(tl.int32, bitcast=True)
                o = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                even, odd = tl.split(tl.reshape(o, [HP, WP, 2]))
                pair = half * WP + tl.arange(0, WP)
                if half * WP + WP > (D - R) // 2:
                    turned = (pair >= (D - R) // 2) & (pair < D // 2)
                    channel = row * R + pair * 2 - (D - R)
                    cosine = tl.load(cos + channel, mask=turned, other=1.0)[None, :]
                    sine = tl.load(sin + channel + 1, mask=turned, other=0.0)[None, :]
                    was = even
                    even = tl.where(turned[None, :], even * cosine + odd * sine, even)
                    odd = tl.where(turned[None, :], odd * cosine - was * sine, odd)
                even = even.to(tl.int32, bitcast=True)
                odd = odd.to(tl.int32, bitcast=True)
                even = ((even + 0x7FFF + ((even >> 16) & 1)) >> 16) & 0xFFFF
                odd = (odd + 0x7FFF + ((odd >> 16) & 1)) & -65536
                some = (head < H)[:, None] & (pair < D // 2)[None, :]
                tl.store(out + (row * H + head)[:, None] * (D // 2) + pair[None, :], even | odd, mask=some)

    @triton.jit
    def combine(
        out, part, part_top, part_sum, cos, sin, sink,
        H: tl.constexpr, D: tl.constexpr, WP: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
    ):  # fmt: skip
        """One row and head: its parts and the sink in one softmax, then as at the end of `attend`."""
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        pair = tl.arange(0, WP * 2)
        live = pair < D // 2
        at = (pair * 2)[:, None] + tl.arange(0, 2)[None, :]
        z = tl.load(sink + head)
        above = z
        for i in tl.static_range(SPLITS):
            above = tl.maximum(above, tl.load(part_top + (row * SPLITS + i) * H + head))
        total = tl.exp(z - above)
        o = tl.zeros([WP * 2, 2], tl.float32)
        for i in tl.static_range(SPLITS):
            here = (row * SPLITS + i) * H + head
            decay = tl.exp(tl.load(part_top + here) - above)
            total += tl.load(part_sum + here) * decay
            o += tl.load(part + here * D + at, mask=live[:, None], other=0.0) * decay
        bits = (o * (256.0 / total)).to(tl.int32, bitcast=True)
        a, b = tl.split(((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
        turned = (pair >= (D - R) // 2) & live
        channel = row * R + pair * 2 - (D - R)
        cosine = tl.load(cos + channel, mask=turned, other=1.0)
        sine = tl.load(sin + channel + 1, mask=turned, other=0.0)
        even = tl.where(turned, a * cosine + b * sine, a).to(tl.int32, bitcast=True)
        odd = tl.where(turned, b * cosine - a * sine, b).to(tl.int32, bitcast=True)
        even = ((even + 0x7FFF + ((even >> 16) & 1)) >> 16) & 0xFFFF
        odd = (odd + 0x7FFF + ((odd >> 16) & 1)) & -65536
        tl.store(out + (row * H + head) * (D // 2) + pair, even | odd, mask=live)

    return SimpleNamespace(attend=attend, combine=combine, tl=tl)
