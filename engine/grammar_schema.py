"""Says a JSON schema in words that the library enforces as JSON Schema means them, and finds what no finite answer can satisfy.

The library takes patterns for Rust's dialect, passes over the older meaning of two keywords, and follows a schema that needs itself for
ever: such an answer would only end at its token limit. All of that is settled here, before a grammar is made of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # hold schemas by name
_DATA = frozenset({"const", "enum", "default", "examples"})  # hold values, whatever they look like
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUL = re.compile(r"\\x00|\\u0000|\\x\{0*\}|\\u\{0*\}|\x00|\\[pP]")
_NO_NUL = r"&&[^\x00]"


REPEATED = "uses minProperties where names are free: a name that is repeated counts as two"


def plain(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """A checked schema as the library is to have it, False if every value that satisfies it would be endless; and what it will not keep."""
    if not isinstance(schema, Mapping):
        return schema, ()
    writer = _Writer(_finite(schema))
    return writer.schema(schema), (REPEATED,) if writer.repeated else ()


class _Writer:
    """Writes schemas anew; those that are not `finite` become False, except definitions, since all that refers to them does."""

    def __init__(self, finite: set[int]) -> None:
        self._finite = finite
        self.repeated = False

    def schema(self, node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        return self._keywords(node) if id(node) in self._finite else False

    def _keywords(self, node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        out: dict[str, Any] = {}
        for key, value in node.items():
            if key in _DATA:
                out[key] = value
            elif key in ("$defs", "definitions") and isinstance(value, Mapping):
                out[key] = {name: self._keywords(inner) for name, inner in value.items()}
            elif key in _MAPS and isinstance(value, Mapping):
                names = pattern if key == "patternProperties" else str
                out[key] = {names(name): self.schema(inner) for name, inner in value.items()}
            elif isinstance(value, list):
                out[key] = [self.schema(inner) for inner in value]
            elif isinstance(value, Mapping):
                out[key] = self.schema(value) if key in ("items", "additionalProperties") else self._keywords(value)
            elif key == "pattern" and isinstance(value, str):
                out[key] = pattern(value)
            elif not (key == "uniqueItems" and value is False):
                out[key] = value
        _modernise(out)
        least = out.get("minProperties")
        if isinstance(least, int) and (out.get("additionalProperties", True) is not False or out.get("patternProperties")):
            self.repeated = self.repeated or least - len(set(map(str, _list(out.get("required"))))) > 1
        return out


def _modernise(node: dict[str, Any]) -> None:
    """Draft 4's exclusive bounds, which OpenAPI 3.0 has too, and whole numbers that are written with a point."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        old = node.get(exclusive)
        if isinstance(old, bool):
            del node[exclusive]
        if old is True and bound in node:
            node[exclusive] = node.pop(bound)
    for name in _COUNTS:
        if isinstance(value := node.get(name), float) and value.is_integer():
            node[name] = int(value)


# ---- patterns


def pattern(text: str) -> str:
    """A pattern of a schema (ECMA-262) in Rust's dialect, as far as its classes go; what else is unknown there the library refuses.

    Classes never match NUL: the library lets one with all control characters match a quote and a backslash too, which it escapes alike.
    """
    out: list[str] = []
    place = 0
    closed = True  # once a class has no end, none after it has
    while place < len(text):
        c = text[place]
        if c == "[" and closed:
            end = _class_end(text, place)
            closed = end is not None
            out.append(c if end is None else _class(text[place + 1 : end]))
            place = place if end is None else end
        elif c == "\\" and (found := _PROPERTY.match(text, place)):
            out.append(f"[{found[0]}{_NO_NUL}]")
            place = found.end() - 1
        elif c == "\\":
            out.append(text[place : place + 2])
            place += 1
        else:
            out.append(c)
        place += 1
    return "".join(out)


_PROPERTY = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])")


def _class_end(text: str, place: int) -> int | None:
    """Where the class that begins at `place` ends; one that does not is for the library to refuse. A first `]` is one of its characters."""
    at = place + (2 if text[place + 1 : place + 2] == "^" else 1)
    first = at
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "]" and at > first:
            return at
        at += 1
    return None


