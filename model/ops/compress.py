"""Pooling of one compression group into a latent (spec/model.md §4)."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_groups(k: Tensor, gate: Tensor) -> Tensor:
    """Per-channel softmax of `gate` over the group, weighting `k`.

    Args:
        k, gate: [groups, ratio, dim] fp32.
    Returns:
        [groups, dim] bf16: the reference rounds before the norm.
    """
    weight = (gate - gate.amax(1, keepdim=True)).exp()
    total = weight[:, 0]
    for t in range(1, weight.shape[1]):
        total = total + weight[:, t]
    pooled = k[:, 0] * (weight[:, 0] / total)
    for t in range(1, weight.shape[1]):
        pooled = pooled + k[:, t] * (weight[:, t] / total)
    return pooled.to(torch.bfloat16)
