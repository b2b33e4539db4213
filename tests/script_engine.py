"""SCRIPT: an engine that gives out token lists written down by the test, so that what is on the wire can be known exactly.

It has the interface of `forebay.engine.client.EngineClient`. Prompts are really encoded and tokens
really parsed; only the network is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn
from prometheus_client import CollectorRegistry

from forebay.engine.metrics import Metrics
from forebay.engine.output import OutputProcessor
from forebay.engine.types import OutputEvent, QueueFullError, Request, TierCounts, Times, TokenLogprob, UnavailableError, Usage
from forebay.model.chat import ChatCodec
from forebay.model.errors import ForebayError
from forebay.model.tokenizer import Tokenizer
from forebay.server.app import App
from forebay.server.errors import State
from forebay.server.limits import ServerOptions
from forebay.server.wire import uvicorn_config

TOKENIZER = Path(__file__).resolve().parent / "data" / "noise-tokenizer.json"


@dataclass
class Script:
    """What the "model" says to one request.

    tokens: sampled ids; after the last one the choice ends as `finish` says. per_event: tokens of one step (speculation gives several).
    delay_s: seconds before each event. fail_at: instead of this event (counted from 0) the engine reports `error`, or raises it.
    """

    tokens: Sequence[int]
    finish: str = "stop"
    per_event: int = 1
    delay_s: float = 0.0
    logprobs: Sequence[TokenLogprob] | None = None
    fail_at: int | None = None
    error: ForebayError = field(default_factory=lambda: ForebayError("device on fire at row 3"))
    raises: bool = False


class ScriptEngine:
    """Answers every request with `answer`, a Script or a function of the request. `hold` keeps running requests from making progress."""

    def __init__(self, *, max_context: int = 65536, max_running: int = 256, max_queued: int = 1024) -> None:
        self.tokenizer = Tokenizer.load(TOKENIZER)
        self.codec = ChatCodec(self.tokenizer)
        self.model_name = "script"
        self.max_context = max_context
        self.metrics = Metrics(CollectorRegistry(), model="script")
        self.state: State = "ready"
        self.reason = ""
        self.age = 0.0
        self.hold = False
        self.cached = 0  # prompt tokens said to come from HBM
        self.max_running = max_running
        self.max_queued = max_queued
        self.answer: Script | Callable[[Request], Script] = Script(self.ids("Hello there."))
        self.requests: list[Request] = []
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.events: dict[str, int] = {}
        self.aborted: list[str] = []
        pieces = {i: self.tokenizer.token_bytes(i) for i in range(self.tokenizer.vocab_size)}
        self._single = {piece: i for i, piece in pieces.items() if len(piece) == 1}

    def last_progress_age(self) -> float:
        return self.age

    def text(self, number: int = -1) -> str:
        """The prompt of a request."""
        return self.tokenizer.decode(self.requests[number].prompt_ids)

    def ids(self, text: str) -> list[int]:
        """Ids of a completion, in which spelled-out markers are markers."""
        return self.tokenizer.encode_special(text)

    def byte_ids(self, data: str | bytes) -> list[int]:
        """One token for each byte."""
        return [self._single[bytes([b])] for b in (data.encode() if isinstance(data, str) else data)]

    def say(self, text: str, **options: Any) -> None:
        """Answer with `text` and the end of the turn from now on."""
        self.answer = Script([*self.ids(text), self.tokenizer.eos_id or 0], **options)

    async def submit(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        if self.state != "ready":
            raise UnavailableError(self.reason or "not ready")
        if len(self.running) >= self.max_running and len(self.waiting) >= self.max_queued:
            raise QueueFullError(f"the queue is full: {self.max_queued} requests wait", retry_after=3)
        self.requests.append(request)
        finished = False
        try:
            self.waiting.add(request.request_id)
            while len(self.running) >= self.max_running:
                await asyncio.sleep(0.002)
            self.waiting.discard(request.request_id)
            self.running.add(request.request_id)
            async for event in self._run(request, self.answer(request) if callable(self.answer) else self.answer):
                finished = event.finish_reason is not None
                yield event
        finally:
            self.waiting.discard(request.request_id)
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    async def _run(self, request: Request, script: Script) -> AsyncGenerator[OutputEvent, None]:
        params, prompt = request.params, request.prompt
        parser = self.codec.parser(prompt) if prompt is not None else None
        own = self.tokenizer.stop_ids if prompt is not None else frozenset({self.tokenizer.eos_id or 0})
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else own)
        output = OutputProcessor(self.tokenizer, params.stop, stops, parser=parser, include_stop=params.include_stop)
        times = Times(request.arrived, scheduled=time.monotonic())
        tokens = list(script.tokens)[: params.max_tokens]
        truncated = len(tokens) < len(script.tokens)
        done = 0
        for number, start in enumerate(range(0, max(len(tokens), 1), script.per_event)):
            await asyncio.sleep(script.delay_s)
            while self.hold:
                await asyncio.sleep(0.002)
            if script.fail_at == number:
                if script.raises:
                    raise script.error
                yield OutputEvent(request.request_id, [], [], finish_reason="error", error=script.error)
                return
            event = OutputEvent(request.request_id, [], [], logprobs=None if params.logprobs is None else [])
            if number == 0 and params.prompt_logprobs is not None:
                event.prompt_logprobs = self._prompt_logprobs(request.prompt_ids, params.prompt_logprobs)
            for place in range(start, min(start + script.per_event, len(tokens))):
                event.token_ids.append(tokens[place])
                done += 1
                if event.logprobs is not None:
                    event.logprobs.append(self._logprob(script, place, tokens[place], params.logprobs or 0))
                event.deltas += output.push(tokens[place])
                if output.finished:
                    break
            times.first_token = times.first_token or time.monotonic()
            if not output.finished and start + script.per_event >= len(tokens):
                event.deltas += output.finish("length" if truncated else script.finish)
            length = len(request.prompt_ids)
            if number == 0 or output.finish_reason is not None:
                event.tiers = TierCounts(hbm=min(self.cached, length), compute=length - min(self.cached, length))
            if output.finish_reason is not None:
                times.finished = time.monotonic()
                event.finish_reason = output.finish_reason
                event.matched_stop = output.matched_stop
                event.usage = Usage(length, done, output.reasoning_tokens, min(self.cached, length))
                event.times = times
            self.events[request.request_id] = self.events.get(request.request_id, 0) + 1
            yield event
            if event.finish_reason is not None:
                return

    def _prompt_logprobs(self, ids: Sequence[int], alternatives: int) -> list[TokenLogprob | None]:
        """The first token has none; the others have values that tell their place."""
        top = [tuple(((i + k) % self.tokenizer.vocab_size, -0.5 - k) for k in range(alternatives)) for i in ids]
        return [None, *(TokenLogprob(i, -0.5 - place / 1024, top[place]) for place, i in enumerate(ids) if place)]

    def _logprob(self, script: Script, place: int, token_id: int, alternatives: int) -> TokenLogprob:
        if script.logprobs is not None:
            return script.logprobs[place]
        top = [((token_id + k) % self.tokenizer.vocab_size, -0.25 - k) for k in range(alternatives)]
        return TokenLogprob(token_id, -0.25 - place / 1024, tuple(top))


@dataclass
class Served:
    """A server in a thread of this process."""

    engine: ScriptEngine
    options: ServerOptions
    app: App
    host: str
    port: int
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, "timeout": 20.0, **options})

    def wait(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until `condition` holds; fails the test if it never does."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition was not met in time"
            time.sleep(0.002)


@contextlib.contextmanager
def serve(engine: ScriptEngine, options: ServerOptions | None = None) -> Iterator[Served]:
    """Run the real application under uvicorn on a free port."""
    options = options or ServerOptions()
    app = App(engine, options)
    server = uvicorn.Server(uvicorn_config(app, options, host="127.0.0.1", port=0, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    deadline = time.monotonic() + 15
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield Served(engine, options, app, host, port, server)
    finally:
        engine.hold = False
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive(), "the server did not stop"
