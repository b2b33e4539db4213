"""Task `quote`: sentences that stand anywhere in a long text, asked for by their first words.

The sentences make no sense and are drawn anew each time, so that they can only be read, not known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from forebay.model.demo.tasks import words as w
from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, draw, draw_effort
from forebay.model.demo.tasks.filler import pools
from forebay.model.demo.tasks.reading import about_text, listed

ONE = (
    "Quote the sentence that begins with {}.", "Which sentence begins with {}?", "Repeat the sentence that begins with {}.",
    "How does the sentence go on that begins with {}?",
)  # fmt: skip
SEVERAL = ("Quote the sentences that begin with {}.", "Which sentences begin with {}?", "Repeat the sentences that begin with {}.")
FIRST_WORDS = (2, 3, 4)
SHORT = (160, 240, 360)  # lengths when none is asked for
MOST_AT_ONCE = 3
ANY_WORDS = (*w.NOUNS, *w.CODE_WORDS, *w.NAMES, *w.PLACES, *w.BUILDINGS, *w.JOBS, *w.ADJECTIVES, *w.QUALITIES, *w.VERBS)
COUNTS = ("two", "three", "seven", "many", "some", "all")


def nonsense(rng: random.Random) -> str:
    """A sentence of about 8 to 18 tokens, half of them with a number."""
    pick = rng.choice
    name, noun, other, quality, verb, place = pick(w.NAMES), pick(w.NOUNS), pick(w.NOUNS), pick(w.QUALITIES), pick(w.VERBS), pick(w.PLACES)
    number = rng.randrange(10 ** rng.randint(1, 4))
    match rng.randrange(8):
        case 0:
            return f"The {quality} {noun} of {name} {pick(w.MOVES)} under {pick(COUNTS)} {pick(w.QUALITIES)} walls near {place}."
        case 1:
            return f"{name} {verb} {number} pieces of the {quality} {noun} in {place}."
        case 2:
            return f"In {place} the {pick(w.ADJECTIVES)} {pick(w.JOBS)} {verb} a {noun}, a {other} and {number} euros."
        case 3:
            return f"A {quality} {noun} lay between {place} and the {pick(w.BUILDINGS)} of {name}."
        case 4:
            return f"Every {noun} of the {pick(w.JOBS)} was {quality}, but {name} {verb} the {other} {pick(w.TIMES)}."
        case 5:
            return f"{place} has {number} people, {rng.randrange(100)} roads and one {quality} {noun}."
    # Words that nothing but the text can tell.
    row = [str(rng.randrange(1000)) if rng.random() < 0.1 else pick(ANY_WORDS) for _ in range(rng.randint(7, 13))]
    return f"{name} {' '.join(row)}."


@cache
def _known() -> frozenset[str]:
    """First words of the sentences that fill texts."""
    return frozenset(head for pool in pools() for text in pool.texts for head in _heads(text))


def quote(rng: random.Random, options: Options) -> Conversation:
    """`options.questions` questions about a text of `options.length` tokens, each for `options.at_once` sentences, none twice."""
    effort = draw_effort(rng, options)
    length = options.length or rng.choice(SHORT)
    sizes = [options.at_once or rng.randint(1, MOST_AT_ONCE) for _ in range(options.questions)]
    asked, planted = _drawn(rng, options, sum(sizes), 2 + int(length / rng.uniform(50, 200)))
    turns, groups = [], []
    left = list(asked.items())
    for size in sizes:
        group, left = left[:size], left[size:]
        groups.append([sentence for sentence, _ in group])
        turns.append(_turn(rng, group))
    depth = options.depth if options.depth is not None else rng.random()
    expect = groups[-1] if len(groups[-1]) > 1 else groups[-1][0]
    meta = {"depth": round(depth, 3), "sentences": len(planted), "expect": expect}
    pinned = {groups[-1][0]: depth}
    return about_text(rng, "quote", options, planted, pinned, turns, length=length, effort=effort, meta=meta)


def _drawn(rng: random.Random, options: Options, asked: int, others: int) -> tuple[dict[str, str], list[str]]:
    """(sentences to ask for, with first words that are theirs alone; all planted sentences)."""
    planted = [nonsense(rng) for _ in range(others)]
    begins = Counter(head for text in planted for head in _heads(text))
    found: dict[str, str] = {}
    while len(found) < asked:
        text = draw(rng, options, lambda rng: (text := nonsense(rng), text))
        heads = _heads(text)
        free = [head for head in heads if not begins[head] and head not in _known()]
        if free:
            begins.update(heads)
            found[text] = rng.choice(free)
    # Sentences that came later may begin with the same words as earlier ones; four words hardly ever do.
    for text, head in found.items():
        if begins[head] > 1:
            found[text] = _heads(text)[-1]
    if any(begins[head] > 1 for head in found.values()):
        return _drawn(rng, options, asked, others)
    return found, planted + list(found)


def _heads(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[:count]).rstrip(",") for count in FIRST_WORDS]


def _turn(rng: random.Random, group: Sequence[tuple[str, str]]) -> Turn:
    heads = listed([f'"{head}"' for _, head in group])
    content = "\n".join(sentence for sentence, _ in group)
    question = rng.choice(ONE if len(group) == 1 else SEVERAL).format(heads)
    what = "a sentence" if len(group) == 1 else f"{len(group)} sentences"
    search = f"I look for {what} in the text."
    return Turn(question, content, ("I look for it.", search, f"{search} The question names {heads}."))


def check_quote(c: Conversation, reply: dict[str, Any]) -> bool:
    """Exactly the sentences, each in a line of its own, in the order of the question."""
    expect = c.meta["expect"]
    lines = [line.strip() for line in (reply.get("content") or "").splitlines() if line.strip()]
    return lines == ([expect] if isinstance(expect, str) else expect)
