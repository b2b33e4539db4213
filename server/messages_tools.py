"""Tools of the Messages protocol as functions of a chat body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.server.field_errors import array_at, bad, boolean_at, wrong_type
from forebay.server.field_paths import FieldPaths
from forebay.server.messages_blocks import Block, LeftOut, text_at


def _schema(required: list[str], **properties: str | dict[str, Any]) -> dict[str, Any]:
    shapes = {name: {"type": shape} if isinstance(shape, str) else shape for name, shape in properties.items()}
    return {"type": "object", "properties": shapes, "required": required}


_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDIT: dict[str, str | dict[str, Any]] = {
    "path": "string", "file_text": "string", "old_str": "string", "new_str": "string", "insert_line": "integer", "insert_text": "string",
    "view_range": _LINES,
}  # fmt: skip

# Tools that the client runs itself and whose arguments the protocol, not the request, defines: kind -> what they do, their schema.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a bash session that stays open between calls. `restart` starts a new session.",
        _schema([], command="string", restart="boolean"),
    ),
    "text_editor": (
        "View, create and edit text files. `view` shows a file (lines `view_range`) or a directory, `create` writes `file_text`, "
        "`str_replace` replaces the only occurrence of `old_str` by `new_str`, `insert` adds `insert_text` after line `insert_line`.",
        _schema(["command", "path"], command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]}, **_EDIT),
    ),
    "memory": (
        "Keep notes in files below /memories that last beyond this conversation. Look there before you begin. The commands are those of a "
        "text editor, with `delete` (of `path`) and `rename` (from `old_path` to `new_path`).",
        _schema(
            ["command"],
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            old_path="string",
            new_path="string",
            **_EDIT,
        ),
    ),
}


_READ = frozenset({"type", "name", "description", "input_schema", "strict"})


def functions(tools: Any, paths: FieldPaths, left_out: LeftOut) -> tuple[list[dict[str, Any]], list[str]]:
    """(functions in the order of the tools, paths of tools that are left out because a server would have to run them).

    Raises RequestError: wrong type, no name.
    """
    found: list[dict[str, Any]] = []
    not_offered: list[str] = []
    for i, tool in enumerate(array_at(tools, "tools")):
        where = f"tools.{i}"
        if not isinstance(tool, Mapping):
            raise wrong_type(where, "an object", tool)
        function = _function(tool, where)
        if function is None:
            not_offered.append(where)
            continue
        left_out.unread(tool, _READ, where)
        chat = f"tools[{len(found)}]"
        paths.put(chat, where)
        paths.put(f"{chat}.function", where)
        paths.put(f"{chat}.function.parameters", f"{where}.input_schema")
        found.append({"type": "function", "function": function})
    return found, not_offered


def _function(tool: Block, where: str) -> dict[str, Any] | None:
    kind = tool.get("type")
    if kind is None or kind == "custom":
        function = {"name": text_at(tool, "name", where), "parameters": tool.get("input_schema")}
        return function | {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    if not isinstance(kind, str):
        raise wrong_type(f"{where}.type", "a string", kind)
    known = _KNOWN.get(kind.rpartition("_")[0])  # bash_20250124
    if known is None:
        return None
    return {"name": text_at(tool, "name", where), "description": known[0], "parameters": known[1]}


def choice(value: Any) -> tuple[Any, bool]:
    """(`tool_choice` of a chat body, whether several calls at once are allowed). Raises RequestError."""
    if not isinstance(value, Mapping):
        raise wrong_type("tool_choice", "an object", value)
    kind = text_at(value, "type", "tool_choice")
    parallel = value.get("disable_parallel_tool_use")
    if parallel is not None:
        boolean_at(parallel, "tool_choice.disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": text_at(value, "name", "tool_choice")}}, not parallel
    modes = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in modes:
        text = f"Invalid value for 'tool_choice.type': expected auto, any, tool or none, got '{kind[:64]}'."
        raise bad("tool_choice.type", text, "invalid_value")
    return modes[kind], not parallel
