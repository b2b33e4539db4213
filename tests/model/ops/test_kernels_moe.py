"""The kernels of the feed-forward part for few rows, on a GPU or in Triton's interpreter, against the torch operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.model.experts import RoutedExperts
from forebay.model.ops import formats
from forebay.model.ops.backend import SERVING
from forebay.model.ops.kernels import fp8, moe_ops, skinny
from forebay.model.ops.kernels.moe_ops import Meeting, Tuning
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, TileCache, quantised_linear
from forebay.model.ops.router import route
from forebay.model.ops.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((moe_ops, "route experts fp8_linear"),)
CACHE = TileCache(1 << 20)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bytes_of(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fp8_codes(*shape: int) -> Tensor:
    codes = bytes_of(*shape)
    codes[(codes & 127) == 127] = 7
    return codes


def assert_near(here: Tensor, there: Tensor) -> None:
    """Equal but for the order of sums: a few values are a last bit of bf16 or FP8 off, as seen in what is made of them."""
    assert not here.isnan().any()
    error = (here.double() - there.double()).norm() / there.double().norm().clamp(min=1e-30)
    assert error < 4e-3, float(error)


@pytest.mark.parametrize(
    ("n", "d", "experts", "topk", "normalise"),
    [(1, 96, 24, 6, True), (19, 160, 70, 3, True), (2, 64, 4, 1, False), (40, 64, 8, 2, True)],  # the last has a single program on a GPU
)
def test_route(n: int, d: int, experts: int, topk: int, normalise: bool) -> None:
    x, gate = (random(n, d) * 3).bfloat16(), random(experts, d, seed=1).bfloat16()
    x[0] *= 8  # scores far below where log(1 + e^l) is 0
    bias, bias_image = random(experts, seed=2), random(experts, seed=3)
    meeting = Meeting(20 * n * experts, 16, "cpu")
    for mask in (None, torch.arange(n) % 2 == 1):
        indices, weights = torch.empty((n, topk), dtype=torch.int32), torch.empty((n, topk))
        moe_ops.route(x, gate, bias, bias_image, mask, indices, weights, meeting, scale=1.5, normalise=normalise, temperature=2.0)
        lean = bias if mask is None else torch.where(mask.unsqueeze(1), bias_image, bias)
        want, factors = route(x.float() @ gate.float().T / 2.0, lean, topk, 1.5, normalise=normalise)
        assert torch.equal(indices.long(), want)
        assert torch.allclose(weights, factors, rtol=1e-4, atol=1e-9)
        assert not meeting.arrived.any()


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("blocks", "programs"), [(1, 1), (1, 3), (1, 40), (5, 40), (128, 12)])
def test_programs_that_choose_are_among_a_blocks_own(rows: int, blocks: int, programs: int) -> None:
    helpers = moe_ops._helpers(rows, blocks, programs)
    assert 1 <= helpers <= programs and rows % helpers == 0
    assert helpers == 1 or blocks * helpers <= 32
    assert (rows, blocks, programs) != (64, 1, 40) or helpers == 16


def test_route_of_padding() -> None:
    x, gate, bias = random(4, 64).bfloat16(), random(8, 64, seed=1).bfloat16(), random(8, seed=2)
    found = [(torch.empty((4, 2), dtype=torch.int32), torch.empty((4, 2))) for _ in range(2)]
    meeting = Meeting(4096, 2, "cpu")
    for (indices, weights), position in zip(found, (None, torch.tensor([5, -1, 0, -1])), strict=True):
        moe_ops.route(x, gate, bias, bias, None, indices, weights, meeting, scale=1.5, normalise=True, position=position)
    (indices, weights), (padded, nothing) = found
    assert torch.equal(padded[::2], indices[::2]) and torch.equal(nothing[::2], weights[::2])
    assert padded[1::2].eq(-1).all() and not nothing[1::2].any()


def test_route_equal_scores_take_the_lower_expert() -> None:
    indices, weights = torch.empty((2, 3), dtype=torch.int32), torch.empty((2, 3))
    zero = torch.zeros(16)
    moe_ops.route(
        torch.zeros((2, 64), dtype=torch.bfloat16), random(16, 64).bfloat16(), zero, zero, None, indices, weights, Meeting(4096, 2, "cpu"),
        scale=1.5, normalise=True,
    )  # fmt: skip
    assert indices.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 0.5))


@pytest.mark.parametrize(
    ("n", "d", "inter", "experts", "topk", "limit"), [(1, 96, 32, 4, 2, 10.0), (13, 64, 32, 3, 2, 0.0), (2, 64, 64, 4, 1, 0.5)]
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
    routed = RoutedExperts(kept, CACHE, limit)(x.float(), indices.long(), weights)
    s_up = fp8_codes(2 * inter, d), bytes_of(2 * inter // 32, d // 32, low=116, high=122)
    s_down = fp8_codes(d, inter), bytes_of(d // 32, inter // 32, low=116, high=122)
    gate, rise = quantised_linear(x.float(), Fp8Weight(*s_up, CACHE)).chunk(2, -1)
    shared = quantised_linear(formats.fp8_round(swiglu(gate, rise, limit)), Fp8Weight(*s_down, CACHE)).float()
    meeting = Meeting(1, 8, "cpu")
    h, parts = torch.empty((n * (topk + 1), inter), dtype=torch.bfloat16), torch.empty((n * (topk + 1), d), dtype=torch.bfloat16)
    for tuning in (None, Tuning(split=2, side=2, rows=32, batch=16)):
        out = torch.full((n, d), torch.nan, dtype=torch.bfloat16)
        args = (s_up, s_down, h, parts, out, meeting)
        moe_ops.experts(x, up, down, indices, weights, limit, *args, up_tuning=tuning, down_tuning=tuning)
        assert_near(out, (routed + shared).bfloat16())
        assert not meeting.arrived.any()
    moe_ops.experts(x, up, down, indices, weights, limit, None, None, h[: n * topk], parts[: n * topk], out, meeting)
    assert_near(out, routed.bfloat16())
    if n > 1:  # padding: nothing of it is looked at, and it is nothing
        want = out.clone()
        want[1], indices[1] = 0, -1
        h.fill_(torch.nan)
        parts.fill_(torch.nan)
        moe_ops.experts(x, up, down, indices, weights, limit, None, None, h, parts, out, meeting)
        assert torch.equal(out, want)
        h.fill_(torch.nan)
        parts.fill_(torch.nan)
        moe_ops.experts(x, up, down, torch.full_like(indices, -1), weights, limit, s_up, s_down, h, parts, out, meeting)
        assert not out.any() and h.isnan().all() and parts.isnan().all()


@pytest.mark.parametrize(
    ("n", "k", "outs", "groups"), [(1, 160, 96, 1), (16, 64, 32, 1), (3, 96, 128, 2), (2, 512, 64, 1), (17, 160, 128, 2), (66, 160, 96, 1)]
)
def test_fp8_linear(n: int, k: int, outs: int, groups: int) -> None:
    codes, scales = fp8_codes(outs, k), bytes_of(outs // 32, k // 32, low=110, high=125)
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
        assert not meeting.arrived.any()
    moe_ops.fp8_linear(x, codes, scales, rounded := torch.empty_like(out), meeting, groups=groups, round_output=True)
    assert torch.equal(rounded.float(), formats.fp8_round(out))


def test_no_rows() -> None:
    nothing = torch.empty((0, 64), dtype=torch.bfloat16)
    moe_ops.fp8_linear(nothing, bytes_of(32, 64), bytes_of(1, 2), nothing[:, :32], Meeting(0, 0, "cpu"))


def half(word: Tensor, high: int) -> Tensor:
    """A bf16 of a pair."""
    return ((word >> 16 * high) & 0xFFFF).to(torch.int32).bitwise_left_shift(16).view(torch.float32).double()


def run_ptx(text: str, inputs: list[Tensor], outs: int) -> list[Tensor]:
    """The few integer instructions of the kernels' bit tricks, and bf16 pairs multiplied, on tensors of int64."""
    lines = [line.rstrip(";") for line in text.split("\n")[2:-1]]
    registers: dict[str, Tensor] = {f"${outs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in lines:
        operation, rest = line.split(" ", 1)
        target, *names = rest.split(", ")
        a, *others = (value(name) for name in names)
        match operation.split("."):
            case ["shr", _]:
                done = a >> others[0]
            case ["and", _]:
                done = a & others[0]
            case ["mul", "lo", _]:
                done = (a * others[0]) & 0xFFFFFFFF
            case ["mad", "lo", _]:
                done = (a * others[0] + others[1]) & 0xFFFFFFFF
            case ["lop3", _]:
                assert int(names[3], 0) == 0xEA
                done = (a & others[0]) | others[1]
            case ["mul", "rn", "bf16x2"]:
                done = torch.stack([half(a, i) * half(others[0], i) for i in range(2)])
            case _:
                raise ValueError(line)
        registers[target] = done
    return [registers[f"${i}"] for i in range(outs)]


@pytest.mark.parametrize(("text", "bits", "lift"), [("E2M1", 4, 126), ("E4M3", 8, 120)])
def test_packed_decoding_is_exact_for_every_code(text: str, bits: int, lift: int) -> None:
    """Every pair of bytes as a 16-bit element in either half of a word, with all scales that are said to hold."""
    a, b = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    first, second = a | b << 8, b | a << 8
    for byte in (69, 96, 127, 192):
        power = torch.tensor((byte + lift - 64) << 7)
        assert (byte + lift - 64) < 255
        outs = run_ptx(getattr(skinny, text), [first | second << 16, power | power << 16], 16 // bits)
        for i, pair in enumerate(outs):
            for element, found in zip((first, second), pair, strict=True):
                code = ((element >> bits * i) & ((1 << bits) - 1)).to(torch.uint8)
                decoded = formats.e2m1_decode(code)[..., ::2] if bits == 4 else formats.e4m3_decode(code)
                want = decoded.reshape(code.shape).double() * 2.0 ** (byte - 127 - 64)
                assert torch.equal(found, want)
                assert torch.equal(found.bfloat16().double(), found)


def test_decoding_without_scales_is_exact_for_every_code() -> None:
    a, b = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    first, second = a | b << 8, b | a << 8
    for i, pair in enumerate(run_ptx(fp8.E4M3, [first | second << 16, torch.tensor(16)], 2)):
        for element, high in ((first, 0), (second, 1)):
            code = ((element >> 8 * i) & 0xFF).to(torch.uint8)
            assert torch.equal(half(pair, high), formats.e4m3_decode(code).reshape(code.shape).double() * 2.0**-120)
