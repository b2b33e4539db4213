"""Numbers of the tiers: totals kept elsewhere become counters (B094), lineages and kinds stay bounded, everything is visible at zero."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from forebay.cache.embedded import EmbeddedRedis
from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.cache.ssd import SsdOptions, SsdStats, SsdStore, StoredBlock, staging_bytes
from forebay.cache.swa import KEY_PREFIX, SwaOptions, SwaPool, SwaStats
from forebay.engine import tier_metrics as module
from forebay.engine.metrics import Metrics
from forebay.engine.types import TierCounts, Usage

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

HOUR = 3600.0

STORE = SsdStats(
    blocks=0, bytes=0, lineages={}, budget_bytes=0, queue_blocks=0, queue_bytes=0, admitting=True, rebuilding=False,
    reads=0, read_bytes=0, read_seconds=0.0, writes=0, written_bytes=0, write_seconds=0.0,
    dropped={}, evicted=0, expired=0, corrupt={}, io_errors={}, removed_files=0, refreshed=0,
)  # fmt: skip
POOL = SwaStats(
    hits=0, misses={}, expired=0, stores=0, refreshed=0, dropped={}, bad={}, read_bytes=0, written_bytes=0,
    opened=0, breaker="closed", queue_bytes=0, queue_snapshots=0,
)  # fmt: skip


def fresh() -> Metrics:
    return Metrics(CollectorRegistry(), ssd=True)


def read(metrics: Metrics) -> Samples:
    """The page as a scraper reads it."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def get(samples: Samples, name: str, **labels: str) -> float:
    return samples["forebay_" + name, tuple(sorted(labels.items()))]


def grown(before: Samples, after: Samples) -> dict[str, float]:
    """The series of ours that changed, as `name{values of its labels}`, histogram buckets left out."""
    assert after.keys() == before.keys(), "no series comes or goes"
    return {
        f"{name.removeprefix('forebay_')}{{{','.join(value for _, value in labels)}}}": after[name, labels] - before[name, labels]
        for name, labels in after
        if name.startswith("forebay_") and not name.endswith("_bucket") and after[name, labels] != before[name, labels]
    }


@pytest.mark.parametrize(("name", "label", "values"), [
    ("kv_drops_total", "reason", {"ssd": {"queue_full", "no_space", "io_error", "closed", "other"},
                                  "swa": {"queue_full", "error", "oom", "breaker", "other"}}),
    ("kv_corruptions_total", "kind", {"ssd": {"checksum", "header", "length", "missing", "identity", "other"},
                                      "swa": {"header", "version", "identity", "key", "length", "checksum", "other"}}),
    ("kv_transferred_bytes_total", "direction", {"ssd": {"read", "write"}, "swa": {"read", "write"}}),
    ("kv_blocks", "state", {"hbm": {"used", "cached", "free"}, "ssd": {"stored"}}),
])  # fmt: skip
def test_every_reason_is_there_at_zero(name: str, label: str, values: dict[str, set[str]]) -> None:
    samples = read(fresh())
    found: dict[str, set[str]] = {}
    for (family, labels), value in samples.items():
        if family == "forebay_" + name:
            found.setdefault(dict(labels)["tier"], set()).add(dict(labels)[label])
            assert value == 0.0
    assert found == values


@pytest.mark.parametrize(("name", "label", "values"), [
    ("ssd_errors_total", "op", ["read", "write", "index", "other"]),
    ("ssd_busy_seconds_total", "op", ["read", "write"]),
    ("window_misses_total", "reason", ["absent", "breaker", "timeout", "error", "bad", "other"]),
    ("swa_breaker", "state", ["closed", "open", "half_open"]),
    ("swa_seconds_count", "op", ["get", "put"]),
    ("ssd_lineage_blocks", "lineage", [*"01234567", "8+"]),
    ("lineage_resumes_total", "lineage", [*"01234567", "8+"]),
    ("kv_loads_total", "tier", ["ssd", "swa"]),
    ("kv_stores_total", "tier", ["ssd", "swa"]),
    ("kv_evictions_total", "tier", ["hbm", "ssd"]),
    ("kv_expired_total", "tier", ["ssd", "swa"]),
    ("kv_refreshed_total", "tier", ["ssd", "swa"]),
    ("kv_bytes", "tier", ["hbm", "ssd"]),
    ("kv_budget_bytes", "tier", ["ssd"]),
    ("kv_usage_ratio", "tier", ["hbm", "ssd"]),
    ("write_queue_bytes", "tier", ["ssd", "swa"]),
    ("write_queue_items", "tier", ["ssd", "swa"]),
])  # fmt: skip
def test_every_series_is_there_at_zero(name: str, label: str, values: list[str]) -> None:
    samples = read(fresh())
    found = {dict(labels)[label]: value for (family, labels), value in samples.items() if family == "forebay_" + name}
    assert found == dict.fromkeys(values, 0.0)


