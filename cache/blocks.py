"""The HBM block pool: one allocation for all global KV, views per source, and reference counts per block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.cache.layout import KVLayout, SourceLayout
from forebay.cache.side_copies import SideCopies
from forebay.model.errors import ConfigError, ForebayError

NULL_BLOCK = 0  # never allocated: padded block tables point here, and its bytes stay zero unless someone writes through a table


class OutOfBlocks(ForebayError):
    """Fewer blocks are free than were asked for; nothing was allocated."""

    status = 503
    kind = "cache_full"


class CacheBookkeepingError(ForebayError):
    """A reference was dropped or taken that does not exist. Always a bug of the caller, never a state of the cache."""


@dataclass(frozen=True, eq=False)
class SourceViews:
    """Views into `BlockPool.data` of one source; writing to them writes the block. Rows of one plane are contiguous in a block."""

    main_codes: Tensor  # [num_blocks, entries, head_dim/2] u8, two FP4 channels a byte, even channel in the low nibble
    main_scales: Tensor  # [num_blocks, entries, head_dim/16] u8, E4M3
    index_codes: Tensor  # [num_blocks, entries, index_head_dim/2] u8
    index_scales: Tensor  # [num_blocks, entries, index_head_dim/32] u8, E8M0


class BlockPool:
    """Fixed memory for `num_blocks` blocks (the null block included) with reference counts; every operation is O(1) per block.

    Attributes:
        data: [num_blocks, block_bytes] u8, contiguous. A row is a block, byte for byte as every tier stores it.
        views: by source layer.
        copies: how blocks come in from the host, and copies of them go there.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}", param="num_blocks")
        self.layout = layout
        self.data = torch.zeros((num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)
        self.views = {source.layer: _views(self.data, source) for source in layout.sources}
        self.copies = SideCopies(self.data.device)
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # popped from the end: low ids first, last freed first

    @property
    def total(self) -> int:
        """Blocks that can be allocated (without the null block)."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks with one reference each; their bytes are whatever was there.

        Raises:
            OutOfBlocks: fewer than `n` are free; none is taken.
        """
        if n > len(self._free):
            raise OutOfBlocks(f"{n} cache blocks wanted, {len(self._free)} of {self.total} free")
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; all must be allocated."""
        for block in blocks:
            if self._references[block] < 1:
                raise CacheBookkeepingError(f"block {block} is not allocated and cannot be retained")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block; a block without references is free at once."""
        for block in blocks:
            if self._references[block] < 1:
                raise CacheBookkeepingError(f"block {block} is not allocated and cannot be released")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with 0xFF: every scale becomes absurd, so a read of something never written shows in the logits. For tests."""
        self.data[list(blocks)] = 0xFF

    def check(self) -> None:
        """Raise CacheBookkeepingError unless free list and reference counts agree. O(num_blocks), for tests."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise CacheBookkeepingError("a block is twice in the free list")
        if NULL_BLOCK in free or self._references[NULL_BLOCK]:
            raise CacheBookkeepingError("the null block was handed out")
        for block in range(1, len(self._references)):
            if (block in free) != (self._references[block] == 0) or self._references[block] < 0:
                raise CacheBookkeepingError(f"block {block} has {self._references[block]} references and is free: {block in free}")


def _views(data: Tensor, source: SourceLayout) -> SourceViews:
    planes = (source.main_codes, source.main_scales, source.index_codes, source.index_scales)
    return SourceViews(*(data[:, p.offset : p.offset + source.entries * p.row].view(-1, source.entries, p.row) for p in planes))
