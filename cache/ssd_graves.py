"""Destroying dead records: what was deleted from the index must be unreadable in its segment too."""

from __future__ import annotations

import itertools
import os
import sqlite3
from contextlib import suppress

from forebay.cache.segments import StoreDirectory, destroy, header_at, try_flock
from forebay.cache.ssd_index import SsdIndex

GRAVES_AT_ONCE = 512

Grave = tuple[int, int, int, bytes]  # id, offset, size, key


def bury(directory: StoreDirectory, index: SsdIndex) -> None:
    """Unlink segments without blocks and punch dead records out of the others; returns when all graves of now are done.

    Safe beside other processes that do the same.

    Raises:
        OSError, sqlite3.Error: what is not done is done by the next call.
    """
    unlink_empty(directory, index)
    last = 0
    failure: OSError | None = None
    while True:
        with index.connection() as db:
            found = db.execute(
                """SELECT graves.id, segment, name, offset, size, key FROM graves LEFT JOIN segments ON segments.id = segment
                WHERE graves.id > ? ORDER BY graves.id LIMIT ?""",
                (last, GRAVES_AT_ONCE),
            ).fetchall()
        if not found:
            break
        last = found[-1][0]
        done: list[tuple[int, int, int]] = []  # grave, segment, bytes given back
        found.sort(key=lambda grave: (grave[1], grave[3]))
        for (segment, name), graves in itertools.groupby(found, key=lambda grave: (grave[1], grave[2])):
            try:
                freed = _dig(directory, name, [(grave, offset, size, key) for grave, _, _, offset, size, key in graves])
            except OSError as error:
                failure = error
                continue
            done += [(grave, segment, size) for grave, size in freed]
        with index.transaction() as db:
            for grave, segment, size in done:
                if db.execute("DELETE FROM graves WHERE id = ?", (grave,)).rowcount:
                    db.execute("UPDATE segments SET bytes = max(0, bytes - ?) WHERE id = ?", (size, segment))
    if failure is not None:
        raise failure


def unlink_empty(directory: StoreDirectory, index: SsdIndex) -> None:
    """Remove segments that nobody writes and that have no blocks left."""
    with index.connection() as db:
        empty = db.execute("SELECT id, name FROM segments WHERE live = 0").fetchall()
    for segment, name in empty:
        try:
            fd = os.open(directory.segment(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = None
        try:
            if fd is not None and not try_flock(fd):
                continue
            with index.transaction() as db:
                if db.execute("DELETE FROM segments WHERE id = ? AND live = 0", (segment,)).rowcount:
                    db.execute("DELETE FROM graves WHERE segment = ?", (segment,))
                    with suppress(FileNotFoundError):
                        directory.segment(name).unlink()
        finally:
            if fd is not None:
                os.close(fd)


def forget_segments(db: sqlite3.Connection, segments: list[int]) -> int:
    """Drop all rows of segments whose files are gone; returns the number of blocks lost. Scans the table."""
    lost = 0
    for segment in segments:
        lost += db.execute("DELETE FROM blocks WHERE segment = ?", (segment,)).rowcount
        db.execute("DELETE FROM graves WHERE segment = ?", (segment,))
        db.execute("DELETE FROM segments WHERE id = ?", (segment,))
    return lost


def _dig(directory: StoreDirectory, name: str | None, graves: list[Grave]) -> list[tuple[int, int]]:
    """Destroy records of one segment, sorted by offset; returns each grave with the bytes it gave back."""
    if name is None:
        return [(grave, 0) for grave, *_ in graves]
    try:
        fd = os.open(directory.segment(name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return [(grave, size) for grave, _, size, _ in graves]
    try:
        freed: list[tuple[int, int]] = []
        runs: list[list[int]] = []  # offset, stop of neighbours
        ours: list[Grave] = []
        for record in graves:
            grave, offset, size, key = record
            header = header_at(fd, offset)
            if header is not None and header.key != key:  # a rebuild saw a record here that was never acknowledged and was written over
                freed.append((grave, 0))
                continue
            ours.append(record)
            if runs and runs[-1][1] == offset:
                runs[-1][1] = offset + size
            else:
                runs.append([offset, offset + size])
        punched = True
        for offset, stop in runs:
            punched = destroy(fd, offset, stop - offset)
            if not punched:
                break
        if not punched:  # zero each header
            for _, offset, size, _ in ours:
                destroy(fd, offset, size)
        return freed + [(grave, size if punched else 0) for grave, _, size, _ in ours]
    finally:
        os.close(fd)
