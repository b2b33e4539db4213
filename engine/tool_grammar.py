"""The grammar of a block of tool calls (spec/chat-encoding.md §5 and §14).

Names and markup are always held to the form. Of a tool that is `strict` the arguments are too: required ones are there, no unknown ones,
each in the order of the schema and of its type. Of others the names that are declared keep their kind (text or JSON), in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forebay.engine.grammar import MARKER, MAX_LARK, GrammarSpec, check_schema, json_rule, literal, plain_schema, refused
from forebay.engine.tool_values import ValueReader, Values, resolve

Begins = Literal["content", "marker", "block"]

MAX_NAME = 256  # characters of a property that can be written: the parser of calls gives up on longer tags

_WRITABLE = re.compile(r'[^"<>\x00-\x1f\x7f\ud800-\udfff]+')  # names that can stand in a tag
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

    Raises RequestError: a strict tool's schema cannot be enforced, or one is too large or complex.
    """
    rules = _Rules(param)
    names = [f"{literal(tool.name)} {literal(chr(34) + '>' + chr(10))} {rules.body(i, tool)}" for i, tool in enumerate(tools)]
    lines = [
        f'call: {_OPEN} " invoke name=\\"" ( {" | ".join(names)} ) {_CLOSE} " invoke>\\n"',
        f'block: call{"" if single else "+"} {_CLOSE} " calls>"',
    ]
    head = {"content": f'"\\n\\n<" {MARKER} " calls>\\n" block', "block": "block", "marker": '" calls>\\n" block'}[begins]
    if otherwise is not None:
        first, *more = otherwise.lark.split("\n", 1)  # a pattern may hold other characters that end lines
        lines += [first.replace("start:", "other:", 1), *(line.replace("TEXT:", "OTHERTEXT:", 1) for line in more)]
        if more:
            lines[-len(more) - 1] = "other: OTHERTEXT"
        head += " | other"
    lark = "\n".join([f"start: {head}", *lines, *rules.lines])
    return GrammarSpec(lark, "marker" if begins == "marker" else "content", param, tuple(rules.probes))


