"""Grammars that hold an answer to a form: JSON, a regular expression, one of some texts, calls of tools.

`GrammarCompiler` (engine/grammar_compiler.py) turns a `GrammarSpec`, which is plain data, into a `Grammar`; every choice walks a copy of
it (engine/constraint.py).
The matching of bytes is done by the library llguidance over the vocabulary of the tokenizer. Control tokens are never text to it: only
the marker of tool calls is a terminal of some grammars.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance

from forebay.engine.grammar_schema import plain
from forebay.model.errors import RequestError

MAX_BYTES = 512 << 10  # of a schema as JSON, or of a regular expression
MAX_DEPTH = 64  # nesting of a schema
MAX_CHOICES = 10_000
MAX_LARK = 1 << 20  # characters of the rules that are made of all that
SPACE = r"(\x20|\x0A[\x20\x09]{0,32})"  # where JSON allows space: one, or a line break and an indent; not enough to fill an answer with
# Stands for the id of the marker of tool calls, which a grammar over another vocabulary has elsewhere. A character of private use, since no
# text of a client has it once it is in a rule: literals and JSON are written in ASCII, patterns have it escaped.
MARKER = "\uf8ff"

@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as data.

    Attributes:
        lark: rules in the library's dialect of Lark, with `MARKER` for the marker of tool calls.
        begins: `content`: it covers the answer from its first token after the reasoning. `marker`: text is free until a marker opens a
            call, and what follows that marker is covered.
        param: the request's field it came from, for errors.
        probes: (terminal, param) of those that may match nothing at all: inside a grammar that would be a way without an end.
        remarks: what it leaves out of the schema that it is made of.
    """

    lark: str
    begins: Literal["content", "marker"] = "content"
    param: str = "grammar"
    probes: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def key(self) -> bytes:
        """Two specs with one key are the same."""
        text = f"{self.begins}\0{self.param}\0{self.probes}\0{self.lark}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()

    def text(self, marker: int | None) -> str:
        """In the library's JSON form, for a vocabulary whose marker has this id."""
        return json.dumps({"grammars": [{"lark_grammar": self.lark.replace(MARKER, f"<[{marker}]>")}]})


@dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar ready to be walked: `matcher` gives a fresh copy of its start. `warnings`: keywords of schemas that were left out."""

    spec: GrammarSpec
    warnings: tuple[str, ...]
    start: llguidance.LLMatcher

    def matcher(self) -> llguidance.LLMatcher:
        return self.start.deep_copy()


def refused(reason: str, param: str) -> RequestError:
    """The error of a grammar that cannot be used."""
    return RequestError(f"{param} {reason}", param=param, code="invalid_json_schema")


# ---- what a grammar is made of


def check_schema(schema: Any, param: str) -> None:
    """Refuse a schema that is no object or boolean, too large or too deep, before anything walks it. Raises RequestError."""
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{param} must be a JSON schema, an object", param=param, code="invalid_type")
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise refused(f"is nested more than {MAX_DEPTH} deep", param)
        inner: list[Any] = []
        for value in level:
            inner += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        level = inner
    try:
        size = len(json.dumps(schema, allow_nan=False))
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise refused(_HALF, param) from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"{param} is not JSON: {error}"[:200], param=param, code="invalid_type") from None
    if size > MAX_BYTES:
        raise refused(f"is {size} bytes long, the limit is {MAX_BYTES}", param)


def plain_schema(schema: Any, param: str, *, strict: bool) -> tuple[Any, tuple[str, ...]]:
    """A schema, checked, as rules are made of it, and what of it cannot be enforced, which is an error with `strict`.

    Raises RequestError.
    """
    check_schema(schema, param)
    found, remarks = plain(schema)
    if found is False:
        why = "it is false" if schema is False else "it needs itself again, without an end ($ref)"
        raise refused(f"allows no answer at all: {why}", param)
    if strict and remarks:
        raise refused(remarks[0], param)
    return found, remarks


def json_rule(schema: Any, *, strict: bool) -> str:
    """A rule for JSON of a plain schema. What is not supported is an error with `strict` and otherwise left out, with a warning."""
    settings = {"whitespace_pattern": SPACE, "lenient": not strict}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return f"%json {json.dumps({**schema, 'x-guidance': settings})}"


def json_spec(schema: Any, param: str, *, strict: bool = True) -> GrammarSpec:
    """JSON that the schema allows, without space around it. Raises RequestError for a schema beyond the limits or without an end."""
    found, remarks = plain_schema(schema, param, strict=strict)
    return GrammarSpec(f"start: {json_rule(found, strict=strict)}", param=param, remarks=remarks)


def json_object_spec(param: str = "response_format") -> GrammarSpec:
    """Any JSON object."""
    return json_spec({"type": "object"}, param)


def regex_spec(pattern: str, param: str) -> GrammarSpec:
    """Text that the whole of `pattern` matches; `\\d` and `\\w` are ASCII. Raises RequestError."""
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(f"{param} must be a regular expression, a string that is not empty", param=param, code="invalid_type")
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise refused(f"is longer than {MAX_BYTES} bytes", param)
    _refuse_halves(pattern, param)
    return GrammarSpec(f"start: TEXT\nTEXT: {pattern_terminal(pattern, param, whole=True)}", param=param)


def choice_spec(texts: Sequence[str], param: str) -> GrammarSpec:
    """One of the texts. Raises RequestError."""
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{param} must be a list of strings that are not empty", param=param, code="invalid_type")
    if len(texts) > MAX_CHOICES:
        raise refused(f"has {len(texts)} entries, the limit is {MAX_CHOICES}", param)
    if sum(map(len, texts)) > MAX_BYTES:
        raise refused(f"is longer than {MAX_BYTES} characters", param)
    for text in texts:
        _refuse_halves(text, param)
    return GrammarSpec(f"start: TEXT\nTEXT: {' | '.join(literal(text) for text in dict.fromkeys(texts))}", param=param)


_HALF = "has half of a surrogate pair, which is no character"


def _refuse_halves(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refused(_HALF, param) from None


def literal(text: str) -> str:
    """A terminal for exactly this text, in visible ASCII, so that nothing in it can be taken for a part of the rule."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def pattern_terminal(pattern: str, param: str, *, whole: bool) -> str:
    """A terminal for a regular expression; where an alternative has no anchor at an end, anything may stand there unless `whole`.

    Raises RequestError for anchors elsewhere.
    """
    branches = [_branch(text, param, whole) for text in _alternatives(pattern)]
    return f"/{'|'.join(branches)}/"


def _branch(text: str, param: str, whole: bool) -> str:
    head = text.startswith("^")
    tail = text.endswith("$") and (len(text) - 1 - len(text[:-1].rstrip("\\"))) % 2 == 0
    inner = text[1 if head else 0 : len(text) - 1 if tail else None]
    if _marks(inner, "^$"):
        raise refused("uses an anchor (^ or $) that is not at the beginning or end of a pattern", param)
    escaped: str = llguidance.regex_to_lark(inner, "dw")  # between slashes, with the classes of JSON Schema
    escaped = escaped.replace(MARKER, f"\\u{{{ord(MARKER):x}}}")
    return f"{'' if whole or head else '(?s:.*)'}({escaped}){'' if whole or tail else '(?s:.*)'}"


def _alternatives(pattern: str) -> list[str]:
    """The branches of a pattern's top level."""
    cuts = [-1, *_marks(pattern, "|", top=True), len(pattern)]
    return [pattern[a + 1 : b] for a, b in itertools.pairwise(cuts)]


def _marks(pattern: str, characters: str, *, top: bool = False) -> list[int]:
    """Where one of `characters` stands for itself as an operator: not escaped, not in a class, and with `top` in no group."""
    found: list[int] = []
    depth = 0
    inside = -1  # where the open class began
    place = 0
    while place < len(pattern):
        c = pattern[place]
        if c == "\\":
            place += 1
        elif inside >= 0:
            if c == "]" and place > inside + (2 if pattern[inside + 1 : inside + 2] == "^" else 1):
                inside = -1
        elif c == "[":
            inside = place
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c in characters and not (top and depth):
            found.append(place)
        place += 1
    return found
