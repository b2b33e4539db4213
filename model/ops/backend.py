"""The operations of which training needs differentiable versions, as one object that layers are built with.

Serving uses `Ops` itself: the functions of this package, which quantise for real. Training (model/demo/train) overrides them with versions
whose gradient passes the roundings. What is differentiable as it stands (SwiGLU, pooling, the router, the Engram gate) is called directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import Coefficients, coefficients, collapse, mix, spread_scale
from forebay.model.ops.linear import Weight, fp32_linear
from forebay.model.ops.rms_norm import reciprocal_rms, rms_norm
from forebay.model.ops.rope import Turn, rotate


class Ops:
    """Reference and serving versions; each forwards to the op that documents it."""

    def fp8_round(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 linear: [..., n] -> [..., n] with FP8 values (`formats.fp8_round`)."""
        return formats.fp8_round(x)

    def index_round(self, x: Tensor) -> Tensor:
        """Index queries as FP4 values, any shape (`formats.index_round`)."""
        return formats.index_round(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm.rms_norm`."""
        return rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, turn: Turn, *, inverse: bool = False) -> Tensor:
        """`rope.rotate`."""
        return rotate(x, turn, inverse=inverse)

    def grouped_linear(self, out: Tensor, weights: Sequence[Weight]) -> Tensor:
        """A block-diagonal fp32 product: heads [n, H, dim] bf16 in as many equal groups as there are weights -> [n, sum of outs] bf16."""
        parts = out.float().unflatten(1, (len(weights), -1)).flatten(2).unbind(1)
        return torch.cat([fp32_linear(part, w) for part, w in zip(parts, weights, strict=True)], -1).bfloat16()

    def stored(self, vector: Tensor) -> Tensor:
        """A vector of the checkpoint as it is stored."""
        return vector

    def index_input(self, latent: Tensor) -> Tensor:
        """What index keys are made of, of a compressed latent."""
        return latent

    def spread_scale(self, scale: Tensor, streams: int) -> Tensor:
        """The mHC scales as `coefficients` takes them."""
        return spread_scale(scale, streams)

    def project(self, streams: Tensor, fn: Weight, eps: float) -> Tensor:
        """Raw mHC coefficients (spec §7): fn times the flattened streams, times their reciprocal RMS. [n, S, D] -> [n, 2S + S*S] fp32."""
        flat = streams.flatten(1).float()
        return fp32_linear(flat, fn) * reciprocal_rms(flat, eps)

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
