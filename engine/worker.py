"""The engine proper: schedule, run, sample, report. One thread calls `step`; others submit and abort through the inbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from forebay.cache.manager import CacheManager
from forebay.engine.batcher import Batcher, Row
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.output import OutputProcessor
from forebay.engine.runner import Runner
from forebay.engine.sampler import NonFiniteLogitsError, Sampler, SamplingState, prompt_logprobs
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Sequence
from forebay.engine.types import EngineError, FinishReason, OutputEvent, PrefillMode, QueueFullError, Request, TokenLogprob, UnavailableError
from forebay.model.chat import ChatCodec, Delta
from forebay.model.errors import ForebayError, RequestError
from forebay.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class StepReport:
    """What one step did. `rows` 0 means that nothing could run."""

    seconds: float
    rows: int
    decode_rows: int
    generated: int


class Engine:
    """All stages in one worker: continuous batching over one network.

    `sink` receives the events of a step, called from the thread that steps.
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
    ) -> None:
        config = runner.backbone.config
        self.runner, self.manager, self.tokenizer, self.options, self.metrics = runner, manager, tokenizer, options, metrics
        self.prefill: PrefillMode = prefill
        self.codec = codec
        self.vocab_size = config.vocab_size
        self.eos_id = config.eos_token_id
        self.max_context = min(options.max_context or config.max_position_embeddings, config.max_position_embeddings, manager.capacity_tokens)
        self.sampler = Sampler(config.vocab_size, frozenset({config.eos_token_id}))
        batcher = Batcher(manager.layout.window, options.encoder_tokens, options.decoder_tokens)
        self.scheduler = Scheduler(manager, batcher, options, save=runner.save, restore=runner.restore)
        self.sink: Callable[[list[OutputEvent]], None] = lambda events: None
        self._sequences: dict[str, Sequence] = {}
        self._inbox: list[Sequence] = []
        self._aborts: list[str] = []
        self._refuse: ForebayError | None = None
        self._ending: ForebayError | None = None
        self._lock = threading.Lock()
        self._order = 0
        self._evictions = 0
        self.wake = threading.Event()
        metrics.pool_bytes(runner.blocks.data.nbytes, runner.windows.data.nbytes + runner.windows.pending.nbytes)
        self._report_pools()

    # Called from any thread

    def submit(self, request: Request) -> Sequence:
        """Queue a request; its sequence changes with every step and is for reading only.

        Raises:
            RequestError: it can never run (too long, ids outside the vocabulary).
            QueueFullError: too many wait already.
        """
        sequence = self._sequence(request)
        with self._lock:
            waiting = self.queued
            if waiting >= self.options.max_queued_requests:
                self.metrics.request_rejected("queue_full")
                raise QueueFullError(f"{waiting} requests are waiting, the limit is {self.options.max_queued_requests} (max_queued_requests)")
            sequence.order = self._order
            self._order += 1
            self._inbox.append(sequence)
        self.metrics.request_queued()
        self.wake.set()
        return sequence

    @property
    def queued(self) -> int:
        """Requests that wait for admission."""
        return len(self._inbox) + len(self.scheduler.waiting)

    def check_ids(self, ids: SequenceOf[int], name: str) -> None:
        """Raise RequestError unless there are ids and all of them are in the vocabulary."""
        if not ids:
            raise RequestError(f"{name} has no tokens", param=name)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(f"{name} holds token id {low if low < 0 else high}, outside the vocabulary of {self.vocab_size}", param=name)

    def refuse_waiting(self, failure: ForebayError) -> None:
        """Before the next step, end every request that has not started with an error."""
        with self._lock:
            self._refuse = failure
        self.wake.set()

    def end_all(self, failure: ForebayError) -> None:
        """Before the next step, end every request with an error."""
        with self._lock:
            self._ending = failure
        self.wake.set()

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step; unknown ids are ignored."""
        with self._lock:
            self._aborts.append(request_id)
        self.wake.set()

    def _sequence(self, request: Request) -> Sequence:
        params, prompt = request.params, request.prompt_ids
        self.check_ids(prompt, "prompt")
        if len(prompt) >= self.max_context:
            self.metrics.request_rejected("context_length")
            raise RequestError(
                f"This model's maximum context length is {self.max_context} tokens. However, your prompt has {len(prompt)} tokens.",
                param="messages" if request.prompt else "prompt",
                code="context_length_exceeded",
            )
        self.sampler.check(params)
        room = self.max_context - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        parser = self.codec.parser(request.prompt) if request.prompt is not None and self.codec is not None else None
        own = frozenset(self.tokenizer.stop_ids if parser is not None else {self.eos_id})
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else own)
        output = OutputProcessor(self.tokenizer, params.stop, stops, parser=parser, include_stop=params.include_stop)
        mode: PrefillMode = "exact" if params.prompt_logprobs is not None else request.prefill or self.prefill
        cache = self.manager.sequence(request.salt)
        return Sequence(request, cache, SamplingState(params, prompt, params.seed), output, mode, limit, 0)

    @property
    def busy(self) -> bool:
        """Whether a step could have something to do."""
        return bool(self._inbox or self._aborts or self._ending or self.scheduler.waiting or self.scheduler.running)

    # Called from the stepping thread

    def step(self) -> StepReport:
        """Take in what arrived, run one step, report what it gave."""
        began = time.perf_counter()
        events = self._take_in()
        scheduler = self.scheduler
        rows = scheduler.schedule()
        now = time.monotonic()
        for sequence in scheduler.started:
            self.metrics.request_started(now - sequence.request.arrived)
            if sequence.tiers and sequence.tiers.replayed:
                self.metrics.replayed(sequence.tiers.replayed)
        for _ in scheduler.preempted:
            self.metrics.preempted()
        for sequence in scheduler.expired:
            self.metrics.request_rejected("queue_wait")
            late = UnavailableError(f"the request waited longer than {self.options.max_queue_wait_s:g} s for a free place", code="queue_timeout")
            events.append(self._end(sequence, "error", [], error=late))
        for sequence in scheduler.too_long:
            events.append(self._end(sequence, "length", sequence.output.finish("length")))
        generated = 0
        try:
            if rows:
                generated = self._run(rows, events)
        except Exception as error:
            events += self._fail(rows, error)
            raise
        finally:
            self._report_pools()
            if events:
                self.sink(events)
        decode = sum(1 for row in rows if row.stop - row.start == 1 and row.start >= row.sequence.prompt_tokens)
        seconds = time.perf_counter() - began
        if rows:
            tokens = sum(row.stop - row.start for row in rows)
            stage = "decode" if decode == len(rows) else "prefill" if decode == 0 else "mixed"
            self.metrics.step(seconds, stage, tokens - decode, decode, tokens, generated)
        return StepReport(seconds, len(rows), decode, generated)

    def _take_in(self) -> list[OutputEvent]:
        with self._lock:
            arrived, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
            refuse, self._refuse = self._refuse, None
            ending, self._ending = self._ending, None
        for sequence in arrived:
            self._sequences[sequence.id] = sequence
            self.scheduler.add(sequence)
        events = []
        for request_id in aborts:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self.metrics.aborted()
                events.append(self._end(sequence, "abort", sequence.output.finish("abort")))
        for sequence in list(self._sequences.values()):
            failure = ending or (refuse if sequence.times.scheduled is None else None)
            if failure is not None:
                events.append(self._end(sequence, "error", sequence.output.finish("error"), error=failure))
        return events

    def _run(self, rows: list[Row], events: list[OutputEvent]) -> int:
        """Run the rows, sample where a token is due; returns the number of tokens accepted."""
        logits, everything = self.runner.run(rows)
        for row, scores in zip(rows, everything, strict=True):
            sequence = row.sequence
            sequence.computed = row.stop
            self.manager.commit(sequence.cache, sequence.tokens, row.stop)
            if scores is not None:
                self._score_prompt(row, scores)
        due = [row.sequence for row in rows if row.wants_logits]
        tokens, logprobs = self._sample(logits, due, events)
        now = time.monotonic()
        gaps = []
        for sequence, token, logprob in zip(due, tokens, logprobs, strict=True):
            if token < 0:
                continue
            times = sequence.times
            if times.first_token is None:
                times.first_token = now
                self.metrics.first_token(now - times.arrived)
            else:
                gaps.append(now - (times.last_token or now))
            times.last_token = now
            events.append(self._accept(sequence, token, logprob))
        self.metrics.inter_token(gaps)
        return sum(token >= 0 for token in tokens)

    def _sample(self, logits: Tensor, due: list[Sequence], events: list[OutputEvent]) -> tuple[list[int], list[TokenLogprob | None]]:
        """Tokens of the sequences, -1 for one whose logits are not finite: it fails alone."""
        try:
            result = self.sampler.sample(logits, [s.sampling for s in due])
            return result.token_ids, result.logprobs
        except NonFiniteLogitsError as error:
            bad = set(error.rows)
        good = [i for i in range(len(due)) if i not in bad]
        result = self.sampler.sample(logits[good], [due[i].sampling for i in good])
        tokens, logprobs = [-1] * len(due), [None] * len(due)  # type: tuple[list[int], list[TokenLogprob | None]]
        for i, token, logprob in zip(good, result.token_ids, result.logprobs, strict=True):
            tokens[i], logprobs[i] = token, logprob
        for i in bad:
            failure = EngineError("the model produced numbers that are not finite for this request", code="nonfinite_logits")
            self.metrics.error("nonfinite_logits")
            events.append(self._end(due[i], "error", [], error=failure, keep=False))
        return tokens, logprobs

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> OutputEvent:
        """Append one sampled token; ends the sequence when it is due."""
        sequence.tokens.append(token)
        sequence.sampling.observe(token)
        deltas = sequence.output.push(token)
        chosen = [logprob] if logprob is not None else None
        reason: FinishReason | None = sequence.output.finish_reason
        if reason is None and sequence.generated >= sequence.limit:
            deltas += sequence.output.finish("length")
            reason = sequence.output.finish_reason
        if reason is not None:
            return self._end(sequence, reason, deltas, [token], chosen)
        return OutputEvent(sequence.id, deltas, [token], chosen, preemptions=sequence.preemptions)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        deltas: list[Delta],
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        error: ForebayError | None = None,
        keep: bool = True,
    ) -> OutputEvent:
        """Take a sequence out of the engine and describe its end."""
        if not keep:
            self.manager.release(sequence.cache, keep=False)
        slot, table = sequence.cache.slot, list(sequence.cache.table) if self.options.poison else []
        self.scheduler.remove(sequence)
        if self.options.poison:
            self._poison(slot, table)
        self._sequences.pop(sequence.id, None)
        sequence.times.finished = time.monotonic()
        usage = sequence.usage()
        self.metrics.request_finished(reason, usage, sequence.tiers, sequence.times.finished - sequence.times.arrived)
        return OutputEvent(
            sequence.id,
            deltas,
            tokens or [],
            logprobs,
            finish_reason=reason,
            matched_stop=sequence.output.matched_stop,
            usage=usage,
            tiers=sequence.tiers,
            times=sequence.times,
            preemptions=sequence.preemptions,
            error=error,
        )

    def _score_prompt(self, row: Row, scores: Tensor) -> None:
        sequence = row.sequence
        following = sequence.tokens[row.start + 1 : min(row.stop + 1, sequence.prompt_tokens)]
        found = prompt_logprobs(scores[: len(following)], following, sequence.request.params.prompt_logprobs or 0)
        # A recompute after preemption scores again what is known already.
        sequence.prompt_logprobs[row.start + 1 : row.start + 1 + len(following)] = found

    def _fail(self, rows: list[Row], error: Exception) -> list[OutputEvent]:
        """A step broke: its requests end with an error, nothing they wrote stays cached, the others go on."""
        kind = error.kind if isinstance(error, ForebayError) else "step_failed"
        self.metrics.error(kind)
        failure = error if isinstance(error, ForebayError) else EngineError("the engine failed while it computed this request", code=kind)
        return [self._end(row.sequence, "error", [], error=failure, keep=False) for row in rows if row.sequence.id in self._sequences]

    def fail_all(self, failure: ForebayError) -> None:
        """End every request, running, waiting or just submitted, with an error."""
        with self._lock:
            self._ending = failure
        events = self._take_in()
        if events:
            self.sink(events)

    def _poison(self, slot: int, table: list[int]) -> None:
        if slot:
            self.runner.windows.poison(slot)
        self.runner.blocks.poison([block for block in table if self.runner.blocks.references(block) == 0])

    def _report_pools(self) -> None:
        stats = self.manager.stats()
        self.metrics.pools(stats.free, stats.used, stats.cached, stats.total, stats.windows_used, stats.windows_total)
        self.metrics.evicted(stats.evictions - self._evictions)
        self._evictions = stats.evictions
        self.metrics.running(len(self.scheduler.running))
        self.metrics.waiting(len(self.scheduler.waiting) + len(self._inbox))
