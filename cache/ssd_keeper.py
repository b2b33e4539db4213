"""The keeper: the background thread that keeps the SSD store in order.

It rebuilds a lost index, deletes expired blocks, destroys dead records, and moves sqlite's log into the database, so that neither
requests nor the writer ever do. Of all processes that share a directory, one at a time keeps it (a lock file).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

from forebay.cache.segments import StoreDirectory
from forebay.cache.ssd_graves import bury, forget_segments
from forebay.cache.ssd_index import SsdIndex
from forebay.cache.ssd_recovery import missing_segments, rebuild, tidy
from forebay.cache.ssd_stats import Totals
from forebay.model.errors import ConfigError

TICK_S = 1.0
REAP_EVERY_S = 60.0  # of the clock, or a hundredth of the TTL if that is less
EXPIRED_AT_ONCE = 512
LARGEST_LOG = 64 << 20  # bytes of sqlite's write-ahead log
LOCK = "keeper"


class Keeper:
    """Args: life_ms: how long after its recorded last use a block is served. clock: seconds since the epoch."""

    def __init__(self, directory: StoreDirectory, index: SsdIndex, totals: Totals, life_ms: int, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._index = index
        self._totals = totals
        self._life_ms = life_ms
        self._clock = clock
        self._reap_every = min(REAP_EVERY_S, life_ms / 1000 / 100)
        self._reaped_at = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-ssd-keeper", daemon=True)
        self._log_seen = self._checkpointed = 0
        self._tidied = 0  # generation of the index

    def start(self) -> None:
        """Tidy up if the index is whole (milliseconds), then go on in the background."""
        self._guarded(self._tidy_if_complete)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stop.set()
        self._thread.join(timeout_s)

    def reap(self) -> None:
        """Delete expired blocks and destroy what is dead, now.

        Raises:
            OSError, sqlite3.Error
        """
        with self._directory.lock(LOCK, wait=True):
            self._reap()

    def _run(self) -> None:
        self._guarded(self._index.warm)
        while not self._stop.is_set():
            self._guarded(self._tick)
            self._stop.wait(TICK_S)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except sqlite3.Error:
            self._totals.io_error("index")
        except (OSError, ConfigError):
            self._totals.io_error("write")

    def _tick(self) -> None:
        if not self._directory.segments.is_dir():  # somebody removed it
            self._directory.create()
        if self._tidied != self._index.generation or not self._index.is_complete():
            with self._directory.lock(LOCK, wait=False) as ours:
                if not ours:
                    return
                if not self._index.is_complete():
                    rebuild(self._directory, self._index, lambda: int(self._clock() * 1000), self._stop.is_set)
            self._tidy_if_complete()
        if abs(self._clock() - self._reaped_at) >= self._reap_every:
            with self._directory.lock(LOCK, wait=False) as ours:
                if ours:
                    self._reap()
        self._checkpoint_if_idle()

    def _checkpoint_if_idle(self) -> None:
        """A checkpoint syncs, and on most file systems that means all that was written: not while the writer writes, if that can be."""
        size, written = self._index.log_state()
        if written != self._checkpointed and (written == self._log_seen or size > LARGEST_LOG):
            self._index.checkpoint()
            self._checkpointed = self._index.log_state()[1]
        self._log_seen = written

    def _tidy_if_complete(self) -> None:
        if self._index.is_complete():
            generation = self._index.generation
            self._totals.add("removed_files", tidy(self._directory, self._index))
            self._tidied = generation

    def _reap(self) -> None:
        now = self._clock()
        while not self._stop.is_set():
            with self._index.transaction() as db:
                expired = db.execute(
                    "DELETE FROM blocks WHERE id IN (SELECT id FROM blocks WHERE used_at < ? LIMIT ?) RETURNING used_at",
                    (int(now * 1000) - self._life_ms, EXPIRED_AT_ONCE),
                ).fetchall()
            if not expired:
                break
            self._totals.add("expired", len(expired))
            self._totals.removed_at([now - used_at / 1000 for (used_at,) in expired])
        missing = missing_segments(self._directory, self._index)
        if missing:
            with self._index.transaction() as db:
                self._totals.corruption("missing", forget_segments(db, missing))
        bury(self._directory, self._index)
        self._reaped_at = now
