"""The vision half of a configuration: both spellings, every rule by the name of its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.model.config import ModelConfig, VisionConfig, real_config
from forebay.model.errors import ConfigError
from noise_model import CONFIG
from vision_model import TINY_VISION

NAMES = {
    "num_hidden_layers": "vision_n_layers", "hidden_size": "vision_dim", "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim", "patch_size": "vision_patch_size", "downsample_ratio": "vision_downsample_ratio",
    "rope_theta": "vision_rope_theta", "max_image_tokens": "vision_max_n_token", "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio", "rms_norm_eps": "vision_norm_eps",
}  # fmt: skip
NESTED = TINY_VISION | {"rms_norm_eps": 1e-6}
FLAT = {flat: NESTED[name] for name, flat in NAMES.items()} | {"dim": 64}


def test_both_spellings() -> None:
    assert VisionConfig.from_dict(FLAT) == VisionConfig.from_dict(TINY_VISION) == VisionConfig(2, 64, 4, 96, 14, 3)


def test_the_golden_tower(golden: Path) -> None:
    raw = json.loads((golden / "vision" / "tower" / "config.json").read_text("utf-8"))
    assert VisionConfig.from_dict(raw) == VisionConfig(3, 64, 4, 176, 14, 3, rope_theta=10000.0, rms_norm_eps=1e-6)


def test_released_numbers() -> None:
    """spec/vision.md §1."""
    vision = real_config().vision
    assert vision is not None
    assert (vision.head_dim, vision.patch_values, vision.cell) == (64, 588, 42)
    assert (vision.rms_norm_eps, vision.max_image_tokens, vision.min_pixels) == (1e-6, 1024, 544 * 544)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "max_wh_ratio"])
def test_every_field_is_read(name: str) -> None:
    changed = VisionConfig.from_dict(NESTED | {name: NESTED[name] * 4})
    assert getattr(changed, name) == NESTED[name] * 4
    assert VisionConfig.from_dict(FLAT | {NAMES[name]: NESTED[name] * 4}) == changed
    base, other = (ModelConfig.from_dict({**CONFIG, "vision_config": v}) for v in (NESTED, NESTED | {name: NESTED[name] * 4}))
    assert other.vision == changed and base.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 0) for name in TINY_VISION if name not in ("model_type", "max_wh_ratio", "rope_theta")),
        ("hidden_size", 72), ("rope_theta", 1), ("rope_theta", "big"), ("rms_norm_eps", -1e-6), ("max_image_tokens", 3),
        ("max_wh_ratio", 8), ("patch_size", 14.5), ("num_hidden_layers", True), ("intermediate_size", None),
    ],
    ids=str,
)  # fmt: skip
def test_every_rule_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"vision_config.{field}"):
        ModelConfig.from_dict({**CONFIG, "vision_config": TINY_VISION | {field: value}})


def test_flat_names_are_named() -> None:
    with pytest.raises(ConfigError, match=r"lacks vision_dim, vision_inter_dim"):
        VisionConfig.from_dict(FLAT | {"vision_dim": None, "vision_inter_dim": None})


@pytest.mark.parametrize("image_id", [None, -1, 4096])
def test_images_need_a_token(image_id: int | None) -> None:
    with pytest.raises(ConfigError, match="image_token_id must be a token below 4096"):
        ModelConfig.from_dict({**CONFIG, "image_token_id": image_id, "vision_config": TINY_VISION})


def test_no_vision_half() -> None:
    assert ModelConfig.from_dict({**CONFIG, "vision_config": None}).vision is None
    with pytest.raises(ConfigError, match="vision_config must be an object"):
        ModelConfig.from_dict({**CONFIG, "vision_config": [1]})
