"""Thousands of broken requests over every route that takes a body: none is our fault, none gets stuck, nothing piles up.

2,000 requests by default; FUZZ_REQUESTS=20000 for the whole run, FUZZ_REQUESTS=20000:7 for another seed than 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.engine.grammar_store import WeighedStore
from forebay.model.chat import ChatCodec
from forebay.server.app import App
from forebay.server.limits import ServerOptions
from forebay.server.openapi import BODIES as DESCRIBED
from forebay.server.openapi import document
from forebay.server.protocol import KNOWN
from fuzz_requests import BODIES, HI, Mutant, mutants, packets
from image_hosts import VISION
from script_engine import Script, ScriptEngine, serve

COUNT, _, SEED = os.environ.get("FUZZ_REQUESTS", "2000").partition(":")
STUCK_S = 20.0
KEPT = 128 << 20  # bytes: what is remembered of texts and grammars, at most
HEAP = 64 << 20  # bytes: a thread's heap of the allocator, which something small near its end may keep for a while
AT_ONCE = 8
GOOD = [Mutant("/v1/chat/completions", json.dumps({"messages": [HI], "stream": stream}).encode(), []) for stream in (False, True)]


class Answer:
    """What the application sent for one request."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._sent = False
        self.status = 0
        self.body = bytearray()
        self.headers: dict[bytes, bytes] = {}
        self.ended = False
        self._gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._mutant.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "two answers"
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            assert self.status and not self.ended
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)
            if self.ended:
                self._gone.set()


async def ask(app: App, mutant: Mutant) -> Answer:
    """One request over raw ASGI, as a server would make it."""
    answer = Answer(mutant)
    scope = {
        "type": "http", "method": "POST", "path": mutant.path, "query_string": b"", "headers": mutant.headers, "http_version": "1.1",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http", "raw_path": mutant.path.encode(),
    }  # fmt: skip
    async with asyncio.timeout(STUCK_S):
        await asyncio.create_task(app(scope, answer.receive, answer.send))
    return answer


def check(app: App, mutant: Mutant, answer: Answer) -> None:
    """The answer is whole, of a described status, and an error is an envelope of the route's family."""
    told = f"{answer.status} to {mutant.path} {mutant.headers} {mutant.body[:2000]!r}: {bytes(answer.body[-500:])!r}"
    assert answer.ended, told
    assert str(answer.status) in PATHS[mutant.path]["post"]["responses"], told
    assert answer.status < 500, told
    if answer.headers[b"content-type"].startswith(b"text/event-stream"):
        assert not any(fault in answer.body for fault in (b"internal_error", b"server_error", b"api_error")), told
        return
    body = json.loads(answer.body)
    if answer.status >= 400:
        error = body["error"]
        assert isinstance(error["message"], str) and error["message"], told
        assert len(answer.body) < 20_000, told
        if mutant.path.startswith("/v1/messages"):
            assert body["type"] == "error" and error["type"], told
        else:
            assert error.keys() == {"message", "type", "param", "code"}, told


PATHS: dict[str, Any] = {}


