"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's protocol over the same turns as chat completions."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

from forebay.server.errors import field_path
from forebay.server.exchange import Exchange
from forebay.server.ignored import MAX_NAMED
from forebay.server.messages_events import PING, Message, MessageWriter, encode, failing
from forebay.server.messages_input import Translated, translate
from forebay.server.patience import PatientReply
from forebay.server.protocol import ChatCall, parse_chat
from forebay.server.sse import EventStream
from forebay.server.turns import Job, Turns


class MessagesRoute:
    """The handler of messages and, with `counting`, of count_tokens."""

    def __init__(self, turns: Turns, *, counting: bool = False) -> None:
        self._turns = turns
        self._counting = counting

    async def __call__(self, exchange: Exchange) -> None:
        await self._turns.run(exchange, lambda data: self._serve(exchange, data), needs_engine=not self._counting)

    async def _serve(self, exchange: Exchange, data: bytes) -> None:
        turns = self._turns
        (given, call), size = await turns.read(exchange, data, self._understand)
        del data  # megabytes that would otherwise stay for as long as the answer takes
        turns.accept(exchange, call, size)
        if self._counting:
            await self._count(exchange, given, call, size)
        elif call.stream:
            await self._stream(exchange, given, call, size)
        else:
            await self._whole(exchange, given, call, size)

    def _understand(self, body: dict[str, Any]) -> tuple[Translated, ChatCall]:
        options = self._turns.options
        model = body.get("model")
        thinks = options.alias_thinking.get(model, options.messages_thinking) if isinstance(model, str) else options.messages_thinking
        given = translate(body, thinking_default=thinks, counting=self._counting)
        if isinstance(model, str) and model.startswith("claude") and options.map_claude_models and model not in self._turns.names:
            model = self._turns.names[0]
        also = [*(field_path(name) or name for name in given.ignored), *given.unknown]
        with given.own_terms():
            call = parse_chat({"model": model, **given.chat}, options, self._turns.engine.tokenizer, also=also, rename=given.paths.find)
        given.drop_conversation()
        return given, replace(call, unknown=given.unknown[:MAX_NAMED])

    async def _count(self, exchange: Exchange, given: Translated, call: ChatCall, size: int) -> None:
        """Never waits for the engine, nor is it refused for being longer than the engine takes: clients count to see whether it is."""
        with given.own_terms():
            tokens = await self._turns.count(exchange, call, size)
        exchange.notes.update(prompt_tokens=tokens)
        await exchange.reply_json(200, {"input_tokens": tokens})

    async def _prepare(self, exchange: Exchange, given: Translated, call: ChatCall, size: int) -> tuple[Job, MessageWriter]:
        with given.own_terms():
            job = await self._turns.prepare(exchange, call, size)
        given.forget_parts(job)
        context = self._turns.engine.max_context
        return job, MessageWriter(job, model=given.model or job.model, context=context, shows_thinking=given.shows_thinking)

    async def _whole(self, exchange: Exchange, given: Translated, call: ChatCall, size: int) -> None:
        message = Message()
        async with PatientReply(exchange, self._turns.options) as reply:
            job, writer = await self._prepare(exchange, given, call, size)
            with given.own_terms():
                async with aclosing(self._turns.events(job.requests)) as events:
                    async for _, event in events:
                        message.add(writer.read(event))
            self._note(exchange, writer)
            await reply.send_json(message.body)

    async def _stream(self, exchange: Exchange, given: Translated, call: ChatCall, size: int) -> None:
        writer: MessageWriter | None = None
        end = b""
        async with EventStream(
            exchange,
            keepalive_s=self._turns.options.keepalive_comment_s,
            beat=lambda: writer.beat() if writer is not None else PING,
            failing=lambda failure: failing(failure, exchange.request_id),
        ) as out:
            job, writer = await self._prepare(exchange, given, call, size)
            with given.own_terms():
                async with aclosing(self._turns.events(job.requests)) as events:
                    async for _, event in events:
                        written = encode(writer.read(event))
                        if event.finish_reason is not None:
                            end = written
                        elif written:
                            await out.write(written)
            self._note(exchange, writer)
            await out.close(end)

    def _note(self, exchange: Exchange, writer: MessageWriter) -> None:
        last = writer.choice.last
        if last is not None and last.usage is not None:
            usage = last.usage
            self._turns.note(exchange, completion=usage.completion_tokens, cached=usage.cached_tokens, choices=[writer.choice])
