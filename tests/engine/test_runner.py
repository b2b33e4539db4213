"""Running rows on a real network: what a batch holds, and that an answer does not depend on its company, its chunks or preemption."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import WINDOW, assert_idle, fresh, greedy, prompt, same, tiny
from forebay.engine.batcher import Row
from forebay.engine.llm import LLM
from forebay.engine.sequence import Sequence as EngineSequence
from forebay.engine.types import Output, PrefillMode, Request, SamplingParams
from noise_model import noise_checkpoint

LENGTHS = (41, 8, 20, 9, 33, 1, 7, 16)
COUNT = 10
PROMPTS = [prompt(length, i) for i, length in enumerate(LENGTHS)]
PARAMS = [
    greedy(COUNT, logprobs=2),
    greedy(COUNT, logprobs=0, repetition_penalty=1.3, frequency_penalty=0.5),
    greedy(COUNT, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9, max_tokens=COUNT, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.5, seed=3, top_k=20, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, min_p=0.01, presence_penalty=1.0, max_tokens=COUNT, ignore_eos=True),
    greedy(COUNT, logit_bias={100: 3.0, 101: -100.0}),
]
MODES: tuple[PrefillMode, ...] = ("bounded", "exact")


@functools.cache
def alone(mode: PrefillMode) -> tuple[Output, ...]:
    """Every prompt by itself, its prompt in one piece, on an engine with room."""
    llm = fresh(tiny(mode))
    return tuple(llm.generate([ids], params)[0] for ids, params in zip(PROMPTS, PARAMS, strict=True))


def all_alone(outputs: Sequence[Output], mode: PrefillMode) -> None:
    for output, expected in zip(outputs, alone(mode), strict=True):
        assert output.tiers.compute == len(output.prompt_ids)
        same(output, expected)


@contextmanager
def preempting(llm: LLM, every: int) -> Any:
    """Before every so many steps, one of the running sequences is preempted; counts steps and those that go on where they were."""
    scheduler, count, numbers = llm.engine.scheduler, {"steps": 0, "restored": 0}, random.Random(3)
    schedule, restore = scheduler.schedule, scheduler._restore

    def forced() -> list[Row]:
        count["steps"] += 1
        if count["steps"] % every == 0 and scheduler.running:
            scheduler._preempt(numbers.choice(scheduler.running))
        return schedule()

    def counted(sequence: EngineSequence) -> None:
        count["restored"] += 1
        restore(sequence)

    scheduler.schedule, scheduler._restore = forced, counted
    try:
        yield count
    finally:
        del scheduler.schedule
        scheduler._restore = restore


# What is in a batch


def sequences(llm: LLM, *prompts: Sequence[int], **params: Any) -> list[EngineSequence]:
    """Opened sequences that nobody schedules."""
    made = [llm.engine.prepare(Request(ids, greedy(**params))) for ids in prompts]
    for sequence in made:
        assert llm.engine.manager.open(sequence.cache, sequence.tokens, reuse=False) is not None
    return made


@pytest.fixture
def opened() -> Any:
    """`sequences` on the plain engine, closed when the test ends."""
    llm, made = fresh(tiny()), []

    def make(*prompts: Sequence[int], **params: Any) -> list[EngineSequence]:
        made.extend(sequences(llm, *prompts, **params))
        return made

    yield make
    for sequence in made:
        llm.engine.manager.release(sequence.cache, keep=False)


Opened = Callable[..., list[EngineSequence]]


def test_a_batch_holds_tokens_and_what_came_before_them(opened: Opened) -> None:
    first, second = opened([10, 11, 12, 13, 14], [20, 21, 22])
    batch = tiny().engine.runner.batch([Row(first, 3, 5, 3, 0, 0, 0, True), Row(second, 0, 3, 0, 0, 0, 0, True)])
    assert batch.token_ids.tolist() == [13, 14, 20, 21, 22]
    assert batch.lookback.tolist() == [[12, 11, 10], [13, 12, 11], [-1, -1, -1], [20, -1, -1], [21, 20, -1]]
    assert batch.encoder.positions.tolist() == [3, 4, 0, 1, 2]
    assert [span.slot for span in batch.spans] == [first.cache.slot, second.cache.slot]
    assert [list(span.blocks) for span in batch.spans] == [first.cache.table, second.cache.table]


def test_logits_are_those_of_the_rows_that_want_them_in_order(opened: Opened) -> None:
    runner = tiny().engine.runner
    made = opened(prompt(9, 1), prompt(5, 2), prompt(6, 3))
    rows = [Row(s, 0, len(s.tokens), 0, 0, 0, 0, wants_logits=i != 1) for i, s in enumerate(made)]
    logits, scored = runner.run(rows)
    assert scored == [None, None, None]
    singly = [runner.run([replace(rows[i], wants_logits=True)])[0] for i in (0, 2)]
    assert torch.equal(logits, torch.cat(singly))


def test_a_step_without_decoder_rows_gives_no_logits(opened: Opened) -> None:
    (sequence,) = opened(prompt(40, 1))
    logits, scored = tiny().engine.runner.run([Row(sequence, 0, 8, 0, 0, 32, 32, wants_logits=False)])
    assert logits.shape == (0, tiny().engine.vocab_size)
    assert scored == [None]


def test_hidden_states_only_for_prompts_that_are_scored(opened: Opened) -> None:
    runner = tiny().engine.runner
    scored_one = opened(prompt(9, 1), prompt_logprobs=0)[0]
    plain = opened(prompt(9, 2))[1]
    rows = [Row(plain, 0, 9, 0, 0, 0, 0, True), Row(scored_one, 0, 9, 0, 0, 0, 0, True)]
    logits, scored = runner.run(rows)
    assert scored[0] is None
    assert scored[1] is not None
    assert torch.equal(runner.logits(scored[1])[-1], logits[1])


def test_what_is_saved_is_put_back_byte_for_byte(opened: Opened) -> None:
    runner, manager = tiny().engine.runner, tiny().engine.manager
    (sequence,) = opened(prompt(21, 1))
    runner.run([Row(sequence, 0, 21, 0, 0, 0, 0, True)])
    sequence.computed = 21
    manager.commit(sequence.cache, sequence.tokens, 21)
    slot, last = sequence.cache.slot, sequence.cache.table[2]
    window, pending, block = runner.windows.data[slot].clone(), runner.windows.pending[slot].clone(), runner.blocks.data[last].clone()
    runner.save(sequence, manager.contents(sequence.cache))
    manager.release(sequence.cache)
    runner.windows.data.fill_(0xAA)
    runner.windows.pending.fill_(7.0)
    runner.blocks.poison([last])
    other = opened(prompt(3, 2))[1]
    assert other.cache.slot == slot
    saved = sequence.saved
    assert saved is not None
    assert (saved.computed, saved.plan.resume, len(saved.contents)) == (21, 0, 2)
    assert manager.reopen(sequence.cache, sequence.tokens, saved.contents, saved.plan)
    assert sequence.cache.slot != slot
    runner.restore(sequence)
    assert torch.equal(runner.windows.data[sequence.cache.slot], window)
    assert torch.equal(runner.windows.pending[sequence.cache.slot], pending)
    assert torch.equal(runner.blocks.data[sequence.cache.table[2]], block)


def test_windows_are_copied_where_the_sequence_wants_them_and_a_row_passes(opened: Opened) -> None:
    (sequence,) = opened(prompt(40, 1))
    runner = tiny().engine.runner
    sequence.copy_at = [8, 16, 32]
    (span,) = runner.batch([Row(sequence, 0, 7, 0, 0, 0, 0, False)]).spans
    assert list(span.captures) == []
    assert sequence.copies == {}
    (span,) = runner.batch([Row(sequence, 7, 16, 7, 0, 8, 8, False)]).spans
    assert [(c.boundary, c.decoder) for c in span.captures] == [(8, False), (16, True)]
    assert sequence.copies.keys() == {8, 16}
    for capture in span.captures:
        # What the pass writes is in the copy that the sequence keeps.
        kept = sequence.copies[capture.boundary]
        capture.codes[:] = 3
        capture.scales[:] = 4
        assert kept.shape == runner.windows.data[0].shape
        assert (kept == torch.tensor([3] * 32 + [4], dtype=torch.uint8)).all()
    (span,) = runner.batch([Row(sequence, 16, 40, 16, 0, 32, 32, True)]).spans
    assert [(c.boundary, c.decoder) for c in span.captures] == [(32, False)]
    (span,) = runner.batch([Row(sequence, 32, 40, 32, 0, 32, 32, True)]).spans
    assert list(span.captures) == []


def test_a_copy_holds_what_the_ring_held_before_the_step(opened: Opened) -> None:
    (sequence,) = opened(prompt(20, 1))
    runner = tiny().engine.runner
    runner.windows.data[sequence.cache.slot] = 9
    sequence.copy_at = [16]
    runner.batch([Row(sequence, 10, 17, 10, 0, 0, 0, False)])
    runner.windows.data[sequence.cache.slot] = 1
    assert (sequence.copies[16] == 9).all()


# The answer is the answer


@pytest.mark.parametrize("mode", MODES)
def test_the_same_beside_seven_others(mode: PrefillMode) -> None:
    all_alone(fresh(tiny(mode)).generate(PROMPTS, PARAMS), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [7, 64])
def test_the_same_however_the_prompts_are_cut(mode: PrefillMode, tokens: int) -> None:
    all_alone(fresh(tiny(mode, encoder_tokens=tokens)).generate(PROMPTS, PARAMS), mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_token_by_token(mode: PrefillMode) -> None:
    chosen = [2, 3]
    outputs = fresh(tiny(mode, encoder_tokens=1)).generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen])
    for i, output in zip(chosen, outputs, strict=True):
        same(output, alone(mode)[i])


@pytest.mark.parametrize("mode", MODES)
def test_the_same_when_requests_come_one_after_the_other(mode: PrefillMode) -> None:
    """Everyone joins while others decode, in another order than alone."""
    llm = fresh(tiny(mode))
    engine, got = llm.engine, {}
    try:
        engine.sink = lambda events: [got.setdefault(e.request_id, []).extend(e.token_ids) for e in events]
        ids = {}
        for i in reversed(range(len(PROMPTS))):
            ids[i] = engine.submit(Request(PROMPTS[i], PARAMS[i])).id
            engine.step()
        while engine.busy:
            engine.step()
    finally:
        engine.sink = lambda events: None
    for i, expected in enumerate(alone(mode)):
        assert got[ids[i]] == expected.token_ids
    assert_idle(engine)


@pytest.mark.case("B048")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reuse", [True, False])
def test_the_same_when_preempted_every_few_steps(mode: PrefillMode, reuse: bool) -> None:
    """With reuse sequences go on where they were, without it they compute everything again."""
    llm = fresh(tiny(mode, encoder_tokens=24, prefix_reuse=reuse))
    with preempting(llm, every=3) as count:
        outputs = llm.generate(PROMPTS, PARAMS)
    all_alone(outputs, mode)
    assert sum(output.preemptions for output in outputs) >= count["steps"] // 3 >= 5
    assert (count["restored"] >= 3) == reuse
    assert_idle(llm.engine)


@functools.cache
def long_answers() -> tuple[Output, ...]:
    return tuple(fresh(tiny()).generate([prompt(length, length)], greedy(30, logprobs=0))[0] for length in (3, 5, 12))


@pytest.mark.case("B048")
@pytest.mark.parametrize("reuse", [True, False])
def test_the_same_in_a_pool_that_is_too_small_for_all(reuse: bool) -> None:
    llm = fresh(tiny("bounded", kv_tokens=7 * WINDOW, prefix_reuse=reuse))
    outputs = llm.generate([list(o.prompt_ids) for o in long_answers()], greedy(30, logprobs=0))
    for output, expected in zip(outputs, long_answers(), strict=True):
        same(output, expected)
    assert sum(output.preemptions for output in outputs) >= 2
    assert_idle(llm.engine)


def test_the_same_with_every_fresh_block_and_window_poisoned() -> None:
    llm = fresh(tiny("bounded", encoder_tokens=24, poison=True))
    with preempting(llm, every=4):
        all_alone(llm.generate(PROMPTS, PARAMS), "bounded")


def test_modes_agree_while_the_prompt_fits_a_window_and_differ_beyond() -> None:
    """So that the comparisons above are about two modes and not about one."""
    pairs = list(zip(LENGTHS, alone("bounded"), alone("exact"), strict=True))
    assert all(a.token_ids == b.token_ids for length, a, b in pairs if length <= WINDOW)
    assert any(a.token_ids != b.token_ids for length, a, b in pairs if length > WINDOW)


# A resume that is exact gives the answer of a cold run


@functools.cache
def cold(mode: PrefillMode, ids: tuple[int, ...]) -> Output:
    return fresh(tiny(mode, prefix_reuse=False)).generate(list(ids), greedy(COUNT, logprobs=2))[0]


def as_cold(output: Output, mode: PrefillMode, hbm: int, replayed: int) -> None:
    tiers = output.tiers
    assert (tiers.hbm, tiers.window, tiers.replayed, tiers.lineage) == (hbm, "replay" if hbm else "none", replayed, 0)
    assert tiers.hbm + tiers.compute == len(output.prompt_ids)
    same(output, cold(mode, tuple(output.prompt_ids)))


@pytest.mark.parametrize("encoder_tokens", [7, 64])
@pytest.mark.parametrize("length", [48, 49, 53, 56, 60])
def test_exact_replay_repeats_the_cold_answer(length: int, encoder_tokens: int) -> None:
    """Prompts that end at every distance behind the resume point. Two encoder layers, a window less a token for each."""
    llm = fresh(tiny("bounded", replay="exact", encoder_tokens=encoder_tokens))
    ids, hit = prompt(length), (length - 1) // WINDOW * WINDOW
    for hbm in (0, hit, hit):
        (output,) = llm.generate(ids, greedy(COUNT, logprobs=2))
        # Where less than a window is new, the rows that the decoder half wants begin before the hit ends; counted from a block boundary.
        exact_from = min(hit, length - WINDOW) // WINDOW * WINDOW
        as_cold(output, "bounded", hbm, hit - exact_from + 2 * (WINDOW - 1) if hbm else 0)


@pytest.mark.parametrize("encoder_tokens", [7, 64])
@pytest.mark.parametrize("length", [48, 49, 60])
def test_an_exact_prefill_resumes_exactly(length: int, encoder_tokens: int) -> None:
    """Whatever the engine's replay mode: both halves run over all four layers' windows again."""
    for replay in ("bounded", "exact"):
        llm = fresh(tiny("exact", replay=replay, encoder_tokens=encoder_tokens))
        ids, hit = prompt(length), (length - 1) // WINDOW * WINDOW
        for hbm in (0, hit):
            (output,) = llm.generate(ids, greedy(COUNT, logprobs=2))
            as_cold(output, "exact", hbm, 4 * (WINDOW - 1) if hbm else 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_is_the_same_with_and_without_its_cache(mode: PrefillMode) -> None:
    """Each turn adopts what the turns before have left, prompts and answers, and no replay is ever behind it."""
    llm = fresh(tiny(mode, replay="exact"))
    ids, layers = prompt(37), 2 if mode == "bounded" else 4
    for turn in range(4):
        (output,) = llm.generate(ids, greedy(COUNT, logprobs=2))
        known = len(ids) - 13 if turn else 0  # the last answer's last token was never computed
        hbm = known // WINDOW * WINDOW
        extra = max(0, hbm - (len(ids) - WINDOW)) if mode == "bounded" else 0
        as_cold(output, mode, hbm, layers * (WINDOW - 1) + extra if hbm else 0)
        ids = [*ids, *output.token_ids, *prompt(12, 70 + turn)]


@pytest.mark.parametrize("mode", MODES)
def test_resumes_beside_each_other_and_under_preemption(mode: PrefillMode) -> None:
    """Prompts that share beginnings arrive together, again and again, in a pool that does not hold them all."""
    llm = fresh(tiny(mode, replay="exact", encoder_tokens=40, kv_tokens=40 * WINDOW))
    shared = prompt(40)
    prompts = [[*shared, *prompt(6 + 3 * i, 80 + i)] for i in range(4)] + [shared]
    resumed = 0
    with preempting(llm, every=6):
        for _ in range(3):
            for output in llm.generate(prompts, greedy(COUNT, logprobs=2)):
                resumed += output.tiers.window == "replay"
                assert output.tiers.lineage == 0
                same(output, cold(mode, tuple(output.prompt_ids)))
    assert resumed >= 8
    assert_idle(llm.engine)


def test_requests_choose_their_replay() -> None:
    """An exact one beside a bounded one; the blocks that a bounded one leaves are counted, and can be declined."""
    llm = fresh(tiny())
    llm.generate(prompt(40), greedy(1))
    got: dict[str, list[int]] = {}
    engine = llm.engine
    engine.sink = lambda events: [got.setdefault(e.request_id, []).extend(e.token_ids) for e in events] and None
    tiers = {}
    try:
        for name, more in (
            ("bounded", {}),
            ("exact", {"replay": "exact"}),
            ("after", {"replay": "exact"}),
            ("declined", {"replay": "exact", "max_lineage": 0}),
        ):
            ids = [*prompt(40), *prompt(16, 7), *([9] if name in ("after", "declined") else [])]
            sequence = engine.submit(Request(ids, greedy(COUNT), request_id=name, **more))
            while engine.busy:
                engine.step()
            tiers[name] = (sequence.tiers.hbm, sequence.tiers.lineage) if sequence.tiers else None
            if name == "bounded":
                # What it computed after its replay must not be what the next one finds.
                engine.manager.index.forget(engine.manager.index.match(sequence.cache.chain.keys)[5:])
    finally:
        engine.sink = lambda events: None
    assert tiers == {"bounded": (40, 1), "exact": (40, 0), "after": (56, 0), "declined": (56, 0)}
    assert got["exact"] == cold("bounded", (*prompt(40), *prompt(16, 7))).token_ids
    assert got["after"] == got["declined"] == cold("bounded", (*prompt(40), *prompt(16, 7), 9)).token_ids
    assert_idle(engine)


def test_what_an_exact_one_computes_takes_the_place_of_replayed_blocks() -> None:
    llm = fresh(tiny())
    ids = [*prompt(40), *prompt(16, 7)]
    llm.generate(prompt(40), greedy(1))
    (replayed,) = llm.generate(ids, greedy(1))
    assert (replayed.tiers.hbm, replayed.tiers.lineage) == (40, 1)
    index = llm.engine.manager.index
    chain = llm.engine.manager.sequence().chain
    chain.extend(ids)
    assert [index.lineage(block) for block in index.match(chain.keys)] == [0, 0, 0, 0, 0, 1, 1]
    sequence = llm.engine.submit(Request(ids, greedy(1), replay="exact", max_lineage=0))
    while llm.engine.busy:
        llm.engine.step()
    assert sequence.tiers is not None
    assert (sequence.tiers.hbm, sequence.tiers.lineage) == (40, 0)
    assert [index.lineage(block) for block in index.match(chain.keys)] == [0] * 7
    assert_idle(llm.engine)


# The checkpoints of the golden data and of NOISE


def test_the_golden_network_in_a_batch_and_in_chunks(golden: Path) -> None:
    checkpoint = str(golden / "tiny-a" / "checkpoint")
    prompts = [[5 + (i * 37 + k * k * 11) % 500 for k in range(n)] for i, n in enumerate((19, 30, 5))]
    llm = LLM(checkpoint, max_sequences=4, kv_tokens=2048, decoder_tokens=64, prefix_reuse=False)
    singly = [llm.generate([ids], greedy(5, logprobs=1))[0] for ids in prompts]
    cut = LLM(checkpoint, max_sequences=4, kv_tokens=2048, decoder_tokens=64, encoder_tokens=7)
    with preempting(cut, every=4) as count:
        together = cut.generate(prompts, greedy(5, logprobs=1))
    for left, right in zip(singly, together, strict=True):
        same(left, right)
    assert count["steps"] >= 8


def test_the_noise_network_in_a_batch_and_in_chunks() -> None:
    """Its window is longer, and prompts longer than its top-k are scored."""
    llm = LLM(str(noise_checkpoint()), max_sequences=4, kv_tokens=2048, encoder_tokens=50, prefix_reuse=False)
    prompts = [prompt(150, 1), prompt(33, 2), prompt(70, 3)]
    singly = [llm.generate([ids], greedy(4, logprobs=1))[0] for ids in prompts[:2]]
    together = llm.generate(prompts, greedy(4, logprobs=1))
    for left, right in zip(singly, together, strict=False):
        same(left, right)
