"""Grammars that hold an answer to a form: JSON, a regular expression, one of some texts, calls of tools.

`GrammarCompiler` turns a `GrammarSpec`, which is plain data, into a `Grammar`; every choice walks a copy of it (engine/constraint.py).
The matching of bytes is done by the library llguidance over the vocabulary of the tokenizer. Control tokens are never text to it: only
the marker of tool calls is a terminal of some grammars.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance

from forebay.engine import grammar_check
from forebay.engine.grammar_check import GrammarChecker, TimeLimitError
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer

COMPILE_S = 2.0  # longest time a grammar may take to be built
MAX_BYTES = 512 << 10  # of a schema as JSON, or of a regular expression
MAX_DEPTH = 64  # nesting of a schema
MAX_CHOICES = 10_000
MAX_CACHED = 256
SPACE = r"(\x20|\x0A[\x20\x09]{0,32})"  # where JSON allows space: one, or a line break and an indent; not enough to fill an answer with
MARKER = "<[MARKER]>"  # stands for the id of the marker of tool calls, which a grammar over another vocabulary has elsewhere

_KEYWORD = re.compile(r'"([^"]+)"')


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as data.

    Attributes:
        lark: rules in the library's dialect of Lark, with `MARKER` for the marker of tool calls.
        begins: `content`: it covers the answer from its first token after the reasoning. `marker`: text is free until a marker opens a
            call, and what follows that marker is covered.
        param: the request's field it came from, for errors.
    """

    lark: str
    begins: Literal["content", "marker"] = "content"
    param: str = "grammar"

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


class GrammarCompiler:
    """Builds grammars for one tokenizer and keeps the latest. Every method may be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = COMPILE_S, checkers: int = 2) -> None:
        """`seconds` bounds one build; `checkers` is how many grammars are tried at once, each in a process."""
        self.tokenizer, self.seconds = tokenizer, seconds
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._checkers = [GrammarChecker() for _ in range(checkers)]
        self._free = threading.Semaphore(checkers)
        self._idle = list(self._checkers)
        self._kept: OrderedDict[bytes, Grammar | RequestError] = OrderedDict()
        self._specs: OrderedDict[bytes, GrammarSpec] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Build a grammar, or take it from those kept.

        Raises:
            RequestError: it is wrong, contradicts itself, is not supported, or takes too long; `code` is invalid_json_schema.
        """
        key = hashlib.blake2b(f"{spec.begins}\0{spec.param}\0{spec.lark}".encode(), digest_size=32).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
        if kept is None:
            try:
                kept = self._build(spec)
            except RequestError as error:
                kept = error  # a client that repeats it is not worth two seconds every time
            with self._lock:
                self._kept[key] = kept
                while len(self._kept) > MAX_CACHED:
                    self._kept.popitem(last=False)
        if isinstance(kept, RequestError):
            raise RequestError(kept.message, param=kept.param, code=kept.code)
        return kept

    def remembered(self, key: bytes, make: Callable[[], GrammarSpec]) -> GrammarSpec:
        """What `make` gives, made once for one key while it is among the latest: a description that is long takes a while to write."""
        with self._lock:
            spec = self._specs.get(key)
        if spec is None:
            spec = make()
        with self._lock:
            self._specs[key] = spec
            self._specs.move_to_end(key)
            while len(self._specs) > MAX_CACHED:
                self._specs.popitem(last=False)
        return spec

    def _build(self, spec: GrammarSpec) -> Grammar:
        with self._free:
            with self._lock:
                checker = self._idle.pop()
            try:
                error, warnings = checker.check(spec.text(grammar_check.MARKER), self.seconds)
            except TimeLimitError:
                raise refused(f"takes more than {self.seconds:g} s or too much memory to prepare; make it simpler", spec.param) from None
            finally:
                with self._lock:
                    self._idle.append(checker)
        if not error:
            matcher = grammar_check.build(self.vocabulary(), spec.text(self.tokenizer.dsml_id))
            error = matcher.get_error()
        if error:
            raise refused(_reason(error), spec.param)
        return Grammar(spec, tuple(warnings), matcher)

    def vocabulary(self) -> llguidance.LLTokenizer:
        """The tokenizer's vocabulary as the library has it; built at the first call, in about 4 µs per token."""
        with self._lock:
            if self._vocabulary is None:
                wrapped = llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer))
                self._vocabulary = llguidance.LLTokenizer(wrapped, eos_token=self.tokenizer.eos_id)
            return self._vocabulary

    def close(self) -> None:
        """End the processes that try grammars."""
        for checker in self._checkers:
            checker.close()


