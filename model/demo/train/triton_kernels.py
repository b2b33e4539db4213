"""The Triton kernels behind `kernels`: only what touches device memory, no autograd, no choice of device.

triton is optional, so nothing here exists before `load` is called. `kernels` documents what each operation computes; the docstrings here
say what a kernel must move at least, for rows of the demo network (H = 8 heads of d = 128, S = 4 streams of D = 256), to compare with the
4.3 TB/s and 790 bf16 TFLOP/s measured on an H200.

Every operand of a product is cast to `DOT` first: bf16 on a GPU, fp32 in Triton's interpreter, whose bf16 product is wrong. Helpers and
globals are avoided since the interpreter sees neither closures nor nested functions; loops to a bound known only at run time are `while`
since its `range` fails on one with numpy from 2.4.
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
    def window_forward(
        q, keys, start, count, sink, out, lse, rows, key_rows, scale,
        H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, LAST: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """BQ consecutive (row, head) pairs against the keys that any of them sees, BK at a time.

        LAST: the sink joins the denominator and `out` is bf16; otherwise `entries_forward` goes on from `out` (fp32) and `lse`.

        Floor: q and out are 4 KB a row (out 4 KB more when fp32), so 65,536 rows take 0.06 ms (0.09); 64 keys a row are 17 GFLOP seen
        and 4 x BQ * 96 / (16 * 64) of that computed with BK = 32, 0.1 ms.
        """
        FAR: tl.constexpr = 1 << 30
        place = tl.program_id(0) * BQ + tl.arange(0, BQ)
        row = place // H
        dim = tl.arange(0, D)
        live = row < rows
        first = tl.load(start + row, mask=live, other=0)
        stop = first + tl.load(count + row, mask=live, other=0)
        at = place.to(tl.int64)[:, None] * D + dim[None, :]
        query = tl.load(q + at, mask=live[:, None], other=0.0).to(DOT)
        top = tl.full([BQ], -1e30, tl.float32)
        total = tl.zeros([BQ], tl.float32)
        acc = tl.zeros([BQ, D], tl.float32)
        chunk = tl.min(tl.where(first < stop, first, FAR), 0)
        while chunk < FAR:
            key = chunk + tl.arange(0, BK)
            k = tl.load(keys + key[:, None] * D + dim[None, :], mask=(key < key_rows)[:, None], other=0.0).to(DOT)
            seen = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
            score = tl.where(seen, tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            above = tl.maximum(top, tl.max(score, 1))
            p = tl.exp(score - above[:, None])
            decay = tl.exp(top - above)
            total = total * decay + tl.sum(p, 1)
            acc = tl.dot(p.to(DOT), k, acc * decay[:, None])
            top = above
            rest = tl.maximum(first, chunk + BK)  # jump over what no row sees
            chunk = tl.min(tl.where(rest < stop, rest, FAR), 0)
        if LAST:
            z = tl.load(sink + place % H, mask=live, other=0.0)
            above = tl.maximum(top, z)
            decay = tl.exp(top - above)
            total = total * decay + tl.exp(z - above)
            tl.store(lse + place, above + tl.log(total), mask=live)
            tl.store(out + at, (acc * (decay / total)[:, None]).to(out.dtype.element_ty), mask=live[:, None])
        else:
            none = total == 0.0
            tl.store(lse + place, tl.where(none, -1e30, top + tl.log(tl.where(none, 1.0, total))), mask=live)
            tl.store(out + at, acc / tl.where(none, 1.0, total)[:, None], mask=live[:, None])

    @triton.jit
    def entries_forward(
        q, entries, index, sink, part, part_lse, out, lse, mass, scale,
        H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, MASS: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """One row: its K entries and the sink join the row's window part. Heads are padded to HP = 16 for the product.

        Floor: 8 KB a row through device memory (q, part, out), 0.12 ms for 65,536 rows; K = 64 entries are 16 KB a row, which come from
        L2 when the buffer of entries fits it; 34 GFLOP with padding.
        """
        row = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, HP)
        dim = tl.arange(0, D)
        live = head < H
        at = (row * H + head)[:, None] * D + dim[None, :]
        query = tl.load(q + at, mask=live[:, None], other=0.0).to(DOT)
        before = tl.load(part_lse + row * H + head, mask=live, other=-1e30)
        z = tl.load(sink + head, mask=live, other=0.0)
        top = tl.maximum(before, z)
        total = tl.exp(before - top) + tl.exp(z - top)
        acc = tl.load(part + at, mask=live[:, None], other=0.0) * tl.exp(before - top)[:, None]
        for c in tl.static_range(0, K, BK):
            entry = tl.load(index + row * K + c + tl.arange(0, BK))
            seen = entry >= 0
            k = tl.load(entries + entry.to(tl.int64)[:, None] * D + dim[None, :], mask=seen[:, None], other=0.0).to(DOT)
            score = tl.where(seen[None, :], tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            above = tl.maximum(top, tl.max(score, 1))
            p = tl.exp(score - above[:, None])
            decay = tl.exp(top - above)
            total = total * decay + tl.sum(p, 1)
            acc = tl.dot(p.to(DOT), k, acc * decay[:, None])
            top = above
        joint = top + tl.log(total)
        tl.store(lse + row * H + head, joint, mask=live)
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])
        if MASS:
            for c in tl.static_range(0, K, BK):
                if K > BK:  # one chunk: the scores are still there
                    entry = tl.load(index + row * K + c + tl.arange(0, BK))
                    seen = entry >= 0
                    k = tl.load(entries + entry.to(tl.int64)[:, None] * D + dim[None, :], mask=seen[:, None], other=0.0).to(DOT)
                    score = tl.where(seen[None, :], tl.dot(query, tl.trans(k)) * scale, float("-inf"))
                share = tl.where(live[:, None], tl.exp(score - joint[:, None]), 0.0)
                tl.store(mass + row * K + c + tl.arange(0, BK), tl.sum(share, 0))

    @triton.jit
    def window_backward(
        q, keys, start, count, out, grad, lse, delta, dq, dkeys, rows, key_rows, scale,
        H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """Stores delta = out . grad and dq of the window (bf16 when it is all, else fp32); adds to dkeys (fp32).

        Floor: q, out, grad and dq are 8 KB a row (10 KB with fp32 dq), 0.12 ms for 65,536 rows; the sums over BQ = 128 pairs, 16 rows,
        reach dkeys as at most 96 rows of 512 bytes with BK = 32: 3 KB of atomics a row instead of 32 KB. 5 products, 43 GFLOP seen.
        """
        FAR: tl.constexpr = 1 << 30
        place = tl.program_id(0) * BQ + tl.arange(0, BQ)
        row = place // H
        dim = tl.arange(0, D)
        live = row < rows
        first = tl.load(start + row, mask=live, other=0)
        stop = first + tl.load(count + row, mask=live, other=0)
        at = place.to(tl.int64)[:, None] * D + dim[None, :]
        dout = tl.load(grad + at, mask=live[:, None], other=0.0)
        value = tl.load(out + at, mask=live[:, None], other=0.0)
        inner = tl.sum(dout.to(tl.float32) * value.to(tl.float32), 1)
        tl.store(delta + place, inner, mask=live)
        query = tl.load(q + at, mask=live[:, None], other=0.0).to(DOT)
        dout = dout.to(DOT)
        joint = tl.load(lse + place, mask=live, other=0.0)
        acc = tl.zeros([BQ, D], tl.float32)
        chunk = tl.min(tl.where(first < stop, first, FAR), 0)
        while chunk < FAR:
            key = chunk + tl.arange(0, BK)
            inside = (key < key_rows)[:, None]
            k = tl.load(keys + key[:, None] * D + dim[None, :], mask=inside, other=0.0).to(DOT)
            seen = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
            score = tl.where(seen, tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            p = tl.exp(score - joint[:, None])
            ds = (p * (tl.dot(dout, tl.trans(k)) - inner[:, None]) * scale).to(DOT)
            acc = tl.dot(ds, k, acc)
            dk = tl.dot(tl.trans(ds), query)
            dk = tl.dot(tl.trans(p.to(DOT)), dout, dk)
            tl.atomic_add(dkeys + key[:, None] * D + dim[None, :], dk, mask=inside, sem="relaxed")
            rest = tl.maximum(first, chunk + BK)
            chunk = tl.min(tl.where(rest < stop, rest, FAR), 0)
        tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=live[:, None])

    @triton.jit
    def entries_backward(
        q, entries, index, grad, lse, delta, part, dq, dentries, scale,
        H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """One row: dq = part (the window's, fp32) + the entries', rounded; adds to dentries (fp32).

        Floor: 10 KB a row through device memory (q, grad, part, dq), 0.15 ms for 65,536 rows; K = 64 entries are 32 KB of atomics a
        row, 2.1 GB, which is what this kernel waits for.
        """
        row = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, HP)
        dim = tl.arange(0, D)
        live = head < H
        at = (row * H + head)[:, None] * D + dim[None, :]
        query = tl.load(q + at, mask=live[:, None], other=0.0).to(DOT)
        dout = tl.load(grad + at, mask=live[:, None], other=0.0).to(DOT)
        joint = tl.load(lse + row * H + head, mask=live, other=0.0)
        inner = tl.load(delta + row * H + head, mask=live, other=0.0)
        acc = tl.load(part + at, mask=live[:, None], other=0.0)
        for c in range(0, K, BK):
            entry = tl.load(index + row * K + c + tl.arange(0, BK))
            seen = entry >= 0
            spot = entry.to(tl.int64)[:, None] * D + dim[None, :]
            k = tl.load(entries + spot, mask=seen[:, None], other=0.0).to(DOT)
            score = tl.where(seen[None, :], tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            p = tl.exp(score - joint[:, None])
            ds = (p * (tl.dot(dout, tl.trans(k)) - inner[:, None]) * scale).to(DOT)
            acc = tl.dot(ds, k, acc)
            dk = tl.dot(tl.trans(ds), query)
            dk = tl.dot(tl.trans(p.to(DOT)), dout, dk)
            tl.atomic_add(dentries + spot, dk, mask=seen[:, None], sem="relaxed")
        tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=live[:, None])

    @triton.jit
    def sinkhorn_forward(logits, comb, n, eps, iterations: tl.constexpr, S: tl.constexpr, BR: tl.constexpr):
        """BR matrices a program. Floor: 128 bytes a row, 2 us for 65,536 rows, so the launch is what it costs."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        at = row[:, None, None] * (S * S) + tl.arange(0, S)[None, :, None] * S + tl.arange(0, S)[None, None, :]
        live = (row < n)[:, None, None]
        x = tl.load(logits + at, mask=live, other=0.0)
        c = tl.exp(x - tl.max(x, 2)[:, :, None])
        c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 2)[:, :, None], (BR, S, S))) + eps
        c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 1)[:, None, :] + eps, (BR, S, S)))
        for _ in range(iterations - 1):
            c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 2)[:, :, None] + eps, (BR, S, S)))
            c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 1)[:, None, :] + eps, (BR, S, S)))
        tl.store(comb + at, c, mask=live)

    @triton.jit
    def sinkhorn_backward(logits, grad, dlogits, n, eps, iterations: tl.constexpr, S: tl.constexpr, BR: tl.constexpr):
        """Reverse mode; the matrix before each step is computed again from the start, which is cheaper than 16 of them in registers.

        Floor: 192 bytes a row, 3 us for 65,536 rows; 8 iterations are 36 normalisations of rows and columns instead of 8.
        """
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        at = row[:, None, None] * (S * S) + tl.arange(0, S)[None, :, None] * S + tl.arange(0, S)[None, None, :]
        live = (row < n)[:, None, None]
        x = tl.load(logits + at, mask=live, other=0.0)
        g = tl.load(grad + at, mask=live, other=0.0)
        soft = tl.exp(x - tl.max(x, 2)[:, :, None])
        soft = tl.div_rn(soft, tl.broadcast_to(tl.sum(soft, 2)[:, :, None], (BR, S, S)))
        # y = c / (sum c + eps) has dc = (dy - sum(dy * y)) / (sum c + eps), along rows or columns alike.
        for step in range(iterations - 1):
            c = soft + eps
            c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 1)[:, None, :] + eps, (BR, S, S)))
            for _ in range(iterations - 2 - step):
                c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 2)[:, :, None] + eps, (BR, S, S)))
                c = tl.div_rn(c, tl.broadcast_to(tl.sum(c, 1)[:, None, :] + eps, (BR, S, S)))
            by_row = tl.sum(c, 2)[:, :, None] + eps
            c = tl.div_rn(c, tl.broadcast_to(by_row, (BR, S, S)))
            by_col = tl.sum(c, 1)[:, None, :] + eps
            after = tl.div_rn(c, tl.broadcast_to(by_col, (BR, S, S)))
            g = (g - tl.sum(g * after, 1)[:, None, :]) / by_col
            g = (g - tl.sum(g * c, 2)[:, :, None]) / by_row
        c = soft + eps
        by_col = tl.sum(c, 1)[:, None, :] + eps
        c = tl.div_rn(c, tl.broadcast_to(by_col, (BR, S, S)))
        g = (g - tl.sum(g * c, 1)[:, None, :]) / by_col
        g = soft * (g - tl.sum(g * soft, 2)[:, :, None])
        tl.store(dlogits + at, g, mask=live)

    @triton.jit
    def mix_forward(streams, y, post, comb, out, n, D: tl.constexpr, BR: tl.constexpr):
        """S = 4. Floor: 4.7 KB a row, 0.07 ms for 65,536 rows."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        live = row < n
        mask = live[:, None]
        dim = tl.arange(0, D)[None, :]
        at = row.to(tl.int64)[:, None] * (4 * D) + dim
        x0 = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(streams + at + D, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(streams + at + 2 * D, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(streams + at + 3 * D, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(y + row.to(tl.int64)[:, None] * D + dim, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(4):
            c = comb + row * 16 + k
            total = tl.load(c, mask=live, other=0.0)[:, None] * x0
            total += tl.load(c + 4, mask=live, other=0.0)[:, None] * x1
            total += tl.load(c + 8, mask=live, other=0.0)[:, None] * x2
            total += tl.load(c + 12, mask=live, other=0.0)[:, None] * x3
            total += tl.load(post + row * 4 + k, mask=live, other=0.0)[:, None] * o
            tl.store(out + at + k * D, total.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def mix_backward(streams, y, post, comb, grad, dstreams, dy, dpost, dcomb, n, D: tl.constexpr, BR: tl.constexpr):
        """S = 4. Floor: 7.3 KB a row, 0.11 ms for 65,536 rows; 20 sums over D a row stay in one warp each."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        live = row < n
        mask = live[:, None]
        dim = tl.arange(0, D)[None, :]
        at = row.to(tl.int64)[:, None] * (4 * D) + dim
        g0 = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        g1 = tl.load(grad + at + D, mask=mask, other=0.0).to(tl.float32)
        g2 = tl.load(grad + at + 2 * D, mask=mask, other=0.0).to(tl.float32)
        g3 = tl.load(grad + at + 3 * D, mask=mask, other=0.0).to(tl.float32)
        flat = row.to(tl.int64)[:, None] * D + dim
        o = tl.load(y + flat, mask=mask, other=0.0).to(tl.float32)
        p = post + row * 4
        do = tl.load(p, mask=live, other=0.0)[:, None] * g0 + tl.load(p + 1, mask=live, other=0.0)[:, None] * g1
        do += tl.load(p + 2, mask=live, other=0.0)[:, None] * g2 + tl.load(p + 3, mask=live, other=0.0)[:, None] * g3
        tl.store(dy + flat, do.to(dy.dtype.element_ty), mask=mask)
        tl.store(dpost + row * 4, tl.sum(o * g0, 1), mask=live)
        tl.store(dpost + row * 4 + 1, tl.sum(o * g1, 1), mask=live)
        tl.store(dpost + row * 4 + 2, tl.sum(o * g2, 1), mask=live)
        tl.store(dpost + row * 4 + 3, tl.sum(o * g3, 1), mask=live)
        for j in tl.static_range(4):
            x = tl.load(streams + at + j * D, mask=mask, other=0.0).to(tl.float32)
            c = comb + row * 16 + j * 4
            dx = tl.load(c, mask=live, other=0.0)[:, None] * g0 + tl.load(c + 1, mask=live, other=0.0)[:, None] * g1
            dx += tl.load(c + 2, mask=live, other=0.0)[:, None] * g2 + tl.load(c + 3, mask=live, other=0.0)[:, None] * g3
            tl.store(dstreams + at + j * D, dx.to(dstreams.dtype.element_ty), mask=mask)
            d = dcomb + row * 16 + j * 4
            tl.store(d, tl.sum(x * g0, 1), mask=live)
            tl.store(d + 1, tl.sum(x * g1, 1), mask=live)
            tl.store(d + 2, tl.sum(x * g2, 1), mask=live)
            tl.store(d + 3, tl.sum(x * g3, 1), mask=live)

    @triton.jit
    def collapse_norm_forward(streams, pre, weight, out, n, eps, S: tl.constexpr, D: tl.constexpr, BR: tl.constexpr):
        """Floor: 2.6 KB a row, 0.04 ms for 65,536 rows."""
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        live = row < n
        mask = live[:, None]
        dim = tl.arange(0, D)
        at = row.to(tl.int64)[:, None] * (S * D) + dim[None, :]
        c = tl.zeros([BR, D], tl.float32)
        for s in tl.static_range(S):
            x = tl.load(streams + at + s * D, mask=mask, other=0.0).to(tl.float32)
            c += tl.load(pre + row * S + s, mask=live, other=0.0)[:, None] * x
        c = c.to(tl.bfloat16).to(tl.float32)
        scaled = c * tl.rsqrt(tl.sum(c * c, 1) / D + eps)[:, None]
        y = tl.load(weight + dim).to(tl.float32)[None, :] * scaled
        tl.store(out + row.to(tl.int64)[:, None] * D + dim[None, :], y.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def collapse_norm_backward(
        streams, pre, weight, grad, dstreams, dpre, dweight, n, eps, S: tl.constexpr, D: tl.constexpr, BR: tl.constexpr
    ):
        """A program takes every `num_programs`-th block of rows and leaves its part of the weight's gradient in its row of dweight.

        Floor: 4.6 KB a row, 0.07 ms for 65,536 rows; the streams' second reading comes from L1.
        """
        dim = tl.arange(0, D)
        w = tl.load(weight + dim).to(tl.float32)[None, :]
        dw = tl.zeros([D], tl.float32)
        block = tl.program_id(0)
        while block * BR < n:
            row = block * BR + tl.arange(0, BR)
            live = row < n
            mask = live[:, None]
            at = row.to(tl.int64)[:, None] * (S * D) + dim[None, :]
            c = tl.zeros([BR, D], tl.float32)
            for s in tl.static_range(S):
                x = tl.load(streams + at + s * D, mask=mask, other=0.0).to(tl.float32)
                c += tl.load(pre + row * S + s, mask=live, other=0.0)[:, None] * x
            c = c.to(tl.bfloat16).to(tl.float32)
            r = tl.rsqrt(tl.sum(c * c, 1) / D + eps)[:, None]
            unit = c * r
            dy = tl.load(grad + row.to(tl.int64)[:, None] * D + dim[None, :], mask=mask, other=0.0).to(tl.float32)
            dw += tl.sum(dy * unit, 0)
            du = dy * w
            dc = r * (du - unit * (tl.sum(du * unit, 1) / D)[:, None])
            for s in tl.static_range(S):
                x = tl.load(streams + at + s * D, mask=mask, other=0.0).to(tl.float32)
                tl.store(dpre + row * S + s, tl.sum(x * dc, 1), mask=live)
                dx = tl.load(pre + row * S + s, mask=live, other=0.0)[:, None] * dc
                tl.store(dstreams + at + s * D, dx.to(dstreams.dtype.element_ty), mask=mask)
            block += tl.num_programs(0)
        tl.store(dweight + tl.program_id(0) * D + dim, dw)

    @triton.jit
    def project_forward(
        v, fn, out, reciprocal, n, eps, L: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr
    ):
        """out = (v fn^T) * reciprocal RMS of v, both from one reading. TF32 in three parts: as good as fp32, and v is exact in one.

        Floor: 2.1 KB a row, 0.03 ms for 65,536 rows; 3.2 GFLOP, 13 with padding and the three parts.
        """
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        live = row < n
        column = tl.arange(0, NP)
        acc = tl.zeros([BR, NP], tl.float32)
        square = tl.zeros([BR], tl.float32)
        for first in range(0, L, BL):
            dim = first + tl.arange(0, BL)
            x = tl.load(v + row.to(tl.int64)[:, None] * L + dim[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            w = tl.load(fn + column[:, None] * L + dim[None, :], mask=(column < N)[:, None], other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="tf32x3")
            square += tl.sum(x * x, 1)
        r = tl.rsqrt(square / L + eps)
        tl.store(reciprocal + row, r, mask=live)
        tl.store(out + row[:, None] * N + column[None, :], acc * r[:, None], mask=live[:, None] & (column < N)[None, :])

    @triton.jit
    def project_backward(
        v, fn, out, reciprocal, grad, dv, dfn, n, L: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr
    ):
        """Program (l, i): columns l*BL.. of every `num_programs(1)`-th block of rows; its part of dfn goes to dfn[i].

        dv = (grad fn - (grad . out) / L * r * v) * r, rounded to bf16, so one TF32 product is enough.

        Floor: 4.3 KB a row, 0.07 ms for 65,536 rows; grad and out, 192 bytes a row, are read again by each of the L/BL column blocks.
        """
        column = tl.arange(0, NP)
        some = (column < N)[None, :]
        dim = tl.program_id(0) * BL + tl.arange(0, BL)
        w = tl.load(fn + column[:, None] * L + dim[None, :], mask=(column < N)[:, None], other=0.0)
        dw = tl.zeros([NP, BL], tl.float32)
        block = tl.program_id(1)
        while block * BR < n:
            row = block * BR + tl.arange(0, BR)
            live = row < n
            mask = live[:, None] & some
            g = tl.load(grad + row[:, None] * N + column[None, :], mask=mask, other=0.0)
            y = tl.load(out + row[:, None] * N + column[None, :], mask=mask, other=0.0)
            r = tl.load(reciprocal + row, mask=live, other=0.0)
            at = row.to(tl.int64)[:, None] * L + dim[None, :]
            x = tl.load(v + at, mask=live[:, None], other=0.0).to(tl.float32)
            dz = g * r[:, None]
            inner = tl.sum(g * y, 1) * r * r / L
            dx = tl.dot(dz, w, input_precision="tf32") - inner[:, None] * x
            tl.store(dv + at, dx.to(dv.dtype.element_ty), mask=live[:, None])
            dw = tl.dot(tl.trans(dz), x, dw, input_precision="tf32")
            block += tl.num_programs(1)
        tl.store(dfn + (tl.program_id(1) * N + column)[:, None] * L + dim[None, :], dw, mask=(column < N)[:, None])

    @triton.jit
    def swiglu_forward(up, weight, h, rows, limit, I: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr, CLAMP: tl.constexpr):
        """Floor: 1.3 KB a row of I = 224, 0.04 ms for the 131,072 assignments of 65,536 rows."""
        row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
        column = tl.arange(0, BI)
        mask = (row < rows)[:, None] & (column < I)[None, :]
        at = row[:, None] * (2 * I) + column[None, :]
        g = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + at + I, mask=mask, other=0.0).to(tl.float32)
        if CLAMP:
            g = tl.minimum(g, limit)
            u = tl.minimum(tl.maximum(u, -limit), limit)
        r = tl.load(weight + row, mask=row < rows, other=0.0)[:, None]
        y = r * (g / (1.0 + tl.exp(-g)) * u)
        tl.store(h + row[:, None] * I + column[None, :], y.to(h.dtype.element_ty), mask=mask)

    @triton.jit
    def swiglu_backward(
        up, weight, grad, dup, dweight, rows, limit, I: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr, CLAMP: tl.constexpr
    ):
        """Floor: 2.2 KB a row of I = 224, 0.07 ms for the 131,072 assignments of 65,536 rows."""
        row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
        column = tl.arange(0, BI)
        mask = (row < rows)[:, None] & (column < I)[None, :]
        at = row[:, None] * (2 * I) + column[None, :]
        g0 = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
        u0 = tl.load(up + at + I, mask=mask, other=0.0).to(tl.float32)
        g = g0
        u = u0
        if CLAMP:
            g = tl.minimum(g, limit)
            u = tl.minimum(tl.maximum(u, -limit), limit)
        dh = tl.load(grad + row[:, None] * I + column[None, :], mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        silu = g * sigmoid
        tl.store(dweight + row, tl.sum(dh * silu * u, 1), mask=row < rows)
        dh *= tl.load(weight + row, mask=row < rows, other=0.0)[:, None]
        dg = dh * u * (sigmoid + silu * (1.0 - sigmoid))
        du = dh * silu
        if CLAMP:
            dg = tl.where(g0 <= limit, dg, 0.0)
            du = tl.where((u0 >= -limit) & (u0 <= limit), du, 0.0)
        tl.store(dup + at, dg.to(dup.dtype.element_ty), mask=mask)
        tl.store(dup + at + I, du.to(dup.dtype.element_ty), mask=mask)

    @triton.jit
    def round_groups(x, out, groups, FORM: tl.constexpr, G: tl.constexpr, BG: tl.constexpr):
        """Quantise and dequantise groups of G: FORM 0 FP8, 1 index FP4, 2 main FP4 (`ops.formats`), exactly but for the sign of 0.

        A number with m mantissa bits and least exponent l is rounded to multiples of 2^(max(exponent, l) - m), to even at ties, by adding
        and taking away 1.5 * 2^23. This needs no cast to FP8, which the interpreter gets wrong.

        Floor: 4 bytes a value, 0.06 ms for 65,536 rows of 1,024.
        """
        group = tl.program_id(0) * BG + tl.arange(0, BG)
        mask = (group < groups)[:, None]
        at = group.to(tl.int64)[:, None] * G + tl.arange(0, G)[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        magic = 12582912.0
        amax = tl.max(tl.abs(v), 1)[:, None]
        if FORM == 2:
            scale = tl.minimum(tl.div_rn(tl.maximum(amax, 6.0 / 512), tl.full([BG, 1], 6.0, tl.float32)), 448.0)
            step = tl.maximum(scale.to(tl.int32, bitcast=True) >> 23, 121) - 3 << 23
            unit = step.to(tl.float32, bitcast=True)
            scale = (scale * ((254 << 23) - step).to(tl.float32, bitcast=True) + magic - magic) * unit
            v = tl.div_rn(v, tl.broadcast_to(scale, (BG, G)))
        else:
            if FORM == 0:
                scale = tl.maximum(amax, 1e-4) * (1.0 / 448.0)
            else:
                scale = tl.maximum(amax, 7.052966104933725e-38) * (1.0 / 6.0)
            bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF & 0x7F800000
            scale = bits.to(tl.float32, bitcast=True)
            v = v * ((254 << 23) - bits).to(tl.float32, bitcast=True)
        if FORM == 0:
            limit = 448.0
            least = 121
            mantissa = 3
        else:
            limit = 6.0
            least = 127
            mantissa = 1
        v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v))  # NaN stays
        step = tl.maximum((v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, least) - mantissa << 23
        v = (v * ((254 << 23) - step).to(tl.float32, bitcast=True) + magic - magic) * step.to(tl.float32, bitcast=True)
        tl.store(out + at, (v * scale).to(out.dtype.element_ty), mask=mask)

    return SimpleNamespace(**{name: value for name, value in locals().items() if name != "interpreted"}, tl=tl, cdiv=triton.cdiv)
