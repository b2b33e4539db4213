"""A process that owns an SSD store and a snapshot pool and does what another one says, so that it can be killed at any moment.

Run as a program it imports what is needed once and then forks a new such process for every line it reads (the path of a socket to
connect to): a fresh process costs milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

BLOCK_BYTES = 5_000  # a record is two pages
STAGING_ROWS = 12
TTL_S = 72 * 3600.0
SNAPSHOT_TTL_S = 600.0
SHAPE = (2, 1, 4, 24)  # encoder layers, decoder layers, window, row bytes


@dataclass(frozen=True)
class Settings:
    folder: Path
    redis_url: str
    identities: tuple[str, ...]
    budget_bytes: int
    now: float


def block_bytes(identity: str, key: bytes, lineage: int) -> np.ndarray:
    """Bytes that this block has and no other, [BLOCK_BYTES] uint8."""
    name = blake3(b"%b %b %d" % (identity.encode(), key, lineage))
    return np.frombuffer(name.digest(length=BLOCK_BYTES), np.uint8)


def window_rows(identity: str, key: bytes, lineage: int, half: str) -> np.ndarray:
    """Window rows that this snapshot has and no other, [layers, window, row bytes] uint8."""
    layers = SHAPE[0] if half == "encoder" else SHAPE[1]
    name = blake3(b"%b %b %d %b" % (identity.encode(), key, lineage, half.encode()))
    return np.frombuffer(name.digest(length=layers * SHAPE[2] * SHAPE[3]), np.uint8).reshape(layers, SHAPE[2], SHAPE[3])


class Tiers:
    """What the process does; every public method is a command. Nothing here may raise: an exception is an answer that fails the test."""

    def __init__(self, settings: Settings) -> None:
        self.quiet = self._resources()
        self.now = settings.now
        self.settings = settings
        self.stores: dict[str, Any] = {}
        self.pools: dict[str, Any] = {}
        self.fetches: list[Any] = []
        self._full = self._broken = False
        self._pwritev, self._preadv = os.pwritev, os.preadv
        os.pwritev, os.preadv = self._write, self._read  # type: ignore[assignment]

    def open(self) -> None:
        from forebay.cache import ssd_keeper, ssd_writer
        from forebay.cache.snapshot import SnapshotShape
        from forebay.cache.ssd import SsdOptions, SsdStore, staging_bytes
        from forebay.cache.swa import SwaOptions, SwaPool

        # After an error, and between two looks at what is to be done: a second is a hundred operations of such a run.
        ssd_writer.PAUSE_S = 0.02
        ssd_keeper.TICK_S = 0.05
        options = SsdOptions(self.settings.folder, self.settings.budget_bytes, 0, TTL_S, segment_bytes=1 << 18, readers=2)
        swa = SwaOptions(self.settings.redis_url, ttl_s=SNAPSHOT_TTL_S, timeout_s=0.05, readers=2)
        for identity in self.settings.identities:
            staging = np.zeros(staging_bytes(STAGING_ROWS, BLOCK_BYTES), np.uint8)
            self.stores[identity] = SsdStore(
                options, identity=identity, block_bytes=BLOCK_BYTES, staging=staging, clock=lambda: self.now
            )
            self.pools[identity] = SwaPool(swa, identity=identity, shape=SnapshotShape(*SHAPE), clock=lambda: self.now)

    def clock(self, now: float) -> None:
        self.now = now

    def put(self, identity: str, tenant: bytes, blocks: Sequence[tuple[bytes, int, int]]) -> int:
        """blocks: key, depth, lineage."""
        from forebay.cache.ssd import StoredBlock

        payload = np.stack([block_bytes(identity, key, lineage) for key, _, lineage in blocks])
        return int(self.stores[identity].put([StoredBlock(*block) for block in blocks], payload, tenant))

    def get(self, identity: str, keys: Sequence[bytes], most: int | None) -> tuple[list[int], list[bytes]]:
        """Lineages that `lookup` tells, and the bytes that then come, as far as they do."""
        store, news = self.stores[identity], threading.Event()
        lineages = store.lookup(keys, most)
        fetch = store.fetch(keys[: len(lineages)], news.set, lineages)
        fetch.promote()
        got: list[bytes] = []
        while not fetch.finished:
            news.clear()
            came = fetch.take()
            for position, data in came:
                assert position == len(got)
                got.append(data.tobytes())
            fetch.free([position for position, _ in came])
            if not came and not fetch.finished and not news.wait(20):
                raise AssertionError(f"a fetch of {len(lineages)} blocks stands still at {len(got)}, failed_at {fetch.failed_at}")
        return lineages, got

    def begin(self, identity: str, keys: Sequence[bytes]) -> None:
        """Start to read what nobody may ever take."""
        store = self.stores[identity]
        self.fetches.append(store.fetch(keys[: len(store.lookup(keys))], lambda: None))

    def cancel(self, number: int) -> None:
        if self.fetches:
            fetch = self.fetches.pop(number % len(self.fetches))
            taken = fetch.take()
            fetch.cancel()
            fetch.free([position for position, _ in taken])

    def touch(self, identity: str, keys: Sequence[bytes]) -> list[bytes]:
        self.stores[identity].touch(keys)
        return list(self.stores[identity].take_missing())

    def drop(self, identity: str, keys: Sequence[bytes]) -> None:
        self.stores[identity].drop(keys)

    def flush(self) -> bool:
        return not [store for store in self.stores.values() if not store.flush(20)]

    def reap(self) -> None:
        for store in self.stores.values():
            store.reap()

    def full(self, on: bool) -> None:
        """The disk takes nothing more."""
        self._full = on

    def broken(self, on: bool) -> None:
        """The disk gives nothing back."""
        self._broken = on

    def put_window(self, identity: str, key: bytes, lineage: int, decoder: bool) -> bool:
        from forebay.cache.snapshot import Snapshot

        encoder = window_rows(identity, key, lineage, "encoder")
        rows = window_rows(identity, key, lineage, "decoder") if decoder else None
        return bool(self.pools[identity].put(key, Snapshot(8, 4, 4 if decoder else None, lineage, encoder, rows)))

    def get_window(self, identity: str, keys: Sequence[bytes]) -> tuple[bytes, int, bytes, bytes | None] | None:
        """key, lineage, encoder rows, decoder rows"""
        found = self.pools[identity].get(keys)
        if found is None:
            return None
        key, s = found
        return key, s.lineage, s.encoder.tobytes(), None if s.decoder is None else s.decoder.tobytes()

    def flush_windows(self) -> bool:
        return not [pool for pool in self.pools.values() if not pool.flush(5)]

    def breakers(self) -> list[str]:
        return [pool.stats().breaker for pool in self.pools.values()]

    def stats(self) -> dict[str, Any]:
        found = [store.stats() for store in self.stores.values()]
        return {
            "blocks": found[0].blocks, "bytes": found[0].bytes, "rebuilding": found[0].rebuilding,
            "admitting": all(s.admitting for s in found), "corrupt": sum(sum(s.corrupt.values()) for s in found),
            "evicted": sum(s.evicted for s in found), "expired": sum(s.expired for s in found),
            "bad_windows": sum(sum(pool.stats().bad.values()) for pool in self.pools.values()),
        }  # fmt: skip

    def leaks(self) -> list[str]:
        """What is held although nothing is under way. Fetches that were begun are cancelled first."""
        while self.fetches:
            self.cancel(0)
        found = []
        for identity, store in self.stores.items():
            readers = store._readers
            with contextlib.suppress(TimeoutError):
                _until(lambda readers=readers: readers.rows_free() == STAGING_ROWS)
            if readers.rows_free() != STAGING_ROWS:
                found.append(f"{identity}: {STAGING_ROWS - readers.rows_free()} staging rows")
            if readers._loads or readers._fetches or readers._waiting_rows:
                left = len(readers._loads), len(readers._fetches), readers._waiting_rows
                found.append(f"{identity}: loads, fetches, waiting rows: {left}")
        files, _ = self._resources()
        if files > self.quiet[0] + 80:
            found.append(f"{files} open files")
        return found

    def close(self) -> list[str]:
        """What is left when everything is closed."""
        found = self.leaks()
        for store in self.stores.values():
            store.close(10)
        for pool in self.pools.values():
            pool.close()
        with contextlib.suppress(TimeoutError):
            _until(lambda: self._resources()[1] <= self.quiet[1])
        files, threads = self._resources()
        if files > self.quiet[0]:
            names = sorted(_open_files())
            found.append(f"{files - self.quiet[0]} open files after the end: {names}")
        if threads > self.quiet[1]:
            found.append(f"threads after the end: {[t.name for t in threading.enumerate()]}")
        return found

    def _write(self, fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if self._full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._pwritev(fd, buffers, offset, *flags)

    def _read(self, fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if self._broken:
            raise OSError(errno.EIO, "Input/output error")
        return self._preadv(fd, buffers, offset, *flags)

    @staticmethod
    def _resources() -> tuple[int, int]:
        """Open files and threads."""
        return len(_open_files()), threading.active_count()


def _open_files() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _until(condition: Any, seconds: float = 5.0) -> None:
    pause, end = threading.Event(), _monotonic() + seconds
    while not condition():
        if _monotonic() > end:
            raise TimeoutError
        pause.wait(0.002)


def _monotonic() -> float:
    return os.times().elapsed


def serve(channel: Connection) -> None:
    tiers = Tiers(channel.recv())
    while True:
        try:
            name, arguments = channel.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, getattr(tiers, name)(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        channel.send(answer)


class Nursery:
    """Makes processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-tiers-")
        self._listener = Listener(os.path.join(self._folder.name, "socket"), "AF_UNIX")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._zygote = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, env=environment)

    def child(self, settings: Settings) -> TierProcess:
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(f"{self._listener.address}\n".encode())
        self._zygote.stdin.flush()
        return TierProcess(self._listener.accept(), settings)

    def close(self) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(10)
        self._listener.close()
        self._folder.cleanup()


class TierProcess:
    """Commands to such a process: `process("put", ...)`."""

    def __init__(self, channel: Connection, settings: Settings) -> None:
        self._channel = channel
        self.pid = int(channel.recv())
        channel.send(settings)

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.ask(name, *arguments)
        return self.answer()

    def ask(self, name: str, *arguments: Any) -> None:
        """Say what to do, without waiting for the answer."""
        self._channel.send((name, arguments))

    def answer(self) -> Any:
        good, value = self._channel.recv()
        assert good, value
        return value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._channel.recv()  # until it is gone
        self._channel.close()

    def end(self) -> None:
        self._channel.close()


def main() -> None:
    import forebay.cache.ssd
    import forebay.cache.swa  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            with Client(line.strip(), "AF_UNIX") as channel:
                channel.send(os.getpid())
                serve(channel)
            os._exit(0)


if __name__ == "__main__":
    main()