class _Vocabulary:
    """A tokenizer in the shape that the library reads. Its added tokens are control tokens, whatever the file says of them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.added_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def refused(reason: str, param: str) -> RequestError:
    """The error of a grammar that cannot be used."""
    return RequestError(f"{param} {reason}", param=param, code="invalid_json_schema")


def _reason(error: str) -> str:
    """The library's finding as the end of a sentence, without the excerpt of the grammar that it adds."""
    error = re.split(r"\n\s*\d+ \|", error.replace("<non-verbose/>", ""))[0].strip()
    error = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: |\(in regex\): ", "", error)
    error = " ".join(re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: |\(in regex\): ", "", error).split())[:300]
    if "NoExtension" in error:
        return "allows no answer at all: it contradicts itself or refers only to itself ($ref)"
    if error.startswith("Unimplemented keys:"):
        return f"uses keywords that cannot be enforced: {', '.join(_KEYWORD.findall(error))}"
    if "coerce_one_of" in error:
        return "uses oneOf with branches that are not told apart; use anyOf"
    if error.startswith("Unknown format:"):
        return f"uses a format that cannot be enforced: {error.partition(':')[2].strip()}"
    if any(word in error for word in ("too big", "too large", "too many", "fuel")):
        return f"is too large: {error}"
    if error.startswith("Unsatisfiable schema:"):
        return f"allows no answer at all: {error.partition(':')[2].strip()}"
    if error.startswith(("Pointer", "Resource")):
        return f"has a $ref that leads nowhere: {error}"
    return f"cannot be enforced: {error}"


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
        size = len(json.dumps(schema).encode())
    except (TypeError, ValueError) as error:
        raise RequestError(f"{param} is not JSON: {error}"[:200], param=param, code="invalid_type") from None
    if size > MAX_BYTES:
        raise refused(f"is {size} bytes long, the limit is {MAX_BYTES}", param)


def json_rule(schema: Any, *, strict: bool) -> str:
    """A rule for JSON of a checked schema. What is not supported is an error with `strict` and otherwise left out, with a warning."""
    settings = {"whitespace_pattern": SPACE, "lenient": not strict}
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': settings}, ensure_ascii=True)}"


def json_spec(schema: Any, param: str, *, strict: bool = True) -> GrammarSpec:
    """JSON that the schema allows, without space around it. Raises RequestError for a schema beyond the limits."""
    check_schema(schema, param)
    return GrammarSpec(f"start: {json_rule(schema, strict=strict)}", param=param)


def json_object_spec(param: str = "response_format") -> GrammarSpec:
    """Any JSON object."""
    return json_spec({"type": "object"}, param)


def regex_spec(pattern: str, param: str) -> GrammarSpec:
    """Text that the whole of `pattern` matches; `\\d` and `\\w` are ASCII. Raises RequestError."""
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(f"{param} must be a regular expression, a string that is not empty", param=param, code="invalid_type")
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise refused(f"is longer than {MAX_BYTES} bytes", param)
    return GrammarSpec(f"start: TEXT\nTEXT: {pattern_terminal(pattern, param, whole=True)}", param=param)


def choice_spec(texts: Sequence[str], param: str) -> GrammarSpec:
    """One of the texts. Raises RequestError."""
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{param} must be a list of strings that are not empty", param=param, code="invalid_type")
    if len(texts) > MAX_CHOICES:
        raise refused(f"has {len(texts)} entries, the limit is {MAX_CHOICES}", param)
    if sum(map(len, texts)) > MAX_BYTES:
        raise refused(f"is longer than {MAX_BYTES} characters", param)
    return GrammarSpec(f"start: TEXT\nTEXT: {' | '.join(literal(text) for text in dict.fromkeys(texts))}", param=param)


def literal(text: str) -> str:
    """A terminal for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


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
