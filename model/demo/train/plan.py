"""The recipe: what is trained on, in which order, for how long."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.model.demo.train.stream import LONG_ROWS, MEDIUM_ROWS, SHORT_ROWS

SEED = 41
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
WARM_UP = 100  # steps
DECAY_FROM = 0.65  # share of all steps after which the learning rate falls to zero, linearly


@dataclass(frozen=True)
class Phase:
    """Steps of one kind.

    Attributes:
        steps: how many.
        length: tokens of each row. rows: rows of a step.
        topk: entries each row may attend to; the configuration's from the bounded phase on.
        bounded: the decoder half runs only for the last window before an answer and the answer, as in serving (bounded decoder replay).
        mix: shares of the tasks.
        prompt_weight, text_weight: loss weights of the tokens of prompts, and of documentation text.
        index_weight: of the indexer's loss.
    """

    name: str
    steps: int
    length: int
    rows: int
    topk: int
    bounded: bool
    mix: dict[str, float]
    prompt_weight: float
    text_weight: float
    index_weight: float


PHASES = (
    Phase("dense", 2000, 512, 176, 512, False, SHORT_ROWS, 0.1, 0.5, 1.0),
    Phase("reach", 900, 2048, 40, 512, False, MEDIUM_ROWS, 0.05, 0.5, 1.0),
    Phase("sparse", 500, 4096, 20, 128, False, MEDIUM_ROWS, 0.02, 0.5, 1.0),
    Phase("bounded", 800, 8192, 10, 64, True, LONG_ROWS, 0.0, 0.0, 1.0),
    Phase("far", 150, 16384, 5, 64, True, LONG_ROWS, 0.0, 0.0, 1.0),
)


def rate(step: int) -> float:
    """Learning rate at a step, as a share of the peak: linear warm-up, constant, linear to zero."""
    steps = sum(phase.steps for phase in PHASES)
    falling = (steps - step) / max(1, steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP, falling)
