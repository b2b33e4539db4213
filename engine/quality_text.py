"""How well a mode predicts held-out prose: distributions of the next token where a long prompt has ended and the text goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forebay.cache.manager import Policy
from forebay.engine.batcher import Row
from forebay.engine.llm import LLM
from forebay.engine.output import OutputProcessor
from forebay.engine.quality_ask import Asker, QualityError
from forebay.engine.quality_stats import clustered, interval, spread
from forebay.engine.sampler import SamplingState
from forebay.engine.sequence import Sequence as Running
from forebay.engine.types import Request, SamplingParams

SCORED_ROWS = 64  # positions whose logits exist at once
PIECE = 4096  # tokens that a plain perplexity is computed over at once


@dataclass(frozen=True)
class Excerpt:
    """A prompt and how the text goes on: `ids`[:place] is the prompt; the tokens from `place` on are predicted, but for those in `skip`."""

    ids: list[int]
    place: int
    skip: frozenset[int]


def joined(llm: LLM, documents: Sequence[str]) -> list[int]:
    """Tokens of documents between begin and end of sentence, one after the other."""
    tokenizer = llm.tokenizer
    first, last = tokenizer.bos_id, tokenizer.eos_id
    ids: list[int] = []
    for document in tokenizer.encode_many(list(documents)):
        ids += ([] if first is None else [first]) + document + ([] if last is None else [last])
    return ids


def excerpts(llm: LLM, ids: Sequence[int], *, prompt: int, follows: int, count: int) -> list[Excerpt]:
    """`count` excerpts of `prompt` + `follows` tokens from all over the text, fewer where it is too short for different ones."""
    spare = len(ids) - prompt - follows
    if spare < 0:
        raise QualityError(f"the held-out text has {len(ids)} tokens, {prompt + follows} are needed")
    first = llm.tokenizer.bos_id
    skip = frozenset() if first is None else frozenset({first})
    starts = sorted({spare * i // max(1, count - 1) for i in range(count)})
    return [Excerpt(list(ids[start : start + prompt + follows]), prompt, skip) for start in starts]


def distributions(asker: Asker, parts: Sequence[Excerpt]) -> list[Tensor] | None:
    """Log-probabilities of the tokens that follow each prompt, [follows, vocab] fp32, teacher-forced as decode rows.

    None when the prompts are too short for the mode's boundaries.
    """
    size = asker.size
    groups = [(part.ids[: (part.place - 1) // size * size], asker.salt()) for part in parts]
    if not all(asker.grow(groups)):
        return None
    return [_follow(asker, part, salt) for part, (_, salt) in zip(parts, groups, strict=True)]


def _follow(asker: Asker, part: Excerpt, salt: str) -> Tensor:
    """One excerpt, whose beginning is cached: the prompt's end is computed as a request would, then what follows."""
    llm, mode, manager, most = asker.llm, asker.mode, asker.llm.engine.manager, asker.llm.engine.options.budgets[0]
    # `prompt_logprobs` makes the runner give the hidden states of every row.
    request = asker.request(part.ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), salt)
    policy = Policy(mode.prefill, "bounded" if mode.boundaries else "exact", None if mode.boundaries else 0)
    sequence = Running(request, manager.sequence(salt), _sampling(request), _output(llm), mode.prefill, 1, 0, policy)
    plan = manager.open(sequence.cache, part.ids[: part.place], policy=policy)
    if plan is None or not manager.ensure(sequence.cache, len(part.ids)):
        raise QualityError("no room in the block pool for this text")
    lineage = plan.lineage if plan.faithful else max(plan.lineage, 1)
    if lineage != mode.boundaries:
        raise QualityError(f"in mode {mode.name!r} a text has {lineage} bounded replays behind it instead of {mode.boundaries}")
    found: list[Tensor] = []
    try:
        row = partial(
            Row, sequence, window_from=plan.window_from, decoder_from=plan.decoder_from, decoder_window_from=plan.decoder_window_from,
            wants_logits=False,
        )  # fmt: skip
        starts = [*range(plan.start, part.place, most), *range(part.place, len(part.ids) - 1, most)]
        for start, stop in zip(starts, [*starts[1:], len(part.ids) - 1], strict=True):
            _, hidden = llm.engine.runner.run([row(start=start, stop=stop, write_from=max(plan.write_from, start))])
            if stop < part.place or hidden[0] is None:
                continue
            rows = hidden[0][-1:] if stop == part.place else hidden[0]
            for piece in rows.split(SCORED_ROWS):
                found.append(llm.engine.runner.logits(piece).log_softmax(-1).cpu())
    finally:
        manager.release(sequence.cache, keep=False)
    return torch.cat(found)


