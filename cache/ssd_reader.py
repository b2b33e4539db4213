"""The readers: threads that bring blocks from segments into staging memory, ahead of the step loop that consumes them.

A `Fetch` is one request's chain. Readers take work from the admitted fetches first, in the order in which they came. A job's blocks are
read in the order in which they lie, neighbours with one `preadv` call, around the page cache and straight into staging rows: a row has
room for the whole record, so nothing is copied on the way. Several threads read at once, which is what keeps a disk busy. Two fetches
of one block share a read and a row. Rows limit what is in flight: unpromoted fetches hold at most half of them together, so an admitted
one, whose rows come back with every step, can always go on.
"""

from __future__ import annotations

import errno
import itertools
import sqlite3
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from forebay.cache.records import HEADER_BYTES, Fault, record_bytes, record_fault, unpack_header
from forebay.cache.segments import SegmentFiles, StoreDirectory, align
from forebay.cache.ssd_fetch import Fetch, Load, State
from forebay.cache.ssd_index import Row, SsdIndex
from forebay.cache.ssd_stats import Totals

_T = TypeVar("_T")

JOB_BYTES = 2 << 20
MOST_RECORDS = 1000  # of one preadv, which takes 1,024 vectors at most
FIRST_PLAN = 64  # blocks looked up before the first is read, then PLAN at once, at most PLANNED_AHEAD before they are asked for
PLAN = 256
PLANNED_AHEAD = 512
MOST_PLANNED = 1024  # at once, of a chain that does not lie in order: the more are known, the more of them are neighbours

MOST_UNREADABLE = 1 << 16
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)  # troubles of the process, not of a segment

MOST_REMEMBERED = 16  # lookups
REMEMBERED_S = 10.0


@dataclass
class _Run:
    """Neighbours in a segment, as read, and how many bytes of the run there were."""

    blocks: list[tuple[Row, Load]]
    got: int


