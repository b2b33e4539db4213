"""Floating-point operations that a token needs in one half of the network: two for each weight it meets and each product of attention."""

from __future__ import annotations

from forebay.model.config import LayerPlan, ModelConfig


def layer_flops(c: ModelConfig, plan: LayerPlan) -> int:
    """Of one token in one layer far into a text: all window and chosen entries are there. Scores of the indexer grow with the text and
    are not in it; nor are norms, rotations, rounding and the Engram gate."""
    d, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    weights = d * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads + heads * c.o_lora_rank + c.o_groups * c.o_lora_rank * d
    weights += d * c.n_routed_experts + 3 * d * c.moe_intermediate_size * (c.num_experts_per_tok + c.n_shared_experts)
    weights += 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * d  # mHC of two sub-layers
    if plan.owns_kv:
        weights += d * c.head_dim * (2 if plan.ratio > 1 else 1) + c.head_dim * c.index_head_dim // plan.ratio
    if plan.owns_index:
        weights += c.q_lora_rank * c.index_n_heads * c.index_head_dim + d * c.index_n_heads
    if plan.engram:
        weights += c.engram_columns * c.engram_head_dim * (c.hc_mult + 1) * d
    keys = c.sliding_window + (c.index_topk if plan.ratio else 0)
    return 2 * weights + 4 * keys * heads


def prefill_flops(c: ModelConfig, tokens: int) -> int:
    """Of a prompt: the encoder half for all tokens, the decoder half for those of the last window, the output layer for one."""
    topology = c.topology()
    encoder, decoder = (sum(layer_flops(c, plan) for plan in half) for half in (topology.encoder, topology.decoder))
    return encoder * tokens + decoder * min(tokens, c.sliding_window) + 2 * c.hidden_size * c.vocab_size
