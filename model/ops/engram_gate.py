"""Engram gate: how strongly each stream takes the memory read up (spec/model.md §9.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops.elementwise import sigmoid


def engram_gate(streams: Tensor, key: Tensor, value: Tensor, weight: Tensor, eps: float, text_mask: Tensor | None) -> Tensor:
    """X_s + gamma_s * value with gamma_s = sigmoid(sign(d) sqrt(max(|d|, 1e-6))), d the normalised product of stream and key.

    Args:
        streams: [n, S, D] bf16. key: [n, S, D] bf16. value: [n, D] bf16.
        weight: [S, D] fp32, the product q_weight * k_weight (forming it in bf16 would change the gate).
        text_mask: [n] bool, False where an image position takes no part; None for text.
    Returns:
        [n, S, D] bf16.
    """
    x, k = streams.float(), key.float()
    norm = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    dot = (x * weight * k).sum(-1) * norm * streams.shape[-1] ** -0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    if text_mask is not None:
        gate = gate * text_mask.unsqueeze(-1)
    return (x + gate.unsqueeze(-1) * value.float().unsqueeze(1)).to(torch.bfloat16)
