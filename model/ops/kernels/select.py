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
        scores, visible, out, score_stride, out_stride, m, groups, skip,
        SIZE: tl.constexpr, ROWS: tl.constexpr, VISIBLE: tl.constexpr, PIN: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        """Largest visible score of ROWS runs of SIZE columns; grid (runs / ROWS, n). Nothing for a row that sees `skip` runs or fewer.

        PIN: the run with the newest visible column counts as +inf. WHOLE: m is a multiple of SIZE.
        """
        row = tl.program_id(1).to(tl.int64)
        begin = tl.program_id(0) * ROWS
        limit = m
        newest = -1
        if VISIBLE:
            seen = (tl.load(visible + row) + UNIT - 1) // UNIT
            limit = tl.minimum(seen, m)
            newest = (seen - 1) // SIZE
        if (begin * SIZE < limit) & (limit > skip * SIZE):
            group = begin + tl.arange(0, ROWS)
            column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            # Within a run the mask has one value, so that 16 bytes are loaded at a time; single columns are hidden afterwards.
            some = (group * SIZE < limit)[:, None]
            if not WHOLE:
                some = some & (column < m)
            value = tl.load(scores + row * score_stride + column, mask=some, other=-128).to(tl.int32)
            # Ascending from 0 of -inf to +inf at 65,281 and NaN of either sign above it; -0 is one below +0.
            key = ((value ^ ((value >> 15) & 0x7FFF)) + 32641) & 0xFFFF
            best = tl.minimum(tl.max(tl.where(column < limit, key, 0), 1), 65281)
            if PIN:
                best = tl.where((group == newest) & (newest >= 0), 65281, best)
            best = best - 32641
            best = tl.where(best < -1, best ^ 0x7FFF, tl.maximum(best, 0))
            tl.store(out + row * out_stride + group, best.to(tl.int16), mask=group < groups)

    @triton.jit
    def choose(
        scores, visible, groups, blocks, out, score_stride, group_stride, block_stride, out_stride, m, runs, k,
        UNIT: tl.constexpr, VISIBLE: tl.constexpr, GROUPED: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr, WHOLE: tl.constexpr,
        SIZE: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """The k best columns of one row, ascending; one program a row, which reads each score once and keeps its key in a register.

        The row is `runs` runs of WIDTH columns, at most RUNS; GROUPED: those named in `groups` [n, runs], ascending, -1 at the end.
        SIZE > 0: column c stands for position blocks[c // SIZE] * SIZE + c % SIZE, which is what is stored.
        K, RUNS: powers of two from k and `runs` on, RUNS * WIDTH at most 32,768 (two counts share 32 bits). WHOLE: WIDTH divides m.
        """
        row = tl.program_id(0).to(tl.int64)
        scores += row * score_stride
        out += row * out_stride
        place = tl.arange(0, K)
        limit = m
        few = m < 0
        if VISIBLE:
            limit = tl.minimum((tl.load(visible + row) + UNIT - 1) // UNIT, m)
            few = limit <= k
        if few:
            tl.store(out + place, tl.where(place < limit, place, -1), mask=place < k)
        if few == 0:
            lane = tl.arange(0, RUNS)
            run = lane
            if GROUPED:
                run = tl.load(groups + row * group_stride + lane, mask=lane < runs, other=-1)
            column = run[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            some = ((run >= 0) & (run * WIDTH < limit))[:, None]  # one value a run, as in `maxima`
            if not WHOLE:
                some = some & (column < m)
            bits = tl.load(scores + column, mask=some, other=-128).to(tl.int32) & 0xFFFF
            size = bits & 0x7FFF
            key = tl.where(bits >= 0x8000, 0x8000 - size, 0x8000 + size)
            key = tl.where(size > 0x7F80, 0xFF80, key)
            key = tl.where((bits == 0xFF80) | (column >= limit), 0, key)
            key = tl.reshape(key, [RUNS * WIDTH])

            # The largest key that at least k columns reach; a key that exactly k reach will do, and ends the search.
            threshold = tl.program_id(0) * 0
            bit = threshold + 0x8000
            while bit > 0:
                count = tl.sum((key >= threshold + bit).to(tl.int32), 0)
                threshold += tl.where(count >= k, bit, 0)
                bit = tl.where(count == k, 0, bit >> 1)

            # Everything above the threshold, and of what equals it the lowest columns, by their place among the columns read.
            more = key > threshold
            same = key == tl.where(threshold > 0, threshold, -1)  # 0 is what may not be chosen
            both = more.to(tl.int32) + (same.to(tl.int32) << 16)
            total = tl.sum(both, 0)
            over = total & 0xFFFF
            room = tl.minimum(k - over, (total >> 16) & 0xFFFF)
            before = tl.cumsum(both, 0)
            tied = (before >> 16) & 0xFFFF
            at = (before & 0xFFFF) + tl.minimum(tied, room) - 1
            tl.store(out + at, tl.arange(0, RUNS * WIDTH), mask=more | (same & (tied <= room)))
            found = place < over + room
            if GROUPED or SIZE > 0:
                tl.debug_barrier()  # the places are stored, and other threads read them
                column = tl.load(out + place, mask=found, other=0)
                if GROUPED:
                    column = tl.load(groups + row * group_stride + column // WIDTH, mask=found, other=0) * WIDTH + column % WIDTH
                if SIZE > 0:
                    column = tl.load(blocks + row * block_stride + column // SIZE, mask=found, other=0) * SIZE + column % SIZE
                tl.debug_barrier()  # the same place may be read by several threads
                tl.store(out + place, tl.where(found, column, -1), mask=place < k)
            else:
                tl.store(out + place, tl.full([K], -1, tl.int32), mask=(place < k) & (place >= over + room))

    return SimpleNamespace(maxima=maxima, choose=choose)
