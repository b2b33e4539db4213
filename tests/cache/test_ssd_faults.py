"""The SSD store among damaged files, a damaged or lost index, and disks that are full or refuse: misses and counters, never errors."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from forebay.cache import segments as segment_files
from forebay.cache import ssd_index
from forebay.cache.records import HEADER_BYTES
from forebay.cache.segments import scan
from forebay.cache.ssd import StoredBlock
from forebay.model.errors import ConfigError
from ssd_stores import BLOCK, RECORD, TENANT, WAIT_S, Clock, Reader, chain, opened, payload_of, put, read, segments


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # another thread's work shows in no event of the store


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 0x10]))


@pytest.mark.case("B028")
@pytest.mark.parametrize(
    ("place", "kind"), [(0, "header"), (9, "header"), (50, "header"), (80, "header"), (98, "header"), (HEADER_BYTES, "checksum"),
                        (HEADER_BYTES + BLOCK - 1, "checksum")]
)  # fmt: skip
def test_a_flipped_bit_is_a_miss_counted_and_destroyed(tmp_path: Path, place: int, kind: str) -> None:
    keys = chain("a", 6)
    with opened(tmp_path) as store:
        put(store, keys)
        flip(segments(tmp_path)[0], 2 * RECORD + place)
        assert read(store, keys) == 2
        stats = store.stats()
        assert (stats.corrupt[kind], sum(stats.corrupt.values()), stats.blocks) == (1, 1, 5)
        assert len(store.lookup(keys)) == 2
        put(store, keys[2:3], first=2)
        assert read(store, keys) == 6


def test_padding_does_not_matter(tmp_path: Path) -> None:
    keys = chain("a", 2)
    with opened(tmp_path) as store:
        put(store, keys)
        flip(segments(tmp_path)[0], RECORD - 1)
        assert read(store, keys) == 2


@pytest.mark.case("B028")
def test_vanished_and_cut_segments_are_misses(tmp_path: Path) -> None:
    a, b = chain("a", 10), chain("b", 10)
    with opened(tmp_path, segment_bytes=10 * RECORD) as store:
        put(store, a)
        put(store, b)
        first, second = segments(tmp_path)
        first.unlink()
        os.truncate(second, 5 * RECORD + 200)
        assert read(store, a) == 0
        assert read(store, b) == 5
        corrupt = store.stats().corrupt
        assert corrupt["missing"] > 0
        assert corrupt["length"] > 0
        store.reap()
        assert store.lookup(a) == []
        assert store.stats().blocks == 10 - corrupt["length"]
        assert sum(store.stats().dropped.values()) == 0


def test_a_record_in_the_wrong_place_is_not_served(tmp_path: Path) -> None:
    keys = chain("a", 4)
    with opened(tmp_path) as store:
        put(store, keys)
        data = bytearray(segments(tmp_path)[0].read_bytes())
        data[:RECORD], data[RECORD : 2 * RECORD] = data[RECORD : 2 * RECORD], data[:RECORD]
        segments(tmp_path)[0].write_bytes(data)
        assert read(store, keys) == 0
        assert store.stats().corrupt["header"] >= 1


@pytest.mark.case("B028")
def test_a_disk_that_refuses_to_read_is_a_miss_and_keeps_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("a", 4)
    with opened(tmp_path) as store:
        put(store, keys)

        def refuse(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(segment_files.os, "preadv", refuse)
            assert read(store, keys) == 0
        stats = store.stats()
        assert (stats.blocks, sum(stats.corrupt.values()), stats.writes) == (4, 0, 4)
        assert stats.io_errors["read"] > 0
        assert read(store, keys) == 4
        put(store, keys)  # computed meanwhile by whoever missed it: the disk may stay as it was, so it is written anew
        assert store.stats().writes > 4
        assert read(store, keys) == 4


def test_too_many_open_files_cost_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("a", 4)
    with opened(tmp_path) as store:
        put(store, keys)

        def refuse(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as broken:
            broken.setattr(segment_files.os, "preadv", refuse)
            assert read(store, keys) == 0
        assert read(store, keys) == 4


@pytest.mark.parametrize("what", ["directory", "pipe", "loop"])
def test_what_is_no_file_in_a_segments_place_is_a_miss(tmp_path: Path, what: str) -> None:
    keys = chain("a", 4)
    with opened(tmp_path) as store:
        put(store, keys)
    (segment,) = segments(tmp_path)
    segment.unlink()
    if what == "directory":
        segment.mkdir()
    elif what == "pipe":
        os.mkfifo(segment)
    else:
        segment.symlink_to(segment)
    with opened(tmp_path) as store:
        assert read(store, keys) == 0
        put(store, keys)
        assert read(store, keys) == 4


@pytest.mark.case("B129")
def test_a_store_on_a_full_disk_opens_and_goes_on_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("a", 4)

    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(ssd_index.sqlite3, "connect", full)
        with pytest.raises(ConfigError, match="index"), opened(tmp_path):
            pass
        broken.setattr(segment_files.StoreDirectory, "free_bytes", lambda _: 0)
        with opened(tmp_path) as store:
            assert store.lookup(keys) == []
            assert store.stats().blocks == 0
            broken.undo()
            end = time.monotonic() + WAIT_S
            while read(store, keys) < 4 and time.monotonic() < end:  # a write may meet the index half made, and is dropped and counted
                put(store, keys)
            assert read(store, keys) == 4


@pytest.mark.parametrize("damage", ["delete", "delete with log", "garbage", "empty", "version", "no tables", "cut", "holes"])
def test_a_lost_index_is_rebuilt_while_the_store_runs(tmp_path: Path, damage: str) -> None:
    keys = chain("a", 30)
    index = tmp_path / "index.sqlite"
    with opened(tmp_path, segment_bytes=10 * RECORD) as store:
        put(store, keys)
        store.lookup(keys)
        if damage == "version":
            with sqlite3.connect(index) as db:
                db.execute("PRAGMA user_version = 99")
        elif damage == "no tables":
            with sqlite3.connect(index) as db:
                db.execute("DROP TABLE blocks")
        else:
            store._index.checkpoint()
            if damage.startswith("delete"):
                for suffix in ("", "-wal", "-shm") if damage.endswith("log") else ("",):
                    Path(f"{index}{suffix}").unlink(missing_ok=True)
            elif damage == "garbage":
                index.write_bytes(os.urandom(50_000))
            elif damage == "empty":
                index.write_bytes(b"")
            elif damage == "cut":
                os.truncate(index, 8192)
            else:
                with index.open("r+b") as file:
                    file.seek(4096)
                    file.write(bytes(index.stat().st_size - 4096))
        new = chain("b", 3)

        def healed() -> bool:
            """Connections go on for a while with pages they have in memory; whichever call meets the damage, all is back soon after."""
            store._writer._paused_until = 0.0
            put(store, new)
            return read(store, keys) == 30 and read(store, new) == 3

        eventually(healed)
    with opened(tmp_path) as store:
        eventually(lambda: read(store, keys) == 30 and read(store, new) == 3 and not store.stats().rebuilding)
        assert store.stats().blocks == 33


def test_a_rebuild_finds_what_the_index_had_and_nothing_dead(tmp_path: Path) -> None:
    clock = Clock()
    old, kept, doubled = chain("old", 5), chain("kept", 5), chain("doubled", 2)
    with opened(tmp_path, clock=clock) as store:
        put(store, old)
        clock.now += 73 * 3600
        put(store, kept, lineage=1, first=7)
        put(store, doubled, lineage=5)
        put(store, doubled, lineage=4)
        store.reap()
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    with opened(tmp_path, clock=clock) as store:
        eventually(lambda: not store.stats().rebuilding)
        assert store.lookup(old) == []
        assert store.lookup(kept) == [1] * 5
        assert store.lookup(doubled) == [4, 4]
        stats = store.stats()
        assert (stats.blocks, stats.lineages[1], stats.lineages[4]) == (7, 5, 2)
        assert stats.bytes == 7 * (RECORD + 256)
        assert read(store, kept) == 5
        clock.now += 72 * 3600 - 1
        assert len(store.lookup(kept)) == 5, "used when it was found again"


def test_two_stores_survive_the_loss_of_their_index(tmp_path: Path) -> None:
    a, b, c = chain("a", 8), chain("b", 8), chain("c", 8)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        put(first, a)
        put(second, b)
        (tmp_path / "index.sqlite").unlink()
        eventually(lambda: all(len(store.lookup(keys)) == 8 for store in (first, second) for keys in (a, b)))
        put(first, c)
        assert read(first, b) == read(second, a) == read(second, c) == 8


def test_torn_writes_at_every_byte(tmp_path: Path) -> None:
    """A segment that ends anywhere: with its index, and without one, whole records are served and nothing else."""
    keys = chain("a", 3)
    whole = tmp_path / "whole"
    with opened(whole) as store:
        put(store, keys)
    data = segments(whole)[0].read_bytes()
    cuts = sorted({*range(RECORD, RECORD + HEADER_BYTES + 8), *range(RECORD + HEADER_BYTES, 2 * RECORD, 61), 2 * RECORD - 1})
    found = 0
    for cut in cuts:
        torn = tmp_path / "torn.seg"
        torn.write_bytes(data[:cut])
        with torn.open("rb") as file:
            found += len(list(scan(file.fileno())))
        torn.write_bytes(data[:cut] + bytes(2 * RECORD - cut) + data[2 * RECORD :])  # the same after a power loss
        with torn.open("rb") as file:
            assert [header.key for _, header in scan(file.fileno())][-1] == keys[2]
    assert found == len(cuts), "the first record, every time"
    for number, cut in enumerate(cuts[:: len(cuts) // 8]):
        for lost in (False, True):
            folder = tmp_path / f"{number}{lost}"
            shutil.copytree(whole, folder)
            segment = segments(folder)[0]
            segment.write_bytes(data[:cut] + bytes(2 * RECORD - cut) + data[2 * RECORD :])
            if lost:
                (folder / "index.sqlite").unlink()
            with opened(folder) as store:
                eventually(lambda store=store: not store.stats().rebuilding)  # type: ignore[misc]
                assert read(store, keys) in (1, 3), "3: the zeros were zeros before"
                assert read(store, keys[2:]) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_stops_admission_and_it_resumes_by_itself(small_disk: Path) -> None:
    a, b = chain("a", 20), chain("b", 20)
    with opened(small_disk / "kv") as store:
        put(store, a)
        filler = small_disk / "filler"
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:  # noqa: PT012
            while True:
                file.write(bytes(4096))
        put(store, b)
        stats = store.stats()
        assert stats.dropped["no_space"] == 20
        assert not stats.admitting
        assert put(store, b) == 0
        assert store.lookup(b) == []
        assert read(store, a) == 20, "reading goes on"
        filler.unlink()
        eventually(lambda: store.stats().admitting)
        assert put(store, b) == 20
        assert read(store, b) == 20
        assert store.stats().bytes == 40 * (RECORD + 256)
    with opened(small_disk / "kv") as store:
        assert read(store, a) == read(store, b) == 20


def test_a_file_size_limit_is_an_io_error_and_leaves_no_part(tmp_path: Path) -> None:
    keys = chain("a", 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, segment_bytes=RECORD * 20) as store:
        put(store, keys[:2])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (6 * RECORD + 100, before[1]))
            put(store, keys[2:], first=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        stats = store.stats()
        assert sum(stats.dropped.values()) == 18
        assert store.lookup(keys) == [0, 0]
        store._writer._paused_until = 0.0
        put(store, keys[2:], first=2)
        assert read(store, keys) == 20
        assert store.stats().bytes == 20 * (RECORD + 256)


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EROFS])
def test_write_errors_are_counted_and_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    keys = chain("a", 8)
    real = os.pwritev

    def half(fd: int, buffers: list[memoryview], at: int) -> int:
        if len(buffers) > 1:
            return real(fd, buffers[:2], at)
        raise OSError(code, os.strerror(code))

    with opened(tmp_path) as store:
        put(store, keys[:1])
        with monkeypatch.context() as broken:
            broken.setattr(segment_files.os, "pwritev", half)
            put(store, keys[1:], first=1)
        stats = store.stats()
        assert stats.io_errors["write"] == 1
        assert stats.dropped["no_space" if code == errno.EDQUOT else "io_error"] == 7
        assert segments(tmp_path)[0].stat().st_size == RECORD, "the part is gone"
        eventually(lambda: store.stats().admitting)
        put(store, keys[1:], first=1)
        assert read(store, keys) == 8


def test_an_index_that_is_locked_or_full_loses_writes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("a", 4)
    with opened(tmp_path) as store:
        put(store, keys[:2])

        def acknowledge(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(store._writer, "_acknowledge", acknowledge)
            put(store, keys[2:], first=2)
        assert store.stats().io_errors["index"] == 1
        eventually(lambda: store.stats().admitting)
        eventually(lambda: len(store.lookup(keys)) >= 2)
        put(store, keys[2:], first=2)
        assert read(store, keys) == 4


def test_no_holes_zeroed_headers_and_whole_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot punch holes, dead records lose their headers and space comes back by segments."""

    class Libc:
        @staticmethod
        def fallocate(*_: int) -> int:
            segment_files.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(segment_files, "_libc", Libc)
    clock = Clock()
    a, b = chain("a", 10), chain("b", 5)
    with opened(tmp_path, clock=clock, segment_bytes=10 * RECORD) as store:
        put(store, a)
        clock.now += 3600
        put(store, b)
        store.touch(a[:4])
        assert store.flush(WAIT_S)
        store.drop(a[4:])
        assert store.flush(WAIT_S)
        first = segments(tmp_path)[0]
        with first.open("rb") as file:
            assert [header.key for _, header in scan(file.fileno())] == a[:4]
        assert read(store, a) == 4
        store.drop(a[:4])
        assert store.flush(WAIT_S)
        assert first not in segments(tmp_path)
        assert store.stats().bytes == 5 * (RECORD + 256)


