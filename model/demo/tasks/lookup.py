"""Task `lookup`: the values of keys, or the keys of values, in lines or a JSON object."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, build, reserved, says, says_each
from forebay.model.demo.tasks.reading import listed
from forebay.model.demo.tasks.words import CODE_WORDS, NAMES, NOUNS, PLACES

INTRODUCTIONS = ("Here is a list.", "Look at this table.", "Remember these values.", "")
FORWARDS = (("What is the value of {}?", "Give me the value of {}."), ("What are the values of {}?", "Give me the values of {}."))
BACKWARDS = (("Which key has the value {}?",), ("Which keys have the values {}?",))
SORTED = ("Write the table sorted by key.", "Sort the table by key.")
BACKWARDS_SHARE = 0.2
SORTED_SHARE = 0.12
MOST_SORTED = 16  # entries
ENTRY_TOKENS = 7
MOST_ENTRIES = 200
MOST_AT_ONCE = 8


@dataclass(frozen=True)
class Table:
    """Entries and how they are written: what stands between key and value, or "json"."""

    entries: dict[str, str]
    shape: str
    words: bool

    def written(self, keys: Sequence[str]) -> str:
        """The entries of `keys` in that order."""
        if self.shape == "json":
            return json.dumps({key: self.entries[key] if self.words else int(self.entries[key]) for key in keys})
        return "\n".join(f"{key}{self.shape}{self.entries[key]}" for key in keys)


def lookup(rng: random.Random, options: Options) -> Conversation:
    """`options.questions` questions about one table, each for `options.at_once` entries; where that is None, also for the sorted table."""
    count = rng.randint(3, 16)
    if options.length:
        count = max(3, min(MOST_ENTRIES, (options.length - 40) // ENTRY_TOKENS))
    while True:
        keys = rng.sample(rng.choice([table for table in (NOUNS, NAMES, PLACES) if len(table) >= count]), count)
        words = rng.random() < 0.3 and count < len(CODE_WORDS) // 2
        free = sorted({*CODE_WORDS} - {*keys})
        values = rng.sample(free, count) if words else [str(n) for n in rng.sample(range(10, 1000), count)]
        if reserved(f"{keys[0]} {values[0]}") == options.held_out:
            break
    table = Table(dict(zip(keys, values, strict=True)), rng.choice((": ", " = ", " -> ", "json")), words)
    turns: list[Turn] = []
    meta: dict[str, Any] = {}
    for _ in range(options.questions):
        backwards = False
        if options.at_once is None and count <= MOST_SORTED and rng.random() < SORTED_SHARE:
            asked = sorted(keys)
            question = rng.choice(SORTED)
            thinking = ("I sort the table.", "I sort the table by key.", f"I sort the keys: {', '.join(asked)}.")
        else:
            asked = rng.sample(keys, min(options.at_once or rng.randint(1, MOST_AT_ONCE), count))
            backwards = rng.random() < BACKWARDS_SHARE
            sought = listed([table.entries[key] for key in asked] if backwards else asked)
            question = rng.choice((BACKWARDS if backwards else FORWARDS)[len(asked) > 1]).format(sought)
            thinking = ("I look it up.", f"I look for {sought}.", f"I look for {sought} in the table of {count} entries.")
        turns.append(Turn(question, table.written(asked), thinking))
        expect = asked if backwards else [table.entries[key] for key in asked]
        others = [item for item in (keys if backwards else values) if item not in expect]
        meta = {"entries": count, "backwards": backwards, "expect": expect if len(asked) > 1 else expect[0], "others": others}
    introduction = rng.choice(INTRODUCTIONS)
    text = table.written(keys)
    turns[0].question = f"{introduction}\n\n{text}\n\n{turns[0].question}" if introduction else f"{text}\n\n{turns[0].question}"
    return build(rng, "lookup", options, turns, meta)


def check_lookup(c: Conversation, reply: dict[str, Any]) -> bool:
    """What is sought appears and no other entry of its column does; of several, each in a line or item of its own, in the order asked."""
    content, expect, others = reply.get("content") or "", c.meta["expect"], c.meta["others"]
    return says(content, expect, others) if isinstance(expect, str) else says_each(re.split(r"\n|, ", content.strip()), expect, others)
