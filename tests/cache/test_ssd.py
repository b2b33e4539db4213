"""The SSD store in order: storing, finding, reading, age, budget, several processes' worth of stores in one directory."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cache.segments import MOST_OPEN, SegmentFiles, StoreDirectory, aligned, open_direct
from forebay.cache.ssd import SsdOptions, SsdStore, StoredBlock
from forebay.cache.ssd_index import INDEX_BYTES_PER_BLOCK
from forebay.model.errors import ConfigError
from ssd_stores import BLOCK, RECORD, TENANT, WAIT_S, Clock, Reader, chain, opened, payload_of, put, read, segments

HOUR = 3600.0
COST = RECORD + INDEX_BYTES_PER_BLOCK  # of a block, against the budget


def test_blocks_come_back_in_order_with_their_lineages(tmp_path: Path) -> None:
    keys = chain("a", 40)
    with opened(tmp_path) as store:
        blocks = [StoredBlock(key, i, i % 3) for i, key in enumerate(keys)]
        assert store.put(blocks, payload_of(keys), TENANT) == 40
        assert store.flush(WAIT_S)
        assert store.lookup(keys) == [i % 3 for i in range(40)]
        assert store.lookup(keys, max_lineage=1) == [0, 1]
        assert store.lookup(keys[:7] + chain("b", 3) + keys[7:]) == [0, 1, 2, 0, 1, 2, 0]
        assert store.lookup([]) == []
        assert read(store, keys) == 40
        stats = store.stats()
        assert (stats.blocks, stats.writes, stats.reads, stats.written_bytes) == (40, 40, 40, 40 * BLOCK)
        assert stats.bytes == 40 * COST
        assert stats.lineages == {0: 14, 1: 13, 2: 13} | dict.fromkeys(range(3, 9), 0)
        assert sum(stats.dropped.values()) + sum(stats.corrupt.values()) + sum(stats.io_errors.values()) == 0


def test_more_blocks_than_rows_arrive_and_every_row_comes_back(tmp_path: Path) -> None:
    keys = chain("a", 300)
    with opened(tmp_path, rows=5) as store:
        put(store, keys)
        assert read(store, keys) == 300
        assert store._readers.rows_free() == 5


@pytest.mark.case("B025")
def test_a_restart_serves_everything(tmp_path: Path) -> None:
    keys = chain("a", 60)
    with opened(tmp_path, segment_bytes=10 * RECORD) as store:
        put(store, keys)
    assert len(segments(tmp_path)) == 6
    with opened(tmp_path) as store:
        assert len(store.lookup(keys)) == 60
        assert read(store, keys) == 60
        assert store.stats().removed_files == 0


def test_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    with opened(folder) as store:
        put(store, chain("a", 2))
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
        assert modes[folder / "segments"] == 0o700


def test_an_unusable_directory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = r"cannot use .*: Not a directory; choose another --cache-dir"
    with pytest.raises(ConfigError, match=text), opened(tmp_path / "file" / "store"):
        pass
    with pytest.raises(ConfigError, match="staging_bytes"):
        SsdStore(SsdOptions(tmp_path, 1), identity="m", block_bytes=BLOCK, staging=np.zeros(BLOCK, np.uint8))


@pytest.mark.case("B035")
def test_another_identity_never_hits(tmp_path: Path) -> None:
    keys = chain("a", 4)
    with opened(tmp_path, identity="kv1") as first, opened(tmp_path, identity="kv2") as second:
        put(first, keys)
        assert second.lookup(keys) == []
        assert read(second, keys) == 0
        put(second, keys[:1])
        assert (second.lookup(keys), first.lookup(keys)) == ([0], [])
        assert first.lookup(keys[1:]) == [0, 0, 0]


def test_a_better_lineage_replaces_and_a_worse_one_only_renews(tmp_path: Path) -> None:
    keys = chain("a", 3)
    with opened(tmp_path) as store:
        put(store, keys, lineage=2)
        put(store, keys, lineage=3)
        assert (store.lookup(keys), store.stats().writes, store.stats().refreshed) == ([2, 2, 2], 3, 3)
        put(store, keys, lineage=1)
        assert (store.lookup(keys), store.stats().writes) == ([1, 1, 1], 6)
        store.reap()
        assert store.stats().bytes == 3 * COST, "the replaced records are gone from the disk"
        assert read(store, keys) == 3


def test_payload_is_read_after_ready(tmp_path: Path) -> None:
    keys = chain("a", 2)
    payload = np.zeros((2, BLOCK), np.uint8)
    with opened(tmp_path) as store:
        store.put([StoredBlock(key, i, 0) for i, key in enumerate(keys)], payload, TENANT, lambda: np.copyto(payload, payload_of(keys)))
        store.flush(WAIT_S)
        assert read(store, keys) == 2


def test_a_failing_copy_stores_nothing_and_the_store_goes_on(tmp_path: Path) -> None:
    def ready() -> None:
        raise RuntimeError("device lost")

    keys = chain("a", 2)
    with opened(tmp_path) as store:
        store.put([StoredBlock(key, i, 0) for i, key in enumerate(keys)], payload_of(keys), TENANT, ready)
        store.flush(WAIT_S)
        stats = store.stats()
        assert (store.lookup(keys), stats.dropped["io_error"], stats.io_errors["write"], stats.admitting) == ([], 2, 1, False)
        store._writer._paused_until = 0.0
        put(store, keys)
        assert read(store, keys) == 2


def test_a_full_queue_takes_the_heads_and_counts_the_rest(tmp_path: Path) -> None:
    gate = threading.Event()
    keys = chain("a", 10)
    with opened(tmp_path, queue_bytes=6 * BLOCK) as store:
        assert store.put([StoredBlock(keys[0], 0, 0)], payload_of(keys[:1]), TENANT, lambda: gate.wait(WAIT_S) and None) == 1
        rest = [StoredBlock(key, i + 1, 0) for i, key in enumerate(keys[1:])]
        assert store.put(rest, payload_of(keys[1:]), TENANT) == 5
        assert store.put(rest, payload_of(keys[1:]), TENANT) == 0
        stats = store.stats()
        assert (stats.queue_blocks, stats.queue_bytes, stats.dropped["queue_full"]) == (6, 6 * BLOCK, 4 + 9)
        assert not store.flush(0.01)
        gate.set()
        assert store.flush(WAIT_S)
        assert len(store.lookup(keys)) == 6
        assert store.stats().queue_blocks == 0


def test_a_drop_that_ends_during_a_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are read before it, and when they are compared with what is being dropped it is over: they are gone all the same."""
    keys = chain("a", 6)
    with opened(tmp_path) as store:
        put(store, keys)
        read_rows, forget, looking = store._index.chain, store._writer._forget, threading.Event()

        def late(dropped: list[bytes]) -> None:
            looking.wait(WAIT_S)
            forget(dropped)

        def rows(*args: Any) -> Any:
            found = read_rows(*args)
            looking.set()
            assert store.flush(WAIT_S)
            return found

        monkeypatch.setattr(store._writer, "_forget", late)
        monkeypatch.setattr(store._index, "chain", rows)
        store.drop(keys[2:4])
        assert len(store.lookup(keys)) == 2
        assert len(store.lookup(keys)) == 2


