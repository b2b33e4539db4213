"""Rotary embedding over the last `2 * pairs` channels, neighbouring channels paired (spec/model.md §3.2)."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

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
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    smooth = 1 - ramp
    return freqs / factor * (1 - smooth) + freqs * smooth


def rope_table(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [n, pairs] fp32, of the fp32 product position * frequency. positions [n] int64."""
    angle = positions.to(torch.float32).unsqueeze(-1) * freqs
    turn = torch.polar(torch.ones_like(angle), angle)  # the reference's evaluation; torch.cos differs by up to 6e-8
    return turn.real.contiguous(), turn.imag.contiguous()


class Turn(NamedTuple):
    """A rotation ready to be applied to neighbouring pairs: (a, b) -> (a c - b s, b c + a s) as x * cos + swap(x) * sin.

    cos: [n, 2 * pairs] fp32, each cosine twice. sin: [n, 2 * pairs] fp32, each sine as (-s, s).
    """

    cos: Tensor
    sin: Tensor


def turn_at(positions: Tensor, freqs: Tensor) -> Turn:
    """The rotation of each position, [n] int64."""
    cos, sin = rope_table(positions, freqs)
    return Turn(cos.repeat_interleave(2, 1), torch.stack((-sin, sin), -1).flatten(1))


def rotate(x: Tensor, turn: Turn, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * pairs channels of x by the angle of its row; the rest passes through.

    Args:
        x: [n, dim] or [n, heads, dim] bf16; row i uses row i of `turn`.
        inverse: rotate back (the attention output carries the rotation of its values).
    Returns:
        x's shape, bf16, rotation in fp32 and rounded once.
    """
    cos, sin = turn
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    tail = x[..., -width:].float()
    swapped = tail.index_select(-1, _neighbours(width, x.device)) * sin
    turned = tail * cos
    turned = turned - swapped if inverse else turned + swapped
    return torch.cat((x[..., :-width], turned.bfloat16()), -1)


@cache
def _neighbours(width: int, device: torch.device) -> Tensor:
    """1 0 3 2 5 4 ...: the other channel of each one's pair."""
    with torch.inference_mode(False):  # also for gradients
        return torch.arange(width, device=device) ^ 1