def test_each_number_of_the_store_lands_where_it_says() -> None:
    m = fresh()
    before = read(m)
    stats = SsdStats(
        blocks=30, bytes=2000, lineages={0: 20, 1: 7, 8: 1, 11: 2}, budget_bytes=8000, queue_blocks=4, queue_bytes=512,
        admitting=False, rebuilding=True, reads=5, read_bytes=50, read_seconds=0.5, writes=6, written_bytes=60, write_seconds=0.25,
        dropped={"queue_full": 1, "no_space": 2, "io_error": 3, "closed": 4}, evicted=7, expired=8,
        corrupt={"checksum": 1, "header": 2, "length": 3, "missing": 4, "identity": 5}, io_errors={"read": 9, "write": 10, "index": 11},
        removed_files=12, refreshed=13,
    )  # fmt: skip
    m.ssd(stats, [60.0, 71 * HOUR], [72 * HOUR + 30])
    assert grown(before, read(m)) == {
        "kv_blocks{stored,ssd}": 30, "kv_bytes{ssd}": 2000, "kv_budget_bytes{ssd}": 8000, "kv_usage_ratio{ssd}": 0.25,
        "write_queue_bytes{ssd}": 512, "write_queue_items{ssd}": 4, "ssd_admission_stopped{}": 1, "ssd_index_rebuilding{}": 1,
        "ssd_lineage_blocks{0}": 20, "ssd_lineage_blocks{1}": 7, "ssd_lineage_blocks{8+}": 3,
        "kv_loads_total{ssd}": 5, "kv_transferred_bytes_total{read,ssd}": 50, "ssd_busy_seconds_total{read}": 0.5,
        "kv_stores_total{ssd}": 6, "kv_transferred_bytes_total{write,ssd}": 60, "ssd_busy_seconds_total{write}": 0.25,
        "kv_drops_total{queue_full,ssd}": 1, "kv_drops_total{no_space,ssd}": 2, "kv_drops_total{io_error,ssd}": 3,
        "kv_drops_total{closed,ssd}": 4, "kv_evictions_total{ssd}": 7, "kv_expired_total{ssd}": 8,
        "kv_corruptions_total{checksum,ssd}": 1, "kv_corruptions_total{header,ssd}": 2, "kv_corruptions_total{length,ssd}": 3,
        "kv_corruptions_total{missing,ssd}": 4, "kv_corruptions_total{identity,ssd}": 5,
        "ssd_errors_total{read}": 9, "ssd_errors_total{write}": 10, "ssd_errors_total{index}": 11,
        "ssd_removed_files_total{}": 12, "kv_refreshed_total{ssd}": 13,
        "ssd_age_at_hit_seconds_count{}": 2, "ssd_age_at_hit_seconds_sum{}": 60 + 71 * HOUR,
        "ssd_age_at_removal_seconds_count{}": 1, "ssd_age_at_removal_seconds_sum{}": 72 * HOUR + 30,
    }  # fmt: skip


def test_each_number_of_the_snapshot_pool_lands_where_it_says() -> None:
    m = fresh()
    before = read(m)
    stats = SwaStats(
        hits=3, misses={"absent": 1, "breaker": 2, "timeout": 3, "error": 4, "bad": 5}, stores=6,
        dropped={"queue_full": 1, "error": 2, "oom": 3, "breaker": 4},
        bad={"header": 1, "version": 2, "identity": 3, "key": 4, "length": 5, "checksum": 6},
        read_bytes=70, written_bytes=80, breaker="half_open", opened=9, queue_bytes=100, queue_snapshots=11,
        expired=12, refreshed=13,
    )  # fmt: skip
    m.swa(stats, [0.001, 0.05], [0.002])
    assert grown(before, read(m)) == {
        "kv_loads_total{swa}": 3, "kv_stores_total{swa}": 6, "window_misses_total{absent}": 1, "window_misses_total{breaker}": 2,
        "window_misses_total{timeout}": 3, "window_misses_total{error}": 4, "window_misses_total{bad}": 5,
        "kv_drops_total{queue_full,swa}": 1, "kv_drops_total{error,swa}": 2, "kv_drops_total{oom,swa}": 3,
        "kv_drops_total{breaker,swa}": 4, "kv_corruptions_total{header,swa}": 1, "kv_corruptions_total{version,swa}": 2,
        "kv_corruptions_total{identity,swa}": 3, "kv_corruptions_total{key,swa}": 4, "kv_corruptions_total{length,swa}": 5,
        "kv_corruptions_total{checksum,swa}": 6, "kv_transferred_bytes_total{read,swa}": 70, "kv_transferred_bytes_total{write,swa}": 80,
        "swa_breaker{half_open}": 1, "swa_breaker_opened_total{}": 9, "write_queue_bytes{swa}": 100,
        "write_queue_items{swa}": 11, "kv_expired_total{swa}": 12, "kv_refreshed_total{swa}": 13,
        "swa_seconds_count{get}": 2, "swa_seconds_sum{get}": pytest.approx(0.051),
        "swa_seconds_count{put}": 1, "swa_seconds_sum{put}": 0.002,
    }  # fmt: skip


