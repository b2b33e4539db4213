"""Small vision halves for tests: the golden tower, and random ones beside a random language model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from forebay.model.checkpoint import Weights
from forebay.model.config import VisionConfig, real_config
from forebay.model.image_plan import ImagePlan
from forebay.model.vision import VisionTower
from noise_model import CONFIG, write_random

_released = real_config().vision
assert _released is not None
RELEASED = _released

# A vision half of two layers: of NOISE, whose image token is 4087.
TINY_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}


def write_tiny_vision(folder: Path, seed: int = 43) -> None:
    """Write NOISE with a vision half into an existing folder; 0.6 MB of it is vision, all of it takes a second."""
    write_random(folder, {**CONFIG, "vision_config": TINY_VISION}, seed)


def tower_of(tensors: dict[str, Tensor], config: VisionConfig, width: int, **options: Any) -> VisionTower:
    """A tower of tensors by their official names; `width` is that of the language model."""
    source = SimpleNamespace(config=SimpleNamespace(vision=config, hidden_size=width), has_vision=True, tensor=tensors.__getitem__)
    return VisionTower(cast(Weights, source), **options)


def golden_tower(golden: Path, dtype: torch.dtype, *, device: str = "cpu", **changes: Any) -> VisionTower:
    """The golden tower; `changes` are to its configuration."""
    folder = golden / "vision" / "tower"
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    config = replace(VisionConfig.from_dict(raw), **changes)
    return tower_of(load_file(folder / "model.safetensors"), config, raw["dim"], dtype=dtype, device=device)


def plan_of(rows: int, columns: int) -> ImagePlan:
    """The plan of a picture that fills `rows` x `columns` patches of 14 pixels, three by three of which are a token."""
    canvas = (14 * columns, 14 * rows)
    return ImagePlan(canvas, (rows, columns), (-(-rows // 3), -(-columns // 3)), canvas, (0, 0))
