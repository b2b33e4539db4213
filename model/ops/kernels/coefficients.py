"""From the projection of the residual streams to the coefficients of mHC, as parts of Triton kernels (see `rounding` for their form)."""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import rounding


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The functions by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, triton, _sigmoid, _shares, _parts, _column, _matrix, _coefficients
    import triton
    import triton.language as tl

    _sigmoid = rounding.load(interpreted)._sigmoid

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
    def _matrix(
        m00, m01, m02, m03, m10, m11, m12, m13, m20, m21, m22, m23, m30, m31, m32, m33, row, live, new_comb, eps,
        S: tl.constexpr, ITERATIONS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """Balances and stores a matrix, one of S * S variables: so its sums cross no lanes."""
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
    def _coefficients(
        raw, row, live, new_pre, new_post, new_comb, eps, S: tl.constexpr, NP: tl.constexpr, ITERATIONS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """From raw [R, NP], the projection times scale plus base."""
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
        _matrix(
            m00, m01, m02, m03, m10, m11, m12, m13, m20, m21, m22, m23, m30, m31, m32, m33,
            row, live, new_comb, eps, S, ITERATIONS, EXACT,
        )  # fmt: skip

    return SimpleNamespace(_matrix=_matrix, _coefficients=_coefficients)
