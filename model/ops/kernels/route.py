"""The Triton kernel behind `moe_ops.route`; see `skinny`."""

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
    global tl, _await, _axis, _barrier, _dot, _plain, _spread, _total, _zeros
    global _gate, _round
    found = skinny.load(interpreted)
    tl, jit = found.tl, found.jit
    _await, _axis, _barrier, _dot, _plain, _spread, _total, _zeros = attrgetter(
        "_await", "_axis", "_barrier", "_dot", "_plain", "_spread", "_total", "_zeros",
    )(found)  # fmt: skip

    @jit
    def _gate(gate, expert, adim, D: tl.constexpr, E: tl.constexpr):
        return tl.load(gate + expert * D + adim, mask=(expert < E) & (adim < D), other=0.0)

    @jit
    def _round(
        acc, a, x, row, bdim, n,
        D: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr,
    ):  # fmt: skip
        b = tl.load(x + row.to(tl.int64) * D + bdim, mask=(row < n) & (bdim < D), other=0.0)
        return _dot(acc, _plain(a), _plain(b), KW, M, C, N, SUMS)

    @jit
    def route(
        x, gate, bias, bias_image, image, position, partial, arrived, indices, weights, n, temperature, factor,
        D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, KW: tl.constexpr, M: tl.constexpr,
        C: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, TR: tl.constexpr, MASKED: tl.constexpr,
        PADDED: tl.constexpr, NORMALISE: tl.constexpr, WEIGHTS: tl.constexpr, INPUTS: tl.constexpr, SUMS: tl.constexpr,
        TOTALS: tl.constexpr, TABLE: tl.constexpr, PICKED: tl.constexpr, HELPERS: tl.constexpr,
    ):  # fmt: skip
        """Program (N rows, M experts, CHUNK channels): a part of the logits. partial [SPLITS, n, E] fp32.

        The last HELPERS programs of the rows to have theirs wait for each other and choose for a share of the rows each. arrived: two
        counters for N rows.

        TABLE is [TR, EP], a row in a warp; PICKED [TR, KP].
        """
        block = tl.program_id(0)
        tile = tl.program_id(1)
        split = tl.program_id(2)
        aexpert = tile * M + _axis(M, 1, 4, WEIGHTS)
        adim = split * CHUNK + (_axis(KW, 0, 4, WEIGHTS) * C + _axis(C, 2, 4, WEIGHTS)) * 8 + _axis(8, 3, 4, WEIGHTS)
        brow = block * N + _axis(N, 3, 4, INPUTS)
        bdim = split * CHUNK + (_axis(KW, 0, 4, INPUTS) * C + _axis(C, 1, 4, INPUTS)) * 8 + _axis(8, 2, 4, INPUTS)
        # The weights of the first round, or of all few, are on their way before the rows are there.
        STEP: tl.constexpr = KW * C * 8
        a = _gate(gate, aexpert, adim, D, E)
        acc = _zeros(KW, M, N, SUMS)
        _await()
        for at in range(STEP, CHUNK, STEP):
            next_a = _gate(gate, aexpert, adim + at, D, E)
            acc = _round(acc, a, x, brow, bdim + (at - STEP), n, D, KW, M, C, N, SUMS)
            a = next_a
        acc = _round(acc, a, x, brow, bdim + (CHUNK - STEP), n, D, KW, M, C, N, SUMS)
        y = _total(acc, False)
        expert = tile * M + _axis(M, 0, 2, TOTALS)
        row = block * N + _axis(N, 1, 2, TOTALS)
        tl.store(partial + (split * n + row) * E + expert, y, mask=(row < n) & (expert < E))
        _barrier()
        all_of = tl.num_programs(1) * SPLITS
        place = tl.atomic_add(arrived + 2 * block, 1, sem="acq_rel")
        if place >= all_of - HELPERS:
            seen = place + 1
            while seen < all_of:  # those that this waits for are among the last too, so they run or will
                seen = tl.atomic_add(arrived + 2 * block, 0, sem="acq_rel")
            _barrier()
            every = _axis(EP, 1, 2, TABLE)
            pick = _axis(KP, 1, 2, PICKED)
            real = every < E
            lean = tl.load(bias + every, mask=real, other=0.0)
            if MASKED:
                other = tl.load(bias_image + every, mask=real, other=0.0)
            first = block * N + (place - (all_of - HELPERS)) * (N // HELPERS)
            end = tl.minimum(first + N // HELPERS, n)
            while first < end:
                trow = first + _axis(TR, 0, 2, TABLE)
                logit = tl.zeros_like(every.to(tl.float32) + trow.to(tl.float32))
                for s in tl.static_range(SPLITS):
                    logit += tl.load(partial + (s * n + trow) * E + every, mask=(trow < n) & real, other=0.0, cache_modifier=".cg")
                logit = logit / temperature
                # log1p(t) as log(u) * t / (u - 1) with u = 1 + t rounded: no builtin has it
                t = tl.exp(-tl.abs(logit))
                u = 1.0 + t
                tail = tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
                score = tl.sqrt(tl.maximum(logit, 0.0) + tail)
                ranked = score + lean
                if MASKED:
                    ranked = score + tl.where(tl.load(image + trow, mask=trow < n, other=0) != 0, other, lean)
                ranked = tl.where(real & (ranked == ranked), ranked, float("-inf"))  # a NaN loses; its row has NaN logits in the end
                # a key's high half orders as the number does, its low half has lower experts above
                bits = (ranked + 0.0).to(tl.int32, bitcast=True)
                key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (EP - 1 - every).to(tl.int64)
                prow = first + _axis(TR, 0, 2, PICKED)
                chosen = pick * 0 + prow * 0 - 1
                weight = chosen.to(tl.float32) * 0.0
                for k in tl.static_range(TOPK):
                    best = tl.max(key, 1)
                    index = EP - 1 - (best & 0xFFFFFFFF).to(tl.int32)
                    mine = every == tl.expand_dims(index, 1)
                    w = tl.sum(tl.where(mine, score, 0.0), 1)
                    key = tl.where(mine, -9223372036854775807, key)
                    chosen = tl.where(pick == k, _spread(index, 0, 2, PICKED), chosen)
                    weight = tl.where(pick == k, _spread(w, 0, 2, PICKED), weight)
                if NORMALISE:
                    weight = weight * ((1.0 / (tl.expand_dims(tl.sum(weight, 1), 1) + 1e-20)) * factor)
                else:
                    weight = weight * factor
                if PADDED:
                    active = tl.load(position + prow, mask=prow < n, other=-1) >= 0
                    chosen = tl.where(active, chosen, -1)
                    weight = tl.where(active, weight, 0.0)
                inside = (pick < TOPK) & (prow < n)
                tl.store(indices + prow * TOPK + pick, chosen, mask=inside)
                tl.store(weights + prow * TOPK + pick, weight, mask=inside)
                first += TR
            if tl.atomic_add(arrived + 2 * block + 1, 1, sem="acq_rel") == HELPERS - 1:  # for the next launch
                tl.store(arrived + 2 * block, 0)
                tl.store(arrived + 2 * block + 1, 0)

    return SimpleNamespace(route=route)
