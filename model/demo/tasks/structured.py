"""Task `json`: a sentence becomes a JSON object of a given schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.model.demo.tasks import words as w
from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, build, draw, system_messages

REQUESTS = ("{}", "{}", "Extract the data: {}", "Write this as JSON: {}", "Give me the data of this sentence: {}", "Fill the schema. {}")


@dataclass(frozen=True)
class Property:
    """A property: its name, schema, how to draw a value, and how to say it after the subject."""

    name: str
    schema: dict[str, Any]
    value: Callable[[random.Random], Any]
    said: tuple[str, ...]

    def say(self, rng: random.Random, value: Any) -> str:
        if isinstance(value, bool):
            return self.said[0] if value else self.said[1]
        return rng.choice(self.said).format(value)


def _one_of(name: str, values: tuple[str, ...], *said: str) -> Property:
    return Property(name, {"type": "string"}, lambda rng: rng.choice(values), said)


def _enum(name: str, values: tuple[str, ...], *said: str) -> Property:
    return Property(name, {"type": "string", "enum": list(values)}, lambda rng: rng.choice(values), said)


def _number(name: str, low: int, high: int, *said: str) -> Property:
    return Property(name, {"type": "integer"}, lambda rng: rng.randint(low, high), said)


def _flag(name: str, yes: str, no: str) -> Property:
    return Property(name, {"type": "boolean"}, lambda rng: rng.random() < 0.5, (yes, no))


# What a sentence is about, and what can be said of it.
DOMAINS: dict[str, tuple[Property, ...]] = {
    "person": (
        _one_of("name", w.NAMES, "is called {}", "has the name {}"),
        _number("age", 18, 90, "is {} years old"),
        _one_of("city", w.PLACES, "lives in {}", "comes from {}"),
        _one_of("job", w.JOBS, "works as a {}", "is a {}"),
        _one_of("sport", w.SPORTS, "likes {}"),
        _enum("pet", w.PETS[:4], "has a {}"),
        _flag("married", "is married", "is not married"),
    ),
    "product": (
        _one_of("name", w.NOUNS, "is called {}", "has the name {}"),
        _number("price", 1, 999, "costs {} euros", "has a price of {} euros"),
        _enum("color", w.COLOURS[:6], "is {}", "has the color {}"),
        _number("weight", 1, 99, "weighs {} kilograms"),
        _flag("in_stock", "is in stock", "is not in stock"),
        _one_of("country", w.PLACES, "is made in {}"),
    ),
    "event": (
        _one_of("place", w.PLACES, "takes place in {}", "is held in {}"),
        _enum("day", w.DAYS, "is on {}"),
        _number("hour", 0, 23, "starts at {} o'clock"),
        _number("guests", 2, 500, "has {} guests"),
        _one_of("host", w.NAMES, "is hosted by {}"),
        _flag("free", "is free", "is not free"),
    ),
    "book": (
        _one_of("author", w.NAMES, "was written by {}"),
        _number("pages", 20, 990, "has {} pages"),
        _number("year", 1900, 2025, "was printed in {}"),
        _one_of("language", w.LANGUAGES, "is written in {}"),
        _one_of("topic", w.SPORTS, "is about {}"),
        _flag("sold_out", "is sold out", "is not sold out"),
    ),
    "trip": (
        _one_of("start", w.PLACES, "starts in {}"),
        _one_of("goal", w.PLACES, "ends in {}", "goes to {}"),
        _number("hours", 1, 48, "takes {} hours"),
        _number("price", 5, 900, "costs {} euros"),
        _enum("day", w.DAYS, "is on {}"),
        _enum("vehicle", ("train", "bus", "plane", "ship"), "is by {}"),
    ),
    "house": (
        _one_of("owner", w.NAMES, "belongs to {}"),
        _one_of("city", w.PLACES, "stands in {}"),
        _number("rooms", 1, 20, "has {} rooms"),
        _enum("color", w.COLOURS[:6], "is {}"),
        _number("year", 1700, 2025, "was built in {}"),
        _flag("garden", "has a garden", "has no garden"),
    ),
}


def _sentence(subject: str, clauses: list[str]) -> str:
    article = "An" if subject[0] in "aeiou" else "A"
    return f"{article} {subject} {', '.join(clauses[:-1])} and {clauses[-1]}."


def json_object(rng: random.Random, options: Options) -> Conversation:
    """Two to five properties, in the order of the schema; the sentence may say more, in any order."""

    def make(rng: random.Random) -> tuple[str, tuple[str, list[Property], dict[str, Any], str]]:
        subject = rng.choice(tuple(DOMAINS))
        said = rng.sample(DOMAINS[subject], rng.randint(2, min(6, len(DOMAINS[subject]))))
        values = {prop.name: prop.value(rng) for prop in said}
        text = _sentence(subject, [prop.say(rng, values[prop.name]) for prop in said])
        wanted = rng.sample(said, min(len(said), rng.randint(2, 5)))
        record = {prop.name: values[prop.name] for prop in wanted}
        return json.dumps([subject, record]), (subject, wanted, record, text)

    subject, wanted, record, text = draw(rng, options, make)
    schema: dict[str, Any] = {
        "type": "object", "properties": {prop.name: prop.schema for prop in wanted}, "required": [prop.name for prop in wanted],
    }  # fmt: skip
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    content = json.dumps(record, ensure_ascii=False)
    listed = ", ".join(f"{name} is {json.dumps(value, ensure_ascii=False)}" for name, value in record.items())
    asks = f"The schema asks for {', '.join(record)}."
    thinking = ("I fill the schema.", asks, f"{asks} In the text {listed}.")
    style = {"type": "json_schema", "json_schema": {"name": subject, "schema": schema}}
    return build(
        rng, "json", options, [Turn(rng.choice(REQUESTS).format(text), content, thinking)], {"properties": len(record), "expect": record},
        lead=system_messages(rng), extra={"response_format": style},
    )  # fmt: skip


def check_json(c: Conversation, reply: dict[str, Any]) -> bool:
    """The content is JSON and equals the record."""
    try:
        value = json.loads(reply.get("content") or "")
    except ValueError:
        return False
    return json.dumps(value, sort_keys=True) == json.dumps(c.meta["expect"], sort_keys=True)
