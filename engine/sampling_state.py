"""What the choice of a sequence's next token depends on, beside its logits."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.engine.bad_words import BadWords
from forebay.engine.constraint import Allowed, Constraint
from forebay.engine.types import SamplingParams

if TYPE_CHECKING:
    from forebay.engine.sampler import Sampler

GREEDY_BELOW = 1e-5

_BAN = -100.0
_DRAWS_PER_HASH = 8


class SamplingState:
    """What the choice of a sequence's next token depends on: its parameters, its seed, its constraint and the tokens it has seen.

    It can be rebuilt anywhere from (params, prompt_ids, seed, a new constraint) and `observe` for each generated token; `seed` None draws
    a random one, so keep `state.seed` where a sequence may have to move.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], seed: int | None = None, constraint: Constraint | None = None
    ) -> None:
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little", signed=True)
        self.params = params
        self.constraint = constraint
        self.seed = seed
        self.generated = 0
        self.greedy = params.temperature < GREEDY_BELOW or params.top_p == 0.0 or params.top_k == 1
        self._counting = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0
        self._hashed: tuple[int, int, tuple[float, ...]] = (-1, -1, ())
        # The edit table: one entry per id whose logit changes. logit -> (logit / or * repeat) - minus.
        seen = np.unique(np.asarray(prompt_ids, dtype=np.int64)) if params.repetition_penalty != 1.0 else np.empty(0, np.int64)
        ids = np.concatenate([seen, np.setdiff1d(np.asarray(sorted(params.logit_bias), dtype=np.int64), seen)])
        self._bias = {int(i): v for i, v in params.logit_bias.items()}
        self.ids: npt.NDArray[np.int64] = ids
        self.repeat: npt.NDArray[np.float32] = np.ones(len(ids), np.float32)
        self.repeat[: len(seen)] = params.repetition_penalty
        self.minus: npt.NDArray[np.float32] = np.zeros(len(ids), np.float32)
        self._index()
        self._words = BadWords(params.bad_words) if params.bad_words else None
        self._counts: dict[int, int] = {}
        self.bound: Sampler | None = None
        self.stops: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.allowed: Tensor | None = None
        self._choice: Collection[int] = ()

    def observe(self, token_id: int) -> None:
        """Record that `token_id` is the next token of the output. Call it once per token, after `sample`."""
        self.generated += 1
        if self.constraint is not None:
            self.constraint.observe(token_id)
        if self._words is not None:
            self._words.observe(token_id)
        if not self._counting:
            return
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self.used
            if slot == len(self.ids):  # doubles, so that appending stays cheap over a long output
                grow = max(16, slot)
                self.ids = np.concatenate([self.ids, np.zeros(grow, np.int64)])
                self.repeat = np.concatenate([self.repeat, np.ones(grow, np.float32)])
                self.minus = np.concatenate([self.minus, np.zeros(grow, np.float32)])
            self.ids[slot] = token_id
            self.used += 1
        p = self.params
        self.repeat[slot] = p.repetition_penalty
        bias = self._bias.get(token_id, 0.0)
        self.minus[slot] = math.inf if token_id in self._banned else p.frequency_penalty * count + p.presence_penalty - bias

    def uniform(self, draw: int) -> float:
        """Number `draw` (0, 1, ...) of the uniforms in [0, 1) that belong to the next token: 53 bits of a keyed hash."""
        return self.uniform_of(self.generated, draw)

    def uniform_of(self, index: int, draw: int) -> float:
        """The same for token `index` (0, 1, ...) of the output."""
        block, offset = divmod(draw, _DRAWS_PER_HASH)
        if self._hashed[:2] != (index, block):
            key = struct.pack("<QQQ", self.seed & (2**64 - 1), index, block)
            words = struct.unpack("<8Q", hashlib.blake2b(key, person=b"forebay-draw").digest())
            self._hashed = (index, block, tuple((w >> 11) * 2.0**-53 for w in words))
        return self._hashed[2][offset]

    def _index(self) -> None:
        self.used = len(self.ids)
        self._slots = {int(i): n for n, i in enumerate(self.ids)}
        self._banned: frozenset[int] = frozenset()

    def bind(self, sampler: Sampler, device: torch.device) -> None:
        """Resolve what depends on the vocabulary. Ids outside it (image placeholders in a prompt) are dropped: they never index a row."""
        p, vocab = self.params, sampler.vocab_size
        keep = (self.ids[: self.used] >= 0) & (self.ids[: self.used] < vocab)
        self.ids = self.ids[: self.used][keep]
        self.repeat, self.minus = self.repeat[: self.used][keep], self.minus[: self.used][keep]
        self._index()
        self.stops, self.allowed = np.empty(0, np.int64), None
        stops = {i for i in (*p.stop_token_ids, *(() if p.ignore_eos else sampler.eos_ids)) if 0 <= i < vocab}
        banned = {i for i, v in self._bias.items() if v <= _BAN and 0 <= i < vocab}
        allowed = None if p.allowed_token_ids is None else {i for i in p.allowed_token_ids if 0 <= i < vocab}
        self._choice = allowed or range(vocab)
        if self._leaves_some(banned):
            self._banned = frozenset(banned)
        if self._leaves_some(stops | self._banned):
            self.stops = np.asarray(sorted(stops), np.int64)
        if allowed:
            self.allowed = torch.tensor(sorted(allowed), dtype=torch.int64, device=device)
        for token_id, bias in self._bias.items():
            if (slot := self._slots.get(token_id)) is not None:
                n = self._counts.get(token_id, 0)
                minus = p.frequency_penalty * n + (p.presence_penalty if n else 0.0) - bias
                self.minus[slot] = math.inf if token_id in self._banned else minus
        self.bound = sampler

    def _leaves_some(self, excluded: Collection[int]) -> bool:
        """Whether a token is left without these, which are in the vocabulary."""
        return any(i not in excluded for i in self._choice)

    def stopping(self) -> bool:
        """Whether end-of-sequence ids are still excluded."""
        return self.generated < self.params.min_tokens and len(self.stops) > 0

    def completing(self) -> list[int]:
        """Ids that would complete a bad word. Like other bans they give way where nothing would be left."""
        if self._words is None or self.bound is None or not self._words.now:
            return []
        ids = [i for i in self._words.now if i < self.bound.vocab_size]
        others = self._banned | (set(self.stops.tolist()) if self.stopping() else set())
        return ids if self._leaves_some(others | set(ids)) else []

    def constrained(self) -> Allowed | None:
        return self.constraint.allowed() if self.constraint is not None else None

    @property
    def foreseeable(self) -> bool:
        """Whether no choice from here on needs more than logits and parameters: no token seen on the host, no logits kept."""
        p = self.params
        free = self.constraint is None and self._words is None and not self._counting and not self._bias and p.allowed_token_ids is None
        return free and p.logprobs is None and self.generated >= p.min_tokens

    def edited(self) -> bool:
        return self.used > 0 or self.allowed is not None or self.stopping() or bool(self.completing()) or self.constrained() is not None
