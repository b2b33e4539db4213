"""POST /v1/chat/completions: the answer as a stream of chunks or as a whole."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from forebay.server.chunks import ChunkWriter, Head, explain, usage
from forebay.server.exchange import Exchange
from forebay.server.protocol import ChatCall, parse_chat
from forebay.server.sse import DONE, EventStream
from forebay.server.turns import Job, Turns


class ChatRoute:
    """The handler of chat completions."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __call__(self, exchange: Exchange) -> None:
        await self._turns.run(exchange, lambda data: self._serve(exchange, data))

    async def _serve(self, exchange: Exchange, data: bytes) -> None:
        turns = self._turns

        def understand(body: dict[str, Any]) -> ChatCall:
            return parse_chat(body, turns.options, turns.engine.tokenizer)

        call, size = await turns.read(exchange, data, understand)
        del data  # megabytes that would otherwise stay for as long as the answer takes
        turns.accept(exchange, call, size)
        if not call.stream:
            await self._whole(exchange, await turns.prepare(exchange, call, size))
            return
        async with EventStream(exchange, keepalive_s=turns.options.keepalive_comment_s) as out:
            await self._stream(exchange, await turns.prepare(exchange, call, size), out)

    def _head(self, job: Job) -> Head:
        return Head(f"chatcmpl-{job.id}", job.created, job.model, self._turns.fingerprint)

    async def _whole(self, exchange: Exchange, job: Job) -> None:
        choices = job.choices(self._turns.engine.tokenizer)
        async with aclosing(self._turns.events(job.requests)) as events:
            async for index, event in events:
                choices[index].keep(event)
        call = job.call
        token_ids = bool(call.fields.return_token_ids)
        answer = self._head(job).fields("chat.completion")
        answer["choices"] = [choice.whole(thinking=job.prompt.thinking, with_token_ids=token_ids) for choice in choices]
        answer["usage"] = used = usage(job.prompt, choices)
        answer["service_tier"] = "default"
        if token_ids:
            answer["prompt_token_ids"] = list(job.prompt.token_ids)
        if call.explain:
            answer["forebay"] = explain(job.prompt, choices)
        self._turns.note(exchange, completion=used["completion_tokens"], cached=used["prompt_cache_hit_tokens"], choices=choices)
        await exchange.reply_json(200, answer)

    async def _stream(self, exchange: Exchange, job: Job, out: EventStream) -> None:
        call = job.call
        choices = job.choices(self._turns.engine.tokenizer)
        token_ids = bool(call.fields.return_token_ids)
        chunks = ChunkWriter(self._head(job), include_usage=call.include_usage, with_token_ids=token_ids)
        async with aclosing(self._turns.events(job.requests)) as events:
            async for index, event in events:
                if data := chunks.event(choices[index], event):
                    await out.write(data)
        used = usage(job.prompt, choices)
        tail: dict[str, Any] = {"usage": used} if call.include_usage else {}
        if call.explain:
            tail["forebay"] = explain(job.prompt, choices)
        if token_ids:
            tail["prompt_token_ids"] = list(job.prompt.token_ids)
        self._turns.note(exchange, completion=used["completion_tokens"], cached=used["prompt_cache_hit_tokens"], choices=choices)
        await out.close((chunks.tail(tail) if tail else b"") + DONE)
