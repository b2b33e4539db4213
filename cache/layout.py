"""Where every byte of the KV cache lives: blocks of global KV, window rows, and the compressor's open group.

A block holds all entries of all sources for `block_tokens` consecutive tokens in one contiguous run, and the same bytes go to every
tier. Inside a source the planes are planar (spec/model.md §6.6): all code rows of the main KV, then all its scale rows, then the index
codes, then the index scales. Sources follow each other in layer order, without padding, so the real model's block is exactly
128 tokens x 890 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.model.config import MAIN_KV_GROUP, QUANT_GROUP, ModelConfig

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Span:
    """One plane of a source inside a block: `offset` of its first row and `row` bytes of every row."""

    offset: int
    row: int


@dataclass(frozen=True)
class SourceLayout:
    """Bytes of one source in a block: `entries` rows in each of four planes (codes: two FP4 channels a byte, even channel low)."""

    layer: int
    ratio: int
    entries: int
    main_codes: Span
    main_scales: Span
    index_codes: Span
    index_scales: Span


@dataclass(frozen=True)
class KVLayout:
    """Sizes in bytes and tokens of everything a sequence keeps; derived from a `ModelConfig`, equal for equal shapes.

    Attributes:
        block_tokens: tokens per block: the window, or the smallest multiple of it that every ratio divides.
        window: rows of one layer's sliding window (spec W).
        layers: layers that own a window; the first `encoder_layers` of them are the encoder half.
        sources: in layer order.
        block_bytes: bytes of one block.
        entry_bytes: bytes of one entry, main KV and index key together.
        window_row_bytes: one window row: `head_dim` FP8 codes, then one E8M0 scale per 32 channels.
        gated: layers of the sources with ratio > 1, whose compressor keeps an open group between steps.
        open_rows: most tokens an open group can hold (largest ratio minus one).
    """

    block_tokens: int
    window: int
    layers: int
    encoder_layers: int
    head_dim: int
    index_head_dim: int
    sources: tuple[SourceLayout, ...]
    block_bytes: int
    entry_bytes: int
    window_row_bytes: int
    gated: tuple[int, ...]
    open_rows: int

    @classmethod
    def of(cls, config: ModelConfig) -> KVLayout:
        ratios = {layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        block_tokens = math.lcm(config.sliding_window, *ratios.values())
        planes = (
            config.head_dim // 2,
            config.head_dim // MAIN_KV_GROUP,
            config.index_head_dim // 2,
            config.index_head_dim // QUANT_GROUP,
        )
        sources = []
        offset = 0
        for layer, ratio in ratios.items():
            entries = block_tokens // ratio
            spans = []
            for row in planes:
                spans.append(Span(offset, row))
                offset += entries * row
            sources.append(SourceLayout(layer, ratio, entries, *spans))
        return cls(
            block_tokens=block_tokens,
            window=config.sliding_window,
            layers=config.num_hidden_layers,
            encoder_layers=config.topology().cut,
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            sources=tuple(sources),
            block_bytes=offset,
            entry_bytes=sum(planes),
            window_row_bytes=config.head_dim + config.head_dim // QUANT_GROUP,
            gated=tuple(layer for layer, ratio in ratios.items() if ratio > 1),
            open_rows=max(ratios.values()) - 1,
        )

    @property
    def bytes_per_token(self) -> int | float:
        """Global KV bytes per token; an int whenever it is a whole number."""
        whole, rest = divmod(self.block_bytes, self.block_tokens)
        return self.block_bytes / self.block_tokens if rest else whole

    @property
    def window_bytes(self) -> int:
        """Window bytes of one sequence, all layers."""
        return self.layers * self.window * self.window_row_bytes

    @property
    def pending_bytes(self) -> int:
        """Compressor state of one sequence: fp32 k and g of each token of an open group, per gated source."""
        return len(self.gated) * self.open_rows * 2 * self.head_dim * 4

    @property
    def identity(self) -> str:
        """Equal exactly when stored bytes mean the same; part of every cache key, so another layout never hits."""
        sources = ",".join(f"{s.layer}/{s.ratio}@{s.main_codes.offset}" for s in self.sources)
        return (
            f"kv{LAYOUT_VERSION} block={self.block_tokens}t/{self.block_bytes}B window={self.window}x{self.layers}"
            f" row={self.window_row_bytes} head={self.head_dim}/{MAIN_KV_GROUP} index={self.index_head_dim}/{QUANT_GROUP} sources={sources}"
        )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, the last one possibly in part."""
        return -(-tokens // self.block_tokens)
