"""What one forward pass covers: rows of several sequences, flattened, with the cache memory they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.model.memory import Memory
from forebay.model.ops.rope import Turn, turn_at


@dataclass(frozen=True)
class WindowCapture:
    """A copy of a window as it is at `boundary`, a multiple of the window inside or at the end of a span, filled while the span runs.

    Attributes:
        codes, scales: [layers, window, head_dim] and [layers, window, head_dim/32] uint8, in ring order; they hold the span's ring
            as it was before the step, so that rows before the span need not be written.
        decoder: whether the decoder half's rows are wanted too.
    """

    boundary: int
    codes: Tensor
    scales: Tensor
    decoder: bool


@dataclass(frozen=True)
class Span:
    """Consecutive positions [start, stop) of one sequence in a batch.

    Attributes:
        write_from: positions below it are replay and write no global KV (spec §12.1).
        window_from: lowest position that window attention of the encoder half may read.
        decoder_from: positions at or above it run the decoder half.
        decoder_window_from: the same floor for the decoder half (bounded decoder replay).
        tie_tokens: settle score ties as the reference does over a prompt of this many tokens; None for ties to the lower entry.
        slot: window slot. blocks: block table.
        captures: copies of its window to be taken on the way.
    """

    start: int
    stop: int
    write_from: int
    window_from: int
    decoder_from: int
    decoder_window_from: int
    tie_tokens: int | None
    slot: int
    blocks: Sequence[int]
    captures: Sequence[WindowCapture] = ()


class RowSet:
    """Rows of one half of the network, with the index tables every layer of that half shares.

    Attributes:
        positions [n], sequence [n] int64: absolute position and span number of each row.
        lengths: rows per span. starts / stops / slots [spans] int64.
        window_index [n, window] int64: into the concatenation of all spans' rings and this batch's own rows; window_valid [n, window].
        keep, keep_target: rows whose window KV outlives the step, and their row in [slots * window].
        captures: rows to copy, their place in the window, and where to, for each copy that is taken.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int, int]],
        slots: Tensor,
        window: int,
        device: torch.device,
        captures: Sequence[Sequence[WindowCapture]] = (),
    ) -> None:
        """spans: (start, stop, window floor) per sequence; captures: those of each."""
        starts = torch.tensor([s[0] for s in spans], dtype=torch.int64)
        stops = torch.tensor([s[1] for s in spans], dtype=torch.int64)
        floors = torch.tensor([s[2] for s in spans], dtype=torch.int64)
        lengths = stops - starts
        self.lengths = lengths.tolist()
        self.starts, self.stops = starts.tolist(), stops.tolist()
        offsets = lengths.cumsum(0) - lengths
        self.offsets = offsets.tolist()
        sequence = torch.repeat_interleave(torch.arange(len(spans)), lengths)
        positions = torch.arange(sequence.numel()) - offsets[sequence] + starts[sequence]
        low = torch.maximum(floors[sequence], positions - window + 1)
        keys = low.unsqueeze(1) + torch.arange(window)
        valid = keys <= positions.unsqueeze(1)
        seq = sequence.unsqueeze(1)
        from_ring = seq * window + keys % window
        fresh = len(spans) * window + offsets[seq] + keys - starts[seq]
        index = torch.where(keys < starts[seq], from_ring, fresh)
        self.positions = positions.to(device)
        self.sequence = sequence.to(device)
        self.window_index = torch.where(valid, index, 0).to(device)
        self.window_valid = valid.to(device)
        self.slots = slots
        kept = (positions >= stops[sequence] - window).nonzero().flatten()
        self.keep = kept.to(device)
        self.keep_target = (slots.cpu()[sequence[kept]] * window + positions[kept] % window).to(device)
        self.captures: list[tuple[Tensor, Tensor, WindowCapture]] = []
        for span, wanted in enumerate(captures):
            for capture in wanted:
                first = max(self.starts[span], capture.boundary - window)
                places = torch.arange(first, capture.boundary)
                self.captures.append(((places - self.starts[span] + self.offsets[span]).to(device), (places % window).to(device), capture))

    @property
    def rows(self) -> int:
        return int(self.positions.numel())


