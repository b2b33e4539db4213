"""The shapes of an answer: chunks of a stream as bytes, the whole message, usage, and where the prompt came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from forebay.engine.types import OutputEvent, TierCounts, Times, Usage
from forebay.model.chat import Delta, EncodedPrompt
from forebay.server.limits import ReasoningField
from forebay.server.logprobs import Entry, LogprobFeed

LogprobsByChannel = dict[str, list[Entry]]
REASONING_NAMES: dict[ReasoningField, tuple[str, ...]] = {
    "reasoning_content": ("reasoning_content",), "reasoning": ("reasoning",), "both": ("reasoning_content", "reasoning"),
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}


@dataclass
class Choice:
    """What is known of one choice so far. Both the streamed and the whole answer are made from it, so they cannot differ.

    Attributes:
        opening: content that comes before everything the model says.
        wraps_reasoning: reasoning is content between `<think>` and `</think>`.
        sampled: tokens so far.
    """

    index: int
    feed: LogprobFeed | None = None
    shows_reasoning: bool = True
    opening: str = ""
    wraps_reasoning: bool = False
    sampled: int = 0
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[Delta, list[str]]] = field(default_factory=list)  # the delta that opened a call, pieces of its arguments
    logprobs: LogprobsByChannel = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    last: OutputEvent | None = None
    _inside: bool = False  # of wrapped reasoning

    def read(self, event: OutputEvent) -> list[tuple[Delta, list[Entry]]]:
        """The visible deltas of one event with their log-probability entries; neighbours on one channel are joined."""
        if self.feed is not None:
            self.feed.push(event.token_ids, event.logprobs)
        self.sampled += len(event.token_ids)
        visible: list[tuple[Delta, list[Entry]]] = []
        if self.opening:
            visible.append((Delta("content", self.opening), []))
            self.opening = ""
        for delta in _joined(event.deltas):
            entries = self.feed.take(delta) if self.feed is not None else []
            if delta.channel != "reasoning":
                self._close(visible)
            elif self.wraps_reasoning and self.shows_reasoning:
                delta = Delta("content", delta.text if self._inside else f"<think>{delta.text}")
                self._inside = True
            if delta.channel != "reasoning" or self.shows_reasoning:
                visible.append((delta, entries))
        if event.finish_reason is not None:
            self.last = event
            self._close(visible)
        return visible

    def _close(self, visible: list[tuple[Delta, list[Entry]]]) -> None:
        """End wrapped reasoning."""
        if self._inside:
            self._inside = False
            visible.append((Delta("content", "</think>"), []))

    def keep(self, event: OutputEvent) -> None:
        """Add one event to the whole answer."""
        self.token_ids += event.token_ids
        for delta, entries in self.read(event):
            if delta.channel == "content":
                self.content.append(delta.text)
            elif delta.channel == "reasoning":
                self.reasoning.append(delta.text)
            elif delta.name is not None:
                self.calls.append((delta, [delta.text]))
            else:
                self.calls[delta.index][1].append(delta.text)
            if entries:
                self.logprobs.setdefault(_logprob_key(delta), []).extend(entries)

    def message(self, *, thinking: bool, reasoning_names: Sequence[str] = ("reasoning_content",)) -> dict[str, Any]:
        """The assistant message. `content` is null only next to calls; `tool_calls` is absent when there are none."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self.calls else None, "refusal": None}
        if thinking and self.shows_reasoning and not self.wraps_reasoning:
            message |= dict.fromkeys(reasoning_names, "".join(self.reasoning))
        if self.calls:
            message["tool_calls"] = [_call(opened, "".join(arguments)) for opened, arguments in self.calls]
        return message

    def whole(
        self, *, thinking: bool, with_token_ids: bool, reasoning_names: Sequence[str] = ("reasoning_content",)
    ) -> dict[str, Any]:
        """The entry of `choices` in a whole answer; call it after the last event."""
        assert self.last is not None
        logprobs = None if self.feed is None else {"content": [], "refusal": None, **self.logprobs}
        message = self.message(thinking=thinking, reasoning_names=reasoning_names)
        choice = {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.last.finish_reason}
        if self.last.matched_stop is not None:
            choice["stop_reason"] = self.last.matched_stop
        if with_token_ids:
            choice["token_ids"] = self.token_ids
        return choice


