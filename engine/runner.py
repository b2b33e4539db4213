"""Runs rows on the network: one flat batch in, logits of the rows that asked for them out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from forebay.cache.blocks import BlockPool
from forebay.cache.windows import WindowPool
from forebay.engine.batcher import Row
from forebay.engine.sequence import SavedWindow, Sequence
from forebay.model.batch import ForwardBatch, ImageRows, Span, WindowCapture
from forebay.model.memory import CacheMemory, Memory
from forebay.model.network import Backbone


class Runner:
    """The network and the memory it works on.

    Attributes:
        kernels: whether the network runs as GPU kernels, which know one memory, instead of torch operations.
    """

    kernels = False

    def __init__(self, backbone: Backbone, blocks: BlockPool, windows: WindowPool) -> None:
        self.backbone, self.blocks, self.windows = backbone, blocks, windows
        self.layout = blocks.layout
        self.device = backbone.device
        self.memory: Memory = CacheMemory(
            block_tokens=self.layout.block_tokens,
            sources=blocks.views,
            window_codes=windows.codes,
            window_scales=windows.scales,
            pending=windows.pending,
            pending_index=windows.pending_index,
            blocks=blocks.data,
            windows=windows.data,
        )

    def run(
        self, rows: SequenceOf[Row], record: dict[str, list[Tensor]] | None = None, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One step.

        tokens: [rows] int64 on the device, the ids of rows of one position each, where the host does not know them yet.

        Returns:
            logits [n, vocab] fp32 of the last position of every row that wants them, in row order; and per row the final hidden states
            of all its positions [stop - start, D] bf16 where its sequence scores its prompt, else None: their logits are many, so
            whoever needs them asks `logits` for a few at a time.
        """
        batch = self.batch(rows, record, tokens)
        streams = self.backbone.encode(batch)
        chosen = batch.decoder_rows()
        scored: list[Tensor | None] = [None] * len(rows)
        if chosen is None:
            return torch.empty((0, self.backbone.config.vocab_size)), scored
        hidden = self.backbone.decode(streams, chosen)
        last: list[int] = []
        place = 0
        for i, row in enumerate(rows):
            count = row.decoder_rows
            if row.wants_logits:
                last.append(place + count - 1)
            if count and row.sequence.scores_prompt and row.start < row.sequence.prompt_tokens:
                scored[i] = hidden[place : place + count]
            place += count
        return self.backbone.logits(self.pick(hidden, last)), scored

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [n, D] bf16 -> [n, vocab] fp32."""
        return self.backbone.logits(hidden)

    def pick(self, rows: Tensor, places: SequenceOf[int]) -> Tensor:
        """rows[places] without waiting for the device. rows: [n, ...]."""
        index = torch.tensor(places, dtype=torch.int64)
        return rows.index_select(0, index if rows.device.type == "cpu" else index.pin_memory().to(rows.device, non_blocking=True))

    def batch(self, rows: SequenceOf[Row], record: dict[str, list[Tensor]] | None = None, tokens: Tensor | None = None) -> ForwardBatch:
        """Flatten rows into what the network takes; `tokens` as in `run`."""
        depth = self.backbone.config.engram_max_ngram_size - 1
        ids: list[np.ndarray] = []
        for row in rows:
            first = max(0, row.start - depth)
            line = [-1] * (depth - (row.start - first)) + row.sequence.text(first, row.stop)
            line += [0] * (depth + row.stop - row.start - len(line))  # of `tokens`
            ids.append(np.lib.stride_tricks.sliding_window_view(np.asarray(line, dtype=np.int64), depth + 1)[:, ::-1])
        window = torch.from_numpy(np.concatenate(ids))
        spans = [self.span(row) for row in rows]
        mask, images = self.seen(rows)
        return self.backbone.Batch(
            token_ids=window[:, 0].clamp_min(0).to(self.device) if tokens is None else tokens,
            lookback=window[:, 1:].contiguous().to(self.device),
            spans=spans,
            memory=self.memory,
            window=self.layout.window,
            image_mask=mask,
            record=record,
            images=images,
        )

    def seen(self, rows: SequenceOf[Row]) -> tuple[Tensor | None, list[ImageRows]]:
        """Which positions of the rows are images', as a mask [positions] on the device, None if none is; and what is seen there."""
        found: list[ImageRows] = []
        mask: Tensor | None = None
        offset, total = 0, sum(row.stop - row.start for row in rows)
        for row in rows:
            prompt = row.start < row.sequence.prompt_tokens
            for first, last, embeddings in row.sequence.images_in(row.start, row.stop) if prompt else ():
                assert embeddings is not None
                place = offset + first - row.start
                if mask is None:
                    mask = torch.zeros(total, dtype=torch.bool)
                mask[place : place + last - first] = True
                found.append(ImageRows(place, embeddings.to(self.device, non_blocking=True)))
            offset += row.stop - row.start
        return None if mask is None else mask.to(self.device), found

    def span(self, row: Row) -> Span:
        """What the network is told of a row's sequence."""
        return Span(
            start=row.start,
            stop=row.stop,
            write_from=row.write_from,
            window_from=row.window_from,
            decoder_from=row.decoder_from,
            decoder_window_from=row.decoder_window_from,
            tie_tokens=row.sequence.tie_tokens,
            slot=row.sequence.cache.slot,
            blocks=row.sequence.cache.table,
            captures=self._captures(row),
        )

    def _captures(self, row: Row) -> list[WindowCapture]:
        """Copies of the row's window at the boundaries it passes where its sequence wants one; `Sequence.copies` has them from now on."""
        sequence, dim = row.sequence, self.backbone.config.head_dim
        found = []
        for boundary in sequence.copy_at:
            if row.start < boundary <= row.stop:
                data = sequence.copies[boundary] = self.windows.copy(sequence.cache.slot)
                whole = row.decoder_from <= boundary - self.layout.window
                found.append(WindowCapture(boundary, data[..., :dim], data[..., dim:], whole))
        return found

    def save(self, sequence: Sequence, contents: tuple[int, ...]) -> None:
        """Copy to host what a preempted sequence would lose with its slot and its unfinished block; `contents` is what it leaves cached."""
        slot, table, plan = sequence.cache.slot, sequence.cache.table, sequence.cache.plan
        assert plan is not None
        full, rest = divmod(sequence.computed, self.layout.block_tokens)
        sequence.saved = SavedWindow(
            codes=self.windows.codes[slot].to("cpu", copy=True),
            scales=self.windows.scales[slot].to("cpu", copy=True),
            pending=self.windows.pending[slot].to("cpu", copy=True),
            block=self.blocks.data[table[full]].to("cpu", copy=True) if rest else None,
            computed=sequence.computed,
            contents=contents,
            plan=plan,
        )

    def restore(self, sequence: Sequence) -> None:
        """Put a saved window and block into the memory the sequence owns now."""
        saved, slot = sequence.saved, sequence.cache.slot
        assert saved is not None
        self.windows.codes[slot].copy_(saved.codes)
        self.windows.scales[slot].copy_(saved.scales)
        self.windows.pending[slot].copy_(saved.pending)
        if saved.block is not None:
            self.blocks.data[sequence.cache.table[saved.computed // self.layout.block_tokens]].copy_(saved.block)
