"""The snapshot pool against a real server: what is stored comes back, for as long as it lives, or is a miss with a reason."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cache.snapshot import BAD_KINDS, Snapshot, SnapshotShape, SnapshotShapeError
from forebay.cache.swa import KEY_PREFIX, MISSES, SwaOptions, SwaPool
from forebay.model.errors import ConfigError
from redis_servers import Proxy, Server, unix_server, until

SHAPE = SnapshotShape(encoder_layers=2, decoder_layers=2, window=128, row_bytes=528)  # large enough to be read as large values are
SMALL = SnapshotShape(encoder_layers=2, decoder_layers=2, window=8, row_bytes=33)
PATIENT = 5.0  # seconds; where the deadline is not what is tested, a busy machine must not spoil the test


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


def make(canary: int, decoder: bool = False, shape: SnapshotShape = SHAPE, lineage: int = 0) -> Snapshot:
    rows = [np.full(half, canary, np.uint8) for half in (shape.encoder, shape.decoder)]
    return Snapshot(256, 128, 128 if decoder else None, lineage, rows[0], rows[1] if decoder else None)


def canary(found: tuple[bytes, Snapshot] | None) -> int | None:
    """The byte all rows of a snapshot hold; None for a miss."""
    if found is None:
        return None
    byte = int(found[1].encoder[0, 0, 0])
    assert (found[1].encoder == byte).all() and (found[1].decoder is None or (found[1].decoder == byte).all()), "rows of two snapshots"
    return byte


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(maxmemory="200mb", maxmemory_policy="volatile-ttl") as server:
        yield server


@pytest.fixture
def raw(server: Server) -> Any:
    """A plain client of an empty server."""
    client = server.client()
    client.flushall()
    return client


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_pool(server: Server, clock: Clock) -> Iterator[Callable[..., SwaPool]]:
    pools = []

    def make_pool(url: str | None = None, identity: str = "a model", shape: SnapshotShape = SHAPE, **options: Any) -> SwaPool:
        options = {"timeout_s": PATIENT, "connect_timeout_s": PATIENT} | options
        pools.append(SwaPool(SwaOptions(url or server.url, **options), identity=identity, shape=shape, clock=clock))
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close(0.1)


@pytest.fixture
def pool(raw: Any, make_pool: Callable[..., SwaPool]) -> SwaPool:
    return make_pool()


@pytest.mark.parametrize("shape", [SHAPE, SMALL], ids=["large", "small"])
def test_what_is_stored_comes_back(raw: Any, make_pool: Callable[..., SwaPool], shape: SnapshotShape) -> None:
    pool = make_pool(shape=shape)
    one, two = os.urandom(32), os.urandom(32)
    assert pool.put(one, make(1, shape=shape, lineage=1)) and pool.put(two, make(2, True, shape, lineage=2))
    assert pool.flush(PATIENT)
    other = make_pool(shape=shape)  # another process would be the same
    for reader in (pool, other):
        for key, byte in ((one, 1), (two, 2)):
            found = reader.get([key])
            assert found is not None and found[0] == key and canary(found) == byte
            assert (found[1].boundary, found[1].encoder_floor, found[1].lineage) == (256, 128, byte)
            assert (found[1].decoder is not None) == (found[1].decoder_floor is not None) == (byte == 2)
    stats = pool.stats()
    assert (stats.hits, stats.stores, stats.breaker, stats.queue_bytes) == (2, 2, "closed", 0)
    assert stats.read_bytes == stats.written_bytes == make(1, shape=shape).nbytes + make(2, True, shape).nbytes
    gets, puts = pool.take_latencies()
    assert len(gets) == len(puts) == 2 and min(gets + puts) > 0
    assert pool.take_latencies() == ([], [])


def test_counters_are_there_from_the_start(pool: SwaPool) -> None:
    stats = pool.stats()
    assert stats.misses == dict.fromkeys(("absent", "breaker", "timeout", "error", "bad"), 0) and tuple(stats.misses) == MISSES
    assert stats.dropped == dict.fromkeys(("queue_full", "breaker", "oom", "error"), 0)
    assert stats.bad == dict.fromkeys(BAD_KINDS, 0)
    assert pool.get([]) is None and pool.stats() == stats


def test_the_first_key_that_is_there_wins(pool: SwaPool) -> None:
    keys = [os.urandom(32) for _ in range(4)]
    pool.put(keys[1], make(1))
    pool.put(keys[2], make(2))
    assert pool.flush(PATIENT)
    assert canary(pool.get(keys)) == 1
    assert canary(pool.get(keys[2:])) == 2
    assert pool.get(keys[3:]) is None
    assert pool.stats().misses["absent"] == 1


def test_a_queued_snapshot_is_served_and_the_last_put_wins(server: Server, pool: SwaPool) -> None:
    first, second, stored = os.urandom(32), os.urandom(32), os.urandom(32)
    pool.put(stored, make(9))
    assert pool.flush(PATIENT)
    server.signal(signal.SIGSTOP)
    try:
        for byte in (1, 2, 3):
            assert pool.put(first, make(byte))
            assert canary(pool.get([first])) == byte
        assert pool.put(second, make(4))
        assert pool.stats().queue_bytes == 2 * make(0).nbytes  # only now one snapshot per key
    finally:
        server.signal(signal.SIGCONT)
    assert canary(pool.get([stored, second])) == 9  # preferred, though it has to be asked for
    assert pool.flush(PATIENT)
    assert canary(pool.get([first])) == 3


def test_the_queue_is_bounded_and_the_newest_is_dropped(server: Server, raw: Any, make_pool: Callable[..., SwaPool]) -> None:
    pool = make_pool(queue_bytes=3 * make(0).nbytes)
    keys = [os.urandom(32) for _ in range(5)]
    server.signal(signal.SIGSTOP)
    try:
        assert [pool.put(key, make(i)) for i, key in enumerate(keys)] == [True, True, True, False, False]
        assert pool.put(keys[0], make(7))  # in the place of the one it replaces
    finally:
        server.signal(signal.SIGCONT)
    assert pool.flush(PATIENT)
    assert pool.stats().dropped["queue_full"] == 2
    assert [canary(pool.get([key])) for key in keys] == [7, 1, 2, None, None]


def test_time_to_live_starts_again_with_every_read(pool: SwaPool, raw: Any, clock: Clock) -> None:
    key = os.urandom(32)
    pool.put(key, make(1))
    assert pool.flush(PATIENT)
    assert 590_000 < raw.pttl(KEY_PREFIX + key) <= 600_000
    raw.pexpire(KEY_PREFIX + key, 5_000)
    assert pool.get([key]) is not None
    assert raw.pttl(KEY_PREFIX + key) > 590_000
    assert pool.stats().refreshed == 0  # stored just now
    for _ in range(3):
        clock.seconds += 550
        assert canary(pool.get([key])) == 1
        assert pool.flush(PATIENT)
    assert pool.stats().refreshed == 3
    assert 590_000 < raw.pttl(KEY_PREFIX + key) <= 600_000


@pytest.mark.case("B022")
def test_nothing_is_used_after_its_time(pool: SwaPool, clock: Clock) -> None:
    """By the injected clock, though the server's has not moved."""
    key = os.urandom(32)
    pool.put(key, make(1))
    assert pool.flush(PATIENT)
    clock.seconds += 599
    assert pool.get([key]) is not None and pool.flush(PATIENT)
    clock.seconds += 601
    assert pool.get([key]) is None
    assert (pool.stats().misses["absent"], pool.stats().expired) == (1, 1)