@pytest.mark.case("B094")
def test_totals_become_increments_and_survive_a_restart() -> None:
    m = fresh()
    for reads, want in ((5, 5), (5, 5), (9, 9), (2, 11), (3, 12), (0, 12), (4, 16)):
        m.ssd(replace(STORE, reads=reads, dropped={"closed": reads}), [], [])
        m.swa(replace(POOL, hits=reads, opened=reads), [], [])
        s = read(m)
        for tier in ("ssd", "swa"):
            assert get(s, "kv_loads_total", tier=tier) == want
        assert get(s, "kv_drops_total", tier="ssd", reason="closed") == get(s, "swa_breaker_opened_total") == want


def test_states_fall_when_the_state_does() -> None:
    m = fresh()
    m.ssd(replace(STORE, blocks=9, bytes=90, budget_bytes=100, admitting=False, rebuilding=True, lineages={2: 9}), [], [])
    m.swa(replace(POOL, breaker="open", queue_bytes=5), [], [])
    before = read(m)
    m.ssd(replace(STORE, blocks=1, bytes=10, budget_bytes=100, lineages={3: 1}), [], [])
    m.swa(POOL, [], [])
    assert grown(before, read(m)) == {
        "kv_blocks{stored,ssd}": -8, "kv_bytes{ssd}": -80, "kv_usage_ratio{ssd}": pytest.approx(-0.8),
        "ssd_admission_stopped{}": -1, "ssd_index_rebuilding{}": -1, "ssd_lineage_blocks{2}": -9, "ssd_lineage_blocks{3}": 1,
        "swa_breaker{open}": -1, "swa_breaker{closed}": 1, "write_queue_bytes{swa}": -5,
    }  # fmt: skip


@pytest.mark.case("B098")
def test_unknown_kinds_share_one_series() -> None:
    m = fresh()
    before = read(m)
    for n in (1, 2):
        m.ssd(replace(STORE, dropped={"moon": n, "sun": n}, corrupt={"moon": n}, io_errors={"moon": n}), [], [])
        m.swa(replace(POOL, misses={"moon": n, "absent": n}, dropped={"moon": n}, bad={"moon": n}), [], [])
    assert grown(before, read(m)) == {
        "kv_drops_total{other,ssd}": 4, "kv_corruptions_total{other,ssd}": 2, "ssd_errors_total{other}": 2,
        "window_misses_total{other}": 2, "window_misses_total{absent}": 2, "kv_drops_total{other,swa}": 2,
        "kv_corruptions_total{other,swa}": 2, "swa_breaker{closed}": 1,
    }  # fmt: skip


@pytest.mark.case("B099")
@pytest.mark.parametrize(("used", "budget", "want"), [(0, 0, 0.0), (5, 0, 0.0), (5, 10, 0.5), (12, 10, 1.0), (-1, 10, 0.0)])
def test_usage_of_the_store_stays_between_zero_and_one(used: int, budget: int, want: float) -> None:
    m = fresh()
    m.ssd(replace(STORE, bytes=used, budget_bytes=budget), [-1.0], [-5.0])
    s = read(m)
    assert get(s, "kv_usage_ratio", tier="ssd") == want
    assert get(s, "ssd_age_at_hit_seconds_sum") == get(s, "ssd_age_at_removal_seconds_sum") == 0.0


