"""Rotary embedding over the last `2 * pairs` channels, neighbouring channels paired (spec/model.md §3.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(
    dim: int, base: float, *, factor: float = 1.0, original: int = 0, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Tensor:
    """Rotation per position of each pair, [dim/2] fp32; YaRN-blended when `original` > 0 (at every length, never with mscale).

    Exponent, power, reciprocal and blend are all evaluated in fp32: other orders move cos by up to 1.3e-2 near position 2^20.
    """
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if original <= 0:
        return freqs

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), dim - 1)
    span = (high - low) if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    smooth = 1 - ramp
    return freqs / factor * (1 - smooth) + freqs * smooth


def rope_table(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [n, pairs] fp32, of the fp32 product position * frequency. positions [n] int64."""
    angle = positions.to(torch.float32).unsqueeze(-1) * freqs
    turn = torch.polar(torch.ones_like(angle), angle)  # the reference's evaluation; torch.cos differs by up to 6e-8
    return turn.real.contiguous(), turn.imag.contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2*pairs channels of x by the angles of its row; the rest passes through.

    Args:
        x: [n, ..., dim] bf16; row i uses cos[i], sin[i].
        cos, sin: [n, pairs] fp32.
        inverse: rotate back (the attention output carries the rotation of its values).
    Returns:
        [n, ..., dim] bf16, rotation in fp32 and rounded once.
    """
    pairs = cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (pairs,)
    c, s = cos.view(shape), sin.view(shape)
    if inverse:
        s = -s
    tail = x[..., -2 * pairs :].float().unflatten(-1, (pairs, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(torch.bfloat16)
    return torch.cat((x[..., : -2 * pairs], turned), -1)
