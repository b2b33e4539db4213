"""Chat prompts with images whose pixels are in this process. The server has them decoded and drawn elsewhere (server/pictures.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from forebay.engine.types import PromptImage
from forebay.model.chat import ChatCodec, EncodedPrompt
from forebay.model.chat_images import detail_of, image_parts, longest_side
from forebay.model.errors import RequestError
from forebay.model.image_pixels import render
from forebay.model.image_plan import plan


def prompt_with_images(
    codec: ChatCodec, body: Mapping[str, Any], images: Sequence[NDArray[np.uint8]], max_tokens: int | None = None
) -> tuple[EncodedPrompt, tuple[PromptImage, ...]]:
    """Encode a chat request and draw its images.

    Args: body, max_tokens: see `ChatCodec.encode`; images: pixels [height, width, 3] uint8 RGB, in the order of the body's image parts.

    Raises:
        RequestError: the body cannot be encoded, there are not as many images as parts, or one cannot be shown.
    """
    parts = image_parts(body)
    if len(parts) != len(images):
        raise RequestError(f"there are {len(images)} images for {len(parts)} image parts of the messages", param="images")
    vision = codec.vision
    if vision is None:
        return codec.encode(body, max_tokens=max_tokens), ()  # which refuses them
    pixels = dict(zip(parts, images, strict=True))
    plans = {
        name: plan(pixels[name].shape[1], pixels[name].shape[0], vision.config, longest=longest_side(detail_of(part)[0]))
        for name, part in parts.items()
    }
    prompt = codec.encode(body, plans=plans, max_tokens=max_tokens)
    shown = []
    for placed in prompt.images:
        canvas = render(pixels[placed.part], plans[placed.part])
        digest = vision.digest(blake3(canvas.tobytes()).digest(), plans[placed.part])
        shown.append(PromptImage(placed.start, placed.stop, plans[placed.part], canvas, digest))
    return prompt, tuple(shown)
