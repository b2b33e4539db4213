"""Kernels that store KV, on a GPU or in Triton's interpreter, against the reference operations and the served memory."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ptx
from forebay.model.memory import Window
from forebay.model.ops import formats
from forebay.model.ops.kernels import store_ops
from forebay.model.ops.kernels import words as encoding
from forebay.model.ops.kernels.store_ops import SourcePlanes
from forebay.model.ops.linear import PlainWeight, TileCache
from forebay.model.ops.rms_norm import rms_norm
from forebay.model.ops.rope import inverse_frequencies, rotate, turn_at
from stored_entries import EPS, EVERY, SPANS, Case, nearly, random, step_of, table_of, words

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((store_ops, "turn_table store_window keep_window store_entries acting_rows"),)


@pytest.mark.parametrize("ratio", [1, 2])
def test_turn_table(ratio: int) -> None:
    position = torch.tensor([0, 1, 2, 77, 4097, 131071, 1048575])
    freqs = inverse_frequencies(24, 160000.0, factor=16.0, original=65536)
    out = torch.full((7, 2, 12), torch.nan)
    store_ops.turn_table(position, freqs, ratio, out)
    torch.testing.assert_close(out, table_of(position, freqs, ratio), atol=2e-7, rtol=0)


def adversarial(n: int, dim: int) -> Tensor:
    """Rows of whole numbers, whose squares sum exactly in any order, and of extremes."""
    x = torch.randint(-8, 9, (n, dim), generator=torch.Generator().manual_seed(dim)).float()
    x[0] = 0.0
    x[1] = -0.0
    x[2, ::2] = -0.0
    x[3] = 0.0
    x[3, 5] = 448.0
    x[4] = 7.0
    x[5] *= 2.0**40
    x[6] *= 2.0**-60
    x[7, :] = torch.where(torch.arange(dim) % 3 == 0, 2.0, 2.0**-9)
    return x.bfloat16()


@pytest.mark.parametrize(("dim", "lora", "pairs"), [(32, 32, 4), (96, 160, 8), (512, 1280, 32)])
def test_store_window(dim: int, lora: int, pairs: int) -> None:
    spans = SPANS[:6] if dim < 512 else [(5, 6), (1, 3), (0, 10)]
    step, window = step_of(spans), 8
    n, slots = step.position.numel(), len(spans) + 1
    freqs = inverse_frequencies(2 * pairs, 10000.0)
    q_norm, kv_norm = random(lora, seed=1).bfloat16(), random(dim, seed=2)
    for exact in (True, False):
        x = torch.cat((adversarial(n, lora), adversarial(n, dim)), 1) if exact else random(n, lora + dim).bfloat16()
        low_q, low_kv = x[:, :lora], x[:, lora:]
        kv = rotate(rms_norm(low_kv, kv_norm, EPS), turn_at(step.position, freqs))
        latent = rms_norm(low_q, q_norm, EPS)
        pool = torch.full((slots, 3, window, dim + dim // 32), 7, dtype=torch.uint8)
        fresh = torch.full((n, dim + dim // 32), 9, dtype=torch.uint8)
        codes, scales = torch.empty((n, lora), dtype=torch.uint8), torch.empty((n, lora // 32), dtype=torch.uint8)
        values = torch.empty((n, lora), dtype=torch.bfloat16)
        turn = table_of(step.position, freqs)
        store_ops.store_window(low_q, low_kv, q_norm, kv_norm, turn, EPS, step, fresh, pool[:, 1], codes, scales, values)
        same = torch.testing.assert_close if exact else nearly
        kwargs: dict[str, Any] = {"atol": 0, "rtol": 0} if exact else {}
        same(fresh, torch.cat(formats.fp8_encode(kv), 1), **kwargs)
        same(torch.cat((codes, scales), 1), torch.cat(formats.fp8_encode(latent), 1), **kwargs)
        wanted = formats.fp8_round(latent)
        same(values.float(), wanted, **kwargs)
        if exact:
            assert torch.equal(values.signbit(), wanted.signbit())
        expected = torch.full_like(pool, 7)
        for i, (p, s) in enumerate(zip(step.position.tolist(), step.span.tolist(), strict=True)):
            if p >= spans[s][1] - window:
                expected[step.slot[s], 1, p % window] = fresh[i]
        assert torch.equal(pool, expected)
        later = torch.full_like(pool, 7)
        store_ops.keep_window(fresh[None], later[:, 1:2], step)
        assert torch.equal(later, expected)
        alone = torch.empty_like(fresh)
        store_ops.store_window(low_q, low_kv, q_norm, kv_norm, turn, EPS, step, alone)
        assert torch.equal(alone, fresh)


@pytest.mark.parametrize("dim", [32, 128])
def test_layers_are_kept_together(dim: int) -> None:
    """Some layers of a pool, in rows of bytes or of words."""
    step, row = step_of(SPANS), dim + dim // 32
    fresh = random(3, step.position.numel(), row, scale=90).abs().to(torch.uint8)
    pool = torch.full((len(SPANS) + 1, 6, 8, row), 7, dtype=torch.uint8)
    expected = pool.clone()
    store_ops.keep_window(fresh, pool[:, 2:5], step)
    for layer in range(3):
        store_ops.keep_window(fresh[layer : layer + 1], expected[:, 2 + layer : 3 + layer], step)
    assert torch.equal(pool, expected)
    assert (pool[:, 2:5] != 7).any() and bool((pool[:, :2] == 7).all() and (pool[:, 5:] == 7).all())


def test_rows_that_are_alone() -> None:
    """A row that is its sequence's only one replaces nothing that it reads itself."""
    assert step_of([(5, 6), (0, 1)]).alone and not step_of([(5, 7), (0, 1)]).alone


