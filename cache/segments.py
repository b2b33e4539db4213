"""Segment files: where records lie, and how they are appended, found again and destroyed.

A segment is written by one process, which holds a flock on it meanwhile, so another process can tell a file in use from one left by a
crash. Space inside a segment is never used twice; a dead record is punched out of the file (its pages go back to the file system at
once and its header reads as zeros), and a segment without live records is unlinked.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from forebay.cache.records import HEADER_BYTES, PAGE_BYTES, Header, record_bytes, unpack_header
from forebay.model.errors import ConfigError

SUFFIX = ".seg"
LOCK_WAIT_S = 5.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MOST_OPEN = 64  # segments open for reading

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_CANNOT_PUNCH = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class StoreDirectory:
    """The files of one store: `segments/*.seg`, `index.sqlite`, and two lock files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments = path / "segments"
        self.index = path / "index.sqlite"

    def create(self) -> None:
        """Make the directories, readable by their owner only.

        Raises:
            ConfigError: they cannot be made or written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.segments.mkdir(mode=0o700, exist_ok=True)
            self.segments.chmod(0o700)
            probe = self.segments / f"{secrets.token_hex(8)}.tmp"
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            probe.unlink(missing_ok=True)  # another process may tidy it away
        except OSError as error:
            if self.segments.is_dir() and error.errno in NO_SPACE:
                return  # a full disk may be emptied again
            reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
            text = f"the SSD store cannot use {self.path}: {reason}; choose another --cache-dir, or --cache-dir none"
            raise ConfigError(text, param="cache.dir") from error

    def names(self) -> list[str]:
        """Segment files, oldest first (names start with their time)."""
        with suppress(OSError):
            return sorted(entry.name for entry in os.scandir(self.segments) if entry.name.endswith(SUFFIX))
        return []

    def segment(self, name: str) -> Path:
        return self.segments / name

    def free_bytes(self) -> int:
        """Bytes the file system still has for us."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    @contextmanager
    def lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Hold the lock file `name` of the host; yields False if it is taken and `wait` is False."""
        fd = os.open(self.path / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            yield wait_for_flock(fd) if wait else try_flock(fd)
        finally:
            os.close(fd)


def try_flock(fd: int) -> bool:
    """Lock an open file exclusively if nobody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def wait_for_flock(fd: int) -> bool:
    """Lock an open file exclusively; True.

    Raises:
        OSError: whoever has it does not let go (a stuck process).
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while not try_flock(fd):
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, "another process holds a lock of the SSD store and does not let go")
        time.sleep(0.01)
    return True


class SegmentWriter:
    """A segment under construction, locked by this process. `stop` is where the next record goes.

    Written around the page cache where the file system can: blocks written here are still in device memory, so the cache would only
    be filled with what nobody reads, at a rate that depends on how much memory is at hand.
    """

    def __init__(self, directory: StoreDirectory) -> None:
        while True:
            self.name = f"{time.time_ns():016x}-{secrets.token_hex(4)}{SUFFIX}"
            self.fd = open_direct(directory.segment(self.name), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            if try_flock(self.fd) and os.fstat(self.fd).st_nlink:
                break
            os.close(self.fd)  # another process took it for an orphan before it was locked
        self.stop = 0
        self._buffer = aligned(0)

    def write(self, parts: Sequence[np.ndarray]) -> int:
        """Write `parts` ([n] uint8, whole pages together) behind `stop`, which stays: what is not acknowledged is written over.

        Returns:
            Bytes written, all of them.

        Raises:
            OSError: as the system reports it; what was written of it lies beyond `stop`.
        """
        size = sum(part.size for part in parts)
        if len(self._buffer) < size:
            self._buffer = aligned(size)
        at = 0
        for part in parts:
            self._buffer[at : at + part.size] = part
            at += part.size
        done = 0
        while done < size:
            done += _direct_or_not(self.fd, lambda: os.pwritev(self.fd, [self._buffer[done:size].data], self.stop + done))  # noqa: B023
        return size

    def cut(self) -> None:
        """Drop what lies beyond `stop`."""
        with suppress(OSError):
            os.ftruncate(self.fd, self.stop)

    def close(self) -> None:
        self.cut()
        os.close(self.fd)


class SegmentFiles:
    """Segments open for reading, by any thread. Up to `MOST_OPEN` handles are kept until `close`, and one per read beside them."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._files: dict[str, list[int]] = {}  # handle and reads under way

    def read(self, name: str, rows: Sequence[np.ndarray], offset: int) -> int:
        """Fill `rows` (1-d uint8, page-aligned, whole pages) from `offset` of segment `name` on, around the page cache if possible.

        Returns:
            The bytes read, fewer only at the end of the file.

        Raises:
            OSError: the file cannot be opened or read.
        """
        with self._lock:
            file = self._files.get(name)
            if file is None:
                if len(self._files) >= MOST_OPEN:
                    self._close()
                file = self._files[name] = [open_direct(self._directory.segment(name), os.O_RDONLY), 0]
            file[1] += 1
            fd = file[0]
        try:
            rest = [row.data for row in rows]
            total = 0
            while rest and (n := _direct_or_not(fd, lambda: os.preadv(fd, rest, offset + total))):  # noqa: B023
                total += n
                while rest and n >= len(rest[0]):
                    n -= len(rest.pop(0))
                if n:
                    if n % PAGE_BYTES:
                        break  # the end of a file that was cut
                    rest[0] = rest[0][n:]
            return total
        finally:
            with self._lock:
                file[1] -= 1

    def close(self) -> None:
        """Close all that are not being read: a segment that was unlinked gives its space back."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for name in [name for name, (_, reads) in self._files.items() if not reads]:
            os.close(self._files.pop(name)[0])


def aligned(size: int) -> np.ndarray:
    """[size] uint8 that begins on a page, as reads and writes around the page cache need it."""
    return align(np.empty(size + PAGE_BYTES, np.uint8))[:size]


def align(memory: np.ndarray) -> np.ndarray:
    """The part of `memory` ([n] uint8) that begins on a page, in whole pages."""
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + max(0, len(memory) - start) // PAGE_BYTES * PAGE_BYTES]


def open_direct(path: Path, flags: int, mode: int = 0o777) -> int:
    """Open a file for input and output around the page cache, or through it where the file system knows no other way."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a segment's place must not hold up the caller
    try:
        fd = os.open(path, flags | os.O_DIRECT, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file that this call was to create may be there already, empty.
        fd = os.open(path, flags & ~os.O_EXCL, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    return fd


def _direct_or_not(fd: int, work: Callable[[], int]) -> int:
    """Do `work` on an open file; where it turns out that its file system cannot work around the page cache, through it from now on."""
    try:
        return work()
    except OSError as error:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return work()


def destroy(fd: int, offset: int, size: int) -> bool:
    """Take `size` bytes (whole records) out of a segment. True if their space went back to the file system and they read as zeros; where
    it cannot punch holes, only the header at `offset` is zeroed.

    Raises:
        OSError: as the system reports it.
    """
    if not _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, size):
        return True
    code = ctypes.get_errno()
    if code not in _CANNOT_PUNCH:
        raise OSError(code, os.strerror(code))
    os.pwrite(fd, bytes(HEADER_BYTES), offset)
    return False


def header_at(fd: int, offset: int) -> Header | None:
    """The header of the record at `offset`, or None if there is no sound one."""
    return unpack_header(os.pread(fd, HEADER_BYTES, offset))


def scan(fd: int) -> Iterator[tuple[int, Header]]:
    """Offset and header of every record that lies in a segment as a whole, in order. Only headers are read: a payload may be damaged."""
    size = os.fstat(fd).st_size
    offset = 0
    while offset < size:
        header = header_at(fd, offset)
        if header is None:
            try:  # holes are long, and one call is enough to be past them
                data = os.lseek(fd, offset + PAGE_BYTES, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            offset = -(-data // PAGE_BYTES) * PAGE_BYTES
            continue
        step = record_bytes(header.length)
        if offset + step <= size:
            yield offset, header
        offset += step