def test_a_queued_snapshot_ages_too(server: Server, pool: SwaPool, raw: Any, clock: Clock) -> None:
    keys = os.urandom(32), os.urandom(32)
    server.signal(signal.SIGSTOP)
    try:
        for key in keys:
            pool.put(key, make(1))
        clock.seconds += 601
        assert pool.get([keys[1]], deadline_s=0.01) is None
    finally:
        server.signal(signal.SIGCONT)
    assert pool.flush(PATIENT)
    assert not raw.exists(KEY_PREFIX + keys[1])  # not even sent


@pytest.mark.case("B031")
def test_a_read_that_ends_too_late_is_rejected(server: Server, pool: SwaPool, clock: Clock, make_pool: Callable[..., SwaPool]) -> None:
    """The reader stalls past the time to live while another session stores under the same name."""
    mine, theirs = os.urandom(32), os.urandom(32)
    pool.put(mine, make(0xA1))
    assert pool.flush(PATIENT)
    with Proxy(server.port) as proxy:
        stalled = make_pool(proxy.url, timeout_s=30.0)
        got: list[object] = []
        proxy.flowing.clear()
        thread = threading.Thread(target=lambda: got.append(stalled.get([mine])))
        thread.start()
        assert proxy.held.wait(PATIENT)
        clock.seconds += 601
        pool.put(theirs, make(0xB2))
        pool.put(mine, make(0xB2))
        assert pool.flush(PATIENT)
        proxy.flowing.set()
        thread.join(PATIENT)
        assert got == [None]
        assert stalled.stats().expired == 1
        assert canary(stalled.get([mine])) == 0xB2  # a read begun now is served


