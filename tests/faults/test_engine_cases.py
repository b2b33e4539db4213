"""Faults of scheduling, memory and counting that operators of such servers met, driven through the whole engine."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import WINDOW, Memo, assert_idle, continuation, fresh, greedy, prompt, same, short, tiny
from forebay.engine.batcher import Row
from forebay.engine.client import EngineClient
from forebay.engine.types import EngineError, OutputEvent, Request, SamplingParams
from forebay.model.errors import RequestError

CROWDED: dict[str, Any] = {"max_sequences": 40, "encoder_tokens": 256, "decoder_tokens": 256, "kv_tokens": 1000}
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": 1},
)


# Scheduling


@pytest.mark.case("B041")
def test_b041_two_hits_that_fit_only_one_after_the_other() -> None:
    memo = Memo(kv_tokens=64 * WINDOW, encoder_tokens=64)
    prefixes = [short(28 * WINDOW, number) for number in (1, 2)]
    for ids in prefixes:
        memo.add(ids, greedy(2))
    memo.finish()
    whole = [[*ids, *short(11 * WINDOW, 7 + i)] for i, ids in enumerate(prefixes)]
    names = [memo.add(ids, greedy(WINDOW)) for ids in whole]
    assert memo.finish() < 60
    for name, ids in zip(names, whole, strict=True):
        assert memo.tokens(name) == continuation(ids, WINDOW)
    # What the second one waits for is made of its own cached tail, if need be; never of what the first one has adopted.
    hits = [memo.last(name).tiers.hbm for name in names]
    assert hits[0] == 28 * WINDOW
    assert hits[1] >= 24 * WINDOW
    assert_idle(memo.engine)


@pytest.mark.case("B043")
def test_b043_what_never_fits_is_refused_at_once() -> None:
    memo = Memo(max_context=4096, kv_tokens=1024)
    with pytest.raises(RequestError, match=r"1024 tokens.*pool.*2000 tokens") as error:
        memo.add(short(2000))
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    names = [memo.add(short(20, i), greedy(5)) for i in range(10)]
    memo.finish()
    assert [memo.tokens(name) for name in names] == [continuation(short(20, i), 5) for i in range(10)]


@pytest.mark.case("B044")
def test_b044_few_windows_over_many_blocks() -> None:
    """Two windows for four hundred blocks, long shared prefixes: nobody waits although there is room, nothing is evicted in vain."""
    memo = Memo(max_sequences=2, kv_tokens=400 * WINDOW, encoder_tokens=256)
    shared = short(60 * WINDOW)
    names = [memo.add([*shared, *short(20, i + 1)], greedy(6)) for i in range(30)]
    running: list[tuple[int, int]] = []
    memo.runner.before = lambda rows: running.append((len(memo.scheduler.running), len(memo.engine.choices.known)))
    memo.finish()
    assert all(now == min(2, left) for now, left in running)
    assert all(memo.last(name).finish_reason == "length" for name in names)
    assert memo.manager.stats().evictions == 0
    assert_idle(memo.engine)


@pytest.mark.case("B045")
@pytest.mark.parametrize("exact", [False, True])
def test_b045_short_prompts_pass_a_long_one_that_goes_on(exact: bool) -> None:
    memo = Memo(max_sequences=24, kv_tokens=52_000, max_context=52_000, encoder_tokens=512, prefix_reuse=False)
    memo.runner._check = lambda row: None  # a history of 50,000 tokens at each of 400 steps
    long = memo.add([9] * 50_000, greedy(2), prefill="exact" if exact else "bounded")
    memo.step()
    sequence = memo.engine.choices.known[long]
    born: dict[str, int] = {}
    waited: dict[str, int] = {}
    numbers = random.Random(4)
    step = 0
    while len(waited) < 20:
        for _ in range(min(numbers.randrange(8), 20 - len(born))):
            born[memo.add(short(20, len(born)), greedy(40))] = step
        before = sequence.computed
        memo.step()
        step += 1
        assert sequence.computed - before >= 64
        for name in born.keys() - waited.keys():
            if memo.tokens(name):
                waited[name] = step - born[name]
    assert max(waited.values()) <= 3
    assert sequence.computed < 50_000
    memo.engine.abort(long)
    memo.finish()


@pytest.mark.case("B046")
def test_b046_a_client_that_leaves_costs_one_more_step() -> None:
    async def body() -> None:
        memo = Memo(kv_tokens=4096)
        assert memo.engine.codec is not None
        client = EngineClient(memo.engine, memo.engine.codec, "memo")
        await client.start()
        try:
            for _ in range(10):
                stream = client.submit(Request(short(20), greedy(10_000)))
                count = 0
                async for event in stream:
                    count += len(event.token_ids)
                    if count == 5:
                        break
                await stream.aclose()
                deadline = time.monotonic() + 10
                while memo.engine.busy:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.001)
                assert_idle(memo.engine)
            assert memo.value("requests_finished_total", reason="abort") == 10
        finally:
            await client.stop()

    asyncio.run(body())


@pytest.mark.case("B048")
def test_b048_a_thousand_requests_in_a_pool_that_preempts_all_the_time() -> None:
    """No token lost or doubled, every memory its own, whether sequences go on or compute again."""
    memo = Memo(kv_tokens=26 * WINDOW, encoder_tokens=48, max_sequences=8, max_queued_requests=1000)
    numbers = random.Random(2)
    asked = [(short(numbers.randrange(1, 40), i), numbers.randrange(1, 40)) for i in range(1000)]
    restored = [0]
    restore = memo.scheduler._restore

    def counted(sequence: object) -> None:
        restored[0] += 1
        restore(sequence)

    memo.scheduler._restore = counted
    names = [memo.add(ids, greedy(count)) for ids, count in asked]
    steps = 0
    while memo.engine.busy:
        memo.engine.step()
        steps += 1
        assert steps < 50_000
    for name, (ids, count) in zip(names, asked, strict=True):
        assert memo.tokens(name) == continuation(ids, count)
        assert memo.last(name).usage.completion_tokens == count
    assert memo.value("preemptions_total") > steps / 20
    assert 0 < restored[0] < memo.value("preemptions_total")
    assert memo.value("requests_finished_total", reason="length") == 1000
    assert_idle(memo.engine)


@pytest.mark.case("B039")
def test_b039_windows_and_blocks_are_all_given_back() -> None:
    """Requests that end, are aborted or break, in every state; owners are counted after every step."""
    memo = Memo(kv_tokens=30 * WINDOW, encoder_tokens=16, max_sequences=5, max_queued_requests=64)
    numbers, names = random.Random(8), []

    def sometimes(rows: Sequence[Row]) -> None:
        if numbers.random() < 0.01:
            raise RuntimeError("broken step")

    memo.runner.before = sometimes
    for _ in range(3000):
        if numbers.random() < 0.4 and memo.engine.queued < 60:
            names.append(memo.add(short(numbers.randrange(1, 70), numbers.randrange(9)), greedy(numbers.randrange(1, 25))))
        if numbers.random() < 0.1 and names:
            memo.engine.abort(numbers.choice(names[-20:]))
        try:
            memo.step()
        except RuntimeError:
            memo.manager.check([s.cache for s in memo.scheduler.running])
    memo.runner.before = lambda rows: None
    memo.finish()
    assert len(names) > 1000
    reasons = {reason: memo.value("requests_finished_total", reason=reason) for reason in ("length", "abort", "error")}
    assert sum(reasons.values()) == len(names)
    assert min(reasons.values()) > 20
    assert_idle(memo.engine)


@pytest.mark.case("B052")
def test_b052_requests_leave_no_memory_behind() -> None:
    """The bound of the case, 5 MB in 200,000 requests, for a fifth of them."""
    memo = Memo(kv_tokens=4096, max_sequences=64, max_queued_requests=100_000)
    memo.runner._check = lambda row: None
    memo.engine.sink = lambda events: None
    memo.runner.script = lambda history: 9
    params = greedy(1)

    def many(first: int, count: int) -> None:
        for start in range(first, first + count, 256):
            for i in range(start, start + 256):
                memo.engine.submit(Request([8 + i % 200, 8 + i // 200 % 200, 8 + i // 40_000], params))
            while memo.engine.busy:
                memo.engine.step()

    def resident() -> int:
        gc.collect()
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
        return sum(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmSwap"))

    many(0, 5120)
    before = resident()
    many(5120, 40_192)
    assert resident() - before < 1 << 20
    assert memo.value("requests_finished_total", reason="length") == 45_312
    assert_idle(memo.engine)


# Memory that was never written


@pytest.mark.case("B014")
def test_b014_two_hundred_mixed_requests_over_poisoned_memory() -> None:
    """Every block and window is filled with the largest values when it is handed out: a read of what was never written would show."""
    plain, poisoned = fresh(tiny(**CROWDED)), fresh(tiny(**CROWDED, poison=True))
    numbers = random.Random(6)
    ids = [prompt(numbers.randrange(1, 30), numbers.randrange(40)) for _ in range(200)]
    params = [SamplingParams(max_tokens=numbers.randrange(1, 7), ignore_eos=True, **MIXED[i % 4]) for i in range(200)]
    for left, right in zip(plain.generate(ids, params), poisoned.generate(ids, params), strict=True):
        same(left, right)
    assert poisoned.engine.manager.stats().hits > 0
    assert poisoned.engine.manager.stats().evictions > 0


@pytest.mark.case("B014")
@pytest.mark.parametrize("what", ["blocks", "windows"])
def test_poison_would_be_seen(what: str) -> None:
    """Something that is read before it is written, made by poisoning it again after every step."""
    llm = fresh(tiny(**CROWDED, poison=True))
    (right,) = llm.generate(prompt(30), greedy(4, logprobs=0))
    runner, run = fresh(llm).engine.runner, llm.engine.runner.run

    def spoiled(rows: Sequence[Row]) -> object:
        result = run(rows)
        for row in rows:
            if what == "blocks":
                runner.blocks.poison(row.sequence.cache.table)
            else:
                runner.windows.poison(row.sequence.cache.slot)
        return result

    runner.run = spoiled
    try:
        (wrong,) = llm.generate(prompt(30), greedy(4, logprobs=0))
        shows = wrong.logprobs != right.logprobs
    except EngineError:
        shows = True
    finally:
        del runner.run
    assert shows
    fresh(llm)


@pytest.mark.case("B111")
def test_b111_foreign_ids_are_refused_while_others_go_on_unchanged() -> None:
    llm = fresh(tiny())
    (expected,) = llm.generate(prompt(9), greedy(8))
    fresh(llm)
    got: list[OutputEvent] = []
    llm.engine.sink = got.extend
    llm.engine.submit(Request(prompt(9), greedy(8)))
    vocabulary = llm.engine.vocab_size
    while llm.engine.busy:
        for bad in (-1, vocabulary, 2**31):
            for request in (
                lambda bad=bad: Request([5, bad], greedy()),
                lambda bad=bad: Request([5], greedy(stop_token_ids=(bad,))),
                lambda bad=bad: Request([5], greedy(logit_bias={bad: 1.0})),
                lambda bad=bad: Request([5], greedy(allowed_token_ids=(bad,))),
            ):
                with pytest.raises(RequestError):
                    llm.engine.submit(request())
        llm.engine.step()
    llm.engine.sink = lambda events: None
    assert [token for event in got for token in event.token_ids] == expected.token_ids


# Numbers


@pytest.mark.case("B096")
def test_b096_totals_are_the_sums_of_the_requests() -> None:
    memo = Memo(kv_tokens=60 * WINDOW, encoder_tokens=32, max_sequences=6, max_queued_requests=500)
    numbers = random.Random(12)
    broken = iter([30, 90])
    at = [next(broken)]

    def before(rows: Sequence[Row]) -> None:
        if memo.runner.steps == at[0]:
            at[0] = next(broken, -1)
            raise RuntimeError("broken step")

    memo.runner.before = before
    names = [memo.add(short(numbers.randrange(1, 50), numbers.randrange(6)), greedy(numbers.randrange(4, 30))) for _ in range(150)]
    doomed = dict.fromkeys(numbers.sample(names, 50))
    memo.runner.spoil = set(numbers.sample([n for n in names if n not in doomed], 3))
    while memo.engine.busy:
        for name in [n for n, done in doomed.items() if done is None and len(memo.tokens(n)) >= 2]:
            doomed[name] = True
            memo.engine.abort(name)
        try:
            memo.step()
        except RuntimeError:
            continue
    last = {name: memo.last(name) for name in names}
    usage = [event.usage for event in last.values() if event.usage is not None]
    aborted = [name for name, event in last.items() if event.finish_reason == "abort"]
    assert len(aborted) > 35
    assert memo.value("requests_finished_total", reason="abort") == len(aborted)
    assert memo.value("requests_queued_total") == 150 == sum(
        memo.value("requests_finished_total", reason=reason) for reason in ("length", "abort", "error")
    )
    assert all(event.usage is not None and event.usage.completion_tokens == len(memo.tokens(name)) for name, event in last.items())
    generated = sum(u.completion_tokens for u in usage)
    assert memo.value("generated_tokens_total") == memo.value("request_generated_tokens_sum") == generated
    tiers = [event.tiers for event in last.values() if event.tiers is not None]
    assert memo.value("prompt_tokens_total") == sum(t.hbm + t.compute for t in tiers)
    assert memo.value("kv_tokens_total", group="global", tier="hbm") == sum(t.hbm for t in tiers) > 0
    assert memo.value("preemptions_total") == sum(event.preemptions for event in last.values())
    assert memo.value("replays_total") == sum(t.window == "replay" for t in tiers)
    assert memo.value("errors_total", kind="accounting") == 0
    assert memo.value("step_seconds_count", stage="decode") + memo.value("step_seconds_count", stage="mixed") + memo.value(
        "step_seconds_count", stage="prefill"
    ) == memo.runner.steps


@pytest.mark.case("B109")
def test_b109_scoring_a_long_prompt_never_holds_all_its_logits() -> None:
    llm = fresh(tiny("bounded", encoder_tokens=512, decoder_tokens=512))
    logits, most = llm.engine.runner.backbone.logits, [0]

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        most[0] = max(most[0], hidden.shape[0])
        return logits(hidden)

    llm.engine.runner.backbone.logits = watched
    try:
        (output,) = llm.generate(prompt(400), greedy(1, prompt_logprobs=1))
    finally:
        del llm.engine.runner.backbone.logits
    assert len(output.prompt_logprobs or []) == 400
    assert most[0] <= 64
