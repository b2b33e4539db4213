"""Input items of a Responses body become the messages of a chat body (spec/http-api.md §7.2).

The items of one answer (reasoning, message, calls) become one assistant message again, so that a conversation sent back reads token by
token as it was written. Items of types that mean nothing here are left out and named: new versions of agents add types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.server.field_errors import array_at, bad, empty, missing, object_at, short, string_at, unsupported, wrong_type
from forebay.server.field_paths import FieldPaths
from forebay.server.ignored import unread
from forebay.server.messages_blocks import unsealed
from forebay.server.responses_tools import qualified

_TEXTS = ("input_text", "output_text", "text")
_RESULTS = {f"{kind}_output" for kind in ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")}
# Calls of tools with a shape of their own: the function they are shown as, and the field with its arguments.
_ACTIONS = {
    "local_shell_call": ("local_shell", "action"), "shell_call": ("shell", "action"), "apply_patch_call": ("apply_patch", "operation"),
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass
class _Answer:
    """An assistant message in the making."""

    reasoning: list[str] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    spoke: bool = False  # has a message item, though it may be empty

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.parts or ("" if self.spoke else None)}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class History:
    """The conversation of one request.

    Attributes:
        messages: for a chat body. paths: of chat fields, to the client's own. left_out: types of items that were left out.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}
        self.left_out: list[str] = []
        self._answer: _Answer | None = None

    def add_text(self, role: str, text: str, path: str) -> None:
        """A message that is the whole of a field."""
        self._add(role, text, path, path)

    def read(self, items: Any, limit: int) -> None:
        """All input items, in order. Raises RequestError naming the client's field."""
        entries = array_at(items, "input", limit, "a string or an array of items")
        if not entries:
            raise empty("input")
        for i, entry in enumerate(entries):
            path = f"input[{i}]"
            self._item(object_at(entry, path), path)
        self._close()

    def _item(self, item: dict[str, Any], path: str) -> None:
        kind = item.get("type")
        if kind is None:
            if item.get("role") is None:
                self._refuse_reference(item, path)
            kind = "message"
        kind = string_at(kind, f"{path}.type")
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        elif kind == "function_call":
            function = {"name": qualified(item, path), "arguments": item.get("arguments")}
            self._call(item, {"type": "function", "function": function}, path)
        elif kind == "custom_tool_call":
            custom = {"name": qualified(item, path), "input": item.get("input")}
            self._call(item, {"type": "custom", "custom": custom}, path)
        elif kind in _ACTIONS:
            name, source = _ACTIONS[kind]
            function = {"name": name, "arguments": item.get(source)}
            self._call(item, {"type": "function", "function": function}, path)
            self.paths[f"{self._last_call()}.function.arguments"] = f"{path}.{source}"
        elif kind in _RESULTS:
            self._result(item, kind, path)
        elif kind == "item_reference":
            self._refuse_reference(item, path)
        else:
            self.left_out.append(kind)

    def _refuse_reference(self, item: dict[str, Any], path: str) -> None:
        if item.get("type") == "item_reference" or ("id" in item and set(item) <= {"id", "type"}):
            raise unsupported(path, "responses are not stored, so there is nothing an item_reference could name; send the item itself")
        raise missing(f"{path}.type")

    def _message(self, item: dict[str, Any], path: str) -> None:
        given = item.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            text = f"Invalid value for '{path}.role': expected one of {', '.join(_ROLES)}, got {short(given)}."
            raise bad(f"{path}.role", text, "invalid_value")
        if role != "assistant":
            self._add(role, item.get("content"), f"{path}.content", path)
            return
        answer = self._open(path)
        answer.spoke = True
        content = item.get("content")
        whole = isinstance(content, str)
        parts = [{"type": "text", "text": content}] if whole else [] if content is None else array_at(content, f"{path}.content")
        for i, entry in enumerate(parts):
            where = f"{path}.content" if whole else f"{path}.content[{i}]"
            part = _part(object_at(entry, where))
            if part.get("text") != "":
                self.paths[f"messages[{len(self.messages)}].content[{len(answer.parts)}]"] = where
                answer.parts.append(part)

    def _reasoning(self, item: dict[str, Any], path: str) -> None:
        answer = self._answer
        if answer is not None and answer.spoke and not answer.calls:
            self._close()  # reasoning comes first, so this is the next answer; open calls keep their answer until their results
        texts: list[str] = []
        for source, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
            for i, part in enumerate(array_at(item.get(source) or [], f"{path}.{source}")):
                entry = object_at(part, f"{path}.{source}[{i}]")
                if entry.get("type") in (kind, "text"):
                    texts.append(string_at(entry.get("text"), f"{path}.{source}[{i}].text"))
            if not texts and source == "content" and (thought := unsealed(item.get("encrypted_content"))):
                texts.append(thought)  # all that clients of a server without a store may send back, beside a summary
            if texts:
                break
        if texts:
            self._open(path).reasoning += texts
            self.paths.setdefault(f"messages[{len(self.messages)}].reasoning_content", path)

    def _call(self, item: dict[str, Any], call: dict[str, Any], path: str) -> None:
        self._open(path).calls.append({"id": item.get("call_id") or item.get("id"), **call})
        where = self._last_call()
        self.paths.update({where: path, f"{where}.id": f"{path}.call_id", f"{where}.{call['type']}": path})

    def _last_call(self) -> str:
        assert self._answer is not None
        return f"messages[{len(self.messages)}].tool_calls[{len(self._answer.calls) - 1}]"

    def _result(self, item: dict[str, Any], kind: str, path: str) -> None:
        output = item.get("output")
        if kind not in ("function_call_output", "custom_tool_call_output") and not isinstance(output, str):
            # Shells report arrays of their own, a patch may report nothing but its status.
            output = json.dumps(output if output is not None else {"status": item.get("status")}, ensure_ascii=False)
        self._add("tool", "" if output is None else output, f"{path}.output", path)
        number = len(self.messages) - 1
        self.messages[number]["tool_call_id"] = item.get("call_id") or item.get("id")
        self.paths[f"messages[{number}].tool_call_id"] = f"{path}.call_id"

    def _add(self, role: str, content: Any, content_path: str, path: str) -> None:
        self._close()
        number = len(self.messages)
        self.paths[f"messages[{number}]"], self.paths[f"messages[{number}].content"] = path, content_path
        if isinstance(content, list):
            parts = [_part(object_at(part, f"{content_path}[{i}]")) for i, part in enumerate(content)]
            for i, part in enumerate(parts):
                if part["type"] == "file":
                    self.paths[f"messages[{number}].content[{i}].file"] = f"{content_path}[{i}]"
            content = parts
        elif content is None:
            raise missing(content_path)
        elif not isinstance(content, str):
            raise wrong_type(content_path, "a string or an array of parts", content)
        self.messages.append({"role": role, "content": content})

    def _open(self, path: str) -> _Answer:
        if self._answer is None:
            self._answer = _Answer()
            self.paths[f"messages[{len(self.messages)}]"] = path
        return self._answer

    def _close(self) -> None:
        if self._answer is not None:
            self.messages.append(self._answer.message())
            self._answer = None


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A content part as chat completions spell it; what they do not know either, the chat encoding refuses by its type."""
    kind = part.get("type")
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "input_file":
        return {"type": "file", "file": {name: part[name] for name in ("file_data", "filename", "file_id", "file_url") if name in part}}
    return {**part, "type": kind}


def read_conversation(body: Mapping[str, Any], limit: int) -> History:
    """What `instructions` and `input` of a body say, at most `limit` items. Raises RequestError naming the client's field."""
    history = History()
    if body.get("instructions") is not None:
        history.add_text("system", string_at(body["instructions"], "instructions"), "instructions")
    given = body.get("input")
    if isinstance(given, str):
        history.add_text("user", given, "input")
    else:
        history.read(given, limit)
    return history


