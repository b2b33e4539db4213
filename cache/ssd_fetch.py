"""Fetch: the blocks of one chain on their way from the disk, as their consumer sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from forebay.cache.ssd_index import Row

if TYPE_CHECKING:
    from forebay.cache.ssd_reader import SsdReaders


class State(Enum):
    READING = 0
    LOADED = 1
    FAILED = 2


@dataclass(eq=False)
class Load:
    """One block on its way into, or in, a staging row; shared by every fetch that wants it."""

    key: bytes
    row: int
    place: Row | None  # where it lies; None if it is not stored any more
    fetches: list[Fetch] = field(default_factory=list)  # one entry per position that needs it
    state: State = State.READING
    began: float | None = None  # time.monotonic() at which a reader took it


class Fetch:
    """The blocks of one chain, being read. Filled by reader threads and consumed by one other thread; nothing here blocks.

    Attributes:
        keys: what is fetched, heads first.
        failed_at: first position that could not be read, or None; nothing at or after it will come.
    """

    def __init__(self, readers: SsdReaders, keys: Sequence[bytes], wake: Callable[[], None], lineages: Sequence[int] | None = None) -> None:
        self.keys = list(keys)
        self.lineages = None if lineages is None else list(lineages)  # deepest that is wanted of each block
        self.failed_at: int | None = None
        self._readers = readers
        self._wake = wake
        self._loads: dict[int, Load] = {}  # positions that hold a row, up to `free`
        self._places: dict[bytes, Row] = {}  # of planned positions
        self._planned = 0  # positions before it have been looked up
        self._planning = False
        self._asked = 0  # positions before it have been given to a reader
        self._taken = 0
        self._promoted = False
        self._cancelled = False

    @property
    def finished(self) -> bool:
        """Nothing more will come from `take`: all was taken, or all before `failed_at`, or the fetch was cancelled."""
        return self._cancelled or self._taken >= self._stop

    @property
    def still_since(self) -> float:
        """time.monotonic() since when its next block has not moved: since the read of it began, or while it waits for its turn, since a
        block came in for anybody."""
        load = self._loads.get(self._taken)
        return self._readers.moved_at if load is None or load.began is None else load.began

    def take(self, most: int | None = None) -> list[tuple[int, np.ndarray]]:
        """Blocks loaded since the last call, in order and without gaps; the first `most` of them.

        Returns:
            Positions in `keys`, each with a [block_bytes] uint8 view of its staging row, valid until `free`.
        """
        return self._readers.take(self, most)

    def free(self, positions: Iterable[int]) -> None:
        """Give back the rows of positions that were taken and copied (copies to a device finished). Known ones only; again is harmless."""
        self._readers.free(self, positions)

    def promote(self) -> None:
        """The request was admitted: from now on this fetch may use every staging row and goes before those that wait."""
        self._readers.promote(self)

    def cancel(self) -> None:
        """Stop. Reads under way end in rows that are then free; rows taken stay the caller's until `free`. Again is harmless."""
        self._readers.cancel(self)

    @property
    def _stop(self) -> int:
        return len(self.keys) if self.failed_at is None else self.failed_at
