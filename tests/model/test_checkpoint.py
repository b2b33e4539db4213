"""Reading the official layout: what must be there, what is refused, and that nothing is read before it is used."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from forebay.model.checkpoint import Checkpoint, expected_tensors, optional_tensors, write_checkpoint
from forebay.model.config import ModelConfig, real_config
from forebay.model.errors import CheckpointError, ConfigError
from forebay.model.names import TensorSpec, vision_tensors
from forebay.model.random_weights import random_tensors
from forebay.model.shards import Shard, damaged_values
from noise_model import CONFIG, TOKENIZER
from vision_model import TINY_VISION

SMALL: dict[str, Any] = copy.deepcopy(CONFIG)
SMALL["text_config"].update(
    vocab_size=96, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=2, head_dim=32, qk_rope_head_dim=8,
    q_lora_rank=32, o_lora_rank=32, o_groups=2, n_routed_experts=3, compress_ratios=[0, 2, 2, 1, 1], kv_source_layer_ids=[1, 3],
    index_source_layer_ids=[1, 3, 4], candidate_source_layer_id=3, index_n_heads=2, engram_layer_ids=[1], engram_vocab_size=50,
    engram_n_heads=2, engram_num_embeddings=[53 + 59 + 61 + 67 + 71 + 73],
)  # fmt: skip
TABLE = "layers.1.engram.embed.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(ModelConfig.from_dict(SMALL), seed=7)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A whole checkpoint in several shards."""
    path = tmp_path / "model"
    path.mkdir()
    write_checkpoint(path, SMALL, tensors, max_shard_bytes=60_000)
    shutil.copyfile(TOKENIZER, path / "tokenizer.json")
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def shard_of(folder: Path, name: str) -> Path:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return folder / str(weight_map[name])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], tensors: dict[str, torch.Tensor]) -> None:
    """Write the checkpoint again with changed tensors."""
    changed = dict(tensors)
    change(changed)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    write_checkpoint(folder, SMALL, changed, max_shard_bytes=60_000)


# --- the names table -------------------------------------------------------------------------------------------------


