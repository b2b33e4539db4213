"""What a chat-completions body may contain: types, ranges, and what is honoured, named as ignored, or refused.

Messages, tools, response format and reasoning controls are the chat encoding's business (model/chat.py); this checks everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forebay.engine.types import MAX_LOGPROBS, PrefillMode, ReplayMode, SamplingParams
from forebay.model.tokenizer import Tokenizer
from forebay.server.chat_input import take_input
from forebay.server.constraints import STRUCTURED
from forebay.server.field_errors import bad, invalid, refusal, short, unsupported
from forebay.server.limits import ServerOptions

# Known fields of OpenAI and of other servers that change nothing here; a response header names those that were sent.
IGNORED = frozenset(
    {
        "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
        "verbosity", "prediction", "web_search_options", "moderation", "user", "user_id", "session_id", "skip_special_tokens",
        "spaces_between_special_tokens", "kv_transfer_params",
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "vllm_xargs", "lora_path", "data_parallel_rank", "return_hidden_states",
        "input_ids", "cache_prompt", "id_slot", "n_keep", "timings_per_token",
    }
)

# Fields whose silent loss would change the meaning of the answer.
UNSUPPORTED = frozenset(
    {
        "audio", "chat_template", "truncate_prompt_tokens", "guided_grammar", "ebnf", "grammar", "best_of", "use_beam_search",
    }
)

# Read by the chat encoding from the body itself.
ENCODED = frozenset(
    {
        "messages", "tools", "tool_choice", "functions", "function_call", "response_format", "reasoning_effort", "thinking",
        "enable_thinking", "reasoning", "drop_thinking", "continue_final_message", "task", "chat_template_kwargs", "output_config", "input",
    }
)

# What is read of these objects; the other names in them change nothing.
_READ_INSIDE = {
    "chat_template_kwargs": frozenset({"thinking", "enable_thinking", "reasoning_effort", "drop_thinking"}),
    "reasoning": frozenset({"enabled", "effort", "exclude", "max_tokens"}),
    "output_config": frozenset({"effort"}),
}

# Names that give way to another one when both are sent.
_OVERRULED = {
    "max_tokens": "max_completion_tokens", "functions": "tools", "function_call": "tool_choice", "extra_key": "cache_salt",
    "rid": "request_id", "input": "messages",
}  # fmt: skip

MAX_NAMED = 20
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def _integral(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_integral)]
Salt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ForebayOptions(_Body):
    """`explain` asks for the `forebay` object in the answer; the others override the server's setting of the same name.

    `prefill`: how a prompt is computed. `replay`: how a lost window is rebuilt. `max_lineage`: cached blocks with more bounded replays
    behind them are not used. The object is our own, so a name it does not have is refused, where the body's would be ignored.
    """

    model_config = ConfigDict(extra="forbid")

    explain: bool | None = None
    prefill: PrefillMode | None = None
    replay: ReplayMode | None = None
    max_lineage: Annotated[Int, Field(ge=0, lt=2**31)] | None = None


class ChatRequest(_Body):
    """The fields of POST /v1/chat/completions that are read here; None means absent. What may be megabytes is not kept."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_many)] | None = None
    stop_token_ids: list[Int] | None = None
    allowed_token_ids: Annotated[list[Int], Field(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    user: str | None = None
    user_id: Annotated[str, Field(max_length=512)] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    stream_interval: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    echo: bool | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    priority: Annotated[Int, Field(ge=-100, le=100)] | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None
    rid: Annotated[str, Field(max_length=128)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    forebay: ForebayOptions | None = None


KNOWN = frozenset(ChatRequest.model_fields) | IGNORED | UNSUPPORTED | ENCODED | STRUCTURED


@dataclass(frozen=True)
class ChatCall:
    """A validated request. `body` is what the chat encoding reads, the request without its null fields; the encoder's caller clears it."""

    fields: ChatRequest
    body: dict[str, Any]
    shows_reasoning: bool
    ignored: tuple[str, ...]  # names for the response header
    unknown: tuple[str, ...]  # names that no server knows, for the metrics
    logit_bias: Mapping[int, float]  # the banned words are in it
    echoes: str = ""  # text of the message that the answer continues, if it is to be repeated in front of it
    places: tuple[str, ...] = ()  # where each message stands in the client's own body, if not under `messages`
    default_output: int | None = None  # the protocol's own output limit in tokens of a request that states none

    @property
    def stream(self) -> bool:
        return bool(self.fields.stream)

    @property
    def include_usage(self) -> bool | None:
        """Usage of a stream: True in a chunk of its own at the end, None on the last finish chunk, False not at all."""
        return None if self.fields.stream_options is None else self.fields.stream_options.include_usage

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


def parse_chat(body: dict[str, Any], options: ServerOptions, tokenizer: Tokenizer) -> ChatCall:
    """Validate a request body. Cheap checks of sizes come first, so that a request with too many items costs little.

    Raises RequestError naming the field and the limit.
    """
    body = {name: value for name, value in body.items() if value is not None}
    places: tuple[str, ...] = ()
    if "messages" not in body and "input" in body:
        places = take_input(body, options.max_messages)
    _check_sizes(body, options)
    try:
        fields = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0], ForebayOptions.model_fields) from None
    _refuse_unsupported(body, fields)
    _check_together(fields, options)
    check_token_ids("stop_token_ids", fields.stop_token_ids or (), tokenizer)
    check_token_ids("allowed_token_ids", fields.allowed_token_ids or (), tokenizer)
    bias = _logit_bias(fields.logit_bias or {}, tokenizer) | banned_words(fields.bad_words or (), tokenizer)
    unknown = tuple(name for name in body if name not in KNOWN)
    reasoning = body.get("reasoning")
    hidden = fields.include_reasoning is False or (isinstance(reasoning, dict) and reasoning.get("exclude") is True)
    echoes = _continued_text(body, fields) if fields.echo else ""
    return ChatCall(fields, body, not hidden, _ignored_names(body, fields, unknown), unknown, bias, echoes, places)


def check_token_ids(field: str, ids: Any, tokenizer: Tokenizer) -> None:
    """Refuse ids that the model has no row for, and the image placeholder, which stands for rows that text cannot produce."""
    for i, token_id in enumerate(ids):
        _check_token_id(f"{field}[{i}]", token_id, tokenizer)


def _check_token_id(path: str, token_id: int, tokenizer: Tokenizer) -> None:
    if not 0 <= token_id < tokenizer.vocab_size:
        raise invalid(path, f"expected a token id from 0 to {tokenizer.vocab_size - 1}, got {short(token_id)}")
    if token_id == tokenizer.image_id:
        raise invalid(path, f"token id {token_id} is the placeholder of images")


def banned_words(words: Sequence[str], tokenizer: Tokenizer) -> dict[int, float]:
    """A ban for the token of each word, as it is and after a space. Raises RequestError for a word that takes several tokens."""
    bans: dict[int, float] = {}
    for i, word in enumerate(words):
        for text in dict.fromkeys((word, f" {word.lstrip()}")):
            ids = tokenizer.encode(text)
            if len(ids) != 1:
                rule = f"only words of one token can be banned, and {short(text)} takes {len(ids)}; 'stop' ends the answer at any text"
                raise bad(f"bad_words[{i}]", f"Invalid 'bad_words[{i}]': {rule}.", "unsupported_value")
            bans[ids[0]] = -100.0
    return bans


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


def _logit_bias(given: Mapping[str, float], tokenizer: Tokenizer) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid("logit_bias", f"keys are token ids in decimal digits, got {short(key)}")
        _check_token_id(f"logit_bias[{key}]", int(key), tokenizer)
        bias[int(key)] = value
    return bias


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
            raise bad(name, f"Invalid '{name}': expected at most {limit} items, got {len(value)}.", "array_above_max_length")
    for name in ("stop", "bad_words"):
        words = _one_or_many(body.get(name))
        for i, word in enumerate(words if isinstance(words, list) else ()):
            if isinstance(word, str) and len(word) > options.max_stop_length:
                text = f"Invalid '{name}[{i}]': expected at most {options.max_stop_length} characters, got {len(word)}."
                raise bad(f"{name}[{i}]", text, "string_above_max_length")


def _refuse_unsupported(body: dict[str, Any], fields: ChatRequest) -> None:
    for name in sorted(UNSUPPORTED & body.keys()):
        off = body[name] is False or body[name] in ("", [], {})
        if not off and not (name == "best_of" and fields.best_of in (1, fields.n)):
            raise unsupported(name, "the answer would not be what it asks for")
    if "audio" in (fields.modalities or ()):
        raise bad("modalities", "Unsupported value: 'modalities' may only contain \"text\".", "unsupported_value")
    if fields.add_generation_prompt is False and not fields.continue_final_message:
        raise unsupported("add_generation_prompt", "false only makes sense together with 'continue_final_message'")
    response_format = body.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else None
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
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "it requires 'logprobs' to be true")
    asked = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if fields.min_tokens is not None and asked is not None and fields.min_tokens > asked:
        raise invalid("min_tokens", f"expected at most the output limit of {asked} tokens, got {fields.min_tokens}")


def _ignored_names(body: dict[str, Any], fields: ChatRequest, unknown: tuple[str, ...]) -> tuple[str, ...]:
    names = [name for name in body if name in IGNORED]
    names += [name for name, other in _OVERRULED.items() if name in body and other in body]
    if fields.stream_options is not None:
        if not fields.stream:  # clients that toggle `stream` alone
            names.append("stream_options")
        elif fields.stream_options.include_obfuscation:
            names.append("stream_options.include_obfuscation")
    if not fields.stream:
        names += [name for name in ("stream_interval", "stream_reasoning") if name in body]
    for name, read in _READ_INSIDE.items():
        if isinstance(body.get(name), dict):
            names += [f"{name}.{inner}" for inner in body[name] if inner not in read and is_name(inner)]
    # An unknown name is the client's own text: only what is safe in a header and useful to a reader.
    names += [name for name in unknown if is_name(name)]
    more = len(names) - MAX_NAMED
    return (*names[:MAX_NAMED], f"{more} more") if more > 0 else tuple(names)


def is_name(name: str) -> bool:
    """Whether the client's own text may stand in a response header."""
    return 0 < len(name) <= 64 and _NAME_CHARACTERS.issuperset(name)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
