"""Attention of one layer: window and selected global entries in one softmax with a sink (spec/model.md §3)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.batch import HalfState
from forebay.model.compressor import Compressor
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.indexer import Indexer
from forebay.model.loading import Loader
from forebay.model.ops import formats
from forebay.model.ops.gather import entry_places, gather_main
from forebay.model.ops.linear import StackedWeight, fp32_linear, quantised_linear
from forebay.model.ops.rms_norm import rms_norm
from forebay.model.ops.rope import inverse_frequencies, rotate
from forebay.model.ops.sparse_attention import sparse_attention

ATTEND_BYTES = 64 << 20  # fp32 working memory for the keys of one tile of rows


class Attention:
    """Every layer has its own query, window and output projections; kv and index sources have more."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Loader, freqs: Tensor) -> None:
        self.plan, self.freqs = plan, freqs
        self.heads, self.dim, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.eps, self.scale, self.topk = config.rms_norm_eps, config.head_dim**-0.5, config.index_topk
        self.w_in = StackedWeight([load.fp8("wq_a"), load.fp8("wkv")], load.cache)  # both read the layer input
        self.wq_b, self.wo_b = load.fp8("wq_b"), load.fp8("wo_b")
        self.wo_a = load.fp8_groups("wo_a", self.groups)
        self.q_norm, self.kv_norm = load.tensor("q_norm.weight"), load.tensor("kv_norm.weight")
        self.sink = load.tensor("attn_sink")
        self.compressor = Compressor(config, plan, load, self.freqs) if plan.owns_kv else None
        self.indexer = Indexer(config, plan, load.at("indexer")) if plan.owns_index else None

    def store_global(self, x: Tensor, state: HalfState) -> None:
        """Write the entries the rows complete; only kv sources have any. x [n, D] bf16."""
        if self.compressor is not None:
            self.compressor.write(x, state)

    def __call__(self, x: Tensor, state: HalfState) -> Tensor:
        """x [n, D] bf16 attention input -> [n, D] bf16. Global entries of these rows must already be stored."""
        turn = state.turn(self.freqs)
        low_q, low_kv = self.w_in.split(quantised_linear(formats.fp8_round(x), self.w_in))
        latent = formats.fp8_round(rms_norm(low_q, self.q_norm, self.eps))
        q = rotate(quantised_linear(latent, self.wq_b).unflatten(-1, (self.heads, self.dim)), turn)
        kv = rotate(rms_norm(low_kv, self.kv_norm, self.eps), turn)
        codes, scales = formats.fp8_encode(kv)
        keys = self._window_keys(codes, scales, state)
        if self.indexer is not None:
            state.selected[self.plan.index] = self.indexer.select(x, latent, turn, state)
        out = self._attend(q, keys, state)
        self._keep_window(codes, scales, state)
        out = rotate(out, turn, inverse=True).unflatten(1, (self.groups, -1))
        low = [fp32_linear(out[:, g].flatten(1), w) for g, w in enumerate(self.wo_a)]
        return quantised_linear(formats.fp8_round(torch.cat(low, -1).to(torch.bfloat16)), self.wo_b)

    def _window_keys(self, codes: Tensor, scales: Tensor, state: HalfState) -> Tensor:
        """All window rows the batch may read, [spans * window + n + 1, dim] fp32: rings, fresh rows, and a row of zeros."""
        memory, slots, layer = state.memory, state.rows.slots, self.plan.index
        ring = formats.fp8_decode(memory.window_codes[slots, layer], memory.window_scales[slots, layer])
        fresh = formats.fp8_decode(codes, scales)
        return torch.cat((ring.flatten(0, 1), fresh, fresh.new_zeros((1, self.dim))))

    def _keep_window(self, codes: Tensor, scales: Tensor, state: HalfState) -> None:
        """Store what later steps read. After the attention: a long chunk overwrites rows its own first tokens needed."""
        rows, memory, layer = state.rows, state.memory, self.plan.index
        window = memory.window_codes.shape[2]
        slot, place = rows.keep_target // window, rows.keep_target % window
        memory.window_codes[slot, layer, place] = codes.index_select(0, rows.keep)
        memory.window_scales[slot, layer, place] = scales.index_select(0, rows.keep)
        for index, place, capture in rows.captures:
            capture.codes[layer, place] = codes.index_select(0, index)
            capture.scales[layer, place] = scales.index_select(0, index)

    def _attend(self, q: Tensor, keys: Tensor, state: HalfState) -> Tensor:
        rows, plan = state.rows, self.plan
        window = torch.where(rows.window_valid, rows.window_index, keys.shape[0] - 1)
        selected = state.selected[plan.index_source] if plan.index_source is not None else None
        slots = window.shape[1] + (selected.shape[1] if selected is not None else 0)
        step = max(1, ATTEND_BYTES // (4 * slots * self.dim))
        if step >= rows.rows:
            return self._attend_tile(q, keys, window, selected, slice(None), state, keep=True)
        parts = [slice(first, first + step) for first in range(0, rows.rows, step)]
        return torch.cat([self._attend_tile(q[p], keys, window[p], selected, p, state, keep=False) for p in parts])

    def _attend_tile(
        self, q: Tensor, keys: Tensor, window: Tensor, selected: Tensor | None, part: slice, state: HalfState, *, keep: bool
    ) -> Tensor:
        rows = state.rows
        kv = keys.index_select(0, window.flatten()).view(*window.shape, -1)
        valid = rows.window_valid[part]
        if selected is not None:
            chosen = selected[part]
            kv = torch.cat((kv, self._entries(chosen, rows.sequence[part], state, keep=keep)), 1)
            valid = torch.cat((valid, chosen >= 0), 1)
        return sparse_attention(q, kv, valid, self.sink, self.scale)

    def _entries(self, chosen: Tensor, sequence: Tensor, state: HalfState, *, keep: bool) -> Tensor:
        """Dequantised entries [n, topk, dim]; Reuse layers find those of the layer before when the whole batch was one tile."""
        assert self.plan.kv_source is not None and self.plan.index_source is not None
        name = (self.plan.kv_source, self.plan.index_source)
        if keep and name in state.gathered:
            return state.gathered[name]
        memory = state.memory.sources[name[0]]
        block, place = entry_places(state.tables, sequence, chosen, state.memory.block_tokens // self.plan.ratio)
        entries = gather_main(memory.main_codes, memory.main_scales, block, place)
        if keep:
            state.gathered.clear()  # only the latest list is ever read again
            state.gathered[name] = entries
        return entries


def layer_frequencies(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The two rotary tables: of window-only layers, and of layers with entries, which alone use YaRN (spec §3.2).

    A layer uses one of them for queries, window, entries and indexer alike.
    """
    plain = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta)
    return plain, inverse_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=config.rope_factor,
        original=config.rope_original_max_position,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )
