"""The window pool: per running sequence, the sliding-window KV of every layer and the compressor's open group.

A window is a ring: position p lives in row p mod `window`. Slots are recycled with whatever they held; nothing below the `window_from`
of a row may be read, so a new owner never sees the last one's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.cache.blocks import CacheBookkeepingError
from forebay.cache.layout import KVLayout
from forebay.model.config import ModelConfig
from forebay.model.errors import ConfigError, ForebayError

NULL_SLOT = 0  # never allocated: padded rows of a batch may write here


class OutOfWindows(ForebayError):
    """Every window slot has an owner; nothing was allocated."""

    status = 503
    kind = "cache_full"


class WindowPool:
    """`slots` windows (the null slot included), one owner each.

    Attributes:
        data: [slots, layers, window, row_bytes] u8, contiguous.
        codes: [slots, layers, window, head_dim] u8 view of `data`, E4M3.
        scales: [slots, layers, window, head_dim/32] u8 view of `data`, E8M0.
        pending: [slots, gated sources, largest ratio - 1, 2, head_dim] fp32: k (0) and g (1) of the tokens of an open group
            (spec/model.md §4); the token at position p is row p mod ratio.
        pending_index: gated source layer -> its place in `pending`.
    """

    def __init__(self, layout: KVLayout, config: ModelConfig, slots: int, device: torch.device | str = "cpu") -> None:
        if slots < 2:
            raise ConfigError(f"slots must be at least 2 (one is the null slot), got {slots}", param="slots")
        if layout != KVLayout.of(config):
            raise ConfigError("the layout was made for another model configuration", param="layout")
        self.layout = layout
        shape = (slots, config.num_hidden_layers, config.sliding_window, layout.window_row_bytes)
        self.data = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.codes = self.data[..., : config.head_dim]
        self.scales = self.data[..., config.head_dim :]
        self.pending_index = {layer: place for place, layer in enumerate(layout.gated)}
        self.pending = torch.zeros((slots, len(layout.gated), layout.open_rows, 2, config.head_dim), dtype=torch.float32, device=device)
        self._free = list(range(slots - 1, NULL_SLOT, -1))
        self._owned = bytearray(slots)

    @property
    def total(self) -> int:
        """Slots that can be allocated (without the null slot)."""
        return len(self._owned) - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a slot; its bytes are whatever was there.

        Raises:
            OutOfWindows: none is free.
        """
        if not self._free:
            raise OutOfWindows(f"all {self.total} window slots are in use")
        slot = self._free.pop()
        self._owned[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        if not self._owned[slot]:
            raise CacheBookkeepingError(f"window slot {slot} is not allocated and cannot be released")
        self._owned[slot] = 0
        self._free.append(slot)

    def copy(self, slot: int) -> Tensor:
        """The window of a slot as it is now, [layers, window, row_bytes] u8 on the same device."""
        return self.data[slot].clone()

    def load(self, slot: int, encoder: Tensor, decoder: Tensor | None = None) -> None:
        """Put back rows kept at a block boundary, where ring order is the order of positions; the decoder layers' only if given.

        encoder: [encoder layers, window, row_bytes] u8. decoder: [decoder layers, window, row_bytes] u8.
        """
        _fill(self.data[slot, : encoder.shape[0]], encoder)
        if decoder is not None:
            _fill(self.data[slot, encoder.shape[0] :], decoder)

    def poison(self, slot: int) -> None:
        """Fill a slot with bytes that decode to infinities, so a read of a row never written shows in the logits. For tests."""
        self.data[slot] = 0xFF
        self.pending[slot] = float("nan")

    def check(self) -> None:
        """Raise CacheBookkeepingError unless free list and ownership agree. O(slots), for tests."""
        free = set(self._free)
        if len(free) != len(self._free) or NULL_SLOT in free or self._owned[NULL_SLOT]:
            raise CacheBookkeepingError("a window slot is twice in the free list, or the null slot was handed out")
        for slot in range(1, len(self._owned)):
            if (slot in free) == bool(self._owned[slot]):
                raise CacheBookkeepingError(f"window slot {slot} is owned: {bool(self._owned[slot])}, and free: {slot in free}")


def _fill(target: Tensor, rows: Tensor) -> None:
    """Copy rows in, on the steps' own stream. A device takes them from pinned memory, so that the host need not wait for its steps."""
    if target.is_cuda and not rows.is_cuda:
        rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)  # kept by torch until it has been read
    target.copy_(rows, non_blocking=True)
