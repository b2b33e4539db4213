"""Single-pass manifold hyper-connections: coefficients of S residual streams, collapse and mix (spec/model.md §7).

`pre` computed by one sub-layer collapses the streams for the *next* one; `post` and `comb` update the streams of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
    if raw.is_cpu and not raw.requires_grad:
        return _coefficients_numpy(raw, s, iterations, eps)
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
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _coefficients_numpy(raw: Tensor, streams: int, iterations: int, eps: float) -> Coefficients:
    """The same IEEE operations through numpy, with torch's sigmoid and exp: a call costs a third of what torch's dispatch does, and
    there are dozens of them at every layer twice. raw: [n, 2S + S*S] fp32."""
    s, values = streams, raw.numpy()
    gates = sigmoid(raw[:, : 2 * s])
    lone = len(values) == 1
    # [from, to, n]: each operation runs over contiguous rows; fewer dimensions are quicker, so a lone row has no third
    comb = values[0, 2 * s :].reshape(s, s) if lone else values[:, 2 * s :].T.reshape(s, s, -1)
    comb = torch.from_numpy(comb - np.maximum.reduce(comb, axis=1, keepdims=True)).exp_().numpy()
    comb = _sinkhorn_numpy(comb, iterations, eps)
    found = torch.from_numpy(np.ascontiguousarray(comb[None] if lone else comb.transpose(2, 0, 1)))
    return Coefficients(gates[:, :s] + eps, 2 * gates[:, s:], found)


def _sinkhorn_numpy(comb: NDArray[np.float32], iterations: int, eps: float) -> NDArray[np.float32]:
    """`_sinkhorn` of [S(from), S(to), n] or [S, S]. Sums run from the first to the last, so eps is added to them as one more row and
    column."""
    s = len(comb)
    padded = np.full((s + 1, s + 1, *comb.shape[2:]), eps, np.float32)
    by_row, by_column, c = padded[:s], padded[:, :s], padded[:s, :s]
    rows, columns = np.empty_like(comb[:, :1]), np.empty_like(comb[0])
    total, divide = np.add.reduce, np.divide
    total(comb, axis=1, out=rows, keepdims=True)
    np.add(comb / rows, np.float32(eps), c)
    for i in range(iterations):
        if i:
            total(by_row, axis=1, out=rows, keepdims=True)
            divide(c, rows, c)
        total(by_column, axis=0, out=columns)
        divide(c, columns, c)
    return c


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sub-layer input: sum_s pre[s] * X_s. streams [n, S, D] bf16, pre [n, S] fp32 -> [n, D] bf16."""
    total, *parts = (streams.float() * pre.unsqueeze(-1)).unbind(1)
    for part in parts:
        total = total + part
    return total.bfloat16()


def mix(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Stream update X'_k = post_k * y + sum_j comb[j, k] * X_j, fp32, rounded once.

    Args: streams [n, S, D] bf16, out [n, D] bf16, post [n, S], comb [n, S, S]. Returns [n, S, D] bf16.
    """
    weights = comb.unsqueeze(-1).unbind(1)  # per source stream: [n, S, 1]
    sources = streams.float().unsqueeze(2).unbind(1)  # [n, 1, D]
    total = weights[0] * sources[0]
    for weight, source in zip(weights[1:], sources[1:], strict=True):
        total += weight * source
    return (post.unsqueeze(-1) * out.float().unsqueeze(1) + total).bfloat16()
