"""Tasks `chat` (greetings, who it is, facts known by heart) and `refer` (what was said earlier in the conversation)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from forebay.model.demo.tasks import facts
from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, appears, build, reserved, says, system_messages
from forebay.model.demo.tasks.words import COLOURS, DAYS, FOODS, JOBS, MONTHS, NAMES, PET_NAMES, PETS, PLACES, SPORTS


@dataclass(frozen=True)
class Fact:
    """Ways to ask, the one answer, the part of it that must appear in a reply, and what the question is about."""

    questions: tuple[str, ...]
    answer: str
    expect: str
    about: str


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _a(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


@cache
def known_facts() -> tuple[Fact, ...]:
    """Every fact, in a fixed order."""
    out: list[Fact] = []

    def add(answer: str, expect: str, about: str, *questions: str) -> None:
        out.append(Fact(questions, answer, expect, about))

    for country, city in facts.CAPITALS.items():
        add(
            f"The capital of {country} is {city}.", city, f"the capital of {country}", f"What is the capital of {country}?",
            f"Which city is the capital of {country}?", f"Tell me the capital of {country}.", f"Name the capital of {country}.",
            f"What's the capital of {country}?",
        )  # fmt: skip
        add(
            f"{city} is the capital of {country}.", country, f"the country of {city}", f"Of which country is {city} the capital?",
            f"Which country has the capital {city}?", f"{city} is the capital of which country?",
        )  # fmt: skip
    for number, (element, symbol) in enumerate(facts.ELEMENTS.items(), 1):
        add(
            f"The chemical symbol of {element} is {symbol}.", symbol, f"the chemical symbol of {element}",
            f"What is the chemical symbol of {element}?", f"What is the symbol of {element}?", f"Which symbol does {element} have?",
            f"What's the chemical symbol for {element}?",
        )  # fmt: skip
        add(
            f"{symbol} is the chemical symbol of {element}.", element, f"the element {symbol}",
            f"Which element has the symbol {symbol}?", f"What element is {symbol}?", f"Which element is {symbol}?",
        )  # fmt: skip
        if number <= facts.NUMBERED_ELEMENTS:
            add(
                f"The atomic number of {element} is {number}.", str(number), f"the atomic number of {element}",
                f"What is the atomic number of {element}?", f"Tell me the atomic number of {element}.",
            )  # fmt: skip
    for word, other in facts.OPPOSITES.items():
        for one, two in ((word, other), (other, word)):
            add(
                f"The opposite of {one} is {two}.", two, f"the opposite of {one}", f"What is the opposite of {one}?",
                f"Give me the opposite of {one}.", f"Tell me the opposite of {one}.", f"What is the opposite of the word {one}?",
            )  # fmt: skip
    for language, table in (("French", facts.FRENCH), ("German", facts.GERMAN), ("Spanish", facts.SPANISH)):
        for word, other in table.items():
            add(
                f"The {language} word for {word} is {other}.", other, f"the {language} word for {word}",
                f"What is the {language} word for {word}?", f"What is {word} in {language}?", f"How do you say {word} in {language}?",
                f"Translate {word} into {language}.",
            )  # fmt: skip
    for thing, colour in facts.COLOURS_OF.items():
        add(
            f"{_upper(thing)} is {colour}.", colour, f"the colour of {thing}", f"What colour is {thing}?", f"What color is {thing}?",
            f"Which colour does {thing} have?",
        )  # fmt: skip
    for animal, young in facts.YOUNG.items():
        add(
            f"A young {animal} is called {_a(young)}.", young, f"the name of a young {animal}", f"What is a young {animal} called?",
            f"What do you call a young {animal}?", f"What is a baby {animal} called?",
        )  # fmt: skip
    for animal, sound in facts.SOUNDS.items():
        add(f"{_upper(_a(animal))} {sound}.", sound, f"the sound of {_a(animal)}", f"What sound does {_a(animal)} make?",
            f"Which sound does {_a(animal)} make?")  # fmt: skip
    for word, plural in facts.PLURALS.items():
        add(f"The plural of {word} is {plural}.", plural, f"the plural of {word}", f"What is the plural of {word}?",
            f"Give me the plural of {word}.", f"What is the plural of the word {word}?")  # fmt: skip
    for word, past in facts.PAST.items():
        add(f"The past tense of {word} is {past}.", past, f"the past tense of {word}", f"What is the past tense of {word}?",
            f"Give me the past tense of {word}.")  # fmt: skip
    for thing, kind in facts.KINDS.items():
        add(f"{_upper(thing)} is {kind}.", kind.split(" ", 1)[-1], f"what {thing} is", f"What is {thing}?",
            f"What kind of thing is {thing}?")  # fmt: skip
    for names, what in ((DAYS, "day"), (MONTHS, "month")):
        for i, name in enumerate(names):
            after, before = names[(i + 1) % len(names)], names[i - 1]
            add(f"{after} comes after {name}.", after, f"the {what} after {name}", f"Which {what} comes after {name}?",
                f"What {what} comes after {name}?", f"What comes after {name}?")  # fmt: skip
            add(f"{before} comes before {name}.", before, f"the {what} before {name}", f"Which {what} comes before {name}?",
                f"What {what} comes before {name}?", f"What comes before {name}?")  # fmt: skip
    for question, answer in facts.SINGLE.items():
        add(f"{answer}.", f"{answer}.", question, question)
    return tuple(out)


def fact_turn(rng: random.Random) -> tuple[Turn, str]:
    """A question about a known fact, and what must appear in the reply."""
    fact = rng.choice(known_facts())
    question = rng.choice(fact.questions)
    subject = f'the question "{question}"' if fact.about.endswith("?") else fact.about
    thinking = (
        "A fact that I know.",
        f"This is about {subject}.",
        f'The user asks: "{question}" This is about {fact.about if subject == fact.about else "a fact"}. I know that fact. {fact.answer}',
    )
    return Turn(question, fact.answer, thinking), fact.expect


def small_turn(rng: random.Random) -> tuple[Turn, str]:
    """Small talk, and the reply."""
    questions, answer = rng.choice(facts.SMALL_TALK)
    question = rng.choice(questions)
    polite = "This is small talk. I answer politely."
    return Turn(question, answer, ("Small talk.", polite, f'The user says: "{question}" {polite}')), answer


def any_turn(rng: random.Random) -> tuple[Turn, str]:
    return small_turn(rng) if rng.random() < 0.3 else fact_turn(rng)


def chat(rng: random.Random, options: Options) -> Conversation:
    """One to five turns of small talk and facts; the last is asked."""
    turns = [any_turn(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 5)))]
    return build(
        rng, "chat", options, [turn for turn, _ in turns], {"turns": len(turns), "expect": turns[-1][1]}, lead=system_messages(rng, 0.25)
    )  # fmt: skip


def check_chat(c: Conversation, reply: dict[str, Any]) -> bool:
    """The fact (or for small talk the whole answer) appears in the reply."""
    return appears(c.meta["expect"], reply.get("content") or "")


# ---- refer


@dataclass(frozen=True)
class Trait:
    """Something the user tells: values, ways to tell it, the answer to telling it, ways to ask for it, and the answer."""

    name: str
    values: tuple[str, ...]
    tell: tuple[str, ...]
    reply: str
    ask: tuple[str, ...]
    answer: str


TRAITS = (
    Trait("name", NAMES, ("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}.", "I am called {}."),
          "Nice to meet you, {}!",
          ("What is my name?", "Do you remember my name?", "What am I called?", "Who am I?"), "Your name is {}."),
    Trait("city", PLACES, ("I live in {}.", "My home is in {}.", "I am from {}."), "{} is a nice place.",
          ("Where do I live?", "In which city do I live?", "Which city is my home?"), "You live in {}."),
    Trait("job", JOBS, ("I work as a {}.", "My job is {}.", "By profession I am a {}."), "That is a good job.",
          ("What is my job?", "What do I work as?", "What is my profession?"), "You work as a {}."),
    Trait("colour", COLOURS, ("My favourite colour is {}.", "I like the colour {} most."), "{} is a nice colour.",
          ("What is my favourite colour?", "Which colour do I like most?"), "Your favourite colour is {}."),
    Trait("food", FOODS, ("My favourite food is {}.", "I like to eat {} most."), "That sounds tasty.",
          ("What is my favourite food?", "What do I like to eat most?"), "Your favourite food is {}."),
    Trait("sport", SPORTS, ("My favourite sport is {}.", "The sport I like most is {}."), "That is a fine sport.",
          ("What is my favourite sport?", "Which sport do I like most?"), "Your favourite sport is {}."),
    Trait("pet", PETS, ("I have a {}.", "My pet is a {}."), "How nice to have a pet.",
          ("What pet do I have?", "Which pet do I have?", "What is my pet?"), "Your pet is a {}."),
    Trait("pet name", PET_NAMES, ("My pet is called {}.", "The name of my pet is {}."), "{} is a nice name for a pet.",
          ("What is my pet called?", "What is the name of my pet?"), "Your pet is called {}."),
    Trait("age", tuple(str(n) for n in range(18, 90)), ("I am {} years old.", "My age is {}."), "Thank you, I will remember that.",
          ("How old am I?", "What is my age?"), "You are {} years old."),
    Trait("friend", NAMES, ("My best friend is {}.", "The name of my best friend is {}."), "It is good to have friends.",
          ("Who is my best friend?", "What is the name of my best friend?"), "Your best friend is {}."),
    Trait("number", tuple(str(n) for n in range(100, 1000)), ("My lucky number is {}.", "Please remember the number {}."),
          "I will remember {}.",
          ("What is my number?", "Which number did I tell you?"), "Your number is {}."),
)  # fmt: skip


def refer(rng: random.Random, options: Options) -> Conversation:
    """The user tells things about himself among other turns, and asks for one of them; or asks what was asked or answered before."""
    if rng.random() < 0.12:
        return _refer_back(rng, options)
    while True:
        traits = rng.sample(TRAITS, rng.randint(1, 5))
        told = [(trait, rng.choice(trait.values)) for trait in traits]
        asked, value = rng.choice(told)
        if reserved(f"refer {asked.name} {value} {len(told)}") == options.held_out and len({v for _, v in told}) == len(told):
            break
    turns: list[Turn] = []
    while told:
        group, told = told[: (size := rng.choice((1, 1, 1, 2, 3)))], told[size:]
        question = " ".join(rng.choice(trait.tell).format(v) for trait, v in group)
        answer = group[0][0].reply.format(_upper(group[0][1])) if len(group) == 1 else "Thank you, I will remember that."
        turns.append(_told(question, answer))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        turns.insert(rng.randint(0, len(turns)), any_turn(rng)[0])
    question = rng.choice(asked.ask)
    answer = asked.answer.format(value)
    thinking = (f"The user told me: {value}.", f"The user told me the {asked.name}: {value}.",
                f'The user asks: "{question}" The user told me the {asked.name} earlier. It is {value}.')  # fmt: skip
    turns.append(Turn(question, answer, thinking))
    text = "\n".join(turn.question for turn in turns)
    others = [v for v in asked.values if v != value and v in text and appears(v, text)]
    return build(rng, "refer", options, turns, {"turns": len(turns), "trait": asked.name, "expect": value, "others": others},
                 lead=system_messages(rng, 0.1))  # fmt: skip


def _told(question: str, answer: str) -> Turn:
    return Turn(question, answer, ("I note it.", "The user tells me something. I note it.",
                f'The user says: "{question}" The user tells me something. I note it.'))  # fmt: skip


def _refer_back(rng: random.Random, options: Options) -> Conversation:
    turns = [fact_turn(rng)[0] for _ in range(rng.randint(1, 4))]
    first = rng.random() < 0.5
    if rng.random() < 0.5:
        question = rng.choice(("What was my first question?", "What did I ask first?") if first else
                              ("What was my last question?", "What did I ask before?"))  # fmt: skip
        value = turns[0 if first else -1].question
        content = f'You asked: "{value}"'
    else:
        question = rng.choice(("What was your first answer?", "Repeat your first answer.") if first else
                              ("What was your last answer?", "Repeat your last answer.", "Please say that again."))  # fmt: skip
        value = content = turns[0 if first else -1].content
    which = "first" if first else "last"
    thinking = (f"I look at the {which} turn.", f"The {which} turn counts. It says: {value}", f'The user asks: "{question}" '
                f"The {which} turn counts. It says: {value}")  # fmt: skip
    turns.append(Turn(question, content, thinking))
    return build(rng, "refer", options, turns, {"turns": len(turns), "trait": "turn", "expect": value, "others": []})


def check_refer(c: Conversation, reply: dict[str, Any]) -> bool:
    """The value appears and no other value of its kind does."""
    content = reply.get("content") or ""
    return says(content, c.meta["expect"], c.meta["others"])

