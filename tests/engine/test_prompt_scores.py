"""Log-probabilities of a prompt reach the client of the engine with the first token, once, and are those of `LLM.generate`."""

from __future__ import annotations

from engines import fresh, tiny
from forebay.engine.types import OutputEvent, Request, SamplingParams


def test_they_come_with_the_first_token_of_every_choice() -> None:
    llm = fresh(tiny())
    engine = llm.engine
    ids = list(range(70, 110))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    requests = [Request(ids, params, share="one"), Request(ids, params, share="one"), Request(ids, SamplingParams(max_tokens=2))]
    seen: dict[str, list[OutputEvent]] = {request.request_id: [] for request in requests}

    def sink(events: list[OutputEvent]) -> None:
        for event in events:
            seen[event.request_id].append(event)

    engine.sink = sink
    try:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            engine.step()
    finally:
        engine.sink = lambda events: None
    (expected,) = fresh(llm).generate([ids], params)
    assert len(expected.prompt_logprobs or []) == len(ids)
    for request in requests[:2]:
        first, *later = seen[request.request_id]
        assert first.prompt_logprobs == expected.prompt_logprobs
        assert [event.prompt_logprobs for event in later] == [None] * len(later)
        assert later
    assert all(event.prompt_logprobs is None for event in seen[requests[2].request_id])
