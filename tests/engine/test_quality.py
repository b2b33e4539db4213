"""The quality bench: what it counts, what its modes do, and that an answer rests on the replays that its mode names."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import TINY, fresh, greedy, prompt, same, tiny
from forebay.engine import quality, quality_items, quality_modes, quality_plot, quality_results, quality_stats
from forebay.engine.llm import LLM
from forebay.engine.quality import Instrument, Plan
from forebay.engine.quality_ask import Asker, QualityError, boundaries
from forebay.engine.quality_items import Exercises, apart, demo_exercises, questions_by_text, recall_text, unseen_recall
from forebay.engine.quality_lead import lead
from forebay.engine.quality_modes import BOUNDED, DENSE, EXACT, REPLAYED, SHUFFLED, WIDE, WINDOW_ONLY, Mode, running, wide_memory
from forebay.engine.quality_results import UNSEEN, Score
from forebay.engine.quality_stats import Trial, by_text, clustered, difference, interval, mcnemar, student, wilson
from forebay.engine.quality_text import Excerpt, compare, distributions, excerpts, plain_loss
from forebay.engine.quality_unseen import unseen_text
from forebay.engine.types import EngineError, Output, Request
from forebay.model.demo.tasks import TASKS, Conversation, Options, check
from forebay.model.demo.tasks.recall import LEADS
from forebay.model.demo.tasks.render import Renderer
from forebay.model.errors import ConfigError
from forebay.model.memory import CacheMemory
from noise_model import write_random
from tiered import settle, tiered

ROUNDED = Mode("rounded", "wide, but rounded first", memory=lambda served, config: wide_memory(served, config, rounds=True))


@pytest.fixture
def llm() -> LLM:
    model = fresh(tiny(chat=True, kv_tokens=16_384))
    assert model.engine.codec is not None
    return model


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random network says is of no interest."""
    monkeypatch.setattr("forebay.engine.quality_ask.ANSWER_TOKENS", (4, 6))


@contextmanager
def saying(llm: LLM, answers: dict[tuple[int, ...], list[int]]) -> Iterator[None]:
    """Instead of the network somebody answers who knows what to say to these prompts, whatever conversations stand before them."""
    runner, first = llm.engine.runner, llm.tokenizer.bos_id

    def run(rows: Any, record: Any = None) -> Any:
        wanted = [row.sequence for row in rows if row.wants_logits]
        logits = torch.zeros((len(wanted), llm.config.vocab_size))
        for place, sequence in enumerate(wanted):
            ids = list(sequence.request.prompt_ids)
            answer = answers.get(tuple(ids[len(ids) - 1 - ids[::-1].index(first) :]), [0])
            logits[place, answer[min(sequence.generated, len(answer) - 1)]] = 9.0
        return logits, [None] * len(rows)

    runner.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.run  # type: ignore[method-assign]


# Counting


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (95, 100, 0.88825, 0.97846), (1, 2, 0.09453, 0.90547)],
)
def test_intervals_are_wilsons(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == pytest.approx((low, high), abs=1e-5)


@given(st.integers(1, 400), st.data())
def test_share_lies_in_its_interval(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    low, high = wilson(right, count)
    assert 0 <= low <= right / count <= high <= 1


def trials(*texts: str) -> list[Trial]:
    """A text per string, a question per sign, right where it is "1"."""
    return [Trial(number, f"{number} {i}", sign == "1") for number, text in enumerate(texts) for i, sign in enumerate(text)]


def test_interval_is_that_of_texts_where_questions_share_them() -> None:
    def found(*texts: str) -> quality_stats.Interval:
        return interval(by_text(trials(*texts)))

    assert found(*"1111100000") == quality_stats.Interval(*wilson(5, 10), "wilson")
    mixed = found("1110", "1000", "1110", "1000", "1100")
    assert mixed.method == "t"  # texts at 3/4, 1/4, 3/4, 1/4 and 1/2: a t interval of five numbers, wider than that of 20 questions
    half = 2.776445 * math.sqrt(4 / 16 / 4 / 5)
    assert (mixed.low, mixed.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    uneven = found("10", *["11111111"] * 9)  # 73 of 74; a ratio's error
    mean, error = clustered([(2, 1), *[(8, 8)] * 9])
    assert mean == 73 / 74 and error == pytest.approx(math.sqrt(10 / 9 * ((1 - 2 * 73 / 74) ** 2 + 9 * (8 / 74) ** 2)) / 74)
    assert uneven.high == 1.0 and uneven.low == pytest.approx(min(wilson(73, 74)[0], mean - 2.262157 * error))
    alike = found(*["1010101010"] * 10)
    assert (alike.low, alike.high) == wilson(50, 100) and alike.method == "t"  # texts that agree do not make it narrower
    for sign, right in (("1111", 6), ("0000", 0)):
        assert found(*[sign] * 6) == quality_stats.Interval(*wilson(right, 6), "wilson by text")
    assert found("11111110") == quality_stats.Interval(*wilson(7 / 8, 1), "wilson by text")


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.70620), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (49, 2.00958)])
def test_t_is_students(freedom: int, value: float) -> None:
    assert student(freedom) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(("a", "b"), [(2, 2), (8, 2), (9, 1), (19, 1), (0.5, 0.5), (1.9, 0.1)])
def test_interval_covers_the_share_of_all_texts(a: float, b: float) -> None:
    """Ten texts with ten questions each, whose shares are beta distributed."""
    rng = random.Random(11)
    covered = 0
    for _ in range(600):
        shares = [rng.betavariate(a, b) for _ in range(10)]
        found = interval([(10, sum(rng.random() < share for _ in range(10))) for share in shares])
        covered += found.low <= a / (a + b) <= found.high
    assert covered >= 0.9 * 600


