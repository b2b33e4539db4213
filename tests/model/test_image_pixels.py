"""Pixels on the canvas and in patches, bit by bit."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from safetensors.torch import load_file

from forebay.model.image_pixels import normalise, patchify, render
from forebay.model.image_plan import ImageError, arrange, plan
from forwards import difference
from vision_model import RELEASED


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    return golden / "vision"


def golden_images(folder: Path) -> Iterator[tuple[dict[str, Any], NDArray[np.uint8]]]:
    for entry in json.loads((folder / "images" / "images.json").read_text("utf-8"))["images"]:
        with Image.open(folder / entry["file"]) as image:
            yield entry, np.asarray(image.convert("RGB"))


def test_golden_images(folder: Path) -> None:
    samples = load_file(folder / "images" / "patch_samples.safetensors")
    seen = 0
    for entry, pixels in golden_images(folder):
        p = plan(pixels.shape[1], pixels.shape[0], RELEASED)
        assert (list(p.canvas), p.tokens) == (entry["canvas"], entry["span_tokens"])
        canvas = render(pixels, p)
        assert np.array_equal(canvas, np.asarray(Image.open(folder / entry["canvas_file"]).convert("RGB"))), entry["name"]
        assert hashlib.sha256(canvas.tobytes()).hexdigest() == entry["canvas_rgb_sha256"]
        patches = patchify(canvas, RELEASED)
        assert patches.shape == (p.patch_count, 588) and patches.dtype == torch.bfloat16
        chosen = patches[samples[f"{entry['name']}.index"]]
        assert difference(chosen, samples[f"{entry['name']}.patches"].flatten(1)) is None
        assert hashlib.sha256(patches.view(torch.int16).numpy().tobytes()).hexdigest() == entry["patches_bf16_sha256"]
        seen += 1
    assert seen >= 5


def test_any_picture_is_padded_as_pillow_pads_it() -> None:
    draw, noise = random.Random(5), np.random.default_rng(5)
    shapes = [(1, 1), (1, 40), (300, 2), (1500, 1400), (2, 3000)]
    shapes += [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(25)]
    for width, height in shapes:
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        p = plan(width, height, RELEASED, longest=draw.choice((None, 512)))
        wanted = ImageOps.pad(Image.fromarray(pixels), p.canvas, color=(127, 127, 127))
        assert np.array_equal(render(pixels, p), np.asarray(wanted)), (width, height)


def test_pixels_may_be_a_view() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    p = plan(60, 45, RELEASED)
    assert np.array_equal(render(pixels[::2, ::2], p), render(np.ascontiguousarray(pixels[::2, ::2]), p))


def test_pillow_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit set by someone else neither stops us nor is changed."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    render(np.zeros((50, 50, 3), dtype=np.uint8), plan(50, 50, RELEASED))
    assert Image.MAX_IMAGE_PIXELS == 10


def test_pictures_that_vanish_are_refused() -> None:
    with pytest.raises(ImageError, match="1 by 50000 pixels is too thin"):
        render(np.zeros((50_000, 1, 3), dtype=np.uint8), arrange(1, 50_000, RELEASED))


@pytest.mark.parametrize(
    "pixels", [np.zeros((5, 5), np.uint8), np.zeros((5, 5, 4), np.uint8), np.zeros((5, 5, 3), np.float32), np.zeros((0, 5, 3), np.uint8)]
)
def test_other_pixels_are_refused(pixels: NDArray[Any]) -> None:
    with pytest.raises(ImageError, match=r"uint8 \[h, w, 3\]"):
        render(pixels, plan(5, 5, RELEASED))


def test_normalised_values(folder: Path) -> None:
    wanted = load_file(folder / "tower" / "primitives.safetensors")["normalise.u8_to_bf16"]
    assert difference(normalise(torch.arange(256, dtype=torch.uint8)), wanted) is None


def test_spec_values() -> None:
    """spec/vision.md §14.3."""
    found = normalise(torch.tensor([0, 127, 128, 255], dtype=torch.uint8)).double()
    assert torch.allclose(found, torch.tensor([-1, -0.0039367676, 0.0039367676, 1]).double(), rtol=0, atol=1e-9)


def test_places_in_a_patch() -> None:
    """spec/vision.md §14.4: channel, then y, then x; patches left to right, then down."""
    canvas = np.zeros((28, 42, 3), dtype=np.uint8)
    canvas[14 + 13, 28 + 0, 2] = 255
    lit = (patchify(canvas, RELEASED) == 1).nonzero().tolist()
    assert lit == [[1 * 3 + 2, 2 * 196 + 13 * 14]]
