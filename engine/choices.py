"""The choices an engine has, from the moment it takes them in to their last event."""

from __future__ import annotations

import logging
import time
from typing import Any

from forebay.cache.manager import CacheManager
from forebay.engine.batcher import Row
from forebay.engine.flight import Flights
from forebay.engine.metrics import Metrics
from forebay.engine.reservoir import Reservoir
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Sequence
from forebay.engine.types import EngineError, FinishReason, OutputEvent, TokenLogprob
from forebay.model.chat import Delta
from forebay.model.errors import ForebayError

log = logging.getLogger("forebay.engine")


class Choices:
    """Takes choices in, adds tokens to them and ends them. Used by the stepping thread.

    Attributes:
        known: those that have not ended, by id.
        leaders: by the name of a shared prompt, the choice whose prefill the others wait for.
        accepted: tokens added since the start.
        flights: steps in flight; None where none ever is.
    """

    def __init__(
        self, manager: CacheManager, scheduler: Scheduler, metrics: Metrics, reservoir: Reservoir | None, late: dict[str, Any]
    ) -> None:
        """`late`: by id, what is kept for a choice and forgotten when it ends."""
        self.manager, self.scheduler, self.metrics, self.reservoir = manager, scheduler, metrics, reservoir
        self._late = late
        self.known: dict[str, Sequence] = {}
        self.leaders: dict[str, Sequence] = {}
        self.accepted = 0
        self.flights: Flights | None = None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or let it wait for the prefill of another choice of its prompt.

        One that takes less from the cache than the other does, or more, has its own prefill: their texts may differ.
        """
        share = sequence.request.share
        if share is None:
            self.scheduler.add(sequence)
            return
        leader = self.leaders.setdefault(share, sequence)
        if leader is sequence or leader.policy != sequence.policy:
            self.scheduler.add(sequence)
        else:
            sequence.leader = leader
            leader.followers.append(sequence)

    def _unlink(self, sequence: Sequence) -> None:
        """A choice ends: whoever waits for its prefill goes on without it."""
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
        followers, sequence.followers = sequence.followers, []
        share = sequence.request.share
        if share is not None and self.leaders.get(share) is sequence:
            del self.leaders[share]
        for follower in followers:
            follower.leader = None
            self.add(follower)

    def due(self, rows: list[Row], broken: set[str]) -> tuple[list[Sequence], list[int]]:
        """Sequences that get a token in this step, and the row of logits of each. Followers take their leader's and leave it."""
        due: list[Sequence] = []
        places: list[int] = []
        for place, leader in enumerate(row.sequence for row in rows if row.wants_logits):
            followers = list(leader.followers)
            share = leader.request.share
            if share is not None and self.leaders.get(share) is leader:
                del self.leaders[share]
                self.scheduler.fork(leader)
            due += [leader, *followers]
            places += [place] * (1 + len(followers))
            if leader.id in broken:
                broken.update(follower.id for follower in followers)
            for follower in followers:
                self.metrics.request_started(time.monotonic() - follower.request.arrived)
        return due, places

    def accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> OutputEvent:
        """Append one sampled token; ends the sequence when it is due."""
        sequence.tokens.append(token)
        sequence.sampling.observe(token)
        self.accepted += 1
        chosen = [logprob] if logprob is not None else None
        try:
            deltas = sequence.output.push(token)
        except Exception as error:  # what a parser cannot read is its request's misfortune, not the batch's
            return self.end(sequence, "error", [], [token], chosen, error=self._unreadable(sequence, error))
        reason: FinishReason | None = sequence.output.finish_reason
        if reason is None and sequence.generated >= sequence.limit:
            deltas += self.flush(sequence, "length")
            reason = sequence.output.finish_reason or "length"
        if reason is not None:
            return self.end(sequence, reason, deltas, [token], chosen)
        tiers = sequence.tiers if sequence.generated == 1 else None  # where the prompt came from is known, and some protocols tell it first
        return OutputEvent(sequence.id, deltas, [token], chosen, tiers=tiers, preemptions=sequence.preemptions)

    def flush(self, sequence: Sequence, reason: FinishReason) -> list[Delta]:
        """What the output still held back. A request ends whether or not its text can be finished."""
        try:
            return sequence.output.finish(reason)
        except Exception as error:
            self._unreadable(sequence, error)
            return []

    def _unreadable(self, sequence: Sequence, error: Exception) -> EngineError:
        log.error("the output of request %s cannot be read", sequence.id, exc_info=error)
        self.metrics.error("output_failed")
        return EngineError("the engine failed while it read the output of this request", code="output_failed")

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        deltas: list[Delta],
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        error: ForebayError | None = None,
        keep: bool = True,
    ) -> OutputEvent:
        """Take a sequence out of the engine and describe its end."""
        if self.reservoir is not None:
            self.reservoir.ended(sequence, trusted=keep)
        held = self.flights is not None and self.flights.holds(sequence)
        if not keep and not held:
            self.manager.release(sequence.cache, keep=False)
        self._unlink(sequence)
        self._late.pop(sequence.id, None)
        if self.flights is not None and held:
            self.scheduler.take_out(sequence)
            self.flights.leave(sequence, keep)
        else:
            self.scheduler.remove(sequence)
        self.known.pop(sequence.id, None)
        sequence.times.finished = time.monotonic()
        usage = sequence.usage()
        self.metrics.request_finished(reason, usage, sequence.tiers, sequence.times.finished - sequence.times.arrived)
        return OutputEvent(
            sequence.id,
            deltas,
            tokens or [],
            logprobs,
            finish_reason=reason,
            matched_stop=sequence.output.matched_stop,
            usage=usage,
            tiers=sequence.tiers,
            times=sequence.times,
            preemptions=sequence.preemptions,
            error=error,
        )
