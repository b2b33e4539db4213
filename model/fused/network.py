"""The backbone on a GPU (spec/model.md §2.4): `model.network` with every sub-layer as a few kernels over stored formats.

Equal to `Backbone` but for the order of fp32 sums; score ties always go to the lower entry. It runs on a CPU too while TRITON_INTERPRET=1,
which is how its tests compare it with `Backbone`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.model.attention import layer_frequencies
from forebay.model.batch import ImageRows, embed
from forebay.model.checkpoint import Weights
from forebay.model.fused.attention import FusedAttention
from forebay.model.fused.engram import FusedEngram
from forebay.model.fused.half import Half
from forebay.model.fused.rows import FusedBatch, FusedDecoderRows, HalfRows
from forebay.model.fused.weights import FusedLoader, LayerWeights, wide_bytes
from forebay.model.fused.work import Work, product
from forebay.model.loading import Meter
from forebay.model.names import expected_tensors
from forebay.model.ops.hyper_connections import Coefficients
from forebay.model.ops.kernels.moe_ops import route
from forebay.model.ops.kernels.streams_ops import Input
from forebay.model.ops.rms_norm import rms_norm


@dataclass
class Flow:
    """What enters a layer: streams [n, S, D] bf16, its normed input x [n, D] bf16, the same FP8-rounded, and coefficients."""

    streams: Tensor
    x: Tensor
    rounded: Tensor
    coefficients: Coefficients

    def take(self, index: Tensor | None) -> Flow:
        if index is None:
            return self
        taken = [a.index_select(0, index) for a in (self.streams, self.x, self.rounded, *self.coefficients)]
        return Flow(taken[0], taken[1], taken[2], Coefficients(*taken[3:]))


class FusedBackbone:
    """All layers of one checkpoint on one GPU; `encode`, `decode` and `logits` as of `Backbone`."""

    Batch = FusedBatch

    def __init__(
        self, source: Weights, *, device: str | torch.device = "cuda", progress: Callable[[int, int, str], None] | None = None
    ) -> None:
        """
        Raises:
            ConfigError: a size that the kernels cannot take.
        """
        self.config, self.device = source.config, torch.device(device)
        self.topology = self.config.topology()
        self.ratios = sorted({plan.ratio for plan in self.topology.layers if plan.ratio})
        stored = sum(spec.nbytes for spec in expected_tensors(self.config).values() if spec.part != "engram tables")
        # The decoder half sees a window of a prompt, so the encoder half's copies are worth more of what nothing else is likely to need.
        wide = 0
        if self.device.type == "cuda":
            free, count = torch.cuda.mem_get_info(self.device)[0] - stored, self.config.num_hidden_layers
            choices = ((count, 6), (self.topology.cut, 4), (0, 0))
            wide = next(layers for layers, times in choices if free > times * wide_bytes(self.config, layers) or not layers)
        load = FusedLoader(source, self.device, Meter(stored, progress), wide)
        self.embed, self.norm, self.head = (load.tensor(f"{name}.weight") for name in ("embed", "norm", "head"))
        self.layers: list[LayerWeights] = [load.layer(plan) for plan in self.topology.layers]
        self.work = Work(self.config, self.device)
        self.freqs = [table.to(self.device) for table in layer_frequencies(self.config)]
        self.attention = FusedAttention(self.config, self.work)
        self.engram = FusedEngram(self.config, source.token_map() if self.config.engram_layer_ids else None, self.device, self.work)

    @torch.inference_mode()
    def encode(self, batch: FusedBatch) -> Flow:
        """Run the encoder half on every row and store all global KV, the first decoder layer's included."""
        ranges = [(s.start, s.stop, s.window_from) for s in batch.spans]
        rows = self.half_rows(ranges, batch.spans, batch.window, [s.captures for s in batch.spans])
        half = Half(rows, batch.memory, self.topology.cut, 0, batch.image_mask, batch.record)
        flow = self.run_encoder(batch.token_ids, self.engram.history(batch.token_ids, batch.lookback, batch.image_mask), half, batch.images)
        half.take_captures(self.config.head_dim)
        return flow

    @torch.inference_mode()
    def decode(self, flow: Flow, chosen: FusedDecoderRows) -> Tensor:
        """Run the decoder half on the chosen rows -> final hidden state [n, D] bf16, in row order."""
        batch = chosen.batch
        captures = [[capture for capture in s.captures if capture.decoder] for s in chosen.spans]
        rows = self.half_rows(chosen.ranges, chosen.spans, batch.window, captures)
        mask = batch.image_mask if batch.image_mask is None or chosen.index is None else batch.image_mask.index_select(0, chosen.index)
        count = len(self.layers) - self.topology.cut
        half = Half(rows, batch.memory, count, self.topology.cut, mask, batch.record)
        history = self.engram.history(batch.token_ids, batch.lookback, batch.image_mask)
        if history is not None and chosen.index is not None:
            history = history.index_select(0, chosen.index)
        hidden = self.run_decoder(flow.take(chosen.index), history, half)
        half.take_captures(self.config.head_dim)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden state [n, D] bf16 -> [n, vocab] fp32."""
        return product(rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.head)

    def half_rows(self, ranges: list[tuple[int, int, int]], spans: object, window: int, captures: object) -> HalfRows:
        width = self.config.candidate_topk_blocks * self.config.candidate_block_size
        return HalfRows.build(ranges, spans, window, self.ratios, self.device, captures, width)  # type: ignore[arg-type]

    def run_encoder(self, token_ids: Tensor, history: Tensor | None, half: Half, images: Sequence[ImageRows] = ()) -> Flow:
        """The encoder half over rows that are on the device; nothing here waits for it, so a graph can capture it."""
        self._turn(half)
        table = self.embed
        if images:
            table, token_ids = embed(table, token_ids, images), torch.arange(token_ids.numel(), device=self.device)
        n, config, cut = token_ids.numel(), self.config, self.topology.cut
        streams = torch.empty((n, config.hc_mult, config.hidden_size), dtype=torch.bfloat16, device=self.device)
        first = self.layers[0]
        into, made = self._input(n), self._coefficients(n)
        step = self.work.stream_step(n)
        step.first(table, token_ids, streams, first.attn_norm, into, first.attn, made)
        assert into.rounded is not None
        flow = Flow(streams, into.x, into.rounded, made)
        if first.engram is not None:
            one = torch.zeros((n, config.hc_mult), device=self.device)
            one[:, 0] = 1.0
            flow = self._read(first, flow.streams, one, history, half)
        for number in range(cut):
            flow = self._layer(number, flow, history, half)
        half.keep_windows()
        last = self.layers[cut]
        if last.compressor is not None:
            self.attention.store_global(last, flow.x, half)
        return flow

    def run_decoder(self, flow: Flow, history: Tensor | None, half: Half) -> Tensor:
        """The decoder half; returns the hidden state [n, D] bf16 before the last norm."""
        self._turn(half)
        hidden = torch.empty_like(flow.x)
        for number in range(self.topology.cut, len(self.layers)):
            flow = self._layer(number, flow, history, half, hidden)
        half.keep_windows()
        return hidden

    def _layer(self, number: int, flow: Flow, history: Tensor | None, half: Half, hidden: Tensor | None = None) -> Flow:
        """One layer, and the input of the next; after the last one `hidden` is filled instead."""
        layer, step, n = self.layers[number], self.work.stream_step(half.rows.rows), half.rows.rows
        name = f"layer{number}"
        if layer.compressor is not None and number != self.topology.cut:  # the first decoder layer's were stored by the encoder half
            self.attention.store_global(layer, flow.x, half)
        y = self.attention(layer, flow.x, flow.rounded, half)
        half.note(f"{name}.attn_in", flow.x)
        half.note(f"{name}.attn_out", y)
        streams, attn = flow.streams, flow.coefficients
        into, ffn = self._input(n), self._coefficients(n)
        assert into.rounded is not None
        step.mix(streams, y, attn.post, attn.comb, streams, attn.pre, layer.ffn_norm, into, layer.ffn, ffn)
        y = self._moe(layer, into.x, into.rounded, half, name)
        half.note(f"{name}.ffn_in", into.x)
        half.note(f"{name}.ffn_out", y)
        if number + 1 == len(self.layers):
            assert hidden is not None
            step.last(streams, y, ffn.post, ffn.comb, ffn.pre, hidden)
            return flow
        following = self.layers[number + 1]
        if following.engram is not None:
            step.mix(streams, y, ffn.post, ffn.comb, streams)
            flow = self._read(following, streams, ffn.pre, history, half)
        else:
            into, made = self._input(n), self._coefficients(n)
            assert into.rounded is not None
            step.mix(streams, y, ffn.post, ffn.comb, streams, ffn.pre, following.attn_norm, into, following.attn, made)
            flow = Flow(streams, into.x, into.rounded, made)
        if number + 1 == self.topology.cut:
            half.note("encoder.out_h", streams)
            half.note("encoder.out_pre_mix", ffn.pre)
        return flow

    def _read(self, layer: LayerWeights, streams: Tensor, pre: Tensor, history: Tensor | None, half: Half) -> Flow:
        """The Engram read of a layer, in place, and the layer's input."""
        assert layer.engram is not None and history is not None
        self.engram.read(layer.engram, streams, history, half, layer.plan.index)
        n = streams.shape[0]
        into, made = self._input(n), self._coefficients(n)
        assert into.rounded is not None
        self.work.stream_step(n).read(streams, pre, layer.attn_norm, into, layer.attn, made)
        return Flow(streams, into.x, into.rounded, made)

    def _moe(self, layer: LayerWeights, x: Tensor, rounded: Tensor, half: Half, name: str) -> Tensor:
        config, n = self.config, x.shape[0]
        topk = min(config.num_experts_per_tok, config.n_routed_experts)
        indices = torch.empty((n, topk), dtype=torch.int32, device=x.device)
        weights = torch.empty((n, topk), dtype=torch.float32, device=x.device)
        # The reference leaves the score of a single expert as it is.
        route(
            x, layer.gate, layer.bias, layer.bias_image, half.image_mask, indices, weights, self.work.meeting,
            scale=config.routed_scaling_factor, normalise=config.norm_topk_prob and topk > 1, temperature=config.gate_temp,
            position=half.rows.step.position,
        )  # fmt: skip
        half.note(f"{name}.router_indices", indices)
        half.note(f"{name}.router_weights", weights)
        y = torch.empty_like(x)
        layer.experts(rounded, indices, weights, y, self.work.meeting)
        return y

    def _turn(self, half: Half) -> None:
        half.rotate(self.freqs, self.ratios)

    def _input(self, n: int) -> Input:
        x, rounded = (torch.empty((n, self.config.hidden_size), dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return Input(x, rounded)

    def _coefficients(self, n: int) -> Coefficients:
        s = self.config.hc_mult
        pre, post, comb = (torch.empty((n, *shape), dtype=torch.float32, device=self.device) for shape in ((s,), (s,), (s, s)))
        return Coefficients(pre, post, comb)
