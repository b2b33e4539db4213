"""Triton kernels that write KV: window rows, kept window rows, and the entries of a kv source. `store_ops` documents and launches them.

Channels come in pairs, as `words` has them. A row is kept in registers as a tuple of chunks of words, since a tensor's sides are powers of
two. Launches turn off the fusing of products and sums, so that rotations are rounded as in the reference.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import dependent, words


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _await, _even, _odd, _pair, _largest, _fp8, _scale4, _fp4, _shares, _factor, _here, _factor_of
    global _load, _words, _weights, _row, _square, _normed, _turned, _power8, _root, _put
    import triton
    import triton.language as tl

    _await, w = dependent.load(interpreted)._await, words.load(interpreted)
    _even, _odd, _pair, _largest, _shares, _factor = w._even, w._odd, w._pair, w._largest, w._shares, w._factor
    _fp8, _fp4, _scale4, _here = w._fp8, w._fp4, w._scale4, w._here

    @triton.jit
    def _load(at, mask, WHOLE: tl.constexpr):
        """Without a mask where that is always true: then nothing has to be cleared first."""
        return tl.load(at) if WHOLE else tl.load(at, mask=mask, other=0)

    @triton.jit
    def _words(pointer):
        return pointer.to(tl.pointer_type(tl.int32), bitcast=True)

    @triton.jit
    def _weights(weight, word, SIZE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
        """A norm's weights, bf16 or fp32, SIZE of them, of the pairs `word` of a chunk of CHUNK channels, as fp32.

        For each of ROWS rows, as every thread then loads those that it needs itself.
        """
        word = tl.broadcast_to(word[None, :], [ROWS, CHUNK // 2])
        mask = word < SIZE // 2
        if weight.dtype.element_ty == tl.bfloat16:
            w = _load(_words(weight) + word, mask, SIZE % CHUNK == 0)
            even = _even(w)
            odd = _odd(w)
        else:
            even = _load(weight + 2 * word, mask, SIZE % CHUNK == 0)
            odd = _load(weight + 2 * word + 1, mask, SIZE % CHUNK == 0)
        return even, odd

    @triton.jit
    def _row(x, row, stride, SIZE: tl.constexpr, CHUNK: tl.constexpr):
        """Rows of bf16, which begin at multiples of 16 bytes, as chunks of words."""
        at = tl.multiple_of(_words(x) + row.to(tl.int64) * (stride // 2), 16)[:, None]
        chunks = ()
        for first in tl.static_range(0, SIZE, CHUNK):
            word = (first // 2 + tl.arange(0, CHUNK // 2))[None, :]
            chunks += (_load(at + word, word < SIZE // 2, SIZE % CHUNK == 0),)
        return chunks

    @triton.jit
    def _square(chunks):
        """The sum of a row's squares."""
        square = tl.zeros(chunks[0].shape, tl.float32)
        for i in tl.static_range(len(chunks)):
            square = tl.fma(_even(chunks[i]), _even(chunks[i]), square)
            square = tl.fma(_odd(chunks[i]), _odd(chunks[i]), square)
        return tl.sum(square, 1)

    @triton.jit
    def _factor_of(wk, column, ch, INDEX: tl.constexpr, DIM: tl.constexpr, WHOLE: tl.constexpr):
        """The index key's weights of channels `ch`."""
        return _load(wk + column[:, None] * DIM + ch[None, :], (column < INDEX)[:, None] & (ch < DIM)[None, :], WHOLE)

    @triton.jit
    def _root(square, SIZE: tl.constexpr, eps):
        """What a row is multiplied by in its norm, [rows, 1], from the sums of its squares."""
        mean = tl.div_rn(square, tl.full(square.shape, SIZE, tl.float32))
        return tl.div_rn(tl.full(square.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]

    @triton.jit
    def _normed(w, weights, r):
        return _pair(weights[0] * (_even(w) * r), weights[1] * (_odd(w) * r))

    @triton.jit
    def _turned(w, at, pair, PAIRS: tl.constexpr, live):
        """Words of which those with 0 <= pair < PAIRS are rotated by what is at the rows `at`."""
        turned = ((pair >= 0) & (pair < PAIRS))[None, :]
        at = at[:, None] + pair[None, :]
        c = tl.load(at, mask=turned & live[:, None], other=1.0)
        s = tl.load(at + PAIRS, mask=turned & live[:, None], other=0.0)
        even = _even(w)
        odd = _odd(w)
        return tl.where(turned, _pair(even * c - odd * s, odd * c + even * s), w)

    @triton.jit
    def _power8(w):
        """Of FP8 groups along the last axis: the scale and its inverse as fp32 bits; of a group with NaN or infinity, infinity and NaN."""
        top = _largest(w)
        bad = top >= 0x7F800000
        power = tl.maximum(top.to(tl.float32, bitcast=True), 1e-4) * (1.0 / 448.0)
        power = (power.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        return tl.where(bad, 0x7F800000, power), tl.where(bad, 0x7FC00000, (254 << 23) - power)

    @triton.jit
    def _put(at, word, code, mask, EVEN: tl.constexpr):
        """Store pairs of codes as 16 bits, which stand at an even place, or as bytes."""
        if EVEN:
            tl.store(at.to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + word[None, :], code, mask=mask)
        else:
            tl.store(at[:, None] + 2 * word[None, :], (code & 0xFF).to(tl.uint8), mask=mask)
            tl.store(at[:, None] + 2 * word[None, :] + 1, ((code >> 8) & 0xFF).to(tl.uint8), mask=mask)

    # Sizes of a batch are not compiled in: Triton would do so with 1 and multiples of 16.
    @triton.jit(do_not_specialize=["n"])
    def turn_table(position, freqs, table, n, R: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, BR: tl.constexpr):
        """Cosines and sines of the fp32 product of position and frequency. Floor: 8 * PAIRS bytes a row."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        pair = tl.arange(0, PP)
        mask = (row < n)[:, None] & (pair < PAIRS)[None, :]
        f = tl.load(freqs + pair, mask=pair < PAIRS, other=0.0)
        _await()
        first = tl.load(position + row, mask=row < n, other=0) // R * R
        angle = first.to(tl.float32)[:, None] * f[None, :]
        at = table + row.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
        tl.store(at, tl.cos(angle), mask=mask)
        tl.store(at + PAIRS, tl.sin(angle), mask=mask)

    @triton.jit(do_not_specialize=["n"])
    def window_store(
        low_q, low_kv, q_stride, kv_stride, q_weight, kv_weight, turn, position, span, stop, slot, fresh, ring, ring_stride,
        q_codes, q_scales, q_values, n, eps, Q: tl.constexpr, CQ: tl.constexpr, KV: tl.constexpr, CK: tl.constexpr, PAIRS: tl.constexpr,
        ROW: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, BK: tl.constexpr,
        BQ: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """The first cdiv(n, BK) programs make window rows, CK channels at a time, the others query latents, CQ at a time: the two share a
        launch and nothing else."""
        windows = tl.cdiv(n, BK)
        if tl.program_id(0) < windows:
            row = tl.program_id(0) * BK + tl.arange(0, BK)
            live = row < n
            weights = ()
            if EARLY:
                for first in tl.static_range(0, KV, CK):
                    weights += (_weights(kv_weight, first // 2 + tl.arange(0, CK // 2), KV, CK, BK),)
            _await()
            chunks = _row(low_kv, tl.minimum(row, n - 1), kv_stride, KV, CK)
            r = _root(_square(chunks), KV, eps)
            if RING:
                owner = tl.load(span + row, mask=live, other=-1)
                kept = live & (owner >= 0)
                place = tl.load(position + row, mask=kept, other=0)
                kept = kept & (place >= tl.load(stop + owner, mask=kept, other=0) - WINDOW)
                home = ring + (tl.load(slot + owner, mask=kept, other=0).to(tl.int64) * ring_stride + place % WINDOW * ROW)
            at = fresh + row.to(tl.int64) * ROW
            for i in tl.static_range(len(chunks)):
                first = i * (CK // 2)
                word = first + tl.arange(0, CK // 2)
                w = _normed(chunks[i], weights[i] if EARLY else _weights(kv_weight, word, KV, CK, BK), r)
                if first + CK // 2 > KV // 2 - PAIRS:
                    w = _turned(w, turn + row.to(tl.int64) * (2 * PAIRS), word - (KV // 2 - PAIRS), PAIRS, live)
                w = tl.reshape(w, [BK, CK // 32, 16])
                power, inverse = _power8(w)
                inverse, w = tl.broadcast(inverse[:, :, None], w)
                power_of, w = tl.broadcast(power[:, :, None], w)
                code, _ = _fp8(w, inverse, power_of)
                code = tl.reshape(code, [BK, CK // 2])
                byte = (power >> 23).to(tl.uint8)
                inside = live[:, None] & (word < KV // 2)[None, :]
                group = first // 16 + tl.arange(0, CK // 32)
                some = live[:, None] & (group < KV // 32)[None, :]
                _put(at, word, code, inside, ROW % 2 == 0)
                tl.store(at[:, None] + KV + group[None, :], byte, mask=some)
                if RING:
                    _put(home, word, code, inside & kept[:, None], ROW % 2 == 0)
                    tl.store(home[:, None] + KV + group[None, :], byte, mask=some & kept[:, None])
        if tl.program_id(0) >= windows:  # not `else`: the names of two branches must have one type
            row = (tl.program_id(0) - windows) * BQ + tl.arange(0, BQ)
            live = row < n
            weights = ()
            if EARLY:
                for first in tl.static_range(0, Q, CQ):
                    weights += (_weights(q_weight, first // 2 + tl.arange(0, CQ // 2), Q, CQ, BQ),)
            _await()
            chunks = _row(low_q, tl.minimum(row, n - 1), q_stride, Q, CQ)
            r = _root(_square(chunks), Q, eps)
            for i in tl.static_range(len(chunks)):
                first = i * (CQ // 2)
                word = first + tl.arange(0, CQ // 2)
                inside = live[:, None] & (word < Q // 2)[None, :]
                w = _normed(chunks[i], weights[i] if EARLY else _weights(q_weight, word, Q, CQ, BQ), r)
                w = tl.reshape(w, [BQ, CQ // 32, 16])
                power, inverse = _power8(w)
                inverse, w = tl.broadcast(inverse[:, :, None], w)
                power_of, w = tl.broadcast(power[:, :, None], w)
                code, near = _fp8(w, inverse, power_of)
                if CODES:
                    group = first // 16 + tl.arange(0, CQ // 32)
                    some = live[:, None] & (group < Q // 32)[None, :]
                    _put(q_codes + row.to(tl.int64) * Q, word, tl.reshape(code, [BQ, CQ // 2]), inside, True)
                    tl.store(q_scales + row.to(tl.int64)[:, None] * (Q // 32) + group[None, :], (power >> 23).to(tl.uint8), mask=some)
                if VALUES:
                    to = _words(q_values) + row.to(tl.int64)[:, None] * (Q // 2) + word[None, :]
                    tl.store(to, tl.reshape(near, [BQ, CQ // 2]), mask=inside)

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
        _await()
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
        source, source_stride, norm, wk, k_norm, turn, rows, m, position, span, start, stop, offset, floor, slot,
        table, table_stride, pending, pending_stride, pool, block_bytes, main_codes, main_scales, index_codes, index_scales, eps,
        R: tl.constexpr, DIM: tl.constexpr, CH: tl.constexpr, INDEX: tl.constexpr, IP: tl.constexpr, PAIRS: tl.constexpr,
        PER_BLOCK: tl.constexpr, BR: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """BR listed rows, in registers, CH channels at a time. The factors of the next AHEAD times CH channels are being read.

        The one row of a span that reads the span's pending token, or its last row where none does, also writes the new pending token, so
        that no other program may come first.
        """
        lane = tl.program_id(0) * BR + tl.arange(0, BR)
        column = tl.arange(0, IP)
        WHOLE: tl.constexpr = DIM % CH == 0
        factors = ()
        FIRST: tl.constexpr = AHEAD * CH if AHEAD * CH < DIM else DIM
        for first in tl.static_range(0, FIRST, CH):
            factors += (_factor_of(wk, column, first + tl.arange(0, CH), INDEX, DIM, WHOLE and INDEX == IP),)
        # Rows that do not count are read like others, and not stored.
        row = tl.load(rows + lane, mask=lane < m, other=-1)
        listed = row >= 0
        row = tl.maximum(row, 0)
        chunks = ()
        if R == 1 and AHEAD == 0:  # the longest way first
            _await()
            chunks = _row(source, row, source_stride, DIM, CH)
        owner = tl.load(span + row)
        live = listed & (owner >= 0)
        owner = tl.maximum(owner, 0)
        place = tl.maximum(tl.load(position + row), 0).to(tl.int32)
        entry = place // R
        done = live & (place % R == R - 1) & (entry >= tl.load(floor + owner) // R)
        block = tl.load(table + owner.to(tl.int64) * table_stride + entry // PER_BLOCK, mask=done, other=0)
        if R == 2:
            begin = tl.load(start + owner)
            last = tl.load(stop + owner) - 1
            home = pending + tl.load(slot + owner).to(tl.int64) * pending_stride
            keeps = live & (place == tl.where(begin % 2 == 1, begin, last)) & (last % 2 == 0)
            from_row = tl.load(offset + owner) + last - begin
        if R == 1 and AHEAD > 0:
            _await()
            chunks = _row(source, row, source_stride, DIM, CH)
        if R == 2:
            _await()
            at = source + row.to(tl.int64) * source_stride
            before = tl.where(place > begin, at - source_stride, home)
            for first in tl.static_range(0, DIM, CH):
                ch = (first + tl.arange(0, CH))[None, :]
                k0 = _load(before[:, None] + ch, ch < DIM, WHOLE)
                g0 = _load(before[:, None] + DIM + ch, ch < DIM, WHOLE)
                k1 = _load(at[:, None] + ch, ch < DIM, WHOLE)
                g1 = _load(at[:, None] + DIM + ch, ch < DIM, WHOLE)
                larger, smaller = _shares(g0 - g1)
                x = tl.where(g0 >= g1, k0, k1) * larger + tl.where(g0 >= g1, k1, k0) * smaller
                even, odd = tl.split(tl.reshape(x, [BR, CH // 2, 2]))
                chunks += (_pair(even, odd),)
            tl.debug_barrier()  # the pending token is read
            for first in tl.static_range(0, DIM, CH):
                ch = first + tl.arange(0, CH)
                inside = keeps[:, None] & (ch < DIM)[None, :]
                at = source + from_row.to(tl.int64)[:, None] * source_stride + ch[None, :]
                before = home[:, None] + ch[None, :]
                tl.store(before, tl.load(at, mask=inside, other=0.0), mask=inside)
                tl.store(before + DIM, tl.load(at + DIM, mask=inside, other=0.0), mask=inside)
        r = _root(_square(chunks), DIM, eps)
        slot_in_block = entry % PER_BLOCK
        base = pool + block.to(tl.int64) * block_bytes
        turn_row = turn + row.to(tl.int64) * (2 * PAIRS)
        acc = tl.zeros([BR, IP], tl.float32)
        for i in tl.static_range(len(chunks)):
            first = i * (CH // 2)
            word = first + tl.arange(0, CH // 2)
            w = _normed(chunks[i], _weights(norm, word, DIM, CH, BR), r)
            if (i + AHEAD) * CH < DIM:
                ch = (i + AHEAD) * CH + tl.arange(0, CH)
                factors += (_factor_of(wk, column, ch, INDEX, DIM, WHOLE and INDEX == IP),)
            acc = tl.dot(_factor(w), tl.trans((_here(factors[i]) if AHEAD > 0 else factors[i]).to(DOT)), acc)
            if first + CH // 2 > DIM // 2 - PAIRS:
                w = _turned(w, turn_row, word - (DIM // 2 - PAIRS), PAIRS, done)
            # Groups of 8 pairs with an E4M3 scale.
            w = tl.reshape(w, [BR, CH // 16, 8])
            top = _largest(w)
            bad = top > 0x7F800000
            byte, inverse = _scale4(tl.maximum(tl.where(bad, 0, top), 0x3C400000))  # 6 / 512
            byte = tl.where(bad, 0x7F, byte).to(tl.uint8)
            inverse, w = tl.broadcast(inverse[:, :, None], w)
            packed = tl.reshape(_fp4(w, inverse), [BR, CH // 2]).to(tl.uint8, bitcast=True)
            at = base + main_codes + slot_in_block * (DIM // 2)
            tl.store(at[:, None] + word[None, :], packed, mask=done[:, None] & (word < DIM // 2)[None, :])
            group = first // 8 + tl.arange(0, CH // 16)
            at = base + main_scales + slot_in_block * (DIM // 16)
            tl.store(at[:, None] + group[None, :], byte, mask=done[:, None] & (group < DIM // 16)[None, :])
        # The index key: bf16 product, norm, rotation, FP4 in groups of 16 pairs with a power-of-two scale.
        even, odd = tl.split(tl.reshape(acc, [BR, IP // 2, 2]))
        w = _pair(even, odd)
        word = tl.arange(0, IP // 2)
        r = _root(tl.sum(tl.fma(_even(w), _even(w), _odd(w) * _odd(w)), 1), INDEX, eps)
        w = _normed(w, _weights(k_norm, word, INDEX, IP, BR), r)
        w = _turned(w, turn_row, word - (INDEX // 2 - PAIRS), PAIRS, done)
        w = tl.reshape(w, [BR, IP // 32, 16])
        top = _largest(w)
        bad = top >= 0x7F800000
        power = tl.maximum(tl.where(bad, 0, top).to(tl.float32, bitcast=True), 7.052966104933725e-38) * (1.0 / 6.0)
        power = (power.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        byte = tl.where(bad, 255, power >> 23).to(tl.uint8)
        inverse, w = tl.broadcast(((254 << 23) - power)[:, :, None], w)
        packed = tl.reshape(_fp4(w, inverse), [BR, IP // 2]).to(tl.uint8, bitcast=True)
        at = base + index_codes + slot_in_block * (INDEX // 2)
        tl.store(at[:, None] + word[None, :], packed, mask=done[:, None] & (word < INDEX // 2)[None, :])
        group = tl.arange(0, IP // 32)
        at = base + index_scales + slot_in_block * (INDEX // 32)
        tl.store(at[:, None] + group[None, :], byte, mask=done[:, None] & (group < INDEX // 32)[None, :])

    return SimpleNamespace(
        turn_table=turn_table, window_store=window_store, keep_window=keep_window, entry_store=entry_store, tl=tl, cdiv=triton.cdiv
    )
