"""The writing half of the SWA pool: a bounded queue of snapshots, and the one thread that talks to Redis when nobody waits.

It stores what is queued, deletes what was found damaged, and probes a server that was found ill: at most one of these at a time.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.cache.breaker import Breaker
from forebay.cache.redis_link import LinkFailure, RedisLink
from forebay.cache.snapshot import Snapshot

DROPS = ("queue_full", "breaker", "oom", "error")
LATENCIES_KEPT = 4096
DELETES_KEPT = 1024


@dataclass(frozen=True)
class Store:
    """A snapshot waiting to be stored. `refresh`: it is in Redis already, and only its time starts again."""

    snapshot: Snapshot
    written_at: float
    refresh: bool = False

    @property
    def only(self) -> Literal["XX", "NX"] | None:
        """A refresh needs a value to refresh. A window with replays behind it must not take the place of a better one, such as one that
        was only not found in time."""
        return "XX" if self.refresh else "NX" if self.snapshot.lineage else None


@dataclass
class WriterCounts:
    """Totals since the start, and the queue now; see `SwaStats`."""

    stores: int
    refreshed: int
    dropped: dict[str, int]
    written_bytes: int
    queue_bytes: int
    queue_snapshots: int


class SwaWriter:
    """Thread-safe. Nothing here waits for Redis but the thread itself, `flush`, `purge` and `close`."""

    def __init__(
        self,
        link: RedisLink,
        probe: Callable[[bytes], None],
        breaker: Breaker,
        pack: Callable[[bytes, Store], memoryview],
        *,
        prefix: bytes,
        ttl_s: float,
        queue_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            probe: raises LinkFailure unless the server is well; gets the name of a key that does not exist.
            pack: the stored value of a queued snapshot; called in the thread.
            prefix: of the names of all keys in Redis.
        """
        self._link = link
        self._probe_server = probe
        self._breaker = breaker
        self._pack = pack
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._most_bytes = queue_bytes
        self._clock = clock
        self._changed = threading.Condition()  # its lock guards everything below and is never held during I/O
        self._queue: dict[bytes, Store] = {}  # in the order of arrival
        self._doomed: dict[bytes, None] = {}  # keys to delete, in the order of arrival
        self._counts = WriterCounts(0, 0, dict.fromkeys(DROPS, 0), 0, 0, 0)
        self._seconds: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._closing = False
        self._flush_until = math.inf
        self._sending = threading.Lock()  # held while a snapshot is on its way, so that a purge is not overtaken
        # A daemon: a thread that is stuck in a name lookup must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="swa-write", daemon=True)
        self._thread.start()

    def queued(self, keys: Sequence[bytes]) -> tuple[int, Snapshot] | None:
        """Place in `keys` of the first that waits to be stored, and its snapshot."""
        with self._changed:
            for place, key in enumerate(keys):
                store = self._queue.get(key)
                if store is not None and self._clock() < store.written_at + self._ttl_s:
                    return place, store.snapshot
        return None

    def put(self, key: bytes, store: Store) -> bool:
        """Queue; False if it was dropped, which is counted unless it is a refresh. What waits with fewer replays behind it stays."""
        with self._changed:
            before = self._queue.get(key)
            if before is not None and (store.refresh or before.snapshot.lineage < store.snapshot.lineage):
                return not store.refresh
            wanted = self._counts.queue_bytes + store.snapshot.nbytes - (0 if before is None else before.snapshot.nbytes)
            if self._closing:
                reason = "error"
            elif not self._breaker.allows():
                reason = "breaker"
            elif wanted > self._most_bytes:
                reason = "queue_full"
            else:
                self._queue[key] = store
                self._counts.queue_bytes = wanted
                self._changed.notify_all()
                return True
            self._counts.dropped[reason] += not store.refresh
            return False

    def doom(self, key: bytes) -> None:
        """Delete the value of `key` from Redis, unless one that will replace it is on its way there."""
        with self._changed:
            store = self._queue.get(key)
            if store is None or store.only == "NX":
                self._delete_soon(key)

    def drop(self, key: bytes) -> None:
        """Take a snapshot back, queued or stored."""
        with self._changed:
            store = self._queue.pop(key, None)
            if store is not None:
                self._counts.queue_bytes -= store.snapshot.nbytes
            self._delete_soon(key)

    def failed(self, *, timed_out: bool) -> None:
        """Tell the breaker of a failed call; if that opens it, a probe is planned."""
        if self._breaker.failed(timed_out=timed_out):
            with self._changed:
                self._changed.notify_all()

    def counts(self) -> WriterCounts:
        with self._changed:
            now = self._counts
            return WriterCounts(now.stores, now.refreshed, dict(now.dropped), now.written_bytes, now.queue_bytes, len(self._queue))

    def take_latencies(self) -> list[float]:
        """Seconds of every store since the last call (the latest few thousand)."""
        with self._changed:
            taken = list(self._seconds)
            self._seconds.clear()
            return taken

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be stored or deleted; False if something still does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._doomed, timeout_s)

    def purge(self) -> int:
        """Delete all keys of ours from the queue and from Redis; the number deleted from Redis. Raises LinkFailure."""
        with self._sending:
            with self._changed:
                self._forget_queue()
            self._link.connect()
            return self._link.purge(self._prefix)

    def close(self, timeout_s: float) -> None:
        """Store what is queued, for at most about `timeout_s` and only while the server is well, and stop. Idempotent."""
        with self._changed:
            self._flush_until = time.monotonic() + timeout_s
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s + 1.0)

    def _delete_soon(self, key: bytes) -> None:
        if len(self._doomed) < DELETES_KEPT:
            self._doomed[key] = None
        self._changed.notify_all()

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._counts.queue_bytes = 0
        self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        unique = secrets.token_hex(4).encode()
        for number in itertools.count():
            with self._changed:
                while not self._has_work():
                    if self._closing:
                        self._counts.dropped["error"] += sum(not store.refresh for store in self._queue.values())
                        self._forget_queue()
                        return
                    self._changed.wait(self._breaker.probe_due_in())
                well = self._breaker.allows()
                doomed = next(iter(self._doomed)) if well and self._doomed else None
                key, store = next(iter(self._queue.items())) if well and doomed is None and self._queue else (b"", None)
            if doomed is not None:
                self._delete(doomed)
            elif store is not None:
                self._send(key, store)
            elif self._breaker.try_probe():
                # A name of its own for every probe: in a cluster they go to all nodes in turn.
                self._probe(self._prefix + b"probe:" + unique + b"%d" % number)

    def _has_work(self) -> bool:
        if self._breaker.allows():
            return bool(self._doomed or self._queue) and time.monotonic() < self._flush_until
        return self._breaker.probe_due_in() == 0.0 and not self._closing

    def _probe(self, key: bytes) -> None:
        try:
            self._probe_server(key)
        except LinkFailure:
            self._breaker.probed(well=False)
        else:
            self._breaker.probed(well=True)

    def _delete(self, key: bytes) -> None:
        try:
            self._link.delete(self._prefix + key)
        except LinkFailure as failure:
            self._link.drop_idle()
            self.failed(timed_out=failure.kind == "timeout")
        with self._changed:
            del self._doomed[key]
            self._changed.notify_all()

    def _send(self, key: bytes, store: Store) -> None:
        reason: str | None = None
        stored = False
        began = time.monotonic()
        with self._sending:
            with self._changed:
                if self._queue.get(key) is not store:  # replaced or purged since it was chosen
                    return
            if self._clock() < store.written_at + self._ttl_s:
                try:
                    stored = self._link.store(self._prefix + key, self._pack(key, store), self._ttl_ms, store.only)
                    self._breaker.succeeded()
                except LinkFailure as failure:
                    reason = "oom" if failure.kind == "oom" else "error"
                    if failure.kind != "oom":  # a full server still serves what it has
                        self._link.drop_idle()
                        self.failed(timed_out=failure.kind == "timeout")
                except MemoryError:
                    reason = "error"
        with self._changed:
            if self._queue.get(key) is store:
                del self._queue[key]
                self._counts.queue_bytes -= store.snapshot.nbytes
            if stored:
                self._counts.stores += not store.refresh
                self._counts.refreshed += store.refresh
                self._counts.written_bytes += store.snapshot.nbytes
                self._seconds.append(time.monotonic() - began)
            elif reason is not None:
                self._counts.dropped[reason] += not store.refresh
            self._changed.notify_all()