class _Rules:
    """Rules of the arguments, written as they are needed; those of text and of any JSON are shared."""

    def __init__(self, param: str) -> None:
        self.lines: list[str] = []
        self.probes: list[tuple[str, str]] = []
        self._param = param
        self._size = 0
        self._shared: set[str] = set()

    def body(self, number: int, tool: ToolForm) -> str:
        """Name of the rule for what stands between the tags of a call."""
        name = f"body{number}"
        check_schema(tool.parameters, tool.param)
        if tool.strict:
            self._in_order(name, tool)
        else:
            self._any_order(name, tool)
        return name

    def _add(self, line: str) -> None:
        self._size += len(line)
        if self._size > MAX_LARK:
            raise refused(f"make a grammar of more than {MAX_LARK} characters", self._param)
        self.lines.append(line)

    def _shared_rule(self, kind: str) -> str:
        if kind not in self._shared:
            self._shared.add(kind)
            self._add(_RULES[kind])
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
        known = {k: v for k, v in declared.items() if _writable(k)} if isinstance(declared, Mapping) else {}
        reader = ValueReader(tool.parameters, strict=False)
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for key, schema in known.items():
            values = reader.read(schema, f"{tool.param}.properties.{key}")
            kinds.setdefault((bool(values.texts), bool(values.others)), []).append(key)
        kinds.pop((False, False), None)  # what has no value cannot be given
        options = [
            self._argument(f"( {' | '.join(map(literal, keys))} )", self._generic(text, other)) for (text, other), keys in kinds.items()
        ]
        extra = tool.parameters.get("additionalProperties", True)
        if extra is not False or not known:
            rest = f"/{_CHARACTER}{{1,64}}/"
            if known:
                rest += f" & ~( {' | '.join(map(literal, known))} )"
            self._add(f"OTHER{name.upper()}: {rest}")
            options.append(self._argument(f"OTHER{name.upper()}", self._generic(True, True)))
        self._add(f'{name}: "\\n" | ( {" | ".join(options)} )+' if options else f'{name}: "\\n"')

    def _generic(self, text: bool, other: bool) -> list[tuple[bool, str]]:
        return [(True, self._shared_rule("text"))] * text + [(False, self._shared_rule("json"))] * other

    def _in_order(self, name: str, tool: ToolForm) -> None:
        root, param = plain_schema(tool.parameters, tool.param, strict=True)[0], tool.param
        properties, required = root.get("properties") or {}, root.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise refused("needs properties as an object and required as a list of names", param)
        known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description", "$schema",
                 "$id", "$comment", "examples", "default", "x-guidance"}  # fmt: skip
        if unknown := sorted(set(root) - known):
            raise refused(f"uses keywords that cannot be enforced on the arguments of a strict tool: {', '.join(unknown)}", param)
        if (extra := root.get("additionalProperties")) and extra is not True:
            raise refused("needs additionalProperties as false: no others than its properties can be written", param)
        if missing := [key for key in required if key not in properties]:
            raise refused(f"requires {missing[0]!r}, which is not among its properties", param)
        # at least one of the parameters from number i on, and any of them from number i on
        some: list[str] = []
        parts = list(properties.items())
        needs = frozenset(required)
        reader = ValueReader(root, strict=True)
        for i, (key, schema) in enumerate(parts):
            if len(key) > MAX_NAME:
                raise refused(f"has a property whose name is longer than {MAX_NAME} characters: {key[:40]!r}", param)
            if not _writable(key):
                raise refused(f"has a property whose name cannot be written in a call: {key[:40]!r}", param)
            where = f"{param}.properties.{key}"
            values = self._values(f"{name}_{i}", where, schema, reader.read(schema, where), root)
            self._add(f"{name}_{i}: {self._argument(literal(key), values)}")
            some.append(f"{name}_{i}")
        any_from, some_from = "", '"\\n"'  # an empty call has an empty line
        for i in reversed(range(len(parts))):
            this, needed = some[i], parts[i][0] in needs
            last = i == len(parts) - 1
            self._add(f"{name}_any{i}: {this if needed else this + '?'} {any_from}".rstrip())
            skip = "" if needed else f" | {some_from}"
            self._add(f"{name}_some{i}: {this} {any_from}{skip}" if not last else f"{name}_some{i}: {this}{skip}")
            any_from, some_from = f"{name}_any{i}", f"{name}_some{i}"
        self._add(f"{name}: {some_from}")

    def _values(self, name: str, where: str, schema: Any, values: Values, root: Mapping[str, Any]) -> list[tuple[bool, str]]:
        """Forms of a value of a strict tool: raw text where its schema allows strings, JSON where it allows anything else."""
        forms: list[tuple[bool, str]] = []
        if values.texts:
            terminals = [text.terminal(where) for text in values.texts]
            if None in terminals:
                forms.append((True, self._shared_rule("text")))
            else:
                self._add(f'TEXT{name.upper()}: ( {" | ".join(str(t) for t in terminals)} ) "</"')
                forms.append((True, f"TEXT{name.upper()}"))
                self.probes += [(str(t), where) for t, text in zip(terminals, values.texts, strict=True) if text.doubtful]
        if values.others:
            if schema in ({}, True):
                forms.append((False, self._shared_rule("json")))
            else:
                self._add(f"{name}_json: {json_rule({**schema, **_definitions(schema, root, where)}, strict=True)}")
                forms.append((False, f"{name}_json"))
        if not forms:
            raise refused("allows no value at all", where)
        return forms


def _writable(name: str) -> bool:
    """Whether a property of this name can stand in a tag."""
    return len(name) <= MAX_NAME and _WRITABLE.fullmatch(name) is not None


def _definitions(schema: Any, root: Mapping[str, Any], param: str) -> dict[str, dict[str, Any]]:
    """What of the tool's definitions an argument's schema needs to stand alone. Other references would point elsewhere then."""
    kept: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [schema]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, Mapping):
            waiting += node.values()
            reference = node.get("$ref")
            if not isinstance(reference, str) or reference in seen:
                continue
            seen.add(reference)
            place, _, rest = reference.removeprefix("#/").partition("/")
            key = rest.split("/", 1)[0].replace("~1", "/").replace("~0", "~")
            if place not in ("$defs", "definitions") or not reference.startswith("#/") or not key:
                raise refused(f"has a $ref that is not to $defs or definitions: {reference[:80]}", param)
            target = resolve(f"#/{place}/{rest.split('/', 1)[0]}", root)
            if target is not None and key not in kept.get(place, {}):
                kept.setdefault(place, {})[key] = target
                waiting.append(target)
    return kept
