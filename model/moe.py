"""Mixture of experts: router, MXFP4 routed experts, one FP8 shared expert (spec/model.md §8)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.config import ModelConfig
from forebay.model.experts import RoutedExperts
from forebay.model.loading import Loader
from forebay.model.ops.linear import fp32_linear, quantised_linear
from forebay.model.ops.router import route
from forebay.model.ops.swiglu import swiglu


class MoE:
    """The feed-forward part of every layer."""

    def __init__(self, config: ModelConfig, load: Loader) -> None:
        self.topk, self.scale, self.limit = config.num_experts_per_tok, config.routed_scaling_factor, config.swiglu_limit
        # The reference leaves the score of a single expert as it is.
        self.normalise, self.temperature = config.norm_topk_prob and self.topk > 1, config.gate_temp
        gate = load.at("gate")
        self.gate = gate.plain("weight")
        self.bias, self.bias_image = gate.tensor("bias"), gate.tensor("bias_vl")
        self.ops, self.experts = load.ops, load.experts(config)
        shared = load.at("shared_experts")
        self.shared = config.n_shared_experts > 0
        if self.shared:
            self.shared_up, self.shared_down = load.stack([shared.fp8("w1"), shared.fp8("w3")]), shared.fp8("w2")

    def route(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts and weights per row, best first: [n, topk] int64, [n, topk] fp32."""
        logits = fp32_linear(x, self.gate)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        bias = self.bias if image_mask is None else torch.where(image_mask.unsqueeze(-1), self.bias_image, self.bias)
        return route(logits, bias, self.topk, self.scale, normalise=self.normalise)

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """x [n, D] bf16 with its routing -> [n, D] bf16."""
        rounded = self.ops.fp8_round(x)
        if self.shared and x.shape[0] == 1 and x.is_cpu and isinstance(self.experts, RoutedExperts):
            return self.experts.lone(rounded, indices, weights, (self.shared_up, self.shared_down)).bfloat16()
        y = self.experts(rounded, indices, weights)
        if self.shared:
            gate, up = quantised_linear(rounded, self.shared_up).chunk(2, -1)
            y = y + quantised_linear(self.ops.fp8_round(swiglu(gate, up, self.limit)), self.shared_down).float()
        return y.to(torch.bfloat16)
