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
NO_SALT = "default"  # how a person names the tenant of requests without a cache salt
NO_SALT_NAME = tenant_id("").hex()  # how the store does
MIN_DIGITS = 8  # of the name of a tenant


class Stats(StoreSummary):
    """The store, and what its settings let it take; `payload_bytes` are those that `ls`, `verify` and `purge` count."""

    payload_bytes: int
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
    payload = sum(group["bytes"] for group in ssd_admin.ls(folder))
    return Stats(**ssd_admin.stats(folder), payload_bytes=payload, **kept)  # type: ignore[typeddict-item]


def ls(options: TierOptions) -> list[Group]:
    """What is stored, by identity (model, tokenizer, layout) and tenant."""
    return ssd_admin.ls(_store(options))


def verify(options: TierOptions, progress: Progress) -> VerifyReport:
    """Read every block; bad ones are deleted."""
    return ssd_admin.verify(_store(options), progress)


def purge(options: TierOptions, tenant: str | None, progress: Progress) -> PurgeReport:
    """Delete the blocks of a tenant, or all, unrecoverably.

    Args:
        tenant: its cache salt; or its name as `ls` tells it, in hex, at least MIN_DIGITS of its first digits; or NO_SALT.

    Raises:
        ConfigError: several tenants answer to this; nothing was deleted.
    """
    folder = _store(options)
    if tenant is None:
        return ssd_admin.purge(folder, None, progress)
    named = _tenant(folder, tenant)
    report = ssd_admin.purge(folder, named or tenant_id(tenant), progress)
    # The index may have been lost, and the purge has read it back.
    if named is None and not report["blocks"] and (named := _tenant(folder, tenant)):
        report = ssd_admin.purge(folder, named, progress)
    return report


def _tenant(folder: Path, text: str) -> bytes | None:
    """The tenant with blocks in the store whom `text` means, None if there is none."""
    by_salt = {tenant_id(text), *([tenant_id("")] if text == NO_SALT else [])}
    prefix = text.lower() if len(text) >= MIN_DIGITS else None
    tenants = {group["tenant"] for group in ssd_admin.ls(folder)}
    found = sorted(name for name in tenants if bytes.fromhex(name) in by_salt or (prefix is not None and name.startswith(prefix)))
    if len(found) > 1:
        raise ConfigError(f"cache: {text!r} can be any of the tenants {', '.join(found)}; name one by these digits", param="tenant")
    return bytes.fromhex(found[0]) if found else None


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