def test_released_tensor_list() -> None:
    config = real_config()
    specs = expected_tensors(config)
    assert len(specs) == 93_418
    assert sum(spec.nbytes for spec in specs.values()) == 501_382_611_408
    assert len(optional_tensors(config)) == 2_401

    def layer_bytes(number: int, *, engram: bool) -> int:
        prefix = f"layers.{number}."
        return sum(s.nbytes for n, s in specs.items() if n.startswith(prefix) and (".engram." in n) == engram)

    plain = 7_389_500_888
    assert layer_bytes(0, engram=False) == plain
    assert layer_bytes(2, engram=False) == plain + 16_193_792
    assert layer_bytes(20, engram=False) == plain + 10_950_912
    assert layer_bytes(24, engram=False) == plain + 5_575_680
    assert layer_bytes(1, engram=True) == 101_535_150_272
    assert layer_bytes(14, engram=True) == 101_537_925_968
    assert specs["layers.14.engram.embed.scale"] == TensorSpec((384016682, 8), "F8_E8M0", "engram tables")
    assert specs["layers.3.attn.wo_a.scale"] == TensorSpec((256, 128), "F8_E8M0", "attention")
    drafts = optional_tensors(config)
    assert drafts["mtp.0.main_proj.scale"].shape == (160, 480)
    assert drafts["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)


def test_scale_tiles_round_up() -> None:
    raw = copy.deepcopy(SMALL)
    raw["text_config"].update(o_groups=2, num_attention_heads=2, index_n_heads=2, o_lora_rank=48)
    specs = expected_tensors(ModelConfig.from_dict(raw))
    assert specs["layers.0.attn.wo_a.weight"].shape == (96, 32)
    raw["text_config"].update(o_groups=1, num_attention_heads=1, o_lora_rank=32, head_dim=32, hidden_size=32)
    raw["text_config"].update(n_shared_experts=1, moe_intermediate_size=32, engram_head_dim=32)
    assert expected_tensors(ModelConfig.from_dict(raw))["layers.1.engram.wkv.scale"].shape == (5, 6)


@pytest.mark.parametrize("name", ["tiny-a", "tiny-d"])
def test_golden_checkpoints_open(golden: Path, name: str) -> None:
    path = golden / name / "checkpoint"
    checkpoint = Checkpoint.open(path)
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert set(checkpoint.specs) == set(stored)
    assert checkpoint.has_drafts == (name == "tiny-d")
    assert not checkpoint.has_vision
    for key, value in stored.items():
        mine = checkpoint.tensor(key)
        assert mine.shape == value.shape
        assert torch.equal(mine.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
        assert mine.dtype == (value.dtype if value.dtype in (torch.bfloat16, torch.float32) else torch.uint8)


# --- a sound checkpoint ----------------------------------------------------------------------------------------------


def test_round_trip_parts_and_progress(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    seen: list[tuple[int, int, str]] = []
    checkpoint = Checkpoint.open(folder, progress=lambda done, total, name: seen.append((done, total, name)))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert checkpoint.total_bytes == sum(t.numel() * t.element_size() for t in tensors.values()) == sum(checkpoint.parts().values())
    assert {"embedding", "head", "attention", "indexer", "experts", "engram tables", "mhc", "router"} <= set(checkpoint.parts())
    assert {name for _, _, name in seen[:-1]} == set(tensors)
    assert seen[0][0] == 0
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes, "")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    # The library that everyone else uses reads the files as written.
    library = safetensors.torch.load_file(shard_of(folder, "layers.0.hc_attn_fn"))
    assert torch.equal(library["layers.0.hc_attn_fn"], tensors["layers.0.hc_attn_fn"])
    with pytest.raises(CheckpointError, match=r"holds no tensor 'layers\.9\.nothing'"):
        checkpoint.tensor("layers.9.nothing")


def test_single_file_without_index(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_checkpoint(tmp_path, SMALL, tensors)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).total_bytes > 0
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors \(only weights"):
        Checkpoint.open(tmp_path)


def test_fingerprint_knows_content_not_files(folder: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    first = Checkpoint.open(folder, scan=False).fingerprint
    other = tmp_path / "other"
    other.mkdir()
    write_checkpoint(other, SMALL, tensors)
    shutil.copyfile(TOKENIZER, other / "tokenizer.json")
    assert Checkpoint.open(other, scan=False).fingerprint == first
    changed = tensors | {"norm.weight": tensors["norm.weight"] * 2}
    write_checkpoint(other, SMALL, changed)
    assert Checkpoint.open(other, scan=False).fingerprint != first
    write_checkpoint(other, SMALL, tensors)
    (other / "tokenizer.json").write_text("{}")
    assert Checkpoint.open(other, scan=False).fingerprint != first


def test_misaligned_tensors_are_read_right(tmp_path: Path) -> None:
    header = {"a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}}
    text = json.dumps(header).encode()
    payload = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + payload)
    shard = Shard(tmp_path / "x.safetensors")
    assert shard.tensor("b").tolist() == [1.5, -2.0]
    assert shard.tensor("a").tolist() == [1, 2, 3]


# --- damage (B127) ---------------------------------------------------------------------------------------------------


@pytest.mark.case("B127")
@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_shard(folder: Path, cut: int) -> None:
    shard = shard_of(folder, "layers.2.attn.wq_a.weight")
    shard.write_bytes(shard.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated, .*first tensor cut off: \S+"):
        Checkpoint.open(folder)


@pytest.mark.case("B127")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too short"),
        (b"\x10\x00\x00", "too short"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "corrupt header, its length"),
        ((500).to_bytes(8, "little") + b"{}", "truncated, the header needs 508"),
        ((6).to_bytes(8, "little") + b"{nope}", "corrupt header"),
        ((6).to_bytes(8, "little") + b"\xff" * 6, "corrupt header"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "corrupt header"),
        ((15).to_bytes(8, "little") + b'{"a":1,"a":{} }', "a name occurs twice"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "a lacks a valid dtype"),
        ((2).to_bytes(8, "little") + b"{}junk", "describes only 10"),
    ],
)
def test_corrupt_header(folder: Path, content: bytes, says: str) -> None:
    shard = shard_of(folder, "norm.weight")
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*{says}.*the index puts \d+ tensors there") as caught:
        Checkpoint.open(folder)
    assert "missing tensors" not in caught.value.message  # said once, with the file


@pytest.mark.case("B127")
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"a is F32 \[2\] but has 4 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "a begins at byte"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "lacks a valid"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "lacks a valid"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "has data_offsets"),
    ],
)
def test_header_that_contradicts_itself(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match=says):
        Shard(tmp_path / "x.safetensors")


@pytest.mark.case("B127")
def test_removed_shard(folder: Path) -> None:
    shard = shard_of(folder, "head.weight")
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: the file is missing \(the index puts \d+ tensors there\)"):
        Checkpoint.open(folder)


@pytest.mark.case("B127")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("layers.2.attn.wkv.weight", 0x7F),
        ("layers.2.attn.wkv.weight", 0xFF),
        ("layers.0.ffn.experts.1.w2.scale", 0xFF),
        ("layers.0.hc_ffn_fn", float("nan")),
        ("layers.3.attn.attn_sink", float("inf")),
        ("embed.weight", float("nan")),
        (TABLE, 0x7F),
    ],
)
def test_values_that_are_no_numbers(folder: Path, tensors: dict[str, torch.Tensor], name: str, code: float) -> None:
    def spoil(changed: dict[str, torch.Tensor]) -> None:
        changed[name] = changed[name].clone()
        changed[name].view(-1)[1] = code

    rewrite(folder, spoil, tensors)
    Checkpoint.open(folder, scan=False)
    with pytest.raises(CheckpointError, match=rf"{name} in {shard_of(folder, name).name}: not a finite number at element 1 of"):
        Checkpoint.open(folder)


