"""Where KV lives during a forward pass, and everything that reads or writes it there (spec/model.md §3.5, §5, §6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.gather import entry_places, gather_index, gather_main
from forebay.model.ops.sparse_attention import sparse_attention

if TYPE_CHECKING:
    from forebay.model.batch import HalfState
    from forebay.model.config import LayerPlan
    from forebay.model.indexer import Indexer
    from forebay.model.ops.rope import Turn

ATTEND_BYTES = 64 << 20  # fp32 working memory for the keys of one tile of rows


@dataclass(frozen=True)
class Window:
    """Window keys of one layer's rows. `keys` [m, dim]: what the batch may read; `rows`: its own rows, as they will be kept."""

    keys: Tensor
    rows: tuple[Tensor, ...]


class Memory(Protocol):
    """What layers ask of the memory their KV lives in. The served one is `CacheMemory`; training has a differentiable one.

    `state` says which rows are meant: their spans, positions and block tables.
    """

    def window(self, layer: int, kv: Tensor, state: HalfState) -> Window:
        """Quantise the rows' window KV, [n, dim] bf16, and lay out all rows the batch may read."""

    def keep_window(self, layer: int, window: Window, state: HalfState) -> None:
        """Store what later steps read. After the attention: a long chunk overwrites rows its own first tokens needed."""

    def store_entries(self, plan: LayerPlan, main: Tensor, key: Tensor, sequence: Tensor, entries: Tensor, state: HalfState) -> None:
        """Quantise and store entries [k] int64 of spans `sequence` [k] int64: main [k, dim] and index key [k, index dim], bf16."""

    def open_group(self, layer: int, slots: Tensor, place: int) -> Tensor:
        """Compressor k and gate of a token whose group an earlier step left open: [k, 2, dim] fp32, for window slots [k]."""

    def keep_group(self, layer: int, slots: Tensor, places: Tensor, values: Tensor) -> None:
        """Remember the tokens of groups that stay open, [k, 2, dim] fp32."""

    def choose(self, indexer: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        """Which entries each row attends to: arguments and result of `Indexer.select`."""

    def attend(self, q: Tensor, window: Window, plan: LayerPlan, sink: Tensor, scale: float, state: HalfState) -> Tensor:
        """Attention of q [n, heads, dim] bf16 over window and chosen entries -> [n, heads, dim] bf16."""


class StoredMemory(Memory, Protocol):
    """A memory whose index keys can be looked up, which is what `Indexer.select` needs."""

    def index_keys(self, source: int, ratio: int, sequence: Tensor, entries: Tensor, state: HalfState) -> Tensor:
        """Index keys of entries [n, m] (-1: zeros) of spans [n], as stored: [n, m, index dim] fp32."""


class SourceMemory(Protocol):
    """Paged entries of one source; four planes, each [blocks, entries per block, row bytes] uint8 (cache/layout.py)."""

    @property
    def main_codes(self) -> Tensor: ...
    @property
    def main_scales(self) -> Tensor: ...
    @property
    def index_codes(self) -> Tensor: ...
    @property
    def index_scales(self) -> Tensor: ...


@dataclass(frozen=True)
class CacheMemory:
    """The served memory: paged FP4 entries and FP8 window rings on the device; nothing here is copied.

    Attributes:
        block_tokens: tokens per block.
        sources: layer -> planes of its entries.
        window_codes: [slots, layers, window, head_dim] uint8 (E4M3), a ring: position p lies in row p % window.
        window_scales: [slots, layers, window, head_dim/32] uint8 (E8M0).
        pending: [slots, gated sources, ratio - 1, 2, head_dim] fp32: compressor k and gate of the open group's tokens.
        pending_index: layer -> its place in `pending`.
        blocks: [blocks, block bytes] uint8, what the planes of `sources` are views of; windows: [slots, layers, window, row bytes] uint8,
            what the window's codes and scales are views of. Kernels that find their own way in a block or a row take these.
    """

    block_tokens: int
    sources: Mapping[int, SourceMemory]
    window_codes: Tensor
    window_scales: Tensor
    pending: Tensor
    pending_index: Mapping[int, int]
    blocks: Tensor | None = field(default=None, kw_only=True)
    windows: Tensor | None = field(default=None, kw_only=True)

    def window(self, layer: int, kv: Tensor, state: HalfState) -> Window:
        """`keys` [spans * window + n + 1, dim] fp32: the rings, the fresh rows, and a row of zeros."""
        codes, scales = formats.fp8_encode(kv)
        planes = []
        for kept, fresh in ((self.window_codes, codes), (self.window_scales, scales)):
            rings = kept.select(1, layer).index_select(0, state.rows.slots).flatten(0, 1)
            planes.append(torch.cat((rings, fresh, fresh.new_zeros((1, fresh.shape[1])))))
        return Window(formats.fp8_decode(planes[0], planes[1]), (codes, scales))

    def keep_window(self, layer: int, window: Window, state: HalfState) -> None:
        rows, (codes, scales) = state.rows, window.rows
        if rows.keep is None:
            kept_codes, kept_scales = codes, scales
        else:
            kept_codes, kept_scales = codes.index_select(0, rows.keep), scales.index_select(0, rows.keep)
        self.window_codes.select(1, layer).index_put_((rows.keep_slots, rows.keep_places), kept_codes)
        self.window_scales.select(1, layer).index_put_((rows.keep_slots, rows.keep_places), kept_scales)
        for index, place, capture in rows.captures:
            capture.codes[layer, place] = codes.index_select(0, index)
            capture.scales[layer, place] = scales.index_select(0, index)

    def store_entries(self, plan: LayerPlan, main: Tensor, key: Tensor, sequence: Tensor, entries: Tensor, state: HalfState) -> None:
        planes, per_block = self.sources[plan.index], self.block_tokens // plan.ratio
        block, place = state.tables[sequence, entries // per_block], entries % per_block
        planes.main_codes[block, place], planes.main_scales[block, place] = formats.main_encode(main)
        planes.index_codes[block, place], planes.index_scales[block, place] = formats.index_encode(key)

    def open_group(self, layer: int, slots: Tensor, place: int) -> Tensor:
        return self.pending[slots, self.pending_index[layer], place]

    def keep_group(self, layer: int, slots: Tensor, places: Tensor, values: Tensor) -> None:
        self.pending[slots, self.pending_index[layer], places] = values

    def choose(self, indexer: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        return indexer.select(x, latent, turn, state)

    def index_keys(self, source: int, ratio: int, sequence: Tensor, entries: Tensor, state: HalfState) -> Tensor:
        planes = self.sources[source]
        block, place = entry_places(state.tables, sequence, entries, self.block_tokens // ratio)
        return gather_index(planes.index_codes, planes.index_scales, block, place)

    def attend(self, q: Tensor, window: Window, plan: LayerPlan, sink: Tensor, scale: float, state: HalfState) -> Tensor:
        rows, keys = state.rows, window.keys
        selected = state.selected[plan.index_source] if plan.index_source is not None else None
        slots = rows.window_index.shape[1] + (selected.shape[1] if selected is not None else 0)
        step = max(1, ATTEND_BYTES // (4 * slots * q.shape[2]))
        if step >= rows.rows:
            kv, valid = self._near(keys, rows.window_index), rows.window_valid
            if selected is not None:
                entries, valid = self._chosen(plan, selected, state)
                kv = torch.cat((kv, entries), 1)
            return sparse_attention(q, kv, valid, sink, scale)
        outs = []
        for part in [slice(first, first + step) for first in range(0, rows.rows, step)]:
            kv, valid = self._near(keys, rows.window_index[part]), rows.window_valid[part]
            if selected is not None:
                assert plan.kv_source is not None
                chosen = selected[part]
                entries = self.main_entries(plan.kv_source, plan.ratio, rows.sequence[part], chosen, state)
                kv, valid = torch.cat((kv, entries), 1), torch.cat((valid, chosen >= 0), 1)
            outs.append(sparse_attention(q[part], kv, valid, sink, scale))
        return torch.cat(outs)

    def _near(self, keys: Tensor, index: Tensor) -> Tensor:
        """Window keys of rows, [n, window, dim]."""
        return keys.index_select(0, index.view(-1)).view(*index.shape, keys.shape[1])

    def _chosen(self, plan: LayerPlan, selected: Tensor, state: HalfState) -> tuple[Tensor, Tensor]:
        """Chosen entries of all rows, dequantised [n, topk, dim], and which of window and entries there are; kept for Reuse layers."""
        assert plan.kv_source is not None and plan.index_source is not None
        name = (plan.kv_source, plan.index_source)
        if name not in state.gathered:
            entries = self.main_entries(plan.kv_source, plan.ratio, state.rows.sequence, selected, state)
            state.gathered.clear()  # only the latest list is ever read again
            state.gathered[name] = entries, torch.cat((state.rows.window_valid, selected >= 0), 1)
        return state.gathered[name]

    def main_entries(self, source: int, ratio: int, sequence: Tensor, entries: Tensor, state: HalfState) -> Tensor:
        """Entries [n, m] (-1: zeros) of spans [n], as stored: [n, m, head dim] fp32."""
        planes = self.sources[source]
        block, place = entry_places(state.tables, sequence, entries, self.block_tokens // ratio)
        return gather_main(planes.main_codes, planes.main_scales, block, place)
