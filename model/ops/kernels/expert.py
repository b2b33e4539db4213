"""The kernels behind `moe_ops.experts`; see `skinny`.

Decoding takes nearly as long as reading does, so instructions count, and so does fetching them: the loop of a product, unrolled to as many
rounds as there are places for them, has fewer instructions and barriers and is slower (seen on an H200). So it is with runs of weights that
are asked for into the L2 cache ahead.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import SimpleNamespace

from forebay.model.ops.kernels import skinny


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, _await, _axis, _barrier, _begin, _bf16, _halves, _ring, _round_fp8, _running, _sigmoid, _spread, _sums, _to, _total
    global _gated, _members, _slots, _along, _used, _finish_up, _up, _down
    found = skinny.load(interpreted)
    tl, jit = found.tl, found.jit
    _await, _axis, _barrier, _begin, _bf16, _halves, _ring, _round_fp8, _running, _sigmoid, _spread, _sums, _to, _total = attrgetter(
        "_await", "_axis", "_barrier", "_begin", "_bf16", "_halves", "_ring", "_round_fp8", "_running", "_sigmoid", "_spread", "_sums",
        "_to", "_total",
    )(found)  # fmt: skip

    @jit
    def _gated(gate, up, w, limit, M: tl.constexpr, N: tl.constexpr, CLAMP: tl.constexpr, EXACT: tl.constexpr):
        """SwiGLU of two products [M, N], times w [1, N], FP8-rounded for the second linear."""
        a = _bf16(gate, EXACT)
        b = _bf16(up, EXACT)
        if CLAMP:
            a = tl.where(a > limit, limit, a)
            b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
        y = tl.reshape(_bf16(w * (a * _sigmoid(a) * b), EXACT), [M // 32, 32, N])
        q, bits = _round_fp8(y, tl.expand_dims(tl.max(tl.abs(y), 1), 1))
        return tl.reshape(q * bits.to(tl.float32, bitcast=True), [M, N])

    @jit
    def _members(
        indices, mine, count, AP: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr, LIST: tl.constexpr, HIT: tl.constexpr
    ):  # fmt: skip
        """The expert of program `mine`, which of all assignments are its, their ranks, their number: 0 if it has no work.

        EACH: `mine` is an expert, else an assignment, whose expert is done with by the first assignment to it. ONE: there is one row, so no
        expert comes twice; its assignment itself stands for which it is.
        """
        slot = _axis(AP, 0, 2, HIT)
        if EACH:
            expert = mine
        else:
            expert = tl.load(indices + mine)
        if ONE:
            same = mine
            rank = mine
            rows = (expert >= 0).to(tl.int32)
        else:
            same = (tl.load(indices + slot, mask=slot < count, other=-1) == expert).to(tl.int32)
            rows = tl.sum(tl.sum(same, 1), 0)
            rank = _spread(_running(tl.sum(same, 1), LIST), 0, 2, HIT) - 1
            if not EACH:
                earlier = tl.sum(tl.sum(tl.where(slot < mine, same, 0), 1), 0)
                rows = tl.where((expert >= 0) & (earlier == 0), rows, 0)
        return expert, same, rank, rows

    @jit
    def _slots(same, rank, first, rows, AP: tl.constexpr, N: tl.constexpr, ONE: tl.constexpr, HIT: tl.constexpr):
        """The assignments of rank `first` and on; behind the last one, this. ONE: the only one, `same`."""
        if ONE:
            slot = same
        else:
            hit = (same != 0) & (rank == tl.minimum(first + _axis(N, 1, 2, HIT), rows - 1))
            slot = tl.sum(tl.where(hit, _axis(AP, 0, 2, HIT), 0), 0)
        return slot

    @jit
    def _along(slot, N: tl.constexpr, axis: tl.constexpr, rank: tl.constexpr, ONE: tl.constexpr, LAYOUT: tl.constexpr):
        """What `_slots` gives, along an axis."""
        if ONE:
            laid = _axis(N, axis, rank, LAYOUT) * 0 + slot
        else:
            laid = _spread(slot, axis, rank, LAYOUT)
        return laid

    @jit
    def _used(indices, start, n, TOPK: tl.constexpr, N: tl.constexpr, LIST: tl.constexpr):
        """Whether any of N rows is one, and not padding."""
        row = start + _axis(N, 0, 1, LIST)
        return tl.max(tl.load(indices + row * TOPK, mask=row < n, other=-1), 0) >= 0

    @jit
    def _finish_up(
        acc, w, to, live, h, tile, limit,
        I: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CLAMP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr,
        PARTS: tl.constexpr, TOTALS: tl.constexpr,
    ):  # fmt: skip
        gate, up = _halves(_total(_to(acc, PARTS), FAST))
        y = _gated(_to(gate, TOTALS), _to(up, TOTALS), w, limit, M, N, CLAMP, EXACT)
        tl.store(h + (to * I + tile + _axis(M, 0, 2, TOTALS)), _to(y, TOTALS).to(tl.bfloat16), mask=live)

    @jit
    def _up(
        x, packed, scales, same, rank, first, rows, weights, h, tile, limit,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, AP: tl.constexpr, ONE: tl.constexpr, KW: tl.constexpr, M: tl.constexpr,
        C: tl.constexpr, N: tl.constexpr, CLAMP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr,
        INPUTS: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr, TOTALS: tl.constexpr, HIT: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """`expert_up` of N rows of an expert."""
        ring = _ring(STAGES, KW, 2 * M, C)
        _begin(ring, packed, I, 4, D, KW, 2 * M, C, True, STAGES, WEIGHTS)
        slot = _slots(same, rank, first, rows, AP, N, ONE, HIT)
        live = first + _axis(N, 1, 2, TOTALS) < rows
        at = _along(slot, N, 1, 2, ONE, TOTALS)
        w = tl.load(weights + at)
        acc = _sums(
            ring, packed, scales, I, x, _along(slot // TOPK, N, 3, 4, ONE, INPUTS) * (D // 4),
            4, D, KW, 2 * M, C, N, True, STAGES, FAST, WEIGHTS, INPUTS, SUMS,
        )  # fmt: skip
        _finish_up(acc, w, at, live, h, tile, limit, I, M, N, CLAMP, FAST, EXACT, PARTS, TOTALS)

    @jit
    def expert_up(
        x, packed, scales, x2, codes, code_scales, indices, weights, h, count, n, limit,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, AP: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
        N: tl.constexpr, N2: tl.constexpr, N8: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr,
        CLAMP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr, SUMS: tl.constexpr, LIST: tl.constexpr,
        INPUTS: tl.constexpr, PARTS: tl.constexpr, TOTALS: tl.constexpr, HIT: tl.constexpr, INPUTS2: tl.constexpr, PARTS2: tl.constexpr,
        TOTALS2: tl.constexpr, HIT2: tl.constexpr, INPUTS8: tl.constexpr, PARTS8: tl.constexpr, TOTALS8: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """Program (M channels, expert or assignment): all rows of the expert, N at a time; first of all, if SHARED, the shared expert.

        The shared expert does not wait for the router, the kernel before; what makes x is older than that.

        x is int64 [n, D/4] and x2 int32 [n, D/2], the same numbers; packed int16 [E, 2I, D/4] and codes int16 [2I, D/2]: gate rows, then
        up rows. h [count + n, I] bf16, FP8-rounded. Experts of more than N rows take N2 at a time, and the shared one N8.
        """
        tile = tl.program_id(0) * M
        mine = tl.program_id(1) - SHARED
        if mine >= 0:
            _await()
            expert, same, rank, rows = _members(indices, mine, count, AP, ONE, EACH, LIST, HIT)
            if rows > 0:
                packed += (expert.to(tl.int64) * (2 * I) + tile) * (D // 4)
                scales += (expert.to(tl.int64) * (2 * I) + tile) * (D // 32)
                if N2 == N:
                    first = 0
                    while first < rows:
                        _up(
                            x, packed, scales, same, rank, first, rows, weights, h, tile, limit,
                            D, I, TOPK, AP, ONE, KW, M, C, N, CLAMP, FAST, EXACT, WEIGHTS, INPUTS, SUMS, PARTS, TOTALS, HIT, STAGES,
                        )  # fmt: skip
                        first += N
                elif rows <= N:
                    _up(
                        x, packed, scales, same, rank, 0, rows, weights, h, tile, limit,
                        D, I, TOPK, AP, ONE, KW, M, C, N, CLAMP, FAST, EXACT, WEIGHTS, INPUTS, SUMS, PARTS, TOTALS, HIT, STAGES,
                    )  # fmt: skip
                else:
                    same2 = _to(same, HIT2)
                    rank2 = _to(rank, HIT2)
                    first = 0
                    while first < rows:
                        _up(
                            x, packed, scales, same2, rank2, first, rows, weights, h, tile, limit, D, I, TOPK, AP, ONE, KW, M, C, N2,
                            CLAMP, FAST, EXACT, WEIGHTS, INPUTS2, SUMS, PARTS2, TOTALS2, HIT2, STAGES,
                        )  # fmt: skip
                        first += N2
        else:
            codes += tile.to(tl.int64) * (D // 2)
            code_scales += tile // 32 * (D // 32)
            start = 0
            while start < n:
                ring = _ring(STAGES, KW, 2 * M, C)
                _begin(ring, codes, I, 8, D, KW, 2 * M, C, True, STAGES, WEIGHTS)
                source = tl.minimum(start + _axis(N8, 3, 4, INPUTS8), n - 1)
                acc = _sums(
                    ring, codes, code_scales, I, x2, source * (D // 2),
                    8, D, KW, 2 * M, C, N8, True, STAGES, FAST, WEIGHTS, INPUTS8, SUMS,
                )  # fmt: skip
                if start == 0:
                    _await()
                if _used(indices, start, n, TOPK, N8, LIST):
                    to = start + _axis(N8, 1, 2, TOTALS8)
                    _finish_up(acc, 1.0, count + to, to < n, h, tile, limit, I, M, N8, CLAMP, FAST, EXACT, PARTS8, TOTALS8)
                start += N8

    @jit
    def _down(
        ring, h, packed, scales, same, rank, first, rows, parts, tile,
        D: tl.constexpr, I: tl.constexpr, AP: tl.constexpr, ONE: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
        N: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr,
        PARTS: tl.constexpr, TOTALS: tl.constexpr, HIT: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """`expert_down` of N rows of an expert."""
        slot = _slots(same, rank, first, rows, AP, N, ONE, HIT)
        acc = _sums(
            ring, packed, scales, 0, h, _along(slot, N, 3, 4, ONE, INPUTS) * (I // 4),
            4, I, KW, M, C, N, False, STAGES, FAST, WEIGHTS, INPUTS, SUMS,
        )  # fmt: skip
        y = _bf16(_to(_total(_to(acc, PARTS), FAST), TOTALS), EXACT).to(tl.bfloat16)
        live = first + _axis(N, 1, 2, TOTALS) < rows
        tl.store(parts + (_along(slot, N, 1, 2, ONE, TOTALS) * D + tile + _axis(M, 0, 2, TOTALS)), y, mask=live)

    @jit
    def expert_down(
        h, packed, scales, h2, codes, code_scales, indices, parts, arrived, out, count, n,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, AP: tl.constexpr, KW: tl.constexpr, M: tl.constexpr,
        C: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, M8: tl.constexpr, C8: tl.constexpr, N8: tl.constexpr, TR: tl.constexpr,
        SHARED: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr,
        SUMS: tl.constexpr, LIST: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, TOTALS: tl.constexpr, HIT: tl.constexpr,
        INPUTS2: tl.constexpr, PARTS2: tl.constexpr, TOTALS2: tl.constexpr, HIT2: tl.constexpr, WEIGHTS8: tl.constexpr,
        INPUTS8: tl.constexpr, PARTS8: tl.constexpr, TOTALS8: tl.constexpr, TABLE: tl.constexpr, PICKED: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """As `expert_up`, into parts [count + n, D] bf16; the last program to arrive at a run of channels sums them for all rows, in
        ascending order of the experts, the shared expert's after them. TABLE is [TR, M], PICKED [TR, KP].

        M / M8 programs share the shared expert's M channels, so that they read as much as the others. The router is older than the
        kernel before, which makes h.
        """
        EIGHT: tl.constexpr = SHARED * (M // M8)
        tile = tl.program_id(0) * M
        mine = tl.program_id(1) - EIGHT
        if mine >= 0:
            expert, same, rank, rows = _members(indices, mine, count, AP, ONE, EACH, LIST, HIT)
            ring = _ring(STAGES, KW, M, C)
            if rows > 0:
                packed += (expert.to(tl.int64) * D + tile) * (I // 4)
                scales += (expert.to(tl.int64) * D + tile) * (I // 32)
                _begin(ring, packed, 0, 4, I, KW, M, C, False, STAGES, WEIGHTS)
            _await()
            if N2 == N:
                first = 0
                while first < rows:
                    if first > 0:
                        _begin(ring, packed, 0, 4, I, KW, M, C, False, STAGES, WEIGHTS)
                    _down(
                        ring, h, packed, scales, same, rank, first, rows, parts, tile,
                        D, I, AP, ONE, KW, M, C, N, FAST, EXACT, WEIGHTS, INPUTS, SUMS, PARTS, TOTALS, HIT, STAGES,
                    )  # fmt: skip
                    first += N
            elif rows <= N:
                if rows > 0:
                    _down(
                        ring, h, packed, scales, same, rank, 0, rows, parts, tile,
                        D, I, AP, ONE, KW, M, C, N, FAST, EXACT, WEIGHTS, INPUTS, SUMS, PARTS, TOTALS, HIT, STAGES,
                    )  # fmt: skip
            else:
                same2 = _to(same, HIT2)
                rank2 = _to(rank, HIT2)
                first = 0
                while first < rows:
                    if first > 0:
                        _begin(ring, packed, 0, 4, I, KW, M, C, False, STAGES, WEIGHTS)
                    _down(
                        ring, h, packed, scales, same2, rank2, first, rows, parts, tile,
                        D, I, AP, ONE, KW, M, C, N2, FAST, EXACT, WEIGHTS, INPUTS2, SUMS, PARTS2, TOTALS2, HIT2, STAGES,
                    )  # fmt: skip
                    first += N2
        else:
            ring8 = _ring(STAGES, KW, M8, C8)
            eighth = tile + tl.program_id(1) * M8
            codes += eighth.to(tl.int64) * (I // 2)
            code_scales += eighth // 32 * (I // 32)
            _begin(ring8, codes, 0, 8, I, KW, M8, C8, False, STAGES, WEIGHTS8)
            _await()
            start = 0
            while start < n:
                if start > 0:
                    _begin(ring8, codes, 0, 8, I, KW, M8, C8, False, STAGES, WEIGHTS8)
                source = count + tl.minimum(start + _axis(N8, 3, 4, INPUTS8), n - 1)
                acc = _sums(
                    ring8, codes, code_scales, 0, h2, source * (I // 2),
                    8, I, KW, M8, C8, N8, False, STAGES, FAST, WEIGHTS8, INPUTS8, SUMS,
                )  # fmt: skip
                if _used(indices, start, n, TOPK, N8, LIST):
                    to = start + _axis(N8, 1, 2, TOTALS8)
                    y = _bf16(_to(_total(_to(acc, PARTS8), FAST), TOTALS8), EXACT).to(tl.bfloat16)
                    tl.store(parts + ((count + to) * D + eighth + _axis(M8, 0, 2, TOTALS8)), y, mask=to < n)
                start += N8
        _barrier()
        meeting = arrived + tl.program_id(0)
        if tl.atomic_add(meeting, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            tl.store(meeting, 0)  # for the next launch
            _barrier()
            k = _axis(KP, 1, 2, PICKED)
            r = 0
            while r < n:
                prow = r + _axis(TR, 0, 2, PICKED)
                trow = r + _axis(TR, 0, 2, TABLE)
                column = tile + _axis(M, 1, 2, TABLE)
                e = tl.load(indices + prow * TOPK + k, mask=(prow < n) & (k < TOPK), other=1 << 30)
                active = (trow < n) & (column < D) & (_spread(tl.min(e, 1), 0, 2, TABLE) >= 0)
                total = tl.zeros_like((trow + column).to(tl.float32))
                for _ in tl.static_range(TOPK):
                    least = tl.expand_dims(tl.min(e, 1), 1)
                    place = tl.sum(tl.where(e == least, k, 0), 1)
                    e = tl.where(e == least, (1 << 30) + 1, e)
                    from_ = parts + (trow * TOPK + _spread(place, 0, 2, TABLE)) * D + column
                    total += tl.load(from_, mask=active, other=0.0, cache_modifier=".cg").to(tl.float32)
                if SHARED:
                    from_ = parts + (count + trow) * D + column
                    total += tl.load(from_, mask=active, other=0.0, cache_modifier=".cg").to(tl.float32)
                tl.store(out + trow * D + column, _bf16(total, EXACT).to(tl.bfloat16), mask=(trow < n) & (column < D))
                r += TR

    return SimpleNamespace(expert_up=expert_up, expert_down=expert_down)
