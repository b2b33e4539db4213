"""Configurations: what a checkpoint may say, and one sentence for what it may not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.model.config import ARCHITECTURE, ModelConfig
from forebay.model.engram_map import hash_constants
from forebay.model.errors import ConfigError
from forebay.model.ops.rope import inverse_frequencies
from noise_model import CONFIG


def raw(top: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """NOISE's configuration with other values, at the top or in its text part."""
    config = copy.deepcopy(CONFIG) | (top or {})
    config["text_config"].update(text)
    return config


YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (raw(hidden_size=float("nan")), "hidden_size must be an integer, got nan"),
        (raw(hidden_size=float("inf")), "hidden_size must be an integer, got inf"),
        (raw(hidden_size=256.5), "hidden_size must be an integer, got 256.5"),
        (raw(rms_norm_eps=float("nan")), "rms_norm_eps must be a finite number, got nan"),
        (raw(rope_theta=10**400), "rope_theta must be a finite number"),
        (raw(rms_norm_eps=-1.0), "rms_norm_eps must not be negative"),
        (raw(rope_theta=0), "rope_theta must be above 1"),
        (raw(compress_rope_theta=1), "compress_rope_theta must be above 1"),
        (raw(rope_scaling={**YARN, "beta_fast": 0}), "rope_beta_fast must be above 0"),
        (raw(rope_scaling={**YARN, "factor": 0}), "rope_factor must be above 0"),
        (raw(gate_temp=0), "gate_temp must be above 0"),
        (raw(engram_pad_token_id=4096), "engram_pad_token_id is 4096, the vocabulary has 4096 tokens"),
        (raw({"eos_token_id": 9999}), "eos_token_id is 9999, the vocabulary has 4096 tokens"),
        (raw(engram_layer_ids=[], engram_num_embeddings=[], engram_max_ngram_size=0), "engram_max_ngram_size must be at least 1"),
        (raw({"architectures": 5}), f"describes 5; Forebay serves {ARCHITECTURE}"),
        (raw({"vision_config": [1]}), "vision_config must be an object"),
        (raw(vocab_size=None), r"lacks vocab_size$|lacks vocab_size \(did you mean '(?!vocab_size')"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("source", [None, -1])
def test_candidates_may_be_absent(source: int | None) -> None:
    """No source, or a negative one as flat configs have it; its two sizes then mean nothing and may be absent too."""
    for value in (8, 0, None):
        sizes = {"candidate_topk_blocks": value, "candidate_block_size": value}
        config = ModelConfig.from_dict(raw(candidate_source_layer_id=source, **sizes))
        assert config.candidate_source_layer_id is None
        assert not any(plan.makes_candidates or plan.reads_candidates for plan in config.topology().layers)
    with pytest.raises(ConfigError, match="candidate_block_size must be at least 1"):
        ModelConfig.from_dict(raw(candidate_source_layer_id=6, candidate_block_size=0))


def test_a_flat_config_without_engram_and_vision(tmp_path: Path) -> None:
    """What the reference writes when both are off: orders of 1, no heads, no vision layers."""
    flat = {
        "vocab_size": 64, "dim": 64, "n_layers": 2, "n_heads": 2, "head_dim": 32, "rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 1,
        "o_lora_rank": 32, "moe_inter_dim": 32, "n_routed_experts": 4, "n_activated_experts": 2, "window_size": 8,
        "compress_ratios": [2, 1, 0],
        "kv_source_layers": [0, 1], "index_source_layers": [0, 1], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4,
        "candidate_source_layer": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0, "swiglu_limit": 0.0, "original_seq_len": 0,
        "engram_layer_ids": [], "engram_num_embeddings": [], "engram_max_ngram_size": 1, "engram_vocab_size": 0, "engram_n_heads": 0,
        "engram_head_dim": 0, "vision_n_layers": 0, "vision_dim": 1024, "dtype": "fp8", "expert_dtype": "fp4", "max_seq_len": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(flat))
    config = ModelConfig.load(tmp_path)
    assert config.candidate_source_layer_id is None
    assert config.vision is None
    assert config.max_position_embeddings == 512
    assert hash_constants(config).offsets.shape == (0, 0)


def test_yarn_ramp_of_a_short_original_context() -> None:
    """Where both corrections fall below the first pair the ramp is a step, never turned round."""
    freqs = inverse_frequencies(64, 160000.0, factor=16.0, original=1)
    plain = inverse_frequencies(64, 160000.0)
    assert freqs[0] == plain[0]
    assert (freqs[1:] == plain[1:] / 16).all()
