"""Output items of a Responses answer and the events that each of them makes (spec/http-api.md §7.4).

Events are bytes without their end, where the writer puts the sequence number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from forebay.model.chat import Delta
from forebay.server.body import to_json
from forebay.server.logprobs import Entry
from forebay.server.messages_blocks import seal
from forebay.server.responses_tools import ToolName

Events = list[bytes]


class Item(Protocol):
    """An output item under way."""

    def takes(self, delta: Delta) -> bool:
        """Whether `delta` goes on with this item."""

    def begin(self) -> Events: ...

    def add(self, text: str, entries: Sequence[Entry]) -> Events: ...

    def end(self, *, completed: bool, calls_follow: bool) -> tuple[Events, dict[str, Any]]:
        """The events that end the item, and the item."""

    def whole(self, status: str) -> dict[str, Any]:
        """The item as far as it is known."""


class _Events:
    """Events of one item: what they repeat is encoded once."""

    def __init__(self, index: int, item_id: str) -> None:
        self._index = index
        self._place = b'"item_id":%b,"output_index":%d' % (orjson.dumps(item_id), index)

    def item(self, kind: bytes, item: dict[str, Any]) -> bytes:
        return b'%b"output_index":%d,"item":%b' % (_named(b"output_item." + kind), self._index, to_json(item))

    def head(self, kind: bytes, place: bytes = b"") -> bytes:
        """The start of an event, up to its own fields."""
        return _named(kind) + self._place + place + b","

    def event(self, kind: bytes, fields: dict[str, Any], place: bytes = b"") -> bytes:
        return self.head(kind, place) + orjson.dumps(fields)[1:-1]


_CONTENT, _SUMMARY = b',"content_index":0', b',"summary_index":0'


def _named(kind: bytes) -> bytes:
    return b'event: response.%b\ndata: {"type":"response.%b",' % (kind, kind)


class ReasoningItem:
    """The model's reasoning; with `summary` it is sent a second time as its own summary, which is what Codex shows.

    With `sealed` it has a token too, for clients that send nothing else of it back: without it the next prompt would not extend this one.
    """

    def __init__(self, index: int, item_id: str, *, summary: bool, sealed: bool) -> None:
        self._events = _Events(index, item_id)
        self._id, self._summary, self._sealed = item_id, summary, sealed
        self._texts: list[str] = []
        self._delta = self._events.head(b"reasoning_text.delta", _CONTENT)
        self._summary_delta = self._events.head(b"reasoning_summary_text.delta", _SUMMARY)

    def takes(self, delta: Delta) -> bool:
        return delta.channel == "reasoning"

    def begin(self) -> Events:
        events = [
            self._events.item(b"added", {**self._fields("in_progress"), "summary": [], "content": []}),
            self._events.event(b"content_part.added", {"part": {"type": "reasoning_text", "text": ""}}, _CONTENT),
        ]
        if self._summary:
            events.append(self._events.event(b"reasoning_summary_part.added", {"part": {"type": "summary_text", "text": ""}}, _SUMMARY))
        return events

    def add(self, text: str, entries: Sequence[Entry]) -> Events:
        self._texts.append(text)
        delta = b'"delta":' + orjson.dumps(text)
        return [self._delta + delta, self._summary_delta + delta] if self._summary else [self._delta + delta]

    def end(self, *, completed: bool, calls_follow: bool) -> tuple[Events, dict[str, Any]]:
        item = self.whole("completed" if completed else "incomplete")
        part = item["content"][0]
        events = [
            self._events.event(b"reasoning_text.done", {"text": part["text"]}, _CONTENT),
            self._events.event(b"content_part.done", {"part": part}, _CONTENT),
        ]
        for summary in item["summary"]:
            events.append(self._events.event(b"reasoning_summary_text.done", {"text": summary["text"]}, _SUMMARY))
            events.append(self._events.event(b"reasoning_summary_part.done", {"part": summary}, _SUMMARY))
        return [*events, self._events.item(b"done", item)], item

    def whole(self, status: str) -> dict[str, Any]:
        text = "".join(self._texts)
        summary = [{"type": "summary_text", "text": text}] if self._summary else []
        item = {**self._fields(status), "summary": summary, "content": [{"type": "reasoning_text", "text": text}]}
        return {**item, "encrypted_content": seal(text)} if self._sealed else item

    def _fields(self, status: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": self._id, "status": status}


class MessageItem:
    """Text for the user: the final answer, or a commentary when calls follow."""

    def __init__(self, index: int, item_id: str) -> None:
        self._events = _Events(index, item_id)
        self._id = item_id
        self._texts: list[str] = []
        self._logprobs: list[Entry] = []
        self._delta = self._events.head(b"output_text.delta", _CONTENT)

    def takes(self, delta: Delta) -> bool:
        return delta.channel == "content"

    def begin(self) -> Events:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._events.item(b"added", {**self._fields("in_progress", "final_answer"), "content": []}),
            self._events.event(b"content_part.added", {"part": part}, _CONTENT),
        ]

    def add(self, text: str, entries: Sequence[Entry]) -> Events:
        self._texts.append(text)
        if entries:
            self._logprobs += entries
        return [b'%b"logprobs":%b,"delta":%b' % (self._delta, orjson.dumps(entries) if entries else b"[]", orjson.dumps(text))]

    def end(self, *, completed: bool, calls_follow: bool) -> tuple[Events, dict[str, Any]]:
        item = self.whole("completed" if completed else "incomplete", "commentary" if calls_follow else "final_answer")
        part = item["content"][0]
        return [
            self._events.event(b"output_text.done", {"text": part["text"], "logprobs": part["logprobs"]}, _CONTENT),
            self._events.event(b"content_part.done", {"part": part}, _CONTENT),
            self._events.item(b"done", item),
        ], item

    def whole(self, status: str, phase: str = "final_answer") -> dict[str, Any]:
        part = {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": self._logprobs}
        return {**self._fields(status, phase), "content": [part]}

    def _fields(self, status: str, phase: str) -> dict[str, Any]:
        return {"type": "message", "id": self._id, "role": "assistant", "status": status, "phase": phase}


class CallItem:
    """A call of a function. One that was cut off, so that its arguments are not a JSON object, is `incomplete`."""

    def __init__(self, index: int, item_id: str, call_id: str, tool: ToolName) -> None:
        self._events = _Events(index, item_id)
        self._id, self._call_id, self._tool = item_id, call_id, tool
        self._arguments: list[str] = []
        self._delta = self._events.head(b"function_call_arguments.delta")

    def takes(self, delta: Delta) -> bool:
        return delta.channel == "tool_calls" and delta.name is None

    def begin(self) -> Events:
        return [self._events.item(b"added", self.whole("in_progress"))]

    def add(self, text: str, entries: Sequence[Entry]) -> Events:
        if not text:
            return []
        self._arguments.append(text)
        return [b'%b"delta":%b' % (self._delta, orjson.dumps(text))]

    def end(self, *, completed: bool, calls_follow: bool) -> tuple[Events, dict[str, Any]]:
        item = self.whole("completed" if isinstance(_json("".join(self._arguments)), dict) else "incomplete")
        done = {"name": item["name"], "arguments": item["arguments"]}
        return [self._events.event(b"function_call_arguments.done", done), self._events.item(b"done", item)], item

    def whole(self, status: str) -> dict[str, Any]:
        item = {"type": "function_call", "id": self._id, "call_id": self._call_id, "name": self._tool.name}
        item |= {"arguments": "".join(self._arguments), "status": status}
        return item if self._tool.namespace is None else {**item, "namespace": self._tool.namespace}


class CustomCallItem:
    """A call of a custom tool: the string `input` of its arguments is the item's free text."""

    def __init__(self, index: int, item_id: str, call_id: str, tool: ToolName) -> None:
        self._events = _Events(index, item_id)
        self._id, self._call_id, self._tool = item_id, call_id, tool
        self._input = InputText()
        self._delta = self._events.head(b"custom_tool_call_input.delta")

    def takes(self, delta: Delta) -> bool:
        return delta.channel == "tool_calls" and delta.name is None

    def begin(self) -> Events:
        return [self._events.item(b"added", self.whole("in_progress"))]

    def add(self, text: str, entries: Sequence[Entry]) -> Events:
        return self._deltas(self._input.push(text))

    def _deltas(self, text: str) -> Events:
        return [b'%b"delta":%b' % (self._delta, orjson.dumps(text))] if text else []

    def end(self, *, completed: bool, calls_follow: bool) -> tuple[Events, dict[str, Any]]:
        events = self._deltas(self._input.finish())
        item = self.whole("completed" if self._input.complete else "incomplete")
        events.append(self._events.event(b"custom_tool_call_input.done", {"input": item["input"]}))
        return [*events, self._events.item(b"done", item)], item

    def whole(self, status: str) -> dict[str, Any]:
        item = {"type": "custom_tool_call", "id": self._id, "call_id": self._call_id, "name": self._tool.name}
        item |= {"input": self._input.text, "status": status}
        return item if self._tool.namespace is None else {**item, "namespace": self._tool.namespace}


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PIECE = re.compile(r'[^"\\]+|\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^u])')

