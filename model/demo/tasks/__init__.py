"""Exercises of the demo network: each task makes conversations with reference answers, and `check` judges replies.

The training data (model/demo/train) and the quality bench draw from the same tasks, on different sides of a split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from forebay.model.demo.tasks.arithmetic import arithmetic, check_arithmetic
from forebay.model.demo.tasks.chat import chat, check_chat, check_refer, refer
from forebay.model.demo.tasks.conversation import Conversation, Effort, Options
from forebay.model.demo.tasks.lists import check_copy, check_list, copy, reverse, sort
from forebay.model.demo.tasks.lookup import check_lookup, lookup
from forebay.model.demo.tasks.quote import check_quote, quote
from forebay.model.demo.tasks.recall import check_recall, recall
from forebay.model.demo.tasks.structured import check_json, json_object
from forebay.model.demo.tasks.tools import check_arguments, check_tools, tools

__all__ = ["TASKS", "Conversation", "Effort", "Options", "check", "check_arguments"]

TASKS: dict[str, Callable[[random.Random, Options], Conversation]] = {
    "chat": chat,
    "refer": refer,
    "recall": recall,
    "quote": quote,
    "lookup": lookup,
    "copy": copy,
    "sort": sort,
    "reverse": reverse,
    "arithmetic": arithmetic,
    "json": json_object,
    "tools": tools,
}
_CHECKS: dict[str, Callable[[Conversation, dict[str, Any]], bool]] = {
    "chat": check_chat,
    "refer": check_refer,
    "recall": check_recall,
    "quote": check_quote,
    "lookup": check_lookup,
    "copy": check_copy,
    "sort": check_list,
    "reverse": check_list,
    "arithmetic": check_arithmetic,
    "json": check_json,
    "tools": check_tools,
}


def check(c: Conversation, reply: dict[str, Any]) -> bool:
    """Whether `reply`, an assistant message as the server gives it, is right. Each task's check says what that means."""
    return _CHECKS[c.task](c, reply)
