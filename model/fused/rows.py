"""What a fused forward pass covers: the rows of one half as device tensors, sent in one copy, and how the indexer scans for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.model.batch import ImageRows, Span, WindowCapture
from forebay.model.memory import CacheMemory
from forebay.model.ops.kernels.index_ops import Tiles
from forebay.model.ops.kernels.store_ops import Step

SCORE_BYTES = 256 << 20  # of one tile of index scores
SCAN_ROWS = 16  # rows of a sequence that share the reading of its index keys
# Kernels are compiled for sizes that are multiples of 16 and for others; these are rounded up, so that a prompt's length chooses neither.
COLUMNS, BLOCKS = 128, 16

Ints = NDArray[np.int64]
Range = tuple[int, int, int]  # first position, end, and window floor of a sequence in a half


class Scan(NamedTuple):
    """Rows [first, last) of the batch, whose scores are held at once: columns of them, and the runs that share a reading of the keys."""

    first: int
    last: int
    columns: int
    tiles: Tiles


@dataclass(frozen=True)
class HalfRows:
    """Rows of one half of the network on the device.

    Attributes:
        step: positions, spans and block tables; `floor` is that of this half.
        turns: (is the layer without entries, ratio) -> rotations [n, 2, pairs] fp32, filled by the network.
        visible: ratio -> [n] int32, entries that a row may choose from.
        acting: ratio -> [m] int32, rows that the compressor has something to do for.
        scans: ratio -> how the rows of a full scan are laid out. lone: ratio -> the same for candidates, each row by itself.
        captures: rows to copy, their places in the window, and where to.
    """

    step: Step
    visible: dict[int, Tensor]
    acting: dict[int, Tensor]
    scans: dict[int, list[Scan]]
    lone: dict[int, list[Scan]]
    captures: list[tuple[Tensor, Tensor, WindowCapture]] = field(default_factory=list)
    turns: dict[tuple[bool, int], Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.step.position.numel()

    @classmethod
    def build(
        cls,
        ranges: Sequence[Range],
        spans: Sequence[Span],
        window: int,
        ratios: Sequence[int],
        device: torch.device,
        captures: Sequence[Sequence[WindowCapture]],
        candidates: int,
    ) -> HalfRows:
        """ranges, spans and captures: of each sequence. ratios: of the layers with entries. candidates: entries in a row's candidates."""
        starts, stops, floors = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
        lengths = stops - starts
        offsets = lengths.cumsum() - lengths
        span = np.repeat(np.arange(len(ranges)), lengths)
        position = np.arange(len(span)) + (starts - offsets)[span]
        write_from = np.array([s.write_from for s in spans], dtype=np.int64)
        slots = np.array([s.slot for s in spans], dtype=np.int64)
        longest = max((len(s.blocks) for s in spans), default=0)
        table = np.zeros((len(spans), _up(max(1, longest), BLOCKS)), dtype=np.int64)
        for line, s in zip(table, spans, strict=True):
            line[: len(s.blocks)] = s.blocks
        parcel = Parcel()
        names = [parcel.add(x) for x in (span, starts, stops, offsets, slots, np.maximum(floors, 0), write_from, table)]
        visible, acting, scans, lone = {}, {}, {}, {}
        for ratio in ratios:
            seen = (position + 1) // ratio
            visible[ratio] = parcel.add(seen)
            acting[ratio] = parcel.add(_acting(position, starts[span], stops[span], ratio, write_from[span]))
            scans[ratio] = [
                (first, last, score_columns(columns), parcel.add(runs), parcel.add(counts), int(counts.max()))
                for first, last, columns, runs, counts in _scans(seen, span)
            ]
            width = np.full_like(seen, candidates)
            lone[ratio] = [(*piece[:3], parcel.add(piece[3]), parcel.add(piece[4])) for piece in _scans(width, np.arange(len(span)))]
        taken = []
        for number, wanted in enumerate(captures):
            for capture in wanted:
                places = np.arange(max(int(starts[number]), capture.boundary - window), capture.boundary)
                taken.append((parcel.add(places - starts[number] + offsets[number]), parcel.add(places % window), capture))
        sent = parcel.send(device)
        spans_on, start, stop, offset, slot, floor, write, tables = (sent[i] for i in names)
        where = torch.from_numpy(position)
        step = Step(_send(where, device), spans_on, start, stop, offset, slot, floor, write, tables)
        return cls(
            step,
            {ratio: sent[i] for ratio, i in visible.items()},
            {ratio: sent[i] for ratio, i in acting.items()},
            {ratio: [Scan(*p[:3], Tiles(sent[p[3]], sent[p[4]], p[5])) for p in pieces] for ratio, pieces in scans.items()},
            {ratio: [Scan(*p[:3], Tiles(sent[p[3]], sent[p[4]], 1)) for p in pieces] for ratio, pieces in lone.items()},
            [(sent[a].long(), sent[b].long(), capture) for a, b, capture in taken],
        )


class Parcel:
    """Integer arrays that travel to the device together, as int32."""

    def __init__(self) -> None:
        self.parts: list[Ints] = []

    def add(self, numbers: Ints) -> int:
        """Take an array along; returns its number."""
        self.parts.append(np.asarray(numbers))
        return len(self.parts) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        """All arrays on the device, in one copy. Each begins at a multiple of 16 bytes."""
        sizes = [-(-part.size // 4) * 4 for part in self.parts]
        whole = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        flat, at = whole.numpy(), 0
        for part, size in zip(self.parts, sizes, strict=True):
            flat[at : at + part.size] = part.reshape(-1)
            at += size
        there = whole.to(device, non_blocking=True)
        pieces = there.split(sizes)
        return [piece[: part.size].view(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]


def _up(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit


def score_columns(entries: int) -> int:
    """Columns for the scores of so many entries: an eighth of a power of two at a time, so that kernels are compiled for few of them."""
    return _up(entries, max(COLUMNS, (1 << max(0, entries - 1).bit_length()) // 8))


def _send(numbers: Tensor, device: torch.device) -> Tensor:
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _acting(position: Ints, start: Ints, stop: Ints, ratio: int, write_from: Ints) -> Ints:
    """`store_ops.acting_rows` on the host."""
    last = stop - 1
    done = (position % ratio == ratio - 1) & (position // ratio >= write_from // ratio)
    if ratio > 1:
        done |= (position == np.where(start % 2 == 1, start, last)) & (last % 2 == 0)
    return np.flatnonzero(done)


def _scans(seen: Ints, span: Ints) -> list[tuple[int, int, int, Ints, Ints]]:
    """Pieces of consecutive rows whose scores fit in `SCORE_BYTES`: first, last, columns, and the first row and length of each run.

    A run has up to `SCAN_ROWS` rows of one span; its rows are numbered within the piece. Rows of a span see more and more entries.
    """
    pieces, count = [], len(seen)
    step = max(1, SCORE_BYTES // (2 * max(1, score_columns(int(seen.max(initial=0))))))
    for first in range(0, count, step):
        last = min(count, first + step)
        inside = span[first:last]
        begins = np.flatnonzero(np.r_[True, inside[1:] != inside[:-1]])
        ends = np.r_[begins[1:], last - first]
        runs = -(-(ends - begins) // SCAN_ROWS)
        within = np.arange(runs.sum()) - np.repeat(runs.cumsum() - runs, runs)
        starts = np.repeat(begins, runs) + within * SCAN_ROWS
        stops = np.minimum(starts + SCAN_ROWS, np.repeat(ends, runs))
        pieces.append((first, last, int(seen[first:last].max()), starts, stops - starts))
    return pieces


@dataclass
class FusedBatch:
    """Input of `FusedBackbone.encode`; fields as of `ForwardBatch`, whose tensors for each half are made as `HalfRows` instead."""

    token_ids: Tensor
    lookback: Tensor
    spans: Sequence[Span]
    memory: CacheMemory
    window: int
    image_mask: Tensor | None = None
    record: dict[str, list[Tensor]] | None = None
    images: Sequence[ImageRows] = ()

    def decoder_rows(self) -> FusedDecoderRows | None:
        """The rows that run the decoder half, or None when no span has any."""
        chosen = [i for i, s in enumerate(self.spans) if s.decoder_from < s.stop]
        if not chosen:
            return None
        spans = [self.spans[i] for i in chosen]
        ranges = [(max(s.start, s.decoder_from), s.stop, s.decoder_window_from) for s in spans]
        parts, offset = [], 0
        for s in self.spans:
            if s.decoder_from < s.stop:
                parts.append(np.arange(offset + max(s.start, s.decoder_from) - s.start, offset + s.stop - s.start))
            offset += s.stop - s.start
        index = np.concatenate(parts)
        device = self.token_ids.device
        return FusedDecoderRows(self, ranges, spans, None if len(index) == offset else _send(torch.from_numpy(index), device))


@dataclass
class FusedDecoderRows:
    """Input of `FusedBackbone.decode`: a subset of a batch's rows. `index` [n] into the batch's rows, None for all of them."""

    batch: FusedBatch
    ranges: list[Range]
    spans: list[Span]
    index: Tensor | None
