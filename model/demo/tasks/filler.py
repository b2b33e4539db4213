"""Prose that fills long contexts: sentences written by a small grammar, and sentences of the Python documentation.

`filler.txt` holds the latter, one a line; `train/corpus.py` chose them among all documents, the held-out ones included. They are Copyright
Python Software Foundation, PSF License Version 2 (NOTICE and LICENSES/ of the project). `held_out.txt` beside it has no document with one
of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from forebay.model.demo.tasks import words as w
from forebay.model.tokenizer import Tokenizer

GENERATED = 3000  # sentences in the pool
MISFITS = 8  # sentences tried that are too long for the rest of a passage


def sentence(rng: random.Random) -> str:
    """A sentence of the grammar."""
    job, adjective, thing = rng.choice(w.JOBS), rng.choice(w.ADJECTIVES), rng.choice(w.NOUNS)
    quality, time, verb = rng.choice(w.QUALITIES), rng.choice(w.TIMES), rng.choice(w.VERBS)
    match rng.randrange(10):
        case 0:
            return f"The {adjective} {job} {verb} a {quality} {thing} {time}."
        case 1:
            return f"{rng.choice(w.NAMES)} {rng.choice(w.MOVES)} to {rng.choice(w.PLACES)} {time}."
        case 2:
            return f"{time.capitalize()}, the {job} {verb} the {thing}."
        case 3:
            return f"Nobody knew why the {thing} was so {quality}."
        case 4:
            return f"{rng.choice(w.NAMES)} and {rng.choice(w.NAMES)} {rng.choice(w.ADVERBS)} {verb} the {quality} {thing}."
        case 5:
            return f"There was a {quality} {thing} behind the {rng.choice(w.BUILDINGS)}."
        case 6:
            return f"The {job} said that the {thing} would be {quality} {time}."
        case 7:
            return f"It was {quality} outside, so the {adjective} {job} {verb} another {thing}."
        case 8:
            return f"The {thing} and the {rng.choice(w.NOUNS)} lay on the {quality} table."
    return f"Many people in {rng.choice(w.PLACES)} have a {quality} {thing} at home."


@dataclass(frozen=True)
class Pool:
    """Sentences with their numbers of tokens, as they count after a space."""

    texts: Sequence[str]
    sizes: Sequence[int]


@cache
def tokenizer() -> Tokenizer:
    """The demo's tokenizer, by which lengths are measured."""
    return Tokenizer.load(files("forebay.model.demo") / "checkpoint" / "tokenizer.json")  # type: ignore[arg-type]


def sizes(texts: Sequence[str]) -> list[int]:
    """Tokens of each text."""
    return [len(ids) for ids in tokenizer().encode_many(list(texts))]


@cache
def pools() -> tuple[Pool, Pool]:
    """Sentences of the grammar and of the documentation."""
    rng = random.Random(7)
    generated = [sentence(rng) for _ in range(GENERATED)]
    documents = (files(__package__) / "filler.txt").read_text("utf-8").splitlines()
    return tuple(Pool(texts, sizes([f" {text}" for text in texts])) for texts in (generated, documents))  # type: ignore[return-value]


def passage(rng: random.Random, tokens: int) -> list[str]:
    """Sentences of about `tokens` tokens in all, as many as fit."""
    generated, documents = pools()
    share = rng.choice((0.0, 0.5, 0.5, 1.0))
    out: list[str] = []
    misfits = 0
    while misfits < MISFITS:
        pool = documents if rng.random() < share else generated
        i = int(rng.random() * len(pool.texts))
        if pool.sizes[i] > tokens:
            misfits += 1
            continue
        tokens -= pool.sizes[i]
        out.append(pool.texts[i])
    return out