class ChunkWriter:
    """Encodes the chunks of one stream. What repeats is encoded once.

    Args:
        choices: all choices of the answer, which `event` fills.
        include_usage: the usage comes in the caller's `tail`, and is null until then; without it there is none.
        running_usage: every chunk tells the tokens so far.
        with_token_ids: chunks carry the ids they were made from, the first one those of the prompt.
    """

    def __init__(
        self,
        head: Head,
        prompt: EncodedPrompt,
        choices: Sequence[Choice],
        *,
        include_usage: bool = False,
        running_usage: bool = False,
        with_token_ids: bool = False,
        reasoning_names: Sequence[str] = ("reasoning_content",),
    ) -> None:
        fields = head.fields("chat.completion.chunk")
        self._start = b"data: " + orjson.dumps(fields)[:-1]
        self._prompt, self._choices = prompt, choices
        self._running_usage = running_usage
        self._null = b',"usage":null' if include_usage else b""
        self._with_token_ids = with_token_ids
        self._reasoning = b",".join(b'"%b":%%b' % name.encode() for name in reasoning_names)
        self._copies = len(reasoning_names)
        self._started: set[int] = set()

    def event(self, choice: Choice, event: OutputEvent) -> bytes:
        """All chunks that one event of one choice becomes; the first of a choice is preceded by its role."""
        extra = b',"token_ids":' + orjson.dumps(event.token_ids) if self._with_token_ids and event.token_ids else b""
        deltas = choice.read(event)
        tail = self._null if not self._running_usage else b',"usage":' + orjson.dumps(self._so_far())
        parts: list[bytes] = []
        if choice.index not in self._started:
            first = b""
            if self._with_token_ids and not self._started:
                first = b',"prompt_token_ids":' + orjson.dumps(list(self._prompt.token_ids))
            self._started.add(choice.index)
            parts.append(self._chunk(choice, b'{"role":"assistant","content":""}', b"null", b"null" + extra, tail + first))
            extra = b""
        for delta, entries in deltas:
            logprobs = orjson.dumps({_logprob_key(delta): entries}) if entries else b"null"
            parts.append(self._chunk(choice, self._delta(delta), logprobs, b"null" + extra, tail))
            extra = b""
        if event.finish_reason is not None:
            finish = orjson.dumps(event.finish_reason)
            if event.matched_stop is not None:
                finish += b',"stop_reason":' + orjson.dumps(event.matched_stop)
            parts.append(self._chunk(choice, b'{"content":""}', b"null", finish + extra, tail))
        elif extra:
            parts.append(self._chunk(choice, b"{}", b"null", b"null" + extra, tail))
        return b"".join(parts)

    def tail(self, fields: dict[str, Any]) -> bytes:
        """A chunk without choices that carries `fields`, such as the usage."""
        return self._start + b',"choices":[],' + orjson.dumps(fields)[1:] + b"\n\n"

    def _chunk(self, choice: Choice, delta: bytes, logprobs: bytes, finish: bytes, tail: bytes) -> bytes:
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._start, choice.index, delta, logprobs, finish, tail
        )  # fmt: skip

    def _so_far(self) -> dict[str, int]:
        """Tokens of all choices so far. What of the prompt was cached is told at the end."""
        prompt, completion = len(self._prompt.token_ids), sum(choice.sampled for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _delta(self, delta: Delta) -> bytes:
        if delta.channel == "content":
            return b'{"content":%b}' % orjson.dumps(delta.text)
        if delta.channel == "reasoning":
            return b"{%b}" % (self._reasoning % ((orjson.dumps(delta.text),) * self._copies))
        if delta.name is not None:
            return orjson.dumps({"tool_calls": [_call(delta, delta.text)]})
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (delta.index, orjson.dumps(delta.text))


def usage(prompt: EncodedPrompt, choices: Sequence[Choice], *, predicted: bool = False) -> dict[str, Any]:
    """Usage of a request: the prompt once, outputs summed over the choices. Cached tokens are the choice's that computed it.

    With `predicted` it says that nothing of the client's `prediction` was used.
    """
    parts = [choice.last.usage for choice in choices if choice.last is not None and choice.last.usage is not None]
    first = min(parts, key=lambda part: part.cached_tokens) if parts else Usage(len(prompt.token_ids), 0, 0, 0)
    completion = sum(part.completion_tokens for part in parts)
    details = {"reasoning_tokens": sum(part.reasoning_tokens for part in parts)}
    if predicted:
        details |= {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": details,
        "prompt_cache_hit_tokens": first.cached_tokens,
        "prompt_cache_miss_tokens": first.prompt_tokens - first.cached_tokens,
    }


def explain(prompt: EncodedPrompt, choices: Sequence[Choice]) -> dict[str, Any]:
    """The `forebay` object: effort, where the prompt came from and how long it took, of each choice.

    What is at top level is that of the choice that computed the prompt. `tiers` sum to the prompt's tokens; `window` is where the
    window before the resume point came from, `replayed` how many tokens were computed again for it, `lineage` the bounded replays
    behind the KV in use, `restore_s` the seconds until blocks from the SSD store were in.
    """
    told = [_told(choice.last) for choice in choices if choice.last is not None]
    payer = min(told, key=lambda choice: choice["tiers"]["hbm"] + choice["tiers"]["ssd"]) if told else {}
    answer = {"thinking": prompt.thinking, "effort": prompt.effort, **payer}
    return {**answer, "choices": told} if len(told) > 1 else answer


def _told(event: OutputEvent) -> dict[str, Any]:
    tiers = event.tiers or TierCounts()
    times = event.times or Times(0.0)
    return {
        "tiers": {"hbm": tiers.hbm, "ssd": tiers.ssd, "compute": tiers.compute},
        "window": tiers.window,
        "replayed": tiers.replayed,
        "lineage": tiers.lineage,
        "restore_s": round(tiers.restore_s, 6),
        "queue_s": _since(times.arrived, times.scheduled),
        "ttft_s": _since(times.arrived, times.first_token),
        "total_s": _since(times.arrived, times.finished),
        "preemptions": event.preemptions,
    }


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)


def _logprob_key(delta: Delta) -> str:
    return "content" if delta.channel == "content" else "reasoning_content"


def _call(opened: Delta, arguments: str) -> dict[str, Any]:
    return {"index": opened.index, "id": opened.call_id, "type": "function", "function": {"name": opened.name, "arguments": arguments}}


def _joined(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """Neighbouring pieces of the same text as one; the first delta of a call stays on its own. Empty pieces are dropped."""
    if len(deltas) == 1 and (deltas[0].text or deltas[0].name is not None):
        return deltas
    joined: list[Delta] = []
    for delta in deltas:
        if not delta.text and delta.name is None:
            continue
        last = joined[-1] if joined else None
        if last is not None and last.channel == delta.channel and last.index == delta.index and last.name is None and delta.name is None:
            joined[-1] = Delta(delta.channel, last.text + delta.text, delta.index)
        else:
            joined.append(delta)
    return joined
