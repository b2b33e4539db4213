"""The writer: takes blocks off the step loop, appends them to a segment in batches and enters them in the index.

A batch is one reservation (a transaction that makes room), one write, and one transaction that acknowledges it. Until then its place
in the segment is not used up: an error or a crash in between leaves bytes that the next batch, or the next start, removes.
Nothing is synced per batch: the page cache outlives a killed process, and after a power loss checksums tell what did not reach the disk.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from forebay.cache.records import HEADER_BYTES, Header, checksum, pack_header, record_bytes
from forebay.cache.segments import SegmentWriter, StoreDirectory
from forebay.cache.ssd_batch import Batch, IndexReplaced, Item, Limits, Put, StoredBlock
from forebay.cache.ssd_graves import bury
from forebay.cache.ssd_index import INDEX_BYTES_PER_BLOCK, Row, SsdIndex, used_bytes
from forebay.cache.ssd_stats import Drop, Totals

BATCH_BYTES = 16 << 20
PAUSE_S = 1.0  # after an error nothing is admitted for so long
RENEW_MS = 60_000  # a chain used again within this time is not renewed in the index; the TTL is longer by as much
MOST_TOUCHES = 1 << 20  # keys that wait to be touched
MOST_MISSING = 1 << 16  # the latest ones
EVICTED_AT_ONCE = 256

log = logging.getLogger("forebay.cache")


class SsdWriter:
    """One thread that writes. All public methods are thread-safe and none but `flush` and `stop` waits."""

    def __init__(
        self, directory: StoreDirectory, index: SsdIndex, totals: Totals, limits: Limits, *, identity: bytes, block_bytes: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._index = index
        self._totals = totals
        self._limits = limits
        self._identity = identity
        self._block_bytes = block_bytes
        self._record_bytes = record_bytes(block_bytes)
        self._batch_blocks = max(1, min(BATCH_BYTES, limits.segment_bytes) // self._record_bytes)
        self._filler = np.zeros(self._record_bytes - HEADER_BYTES - block_bytes, np.uint8)
        self._clock = clock
        self._wake = threading.Condition()
        self._puts: deque[Put] = deque()
        self._touches: deque[tuple[list[bytes], int]] = deque()
        self._touch_keys = 0
        self._doomed: Counter[bytes] = Counter()  # keys taken back that the index may still have
        self._drops: deque[list[bytes]] = deque()
        self._queued: Counter[bytes] = Counter()  # keys accepted and not written yet: touching them is not a miss
        self._missing: deque[bytes] = deque(maxlen=MOST_MISSING)
        self._paused_until = 0.0
        self.unreadable: set[bytes] = set()  # keys whose records the readers could not read: written again when put again
        self._suspended = False  # by trouble with the disk or the index; told once
        self._pause_reason: Drop = "io_error"
        self._accepted = 0  # puts and touches
        self._settled = 0
        self._closing_at: float | None = None  # monotonic time at which the queue is dropped
        self._segment: SegmentWriter | None = None
        self._segment_id = 0  # in the index; a new index may give the same number to another segment
        self._disk = ThreadPoolExecutor(1, "forebay-ssd-disk")
        self._writing: Batch | None = None
        self._unused: list[tuple[int, int, str]] = []  # bytes charged to segments (number, name) for writes that failed
        self._segment_generation = 0
        self._thread = threading.Thread(target=self._run, name="forebay-ssd-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def admitting(self) -> bool:
        return self._closing_at is None and time.monotonic() >= self._paused_until

    def queue(self) -> tuple[int, int]:
        """Blocks and bytes accepted and not written yet."""
        with self._wake:
            blocks = self._queued.total()
        return blocks, blocks * self._block_bytes

    def put(self, blocks: Sequence[StoredBlock], payload: np.ndarray, tenant: bytes, ready: Callable[[], None] | None) -> int:
        """Queue as many of `blocks` as fit, heads first; returns how many."""
        with self._wake:
            if not self.admitting:
                self._totals.drop("closed" if self._closing_at is not None else self._pause_reason, len(blocks))
                return 0
            room = self._limits.queue_bytes // self._block_bytes - self._queued.total()
            n = max(0, min(len(blocks), room))
            if n < len(blocks):
                self._totals.drop("queue_full", len(blocks) - n)
            if n:
                self._puts.append(Put(list(blocks[:n]), list(range(n)), payload, tenant, ready, int(self._clock() * 1000)))
                self._queued.update(block.key for block in blocks[:n])
                self._accepted += 1
                self._wake.notify_all()
            return n

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._wake:
            if keys and self._closing_at is None and self._touch_keys + len(keys) <= MOST_TOUCHES:
                self._touches.append((list(keys), int(self._clock() * 1000)))
                self._touch_keys += len(keys)
                self._accepted += 1
                self._wake.notify_all()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, queued and stored; a batch being written now is followed by their deletion."""
        gone = set(keys)
        with self._wake:
            if not gone or self._closing_at is not None:
                return
            for put in self._puts:
                kept = [i for i, block in enumerate(put.blocks) if block.key not in gone]
                if len(kept) < len(put.blocks):
                    self._unqueue([block.key for block in put.blocks if block.key in gone])
                    put.blocks, put.rows = [put.blocks[i] for i in kept], [put.rows[i] for i in kept]
            self._drops.append(list(gone))
            self._doomed.update(gone)
            self._accepted += 1
            self._wake.notify_all()

    def sound(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` come before the first one that is being dropped."""
        if not self._doomed:
            return len(keys)
        with self._wake:
            return next((i for i, key in enumerate(keys) if key in self._doomed), len(keys))

    def take_missing(self, most: int) -> list[bytes]:
        with self._wake:
            return [self._missing.popleft() for _ in range(min(most, len(self._missing)))]

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything accepted so far is settled; False if it took longer."""
        with self._wake:
            target = self._accepted
            self._wake.wait_for(lambda: self._settled >= target or not self._thread.is_alive(), timeout_s)
            return self._settled >= target

    def stop(self, timeout_s: float) -> None:
        """Write what is queued for at most `timeout_s`, drop the rest, and end the thread."""
        with self._wake:
            self._closing_at = time.monotonic() + timeout_s
            self._wake.notify_all()
        self._thread.join(timeout_s + 1.0)

    def _run(self) -> None:
        """Prepare one batch while the one before it is being written."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._writing is not None or self._has_work())
                pause = self._paused_until - time.monotonic()
                if pause > 0 and self._closing_at is None and self._writing is None:
                    self._wake.wait_for(lambda: self._closing_at is not None, pause)
                if self._closing_at is not None and (not self._has_queue() or time.monotonic() > self._closing_at):
                    break
                drops = [key for keys in self._drops for key in keys]
                settled = len(self._drops)
                self._drops.clear()
                puts, touches, taken = self._take_batch()
            batch = Batch([block.key for put in puts for block in put.blocks], settled + taken)
            self._guarded(batch, lambda puts=puts, batch=batch: self._prepare(puts, batch))  # type: ignore[misc]
            self._finish()
            self._forget(drops)
            self._renew_all(touches)
            self._guarded(batch, lambda batch=batch: self._begin(batch))  # type: ignore[misc]
            if batch.write is None:
                self._settle(batch)
            else:
                self._writing = batch
        self._finish()
        self._end()

    def _guarded(self, batch: Batch, work: Callable[[], None]) -> None:
        """Whatever a broken disk, database or device brings: the blocks of the batch are not stored, and that is all."""
        if batch.failed:
            return
        started = time.monotonic()
        try:
            work()
        except Exception as error:
            batch.failed = True
            self._suspend(error, len(batch.keys))
        self._totals.spend("write", time.monotonic() - started)

    def _finish(self) -> None:
        """Wait for the batch that is being written, and acknowledge it."""
        batch, self._writing = self._writing, None
        if batch is None:
            return
        self._guarded(batch, lambda: self._complete(batch))
        if not batch.failed:
            if self._suspended:
                self._suspended = False
                log.warning("the SSD store writes again")
            self._totals.add("writes", len(batch.fresh))
            self._totals.add("written_bytes", len(batch.fresh) * self._block_bytes)
        self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        with self._wake:
            self._unqueue(batch.keys)
            self._settled += batch.settles
            self._wake.notify_all()

    def _renew_all(self, touches: list[tuple[list[bytes], int]]) -> None:
        try:
            self._renew(touches)
        except (sqlite3.Error, OSError):
            self._totals.io_error("index")

    def _has_queue(self) -> bool:
        return bool(self._puts or self._touches or self._drops)

    def _has_work(self) -> bool:
        return self._has_queue() or self._closing_at is not None

    def _take_batch(self) -> tuple[list[Put], list[tuple[list[bytes], int]], int]:
        """Whole puts up to a batch, the last one possibly in part, and all touches; with how many entries that settles."""
        touches = list(self._touches)
        self._touches.clear()
        self._touch_keys = 0
        settled = len(touches)
        puts: list[Put] = []
        room = self._batch_blocks
        while self._puts and room:
            put = self._puts[0]
            n = min(room, len(put.blocks))
            room -= n
            if n == len(put.blocks):
                puts.append(self._puts.popleft())
                settled += 1
            else:
                puts.append(Put(put.blocks[:n], put.rows[:n], put.payload, put.tenant, put.ready, put.now_ms))
                put.blocks, put.rows = put.blocks[n:], put.rows[n:]
        return puts, touches, settled

    def _unqueue(self, keys: list[bytes]) -> None:
        self._queued.subtract(keys)
        for key in keys:
            if self._queued[key] <= 0:
                del self._queued[key]

    def _forget(self, keys: list[bytes]) -> None:
        """Delete blocks that were taken back. If the index refuses now, they stay hidden and are tried again after a pause."""
        if not keys:
            return
        try:
            with self._index.transaction() as db:
                if not db.execute("SELECT complete FROM state").fetchone()[0]:  # their records may be found yet
                    db.executemany("INSERT OR IGNORE INTO dropped VALUES (?)", [(key,) for key in keys])
                db.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])
            bury(self._directory, self._index)
        except sqlite3.Error:
            self._totals.io_error("index")
            with self._wake:
                self._drops.append(keys)
                self._accepted += 1
                self._paused_until = time.monotonic() + PAUSE_S
            return
        except OSError:
            self._totals.io_error("write")
        with self._wake:
            self._doomed.subtract(keys)
            self._doomed += Counter()  # without those at zero

    def _prepare(self, puts: list[Put], batch: Batch) -> None:
        """Collect what is to be stored, with checksums."""
        items: dict[bytes, Item] = {}
        now = self._clock()
        for put in puts:
            if put.ready is not None:
                put.ready()
            for block, row in zip(put.blocks, put.rows, strict=True):
                same = items.get(block.key)
                if same is None or same.block.lineage > block.lineage:
                    payload = put.payload[row]
                    header = pack_header(Header(
                        self._identity, put.tenant, block.key, block.depth, block.lineage, self._block_bytes, checksum(payload), now
                    ))  # fmt: skip
                    items[block.key] = Item(block, header, payload, put.tenant, put.now_ms)
        batch.items = list(items.values())

    def _suspend(self, error: Exception, blocks: int) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        full = full or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        self._totals.io_error("index" if isinstance(error, sqlite3.Error) else "write")
        reason: Drop = "no_space" if full else "io_error"
        self._totals.drop(reason, blocks)
        if not self._suspended:
            self._suspended = True
            log.warning("the SSD store cannot write (%s): new blocks are not stored until it can", error)
        self._pause_reason = reason
        self._paused_until = time.monotonic() + PAUSE_S
        if self._segment is not None and self._writing is None:
            self._segment.cut()
            if isinstance(error, sqlite3.Error):  # the index may not know it
                self._segment_generation = -1

    def _begin(self, batch: Batch) -> None:
        """Renew what is stored already, make room for the rest, and start writing it."""
        if not batch.items:
            return
        batch.fresh, evicted = self._reserve(batch.items)
        batch.items = []
        if evicted:
            bury(self._directory, self._index)
        if batch.fresh:
            assert self._segment is not None
            parts = [part for item in batch.fresh for part in (np.frombuffer(item.header, np.uint8), item.payload, self._filler)]
            batch.write = self._disk.submit(self._segment.write, parts)

    def _complete(self, batch: Batch) -> None:
        """Wait until a batch is written, and enter it in the index."""
        segment = self._segment
        assert segment is not None and batch.write is not None
        size = len(batch.fresh) * self._record_bytes
        try:
            batch.write.result()
            with self._index.transaction() as db:
                self._acknowledge(db, segment, batch.fresh)
        except BaseException:
            self._unused.append((size, self._segment_id, segment.name))
            with suppress(sqlite3.Error, OSError), self._index.transaction() as db:
                self._give_back(db)
            raise
        segment.stop += size

    def _give_back(self, db: sqlite3.Connection) -> None:
        """Take what was charged for failed writes off their segments; what the index refuses now is tried again with the next batch."""
        unused = list(self._unused)
        db.executemany("UPDATE segments SET bytes = max(0, bytes - ?) WHERE id = ? AND name = ?", unused)
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        self._unused = self._unused[len(unused) :]

    def _acknowledge(self, db: sqlite3.Connection, segment: SegmentWriter, items: list[Item]) -> None:
        owners = {tenant: self._index.owner(db, self._identity, tenant) for tenant in {item.tenant for item in items}}
        at = segment.stop
        rows = []
        for item in items:
            block = item.block
            rows.append((
                block.key, self._segment_id, at, self._block_bytes, owners[item.tenant], block.depth, block.lineage, item.now_ms
            ))  # fmt: skip
            at += self._record_bytes
        db.executemany("DELETE FROM blocks WHERE key = ?", [(item.block.key,) for item in items])
        db.executemany("INSERT INTO blocks(key, segment, offset, length, owner, depth, lineage, used_at) VALUES (?,?,?,?,?,?,?,?)", rows)
        if not db.execute("UPDATE segments SET stop = ? WHERE id = ? AND name = ?", (at, self._segment_id, segment.name)).rowcount:
            raise IndexReplaced

    def _reserve(self, items: list[Item]) -> tuple[list[Item], int]:
        """Make room for what has to be written; returns that, and how many blocks were evicted for it."""
        evicted = 0
        with self._index.transaction() as db:
            if self._unused:
                self._give_back(db)
            known = self._index.rows_in(db, [item.block.key for item in items])
            fresh = [item for item in items if not self._is_stored(known.get(item.block.key), item)]
            if len(fresh) < len(items):
                new = {item.block.key for item in fresh}
                renewed = [(item.now_ms, item.block.key) for item in items if item.block.key not in new]
                db.executemany("UPDATE blocks SET used_at = max(used_at, ?) WHERE key = ?", renewed)
                self._totals.add("refreshed", len(renewed))
            if fresh:
                evicted = self._make_room(db, fresh)
            if fresh:
                self._take_segment(db, len(fresh) * self._record_bytes)
        return fresh, evicted

    def _is_stored(self, row: Row | None, item: Item) -> bool:
        if row is None or row.identity != self._identity or row.length != self._block_bytes:
            return False
        if item.block.key in self.unreadable:
            self.unreadable.discard(item.block.key)
            return False
        return row.lineage <= item.block.lineage and row.used_at >= item.now_ms - self._limits.life_ms

    def _make_room(self, db: sqlite3.Connection, fresh: list[Item]) -> int:
        """Evict the least recently used blocks, tails before heads, or give up the deepest of `fresh` if those are worth less."""
        cost = self._record_bytes + INDEX_BYTES_PER_BLOCK
        over_budget = used_bytes(db) - self._limits.budget_bytes
        over_floor = self._limits.free_bytes - self._directory.free_bytes()
        evicted = 0
        freed = 0
        while fresh and (need := max(over_budget, over_floor) + len(fresh) * cost - freed) > 0:
            n = min(EVICTED_AT_ONCE, -(-need // cost))
            least = db.execute("SELECT id, used_at, depth, length FROM blocks ORDER BY used_at, depth DESC LIMIT ?", (n,)).fetchall()
            now_ms = self._clock() * 1000
            for block, used_at, depth, length in least:
                worst = max(fresh, key=lambda item: (-item.now_ms, item.block.depth))
                if (-used_at, depth) < (-worst.now_ms, worst.block.depth):
                    fresh.remove(worst)
                    self._totals.drop("no_space", 1)
                    break
                db.execute("DELETE FROM blocks WHERE id = ?", (block,))
                freed += record_bytes(length) + INDEX_BYTES_PER_BLOCK
                evicted += 1
                self._totals.removed_at([(now_ms - used_at) / 1000])
            if not least:
                fresh.remove(max(fresh, key=lambda item: (-item.now_ms, item.block.depth)))
                self._totals.drop("no_space", 1)
        self._totals.add("evicted", evicted)
        return evicted

    def _take_segment(self, db: sqlite3.Connection, size: int) -> None:
        """Have a segment with room for `size` bytes, which are charged to it."""
        segment = self._segment
        full = segment is not None and segment.stop and segment.stop + size > self._limits.segment_bytes
        if segment is None or full or self._segment_generation != self._index.generation or os.fstat(segment.fd).st_nlink == 0:
            if segment is not None:
                self._segment = None
                segment.close()
            self._segment = segment = SegmentWriter(self._directory)
            self._segment_generation = self._index.generation
            row = db.execute("INSERT INTO segments(name) VALUES (?)", (segment.name,)).lastrowid
            assert row is not None
            self._segment_id = row
        charge = size, self._segment_id, segment.name
        if not db.execute("UPDATE segments SET bytes = bytes + ? WHERE id = ? AND name = ?", charge).rowcount:
            raise IndexReplaced

    def _renew(self, touches: list[tuple[list[bytes], int]]) -> None:
        for keys, now_ms in touches:
            rows = self._index.rows(keys)
            alive = [rows[key] for key in keys if key in rows and rows[key].used_at >= now_ms - self._limits.life_ms]
            if len(alive) < len(keys):
                known = {row.key for row in alive}
                with self._wake:
                    self._missing.extend(key for key in keys if key not in known and key not in self._queued)
            # A head must never look older than its tail, or it is evicted first and the tail is worth nothing.
            ordered = all(above.used_at >= below.used_at for above, below in itertools.pairwise(alive))
            if ordered and all(row.used_at > now_ms - self._limits.renew_ms for row in alive):
                continue
            with self._index.transaction() as db:
                db.executemany("UPDATE blocks SET used_at = max(used_at, ?) WHERE key = ?", [(now_ms, row.key) for row in alive])
            self._totals.add("refreshed", len(alive))

    def _end(self) -> None:
        with self._wake:
            dropped = self._queued.total()
            if dropped:
                self._totals.drop("closed", dropped)
            self._queued.clear()
            self._puts.clear()
        self._disk.shutdown()
        if self._segment is not None:
            with suppress(OSError):
                os.fdatasync(self._segment.fd)
            self._segment.close()
            self._segment = None

