"""Routed experts: a lone row, whose assignments are not sorted, gives what it gives among others."""

from __future__ import annotations

import pytest
import torch

from forebay.model.experts import RoutedExperts
from forebay.model.ops import formats
from forebay.model.ops.linear import PlainWeight, StackedWeight, TileCache, Weight, quantised_linear
from forebay.model.ops.swiglu import swiglu
from forwards import difference

EXPERTS, WIDTH, INTER = 7, 64, 96


def weight(out: int, width: int, seed: int, cache: TileCache) -> Weight:
    values = torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) / width**0.5
    return PlainWeight(values.to(torch.bfloat16), cache)


@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_lone_row_with_its_shared_expert(topk: int, limit: float) -> None:
    cache, g = TileCache(1 << 24), torch.Generator().manual_seed(topk)
    sizes = (INTER, WIDTH), (WIDTH, INTER), (INTER, WIDTH)
    parts = [tuple(weight(*size, 3 * e + i, cache) for i, size in enumerate(sizes)) for e in range(EXPERTS)]
    up = StackedWeight([weight(INTER, WIDTH, 90, cache), weight(INTER, WIDTH, 91, cache)], cache)
    shared = up, weight(WIDTH, INTER, 92, cache)
    experts = RoutedExperts([(w1, w2, w3) for w1, w2, w3 in parts], cache, limit)
    x = formats.fp8_round(torch.randn(50, WIDTH, generator=g))
    indices = torch.rand(50, EXPERTS, generator=g).topk(topk).indices
    weights = torch.rand(50, topk, generator=g)
    gate, rise = quantised_linear(x, up).chunk(2, -1)
    together = experts(x, indices, weights) + quantised_linear(formats.fp8_round(swiglu(gate, rise, limit)), shared[1]).float()
    for i in range(50):
        alone = slice(i, i + 1)
        assert difference(experts(x[alone], indices[alone], weights[alone]), experts(x, indices, weights)[alone]) is None
        assert difference(experts.lone(x[alone], indices[alone], weights[alone], shared), together[alone]) is None
