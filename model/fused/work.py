"""Buffers that kernels meet in, made once, and plain products."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.config import ModelConfig
from forebay.model.ops.kernels.moe_ops import Meeting
from forebay.model.ops.kernels.streams_ops import StreamStep

MEETING_FLOATS = 16 << 20  # partial sums: the most that a product of few rows, or the router over a chunk of a prompt, splits into


class Work:
    """Serves one CUDA stream at a time. What a captured graph points to is never freed."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.meeting = Meeting(MEETING_FLOATS if device.type == "cuda" else 1 << 20, 1 << 16, device)
        self._steps: dict[int, StreamStep] = {}

    def stream_step(self, rows: int) -> StreamStep:
        """The mHC step for so many rows; of few sizes, each kept."""
        size = 64
        while size < rows:
            size *= 2
        if size not in self._steps:
            c = self.config
            self._steps[size] = StreamStep(size, c.hc_mult, c.hidden_size, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters, self.device)
        return self._steps[size]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] bf16 times weight [out, in] bf16, fp32 sums -> [n, out] fp32."""
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return torch.mm(x.float(), weight.float().T)
