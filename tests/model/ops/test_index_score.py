"""Index scores: the roundings of the reference, and no influence of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.index_score import index_scores
from forwards import difference


def case(n: int, m: int, heads: int = 8, dim: int = 32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = formats.index_decode(*formats.index_encode(torch.randn(n, heads, dim, generator=g)))
    keys = formats.index_decode(*formats.index_encode(torch.randn(m, dim, generator=g)))
    return q, (torch.randn(n, heads, generator=g) / 16).to(torch.bfloat16), keys


def test_value_step_by_step() -> None:
    """Dot, weighted dot and sum are each rounded to bf16; heads are added in order; the weight may be negative, the dot is rectified."""
    q, weights, keys = case(6, 50)
    found = index_scores(q, weights, keys)
    for i in range(6):
        for j in range(0, 50, 7):
            total = torch.zeros(())
            for h in range(8):
                dot = (q[i, h].double() * keys[j].double()).sum().to(torch.bfloat16)  # exact before this rounding
                total = total + (dot.clamp(min=0) * weights[i, h]).float()
            assert found[i, j] == total.to(torch.bfloat16)
    assert (found < 0).any()
    assert (found > 0).any()


def test_shared_and_own_keys_give_the_same() -> None:
    q, weights, keys = case(9, 77)
    assert difference(index_scores(q, weights, keys.expand(9, -1, -1)), index_scores(q, weights, keys)) is None


def test_rows_and_keys_do_not_touch_each_other() -> None:
    q, weights, keys = case(40, 300, seed=1)
    whole = index_scores(q, weights, keys)
    for n in (1, 2, 3, 17):
        for m in (1, 2, 9, 64, 299):
            assert difference(index_scores(q[5 : 5 + n], weights[5 : 5 + n], keys[:m]), whole[5 : 5 + n, :m].contiguous()) is None
            own = keys[1 : 1 + m].expand(n, -1, -1)
            assert difference(index_scores(q[5 : 5 + n], weights[5 : 5 + n], own), whole[5 : 5 + n, 1 : 1 + m].contiguous()) is None
