"""The Engram read on a GPU (spec/model.md §9): row ids are hashed, rows gathered and gated on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.checkpoint import RowReader
from forebay.model.config import ModelConfig
from forebay.model.engram_map import engram_rows, hash_constants, window_classes
from forebay.model.fused.half import Half
from forebay.model.fused.weights import DeviceTable, EngramWeights
from forebay.model.fused.work import Work
from forebay.model.ops import formats
from forebay.model.ops.kernels.streams_ops import engram_gate, engram_gather


class FusedEngram:
    """Token classes and the reads of all Engram layers."""

    def __init__(self, config: ModelConfig, token_map: Tensor | None, device: torch.device, work: Work) -> None:
        self.config, self.device, self.work = config, device, work
        if token_map is not None:
            self.token_map = token_map.to(device, torch.int64)
            self.pad_class = int(token_map[config.engram_pad_token_id])
            self.host_map, self.host_constants = token_map.to(torch.int64), hash_constants(config)
            self.constants = self.host_constants.to(device)

    def history(self, token_ids: Tensor, lookback: Tensor, image_mask: Tensor | None) -> Tensor | None:
        """Classes [n, max_ngram] int64 of each token and those before it; image positions are barriers. None without Engram layers.

        As `engram_map.window_classes`, without looking at the ids: they were checked on the host.
        """
        if not self.config.engram_layer_ids:
            return None
        ids = token_ids if image_mask is None else token_ids.masked_fill(image_mask, -1)
        window = torch.cat((ids.unsqueeze(1), lookback), 1)
        alive = (window >= 0).to(torch.uint8).cumprod(1).bool()
        return self.token_map[window.clamp_min(0)].where(alive, self.pad_class)

    def buffer(self, weights: EngramWeights, n: int) -> Tensor | None:
        """Where `fetch` puts the rows of n tokens; None for a table on the device, which needs no fetching."""
        if isinstance(weights.table, DeviceTable):
            return None
        width = weights.wkv.codes.shape[1]
        return torch.zeros((n, width), dtype=torch.bfloat16, device=self.device)

    def fetch(self, weights: EngramWeights, token_ids: Tensor, lookback: Tensor) -> Tensor:
        """Rows of a table that is not on the device, FP8-rounded [n, columns * width] bf16; ids and lookback as the host has them."""
        assert not isinstance(weights.table, DeviceTable)
        classes = window_classes(torch.cat((token_ids.unsqueeze(1), lookback), 1), self.host_map, self.pad_class)
        return self._rounded(weights.table, engram_rows(classes, self.host_constants, weights.slot))

    def _rounded(self, table: RowReader, rows: Tensor) -> Tensor:
        return formats.fp8_round(table.read(rows).to(self.device)).bfloat16()

    def read(self, weights: EngramWeights, streams: Tensor, history: Tensor, half: Half, layer: int) -> None:
        """Add what the layer remembers to streams [n, S, D] bf16, in place."""
        rows = engram_rows(history, self.constants, weights.slot)
        half.note(f"layer{layer}.engram_rows", rows)
        table, n = weights.table, streams.shape[0]
        if isinstance(table, DeviceTable):
            rounded = torch.empty((n, rows.shape[1] * table.codes.shape[1]), dtype=torch.bfloat16, device=self.device)
            engram_gather(table.codes, table.scales, rows, rounded, modulo=table.modulo)
        else:
            fetched = half.engram.get(layer)
            rounded = self._rounded(table, rows.cpu()) if fetched is None else fetched
        z = torch.empty((n, weights.wkv.codes.shape[0]), dtype=torch.bfloat16, device=self.device)
        weights.wkv(rounded, z, self.work.meeting)
        mask = None if half.image_mask is None else ~half.image_mask
        engram_gate(streams, z, weights.q, weights.k, self.config.rms_norm_eps, mask, streams)
