"""Who runs: admission, order, preemption (architecture §4, cases B041-B050)."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from forebay.cache.manager import NOTHING, CacheManager
from forebay.cache.replay import KnownWindow, kept_boundaries
from forebay.cache.restore import Restorer
from forebay.cache.snapshot import Snapshot
from forebay.engine.batcher import Batcher, Row
from forebay.engine.options import EngineOptions
from forebay.engine.sequence import Sequence
from forebay.engine.types import TierCounts
from forebay.model.errors import ForebayError

RESTORED_AT_ONCE = 64  # blocks from the SSD store that one step starts copying while sequences decode, so that none waits long for it


class _Short(NamedTuple):
    """Who found no room, and what there was: blocks, windows, and `PrefixIndex.gains`. `edge`: serials of the last block of its history
    that was cached and of the first that was not; as long as they stay, it has the same hit, since tails are evicted before heads."""

    sequence: Sequence
    blocks: int
    windows: int
    gains: int
    edge: list[tuple[bytes, int]]


class Scheduler:
    """Keeps the waiting and the running sequences and decides what the next step covers.

    Order is by priority (lower first), lowered by one for every `aging_s` seconds since arrival, then by arrival. Admission is strict in
    that order: a request that does not fit yet is not overtaken, so it cannot starve. Every admitted sequence holds all of its prompt's
    blocks, so admitted sequences never wait for each other's. Only one whose tiers have not said yet what they have is overtaken: it
    takes no room, and they are given little time.

    Attributes:
        waiting: in order; preempted sequences among them.
        running: those that own a window and blocks, the ones that still wait for blocks from the SSD store included.
        live: windows of running sequences at block boundaries, by the key of the block before.
        started, preempted, too_long, expired, blind: what the last `schedule` did, see there.
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
        restorer: Restorer | None = None,
        live: Mapping[bytes, Snapshot] | None = None,
        embed: Callable[[list[Sequence], int], list[tuple[Sequence, ForebayError]]] | None = None,
    ) -> None:
        """`save` keeps a sequence's window, and what its cached blocks held, before a preemption; `restore` puts it back. `embed` gives
        sequences with images the embeddings that so many of their next positions need, if only some of them, and returns those it cannot
        serve.

        `restorer` finds what tiers beyond the device have; None when there are none. `live` is filled by whoever copies windows.
        """
        self.manager, self.batcher, self.options = manager, batcher, options
        self._save, self._restore, self._clock, self._embed = save, restore, clock, embed
        self.restorer = restorer
        self.live = live if live is not None else {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.started: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.too_long: list[Sequence] = []
        self.expired: list[Sequence] = []
        self.blind: list[tuple[Sequence, ForebayError]] = []
        self._early: list[Sequence] = []  # started since the last `schedule`
        self._short: _Short | None = None
        self._oldest = math.inf  # no later than the earliest arrival among those that wait and have not started

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, whose blocks the outer tiers look for meanwhile."""
        self._queue(sequence)
        if sequence.saved is None and sequence.restore is None:
            self.look_for(sequence)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self.rank)
        if sequence.times.scheduled is None:
            self._oldest = min(self._oldest, sequence.request.arrived)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back what it owns."""
        self.take_out(sequence)
        self.manager.release(sequence.cache)

    def take_out(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; it keeps what it owns."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._forget(sequence)
        sequence.saved = None
        if self._short is not None and self._short.sequence is sequence:
            self._short = None

    def meanwhile(self) -> bool:
        """Between two schedules, while the device runs a step: admit those who first wait for blocks from the SSD store, and start copying
        blocks that came in, since nothing of either is to be computed yet. Who starts is in `started` of the next schedule.

        Returns whether the step after the one that runs may go on with the same sequences; False where it has to be scheduled: somebody
        was or may be admitted whose rows it should have, one has all its blocks or will not get them, or one has waited too long.
        """
        if self._late():
            return False
        before, self.started = self.started, self._early
        try:
            self.manager.pool.copies.collect()
            if not self._admit_restoring():
                return False
            if restoring := [s for s in self.running if s.restoring]:
                self._receive(restoring)
            return all(s.restoring for s in restoring)
        finally:
            self.started = before

    def _admit_restoring(self) -> bool:
        """Admit from the head of the queue as long as it is of no concern to the next step; False if the next one in order is."""
        while (sequence := self._next()) is not None and self._may_fit(sequence):
            saved = sequence.saved
            if saved is not None and not self.manager.reopens(sequence.cache, sequence.tokens, saved.contents):
                self._no_room(sequence)
                break
            if saved is not None:  # what a preempted one had is copied back at once, which may wait for the device
                return False
            if not self._open(sequence):
                break
            self._enter(sequence)
            if not sequence.restoring:
                return False
        return True

    def _next(self) -> Sequence | None:
        """Who is to be admitted next: the first one whose tiers have said what they have. None if nobody is, or all places are taken."""
        if len(self.running) >= self.options.max_sequences:
            return None
        return next((s for s in self.waiting if s.saved is not None or s.restore is None or s.restore.ready), None)

    def _may_fit(self, sequence: Sequence) -> bool:
        """False for one that found no room as long as there is not more and it cannot need less: what others compute of its own history
        is cached, and shared blocks that come into use are no longer counted twice."""
        short, manager = self._short, self.manager
        if short is None or short.sequence is not sequence:
            return True
        if manager.available_blocks() > short.blocks or manager.windows.free > short.windows:
            return True
        return manager.index.gains != short.gains or any(manager.index.serial_of(key) != serial for key, serial in short.edge)

    def _no_room(self, sequence: Sequence) -> None:
        manager, keys = self.manager, sequence.cache.chain.keys
        index, cached = manager.index, len(manager.index.match(keys))
        edge = [(key, index.serial_of(key)) for key in keys[max(0, cached - 1) : cached + 1]]
        self._short = _Short(sequence, manager.available_blocks(), manager.windows.free, index.gains, edge)

    def _late(self) -> list[Sequence]:
        """Those that have waited too long for their start. The queue, which may be long, is looked through only when somebody may have."""
        limit = self.options.max_queue_wait_s
        if not limit or not self.waiting:
            return []
        now = self._clock()
        if now - self._oldest <= limit:
            return []
        # A preempted sequence has started; it only waits for room and is never refused.
        unstarted = [s for s in self.waiting if s.times.scheduled is None]
        self._oldest = min((s.request.arrived for s in unstarted), default=math.inf)
        return [s for s in unstarted if now - s.request.arrived > limit]

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Smaller is sooner. Waiting lowers everybody's rank at the same speed, so the order never changes and no clock is read."""
        request, aging = sequence.request, self.options.aging_s
        return (request.priority + (request.arrived / aging if aging > 0 else 0.0), sequence.order)

    def schedule(self) -> list[Row]:
        """Rows of the next step; empty when nothing can run.

        Also fills `started` (since the last call), `preempted`, `expired` (waited too long, removed), `too_long` (cannot grow although
        alone) and `blind` (an image cannot be embedded, and why) for this call; the last two are still in `running`, to be finished by
        the caller.
        """
        self.started, self._early = self._early, []
        self.preempted, self.too_long, self.expired = [], [], []
        self._expire()
        self.manager.pool.copies.collect()
        restoring = [s for s in self.running if s.restoring]
        self._receive(restoring)
        self._admit()
        self._receive([s for s in self.running if s.restoring and s not in restoring])
        decoding = self._grow([s for s in self.running if s.decoding])
        prefilling = sorted((s for s in self.running if not s.decoding and not s.restoring), key=self.rank)
        self.blind = self._embed([*decoding, *prefilling], self.batcher.encoder_tokens) if self._embed is not None else []
        failed = {sequence for sequence, _ in self.blind}
        return self.batcher.compose(decoding, [s for s in prefilling if s not in failed])

    def _expire(self) -> None:
        self.expired = self._late()
        for sequence in self.expired:
            self.remove(sequence)

    def _admit(self) -> None:
        while (sequence := self._next()) is not None and self._open(sequence):
            self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._short = None

    def _open(self, sequence: Sequence) -> bool:
        """Give one sequence what it needs to run from scratch, with a prefix hit, or from where it was preempted, if there is room."""
        saved = sequence.saved
        if saved is not None:
            reopened = self.manager.reopen(sequence.cache, sequence.tokens, saved.contents, saved.plan)
            if reopened is None:
                self._no_room(sequence)
                return False
            if reopened:
                with self._undone(sequence):
                    self._restore(sequence)
                sequence.computed, sequence.saved = saved.computed, None
                self._choose_copies(sequence)
                return True
            # Some of its blocks were evicted, or are another sequence's by now, computed in another way. Compute again just as the first
            # time, so that the text stays the same.
            sequence.saved = None
            self.look_for(sequence)
            if sequence.restore is not None and not sequence.restore.ready:
                return False
        restore, first = sequence.restore, sequence.first_plan
        if restore is not None and restore.outdated(len(self.manager.index.match(sequence.cache.chain.keys[: restore.start]))):
            self.look_for(sequence)  # blocks it counted on have left the device; the store may have them
            return False
        offer = restore.offer(self._live_windows(sequence)) if restore is not None else NOTHING
        policy = sequence.policy
        if first is not None:
            # Nor may blocks with more replays behind them than the first time take their place.
            replay: Literal["bounded", "exact"] = "exact" if first.faithful else policy.replay
            behind = first.lineage - first.approximates
            most = first.lineage if first.faithful else max(first.lineage, 1)
            policy = replace(policy, replay=replay, max_lineage=behind, max_resumed=most)
            if not first.faithful:
                offer = replace(offer, windows=self._first_window(sequence))
        plan = self.manager.open(
            sequence.cache,
            sequence.tokens,
            prompt_tokens=sequence.prompt_tokens,
            reuse=self._reuses(sequence),
            at_most=first.resume if first is not None else sequence.request.resume_at_most,
            policy=policy,
            offer=offer,
        )
        if plan is None:
            self._no_room(sequence)
            return False
        if plan.boundary is not None:
            with self._undone(sequence):
                window = self._load_window(sequence, plan.boundary, plan.origin == "live", plan.with_decoder)
            sequence.resumed_from = None if plan.faithful else window
        sequence.computed = plan.start
        self._choose_copies(sequence)
        if first is None:
            sequence.first_plan = plan
        if sequence.restoring:
            assert restore is not None
            restore.admitted()
        else:
            self._start(sequence)
        return True

    @contextmanager
    def _undone(self, sequence: Sequence) -> Iterator[None]:
        """Take an admission back if what is left of it fails, so that it can be tried again."""
        try:
            yield
        except BaseException:
            self.manager.release(sequence.cache)
            raise

    def _start(self, sequence: Sequence) -> None:
        """All it needs is in: count where it came from, the first time, and let go of the tiers."""
        self._forget(sequence)
        if sequence.tiers is not None:
            return
        cache, size = sequence.cache, self.manager.layout.block_tokens
        plan = cache.plan
        assert plan is not None
        now = self._clock()
        ssd = size * sum(key in cache.from_ssd for key in cache.chain.keys[: plan.resume // size])
        sequence.tiers = TierCounts(
            hbm=plan.resume - ssd,
            ssd=ssd,
            compute=sequence.prompt_tokens - plan.resume,
            window=plan.origin,
            replayed=plan.replayed,
            lineage=plan.lineage if plan.faithful else max(plan.lineage, 1),
            restore_s=max(0.0, now - sequence.request.arrived) if ssd else 0.0,
        )
        sequence.times.scheduled = now
        self.started.append(sequence)

    def _receive(self, restoring: list[Sequence]) -> None:
        """Start copying blocks that came in from the SSD store to the sequences that wait for them."""
        copies = self.manager.pool.copies
        hurried = any(s.decoding for s in self.running)
        for sequence in restoring:
            restore = sequence.restore
            assert restore is not None
            came = restore.take(max(1, RESTORED_AT_ONCE // len(restoring)) if hurried else None)
            wanted = [(number, torch.from_numpy(data), restore.lineages[number - restore.start]) for number, data in came]
            loading = sequence.cache.loading
            self.manager.load(sequence.cache, [block for block in wanted if block[0] in loading])
            if came:
                copies.after(partial(restore.free, [number for number, _ in came]))
            failed = restore.failed_at()
            if not sequence.restoring:
                self._start(sequence)
            elif restore.stalled or (failed is not None and failed <= sequence.cache.loading.start):
                self._settle(sequence)
        if not hurried:
            copies.wait()  # nobody is kept from a step, and readers may wait for the memory

    def _settle(self, sequence: Sequence) -> None:
        """Go back to the queue, to be admitted with what has come: the rest will not."""
        assert sequence.restore is not None
        self.running.remove(sequence)
        self.manager.release(sequence.cache)
        if sequence.tiers is None:
            sequence.first_plan = sequence.resumed_from = None
        sequence.restore.cancel()  # from now on it offers no blocks; those that came are on the device
        self._queue(sequence)

    def _reuses(self, sequence: Sequence) -> bool:
        """Scoring a prompt takes all its rows; what began without a hit must go on without one."""
        first = sequence.first_plan
        return not sequence.scores_prompt and (first is None or first.resume > 0)

    def look_for(self, sequence: Sequence) -> None:
        """Ask the outer tiers for what the device lacks of a sequence. Changes nothing else, so another thread may call it for a new one:
        what a step alters meanwhile is noticed at admission."""
        if self.restorer is None or not self.manager.prefix_reuse or not self._reuses(sequence):
            return
        size, first, chain = self.manager.layout.block_tokens, sequence.first_plan, sequence.cache.chain
        chain.extend(sequence.tokens)
        most = sequence.request.resume_at_most if first is None else first.resume
        upto = (sequence.prompt_tokens - 1 if most is None else min(sequence.prompt_tokens - 1, most)) // size
        keys = chain.keys[:upto]
        held = len(self.manager.index.match(keys, sequence.policy.max_lineage))
        live = [known.boundary for known in self._live_windows(sequence) if not known.lineage]  # for others Redis may have a better one
        windows = first is None or (first.faithful and first.origin != "replay")
        tries = sequence.restore.tries if sequence.restore is not None else 0
        self._forget(sequence)
        sequence.restore = self.restorer.start(keys, held, sequence.prompt_tokens, sequence.policy, windows=windows, live=live)
        sequence.restore.tries = tries + 1

    def _forget(self, sequence: Sequence) -> None:
        if sequence.restore is not None:
            sequence.restore.cancel()
            sequence.restore = None

    def _live_windows(self, sequence: Sequence) -> list[KnownWindow]:
        """Windows of running sequences at boundaries of this sequence's own history."""
        keys, size = sequence.cache.chain.keys, self.manager.layout.block_tokens
        found = []
        for key, window in list(self.live.items()):
            number = window.boundary // size - 1
            if number < len(keys) and keys[number] == key:
                found.append(KnownWindow(window.boundary, "live", window.lineage, window.decoder_floor))
        return found

    def _first_window(self, sequence: Sequence) -> tuple[KnownWindow, ...]:
        """The window that its first admission resumed from, as an offer."""
        window, first = sequence.resumed_from, sequence.first_plan
        if window is None or first is None:
            return ()
        origin: Literal["live", "swa"] = "live" if first.origin == "live" else "swa"
        return (KnownWindow(window.boundary, origin, window.lineage, window.decoder_floor),)

    def _load_window(self, sequence: Sequence, boundary: int, live: bool, with_decoder: bool) -> Snapshot:
        """Put the window of a plan into the sequence's slot."""
        key = sequence.cache.chain.keys[boundary // self.manager.layout.block_tokens - 1]
        if sequence.resumed_from is not None:
            window = sequence.resumed_from
        elif live:
            window = self.live[key]
        else:
            assert sequence.restore is not None
            window = sequence.restore.windows[boundary]
        window.wait()
        decoder = _tensor(window.decoder) if with_decoder and window.decoder is not None else None
        self.manager.windows.load(sequence.cache.slot, _tensor(window.encoder), decoder)
        return window

    def _choose_copies(self, sequence: Sequence) -> None:
        """Choose where its window is copied while its known tokens are computed; generated ones are copied as they come."""
        plan = sequence.cache.plan
        if self.restorer is None or self.restorer.pool is None or plan is None or not self.manager.prefix_reuse:
            return
        places = {*kept_boundaries(sequence.prompt_tokens, self.manager.geometry)}
        if sequence.generated:
            places |= {*kept_boundaries(len(sequence.tokens), self.manager.geometry)}
        # Before the resume point a replayed window is not what it should be.
        sequence.copy_at = sorted(p for p in places if p > sequence.computed and p >= plan.windows_from and p not in sequence.windows)

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
        if sequence.restoring or not (all(contents) and adopted and sequence.computed > plan.resume):
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
            follower.first_plan, follower.resumed_from = leader.first_plan, leader.resumed_from
            lineage = leader.first_plan.lineage if leader.first_plan is not None else 0
            lent = TierCounts(hbm=leader.prompt_tokens, window="live", lineage=lineage)
            follower.tiers = lent if shared else replace(leader.tiers or TierCounts())
            follower.times.scheduled = self._clock()
            follower.prompt_logprobs = list(leader.prompt_logprobs)
        leader.saved = None

    def _preempt(self, sequence: Sequence) -> None:
        """Release a running sequence; it goes on later with the same tokens."""
        self.keep(sequence)
        self._forget(sequence)
        self.running.remove(sequence)
        self.manager.release(sequence.cache)
        if sequence.tiers is None:  # it had not begun
            sequence.first_plan = sequence.resumed_from = None
        sequence.preemptions += 1
        sequence.computed = 0
        sequence.embeddings = [None] * len(sequence.embeddings)
        self.add(sequence)
        self.preempted.append(sequence)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor; torch does not take memory that may not be written, as received bytes are."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
