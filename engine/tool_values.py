"""What a property's schema allows, as far as a call of a tool has to know: texts, which stand in it raw, and which kinds of other JSON.

JSON inside a call is held to its schema by the library; raw text is not, so for a strict tool everything that restricts a string has to be
found here, and what is not understood is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forebay.engine.grammar import literal, pattern_terminal, refused

MAX_NODES = 4096  # of a schema that are looked at for one property
MAX_TEXTS = 256  # forms of text of one property
MAX_WORK = 500_000  # comparisons of texts for one tool
MAX_LEVELS = 96  # of schemas in schemas, references followed
MAX_LENGTH = (1 << 20) - 1

OTHERS = frozenset({"null", "boolean", "integer", "number", "array", "object"})
_TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern", "format", "$ref", "allOf", "anyOf", "oneOf"})
# Those that say nothing about strings: remarks, and what restricts other kinds.
_IDLE_KEYWORDS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id", "$defs",
    "definitions", "nullable",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "additionalItems", "minItems",
    "maxItems", "uniqueItems", "contains", "minContains", "maxContains", "properties", "required", "additionalProperties",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
})  # fmt: skip

_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_GROUP = "[0-9A-Fa-f]{1,4}"
FORMATS = {  # RFC 3339, 5321, 1123, 2673, 4291, 4122; a subset of each that JSON Schema's own words allow
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": "P([0-9]+W|([0-9]+Y)?([0-9]+M)?[0-9]+D(T([0-9]+H)?([0-9]+M)?[0-9]+S)?|T([0-9]+H)?([0-9]+M)?[0-9]+S)",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,9}}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,9}}",
    "ipv4": _IPV4,
    "ipv6": "|".join([
        f"({_GROUP}:){{7}}{_GROUP}", f"({_GROUP}:){{6}}{_IPV4}", f"::({_GROUP}(:{_GROUP}){{0,6}})?",
        *(f"({_GROUP}:){{{n}}}:{_GROUP}(:{_GROUP}){{0,{6 - n}}}" for n in range(1, 7)), f"({_GROUP}:){{1,7}}:",
    ]),
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """Strings for which all of this holds: one of `values` (None for any), `least` to `most` characters, `patterns` and `formats`."""

    values: tuple[str, ...] | None = None
    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def both(self, other: Text) -> Text:
        """Strings that are of this and of the other."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(text for text in self.values if text in set(other.values))
        most = min((bound for bound in (self.most, other.most) if bound is not None), default=None)
        patterns = tuple(dict.fromkeys((*self.patterns, *other.patterns)))
        formats = tuple(dict.fromkeys((*self.formats, *other.formats)))
        return Text(values, max(self.least, other.least), most, patterns, formats)

    def settled(self) -> Text | None:
        """With only the values that are long and short enough; None if there is nothing left."""
        if self.most is not None and self.most < self.least:
            return None
        if self.values is None:
            return self
        values = tuple(text for text in self.values if self.least <= len(text) and (self.most is None or len(text) <= self.most))
        return replace(self, values=values, least=0, most=None) if values else None

    def terminal(self, param: str) -> str | None:
        """The terminal of it, None if it is any text. Raises RequestError for a pattern that a terminal cannot have."""
        terms = []
        if self.values is not None:
            terms.append(f"( {' | '.join(literal(text) for text in dict.fromkeys(self.values))} )")
        elif self.least or self.most is not None:
            terms.append(f"/(?s:.{{{self.least},{'' if self.most is None else self.most}}})/")
        terms += [pattern_terminal(pattern, param, whole=False) for pattern in self.patterns]
        terms += [f"/{FORMATS[name]}/" for name in self.formats]
        return f"( {' & '.join(terms)} )" if terms else None

    @property
    def doubtful(self) -> bool:
        """Whether there may be no such text."""
        return bool(self.patterns) or len(self.formats) + (self.values is not None) + (self.least > 0 or self.most is not None) > 1


@dataclass(frozen=True)
class Values:
    """Texts of any of these forms, and JSON of these kinds that is no string."""

    texts: tuple[Text, ...] = ()
    others: frozenset[str] = frozenset()

    def both(self, other: Values) -> Values:
        texts = [a.both(b).settled() for a in self.texts for b in other.texts]
        return Values(tuple(dict.fromkeys(t for t in texts if t is not None)), _common(self.others, other.others))


ANY = Values((Text(),), OTHERS)


def _common(a: frozenset[str], b: frozenset[str]) -> frozenset[str]:
    """Kinds that are in both; an integer is a number too."""
    shared = set(a & b)
    if ("integer" in a and "number" in b) or ("number" in a and "integer" in b):
        shared.add("integer")
    return frozenset(shared)


