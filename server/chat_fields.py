"""The fields of a chat-completions body that are read without the chat encoding: of which types and in which ranges."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from forebay.engine.types import MAX_LOGPROBS, PrefillMode, ReplayMode
from forebay.server.field_errors import Salt


def _integral(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def one_or_many(value: Any) -> Any:
    """A string as the list of it; anything else as it is."""
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_integral)]


class Body(BaseModel):
    """Fields of a JSON body: of exactly the types they state, in ranges they state; what else the body holds is not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """What a stream tells beside the answer. Usage comes only where `include_usage` is true: absent, null and false are the same."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ForebayOptions(Body):
    """`explain` asks for the `forebay` object in the answer; the others override the server's setting of the same name.

    `prefill`: how a prompt is computed. `replay`: how a lost window is rebuilt. `max_lineage`: cached blocks with more bounded replays
    behind them are not used. The object is our own, so a name it does not have is refused, where the body's would be ignored.
    """

    model_config = ConfigDict(extra="forbid")

    explain: bool | None = None
    prefill: PrefillMode | None = None
    replay: ReplayMode | None = None
    max_lineage: Annotated[Int, Field(ge=0, lt=2**31)] | None = None


class ChatRequest(Body):
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
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(one_or_many)] | None = None
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
