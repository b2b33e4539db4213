"""Real servers for the tests of the snapshot pool, and ways between us and them that go wrong on purpose."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from forebay.cache.embedded import find_binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    """Wait for something another process does; fails the test if it does not happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class Server:
    """A Valkey on loopback that this test may pause, kill and start again on the same port."""

    def __init__(self, port: int | None = None, **settings: object) -> None:
        """`settings`: configuration, `_` for `-` in the names."""
        self.port = free_port() if port is None else port
        self.settings = {"bind": "127.0.0.1", "port": self.port, "save": '""', "appendonly": "no"}
        self.settings |= {name.replace("_", "-"): str(value) for name, value in settings.items()}
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        process = subprocess.Popen([find_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/")
        assert process.stdin is not None
        process.stdin.write("".join(f"{name} {value}\n" for name, value in self.settings.items()).encode())
        process.stdin.close()
        self.process = process
        until(self._answers)
        return self

    def client(self) -> Any:
        return redis.Redis(port=self.port, password=self.settings.get("requirepass"), socket_timeout=5)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Server:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.RedisError:
            return False


class Listener:
    """Accepts connections and treats each in a thread of its own; `port` is where."""

    def __init__(self, treat: Callable[[socket.socket], None]) -> None:
        self._treat = treat
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.left = threading.Event()  # a client has gone in the middle of an answer
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._treat(connection)
        except OSError:
            self.left.set()


def answering(answer: bytes) -> Listener:
    """Every command gets the same answer."""

    def treat(connection: socket.socket) -> None:
        while connection.recv(1 << 20):
            connection.sendall(answer)

    return Listener(treat)


def trickling(value: bytes, pause_s: float) -> Listener:
    """Every command gets `value`, one byte at a time."""

    def treat(connection: socket.socket) -> None:
        while connection.recv(1 << 20):
            for byte in b"$%d\r\n%b\r\n" % (len(value), value):
                connection.sendall(bytes([byte]))
                time.sleep(pause_s)  # the fault itself

    return Listener(treat)


class Proxy(Listener):
    """Forwards to a server. While `flowing` is cleared nothing comes back, but the connections stay; `held` is set once that bites."""

    def __init__(self, port: int) -> None:
        self.flowing = threading.Event()
        self.flowing.set()
        self.held = threading.Event()
        self.answers = 0
        self._target = port
        self._forgotten: set[socket.socket] = set()
        super().__init__(self._forward)

    def forget(self) -> None:
        """From now on bytes of the connections there are vanish both ways, and nobody is told; new connections work."""
        self._forgotten.update(self._open)

    def _forward(self, connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            self._open.append(server)
            back = threading.Thread(target=self._back, args=(server, connection), daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                while data := connection.recv(1 << 20):
                    if connection not in self._forgotten:
                        server.sendall(data)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _back(self, server: socket.socket, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                self.answers += 1
                if not self.flowing.is_set():
                    self.held.set()
                    self.flowing.wait()
                connection.sendall(data)


def tls(port: int, certificate: Path, secret: Path) -> Listener:
    """Forwards to a server what comes in over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, secret)

    def treat(connection: socket.socket) -> None:
        # One thread for both directions: an SSLSocket is not for two.
        with socket.create_connection(("127.0.0.1", port)) as server, context.wrap_socket(connection, server_side=True) as client:
            while True:
                ready = [client] if client.pending() else select.select([client, server], [], [])[0]
                for source, target in ((client, server), (server, client)):
                    if source in ready:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        target.sendall(data)

    return Listener(treat)


@contextlib.contextmanager
def unanswered_port() -> Iterator[int]:
    """A port where connections are neither taken nor refused: its queue of waiting connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.1", port))
        yield port


@contextlib.contextmanager
def unix_server(folder: Path) -> Iterator[str]:
    """The URL of a server on a unix socket."""
    path = folder / "redis.sock"
    with Server(unixsocket=path):
        yield f"unix://{path}"
