"""What the SSD store reaches beside what a plain loop over one file reaches, on the same disk in the same run."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.cache.layout import KVLayout
from forebay.cache.ssd import SsdOptions, SsdStore, StoredBlock
from forebay.model.config import real_config
from forebay.model.errors import ForebayError

TENANT = bytes(16)
PUT_BLOCKS = 4  # blocks handed over at once, about what one step of a server completes
PLAIN_CHUNKS = (1 << 20, 8 << 20)  # bytes per call of a plain loop; the faster one is the ceiling
STAGING_BYTES = 256 << 20
BUDGET_BYTES = 1 << 40  # nothing is evicted
WAIT_S = 120.0  # longest wait for anything; beyond it the measurement has failed
SEED = 20_261_129
LIBC = ctypes.CDLL(None, use_errno=True)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

Report = Callable[[str], None]


class BenchError(ForebayError):
    """The measurement could not be made."""


@dataclass(frozen=True)
class Row:
    """One figure beside what it could be at most.

    Attributes:
        what: what was measured; `value` in `unit`, the median of `samples`.
        ceiling: the same work done plainly, in the same unit; None where there is no such thing.
        ceiling_of: what did it.
        least_share: share of the ceiling that is asked for.
        least, most: value that is asked for, or that is the limit.
    """

    what: str
    unit: str
    samples: tuple[float, ...]
    ceiling: float | None = None
    ceiling_of: str = ""
    least_share: float | None = None
    least: float | None = None
    most: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def share(self) -> float | None:
        return self.value / self.ceiling if self.ceiling else None

    @property
    def reached(self) -> bool | None:
        """Whether it is what is asked for; None if nothing is."""
        asked = []
        if self.least_share is not None and self.share is not None:
            asked.append(self.share >= self.least_share)
        if self.least is not None:
            asked.append(self.value >= self.least)
        if self.most is not None:
            asked.append(self.value <= self.most)
        return all(asked) if asked else None


def measure(folder: Path, *, repeats: int, blocks: int, report: Report) -> list[Row]:
    """Write a prefix of `blocks` blocks of the released model and read it back, `repeats` times, each beside a plain loop.

    Args:
        folder: an empty folder on the disk to measure; what is written there stays until the caller removes it.
        report: told in a line what was just measured.

    Raises:
        BenchError: a block was dropped or came back late, damaged or not at all.
        ConfigError: the folder cannot be used.
    """
    block_bytes = KVLayout.of(real_config()).block_bytes
    payload = np.random.default_rng(SEED).integers(0, 256, (blocks, block_bytes), np.uint8)
    # Written to beforehand, so that no first use of a page is timed.
    into = np.full_like(payload, 1)
    staging = np.full(STAGING_BYTES, 1, np.uint8)
    store = folder / "store"
    rates: dict[str, list[float]] = {}

    def record(name: str, seconds: float) -> None:
        rates.setdefault(name, []).append(payload.nbytes / seconds / 1e6)

    prefixes: list[list[bytes]] = []
    with opened(store, block_bytes, staging) as ssd:
        for repeat in range(repeats + 1):
            if repeat == 1:
                rates.clear()  # the first run is for warming up
            for chunk in PLAIN_CHUNKS:
                # Each time a new file, as the store's segments are: memory that a deleted one gave back would be faster to fill.
                plain = folder / f"plain-{repeat}-{chunk}"
                written, synced = write_plain(plain, payload, chunk)
                record(f"write {chunk}", written)
                record(f"write+sync {chunk}", synced)
            keys, written, synced, handing = write_behind(ssd, store, payload)
            prefixes.append(keys)
            record("store write", written)
            record("store write+sync", synced)
            rates.setdefault("put", []).append(handing / blocks * 1e6)
            for chunk in PLAIN_CHUNKS:
                forget([plain])
                record(f"read {chunk}", read_plain(plain, into, chunk))
            for name, order in orders(prefixes, np.random.default_rng(repeat)):
                forget(segments(store))
                record(name, restore(ssd, order, into))
                check(into, payload, order, keys)
            if repeat:
                shown = ", ".join(f"{name} {rates[name][-1]:,.0f}" for name in ("store write+sync", "prefix", "shuffled"))
                report(f"run {repeat} of {repeats}, MB/s: {shown}")
    write, sync, read = (best(rates, name) for name in ("write", "write+sync", "read"))
    return [
        # The store syncs nothing, so neither does the loop beside it; what the disk can do shows in the second row.
        row(rates, "store write", "write-behind, acknowledged", *write),
        row(rates, "store write+sync", "write-behind, on the disk", *sync, least_share=0.6),
        row(rates, "prefix", "cold restore of a prefix", *read, least_share=0.8),
        row(rates, "shuffled", "cold restore in random order", *read, least_share=0.7),
        row(rates, "scattered", "cold restore of every other block", *read),
        Row("handing over a block", "µs", tuple(rates["put"])),
    ]


def row(rates: dict[str, list[float]], name: str, what: str, ceiling: float, ceiling_of: str, least_share: float | None = None) -> Row:
    return Row(what, "MB/s", tuple(rates[name]), ceiling, ceiling_of, least_share)


def best(rates: dict[str, list[float]], name: str) -> tuple[float, str]:
    """Median rate of the faster plain loop, and its description."""
    medians = {chunk: statistics.median(rates[f"{name} {chunk}"]) for chunk in PLAIN_CHUNKS}
    chunk = max(medians, key=lambda chunk: medians[chunk])
    words = {"write": "plain write", "write+sync": "plain write and fdatasync", "read": "plain cold read"}
    return medians[chunk], f"{words[name]}, {chunk >> 20} MiB a call"


def orders(prefixes: Sequence[list[bytes]], numbers: np.random.Generator) -> Iterator[tuple[str, list[bytes]]]:
    """The last prefix as it is and shuffled, and as many blocks picked from the last two."""
    last = prefixes[-1]
    yield "prefix", last
    yield "shuffled", [last[i] for i in numbers.permutation(len(last))]
    both = [key for keys in prefixes[-2:] for key in keys]
    yield "scattered", [both[i] for i in numbers.permutation(len(both))[: len(last)]]


@contextlib.contextmanager
def opened(folder: Path, block_bytes: int, staging: np.ndarray) -> Iterator[SsdStore]:
    """The store in `folder`."""
    ssd = SsdStore(SsdOptions(folder, BUDGET_BYTES), identity="bench", block_bytes=block_bytes, staging=staging)
    try:
        yield ssd
    finally:
        ssd.close()


def write_behind(ssd: SsdStore, folder: Path, payload: np.ndarray) -> tuple[list[bytes], float, float, float]:
    """Store `payload` as one prefix. Returns its keys; seconds until all is acknowledged, until it is on the disk, and spent in `put`."""
    keys = [os.urandom(32) for _ in payload]
    handing = 0.0
    began = time.perf_counter()
    for start in range(0, len(keys), PUT_BLOCKS):
        part = slice(start, start + PUT_BLOCKS)
        blocks = [StoredBlock(key, start + i, 0) for i, key in enumerate(keys[part])]
        before = time.perf_counter()
        accepted = ssd.put(blocks, payload[part], TENANT)
        handing += time.perf_counter() - before
        if accepted != len(blocks):
            raise BenchError(f"the store took {accepted} of {len(blocks)} blocks")
    if not ssd.flush(WAIT_S):
        raise BenchError(f"the store did not write {len(keys)} blocks in {WAIT_S:g} s")
    written = time.perf_counter() - began
    for file in segments(folder):
        sync(file)
    return keys, written, time.perf_counter() - began, handing


def restore(ssd: SsdStore, keys: Sequence[bytes], into: np.ndarray) -> float:
    """Seconds from look-up until the blocks of `keys` are copied into the rows of `into`, as a step loop would copy them to a device."""
    woken = threading.Event()
    began = time.perf_counter()
    if len(ssd.lookup(keys)) != len(keys):
        raise BenchError("the store does not know all blocks that it has written")
    fetch = ssd.fetch(keys, woken.set)
    fetch.promote()
    while not fetch.finished:
        if not woken.wait(WAIT_S):
            raise BenchError(f"the store sent nothing for {WAIT_S:g} s")
        woken.clear()
        taken = fetch.take()
        for position, block in taken:
            into[position] = block
        fetch.free([position for position, _ in taken])
    if fetch.failed_at is not None:
        raise BenchError(f"block {fetch.failed_at} could not be read back")
    return time.perf_counter() - began


def check(into: np.ndarray, payload: np.ndarray, order: Sequence[bytes], keys: Sequence[bytes]) -> None:
    """Blocks of the last prefix must have come back as they were; `into` is emptied for the next run."""
    number = {key: i for i, key in enumerate(keys)}
    for position, key in enumerate(order):
        if key in number and not np.array_equal(into[position], payload[number[key]]):
            raise BenchError(f"block {position} came back with other bytes")
    into[:] = 0


def write_plain(file: Path, payload: np.ndarray, chunk: int) -> tuple[float, float]:
    """Seconds to write all bytes to a new file in one loop, and until they are on the disk."""
    data = payload.reshape(-1).data
    began = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        at = 0
        while at < len(data):
            at += out.write(data[at : at + chunk])
        written = time.perf_counter() - began
        os.fdatasync(out.fileno())
    return written, time.perf_counter() - began


def read_plain(file: Path, into: np.ndarray, chunk: int) -> float:
    """Seconds to read a file from its beginning to its end in one loop."""
    data = into.reshape(-1).data
    began = time.perf_counter()
    with file.open("rb", buffering=0) as source:
        at = 0
        while count := source.readinto(data[at : at + chunk]):
            at += count
    if at != len(data):
        raise BenchError(f"{file} gave {at} of {len(data)} bytes")
    return time.perf_counter() - began


def segments(folder: Path) -> list[Path]:
    """Files with the blocks of a store."""
    return sorted(folder.rglob("*.seg"))


def sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def forget(files: Sequence[Path]) -> None:
    """Take files out of the page cache, and make sure of it. Not for an index that is open: closing its file drops sqlite's locks.

    Raises:
        BenchError: more than a hundredth stays; a warm read would be measured.
    """
    for file in files:
        sync(file)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if cached_share(files) > 0.01 and os.access(DROP_CACHES, os.W_OK):
        with contextlib.suppress(OSError):  # a container may show the file and still refuse
            DROP_CACHES.write_text("1")
    if (share := cached_share(files)) > 0.01:
        raise BenchError(f"{share:.0%} of what was written stays in the page cache, so a cold read cannot be measured here")


def cached_share(files: Sequence[Path]) -> float:
    """The share of pages that reading these files would find in memory."""
    cached = pages = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        with file.open("rb") as source, mmap.mmap(source.fileno(), size, prot=mmap.PROT_READ) as mapped:
            start = np.frombuffer(mapped, np.uint8).ctypes.data
            present = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            if LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(present.ctypes.data)):
                raise BenchError(f"the page cache cannot be asked about {file}: {os.strerror(ctypes.get_errno())}")
            cached, pages = cached + int((present & 1).sum()), pages + len(present)
    return cached / pages if pages else 0.0
