"""The store of many entries on a Hopper GPU against the kernel for any GPU and the reference; elsewhere, its arithmetic and compilation."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ptx
from forebay.model.ops.kernels import store_codes, store_ops
from forebay.model.ops.kernels import words as encoding
from forebay.model.ops.kernels.store_ops import SourcePlanes, Step
from stored_entries import EPS, EVERY, SPANS, Case, random, words

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((store_ops, "turn_table store_entries"),)
PLANES = SourcePlanes(1, 128, 0, 128 * 256, 128 * 288, 128 * 352)
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Gluon has no interpreter; this needs a Hopper GPU"
)


def both(monkeypatch: pytest.MonkeyPatch, seed: int, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pools that the kernel for many rows and the other one leave: spans of any start and length, padding, floors, rows in any order with
    gaps, more than there are."""
    g = torch.Generator().manual_seed(seed)
    start, size = torch.randint(0, 300, (25,), generator=g), torch.randint(1, 200, (25,), generator=g)
    start[:4], size[:3] = torch.arange(4), torch.tensor([1, 2, 1])
    position = torch.cat([torch.arange(a, a + k) for a, k in zip(start.tolist(), size.tolist(), strict=True)])
    span, n = torch.arange(25).repeat_interleave(size), position.numel()
    span[::97] = -1
    table = torch.randperm(150, generator=g).view(25, 6)
    floor = torch.where(torch.arange(25) % 3 == 0, start + 7, 0)
    numbers = span, start, start + size, size.cumsum(0) - size, torch.arange(25) + 1, torch.zeros(25), floor, table
    step = Step(position, *(x.int() for x in numbers))
    turn = torch.empty((n, 2, 32))
    store_ops.turn_table(position, torch.logspace(0, -4, 32), 1, turn)
    rows = torch.randperm(n, generator=g).int()
    rows[::50] = -1
    rows = torch.cat((rows, torch.full((37,), -1, dtype=torch.int32)))
    if source is None:
        source = torch.randn((n, 512), generator=g) * torch.randint(-20, 20, (n, 1), generator=g).float().exp2()
    norm, k_norm, wk = torch.randn(512, generator=g), torch.randn(128, generator=g), torch.randn((128, 512), generator=g).bfloat16()
    norm[:16] *= 3000
    norm[16:32] *= 2**-9
    if seed % 2:
        norm, k_norm = norm.bfloat16(), k_norm.bfloat16()
    found = []
    for least in (1, 1 << 30):
        monkeypatch.setattr(store_ops, "WIDE", least)
        pool = torch.full((150, 113920), 7, dtype=torch.uint8)
        store_ops.store_entries(source[:n].bfloat16(), norm, wk, k_norm, turn, EPS, step, rows, pool, PLANES)
        found.append(pool)
    return found[0], found[1]


