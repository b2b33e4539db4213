"""The routed experts of a layer over stored MXFP4 weights (spec/model.md §8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.linear import StackedWeight, TileCache, Weight
from forebay.model.ops.swiglu import swiglu


class RoutedExperts:
    """Gated feed-forwards of which every row uses a few: (w1 gate, w2 down, w3 up) each; w1 and w3 are stacked, both read the input."""

    def __init__(self, experts: Sequence[tuple[Weight, Weight, Weight]], cache: TileCache, limit: float) -> None:
        self.up = [StackedWeight([w1, w3], cache) for w1, _, w3 in experts]
        self.down = [w2 for _, w2, _ in experts]
        self.limit = limit
        self.one = torch.ones(1)

    def __call__(self, rounded: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs in ascending expert order, [n, D] fp32.

        Assignments are laid out expert by expert, so that the elementwise work between the two linears runs once for all experts.

        Args: rounded [n, D], FP8-rounded input; indices [n, topk] int64 and weights [n, topk] fp32 of the router.
        """
        topk = indices.shape[1]
        experts, slot = indices.sort(-1)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        runs = [(expert, count) for expert, count in enumerate(torch.bincount(flat, minlength=len(self.up)).tolist()) if count]
        weight = weights.gather(-1, slot).flatten().index_select(0, order)
        out = self._run(runs, rounded.index_select(0, order // topk), weight)
        y, *rest = torch.empty_like(out).index_copy_(0, order, out).view(-1, topk, out.shape[1]).unbind(1)
        for part in rest:
            y = y + part
        return y

    def lone(self, rounded: Tensor, indices: Tensor, weights: Tensor, shared: tuple[Weight, Weight]) -> Tensor:
        """One row: its assignments need no sorting, only their outputs, and the shared expert (up and gate, down) is one more, of weight
        1 and added last. Arguments as above, n = 1; the shared one's output included."""
        experts = indices[0].tolist()
        count = len(experts) + 1
        up = [*(self.up[expert] for expert in experts), shared[0]]
        down = [*(self.down[expert] for expert in experts), shared[1]]
        gate, rise = torch.cat([weight.multiply(rounded) for weight in up]).bfloat16().chunk(2, -1)
        h = formats.fp8_round(swiglu(gate, rise, self.limit, torch.cat((weights[0], self.one))))
        parts = h.split_with_sizes([1] * count)
        outs = torch.cat([weight.multiply(part) for weight, part in zip(down, parts, strict=True)]).bfloat16().float()
        y, *rest = (outs[place : place + 1] for place in [*sorted(range(count - 1), key=experts.__getitem__), count - 1])
        for part in rest:
            y = y + part
        return y

    def _run(self, runs: list[tuple[int, int]], x: Tensor, weight: Tensor) -> Tensor:
        """Outputs of runs (expert, its rows) that follow each other in x [rows, D], weighted by `weight` [rows] -> [rows, D] fp32."""
        gate, up = self._each(self.up, runs, x).chunk(2, -1)
        return self._each(self.down, runs, formats.fp8_round(swiglu(gate, up, self.limit, weight))).float()

    def _each(self, weights: Sequence[Weight], runs: list[tuple[int, int]], x: Tensor) -> Tensor:
        """Each run through its expert's weight, in order: [rows, in] fp32 -> [rows, out] bf16."""
        parts = x.split_with_sizes([count for _, count in runs])
        return torch.cat([weights[expert].multiply(part) for (expert, _), part in zip(runs, parts, strict=True)]).bfloat16()
