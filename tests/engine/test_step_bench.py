"""`bench step` without a GPU: real engine, memory and steps around a network that computes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import tiny_checkpoint
from forebay.engine.gpu_timing import Ceilings, Kernel
from forebay.model.ops import formats
from forebay.server.cli import main

if find_spec("triton") is None:
    pytest.skip("triton is not installed (the extra `gpu`)", allow_module_level=True)

from forebay.engine import launch, step_bench, step_report
from forebay.engine.fused_runner import FusedRunner
from forebay.engine.prefill_bench import held_bytes, open_engine
from forebay.engine.step_run import Run, Wanted, pairs
from forebay.model.fused.half import Half
from forebay.model.fused.network import Flow, FusedBackbone
from forebay.model.ops.hyper_connections import Coefficients
from forebay.model.source import resolve
from forebay.server.commands import bench_model

CEILINGS = Ceilings(4e12, 8e14, None)
KERNELS = {"full": 5, "reuse": 3, "reindex": 4}  # that the stand-in pretends to launch in a layer


class HostTimer:
    """A timer of the host; the stand-in network tells it what it launches."""

    def __init__(self) -> None:
        self.log: list[Kernel] = []
        self.marks = True

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        pass

    def each(self, work: Callable[[], object], samples: int) -> list[float]:
        found = []
        for _ in range(samples):
            began = self.now()
            work()
            found.append(self.now() - began)
        return found

    def done(self) -> HostTimer:
        return self

    def mark(self) -> None:
        if self.marks:
            self.log.append(Kernel("mark", 0.0))

    def kernels(self, work: Callable[[], object]) -> list[Kernel]:
        self.log = []
        work()
        return self.log

    def allocated(self) -> int:
        return 5

    def peak(self, work: Callable[[], object]) -> int:
        work()
        return 1 << 30


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> HostTimer:
    """The timer, and a `FusedBackbone` whose layers only choose experts: two each, by row."""
    found = HostTimer()

    def layer(self: FusedBackbone, number: int, flow: Flow, history: Any, half: Half, hidden: Any = None) -> Flow:
        role = self.topology.layers[number].role
        found.log += [Kernel(f"{role} {i}", 1e-6) for i in range(KERNELS[role])]
        rows = torch.arange(half.rows.rows, dtype=torch.int32).unsqueeze(1)
        half.note(f"layer{number}.router_indices", torch.cat((rows % 4, rows * 0 - 1), 1))
        return flow

    def encoder(self: FusedBackbone, token_ids: Tensor, history: Tensor | None, half: Half, images: Any = ()) -> Flow:
        n, c = token_ids.numel(), self.config
        x = torch.ones((n, c.hidden_size), dtype=torch.bfloat16)
        found.log.append(Kernel("Memset outside", 1e-6))
        small = torch.ones((n, c.hc_mult))
        flow = Flow(x.unsqueeze(1).repeat(1, c.hc_mult, 1), x, x, Coefficients(small, small, small))
        for number in range(self.topology.cut):
            flow = self._layer(number, flow, history, half)
        return flow

    def decoder(self: FusedBackbone, flow: Flow, history: Tensor | None, half: Half) -> Tensor:
        for number in range(self.topology.cut, len(self.layers)):
            flow = self._layer(number, flow, history, half)
        return flow.x

    for name, method in (("_layer", layer), ("run_encoder", encoder), ("run_decoder", decoder)):
        monkeypatch.setattr(FusedBackbone, name, method)
    return found


def rig(timer: HostTimer, **sizes: Any) -> step_bench.Rig:
    given: dict[str, Any] = {"sequences": 4, "kv_tokens": 2048, "encoder_tokens": 16, "buckets": [1, 4], "max_tokens": 1024, **sizes}
    runner = open_engine(resolve(str(tiny_checkpoint())).open(), "cpu", **given).runner
    assert isinstance(runner, FusedRunner)
    return step_bench.Rig(runner, timer)


def wanted(*parts: str, **changes: Any) -> Wanted:
    given: dict[str, Any] = {
        "parts": parts or ("step", "launches", "memory", "prefill", "torch"), "pairs": [(1, 64), (1, 640), (4, 64)], "samples": 3,
        "chunks": [16, 8], "prompt": 40, "repeats": 2, "rows": 32, "compared": (str(tiny_checkpoint()), 12), **changes,
    }  # fmt: skip
    return Wanted(**given)


def run(timer: HostTimer, chosen: Wanted, budget: float | None = None) -> dict[str, Any]:
    lines: list[str] = []
    figures = Run(chosen, str(tiny_checkpoint()), "cpu", timer, CEILINGS, budget, lines.append).all()
    header = {"device": "D", "date": "d", "torch": "t", "triton": "r", "ceilings": {"copy": 4e12, "bf16": 8e14, "fp8": None}}
    return {**header, **json.loads(json.dumps(figures))}


def test_all_parts(timer: HostTimer) -> None:
    figures = run(timer, wanted())
    assert figures["errors"] == {} and figures["not run"] == []
    assert [(row["batch"], row["context"]) for row in figures["steps"]] == [(1, 64), (1, 640), (4, 64)]
    assert [row["experts"] for row in figures["steps"]] == [[1] * 4, [1] * 4, [4] * 4]
    assert all(row["graph_distance"] == 0 for row in figures["steps"])
    for row in figures["steps"]:
        assert row["fraction"] == pytest.approx(sum(row["bytes"].values()) / 4e12 / row["device_s"])
    decode, prefill = figures["launches"][0], figures["launches"][-1]
    assert [(row["layer"], row["kernels"]) for row in decode["layers"]] == [(0, 5), (1, 3), (2, 5), (3, 4)]
    assert decode["roles"]["reuse at the end"]["kernels"] == [3] and decode["roles"]["full before engram"]["kernels"] == [5]
    assert decode["kernels"] == 18 and decode["names"][0]["name"] in {"full 0", "full 1", "full 2", "full 3", "full 4"}
    assert [row["name"] for row in decode["reuse"]] == ["reuse 0", "reuse 1", "reuse 2"]
    assert prefill["work"] == "prefill" and prefill["rows"] == 32 and prefill["roles"]["reuse at the end"]["kernels"] == [3]
    assert [(row["chunk"], len(row["samples_s"])) for row in figures["prefill"]] == [(16, 2), (8, 2)]
    memory = figures["memory"]
    assert memory["bytes_per_token"] == memory["bytes_per_token_of_layout"]
    assert memory["works"][0]["above"] == (1 << 30) - memory["weights"] - memory["blocks"] - memory["windows"]
    text = step_report.markdown(figures)
    assert "| 4 | 64 |" in text and "| prefill | 32 | 64 | 18 |" in text and "4 layers of 4 experts" in text
    assert "reuse 0" in step_report.busiest(figures, 5)


def test_a_part_that_fails_and_a_budget(timer: HostTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    timer.marks = False
    figures = run(timer, wanted("launches", pairs=[(1, 64)]))
    assert figures["errors"]["kernels of a step of 1 at 64"] == "RuntimeError: the profiler saw 0 marks of 8, named []"
    assert figures["launches"] == [] and figures["steps"] == []
    assert "failed: kernels of a chunk of 32" in step_report.markdown(figures)
    assert run(timer, wanted("step", "torch"), budget=0.0)["not run"] == ["network", "torch operations"]
    assert run(timer, wanted("torch"))["open_s"] is None


def test_past_is_random_but_valid(timer: HostTimer) -> None:
    found = rig(timer)
    blocks, windows = found.runner.blocks, found.runner.windows
    assert not blocks.data[0].any() and not windows.data[0].any()
    for views in blocks.views.values():
        main = formats.main_decode(views.main_codes[1:], views.main_scales[1:])
        index = formats.index_decode(views.index_codes[1:], views.index_scales[1:])
        assert main.isfinite().all() and index.isfinite().all()
        assert 0.7 < main.std() < 1.3 and 0.7 < index.std() < 3
    values = formats.fp8_decode(windows.codes[1:], windows.scales[1:])
    assert values.isfinite().all() and len(windows.codes[1:].unique()) > 100


def test_sequences_have_blocks_of_their_own(timer: HostTimer) -> None:
    found = rig(timer)
    tables = found.tables(4, 100)
    assert len({block for table in tables for block in table}) == 4 * len(tables[0]) == 4 * 29  # 8 tokens a block, 128 tokens to grow
    assert tables is found.tables(4, 100), "a step sends a table once, which it knows by the list"
    assert len({block for table in found.tables(4, 1000) for block in table}) == 256, "what there is, again and again"
    steps = found.steps_from(1, 1022, 5)
    assert [rows[0].position for rows in steps] == [1021, 1022, 1023, 1021, 1022]
    assert found.spans(1, 64, 16, decoder_rows=4)[0].decoder_from == 60
    row = found.decode_rows(2, 64)[1]
    assert (row.position, row.slot, row.write_from, len(row.lookback)) == (63, 2, 63, found.config.engram_max_ngram_size - 1)


def test_a_real_step_over_random_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    record: dict[str, list[Tensor]] = {}
    assert rig(HostTimer()).decode_eager(1, 40, record).isfinite().all()
    chosen, experts = record["layer0.topk"][0], record["layer3.router_indices"][0]
    assert chosen.min() >= 0 and chosen.max() < 20 and len(experts.unique()) == 2


def test_bars() -> None:
    step = {"batch": 1, "context": 4096, "fraction": 0.6, "device_s": 5e-3, "host_s": 4e-4, "exposed_s": 0.0, "graph_distance": 0.0}
    long, many = {**step, "context": 1_000_000, "device_s": 6.5e-3}, {**step, "batch": 64, "fraction": 0.39, "exposed_s": 1e-3}
    launched = {
        "work": "decode",
        "rows": 1,
        "context": 4096,
        "roles": {"reuse": {"kernels": [10, 12]}, "reuse at the end": {"kernels": [13]}},
    }
    chunks = [{"tokens": 32768, "chunk": n, "fraction": share} for n, share in ((2048, 0.31), (4096, 0.2))]
    found = step_report.bars({"steps": [step, long, many], "launches": [launched], "prefill": chunks, "memory": None})
    assert [row["met"] for row in found] == [True, True, True, True, False, False, True, False, False, True]
    assert found[7]["value"] == "1.300" and found[8]["value"] == "10 to 12 (13 at the end of a half)"
    assert "chunks of 2,048" in found[9]["name"]


@pytest.mark.parametrize(("distance", "shown"), [(1e-3, "0.001"), (float("nan"), "nan")])
def test_a_captured_step_that_gives_something_else_misses_its_bar(distance: float, shown: str) -> None:
    step = {"batch": 2, "context": 64, "fraction": 1.0, "device_s": 1.0, "host_s": 0.0, "exposed_s": 0.0, "graph_distance": 0.0}
    found = step_report.bars({"steps": [step, {**step, "graph_distance": distance}], "launches": [], "prefill": [], "memory": None})
    (row,) = [row for row in found if row["name"].startswith("captured")]
    assert row["value"] == shown and not row["met"]


def test_pairs_and_pool() -> None:
    assert pairs([1, 64, 8], [4096, 1_000_000], 8_000_000) == [(1, 4096), (1, 1_000_000), (64, 4096), (8, 4096), (8, 1_000_000)]
    assert 8_000_000 < wanted(pairs=[(8, 1_000_000), (64, 4096)]).kv_tokens(128) < 8_010_000
    assert wanted(pairs=[(1, 64)], prompt=32_768).kv_tokens(128) == 65_664


def test_held_bytes_counts_memory_once() -> None:
    whole = torch.zeros(8)
    assert held_bytes([whole, {"part": whole[:2]}, (torch.zeros(2),), "text", 3]) == 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step"]) == 2
    assert capsys.readouterr().err == "forebay: bench step: this machine has no CUDA device that torch can use\n"


def test_streams_through_the_engine(timer: HostTimer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With captured steps, the graph's part and the host's are told apart."""

    def fused(weights: Any, layout: Any, device: str, options: Any, progress: Any, beside: int) -> FusedRunner:
        blocks, windows = launch._pools(layout, weights.config, options, device, 0)
        return FusedRunner(FusedBackbone(weights, device=device), blocks, windows, max_tokens=512, buckets=[1, 4])

    monkeypatch.setattr(launch, "_torch_runner", fused)
    monkeypatch.setattr(bench_model, "timer_of", lambda device: timer)
    file = tmp_path / "figures.json"
    args = ["--contexts", "16,64", "--steps", "4", "--repeats", "1", "--streams", "1,3,5", "--json", str(file)]
    assert main(["bench", "decode", "--model", str(tiny_checkpoint()), *args]) == 0
    figures = json.loads(file.read_text("utf-8"))
    assert " on cpu, GPU kernels, " in figures["measured"] and " on cpu, GPU kernels, " in figures["streams"]["measured"]
    rows = figures["streams"]["rows"]
    assert list(rows) == ["1", "3", "5"]
    assert all(set(rows[n]) == {"step, ms", "tokens/s", "graph, ms", "host, ms", "shows, ms"} for n in ("1", "3"))
    assert set(rows["5"]) == {"step, ms", "tokens/s"}  # as two graphs
    assert rows["3"]["tokens/s"] == pytest.approx(3000 / rows["3"]["step, ms"])
