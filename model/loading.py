"""How layers get their weights: a prefix into a checkpoint, giving each matrix in the form it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forebay.model.checkpoint import RowReader, Weights
from forebay.model.config import ModelConfig
from forebay.model.experts import RoutedExperts
from forebay.model.ops.backend import SERVING, Ops
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, PlainWeight, StackedWeight, TileCache, Weight


class Meter:
    """Counts bytes as they are loaded and tells `progress` (bytes done, bytes in all, tensor name)."""

    def __init__(self, total: int, progress: Callable[[int, int, str], None] | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, nbytes: int, name: str) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, name)


class Loader:
    """Gives a layer the weights under its prefix, on its device, and the operations to use them with."""

    ops: Ops = SERVING

    def __init__(self, source: Weights, cache: TileCache, device: torch.device, meter: Meter, prefix: str = "") -> None:
        self.source, self.cache, self.device, self.meter, self.prefix = source, cache, device, meter, prefix

    def at(self, prefix: str) -> Loader:
        return Loader(self.source, self.cache, self.device, self.meter, f"{self.prefix}{prefix}.")

    def tensor(self, name: str) -> Tensor:
        found = self.source.tensor(self.prefix + name).to(self.device)
        self.meter.add(found.numel() * found.element_size(), self.prefix + name)
        return found

    def fp8(self, name: str) -> Fp8Weight:
        return Fp8Weight(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"), self.cache)

    def fp8_groups(self, name: str, groups: int) -> list[Fp8Weight]:
        """The equal runs of output rows of a block-diagonal matrix, over one stored tensor."""
        codes, scales = self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale")
        size = codes.shape[0] // groups
        return [Fp8Weight(codes, scales, self.cache, rows=(g * size, (g + 1) * size)) for g in range(groups)]

    def mxfp4(self, name: str) -> Mxfp4Weight:
        return Mxfp4Weight(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"), self.cache)

    def plain(self, name: str) -> PlainWeight:
        return PlainWeight(self.tensor(name), self.cache)

    def stack(self, parts: Sequence[Weight]) -> StackedWeight:
        """Weights of one input as one."""
        return StackedWeight(parts, self.cache)

    def experts(self, config: ModelConfig) -> RoutedExperts:
        """The routed experts below this prefix."""
        each = [self.at(f"experts.{e}") for e in range(config.n_routed_experts)]
        weights = [(e.mxfp4("w1"), e.mxfp4("w2"), e.mxfp4("w3")) for e in each]
        return RoutedExperts(weights, self.cache, config.swiglu_limit)

    def engram_table(self, layer: int) -> RowReader:
        """The Engram table of a layer, left where it is stored."""
        return self.source.engram_table(layer)
