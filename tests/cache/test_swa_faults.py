"""Whatever the server does, a get ends in time, nobody waits twice, and hits come back by themselves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cache.redis_link import RedisLink
from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.cache.swa import SwaOptions, SwaPool
from redis_servers import Listener, Proxy, Server, answering, free_port, tls, trickling, unanswered_port, until

SHAPE = SnapshotShape(encoder_layers=2, decoder_layers=2, window=8, row_bytes=33)
DEADLINE = 0.05
SLACK = 0.2  # seconds more than the deadline: the machine is busy, and a request may be 250 ms late in all


def make(canary: int = 1) -> Snapshot:
    return Snapshot(256, 128, None, 1, np.full(SHAPE.encoder, canary, np.uint8), None)


@pytest.fixture
def make_pool() -> Iterator[Callable[..., SwaPool]]:
    with ExitStack() as stack:

        def make_pool(url: str, **options: Any) -> SwaPool:
            pool = SwaPool(SwaOptions(url, **options), identity="a model", shape=SHAPE)
            stack.callback(pool.close, 0.1)
            return pool

        yield make_pool


def timed_get(pool: SwaPool, key: bytes) -> float:
    """Seconds of a get that must miss."""
    began = time.monotonic()
    assert pool.get([key]) is None
    return time.monotonic() - began


def outage(pool: SwaPool, key: bytes, seconds: float = 1.0) -> None:
    """Gets during an outage: each within the deadline, and all but very few at once, through probes that fail."""
    end, times = time.monotonic() + seconds, []
    while time.monotonic() < end:
        times.append(timed_get(pool, key))
        time.sleep(0.002)  # so that a second of gets is hundreds, not millions
    assert max(times) < DEADLINE + SLACK
    assert sum(t > DEADLINE / 2 for t in times) <= 3  # those on their way when the breaker opened
    stats = pool.stats()
    assert stats.opened == 1 and stats.breaker in ("open", "half_open")
    assert stats.misses["breaker"] > 0.8 * len(times)
    assert not pool.put(os.urandom(32), make())
    assert pool.stats().dropped["breaker"] == 1


def recovers(pool: SwaPool, key: bytes) -> None:
    """Hits come back without anybody's help."""
    until(lambda: pool.get([key]) is not None)
    assert pool.stats().breaker == "closed"
    fresh = os.urandom(32)
    assert pool.put(fresh, make()) and pool.flush(5)
    assert pool.get([fresh]) is not None


def store(server: Server, key: bytes) -> None:
    """Put a snapshot into a server by another pool."""
    pool = SwaPool(SwaOptions(server.url, timeout_s=5, connect_timeout_s=5), identity="a model", shape=SHAPE)
    assert pool.put(key, make()) and pool.flush(5)
    assert pool.stats().stores == 1
    pool.close()


@pytest.mark.case("B040")
def test_absent_at_the_start(make_pool: Callable[..., SwaPool]) -> None:
    port, key = free_port(), os.urandom(32)
    pool = make_pool(f"redis://127.0.0.1:{port}")
    outage(pool, key)
    assert pool.stats().misses["error"] == 3  # refused at once, three times in a row
    with Server(port) as server:
        store(server, key)
        recovers(pool, key)


@pytest.mark.case("B040")
def test_paused_under_load(make_pool: Callable[..., SwaPool]) -> None:
    key = os.urandom(32)
    with Server() as server:
        pool = make_pool(server.url)
        store(server, key)
        until(lambda: pool.get([key]) is not None)
        times: list[float] = []
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                began = time.monotonic()
                pool.get([key])
                times.append(time.monotonic() - began)

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(times) > 50)
            server.signal(signal.SIGSTOP)
            until(lambda: pool.stats().breaker != "closed")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert max(times) < DEADLINE + SLACK
        outage(pool, key)
        server.signal(signal.SIGCONT)
        recovers(pool, key)


@pytest.mark.case("B040")
def test_killed_and_started_again(make_pool: Callable[..., SwaPool]) -> None:
    key = os.urandom(32)
    server = Server()
    with server:
        pool = make_pool(server.url)
        store(server, key)
        until(lambda: pool.get([key]) is not None)
        server.kill()
        outage(pool, key)
        server.start()
        store(server, key)
        recovers(pool, key)
        # A restart between two gets costs no hit beyond what the server has lost.
        server.kill()
        server.start()
        store(server, key)
        opened = pool.stats().opened
        until(lambda: pool.get([key]) is not None, 1)
        assert pool.stats().opened == opened


