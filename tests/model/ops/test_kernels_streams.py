"""The kernels of the residual streams and the Engram read, on a GPU or in Triton's interpreter, against the torch operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.model.engram_map import EngramTable
from forebay.model.ops import formats
from forebay.model.ops.backend import SERVING
from forebay.model.ops.engram_gate import engram_gate
from forebay.model.ops.hyper_connections import Coefficients, collapse, mix
from forebay.model.ops.kernels import streams_ops
from forebay.model.ops.kernels.streams_ops import Connection, Input, StreamStep, Tuning, cut, tiles
from forebay.model.ops.rms_norm import rms_norm

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((StreamStep, "mix read first last"), (streams_ops, "engram_gather engram_gate"))
EPS, HC_EPS = 1e-20, 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Problem:
    """One sub-layer's update and what follows it."""

    def __init__(self, n: int, s: int, d: int, iterations: int = 20, amplitude: float = 1.0) -> None:
        self.n, self.s, self.d, self.iterations = n, s, d, iterations
        count = 2 * s + s * s
        self.x = (random(n, s, d) * amplitude).bfloat16()
        self.y = (random(n, d, seed=1) * amplitude).bfloat16()
        self.pre, self.post = random(n, s, seed=2).sigmoid(), 2 * random(n, s, seed=3).sigmoid()
        self.comb = random(n, s, s, seed=4).softmax(-1)
        self.norm = random(d, seed=5).bfloat16()
        self.following = Connection(random(count, s * d) * 0.1, random(count, seed=6), random(count, seed=7))
        self.stepper = StreamStep(n, s, d, EPS, HC_EPS, iterations, "cpu")

    def places(self) -> tuple[Input, Coefficients]:
        n, s, d = self.n, self.s, self.d
        into = Input(
            torch.empty((n, d), dtype=torch.bfloat16), torch.empty((n, d), dtype=torch.bfloat16),
            torch.empty((n, d), dtype=torch.uint8), torch.empty((n, d // 32), dtype=torch.uint8),
        )  # fmt: skip
        return into, Coefficients(torch.empty((n, s)), torch.empty((n, s)), torch.empty((n, s, s)))

    def check(self, streams: Tensor, pre: Tensor, into: Input, made: Coefficients) -> None:
        """The input and coefficients made of the new streams."""
        x = rms_norm(collapse(streams, pre), self.norm, EPS)
        # the order of the norm's sum may differ, and with it the last bit of a value
        assert torch.allclose(into.x.float(), x.float(), rtol=2**-7, atol=0)
        assert (into.x != x).float().mean() < 0.02
        assert into.rounded is not None and into.codes is not None and into.scales is not None
        assert torch.equal(into.rounded.float(), formats.fp8_round(into.x))
        codes, scales = formats.fp8_encode(into.x)
        assert torch.equal(into.codes, codes) and torch.equal(into.scales, scales)
        mixes = self.project(streams)
        want = SERVING.coefficients(mixes, self.following.scale, self.following.base, self.s, self.iterations, HC_EPS)
        for a, b in zip(made, want, strict=True):
            assert torch.allclose(a, b, rtol=2e-5, atol=1e-6)

    def project(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(1).double()
        return (flat @ self.following.fn.double().T * (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()).float()


@pytest.mark.parametrize(("n", "s", "d", "amplitude"), [(1, 4, 160, 1.0), (5, 2, 64, 1e-3), (17, 4, 96, 300.0)])
def test_step(n: int, s: int, d: int, amplitude: float) -> None:
    p = Problem(n, s, d, amplitude=amplitude)
    into, made = p.places()
    out = torch.empty_like(p.x)
    for _ in range(2):  # the second time shows that the meeting place is as it was
        p.stepper.mix(p.x, p.y, p.post, p.comb, out, p.pre, p.norm, into, p.following, made)
        want = mix(p.x, p.y, p.post, p.comb)
        assert torch.equal(out, want)
        p.check(want, p.pre, into, made)
        assert not (p.stepper.arrived % 1024).any()


@pytest.mark.parametrize("tuning", [Tuning(16, 64, 128, 2), Tuning(16, 256, 256), Tuning(64, 32, 160, 2)])
def test_step_of_other_tiles(tuning: Tuning) -> None:
    """Several row blocks of several tiles; written over the old streams."""
    p = Problem(19, 4, 160)
    p.stepper = StreamStep(19, 4, 160, EPS, HC_EPS, 20, "cpu", tuning)
    p.following = p.following._replace(parts=cut(p.following.fn, 4))
    into, made = p.places()
    want = mix(p.x, p.y, p.post, p.comb)
    p.stepper.mix(p.x, p.y, p.post, p.comb, p.x, p.pre, p.norm, into, p.following, made)
    assert torch.equal(p.x, want)
    p.check(want, p.pre, into, made)


def test_read_after_an_engram() -> None:
    p = Problem(3, 4, 64)
    into, made = p.places()
    before = p.x.clone()
    p.stepper.read(p.x, p.pre, p.norm, into, p.following, made)
    assert torch.equal(p.x, before)
    p.check(p.x, p.pre, into, made)


def test_mix_alone_and_last() -> None:
    p = Problem(3, 4, 64)
    want = mix(p.x, p.y, p.post, p.comb)
    out, hidden = torch.empty_like(p.x), torch.empty_like(p.y)
    p.stepper.mix(p.x, p.y, p.post, p.comb, out)
    p.stepper.last(p.x, p.y, p.post, p.comb, p.pre, hidden)
    assert torch.equal(out, want)
    assert torch.equal(hidden, collapse(want, p.pre))


def test_first_streams() -> None:
    p = Problem(4, 4, 64)
    embedding, tokens = random(9, 64).bfloat16(), torch.tensor([8, 0, 3, 3])
    into, made = p.places()
    p.stepper.first(embedding, tokens, p.x, p.norm, into, p.following, made)
    want = embedding[tokens].unsqueeze(1).repeat(1, 4, 1)
    assert torch.equal(p.x, want)
    p.check(want, torch.tensor([[1.0, 0, 0, 0]]).repeat(4, 1), into, made)


def test_zero_streams_and_no_rows() -> None:
    p = Problem(2, 4, 64)
    p.x.zero_()
    p.y.zero_()
    into, made = p.places()
    p.stepper.mix(p.x, p.y, p.post, p.comb, p.x, p.pre, p.norm, into, p.following, made)
    p.check(p.x, p.pre, into, made)
    p.stepper.mix(p.x[:0], p.y[:0], p.post[:0], p.comb[:0], p.x[:0])


def test_cut() -> None:
    fn = random(24, 256)
    parts = cut(fn, 4)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(0).transpose(1, 2).flatten(1), fn.double())


def test_tiles() -> None:
    for n in (1, 16, 17, 64, 512, 1056, 1057, 4096, 5000):
        for width in (64, 160, 5120):
            for tuning in streams_ops.tuning_space(n):
                for programs in (None, 264):
                    t = tiles(n, width, tuning, programs)
                    assert t.chunk % t.columns == 0 and (t.splits - 1) * t.chunk < width <= t.splits * t.chunk
                    assert 1 <= t.groups <= -(-n // t.rows)
                    assert programs is None or t.groups * t.splits <= programs


def test_buffers_hold_every_number_of_rows() -> None:
    for rows in (1, 64, 128, 512, 1024, 4096):
        stepper = StreamStep(rows, 4, 5120, EPS, HC_EPS, 20, "cpu")
        for n in {1, 2, 16, 17, 65, 192, 193, rows - 1, rows}:
            if 0 < n <= rows:
                t = tiles(n, 5120, streams_ops.default_tuning(n), None)
                assert 2 * t.groups * t.splits * t.rows <= stepper.inner.numel(), (rows, n)


def test_engram_gather() -> None:
    numbers = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (7, 64), dtype=torch.uint8, generator=numbers)
    codes[(codes & 127) == 127] = 5
    codes[2] = 0
    scales = torch.randint(96, 140, (7, 2), dtype=torch.uint8, generator=numbers)
    scales[1] = torch.tensor([0, 1])
    ids = torch.tensor([[0, 1, 2], [6, 6, 4], [3, 5, 0]])
    want = EngramTable(codes, scales).read(ids)
    rounded = torch.empty(want.shape, dtype=torch.bfloat16)
    out, out_scales = torch.empty(want.shape, dtype=torch.uint8), torch.empty((3, 6), dtype=torch.uint8)
    streams_ops.engram_gather(codes, scales, ids, rounded, out, out_scales)
    assert torch.equal(rounded.float(), formats.fp8_round(want))
    for a, b in zip((out, out_scales), formats.fp8_encode(want), strict=True):
        assert torch.equal(a, b)
    folded = torch.empty_like(rounded)
    streams_ops.engram_gather(codes, scales, ids + 14 * torch.arange(3), folded, modulo=7)
    assert torch.equal(folded, rounded)
    codes[6, 40] = 127
    streams_ops.engram_gather(codes, scales, ids, rounded)
    assert rounded.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(("n", "s", "d"), [(3, 4, 96), (2, 2, 64)])
def test_engram_gate(n: int, s: int, d: int) -> None:
    x, z = random(n, s, d).bfloat16(), random(n, (s + 1) * d, seed=1).bfloat16()
    q, k = random(s, d, seed=2).bfloat16(), random(s, d, seed=3).bfloat16()
    z[0, :d] = 0  # a product of zero, whose sign counts
    mask = torch.tensor([True, False, True][:n])
    for text in (None, mask):
        out = torch.empty_like(x)
        streams_ops.engram_gate(x, z, q, k, EPS, text, out)
        want = engram_gate(x, z[:, : s * d].unflatten(1, (s, d)), z[:, s * d :], q.float() * k.float(), EPS, text)
        assert torch.allclose(out.float(), want.float(), rtol=2**-7, atol=2**-7)
        assert (out != want).float().mean() < 0.01
