"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's Responses protocol without a store (spec/http-api.md §7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from forebay.engine.types import OutputEvent
from forebay.model.errors import ForebayError
from forebay.server.chunks import Choice, explain, usage
from forebay.server.errors import HttpError
from forebay.server.exchange import Exchange
from forebay.server.field_paths import FieldPaths
from forebay.server.pacing import Pacer
from forebay.server.patience import PatientReply
from forebay.server.responses_events import ResponseWriter
from forebay.server.responses_input import ResponsesCall, read_responses
from forebay.server.sse import EventStream
from forebay.server.turns import Job, Turns

KEEP_ALIVE_S = 10.0
ADMISSION_S = 0.05  # how long a stream waits for the engine to refuse, while that can still be a status of its own


class _Route:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def _read(self, exchange: Exchange, data: bytes) -> tuple[ResponsesCall, int]:
        turns = self._turns

        def understand(body: dict[str, Any]) -> ResponsesCall:
            return read_responses(body, turns.options, turns.engine.tokenizer)

        asked, size = await turns.read(exchange, data, understand)
        try:
            turns.accept(exchange, asked.call, size)
        except HttpError as error:
            if error.code == "model_not_found":
                error.status = 400  # Codex sends a request that was answered 404 five times more
            raise
        return asked, size


class ResponsesRoute(_Route):
    """The handler of responses."""

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.method == "GET":
            refuse_get(exchange)
        await self._turns.run(exchange, lambda data: self._serve(exchange, data))

    async def _serve(self, exchange: Exchange, data: bytes) -> None:
        asked, size = await self._read(exchange, data)
        del data  # megabytes that would otherwise stay for as long as the answer takes
        fields = asked.call.fields
        suffix = fields.request_id or fields.rid or exchange.request_id
        model = fields.model or self._turns.names[0]
        writer = ResponseWriter(suffix, model, asked.echo, asked.tools, summary=asked.summary, encrypted=asked.encrypted)
        if not asked.call.stream:
            async with PatientReply(exchange, self._turns.options) as reply:
                job = await self._prepare(exchange, asked, size, writer)
                paths = _of_engine(job, asked.paths)
                del asked
                with _own_terms(paths):
                    await self._whole(exchange, job, writer, reply)
            return
        comment = self._turns.options.keepalive_comment_s
        interval = min(comment, KEEP_ALIVE_S) if comment > 0 else 0.0
        async with EventStream(exchange, keepalive_s=interval, beat=writer.beat, failing=writer.failed) as out:
            try:
                job = await self._prepare(exchange, asked, size, writer)
                paths = _of_engine(job, asked.paths)
                del asked
                with _own_terms(paths):
                    await self._stream(exchange, job, writer, out)
            except ForebayError as error:
                if error.code in ("context_length_exceeded", "rate_limit_exceeded") and not writer.started:
                    await out.write(writer.start())  # as an event it makes Codex compact or wait, as a status it would only be shown
                raise

    async def _prepare(self, exchange: Exchange, asked: ResponsesCall, size: int, writer: ResponseWriter) -> Job:
        if exchange.over_limit is not None:
            raise exchange.over_limit
        with _own_terms(asked.paths):
            job = await self._turns.prepare(exchange, asked.call, size)
        params = job.requests[0].params
        writer.settle(temperature=params.temperature, top_p=params.top_p)
        return job

    async def _whole(self, exchange: Exchange, job: Job, writer: ResponseWriter, reply: PatientReply) -> None:
        choice = job.choices(self._turns.engine.tokenizer)[0]
        async with aclosing(self._turns.events(job.requests)) as events:
            async for _, event in events:
                writer.event(choice, event)
        self._finish(exchange, job, choice, writer)
        await reply.send(writer.response)

    async def _stream(self, exchange: Exchange, job: Job, writer: ResponseWriter, out: EventStream) -> None:
        choice = job.choices(self._turns.engine.tokenizer)[0]
        interval, together = job.call.fields.stream_interval or 1, job.call.fields.stream_reasoning is False
        pacer = Pacer(interval, whole_reasoning=together) if interval > 1 or together else None

        async def tell(event: OutputEvent) -> None:
            ready = event if pacer is None else pacer.add(event)
            if ready is not None and (data := writer.event(choice, ready)):
                await out.write(data)

        async with aclosing(self._turns.events(job.requests)) as events:
            await tell(await _first(events, writer, out))
            async for _, event in events:
                await tell(event)
        await out.close(self._finish(exchange, job, choice, writer))

    def _finish(self, exchange: Exchange, job: Job, choice: Choice, writer: ResponseWriter) -> bytes:
        used = usage(job.prompt, [choice])
        self._turns.note(exchange, completion=used["completion_tokens"], cached=used["prompt_cache_hit_tokens"], choices=[choice])
        reason = choice.last.finish_reason if choice.last is not None else None
        return writer.finish(reason, used, {"forebay": explain(job.prompt, [choice])} if job.call.explain else None)


class InputTokensRoute(_Route):
    """The handler that counts the tokens of a request without running it: however many, and whatever the engine does."""

    async def __call__(self, exchange: Exchange) -> None:
        await self._turns.run(exchange, lambda data: self._serve(exchange, data), needs_engine=False)

    async def _serve(self, exchange: Exchange, data: bytes) -> None:
        asked, size = await self._read(exchange, data)
        with _own_terms(asked.paths):
            tokens = await self._turns.count(exchange, asked.call, size)
        exchange.notes.update(prompt_tokens=tokens)
        await exchange.reply_json(200, {"object": "response.input_tokens", "input_tokens": tokens})


@contextmanager
def _own_terms(paths: FieldPaths) -> Iterator[None]:
    """Errors about the chat body name the client's fields."""
    try:
        yield
    except ForebayError as error:
        paths.translate(error)
        raise


def _of_engine(job: Job, paths: FieldPaths) -> FieldPaths:
    """The places of what the engine may find fault with, the answer's form or the whole prompt: those of all parts may be megabytes."""
    grammar = job.requests[0].grammar
    names = ("messages",) if grammar is None else ("messages", grammar.spec.param)
    return FieldPaths({name: paths.find(name) for name in names})


def refuse_get(exchange: Exchange) -> None:
    """Refuse a WebSocket (426), after which Codex goes on over HTTP, and any other GET (405)."""
    if b"websocket" in exchange.headers.get(b"upgrade", b"").lower():
        text = "Responses are served over HTTP only, not over a WebSocket. Send POST /v1/responses."
        # Bytes after the head would be frames of a WebSocket: the connection cannot go on.
        headers = [(b"upgrade", b"HTTP/1.1"), (b"connection", b"close")]
        raise HttpError(426, text, code="upgrade_required", headers=headers)
    text = f"Method GET is not allowed on {exchange.path[:200]}. Use POST."
    raise HttpError(405, text, code="method_not_allowed", headers=[(b"allow", b"POST")])


async def _first(events: AsyncGenerator[tuple[int, OutputEvent], None], writer: ResponseWriter, out: EventStream) -> OutputEvent:
    """The first event. If the engine has not refused the request by then, the stream starts before it: prefill may take minutes."""

    async def take() -> OutputEvent:
        async for _, event in events:
            return event
        raise RuntimeError("the engine gave no event")

    task = asyncio.create_task(take())
    try:
        done, _ = await asyncio.wait((task,), timeout=ADMISSION_S)
        if not done:
            await out.write(writer.start())
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
