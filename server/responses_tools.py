"""Tools of a Responses body: what the model is offered, and what its calls are named for the client (spec/http-api.md §7.3).

Function and custom tools are offered, those inside a namespace under `namespace::name`. Tools that a hosting service would run itself
(web search, code interpreter, …) are left out and named: agents send them with every request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forebay.server.field_errors import array_at, bad, invalid, object_at, short, string_at
from forebay.server.ignored import unread

OFFERED = ("function", "custom")
SEPARATOR = "::"
_READ = frozenset({"type", "name", "description", "parameters", "strict", "format"})


@dataclass(frozen=True)
class ToolName:
    """What a tool of the prompt is for the client."""

    name: str
    namespace: str | None = None
    custom: bool = False  # its input is free text, not JSON


@dataclass
class Tools:
    """The tools of one request.

    Attributes:
        offered: entries for a chat body. echo: the accepted entries as the client sent them.
        names: by the name in the prompt. paths: of chat fields, to the client's own.
        left_out: names for the header: types of tools that are not offered, and fields of the others that are not read.
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    echo: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, tool: dict[str, Any], path: str, namespace: str | None = None) -> bool:
        """Offer one tool, if it is of a kind that is offered."""
        kind = _kind(tool, path)
        if kind not in OFFERED:
            self.left_out.append(f"tools.{kind}")
            return False
        inner = tool.get(kind)
        if isinstance(inner, dict):  # the nested form of chat completions
            tool, path = inner, f"{path}.{kind}"
        self.left_out += unread(tool, "tools[]", _READ | {kind})
        name = string_at(tool.get("name"), f"{path}.name")
        full = name if namespace is None else f"{namespace}{SEPARATOR}{name}"
        described = {key: tool[key] for key in ("description", "parameters", "strict", "format") if tool.get(key) is not None}
        if kind == "custom":
            described["strict"] = True  # the client gets the text `input`, whatever else the arguments might have been
        self.paths[f"tools[{len(self.offered)}]"] = self.paths[f"tools[{len(self.offered)}].{kind}"] = path
        self.offered.append({"type": kind, kind: {**described, "name": full}})
        self.names.setdefault(full, ToolName(name, namespace, kind == "custom"))
        return True


def read_tools(value: Any, limit: int) -> Tools:
    """`tools` of a body. Raises RequestError naming the client's field; names and schemas are checked by the chat encoding."""
    tools = Tools()
    left = limit
    for i, entry in enumerate(array_at([] if value is None else value, "tools", limit)):
        path = f"tools[{i}]"
        tool = object_at(entry, path)
        if tool.get("type") != "namespace":
            if tools.add(tool, path):
                tools.echo.append(_reported(tool))
            continue
        namespace = string_at(tool.get("name"), f"{path}.name")
        inner = array_at(tool.get("tools"), f"{path}.tools", left)
        left -= len(inner)
        places = [(object_at(each, f"{path}.tools[{j}]"), f"{path}.tools[{j}]") for j, each in enumerate(inner)]
        offered = [_reported(each) for each, place in places if tools.add(each, place, namespace)]
        tools.echo.append({"description": "", **tool, "tools": offered})
    return tools


def _reported(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the flat form, with the fields that client libraries expect of it."""
    kind = tool.get("type") or "function"
    flat = {**tool, **inner} if isinstance(inner := tool.get(kind), dict) else tool
    flat = {key: value for key, value in flat.items() if key != kind}
    return {"parameters": None, **flat, "type": kind, "strict": bool(flat.get("strict"))} if kind == "function" else {**flat, "type": kind}


def read_choice(value: Any, tools: Tools, sent: bool) -> tuple[Any, bool]:
    """`tool_choice` for a chat body, and whether it named something that is not offered and therefore does not count.

    Args:
        sent: whether the client sent any tool.
    """
    if value is None or isinstance(value, str):
        if value not in (None, "auto", "none", "required", "any"):
            raise invalid("tool_choice", f"expected auto, none, required or an object, got {short(value)}")
        if value in ("required", "any") and sent and not tools.offered:
            text = "Invalid 'tool_choice': it asks for a call, but none of the tools that were sent is one this server offers."
            raise bad("tool_choice", text, "unsupported_value")
        return value, False
    choice = object_at(value, "tool_choice")
    kind = string_at(choice.get("type"), "tool_choice.type")
    if kind in OFFERED:
        return {"type": kind, kind: {"name": _chosen(choice, kind, "tool_choice")}}, False
    if kind != "allowed_tools":
        return "auto", True
    path = "tool_choice"
    if isinstance(choice.get("allowed_tools"), dict):
        choice, path = choice["allowed_tools"], "tool_choice.allowed_tools"
    entries = [object_at(entry, f"{path}.tools[{i}]") for i, entry in enumerate(array_at(choice.get("tools"), f"{path}.tools"))]
    allowed = [(i, entry) for i, entry in enumerate(entries) if _kind(entry, f"{path}.tools[{i}]") in OFFERED]
    left_out = len(allowed) < len(entries)
    if not allowed and choice.get("mode", "auto") == "auto":
        return "none", left_out  # nothing that is offered may be called
    names = [{"type": "function", "name": _chosen(entry, _kind(entry, path), f"{path}.tools[{i}]")} for i, entry in allowed]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": names}}, left_out


def _chosen(entry: dict[str, Any], kind: str, path: str) -> str:
    inner = entry.get(kind)
    if isinstance(inner, dict):
        entry, path = inner, f"{path}.{kind}"
    return qualified(entry, path)


def qualified(entry: dict[str, Any], path: str) -> str:
    """The name in the prompt of a tool that `entry` names, with its namespace if it has one."""
    name = string_at(entry.get("name"), f"{path}.name")
    namespace = entry.get("namespace")
    return name if namespace in (None, "") else f"{string_at(namespace, f'{path}.namespace')}{SEPARATOR}{name}"


def _kind(tool: dict[str, Any], path: str) -> str:
    return "function" if tool.get("type") is None else string_at(tool["type"], f"{path}.type")
