"""Choices of one prompt: computed once, and each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engines import assert_idle, fresh, greedy, prompt, same, tiny
from forebay.engine.llm import LLM
from forebay.engine.types import Output, OutputEvent, Request, SamplingParams

SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True, logprobs=2)


def count_rows(llm: LLM) -> Callable[[], int]:
    """Prompt positions run from now on."""
    inner, seen = llm.engine.runner.run, [0]

    def run(rows, record=None):  # type: ignore[no-untyped-def]
        seen[0] += sum(row.stop - row.start for row in rows if row.start < row.sequence.prompt_tokens)
        return inner(rows, record)

    llm.engine.runner.run = run  # type: ignore[method-assign]

    def stop() -> int:
        llm.engine.runner.run = inner  # type: ignore[method-assign]
        return seen[0]

    return stop


@pytest.mark.parametrize("tokens", [3, 8, 21, 64, 77])
@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_choices_equal_lone_requests(tokens: int, mode: str) -> None:
    llm = fresh(tiny(mode))
    many = llm.generate([prompt(tokens)], SamplingParams(**{**vars(SAMPLED), "n": 4}))
    assert_idle(llm.engine)
    for i, choice in enumerate(many):
        alone = fresh(llm).generate([prompt(tokens)], SamplingParams(**{**vars(SAMPLED), "seed": 11 + i}))[0]
        same(choice, alone)


def test_the_prompt_is_computed_once() -> None:
    llm = fresh(tiny())
    stop = count_rows(llm)
    many = llm.generate([prompt(200)], SamplingParams(**{**vars(SAMPLED), "n": 6}))
    assert stop() == 200
    assert [o.tiers.compute for o in many] == [200, 0, 0, 0, 0, 0]
    assert [o.tiers.hbm for o in many] == [0, 200, 200, 200, 200, 200]
    assert {o.tiers.window for o in many[1:]} == {"live"}


def test_choices_with_prompt_logprobs_and_one_token() -> None:
    llm = fresh(tiny())
    one, two = llm.generate([prompt(30)], greedy(1, n=2, prompt_logprobs=1))
    assert one.prompt_logprobs == two.prompt_logprobs
    assert len(one.prompt_logprobs or []) == 30
    assert one.token_ids == two.token_ids


def run(llm: LLM, requests: list[Request], after_first_step: Callable[[], None]) -> dict[str, list[OutputEvent]]:
    events: dict[str, list[OutputEvent]] = {}
    llm.engine.sink = lambda found: [events.setdefault(e.request_id, []).append(e) for e in found] and None
    for request in requests:
        llm.engine.submit(request)
    llm.engine.step()
    after_first_step()
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.sink = lambda found: None
    return events


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_an_aborted_choice_does_not_take_the_others_along(gone: int) -> None:
    llm = fresh(tiny(encoder_tokens=16))
    requests = [Request(prompt(60), greedy(4), share="s") for _ in range(3)]
    events = run(llm, requests, lambda: llm.engine.abort(requests[gone].request_id))
    ends = [events[r.request_id][-1].finish_reason for r in requests]
    assert ends == ["abort" if i == gone else "length" for i in range(3)]
    texts = {tuple(t for e in events[r.request_id] for t in e.token_ids) for i, r in enumerate(requests) if i != gone}
    assert len(texts) == 1
    assert_idle(llm.engine)


def test_a_choice_that_takes_less_from_the_cache_has_its_own_prefill() -> None:
    """Bounded and exact prefill give this prompt different texts; neither choice may get the other's."""
    llm = fresh(tiny())
    requests = [Request(prompt(60, 1), greedy(8), share="s", prefill=mode) for mode in ("bounded", "exact", "bounded", "exact")]
    events = run(llm, requests, lambda: None)
    texts = [tuple(t for e in events[r.request_id] for t in e.token_ids) for r in requests]
    assert texts[0] != texts[1]
    for request, text in zip(requests, texts, strict=True):
        alone = Request(prompt(60, 1), greedy(8), prefill=request.prefill)
        found = run(fresh(llm), [alone], lambda: None)[alone.request_id]
        assert text == tuple(t for e in found for t in e.token_ids)
    assert_idle(llm.engine)


def test_choices_under_preemption_equal_lone_requests() -> None:
    """A pool that cannot hold all choices: copies are restored or recomputed, and nothing changes."""
    small = tiny(kv_tokens=136, max_sequences=4)
    params = SamplingParams(**{**vars(SAMPLED), "n": 4, "max_tokens": 48})
    many: list[Output] = fresh(small).generate([prompt(40)], params)
    assert_idle(small.engine)
    assert sum(o.preemptions for o in many) > 0
    for i, choice in enumerate(many):
        alone = fresh(tiny()).generate([prompt(40)], SamplingParams(**{**vars(params), "n": 1, "seed": 11 + i}))[0]
        same(choice, alone)
