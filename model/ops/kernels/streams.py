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
    global tl, triton, _bf16, _round_fp8, _fp8_codes, _stream, _sigmoid
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
    def _stream(
        t, at, mask, column, dim, out, fn, weight, c, acc, square,
        K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
        STORE: tl.constexpr, PROJECT: tl.constexpr, COLLAPSE: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """What is done with stream K's new values t [BR, BD]: stored, projected, squared and collapsed."""
        t = _bf16(t, EXACT)
        if STORE:
            tl.store(out + at + K * D, t.to(tl.bfloat16), mask=mask)
        if PROJECT:
            inside = (column < N)[:, None] & (dim < D)[None, :]
            w = tl.load(fn + column[:, None] * (S * D) + K * D + dim[None, :], mask=inside, other=0.0)
            if EXACT:
                acc = tl.dot(t, tl.trans(w), acc, input_precision="ieee")
            else:  # t is bf16 and w the sum of three bf16 numbers of 8 bits, cut off one after the other: the products are exact
                rest = w - (w.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                least = rest - (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                high = (w.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                middle = (rest.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                low = (least.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                b = t.to(tl.bfloat16)
                acc = tl.dot(b, tl.trans(low), acc)
                acc = tl.dot(b, tl.trans(middle), acc)
                acc = tl.dot(b, tl.trans(high), acc)
            square += tl.sum(t * t, 1)
        if COLLAPSE:
            c += weight[:, None] * t
        return c, acc, square

    @triton.jit
    def step(
        streams, out, y, tokens, post, comb, pre, fn, scale, base, norm, x, rounded, codes, scales,
        new_pre, new_post, new_comb, partial, arrived, n, eps, hc_eps,
        S: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
        CHUNK: tl.constexpr, SPLITS: tl.constexpr, TR: tl.constexpr, TS: tl.constexpr, TG: tl.constexpr, ITERATIONS: tl.constexpr,
        FIRST: tl.constexpr, MIX: tl.constexpr, STORE: tl.constexpr, PROJECT: tl.constexpr, COLLAPSE: tl.constexpr,
        NORM: tl.constexpr, ROUNDED: tl.constexpr, CODES: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Program (rows, columns): BR rows of CHUNK columns of every stream; the last of a row block to arrive ends its rows.

        Sums over all columns (raw coefficients, squares of the streams and of the collapsed input) go through `partial`
        [SPLITS, n, NP]: N coefficients, then the two squares. The collapsed input waits in `x` for its norm, which one program does where
        it has written all of it (SPLITS = 1: it comes back from L2) or has heard that the others have.
        """
        block = tl.program_id(0)
        split = tl.program_id(1)
        row = block * BR + tl.arange(0, BR)
        live = row < n
        column = tl.arange(0, NP)
        long = row.to(tl.int64)
        acc = tl.zeros([BR, NP], tl.float32)
        square = tl.zeros([BR], tl.float32)
        inner = tl.zeros([BR], tl.float32)
        p0 = tl.zeros([BR], tl.float32)
        p1 = tl.zeros([BR], tl.float32)
        p2 = tl.zeros([BR], tl.float32)
        p3 = tl.zeros([BR], tl.float32)
        source = long
        if FIRST:
            source = tl.load(tokens + row, mask=live, other=0).to(tl.int64)
            p0 += 1.0
        elif COLLAPSE:
            p0 = tl.load(pre + row * S, mask=live, other=0.0)
            p1 = tl.load(pre + row * S + 1, mask=live, other=0.0)
            if S == 4:
                p2 = tl.load(pre + row * S + 2, mask=live, other=0.0)
                p3 = tl.load(pre + row * S + 3, mask=live, other=0.0)
        if MIX:
            q = comb + row * (S * S)
            h0 = tl.load(post + row * S, mask=live, other=0.0)[:, None]
            h1 = tl.load(post + row * S + 1, mask=live, other=0.0)[:, None]
            c00 = tl.load(q, mask=live, other=0.0)[:, None]
            c01 = tl.load(q + 1, mask=live, other=0.0)[:, None]
            c10 = tl.load(q + S, mask=live, other=0.0)[:, None]
            c11 = tl.load(q + S + 1, mask=live, other=0.0)[:, None]
            if S == 4:
                h2 = tl.load(post + row * S + 2, mask=live, other=0.0)[:, None]
                h3 = tl.load(post + row * S + 3, mask=live, other=0.0)[:, None]
                c02 = tl.load(q + 2, mask=live, other=0.0)[:, None]
                c03 = tl.load(q + 3, mask=live, other=0.0)[:, None]
                c12 = tl.load(q + 6, mask=live, other=0.0)[:, None]
                c13 = tl.load(q + 7, mask=live, other=0.0)[:, None]
                c20 = tl.load(q + 8, mask=live, other=0.0)[:, None]
                c21 = tl.load(q + 9, mask=live, other=0.0)[:, None]
                c22 = tl.load(q + 10, mask=live, other=0.0)[:, None]
                c23 = tl.load(q + 11, mask=live, other=0.0)[:, None]
                c30 = tl.load(q + 12, mask=live, other=0.0)[:, None]
                c31 = tl.load(q + 13, mask=live, other=0.0)[:, None]
                c32 = tl.load(q + 14, mask=live, other=0.0)[:, None]
                c33 = tl.load(q + 15, mask=live, other=0.0)[:, None]
        for b in range(0, CHUNK, BD):
            dim = split * CHUNK + b + tl.arange(0, BD)
            mask = live[:, None] & (dim < D)[None, :]
            at = long[:, None] * (S * D) + dim[None, :]
            if FIRST:
                x0 = tl.load(y + source[:, None] * D + dim[None, :], mask=mask, other=0.0).to(tl.float32)
                x1 = x0
                x2 = x0
                x3 = x0
            else:
                x0 = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
                x1 = tl.load(streams + at + D, mask=mask, other=0.0).to(tl.float32)
                if S == 4:
                    x2 = tl.load(streams + at + 2 * D, mask=mask, other=0.0).to(tl.float32)
                    x3 = tl.load(streams + at + 3 * D, mask=mask, other=0.0).to(tl.float32)
            if MIX:
                o = tl.load(y + long[:, None] * D + dim[None, :], mask=mask, other=0.0).to(tl.float32)
                if S == 4:
                    t0 = h0 * o + (c00 * x0 + c10 * x1 + c20 * x2 + c30 * x3)
                    t1 = h1 * o + (c01 * x0 + c11 * x1 + c21 * x2 + c31 * x3)
                    t2 = h2 * o + (c02 * x0 + c12 * x1 + c22 * x2 + c32 * x3)
                    t3 = h3 * o + (c03 * x0 + c13 * x1 + c23 * x2 + c33 * x3)
                    x2 = t2
                    x3 = t3
                else:
                    t0 = h0 * o + (c00 * x0 + c10 * x1)
                    t1 = h1 * o + (c01 * x0 + c11 * x1)
                x0 = t0
                x1 = t1
            c = tl.zeros([BR, BD], tl.float32)
            c, acc, square = _stream(x0, at, mask, column, dim, out, fn, p0, c, acc, square, 0, S, D, N, STORE, PROJECT, COLLAPSE, EXACT)
            c, acc, square = _stream(x1, at, mask, column, dim, out, fn, p1, c, acc, square, 1, S, D, N, STORE, PROJECT, COLLAPSE, EXACT)
            if S == 4:
                c, acc, square = _stream(
                    x2, at, mask, column, dim, out, fn, p2, c, acc, square, 2, S, D, N, STORE, PROJECT, COLLAPSE, EXACT
                )
                c, acc, square = _stream(
                    x3, at, mask, column, dim, out, fn, p3, c, acc, square, 3, S, D, N, STORE, PROJECT, COLLAPSE, EXACT
                )
            if COLLAPSE:
                c = _bf16(c, EXACT)
                inner += tl.sum(c * c, 1)
                tl.store(x + long[:, None] * D + dim[None, :], c.to(tl.bfloat16), mask=mask)
        if PROJECT or NORM:
            total = acc + tl.where(column == N, 1.0, 0.0)[None, :] * square[:, None]
            total += tl.where(column == N + 1, 1.0, 0.0)[None, :] * inner[:, None]
            tl.store(partial + (split * n + row)[:, None] * NP + column[None, :], total, mask=live[:, None])
            tl.debug_barrier()
            before = SPLITS - 1
            if SPLITS > 1:
                before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
            if before == SPLITS - 1:
                if SPLITS > 1:
                    tl.store(arrived + block, 0)  # for the next launch
                    tl.debug_barrier()
                for r in range(0, BR, TR):
                    trow = block * BR + r + tl.arange(0, TR)
                    tlive = trow < n
                    if SPLITS > 1:
                        whole = tl.zeros([TR, NP], tl.float32)
                        for s in range(0, SPLITS, TS):
                            part = s + tl.arange(0, TS)
                            where = (part[None, :] * n + trow[:, None])[:, :, None] * NP + column[None, None, :]
                            there = tlive[:, None, None] & (part < SPLITS)[None, :, None]
                            whole += tl.sum(tl.load(partial + where, mask=there, other=0.0, cache_modifier=".cg"), 1)
                        tl.debug_barrier()
                        tl.store(partial + trow[:, None] * NP + column[None, :], whole, mask=tlive[:, None])
                        tl.debug_barrier()
                    if NORM:
                        csum = tl.load(partial + trow * NP + N + 1, mask=tlive, other=1.0)
                        f = tl.rsqrt(csum / D + eps)[:, None, None]
                        lane = tl.arange(0, 32)
                        for g in range(0, D // 32, TG):
                            group = g + tl.arange(0, TG)
                            d = group[:, None] * 32 + lane[None, :]
                            some = tlive[:, None, None] & (group < D // 32)[None, :, None]
                            where = trow.to(tl.int64)[:, None, None] * D + d[None, :, :]
                            v = tl.load(x + where, mask=some, other=0.0, cache_modifier=".cg").to(tl.float32)
                            w = tl.load(norm + d, mask=(group < D // 32)[:, None], other=0.0).to(tl.float32)
                            v = _bf16(w[None, :, :] * (v * f), EXACT)
                            tl.store(x + where, v.to(tl.bfloat16), mask=some)
                            if ROUNDED or CODES:
                                q8, bits = _round_fp8(v, tl.max(tl.abs(v), 2)[:, :, None])
                                if ROUNDED:
                                    tl.store(rounded + where, (q8 * bits.to(tl.float32, bitcast=True)).to(tl.bfloat16), mask=some)
                                if CODES:
                                    tl.store(codes + where, _fp8_codes(q8, v), mask=some)
                                    sat = trow.to(tl.int64)[:, None] * (D // 32) + group[None, :]
                                    few = tlive[:, None] & (group < D // 32)[None, :]
                                    tl.store(scales + sat, tl.max(bits >> 23, 2).to(tl.uint8), mask=few)
                    if PROJECT:
                        at1 = partial + trow * NP
                        rms = tl.rsqrt(tl.load(at1 + N, mask=tlive, other=1.0) / (S * D) + eps)
                        k = tl.arange(0, S)
                        raw = tl.load(at1[:, None] + k[None, :], mask=tlive[:, None], other=0.0) * rms[:, None]
                        raw = raw * tl.load(scale + k)[None, :] + tl.load(base + k)[None, :]
                        tl.store(new_pre + trow[:, None] * S + k[None, :], _sigmoid(raw) + hc_eps, mask=tlive[:, None])
                        raw = tl.load(at1[:, None] + (S + k)[None, :], mask=tlive[:, None], other=0.0) * rms[:, None]
                        raw = raw * tl.load(scale + S + k)[None, :] + tl.load(base + S + k)[None, :]
                        tl.store(new_post + trow[:, None] * S + k[None, :], 2.0 * _sigmoid(raw), mask=tlive[:, None])
                        jk = k[:, None] * S + k[None, :]
                        m = tl.load(at1[:, None, None] + (2 * S + jk)[None, :, :], mask=tlive[:, None, None], other=0.0)
                        m = m * rms[:, None, None] * tl.load(scale + 2 * S + jk)[None, :, :] + tl.load(base + 2 * S + jk)[None, :, :]
                        m = tl.exp(m - tl.max(m, 2)[:, :, None])
                        m = m / tl.sum(m, 2)[:, :, None] + hc_eps
                        m = m / (tl.sum(m, 1)[:, None, :] + hc_eps)
                        for _ in range(1, ITERATIONS):
                            m = m / (tl.sum(m, 2)[:, :, None] + hc_eps)
                            m = m / (tl.sum(m, 1)[:, None, :] + hc_eps)
                        tl.store(new_comb + trow[:, None, None] * (S * S) + jk[None, :, :], m, mask=tlive[:, None, None])

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
