"""What a request makes of its logits before a token is chosen: steps 1 to 4 of engine/sampler.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forebay.engine.constraint import Allowed
from forebay.engine.sampling_state import SamplingState

_LARGEST = 3.0e38


def edit(x: Tensor, states: Sequence[SamplingState]) -> None:
    """Penalties, biases, bans and allowed ids, in place. x: [rows, padded vocab] fp32."""
    width = x.shape[1]
    flat = x.view(-1)
    tables = [(n * width, s) for n, s in enumerate(states) if s.used]
    if tables:
        at = np.concatenate([s.ids[: s.used] + base for base, s in tables])
        where = torch.from_numpy(at).to(x.device)
        repeat = torch.from_numpy(np.concatenate([s.repeat[: s.used] for _, s in tables])).to(x.device)
        minus = torch.from_numpy(np.concatenate([s.minus[: s.used] for _, s in tables])).to(x.device)
        value = flat[where]
        value = torch.where(value > 0, value / repeat, value * repeat).clamp_(-_LARGEST, _LARGEST)
        flat[where] = value - minus
    out = [s.stops + n * width for n, s in enumerate(states) if s.stopping()]
    out += [np.asarray(ids, np.int64) + n * width for n, s in enumerate(states) if (ids := s.completing())]
    if out:
        flat[torch.from_numpy(np.concatenate(out)).to(x.device)] = -math.inf
    for n, s in enumerate(states):
        if s.allowed is not None:
            kept = x[n, s.allowed]
            x[n].fill_(-math.inf)
            x[n, s.allowed] = kept


def constrain(x: Tensor, logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Exclude what constraints do not allow, in place; a row of which nothing is left begins again from its logits.

    x: [rows, padded vocab] fp32; logits: [rows, vocab] fp32.
    """
    held = [(n, allowed) for n, state in enumerate(states) if (allowed := state.constrained()) is not None]
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
