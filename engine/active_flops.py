"""Floating-point operations that tokens need: two for each weight that a token meets, and the products of attention."""

from __future__ import annotations

import numpy as np

from forebay.model.config import LayerPlan, ModelConfig


def compressor_weights(c: ModelConfig, plan: LayerPlan) -> int:
    """Weights of a source that a token meets: its entry's vector and gate; the index key is made once for `ratio` tokens."""
    return c.hidden_size * c.head_dim * (2 if plan.ratio > 1 else 1) + c.head_dim * c.index_head_dim // plan.ratio


def layer_weights(c: ModelConfig, plan: LayerPlan) -> int:
    """Weights that a token meets in one layer: of the routed experts only those that are chosen."""
    d, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    weights = d * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads + heads * c.o_lora_rank + c.o_groups * c.o_lora_rank * d
    weights += d * c.n_routed_experts + 3 * d * c.moe_intermediate_size * (c.num_experts_per_tok + c.n_shared_experts)
    weights += 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * d  # mHC of two sub-layers
    if plan.owns_kv:
        weights += compressor_weights(c, plan)
    if plan.owns_index:
        weights += c.q_lora_rank * c.index_n_heads * c.index_head_dim + d * c.index_n_heads
    if plan.engram:
        weights += c.engram_columns * c.engram_head_dim * (c.hc_mult + 1) * d
    return weights


def layer_flops(c: ModelConfig, plan: LayerPlan) -> int:
    """Of one token in one layer far into a text, where all window and chosen entries are there; without index scores."""
    keys = c.sliding_window + (c.index_topk if plan.ratio else 0)
    return 2 * layer_weights(c, plan) + 4 * keys * c.num_attention_heads * c.head_dim


def attention_flops(c: ModelConfig, plan: LayerPlan, start: int, stop: int, floor: int = 0) -> int:
    """Products of queries and keys, and of probabilities and keys, for positions [start, stop); window keys begin at `floor`."""
    seen = np.arange(start, stop, dtype=np.int64) + 1
    keys = np.minimum(seen - floor, c.sliding_window)
    if plan.ratio:
        keys = keys + np.minimum(seen // plan.ratio, c.index_topk)
    return 4 * c.num_attention_heads * c.head_dim * int(keys.sum())


def index_flops(c: ModelConfig, plan: LayerPlan, start: int, stop: int) -> int:
    """Products of index queries and keys for positions [start, stop): with all entries, or with the candidates among them."""
    if not plan.owns_index:
        return 0
    entries = (np.arange(start, stop, dtype=np.int64) + 1) // plan.ratio
    if plan.reads_candidates:
        entries = np.minimum(entries, c.candidate_topk_blocks * c.candidate_block_size)
    return 2 * c.index_n_heads * c.index_head_dim * int(entries.sum())


def prefill_flops(c: ModelConfig, tokens: int, *, exact: bool = False) -> int:
    """Of a bounded prefill: the encoder half and the first decoder layer's entries for all tokens, the rest of the decoder half for those
    of the last window, the output layer for one. Of an exact one: both halves for all tokens.

    In it: all matrices, the chosen experts, attention over the keys that each position has. Not in it: index scores
    (`prefill_index_flops`), selection, norms, rotations, rounding, SwiGLU, the mixing of the streams, and the Engram gate.
    """
    topology, last = c.topology(), 0 if exact else max(0, tokens - c.sliding_window)
    total = 2 * c.hidden_size * c.vocab_size + 2 * compressor_weights(c, topology.decoder[0]) * last
    for plan in topology.encoder:
        total += 2 * layer_weights(c, plan) * tokens + attention_flops(c, plan, 0, tokens)
    for plan in topology.decoder:
        total += 2 * layer_weights(c, plan) * (tokens - last) + attention_flops(c, plan, last, tokens, floor=last)
    return total


def prefill_index_flops(c: ModelConfig, tokens: int) -> int:
    """Index scores of the same prefill. They are FP4 products, which tensor cores take as FP8."""
    topology, last = c.topology(), max(0, tokens - c.sliding_window)
    encoder = sum(index_flops(c, plan, 0, tokens) for plan in topology.encoder)
    return encoder + sum(index_flops(c, plan, last, tokens) for plan in topology.decoder)
