"""What the quality bench asks: held-out exercises of the demo's tasks, long texts with many questions each, and held-out prose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from forebay.model.chat import ChatCodec
from forebay.model.demo.tasks import TASKS, Conversation, Effort, Options, check, check_arguments
from forebay.model.demo.tasks.filler import sentence

QUESTIONS = 20  # most questions about one text
TOKENS_PER_QUESTION = 200  # of the text
EFFORT: Effort = 75  # what a request that names none gets
DOCUMENT_END = "\f"  # between the documents of held_out.txt
SENTENCES = 1500  # of generated prose where there is no file


@dataclass(frozen=True)
class Exercises:
    """Where exercises come from and how replies are judged.

    Attributes:
        draw: a conversation of a task.
        check: whether a reply is right; for `tools` that the right tools are called.
        check_arguments: whether the calls are right, arguments included.
        prose: held-out documents.
    """

    draw: Callable[[str, random.Random, Options], Conversation]
    check: Callable[[Conversation, dict[str, Any]], bool]
    check_arguments: Callable[[Conversation, dict[str, Any]], bool]
    prose: Callable[[], list[str]]


def demo_exercises() -> Exercises:
    return Exercises(lambda task, rng, options: TASKS[task](rng, options), check, check_arguments, held_out_prose)


@cache
def _prose() -> tuple[str, ...]:
    file = files("forebay.model.demo.tasks") / "held_out.txt"
    if file.is_file():
        return tuple(text.strip("\n") for text in file.read_text("utf-8").split(DOCUMENT_END) if text.strip())
    rng = random.Random("held out")
    return tuple(" ".join(sentence(rng) for _ in range(SENTENCES // 10)) for _ in range(10))


def held_out_prose() -> list[str]:
    """Documents that training never saw."""
    return list(_prose())


def single(exercises: Exercises, task: str, count: int, seed: int, *, effort: Effort | None = EFFORT) -> list[Conversation]:
    """`count` held-out conversations of a task; the same for the same seed, whatever the effort."""
    rng = random.Random(f"{seed} {task}")
    options = Options(effort=effort, held_out=True)
    return [exercises.draw(task, rng, options) for _ in range(count)]


def recall_groups(exercises: Exercises, codec: ChatCodec, length: int, count: int, seed: int) -> list[list[Conversation]]:
    """At least `count` questions about held-out texts, by text. The prompts of one text begin alike and have about `length` tokens."""
    questions = max(1, min(QUESTIONS, length // TOKENS_PER_QUESTION, count))
    groups = []
    for number in range(-(-count // questions)):
        options = Options(length=length, effort=EFFORT, held_out=True, questions=questions)
        groups.append(_asked(exercises, codec, options, f"{seed} recall {length} {number}"))
    return groups


def _asked(exercises: Exercises, codec: ChatCodec, options: Options, seed: str) -> list[Conversation]:
    """The questions of one text. It is drawn twice: the first time shows by how much the prompt of a single question is too short."""
    assert options.length is not None
    group = apart(exercises.draw("recall", random.Random(seed), options), options.questions)
    short = options.length - len(codec.encode(group[0].body).token_ids)
    if options.questions > 1 and short > 0:
        group = apart(exercises.draw("recall", random.Random(seed), replace(options, length=options.length + short)), options.questions)
    return group


def apart(conversation: Conversation, questions: int) -> list[Conversation]:
    """Each of the last `questions` questions of a recall conversation as if it were the first, in the order in which they were asked.

    `meta` gets what the question expects, what it must not say, and the depth of its fact in the text.
    """
    messages = conversation.body["messages"]
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"][-questions:]
    answers = [messages[i + 1] for i in asked[:-1]] + [conversation.answer]
    first = asked[0]
    lead, break_, question = messages[first]["content"].rpartition("\n\n")
    texts = [question] + [messages[i]["content"] for i in asked[1:]]
    values = {conversation.meta["expect"], *conversation.meta["others"]}
    whole = "\n".join(message["content"] for message in messages[: first + 1])
    out = []
    for text, answer in zip(texts, answers, strict=True):
        what, _, value = answer["content"].removeprefix("The ").removesuffix(".").rpartition(" is ")
        depth = max(0, whole.find(f"{what} is {value}")) / len(whole)
        body = {**conversation.body, "messages": [*messages[:first], {**messages[first], "content": lead + break_ + text}]}
        meta = {**conversation.meta, "what": what, "expect": value, "others": sorted(values - {value}), "depth": depth}
        out.append(Conversation(conversation.task, body, answer, meta))
    return out
