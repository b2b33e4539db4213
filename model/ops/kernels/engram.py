"""The Triton kernels of the Engram read behind `engram_ops` (see `rounding` for their form)."""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import dependent, rounding


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, triton, _bf16, _sigmoid, _round_fp8, _fp8_codes, _await
    import triton
    import triton.language as tl

    found = rounding.load(interpreted)
    _bf16, _sigmoid, _round_fp8, _fp8_codes = found._bf16, found._sigmoid, found._round_fp8, found._fp8_codes
    _await = dependent.load(interpreted)._await

    @triton.jit
    def engram_gather(
        codes, scales, ids, rounded, out_codes, out_scales, rows, modulo,
        W: tl.constexpr, BR: tl.constexpr, FOLD: tl.constexpr, ROUNDED: tl.constexpr, CODES: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """BR table rows of W = 32 * G columns each: read, widened to bf16 and FP8-rounded as the input of `wkv`."""
        G: tl.constexpr = W // 32
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        live = row < rows
        _await()
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
        w = tl.load(q_weight + s * D + dim, mask=mask, other=0.0).to(tl.float32)
        w = w * tl.load(k_weight + s * D + dim, mask=mask, other=0.0).to(tl.float32)
        _await()
        x = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(z + row * ((S + 1) * D) + s * D + dim, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(z + row * ((S + 1) * D) + S * D + dim, mask=mask, other=0.0).to(tl.float32)
        length = tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.rsqrt(tl.sum(k * k, 0) / D + eps)
        dot = tl.sum(x * w * k, 0) * length * (D**-0.5)
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        negative = (dot + tl.zeros([1], tl.float32)).to(tl.int32, bitcast=True) < 0
        gate = _sigmoid(tl.where(negative, -root, root))
        if MASKED:
            gate = tl.where(tl.load(text + row) != 0, gate, 0.0)
        tl.store(out + at, _bf16(x + gate * value, EXACT).to(tl.bfloat16), mask=mask)

    return SimpleNamespace(engram_gather=engram_gather, engram_gate=engram_gate)
