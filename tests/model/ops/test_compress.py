"""Pooling of compression groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.model.ops.compress import pool_groups
from forwards import difference

Components = Callable[[str], dict[str, Tensor]]


def test_pooling_equals_golden(components: Components) -> None:
    g = components("primitives")
    found = pool_groups(g["compress.kv"], g["compress.gate"])
    assert difference(found, g["compress.pooled"].to(torch.bfloat16)) is None


def test_weights_are_per_channel_and_survive_large_gates() -> None:
    k = torch.tensor([[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]])
    gate = torch.tensor([[[500.0, -500.0, 3.0], [-500.0, 500.0, 3.0]]])
    assert pool_groups(k, gate).tolist() == [[1.0, 2.0, 1.5]]


def test_a_group_does_not_depend_on_the_batch() -> None:
    g = torch.Generator().manual_seed(6)
    k, gate = torch.randn(40, 2, 32, generator=g), torch.randn(40, 2, 32, generator=g)
    whole = pool_groups(k, gate)
    for n in (1, 3, 17):
        assert difference(pool_groups(k[5 : 5 + n], gate[5 : 5 + n]), whole[5 : 5 + n]) is None


def test_other_ratios() -> None:
    """A group of one is itself; of three, the softmax over three."""
    g = torch.Generator().manual_seed(7)
    k, gate = torch.randn(5, 3, 8, generator=g), torch.randn(5, 3, 8, generator=g)
    assert torch.equal(pool_groups(k[:, :1], gate[:, :1]), k[:, 0].to(torch.bfloat16))
    torch.testing.assert_close(pool_groups(k, gate).float(), (k * gate.softmax(1)).sum(1), rtol=1e-2, atol=1e-2)
