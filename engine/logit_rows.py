"""Rows of logits: in tiles that fit, checked, and the best id of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.engine.types import EngineError

_TILE = {"cpu": 2**17, "cuda": 2**24}  # logits handled at once: what fits a core's cache, or bounds device memory


class NonFiniteLogitsError(EngineError):
    """The network produced NaN or infinity. `rows` are the row numbers of that call; nothing was sampled and no state changed,
    so the caller fails those requests and calls again with the remaining rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"logits of row {', '.join(map(str, rows))} are not finite", code="nonfinite_logits")
        self.rows = tuple(rows)


def tile_rows(logits: Tensor) -> int:
    return max(1, _TILE.get(logits.device.type, _TILE["cuda"]) // logits.shape[1])


def pick_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """The rows, without a copy when they are all of them in order."""
    if rows == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


def require_finite(logits: Tensor, first: int = 0) -> None:
    # One NaN or infinity always makes the sum non-finite, and a sum is far cheaper than isfinite; finite rows may overflow, so look again.
    if math.isfinite(logits.sum(-1).sum().item()):
        return
    bad = (~logits.isfinite().all(-1)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteLogitsError([first + i for i in bad])


def argmax(x: Tensor) -> list[int]:
    """Index of each row's largest value, the first among equals (documented by numpy and torch alike). x: [rows, n] fp32."""
    if x.shape[0] == 0:
        return []
    if x.device.type == "cpu":  # numpy's is vectorised: 25 times faster
        return [int(i) for i in x.numpy().argmax(-1)]
    return [int(i) for i in x.argmax(-1).tolist()]
