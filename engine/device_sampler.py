"""Choosing tokens without the host: what a step needs to feed the next one before anybody has seen its tokens.

The same choices as engine/sampler.py, token for token, for rows whose logits no setting changes: the same draws, the same order of ids,
but nothing here waits for a device. Where the number of draws cannot be known in advance, `ROUNDS` of them are made; the rest, which is
rare, is made by `wait`, which then says that the token on the device was not the one.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forebay.engine.draws import BLOCK, UNIT, _precedes, draw
from forebay.engine.sampling_state import SamplingState

ROUNDS = 7  # draws after the first within one launch; with the first they use up one hash of `SamplingState.uniform`


def draws_ahead(states: Sequence[SamplingState], indices: Sequence[int]) -> np.ndarray:
    """The first eight uniforms of token `indices[i]` of each state, [rows, 8] fp64: what `SamplingState.uniform(0..7)` gives then."""
    digests = [
        hashlib.blake2b(struct.pack("<QQQ", s.seed & (2**64 - 1), i, 0), person=b"forebay-draw").digest()
        for s, i in zip(states, indices, strict=True)
    ]
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 8) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


@dataclass
class _Rest:
    """What rows whose draws were not settled are finished from: x and mass [rows, padded vocab], bound and tokens [rows]."""

    rows: list[int]
    states: list[SamplingState]
    indices: list[int]
    x: Tensor
    mass: Tensor
    bound: Tensor
    tokens: Tensor


class Sampled:
    """Tokens of a step that was launched.

    Attributes:
        tokens: [rows] int64 on the device of the logits, what the next step is fed with.
    """

    def __init__(self, tokens: Tensor, finite: Tensor, settled: Tensor, rest: _Rest | None) -> None:
        """finite, settled: [rows] bool."""
        self.tokens, self._rest = tokens, rest
        packed = torch.stack((tokens, finite.long(), settled.long()))
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = packed

    def wait(self) -> tuple[list[int | None], set[int]]:
        """The token of every row, None where its logits are not finite, and the rows whose token is not that of `tokens`."""
        if self._event is not None:
            self._event.synchronize()
        tokens, finite, settled = self._host.tolist()
        found: list[int | None] = [t if good else None for t, good in zip(tokens, finite, strict=True)]
        changed: set[int] = set()
        if self._rest is not None:
            for place, row in enumerate(self._rest.rows):
                if finite[row] and not settled[row]:
                    found[row] = _finish(self._rest, place)
                    changed.add(row)
        return found, changed


def launch(logits: Tensor, states: Sequence[SamplingState], indices: Sequence[int]) -> Sampled:
    """Choose a token for every row without waiting for anything.

    logits: [rows, vocab] fp32; row i is token `indices[i]` (from 0) of the output of states[i], none of which edits its logits.
    """
    finite = logits.isfinite().all(-1)
    if logits.is_cuda:
        tokens = logits.argmax(-1)
    else:  # numpy's is vectorised
        tokens = torch.from_numpy(logits.numpy().argmax(-1))
    settled = torch.ones_like(finite)
    rows = [i for i, s in enumerate(states) if not s.greedy]
    if not rows:
        return Sampled(tokens, finite, settled, None)
    picked, numbers = [states[i] for i in rows], [indices[i] for i in rows]
    part = logits if len(rows) == len(states) else logits.index_select(0, _up(np.asarray(rows), logits.device))
    chosen, done, rest = _draw_rows(part, rows, picked, numbers)
    if len(rows) == len(states):
        return Sampled(chosen, finite, done, rest)
    where = _up(np.asarray(rows), logits.device)
    return Sampled(tokens.index_copy(0, where, chosen), finite, settled.index_copy(0, where, done), rest)


def _draw_rows(
    logits: Tensor, rows: list[int], states: list[SamplingState], indices: list[int]
) -> tuple[Tensor, Tensor, _Rest | None]:
    """Tokens [rows] int64, whether each is final [rows] bool, and what the others are finished from. logits: [rows, vocab] fp32."""
    params = [s.params for s in states]
    below = [p.temperature * math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    table = np.column_stack([[p.temperature for p in params], below, [p.top_p for p in params], draws_ahead(states, indices)])
    given = _up(table, logits.device)
    vocab = logits.shape[1]
    x = torch.nn.functional.pad(logits, (0, -(-vocab // BLOCK) * BLOCK - vocab), value=-math.inf)
    if x.data_ptr() == logits.data_ptr():
        x = x.clone()
    best = x.amax(-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        x.masked_fill_(x < (best.double() + given[:, 1:2]).float(), -math.inf)
    _keep_top_k(x, [p.top_k for p in params])
    mass = (x - best).div_(given[:, :1].float()).softmax(-1).mul_(UNIT).floor_()
    tokens, total = draw(mass, given[:, 3:4])
    if all(p.top_p >= 1.0 for p in params):
        return tokens, torch.ones_like(tokens, dtype=torch.bool), None
    bound = torch.where(given[:, 2] < 1.0, (total * given[:, 2:3])[:, 0], math.inf)
    settled = torch.zeros_like(tokens, dtype=torch.bool)
    for number in range(1, ROUNDS + 1):
        # A settled row goes through the same motions; its token stays.
        mass = mass * _precedes(x, tokens)
        redrawn, before = draw(mass, given[:, 3 + number : 4 + number])
        settled = settled | (before[:, 0] < bound)
        tokens = torch.where(settled, tokens, redrawn)
    return tokens, settled, _Rest(rows, states, indices, x, mass, bound, tokens)


def _finish(rest: _Rest, place: int) -> int:
    """Go on drawing for one row until a draw is final."""
    x, mass, tokens = (t[place : place + 1] for t in (rest.x, rest.mass, rest.tokens))
    state, number = rest.states[place], ROUNDS
    while True:
        number += 1
        mass = mass * _precedes(x, tokens)
        u = torch.tensor([[state.uniform_of(rest.indices[place], number)]], dtype=torch.float64, device=x.device)
        redrawn, before = draw(mass, u)
        if bool(before[0, 0] < rest.bound[place]):
            return int(tokens[0])
        tokens = redrawn


def _keep_top_k(x: Tensor, top_k: list[int]) -> None:
    """Set all but each row's k best to -inf, in place; 0 keeps all. Among equals the lower ids stay. x: [rows, padded vocab] fp32."""
    rows = [n for n, k in enumerate(top_k) if 0 < k < x.shape[1]]
    if not rows:
        return
    pick, ks = _up(np.asarray(rows), x.device), _up(np.asarray([top_k[n] for n in rows])[:, None], x.device)
    part = x.index_select(0, pick)
    floor = part.topk(max(top_k[n] for n in rows), dim=-1).values.gather(1, ks - 1)
    equal = part == floor
    kept = equal.cumsum(-1) <= ks - (part > floor).sum(-1, keepdim=True)
    part.masked_fill_((part < floor) | (equal & ~kept), -math.inf)
    x.index_copy_(0, pick, part)


def _up(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The numbers on the device, without waiting for what it does now."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
