"""Synthetic weights made on the device: shapes, numbers, memory of their own, and a network that runs on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forebay.engine.launch import build_client, build_engine
from forebay.engine.llm import LLM
from forebay.engine.options import EngineOptions
from forebay.engine.types import OutputEvent, Request, SamplingParams
from forebay.model import device_synthetic
from forebay.model.config import ModelConfig
from forebay.model.device_synthetic import DeviceSynthetic
from forebay.model.errors import CheckpointError, ConfigError
from forebay.model.source import resolve
from noise_model import noise_checkpoint

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.load(noise_checkpoint())


@pytest.fixture(params=DEVICES, ids=str)
def source(request: pytest.FixtureRequest, config: ModelConfig) -> DeviceSynthetic:
    return DeviceSynthetic(config, request.param)


def values_of(source: DeviceSynthetic, name: str) -> Tensor:
    """Dequantised [rows, columns] fp32 on the host."""
    codes, scales = source.tensor(f"{name}.weight").cpu(), source.tensor(f"{name}.scale").cpu()
    powers = torch.exp2(scales.float() - 127)
    if source.specs[f"{name}.weight"].dtype == "I8":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
        return table[pairs & 7] * (1 - 2 * (pairs >> 3)) * powers.repeat_interleave(32, 1)
    return codes.view(torch.float8_e4m3fn).float() * powers.repeat_interleave(32, 0).repeat_interleave(32, 1)


def test_every_tensor_has_its_shape_and_finite_numbers(source: DeviceSynthetic) -> None:
    for name, spec in source.specs.items():
        if spec.part == "engram tables":
            continue
        tensor = source.tensor(name)
        assert tuple(tensor.shape) == spec.shape, name
        assert tensor.numel() * tensor.element_size() == spec.nbytes, name
        assert tensor.device.type == source.device.type, name
        if spec.dtype == "F8_E4M3":
            assert not bool(((tensor & 0x7F) == 0x7F).any()), name
        elif spec.dtype == "F8_E8M0":
            assert tensor.unique().numel() == 1, name
        elif spec.dtype != "I8":
            assert bool(torch.isfinite(tensor).all()), name


@pytest.mark.parametrize("name", ["layers.0.attn.wq_b", "layers.3.attn.wo_b", "layers.2.ffn.experts.1.w1", "layers.2.ffn.experts.1.w2"])
def test_matrices_keep_numbers_in_size(source: DeviceSynthetic, name: str) -> None:
    values = values_of(source, name)
    gain = float(values.std()) * math.sqrt(values.shape[1])
    assert 0.7 < gain < 1.5  # the scale is a power of two
    assert abs(float(values.mean())) < 0.1 * float(values.std())


def test_same_name_same_numbers(source: DeviceSynthetic, config: ModelConfig) -> None:
    again, other = DeviceSynthetic(config, source.device), DeviceSynthetic(config, source.device, seed=1)
    names = ["embed.weight", "layers.0.attn.wkv.weight", "layers.3.ffn.experts.2.w3.weight", "layers.4.hc_ffn_fn"]
    for name in reversed(names):
        again.tensor(name)  # in another order
    for name in names:
        tensor = source.tensor(name)
        assert torch.equal(tensor, again.tensor(name)), name
        assert not torch.equal(tensor, other.tensor(name)), name
    assert source.fingerprint == again.fingerprint != other.fingerprint


def test_every_layer_has_bytes_of_its_own(source: DeviceSynthetic, config: ModelConfig) -> None:
    found = [part for layer in range(config.num_hidden_layers) for part in source.stacked_experts(layer)[::2]]
    assert len({codes.untyped_storage().data_ptr() for codes in found}) == len(found)
    rows = torch.cat([codes.reshape(-1, 16).cpu() for codes in found])
    assert rows.unique(dim=0).shape[0] > 0.999 * rows.shape[0]


def test_stacked_experts_are_the_experts(source: DeviceSynthetic, config: ModelConfig) -> None:
    width = config.moe_intermediate_size
    up, up_scale, down, down_scale = source.stacked_experts(3)
    assert up.shape == (config.n_routed_experts, 2 * width, config.hidden_size // 2)
    for expert in (0, config.n_routed_experts - 1):
        at = f"layers.3.ffn.experts.{expert}."
        for name, codes, scales in (
            ("w1", up[expert, :width], up_scale[expert, :width]),
            ("w3", up[expert, width:], up_scale[expert, width:]),
            ("w2", down[expert], down_scale[expert]),
        ):
            assert torch.equal(codes, source.tensor(f"{at}{name}.weight")), name
            assert torch.equal(scales, source.tensor(f"{at}{name}.scale")), name


def test_long_matrices_are_drawn_in_parts(source: DeviceSynthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_synthetic, "DRAWN_AT_ONCE", 1000)
    codes = source.tensor("layers.0.attn.wkv.weight").view(-1)
    assert codes.numel() > 2000
    assert not torch.equal(codes[:1000], codes[1000:2000])
    assert 50 < float(codes.cpu().view(torch.float8_e4m3fn).float().std()) < 80


def test_engram_rows_are_folded(source: DeviceSynthetic, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_synthetic, "TABLE_ROWS", 128)
    layer = config.engram_layer_ids[0]
    table = source.engram_table(layer)
    width = config.engram_head_dim
    assert (table.modulo, table.width) == (128, width)
    assert table.codes.shape == (128, width)
    assert table.scales.shape == (128, width // 32)
    rows = table.read(torch.tensor([[3, 7], [131, 3]]))
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows[0, :width], rows[1, :width])
    assert torch.equal(rows[0, :width], rows[1, width:])
    assert not torch.equal(rows[0, :width], rows[0, width:])
    assert 0.9 < float(table.read(torch.arange(128)[:, None]).float().std()) < 1.1
    for bad in (-1, config.engram_num_embeddings[0]):
        with pytest.raises(IndexError):
            table.read(torch.tensor([[bad]]))


def test_synthetic_weights_are_made_where_the_network_runs() -> None:
    found = resolve("synthetic:v41-flash,experts=1,layers=6")
    assert not isinstance(found.open(), DeviceSynthetic)
    if torch.cuda.is_available():
        weights = found.open(device="cuda")
        assert isinstance(weights, DeviceSynthetic) and weights.device.type == "cuda"
        return
    for build in (lambda: LLM(found.name, "cuda"), lambda: build_client(model=found.name, device="cuda")):
        with pytest.raises(ConfigError, match="sees no CUDA device"):  # before anything is opened
            build()


def test_what_there_is_not(source: DeviceSynthetic, config: ModelConfig) -> None:
    for name in (f"layers.{config.engram_layer_ids[0]}.engram.embed.weight", "layers.99.attn_norm.weight"):
        with pytest.raises(CheckpointError, match=name):
            source.tensor(name)


def test_a_network_runs_on_them(config: ModelConfig) -> None:
    """The reference network, on the CPU: finite logits that depend on the prompt, and text inside the tokenizer's vocabulary."""
    engine = build_engine(DeviceSynthetic(config, "cpu"), model_name="synthetic", options=EngineOptions(kv_tokens=1024), chat=False)
    texts = []
    for first in (5, 6):
        events: list[OutputEvent] = []
        engine.sink = events.extend
        engine.submit(Request([first, *range(20, 90)], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)))
        while engine.busy:
            engine.step()
        texts.append([token for event in events for token in event.token_ids])
    assert [len(text) for text in texts] == [6, 6]
    assert texts[0] != texts[1]
    assert max(map(max, texts)) < engine.tokenizer.vocab_size
    engine.close()
