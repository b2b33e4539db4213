"""The fused network against the reference network: prompts, generated tokens, and resumed ones.

On a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engines import tiny_checkpoint, tiny_config
from forebay.cache.layout import KVLayout
from forebay.engine import launch
from forebay.engine.fused_runner import FusedRunner, working_bytes
from forebay.engine.llm import LLM
from forebay.model.errors import ConfigError
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.rows import Parcel, _scans, score_columns
from forebay.model.fused.step import BlockTables, DecodeRow, DecodeStep
from forebay.model.fused.weights import check_shapes
from forebay.model.memory import CacheMemory
from forebay.model.source import resolve
from forwards import ENCODER_ONLY, Hand, step

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def backbone() -> FusedBackbone:
    return FusedBackbone(resolve(str(tiny_checkpoint())).open(), device=DEVICE)


def reference(device: str = "cpu") -> LLM:
    return LLM(str(tiny_checkpoint()), device, kernels=False, max_sequences=8, decoder_tokens=64, kv_tokens=2048)


def fused(backbone: FusedBackbone) -> LLM:
    """The same engine over the fused network, with buckets that leave padded rows."""
    llm = reference(DEVICE)
    fuse(llm, backbone)
    return llm


def fuse(llm: LLM, backbone: FusedBackbone) -> None:
    runner = llm.engine.runner
    llm.engine.runner = FusedRunner(backbone, runner.blocks, runner.windows, max_tokens=256, buckets=(1, 4))


def ids(length: int, number: int = 0) -> list[int]:
    return [(i * i * 37 + 11 * i + 501 * number) % 3900 + 100 for i in range(length)]


def distance(here: Tensor, there: Tensor) -> float:
    there = there.float().cpu()
    return float((here.float().cpu() - there).norm() / there.norm())


def same(here: Tensor, there: Tensor) -> bool:
    return torch.equal(here.cpu(), there.cpu())


def test_prompts_agree(backbone: FusedBackbone) -> None:
    """Two sequences in one batch, one of them in two chunks, with images, one of them in both; memory that was never written is poison."""
    seen = torch.randn((7, 64), generator=torch.Generator().manual_seed(5)).bfloat16()
    records: list[dict[str, list[Tensor]]] = []
    results = []
    for make in (reference, lambda: fused(backbone)):
        record: dict[str, list[Tensor]] = {}
        with make() as llm, Hand(llm, ids(14)) as long, Hand(llm, ids(4, 1)) as brief:
            long.show(6, seen[:5])
            brief.show(1, seen[5:])
            step(llm, [long.row(0, 9, decoder_from=ENCODER_ONLY)], record)  # the decoder half's windows stay poison below their floor
            logits = step(llm, [brief.row(0, 4), long.row(9, 14, decoder_from=11, decoder_window_from=11)], record)
            results.append((logits, long.stored(14), brief.stored(4)))
        records.append(record)
    there, here = records
    assert all(distance(a, b) <= 1e-3 for a, b in zip(here["layer0.attn_in"], there["layer0.attn_in"], strict=True))
    assert all(map(same, here["layer1.engram_rows"], there["layer1.engram_rows"]))
    chosen = torch.cat([(a.cpu() == b).all(1) for a, b in zip(here["layer0.topk"], there["layer0.topk"], strict=True)])
    assert chosen.float().mean() >= 0.8
    # One ulp grows about 1.3 times a layer in a random network, and other entries are chosen now and then; unrelated numbers are 1.4 apart.
    for name, limit in (("layer0.attn_out", 0.05), ("layer0.ffn_out", 0.06), ("layer1.ffn_out", 0.2)):
        assert all(distance(a, b) <= limit for a, b in zip(here[name], there[name], strict=True)), name
    (wanted, *stored), (found, *kept) = results
    assert all(distance(a, b) <= 0.5 for a, b in zip(found, wanted, strict=True))
    for a, b in zip(kept, stored, strict=True):
        nearly(a, b)


def test_generated_tokens_agree(backbone: FusedBackbone) -> None:
    """A token of two sequences in a step of four rows: the others are padding. One ends at a boundary, and its window is copied. Their
    prompts are the reference's in both cases."""
    results, seen = [], torch.ones((1, 64), dtype=torch.bfloat16)
    lengths = (2, 11)
    for device, network in (("cpu", None), (DEVICE, backbone)):
        with reference(device) as llm, Hand(llm, ids(3)) as a, Hand(llm, ids(12, 1)) as b:
            hands = (a, b)
            a.show(1, seen)  # what is generated must not look back over it
            a.sequence.prompt_tokens = 2
            for hand, length in zip(hands, lengths, strict=True):
                step(llm, [hand.row(0, length)])
            if network is not None:
                fuse(llm, network)
            b.sequence.copy_at = [12]
            rows = [hand.row(n, n + 1, wants_logits=True) for hand, n in zip(hands, lengths, strict=True)]
            logits = llm.engine.runner.run(rows)[0].clone()
            results.append((logits, [hand.stored(n + 1) for hand, n in zip(hands, lengths, strict=True)]))
            held = torch.arange(12 - llm.config.sliding_window, 12) % llm.config.sliding_window
            assert same(b.sequence.copies[12][:, held], b.ring()[:, held])
            if isinstance(llm.engine.runner, FusedRunner):
                assert set(llm.engine.runner._steps) == {4}
    (wanted, stored), (found, kept) = results
    assert distance(found, wanted) <= 0.5
    for one, other in zip(kept, stored, strict=True):
        nearly(one, other)


