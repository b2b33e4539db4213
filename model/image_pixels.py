"""From decoded pixels to the patches the tower reads (spec/vision.md §2.3 to §2.5), with the bits of Pillow's `ImageOps.pad`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from forebay.model.config import VisionConfig
from forebay.model.image_plan import ImageError, ImagePlan, too_thin
from forebay.model.vision_config import CHANNELS

FILL = 127  # of all three channels, around the picture


def render(pixels: NDArray[np.uint8], plan: ImagePlan) -> NDArray[np.uint8]:
    """The picture resized once, from the original, and centred on its canvas. Holds the picture once more, 4 bytes a pixel, while it runs.

    Args: pixels [h, w, 3] uint8 RGB, of the size the plan was made for.
    Returns: [H, W, 3] uint8.

    Raises:
        ImageError: other pixels than 8-bit RGB, or a picture that vanishes on its canvas.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != CHANNELS or 0 in pixels.shape:
        raise ImageError(f"pixels must be uint8 [h, w, {CHANNELS}], got {pixels.dtype} {list(pixels.shape)}")
    if 0 in plan.picture:
        raise too_thin(pixels.shape[1], pixels.shape[0])
    (width, height), (x, y) = plan.canvas, plan.paste
    resized = Image.fromarray(pixels).resize(plan.picture, Image.Resampling.BICUBIC)
    canvas = np.full((height, width, CHANNELS), FILL, dtype=np.uint8)
    canvas[y : y + resized.height, x : x + resized.width] = np.asarray(resized)
    return canvas


def normalise(values: Tensor) -> Tensor:
    """uint8 of any shape -> bf16: 0 is -1, 255 is 1, in fp32 until the last step."""
    return ((values.float() / 255 - 0.5) / 0.5).bfloat16()


_BITS = normalise(torch.arange(256, dtype=torch.uint8)).view(torch.int16).numpy()  # bf16 of each of the 256 values


def patchify(canvas: NDArray[np.uint8], vision: VisionConfig) -> Tensor:
    """Cut a canvas into patches, left to right, then down.

    Args: canvas [H, W, 3] uint8; H and W are multiples of the patch size.
    Returns: [patches, 3 * P * P] bf16, normalised; a patch is flattened by channel, then y, then x.
    """
    size = vision.patch_size
    rows, columns = canvas.shape[0] // size, canvas.shape[1] // size
    cut = canvas.reshape(rows, size, columns, size, CHANNELS).transpose(0, 2, 4, 1, 3)
    bits = _BITS[cut.reshape(rows * columns, vision.patch_values)]
    return torch.from_numpy(bits).view(torch.bfloat16)
