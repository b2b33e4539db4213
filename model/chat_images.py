"""What the prompts of a model that sees images depend on; it needs neither weights nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.model.config import ModelConfig, VisionConfig
from forebay.model.image_plan import ImagePlan

IMAGE_PARTS = ("image_url", "input_image", "image")  # types of content parts, in the spellings of three protocols
FILE_PARTS = ("file", "input_file")
DETAILS = ("auto", "low", "high", "original")
LOW_SIDE = 512  # pixels of the longest side of an image of detail "low"


@dataclass(frozen=True)
class ChatVision:
    """The eyes of a model, as far as its prompts are concerned.

    Attributes:
        image_id: the token id at every position of an image. config: how pictures are cut.
        tower: hex digest of the weights that see (`tower_identity`); "" while they are not there, when nothing can be shown.
    """

    image_id: int
    config: VisionConfig
    tower: str = ""

    @classmethod
    def of(cls, config: ModelConfig, tower: str = "") -> ChatVision | None:
        """Of a model's configuration; None without a vision half."""
        if config.vision is None or config.image_token_id is None:
            return None
        return cls(config.image_token_id, config.vision, tower)

    def digest(self, canvas_digest: bytes, plan: ImagePlan) -> bytes:
        """32 bytes that name the span of a canvas, by the blake3 of its pixels [H, W, 3] uint8, see `image_digest`."""
        from forebay.model.vision import image_digest  # here, as it brings torch

        return image_digest(canvas_digest, plan, self.tower)


@dataclass(frozen=True)
class PlacedImage:
    """An image of a prompt: its part of the body, such as `messages.3.content.0`, and the positions [start, stop) of its span."""

    part: str
    start: int
    stop: int


def image_parts(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The image parts of a body's messages by their paths, in its order. Whatever else is wrong with the messages is not told here."""
    messages = body.get("messages")
    found: dict[str, Mapping[str, Any]] = {}
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for k, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and is_image(part):
                found[f"messages.{i}.content.{k}"] = part
    return found


def detail_of(part: Mapping[str, Any]) -> tuple[Any, str]:
    """The detail that an image part asks for, None if it does not say, and where in the part it stands."""
    inner = part.get("image_url")
    if isinstance(inner, Mapping) and "detail" in inner:
        return inner["detail"], "image_url.detail"
    return part.get("detail"), "detail"


def longest_side(detail: Any) -> int | None:
    """Pixels of the longest side at a detail; None if it does not matter."""
    return LOW_SIDE if detail == "low" else None


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a content part is an image, or a file that is one by what its data URL says."""
    if part.get("type") in IMAGE_PARTS:
        return True
    url = file_url(part)
    return isinstance(url, str) and url[:11].lower() == "data:image/"


def file_url(part: Mapping[str, Any]) -> Any:
    """The data URL of a file part, in chat's or in Responses' spelling; None of any other part."""
    if part.get("type") not in FILE_PARTS:
        return None
    inner = part.get("file") if part["type"] == "file" else part
    return inner.get("file_data") if isinstance(inner, Mapping) else None
