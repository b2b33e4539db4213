"""The Triton kernels behind `streams_ops`: the residual streams between two sub-layers, and the Engram read.

triton is optional, so nothing here exists before `load` is called. `EXACT` is set in Triton's interpreter, where a store to bf16 cuts off
instead of rounding and loops to a bound known only at run time fail. Helpers are globals, since a kernel sees no closures.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, _bf16, _round_fp8, _fp8_codes, _sigmoid, _pin, _cut, _product, _mixed, _weights, _interleaved
    global _shares, _parts, _column, _coefficients, _stored, _tile, _normed, _ended
    import triton
    import triton.language as tl

    @triton.jit
    def _bf16(x, EXACT: tl.constexpr):
        """fp32 -> fp32 that bf16 holds, to nearest even."""
        if EXACT:
            bits = x.to(tl.int32, bitcast=True)
            y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            y = tl.where(x == x, y, x)
        else:
            y = x.to(tl.bfloat16).to(tl.float32)
        return y

    @triton.jit
    def _sigmoid(x):
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def _round_fp8(v, amax):
        """v fp32 in groups whose largest magnitude amax is broadcast to v: (v / scale) rounded to E4M3 values, bits of the scale.

        A number with 3 mantissa bits and least exponent -6 is rounded to multiples of its last place, to even at ties, by adding and taking
        away 1.5 * 2^23: no cast to FP8, which the interpreter gets wrong. NaN stays NaN.
        """
        bits = ((tl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        v = v * ((254 << 23) - bits).to(tl.float32, bitcast=True)
        step = (tl.maximum((v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, 121) - 3) << 23
        q = (v * ((254 << 23) - step).to(tl.float32, bitcast=True) + 12582912.0 - 12582912.0) * step.to(tl.float32, bitcast=True)
        return q, bits

    @triton.jit
    def _fp8_codes(q, v):
        """E4M3 bits of the E4M3 values q, with the sign of v, which q has lost at zero; NaN gives 0x7F."""
        a = tl.abs(q)
        code = tl.where(a < 0.015625, (a * 512.0).to(tl.int32), (a.to(tl.int32, bitcast=True) >> 20) - 960)
        code = tl.where(q == q, code, 0x7F)
        return (code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)

    @triton.jit
    def _pin(x, EXACT: tl.constexpr):
        """x bf16, as something that the compiler does not compute twice: it would redo the whole mix in a second layout for the product."""
        if not EXACT:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
        return x

    @triton.jit
    def _cut(w):
        """w fp32 = high + middle + low, each of 8 bits and so exact in bf16."""
        rest = w - (w.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        least = rest - (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        high = (w.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        middle = (rest.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low = (least.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return high, middle, low

    @triton.jit
    def _product(t, high, middle, low, acc, EXACT: tl.constexpr):
        """acc [BR, NP] + t [BR, K] times the sum of three [NP, K], all bf16: products are exact."""
        if EXACT:
            w = high.to(tl.float32) + middle.to(tl.float32) + low.to(tl.float32)
            acc = tl.dot(t.to(tl.float32), tl.trans(w), acc, input_precision="ieee")
        else:
            acc = tl.dot(t, tl.trans(low), acc)
            acc = tl.dot(t, tl.trans(middle), acc)
            acc = tl.dot(t, tl.trans(high), acc)
        return acc

    @triton.jit
    def _mixed(x0, x1, x2, x3, o, q, S: tl.constexpr):
        """A stream after the sub-layer's output o, fp32: post * o + sum_j comb[j] * x_j, with q = (post, comb[0], ...)."""
        if S == 4:
            t = q[0] * o + (q[1] * x0 + q[2] * x1 + q[3] * x2 + q[4] * x3)
        else:
            t = q[0] * o + (q[1] * x0 + q[2] * x1)
        return t

    @triton.jit
    def _weights(post, comb, row, live, K: tl.constexpr, S: tl.constexpr):
        """What stream K is mixed with: post[K] and comb[j, K], each [BR, 1]."""
        q = comb + row * (S * S) + K
        h = tl.load(post + row * S + K, mask=live, other=0.0)[:, None]
        c0 = tl.load(q, mask=live, other=0.0)[:, None]
        c1 = tl.load(q + S, mask=live, other=0.0)[:, None]
        c2 = c0
        c3 = c0
        if S == 4:
            c2 = tl.load(q + 2 * S, mask=live, other=0.0)[:, None]
            c3 = tl.load(q + 3 * S, mask=live, other=0.0)[:, None]
        return h, c0, c1, c2, c3

    @triton.jit
    def _interleaved(a, b, c, d, S: tl.constexpr):
        """S tensors [R, B] -> [R, B * S], the streams of a column side by side."""
        if S == 4:
            t = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], a.shape[1] * 4])
        else:
            t = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1] * 2])
        return t

    @triton.jit
    def _shares(a, b, c, d, eps, S: tl.constexpr, EXACT: tl.constexpr):
        """Each of S numbers over their sum and eps, which is neither tiny nor huge. The reciprocal is off by one bit at most."""
        if S == 4:
            total = (a + b) + (c + d) + eps
        else:
            total = a + b + eps
        if EXACT:
            r = 1.0 / total
        else:
            r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)
        return a * r, b * r, c * r, d * r

    @triton.jit
    def _parts(a, b, c, d, eps, S: tl.constexpr, EXACT: tl.constexpr):
        """Softmax of S numbers, plus eps."""
        top = tl.maximum(a, b)
        if S == 4:
            top = tl.maximum(top, tl.maximum(c, d))
        a = tl.exp(a - top)
        b = tl.exp(b - top)
        c = tl.exp(c - top)
        d = tl.exp(d - top)
        a, b, c, d = _shares(a, b, c, d, 0.0, S, EXACT)
        return a + eps, b + eps, c + eps, d + eps

    @triton.jit
    def _column(raw, j, NP: tl.constexpr):
        """Column j of raw [R, NP], within a warp."""
        return tl.sum(tl.where(tl.arange(0, NP)[None, :] == j, raw, 0.0), 1)

    @triton.jit
    def _coefficients(
        raw, row, live, new_pre, new_post, new_comb, eps, S: tl.constexpr, NP: tl.constexpr, ITERATIONS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """From raw [R, NP], the projection times scale plus base. The matrix is S * S variables, so that its sums cross no lanes."""
        m00 = _column(raw, 2 * S, NP)
        m01 = _column(raw, 2 * S + 1, NP)
        m10 = _column(raw, 3 * S, NP)
        m11 = _column(raw, 3 * S + 1, NP)
        m02 = m00
        m03 = m00
        m12 = m00
        m13 = m00
        m20 = m00
        m21 = m00
        m22 = m00
        m23 = m00
        m30 = m00
        m31 = m00
        m32 = m00
        m33 = m00
        if S == 4:
            m02 = _column(raw, 10, NP)
            m03 = _column(raw, 11, NP)
            m12 = _column(raw, 14, NP)
            m13 = _column(raw, 15, NP)
            m20 = _column(raw, 16, NP)
            m21 = _column(raw, 17, NP)
            m22 = _column(raw, 18, NP)
            m23 = _column(raw, 19, NP)
            m30 = _column(raw, 20, NP)
            m31 = _column(raw, 21, NP)
            m32 = _column(raw, 22, NP)
            m33 = _column(raw, 23, NP)
        for k in tl.static_range(S):
            gate = _column(raw, k, NP)
            tl.store(new_pre + row * S + k, _sigmoid(gate) + eps, mask=live)
            gate = _column(raw, S + k, NP)
            tl.store(new_post + row * S + k, 2.0 * _sigmoid(gate), mask=live)
        m00, m01, m02, m03 = _parts(m00, m01, m02, m03, eps, S, EXACT)
        m10, m11, m12, m13 = _parts(m10, m11, m12, m13, eps, S, EXACT)
        if S == 4:
            m20, m21, m22, m23 = _parts(m20, m21, m22, m23, eps, S, EXACT)
            m30, m31, m32, m33 = _parts(m30, m31, m32, m33, eps, S, EXACT)
        m00, m10, m20, m30 = _shares(m00, m10, m20, m30, eps, S, EXACT)
        m01, m11, m21, m31 = _shares(m01, m11, m21, m31, eps, S, EXACT)
        if S == 4:
            m02, m12, m22, m32 = _shares(m02, m12, m22, m32, eps, S, EXACT)
            m03, m13, m23, m33 = _shares(m03, m13, m23, m33, eps, S, EXACT)
        for _ in range(1, ITERATIONS):
            m00, m01, m02, m03 = _shares(m00, m01, m02, m03, eps, S, EXACT)
            m10, m11, m12, m13 = _shares(m10, m11, m12, m13, eps, S, EXACT)
            if S == 4:
                m20, m21, m22, m23 = _shares(m20, m21, m22, m23, eps, S, EXACT)
                m30, m31, m32, m33 = _shares(m30, m31, m32, m33, eps, S, EXACT)
            m00, m10, m20, m30 = _shares(m00, m10, m20, m30, eps, S, EXACT)
            m01, m11, m21, m31 = _shares(m01, m11, m21, m31, eps, S, EXACT)
            if S == 4:
                m02, m12, m22, m32 = _shares(m02, m12, m22, m32, eps, S, EXACT)
                m03, m13, m23, m33 = _shares(m03, m13, m23, m33, eps, S, EXACT)
        to = new_comb + row * (S * S)
        tl.store(to, m00, mask=live)
        tl.store(to + 1, m01, mask=live)
        tl.store(to + S, m10, mask=live)
        tl.store(to + S + 1, m11, mask=live)
        if S == 4:
            tl.store(to + 2, m02, mask=live)
            tl.store(to + 3, m03, mask=live)
            tl.store(to + 6, m12, mask=live)
            tl.store(to + 7, m13, mask=live)
            tl.store(to + 8, m20, mask=live)
            tl.store(to + 9, m21, mask=live)
            tl.store(to + 10, m22, mask=live)
            tl.store(to + 11, m23, mask=live)
            tl.store(to + 12, m30, mask=live)
            tl.store(to + 13, m31, mask=live)
            tl.store(to + 14, m32, mask=live)
            tl.store(to + 15, m33, mask=live)

    @triton.jit
    def _stored(out, b0, b1, b2, b3, mask, D: tl.constexpr, S: tl.constexpr):
        tl.store(out, b0, mask=mask, eviction_policy="evict_first")
        tl.store(out + D, b1, mask=mask, eviction_policy="evict_first")
        if S == 4:
            tl.store(out + 2 * D, b2, mask=mask, eviction_policy="evict_first")
            tl.store(out + 3 * D, b3, mask=mask, eviction_policy="evict_first")

    @triton.jit
    def _tile(
        start, streams, y, source, long, live, fn, parts, q0, q1, q2, q3, p0, p1, p2, p3, acc, wide, squares, inside,
        S: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
        FIRST: tl.constexpr, MIX: tl.constexpr, PROJECT: tl.constexpr, COLLAPSE: tl.constexpr, NORM: tl.constexpr,
        PARTS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """BD columns of BR rows: the new streams (bf16) and the collapsed input, with the sums carried on."""
        r = tl.arange(0, BR)
        col = tl.arange(0, NP)
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
        if PROJECT:
            if PARTS:
                k = start * S + tl.arange(0, BD * S)
                there = (col < N)[:, None] & (k < D * S)[None, :]
                place = parts + col[:, None] * (S * D) + k[None, :]
                high = tl.load(place, mask=there, other=0.0)
                middle = tl.load(place + N * S * D, mask=there, other=0.0)
                low = tl.load(place + 2 * N * S * D, mask=there, other=0.0)
            else:
                there = (col < N)[:, None] & (dim < D)[None, :]
                place = fn + col[:, None] * (S * D) + dim[None, :]
                w0 = tl.load(place, mask=there, other=0.0)
                w1 = tl.load(place + D, mask=there, other=0.0)
                w2 = w0
                w3 = w0
                if S == 4:
                    w2 = tl.load(place + 2 * D, mask=there, other=0.0)
                    w3 = tl.load(place + 3 * D, mask=there, other=0.0)
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
                wide += w0 * x0 + w1 * x1
                if S == 4:
                    wide += w2 * x2 + w3 * x3
            else:
                if not PARTS:
                    high, middle, low = _cut(_interleaved(w0, w1, w2, w3, S))
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
                    split * CHUNK, streams, y, source, long, live, fn, parts, q0, q1, q2, q3, p0, p1, p2, p3, acc, wide, squares,
                    inside, S, D, N, NP, BR, BD, FIRST, MIX, PROJECT, COLLAPSE, NORM, PARTS, EXACT,
                )  # fmt: skip
            else:
                c = 0.0
                for b in tl.range(0, CHUNK, BD, num_stages=STAGES):
                    start = b * SPLITS + split * BD
                    dim = start + tl.arange(0, BD)
                    mask = live[:, None] & (dim < D)[None, :]
                    acc, wide, squares, inside, t, b0, b1, b2, b3 = _tile(
                        start, streams, y, source, long, live, fn, parts, q0, q1, q2, q3, p0, p1, p2, p3, acc, wide, squares,
                        inside, S, D, N, NP, BR, BD, FIRST, MIX, PROJECT, COLLAPSE, NORM, PARTS, EXACT,
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

    @triton.jit
    def engram_gather(
        codes, scales, ids, rounded, out_codes, out_scales, rows, modulo,
        W: tl.constexpr, BR: tl.constexpr, FOLD: tl.constexpr, ROUNDED: tl.constexpr, CODES: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """BR table rows of W = 32 * G columns each: read, widened to bf16 and FP8-rounded as the input of `wkv`."""
        G: tl.constexpr = W // 32
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        live = row < rows
        place = tl.load(ids + row, mask=live, other=0)
        if FOLD:
            place = place % modulo
        group = tl.arange(0, G)
        d = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = live[:, None, None]
        code = tl.load(codes + place[:, None, None] * W + d[None, :, :], mask=mask, other=0).to(tl.int32)
        power = tl.load(scales + place[:, None] * G + group[None, :], mask=live[:, None], other=127).to(tl.int32)
        power = tl.where(power == 0, 0x400000, power << 23).to(tl.float32, bitcast=True)
        a = code & 0x7F
        v = tl.where(a < 8, a.to(tl.float32) * 0.001953125, ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True))
        v = tl.where(a == 0x7F, float("nan"), v)
        v = _bf16(tl.where(code > 127, -v, v) * power[:, :, None], EXACT)
        q, bits = _round_fp8(v, tl.max(tl.abs(v), 2)[:, :, None])
        at = row.to(tl.int64)[:, None, None] * W + d[None, :, :]
        if ROUNDED:
            tl.store(rounded + at, (q * bits.to(tl.float32, bitcast=True)).to(tl.bfloat16), mask=mask)
        if CODES:
            tl.store(out_codes + at, _fp8_codes(q, v), mask=mask)
            tl.store(out_scales + row[:, None] * G + group[None, :], tl.max(bits >> 23, 2).to(tl.uint8), mask=live[:, None])

    @triton.jit
    def engram_gate(
        streams, z, q_weight, k_weight, text, out, eps,
        S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (row, stream), the whole stream in registers. z [n, (S + 1) * D]: keys of the streams, then the value."""
        row = tl.program_id(0).to(tl.int64)
        s = tl.program_id(1)
        dim = tl.arange(0, DP)
        mask = dim < D
        at = (row * S + s) * D + dim
        x = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(z + row * ((S + 1) * D) + s * D + dim, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(z + row * ((S + 1) * D) + S * D + dim, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(q_weight + s * D + dim, mask=mask, other=0.0).to(tl.float32)
        w = w * tl.load(k_weight + s * D + dim, mask=mask, other=0.0).to(tl.float32)
        length = tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.rsqrt(tl.sum(k * k, 0) / D + eps)
        dot = tl.sum(x * w * k, 0) * length * (D**-0.5)
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        negative = (dot + tl.zeros([1], tl.float32)).to(tl.int32, bitcast=True) < 0
        gate = _sigmoid(tl.where(negative, -root, root))
        if MASKED:
            gate = tl.where(tl.load(text + row) != 0, gate, 0.0)
        tl.store(out + at, _bf16(x + gate * value, EXACT).to(tl.bfloat16), mask=mask)

    return SimpleNamespace(step=step, engram_gather=engram_gather, engram_gate=engram_gate, tl=tl, cdiv=triton.cdiv)
