"""The vision half: patches of an image to the finished span of embeddings (spec/vision.md §3 to §5, §7, §12)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import torch
from blake3 import blake3
from torch import Tensor

from forebay.model.checkpoint import Weights
from forebay.model.config import VisionConfig
from forebay.model.errors import CheckpointError
from forebay.model.image_plan import ImageError, ImagePlan
from forebay.model.loading import Loader, Meter
from forebay.model.names import vision_tensors
from forebay.model.ops.linear import TileCache
from forebay.model.ops.rope2d import patch_angles, patch_positions
from forebay.model.vision_layers import Aligner, Block, Linear, Norm, multiplies_bf16, unshuffle

SAMPLE_BYTES = 4096

Record = dict[str, Tensor]


class VisionTower:
    """Tower, aligner and delimiter vectors of one checkpoint on one device.

    Floors of one image with L patches, released sizes: it reads the weights once, 0.97 GB, and takes 2 L x 419 M FLOPs for the linear
    layers and 131,072 L^2 for attention: 1.7 TFLOP at 640 x 480 (L = 1,610), 18.8 TFLOP at the most (L = 9,189).

    Attributes:
        dtype: of activations. bf16 where the device has instructions for it, else fp32: at these sizes a core of an EPYC computed
            88 GFLOP/s in fp32 and 206 in bf16, but 38 in bf16 without AVX512-BF16 and 22 with AVX2 alone.
        nbytes: of the weights.
        identity: hex digest of the weights and of their configuration, see `tower_identity`.
    """

    def __init__(
        self,
        source: Weights,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Read the vision tensors of a checkpoint, and no others. On a CPU they stay where they are mapped.

        Raises:
            CheckpointError: the checkpoint has no vision half.
        """
        config = _vision_half(source)
        self.config, self.device = config, torch.device(device)
        self.dtype = dtype or (torch.bfloat16 if multiplies_bf16(self.device) else torch.float32)
        self.nbytes = sum(spec.nbytes for spec in vision_tensors(source.config).values())
        self.identity = tower_identity(source)
        load = Loader(source, TileCache(0), self.device, Meter(self.nbytes, progress))
        at = load.at("vision")
        self.patch_embed = Linear(at, "patch_embed.proj", bias=True)
        self.blocks = [Block(config, at.at(f"blocks.{i}")) for i in range(config.num_hidden_layers)]
        self.norm = Norm(at, "norm", config.rms_norm_eps)
        self.aligner = Aligner(load.at("aligner"))
        self.start, self.newline, self.end = (load.tensor(f"image_{name}") for name in ("start", "newline", "end"))

    @torch.inference_mode()
    def encode(self, patches: Tensor, plan: ImagePlan, record: Record | None = None) -> Tensor:
        """The finished span of one image.

        Args:
            patches: [L, 588] or [L, 3, 14, 14], as `patchify` makes them, on any device.
            record: gets intermediate results by name.
        Returns: [T, D] bf16 on the tower's device, delimiters included.

        Raises:
            ImageError: the patches are not those of the plan.
        """
        return self.span(self.rows(patches, plan, record), plan).bfloat16()

    def encode_many(self, images: Iterable[tuple[Tensor, ImagePlan]]) -> list[Tensor]:
        """`encode` of each, one after the other: images never see each other, and the bits of each are those it has alone."""
        return [self.encode(patches, plan) for patches, plan in images]

    @torch.inference_mode()
    def rows(self, patches: Tensor, plan: ImagePlan, record: Record | None = None) -> Tensor:
        """The IMAGE rows of one image, [rows * columns, D] in `dtype`, row by row. Arguments and errors as of `encode`."""
        patches = patches.flatten(1)
        wanted = (plan.patch_count, self.config.patch_values)
        if tuple(patches.shape) != wanted:
            raise ImageError(f"patches are {list(patches.shape)}, a grid of {plan.patches[0]} by {plan.patches[1]} has {list(wanted)}")

        def note(name: str, value: Tensor) -> None:
            if record is not None:
                record[name] = value

        x = self.patch_embed(patches.to(self.device, self.dtype))
        note("patch_embed", x)
        positions = patch_positions(plan.patches, self.device)
        cos, sin = patch_angles(positions, self.config.head_dim, self.config.rope_theta)
        for i, block in enumerate(self.blocks):
            x, attn, mlp = block(x, cos, sin)
            note(f"block{i}.attn", attn)
            note(f"block{i}.mlp", mlp)
            note(f"block{i}", x)
        x = self.norm(x)
        note("final_norm", x)
        cells = unshuffle(x, plan.patches, self.config.downsample_ratio)
        note("unshuffle", cells)
        rows, inner = self.aligner(cells)
        note("aligner_w1", inner)
        return rows

    @torch.inference_mode()
    def span(self, rows: Tensor, plan: ImagePlan) -> Tensor:
        """Rows with their delimiters: [n_h * n_w, D] -> [T, D], same dtype (spec §5, §7)."""
        (height, width), wide = plan.grid, rows.shape[1]
        out = torch.empty((plan.tokens, wide), dtype=rows.dtype, device=rows.device)
        out[0], out[-1] = self.start, self.end
        lines = out[1:-1].view(height, width + 1, wide)
        lines[:, :width] = rows.view(height, width, wide)
        lines[:, width] = self.newline
        return out


def _vision_half(source: Weights) -> VisionConfig:
    config = source.config.vision
    if config is None or not source.has_vision:
        raise CheckpointError("the checkpoint has no vision half (vision.*, aligner.*): it cannot be shown images")
    return config


def tower_identity(source: Weights) -> str:
    """Hex digest of everything but the image that a span depends on; needs no loaded tower.

    Covers the configuration, and of each vision tensor its name, dtype, size, first and last 4 KiB, as `Checkpoint.fingerprint` does.

    Raises:
        CheckpointError: the checkpoint has no vision half.
    """
    digest = blake3(f"forebay vision tower 1 {_vision_half(source)}".encode())
    for name in sorted(vision_tensors(source.config)):
        tensor = source.tensor(name).flatten()
        raw = tensor.view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tensor.numel()}".encode())
        digest.update(raw[:SAMPLE_BYTES].cpu().numpy().tobytes())
        digest.update(raw[max(SAMPLE_BYTES, raw.numel() - SAMPLE_BYTES) :].cpu().numpy().tobytes())
    return digest.hexdigest()


def image_digest(pixels_digest: bytes, plan: ImagePlan, tower_identity: str) -> bytes:
    """32 bytes that name a span: pixels, how they were cut, and the tower (spec §12). Part of the prefix key, name of a shared span.

    pixels_digest: of the decoded RGB pixels and their size.
    """
    places = (*plan.canvas, *plan.patches, *plan.grid, *plan.picture, *plan.paste)
    digest = blake3(b"forebay image 1")
    for part in (pixels_digest, struct.pack(f"<{len(places)}Q", *places), tower_identity.encode()):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()