@pytest.mark.case("B031")
def test_an_answer_after_the_deadline_is_nobody_elses(server: Server, pool: SwaPool, make_pool: Callable[..., SwaPool]) -> None:
    """The reads that gave up and the reads that follow share connections and threads, never bytes."""
    keys = {byte: os.urandom(32) for byte in range(8)}
    for byte, key in keys.items():
        pool.put(key, make(byte))
    assert pool.flush(PATIENT)
    with Proxy(server.port) as proxy:
        hasty = make_pool(proxy.url, readers=2)
        for _ in range(5):
            proxy.flowing.clear()
            assert hasty.get([keys[0]], deadline_s=0.01) is None
            assert hasty.get([keys[1]], deadline_s=0.01) is None
            proxy.flowing.set()
            for byte, key in keys.items():
                assert canary(hasty.get([key])) == byte
        stats = hasty.stats()
        assert (stats.hits, stats.misses["timeout"], stats.opened) == (40, 10, 0)  # a caller in a hurry is no fault of the server


@pytest.mark.case("B035")
def test_another_identity_never_hits(pool: SwaPool, make_pool: Callable[..., SwaPool], raw: Any) -> None:
    key = os.urandom(32)
    pool.put(key, make(1))
    assert pool.flush(PATIENT)
    other = make_pool(identity="another model")
    assert other.get([key]) is None
    assert other.flush(PATIENT)
    assert other.stats().bad["identity"] == other.stats().misses["bad"] == 1
    assert not raw.exists(KEY_PREFIX + key)


