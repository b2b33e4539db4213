"""Limits of a key: 429 with a Retry-After that is true, headers, concurrency, priorities; and when a full queue says to come again."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.server.access import Caller, Key, hashed
from forebay.server.errors import HttpError
from forebay.server.limits import ServerOptions
from forebay.server.throttle import MINUTE, SECOND, Pace, Throttle
from script_engine import Script, ScriptEngine, Served, serve

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


class Clock:
    def __init__(self) -> None:
        self.now = 12345 * SECOND + 678

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


def caller(**limits: Any) -> Caller:
    return Caller("a", "a", "a", Key(name="a", hash=hashed(b"x"), **limits))


def refusal(throttle: Throttle, who: Caller) -> tuple[int, HttpError]:
    with pytest.raises(HttpError) as error:
        throttle.admit(who)
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    seconds = int(dict(error.value.headers)[b"retry-after"])
    assert error.value.message.endswith(f"Please try again in {seconds}s.")
    return seconds, error.value


@pytest.mark.parametrize("rate", [1, 2, 7, 59, 60, 61, 600, 10_000])
def test_after_exactly_the_time_told_a_request_passes(rate: int) -> None:
    clock = Clock()
    throttle, who = Throttle(clock), caller(requests_per_minute=rate)
    exact = 60 % rate == 0  # whole seconds between two requests
    for _ in range(rate):
        throttle.admit(who)
    for _ in range(50):
        seconds, _ = refusal(throttle, who)
        assert seconds <= 60
        clock.now += seconds * SECOND - 1
        if exact:
            refusal(throttle, who)  # not a moment earlier
        clock.now += 1
        for _ in range(seconds * rate // 60):  # at least the one
            throttle.admit(who)
        while seconds * rate % 60 and throttle._accounts["a"].requests.wait(clock.now) == 0:  # type: ignore[union-attr]
            throttle.admit(who)


def test_no_minute_gives_more_than_a_full_bucket_and_its_refill() -> None:
    clock, random_ = Clock(), random.Random(3)
    throttle, who = Throttle(clock), caller(requests_per_minute=30)
    passed: list[int] = []
    for _ in range(4000):
        clock.sleep(random_.expovariate(5))
        try:
            throttle.admit(who)
        except HttpError:
            continue
        passed.append(clock.now)
    for i, moment in enumerate(passed):
        assert sum(1 for later in passed[i:] if later < moment + MINUTE) <= 61
    assert len(passed) == pytest.approx((passed[-1] - passed[0]) / MINUTE * 30 + 30, abs=2)


def test_tokens_are_counted_when_spent_and_paid_back_by_waiting() -> None:
    clock = Clock()
    throttle, who = Throttle(clock), caller(tokens_per_minute=600)
    ticket, headers = throttle.admit(who)
    assert dict(headers) == {
        b"x-ratelimit-limit-tokens": b"600", b"x-ratelimit-remaining-tokens": b"600", b"x-ratelimit-reset-tokens": b"0s"
    }  # fmt: skip
    ticket.spend(500)
    assert dict(throttle.admit(who)[1])[b"x-ratelimit-remaining-tokens"] == b"100"
    ticket.spend(1500)  # a long answer: 1400 more than there were
    seconds, error = refusal(throttle, who)
    assert seconds == 141  # 1401 tokens at ten a second, and no promise that a shorter time would do
    assert (b"x-ratelimit-remaining-tokens", b"0") in error.headers
    assert (b"x-ratelimit-reset-tokens", b"3m20s") in error.headers
    clock.sleep(140)
    assert refusal(throttle, who)[0] == 1
    clock.sleep(1)
    throttle.admit(who)


def test_a_refused_request_uses_nothing_up() -> None:
    clock = Clock()
    throttle, who = Throttle(clock), caller(requests_per_minute=2, concurrency=1)
    ticket, headers = throttle.admit(who)
    assert (b"x-ratelimit-remaining-requests", b"1") in headers
    for _ in range(10):
        assert refusal(throttle, who)[1].message.startswith("API key a has 1 requests running, and may have 1.")
    ticket.close()
    ticket.close()
    throttle.admit(who)[0].close()
    for _ in range(10):
        assert "2 requests per minute" in refusal(throttle, who)[1].message
    clock.sleep(30)
    throttle.admit(who)


def test_concurrency_tells_the_usual_time_of_a_request() -> None:
    clock = Clock()
    throttle, who = Throttle(clock), caller(concurrency=2)
    for _ in range(100):
        ticket, _ = throttle.admit(who)
        clock.sleep(20)
        ticket.close()
    throttle.admit(who)
    throttle.admit(who)
    assert refusal(throttle, who)[0] == 10


def test_limits_may_change_while_requests_run() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    ticket, _ = throttle.admit(caller(requests_per_minute=60, concurrency=1))
    throttle.admit(caller(requests_per_minute=60))
    refusal(throttle, caller(requests_per_minute=1))  # what was taken stays taken
    refusal(throttle, caller(concurrency=2))
    ticket.close()
    throttle.admit(caller(concurrency=2))


def test_priorities_of_keys_bound_those_of_requests() -> None:
    assert [Caller().priority(asked) for asked in (None, -7, 3)] == [0, -7, 3]
    assert [caller().priority(asked) for asked in (None, -7, 3)] == [0, 0, 3]
    assert [caller(priority=-5).priority(asked) for asked in (None, -7, -3, 3)] == [-5, -5, -3, 3]
    assert [caller(priority=9).priority(asked) for asked in (None, -7, 30)] == [9, 9, 30]


def test_salts_of_tenants_never_meet() -> None:
    """Whatever a client asks for: no cache_salt can hold a slash, nor a tenant's name."""
    callers = [Caller(), *(Caller(t, t, t, Key(name=t, hash=hashed(b"x"), cache_salt=s)) for t in ("a", "ab", "b") for s in (None, "b"))]
    salts = {(who.namespace, who.salt(asked)) for who in callers for asked in ("", "a", "b", "ab", "a.b")}
    assert len({salt for _, salt in salts}) == len(salts) == 5 + 3 * 5
    assert callers[2].salt("") == callers[2].salt("b") == "a/b"


