"""Faults of caches beyond the device: whose bytes they are, and whether they are the ones that were computed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from engines import WINDOW, greedy, prompt, same, tiny_checkpoint, tiny_config
from forebay.cache import layout
from forebay.cache.blocks import BlockPool
from forebay.cache.manager import CacheManager, SequenceCache
from forebay.cache.prefix import ImageSpan
from forebay.cache.replay import ResumePlan
from forebay.cache.snapshot import Snapshot
from forebay.cache.ssd import StoredBlock
from forebay.cache.windows import WindowPool
from forebay.engine import launch, reservoir
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.engine.types import Output
from forebay.model.config import ModelConfig
from noise_model import write_random
from redis_servers import Server, until
from tiered import (
    ANSWER,
    ask,
    cold,
    keys_of,
    metrics,
    other_tokenizer,
    settle,
    tiered,
)


@pytest.mark.case("B033")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))])
def test_b033_copies_hold_what_the_device_holds(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sequences at once. Their blocks reach host memory late: on a CPU, only when the writer waits for them; on a GPU, the results
    of every step are late, and the copy must come after them on the stream."""
    copy, late = reservoir._host_copy, [0]

    def slow_copy(pool: Any, blocks: Sequence[int]) -> tuple[torch.Tensor, Callable[[], None]]:
        there, ready = copy(pool, blocks)
        if ready is not None:
            return there, ready
        host = torch.full_like(there, 0xEE)

        def arrive() -> None:
            host.copy_(there)
            late[0] += 1

        return host, arrive

    monkeypatch.setattr(reservoir, "_host_copy", slow_copy)
    prompts = [prompt(60 + number, number) for number in range(64)]
    options: dict[str, Any] = {"max_sequences": 64, "encoder_tokens": 96, "decoder_tokens": 96, "kv_tokens": 16384, "device": device}
    with tiered(tmp_path, **options) as llm:
        run = llm.engine.runner.run

        def behind(rows: Any, **more: Any) -> Any:
            result = run(rows, **more)
            if device == "cuda":  # what the step wrote gets there last, and late: a copy on another stream would find something else
                data = llm.engine.runner.blocks.data
                written = data.clone()
                data.fill_(0xEE)
                torch.cuda._sleep(20_000_000)
                data.copy_(written)
            return result

        llm.engine.runner.run = behind
        outputs = llm.generate(prompts, greedy(20))
        index, data = llm.engine.manager.index, llm.engine.runner.blocks.data.cpu()
        histories = [[*output.prompt_ids, *output.token_ids] for output in outputs]
        device_bytes = {key: data[index.find(key)].numpy().tobytes() for ids in histories for key in keys_of(llm, ids[:-1])}
    assert device == "cuda" or late[0] > 10
    assert len(device_bytes) > 64 * 9
    with tiered(tmp_path, **options) as llm:
        answers = llm.generate([[*ids, 99] for ids in histories], greedy(1))
        assert all(answer.tiers.ssd == (len(ids) - 1) // WINDOW * WINDOW for answer, ids in zip(answers, histories, strict=True))
        index, data = llm.engine.manager.index, llm.engine.runner.blocks.data.cpu()
        restored = {key: data[index.find(key)].numpy().tobytes() for key in device_bytes}
    assert restored == device_bytes


def _other(item: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of a server that differs in one item."""
    raw = json.loads((tiny_checkpoint() / "config.json").read_text())
    text = raw["text_config"]
    if item == "tokenizer":
        return other_tokenizer(folder)
    if item == "layout version":
        monkeypatch.setattr(layout, "LAYOUT_VERSION", layout.LAYOUT_VERSION + 1)
    elif item == "prompt encoder":
        monkeypatch.setattr(launch, "ENCODING_VERSION", "another")
    elif item == "format":
        plain = layout.KVLayout.identity.fget
        monkeypatch.setattr(layout.KVLayout, "identity", property(lambda self: plain(self).replace("/16", "/32")))
    elif item == "ratio":
        text["compress_ratios"] = [2, 2, 2, 2]
    elif item == "window":
        text["sliding_window"] = 16
    if item not in ("ratio", "window", "weights"):
        return tiny_checkpoint()
    folder.mkdir()
    write_random(folder, raw, seed=8 if item == "weights" else 7)
    return folder


ITEMS = ["format", "ratio", "window", "layout version", "tokenizer", "weights", "prompt encoder"]


@pytest.mark.case("B035")
@pytest.mark.parametrize("item", ITEMS)
def test_b035_two_servers_that_differ_share_nothing(tmp_path: Path, redis: Server, item: str) -> None:
    ids, folder = prompt(100), tmp_path / "kv"
    with tiered(folder, redis.url) as llm:
        llm.generate(ids, greedy(1))
    with pytest.MonkeyPatch.context() as patch:
        model = _other(item, tmp_path / "model", patch)
        with tiered(folder, redis.url, model=model) as llm:
            assert llm.generate(ids, ANSWER)[0].tiers.cached == 0
            settle(llm)
            store, pool = llm.engine.reservoir.store.stats(), llm.engine.reservoir.pool.stats()
            assert (store.reads, pool.hits) == (0, 0)
            assert not any(store.corrupt.values())
            llm.engine.manager.clear()
            assert llm.generate(ids, greedy(1))[0].tiers.ssd >= 80  # its own, beside the other's
    with tiered(folder, redis.url) as llm:
        answer = llm.generate(ids, ANSWER)[0]
        assert (answer.tiers.ssd, answer.tiers.window) == (96, "swa")
        same(answer, cold([ids], ANSWER)[0])


@pytest.mark.case("B035")
@pytest.mark.parametrize("item", ITEMS)
def test_b035_each_item_alone_is_enough(tmp_path: Path, redis: Server, item: str) -> None:
    """Even a key that means something else to each: both tiers say whose a value is. Everything but one item is the same here."""

    def opened(differs: bool) -> tuple[CacheManager, reservoir.Reservoir]:
        with pytest.MonkeyPatch.context() as patch:
            raw = json.loads((tiny_checkpoint() / "config.json").read_text())
            named = {"weights": "w", "tokenizer": "t", "prompt encoder": "e"}
            if differs and item in named:
                named[item] += "2"
            elif differs and item == "ratio":
                raw["text_config"]["compress_ratios"] = [2, 2, 2, 2]
            elif differs and item == "window":
                raw["text_config"]["sliding_window"] = 16
            elif differs and item == "format":
                patch.setattr(layout, "MAIN_KV_GROUP", 32)
            elif differs:
                patch.setattr(layout, "LAYOUT_VERSION", layout.LAYOUT_VERSION + 1)
            config = ModelConfig.from_dict(raw)
            shape = layout.KVLayout.of(config)
            pools = BlockPool(shape, 4), WindowPool(shape, config, 2)
            manager = CacheManager(shape, *pools, "/".join(named.values()))
            manager.sequence().chain  # noqa: B018
            tiers = launch.open_tiers(manager, TierOptions(dir=tmp_path, redis_url=redis.url, redis_timeout_s=1.0), "cpu", time.time)
            assert tiers is not None
            stack.callback(tiers.close)
            return manager, tiers, manager.sequence().chain.root

    with ExitStack() as stack:
        (mine, tiers, root), (_, others, other_root) = opened(False), opened(True)
        assert root != other_root
        key, rows = bytes(range(32)), np.ones((1, mine.layout.block_bytes), np.uint8)
        window = Snapshot(8, 0, None, 0, np.ones((2, mine.layout.window, mine.layout.window_row_bytes), np.uint8), None)
        assert tiers.store.put([StoredBlock(key, 0, 0)], rows, bytes(16)) == 1
        assert tiers.pool.put(key, window)
        assert tiers.store.flush(10.0) and tiers.pool.flush(10.0)
        assert tiers.store.lookup([key]) == [0]
        assert tiers.pool.get([key]) is not None
        assert others.store.lookup([key]) == []
        fetch = others.store.fetch([key], lambda: None)
        until(lambda: fetch.finished)
        assert fetch.failed_at == 0
        assert others.pool.get([key]) is None
        assert others.pool.stats().bad["identity"] == 1


@pytest.mark.case("B036")
@pytest.mark.parametrize("differ", ["pixels", "detail"])
def test_b036_images_that_agree_in_sixteen_bits(make_image: Callable[[int, str], bytes], differ: str) -> None:
    """The network takes no images yet: keys and blocks of a manager, with image digests as the key chain takes them."""
    known: dict[bytes, tuple[int, str]] = {}
    for number in count():
        options = (number, "low") if differ == "pixels" else (0, f"detail={number}")
        digest = blake3(make_image(*options)).digest()
        if (twin := known.setdefault(digest[-2:], options)) != options:
            break
    first, second = blake3(make_image(*twin)).digest(), digest
    assert first != second and first[-2:] == second[-2:]

    config = tiny_config()
    shape = layout.KVLayout.of(config)
    manager = CacheManager(shape, BlockPool(shape, 40), WindowPool(shape, config, 4), "m")
    tokens = [*prompt(27), *[5] * 20, *prompt(30, 2)]  # text, placeholders of the image, the question

    def opened(digest: bytes) -> tuple[SequenceCache, ResumePlan]:
        sequence = manager.sequence("", [ImageSpan(27, 47, digest)])
        plan = manager.open(sequence, tokens)
        assert plan is not None
        return sequence, plan

    cold_one, plan = opened(first)
    assert plan.resume == 0
    manager.commit(cold_one, tokens, len(tokens))
    manager.release(cold_one)
    again, plan = opened(first)
    assert plan.resume == 72
    manager.release(again)
    other, plan = opened(second)
    assert plan.resume == 24  # up to the block in which the image begins
    assert not {*cold_one.chain.keys[3:]} & {*other.chain.keys}
    manager.release(other)
    # Text before the image and the same picture elsewhere: the place counts as well.
    moved = manager.sequence("", [ImageSpan(31, 51, first)])
    moved.chain.extend([*prompt(31), *[5] * 20])
    assert not {*cold_one.chain.keys[3:]} & {*moved.chain.keys}


@pytest.fixture
def make_image() -> Callable[[int, str], bytes]:
    """A small picture: RGBA of its number, and the options it is decoded with."""
    return lambda number, options: b"".join((np.full((4, 4, 4), number % 251, np.uint8).tobytes(), b"%d" % number, options.encode()))


@pytest.mark.case("B037")
def test_b037_tenants_cannot_feel_each_other(tmp_path: Path, redis: Server) -> None:
    """A prompt of 600 tokens, tenant by tenant and tier by tier."""
    ids = prompt(600)
    plain = cold([ids], ANSWER)[0]

    def send(llm: LLM, salt: str) -> tuple[Output, float]:
        before = metrics(llm)
        answer = ask(llm, ids, ANSWER, salt=salt)
        settle(llm)
        same(answer, plain)
        return answer, metrics(llm)["step_tokens_total{}"] - before["step_tokens_total{}"]

    with tiered(tmp_path, redis.url) as llm:
        first, cost = send(llm, "a")
        assert (first.tiers.compute, cost) == (600, 600 + len(first.token_ids) - 1)
        for tier in ("hbm", "ssd"):
            for stranger in ("b", "", "A", "a ")[: 4 if tier == "hbm" else 0]:
                answer, paid = send(llm, stranger)
                assert (answer.usage.cached_tokens, answer.tiers.window, paid) == (0, "none", cost)
            if tier == "ssd":
                llm.engine.manager.clear()
                answer, paid = send(llm, "c")  # only the store and Redis could know
                assert (answer.usage.cached_tokens, answer.tiers.window, paid) == (0, "none", cost)
            answer, paid = send(llm, "a")
            assert (getattr(answer.tiers, tier), answer.tiers.window) == (592, "swa")
            assert paid < cost / 10
