"""What a task makes: a chat request without its answer, the reference answer, and what an evaluation groups by."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Effort = int | Literal["none"]
Message = dict[str, Any]
T = TypeVar("T")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question of the user.",
    "You are the Forebay demo.",
    "Be polite and exact.",
)
NAMED_EFFORTS: tuple[Effort, ...] = ("none", "none", 10, 50, 75, 75, 75, 100, 100)
TRIES = 200
DIRECT = "Direct."  # all the reasoning of an effort below 20


@dataclass(frozen=True)
class Conversation:
    """One exercise.

    Attributes:
        task: a key of TASKS.
        body: an OpenAI chat-completions body without the final answer: messages, tools?, response_format?, and reasoning_effort
            (1..100, or "none" for no thinking). It may also say drop_thinking.
        answer: the reference assistant message: content, reasoning_content? (exactly with thinking), tool_calls?
        meta: what an evaluation groups by and what `check` needs; plain JSON values.
    """

    task: str
    body: dict[str, Any]
    answer: dict[str, Any]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What to draw.

    Attributes:
        length: tokens of the prompt, by the demo's tokenizer; met within 5 % by recall and quote, and roughly by lookup. None is short.
        depth: place of the fact or sentence that is asked last in its text, 0 (start) to 1 (end); None draws it.
        effort: 1..100 or "none"; None draws it.
        held_out: draw from the items that training never sees: facts of recall, sentences to quote, values of tool arguments, sums, lists,
            records. Shared are what can only be known by heart, and questions of `refer` about earlier turns.
        questions: asked one after the other in one conversation, the earlier ones with their answers. Only recall, quote and lookup.
        at_once: facts, sentences or entries that each of these questions asks for; None draws it for each, as training does.
        earlier_reasoning: with thinking, keep the reasoning of earlier turns in the prompt (drop_thinking false).
    """

    length: int | None = None
    depth: float | None = None
    effort: Effort | None = None
    held_out: bool = False
    questions: int = 1
    at_once: int | None = 1
    earlier_reasoning: bool = False


@dataclass
class Turn:
    """A question with its answer. `thinking` has the reasoning for efforts 20-49, 50-79 and 80-100."""

    question: str
    content: str
    thinking: tuple[str, str, str]
    calls: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, effort: Effort) -> Message:
        """The assistant message at `effort`."""
        message: Message = {"role": "assistant", "content": self.content}
        if effort != "none":
            message["reasoning_content"] = reasoning(effort, self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def reasoning(effort: int, thinking: Sequence[str]) -> str:
    """The text of `effort` out of three that grow."""
    return DIRECT if effort < 20 else thinking[0 if effort < 50 else 1 if effort < 80 else 2]


def draw_effort(rng: random.Random, options: Options) -> Effort:
    if options.effort is not None:
        return options.effort
    return rng.choice(NAMED_EFFORTS) if rng.random() < 0.65 else rng.randint(1, 100)


def reserved(key: str) -> bool:
    """Whether an item is kept from training; one in ten is."""
    return zlib.crc32(key.encode()) % 10 == 0


def draw(rng: random.Random, options: Options, make: Callable[[random.Random], tuple[str, T]]) -> T:
    """Draw (key, item) until the key is on the side that the options ask for, or it seems that so few items have no other side."""
    for _ in range(TRIES):
        key, item = make(rng)
        if reserved(key) == options.held_out:
            break
    return item


def appears(value: str, text: str) -> bool:
    """Whether `value` stands in `text` as whole words, whatever the case."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def says(text: str, value: str, others: Sequence[str]) -> bool:
    """Whether `value` appears and none of `others` does."""
    return appears(value, text) and not any(appears(other, text) for other in others)


def says_each(texts: Sequence[str], values: Sequence[str], others: Sequence[str]) -> bool:
    """Whether each of `texts` says the value of its place, and no other of the values and none of `others`."""
    every = {*values, *others}
    return len(texts) == len(values) and all(says(text, v, [*(every - {v})]) for text, v in zip(texts, values, strict=True))


def system_messages(rng: random.Random, share: float = 0.15) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < share else []


def build(
    rng: random.Random,
    task: str,
    options: Options,
    turns: Sequence[Turn],
    meta: dict[str, Any],
    *,
    lead: Sequence[Message] = (),
    effort: Effort | None = None,
    extra: dict[str, Any] | None = None,
) -> Conversation:
    """A conversation that asks the last of `turns` after the others and their answers.

    Args:
        lead: messages before the first turn.
        effort: drawn if None.
        extra: further fields of the body.
    """
    effort = draw_effort(rng, options) if effort is None else effort
    messages = [*lead]
    for turn in turns[:-1]:
        messages += [{"role": "user", "content": turn.question}, turn.answer(effort)]
    messages.append({"role": "user", "content": turns[-1].question})
    body: dict[str, Any] = {"messages": messages, "reasoning_effort": effort, **(extra or {})}
    if options.earlier_reasoning and effort != "none" and len(turns) > 1:
        body["drop_thinking"] = False
    return Conversation(task, body, turns[-1].answer(effort), {"effort": effort, **meta})