def nearly(kept: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """What sequences leave in memory: equal bytes of the first layer, but for sums in another order, and mostly equal ones behind it."""
    assert kept.keys() == stored.keys()
    for name, wanted in stored.items():
        found = kept[name].cpu()
        assert found.shape == wanted.shape
        if wanted.dtype == torch.float32:
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4), name
        else:
            assert (found != wanted).float().mean() <= (0.002 if name == "layer0.entries" else 0.5), name  # other bytes differ in 0.99
    assert (kept["windows"][0].cpu() != stored["windows"][0]).float().mean() <= 0.002


def test_parcel_keeps_shapes() -> None:
    parcel = Parcel()
    parts = [np.arange(5), np.zeros(0, dtype=np.int64), np.arange(6).reshape(2, 3)]
    for part in parts:
        parcel.add(part)
    for sent, part in zip(parcel.send(torch.device(DEVICE)), parts, strict=True):
        assert sent.dtype == torch.int32
        assert sent.tolist() == part.tolist()


def test_scans_cover_every_row_once() -> None:
    span = np.repeat([0, 1, 2], [40, 1, 7])
    seen = np.concatenate([np.arange(40), [1_000_000], np.arange(90, 97)])
    covered = []
    for first, last, columns, starts, counts in _scans(seen, span):
        assert columns == seen[first:last].max()
        for start, count in zip(starts, counts, strict=True):
            rows = range(first + start, first + start + count)
            assert len(set(span[list(rows)])) == 1
            covered += rows
    assert covered == list(range(48))


def test_scores_have_few_widths() -> None:
    """Eight for each doubling of the text, so that a server can compile for all of them before it meets one."""
    assert [score_columns(n) for n in (0, 1, 1025, 524_289, 1_000_000)] == [0, 128, 1280, 655_360, 1 << 20]
    entries = np.unique(np.geomspace(1, 1 << 20, 3000).astype(np.int64))
    widths = [score_columns(int(n)) for n in entries]
    assert all(n <= w <= max(128, 1.25 * n + 128) for n, w in zip(entries, widths, strict=True))
    assert len({w for w in widths if w > 1024}) == 40


def test_sizes_that_kernels_cannot_take_are_named() -> None:
    for name, value in (("hc_mult", 3), ("num_attention_heads", 128), ("index_head_dim", 96), ("compress_ratios", (4, 4, 1, 1))):
        with pytest.raises(ConfigError, match=f"{name} must be .* for the GPU kernels"):
            check_shapes(replace(tiny_config(), **{name: value}))


