"""Nothing of a request stays behind once it is answered."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from forebay.server.app import App
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine


async def call(app: App, number: int) -> None:
    """One request through the application itself, without sockets: whole, streamed, refused and abandoned ones in turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"unique {number}"}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "stream": number % 2 == 0, "n": 1 + number % 3}
    if number % 5 == 0:
        body["temperature"] = 9
    sent = json.dumps({**body, f"unknown_{number}": 1}).encode()
    received = [{"type": "http.request", "body": sent, "more_body": False}]
    if number % 7 == 0:
        received.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        pass

    headers = [(b"content-length", str(len(sent)).encode()), (b"x-request-id", f"id-{number}".encode())]
    await app({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}, receive, send)


@pytest.mark.case("B052")
def test_requests_leave_nothing_behind() -> None:
    engine = ScriptEngine()
    engine.answer = Script(engine.ids("word"), finish="length")
    app = App(engine, ServerOptions())

    async def objects_after(start: int, count: int) -> int:
        for number in range(start, start + count):
            await call(app, number)
        engine.requests.clear()
        engine.events.clear()
        engine.aborted.clear()
        gc.collect()
        return len(gc.get_objects())

    async def grown() -> int:
        before = await objects_after(0, 400)  # more than the 200 names of unknown fields that are learnt
        return await objects_after(400, 1500) - before

    assert asyncio.run(grown()) < 100, "one object for each request would be 1500"
    assert not engine.running
    assert not engine.waiting
    app.close()
