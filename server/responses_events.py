"""The answer of a Responses request: its events as bytes, and the response object that ends them (spec/http-api.md §7.4, §7.5).

One writer makes both: the whole answer is byte for byte the response object of the stream's last event.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from forebay.engine.types import OutputEvent
from forebay.model.chat import Delta
from forebay.server.body import to_json
from forebay.server.chunks import Choice
from forebay.server.errors import Failure
from forebay.server.responses_parts import CallItem, CustomCallItem, Item, MessageItem, ReasoningItem
from forebay.server.responses_tools import ToolName


class ResponseWriter:
    """Writes one answer.

    Args:
        suffix: what the ids of the response and its items end with. echo: fields that repeat the request.
        tools: of the client, by their names in the prompt.
        summary: reasoning is also given as its summary. encrypted: reasoning items carry themselves as an opaque token too.
    """

    def __init__(
        self, suffix: str, model: str, echo: Mapping[str, Any], tools: Mapping[str, ToolName], *, summary: bool, encrypted: bool
    ) -> None:
        self._suffix, self._tools, self._summary, self._encrypted = suffix, tools, summary, encrypted
        self._sequence = 0
        self._done: list[dict[str, Any]] = []
        self._open: Item | None = None
        self._head = orjson.dumps({"id": f"resp_{suffix}", "object": "response", "created_at": int(time.time()), "model": model})[:-1]
        self._echo = dict(echo)
        self._tail = b""
        self.settle()
        self.started = False
        self.response = b""  # the whole answer, once it is finished

    def settle(self, **effective: Any) -> None:
        """Report what is in force rather than what was asked for."""
        self._echo |= effective
        fixed = {
            "background": False, "metadata": {}, "previous_response_id": None, "service_tier": "default", "store": False,
            "truncation": "disabled",
        }  # fmt: skip
        self._tail = to_json({**self._echo, **fixed})[1:]

    def start(self) -> bytes:
        """The first events, before any output; nothing when they are out."""
        if self.started:
            return b""
        self.started = True
        return self._lifecycle("created", self._object("in_progress")) + self._lifecycle("in_progress", self._object("in_progress"))

    def beat(self) -> bytes:
        """An event that breaks the silence: Codex's idle timer counts events only."""
        return self.start() or self._lifecycle("in_progress", self._object("in_progress"))

    def event(self, choice: Choice, event: OutputEvent) -> bytes:
        """All events that one step of the engine becomes."""
        parts = [] if self.started else [self.start()]
        for delta, entries in choice.read(event):
            if self._open is None or not self._open.takes(delta):
                if self._open is not None:
                    parts += self._close(completed=True, calls_follow=delta.channel == "tool_calls")
                self._open = self._item(delta)
                parts += self._number(self._open.begin())
            parts += self._number(self._open.add(delta.text, entries))
        return b"".join(parts)

    def finish(self, reason: str | None, usage: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        """The last events; `response` is the whole answer from now on.

        Args:
            usage: as chat completions report it. extra: more fields of the response object.
        """
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason or "")
        parts = [self.start()]
        if self._open is not None:
            parts += self._close(completed=cut is None, calls_follow=False)
        status = "incomplete" if cut else "completed"
        self.response = self._object(status, usage=_usage(usage), incomplete=cut, extra=extra or {})
        parts.append(self._lifecycle(status, self.response))
        return b"".join(parts)

    def failed(self, failure: Failure) -> bytes:
        """The events that end a stream which cannot go on. What was begun is shown, marked as incomplete."""
        start = self.start()
        output = [*self._done, *([] if self._open is None else [self._open.whole("incomplete")])]
        error = {"code": failed_code(failure), "message": _with_delay(failure)}
        return start + self._lifecycle("failed", self._object("failed", output=output, error=error))

    def _item(self, delta: Delta) -> Item:
        index = len(self._done)
        name = f"{self._suffix}_{index}"
        if delta.channel == "reasoning":
            return ReasoningItem(index, f"rs_{name}", summary=self._summary, sealed=self._encrypted)
        if delta.channel == "content":
            return MessageItem(index, f"msg_{name}")
        tool = self._tools.get(delta.name or "") or ToolName(delta.name or "")
        if tool.custom:
            return CustomCallItem(index, f"ctc_{name}", delta.call_id or "", tool)
        return CallItem(index, f"fc_{name}", delta.call_id or "", tool)

    def _close(self, *, completed: bool, calls_follow: bool) -> list[bytes]:
        assert self._open is not None
        item, self._open = self._open, None
        events, whole = item.end(completed=completed, calls_follow=calls_follow)
        self._done.append(whole)
        return self._number(events)

    def _number(self, events: Sequence[bytes]) -> list[bytes]:
        """Give events, which lack their end, the next sequence numbers."""
        first = self._sequence
        self._sequence += len(events)
        return [b'%b,"sequence_number":%d}\n\n' % (event, first + i) for i, event in enumerate(events)]

    def _lifecycle(self, kind: str, response: bytes) -> bytes:
        name = b"response." + kind.encode()
        return self._number([b'event: %b\ndata: {"type":"%b","response":%b' % (name, name, response)])[0]

    def _object(
        self,
        status: str,
        *,
        output: Sequence[dict[str, Any]] | None = None,
        usage: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
        incomplete: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        fields = {
            "status": status,
            "output": self._done if output is None else output,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "usage": usage,
            **(extra or {}),
        }
        return b"%b,%b,%b" % (self._head, orjson.dumps(fields)[1:-1], self._tail)


def failed_code(failure: Failure) -> str:
    """The code of a `response.failed`: it decides whether Codex sends the request again (spec/http-api.md §7.6)."""
    if failure.code == "context_length_exceeded":
        return failure.code
    if failure.code == "rate_limit_exceeded":
        return failure.code
    return "server_error" if failure.status >= 500 or failure.status in (408, 429) else "invalid_prompt"


def _with_delay(failure: Failure) -> str:
    """The message, with the delay before a retry in the words that Codex reads."""
    seconds = next((value.decode() for name, value in failure.headers if name == b"retry-after"), None)
    if seconds is None or "try again in" in failure.message:
        return failure.message
    return f"{failure.message} Please try again in {seconds}s."


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": chat["prompt_tokens"],
        # Nothing is billed for writing the cache, and the clients' types require the field.
        "input_tokens_details": {"cached_tokens": chat["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": chat["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": chat["total_tokens"],
    }
