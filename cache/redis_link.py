"""The way to a Redis server or cluster: five commands on binary values, each with a timeout, and one kind of failure.

No retries, no health checks: a failure is told at once, and whoever called decides. Works with Redis 6.2 and later and with Valkey.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import DefaultParser, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import ConnectionError, InvalidResponse, OutOfMemoryError, ResponseError, TimeoutError
from redis.retry import Retry

from forebay.model.errors import ConfigError, ForebayError

READ_BYTES = 1 << 20  # per read of a socket; with the library's 64 KiB a large value arrives at a third of the speed
START_BYTES = 256  # of an answer, to see what it is
LARGE_BYTES = 64 << 10  # values from here on are read by us
MOST_BYTES = 1 << 30  # no snapshot is larger; nothing is set aside for what claims to be
PURGE_BATCH = 500  # keys per SCAN and UNLINK

FailureKind = Literal["timeout", "error", "oom", "foreign"]


class LinkFailure(ForebayError):
    """A command failed. `kind`: timeout; error (no connection, refused, or an error reply); oom (the server is full, but serves reads);
    foreign (the key holds something that is not a string)."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class _Deadline(threading.local):
    at = math.inf


_deadline = _Deadline()


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]
    """Reads a large value straight into memory of its own, and gives up on an answer that trickles.

    The library's parser collects an answer in a buffer that grows and then copies it, both while it holds the interpreter's lock; of a
    snapshot's time that is more than half. Every other answer is left to it. The socket's timeout holds for one read; the deadline
    of `_deadline` is for all reads of a command.
    """

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        # A connection carries one command at a time, so an answer starts where the last one ended.
        if self._reader is not None and self._sock is not None and not self._reader.has_data():
            start = self._sock.recv(START_BYTES)
            if not start:
                raise ConnectionError("the server closed the connection")
            length = _large_value(start)
            if length is not None:
                return self._read_value(start[start.index(b"\n") + 1 :], length)
            self._reader.feed(start)
        return super().read_response(*args, **kwargs)

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().read_from_socket(*args, **kwargs)

    def _read_value(self, begun: bytes, length: int) -> memoryview:
        """The value of `length` bytes whose first are `begun`."""
        value = np.empty(length + 2, np.uint8).data  # not a bytearray, whose bytes would be cleared first
        value[: len(begun)] = begun
        at = len(begun)
        while at < len(value):
            _check_deadline()
            got = self._sock.recv_into(value[at:])
            if not got:
                raise ConnectionError("the server closed the connection within an answer")
            at += got
        if bytes(value[length:]) != b"\r\n":
            raise InvalidResponse("a value that does not end where it should")
        return value[:length]


def _large_value(start: bytes) -> int | None:
    """Length of the value that an answer beginning with `start` holds, if it is a large one."""
    head, found, _ = start.partition(b"\r\n")
    if not found or not head.startswith(b"$") or not head[1:].isdigit():
        return None
    length = int(head[1:])
    return length if LARGE_BYTES <= length <= MOST_BYTES else None


def _check_deadline() -> None:
    if time.monotonic() > _deadline.at:
        raise TimeoutError("the answer took too long")


class _Packer:
    """Sends a large value from where it is; the library's own packer copies it twice, which costs more than sending it."""

    def pack(self, *args: object) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = []
        head = b"*%d\r\n" % len(args)
        for arg in args:
            data = arg if isinstance(arg, bytes | memoryview) else str(arg).encode()
            head += b"$%d\r\n" % len(data)
            if isinstance(data, memoryview):
                out += [head, data]
                head = b"\r\n"
            else:
                head += data + b"\r\n"
        out.append(head)
        return out


