"""Processes that share a store and are killed in the middle of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.cache.ssd import SsdStore
from ssd_stores import RECORD, WAIT_S, chain, opened, put, read, segments

# Stores chains of a name, 7 blocks each, as fast as it can; a line on stdout for each that is acknowledged. Its budget makes it evict.
WRITER = """
import sys
import time
from pathlib import Path
from ssd_stores import chain, opened, put
folder, name, budget = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with opened(folder, budget_bytes=budget, segment_bytes=300_000) as store:
    for i in range(1_000_000):
        keys = chain(f"{name} {i}", 7)
        put(store, keys)
        if len(store.lookup(keys)) == 7:
            print(i, flush=True)
"""


def start(folder: Path, name: str, budget: int = 1 << 30) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(folder), name, str(budget)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def kill(process: subprocess.Popen[str], after: int) -> list[int]:
    """Kill a writer once it has acknowledged `after` chains; returns all it acknowledged."""
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(after)]
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    process.wait()
    return seen + [int(line) for line in rest[:-1]]


def records(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments(folder)) // RECORD


@pytest.mark.case("B025")
@pytest.mark.parametrize("lose_index", [False, True])
def test_killed_at_random_every_acknowledged_block_is_readable(tmp_path: Path, lose_index: bool) -> None:
    random_ = random.Random(f"crash {lose_index}")
    acknowledged: list[list[bytes]] = []
    for round_ in range(5):
        process = start(tmp_path, f"round {round_}")
        acknowledged += [chain(f"round {round_} {i}", 7) for i in kill(process, random_.randint(1, 120))]
        if lose_index:
            for path in tmp_path.glob("index.sqlite*"):
                path.unlink()
        with opened(tmp_path) as store:
            if lose_index:
                rebuilt(store)
            for keys in acknowledged[-20:]:
                assert read(store, keys) == 7
            stats = store.stats()
            assert stats.blocks >= 7 * len(acknowledged)
            assert sum(stats.corrupt.values()) == 0
            assert stats.bytes == stats.blocks * (RECORD + 256), "nothing else is left on the disk"
            if not lose_index:
                assert records(tmp_path) == stats.blocks
    with opened(tmp_path) as store:
        assert all(read(store, keys) == 7 for keys in acknowledged)


def test_killed_while_it_evicts_the_budget_holds_and_nothing_dead_comes_back(tmp_path: Path) -> None:
    budget = 60 * (RECORD + 256)
    for round_ in range(4):
        last = kill(start(tmp_path, f"round {round_}", budget), 20 + 7 * round_)[-1]
        with opened(tmp_path, budget_bytes=budget) as store:
            store.reap()
            stats = store.stats()
            assert read(store, chain(f"round {round_} {last}", 7)) == 7
            assert stats.blocks <= 60
            assert stats.bytes == stats.blocks * (RECORD + 256)
            allocated = sum(path.stat().st_blocks * 512 for path in segments(tmp_path))
            assert allocated == stats.blocks * RECORD
        for path in tmp_path.glob("index.sqlite*"):
            path.unlink()
        with opened(tmp_path, budget_bytes=budget) as store:
            rebuilt(store)
            store.reap()
            assert store.stats().blocks == stats.blocks, "evicted blocks stay dead without the index"


def rebuilt(store: SsdStore) -> None:
    """Wait until a lost index has been read back from the records."""
    deadline = time.monotonic() + WAIT_S
    while store.stats().rebuilding:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_write_and_one_of_them_dies(tmp_path: Path) -> None:
    first, second = start(tmp_path, "a"), start(tmp_path, "b")
    a = kill(first, 40)
    with opened(tmp_path) as store:
        assert all(read(store, chain(f"a {i}", 7)) == 7 for i in a)
        put(store, chain("c", 5))
        store.reap()
        b = kill(second, 40)
        assert all(read(store, chain(f"b {i}", 7)) == 7 for i in b)
        assert read(store, chain("c", 5)) == 5
        assert sum(store.stats().corrupt.values()) == 0
