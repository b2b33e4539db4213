"""The training stream: rows of exactly one length, packed from exercises and pieces of the corpus."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forebay.model.demo.tasks import TASKS, Options
from forebay.model.demo.tasks.filler import tokenizer
from forebay.model.demo.tasks.quote import MOST_AT_ONCE as MOST_QUOTED
from forebay.model.demo.tasks.recall import MOST_AT_ONCE as MOST_RECALLED
from forebay.model.demo.tasks.render import Renderer

TEXT = "text"  # the part of a mix that is no task: pieces of the corpus

# Shares of tokens, for rows of about 512, of 2048 to 4096, and of more tokens.
SHORT_ROWS = {
    TEXT: 0.10, "chat": 0.09, "refer": 0.06, "recall": 0.16, "quote": 0.14, "lookup": 0.16, "copy": 0.05, "sort": 0.05, "reverse": 0.02,
    "arithmetic": 0.09, "json": 0.04, "tools": 0.04,
}  # fmt: skip
MEDIUM_ROWS = {
    TEXT: 0.04, "chat": 0.06, "refer": 0.04, "recall": 0.28, "quote": 0.20, "lookup": 0.10, "copy": 0.03, "sort": 0.03, "reverse": 0.01,
    "arithmetic": 0.07, "json": 0.04, "tools": 0.10,
}  # fmt: skip
LONG_ROWS = {
    TEXT: 0.02, "chat": 0.05, "refer": 0.03, "recall": 0.42, "quote": 0.20, "lookup": 0.05, "copy": 0.02, "sort": 0.02, "reverse": 0.01,
    "arithmetic": 0.07, "json": 0.03, "tools": 0.08,
}  # fmt: skip

LEAST_READING = 160  # tokens of the shortest text with questions that is fitted into the rest of a row
SHORT_READING = 400  # tokens that one after the start of a row may have, or a quarter of the row
LONG_READING = 0.8  # share of those at the start of a row that take nearly all of it
ANSWER_TOKENS = 130  # room for the answer to the last question
MOST_QUESTIONS = 40
TALK = 0.5  # share of the tokens that questions, answers and the sentences that are asked for may take
# Tokens of all three for one thing asked, how many may be asked at once, and how many on average where that is drawn anew each time.
READING = {"recall": (30, MOST_RECALLED, 3.5), "quote": (42, MOST_QUOTED, 2.0)}
KEPT_REASONING = 0.3  # share of the multi-turn exercises whose earlier reasoning stays in the prompt
WAITING = 12  # items kept for a later row because they did not fit into this one
TRIES = 4  # items tried before text fills the rest of a row


@dataclass
class Packed:
    """One row.

    Attributes:
        tokens: [length] int32. Every item begins with the begin-of-sentence id.
        weights: [length] float32, the loss weight of predicting tokens[i] from those before it: 1 in answers, and what `packed` was told in
            prompts and text; 0 for the first token of an item.
        answers: ranges of the assistant's outputs, end of sentence included; those of earlier turns too.
        counts: tokens by part of the mix.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    answers: list[tuple[int, int]]
    counts: dict[str, int]


