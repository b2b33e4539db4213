"""The grammar of a block of tool calls (spec/chat-encoding.md §5 and §14).

Names and markup are always held to the form. Of a tool that is `strict` the arguments are too: required ones are there, no unknown ones,
each in the order of the schema and of its type. Of others the names that are declared keep their kind (text or JSON), in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forebay.engine.grammar import MARKER, GrammarSpec, check_schema, json_rule, literal, pattern_terminal, refused

Begins = Literal["content", "marker", "block"]

MAX_REFS = 32  # references followed one after another

_WRITABLE = re.compile(r'[^"<>\x00-\x1f\x7f]+')  # names that can stand in a tag
_CHARACTER = r'[^"<>\x00-\x1f\x7f]'
_OPEN, _CLOSE = f'"<" {MARKER}', f'"</" {MARKER}'
_RULES = {"text": r"TEXT: /(?s:.*)<\//", "json": f"json: {json_rule({}, strict=False)}"}


@dataclass(frozen=True)
class ToolForm:
    """A tool as far as its calls are concerned. `parameters` is a schema of type object; `param` names its field in errors."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    param: str


def calls_spec(
    tools: Sequence[ToolForm],
    begins: Begins,
    *,
    single: bool,
    otherwise: GrammarSpec | None = None,
    param: str = "tools",
) -> GrammarSpec:
    """A block of calls of some of the tools.

    Args:
        begins: `content`: the block is the whole answer. `block`: the prompt has opened it. `marker`: prose may stand in front of it.
        single: exactly one call.
        otherwise: what the answer may be instead of calls; only with `content`.

    Raises RequestError: a strict tool's schema cannot be enforced.
    """
    rules = _Rules()
    names = [f"{literal(tool.name)} {literal(chr(34) + '>' + chr(10))} {rules.body(i, tool)}" for i, tool in enumerate(tools)]
    lines = [
        f'call: {_OPEN} " invoke name=\\"" ( {" | ".join(names)} ) {_CLOSE} " invoke>\\n"',
        f'block: call{"" if single else "+"} {_CLOSE} " calls>"',
    ]
    head = {"content": f'"\\n\\n<" {MARKER} " calls>\\n" block', "block": "block", "marker": '" calls>\\n" block'}[begins]
    if otherwise is not None:
        first, *more = otherwise.lark.splitlines()
        lines += [first.replace("start:", "other:", 1), *(line.replace("TEXT:", "OTHERTEXT:", 1) for line in more)]
        if more:
            lines[-len(more) - 1] = "other: OTHERTEXT"
        head += " | other"
    lark = "\n".join([f"start: {head}", *lines, *rules.lines])
    return GrammarSpec(lark, "marker" if begins == "marker" else "content", param)