def _class(inner: str) -> str:
    """A class, with what only Rust takes for operators of sets escaped."""
    negated, inner = inner.startswith("^"), inner.removeprefix("^")
    inner = re.sub(r"\\.|\[|&&|~~|--", _escaped, inner, flags=re.DOTALL)
    if negated:
        return f"[^{inner}\\x00]"
    return f"[{inner}{_NO_NUL}]" if _NUL.search(inner) else f"[{inner}]"


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if text == "--":  # a hyphen that begins a range, or ends one
        return r"\--" if found.start() == 0 else r"-\-"
    return text if text[0] == "\\" else "".join(f"\\{c}" for c in text)


# ---- what has an end


def _finite(root: Mapping[str, Any]) -> set[int]:
    """Ids of the nodes that a finite value may satisfy, as far as their structure tells; in time linear in the size of the schema.

    A node needs one of each of several groups of others: those of its required properties, items, references and branches. It is finite
    once all groups have a finite one; whatever never gets there needs itself.
    """
    waiting: list[Mapping[str, Any]] = [root]
    missing: dict[int, int] = {}  # groups of a node without a finite one
    needed: dict[int, list[tuple[int, int]]] = {}  # by node, the groups it is in: (owner, number)
    ready: list[int] = []
    apart = False
    while waiting:
        node = waiting.pop()
        if id(node) in missing:
            continue
        groups = [group for group in _needs(node, root) if all(isinstance(member, Mapping) for member in group)]
        missing[id(node)] = len(groups)
        for number, group in enumerate(groups):
            for member in group:
                needed.setdefault(id(member), []).append((id(node), number))
            waiting += group
        if not groups:
            ready.append(id(node))
        for key, value in node.items():
            if key not in _DATA:
                inner = value.values() if isinstance(value, Mapping) and key in _MAPS else value if isinstance(value, list) else (value,)
                waiting += [part for part in inner if isinstance(part, Mapping)]
        apart = apart or (node is not root and isinstance(node.get("$id"), str))
    if apart:  # references in a part with an address of its own are to that part: nothing is certain
        return set(missing)
    finite: set[int] = set()
    served: set[tuple[int, int]] = set()
    while ready:
        finite.add(done := ready.pop())
        for place in needed.get(done, ()):
            if place not in served:
                served.add(place)
                missing[place[0]] -= 1
                if not missing[place[0]]:
                    ready.append(place[0])
    return finite


def _needs(node: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Groups of schemas of each of which one has to be satisfiable."""
    if "$ref" in node and (target := _target(node["$ref"], root)) is not None:
        yield [target]
    for part in _list(node.get("allOf")):
        yield [part]
    for name in ("anyOf", "oneOf"):
        if branches := _list(node.get(name)):
            yield branches
    if "enum" in node or "const" in node:
        return
    kind = node.get("type")
    if kind in ("object", ["object"]):
        yield from _members(node)
    elif kind in ("array", ["array"]):
        yield from _items(node)


def _members(node: Mapping[str, Any]) -> Iterator[list[Any]]:
    properties, others = _map(node.get("properties")), _map(node.get("patternProperties"))
    rest = node.get("additionalProperties", True)
    for name in _list(node.get("required")):
        if isinstance(name, str) and name in properties:
            yield [properties[name]]
        elif not others:
            yield [rest]
    least = node.get("minProperties")
    if isinstance(least, (int, float)) and least > 0:
        yield [*properties.values(), *others.values(), rest]


def _items(node: Mapping[str, Any]) -> Iterator[list[Any]]:
    least, items = node.get("minItems"), node.get("items", True)
    if not isinstance(least, (int, float)) or least <= 0:
        return
    first = _list(node.get("prefixItems")) or _list(items)
    for part in first[: int(least)]:
        yield [part]
    if least > len(first) and not isinstance(items, list):
        yield [items]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within `root` leads to; None where that is for the library to find, or nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and part.isdecimal() and len(part) < 6 and int(part) < len(node):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node
