"""What one choice may say next: its reasoning within a budget, its answer in the form of a grammar.

A `Constraint` sees every token of a choice and can go back some. It lives in the choice's `SamplingState`, so preemption does not touch it,
and like that state it can be rebuilt anywhere by observing the tokens again.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import numpy.typing as npt

from forebay.engine.grammar import Grammar
from forebay.engine.grammar_metrics import GrammarMetrics
from forebay.model.tokenizer import Tokenizer

MASK_S = 1.0  # longest time one mask may take; the library's own limits end it after some milliseconds
STEP_S = 0.25  # longest wait of one step for all its masks
MAX_TAG = 256  # tokens of a tag that is waited for

_TAG = re.compile(r" ?([a-z_]*)(.?)", re.DOTALL)
_CALLS = ("calls", "tool_calls", "toolcalls", "tool", "function_calls", "invoke")  # tags that end the reasoning (model/chat_parse.py)

log = logging.getLogger("forebay.engine")


@dataclass(frozen=True)
class Allowed:
    """Ids that may come next: all but `banned`, or only those in `only`, or only those whose bit is set in `bits`.

    bits: [ceil(tokenizer ids / 32)] uint32, id i is bit i % 32 of word i // 32; ids beyond it are excluded.
    """

    banned: tuple[int, ...] = ()
    only: tuple[int, ...] | None = None
    bits: npt.NDArray[np.uint32] | None = None


class Constraint:
    """The state of one choice.

    While it reasons nothing is held to a form, except that it may not end there when an answer is due, and that `budget` tokens of
    reasoning are followed by the marker that ends it, though not within a tag or a call. A grammar that begins with the content holds from
    then on; one that begins with a marker from the first marker that opens a tag. When the grammar is complete only the end of sentence is
    allowed.

    Attributes:
        error: why no further token can be chosen, "" normally: the grammar's state became too complex, or a mask took too long.
        cost: seconds that its last mask took.
    """

    def __init__(
        self, tokenizer: Tokenizer, grammar: Grammar | None, *, reasoning: bool, budget: int | None = None, calls: bool = True
    ) -> None:
        """`reasoning`: whether the answer begins with it. `budget`: most tokens of it, None for no limit. `calls`: markup may be calls."""
        self._tokenizer, self._grammar = tokenizer, grammar
        self._budget = budget
        self._trigger = grammar is not None and grammar.spec.begins == "marker"
        self._tokens: list[int] = []
        self._reasoned: int | None = None if reasoning else 0  # tokens up to and with the one that ended the reasoning
        self._began: int | None = None if reasoning or grammar is None or self._trigger else 0  # tokens before the grammar's first
        self._matcher: llguidance.LLMatcher | None = None
        # Where an answer is due, reasoning may only end with its own marker.
        due = grammar is not None and not self._trigger
        markers = {*tokenizer.stop_ids, tokenizer.dsml_id, tokenizer.think_start_id} if due else set()
        self._open = Allowed(banned=tuple(sorted(i for i in markers if i is not None))) if due else None
        self._end = Allowed(only=(tokenizer.eos_id or 0,))
        self._bits: npt.NDArray[np.uint32] | None = None  # of the next token, once computed
        self._tags: list[int] | None = [] if calls and budget is not None else None  # where the text of tags in the reasoning begins
        self.error = ""
        self.cost = 0.0

    @property
    def matching(self) -> bool:
        """Whether the grammar holds for the next token."""
        return self._began is not None

    @property
    def pending(self) -> bool:
        """Whether a mask has to be computed before the next token can be chosen."""
        return self._began is not None and self._bits is None and not self.error and not self._stopped()

    @property
    def begins_at_once(self) -> bool:
        """Whether an answer in the grammar's form is due, whatever the model would rather do."""
        return self._grammar is not None and not self._trigger

    def _walk(self) -> llguidance.LLMatcher:
        if self._matcher is None:
            assert self._grammar is not None
            self._matcher = self._grammar.matcher()
        return self._matcher

    def _stopped(self) -> bool:
        """Whether the grammar is complete and nothing can be added."""
        return self._matcher is not None and self._matcher.is_stopped()

    def observe(self, token: int) -> None:
        """The choice goes on with this token."""
        self._tokens.append(token)
        self._bits = None
        if self.error:
            return
        if self._began is not None:
            if token != self._tokenizer.eos_id:
                self._consume(token)
            return
        if self._tags is not None and self._reasoned is None and token == self._tokenizer.dsml_id and self._follows(b"<"):
            self._tags.append(len(self._tokens))
        if self._reasoned is None and token == self._tokenizer.think_end_id:
            self._reasoned = len(self._tokens)
            if self._grammar is not None and not self._trigger:
                self._began = self._reasoned
        elif self._trigger and token == self._tokenizer.dsml_id and self._follows(b"<"):
            self._began = len(self._tokens)

    def _consume(self, token: int) -> None:
        """Advance the grammar. Whatever the library does about it is this choice's error, and no other's."""
        try:
            matcher = self._walk()
            if not matcher.consume_token(token):
                # A state that became too complex may be noticed only here, behind a mask that allowed the token.
                fits = matcher.is_error() and "satisfy" not in matcher.get_error()
                self.error = _too_complex(matcher) if fits else f"token {token} does not fit the grammar"
        except BaseException as error:
            self.error = _failed(error)

    def _follows(self, text: bytes) -> bool:
        """Whether the token before the last ends with `text`."""
        return len(self._tokens) > 1 and self._tokenizer.token_bytes(self._tokens[-2]).endswith(text)

    def _calling(self) -> bool:
        """Whether the reasoning is within a tag, or has ended in a call."""
        for place in self._tags or ():
            text = self._tokenizer.decode(self._tokens[place : place + MAX_TAG])
            name = _TAG.match(text)
            assert name is not None  # the pattern matches the empty string
            if not name[2]:
                if any(known.startswith(name[1]) for known in _CALLS):
                    return True
            elif name[1] in _CALLS and name[2] in " \t\r\n/>":
                return ">" in text or len(self._tokens) < place + MAX_TAG
        return False

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back, as when drafted ones were not accepted."""
        if count <= 0:
            return
        kept = len(self._tokens) - count
        shown = sum(i != self._tokenizer.eos_id for i in self._tokens[kept:])  # the matcher does not see the end of sentence
        self._bits, self.error = None, ""
        matcher = self._matcher
        if matcher is not None and (kept < (self._began or 0) or matcher.is_error() or not matcher.rollback(shown)):
            self._matcher = None  # one that failed stays so
        del self._tokens[kept:]
        if self._tags is not None:
            self._tags = [place for place in self._tags if place <= kept]
        if self._began is not None and kept < self._began:
            self._began = None
        if self._reasoned is not None and kept < self._reasoned:
            self._reasoned = None
        if self._began is not None and self._matcher is None:
            self._walk().consume_tokens(self._tokens[self._began :])

    def compute(self) -> None:
        """Compute the mask of the next token, mostly without the GIL; from one thread at a time. What goes wrong is the `error`."""
        began = time.perf_counter()
        try:
            matcher = self._walk()
            size = -(-self._tokenizer.vocab_size // 32)
            bits = np.zeros(size, np.uint32)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():
                self.error = _too_complex(matcher)
            elif not bits.any():
                self.error = "nothing can follow what has been written"
            else:
                self._bits = bits
        except BaseException as error:
            self.error = _failed(error)
        self.cost = time.perf_counter() - began

    def allowed(self) -> Allowed | None:
        """What may come next, None for anything."""
        if self._began is None:
            if self._reasoned is not None:
                return None
            over = self._budget is not None and len(self._tokens) >= self._budget and self._tokenizer.think_end_id is not None
            if over and not self._calling():
                return Allowed(only=(self._tokenizer.think_end_id or 0,))
            return self._open
        if self._stopped():
            return self._end
        if self._bits is None:
            self.compute()
        return Allowed(bits=self._bits)


def _too_complex(matcher: llguidance.LLMatcher) -> str:
    return f"its grammar became too complex: {' '.join(matcher.get_error().replace('<non-verbose/>', '').split())[:120]}"


def _failed(error: BaseException) -> str:
    """What is told of an exception; those of the library's panics are no `Exception`."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    log.warning("a grammar failed", exc_info=error)
    return f"its grammar failed ({type(error).__name__})"


