"""What an operator does with an SSD store: look at it, check it, purge it. Needs no model, and works beside running servers."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

import numpy as np

from forebay.cache.records import FAULTS, HEADER_BYTES, Fault, record_fault, unpack_header
from forebay.cache.segments import StoreDirectory
from forebay.cache.ssd_graves import bury
from forebay.cache.ssd_index import Row, SsdIndex
from forebay.cache.ssd_keeper import LOCK
from forebay.cache.ssd_recovery import rebuild, tidy
from forebay.model.errors import ConfigError

ROWS_AT_ONCE = 512

Progress = Callable[[int, int], None]  # blocks done, blocks in all


class StoreSummary(TypedDict):
    """`bytes` is what counts against the budget; `segment_bytes` and `index_bytes` are allocated on disk now."""

    blocks: int
    bytes: int
    segments: int
    segment_bytes: int
    index_bytes: int
    disk_free_bytes: int
    lineages: dict[int, int]
    complete: bool


class Group(TypedDict):
    """Blocks of one identity and tenant (both in hex); `bytes` of payload, times in seconds since the epoch."""

    identity: str
    tenant: str
    blocks: int
    bytes: int
    oldest_use: float
    newest_use: float
    lineages: dict[int, int]


class VerifyReport(TypedDict):
    """`bad` blocks were deleted, by kind; `unreadable` ones (the system refused) were left; `sound` are neither."""

    blocks: int
    bytes: int
    sound: int
    bad: dict[Fault, int]
    unreadable: int


class PurgeReport(TypedDict):
    blocks: int
    bytes: int


def stats(folder: Path) -> StoreSummary:
    """Sizes of the store.

    Raises:
        ConfigError: `folder` is no store, or its index cannot be read.
    """
    with _opened(folder, whole=False) as (directory, index):
        blocks, charged, lineages = index.totals()
        names = directory.names()
        return StoreSummary(
            blocks=blocks, bytes=charged, segments=len(names), segment_bytes=sum(_allocated(directory.segment(name)) for name in names),
            index_bytes=sum(_allocated(Path(f"{directory.index}{suffix}")) for suffix in ("", "-wal", "-shm")),
            disk_free_bytes=directory.free_bytes(), lineages=lineages, complete=index.is_complete(),
        )  # fmt: skip


def ls(folder: Path) -> list[Group]:
    """What is stored, by identity and tenant; the most blocks first.

    Raises:
        ConfigError: see `stats`.
    """
    groups: dict[tuple[bytes, bytes], Group] = {}
    with _opened(folder, whole=False) as (_, index), index.connection() as db:
        found = db.execute(
            """SELECT identity, tenant, lineage, count(*), sum(length), min(used_at), max(used_at)
            FROM blocks JOIN owners ON owners.id = owner GROUP BY owner, lineage"""
        ).fetchall()
    for identity, tenant, lineage, blocks, size, oldest, newest in found:
        group = groups.setdefault((identity, tenant), Group(
            identity=identity.hex(), tenant=tenant.hex(), blocks=0, bytes=0, oldest_use=oldest / 1000, newest_use=newest / 1000, lineages={}
        ))  # fmt: skip
        group["blocks"] += blocks
        group["bytes"] += size
        group["oldest_use"] = min(group["oldest_use"], oldest / 1000)
        group["newest_use"] = max(group["newest_use"], newest / 1000)
        group["lineages"][lineage] = blocks
    return sorted(groups.values(), key=lambda group: -group["blocks"])


def verify(folder: Path, progress: Progress | None = None) -> VerifyReport:
    """Read every block and check it; bad ones are deleted.

    Raises:
        ConfigError: see `stats`.
    """
    report = VerifyReport(blocks=0, bytes=0, sound=0, bad=dict.fromkeys(FAULTS, 0), unreadable=0)
    with _opened(folder, whole=True) as (directory, index):
        total = index.totals()[0]
        for rows in _pages(index):
            for row in sorted(rows, key=lambda row: (row.segment, row.offset)):
                report["blocks"] += 1
                report["bytes"] += row.length
                try:
                    fault = _fault(directory, row)
                except OSError:
                    report["unreadable"] += 1
                    continue
                if fault is None:
                    report["sound"] += 1
                elif _still_there(index, row):
                    report["bad"][fault] += 1
                    index.forget(row)
            if progress is not None:
                progress(report["blocks"], max(total, report["blocks"]))
        with directory.lock(LOCK, wait=True):
            bury(directory, index)
    return report


def purge(folder: Path, tenant: bytes | None = None, progress: Progress | None = None) -> PurgeReport:
    """Delete the blocks of a tenant (16 bytes), or all, and destroy their records: nothing can bring them back through the store.

    Blocks that a running server has queued or still has in memory may be stored again.

    Raises:
        ConfigError: see `stats`, or a record could not be destroyed.
    """
    report = PurgeReport(blocks=0, bytes=0)
    which, values = ("1", ()) if tenant is None else ("owner IN (SELECT id FROM owners WHERE tenant = ?)", (tenant,))
    with _opened(folder, whole=True) as (directory, index):
        with index.connection() as db:
            total = db.execute(f"SELECT count(*) FROM blocks WHERE {which}", values).fetchone()[0]
        last = 0
        while True:
            with index.transaction() as db:
                found = db.execute(
                    f"SELECT id, length FROM blocks WHERE id > ? AND {which} ORDER BY id LIMIT ?", (last, *values, ROWS_AT_ONCE)
                ).fetchall()
                db.executemany("DELETE FROM blocks WHERE id = ?", [(block,) for block, _ in found])
            if not found:
                break
            last = found[-1][0]
            report["blocks"] += len(found)
            report["bytes"] += sum(length for _, length in found)
            if progress is not None:
                progress(report["blocks"], max(total, report["blocks"]))
        try:
            with directory.lock(LOCK, wait=True):
                bury(directory, index)
        except OSError as error:
            raise ConfigError(f"The blocks are deleted, but some of their records could not be destroyed: {error}; try again.") from error
        index.checkpoint()
    return report


@contextmanager
def _opened(folder: Path, *, whole: bool) -> Iterator[tuple[StoreDirectory, SsdIndex]]:
    """The store in `folder`; with `whole`, an index that was lost is read back first."""
    directory = StoreDirectory(folder)
    if not directory.segments.is_dir():
        raise ConfigError(f"{folder} is not an SSD cache: it has no folder named segments.")
    try:
        index = SsdIndex(directory)
        try:
            if whole and not index.is_complete():
                with directory.lock(LOCK, wait=True):
                    if not index.is_complete():
                        rebuild(directory, index, lambda: int(time.time() * 1000))
                    tidy(directory, index)
            yield directory, index
        finally:
            index.close()
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"The index of the SSD cache {folder} cannot be used: {error}.") from error


def _pages(index: SsdIndex) -> Iterator[list[Row]]:
    """All blocks, in the order of the index; those added meanwhile may be left out."""
    last = 0
    while True:
        with index.connection() as db:
            found = db.execute("SELECT id, key FROM blocks WHERE id > ? ORDER BY id LIMIT ?", (last, ROWS_AT_ONCE)).fetchall()
            if not found:
                return
            last = found[-1][0]
            rows = list(index.rows_in(db, [key for _, key in found]).values())
        yield rows


def _fault(directory: StoreDirectory, row: Row) -> Fault | None:
    try:
        fd = os.open(directory.segment(row.name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "missing"
    try:
        data = os.pread(fd, HEADER_BYTES + row.length, row.offset)
    finally:
        os.close(fd)
    if len(data) < HEADER_BYTES + row.length:
        return "length"
    payload = np.frombuffer(data, np.uint8)[HEADER_BYTES:]
    return record_fault(unpack_header(data), payload, row.key, row.identity)


def _still_there(index: SsdIndex, row: Row) -> bool:
    now = index.rows([row.key]).get(row.key)
    return now is not None and (now.segment, now.offset) == (row.segment, row.offset)


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0
