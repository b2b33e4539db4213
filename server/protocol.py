"""What becomes of the fields of a chat-completions body: honoured, named as ignored, or refused.

Messages, tools, response format and reasoning controls are the chat encoding's business (model/chat.py); this checks everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from forebay.engine.types import SamplingParams
from forebay.model.errors import ForebayError
from forebay.model.tokenizer import Tokenizer
from forebay.server.chat_fields import ChatRequest, ForebayOptions, one_or_many
from forebay.server.chat_names import ENCODED, IGNORED, UNSUPPORTED, names_without_effect
from forebay.server.chat_nested import names_in_messages, names_in_tools
from forebay.server.constraints import STRUCTURED
from forebay.server.field_errors import bad, boolean_at, invalid, refusal, short, string_at, too_many, unsupported
from forebay.server.field_paths import FieldPaths
from forebay.server.ignored import MAX_NAMED, ignored
from forebay.server.limits import Lanes, ServerOptions
from forebay.server.responses_items import take_input
from forebay.server.token_fields import banned_words, bias_by_id, check_token_ids

KNOWN = frozenset(ChatRequest.model_fields) | IGNORED | UNSUPPORTED | ENCODED | STRUCTURED


@dataclass(frozen=True)
class ChatCall:
    """A validated request. `body` is what the chat encoding reads, the request without its null fields; the encoder's caller clears it.

    Attributes:
        ignored: names for the response header. unknown: some of those that no server knows, for the metrics.
        logit_bias: by token id; banned words of one token are in it, the others in `bad_words`, once `with_bans` has found their tokens.
        echoes: text of the message that the answer continues, if it is to be repeated in front of it.
        predicted: the request holds a guess of its answer, which is not used; usage says so.
        paths: of a conversation that came as `input`, to the client's own fields.
        default_output: the protocol's own output limit in tokens of a request that states none.
    """

    fields: ChatRequest
    body: dict[str, Any]
    shows_reasoning: bool
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    logit_bias: Mapping[int, float]
    bad_words: tuple[tuple[int, ...], ...] = ()
    echoes: str = ""
    predicted: bool = False
    paths: FieldPaths | None = None
    default_output: int | None = None

    @property
    def stream(self) -> bool:
        return bool(self.fields.stream)

    @property
    def include_usage(self) -> bool:
        """Usage of a stream, in a chunk of its own at the end with null before: only if asked for. Some clients refuse it otherwise."""
        return self.fields.stream_options is not None and bool(self.fields.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        return self.fields.stream_options is not None and bool(self.fields.stream_options.continuous_usage_stats)

    @property
    def own(self) -> ForebayOptions:
        """The options under `forebay`, none of them set when it is absent."""
        return self.fields.forebay or ForebayOptions()

    @property
    def explain(self) -> bool:
        return bool(self.own.explain)

    @property
    def choices(self) -> int:
        return self.fields.n or 1

    @property
    def salt(self) -> str:
        return self.fields.cache_salt or self.fields.extra_key or ""

    @property
    def asked_output(self) -> int | None:
        """The output limit that the request states."""
        return self.fields.max_completion_tokens if self.fields.max_completion_tokens is not None else self.fields.max_tokens

    def sampling(self, choice: int, *, thinking: bool, effort: int | None, room: int, options: ServerOptions) -> SamplingParams:
        """Sampling of choice number `choice` when `room` tokens are left in the context; the output limit is lowered to what fits."""
        f = self.fields
        limit = self.asked_output or self.default_output or options.default_output(thinking=thinking, effort=effort)
        limit = min(limit, options.max_output, room)
        seed = None if f.seed is None else (f.seed + choice + 2**63) % 2**64 - 2**63
        return SamplingParams(
            temperature=_or(f.temperature, 1.0),
            top_p=_or(f.top_p, 0.95 if thinking else 1.0),
            top_k=max(f.top_k or 0, 0),
            min_p=_or(f.min_p, 0.0),
            frequency_penalty=_or(f.frequency_penalty, 0.0),
            presence_penalty=_or(f.presence_penalty, 0.0),
            repetition_penalty=_or(f.repetition_penalty, 1.0),
            logit_bias=self.logit_bias,
            bad_words=self.bad_words,
            allowed_token_ids=None if f.allowed_token_ids is None else tuple(f.allowed_token_ids),
            seed=seed,
            max_tokens=limit,
            min_tokens=min(f.min_tokens or 0, limit),
            stop=tuple(f.stop or ()),
            stop_token_ids=tuple(f.stop_token_ids or ()),
            include_stop=bool(f.include_stop_str_in_output or f.no_stop_trim),
            ignore_eos=bool(f.ignore_eos),
            logprobs=(f.top_logprobs or 0) if f.logprobs else None,
            prompt_logprobs=f.prompt_logprobs,
        )


def parse_chat(
    body: dict[str, Any],
    options: ServerOptions,
    tokenizer: Tokenizer,
    *,
    also: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> ChatCall:
    """Validate a request body. Cheap checks of sizes come first, so that a request with too many items costs little.

    Args:
        also: names that are ignored already. rename: from a path of `body` to the client's own, for the names that are ignored here.

    Raises RequestError naming the field and the limit.
    """
    body = {name: value for name, value in body.items() if value is not None}
    if rename is not None:  # a translated body holds nothing but what is read
        return _parse(body, options, tokenizer, also, rename, lambda body: [])
    if "messages" in body or "input" not in body:
        return _parse(body, options, tokenizer, also, None, lambda body: names_in_messages(body.get("messages")) + names_in_tools(body))
    paths, left_out = take_input(body, options.max_messages)
    try:
        return replace(_parse(body, options, tokenizer, [*also, *left_out], paths.find, names_in_tools), paths=paths)
    except ForebayError as error:
        paths.translate(error)
        raise


def _parse(
    body: dict[str, Any],
    options: ServerOptions,
    tokenizer: Tokenizer,
    also: Sequence[str],
    rename: Callable[[str], str] | None,
    inside: Callable[[dict[str, Any]], list[str]],
) -> ChatCall:
    """`inside` finds the names in the body's lists that change nothing."""
    _check_sizes(body, options)
    try:
        fields = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0], ForebayOptions.model_fields) from None
    _refuse_unsupported(body, fields)
    _check_together(fields, options)
    check_token_ids("stop_token_ids", fields.stop_token_ids or (), tokenizer)
    check_token_ids("allowed_token_ids", fields.allowed_token_ids or (), tokenizer)
    bias = bias_by_id(fields.logit_bias or {}, tokenizer)
    unknown = [name for name in body if name not in KNOWN]
    names = names_without_effect(body)
    reasoning = body.get("reasoning")
    hidden = fields.include_reasoning is False or (isinstance(reasoning, dict) and reasoning.get("exclude") is True)
    return ChatCall(
        fields,
        body,
        shows_reasoning=not hidden,
        ignored=ignored([*also, *(names if rename is None else map(rename, names)), *unknown, *inside(body)]),
        unknown=tuple(unknown[:MAX_NAMED]),
        logit_bias=bias,
        echoes=_continued_text(body, fields) if fields.echo else "",
        predicted="prediction" in body,
    )


