"""A step ahead: while the device runs a step, the host settles the one before.

Only steps of nothing but generated tokens run ahead, of sequences whose next choice needs no token on the host. The token that a step
chose stays on the device and feeds the next one. Whoever turns out to have ended, or to have been given another token, has a row in flight
that is void: nothing of it is accepted, its position is never declared computed, and what its sequence owns is given back only when that
step is done.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from torch import Tensor

from forebay.cache.manager import CacheManager
from forebay.engine.batcher import Row
from forebay.engine.device_sampler import Sampled, launch
from forebay.engine.reservoir import Reservoir
from forebay.engine.runner import Runner
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Sequence

log = logging.getLogger("forebay.engine")


@dataclass
class Flight:
    """A step that was launched and is not settled.

    Attributes:
        copies: windows at block boundaries, taken before a later step could change them.
        void: sequences whose row counts for nothing although they go on.
    """

    rows: list[Row]
    sampled: Sampled
    copies: dict[Sequence, Tensor]
    members: frozenset[Sequence] = field(init=False)
    void: set[Sequence] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = frozenset(row.sequence for row in self.rows)


class Flights:
    """Launches steps, one ahead at most.

    Attributes:
        current: the step in flight.
        leaving: sequences that ended while a row of theirs was in flight, and whether what they computed may stay cached.
    """

    def __init__(
        self, runner: Runner, manager: CacheManager, scheduler: Scheduler, reservoir: Reservoir | None, known: dict[str, Sequence]
    ) -> None:
        self.runner, self.manager, self.scheduler, self.reservoir, self._known = runner, manager, scheduler, reservoir, known
        self.current: Flight | None = None
        self.leaving: list[tuple[Sequence, bool]] = []

    def may_fly(self, rows: list[Row]) -> bool:
        """Whether a step may be left to the device: every row adds a token to an output and needs nothing from the host for it."""
        return bool(rows) and all(row.wants_logits and row.sequence.decoding and row.sequence.sampling.foreseeable for row in rows)

    def launch(self, rows: list[Row], before: Flight | None = None) -> Flight:
        """Launch a step; with `before` its rows continue that flight's, whose tokens nobody has seen."""
        tokens, ahead = None, 0
        if before is not None:
            tokens, ahead = before.sampled.tokens, 1
            places = {row.sequence: place for place, row in enumerate(before.rows)}
            chosen = [places[row.sequence] for row in rows]
            if len(chosen) < len(before.rows):
                tokens = self.runner.pick(tokens, chosen)
        logits, _ = self.runner.run(rows) if tokens is None else self.runner.run(rows, tokens=tokens)
        sampled = launch(logits, [row.sequence.sampling for row in rows], [row.sequence.sampling.generated + ahead for row in rows])
        copies: dict[Sequence, Tensor] = {}
        if self.reservoir is not None:
            for row in rows:
                if self.reservoir.wants_window(row.sequence, row.stop):
                    copies[row.sequence] = self.manager.windows.copy(row.sequence.cache.slot)
        return Flight(rows, sampled, copies)

    def ahead(self, flight: Flight) -> Flight | None:
        """Launch the step after `flight`, which is not settled; None where something else has to come first.

        Sequences that wait do not come first: neither those for which there is no room, nor those whose blocks come from the SSD store.
        Copying these to the device is started while it is busy.
        """
        scheduler = self.scheduler
        live = [row for row in flight.rows if self.alive(flight, row.sequence)]
        waiting = sum(s.restoring for s in scheduler.running) if len(live) != len(scheduler.running) else 0
        if len(live) + waiting != len(scheduler.running) or not self._meanwhile():
            return None
        rows, size = [], self.manager.layout.block_tokens
        for row in live:
            sequence, start = row.sequence, row.stop
            if sequence.generated + 1 >= sequence.limit:
                continue  # the flight's token is its last
            if start >= len(sequence.cache.table) * size and not self.manager.ensure(sequence.cache, start + 1):
                return None  # somebody has to make room
            floors = max(row.write_from, start), row.window_from, row.decoder_from, row.decoder_window_from
            rows.append(Row(sequence, start, start + 1, *floors, True))
        return self.launch(rows, flight) if rows else None

    def _meanwhile(self) -> bool:
        """`Scheduler.meanwhile`, whose failure is not the flight's: the next schedule does the same, and fails by itself if it has to."""
        try:
            return self.scheduler.meanwhile()
        except Exception:
            log.exception("admission beside a step failed and is tried again before the next one")
            return False

    def alive(self, flight: Flight, sequence: Sequence) -> bool:
        """Whether its row of the flight counts."""
        return self._known.get(sequence.id) is sequence and sequence not in flight.void

    def holds(self, sequence: Sequence) -> bool:
        """Whether a step in flight may still write to what the sequence owns."""
        return self.current is not None and sequence in self.current.members

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """Give back what an ended sequence owns, as soon as nothing in flight writes to it."""
        self.leaving.append((sequence, keep))

    def let_go(self) -> None:
        """Give back what those own that nothing in flight writes to any more."""
        for sequence, keep in self.leaving:
            if not self.holds(sequence):
                self.manager.release(sequence.cache, keep=keep)
        self.leaving = [(sequence, keep) for sequence, keep in self.leaving if self.holds(sequence)]

    def drop(self) -> None:
        """Wait for the step in flight and forget what it gave."""
        flight, self.current = self.current, None
        if flight is not None:
            with contextlib.suppress(Exception):  # whatever is wrong with the device, the next step says so
                flight.sampled.wait()
        self.let_go()
