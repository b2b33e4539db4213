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
    if q.is_cpu and q.shape[0] == 1:  # as for `row_products`, but once for all blocks
        return sparse_attention(q.expand(2, -1, -1), kv.expand(2, -1, -1), valid.expand(2, -1), sink, scale)[:1]
    q, hidden = q.float(), (~valid).unsqueeze(1)
    running = denominator = out = None
    for start in range(0, kv.shape[1], BLOCK):
        block = kv[:, start : start + BLOCK]
        score = row_products(q, block.transpose(1, 2)).mul_(scale).masked_fill_(hidden[:, :, start : start + BLOCK], -torch.inf)
        top = score.amax(-1, keepdim=True).clamp_(min=-1e30)
        if running is not None:
            top = torch.maximum(running, top)
        p = score.sub_(top).exp_()
        total, part = p.sum(-1, keepdim=True), row_products(p.bfloat16().float(), block)
        if running is not None and denominator is not None and out is not None:
            decay = (running - top).exp_()
            total, part = denominator.mul_(decay).add_(total), out.mul_(decay).add_(part)
        running, denominator, out = top, total, part
    assert running is not None and denominator is not None and out is not None
    return out.div_((sink.unsqueeze(-1) - running).exp_().add_(denominator)).bfloat16()


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """[n, i, k] x [n, k, j] -> [n, i, j] fp32, one small product per row.

    A batched CPU product of one matrix may take another kernel than a batch of many, so a lone row is computed as one of two.
    """
    if a.is_cpu and a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
