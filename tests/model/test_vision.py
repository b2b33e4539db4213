"""The vision tower against golden results: every intermediate in fp32, the noise of bf16, primitives, and what single mistakes cost."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from forebay.cache.prefix import ImageSpan
from forebay.model import vision, vision_layers
from forebay.model.checkpoint import Checkpoint
from forebay.model.errors import CheckpointError
from forebay.model.image_plan import ImageError, ImagePlan, plan, roles
from forebay.model.ops.rope import inverse_frequencies
from forebay.model.ops.rope2d import patch_angles, patch_positions, rotate_halves
from forebay.model.vision import VisionTower, image_digest, tower_identity
from forebay.model.vision_layers import multiplies_bf16, unshuffle
from forwards import difference
from noise_model import noise_checkpoint
from vision_model import golden_tower, plan_of, tower_of, write_tiny_vision

TOWER_LIMIT, SPAN_LIMIT = 1e-4, 5e-5  # largest difference in fp32, up to the aligner and after it (golden notes)
BF16_LIMIT = 0.03  # relative norm of the difference from fp32
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Grid = tuple[ImagePlan, dict[str, Tensor]]


@pytest.fixture(scope="module")
def grids(golden: Path) -> list[Grid]:
    files = sorted((golden / "vision" / "tower").glob("grid_*.safetensors"))
    found = [load_file(file) for file in files]
    assert len(found) >= 3
    return [(plan_of(*g["grid"].tolist()), g) for g in found]


@pytest.fixture(scope="module")
def primitives(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "vision" / "tower" / "primitives.safetensors")


@pytest.fixture(scope="module")
def tower(golden: Path) -> VisionTower:
    return golden_tower(golden, torch.float32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny-vision")
    write_tiny_vision(folder)
    return Checkpoint.open(folder)


def results(tower: VisionTower, grid: Grid) -> dict[str, Tensor]:
    """Every intermediate by its golden name."""
    image, g = grid
    record: dict[str, Tensor] = {}
    rows = tower.rows(g["pixels"], image, record)
    return {name: value.cpu() for name, value in (record | {"projector": rows, "span": tower.span(rows, image)}).items()}


def furthest(tower: VisionTower, grids: list[Grid]) -> tuple[float, float]:
    """Largest difference from the golden fp32 results up to the aligner, and after it; over limits means wrong."""
    before = after = 0.0
    for grid in grids:
        for name, value in results(tower, grid).items():
            off = (value - grid[1][f"official_fp32.{name}"]).abs().max().item()
            if name in ("projector", "span"):
                after = max(after, off)
            elif name != "aligner_w1":
                before = max(before, off)
    return before, after


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


class TestGolden:
    def test_every_intermediate_in_fp32(self, tower: VisionTower, grids: list[Grid]) -> None:
        for image, g in grids:
            found = results(tower, (image, g))
            assert {f"official_fp32.{name}" for name in found} == {name for name in g if name.startswith("official_fp32.")}
            assert all(found[name].shape == g[f"official_fp32.{name}"].shape for name in found)
            assert roles(image).tolist() == g["token_types"].tolist()
        before, after = furthest(tower, grids)
        assert before <= TOWER_LIMIT / 4
        assert after <= SPAN_LIMIT / 10

    def test_bf16_is_within_its_noise(self, golden: Path, grids: list[Grid]) -> None:
        tower = golden_tower(golden, torch.bfloat16)
        for image, g in grids:
            wanted = g["official_fp32.projector"]
            assert 1e-3 < relative(tower.rows(g["pixels"], image), wanted) <= BF16_LIMIT * 0.6
            span = tower.encode(g["pixels"], image)
            assert span.dtype == torch.bfloat16 and span.shape == (image.tokens, 64)
            assert relative(span[torch.from_numpy(roles(image)) == 1], wanted) <= BF16_LIMIT * 0.6

    def test_delimiters_are_the_learned_vectors(self, golden: Path, grids: list[Grid]) -> None:
        stored = load_file(golden / "vision" / "tower" / "model.safetensors")
        image, g = grids[-1]
        span, kinds = golden_tower(golden, torch.float32).encode(g["pixels"], image), torch.from_numpy(roles(image))
        for kind, name in ((0, "image_start"), (2, "image_newline"), (3, "image_end")):
            assert difference(span[kinds == kind], stored[name].expand(int((kinds == kind).sum()), -1)) is None
        assert torch.allclose(span[kinds == 1].float(), g["official_fp32.projector"], rtol=2**-8, atol=SPAN_LIMIT)  # rounded once

    @CUDA
    def test_on_a_gpu(self, golden: Path, grids: list[Grid]) -> None:
        before, after = furthest(golden_tower(golden, torch.float32, device="cuda"), grids)
        assert before <= TOWER_LIMIT and after <= SPAN_LIMIT
        tower = golden_tower(golden, torch.bfloat16, device="cuda")
        for image, g in grids:
            span = tower.encode(g["pixels"], image)
            assert span.is_cuda
            assert relative(span.cpu()[torch.from_numpy(roles(image)) == 1], g["official_fp32.projector"]) <= BF16_LIMIT


def adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def columns_first(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    return patch_angles(positions.flip(1), dim, base)


def whole_head(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    freqs = inverse_frequencies(dim, base)[: dim // 4]
    angles = torch.cat((positions[:, :1] * freqs, positions[:, 1:] * freqs), 1)
    return angles.cos(), angles.sin()


def row_last_cells(x: Tensor, grid: tuple[int, int], ratio: int) -> Tensor:
    """(dy, dx, c) instead of channel first."""
    wide = x.shape[1]
    return unshuffle(x, grid, ratio).unflatten(1, (wide, -1)).transpose(1, 2).flatten(1)


def edge_padded(x: Tensor, grid: tuple[int, int], ratio: int) -> Tensor:
    rows, columns = (-(-side // ratio) * ratio for side in grid)
    whole = functional.pad(x.view(1, *grid, -1).permute(0, 3, 1, 2), (0, columns - grid[1], 0, rows - grid[0]), mode="replicate")
    return unshuffle(whole[0].permute(1, 2, 0).flatten(0, 1), (rows, columns), ratio)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


attend, gelu, silu = functional.scaled_dot_product_attention, functional.gelu, functional.silu
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "tanh GELU": (functional, "gelu", lambda x: gelu(x, approximate="tanh")),
    "RoPE of neighbours": (vision_layers, "rotate_halves", adjacent),
    "RoPE column before row": (vision, "patch_angles", columns_first),
    "RoPE frequencies of a whole head": (vision, "patch_angles", whole_head),
    "causal attention": (functional, "scaled_dot_product_attention", causal),
    "cells row first": (vision, "unshuffle", row_last_cells),
    "cells padded with their edge": (vision, "unshuffle", edge_padded),
    "GELU instead of SiLU": (functional, "silu", gelu),
}


class TestMistakes:
    """The limits above are tight enough to tell."""

    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_is_seen(self, tower: VisionTower, grids: list[Grid], mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(*MISTAKES[mistake])
        before, after = furthest(tower, grids)
        assert before > TOWER_LIMIT or after > SPAN_LIMIT, (before, after)

    @pytest.mark.parametrize("eps", [1e-5, 1e-20])
    def test_another_eps_is_seen_by_small_rows(self, primitives: dict[str, Tensor], eps: float) -> None:
        """At the size of real activations it is not."""
        off = (norm(primitives, eps)(primitives["rmsnorm.x"]) - primitives["rmsnorm.y"]).abs().max().item()
        assert off > 0.1

    def test_patches_flattened_otherwise_are_seen(self, tower: VisionTower, grids: list[Grid]) -> None:
        image, g = grids[0]
        turned = g | {"pixels": g["pixels"].permute(0, 2, 3, 1).reshape(g["pixels"].shape)}
        assert furthest(tower, [(image, turned)])[0] > TOWER_LIMIT


def norm(primitives: dict[str, Tensor], eps: float) -> vision_layers.Norm:
    built = object.__new__(vision_layers.Norm)
    built.weight, built.eps = primitives["rmsnorm.weight"].float(), eps
    return built


class TestPrimitives:
    def test_rope_in_fp32(self, primitives: dict[str, Tensor]) -> None:
        places = primitives["rope.row_col"]
        cos, sin = patch_angles(places, 64, 10000.0)
        limit = torch.where(places.amax(1, keepdim=True) > 1000, 3e-5, 1e-5)
        assert bool(((cos - primitives["rope.cos"]).abs() <= limit).all())
        assert bool(((sin - primitives["rope.sin"]).abs() <= limit).all())
        off = (rotate_halves(primitives["rope.x"], cos, sin) - primitives["rope.y"]).abs()
        assert bool((off <= limit[:, None] * primitives["rope.x"].abs().max()).all())

    def test_rope_in_bf16(self, primitives: dict[str, Tensor]) -> None:
        cos, sin = patch_angles(primitives["rope.row_col"], 64, 10000.0)
        found = rotate_halves(primitives["rope.x_bf16"], cos, sin)
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.float(), primitives["rope.y_bf16"].float(), rtol=2**-7, atol=1e-4)

    def test_norm(self, primitives: dict[str, Tensor]) -> None:
        built = norm(primitives, 1e-6)
        assert (built(primitives["rmsnorm.x"]) - primitives["rmsnorm.y"]).abs().max() <= 1e-5
        found = built(primitives["rmsnorm.x_bf16"])
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.float(), primitives["rmsnorm.y_bf16"].float(), rtol=2**-7, atol=1e-6)

    def test_gelu(self, primitives: dict[str, Tensor]) -> None:
        assert (functional.gelu(primitives["gelu.x"]) - primitives["gelu.y"]).abs().max() <= 1e-6

    @pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 4), (4, 7), (7, 5)])
    def test_unshuffle(self, primitives: dict[str, Tensor], grid: tuple[int, int]) -> None:
        rows, columns = grid
        x = 1 + torch.arange(rows * columns * 5, dtype=torch.int32).view(-1, 5)
        assert torch.equal(unshuffle(x, grid, 3), primitives[f"unshuffle.{rows}x{columns}"])


class TestSpecVectors:
    """spec/vision.md §14."""

    def test_frequencies(self) -> None:
        cos, sin = patch_angles(torch.tensor([[1, 0]]), 64, 10000.0)
        wanted = [1, 0.562341, 0.316228, 0.177828, 0.1, 0.056234, 0.031623, 0.017783, 0.01, 0.005623, 0.003162, 0.001778, 0.001, 0.000562]
        angles = torch.atan2(sin, cos)[0, :14]
        assert torch.allclose(angles, torch.tensor(wanted), rtol=0, atol=1e-6)

    def test_rope_turns(self) -> None:
        x = torch.zeros(3, 1, 64)
        x[:, :, 0], x[:, :, 16] = 1, 1
        cos, sin = patch_angles(torch.tensor([[0, 0], [1, 0], [0, 1]]), 64, 10000.0)
        origin, down, right = rotate_halves(x, cos, sin)[:, 0]
        assert torch.equal(origin, x[0, 0])
        turned = pytest.approx((math.cos(1), math.sin(1)))
        assert (down[0].item(), down[32].item()) == turned and (down[16].item(), down[48].item()) == (1, 0)
        assert (right[16].item(), right[48].item()) == turned and (right[0].item(), right[32].item()) == (1, 0)

    def test_positions_run_row_by_row(self) -> None:
        assert patch_positions((2, 3), torch.device("cpu")).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]

    def test_cells(self) -> None:
        x = torch.zeros(9, 8)
        x[1 * 3 + 2, 7] = 1
        assert unshuffle(x, (3, 3), 3).nonzero().tolist() == [[0, 68]]
        kept = unshuffle(torch.ones(4, 1), (2, 2), 3).view(3, 3)
        assert kept.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_images_do_not_see_each_other(self, tiny: Checkpoint, dtype: torch.dtype) -> None:
        tower = VisionTower(tiny, dtype=dtype)
        numbers = torch.Generator().manual_seed(3)
        plans = (plan_of(7, 5), plan_of(39, 39), plan_of(3, 3))
        images = [(torch.randn(image.patch_count, 588, generator=numbers).bfloat16(), image) for image in plans]
        for found, (patches, image) in zip(tower.encode_many(images), images, strict=True):
            assert difference(found, tower.encode(patches, image)) is None


class TestTower:
    def test_from_a_checkpoint(self, tiny: Checkpoint) -> None:
        seen: list[tuple[int, int, str]] = []
        tower = VisionTower(tiny, progress=lambda done, total, name: seen.append((done, total, name)))
        assert tower.nbytes == tiny.parts()["vision"] == seen[-1][0] == seen[-1][1]
        assert {name for _, _, name in seen} == {name for name, spec in tiny.specs.items() if spec.part == "vision"}
        image = plan(640, 480, tower.config)
        span = tower.encode(torch.zeros(image.patch_count, 3, 14, 14, dtype=torch.bfloat16), image)
        assert span.shape == (206, tiny.config.hidden_size) and span.dtype == torch.bfloat16
        assert bool(span.isfinite().all())

    def test_activations_keep_their_size(self, tiny: Checkpoint) -> None:
        numbers = torch.Generator().manual_seed(3)
        rows = VisionTower(tiny).rows(torch.randn(35 * 46, 588, generator=numbers), plan_of(35, 46))
        assert 0.1 < rows.float().std().item() < 3

    def test_patches_of_another_plan_are_refused(self, tiny: Checkpoint) -> None:
        tower = VisionTower(tiny)
        with pytest.raises(ImageError, match=r"patches are \[12, 588\], a grid of 3 by 5 has \[15, 588\]"):
            tower.encode(torch.zeros(12, 588), plan_of(3, 5))
        with pytest.raises(ImageError, match=r"\[15, 300\]"):
            tower.encode(torch.zeros(15, 3, 10, 10), plan_of(3, 5))

    def test_no_vision_half(self) -> None:
        with pytest.raises(CheckpointError, match="no vision half"):
            VisionTower(Checkpoint.open(noise_checkpoint(), scan=False))

    def test_dtype_of_a_device(self, tiny: Checkpoint) -> None:
        fast = multiplies_bf16(torch.device("cpu"))
        assert VisionTower(tiny).dtype == (torch.bfloat16 if fast else torch.float32)
        assert multiplies_bf16(torch.device("cuda"))

    def test_memory_grows_with_the_patches_only(self, golden: Path) -> None:
        """The longest sequence, in a process of its own: one matrix of scores would take 338 MB of fp32 for each of 4 heads."""
        code = (
            "import resource, sys, torch\n"
            "from pathlib import Path\n"
            "from vision_model import golden_tower, plan_of\n"
            "for dtype in (torch.float32, torch.bfloat16):\n"
            "    tower = golden_tower(Path(sys.argv[1]), dtype)\n"
            "    tower.encode(torch.zeros(90, 588), plan_of(9, 10))\n"
            "    patches = torch.randn(9189, 588).bfloat16()\n"
            "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "    tower.encode(patches, plan_of(3, 3063))\n"
            "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        )
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code, golden], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert all(int(grown) < 150_000 for grown in done.stdout.split()), done.stdout  # KiB


class TestIdentity:
    def test_follows_weights_and_configuration(self, golden: Path) -> None:
        tensors = load_file(golden / "vision" / "tower" / "model.safetensors")
        config = golden_tower(golden, torch.float32).config
        base = tower_of(tensors, config, 64).identity
        assert base == tower_of(dict(tensors), config, 64, dtype=torch.float32).identity
        others = {base}
        for name in ("image_end", "vision.blocks.2.mlp.w2.weight", "vision.norm.weight"):
            changed = tensors[name].clone()
            changed.view(-1)[-1] += 1
            others.add(tower_of(tensors | {name: changed}, config, 64).identity)
        others.add(tower_of(tensors, replace(config, rope_theta=9999.0), 64).identity)
        others.add(tower_of(tensors, replace(config, rms_norm_eps=1e-5), 64).identity)
        assert len(others) == 6

    def test_needs_no_tower(self, tiny: Checkpoint) -> None:
        assert tower_identity(tiny) == VisionTower(tiny).identity

    def test_digest_follows_everything(self) -> None:
        image = plan_of(6, 9)
        base = image_digest(b"p" * 32, image, "tower")
        assert ImageSpan(0, image.tokens, base).digest == image_digest(b"p" * 32, plan_of(6, 9), "tower")
        others = {base, image_digest(b"q" * 32, image, "tower"), image_digest(b"p" * 32, image, "tower2")}
        others.add(image_digest(b"p" * 31, image, "ptower"))  # the same bytes, divided otherwise
        for change in (
            {"canvas": (126, 85)}, {"patches": (6, 8)}, {"grid": (2, 4)}, {"picture": (125, 84)}, {"paste": (1, 0)}, {"paste": (0, 1)},
        ):  # fmt: skip
            others.add(image_digest(b"p" * 32, replace(image, **change), "tower"))
        assert len(others) == 10 and all(len(digest) == 32 for digest in others)
