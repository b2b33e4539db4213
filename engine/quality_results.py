"""What the quality bench has measured: shares with their trials, their differences from the default mode, and the demo's bars."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from forebay.engine.quality_ask import Answer
from forebay.engine.quality_modes import BOUNDED, MODES, REPLAYED, SHUFFLED, WINDOW_ONLY
from forebay.engine.quality_stats import Difference, Interval, Trial, by_text, difference, interval, wilson

PARTS = {
    "text": "prediction of held-out prose, and how far each mode is from exact",
    "recall": "recall by length and depth in the default mode",
    "drift": "recall after 0, 1, 4, 16 and 64 replay boundaries",
    "modes": "recall in every other mode",
    "tasks": "the other tasks in several modes, each after a long lead",
    "effort": "arithmetic by reasoning effort in several modes, after a long lead",
}
RECALL, UNSEEN = "recall", "recall in unseen filler"
DEPTHS = 5  # equal parts of a text
COMPARE: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}


@dataclass
class Score:
    """How often something was right.

    Attributes:
        part, what, mode: of PARTS, a task or an aspect of one, a mode.
        length, depth, effort: what it is grouped by; depth is one of DEPTHS parts of the text, 0 first.
        n, right: trials, and those that were right. `trials`: each of them, where they are known.
        limit: most tokens of each answer, where it is one for all.
        tokens: generated in all. `unfinished`: answers cut off at their limit.
        prompt_tokens: in all. `lineage`: the least and the most replays behind an answer.
        too_short: conversations left out because they have too few blocks for the mode's boundaries.
    """

    part: str
    what: str
    mode: str
    length: int | None = None
    depth: int | None = None
    effort: int | None = None
    n: int = 0
    right: int = 0
    tokens: int = 0
    unfinished: int = 0
    prompt_tokens: int = 0
    lineage: tuple[int, int] | None = None
    too_short: int = 0
    limit: int | None = None
    trials: list[Trial] = field(default_factory=list, repr=False)

    def add(self, answer: Answer, right: bool, text: int, item: str) -> None:
        """Count an answer to the question `item` about text number `text`."""
        self.trials.append(Trial(text, item, right))
        self.n += 1
        self.right += right
        self.tokens += answer.tokens
        self.unfinished += not answer.ended
        self.prompt_tokens += answer.prompt_tokens
        low, high = self.lineage or (answer.lineage, answer.lineage)
        self.lineage = (min(low, answer.lineage), max(high, answer.lineage))

    @property
    def share(self) -> float | None:
        return self.right / self.n if self.n else None

    @property
    def texts(self) -> int:
        """Different texts that the trials are about."""
        return len({trial.text for trial in self.trials}) if self.trials else self.n

    @property
    def prompt_length(self) -> float:
        """Mean number of tokens of a prompt."""
        return self.prompt_tokens / max(1, self.n)

    @property
    def interval(self) -> Interval:
        """Of the share; there must be a trial."""
        return interval(by_text(self.trials)) if self.trials else Interval(*wilson(self.right, self.n), "wilson")

    def figures(self) -> dict[str, Any]:
        """For JSON: without what does not apply, with share, interval and means."""
        hidden = ("tokens", "prompt_tokens", "trials")
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        out: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if self.n:
            means = {"mean_tokens": self.tokens / self.n, "mean_prompt_tokens": self.prompt_length}
            out |= {"share": self.share, **asdict(self.interval), "texts": self.texts, **means}
            if self.texts < self.n:
                out["by_text"] = by_text(self.trials)
        return out


@dataclass(frozen=True)
class Bar:
    """Something asked of the demo: `value` is to be as `asked` says."""

    what: str
    value: float
    asked: str
    reached: bool


@dataclass
class Results:
    """What has been measured: `text` has one row per mode, `plain` the loss of the held-out text. `complete`: all that was to be."""

    scores: list[Score] = field(default_factory=list)
    text: list[dict[str, Any]] = field(default_factory=list)
    plain: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    complete: bool = False

    def of(self, part: str, **wanted: Any) -> Iterator[Score]:
        """Scores of a part with these attributes; depth None unless asked for."""
        wanted = {"depth": None, **wanted}
        return (s for s in self.scores if s.part == part and all(getattr(s, name) == value for name, value in wanted.items()))

    def against_default(self, score: Score) -> Difference | None:
        """How a score differs from the default mode's about the same questions; None where that was not asked them."""
        if score.mode == BOUNDED.name or score.depth is not None:
            return None
        same = {"what": score.what, "mode": BOUNDED.name, "length": score.length, "effort": score.effort}
        known = {trial.item: trial for part in PARTS for other in self.of(part, **same) for trial in other.trials}
        return difference(score.trials, list(known.values()))


def bars(results: Results) -> list[Bar]:
    """What is asked of the demo, as far as it was measured."""
    found: list[Bar] = []

    def need(what: str, value: float | None, asked: str) -> None:
        if value is not None:
            sign, bound = asked.split()
            found.append(Bar(what, value, asked, COMPARE[sign](value, float(bound))))

    def share(part: str, **wanted: Any) -> float | None:
        return next((score.share for score in results.of(part, **wanted)), None)

    for length, asked in ((4096, "≥ 0.95"), (16384, "≥ 0.9")):
        need(f"recall at {length:,} tokens", share("recall", what=RECALL, mode=BOUNDED.name, length=length), asked)
        need(f"recall at {length:,} tokens, after one bounded replay", share("modes", mode=REPLAYED[0].name, length=length), asked)
    by_effort = {score.effort: score for score in results.of("effort", mode=BOUNDED.name)}
    low, high = by_effort.get(10), by_effort.get(100)
    if low and high and low.n and high.n:
        need("arithmetic at effort 100", high.share, "≥ 0.9")
        # Clearly: the intervals do not touch.
        gap = high.interval.low - low.interval.high
        need("arithmetic at effort 100 above effort 10, between intervals", gap, "≥ 0")
        need("tokens at effort 10 / at 100", low.tokens / low.n / (high.tokens / high.n), "≤ 0.5")
    need("tools: calls parse", share("tasks", what="tools: calls parse", mode=BOUNDED.name), "≥ 0.95")
    need("tools: right name", share("tasks", what="tools: name", mode=BOUNDED.name), "≥ 0.95")
    for mode in (WINDOW_ONLY, SHUFFLED):
        for score in results.of("modes", mode=mode.name):
            need(f"recall, {mode.name}, {score.length:,} tokens", score.share, "< 0.3")
    return found


def figures(results: Results) -> dict[str, Any]:
    """Everything measured, for JSON."""
    return {
        "complete": results.complete,
        "modes": {mode.name: mode.says for mode in MODES},
        "perplexity": results.plain,
        "text": results.text,
        "scores": [_with_difference(score.figures(), results.against_default(score)) for score in results.scores],
        "bars": [asdict(bar) for bar in bars(results)],
        "seconds": {label: round(seconds, 2) for label, seconds in results.seconds.items()},
    }


def _with_difference(figures: dict[str, Any], found: Difference | None) -> dict[str, Any]:
    return figures if found is None else {**figures, "against_default": asdict(found)}
