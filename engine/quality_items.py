"""What the quality bench asks: held-out exercises of the demo's tasks, long texts with many questions each, and held-out prose."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from forebay.engine.quality_ask import QualityError
from forebay.engine.quality_unseen import unseen_text
from forebay.model.chat import ChatCodec
from forebay.model.demo.tasks import TASKS, Conversation, Effort, Options, check, check_arguments

QUESTIONS = 10  # most questions about one text
TOKENS_PER_QUESTION = 200  # of the text
EFFORT: Effort = 75  # what a request that names none gets
HELD_OUT = "held_out.txt"
DOCUMENT_END = "\f"  # between the documents of held_out.txt


@dataclass(frozen=True)
class Exercises:
    """Where exercises come from and how replies are judged.

    Attributes:
        draw: a conversation of a task.
        check: whether a reply is right; for `tools` that the right tools are called.
        check_arguments: whether the calls are right, arguments included.
        unseen: questions about one text of held-out prose; the arguments are its length in tokens and how many.
        prose: held-out documents.
    """

    draw: Callable[[str, random.Random, Options], Conversation]
    check: Callable[[Conversation, dict[str, Any]], bool]
    check_arguments: Callable[[Conversation, dict[str, Any]], bool]
    unseen: Callable[[random.Random, int, int], list[Conversation]]
    prose: Callable[[], list[str]]


def demo_exercises() -> Exercises:
    def unseen(rng: random.Random, length: int, count: int) -> list[Conversation]:
        return unseen_text(rng, held_out_prose(), length, count, EFFORT)

    return Exercises(lambda task, rng, options: TASKS[task](rng, options), check, check_arguments, unseen, held_out_prose)


@cache
def _prose() -> tuple[str, ...]:
    file = files("forebay.model.demo.tasks") / HELD_OUT
    if not file.is_file():
        raise QualityError(f"there is no held-out prose: {file} is missing")
    found = tuple(text.strip("\n") for text in file.read_text("utf-8").split(DOCUMENT_END) if text.strip())
    if not found:
        raise QualityError(f"there is no held-out prose: {file} is empty")
    return found


def held_out_prose() -> list[str]:
    """Documents that training never saw.

    Raises:
        QualityError: the package lacks them. Other prose would give figures that mean something else.
    """
    return list(_prose())


def single(exercises: Exercises, task: str, count: int, seed: int, *, effort: Effort | None = EFFORT) -> list[Conversation]:
    """`count` held-out conversations of a task; the same for the same seed, whatever the effort."""
    rng = random.Random(f"{seed} {task}")
    options = Options(effort=effort, held_out=True)
    return [exercises.draw(task, rng, options) for _ in range(count)]


def questions_by_text(length: int, count: int, least: int) -> list[int]:
    """How many of `count` questions are asked about each text of `length` tokens: as evenly as can be, about `least` texts or more."""
    texts = min(count, max(least, -(-count // questions_in(length))))
    return [count // texts + (number < count % texts) for number in range(texts)]


def questions_in(length: int) -> int:
    """How many questions a text is drawn with; whether all of them are asked or not, the text is the same."""
    return max(1, min(QUESTIONS, length // TOKENS_PER_QUESTION))


def recall_text(exercises: Exercises, codec: ChatCodec, length: int, number: int, seed: int) -> list[Conversation]:
    """All questions about a held-out text. Their prompts begin alike and have about `length` tokens.

    It is drawn twice: the first time shows by how much the prompt of a single question is too short.
    """
    options = Options(length=length, effort=EFFORT, held_out=True, questions=questions_in(length))
    drawn = f"{seed} recall {length} {number}"
    group = apart(exercises.draw("recall", random.Random(drawn), options), options.questions)
    short = length - len(codec.encode(group[0].body).token_ids)
    if options.questions > 1 and short > 0:
        group = apart(exercises.draw("recall", random.Random(drawn), replace(options, length=length + short)), options.questions)
    return group


def unseen_recall(exercises: Exercises, codec: ChatCodec, length: int, number: int, seed: int) -> list[Conversation]:
    """As `recall_text`, in prose that training never saw."""
    drawn, count = f"{seed} unseen {length} {number}", questions_in(length)
    group = exercises.unseen(random.Random(drawn), length, count)
    short = length - len(codec.encode(group[0].body).token_ids)
    return exercises.unseen(random.Random(drawn), length + short, count)


def item_key(text: int, conversation: Conversation) -> str:
    """Tells a question from others of the same plan; the same in every mode."""
    return f"{text} {zlib.crc32(json.dumps(conversation.body, sort_keys=True).encode()):08x}"


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


def calls_parse(reply: dict[str, Any]) -> bool:
    """Whether there are calls and the arguments of every one are a JSON object."""
    calls = reply.get("tool_calls") or ()
    try:
        return bool(calls) and all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    except ValueError:
        return False


def record_parses(conversation: Conversation, reply: dict[str, Any]) -> bool:
    """Whether the content is a JSON object with every key that the request's schema requires."""
    required = conversation.body["response_format"]["json_schema"]["schema"]["required"]
    try:
        value = json.loads(reply.get("content") or "")
    except ValueError:
        return False
    return isinstance(value, dict) and all(key in value for key in required)
