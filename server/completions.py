"""POST /v1/completions: raw prompts in, raw text out; nothing is rendered before and nothing parsed after (spec/http-api.md §5).

A `suffix` asks for the middle between it and the prompt; an empty one is as good as none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

import orjson
from pydantic import Field, ValidationError

from forebay.engine.types import MAX_LOGPROBS, Request
from forebay.model.chat import AnswerForm, EncodedPrompt, ParseOptions, parse_response_format
from forebay.server import constraints
from forebay.server.chat_fields import Body, Int
from forebay.server.chat_names import ENCODED
from forebay.server.chunks import Choice, Head, explain
from forebay.server.constraints import Wanted
from forebay.server.exchange import Exchange
from forebay.server.field_errors import bad, invalid, missing, refusal, unsupported
from forebay.server.limits import ServerOptions
from forebay.server.pacing import Pacer
from forebay.server.patience import PatientReply
from forebay.server.prompts import Prompt, fill_ids, read_prompts, text_ids, total
from forebay.server.protocol import ChatCall, parse_chat, with_bans
from forebay.server.raw_choice import RawChoice, usage
from forebay.server.sse import DONE, EventStream
from forebay.server.token_fields import check_scored
from forebay.server.turns import Turns

DEFAULT_OUTPUT = 16  # tokens; what OpenAI has always given those who do not say

# Fields of chat completions whose silent loss would change the answer, and those that say nothing about raw text.
CHAT_ONLY = frozenset({"messages", "input", "tools", "tool_choice", "functions", "function_call", "top_logprobs", "task"})
IDLE = (ENCODED - CHAT_ONLY - {"response_format"}) | {
    "include_reasoning", "thinking_token_budget", "separate_reasoning", "stream_reasoning", "parallel_tool_calls", "modalities",
    "add_generation_prompt",
}  # fmt: skip


class CompletionFields(Body):
    """The fields that chat completions does not have, or has with another meaning. `prompt` is read apart: it may be megabytes."""

    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True)
class CompletionCall:
    """A validated request. `chat` has what completions share with chat completions; `prompts` are cleared once encoded."""

    fields: CompletionFields
    chat: ChatCall
    prompts: list[Prompt]
    shown_scores: int | None  # alternatives of the prompt's log-probabilities in a field of their own, vLLM's `prompt_logprobs`
    wanted: Wanted
    form: AnswerForm  # with `wanted`, what the text is held to, from its first token

    @property
    def only_prompt(self) -> bool:
        """Nothing is to be generated: the prompt is read, and scored if log-probabilities are asked for."""
        return self.fields.max_tokens == 0 and self.chat.fields.max_completion_tokens is None

    @property
    def scored(self) -> int | None:
        """Alternatives of each prompt token, None if the prompt is not to be scored."""
        return self.chat.fields.prompt_logprobs


def parse_completion(body: dict[str, Any], turns: Turns) -> CompletionCall:
    """Validate a request body. Raises RequestError naming the field and the limit."""
    options, tokenizer = turns.options, turns.engine.tokenizer
    body = {name: value for name, value in body.items() if value is not None}
    prompt = body.pop("prompt", None)
    own = {name: body.pop(name) for name in CompletionFields.model_fields if name in body}
    try:
        fields = CompletionFields.model_validate(own)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None
    for name in sorted(CHAT_ONLY & body.keys()):
        if body.pop(name) not in (False, "", "none", "auto", [], {}):
            raise unsupported(name, "it belongs to chat completions, POST /v1/chat/completions")
    if prompt is None:
        raise missing("prompt")
    prompts = read_prompts(prompt, tokenizer)
    idle = [name for name in body if name in IDLE]
    for name in idle:
        del body[name]
    alternatives = {} if fields.logprobs is None else {"logprobs": True, "top_logprobs": fields.logprobs}
    limit = {"max_tokens": DEFAULT_OUTPUT if fields.max_tokens is None else max(fields.max_tokens, 1)}
    if fields.max_tokens is None and "max_completion_tokens" in body:  # the name that chat completions prefers
        limit = {}
    chat = parse_chat({**body, **alternatives, **limit}, options, tokenizer, also=idle)
    asked = chat.fields.prompt_logprobs
    if fields.echo and fields.logprobs is not None:
        chat = replace(chat, fields=chat.fields.model_copy(update={"prompt_logprobs": max(fields.logprobs, asked or 0)}))
    call = CompletionCall(fields, chat, prompts, asked, constraints.read(body), parse_response_format(body))
    _check_together(call, options)
    return call


def _check_together(call: CompletionCall, options: ServerOptions) -> None:
    fields, prompts, n = call.fields, call.prompts, call.chat.choices
    if len(prompts) * n > options.max_prompts:
        text = f"Invalid 'prompt': expected at most {options.max_prompts} prompts, each counted 'n' times, got {len(prompts)} times {n}."
        raise bad("prompt", text, "array_above_max_length")
    if fields.suffix and (len(prompts) > 1 or not isinstance(prompts[0], str)):
        raise invalid("suffix", "it needs a 'prompt' that is one string")
    if fields.suffix and fields.echo and fields.logprobs is not None:
        raise invalid("echo", "with 'suffix' there are no log-probabilities of the prompt; leave out 'echo' or 'logprobs'")
    if call.only_prompt and not fields.echo:
        text = "Invalid 'max_tokens': expected a value of at least 1, got 0. Only with 'echo' nothing need be generated."
        raise bad("max_tokens", text, "integer_below_min_value")
    if fields.best_of is not None and fields.best_of < n:
        raise invalid("best_of", f"expected at least 'n', which is {n}, got {fields.best_of}")
    if fields.best_of is not None and fields.best_of > n:
        raise unsupported("best_of", "it does not choose among answers; ask for 'n' of them")


@dataclass(frozen=True)
class Job:
    """A request ready to run. Its choices are numbered prompt by prompt: choice k of prompt p is p * n + k."""

    call: CompletionCall
    prompts: list[list[int]]
    requests: list[Request]
    choices: list[RawChoice]
    head: Head


class CompletionRoute:
    """The handler of completions."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __call__(self, exchange: Exchange) -> None:
        await self._turns.run(exchange, lambda data: self._serve(exchange, data))

    async def _serve(self, exchange: Exchange, data: bytes) -> None:
        turns = self._turns
        call, size = await turns.read(exchange, data, lambda body: parse_completion(body, turns))
        del data  # megabytes that would otherwise stay for as long as the answer takes
        turns.accept(exchange, call.chat, size)
        if not call.chat.stream:
            async with PatientReply(exchange, turns.options) as reply:
                await self._whole(exchange, await self._prepare(exchange, call, size), reply)
            return
        async with EventStream(exchange, keepalive_s=turns.options.keepalive_comment_s) as out:
            await self._stream(exchange, await self._prepare(exchange, call, size), out)

    async def _prepare(self, exchange: Exchange, call: CompletionCall, size: int) -> Job:
        """Find the ids of the prompts and size the outputs. Raises RequestError or HttpError naming the field."""
        turns = self._turns
        tokenizer = turns.engine.tokenizer
        chat = await with_bans(call.chat, turns.lanes, tokenizer)
        prompts, echoes = await turns.lanes.run(size, lambda: self._encode(call))
        call.prompts.clear()
        if call.scored is not None:
            param = "echo" if call.shown_scores is None else "prompt_logprobs"
            check_scored(total(prompts), chat.choices, call.scored, turns.options.max_scored, param)
        held = await turns.hold(exchange, call.wanted, None, size, call.form, chat.salt)
        requests: list[Request] = []
        for ids in prompts:
            requests += turns.requests(exchange, chat, ids, param="prompt", held=held)
        choices = [
            RawChoice(
                index,
                request.prompt_ids,
                tokenizer,
                echo=echoes[index // chat.choices] if call.fields.echo else None,
                logprobs=call.fields.logprobs,
                prompt_logprobs=call.shown_scores,
                ids_as_text=bool(chat.fields.return_tokens_as_token_ids),
                with_token_ids=bool(chat.fields.return_token_ids),
                only_prompt=call.only_prompt,
            )
            for index, request in enumerate(requests)
        ]
        exchange.notes.update(prompt_tokens=total(prompts))
        exchange.admitted = True
        suffix = chat.fields.request_id or chat.fields.rid or exchange.request_id
        head = Head(f"cmpl-{suffix}", int(time.time()), chat.fields.model or turns.names[0], turns.fingerprint)
        return Job(call, prompts, requests, choices, head)

    def _encode(self, call: CompletionCall) -> tuple[list[list[int]], list[str]]:
        """(ids of each prompt, the text that `echo` puts before its answers)."""
        tokenizer, most = self._turns.engine.tokenizer, self._turns.engine.max_context
        bos = call.fields.add_special_tokens is not False
        asked = min(call.chat.asked_output or 0, self._turns.options.max_output)
        found: list[list[int]] = []
        for i, prompt in enumerate(call.prompts):
            path = "prompt" if len(call.prompts) == 1 else f"prompt[{i}]"
            if not isinstance(prompt, str):
                found.append(prompt)
            elif call.fields.suffix:
                found.append(fill_ids(prompt, call.fields.suffix, tokenizer, bos=bos, max_tokens=most, asked_output=asked))
            else:
                found.append(text_ids(prompt, tokenizer, path=path, bos=bos, max_tokens=most, asked_output=asked))
            if not found[-1]:
                raise bad(path, f"Invalid '{path}': without begin of sentence an empty text has no tokens.", "empty_string")
        if not call.fields.echo:
            return found, []
        if call.fields.suffix:
            return found, [text for text in call.prompts if isinstance(text, str)]
        return found, [tokenizer.decode(ids, skip_special=True) for ids in found]

    async def _whole(self, exchange: Exchange, job: Job, reply: PatientReply) -> None:
        async with aclosing(self._turns.events(job.requests)) as events:
            async for index, event in events:
                job.choices[index].keep(event)
        answer = job.head.fields("text_completion")
        answer["choices"] = [choice.whole() for choice in job.choices]
        answer["usage"] = self._used(exchange, job)
        if job.call.chat.explain:
            answer["forebay"] = explain(*_told(job))
        await reply.send_json(answer)

    async def _stream(self, exchange: Exchange, job: Job, out: EventStream) -> None:
        chat = job.call.chat
        chunks = _Chunks(job.head)
        interval = chat.fields.stream_interval or 1
        pacers = [Pacer(interval, whole_reasoning=False) for _ in job.choices] if interval > 1 else None
        async with aclosing(self._turns.events(job.requests)) as events:
            async for index, event in events:
                ready = event if pacers is None else pacers[index].add(event)
                if ready is None:
                    continue
                parts = []
                for piece in job.choices[index].pieces(ready):
                    parts.append(chunks.one([piece], _so_far(job) if chat.running_usage else None, null=chat.include_usage))
                if parts:
                    await out.write(b"".join(parts))
        final = self._used(exchange, job)
        extra = {"forebay": explain(*_told(job))} if chat.explain else {}
        tail = chunks.one([], final if chat.include_usage else None, extra=extra) if chat.include_usage or extra else b""
        await out.close(tail + DONE)

    def _used(self, exchange: Exchange, job: Job) -> dict[str, Any]:
        """Usage of the finished answer; also for the log."""
        n = job.call.chat.choices
        used = usage([job.choices[start : start + n] for start in range(0, len(job.choices), n)])
        self._turns.note(exchange, completion=used["completion_tokens"], cached=used["prompt_cache_hit_tokens"], choices=_ends(job.choices))
        return used


class _Chunks:
    """Encodes the chunks of one stream. What repeats is encoded once."""

    def __init__(self, head: Head) -> None:
        self._start = b"data: " + orjson.dumps(head.fields("text_completion"))[:-1]

    def one(
        self, choices: list[dict[str, Any]], used: dict[str, Any] | None, *, null: bool = False, extra: Mapping[str, Any] | None = None
    ) -> bytes:
        """One chunk; without `used` it has no usage, or a null one with `null`."""
        fields = {"choices": choices, **({"usage": used} if used or null else {}), **(extra or {})}
        return self._start + b"," + orjson.dumps(fields)[1:] + b"\n\n"


def _so_far(job: Job) -> dict[str, Any]:
    """Usage of an answer under way. Where the prompt came from is known at the end only."""
    prompt, completion = total(job.prompts), sum(choice.completion_tokens for choice in job.choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _ends(choices: Sequence[RawChoice]) -> list[Choice]:
    return [Choice(choice.index, last=choice.last) for choice in choices]


def _told(job: Job) -> tuple[EncodedPrompt, list[Choice]]:
    """What `explain` reads; of the prompt it is only that nobody thinks."""
    plain = EncodedPrompt([], "", False, None, "content", ParseOptions(start="content"), False)
    return plain, _ends(job.choices)
