"""What one forward pass covers: rows of several sequences, flattened, with the cache memory they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.model.memory import Memory
from forebay.model.ops.rope import Turn, turn_at

Numbers = NDArray[np.int64]


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
        lengths: rows per span. starts / stops / offsets: first position, end and first row of each. slots [spans] int64.
        window_index [n, window] int64: into the concatenation of all spans' rings, this batch's own rows, and one row that stands for no
            key; window_valid [n, window].
        keep: rows whose window KV outlives the step, None for all of them; keep_slots, keep_places: their slot and row in its ring.
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
        starts, stops, floors = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        lengths = stops - starts
        offsets = lengths.cumsum() - lengths
        self.lengths, self.offsets = lengths.tolist(), offsets.tolist()
        self.starts, self.stops, self.slots = starts.tolist(), stops.tolist(), slots
        sequence, positions = host_rows(self)
        self.positions, self.sequence = _on(device, positions), _on(device, sequence)
        keys = np.maximum(floors[sequence], positions - window + 1)[:, None] + np.arange(window)
        valid = keys <= positions[:, None]
        owner, rings = sequence[:, None], len(spans) * window
        index = np.where(keys < starts[owner], owner * window + keys % window, rings + (offsets - starts)[owner] + keys)
        self.window_index = _on(device, np.where(valid, index, rings + len(positions)))
        self.window_valid = _on(device, valid)
        kept = np.flatnonzero(positions >= (stops - window)[sequence])
        self.keep = _on(device, kept) if len(kept) < len(positions) else None
        self.keep_slots = _on(device, slots.cpu().numpy()[sequence[kept]])
        self.keep_places = _on(device, positions[kept] % window)
        self.captures: list[tuple[Tensor, Tensor, WindowCapture]] = []
        for span, wanted in enumerate(captures):
            for capture in wanted:
                first = max(self.starts[span], capture.boundary - window)
                places = torch.arange(first, capture.boundary)
                self.captures.append(((places - self.starts[span] + self.offsets[span]).to(device), (places % window).to(device), capture))

    @property
    def rows(self) -> int:
        return int(self.positions.numel())


def host_rows(rows: RowSet) -> tuple[Numbers, Numbers]:
    """Span number and position of every row, [n] int64 each, on the host: what they decide needs no answer from a device."""
    starts, offsets = np.array(rows.starts, dtype=np.int64), np.array(rows.offsets, dtype=np.int64)
    sequence = np.repeat(np.arange(len(starts)), rows.lengths)
    return sequence, np.arange(len(sequence)) + (starts - offsets)[sequence]


def _on(device: torch.device, numbers: NDArray[Any]) -> Tensor:
    return torch.from_numpy(numbers).to(device)


@dataclass(frozen=True)
class Groups:
    """The groups of tokens that a half's rows complete, each to become an entry, and the tokens of those that stay open.

    Attributes:
        count: k, the number of groups.
        done: [k] int64, the row that completes each; None when every row completes one.
        entries, sequence: [k] int64, the number of the entry, and of its span.
        members: for each token of a group but the last, its row [k] int64 (0 where an earlier step had it) and which are here, [k] bool;
            None in place of either when none is here, or all are.
        open_rows, open_places: [m] int64, rows of groups that stay open and their place in the group; None when m is 0.
    """

    count: int
    done: Tensor | None
    entries: Tensor
    sequence: Tensor
    members: list[tuple[Tensor | None, Tensor | None]]
    open_rows: Tensor | None
    open_places: Tensor | None

    @classmethod
    def of(cls, rows: RowSet, spans: Sequence[Span], ratio: int) -> Groups:
        """Rows below a span's write floor complete nothing."""
        device = rows.positions.device
        sequence, positions = host_rows(rows)
        floors = np.array([span.write_from // ratio for span in spans], dtype=np.int64)
        starts, stops = np.array(rows.starts, dtype=np.int64), np.array(rows.stops, dtype=np.int64)
        entry = positions // ratio
        done = np.flatnonzero(((positions + 1) % ratio == 0) & (entry >= floors[sequence]))
        members: list[tuple[Tensor | None, Tensor | None]] = []
        for back in range(ratio - 1, 0, -1):
            here = positions[done] - back >= starts[sequence[done]]
            row = _on(device, np.where(here, done - back, 0)) if here.any() else None
            members.append((row, None if here.all() else _on(device, here)))
        left = np.flatnonzero(positions >= (stops // ratio * ratio)[sequence])
        return cls(
            len(done),
            _on(device, done) if len(done) < len(positions) else None,
            _on(device, entry[done]),
            _on(device, sequence[done]),
            members,
            _on(device, left) if len(left) else None,
            _on(device, positions[left] % ratio) if len(left) else None,
        )


@dataclass(frozen=True)
class ImageRows:
    """Consecutive rows of a batch, from row `first` on, that are part of an image: embeddings [k, D] bf16 on the network's device."""

    first: int
    embeddings: Tensor


def embed(table: Tensor, token_ids: Tensor, images: Sequence[ImageRows]) -> Tensor:
    """What enters the network [n, D] bf16: rows `token_ids` [n] of table [vocab, D], replaced where an image is (spec/vision.md §7)."""
    x = table.index_select(0, token_ids).to(torch.bfloat16)
    for image in images:
        x[image.first : image.first + image.embeddings.shape[0]] = image.embeddings
    return x


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
        images: what is seen there; together they cover the rows of the mask.
        record: when given, named intermediate tensors are appended to it (for `LLM.trace` and tests).
    """

    token_ids: Tensor
    lookback: Tensor
    spans: Sequence[Span]
    memory: Memory
    window: int
    image_mask: Tensor | None = None
    record: dict[str, list[Tensor]] | None = None
    images: Sequence[ImageRows] = ()
    tables: Tensor = field(init=False)
    encoder: RowSet = field(init=False)

    def __post_init__(self) -> None:
        device = self.token_ids.device
        longest = max((len(s.blocks) for s in self.spans), default=0)
        tables = np.zeros((len(self.spans), longest), dtype=np.int64)
        for table, span in zip(tables, self.spans, strict=True):
            table[: len(span.blocks)] = span.blocks
        self.tables = _on(device, tables)
        slots = torch.tensor([s.slot for s in self.spans], dtype=torch.int64, device=device)
        ranges = [(s.start, s.stop, s.window_from) for s in self.spans]
        self.encoder = RowSet(ranges, slots, self.window, device, [s.captures for s in self.spans])

    def decoder_rows(self) -> DecoderRows | None:
        """The rows that run the decoder half, or None when no span has any."""
        chosen = [i for i, s in enumerate(self.spans) if s.decoder_from < s.stop]
        if not chosen:
            return None
        if all(self._alike(span) for span in self.spans):
            return DecoderRows(self, self.encoder, None, self.spans, self.tables)
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

    def _alike(self, span: Span) -> bool:
        """Whether both halves run the same rows of a span with the same windows, as for a generated token far enough from its prompt."""
        floor = max(span.window_from, span.decoder_window_from)
        same = span.window_from == span.decoder_window_from or floor <= span.start - self.window + 1
        return same and span.decoder_from <= span.start and all(capture.decoder for capture in span.captures)


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
        candidates: [n, candidate blocks] int64 ascending, -1 filled; rows without restriction have `restricted` False (on the host).
        turns: rotations of the rows, by frequency table.
        gathered: (kv source, index source) -> dequantised entries [n, topk, head_dim] fp32, and which of window and entries there are,
            [n, window + topk] bool; kept when small.
        completed: ratio -> the groups that the rows complete.
    """

    rows: RowSet
    spans: Sequence[Span]
    tables: Tensor
    memory: Memory
    record: dict[str, list[Tensor]] | None
    selected: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    restricted: Tensor | None = None
    gathered: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    image_mask: Tensor | None = None
    turns: dict[int, Turn] = field(default_factory=dict)
    completed: dict[int, Groups] = field(default_factory=dict)

    def turn(self, freqs: Tensor) -> Turn:
        """Rotation of every row's position, computed once per frequency table (layers share table objects)."""
        found = self.turns.get(id(freqs))
        if found is None:
            found = self.turns[id(freqs)] = turn_at(self.rows.positions, freqs)
        return found

    def groups(self, ratio: int) -> Groups:
        """Groups that the rows complete, found once per ratio."""
        found = self.completed.get(ratio)
        if found is None:
            found = self.completed[ratio] = Groups.of(self.rows, self.spans, ratio)
        return found

    def note(self, name: str, value: Tensor) -> None:
        if self.record is not None:
            self.record.setdefault(name, []).append(value)
