"""Pictures cut into patches and tokens: golden sizes, the limits for any size, and spans in prompts."""

from __future__ import annotations

import hashlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepseek_recipe
import numpy as np
import pytest
from PIL import Image

from forebay.model.config import VisionConfig
from forebay.model.errors import RequestError
from forebay.model.image_plan import ImageError, ImagePlan, arrange, expand, plan, roles
from vision_model import RELEASED

IMAGE_ID = 129264

# spec/vision.md §2.6: size -> canvas, patches, grid, tokens.
WORKED = {
    (1, 1): ((546, 546), (39, 39), (13, 13), 184), (224, 224): ((546, 546), (39, 39), (13, 13), 184),
    (544, 544): ((546, 546), (39, 39), (13, 13), 184), (546, 546): ((546, 546), (39, 39), (13, 13), 184),
    (448, 336): ((630, 476), (34, 45), (12, 15), 194), (588, 588): ((588, 588), (42, 42), (14, 14), 212),
    (640, 480): ((644, 490), (35, 46), (12, 16), 206), (480, 640): ((490, 644), (46, 35), (16, 12), 210),
    (800, 600): ((812, 602), (43, 58), (15, 20), 317), (1024, 1024): ((1036, 1036), (74, 74), (25, 25), 652),
    (1280, 720): ((1288, 728), (52, 92), (18, 31), 578), (1302, 1302): ((1302, 1302), (93, 93), (31, 31), 994),
    (1344, 1344): ((1302, 1302), (93, 93), (31, 31), 994), (1920, 1080): ((1708, 966), (69, 122), (23, 41), 968),
    (4000, 3000): ((1512, 1134), (81, 108), (27, 36), 1001), (10000, 10): ((17206, 28), (2, 1229), (1, 410), 413),
    (10, 10000): ((28, 17206), (1229, 2), (410, 1), 822), (1, 2000): ((42, 21462), (1533, 3), (511, 1), 1024),
    (100, 2000): ((126, 2436), (174, 9), (58, 3), 234),
}  # fmt: skip

# The same page: the first and the last row (y) or column (x) of the picture on the canvas.
PLACED = {
    (640, 480): ("y", 4, 486), (480, 640): ("x", 4, 486), (448, 336): ("y", 2, 473), (800, 600): ("x", 4, 806),
    (1920, 1080): ("y", 2, 962), (10000, 10): ("y", 6, 22), (4000, 3000): ("y", 0, 1133), (588, 588): ("x", 0, 587),
}  # fmt: skip


@pytest.fixture(scope="module")
def sizes(golden: Path) -> list[dict[str, Any]]:
    return json.loads((golden / "vision" / "sizes.json").read_text("utf-8"))["sizes"]


@pytest.fixture(scope="module")
def spans(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "vision" / "spans.json").read_text("utf-8"))


def grid_plan(rows: int, columns: int) -> ImagePlan:
    canvas = (42 * columns, 42 * rows)
    return ImagePlan(canvas, (3 * rows, 3 * columns), (rows, columns), canvas, (0, 0))


