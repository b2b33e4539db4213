"""How sure the shares of the quality bench are: intervals of single shares and of differences between two modes.

Questions about one text are no independent trials: what a model gets wrong it gets wrong about a whole text. So where some texts have
several questions, the spread between texts counts: a t interval with one degree of freedom less than there are texts, with the
cluster-robust error of a ratio. Texts that are all right, or all wrong, show no spread; then each text counts as one trial of a Wilson
interval, which is conservative, and so it is with a single text. No interval is narrower than that of independent trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

CONFIDENCE = 0.95
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
    """95 % interval of a share.

    `method` is "wilson" (each trial has a text of its own), "t" (by the spread between texts) or "wilson by text" (one trial per text).
    """

    low: float
    high: float
    method: Literal["wilson", "t", "wilson by text"]


@dataclass(frozen=True)
class Difference:
    """How much more often a mode is right than another about the same questions.

    Attributes:
        value: difference of the shares; `low` to `high` is its 95 % interval.
        n, texts: questions that both were asked, and the texts they are about.
        gained, lost: questions that only this mode, and only the other one, gets right.
        p: of McNemar's exact test, which takes questions as independent.
        method: of the interval: "wald" (Agresti and Min; each question has a text of its own), "t" (by the spread between texts) or
            "wald by text" (one question per text, where no question differs, all differ alike, or there is one text).
    """

    value: float
    low: float
    high: float
    n: int
    texts: int
    gained: int
    lost: int
    p: float
    method: Literal["wald", "t", "wald by text"]


def wilson(right: float, count: int) -> tuple[float, float]:
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


def interval(groups: Sequence[tuple[int, int]]) -> Interval:
    """Of the share of right answers in one or more texts, each (trials, right ones)."""
    n, right, texts = sum(count for count, _ in groups), sum(some for _, some in groups), len(groups)
    low, high = wilson(right, n)
    if texts == n:
        return Interval(low, high, "wilson")
    if texts == 1 or right in (0, n):
        return Interval(*wilson(right * texts / n, texts), "wilson by text")
    least, most = spread(groups)
    return Interval(max(0.0, min(low, least)), min(1.0, max(high, most)), "t")


def difference(mine: Sequence[Trial], other: Sequence[Trial]) -> Difference | None:
    """Of two modes' answers to the questions that both were asked; None if there are none."""
    known = {trial.item: trial.right for trial in other}
    pairs = [(trial.text, int(trial.right) - int(known[trial.item])) for trial in mine if trial.item in known]
    if not pairs:
        return None
    n = len(pairs)
    gained, lost = sum(change > 0 for _, change in pairs), sum(change < 0 for _, change in pairs)
    groups: dict[int, tuple[int, int]] = {}
    for text, change in pairs:
        count, total = groups.get(text, (0, 0))
        groups[text] = (count + 1, total + change)
    texts, value = len(groups), (gained - lost) / n
    low, high = _wald(gained, lost, n)
    method: Literal["wald", "t", "wald by text"] = "wald"
    if texts < n and (texts == 1 or gained == lost == 0 or n in (gained, lost)):
        (low, high), method = _wald(gained * texts / n, lost * texts / n, texts), "wald by text"
    elif texts < n:
        least, most = spread(list(groups.values()))
        low, high, method = max(-1.0, min(low, least)), min(1.0, max(high, most)), "t"
    return Difference(value, min(low, value), max(high, value), n, texts, gained, lost, mcnemar(gained, lost), method)


def _wald(gained: float, lost: float, n: int) -> tuple[float, float]:
    """Agresti and Min 2005: half a question more in each of the four cells keeps the interval open where nothing differs."""
    middle = (gained - lost) / (n + 2)
    half = Z * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (n + 2)) / (n + 2)
    return max(-1.0, middle - half), min(1.0, middle + half)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p of the exact test: how likely a fair coin is to fall at least so unevenly for the questions that differ."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def clustered(groups: Sequence[tuple[int, float]]) -> tuple[float, float | None]:
    """Mean of values in groups, each (number of values, their sum), and its cluster-robust standard error; None with one group."""
    n, total, count = sum(size for size, _ in groups), sum(some for _, some in groups), len(groups)
    mean = total / n
    if count == 1:
        return mean, None
    return mean, math.sqrt(count / (count - 1) * sum((some - mean * size) ** 2 for size, some in groups)) / n


def spread(groups: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """95 % t interval of the mean of values in two or more groups, each (number of values, their sum)."""
    mean, error = clustered(groups)
    assert error is not None
    half = student(len(groups) - 1) * error
    return mean - half, mean + half


@cache
def student(freedom: int) -> float:
    """The t within which 95 % of Student's distribution with `freedom` degrees of freedom lie."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < tan(angle) sqrt(freedom)), Abramowitz and Stegun 26.7.3 and 26.7.4."""
    odd = freedom % 2
    cosine, term, total = math.cos(angle), math.cos(angle) if odd else 1.0, 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine * cosine
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