def test_difference_is_that_of_the_questions_both_were_asked() -> None:
    found = difference(trials("1111", "1100"), trials("1100", "1101", "1111"))
    assert found is not None
    assert (found.n, found.texts, found.gained, found.lost, found.method) == (8, 2, 2, 1, "t")
    assert found.value == pytest.approx(1 / 8) and found.low == -1.0 and found.high == 1.0  # two texts say next to nothing
    assert difference(trials("1"), []) is None
    same = difference(trials(*"1" * 50), trials(*"1" * 50))
    assert same is not None and same.value == 0.0 and -0.06 < same.low < -0.02 and same.high == -same.low  # never a certain zero
    assert same.method == "wald"
    shared = difference(trials(*["11111"] * 10), trials(*["11111"] * 10))
    assert shared is not None and shared.method == "wald by text" and shared.high == -shared.low == pytest.approx(1.959964 / 12)
    lost = difference(trials(*["000"] * 3, *["111"] * 7), trials(*["111"] * 10))
    assert lost is not None and lost.method == "t"
    half = 2.262157 * math.sqrt(10 / 9 * 2.1) / 10
    assert lost.value == pytest.approx(-0.3) and lost.low == pytest.approx(-0.3 - half) and lost.high == pytest.approx(-0.3 + half)
    assert lost.p == pytest.approx(2 / 2**9)


def test_mcnemar_is_exact() -> None:
    assert mcnemar(0, 0) == 1.0 and mcnemar(3, 3) == 1.0
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)


@given(st.integers(0, 300), st.integers(1, 70), st.integers(2, 3))
def test_boundaries_grow_to_the_end(blocks: int, count: int, least: int) -> None:
    places = boundaries(blocks, count, least)
    if blocks < least + count - 1:
        assert places is None
    else:
        assert places is not None and len(places) == count and places[0] >= least and places[-1] == blocks
        assert all(a < b for a, b in pairwise(places))


# What is asked


@pytest.mark.parametrize("seed", range(12))
def test_each_question_of_a_text_is_asked_apart(seed: int) -> None:
    conversation = TASKS["recall"](random.Random(seed), Options(length=600, effort=75, held_out=True, questions=4))
    group = apart(conversation, 4)
    assert len(group) == 4
    assert len({c.meta["expect"] for c in group}) == 4
    texts = [c.body["messages"][-1]["content"].rpartition("\n\n") for c in group]
    assert len({text[0] for text in texts}) == 1
    for c, text in zip(group, texts, strict=True):
        assert c.meta["what"] in text[2]
        assert check(c, c.answer)
        assert c.meta["expect"] not in c.meta["others"]
        assert not any(check(c, other.answer) for other in group if other is not c)
    assert group[-1].meta["depth"] == pytest.approx(conversation.meta["depth"], abs=0.15)
    assert [c.body["messages"][:-1] for c in group] == [group[0].body["messages"][:-1]] * 4


def test_texts_have_their_length_and_stay_the_same(llm: LLM) -> None:
    codec = llm.engine.codec
    assert codec is not None
    group = recall_text(demo_exercises(), codec, 900, 2, seed=3)
    assert len(group) == 4
    assert group == recall_text(demo_exercises(), codec, 900, 2, seed=3)
    assert group != recall_text(demo_exercises(), codec, 900, 2, seed=4)
    assert group != recall_text(demo_exercises(), codec, 900, 1, seed=3)
    assert len({quality_items.item_key(number, c) for c in group for number in (1, 2)}) == 8


@pytest.mark.parametrize(
    ("length", "count", "asked"),
    [(512, 5, [1] * 5), (512, 100, [2] * 50), (4096, 100, [10] * 10), (32128, 25, [5] * 5), (900, 22, [4, 4, 4, 4, 3, 3]), (9, 1, [1])],
)
def test_questions_are_spread_over_enough_texts(length: int, count: int, asked: list[int]) -> None:
    assert questions_by_text(length, count, 5) == asked


def test_unseen_text_is_held_out_prose_with_facts(llm: LLM) -> None:
    codec = llm.engine.codec
    assert codec is not None
    group = unseen_recall(demo_exercises(), codec, 900, 1, seed=3)
    assert group == unseen_recall(demo_exercises(), codec, 900, 1, seed=3) != unseen_recall(demo_exercises(), codec, 900, 2, seed=3)
    assert len(group) == 4 and len({c.meta["expect"] for c in group}) == 4
    text, _, _ = group[0].body["messages"][0]["content"].rpartition("\n\n")
    told = [s for c in group for s in (f"The {c.meta['what']} is {c.meta['expect']}.",)]
    for c, sentence in zip(group, told, strict=True):
        shown, _, question = c.body["messages"][0]["content"].rpartition("\n\n")
        assert shown == text and c.meta["what"] in question and sentence[1:] in text
        assert text.index(sentence[1:]) / len(text) == pytest.approx(c.meta["depth"], abs=0.02)
        assert check(c, c.answer) and not any(check(c, other.answer) for other in group if other is not c)
    documents = ["First it began. Then it\u2019s on.\n\n>>> x = 1\n>>> y = 2\n\nAn end.", "Other words are here. They go on!"]
    (one,) = unseen_text(random.Random(5), documents, 400, 1, 75)
    asked = one.body["messages"][0]["content"].rpartition("\n\n")[0]
    leads = "|".join(map(re.escape, sorted(LEADS, reverse=True)))
    plain, planted = re.subn(rf"(?:{leads})[Tt]he [a-z ]+ of [^.]+ is \w+\.", "", asked)
    assert planted == one.meta["facts"] > 1
    words = [" ".join(documents).split(), " ".join(reversed(documents)).split()]
    assert any(plain.split() == (order * 99)[: len(plain.split())] for order in words)  # all else is the prose in its order
    assert "\n\n>>> x = 1" in plain and "\n>>> y = 2" in plain
    lengths = [len(codec.encode(c.body).token_ids) for c in unseen_recall(demo_exercises(), codec, 2000, 0, seed=1)]
    assert all(1900 < length < 2100 for length in lengths)