def test_reads_survive_eviction_under_way(tmp_path: Path) -> None:
    """Blocks evicted between lookup and read are misses, and no corruption."""
    keys = chain("a", 10)
    with opened(tmp_path, rows=4) as store:
        put(store, keys)
        reader = Reader(store, keys)
        reader.wait_until(lambda: len(reader.blocks) == 2, free=False)
        store.drop(keys[6:])
        assert store.flush(WAIT_S)
        reader.fetch.free(range(2))
        assert len(reader.finish()) == 6
        assert reader.fetch.failed_at == 6
        assert sum(store.stats().corrupt.values()) == 0


def test_a_store_whose_directory_vanishes_answers_with_misses(tmp_path: Path) -> None:
    keys = chain("a", 4)
    folder = tmp_path / "kv"
    with opened(folder) as store:
        put(store, keys)
        shutil.rmtree(folder)
        assert store.lookup(keys) == []
        assert read(store, keys) == 0
        store.put([StoredBlock(keys[0], 0, 0)], payload_of(keys[:1]), TENANT)
        store.touch(keys)
        assert store.flush(WAIT_S)
        store.reap()
        assert store.stats().io_errors["index"] > 0


def test_a_number_in_a_new_index_is_not_taken_for_the_one_in_the_old(tmp_path: Path) -> None:
    """The index is lost twice; the second time while a batch is written, whose segment's number is another segment's by then."""
    old, new = chain("old", 20), chain("new", 3)
    with opened(tmp_path) as store:
        put(store, old)
    with opened(tmp_path) as store:
        (tmp_path / "index.sqlite").unlink()
        put(store, chain("between", 2))  # in a segment that is the first one of the new index
        eventually(store._index.is_complete)
        segment = store._writer._segment
        assert segment is not None
        writing, go, write = threading.Event(), threading.Event(), segment.write

        def slow(parts: Sequence[np.ndarray]) -> int:
            writing.set()
            assert go.wait(WAIT_S)
            return write(parts)

        segment.write = slow  # type: ignore[method-assign]
        store.put([StoredBlock(key, i, 0) for i, key in enumerate(new)], payload_of(new), TENANT)
        assert writing.wait(WAIT_S)
        (tmp_path / "index.sqlite").unlink()
        eventually(lambda: store.lookup(old) == [0] * 20 and store._index.is_complete())
        go.set()
        assert store.flush(WAIT_S)
        assert store.lookup(new) == []
    with opened(tmp_path) as store:
        assert read(store, old) == 20


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    """Somebody deletes the store while it runs: misses, and after a moment blocks are stored again."""
    folder, keys = tmp_path / "kv", chain("a", 6)
    with opened(folder) as store:
        put(store, keys)
        shutil.rmtree(folder)
        assert read(store, keys) in range(7)  # open files may still be read
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            again = chain(f"b{time.monotonic()}", 6)
            put(store, again)
            if len(store.lookup(again)) == 6:
                break
            time.sleep(0.1)
        assert read(store, again) == 6
        assert segments(folder)
