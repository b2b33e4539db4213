"""Choosing tokens without the host: what a step needs to feed the next one before anybody has seen its tokens.

The same choices as engine/sampler.py, token for token, for rows whose logits no setting changes: the same draws, the same order of ids,
but nothing here waits for a device. Where the number of draws cannot be known in advance, as many are made as almost always suffice; the
rest is made by `wait`, which then says that the token on the device was not the one.
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

from forebay.engine.draws import BLOCK, UNIT, draw
from forebay.engine.sampling_state import SamplingState

ROUNDS = 7  # the most draws after the first within one launch; with the first they use up one hash of `SamplingState.uniform`
LATE = 0.02  # launches of which a row may be left to `wait`: a round is some twenty kernels, such a row costs it a step


def draws_ahead(states: Sequence[SamplingState], indices: Sequence[int]) -> np.ndarray:
    """The first eight uniforms of token `indices[i]` of each state, [rows, 8] fp64: what `SamplingState.uniform(0..7)` gives then."""
    digests = [
        hashlib.blake2b(struct.pack("<QQQ", s.seed & (2**64 - 1), i, 0), person=b"forebay-draw").digest()
        for s, i in zip(states, indices, strict=True)
    ]
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 8) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def rounds(top_p: Sequence[float]) -> int:
    """Draws after the first that leave, on average, `LATE` of these rows unsettled, `ROUNDS` at most.

    A draw is uniform below the one that was rejected before it, in the order of the ids, so a row's number of rejections is a Poisson
    one of mean -ln top_p, or less where ids have much of the mass; `r` draws settle rows of fewer than `r` rejections.
    """
    means = np.array([-math.log(p) for p in top_p if 0 < p < 1])
    term, tail, needed = np.exp(-means), 1 - np.exp(-means), 1
    while needed < ROUNDS and tail.sum() > LATE:
        term = term * means / needed
        tail, needed = tail - term, needed + 1
    return min(needed, ROUNDS)


@dataclass
class _Rest:
    """What rows whose draws were not settled are finished from: order and mass [rows, padded vocab], bound and tokens [rows], and the
    draws that were made."""

    rows: list[int]
    states: list[SamplingState]
    indices: list[int]
    order: Tensor
    mass: Tensor
    bound: Tensor
    tokens: Tensor
    drawn: int


class Sampled:
    """Tokens of a step that was launched.

    Attributes:
        tokens: [rows] int64 on the device of the logits, what the next step is fed with.
    """

    def __init__(self, tokens: Tensor, finite: Tensor, settled: Tensor | None, rest: _Rest | None) -> None:
        """finite: [rows] bool. settled: the same, None where all are."""
        self.tokens, self._rest = tokens, rest
        told = tokens if settled is None else torch.where(settled, tokens, -2 - tokens)
        told = torch.where(finite, told, -1)
        self._event: torch.cuda.Event | None = None
        if told.is_cuda:
            self._host = torch.empty(told.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(told, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = told

    def wait(self) -> tuple[list[int | None], set[int]]:
        """The token of every row, None where its logits are not finite, and the rows whose token is not that of `tokens`."""
        if self._event is not None:
            self._event.synchronize()
        told = self._host.tolist()
        found: list[int | None] = [None if t == -1 else t for t in told]
        changed: set[int] = set()
        if self._rest is not None:
            for place, row in enumerate(self._rest.rows):
                if told[row] < -1:
                    found[row] = _finish(self._rest, place)
                    changed.add(row)
        return found, changed


def launch(logits: Tensor, states: Sequence[SamplingState], indices: Sequence[int]) -> Sampled:
    """Choose a token for every row without waiting for anything.

    logits: [rows, vocab] fp32; row i is token `indices[i]` (from 0) of the output of states[i], none of which edits its logits. They are
        read by what is started here and kept by nothing, so they may be overwritten by whatever is started on this stream afterwards.
    """
    low, high = torch.aminmax(logits, dim=-1)
    finite = (high - low) < math.inf  # of a NaN too: it is in both
    rows = [i for i, s in enumerate(states) if not s.greedy]
    if not rows:
        return Sampled(_best(logits), finite, None, None)
    if len(rows) == len(states):
        chosen, done, rest = _draw_rows(logits, rows, list(states), list(indices))
        return Sampled(chosen, finite, done, rest)
    where = _up(np.asarray(rows), logits.device)
    chosen, done, rest = _draw_rows(logits.index_select(0, where), rows, [states[i] for i in rows], [indices[i] for i in rows])
    settled = None if done is None else torch.ones_like(finite).index_copy(0, where, done)
    return Sampled(_best(logits).index_copy(0, where, chosen), finite, settled, rest)


def _best(logits: Tensor) -> Tensor:
    """The best id of each row, the lowest among equals."""
    return logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.numpy().argmax(-1))  # numpy's is vectorised


def _draw_rows(
    logits: Tensor, rows: list[int], states: list[SamplingState], indices: list[int]
) -> tuple[Tensor, Tensor | None, _Rest | None]:
    """Tokens [rows] int64, whether each is final [rows] bool (None: all are), and what the others are finished from.

    logits: [rows, vocab] fp32.
    """
    params = [s.params for s in states]
    below = [p.temperature * math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    table = np.column_stack([[p.temperature for p in params], below, [p.top_p for p in params], draws_ahead(states, indices)])
    given = _up(table, logits.device)
    vocab = logits.shape[1]
    x = torch.nn.functional.pad(logits, (0, -(-vocab // BLOCK) * BLOCK - vocab), value=-math.inf)
    cut = any(p.min_p > 0 or 0 < p.top_k < x.shape[1] for p in params)
    if cut and x.data_ptr() == logits.data_ptr():
        x = x.clone()
    best = x.amax(-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        x.masked_fill_(x < (best.double() + given[:, 1:2]).float(), -math.inf)
    _keep_top_k(x, [p.top_k for p in params])
    mass = (x - best).div_(given[:, :1].float()).softmax(-1).mul_(UNIT).floor_()
    tokens, total = draw(mass, given[:, 3:4])
    if all(p.top_p >= 1.0 for p in params):
        return tokens.clamp_(max=vocab - 1), None, None  # numbers that are not finite give any id, and the next step is fed with it
    order, draws = _order(x), rounds([p.top_p for p in params])
    bound = torch.where(given[:, 2] < 1.0, (total * given[:, 2:3])[:, 0], math.inf)
    settled = torch.zeros_like(tokens, dtype=torch.bool)
    for number in range(1, draws + 1):
        # A settled row goes through the same motions; its token stays.
        mass = mass * (order > order.gather(1, tokens[:, None]))
        redrawn, before = draw(mass, given[:, 3 + number : 4 + number])
        settled = settled | (before[:, 0] < bound)
        tokens = torch.where(settled, tokens, redrawn)
    return tokens.clamp(max=vocab - 1), settled, _Rest(rows, states, indices, order, mass, bound, tokens, draws)


def _finish(rest: _Rest, place: int) -> int:
    """Go on drawing for one row until a draw is final."""
    order, mass, tokens = (t[place : place + 1] for t in (rest.order, rest.mass, rest.tokens))
    state, number = rest.states[place], rest.drawn
    while True:
        number += 1
        mass = mass * (order > order.gather(1, tokens[:, None]))
        u = torch.tensor([[state.uniform_of(rest.indices[place], number)]], dtype=torch.float64, device=order.device)
        redrawn, before = draw(mass, u)
        if bool(before[0, 0] < rest.bound[place]):
            return int(tokens[0])
        tokens = redrawn


def _order(x: Tensor) -> Tensor:
    """Whole numbers in the order of preference: a better id has a larger one, and so has the lower id among equals.

    x: [rows, ids] fp32, no NaN -> int64.
    """
    bits = (x + 0.0).view(torch.int32)  # of -0.0 those of 0.0, as both are equal
    ascending = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return (ascending.long() << 31) - torch.arange(x.shape[1], device=x.device)


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
