"""What the tiers beyond the device may use."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from forebay.engine.types import is_number
from forebay.model.errors import ConfigError

MOST_BUDGET = 256 << 30
EMBEDDED = "embedded"  # a Redis url that stands for a server of our own


@dataclass(frozen=True)
class TierOptions:
    """The persistent store and the snapshot pool of one engine; without `dir` and `redis_url` there is neither.

    "none" and "" stand for None in both of these. Raises ConfigError naming the field for a value of another type or out of range.

    Attributes:
        dir: folder of the SSD store, a Path or its text (`~` is the home folder); engines of one host may share it.
        ssd_bytes: hard limit of what the store takes on disk; None for a tenth of the file system, at most 256 GiB.
        ssd_free_bytes: free space of the file system below which nothing is written.
        ssd_ttl_s: seconds a block lives after its last use.
        ssd_queue_bytes: blocks waiting to be written; what exceeds it is not stored, and counted.
        staging_bytes: host memory that blocks pass through on their way from disk to the device.
        redis_url: `redis://`, `rediss://` or `unix://`, or "embedded" for a server that lives as long as this process.
        redis_cluster: the URL names a node of a cluster.
        redis_timeout_s: longest wait for a snapshot; beyond it the window is replayed.
        swa_ttl_s: seconds a snapshot lives after its last use.
        swa_bytes: memory of the embedded server; None for a tenth of the machine's.
    """

    dir: Path | None = None
    ssd_bytes: int | None = None
    ssd_free_bytes: int = 1 << 30
    ssd_ttl_s: float = 72 * 3600.0
    ssd_queue_bytes: int = 256 << 20
    staging_bytes: int = 256 << 20
    redis_url: str | None = None
    redis_cluster: bool = False
    redis_timeout_s: float = 0.05
    swa_ttl_s: float = 600.0
    swa_bytes: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)!r:.200}", param=name)

        for name in ("dir", "redis_url"):
            if getattr(self, name) in ("", "none"):
                object.__setattr__(self, name, None)
        need(isinstance(self.dir, str | Path | None), "dir", "a path or None")
        need(isinstance(self.redis_url, str | None), "redis_url", "a URL or None")
        need(isinstance(self.redis_cluster, bool), "redis_cluster", "True or False")
        for name in ("ssd_bytes", "ssd_free_bytes", "ssd_queue_bytes", "staging_bytes", "swa_bytes"):
            value = getattr(self, name)
            optional = name in ("ssd_bytes", "swa_bytes")
            need(is_number(Integral, value) or (optional and value is None), name, "an integer or None" if optional else "an integer")
        for name in ("ssd_ttl_s", "redis_timeout_s", "swa_ttl_s"):
            need(is_number(Real, getattr(self, name)), name, "a number")
        for name in ("ssd_bytes", "staging_bytes", "ssd_queue_bytes", "ssd_ttl_s", "redis_timeout_s", "swa_ttl_s", "swa_bytes"):
            value = getattr(self, name)
            need(value is None or value > 0, name, "positive")  # NaN is not
        need(self.ssd_free_bytes >= 0, "ssd_free_bytes", "0 or positive")
        if self.dir is not None:
            try:
                object.__setattr__(self, "dir", Path(self.dir).expanduser())
            except RuntimeError:  # a user that the system does not know
                raise ConfigError(f"dir: there is no home folder for {str(self.dir)!r}; give a full path", param="dir") from None


def ssd_budget(folder: Path, ssd_bytes: int | None) -> int:
    """Bytes the store may take in `folder`, which need not exist yet: `ssd_bytes`, or a tenth of its file system, at most 256 GiB.

    Raises:
        ConfigError: see `existing`.
    """
    if ssd_bytes is not None:
        return ssd_bytes
    return min(shutil.disk_usage(existing(folder)).total // 10, MOST_BUDGET)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists.

    Raises:
        ConfigError: the way there may not be looked at.
    """
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError as error:
        advice = "choose another --cache-dir, or --cache-dir none"
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; {advice}", param="dir") from None
    return folder
