"""Which sequences of a step get a token, and which token: masks, samples, and the scores of prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.engine.batcher import Row
from forebay.engine.constraint import MaskWorker
from forebay.engine.metrics import Metrics
from forebay.engine.runner import Runner
from forebay.engine.sampler import NonFiniteLogitsError, Sampler, prompt_logprobs
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Sequence
from forebay.engine.types import TokenLogprob
from forebay.model.errors import RequestError

SCORED_ROWS = 64  # prompt positions whose logits exist at once when a prompt is scored


class Chooser:
    """Chooses tokens; accepts none.

    Attributes:
        masks: computes what grammars allow.
        late: sequences whose mask was not ready, by id, with the logits that wait for it.
    """

    def __init__(self, runner: Runner, sampler: Sampler, scheduler: Scheduler, metrics: Metrics) -> None:
        self.runner, self.sampler, self.scheduler = runner, sampler, scheduler
        self.masks = MaskWorker(metrics=metrics.grammars)
        self.late: dict[str, tuple[Sequence, Tensor]] = {}

    def ready(self, due: list[Sequence], logits: Tensor) -> tuple[list[Sequence], Tensor]:
        """Who gets a token now, with logits: those that are due unless their masks are late, and those of earlier steps whose masks came.

        logits: [due, vocab] fp32.
        """
        for sequence in due:
            self.late.pop(sequence.id, None)  # computed again after a preemption
        back = [(s, row) for s, row in self.late.values() if self._may_go_on(s)]
        held = [s.sampling.constraint for s in due if s.sampling.constraint is not None]
        late = self.masks.finish(held, [s.sampling.constraint for s, _ in back if s.sampling.constraint is not None])
        if not late and not back:
            return due, logits
        ready = [i for i, s in enumerate(due) if id(s.sampling.constraint) not in late]
        came = [(s, row) for s, row in back if id(s.sampling.constraint) not in late]
        for i, sequence in enumerate(due):
            if id(sequence.sampling.constraint) in late:
                self.late[sequence.id] = (sequence, logits[i].clone())
        for sequence, _ in came:
            del self.late[sequence.id]
        rows = [logits[ready]] if ready or not came else []
        return [*(due[i] for i in ready), *(s for s, _ in came)], torch.cat([*rows, *(row[None] for _, row in came)])

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether a late one is where a token can be added: it has its place with all its tokens computed, or is to get a first one."""
        if sequence in self.scheduler.running:
            return sequence.remaining == 0
        return sequence not in self.scheduler.waiting

    def sample(self, logits: Tensor, due: list[Sequence]) -> list[tuple[int, TokenLogprob | None] | None]:
        """Token and log-probability of every sequence, None where its logits are not finite or its grammar failed: it fails alone."""
        good = [i for i, s in enumerate(due) if self.ungrammatical(s) is None]
        try:
            result = self.sampler.sample(logits if len(good) == len(due) else logits[good], [due[i].sampling for i in good])
        except NonFiniteLogitsError as error:
            good = [i for place, i in enumerate(good) if place not in error.rows]
            result = self.sampler.sample(logits[good], [due[i].sampling for i in good])
        found: list[tuple[int, TokenLogprob | None] | None] = [None] * len(due)
        for i, token, logprob in zip(good, result.token_ids, result.logprobs, strict=True):
            found[i] = (token, logprob)
        return found

    def ungrammatical(self, sequence: Sequence) -> RequestError | None:
        """Why the form that its answer is held to cannot be followed further, None if it can. It is the form that is to blame."""
        constraint, grammar = sequence.sampling.constraint, sequence.request.grammar
        if constraint is None or not constraint.error:
            return None
        param = grammar.spec.param if grammar is not None else "thinking_token_budget"
        return RequestError(f"{param} asks for a form that cannot be followed: {constraint.error}", param=param, code="grammar_failed")

    def score_prompt(self, row: Row, hidden: Tensor) -> bool:
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
