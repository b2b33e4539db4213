"""The demo checkpoint, the synthetic one, and what `--model` may say."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch

from forebay.model.checkpoint import Checkpoint
from forebay.model.config import ModelConfig, real_config
from forebay.model.demo import build
from forebay.model.errors import CheckpointError, ConfigError
from forebay.model.source import resolve
from forebay.model.synthetic import SyntheticCheckpoint, synthetic_config

DIGEST = "0d96ee77d7655e3fc2cd72b0768d46c006a392014e0fd9bf9deed55bf3c32d82"  # changes only with a new demo network
NEEDED = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>",
    "<think>", "</think>", "｜DSML｜", "<｜deepseek_image｜>", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>",
    "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.demo_checkpoint(tmp_path_factory.mktemp("cache"))


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        total.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def test_bytes_are_the_same_everywhere(demo: Path) -> None:
    assert digest(demo) == DIGEST


def test_demo_is_a_whole_small_checkpoint(demo: Path) -> None:
    checkpoint = Checkpoint.open(demo)
    assert checkpoint.config == ModelConfig.from_dict(build.CONFIG)
    assert checkpoint.notes == ()
    assert sum(file.stat().st_size for file in demo.iterdir()) <= 24 << 20
    plan = checkpoint.config.topology()
    assert plan.cut == 6
    assert {layer.role for layer in plan.layers} == {"window", "full", "reuse", "reindex"}
    assert int(checkpoint.token_map().max()) + 1 == checkpoint.config.engram_compressed_vocab_size


def test_tokenizer_has_what_the_encoding_needs(demo: Path) -> None:
    config = ModelConfig.load(demo)
    tokenizer = tokenizers.Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    ids = {token: tokenizer.token_to_id(token) for token in NEEDED}
    assert None not in ids.values()
    assert (ids["<｜begin▁of▁sentence｜>"], ids["<｜end▁of▁sentence｜>"], ids["<｜▁pad▁｜>"]) == (0, 1, 2)
    assert ids["<｜deepseek_image｜>"] == config.image_token_id
    marks = "<think>｜DSML｜<｜System｜>"
    assert tokenizer.decode(tokenizer.encode(marks).ids, skip_special_tokens=True) == marks
    assert len(tokenizer.encode(marks).ids) == 3
    for text in ("naïve  café\r\n\n 12345 你好 👩‍💻\tdef f(x):\n    return x", "e\u0301 is not é"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    # 1-3 digits are cut off before merging, as in the released tokenizer.
    assert [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234567")] == ["123", "456", "7"]


def test_special_tokens_are_never_preferred(demo: Path) -> None:
    checkpoint = Checkpoint.open(demo, scan=False)
    head = checkpoint.tensor("head.weight").float()
    silent = list(build.special_ids(checkpoint.config))
    assert not head[silent].any()
    spoken = torch.ones(head.shape[0], dtype=torch.bool)
    spoken[silent] = False
    assert bool(head[spoken].abs().amax(1).gt(0).all())


def test_weights_keep_activations_in_size(demo: Path) -> None:
    """Every stored matrix maps numbers of deviation 1 to numbers of deviation about 1."""
    checkpoint = Checkpoint.open(demo, scan=False)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    powers = torch.pow(2.0, torch.arange(256) - 127.0)
    for name, spec in checkpoint.specs.items():
        if spec.dtype not in ("F8_E4M3", "I8") or spec.part == "engram tables":
            continue
        stored = checkpoint.tensor(name)
        scale = powers[checkpoint.tensor(name.removesuffix("weight") + "scale").int()]
        if spec.dtype == "I8":
            codes = torch.stack([stored & 15, stored >> 4], 2).flatten(1).int()
            matrix = values[codes & 7] * (1 - 2 * (codes >> 3)) * scale.repeat_interleave(32, 1)
        else:
            matrix = stored.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        assert 0.9 < float(matrix.std()) * matrix.shape[1] ** 0.5 < 1.1, name


def test_cache_folder(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.demo_checkpoint())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[0].parent == tmp_path / "xdg" / "forebay"
    assert [p.name for p in found[0].parent.iterdir()] == [demo.name]  # no work folders are left
    written = (found[0] / "config.json").stat().st_mtime_ns
    assert build.demo_checkpoint() == found[0]
    assert (found[0] / "config.json").stat().st_mtime_ns == written

    next(found[0].glob("*.safetensors")).write_bytes(b"half")
    assert digest(build.demo_checkpoint()) == digest(demo)
    (found[0] / "tokenizer.json").unlink()
    assert digest(build.demo_checkpoint()) == digest(demo)

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file"):
        build.demo_checkpoint(tmp_path / "file")


def test_encoders_match_the_formats(golden: Path) -> None:
    stored = safetensors.torch.load_file(golden / "components" / "weight_formats.safetensors")
    grid = stored["e4m3.value_fp32"]
    codes = stored["e4m3.byte"].view(torch.uint8)
    finite = ~torch.isnan(grid)
    tile = torch.zeros(8, 32)
    tile.view(-1)[: int(finite.sum())] = grid[finite]
    encoded, scale = build.encode_fp8(tile.numpy(), tile_rows=8)
    assert scale.tolist() == [[127]]
    assert torch.equal(encoded.view(-1)[: int(finite.sum())], codes[finite])

    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, 6, 0, 0.3] + [0.0] * 20, dtype=np.float32)
    packed, scale = build.encode_mxfp4(ties[None])
    unpacked = torch.stack([packed & 15, packed >> 4], 2).view(-1)
    assert scale.tolist() == [[127]]
    assert unpacked[:12].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 7, 0, 1]
    _, scale = build.encode_mxfp4(ties[None] * np.float32(1.01))
    assert scale.tolist() == [[128]]  # 6.06 needs the next power of two
    rows = np.linspace(-1, 1, 40 * 48, dtype=np.float32).reshape(40, 48)
    codes40, scales40 = build.encode_fp8(rows, tile_rows=32)
    assert codes40.shape == (40, 48)
    assert scales40.shape == (2, 2)


# --- synthetic -------------------------------------------------------------------------------------------------------


def test_synthetic_plan_is_the_released_one() -> None:
    checkpoint = SyntheticCheckpoint(real_config())
    assert checkpoint.total_bytes == sum(checkpoint.parts().values()) == 501_382_611_408


def test_synthetic_tensors() -> None:
    config = synthetic_config(experts=8, layers=6)
    first, again, other = SyntheticCheckpoint(config), SyntheticCheckpoint(config), SyntheticCheckpoint(config, seed=1)
    for name in ("layers.0.attn.wq_a.weight", "layers.3.ffn.experts.7.w2.weight", "layers.3.ffn.gate.weight", "layers.5.hc_attn_fn"):
        spec, tensor = first.specs[name], first.tensor(name)
        assert tuple(tensor.shape) == spec.shape
        assert tensor.numel() * tensor.element_size() == spec.nbytes
        assert torch.equal(tensor, again.tensor(name)), name
        assert not torch.equal(tensor, other.tensor(name)), name
    assert not torch.equal(first.tensor("layers.3.ffn.experts.7.w2.weight"), first.tensor("layers.3.ffn.experts.6.w2.weight"))
    assert not bool(((first.tensor("layers.1.engram.wkv.weight") & 0x7F) == 0x7F).any())
    codes, scale = first.tensor("layers.0.attn.wq_a.weight"), first.tensor("layers.0.attn.wq_a.scale")
    deviation = float(codes.view(torch.float8_e4m3fn).float().std()) * 2.0 ** (int(scale[0, 0]) - 127)
    assert 0.6 < deviation * 5120**0.5 < 1.5
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.notes
    assert first.tokenizer_path.exists()
    for name in ("layers.1.engram.embed.weight", "layers.6.attn_norm.weight"):
        with pytest.raises(CheckpointError, match=name):
            first.tensor(name)


def test_synthetic_experts_share_memory() -> None:
    checkpoint = SyntheticCheckpoint(synthetic_config(layers=6))
    owners = {checkpoint.tensor(f"layers.2.ffn.experts.{e}.w1.weight").untyped_storage().data_ptr() for e in range(20)}
    assert len(owners) == 1


def test_synthetic_engram_rows() -> None:
    checkpoint = SyntheticCheckpoint(synthetic_config(layers=40, experts=1))
    ids = torch.tensor([[0, 384006167, 5], [5, 0, 17]])
    one, two = checkpoint.engram_table(1), checkpoint.engram_table(14)
    rows = one.read(ids)
    assert rows.shape == (2, 768)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows[0, 512:], rows[1, :256])
    assert torch.equal(rows[0, :256], rows[1, 256:512])
    assert not torch.equal(rows[0, :256], rows[0, 256:512])
    assert not torch.equal(rows, two.read(ids))
    assert 0.9 < float(rows.float().std()) < 1.1
    for bad in (-1, 384006168):
        with pytest.raises(IndexError):
            one.read(torch.tensor([[bad]]))
    assert int(checkpoint.token_map()[2]) == 2
    assert int(checkpoint.token_map().max()) == 99091


@pytest.mark.parametrize("layers", [6, 8, 16, 30, 38])
def test_synthetic_depths_keep_two_halves(layers: int) -> None:
    plan = synthetic_config(layers=layers).topology()
    assert plan.cut == layers // 2
    assert {layer.ratio for layer in plan.decoder} == {1}
    assert plan.layers[plan.cut].role == "full"
    assert plan.layers[plan.cut].makes_candidates


# --- --model ---------------------------------------------------------------------------------------------------------


def test_resolve(demo: Path, tmp_path: Path) -> None:
    source = resolve("demo", demo.parent)
    assert (source.kind, source.name, source.path) == ("demo", "demo", demo)
    assert source.open(scan=False).config == source.config
    source = resolve("synthetic:v41-flash")
    assert (source.kind, source.name, source.path, source.config) == ("synthetic", "synthetic:v41-flash", None, real_config())
    source = resolve("synthetic:v41-flash,experts=4,layers=10")
    assert source.config.n_routed_experts == 4
    assert source.config.num_experts_per_tok == 4
    assert source.config.num_hidden_layers == 10
    assert isinstance(source.open(), SyntheticCheckpoint)
    (tmp_path / "my-model").symlink_to(demo)
    source = resolve(f"{tmp_path}/my-model/")
    assert (source.kind, source.name) == ("dir", "my-model")
    assert isinstance(source.open(), Checkpoint)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("dmeo", "did you mean 'demo'"),
        ("sythetic:v41-flash", "did you mean 'synthetic'"),
        ("deepseek-ai/DeepSeek-V4.1-Flash", "models are not downloaded"),
        ("", "is not a folder"),
        ("synthetic:v41", "unknown synthetic model 'v41'"),
        ("synthetic:v41-flash,expert=8", "unknown key 'expert' .*did you mean 'experts'"),
        ("synthetic:v41-flash,zzz=8", "known are experts, layers"),
        ("synthetic:v41-flash,", "unknown key ''"),
        ("synthetic:v41-flash,experts", "must be a whole number"),
        ("synthetic:v41-flash,experts=-1", "must be a whole number"),
        ("synthetic:v41-flash,experts=²", "must be a whole number"),
        ("synthetic:v41-flash,experts=0", "between 1 and 384, got 0"),
        ("synthetic:v41-flash,experts=385", "between 1 and 384"),
        ("synthetic:v41-flash,experts=1,experts=2", "given twice"),
        ("synthetic:v41-flash,layers=7", "even and between 6 and 40, got 7"),
        ("synthetic:v41-flash,layers=42", "even and between 6 and 40"),
    ],
)
def test_unknown_models(model: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(model)


def test_a_file_or_empty_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="give the folder"):
        resolve(str(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="choose another cache folder"):
        build.demo_checkpoint(tmp_path)
