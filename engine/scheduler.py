"""Who runs: admission, order, preemption (architecture §4, cases B041-B050)."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import replace

from forebay.cache.manager import CacheManager
from forebay.engine.batcher import Batcher, Row
from forebay.engine.options import EngineOptions
from forebay.engine.sequence import Sequence
from forebay.engine.types import TierCounts


class Scheduler:
    """Keeps the waiting and the running sequences and decides what the next step covers.

    Order is by priority (lower first), lowered by one for every `aging_s` seconds since arrival, then by arrival. Admission is strict in
    that order: a request that does not fit yet is not overtaken, so it cannot starve. Every admitted sequence holds all of its prompt's
    blocks, so admitted sequences never wait for each other's.

    Attributes:
        waiting: in order; preempted sequences among them.
        running: those that own a window and blocks.
    """

    def __init__(
        self,
        manager: CacheManager,
        batcher: Batcher,
        options: EngineOptions,
        *,
        save: Callable[[Sequence, tuple[int, ...]], None],
        restore: Callable[[Sequence], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`save` keeps a sequence's window, and what its cached blocks held, before a preemption; `restore` puts it back."""
        self.manager, self.batcher, self.options = manager, batcher, options
        self._save, self._restore, self._clock = save, restore, clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.started: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.too_long: list[Sequence] = []
        self.expired: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self.rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back what it owns."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.manager.release(sequence.cache)
        sequence.saved = None

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Smaller is sooner. Waiting lowers everybody's rank at the same speed, so the order never changes and no clock is read."""
        request, aging = sequence.request, self.options.aging_s
        return (request.priority + (request.arrived / aging if aging > 0 else 0.0), sequence.order)

    def schedule(self) -> list[Row]:
        """Rows of the next step; empty when nothing can run.

        Also fills `started`, `preempted`, `expired` (waited too long, removed) and `too_long` (cannot grow although alone; still in
        `running`, to be finished by the caller) for this call.
        """
        self.started, self.preempted, self.too_long, self.expired = [], [], [], []
        self._expire()
        self._admit()
        decoding = self._grow([s for s in self.running if s.decoding])
        prefilling = sorted((s for s in self.running if not s.decoding), key=self.rank)
        return self.batcher.compose(decoding, prefilling)

    def _expire(self) -> None:
        limit = self.options.max_queue_wait_s
        if not limit:
            return
        now = self._clock()
        # A preempted sequence has started; it only waits for room and is never refused.
        self.expired = [s for s in self.waiting if s.times.scheduled is None and now - s.request.arrived > limit]
        for sequence in self.expired:
            self.remove(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_sequences:
            if not self._open(self.waiting[0]):
                return
            self.running.append(self.waiting.pop(0))

    def _open(self, sequence: Sequence) -> bool:
        """Admit one sequence, from scratch, with a prefix hit, or where it was preempted."""
        # Bounded replay is an approximation; exact mode and prompt scoring compute everything themselves.
        reuse = sequence.mode == "bounded" and not sequence.scores_prompt
        saved = sequence.saved
        if saved is not None:
            plan = self.manager.open(sequence.cache, sequence.tokens, at_most=saved.computed)
            if plan is None:
                return False
            if self.manager.contents(sequence.cache) == saved.contents:
                self._restore(sequence)
                sequence.computed, sequence.saved = saved.computed, None
                return True
            # Some of its blocks were evicted, or are another sequence's by now, computed in another way. Compute again just as the first
            # time, so that the text stays the same.
            self.manager.release(sequence.cache)
            sequence.saved = None
        at_most = sequence.resumed_at
        plan = self.manager.open(sequence.cache, sequence.tokens, reuse=reuse and at_most != 0, at_most=at_most)
        if plan is None:
            return False
        sequence.computed = plan.start
        if sequence.resumed_at is None:
            sequence.resumed_at = plan.resume
            sequence.tiers = TierCounts(
                hbm=plan.resume,
                compute=sequence.prompt_tokens - plan.resume,
                window="replay" if plan.resume else "none",
                replayed=plan.replayed,
            )
            sequence.times.scheduled = self._clock()
            self.started.append(sequence)
        return True

    def _grow(self, decoding: list[Sequence]) -> list[Sequence]:
        """Give every decoding sequence room for its next token, preempting the last in order when there is none."""
        order = sorted(decoding, key=self.rank)
        kept: list[Sequence] = []
        for sequence in order:
            if sequence not in self.running:
                continue  # preempted for one before it
            while not self.manager.ensure(sequence.cache, len(sequence.tokens)):
                victim = max(self.running, key=self.rank)
                if victim is sequence and len(self.running) == 1:
                    self.too_long.append(sequence)
                    break
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                kept.append(sequence)
        return [s for s in kept if s in self.running]

    def keep(self, sequence: Sequence) -> bool:
        """Save what `sequence`, which is running, could go on with elsewhere (`sequence.saved`), unless it could not be put back.

        Can be put back: no private blocks (they are lost), no hit that would not be adopted, and no unfinished replay, whose window
        is half of another owner's and whose own blocks would be taken for its unfinished one.
        """
        cache, plan = sequence.cache, sequence.cache.plan
        assert plan is not None
        contents = self.manager.contents(cache)
        adopted = not contents or len(contents) >= self.manager.index.least_hit
        if not (all(contents) and adopted and sequence.computed > plan.resume):
            return False
        self._save(sequence, contents)
        return True

    def fork(self, leader: Sequence) -> None:
        """Give the followers of a sequence that has just computed its prompt what it has; they run on their own from here."""
        followers, leader.followers = leader.followers, []
        if not followers:
            return
        shared = self.keep(leader)
        for follower in followers:
            follower.leader = None
            follower.saved = leader.saved
            # Without the copy it computes the prompt again, and must do so just as the leader did.
            follower.resumed_at = leader.resumed_at
            follower.tiers = TierCounts(hbm=leader.prompt_tokens, window="hbm") if shared else replace(leader.tiers or TierCounts())
            follower.times.scheduled = self._clock()
            follower.prompt_logprobs = list(leader.prompt_logprobs)
        leader.saved = None

    def _preempt(self, sequence: Sequence) -> None:
        """Release a running sequence; it goes on later with the same tokens."""
        self.keep(sequence)
        self.running.remove(sequence)
        self.manager.release(sequence.cache)
        sequence.preemptions += 1
        sequence.computed = 0
        self.add(sequence)
        self.preempted.append(sequence)
