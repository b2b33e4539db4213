"""What the tiers beyond the device have for a waiting request, found out while it waits.

A worker thread asks the SSD store how far it knows the request's chain of keys, lets it begin to read, and asks the snapshot pool for a
window at the place where the request would resume. The step loop only looks at what is there: it never waits for a disk or a server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from forebay.cache.manager import Offer, Policy
from forebay.cache.replay import Geometry, KnownWindow, wanted_boundaries
from forebay.cache.snapshot import Snapshot
from forebay.cache.ssd import Fetch, SsdStore
from forebay.cache.swa import SwaPool

LOOKUP_DEADLINE_S = 1.0  # a request does not wait longer for tiers to say what they have
TRIES = 3
MOST_LOOKUPS = 1024  # under way; if a disk hangs, requests beyond these are computed and nothing piles up
STALL_S = 2.0  # nor for a block that is being read

log = logging.getLogger("forebay.cache")


class Restore:
    """One request's dealings with the outer tiers. Filled by a worker thread until `ready`, then used by the step loop alone.

    Attributes:
        start: number of the first block that the device did not have when this began.
        lineages: of the consecutive blocks from `start` on that the SSD store has.
        windows: snapshots by boundary.
        tries: how often its request has been looked for.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.lineages: list[int] = []
        self.windows: dict[int, Snapshot] = {}
        self.tries = 1
        self._fetch: Fetch | None = None
        self._found = threading.Event()
        self._lock = threading.Lock()
        self._cancelled = False
        self._begun = self._moved = time.monotonic()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def ready(self) -> bool:
        """Whether it is known what there is; a tier that does not say so in time is passed over."""
        if self._found.is_set():
            return True
        if time.monotonic() - self._begun < LOOKUP_DEADLINE_S:
            return False
        self.cancel()
        return True

    def offer(self, live: Sequence[KnownWindow] = ()) -> Offer:
        """For `CacheManager.open`. `live`: windows of running sequences."""
        if not self._found.is_set():
            return Offer(windows=tuple(live))
        stored = [KnownWindow(w.boundary, "swa", w.lineage, w.decoder_floor) for w in self.windows.values()]
        return Offer(self.start, () if self._cancelled else tuple(self.lineages), (*live, *stored))

    def admitted(self) -> None:
        """Its request has memory now, so it may use all of the staging memory."""
        self._moved = time.monotonic()
        if self._fetch is not None:
            self._fetch.promote()

    def outdated(self, held: int) -> bool:
        """Whether to look again, since the device has only the first `held` of the blocks before `start` by now. Not for ever."""
        return held < self.start and self.tries < TRIES

    def take(self, most: int | None = None) -> list[tuple[int, np.ndarray]]:
        """Blocks that have come in since the last call, at most `most`: (number, [block_bytes] uint8 array). `free` them once copied."""
        if self._fetch is None:
            return []
        came = [(self.start + position, data) for position, data in self._fetch.take(most)]
        if came:
            self._moved = time.monotonic()
        return came

    def free(self, numbers: Sequence[int]) -> None:
        if self._fetch is not None:
            self._fetch.free([number - self.start for number in numbers])

    def failed_at(self) -> int | None:
        """Number of the first block that will not come, None while all may."""
        if self._fetch is None or self._cancelled:
            return self.start
        if self._fetch.failed_at is not None:
            return self.start + self._fetch.failed_at
        return None

    @property
    def stalled(self) -> bool:
        """Whether nothing has come for so long that computing is the better way. Waiting behind others while the disk works is not it."""
        still_since = self._moved if self._fetch is None else max(self._moved, self._fetch.still_since)
        return time.monotonic() - still_since > STALL_S

    def begin(self, fetch: Fetch) -> None:
        with self._lock:
            self._fetch = fetch
            if self._cancelled:
                fetch.cancel()

    def done(self) -> None:
        self._found.set()

    def cancel(self) -> None:
        """Give everything back; idempotent."""
        with self._lock:
            self._cancelled = True
            if self._fetch is not None:
                self._fetch.cancel()


class Restorer:
    """Starts `Restore`s. Either tier may be missing."""

    def __init__(
        self, geometry: Geometry, store: SsdStore | None, pool: SwaPool | None, wake: Callable[[], None], threads: int = 4
    ) -> None:
        """`wake` is called from other threads whenever a step could go on."""
        self.geometry, self.store, self.pool = geometry, store, pool
        self._wake = wake
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="forebay-restore")
        self._room = threading.Semaphore(MOST_LOOKUPS)

    def start(
        self, keys: Sequence[bytes], held: int, prompt_tokens: int, policy: Policy, *, windows: bool = True, live: Sequence[int] = ()
    ) -> Restore:
        """Look for what the device lacks of a prompt.

        Args:
            keys: of the blocks it could use, heads first.
            held: how many of them the device has.
            windows: whether a snapshot would be taken; `live`: boundaries of windows that running sequences have.
        """
        restore = Restore(held)
        if not keys or (held == len(keys) and not (windows and self.pool)) or not self._room.acquire(blocking=False):
            restore.done()
        else:
            self._threads.submit(self._find, restore, list(keys), held, prompt_tokens, policy, windows, frozenset(live))
        return restore

    def _find(
        self, restore: Restore, keys: list[bytes], held: int, prompt_tokens: int, policy: Policy, windows: bool, live: frozenset[int]
    ) -> None:
        try:
            if restore.cancelled:
                return
            missing = keys[held:]
            if self.store is not None and missing:
                restore.lineages = self.store.lookup(missing, policy.max_lineage)
                if restore.lineages:
                    restore.begin(self.store.fetch(missing[: len(restore.lineages)], self._wake, tuple(restore.lineages)))
            if self.pool is not None and windows:
                self._find_window(restore, keys, held + len(restore.lineages), prompt_tokens, policy, live)
        except Exception:  # a tier that breaks is a tier that has nothing
            log.exception("looking for cached blocks failed")
        finally:
            self._room.release()
            restore.done()
            self._wake()

    def _find_window(self, restore: Restore, keys: list[bytes], hit: int, prompt_tokens: int, policy: Policy, live: frozenset[int]) -> None:
        assert self.pool is not None
        size = self.geometry.block_tokens
        places = wanted_boundaries(prompt_tokens, hit * size, self.geometry, policy.prefill)
        if not places or places[0] in live:
            return
        by_key = {keys[place // size - 1]: place for place in places}
        found = self.pool.get(list(by_key))
        if found is not None:
            key, snapshot = found
            if snapshot.boundary == by_key[key]:
                restore.windows[snapshot.boundary] = snapshot

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
