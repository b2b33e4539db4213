"""FP8 matrices and expert banks for few and many rows, on a GPU or in Triton's interpreter, against the torch operations."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.model.experts import RoutedExperts
from forebay.model.ops import device_linear, formats
from forebay.model.ops.backend import SERVING
from forebay.model.ops.device_linear import ExpertBank, Fp8Matrix
from forebay.model.ops.kernels import gemm_ops
from forebay.model.ops.kernels.moe_ops import Meeting
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, TileCache, quantised_linear
from forebay.model.ops.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((Fp8Matrix, "__call__"), (ExpertBank, "__call__"), (gemm_ops, "widen round_rows experts"))
CACHE = TileCache(1 << 20)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bytes_of(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + sum(shape)))


def e4m3(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    codes = bytes_of(*shape, seed=seed)
    codes[(codes & 127) == 127] = 7
    return codes, bytes_of(shape[0] // 32, shape[1] // 32, low=115, high=123, seed=seed)


def assert_near(here: Tensor, there: Tensor) -> None:
    """Equal but for the order of sums: a few values are a last bit of bf16 or FP8 off, as seen in what is made of them."""
    assert not here.isnan().any()
    error = (here.double() - there.double()).norm() / there.double().norm().clamp(min=1e-30)
    assert error < 4e-3, float(error)


def test_widening_is_exact() -> None:
    codes, scales = torch.arange(256, dtype=torch.uint8).repeat(32, 1), bytes_of(1, 8, low=10, high=240)
    codes[(codes & 127) == 127] = 0
    gemm_ops.widen(codes, scales, out := torch.empty((32, 256), dtype=torch.bfloat16))
    assert torch.equal(out.float(), Fp8Weight(codes, scales, CACHE).widen(0, 32))


@pytest.mark.parametrize(
    ("n", "k", "outs", "groups", "keep_wide"),
    [(65, 96, 64, 1, False), (70, 64, 128, 2, True), (66, 64, 128, 2, False), (3, 64, 128, 2, True), (0, 64, 32, 1, False)],
)
def test_fp8_matrix(n: int, k: int, outs: int, groups: int, keep_wide: bool) -> None:
    codes, scales = e4m3(outs, k)
    x = random(n, groups * k).bfloat16()
    if groups == 1:
        want = quantised_linear(x.float(), Fp8Weight(codes, scales, CACHE))
    else:
        size = outs // groups
        weights = [Fp8Weight(codes, scales, CACHE, (g * size, (g + 1) * size)) for g in range(groups)]
        want = SERVING.grouped_linear(x.unflatten(1, (2 * groups, -1)), weights)
    matrix, work = Fp8Matrix(codes, scales, groups, keep_wide), Meeting(1 << 16, 64, "cpu")
    out = torch.empty((n, outs), dtype=torch.bfloat16)
    matrix(x, out, work)
    assert_near(out, want)
    matrix(x, rounded := torch.empty_like(out), work, round_output=True)
    assert torch.equal(rounded.float(), formats.fp8_round(out))


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        Fp8Matrix(bytes_of(64, 64), bytes_of(2, 1))


def test_tunings_and_buffers_that_do_not_fit() -> None:
    def call(tiles: int, up: gemm_ops.Tuning, down: gemm_ops.Tuning) -> None:
        x, stored = torch.zeros((4, 64), dtype=torch.bfloat16), (bytes_of(2, 64, 32), bytes_of(2, 64, 2))
        indices, space = torch.zeros((4, 1), dtype=torch.int32), torch.empty(tiles, dtype=torch.int32)
        gemm_ops.experts(
            x, stored, stored, indices, torch.ones((4, 1)), 0.0, None, None, space, space, x, x, x, x, up_tuning=up, down_tuning=down
        )

    assert gemm_ops.tuning_space()[0] == gemm_ops.MANY
    assert [gemm_ops.tuned(count, 8)[0] for count in (8 * 64, 8 * 64 + 1, 8 * 512, 8 * 512 + 1)] == [
        gemm_ops.FEW, gemm_ops.SOME, gemm_ops.SOME, gemm_ops.MANY,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="too few"):
        call(3, gemm_ops.MANY, gemm_ops.MANY)
    with pytest.raises(ValueError, match="do not go together"):
        call(64, gemm_ops.MANY, gemm_ops.MANY._replace(rows=64))


@pytest.mark.parametrize(
    ("n", "d", "inter", "experts", "topk", "limit", "shared", "few", "rows", "step"),
    [
        (18, 96, 32, 4, 3, 10.0, True, 0, 32, 64),
        (6, 64, 128, 4, 2, 0.0, False, 0, 16, 128),
        (80, 128, 32, 3, 1, 0.5, True, 4, 64, 64),
        (3, 64, 32, 4, 2, 10.0, True, 64, 64, 64),
        (260, 128, 128, 3, 1, 10.0, False, 0, 256, 128),  # tiles of three quarters
    ],
)
def test_expert_bank(
    n: int, d: int, inter: int, experts: int, topk: int, limit: float, shared: bool, few: int, rows: int, step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(device_linear, "FEW_ROWS", few)
    for name in ("FEW", "SOME", "MANY"):  # several tiles for an expert
        tuning = gemm_ops.Tuning(rows, 64, 4, step, 2, 2, rows == 64) if rows < 256 else gemm_ops.Tuning(quarters=True)
        monkeypatch.setattr(gemm_ops, name, tuning)
    up = bytes_of(experts, 2 * inter, d // 2), bytes_of(experts, 2 * inter, d // 32, low=122, high=126)
    down = bytes_of(experts, d, inter // 2), bytes_of(experts, d, inter // 32, low=122, high=126)
    up[1][0, 0, 0], up[1][1, 0, 0], down[1][1, 0, 0] = 0, 130, 131
    x = formats.fp8_round(random(n, d)).bfloat16()
    # the last expert has no rows
    indices = random(n, experts)[:, 1:].argsort(1)[:, :topk].to(torch.int32).contiguous()
    weights = random(n, topk).sigmoid()
    assert rows < 256 or any(128 < number <= 192 for number in indices[:-1].flatten().bincount())
    kept = [
        (Mxfp4Weight(up[0][e, :inter], up[1][e, :inter], CACHE), Mxfp4Weight(down[0][e], down[1][e], CACHE),
         Mxfp4Weight(up[0][e, inter:], up[1][e, inter:], CACHE)) for e in range(experts)
    ]  # fmt: skip
    want = RoutedExperts(kept, CACHE, limit)(x.float(), indices.long(), weights)
    shared_up, shared_down = e4m3(2 * inter, d, seed=1), e4m3(d, inter, seed=2)
    if shared:
        gate, rise = quantised_linear(x.float(), Fp8Weight(*shared_up, CACHE)).chunk(2, -1)
        want = want + quantised_linear(formats.fp8_round(swiglu(gate, rise, limit)), Fp8Weight(*shared_down, CACHE)).float()
    want = want.bfloat16()
    bank = ExpertBank(up, down, Fp8Matrix(*shared_up) if shared else None, Fp8Matrix(*shared_down) if shared else None, limit)
    work = Meeting(1 << 18, 64, "cpu")
    padded = indices.clone()
    padded[n - 1] = -1
    for chosen in (indices, padded) if rows < 256 else (padded,):
        out = torch.full((n, d), 7.0, dtype=torch.bfloat16)
        bank(x, chosen, weights, out, work)
        last = n if chosen is indices else n - 1
        assert_near(out[:last], want[:last])
        assert not out[last:].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tuning", [gemm_ops.FEW, gemm_ops.SOME, gemm_ops.MANY])
@pytest.mark.parametrize("n", [128, 512, 2048])
def test_experts_are_the_same_again(tuning: gemm_ops.Tuning, n: int) -> None:
    """At released sizes, again and again, with weights from memory and from the cache: what two runs differ in is a race."""
    make = next(case[1] for case in gemm_ops.bench_cases() if case[0] == f"gemm experts n={n}")
    *given, _, _ = make(torch.device("cuda"))
    flush = torch.empty(64 << 20, device="cuda")
    first = None
    for number in range(12):
        if number % 2:
            flush.zero_()
        gemm_ops.experts(*given, up_tuning=tuning, down_tuning=tuning)
        found = given[-1].clone()
        first = found if first is None else first
        assert torch.equal(found, first), number


COMPILE = """
import re
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from forebay.model.ops.kernels import gemm, gemm_ops

kernels = gemm.load(False)
kinds = dict.fromkeys("x h parts".split(), "*bf16") | dict.fromkeys("packed scales codes code_scales table order tiles".split(), "*i32")
kinds |= {"weights": "*fp32", "limit": "fp32"}
for tuning in (gemm_ops.FEW,):
    for kernel, some in ((kernels.up, {"TOPK": 6, "CLAMP": True}), (kernels.down, {})):
        constants = gemm_ops._constants(tuning) | some | {"D": 256, "I": 256, "SHARED": False, "DOT": tl.bfloat16, "EXACT": False}
        warps, names = constants.pop("num_warps"), kernel.arg_names
        signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
        whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
        values = {(names.index(name),): value for name, value in constants.items()}
        done = triton.compile(ASTSource(kernel, signature, values, whole), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        ptx = done.asm["ptx"]
        print(ptx.count("wgmma.mma_async"), *sorted({int(n) for n in re.findall(r"wgmma.wait_group.sync.aligned\\s+(\\d+)", ptx)}))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_waits_for_products_before_their_registers_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled for Hopper, which needs none: no round leaves products running (`kernels.settled`)."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 2
    for products, *waits in found:
        assert int(products) >= 8 and waits == ["0"]
