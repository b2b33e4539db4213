"""Held-out answers for the log of a training run: a few dozen of each task, judged by the most likely token at every place."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from forebay.model.demo import TOKENIZER
from forebay.model.demo.tasks import TASKS, Options
from forebay.model.demo.tasks.render import Renderer
from forebay.model.demo.train.stream import Packed
from forebay.model.tokenizer import Tokenizer

COUNT = 48  # conversations of a task
LONG = ((1024, 16), (4096, 12), (16384, 4))  # recall: tokens of the prompt, conversations
QUESTIONS = 8  # asked about each long text
PAD = 2


def batches(rng: random.Random) -> Iterator[tuple[str, list[Packed]]]:
    """(name, rows of one length): every task at effort 75, but arithmetic at 10 and 100; long recall."""
    renderer = Renderer(Tokenizer.load(TOKENIZER))
    for task in TASKS:
        for effort in (10, 100) if task == "arithmetic" else (75,):
            options = Options(effort=effort, held_out=True)
            made = [TASKS[task](rng, options) for _ in range(COUNT)]
            yield f"{task}@{effort}", _rows([renderer.render(c) for c in made])
    for length, count in LONG:
        options = Options(length=length, effort=75, held_out=True, questions=QUESTIONS)
        rendered = [renderer.render(TASKS["recall"](rng, options)) for _ in range(count)]
        yield f"recall {length}", _rows(rendered, [renderer.answers(ids)[-QUESTIONS:] for ids, _ in rendered])


def _rows(rendered: list[tuple[list[int], tuple[int, int]]], answers: list[list[tuple[int, int]]] | None = None) -> list[Packed]:
    length = -(-max(len(ids) for ids, _ in rendered) // 64) * 64
    rows = []
    for number, (ids, span) in enumerate(rendered):
        tokens = np.full(length, PAD, dtype=np.int32)
        tokens[: len(ids)] = ids
        spans = answers[number] if answers is not None else [span]
        weights = np.zeros(length, dtype=np.float32)
        for start, stop in spans:
            weights[start:stop] = 1.0
        rows.append(Packed(tokens, weights, spans, {}))
    return rows
