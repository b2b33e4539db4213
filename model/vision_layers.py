"""Parts of the vision tower: linear layers, norm, attention over all patches of an image, MLP, aligner (spec/vision.md §3, §4).

Activations have one dtype throughout, bf16 or fp32; norms, rotation and softmax are computed in fp32 either way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forebay.model.config import VisionConfig
from forebay.model.loading import Loader
from forebay.model.ops.rms_norm import reciprocal_rms
from forebay.model.ops.rope2d import rotate_halves


class Linear:
    """x [n, in] -> [n, out] in x's dtype. The weight stays bf16 as stored; fp32 activations widen it for the one product."""

    def __init__(self, load: Loader, name: str, *, bias: bool) -> None:
        self.weight = load.tensor(f"{name}.weight").flatten(1)  # the patch embedding may be stored as a convolution
        self.bias = load.tensor(f"{name}.bias") if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class Norm:
    """RMSNorm with statistics and product in fp32, rounded once to x's dtype."""

    def __init__(self, load: Loader, name: str, eps: float) -> None:
        self.weight, self.eps = load.tensor(f"{name}.weight").float(), eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * reciprocal_rms(wide, self.eps) * self.weight).to(x.dtype)


class PatchAttention:
    """Every patch attends to every patch of its image; no mask.

    4 L^2 C FLOPs. `scaled_dot_product_attention` runs through tiles of the scores, on CPU and CUDA alike, so memory grows with L only.
    """

    def __init__(self, config: VisionConfig, load: Loader) -> None:
        self.heads, self.dim = config.num_attention_heads, config.head_dim
        self.wqkv, self.wo = Linear(load, "wqkv", bias=True), Linear(load, "wo", bias=True)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [L, C]; cos, sin [L, head_dim/2] fp32 -> [L, C]."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.heads, self.dim))
        turned = rotate_halves(qkv[:, :2], cos, sin).permute(1, 2, 0, 3)
        q, k, v = turned[:1], turned[1:], qkv[:, 2].transpose(0, 1).unsqueeze(0)  # each [1, heads, L, head_dim]
        out = functional.scaled_dot_product_attention(q, k, v)
        return self.wo(out[0].transpose(0, 1).flatten(1))


class PatchMlp:
    """silu(gate) * up without a clamp."""

    def __init__(self, load: Loader) -> None:
        self.w1, self.w2 = Linear(load, "w1", bias=False), Linear(load, "w2", bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(functional.silu(gate) * up)


class Block:
    """Pre-norm attention and MLP. Branches are returned too, for those who compare."""

    def __init__(self, config: VisionConfig, load: Loader) -> None:
        self.norm1, self.norm2 = (Norm(load, name, config.rms_norm_eps) for name in ("norm1", "norm2"))
        self.attn, self.mlp = PatchAttention(config, load.at("attn")), PatchMlp(load.at("mlp"))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [L, C] -> the stream after the block, what attention added, what the MLP added, each [L, C]."""
        attn = self.attn(self.norm1(x), cos, sin)
        x = x + attn
        mlp = self.mlp(self.norm2(x))
        return x + mlp, attn, mlp


def unshuffle(x: Tensor, grid: tuple[int, int], ratio: int) -> Tensor:
    """Gather squares of `ratio` x `ratio` patches into one row each, zeros below and to the right of the last patch.

    Args: x [rows * columns, C], patches of `grid` (rows, columns), row by row.
    Returns: [cells, C * ratio^2], row by row; a cell is flattened by channel, then y, then x.
    """
    rows, columns = grid
    padded = functional.pad(x.view(rows, columns, -1), (0, 0, 0, -columns % ratio, 0, -rows % ratio))
    cells = padded.unflatten(1, (-1, ratio)).unflatten(0, (-1, ratio))  # [cell rows, y, cell columns, x, C]
    return cells.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)


class Aligner:
    """From squares of patches to the width of the language model, with exact (erf) GELU between."""

    def __init__(self, load: Loader) -> None:
        self.w1, self.w2 = Linear(load, "w1", bias=True), Linear(load, "w2", bias=True)

    def __call__(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """cells [n, C * ratio^2] -> rows [n, D], and what went into GELU [n, D]."""
        inner = self.w1(cells)
        return self.w2(functional.gelu(inner)), inner


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32 ones there: on a GPU always, on a CPU with instructions for them."""
    if device.type != "cpu":
        return True
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as rows:
            flags = next((row for row in rows if row.startswith("flags")), "").split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
