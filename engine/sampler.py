"""Choosing the next token of every row of a batch, so that a row's choice never depends on the rest of the batch.

How one row is decided, in this order:

1. Penalties on the model's logits l, over the ids seen so far (a sparse set, at most one entry per distinct id):
   repetition r over prompt and output: l / r if l > 0, else l * r; then frequency and presence over the output:
   l - frequency * count - presence * [count > 0].
2. `logit_bias` is added. -100 bans the id outright; every other value is only a sum.
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

import hashlib
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.engine.constraint import Allowed, Constraint
from forebay.engine.types import EngineError, SamplingParams, TokenLogprob
from forebay.model.errors import RequestError

GREEDY_BELOW = 1e-5
LOGPROB_FLOOR = -9999.0
"""Smallest log-probability reported: JSON has no infinity, and this is the value OpenAI uses."""

_BAN = -100.0
_UNIT = 2.0**50  # probabilities are whole multiples of 1 / _UNIT: a row's total stays below 2**53, where fp64 adds exactly
_BLOCK = 64  # the draw first finds the block of this many ids, then the id in it; rows are padded to whole blocks
_TILE = {"cpu": 2**17, "cuda": 2**24}  # logits handled at once: what fits a core's cache, or bounds device memory
_LARGEST = 3.0e38
_DRAWS_PER_HASH = 8


class NonFiniteLogitsError(EngineError):
    """The network produced NaN or infinity. `rows` are the row numbers of that call; nothing was sampled and no state changed,
    so the caller fails those requests and calls again with the remaining rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"logits of row {', '.join(map(str, rows))} are not finite", code="nonfinite_logits")
        self.rows = tuple(rows)