# ---- a full queue


def test_a_full_queue_is_told_from_the_rate_at_which_requests_start() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.promise(7.0) == 7.0  # nothing measured yet: what the engine thinks
    clock.sleep(100)
    for _ in range(100):
        clock.sleep(0.5)
        pace.started()
    assert pace.promise(7.0) == 1.0
    clock.sleep(60)  # nothing started for a minute
    assert 1.4 < pace.promise(7.0) < 1.6
    told = [pace.promise(7.0) for _ in range(10)]  # each one that was sent away needs a start of its own
    assert told == sorted(told) and told[-1] == pytest.approx(11 * told[0] / 2, rel=0.1)
    assert pace.promise(7.0) <= 30
    assert max(pace.promise(7.0) for _ in range(500)) == 30
    clock.sleep(31)  # they have come back by now
    assert pace.promise(7.0) < 3


def test_those_who_come_back_when_told_find_a_place() -> None:
    """A queue of 8 that drains at 4 a second, and 100 clients that all come at once and obey."""
    clock = Clock()
    pace, random_ = Pace(clock), random.Random(1)
    for _ in range(64):
        clock.sleep(0.25)
        pace.started()
    waiting, attempts, coming = 8, 0, [(clock.now, i) for i in range(100)]
    next_start = clock.now + SECOND // 4
    while coming:
        coming.sort()
        moment, client = coming.pop(0)
        while next_start <= moment:
            if waiting:
                waiting -= 1
                clock.now = next_start
                pace.started()
            next_start += SECOND // 4
        clock.now = moment
        attempts += 1
        if waiting < 8:
            waiting += 1
        else:
            seconds = -int(-pace.promise(1.0) // 1)
            coming.append((moment + seconds * SECOND + random_.randrange(SECOND // 100), client))
    assert attempts < 100 * 3  # a fixed second would be 100 * 12


# ---- over HTTP


@pytest.fixture
def keyed(tmp_path: Path) -> Any:
    file = tmp_path / "keys"
    lines = [
        {"name": "slow", "hash": hashed(b"key-slow"), "requests_per_minute": 6},
        {"name": "two", "hash": hashed(b"key-two"), "concurrency": 2, "tenant": "team", "priority": -5},
        {"name": "words", "hash": hashed(b"key-words"), "tokens_per_minute": 1000},
        {"name": "free", "hash": hashed(b"key-free")},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serve(ScriptEngine(), ServerOptions(api_keys_file=file)) as served:
        yield served


def post(served: Served, key: str, path: str = CHAT, **fields: Any) -> httpx.Response:
    return httpx.post(served.url + path, headers={"x-api-key": key}, json={"messages": HI, "max_tokens": 9, **fields})


def test_too_many_requests_of_one_key(keyed: Served) -> None:
    responses = [post(keyed, "key-slow") for _ in range(6)]
    assert {r.status_code for r in responses} == {200}
    assert responses[0].headers["x-ratelimit-limit-requests"] == "6"
    assert re.fullmatch(r"\d+ms|[\d.]+s", responses[0].headers["x-ratelimit-reset-requests"])
    refused = [r for r in (post(keyed, "key-slow", path) for path in (CHAT, "/v1/messages", CHAT, CHAT) for _ in range(5)) if r.is_error]
    assert {r.status_code for r in refused} == {429} and len(refused) >= 10
    for response in refused:
        seconds = int(response.headers["retry-after"])
        assert 1 <= seconds <= 10
        error = response.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert error["message"].endswith(f" Please try again in {seconds}s.")
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert post(keyed, "key-free").status_code == 200
    assert "x-ratelimit-limit-requests" not in post(keyed, "key-free").headers
    models = httpx.get(f"{keyed.url}/v1/models", headers={"x-api-key": "key-slow"})
    assert models.status_code == 200  # asking what there is costs nothing
    page = httpx.get(f"{keyed.url}/metrics").text
    assert f'forebay_rejected_total{{reason="rate_limited"}} {len(refused)}' in page.replace(".0\n", "\n")


def test_tokens_of_prompts_and_answers_count(keyed: Served) -> None:
    keyed.engine.answer = Script(keyed.engine.byte_ids("x") * 400)
    first = post(keyed, "key-words", max_tokens=400, stream=True)
    assert first.headers["x-ratelimit-remaining-tokens"] == "1000"
    prompt = len(keyed.engine.requests[0].prompt_ids)
    second = post(keyed, "key-words", max_tokens=400, n=2)
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(1000 - 400 - prompt, abs=30)
    third = post(keyed, "key-words")
    assert third.status_code == 429
    assert "1000 tokens per minute" in third.json()["error"]["message"]
    over = 400 + 800 + 2 * prompt - 1000  # the prompt of two choices counts once
    assert int(third.headers["retry-after"]) == pytest.approx(over * 60 / 1000, abs=3)


def test_too_many_at_once_of_one_key(keyed: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forebay.access")
    keyed.engine.hold = True

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            ask = lambda key: client.post(keyed.url + CHAT, headers={"x-api-key": key}, json={"messages": HI, "priority": -9})  # noqa: E731
            two = [asyncio.create_task(ask("key-two")) for _ in range(2)]
            while len(keyed.engine.running) < 2:
                await asyncio.sleep(0.005)
            refused = [await ask("key-two") for _ in range(3)]
            free = asyncio.create_task(ask("key-free"))
            while len(keyed.engine.running) < 3:
                await asyncio.sleep(0.005)
            two[0].cancel()  # a client that leaves gives its place back
            while len(keyed.engine.running) > 2:
                await asyncio.sleep(0.005)
            again = asyncio.create_task(ask("key-two"))
            while len(keyed.engine.running) < 3:
                await asyncio.sleep(0.005)
            keyed.engine.hold = False
            return [*refused, await two[1], await free, await again, await ask("key-two")]

    responses = asyncio.run(run())
    assert [r.status_code for r in responses] == [429, 429, 429, 200, 200, 200, 200]
    assert int(responses[0].headers["retry-after"]) >= 1
    assert {request.priority for request in keyed.engine.requests} == {-5, 0}
    assert {request.salt for request in keyed.engine.requests} == {"team/", "free/"}
    keyed.wait(lambda: sum('"key": "two"' in r.getMessage() for r in caplog.records) >= 7)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "forebay.access"]
    assert {line["tenant"] for line in lines if line["key"] == "two"} == {"team"}


@pytest.mark.parametrize("stream", [True, False])
def test_responses_tell_a_limit_in_their_own_way(keyed: Served, stream: bool) -> None:
    """Codex waits when an event tells it to, and only shows what a status says; the model is asked for nothing either way."""
    for _ in range(6):
        post(keyed, "key-slow", max_tokens=1)
    asked = len(keyed.engine.requests)
    response = httpx.post(f"{keyed.url}/v1/responses", headers={"x-api-key": "key-slow"}, json={"input": "Hi", "stream": stream})
    if stream and response.status_code == 200:
        last = json.loads(response.text.rpartition("data: ")[2])
        assert last["type"] == "response.failed"
        error = last["response"]["error"]
    else:
        assert (response.status_code, stream) == (429, False)
        assert 1 <= int(response.headers["retry-after"]) <= 10
        error = response.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert re.search(r"Please try again in \d+s\.$", error["message"])
    assert len(keyed.engine.requests) == asked


# ---- what counts, and when


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_what_the_engine_does_not_run_is_not_counted(keyed: Served, path: str, body: dict[str, Any]) -> None:
    """Agents count before every request, in bursts: spec §8.4."""

    def ask(key: str) -> httpx.Response:
        return httpx.post(keyed.url + path, headers={"x-api-key": key}, json=body)

    assert {ask("key-slow").status_code for _ in range(20)} == {200}
    assert "x-ratelimit-limit-requests" not in ask("key-slow").headers
    assert [post(keyed, "key-slow").status_code for _ in range(7)] == [200] * 6 + [429]
    assert ask("key-slow").status_code == 200
    assert ask("wrong").status_code == 401
    keyed.engine.hold = True
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(post, keyed, "key-two") for _ in range(2)]
        keyed.wait(lambda: len(keyed.engine.running) == 2)
        assert ask("key-two").status_code == 200
        keyed.engine.hold = False
        assert [future.result().status_code for future in running] == [200, 200]


def test_prompts_count_from_when_the_engine_has_them(keyed: Served) -> None:
    """A client that leaves before the first output has had its prompt worked on."""
    keyed.engine.max_running = 0
    long = [{"role": "user", "content": "word " * 500}]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(keyed.url + CHAT, headers={"x-api-key": "key-words"}, json={"messages": long}, timeout=httpx.Timeout(10, read=1.0))
    keyed.wait(lambda: not keyed.engine.waiting)
    spent = len(keyed.engine.requests[0].prompt_ids)
    keyed.engine.max_running = 256
    left = int(post(keyed, "key-words").headers["x-ratelimit-remaining-tokens"])
    assert left == pytest.approx(1000 - spent, abs=80)


def test_prompts_that_the_engine_has_no_place_for_are_given_back(keyed: Served) -> None:
    keyed.engine.max_running = keyed.engine.max_queued = 0
    long = [{"role": "user", "content": "word " * 900}]
    for _ in range(5):
        assert post(keyed, "key-words", messages=long).status_code == 503
    keyed.engine.max_running = 256
    assert int(post(keyed, "key-words").headers["x-ratelimit-remaining-tokens"]) == 1000


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["declared", "chunked", "packed"])
def test_large_bodies_of_a_key_over_its_limits_are_not_read(keyed: Served, stream: bool, how: str) -> None:
    for _ in range(6):
        post(keyed, "key-slow", max_tokens=1)
    body = json.dumps({"input": "x" * (3 << 20), "stream": stream}).encode()
    headers = {"x-api-key": "key-slow", "content-type": "application/json"}
    content: Any = body
    if how == "chunked":
        content = (body[i : i + 65536] for i in range(0, len(body), 65536))
    elif how == "packed":
        content, headers["content-encoding"] = gzip.compress(body), "gzip"
    response = httpx.post(f"{keyed.url}/v1/responses", headers=headers, content=content)
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert len(keyed.engine.requests) == 6