_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")


class InputText:
    """Reads the string `input` out of the JSON object `{"input": "…"}` while it arrives.

    Arguments of another shape, which a model may write all the same, are kept until their end: `input` is then the value as JSON, or the
    whole of the arguments, so that nothing is lost.

    Attributes:
        complete: the arguments were a JSON object when they ended.
    """

    def __init__(self) -> None:
        self._all: list[str] = []
        self._texts: list[str] = []
        self._rest = ""  # not yet understood: what precedes the string, or half an escape
        self._inside = False
        self._ended = False
        self.complete = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._texts)

    def push(self, fragment: str) -> str:
        """The text that a piece of the arguments adds."""
        self._all.append(fragment)
        if self._ended:
            return ""
        self._rest += fragment
        if not self._inside:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._rest, self._inside = self._rest[opening.end() :], True
        return self._give(self._read())

    def finish(self) -> str:
        """The text that is left when the arguments have ended."""
        arguments = "".join(self._all)
        value = _json(arguments)
        self.complete = isinstance(value, dict)
        if self._inside:
            return ""
        if isinstance(value, dict) and "input" in value:
            given = value["input"]
            return self._give(given if isinstance(given, str) else to_json(given).decode())
        return self._give(arguments)

    def _read(self) -> str:
        texts: list[str] = []
        end = 0
        while (piece := _PIECE.match(self._rest, end)) is not None:
            if _HALF.fullmatch(piece[0]) and len(self._rest) < end + 12 and "\\u".startswith(self._rest[end + 6 : end + 8]):
                break  # the second half of a pair may follow
            texts.append(_unescaped(piece[0]))
            end = piece.end()
        self._ended = self._rest.startswith('"', end)
        self._rest = "" if self._ended else self._rest[end:]
        return "".join(texts)

    def _give(self, text: str) -> str:
        if text:
            self._texts.append(text)
        return text


def _unescaped(piece: str) -> str:
    if not piece.startswith("\\"):
        return piece
    value = _json(f'"{piece}"')
    return value if isinstance(value, str) else "\ufffd"  # half a pair of surrogates, or no escape that JSON knows


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