@dataclass(frozen=True)
class SampleResult:
    """One token per row; `logprobs[i]` is None where the request asked for none."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


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
        self._ids: npt.NDArray[np.int64] = ids
        self._repeat: npt.NDArray[np.float32] = np.ones(len(ids), np.float32)
        self._repeat[: len(seen)] = params.repetition_penalty
        self._minus: npt.NDArray[np.float32] = np.zeros(len(ids), np.float32)
        self._index()
        self._counts: dict[int, int] = {}
        self._bound: Sampler | None = None
        self._stops: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._allowed: Tensor | None = None

    def observe(self, token_id: int) -> None:
        """Record that `token_id` is the next token of the output. Call it once per token, after `sample`."""
        self.generated += 1
        if self.constraint is not None:
            self.constraint.observe(token_id)
        if not self._counting:
            return
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._used
            if slot == len(self._ids):  # doubles, so that appending stays cheap over a long output
                grow = max(16, slot)
                self._ids = np.concatenate([self._ids, np.zeros(grow, np.int64)])
                self._repeat = np.concatenate([self._repeat, np.ones(grow, np.float32)])
                self._minus = np.concatenate([self._minus, np.zeros(grow, np.float32)])
            self._ids[slot] = token_id
            self._used += 1
        p = self.params
        self._repeat[slot] = p.repetition_penalty
        bias = self._bias.get(token_id, 0.0)
        self._minus[slot] = math.inf if token_id in self._banned else p.frequency_penalty * count + p.presence_penalty - bias

    def uniform(self, draw: int) -> float:
        """Number `draw` (0, 1, ...) of the uniforms in [0, 1) that belong to the next token: 53 bits of a keyed hash."""
        block, offset = divmod(draw, _DRAWS_PER_HASH)
        if self._hashed[:2] != (self.generated, block):
            key = struct.pack("<QQQ", self.seed & (2**64 - 1), self.generated, block)
            words = struct.unpack("<8Q", hashlib.blake2b(key, person=b"forebay-draw").digest())
            self._hashed = (self.generated, block, tuple((w >> 11) * 2.0**-53 for w in words))
        return self._hashed[2][offset]

    def _index(self) -> None:
        self._used = len(self._ids)
        self._slots = {int(i): n for n, i in enumerate(self._ids)}
        self._banned: frozenset[int] = frozenset()

    def _bind(self, sampler: Sampler, device: torch.device) -> None:
        """Resolve what depends on the vocabulary. Ids outside it (image placeholders in a prompt) are dropped: they never index a row."""
        p, vocab = self.params, sampler.vocab_size
        keep = (self._ids[: self._used] >= 0) & (self._ids[: self._used] < vocab)
        self._ids = self._ids[: self._used][keep]
        self._repeat, self._minus = self._repeat[: self._used][keep], self._minus[: self._used][keep]
        self._index()
        self._stops, self._allowed = np.empty(0, np.int64), None
        stops = {i for i in (*p.stop_token_ids, *(() if p.ignore_eos else sampler.eos_ids)) if 0 <= i < vocab}
        banned = {i for i, v in self._bias.items() if v <= _BAN and 0 <= i < vocab}
        allowed = None if p.allowed_token_ids is None else {i for i in p.allowed_token_ids if 0 <= i < vocab}

        def leaves_some(excluded: set[int]) -> bool:
            return bool(allowed - excluded) if allowed else len(excluded) < vocab

        if leaves_some(banned):
            self._banned = frozenset(banned)
        if leaves_some(stops | self._banned):
            self._stops = np.asarray(sorted(stops), np.int64)
        if allowed:
            self._allowed = torch.tensor(sorted(allowed), dtype=torch.int64, device=device)
        for token_id, bias in self._bias.items():
            if (slot := self._slots.get(token_id)) is not None:
                n = self._counts.get(token_id, 0)
                minus = p.frequency_penalty * n + (p.presence_penalty if n else 0.0) - bias
                self._minus[slot] = math.inf if token_id in self._banned else minus
        self._bound = sampler

    def _stopping(self) -> bool:
        """Whether end-of-sequence ids are still excluded."""
        return self.generated < self.params.min_tokens and len(self._stops) > 0

    def _constrained(self) -> Allowed | None:
        return self.constraint.allowed() if self.constraint is not None else None

    def _edited(self) -> bool:
        return self._used > 0 or self._allowed is not None or self._stopping() or self._constrained() is not None


class Sampler:
    """Samples one token per row of logits.

    `vocab_size` is the width of the logits; `eos_ids` are the ids that `min_tokens` holds back. Keeps no state of its own.
    """

    def __init__(self, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._padded = -(-vocab_size // _BLOCK) * _BLOCK

    def check(self, params: SamplingParams) -> None:
        """Refuse, before a request is queued, ids that this vocabulary does not have. Raises RequestError naming the field."""
        fields = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in fields.items():
            for i in ids:
                if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.vocab_size:
                    raise RequestError(f"{name} must hold token ids from 0 to {self.vocab_size - 1}, got {i!r}", param=name)
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
        _require_finite(logits)
        for state in states:
            if state._bound is not self:
                state._bind(self, logits.device)
        plain = [i for i, s in enumerate(states) if s.greedy and not s._edited()]
        chosen = [0] * len(states)
        for i, token in zip(plain, _argmax(_rows(logits, plain)), strict=True):
            chosen[i] = token
        skip = frozenset(plain)
        rest = [i for i in range(len(states)) if i not in skip]
        tile = _tile_rows(logits)
        for start in range(0, len(rest), tile):
            part = rest[start : start + tile]
            # Greedy rows are last, so that the rows to draw are one slice.
            part.sort(key=lambda i: states[i].greedy)
            for i, token in zip(part, self._tile(_rows(logits, part), [states[i] for i in part]), strict=True):
                chosen[i] = token
        logprobs: list[TokenLogprob | None] = [None] * len(states)
        asked = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        for start in range(0, len(asked), tile):
            part = asked[start : start + tile]
            found = _logprobs(_rows(logits, part), [chosen[i] for i in part], [states[i].params.logprobs or 0 for i in part])
            for i, entry in zip(part, found, strict=True):
                logprobs[i] = entry
        return SampleResult(chosen, logprobs)

    def _tile(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
        """Tokens of rows that need more than an argmax; greedy rows come last. logits: [rows, vocab] fp32."""
        x = torch.nn.functional.pad(logits, (0, self._padded - self.vocab_size), value=-math.inf)
        x = x.clone(memory_format=torch.contiguous_format) if x.data_ptr() == logits.data_ptr() else x.contiguous()
        _edit(x, states)
        _constrain(x, logits, states)
        drawn = sum(not s.greedy for s in states)
        tokens = _draw_rows(x[:drawn], states[:drawn]) if drawn else []
        return tokens + _argmax(x[drawn:])


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probability of the token that really follows each position, with the k best alternatives.

    logits: [tokens, vocab] fp32; next_ids[i] is the prompt's token i + 1 (after the first token of `logits`). Temporary memory is bounded
    by row tiles whatever the prompt's length. Raises NonFiniteLogitsError for rows with NaN or infinity.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[0] != len(next_ids):
        raise EngineError(f"logits must be fp32 [{len(next_ids)}, vocab], got {logits.dtype} {list(logits.shape)}")
    tile = _tile_rows(logits)
    out: list[TokenLogprob] = []
    for start in range(0, len(next_ids), tile):
        part, ids = logits[start : start + tile], list(next_ids[start : start + tile])
        _require_finite(part, first=start)
        out += _logprobs(part, ids, [k] * len(ids))
    return out


def _tile_rows(logits: Tensor) -> int:
    return max(1, _TILE.get(logits.device.type, _TILE["cuda"]) // logits.shape[1])


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """The rows, without a copy when they are all of them in order."""
    if rows == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


def _require_finite(logits: Tensor, first: int = 0) -> None:
    # One NaN or infinity always makes the sum non-finite, and a sum is far cheaper than isfinite; finite rows may overflow, so look again.
    if math.isfinite(logits.sum(-1).sum().item()):
        return
    bad = (~logits.isfinite().all(-1)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteLogitsError([first + i for i in bad])


def _argmax(x: Tensor) -> list[int]:
    """Index of each row's largest value, the first among equals (documented by numpy and torch alike). x: [rows, n] fp32."""
    if x.shape[0] == 0:
        return []
    if x.device.type == "cpu":  # numpy's is vectorised: 25 times faster
        return [int(i) for i in x.numpy().argmax(-1)]
    return [int(i) for i in x.argmax(-1).tolist()]


