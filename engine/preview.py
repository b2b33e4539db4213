"""What is known of a model before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.model.chat_images import ChatVision
from forebay.model.source import resolve
from forebay.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preview:
    """A model that is still to be loaded.

    Attributes:
        name: what it is called if the configuration does not say.
        longest: tokens of the longest context that it was made for.
        vision: how its configuration says that it sees images; whether the weights for that are there, the load tells.
    """

    name: str
    longest: int
    tokenizer: Tokenizer
    vision: ChatVision | None


def preview(model: str) -> Preview:
    """Look at a model by its `--model` value: the time that reading its tokenizer takes, without torch.

    Raises:
        ConfigError, CheckpointError: it is not there, or its tokenizer is not one for chat.
    """
    source = resolve(model)
    config = source.config
    return Preview(source.name, config.max_position_embeddings, Tokenizer.load(source.tokenizer_path), ChatVision.of(config))