def test_lead_is_whole_conversations_of_training(llm: LLM) -> None:
    drawn: list[tuple[str, Options, Conversation]] = []

    def draw(task: str, rng: random.Random, options: Options) -> Conversation:
        drawn.append((task, options, TASKS[task](rng, options)))
        return drawn[-1][2]

    exercises = replace(demo_exercises(), draw=draw)
    ids = lead(exercises, llm.tokenizer, 2000, "sort", seed=4)
    assert not any(options.held_out for _, options, _ in drawn) and len({task for task, _, _ in drawn}) > 4
    renderer = Renderer(llm.tokenizer)
    rows = [renderer.render(c)[0] for _, _, c in drawn]
    assert ids == [token for row in rows for token in row] and len(ids) - len(rows[-1]) < 2000 <= len(ids)
    assert all(row[0] == llm.tokenizer.bos_id and row[-1] == llm.tokenizer.eos_id for row in rows)
    assert ids == lead(demo_exercises(), llm.tokenizer, 2000, "sort", seed=4)
    assert ids != lead(demo_exercises(), llm.tokenizer, 2000, "copy", seed=4)


@pytest.mark.parametrize(
    ("content", "parses"),
    [('{"a": 1, "b": "x"}', True), ('{"b": 0, "a": [], "c": 1}', True), ('{"a": 1}', False), ('["a", "b"]', False),
     ('{"a": 1, "b": ', False), ("", False), (None, False)],
)  # fmt: skip
def test_record_parses_with_the_keys_of_its_schema(content: str | None, parses: bool) -> None:
    style = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["a", "b"]}}}
    assert quality_items.record_parses(Conversation("json", {"response_format": style}, {}, {}), {"content": content}) == parses


def test_prose_is_never_made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quality_items._prose.cache_clear()
    monkeypatch.setattr(quality_items, "files", lambda package: tmp_path)
    try:
        with pytest.raises(QualityError, match=r"held_out\.txt is missing"):
            quality_items.held_out_prose()
        (tmp_path / "held_out.txt").write_text("\n\f\n")
        with pytest.raises(QualityError, match=r"held_out\.txt is empty"):
            quality_items.held_out_prose()
    finally:
        quality_items._prose.cache_clear()


def test_efforts_are_asked_the_same_sums() -> None:
    low, high = (quality_items.single(demo_exercises(), "arithmetic", 5, 1, effort=effort) for effort in (10, 100))
    assert [c.meta["expect"] for c in low] == [c.meta["expect"] for c in high]
    assert {c.body["reasoning_effort"] for c in low} == {10}


# Modes


def outputs(llm: LLM, mode: Mode, prompts: list[list[int]]) -> list[Output]:
    """Greedy answers with log-probabilities, the last two prompts resuming on the first."""
    with running(llm, mode):
        found = llm.generate(prompts[:1], greedy(8, logprobs=5))
        return found + llm.generate(prompts[1:], greedy(8, logprobs=5))


def family(length: int) -> list[list[int]]:
    first = prompt(length)
    return [first, first[:-5] + prompt(9, 1), first + prompt(3, 2)]


def test_wide_memory_that_rounds_is_the_served_one(llm: LLM) -> None:
    plain = outputs(llm, BOUNDED, family(150))
    assert [o.tiers.window for o in plain] == ["none", "replay", "replay"]
    for left, right in zip(plain, outputs(llm, ROUNDED, family(150)), strict=True):
        same(left, right)
    wide = outputs(llm, WIDE, family(150))
    assert all(left.logprobs != right.logprobs for left, right in zip(plain, wide, strict=True))


def test_dense_is_an_index_topk_that_nothing_exceeds(llm: LLM, tmp_path: Path) -> None:
    more = {"index_topk": 512, "candidate_topk_blocks": 512}
    write_random(tmp_path, {**TINY, "text_config": {**TINY["text_config"], **more}}, seed=7)
    other = LLM(str(tmp_path), max_sequences=8, decoder_tokens=64, kv_tokens=4096)
    plain, dense = outputs(llm, BOUNDED, family(100)), outputs(llm, DENSE, family(100))
    for served, left, right in zip(plain, dense, outputs(other, BOUNDED, family(100)), strict=True):
        assert left.token_ids == right.token_ids
        assert left.logprobs and right.logprobs and served.logprobs
        assert [p.logprob for p in left.logprobs] == pytest.approx([p.logprob for p in right.logprobs], abs=1e-3)
        assert left.logprobs != served.logprobs


def test_window_only_sees_no_further_than_its_windows(llm: LLM) -> None:
    """Four layers of windows of 8 tokens and n-grams of 4 reach back 31 tokens."""
    ids = prompt(120)
    changed = prompt(60, 5) + ids[60:]
    for mode, differs in ((WINDOW_ONLY, False), (BOUNDED, True)):
        with running(llm, mode):
            left, right = llm.generate([ids, changed], greedy(4, logprobs=5))
        assert (left.logprobs != right.logprobs) == differs


