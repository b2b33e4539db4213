"""The Triton kernel of the mHC step behind `streams_ops`: the residual streams between two sub-layers (see `rounding` for its form).

`EXACT` is set in Triton's interpreter, where a store to bf16 cuts off instead of rounding and loops to a bound known only at run time
fail.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import coefficients, dependent, mixing, rounding


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernel and what it is made of by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, triton, _bf16, _round_fp8, _fp8_codes, _sigmoid, _matrix, _coefficients, _await
    global _pin, _cut, _product, _mixed, _weights, _interleaved, _projection, _stored, _tile, _normed, _ended
    import triton
    import triton.language as tl

    found = rounding.load(interpreted)
    _bf16, _round_fp8, _fp8_codes, _sigmoid = found._bf16, found._round_fp8, found._fp8_codes, found._sigmoid
    found = coefficients.load(interpreted)
    _matrix, _coefficients = found._matrix, found._coefficients
    found = mixing.load(interpreted)
    _pin, _cut, _product, _mixed, _weights = found._pin, found._cut, found._product, found._mixed, found._weights
    _interleaved, _projection, _stored = found._interleaved, found._projection, found._stored
    _await = dependent.load(interpreted)._await

    @triton.jit
    def _tile(
        start, streams, y, source, long, live, w, q0, q1, q2, q3, p0, p1, p2, p3, acc, wide, squares, inside,
        S: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
        FIRST: tl.constexpr, MIX: tl.constexpr, PROJECT: tl.constexpr, COLLAPSE: tl.constexpr, NORM: tl.constexpr,
        PARTS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """BD columns of BR rows: the new streams (bf16) and the collapsed input, with the sums carried on."""
        r = tl.arange(0, BR)
        dim = start + tl.arange(0, BD)
        mask = live[:, None] & (dim < D)[None, :]
        at = r[:, None] * (S * D) + dim[None, :]
        flat = r[:, None] * D + dim[None, :]
        if FIRST:
            x0 = tl.load(y + source.to(tl.int64)[:, None] * D + dim[None, :], mask=mask, other=0.0).to(tl.float32)
            x1 = x0
            x2 = x0
            x3 = x0
            o = x0
        else:
            old = streams + long * (S * D) + at
            x0 = tl.load(old, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x1 = tl.load(old + D, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x2 = x0
            x3 = x0
            if S == 4:
                x2 = tl.load(old + 2 * D, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                x3 = tl.load(old + 3 * D, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            o = x0
            if MIX:
                o = tl.load(y + long * D + flat, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if MIX:
            t0 = _mixed(x0, x1, x2, x3, o, q0, S)
            t1 = _mixed(x0, x1, x2, x3, o, q1, S)
            if S == 4:
                t2 = _mixed(x0, x1, x2, x3, o, q2, S)
                x3 = _mixed(x0, x1, x2, x3, o, q3, S)
                x2 = t2
            x0 = t0
            x1 = t1
        b0 = _pin(_bf16(x0, EXACT).to(tl.bfloat16), EXACT)
        b1 = _pin(_bf16(x1, EXACT).to(tl.bfloat16), EXACT)
        b2 = b0
        b3 = b0
        if S == 4:
            b2 = _pin(_bf16(x2, EXACT).to(tl.bfloat16), EXACT)
            b3 = _pin(_bf16(x3, EXACT).to(tl.bfloat16), EXACT)
        x0 = b0.to(tl.float32)
        x1 = b1.to(tl.float32)
        x2 = b2.to(tl.float32)
        x3 = b3.to(tl.float32)
        if PROJECT:
            if BR == 1:
                wide += w[0] * x0 + w[1] * x1
                if S == 4:
                    wide += w[2] * x2 + w[3] * x3
            else:
                if PARTS:
                    high, middle, low = w[0], w[1], w[2]
                else:
                    high, middle, low = _cut(_interleaved(w[0], w[1], w[2], w[3], S))
                acc = _product(_interleaved(b0, b1, b2, b3, S), high, middle, low, acc, EXACT)
            square = x0 * x0 + x1 * x1
            if S == 4:
                square += x2 * x2 + x3 * x3
            squares += tl.sum(square, 1)
        c = x0
        if COLLAPSE:
            if not FIRST:
                c = p0 * x0 + p1 * x1
                if S == 4:
                    c = c + p2 * x2 + p3 * x3
            c = _bf16(c, EXACT)
            if NORM:
                inside += tl.sum(c * c, 1)
        return acc, wide, squares, inside, c, b0, b1, b2, b3

    @triton.jit
    def _normed(
        c, gain, f, start, long, live, x, rounded, codes, scales,
        D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, ROUNDED: tl.constexpr, CODES: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Writes BD columns of the input, c [BR, BD] (bf16 values) times f [BR, 1] times gain [1, BD], and its FP8 rounding."""
        r = tl.arange(0, BR)
        dim = start + tl.arange(0, BD)
        mask = live[:, None] & (dim < D)[None, :]
        flat = r[:, None] * D + dim[None, :]
        c = _bf16(gain * (c * f), EXACT)
        tl.store(x + long * D + flat, c.to(tl.bfloat16), mask=mask)
        if ROUNDED or CODES:
            v = tl.reshape(c, [BR, BD // 32, 32])
            q8, bits = _round_fp8(v, tl.max(tl.abs(v), 2)[:, :, None])
            if ROUNDED:
                q = tl.reshape(q8 * bits.to(tl.float32, bitcast=True), [BR, BD])
                tl.store(rounded + long * D + flat, q.to(tl.bfloat16), mask=mask)
            if CODES:
                tl.store(codes + long * D + flat, tl.reshape(_fp8_codes(q8, v), [BR, BD]), mask=mask)
                group = start // 32 + tl.arange(0, BD // 32)
                few = live[:, None] & (group < D // 32)[None, :]
                to = scales + long * (D // 32) + r[:, None] * (D // 32) + group[None, :]
                tl.store(to, tl.max(bits >> 23, 2).to(tl.uint8), mask=few)

    @triton.jit
    def _ended(
        split, block, long, live, sums, insides, c, gain, factor, offset, norm, x, rounded, codes, scales,
        new_pre, new_post, new_comb, n, eps, hc_eps,
        S: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
        STAGES: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, TR: tl.constexpr, ITERATIONS: tl.constexpr,
        PROJECT: tl.constexpr, NORM: tl.constexpr, HELD: tl.constexpr, ROUNDED: tl.constexpr, CODES: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """What a program does once all sums of its row block are there. HELD: c [BR, BD] is what was collapsed, else it is in `x`."""
        r = tl.arange(0, BR)
        col = tl.arange(0, NP)
        part = tl.arange(0, SP)
        EARLY: tl.constexpr = SP * BR <= 4096  # few enough to wait in registers while the coefficients are made
        if NORM and EARLY:
            every = tl.load(insides + part[:, None] * BR + r[None, :], mask=(part < SPLITS)[:, None], other=0.0, cache_modifier=".cg")
        if PROJECT:
            first = split * TR
            if (first < BR) & (block * BR + first < n):
                tr = first + tl.arange(0, TR)
                row = block * BR + tr
                here = (tr < BR) & (row < n)
                where = (part[None, :] * BR + tr[:, None])[:, :, None] * NP + col[None, None, :]
                there = here[:, None, None] & (part < SPLITS)[None, :, None]
                whole = tl.sum(tl.load(sums + where, mask=there, other=0.0, cache_modifier=".cg"), 1)
                mean = tl.sum(tl.where(col == N, 1.0, 0.0)[None, :] * whole, 1) / (S * D)
                whole = whole * tl.rsqrt(mean + eps)[:, None] * factor[None, :] + offset[None, :]
                _coefficients(whole, row, here, new_pre, new_post, new_comb, hc_eps, S, NP, ITERATIONS, EXACT)
        if NORM:
            if not EARLY:
                every = tl.load(insides + part[:, None] * BR + r[None, :], mask=(part < SPLITS)[:, None], other=0.0, cache_modifier=".cg")
            f = tl.rsqrt(tl.sum(every, 0) / D + eps)[:, None]
            if HELD:
                _normed(c, gain, f, split * CHUNK, long, live, x, rounded, codes, scales, D, BR, BD, ROUNDED, CODES, EXACT)
            else:
                for b in tl.range(0, CHUNK, BD, num_stages=4):
                    start = b * SPLITS + split * BD
                    dim = start + tl.arange(0, BD)
                    mask = live[:, None] & (dim < D)[None, :]
                    t = tl.load(x + long * D + r[:, None] * D + dim[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
                    w = tl.load(norm + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
                    _normed(t, w, f, start, long, live, x, rounded, codes, scales, D, BR, BD, ROUNDED, CODES, EXACT)

    @triton.jit(do_not_specialize=["n", "groups"])  # else a kernel for each way in which they divide by 16
    def step(
        streams, out, y, tokens, post, comb, pre, fn, parts, scale, base, norm, x, rounded, codes, scales,
        new_pre, new_post, new_comb, partial, inner, arrived, n, groups, eps, hc_eps,
        S: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
        STAGES: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, TR: tl.constexpr,
        ITERATIONS: tl.constexpr, FIRST: tl.constexpr, MIX: tl.constexpr, STORE: tl.constexpr, PROJECT: tl.constexpr,
        COLLAPSE: tl.constexpr, NORM: tl.constexpr, ROUNDED: tl.constexpr, CODES: tl.constexpr, PARTS: tl.constexpr,
        EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (group, split): CHUNK columns of every stream, BD at a time, of the row blocks group, group + groups, ...

        It puts the sums of these columns into `partial` [2 * groups, SPLITS, BR, NP] (N raw coefficients, the square of the streams) and
        `inner` [2 * groups, SPLITS, BR] (the square of the collapsed input), waits until the SPLITS programs of its group have done so,
        and then does the norm of its columns and the coefficients of rows split * TR, ... of the block. So all of the grid must be on the
        device at once. `arrived` [groups] grows by 1024 with each meeting. There are two places for sums: whoever writes to one again has
        met, once in between, all who read it. The collapsed input waits in registers where it is one tile, else in `x`.
        In the interpreter, where one program runs after the other, the last of a group does the second part of all.
        """
        split = tl.program_id(0) % SPLITS
        group = tl.program_id(0) // SPLITS
        r = tl.arange(0, BR)
        col = tl.arange(0, NP)
        blocks = (n + BR - 1) // BR
        MEET: tl.constexpr = PROJECT or NORM
        ONE: tl.constexpr = CHUNK == BD
        HELD: tl.constexpr = NORM and ONE and not EXACT
        factor = 0.0
        offset = 0.0
        gain = 0.0
        if PROJECT:  # before anything waits
            factor = tl.load(scale + col, mask=col < N, other=0.0)
            offset = tl.load(base + col, mask=col < N, other=0.0)
        if HELD:
            dim = split * BD + tl.arange(0, BD)
            gain = tl.load(norm + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        if ONE:
            w = _projection(split * CHUNK, fn, parts, S, D, N, NP, BD, PROJECT, PARTS)
        _await()
        if EXACT:
            turns = 1
        else:
            turns = (blocks - group + groups - 1) // groups
        for i in range(turns):
            block = group + i * groups
            place = group * 2 + i % 2
            row = block * BR + r
            live = row < n
            long = (block * BR).to(tl.int64)
            sums = partial + place * (SPLITS * BR * NP)
            insides = inner + place * (SPLITS * BR)
            acc = tl.zeros([BR, NP], tl.float32)
            wide = tl.zeros([NP, BD], tl.float32)
            squares = tl.zeros([BR], tl.float32)
            inside = tl.zeros([BR], tl.float32)
            source = long
            q0 = 0
            q1 = 0
            q2 = 0
            q3 = 0
            p0 = 0
            p1 = 0
            p2 = 0
            p3 = 0
            if FIRST:
                source = tl.load(tokens + row, mask=live, other=0).to(tl.int64)
            if MIX:
                q0 = _weights(post, comb, row, live, 0, S)
                q1 = _weights(post, comb, row, live, 1, S)
                if S == 4:
                    q2 = _weights(post, comb, row, live, 2, S)
                    q3 = _weights(post, comb, row, live, 3, S)
            if COLLAPSE and not FIRST:
                p0 = tl.load(pre + row * S, mask=live, other=0.0)[:, None]
                p1 = tl.load(pre + row * S + 1, mask=live, other=0.0)[:, None]
                if S == 4:
                    p2 = tl.load(pre + row * S + 2, mask=live, other=0.0)[:, None]
                    p3 = tl.load(pre + row * S + 3, mask=live, other=0.0)[:, None]
            if ONE:
                acc, wide, squares, inside, c, b0, b1, b2, b3 = _tile(
                    split * CHUNK, streams, y, source, long, live, w, q0, q1, q2, q3, p0, p1, p2, p3, acc, wide, squares,
                    inside, S, D, BR, BD, FIRST, MIX, PROJECT, COLLAPSE, NORM, PARTS, EXACT,
                )  # fmt: skip
            else:
                c = 0.0
                for b in tl.range(0, CHUNK, BD, num_stages=STAGES):
                    start = b * SPLITS + split * BD
                    dim = start + tl.arange(0, BD)
                    mask = live[:, None] & (dim < D)[None, :]
                    acc, wide, squares, inside, t, b0, b1, b2, b3 = _tile(
                        start, streams, y, source, long, live, _projection(start, fn, parts, S, D, N, NP, BD, PROJECT, PARTS),
                        q0, q1, q2, q3, p0, p1, p2, p3, acc, wide, squares, inside,
                        S, D, BR, BD, FIRST, MIX, PROJECT, COLLAPSE, NORM, PARTS, EXACT,
                    )  # fmt: skip
                    if STORE:
                        _stored(out + long * (S * D) + r[:, None] * (S * D) + dim[None, :], b0, b1, b2, b3, mask, D, S)
                    if COLLAPSE:
                        tl.store(x + long * D + r[:, None] * D + dim[None, :], t.to(tl.bfloat16), mask=mask)
            if PROJECT:
                if BR == 1:
                    acc = tl.sum(wide, 1)[None, :]
                acc += tl.where(col == N, 1.0, 0.0)[None, :] * squares[:, None]
                tl.store(sums + (split * BR + r)[:, None] * NP + col[None, :], acc)
            if NORM:
                tl.store(insides + split * BR + r, inside)
            if MEET and not EXACT:
                tl.debug_barrier()
                mine = 1
                if split == 0:
                    mine = 1024 - (SPLITS - 1)
                seen = tl.atomic_add(arrived + group, mine, sem="acq_rel")
                goal = (seen & -1024) + 1024
                seen += mine
            if ONE:  # nobody waits for these
                dim = split * CHUNK + tl.arange(0, BD)
                mask = live[:, None] & (dim < D)[None, :]
                if STORE:
                    _stored(out + long * (S * D) + r[:, None] * (S * D) + dim[None, :], b0, b1, b2, b3, mask, D, S)
                if COLLAPSE and not HELD:
                    tl.store(x + long * D + r[:, None] * D + dim[None, :], c.to(tl.bfloat16), mask=mask)
            if MEET and EXACT:
                if split == SPLITS - 1:
                    for s in range(SPLITS):
                        _ended(
                            s, block, long, live, sums, insides, c, gain, factor, offset, norm, x, rounded, codes, scales,
                            new_pre, new_post, new_comb, n, eps, hc_eps, S, D, N, NP, BR, BD, CHUNK, STAGES, SPLITS, SP, TR, ITERATIONS,
                            PROJECT, NORM, HELD, ROUNDED, CODES, EXACT,
                        )  # fmt: skip
            elif MEET:
                while seen - goal < 0:
                    seen = tl.atomic_add(arrived + group, 0, sem="acquire")
                tl.debug_barrier()
                _ended(
                    split, block, long, live, sums, insides, c, gain, factor, offset, norm, x, rounded, codes, scales,
                    new_pre, new_post, new_comb, n, eps, hc_eps, S, D, N, NP, BR, BD, CHUNK, STAGES, SPLITS, SP, TR, ITERATIONS,
                    PROJECT, NORM, HELD, ROUNDED, CODES, EXACT,
                )  # fmt: skip

    return SimpleNamespace(step=step, tl=tl, cdiv=triton.cdiv)
