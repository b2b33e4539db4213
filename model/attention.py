"""Attention of one layer: window and selected global entries in one softmax with a sink (spec/model.md §3)."""

from __future__ import annotations

from torch import Tensor

from forebay.model.batch import HalfState
from forebay.model.compressor import Compressor
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.indexer import Indexer
from forebay.model.loading import Loader
from forebay.model.ops.linear import quantised_linear
from forebay.model.ops.rope import inverse_frequencies


class Attention:
    """Every layer has its own query, window and output projections; kv and index sources have more."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Loader, freqs: Tensor) -> None:
        self.plan, self.freqs, self.ops = plan, freqs, load.ops
        self.heads, self.dim, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.eps, self.scale = config.rms_norm_eps, config.head_dim**-0.5
        self.w_in = load.stack([load.fp8("wq_a"), load.fp8("wkv")])  # both read the layer input
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
        turn, memory, layer = state.turn(self.freqs), state.memory, self.plan.index
        low_q, low_kv = self.w_in.split(quantised_linear(self.ops.fp8_round(x), self.w_in))
        latent = self.ops.fp8_round(self.ops.rms_norm(low_q, self.q_norm, self.eps))
        q = self.ops.rotate(quantised_linear(latent, self.wq_b).unflatten(-1, (self.heads, self.dim)), turn)
        window = memory.window(layer, self.ops.rotate(self.ops.rms_norm(low_kv, self.kv_norm, self.eps), turn), state)
        if self.indexer is not None:
            state.selected[layer] = memory.choose(self.indexer, x, latent, turn, state)
        out = memory.attend(q, window, self.plan, self.sink, self.scale, state)
        memory.keep_window(layer, window, state)
        low = self.ops.grouped_linear(self.ops.rotate(out, turn, inverse=True), self.wo_a)
        return quantised_linear(self.ops.fp8_round(low), self.wo_b)


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
