"""The engine: from submission to the last event, on MEMO, which checks the memory it is handed at every step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engines import WINDOW, Memo, assert_idle, continuation, greedy, short
from forebay.cache.manager import Policy
from forebay.engine import worker
from forebay.engine.batcher import Row
from forebay.engine.options import EngineOptions
from forebay.engine.types import EngineError, QueueFullError, QueueTimeoutError, Request, SamplingParams, UnavailableError
from forebay.model.errors import ConfigError, RequestError

EOS = 1


def says(*tokens: int, after: int) -> Any:
    """A script that gives these tokens from position `after` on, and 200 for ever then."""
    return lambda history: tokens[len(history) - after] if len(history) - after < len(tokens) else 200


def text_ids(memo: Memo, text: str) -> list[int]:
    """Bytes of a text as tokens of MEMO's vocabulary."""
    single = {memo.engine.tokenizer.token_bytes(i): i for i in range(256)}
    return [single[bytes([byte])] for byte in text.encode()]


# Ends


def test_length_at_max_tokens_and_every_event_is_accounted_for() -> None:
    memo = Memo()
    name = memo.add(short(10), greedy(5))
    memo.finish()
    assert memo.tokens(name) == continuation(short(10), 5)
    event = memo.last(name)
    assert event.finish_reason == "length"
    assert [len(e.token_ids) for e in memo.events[name]] == [1] * 5
    assert event.usage is not None
    assert (event.usage.prompt_tokens, event.usage.completion_tokens, event.usage.cached_tokens) == (10, 5, 0)
    times = event.times
    assert times is not None
    assert times.arrived <= (times.scheduled or 0) <= (times.first_token or 0) <= (times.last_token or 0) <= (times.finished or 0)
    assert_idle(memo.engine)


def test_end_of_sequence_ends_unless_ignored() -> None:
    memo = Memo()
    memo.runner.script = says(50, EOS, 51, after=4)
    names = [memo.add(short(4), greedy(4, ignore_eos=ignore)) for ignore in (False, True)]
    memo.finish()
    assert [memo.tokens(name) for name in names] == [[50, EOS], [50, EOS, 51, 200]]
    assert [(memo.last(n).finish_reason, memo.last(n).matched_stop) for n in names] == [("stop", None), ("length", None)]


def test_stop_ids_and_stop_strings() -> None:
    memo = Memo()
    ids = text_ids(memo, "one END two")
    memo.runner.script = says(*ids, after=4)
    by_id = memo.add(short(4), greedy(40, stop_token_ids=(ids[2],)))
    by_text = memo.add(short(4), greedy(40, stop=("END", "never")))
    kept = memo.add(short(4), greedy(40, stop=("END",), include_stop=True))
    memo.finish()
    text = {name: "".join(d.text for e in memo.events[name] for d in e.deltas) for name in (by_id, by_text, kept)}
    assert text == {by_id: "on", by_text: "one ", kept: "one END"}
    assert memo.last(by_id).matched_stop == ids[2]
    assert memo.last(by_text).matched_stop == "END"
    assert len(memo.tokens(by_text)) == len("one END")


def test_min_tokens_holds_back_every_end_the_request_has() -> None:
    memo = Memo()
    memo.runner.script = lambda history: EOS
    plain = memo.add(short(4), greedy(9, ignore_eos=False, min_tokens=3))
    named = memo.add(short(4), greedy(9, ignore_eos=False, min_tokens=3, stop_token_ids=(0, 2)))
    memo.finish()
    for name, held in ((plain, {EOS}), (named, {EOS, 0, 2})):
        assert not held & set(memo.tokens(name)[:3])
        assert memo.tokens(name)[3:] == [EOS]
    # A chat answer also ends at role markers, which the request does not name.
    prompt = memo.engine.codec.encode({"messages": [{"role": "user", "content": "x"}]})
    sequence = memo.engine.prepare(Request(short(4), greedy(9, ignore_eos=False, min_tokens=3), prompt=prompt))
    assert set(sequence.sampling.params.stop_token_ids) == {i for i in memo.engine.tokenizer.stop_ids if i < memo.engine.vocab_size}
    assert sequence.request.params.stop_token_ids == ()


