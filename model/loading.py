"""How layers get their weights: a prefix into a checkpoint, giving each matrix in the form it is stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.checkpoint import Weights
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, PlainWeight, TileCache


class Loader:
    """Gives a layer the weights under its prefix, on its device."""

    def __init__(self, source: Weights, cache: TileCache, device: torch.device, prefix: str = "") -> None:
        self.source, self.cache, self.device, self.prefix = source, cache, device, prefix

    def at(self, prefix: str) -> Loader:
        return Loader(self.source, self.cache, self.device, f"{self.prefix}{prefix}.")

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self.prefix + name).to(self.device)

    def fp8(self, name: str, rows: tuple[int, int] | None = None) -> Fp8Weight:
        return Fp8Weight(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"), self.cache, rows=rows)

    def mxfp4(self, name: str) -> Mxfp4Weight:
        return Mxfp4Weight(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"), self.cache)

    def plain(self, name: str) -> PlainWeight:
        return PlainWeight(self.tensor(name), self.cache)
