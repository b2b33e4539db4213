"""Parts of the Triton kernel of the mHC step: streams mixed, and their product with fn (see `rounding` for the parts' form)."""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import settled


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The functions by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, triton, _pin, _cut, _product, _mixed, _weights, _interleaved, _projection, _stored, _settled
    import triton
    import triton.language as tl

    _settled = settled.load(interpreted)._settled

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
            acc = _settled(tl.dot(t, tl.trans(high), acc), EXACT)
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
    def _projection(
        start, fn, parts,
        S: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, PROJECT: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        """BD columns of fn: a tensor for each stream, or three parts with the streams of a column side by side."""
        col = tl.arange(0, NP)
        if not PROJECT:
            w0 = 0.0
            w1 = 0.0
            w2 = 0.0
            w3 = 0.0
        elif PARTS:
            k = start * S + tl.arange(0, BD * S)
            there = (col < N)[:, None] & (k < D * S)[None, :]
            place = parts + col[:, None] * (S * D) + k[None, :]
            w0 = tl.load(place, mask=there, other=0.0)
            w1 = tl.load(place + N * S * D, mask=there, other=0.0)
            w2 = tl.load(place + 2 * N * S * D, mask=there, other=0.0)
            w3 = 0.0
        else:
            dim = start + tl.arange(0, BD)
            there = (col < N)[:, None] & (dim < D)[None, :]
            place = fn + col[:, None] * (S * D) + dim[None, :]
            w0 = tl.load(place, mask=there, other=0.0)
            w1 = tl.load(place + D, mask=there, other=0.0)
            w2 = w0
            w3 = w0
            if S == 4:
                w2 = tl.load(place + 2 * D, mask=there, other=0.0)
                w3 = tl.load(place + 3 * D, mask=there, other=0.0)
        return w0, w1, w2, w3

    @triton.jit
    def _stored(out, b0, b1, b2, b3, mask, D: tl.constexpr, S: tl.constexpr):
        tl.store(out, b0, mask=mask, eviction_policy="evict_first")
        tl.store(out + D, b1, mask=mask, eviction_policy="evict_first")
        if S == 4:
            tl.store(out + 2 * D, b2, mask=mask, eviction_policy="evict_first")
            tl.store(out + 3 * D, b3, mask=mask, eviction_policy="evict_first")

    return SimpleNamespace(
        _pin=_pin, _cut=_cut, _product=_product, _mixed=_mixed, _weights=_weights, _interleaved=_interleaved, _projection=_projection,
        _stored=_stored,
    )  # fmt: skip
