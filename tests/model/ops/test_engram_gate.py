"""The Engram gate against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forebay.model.ops.engram_gate import engram_gate
from forwards import difference

EPS = 1e-20


def sample(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    streams, key = (torch.randn(n, 4, 64, generator=g).to(torch.bfloat16) for _ in range(2))
    value = torch.randn(n, 64, generator=g).to(torch.bfloat16)
    return streams, key, value, torch.randn(4, 64, generator=g)


def test_value() -> None:
    streams, key, value, weight = sample(50)
    x, k = streams.double(), key.double()
    dot = (x * k * weight.double()).sum(-1) / x.square().mean(-1).sqrt() / k.square().mean(-1).sqrt() / math.sqrt(64)
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    wanted = x + gate.unsqueeze(-1) * value.double().unsqueeze(1)
    torch.testing.assert_close(engram_gate(streams, key, value, weight, EPS, None).double(), wanted, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(("sign", "gate"), [(1.0, 0.50025), (-1.0, 0.49975)])
def test_a_product_near_zero_opens_the_gate_by_its_sign(sign: float, gate: float) -> None:
    """|d| is floored at 1e-6, so the gate is sigmoid(±1e-3), never exactly one half."""
    streams = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    streams[..., 0] = 1.0
    key = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    key[..., 0] = sign
    weight = torch.full((1, 64), 1e-12)
    value = torch.full((1, 64), 4096.0, dtype=torch.bfloat16)
    found = engram_gate(streams, key, value, weight, EPS, None)[0, 0, 1].item()
    assert found == torch.tensor(gate * 4096).to(torch.bfloat16).item()


def test_image_positions_pass_through() -> None:
    streams, key, value, weight = sample(9, 1)
    text = torch.tensor([True, False, True, True, False, True, True, True, False])
    found = engram_gate(streams, key, value, weight, EPS, text)
    open_gate = engram_gate(streams, key, value, weight, EPS, None)
    assert difference(found[~text], streams[~text]) is None
    assert difference(found[text], open_gate[text]) is None
    assert (open_gate[~text] != streams[~text]).any(-1).all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    streams, key, value, weight = sample(70, 2)
    whole = engram_gate(streams, key, value, weight, EPS, None)
    for n in (1, 2, 3, 17, 64):
        part = slice(3, 3 + n)
        assert difference(engram_gate(streams[part], key[part], value[part], weight, EPS, None), whole[part]) is None
