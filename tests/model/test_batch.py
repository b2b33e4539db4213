"""Row sets and the tables the layers share: compared with what the words say, row by row."""

from __future__ import annotations

import random

import pytest
import torch

from forebay.model.batch import ForwardBatch, Groups, RowSet, Span, host_rows
from forebay.model.memory import CacheMemory

WINDOW = 8


def span(start: int, stop: int, *, write_from: int = 0, window_from: int = 0, decoder_from: int = 0, decoder_window_from: int = 0) -> Span:
    return Span(start, stop, write_from, window_from, decoder_from, decoder_window_from, None, 1, (1, 2, 3))


def row_set(spans: list[Span]) -> RowSet:
    ranges = [(s.start, s.stop, s.window_from) for s in spans]
    return RowSet(ranges, torch.arange(len(spans)) + 1, WINDOW, torch.device("cpu"))


def random_spans(numbers: random.Random) -> list[Span]:
    out = []
    for _ in range(numbers.randint(1, 4)):
        start = numbers.randint(0, 30)
        stop = start + numbers.choice([1, 1, 2, 3, 12])
        out.append(span(start, stop, write_from=numbers.randint(0, stop), window_from=numbers.randint(0, start)))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_windows_and_what_is_kept(seed: int) -> None:
    spans = random_spans(random.Random(seed))
    rows = row_set(spans)
    sequence, positions = host_rows(rows)
    assert rows.sequence.tolist() == sequence.tolist()
    assert rows.positions.tolist() == positions.tolist() == [p for s in spans for p in range(s.start, s.stop)]
    first, none = len(spans) * WINDOW, len(spans) * WINDOW + rows.rows
    kept = []
    for row, (number, position) in enumerate(zip(sequence.tolist(), positions.tolist(), strict=True)):
        own = spans[number]
        keys = range(max(own.window_from, position - WINDOW + 1), position + 1)
        at = [number * WINDOW + k % WINDOW if k < own.start else first + rows.offsets[number] + k - own.start for k in keys]
        assert rows.window_index[row].tolist() == at + [none] * (WINDOW - len(at))
        assert rows.window_valid[row].tolist() == [True] * len(at) + [False] * (WINDOW - len(at))
        if position >= own.stop - WINDOW:
            kept.append((row, number + 1, position % WINDOW))
    keep = range(rows.rows) if rows.keep is None else rows.keep.tolist()
    assert list(zip(keep, rows.keep_slots.tolist(), rows.keep_places.tolist(), strict=True)) == kept


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_groups(seed: int, ratio: int) -> None:
    spans = random_spans(random.Random(seed))
    rows = row_set(spans)
    found = Groups.of(rows, spans, ratio)
    sequence, positions = host_rows(rows)
    floors = [s.write_from // ratio for s in spans]
    done = [r for r in range(rows.rows) if (positions[r] + 1) % ratio == 0 and positions[r] // ratio >= floors[sequence[r]]]
    assert found.count == len(done)
    assert (list(range(rows.rows)) if found.done is None else found.done.tolist()) == done
    assert found.entries.tolist() == [int(positions[r]) // ratio for r in done]
    assert found.sequence.tolist() == [int(sequence[r]) for r in done]
    assert len(found.members) == ratio - 1
    for place, (row, here) in enumerate(found.members):
        back = ratio - 1 - place
        inside = [positions[r] - back >= spans[sequence[r]].start for r in done]
        assert (row is None) == (not any(inside))
        assert (here is None) == all(inside)
        if here is not None:
            assert here.tolist() == inside
        if row is not None:
            assert row.tolist() == [r - back if flag else 0 for r, flag in zip(done, inside, strict=True)]
    left = [r for r in range(rows.rows) if positions[r] >= spans[sequence[r]].stop // ratio * ratio]
    assert ([] if found.open_rows is None else found.open_rows.tolist()) == left
    assert ([] if found.open_places is None else found.open_places.tolist()) == [int(positions[r]) % ratio for r in left]


def batch(spans: list[Span]) -> ForwardBatch:
    rows, none = sum(s.stop - s.start for s in spans), torch.empty(0)
    ids, lookback = torch.zeros(rows, dtype=torch.int64), torch.zeros((rows, 3), dtype=torch.int64)
    return ForwardBatch(ids, lookback, spans, CacheMemory(8, {}, none, none, none, {}), WINDOW)


def test_halves_share_a_row_set_where_their_windows_are_the_same() -> None:
    near, far = span(20, 21, decoder_from=15, decoder_window_from=15), span(22, 23, decoder_from=15, decoder_window_from=15)
    prompt, end = span(3, 9), span(0, 9, decoder_from=5)
    cases = (([far], True), ([near], False), ([far, near], False), ([far, far], True), ([prompt], True), ([end], False))
    for spans, shared in cases:
        made = batch(spans)
        chosen = made.decoder_rows()
        assert chosen is not None
        assert (chosen.rows is made.encoder) == shared
        ranges = [(max(s.start, s.decoder_from), s.stop, s.decoder_window_from) for s in spans]
        plain = RowSet(ranges, torch.tensor([s.slot for s in spans]), WINDOW, torch.device("cpu"))
        assert torch.equal(chosen.rows.window_index, plain.window_index)
        assert torch.equal(chosen.rows.window_valid, plain.window_valid)
        assert torch.equal(chosen.rows.positions, plain.positions)
