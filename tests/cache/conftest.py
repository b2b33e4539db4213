"""A small layout and managers over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.manager import CacheManager
from forebay.cache.windows import WindowPool
from forebay.model.config import ModelConfig

MakeManager = Callable[..., CacheManager]


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    """Window and block of 8 tokens; sources: layer 1 (ratio 2), layer 3 (ratio 1)."""
    return ModelConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32,
        o_groups=1, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
        compress_ratios=(0, 2, 2, 1), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3), index_n_heads=1, index_head_dim=32,
        index_topk=4, candidate_source_layer_id=3, candidate_topk_blocks=4, candidate_block_size=2,
    )  # fmt: skip


@pytest.fixture
def make_manager(tiny: ModelConfig) -> MakeManager:
    """make_manager(blocks=16, windows=8, ...): usable blocks and windows, without the null ones."""

    def make(
        blocks: int = 16, windows: int = 8, fingerprint: str = "f", prefix_reuse: bool = True, poison: bool = False
    ) -> CacheManager:
        layout = KVLayout.of(tiny)
        pools = BlockPool(layout, blocks + 1), WindowPool(layout, tiny, windows + 1)
        return CacheManager(layout, *pools, fingerprint, prefix_reuse, poison=poison)

    return make
