"""The backbone: encoder half, decoder half, head (spec/model.md §2.4, architecture §4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from forebay.model.attention import Attention, layer_frequencies
from forebay.model.batch import DecoderRows, ForwardBatch, HalfState, embed
from forebay.model.checkpoint import Weights
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.engram import Engram
from forebay.model.engram_map import hash_constants, window_classes
from forebay.model.hyper import HyperConnection
from forebay.model.loading import Loader, Meter
from forebay.model.moe import MoE
from forebay.model.names import expected_tensors
from forebay.model.ops.hyper_connections import collapse
from forebay.model.ops.linear import ROW_TILE, TileCache, fp32_linear

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Streams:
    """What flows between layers: streams [n, S, D] bf16 and the collapse weights of the next sub-layer, pre [n, S] fp32."""

    x: Tensor
    pre: Tensor

    def take(self, index: Tensor | None) -> Streams:
        return self if index is None else Streams(self.x.index_select(0, index), self.pre.index_select(0, index))


class Layer:
    """One block: Engram if it has one, attention, mixture of experts."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Loader, engram: Engram | None, freqs: Tensor) -> None:
        self.plan, self.eps, self.engram, self.ops = plan, config.rms_norm_eps, engram, load.ops
        self.hc_attn, self.hc_ffn = HyperConnection(config, "attn", load), HyperConnection(config, "ffn", load)
        self.attn_norm, self.ffn_norm = load.tensor("attn_norm.weight"), load.tensor("ffn_norm.weight")
        self.attention = Attention(config, plan, load.at("attn"), freqs)
        self.moe = MoE(config, load.at("ffn"))

    def read_memory(self, s: Streams, engram_rows: Tensor | None, state: HalfState) -> Streams:
        """Add the Engram read, if this layer has one. engram_rows [n, columns] int64."""
        if self.engram is None or engram_rows is None:
            return s
        state.note(f"layer{self.plan.index}.engram_rows", engram_rows)
        mask = None if state.image_mask is None else ~state.image_mask
        return Streams(self.engram(s.x, engram_rows, mask), s.pre)

    def attention_input(self, s: Streams) -> Tensor:
        """[n, D] bf16: what projections, compressor and indexer of this layer read."""
        return self.ops.collapse_norm(s.x, s.pre, self.attn_norm, self.eps)

    def store_global(self, s: Streams, state: HalfState) -> None:
        """Only write this layer's entries; the rows go no further. For prompt rows at the first decoder layer."""
        self.attention.store_global(self.attention_input(s), state)

    def __call__(self, s: Streams, state: HalfState, *, stored: bool = False) -> Streams:
        """Run the block. `stored`: the entries of these rows have been written already."""
        name = f"layer{self.plan.index}"
        attn = self.hc_attn(s.x)
        x = self.attention_input(s)
        if not stored:
            self.attention.store_global(x, state)
        y = self.attention(x, state)
        state.note(f"{name}.attn_in", x)
        state.note(f"{name}.attn_out", y)
        streams = self.ops.mix(s.x, y, attn.post, attn.comb)
        ffn = self.hc_ffn(streams)
        x = self.ops.collapse_norm(streams, attn.pre, self.ffn_norm, self.eps)
        indices, weights = self.moe.route(x, state.image_mask)
        state.note(f"{name}.router_indices", indices)
        state.note(f"{name}.router_weights", weights)
        y = self.moe(x, indices, weights)
        state.note(f"{name}.ffn_in", x)
        state.note(f"{name}.ffn_out", y)
        return Streams(self.ops.mix(streams, y, ffn.post, ffn.comb), ffn.pre)


