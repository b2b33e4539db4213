"""The mHC step of many rows, on a Hopper GPU, against the torch operations; elsewhere, when it is chosen and that it compiles."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.backend import SERVING
from forebay.model.ops.hyper_connections import Coefficients, collapse, mix
from forebay.model.ops.kernels.streams_ops import Connection, Input, StreamStep, Tuning, Wide
from forebay.model.ops.rms_norm import rms_norm

EPS, HC_EPS = 1e-20, 1e-6
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Gluon has no interpreter; this needs a Hopper GPU"
)


class Problem:
    def __init__(self, n: int, width: int, amplitude: float = 1.0) -> None:
        generator = torch.Generator("cuda").manual_seed(n)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        self.x, self.y = (random(n, 4, width) * amplitude).bfloat16(), (random(n, width) * amplitude).bfloat16()
        self.post, self.comb, self.pre = 2 * random(n, 4).sigmoid(), random(n, 4, 4).softmax(-1), random(n, 4).sigmoid()
        self.norm = random(width).bfloat16()
        self.following = Connection(random(24, 4 * width) * 0.05, random(24), random(24))
        half = {"dtype": torch.bfloat16}
        self.into = Input(
            empty(n, width, **half), empty(n, width, **half),
            empty(n, width, dtype=torch.uint8), empty(n, width // 32, dtype=torch.uint8),
        )  # fmt: skip
        self.made = Coefficients(empty(n, 4), empty(n, 4), empty(n, 4, 4))

    def run(self, stepper: StreamStep, out: Tensor) -> tuple[Tensor, ...]:
        stepper.mix(self.x, self.y, self.post, self.comb, out, self.pre, self.norm, self.into, self.following, self.made)
        return tuple(t.clone() for t in (out, *self.into, *self.made) if t is not None)


@hopper
@pytest.mark.parametrize(("n", "width"), [(65, 5120), (130, 2560), (512, 5120), (1100, 5120), (203, 128)])
@pytest.mark.parametrize("tuning", [Wide(), Wide(2, 5, 4, 4, 4)])
def test_step_of_many_rows(n: int, width: int, tuning: Wide) -> None:
    p = Problem(n, width)
    stepper = StreamStep(n, 4, width, EPS, HC_EPS, 20, "cuda", tuning)
    found = p.run(stepper, torch.empty_like(p.x))
    again = p.run(stepper, torch.empty_like(p.x))  # shows that the meeting places are as they were
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert not (stepper.met % 1024).any()
    out, want = found[0], mix(p.x, p.y, p.post, p.comb)
    assert torch.allclose(out.float(), want.float(), rtol=2**-7, atol=1e-3)
    assert (out != want).float().mean() < 1e-3  # fused multiplications and additions
    x = rms_norm(collapse(out, p.pre), p.norm, EPS)
    assert torch.allclose(p.into.x.float(), x.float(), rtol=2**-7, atol=1e-5)  # of millions of sums, some nearly cancel
    assert (p.into.x != x).float().mean() < 0.02
    assert p.into.rounded is not None and p.into.codes is not None and p.into.scales is not None
    assert torch.equal(p.into.rounded.float(), formats.fp8_round(p.into.x))
    codes, scales = formats.fp8_encode(p.into.x)
    assert torch.equal(p.into.codes, codes) and torch.equal(p.into.scales, scales)
    flat = out.flatten(1).double()
    mixes = (flat @ p.following.fn.double().T * (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()).float()
    for a, b in zip(p.made, SERVING.coefficients(mixes, p.following.scale, p.following.base, 4, 20, HC_EPS), strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=1e-6)


@hopper
@pytest.mark.parametrize("amplitude", [0.0, 1e-3, 300.0])
def test_as_the_other_kernel_and_in_place(amplitude: float) -> None:
    p, n, width = Problem(300, 5120, amplitude), 300, 5120
    others = p.run(StreamStep(n, 4, width, EPS, HC_EPS, 20, "cuda", Tuning(64, 32, 64, 2)), torch.empty_like(p.x))
    found = p.run(StreamStep(n, 4, width, EPS, HC_EPS, 20, "cuda", Wide()), p.x)
    assert (found[0] != others[0]).float().mean() < 1e-4  # as another fused multiplication may be chosen
    assert (found[1] != others[1]).float().mean() < 0.02  # the norm's sum is in another order
    for a, b in zip(found[5:], others[5:], strict=True):  # the other's tensor cores cut what they add up
        assert torch.allclose(a, b, rtol=3e-4, atol=3e-6)


def test_elsewhere_the_other_kernel_is_taken() -> None:
    assert StreamStep(4096, 4, 5120, EPS, HC_EPS, 20, "cpu")._kernel is None


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from forebay.model.ops.kernels import streams_wide
from forebay.model.ops.kernels.streams_wide import step_wide as kernel

def tiles(of, columns, layout):
    return f"tensordesc<{of}[16,{columns}],{layout!r}>"

constants = dict(D=5120, TILES=4, STAGES=5, SLOTS=4, KEPT=3, SPLITS=40, SP=64, TR=2)
constants |= dict(ITERATIONS=20, ROUNDED=True, CODES=False, LATE=3, REGISTERS=72, NORM_REGISTERS=64)
big, four = tiles("bf16", 128, streams_wide.TILES_SHARED), tiles("fp32", 4, streams_wide.FOUR_SHARED)
types = [big, big, big, four, tiles("fp32", 16, streams_wide.MATRIX_SHARED), four]
types += "*fp32 *fp32 *fp32 *bf16 *bf16 *bf16 *u8 *u8 *fp32 *fp32 *fp32 *fp32 *fp32 *i32 i32 i32 fp32 fp32".split()
names = [name for name in kernel.arg_names if name not in constants]
signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
source = GluonASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, values, whole)
done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(done.metadata.shared, done.asm["ptx"].count("mma.sync"))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU too: it fits, and a tile of 64 inputs and 24 coefficients in three parts takes as few products as it can."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert products == 4 * 3 * 3
