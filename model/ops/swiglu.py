"""Clamped SwiGLU between the two expert linears (spec/model.md §8)."""

from __future__ import annotations

from torch import Tensor

from forebay.model.ops.elementwise import silu


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, ±limit) * weight, fp32, rounded once.

    The routing weight is applied here, before the second linear quantises its input.

    Args: gate, up [n, inter] bf16; limit, 0 for no clamp; weight [n] fp32 or None. Returns [n, inter] bf16.
    """
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = silu(gate) * up
    if weight is not None:
        h = weight.unsqueeze(-1) * h
    return h.bfloat16()
