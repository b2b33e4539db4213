"""Bringing index and segments together again: after a crash, and after the index was lost."""

from __future__ import annotations

import itertools
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import suppress

from forebay.cache.records import Header, record_bytes
from forebay.cache.segments import SUFFIX, StoreDirectory, scan, try_flock
from forebay.cache.ssd_index import SsdIndex

RECORDS_AT_ONCE = 500


def rebuild(directory: StoreDirectory, index: SsdIndex, now_ms: Callable[[], int], stopping: Callable[[], bool] = lambda: False) -> None:
    """Fill an index that is not complete from the record headers, oldest segment first; blocks count as used now.

    Blocks are served as soon as they are found. One process at a time (the caller holds the keeper's lock). A crash in between costs
    nothing: the next call goes over everything again.

    Raises:
        sqlite3.Error: the index failed; call again.
    """
    for name in directory.names():
        with suppress(OSError):
            _read_back(directory, index, name, now_ms, stopping)
        index.checkpoint()
        if stopping():
            return
    with index.transaction() as db:
        db.execute("DELETE FROM dropped")
        db.execute("UPDATE state SET complete = 1")


def tidy(directory: StoreDirectory, index: SsdIndex) -> int:
    """Remove what no acknowledged block needs: unknown files among the segments, and the ends of segments that a crash left behind.

    Only with a complete index. Files that a process is writing are left alone, and so is everything outside `segments/`: an operator may
    have chosen a folder with other things in it.

    Returns:
        Files removed.
    """
    removed = 0
    for entry in list(os.scandir(directory.segments)):
        if not entry.is_file(follow_symlinks=False):
            continue
        if not entry.name.endswith(SUFFIX):
            with suppress(OSError):
                os.unlink(entry.path)
                removed += 1
            continue
        with suppress(OSError):
            removed += _tidy_segment(index, entry.path, entry.name)
    return removed


def missing_segments(directory: StoreDirectory, index: SsdIndex) -> list[int]:
    """Segments the index knows and the directory has not."""
    with index.connection() as db:
        known = db.execute("SELECT id, name FROM segments").fetchall()
    return [segment for segment, name in known if not directory.segment(name).is_file()]


def _tidy_segment(index: SsdIndex, path: str, name: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not try_flock(fd):
            return 0
        with index.transaction() as db:
            row = db.execute("SELECT id, stop, bytes FROM segments WHERE name = ?", (name,)).fetchone()
            if row is None:
                os.unlink(path)
                return 1
            segment, stop, charged = row
            if os.fstat(fd).st_size > stop:
                os.ftruncate(fd, stop)
            allocated = os.fstat(fd).st_blocks * 512
            if allocated < charged:  # a reservation that a crash left
                db.execute("UPDATE segments SET bytes = ? WHERE id = ?", (allocated, segment))
    finally:
        os.close(fd)
    return 0


def _read_back(directory: StoreDirectory, index: SsdIndex, name: str, now_ms: Callable[[], int], stopping: Callable[[], bool]) -> None:
    fd = os.open(directory.segment(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # headers only: reading ahead would read everything
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        in_use = not try_flock(fd)
        with index.transaction() as db:
            known = db.execute("SELECT id FROM segments WHERE name = ?", (name,)).fetchone()
            if known and in_use:  # its writer knows this index and has put its blocks there
                return
            if not known:
                db.execute("INSERT INTO segments(name) VALUES (?)", (name,))
            segment: int = db.execute("SELECT id FROM segments WHERE name = ?", (name,)).fetchone()[0]
        records = scan(fd)
        while part := list(itertools.islice(records, RECORDS_AT_ONCE)):
            with index.transaction() as db:
                for offset, header in part:
                    _insert(index, db, segment, offset, header, now_ms())
                stop = part[-1][0] + record_bytes(part[-1][1].length)
                db.execute("UPDATE segments SET stop = max(stop, ?) WHERE id = ?", (stop, segment))
            if stopping():
                return
        with index.transaction() as db:
            db.execute("UPDATE segments SET bytes = ? WHERE id = ?", (os.fstat(fd).st_blocks * 512, segment))
    finally:
        os.close(fd)


def _insert(index: SsdIndex, db: sqlite3.Connection, segment: int, offset: int, header: Header, now_ms: int) -> None:
    """Add a record, unless the block was taken back or is known with the same or a better lineage; the worse record dies."""
    known = db.execute("SELECT segment, offset, lineage FROM blocks WHERE key = ?", (header.key,)).fetchone()
    if known is not None and known[:2] == (segment, offset):
        return
    dropped = db.execute("SELECT 1 FROM dropped WHERE key = ?", (header.key,)).fetchone() is not None
    if dropped or (known is not None and known[2] <= header.lineage):
        grave = (segment, offset, record_bytes(header.length), header.key)
        db.execute("INSERT INTO graves(segment, offset, size, key) VALUES (?, ?, ?, ?)", grave)
        return
    if known is not None:
        db.execute("DELETE FROM blocks WHERE key = ?", (header.key,))
    owner = index.owner(db, header.identity, header.tenant)
    values = (header.key, segment, offset, header.length, owner, header.depth, header.lineage, now_ms)
    db.execute("INSERT INTO blocks(key, segment, offset, length, owner, depth, lineage, used_at) VALUES (?,?,?,?,?,?,?,?)", values)