def test_shuffled_draws_from_what_is_visible_whatever_the_batch() -> None:
    positions = torch.arange(0, 400)
    indexer = cast(Any, SimpleNamespace(topk=8, ratio=2, layer=3))
    state = cast(Any, SimpleNamespace(rows=SimpleNamespace(positions=positions, rows=400)))
    memory = cast(Any, quality_modes.ShuffledMemory)
    chosen = memory.choose(None, indexer, positions, None, None, state)
    visible = (positions + 1) // 2
    for row, seen in zip(chosen.tolist(), visible.tolist(), strict=True):
        entries = [e for e in row if e >= 0]
        assert len(entries) == min(8, seen)
        assert entries == sorted(set(entries)) and all(e < seen for e in entries)
    some = positions[300:317]
    state.rows = SimpleNamespace(positions=some, rows=17)
    assert torch.equal(memory.choose(None, indexer, some, None, None, state), chosen[300:317])
    spread = chosen[200:].double() / visible[200:].unsqueeze(1)
    assert 0.45 < float(spread.mean()) < 0.55
    indexer.layer = 5
    assert not torch.equal(memory.choose(None, indexer, some, None, None, state), chosen[300:317])


def test_shuffled_changes_answers_only_where_there_is_a_choice(llm: LLM) -> None:
    for length, differs in ((7, False), (120, True)):
        left, right = (outputs(llm, mode, [prompt(length), prompt(length)])[0] for mode in (BOUNDED, SHUFFLED))
        assert (left.logprobs[0] != right.logprobs[0] if left.logprobs and right.logprobs else None) == differs


def test_mode_ends_with_its_block(llm: LLM) -> None:
    served = llm.engine.runner.memory
    with running(llm, WIDE):
        llm.generate([prompt(40)], greedy(1))
        assert type(llm.engine.runner.memory) is quality_modes.WideMemory
    assert llm.engine.runner.memory is served and type(served) is CacheMemory
    assert llm.generate([prompt(40)], greedy(1))[0].tiers.cached == 0
    waiting = llm.engine.submit(Request(prompt(5), greedy(1)))
    with pytest.raises(EngineError, match="idle"), running(llm, BOUNDED):
        pass
    llm.engine.abort(waiting.id)
    llm.engine.settle()


def test_kernels_run_in_modes_of_their_own_memory_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read blocks and windows as they are: another memory would change nothing, and its figures would be another mode's."""
    monkeypatch.setattr(llm.engine.runner, "kernels", True)
    for mode in quality_modes.MODES:
        if mode.memory is None:
            with running(llm, mode):
                pass
            continue
        with pytest.raises(EngineError, match=f"GPU kernels do not run in the mode '{mode.name}'"), running(llm, mode):
            pass
        assert type(llm.engine.runner.memory) is CacheMemory


@pytest.mark.parametrize("other", [WIDE, SHUFFLED, BOUNDED], ids=lambda mode: mode.name)
def test_mode_within_a_mode_is_refused(llm: LLM, other: Mode) -> None:
    with running(llm, DENSE):
        dense = llm.engine.runner.memory
        with pytest.raises(EngineError, match="not twice"), running(llm, other):
            pass
        assert llm.engine.runner.memory is dense
    assert type(llm.engine.runner.memory) is CacheMemory


# Asking


