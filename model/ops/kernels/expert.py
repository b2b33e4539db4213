"""The Triton kernels behind `moe_ops.experts`; see `skinny`."""

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
    global tl, _axis, _barrier, _begin, _bf16, _ring, _round_fp8, _running, _sigmoid, _spread, _sums, _to, _total
    global _gated, _members
    found = skinny.load(interpreted)
    tl, jit = found.tl, found.jit
    _axis, _barrier, _begin, _bf16, _ring, _round_fp8, _running, _sigmoid, _spread, _sums, _to, _total = attrgetter(
        "_axis", "_barrier", "_begin", "_bf16", "_ring", "_round_fp8", "_running", "_sigmoid", "_spread", "_sums",
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
        """The expert of program `mine`, whether the program has work, which of all assignments are its, their ranks, how many there are.

        EACH: `mine` is an expert, else an assignment, whose expert is done with by the first assignment to it. ONE: no expert comes twice.
        """
        slot = _axis(AP, 0, 2, HIT)
        if EACH:
            expert = mine
        else:
            expert = tl.load(indices + mine)
        if ONE:
            same = (slot == mine).to(tl.int32)
            rank = slot * 0
            rows = 1
            go = expert >= 0
        else:
            same = (tl.load(indices + slot, mask=slot < count, other=-1) == expert).to(tl.int32)
            rows = tl.sum(tl.sum(same, 1), 0)
            rank = _spread(_running(tl.sum(same, 1), LIST), 0, 2, HIT) - 1
            if EACH:
                go = rows > 0
            else:
                go = (expert >= 0) & (tl.sum(tl.sum(tl.where(slot < mine, same, 0), 1), 0) == 0)
        return expert, go, same != 0, rank, rows

    @jit
    def expert_up(
        x, packed, scales, x2, codes, code_scales, indices, weights, h, count, n, limit,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, AP: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
        N: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr, CLAMP: tl.constexpr, FAST: tl.constexpr,
        EXACT: tl.constexpr, WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr, LIST: tl.constexpr,
        HIT: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Program (M channels, expert or assignment): all rows of the expert, N at a time; first of all, if SHARED, the shared expert.

        x is int64 [n, D/4] and x2 int32 [n, D/2], the same numbers; packed int16 [E, 2I, D/4] and codes int16 [2I, D/2]: gate rows, then
        up rows. h [count + n, I] bf16, FP8-rounded.
        """
        tile = tl.program_id(0) * M
        mine = tl.program_id(1) - SHARED
        if mine >= 0:
            expert, go, same, rank, rows = _members(indices, mine, count, AP, ONE, EACH, LIST, HIT)
            if go:
                packed += (expert.to(tl.int64) * (2 * I) + tile) * (D // 4)
                scales += (expert.to(tl.int64) * (2 * I) + tile) * (D // 32)
                ring = _ring(STAGES * 2, KW, M, C)
                first = 0
                while first < rows:
                    _begin(ring, packed, I, 4, D, KW, M, C, True, STAGES, WEIGHTS)
                    hit = same & (rank == first + _axis(N, 1, 2, HIT))
                    slot = tl.sum(tl.where(hit, _axis(AP, 0, 2, HIT), 0), 0)
                    there = first + _axis(N, 3, 4, INPUTS) < rows
                    offset = _spread(slot // TOPK, 3, 4, INPUTS) * (D // 4)
                    live = first + _axis(N, 1, 2, TOTALS) < rows
                    at = _spread(slot, 1, 2, TOTALS)
                    w = tl.load(weights + at, mask=live, other=0.0)
                    gate, up = _sums(
                        ring, packed, scales, I, x, offset, there,
                        4, D, KW, M, C, N, True, STAGES, FAST, WEIGHTS, INPUTS, SUMS,
                    )  # fmt: skip
                    y = _gated(_total(gate, FAST), _total(up, FAST), w, limit, M, N, CLAMP, EXACT)
                    channel = tile + _axis(M, 0, 2, TOTALS)
                    tl.store(h + at * I + channel, _to(y, TOTALS).to(tl.bfloat16), mask=live & (channel < I))
                    first += N
        else:
            ring = _ring(STAGES * 2, KW, M, C)
            channel = tile + _axis(M, 0, 2, TOTALS)
            row8 = codes + tile.to(tl.int64) * (D // 2)
            start = 0
            while start < n:
                used = tl.load(indices + (start + _axis(N, 0, 1, LIST)) * TOPK, mask=start + _axis(N, 0, 1, LIST) < n, other=-1)
                if tl.max(used, 0) >= 0:
                    source = start + _axis(N, 3, 4, INPUTS)
                    _begin(ring, row8, I, 8, D, KW, M, C, True, STAGES, WEIGHTS)
                    gate, up = _sums(
                        ring, row8, code_scales + tile // 32 * (D // 32), I, x2, source * (D // 2), source < n,
                        8, D, KW, M, C, N, True, STAGES, FAST, WEIGHTS, INPUTS, SUMS,
                    )  # fmt: skip
                    to = start + _axis(N, 1, 2, TOTALS)
                    z = _gated(_total(gate, FAST), _total(up, FAST), 1.0, limit, M, N, CLAMP, EXACT)
                    tl.store(h + (count + to) * I + channel, _to(z, TOTALS).to(tl.bfloat16), mask=(to < n) & (channel < I))
                start += N

    @jit
    def expert_down(
        h, packed, scales, h2, codes, code_scales, indices, parts, arrived, out, count, n,
        D: tl.constexpr, I: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, AP: tl.constexpr, KW: tl.constexpr, M: tl.constexpr,
        C: tl.constexpr, N: tl.constexpr, TR: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr,
        FAST: tl.constexpr, EXACT: tl.constexpr, WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr, TOTALS: tl.constexpr,
        LIST: tl.constexpr, HIT: tl.constexpr, TABLE: tl.constexpr, PICKED: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """As `expert_up`, into parts [count + n, D] bf16; the last program to arrive at a run of channels sums them for all rows, in
        ascending order of the experts, the shared expert's after them. TABLE is [TR, M], PICKED [TR, KP]."""
        tile = tl.program_id(0) * M
        mine = tl.program_id(1) - SHARED
        if mine >= 0:
            expert, go, same, rank, rows = _members(indices, mine, count, AP, ONE, EACH, LIST, HIT)
            if go:
                packed += (expert.to(tl.int64) * D + tile) * (I // 4)
                scales += (expert.to(tl.int64) * D + tile) * (I // 32)
                ring = _ring(STAGES, KW, M, C)
                first = 0
                while first < rows:
                    _begin(ring, packed, 0, 4, I, KW, M, C, False, STAGES, WEIGHTS)
                    hit = same & (rank == first + _axis(N, 1, 2, HIT))
                    slot = tl.sum(tl.where(hit, _axis(AP, 0, 2, HIT), 0), 0)
                    there = first + _axis(N, 3, 4, INPUTS) < rows
                    offset = _spread(slot, 3, 4, INPUTS) * (I // 4)
                    live = first + _axis(N, 1, 2, TOTALS) < rows
                    at = _spread(slot, 1, 2, TOTALS)
                    acc, _ = _sums(
                        ring, packed, scales, 0, h, offset, there,
                        4, I, KW, M, C, N, False, STAGES, FAST, WEIGHTS, INPUTS, SUMS,
                    )  # fmt: skip
                    channel = tile + _axis(M, 0, 2, TOTALS)
                    tl.store(parts + at * D + channel, _bf16(_total(acc, FAST), EXACT).to(tl.bfloat16), mask=live & (channel < D))
                    first += N
        else:
            ring = _ring(STAGES, KW, M, C)
            channel = tile + _axis(M, 0, 2, TOTALS)
            row8 = codes + tile.to(tl.int64) * (I // 2)
            start = 0
            while start < n:
                used = tl.load(indices + (start + _axis(N, 0, 1, LIST)) * TOPK, mask=start + _axis(N, 0, 1, LIST) < n, other=-1)
                if tl.max(used, 0) >= 0:
                    source = start + _axis(N, 3, 4, INPUTS)
                    _begin(ring, row8, 0, 8, I, KW, M, C, False, STAGES, WEIGHTS)
                    acc, _ = _sums(
                        ring, row8, code_scales + tile // 32 * (I // 32), 0, h2, (count + source) * (I // 2), source < n,
                        8, I, KW, M, C, N, False, STAGES, FAST, WEIGHTS, INPUTS, SUMS,
                    )  # fmt: skip
                    to = start + _axis(N, 1, 2, TOTALS)
                    total = _bf16(_total(acc, FAST), EXACT).to(tl.bfloat16)
                    tl.store(parts + (count + to) * D + channel, total, mask=(to < n) & (channel < D))
                start += N
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
