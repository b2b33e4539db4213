"""Faults of prefix reuse that operators of such servers met, driven through the whole engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3

from engines import WINDOW, Memo, assert_idle, continuation, fresh, greedy, prompt, same, short, tiny
from forebay.engine.llm import LLM


@pytest.mark.case("B001")
def test_b001_a_prompt_repeated_after_other_traffic_says_the_same() -> None:
    llm = fresh(tiny())
    ids, params = prompt(40), greedy(8, logprobs=1)
    cold = llm.generate(ids, params)[0]
    repeat = llm.generate(ids, params)[0]
    assert (cold.tiers.hbm, repeat.tiers.hbm, repeat.tiers.window, repeat.tiers.replayed) == (0, 32, "replay", WINDOW)
    for round_ in range(3):
        # As many strangers as there are window slots, so that every slot has had another owner.
        llm.generate([prompt(12 + i, 10 * round_ + i + 1) for i in range(8)], greedy(3))
        again = llm.generate(ids, params)[0]
        assert again.usage.cached_tokens == 32
        same(again, repeat)
    assert cold.finish_reason == repeat.finish_reason == "length"
    assert len(repeat.token_ids) == 8


@pytest.mark.case("B001")
def test_b001_the_golden_network_repeats_itself(golden: Path) -> None:
    llm = LLM(str(golden / "tiny-a" / "checkpoint"), max_sequences=4, kv_tokens=2048, decoder_tokens=64)
    ids = [5 + (k * k * 11) % 500 for k in range(30)]
    llm.generate(ids, greedy(1))
    repeat = llm.generate(ids, greedy(4, logprobs=1))[0]
    llm.generate([[7 + (i + k * k * 13) % 490 for k in range(9)] for i in range(4)], greedy(2))
    again = llm.generate([ids, [9] * 5], greedy(4, logprobs=1))[0]
    assert again.tiers.hbm == repeat.tiers.hbm == 24
    same(again, repeat)


@pytest.mark.case("B003")
@pytest.mark.parametrize("tail", [1, 2, 5])
def test_b003_a_replay_changes_no_stored_byte(tail: int) -> None:
    """At odd and even lengths, cut into odd chunks: what is cached stays as it is, and what the replay leaves out is what was stored."""
    llm = fresh(tiny("bounded", encoder_tokens=5))
    pool, index = llm.engine.runner.blocks, llm.engine.manager.index
    llm.generate(prompt(48), greedy(2))
    cached = list(index._by_block)
    before = {block: blake3(pool.data[block].numpy()).digest() for block in cached}
    assert len(cached) == 6
    for hit in (16, 24, 40):
        output = llm.generate(prompt(48)[:hit] + prompt(tail, 50 + hit), greedy(3))[0]
        assert (output.tiers.hbm, output.tiers.window) == (hit, "replay")
    assert {block: blake3(pool.data[block].numpy()).digest() for block in cached} == before


@pytest.mark.case("B003")
def test_b003_no_other_request_writes_into_what_is_cached() -> None:
    """A hundred mixed requests over few blocks: a block that is cached keeps its bytes for as long as it is cached."""
    memo = Memo(kv_tokens=40 * WINDOW, encoder_tokens=20, max_sequences=4)
    numbers, index, pool = random.Random(1), memo.manager.index, memo.runner.blocks
    known: dict[int, bytes] = {}
    left = 100
    while left or memo.engine.busy:
        if left and numbers.random() < 0.5:
            left -= 1
            memo.add(short(numbers.randrange(1, 60), numbers.randrange(5)), greedy(numbers.randrange(1, 30)))
        memo.step()
        now = {index.serial(block): blake3(pool.data[block].numpy()).digest() for block in index._by_block}
        assert all(known.get(serial, digest) == digest for serial, digest in now.items())
        known = now
    assert_idle(memo.engine)


@pytest.mark.case("B020")
def test_b020_a_long_prompt_survives_many_short_ones() -> None:
    memo = Memo(kv_tokens=100 * WINDOW, encoder_tokens=512)
    long = short(90 * WINDOW)
    memo.add(long, greedy(2))
    memo.finish()
    for i in range(20):
        memo.add(short(10, i + 1), greedy(3))
        memo.finish()
    again = memo.add([*long, 9], greedy(2))
    memo.finish()
    tiers = memo.last(again).tiers
    assert tiers is not None
    assert tiers.hbm >= 0.9 * len(long)


@pytest.mark.case("B023")
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_b023_prompts_of_whole_blocks_are_sent_again(blocks: int) -> None:
    llm = fresh(tiny())
    ids = prompt(blocks * WINDOW)
    first, second, third = (llm.generate(ids, greedy(6, logprobs=0))[0] for _ in range(3))
    # A hit leaves a token to compute, and one of a single window is not worth adopting.
    assert second.tiers.hbm == third.tiers.hbm == (16 if blocks == 3 else 0)
    assert second.tiers.compute >= 1
    same(third, second)
    if second.tiers.hbm == 0:
        same(second, first)


def test_salts_do_not_share() -> None:
    memo = Memo()
    for salt in ("a", "b"):
        memo.add(short(40), greedy(2), salt=salt)
        memo.finish()
    names = [memo.add([*short(40), 9], greedy(2), salt=salt) for salt in ("a", "b", "c")]
    memo.finish()
    assert [memo.last(name).tiers.hbm for name in names] == [40, 40, 0]


def test_what_was_generated_is_reused_too() -> None:
    """The next turn of a conversation."""
    memo = Memo()
    first = memo.add(short(20), greedy(30))
    memo.finish()
    turn = [*short(20), *memo.tokens(first), 9, 10]
    second = memo.add(turn, greedy(4))
    memo.finish()
    assert memo.last(second).tiers.hbm == 48
    assert memo.tokens(second) == continuation(turn, 4)
