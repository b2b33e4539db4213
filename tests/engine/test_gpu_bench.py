"""GPU benchmarks, the parts that need no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.engine.active_bytes import expert_bytes, index_bytes, main_bytes, step_bytes, wide_bytes
from forebay.engine.active_flops import attention_flops, index_flops, layer_flops, prefill_flops, prefill_index_flops
from forebay.engine.gpu_report import markdown
from forebay.engine.gpu_timing import Ceilings, floor_of, repeats_for
from forebay.engine.kernel_bench import Case, baseline, cases, measure, normalised, variants
from forebay.model.config import real_config
from forebay.server.cli import main

CEILINGS = Ceilings(4e12, 8e14, None)


def test_floor_is_the_larger_of_both() -> None:
    assert floor_of(4e6, 8e6, CEILINGS).seconds == pytest.approx(1e-6)
    assert floor_of(4e6, 8e9, CEILINGS).seconds == pytest.approx(1e-5)


def test_repeats() -> None:
    assert [repeats_for(ms) for ms in (0.001, 0.5, 100.0)] == [50, 4, 1]


@pytest.mark.parametrize("inputs", [(2, 3), [2, 3]])
def test_both_forms_of_inputs(inputs: Any) -> None:
    case = normalised("f", ("n", lambda device: inputs, lambda *a: sum(a) if len(a) == 2 else sum(a[0]), 1, 2))
    assert case.prepare(torch.device("cpu"))[0]() == 5


def test_all_files_have_cases() -> None:
    assert len({case.file for case in cases()}) == 7
    assert all(case.file == "select_ops" for case in cases(["select_ops"]))


def test_budget_and_failures() -> None:
    def bad(x: object) -> None:
        raise ValueError("no | such tile")

    ticks = iter([0.0, 1.0, 5.0, 11.0])
    given = [normalised("f", (f"case {i}", lambda device: [0], run, 4e6, 0)) for i, run in enumerate((print, bad, print))]
    rows, left = measure(
        given, torch.device("cpu"), CEILINGS, budget=10, clock=lambda: next(ticks), report=lambda line: None,
        timed=lambda work, flush=None: (work(), (2e-6, [2e-6]))[1],
    )  # fmt: skip
    assert left == ["case 2"]
    assert rows[0]["fraction"] == pytest.approx(0.5)
    text = markdown({"ceilings": {"copy": 4e12, "bf16": 8e14}, "device": "D", "date": "d", "torch": "t", "triton": "r", "rows": rows})
    assert "| case 0 | 2.0 | 2.0 | 1.00 | 50% |  |" in text
    assert "failed: ValueError: no / such tile" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert capsys.readouterr().err == "forebay: bench kernels: this machine has no CUDA device that torch can use\n"


def test_flops_of_a_reuse_layer() -> None:
    config = real_config()
    attention = 5120 * 1792 + 1280 * 32768 + 32768 * 1024 + 8192 * 5120
    experts = 384 * 5120 + 7 * 3 * 5120 * 2304
    streams = 2 * 24 * 20480
    assert layer_flops(config, config.topology().layers[21]) == 2 * (attention + experts + streams) + 4 * 640 * 32768


def test_prefill_skips_the_decoder() -> None:
    config = real_config()
    plans = config.topology().layers
    encoder = sum(layer_flops(config, plan) for plan in plans[:20])
    # Beyond the windows and lists that fill up at first, a token costs the encoder half and the first decoder layer's entry.
    assert prefill_flops(config, 5001) - prefill_flops(config, 5000) == encoder + 2 * (5120 * 512 + 512 * 128)
    assert prefill_flops(config, 101) - prefill_flops(config, 100) > 1.9 * 20 * 2 * 300e6
    exact = prefill_flops(config, 5001, exact=True) - prefill_flops(config, 5000, exact=True)
    assert exact == sum(layer_flops(config, plan) for plan in plans)


def test_attention_counts_the_keys_that_are_there() -> None:
    config = real_config()
    window, reuse, first = (config.topology().layers[i] for i in (0, 21, 20))
    key = 4 * 64 * 512
    assert attention_flops(config, window, 0, 3) == key * (1 + 2 + 3)
    assert attention_flops(config, reuse, 1, 2) == key * (2 + 2)
    assert attention_flops(config, reuse, 200, 202, floor=200) == key * (1 + 2 + 201 + 202)
    assert index_flops(config, reuse, 0, 100) == 0
    assert index_flops(config, first, 9, 11) == 2 * 32 * 128 * (10 + 11)
    assert index_flops(config, config.topology().layers[24], 99_999, 100_000) == 2 * 32 * 128 * 16_384
    scanned = 3 * sum((i + 1) // 2 for i in range(200)) + 5 * sum(range(73, 201))
    assert prefill_index_flops(config, 200) == 2 * 32 * 128 * scanned


def test_bytes_of_a_step() -> None:
    config = real_config()
    layers = config.topology().layers
    assert expert_bytes(config) == 3 * 5120 * 2304 * 17 // 32 == 18_800_640
    assert [main_bytes(config, layers[i], 4096) for i in (0, 2, 21)] == [0, 512 * 288, 512 * 288]
    assert main_bytes(config, layers[3], 101) == 50 * 288
    assert [index_bytes(config, layers[i], 1_000_000) for i in (2, 3, 20, 24)] == [500_000 * 68, 0, 1_000_000 * 68, 16_384 * 68]
    assert index_bytes(config, layers[24], 4096) == 4096 * 68
    parts = step_bytes(config, [4096, 1_000_000], [7] * 40)
    assert parts["routed experts"] == 40 * 7 * 18_800_640
    assert parts["windows"] == 2 * 40 * 128 * 528
    assert parts["main KV"] == 2 * 38 * 512 * 288
    assert parts["index keys"] == 68 * (3 * 2048 + 5 * 4096 + 3 * 500_000 + 1_000_000 + 4 * 16_384)
    assert parts["engram rows"] == 2 * 2 * 24 * 264
    assert parts["head"] == 2 * 129_280 * 5120
    assert parts["shared experts"] == 40 * 3 * 5120 * 2304 * 1025 // 1024
    # All that is left: projections, router, mHC, compressors, indexers, Engram products, norms.
    attention = (5120 * 1792 + 1280 * 32_768 + 8192 * 4096 + 8192 * 5120) * 1025 // 1024 + 2 * (1280 + 512) + 4 * 64
    rest = 40 * (attention + 384 * 5120 * 2 + 2 * 384 * 4 + 2 * (24 * 20_480 + 24 + 3) * 4 + 2 * 5120 * 2) + 5120 * 2
    sources = 3 * 2 * (2 * 512 * 5120) + 2 * 512 * 5120 + 4 * 2 * 512 + 4 * 2 * (128 * 512 + 128)
    indexers = 8 * (4096 * 1280 * 1025 // 1024 + 2 * 32 * 5120)
    engram = 2 * (25_600 * 6144 * 1025 // 1024 + 2 * 2 * 4 * 5120)
    assert parts["dense"] == rest + sources + indexers + engram
    assert wide_bytes(config, 1_000_000) == 500_000 * 512 * 2


def test_baselines() -> None:
    names = {f"{part} n=8": Case("moe_ops", f"{part} n=8", lambda device: (print, ()), 1, 1) for part in ("fp8 wq_a", "fp8 wo_a", "router")}
    x, codes = torch.ones((2, 32)).bfloat16(), torch.zeros((64, 32), dtype=torch.uint8)
    found = baseline(names["fp8 wq_a n=8"], (x, codes, None, None, None, 1))
    assert found is not None and found[0] == "torch.mm, bf16" and found[1]().shape == (2, 64)  # type: ignore[attr-defined]
    assert baseline(names["fp8 wo_a n=8"], (x, codes, None, None, None, 8)) is None
    assert baseline(names["router n=8"], (x,)) is None


def test_variants_are_of_the_attention() -> None:
    found = variants(cases())
    assert {case.file for case in found} == {"attend_ops"} and len(found) == len({case.name for case in found})