class SsdReaders:
    """The reader threads and the staging rows.

    Args:
        staging: uint8, C-contiguous; as many records as it holds are its rows.
        now_ms: the clock.
        life_ms: blocks last used longer ago are expired.
        touch: called with keys that were read, to renew them.
        unreadable: gets the keys of blocks that are there and cannot be read; what is put under such a key is written once more.
        threads: number of readers.
    """

    def __init__(
        self, directory: StoreDirectory, index: SsdIndex, totals: Totals, *, identity: bytes, block_bytes: int,
        staging: np.ndarray, now_ms: Callable[[], int], life_ms: int, touch: Callable[[Sequence[bytes]], None], unreadable: set[bytes],
        threads: int,
    ) -> None:  # fmt: skip
        self._index = index
        self._totals = totals
        self._identity = identity
        self._block_bytes = block_bytes
        self._record_bytes = record_bytes(block_bytes)
        memory = align(staging.reshape(-1))
        rows = len(memory) // self._record_bytes
        self._staging = memory[: rows * self._record_bytes].reshape(rows, self._record_bytes)
        self._now_ms = now_ms
        self._life_ms = life_ms
        self._touch = touch
        self._unreadable = unreadable
        self._job_blocks = max(1, min(JOB_BYTES // self._record_bytes, MOST_RECORDS))
        self._turn = threading.Lock()  # held by the thread that picks work
        self._work = threading.Condition()
        self._free_rows = list(range(rows))
        self._waiting_share = rows // 2  # rows that unpromoted fetches may hold together
        self._waiting_rows = 0  # positions of unpromoted fetches that hold a row; two may share one
        self._loads: dict[bytes, Load] = {}
        self._found: OrderedDict[bytes, tuple[float, Sequence[Row]]] = OrderedDict()  # of the latest lookups, by their first key
        self._fetches: list[Fetch] = []  # with positions not asked for yet
        self._jobs: deque[list[Load]] = deque()
        self._reading = 0  # jobs under way
        self.moved_at = 0.0  # time.monotonic() at which a job last brought a block
        self._closing = False
        self._files = SegmentFiles(directory)
        self._threads = [threading.Thread(target=self._run, name=f"forebay-ssd-reader-{i}", daemon=True) for i in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the threads; fetches get no further blocks and fail where they are."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._work:
            waiting = list(self._fetches)
            waiting += [fetch for load in self._loads.values() if load.state is State.READING for fetch in load.fetches]
            for fetch in waiting:
                held = [position for position, load in fetch._loads.items() if load.state is State.READING]
                self._fail(fetch, min([*held, fetch._asked]))
            self._files.close()
        _wake_all(set(waiting))

    def remember(self, rows: Sequence[Row]) -> None:
        """Keep what a lookup found for the fetch that follows it, for a moment."""
        if rows:
            with self._work:
                self._found[rows[0].key] = time.monotonic(), rows
                self._found.move_to_end(rows[0].key)
                if len(self._found) > MOST_REMEMBERED:
                    self._found.popitem(last=False)

    def fetch(self, keys: Sequence[bytes], wake: Callable[[], None], lineages: Sequence[int] | None = None) -> Fetch:
        fetch = Fetch(self, keys, wake, lineages)
        with self._work:
            at, rows = self._found.pop(fetch.keys[0], (0.0, ())) if fetch.keys else (0.0, ())
            if time.monotonic() - at < REMEMBERED_S:
                known = list(itertools.takewhile(lambda pair: pair[0].key == pair[1], zip(rows, fetch.keys, strict=False)))
                fetch._places = {key: row for row, key in known}
                fetch._planned = len(known)
            if self._closing:
                fetch.failed_at = 0
            elif fetch.keys:
                self._fetches.append(fetch)
                self._work.notify_all()
        return fetch

    def rows_free(self) -> int:
        """Staging rows that hold nothing."""
        with self._work:
            return len(self._free_rows)

    def take(self, fetch: Fetch, most: int | None = None) -> list[tuple[int, np.ndarray]]:
        taken: list[tuple[int, np.ndarray]] = []
        with self._work:
            while not fetch.finished and (most is None or len(taken) < most):
                load = fetch._loads.get(fetch._taken)
                if load is None or load.state is not State.LOADED:
                    break
                if fetch.lineages is not None and (load.place is None or load.place.lineage > fetch.lineages[fetch._taken]):
                    self._fail(fetch, fetch._taken)  # read for somebody else before a better one took its place, or replaced since
                    break
                taken.append((fetch._taken, self._payload(load)))
                fetch._taken += 1
        return taken

    def free(self, fetch: Fetch, positions: Iterable[int]) -> None:
        with self._work:
            for position in positions:
                if position < fetch._taken:
                    self._let_go(fetch, position)
            self._work.notify_all()

    def promote(self, fetch: Fetch) -> None:
        with self._work:
            if not fetch._promoted:
                fetch._promoted = True
                self._waiting_rows -= len(fetch._loads)
                self._work.notify_all()

    def cancel(self, fetch: Fetch) -> None:
        with self._work:
            fetch._cancelled = True
            if fetch in self._fetches:
                self._fetches.remove(fetch)
            for position in [position for position in fetch._loads if position >= fetch._taken]:
                self._let_go(fetch, position)
            self._work.notify_all()

    def _let_go(self, fetch: Fetch, position: int) -> None:
        load = fetch._loads.pop(position, None)
        if load is None:
            return
        if not fetch._promoted:
            self._waiting_rows -= 1
        load.fetches.remove(fetch)
        if not load.fetches and load.state is not State.READING:
            self._release(load)

    def _release(self, load: Load) -> None:
        if self._loads.get(load.key) is load:
            del self._loads[load.key]
        self._free_rows.append(load.row)

    def _fail(self, fetch: Fetch, position: int) -> None:
        """Nothing at or after `position` will come; what is held there is let go."""
        if fetch.failed_at is None or position < fetch.failed_at:
            fetch.failed_at = max(position, fetch._taken)
        if fetch in self._fetches:
            self._fetches.remove(fetch)
        for later in [later for later in fetch._loads if later >= fetch.failed_at]:
            self._let_go(fetch, later)

    def _run(self) -> None:
        while True:
            with self._turn:
                with self._work:
                    self._work.wait_for(lambda: self._closing or self._has_work())
                    if self._closing:
                        return
                    plan = self._next_plan()
                    job, woken = ([], []) if plan else self._next_job()
                if plan:
                    self._plan(plan)
            _wake_all(woken)
            if job:
                started = time.monotonic()
                read = self._guarded(lambda job=job: self._read(job))  # type: ignore[misc]
                sound = self._guarded(lambda read=read: self._check(read))  # type: ignore[misc]
                self._totals.spend("read", time.monotonic() - started)
                self._settle(job, sound)

    def _guarded(self, work: Callable[[], list[_T]]) -> list[_T]:
        """A reader must not die, whatever disk and index bring: its blocks are misses."""
        try:
            return work()
        except sqlite3.Error:
            self._totals.io_error("index")
        except Exception:
            self._totals.io_error("read")
        return []

    def _has_work(self) -> bool:
        return bool(self._jobs) or any(self._plannable(fetch) or self._can_ask(fetch) for fetch in self._fetches)

    def _plannable(self, fetch: Fetch) -> bool:
        return not fetch._planning and fetch._planned < min(len(fetch.keys), fetch._asked + PLANNED_AHEAD)

    def _next_plan(self) -> Fetch | None:
        for fetch in sorted(self._fetches, key=lambda fetch: not fetch._promoted):
            if self._plannable(fetch):
                fetch._planning = True
                return fetch
            if self._can_ask(fetch):
                return None
        return None

    def _plan(self, fetch: Fetch) -> None:
        """Look up the next blocks of a fetch; many, if they don't lie in order."""
        start = fetch._planned
        stop = start + (PLAN if start else FIRST_PLAN)
        places: dict[bytes, Row] = {}
        try:
            places = self._index.rows(fetch.keys[start:stop])
            order = [(place.segment, place.offset) for key in fetch.keys[start:stop] if (place := places.get(key)) is not None]
            if any(here > there for here, there in itertools.pairwise(order)):
                places |= self._index.rows(fetch.keys[stop : start + MOST_PLANNED])
                stop = start + MOST_PLANNED
        except sqlite3.Error:
            self._totals.io_error("index")
        except OSError:
            self._totals.io_error("read")
        with self._work:
            fetch._places.update(places)
            fetch._planned = min(stop, len(fetch.keys))
            fetch._planning = False
            self._work.notify_all()

    def _can_ask(self, fetch: Fetch) -> bool:
        """Whether the next position of a fetch may have a row now."""
        if fetch._asked >= fetch._planned:
            return False
        if not fetch._promoted and self._waiting_rows >= self._waiting_share:
            return False
        return bool(self._free_rows) or self._shared(fetch, fetch.keys[fetch._asked]) is not None

    def _next_job(self) -> tuple[list[Load], list[Fetch]]:
        """Blocks to be read by the calling thread, and fetches that found blocks another fetch has loaded."""
        woken: list[Fetch] = []
        if not self._jobs:
            self._make_jobs(woken)
        while self._jobs:
            job = self._jobs.popleft()
            for load in job:
                if not load.fetches:  # all were cancelled meanwhile
                    self._release(load)
            job = [load for load in job if load.fetches]
            if job:
                self._reading += 1
                now = time.monotonic()
                for load in job:
                    load.began = now
                return job, woken
        return [], woken

    def _make_jobs(self, woken: list[Fetch]) -> None:
        """Give rows to as many planned blocks of the first fetch that waits for some as there are, and sort them as they lie."""
        for fetch in sorted(self._fetches, key=lambda fetch: not fetch._promoted):
            fresh: list[Load] = []
            while self._can_ask(fetch):
                key = fetch.keys[fetch._asked]
                load = self._shared(fetch, key)
                if load is None:
                    load = self._loads[key] = Load(key, self._free_rows.pop(), fetch._places.pop(key, None))
                    fresh.append(load)
                elif load.state is State.LOADED and fetch not in woken:
                    woken.append(fetch)
                load.fetches.append(fetch)
                fetch._loads[fetch._asked] = load
                fetch._asked += 1
                self._waiting_rows += not fetch._promoted
            if fetch._asked == len(fetch.keys):
                self._fetches.remove(fetch)
            if fresh:
                fresh.sort(key=lambda load: (-1, -1) if load.place is None else (load.place.segment, load.place.offset))
                self._jobs.extend(fresh[i : i + self._job_blocks] for i in range(0, len(fresh), self._job_blocks))
                self._work.notify_all()
                return

    def _payload(self, load: Load) -> np.ndarray:
        return self._staging[load.row, HEADER_BYTES : HEADER_BYTES + self._block_bytes]

    def _shared(self, fetch: Fetch, key: bytes) -> Load | None:
        """The load of another fetch that will do for the next position of this one; not if a better record has taken its place since."""
        load = self._loads.get(key)
        if load is None or fetch.lineages is None or load.place is None:
            return load
        return load if load.place.lineage <= fetch.lineages[fetch._asked] else None

    def _read(self, job: list[Load]) -> list[_Run]:
        """Read a job into its rows."""
        oldest = self._now_ms() - self._life_ms
        found = [(load.place, load) for load in job if load.place is not None and load.place.used_at >= oldest]
        read: list[_Run] = []
        for run in self._runs(found):
            first = run[0][0]
            try:
                read.append(_Run(run, self._files.read(first.name, [self._staging[load.row] for _, load in run], first.offset)))
            except FileNotFoundError:
                for row, _ in run:
                    self._damaged(row, "missing")
            except OSError as error:
                self._totals.io_error("read")
                if error.errno not in PASSING and len(self._unreadable) < MOST_UNREADABLE:
                    self._unreadable.update(row.key for row, _ in run)
        return read

    def _check(self, read: list[_Run]) -> list[tuple[Row, Load]]:
        """Those blocks that are what they should be. The others are counted and deleted from the index."""
        sound = []
        for run in read:
            for i, (row, load) in enumerate(run.blocks):
                if run.got < (i + 1) * self._record_bytes:
                    self._damaged(row, "length")
                    continue
                header = unpack_header(self._staging[load.row, :HEADER_BYTES].tobytes())
                fault = record_fault(header, self._payload(load), row.key, self._identity)
                if fault is None:
                    sound.append((row, load))
                else:
                    self._damaged(row, fault)
        return sound

    def _settle(self, job: list[Load], sound: list[tuple[Row, Load]]) -> None:
        """Hand a job's blocks to their fetches; those that are not sound end theirs."""
        now_ms = self._now_ms()
        self._totals.add("reads", len(sound))
        self._totals.add("read_bytes", len(sound) * self._block_bytes)
        self._totals.hit_at([(now_ms - row.used_at) / 1000 for row, _ in sound])
        loaded = {load for _, load in sound}
        with self._work:
            if sound:
                self.moved_at = time.monotonic()
            woken: set[Fetch] = set()
            for load in job:
                load.state = State.LOADED if load in loaded else State.FAILED
                woken.update(load.fetches)
                if not load.fetches:  # all were cancelled meanwhile
                    self._release(load)
            for load in job:
                if load.state is State.FAILED:
                    for fetch in list(load.fetches):
                        positions = [position for position, held in fetch._loads.items() if held is load]
                        if positions:
                            self._fail(fetch, min(positions))
            self._reading -= 1
            if not self._reading and not self._jobs:  # a fetch may wait for rows for long, and unlinked segments hold their space
                self._files.close()
            self._work.notify_all()
        self._touch([load.key for load in job if load in loaded])
        _wake_all(woken)

    def _runs(self, found: list[tuple[Row, Load]]) -> list[list[tuple[Row, Load]]]:
        """Blocks grouped into neighbours of one segment. Another identity's block is left out, since it is someone's; one of another length
        is nobody's and deleted.
        """
        runs: list[list[tuple[Row, Load]]] = []
        for row, load in sorted(found, key=lambda pair: (pair[0].segment, pair[0].offset)):
            if row.identity != self._identity:
                continue
            if row.length != self._block_bytes:
                self._damaged(row, "length")
                continue
            last = runs[-1][-1][0] if runs else None
            if last is not None and last.segment == row.segment and last.offset + self._record_bytes == row.offset:
                runs[-1].append((row, load))
            else:
                runs.append([(row, load)])
        return runs

    def _damaged(self, row: Row, fault: Fault) -> None:
        """Delete a block that is not what it should be; one that was evicted or moved in the meantime is no fault."""
        try:
            now = self._index.rows([row.key]).get(row.key)
            if now is not None and (now.segment, now.offset) == (row.segment, row.offset):
                self._index.forget(row)
                self._totals.corruption(fault)
        except (sqlite3.Error, OSError):
            self._totals.io_error("index")


def _wake_all(fetches: Iterable[Fetch]) -> None:
    for fetch in fetches:
        fetch._wake()
