"""Single-pass manifold hyper-connections: coefficients of S residual streams, collapse and mix (spec/model.md §7).

`pre` computed by one sub-layer collapses the streams for the *next* one; `post` and `comb` update the streams of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.model.ops.elementwise import sigmoid


class Coefficients(NamedTuple):
    """pre [n, S], post [n, S], comb [n, S(from), S(to)]; all fp32."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def coefficients(mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float) -> Coefficients:
    """Turn the raw projection into the three coefficient sets.

    Args:
        mixes: [n, 2S + S*S] fp32, already multiplied by the streams' reciprocal RMS.
        scale: [3] fp32 (pre, post, comb). base: [2S + S*S] fp32.
    """
    s = streams
    pre = sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s)
    # exp(x - max) / sum, not torch.softmax: one ulp here is amplified by every later layer.
    comb = (comb - comb.amax(-1, keepdim=True)).exp()
    return Coefficients(pre, post, _sinkhorn(comb, iterations, eps))


def _sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Alternate row and column normalisation of positive [n, S, S]; the first row step has no eps in its denominator."""
    if comb.device.type == "cpu":
        return _sinkhorn_numpy(comb, iterations, eps)
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _sinkhorn_numpy(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """The same IEEE operations through numpy: 160 tiny ops per call cost a third of what torch's dispatch does, at every layer twice."""
    c = np.ascontiguousarray(comb.numpy().transpose(1, 2, 0))  # [from, to, n]: each op runs over contiguous rows
    e = np.float32(eps)
    s = c.shape[0]
    rows, cols = np.empty((s, 1, c.shape[2]), np.float32), np.empty((1, s, c.shape[2]), np.float32)
    add = np.add.reduce
    add(c, axis=1, keepdims=True, out=rows)
    c /= rows
    c += e
    for i in range(iterations):
        if i:
            add(c, axis=1, keepdims=True, out=rows)
            rows += e
            c /= rows
        add(c, axis=0, keepdims=True, out=cols)
        cols += e
        c /= cols
    return torch.from_numpy(np.ascontiguousarray(c.transpose(2, 0, 1)))


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sub-layer input: sum_s pre[s] * X_s. streams [n, S, D] bf16, pre [n, S] fp32 -> [n, D] bf16."""
    x = pre[:, 0, None] * streams[:, 0].float()
    for s in range(1, streams.shape[1]):
        x = x + pre[:, s, None] * streams[:, s].float()
    return x.to(torch.bfloat16)


def mix(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Stream update X'_k = post_k * y + sum_j comb[j, k] * X_j, fp32, rounded once.

    Args: streams [n, S, D] bf16, out [n, D] bf16, post [n, S], comb [n, S, S]. Returns [n, S, D] bf16.
    """
    x = streams.float()
    total = comb[:, 0, :, None] * x[:, 0, None]
    for j in range(1, x.shape[1]):
        total = total + comb[:, j, :, None] * x[:, j, None]
    return (post.unsqueeze(-1) * out.float().unsqueeze(1) + total).to(torch.bfloat16)
