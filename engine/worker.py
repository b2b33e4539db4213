"""The engine proper: schedule, run, sample, report. One thread calls `step`; others submit and abort through the inbox."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forebay.cache.manager import CacheManager, Policy
from forebay.engine.batcher import Batcher, Row
from forebay.engine.constraint import Constraint, MaskWorker
from forebay.engine.metrics import Metrics, Stage
from forebay.engine.options import EngineOptions
from forebay.engine.output import OutputProcessor
from forebay.engine.reservoir import Reservoir
from forebay.engine.runner import Runner
from forebay.engine.sampler import NonFiniteLogitsError, Sampler, SamplingState, prompt_logprobs
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Sequence
from forebay.engine.types import (
    EngineError,
    FinishReason,
    OutputEvent,
    PrefillMode,
    QueueFullError,
    QueueTimeoutError,
    Request,
    TokenLogprob,
    UnavailableError,
)
from forebay.model.chat import ChatCodec, Delta
from forebay.model.errors import ForebayError, RequestError
from forebay.model.tokenizer import Tokenizer

SCORED_ROWS = 64  # prompt positions whose logits exist at once when a prompt is scored
LONGEST_RETRY_S = 60.0

log = logging.getLogger("forebay.engine")


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
    ) -> None:
        config = runner.backbone.config
        self.runner, self.manager, self.tokenizer, self.options, self.metrics = runner, manager, tokenizer, options, metrics
        self.prefill: PrefillMode = prefill
        self.codec = codec
        self.vocab_size = config.vocab_size
        self.eos_id = config.eos_token_id
        longest = config.max_position_embeddings
        self.max_context = min(options.max_context or longest, longest, manager.capacity_tokens)
        self.sampler = Sampler(config.vocab_size, frozenset({config.eos_token_id}))
        self.reservoir = reservoir
        self.masks = MaskWorker(metrics=metrics.grammars)
        self._late: dict[str, tuple[Sequence, Tensor]] = {}  # those whose mask was not ready, with the logits that wait for it
        self.scheduler = Scheduler(
            manager,
            Batcher(options.encoder_tokens, options.decoder_tokens),
            options,
            save=runner.save,
            restore=runner.restore,
            restorer=reservoir.restorer if reservoir is not None else None,
            live=reservoir.live if reservoir is not None else None,
        )
        self.sink: Callable[[list[OutputEvent]], None] = lambda events: None
        self._sequences: dict[str, Sequence] = {}
        self._inbox: list[Sequence] = []
        self._aborts: list[str] = []
        self._leaders: dict[str, Sequence] = {}
        self._closed: ForebayError | None = None
        self._ending: ForebayError | None = None
        self._lock = threading.Lock()
        self._stepping = False
        self._order = 0
        self._evictions = 0
        self._accepted = 0
        self.wake = threading.Event()
        if reservoir is not None:
            reservoir.wake = self.wake.set
            metrics.attach(lambda: reservoir.refresh(metrics))
        metrics.pool_bytes(runner.blocks.data.nbytes, runner.windows.data.nbytes + runner.windows.pending.nbytes)
        self._report_pools()

    # Called from any thread

    def prepare(self, request: Request) -> Sequence:
        """Check a request and build its sequence, in time proportional to its prompt. Nothing is queued and nothing need be undone.

        Raises:
            RequestError: it can never run (too long, ids outside the vocabulary).
        """
        params, prompt = request.params, request.prompt_ids
        name = "messages" if request.prompt is not None else "prompt"
        self.check_ids(prompt, name)
        if len(prompt) >= self.max_context:
            self.metrics.request_rejected("context_length")
            room = " (what the KV pool of this server holds)" if self.max_context == self.manager.capacity_tokens else ""
            error = RequestError(
                f"This model's maximum context length is {self.max_context} tokens{room}. However, your prompt has {len(prompt)} tokens.",
                param=name,
                code="context_length_exceeded",
            )
            error.lengths = (len(prompt), self.max_context)
            raise error
        self.sampler.check(params)
        room_left = self.max_context - len(prompt)
        limit = room_left if params.max_tokens is None else min(room_left, params.max_tokens)
        parser = self.codec.parser(request.prompt) if request.prompt is not None and self.codec is not None else None
        own = frozenset(self.tokenizer.stop_ids if parser is not None else {self.eos_id})
        constraint = self._constraint(request)
        # An answer held to a form ends when it is complete, whatever else was asked for.
        endless = params.ignore_eos and not (constraint is not None and constraint.begins_at_once)
        stops = frozenset(params.stop_token_ids) | (frozenset() if endless else own)
        output = OutputProcessor(self.tokenizer, params.stop, stops, parser=parser, include_stop=params.include_stop)
        # `min_tokens` holds back every id that would end this choice, not only those the request names.
        chosen = replace(params, stop_token_ids=tuple(sorted(i for i in stops if i < self.vocab_size))) if params.min_tokens else params
        mode: PrefillMode = "exact" if params.prompt_logprobs is not None else request.prefill or self.prefill
        cache = self.manager.sequence(request.salt)
        if self.manager.prefix_reuse:
            cache.chain.extend(prompt)
        sampling = SamplingState(chosen, prompt, params.seed, constraint)
        return Sequence(request, cache, sampling, output, mode, limit, 0, self._policy(request, mode))

    def _constraint(self, request: Request) -> Constraint | None:
        """What holds the request's answer to a form, None if nothing does."""
        grammar, budget, params = request.grammar, request.reasoning_budget, request.params
        reasons = request.prompt is not None and request.prompt.initial_channel == "reasoning"
        if grammar is not None and grammar.spec.begins == "marker" and params.ignore_eos:
            grammar = None  # nothing may end the answer, so nothing can be complete
        if grammar is None and (budget is None or not reasons):
            return None
        calls = request.prompt is None or request.prompt.parse.tools
        return Constraint(self.tokenizer, grammar, reasoning=reasons, budget=budget, calls=calls)

    def _policy(self, request: Request, mode: PrefillMode) -> Policy:
        """What the request accepts from the cache: its own wishes before the engine's, and nothing approximate for an exact prefill."""
        most = request.max_lineage if request.max_lineage is not None else self.options.max_lineage
        replay = request.replay or self.options.replay
        if mode == "exact":
            return Policy("exact", "exact", 0)
        return Policy(mode, replay, 0 if replay == "exact" and most is None else most)

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

    def check_ids(self, ids: SequenceOf[int], name: str) -> None:
        """Raise RequestError unless there are ids and all of them are in the vocabulary."""
        if not ids:
            raise RequestError(f"{name} has no tokens", param=name)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(f"{name} holds token id {low if low < 0 else high}, outside the vocabulary of {self.vocab_size}", param=name)

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
            return bool(self._stepping or self._inbox or self._aborts or self._sequences)

    # Called from the stepping thread

    def step(self) -> StepReport:
        """Take in what arrived, run one step, report what it gave. An exception ends the requests of the step and is raised."""
        began = time.perf_counter()
        events: list[OutputEvent] = []
        rows: list[Row] = []
        accepted = self._accepted
        self._stepping = True
        try:
            self._take_in(events)
            if self.reservoir is not None:
                self.reservoir.repair()
            rows = self._schedule(events)
            if rows or self._late:
                self._run(rows, events)
        except Exception as error:
            self._fail(rows, error, events)
            raise
        finally:
            seconds, generated = time.perf_counter() - began, self._accepted - accepted
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
                self._sequences[sequence.id] = sequence
        for sequence in arrived:
            self._add(sequence)
        for request_id in aborts:
            if (known := self._sequences.get(request_id)) is not None:
                self.metrics.aborted()
                events.append(self._end(known, "abort", self._flush(known, "abort")))
        if refuse is None:
            return
        for sequence in list(self._sequences.values()):
            if ending is not None or sequence.times.scheduled is None:
                events.append(self._end(sequence, "error", self._flush(sequence, "error"), error=ending or refuse))

    def _add(self, sequence: Sequence) -> None:
        """Queue a sequence, or let it wait for the prefill of another choice of its prompt.

        One that takes less from the cache than the other does, or more, has its own prefill: their texts may differ.
        """
        share = sequence.request.share
        if share is None:
            self.scheduler.add(sequence)
            return
        leader = self._leaders.setdefault(share, sequence)
        if leader is sequence or leader.policy != sequence.policy:
            self.scheduler.add(sequence)
        else:
            sequence.leader = leader
            leader.followers.append(sequence)

    def _unlink(self, sequence: Sequence) -> None:
        """A choice ends: whoever waits for its prefill goes on without it."""
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
        followers, sequence.followers = sequence.followers, []
        share = sequence.request.share
        if share is not None and self._leaders.get(share) is sequence:
            del self._leaders[share]
        for follower in followers:
            follower.leader = None
            self._add(follower)

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
            events.append(self._end(sequence, "error", self._flush(sequence, "error"), error=late))
        for sequence in scheduler.too_long:
            events.append(self._end(sequence, "length", self._flush(sequence, "length")))
        return rows

    def _run(self, rows: list[Row], events: list[OutputEvent]) -> None:
        """Run the rows and sample where a token is due, or was in an earlier step whose masks were not ready."""
        logits, scored = self.runner.run(rows) if rows else (torch.empty((0, self.vocab_size)), [])
        broken: set[str] = set()
        for row, hidden in zip(rows, scored, strict=True):
            sequence = row.sequence
            sequence.computed = row.stop
            committed = self.manager.commit(sequence.cache, sequence.tokens, row.stop)
            if self.reservoir is not None:
                self.reservoir.store_blocks(sequence, committed)
                self.reservoir.keep_window(sequence, row.stop)
            if hidden is not None and not self._score_prompt(row, hidden):
                broken.add(sequence.id)
        reached, places = self._due(rows, broken)
        due, logits = self._settle(reached, logits if len(places) == logits.shape[0] else logits[places])
        found = self._sample(logits, due)
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
            event = self._accept(sequence, *choice)
            if sequence.scores_prompt and sequence.generated == 1:
                event.prompt_logprobs = sequence.prompt_logprobs
            events.append(event)
            if sequence.cache.plan is None and event.finish_reason is None:
                self.scheduler.add(sequence)  # a follower, which has its own place to find
        # While this step is reported and the next one computed.
        self.masks.start([s.sampling.constraint for s in due if s.sampling.constraint is not None and s.id in self._sequences])
        self.metrics.inter_token(gaps)
        for sequence in dict.fromkeys([*(row.sequence for row in rows), *reached, *due]):
            if sequence.id in broken:
                failure = self._ungrammatical(sequence) or EngineError(
                    "the model produced numbers that are not finite for this request", code="nonfinite_logits"
                )
                self.metrics.error(failure.code or failure.kind)
                deltas = self._flush(sequence, "error")
                events.append(self._end(sequence, "error", deltas, error=failure, keep=False))

    def _due(self, rows: list[Row], broken: set[str]) -> tuple[list[Sequence], list[int]]:
        """Sequences that get a token in this step, and the row of logits of each. Followers take their leader's and leave it."""
        due: list[Sequence] = []
        places: list[int] = []
        for place, leader in enumerate(row.sequence for row in rows if row.wants_logits):
            followers = list(leader.followers)
            share = leader.request.share
            if share is not None and self._leaders.get(share) is leader:
                del self._leaders[share]
                self.scheduler.fork(leader)
            due += [leader, *followers]
            places += [place] * (1 + len(followers))
            if leader.id in broken:
                broken.update(follower.id for follower in followers)
            for follower in followers:
                self.metrics.request_started(time.monotonic() - follower.request.arrived)
        return due, places

    def _settle(self, due: list[Sequence], logits: Tensor) -> tuple[list[Sequence], Tensor]:
        """Who gets a token now, with logits: those that are due unless their masks are late, and those of earlier steps whose masks came.

        logits: [due, vocab] fp32.
        """
        for sequence in due:
            self._late.pop(sequence.id, None)  # computed again after a preemption
        back = [(s, row) for s, row in self._late.values() if self._may_go_on(s)]
        held = [s.sampling.constraint for s in due if s.sampling.constraint is not None]
        late = self.masks.finish(held, [s.sampling.constraint for s, _ in back if s.sampling.constraint is not None])
        if not late and not back:
            return due, logits
        ready = [i for i, s in enumerate(due) if id(s.sampling.constraint) not in late]
        came = [(s, row) for s, row in back if id(s.sampling.constraint) not in late]
        for i, sequence in enumerate(due):
            if id(sequence.sampling.constraint) in late:
                self._late[sequence.id] = (sequence, logits[i].clone())
        for sequence, _ in came:
            del self._late[sequence.id]
        rows = [logits[ready]] if ready or not came else []
        return [*(due[i] for i in ready), *(s for s, _ in came)], torch.cat([*rows, *(row[None] for _, row in came)])

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether a late one is where a token can be added: it has its place with all its tokens computed, or is to get a first one."""
        if sequence in self.scheduler.running:
            return sequence.remaining == 0
        return sequence not in self.scheduler.waiting

    def _sample(self, logits: Tensor, due: list[Sequence]) -> list[tuple[int, TokenLogprob | None] | None]:
        """Token and log-probability of every sequence, None where its logits are not finite or its grammar failed: it fails alone."""
        good = [i for i, s in enumerate(due) if self._ungrammatical(s) is None]
        try:
            result = self.sampler.sample(logits if len(good) == len(due) else logits[good], [due[i].sampling for i in good])
        except NonFiniteLogitsError as error:
            good = [i for place, i in enumerate(good) if place not in error.rows]
            result = self.sampler.sample(logits[good], [due[i].sampling for i in good])
        found: list[tuple[int, TokenLogprob | None] | None] = [None] * len(due)
        for i, token, logprob in zip(good, result.token_ids, result.logprobs, strict=True):
            found[i] = (token, logprob)
        return found

    def _ungrammatical(self, sequence: Sequence) -> RequestError | None:
        """Why the form that its answer is held to cannot be followed further, None if it can. It is the form that is to blame."""
        constraint, grammar = sequence.sampling.constraint, sequence.request.grammar
        if constraint is None or not constraint.error:
            return None
        param = grammar.spec.param if grammar is not None else "thinking_token_budget"
        return RequestError(f"{param} asks for a form that cannot be followed: {constraint.error}", param=param, code="grammar_failed")

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> OutputEvent:
        """Append one sampled token; ends the sequence when it is due."""
        sequence.tokens.append(token)
        sequence.sampling.observe(token)
        self._accepted += 1
        chosen = [logprob] if logprob is not None else None
        try:
            deltas = sequence.output.push(token)
        except Exception as error:  # what a parser cannot read is its request's misfortune, not the batch's
            return self._end(sequence, "error", [], [token], chosen, error=self._unreadable(sequence, error))
        reason: FinishReason | None = sequence.output.finish_reason
        if reason is None and sequence.generated >= sequence.limit:
            deltas += self._flush(sequence, "length")
            reason = sequence.output.finish_reason or "length"
        if reason is not None:
            return self._end(sequence, reason, deltas, [token], chosen)
        tiers = sequence.tiers if sequence.generated == 1 else None  # where the prompt came from is known, and some protocols tell it first
        return OutputEvent(sequence.id, deltas, [token], chosen, tiers=tiers, preemptions=sequence.preemptions)

    def _flush(self, sequence: Sequence, reason: FinishReason) -> list[Delta]:
        """What the output still held back. A request ends whether or not its text can be finished."""
        try:
            return sequence.output.finish(reason)
        except Exception as error:
            self._unreadable(sequence, error)
            return []

    def _unreadable(self, sequence: Sequence, error: Exception) -> EngineError:
        log.error("the output of request %s cannot be read", sequence.id, exc_info=error)
        self.metrics.error("output_failed")
        return EngineError("the engine failed while it read the output of this request", code="output_failed")

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
        if self.reservoir is not None:
            self.reservoir.ended(sequence, trusted=keep)
        if not keep:
            self.manager.release(sequence.cache, keep=False)
        self._unlink(sequence)
        self._late.pop(sequence.id, None)
        self.scheduler.remove(sequence)
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

    def _score_prompt(self, row: Row, hidden: Tensor) -> bool:
        """Log-probabilities of the prompt tokens that follow the row's positions; False if its logits are not finite.

        hidden: [stop - start, D] bf16.
        """
        sequence, place = row.sequence, row.start + 1
        alternatives = sequence.request.params.prompt_logprobs or 0
        following = sequence.tokens[place : min(row.stop + 1, sequence.prompt_tokens)]
        for start in range(0, len(following), SCORED_ROWS):
            ids = following[start : start + SCORED_ROWS]
            try:
                found = prompt_logprobs(self.runner.logits(hidden[start : start + len(ids)]), ids, alternatives)
            except NonFiniteLogitsError:
                return False
            # A recompute after preemption scores again what is known already.
            sequence.prompt_logprobs[place + start : place + start + len(ids)] = found
        return True

    def _fail(self, rows: list[Row], error: Exception, events: list[OutputEvent]) -> None:
        """A step broke: its requests end with an error, nothing they wrote stays cached, the others go on."""
        kind = error.kind if isinstance(error, ForebayError) else "step_failed"
        self.metrics.error(kind)
        failure = error if isinstance(error, ForebayError) else EngineError("the engine failed while it computed this request", code=kind)
        for sequence in [*(row.sequence for row in rows), *(s for s, _ in self._late.values())]:
            if self._sequences.get(sequence.id) is sequence:
                events.append(self._end(sequence, "error", self._flush(sequence, "error"), error=failure, keep=False))

    def fail_all(self, failure: ForebayError) -> None:
        """Take no more requests and end every one, running, waiting or just submitted, with an error. Only while nothing steps."""
        self.end_all(failure)
        self.settle()

    def close(self) -> None:
        """Write what is queued for other tiers and stop them. Only while nothing steps."""
        self.masks.close()
        if self.reservoir is not None:
            self.reservoir.close()

    def _report_pools(self) -> None:
        stats = self.manager.stats()
        self.metrics.pools(stats.free, stats.used, stats.cached, stats.total, stats.windows_used, stats.windows_total)
        self.metrics.evicted(stats.evictions - self._evictions)
        self._evictions = stats.evictions
        self.metrics.running(len(self.scheduler.running))
        self.metrics.waiting(len(self.scheduler.waiting) + len(self._inbox))
