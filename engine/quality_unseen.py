"""Recall in prose that training never saw: facts planted in held-out documents instead of the sentences that training used."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import cycle

from forebay.model.demo.tasks import Conversation, Effort
from forebay.model.demo.tasks.filler import sizes
from forebay.model.demo.tasks.recall import LEADS, QUESTIONS, TOKENS_PER_FACT, plant

ENDS = re.compile(r"(?<=[.!?]) +(?=[A-Z])")  # between sentences


def unseen_text(rng: random.Random, prose: Sequence[str], length: int, count: int, effort: Effort) -> list[Conversation]:
    """`count` questions, each about another held-out fact of one text of about `length` tokens.

    The text is `prose` in order from one of its documents on, and again from the first one where it does not suffice. Facts are as many
    and as worded as in training, and stand between sentences or at the ends of lines; never two in one place.
    """
    facts = plant(rng, max(count, 2 + int(length / TOKENS_PER_FACT * rng.uniform(0.7, 1.4))), held_out=True)
    told = [(rng.choice(LEADS) + fact.sentence).replace("that The", "that the") for fact in facts]
    sentences = _sentences(rng, prose, length - sum(sizes([f" {text}" for text in told])), least=len(told))
    for place, text in zip(sorted(rng.sample(range(len(sentences)), len(told)), reverse=True), told, strict=True):
        sentences.insert(place, f"{text} " if place == 0 else f" {text}")
    text = "".join(sentences).strip()
    values = {fact.value for fact in facts}
    out = []
    for fact in facts[:count]:
        body = {
            "messages": [{"role": "user", "content": f"{text}\n\n{rng.choice(QUESTIONS).format(fact.what)}"}], "reasoning_effort": effort,
        }  # fmt: skip
        meta = {
            "effort": effort, "length": length, "facts": len(facts), "what": fact.what, "expect": fact.value,
            "others": sorted(values - {fact.value}), "depth": text.find(f"{fact.what} is {fact.value}") / len(text),
        }  # fmt: skip
        reasoning = f"I look for the {fact.what}."
        answer = {"role": "assistant", "content": fact.sentence} | ({} if effort == "none" else {"reasoning_content": reasoning})
        out.append(Conversation("recall", body, answer, meta))
    return out


def _sentences(rng: random.Random, prose: Sequence[str], tokens: int, least: int) -> list[str]:
    """Sentences and lines of about `tokens` tokens, and at least `least` of them, each with what parts it from the one before."""
    pieces: list[list[str]] = []
    for document in prose:
        found: list[str] = []
        for paragraph in document.split("\n\n"):
            lines = "\n" in paragraph  # an example or a list
            parts = paragraph.split("\n") if lines else ENDS.split(paragraph)
            found += [("\n\n" if i == 0 else "\n" if lines else " ") + part for i, part in enumerate(parts)]
        pieces.append(found)
    first = rng.randrange(len(pieces))
    row = [text for document in pieces[first:] + pieces[:first] for text in document]
    out: list[str] = []
    for text, size in cycle(zip(row, sizes(row), strict=True)):
        tokens -= size
        if tokens < 0 and len(out) >= least:
            break
        out.append(text)
    return out
