"""Configuration of the vision half, from the nested `vision_config` or the flat `vision_*` names (spec/vision.md §1)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from forebay.model.config_fields import coerce
from forebay.model.errors import ConfigError

CHANNELS = 3  # of a picture: red, green, blue
LEAST_SPAN = 4  # tokens: START, IMAGE, NEWLINE, END

# inference/config.json name -> name in vision_config (spec/model.md §1.2).
FLAT_NAMES = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_rope_theta": "rope_theta",
    "vision_norm_eps": "rms_norm_eps",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}


@dataclass(frozen=True)
class VisionConfig:
    """Numbers of the vision tower and of how pictures are cut for it, under their Hugging Face names.

    Attributes:
        patch_size: side of a patch, pixels. downsample_ratio: side of the square of patches that becomes one token.
        max_image_tokens: longest span of one image, delimiters included.
        min_pixels: smaller pictures are enlarged to about this area.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_image_tokens: int = 1024
    min_pixels: int = 295_936

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, where: str = "config") -> VisionConfig:
        """Build from a `vision_config` object, or from a flat configuration, whose other names are passed over.

        Raises:
            ConfigError: a missing or impossible field, or a `max_wh_ratio`: how one clamps is not known for certain (spec §18.16).
        """
        flat = "vision_n_layers" in raw
        given = {FLAT_NAMES[k]: v for k, v in raw.items() if k in FLAT_NAMES} if flat else raw
        spelling = {ours: theirs for theirs, ours in FLAT_NAMES.items()} if flat else {}

        def called(name: str) -> str:
            return spelling.get(name, f"vision_config.{name}")

        if given.get("max_wh_ratio") is not None:
            raise ConfigError(f"{where}: {called('max_wh_ratio')} is {given['max_wh_ratio']!r}, only null is known")
        required = [f.name for f in fields(cls) if f.default is MISSING]
        missing = [called(name) for name in required if given.get(name) is None]
        if missing:
            raise ConfigError(f"{where} lacks {', '.join(missing)}")
        present = {f.name: str(f.type) for f in fields(cls) if given.get(f.name) is not None}
        return cls(**{name: coerce(called(name), given[name], kind, where) for name, kind in present.items()})

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_values(self) -> int:
        """Numbers of a flattened patch: 588 of the released model."""
        return CHANNELS * self.patch_size * self.patch_size

    @property
    def cell(self) -> int:
        """Side of the square that becomes one token, pixels: 42 of the released model."""
        return self.patch_size * self.downsample_ratio


def _validate(c: VisionConfig) -> None:
    for name in (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio", "min_pixels",
    ):  # fmt: skip
        if getattr(c, name) < 1:
            raise ConfigError(f"vision_config.{name} must be at least 1, got {getattr(c, name)}")
    if c.hidden_size % (4 * c.num_attention_heads):
        heads = f"num_attention_heads is {c.num_attention_heads}"
        raise ConfigError(f"vision_config.hidden_size is {c.hidden_size} and {heads}: each head must have a multiple of 4")
    if c.rope_theta <= 1:
        raise ConfigError(f"vision_config.rope_theta must be above 1, got {c.rope_theta}")
    if c.rms_norm_eps < 0:
        raise ConfigError(f"vision_config.rms_norm_eps must not be negative, got {c.rms_norm_eps}")
    if c.max_image_tokens < LEAST_SPAN:
        raise ConfigError(f"vision_config.max_image_tokens must be at least {LEAST_SPAN}, got {c.max_image_tokens}")