def test_window_as_memory_keeps_it() -> None:
    """`keep_window` leaves the rings as `CacheMemory.keep_window` does."""
    case = Case(1, 32, 32, 4, SPANS)
    codes, scales = (x.to(torch.uint8) for x in (random(case.n, 32, scale=90).abs(), random(case.n, 1, scale=90).abs()))
    case.memory.keep_window(0, Window(torch.empty(0), (codes, scales)), case.state)
    ring = torch.zeros_like(case.ring)
    store_ops.keep_window(torch.cat((codes, scales), 1)[None], ring, case.step)
    assert torch.equal(ring, case.ring)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN is the point
def test_padding_and_broken_rows() -> None:
    step = step_of([(0, 1), (1, 2), (2, 3)])
    step.span[1] = -1
    x = random(3, 64).bfloat16()
    x[2, 40] = torch.nan
    x[2, 3] = torch.inf
    turn = table_of(step.position, inverse_frequencies(8, 1e4))
    fresh, ring = torch.zeros((3, 33), dtype=torch.uint8), torch.zeros((4, 8, 33), dtype=torch.uint8)
    codes, scales = torch.zeros((3, 32), dtype=torch.uint8), torch.zeros((3, 1), dtype=torch.uint8)
    values = torch.zeros((3, 32), dtype=torch.bfloat16)
    one = torch.ones(32)
    store_ops.store_window(x[:, :32], x[:, 32:], one, one, turn, EPS, step, fresh, ring, codes, scales, values)
    assert torch.equal(ring[3, 0], fresh[0]) and torch.equal(ring[1, 2], fresh[2]) and int(ring[2].sum()) == 0 and int(ring[0].sum()) == 0
    assert fresh[2, 32] == 255 and scales[2] == 255 and values[2].isnan().all()
    assert fresh[:2, 32].max() < 255


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("dim", "index", "pairs"), [(32, 32, 4), (128, 64, 16), (96, 96, 8)])
def test_store_entries(ratio: int, dim: int, index: int, pairs: int) -> None:
    case = Case(ratio, dim, index, pairs, SPANS)
    case.check(random(case.n, 16).bfloat16())


