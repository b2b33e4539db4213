"""Where KV lives and where it came from, in numbers: the HBM pools, the SSD store and the pool of window snapshots.

Label `tier`: `hbm` (blocks in device memory), `ssd` (blocks in the persistent store), `swa` (window snapshots in Redis). A store and
a snapshot pool keep totals of their own; `ssd` and `swa` turn what these grew by into increments, when the page is rendered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from forebay.cache import ssd_stats, swa, swa_writer
from forebay.cache.breaker import BreakerState
from forebay.cache.records import FAULTS
from forebay.cache.snapshot import BAD_KINDS
from forebay.cache.ssd_stats import SsdStats
from forebay.cache.swa import SwaStats
from forebay.engine.instruments import OTHER, Instruments, Totals, each, ratio
from forebay.engine.types import TierCounts

ORIGINS = ("live", "swa", "replay")
DEEPEST = 8
LINEAGES = (*map(str, range(DEEPEST)), f"{DEEPEST}+")
"""Values of label `lineage`: bounded replays behind some KV; all from DEEPEST on share one."""

_HOUR = 3600
_AGES = (60, 600, *(_HOUR * h for h in (1, 3, 6, 12, 24, 36, 48, 60, 72, 73, 84, 96, 168, 336)))
_SNAPSHOT = (0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_RESTORE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)


def lineage_label(lineage: int) -> str:
    """The value of label `lineage` for a number of bounded replays."""
    return LINEAGES[min(max(lineage, 0), DEEPEST)]


class TierMetrics:
    """The instruments of the tiers in one registry.

    window_tokens: length of the sliding window. ssd: whether an SSD store is configured, so that what HBM lacks is looked up there.
    """

    def __init__(self, make: Instruments, *, window_tokens: int, ssd: bool) -> None:
        self._window_tokens = window_tokens
        self._has_ssd = ssd
        self._requests(make)
        self._pools(make)
        self._transfers(make)
        self._losses(make)
        self._store(make)
        self._snapshots(make)

    def _requests(self, make: Instruments) -> None:
        text = (
            "Prompt tokens of finished requests by where their KV came from. group=global: every token once, in hbm, ssd or compute. "
            "group=window: tokens before the resume point whose sliding-window KV was a running sequence's (live), loaded (swa) or "
            "recomputed (replay)."
        )
        kv = make.counter("kv_tokens", text, "group", "tier")
        self._global = each(kv, ("hbm", "ssd", "compute"), "global")
        self._window = each(kv, ORIGINS, "window")
        text = "Resumed requests by where their window came from: live (a running sequence), swa (a snapshot) or replay (recomputed)."
        self._origin = each(make.counter("window_resumes", text, "tier"), ORIGINS)
        text = "Resumed requests by the bounded replays behind their KV, their own included; 0 computes what a cold run computes."
        self._resumes = each(make.counter("lineage_resumes", text, "lineage"), LINEAGES)
        text = "Prompt tokens looked up in a tier: all of them in hbm, in ssd those that hbm lacked. Hit ratio is hits / queries."
        self._queries = each(make.counter("prefix_queries", text, "tier"), ("hbm", "ssd"))
        self._hits = each(make.counter("prefix_hits", "Prompt tokens found in a tier.", "tier"), ("hbm", "ssd"))
        self._replays = make.counter("replays", "Resumes that recomputed the window.")
        self._replayed = make.counter("replayed_tokens", "Tokens recomputed by replays to rebuild window KV.")
        text = "Seconds from arrival until all blocks that a request took from the SSD store were in; only requests that took any."
        self._restore = make.histogram("restore_seconds", text, _RESTORE)

    def _pools(self, make: Instruments) -> None:
        text = (
            "Blocks of a tier by state. hbm: used (held by a request), cached (held by none, content kept), free (no content); "
            "ssd: stored, by all processes that share it."
        )
        blocks = make.gauge("kv_blocks", text, "tier", "state")
        self._blocks = each(blocks, ("used", "cached", "free"), "hbm")
        self._stored = blocks.labels("ssd", "stored")
        windows = make.gauge("windows", "Slots for the sliding-window KV of running requests, by state.", "state")
        self._windows = each(windows, ("used", "free"))
        text = "Used part of a tier, 0 to 1: blocks held by requests / all blocks in hbm, bytes allocated / budget in ssd."
        self._usage = each(make.gauge("kv_usage_ratio", text, "tier"), ("hbm", "ssd"))
        self._window_usage = make.gauge("window_usage_ratio", "Used window slots / all window slots, 0 to 1.")
        text = "Bytes of a tier: reserved for its blocks in hbm; allocated on disk by all processes that share it, index included, in ssd."
        self._bytes = each(make.gauge("kv_bytes", text, "tier"), ("hbm", "ssd"))
        text = "Bytes that a tier may allocate at most."
        self._budget = each(make.gauge("kv_budget_bytes", text, "tier"), ("ssd",))
        self._window_bytes = make.gauge("window_bytes", "Bytes reserved for window slots.")

    def _transfers(self, make: Instruments) -> None:
        text = "Items read from a tier: blocks in ssd, window snapshots in swa (each is one window hit)."
        loads = each(make.counter("kv_loads", text, "tier"), ("ssd", "swa"))
        text = "Items written to a tier: blocks in ssd, window snapshots in swa. What is still queued is not counted."
        stores = each(make.counter("kv_stores", text, "tier"), ("ssd", "swa"))
        moved = make.counter("kv_transferred_bytes", "Bytes of items read from and written to a tier.", "tier", "direction")
        self._loads, self._stores = Totals(loads), Totals(stores)
        self._moved = {tier: Totals(each(moved, ("read", "write"), tier)) for tier in ("ssd", "swa")}
        text = "Bytes that wait to be written to a tier."
        self._queued_bytes = each(make.gauge("write_queue_bytes", text, "tier"), ("ssd", "swa"))
        text = "Items that wait to be written to a tier: blocks in ssd, window snapshots in swa."
        self._queued = each(make.gauge("write_queue_items", text, "tier"), ("ssd", "swa"))
        text = "Items whose time to live began anew because they were used: last use moved in ssd, stored again in swa."
        self._refreshed = Totals(each(make.counter("kv_refreshed", text, "tier"), ("ssd", "swa")))

    def _losses(self, make: Instruments) -> None:
        text = "Blocks dropped from a tier to make room."
        evicted = each(make.counter("kv_evictions", text, "tier"), ("hbm", "ssd"))
        self._evicted_hbm, self._evicted = evicted["hbm"], Totals(evicted)
        text = (
            "Items dropped because their time to live since the last use was over: blocks in ssd; in swa only snapshots that had not "
            "expired in Redis yet when they were read."
        )
        self._expired = Totals(each(make.counter("kv_expired", text, "tier"), ("ssd", "swa")))
        text = (
            "Items that were not written to a tier, by reason: queue_full (the disk or Redis is too slow); ssd: no_space (disk full), "
            "io_error, closed (server stopping); swa: oom (Redis full), error, breaker (Redis is not being asked)."
        )
        drops = make.counter("kv_drops", text, "tier", "reason")
        self._ssd_drops = Totals(each(drops, (*ssd_stats.DROPS, OTHER), "ssd"))
        self._swa_drops = Totals(each(drops, (*swa_writer.DROPS, OTHER), "swa"))
        text = "Items of a tier that were found damaged, foreign or gone, and deleted, by what was wrong. Their tokens are recomputed."
        bad = make.counter("kv_corruptions", text, "tier", "kind")
        self._ssd_bad = Totals(each(bad, (*FAULTS, OTHER), "ssd"))
        self._swa_bad = Totals(each(bad, (*BAD_KINDS, OTHER), "swa"))

    def _store(self, make: Instruments) -> None:
        text = "Failed operations of the SSD store by kind: read, write (disk full included) or index. None of them fails a request."
        self._errors = Totals(each(make.counter("ssd_errors", text, "op"), (*ssd_stats.OPERATIONS, OTHER)))
        text = "Seconds that the threads of the SSD store spent reading and writing, added up over threads."
        self._busy = Totals(each(make.counter("ssd_busy_seconds", text, "op"), ("read", "write")))
        text = "Unknown or half-written files that were removed from the folder of the SSD store."
        self._removed = Totals({"": make.counter("ssd_removed_files", text)})
        text = "1 while a full or failing disk keeps the SSD store from taking blocks, else 0."
        self._stopped = make.gauge("ssd_admission_stopped", text)
        text = "1 while the index of the SSD store is read back from its records, so that not all blocks are found yet, else 0."
        self._rebuilding = make.gauge("ssd_index_rebuilding", text)
        text = "Blocks of the SSD store by the bounded replays behind them; 0 is exact."
        self._lineage = each(make.gauge("ssd_lineage_blocks", text, "lineage"), LINEAGES)
        text = "Seconds since the last use of a block of the SSD store when it was read; the latest 65,536 between two scrapes."
        self._age_at_hit = make.histogram("ssd_age_at_hit_seconds", text, _AGES)
        text = "Seconds since the last use of a block of the SSD store when it was evicted or expired; as for hits."
        self._age_at_removal = make.histogram("ssd_age_at_removal_seconds", text, _AGES)

    def _snapshots(self, make: Instruments) -> None:
        text = (
            "Lookups of a window snapshot that found none, by reason: absent, timeout, error, bad (damaged or foreign) or breaker "
            "(Redis was not asked). The hits are forebay_kv_loads_total{tier=swa}."
        )
        self._misses = Totals(each(make.counter("window_misses", text, "reason"), (*swa.MISSES, OTHER)))
        text = (
            "Seconds of one call to Redis for a window snapshot: get as its caller waited, whatever came of it; put that was stored. The "
            "latest 4,096 of each between two scrapes."
        )
        self._calls = each(make.histogram("swa_seconds", text, _SNAPSHOT, "op"), ("get", "put"))
        text = "1 for the state of the circuit breaker before Redis: closed (healthy), open (not asked) or half_open (one call probes it)."
        self._breaker = each(make.gauge("swa_breaker", text, "state"), get_args(BreakerState))
        text = "Times the circuit breaker opened because Redis was slow or failed."
        self._opened = Totals({"": make.counter("swa_breaker_opened", text)})

    # Requests

    def request(self, tiers: TierCounts) -> None:
        """A request that ran has ended; counts below zero are taken for zero."""
        hbm, ssd, compute = max(0, tiers.hbm), max(0, tiers.ssd), max(0, tiers.compute)
        self._global["hbm"].inc(hbm)
        self._global["ssd"].inc(ssd)
        self._global["compute"].inc(compute)
        self._queries["hbm"].inc(hbm + ssd + compute)
        self._hits["hbm"].inc(hbm)
        if self._has_ssd:
            self._queries["ssd"].inc(ssd + compute)
            self._hits["ssd"].inc(ssd)
        if ssd:
            self._restore.observe(max(0.0, tiers.restore_s))
        if tiers.window in self._origin:
            self._origin[tiers.window].inc()
            self._resumes[lineage_label(tiers.lineage)].inc()
            kept = min(self._window_tokens, hbm + ssd)
            self._window[tiers.window].inc(max(0, tiers.replayed) if tiers.window == "replay" else kept)

    def replayed(self, tokens: int) -> None:
        self._replays.inc()
        self._replayed.inc(max(0, tokens))

    # HBM

    def evicted(self, blocks: int) -> None:
        self._evicted_hbm.inc(max(0, blocks))

    def pool_bytes(self, blocks: int, windows: int) -> None:
        self._bytes["hbm"].set(blocks)
        self._window_bytes.set(windows)

    def pools(self, free_blocks: int, used_blocks: int, cached_blocks: int, total: int, windows_used: int, windows_total: int) -> None:
        self._blocks["free"].set(free_blocks)
        self._blocks["used"].set(used_blocks)
        self._blocks["cached"].set(cached_blocks)
        self._usage["hbm"].set(ratio(used_blocks, total))
        self._windows["used"].set(windows_used)
        self._windows["free"].set(windows_total - windows_used)
        self._window_usage.set(ratio(windows_used, windows_total))

    # SSD and Redis

    def ssd(self, stats: SsdStats, ages_at_hit: Iterable[float], ages_at_removal: Iterable[float]) -> None:
        self._stored.set(stats.blocks)
        self._bytes["ssd"].set(stats.bytes)
        self._budget["ssd"].set(stats.budget_bytes)
        self._usage["ssd"].set(ratio(stats.bytes, stats.budget_bytes))
        self._queued_bytes["ssd"].set(stats.queue_bytes)
        self._queued["ssd"].set(stats.queue_blocks)
        self._stopped.set(not stats.admitting)
        self._rebuilding.set(stats.rebuilding)
        depths = dict.fromkeys(LINEAGES, 0)
        for lineage, blocks in stats.lineages.items():
            depths[lineage_label(lineage)] += blocks
        for label, blocks in depths.items():
            self._lineage[label].set(blocks)
        self._loads.follow({"ssd": stats.reads})
        self._stores.follow({"ssd": stats.writes})
        self._moved["ssd"].follow({"read": stats.read_bytes, "write": stats.written_bytes})
        self._busy.follow({"read": stats.read_seconds, "write": stats.write_seconds})
        self._evicted.follow({"ssd": stats.evicted})
        self._expired.follow({"ssd": stats.expired})
        self._ssd_drops.follow(stats.dropped)
        self._ssd_bad.follow(stats.corrupt)
        self._errors.follow(stats.io_errors)
        self._refreshed.follow({"ssd": stats.refreshed})
        self._removed.follow({"": stats.removed_files})
        for age in ages_at_hit:
            self._age_at_hit.observe(max(0.0, age))
        for age in ages_at_removal:
            self._age_at_removal.observe(max(0.0, age))

    def swa(self, stats: SwaStats, get_seconds: Iterable[float], put_seconds: Iterable[float]) -> None:
        self._loads.follow({"swa": stats.hits})
        self._stores.follow({"swa": stats.stores})
        self._moved["swa"].follow({"read": stats.read_bytes, "write": stats.written_bytes})
        self._queued_bytes["swa"].set(stats.queue_bytes)
        self._queued["swa"].set(stats.queue_snapshots)
        self._refreshed.follow({"swa": stats.refreshed})
        self._expired.follow({"swa": stats.expired})
        self._misses.follow(stats.misses)
        self._swa_drops.follow(stats.dropped)
        self._swa_bad.follow(stats.bad)
        self._opened.follow({"": stats.opened})
        for state, child in self._breaker.items():
            child.set(state == stats.breaker)
        for seconds in get_seconds:
            self._calls["get"].observe(max(0.0, seconds))
        for seconds in put_seconds:
            self._calls["put"].observe(max(0.0, seconds))
