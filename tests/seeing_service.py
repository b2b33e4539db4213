"""A server whose model really sees images, in one process: TINY with eyes behind the real application, on a loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

import httpx

from engines import assert_idle, seeing_checkpoint
from forebay.engine.client import EngineClient
from forebay.engine.llm import LLM
from forebay.engine.types import OutputEvent, Request
from forebay.server.app import App
from forebay.server.limits import ServerOptions
from image_hosts import data_url

T = TypeVar("T")

CHAT, RESPONSES, MESSAGES, COUNT, INPUT_TOKENS = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses/input_tokens",
)  # fmt: skip


class SeeingClient(EngineClient):
    """Remembers what it was asked."""

    requests: list[Request]

    def submit(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        self.requests.append(request)
        return super().submit(request)


class Seeing:
    """A running server, with two front ends over one engine.

    Attributes:
        requests: what the engine was asked, in order.
    """

    def __init__(self, options: ServerOptions, **engine_options: Any) -> None:
        chosen = {"max_sequences": 8, "decoder_tokens": 64, "kv_tokens": 4096, **engine_options}
        self.llm = LLM(str(seeing_checkpoint()), chat=True, **chosen)
        self.engine = self.llm.engine
        codec = self.engine.codec
        assert codec is not None and codec.vision is not None
        self.client = SeeingClient(self.engine, codec, "eyes")
        self.requests = self.client.requests = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.client.start())
        self.app, self.other = App(self.client, options), App(self.client, options)
        self.fronts = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://eyes", timeout=60) for app in (self.app, self.other)
        ]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def start(self, path: str, body: dict[str, Any]) -> concurrent.futures.Future[httpx.Response]:
        return asyncio.run_coroutine_threadsafe(self.fronts[0].post(path, json=body), self._loop)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.start(path, body).result(120)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that succeeds."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def settle(self) -> None:
        """Wait until the engine has put everything away, which it does after the last word of an answer is out."""
        deadline = time.monotonic() + 10
        while self.engine.busy and time.monotonic() < deadline:
            time.sleep(0.002)
        assert_idle(self.engine)

    def close(self) -> None:
        for front in self.fronts:
            self.run(front.aclose())
        for app in (self.app, self.other):
            app.close()
        self.run(self.client.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@contextlib.contextmanager
def seeing_server(options: ServerOptions | None = None, **engine_options: Any) -> Iterator[Seeing]:
    made = Seeing(options or ServerOptions(), **engine_options)
    try:
        yield made
        made.settle()
        for app in (made.app, made.other):
            assert app._turns.images.canvases.used == app._turns.bodies.used == 0
    finally:
        made.close()


PLAIN = {"temperature": 0, "max_tokens": 6, "thinking": {"type": "disabled"}}


def chat_body(*parts: str | bytes, **more: Any) -> dict[str, Any]:
    """A chat request of texts and image files, in this order."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else image_part(p) for p in parts]
    return {"messages": [{"role": "user", "content": content}], **PLAIN, **more}


def image_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def in_every_protocol(*parts: str | bytes) -> dict[str, dict[str, Any]]:
    """The same request by the path of each protocol that answers."""
    inputs = [{"type": "input_text", "text": p} if isinstance(p, str) else {"type": "input_image", "image_url": data_url(p)} for p in parts]
    blocks = [{"type": "text", "text": p} if isinstance(p, str) else image_block(p) for p in parts]
    return {
        CHAT: chat_body(*parts),
        RESPONSES: {"input": [{"role": "user", "content": inputs}], "temperature": 0, "max_output_tokens": 6, "thinking": False},
        MESSAGES: {"messages": [{"role": "user", "content": blocks}], "temperature": 0, "max_tokens": 6},
    }


def image_block(data: bytes) -> dict[str, Any]:
    media, _, text = data_url(data).removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": text}}


def said(path: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == CHAT:
        return str(answer["choices"][0]["message"]["content"])
    if path == RESPONSES:
        return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def streamed(path: str, text: str) -> str:
    """The text of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def tokens(path: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that came from the cache, by the usage of a whole answer."""
    used = answer["usage"]
    if path == CHAT:
        return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]
    if path == RESPONSES:
        return used["input_tokens"], used["input_tokens_details"]["cached_tokens"]
    return used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"], used["cache_read_input_tokens"]