def test_dropped_blocks_are_gone_queued_or_stored(tmp_path: Path) -> None:
    gate = threading.Event()
    keys = chain("a", 9)
    with opened(tmp_path) as store:
        put(store, keys[:3])
        store.put([StoredBlock(keys[3], 3, 0)], payload_of(keys[3:4]), TENANT, lambda: gate.wait(WAIT_S) and None)
        store.put([StoredBlock(key, 4 + i, 0) for i, key in enumerate(keys[4:])], payload_of(keys[4:]), TENANT)
        store.drop([keys[2], keys[3], keys[5]])
        assert len(store.lookup(keys)) == 2, "at once"
        gate.set()
        assert store.flush(WAIT_S)
        assert [len(store.lookup([key])) for key in keys] == [1, 1, 0, 0, 1, 0, 1, 1, 1]
        put(store, keys[2:4], first=2)
        assert len(store.lookup(keys)) == 5
        assert read(store, keys) == 5


@pytest.mark.case("B027")
def test_a_block_lives_72_hours_after_its_last_use(tmp_path: Path) -> None:
    clock = Clock()
    old, used, read_ = chain("old", 3), chain("used", 3), chain("read", 3)
    with opened(tmp_path, clock=clock) as store:
        for keys in (old, used, read_):
            put(store, keys)
        clock.now += 71 * HOUR
        store.touch(used)
        assert read(store, read_) == 3
        assert store.flush(WAIT_S)
        assert store.stats().refreshed == 6
    clock.now += HOUR - 1
    with opened(tmp_path, clock=clock) as store:
        assert len(store.lookup(old)) == 3
        clock.now += 120
        assert store.lookup(old) == []
        assert read(store, old) == 0
        store.reap()
        assert store.stats().blocks == 6
        clock.now += 70 * HOUR
        assert len(store.lookup(used)) == len(store.lookup(read_)) == 3
        clock.now += HOUR
        assert store.lookup(used) == store.lookup(read_) == []
        store.reap()
        stats = store.stats()
        assert (stats.blocks, stats.bytes, stats.expired) == (0, 0, 9)
        ages = store.take_ages()[1]
        assert len(ages) == 9
        assert all(72 * HOUR <= age <= 73 * HOUR for age in ages)
        assert store.take_ages() == ([], [])
    assert segments(tmp_path) == []


