"""The SWA pool: snapshots in Redis for some minutes. Whatever Redis does, a request sees a snapshot in time or a miss.

Who does what. Callers of `get` hand their keys to one of a few reader threads and wait for at most the deadline: an answer that comes
later lands in memory nobody else has and is thrown away. `put` only queues; one writer thread packs, sends, refreshes, deletes what is
damaged, and probes a server that was found ill. While the breaker is open no caller waits at all.

Time to live is kept twice. Redis expires a key `ttl_s` after its last read by its own clock. The value says when it was stored or
refreshed by ours, and is not used `ttl_s` later, nor when the read itself took that long: a reader that was stopped for minutes must
not use what it was about to fetch. So that hits prolong this too, a snapshot read after a tenth of its time is stored again.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from forebay.cache.breaker import Breaker, BreakerState
from forebay.cache.redis_link import LinkFailure, RedisLink
from forebay.cache.snapshot import BAD_KINDS, KEY_BYTES, BadSnapshot, Snapshot, SnapshotShape, SnapshotShapeError, check_shape, pack, unpack
from forebay.cache.swa_writer import LATENCIES_KEPT, Store, SwaWriter
from forebay.model.errors import ConfigError

KEY_PREFIX = b"forebay:w1:"
WRITE_TIMEOUTS = 4  # a store may take this many times `timeout_s`: nobody waits for it, and it should not call a busy server ill
REFRESH_AFTER = 0.1  # of the time to live

MISSES = ("absent", "breaker", "timeout", "error", "bad")


@dataclass(frozen=True)
class SwaOptions:
    """
    Attributes:
        url: redis://, rediss:// or unix://, with user, password and database.
        cluster: `url` is one node of a cluster.
        ttl_s: seconds a snapshot lives after its last use.
        timeout_s: longest a `get` takes.
        connect_timeout_s: longest wait for a connection, within `timeout_s`.
        queue_bytes: snapshots waiting to be stored.
        readers: threads, and so connections, that read.
    """

    url: str
    cluster: bool = False
    ttl_s: float = 600.0
    timeout_s: float = 0.05
    connect_timeout_s: float = 0.05
    queue_bytes: int = 256 << 20
    readers: int = 4


@dataclass(frozen=True)
class SwaStats:
    """Totals since the start, and what is the case now (the last three).

    Attributes:
        misses: by reason (`MISSES`); one for every `get` that returned None.
        expired: snapshots found and not used because their time was over by our clock; their misses are "absent".
        refreshed: snapshots stored again because they were used.
        dropped: snapshots not stored, by reason (`swa_writer.DROPS`).
        bad: values found damaged or foreign, and deleted, by `BAD_KINDS`.
        opened: times the breaker opened.
        queue_bytes, queue_snapshots: waiting to be stored.
    """

    hits: int
    misses: dict[str, int]
    expired: int
    stores: int
    refreshed: int
    dropped: dict[str, int]
    bad: dict[str, int]
    read_bytes: int
    written_bytes: int
    opened: int
    breaker: BreakerState
    queue_bytes: int
    queue_snapshots: int


@dataclass
class _Read:
    """One `get` on its way through a reader thread. Whoever sets `settled` first (under the pool's lock) decides how it ended."""

    keys: Sequence[bytes]
    done: threading.Event = field(default_factory=threading.Event)
    started_at: float | None = None
    settled: bool = False
    found: tuple[bytes, Snapshot] | None = None
    miss: str = "absent"


class SwaPool:
    """Snapshots by key. All methods may be called from any thread; `get`, `put` and `stats` never raise because of Redis."""

    def __init__(self, options: SwaOptions, *, identity: str, shape: SnapshotShape, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            identity: what the rows depend on beside the tokens: model, tokenizer, encoder, layout. Another identity never hits.
            clock: seconds since the epoch.

        Raises:
            ConfigError: the URL or another option cannot be used. A server that is not there is no error.
        """
        for name in ("ttl_s", "timeout_s", "connect_timeout_s", "queue_bytes", "readers"):
            if not 0 < getattr(options, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(options, name)}", param=name)
        self.options = options
        self._identity = blake3(identity.encode()).digest()[:16]
        self._shape = shape
        self._clock = clock
        self._ttl_ms = max(1, round(options.ttl_s * 1000))
        self._breaker = Breaker(closed=not options.cluster)  # a cluster can be used after the first probe, which finds its nodes
        self._reads = self._link(1)
        self._writes = self._link(WRITE_TIMEOUTS)
        self._lock = threading.Lock()  # guards the counters and the ends of reads; never held during I/O
        self._hits = self._expired = self._read_bytes = 0
        self._misses = dict.fromkeys(MISSES, 0)
        self._bad: dict[str, int] = dict.fromkeys(BAD_KINDS, 0)
        self._seconds: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._closing = False
        self._progress_at = 0.0  # time.monotonic() at which a reader last ended a read
        self._writer = SwaWriter(
            self._writes, self._probe, self._breaker, lambda key, store: pack(store.snapshot, key, self._identity, shape, store.written_at),
            prefix=KEY_PREFIX, ttl_s=options.ttl_s, queue_bytes=options.queue_bytes, clock=clock,
        )  # fmt: skip
        self._jobs: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        # Daemons: a thread that is stuck in a name lookup must not keep the process alive.
        self._readers = [threading.Thread(target=self._read_loop, name=f"swa-read-{i}", daemon=True) for i in range(options.readers)]
        for thread in self._readers:
            thread.start()

    def get(self, keys: Sequence[bytes], deadline_s: float | None = None) -> tuple[bytes, Snapshot] | None:
        """The first of `keys` (in order of preference) whose snapshot is there and sound, and that snapshot.

        Its rows must not be changed. Takes at most `deadline_s`, and never more than `timeout_s`, in all.
        """
        if not keys:
            return None
        began = time.monotonic()
        wait_s = min(self.options.timeout_s, math.inf if deadline_s is None else deadline_s)
        waiting = self._writer.queued(keys)
        queued = None if waiting is None else (keys[waiting[0]], waiting[1])
        asked = keys if waiting is None else keys[: waiting[0]]
        if not asked or self._closing or not self._breaker.allows() or wait_s <= 0:
            miss = "error" if self._closing else "timeout" if wait_s <= 0 else "breaker"
            return self._account(queued, miss)
        job = _Read(asked)
        self._jobs.put(job)
        job.done.wait(wait_s)
        with self._lock:
            late = not job.settled
            job.settled = True
        seconds = time.monotonic() - began
        if late:
            # Readers report failures themselves, but they may be stuck where no timeout of a socket reaches, such as a name lookup: this
            # one, or all of them, so that none has taken the job or ended another since.
            waits_since = job.started_at or max(began, self._progress_at)
            if time.monotonic() - waits_since > 0.9 * self.options.timeout_s:
                self._writer.failed(timed_out=True)
            return self._account(queued, "timeout", seconds)
        return self._account(job.found or queued, job.miss, seconds)

    def put(self, key: bytes, snapshot: Snapshot) -> bool:
        """Queue `snapshot` for storing under `key`; False if it was dropped, which is counted. Its rows must not change afterwards.

        One with replays behind it is stored only where there is none: it must not replace a better one.

        Raises:
            SnapshotShapeError: the rows are not of the pool's shape, or the key has not 32 bytes.
        """
        check_shape(snapshot, self._shape)
        if len(key) != KEY_BYTES:
            raise SnapshotShapeError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        return self._writer.put(key, Store(snapshot, self._clock()))

    def drop(self, key: bytes) -> None:
        """Take back a snapshot that turned out not to be trustworthy, queued or stored. Never waits."""
        self._writer.drop(key)

    def stats(self) -> SwaStats:
        w = self._writer.counts()
        with self._lock:
            return SwaStats(
                self._hits, dict(self._misses), self._expired, w.stores, w.refreshed, w.dropped, dict(self._bad), self._read_bytes,
                w.written_bytes, self._breaker.opened, self._breaker.state, w.queue_bytes, w.queue_snapshots,
            )  # fmt: skip

    def take_latencies(self) -> tuple[list[float], list[float]]:
        """Seconds of every get that asked Redis, and of every store, since the last call (the latest few thousand of each)."""
        with self._lock:
            taken = list(self._seconds)
            self._seconds.clear()
        return taken, self._writer.take_latencies()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be stored; False if something still does."""
        return self._writer.flush(timeout_s)

    def purge(self) -> int:
        """Delete every snapshot in Redis (of all models and tenants) and in the queue; the number deleted from Redis.

        Raises:
            LinkFailure: Redis could not be asked; some may be left.
        """
        return self._writer.purge()

    def close(self, timeout_s: float = 2.0) -> None:
        """Store what is queued, for at most `timeout_s`, and stop. Idempotent."""
        self._closing = True
        self._writer.close(timeout_s)
        for _ in self._readers:
            self._jobs.put(None)
        for thread in self._readers:
            thread.join(self.options.timeout_s)
        self._reads.close()
        self._writes.close()

    def _link(self, timeouts: int) -> RedisLink:
        o = self.options
        connect_timeout_s = min(o.connect_timeout_s, o.timeout_s)
        return RedisLink(o.url, cluster=o.cluster, timeout_s=o.timeout_s * timeouts, connect_timeout_s=connect_timeout_s)

    def _probe(self, key: bytes) -> None:
        for link in (self._reads, self._writes):
            link.drop_idle()
            link.connect()
            link.fetch(key, self._ttl_ms)

    def _account(self, found: tuple[bytes, Snapshot] | None, miss: str, seconds: float | None = None) -> tuple[bytes, Snapshot] | None:
        with self._lock:
            if found is None:
                self._misses[miss] += 1
            else:
                self._hits += 1
            if seconds is not None:
                self._seconds.append(seconds)
        return found

    # The reader threads

    def _read_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.settled:  # its caller has gone
                    continue
                job.started_at = time.monotonic()
            found: tuple[bytes, Snapshot] | None = None
            miss = "error"
            with contextlib.suppress(Exception):  # no memory for the rows, say: a miss, and the thread lives on
                found, miss = self._read(job)
            with self._lock:
                self._progress_at = time.monotonic()
                if not job.settled:
                    job.settled = True
                    job.found, job.miss = found, miss
            job.done.set()

    def _read(self, job: _Read) -> tuple[tuple[bytes, Snapshot] | None, str]:
        """What the keys of `job` lead to, and why nothing was found if nothing was."""
        miss = "absent"
        for key in job.keys:
            if job.settled:
                return None, "timeout"
            began = self._clock()
            try:
                value = self._reads.fetch(KEY_PREFIX + key, self._ttl_ms)
                self._breaker.succeeded()
                if value is None:
                    continue
                with self._lock:
                    self._read_bytes += len(value)
                snapshot = unpack(value, key, self._identity, self._shape)
            except LinkFailure as failure:
                if failure.kind != "foreign":
                    self._reads.drop_idle()
                    self._writer.failed(timed_out=failure.kind == "timeout")
                    return None, "timeout" if failure.kind == "timeout" else "error"
                miss = self._discard(key, BadSnapshot("header"))
                continue
            except BadSnapshot as bad:
                miss = self._discard(key, bad)
                continue
            now = self._clock()
            if now >= min(began, snapshot.written_at) + self.options.ttl_s:
                with self._lock:
                    self._expired += 1
                continue
            if now - snapshot.written_at > REFRESH_AFTER * self.options.ttl_s:
                self._writer.put(key, Store(snapshot, now, refresh=True))
            return (key, snapshot), miss
        return None, miss

    def _discard(self, key: bytes, bad: BadSnapshot) -> str:
        with self._lock:
            self._bad[bad.kind] += 1
        self._writer.doom(key)
        return "bad"
