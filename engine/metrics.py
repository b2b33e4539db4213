"""Every number Forebay shows to Prometheus, one method per event.

Rules that keep the numbers honest:

- Counters and histograms only grow; ratios are left to the query (hits / queries), except usages of pools and stores, which are states.
- Every label set exists at zero from the start, so a rate never misses its first event.
- Label values come from fixed lists. A value outside its list counts as "other"; where names cannot be known in advance, the first
  few that look like identifiers get their own label and all later ones are "other". Prompt text, keys and addresses are never labels.
- What a tier counts itself (SSD store, snapshot pool) is read when the page is rendered, by the function given to `attach`.
- Sums agree by construction: forebay_prompt_tokens_total is the sum over tiers of forebay_kv_tokens_total{group="global"}, and once
  nothing runs, forebay_generated_tokens_total is the sum of forebay_request_generated_tokens, aborted requests included.

The registry is the caller's: one per server process, none global.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forebay import __version__
from forebay.cache.ssd_stats import SsdStats
from forebay.cache.swa import SwaStats
from forebay.engine.grammar_metrics import GrammarMetrics
from forebay.engine.image_metrics import ImageMetrics
from forebay.engine.instruments import OTHER, Bounded, Instruments, each
from forebay.engine.tier_metrics import ORIGINS, TierMetrics
from forebay.engine.types import TierCounts, Usage

log = logging.getLogger("forebay.engine")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Stage = Literal["encode", "prefill", "decode", "mixed"]
"""What a step ran: `mixed` is one forward pass over prefill and decode rows together."""

STAGES = ("encode", "prefill", "decode", "mixed")
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS = ("invalid", "context_length", "queue_full", "rate_limited", "unauthorized", "too_large", "loading", "draining", "dead")
ERRORS = (
    "internal_error", "nonfinite_logits", "out_of_memory", "timeout", "worker_died", "checkpoint_error", "config_error",
    "service_unavailable", "overloaded", "invalid_request_error", "accounting", "encode_failed",
)  # fmt: skip
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/models", "/v1/models/{id}", "/tokenize", "/detokenize", "/health", "/health/live", "/health/ready", "/version", "/openapi.json",
    "/metrics", "/",
)  # fmt: skip
STATUSES = ("200", "400", "401", "403", "404", "405", "408", "413", "415", "426", "429", "431", "499", "500", "502", "503", "504", "529")

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300, 600)
_STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (1, 10, 50, 100, 500, 1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000)


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

    Those of structured output are `grammars`, those of images `images`.

    registry: where the instruments live; each registry takes one Metrics. model: the served name, for forebay_build_info.
    window_tokens: length of the sliding window. ssd: whether an SSD store is configured, so that what HBM lacks is looked up there.
    """

    def __init__(
        self, registry: CollectorRegistry, *, model: str = "", version: str = __version__, window_tokens: int = 128, ssd: bool = False
    ) -> None:
        self.registry = registry
        self._refresh: Callable[[], None] | None = None
        self._refreshing = threading.Lock()
        make = Instruments(registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        Info("forebay_build", "Version of this server and name of the model it serves; the value is always 1.", registry=registry).info(
            {"version": version, "model": model}
        )
        ProcessCollector(registry=registry)
        self._ready = gauge("ready", "1 while the server accepts requests, 0 while it loads, drains or is dead.")
        self._running = gauge("requests_running", "Requests that hold KV blocks and take part in steps.")
        self._waiting = gauge("requests_waiting", "Requests in the queue, preempted ones included.")
        self._queued = counter("requests_queued", "Requests that entered the queue. Each of the n choices of an API request is one.")
        self._rejected = Bounded(counter("rejected", "Requests refused before they entered the queue, by reason.", "reason"), REJECTIONS)
        reason = counter(
            "requests_finished", "Requests that left the engine, by finish reason; each queued request is counted once.", "reason"
        )
        self._finished = Bounded(reason, FINISH_REASONS)
        self._aborts = counter("aborts", "Orders to abort a request (client gone, API call), whether or not it still ran.")
        self._preempted = counter("preemptions", "Times a running request was put back to the queue to free blocks.")
        self._errors = Bounded(
            counter("errors", "Failures by kind; `accounting` means that counts of one request disagree.", "kind"), ERRORS, 32
        )

        self._queue = histogram("queue_seconds", "Seconds from arrival to the first step of a request.", _WAITS)
        self._ttft = histogram("ttft_seconds", "Seconds from arrival to the first generated token of a request.", _WAITS)
        text = "Seconds between consecutive generated tokens of one request, one observation per token after the first."
        self._gap = histogram("inter_token_seconds", text, _GAPS)
        self._e2e = histogram("e2e_seconds", "Seconds from arrival to the end of a request, aborted ones included.", _WAITS)
        self._step = each(
            histogram("step_seconds", "Seconds of one step, by what it ran; mixed is prefill and decode.", _STEPS, "stage"),
            (*STAGES, OTHER),
        )
        self._rows = each(histogram("batch_rows", "Rows of one step, by kind.", _ROWS, "kind"), ("prefill", "decode"))
        self._computed = counter("step_tokens", "Token positions that steps ran through the network, replayed ones included.")

        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests whose KV was loaded or computed.")
        self._generated = counter("generated_tokens", "Tokens generated, counted in the step that produced them.")
        self._reasoning = counter("reasoning_tokens", "Generated tokens of finished requests that were reasoning.")
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of one finished request.", _TOKENS)
        self._request_generated = histogram(
            "request_generated_tokens", "Generated tokens of one finished request, aborted ones included.", _TOKENS
        )

        self._tiers = TierMetrics(make, window_tokens=window_tokens, ssd=ssd)
        self.grammars = GrammarMetrics(make)
        self.images = ImageMetrics(make)

        http = counter("http_requests", "HTTP responses by route template and status.", "route", "status")
        self._http = {(r, s): http.labels(r, s) for r in (*ROUTES, OTHER) for s in (*STATUSES, OTHER)}
        text = "Unknown top-level fields seen in request bodies, by name (the first 200 names)."
        self._fields = Bounded(counter("unknown_fields", text, "field"), (), 200)
        self._repairs = Bounded(counter("parser_repairs", "Repairs of malformed model output, by kind.", "kind"), (), 32)

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
        self._tiers.replayed(tokens)

    def request_finished(self, reason: str, usage: Usage, tiers: TierCounts | None, e2e_seconds: float) -> None:
        """A request left the engine, however it ended. `tiers` None: it never ran, so no KV of its prompt was loaded or computed."""
        self._finished.inc(reason)
        self._e2e.observe(max(0.0, e2e_seconds))
        self._request_generated.observe(max(0, usage.completion_tokens))
        self._reasoning.inc(max(0, usage.reasoning_tokens))
        if tiers is None:
            self._request_prompt.observe(0)
            return
        prompt = max(0, tiers.hbm) + max(0, tiers.ssd) + max(0, tiers.compute)
        complete = prompt == usage.prompt_tokens or (reason in ("abort", "error") and prompt < usage.prompt_tokens)
        resumed = tiers.window in ORIGINS
        if not complete or usage.cached_tokens != tiers.cached or resumed != (tiers.cached > 0):
            self._errors.inc("accounting")
        self._prompt.inc(prompt)
        self._request_prompt.observe(prompt)
        self._tiers.request(tiers)

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
        self._tiers.evicted(blocks)

    def pool_bytes(self, blocks: int, windows: int) -> None:
        """Bytes reserved at start for the two HBM pools."""
        self._tiers.pool_bytes(blocks, windows)

    def pools(self, free_blocks: int, used_blocks: int, cached_blocks: int, total: int, windows_used: int, windows_total: int) -> None:
        """State of the HBM pools now; free + used + cached blocks = total."""
        self._tiers.pools(free_blocks, used_blocks, cached_blocks, total, windows_used, windows_total)

    # Tiers that count for themselves

    def attach(self, refresh: Callable[[], None]) -> None:
        """`refresh` is called before the page is rendered, by one thread at a time; it calls `ssd` and `swa` with what there is."""
        self._refresh = refresh

    def ssd(self, stats: SsdStats, ages_at_hit: Iterable[float], ages_at_removal: Iterable[float]) -> None:
        """State and totals of the SSD store now. The ages are seconds since the last use, those observed since the last call."""
        self._tiers.ssd(stats, ages_at_hit, ages_at_removal)

    def swa(self, stats: SwaStats, get_seconds: Iterable[float], put_seconds: Iterable[float]) -> None:
        """State and totals of the snapshot pool now, and the seconds of the calls made since the last time."""
        self._tiers.swa(stats, get_seconds, put_seconds)

    def refresh(self) -> None:
        """Take over what the tiers count. If that fails, the other numbers are shown all the same, and the failure is one of them."""
        with self._refreshing:
            if self._refresh is None:
                return
            try:
                self._refresh()
            except Exception:
                log.exception("the numbers of the tiers could not be read")
                self._errors.inc("internal_error")

    def render(self) -> bytes:
        """The page for /metrics, text format 0.0.4; its content type is CONTENT_TYPE."""
        self.refresh()
        return generate_latest(_WithoutCreated(self.registry))
