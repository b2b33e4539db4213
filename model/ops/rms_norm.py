"""RMSNorm: y = x * rsqrt(mean(x^2) + eps) * weight, statistics and product in fp32, one rounding to bf16 (spec/model.md §10)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Args: x [..., n] bf16 or fp32, weight [n] bf16 or fp32. Returns [..., n] bf16."""
    x = x.float()
    x = x * reciprocal_rms(x, eps)
    return (weight.float() * x).bfloat16()


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps): [..., n] fp32 -> [..., 1] fp32."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
