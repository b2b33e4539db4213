"""Triton kernels that write KV: window rows, kept window rows, and the entries of a kv source. `store_ops` documents and launches them.

triton is optional, so nothing here exists before `load` is called. Helpers and globals are avoided since the interpreter sees neither
closures nor nested functions. Numbers are quantised by integer arithmetic, which the interpreter and a GPU compute alike: a magnitude with
m mantissa bits and least exponent l is q steps of 2^(max(exponent, l) - m), where adding 1.5 * 2^23 rounds q to even at ties, and its code
is (exponent - l) * 2^m + q, with carries into the exponent included.

CAST takes E4M3 codes from the hardware's cast instead, which rounds alike in far fewer instructions; the interpreter's is wrong.
BITS says that a cast to bf16 truncates, as the interpreter's does, and is to be rounded by hand first. Launches turn off the fusing of
products and sums, so that rotations are rounded as in the reference.
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

    # Sizes of a batch are not compiled in: Triton would do so with 1 and multiples of 16.
    @triton.jit(do_not_specialize=["n"])
    def turn_table(position, freqs, table, n, R: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, BR: tl.constexpr):
        """Cosines and sines of the fp32 product of position and frequency. Floor: 8 * PAIRS bytes a row."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        pair = tl.arange(0, PP)
        mask = (row < n)[:, None] & (pair < PAIRS)[None, :]
        first = tl.load(position + row, mask=row < n, other=0) // R * R
        f = tl.load(freqs + pair, mask=pair < PAIRS, other=0.0)
        angle = first.to(tl.float32)[:, None] * f[None, :]
        at = table + row.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
        tl.store(at, tl.cos(angle), mask=mask)
        tl.store(at + PAIRS, tl.sin(angle), mask=mask)

    @triton.jit(do_not_specialize=["n"])
    def window_store(
        low_q, low_kv, q_stride, kv_stride, q_weight, kv_weight, turn, position, span, stop, slot, fresh, ring, ring_stride,
        q_codes, q_scales, q_values, n, eps, Q: tl.constexpr, CH: tl.constexpr, KV: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr,
        ROW: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, BK: tl.constexpr,
        BQ: tl.constexpr, BITS: tl.constexpr, CAST: tl.constexpr,
    ):  # fmt: skip
        """The first cdiv(n, BK) programs make window rows, the others query latents: the two share a launch and nothing else."""
        MAGIC: tl.constexpr = 12582912.0
        MAGIC_BITS: tl.constexpr = 0x4B400000
        windows = tl.cdiv(n, BK)
        if tl.program_id(0) < windows:
            row = tl.program_id(0) * BK + tl.arange(0, BK)
            live = row < n
            ch = tl.arange(0, KP)
            inside = live[:, None] & (ch < KV)[None, :]
            x = tl.load(low_kv + row.to(tl.int64)[:, None] * kv_stride + ch[None, :], mask=inside, other=0.0).to(tl.float32)
            mean = tl.div_rn(tl.sum(x * x, 1), tl.full([BK], KV, tl.float32))
            r = tl.div_rn(tl.full([BK], 1.0, tl.float32), tl.sqrt_rn(mean + eps))
            y = tl.load(kv_weight + ch, mask=ch < KV, other=0.0).to(tl.float32)[None, :] * (x * r[:, None])
            if BITS:
                raw = y.to(tl.int32, bitcast=True)
                y = tl.where(y != y, y, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
            else:
                y = y.to(tl.bfloat16).to(tl.float32)
            even, odd = tl.split(tl.reshape(y, [BK, KP // 2, 2]))
            pair = tl.arange(0, KP // 2) - (KV // 2 - PAIRS)
            turned = ((pair >= 0) & (pair < PAIRS))[None, :]
            at = turn + row.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
            c = tl.load(at, mask=turned & live[:, None], other=1.0)
            s = tl.load(at + PAIRS, mask=turned & live[:, None], other=0.0)
            a = tl.where(turned, even * c - odd * s, even)
            b = tl.where(turned, odd * c + even * s, odd)
            v = tl.reshape(tl.join(a, b), [BK, KP])
            if BITS:
                raw = v.to(tl.int32, bitcast=True)
                v = tl.where(v != v, v, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
            else:
                v = v.to(tl.bfloat16).to(tl.float32)
            raw = tl.reshape(v.to(tl.int32, bitcast=True), [BK, KP // 32, 32])
            size = raw & 0x7FFFFFFF
            top = tl.max(size, 2)  # of bit patterns, so that NaN is the largest
            bad = top >= 0x7F800000
            power = tl.maximum(top.to(tl.float32, bitcast=True), 1e-4) * (1.0 / 448.0)
            power = (power.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            power = tl.where(bad, 0x7F800000, power)
            inverse = tl.where(bad, 0, (254 << 23) - power).to(tl.float32, bitcast=True)
            z = size.to(tl.float32, bitcast=True) * inverse[:, :, None]
            if CAST:
                code = (raw.to(tl.float32, bitcast=True) * inverse[:, :, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
                code = tl.where(bad[:, :, None], 0x7F, code.to(tl.int32))
            else:
                e = tl.maximum(z.to(tl.int32, bitcast=True) >> 23, 121)
                q = (z * ((257 - e) << 23).to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
                code = tl.where(bad[:, :, None], 0x7F, ((e - 121) * 8 + q) | ((raw >> 24) & 0x80))
            code = tl.reshape(code, [BK, KP]).to(tl.uint8)
            byte = (power >> 23).to(tl.uint8)
            group = tl.arange(0, KP // 32)
            some = live[:, None] & (group < KV // 32)[None, :]
            at = fresh + row.to(tl.int64)[:, None] * ROW
            tl.store(at + ch[None, :], code, mask=inside)
            tl.store(at + KV + group[None, :], byte, mask=some)
            if RING:
                owner = tl.load(span + row, mask=live, other=-1)
                kept = live & (owner >= 0)
                place = tl.load(position + row, mask=kept, other=0)
                kept = kept & (place >= tl.load(stop + owner, mask=kept, other=0) - WINDOW)
                where = tl.load(slot + owner, mask=kept, other=0).to(tl.int64) * ring_stride + place % WINDOW * ROW
                tl.store(ring + where[:, None] + ch[None, :], code, mask=inside & kept[:, None])
                tl.store(ring + where[:, None] + KV + group[None, :], byte, mask=some & kept[:, None])
        if tl.program_id(0) >= windows:  # not `else`: the names of two branches must have one type
            row = (tl.program_id(0) - windows) * BQ + tl.arange(0, BQ)
            live = row < n
            # CH channels at a time, twice: few channels are wasted on padding to a power of two, and the second reading is of cache.
            square = tl.zeros([BQ, CH], tl.float32)
            for first in tl.static_range(0, Q, CH):
                ch = first + tl.arange(0, CH)
                inside = live[:, None] & (ch < Q)[None, :]
                x = tl.load(low_q + row.to(tl.int64)[:, None] * q_stride + ch[None, :], mask=inside, other=0.0).to(tl.float32)
                square += x * x
            mean = tl.div_rn(tl.sum(square, 1), tl.full([BQ], Q, tl.float32))
            r = tl.div_rn(tl.full([BQ], 1.0, tl.float32), tl.sqrt_rn(mean + eps))
            for first in tl.static_range(0, Q, CH):
                ch = first + tl.arange(0, CH)
                inside = live[:, None] & (ch < Q)[None, :]
                x = tl.load(low_q + row.to(tl.int64)[:, None] * q_stride + ch[None, :], mask=inside, other=0.0).to(tl.float32)
                v = tl.load(q_weight + ch, mask=ch < Q, other=0.0).to(tl.float32)[None, :] * (x * r[:, None])
                if BITS:
                    raw = v.to(tl.int32, bitcast=True)
                    v = tl.where(v != v, v, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
                else:
                    v = v.to(tl.bfloat16).to(tl.float32)
                raw = tl.reshape(v.to(tl.int32, bitcast=True), [BQ, CH // 32, 32])
                size = raw & 0x7FFFFFFF
                top = tl.max(size, 2)
                bad = top >= 0x7F800000
                power = tl.maximum(top.to(tl.float32, bitcast=True), 1e-4) * (1.0 / 448.0)
                power = (power.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
                power = tl.where(bad, 0x7F800000, power)
                inverse = tl.where(bad, 0, (254 << 23) - power).to(tl.float32, bitcast=True)
                if CAST:
                    eight = (raw.to(tl.float32, bitcast=True) * inverse[:, :, None]).to(tl.float8e4nv)
                    code = tl.where(bad[:, :, None], 0x7F, eight.to(tl.uint8, bitcast=True).to(tl.int32))
                    near = eight.to(tl.float32) * power.to(tl.float32, bitcast=True)[:, :, None]
                    near = tl.where(bad[:, :, None], float("nan"), near)
                else:
                    z = size.to(tl.float32, bitcast=True) * inverse[:, :, None]
                    e = tl.maximum(z.to(tl.int32, bitcast=True) >> 23, 121)
                    wide = z * ((257 - e) << 23).to(tl.float32, bitcast=True) + MAGIC
                    code = ((e - 121) * 8 + wide.to(tl.int32, bitcast=True) - MAGIC_BITS) | ((raw >> 24) & 0x80)
                    code = tl.where(bad[:, :, None], 0x7F, code)
                    # q times its step times the scale, and the sign as it was, also that of zero; a bad group is NaN as a whole.
                    near = (wide - MAGIC) * ((e - 3) << 23).to(tl.float32, bitcast=True) * power.to(tl.float32, bitcast=True)[:, :, None]
                    near = near.to(tl.int32, bitcast=True) | (raw & -2147483648)
                    near = tl.where(bad[:, :, None], 0x7FC00000, near).to(tl.float32, bitcast=True)
                if CODES:
                    group = first // 32 + tl.arange(0, CH // 32)
                    some = live[:, None] & (group < Q // 32)[None, :]
                    tl.store(q_codes + row.to(tl.int64)[:, None] * Q + ch[None, :], tl.reshape(code, [BQ, CH]).to(tl.uint8), mask=inside)
                    tl.store(q_scales + row.to(tl.int64)[:, None] * (Q // 32) + group[None, :], (power >> 23).to(tl.uint8), mask=some)
                if VALUES:
                    at = q_values + row.to(tl.int64)[:, None] * Q + ch[None, :]
                    tl.store(at, tl.reshape(near, [BQ, CH]).to(tl.bfloat16), mask=inside)

    @triton.jit(do_not_specialize=["n"])
    def keep_window(
        fresh, ring, ring_stride, layer_stride, position, span, stop, slot, n,
        WORDS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Rows of layer program_id(1) as words of whatever size the views have; a word to a lane. A tile of rows that none outlives ends
        after its positions."""
        layer = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = (at // WORDS).to(tl.int32)
        word = (at % WORDS).to(tl.int32)
        live = row < n
        owner = tl.load(span + row, mask=live, other=-1)
        kept = live & (owner >= 0)
        place = tl.load(position + row, mask=kept, other=0)
        kept = kept & (place >= tl.load(stop + owner, mask=kept, other=0) - WINDOW)
        x = tl.load(fresh + layer * n * WORDS + at, mask=kept, other=0)
        home = tl.load(slot + owner, mask=kept, other=0).to(tl.int64) * ring_stride + layer * layer_stride
        to = home + place % WINDOW * WORDS + word
        tl.store(ring + to, x, mask=kept)

    @triton.jit(do_not_specialize=["m", "table_stride"])
    def entry_store(
        source, source_stride, pooled, norm, wk, k_norm, turn, rows, m, position, span, start, stop, offset, floor, slot,
        table, table_stride, pending, pending_stride, pool, block_bytes, main_codes, main_scales, index_codes, index_scales, eps,
        R: tl.constexpr, DIM: tl.constexpr, CH: tl.constexpr, INDEX: tl.constexpr, IP: tl.constexpr, PAIRS: tl.constexpr,
        PER_BLOCK: tl.constexpr, BR: tl.constexpr, DOT: tl.constexpr, BITS: tl.constexpr,
    ):  # fmt: skip
        """BR listed rows, CH channels at a time: once for the norm, and once more, from cache, for everything else.

        With R = 2 the pooled latents go through `pooled`, 2 * DIM bytes a row that stay in L2. The one row of a span that reads the span's
        pending token, or its last row where none does, also writes the new pending token, so that no other program may come first.
        """
        MAGIC: tl.constexpr = 12582912.0
        MAGIC_BITS: tl.constexpr = 0x4B400000
        lane = tl.program_id(0) * BR + tl.arange(0, BR)
        row = tl.load(rows + lane, mask=lane < m, other=-1)
        owner = tl.load(span + row, mask=row >= 0, other=-1)
        live = owner >= 0
        place = tl.load(position + row, mask=live, other=0).to(tl.int32)
        entry = place // R
        done = live & (place % R == R - 1) & (entry >= tl.load(floor + owner, mask=live, other=0) // R)
        square = tl.zeros([BR], tl.float32)
        if R == 1:
            for first in tl.static_range(0, DIM, CH):
                ch = first + tl.arange(0, CH)
                inside = done[:, None] & (ch < DIM)[None, :]
                x = tl.load(source + row.to(tl.int64)[:, None] * source_stride + ch[None, :], mask=inside, other=0.0).to(tl.float32)
                square += tl.sum(x * x, 1)
        else:
            begin = tl.load(start + owner, mask=live, other=0)
            end = tl.load(stop + owner, mask=live, other=0)
            home = pending + tl.load(slot + owner, mask=live, other=0).to(tl.int64) * pending_stride
            for first in tl.static_range(0, DIM, CH):
                ch = first + tl.arange(0, CH)
                inside = done[:, None] & (ch < DIM)[None, :]
                here = inside & (place > begin)[:, None]
                gone = inside & (place <= begin)[:, None]
                at = source + row.to(tl.int64)[:, None] * source_stride + ch[None, :]
                before = home[:, None] + ch[None, :]
                k1 = tl.load(at, mask=inside, other=0.0)
                g1 = tl.load(at + DIM, mask=inside, other=0.0)
                k0 = tl.where(here, tl.load(at - source_stride, mask=here, other=0.0), tl.load(before, mask=gone, other=0.0))
                g0 = tl.where(here, tl.load(at - source_stride + DIM, mask=here, other=0.0), tl.load(before + DIM, mask=gone, other=0.0))
                high = tl.maximum(g0, g1)
                w0 = tl.exp(g0 - high)
                w1 = tl.exp(g1 - high)
                total = w0 + w1
                x = k0 * (w0 / total) + k1 * (w1 / total)
                if BITS:
                    raw = x.to(tl.int32, bitcast=True)
                    x = tl.where(x != x, x, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
                else:
                    x = x.to(tl.bfloat16).to(tl.float32)
                square += tl.sum(x * x, 1)
                tl.store(pooled + lane.to(tl.int64)[:, None] * DIM + ch[None, :], x.to(tl.bfloat16), mask=inside)
            tl.debug_barrier()  # the pending token is read and `pooled` written
            last = end - 1
            keeps = live & (place == tl.where(begin % 2 == 1, begin, last)) & (last % 2 == 0)
            from_row = tl.load(offset + owner, mask=keeps, other=0) + last - begin
            for first in tl.static_range(0, DIM, CH):
                ch = first + tl.arange(0, CH)
                inside = keeps[:, None] & (ch < DIM)[None, :]
                at = source + from_row.to(tl.int64)[:, None] * source_stride + ch[None, :]
                before = home[:, None] + ch[None, :]
                tl.store(before, tl.load(at, mask=inside, other=0.0), mask=inside)
                tl.store(before + DIM, tl.load(at + DIM, mask=inside, other=0.0), mask=inside)
        mean = tl.div_rn(square, tl.full([BR], DIM, tl.float32))
        r = tl.div_rn(tl.full([BR], 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
        block = tl.load(table + owner.to(tl.int64) * table_stride + entry // PER_BLOCK, mask=done, other=0)
        base = pool + block.to(tl.int64) * block_bytes
        slot_in_block = entry % PER_BLOCK
        column = tl.arange(0, IP)
        turn_row = turn + row.to(tl.int64)[:, None] * (2 * PAIRS)
        acc = tl.zeros([BR, IP], tl.float32)
        for first in tl.static_range(0, DIM, CH):
            ch = first + tl.arange(0, CH)
            inside = done[:, None] & (ch < DIM)[None, :]
            if R == 1:
                x = tl.load(source + row.to(tl.int64)[:, None] * source_stride + ch[None, :], mask=inside, other=0.0).to(tl.float32)
            else:
                x = tl.load(pooled + lane.to(tl.int64)[:, None] * DIM + ch[None, :], mask=inside, other=0.0).to(tl.float32)
            y = tl.load(norm + ch, mask=ch < DIM, other=0.0).to(tl.float32)[None, :] * (x * r)
            if BITS:
                raw = y.to(tl.int32, bitcast=True)
                y = tl.where(y != y, y, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
            else:
                y = y.to(tl.bfloat16).to(tl.float32)
            w = tl.load(wk + column[None, :] * DIM + ch[:, None], mask=(column < INDEX)[None, :] & (ch < DIM)[:, None], other=0.0)
            acc = tl.dot(y.to(DOT), w.to(DOT), acc)
            a, b = tl.split(tl.reshape(y, [BR, CH // 2, 2]))
            if first + CH > DIM - 2 * PAIRS:
                pair = first // 2 + tl.arange(0, CH // 2) - (DIM // 2 - PAIRS)
                turned = ((pair >= 0) & (pair < PAIRS))[None, :]
                c = tl.load(turn_row + pair[None, :], mask=turned & done[:, None], other=1.0)
                s = tl.load(turn_row + PAIRS + pair[None, :], mask=turned & done[:, None], other=0.0)
                a1 = tl.where(turned, a * c - b * s, a)
                b1 = tl.where(turned, b * c + a * s, b)
                if BITS:
                    raw = a1.to(tl.int32, bitcast=True)
                    a = tl.where(a1 != a1, a1, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
                    raw = b1.to(tl.int32, bitcast=True)
                    b = tl.where(b1 != b1, b1, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
                else:
                    a = a1.to(tl.bfloat16).to(tl.float32)
                    b = b1.to(tl.bfloat16).to(tl.float32)
            # Main FP4: groups of 8 pairs with an E4M3 scale.
            a_raw = tl.reshape(a.to(tl.int32, bitcast=True), [BR, CH // 16, 8])
            b_raw = tl.reshape(b.to(tl.int32, bitcast=True), [BR, CH // 16, 8])
            top = tl.max(tl.maximum(a_raw & 0x7FFFFFFF, b_raw & 0x7FFFFFFF), 2)
            bad = top > 0x7F800000
            amax = tl.maximum(tl.where(bad, 0, top).to(tl.float32, bitcast=True), 6.0 / 512)
            scale = tl.minimum(tl.div_rn(amax, tl.full([BR, CH // 16], 6.0, tl.float32)), 448.0)
            e = tl.maximum(scale.to(tl.int32, bitcast=True) >> 23, 121)
            wide = scale * ((257 - e) << 23).to(tl.float32, bitcast=True) + MAGIC
            byte = tl.where(bad, 0x7F, (e - 121) * 8 + wide.to(tl.int32, bitcast=True) - MAGIC_BITS).to(tl.uint8)
            scale = (wide - MAGIC) * ((e - 3) << 23).to(tl.float32, bitcast=True)
            inverse = tl.div_rn(tl.full([BR, CH // 16], 1.0, tl.float32), scale)[:, :, None]
            # A tie times a scale has 7 bits and x has 8, so their quotient is a tie or at least 2^-8 from any: the product with the
            # reciprocal, rounded to 12 bits, has the quotient's code.
            z = ((a_raw & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
            z = tl.minimum((z + 0x400) & -2048, 0x40C00000)
            e = tl.maximum(z >> 23, 127)
            q = (z.to(tl.float32, bitcast=True) * ((255 - e) << 23).to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
            low = ((e - 127) * 2 + q - MAGIC_BITS) | ((a_raw >> 28) & 8)
            z = ((b_raw & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True)
            z = tl.minimum((z + 0x400) & -2048, 0x40C00000)
            e = tl.maximum(z >> 23, 127)
            q = (z.to(tl.float32, bitcast=True) * ((255 - e) << 23).to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
            high = ((e - 127) * 2 + q - MAGIC_BITS) | ((b_raw >> 28) & 8)
            byte_at = first // 2 + tl.arange(0, CH // 2)
            at = base + main_codes + slot_in_block * (DIM // 2)
            packed = tl.reshape(low | (high << 4), [BR, CH // 2]).to(tl.uint8)
            tl.store(at[:, None] + byte_at[None, :], packed, mask=done[:, None] & (byte_at < DIM // 2)[None, :])
            group = first // 16 + tl.arange(0, CH // 16)
            at = base + main_scales + slot_in_block * (DIM // 16)
            tl.store(at[:, None] + group[None, :], byte, mask=done[:, None] & (group < DIM // 16)[None, :])
        # The index key: bf16 product, norm, rotation, FP4 in groups of 16 pairs with a power-of-two scale.
        if BITS:
            raw = acc.to(tl.int32, bitcast=True)
            acc = tl.where(acc != acc, acc, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
        else:
            acc = acc.to(tl.bfloat16).to(tl.float32)
        mean = tl.div_rn(tl.sum(acc * acc, 1), tl.full([BR], INDEX, tl.float32))
        r = tl.div_rn(tl.full([BR], 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
        y = tl.load(k_norm + column, mask=column < INDEX, other=0.0).to(tl.float32)[None, :] * (acc * r)
        if BITS:
            raw = y.to(tl.int32, bitcast=True)
            y = tl.where(y != y, y, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
        else:
            y = y.to(tl.bfloat16).to(tl.float32)
        a, b = tl.split(tl.reshape(y, [BR, IP // 2, 2]))
        pair = tl.arange(0, IP // 2) - (INDEX // 2 - PAIRS)
        turned = ((pair >= 0) & (pair < PAIRS))[None, :]
        c = tl.load(turn_row + pair[None, :], mask=turned & done[:, None], other=1.0)
        s = tl.load(turn_row + PAIRS + pair[None, :], mask=turned & done[:, None], other=0.0)
        a1 = tl.where(turned, a * c - b * s, a)
        b1 = tl.where(turned, b * c + a * s, b)
        if BITS:
            raw = a1.to(tl.int32, bitcast=True)
            a = tl.where(a1 != a1, a1, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
            raw = b1.to(tl.int32, bitcast=True)
            b = tl.where(b1 != b1, b1, ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True))
        else:
            a = a1.to(tl.bfloat16).to(tl.float32)
            b = b1.to(tl.bfloat16).to(tl.float32)
        a_raw = tl.reshape(a.to(tl.int32, bitcast=True), [BR, IP // 32, 16])
        b_raw = tl.reshape(b.to(tl.int32, bitcast=True), [BR, IP // 32, 16])
        top = tl.max(tl.maximum(a_raw & 0x7FFFFFFF, b_raw & 0x7FFFFFFF), 2)
        bad = top >= 0x7F800000
        power = tl.maximum(tl.where(bad, 0, top).to(tl.float32, bitcast=True), 7.052966104933725e-38) * (1.0 / 6.0)
        power = (power.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)[:, :, None]
        byte = tl.where(bad, 255, power >> 23).to(tl.uint8)
        z = tl.minimum(((a_raw & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True), 0x40C00000)
        e = tl.maximum(z >> 23, 127)
        q = (z.to(tl.float32, bitcast=True) * ((255 - e) << 23).to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
        low = ((e - 127) * 2 + q - MAGIC_BITS) | ((a_raw >> 28) & 8)
        z = tl.minimum(((b_raw & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse).to(tl.int32, bitcast=True), 0x40C00000)
        e = tl.maximum(z >> 23, 127)
        q = (z.to(tl.float32, bitcast=True) * ((255 - e) << 23).to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
        high = ((e - 127) * 2 + q - MAGIC_BITS) | ((b_raw >> 28) & 8)
        packed = tl.reshape(low | (high << 4), [BR, IP // 2]).to(tl.uint8)
        byte_at = tl.arange(0, IP // 2)
        at = base + index_codes + slot_in_block * (INDEX // 2)
        tl.store(at[:, None] + byte_at[None, :], packed, mask=done[:, None] & (byte_at < INDEX // 2)[None, :])
        group = tl.arange(0, IP // 32)
        at = base + index_scales + slot_in_block * (INDEX // 32)
        tl.store(at[:, None] + group[None, :], byte, mask=done[:, None] & (group < INDEX // 32)[None, :])

    return SimpleNamespace(**{name: value for name, value in locals().items() if name != "interpreted"}, tl=tl, cdiv=triton.cdiv)