def test_buckets_tell_what_the_limits_are_about() -> None:
    """The 72 hours of the store, the few milliseconds of a snapshot and its deadline are bucket bounds."""
    m = fresh()
    m.ssd(STORE, [72 * HOUR, 72 * HOUR + 1], [72 * HOUR + 60, 73 * HOUR + 1])
    m.swa(POOL, [0.0009, 0.05, 0.051], [])
    s = read(m)
    assert get(s, "ssd_age_at_hit_seconds_bucket", le=str(72 * HOUR)) == 1
    assert get(s, "ssd_age_at_removal_seconds_bucket", le=str(72 * HOUR)) == 0
    assert get(s, "ssd_age_at_removal_seconds_bucket", le=str(73 * HOUR)) == 1
    assert [get(s, "swa_seconds_bucket", op="get", le=le) for le in ("0.001", "0.05", "0.075")] == [1, 2, 3]


def test_resumes_by_lineage_and_restores() -> None:
    m = fresh()
    for lineage in (0, 1, 1, 7, 8, 9, 1000, -1):
        m.request_finished("stop", Usage(10, 1, 0, 8), TierCounts(hbm=8, compute=2, window="live", lineage=lineage), 1.0)
    m.request_finished("stop", Usage(10, 1, 0, 0), TierCounts(compute=10, lineage=0), 1.0)
    m.request_finished("stop", Usage(10, 1, 0, 9), TierCounts(1, 8, 1, "swa", 0, 2, 0.25), 1.0)
    s = read(m)
    found = {label: get(s, "lineage_resumes_total", lineage=label) for label in module.LINEAGES}
    assert found == {"0": 2, "1": 2, "2": 1, "3": 0, "4": 0, "5": 0, "6": 0, "7": 1, "8+": 3}
    assert get(s, "restore_seconds_count") == 1, "only what came from the store was restored"
    assert get(s, "restore_seconds_sum") == 0.25
    assert get(s, "errors_total", kind="accounting") == 0


def test_a_scrape_asks_the_tiers() -> None:
    m = fresh()
    asked = 0

    def refresh() -> None:
        nonlocal asked
        asked += 1
        m.ssd(replace(STORE, writes=asked), [1.0], [])

    m.attach(refresh)
    assert asked == 0
    assert get(read(m), "kv_stores_total", tier="ssd") == 1
    s = read(m)
    assert get(s, "kv_stores_total", tier="ssd") == get(s, "ssd_age_at_hit_seconds_count") == 2


def test_tiers_that_cannot_be_read_do_not_take_the_page_away(caplog: pytest.LogCaptureFixture) -> None:
    m = fresh()
    m.request_queued()

    def refresh() -> None:
        raise OSError("no such file")

    m.attach(refresh)
    s = read(m)
    assert get(s, "requests_queued_total") == 1
    assert get(s, "errors_total", kind="internal_error") == 1
    assert "no such file" in caplog.text


