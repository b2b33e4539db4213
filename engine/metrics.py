"""Every number Forebay shows to Prometheus, one method per event.

Rules that keep the numbers honest:

- Counters and histograms only grow; ratios are left to the query (hits / queries), except the two pool usages, which are states.
- Every label set exists at zero from the start, so a rate never misses its first event.
- Label values come from fixed lists. A value outside its list counts as "other"; where names cannot be known in advance, the first
  few that look like identifiers get their own label and all later ones are "other". Prompt text, keys and addresses are never labels.
- Sums agree by construction: forebay_prompt_tokens_total is the sum over tiers of forebay_kv_tokens_total{group="global"}, and once
  nothing runs, forebay_generated_tokens_total is the sum of forebay_request_generated_tokens, aborted requests included.

The registry is the caller's: one per server process, none global.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forebay import __version__
from forebay.engine.types import TierCounts, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Stage = Literal["encode", "prefill", "decode", "mixed"]
"""What a step ran: `mixed` is one forward pass over prefill and decode rows together."""

STAGES = ("encode", "prefill", "decode", "mixed")
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS = ("invalid", "context_length", "queue_full", "rate_limited", "unauthorized", "too_large", "loading", "draining", "dead")
ERRORS = (
    "internal_error", "nonfinite_logits", "out_of_memory", "timeout", "worker_died", "checkpoint_error", "config_error",
    "service_unavailable", "overloaded", "invalid_request_error", "accounting",
)  # fmt: skip
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/models", "/v1/models/{id}", "/tokenize", "/detokenize", "/health", "/health/live", "/health/ready", "/version", "/metrics", "/",
)  # fmt: skip
STATUSES = ("200", "400", "401", "403", "404", "405", "408", "413", "415", "426", "429", "499", "500", "502", "503", "504", "529")
OTHER = "other"

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300, 600)
_STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (1, 10, 50, 100, 500, 1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}", re.ASCII)


Family = TypeVar("Family", Counter, Gauge, Histogram)


def _each(family: Family, values: Iterable[str]) -> dict[str, Family]:
    """The children of a one-label family, all created now."""
    return {value: family.labels(value) for value in values}


class _Bounded:
    """A counter by one label whose values come from outside. `learn` names beyond the known ones get a series; the rest are "other"."""

    def __init__(self, counter: Counter, known: Iterable[str], learn: int = 0) -> None:
        self._counter = counter
        self._children = _each(counter, (*known, OTHER))
        self._room = learn
        self._lock = threading.Lock()

    def inc(self, value: str, by: int = 1) -> None:
        child = self._children.get(value)
        if child is None:
            child = self._learn(value)
        child.inc(by)

    def _learn(self, value: str) -> Counter:
        with self._lock:
            if value not in self._children and self._room > 0 and _NAME.fullmatch(value):
                self._room -= 1
                self._children[value] = self._counter.labels(value)
        return self._children.get(value, self._children[OTHER])


class _WithoutCreated(Collector):
    """A registry seen without the `_created` samples, which text format 0.0.4 would show as one more gauge per series."""

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if s.name != metric.name + "_created"]
            yield metric


class Metrics:
    """All instruments of one server. Methods are events, may be called from any thread and never raise on odd values.

    registry: where the instruments live; each registry takes one Metrics. model: the served name, for forebay_build_info.
    window_tokens: length of the sliding window. ssd: whether an SSD store is configured, so that what HBM lacks is looked up there.
    """

    def __init__(
        self, registry: CollectorRegistry, *, model: str = "", version: str = __version__, window_tokens: int = 128, ssd: bool = False
    ) -> None:
        self.registry = registry
        self._window_tokens = window_tokens
        self._ssd = ssd

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"forebay_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"forebay_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"forebay_{name}", text, labels, buckets=buckets, registry=registry)

        Info("forebay_build", "Version of this server and name of the model it serves; the value is always 1.", registry=registry).info(
            {"version": version, "model": model}
        )
        ProcessCollector(registry=registry)
        self._ready = gauge("ready", "1 while the server accepts requests, 0 while it loads, drains or is dead.")
        self._running = gauge("requests_running", "Requests that hold KV blocks and take part in steps.")
        self._waiting = gauge("requests_waiting", "Requests in the queue, preempted ones included.")
        self._queued = counter("requests_queued", "Requests that entered the queue. Each of the n choices of an API request is one.")
        self._rejected = _Bounded(counter("rejected", "Requests refused before they entered the queue, by reason.", "reason"), REJECTIONS)
        reason = counter(
            "requests_finished", "Requests that left the engine, by finish reason; each queued request is counted once.", "reason"
        )
        self._finished = _Bounded(reason, FINISH_REASONS)
        self._aborts = counter("aborts", "Orders to abort a request (client gone, API call), whether or not it still ran.")
        self._preempted = counter("preemptions", "Times a running request was put back to the queue to free blocks.")
        self._errors = _Bounded(
            counter("errors", "Failures by kind; `accounting` means that counts of one request disagree.", "kind"), ERRORS, 32
        )

        self._queue = histogram("queue_seconds", "Seconds from arrival to the first step of a request.", _WAITS)
        self._ttft = histogram("ttft_seconds", "Seconds from arrival to the first generated token of a request.", _WAITS)
        text = "Seconds between consecutive generated tokens of one request, one observation per token after the first."
        self._gap = histogram("inter_token_seconds", text, _GAPS)
        self._e2e = histogram("e2e_seconds", "Seconds from arrival to the end of a request, aborted ones included.", _WAITS)
        self._step = _each(
            histogram("step_seconds", "Seconds of one step, by what it ran; mixed is prefill and decode.", _STEPS, "stage"),
            (*STAGES, OTHER),
        )
        self._rows = _each(histogram("batch_rows", "Rows of one step, by kind.", _ROWS, "kind"), ("prefill", "decode"))
        self._computed = counter("step_tokens", "Token positions that steps ran through the network, replayed ones included.")

        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests whose KV was loaded or computed.")
        self._generated = counter("generated_tokens", "Tokens generated, counted in the step that produced them.")
        self._reasoning = counter("reasoning_tokens", "Generated tokens of finished requests that were reasoning.")
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of one finished request.", _TOKENS)
        self._request_generated = histogram(
            "request_generated_tokens", "Generated tokens of one finished request, aborted ones included.", _TOKENS
        )

        text = (
            "Prompt tokens of finished requests by where their KV came from. group=global: every token once, in hbm, ssd or compute. "
            "group=window: tokens before the resume point whose sliding-window KV was kept (hbm), loaded (swa) or recomputed (replay)."
        )
        kv = counter("kv_tokens", text, "group", "tier")
        self._global = {tier: kv.labels("global", tier) for tier in ("hbm", "ssd", "compute")}
        self._window = {tier: kv.labels("window", tier) for tier in ("hbm", "swa", "replay")}
        text = "Resumed requests by where their window came from."
        self._origin = _each(counter("window_resumes", text, "tier"), ("hbm", "swa", "replay"))
        text = "Prompt tokens looked up in a tier: all of them in hbm, in ssd those that hbm lacked. Hit ratio is hits / queries."
        self._queries = _each(counter("prefix_queries", text, "tier"), ("hbm", "ssd"))
        self._hits = _each(counter("prefix_hits", "Prompt tokens found in a tier.", "tier"), ("hbm", "ssd"))
        self._replays = counter("replays", "Resumes that recomputed the window.")
        self._replayed = counter("replayed_tokens", "Tokens recomputed by replays to rebuild window KV.")
        self._evicted = _each(counter("kv_evictions", "Blocks dropped from a tier to make room.", "tier"), ("hbm",))

        text = "Blocks of a tier by state: used (held by a request), cached (held by none, content kept), free (no content)."
        blocks = gauge("kv_blocks", text, "tier", "state")
        self._blocks = {state: blocks.labels("hbm", state) for state in ("used", "cached", "free")}
        windows = gauge("windows", "Slots for the sliding-window KV of running requests, by state.", "state")
        self._windows = _each(windows, ("used", "free"))
        self._usage = gauge("kv_usage_ratio", "Used blocks / all blocks of a tier, 0 to 1.", "tier").labels("hbm")
        self._window_usage = gauge("window_usage_ratio", "Used window slots / all window slots, 0 to 1.")
        self._bytes = gauge("kv_bytes", "Bytes reserved for the blocks of a tier.", "tier").labels("hbm")
        self._window_bytes = gauge("window_bytes", "Bytes reserved for window slots.")

        http = counter("http_requests", "HTTP responses by route template and status.", "route", "status")
        self._http = {(r, s): http.labels(r, s) for r in (*ROUTES, OTHER) for s in (*STATUSES, OTHER)}
        text = "Unknown top-level fields seen in request bodies, by name (the first 200 names)."
        self._fields = _Bounded(counter("unknown_fields", text, "field"), (), 200)
        self._repairs = _Bounded(counter("parser_repairs", "Repairs of malformed model output, by kind.", "kind"), (), 32)

    # Life of the server

    def ready(self, is_ready: bool) -> None:
        self._ready.set(int(is_ready))

    def error(self, kind: str) -> None:
        """A failure; `kind` is a ForebayError's `code` or `kind`."""
        self._errors.inc(kind)

    def http(self, route: str, status: int) -> None:
        """A response was sent. `route` is the template of the canonical path ("/v1/models/{id}"), never the path as received."""
        known = route if (route, OTHER) in self._http else OTHER
        child = self._http.get((known, str(status)))
        (child or self._http[known, OTHER]).inc()

    def unknown_field(self, name: str) -> None:
        self._fields.inc(name)

    def parser_repair(self, kind: str) -> None:
        self._repairs.inc(kind)

    # Life of a request

    def request_queued(self) -> None:
        self._queued.inc()

    def request_rejected(self, reason: str) -> None:
        """The request never entered the queue; `reason` is one of REJECTIONS."""
        self._rejected.inc(reason)

    def request_started(self, queue_seconds: float) -> None:
        """First step of a request; not called again after a preemption."""
        self._queue.observe(max(0.0, queue_seconds))

    def first_token(self, ttft_seconds: float) -> None:
        self._ttft.observe(max(0.0, ttft_seconds))

    def inter_token(self, seconds: Iterable[float]) -> None:
        """Gaps of all requests in this step. A request that got k tokens at once contributes k equal shares of its gap."""
        observe = self._gap.observe
        for gap in seconds:
            observe(gap if gap > 0.0 else 0.0)

    def aborted(self) -> None:
        self._aborts.inc()

    def preempted(self) -> None:
        self._preempted.inc()

    def replayed(self, tokens: int) -> None:
        """A resume recomputed its window of `tokens` tokens."""
        self._replays.inc()
        self._replayed.inc(max(0, tokens))

    def request_finished(self, reason: str, usage: Usage, tiers: TierCounts | None, e2e_seconds: float) -> None:
        """A request left the engine, however it ended. `tiers` None: it never ran, so no KV of its prompt was loaded or computed."""
        self._finished.inc(reason)
        self._e2e.observe(max(0.0, e2e_seconds))
        self._request_generated.observe(max(0, usage.completion_tokens))
        self._reasoning.inc(max(0, usage.reasoning_tokens))
        if tiers is None:
            self._request_prompt.observe(0)
            return
        hbm, ssd, compute = max(0, tiers.hbm), max(0, tiers.ssd), max(0, tiers.compute)
        prompt = hbm + ssd + compute
        complete = prompt == usage.prompt_tokens or (reason in ("abort", "error") and prompt < usage.prompt_tokens)
        if not complete or usage.cached_tokens != tiers.cached:
            self._errors.inc("accounting")
        self._prompt.inc(prompt)
        self._request_prompt.observe(prompt)
        self._global["hbm"].inc(hbm)
        self._global["ssd"].inc(ssd)
        self._global["compute"].inc(compute)
        self._queries["hbm"].inc(prompt)
        self._hits["hbm"].inc(hbm)
        if self._ssd:
            self._queries["ssd"].inc(prompt - hbm)
            self._hits["ssd"].inc(ssd)
        if tiers.window in self._origin:
            self._origin[tiers.window].inc()
            kept = min(self._window_tokens, hbm + ssd)
            self._window[tiers.window].inc(max(0, tiers.replayed) if tiers.window == "replay" else kept)

    # Life of the engine

    def step(self, seconds: float, stage: Stage, prefill_rows: int, decode_rows: int, tokens: int, generated: int) -> None:
        """One step ended. `tokens` positions went through the network, `generated` tokens were accepted into outputs."""
        self._step.get(stage, self._step[OTHER]).observe(max(0.0, seconds))
        self._rows["prefill"].observe(prefill_rows)
        self._rows["decode"].observe(decode_rows)
        self._computed.inc(max(0, tokens))
        self._generated.inc(max(0, generated))

    def running(self, n: int) -> None:
        self._running.set(n)

    def waiting(self, n: int) -> None:
        self._waiting.set(n)

    def evicted(self, blocks: int) -> None:
        self._evicted["hbm"].inc(max(0, blocks))

    def pool_bytes(self, blocks: int, windows: int) -> None:
        """Bytes reserved at start for the two HBM pools."""
        self._bytes.set(blocks)
        self._window_bytes.set(windows)

    def pools(self, free_blocks: int, used_blocks: int, cached_blocks: int, total: int, windows_used: int, windows_total: int) -> None:
        """State of the HBM pools now; free + used + cached blocks = total."""
        self._blocks["free"].set(free_blocks)
        self._blocks["used"].set(used_blocks)
        self._blocks["cached"].set(cached_blocks)
        self._usage.set(_ratio(used_blocks, total))
        self._windows["used"].set(windows_used)
        self._windows["free"].set(windows_total - windows_used)
        self._window_usage.set(_ratio(windows_used, windows_total))

    def render(self) -> bytes:
        """The page for /metrics, text format 0.0.4; its content type is CONTENT_TYPE."""
        return generate_latest(_WithoutCreated(self.registry))


def _ratio(used: int, total: int) -> float:
    return min(1.0, max(0.0, used / total)) if total > 0 else 0.0
