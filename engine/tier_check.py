"""Can the tiers beyond the device work on this machine: the folder of the SSD store, and the Redis of the snapshots."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, TimeoutError
from redis.retry import Retry

from forebay.cache.embedded import EmbeddedRedis, machine_memory
from forebay.cache.records import PAGE_BYTES
from forebay.cache.redis_link import RedisLink, shown_url
from forebay.cache.segments import destroy
from forebay.engine.tiers import EMBEDDED, TierOptions, existing, ssd_budget
from forebay.model.errors import ConfigError

TIMEOUT_S = 2.0  # patience of a person, not of a request
LEAST_VERSION = (6, 2)  # the first with GETEX, which reads a snapshot and refreshes its time in one call
EMBEDDED_PROBE_BYTES = 16 << 20


@dataclass(frozen=True)
class SsdCheck:
    """Sizes in bytes.

    Attributes:
        dir: the folder; where it does not exist yet, its nearest existing parent was looked at.
        punches_holes: single records can give their space back; None if that could not be tried.
        fault: why the server would not start, or None.
        notes: what works less well than it could.
    """

    dir: str
    exists: bool
    budget_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    punches_holes: bool | None
    fault: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RedisCheck:
    """What answered, if something did.

    Attributes:
        where: "embedded", or the address without user, password and options.
        server: name and version, such as "valkey 9.1.2"; None if nothing answered.
        maxmemory: bytes; 0 for no limit.
        policy: what leaves when memory is full.
        silence: why nothing answered that can be used, such as "does not answer: Connection refused"; None if something did.
        fault, notes: as in `SsdCheck`. Silence is a note: windows are replayed until it ends.
    """

    where: str
    server: str | None
    maxmemory: int | None
    policy: str | None
    fault: str | None
    notes: tuple[str, ...]
    silence: str | None = None


def check_ssd(options: TierOptions) -> SsdCheck | None:
    """Look at the folder of the SSD store without leaving anything in it; None if there is to be none."""
    if options.dir is None:
        return None
    folder = existing(options.dir)
    usage = shutil.disk_usage(folder)
    fault, punches = None, None
    notes = []
    try:
        if not folder.is_dir():
            raise NotADirectoryError(0, "it is a file", str(folder))
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2 * PAGE_BYTES))
            file.flush()
            punches = destroy(file.fileno(), 0, PAGE_BYTES)
    except OSError as error:
        fault = f"{folder} cannot be written: {error.strerror}; choose another --cache-dir, or --cache-dir none"
    if punches is False:
        notes.append("this file system cannot punch holes: space comes back when all blocks of a segment are gone")
    if usage.free < options.ssd_free_bytes:
        notes.append("there is less free space than cache.ssd_free_bytes: nothing is written until there is more")
    budget = ssd_budget(folder, options.ssd_bytes)
    return SsdCheck(str(options.dir), options.dir.is_dir(), budget, usage.total, usage.free, punches, fault, tuple(notes))


def check_redis(options: TierOptions, timeout_s: float = TIMEOUT_S) -> RedisCheck | None:
    """Ask the Redis of the snapshots what it is; starts the embedded one for a moment. None if there is to be none.

    `timeout_s` is for connecting and for the answer, each; finding the address of a name has the system's own time.
    """
    if options.redis_url is None:
        return None
    if options.redis_url != EMBEDDED:
        return _ask(options.redis_url, shown_url(options.redis_url), timeout_s, cluster=options.redis_cluster)
    try:
        server = EmbeddedRedis.start(EMBEDDED_PROBE_BYTES)
    except ConfigError as error:
        return RedisCheck(EMBEDDED, None, None, None, error.message, ())
    try:
        found = _ask(server.url, EMBEDDED, timeout_s, cluster=False)
    finally:
        server.stop()
    memory = options.swa_bytes or machine_memory() // 10
    return RedisCheck(EMBEDDED, found.server, memory, found.policy, found.fault, found.notes)


def _ask(url: str, where: str, timeout_s: float, *, cluster: bool) -> RedisCheck:
    try:
        RedisLink(url, cluster=cluster, timeout_s=timeout_s, connect_timeout_s=timeout_s).close()
    except ConfigError as error:
        return RedisCheck(where, None, None, None, error.message, ())
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    try:
        with redis.Redis.from_url(url, **options) as client:
            info = client.info()
    except RedisError as error:
        silence = _silence(error)
        return RedisCheck(where, None, None, None, None, (f"no snapshots while this lasts, windows are replayed: it {silence}",), silence)
    return judge(where, info, cluster=cluster)


def _silence(error: RedisError) -> str:
    refused = isinstance(error, AuthenticationError) or not isinstance(error, ConnectionError | TimeoutError)
    # The library's words repeat the address; the system's own are behind them.
    reason = error.__context__.strerror if isinstance(error.__context__, OSError) else None
    return f"{'refuses' if refused else 'does not answer'}: {(reason or str(error) or type(error).__name__).rstrip('.')}"


def judge(where: str, info: Mapping[str, Any], *, cluster: bool) -> RedisCheck:
    """What the fields of INFO mean for snapshots."""
    version = str(info.get("redis_version", "0"))
    name, shown = ("valkey", info["valkey_version"]) if "valkey_version" in info else ("redis", version)
    policy, memory = str(info.get("maxmemory_policy", "")), int(str(info.get("maxmemory", 0)))
    notes = []
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < LEAST_VERSION:
        notes.append(f"it is too old for snapshots, which need {'.'.join(map(str, LEAST_VERSION))}: windows are replayed")
    if not memory:
        notes.append("its memory has no limit (maxmemory 0)")
    elif policy == "noeviction":
        notes.append("it takes no snapshots when it is full (noeviction); volatile-ttl lets the oldest go")
    if info.get("role") == "slave":
        notes.append("it is a replica, which cannot be written: no snapshots, windows are replayed")
    if cluster != bool(info.get("cluster_enabled")):
        is_one = "no cluster, but cache.redis_cluster is true" if cluster else "a node of a cluster, but cache.redis_cluster is false"
        notes.append(f"it is {is_one}: snapshots are lost")
    return RedisCheck(where, f"{name} {shown}", memory, policy or None, None, tuple(notes))