class _Rules:
    """Rules of the arguments, written as they are needed; those of text and of any JSON are shared."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._shared: set[str] = set()

    def body(self, number: int, tool: ToolForm) -> str:
        """Name of the rule for what stands between the tags of a call."""
        name = f"body{number}"
        if tool.strict:
            check_schema(tool.parameters, tool.param)
            self._in_order(name, tool)
        else:
            self._any_order(name, tool)
        return name

    def _shared_rule(self, kind: str) -> str:
        if kind not in self._shared:
            self._shared.add(kind)
            self.lines.append(_RULES[kind])
        return "TEXT" if kind == "text" else "json"

    def _argument(self, name: str, values: Iterable[tuple[bool, str]]) -> str:
        """One parameter and its line break. `name` is a terminal, each value (is it raw text, terminal or rule); text has its own `</`."""
        forms = [
            f'"true\\">" {value} {MARKER}' if raw else f'"false\\">" {value} {_CLOSE}'
            for raw, value in values
        ]
        return f'{_OPEN} " parameter name=\\"" {name} "\\" string=\\"" ( {" | ".join(forms)} ) " parameter>\\n"'

    def _any_order(self, name: str, tool: ToolForm) -> None:
        declared = tool.parameters.get("properties")
        known = {k: v for k, v in declared.items() if _WRITABLE.fullmatch(k)} if isinstance(declared, Mapping) else {}
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for key, schema in known.items():
            texts, other = kinds_of(schema, tool.parameters)
            kinds.setdefault((bool(texts), other), []).append(key)
        options = [
            self._argument(f"( {' | '.join(map(literal, keys))} )", self._generic(text, other)) for (text, other), keys in kinds.items()
        ]
        extra = tool.parameters.get("additionalProperties", True)
        if extra is not False or not known:
            rest = f"/{_CHARACTER}{{1,64}}/"
            if known:
                rest += f" & ~( {' | '.join(map(literal, known))} )"
            self.lines.append(f"OTHER{name.upper()}: {rest}")
            options.append(self._argument(f"OTHER{name.upper()}", self._generic(True, True)))
        self.lines.append(f'{name}: "\\n" | ( {" | ".join(options)} )+')

    def _generic(self, text: bool, other: bool) -> list[tuple[bool, str]]:
        return [(True, self._shared_rule("text"))] * text + [(False, self._shared_rule("json"))] * other

    def _in_order(self, name: str, tool: ToolForm) -> None:
        root, param = tool.parameters, tool.param
        properties, required = root.get("properties") or {}, root.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise refused("needs properties as an object and required as a list of names", param)
        known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description", "$schema",
                 "$id", "$comment", "examples", "default", "x-guidance"}  # fmt: skip
        if unknown := sorted(set(root) - known):
            raise refused(f"uses keywords that cannot be enforced on the arguments of a strict tool: {', '.join(unknown)}", param)
        if missing := [key for key in required if key not in properties]:
            raise refused(f"requires {missing[0]!r}, which is not among its properties", param)
        # at least one of the parameters from number i on, and any of them from number i on
        some: list[str] = []
        parts = list(properties.items())
        for i, (key, schema) in enumerate(parts):
            if not _WRITABLE.fullmatch(key):
                raise refused(f"has a property whose name cannot be written in a call: {key[:40]!r}", param)
            values = self._values(f"{name}_{i}", key, schema, tool)
            self.lines.append(f"{name}_{i}: {self._argument(literal(key), values)}")
            some.append(f"{name}_{i}")
        any_from, some_from = "", '"\\n"'  # an empty call has an empty line
        for i in reversed(range(len(parts))):
            this, needed = some[i], parts[i][0] in required
            last = i == len(parts) - 1
            self.lines.append(f"{name}_any{i}: {this if needed else this + '?'} {any_from}".rstrip())
            skip = "" if needed else f" | {some_from}"
            self.lines.append(f"{name}_some{i}: {this} {any_from}{skip}" if not last else f"{name}_some{i}: {this}{skip}")
            any_from, some_from = f"{name}_any{i}", f"{name}_some{i}"
        self.lines.append(f"{name}: {some_from}")

    def _values(self, name: str, key: str, schema: Any, tool: ToolForm) -> list[tuple[bool, str]]:
        """Forms of a value of a strict tool: raw text where its schema allows strings, JSON where it allows anything else."""
        texts, other = kinds_of(schema, tool.parameters)
        where = f"{tool.param}.properties.{key}"
        values: list[tuple[bool, str]] = []
        if texts:
            terminals = [text_terminal(text, where) for text in texts]
            if None in terminals:
                values.append((True, self._shared_rule("text")))
            else:
                self.lines.append(f'TEXT{name.upper()}: ( {" | ".join(str(t) for t in terminals)} ) "</"')
                values.append((True, f"TEXT{name.upper()}"))
        if other:
            if schema in ({}, True):
                values.append((False, self._shared_rule("json")))
            else:
                local = {k: tool.parameters[k] for k in ("$defs", "definitions") if k in tool.parameters}
                _check_references(schema, where)
                self.lines.append(f"{name}_json: {json_rule({**local, **schema}, strict=True)}")
                values.append((False, f"{name}_json"))
        if not values:
            raise refused("allows no value at all", where)
        return values


def text_terminal(schema: Mapping[str, Any], param: str) -> str | None:
    """A terminal for raw text that a schema of strings allows, None for any text. Formats are remarks, as in JSON Schema itself."""
    if "enum" in schema or "const" in schema:
        texts = [t for t in (schema["enum"] if "enum" in schema else [schema["const"]]) if isinstance(t, str)]
        return " | ".join(literal(text) for text in dict.fromkeys(texts))
    terms = []
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is not None or most is not None:
        for bound in (least, most):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound < 2**20):
                raise refused("needs minLength and maxLength from 0 to 1048575", param)
        terms.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if (pattern := schema.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise refused("needs pattern as a string", param)
        terms.append(pattern_terminal(pattern, param, whole=False))
    return f"( {' & '.join(terms)} )" if terms else None


def kinds_of(schema: Any, root: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], bool]:
    """(schemas of the strings that it allows, whether it allows anything but strings)."""
    texts: list[Mapping[str, Any]] = []
    other = False
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting and len(texts) < 256:
        node, followed = waiting.pop()
        if not isinstance(node, Mapping):
            if node is not False:
                texts.append({})
                other = True
            continue
        if isinstance(node.get("$ref"), str):
            if followed < MAX_REFS:  # one that leads back to itself allows nothing
                target = _resolve(node["$ref"], root)
                waiting.append((target if target is not None else True, followed + 1))
            continue
        if isinstance(node.get("allOf"), list) and all(isinstance(part, Mapping) for part in node["allOf"]):
            merged: dict[str, Any] = {}
            for part in (*node["allOf"], {k: v for k, v in node.items() if k != "allOf"}):
                merged |= part
            if followed < MAX_REFS:
                waiting.append((merged, followed + 1))
            continue
        branches = node.get("anyOf", node.get("oneOf"))
        if isinstance(branches, list) and "type" not in node:
            waiting += [(branch, followed) for branch in branches]
            continue
        values = node["enum"] if isinstance(node.get("enum"), list) else [node["const"]] if "const" in node else None
        if values is not None:
            if any(isinstance(value, str) for value in values):
                texts.append(node)
            other = other or any(not isinstance(value, str) for value in values)
            continue
        kind = node.get("type")
        kinds = {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)} if isinstance(kind, list) else None
        if kinds is None or "string" in kinds:
            texts.append(node)
        other = other or kinds is None or bool(kinds - {"string"})
    return texts, other


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the schema itself points to, None if nothing."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, Mapping) else None
        if node is None:
            return None
    return node


def _check_references(schema: Any, param: str) -> None:
    """An argument's schema stands alone in the grammar, with the definitions: other references would point elsewhere."""
    for found in re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema)):
        if not found.startswith(("#/$defs/", "#/definitions/")):
            raise refused(f"has a $ref that is not to $defs or definitions: {found[:80]}", param)
