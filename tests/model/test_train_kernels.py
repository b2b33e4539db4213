"""Operations of the demo's training: torch forms against the served operations and plain formulas, kernels against the torch forms."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from forebay.model.demo.train import kernels
from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import coefficients, mix
from forebay.model.ops.sparse_attention import sparse_attention

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on CPU tensors, in Triton's interpreter. It cuts off where bf16 is stored, so results may be an ulp (2^-8) off."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * len(shape) + shape[-1])).to(dtype)


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """function(*inputs) and its gradients to them, for a random gradient of the result; inputs that are not floats have none."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*inputs)
    out.backward(random(*out.shape, seed=99, dtype=torch.float32).to(out.dtype))
    grads = [x.grad for x in inputs if x.requires_grad]
    assert all(g is not None for g in grads)
    return [out.detach(), *(g for g in grads if g is not None)]


def assert_near(here: list[Tensor], there: list[Tensor], limit: float) -> None:
    assert len(here) == len(there)
    for number, (a, b) in enumerate(zip(here, there, strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)
        assert error <= limit, (number, float(error))


class Attention:
    """A small problem: windows that grow, jump at a sequence's border, leave a gap and are empty; entries with unused slots."""

    heads, dim, keys, scale = 4, 32, 70, 0.2

    def __init__(self, topk: int | None, heads: int = 4) -> None:
        self.heads = heads
        start = [max(0, i - 15) for i in range(30)] + [30 + max(0, i - 15) for i in range(15)] + [54, 0, 69]
        count = [min(i + 1, 16) for i in range(30)] + [min(i + 1, 16) for i in range(15)] + [16, 0, 1]
        self.start, self.count = torch.tensor(start, dtype=torch.int32), torch.tensor(count, dtype=torch.int32)
        rows = len(start)
        self.q, self.window = random(rows, heads, self.dim), random(self.keys, self.dim)
        self.sink = random(heads, dtype=torch.float32)
        self.entries = self.index = None
        if topk is not None:
            self.entries = random(50, self.dim, seed=5)
            index = torch.rand((rows, 200), generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :topk]
            self.index = torch.where(index < 50, index, -1).to(torch.int32)
            self.index[3] = self.index[-2] = -1  # the row before the last has no key at all

    def inputs(self) -> list[Tensor]:
        return [self.q, self.window, self.sink] + ([] if self.entries is None else [self.entries])

    def by(self, function: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Tensor]:
        def run(q: Tensor, window: Tensor, sink: Tensor, entries: Tensor | None = None) -> Tensor:
            return function(q, window, self.start, self.count, entries, self.index, sink, self.scale)[0]

        return run

    def plain(self, q: Tensor, window: Tensor, sink: Tensor, entries: Tensor | None = None) -> Tensor:
        """Row by row, in whatever precision the inputs have."""
        out = []
        for i, (start, count) in enumerate(zip(self.start.tolist(), self.count.tolist(), strict=True)):
            keys = window[start : start + count]
            if entries is not None and self.index is not None:
                keys = torch.cat((keys, entries[self.index[i][self.index[i] >= 0].long()]))
            e = (q[i] @ keys.T * self.scale).exp()
            out.append(e @ keys / (e.sum(-1) + sink.exp()).unsqueeze(-1))
        return torch.stack(out)


@pytest.mark.parametrize("topk", [None, 64, 128])
def test_attention_in_torch_is_the_formula(topk: int | None) -> None:
    problem = Attention(topk)
    want = results(problem.plain, [x.double() for x in problem.inputs()])
    assert_near(results(problem.by(kernels.gathered_attention), problem.inputs()), want, 4e-3)


def test_attention_in_torch_is_the_served_one() -> None:
    problem = Attention(64)
    assert problem.entries is not None and problem.index is not None
    reach = torch.arange(16)
    place = (problem.start.unsqueeze(1) + reach).clamp(max=problem.keys - 1).long()
    kv = torch.cat((problem.window[place], problem.entries[problem.index.clamp(min=0).long()]), 1).float()
    valid = torch.cat((reach < problem.count.unsqueeze(1), problem.index >= 0), 1)
    want = sparse_attention(problem.q, kv, valid, problem.sink, problem.scale)
    out, mass = kernels.gathered_attention(
        problem.q, problem.window, problem.start, problem.count, problem.entries, problem.index, problem.sink, problem.scale, with_mass=True
    )
    assert_near([out], [want], 4e-3)
    assert not out[-2].any()
    assert mass is not None
    assert not mass[problem.index < 0].any()
    assert (mass.sum(-1) < problem.heads).all()


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("topk", "heads"), [(None, 4), (64, 4), (128, 3), (None, 8)])
def test_attention_kernels(topk: int | None, heads: int) -> None:
    problem = Attention(topk, heads)
    want = results(problem.by(kernels.gathered_attention_reference), problem.inputs())
    assert_near(results(problem.by(kernels.gathered_attention), problem.inputs()), want, 1e-2)


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("topk", [64, 128])
def test_attention_kernels_give_the_mass(topk: int) -> None:
    problem = Attention(topk)
    args = problem.q, problem.window, problem.start, problem.count, problem.entries, problem.index, problem.sink, problem.scale
    (out, mass), (want, want_mass) = (
        f(*args, with_mass=True) for f in (kernels.gathered_attention, kernels.gathered_attention_reference)
    )
    assert mass is not None and want_mass is not None
    assert_near([out], [want], 1e-2)
    assert_near([mass], [want_mass], 1e-5)


