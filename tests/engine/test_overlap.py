"""A step ahead: the same answers, accounts and cache as without, and nothing of a row whose sequence had ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import WINDOW, Memo, assert_idle, continuation, fresh, greedy, prompt, same, short, tiny, tiny_checkpoint
from forebay.engine import device_sampler, scheduler
from forebay.engine.batcher import Row
from forebay.engine.device_sampler import launch
from forebay.engine.flight import Flight, Flights
from forebay.engine.llm import LLM
from forebay.engine.options import EngineOptions
from forebay.engine.restore_bench import measure
from forebay.engine.sampler import Sampler
from forebay.engine.sampling_state import SamplingState
from forebay.engine.tiers import TierOptions
from forebay.engine.types import OutputEvent, SamplingParams
from forebay.engine.worker import Engine
from forebay.model.errors import ConfigError

EOS = 1


def drive(overlap: bool, seed: int, **options: Any) -> tuple[Any, Memo]:
    """Requests of every kind, some aborted, in a pool that preempts: what each was told, and what is cached in the end."""
    memo = Memo(overlap=overlap, kv_tokens=40 * WINDOW, encoder_tokens=32, max_sequences=5, **options)
    numbers = random.Random(seed)
    memo.runner.script = lambda history: EOS if sum(history[-3:]) % 29 == 0 else continuation(history, 1)[0]
    names, doomed = [], {}
    for i in range(30):
        kinds: list[dict[str, Any]] = [{}, {"ignore_eos": False}, {"stop": ("a", "q")}]
        if seed % 2 or i > 20:  # those that a step cannot run ahead of, always or towards the end
            kinds += [{"logprobs": 1}, {"presence_penalty": 0.5}]
        more = kinds[i % len(kinds)]
        names.append(memo.add(short(numbers.randrange(1, 30), i % 9), greedy(numbers.randrange(1, 30), **more)))
        if i % 7 == 3:
            doomed[names[-1]] = numbers.randrange(1, 6)
    while memo.engine.busy:
        for name in [n for n, count in doomed.items() if len(memo.tokens(n)) >= count]:
            del doomed[name]
            memo.engine.abort(name)
        memo.step()
    assert_idle(memo.engine)
    told = []
    for name in names:
        last = memo.last(name)
        text = "".join(d.text for e in memo.events[name] for d in e.deltas)
        logprobs = [entry for e in memo.events[name] for entry in e.logprobs or []]
        usage = last.usage
        assert usage is not None and usage.completion_tokens == len(memo.tokens(name))
        told.append((memo.tokens(name), text, logprobs, last.finish_reason, last.matched_stop, usage.completion_tokens))
    return told, memo


@pytest.mark.parametrize("seed", range(4))
def test_the_same_answers_with_and_without(seed: int) -> None:
    plain, _ = drive(False, seed)
    ahead, memo = drive(True, seed, poison=True)
    assert ahead == plain
    assert memo.runner.ahead > 10 or seed % 2


@pytest.mark.parametrize("how", ["eos", "stop string", "stop id", "length", "abort"])
def test_nothing_beyond_the_end_is_told_or_cached(how: str) -> None:
    end = 2 * WINDOW - 4  # the row in flight is the one that would fill a block
    memo = Memo(overlap=True)
    written: list[int] = []
    memo.runner.before = lambda rows: written.extend(row.stop for row in rows)
    letter = next(i for i in range(256) if memo.engine.tokenizer.token_bytes(i) == b"z")
    last = {"eos": EOS, "stop string": letter, "stop id": 77}.get(how, 60)
    memo.runner.script = lambda history: last if len(history) == 4 + end - 1 else 60
    params = {"eos": {"ignore_eos": False}, "stop string": {"stop": ("z",)}, "stop id": {"stop_token_ids": (77,)}}.get(how, {})
    name = memo.add(short(4), greedy(end if how == "length" else 100, **params))
    while memo.engine.busy:
        if how == "abort" and len(memo.tokens(name)) == end:
            memo.engine.abort(name)
        memo.step()
    assert len(memo.tokens(name)) == end == memo.last(name).usage.completion_tokens
    assert memo.tokens(name)[-1] == last
    # Computed are all tokens but the last; only blocks full of them are cached. A row beyond ran, unless the end was known before.
    assert max(written) == 4 + end - (how == "length")
    assert memo.manager.stats().indexed == (4 + end - 1) // WINDOW == 1
    assert_idle(memo.engine)


def test_memory_of_an_ended_one_waits_for_the_row_in_flight() -> None:
    memo = Memo(overlap=True)
    memo.runner.script = lambda history: EOS if history[0] == short(4, 1)[0] and len(history) == 9 else 60
    stays, ends = memo.add(short(4), greedy(30)), memo.add(short(4, 1), greedy(30, ignore_eos=False))
    while not memo.events.get(ends) or memo.events[ends][-1].finish_reason is None:
        memo.step()
    (sequence,) = memo.leaving()
    assert sequence.id == ends and sequence.cache.is_open
    memo.step()
    assert not memo.leaving() and not sequence.cache.is_open
    memo.finish()
    assert len(memo.tokens(stays)) == 30
    assert_idle(memo.engine)


@pytest.mark.parametrize("at", range(2, 7))
def test_a_step_that_breaks_ahead_ends_its_requests_after_the_tokens_they_had(at: int) -> None:
    memo = Memo(overlap=True)
    names = [memo.add(short(4, i), greedy(9)) for i in range(3)]

    def before(rows: Sequence[Row]) -> None:
        if memo.runner.steps == at:
            raise RuntimeError("device lost")

    memo.runner.before = before
    while memo.engine.busy:
        try:
            memo.step()
        except RuntimeError:
            assert_idle(memo.engine)
    for i, name in enumerate(names):
        assert memo.last(name).finish_reason == "error"
        assert memo.tokens(name) == continuation(short(4, i), at - 1)
    assert memo.manager.stats().indexed == 0


def test_numbers_that_are_not_finite_fail_their_request_alone() -> None:
    memo = Memo(overlap=True)
    names = [memo.add(short(4, i), greedy(9)) for i in range(3)]
    while len(memo.tokens(names[1])) < 4:
        memo.step()
    memo.runner.spoil = {names[1]}
    memo.finish()
    assert memo.last(names[1]).error.code == "nonfinite_logits"
    assert [memo.tokens(names[i]) for i in (0, 2)] == [continuation(short(4, i), 9) for i in (0, 2)]
    assert_idle(memo.engine)


KINDS = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.3}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1.3, "min_p": 0.05})


def test_a_real_network_says_the_same() -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **KINDS[i % 4]) for i in range(8)]
    ids = [prompt(3 + 5 * i, i) for i in range(8)]
    plain, ahead = fresh(tiny()), fresh(tiny(overlap=True))
    for left, right in zip(plain.generate(ids, params), ahead.generate(ids, params), strict=True):
        same(left, right)
    assert_idle(ahead.engine)


needs_kernels = pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device and triton")


@needs_kernels
def test_a_network_of_kernels_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where the host really is ahead of it: buffers that are filled again too early would change tokens. Nothing in launching a
    step waits for the device."""
    launch_step, launched = Flights.launch, [0]

    def never_waiting(flights: Flights, rows: list[Row], before: Flight | None = None) -> Flight:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched[0] += before is not None
            return launch_step(flights, rows, before)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Flights, "launch", never_waiting)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=i, **KINDS[i % 4]) for i in range(8)]
    ids = [prompt(30 + 5 * i, i) for i in range(8)]
    found = []
    # All prompts in one step, so that all steps have the same rows in both ways.
    options: dict[str, Any] = {"max_sequences": 8, "kv_tokens": 4096, "encoder_tokens": 512, "decoder_tokens": 512, "prefix_reuse": False}
    for overlap in (False, None):
        with LLM(str(tiny_checkpoint()), "cuda", kernels=True, overlap=overlap, **options) as llm:
            assert (llm.engine.flights is None) == (overlap is False)
            found.append(llm.generate(ids, params))
            assert_idle(llm.engine)
    assert launched[0] > 30
    for left, right in zip(*found, strict=True):
        same(left, right)


