"""Words that the tasks are made of: common nouns and names, compiled for this project (`words.json`)."""

from __future__ import annotations

import json
from importlib.resources import files

_TABLE: dict[str, list[str]] = json.loads((files(__package__) / "words.json").read_text("utf-8"))

NAMES = tuple(_TABLE["names"])
PLACES = tuple(_TABLE["places"])
BUILDINGS = tuple(_TABLE["buildings"])
CODE_WORDS = tuple(_TABLE["code_words"])
NOUNS = tuple(_TABLE["nouns"])
COLOURS = tuple(_TABLE["colours"])
JOBS = tuple(_TABLE["jobs"])
FOODS = tuple(_TABLE["foods"])
SPORTS = tuple(_TABLE["sports"])
PETS = tuple(_TABLE["pets"])
PET_NAMES = tuple(_TABLE["pet_names"])
DAYS = tuple(_TABLE["days"])
MONTHS = tuple(_TABLE["months"])
LANGUAGES = tuple(_TABLE["languages"])
CURRENCIES = tuple(_TABLE["currencies"])
ADJECTIVES = tuple(_TABLE["adjectives"])
QUALITIES = tuple(_TABLE["qualities"])
ADVERBS = tuple(_TABLE["adverbs"])
VERBS = tuple(_TABLE["verbs"])
MOVES = tuple(_TABLE["moves"])
TIMES = tuple(_TABLE["times"])
