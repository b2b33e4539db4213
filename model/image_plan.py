"""How a picture is cut: canvas, patches and tokens from its size alone, and its place in the prompt (spec/vision.md §2.2, §2.3, §5).

Needs no pixels, weights or torch, so that a server can count tokens before it decodes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.model.config import VisionConfig
from forebay.model.errors import RequestError

START, IMAGE, NEWLINE, END = range(4)  # roles of span positions


class ImageError(RequestError):
    """A picture that the model cannot be shown, or pictures that do not match their placeholders."""


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of one picture.

    Attributes:
        canvas: width, height of what the tower sees, pixels.
        patches: rows, columns of patches on it.
        grid: rows, columns of IMAGE tokens.
        picture: width, height of the picture on the canvas; the rest is grey.
        paste: x, y of its upper left corner there.
    """

    canvas: tuple[int, int]
    patches: tuple[int, int]
    grid: tuple[int, int]
    picture: tuple[int, int]
    paste: tuple[int, int]

    @property
    def patch_count(self) -> int:
        """Length of the tower's sequence; at most 9,189 of the released model."""
        return self.patches[0] * self.patches[1]

    @property
    def image_rows(self) -> int:
        """IMAGE tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Length of the span: START, every row with its NEWLINE, END."""
        return self.grid[0] * (self.grid[1] + 1) + 2


def plan(width: int, height: int, vision: VisionConfig, *, longest: int | None = None) -> ImagePlan:
    """Plan a picture of `width` x `height` pixels.

    Args:
        longest: the picture counts as shrunk to this longest side first; 512 for detail "low" (spec §11). Its pixels are still resized
            once, from the original.

    Raises:
        ImageError: a side below 1, or a picture so thin that it would vanish on its canvas (spec §2.3).
    """
    found = arrange(width, height, vision, longest=longest)
    if 0 in found.picture:
        raise too_thin(width, height)
    return found


def arrange(width: int, height: int, vision: VisionConfig, *, longest: int | None = None) -> ImagePlan:
    """As `plan`, but a picture that vanishes gets the grey canvas that the reference makes of it; `render` refuses it.

    Raises:
        ImageError: a side below 1.
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} by {height} pixels has no content: both sides must be at least 1")
    canvas = _canvas(*_enlarged(*_capped(width, height, longest), vision), vision)
    picture = _contained(width, height, canvas)
    paste = (_half(canvas[0] - picture[0]), _half(canvas[1] - picture[1]))
    patches = (canvas[1] // vision.patch_size, canvas[0] // vision.patch_size)
    return ImagePlan(canvas, patches, _grid(canvas, vision), picture, paste)


def too_thin(width: int, height: int) -> ImageError:
    return ImageError(f"an image of {width} by {height} pixels is too thin: scaled to what the model sees, one of its sides vanishes")


def _capped(width: int, height: int, longest: int | None) -> tuple[int, int]:
    """Longest side at most `longest`, the other in proportion, halves rounded up: so does deepseek-recipe 0.2.0 (measured)."""
    side = max(width, height)
    if longest is None or side <= longest:
        return width, height
    return (max(1, (2 * width * longest + side) // (2 * side)), max(1, (2 * height * longest + side) // (2 * side)))


def _enlarged(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Step 2: at least about `min_pixels`; truncated, so possibly a little less."""
    if width * height >= vision.min_pixels:
        return width, height
    scale = math.sqrt(vision.min_pixels / (width * height))
    return int(width * scale), int(height * scale)


def _canvas(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Steps 3 to 5: whole patches, and shrunk where the span would exceed its budget. Order of operations as in the reference."""
    patch, cell, budget = vision.patch_size, vision.cell, vision.max_image_tokens
    canvas = (patch * -(-width // patch), patch * -(-height // patch))
    if _tokens(canvas, vision) <= budget:
        return canvas
    ratio = height / width
    columns = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        canvas = (cell, cell * ((budget - 2) // 2))
    elif rows < 1:
        canvas = (cell * (budget - 3), cell)
    else:
        scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
        canvas = (patch * math.floor(width * scale / patch), patch * math.floor(height * scale / patch))
    if _tokens(canvas, vision) > budget or min(canvas) < patch:
        raise ImageError(f"an image of {width} by {height} pixels does not fit into {budget} tokens")
    return canvas


def _grid(canvas: tuple[int, int], vision: VisionConfig) -> tuple[int, int]:
    return -(-canvas[1] // vision.cell), -(-canvas[0] // vision.cell)


def _tokens(canvas: tuple[int, int], vision: VisionConfig) -> int:
    rows, columns = _grid(canvas, vision)
    return rows * (columns + 1) + 2


def _contained(width: int, height: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the picture's shape on the canvas, halves rounded to even, as Pillow's `ImageOps.contain` has it."""
    shape, wanted = width / height, canvas[0] / canvas[1]
    if shape > wanted:
        return canvas[0], round(height / width * canvas[0])
    if shape < wanted:
        return round(width / height * canvas[1]), canvas[1]
    return canvas


def _half(spare: int) -> int:
    return round(spare * 0.5)


def roles(plan: ImagePlan) -> NDArray[np.int8]:
    """Role of each span position, [T]: START, then rows of IMAGE with a NEWLINE after every one, then END."""
    rows, columns = plan.grid
    found = np.full(plan.tokens, IMAGE, dtype=np.int8)
    found[0], found[-1] = START, END
    found[1:-1].reshape(rows, columns + 1)[:, columns] = NEWLINE
    return found


def expand(ids: Sequence[int], image_id: int, plans: Sequence[ImagePlan]) -> tuple[list[int], list[tuple[int, int]]]:
    """Widen each placeholder of a prompt to the span of its image; every span position carries the placeholder's id (spec §5).

    Args: ids, with one `image_id` per image; plans, in the same order.
    Returns: the ids, and where each span starts and stops.

    Raises:
        ImageError: not as many placeholders as images.
    """
    places = [place for place, token in enumerate(ids) if token == image_id]
    if len(places) != len(plans):
        raise ImageError(f"the prompt has {len(places)} image placeholders for {len(plans)} images")
    out: list[int] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for place, each in zip(places, plans, strict=True):
        out += ids[done:place]
        spans.append((len(out), len(out) + each.tokens))
        out += [image_id] * each.tokens
        done = place + 1
    out += ids[done:]
    return out, spans
