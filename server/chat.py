"""POST /v1/chat/completions: validate, encode, submit one engine request per choice, and answer as a stream or as a whole."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from forebay import __version__
from forebay.engine.metrics import Metrics
from forebay.engine.types import OutputEvent, Request
from forebay.model.chat import ChatCodec, EncodedPrompt
from forebay.model.errors import ForebayError
from forebay.model.tokenizer import Tokenizer
from forebay.server.body import decode, parse_object
from forebay.server.chunks import Choice, ChunkWriter, Head, explain, usage
from forebay.server.errors import HttpError, State, unavailable
from forebay.server.exchange import Exchange
from forebay.server.limits import Lanes, ServerOptions
from forebay.server.logprobs import LogprobFeed
from forebay.server.protocol import MAX_NAMED, ChatCall, parse_chat
from forebay.server.sse import DONE, EventStream

# Error code -> reason in forebay_rejected_total; every other refusal is "invalid".
REJECTIONS = {
    "context_length_exceeded": "context_length",
    "request_too_large": "too_large",
    "model_loading": "loading",
    "draining": "draining",
    "engine_unavailable": "dead",
}


class Engine(Protocol):
    """What the server needs of the engine; `engine.client.EngineClient` is one."""

    codec: ChatCodec
    tokenizer: Tokenizer
    model_name: str
    max_context: int  # tokens, prompt and output together
    metrics: Metrics

    @property
    def state(self) -> State: ...

    @property
    def reason(self) -> str:
        """Why it is not ready: loading progress, or what killed it."""

    def last_progress_age(self) -> float:
        """Seconds since the engine last made progress or was idle."""

    def submit(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        """Events of one choice. Refusals are raised before the first event; closing the generator aborts the request within one step."""


@dataclass(frozen=True)
class Job:
    """A request ready to run: its prompt and one engine request per choice."""

    call: ChatCall
    prompt: EncodedPrompt
    requests: list[Request]
    head: Head


class AbortedError(ForebayError):
    """The engine gave a request up before its end."""

    status = 503


class ChatRoute:
    """The handler of chat completions."""

    def __init__(self, engine: Engine, options: ServerOptions, lanes: Lanes) -> None:
        self._engine = engine
        self._options = options
        self._lanes = lanes
        self._names = served_names(engine, options)
        self._fingerprint = fingerprint(engine)
        self._numbers = itertools.count()

    async def __call__(self, exchange: Exchange) -> None:
        try:
            self._require_ready()
            await exchange.unless_gone(self._serve(exchange, await exchange.read_body(self._options)))
        except ForebayError as error:
            self._count_rejected(exchange, error)
            raise

    async def _serve(self, exchange: Exchange, data: bytes) -> None:
        call, size = await self._parse(exchange, data)
        del data  # megabytes that would otherwise stay for as long as the answer takes
        if call.ignored:
            exchange.extra_headers.append((b"x-forebay-ignored", ", ".join(call.ignored).encode("ascii", "replace")))
        exchange.notes.update(body_bytes=size, stream=call.stream)
        if not call.stream:
            await self._whole(exchange, await self._prepare(exchange, call, size))
            return
        async with EventStream(exchange, keepalive_s=self._options.keepalive_comment_s) as out:
            await self._stream(exchange, await self._prepare(exchange, call, size), out)

    # ---- before the engine

    def _require_ready(self) -> None:
        if self._engine.state != "ready":
            raise unavailable(self._engine.state, self._engine.reason)

    def _count_rejected(self, exchange: Exchange, error: ForebayError) -> None:
        """Count a request that never reached the engine, which counts its own refusals."""
        if not exchange.admitted and error.status != 500:
            self._engine.metrics.request_rejected(REJECTIONS.get(error.code or "", "invalid"))

    async def _parse(self, exchange: Exchange, data: bytes) -> tuple[ChatCall, int]:
        """The validated request and the size of its body in bytes, decoded."""
        options, tokenizer = self._options, self._engine.tokenizer
        encoding = exchange.headers.get(b"content-encoding", b"").decode("latin-1")

        def work() -> tuple[ChatCall, int]:
            plain = decode(data, encoding, options.max_body) if encoding else data
            return parse_chat(parse_object(plain, options.max_depth), options, tokenizer), len(plain)

        # A small body is parsed faster than it is handed to a thread; a compressed one may be large inside.
        small = len(data) <= options.off_loop and not encoding
        call, size = work() if small else await self._lanes.run(len(data), work)
        for name in call.unknown[:MAX_NAMED]:
            self._engine.metrics.unknown_field(name)
        model = call.fields.model
        if model and model not in self._names:
            text = f"The model `{model[:128]}` does not exist. Available: {', '.join(self._names)}"
            raise HttpError(404, text, code="model_not_found", param="model")
        return call, size

    async def _prepare(self, exchange: Exchange, call: ChatCall, size: int) -> Job:
        """Encode the prompt and size the output. Raises RequestError with the codec's finding, or context_length_exceeded."""
        options, engine = self._options, self._engine
        thinking = options.alias_thinking.get(call.fields.model or "", options.thinking_default)

        def encode() -> EncodedPrompt:
            return engine.codec.encode(
                call.body, default_effort=options.default_effort, thinking_default=thinking, max_tokens=engine.max_context
            )

        prompt = await self._lanes.run(size, encode)
        call.body.clear()  # nothing reads it again
        length = len(prompt.token_ids)
        room = engine.max_context - length
        if room < 1:
            asked = call.asked_output or 0
            text = (
                f"This model's maximum context length is {engine.max_context} tokens. However, you requested {length + asked} tokens "
                f"({length} in the messages, {asked} in the completion). Please reduce the length of the messages or completion."
            )
            raise HttpError(400, text, code="context_length_exceeded", param="messages")
        share = f"choices.{next(self._numbers)}" if call.choices > 1 else None
        requests = [
            Request(
                prompt_ids=prompt.token_ids,
                params=call.sampling(i, thinking=prompt.thinking, effort=prompt.effort, room=room, options=options),
                # Clients may repeat a request id; inside the engine it must be unique.
                request_id=f"{exchange.request_id}.{next(self._numbers)}",
                prompt=prompt,
                prefill=call.own.prefill,
                replay=call.own.replay,
                max_lineage=call.own.max_lineage,
                salt=call.salt,
                priority=call.fields.priority or 0,
                share=share,
                arrived=exchange.arrived,
            )
            for i in range(call.choices)
        ]
        effort = prompt.effort if prompt.thinking else "off"
        exchange.notes.update(prompt_tokens=length, effort=effort)
        exchange.extra_headers.append((b"x-forebay-effort", str(effort).encode()))
        suffix = call.fields.request_id or call.fields.rid or exchange.request_id
        head = Head(f"chatcmpl-{suffix}", int(time.time()), call.fields.model or self._names[0], self._fingerprint)
        exchange.admitted = True
        return Job(call, prompt, requests, head)

    def _choices(self, job: Job) -> list[Choice]:
        call = job.call
        choices = [Choice(i, shows_reasoning=call.shows_reasoning) for i in range(call.choices)]
        if call.fields.logprobs:
            for choice in choices:
                choice.feed = LogprobFeed(self._engine.tokenizer, ids_as_text=bool(call.fields.return_tokens_as_token_ids))
        return choices

    def _events(self, job: Job) -> AsyncGenerator[tuple[int, OutputEvent], None]:
        return _merged([self._engine.submit(request) for request in job.requests])

    # ---- answers

    async def _whole(self, exchange: Exchange, job: Job) -> None:
        choices = self._choices(job)
        async with aclosing(self._events(job)) as events:
            async for index, event in events:
                self._raise_failure(event)
                choices[index].keep(event)
        self._require_finished(choices)
        call = job.call
        token_ids = bool(call.fields.return_token_ids)
        answer = job.head.fields("chat.completion")
        answer["choices"] = [choice.whole(thinking=job.prompt.thinking, with_token_ids=token_ids) for choice in choices]
        answer["usage"] = usage(job.prompt, choices)
        answer["service_tier"] = "default"
        if token_ids:
            answer["prompt_token_ids"] = list(job.prompt.token_ids)
        if call.explain:
            answer["forebay"] = explain(job.prompt, choices)
        self._note(exchange, answer["usage"], choices)
        await exchange.reply_json(200, answer)

    async def _stream(self, exchange: Exchange, job: Job, out: EventStream) -> None:
        call = job.call
        choices = self._choices(job)
        token_ids = bool(call.fields.return_token_ids)
        chunks = ChunkWriter(job.head, include_usage=call.include_usage, with_token_ids=token_ids)
        async with aclosing(self._events(job)) as events:
            async for index, event in events:
                self._raise_failure(event)
                if data := chunks.event(choices[index], event):
                    await out.write(data)
        self._require_finished(choices)
        used = usage(job.prompt, choices)
        tail: dict[str, Any] = {"usage": used} if call.include_usage else {}
        if call.explain:
            tail["forebay"] = explain(job.prompt, choices)
        if token_ids:
            tail["prompt_token_ids"] = list(job.prompt.token_ids)
        self._note(exchange, used, choices)
        await out.close((chunks.tail(tail) if tail else b"") + DONE)

    def _raise_failure(self, event: OutputEvent) -> None:
        """An aborted or failed choice fails the request: no client may take a part for the whole."""
        if event.error is not None:
            raise event.error
        if event.finish_reason == "abort":
            if self._engine.state != "ready":
                raise unavailable(self._engine.state, self._engine.reason)
            raise AbortedError("The engine gave this request up before its end; it can be sent again.", code="engine_unavailable")
        if event.finish_reason == "error":
            raise RuntimeError("the engine reported an error without saying which")

    @staticmethod
    def _require_finished(choices: Sequence[Choice]) -> None:
        if missing := [choice.index for choice in choices if choice.last is None]:
            raise RuntimeError(f"the engine ended choices {missing} without a finish reason")

    @staticmethod
    def _note(exchange: Exchange, used: dict[str, Any], choices: Sequence[Choice]) -> None:
        exchange.notes.update(
            completion_tokens=used["completion_tokens"],
            cached_tokens=used["prompt_cache_hit_tokens"],
            finish=",".join(choice.last.finish_reason or "" for choice in choices if choice.last is not None),
        )


def served_names(engine: Engine, options: ServerOptions) -> list[str]:
    """Names that requests may use, the main one first."""
    return list(dict.fromkeys([options.model_name or engine.model_name, *options.aliases]))


def fingerprint(engine: Engine) -> str:
    """Stable over restarts of the same server version, model and tokenizer."""
    text = f"{__version__}\0{engine.model_name}\0{engine.tokenizer.fingerprint}\0{engine.max_context}"
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


async def _merged(streams: Sequence[AsyncGenerator[OutputEvent, None]]) -> AsyncGenerator[tuple[int, OutputEvent], None]:
    """Events of all choices as they come, with the number of the choice. Closing it closes every stream; the first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, OutputEvent | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[OutputEvent, None]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    queue.put_nowait((index, event))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


