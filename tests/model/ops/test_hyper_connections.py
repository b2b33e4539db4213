"""mHC coefficients, collapse and mix against the golden ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.model.ops.hyper_connections import _sinkhorn, _sinkhorn_numpy, coefficients, collapse, mix, spread_scale
from forebay.model.ops.linear import PlainWeight, TileCache, fp32_linear
from forwards import difference, ulps

Components = Callable[[str], dict[str, Tensor]]
EPS = 1e-6


def assert_comb(found: Tensor, wanted: Tensor, exact: bool) -> None:
    """Exact with the golden machine's exp. Elsewhere exp itself differs by a unit in the last place, which the normalisations carry on.

    An element and its sum are each off by a unit then, four at a change of the exponent, and as much again is for the divisions' roundings:
    8 units are never more than the README's 1e-6.
    """
    if exact:
        assert difference(found, wanted) is None
    assert ulps(found, wanted) <= 8


def test_coefficients_equal_golden(components: Components, same_sums: bool) -> None:
    """comb exactly. pre and post within an ulp: the golden's last elements went through torch's scalar code."""
    g = components("mhc")
    found = coefficients(g["mixes"], spread_scale(g["scale"], 4), g["base"], 4, 20, EPS)
    assert_comb(found.comb, g["comb"], same_sums)
    assert ulps(found.pre, g["pre"]) <= 1
    assert ulps(found.post, g["post"]) <= 1


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_iterations_are_counted_as_the_reference_does(components: Components, same_sums: bool, iterations: int) -> None:
    """The row softmax is the first half of the first iteration."""
    g = components("mhc")
    found = coefficients(g["mixes"], spread_scale(g["scale"], 4), g["base"], 4, iterations, EPS)
    assert_comb(found.comb, g[f"comb_after_{iterations}_iterations"], same_sums)


def test_example_of_the_specification() -> None:
    logits = torch.tensor([[0.5, -0.25, 0.1, 0], [0.2, 0.3, -0.4, 0.6], [0, 0, 0, 0], [1, -1, 0.5, -0.5]])
    mixes = torch.cat((torch.zeros(8), logits.flatten())).unsqueeze(0)
    comb = coefficients(mixes, torch.ones(24), torch.zeros(24), 4, 20, EPS).comb[0]
    wanted = torch.tensor(
        [[0.263818, 0.235299, 0.259657, 0.241225], [0.162826, 0.339773, 0.131209, 0.366191],
         [0.170533, 0.321991, 0.250393, 0.257083], [0.402822, 0.102936, 0.358741, 0.1355]]
    )  # fmt: skip
    torch.testing.assert_close(comb, wanted, rtol=0, atol=1e-6)


def test_columns_of_comb_sum_to_one(components: Components) -> None:
    """The last step normalises over the source stream."""
    g = components("mhc")
    comb = coefficients(g["mixes"], spread_scale(g["scale"], 4), g["base"], 4, 20, EPS).comb
    torch.testing.assert_close(comb.sum(1), torch.ones(100, 4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("streams", [2, 4])
def test_host_and_device_code_agree(streams: int) -> None:
    """The numpy path of the CPU does what the torch path of other devices does."""
    x = torch.rand(50, streams, streams, generator=torch.Generator().manual_seed(streams)) + 1e-3
    plain = x / x.sum(-1, keepdim=True) + EPS
    plain = plain / (plain.sum(-2, keepdim=True) + EPS)
    for _ in range(19):
        plain = plain / (plain.sum(-1, keepdim=True) + EPS)
        plain = plain / (plain.sum(-2, keepdim=True) + EPS)
    torch.testing.assert_close(_sinkhorn(x, 20, EPS), plain, rtol=1e-5, atol=1e-7)
    host = torch.from_numpy(_sinkhorn_numpy(x.numpy().transpose(1, 2, 0).copy(), 20, EPS).transpose(2, 0, 1).copy())
    torch.testing.assert_close(host, plain, rtol=1e-5, atol=1e-7)
    for i in range(50):
        assert torch.equal(torch.from_numpy(_sinkhorn_numpy(x[i].numpy(), 20, EPS)), host[i])


def test_eps_as_one_more_summand_is_the_same_sum() -> None:
    x = torch.rand(300, 4, 4, generator=torch.Generator().manual_seed(6)).numpy()
    eps = np.float32(EPS)
    for c in x:
        plain = c / np.add.reduce(c, axis=1, keepdims=True) + eps
        plain = plain / (np.add.reduce(plain, axis=0, keepdims=True) + eps)
        for _ in range(7):
            plain = plain / (np.add.reduce(plain, axis=1, keepdims=True) + eps)
            plain = plain / (np.add.reduce(plain, axis=0, keepdims=True) + eps)
        assert np.array_equal(_sinkhorn_numpy(c, 8, EPS), plain)


def test_a_row_does_not_depend_on_the_batch(components: Components) -> None:
    g = components("mhc")
    scale = spread_scale(g["scale"], 4)
    whole = coefficients(g["mixes"], scale, g["base"], 4, 20, EPS)
    for n in (1, 2, 3, 7, 64):
        for found, wanted in zip(coefficients(g["mixes"][30 : 30 + n], scale, g["base"], 4, 20, EPS), whole, strict=True):
            assert difference(found, wanted[30 : 30 + n]) is None


def test_a_whole_step_equals_golden(components: Components) -> None:
    g = components("mhc")
    h = g["block.h"]
    flat = h.flatten(1).float()
    mixes = fp32_linear(flat, PlainWeight(g["block.fn"], TileCache(1 << 20))) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    found = coefficients(mixes, spread_scale(g["scale"], 4), g["base"], 4, 20, EPS)
    for name in ("pre", "post", "comb"):
        torch.testing.assert_close(getattr(found, name), g[f"block.{name}"], rtol=1e-5, atol=1e-6)
    assert difference(collapse(h, g["block.pre"]), g["block.collapsed"]) is None
    assert difference(mix(h, g["block.sublayer_out"], g["block.post"], g["block.comb"]), g["block.h_out"]) is None


def test_mix_sums_over_the_first_index() -> None:
    """comb[j, k] takes stream j into stream k: the transpose is a known mistake."""
    h = torch.tensor([[[1.0], [10.0]]], dtype=torch.bfloat16)
    comb = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    found = mix(h, torch.tensor([[100.0]], dtype=torch.bfloat16), torch.tensor([[0.5, 2.0]]), comb)
    assert found.flatten().tolist() == [50 + 1 + 30, 200 + 2 + 40]
