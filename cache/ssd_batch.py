"""What the writer is asked to do, and what it makes of that."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class StoredBlock:
    """A block to be stored: its 32-byte chained key, its number in its chain, and the replay boundaries behind its bytes."""

    key: bytes
    depth: int
    lineage: int


class IndexReplaced(sqlite3.Error):
    """The index does not know the segment being written: someone has replaced it."""


@dataclass
class Put:
    blocks: list[StoredBlock]
    rows: list[int]  # their rows of payload
    payload: np.ndarray  # [n, block_bytes] uint8, not to be read before `ready` was called
    tenant: bytes
    ready: Callable[[], None] | None
    now_ms: int


@dataclass
class Item:
    block: StoredBlock
    header: bytes
    payload: np.ndarray  # [block_bytes] uint8
    tenant: bytes
    now_ms: int


@dataclass
class Batch:
    """Keys and queue entries that a batch settles; `items` once they are prepared, then `fresh` ones that are being written."""

    keys: list[bytes]
    settles: int
    items: list[Item] = field(default_factory=list)
    fresh: list[Item] = field(default_factory=list)
    write: Future[int] | None = None
    failed: bool = False


@dataclass(frozen=True)
class Limits:
    """What the store may take: of the disk, of each file, of memory (bytes), and how long blocks and refreshes count (ms)."""

    budget_bytes: int
    free_bytes: int
    segment_bytes: int
    queue_bytes: int
    life_ms: int
    renew_ms: int