def test_an_expired_block_is_not_renewed_but_written_again(tmp_path: Path) -> None:
    clock = Clock()
    keys = chain("a", 2)
    with opened(tmp_path, clock=clock) as store:
        store._keeper._reaped_at = clock.now + 73 * HOUR  # it has just reaped
        put(store, keys)
        clock.now += 73 * HOUR
        store.touch(keys)
        assert store.flush(WAIT_S)
        assert store.lookup(keys) == []
        assert store.take_missing() == keys
        put(store, keys)
        assert (len(store.lookup(keys)), store.stats().writes) == (2, 4)


def test_touched_keys_that_are_not_stored_are_reported_once(tmp_path: Path) -> None:
    keys = chain("a", 4)
    with opened(tmp_path) as store:
        put(store, keys[:2])
        store.touch(keys)
        assert store.flush(WAIT_S)
        assert store.take_missing() == keys[2:]
        assert store.take_missing() == []


@pytest.mark.case("B020")
def test_over_budget_the_least_recently_used_leave_tails_first(tmp_path: Path) -> None:
    clock = Clock()
    old, kept, new = chain("old", 6), chain("kept", 6), chain("new", 4)
    with opened(tmp_path, clock=clock, budget_bytes=14 * COST) as store:
        for keys in (old, kept):
            put(store, keys)
            clock.now += 600
        put(store, new)
        assert [len(store.lookup(keys)) for keys in (old, kept, new)] == [4, 6, 4]
        stats = store.stats()
        assert (stats.blocks, stats.bytes, stats.evicted) == (14, 14 * COST, 2)
        assert store.take_ages()[1] == [1200.0, 1200.0]
        clock.now += 600
        store.touch(old)
        put(store, chain("newer", 8))
        assert [len(store.lookup(keys)) for keys in (old, kept, new)] == [4, 0, 2]
        assert sum(path.stat().st_blocks * 512 for path in segments(tmp_path)) == 14 * RECORD


def test_a_chain_written_in_parts_and_touched_as_a_whole_loses_its_tail(tmp_path: Path) -> None:
    clock = Clock()
    keys = chain("a", 8)
    with opened(tmp_path, clock=clock, budget_bytes=8 * COST) as store:
        for i in range(0, 8, 2):
            put(store, keys[i : i + 2], first=i)
            clock.now += 1
        store.touch(keys)
        put(store, chain("b", 3))
        assert len(store.lookup(keys)) == 5


def test_a_chain_longer_than_the_budget_keeps_its_head(tmp_path: Path) -> None:
    keys = chain("a", 12)
    with opened(tmp_path, clock=Clock(), budget_bytes=5 * COST) as store:
        put(store, keys)
        assert len(store.lookup(keys)) == 5
        assert store.stats().dropped["no_space"] == 7
        assert read(store, keys[:5]) == 5


def test_below_the_free_floor_nothing_is_kept_or_written(tmp_path: Path) -> None:
    keys = chain("a", 3)
    with opened(tmp_path, clock=Clock()) as store:
        put(store, keys)
    with opened(tmp_path, clock=Clock(), free_bytes=1 << 60) as store:
        put(store, chain("b", 2))
        stats = store.stats()
        assert (stats.blocks, stats.evicted, stats.dropped["no_space"]) == (0, 3, 2)


