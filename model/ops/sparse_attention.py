"""Attention of each query row over its own list of keys, K = V, with a sink (spec/model.md §3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # list slots per online-softmax block; fixes where the running maximum is taken


def sparse_attention(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """o_h = sum_t e^(s_t - M) v_t / (sum_t e^(s_t - M) + e^(z_h - M)), s_t = scale * q_h . k_t.

    bf16 operands, fp32 scores, exponentials rounded to bf16 before the value product, denominator fp32 from the unrounded ones.

    Args:
        q: [n, heads, dim] bf16. kv: [n, slots, dim] fp32 (bf16-exact). valid: [n, slots] bool. sink: [heads] fp32.
    Returns:
        [n, heads, dim] bf16; 0 where no slot is valid.
    """
    rows, heads, dim = q.shape
    q = q.float()
    running = torch.full((rows, heads), -1e30, dtype=torch.float32, device=q.device)
    denominator = torch.zeros((rows, heads), dtype=torch.float32, device=q.device)
    out = torch.zeros((rows, heads, dim), dtype=torch.float32, device=q.device)
    hidden = ~valid
    for start in range(0, kv.shape[1], BLOCK):
        block = kv[:, start : start + BLOCK]
        score = row_products(q, block.transpose(1, 2)) * scale
        score = score.masked_fill_(hidden[:, None, start : start + BLOCK], -torch.inf)
        top = torch.maximum(running, score.amax(-1))
        p = (score - top.unsqueeze(-1)).exp_()
        decay = (running - top).exp_()
        denominator = denominator * decay + p.sum(-1)
        out = out * decay.unsqueeze(-1) + row_products(p.to(torch.bfloat16).float(), block)
        running = top
    denominator = denominator + (sink - running).exp()
    return (out / denominator.unsqueeze(-1)).to(torch.bfloat16)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """[n, i, k] x [n, k, j] -> [n, i, j] fp32, one small product per row.

    A batched CPU product of one matrix may take another kernel than a batch of many, so a lone row is computed as one of two.
    """
    if a.device.type == "cpu" and a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