@dataclass
class ForwardBatch:
    """Input of `Backbone.encode`.

    Attributes:
        token_ids: [rows] int64.
        lookback: [rows, max_ngram - 1] int64: the tokens before each row's, nearest first, -1 before the sequence's start and at
            image positions.
        spans: one per sequence, in row order; a sequence appears once.
        memory: where KV lives.
        image_mask: [rows] bool, True at image positions; None for text.
        record: when given, named intermediate tensors are appended to it (for `LLM.trace` and tests).
    """

    token_ids: Tensor
    lookback: Tensor
    spans: Sequence[Span]
    memory: Memory
    window: int
    image_mask: Tensor | None = None
    record: dict[str, list[Tensor]] | None = None
    tables: Tensor = field(init=False)
    encoder: RowSet = field(init=False)

    def __post_init__(self) -> None:
        device = self.token_ids.device
        longest = max((len(s.blocks) for s in self.spans), default=0)
        padded = [list(s.blocks) + [0] * (longest - len(s.blocks)) for s in self.spans]
        self.tables = torch.tensor(padded, dtype=torch.int64, device=device)
        slots = torch.tensor([s.slot for s in self.spans], dtype=torch.int64, device=device)
        ranges = [(s.start, s.stop, s.window_from) for s in self.spans]
        self.encoder = RowSet(ranges, slots, self.window, device, [s.captures for s in self.spans])

    def decoder_rows(self) -> DecoderRows | None:
        """The rows that run the decoder half, or None when no span has any."""
        chosen = [i for i, s in enumerate(self.spans) if s.decoder_from < s.stop]
        if not chosen:
            return None
        device = self.token_ids.device
        parts = []
        for i in chosen:
            span, offset = self.spans[i], self.encoder.offsets[i]
            first = max(span.start, span.decoder_from) - span.start
            parts.append(torch.arange(offset + first, offset + span.stop - span.start))
        spans = [self.spans[i] for i in chosen]
        ranges = [(max(s.start, s.decoder_from), s.stop, s.decoder_window_from) for s in spans]
        slots = torch.tensor([s.slot for s in spans], dtype=torch.int64, device=device)
        rows = RowSet(ranges, slots, self.window, device, [[c for c in s.captures if c.decoder] for s in spans])
        everything = len(chosen) == len(self.spans) and rows.rows == self.encoder.rows
        index = None if everything else torch.cat(parts).to(device)
        tables = self.tables if len(chosen) == len(self.spans) else self.tables[chosen]
        return DecoderRows(self, rows, index, spans, tables)


@dataclass
class DecoderRows:
    """Input of `Backbone.decode`: a subset of a batch's rows. `index` [n] into the batch's rows, None for all of them."""

    batch: ForwardBatch
    rows: RowSet
    index: Tensor | None
    spans: Sequence[Span]
    tables: Tensor


@dataclass
class HalfState:
    """Per-forward state of one half: shared by its layers, never kept across forwards (a list belongs to its row set).

    Attributes:
        selected: index source layer -> chosen entries [n, topk] int64 ascending, -1 filled.
        candidates: [n, candidate blocks] int64 ascending, -1 filled; rows without restriction have `restricted` False.
        turns: rotations of the rows, by frequency table.
        gathered: (kv source, index source) -> dequantised entries [n, topk, head_dim] fp32, kept when small.
    """

    rows: RowSet
    spans: Sequence[Span]
    tables: Tensor
    memory: Memory
    record: dict[str, list[Tensor]] | None
    selected: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    restricted: Tensor | None = None
    gathered: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    image_mask: Tensor | None = None
    turns: dict[int, Turn] = field(default_factory=dict)

    def turn(self, freqs: Tensor) -> Turn:
        """Rotation of every row's position, computed once per frequency table (layers share table objects)."""
        found = self.turns.get(id(freqs))
        if found is None:
            found = self.turns[id(freqs)] = turn_at(self.rows.positions, freqs)
        return found

    def note(self, name: str, value: Tensor) -> None:
        if self.record is not None:
            self.record.setdefault(name, []).append(value)