def memory() -> int:
    """Resident bytes, without what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def usual(app: App) -> float:
    """Median seconds of a good request."""
    times = []
    for i in range(60):
        began = time.perf_counter()
        answer = await ask(app, GOOD[i % 2])
        times.append(time.perf_counter() - began)
        assert answer.status == 200 and answer.ended and b"stop" in answer.body
    return statistics.median(times)


def schema_bodies(schema: Any) -> dict[str, dict[str, Any]]:
    """A schema in every place where a body can have one."""
    tool = {"name": "f", "parameters": schema}
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {
        "chat tools": {"path": "/v1/chat/completions", "messages": [HI], "tools": [{"type": "function", "function": tool}]},
        "chat format": {"path": "/v1/chat/completions", "messages": [HI], "response_format": response_format},
        "messages": {"path": "/v1/messages", "max_tokens": 5, "messages": [HI], "tools": [{"name": "f", "input_schema": schema}]},
        "responses tools": {"path": "/v1/responses", "input": "Hi", "tools": [{"type": "function", **tool, "strict": False}]},
        "responses text": {"path": "/v1/responses", "input": "Hi", "text": text},
    }


@pytest.mark.parametrize(
    "properties",
    [10**30, {"x": {"type": [[]]}}, {"x": {"type": [{"a": 1}, None]}}, {"x": {"const": -(2**63) - 1}}, {"x": {"enum": [[{}], 2**64]}}],
)
@pytest.mark.parametrize("stream", [True, False])
def test_schemas_that_the_fuzz_found(properties: Any, stream: bool) -> None:
    """Types that cannot be hashed, and integers that orjson reads and cannot write."""
    engine = ScriptEngine(max_context=4096)
    engine.say("Hello there.")
    app = App(engine, ServerOptions())
    try:
        for name, body in schema_bodies({"type": "object", "properties": properties}).items():
            path = body.pop("path")
            answer = asyncio.run(ask(app, Mutant(path, json.dumps({**body, "stream": stream}).encode(), [])))
            assert answer.status in (200, 400) and answer.ended, (name, answer.status, bytes(answer.body))
            assert not any(fault in answer.body for fault in (b"internal_error", b"server_error", b"api_error")), (name, bytes(answer.body))
    finally:
        app.close()


@pytest.mark.slow
@pytest.mark.case("B109", "B111", "B116")
def test_mutated_requests_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """No 5xx, no stuck request, memory flat, and a good request is answered in its usual time afterwards."""
    engine = ScriptEngine(max_context=4096)
    engine.codec = ChatCodec(engine.tokenizer, vision=VISION, cache_bytes=1 << 20)  # what is meant to be remembered would hide what is not
    texts = ["Hello there.", "Hm.</think>Hello there.", '{"x": 1}', "é\U0001f600 ok"]
    scripts = [Script([*engine.ids(text), engine.tokenizer.eos_id or 0], per_event=3) for text in texts]
    engine.answer = scripts[0]
    app = App(engine, ServerOptions())
    app._turns.grammars.store = WeighedStore(1 << 20)  # as above: 20,000 requests leave hundreds of grammars, 256 MiB of them at most
    PATHS.update(document(app.routes, ["script"], open_to_all=True)["paths"])
    assert {route.name for route in app.routes if "POST" in route.methods} == set(BODIES) == set(DESCRIBED)
    names = sorted(KNOWN | {name for bodies in BODIES.values() for body in bodies for name in body} | {"nonsense", "__class__"})
    statuses: Counter[int] = Counter()
    ours: list[str] = []
    objects: list[int] = []

    async def run() -> tuple[float, float, list[int]]:
        before = await usual(app)
        sizes = [memory()]
        stream = enumerate(mutants(int(COUNT), int(SEED or 1), names))

        async def worker(some: Iterator[tuple[int, Mutant]]) -> None:
            for number, mutant in some:
                engine.answer = scripts[number % len(scripts)]
                for kept in (engine.requests, engine.events, engine.aborted):  # what the stand-in remembers is not the server's
                    kept.clear()
                answer = await ask(app, mutant)
                statuses[answer.status] += 1
                try:
                    check(app, mutant, answer)
                except (AssertionError, ValueError, KeyError) as error:
                    ours.append(str(error)[:3000])

        for _ in range(4):
            quarter = itertools.islice(stream, max(int(COUNT) // 4, 1))
            await asyncio.gather(*(worker(quarter) for _ in range(AT_ONCE)))
            sizes.append(memory())  # while no request is under way, whose body may be megabytes
            objects.append(len(gc.get_objects()))
        engine.answer = scripts[0]
        engine.requests.clear()
        return before, await usual(app), sizes

    try:
        before, after, sizes = asyncio.run(run())
    finally:
        app.close()
    good = f"a good request takes {before * 1000:.2f} ms before, {after * 1000:.2f} ms after"
    print(f"statuses {dict(statuses)}; {good}; memory {[size >> 20 for size in sizes]} MiB, objects {objects}")
    assert not ours, f"{len(ours)} of {COUNT}:\n" + "\n\n".join(ours[:12])
    assert not [r.getMessage() for r in caplog.records if r.name == "forebay.server" and r.exc_info], "a traceback in the log"
    assert not engine.running and not engine.waiting
    assert statuses[200] > int(COUNT) / 20 and statuses[400] > int(COUNT) / 20  # both ways were taken
    assert sizes[-1] - sizes[1] < (48 << 20) + HEAP, sizes
    assert min(objects[2:]) - objects[0] < int(COUNT) / 10 + 2000, objects  # the least: what threads do meanwhile passes
    assert sizes[-1] - sizes[0] < KEPT, sizes
    assert after < 4 * before + 0.005, (before, after)


@pytest.mark.slow
@pytest.mark.case("B109", "B111", "B116")
def test_broken_connections_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """The same over real connections: every one ends, nothing is left of it, and no answer has a fault of ours."""
    engine = ScriptEngine(max_context=4096)
    engine.say("Hello there.")
    rng = random.Random(int(SEED or 1))
    names = sorted(KNOWN)
    count = int(COUNT) // 4
    options = ServerOptions(head_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=0.5)
    with serve(engine, options) as served:

        async def send(mutant: Mutant, pieces: list[bytes]) -> bytes:
            received = b""
            reader, writer = await asyncio.open_connection(served.host, served.port)
            try:
                with contextlib.suppress(OSError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                    if rng.random() < 0.3:
                        writer.write_eof()
                    elif rng.random() < 0.1:
                        return b""
                    while piece := await reader.read(1 << 16):
                        received += piece
            finally:
                writer.close()
            return received

        async def run() -> None:
            stream = mutants(count, int(SEED or 1) + 1, names)

            async def worker() -> None:
                for mutant in stream:
                    engine.requests.clear()
                    pieces = list(packets(mutant, rng))
                    async with asyncio.timeout(STUCK_S):
                        received = await send(mutant, pieces)
                    told = (b"".join(pieces)[:1000], received[:300], received[-300:])
                    assert b"HTTP/1.1 50" not in received and b"internal_error" not in received, told
                    assert not received or received.startswith(b"HTTP/1.1 "), told

            await asyncio.gather(*(worker() for _ in range(AT_ONCE)))

        asyncio.run(run())
        served.wait(lambda: not engine.running and not engine.waiting)
        served.wait(lambda: not served.server.server_state.connections)
        assert served.app._turns.bodies.used == 0
        response = httpx.post(served.url + GOOD[0].path, content=GOOD[0].body)
        assert response.status_code == 200
    assert not [r.getMessage() for r in caplog.records if r.exc_info], "a traceback in the log"
