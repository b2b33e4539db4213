"""Builds grammars: each is tried in a process of its own first (engine/grammar_check.py), and what came of it is kept."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import llguidance

from forebay.engine import grammar_check
from forebay.engine.grammar import MAX_LARK, Grammar, GrammarSpec, json_rule, refused
from forebay.engine.grammar_check import CheckerError, GrammarChecker, TimeLimitError
from forebay.engine.grammar_metrics import GrammarMetrics, Result
from forebay.engine.grammar_store import Refusal, WeighedStore
from forebay.engine.types import UnavailableError
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer

COMPILE_S = 2.0  # longest time a grammar may take to be built
MAX_GRAMMAR = 64 << 20  # bytes of memory that one grammar may keep
MAX_KEPT = 256 << 20  # and all that are kept
SLOW_KEPT_S = 5.0  # how long it is remembered that one took too long: the machine may have been busy

_UNKNOWN = "cannot be enforced"
_JSON = "start: %json "
_KEYWORD = re.compile(r'"([^"]+)"')

log = logging.getLogger("forebay.engine")

Outcome = Grammar | Refusal
Write = Callable[[], GrammarSpec]


class GrammarCompiler:
    """Builds grammars for one tokenizer and keeps the latest. Every method may be called from several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        seconds: float = COMPILE_S,
        checkers: int = 2,
        kept: int = MAX_KEPT,
        metrics: GrammarMetrics | None = None,
    ) -> None:
        """`seconds` bounds one build; `checkers` is how many grammars are tried at once, each in a process; `kept` is in bytes."""
        self.tokenizer, self.seconds, self.metrics = tokenizer, seconds, metrics
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._checkers = [GrammarChecker() for _ in range(checkers)]
        self._free = threading.Semaphore(checkers)
        self._idle = list(self._checkers)
        self.store: WeighedStore[Outcome] = WeighedStore(kept)
        self._building: dict[bytes, Future[Outcome]] = {}

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Build a grammar, or take it from those kept.

        Raises:
            RequestError: it is wrong, contradicts itself, is not supported, or takes too long; `code` is invalid_json_schema.
            UnavailableError: it could not be tried; another time it may be.
        """
        return found(self.outcome(spec.key, lambda: spec))

    def kept(self, key: bytes) -> Outcome | None:
        """What is known of a grammar, without any work."""
        with self._lock:
            return self.store.get(key)

    def outcome(self, key: bytes, write: Write, owner: str = "") -> Outcome:
        """What becomes of the spec that `write` gives, or refuses to give. Threads that ask for one key at once wait for the first.

        `key` stands for the spec and whoever may share it; `owner` is whose part of the memory it takes. Raises UnavailableError.
        """
        with self._lock:
            if (known := self.store.get(key)) is not None:
                return known
            building = self._building.get(key)
            if building is None:
                mine = self._building[key] = Future()
        if building is not None:
            return building.result()
        began = time.perf_counter()
        result: Result = "failed"
        try:
            outcome, weight, seconds = self._outcome(write)
            result = "built" if isinstance(outcome, Grammar) else "refused" if seconds is None else "too_slow"
            with self._lock:
                self.store.put(key, outcome, weight, owner, seconds)
                if self.metrics is not None:
                    self.metrics.kept(self.store.weight)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(outcome)
            return outcome
        finally:
            if self.metrics is not None:
                self.metrics.compiled(time.perf_counter() - began, result)
            with self._lock:
                del self._building[key]

    def _outcome(self, write: Write) -> tuple[Outcome, int, float | None]:
        """With its weight in bytes and for how many seconds it holds, None for ever."""
        spec: GrammarSpec | None = None
        seconds: float | None = None
        try:
            spec = write()
            grammar, size = self._build(spec)
            return grammar, size + len(grammar.spec.lark), None
        except RequestError as error:
            refusal = Refusal.of(error)
        except TimeLimitError:
            seconds = SLOW_KEPT_S  # a client that repeats it at once is not worth two seconds every time
            assert spec is not None
            reason = f"takes more than {self.seconds:g} s or too much memory to prepare; make it simpler"
            refusal = Refusal.of(refused(reason, spec.param))
        except CheckerError as error:
            log.error("a grammar cannot be tried: %s", error)
            raise UnavailableError("The form of the answer cannot be prepared at the moment.", code="grammar_unavailable") from None
        return refusal, len(refusal.message), seconds

    def _build(self, spec: GrammarSpec) -> tuple[Grammar, int]:
        if len(spec.lark) > MAX_LARK:
            raise refused(f"makes a grammar of {len(spec.lark)} characters, the limit is {MAX_LARK}", spec.param)
        left_out: list[str] = []
        with self._checker() as checker:
            checked = checker.check(spec.text(grammar_check.MARKER), self.seconds)
            if checked.error and (schema := _lenient_schema(spec)) is not None:
                spec, left_out = self._without_patterns(spec, schema, checker)
                checked = checker.check(spec.text(grammar_check.MARKER), self.seconds) if left_out else checked
            if not checked.error:
                self._probe(spec, checker)
        if checked.error:
            raise refused(reason_of(checked.error), spec.param)
        if checked.size > MAX_GRAMMAR:
            raise refused(f"takes {checked.size >> 20} MiB of memory, the limit is {MAX_GRAMMAR >> 20}; make it simpler", spec.param)
        matcher = grammar_check.build(self.vocabulary(), spec.text(self.tokenizer.dsml_id))
        if error := matcher.get_error():
            raise refused(reason_of(error), spec.param)
        return Grammar(replace(spec, probes=()), (*spec.remarks, *left_out, *checked.warnings), matcher), checked.size

    @contextmanager
    def _checker(self) -> Iterator[GrammarChecker]:
        with self._free:
            with self._lock:
                checker = self._idle.pop()
            try:
                yield checker
            finally:
                with self._lock:
                    self._idle.append(checker)

    def _probe(self, spec: GrammarSpec, checker: GrammarChecker) -> None:
        until = time.monotonic() + self.seconds
        for terminal, param in spec.probes:
            if time.monotonic() > until:
                raise TimeLimitError("too many terminals")
            alone = GrammarSpec(f"start: TEXT\nTEXT: {terminal}")
            if error := checker.check(alone.text(grammar_check.MARKER), self.seconds).error:
                raise refused(reason_of(error), param)

    def _without_patterns(self, spec: GrammarSpec, schema: dict[str, Any], checker: GrammarChecker) -> tuple[GrammarSpec, list[str]]:
        """A lenient schema without the patterns that cannot be enforced, and a remark on each; the same one if there are none."""
        until = time.monotonic() + self.seconds
        bad: dict[str, str] = {}
        for pattern in _patterns(schema):
            if time.monotonic() > until:
                raise TimeLimitError("too many patterns")
            alone = json_rule({"type": "string", "pattern": pattern}, strict=False)
            error = checker.check(GrammarSpec(f"start: {alone}").text(grammar_check.MARKER), self.seconds).error
            if error and (reason := reason_of(error)).startswith(_UNKNOWN):
                bad[pattern] = reason
        if not bad:
            return spec, []
        remarks = [f"pattern {pattern[:60]!r} {reason}" for pattern, reason in bad.items()]
        return replace(spec, lark=f"start: {json_rule(_without(schema, bad), strict=False)}"), remarks

    def vocabulary(self) -> llguidance.LLTokenizer:
        """The tokenizer's vocabulary as the library has it; built at the first call, in about 4 µs per token."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                wrapped = llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer))
                self._vocabulary = llguidance.LLTokenizer(wrapped, eos_token=self.tokenizer.eos_id)
            return self._vocabulary

    def close(self) -> None:
        """End the processes that try grammars."""
        for checker in self._checkers:
            checker.close()


