"""Index scores: sum_h relu(q_h . k) * w_h, with the reference's roundings to bf16 (spec/model.md §5.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops.sparse_attention import row_products


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of every key for every row.

    The dot, its product with the weight and the head sum are each rounded to bf16; heads are added in order in fp32, so a score does not
    depend on how many keys or rows are scored at once.

    Args:
        q: [n, heads, dim] fp32 (FP4-rounded). weights: [n, heads] bf16.
        keys: [m, dim] fp32 shared by all rows, or [n, m, dim] fp32 with each row's own.
    Returns:
        [n, m] bf16.
    """
    if keys.dim() == 2:
        dots = torch.mm(q.flatten(0, 1), keys.T).view(q.shape[0], q.shape[1], -1)
    else:
        dots = row_products(q, keys.transpose(1, 2))
    parts = dots.to(torch.bfloat16).relu_().mul_(weights.unsqueeze(-1))
    total = parts[:, 0].float()
    for head in range(1, parts.shape[1]):
        total += parts[:, head]
    return total.to(torch.bfloat16)
