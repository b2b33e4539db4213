"""POST /v1/chat/completions: the answer as a stream of chunks or as a whole."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from forebay.engine.types import TokenLogprob
from forebay.model.errors import ForebayError
from forebay.server.chunks import REASONING_NAMES, Choice, ChunkWriter, Head, explain, usage
from forebay.server.exchange import Exchange
from forebay.server.logprobs import prompt_entries
from forebay.server.pacing import Pacer
from forebay.server.patience import PatientReply
from forebay.server.protocol import ChatCall, parse_chat
from forebay.server.sse import DONE, EventStream
from forebay.server.token_fields import check_scored
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
            async with PatientReply(exchange, turns.options) as reply:
                await self._whole(exchange, await self._prepare(exchange, call, size), reply)
            return
        async with EventStream(exchange, keepalive_s=turns.options.keepalive_comment_s) as out:
            await self._stream(exchange, await self._prepare(exchange, call, size), out)

    async def _prepare(self, exchange: Exchange, call: ChatCall, size: int) -> Job:
        try:
            job = await self._turns.prepare(exchange, call, size)
        except ForebayError as error:
            if call.paths is not None:
                call.paths.translate(error)
            raise
        if call.paths is not None:
            call.paths.client.clear()  # nothing that is found from here on is about a part of the body
        if (alternatives := call.fields.prompt_logprobs) is not None:
            exchange.admitted = False  # if it is refused it counts as that
            check_scored(len(job.prompt.token_ids), call.choices, alternatives, self._turns.options.max_scored, "prompt_logprobs")
            exchange.admitted = True
        return job

    def _head(self, job: Job) -> Head:
        return Head(f"chatcmpl-{job.id}", job.created, job.model, self._turns.fingerprint)

    def _choices(self, job: Job) -> list[Choice]:
        choices = job.choices(self._turns.engine.tokenizer)
        for choice in choices:
            choice.opening = job.call.echoes
            choice.wraps_reasoning = job.call.fields.separate_reasoning is False
        return choices

    async def _whole(self, exchange: Exchange, job: Job, reply: PatientReply) -> None:
        choices = self._choices(job)
        names = REASONING_NAMES[self._turns.options.reasoning_field]
        scores: list[TokenLogprob | None] | None = None
        async with aclosing(self._turns.events(job.requests)) as events:
            async for index, event in events:
                choices[index].keep(event)
                scores = event.prompt_logprobs or scores
        call = job.call
        token_ids = bool(call.fields.return_token_ids)
        answer = self._head(job).fields("chat.completion")
        answer["choices"] = [
            choice.whole(thinking=job.prompt.thinking, with_token_ids=token_ids, reasoning_names=names) for choice in choices
        ]
        answer["usage"] = used = usage(job.prompt, choices, predicted=call.predicted)
        answer["service_tier"] = "default"
        if token_ids:
            answer["prompt_token_ids"] = list(job.prompt.token_ids)
        if scores is not None:
            answer["prompt_logprobs"] = prompt_entries(self._turns.engine.tokenizer, job.prompt.token_ids, scores)
        if call.explain:
            answer["forebay"] = explain(job.prompt, choices)
        self._turns.note(exchange, completion=used["completion_tokens"], cached=used["prompt_cache_hit_tokens"], choices=choices)
        await reply.send_json(answer)

    async def _stream(self, exchange: Exchange, job: Job, out: EventStream) -> None:
        call = job.call
        choices = self._choices(job)
        chunks = ChunkWriter(
            self._head(job),
            job.prompt,
            choices,
            include_usage=call.include_usage,
            running_usage=call.running_usage,
            with_token_ids=bool(call.fields.return_token_ids),
            reasoning_names=REASONING_NAMES[self._turns.options.reasoning_field],
        )
        interval, together = call.fields.stream_interval or 1, call.fields.stream_reasoning is False
        pacers = [Pacer(interval, whole_reasoning=together) for _ in choices] if interval > 1 or together else None
        async with aclosing(self._turns.events(job.requests)) as events:
            async for index, event in events:
                ready = event if pacers is None else pacers[index].add(event)
                if ready is not None and (data := chunks.event(choices[index], ready)):
                    await out.write(data)
        used = usage(job.prompt, choices, predicted=call.predicted)
        tail: dict[str, Any] = {"usage": used} if call.include_usage else {}
        if call.explain:
            tail["forebay"] = explain(job.prompt, choices)
        self._turns.note(exchange, completion=used["completion_tokens"], cached=used["prompt_cache_hit_tokens"], choices=choices)
        await out.close((chunks.tail(tail) if tail else b"") + DONE)
