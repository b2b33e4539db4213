"""Small SSD stores, and ways to fill, read and damage them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from forebay.cache.ssd import Fetch, SsdOptions, SsdStore, StoredBlock, staging_bytes

BLOCK = 5000  # bytes; a record takes two pages
RECORD = 8192
TENANT = b"t" * 16
WAIT_S = 20.0


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def chain(name: object, blocks: int) -> list[bytes]:
    """Keys of a chain."""
    return [blake3(f"{name} {i}".encode()).digest() for i in range(blocks)]


def payload_of(keys: Sequence[bytes], size: int = BLOCK) -> np.ndarray:
    """[keys, size] uint8 that only these keys have."""
    return np.stack([np.frombuffer(blake3(key).digest(length=size), np.uint8) for key in keys])


@contextmanager
def opened(
    folder: Path, *, rows: int = 16, identity: str = "model", clock: Callable[[], float] | None = None, size: int = BLOCK, **options: Any
) -> Iterator[SsdStore]:
    options = {"budget_bytes": 1 << 30, "free_bytes": 0} | options
    named = {} if clock is None else {"clock": clock}
    staging = np.zeros(staging_bytes(rows, size), np.uint8)
    store = SsdStore(SsdOptions(folder, **options), identity=identity, block_bytes=size, staging=staging, **named)
    try:
        yield store
    finally:
        store.close()


def put(store: SsdStore, keys: Sequence[bytes], *, lineage: int = 0, first: int = 0, tenant: bytes = TENANT, size: int = BLOCK) -> int:
    """Store a chain, or what lies in it from block `first` on, and wait until it is written."""
    accepted = store.put([StoredBlock(key, first + i, lineage) for i, key in enumerate(keys)], payload_of(keys, size), tenant)
    assert store.flush(WAIT_S)
    return accepted


class Reader:
    """A fetch with its consumer; `wait` copies what comes until it is finished."""

    def __init__(self, store: SsdStore, keys: Sequence[bytes]) -> None:
        self.woken = threading.Event()
        self.fetch: Fetch = store.fetch(keys, self.woken.set)
        self.blocks: dict[int, np.ndarray] = {}

    def step(self) -> list[int]:
        """Take what is there, without giving rows back; returns the positions."""
        taken = self.fetch.take()
        for position, view in taken:
            assert position == len(self.blocks), "out of order"
            self.blocks[position] = view.copy()
        return [position for position, _ in taken]

    def wait_until(self, condition: Callable[[], bool], *, free: bool = True) -> None:
        while not condition():
            self.woken.clear()
            positions = self.step()
            if free:
                self.fetch.free(positions)
            if not positions and not condition():
                assert self.woken.wait(WAIT_S), "nothing more came"

    def finish(self) -> dict[int, np.ndarray]:
        self.fetch.promote()
        self.wait_until(lambda: self.fetch.finished)
        return self.blocks


def read(store: SsdStore, keys: Sequence[bytes]) -> int:
    """Fetch a chain; what comes must have the right bytes. Returns how many blocks came."""
    size = store._readers._block_bytes
    blocks = Reader(store, keys).finish()
    for position, block in blocks.items():
        assert np.array_equal(block, payload_of([keys[position]], size)[0]), "wrong bytes"
    return len(blocks)


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.seg"))