def test_scrapes_at_the_same_time_count_once() -> None:
    """A total that two scrapes see at once is added once: a refresh begins when the one before has ended."""
    m = fresh()
    calls = 0
    others, second = threading.Event(), threading.Event()

    def refresh() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert others.wait(10)
            second.wait(0.2)  # the time a second refresh would have to begin
        else:
            second.set()
        seen.append(second.is_set())
        m.ssd(replace(STORE, evicted=100), [], [])

    def scrape(number: int) -> None:
        if number:
            others.set()
        m.render()

    seen: list[bool] = []
    m.attach(refresh)
    threads = [threading.Thread(target=scrape, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [False, *[True] * 7]
    assert m.registry.get_sample_value("forebay_kv_evictions_total", {"tier": "ssd"}) == 100


def test_a_real_store_is_counted(tmp_path: Path) -> None:
    """Over real files: what was written, read, refused for its age, found damaged and removed is what the page says."""
    size, now = 4096, 1_000_000.0
    keys = [bytes([n]) * 32 for n in range(4)]
    payload = np.stack([np.full(size, n + 1, np.uint8) for n in range(4)])
    blocks = [StoredBlock(key, depth, lineage) for depth, (key, lineage) in enumerate(zip(keys, (0, 1, 9, 12), strict=True))]
    m = fresh()
    options = SsdOptions(tmp_path, budget_bytes=64 << 20, free_bytes=0)
    store = SsdStore(options, identity="a model", block_bytes=size, staging=np.zeros(staging_bytes(8, size), np.uint8), clock=lambda: now)

    def fetch() -> int:
        """Read all blocks; how many came."""
        woken, came = threading.Event(), 0
        reading = store.fetch(keys, woken.set)
        reading.promote()
        while not reading.finished:
            assert woken.wait(10)
            woken.clear()
            taken = [position for position, _ in reading.take()]
            reading.free(taken)
            came += len(taken)
        return came

    try:
        m.attach(lambda: m.ssd(store.stats(), *store.take_ages()))
        deadline = time.monotonic() + 10
        while store.stats().rebuilding and time.monotonic() < deadline:  # a new store looks for blocks first
            time.sleep(0.001)
        before = read(m)
        assert store.put(blocks, payload, bytes(16)) == 4
        assert store.flush(10)
        now += HOUR
        assert fetch() == 4
        assert store.flush(10)
        written = read(m)
        after = grown(before, written)
        assert after.pop("kv_bytes{ssd}") >= 4 * size
        assert 0 < after.pop("kv_usage_ratio{ssd}") < 1
        assert all(after.pop(f"ssd_busy_seconds_total{{{op}}}") > 0 for op in ("read", "write"))
        assert after == {
            "kv_blocks{stored,ssd}": 4, "ssd_lineage_blocks{0}": 1, "ssd_lineage_blocks{1}": 1, "ssd_lineage_blocks{8+}": 2,
            "kv_stores_total{ssd}": 4, "kv_loads_total{ssd}": 4, "kv_transferred_bytes_total{write,ssd}": 4 * size,
            "kv_transferred_bytes_total{read,ssd}": 4 * size, "kv_refreshed_total{ssd}": 4,
            "ssd_age_at_hit_seconds_count{}": 4, "ssd_age_at_hit_seconds_sum{}": 4 * HOUR,
        }  # fmt: skip
        (segment,) = tmp_path.glob("segments/*")
        data = segment.read_bytes()
        with segment.open("r+b") as file:
            file.seek(data.index(payload[2].tobytes()) + size // 2)
            file.write(b"X")
        assert fetch() == 2
        assert store.flush(10)
        now += 74 * HOUR
        store.reap()
        after = grown(written, read(m))
        assert after["kv_corruptions_total{checksum,ssd}"] == 1
        assert after["kv_expired_total{ssd}"] == after["ssd_age_at_removal_seconds_count{}"] == 3
        assert after["ssd_age_at_removal_seconds_sum{}"] == pytest.approx(3 * 74 * HOUR, abs=3 * HOUR)
        assert after["kv_blocks{stored,ssd}"] == -4
    finally:
        store.close()
    assert get(read(m), "kv_stores_total", tier="ssd") == 4, "a closed store can still be scraped"


def test_a_real_snapshot_pool_is_counted() -> None:
    """Over a real server: what was stored, found, missed, found damaged and found dead is what the page says."""
    shape = SnapshotShape(encoder_layers=2, decoder_layers=2, window=8, row_bytes=33)
    rows = np.zeros(shape.encoder, np.uint8)
    one, two, three = (bytes([n]) * 32 for n in range(3))
    m = fresh()
    server = EmbeddedRedis.start(64 << 20)
    pool = SwaPool(SwaOptions(server.url, timeout_s=5.0, connect_timeout_s=5.0), identity="a model", shape=shape)
    try:
        m.attach(lambda: m.swa(pool.stats(), *pool.take_latencies()))
        before = read(m)
        assert get(before, "swa_breaker", state="closed") == 1
        assert pool.put(one, Snapshot(256, 128, None, 0, rows, None))
        assert pool.flush(5.0)
        assert pool.get([two, one]) is not None
        assert pool.get([three]) is None
        with redis.Redis.from_url(server.url) as raw:
            raw.set(KEY_PREFIX + two, b"junk", px=60_000)
        assert pool.get([two]) is None
        assert pool.flush(5.0)
        after = grown(before, read(m))
        seconds = {name: after.pop(name) for name in ("swa_seconds_sum{get}", "swa_seconds_sum{put}")}
        assert all(0 < s < 5 for s in seconds.values())
        assert after.pop("kv_transferred_bytes_total{write,swa}") >= rows.nbytes
        assert after.pop("kv_transferred_bytes_total{read,swa}") >= rows.nbytes
        assert after == {
            "kv_stores_total{swa}": 1, "kv_loads_total{swa}": 1, "window_misses_total{absent}": 1, "window_misses_total{bad}": 1,
            "kv_corruptions_total{length,swa}": 1, "swa_seconds_count{get}": 3, "swa_seconds_count{put}": 1,
        }  # fmt: skip
        server.stop()
        for _ in range(4):
            assert pool.get([one]) is None
        s = read(m)
        assert get(s, "window_misses_total", reason="error") + get(s, "window_misses_total", reason="breaker") == 4
        assert (get(s, "swa_breaker", state="closed"), get(s, "swa_breaker_opened_total")) == (0, 1)
    finally:
        pool.close()
        server.stop()
