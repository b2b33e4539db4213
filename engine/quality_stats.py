"""How sure the shares of the quality bench are: intervals of single shares and of differences between two modes.

Questions about one text are no independent trials: what a model gets wrong it gets wrong about a whole text. So the texts are what is drawn
again in a bootstrap, with all their questions. No interval here is narrower than the one that independent trials would have, so that a
handful of texts that agree does not look like certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

LEAST_TEXTS = 5  # fewer say nothing about how much texts differ
RESAMPLES = 4000
SEED = 20_261_129
Z = 1.959964  # 95 % of a normal distribution


@dataclass(frozen=True)
class Trial:
    """One question: the number of its text (that of the question itself where each has its own), what tells it apart, and whether the
    answer was right."""

    text: int
    item: str
    right: bool


@dataclass(frozen=True)
class Interval:
    """95 % interval of a share. `method` is "bootstrap" (over texts) or "wilson" (as if all trials were independent)."""

    low: float
    high: float
    method: Literal["bootstrap", "wilson"]


@dataclass(frozen=True)
class Difference:
    """How much more often a mode is right than another about the same questions.

    Attributes:
        value: difference of the shares; `low` to `high` is its 95 % interval.
        n, texts: questions that both were asked, and the texts they are about.
        gained, lost: questions that only this mode, and only the other one, gets right.
        p: of McNemar's exact test, which takes questions as independent.
        method: of the interval: "bootstrap" over texts, or "wald" (Agresti and Min) as if all questions were independent.
    """

    value: float
    low: float
    high: float
    n: int
    texts: int
    gained: int
    lost: int
    p: float
    method: Literal["bootstrap", "wald"]


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share of `right` in `count` > 0 independent trials."""
    share, z2 = right / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return min(max(0.0, middle - half), share), max(min(1.0, middle + half), share)  # rounding must not put it outside


def by_text(trials: Sequence[Trial]) -> list[tuple[int, int]]:
    """(trials, right ones) of every text, in the order in which texts come first."""
    found: dict[int, tuple[int, int]] = {}
    for trial in trials:
        n, right = found.get(trial.text, (0, 0))
        found[trial.text] = (n + 1, right + trial.right)
    return list(found.values())


def interval(trials: Sequence[Trial]) -> Interval:
    """Of the share of right answers in one or more trials. A bootstrap over texts where some have several trials and there are enough."""
    groups = by_text(trials)
    low, high = wilson(sum(trial.right for trial in trials), len(trials))
    if not LEAST_TEXTS <= len(groups) < len(trials):
        return Interval(low, high, "wilson")
    least, most = _bootstrap(tuple(groups))
    return Interval(min(low, least), max(high, most), "bootstrap")


def difference(mine: Sequence[Trial], other: Sequence[Trial]) -> Difference | None:
    """Of two modes' answers to the questions that both were asked; None if there are none."""
    known = {trial.item: trial.right for trial in other}
    pairs = [(trial.text, int(trial.right) - int(known[trial.item])) for trial in mine if trial.item in known]
    if not pairs:
        return None
    n = len(pairs)
    gained, lost = sum(change > 0 for _, change in pairs), sum(change < 0 for _, change in pairs)
    # Agresti and Min 2005: half a question more in each of the four cells keeps the interval open where nothing differs.
    middle = (gained - lost) / (n + 2)
    half = Z * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (n + 2)) / (n + 2)
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    groups: dict[int, tuple[int, int]] = {}
    for text, change in pairs:
        count, total = groups.get(text, (0, 0))
        groups[text] = (count + 1, total + change)
    method: Literal["bootstrap", "wald"] = "wald"
    if LEAST_TEXTS <= len(groups) < n:
        least, most = _bootstrap(tuple(groups.values()))
        low, high, method = min(low, least), max(high, most), "bootstrap"
    value = (gained - lost) / n
    return Difference(value, min(low, value), max(high, value), n, len(groups), gained, lost, mcnemar(gained, lost), method)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p of the exact test: how likely a fair coin is to fall at least so unevenly for the questions that differ."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


@lru_cache(4096)  # the figures are made again after every piece of work
def _bootstrap(groups: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    """Percentiles of sum(second) / sum(first) when groups are drawn again. The same for the same groups."""
    counts, totals = np.array(groups, dtype=np.float64).T
    draws = np.random.default_rng(SEED).integers(len(groups), size=(RESAMPLES, len(groups)))
    low, high = np.percentile(totals[draws].sum(1) / counts[draws].sum(1), (2.5, 97.5))
    return float(low), float(high)
