"""What an operator may do with the tiers beyond the device, without a model and beside running servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.cache import ssd_admin
from forebay.cache.records import tenant_id
from forebay.cache.redis_link import LinkFailure, RedisLink, shown_url
from forebay.cache.ssd_admin import Group, Progress, PurgeReport, StoreSummary, VerifyReport
from forebay.cache.swa import KEY_PREFIX
from forebay.engine.tiers import EMBEDDED, TierOptions, ssd_budget
from forebay.model.errors import ConfigError

REDIS_TIMEOUT_S = 5.0  # for each command; nobody serves from here


class Stats(StoreSummary):
    """The store, and what its settings let it take."""

    dir: str
    budget_bytes: int
    free_bytes: int
    ttl_s: float


@dataclass(frozen=True)
class PurgedSnapshots:
    """Snapshots deleted in the Redis at `where`; `error` tells why some may be left."""

    where: str
    deleted: int
    error: str | None = None


def stats(options: TierOptions) -> Stats:
    """Sizes of the store.

    Raises:
        ConfigError: there is no store at `options.dir`, or it cannot be read; so for all that follow.
    """
    folder = _store(options)
    budget = ssd_budget(folder, options.ssd_bytes)
    kept = {"dir": str(folder), "budget_bytes": budget, "free_bytes": options.ssd_free_bytes, "ttl_s": options.ssd_ttl_s}
    return Stats(**ssd_admin.stats(folder), **kept)  # type: ignore[typeddict-item]


def ls(options: TierOptions) -> list[Group]:
    """What is stored, by identity (model, tokenizer, layout) and tenant."""
    return ssd_admin.ls(_store(options))


def verify(options: TierOptions, progress: Progress) -> VerifyReport:
    """Read every block; bad ones are deleted."""
    return ssd_admin.verify(_store(options), progress)


def purge(options: TierOptions, tenant: str | None, progress: Progress) -> PurgeReport:
    """Delete the blocks of a tenant (its cache salt), or all, unrecoverably."""
    return ssd_admin.purge(_store(options), None if tenant is None else tenant_name(tenant), progress)


def tenant_name(salt: str) -> bytes:
    """The 16 bytes by which the store knows the requests with this cache salt ("" where there is none)."""

    return tenant_id(salt)


def purge_snapshots(options: TierOptions) -> PurgedSnapshots | None:
    """Delete the snapshots of all models and tenants in the configured Redis; None if that is off or lives inside a server."""
    if options.redis_url in (None, EMBEDDED):
        return None
    assert options.redis_url is not None
    where = shown_url(options.redis_url)
    link = RedisLink(options.redis_url, cluster=options.redis_cluster, timeout_s=REDIS_TIMEOUT_S, connect_timeout_s=REDIS_TIMEOUT_S)
    try:
        link.connect()
        return PurgedSnapshots(where, link.purge(KEY_PREFIX))
    except LinkFailure as error:
        return PurgedSnapshots(where, 0, error.message)
    finally:
        link.close()


def _store(options: TierOptions) -> Path:
    if options.dir is None:
        raise ConfigError("cache: cache.dir is none, so there is no SSD store; name its folder with --cache-dir", param="dir")
    if not options.dir.is_dir():
        raise ConfigError(f"cache: there is no SSD store in {options.dir}; name its folder with --cache-dir", param="dir")
    return options.dir
