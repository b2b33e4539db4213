"""Faults of caches beyond the device: a Redis that is absent, stalled or refuses us."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from engines import greedy, prompt, same
from forebay.engine.llm import LLM
from redis_servers import Proxy, Server, unanswered_port, until
from tiered import (
    cold,
    metrics,
    settle,
    tiered,
)


class Trouble:
    """A Redis in trouble: `url` is where it should be, `heal` ends the trouble, `begin` starts one that comes later."""

    def __init__(self, url: str, heal: Callable[[], object], begin: Callable[[], object] = lambda: None) -> None:
        self.url, self.heal, self.begin = url, heal, begin


@contextmanager
def _trouble(kind: str) -> Iterator[Trouble]:
    with ExitStack() as stack:
        if kind == "absent":
            server = Server()
            stack.callback(server.kill)
            yield Trouble(server.url, server.start)
        elif kind == "black hole":
            port = stack.enter_context(hole := ExitStack()) and hole.enter_context(unanswered_port())

            def appear() -> None:
                hole.close()
                stack.enter_context(Server(port))

            yield Trouble(f"redis://127.0.0.1:{port}", appear)
        elif kind == "wrong password":
            server = stack.enter_context(Server(requirepass="right"))
            wrong = f"redis://:wrong@127.0.0.1:{server.port}"
            yield Trouble(wrong, lambda: server.client().config_set("requirepass", "wrong"))
        elif kind == "paused":
            server = stack.enter_context(Server())
            stack.callback(server.signal, signal.SIGCONT)
            yield Trouble(server.url, lambda: server.signal(signal.SIGCONT), lambda: server.signal(signal.SIGSTOP))
        else:
            server = stack.enter_context(Server())
            proxy = stack.enter_context(Proxy(server.port))
            yield Trouble(proxy.url, lambda: None, proxy.forget)


@pytest.mark.case("B040")
@pytest.mark.parametrize("kind", ["absent", "paused", "black hole", "half-open", "wrong password"])
def test_b040_nobody_waits_for_a_redis_in_trouble(kind: str) -> None:
    """Requests that would like a window, eight at a time, against the same ones computed cold in the same run. How long the trouble
    lasts makes no difference once the breaker is open, so a pause is as long as some rounds of requests."""
    prompts, few = [prompt(120, number) for number in range(8)], greedy(3, logprobs=1)
    expected = cold(prompts, few)
    allowed = max(o.times.finished - o.times.arrived for o in expected) + 0.25

    def round_trip(llm: LLM) -> tuple[set[str], float]:
        """Where windows came from, and the longest time of a request."""
        answers = llm.generate(prompts, few)
        for answer, plain in zip(answers, expected, strict=True):
            assert answer.tiers.hbm == (112 if warm else 0)
            same(answer, plain)
        return {answer.tiers.window for answer in answers}, max(o.times.finished - o.times.arrived for o in answers)

    warm = False
    with _trouble(kind) as trouble, tiered(None, trouble.url, replay="exact", tiers={"redis_timeout_s": 0.05}) as llm:
        _, first = round_trip(llm)
        warm = True
        if kind in ("paused", "half-open"):
            settle(llm)
            until(lambda: round_trip(llm)[0] == {"swa"})
        trouble.begin()
        taken = [first]
        for _ in range(6):
            origins, longest = round_trip(llm)
            assert origins <= {"replay", "swa", "live"}
            taken.append(longest)
        page = metrics(llm)
        # One that is late may be the machine's fault; every second one would be ours.
        assert sorted(taken)[-2] <= allowed, (taken, allowed)
        states = {state: page[f"swa_breaker{{{state}}}"] for state in ("closed", "open", "half_open")}
        assert sum(states.values()) == 1
        assert page["swa_breaker_opened_total{}"] >= 1
        if kind != "half-open":
            assert states["closed"] == 0  # what waits to be stored is found all the same, so there may be hits
        trouble.heal()
        # Hits resume by themselves, of windows that are stored from now on.
        until(lambda: metrics(llm)["swa_breaker{closed}"] == 1, 12.0)
        warm = False
        llm.engine.manager.clear()
        round_trip(llm)
        settle(llm)
        warm = True
        until(lambda: round_trip(llm)[0] == {"swa"})
