"""What is chosen where options are left to the device: rows of a step, and memory for KV."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engines import tiny, tiny_config
from forebay.cache.layout import KVLayout
from forebay.engine import launch
from forebay.engine.options import EngineOptions
from forebay.model.config import real_config
from forebay.model.errors import ConfigError

GB = 10**9


def test_rows_of_a_step_depend_on_what_runs_it() -> None:
    plain = EngineOptions()
    assert plain.budgets == (512, 512)
    assert plain.settled(kernels=False) == replace(plain, encoder_tokens=512, decoder_tokens=512, overlap=False)
    assert plain.settled(kernels=True) == replace(plain, encoder_tokens=2048, decoder_tokens=1024, overlap=True)
    given = EngineOptions(encoder_tokens=96, decoder_tokens=80, overlap=False)
    assert given.settled(kernels=True) == given.settled(kernels=False) == given
    assert EngineOptions(max_sequences=3000).settled(kernels=True).budgets == (2048, 3000)
    options = tiny().engine.options
    assert (options.encoder_tokens, options.decoder_tokens) == tiny().engine.options.budgets == (512, 64)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_is_one(value: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1") as error:
        EngineOptions(kv_memory_fraction=value)
    assert error.value.param == "kv_memory_fraction"


def test_a_gpu_gives_kv_what_nothing_else_needs() -> None:
    """The released sizes on a GPU of 141 GB with 64 experts: 58 GB of weights, 10 GB of them twice."""
    config = real_config()
    layout, options = KVLayout.of(config), EngineOptions()
    windows = 65 * (layout.window_bytes + layout.pending_bytes)
    most = launch._kv_limit(layout, config, options, 72 * GB, 10 * GB)
    assert most == int(0.9 * (62 * GB - windows))
    tokens = most // layout.block_bytes * layout.block_tokens
    assert tokens > 60 * config.max_position_embeddings // 1.1
    assert launch._kv_limit(layout, config, replace(options, kv_memory_fraction=0.5), 72 * GB, 10 * GB) < most
    assert launch._kv_limit(layout, config, replace(options, max_sequences=1024), 72 * GB, 10 * GB) < most
    assert launch._kv_limit(layout, config, replace(options, kv_tokens=1), 0, 10 * GB) == 0, "what is given is not looked at"


def test_a_gpu_without_room_for_the_longest_sequence_says_what_would_fit() -> None:
    config = real_config()
    layout = KVLayout.of(config)
    with pytest.raises(ConfigError, match=r"^GPU memory is left for 707,.* the longest sequence has 1,048,576") as error:
        launch._kv_limit(layout, config, EngineOptions(max_sequences=1), int(10.7 * GB) + 2 * layout.window_bytes, 10 * GB)
    assert error.value.param == "max_context" and "lower max_context to 707" in error.value.message
    shorter = EngineOptions(max_sequences=1, max_context=700_000)
    assert launch._kv_limit(layout, config, shorter, int(10.7 * GB) + 2 * layout.window_bytes, 10 * GB) > 700_000 * 890


def _refusal(blocks: float, fraction: float, longest: int) -> ConfigError:
    """What is said where steps and windows leave so many blocks."""
    layout = KVLayout.of(real_config())
    with pytest.raises(ConfigError) as error:
        launch._kv_bytes(layout, 3 * GB + int(blocks * layout.block_bytes), 3 * GB, fraction, longest)
    return error.value


def test_a_refusal_names_the_cause_and_what_helps() -> None:
    layout = KVLayout.of(real_config())
    size = layout.block_tokens
    # One block is the null block: with room for no other there is none for KV.
    for blocks in (-5, 0.5, 1.9):
        error = _refusal(blocks, 1.0, 1)
        assert error.message.startswith("no GPU memory is left for KV: 3.0 GB are free") and error.param == "kv_tokens"
        assert "kv_memory_fraction" not in error.message and "to 0" not in error.message
    assert launch._kv_bytes(layout, 3 * GB + 2 * layout.block_bytes, 3 * GB, 1.0, 1) == 2 * layout.block_bytes
    error = _refusal(1000, 0.001, 10 * size)
    assert error.message.startswith("no GPU memory is left for KV") and "of the rest KV gets 0.001 (kv_memory_fraction)" in error.message
    assert "; raise kv_memory_fraction to 0.012, or lower" in error.message and error.param == "kv_memory_fraction"
    error = _refusal(1000, 0.001, 2000 * size)
    assert "; raise kv_memory_fraction and lower max_sequences, max_context" in error.message
    error = _refusal(1000, 0.9, 950 * size)
    assert f"; raise kv_memory_fraction to 0.952, or lower max_context to {899 * size}, or" in error.message
    for enough in (0.012, 0.952):
        wanted = 10 if enough < 0.5 else 950
        assert launch._kv_bytes(layout, 3 * GB + 1000 * layout.block_bytes, 3 * GB, enough, wanted * size) >= wanted * layout.block_bytes
    assert "raise" not in _refusal(1000, 0.9, 1000 * size).message, "the whole rest would not do either"


def test_memory_that_torch_holds_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(launch, "Backbone", lambda weights, **options: done.append("loaded"))
    monkeypatch.setattr(launch, "Runner", lambda *parts: parts)
    monkeypatch.setattr(launch, "_pools", lambda *rest: (None, None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (done.append("looked"), (100 * GB, 141 * GB))[1])
    config = tiny_config()
    launch._torch_runner(cast(Any, SimpleNamespace(config=config)), KVLayout.of(config), "cuda", EngineOptions(), None)
    assert done == ["loaded", "emptied", "looked"]


def test_pools_fill_a_gpu_and_not_a_cpu() -> None:
    """`meta` stands for a device that is no CPU: its tensors have no memory."""
    config = tiny_config()
    layout, options = KVLayout.of(config), EngineOptions(max_sequences=3)
    most = 200_000 * layout.block_bytes
    blocks, windows = launch._pools(layout, config, options, "meta", most)
    assert (blocks.data.nbytes, windows.total) == (most, 3)
    assert launch._pools(layout, config, options, "meta", 5_000_000 * layout.block_bytes)[0].total == launch.MOST_BLOCKS
    blocks, _ = launch._pools(layout, config, options, "cpu", most)
    assert blocks.total * layout.block_tokens == launch.DEFAULT_KV_TOKENS
    blocks, _ = launch._pools(layout, config, options, "cpu", 100 * layout.block_bytes)
    assert blocks.total == 100
    blocks, _ = launch._pools(layout, config, replace(options, kv_tokens=80), "meta", 0)
    assert blocks.total == 10