class RedisLink:
    """One pool of connections to one server or cluster, with one timeout. Thread-safe.

    Nothing is connected before the first command. A cluster has to be asked for its nodes first (`connect`): until that has succeeded
    every command fails.
    """

    def __init__(self, url: str, *, cluster: bool, timeout_s: float, connect_timeout_s: float) -> None:
        """
        Args:
            url: redis://, rediss:// or unix://; credentials, database and TLS options in it as redis-py reads them.
            timeout_s: for the whole answer to a command.

        Raises:
            ConfigError: the URL cannot be used.
        """
        self.name = shown_url(url)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: Any = None
        options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0), "socket_timeout": timeout_s, "socket_connect_timeout": connect_timeout_s,
            "socket_read_size": READ_BYTES, "protocol": 2, "decode_responses": False,
        }  # fmt: skip
        try:
            options = {**parse_url(url), **options}  # type: ignore[no-untyped-call]
            if "path" not in options:
                options["socket_keepalive"] = True
            if cluster:
                self._cluster_options = _cluster_options(options)
            else:
                options |= {"parser_class": _Parser, "command_packer": _Packer(), "health_check_interval": 0}
                pool = redis.ConnectionPool(**options)
                pool.connection_class(**pool.connection_kwargs)  # an option that nobody knows shows here, without a connection
                self._client = redis.Redis(connection_pool=pool)
        except (ValueError, TypeError, redis.RedisError):
            # The library's own words may hold parts of a password.
            text = (
                f"redis_url {self.name} cannot be used: it must be redis://, rediss:// or unix:// with options that Redis clients know, "
                "and user and password percent-encoded"
            )
            raise ConfigError(text, param="redis_url") from None

    def fetch(self, key: bytes, ttl_ms: int) -> bytes | memoryview | None:
        """The value, whose time to live starts again; None if there is none.

        Raises:
            LinkFailure: anything else.
        """
        return self._do("GETEX", key, "PX", ttl_ms)

    def store(self, key: bytes, value: memoryview, ttl_ms: int, only: Literal["XX", "NX"] | None = None) -> bool:
        """`only`: if there is a value to replace (XX), or if there is none (NX); False if it was not so. Raises LinkFailure."""
        return self._do("SET", key, value, "PX", ttl_ms, *((only,) if only else ())) is not None

    def delete(self, key: bytes) -> None:
        """Raises LinkFailure."""
        self._do("UNLINK", key)

    def connect(self) -> None:
        """Ask a cluster for its nodes, unless that has been done; nothing for a single server.

        Raises:
            LinkFailure: no node answered.
        """
        with self._lock, _translated():
            if self._client is None:
                self._client = RedisCluster(**self._cluster_options)

    def purge(self, prefix: bytes) -> int:
        """Delete every key that starts with `prefix`, on every primary of a cluster; the number deleted.

        Raises:
            LinkFailure: some may be left.
        """
        pattern = b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in prefix) + b"*"
        deleted = 0
        with _translated():
            for node in self._nodes():
                cursor = 0
                while True:
                    cursor, keys = node.scan(cursor, match=pattern, count=PURGE_BATCH)
                    if node is self._client and keys:
                        deleted += node.unlink(*keys)
                    else:  # the keys of one node are in many slots, and one UNLINK may name one slot only
                        deleted += sum(self._client.unlink(key) for key in keys)
                    if not cursor:
                        break
        return deleted

    def drop_idle(self) -> None:
        """Close connections nobody is using: after a failure they may be dead, or lead to a server that is not the primary any more."""
        with contextlib.suppress(Exception):
            for node in self._nodes():
                node.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            for node in self._nodes():
                node.connection_pool.disconnect()  # a client does not close a pool it was given
            if self._client is not None:
                self._client.close()

    def _nodes(self) -> list[Any]:
        if self._client is None:
            return []
        if isinstance(self._client, RedisCluster):
            return [self._client.get_redis_connection(node) for node in self._client.get_primaries()]  # type: ignore[no-untyped-call]
        return [self._client]

    def _do(self, *command: object) -> Any:
        with _translated():
            if self._client is None:
                raise LinkFailure("error", "the cluster has not been met yet")
            _deadline.at = time.monotonic() + self._timeout_s
            try:
                return self._client.execute_command(*command)
            finally:
                _deadline.at = math.inf


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Whatever goes wrong between us and the server becomes a LinkFailure."""
    try:
        yield
    except LinkFailure:
        raise
    except TimeoutError as error:
        raise LinkFailure("timeout", str(error)) from error
    except OutOfMemoryError as error:
        raise LinkFailure("oom", str(error)) from error
    except ResponseError as error:
        raise LinkFailure("foreign" if str(error).startswith("WRONGTYPE") else "error", str(error)) from error
    except Exception as error:  # the library raises more than its own errors, above all with a cluster that changes
        raise LinkFailure("error", f"{type(error).__name__}: {error}") from error


def _cluster_options(options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    kind = options.pop("connection_class", None)
    if kind is UnixDomainSocketConnection or "path" in options:
        raise ValueError("a cluster is reached by host and port, not by a unix socket")
    if options.pop("db", 0):
        raise ValueError("a cluster has database 0 only")
    if kind is SSLConnection:
        options["ssl"] = True
    return {"host": "localhost", "port": 6379, "require_full_coverage": False} | options


def shown_url(url: str) -> str:
    """`url` without user, password and options, for messages."""
    scheme, found, rest = url.partition("://")
    if not found:
        return "(not a URL)"
    place, _, options = rest.partition("?")
    # An unencoded password may hold a question mark; then nothing after it can be trusted to be none of it.
    return f"{scheme}://{'…' if '@' in options else place.rpartition('@')[2]}"