class Corpus:
    """The documents of a `corpus.bin`."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.fromfile(path, dtype=np.uint16)
        bos = tokenizer().bos_id
        assert bos is not None
        self._bos = bos
        self._starts = np.flatnonzero(self._tokens == bos)

    def piece(self, rng: random.Random, size: int) -> list[int]:
        """At most `size` tokens of one document, from its start or from anywhere in it, after a begin-of-sentence id."""
        at = rng.randrange(len(self._tokens))
        i = int(np.searchsorted(self._starts, at, "right"))
        stop = int(self._starts[i]) if i < len(self._starts) else len(self._tokens)
        if rng.random() < 0.5:
            at = int(self._starts[i - 1])
        skip = self._tokens[at] == self._bos
        return [self._bos, *self._tokens[at + skip : min(stop, at + skip + size - 1)].tolist()]


@dataclass
class _Item:
    part: str
    ids: list[int]
    answers: list[tuple[int, int]]


class _Packer:
    def __init__(self, rng: random.Random, mix: Mapping[str, float], length: int, corpus: Corpus, weights: tuple[float, float]) -> None:
        if unknown := set(mix) - {TEXT, *TASKS}:
            raise ValueError(f"the mix names {', '.join(sorted(unknown))}, which is neither a task nor {TEXT}")
        self._rng, self._length, self._corpus = rng, length, corpus
        total = sum(mix.values())
        self._mix = {part: share / total for part, share in mix.items()}
        self._given = dict.fromkeys((TEXT, *mix), 0.0)
        self._prompt_weight, self._text_weight = weights
        self._renderer = Renderer(tokenizer())
        self._waiting: list[_Item] = []

    def row(self) -> Packed:
        ids: list[int] = []
        weights = np.zeros(self._length, dtype=np.float32)
        answers: list[tuple[int, int]] = []
        counts: dict[str, int] = {}
        while (room := self._length - len(ids)) > 0:
            item = self._next(room)
            at, stop = len(ids), len(ids) + len(item.ids)
            ids += item.ids
            weights[at + 1 : stop] = self._text_weight if item.part == TEXT else self._prompt_weight
            for start, end in item.answers:
                weights[at + start : at + end] = 1.0
                answers.append((at + start, at + end))
            counts[item.part] = counts.get(item.part, 0) + len(item.ids)
        return Packed(np.array(ids, dtype=np.int32), weights, answers, counts)

    def _next(self, room: int) -> _Item:
        """An item of at most `room` tokens: one that waits, a new one, or else text."""
        # The starts of many rows are kept for long texts, for which there is no room elsewhere.
        reading = room == self._length and self._rng.random() < sum(self._mix.get(name, 0.0) for name in READING)
        for i, item in enumerate(() if reading else self._waiting):
            if len(item.ids) <= room:
                return self._waiting.pop(i)
        for _ in range(TRIES if room >= 48 else 0):
            item = self._draw(room, reading)
            self._given[item.part] += len(item.ids)  # also if it is too long for any row: its share must not be tried for ever
            if len(item.ids) <= room:
                return item
            if len(item.ids) <= self._length and len(self._waiting) < WAITING:
                self._waiting.append(item)
        ids = self._corpus.piece(self._rng, room)
        self._given[TEXT] += len(ids)
        return _Item(TEXT, ids, [])

    def _draw(self, room: int, reading: bool) -> _Item:
        rng = self._rng
        # The parts that are behind their shares of the tokens come first.
        total = sum(self._given.values()) + self._length
        behind = {part: max(share * total - self._given[part], 0.001) for part, share in self._mix.items()}
        if reading:
            behind = {name: behind[name] for name in READING if name in behind}
        part = rng.choices(list(behind), list(behind.values()))[0]
        if part == TEXT:
            return _Item(TEXT, self._corpus.piece(rng, min(room, rng.randint(64, 1024))), [])
        conversation = TASKS[part](rng, self._options(part, room))
        ids, _ = self._renderer.render(conversation)
        return _Item(part, ids, self._renderer.answers(ids))

    def _options(self, part: str, room: int) -> Options:
        rng = self._rng
        kept = rng.random() < KEPT_REASONING
        if part == "lookup":
            longest = min(1400, max(100, room))
            length = int(math.exp(rng.uniform(4.0, math.log(longest))))
            return Options(length=length, questions=rng.choice((1, 1, 2, 3, 4)), at_once=None, earlier_reasoning=kept)
        if part not in READING:
            return Options(earlier_reasoning=kept)
        most = max(LEAST_READING, room - ANSWER_TOKENS)  # the answer follows the prompt
        long = room == self._length and rng.random() < LONG_READING
        if long:
            length = int(most * rng.uniform(0.9, 0.99))
        else:
            longest = min(most, max(SHORT_READING, self._length // 4))
            length = int(math.exp(rng.uniform(math.log(LEAST_READING), math.log(longest))))
        tokens, at_once, average = READING[part]
        asked = max(1, int(length * TALK / tokens))
        size = None if asked > 30 and rng.random() < 0.6 else rng.randint(1, min(at_once, asked))
        questions = max(1, min(MOST_QUESTIONS, int(asked / (size or average))))
        questions = rng.randint(max(1, int(questions * 0.7)) if long else 1, questions)
        return Options(length=length, questions=questions, at_once=size, earlier_reasoning=kept)


def packed(
    seed: int,
    mix: Mapping[str, float],
    length: int,
    *,
    corpus: Path,
    worker: int = 0,
    prompt_weight: float = 0.0,
    text_weight: float = 1.0,
) -> Iterator[Packed]:
    """Endless rows, the same for the same arguments and another sequence for every worker.

    Items are whole, except text, which fills what is left of a row.

    Args:
        mix: shares of the tokens by task, and of `text`; they need not add up to 1. Text that fills rows counts as text.
        length: tokens of a row.
        corpus: the `corpus.bin` that train/corpus.py wrote.
        prompt_weight: loss weight of the tokens of prompts. text_weight: of text.

    Raises ValueError for a mix with an unknown name.
    """
    packer = _Packer(random.Random(f"{seed} {worker}"), mix, length, Corpus(corpus), (prompt_weight, text_weight))
    while True:
        yield packer.row()
