"""Mixture of experts: router, MXFP4 routed experts, one FP8 shared expert (spec/model.md §8)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.config import ModelConfig
from forebay.model.loading import Loader
from forebay.model.ops import formats
from forebay.model.ops.linear import StackedWeight, TileCache, Weight, fp32_linear, matmul, quantised_linear
from forebay.model.ops.router import route
from forebay.model.ops.swiglu import swiglu


class Expert:
    """One gated feed-forward: w1 gate and w3 up, stacked since both read the input, and w2 down."""

    def __init__(self, w1: Weight, w2: Weight, w3: Weight, cache: TileCache) -> None:
        self.up, self.down = StackedWeight([w1, w3], cache), w2


class MoE:
    """The feed-forward part of every layer."""

    def __init__(self, config: ModelConfig, load: Loader) -> None:
        self.topk, self.scale, self.limit = config.num_experts_per_tok, config.routed_scaling_factor, config.swiglu_limit
        # The reference leaves the score of a single expert as it is.
        self.normalise, self.temperature = config.norm_topk_prob and self.topk > 1, config.gate_temp
        self.row_tile = load.cache.row_tile
        gate = load.at("gate")
        self.gate = gate.plain("weight")
        self.bias, self.bias_image = gate.tensor("bias"), gate.tensor("bias_vl")
        experts = [load.at(f"experts.{e}") for e in range(config.n_routed_experts)]
        self.experts = [Expert(e.mxfp4("w1"), e.mxfp4("w2"), e.mxfp4("w3"), load.cache) for e in experts]
        shared = load.at("shared_experts")
        self.shared = Expert(shared.fp8("w1"), shared.fp8("w2"), shared.fp8("w3"), load.cache) if config.n_shared_experts else None

    def route(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts and weights per row, best first: [n, topk] int64, [n, topk] fp32."""
        logits = fp32_linear(x, self.gate)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        bias = self.bias if image_mask is None else torch.where(image_mask.unsqueeze(-1), self.bias_image, self.bias)
        return route(logits, bias, self.topk, self.scale, normalise=self.normalise)

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """x [n, D] bf16 with its routing -> [n, D] bf16."""
        rounded = formats.fp8_round(x)
        y = self._routed(rounded, indices, weights)
        if self.shared is not None:
            gate, up = quantised_linear(rounded, self.shared.up).chunk(2, -1)
            y = y + quantised_linear(formats.fp8_round(swiglu(gate, up, self.limit)), self.shared.down).float()
        return y.to(torch.bfloat16)

    def _routed(self, rounded: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs in ascending expert order, [n, D] fp32.

        Assignments are laid out expert by expert, each run padded to whole row tiles, so the elementwise work between the two linears
        runs once for all experts and no product mixes two experts.
        """
        n, topk = indices.shape
        experts, slot = indices.sort(-1)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        starts, runs, total = [], [], 0
        for expert, count in enumerate(counts):
            if count:
                starts.append(torch.arange(total, total + count))
                runs.append((expert, total, count))
                total += self._padded(count)
        place = torch.empty(n * topk, dtype=torch.int64, device=rounded.device)
        place[order] = torch.cat(starts).to(rounded.device)
        x = torch.zeros((total, rounded.shape[1]), dtype=torch.float32, device=rounded.device)
        x[place] = rounded.repeat_interleave(topk, 0)
        weight = torch.zeros(total, dtype=torch.float32, device=rounded.device)
        weight[place] = weights.gather(-1, slot).flatten()
        gate, up = self._each([(self.experts[e].up, start, count) for e, start, count in runs], x).chunk(2, -1)
        h = formats.fp8_round(swiglu(gate, up, self.limit, weight))
        out = self._each([(self.experts[e].down, start, count) for e, start, count in runs], h).float()
        parts = out.index_select(0, place).view(n, topk, -1)
        y = parts[:, 0]
        for t in range(1, topk):
            y = y + parts[:, t]
        return y

    def _each(self, runs: list[tuple[Weight, int, int]], x: Tensor) -> Tensor:
        """Each run of rows (weight, first row, count) through its own weight, in order: [rows, in] fp32 -> [rows, out] bf16.

        Runs are padded to whole row tiles and follow each other without a gap.
        """
        parts = [matmul(x[start : start + self._padded(count)], weight) for weight, start, count in runs]
        return torch.cat(parts).to(torch.bfloat16)

    def _padded(self, rows: int) -> int:
        tile = self.row_tile or 1
        return -(-rows // tile) * tile