def test_two_stores_of_one_directory_see_each_other_at_once(tmp_path: Path) -> None:
    a, b = chain("a", 5), chain("b", 5)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        put(first, a)
        put(second, b)
        assert len(segments(tmp_path)) == 2
        assert [len(store.lookup(keys)) for store in (first, second) for keys in (a, b)] == [5] * 4
        assert read(first, b) == read(second, a) == 5
        second.reap()
        assert len(segments(tmp_path)) == 2
        assert first.stats().blocks == second.stats().blocks == 10


def test_fetches_of_one_chain_share_reads_and_rows(tmp_path: Path) -> None:
    keys = chain("a", 4)
    with opened(tmp_path, rows=8) as store:
        put(store, keys)
        readers = [Reader(store, keys) for _ in range(2)]
        for reader in readers:
            reader.fetch.promote()
            reader.wait_until(lambda reader=reader: len(reader.blocks) == 4, free=False)  # type: ignore[misc]
        assert store.stats().reads == 4
        assert store._readers.rows_free() == 4
        readers[0].fetch.free(range(4))
        assert store._readers.rows_free() == 4, "the other one still has them"
        readers[1].fetch.free(range(4))
        readers[1].fetch.free(range(4))
        assert store._readers.rows_free() == 8


def test_waiting_fetches_leave_half_of_the_rows_to_admitted_ones(tmp_path: Path) -> None:
    a, b, c = (chain(name, 20) for name in "abc")
    with opened(tmp_path, rows=8) as store:
        for keys in (a, b, c):
            put(store, keys)
        first = Reader(store, a)
        first.wait_until(lambda: len(first.blocks) == 4, free=False)
        second, third = Reader(store, b), Reader(store, c)
        assert second.step() == []
        assert store._readers.rows_free() == 4
        assert len(third.finish()) == 20, "an admitted one goes on while others hold rows"
        first.fetch.promote()
        first.wait_until(lambda: len(first.blocks) == 8, free=False)
        first.fetch.free(range(8))
        assert len(first.finish()) == 20
        assert len(second.finish()) == 20
        assert store._readers.rows_free() == 8


def test_shared_rows_of_waiting_fetches_count(tmp_path: Path) -> None:
    """Waiting fetches that read along with an admitted one may not end up with all rows."""
    keys, other = chain("a", 20), chain("b", 20)
    with opened(tmp_path, rows=8) as store:
        put(store, keys)
        put(store, other)
        admitted = Reader(store, keys)
        admitted.fetch.promote()
        admitted.wait_until(lambda: len(admitted.blocks) == 8, free=False)
        along = Reader(store, keys)
        along.wait_until(lambda: len(along.blocks) == 4, free=False)
        admitted.fetch.cancel()
        admitted.fetch.free(range(8))
        assert store._readers.rows_free() == 4
        assert len(Reader(store, other).finish()) == 20


def test_a_cancelled_fetch_gives_its_rows_back_except_those_taken(tmp_path: Path) -> None:
    keys = chain("a", 20)
    with opened(tmp_path, rows=8) as store:
        put(store, keys)
        reader = Reader(store, keys)
        reader.wait_until(lambda: len(reader.blocks) > 0, free=False)
        taken = len(reader.blocks)
        reader.fetch.cancel()
        reader.fetch.cancel()
        assert reader.fetch.finished
        assert reader.fetch.take() == []
        assert read(store, keys) == 20, "rows under way came back"
        assert store._readers.rows_free() == 8 - taken
        reader.fetch.free(range(20))
        assert store._readers.rows_free() == 8


def test_a_block_that_is_not_stored_ends_a_fetch(tmp_path: Path) -> None:
    keys = chain("a", 6)
    with opened(tmp_path) as store:
        put(store, keys[:3])
        put(store, keys[4:], first=4)
        reader = Reader(store, keys)
        assert len(reader.finish()) == 3
        assert (reader.fetch.failed_at, reader.fetch.finished) == (3, True)
        assert store._readers.rows_free() == 16
        assert sum(store.stats().corrupt.values()) == 0