@pytest.mark.case("B040")
@pytest.mark.parametrize("kind", ["no answer", "no connection"])
def test_black_holed_port(make_pool: Callable[..., SwaPool], kind: str) -> None:
    with ExitStack() as stack:
        if kind == "no answer":
            quiet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # taken by the kernel, read by nobody
            port = quiet.getsockname()[1]
        else:
            port = stack.enter_context(unanswered_port())
        pool = make_pool(f"redis://127.0.0.1:{port}")
        outage(pool, os.urandom(32))
        assert pool.stats().misses["timeout"] >= 1


@pytest.mark.case("B040")
def test_idle_connections_that_died_unnoticed(make_pool: Callable[..., SwaPool]) -> None:
    """A middlebox forgot them: packets vanish, nothing says so. The first to notice has all of them dropped."""
    keys = [os.urandom(32) for _ in range(4)]
    with Server() as server, Proxy(server.port) as proxy:
        for key in keys:
            store(server, key)
        pool = make_pool(proxy.url, timeout_s=0.3, readers=4)

        def all_at_once() -> list[bool]:
            """Every get on a connection of its own: no answer is let through before there are four."""
            hits: list[bool] = []
            proxy.flowing.clear()
            before = proxy.answers
            threads = [threading.Thread(target=lambda key=key: hits.append(pool.get([key]) is not None)) for key in keys]
            for thread in threads:
                thread.start()
            until(lambda: proxy.answers >= before + 4 or not any(thread.is_alive() for thread in threads))
            proxy.flowing.set()
            for thread in threads:
                thread.join()
            return hits

        assert all_at_once() == [True] * 4
        proxy.forget()
        assert timed_get(pool, keys[0]) < 0.3 + SLACK
        assert pool.stats().opened == 1
        recovers(pool, keys[0])
        assert all_at_once() == [True] * 4
        assert pool.stats().opened == 1


@pytest.mark.case("B040")
def test_wrong_password(make_pool: Callable[..., SwaPool]) -> None:
    key = os.urandom(32)
    with Server() as server:
        store(server, key)
        server.client().config_set("requirepass", "right")
        pool = make_pool(f"redis://:wrong@127.0.0.1:{server.port}")
        outage(pool, key)
        assert pool.stats().misses["error"] == 3
        server.settings["requirepass"] = "right"
        server.client().config_set("requirepass", "wrong")
        recovers(pool, key)


def test_read_only_replica(make_pool: Callable[..., SwaPool]) -> None:
    """After a failover we are connected to what was the primary."""
    key = os.urandom(32)
    with Server() as server:
        store(server, key)
        pool = make_pool(server.url)
        until(lambda: pool.get([key]) is not None)
        server.client().replicaof("127.0.0.1", free_port())
        outage(pool, key)
        server.client().replicaof("no", "one")
        recovers(pool, key)


def test_disk_of_the_server_is_full(make_pool: Callable[..., SwaPool]) -> None:
    """MISCONF: the server cannot save and refuses every write."""
    key = os.urandom(32)
    with Server(dir="/proc", save="3600 1", stop_writes_on_bgsave_error="yes") as server:
        pool = make_pool(server.url)
        admin = server.client()
        admin.bgsave()
        until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        for _ in range(3):
            assert pool.put(key, make()) and pool.flush(5)
        assert pool.stats().dropped["error"] == 3
        outage(pool, key, 0.3)
        admin.config_set("stop-writes-on-bgsave-error", "no")
        until(lambda: pool.stats().breaker == "closed")
        assert pool.put(key, make()) and pool.flush(5)
        assert pool.get([key]) is not None


@pytest.mark.parametrize(
    "answer",
    [
        b"-LOADING server is loading the dataset in memory\r\n", b"-MASTERDOWN Link with MASTER is down\r\n", b"-NOPERM no\r\n",
        b"-ERR unknown command 'GETEX'\r\n", b"-MOVED 5 127.0.0.1:1\r\n", b"-CLUSTERDOWN Hash slot not served\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n", b"*100000\r\n",
        b"$1000000000\r\n", b"$2000000000\r\n", b"$70000\r\n" + b"x" * 70002,
        b"$70001\r\n" + b"x" * 70001 + b"\r\n", b":1\r\n", b"*0\r\n", b"+OK\r\n", b"\0" * 1000,
    ],
    ids=lambda answer: repr(answer[:12]),
)  # fmt: skip
def test_answers_that_help_nobody(make_pool: Callable[..., SwaPool], answer: bytes) -> None:
    """States of a server that cannot be brought about at will, and servers that are none."""
    with answering(answer) as listener:
        pool = make_pool(listener.url)
        key = os.urandom(32)
        times = [timed_get(pool, key) for _ in range(20)]
        assert max(times) < DEADLINE + SLACK
        pool.put(key, make())
        assert sum(pool.stats().misses.values()) == 20
        if answer[:1] == b"-":
            assert pool.stats().misses["error"] == 3 and pool.stats().breaker != "closed"


