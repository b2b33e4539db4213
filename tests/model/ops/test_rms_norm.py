"""RMSNorm: fp32 inside, rounded once."""

from __future__ import annotations

import pytest
import torch

from forebay.model.ops.rms_norm import rms_norm
from forwards import difference

EPS = 1e-20


def test_equals_double_precision_rounded_once() -> None:
    g = torch.Generator().manual_seed(8)
    x, weight = torch.randn(200, 64, generator=g).to(torch.bfloat16), torch.randn(64, generator=g).to(torch.bfloat16)
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    found = rms_norm(x, weight, EPS)
    assert found.dtype == torch.bfloat16
    off = (found.view(torch.int16).int() - truth.float().to(torch.bfloat16).view(torch.int16).int()).abs()
    assert int(off.max()) <= 1
    assert float((off > 0).float().mean()) < 1e-3  # rounding twice would move about one value in twenty


def test_weight_is_applied_before_rounding() -> None:
    """x / rms rounded first, then multiplied and rounded again, is a known mistake (0.3 % of attention inputs)."""
    x, weight = torch.tensor([[1.0, 1.0078125, 0.9921875, 3.0]]), torch.full((4,), 1.0078125, dtype=torch.bfloat16)
    normed = x / x.square().mean().sqrt()
    assert difference(rms_norm(x, weight, EPS), (normed * weight.float()).to(torch.bfloat16)) is None
    assert not torch.equal(rms_norm(x, weight, EPS), (normed.to(torch.bfloat16) * weight))


def test_tiny_and_zero_rows() -> None:
    """The epsilon is 1e-20: rows of 1e-9 are still normalised, to 0.995, zeros stay zeros."""
    weight = torch.ones(32, dtype=torch.bfloat16)
    assert rms_norm(torch.full((1, 32), 1e-9), weight, EPS)[0, 0].item() == pytest.approx(0.995, abs=0.003)
    assert not rms_norm(torch.zeros(1, 32), weight, EPS).any()


def test_a_row_does_not_depend_on_the_batch() -> None:
    g = torch.Generator().manual_seed(10)
    for width in (32, 64, 1280, 5120):
        x, weight = torch.randn(40, width, generator=g), torch.randn(width, generator=g).to(torch.bfloat16)
        whole = rms_norm(x, weight, EPS)
        for n in (1, 2, 3, 17):
            assert difference(rms_norm(x[9 : 9 + n], weight, EPS), whole[9 : 9 + n]) is None
