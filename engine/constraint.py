"""What one choice may say next: its reasoning within a budget, its answer in the form of a grammar.

A `Constraint` sees every token of a choice and can go back some. It lives in the choice's `SamplingState`, so preemption does not touch it,
and like that state it can be rebuilt anywhere by observing the tokens again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import llguidance
import numpy as np
import numpy.typing as npt

from forebay.engine.grammar import Grammar
from forebay.model.tokenizer import Tokenizer

MASK_S = 1.0  # longest wait for one mask; the library's own limits end it after some milliseconds

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
    reasoning are followed by the marker that ends it. A grammar that begins with the content holds from then on; one that begins with a
    marker from the first marker that opens a tag. When the grammar is complete only the end of sentence is allowed.

    Attributes:
        error: why no further token can be chosen, "" normally: the grammar's state became too complex, or a mask took too long.
    """

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar | None, *, reasoning: bool, budget: int | None = None) -> None:
        """`reasoning`: whether the answer begins with it. `budget`: most tokens of it, None for no limit."""
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
        self.error = ""

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
            if token != self._tokenizer.eos_id and not self._walk().consume_token(token):
                self.error = f"token {token} does not fit the grammar"
            return
        if self._reasoned is None and token == self._tokenizer.think_end_id:
            self._reasoned = len(self._tokens)
            if self._grammar is not None and not self._trigger:
                self._began = self._reasoned
        elif self._trigger and token == self._tokenizer.dsml_id and self._tokenizer.token_bytes(self._before()).endswith(b"<"):
            self._began = len(self._tokens)

    def _before(self) -> int:
        """The token before the last, -1 if there is none."""
        return self._tokens[-2] if len(self._tokens) > 1 else -1

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
        if self._began is not None and kept < self._began:
            self._began = None
        if self._reasoned is not None and kept < self._reasoned:
            self._reasoned = None
        if self._began is not None and self._matcher is None:
            self._walk().consume_tokens(self._tokens[self._began :])

    def compute(self) -> None:
        """Compute the mask of the next token, mostly without the GIL; from one thread at a time."""
        matcher = self._walk()
        size = -(-self._tokenizer.vocab_size // 32)
        bits = np.zeros(size, np.uint32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            self.error = f"its grammar became too complex: {' '.join(matcher.get_error().split())[:120]}"
        else:
            self._bits = bits

    def allowed(self) -> Allowed | None:
        """What may come next, None for anything."""
        if self._began is None:
            if self._reasoned is not None:
                return None
            if self._budget is not None and len(self._tokens) >= self._budget and self._tokenizer.think_end_id is not None:
                return Allowed(only=(self._tokenizer.think_end_id,))
            return self._open
        if self._stopped():
            return self._end
        if self._bits is None:
            self.compute()
        return Allowed(bits=self._bits)


class MaskWorker:
    """Computes masks in a thread of its own while the engine does other things, so that they are there when tokens are chosen.

    One thread of the engine calls `start` once it knows the tokens of a step, and `finish` before it chooses those of the next.

    Attributes:
        waited_s: seconds that steps have waited for masks so far.
    """

    def __init__(self, longest_s: float = MASK_S) -> None:
        self.longest_s = longest_s
        self._pool: ThreadPoolExecutor | None = None
        self._job: _Job | None = None
        self.waited_s = 0.0

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Begin to compute the masks that these need for their next token."""
        if wanted := [c for c in constraints if c.pending]:
            self._wait()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="forebay-masks")
            self._job = _Job(wanted)
            self._job.future = self._pool.submit(self._job.run)

    def finish(self, constraints: Sequence[Constraint]) -> None:
        """Wait for what was begun, and compute what is still missing. Whoever takes longer than it may has failed (`error`)."""
        began = time.perf_counter()
        self._wait()
        while missing := [c for c in constraints if c.pending]:
            self.start(missing)
            self._wait()
        self.waited_s += time.perf_counter() - began

    def _wait(self) -> None:
        job, self._job = self._job, None
        if job is None or job.future is None:
            return
        try:
            job.future.result(timeout=self.longest_s)
        except FutureTimeoutError:
            # A thread cannot be stopped: it is left alone with the one it is at, and a new one does the others.
            job.given_up = True
            job.current.error = f"a mask of its grammar took longer than {self.longest_s:g} s"
            log.warning("a mask took longer than %g s; its request fails", self.longest_s)
            self.close()

    def close(self) -> None:
        """Stop the thread when it has finished what it is at."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


class _Job:
    """Masks of one step; `current` is the one being computed."""

    def __init__(self, wanted: Sequence[Constraint]) -> None:
        self._wanted = wanted
        self.current = wanted[0]
        self.given_up = False
        self.future: Future[None] | None = None

    def run(self) -> None:
        for constraint in self._wanted:
            if self.given_up:
                return
            self.current = constraint
            constraint.compute()
