"""Single-pass mHC around one sub-layer: the projection of the streams to its coefficients (spec/model.md §7)."""

from __future__ import annotations

from torch import Tensor

from forebay.model.config import ModelConfig
from forebay.model.loading import Loader
from forebay.model.ops.hyper_connections import Coefficients


class HyperConnection:
    """Parameters `hc_{name}_fn/base/scale`, all fp32."""

    def __init__(self, config: ModelConfig, name: str, load: Loader) -> None:
        self.streams, self.iterations, self.hc_eps, self.eps = config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        self.fn = load.plain(f"hc_{name}_fn")
        self.base = load.tensor(f"hc_{name}_base")
        self.ops = load.ops
        self.scale = self.ops.spread_scale(load.tensor(f"hc_{name}_scale"), self.streams)

    def __call__(self, streams: Tensor) -> Coefficients:
        """streams [n, S, D] bf16, as they are before the sub-layer -> its coefficients."""
        mixes = self.ops.project(streams, self.fn, self.eps)
        return self.ops.coefficients(mixes, self.scale, self.base, self.streams, self.iterations, self.hc_eps)
