"""The quality bench: what a model gets right, and what each approximation of the server takes from that.

It asks held-out exercises of the demo's tasks, greedily, through the engine that serves requests, in several modes (quality_modes.py).
The same exercises are asked in every mode. Every share comes with its numbers of trials and of texts and with a 95 % interval, and every
one of another mode with its difference from the default's about the same exercises (quality_stats.py).
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from forebay.engine.llm import LLM
from forebay.engine.quality_ask import Answer, Asker, QualityError
from forebay.engine.quality_items import Exercises, item_key, questions_by_text, recall_text, single
from forebay.engine.quality_modes import BOUNDED, DENSE, EXACT, MODES, REPLAYED, SHUFFLED, WIDE, WINDOW_ONLY, Mode, running
from forebay.engine.quality_stats import Difference, Interval, Trial, by_text, difference, interval, wilson
from forebay.engine.quality_text import PIECE, Excerpt, compare, distributions, excerpts, joined, plain_loss
from forebay.model.demo.tasks import Conversation
from forebay.model.errors import ConfigError

PARTS = {
    "text": "prediction of held-out prose, and how far each mode is from exact",
    "recall": "recall by length and depth in the default mode",
    "drift": "recall after 0, 1, 4, 16 and 64 replay boundaries",
    "modes": "recall in every other mode",
    "tasks": "the other tasks in several modes",
    "effort": "arithmetic by reasoning effort",
}
TASK_NAMES = ("chat", "refer", "quote", "lookup", "copy", "sort", "reverse", "arithmetic", "json", "tools")
COMPARED_TASKS = ("refer", "quote", "lookup", "arithmetic", "json", "tools")  # asked in other modes too
EFFORTS = (10, 25, 50, 75, 100)
ARITHMETIC_EFFORT = 100
DEPTHS = 5  # equal parts of a text
COMPARE: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}
ANSWER_ROOM = 640  # tokens of the context kept for a question and its answer
# Speeds by which the remaining time is estimated before anything is measured, tokens per second on one CPU core.
PREFILL_SPEED, DECODE_SPEED = 2000.0, 300.0
SLOWER = {EXACT.name: 2.0, DENSE.name: 5.0, SHUFFLED.name: 1.2}

Report = Callable[[str, float, float], None]  # what is being done; work done and work in all, in estimated seconds
Keep = Callable[["Results"], None]  # what has been measured so far


@dataclass(frozen=True)
class Plan:
    """How much is asked.

    Attributes:
        samples: questions per share. `few`: of those whose interval may be wider, and of those about long texts.
        texts: least number of long texts that they are about, where there are as many questions.
        lengths: of texts in the default mode, tokens. `long`: from here on few questions are enough.
        compared: of texts in other modes. `single`: in the dense mode, which takes long, and in those that are expected to fail.
        drift: length of the conversations that are resumed again and again, at as many boundaries as `boundaries` says.
        task_modes: of the part `tasks`.
        excerpts, prompt, follows: of held-out prose: how many, tokens before and tokens predicted.
        plain: most tokens of it that are read from the start.
    """

    samples: int = 100
    few: int = 50
    texts: int = 5
    long: int = 16_384
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    compared: tuple[int, ...] = (4096, 16384)
    single: tuple[int, ...] = (4096,)
    drift: int = 8192
    boundaries: tuple[int, ...] = (1, 4, 16, 64)
    task_modes: tuple[Mode, ...] = (BOUNDED, EXACT, REPLAYED[0], WIDE, DENSE)
    excerpts: int = 3
    prompt: int = 4352
    follows: int = 256
    plain: int = 16_384

    @classmethod
    def full(cls, samples: int) -> Plan:
        return cls(samples=samples, few=max(1, samples // 2))

    @classmethod
    def quick(cls, samples: int) -> Plan:
        return cls(
            samples=samples, few=max(1, samples // 2), lengths=(512, 2048), compared=(2048,), single=(2048,), drift=2048,
            boundaries=(1, 4, 16), task_modes=(BOUNDED,), excerpts=1, prompt=1280, follows=128, plain=2048,
        )  # fmt: skip


@dataclass
class Score:
    """How often something was right.

    Attributes:
        part, what, mode: of PARTS, a task or an aspect of one, a mode.
        length, depth, effort: what it is grouped by; depth is a fifth of the text, 0 first.
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
        return interval(self.trials) if self.trials else Interval(*wilson(self.right, self.n), "wilson")

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


