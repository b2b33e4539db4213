"""Task `arithmetic`: a chain of additions and subtractions, worked out in steps whose size depends on the effort."""

from __future__ import annotations

import random
import re
from typing import Any

from forebay.model.demo.tasks.conversation import Conversation, Options, Turn, build, draw_effort, reserved

QUESTIONS = ("What is {}?", "Calculate {}.", "{} = ?", "How much is {}?", "Compute {}.", "What is the result of {}?")
LIMIT = 999
CHAIN = (5, 8)  # terms of the chains that the bench asks for


def _chain(rng: random.Random, terms: int) -> list[int]:
    """Signed terms whose partial sums stay in 0..LIMIT."""
    chain = [rng.randint(1, 99)]
    total = chain[0]
    while len(chain) < terms:
        term = rng.randint(1, 99) * rng.choice((1, -1))
        if 0 <= total + term <= LIMIT:
            chain.append(term)
            total += term
    return chain


def _pair(rng: random.Random) -> list[int]:
    """Two terms, the first up to three digits, for practice."""
    first = rng.randint(0, LIMIT) if rng.random() < 0.7 else rng.randint(0, 99)
    while True:
        second = rng.randint(1, 99) * rng.choice((1, -1))
        if 0 <= first + second <= LIMIT:
            return [first, second]


def _signed(term: int) -> str:
    return f"{'-' if term < 0 else '+'} {abs(term)}"


def written(chain: list[int]) -> str:
    return " ".join([str(chain[0]), *(_signed(term) for term in chain[1:])])


def working(chain: list[int], effort: int) -> str:
    """From 80: each step with what it starts from. From 50: one running line. Below: the same, two terms a step."""
    total, steps = chain[0], []
    if effort >= 80:
        for term in chain[1:]:
            steps.append(f"{total} {_signed(term)} = {total + term}")
            total += term
        return "\n".join(steps)
    size = 1 if effort >= 50 else 2
    for i in range(1, len(chain), size):
        terms = chain[i : i + size]
        steps.append(f"{' '.join(_signed(term) for term in terms)} = {total + sum(terms)}")
        total += sum(terms)
    return f"{chain[0]} " + ", ".join(steps)


def arithmetic(rng: random.Random, options: Options) -> Conversation:
    """Chains of 5 to 8 terms; in training also shorter ones."""
    terms = rng.randint(*CHAIN) if options.held_out or rng.random() < 0.7 else rng.choice((2, 2, 2, 3, 4))
    while True:
        chain = _pair(rng) if terms == 2 else _chain(rng, terms)
        if reserved(written(chain)) == options.held_out:
            break
    effort = draw_effort(rng, options)
    result = sum(chain)
    thinking = (working(chain, 20), working(chain, 50), working(chain, 80))
    turn = Turn(rng.choice(QUESTIONS).format(written(chain)), f"The answer is {result}.", thinking)
    return build(rng, "arithmetic", options, [turn], {"terms": terms, "expect": str(result)}, effort=effort)


def check_arithmetic(c: Conversation, reply: dict[str, Any]) -> bool:
    """The last number of the content is the result."""
    numbers = re.findall(r"-?\d+", (reply.get("content") or "").replace(",", ""))
    return bool(numbers) and numbers[-1] == c.meta["expect"]
