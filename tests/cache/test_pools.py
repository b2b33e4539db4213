from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cache.blocks import NULL_BLOCK, BlockPool, CacheBookkeepingError, OutOfBlocks
from forebay.cache.layout import KVLayout
from forebay.cache.windows import NULL_SLOT, OutOfWindows, WindowPool
from forebay.model.config import ModelConfig
from forebay.model.errors import ConfigError

LAYOUT = KVLayout(
    block_tokens=1, window=1, layers=1, encoder_layers=1, head_dim=32, index_head_dim=32, sources=(), block_bytes=4, entry_bytes=4,
    window_row_bytes=33, gated=(), open_rows=0,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 5)), max_size=60))
def test_random_use_of_the_block_pool(operations: list[tuple[str, int]]) -> None:
    """Against a multiset of owners: no block is handed out twice, none is lost, a failed allocation takes nothing."""
    pool = BlockPool(LAYOUT, 9)
    owned: Counter[int] = Counter()
    for name, n in operations:
        held = sorted(owned)
        if name == "allocate":
            if n > pool.total - len(held):
                with pytest.raises(OutOfBlocks):
                    pool.allocate(n)
            else:
                blocks = pool.allocate(n)
                assert len(set(blocks)) == n
                assert not set(blocks) & set(held)
                assert NULL_BLOCK not in blocks
                owned.update(blocks)
        elif name == "retain":
            pool.retain(held[:n])
            owned.update(held[:n])
        else:
            pool.release(held[:n])
            owned.subtract(held[:n])
            owned = +owned
        pool.check()
        assert pool.free == pool.total - len(owned)
        assert all(pool.references(b) == owned[b] for b in range(pool.total + 1))


def test_block_misuse_is_refused() -> None:
    pool = BlockPool(LAYOUT, 3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(CacheBookkeepingError, match="cannot be released"):
        pool.release([block])
    with pytest.raises(CacheBookkeepingError, match="cannot be retained"):
        pool.retain([block])
    with pytest.raises(CacheBookkeepingError):
        pool.release([NULL_BLOCK])
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(LAYOUT, 1)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(LAYOUT, 4)
    pool.allocate(1)
    pool._free.pop()
    with pytest.raises(CacheBookkeepingError):
        pool.check()


def test_poisoned_scales_decode_to_nan(tiny: ModelConfig) -> None:
    layout = KVLayout.of(tiny)
    pool = BlockPool(layout, 3)
    pool.poison([2])
    assert pool.views[3].main_scales[2].view(torch.float8_e4m3fn).float().isnan().all()
    assert not pool.data[1].any()
    windows = WindowPool(layout, tiny, 3)
    windows.poison(2)
    assert windows.codes[2].view(torch.float8_e4m3fn).float().isnan().all()
    assert windows.pending[2].isnan().all()
    assert not windows.data[1].any()


def test_windows_have_one_owner(tiny: ModelConfig) -> None:
    windows = WindowPool(KVLayout.of(tiny), tiny, 4)
    slots = [windows.allocate() for _ in range(3)]
    assert sorted(slots) == [1, 2, 3]
    with pytest.raises(OutOfWindows):
        windows.allocate()
    windows.release(2)
    windows.check()
    assert windows.free == 1
    assert windows.allocate() == 2
    windows.release(2)
    for slot in (2, NULL_SLOT):
        with pytest.raises(CacheBookkeepingError):
            windows.release(slot)


def test_window_rows_are_codes_then_scales(tiny: ModelConfig) -> None:
    windows = WindowPool(KVLayout.of(tiny), tiny, 3)
    windows.codes[1, 2, 5] = 7
    windows.scales[1, 2, 5] = 9
    assert windows.data[1, 2, 5].tolist() == [7] * 32 + [9]
    assert windows.data.long().sum() == 7 * 32 + 9


def test_a_window_is_copied_and_loaded_by_halves(tiny: ModelConfig) -> None:
    layout = KVLayout.of(tiny)
    windows, cut = WindowPool(layout, tiny, 4), layout.encoder_layers
    assert 0 < cut < layout.layers
    windows.data[1] = torch.arange(windows.data[1].numel(), dtype=torch.int64).view(windows.data[1].shape).to(torch.uint8)
    kept = windows.copy(1)
    assert torch.equal(kept, windows.data[1])
    windows.data[1] = 7
    assert not torch.equal(kept, windows.data[1]), "a copy, not a view"
    windows.load(2, kept[:cut], kept[cut:])
    assert torch.equal(windows.data[2], kept)
    windows.poison(3)
    windows.load(3, kept[:cut])
    assert torch.equal(windows.data[3, :cut], kept[:cut])
    assert (windows.data[3, cut:] == 0xFF).all()
    assert not windows.data[0].any()


def test_windows_refuse_another_models_layout(tiny: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="another model"):
        WindowPool(LAYOUT, tiny, 4)
    with pytest.raises(ConfigError, match="slots"):
        WindowPool(KVLayout.of(tiny), tiny, 1)
