"""How layers get their weights: a prefix into a checkpoint, giving each matrix in the form it is stored in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.model.checkpoint import Weights
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, PlainWeight, TileCache


class Meter:
    """Counts bytes as they are loaded and tells `progress` (bytes done, bytes in all, tensor name)."""

    def __init__(self, total: int, progress: Callable[[int, int, str], None] | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, nbytes: int, name: str) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, name)


class Loader:
    """Gives a layer the weights under its prefix, on its device."""

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
