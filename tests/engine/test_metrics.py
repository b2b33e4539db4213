"""Metrics: sums that agree (B091, B092, B096), bounded labels (B098), usage in range (B099), everything visible at zero."""

from __future__ import annotations

import random
import re
import threading

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from forebay.engine import metrics as module
from forebay.engine.metrics import CONTENT_TYPE, Metrics
from forebay.engine.types import TierCounts, Usage

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fresh(**options: object) -> Metrics:
    return Metrics(CollectorRegistry(), **options)  # type: ignore[arg-type]


def read(metrics: Metrics) -> Samples:
    """The page as a scraper reads it."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def get(samples: Samples, name: str, **labels: str) -> float:
    return samples["forebay_" + name, tuple(sorted(labels.items()))]


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(v for (n, have), v in samples.items() if n == "forebay_" + name and set(labels.items()) <= set(have))


ARCHITECTURE = [
    "forebay_requests_running",
    "forebay_requests_waiting",
    "forebay_kv_blocks",
    "forebay_kv_usage_ratio",
    "forebay_step_seconds_count",
    "forebay_batch_rows_count",
    "forebay_ttft_seconds_count",
    "forebay_inter_token_seconds_count",
    "forebay_queue_seconds_count",
    "forebay_e2e_seconds_count",
    "forebay_prompt_tokens_total",
    "forebay_generated_tokens_total",
    "forebay_reasoning_tokens_total",
    "forebay_preemptions_total",
    "forebay_replays_total",
    "forebay_replayed_tokens_total",
    "forebay_aborts_total",
    "forebay_requests_finished_total",
    "forebay_requests_queued_total",
    "forebay_errors_total",
    "forebay_http_requests_total",
    "forebay_rejected_total",
    "forebay_unknown_fields_total",
    "forebay_kv_tokens_total",
    "forebay_build_info",
    "forebay_ready",
    "forebay_parser_repairs_total",
    "forebay_prefix_queries_total",
    "forebay_prefix_hits_total",
    "forebay_kv_evictions_total",
    "forebay_kv_bytes",
    "forebay_kv_loads_total",
    "forebay_kv_stores_total",
    "forebay_kv_expired_total",
    "forebay_kv_corruptions_total",
    "forebay_window_resumes_total",
    "process_resident_memory_bytes",
    "process_open_fds",
]


def test_every_series_exists_at_zero() -> None:
    samples = read(fresh(model="m", version="1.2.3"))
    assert set(ARCHITECTURE) <= {name for name, _ in samples}
    assert get(samples, "build_info", version="1.2.3", model="m") == 1
    ours = {k: v for k, v in samples.items() if k[0].startswith("forebay_") and k[0] != "forebay_build_info"}
    assert ours
    assert set(ours.values()) == {0.0}
    for reason in ("stop", "length", "tool_calls", "abort", "error", "other"):
        assert get(samples, "requests_finished_total", reason=reason) == 0
    for group, tiers in (("global", ("hbm", "ssd", "compute")), ("window", ("live", "swa", "replay"))):
        found = [dict(labels) for name, labels in samples if name == "forebay_kv_tokens_total"]
        assert {labels["tier"] for labels in found if labels["group"] == group} == set(tiers)
    assert get(samples, "http_requests_total", route="/v1/chat/completions", status="503") == 0


def test_events_add_no_series_and_each_lands_where_it_says() -> None:
    m = fresh()
    before = read(m)
    m.ready(True)
    m.error("nonfinite_logits")
    m.http("/v1/models/{id}", 404)
    m.request_queued()
    m.request_rejected("queue_full")
    m.request_started(0.3)
    m.first_token(0.4)
    m.inter_token([0.004, 0.02, 7.0])
    m.aborted()
    m.preempted()
    m.replayed(128)
    m.request_finished("stop", Usage(10, 5, 2, 0), TierCounts(compute=10), 1.5)
    m.step(0.02, "mixed", 1, 3, 500, 3)
    m.running(4)
    m.waiting(2)
    m.evicted(6)
    m.pool_bytes(1000, 200)
    m.pools(5, 3, 2, 10, 1, 4)
    after = read(m)
    assert after.keys() == before.keys()
    want = {
        ("ready",): 1,
        ("errors_total", ("kind", "nonfinite_logits")): 1,
        ("http_requests_total", ("route", "/v1/models/{id}"), ("status", "404")): 1,
        ("requests_queued_total",): 1,
        ("rejected_total", ("reason", "queue_full")): 1,
        ("queue_seconds_sum",): 0.3,
        ("ttft_seconds_sum",): 0.4,
        ("inter_token_seconds_count",): 3,
        ("inter_token_seconds_bucket", ("le", "0.005")): 1,
        ("inter_token_seconds_bucket", ("le", "0.02")): 2,
        ("aborts_total",): 1,
        ("preemptions_total",): 1,
        ("replays_total",): 1,
        ("replayed_tokens_total",): 128,
        ("requests_finished_total", ("reason", "stop")): 1,
        ("e2e_seconds_sum",): 1.5,
        ("reasoning_tokens_total",): 2,
        ("prompt_tokens_total",): 10,
        ("step_seconds_count", ("stage", "mixed")): 1,
        ("batch_rows_sum", ("kind", "decode")): 3,
        ("batch_rows_sum", ("kind", "prefill")): 1,
        ("step_tokens_total",): 500,
        ("generated_tokens_total",): 3,
        ("requests_running",): 4,
        ("requests_waiting",): 2,
        ("kv_evictions_total", ("tier", "hbm")): 6,
        ("kv_bytes", ("tier", "hbm")): 1000,
        ("window_bytes",): 200,
        ("kv_blocks", ("state", "free"), ("tier", "hbm")): 5,
        ("kv_blocks", ("state", "used"), ("tier", "hbm")): 3,
        ("kv_blocks", ("state", "cached"), ("tier", "hbm")): 2,
        ("kv_usage_ratio", ("tier", "hbm")): 0.3,
        ("windows", ("state", "used")): 1,
        ("windows", ("state", "free")): 3,
        ("window_usage_ratio",): 0.25,
    }
    for (name, *labels), value in want.items():
        assert get(after, str(name), **dict(labels)) == pytest.approx(value), name  # type: ignore[arg-type]


@pytest.mark.case("B091")
def test_tiers_of_one_request() -> None:
    """What HBM answered is not asked of the SSD."""
    m = fresh(ssd=True)
    m.request_finished("stop", Usage(1000, 1, 0, 800), TierCounts(hbm=600, ssd=200, compute=200, window="swa"), 1.0)
    s = read(m)
    assert [get(s, f"prefix_{what}_total", tier=t) for t in ("hbm", "ssd") for what in ("queries", "hits")] == [1000, 600, 400, 200]
    assert [get(s, "kv_tokens_total", group="global", tier=t) for t in ("hbm", "ssd", "compute")] == [600, 200, 200]
    assert get(s, "kv_tokens_total", group="window", tier="swa") == 128
    assert [get(s, "window_resumes_total", tier=t) for t in ("live", "swa", "replay")] == [0, 1, 0]
    assert get(s, "errors_total", kind="accounting") == 0
    without = fresh()
    without.request_finished("stop", Usage(1000, 1, 0, 600), TierCounts(hbm=600, compute=400, window="replay", replayed=128), 1.0)
    s = read(without)
    assert get(s, "prefix_queries_total", tier="ssd") == 0, "there is no SSD to ask"
    assert get(s, "kv_tokens_total", group="window", tier="replay") == 128


@pytest.mark.case("B096")
def test_sums_agree_over_random_lives() -> None:
    """Engine totals and per-request totals are the same number, aborted and never-started requests included."""
    rng, m = random.Random(0), fresh(ssd=True)
    billed_prompt = billed_output = hits = aborted = resumed = 0
    for n in range(2000):
        m.request_queued()
        reason = rng.choice(module.FINISH_REASONS)
        if reason == "abort" and n % 3 == 0:
            m.request_finished(reason, Usage(500, 0, 0, 0), None, 0.1)
            aborted += 1
            continue
        hbm, ssd, compute = rng.randrange(900), rng.randrange(100), rng.randrange(1, 500)
        output = rng.randrange(1, 50)
        for _ in range(output):
            m.step(0.001, "decode", 0, 1, 1, 1)
        window = rng.choice(("live", "swa", "replay")) if hbm + ssd else "none"
        replayed = 128 if window == "replay" else 0
        prompt = hbm + ssd + compute
        m.request_finished(reason, Usage(prompt, output, 0, hbm + ssd), TierCounts(hbm, ssd, compute, window, replayed), 1.0)  # type: ignore[arg-type]
        billed_prompt, billed_output, hits = billed_prompt + prompt, billed_output + output, hits + hbm
        aborted += reason == "abort"
        resumed += hbm + ssd > 0
    s = read(m)
    by_tier = total(s, "kv_tokens_total", group="global")
    assert total(s, "window_resumes_total") == total(s, "lineage_resumes_total") == resumed
    assert get(s, "prompt_tokens_total") == by_tier == get(s, "request_prompt_tokens_sum") == billed_prompt
    assert get(s, "generated_tokens_total") == get(s, "request_generated_tokens_sum") == billed_output
    assert total(s, "requests_finished_total") == get(s, "requests_queued_total") == get(s, "e2e_seconds_count") == 2000
    assert get(s, "requests_finished_total", reason="abort") == aborted
    assert get(s, "prefix_hits_total", tier="hbm") / get(s, "prefix_queries_total", tier="hbm") == hits / billed_prompt
    assert get(s, "errors_total", kind="accounting") == 0


@pytest.mark.case("B092")
def test_probes_do_not_reset_a_ratio() -> None:
    """The hit ratio of interleaved traffic is the true one because it is a quotient of two counters."""
    m = fresh()
    for _ in range(50):
        m.request_finished("stop", Usage(1000, 1, 0, 900), TierCounts(hbm=900, compute=100, window="live"), 1.0)
        m.request_finished("length", Usage(5, 1, 0, 0), TierCounts(compute=5), 1.0)
    s = read(m)
    assert get(s, "prefix_hits_total", tier="hbm") / get(s, "prefix_queries_total", tier="hbm") == 900 / 1005
    gauges = re.findall(r"# TYPE (\S+) gauge", m.render().decode())
    assert not [g for g in gauges if "hit" in g]


@pytest.mark.parametrize(
    ("reason", "usage", "tiers", "wrong"),
    [
        ("stop", Usage(10, 1, 0, 0), TierCounts(compute=9), True),
        ("stop", Usage(10, 1, 0, 4), TierCounts(hbm=5, compute=5, window="live"), True),
        ("stop", Usage(10, 1, 0, 5), TierCounts(hbm=5, compute=5), True),
        ("stop", Usage(10, 1, 0, 0), TierCounts(compute=10, window="swa"), True),
        ("stop", Usage(10, 1, 0, 5), TierCounts(ssd=5, compute=5, window="elsewhere"), True),  # type: ignore[arg-type]
        ("abort", Usage(10, 0, 0, 0), TierCounts(compute=11), True),
        ("abort", Usage(10, 0, 0, 0), TierCounts(compute=4), False),
        ("stop", Usage(10, 1, 0, 5), TierCounts(hbm=5, compute=5, window="live"), False),
    ],
)
def test_counts_that_disagree_are_counted_themselves(reason: str, usage: Usage, tiers: TierCounts, wrong: bool) -> None:
    m = fresh()
    m.request_finished(reason, usage, tiers, 1.0)
    s = read(m)
    assert get(s, "errors_total", kind="accounting") == wrong
    assert get(s, "prompt_tokens_total") == total(s, "kv_tokens_total", group="global")


@pytest.mark.case("B098")
def test_ten_thousand_junk_names_add_a_constant_number_of_series() -> None:
    rng, m = random.Random(1), fresh()
    junk = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=12)) for _ in range(10_000)]
    before = len(read(m))

    def flood(names: list[str]) -> None:
        for name in names:
            m.unknown_field(name)
            m.parser_repair(name)
            m.error(name)
            m.request_rejected(name)
            m.http("/" + name, rng.randrange(1000))
            m.http("/v1/models", rng.randrange(600, 1000))
            m.request_finished(name, Usage(0, 0, 0, 0), None, 0.0)
            m.step(0.1, name, 0, 0, 0, 0)  # type: ignore[arg-type]

    flood(junk[:5000])
    middle = len(read(m))
    flood(junk[5000:])
    s = read(m)
    assert middle - before <= 200 + 32 + 32
    assert len(s) == middle
    for name in ("unknown_fields_total", "parser_repairs_total", "errors_total", "rejected_total", "requests_finished_total"):
        assert total(s, name) == 10_000, "every event is counted somewhere"
    assert total(s, "http_requests_total") == 20_000
    assert get(s, "requests_finished_total", reason="other") == 10_000
    assert get(s, "http_requests_total", route="/v1/models", status="other") == 10_000


@pytest.mark.parametrize("name", ["what is my password?", "10.0.0.1", "x" * 41, "", "a\nb", "é", "sk-abc", 'a"b', "0day", "a b"])
def test_labels_that_are_no_identifiers_fold(name: str) -> None:
    m = fresh()
    m.unknown_field(name)
    m.unknown_field("maxTokens")
    s = read(m)
    assert get(s, "unknown_fields_total", field="other") == 1
    assert get(s, "unknown_fields_total", field="maxTokens") == 1
    assert not name or ("forebay_unknown_fields_total", (("field", name),)) not in s


@pytest.mark.case("B099")
def test_usage_stays_between_zero_and_one() -> None:
    """A 10,000-step random run, with bad input in it."""
    rng, m = random.Random(2), fresh()
    registry = m.registry.restricted_registry(["forebay_kv_usage_ratio", "forebay_window_usage_ratio"])
    for step in range(10_000):
        size, slots = rng.randrange(0, 5000), rng.randrange(0, 100)
        used = rng.randrange(0, size + 1)
        cached = rng.randrange(0, size - used + 1)
        held = rng.randrange(0, slots + 1)
        bad = step % 97 == 0
        m.pools(size - used - cached, -3 if bad else used, cached, size, slots + 5 if bad else held, slots)
        shown = {(s.name, s.labels.get("tier")): s.value for metric in registry.collect() for s in metric.samples}
        assert len(shown) == 3
        assert all(0.0 <= v <= 1.0 for v in shown.values())
        if not bad:
            assert shown["forebay_kv_usage_ratio", "hbm"] == (used / size if size else 0.0)
            assert shown["forebay_window_usage_ratio", None] == (held / slots if slots else 0.0)


def test_odd_values_raise_nothing_and_never_lower_a_counter() -> None:
    m = fresh()
    m.request_started(-1.0)
    m.first_token(-1e-9)
    m.inter_token([-1.0, 0.0])
    m.replayed(-5)
    m.evicted(-1)
    m.step(-1.0, "decode", 0, 0, -4, -1)
    m.request_finished("stop", Usage(-1, -1, -1, 0), TierCounts(hbm=-5, compute=2), -3.0)
    assert all(v >= 0 for (n, _), v in read(m).items() if n.startswith("forebay_"))


def test_threads_lose_no_events_and_learn_no_extra_names() -> None:
    m = fresh()

    def work(k: int) -> None:
        for n in range(1000):
            m.unknown_field(f"field_{n}")
            m.inter_token([0.01])
            m.http("/v1/models", 200)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    s = read(m)
    assert total(s, "unknown_fields_total") == get(s, "inter_token_seconds_count") == 4000
    assert get(s, "http_requests_total", route="/v1/models", status="200") == 4000
    assert len([1 for n, _ in s if n == "forebay_unknown_fields_total"]) == 201


def test_the_page() -> None:
    m = fresh(model='odd "name"\n')
    text = m.render().decode()
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    assert "_created" not in text
    assert "pid=" not in text
    helps = dict(re.findall(r"# HELP (forebay_\S+) (.*)", text))
    types = dict(re.findall(r"# TYPE (forebay_\S+) (.*)", text))
    assert helps.keys() == types.keys()
    assert all(len(h) > 15 and h.endswith(".") for h in helps.values())
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
        if name.endswith("_seconds"):
            assert "Seconds" in helps[name], "the help names the unit"
        if "_bytes" in name:
            assert "Bytes" in helps[name]


@pytest.mark.parametrize(("name", "first", "last"), [
    ("ttft_seconds", 0.01, 600), ("queue_seconds", 0.01, 600), ("e2e_seconds", 0.01, 600), ("inter_token_seconds", 0.001, 10),
])  # fmt: skip
def test_buckets_reach_far_enough(name: str, first: float, last: float) -> None:
    bounds = sorted(float(dict(labels)["le"]) for n, labels in read(fresh()) if n == f"forebay_{name}_bucket")
    assert bounds[0] <= first
    assert bounds[-2] == last
    assert bounds[-1] == float("inf")


def test_registries_are_separate() -> None:
    """Two servers in one process do not mix, and nothing goes to the global registry."""
    a, b = fresh(), fresh()
    a.request_queued()
    assert get(read(a), "requests_queued_total") == 1
    assert get(read(b), "requests_queued_total") == 0
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("forebay")]
