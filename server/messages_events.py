"""The events of a Messages answer. A whole answer is what its events add up to, so the two cannot differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic_core import from_json

from forebay.engine.types import OutputEvent, Usage
from forebay.model.chat import Delta
from forebay.server.chunks import Choice, explain
from forebay.server.errors import Failure
from forebay.server.messages_blocks import seal
from forebay.server.turns import Job

Event = dict[str, Any]

_PING: Event = {"type": "ping"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KINDS = {"reasoning": "thinking", "content": "text", "tool_calls": "tool_use"}


def encode(events: Sequence[Event]) -> bytes:
    """The events as they are on the wire."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events])


PING = encode([_PING])


def failing(failure: Failure, request_id: str) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"event: error\ndata: %b\n\n" % failure.body("anthropic", request_id)


class MessageWriter:
    """Turns what the engine says about one request into the protocol's events.

    Attributes:
        choice: what the answer is made of; `choice.last` is the last event of the engine.
    """

    def __init__(self, job: Job, *, model: str, context: int, shows_thinking: bool) -> None:
        """`model`: the name to report. `context`: tokens that prompt and output have together."""
        self.choice = Choice(0)
        self._job = job
        self._id = f"msg_{job.id}"
        self._model = model
        self._context = context
        self._shows_thinking = shows_thinking
        self._started = False
        self._index = -1  # of the newest block
        self._open: tuple[str, int] | None = None  # channel of the open block, number of its call
        self._arguments: list[str] = []  # of the newest call
        self._hidden: list[str] = []  # reasoning that is not shown

    def start(self, cached: int = 0) -> list[Event]:
        """What precedes the first block; nothing the second time. `cached`: prompt tokens that were not computed, as far as is known."""
        if self._started:
            return []
        self._started = True
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(len(self._job.prompt.token_ids), 0, 0, cached)) | {"service_tier": "standard"},
        }
        return [{"type": "message_start", "message": message}, _PING]

    def beat(self) -> bytes:
        """What breaks a silence: the start, if the engine has not said anything yet, and a ping."""
        return encode(self.start() or [_PING])

    def read(self, event: OutputEvent) -> list[Event]:
        """The events that one event of the engine becomes."""
        events = [] if self._started else self.start(event.tiers.cached if event.tiers is not None else 0)
        for delta, _ in self.choice.read(event):
            self._write(delta, events)
        if event.finish_reason is not None:
            self._end(event, events)
        return events

    def _write(self, delta: Delta, events: list[Event]) -> None:
        call = delta.index if delta.channel == "tool_calls" else 0
        if self._open != (delta.channel, call):
            self._close(events)
            self._begin(delta, events)
            self._open = (delta.channel, call)
        if delta.channel == "content":
            piece = {"type": "text_delta", "text": delta.text}
        elif delta.channel == "tool_calls":
            self._arguments.append(delta.text)
            piece = {"type": "input_json_delta", "partial_json": delta.text}
        else:
            piece = {"type": "thinking_delta", "thinking": delta.text}
            if not self._shows_thinking:
                self._hidden.append(delta.text)
                return
        if delta.text:
            events.append({"type": "content_block_delta", "index": self._index, "delta": piece})

    def _begin(self, delta: Delta, events: list[Event]) -> None:
        self._index += 1
        kind = _KINDS[delta.channel]
        block: dict[str, Any] = {"type": kind}
        if kind == "thinking":
            block |= {"thinking": "", "signature": ""}
        elif kind == "text":
            block["text"] = ""
        else:
            self._arguments = []
            block |= {"id": f"toolu_{(delta.call_id or '').removeprefix('call_')}", "name": delta.name, "input": {}}
        events.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self, events: list[Event]) -> None:
        if self._open is None:
            return
        if self._open[0] == "reasoning":  # clients drop or refuse a thinking block without a signature
            signature = {"type": "signature_delta", "signature": self._id if self._shows_thinking else seal("".join(self._hidden))}
            events.append({"type": "content_block_delta", "index": self._index, "delta": signature})
        events.append({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _end(self, event: OutputEvent, events: list[Event]) -> None:
        if self._index < 0:
            self._begin(Delta("content"), events)
            self._open = ("content", 0)
        self._close(events)
        reason, sequence = self._stop_reason(event)
        end: Event = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}}
        assert event.usage is not None
        end["usage"] = _usage(event.usage)
        if self._job.call.explain:
            end["forebay"] = explain(self._job.prompt, [self.choice])
        events += [end, {"type": "message_stop"}]

    def _stop_reason(self, event: OutputEvent) -> tuple[str, str | None]:
        if event.finish_reason == "stop" and isinstance(event.matched_stop, str):
            return "stop_sequence", event.matched_stop
        if event.finish_reason == "length" and event.usage is not None:
            # The limit that counted was the context's if the output was cut to what is left of it.
            asked, limit = self._job.call.asked_output, self._job.requests[0].params.max_tokens
            full = event.usage.prompt_tokens + event.usage.completion_tokens >= self._context
            if full and (asked is None or limit is None or asked > limit):
                return "model_context_window_exceeded", None
        if event.finish_reason == "tool_calls" and not _complete("".join(self._arguments)):
            # The model ended its turn inside a call. This is the reason after which clients know that a last call may be cut off.
            return "max_tokens", None
        return _STOP_REASONS[event.finish_reason or "stop"], None


@dataclass
class Message:
    """The message that events add up to."""

    body: dict[str, Any] = field(default_factory=dict)
    _pieces: dict[int, list[str]] = field(default_factory=dict)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            kind = event["type"]
            if kind == "message_start":
                self.body = {**event["message"], "content": []}
            elif kind == "content_block_start":
                self.body["content"].append(dict(event["content_block"]))
            elif kind == "content_block_delta":
                self._delta(event["index"], event["delta"])
            elif kind == "content_block_stop":
                self._stop(event["index"])
            elif kind == "message_delta":
                self.body |= event["delta"]
                self.body["usage"] = {**self.body["usage"], **event["usage"]}
                if "forebay" in event:
                    self.body["forebay"] = event["forebay"]

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        if delta["type"] == "signature_delta":
            self.body["content"][index]["signature"] = delta["signature"]
        else:
            piece = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            self._pieces.setdefault(index, []).append(piece)

    def _stop(self, index: int) -> None:
        block, text = self.body["content"][index], "".join(self._pieces.pop(index, ()))
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _complete(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _input(text: str) -> Any:
    """The arguments of a call as they stand in a whole answer: as the model wrote them, or what is there of a call that was cut off."""
    if _complete(text):
        return orjson.Fragment(text)  # spelled as written: `1.0` stays `1.0`, and integers may be of any size
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)  # as the official client reads a part
        return orjson.Fragment(json.dumps(value, ensure_ascii=False)) if isinstance(value, dict) else {}
    except ValueError:
        return {}
