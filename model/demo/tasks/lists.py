"""Tasks `copy`, `sort` and `reverse`."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, build, reserved
from forebay.model.demo.tasks.quote import nonsense
from forebay.model.demo.tasks.words import CODE_WORDS, NAMES, NOUNS, PLACES

COPY = ("Repeat exactly: {}", "Copy this: {}", "Repeat this text: {}", "Say this again: {}", "Write exactly this: {}")
REPEAT = ("Repeat what I said {}.", "What did I say {}?")
AGO = ("one message ago", "two messages ago", "three messages ago")
NOTED = "I note it."
TOLD = "The user tells me something. I note it."
EARLIER = 0.25  # share of the copies of an earlier message
COPIED = (*NOUNS, *NAMES, *CODE_WORDS, *PLACES)
ASCENDING = (
    "Sort these numbers in ascending order: {}", "Sort the numbers from small to large: {}", "Sort ascending: {}", "Sort these numbers: {}",
)  # fmt: skip
DESCENDING = ("Sort these numbers in descending order: {}", "Sort the numbers from large to small: {}", "Sort descending: {}")
ALPHABETIC = ("Sort these words alphabetically: {}", "Put these words in alphabetical order: {}", "Sort these words: {}")
REVERSE = ("Reverse this list: {}", "Write this list backwards: {}", "Put this list in reverse order: {}")


def _items(rng: random.Random, options: Options, words: bool) -> list[str]:
    while True:
        count = rng.randint(3, 10)
        items = rng.sample(NOUNS, count) if words else [str(n) for n in rng.sample(range(1, 100), count)]
        if reserved(" ".join(items)) == options.held_out:
            return items


def _text(rng: random.Random) -> str:
    """Up to about 60 tokens: digits, sentences, words, letters, numbers, or words and numbers mixed."""
    match rng.randrange(7):
        case 0:
            return " ".join(str(rng.randint(0, 9)) for _ in range(rng.randint(4, 24)))
        case 1:
            return " ".join(nonsense(rng) for _ in range(rng.randint(1, 3)))
        case 2:
            return " ".join(rng.choice(COPIED) for _ in range(rng.randint(3, 28)))
        case 3:
            return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(4, 16)))
        case 4:
            return ", ".join(_number(rng) for _ in range(rng.randint(3, 12)))
    return " ".join(_number(rng) if rng.random() < 0.3 else rng.choice(COPIED) for _ in range(rng.randint(3, 24)))


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 4)))


def copy(rng: random.Random, options: Options) -> Conversation:
    """A text comes back as it is: that of the question, or what the user has said up to three messages ago."""
    while reserved(text := _text(rng)) != options.held_out:
        pass
    ends = f"The text begins with {text.split()[0]} and ends with {text.split()[-1]}."
    wish = "The user wants a copy."
    if rng.random() < EARLIER:
        back = rng.randint(1, len(AGO))
        said = [text, *(_text(rng) for _ in range(back - 1))]
        said = [*(_text(rng) for _ in range(rng.choice((0, 0, 1)))), *said]
        turns = [Turn(each, NOTED, ("I note it.", TOLD, TOLD)) for each in said]
        wish = f"The user wants what was said {AGO[back - 1]}."
        question = rng.choice(REPEAT).format(AGO[back - 1])
    else:
        turns, question = [], rng.choice(COPY).format(text)
    thinking = ("I copy the text.", f"{wish} I write the text as it is.", f"{wish} {ends} I write it as it is.")
    return build(rng, "copy", options, [*turns, Turn(question, text, thinking)], {"expect": text, "turns": len(turns) + 1})


def sort(rng: random.Random, options: Options) -> Conversation:
    """Numbers up or down, or words by the alphabet."""
    words = rng.random() < 0.35
    items = _items(rng, options, words)
    down = not words and rng.random() < 0.4
    ordered = sorted(items) if words else sorted(items, key=int, reverse=down)
    question = rng.choice(ALPHABETIC if words else DESCENDING if down else ASCENDING).format(", ".join(items))
    what = "words" if words else "numbers"
    first = f"The {'largest' if down else 'first' if words else 'smallest'} is {ordered[0]}."
    relation = "comes before" if words else ">" if down else "<"
    steps = " ".join(f"{a} {relation} {b}." for a, b in pairwise(ordered))
    thinking = (first, f"{first} The last is {ordered[-1]}.", f"I sort {what}. {first} {steps}")
    content = ", ".join(ordered)
    return build(rng, "sort", options, [Turn(question, content, thinking)], {"items": len(items), "expect": content, "words": words})


def reverse(rng: random.Random, options: Options) -> Conversation:
    """A list backwards."""
    items = _items(rng, options, rng.random() < 0.5)
    content = ", ".join(reversed(items))
    thinking = (f"The last is {items[-1]}.", f"The last is {items[-1]}, the first is {items[0]}.",
                f"The list is {', '.join(items)}. The last is {items[-1]}, so I begin with it.")  # fmt: skip
    question = rng.choice(REVERSE).format(", ".join(items))
    return build(rng, "reverse", options, [Turn(question, content, thinking)], {"items": len(items), "expect": content})


def check_list(c: Conversation, reply: dict[str, Any]) -> bool:
    """The same items in the same order, however they are set apart."""
    content = (reply.get("content") or "").strip().rstrip(".")
    return content.replace(",", " ").split() == c.meta["expect"].replace(",", " ").split()


def check_copy(c: Conversation, reply: dict[str, Any]) -> bool:
    return bool((reply.get("content") or "").strip() == c.meta["expect"])
