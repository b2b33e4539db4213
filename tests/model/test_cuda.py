"""The same source on a GPU: needs a CUDA device, so CI on a CPU machine skips it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.engine.llm import LLM
from forebay.engine.types import SamplingParams
from forebay.model.ops import formats
from noise_model import noise_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def both() -> tuple[LLM, LLM]:
    cpu, cuda = (LLM(str(noise_checkpoint()), device=device, prefix_reuse=False) for device in ("cpu", "cuda"))
    return cpu, cuda


@pytest.fixture(scope="module")
def traces(both: tuple[LLM, LLM]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ids = [(i * i * 37 + 11 * i) % 3900 + 100 for i in range(200)]
    cpu, cuda = (llm.trace(ids) for llm in both)
    return cpu, {name: value.cpu() for name, value in cuda.items()}


@pytest.mark.parametrize("name", ["fp8_round", "index_round", "fp8_encode", "index_encode", "main_encode"])
def test_formats_are_exact(name: str) -> None:
    x = (torch.randn(64, 128, generator=torch.Generator().manual_seed(3)) * 3).to(torch.bfloat16)
    here, there = getattr(formats, name)(x), getattr(formats, name)(x.cuda())
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (here, there)), strict=True):
        assert torch.equal(a, b.cpu())


# A random network amplifies one ulp about 1.3 times a layer (the golden notes measure the like between two CPU implementations), so the
# first layers are held tightly and the end only to the same distribution.
@pytest.mark.parametrize(
    ("name", "limit"),
    [("layer0.attn_in", 0.0), ("layer0.attn_out", 1e-3), ("layer0.ffn_out", 1e-3), ("layer1.attn_out", 0.03), ("layer2.attn_out", 0.1)],
)
def test_first_layers_agree(traces: tuple[dict[str, Tensor], dict[str, Tensor]], name: str, limit: float) -> None:
    cpu, cuda = (t[name].float() for t in traces)
    assert (cuda - cpu).norm() <= limit * cpu.norm()


def test_engram_rows_and_first_entries_agree(traces: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    cpu, cuda = traces
    assert torch.equal(cpu["layer1.engram_rows"], cuda["layer1.engram_rows"])
    assert (cpu["layer2.main_kv_code"] == cuda["layer2.main_kv_code"]).float().mean() > 0.95
    assert (cpu["layer2.topk"] == cuda["layer2.topk"]).float().mean() > 0.9


def test_logits_have_the_same_distribution(traces: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    cpu, cuda = (t["logits"].log_softmax(-1) for t in traces)
    assert torch.nn.functional.kl_div(cuda, cpu, log_target=True, reduction="none").sum(-1).mean() < 0.2


def test_generates_in_a_batch(both: tuple[LLM, LLM]) -> None:
    prompts = [[100 + i, 7, 300 + i] * 30 for i in range(16)]
    outputs = both[1].generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    assert all(len(o.token_ids) == 12 for o in outputs)