async def with_bans(call: ChatCall, lanes: Lanes, tokenizer: Tokenizer) -> ChatCall:
    """`call` with the tokens of its banned words, which are looked for off the loop: the words of a small body may take long."""
    words = call.fields.bad_words
    if not words:
        return call
    bans, sequences = await lanes.run(sum(map(len, words)), lambda: banned_words(words, tokenizer))
    return replace(call, logit_bias={**call.logit_bias, **bans}, bad_words=sequences)


def _continued_text(body: Mapping[str, Any], fields: ChatRequest) -> str:
    """Content of the last message, which the answer continues. What is wrong with the message is the chat encoding's to tell."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or not (fields.continue_final_message or last.get("prefix") is True):
        raise unsupported("echo", "it repeats a last message that is continued by 'prefix' or 'continue_final_message', and there is none")
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _check_sizes(body: dict[str, Any], options: ServerOptions) -> None:
    limits = {
        "messages": options.max_messages,
        "tools": options.max_tools,
        "functions": options.max_tools,
        "stop": options.max_stops,
        "logit_bias": options.max_bias,
        "stop_token_ids": options.max_token_ids,
        "allowed_token_ids": options.max_token_ids,
        "bad_words": options.max_bias,
        "modalities": 16,
        "forebay": 16,
    }
    for name, limit in limits.items():
        value = body.get(name)
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise too_many(name, limit, len(value))
    for name in ("stop", "bad_words"):
        words = one_or_many(body.get(name))
        for i, word in enumerate(words if isinstance(words, list) else ()):
            if isinstance(word, str) and len(word) > options.max_stop_length:
                text = f"Invalid '{name}[{i}]': expected at most {options.max_stop_length} characters, got {len(word)}."
                raise bad(f"{name}[{i}]", text, "string_above_max_length")


def _refuse_unsupported(body: dict[str, Any], fields: ChatRequest) -> None:
    for name in sorted(UNSUPPORTED & body.keys()):
        off = body[name] is False or body[name] in ("", [], {})
        if not off and not (name == "best_of" and fields.best_of in (1, fields.n)):
            raise unsupported(name, "the answer would not be what it asks for")
    if any(kind != "text" for kind in fields.modalities or ()):
        raise bad("modalities", "Unsupported value: 'modalities' may only contain \"text\".", "unsupported_value")
    if fields.add_generation_prompt is False and not fields.continue_final_message:
        raise unsupported("add_generation_prompt", "false only makes sense together with 'continue_final_message'")
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("prefix") is True and (last.get("tool_calls") or last.get("function_call")):
        place = len(body["messages"]) - 1
        raise invalid(f"messages[{place}].prefix", "a message with tool calls is finished and cannot be continued")
    response_format = body.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    if isinstance(schema, dict) and schema.get("name") is not None:
        string_at(schema["name"], "response_format.json_schema.name")
    for outer, name in (("reasoning", "exclude"), ("chat_template_kwargs", "drop_thinking")):  # the encoding looks at these only at times
        holder = body.get(outer)
        if isinstance(holder, dict) and holder.get(name) is not None:
            boolean_at(holder[name], f"{outer}.{name}")
    if "drop_thinking" in body:
        boolean_at(body["drop_thinking"], "drop_thinking")
    if kind in ("grammar", "structural_tag"):
        text = f"Unsupported value: 'response_format.type' {kind!r} is not offered. Use text, json_object, json_schema or regex."
        raise bad("response_format.type", text, "unsupported_value")


def _check_together(fields: ChatRequest, options: ServerOptions) -> None:
    if fields.n is not None and fields.n > options.max_choices:
        text = f"Invalid 'n': expected a value from 1 to {options.max_choices}, got {short(fields.n)}."
        raise bad("n", text, "unsupported_value")
    if fields.user_id is not None and len(fields.user_id.encode("utf-8", "surrogatepass")) > 512:
        raise bad("user_id", "Invalid 'user_id': expected at most 512 bytes.", "string_above_max_length")
    if fields.prompt_logprobs is not None and fields.stream:
        text = "Unsupported value: 'prompt_logprobs' come with a whole answer only; leave 'stream' out."
        raise bad("prompt_logprobs", text, "unsupported_value")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is true")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "it requires 'logprobs' to be true")
    asked = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if fields.min_tokens is not None and asked is not None and fields.min_tokens > asked:
        raise invalid("min_tokens", f"expected at most the output limit of {asked} tokens, got {fields.min_tokens}")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
