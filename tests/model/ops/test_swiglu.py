"""Clamped SwiGLU with the routing weight inside."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops.swiglu import swiglu
from forwards import difference


def rows(n: int, seed: int = 0, size: float = 6.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple((torch.randn(n, 64, generator=g) * size).to(torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


def truth(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    a, b = gate.double().clamp(max=10), up.double().clamp(-10, 10)
    h = a / (1 + (-a).exp()) * b
    return h if weight is None else h * weight.double().unsqueeze(-1)


def test_value() -> None:
    gate, up = rows(300)
    weight = torch.rand(300, generator=torch.Generator().manual_seed(1)) * 1.5
    for w in (None, weight):
        wanted = truth(gate, up, w)
        found = swiglu(gate, up, 10.0, w)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8, atol=1e-12)


def test_gate_is_clamped_from_above_only_and_up_both_ways() -> None:
    def one(gate: float, up: float) -> float:
        return swiglu(torch.tensor([[gate]], dtype=torch.bfloat16), torch.tensor([[up]], dtype=torch.bfloat16), 10.0).item()

    assert one(50, 1) == one(10, 1)
    assert one(3, 50) == one(3, 10)
    assert one(3, -50) == one(3, -10)
    assert one(-30, 1) != one(-10, 1)
    assert abs(one(-30, 1)) < 1e-9


def test_weight_is_applied_before_the_rounding() -> None:
    """The second linear quantises the weighted activation, so weighting after the rounding is another result."""
    gate, up = rows(64, 2)
    weight = torch.full((64,), 1.1)
    late = (swiglu(gate, up, 10.0).float() * 1.1).to(torch.bfloat16)
    assert difference(swiglu(gate, up, 10.0, weight), late) is not None


def test_a_row_does_not_depend_on_the_batch() -> None:
    gate, up = rows(70, 3, 2.0)
    weight = torch.rand(70, generator=torch.Generator().manual_seed(4))
    whole = swiglu(gate, up, 10.0, weight)
    for n in (1, 2, 5, 16, 69):
        part = slice(70 - n, 70)
        assert difference(swiglu(gate[part], up[part], 10.0, weight[part]), whole[part]) is None
        strided = torch.cat((gate, up), 1)  # as the stacked linear gives them: two views of one tensor
        a, b = strided[part].chunk(2, -1)
        assert difference(swiglu(a, b, 10.0, weight[part]), whole[part]) is None


def test_a_limit_of_zero_is_none() -> None:
    gate, up = rows(64, 5, 30.0)
    a, b = gate.double(), up.double()
    torch.testing.assert_close(swiglu(gate, up, 0.0).double(), a / (1 + (-a).exp()) * b, rtol=2.0**-8, atol=1e-12)
