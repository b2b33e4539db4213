"""Sigmoid, SiLU and softplus: right, and the same for an element wherever it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forebay.model.ops.elementwise import sigmoid, silu, softplus
from forwards import difference

FUNCTIONS = [(sigmoid, torch.sigmoid), (silu, functional.silu), (softplus, functional.softplus)]


@pytest.mark.parametrize(("ours", "truth"), FUNCTIONS, ids=["sigmoid", "silu", "softplus"])
class TestEach:
    def test_value(self, ours: Callable[[Tensor], Tensor], truth: Callable[[Tensor], Tensor]) -> None:
        x = torch.cat((torch.linspace(-90, 90, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
        torch.testing.assert_close(ours(x), truth(x.double()).float(), rtol=1e-6, atol=1e-35)

    def test_place_does_not_matter(self, ours: Callable[[Tensor], Tensor], truth: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(20000, generator=torch.Generator().manual_seed(3)) * 4
        whole = ours(x)  # more than one piece
        for start, count in ((0, 1), (1, 1), (5, 3), (0, 7), (63, 2), (100, 64), (100, 65), (19990, 10), (3, 17000), (16383, 2)):
            assert difference(ours(x[start : start + count]), whole[start : start + count]) is None, (start, count)

    def test_shape_and_stride_do_not_matter(self, ours: Callable[[Tensor], Tensor], truth: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(24, 9, generator=torch.Generator().manual_seed(4))
        assert difference(ours(x.T), ours(x).T) is None
        assert difference(ours(x[:, 2:7]), ours(x)[:, 2:7]) is None
        assert ours(x[:0]).shape == (0, 9)

    def test_input_is_left_alone(self, ours: Callable[[Tensor], Tensor], truth: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(64, generator=torch.Generator().manual_seed(5))
        before = x.clone()
        ours(x)
        assert torch.equal(x, before)


def test_softplus_does_not_underflow() -> None:
    """log(1 + e^x) computed naively is 0 below about -16.6, which would give experts a weight of 0."""
    assert softplus(torch.tensor([-30.0])).item() == pytest.approx(9.357623e-14, rel=1e-5)