@pytest.mark.parametrize("damage", ["cut", "bit", "header", "empty", "pickle", "moved", "list", "longer"])
def test_damaged_and_foreign_values_are_deleted_and_counted(pool: SwaPool, raw: Any, damage: str, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> object:
            return Path.touch, (tmp_path / "sprung",)

    key, other = os.urandom(32), os.urandom(32)
    pool.put(key, make(1))
    pool.put(other, make(2))
    assert pool.flush(PATIENT)
    name = KEY_PREFIX + key
    value = bytearray(raw.get(name))
    match damage:
        case "cut":
            raw.set(name, bytes(value[: len(value) // 2]))
        case "bit":
            value[-7] ^= 8
            raw.set(name, bytes(value))
        case "header":
            value[60] ^= 8
            raw.set(name, bytes(value))
        case "empty":
            raw.set(name, b"")
        case "pickle":
            raw.set(name, pickle.dumps(Trap()) * 20)
        case "moved":
            raw.set(name, raw.get(KEY_PREFIX + other))
        case "list":
            raw.delete(name)
            raw.rpush(name, "a", "b")
        case "longer":
            raw.append(name, b"x")
    assert canary(pool.get([key, other])) == 2  # the next best is served
    assert pool.get([key]) is None
    assert pool.flush(PATIENT)
    stats = pool.stats()
    kind = {"cut": "length", "empty": "length", "longer": "length", "bit": "checksum", "moved": "key"}.get(damage, "header")
    assert stats.bad[kind] == sum(stats.bad.values()) >= 1
    assert not raw.exists(name)
    assert not (tmp_path / "sprung").exists()
    assert stats.breaker == "closed" and stats.opened == 0
    assert pool.put(key, make(3)) and pool.flush(PATIENT)
    assert canary(pool.get([key])) == 3


@pytest.mark.case("B029")
def test_a_server_that_evicts_whatever_it_likes(make_pool: Callable[..., SwaPool]) -> None:
    """A snapshot is one key: it is there as a whole or not at all."""
    with Server(maxmemory="16mb", maxmemory_policy="allkeys-lru") as small:
        pool = make_pool(small.url)
        keys = [os.urandom(32) for _ in range(400)]
        for i, key in enumerate(keys):
            assert pool.put(key, make(i % 251, decoder=i % 2 == 0))
            if i % 3 == 0:
                assert canary(pool.get([keys[i // 2]])) in (i // 2 % 251, None)
        assert pool.flush(PATIENT)
        found = [canary(pool.get([key])) for key in keys]
        assert all(byte in (i % 251, None) for i, byte in enumerate(found))
        assert 0 < found.count(None) < len(keys)
        stats = pool.stats()
        assert sum(stats.bad.values()) == 0 and sum(stats.dropped.values()) == 0 and stats.opened == 0


def test_a_full_server_takes_nothing_and_serves_what_it_has(make_pool: Callable[..., SwaPool]) -> None:
    with Server(maxmemory="100mb", maxmemory_policy="noeviction") as full:
        pool = make_pool(full.url)
        key = os.urandom(32)
        pool.put(key, make(1))
        assert pool.flush(PATIENT)
        full.client().config_set("maxmemory", "1mb")
        for i in range(10):
            pool.put(os.urandom(32), make(i))
        assert pool.flush(PATIENT)
        assert pool.stats().dropped["oom"] == 10
        assert canary(pool.get([key])) == 1
        assert (pool.stats().breaker, pool.stats().opened) == ("closed", 0)
        full.client().config_set("maxmemory", "100mb")
        late = os.urandom(32)
        pool.put(late, make(5))
        assert pool.flush(PATIENT) and full.client().exists(KEY_PREFIX + late)


def test_purge_deletes_ours_and_nothing_else(pool: SwaPool, raw: Any) -> None:
    raw.set("forebay:w2:x", 1)
    raw.set("other", 1)
    for i in range(1200):
        pool.put(os.urandom(32), make(i % 256))
    assert pool.flush(PATIENT)
    assert pool.purge() == 1200
    assert sorted(raw.keys()) == [b"forebay:w2:x", b"other"]
    key = os.urandom(32)
    pool.put(key, make(1))
    pool.purge()
    assert pool.get([key]) is None


def test_close_stores_what_is_queued(raw: Any, make_pool: Callable[..., SwaPool]) -> None:
    pool = make_pool()
    keys = [os.urandom(32) for _ in range(50)]
    for key in keys:
        pool.put(key, make(1))
    pool.close(PATIENT)
    pool.close(PATIENT)
    assert raw.exists(*(KEY_PREFIX + key for key in keys)) == 50
    assert pool.get(keys) is None and not pool.put(keys[0], make(1))
    assert (pool.stats().misses["error"], pool.stats().dropped["error"]) == (1, 1)


def test_many_threads_at_once(pool: SwaPool) -> None:
    """Every thread reads and writes everything; nobody ever sees a snapshot that is not of the key asked for."""
    keys = [os.urandom(32) for _ in range(20)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(150):
            i = int(random.integers(len(keys)))
            if random.integers(3) == 0:
                pool.put(keys[i], make(i, decoder=bool(random.integers(2))))
            elif canary(pool.get([keys[i]])) not in (i, None):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.stats().hits > 100 and sum(pool.stats().dropped.values()) == 0


def test_over_a_unix_socket(tmp_path: Path, make_pool: Callable[..., SwaPool]) -> None:
    with unix_server(tmp_path) as url:
        pool = make_pool(url)
        key = os.urandom(32)
        pool.put(key, make(1))
        assert pool.flush(PATIENT)
        assert canary(pool.get([key])) == 1 and pool.stats().stores == 1


def test_options_in_the_url_cannot_undo_ours(pool: SwaPool, server: Server, make_pool: Callable[..., SwaPool]) -> None:
    key = os.urandom(32)
    strange = make_pool(f"{server.url}/0?decode_responses=true&socket_timeout=60&retry_on_timeout=true&health_check_interval=1")
    strange.put(key, make(200))
    assert strange.flush(PATIENT)
    assert canary(strange.get([key])) == 200


@pytest.mark.parametrize(
    ("url", "cluster"),
    [
        ("", False), ("127.0.0.1:6379", False), ("http://:hunter2@127.0.0.1", False), ("redis://:hunter2@127.0.0.1:port", False),
        ("redis://:hunter2@127.0.0.1?no_such_option=1", False), ("redis://:hunter2@127.0.0.1?db=x", False),
        ("unix:///tmp/none?password=hunter2", True), ("redis://:hunter2@127.0.0.1/3", True),
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_an_error_at_once(url: str, cluster: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        SwaPool(SwaOptions(url, cluster=cluster), identity="x", shape=SHAPE)
    assert caught.value.param == "redis_url"
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", ["ttl_s", "timeout_s", "queue_bytes", "readers"])
def test_options_must_be_positive(server: Server, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SwaPool(SwaOptions(server.url, **{name: 0}), identity="x", shape=SHAPE)


def test_rows_of_a_wrong_shape_are_a_bug_told_at_once(pool: SwaPool) -> None:
    with pytest.raises(SnapshotShapeError):
        pool.put(os.urandom(32), Snapshot(8, 0, None, 0, np.zeros((1, 8, 33), np.uint8), None))


def test_threads_end_with_the_pool(server: Server) -> None:
    before = set(threading.enumerate())
    pool = SwaPool(SwaOptions(server.url), identity="x", shape=SHAPE)
    assert set(threading.enumerate()) - before
    pool.close()
    until(lambda: not set(threading.enumerate()) - before)


def test_a_window_with_replays_behind_it_never_replaces_a_better_one(server: Server) -> None:
    """As when a lookup missed what is there, and the window was replayed."""
    with contextlib.closing(SwaPool(SwaOptions(server.url, timeout_s=PATIENT), identity="x", shape=SHAPE)) as pool:
        key, other = os.urandom(32), os.urandom(32)
        assert pool.put(key, make(1, lineage=0)) and pool.flush(PATIENT)
        assert pool.put(key, make(2, lineage=1)) and pool.flush(PATIENT)
        assert canary(pool.get([key])) == 1
        with pool._writer._sending:  # nothing is sent meanwhile
            assert pool.put(other, make(3, lineage=2)) and canary(pool.get([other])) == 3
            assert pool.put(other, make(4, lineage=1)) and canary(pool.get([other])) == 4
            assert pool.put(other, make(5, lineage=2)) and canary(pool.get([other])) == 4
        assert pool.flush(PATIENT)
        assert canary(pool.get([other])) == 4
        assert pool.put(other, make(6, lineage=0)) and pool.flush(PATIENT)
        assert canary(pool.get([other])) == 6
        assert pool.stats().stores == 3


def test_what_is_dropped_is_gone_queued_or_stored(server: Server, pool: SwaPool) -> None:
    stored, queued = os.urandom(32), os.urandom(32)
    assert pool.put(stored, make(1)) and pool.flush(PATIENT)
    server.signal(signal.SIGSTOP)
    try:
        assert pool.put(os.urandom(32), make(2)) and pool.put(queued, make(3))
        pool.drop(stored)
        pool.drop(queued)
    finally:
        server.signal(signal.SIGCONT)
    assert pool.flush(PATIENT)
    assert pool.get([stored, queued]) is None
    assert pool.stats().queue_bytes == 0
    assert pool.put(stored, make(4)) and pool.flush(PATIENT)
    assert canary(pool.get([stored])) == 4
