"""Expert choice against the golden router."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.model.ops.linear import PlainWeight, TileCache, fp32_linear
from forebay.model.ops.router import route
from forwards import difference

Components = Callable[[str], dict[str, Tensor]]


def golden_logits(g: dict[str, Tensor]) -> Tensor:
    return fp32_linear(g["router.x"], PlainWeight(g["router.weight"], TileCache(1 << 20)))


def test_choice_and_weights_equal_golden(components: Components) -> None:
    g = components("primitives")
    indices, weights = route(golden_logits(g), g["router.bias"], 2, 1.5)
    assert difference(indices.int(), g["router.indices"]) is None
    torch.testing.assert_close(weights, g["router.weights_scale1.5"], rtol=5e-7, atol=0)


def test_bias_selects_and_never_weighs(components: Components) -> None:
    """A bias that turns the choice leaves the weight of a chosen expert what its own score says."""
    g = components("primitives")
    logits = golden_logits(g)
    bias = torch.zeros(8)
    bias[[3, 5]] = 100.0
    indices, weights = route(logits, bias, 2, 1.0)
    assert {tuple(sorted(row)) for row in indices.tolist()} == {(3, 5)}
    scores = g["router.scores"].gather(1, indices)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True), rtol=1e-6, atol=0)


def test_each_row_may_have_its_own_bias(components: Components) -> None:
    g = components("primitives")
    logits, rows = golden_logits(g), torch.zeros(50, 8)
    rows[::2, 1] = 100.0
    indices, _ = route(logits, rows, 2, 1.5)
    plain, _ = route(logits, torch.zeros(8), 2, 1.5)
    assert (indices[::2, 0] == 1).all()
    assert torch.equal(indices[1::2], plain[1::2])


def test_weights_sum_to_the_scale_even_for_tiny_scores() -> None:
    """sqrt(softplus(-60)) is 9e-14: no underflow to 0, no division by 0."""
    _, weights = route(torch.full((3, 8), -60.0), torch.zeros(8), 2, 1.5)
    torch.testing.assert_close(weights.sum(1), torch.full((3,), 1.5), rtol=1e-5, atol=0)


def test_without_normalisation_the_scores_are_the_weights(components: Components) -> None:
    g = components("primitives")
    indices, weights = route(golden_logits(g), g["router.bias"], 2, 1.5, normalise=False)
    torch.testing.assert_close(weights, g["router.scores"].gather(1, indices) * 1.5, rtol=5e-7, atol=0)


@pytest.mark.parametrize("experts", [8, 384])
def test_a_row_does_not_depend_on_the_batch(experts: int) -> None:
    logits = torch.randn(70, experts, generator=torch.Generator().manual_seed(experts))
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)) / 10
    whole = route(logits, bias, 6, 1.5)
    for n in (1, 2, 7, 33, 70):
        for first in (0, 70 - n):
            for found, wanted in zip(route(logits[first : first + n], bias, 6, 1.5), whole, strict=True):
                assert difference(found, wanted[first : first + n]) is None
