"""What the demo knows by heart: general knowledge, compiled for this project (`facts.json`)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

_TABLE: dict[str, Any] = json.loads((files(__package__) / "facts.json").read_text("utf-8"))

Pairs = dict[str, str]
CAPITALS: Pairs = _TABLE["capitals"]  # country: city
ELEMENTS: Pairs = _TABLE["elements"]  # name: symbol, the first NUMBERED_ELEMENTS in the order of their atomic numbers
OPPOSITES: Pairs = _TABLE["opposites"]
FRENCH: Pairs = _TABLE["french"]
GERMAN: Pairs = _TABLE["german"]
SPANISH: Pairs = _TABLE["spanish"]
COLOURS_OF: Pairs = _TABLE["colours_of"]
YOUNG: Pairs = _TABLE["young"]
SOUNDS: Pairs = _TABLE["sounds"]
PLURALS: Pairs = _TABLE["plurals"]
PAST: Pairs = _TABLE["past"]
KINDS: Pairs = _TABLE["kinds"]
SINGLE: Pairs = _TABLE["single"]  # question: answer without its full stop
NUMBERED_ELEMENTS = 36
# Ways to say something, and the answer.
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = tuple((tuple(entry["say"]), entry["answer"]) for entry in _TABLE["small_talk"])
