"""What `--model` means: a checkpoint folder, the demo checkpoint, or a synthetic one."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forebay.model.config import ModelConfig
from forebay.model.demo import TOKENIZER, demo_checkpoint
from forebay.model.errors import ConfigError

# What handles weights brings torch, which takes seconds to import; who only asks what a model is need not wait for it.
if TYPE_CHECKING:
    from forebay.model.checkpoint import Progress, Weights

SYNTHETIC = "synthetic:"
SYNTHETIC_BASE = "v41-flash"
SYNTHETIC_KEYS = ("experts", "layers")


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found but not opened.

    Attributes:
        name: what the API calls it: the folder's name, `demo`, or the synthetic description as given.
        path: the checkpoint folder; None for a synthetic model.
    """

    kind: Literal["dir", "demo", "synthetic"]
    name: str
    path: Path | None
    config: ModelConfig

    @property
    def tokenizer_path(self) -> Path:
        """Its `tokenizer.json`, which need not be there."""
        return TOKENIZER if self.path is None else self.path / "tokenizer.json"

    def open(self, *, scan: bool = True, progress: Progress | None = None, device: str = "cpu") -> Weights:
        """Open the weights; `scan`, `progress` and errors as of `Checkpoint.open`.

        device: where the network will run. Synthetic weights of a CUDA device are made on it, a checkpoint's are read from its files.
        """
        from forebay.model.checkpoint import Checkpoint

        if self.path is not None:
            return Checkpoint.open(self.path, scan=scan, progress=progress)
        if device.startswith("cuda"):
            from forebay.model.device_synthetic import DeviceSynthetic

            return DeviceSynthetic(self.config, device)
        from forebay.model.synthetic import SyntheticCheckpoint

        return SyntheticCheckpoint(self.config)


def resolve(model: str) -> ModelSource:
    """Find a model by its `--model` value: a folder, `demo` (comes with Forebay), or `synthetic:v41-flash[,experts=N][,layers=K]`.

    Raises:
        ConfigError: no such folder, no readable `config.json` in it, a demo that is not whole, or a description that cannot be parsed.
    """
    if model == "demo":
        path = demo_checkpoint()
        return ModelSource("demo", model, path, ModelConfig.load(path))
    if model.startswith(SYNTHETIC):
        return ModelSource("synthetic", model, None, _parse_synthetic(model))
    path = Path(model).expanduser()
    if path.is_file():
        raise ConfigError(f"model {model!r} is a file; give the folder that holds config.json and the safetensors files", param="model")
    if not model or not path.is_dir():
        word = model.partition(":")[0]
        near = difflib.get_close_matches(word, ["demo", "synthetic"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; models are not downloaded, fetch the files first"
        known = f"a folder, 'demo' or '{SYNTHETIC}{SYNTHETIC_BASE}[,experts=N][,layers=K]'"
        raise ConfigError(f"model {model!r} is not {known}{hint}", param="model")
    return ModelSource("dir", Path(os.path.abspath(path)).name, path, ModelConfig.load(path))


def _parse_synthetic(model: str) -> ModelConfig:
    base, *options = model.removeprefix(SYNTHETIC).split(",")
    if base != SYNTHETIC_BASE:
        raise ConfigError(f"unknown synthetic model {base!r}; known is '{SYNTHETIC}{SYNTHETIC_BASE}'", param="model")
    values: dict[str, int] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if key not in SYNTHETIC_KEYS:
            near = difflib.get_close_matches(key, SYNTHETIC_KEYS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(SYNTHETIC_KEYS)}"
            raise ConfigError(f"unknown key {key!r} in {model!r}; {hint}", param="model")
        if key in values:
            raise ConfigError(f"{key} is given twice in {model!r}", param="model")
        if not equals or not text.isascii() or not text.isdigit():
            raise ConfigError(f"{key} in {model!r} must be a whole number, got {text!r}", param="model")
        values[key] = int(text)
    from forebay.model.synthetic import synthetic_config

    return synthetic_config(**values)
