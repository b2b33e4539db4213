"""Sigmoid, SiLU and softplus whose result for an element does not depend on where it lies in the tensor.

On CPU torch computes these in vector lanes with a fast exponential and the last few elements, which do not fill the lanes, one by one with
another: the same number can come out an ulp apart when the batch grows. Here every element goes through full lanes, in pieces too
small to be split between threads. (exp, log1p, sqrt, rsqrt and row reductions do not have the defect.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_LANES = 64
_PIECE = 16384  # below the size at which torch splits elementwise work


@cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float32)


def _in_lanes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not x.is_cpu:
        return function(x)
    spare = -x.numel() % _LANES
    if not spare and x.numel() <= _PIECE:
        return function(x.contiguous())
    flat = x.reshape(-1)
    padded = torch.cat((flat, _zeros(spare))) if spare else flat
    if padded.numel() <= _PIECE:
        out = function(padded)
    else:
        out = torch.cat([function(piece) for piece in padded.split(_PIECE)])
    return out[: flat.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), any shape, fp32."""
    return _in_lanes(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), any shape, fp32."""
    return _in_lanes(functional.silu, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), log1p-based, any shape, fp32."""
    return _in_lanes(functional.softplus, x)