def test_an_answer_that_trickles(make_pool: Callable[..., SwaPool]) -> None:
    """Every read of the socket succeeds in time, the whole never: the deadline is for the whole, and the connection is given up."""
    with trickling(b"x" * 100_000, 0.01) as listener:
        pool = make_pool(listener.url, readers=1)
        outage(pool, os.urandom(32), 0.5)
        assert listener.left.wait(5)


@pytest.mark.parametrize("length", [1000, 100_000])
def test_a_connection_cut_within_an_answer(make_pool: Callable[..., SwaPool], length: int) -> None:
    def treat(connection: socket.socket) -> None:
        connection.recv(1 << 20)
        connection.sendall(b"$%d\r\nhalf" % length)
        connection.close()

    with Listener(treat) as listener:
        pool = make_pool(listener.url)
        assert max(timed_get(pool, os.urandom(32)) for _ in range(10)) < DEADLINE + SLACK
        assert pool.stats().misses["error"] == 3


@pytest.mark.slow
def test_a_slow_server_is_left_alone(make_pool: Callable[..., SwaPool]) -> None:
    """Well when probed, too slow at work: the pauses grow, so that few requests pay for it."""
    key = os.urandom(32)
    with Server() as server:
        store(server, key)
        value = server.client().get(b"forebay:w1:" + key)

        def treat(connection: socket.socket) -> None:
            while command := connection.recv(1 << 20):
                if b"GETEX" not in command:
                    connection.sendall(b"+OK\r\n")  # says who it is
                elif b"probe" in command:
                    connection.sendall(b"$-1\r\n")
                else:
                    time.sleep(0.3)  # the fault itself
                    connection.sendall(b"$%d\r\n%b\r\n" % (len(value), value))

        with Listener(treat) as listener:
            pool = make_pool(listener.url)
            end, times = time.monotonic() + 2.5, []
            while time.monotonic() < end:
                times.append(timed_get(pool, key))
                time.sleep(0.005)
            assert max(times) < DEADLINE + SLACK
            assert 2 <= pool.stats().opened <= 4  # after 0, 0.2, 0.6 and 1.4 seconds


def test_tls(make_pool: Callable[..., SwaPool], tmp_path: Path) -> None:
    """Over TLS with a certificate that is checked; a certificate nobody vouches for, or no TLS at all, is an outage like any other."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    certificate, secret, key = tmp_path / "cert.pem", tmp_path / "key.pem", os.urandom(32)
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-out", certificate, "-keyout", secret], check=True, capture_output=True)
    with Server() as server, tls(server.port, certificate, secret) as listener:
        store(server, key)
        pool = make_pool(f"rediss://127.0.0.1:{listener.port}?ssl_ca_certs={certificate}", timeout_s=1.0, connect_timeout_s=1.0)
        assert pool.get([key]) is not None
        recovers(pool, key)
        for url in (f"rediss://127.0.0.1:{listener.port}", f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={certificate}"):
            refused = make_pool(url)
            times = [timed_get(refused, key) for _ in range(20)]
            assert max(times) < DEADLINE + SLACK
            assert refused.stats().breaker != "closed"


def test_a_name_that_cannot_be_resolved(make_pool: Callable[..., SwaPool]) -> None:
    pool = make_pool("redis://no-such-host.invalid:6379")
    outage(pool, os.urandom(32), 0.5)


def test_a_name_lookup_that_hangs(make_pool: Callable[..., SwaPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout of a socket reaches into the resolver: the caller leaves, and so does everybody after it."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: release.wait(20) and [])
    try:
        pool = make_pool("redis://slow.example:6379")
        outage(pool, os.urandom(32), 0.6)
        began = time.monotonic()
        pool.close(0.1)
        assert time.monotonic() - began < 3
    finally:
        release.set()


def test_readers_that_are_all_stuck(make_pool: Callable[..., SwaPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe gets through, no reader does: not everybody waits for readers that are not there."""
    release, key = threading.Event(), os.urandom(32)
    real = RedisLink.fetch

    def stuck(link: RedisLink, key: bytes, ttl_ms: int) -> bytes | None:
        if threading.current_thread().name.startswith("swa-read"):
            release.wait(20)
        return real(link, key, ttl_ms)

    with Server() as server:
        store(server, key)
        monkeypatch.setattr(RedisLink, "fetch", stuck)
        try:
            pool = make_pool(server.url, readers=2)
            end, times = time.monotonic() + 1.2, []
            while time.monotonic() < end:
                times.append(timed_get(pool, key))
                time.sleep(0.002)
            assert max(times) < DEADLINE + SLACK
            assert sum(t > DEADLINE / 2 for t in times) <= 4  # after 0, 0.2 and 0.6 seconds
        finally:
            release.set()
        recovers(pool, key)
