"""Expert choice: sqrt(softplus) scores, bias for selection only, normalised weights (spec/model.md §8)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops.elementwise import softplus


def route(logits: Tensor, bias: Tensor, topk: int, scale: float, *, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits: [n, experts] fp32. bias: [experts] or [n, experts] fp32 (image rows have their own).
        topk: experts per token. scale: routed_scaling_factor.
    Returns:
        indices [n, topk] int64 best first, weights [n, topk] fp32.
    """
    # torch's softplus is log1p-based: log(1 + e^l) would underflow to 0 below about -16.6.
    scores = softplus(logits).sqrt()
    indices = torch.topk(scores + bias, topk, dim=-1).indices
    weights = scores.gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return indices, weights * scale
