"""What every generating route does the same way: take a body, check it, encode the prompt, submit one engine request per choice.

A route turns its own protocol's body into a chat body, calls `read`, `accept` and `prepare`, and writes what `events` yields in its
protocol's shape.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from forebay import __version__
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.metrics import Metrics
from forebay.engine.types import OutputEvent, PromptImage, QueueFullError, Request, UnavailableError
from forebay.model.chat import AnswerForm, ChatCodec, EncodedPrompt, context_overflow
from forebay.model.errors import ForebayError
from forebay.model.image_plan import ImagePlan
from forebay.model.tokenizer import Tokenizer
from forebay.server import constraints, ignored
from forebay.server.body import decode, parse_object
from forebay.server.chunks import Choice
from forebay.server.constraints import FREE, Held, Wanted
from forebay.server.errors import HttpError, State, unavailable
from forebay.server.exchange import Exchange, connection
from forebay.server.grammar_desk import GrammarDesk, Obtain
from forebay.server.images import FoundImage
from forebay.server.limits import Bodies, Lanes, ServerOptions
from forebay.server.logprobs import LogprobFeed
from forebay.server.pictures import ImageDesk, PlannedImage
from forebay.server.protocol import ChatCall, with_bans
from forebay.server.throttle import Pace, Ticket, current

T = TypeVar("T")

# Error code -> reason in forebay_rejected_total; every other refusal is "invalid".
REJECTIONS = {
    "context_length_exceeded": "context_length",
    "request_too_large": "too_large",
    "rate_limit_exceeded": "rate_limited",
    "overloaded": "queue_full",
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
    """A request ready to run: its prompt and one engine request per choice.

    Attributes:
        id: what the answer's id ends with. created: Unix seconds. model: the name as it was asked for.
    """

    call: ChatCall
    prompt: EncodedPrompt
    requests: list[Request]
    id: str
    created: int
    model: str

    def choices(self, tokenizer: Tokenizer) -> list[Choice]:
        """The choices to fill, before any event."""
        call = self.call
        choices = [Choice(i, shows_reasoning=call.shows_reasoning) for i in range(call.choices)]
        if call.fields.logprobs:
            for choice in choices:
                choice.feed = LogprobFeed(
                    tokenizer,
                    ids_as_text=bool(call.fields.return_tokens_as_token_ids),
                    in_reasoning=self.prompt.initial_channel == "reasoning",
                )
        return choices


class AbortedError(ForebayError):
    """The engine gave a request up before its end."""

    status = 503


class Turns:
    """The way from a request's body to the engine's events, for all routes.

    Attributes:
        names: names that requests may use, the main one first.
        fingerprint: stable over restarts of the same server version, model and tokenizer.
    """

    def __init__(self, engine: Engine, options: ServerOptions, lanes: Lanes) -> None:
        self.engine, self.options, self.lanes = engine, options, lanes
        self.names = list(dict.fromkeys([options.model_name or engine.model_name, *options.aliases]))
        text = f"{__version__}\0{engine.model_name}\0{engine.tokenizer.fingerprint}\0{engine.max_context}"
        self.fingerprint = f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.pace = Pace()
        self.grammars = GrammarCompiler(engine.tokenizer, metrics=engine.metrics.grammars)
        self.desk = GrammarDesk(self.grammars)
        threading.Thread(target=self.grammars.vocabulary, name="forebay-vocabulary", daemon=True).start()  # not in the first request
        self.images = ImageDesk(options.images, engine.codec.vision)
        self.bodies = Bodies(max(options.max_bodies, options.max_body))
        self._numbers = itertools.count()

    async def run(self, exchange: Exchange, serve: Callable[[bytes], Coroutine[Any, Any, None]], *, needs_engine: bool = True) -> None:
        """Read the body and `serve` it for as long as the client stays; refusals before the engine has the request are counted."""
        try:
            if needs_engine:
                self.require_ready()
            data = await exchange.read_body(self.options, self.bodies)
            await exchange.unless_gone(serve(data))
        except ForebayError as error:
            # The engine counts its own refusals.
            if not exchange.admitted and error.status != 500:
                self.engine.metrics.request_rejected(REJECTIONS.get(error.code or "", "invalid"))
            raise

    def require_ready(self) -> None:
        if self.engine.state != "ready":
            raise unavailable(self.engine.state, self.engine.reason)

    async def read(self, exchange: Exchange, data: bytes, understand: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
        """What `understand` makes of the body's object, off the loop if it is large; with the size of the body in bytes, decoded."""
        options = self.options
        encoding = exchange.headers.get(b"content-encoding", b"").decode("latin-1")

        def work(limit: int) -> tuple[T, int]:
            plain = decode(data, encoding, limit) if encoding else data
            return understand(parse_object(plain, options.max_depth)), len(plain)

        if not encoding:
            # A small body is parsed faster than it is handed to a thread.
            return work(0) if len(data) <= options.off_loop else await self.lanes.run(len(data), lambda: work(0))
        most = exchange.most_body(options)
        if len(data) <= options.large:
            try:
                understood, size = await self.lanes.run(len(data), lambda: work(min(options.large, most)))
            except HttpError as error:
                if error.code != "request_too_large":
                    raise
                if most <= options.large:
                    raise exchange.over_limit or error from None
            else:
                exchange.claim_body(size)
                return understood, size
        # Large inside, which only the other lane may find out. Until it has, the body counts as what it may be.
        exchange.claim_body(most)
        understood, size = await self.lanes.run(most, lambda: work(most))
        exchange.claim_body(size)
        return understood, size

    def accept(self, exchange: Exchange, call: ChatCall, size: int) -> None:
        """Name what is ignored, count what is unknown, refuse (404) a model that is not served."""
        for name in call.unknown:
            self.engine.metrics.unknown_field(name)
        self.require_model(call.fields.model)
        exchange.extra_headers += ignored.header(call.ignored)
        exchange.notes.update(body_bytes=size, stream=call.stream)

    def require_model(self, model: str | None) -> None:
        """Refuse (404) a name that is not served; none, or an empty one, is the main model."""
        if model and model not in self.names:
            text = f"The model `{model[:128]}` does not exist. Available: {', '.join(self.names)}"
            raise HttpError(404, text, code="model_not_found", param="model")

    async def encode(
        self, exchange: Exchange, call: ChatCall, size: int, *, most: int | None = None
    ) -> tuple[EncodedPrompt, dict[str, PlannedImage]]:
        """The prompt of a chat body, and its images by their parts; `call.body` is cleared, their files count in its place.

        One that is longer than the context is refused early; `most` is another limit in tokens, which is kept to the token.

        Raises RequestError with the codec's finding, or with what is wrong with an image.
        """
        limit, slack = (self.engine.max_context, 2) if most is None else (most, 1)

        def encode(**settings: Any) -> EncodedPrompt:
            asked = min(call.asked_output or 0, self.options.max_output)
            return self.engine.codec.encode(call.body, max_tokens=limit, slack=slack, asked_output=asked, **settings)

        return await self._through_codec(exchange, call, size, encode)

    async def count(self, exchange: Exchange, call: ChatCall, size: int) -> int:
        """Tokens of the prompt that `encode` would give, however many; `call.body` is cleared. Raises like it."""
        tokens, _ = await self._through_codec(exchange, call, size, lambda **settings: self.engine.codec.count(call.body, **settings))
        exchange.claim_body(0)
        return tokens

    async def _through_codec(
        self, exchange: Exchange, call: ChatCall, size: int, use: Callable[..., T]
    ) -> tuple[T, dict[str, PlannedImage]]:
        options, engine = self.options, self.engine
        thinking = options.alias_thinking.get(call.fields.model or "", options.thinking_default)
        salt = exchange.caller.salt(call.salt)

        def work(plans: Mapping[str, ImagePlan]) -> T:
            return use(
                plans=plans,
                default_effort=options.default_effort,
                thinking_default=thinking,
                strict_tool_messages=options.strict_tool_messages,
                salt=salt,
            )

        def look() -> tuple[list[FoundImage], T | None]:
            """The images if there are any to be planned first, else what `use` makes of the body."""
            found = self.images.find(call.body)
            return (found, None) if found and engine.codec.vision is not None else ([], work({}))

        found, used = await self.lanes.run(size, look)
        images: dict[str, PlannedImage] = {}
        if used is None:
            images = await self.images.plan(found, exchange.claim_more)
            del found
            plans = {part: image.plan for part, image in images.items()}
            used = await self.lanes.run(size, lambda: work(plans))
        call.body.clear()  # nothing reads it again, and it may be megabytes
        exchange.claim_body(sum({id(image.data): len(image.data) for image in images.values()}.values()))
        return used, images

    async def prepare(self, exchange: Exchange, call: ChatCall, size: int) -> Job:
        """Encode the prompt and size the output. Raises RequestError with the codec's finding, or context_length_exceeded."""
        if size > self.options.off_loop:  # a schema in a string is parsed here
            wanted = await self.lanes.run(size, lambda: constraints.read(call.body))
        else:
            wanted = constraints.read(call.body)
        call = await with_bans(call, self.lanes, self.engine.tokenizer)
        prompt, planned = await self.encode(exchange, call, size)
        images = await self._shown(exchange, call, prompt, planned)
        del planned  # the files
        exchange.claim_body(0)
        held = await self.hold(exchange, wanted, prompt, size, salt=call.salt)
        prompt = replace(prompt, form=AnswerForm(), text="")  # megabytes that nothing reads would live as long as the answer takes
        requests = self.requests(exchange, call, prompt.token_ids, prompt, held=held, images=images)
        effort = prompt.effort if prompt.thinking else "off"
        exchange.notes.update(prompt_tokens=len(prompt.token_ids), effort=effort)
        exchange.extra_headers.append((b"x-forebay-effort", str(effort).encode()))
        suffix = call.fields.request_id or call.fields.rid or exchange.request_id
        exchange.admitted = True
        return Job(call, prompt, requests, suffix, int(time.time()), call.fields.model or self.names[0])

    async def _shown(
        self, exchange: Exchange, call: ChatCall, prompt: EncodedPrompt, planned: Mapping[str, PlannedImage]
    ) -> tuple[PromptImage, ...]:
        """What the engine gets of a prompt's images, which are decoded only if the prompt fits.

        Raises RequestError naming the field, context_length_exceeded, or HttpError 503 if other requests' images take all memory.
        """
        if not prompt.images:
            return ()
        self.room(len(prompt.token_ids), call.asked_output)
        exchange.notes.update(images=len(prompt.images))

        def claim(size: int) -> None:
            exchange.claim_canvases(size, self.images.canvases)

        return await self.images.show(prompt.images, planned, claim, exchange.caller.salt(call.salt))

    async def hold(
        self,
        exchange: Exchange,
        wanted: Wanted,
        prompt: EncodedPrompt | None,
        size: int,
        raw: AnswerForm | None = None,
        salt: str = "",
    ) -> Held:
        """The form that answers are held to; a header names what was left out of it. Raises RequestError for one that cannot be used.

        `raw` is the form of raw text, which has no prompt to tell it. `salt` is the cache_salt that was asked for.
        """
        form = prompt.form if prompt is not None else raw or AnswerForm()
        if not constraints.asks(wanted, form):
            budget = wanted.budget if prompt is not None and prompt.initial_channel == "reasoning" else None
            return Held(reasoning_budget=budget)

        def work(obtain: Obtain) -> Held:
            return constraints.hold(wanted, prompt, obtain, raw)

        caller = exchange.caller
        held = await self.desk.hold(work, lambda run: self.lanes.run(size, run), owner=caller.tenant or caller.name, salt=caller.salt(salt))
        exchange.extra_headers += constraints.warning_header(held)
        return held

    def requests(
        self,
        exchange: Exchange,
        call: ChatCall,
        prompt_ids: Sequence[int],
        prompt: EncodedPrompt | None = None,
        param: str = "messages",
        held: Held = FREE,
        images: tuple[PromptImage, ...] = (),
    ) -> list[Request]:
        """One engine request per choice of a prompt. Without `prompt` the answer is raw text, which nothing parses.

        Raises RequestError (context_length_exceeded), naming the field `param`, if no output fits.
        """
        exchange.claim_body(0)
        room = self.room(len(prompt_ids), call.asked_output, param)
        thinking, effort = (prompt.thinking, prompt.effort) if prompt is not None else (False, None)
        share = f"choices.{next(self._numbers)}" if call.choices > 1 else None
        return [
            Request(
                prompt_ids=prompt_ids,
                params=call.sampling(i, thinking=thinking, effort=effort, room=room, options=self.options),
                images=images,
                request_id=self.unique_id(exchange),
                prompt=prompt,
                prefill=call.own.prefill,
                replay=call.own.replay,
                max_lineage=call.own.max_lineage,
                salt=exchange.caller.salt(call.salt),
                priority=exchange.caller.priority(call.fields.priority),
                share=share,
                grammar=held.grammar,
                reasoning_budget=held.reasoning_budget,
                arrived=exchange.arrived,
            )
            for i in range(call.choices)
        ]

    def room(self, length: int, asked: int | None, param: str = "messages") -> int:
        """Tokens of output that fit behind a prompt of `length` tokens.

        Raises RequestError if not even one does or, under the overflow policy `error`, not all that the request asks for.
        """
        room = self.engine.max_context - length
        asked = min(asked or 0, self.options.max_output)
        if room < max(1, asked if self.options.overflow_policy == "error" else 0):
            raise context_overflow(length, self.engine.max_context, asked, param)
        return room

    def unique_id(self, exchange: Exchange) -> str:
        """A name inside the engine: clients may repeat a request id."""
        return f"{exchange.request_id}.{next(self._numbers)}"

    async def events(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, OutputEvent], None]:
        """Events of all requests as they come, each with the number of its request. Closing it aborts what still runs.

        Raises what an aborted or failed choice failed with: no client may take a part for the whole.
        """
        ended, ticket, link = 0, current.get(), connection.get()
        waiting = set(range(len(requests)))
        # Now, not at the first output: the prompt is worked on also for a client that leaves before. Choices share it.
        prompt_tokens = sum({id(request.prompt_ids): len(request.prompt_ids) for request in requests}.values())
        if ticket is not None:
            ticket.spend(prompt_tokens)
        async with aclosing(self._submitted(requests, ticket, prompt_tokens)) as events:
            async for index, event in events:
                self._raise_failure(event)
                if index in waiting:
                    waiting.discard(index)
                    self.pace.started()
                    if link is not None:
                        link.answering = True
                if ticket is not None:
                    ticket.spend(len(event.token_ids))
                ended += event.finish_reason is not None
                yield index, event
        if ended < len(requests):
            raise RuntimeError(f"the engine ended {len(requests) - ended} of {len(requests)} choices without a finish reason")

    async def _submitted(
        self, requests: Sequence[Request], ticket: Ticket | None, prompt_tokens: int
    ) -> AsyncGenerator[tuple[int, OutputEvent], None]:
        """Events of all requests. One that the engine had no place for gets its tokens back."""
        began = False
        try:
            async with aclosing(_merged([self.engine.submit(request) for request in requests])) as events:
                async for event in events:
                    began = True
                    yield event
        except (QueueFullError, UnavailableError):
            if ticket is not None and not began:
                ticket.spend(-prompt_tokens)
            raise

    def _raise_failure(self, event: OutputEvent) -> None:
        if event.error is not None:
            raise event.error
        if event.finish_reason == "abort":
            self.require_ready()
            raise AbortedError("The engine gave this request up before its end; it can be sent again.", code="engine_unavailable")
        if event.finish_reason == "error":
            raise RuntimeError("the engine reported an error without saying which")

    @staticmethod
    def note(exchange: Exchange, *, completion: int, cached: int, choices: Sequence[Choice]) -> None:
        """What the access log tells of an answer."""
        finish = ",".join(choice.last.finish_reason or "" for choice in choices if choice.last is not None)
        exchange.notes.update(completion_tokens=completion, cached_tokens=cached, finish=finish)


async def _merged(streams: Sequence[AsyncGenerator[OutputEvent, None]]) -> AsyncGenerator[tuple[int, OutputEvent], None]:
    """Events of all choices as they come, with the number of the choice. Closing it closes every stream; the first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    # Bounded, so that what a slow reader leaves behind stays with the engine's client, which limits it.
    queue: asyncio.Queue[tuple[int, OutputEvent | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[OutputEvent, None]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

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