def _edit(x: Tensor, states: Sequence[SamplingState]) -> None:
    """Steps 1 to 4 of the module, in place. x: [rows, padded vocab] fp32."""
    width = x.shape[1]
    flat = x.view(-1)
    tables = [(n * width, s) for n, s in enumerate(states) if s._used]
    if tables:
        at = np.concatenate([s._ids[: s._used] + base for base, s in tables])
        where = torch.from_numpy(at).to(x.device)
        repeat = torch.from_numpy(np.concatenate([s._repeat[: s._used] for _, s in tables])).to(x.device)
        minus = torch.from_numpy(np.concatenate([s._minus[: s._used] for _, s in tables])).to(x.device)
        value = flat[where]
        value = torch.where(value > 0, value / repeat, value * repeat).clamp_(-_LARGEST, _LARGEST)
        flat[where] = value - minus
    stops = [s._stops + n * width for n, s in enumerate(states) if s._stopping()]
    if stops:
        flat[torch.from_numpy(np.concatenate(stops)).to(x.device)] = -math.inf
    for n, s in enumerate(states):
        if s._allowed is not None:
            kept = x[n, s._allowed]
            x[n].fill_(-math.inf)
            x[n, s._allowed] = kept


def _constrain(x: Tensor, logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Exclude what constraints do not allow, in place; a row of which nothing is left begins again from its logits.

    x: [rows, padded vocab] fp32; logits: [rows, vocab] fp32.
    """
    held = [(n, allowed) for n, state in enumerate(states) if (allowed := state._constrained()) is not None]
    if not held:
        return
    vocab = logits.shape[1]
    excluded = _excluded([allowed for _, allowed in held], vocab, x.device)
    rows = torch.tensor([n for n, _ in held], device=x.device)
    kept = x[rows]
    kept[:, :vocab].masked_fill_(excluded, -math.inf)
    for i in (kept.amax(-1) == -math.inf).nonzero().flatten().tolist():
        kept[i, :vocab] = logits[rows[i]].masked_fill(excluded[i], -math.inf)
    x[rows] = kept


def _excluded(limits: Sequence[Allowed], vocab: int, device: torch.device) -> Tensor:
    """[rows, vocab] bool: ids that are not allowed."""
    out = torch.zeros((len(limits), vocab), dtype=torch.bool, device=device)
    packed = [(i, allowed.bits) for i, allowed in enumerate(limits) if allowed.bits is not None]
    if packed:
        words = np.stack([bits for _, bits in packed])
        width = min(vocab, words.shape[1] * 32)
        rows = torch.tensor([i for i, _ in packed], device=device)
        if device.type == "cpu":
            bits = torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, count=width, bitorder="little")) == 0
        else:  # a thirty-second of the bytes to copy
            shifts = torch.arange(32, dtype=torch.int32, device=device)
            bits = ((torch.from_numpy(words.view(np.int32)).to(device)[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, :width]
        out[rows] = torch.nn.functional.pad(bits, (0, vocab - width), value=True)
    for i, allowed in enumerate(limits):
        if allowed.only is not None:
            out[i] = True
            out[i, [t for t in allowed.only if t < vocab]] = False
        elif allowed.banned:
            out[i, [t for t in allowed.banned if t < vocab]] = True
    return out


def _draw_rows(x: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Step 6 of the module. x: [rows, padded vocab] fp32 with excluded ids at -inf; it is overwritten."""
    best = x.amax(-1, keepdim=True)
    params = [s.params for s in states]
    if any(p.min_p > 0 for p in params):
        # p >= min_p * max p, said of logits: l >= max l + temperature * ln(min_p).
        below = [p.temperature * math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        x.masked_fill_(x < (best.double() + _column(below, x)).float(), -math.inf)
    _keep_top_k(x, [p.top_k for p in params])
    heat = _column([p.temperature for p in params], x).float()
    mass = (x - best).div_(heat).softmax(-1).mul_(_UNIT).floor_()  # whole numbers in fp32
    tokens, total = _draw(mass, _column([s.uniform(0) for s in states], x))

    out = [int(t) for t in tokens.tolist()]
    limits = [p.top_p for p in params]
    live = [n for n, top_p in enumerate(limits) if top_p < 1.0]
    if not live:
        return out
    bound = (total * _column(limits, x))[:, 0]
    narrow = [bound, tokens]
    if len(live) < len(states):
        pick = torch.tensor(live, device=x.device)
        x, mass, narrow = x[pick], mass[pick], [t[pick] for t in narrow]
    rounds = 0
    while True:
        bound, tokens = narrow
        mass = mass.mul_(_precedes(x, tokens))
        rounds += 1
        # The next candidate is drawn at once: the sum it needs is the sum that decides about the last one.
        redrawn, before = _draw(mass, _column([states[n].uniform(rounds) for n in live], x))
        rejected = [n for n, again in enumerate((before[:, 0] >= bound).tolist()) if again]
        if not rejected:
            return out
        pick = torch.tensor(rejected, device=x.device)
        live = [live[n] for n in rejected]
        x, mass, narrow = x[pick], mass[pick], [bound[pick], redrawn[pick]]
        for n, token in zip(live, narrow[1].tolist(), strict=True):
            out[n] = int(token)


def _column(values: list[float], like: Tensor) -> Tensor:
    """[rows, 1] fp64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _keep_top_k(x: Tensor, top_k: list[int]) -> None:
    """Set all but each row's k best to -inf, in place; 0 keeps all. Among equals the lower ids stay. x: [rows, padded vocab] fp32."""
    rows = [n for n, k in enumerate(top_k) if 0 < k < x.shape[1]]
    if not rows:
        return
    pick = torch.tensor(rows, device=x.device)
    values = x[pick].topk(max(top_k[n] for n in rows) + 1, dim=-1).values
    ks = torch.tensor([top_k[n] for n in rows], device=x.device)[:, None]
    last, after = values.gather(1, ks - 1), values.gather(1, ks)
    floor = torch.full((x.shape[0], 1), -math.inf, device=x.device)
    floor[pick] = last
    x.masked_fill_(x < floor, -math.inf)
    for n, tied in zip(rows, ((last == after) & (last > -math.inf))[:, 0].tolist(), strict=True):
        if tied:
            equal = (x[n] == floor[n]).nonzero().flatten()
            above = int((x[n] > floor[n]).sum())
            x[n, equal[top_k[n] - above :]] = -math.inf


def _precedes(x: Tensor, tokens: Tensor) -> Tensor:
    """1.0 for the ids that come before the row's token, best first and lower id first among equals. [rows, n] fp32."""
    value = x.gather(1, tokens[:, None])
    # Comparisons that write fp32 are several times faster on CPU than boolean ones. Ids below 2**24 are exact in fp32.
    out, equal, lower = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    torch.gt(x, value, out=out)
    torch.eq(x, value, out=equal)
    torch.lt(torch.arange(x.shape[1], dtype=torch.float32, device=x.device), tokens[:, None].float(), out=lower)
    return out.add_(equal.mul_(lower))


def _draw(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row in proportion to `mass`. A row without mass gives an arbitrary id in range and total 0.

    mass: [rows, n] fp32 whole numbers, n a multiple of _BLOCK; u: [rows, 1] fp64 in [0, 1).
    Returns ids [rows] int64 and totals [rows, 1] fp64.
    """
    rows, n = mass.shape
    blocks = mass.view(rows, n // _BLOCK, _BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[:, -1:].contiguous()
    target = torch.minimum((u * total).floor_(), total - 1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=n // _BLOCK - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=mass.device), block[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(inside, target - start, right=True).clamp_(max=_BLOCK - 1)
    return (block * _BLOCK + place)[:, 0], total


def _logprobs(logits: Tensor, chosen: list[int], ks: list[int]) -> list[TokenLogprob]:
    """Log-softmax of each row at its chosen id and at its k best ids. logits: [rows, vocab] fp32."""
    table = logits.log_softmax(-1)
    own = table.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    most = min(max(ks), logits.shape[1])
    if most == 0:
        return [TokenLogprob(i, max(v, LOGPROB_FLOOR)) for i, v in zip(chosen, own, strict=True)]
    # One more than asked: where the last two differ, the set is settled; where they are equal, the lower ids have to be found.
    values, ids = (t.tolist() for t in table.topk(min(most + 1, logits.shape[1]), dim=-1))
    out = []
    for n, k in enumerate(ks):
        best = sorted(zip(values[n], ids[n], strict=True), key=lambda e: (-e[0], e[1]))
        if 0 < k < len(best) and best[k - 1][0] == best[k][0]:
            at = (table[n] >= best[k - 1][0]).nonzero().flatten()
            best = sorted(zip(table[n, at].tolist(), at.tolist(), strict=True), key=lambda e: (-e[0], e[1]))
        top = tuple((i, max(v, LOGPROB_FLOOR)) for v, i in best[:k])
        out.append(TokenLogprob(chosen[n], max(own[n], LOGPROB_FLOOR), top))
    return out