class MaskWorker:
    """Computes masks in a thread of its own while the engine does other things, so that they are there when tokens are chosen.

    One thread of the engine calls `start` once it knows the tokens of a step, and `finish` before it chooses those of the next. Between,
    and as long as `finish` calls them late, it leaves those constraints alone.

    Attributes:
        waited_s: seconds that steps have waited for masks so far.
    """

    def __init__(self, longest_s: float = MASK_S, step_s: float = STEP_S, metrics: GrammarMetrics | None = None) -> None:
        """`longest_s` bounds one mask, `step_s` the wait of one `finish`."""
        self.longest_s, self.step_s, self.metrics = longest_s, step_s, metrics
        self.waited_s = 0.0
        self._changed = threading.Condition()
        self._line: list[Constraint] = []
        self._crew: _Crew | None = None

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Begin to compute the masks that these need for their next token."""
        with self._changed:
            busy = {id(c) for c in self._line} | ({id(self._crew.current)} if self._crew is not None else set())
            if wanted := [c for c in constraints if id(c) not in busy and c.pending]:
                self._line += wanted
                if self._crew is None:
                    self._crew = _Crew(self._changed, self._line, self.metrics)
                self._changed.notify_all()

    def finish(self, constraints: Sequence[Constraint], late: Sequence[Constraint] = ()) -> set[int]:
        """Compute what is missing of `constraints` and wait for it; `late` are those that were late before, and only looked at.

        Whoever takes longer than it may has failed (`error`). Returns the ids (`id()`) of those that are still late: they cannot have
        their next token in this step.
        """
        self.start([*constraints, *late])
        began = time.perf_counter()
        waited = {id(c) for c in (constraints or late)}
        with self._changed:
            while waited & (left := self._unfinished()):
                now = time.perf_counter()
                if now - began >= self.step_s:
                    break
                self._changed.wait(min(began + self.step_s - now, self._patience()))
            left = self._unfinished()
        waited_s = time.perf_counter() - began
        self.waited_s += waited_s
        absent = {id(c) for c in (*constraints, *late)} & left
        if self.metrics is not None and waited:
            self.metrics.waited(waited_s, len(absent))
        return absent

    def _unfinished(self) -> set[int]:
        """Those that wait or are being computed, after giving up the one that takes too long."""
        crew = self._crew
        if crew is not None and crew.current is not None and time.perf_counter() - crew.began >= self.longest_s:
            # A thread cannot be stopped: it is left alone with the one it is at, and a new one does the others.
            crew.current.error = f"a mask of its grammar took longer than {self.longest_s:g} s"
            log.warning("a mask took longer than %g s; its request fails", self.longest_s)
            crew.dismissed = True
            crew = self._crew = _Crew(self._changed, self._line, self.metrics) if self._line else None
        busy = {id(c) for c in self._line}
        return busy | {id(crew.current)} if crew is not None and crew.current is not None else busy

    def _patience(self) -> float:
        """Seconds until the mask at hand has taken too long."""
        crew = self._crew
        if crew is None or crew.current is None:
            return self.longest_s
        return max(0.001, crew.began + self.longest_s - time.perf_counter())

    def close(self) -> None:
        """Stop the thread when it has finished what it is at."""
        with self._changed:
            self._line.clear()
            if self._crew is not None:
                self._crew.dismissed = True
                self._crew = None
            self._changed.notify_all()

    def __del__(self) -> None:
        self.close()


class _Crew:
    """The thread that computes: what it is at, since when, and whether it is to stop after that. All under the lock of its worker."""

    def __init__(self, changed: threading.Condition, line: list[Constraint], metrics: GrammarMetrics | None) -> None:
        self.current: Constraint | None = None
        self.began = 0.0
        self.dismissed = False
        self._metrics = metrics
        # A daemon: one that hangs does not keep the process from ending.
        threading.Thread(target=self._work, args=(changed, line), name="forebay-masks", daemon=True).start()

    def _work(self, changed: threading.Condition, line: list[Constraint]) -> None:
        while True:
            with changed:
                while not line and not self.dismissed:
                    changed.wait()
                if self.dismissed:
                    return
                # Those whose masks have been quick go first: one that is slow makes only itself late.
                place = min(range(len(line)), key=lambda i: line[i].cost)
                constraint = self.current = line.pop(place)
                self.began = time.perf_counter()
            try:
                constraint.compute()
            except BaseException as error:
                constraint.error = f"its grammar failed ({type(error).__name__})"
            if self._metrics is not None:
                self._metrics.mask(constraint.cost)
            with changed:
                if not self.dismissed:
                    self.current = None
                    changed.notify_all()
            del constraint
