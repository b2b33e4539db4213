"""Plain data that moves through the engine: what is asked, what comes back, and where each token came from."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.model.chat import Delta, EncodedPrompt
from forebay.model.errors import ForebayError, RequestError
from forebay.model.image_plan import ImagePlan

if TYPE_CHECKING:
    from forebay.engine.grammar import Grammar

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
PrefillMode = Literal["bounded", "exact"]
ReplayMode = Literal["bounded", "exact"]

MAX_LOGPROBS = 20


class EngineError(ForebayError):
    """The engine failed while it ran a request."""


class UnavailableError(ForebayError):
    """The server cannot take requests now (loading, draining, dead)."""

    status = 503
    kind = "service_unavailable"


class SlowReaderError(ForebayError):
    """Whoever asked does not read the answer."""

    status = 408
    kind = "slow_reader"


class QueueFullError(ForebayError):
    """The waiting queue is at its limit; `retry_after` is in seconds."""

    status = 503
    kind = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after = retry_after


class QueueTimeoutError(ForebayError):
    """A request waited longer for a free place than it may; it can be sent again."""

    status = 503
    kind = "overloaded"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="overloaded")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; OpenAI names where OpenAI has one (spec/http-api.md §3).

    `temperature` 0 is greedy. `top_k` 0 is off. `logprobs` None is off, otherwise the number of alternatives (0..20).
    `max_tokens` None means up to the context limit. `stop` may be one string. `bad_words` are sequences of token ids that may not be
    written in a row.
    Raises RequestError naming the field for a value of another type or out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {rule}, got {getattr(self, name)!r:.200}", param=name)

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            need(is_number(Real, getattr(self, name)), name, "a number")
        for name in ("top_k", "min_tokens", "n"):
            need(is_number(Integral, getattr(self, name)), name, "an integer")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            need(getattr(self, name) is None or is_number(Integral, getattr(self, name)), name, "an integer or None")
        for name in ("include_stop", "ignore_eos"):
            need(isinstance(getattr(self, name), bool), name, "True or False")
        rule = "a mapping of token ids to numbers"
        need(isinstance(self.logit_bias, Mapping), "logit_bias", rule)
        need(all(is_number(Integral, k) and is_number(Real, v) for k, v in self.logit_bias.items()), "logit_bias", rule)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            need(isinstance(value, Sequence | set | frozenset) or (value is None and name == "allowed_token_ids"), name, "a list")
        need(all(isinstance(word, Sequence) and len(word) > 0 for word in self.bad_words), "bad_words", "lists of at least one token id")
        # NaN fails every comparison, so it is refused by each range below.
        need(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        need(0.0 <= self.top_p <= 1.0, "top_p", "between 0 and 1")
        need(self.top_k >= 0, "top_k", "0 (off) or positive")
        need(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        need(0.0 < self.repetition_penalty <= 2.0, "repetition_penalty", "above 0 and at most 2")
        need(all(-100.0 <= v <= 100.0 for v in self.logit_bias.values()), "logit_bias", "values between -100 and 100")
        need(self.max_tokens is None or 1 <= self.max_tokens < 2**31, "max_tokens", "at least 1 and below 2^31")
        need(self.min_tokens >= 0, "min_tokens", "0 or positive")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or 0 <= value <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}")
        need(1 <= self.n <= 128, "n", "between 1 and 128")


def is_number(kind: type, value: object) -> bool:
    """Whether `value` is a number of this kind; True and False are not numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one chosen token and its best alternatives (natural log, best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt, at positions [start, stop) of its ids.

    Attributes:
        plan: how it is cut and how many positions it takes; `canvas` [H, W, 3] uint8 is what the model sees of it.
        digest: 32 bytes, equal only where what the model makes of it is equal (`image_digest`).
    """

    start: int
    stop: int
    plan: ImagePlan
    canvas: NDArray[np.uint8] = field(repr=False, compare=False)
    digest: bytes = field(repr=False)


@dataclass
class Request:
    """One choice to generate. `n` choices are `n` requests that share `prompt_ids`.

    `prefill`, `replay` and `max_lineage` override the engine's. `salt` separates cache tenants. Lower `priority` runs sooner. `prompt` is
    the chat encoding when there is one. Requests with the same `share` are choices of one prompt: those that arrive before the first has
    its first token share its prefill, if they take the same from the cache. `resume_at_most` is for measurements: no more tokens than
    these are taken from the cache. `grammar` is the form of the answer, from the end of its reasoning on. `reasoning_budget` is the most
    tokens of reasoning, which are then ended. `images` are in the order of the prompt.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    images: tuple[PromptImage, ...] = ()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prompt: EncodedPrompt | None = None
    prefill: PrefillMode | None = None
    replay: ReplayMode | None = None
    max_lineage: int | None = None
    salt: str = ""
    priority: int = 0
    share: str | None = None
    resume_at_most: int | None = None
    grammar: Grammar | None = None
    reasoning_budget: int | None = None
    arrived: float = field(default_factory=time.monotonic)


@dataclass
class TierCounts:
    """Where the prompt's global KV came from, in tokens; `hbm`, `ssd` and `compute` sum to the prompt length.

    Attributes:
        window: where the window before the resume point came from: a running sequence, a snapshot or replay; "none" without a resume.
        replayed: tokens below the resume point that were computed again; they write no global KV.
        lineage: bounded replays behind the KV of this sequence, this one's included; 0 means that it equals a cold run. It is 1 too when
            decoder rows kept with a window stand in for computed ones.
        restore_s: seconds from the request's arrival until its blocks were in from the SSD store; 0 when none were needed.
    """

    hbm: int = 0
    ssd: int = 0
    compute: int = 0
    window: Literal["none", "live", "swa", "replay"] = "none"
    replayed: int = 0
    lineage: int = 0
    restore_s: float = 0.0

    @property
    def cached(self) -> int:
        return self.hbm + self.ssd


@dataclass
class Times:
    """Seconds on the monotonic clock; None until it happened."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass
class Usage:
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int


@dataclass
class OutputEvent:
    """What one step added to one request. The last event has `finish_reason`, `usage`, `tiers` and `times`; an event may carry no text.

    `tiers` come with the first token too. `prompt_logprobs` come with the first token of a request that asks for them: one entry per
    prompt token, None for the first.
    """

    request_id: str
    deltas: list[Delta]
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    tiers: TierCounts | None = None
    times: Times | None = None
    preemptions: int = 0
    error: ForebayError | None = None


@dataclass
class Output:
    """A finished generation of `LLM.generate`. What is long is not in its repr, where `usage` counts the tokens."""

    request_id: str
    prompt_ids: list[int] = field(repr=False)
    token_ids: list[int] = field(repr=False)
    text: str
    finish_reason: FinishReason
    usage: Usage
    tiers: TierCounts
    times: Times
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)
    matched_stop: str | int | None = None
    preemptions: int = 0
