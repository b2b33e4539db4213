"""GPU benchmarks, the parts that need no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.engine.active_flops import layer_flops, prefill_flops
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
    encoder = sum(layer_flops(config, plan) for plan in config.topology().encoder)
    assert prefill_flops(config, 1001) - prefill_flops(config, 1000) == encoder
    assert prefill_flops(config, 101) - prefill_flops(config, 100) > 1.9 * encoder


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
