"""What stands before an exercise: other exercises with their answers, packed as rows of training are, so that replays happen before it."""

from __future__ import annotations

import random

from forebay.engine.quality_items import Exercises
from forebay.model.demo.tasks import TASKS, Options
from forebay.model.demo.tasks.render import Renderer
from forebay.model.tokenizer import Tokenizer


def lead(exercises: Exercises, tokenizer: Tokenizer, least: int, task: str, seed: int) -> list[int]:
    """Ids of at least `least` tokens for exercises of `task`: whole conversations, none of them held out, one after the other.

    They are of all tasks, as long as when no length is asked for, and of any effort. Each begins with the begin-of-sentence id and ends
    with the end-of-sentence id of its last answer. The same for the same seed.
    """
    rng, renderer = random.Random(f"{seed} lead {task}"), Renderer(tokenizer)
    ids: list[int] = []
    while len(ids) < least:
        ids += renderer.render(exercises.draw(rng.choice(tuple(TASKS)), rng, Options()))[0]
    return ids