def test_steps_go_ahead_while_blocks_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefix is restored beside decoding streams: their steps do not wait for it, and it is counted once it is in."""
    monkeypatch.setattr(scheduler, "RESTORED_AT_ONCE", 8)
    launch_step, ahead, engines = Flights.launch, [0], set[Flights]()

    def counting(flights: Flights, rows: list[Row], before: Flight | None = None) -> Flight:
        engines.add(flights)
        ahead[0] += before is not None and any(s.restoring for s in flights.scheduler.running)
        return launch_step(flights, rows, before)

    def open_model(tiers: TierOptions, tokens: int, sequences: int) -> LLM:
        return LLM(str(tiny_checkpoint()), tiers=tiers, kv_tokens=tokens, max_sequences=sequences, overlap=True)

    monkeypatch.setattr(Flights, "launch", counting)
    found = measure(open_model, tmp_path, tokens=320, streams=3, context=20, steps=5, repeats=2, report=lambda line: None)
    assert len(found.restore_s) == 2 and min(found.restore_s) > 0
    assert ahead[0] >= 6  # 40 blocks, 8 in a step, twice
    (flights,) = engines
    assert not flights.scheduler.running and not flights.scheduler.waiting


@needs_kernels
def test_nothing_waits_for_the_device_while_blocks_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a copy: blocks go from pinned memory, beside the steps. The step that is settled is waited for by its event."""
    land, landed = Engine._land, [0]

    def never_waiting(engine: Engine, flights: Flights, flight: Flight, events: list[OutputEvent]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            land(engine, flights, flight, events)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        landed[0] += any(s.restoring for s in engine.scheduler.running)

    def open_model(tiers: TierOptions, tokens: int, sequences: int) -> LLM:
        options: dict[str, Any] = {"kv_tokens": tokens, "max_sequences": sequences, "encoder_tokens": 512, "decoder_tokens": 512}
        return LLM(str(tiny_checkpoint()), "cuda", kernels=True, tiers=tiers, **options)

    monkeypatch.setattr(Engine, "_land", never_waiting)
    found = measure(open_model, tmp_path, tokens=3200, streams=3, context=20, steps=5, repeats=2, report=lambda line: None)
    assert found.captured and len(found.restore_s) == 2
    assert landed[0] >= 15  # 400 blocks, 64 in a step, three times


def test_steps_go_ahead_while_somebody_waits_for_room() -> None:
    """A queue whose head does not fit changes nothing for those that run; it is admitted as soon as there is room."""
    memo = Memo(overlap=True, kv_tokens=8 * WINDOW, max_sequences=4)
    runs = memo.add(short(20), greedy(21))
    memo.step()
    waits, behind = memo.add(short(33, 1), greedy(9)), memo.add(short(4, 2), greedy(9))  # who would fit does not overtake
    while not memo.events.get(waits):
        memo.step()
        if len(memo.tokens(runs)) == 20:
            assert memo.runner.ahead >= 18
            assert [s.id for s in memo.scheduler.waiting] == [waits, behind]
    assert memo.runner.steps <= 24, "a place that is free again is taken at once"
    memo.finish()
    assert [memo.tokens(name) for name in (runs, waits, behind)] == [
        continuation(short(20), 21), continuation(short(33, 1), 9), continuation(short(4, 2), 9)
    ]  # fmt: skip
    assert_idle(memo.engine)


def test_whoever_waits_for_room_gets_in_as_soon_as_it_needs_less() -> None:
    """There are never more blocks than when it found no room; but one that runs computes the history that it begins with."""
    began = {}
    for overlap in (False, True):
        memo = Memo(overlap=overlap, kv_tokens=27 * WINDOW, max_sequences=4)
        ids = short(20)
        runs = memo.add(ids, greedy(180))
        memo.step()
        waits = memo.add([*ids, *continuation(ids, 180)], greedy(5))
        while not memo.events.get(waits):
            memo.step()
        began[overlap] = len(memo.tokens(runs))
        memo.finish()
        assert_idle(memo.engine)
    assert began[True] <= began[False] + 2 < 10


@pytest.mark.parametrize("again", [False, True])
def test_an_admission_that_fails_beside_a_step_does_not_end_the_step(again: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the next schedule meets it as if nobody had tried before."""
    memo = Memo(overlap=True)
    names = [memo.add(short(4, i), greedy(20)) for i in range(3)]
    while len(memo.tokens(names[0])) < 5:
        memo.step()
    opens, failures = memo.manager.open, [RuntimeError("no such window")] * (1 + again)

    def failing(*given: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return opens(*given, **more)

    memo.manager.open = failing  # type: ignore[method-assign]
    names.append(memo.add(short(4, 3), greedy(20)))
    memo.step()
    (record,) = [r for r in caplog.records if r.exc_info]
    assert record.name == "forebay.engine" and "no such window" in str(record.exc_info)
    if again:
        with pytest.raises(RuntimeError, match="no such window"):
            memo.step()
    memo.finish()
    assert [memo.tokens(name) for name in names] == [continuation(short(4, i), 20) for i in range(4)]
    assert_idle(memo.engine)


def test_overlap_is_for_kernels_unless_asked_for() -> None:
    assert EngineOptions().overlap is None
    assert tiny().engine.flights is None
    assert tiny(overlap=True).engine.flights is not None
    with pytest.raises(ConfigError, match="overlap must be bool or None"):
        EngineOptions(overlap=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("top_p", "rows", "draws"), [(1.0, 64, 1), (0.95, 1, 2), (0.95, 64, 3), (0.5, 1, 4), (0.02, 64, 7)])
def test_draws_are_as_many_as_almost_always_suffice(top_p: float, rows: int, draws: int) -> None:
    assert device_sampler.rounds([top_p] * rows) == draws


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))])
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_tokens_on_the_device_are_those_of_the_sampler(rounds: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the draws made at once do not suffice, and over ties."""
    monkeypatch.setattr(device_sampler, "ROUNDS", rounds)
    numbers = torch.Generator().manual_seed(rounds)
    vocab, changed = 1000, 0
    for trial in range(12):
        logits = (torch.randn((16, vocab), generator=numbers) * 3).round(decimals=trial % 2)
        logits[trial % 16, 7] = torch.nan if trial % 3 == 0 else 1.0
        params = [SamplingParams(seed=trial * 16 + i, top_p=(1.0, 0.02, 0.7)[i % 3], **_without_top_p(KINDS[i % 4])) for i in range(16)]
        states = [SamplingState(p, (), p.seed) for p in params]
        logits = logits.to(device)
        ahead = launch(logits, states, [0] * 16)
        found, redone = ahead.wait()
        good = [i for i in range(16) if bool(logits[i].isfinite().all())]
        assert all(0 <= int(token) < vocab for token in ahead.tokens)  # whatever it is, the next step looks it up
        wanted = Sampler(vocab, frozenset()).sample(logits[good], [states[i] for i in good]).token_ids
        assert [found[i] for i in good] == wanted
        assert all(found[i] is None for i in range(16) if i not in good)
        changed += len(redone)
    assert (changed > 0) == (rounds < 7)


def _without_top_p(kind: dict[str, float]) -> dict[str, Any]:
    return {name: value for name, value in kind.items() if name != "top_p"}
