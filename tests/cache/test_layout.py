from __future__ import annotations

import dataclasses

import pytest
import torch

from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.windows import WindowPool
from forebay.model.config import ModelConfig, real_config


def test_real_model_costs_890_bytes_per_token_as_allocated() -> None:
    config = real_config()
    layout = KVLayout.of(config)
    pool = BlockPool(layout, 3)
    assert pool.data.numel() * pool.data.element_size() == 3 * 113_920
    planes = [getattr(v, f.name) for v in pool.views.values() for f in dataclasses.fields(v)]
    assert sum(p.numel() * p.element_size() for p in planes) == 3 * 113_920
    assert (pool.data[0].numel(), 128) == (layout.block_bytes, layout.block_tokens)
    assert layout.bytes_per_token == 890
    assert (layout.layers, layout.encoder_layers) == (40, 20)
    assert isinstance(layout.bytes_per_token, int)
    # Entries of 288 + 68 bytes, 64 per block for layers 2, 8, 14 and 128 for layer 20.
    assert layout.entry_bytes == 356
    assert {layer: v.main_codes.shape[1] for layer, v in pool.views.items()} == {2: 64, 8: 64, 14: 64, 20: 128}
    for view in pool.views.values():
        assert [t.shape[2] for t in (view.main_codes, view.main_scales, view.index_codes, view.index_scales)] == [256, 32, 64, 4]


def test_real_model_window_and_pending_bytes_as_allocated() -> None:
    config = real_config()
    layout = KVLayout.of(config)
    windows = WindowPool(layout, config, 2)
    assert windows.data[0].numel() == 2_703_360 == layout.window_bytes
    assert layout.window_row_bytes == 528
    assert windows.codes.shape == (2, 40, 128, 512)
    assert windows.scales.shape == (2, 40, 128, 16)
    assert windows.pending[0].numel() * windows.pending.element_size() == 12_288 == layout.pending_bytes
    assert windows.pending.shape == (2, 3, 1, 2, 512)
    assert windows.pending_index == {2: 0, 8: 1, 14: 2}


def test_sources_are_planar_contiguous_and_in_layer_order(tiny: ModelConfig) -> None:
    """Fill each plane through its view; the block must be these runs one after the other, without a gap or an overlap."""
    layout = KVLayout.of(tiny)
    pool = BlockPool(layout, 3)
    pool.poison([1])
    expected = []
    for number, layer in enumerate(sorted(pool.views)):
        view = pool.views[layer]
        for plane, tensor in enumerate((view.main_codes, view.main_scales, view.index_codes, view.index_scales)):
            rows = torch.arange(tensor.shape[1], dtype=torch.uint8).unsqueeze(1) + 64 * number + 16 * plane
            tensor[1] = rows
            expected.append(rows.expand(-1, tensor.shape[2]).reshape(-1))
    assert torch.equal(pool.data[1], torch.cat(expected))
    assert not pool.data[0].any()
    assert not pool.data[2].any()


def test_views_share_memory_with_the_pool(tiny: ModelConfig) -> None:
    pool = BlockPool(KVLayout.of(tiny), 2)
    start, stop = pool.data.data_ptr(), pool.data.data_ptr() + pool.data.numel()
    for view in pool.views.values():
        assert all(start <= getattr(view, f.name).data_ptr() < stop for f in dataclasses.fields(view))


@pytest.mark.parametrize(("window", "ratio", "block"), [(8, 2, 8), (8, 1, 8), (7, 2, 14), (6, 4, 12), (1, 2, 2)])
def test_block_is_the_window_or_a_multiple_that_every_ratio_divides(tiny: ModelConfig, window: int, ratio: int, block: int) -> None:
    layout = KVLayout.of(dataclasses.replace(tiny, sliding_window=window, compress_ratios=(0, ratio, ratio, 1)))
    assert layout.block_tokens == block
    assert [s.entries for s in layout.sources] == [block // ratio, block]
    assert layout.block_bytes == sum(s.entries for s in layout.sources) * layout.entry_bytes
    assert layout.gated == ((1,) if ratio > 1 else ())


def test_fractional_bytes_per_token(tiny: ModelConfig) -> None:
    config = dataclasses.replace(tiny, sliding_window=12, compress_ratios=(0, 4, 4, 3), num_hidden_layers=4)
    layout = KVLayout.of(config)
    assert layout.bytes_per_token == pytest.approx(layout.entry_bytes * (1 / 4 + 1 / 3))
    assert isinstance(layout.bytes_per_token, float)


def test_no_gated_source_needs_no_pending_state(tiny: ModelConfig) -> None:
    config = dataclasses.replace(tiny, compress_ratios=(0, 1, 1, 1))
    windows = WindowPool(KVLayout.of(config), config, 2)
    assert windows.pending.numel() == 0
    assert windows.pending_index == {}


def test_identity_tells_layouts_apart(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(**changes: object) -> str:
        return KVLayout.of(dataclasses.replace(tiny, **changes)).identity  # type: ignore[arg-type]

    assert identity() == identity(vocab_size=65)
    others = {
        identity(),
        identity(sliding_window=16),
        identity(head_dim=64),
        identity(index_head_dim=64),
        identity(compress_ratios=(0, 1, 1, 1)),
        identity(compress_ratios=(0, 2, 2, 2)),
        identity(kv_source_layer_ids=(2, 3), index_source_layer_ids=(2, 3), compress_ratios=(0, 0, 2, 1)),
        identity(num_hidden_layers=5, compress_ratios=(0, 2, 2, 1, 1)),
    }
    assert len(others) == 8
    before = identity()
    monkeypatch.setattr("forebay.cache.layout.LAYOUT_VERSION", 999)
    assert identity() != before


def test_blocks_for() -> None:
    layout = KVLayout.of(real_config())
    assert [layout.blocks_for(n) for n in (0, 1, 128, 129, 256)] == [0, 1, 1, 2, 2]
