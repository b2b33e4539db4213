"""Choosing the next token of every row of a batch, so that a row's choice never depends on the rest of the batch.

How one row is decided, in this order:

1. Penalties on the model's logits l, over the ids seen so far (a sparse set, at most one entry per distinct id):
   repetition r over prompt and output: l / r if l > 0, else l * r; then frequency and presence over the output:
   l - frequency * count - presence * [count > 0].
2. `logit_bias` is added. -100 bans the id outright; every other value is only a sum. An id that would complete one of the `bad_words`
   (engine/bad_words.py) is banned too.
3. While fewer than `min_tokens` tokens are generated, end-of-sequence ids (unless `ignore_eos`) and `stop_token_ids` are excluded.
   Stop strings are not the sampler's business.
4. `allowed_token_ids` excludes everything else, and so does a constraint (engine/constraint.py). Where bans or step 3 would leave
   nothing, they give way, where they leave nothing that a constraint allows, all of steps 1 to 4 but the constraint do: a row always has
   a token.
5. Greedy rows (temperature below 1e-5, `top_p` 0 or `top_k` 1) take the largest value, the lowest id among equals.
6. Other rows: l / temperature; `min_p` keeps p >= min_p * max p; `top_k` keeps the k best of those; `top_p` keeps the smallest set of the
   best of those whose mass, after renormalising, reaches top_p. Ties go to the lower id. One draw from what is left.

Reported log-probabilities belong to the model, not to the settings: log-softmax of the logits before step 1.

Why the batch cannot matter. Every operation is elementwise, a per-row maximum, a row-wise softmax kernel, or a sum of whole numbers:
probabilities are cut to multiples of 2**-50, so their fp64 sums are exact in whatever order a kernel adds them. Randomness is a hash of
(seed, index of the token, index of the draw), not a stream that other rows advance.

Why there is no sort. A token x belongs to the nucleus if and only if the tokens that precede it (larger, or equal with a lower id) hold
less than top_p. So: draw from all, look at the mass that precedes the token, accept or draw again from the preceding tokens only. The
accepted token has the nucleus distribution exactly; the expected number of draws is 1 / top_p at first and falls with every retry.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.engine.bad_words import MAX_TOKENS
from forebay.engine.draws import BLOCK, draw_rows
from forebay.engine.logit_edits import constrain, edit
from forebay.engine.logit_rows import NonFiniteLogitsError, argmax, pick_rows, require_finite, tile_rows
from forebay.engine.sampling_state import SamplingState
from forebay.engine.token_logprobs import LOGPROB_FLOOR, logprobs_of, prompt_logprobs
from forebay.engine.types import EngineError, SamplingParams, TokenLogprob
from forebay.model.errors import RequestError

__all__ = ["LOGPROB_FLOOR", "NonFiniteLogitsError", "SampleResult", "Sampler", "SamplingState", "prompt_logprobs"]


@dataclass(frozen=True)
class SampleResult:
    """One token per row; `logprobs[i]` is None where the request asked for none."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Samples one token per row of logits.

    `vocab_size` is the width of the logits; `eos_ids` are the ids that `min_tokens` holds back. Keeps no state of its own.
    """

    def __init__(self, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._padded = -(-vocab_size // BLOCK) * BLOCK

    def check(self, params: SamplingParams) -> None:
        """Refuse, before a request is queued, ids that this vocabulary does not have. Raises RequestError naming the field."""
        fields = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [i for word in params.bad_words for i in word],
        }
        for name, ids in fields.items():
            for i in ids:
                if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.vocab_size:
                    raise RequestError(f"{name} must hold token ids from 0 to {self.vocab_size - 1}, got {i!r}", param=name)
        if len(fields["bad_words"]) > MAX_TOKENS:
            raise RequestError(f"bad_words may have {MAX_TOKENS} tokens together, got {len(fields['bad_words'])}", param="bad_words")
        if params.allowed_token_ids is not None and not params.allowed_token_ids:
            raise RequestError("allowed_token_ids must name at least one token", param="allowed_token_ids")

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SampleResult:
        """Choose a token for every row. Changes neither `logits` nor `states`: the caller calls `observe` with what it accepts.

        logits: [rows, vocab_size] fp32, any device; row i belongs to states[i].
        Raises NonFiniteLogitsError (with `.rows`) if a row holds NaN or infinity.
        """
        if logits.shape != (len(states), self.vocab_size) or logits.dtype != torch.float32:
            raise EngineError(f"logits must be fp32 [{len(states)}, {self.vocab_size}], got {logits.dtype} {list(logits.shape)}")
        if not states:
            return SampleResult([], [])
        require_finite(logits)
        for state in states:
            if state.bound is not self:
                state.bind(self, logits.device)
        plain = [i for i, s in enumerate(states) if s.greedy and not s.edited()]
        chosen = [0] * len(states)
        for i, token in zip(plain, argmax(pick_rows(logits, plain)), strict=True):
            chosen[i] = token
        skip = frozenset(plain)
        rest = [i for i in range(len(states)) if i not in skip]
        tile = tile_rows(logits)
        for start in range(0, len(rest), tile):
            part = rest[start : start + tile]
            # Greedy rows are last, so that the rows to draw are one slice.
            part.sort(key=lambda i: states[i].greedy)
            for i, token in zip(part, self._tile(pick_rows(logits, part), [states[i] for i in part]), strict=True):
                chosen[i] = token
        logprobs: list[TokenLogprob | None] = [None] * len(states)
        asked = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        for start in range(0, len(asked), tile):
            part = asked[start : start + tile]
            found = logprobs_of(pick_rows(logits, part), [chosen[i] for i in part], [states[i].params.logprobs or 0 for i in part])
            for i, entry in zip(part, found, strict=True):
                logprobs[i] = entry
        return SampleResult(chosen, logprobs)

    def _tile(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
        """Tokens of rows that need more than an argmax; greedy rows come last. logits: [rows, vocab] fp32."""
        x = torch.nn.functional.pad(logits, (0, self._padded - self.vocab_size), value=-math.inf)
        x = x.clone(memory_format=torch.contiguous_format) if x.data_ptr() == logits.data_ptr() else x.contiguous()
        edit(x, states)
        constrain(x, logits, states)
        drawn = sum(not s.greedy for s in states)
        tokens = draw_rows(x[:drawn], states[:drawn]) if drawn else []
        return tokens + argmax(x[drawn:])
