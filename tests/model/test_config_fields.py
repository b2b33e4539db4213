"""Configurations field by field: both spellings, every rule named, the released numbers, and what each layer is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.model.config import ModelConfig, real_config
from forebay.model.errors import ConfigError
from noise_model import CONFIG

# The released config.json, as spec/model.md §1.1 lists it.
RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "transformers_version": "5.6.0",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024,
        "moe_intermediate_size": 2304, "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": False, "max_position_embeddings": 1048576,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
        "sliding_window": 128, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
        "engram_n_heads": 8, "engram_head_dim": 256, "engram_vocab_size": 16000000, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16,
        "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 1024,
        "min_pixels": 295936, "max_wh_ratio": None,
    },
}  # fmt: skip

# Hugging Face name -> name in inference/config.json (spec/model.md §1.2); the rest are spelled alike.
FLAT = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_nextn_predict_layers": "n_mtp_layers", "num_attention_heads": "n_heads",
    "moe_intermediate_size": "moe_inter_dim", "num_experts_per_tok": "n_activated_experts",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts", "scoring_func": "score_func", "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim", "rms_norm_eps": "norm_eps", "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers", "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer", "engram_pad_token_id": "engram_pad_id",
}  # fmt: skip
VISION_FLAT = {
    "num_hidden_layers": "vision_n_layers", "hidden_size": "vision_dim", "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim", "patch_size": "vision_patch_size", "downsample_ratio": "vision_downsample_ratio",
    "rope_theta": "vision_rope_theta", "rms_norm_eps": "vision_norm_eps", "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels", "max_wh_ratio": "vision_max_wh_ratio",
}  # fmt: skip


def flattened(nested: dict[str, Any]) -> dict[str, Any]:
    """The same model in the words of inference/config.json."""
    text = dict(nested["text_config"])
    scaling = text.pop("rope_scaling")
    flat = {FLAT.get(name, name): value for name, value in text.items() if name != "model_type"}
    flat["original_seq_len"], flat["rope_factor"] = scaling["original_max_position_embeddings"], scaling["factor"]
    flat["beta_fast"], flat["beta_slow"] = scaling["beta_fast"], scaling["beta_slow"]
    if nested.get("vision_config") is not None:
        flat |= {VISION_FLAT[name]: value for name, value in nested["vision_config"].items() if name != "model_type"}
    flat |= {name: nested[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
    flat |= {"max_batch_size": 4, "max_seq_len": text["max_position_embeddings"], "temperature": 1.0}
    return flat | {"dtype": "fp8", "expert_dtype": "fp4"}


def changed(**text: Any) -> dict[str, Any]:
    """NOISE's configuration with other text fields; a value of `...` removes the field."""
    config = copy.deepcopy(CONFIG)
    for name, value in text.items():
        if value is ...:
            config["text_config"].pop(name)
        else:
            config["text_config"][name] = value
    return config


class TestReleased:
    def test_nested_form_is_the_real_config(self) -> None:
        assert ModelConfig.from_dict(RELEASED) == real_config()

    def test_flat_form_is_the_same_model(self) -> None:
        assert ModelConfig.from_dict(flattened(RELEASED)) == real_config()

    def test_numbers_that_others_are_derived_from(self) -> None:
        config = real_config()
        assert len(config.compress_ratios) == 40  # the file has 43: three belong to the draft stages
        assert config.rope_pairs == 32
        assert config.engram_columns == 24
        assert (config.rope_factor, config.rope_original_max_position, config.rope_beta_fast, config.rope_beta_slow) == (16, 65536, 32, 1)

    def test_layer_table(self) -> None:
        """Spec §2.1, every layer."""
        topology = real_config().topology()
        roles = {0: "window", 1: "window", 2: "full", 8: "full", 14: "full", 20: "full"} | dict.fromkeys((24, 28, 32, 36), "reindex")
        assert [plan.role for plan in topology.layers] == [roles.get(i, "reuse") for i in range(40)]
        assert [plan.ratio for plan in topology.layers] == [0, 0] + [2] * 18 + [1] * 20
        kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
        index = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
        assert [plan.kv_source for plan in topology.layers] == kv
        assert [plan.index_source for plan in topology.layers] == index
        assert [plan.index for plan in topology.layers if plan.makes_candidates] == [20]
        assert [plan.index for plan in topology.layers if plan.reads_candidates] == [24, 28, 32, 36]
        assert [plan.index for plan in topology.layers if plan.engram] == [1, 14]
        assert topology.cut == 20
        assert len(topology.encoder) == len(topology.decoder) == 20


