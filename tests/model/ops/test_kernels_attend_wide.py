"""The attention kernel for many rows, on a Hopper GPU, against the one for any GPU; elsewhere, when it is chosen and that it compiles."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.model.ops.kernels import attend_ops
from forebay.model.ops.kernels.attend_ops import Plan, attend, plan
from stored_attention import DEMO, REAL, Problem, assert_near

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((attend_ops, "attend"),)

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Gluon has no interpreter; this needs a Hopper GPU"
)
MANY = ((500, 90, 0), (0, 70, 0), (250, 30, 245))  # more rows than processors, of all lengths


def both(problem: Problem, *, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """What the kernel for many rows and the other one find."""
    found = []
    for knobs in ({"wide": True}, {}):
        out = torch.full_like(problem.q, float("nan"))
        args = problem.q, problem.rings, problem.fresh, problem.entries, problem.sink, problem.scale, problem.rows, out
        attend(*args, rotate=rotate, tuning=knobs)
        found.append(out)
    return found[0], found[1]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Sums are in another order, so that some numbers round the other way: few."""
    assert_near(found, expected, 1e-3)
    assert (found == expected).float().mean() > 0.98


@hopper
def test_many_rows() -> None:
    problem = Problem(REAL, MANY, padding=7)
    found, expected = both(problem)
    assert_same(found, expected)
    assert not torch.equal(found, expected)  # another kernel did run
    assert not found[-7:].any()


@hopper
@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 300.0, 6 * 448.0])
def test_scores_of_any_size(magnitude: float) -> None:
    assert_same(*both(Problem(replace(REAL, magnitude=magnitude), ((400, 5, 0), (0, 5, 0), (250, 5, 245)))))


@hopper
def test_sink() -> None:
    """So large that nothing is left, and so small that it takes nothing."""
    problem = Problem(REAL)
    problem.sink = torch.full((REAL.heads,), 1e4)
    assert not both(problem)[0].any()
    problem.sink = -problem.sink
    found, expected = both(problem)
    assert_same(found[:-1], expected[:-1])
    assert found.isfinite().all()


@hopper
def test_other_shapes() -> None:
    """Heads that are padded, an odd number of tiles that are not full, blocks of fewer entries, fewer rotated channels."""
    assert_same(*both(Problem(replace(REAL, heads=40, window=130, topk=100, ratio=2, rope=16))))


@hopper
def test_without_entries_and_rotation() -> None:
    problem = Problem(REAL)
    problem.entries = None
    assert_same(*both(problem, rotate=False))


@hopper
def test_entries_with_holes_and_without_a_window() -> None:
    problem = Problem(REAL, MANY)
    assert problem.entries is not None
    selected = problem.entries.selected
    selected[torch.rand(selected.shape, generator=torch.Generator().manual_seed(3)) < 0.5] = -1
    selected[7] = -1
    problem.rows = replace(problem.rows, floor=torch.tensor([10_000, 0, 245], dtype=torch.int32))
    assert_same(*both(problem))


@hopper
def test_every_stored_number() -> None:
    """All codes with the least, the largest and some other scale, of both formats, read back exactly: one key a row, no sink."""
    problem = Problem(REAL, ((600, 3, 1000),), padding=0)
    problem.sink = torch.full((REAL.heads,), -1e30)
    assert problem.entries is not None
    problem.entries.selected[:, 1:] = -1
    problem.packed[:] = torch.arange(256, dtype=torch.uint8)
    problem.factors[:] = torch.cat((torch.tensor([1, 2, 7, 8, 0x7E], dtype=torch.uint8), torch.arange(20, 47, dtype=torch.uint8)))
    start, per_block = problem.entries.codes, problem.entries.per_block
    problem.entries.pool[:, start : start + per_block * 256] = problem.packed.flatten(1)
    problem.entries.pool[:, problem.entries.scales : problem.entries.scales + per_block * 32] = problem.factors.flatten(1)
    assert torch.equal(both(problem)[0], problem.expected())
    problem = Problem(REAL, ((200, 1, 200), (300, 1, 300), (400, 1, 400)), padding=0)
    problem.sink = torch.full((REAL.heads,), -1e30)
    problem.entries = None
    every = torch.arange(256, dtype=torch.uint8)
    every = torch.where((every & 127) == 127, 0, every)  # NaN
    problem.fresh = torch.cat((every.repeat(3, 2), torch.tensor([[105], [127], [182]], dtype=torch.uint8).expand(-1, 16)), 1)
    found, expected = both(problem, rotate=False)
    assert torch.equal(found, expected)
    assert torch.equal(found, problem.expected())  # with one key, queries do not matter


@hopper
def test_results_repeat() -> None:
    problem = Problem(REAL, MANY)
    first = both(problem)[0]
    for _ in range(5):
        assert torch.equal(both(problem)[0], first)


@hopper
def test_against_the_torch_operation() -> None:
    problem = Problem(REAL, ((600, 1, 0), (0, 1, 0)), padding=0)
    assert_near(both(problem)[0], problem.expected(), 1e-3)


def test_chosen_for_many_rows_of_the_real_network() -> None:
    assert plan(512, 64, 512, 128, 512) == plan(128, 64, 512, 128, 0) == Plan(wide=True)
    assert not plan(8, 64, 512, 128, 512).wide
    assert not plan(512, 64, 512, 128, 512, wide=False).wide
    assert not plan(512, 8, 512, 128, 512).wide
    assert not plan(512, 64, 256, 128, 512).wide


def test_elsewhere_the_other_kernel_is_taken() -> None:
    problem = Problem(replace(DEMO, window=8, topk=8), ((40, 1, 0),), padding=0)
    found, expected = both(problem)
    assert_near(found, expected)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from forebay.model.ops.kernels.attend_wide import attend_wide as kernel

constants = dict(H=64, R=64, W=128, RB=528, TOPK=512, PER_BLOCK=128, BLOCK_BYTES=113920, ROTATE=True, REGISTERS=192, AHEAD=2)
types = "i32 *bf16 *bf16 *fp32 *fp32 *i64" + " *i32" * 7 + " *u8" * 3 + " i32 i32 fp32 i32 i32"
names = [name for name in kernel.arg_names if name not in constants]
signature = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in ("n", "scale", *constants)}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
source = GluonASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, values, whole)
done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(done.metadata.shared, done.asm["ptx"].count("wgmma.mma_async"), done.asm["ptx"].count("ld.global.v4"))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU too: it fits, uses the tensor cores in both products of both groups, and reads 16 bytes at a time."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a cache that was brought along may lack what is counted here
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    shared, products, wide_loads = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert products == 2 * (32 + 4 + 4)
    assert wide_loads >= 32
