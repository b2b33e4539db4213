"""Task `recall`: facts planted anywhere in a long text, asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, draw_effort, reserved, says, says_each
from forebay.model.demo.tasks.reading import about_text, listed
from forebay.model.demo.tasks.words import BUILDINGS, CODE_WORDS, NAMES, PLACES

NUMBERS = ("secret number", "secret number", "door code", "locker number", "lucky number")
WORDS = ("code word", "code word", "password")
PEOPLE = ("keeper", "owner")
ATTRIBUTES = (*NUMBERS, *WORDS, *PEOPLE)
SUBJECTS = (*PLACES, *(f"the {building}" for building in BUILDINGS))
LEADS = ("", "", "", "Remember: ", "Note: ", "By the way: ", "It is important that ", "Somebody wrote: ")
QUESTIONS = (
    "What is the {}?", "What is the {}?", "Tell me the {}.", "Please give me the {}.", "I need the {}.", "Do you remember the {}?",
    "Which is the {}?", "According to the text, what is the {}?",
)  # fmt: skip
SEVERAL = ("Tell me the {}.", "Please give me the {}.", "I need the {}.", "What are the {}?", "List the {}.")
ABOUT = ("What does the text say about {}?", "Repeat what the text says about {}.")
SHORT = (160, 240, 360, 480)  # lengths when none is asked for
TOKENS_PER_FACT = 220  # of a text with few questions
MOST_AT_ONCE = 6


@dataclass(frozen=True)
class Planted:
    """A fact such as that the "secret number" (`attribute`) of "Bergen" (`subject`) is "7421"."""

    attribute: str
    subject: str
    value: str

    @property
    def what(self) -> str:
        return f"{self.attribute} of {self.subject}"

    @property
    def sentence(self) -> str:
        return f"The {self.what} is {self.value}."


@cache
def _open(held_out: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The subjects with those of their attributes that are on one side of the split."""
    table = ((subject, tuple(a for a in ATTRIBUTES if reserved(f"{a} of {subject}") == held_out)) for subject in SUBJECTS)
    return tuple((subject, attributes) for subject, attributes in table if attributes)


def plant(rng: random.Random, count: int, held_out: bool) -> list[Planted]:
    """Facts about different subjects, all on one side of the split. Numbers are all different; words and names as far as there are enough.

    Raises ValueError if there are fewer subjects than `count` (about 300 held-out ones).
    """
    numbers = [str(n) for n in rng.sample(range(1000, 10000), count)]
    values: dict[tuple[str, ...], list[str]] = {}
    facts = []
    for subject, attributes in rng.sample(_open(held_out), count):
        attribute = rng.choice(attributes)
        if attribute in NUMBERS:
            value = numbers.pop()
        else:
            table = CODE_WORDS if attribute in WORDS else NAMES
            left = values.get(table) or rng.sample(table, len(table))
            value = left.pop()
            values[table] = left
        facts.append(Planted(attribute, subject, value))
    return facts


def recall(rng: random.Random, options: Options) -> Conversation:
    """`options.questions` questions about a text of `options.length` tokens, each for `options.at_once` facts, no fact twice."""
    effort = draw_effort(rng, options)
    length = options.length or rng.choice(SHORT)
    sizes = [options.at_once or rng.randint(1, MOST_AT_ONCE) for _ in range(options.questions)]
    count = min(2 + int(length / TOKENS_PER_FACT * rng.uniform(0.7, 1.4)), len(_open(options.held_out)))
    facts = plant(rng, max(count, sum(sizes)), options.held_out)
    groups = _groups(rng, facts, sizes)
    turns = [_turn(rng, group) for group in groups]
    told = {fact: (rng.choice(LEADS) + fact.sentence).replace("that The", "that the") for fact in facts}
    asked = groups[-1]
    depth = options.depth if options.depth is not None else rng.random()
    # Of several facts the first is at the depth.
    meta: dict[str, Any] = {"depth": round(depth, 3), "facts": len(facts)}
    if len(asked) == 1:
        meta |= {"expect": asked[0].value, "what": asked[0].what}
    else:
        meta |= {"expect": [fact.value for fact in asked], "what": [fact.what for fact in asked]}
    meta["others"] = sorted({fact.value for fact in facts} - {fact.value for fact in asked})
    pinned = {told[asked[0]]: depth}
    return about_text(rng, "recall", options, list(told.values()), pinned, turns, length=length, effort=effort, meta=meta)


def _groups(rng: random.Random, facts: Sequence[Planted], sizes: Sequence[int]) -> list[list[Planted]]:
    """Different facts for each question; about half of the groups share an attribute where that can be."""
    left = list(facts)
    out = []
    for size in sizes:
        group = left[:size]
        if size > 1 and rng.random() < 0.5:
            alike = [fact for fact in left if fact.attribute == left[0].attribute]
            group = alike[:size] if len(alike) >= size else group
        out.append(group)
        taken = set(group)
        left = [fact for fact in left if fact not in taken]
    return out


def _turn(rng: random.Random, group: Sequence[Planted]) -> Turn:
    """A question for the facts of `group`; the answer has their sentences, one a line. The thinking leaves them to the answer."""
    subjects = listed([fact.subject for fact in group])
    attribute = group[0].attribute
    content = "\n".join(fact.sentence for fact in group)
    if len(group) == 1:
        what = group[0].what
        question = rng.choice(QUESTIONS).format(what)
        return Turn(question, content, ("I look for it.", f"I look for the {what}.",
                    f"The question is about the {what}. I look for it in the text."))  # fmt: skip
    if rng.random() < 0.2:
        question = rng.choice(ABOUT).format(subjects)
    elif all(fact.attribute == attribute for fact in group):
        question = rng.choice(SEVERAL).format(f"{attribute}s of {subjects}")
    else:
        question = rng.choice(SEVERAL).format(listed([f"{'the ' if i else ''}{fact.what}" for i, fact in enumerate(group)]))
    return Turn(question, content, (f"I look for {len(group)} facts.", f"I look for what the text says about {subjects}.",
                f"The question is about {len(group)} facts. I look for what the text says about {subjects}."))  # fmt: skip


def check_recall(c: Conversation, reply: dict[str, Any]) -> bool:
    """The value appears and no other planted value does; of several, each in a line of its own, in the order of the question."""
    content, expect, others = reply.get("content") or "", c.meta["expect"], c.meta["others"]
    return says(content, expect, others) if isinstance(expect, str) else says_each(content.splitlines(), expect, others)