def test_context_limit_ends_with_length() -> None:
    memo = Memo(max_context=20)
    name = memo.add(short(15), SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
    more = memo.add(short(15, 1), greedy(1000))
    memo.finish()
    for each in (name, more):
        assert memo.last(each).finish_reason == "length"
        assert len(memo.tokens(each)) == 5


def test_an_output_longer_than_the_pool_ends_with_length() -> None:
    memo = Memo(kv_tokens=6 * WINDOW)
    name = memo.add(short(5), greedy(10_000))
    other = memo.add(short(5, 1), greedy(20))
    memo.finish()
    assert memo.last(name).finish_reason == "length"
    assert len(memo.tokens(name)) == 6 * WINDOW - 5
    assert memo.tokens(name) == continuation(short(5), 6 * WINDOW - 5)
    assert memo.tokens(other) == continuation(short(5, 1), 20)
    assert_idle(memo.engine)


# Refusals


@pytest.mark.case("B111")
def test_requests_that_can_never_run_are_refused_and_leave_nothing() -> None:
    memo = Memo(max_context=32)
    bad = [
        (Request([], greedy()), "prompt"),
        (Request([5, 256], greedy()), "prompt"),
        (Request([-1], greedy()), "prompt"),
        (Request(short(32), greedy()), "prompt"),
        (Request(short(4), greedy(stop_token_ids=(256,))), "stop_token_ids"),
        (Request(short(4), greedy(logit_bias={-1: 1.0})), "logit_bias"),
        (Request(short(4), greedy(allowed_token_ids=())), "allowed_token_ids"),
    ]
    for request, field in bad:
        with pytest.raises(RequestError) as error:
            memo.engine.submit(request)
        assert error.value.param == field
    assert_idle(memo.engine)
    assert memo.value("requests_queued_total") == 0


@pytest.mark.case("B050")
def test_the_queue_is_bounded_and_says_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memo = Memo(max_sequences=1, max_queued_requests=16)
    memo.add(short(4), greedy(50))
    memo.step()
    taken = [memo.add(short(4), greedy(2)) for _ in range(16)]
    for _ in range(84):
        with pytest.raises(QueueFullError, match="limit is 16") as error:
            memo.add(short(4), greedy(2))
        assert error.value.retry_after == 1.0
    memo.step()
    monkeypatch.setattr(worker.time, "monotonic", lambda now=time.monotonic: now() + 17.0)
    with pytest.raises(QueueFullError) as error:
        memo.add(short(4), greedy(2))
    assert 17.0 <= error.value.retry_after < 30.0
    monkeypatch.undo()
    memo.finish()
    assert all(memo.last(name).finish_reason == "length" for name in taken)
    assert memo.value("rejected_total", reason="queue_full") == 85
    assert_idle(memo.engine)


def test_a_request_that_waited_too_long_ends_with_an_error() -> None:
    memo = Memo(max_sequences=1, max_queue_wait_s=30.0)
    runs = memo.add(short(4), greedy(5))
    memo.step()
    late = memo.add(short(4), greedy(5), arrived=time.monotonic() - 31.0)
    memo.finish()
    assert memo.tokens(runs) == continuation(short(4), 5)
    event = memo.last(late)
    assert isinstance(event.error, QueueTimeoutError)
    assert event.error.status == 503
    assert event.finish_reason == "error"
    assert event.tiers is None
    assert memo.value("errors_total", kind="overloaded") == 1
    assert_idle(memo.engine)


def test_options_that_cannot_be_are_refused_by_name() -> None:
    for name, value in (("max_sequences", 0), ("kv_tokens", 0), ("aging_s", -1.0), ("decoder_tokens", 8)):
        with pytest.raises(ConfigError) as error:
            EngineOptions(**{name: value})
        assert error.value.param == name


# What a request accepts


def test_wishes_of_a_request_come_before_the_engines() -> None:
    plain, strict = Memo(), Memo(replay="exact", max_lineage=3)
    for memo, more, policy in (
        (plain, {}, Policy("bounded", "bounded", None)),
        (plain, {"replay": "exact", "max_lineage": 0}, Policy("bounded", "exact", 0)),
        (plain, {"prefill": "exact"}, Policy("exact", "exact", 0)),
        (plain, {"prefill": "exact", "replay": "bounded", "max_lineage": 5}, Policy("exact", "exact", 0)),
        (plain, {"params": greedy(prompt_logprobs=1)}, Policy("exact", "exact", 0)),
        (strict, {}, Policy("bounded", "exact", 3)),
        (strict, {"replay": "bounded", "max_lineage": 0}, Policy("bounded", "bounded", 0)),
    ):
        request = {"params": greedy(), **more}
        assert memo.engine.prepare(Request(short(4), **request)).policy == policy


# Aborts


@pytest.mark.case("B046")
@pytest.mark.parametrize("when", ["just submitted", "queued", "prefilling", "decoding", "preempted"])
def test_an_abort_takes_effect_within_one_step(when: str) -> None:
    memo = Memo(max_sequences=1 if when in ("queued", "preempted") else 4, encoder_tokens=16)
    keeps = memo.add(short(6, 1), greedy(40))
    memo.step()
    name = memo.add(short(40), greedy(10_000))
    if when != "just submitted":
        memo.step()
    if when == "decoding":
        while not memo.tokens(name):
            memo.step()
    if when == "preempted":
        memo.scheduler._preempt(memo.scheduler.running[0])
        name, keeps = keeps, name
    memo.engine.abort(name)
    memo.step()
    event = memo.last(name)
    assert event.finish_reason == "abort"
    assert event.error is None
    assert name not in memo.engine.choices.known
    assert name not in [s.id for s in memo.scheduler.running + memo.scheduler.waiting]
    if when != "preempted":
        memo.finish()
        assert memo.tokens(keeps) == continuation(short(6, 1), 40)
    else:
        memo.engine.abort(keeps)
        memo.finish()
    assert_idle(memo.engine)


def test_unknown_ids_and_second_aborts_are_ignored() -> None:
    memo = Memo()
    name = memo.add(short(4), greedy(5))
    memo.engine.abort("nobody")
    memo.engine.abort(name)
    memo.engine.abort(name)
    memo.finish()
    assert memo.last(name).finish_reason == "abort"
    assert memo.value("aborts_total") == 1


# Failures


def fail_once(memo: Memo, name: str, error: Exception) -> None:
    """The next step that has a row of this request breaks."""

    def before(rows: Sequence[Row]) -> None:
        if any(row.sequence.id == name for row in rows):
            memo.runner.before = lambda rows: None
            raise error

    memo.runner.before = before


@pytest.mark.case("B117")
def test_a_broken_step_ends_its_requests_and_no_others() -> None:
    memo = Memo(encoder_tokens=24, max_sequences=2)
    doomed = memo.add(short(30), greedy(30))
    while not memo.tokens(doomed):
        memo.step()
    queued = [memo.add(short(9, i), greedy(5)) for i in (1, 2)]
    fail_once(memo, doomed, RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        memo.step()
    event = memo.last(doomed)
    assert event.finish_reason == "error"
    assert isinstance(event.error, EngineError)
    assert "device lost" not in str(event.error)
    assert memo.manager.stats().indexed == 0, "nothing that a broken step computed may be reused"
    again = memo.add(short(9, 5), greedy(5))
    memo.finish()
    assert memo.last(queued[1]).finish_reason == "length"
    assert memo.tokens(again) == continuation(short(9, 5), 5)
    assert memo.value("errors_total", kind="step_failed") == 1
    assert_idle(memo.engine)


def test_events_of_a_broken_step_still_arrive() -> None:
    """An abort that was taken in before the step broke, and a failure outside the rows."""
    memo = Memo()
    gone, stays = memo.add(short(4), greedy(9)), memo.add(short(5), greedy(9))
    memo.step()
    memo.engine.abort(gone)
    schedule = memo.scheduler.schedule
    memo.scheduler.schedule = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        memo.engine.step()
    assert memo.last(gone).finish_reason == "abort"
    memo.scheduler.schedule = schedule
    memo.finish()
    assert memo.tokens(stays) == continuation(short(5), 9)


def test_a_failure_after_some_tokens_were_accepted_loses_and_doubles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step breaks while its second sequence is being ended: what the first one got stays its own."""
    memo = Memo()
    first, second = memo.add(short(4), greedy(3)), memo.add(short(5), greedy(3))
    memo.step()
    memo.step()
    real, calls = memo.engine.choices.accept, []

    def breaks(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return real(*args)

    monkeypatch.setattr(memo.engine.choices, "accept", breaks)
    with pytest.raises(RuntimeError):
        memo.step()
    assert memo.tokens(first) == continuation(short(4), 3)
    assert memo.last(first).finish_reason == "length"
    assert memo.tokens(second) == continuation(short(5), 2)
    assert memo.last(second).finish_reason == "error"
    assert memo.value("generated_tokens_total") == 5
    assert_idle(memo.engine)


@pytest.mark.parametrize("scored", [False, True])
def test_numbers_that_are_not_finite_fail_their_request_alone(scored: bool) -> None:
    memo = Memo()
    params = greedy(6, prompt_logprobs=0) if scored else greedy(6)
    names = [memo.add(short(20 + i, i), params if i == 2 else greedy(6)) for i in range(5)]
    if scored:
        real = memo.runner.logits
        memo.runner.logits = lambda hidden: real(hidden) * torch.nan
    else:
        memo.runner.spoil = {names[2], names[3]}
    memo.finish()
    failed = names[2:3] if scored else names[2:4]
    for i, name in enumerate(names):
        event = memo.last(name)
        if name in failed:
            assert event.error is not None
            assert event.error.code == "nonfinite_logits"
            assert memo.tokens(name) == []
        else:
            assert memo.tokens(name) == continuation(short(20 + i, i), 6)
    assert memo.value("errors_total", kind="nonfinite_logits") == len(failed)
    # Of a failed one nothing is left to adopt: sent again it is computed again.
    memo.runner.spoil = set()
    again = memo.add(short(22, 2), greedy(6))
    memo.finish()
    assert memo.last(again).tiers.hbm == 0
    assert_idle(memo.engine)


def test_all_rows_not_finite() -> None:
    memo = Memo()
    names = [memo.add(short(4), greedy(3)) for _ in range(2)]
    memo.runner.spoil = set(names)
    memo.finish()
    assert [memo.last(name).finish_reason for name in names] == ["error", "error"]


def test_output_that_cannot_be_read_fails_its_request_alone() -> None:
    memo = Memo()
    odd, fine = memo.add(short(4), greedy(6)), memo.add(short(5), greedy(6))
    memo.step()

    def push(token: int) -> Any:
        raise ValueError("no such state")

    memo.engine.choices.known[odd].output.push = push
    memo.finish()
    event = memo.last(odd)
    assert event.error is not None
    assert event.error.code == "output_failed"
    assert memo.tokens(fine) == continuation(short(5), 6)
    assert_idle(memo.engine)


# Closing


def test_after_refusal_the_started_go_on_and_nobody_else_is_taken() -> None:
    memo = Memo(max_sequences=2, kv_tokens=64)
    runs, also = memo.add(short(4), greedy(30)), memo.add(short(5), greedy(20))
    memo.step()
    waits = memo.add(short(6), greedy(30))
    memo.step()
    memo.scheduler._preempt(memo.scheduler.running[1])
    memo.engine.refuse_waiting(UnavailableError("closing", code="draining"))
    with pytest.raises(UnavailableError, match="closing"):
        memo.add(short(4))
    memo.finish()
    assert memo.last(waits).error is not None
    assert memo.last(waits).error.code == "draining"
    assert memo.tokens(runs) == continuation(short(4), 30)
    assert memo.tokens(also) == continuation(short(5), 20), "a preempted request has started"
    assert_idle(memo.engine)


def test_ending_all_ends_running_waiting_and_just_submitted() -> None:
    memo = Memo(max_sequences=1)
    names = [memo.add(short(4 + i), greedy(30)) for i in range(2)]
    memo.step()
    names.append(memo.add(short(9), greedy(30)))
    memo.engine.fail_all(EngineError("over", code="engine_dead"))
    assert {memo.last(name).error.code for name in names} == {"engine_dead"}
    with pytest.raises(UnavailableError):
        memo.add(short(4))
    assert_idle(memo.engine)


# Chat


def test_a_chat_request_goes_through_the_parser_and_its_reasoning_is_counted() -> None:
    memo = Memo()
    codec, tokenizer = memo.engine.codec, memo.engine.tokenizer
    assert codec is not None
    prompt = codec.encode({"messages": [{"role": "user", "content": "hello"}]})
    assert prompt.thinking
    answer = [*text_ids(memo, "hm"), 300, *text_ids(memo, "yes")]
    end = tokenizer.think_end_id
    assert end is not None

    # MEMO's vocabulary ends before the markers; what is sampled is replaced on its way to the parser.
    sequence = memo.engine.prepare(Request(short(4), greedy(6), prompt=prompt))
    push = sequence.output.push
    sequence.output.push = lambda token: push(end if token == 255 else token)
    memo.runner.script = says(*(255 if i == 300 else i for i in answer), after=4)
    memo.engine.enqueue(sequence)
    memo.finish()
    deltas = [(d.channel, d.text) for e in memo.events[sequence.id] for d in e.deltas]
    assert "".join(text for channel, text in deltas if channel == "reasoning") == "hm"
    assert "".join(text for channel, text in deltas if channel == "content") == "yes"
    usage = memo.last(sequence.id).usage
    assert usage is not None
    assert (usage.reasoning_tokens, usage.completion_tokens) == (2, 6)
    assert memo.value("reasoning_tokens_total") == 2


# Numbers


def test_logprobs_come_with_the_tokens_they_belong_to() -> None:
    memo = Memo()
    name = memo.add(short(4), greedy(5, logprobs=1))
    memo.finish()
    found = [entry for event in memo.events[name] for entry in event.logprobs or []]
    assert [entry.token_id for entry in found] == memo.tokens(name) == [entry.top[0][0] for entry in found]


def test_tiers_sum_to_the_prompt() -> None:
    memo = Memo()
    first = memo.add(short(40), greedy(3))
    memo.finish()
    again = memo.add([*short(40), 7, 7, 7], greedy(3))
    window = memo.add(short(WINDOW + 3), greedy(3))
    memo.finish()
    tiers = {name: memo.last(name).tiers for name in (first, again, window)}
    assert [(t.hbm, t.ssd, t.compute, t.window, t.replayed) for t in tiers.values() if t] == [
        (0, 0, 40, "none", 0),
        (40, 0, 3, "replay", WINDOW),
        (0, 0, WINDOW + 3, "none", 0),
    ]
    assert memo.last(again).usage.cached_tokens == 40
    assert memo.value("kv_tokens_total", group="global", tier="hbm") == 40
    assert memo.value("prompt_tokens_total") == 83 + WINDOW + 3


def test_gauges_follow_the_engine() -> None:
    memo = Memo(max_sequences=2, kv_tokens=16 * WINDOW)
    for i in range(3):
        memo.add(short(20, i), greedy(50))
    memo.step()
    memo.step()
    assert (memo.value("requests_running"), memo.value("requests_waiting")) == (2, 1)
    assert memo.value("windows", state="used") == 2
    states = {state: memo.value("kv_blocks", tier="hbm", state=state) for state in ("free", "used", "cached")}
    assert states == {"free": 8, "used": 8, "cached": 0}
    memo.finish()
    assert (memo.value("requests_running"), memo.value("requests_waiting"), memo.value("windows", state="used")) == (0, 0, 0)
    assert memo.value("kv_evictions_total", tier="hbm") == memo.manager.stats().evictions