def test_after_close_everything_is_a_miss(tmp_path: Path) -> None:
    keys = chain("a", 3)
    with opened(tmp_path) as store:
        put(store, keys)
        store.close()
        store.close()
        assert store.put([StoredBlock(keys[0], 0, 0)], payload_of(keys[:1]), TENANT) == 0
        assert store.lookup(keys) == []
        fetch = store.fetch(keys, lambda: None)
        assert (fetch.finished, fetch.failed_at, fetch.take()) == (True, 0, [])
        store.touch(keys)
        assert store.stats().blocks == 3
        assert store.stats().dropped["closed"] == 1
        store.reap()


@pytest.mark.case("B027")
def test_unknown_files_are_removed_and_counted(tmp_path: Path) -> None:
    keys = chain("a", 3)
    with opened(tmp_path) as store:
        put(store, keys)
    (tmp_path / "segments" / "half.tmp").write_bytes(b"x")
    (tmp_path / "segments" / "0-stranger.seg").write_bytes(os.urandom(9000))
    (tmp_path / "notes.txt").write_text("of the operator")
    with opened(tmp_path) as store:
        deadline = time.monotonic() + WAIT_S
        while store.stats().removed_files < 2 and time.monotonic() < deadline:  # the keeper tidies in its own time, and counts when done
            time.sleep(0.01)
        assert store.stats().removed_files == 2
        assert sorted(path.name for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".txt", ".seg")) == sorted(
            ["notes.txt", segments(tmp_path)[0].name]
        )
        assert read(store, keys) == 3


def test_few_segments_are_open_at_once_however_many_are_read(tmp_path: Path) -> None:
    """Reads overlap all the time, so there may be no moment without one."""
    directory = StoreDirectory(tmp_path)
    directory.create()
    names = [f"{i:04}.seg" for i in range(3 * MOST_OPEN)]
    for name in names:
        directory.segment(name).write_bytes(bytes(4096))
    files = SegmentFiles(directory)
    most = 0

    def work(first: int) -> None:
        nonlocal most
        row = aligned(4096)
        for name in names[first:] + names[:first]:
            assert files.read(name, [row], 0) == 4096
            most = max(most, len(files._files))

    open_before = len(os.listdir("/proc/self/fd"))
    files._files[names[0]] = [open_direct(directory.segment(names[0]), os.O_RDONLY), 1]  # a read that takes long
    threads = [threading.Thread(target=work, args=(17 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= MOST_OPEN + 4
    files._files[names[0]][1] = 0
    files.close()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_fetch_knows_whether_it_is_read_or_waits_for_its_turn(tmp_path: Path) -> None:
    a, b = chain("a", 4), chain("b", 4)
    with opened(tmp_path, rows=8, readers=1) as store:
        put(store, a + b)
        files, gate, turns = store._readers._files, threading.Semaphore(0), threading.Semaphore(0)
        read_now = files.read

        def wait_for_the_gate(*args: Any) -> int:
            turns.release()
            assert gate.acquire(timeout=WAIT_S)
            return read_now(*args)

        files.read = wait_for_the_gate  # type: ignore[method-assign]
        first, second = Reader(store, a), Reader(store, b)
        assert turns.acquire(timeout=WAIT_S)
        begun = first.fetch.still_since
        assert begun > 0
        assert second.fetch.still_since == 0, "nothing has ever come"
        gate.release()
        first.finish()
        assert turns.acquire(timeout=WAIT_S)
        assert second.fetch.still_since > store._readers.moved_at > begun
        gate.release()
        second.finish()


def test_a_fetch_that_waits_for_rows_keeps_no_segment_open(tmp_path: Path) -> None:
    """Evicted segments would hold their space on disk, beyond the budget."""
    with opened(tmp_path, segment_bytes=10 * RECORD) as store:
        chains = [chain(i, 10) for i in range(4)]
        for keys in chains:
            put(store, keys)
        waiting = Reader(store, chains[0])
        waiting.wait_until(lambda: len(waiting.blocks) == 8, free=False)  # half of the rows, until its request is admitted
        for keys in chains[1:]:
            read(store, keys)
        store.drop([key for keys in chains for key in keys])
        assert store.flush(WAIT_S)
        store.reap()
        assert len(segments(tmp_path)) <= 1  # the one being written
        names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [name for name in names if name.startswith(str(tmp_path)) and name.endswith(".seg (deleted)")]