def _sampling(request: Request) -> SamplingState:
    return SamplingState(request.params, request.prompt_ids, 0)


def _output(llm: LLM) -> OutputProcessor:
    return OutputProcessor(llm.tokenizer, (), frozenset(), parser=None)


@dataclass(frozen=True)
class Prediction:
    """How a mode predicts tokens, and how far its distributions are from a reference's.

    Standard errors and intervals are by the spread between excerpts (quality_stats.py), whose tokens are no independent trials; None where
    there is a single excerpt.

    Attributes:
        tokens: predicted. `nll`: mean negative log-probability, nats; `nll_se` its standard error.
        kl: mean Kullback-Leibler divergence from the reference, nats; `kl_se` its standard error, `kl_low` to `kl_high` its 95 % interval.
        top1: share of the positions at which both find the same token the most likely; `top1_low` to `top1_high` its 95 % interval.
    """

    tokens: int
    nll: float
    nll_se: float | None
    kl: float
    kl_se: float | None
    kl_low: float | None
    kl_high: float | None
    top1: float
    top1_low: float
    top1_high: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


def compare(parts: Sequence[Excerpt], found: Sequence[Tensor], reference: Sequence[Tensor]) -> Prediction:
    """Judge log-probabilities by the text and by those of a reference, each [follows, vocab]."""
    losses: list[tuple[int, float]] = []
    divergences: list[tuple[int, float]] = []
    alike: list[tuple[int, int]] = []
    for part, mine, theirs in zip(parts, found, reference, strict=True):
        told = torch.tensor(part.ids[part.place :])
        counted = torch.tensor([token not in part.skip for token in told.tolist()])
        n = int(counted.sum())
        losses.append((n, -float(mine.gather(1, told.unsqueeze(1)).squeeze(1)[counted].double().sum())))
        divergences.append((n, float((theirs.double().exp() * (theirs.double() - mine.double())).sum(1)[counted].sum())))
        alike.append((n, int((mine.argmax(1) == theirs.argmax(1))[counted].sum())))
    tokens, agree, same = sum(n for n, _ in alike), sum(right for _, right in alike), interval(alike)
    kl, kl_se = clustered(divergences)
    low, high = (None, None) if kl_se is None else spread(divergences)
    return Prediction(
        tokens, *clustered(losses), kl, kl_se, None if low is None else max(0.0, low), high, agree / tokens, same.low, same.high
    )  # fmt: skip


def plain_loss(llm: LLM, ids: Sequence[int], skip: frozenset[int]) -> tuple[float, int, int]:
    """Summed negative log-probability in nats, number, and bytes of the tokens of a text read in pieces of `PIECE` tokens.

    Neither the first token of a piece nor those in `skip` are predicted, and their bytes are not counted. The end of a document is
    predicted and has no bytes.
    """
    total, count, written = 0.0, 0, 0
    silent = llm.tokenizer.silent_ids
    for first in range(0, len(ids), PIECE):
        piece = list(ids[first : first + PIECE])
        if len(piece) < 2:
            break
        scores = llm.score(piece)[:-1].log_softmax(-1)
        told = torch.tensor(piece[1:])
        counted = torch.tensor([token not in skip for token in piece[1:]])
        total -= float(scores.gather(1, told.unsqueeze(1)).squeeze(1)[counted].double().sum())
        count += int(counted.sum())
        written += sum(len(llm.tokenizer.token_bytes(token)) for token in piece[1:] if token not in skip and token not in silent)
    return total, count, written