def test_a_model_without_kernels_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert launch.without_kernels(tiny_config(), "cuda") is None
    assert "num_attention_heads must be at most 64" in str(launch.without_kernels(replace(tiny_config(), num_attention_heads=128), "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert launch.without_kernels(tiny_config(), "cuda") == "they need compute capability 9.0, this GPU has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert launch.without_kernels(tiny_config(), "cuda:0") is None
    assert "which cuda:1 is not" in str(launch.without_kernels(tiny_config(), "cuda:1"))
    monkeypatch.setattr(launch, "version", lambda name: "3.5.1+git")
    assert launch.without_kernels(tiny_config(), "cuda") == "they need triton 3.6 or newer, 3.5.1+git is installed"
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert "triton is not installed" in str(launch.without_kernels(tiny_config(), "cuda"))


@pytest.mark.parametrize("device", ["cud", "cudaa", "cuda:", "cuda:x", "mps"])
def test_devices_that_there_are_not(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be 'cpu' or 'cuda'"):
        launch.check_device(device)


def test_tables_send_only_what_is_new() -> None:
    tables = BlockTables(4, 8, torch.device(DEVICE))
    one, two = [5, 6], [7]
    tables.update([(1, one), (2, two)])
    one += [9]
    tables.data[1, 0] = 0  # would be 5 again if it were sent again
    tables.update([(1, one), (2, two)])
    assert tables.data[:, :4].tolist() == [[0, 0, 0, 0], [0, 6, 9, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    tables.update([(1, [8])])  # another sequence in the slot
    assert tables.data[1, :2].tolist() == [8, 6]
    tables.update([(3, [1] * 9)])  # a block to spare at the end of the longest sequence
    assert tables.data[3].tolist() == [1] * 8
    assert tables.data[2, :2].tolist() == [7, 0]


def test_positions_beyond_the_longest_sequence_are_refused(backbone: FusedBackbone) -> None:
    with reference(DEVICE) as llm:
        memory = llm.engine.runner.memory
        assert isinstance(memory, CacheMemory)
        step_of_one = DecodeStep(backbone, memory, 1, 1)
        with pytest.raises(ValueError, match="sequences of 1 blocks"):
            step_of_one.run([DecodeRow(100, [-1] * step_of_one.depth, 8, 1, 0, 0, 0, [1])])


def test_working_memory_is_estimated_for_the_released_sizes() -> None:
    """Weights of 64 experts take 58 GB, eight contexts of a million tokens 7.5 GB: both fit beside it on a GPU of 141 GB."""
    config = resolve("synthetic:v41-flash,experts=64").config
    small, large = working_bytes(config, 8, 512, 1 << 20), working_bytes(config, 64, 8192, 1 << 20)
    assert 2 << 30 < small < 4 << 30
    assert small < large < 12 << 30


def test_a_gpu_without_room_for_kv_is_refused() -> None:
    layout = KVLayout.of(tiny_config())
    assert launch._kv_bytes(layout, 10 << 30, 2 << 30) == int(0.9 * (8 << 30))
    for free in (2 << 30, (2 << 30) + layout.block_bytes):
        with pytest.raises(ConfigError, match=r"2\.1 GB are free beside the weights, and steps and windows may take 2\.1 GB"):
            launch._kv_bytes(layout, free, 2 << 30)


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from forebay.model.fused.compiling import compiling
from forebay.model.ops.kernels import store_ops

class Hopper:  # what Triton asks of a driver before it launches anything
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Hopper())
out = torch.full((16, 2, 4), -1.0)
with compiling(2):
    for _ in range(3):
        store_ops.turn_table(torch.arange(16), torch.ones(4), 1, out)
assert bool((out == -1.0).all())  # it was compiled, not run
"""


def test_kernels_are_compiled_in_other_processes(tmp_path: Path) -> None:
    """For a GPU that this machine need not have; what is compiled once is found in Triton's cache from then on."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=120)
        (made,) = tmp_path.glob("*/turn_table.cubin")
        assert made.stat().st_size > 0