def _inference(method: Callable[P, R]) -> Callable[P, R]:
    """Without gradients, but in training."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if cast(Backbone, args[0]).trains:
            return method(*args, **kwargs)  # `inference_mode(False)` would turn gradients on where the caller turned them off
        with torch.inference_mode():
            return method(*args, **kwargs)

    return run


class Backbone:
    """All layers of one checkpoint on one device.

    A prompt costs `encode` for every token and `decode` for its last window; a generated token costs both. The first decoder layer
    stores its entries for every row inside `encode`, since later rows attend to all of them.
    """

    Batch = ForwardBatch

    def __init__(
        self,
        source: Weights,
        *,
        device: str | torch.device = "cpu",
        weight_cache_bytes: int = 512 << 20,
        batch_invariant: bool = True,
        progress: Callable[[int, int, str], None] | None = None,
        load: Loader | None = None,
    ) -> None:
        """`load`: where weights and operations come from instead of the checkpoint; a training one makes the network differentiable."""
        self.config: ModelConfig = source.config
        self.device = torch.device(device)
        self.topology = self.config.topology()
        self.trains = load is not None
        if load is None:
            cache = TileCache(weight_cache_bytes, ROW_TILE if batch_invariant else None)
            load = Loader(source, cache, self.device, Meter(_loaded_bytes(self.config), progress))
        self.embed = load.tensor("embed.weight")
        self.norm, self.ops = load.tensor("norm.weight"), load.ops
        self.head = load.plain("head.weight")
        self.token_map = source.token_map().to(torch.int64) if self.config.engram_layer_ids else None
        constants = None
        if self.token_map is not None:
            self.pad_class = int(self.token_map[self.config.engram_pad_token_id])
            constants = hash_constants(self.config).to(self.token_map.device)
        freqs = [table.to(self.device) for table in layer_frequencies(self.config)]
        self.layers: list[Layer] = []
        for plan in self.topology.layers:
            at = load.at(f"layers.{plan.index}")
            engram = Engram(self.config, plan.index, at.at("engram"), constants) if plan.engram and constants is not None else None
            self.layers.append(Layer(self.config, plan, at, engram, freqs[plan.ratio > 0]))

    @_inference
    def encode(self, batch: ForwardBatch) -> Streams:
        """Run the encoder half on every row and store all global KV, the first decoder layer's included.

        Returns the streams entering the decoder half, one row per batch row.
        """
        state = HalfState(batch.encoder, batch.spans, batch.tables, batch.memory, batch.record, image_mask=batch.image_mask)
        embedded = embed(self.embed, batch.token_ids, batch.images)
        s = Streams(embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1), self._first_pre(embedded.shape[0]))
        history = self._history(batch)
        for layer in self.layers[: self.topology.cut]:
            s = layer(layer.read_memory(s, self._rows(layer, history), state), state)
        first = self.layers[self.topology.cut]
        s = first.read_memory(s, self._rows(first, history), state)
        first.store_global(s, state)
        state.note("encoder.out_h", s.x)
        state.note("encoder.out_pre_mix", s.pre)
        return s

    @_inference
    def decode(self, s: Streams, chosen: DecoderRows) -> Tensor:
        """Run the decoder half on the chosen rows -> final hidden state [n, D] bf16, in row order.

        Args: s, what `encode` returned for the whole batch.
        """
        batch = chosen.batch
        mask = batch.image_mask if batch.image_mask is None or chosen.index is None else batch.image_mask.index_select(0, chosen.index)
        state = HalfState(chosen.rows, chosen.spans, chosen.tables, batch.memory, batch.record, image_mask=mask)
        history = self._history(batch, chosen.index)
        s = s.take(chosen.index)
        for layer in self.layers[self.topology.cut :]:
            first = layer.plan.index == self.topology.cut
            if not first:
                s = layer.read_memory(s, self._rows(layer, history), state)
            s = layer(s, state, stored=first)
        return collapse(s.x, s.pre)

    @_inference
    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden state [n, D] bf16 -> [n, vocab] fp32."""
        return fp32_linear(self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.head)

    def _first_pre(self, rows: int) -> Tensor:
        """Embeddings are collapsed by taking the first stream."""
        pre = torch.zeros((rows, self.config.hc_mult), dtype=torch.float32, device=self.device)
        pre[:, 0] = 1.0
        return pre

    def _history(self, batch: ForwardBatch, index: Tensor | None = None) -> Tensor | None:
        """Token classes [n, max_ngram] int64 where the token map is, on the host in serving; image positions are barriers."""
        if self.token_map is None:
            return None
        ids = batch.token_ids if batch.image_mask is None else batch.token_ids.masked_fill(batch.image_mask, -1)
        window = torch.cat((ids.unsqueeze(1), batch.lookback), 1)
        if index is not None:
            window = window.index_select(0, index)
        return window_classes(window.to(self.token_map.device), self.token_map, self.pad_class)

    def _rows(self, layer: Layer, history: Tensor | None) -> Tensor | None:
        return layer.engram.rows(history) if layer.engram is not None and history is not None else None


def _loaded_bytes(config: ModelConfig) -> int:
    """Bytes that loading takes from a checkpoint: the backbone but for the Engram tables, which stay where they are."""
    return sum(spec.nbytes for spec in expected_tensors(config).values() if spec.part != "engram tables")
