"""Training batches for the product's network: equal-length sequences from position 0, and the decoder rows a loss needs.

A batch is what `ForwardBatch` is, with index tables that suit whole sequences: no rings, no blocks (a sequence is one block of its length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forebay.model.batch import DecoderRows, ForwardBatch, RowSet, Span
from forebay.model.memory import Memory


class TrainRows(RowSet):
    """Rows of whole sequences or parts of them, without the gather tables of the served memory.

    Attributes:
        near_start, near_count [n] int32: the rows a row's window covers are near_start … near_start + near_count - 1 of this row set.
        flat: [n] int64, the row of the batch each of these is; None when they are all of them, of equally long sequences.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], window: int, device: torch.device, flat: Tensor | None = None) -> None:
        """spans: (start, stop, window floor) of each."""
        starts, stops, floors = (np.array([span[i] for span in spans], dtype=np.int64) for i in range(3))
        lengths = stops - starts
        offsets = lengths.cumsum() - lengths
        sequence = np.repeat(np.arange(len(spans)), lengths)
        positions = np.arange(len(sequence)) - offsets[sequence] + starts[sequence]
        low = np.maximum(np.maximum(floors[sequence], positions - window + 1), starts[sequence])
        self.lengths, self.starts, self.stops, self.offsets = lengths.tolist(), starts.tolist(), stops.tolist(), offsets.tolist()
        self.positions = torch.from_numpy(positions).to(device)
        self.sequence = torch.from_numpy(sequence).to(device)
        self.near_start = torch.from_numpy((offsets[sequence] + low - starts[sequence]).astype(np.int32)).to(device)
        self.near_count = torch.from_numpy((positions - low + 1).astype(np.int32)).to(device)
        self.slots = torch.zeros(len(spans), dtype=torch.int64, device=device)
        self.flat = flat


@dataclass
class TrainBatch(ForwardBatch):
    """Sequences [B, L], flattened. `rows`: their row set, made once per shape."""

    rows: TrainRows | None = None

    def __post_init__(self) -> None:
        assert self.rows is not None
        self.encoder = self.rows
        self.tables = torch.arange(len(self.spans), device=self.token_ids.device).unsqueeze(1)


@dataclass(frozen=True)
class Shape:
    """Sequences and tokens of each, with what all batches of this shape share."""

    sequences: int
    length: int
    spans: list[Span]
    rows: TrainRows

    @classmethod
    def make(cls, sequences: int, length: int, window: int, device: torch.device) -> Shape:
        spans = [Span(0, length, 0, 0, 0, 0, None, 0, ()) for _ in range(sequences)]
        return cls(sequences, length, spans, TrainRows([(0, length, 0)] * sequences, window, device))

    def batch(self, tokens: Tensor, memory: Memory, window: int, depth: int) -> TrainBatch:
        """tokens [B, L] int64 on the device; depth: how many earlier tokens an n-gram may reach."""
        earlier = []
        for back in range(1, depth + 1):
            shifted = torch.full_like(tokens, -1)
            shifted[:, back:] = tokens[:, :-back]
            earlier.append(shifted.flatten())
        return TrainBatch(tokens.flatten(), torch.stack(earlier, 1), self.spans, memory, window, rows=self.rows)


def answer_rows(batch: TrainBatch, answers: Sequence[Sequence[tuple[int, int]]], window: int) -> DecoderRows:
    """Decoder rows as in serving with bounded decoder replay: for each answer [start, stop) of each sequence, the last window before it
    and the answer, and a window floor where they begin (spec §12.2). A row may occur in two of them.
    """
    assert batch.rows is not None
    device = batch.token_ids.device
    ranges, owners, index = [], [], []
    for number, spans in enumerate(answers):
        for start, stop in spans:
            first = max(0, start - window)
            ranges.append((first, stop, first))
            owners.append(number)
            index.append(np.arange(first, stop) + batch.rows.offsets[number])
    flat = torch.from_numpy(np.concatenate(index)).to(device)
    rows = TrainRows(ranges, window, device, flat)
    described = [Span(first, stop, stop, first, first, first, None, 0, ()) for first, stop, _ in ranges]
    tables = torch.tensor(owners, dtype=torch.int64, device=device).unsqueeze(1)
    return DecoderRows(batch, rows, flat, described, tables)


def all_rows(batch: TrainBatch) -> DecoderRows:
    """Every row runs the decoder half (exact prefill)."""
    return DecoderRows(batch, batch.encoder, None, batch.spans, batch.tables)
