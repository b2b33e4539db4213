"""A server of structured output, behind a real engine whose answers are throws of dice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from engines import Memo
from forebay.engine.client import EngineClient
from forebay.server.app import App
from forebay.server.limits import ServerOptions

T = TypeVar("T")

PAD = 2
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "b"]},
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "kind", "n"],
    "additionalProperties": False,
}


@asynccontextmanager
async def server() -> AsyncIterator[tuple[httpx.AsyncClient, Memo]]:
    memo = Memo(4096, kv_tokens=65536, max_sequences=16)
    memo.runner.script = lambda tokens: PAD  # which no form allows, and which ends nothing
    assert memo.engine.codec is not None
    client = EngineClient(memo.engine, memo.engine.codec, "dice")
    await client.start()
    app = App(client, ServerOptions())
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/v1", timeout=60) as http:
            yield http, memo
    finally:
        app.close()
        await client.stop()


def run(session: Callable[[httpx.AsyncClient, Memo], Coroutine[Any, Any, T]]) -> T:
    """What `session` returns of a server of its own."""

    async def work() -> T:
        async with server() as (http, memo):
            return await session(http, memo)

    return asyncio.run(work())


def body_of(**fields: Any) -> dict[str, Any]:
    # Dice never end their reasoning, nor free text.
    more = {"thinking_token_budget": 20} if fields.get("thinking") is not False else {}
    return {"messages": HI, "temperature": 1, "max_tokens": 900, **more, **fields}


def json_format(strict: Any = True, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
