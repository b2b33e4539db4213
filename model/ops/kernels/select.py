"""Triton kernels of the top-k selection; `select_ops` documents what they compute and wraps them.

Scores are bf16, so 16 bits order them: a key is the bit pattern, inverted for negative numbers and with the sign set for others. NaN counts
as +inf, -0 as 0, and a score that may not be chosen (-inf, or hidden) has key 0, below all others.
The kernels see scores as int16, whose -128 is -inf.
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
    def maxima(
        scores, visible, out, score_stride, out_stride, m, groups,
        SIZE: tl.constexpr, ROWS: tl.constexpr, VISIBLE: tl.constexpr, PIN: tl.constexpr, UNIT: tl.constexpr,
    ):  # fmt: skip
        """Largest visible score of ROWS runs of SIZE columns; grid (runs / ROWS, n).

        PIN: the run with the newest visible column counts as +inf.
        """
        row = tl.program_id(1).to(tl.int64)
        group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        limit = m
        newest = -1
        if VISIBLE:
            seen = (tl.load(visible + row) + UNIT - 1) // UNIT
            limit = tl.minimum(seen, m)
            newest = (seen - 1) // SIZE
        column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        bits = tl.load(scores + row * score_stride + column, mask=column < limit, other=-128).to(tl.int32) & 0xFFFF
        size = bits & 0x7FFF
        key = tl.where(bits >= 0x8000, 0x8000 - size, 0x8000 + size)
        key = tl.where(size > 0x7F80, 0xFF80, key)
        best = tl.max(key, 1)
        if PIN:
            best = tl.where((group == newest) & (newest >= 0), 0xFF80, best)
        best = tl.where(best >= 0x8000, best - 0x8000, (0x8000 - best) | 0x8000)
        tl.store(out + row * out_stride + group, best.to(tl.int16), mask=group < groups)

    @triton.jit
    def choose(
        scores, visible, groups, blocks, out, score_stride, group_stride, block_stride, out_stride, m, columns, k,
        UNIT: tl.constexpr, VISIBLE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """The k best columns of one row, ascending; one program a row, the row's scores read nine times (from L1 or L2).

        GROUP > 0: only the columns of the chosen runs `groups` [n, columns / GROUP] of GROUP columns take part.
        SIZE > 0: column c stands for position blocks[c // SIZE] * SIZE + c % SIZE, which is what is stored.
        K: a power of two from k on. BLOCK: columns at a time, at most 32,768 (two counts share 32 bits).
        """
        row = tl.program_id(0).to(tl.int64)
        scores += row * score_stride
        out += row * out_stride
        limit = m
        if VISIBLE:
            limit = tl.minimum((tl.load(visible + row) + UNIT - 1) // UNIT, m)
        end = columns
        if GROUP == 0:
            end = tl.minimum(columns, limit)

        # The largest key that at least k columns reach, two bits a round. `above` is how many reach the next key.
        threshold = tl.program_id(0) * 0
        above = tl.program_id(0) * 0
        for step in tl.static_range(0, 8):
            bit = 1 << (14 - 2 * step)
            low = tl.program_id(0) * 0
            middle = tl.program_id(0) * 0
            high = tl.program_id(0) * 0
            first = tl.program_id(0) * 0
            while first < end:
                place = first + tl.arange(0, BLOCK)
                inside = place < end
                column = place
                if GROUP > 0:
                    run = tl.load(groups + row * group_stride + place // GROUP, mask=inside, other=-1)
                    column = run * GROUP + place % GROUP
                    inside = inside & (run >= 0) & (column < limit)
                bits = tl.load(scores + column, mask=inside, other=-128).to(tl.int32) & 0xFFFF
                size = bits & 0x7FFF
                key = tl.where(bits >= 0x8000, 0x8000 - size, 0x8000 + size)
                key = tl.where(size > 0x7F80, 0xFF80, key)
                key = tl.where(bits == 0xFF80, 0, key)
                both = (key >= threshold + bit).to(tl.int32) + ((key >= threshold + 2 * bit).to(tl.int32) << 16)
                both = tl.sum(both, 0)
                low += both & 0xFFFF
                middle += (both >> 16) & 0xFFFF
                high += tl.sum((key >= threshold + 3 * bit).to(tl.int32), 0)
                first += BLOCK
            above = tl.where(high >= k, above, tl.where(middle >= k, high, tl.where(low >= k, middle, low)))
            threshold += tl.where(high >= k, 3 * bit, tl.where(middle >= k, 2 * bit, tl.where(low >= k, bit, 0)))

        # Everything above the threshold, and of what equals it the lowest columns.
        room = tl.where(threshold > 0, k - above, 0)
        cut = tl.where(threshold > 0, threshold, -1)  # not what may not be chosen
        over = tl.program_id(0) * 0
        equal = tl.program_id(0) * 0
        first = tl.program_id(0) * 0
        while first < end:
            place = first + tl.arange(0, BLOCK)
            inside = place < end
            column = place
            if GROUP > 0:
                run = tl.load(groups + row * group_stride + place // GROUP, mask=inside, other=-1)
                column = run * GROUP + place % GROUP
                inside = inside & (run >= 0) & (column < limit)
            bits = tl.load(scores + column, mask=inside, other=-128).to(tl.int32) & 0xFFFF
            size = bits & 0x7FFF
            key = tl.where(bits >= 0x8000, 0x8000 - size, 0x8000 + size)
            key = tl.where(size > 0x7F80, 0xFF80, key)
            key = tl.where(bits == 0xFF80, 0, key)
            more = key > threshold
            same = key == cut
            both = more.to(tl.int32) + (same.to(tl.int32) << 16)
            before = tl.cumsum(both, 0)
            tied = equal + ((before >> 16) & 0xFFFF)
            take = more | (same & (tied <= room))
            at = over + (before & 0xFFFF) + tl.minimum(tied, room) - 1
            position = column
            if SIZE > 0:
                position = tl.load(blocks + row * block_stride + column // SIZE, mask=take, other=0) * SIZE + column % SIZE
            tl.store(out + at, position, mask=take)
            both = tl.sum(both, 0)
            over += both & 0xFFFF
            equal += (both >> 16) & 0xFFFF
            first += BLOCK
        place = tl.arange(0, K)
        tl.store(out + place, tl.full([K], -1, tl.int32), mask=(place >= over + tl.minimum(equal, room)) & (place < k))

    return SimpleNamespace(maxima=maxima, choose=choose)