@hopper
@pytest.mark.parametrize("seed", [0, 1])
def test_as_the_other_kernel(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    pool, expected = both(monkeypatch, seed)
    assert (expected != 7).sum() > 300_000
    assert (pool != expected).sum() <= 20  # sums are in another order


@hopper
def test_broken_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, infinities, zeros of either sign, the least and the largest numbers: the same bytes."""
    x = random(5000, 512)
    x[::5], x[1::5], x[2::5, 2::7] = 0.0, -0.0, -0.0
    x[3::10] *= 2.0**-120
    x[8::10] *= 2.0**100
    x[4::20, 3], x[9::20, 500], x[14::20, 100] = torch.nan, torch.inf, -torch.inf
    x[19::20] = 3.0
    pool, expected = both(monkeypatch, 2, x)
    assert (pool != expected).sum() <= 20


@hopper
@pytest.mark.parametrize("floors", [None, [0, 6, 0, 8, 0, 8, 24, 0]])
def test_against_the_reference(monkeypatch: pytest.MonkeyPatch, floors: list[int] | None) -> None:
    monkeypatch.setattr(store_ops, "WIDE", 1)
    case = Case(1, 512, 128, 32, SPANS, floors)
    case.check(random(case.n, 16).bfloat16())


def test_elsewhere_the_other_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, and for other numbers of channels."""
    monkeypatch.setattr(store_ops, "WIDE", 1)
    case = Case(1, 128, 64, 16, SPANS[:5])
    case.check(random(case.n, 16).bfloat16())


def test_split_inverses_make_the_same_codes() -> None:
    """All numbers and all scales; the reciprocal may be a little wrong."""
    x = EVERY[EVERY.abs() < 4000]
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    for byte in range(1, 127):
        scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        size, ties = x.double().abs(), edges * scale
        code = (size[:, None] > ties[::2]).sum(1) + (size[:, None] >= ties[1::2]).sum(1) + 8 * x.signbit()
        inverse = ptx.floats(ptx.patterns(1 / scale.float()) + (byte % 5 - 2))
        high = inverse.bfloat16().float()
        low = (inverse - high).bfloat16().float()
        given = {"$1": words(x, -x), "$2": words(x, x), "$3": words(x.flip(0), x), "$4": words(-x, x.flip(0))}
        given |= {f"${i}": words(high, high).expand(len(x)) for i in range(5, 9)}
        given |= {f"${i}": words(low, low).expand(len(x)) for i in range(9, 13)}
        found = ptx.run(store_codes.FP4_SPLIT, given)["$0"]
        back, minus = code.flip(0), code ^ 8
        for i, (even, odd) in enumerate(((code, minus), (code, code), (back, code), (minus, back))):
            assert torch.equal(found >> (8 * i) & 0xFF, even | (odd << 4)), byte


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_powers_of_two_make_the_same_codes() -> None:
    """As the assembly that any GPU runs, for all numbers, NaN and infinities too."""
    for exponent in (1, 2, 60, 125, 127, 130, 200, 252, 253):
        inverse = 254 - exponent << 23
        half = 0x00400000 if inverse == 0x00800000 else inverse - 0x00800000
        numbers = inverse | inverse >> 16, (inverse | inverse >> 16) + 0x00800080, half | half >> 16
        given = {"$1": words(EVERY, -EVERY), "$2": words(EVERY, EVERY), "$3": words(EVERY.flip(0), EVERY), "$4": words(-EVERY, EVERY)}
        many = {f"${5 + i}": torch.tensor(numbers[i // 4]).expand(65536) for i in range(12)}
        plain = {f"${5 + i}": torch.tensor(inverse).expand(65536) for i in range(4)}
        assert torch.equal(ptx.run(store_codes.FP4_POWER, given | many)["$0"], ptx.run(encoding.FP4, given | plain)["$0"]), exponent


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from forebay.model.ops.kernels import store_wide

kernel, names = store_wide.entry_store, store_wide.entry_store.arg_names
kinds = dict.fromkeys("source norm wk k_norm".split(), "*bf16") | dict.fromkeys("rows span floor table".split(), "*i32")
kinds |= {"position": "*i64", "turn": "*fp32", "pool": "*u8", "eps": "fp32", "PER_BLOCK": "constexpr"}
plain = "m", "table_stride", "eps", "PER_BLOCK"
whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in plain}
source = GluonASTSource(kernel, {name: kinds.get(name, "i32") for name in names}, {(names.index("PER_BLOCK"),): 128}, whole)
options = {"num_warps": store_wide.WARPS, "enable_fp_fusion": False, "launch_pdl": True}
done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = done.asm["ptx"]
print(done.metadata.shared, *(ptx.count(text) for text in ("wgmma.mma_async", "ld.global.v4", "griddepcontrol.wait", "cvt.rn.bf16.f32")))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU too: it fits, uses the tensor cores, reads 16 bytes at a time, waits for the kernel before, and has no slow casts."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    shared, products, wide_loads, waits, casts = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert (products, waits, casts) == (32, 1, 0)
    assert wide_loads >= 32
