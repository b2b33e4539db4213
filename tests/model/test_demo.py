"""The demo checkpoint, the synthetic one, and what `--model` may say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from forebay.model import demo as demo_package
from forebay.model.checkpoint import INDEX_NAME, Checkpoint
from forebay.model.config import ModelConfig, real_config
from forebay.model.demo import TOKENIZER, demo_checkpoint
from forebay.model.demo.config import CONFIG
from forebay.model.errors import CheckpointError, ConfigError
from forebay.model.source import resolve
from forebay.model.synthetic import SyntheticCheckpoint, synthetic_config

NEEDED = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>",
    "<think>", "</think>", "｜DSML｜", "<｜deepseek_image｜>", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>",
    "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Path:
    return demo_checkpoint()


@pytest.fixture
def broken(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo, to be damaged, that stands in for it."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(demo, copy)
    monkeypatch.setattr(demo_package, "CHECKPOINT", copy)
    return copy


def test_demo_is_a_whole_small_checkpoint(demo: Path) -> None:
    checkpoint = Checkpoint.open(demo)
    assert json.loads((demo / "config.json").read_text("utf-8")) == CONFIG
    assert checkpoint.config == ModelConfig.from_dict(CONFIG)
    assert checkpoint.notes == ()
    assert sum(file.stat().st_size for file in demo.iterdir()) <= 24 << 20
    shards = set(json.loads((demo / INDEX_NAME).read_text("utf-8"))["weight_map"].values())
    assert {file.name for file in demo.iterdir()} >= {*shards, INDEX_NAME, "config.json", "tokenizer.json", "README.md"}
    assert {file.name for file in demo.glob("*.safetensors")} == shards
    assert int(checkpoint.token_map().max()) + 1 == checkpoint.config.engram_compressed_vocab_size


def test_demo_is_stored_as_the_released_checkpoint_is(demo: Path) -> None:
    """FP4 experts, FP8 projections and Engram rows, with powers of two as scales."""
    checkpoint = Checkpoint.open(demo, scan=False)
    assert checkpoint.specs["layers.0.ffn.experts.0.w1.weight"].dtype == "I8"
    for name in ("layers.0.attn.wq_b", "layers.0.ffn.shared_experts.w1", "layers.1.engram.embed"):
        assert checkpoint.specs[f"{name}.weight"].dtype == "F8_E4M3"
        assert checkpoint.specs[f"{name}.scale"].dtype == "F8_E8M0"


def test_demo_has_every_mechanism(demo: Path) -> None:
    config = ModelConfig.load(demo)
    plan = config.topology()
    assert [layer.role for layer in plan.layers] == ["window", "full", "reuse", "full", "reuse", "reindex", "reuse"]
    assert [layer.ratio for layer in plan.layers] == [0, 2, 2, 1, 1, 1, 1]
    assert plan.cut == 3
    assert [layer.index for layer in plan.layers if layer.makes_candidates] == [3]
    assert [layer.index for layer in plan.layers if layer.reads_candidates] == [5]
    assert [layer.index for layer in plan.layers if layer.engram] == [1, 3]
    assert config.n_routed_experts >= 8 and config.n_shared_experts == 1
    assert config.hc_mult == 4
    assert config.max_position_embeddings >= 32768
    # Candidates and top-k leave something out, and replay happens, in texts that people will try.
    assert 32 <= config.sliding_window <= 128
    assert config.index_topk < config.candidate_topk_blocks * config.candidate_block_size <= 1024


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX_NAME])
def test_demo_without_a_file_says_so(broken: Path, name: str) -> None:
    (broken / name).unlink()
    with pytest.raises(ConfigError, match=f"lacks {name}; install Forebay again"):
        resolve("demo")


def test_demo_with_damaged_weights_says_where(broken: Path) -> None:
    first, second = sorted(broken.glob("*.safetensors"))[:2]
    first.unlink()
    second.write_bytes(b"half")
    with pytest.raises(CheckpointError, match=rf"(?s){first.name}.*{second.name}"):
        resolve("demo").open()


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
    # Unlike the released tokenizer's groups of three: with a token for each digit, a small network can learn to count.
    assert [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234567")] == list("1234567")


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
    assert first.tokenizer_path == TOKENIZER
    assert TOKENIZER.exists()
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
    source = resolve("demo")
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
