"""The training stream of the demo: rows of one length made of whole exercises and pieces of text."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from forebay.model.demo.tasks import TASKS
from forebay.model.demo.tasks.filler import tokenizer
from forebay.model.demo.train.corpus import sections
from forebay.model.demo.train.stream import LONG_ROWS, MEDIUM_ROWS, SHORT_ROWS, TEXT, Packed, packed

MIXES = {512: SHORT_ROWS, 2048: MEDIUM_ROWS, 4096: LONG_ROWS}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 5 to 900 tokens, each counting upwards from a start of its own."""
    rng = np.random.default_rng(3)
    parts = []
    for size in rng.integers(5, 900, 60):
        start = int(rng.integers(300, 3000))
        parts += [[0], np.arange(start, start + size), [1]]
    path = tmp_path_factory.mktemp("corpus") / "corpus.bin"
    np.concatenate(parts).astype(np.uint16).tofile(path)
    return path


def rows(corpus: Path, length: int, count: int, seed: int = 1, worker: int = 0) -> list[Packed]:
    return list(islice(packed(seed, MIXES[length], length, corpus=corpus, worker=worker), count))


def items(row: Packed) -> list[list[int]]:
    """The row cut before each begin-of-sentence id."""
    starts = np.flatnonzero(row.tokens == 0)
    assert starts[0] == 0
    return [part.tolist() for part in np.split(row.tokens, starts[1:])]


@pytest.mark.parametrize("length", MIXES)
def test_rows_have_one_length_and_weigh_answers_and_text(corpus: Path, length: int) -> None:
    t = tokenizer()
    for row in rows(corpus, length, 12):
        assert row.tokens.shape == row.weights.shape == (length,) and row.tokens.dtype == np.int32 and row.weights.dtype == np.float32
        assert sum(row.counts.values()) == length
        answered = np.zeros(length, dtype=bool)
        for start, stop in row.answers:
            assert row.tokens[stop - 1] == t.eos_id and (row.tokens[start : stop - 1] != t.eos_id).all()
            assert row.tokens[start - 2] == t.assistant_id and row.tokens[start - 1] in (t.think_start_id, t.think_end_id)
            answered[start:stop] = True
        assert (row.weights[answered] == 1).all()
        position = 0
        for item in items(row):
            weights, chat = row.weights[position : position + len(item)], t.assistant_id in item
            assert weights[0] == 0 and (not chat or (weights[~answered[position : position + len(item)]] == 0).all())
            assert chat or (weights[1:] == 1).all()
            position += len(item)


def test_exercises_are_whole_and_text_is_a_piece_of_a_document(corpus: Path) -> None:
    t = tokenizer()
    for row in rows(corpus, 2048, 12):
        for item in items(row):
            if t.assistant_id in item:
                assert item[-1] == t.eos_id and item.count(t.assistant_id) == item.count(t.eos_id)
            else:
                text = [token for token in item[1:] if token != t.eos_id]
                assert (np.diff(text) == 1).all()


def test_a_stream_is_the_same_every_time_and_another_for_each_worker(corpus: Path) -> None:
    first, again, other, seeded = (rows(corpus, 512, 4, seed, worker) for seed, worker in ((1, 0), (1, 0), (1, 1), (2, 0)))
    for a, b in zip(first, again, strict=True):
        assert (a.tokens == b.tokens).all() and (a.weights == b.weights).all() and a.answers == b.answers
    assert (first[0].tokens != other[0].tokens).any() and (first[0].tokens != seeded[0].tokens).any()


@pytest.mark.parametrize("length", MIXES)
def test_parts_have_their_shares(corpus: Path, length: int) -> None:
    counts: Counter[str] = Counter()
    for row in rows(corpus, length, 150000 // length):
        counts.update(row.counts)
    for part, share in MIXES[length].items():
        assert abs(counts[part] / counts.total() - share) < (0.07 if length == 4096 else 0.03), (part, counts)


def test_long_rows_hold_long_texts_with_many_questions(corpus: Path) -> None:
    t = tokenizer()
    found = 0
    for row in islice(packed(1, LONG_ROWS, 8192, corpus=corpus), 14):
        if any(t.assistant_id in item and len(item) > 6500 and item.count(t.assistant_id) >= 8 for item in items(row)):
            found += 1
            assert sum(stop - start for start, stop in row.answers) >= 500
    assert found >= 5


def test_loss_weights_of_prompts_and_text_can_be_set(corpus: Path) -> None:
    stream = packed(1, {"chat": 1, TEXT: 1}, 512, corpus=corpus, prompt_weight=0.25, text_weight=0.5)
    assert {0.0, 0.25, 0.5, 1.0} == {weight for row in islice(stream, 4) for weight in row.weights.tolist()}


def test_a_mix_with_an_unknown_name_is_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match="poetry"):
        next(packed(1, {"poetry": 1}, 512, corpus=corpus))
    assert all(set(mix) == {TEXT, *TASKS} for mix in MIXES.values())


def test_documentation_loses_its_markup() -> None:
    source = (
        ".. _anchor:\n\nFirst section\n=============\n\n.. index:: x\n\nThe function :func:`os.path.join` and ``None``,\nsee `the page <http://x>`_.\n\n"
        "   >>> f(1)\n   2\n\n" + "More words. " * 20 + "\n\nSecond\n------\n\n" + "Other words. " * 20
    )
    first, second = sections(source)
    assert first.startswith("First section\n\nThe function os.path.join and `None`, see the page.\n\n>>> f(1)\n2\n\nMore words.")
    assert second.startswith("Second\n\nOther words.")
