"""The demo checkpoint: a small trained V4.1 network in the official format, which comes with Forebay: nothing to download."""

from __future__ import annotations

from pathlib import Path

from forebay.model.errors import ConfigError

CHECKPOINT = Path(__file__).with_name("checkpoint")
TOKENIZER = CHECKPOINT / "tokenizer.json"
_NEEDED = ("config.json", "tokenizer.json", "model.safetensors.index.json")  # the shards are checked against the index when it is opened


def demo_checkpoint() -> Path:
    """Folder of the demo checkpoint; it is only read, never written.

    Raises:
        ConfigError: the installation lacks a file of it.
    """
    lacking = [name for name in _NEEDED if not (CHECKPOINT / name).is_file()]
    if lacking:
        raise ConfigError(f"the demo checkpoint in {CHECKPOINT} lacks {', '.join(lacking)}; install Forebay again", param="model")
    return CHECKPOINT
