"""The engine proper: schedule, run, sample, report. One thread calls `step`; others submit and abort through the inbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from forebay.cache.manager import CacheManager
from forebay.engine.admission import Admission
from forebay.engine.batcher import Batcher, Row
from forebay.engine.choices import Choices
from forebay.engine.chooser import Chooser
from forebay.engine.encoder import Encoder
from forebay.engine.flight import Flight, Flights
from forebay.engine.metrics import Metrics, Stage
from forebay.engine.options import EngineOptions
from forebay.engine.reservoir import Reservoir
from forebay.engine.runner import Runner
from forebay.engine.sampler import Sampler
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Sequence
from forebay.engine.types import (
    EngineError,
    OutputEvent,
    PrefillMode,
    QueueFullError,
    QueueTimeoutError,
    Request,
    TokenLogprob,
    UnavailableError,
)
from forebay.model.chat import ChatCodec
from forebay.model.errors import ForebayError
from forebay.model.tokenizer import Tokenizer

LONGEST_RETRY_S = 60.0


@dataclass(frozen=True)
class StepReport:
    """What one step did. `rows` 0 means that nothing could run."""

    seconds: float
    rows: int
    decode_rows: int
    generated: int


class Engine:
    """All stages in one worker: continuous batching over one network.

    `sink` receives the events of a step, called from the thread that steps; it must not raise.
    """

    def __init__(
        self,
        runner: Runner,
        manager: CacheManager,
        tokenizer: Tokenizer,
        options: EngineOptions,
        metrics: Metrics,
        *,
        prefill: PrefillMode = "bounded",
        codec: ChatCodec | None = None,
        reservoir: Reservoir | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """Without an `encoder`, requests with images are refused."""
        config = runner.backbone.config
        self.runner, self.manager, self.tokenizer, self.options, self.metrics = runner, manager, tokenizer, options, metrics
        self.prefill: PrefillMode = prefill
        self.codec = codec
        self.vocab_size = config.vocab_size
        self.eos_id = config.eos_token_id
        sampler = Sampler(config.vocab_size, frozenset({config.eos_token_id}))
        self.admission = Admission(config, manager, tokenizer, options, metrics, sampler, prefill, codec, encoder is not None)
        self.max_context = self.admission.max_context
        self.reservoir, self.encoder = reservoir, encoder
        self.scheduler = Scheduler(
            manager,
            Batcher(*options.budgets),
            options,
            save=runner.save,
            restore=runner.restore,
            restorer=reservoir.restorer if reservoir is not None else None,
            live=reservoir.live if reservoir is not None else None,
            embed=encoder.serve if encoder is not None else None,
        )
        self.chooser = Chooser(runner, sampler, self.scheduler, metrics)
        self.choices = Choices(manager, self.scheduler, metrics, reservoir, self.chooser.late)
        self.flights = Flights(runner, manager, self.scheduler, reservoir, self.choices.known) if options.overlap else None
        self.choices.flights = self.flights
        self.sink: Callable[[list[OutputEvent]], None] = lambda events: None
        self._inbox: list[Sequence] = []
        self._aborts: list[str] = []
        self._closed: ForebayError | None = None
        self._ending: ForebayError | None = None
        self._lock = threading.Lock()
        self._stepping = False
        self._order = 0
        self._evictions = 0
        self.wake = threading.Event()
        if reservoir is not None:
            reservoir.wake = self.wake.set
            metrics.attach(lambda: reservoir.refresh(metrics))
        metrics.pool_bytes(runner.blocks.data.nbytes, runner.windows.data.nbytes + runner.windows.pending.nbytes)
        self._report_pools()

    # Called from any thread

    def prepare(self, request: Request) -> Sequence:
        """Check a request and build its sequence. Nothing is queued and nothing need be undone.

        Raises:
            RequestError: it can never run (too long, ids outside the vocabulary).
        """
        return self.admission.prepare(request)

    def check_ids(self, ids: SequenceOf[int], name: str) -> None:
        """Raise RequestError unless there are ids and all of them are in the vocabulary."""
        self.admission.check_ids(ids, name)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a prepared sequence; from now on it changes with every step and is for reading only.

        Raises:
            QueueFullError: too many wait already.
            UnavailableError: requests are not taken any more.
        """
        with self._lock:
            if self._closed is not None:
                self.metrics.request_rejected("draining" if self._closed.code == "draining" else "dead")
                raise UnavailableError(self._closed.message, code=self._closed.code)
            waiting = self.queued
            if waiting >= self.options.max_queued_requests:
                self.metrics.request_rejected("queue_full")
                raise QueueFullError(
                    f"{waiting} requests are waiting, the limit is {self.options.max_queued_requests} (max_queued_requests)",
                    retry_after=self._likely_wait(),
                )
            sequence.order = self._order
            self._order += 1
            if sequence.request.share is None:
                self.scheduler.look_for(sequence)  # now, so that the next step can have the answer
            self._inbox.append(sequence)
        self.metrics.request_queued()
        self.wake.set()

    def submit(self, request: Request) -> Sequence:
        """`prepare` and `enqueue`."""
        sequence = self.prepare(request)
        self.enqueue(sequence)
        return sequence

    def _likely_wait(self) -> float:
        """Seconds until a place may be free: as long as the head of the queue has waited for one, within reason."""
        head = self.scheduler.waiting[:1]
        waited = time.monotonic() - head[0].request.arrived if head and head[0].times.scheduled is None else 0.0
        return min(max(1.0, waited), LONGEST_RETRY_S)

    @property
    def queued(self) -> int:
        """Requests that wait for admission."""
        return len(self._inbox) + len(self.scheduler.waiting)

    def refuse_waiting(self, failure: ForebayError) -> None:
        """Take no more requests, and before the next step end every one that has not started with an error."""
        with self._lock:
            self._closed = failure
        self.wake.set()

    def end_all(self, failure: ForebayError) -> None:
        """Take no more requests, and before the next step end every one there is with an error."""
        with self._lock:
            self._closed = self._ending = failure
        self.wake.set()

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step; unknown ids are ignored."""
        with self._lock:
            self._aborts.append(request_id)
        self.wake.set()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do or to report: False means that every request has had its last event."""
        with self._lock:
            flying = self.flights is not None and self.flights.current is not None
            return bool(self._stepping or self._inbox or self._aborts or self.choices.known or flying)

    # Called from the stepping thread

    def step(self) -> StepReport:
        """Take in what arrived, run one step, report what it gave. An exception ends the requests of the step and is raised."""
        began = time.perf_counter()
        events: list[OutputEvent] = []
        rows: list[Row] = []
        accepted = self.choices.accepted
        self._stepping = True
        try:
            self._take_in(events)
            if self.reservoir is not None:
                self.reservoir.repair()
            flights = self.flights
            flight = flights.current if flights is not None else None
            rows = flight.rows if flight is not None else self._schedule(events)
            if flights is not None and flight is None and not self.chooser.late and flights.may_fly(rows):
                flight = flights.launch(rows)
            if flights is not None and flight is not None:
                self._land(flights, flight, events)
            elif rows or self.chooser.late:
                self._run(rows, events)
        except Exception as error:
            self._fail(rows, error, events)
            raise
        finally:
            seconds, generated = time.perf_counter() - began, self.choices.accepted - accepted
            decode = sum(1 for row in rows if row.stop - row.start == 1 and row.start >= row.sequence.prompt_tokens)
            if rows:
                tokens = sum(row.stop - row.start for row in rows)
                stage: Stage = "decode" if decode == len(rows) else "prefill" if decode == 0 else "mixed"
                self.metrics.step(seconds, stage, tokens - decode, decode, tokens, generated)
            self._report(events)
        return StepReport(seconds, len(rows), decode, generated)

    def settle(self) -> None:
        """Take in what arrived and end what is to be ended, without a step."""
        events: list[OutputEvent] = []
        self._stepping = True
        try:
            self._take_in(events)
            if self.flights is not None and not self.choices.known:
                self.flights.drop()
        finally:
            self._report(events)

    def _report(self, events: list[OutputEvent]) -> None:
        self._report_pools()
        if events:
            self.sink(events)
        self._stepping = False

    def _take_in(self, events: list[OutputEvent]) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
            refuse, ending = self._closed, self._ending
            for sequence in arrived:
                self.choices.known[sequence.id] = sequence
        for sequence in arrived:
            self.choices.add(sequence)
        for request_id in aborts:
            if (known := self.choices.known.get(request_id)) is not None:
                self.metrics.aborted()
                events.append(self.choices.end(known, "abort", self.choices.flush(known, "abort")))
        if refuse is None:
            return
        for sequence in list(self.choices.known.values()):
            if ending is not None or sequence.times.scheduled is None:
                events.append(self.choices.end(sequence, "error", self.choices.flush(sequence, "error"), error=ending or refuse))

    def _schedule(self, events: list[OutputEvent]) -> list[Row]:
        """Rows of the step; counts who started and who was preempted, ends who waited too long or cannot grow."""
        scheduler = self.scheduler
        rows = scheduler.schedule()
        now = time.monotonic()
        for sequence in scheduler.started:
            if self.reservoir is not None:
                self.reservoir.used(sequence)
            self.metrics.request_started(now - sequence.request.arrived)
            if sequence.tiers and sequence.tiers.window == "replay":
                self.metrics.replayed(sequence.tiers.replayed)
        for _ in scheduler.preempted:
            self.metrics.preempted()
        for sequence in scheduler.expired:
            late = QueueTimeoutError(f"the request waited longer than {self.options.max_queue_wait_s:g} s for a free place")
            self.metrics.error(late.code or late.kind)
            events.append(self.choices.end(sequence, "error", self.choices.flush(sequence, "error"), error=late))
        for sequence, failure in scheduler.blind:
            self.metrics.error(failure.code or failure.kind)
            events.append(self.choices.end(sequence, "error", self.choices.flush(sequence, "error"), error=failure))
        for sequence in scheduler.too_long:
            events.append(self.choices.end(sequence, "length", self.choices.flush(sequence, "length")))
        return rows

    def _run(self, rows: list[Row], events: list[OutputEvent]) -> None:
        """Run the rows and sample where a token is due, or was in an earlier step whose masks were not ready."""
        logits, scored = self.runner.run(rows) if rows else (torch.empty((0, self.vocab_size)), [])
        broken: set[str] = set()
        for row, hidden in zip(rows, scored, strict=True):
            self._computed(row)
            if hidden is not None and not self.chooser.score_prompt(row, hidden):
                broken.add(row.sequence.id)
        reached, places = self.choices.due(rows, broken)
        due, logits = self.chooser.ready(reached, logits if len(places) == logits.shape[0] else logits[places])
        self._accept(due, self.chooser.sample(logits, due), broken, events)
        # While this step is reported and the next one computed.
        self.chooser.masks.start([s.sampling.constraint for s in due if s.sampling.constraint is not None and s.id in self.choices.known])
        self._end_broken(dict.fromkeys([*(row.sequence for row in rows), *reached, *due]), broken, events)

    def _land(self, flights: Flights, flight: Flight, events: list[OutputEvent]) -> None:
        """Launch the step after a flight, if one may run ahead, and settle the flight."""
        failure: Exception | None = None
        flights.current = flight  # what it writes to stays until it is settled
        following: Flight | None = None
        try:
            following = flights.ahead(flight)
        except Exception as error:  # of the step after this one, whose tokens are good
            failure = error
        try:
            tokens, changed = flight.sampled.wait()
        finally:
            flights.current = following
        due: list[Sequence] = []
        found: list[tuple[int, TokenLogprob | None] | None] = []
        broken: set[str] = set()
        for place, (row, token) in enumerate(zip(flight.rows, tokens, strict=True)):
            sequence = row.sequence
            if not flights.alive(flight, sequence):
                continue
            if place in changed and following is not None:
                following.void.add(sequence)
            if (copy := flight.copies.get(sequence)) is not None:
                sequence.copies[row.stop] = copy
            self._computed(row)
            due.append(sequence)
            found.append((token, None) if token is not None else None)
        self._accept(due, found, broken, events)
        self._end_broken(due, broken, events)
        flights.let_go()
        if failure is not None:
            raise failure

    def _computed(self, row: Row) -> None:
        """The row's positions have their final KV."""
        sequence = row.sequence
        sequence.computed = row.stop
        # Most rows of generated tokens end within a block, and then there is nothing to say.
        inside = row.stop // self.manager.layout.block_tokens <= sequence.cache.committed and not sequence.cache.loading
        committed = [] if inside else self.manager.commit(sequence.cache, sequence.tokens, row.stop)
        if self.reservoir is not None:
            self.reservoir.store_blocks(sequence, committed)
            self.reservoir.keep_window(sequence, row.stop)

    def _accept(
        self,
        due: list[Sequence],
        found: list[tuple[int, TokenLogprob | None] | None],
        broken: set[str],
        events: list[OutputEvent],
    ) -> None:
        """Add a token to every sequence; to `broken` those that have none."""
        now = time.monotonic()
        gaps = []
        for sequence, choice in zip(due, found, strict=True):
            if choice is None or sequence.id in broken:
                broken.add(sequence.id)
                continue
            times = sequence.times
            if times.first_token is None:
                times.first_token = now
                if self.reservoir is not None:
                    self.reservoir.prompt_done(sequence)
                self.metrics.first_token(now - times.arrived)
            else:
                gaps.append(now - (times.last_token or now))
            times.last_token = now
            event = self.choices.accept(sequence, *choice)
            if sequence.scores_prompt and sequence.generated == 1:
                event.prompt_logprobs = sequence.prompt_logprobs
            events.append(event)
            if sequence.cache.plan is None and event.finish_reason is None:
                self.scheduler.add(sequence)  # a follower, which has its own place to find
        self.metrics.inter_token(gaps)

    def _end_broken(self, sequences: Iterable[Sequence], broken: set[str], events: list[OutputEvent]) -> None:
        """End those of the sequences that have no token, with the reason."""
        for sequence in sequences:
            if sequence.id in broken:
                failure = self.chooser.ungrammatical(sequence) or EngineError(
                    "the model produced numbers that are not finite for this request", code="nonfinite_logits"
                )
                self.metrics.error(failure.code or failure.kind)
                deltas = self.choices.flush(sequence, "error")
                events.append(self.choices.end(sequence, "error", deltas, error=failure, keep=False))

    def _fail(self, rows: list[Row], error: Exception, events: list[OutputEvent]) -> None:
        """A step broke: its requests end with an error, nothing they wrote stays cached, the others go on."""
        if self.flights is not None:
            self.flights.drop()
        kind = error.kind if isinstance(error, ForebayError) else "step_failed"
        self.metrics.error(kind)
        failure = error if isinstance(error, ForebayError) else EngineError("the engine failed while it computed this request", code=kind)
        for sequence in [*(row.sequence for row in rows), *(s for s, _ in self.chooser.late.values())]:
            if self.choices.known.get(sequence.id) is sequence:
                events.append(self.choices.end(sequence, "error", self.choices.flush(sequence, "error"), error=failure, keep=False))

    def fail_all(self, failure: ForebayError) -> None:
        """Take no more requests and end every one, running, waiting or just submitted, with an error. Only while nothing steps."""
        self.end_all(failure)
        self.settle()

    def close(self) -> None:
        """Write what is queued for other tiers and stop them. Only while nothing steps."""
        self.chooser.masks.close()
        if self.reservoir is not None:
            self.reservoir.close()

    def _report_pools(self) -> None:
        stats = self.manager.stats()
        self.metrics.pools(stats.free, stats.used, stats.cached, stats.total, stats.windows_used, stats.windows_total)
        self.metrics.evicted(stats.evictions - self._evictions)
        self._evictions = stats.evictions
        self.metrics.running(len(self.scheduler.running))
        self.metrics.waiting(len(self.scheduler.waiting) + len(self._inbox))