class TestSizes:
    def test_golden(self, sizes: list[dict[str, Any]]) -> None:
        assert len(sizes) >= 40
        for row in sizes:
            p = arrange(row["width"], row["height"], RELEASED)
            found = (p.canvas, p.patches, p.patch_count, p.grid, p.image_rows, p.tokens, p.picture, p.paste)
            names = ("canvas", "vit_grid", "patches", "llm_grid", "image_rows", "span_tokens", "contain_size", "paste_at")
            wanted = tuple(tuple(row[name]) if isinstance(row[name], list) else row[name] for name in names)
            assert found == wanted, (row["width"], row["height"])
            assert row["picture_vanishes"] == (0 in p.picture)

    def test_pictures_that_vanish_are_refused(self, sizes: list[dict[str, Any]]) -> None:
        for row in sizes:
            if row["picture_vanishes"]:
                with pytest.raises(ImageError, match=rf"{row['width']} by {row['height']} pixels is too thin"):
                    plan(row["width"], row["height"], RELEASED)
            else:
                assert plan(row["width"], row["height"], RELEASED) == arrange(row["width"], row["height"], RELEASED)

    @pytest.mark.parametrize(("size", "wanted"), WORKED.items())
    def test_worked_sizes(self, size: tuple[int, int], wanted: tuple[Any, ...]) -> None:
        p = plan(*size, RELEASED)
        assert (p.canvas, p.patches, p.grid, p.tokens) == wanted

    def test_a_span_of_just_the_budget_is_not_shrunk(self) -> None:
        p = plan(3015, 580, RELEASED)
        assert (p.canvas, p.grid, p.tokens) == ((3024, 588), (14, 72), 1024)
        assert plan(3015, 589, RELEASED).canvas < p.canvas

    @pytest.mark.parametrize(("size", "wanted"), PLACED.items())
    def test_places_on_the_canvas(self, size: tuple[int, int], wanted: tuple[str, int, int]) -> None:
        p, axis = plan(*size, RELEASED), "xy".index(wanted[0])
        assert (p.paste[axis], p.paste[axis] + p.picture[axis] - 1) == wanted[1:]
        assert p.paste[1 - axis] == 0 and p.picture[1 - axis] == p.canvas[1 - axis]

    @pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5), (0, 0)])
    def test_no_content(self, size: tuple[int, int]) -> None:
        with pytest.raises(ImageError, match="at least 1") as caught:
            plan(*size, RELEASED)
        assert isinstance(caught.value, RequestError) and caught.value.status == 400

    @pytest.mark.parametrize("size", [(1, 43_000), (90_000, 1), (1, 10**9)])
    def test_too_thin(self, size: tuple[int, int]) -> None:
        with pytest.raises(ImageError, match="too thin"):
            plan(*size, RELEASED)

    def test_limits_hold_for_any_size(self) -> None:
        check_limits(RELEASED, 4000, 30_000, most_patches=9189)

    @pytest.mark.parametrize(
        "changes", [{"max_image_tokens": 4}, {"max_image_tokens": 60, "min_pixels": 1}, {"patch_size": 7, "downsample_ratio": 2}], ids=str
    )
    def test_limits_hold_for_other_budgets(self, changes: dict[str, int]) -> None:
        vision = replace(RELEASED, **changes)
        check_limits(vision, 1000, 5000, most_patches=vision.downsample_ratio**2 * vision.max_image_tokens)

    def test_an_independent_count_agrees(self) -> None:
        """deepseek-recipe plans until nothing changes, which is the same for shapes below 14 to 1 (golden notes)."""
        draw, compared = random.Random(2), 0
        for _ in range(2000):
            width, height = draw.randint(1, 8192), draw.randint(1, 8192)
            if max(width, height) < 14 * min(width, height):
                info = deepseek_recipe.ImageInfo(b"", width, height)
                theirs = deepseek_recipe.MultiModalData([info]).image_token_adjustment() + 1
                assert plan(width, height, RELEASED).tokens == theirs, (width, height)
                compared += 1
        assert compared > 1500


