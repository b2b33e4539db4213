"""The quality bench: what a model gets right, and what each approximation of the server takes from that.

It asks held-out exercises of the demo's tasks, greedily, through the engine that serves requests, in several modes (quality_modes.py).
The same exercises are asked in every mode. Prompts of most tasks are too short for replays, so that a long lead stands before each of
them (quality_lead.py). All exercises of a task share one lead, and what is said of a task is said of exercises after this lead. Every
share comes with its numbers of trials and of texts and with a 95 % interval, and every one of another mode with its difference from the
default's about the same exercises (quality_stats.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from forebay.engine.llm import LLM
from forebay.engine.quality_ask import Asker, QualityError
from forebay.engine.quality_items import (
    Exercises,
    calls_parse,
    item_key,
    questions_by_text,
    recall_text,
    record_parses,
    single,
    unseen_recall,
)  # fmt: skip
from forebay.engine.quality_lead import lead
from forebay.engine.quality_modes import BOUNDED, DENSE, EXACT, REPLAYED, SHUFFLED, WIDE, WINDOW_ONLY, Mode, running
from forebay.engine.quality_results import DEPTHS, PARTS, RECALL, UNSEEN, Results, Score
from forebay.engine.quality_text import PIECE, Excerpt, compare, distributions, excerpts, joined, plain_loss
from forebay.model.demo.tasks import Conversation
from forebay.model.errors import ConfigError

TASK_NAMES = ("chat", "refer", "quote", "lookup", "copy", "sort", "reverse", "arithmetic", "json", "tools")
COMPARED_TASKS = ("arithmetic", "json", "tools")  # asked in other modes too
EFFORTS = (10, 25, 50, 75, 100)
ARITHMETIC_EFFORT = 100
ANSWER_ROOM = 640  # tokens of the context kept for a question and its answer
# Speeds by which the remaining time is estimated before anything is measured, tokens per second on one CPU core.
PREFILL_SPEED, DECODE_SPEED = 2000.0, 300.0
SLOWER = {EXACT.name: 3.0, DENSE.name: 5.0, SHUFFLED.name: 1.2}

Report = Callable[[str, float, float], None]  # what is being done; work done and work in all, in estimated seconds
Keep = Callable[[Results], None]  # what has been measured so far


@dataclass(frozen=True)
class Plan:
    """How much is asked.

    Attributes:
        samples: questions per share. `few`: of those whose interval may be wider, and of those about long texts. Half of the few are asked
            after a lead in modes that replay exactly, where each question takes long.
        texts: least number of long texts that they are about, where there are as many questions.
        lengths: of texts in the default mode, tokens. `long`: from here on few questions are enough.
        compared: of texts in other modes. `single`: in the dense mode, which takes long, and in those that are expected to fail.
        drift: length of the conversations that are resumed again and again, at as many boundaries as `boundaries` says.
        unseen: length of the texts whose filler training never saw, tokens.
        lead: blocks that stand before each exercise of the parts `tasks` and `effort`, at least.
        task_modes, effort_modes: of these parts.
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
    unseen: int = 4096
    lead: int = 65
    task_modes: tuple[Mode, ...] = (BOUNDED, EXACT, *REPLAYED, WIDE, DENSE, WINDOW_ONLY)
    effort_modes: tuple[Mode, ...] = (BOUNDED, EXACT, REPLAYED[-1])
    excerpts: int = 5
    prompt: int = 4352
    follows: int = 160
    plain: int = 16_384

    @classmethod
    def full(cls, samples: int) -> Plan:
        return cls(samples=samples, few=max(1, samples // 2))

    @classmethod
    def quick(cls, samples: int) -> Plan:
        return cls(
            samples=samples, few=max(1, samples // 2), lengths=(512, 2048), compared=(2048,), single=(2048,), drift=2048,
            boundaries=(1, 4, 16), unseen=2048, lead=17, task_modes=(BOUNDED, REPLAYED[2]), effort_modes=(BOUNDED, REPLAYED[2]),
            excerpts=3, prompt=1280, follows=64, plain=2048,
        )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A piece of work in one mode; `cost` is its estimated seconds."""

    part: str
    mode: Mode
    label: str
    cost: float
    run: Callable[[Asker], None]


class Instrument:
    """Measures one model, which must have been opened for chat, and with room for the plan's longest text."""

    def __init__(self, llm: LLM, exercises: Exercises, plan: Plan, seed: int = 1) -> None:
        self.llm, self.exercises, self.plan, self.seed = llm, exercises, plan, seed
        self.results = Results()
        self._drawn: dict[tuple[str, int, int], list[Conversation]] = {}
        self._leads: dict[str, list[int]] = {}
        self._reference: list[Tensor] = []
        self._effort_limit: int | None = None
        self._planned: set[tuple[str, str, int, int]] = set()
        self._recalled: dict[tuple[str, str, int, int], list[Score]] = {}
        self._summed: dict[tuple[str, int, int], Score] = {}

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
            QualityError: the context, the block pool or the held-out prose is too small for it.
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
        plan, size = self.plan, self.llm.engine.manager.layout.block_tokens
        parts, _ = self._excerpts
        self._need(max(plan.prompt + plan.follows, min(PIECE, plan.plain)) + 1, "the part text")
        held = len(parts) * (-(-(plan.prompt + plan.follows) // size) + 1) * size  # all excerpts stay cached
        if held > (capacity := self.llm.engine.manager.capacity_tokens):
            raise QualityError(f"the part text needs a block pool of {held:,} tokens (cache.kv_tokens); this one has {capacity:,}")
        tokens = len(parts) * (plan.prompt + 2 * plan.follows)
        for mode in (EXACT, BOUNDED, *self._replayed(), WIDE, DENSE, WINDOW_ONLY, SHUFFLED):
            extra = min(plan.plain, len(self._excerpts[1])) if mode is EXACT else 0
            cost = _seconds(mode, tokens * (2.0 if mode.boundaries > 4 else 1.0) + extra, 0)
            yield Job("text", mode, f"text, {mode.name}", cost, self._text)

    def _recall_jobs(self) -> Iterator[Job]:
        for length in dict.fromkeys(self._length(length) for length in self.plan.lengths):
            yield self._recall_job("recall", BOUNDED, length, self._count(length))
        length = self._length(self.plan.unseen)
        yield self._recall_job("recall", BOUNDED, length, self._count(length), UNSEEN)

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
            count = self._after_lead(mode)
            for task in TASK_NAMES if mode is BOUNDED else COMPARED_TASKS:
                cost = self._lead_cost(mode, count, 150, 60)
                if task == "arithmetic":
                    self._planned.add((mode.name, f"effort {ARITHMETIC_EFFORT}", 0, count))
                yield Job("tasks", mode, f"{task}, {mode.name}", cost, partial(self._task, task, count))

    def _effort_jobs(self) -> Iterator[Job]:
        for mode in self.plan.effort_modes:
            count = self._after_lead(mode)
            for effort in EFFORTS:
                known = (mode.name, f"effort {effort}", 0, count) in self._planned
                cost = 0.0 if known else self._lead_cost(mode, count, 60, effort * 0.8)
                yield Job("effort", mode, f"arithmetic at effort {effort}, {mode.name}", cost, partial(self._effort, effort, count))

    def _after_lead(self, mode: Mode) -> int:
        """Exercises asked after a lead."""
        return self.plan.samples if mode is BOUNDED else self.plan.few if mode.boundaries else max(1, self.plan.few // 2)

    def _lead_cost(self, mode: Mode, count: int, prompt: int, answer: float) -> float:
        """Estimated seconds of `count` exercises after a lead."""
        tokens = self.plan.lead * self.llm.engine.manager.layout.block_tokens
        self._need(tokens + 2 * ANSWER_ROOM, "an exercise after its lead")  # the last conversation of a lead is whole
        return _seconds(mode, tokens * (2 if mode.boundaries > 4 else 1) + count * (prompt + _again(mode)), count * answer)

    def _recall_job(self, part: str, mode: Mode, length: int, count: int, what: str = RECALL) -> Job:
        texts = len(questions_by_text(length, count, self.plan.texts))
        grown = 64 * mode.boundaries * 2
        cost = _seconds(mode, texts * (length + grown) + count * _again(mode), count * 35)
        if (mode.name, what, length, count) in self._planned:
            cost = 0.0
        self._planned.add((mode.name, what, length, count))
        name = part if what == RECALL else what
        return Job(part, mode, f"{name}, {mode.name}, {length:,} tokens", cost, partial(self._recall, part, what, length, count))

    def _need(self, tokens: int, what: str) -> None:
        if tokens > (context := self.llm.engine.max_context):
            raise QualityError(f"{what} needs a context of {tokens:,} tokens; this one has {context:,} (the model, or cache.kv_tokens)")

    def _replayed(self) -> list[Mode]:
        return [mode for mode in REPLAYED if mode.boundaries in self.plan.boundaries]

    # The work

    def _recall(self, part: str, what: str, length: int, count: int, asker: Asker) -> None:
        mode, groups = asker.mode.name, self._texts(what, length, count)
        if (known := self._recalled.get((mode, what, length, count))) is not None:  # another part has asked the same
            self.results.scores += [replace(score, part=part) for score in known]
            return
        whole = Score(part, what, mode, length)
        by_depth = [Score(part, what, mode, length, depth) for depth in range(DEPTHS)]
        for text, (group, answers) in enumerate(zip(groups, asker.ask(groups), strict=True)):
            if answers is None:
                whole.too_short += len(group)
                continue
            for conversation, answer in zip(group, answers, strict=True):
                depth = min(DEPTHS - 1, int(conversation.meta["depth"] * DEPTHS))
                for score in (whole, by_depth[depth]):
                    score.add(answer, self.exercises.check(conversation, answer.reply), text, item_key(text, conversation))
        found = self._recalled[mode, what, length, count] = [whole, *(score for score in by_depth if score.n)]
        self.results.scores += found

    def _task(self, task: str, count: int, asker: Asker) -> None:
        if task == "arithmetic":
            self.results.scores.append(replace(self._sums(ARITHMETIC_EFFORT, count, asker), part="tasks", effort=None))
            return
        items = single(self.exercises, task, count, self.seed)
        score = partial(Score, "tasks", mode=asker.mode.name)
        scores = {"tools": score("tools: answer"), "call": score("tools: name")} if task == "tools" else {task: score(task)}
        parsed = score("tools: calls parse" if task == "tools" else "json: parses")
        exact = score("tools: arguments")
        (answers,) = asker.ask([items], lead=self._lead(task))
        for number, conversation in enumerate(items):
            calls = task == "tools" and conversation.meta["stage"] == "call"
            mine = scores["call" if calls else task]
            if answers is None:
                mine.too_short += 1
                continue
            answer, key = answers[number], item_key(number, conversation)
            mine.add(answer, self.exercises.check(conversation, answer.reply), number, key)
            if task == "json":
                parsed.add(answer, record_parses(conversation, answer.reply), number, key)
            if calls:
                parsed.add(answer, calls_parse(answer.reply), number, key)
                exact.add(answer, self.exercises.check_arguments(conversation, answer.reply), number, key)
        self.results.scores += [*scores.values(), *{"tools": (parsed, exact), "json": (parsed,)}.get(task, ())]

    def _effort(self, effort: int, count: int, asker: Asker) -> None:
        self.results.scores.append(self._sums(effort, count, asker))

    def _sums(self, effort: int, count: int, asker: Asker) -> Score:
        """Of arithmetic; part `tasks` has asked one of the efforts already."""
        if (known := self._summed.get((asker.mode.name, effort, count))) is not None:
            return known
        draw = partial(single, self.exercises, "arithmetic", seed=self.seed)
        # One limit for the whole curve: with one by the reference's length an answer would be cut off the sooner the lower its effort is.
        limit = self._effort_limit or max(asker.limit(c) for other in EFFORTS for c in draw(count=self.plan.samples, effort=other))
        self._effort_limit = limit
        score, items = Score("effort", "arithmetic", asker.mode.name, effort=effort, limit=limit), draw(count=count, effort=effort)
        (answers,) = asker.ask([items], limit, self._lead("arithmetic"))
        if answers is None:
            score.too_short = count
        for number, (conversation, answer) in enumerate(zip(items, answers or (), strict=answers is not None)):
            score.add(answer, self.exercises.check(conversation, answer.reply), number, item_key(number, conversation))
        self._summed[asker.mode.name, effort, count] = score
        return score

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
        if asker.mode is EXACT:  # itself, of which nothing is unsure
            prediction = replace(prediction, top1_low=1.0, top1_high=1.0)
        self.results.text.append({**row, **asdict(prediction), "perplexity": prediction.perplexity})

    # What is asked

    def _texts(self, what: str, length: int, count: int) -> list[list[Conversation]]:
        """Long texts with `count` questions in all; fewer of them are some of the same questions about some of the same texts."""
        draw = unseen_recall if what == UNSEEN else recall_text
        groups = []
        for number, questions in enumerate(questions_by_text(length, count, self.plan.texts)):
            if (what, length, number) not in self._drawn:
                codec = self.llm.engine.codec
                assert codec is not None
                self._drawn[what, length, number] = draw(self.exercises, codec, length, number, self.seed)
            groups.append(self._drawn[what, length, number][:questions])
        return groups

    def _lead(self, task: str) -> list[int]:
        """What stands before every exercise of a task, in every mode."""
        if task not in self._leads:
            least = self.plan.lead * self.llm.engine.manager.layout.block_tokens
            self._leads[task] = lead(self.exercises, self.llm.tokenizer, least, task, self.seed)
        return self._leads[task]

    def _length(self, asked: int) -> int:
        """Tokens of a text that is to have `asked`, as far as the context has room."""
        room = self.llm.engine.max_context - ANSWER_ROOM
        if room < min(asked, 512):
            raise QualityError(f"a context of {self.llm.engine.max_context} tokens leaves no room for texts of {asked}")
        return min(asked, room)

    def _count(self, length: int) -> int:
        """Questions about texts of a length."""
        return self.plan.samples if length < self.plan.long else self.plan.few

    @cached_property
    def _excerpts(self) -> tuple[list[Excerpt], list[int]]:
        ids = joined(self.llm, self.exercises.prose())
        return excerpts(self.llm, ids, prompt=self.plan.prompt, follows=self.plan.follows, count=self.plan.excerpts), ids


def _again(mode: Mode) -> int:
    """Tokens that are computed again where a prompt resumes, about."""
    return 550 if mode is EXACT else 350 if not mode.boundaries else 150


def _seconds(mode: Mode, prefill: float, decode: float) -> float:
    return prefill / PREFILL_SPEED * SLOWER.get(mode.name, 1.0) + decode / DECODE_SPEED
