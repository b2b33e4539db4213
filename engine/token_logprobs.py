"""Log-probabilities of tokens: the model's own, before any setting of a request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.engine.logit_rows import require_finite, tile_rows
from forebay.engine.types import EngineError, TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Smallest log-probability reported: JSON has no infinity, and this is the value OpenAI uses."""


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probability of the token that really follows each position, with the k best alternatives.

    logits: [tokens, vocab] fp32; next_ids[i] is the prompt's token i + 1 (after the first token of `logits`). Temporary memory is bounded
    by row tiles whatever the prompt's length. Raises NonFiniteLogitsError for rows with NaN or infinity.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[0] != len(next_ids):
        raise EngineError(f"logits must be fp32 [{len(next_ids)}, vocab], got {logits.dtype} {list(logits.shape)}")
    tile = tile_rows(logits)
    out: list[TokenLogprob] = []
    for start in range(0, len(next_ids), tile):
        part, ids = logits[start : start + tile], list(next_ids[start : start + tile])
        require_finite(part, first=start)
        out += logprobs_of(part, ids, [k] * len(ids))
    return out


def logprobs_of(logits: Tensor, chosen: list[int], ks: list[int]) -> list[TokenLogprob]:
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