@pytest.mark.parametrize("ratio", [1, 2])
def test_store_entries_real_dimensions(ratio: int) -> None:
    case = Case(ratio, 512, 128, 32, [(0, 1), (5, 6), (3, 7)])
    case.check(random(case.n, 16).bfloat16())


@pytest.mark.parametrize("ratio", [1, 2])
def test_floors_padding_and_order(ratio: int) -> None:
    """Replayed rows write nothing; the rows may be listed in any order, with gaps, and more than have anything to do."""
    case = Case(ratio, 32, 32, 4, SPANS, floors=[0, 6, 0, 8, 0, 8, 24, 0])
    order = torch.randperm(case.n, generator=torch.Generator().manual_seed(1)).int()
    none = torch.full((3,), -1, dtype=torch.int32)
    case.check(random(case.n, 16).bfloat16(), torch.cat((none, order[:7], none, order[7:])))


def test_entries_of_whole_numbers() -> None:
    """Sums exact in any order: every byte is equal, of zeros of either sign and of amplitudes past the scales' range too."""
    dim = 64
    case = Case(1, dim, 32, 8, [(0, 16)])
    case.compressor.wkv = PlainWeight(torch.eye(dim), TileCache(1 << 20))
    case.compressor.norm = torch.where(torch.arange(dim) < 32, 1.0, 6000.0)
    case.compressor.norm[16:32] = 2.0**-12
    case.compressor.wk = PlainWeight(torch.eye(dim)[:32].bfloat16(), TileCache(1 << 20))
    case.check(adversarial(16, dim), most=0.0)


def test_main_fp4_ties() -> None:
    """The edges between codes, exactly, for scales of all eight mantissas; the norm gives back its input."""
    dim, edges = 128, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    case = Case(1, dim, 32, 8, [(0, 1)])
    case.compressor.wkv = PlainWeight(torch.eye(dim), TileCache(1 << 20))
    row = torch.cat([torch.cat((torch.tensor([6.0, 0.0]), edges, -edges)) * mantissa / 8 for mantissa in range(8, 16)])
    case.compressor.norm = (row.square().mean() + EPS).sqrt().expand(dim).contiguous()
    x = row.bfloat16()[None]
    assert torch.equal(rms_norm(x, case.compressor.norm, EPS), x)
    case.check(x, most=0.0)


def test_codes_of_many_numbers() -> None:
    """Rows whose groups have amplitudes from below the least scale to beyond the largest."""
    dim = 32
    case = Case(1, dim, 32, 4, [(0, 40)])
    case.compressor.wkv = PlainWeight(torch.eye(dim), TileCache(1 << 20))
    case.compressor.norm = torch.where(torch.arange(dim) < 16, 2.0**-9, 3000.0)
    case.check(random(40, dim).bfloat16(), most=0.001)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_instructions_that_make_fp8() -> None:
    """What the interpreter does not run: the assembly, for all numbers and several scales."""
    for byte in (105, 127, 130, 240):
        scale = 2.0 ** (byte - 127)
        x = EVERY[EVERY.abs() / scale <= 448]
        inverse = words(torch.full_like(x, 1 / scale), torch.full_like(x, 1 / scale))
        power = ptx.patterns(torch.full_like(x, scale))
        given = {"$3": words(x, -x), "$4": words(x.flip(0), x), "$5": inverse, "$6": inverse, "$7": power, "$8": power}
        found = ptx.run(encoding.FP8, given)
        wanted = (x / scale).to(torch.float8_e4m3fn)
        code = wanted.view(torch.uint8).long()
        assert torch.equal(found["$0"], code | ((code ^ 0x80) << 8) | (code.flip(0) << 16) | (code << 24))
        near = wanted.float() * scale
        assert torch.equal(found["$1"], words(near, -near)) and torch.equal(found["$2"], words(near.flip(0), near))
    nan = torch.full((4,), torch.nan)
    given = {f"${i}": words(nan if i > 4 else EVERY[:4], nan if i > 4 else EVERY[9:13]) for i in (3, 4, 5, 6)}
    found = ptx.run(encoding.FP8, given | {"$7": ptx.patterns(nan), "$8": ptx.patterns(nan)})
    assert (found["$0"] == 0x7F7F7F7F).all() and (found["$1"] & 0x7FFF7FFF > 0x7F807F80).all()


