"""Names inside the lists of a chat-completions body (messages, tools, the tools of a choice) that change nothing.

A history repeats itself, so a name is told once for all items of a list: `messages[].name`. Null and empty texts, arrays and objects say
nothing and are not told; clients send many of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

_MESSAGE = frozenset({"role", "content", "prefix", "task"})  # what is wrong with these is refused
_OF_ROLE = {
    "tool": _MESSAGE | {"tool_call_id"},
    "function": _MESSAGE | {"name"},
    "assistant": _MESSAGE
    | {"tool_calls", "function_call", "refusal", "reasoning_content", "reasoning", "reasoning_details"},
}  # fmt: skip
_TEXT = frozenset({"type", "text"})
_OF_PART = {
    "text": _TEXT, "input_text": _TEXT, "output_text": _TEXT, "refusal": frozenset({"type", "refusal"}),
    "thinking": frozenset({"type", "thinking"}), "file": frozenset({"type", "file"}), "input_file": frozenset({"type", "file_data"}),
}  # fmt: skip
_CALL = frozenset({"id", "type", "index"})  # `index` is our own: clients send back what they got
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})
_CUSTOM = frozenset({"name", "description", "format", "strict"})


def names_in_messages(messages: Any) -> list[str]:
    """Names in messages, their parts and their calls that no prompt shows."""
    return list(dict.fromkeys(_in_messages(messages)))


def names_in_tools(body: Mapping[str, Any]) -> list[str]:
    """Names in `tools`, `functions` and `tool_choice` that change neither the prompt nor what may be called."""
    found = [name for entry in _objects(body.get("tools")) for name in _in_tool(entry)]
    found += [name for entry in _objects(body.get("functions")) for name in _left(entry, "functions[]", _FUNCTION)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        found += _left(choice.get("function"), "tool_choice.function", {"name"})
        found += _left(choice.get("custom"), "tool_choice.custom", {"name"})
        allowed = choice.get("allowed_tools", choice if choice.get("type") == "allowed_tools" else None)
        if isinstance(allowed, dict):
            path = "tool_choice.allowed_tools" if allowed is not choice else "tool_choice"
            found += _left(allowed, path, {"mode", "tools"}) if allowed is not choice else []
            for entry in _objects(allowed.get("tools")):
                found += _left(entry, f"{path}.tools[]", {"type", "name", "function", "custom"})
    return list(dict.fromkeys(found))


def _in_messages(messages: Any) -> Iterator[str]:
    for message in _objects(messages):
        role = message.get("role")
        read = _OF_ROLE.get(role, _MESSAGE) if isinstance(role, str) else _MESSAGE
        yield from _left(message, "messages[]", read)
        content = message.get("content")
        if isinstance(content, list):
            for part in _objects(content):
                if part.keys() != _TEXT:  # there may be hundreds of thousands of these
                    yield from _in_part(part)
        if role == "assistant":
            yield from _in_answer(message)


def _in_part(part: Mapping[str, Any]) -> list[str]:
    kind = part.get("type")
    read = _OF_PART.get(kind) if isinstance(kind, str) else None
    if read is None:
        return []  # images and what is refused
    inner = _left(part.get("file"), "messages[].content[].file", {"file_data"}) if kind == "file" else []
    return _left(part, "messages[].content[]", read) + inner


def _in_answer(message: Mapping[str, Any]) -> Iterator[str]:
    """Of an assistant's message also what gives way to another field."""
    calls = message.get("tool_calls")
    if calls is not None and message.get("function_call"):
        yield "messages[].function_call"
    if message.get("content") is not None and message.get("refusal"):
        yield "messages[].refusal"
    shown = message.get("reasoning_content")
    if shown is not None and message.get("reasoning") not in (None, "", shown):  # a server may have called it by both names
        yield "messages[].reasoning"
    if (shown is not None or message.get("reasoning") is not None) and message.get("reasoning_details"):
        yield "messages[].reasoning_details"
    for call in _objects(calls):
        custom = call.get("type") == "custom"
        if call.get("type") not in (None, "function", "custom"):
            yield "messages[].tool_calls[].type"
        kind, read = ("custom", {"name", "input"}) if custom else ("function", {"name", "arguments"})
        yield from _left(call, "messages[].tool_calls[]", _CALL | {kind})
        yield from _left(call.get(kind), f"messages[].tool_calls[].{kind}", read)
    if calls is None:
        yield from _left(message.get("function_call"), "messages[].function_call", {"name", "arguments"})


def _in_tool(entry: Mapping[str, Any]) -> list[str]:
    if entry.get("type") not in (None, "function", "custom"):
        return []  # refused
    custom = entry.get("type") == "custom"
    kind, read = ("custom", _CUSTOM) if custom else ("function", _FUNCTION)
    nested = kind in entry
    tool, path = (entry[kind], f"tools[].{kind}") if nested else (entry, "tools[]")
    found = _left(entry, "tools[]", {"type", "strict", kind}) if nested else []
    found += _left(tool, path, read if nested else read | {"type"})
    style = tool.get("format") if custom and isinstance(tool, dict) else None
    if not isinstance(style, dict) or style.get("type") not in ("text", "grammar"):
        return found + ([f"{path}.format"] if style else [])
    found += _left(style, f"{path}.format", {"type", "grammar", "definition", "syntax"})
    return found + _left(style.get("grammar"), f"{path}.format.grammar", {"definition", "syntax"})


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else iter(())


def _left(value: Any, path: str, read: Set[str]) -> list[str]:
    """Paths of what an object holds beside the names that are read; none for anything else than an object."""
    if not isinstance(value, dict) or value.keys() <= read:
        return []
    return [f"{path}.{name}" for name, inner in value.items() if name not in read and inner not in (None, "", [], {})]
