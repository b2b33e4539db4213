"""What the SSD store counts."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.cache.records import FAULTS, Fault

Drop = Literal["queue_full", "no_space", "io_error", "closed"]
Operation = Literal["read", "write", "index"]
DROPS: tuple[Drop, ...] = ("queue_full", "no_space", "io_error", "closed")
OPERATIONS: tuple[Operation, ...] = ("read", "write", "index")

MOST_AGES = 65536  # kept until taken


@dataclass(frozen=True)
class SsdStats:
    """A look at the store. The first group is of now and of all processes that share the directory, the rest of this process.

    Attributes:
        blocks, bytes: stored, bytes as charged against `budget_bytes` (allocated pages and the index).
        lineages: stored blocks by lineage; the last one counts deeper ones too.
        queue_blocks, queue_bytes: accepted and not written yet.
        admitting: False while writing is suspended after an error.
        rebuilding: True while the index is being read back from the records.
        reads, read_bytes, read_seconds: blocks read and found sound, their payload bytes, and the time of all reader threads in reading.
        writes, written_bytes, write_seconds: the same of blocks written and acknowledged.
        dropped: blocks offered and not stored, by reason.
        evicted, expired: blocks removed for space, and for age.
        corrupt: blocks that were not what they should be and were deleted, by kind.
        io_errors: errors of the system or the index, by operation.
        removed_files: unknown or half-written files removed.
        refreshed: blocks whose last use was renewed.
    """

    blocks: int
    bytes: int
    lineages: dict[int, int]
    budget_bytes: int
    queue_blocks: int
    queue_bytes: int
    admitting: bool
    rebuilding: bool
    reads: int
    read_bytes: int
    read_seconds: float
    writes: int
    written_bytes: int
    write_seconds: float
    dropped: dict[str, int]
    evicted: int
    expired: int
    corrupt: dict[str, int]
    io_errors: dict[str, int]
    removed_files: int
    refreshed: int


class Totals:
    """The totals since the start, added to by every thread of a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.seconds = {"read": 0.0, "write": 0.0}
        self.dropped: dict[Drop, int] = dict.fromkeys(DROPS, 0)
        self.corrupt: dict[Fault, int] = dict.fromkeys(FAULTS, 0)
        self.io_errors: dict[Operation, int] = dict.fromkeys(OPERATIONS, 0)
        self._ages_at_hit: deque[float] = deque(maxlen=MOST_AGES)
        self._ages_at_removal: deque[float] = deque(maxlen=MOST_AGES)

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self.counts[name] += n

    def spend(self, name: Literal["read", "write"], seconds: float) -> None:
        with self._lock:
            self.seconds[name] += seconds

    def drop(self, reason: Drop, n: int) -> None:
        with self._lock:
            self.dropped[reason] += n

    def corruption(self, kind: Fault, n: int = 1) -> None:
        with self._lock:
            self.corrupt[kind] += n

    def io_error(self, operation: Operation) -> None:
        with self._lock:
            self.io_errors[operation] += 1

    def hit_at(self, ages: Sequence[float]) -> None:
        with self._lock:
            self._ages_at_hit.extend(ages)

    def removed_at(self, ages: Sequence[float]) -> None:
        with self._lock:
            self._ages_at_removal.extend(ages)

    def take_ages(self) -> tuple[list[float], list[float]]:
        """Seconds since the last use of blocks hit, and of blocks evicted or expired, since the last call."""
        with self._lock:
            ages = list(self._ages_at_hit), list(self._ages_at_removal)
            self._ages_at_hit.clear()
            self._ages_at_removal.clear()
        return ages
