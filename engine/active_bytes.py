"""Bytes that a decode step must read at least: its floor on a device that weights stream through."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.cache.layout import KVLayout
from forebay.model.config import QUANT_GROUP, LayerPlan, ModelConfig
from forebay.model.names import bytes_by_part, expected_tensors

LEFT_OUT = ("embedding", "engram tables", "experts", "head", "shared experts")  # parts that are counted by themselves


def expert_bytes(c: ModelConfig) -> int:
    """One routed expert as stored: FP4 codes and their scales of three matrices."""
    weights = 3 * c.hidden_size * c.moe_intermediate_size
    return weights // 2 + weights // QUANT_GROUP


def main_bytes(c: ModelConfig, plan: LayerPlan, context: int) -> int:
    """Main KV that one row reads in one layer: its chosen entries."""
    if not plan.ratio:
        return 0
    return min(c.index_topk, context // plan.ratio) * (c.head_dim // 2 + c.head_dim // 16)


def index_bytes(c: ModelConfig, plan: LayerPlan, context: int) -> int:
    """Index keys that one row reads in one layer: all there are, or those of its candidates."""
    if not plan.owns_index:
        return 0
    entries = context // plan.ratio
    if plan.reads_candidates:
        entries = min(entries, c.candidate_topk_blocks * c.candidate_block_size)
    return entries * (c.index_head_dim // 2 + c.index_head_dim // QUANT_GROUP)


def step_bytes(c: ModelConfig, contexts: Sequence[int], experts: Sequence[int]) -> dict[str, int]:
    """Bytes of one decode step, by kind; their sum is the floor.

    Args:
        contexts: tokens of each sequence, the new one included.
        experts: distinct routed experts that the step uses in each layer.

    Every weight is read once however many rows there are. KV is counted for every row and layer that reads it, as the weights of a layer
    pass through the cache in between. Not in it: activations, scores and what is written (a row's window rows and entries), which stay in
    the L2 cache or are small beside the rest; block tables.
    """
    layout, plans, rows = KVLayout.of(c), c.topology().layers, len(contexts)
    parts = bytes_by_part(expected_tensors(c))
    row = c.engram_head_dim + c.engram_head_dim // QUANT_GROUP
    return {
        "dense": sum(size for name, size in parts.items() if name not in LEFT_OUT),
        "head": parts["head"],
        "shared experts": parts.get("shared experts", 0),
        "routed experts": sum(experts) * expert_bytes(c),
        "embedding rows": rows * 2 * c.hidden_size,
        "engram rows": rows * len(c.engram_layer_ids) * c.engram_columns * row,
        "windows": sum(min(layout.window, n) for n in contexts) * layout.layers * layout.window_row_bytes,
        "main KV": sum(main_bytes(c, plan, n) for plan in plans for n in contexts),
        "index keys": sum(index_bytes(c, plan, n) for plan in plans for n in contexts),
    }


def wide_bytes(c: ModelConfig, tokens: int) -> int:
    """The main KV of one sequence's smallest source as bf16: what a dequantised copy of a whole sequence would take at least."""
    return min(tokens // plan.ratio for plan in c.topology().layers if plan.owns_kv) * c.head_dim * 2
