"""Drawing tokens without a sort: step 6 of engine/sampler.py, whose words on why the batch cannot matter apply."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.engine.sampling_state import SamplingState

BLOCK = 64  # the draw first finds the block of this many ids, then the id in it; rows are padded to whole blocks
UNIT = 2.0**50  # probabilities are whole multiples of 1 / UNIT: a row's total stays below 2**53, where fp64 adds exactly


def draw_rows(x: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Tokens of rows that are not greedy. x: [rows, padded vocab] fp32 with excluded ids at -inf; it is overwritten."""
    best = x.amax(-1, keepdim=True)
    params = [s.params for s in states]
    if any(p.min_p > 0 for p in params):
        # p >= min_p * max p, said of logits: l >= max l + temperature * ln(min_p).
        below = [p.temperature * math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        x.masked_fill_(x < (best.double() + _column(below, x)).float(), -math.inf)
    _keep_top_k(x, [p.top_k for p in params])
    heat = _column([p.temperature for p in params], x).float()
    mass = (x - best).div_(heat).softmax(-1).mul_(UNIT).floor_()  # whole numbers in fp32
    tokens, total = draw(mass, _column([s.uniform(0) for s in states], x))

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
        redrawn, before = draw(mass, _column([states[n].uniform(rounds) for n in live], x))
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


def draw(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row in proportion to `mass`. A row without mass gives an arbitrary id in range and total 0.

    mass: [rows, n] fp32 whole numbers, n a multiple of BLOCK; u: [rows, 1] fp64 in [0, 1).
    Returns ids [rows] int64 and totals [rows, 1] fp64.
    """
    rows, n = mass.shape
    blocks = mass.view(rows, n // BLOCK, BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[:, -1:].contiguous()
    target = torch.minimum((u * total).floor_(), total - 1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=n // BLOCK - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=mass.device), block[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(inside, target - start, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + place)[:, 0], total