def check_limits(vision: VisionConfig, count: int, longest: int, *, most_patches: int) -> None:
    draw, patch = random.Random(1), vision.patch_size
    for i in range(count):
        width, height = draw.randint(1, longest), draw.randint(1, longest if i % 2 else 60)
        if i % 3 == 0:
            width, height = height, width
        p = arrange(width, height, vision)
        assert p.tokens <= vision.max_image_tokens, (width, height)
        assert p.patch_count <= most_patches, (width, height)
        assert p.canvas == (patch * p.patches[1], patch * p.patches[0]) and min(p.patches) >= 1
        assert p.grid == tuple(-(-side // vision.downsample_ratio) for side in p.patches)
        assert p.tokens == p.image_rows + p.grid[0] + 2
        for axis in (0, 1):
            spare = p.canvas[axis] - p.picture[axis]
            assert 0 <= p.paste[axis] <= spare and abs(2 * p.paste[axis] - spare) <= 1, (width, height)
        assert 0 in (p.canvas[0] - p.picture[0], p.canvas[1] - p.picture[1])


class TestLowDetail:
    @pytest.mark.parametrize(("size", "tokens"), [((4000, 3000), 194), ((1344, 1344), 184)])
    def test_measured_counts(self, size: tuple[int, int], tokens: int) -> None:
        assert plan(*size, RELEASED, longest=512).tokens == tokens

    def test_small_pictures_stay(self) -> None:
        for size in ((512, 20), (300, 512), (1, 1)):
            assert plan(*size, RELEASED, longest=512) == plan(*size, RELEASED)

    def test_a_thin_side_keeps_one_pixel(self) -> None:
        """4096 x 2 counts as 512 x 1, where rounding says 0.25."""
        assert arrange(4096, 2, RELEASED, longest=512).canvas == arrange(512, 1, RELEASED).canvas

    @pytest.mark.parametrize("size", [(1024, 121), (1024, 301), (301, 1024), (700, 333), (1500, 467), (1024, 767), (613, 611)])
    def test_canvas_of_the_official_gateway(self, size: tuple[int, int]) -> None:
        """Sizes of which several end in a half after the cap, on both sides of even."""
        file = io.BytesIO()
        Image.new("RGB", size, (9, 99, 200)).save(file, "PNG")
        options = deepseek_recipe.PreprocessOptions("low", 8192, 512)
        info = deepseek_recipe.OpenCvImagePreprocessor().preprocess(file.getvalue(), options)
        assert plan(*size, RELEASED, longest=512).canvas == (info.width, info.height)

    def test_the_picture_keeps_its_own_shape(self) -> None:
        """Rendered from the original: 1001 x 3 and what it is capped to differ in shape."""
        p = plan(1001, 300, RELEASED, longest=512)
        assert p.picture == (p.canvas[0], round(300 / 1001 * p.canvas[0]))


class TestSpans:
    def test_golden_grids(self, spans: dict[str, Any]) -> None:
        for row in spans["grids"]:
            found = roles(grid_plan(*row["llm_grid"]))
            assert found.dtype == np.int8 and found.size == row["span_tokens"]
            assert hashlib.sha256("".join(map(str, found)).encode()).hexdigest() == row["types_sha256"], row["llm_grid"]
            assert found.tolist() == row.get("types", found.tolist())
            assert (int((found == 1).sum()), int((found == 2).sum())) == (row["image_positions"], row["newline_positions"])

    def test_layout(self) -> None:
        assert roles(grid_plan(2, 3)).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]

    def test_golden_prompts(self, spans: dict[str, Any]) -> None:
        for row in spans["prompts"]:
            plans = [plan(*size, RELEASED) for size in row["image_sizes"]]
            ids, places = expand(row["prompt_ids"], IMAGE_ID, plans)
            assert ids == row["token_ids"], row["name"]
            assert places == [(span["start"], span["start"] + span["length"]) for span in row["spans"]]
            assert [(list(p.patches), list(p.grid)) for p in plans] == [(s["vit_grid"], s["llm_grid"]) for s in row["spans"]]
            types = np.full(len(ids), -1)
            for (start, stop), p in zip(places, plans, strict=True):
                types[start:stop] = roles(p)
            assert types.tolist() == row["token_types"], row["name"]

    def test_golden_errors(self, spans: dict[str, Any]) -> None:
        assert len(spans["errors"]) >= 3
        for row in spans["errors"]:
            with pytest.raises(ImageError, match="image placeholders for"):
                expand(row["prompt_ids"], IMAGE_ID, [plan(224, 224, RELEASED)] * row["images"])

    def test_the_prompt_is_not_changed(self) -> None:
        ids = [1, IMAGE_ID, 2]
        out, places = expand(ids, IMAGE_ID, [grid_plan(1, 1)])
        assert ids == [1, IMAGE_ID, 2]
        assert (out, places) == ([1, *[IMAGE_ID] * 4, 2], [(1, 5)])