def test_instructions_that_make_fp4() -> None:
    """The same, for scales of every mantissa; the reciprocal may be a little wrong."""
    x = EVERY[EVERY.abs() < 4000]
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    for byte in (1, 5, *range(48, 56), 126):
        scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        size, ties = x.double().abs(), edges * scale
        code = (size[:, None] > ties[::2]).sum(1) + (size[:, None] >= ties[1::2]).sum(1) + 8 * x.signbit()
        for wrong in (-1, 0, 1):
            inverse = (ptx.patterns(1 / scale.float()) + wrong).expand(len(x))
            given = {"$1": words(x, -x), "$2": words(x, x), "$3": words(x.flip(0), x), "$4": words(-x, x.flip(0))}
            found = ptx.run(encoding.FP4, given | {f"${i}": inverse for i in (5, 6, 7, 8)})["$0"]
            back, minus = code.flip(0), code ^ 8
            pairs = (code, minus), (code, code), (back, code), (minus, back)
            for i, (low, high) in enumerate(pairs):
                assert torch.equal(found >> (8 * i) & 0xFF, low | (high << 4))


def test_wrong_use_is_refused() -> None:
    case = Case(1, 32, 32, 4, [(0, 2)])
    c, rows = case.compressor, torch.zeros(1, dtype=torch.int32)
    for planes, text in ((SourcePlanes(4, 2, 0, 0, 0, 0), "ratio must be 1 or 2"), (SourcePlanes(2, 4, 0, 0, 0, 0), "needs pending")):
        with pytest.raises(ValueError, match=text):
            store_ops.store_entries(rows, c.norm, rows, c.k_norm, rows, EPS, case.step, rows, rows, planes)


def test_bench_cases_run_small() -> None:
    device = torch.device("cpu")
    for name, make, run, floor, flops in store_ops.bench_cases():
        assert floor > 0 and flops >= 0
        if name.endswith("n=1"):
            run(*make(device))
    assert set(store_ops.tuning_space()) <= set(vars(store_ops))


COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from forebay.model.ops.kernels import dependent, store

kernels, pdl = store.load(False), dependent.load(False).OPTIONS
kinds = dict.fromkeys("low_q low_kv q_weight kv_weight q_values source norm wk k_norm".split(), "*bf16")
kinds |= dict.fromkeys("span start stop offset floor slot rows table".split(), "*i32") | {"position": "*i64", "eps": "fp32"}
kinds |= dict.fromkeys("turn pending".split(), "*fp32") | dict.fromkeys("fresh ring q_codes q_scales pool".split(), "*u8")

def compiled(kernel, warps, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants and name not in ("n", "m", "eps")}
    values = {(names.index(name),): value for name, value in constants.items()}
    done = triton.compile(
        ASTSource(kernel, signature, values, whole), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": False} | pdl,
    )
    ptx = done.asm["ptx"]
    print(*(ptx.count(text) for text in ("cvt.rn.bf16.f32", "griddepcontrol.wait", "ld.global.v4", "mma")))

compiled(kernels.window_store, 4, Q=1280, CQ=256, KV=512, CK=256, PAIRS=32, ROW=528, WINDOW=128, RING=False, CODES=False, VALUES=True,
         BK=4, BQ=4, EARLY=False)
compiled(kernels.entry_store, 8, R=1, DIM=512, CH=128, INDEX=128, IP=128, PAIRS=32, PER_BLOCK=128, BR=16, AHEAD=4, DOT=tl.bfloat16)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU too: no slow casts, each branch waits for the kernel before, 16 bytes are read at a time, tensor cores are used."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    window, entries = (list(map(int, line.split())) for line in done.stdout.splitlines())
    assert window[:2] == [0, 2] and window[2] >= 14
    assert entries[:2] == [0, 1] and entries[2] >= 40 and entries[3] > 0