class ValueReader:
    """Reads the properties of one tool. Every reference is followed once, whatever leads to it."""

    def __init__(self, root: Mapping[str, Any], *, strict: bool) -> None:
        """`strict`: refuse what is not understood or impossible; otherwise it allows anything, and how texts look does not matter."""
        self._root, self._strict = root, strict
        self._known: dict[str, Values] = {}
        self._nodes = self._work = 0
        self._param = ""

    def read(self, schema: Any, param: str) -> Values:
        """Raises RequestError naming `param`."""
        self._nodes, self._param = 0, param
        return self._node(schema, 0)

    def _node(self, node: Any, level: int) -> Values:
        self._nodes += 1
        if self._nodes > MAX_NODES or level > MAX_LEVELS:
            raise refused(f"is too complex: more than {MAX_NODES} schemas or {MAX_LEVELS} levels, with its references", self._param)
        if not isinstance(node, Mapping):
            if self._strict and not isinstance(node, bool):
                raise refused("is no schema: an object, true or false", self._param)
            return Values() if node is False else ANY
        found = self._own(node)
        if self._strict and found.texts and (unknown := sorted(node.keys() - _TEXT_KEYWORDS - _IDLE_KEYWORDS)):
            shown = ", ".join(str(name)[:60] for name in unknown[:8])
            raise refused(f"uses keywords that cannot be enforced on a string: {shown}", self._param)
        if "$ref" in node:
            found = self._both(found, self._reference(node["$ref"], level))
        for part in self._list(node, "allOf"):
            found = self._both(found, self._node(part, level + 1))
        for name in ("anyOf", "oneOf"):
            if name in node:
                found = self._both(found, self._either([self._node(part, level + 1) for part in self._list(node, name)], name))
        return found

    def _own(self, node: Mapping[str, Any]) -> Values:
        """What the node's own keywords allow, those aside that hold other schemas."""
        kinds = self._kinds(node)
        texts: tuple[Text, ...] = (self._text(node),) if "string" in kinds else ()
        others = kinds - {"string"}
        for values in ([node["enum"]] if "enum" in node else []) + ([[node["const"]]] if "const" in node else []):
            if not isinstance(values, list):
                if self._strict:
                    raise refused("needs enum as a list", self._param)
                continue
            only = Text(values=tuple(value for value in values if isinstance(value, str)))
            texts = tuple(text.both(only) for text in texts)
            others = _common(others, frozenset().union(*(_kinds_of(value) for value in values)))
        return Values(tuple(text for text in (t.settled() for t in texts) if text is not None), others)

    def _kinds(self, node: Mapping[str, Any]) -> frozenset[str]:
        every = OTHERS | {"string"}
        kind = node.get("type", None)
        if "type" not in node:
            return every
        kinds = [kind] if isinstance(kind, str) else kind
        if not isinstance(kinds, list) or not all(isinstance(k, str) and k in every for k in kinds):
            if self._strict:
                raise refused(f"has a type that is not known: {str(kind)[:60]}", self._param)
            return every
        return frozenset(kinds)

    def _text(self, node: Mapping[str, Any]) -> Text:
        if not self._strict:
            return Text()
        bounds = []
        for name in ("minLength", "maxLength"):
            bound = node.get(name)
            if isinstance(bound, float) and bound.is_integer():
                bound = int(bound)
            if name in node and (isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= MAX_LENGTH):
                raise refused(f"needs minLength and maxLength from 0 to {MAX_LENGTH}", self._param)
            bounds.append(bound)
        for name in ("pattern", "format"):
            if name in node and not isinstance(node[name], str):
                raise refused(f"needs {name} as a string", self._param)
        if "format" in node and node["format"] not in FORMATS:
            raise refused(f"uses a format that cannot be enforced: {node['format'][:60]}", self._param)
        patterns, formats = ((node[name],) if name in node else () for name in ("pattern", "format"))
        return Text(None, bounds[0] or 0, bounds[1], patterns, formats)

    def _reference(self, reference: Any, level: int) -> Values:
        if not isinstance(reference, str):
            return self._unknown("needs $ref as a string")
        if reference not in self._known:
            target = resolve(reference, self._root)
            if target is None:
                return self._unknown(f"has a $ref that leads nowhere: {reference[:80]}")
            self._known[reference] = Values()  # one that leads back to itself allows nothing
            self._known[reference] = self._node(target, level + 1)
        return self._known[reference]

    def _unknown(self, reason: str) -> Values:
        if self._strict:
            raise refused(reason, self._param)
        return ANY

    def _list(self, node: Mapping[str, Any], name: str) -> list[Any]:
        if name not in node:
            return []
        if isinstance(node[name], list):
            return node[name]
        if self._strict:
            raise refused(f"needs {name} as a list", self._param)
        return [True]

    def _either(self, branches: list[Values], name: str) -> Values:
        if name == "oneOf" and self._strict and not _apart([branch.texts for branch in branches]):
            raise refused("uses oneOf with strings in several branches, which may be of more than one; use anyOf", self._param)
        texts = tuple(dict.fromkeys(text for branch in branches for text in branch.texts))
        return self._few(Values(texts, frozenset().union(*(branch.others for branch in branches))))

    def _both(self, a: Values, b: Values) -> Values:
        self._work += len(a.texts) * _size(b.texts) + len(b.texts) * _size(a.texts)
        if self._work > MAX_WORK:
            raise refused("is too complex: too many combinations of its strings", self._param)
        return self._few(a.both(b))

    def _few(self, found: Values) -> Values:
        if len(found.texts) > MAX_TEXTS:
            raise refused(f"is too complex: more than {MAX_TEXTS} forms of strings", self._param)
        return found


def _size(texts: tuple[Text, ...]) -> int:
    return sum(1 + len(text.values or ()) for text in texts)


def _kinds_of(value: Any) -> frozenset[str]:
    """Of which kinds a value of enum or const is, strings aside."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer"})
    if isinstance(value, str):
        return frozenset()
    return frozenset({"number" if isinstance(value, float) else "array" if isinstance(value, list) else "object"})


def _apart(branches: list[tuple[Text, ...]]) -> bool:
    """Whether no text can be of two branches, as far as that is plain to see."""
    with_texts = [texts for texts in branches if texts]
    if len(with_texts) < 2:
        return True
    seen: set[str] = set()
    for texts in with_texts:
        here = {value for text in texts for value in text.values or ()}
        if any(text.values is None for text in texts) or here & seen:
            return False
        seen |= here
    return True


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
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
