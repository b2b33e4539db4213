"""The routed experts of a layer over stored MXFP4 weights (spec/model.md §8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.linear import StackedWeight, TileCache, Weight, matmul
from forebay.model.ops.swiglu import swiglu


class RoutedExperts:
    """Gated feed-forwards of which every row uses a few: (w1 gate, w2 down, w3 up) each; w1 and w3 are stacked, both read the input."""

    def __init__(self, experts: Sequence[tuple[Weight, Weight, Weight]], cache: TileCache, limit: float) -> None:
        self.up = [StackedWeight([w1, w3], cache) for w1, _, w3 in experts]
        self.down = [w2 for _, w2, _ in experts]
        self.limit, self.row_tile = limit, cache.row_tile

    def __call__(self, rounded: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs in ascending expert order, [n, D] fp32.

        Assignments are laid out expert by expert, each run padded to whole row tiles, so the elementwise work between the two linears
        runs once for all experts and no product mixes two experts.

        Args: rounded [n, D], FP8-rounded input; indices [n, topk] int64 and weights [n, topk] fp32 of the router.
        """
        n, topk = indices.shape
        experts, slot = indices.sort(-1)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.up)).tolist()
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
        gate, up = self._each([(self.up[e], start, count) for e, start, count in runs], x).chunk(2, -1)
        h = formats.fp8_round(swiglu(gate, up, self.limit, weight))
        out = self._each([(self.down[e], start, count) for e, start, count in runs], h).float()
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