def found(outcome: Outcome) -> Grammar:
    """The grammar; raises RequestError for a refusal."""
    if isinstance(outcome, Refusal):
        raise outcome.error()
    return outcome


def salted(key: bytes, salt: str) -> bytes:
    """A key that nobody with another salt has: how long an answer takes must not tell what others have asked for."""
    return hashlib.blake2b(key + salt.encode(), digest_size=32).digest()


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


def _lenient_schema(spec: GrammarSpec) -> dict[str, Any] | None:
    """The schema of a spec that is one of JSON and nothing else, if it may be left unenforced in parts."""
    if not spec.lark.startswith(_JSON) or "\n" in spec.lark:
        return None
    schema: dict[str, Any] = json.loads(spec.lark[len(_JSON):])
    return schema if schema.pop("x-guidance")["lenient"] else None


def _patterns(schema: Any) -> list[str]:
    """All regular expressions of a schema, each once. What is data in it (enum and the like) may be among them, which does no harm."""
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("pattern"), str):
                found[node["pattern"]] = None
            if isinstance(node.get("patternProperties"), Mapping):
                found |= dict.fromkeys(node["patternProperties"])
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return list(found)


def _without(node: Any, bad: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        return [_without(item, bad) for item in node]
    if not isinstance(node, Mapping):
        return node
    kept = {}
    for key, value in node.items():
        if key in ("const", "enum", "default", "examples"):
            kept[key] = value
        elif key == "patternProperties" and isinstance(value, Mapping):
            kept[key] = {name: _without(inner, bad) for name, inner in value.items() if name not in bad}
        elif key != "pattern" or not isinstance(value, str) or value not in bad:
            kept[key] = _without(value, bad)
    return kept


def reason_of(error: str) -> str:
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
    return f"{_UNKNOWN}: {error}"
