"""Rotary embedding of patches: half of the angles follow the row, half the column; channels are paired half a head apart.

The language model pairs neighbours instead (`ops.rope`). Source: spec/vision.md §3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.ops.rope import inverse_frequencies, rope_table


def patch_positions(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of each patch, [rows * columns, 2] int64, row by row."""
    rows, columns = torch.arange(grid[0], device=device), torch.arange(grid[1], device=device)
    return torch.cartesian_prod(rows, columns)


def patch_angles(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [n, dim/2] fp32: dim/4 angles of the row, then dim/4 of the column.

    Args: positions [n, 2] int64, (row, column); dim, channels of a head.
    """
    freqs = inverse_frequencies(dim // 2, base).to(positions.device)
    row, column = (rope_table(positions[:, axis], freqs) for axis in (0, 1))
    return torch.cat((row[0], column[0]), 1), torch.cat((row[1], column[1]), 1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel j with channel j + dim/2 by angle j of the row's patch.

    Args: x [n, ..., dim] bf16 or fp32; cos, sin [n, dim/2] fp32.
    Returns: x's shape and dtype, rotation in fp32.
    """
    between = (1,) * (x.dim() - 2)
    cos, sin = cos.view(cos.shape[0], *between, -1), sin.view(sin.shape[0], *between, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
