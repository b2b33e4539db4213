"""Composition of a step: which positions of which sequence, in what order, within the budgets (B045)."""

from __future__ import annotations

import random
from typing import cast

import pytest

from engines import WINDOW, short
from forebay.cache.manager import SequenceCache
from forebay.cache.prefix import KeyChain
from forebay.cache.replay import Geometry, KnownWindow, plan_resume
from forebay.engine.batcher import Batcher, Row
from forebay.engine.output import OutputProcessor
from forebay.engine.sampler import SamplingState
from forebay.engine.sequence import Sequence
from forebay.engine.types import PrefillMode, Request, SamplingParams

GEOMETRY = Geometry(WINDOW, WINDOW, encoder_layers=2, decoder_layers=2)


def sequence(
    prompt: int,
    generated: int = 0,
    computed: int | None = None,
    *,
    mode: PrefillMode = "bounded",
    hit: int = 0,
    windows: tuple[KnownWindow, ...] = (),
) -> Sequence:
    """A running sequence; by default nothing but what its plan skips is computed."""
    plan = plan_resume(prompt, hit, GEOMETRY, prefill=mode, windows=windows)
    cache = SequenceCache(KeyChain(b"", WINDOW), plan=plan)
    params = SamplingParams()
    state = SamplingState(params, [], 0)
    made = Sequence(Request(short(prompt), params), cache, state, cast(OutputProcessor, None), mode, 100, 0)
    made.tokens += [9] * generated
    made.computed = plan.start if computed is None else computed
    return made


def fields(row: Row) -> tuple[int, int, int, int, bool]:
    """As architecture §4 writes a row: start, stop, write_from, window_from, wants_logits."""
    return row.start, row.stop, row.write_from, row.window_from, row.wants_logits


def test_a_decode_row_is_the_newest_token() -> None:
    (row,) = Batcher(64, 64).compose([sequence(20, generated=3, computed=22)], [])
    assert fields(row) == (22, 23, 22, 0, True)
    assert (row.decoder_from, row.decoder_window_from, row.decoder_rows) == (12, 12, 1)


def test_chunks_of_a_prompt_and_their_decoder_rows() -> None:
    batcher, prefilling = Batcher(8, 64), sequence(20)
    seen = []
    while prefilling.remaining:
        (row,) = batcher.compose([], [prefilling])
        seen.append((*fields(row), row.decoder_rows))
        prefilling.computed = row.stop
    assert seen == [(0, 8, 0, 0, False, 0), (8, 16, 8, 0, False, 4), (16, 20, 16, 0, True, 4)]


def test_exact_mode_runs_the_decoder_half_everywhere() -> None:
    (row,) = Batcher(8, 64).compose([], [sequence(20, mode="exact")])
    assert (row.decoder_from, row.decoder_window_from, row.decoder_rows) == (0, 0, 8)


def test_a_resume_is_one_row_with_its_replay_in_front() -> None:
    (row,) = Batcher(64, 64).compose([], [sequence(40, hit=24)])
    assert fields(row) == (16, 40, 24, 16, True)
    assert (row.decoder_from, row.decoder_rows) == (32, 8)


def test_a_replay_may_be_cut() -> None:
    batcher, prefilling = Batcher(5, 64), sequence(40, hit=24)
    seen = []
    while prefilling.remaining:
        (row,) = batcher.compose([], [prefilling])
        seen.append(fields(row)[:4])
        prefilling.computed = row.stop
    assert seen == [(16, 21, 24, 16), (21, 26, 24, 16), (26, 31, 26, 16), (31, 36, 31, 16), (36, 40, 36, 16)]


def test_an_exact_resume_replays_through_both_halves() -> None:
    (row,) = Batcher(64, 64).compose([], [sequence(60, mode="exact", hit=40)])
    assert fields(row) == (12, 60, 40, 12, True)  # four layers, seven rows each
    assert (row.decoder_from, row.decoder_window_from, row.decoder_rows) == (12, 12, 48)


def test_a_resume_from_a_window_reads_below_its_start() -> None:
    (row,) = Batcher(64, 64).compose([], [sequence(40, hit=24, windows=(KnownWindow(24, "live"),))])
    assert fields(row) == (24, 40, 24, 16, True)
    assert (row.decoder_from, row.decoder_window_from) == (32, 32)
    (row,) = Batcher(64, 64).compose([], [sequence(28, hit=24, windows=(KnownWindow(16, "swa"),))])
    assert fields(row) == (16, 28, 24, 8, True)
    assert (row.decoder_from, row.decoder_window_from) == (20, 20)
    (row,) = Batcher(64, 64).compose([], [sequence(28, hit=24, windows=(KnownWindow(24, "swa", decoder_floor=16),))])
    assert fields(row) == (24, 28, 24, 16, True)
    assert (row.decoder_from, row.decoder_window_from) == (24, 16)


