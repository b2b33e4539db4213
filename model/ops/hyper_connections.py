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
        scale, base: [2S + S*S] fp32; the checkpoint's three scales (pre, post, comb) repeated per column, see `spread_scale`.
    """
    s = streams
    raw = mixes * scale + base
    gates = sigmoid(raw[:, : 2 * s])
    comb = raw[:, 2 * s :].unflatten(1, (s, s))
    # exp(x - max) / sum, not torch.softmax: one ulp here is amplified by every later layer.
    comb = (comb - comb.amax(-1, keepdim=True)).exp()
    return Coefficients(gates[:, :s] + eps, 2 * gates[:, s:], _sinkhorn(comb, iterations, eps))


def spread_scale(scale: Tensor, streams: int) -> Tensor:
    """[3] fp32 (pre, post, comb) -> [2S + S*S], one factor per column of the projection."""
    return scale.repeat_interleave(torch.tensor([streams, streams, streams * streams], device=scale.device))


def _sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Alternate row and column normalisation of positive [n, S, S]; the first row step has no eps in its denominator."""
    if comb.is_cpu:
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
    first, *rest = (streams.float() * pre.unsqueeze(-1)).unbind(1)
    for part in rest:
        first = first + part
    return first.to(torch.bfloat16)


def mix(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Stream update X'_k = post_k * y + sum_j comb[j, k] * X_j, fp32, rounded once.

    Args: streams [n, S, D] bf16, out [n, D] bf16, post [n, S], comb [n, S, S]. Returns [n, S, D] bf16.
    """
    weights = comb.unsqueeze(-1).unbind(1)  # per source stream: [n, S, 1]
    sources = streams.float().unsqueeze(2).unbind(1)  # [n, 1, D]
    total = weights[0] * sources[0]
    for weight, source in zip(weights[1:], sources[1:], strict=True):
        total += weight * source
    return (post.unsqueeze(-1) * out.float().unsqueeze(1) + total).to(torch.bfloat16)
