"""Faults of caches beyond the device: values damaged, halved, crafted or late, and disks that are full."""

from __future__ import annotations

import errno
import os
import pickle
import random
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import WINDOW, greedy, prompt, same
from forebay.cache.segments import StoreDirectory
from forebay.cache.snapshot import Snapshot, pack
from forebay.engine.types import OutputEvent, Request
from redis_servers import Proxy, Server, until
from tiered import (
    ANSWER,
    RECORD_BYTES,
    Clock,
    cold,
    keys_of,
    metrics,
    segments,
    settle,
    tiered,
    total,
)


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A store of sixteen segment files, one for each of sixteen prompts."""
    folder, prompts = tmp_path_factory.mktemp("sixteen"), [prompt(100, number) for number in range(16)]
    for ids in prompts:
        with tiered(folder) as llm:
            llm.generate(ids, greedy(1))
    assert len(segments(folder)) == 16
    return folder, prompts


def _flip(path: Path, numbers: random.Random) -> None:
    """Change one bit of the header or the payload of one of the twelve records."""
    data = bytearray(path.read_bytes())
    data[4096 * numbers.randrange(12) + numbers.choice([*range(100), *range(128, 548)])] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)


@pytest.mark.case("B028")
@pytest.mark.parametrize("how", ["delete", "truncate", "flip", "unreadable"])
def test_b028_damaged_files_are_misses(
    tmp_path: Path, sixteen: tuple[Path, list[list[int]]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the files are damaged while the engine runs; with exact replay every text is that of a cold run."""
    folder, prompts = shutil.copytree(sixteen[0], tmp_path / "kv"), sixteen[1]
    numbers = random.Random(5)
    with tiered(folder, replay="exact") as llm:
        half = numbers.sample(segments(folder), 8)
        opened = os.open

        def refused(path: Any, *arguments: Any, **named: Any) -> int:
            if Path(os.fsdecode(path)) in half:  # the tests may run as root, who may read everything
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return opened(path, *arguments, **named)

        for path in half:
            if how == "delete":
                path.unlink()
            elif how == "truncate":
                os.truncate(path, path.stat().st_size // 2)
            elif how == "flip":
                _flip(path, numbers)
        if how == "unreadable":
            monkeypatch.setattr(os, "open", refused)
        answers = llm.generate(prompts, ANSWER)
        monkeypatch.undo()
        page = metrics(llm)
        for answer, plain in zip(answers, cold(prompts, ANSWER), strict=True):
            same(answer, plain)
        whole = [answer for answer in answers if answer.tiers.ssd == 96]
        assert len(whole) == 8
        bad = {kind: page[f"kv_corruptions_total{{{kind},ssd}}"] for kind in ("checksum", "header", "length", "missing")}
        if how == "unreadable":
            assert page["ssd_errors_total{read}"] >= 8 and not sum(bad.values())
        else:
            kinds = {"delete": ("missing",), "truncate": ("length",), "flip": ("checksum", "header")}[how]
            assert sum(bad[kind] for kind in kinds) == sum(bad.values()) >= 8
        # What was damaged is stored anew.
        settle(llm)
        llm.engine.manager.clear()
        again = llm.generate(prompts, ANSWER)
        assert [answer.tiers.ssd for answer in again] == [96] * 16


@pytest.mark.case("B029")
def test_b029_a_redis_that_throws_away_what_it_likes(redis: Server) -> None:
    """Little room, shared with a program that fills it, and any key may go: hits and misses, and texts of cold runs whichever it was."""
    client = redis.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    numbers, few = random.Random(3), greedy(3, logprobs=1)
    sessions = {number: prompt(20 + number, number) for number in range(16)}
    try:
        with tiered(None, redis.url, replay="exact") as llm:
            pool, origins = llm.engine.reservoir.pool, []
            llm.generate(list(sessions.values()), greedy(1))
            settle(llm)
            client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
            for turn in range(8):
                for i in range(40):  # another program that uses this Redis
                    client.set(f"other:{turn}:{i}", bytes(16 << 10))
                chosen = numbers.sample(sorted(sessions), 6)
                for number in chosen:
                    sessions[number] = [*sessions[number], *prompt(numbers.randrange(1, 20), numbers.randrange(1000))]
                asked = [sessions[number] for number in chosen]
                for answer, plain in zip(llm.generate(asked, few), cold(asked, few), strict=True):
                    same(answer, plain)
                    origins.append(answer.tiers.window)
                    sessions[chosen[asked.index(answer.prompt_ids)]] = [*answer.prompt_ids, *answer.token_ids]
            stats = pool.stats()
            assert origins.count("swa") > 10
            assert stats.misses["absent"] > 10
            assert client.info("stats")["evicted_keys"] > 10
            assert not any(stats.bad.values())
            assert not stats.opened
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.case("B029")
@pytest.mark.parametrize("how", ["first half", "second half", "empty", "another's"])
def test_b029_half_an_entry_is_a_miss_and_is_deleted(redis: Server, how: str) -> None:
    client, ids = redis.client(), prompt(60)
    with tiered(None, redis.url, replay="exact") as llm:
        llm.generate([ids, prompt(60, 2)], greedy(1))
        settle(llm)
        mine = [b"forebay:w1:" + key for key in keys_of(llm, ids)]
        there = [name for name in mine if client.exists(name)]
        foreign = next(name for name in client.keys("forebay:w1:*") if name not in mine)
        assert len(there) >= 2
        value = client.get(there[0])
        half = len(value) // 2
        planted = {"first half": value[:half], "second half": value[half:], "empty": b"", "another's": client.get(foreign)}[how]
        for name in there:
            client.set(name, planted)
        again = llm.generate(ids, ANSWER)[0]
        settle(llm)
        assert again.tiers.hbm == 56
        assert again.tiers.window == "replay"
        same(again, cold([ids], ANSWER)[0])
        assert sum(llm.engine.reservoir.pool.stats().bad.values()) == 2
        assert total(metrics(llm), "window_misses_total") == 1
        assert planted not in client.mget(there)  # deleted, or written anew by the request that missed it
        turn = [*ids, *prompt(20, 4)]
        after = llm.generate(turn, ANSWER)[0]
        assert (after.tiers.hbm, after.tiers.window) == (56, "swa")
        same(after, cold([turn], ANSWER)[0])


@pytest.mark.case("B031")
@pytest.mark.parametrize("answer", ["its own", "another's"])
def test_b031_a_read_that_ends_after_its_time(redis: Server, answer: str) -> None:
    """A reader is held up past the TTL, while other sessions use every window slot. Their rows hold a canary."""
    clock, ids = Clock(), prompt(60)
    turn = [*ids, *prompt(20, 5)]
    canary = 0xA5
    with Proxy(redis.port) as proxy, tiered(None, proxy.url, clock=clock, max_sequences=4, tiers={"redis_timeout_s": 20.0}) as llm:
        engine, pool, seen = llm.engine, llm.engine.reservoir.pool, []
        llm.generate(ids, greedy(1))
        settle(llm)
        names = [b"forebay:w1:" + key for key in keys_of(llm, turn) if redis.client().exists(b"forebay:w1:" + key)]
        if answer == "another's":
            foreign = Snapshot(56, 48, None, 0, np.full((2, WINDOW, 33), canary, np.uint8), None)
            value = pack(foreign, bytes(32), pool._identity, pool._shape, clock())
            for name in names:
                redis.client().set(name, bytes(value))
        load = engine.manager.windows.load
        engine.manager.windows.load = lambda slot, encoder, decoder=None: (seen.append(encoder.clone()), load(slot, encoder, decoder))
        proxy.flowing.clear()
        got: list[OutputEvent] = []
        engine.sink = got.extend
        late = engine.submit(Request(turn, ANSWER))
        engine.step()
        assert proxy.held.wait(5.0)
        # Whoever gets a slot now finds the canary in it, and leaves it there.
        strangers = [engine.submit(Request(prompt(WINDOW + 3, 20 + i), greedy(2))) for i in range(4)]
        while any(sequence.id in engine.choices.known for sequence in strangers):
            engine.step()
        assert late.times.scheduled is None
        engine.manager.windows.data.fill_(canary)
        clock.advance(601.0)
        proxy.flowing.set()
        while engine.busy:
            llm._step()
        (last,) = [event for event in got if event.request_id == late.id and event.finish_reason]
        assert (last.tiers.hbm, last.tiers.window, last.tiers.replayed) == (56, "replay", WINDOW)
        assert not seen
        stats = pool.stats()
        assert stats.hits == 0
        assert (stats.expired, stats.bad["key"]) == ((0, 2) if answer == "another's" else (2, 0))  # both boundaries
        tokens = [token for event in got if event.request_id == late.id for token in event.token_ids]
    with tiered() as plain:
        plain.generate(ids, greedy(1))
        assert tokens == plain.generate(turn, ANSWER)[0].token_ids


# A full disk


@pytest.mark.case("B129")
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_b129_writing_resumes_when_the_disk_is_well_again(tmp_path: Path, fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second write of the bad time gets half of its bytes to the disk."""
    write, bad, calls = os.pwritev, threading.Event(), count()

    def failing(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if not bad.is_set():
            return write(fd, buffers, offset)
        if next(calls) % 2:
            return write(fd, [bytes(buffers[0])[: len(buffers[0]) // 2]], offset)
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "pwritev", failing)
    with tiered(tmp_path, replay="exact") as llm:
        llm.generate(prompt(100, 1), greedy(1))
        settle(llm)
        bad.set()
        answers = []
        for number in (1, 2, 3):
            answers += llm.generate(prompt(100, number), ANSWER)
            if number == 2:
                until(lambda: metrics(llm)["ssd_admission_stopped{}"] == 1)  # for a second
        settle(llm)
        for answer, plain in zip(answers, cold([prompt(100, number) for number in (1, 2, 3)], ANSWER), strict=True):
            same(answer, plain)
        page = metrics(llm)
        assert page["ssd_errors_total{write}"] >= 1
        assert page["kv_drops_total{io_error,ssd}" if fault == errno.EIO else "kv_drops_total{no_space,ssd}"] >= 12
        assert page["kv_blocks{stored,ssd}"] == 12
        assert sum(path.stat().st_size for path in segments(tmp_path)) == 12 * 4096  # nothing of what failed is left
        llm.engine.manager.clear()
        assert llm.generate(prompt(100, 1), greedy(1))[0].tiers.ssd == 96  # reading goes on
        bad.clear()
        until(lambda: metrics(llm)["ssd_admission_stopped{}"] == 0)
        # What it uses now is written, though it was computed in the bad time.
        for number in (2, 3, 4):
            llm.generate(prompt(100, number), greedy(1))
            settle(llm)
        llm.engine.manager.clear()
        answers = llm.generate([prompt(100, number) for number in (1, 2, 3, 4)], ANSWER)
        for answer, plain in zip(answers, cold([prompt(100, n) for n in (1, 2, 3, 4)], ANSWER), strict=True):
            assert answer.tiers.ssd == 96
            same(answer, plain)
        assert not any(llm.engine.reservoir.store.stats().corrupt.values())


@pytest.mark.case("B129")
def test_b129_free_space_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else fills the file system: the store gives up its oldest blocks, and takes new ones when there is room."""
    free = [1 << 30]
    monkeypatch.setattr(StoreDirectory, "free_bytes", lambda self: free[0])
    with tiered(tmp_path, tiers={"ssd_free_bytes": 1 << 20}) as llm:
        store = llm.engine.reservoir.store
        llm.generate(prompt(100, 1), greedy(1))
        settle(llm)
        free[0] = (1 << 20) - 1
        llm.generate(prompt(100, 2), greedy(1))
        settle(llm)
        assert store.stats().blocks <= 12
        assert metrics(llm)["kv_bytes{ssd}"] <= 12 * RECORD_BYTES
        free[0] = 1 << 30
        llm.generate(prompt(100, 3), greedy(1))
        settle(llm)
        llm.engine.manager.clear()
        assert llm.generate(prompt(100, 3), greedy(1))[0].tiers.ssd == 96


# Bytes that would like to be code


class Crafted:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def crafted(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that leaves a trace when somebody loads it."""
    data, mark = pickle.dumps(Crafted(tmp_path / "executed")), tmp_path / "executed"
    pickle.loads(data)
    assert mark.exists()  # it would
    mark.rmdir()
    yield data
    assert not mark.exists()


@pytest.mark.case("B106")
@pytest.mark.parametrize("where", ["segment", "payload", "index", "strangers"])
def test_b106_a_pickle_among_the_files(tmp_path: Path, crafted: bytes, where: str) -> None:
    folder, ids = tmp_path / "kv", prompt(100)
    with tiered(folder) as llm:
        llm.generate(ids, greedy(1))
    (segment,) = segments(folder)
    if where == "segment":
        segment.write_bytes(crafted.ljust(segment.stat().st_size, b"\0"))
    elif where == "payload":
        data = bytearray(segment.read_bytes())
        data[128 : 128 + len(crafted)] = crafted
        segment.write_bytes(data)
    elif where == "index":
        for path in folder.glob("index.sqlite*"):
            path.write_bytes(crafted)
    else:
        for name in ("a.pkl", "a.seg", "a.tmp", "index.pickle"):
            (folder / "segments" / name).write_bytes(crafted)
    with tiered(folder, replay="exact") as llm:
        if where == "index":
            until(lambda: not llm.engine.reservoir.store.stats().rebuilding)
        (answer,) = llm.generate(ids, ANSWER)
        page = metrics(llm)
        same(answer, cold([ids], ANSWER)[0])
        assert answer.tiers.ssd == (0 if where in ("segment", "payload") else 96)
        assert total(page, "kv_corruptions_total") >= (1 if where in ("segment", "payload") else 0)
        if where == "strangers":
            until(lambda: metrics(llm)["ssd_removed_files_total{}"] == 4)


@pytest.mark.case("B106")
def test_b106_a_pickle_in_redis(redis: Server, crafted: bytes) -> None:
    client, ids = redis.client(), prompt(60)
    with tiered(None, redis.url, replay="exact") as llm:
        llm.generate(ids, greedy(1))
        settle(llm)
        for name in client.keys("forebay:w1:*"):
            client.set(name, crafted.ljust(784, b"\0"))
        (answer,) = llm.generate(ids, ANSWER)
        settle(llm)
        same(answer, cold([ids], ANSWER)[0])
        assert answer.tiers.window == "replay"
        page = metrics(llm)
        assert (page["kv_corruptions_total{header,swa}"], page["window_misses_total{bad}"]) == (2, 1)


@pytest.mark.case("B106")
def test_b106_what_comes_to_the_port_of_the_embedded_redis(crafted: bytes) -> None:
    """The one internal port there is: on loopback alone, deaf to whoever has no password."""
    ids = prompt(60)
    with tiered(None, "embedded", tiers={"swa_bytes": 16 << 20}) as llm:
        port = llm.engine.reservoir._embedded.port
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
        assert f"0100007F:{port:04X}" in listening
        six = Path("/proc/net/tcp6")
        everywhere = [line.split()[1] for line in six.read_text().splitlines()[1:]] if six.exists() else []
        assert not [place for place in listening + everywhere if place.endswith(f":{port:04X}") and not place.startswith("0100007F:")]
        llm.generate(ids, greedy(1))
        settle(llm)
        frames = [crafted, b"*1\r\n$999999999\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\na", secrets.token_bytes(4096), b"GET x\r\n", b"\0" * 70_000]
        for frame in frames:
            with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
                connection.settimeout(5.0)
                try:
                    connection.sendall(frame)
                    connection.shutdown(socket.SHUT_WR)
                    answer = connection.recv(1 << 16)
                except OSError as error:
                    if error.errno not in (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET):  # it may hang up before it has read all
                        raise
                    continue
                assert answer == b"" or answer.startswith(b"-")
        again = llm.generate(ids, ANSWER)[0]
        assert again.tiers.window == "swa"
        same(again, cold([ids], ANSWER)[0])
        assert llm.engine.reservoir._embedded.restarts == 0
