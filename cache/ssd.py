"""SsdStore: the tier that keeps blocks for days, across restarts and crashes, shared by the processes of a host.

Blocks lie in append-only segment files (`segments`, `records`) and are found through a sqlite index (`ssd_index`). Three kinds of
threads work behind this class: a writer (`ssd_writer`), readers (`ssd_reader`) and a keeper (`ssd_keeper`). Nothing here waits for the
disk except `flush`, `reap` and `close` (and `lookup` for the index). No trouble with files, disk or index is raised into a request: it is
counted, and
the block is a miss or is not stored.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.cache.records import PAGE_BYTES, identity_digest, record_bytes
from forebay.cache.segments import StoreDirectory
from forebay.cache.ssd_batch import Limits, StoredBlock
from forebay.cache.ssd_fetch import Fetch
from forebay.cache.ssd_index import SsdIndex
from forebay.cache.ssd_keeper import Keeper
from forebay.cache.ssd_reader import SsdReaders
from forebay.cache.ssd_stats import SsdStats, Totals
from forebay.cache.ssd_writer import MOST_MISSING, RENEW_MS, SsdWriter
from forebay.model.errors import ConfigError

__all__ = ["Fetch", "SsdOptions", "SsdStats", "SsdStore", "StoredBlock", "staging_bytes"]


@dataclass(frozen=True)
class SsdOptions:
    """Where the store lies and what it may take.

    Attributes:
        dir: its directory, made if it is missing.
        budget_bytes: most bytes of segments and index, of all processes together.
        free_bytes: what stays free on the file system; below it blocks are evicted as if the budget were less.
        ttl_s: a block lives at least so long after its last use.
        segment_bytes: largest segment file.
        queue_bytes: most payload bytes accepted and not written yet.
        readers: reader threads.
    """

    dir: Path
    budget_bytes: int
    free_bytes: int = 1 << 30
    ttl_s: float = 72 * 3600.0
    segment_bytes: int = 256 << 20
    queue_bytes: int = 256 << 20
    readers: int = 4


class SsdStore:
    """One process's view of the store.

    Args:
        options: see there.
        identity: equal exactly when stored bytes mean the same: model, tokenizer, encoding, layout.
        block_bytes: payload bytes of a block.
        staging: uint8, C-contiguous, possibly pinned, of `staging_bytes` bytes or more; the store's from now on.
        clock: seconds since the epoch.

    Raises:
        ConfigError: the directory cannot be made or written, or there is no staging memory.
    """

    def __init__(
        self, options: SsdOptions, *, identity: str, block_bytes: int, staging: np.ndarray, clock: Callable[[], float] = time.time
    ) -> None:
        if staging.dtype != np.uint8 or staging.nbytes < staging_bytes(1, block_bytes):
            raise ConfigError(f"The SSD cache needs staging memory for a block of {block_bytes} bytes; raise staging_bytes.")
        self.options = options
        self._clock = clock
        self._identity = identity_digest(identity)
        ttl_ms = int(options.ttl_s * 1000)
        renew_ms = min(RENEW_MS, ttl_ms // 100)
        self._life_ms = ttl_ms + renew_ms
        limits = Limits(options.budget_bytes, options.free_bytes, options.segment_bytes, options.queue_bytes, self._life_ms, renew_ms)
        directory = StoreDirectory(options.dir)
        directory.create()
        self._totals = Totals()
        try:
            self._index = SsdIndex(directory)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"The SSD cache index {directory.index} cannot be used: {error}; set another directory or none.") from error
        self._keeper = Keeper(directory, self._index, self._totals, self._life_ms, clock)
        self._writer = SsdWriter(
            directory, self._index, self._totals, limits, identity=self._identity, block_bytes=block_bytes, clock=clock
        )
        self._readers = SsdReaders(
            directory, self._index, self._totals, identity=self._identity, block_bytes=block_bytes, staging=staging,
            now_ms=self._now_ms, life_ms=self._life_ms,
            touch=self._writer.touch, unreadable=self._writer.unreadable, threads=options.readers,
        )  # fmt: skip
        self._closed = False
        self._last = (0, 0, dict[int, int](), False)
        self._keeper.start()
        self._writer.start()
        self._readers.start()

    def put(
        self, blocks: Sequence[StoredBlock], payload: np.ndarray, tenant: bytes, ready: Callable[[], None] | None = None
    ) -> int:
        """Queue blocks to be written. Never waits, never raises for trouble of the disk.

        Args:
            blocks: heads first.
            payload: [blocks, block_bytes] uint8; not changed by the caller afterwards.
            tenant: 16 bytes.
            ready: called on the writer thread before `payload` is read (waits for a copy from a device).

        Returns:
            Blocks accepted: the first ones. The rest is counted as dropped.
        """
        return self._writer.put(blocks, payload, tenant, ready)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Last use of a chain, heads first, is now. Never waits; reaches the index with the writer's next batch."""
        self._writer.touch(keys)

    def take_missing(self, most: int = MOST_MISSING) -> list[bytes]:
        """Touched keys that turned out not to be stored and have not been taken yet, up to `most`."""
        return self._writer.take_missing(most)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take blocks back that turned out not to be trustworthy: queued or stored, they are gone. Never waits.

        `lookup` does not find them from now on; a `put` after this one counts.
        """
        self._writer.drop(keys)

    def lookup(self, keys: Sequence[bytes], max_lineage: int | None = None) -> list[int]:
        """Lineages of the longest stored, unexpired chain that `keys` starts with. From any thread.

        Args:
            keys: a chain, heads first.
            max_lineage: a block with a deeper one ends the chain.
        """
        if self._closed:
            return []
        try:
            sound = self._writer.sound(keys)  # before the rows are read: a drop that ends meanwhile is not seen in either otherwise
            found = self._index.chain(keys[:sound], self._identity, self._now_ms() - self._life_ms, max_lineage)
            found = found[: self._writer.sound(keys[: len(found)])]
        except (sqlite3.Error, OSError):
            self._totals.io_error("index")
            return []
        self._readers.remember(found)
        return [row.lineage for row in found]

    def fetch(self, keys: Sequence[bytes], wake: Callable[[], None], lineages: Sequence[int] | None = None) -> Fetch:
        """Start reading the blocks of a chain, as found by `lookup`, in order; what is read counts as used.

        Args:
            keys: heads first.
            wake: called on a reader thread whenever there is something to take or the fetch has failed; must not block.
            lineages: as `lookup` told them; a block that turns out to have more replays behind it fails the fetch.
        """
        return self._readers.fetch(keys, wake, lineages)

    def stats(self) -> SsdStats:
        """The numbers of now. If the index cannot be read, the last known of it."""
        if not self._closed:
            with suppress(sqlite3.Error, OSError):
                self._last = (*self._index.totals(), not self._index.is_complete())
        blocks, size, lineages, rebuilding = self._last
        queue_blocks, queue_bytes = self._writer.queue()
        totals = self._totals
        return SsdStats(
            blocks=blocks, bytes=size, lineages=dict(lineages), budget_bytes=self.options.budget_bytes, queue_blocks=queue_blocks,
            queue_bytes=queue_bytes, admitting=self._writer.admitting, rebuilding=rebuilding, reads=totals.counts["reads"],
            read_bytes=totals.counts["read_bytes"], read_seconds=totals.seconds["read"], writes=totals.counts["writes"],
            written_bytes=totals.counts["written_bytes"], write_seconds=totals.seconds["write"], dropped=_by_word(totals.dropped),
            evicted=totals.counts["evicted"], expired=totals.counts["expired"], corrupt=_by_word(totals.corrupt),
            io_errors=_by_word(totals.io_errors), removed_files=totals.counts["removed_files"], refreshed=totals.counts["refreshed"],
        )  # fmt: skip

    def take_ages(self) -> tuple[list[float], list[float]]:
        """Seconds since their last use of blocks hit, and of blocks evicted or expired, since the last call."""
        return self._totals.take_ages()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all puts and touches so far are written (or dropped); False if it takes longer."""
        return self._writer.flush(timeout_s)

    def reap(self) -> None:
        """Delete expired blocks and give their space back, now; the keeper does it every minute. Errors are counted."""
        if self._closed:
            return
        try:
            self._keeper.reap()
        except sqlite3.Error:
            self._totals.io_error("index")
        except OSError:
            self._totals.io_error("write")

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued for at most `timeout_s`, drop the rest, end all threads. Fetches fail. Again is harmless."""
        if self._closed:
            return
        self.stats()
        self._readers.stop(timeout_s)
        self._writer.stop(timeout_s)
        self._keeper.stop(timeout_s)
        self.stats()
        self._closed = True
        self._index.close()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def staging_bytes(rows: int, block_bytes: int) -> int:
    """Memory that holds `rows` blocks on their way from the disk, wherever it begins."""
    return rows * record_bytes(block_bytes) + PAGE_BYTES


def _by_word(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(word): n for word, n in counts.items()}
