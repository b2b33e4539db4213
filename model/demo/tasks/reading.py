"""Exercises about a long text: sentences planted in prose, and questions about them at the end. Tasks `recall` and `quote`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.model.demo.tasks.conversation import Conversation, Effort, Options, Turn, build
from forebay.model.demo.tasks.filler import passage, sizes

INTRODUCTIONS = ("", "Read this text.", "Here is a text.", "Read the text and answer the question.", "Remember what this text says.")
ACKNOWLEDGED = "I have read it."
TURN_TOKENS = 3  # markers around a turn
THINKING_TOKENS = 26  # what a prompt says about the effort


def about_text(
    rng: random.Random,
    task: str,
    options: Options,
    planted: Sequence[str],
    pinned: Mapping[str, float],
    turns: Sequence[Turn],
    *,
    length: int,
    effort: Effort,
    meta: dict[str, Any],
) -> Conversation:
    """The questions of `turns` after a text with the planted sentences, in the first question, in a turn of its own or in a system message.

    Args:
        pinned: where some of the planted sentences stand, 0 (start) to 1 (end); the others stand anywhere.
        length: tokens of the prompt; prose fills what the questions, their answers and the planted sentences leave of it.
    """
    style = rng.choice(("same", "same", "same", "apart", "system"))
    introduction = rng.choice(INTRODUCTIONS)
    spent = _tokens(turns, effort, options.earlier_reasoning) + sum(sizes([" " + text for text in planted]))
    spent += sum(sizes([introduction, ACKNOWLEDGED if style == "apart" else ""])) + (THINKING_TOKENS if effort != "none" else 0) + 4
    text = _woven(rng, passage(rng, length - spent), planted, pinned)
    if introduction:
        text = f"{introduction}\n\n{text}"

    asked, lead = list(turns), []
    if style == "system":
        lead = [{"role": "system", "content": text}]
    elif style == "apart":
        asked.insert(0, Turn(text, ACKNOWLEDGED, ("I read.", "I read the text.", "I read the text and remember what it says.")))
    else:
        first = turns[0]
        asked[0] = Turn(f"{text}\n\n{first.question}", first.content, first.thinking)
    return build(rng, task, options, asked, {"length": length, **meta}, lead=lead, effort=effort)


def listed(items: Sequence[str]) -> str:
    """Such as "a, b and c"."""
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def _tokens(turns: Sequence[Turn], effort: Effort, kept: bool) -> int:
    """Tokens of all turns but the last answer."""
    texts = [turn.question for turn in turns]
    for turn in turns[:-1]:
        answer = turn.answer(effort)
        texts += [answer["content"], answer.get("reasoning_content", "") if kept else ""]
    return sum(sizes(texts)) + TURN_TOKENS * len(turns) + 2 * (len(turns) - 1)


def _woven(rng: random.Random, sentences: Sequence[str], planted: Sequence[str], pinned: Mapping[str, float]) -> str:
    """The planted sentences among the others, cut into paragraphs."""
    placed = [((i + 0.5) / len(sentences), text) for i, text in enumerate(sentences)]
    placed += [(pinned.get(text, rng.random()), text) for text in planted]
    placed.sort(key=lambda item: item[0])
    out: list[str] = []
    for i, (_, text) in enumerate(placed):
        out.append(("" if not i else "\n\n" if rng.random() < 0.15 else " ") + text)
    return "".join(out)
