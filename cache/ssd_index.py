"""The index of the SSD store: a sqlite database that says which blocks exist and where they lie.

It is the one source of truth, shared by every process of the host: nothing is held in memory beside sqlite's own small page caches, so
a store with a million blocks opens at once and a block written by one process is found by the others with their next query. Whatever
happens to the file (deleted, damaged, of another version), it is replaced by an empty one, which `ssd_keeper` fills from the record
headers. Deleting a row makes a grave in the same transaction, so a record can't stay readable because a crash came in between.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from forebay.cache.records import HEADER_BYTES, PAGE_BYTES
from forebay.cache.segments import NO_SPACE, StoreDirectory

SCHEMA_VERSION = 1
FULL_BYTES = 1 << 16  # less free space than a new index and its shared memory need
DEEPEST_LINEAGE = 8  # deeper ones are counted with it
INDEX_BYTES_PER_BLOCK = 256  # what a row is charged against the budget; measured: less
KEYS_PER_QUERY = 256
CACHE_KIB = 4096  # of each connection

_CORRUPT, _NOT_A_DATABASE, _SHORT_READ, _MOVED = 11, 26, 522, 1032  # sqlite result codes

_SCHEMA = f"""
CREATE TABLE state(complete INTEGER NOT NULL);
INSERT INTO state VALUES (0);
CREATE TABLE owners(id INTEGER PRIMARY KEY, identity BLOB NOT NULL, tenant BLOB NOT NULL, UNIQUE(identity, tenant));
CREATE TABLE segments(
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
    live INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0, stop INTEGER NOT NULL DEFAULT 0);
CREATE TABLE blocks(
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    owner INTEGER NOT NULL, depth INTEGER NOT NULL, lineage INTEGER NOT NULL, used_at INTEGER NOT NULL);
CREATE INDEX blocks_by_use ON blocks(used_at, depth DESC);
CREATE TABLE graves(id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL, key BLOB NOT NULL);
CREATE TABLE dropped(key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE lineages(lineage INTEGER PRIMARY KEY, blocks INTEGER NOT NULL);
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {DEEPEST_LINEAGE}) INSERT INTO lineages SELECT i, 0 FROM n;
CREATE TRIGGER born AFTER INSERT ON blocks BEGIN
    UPDATE segments SET live = live + 1 WHERE id = new.segment;
    UPDATE lineages SET blocks = blocks + 1 WHERE lineage = min(new.lineage, {DEEPEST_LINEAGE});
END;
CREATE TRIGGER died AFTER DELETE ON blocks BEGIN
    UPDATE segments SET live = live - 1 WHERE id = old.segment;
    UPDATE lineages SET blocks = blocks - 1 WHERE lineage = min(old.lineage, {DEEPEST_LINEAGE});
    INSERT INTO graves(segment, offset, size, key) VALUES
        (old.segment, old.offset, (old.length + {HEADER_BYTES + PAGE_BYTES - 1}) / {PAGE_BYTES} * {PAGE_BYTES}, old.key);