def test_generated_tokens_that_are_computed_again_keep_the_anchor_of_the_prompt() -> None:
    (row,) = Batcher(64, 64).compose([], [sequence(20, generated=5, computed=0)])
    assert fields(row) == (0, 25, 0, 0, True)
    assert (row.decoder_from, row.decoder_rows) == (12, 13)


def test_decode_rows_come_first_and_a_sequence_comes_once() -> None:
    decoding = [sequence(9, generated=1, computed=9) for _ in range(3)]
    prefilling = [sequence(30), sequence(4)]
    rows = Batcher(64, 64).compose(decoding, prefilling)
    assert [row.sequence for row in rows[:3]] == decoding
    assert sorted(row.stop for row in rows[3:]) == [4, 30]
    assert len({id(row.sequence) for row in rows}) == 5


@pytest.mark.case("B045")
def test_short_prompts_share_what_the_most_urgent_long_one_leaves() -> None:
    long, shorts = sequence(50_000), [sequence(20) for _ in range(20)]
    rows = {id(row.sequence): row for row in Batcher(512, 512).compose([], [long, *shorts])}
    assert sum(id(s) in rows and rows[id(s)].wants_logits for s in shorts) == 19
    assert rows[id(long)].stop == 128


@pytest.mark.case("B045")
def test_the_most_urgent_prompt_keeps_its_quarter_of_the_decoder_budget_too() -> None:
    long, shorts = sequence(500, computed=100, mode="exact"), [sequence(20, mode="exact") for _ in range(20)]
    rows = {id(row.sequence): row for row in Batcher(512, 64).compose([], [long, *shorts])}
    assert rows[id(long)].decoder_rows >= 16
    assert sum(row.decoder_rows for row in rows.values()) == 64


def test_the_most_urgent_prompt_takes_all_that_nobody_else_wants() -> None:
    (a, b) = Batcher(100, 100).compose([], [sequence(300), sequence(10)])
    assert [row.stop for row in (a, b)] == [10, 90]


def test_an_urgent_prompt_that_is_also_the_shortest_is_not_held_to_its_quarter() -> None:
    rows = Batcher(100, 100).compose([], [sequence(60), sequence(300)])
    assert [row.stop for row in rows] == [60, 40]


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_prefill_goes_on_however_many_rows_decode(budget: int) -> None:
    decoding = [sequence(9, generated=1, computed=9) for _ in range(8)]
    waiting = sequence(3)
    rows = Batcher(budget, 8).compose(decoding, [waiting])
    assert len(rows) == 9
    assert (rows[-1].start, rows[-1].stop) == (0, 1)


def test_budgets_hold_and_everyone_comes_to_an_end() -> None:
    """Random mixes, run to the end: no step exceeds a budget, each moves the most urgent prompt, no position is left out or doubled."""
    numbers = random.Random(5)
    for _ in range(60):
        encoder, decoder = numbers.choice([1, 5, 16, 64]), numbers.choice([8, 16, 64])
        batcher = Batcher(encoder, decoder)
        decoding = [sequence(9, generated=1, computed=9) for _ in range(numbers.randrange(6))]
        prefilling = [
            sequence(numbers.randrange(1, 90), mode=numbers.choice(["bounded", "exact"]), hit=numbers.choice([0, 0, 16, 24, 80]))
            for _ in range(numbers.randrange(1, 6))
        ]
        while prefilling:
            rows = batcher.compose(decoding, prefilling)
            prompt_rows = rows[len(decoding) :]
            room_e, room_d = max(1, encoder - len(decoding)), max(1, decoder - len(decoding))
            assert sum(row.stop - row.start for row in prompt_rows) <= room_e
            assert sum(row.decoder_rows for row in prompt_rows) <= room_d
            assert all(row.stop > row.start == row.sequence.computed for row in prompt_rows)
            first = next(row for row in prompt_rows if row.sequence is prefilling[0])
            needed = min(first.sequence.remaining, max(1, room_e // 4))
            assert first.stop - first.start >= min(needed, max(1, room_d // 4))
            for row in prompt_rows:
                row.sequence.computed = row.stop
                assert row.wants_logits == (row.stop == len(row.sequence.tokens))
                assert not row.wants_logits or row.decoder_rows > 0
            prefilling = [s for s in prefilling if s.remaining]