def conversations(length: int, count: int) -> list[Conversation]:
    text = " ".join(f"item {i}" for i in range(length))
    return [
        Conversation("chat", {"messages": [{"role": "user", "content": f"{text}\n\nQuestion {n}?"}], "reasoning_effort": "none"},
                     {"role": "assistant", "content": "I see."}, {"expect": "I see"})
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.usefixtures("short_answers")
def test_answers_rest_on_as_many_replays_as_the_mode_names(llm: LLM, count: int) -> None:
    mode = next(mode for mode in REPLAYED if mode.boundaries == count)
    group = conversations(20 + 8 * count, 2)
    with running(llm, mode):
        found = Asker(llm, mode).ask([group, conversations(1, 1)[:1] if count > 16 else group[:1]])
        assert found[0] is not None
        assert [answer.lineage for answer in found[0]] == [count, count]
        if count > 16:
            assert found[1] is None
        else:
            assert found[1] is not None and found[1][0].lineage == count


@pytest.mark.parametrize("mode", [EXACT, BOUNDED, WIDE, DENSE, WINDOW_ONLY, SHUFFLED], ids=lambda mode: mode.name)
@pytest.mark.usefixtures("short_answers")
def test_questions_that_share_a_text_get_the_answers_of_a_cold_prompt(llm: LLM, mode: Mode) -> None:
    group = conversations(30, 3)
    with running(llm, mode):
        asker = Asker(llm, mode)
        together, apart_ = asker.ask([group]), asker.ask([[c] for c in group])
    assert together[0] is not None
    for answer, alone in zip(together[0], apart_, strict=True):
        assert alone is not None
        assert answer == alone[0]
        assert answer.lineage == 0


@pytest.mark.parametrize("mode", [EXACT, BOUNDED, REPLAYED[1], REPLAYED[3], WIDE, DENSE, WINDOW_ONLY], ids=lambda mode: mode.name)
@pytest.mark.usefixtures("short_answers")
def test_short_questions_rest_on_the_replays_of_their_lead(llm: LLM, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    group, ids = conversations(1, 3), prompt(65 * 8 + 3)
    with running(llm, mode):
        asker = Asker(llm, mode)
        seen: list[list[Request]] = []
        run = llm.run
        monkeypatch.setattr(llm, "run", lambda requests: seen.append(requests) or run(requests))
        (found,) = asker.ask([group], lead=ids)
        assert found is not None and [answer.lineage for answer in found] == [mode.boundaries] * 3
        assert [answer.prompt_tokens for answer in found] == [len(ids) + len(asker.codec.encode(c.body).token_ids) for c in group]
        assert [request.resume_at_most for request in seen[-1]] == [65 * 8] * 3  # the last boundary lies in the lead
        assert all(len(request.prompt_ids) <= len(ids) for step in seen[:-1] for request in step)
        (again,) = asker.ask([[group[1]]], lead=ids)
        assert again == [found[1]]
        if mode.boundaries > 1:
            assert asker.ask([group], lead=ids[: mode.boundaries * 8]) == [None]


@pytest.mark.usefixtures("short_answers")
def test_many_questions_after_one_lead_are_asked_in_portions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    group, ids = conversations(4, 9), prompt(300)
    with running(llm, REPLAYED[1]):
        asker = Asker(llm, REPLAYED[1])
        whole = asker.ask([group], lead=ids)
        sizes: list[int] = []
        run = llm.run
        monkeypatch.setattr("forebay.engine.quality_ask.POOL_SHARE", 0.04)
        monkeypatch.setattr(llm, "run", lambda requests: sizes.append(len(requests)) or run(requests))
        assert asker.ask([group], lead=ids) == whole
    assert sizes[:4] == [1] * 4 and sum(sizes[4:]) == 9 and len(sizes) > 5


def late(alike: int) -> list[Conversation]:
    """Questions of which all differ from the first at once, and the others from each other only after `alike` more words."""
    questions = ["Which one?", *(f"Say{' the same' * alike} {n}." for n in range(1, 13))]
    first = conversations(40, 1)[0]
    text = first.body["messages"][0]["content"].partition("Question")[0]
    return [replace(first, body={**first.body, "messages": [{"role": "user", "content": text + asked}]}) for asked in questions]


def test_request_takes_no_more_from_the_cache_than_it_says(llm: LLM) -> None:
    ids = prompt(120)
    llm.run([Request(ids, greedy(1))])
    for most, cached in ((None, 112), (63, 56), (56, 56), (500, 112), (0, 0)):
        tiers = llm.run([Request(ids, greedy(1), salt="", replay="bounded", resume_at_most=most)])[0].tiers
        assert tiers.cached == cached


def test_nor_more_from_the_store(tmp_path: Path) -> None:
    ids = prompt(120)
    with tiered(tmp_path) as llm:
        llm.run([Request(ids, greedy(1))])
        settle(llm)
        for most, stored in ((63, 56), (None, 112)):
            llm.engine.manager.clear()
            tiers = llm.run([Request(ids, greedy(1), resume_at_most=most)])[0].tiers
            assert (tiers.hbm, tiers.ssd) == (0, stored)


@pytest.mark.parametrize("mode", [REPLAYED[0], REPLAYED[1]], ids=lambda mode: mode.name)
@pytest.mark.usefixtures("short_answers")
def test_questions_resume_on_what_all_share_and_not_on_what_one_of_them_left(llm: LLM, mode: Mode) -> None:
    """More questions than run at once, most of which share a further whole block, which the first of them to end has left in the cache."""
    group = late(12)
    with running(llm, mode):
        asker = Asker(llm, mode)
        prompts = [asker.codec.encode(c.body).token_ids for c in group]
        assert len(group) > llm.engine.options.max_sequences
        assert all(a[:-16] == prompts[1][:-16] for a in prompts[1:]) and prompts[0][: len(prompts[1]) - 16] != prompts[1][:-16]
        assert len(prompts[1]) - len(prompts[0]) > 2 * asker.size
        found = asker.ask([group])[0]
        backwards = asker.ask([group[::-1]])[0]
    assert found is not None and backwards is not None
    assert [answer.lineage for answer in found] == [mode.boundaries] * 13
    assert found == backwards[::-1]  # nor does an answer depend on who was asked before


@pytest.mark.usefixtures("short_answers")
def test_answer_on_other_replays_than_named_is_refused(llm: LLM) -> None:
    mode = replace(REPLAYED[1])
    asker = Asker(llm, mode)
    asker.grow = lambda groups: [True] * len(groups)  # type: ignore[method-assign]
    with running(llm, mode), pytest.raises(QualityError, match="0 bounded replays behind it instead of 4"):
        asker.ask([conversations(30, 2)])


@pytest.mark.usefixtures("short_answers")
def test_what_exceeds_the_pool_is_asked_in_waves(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = llm.run
    monkeypatch.setattr("forebay.engine.quality_ask.POOL_SHARE", 0.02)
    monkeypatch.setattr(llm, "run", lambda requests: sizes.append(len(requests)) or run(requests))
    with running(llm, BOUNDED):
        found = Asker(llm, BOUNDED).ask([[c] for c in conversations(30, 9)])
    assert len(found) == 9 and all(answers is not None for answers in found)
    assert sum(sizes) == 9 and len([size for size in sizes if size]) > 1


# Measuring


def plan(**more: Any) -> Plan:
    return replace(
        Plan.quick(6), **{"lengths": (300,), "compared": (300,), "single": (300,), "drift": 300, "boundaries": (1, 4), "excerpts": 2,
        "prompt": 60, "follows": 10, "plain": 100, "unseen": 300, "lead": 17, "task_modes": (BOUNDED, REPLAYED[2]),
        "effort_modes": (BOUNDED, REPLAYED[0]), **more},
    )  # fmt: skip


def known(llm: LLM, right: Callable[[int], bool]) -> tuple[Exercises, dict[tuple[int, ...], list[int]]]:
    """The demo's exercises, and answers to them of which those that `right` chooses, by the order of drawing, are right."""
    renderer = Renderer(llm.tokenizer)
    answers: dict[tuple[int, ...], list[int]] = {}
    kept = demo_exercises()
    wrong = {"role": "assistant", "content": "I do not know.", "reasoning_content": "Hm."}

    def note(number: int, c: Conversation) -> None:
        chosen = c if right(number) else replace(c, answer=wrong)
        ids, (start, _) = renderer.render(chosen)
        answers[tuple(ids[:start])] = ids[start:]

    def draw(task: str, rng: random.Random, options: Options) -> Conversation:
        c = kept.draw(task, rng, options)
        if task == "recall":
            for number, single in enumerate(apart(c, options.questions)):
                note(number, single)
        else:
            seen = drawn.setdefault((task, options.effort), [])
            if c not in seen:  # those of another mode are some of the same
                seen.append(c)
            note(seen.index(c), c)
        return c

    def unseen(rng: random.Random, length: int, count: int) -> list[Conversation]:
        group = kept.unseen(rng, length, count)
        for number, c in enumerate(group):
            note(number, c)
        return group

    drawn: dict[Any, list[Conversation]] = {}
    return replace(kept, draw=draw, unseen=unseen, prose=lambda: ["One two three. " * 30, "Four five six. " * 30]), answers


def test_shares_are_those_of_known_answers(llm: LLM) -> None:
    exercises, answers = known(llm, lambda number: number not in (1, 5))
    instrument = Instrument(llm, exercises, plan(), seed=2)
    labels: list[tuple[str, float, float]] = []
    with saying(llm, answers):
        results = instrument.measure(("tasks", "effort", "recall", "drift", "modes"), lambda *report: labels.append(report))
    tasks = {score.what: score for score in results.of("tasks", mode=BOUNDED.name)}
    for name in ("chat", "refer", "quote", "lookup", "copy", "sort", "reverse", "arithmetic", "json"):
        assert (tasks[name].n, tasks[name].right, tasks[name].unfinished) == (6, 4, 0), name
    call, other = tasks["tools: name"], tasks["tools: answer"]
    assert call.n + other.n == 6 and call.right + other.right == 4
    assert tasks["tools: arguments"].right == tasks["tools: calls parse"].right == call.right
    assert (tasks["json: parses"].n, tasks["json: parses"].right) == (6, 4)
    replayed = {score.what: score for score in results.of("tasks", mode=REPLAYED[2].name)}
    assert list(replayed)[:4] == ["arithmetic", "json", "json: parses", "tools: answer"]
    assert all(score.lineage in ((16, 16), None) for score in replayed.values())
    assert (replayed["json"].n, replayed["json"].right, replayed["json"].too_short) == (3, 2, 0)
    assert all(score.prompt_length > 17 * 8 for score in results.of("tasks") if score.n)
    efforts, after = list(results.of("effort", mode=BOUNDED.name)), list(results.of("effort", mode=REPLAYED[0].name))
    assert [score.effort for score in after] == list(quality.EFFORTS)
    assert all((score.n, score.right, score.lineage) == (3, 2, (1, 1)) for score in after)
    assert len({score.limit for score in (*efforts, *after)}) == 1
    unseen = next(results.of("recall", what=UNSEEN))
    assert (unseen.n, unseen.right, unseen.mode, unseen.length) == (6, 6, BOUNDED.name, 300) and results.against_default(unseen) is None
    assert [score.effort for score in efforts] == list(quality.EFFORTS)
    assert all((score.n, score.right) == (6, 4) for score in efforts)
    assert efforts[0].tokens < efforts[-1].tokens
    assert len({score.limit for score in efforts}) == 1 and (efforts[0].limit or 0) > 48
    for part in ("recall", "drift", "modes"):
        for score in results.of(part):
            count = 6 if part != "modes" or score.mode == REPLAYED[0].name else 1 if score.mode == DENSE.name else 3
            assert (score.n, score.right) == (count, count), (part, score.mode)  # one question a text, the first
            depths = [s for s in results.scores if (s.part, s.what, s.mode) == (part, score.what, score.mode) and s.depth is not None]
            assert sum(s.n for s in depths) == count
    assert {score.mode: score.lineage for score in results.of("drift")} == {
        "bounded decoder": (0, 0), "bounded encoder 1": (1, 1), "bounded encoder 4": (4, 4),
    }  # fmt: skip
    assert labels[0][1] == 0.0 and labels[-1][0] == "done" and labels[-1][1] == pytest.approx(labels[-1][2])
    figures = json.loads(json.dumps(quality_results.figures(results)))
    copied = next(s for s in figures["scores"] if s["what"] == "copy" and s["mode"] == "bounded decoder")
    assert copied["share"] == pytest.approx(4 / 6) and (copied["low"], copied["high"]) == pytest.approx(wilson(4, 6))
    assert copied["texts"] == 6 and copied["method"] == "wilson" and "against_default" not in copied and "trials" not in copied
    other = next(s for s in figures["scores"] if s["what"] == "json" and s["mode"] == REPLAYED[2].name)
    assert {name: other["against_default"][name] for name in ("n", "texts", "value", "gained", "lost")} == {
        "n": 3, "texts": 3, "value": 0.0, "gained": 0, "lost": 0,
    }  # fmt: skip
    compared = {s["mode"]: s["against_default"]["n"] for s in figures["scores"] if "against_default" in s and s["part"] == "modes"}
    assert compared == {"exact": 3, "bounded encoder 1": 6, "bf16 KV": 3, "dense": 1, "window only": 3, "shuffled": 3}
    assert figures["complete"]
    bars = {bar["what"]: bar for bar in figures["bars"]}
    assert not bars["arithmetic at effort 100"]["reached"]
    assert not bars["recall, window only, 300 tokens"]["reached"]  # this "model" knows all answers without looking


def test_questions_about_one_text_are_counted_as_such(llm: LLM) -> None:
    exercises, answers = known(llm, lambda number: number == 0)  # of a text's four the first
    instrument = Instrument(llm, exercises, plan(samples=24, few=12, compared=(900,), lengths=(900, 9000), single=(), texts=3), seed=2)
    assert [job.label for job in instrument.jobs(["recall"])] == [
        *(f"recall, bounded decoder, {n} tokens" for n in ("900", "3,456")), "recall in unseen filler, bounded decoder, 300 tokens",
    ]  # fmt: skip
    instrument.plan = replace(instrument.plan, lengths=(900,))
    with saying(llm, answers):
        results = instrument.measure(("recall", "modes"), lambda *report: None)
    whole, exact = next(results.of("recall")), next(results.of("modes", mode=EXACT.name))
    assert (whole.n, whole.right, whole.texts, whole.length) == (24, 6, 6, 900)
    assert whole.interval.method == "t" and whole.figures()["by_text"] == [(4, 1)] * 6
    assert (exact.n, exact.right, exact.texts, exact.interval.method) == (12, 3, 3, "t")
    against = results.against_default(exact)
    assert against is not None and (against.n, against.texts, against.value, against.method) == (12, 3, 0.0, "wald by text")
    assert 700 < whole.prompt_length < 1100
    assert results.against_default(whole) is None


def test_what_was_measured_before_an_abort_is_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    exercises, answers = known(llm, lambda number: True)
    instrument = Instrument(llm, exercises, plan(), seed=2)
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(instrument, "_effort", lambda effort, count, asker: (_ for _ in ()).throw(QualityError("no")))
    with saying(llm, answers), pytest.raises(QualityError, match="no"):
        instrument.measure(("recall", "effort"), lambda *report: None, lambda results: kept.append(quality_results.figures(results)))
    assert len(kept) == 2 and kept[0]["scores"][0]["n"] == 6 and not kept[0]["complete"]
    assert instrument.results.scores and not instrument.results.complete


def test_bars_are_judged() -> None:
    def score(part: str, right: int, **more: Any) -> Score:
        return Score(part, **{"what": "recall", "mode": BOUNDED.name, "n": 100, "right": right, **more})

    results = quality_results.Results([
        score("recall", 2, length=4096, what=UNSEEN), score("recall", 95, length=4096), score("recall", 89, length=16384),
        score("modes", 29, mode=WINDOW_ONLY.name, length=4096),
        score("modes", 30, mode=SHUFFLED.name, length=4096),
        score("effort", 99, effort=10, tokens=9000, mode=EXACT.name), score("effort", 9, effort=100, tokens=9, mode=EXACT.name),
        score("effort", 40, effort=10, tokens=2000), score("effort", 90, effort=100, tokens=4000),
        score("tasks", 94, what="tools: name"),
    ])  # fmt: skip
    reached = {bar.what: bar.reached for bar in quality_results.bars(results)}
    assert reached == {
        "recall at 4,096 tokens": True, "recall at 16,384 tokens": False, "recall, window only, 4,096 tokens": True,
        "recall, shuffled, 4,096 tokens": False,
        "arithmetic at effort 100": True, "arithmetic at effort 100 above effort 10, between intervals": True,
        "tokens at effort 10 / at 100": True, "tools: right name": False,
    }  # fmt: skip


def test_default_is_what_serves() -> None:
    """The bars are about FP4 entries, the selection of the indexer and a bounded prefill: nothing stands in for the served memory."""
    assert BOUNDED.memory is None and BOUNDED.prefill == "bounded"
    assert all(mode.memory is None and mode.prefill == "bounded" for mode in REPLAYED)
    asked = {*Plan().lengths, *Plan().compared}
    assert {4096, 16384} <= asked and {4096, 16384} <= set(Plan().compared)


@pytest.mark.parametrize(
    ("part", "more", "sentence"),
    [
        ("text", {"prompt": 300, "excerpts": 60}, r"needs a block pool of 19,200 tokens \(cache\.kv_tokens\); this one has 16,384"),
        ("text", {"prompt": 5000, "excerpts": 1}, r"the part text needs a context of 5,011 tokens; this one has 4,096"),
        ("text", {"plain": 9000}, r"the part text needs a context of 4,097 tokens; this one has 4,096"),
        ("text", {"prompt": 16_000}, r"the held-out text has \d+ tokens, 16010 are needed"),
        ("tasks", {"lead": 500}, r"an exercise after its lead needs a context of 5,280 tokens; this one has 4,096"),
        ("effort", {"lead": 500}, r"an exercise after its lead needs a context of 5,280 tokens; this one has 4,096"),
    ],
)
def test_what_has_no_room_is_refused_when_it_is_planned(llm: LLM, part: str, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(QualityError, match=sentence):
        Instrument(llm, demo_exercises(), plan(**more)).jobs([part])
    assert Instrument(llm, demo_exercises(), plan()).jobs([part])


def test_unknown_part_is_named(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no part 'recal'"):
        Instrument(llm, demo_exercises(), plan()).jobs(["recal"])


# Prose


def test_what_follows_is_scored_as_if_it_had_been_generated(llm: LLM) -> None:
    """Teacher forcing on the tokens that a request generated after the same replays gives the request's own log-probabilities."""
    ids = prompt(121)
    for mode in (EXACT, BOUNDED, REPLAYED[0], REPLAYED[1], WIDE, SHUFFLED):
        with running(llm, mode):
            asker = Asker(llm, mode)
            salt = asker.salt()
            asker.grow([(ids[:120], salt)])
            output = llm.run([asker.request(ids, greedy(6, logprobs=5), salt)])[0]
            found = distributions(asker, [Excerpt(ids + output.token_ids, len(ids), frozenset())])
        assert found is not None and output.logprobs is not None and output.tiers.lineage == mode.boundaries
        assert found[0].argmax(1).tolist() == output.token_ids
        told = [float(found[0][i, p.token_id]) for i, p in enumerate(output.logprobs)]
        assert told == pytest.approx([p.logprob for p in output.logprobs], abs=1e-5)


def test_modes_are_compared_with_exact(llm: LLM) -> None:
    ids = prompt(400)
    parts = excerpts(llm, ids, prompt=200, follows=24, count=3)
    assert [part.ids[0] for part in parts] == [ids[0], ids[88], ids[176]]
    found = {}
    for mode in (EXACT, BOUNDED, REPLAYED[1], REPLAYED[2], REPLAYED[3], SHUFFLED):
        with running(llm, mode):
            found[mode.name] = distributions(Asker(llm, mode), parts)
    exact = found["exact"]
    assert exact is not None and found["bounded encoder 64"] is None  # 24 blocks are too few
    itself = compare(parts, exact, exact)
    assert (itself.tokens, itself.kl, itself.kl_se, itself.top1) == (72, 0.0, 0.0, 1.0)
    assert itself.perplexity == pytest.approx(math.exp(itself.nll))
    loss = [-float(part[i, told]) for part, e in zip(exact, parts, strict=True) for i, told in enumerate(e.ids[200:])]
    assert itself.nll == pytest.approx(sum(loss) / 72)
    for name in ("bounded decoder", "bounded encoder 4", "bounded encoder 16", "shuffled"):
        other = found[name]
        assert other is not None
        assert compare(parts, other, exact).kl > 0
    counted = compare([replace(parts[0], skip=frozenset({parts[0].ids[200]}))], exact[:1], exact[:1])
    assert counted.tokens == 24 - parts[0].ids[200:].count(parts[0].ids[200])


def test_divergence_is_that_of_the_distributions() -> None:
    exact, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    found = compare([Excerpt([0, 1], 1, frozenset())], [other], [exact])
    assert found.kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert found.nll == pytest.approx(-math.log(0.1))
    assert (found.kl_se, found.kl_low, found.kl_high, found.nll_se) == (None,) * 4  # one excerpt tells nothing of others
    near = torch.tensor([[0.6, 0.4]]).log()
    both = compare([Excerpt([0, 1], 1, frozenset())] * 2, [other, near], [exact, exact])
    least = compare([Excerpt([0, 1], 1, frozenset())], [near], [exact]).kl
    assert both.kl == pytest.approx((found.kl + least) / 2) and both.kl_se == pytest.approx((found.kl - least) / 2)
    assert both.kl_low == 0.0 and both.kl_high == pytest.approx(both.kl + 12.7062 * (found.kl - least) / 2, rel=1e-4)


def test_bits_per_byte_are_those_of_what_was_predicted(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    first, last = tokenizer.bos_id, tokenizer.eos_id
    assert first is not None and last is not None
    words = tokenizer.encode("Held-out prose, naïve or not.")
    total, count, written = plain_loss(llm, [first, *words, last, first, *words, last], frozenset({first}))
    assert count == 2 * (len(words) + 1) and total > 0
    assert written == 2 * len("Held-out prose, naïve or not.".encode())


def test_part_text_has_a_row_per_mode(llm: LLM) -> None:
    exercises, _ = known(llm, lambda number: True)
    results = Instrument(llm, exercises, plan(), seed=2).measure(["text"], lambda *report: None)
    rows = {row["mode"]: row for row in results.text}
    replayed = ["bounded encoder 1", "bounded encoder 4"]
    assert list(rows) == ["exact", "bounded decoder", *replayed, "bf16 KV", "dense", "window only", "shuffled"]
    assert rows["exact"]["kl"] == 0.0 and rows["exact"]["top1"] == 1.0
    assert all(row["tokens"] >= 18 and row["kl"] > 0 for name, row in rows.items() if name != "exact")
    assert results.plain["perplexity"] > 100
    plain = results.plain
    assert plain["bits_per_byte"] == pytest.approx(plain["nll"] * plain["tokens"] / math.log(2) / plain["bytes"])


# The picture


def test_picture_is_drawn_from_whatever_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def score(part: str, what: str, mode: str, **more: Any) -> dict[str, Any]:
        return Score(part, what, mode, n=20, right=15, tokens=400, **more).figures()

    row = {"tokens": 64, "kl": 0.1, "kl_low": None, "kl_high": None, "perplexity": 9.0, "top1": 0.9, "top1_low": 0.8, "top1_high": 0.95}
    whole = {
        "measured": "quality", "date": "2026-11-29",
        "text": [{"mode": mode, "boundaries": k, **row} for mode, k in (("exact", 0), ("bounded decoder", 0), ("bounded encoder 4", 4))],
        "scores": [
            score("recall", "recall", "bounded decoder", length=512), score("recall", "recall", "bounded decoder", length=512, depth=0),
            score("drift", "recall", "bounded encoder 4", length=512), score("modes", "recall", "shuffled", length=512),
            score("tasks", "copy", "bounded decoder"), score("effort", "arithmetic", "bounded decoder", effort=10),
            score("recall", UNSEEN, "bounded decoder", length=512), score("effort", "arithmetic", "exact", effort=25),
        ],
    }  # fmt: skip
    for number, figures in enumerate((whole, {**whole, "text": [], "scores": []})):
        file = tmp_path / f"{number}.png"
        quality_plot.draw(figures, file)
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000


def test_missing_matplotlib_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"forebay\[quality\]"):
        quality_plot.draw({}, tmp_path / "x.png")