@dataclass(frozen=True)
class Job:
    """A piece of work in one mode; `cost` is its estimated seconds."""

    part: str
    mode: Mode
    label: str
    cost: float
    run: Callable[[Asker], None]


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


class Instrument:
    """Measures one model, which must have been opened for chat, and with room for the plan's longest text."""

    def __init__(self, llm: LLM, exercises: Exercises, plan: Plan, seed: int = 1) -> None:
        self.llm, self.exercises, self.plan, self.seed = llm, exercises, plan, seed
        self.results = Results()
        self._drawn: dict[tuple[int, int], list[Conversation]] = {}
        self._reference: list[Tensor] = []
        self._effort_limit: int | None = None
        self._planned: set[tuple[str, int, int]] = set()
        self._recalled: dict[tuple[str, int, int], list[Score]] = {}

    def measure(self, parts: Iterable[str], report: Report, keep: Keep = lambda results: None) -> Results:
        """Run the jobs of `parts` (of PARTS), reporting before each one; after each one `keep` gets what there is.

        Raises:
            QualityError: an answer does not rest on what its mode names. What was measured before is in `results`.
        """
        jobs = self.jobs(parts)
        total = sum(job.cost for job in jobs)
        done = 0.0
        for job in jobs:
            report(job.label, done, total)
            began = time.perf_counter()
            with running(self.llm, job.mode):
                job.run(Asker(self.llm, job.mode))
            self.results.seconds[job.label] = time.perf_counter() - began
            done += job.cost
            self.results.complete = job is jobs[-1]
            keep(self.results)
        report("done", total, total)
        return self.results

    def jobs(self, parts: Iterable[str]) -> list[Job]:
        """The work of some parts.

        Raises:
            ConfigError: there is no such part.
        """
        makers = {
            "text": self._text_jobs, "recall": self._recall_jobs, "drift": self._drift_jobs, "modes": self._mode_jobs,
            "tasks": self._task_jobs, "effort": self._effort_jobs,
        }  # fmt: skip
        self._planned.clear()
        chosen = list(parts)
        if unknown := [part for part in chosen if part not in makers]:
            raise ConfigError(f"bench: --only has no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
        return [job for part in makers if part in chosen for job in makers[part]()]

    # Which work there is

    def _text_jobs(self) -> Iterator[Job]:
        plan = self.plan
        tokens = plan.excerpts * (plan.prompt + 2 * plan.follows)
        for mode in (EXACT, BOUNDED, *self._replayed(), WIDE, DENSE, WINDOW_ONLY, SHUFFLED):
            extra = min(plan.plain, len(self._excerpts[1])) if mode is EXACT else 0
            cost = _seconds(mode, tokens * (2.0 if mode.boundaries > 4 else 1.0) + extra, 0)
            yield Job("text", mode, f"text, {mode.name}", cost, self._text)

    def _recall_jobs(self) -> Iterator[Job]:
        for length in dict.fromkeys(self._length(length) for length in self.plan.lengths):
            yield self._recall_job("recall", BOUNDED, length, self._count(length))

    def _drift_jobs(self) -> Iterator[Job]:
        length = self._length(self.plan.drift)
        for mode in (BOUNDED, *self._replayed()):
            yield self._recall_job("drift", mode, length, self._count(length))  # the default's is known if `recall` ran

    def _mode_jobs(self) -> Iterator[Job]:
        for mode in (EXACT, REPLAYED[0], WIDE, DENSE, WINDOW_ONLY, SHUFFLED):
            lengths = self.plan.single if mode in (DENSE, WINDOW_ONLY, SHUFFLED) else self.plan.compared
            for length in dict.fromkeys(self._length(length) for length in lengths):
                count = self._count(length) if mode is REPLAYED[0] else self.plan.few
                yield self._recall_job("modes", mode, length, max(1, count // 2) if mode is DENSE else count)

    def _task_jobs(self) -> Iterator[Job]:
        for mode in self.plan.task_modes:
            count = self.plan.samples if mode is BOUNDED else self.plan.few
            for task in TASK_NAMES if mode is BOUNDED else COMPARED_TASKS:
                cost = _seconds(BOUNDED, count * 200, count * 50)
                yield Job("tasks", mode, f"{task}, {mode.name}", cost, partial(self._task, task, count))

    def _effort_jobs(self) -> Iterator[Job]:
        for effort in EFFORTS:
            cost = _seconds(BOUNDED, self.plan.samples * 60, self.plan.samples * effort * 0.8)
            yield Job("effort", BOUNDED, f"arithmetic at effort {effort}", cost, partial(self._effort, effort))

    def _recall_job(self, part: str, mode: Mode, length: int, count: int) -> Job:
        texts = len(questions_by_text(length, count, self.plan.texts))
        again = 550 if mode is EXACT else 350 if not mode.boundaries else 150
        grown = 64 * mode.boundaries * 2
        cost = _seconds(mode, texts * (length + grown) + count * again, count * 35)
        if (mode.name, length, count) in self._planned:
            cost = 0.0
        self._planned.add((mode.name, length, count))
        return Job(part, mode, f"{part}, {mode.name}, {length:,} tokens", cost, partial(self._recall, part, length, count))

    def _replayed(self) -> list[Mode]:
        return [mode for mode in REPLAYED if mode.boundaries in self.plan.boundaries]

    # The work

    def _recall(self, part: str, length: int, count: int, asker: Asker) -> None:
        mode, groups = asker.mode.name, self._texts(length, count)
        if (known := self._recalled.get((mode, length, count))) is not None:  # another part has asked the same
            self.results.scores += [replace(score, part=part) for score in known]
            return
        whole = Score(part, "recall", mode, length)
        by_depth = [Score(part, "recall", mode, length, depth) for depth in range(DEPTHS)]
        for text, (group, answers) in enumerate(zip(groups, asker.ask(groups), strict=True)):
            if answers is None:
                whole.too_short += len(group)
                continue
            for conversation, answer in zip(group, answers, strict=True):
                depth = min(DEPTHS - 1, int(conversation.meta["depth"] * DEPTHS))
                for score in (whole, by_depth[depth]):
                    score.add(answer, self.exercises.check(conversation, answer.reply), text, item_key(text, conversation))
        found = self._recalled[mode, length, count] = [whole, *(score for score in by_depth if score.n)]
        self.results.scores += found

    def _task(self, task: str, count: int, asker: Asker) -> None:
        effort = ARITHMETIC_EFFORT if task == "arithmetic" else 75
        items = single(self.exercises, task, count, self.seed, effort=effort)
        score = partial(Score, "tasks", mode=asker.mode.name)
        scores = {"tools": score("tools: answer"), "call": score("tools: name")} if task == "tools" else {task: score(task)}
        parsed, exact = score("tools: calls parse"), score("tools: arguments")
        for number, (conversation, answers) in enumerate(zip(items, asker.ask([[item] for item in items]), strict=True)):
            calls = task == "tools" and conversation.meta["stage"] == "call"
            mine = scores["call" if calls else task]
            if answers is None:
                mine.too_short += 1
                continue
            answer, key = answers[0], item_key(number, conversation)
            mine.add(answer, self.exercises.check(conversation, answer.reply), number, key)
            if calls:
                parsed.add(answer, calls_parse(answer.reply), number, key)
                exact.add(answer, self.exercises.check_arguments(conversation, answer.reply), number, key)
        self.results.scores += [*scores.values(), *((parsed, exact) if task == "tools" else ())]

    def _effort(self, effort: int, asker: Asker) -> None:
        # One limit for the whole curve: with one by the reference's length an answer would be cut off the sooner the lower its effort is.
        self._effort_limit = self._effort_limit or max(asker.limit(c) for other in EFFORTS for c in self._sums(other))
        score = Score("effort", "arithmetic", asker.mode.name, effort=effort, limit=self._effort_limit)
        items = self._sums(effort)
        for number, (conversation, answers) in enumerate(zip(items, asker.ask([[c] for c in items], self._effort_limit), strict=True)):
            assert answers is not None
            score.add(answers[0], self.exercises.check(conversation, answers[0].reply), number, item_key(number, conversation))
        self.results.scores.append(score)

    def _text(self, asker: Asker) -> None:
        parts, whole = self._excerpts
        found = distributions(asker, parts)
        mode = {"mode": asker.mode.name, "boundaries": asker.mode.boundaries}
        row: dict[str, Any] = {**mode, "excerpts": len(parts), "prompt": self.plan.prompt}
        if found is None:
            self.results.text.append({**row, "too_short": True})
            return
        if asker.mode is EXACT:
            self._reference = found
            loss, count, written = plain_loss(self.llm, whole[: self.plan.plain], parts[0].skip)
            nll, counted = loss / count, {"tokens": count, "bytes": written, "piece": PIECE}
            self.results.plain = {**counted, "nll": nll, "perplexity": math.exp(nll), "bits_per_byte": loss / math.log(2) / written}
        prediction = compare(parts, found, self._reference)
        low, high = wilson(prediction.agree, prediction.tokens)
        agreement = {"top1": prediction.agree / prediction.tokens, "top1_low": low, "top1_high": high}
        self.results.text.append({**row, **asdict(prediction), "perplexity": prediction.perplexity, **agreement})

    # What is asked

    def _texts(self, length: int, count: int) -> list[list[Conversation]]:
        """Long texts with `count` questions in all; fewer of them are some of the same questions about some of the same texts."""
        groups = []
        for number, questions in enumerate(questions_by_text(length, count, self.plan.texts)):
            if (length, number) not in self._drawn:
                codec = self.llm.engine.codec
                assert codec is not None
                self._drawn[length, number] = recall_text(self.exercises, codec, length, number, self.seed)
            groups.append(self._drawn[length, number][:questions])
        return groups

    def _length(self, asked: int) -> int:
        """Tokens of a text that is to have `asked`, as far as the context has room."""
        room = self.llm.engine.max_context - ANSWER_ROOM
        if room < min(asked, 512):
            raise QualityError(f"a context of {self.llm.engine.max_context} tokens leaves no room for texts of {asked}")
        return min(asked, room)

    def _count(self, length: int) -> int:
        """Questions about texts of a length."""
        return self.plan.samples if length < self.plan.long else self.plan.few

    def _sums(self, effort: int) -> list[Conversation]:
        return single(self.exercises, "arithmetic", self.plan.samples, self.seed, effort=effort)

    @cached_property
    def _excerpts(self) -> tuple[list[Excerpt], list[int]]:
        ids = joined(self.llm, self.exercises.prose())
        return excerpts(self.llm, ids, prompt=self.plan.prompt, follows=self.plan.follows, count=self.plan.excerpts), ids


def calls_parse(reply: dict[str, Any]) -> bool:
    """Whether there are calls and the arguments of every one are a JSON object."""
    calls = reply.get("tool_calls") or ()
    try:
        return bool(calls) and all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    except ValueError:
        return False


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
        need(f"recall at {length:,} tokens", share("recall", length=length), asked)
        need(f"recall at {length:,} tokens, after one bounded replay", share("modes", mode=REPLAYED[0].name, length=length), asked)
    by_effort = {score.effort: score for score in results.of("effort")}
    low, high = by_effort.get(10), by_effort.get(100)
    if low and high and low.n and high.n:
        need("arithmetic at effort 100", high.share, "≥ 0.9")
        # Clearly: the intervals do not touch.
        gap = wilson(high.right, high.n)[0] - wilson(low.right, low.n)[1]
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


def _seconds(mode: Mode, prefill: float, decode: float) -> float:
    return prefill / PREFILL_SPEED * SLOWER.get(mode.name, 1.0) + decode / DECODE_SPEED