def chat_format(style: dict[str, Any]) -> dict[str, Any]:
    """`text.format`, which is flat, as a `response_format`."""
    if style.get("type") != "json_schema" or "json_schema" in style:
        return style
    return {"type": "json_schema", "json_schema": {name: style[name] for name in style if name != "type"}}


FORMAT_PATHS = {"response_format": "text.format", "response_format.json_schema": "text.format"}


def take_input(body: dict[str, Any], limit: int) -> tuple[FieldPaths, list[str]]:
    """Give a chat body `messages` in place of `input`: some agents send what belongs to Responses to chat completions.

    Replaced are `input`, `instructions`, `max_output_tokens` and `text.format`, unless chat's own name is there too. Returns the paths of
    the chat body, and the names of what is left out. Raises RequestError naming the client's field.
    """
    history = read_conversation(body, limit)
    for name in ("input", "instructions"):
        body.pop(name, None)
    body["messages"] = history.messages
    paths = {"messages": "input", **history.paths}
    left_out = [f"input.{kind}" for kind in history.left_out]
    if "max_output_tokens" in body and "max_completion_tokens" not in body:
        body["max_completion_tokens"] = body.pop("max_output_tokens")
        paths["max_completion_tokens"] = "max_output_tokens"
    text = body.get("text")
    if isinstance(text, dict) and isinstance(style := text.get("format"), dict) and "response_format" not in body:
        del body["text"]
        body["response_format"] = chat_format(style)
        paths |= FORMAT_PATHS
        left_out += unread(text, "text", ("format",))
    return FieldPaths(paths), left_out
