"""The kernels of the feed-forward part for few rows, in Triton's interpreter, against the torch operations."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from forebay.model.experts import RoutedExperts
from forebay.model.ops import formats
from forebay.model.ops.backend import SERVING
from forebay.model.ops.kernels import moe_ops
from forebay.model.ops.kernels.moe_ops import Meeting
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, TileCache, quantised_linear
from forebay.model.ops.router import route

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
CACHE = TileCache(1 << 20)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bytes_of(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_near(here: Tensor, there: Tensor) -> None:
    """Equal but for the order of sums: a few values are a last bit of bf16 or FP8 off, as seen in what is made of them."""
    assert not here.isnan().any()
    error = (here.double() - there.double()).norm() / there.double().norm().clamp(min=1e-30)
    assert error < 4e-3, float(error)


@pytest.mark.parametrize(("n", "d", "experts", "topk", "normalise"), [(1, 96, 24, 6, True), (19, 160, 70, 3, True), (2, 64, 4, 1, False)])
def test_route(n: int, d: int, experts: int, topk: int, normalise: bool) -> None:
    x, gate = (random(n, d) * 3).bfloat16(), random(experts, d, seed=1).bfloat16()
    x[0] *= 8  # scores far below where log(1 + e^l) is 0
    bias, bias_image = random(experts, seed=2), random(experts, seed=3)
    meeting = Meeting(20 * n * experts, 4, "cpu")
    for mask in (None, torch.arange(n) % 2 == 1):
        indices, weights = torch.empty((n, topk), dtype=torch.int32), torch.empty((n, topk))
        moe_ops.route(x, gate, bias, bias_image, mask, indices, weights, meeting, scale=1.5, normalise=normalise, temperature=2.0)
        lean = bias if mask is None else torch.where(mask.unsqueeze(1), bias_image, bias)
        want, factors = route(x.float() @ gate.float().T / 2.0, lean, topk, 1.5, normalise=normalise)
        assert torch.equal(indices.long(), want)
        assert torch.allclose(weights, factors, rtol=1e-4, atol=1e-9)


def test_route_equal_scores_take_the_lower_expert() -> None:
    indices, weights = torch.empty((2, 3), dtype=torch.int32), torch.empty((2, 3))
    zero = torch.zeros(16)
    moe_ops.route(
        torch.zeros((2, 64), dtype=torch.bfloat16), random(16, 64).bfloat16(), zero, zero, None, indices, weights, Meeting(4096, 1, "cpu"),
        scale=1.5, normalise=True,
    )  # fmt: skip
    assert indices.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 0.5))


@pytest.mark.parametrize(("n", "topk", "experts"), [(1, 6, 12), (40, 3, 5), (3, 1, 4)])
def test_sort_assignments(n: int, topk: int, experts: int) -> None:
    indices = random(n, experts).argsort(1)[:, :topk].to(torch.int32)
    order, offsets = torch.empty(n * topk, dtype=torch.int32), torch.empty(experts + 1, dtype=torch.int32)
    moe_ops.sort_assignments(indices, experts, order, offsets)
    flat = indices.flatten()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    assert offsets.tolist() == [0, *flat.long().bincount(minlength=experts).cumsum(0).tolist()]


@pytest.mark.parametrize(
    ("n", "d", "inter", "experts", "topk", "limit"), [(1, 96, 64, 4, 3, 10.0), (19, 64, 96, 3, 2, 0.0), (2, 64, 32, 4, 1, 0.5)]
)
def test_experts(n: int, d: int, inter: int, experts: int, topk: int, limit: float) -> None:
    up = bytes_of(experts, 2 * inter, d // 2), bytes_of(experts, 2 * inter, d // 32, low=122, high=126)
    down = bytes_of(experts, d, inter // 2), bytes_of(experts, d, inter // 32, low=122, high=126)
    up[1][0, 0, 0], down[1][0, 0, 0] = 0, 0
    up[1][1, 0, 0], down[1][1, 0, 0] = 130, 131
    x = formats.fp8_round(random(n, d)).bfloat16()
    indices, weights = random(n, experts).argsort(1)[:, :topk].to(torch.int32).contiguous(), random(n, topk).sigmoid()
    kept = [
        (Mxfp4Weight(up[0][e, :inter], up[1][e, :inter], CACHE), Mxfp4Weight(down[0][e], down[1][e], CACHE),
         Mxfp4Weight(up[0][e, inter:], up[1][e, inter:], CACHE)) for e in range(experts)
    ]  # fmt: skip
    want = RoutedExperts(kept, CACHE, limit)(x.float(), indices.long(), weights)
    meeting = Meeting(1, 4, "cpu")
    for shared in (None, random(n, d, seed=9).bfloat16()):
        h, parts = torch.empty((n * topk, inter), dtype=torch.bfloat16), torch.empty((n * topk, d), dtype=torch.bfloat16)
        out = torch.empty((n, d), dtype=torch.bfloat16)
        moe_ops.experts(x, up, down, indices, weights, limit, shared, h, parts, out, meeting)
        assert_near(out, (want if shared is None else want + shared.float()).bfloat16())


@pytest.mark.parametrize(("n", "k", "outs", "groups"), [(1, 160, 96, 1), (17, 64, 32, 1), (3, 96, 128, 2), (2, 512, 64, 1)])
def test_fp8_linear(n: int, k: int, outs: int, groups: int) -> None:
    codes, scales = bytes_of(outs, k), bytes_of(outs // 32, k // 32, low=110, high=125)
    codes[(codes & 127) == 127] = 7
    x = random(n, groups * k).bfloat16()
    meeting = Meeting(17 * n * outs, 16, "cpu")
    if groups == 1:
        want = quantised_linear(x.float(), Fp8Weight(codes, scales, CACHE))
    else:
        size = outs // groups
        weights = [Fp8Weight(codes, scales, CACHE, (g * size, (g + 1) * size)) for g in range(groups)]
        want = SERVING.grouped_linear(x.unflatten(1, (2 * groups, -1)), weights)
    for _ in range(2):
        out = torch.empty((n, outs), dtype=torch.bfloat16)
        moe_ops.fp8_linear(x, codes, scales, out, meeting, groups=groups)
        assert_near(out, want)
    moe_ops.fp8_linear(x, codes, scales, rounded := torch.empty_like(out), meeting, groups=groups, round_output=True)
    assert torch.equal(rounded.float(), formats.fp8_round(out))


def test_no_rows() -> None:
    nothing = torch.empty((0, 64), dtype=torch.bfloat16)
    moe_ops.fp8_linear(nothing, bytes_of(32, 64), bytes_of(1, 2), nothing[:, :32], Meeting(0, 0, "cpu"))