END;
PRAGMA user_version = {SCHEMA_VERSION};
"""


class Row(NamedTuple):
    """A block as the index knows it. `offset` and `length` in bytes, `used_at` in milliseconds since the epoch."""

    key: bytes
    segment: int
    name: str
    offset: int
    length: int
    identity: bytes
    depth: int
    lineage: int
    used_at: int


class SsdIndex:
    """Connections to the index and the queries of reading; changes are made by the writer and the keeper inside `transaction`.

    Every method may raise `sqlite3.Error` and `OSError`; callers count it and go on with what they have. A database that turns out to be
    damaged is discarded on the way, so the next call finds an empty, sound one and `generation` is higher.
    """

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._idle: deque[tuple[int, sqlite3.Connection]] = deque()
        self._anchor: sqlite3.Connection | None = None  # keeps the inode from being used again, so that comparing inodes is sound
        self._inode: tuple[int, int] | None = None
        self._owners: dict[int, bytes] = {}
        self.generation = 0
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            if not is_full(error, directory):
                raise
            # Whoever calls next tries again.

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """A connection in autocommit mode, for this `with` only."""
        generation, db = self._borrow()
        try:
            yield db
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.close()
            if _is_damage(error):
                self._discard(generation)
            raise
        except BaseException:
            db.close()
            raise
        if generation == self.generation:
            self._idle.append((generation, db))
        else:
            db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, committed at the end of the `with` and rolled back by an exception."""
        with self.connection() as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            self._drop_connections()

    def chain(self, keys: Sequence[bytes], identity: bytes, used_after: int, max_lineage: int | None) -> list[Row]:
        """The longest chain that `keys` starts with, of blocks used at or after `used_after` (ms)."""
        found: list[Row] = []
        with self.connection() as db:
            for start in range(0, len(keys), KEYS_PER_QUERY):
                part = keys[start : start + KEYS_PER_QUERY]
                rows = self.rows_in(db, part)
                for key in part:
                    row = rows.get(key)
                    if row is None or row.used_at < used_after or row.identity != identity:
                        return found
                    if max_lineage is not None and row.lineage > max_lineage:
                        return found
                    found.append(row)
        return found

    def rows(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """What is known of each of `keys`, expired or not, of any identity."""
        with self.connection() as db:
            return self.rows_in(db, keys)

    def rows_in(self, db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """`rows` inside a transaction."""
        found: dict[bytes, Row] = {}
        for start in range(0, len(keys), KEYS_PER_QUERY):
            part = keys[start : start + KEYS_PER_QUERY]
            query = f"""SELECT key, segment, name, offset, length, owner, depth, lineage, used_at FROM blocks
                JOIN segments ON segments.id = segment WHERE key IN ({_marks(part)})"""
            for key, segment, name, offset, length, owner, *rest in db.execute(query, part).fetchall():
                found[key] = Row(key, segment, name, offset, length, self._identity_of(db, owner), *rest)
        return found

    def owner(self, db: sqlite3.Connection, identity: bytes, tenant: bytes) -> int:
        """Number of an owner, made if it is new; inside a transaction."""
        db.execute("INSERT INTO owners(identity, tenant) VALUES (?, ?) ON CONFLICT DO NOTHING", (identity, tenant))
        return db.execute("SELECT id FROM owners WHERE identity = ? AND tenant = ?", (identity, tenant)).fetchone()[0]

    def forget(self, row: Row) -> None:
        """Delete a row whose record is not what it should be, unless the block lies elsewhere by now."""
        with self.transaction() as db:
            db.execute("DELETE FROM blocks WHERE key = ? AND segment = ? AND offset = ?", (row.key, row.segment, row.offset))

    def totals(self) -> tuple[int, int, dict[int, int]]:
        """Blocks, bytes they take with their share of the index, and blocks by lineage."""
        with self.connection() as db:
            lineages = dict(db.execute("SELECT lineage, blocks FROM lineages").fetchall())
            return sum(lineages.values()), used_bytes(db), lineages

    def is_complete(self) -> bool:
        """False while the rows are still being read back from the records."""
        with self.connection() as db:
            return bool(db.execute("SELECT complete FROM state").fetchone()[0])

    def warm(self) -> None:
        """Read the index once so that the first lookups don't wait for the disk.

        Through sqlite, never through a file handle of ours: closing one would drop sqlite's locks (fcntl locks belong to the process).
        """
        with self.connection() as db:
            db.execute("SELECT count(*) FROM blocks INDEXED BY sqlite_autoindex_blocks_1").fetchone()
            db.execute("SELECT count(length) FROM blocks NOT INDEXED").fetchone()

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database; the writer never does, since that syncs."""
        with self.connection() as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def log_state(self) -> tuple[int, int]:
        """Bytes of the write-ahead log, and a number that changes when it is written."""
        with suppress(OSError):
            status = os.stat(f"{self._directory.index}-wal")
            return status.st_size, status.st_mtime_ns
        return 0, 0

    def _borrow(self) -> tuple[int, sqlite3.Connection]:
        if self._on_disk() != self._inode:
            self._open()
        while True:
            try:
                generation, db = self._idle.pop()
            except IndexError:
                return self.generation, self._connect()
            if generation == self.generation:
                return generation, db
            db.close()

    def _on_disk(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._directory.index)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._directory.index, timeout=5.0, isolation_level=None, check_same_thread=False)
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA journal_size_limit = 16777216")
        return db

    def _open(self) -> None:
        """Start with the database that is on disk now, or with a new one if that is not usable."""
        with self._lock:
            if self._inode is not None and self._on_disk() == self._inode:
                return
            self._drop_connections()
            with self._directory.lock("index", wait=True):
                try:
                    self._anchor = self._prepare()
                except sqlite3.Error as error:
                    if not _is_damage(error):
                        raise
                    self._remove_files()
                    self._anchor = self._prepare()
                self._inode = self._on_disk()
            self._owners = {}
            self.generation += 1

    def _prepare(self) -> sqlite3.Connection:
        with suppress(FileExistsError):
            os.close(os.open(self._directory.index, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        db = self._connect()
        try:
            db.execute("PRAGMA journal_mode = WAL").fetchone()
            version = db.execute("PRAGMA user_version").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and tables == 0:
                db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"index of version {version}")
            db.execute("SELECT complete FROM state").fetchone()[0]
        except BaseException as error:
            db.close()
            if isinstance(error, TypeError):  # no row in state
                raise sqlite3.DatabaseError("index without a state") from error
            raise
        return db

    def _discard(self, generation: int) -> None:
        """Remove a damaged database, unless someone else has replaced it already."""
        with self._lock, suppress(OSError), self._directory.lock("index", wait=True):
            if generation == self.generation and self._on_disk() == self._inode:
                self._drop_connections()
                self._remove_files()

    def _remove_files(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._directory.index}{suffix}")

    def _drop_connections(self) -> None:
        while self._idle:
            with suppress(sqlite3.Error):
                self._idle.pop()[1].close()
        if self._anchor is not None:
            with suppress(sqlite3.Error):
                self._anchor.close()
            self._anchor = None
        self._inode = None

    def _identity_of(self, db: sqlite3.Connection, owner: int) -> bytes:
        identity = self._owners.get(owner)
        if identity is None:
            row = db.execute("SELECT identity FROM owners WHERE id = ?", (owner,)).fetchone()
            identity = bytes(row[0]) if row else b""
            if identity:
                self._owners[owner] = identity
        return identity


def used_bytes(db: sqlite3.Connection) -> int:
    """Bytes charged against the budget: allocated pages of the segments and a fixed share of the index per block."""
    live, size = db.execute("SELECT total(live), total(bytes) FROM segments").fetchone()
    return int(size) + INDEX_BYTES_PER_BLOCK * int(live)


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _is_damage(error: sqlite3.Error) -> bool:
    """True for errors that only a new database cures."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by _prepare
        return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.ProgrammingError)
    return code & 0xFF in (_CORRUPT, _NOT_A_DATABASE) or code in (_SHORT_READ, _MOVED) or str(error).startswith("no such ")


def is_full(error: Exception, directory: StoreDirectory) -> bool:
    """Whether the disk has no room, which may pass; sqlite does not always say so in as many words."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    try:
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or directory.free_bytes() < FULL_BYTES
    except OSError:
        return False