def test_a_large_table_is_sampled(tmp_path: Path) -> None:
    rows = (80 << 20) // 32
    header = {"t": {"dtype": "F8_E4M3", "shape": [rows, 32], "data_offsets": [0, rows * 32]}}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + rows * 32)
        file.seek(8 + len(text) + rows * 32 - 5)
        file.write(b"\x7f")
    shard = Shard(path)
    found = list(damaged_values(shard.entries["t"], shard.raw("t"), sample=True))
    assert len(found) == 64
    assert found[:-1] == [None] * 63
    assert found[-1] is None or found[-1] == rows * 32 - 5
    assert list(damaged_values(shard.entries["t"], shard.raw("t"), sample=False))[-1] == rows * 32 - 5


@pytest.mark.case("B127")
def test_index_without_a_tensor_or_with_one_too_many(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("layers.1.attn.wo_b.scale")
    content["weight_map"]["layers.1.attn.wo_c.scale"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert f"layers.1.attn.wo_b.scale is in {file}, the index does not list it" in caught.value.message
    assert f"layers.1.attn.wo_c.scale is not in {file}, where the index puts it" in caught.value.message
    assert "missing tensors" not in caught.value.message


@pytest.mark.case("B127")
@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_unusable_index(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(folder)


@pytest.mark.case("B127")
def test_every_fault_is_in_one_error(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    def spoil(changed: dict[str, torch.Tensor]) -> None:
        del changed["layers.4.attn_norm.weight"]
        changed["layers.0.attn.wq_a.weight"] = changed["layers.0.attn.wq_a.weight"][:, :32]
        changed["layers.3.attn.kv_norm.weight"] = changed["layers.3.attn.kv_norm.weight"].float()
        changed["layers.3.rotary.inv_freq"] = torch.ones(4)

    rewrite(folder, spoil, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = caught.value.message
    assert "missing tensors (1), wrong shapes (1), wrong dtypes (1), unknown tensors (1)" in message
    assert "layers.4.attn_norm.weight (norms): BF16 [64]" in message
    assert "[32, 32], the configuration needs [32, 64]" in message
    assert "layers.3.attn.kv_norm.weight in " in message
    assert "F32, expected BF16" in message
    assert "layers.3.rotary.inv_freq in " in message


@pytest.mark.case("B127")
def test_engram_table_of_another_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    def swap(changed: dict[str, torch.Tensor]) -> None:
        changed[TABLE] = torch.zeros(400, 32, dtype=torch.uint8)
        changed[TABLE.replace("weight", "scale")] = torch.full((400, 1), 127, dtype=torch.uint8)

    rewrite(folder, swap, tensors)
    file = shard_of(folder, TABLE).name
    with pytest.raises(CheckpointError, match=rf"{TABLE} in {file}: \[400, 32\], the configuration needs \[384, 32\]"):
        Checkpoint.open(folder)


# --- half a model (B128) ---------------------------------------------------------------------------------------------


@pytest.mark.case("B128")
def test_missing_parts_are_listed(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    def strip(changed: dict[str, torch.Tensor]) -> None:
        for name in list(changed):
            if ".indexer." in name or ".engram." in name:
                del changed[name]

    rewrite(folder, strip, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    for part in ("(indexer)", "(engram tables)", "(engram)"):
        assert part in caught.value.message


@pytest.mark.case("B128")
def test_long_lists_are_capped(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    def strip(changed: dict[str, torch.Tensor]) -> None:
        for name in list(changed):
            if ".ffn.experts." in name:
                del changed[name]

    rewrite(folder, strip, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "missing tensors (90)" in caught.value.message
    assert "… and 70 more" in caught.value.message
    assert len(caught.value.message.splitlines()) == 23


@pytest.mark.case("B128")
def test_hash_constants_that_do_not_fit(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["engram_num_embeddings"] = [390]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"390 rows .* need 384"):
        Checkpoint.open(folder)


@pytest.mark.case("B128")
def test_absent_drafter_and_vision_are_said(golden: Path, tmp_path: Path) -> None:
    whole = golden / "tiny-d" / "checkpoint"
    raw = json.loads((whole / "config.json").read_text())
    stored = safetensors.torch.load_file(whole / "model.safetensors")
    raw["vision_config"] = TINY_VISION
    backbone = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    write_checkpoint(tmp_path, raw, backbone)
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.has_drafts
    assert not checkpoint.has_vision
    assert any("lacks its 3 draft stages" in note for note in checkpoint.notes)
    assert any("lacks its vision tower" in note for note in checkpoint.notes)

    write_checkpoint(tmp_path, raw, stored | vision_half(raw))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.has_drafts
    assert checkpoint.has_vision
    assert checkpoint.notes == ()
    assert checkpoint.parts()["vision"] == sum(2 * t.numel() for t in vision_half(raw).values())

    write_checkpoint(tmp_path, raw | {"vision_config": None}, stored | vision_half(raw))
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.has_vision
    assert any("vision tensors are present but the configuration has no vision_config" in note for note in checkpoint.notes)

    half = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.1.ffn.gate")}
    half["mtp.0.main_norm.weight"] = torch.ones(65, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, raw, half)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert "mtp.1.ffn.gate.bias_vl (drafter)" in caught.value.message
    assert "mtp.0.main_norm.weight in " in caught.value.message

    raw["text_config"]["num_nextn_predict_layers"] = 0
    write_checkpoint(tmp_path, raw, stored)
    assert any("num_nextn_predict_layers is 0" in note for note in Checkpoint.open(tmp_path).notes)


def vision_half(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.ones(spec.shape, dtype=torch.bfloat16) for name, spec in vision_tensors(ModelConfig.from_dict(raw)).items()}


def test_a_vision_half_is_checked(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    raw = SMALL | {"image_token_id": 95, "vision_config": TINY_VISION}
    half = vision_half(raw)
    patches = half["vision.patch_embed.proj.weight"]
    write_checkpoint(tmp_path, raw, tensors | half | {"vision.patch_embed.proj.weight": patches.view(64, 3, 14, 14)})
    assert Checkpoint.open(tmp_path).specs["vision.patch_embed.proj.weight"].shape == (64, 3, 14, 14)

    write_checkpoint(tmp_path, raw, tensors | half | {"vision.patch_embed.proj.weight": torch.ones(64, 3, 13, 13, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"\[64, 3, 13, 13\], the configuration needs \[64, 588\]"):
        Checkpoint.open(tmp_path)

    del half["vision.blocks.1.attn.wo.bias"]
    half["aligner.w1.weight"] = half["aligner.w1.weight"].T.contiguous()
    half["image_newline"] = half["image_newline"].float()
    half["vision.blocks.2.norm1.weight"] = torch.ones(64, dtype=torch.bfloat16)
    half["vision.patch_embed.proj.weight"] = patches.view(64, 14, 14, 3).contiguous()
    write_checkpoint(tmp_path, raw, tensors | half)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    text = caught.value.message
    assert "missing tensors (1), wrong shapes (2), wrong dtypes (1), unknown tensors (1)" in text
    assert "vision.blocks.1.attn.wo.bias (vision): BF16 [64]" in text
    assert "[576, 64], the configuration needs [64, 576]" in text
    assert "[64, 14, 14, 3], the configuration needs [64, 588]" in text
    assert "image_newline in model" in text and "F32, expected BF16" in text
    assert "vision.blocks.2.norm1.weight in model" in text


def test_released_tensors_add_up() -> None:
    """Number and payload bytes of all tensors, to the byte: so every dtype and shape is the stored one (spec/model.md §11)."""
    config = real_config()
    vision = vision_tensors(config)
    assert (len(vision), sum(spec.nbytes for spec in vision.values())) == (266, 970_536_960)
    every = expected_tensors(config) | optional_tensors(config) | vision
    assert (len(every), sum(spec.nbytes for spec in every.values())) == (96_085, 510_286_023_000)


def test_other_architectures_and_paths(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"odd: torch\.float64 cannot be stored"):
        write_checkpoint(tmp_path, SMALL, {"odd": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match=r"odd: torch\.uint8 cannot be stored"):
        write_checkpoint(tmp_path, SMALL, {"odd": torch.zeros(2, dtype=torch.uint8)})