class TestForms:
    def test_noise_in_both(self) -> None:
        assert ModelConfig.from_dict(flattened(CONFIG)) == ModelConfig.from_dict(CONFIG)

    @pytest.mark.parametrize("folder", ["tiny-a", "tiny-d"])
    def test_golden_checkpoints_in_both(self, golden: Path, folder: str) -> None:
        raw = json.loads((golden / folder / "checkpoint" / "config.json").read_text("utf-8"))
        assert ModelConfig.from_dict(flattened(raw)) == ModelConfig.from_dict(raw) == ModelConfig.load(golden / folder / "checkpoint")

    def test_every_text_field_is_read(self) -> None:
        """Each field with another valid value gives another configuration, in both forms, and the same one."""
        special = {
            "num_hidden_layers": 11, "compress_ratios": [0, 0, 2, 2, 2, 2] + [1] * 5 + [1], "kv_source_layer_ids": [2, 6],
            "index_source_layer_ids": [2, 4, 6, 8], "candidate_source_layer_id": 8, "hidden_size": 288, "head_dim": 96, "q_lora_rank": 160,
            "moe_intermediate_size": 160, "index_head_dim": 64, "engram_head_dim": 64, "norm_topk_prob": False,
            "engram_layer_ids": [1, 5], "engram_num_embeddings": [24562, 25587], "dspark_target_layer_ids": [8, 9], "rms_norm_eps": 1e-6,
            "o_groups": 2, "num_attention_heads": 16, "qk_rope_head_dim": 8,
        }  # fmt: skip
        unread = {"model_type", "num_key_value_heads", "scoring_func", "topk_method", "hidden_act", "tie_word_embeddings", "rope_scaling"}
        unread |= {"attention_bias", "attention_dropout", "initializer_range", "use_cache", "compress_ratios"}
        base, seen = ModelConfig.from_dict(CONFIG), 0
        for name, value in CONFIG["text_config"].items():
            if name in unread:
                continue
            other = changed(**{name: special.get(name, value * 2 if value else 3)})
            nested = ModelConfig.from_dict(other)
            assert nested != base, name
            assert getattr(nested, name) != getattr(base, name), name
            assert ModelConfig.from_dict(flattened(other)) == nested, name
            assert nested.fingerprint() != base.fingerprint(), name
            seen += 1
        assert seen >= 35

    def test_rope_scaling_is_read(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 4096}
        config = ModelConfig.from_dict(changed(rope_scaling=scaling))
        assert (config.rope_factor, config.rope_beta_fast, config.rope_beta_slow, config.rope_original_max_position) == (8, 16, 2, 4096)
        assert ModelConfig.from_dict(flattened(changed(rope_scaling=scaling))) == config

    def test_fields_with_a_default_may_be_absent(self) -> None:
        names = ("swiglu_limit", "rms_norm_eps", "routed_scaling_factor", "hc_mult", "hc_eps", "hc_sinkhorn_iters", "norm_topk_prob")
        assert ModelConfig.from_dict(changed(**dict.fromkeys(names, ...))) == ModelConfig.from_dict(CONFIG)

    def test_integers_may_be_spelled_as_floats(self) -> None:
        assert ModelConfig.from_dict(changed(hidden_size=256.0, rope_theta=10000)) == ModelConfig.from_dict(CONFIG)

    def test_extra_ratios_belong_to_draft_stages(self) -> None:
        ratios = CONFIG["text_config"]["compress_ratios"]
        assert ModelConfig.from_dict(changed(compress_ratios=[*ratios, 0, 0, 0])) == ModelConfig.from_dict(CONFIG)


POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
    "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
)  # fmt: skip
INVALID: list[tuple[str, Any]] = [
    *((name, 0) for name in POSITIVE),
    ("compress_ratios", [0, 0, 2]), ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, -1]), ("compress_ratios", [1] * 12),
    ("compress_ratios", [0, 0, 2, 2, 0, 2, 1, 1, 1, 1, 1, 1]), ("compress_ratios", [0, 0, 2, 1, 2, 2, 1, 1, 1, 1, 1, 1]),
    ("kv_source_layer_ids", []), ("kv_source_layer_ids", [4, 2, 6]), ("kv_source_layer_ids", [2, 2, 6]),
    ("kv_source_layer_ids", [2, 4, 12]),
    ("kv_source_layer_ids", [-1, 4, 6]), ("kv_source_layer_ids", [0, 2, 4, 6]), ("kv_source_layer_ids", [4, 6]),
    ("index_source_layer_ids", [6, 4, 2]), ("index_source_layer_ids", [2, 4, 6, 99]), ("index_source_layer_ids", [4, 6, 8, 10]),
    ("index_source_layer_ids", [1, 2, 4, 6]), ("index_source_layer_ids", [2, 6]),
    ("engram_layer_ids", [4, 1]), ("engram_layer_ids", [1, 40]),
    ("candidate_source_layer_id", 7), ("candidate_topk_blocks", 0), ("candidate_block_size", 0),
    ("qk_rope_head_dim", 15), ("qk_rope_head_dim", 128), ("head_dim", 48), ("index_head_dim", 48), ("hidden_size", 250),
    ("q_lora_rank", 100),
    ("moe_intermediate_size", 100), ("num_attention_heads", 6), ("o_lora_rank", 5), ("num_experts_per_tok", 9),
    ("engram_num_embeddings", [1]), ("engram_head_dim", 33), ("engram_max_ngram_size", 1), ("engram_n_heads", 0),
    ("engram_compressed_vocab_size", 0),
    ("hidden_size", "256"), ("hidden_size", True), ("rms_norm_eps", "small"), ("rope_theta", False), ("norm_topk_prob", 1),
    ("compress_ratios", 2), ("compress_ratios", [0, 0, "2"]), ("kv_source_layer_ids", [2.5]), ("scoring_func", "softmax"),
    ("hidden_act", "gelu"), ("rope_scaling", {"rope_type": "linear", "factor": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), INVALID, ids=lambda v: str(v))
def test_every_rule_names_its_field(field: str, value: Any) -> None:
    """So does a missing one. The message may also name another field that the value does not go with."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(**{field: value}))
    assert field in caught.value.message


REQUIRED = [name for name in CONFIG["text_config"] if name in {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups",
    "o_lora_rank", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "sliding_window", "compress_ratios",
    "kv_source_layer_ids", "index_source_layer_ids", "index_n_heads", "index_head_dim", "index_topk",
}]  # fmt: skip


def test_missing_fields_are_all_named_at_once() -> None:
    assert len(REQUIRED) == 19
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(**dict.fromkeys(REQUIRED, ...)))
    assert all(name in caught.value.message for name in REQUIRED)
    for name in REQUIRED:
        with pytest.raises(ConfigError, match=name):
            ModelConfig.from_dict(changed(**{name: ...}))


def test_a_misspelled_field_is_pointed_at() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size.*did you mean 'hiden_size'"):
        ModelConfig.from_dict(changed(hidden_size=..., hiden_size=256))


class TestOtherModels:
    @pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "LlamaForCausalLM"])
    def test_another_architecture_is_named(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"describes {name}; Forebay serves DeepseekV41ForCausalLM"):
            ModelConfig.from_dict(CONFIG | {"architectures": [name]})

    def test_another_model_type_is_named(self) -> None:
        with pytest.raises(ConfigError, match="model_type 'deepseek_v4'"):
            ModelConfig.from_dict({**CONFIG, "model_type": "deepseek_v4"})

    @pytest.mark.parametrize(
        ("key", "value"), [("quant_method", "awq"), ("weight_block_size", [128, 128]), ("scale_fmt", "fp32"), ("expert_dtype", "int4")]
    )
    def test_other_quantisations_are_named(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"quantization_config.{key}"):
            ModelConfig.from_dict({**CONFIG, "quantization_config": {**CONFIG["quantization_config"], key: value}})

    def test_lost_quantisation_is_an_error(self) -> None:
        """It sits at the top only; a reader that descends into text_config loses it and takes everything for bf16."""
        with pytest.raises(ConfigError, match="lacks quantization_config"):
            ModelConfig.from_dict({k: v for k, v in CONFIG.items() if k != "quantization_config"})

    @pytest.mark.parametrize(("key", "value"), [("dtype", "bf16"), ("expert_dtype", "fp8")])
    def test_flat_form_of_another_precision(self, key: str, value: str) -> None:
        with pytest.raises(ConfigError, match=key):
            ModelConfig.from_dict(flattened(CONFIG) | {key: value})


class TestFile:
    def test_folder_and_file(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
        assert ModelConfig.load(tmp_path) == ModelConfig.load(tmp_path / "config.json") == ModelConfig.from_dict(CONFIG)

    @pytest.mark.parametrize(
        ("content", "says"), [(None, "does not exist"), (b"{", "JSON"), (b"\xff\xfe", "JSON"), (b"[1]", "list"), (b"[" * 100_000, "JSON")]
    )
    def test_files_that_are_no_configuration(self, tmp_path: Path, content: bytes | None, says: str) -> None:
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=says) as caught:
            ModelConfig.load(tmp_path)
        assert str(tmp_path / "config.json") in caught.value.message
