"""The operations of which training needs differentiable versions, as one object that layers are built with.

Serving uses `Ops` itself: the functions of this package, which quantise for real. Training (model/demo/train) overrides them with versions
whose gradient passes the roundings. What is differentiable as it stands (rotations, small norms, SwiGLU, pooling) is called directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import Coefficients, coefficients, collapse, mix, spread_scale
from forebay.model.ops.linear import Weight, fp32_linear
from forebay.model.ops.rms_norm import rms_norm


class Ops:
    """Reference and serving versions; each forwards to the op that documents it."""

    def fp8_round(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 linear: [..., n] -> [..., n] with FP8 values (`formats.fp8_round`)."""
        return formats.fp8_round(x)

    def index_round(self, x: Tensor) -> Tensor:
        """Index queries as FP4 values, any shape (`formats.index_round`)."""
        return formats.index_round(x)

    def spread_scale(self, scale: Tensor, streams: int) -> Tensor:
        """The mHC scales as `coefficients` takes them."""
        return spread_scale(scale, streams)

    def project(self, streams: Tensor, fn: Weight, eps: float) -> Tensor:
        """Raw mHC coefficients (spec §7): fn times the flattened streams, times their reciprocal RMS. [n, S, D] -> [n, 2S + S*S] fp32."""
        flat = streams.flatten(1).float()
        return fp32_linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)

    def coefficients(self, mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float) -> Coefficients:
        """`hyper_connections.coefficients`."""
        return coefficients(mixes, scale, base, streams, iterations, eps)

    def collapse_norm(self, streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Input of a sub-layer: streams [n, S, D], pre [n, S], weight [D] -> [n, D] bf16."""
        return rms_norm(collapse(streams, pre), weight, eps)

    def mix(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """`hyper_connections.mix`."""
        return mix(streams, out, post, comb)


SERVING = Ops()
