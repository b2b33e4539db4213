"""One half of a fused forward pass: its rows, the memory it writes, and what its layers share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forebay.model.fused.rows import HalfRows
from forebay.model.memory import CacheMemory
from forebay.model.ops.kernels.store_ops import keep_window, turn_table


class Half:
    """Never kept across forward passes.

    Attributes:
        fresh: [layers of the half, n, row bytes] uint8, the window rows of this batch; layer numbers count from `first`.
        engram: layer -> [n, columns * width] bf16, rows of tables that are not on the device, when they were fetched before the pass.
        selected: index source -> chosen entries [n, topk] int32 ascending, -1 filled. candidates: [n, blocks] int32.
    """

    def __init__(
        self,
        rows: HalfRows,
        memory: CacheMemory,
        layers: int,
        first: int,
        image_mask: Tensor | None,
        record: dict[str, list[Tensor]] | None,
        engram: Mapping[int, Tensor] | None = None,
    ) -> None:
        assert memory.blocks is not None and memory.windows is not None
        self.rows, self.memory, self.first, self.image_mask, self.record = rows, memory, first, image_mask, record
        self.engram = engram or {}
        self.blocks, self.windows = memory.blocks, memory.windows
        shape = (layers, rows.rows, self.windows.shape[-1])
        self.fresh = torch.empty(shape, dtype=torch.uint8, device=self.windows.device)
        self.selected: dict[int, Tensor] = {}
        self.candidates: Tensor | None = None

    def rotate(self, freqs: list[Tensor], ratios: list[int]) -> None:
        """Fill in the rotations: of layers without entries, of layers with entries, and of the first token of each row's group."""
        turns, position = self.rows.turns, self.rows.step.position
        for entries, ratio in ((False, 1), (True, 1), *((True, r) for r in ratios if r > 1)):
            out = torch.empty((position.numel(), 2, freqs[entries].numel()), dtype=torch.float32, device=position.device)
            turn_table(position, freqs[entries], ratio, out)
            turns[entries, ratio] = out

    def keep_windows(self) -> None:
        """Write the window rows of all layers, at the end of a half, when no row's attention reads the older ones any more.

        Where each row is its sequence's only one, its layers have written theirs.
        """
        if not self.rows.step.alone:
            keep_window(self.fresh, self.windows[:, self.first : self.first + self.fresh.shape[0]], self.rows.step)

    def take_captures(self, head_dim: int) -> None:
        """Copy window rows to where snapshots want them."""
        layers = slice(self.first, self.first + self.fresh.shape[0])
        for index, place, capture in self.rows.captures:
            rows = self.fresh.index_select(1, index)
            capture.codes[layers].index_copy_(1, place, rows[..., :head_dim])
            capture.scales[layers].index_copy_(1, place, rows[..., head_dim:])

    def note(self, name: str, value: Tensor) -> None:
        """Keep a copy of an intermediate result, where they are recorded; whole numbers as int64, like those of `Backbone`."""
        if self.record is not None:
            copied = value.to(torch.int64) if value.dtype == torch.int32 else value.clone()
            self.record.setdefault(name, []).append(copied)
