"""Triton kernels of the top-k selection; `select_ops` documents what they compute and wraps them.

Scores are bf16, so 16 bits order them: a key is 0 for -inf and for a score that may not be chosen, and ascends from there to 65,281 of
+inf. NaN counts as +inf, -0 as 0. Before that (a raw key), NaN is above 65,281, and -0 one below the 32,641 of 0.
The kernels see scores as int16. A masked load of these never fills in a negative number: compiled, every other one would be -1.

Of any partition of the columns, the k-th largest of the parts' maxima is reached by k columns at least, so no chosen column is below it.
With several parts for each column that is chosen, little more than k columns reach it unless many are equal: these are written down one
behind the other, and only they are searched for the exact k-th key. Where they are more than fit, the columns are searched themselves.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import dependent


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _await, raw_key, exact_key, reached, tile, part_maxima, pick, larger
    import triton
    import triton.language as tl

    _await = dependent.load(interpreted)._await

    @triton.jit
    def raw_key(scores):
        """Scores as int16 -> raw keys, int32."""
        value = scores.to(tl.int32)
        return ((value ^ ((value >> 15) & 0x7FFF)) + 32641) & 0xFFFF

    @triton.jit
    def exact_key(raw):
        raw = tl.minimum(raw, 65281)
        return tl.where(raw == 32640, 32641, raw)

    @triton.jit
    def reached(key, k, enough, low, high):
        """Of numbers from `low` on, the largest that at least k of the keys reach, all below `high`; or any that k to `enough` reach."""
        low += tl.program_id(0) * 0
        high += tl.program_id(0) * 0
        while high - low > 1:
            a = low + (high - low + 1) // 3
            b = low + (2 * (high - low) + 1) // 3
            both = tl.sum((key >= a).to(tl.int32) + ((key >= b).to(tl.int32) << 16), 0)
            least, most = both >> 16, both & 0xFFFF
            count = tl.where(least >= k, least, most)
            low, high = tl.where(most < k, low, tl.where(least >= k, b, a)), tl.where(most < k, a, tl.where(least >= k, high, b))
            high = tl.where((count >= k) & (count <= enough), low + 1, high)
        return low

    @triton.jit
    def tile(
        scores, runs, begin, length, limit, m,
        GROUPED: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Raw keys and columns [LANES, V] from the `begin`-th of `length` elements on.

        These are the columns in order or, if GROUPED, those of `runs` of WIDTH columns one after another. EARLY: loading does not wait
        for `limit`.
        """
        place = begin + tl.arange(0, LANES) * V
        some = place < length
        first = place
        if GROUPED:
            run = tl.load(runs + place // WIDTH, mask=some, other=-1)
            some = some & (run >= 0)
            first = run * WIDTH + place % WIDTH
        # Within a lane the mask has one value, so that 16 bytes are loaded at a time; single columns are hidden afterwards.
        left = tl.where(some, limit - first, 0)
        inside = tl.arange(0, V)[None, :]
        column = first[:, None] + inside
        there = (first < m if EARLY else left > 0)[:, None]
        if not WHOLE:
            there = there & (column < m)
        raw = raw_key(tl.load(scores + column, mask=there, other=0))
        return tl.where(inside < left[:, None], raw, 0), column

    @triton.jit
    def part_maxima(raw, LANES: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr):
        """Maxima [PARTS] of parts that every row, however short, has elements in as soon as it has PARTS elements."""
        if PARTS < LANES * V:
            raw = tl.max(tl.reshape(raw, [LANES * V // PARTS, PARTS // V, V]), 0)
        return tl.reshape(raw, [PARTS])

    @triton.jit
    def pick(
        scores, runs, blocks, length, limit, m, k, floor, out, short,
        GROUPED: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr, ONCE: tl.constexpr,
        PARTS: tl.constexpr, FLOOR: tl.constexpr, SHORT: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """The k best of `length` elements as `tile` has them, as ascending columns in `out`; a key that all of them reach.

        FLOOR: no chosen key is below `floor`. Else the maxima of PARTS parts say so. ONCE: all elements fit in one tile.
        short: room for SHORT columns. SIZE > 0: column c stands for position blocks[c // SIZE] * SIZE + c % SIZE.
        """
        if ONCE:
            raw, column = tile(scores, runs, 0, length, limit, m, GROUPED, WIDTH, LANES, V, WHOLE, not GROUPED)
        if not FLOOR:
            if ONCE:
                best = part_maxima(raw, LANES, V, PARTS)
            else:
                best = tl.zeros([PARTS], tl.int32)
                for begin in range(0, length, LANES * V):
                    raw, column = tile(scores, runs, begin, length, limit, m, GROUPED, WIDTH, LANES, V, WHOLE, False)
                    best = tl.maximum(best, part_maxima(raw, LANES, V, PARTS))
            floor = reached(exact_key(best), k, k + k // 4, 0, 65282)
        floor = tl.maximum(floor, 1)
        bar = tl.where(floor == 32641, 32640, floor)

        # Elements from the floor on, in order.
        many = tl.program_id(0) * 0
        if ONCE:
            high = (raw >= bar).to(tl.int32)
            lane = tl.sum(high, 1)
            at = (tl.cumsum(lane, 0) - lane)[:, None] + tl.cumsum(high, 1) - 1
            tl.store(short + at, column, mask=(high > 0) & (at < SHORT))
            many += tl.sum(lane, 0)
        else:
            for begin in range(0, length, LANES * V):
                raw, column = tile(scores, runs, begin, length, limit, m, GROUPED, WIDTH, LANES, V, WHOLE, False)
                high = (raw >= bar).to(tl.int32)
                lane = tl.sum(high, 1)
                at = many + (tl.cumsum(lane, 0) - lane)[:, None] + tl.cumsum(high, 1) - 1
                tl.store(short + at, column, mask=(high > 0) & (at < SHORT))
                many += tl.sum(lane, 0)

        # Everything above the k-th key, and of what equals it the lowest columns.
        threshold = floor
        used = tl.program_id(0) * 0
        if many <= SHORT:
            tl.debug_barrier()  # other threads have stored what is read here
            place = tl.arange(0, SHORT)
            column1 = tl.load(short + place, mask=place < many, other=0)
            key1 = exact_key(raw_key(tl.load(scores + column1, mask=place < many, other=0)))
            key1 = tl.where(place < many, key1, 0)
            threshold = reached(key1, k, k, floor, tl.max(key1, 0) + 1)
            more = key1 > threshold
            same = key1 == threshold
            both = more.to(tl.int32) + (same.to(tl.int32) << 16)
            total = tl.sum(both, 0)
            over = total & 0xFFFF
            room = tl.minimum(k - over, total >> 16)
            before = tl.cumsum(both, 0)
            tied = before >> 16
            taken = more | (same & (tied <= room))
            if SIZE > 0:
                column1 = tl.load(blocks + column1 // SIZE, mask=taken, other=0) * SIZE + column1 % SIZE
            tl.store(out + (before & 0xFFFF) + tl.minimum(tied, room) - 1, column1, mask=taken)
            used += over + room
        else:
            high2 = tl.program_id(0) * 0 + 65282
            while high2 - threshold > 1:
                middle = (threshold + high2) // 2
                count = tl.program_id(0) * 0
                for begin in range(0, length, LANES * V):
                    raw2, column2 = tile(scores, runs, begin, length, limit, m, GROUPED, WIDTH, LANES, V, WHOLE, False)
                    count += tl.sum(tl.sum((exact_key(raw2) >= middle).to(tl.int32), 1), 0)
                threshold = tl.where(count >= k, middle, threshold)
                high2 = tl.where(count >= k, high2, middle)
                high2 = tl.where(count == k, middle + 1, high2)
            over2 = tl.program_id(0) * 0
            for begin in range(0, length, LANES * V):
                raw2, column2 = tile(scores, runs, begin, length, limit, m, GROUPED, WIDTH, LANES, V, WHOLE, False)
                over2 += tl.sum(tl.sum((exact_key(raw2) > threshold).to(tl.int32), 1), 0)
            left = k - over2  # of those that equal the threshold; SHORT or more reach it
            for begin in range(0, length, LANES * V):
                raw2, column2 = tile(scores, runs, begin, length, limit, m, GROUPED, WIDTH, LANES, V, WHOLE, False)
                equal = (exact_key(raw2) == threshold).to(tl.int32)
                lane2 = tl.sum(equal, 1)
                rank = (tl.cumsum(lane2, 0) - lane2)[:, None] + tl.cumsum(equal, 1)
                take = ((exact_key(raw2) > threshold) | ((equal > 0) & (rank <= left))).to(tl.int32)
                taken2 = tl.sum(take, 1)
                at2 = used + (tl.cumsum(taken2, 0) - taken2)[:, None] + tl.cumsum(take, 1) - 1
                if SIZE > 0:
                    column2 = tl.load(blocks + column2 // SIZE, mask=take > 0, other=0) * SIZE + column2 % SIZE
                tl.store(out + at2, column2, mask=take > 0)
                left -= tl.minimum(left, tl.sum(lane2, 0))
                used += tl.sum(taken2, 0)
        rest = tl.arange(0, K)
        tl.store(out + rest, tl.full([K], -1, tl.int32), mask=(rest >= used) & (rest < k))
        return threshold

    @triton.jit
    def larger(a, b):
        """The larger of bf16 numbers given as int16; NaN if one is."""
        return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2)

    @triton.jit
    def maxima(
        scores, visible, out, score_stride, out_stride, m, groups, skip,
        SIZE: tl.constexpr, ROWS: tl.constexpr, VISIBLE: tl.constexpr, PIN: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
        ASM: tl.constexpr,
    ):  # fmt: skip
        """Largest visible score of ROWS runs of SIZE columns; grid (runs / ROWS, n). Nothing for a row that sees `skip` columns or fewer.

        PIN: the run with the newest visible column counts as +inf. WHOLE: m is a multiple of SIZE.
        """
        _await()
        row = tl.program_id(1).to(tl.int64)
        begin = tl.program_id(0) * ROWS
        limit = m
        newest = -1
        if VISIBLE:
            seen = (tl.load(visible + row) + UNIT - 1) // UNIT
            limit = tl.minimum(seen, m)
            newest = (seen - 1) // SIZE
        if (begin * SIZE < limit) & (limit > skip):
            group = begin + tl.arange(0, ROWS)
            if ASM and SIZE >= 8 and (begin + ROWS) * SIZE <= limit:
                lane = begin * (SIZE // 8) + tl.arange(0, ROWS * SIZE // 8)
                part = tl.load(scores + row * score_stride + lane[:, None] * 8 + tl.arange(0, 8)[None, :])
                a, b = tl.split(tl.permute(tl.reshape(part, [ROWS * SIZE // 8, 2, 4]), (0, 2, 1)))
                a, b = tl.split(tl.permute(tl.reshape(larger(a, b), [ROWS * SIZE // 8, 2, 2]), (0, 2, 1)))
                a, b = tl.split(larger(a, b))
                best = tl.max(tl.reshape(tl.maximum(raw_key(a), raw_key(b)), [ROWS, SIZE // 8]), 1)
            else:
                column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
                some = (group * SIZE < limit)[:, None]  # one value a run, as in `tile`
                if not WHOLE:
                    some = some & (column < m)
                raw = raw_key(tl.load(scores + row * score_stride + column, mask=some, other=0))
                best = tl.max(tl.where(column < limit, raw, 0), 1)
            best = tl.minimum(best, 65281)
            if PIN:
                best = tl.where((group == newest) & (newest >= 0), 65281, best)
            best = best - 32641
            best = tl.where(best < -1, best ^ 0x7FFF, tl.maximum(best, 0))
            tl.store(out + row * out_stride + group, best.to(tl.int16), mask=group < groups)

    @triton.jit
    def choose(
        scores, visible, best, groups, short, blocks, out,
        score_stride, best_stride, group_stride, short_stride, block_stride, out_stride, m, k, chosen, whole,
        UNIT: tl.constexpr, VISIBLE: tl.constexpr, LONG: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr,
        LANES: tl.constexpr, ONCE: tl.constexpr, PARTS: tl.constexpr, SHORT: tl.constexpr,
        RUN_WHOLE: tl.constexpr, RUN_ONCE: tl.constexpr, RUN_PARTS: tl.constexpr,
        SIZE: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr,
    ):  # fmt: skip
        """The k best columns of one row, ascending; one program a row.

        LONG: a row that sees more than `whole` columns is not searched whole. Of its runs of WIDTH columns, whose maxima are `best`,
        the `chosen` best have all that can be chosen: these are searched first, and then the columns in them.
        """
        _await()
        row = tl.program_id(0).to(tl.int64)
        scores += row * score_stride
        out += row * out_stride
        short += row * short_stride
        blocks += row * block_stride
        groups += row * group_stride
        limit = m
        few = m < 0
        if VISIBLE:
            limit = tl.minimum((tl.load(visible + row) + UNIT - 1) // UNIT, m)
            few = limit <= k
        if few:
            place = tl.arange(0, K)
            tl.store(out + place, tl.where(place < limit, place, -1), mask=place < k)
        elif LONG:
            if limit > whole:
                runs = (limit + WIDTH - 1) // WIDTH
                floor = pick(
                    best + row * best_stride, groups, groups, runs, runs, (m + WIDTH - 1) // WIDTH, chosen, 0, groups, short,
                    False, 1, LANES * V // 8, 8, RUN_WHOLE, RUN_ONCE, RUN_PARTS, False, SHORT, 0, CHOSEN,
                )  # fmt: skip
                tl.debug_barrier()  # the runs are stored, and other threads read them; `short` is used again
                pick(
                    scores, groups, blocks, chosen * WIDTH, limit, m, k, floor, out, short,
                    True, WIDTH, LANES, V, WHOLE, False, PARTS, True, SHORT, SIZE, K,
                )  # fmt: skip
            else:
                pick(
                    scores, groups, blocks, limit, limit, m, k, 0, out, short,
                    False, 1, LANES, V, WHOLE, False, PARTS, False, SHORT, SIZE, K,
                )  # fmt: skip
        else:
            pick(
                scores, groups, blocks, limit, limit, m, k, 0, out, short,
                False, 1, LANES, V, WHOLE, ONCE, PARTS, False, SHORT, SIZE, K,
            )  # fmt: skip

    return SimpleNamespace(maxima=maxima, choose=choose)
