"""Engram: an n-gram memory read that layers add to all streams (spec/model.md §9)."""

from __future__ import annotations

from torch import Tensor

from forebay.model.config import ModelConfig
from forebay.model.engram_map import HashConstants, engram_rows
from forebay.model.loading import Loader
from forebay.model.ops.engram_gate import engram_gate
from forebay.model.ops.linear import quantised_linear


class Engram:
    """One Engram layer. The table stays in host memory; the rows of a batch are all that is read of it."""

    def __init__(self, config: ModelConfig, layer: int, load: Loader, constants: HashConstants) -> None:
        self.slot = config.engram_layer_ids.index(layer)
        self.constants, self.eps, self.streams = constants, config.rms_norm_eps, config.hc_mult
        self.table, self.ops = load.engram_table(layer), load.ops
        self.wkv = load.fp8("wkv")
        self.q_weight, self.k_weight = load.tensor("q_weight"), load.tensor("k_weight")

    def rows(self, history: Tensor) -> Tensor:
        """Table rows of each token: [n, max_ngram] int64 classes -> [n, columns] int64."""
        return engram_rows(history, self.constants, self.slot)

    def __call__(self, streams: Tensor, rows: Tensor, text_mask: Tensor | None) -> Tensor:
        """streams [n, S, D] bf16, rows [n, columns] int64 (where the table is) -> [n, S, D] bf16."""
        memory = self.table.read(rows).to(streams.device)
        z = quantised_linear(self.ops.fp8_round(memory), self.wkv)
        key, value = z.split((z.shape[1] - streams.shape[2], streams.shape[2]), 1)
        weight = self.ops.stored(self.q_weight).float() * self.ops.stored(self.k_weight).float()
        return engram_gate(streams, key.unflatten(1, (self.streams, -1)), value, weight, self.eps, text_mask)