@pytest.mark.parametrize("iterations", [1, 2, 8])
def test_sinkhorn_in_torch_is_the_served_one(iterations: int) -> None:
    raw = 3 * random(20, 24, dtype=torch.float32)
    served = coefficients(raw, torch.ones(24), torch.zeros(24), 4, iterations, 1e-6).comb
    assert torch.equal(kernels.sinkhorn(raw[:, 8:].reshape(-1, 4, 4), iterations, 1e-6), served)


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("iterations", [1, 2, 8])
def test_sinkhorn_kernels(iterations: int) -> None:
    inputs = [3 * random(70, 4, 4, dtype=torch.float32)]
    want = results(lambda x: kernels.sinkhorn_reference(x, iterations, 1e-3), [x.double() for x in inputs])
    assert_near(results(lambda x: kernels.sinkhorn(x, iterations, 1e-3), inputs), want, 1e-5)


def stream_inputs(rows: int = 9, dim: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """streams, out, post, comb, pre, weight."""
    coefficient = [random(rows, *shape, dtype=torch.float32) for shape in ((4,), (4, 4), (4,))]
    return random(rows, 4, dim), random(rows, dim), coefficient[0], coefficient[1], coefficient[2], random(dim, dtype=torch.float32)


def test_streams_in_torch_are_the_formulas() -> None:
    streams, out, post, comb, pre, weight = stream_inputs()
    inputs = [streams, out, post, comb]
    assert torch.equal(kernels.mix_streams(*inputs), mix(*inputs))
    want = results(lambda x, y, p, c: p[..., None] * y[:, None] + torch.einsum("nsd,nst->ntd", x, c), [x.double() for x in inputs])
    assert_near(results(kernels.mix_streams, inputs), want, 4e-3)

    def normalised(x: Tensor, p: Tensor, w: Tensor) -> Tensor:
        y = torch.einsum("nsd,ns->nd", x, p)
        return y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w

    inputs = [streams, pre, weight]
    want = results(normalised, [x.double() for x in inputs])
    assert_near(results(lambda x, p, w: kernels.collapse_norm(x, p, w, 1e-5), inputs), want, 6e-3)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_streams_kernels() -> None:
    streams, out, post, comb, pre, weight = stream_inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        want_mix = results(kernels.mix_streams, [streams, out, post, comb])
        want_norm = results(lambda x, p, w: kernels.collapse_norm(x, p, w, 1e-5), [streams, pre, weight])
    assert_near(results(kernels.mix_streams, [streams, out, post, comb]), want_mix, 1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_NORM_PROGRAMS", 2)  # so that a program has several blocks of rows
        assert_near(results(lambda x, p, w: kernels.collapse_norm(x, p, w, 1e-5), [streams, pre, weight]), want_norm, 1e-2)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_projection_kernels() -> None:
    inputs = [random(150, 4, 64), random(24, 256, dtype=torch.float32)]
    want = results(lambda x, fn: kernels.mhc_project_reference(x, fn, 1e-5), inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_PROJECT_PROGRAMS", 2)
        out, dstreams, dfn = results(lambda x, fn: kernels.mhc_project(x, fn, 1e-5), inputs)
    assert_near([out, dfn], [want[0], want[2]], 1e-5)
    assert_near([dstreams], [want[1]], 1e-2)


def expert_inputs(rows: int = 40, experts: int = 6, inner: int = 32, dim: int = 64) -> list[Tensor]:
    """x, indices, weights, w_up, w_down; the last expert is never chosen."""
    indices = torch.rand((rows, experts - 1), generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :2]
    weights = random(rows, 2, dtype=torch.float32).abs()
    return [random(rows, dim), indices, weights, random(experts, 2 * inner, dim) / 4, random(experts, dim, inner) / 4]


def plain_experts(x: Tensor, indices: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    rows = []
    for i in range(x.shape[0]):
        total = torch.zeros_like(x[i])
        for e, weight in zip(indices[i].tolist(), weights[i], strict=True):
            gate, up = (w_up[e] @ x[i]).chunk(2)
            total = total + w_down[e] @ (weight * torch.nn.functional.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0))
        rows.append(total)
    return torch.stack(rows)


def test_experts_in_torch_are_the_formula() -> None:
    inputs = expert_inputs()
    want = results(plain_experts, [x.double() if x.is_floating_point() else x for x in inputs])
    assert_near(results(lambda *args: kernels.grouped_experts(*args, 2.0, lambda h: h), inputs), want, 1e-2)


def test_roundings_pass_the_gradient_unchanged() -> None:
    x = random(3, 32).requires_grad_()
    y = kernels.straight_through(x, formats.fp8_round)
    assert torch.equal(y, formats.fp8_round(x.detach()))
    grad = random(3, 32, seed=1, dtype=torch.float32)
    y.backward(grad)
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, grad.to(torch.bfloat16))


ROUNDINGS = [
    (kernels.fp8_round, formats.fp8_round),
    (kernels.index_round, formats.index_round),
    (kernels.main_round, lambda x: formats.main_decode(*formats.main_encode(x))),
]


def rounding_cases(dtype: torch.dtype) -> Tensor:
    """Magnitudes from below every format's least to above its greatest, ties, zeros."""
    x = random(400, 32, dtype=torch.float32) * torch.logspace(-12, 6, 400).unsqueeze(1)
    ties = torch.tensor([0.0, -0.0, *(i / 16 for i in range(29)), 6.0])
    return torch.cat((x, torch.outer(torch.tensor([1.0, -1.0, 2.0, 16.0, 448 / 6, 1e-3, 1e-6]), ties))).to(dtype)


@pytest.mark.parametrize(("rounding", "reference"), ROUNDINGS, ids=["fp8", "index", "main"])
def test_roundings_fit_bf16(rounding: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]) -> None:
    x = rounding_cases(torch.float32)
    assert torch.equal(rounding(x).float(), reference(x))


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rounding", "reference"), ROUNDINGS, ids=["fp8", "index", "main"])
def test_rounding_kernel_is_exact(rounding: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = rounding_cases(dtype)
    assert torch.equal(rounding(x).float(), reference(x))


def test_layout_of_experts() -> None:
    indices = torch.tensor([[0, 3], [3, 1], [3, 0], *[[1, 3]] * 16])
    place, source, offsets = kernels.expert_layout(indices, 6)
    assert offsets.tolist() == [16, 48, 64, 96, 112, len(source)]
    assert (source[place] == torch.arange(19).repeat_interleave(2)).all()
    assert (torch.searchsorted(offsets, place.int(), right=True) == indices.flatten()).all()
    assert (source == 19).sum() == len(source) - 38


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("limit", "rounding", "error"), [(0.0, torch.clone, 1e-2), (2.0, torch.clone, 1e-2), (2.0, formats.fp8_round, 4e-2)]
)
def test_experts_kernels(limit: float, rounding: Callable[[Tensor], Tensor], error: float) -> None:
    """What the interpreter cut off moves some values to the FP8 number beside."""
    inputs = expert_inputs()
    want = results(lambda *args: kernels.grouped_experts_reference(*args, limit, rounding), inputs)
    assert_near(results(lambda *args: kernels.grouped_experts(*args, limit, rounding), inputs), want, error)
