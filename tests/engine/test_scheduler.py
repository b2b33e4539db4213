"""Who runs: order, admission, growth, preemption and what is saved of it, expiry (B041, B043, B044, B048)."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from engines import WINDOW, Memo, greedy, next_of, short
from forebay.engine.batcher import Batcher, Row
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import SavedWindow, Sequence
from forebay.engine.types import Request


class Bench:
    """A scheduler over a real cache, a clock set by hand, and steps that compute nothing."""

    def __init__(self, *, blocks: int = 16, budget: int = 64, **options: Any) -> None:
        self.memo = Memo(kv_tokens=blocks * WINDOW, encoder_tokens=budget, **options)
        self.manager, self.engine = self.memo.manager, self.memo.engine
        self.now = 1000.0
        self.saved: list[str] = []
        self.restored: list[str] = []
        batcher = Batcher(WINDOW, budget, 512)
        self.scheduler = Scheduler(
            self.manager, batcher, self.engine.options, save=self._save, restore=self._restore, clock=lambda: self.now
        )
        self._order = 0

    def _save(self, sequence: Sequence, contents: tuple[int, ...]) -> None:
        assert sequence.cache.is_open
        self.saved.append(sequence.id)
        none = cast(Any, None)
        sequence.saved = SavedWindow(none, none, none, None, sequence.computed, contents)

    def _restore(self, sequence: Sequence) -> None:
        assert sequence.cache.is_open
        self.restored.append(sequence.id)

    def add(self, name: str, length: int, *, number: int | None = None, priority: int = 0, tokens: int = 100, mode: Any = None) -> Sequence:
        """Arrives now. Prompts of different names differ unless `number` says which one it is."""
        ids = short(length, sum(map(ord, name)) if number is None else number)
        request = Request(ids, greedy(tokens), request_id=name, priority=priority, prefill=mode, arrived=self.now)
        sequence = self.engine.prepare(request)
        sequence.order = self._order
        self._order += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Row]:
        """Schedule, and do as if the rows had run: every due token is chosen, nothing ends."""
        rows = self.scheduler.schedule()
        for row in rows:
            sequence = row.sequence
            sequence.computed = row.stop
            self.manager.commit(sequence.cache, sequence.tokens, row.stop)
            if row.wants_logits:
                sequence.tokens.append(next_of(sequence.tokens))
        self.manager.check([s.cache for s in self.scheduler.running])
        return rows

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)

    @property
    def running(self) -> list[str]:
        return [s.id for s in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [s.id for s in self.scheduler.waiting]


# Order


def test_priority_then_arrival() -> None:
    bench = Bench(max_sequences=1)
    bench.add("running", 4)
    bench.step()
    for name, priority in (("late", 5), ("a", 0), ("b", 0), ("soon", -1)):
        bench.add(name, 4, priority=priority)
    assert bench.waiting == ["soon", "a", "b", "late"]


@pytest.mark.parametrize(("aging", "overtakes"), [(10.0, True), (0.0, False)])
def test_waiting_outweighs_priority_with_time(aging: float, overtakes: bool) -> None:
    bench = Bench(max_sequences=1, aging_s=aging)
    bench.add("running", 4)
    bench.step()
    bench.add("patient", 4, priority=3)
    bench.now += 29.0
    bench.add("before", 4)
    bench.now += 2.0
    bench.add("after", 4)
    assert bench.waiting == (["before", "patient", "after"] if overtakes else ["before", "after", "patient"])


def test_requests_of_one_moment_keep_their_order_at_any_later_time() -> None:
    bench = Bench(max_sequences=1)
    bench.now = 123456.789
    made = [bench.add(f"r{i}", 4) for i in range(50)]
    for _ in range(20):
        bench.now += 0.000_123
        backwards = made[::-1]
        assert sorted(backwards, key=bench.scheduler.rank) == made


# Admission


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    bench = Bench(blocks=10)
    first = bench.add("first", 60)
    bench.add("large", 40)
    bench.add("small", 4)
    bench.step()
    assert (bench.running, bench.waiting) == (["first"], ["large", "small"])
    bench.end(first)
    bench.step()
    assert (bench.running, bench.waiting) == (["large", "small"], [])


def test_no_more_run_than_there_are_places() -> None:
    bench = Bench(max_sequences=2)
    made = [bench.add(f"r{i}", 4) for i in range(3)]
    bench.step()
    assert bench.running == ["r0", "r1"]
    bench.end(made[0])
    bench.step()
    assert bench.running == ["r1", "r2"]


@pytest.mark.case("B041")
def test_an_admitted_prompt_holds_all_its_blocks_at_once() -> None:
    """Both would fit with what their hits hold, not with what they need."""
    bench = Bench(blocks=64)
    for number in (1, 2):
        bench.add(f"warm{number}", 28 * WINDOW, number=number)
    while len([s for s in bench.scheduler.running if s.generated]) < 2:
        bench.step()
    for sequence in list(bench.scheduler.running):
        bench.end(sequence)
    bench.add("a", 40 * WINDOW, number=1)
    bench.add("b", 40 * WINDOW, number=2)
    bench.step()
    assert bench.running == ["a"]
    assert len(bench.scheduler.running[0].cache.table) >= 40
    assert bench.waiting == ["b"]


# Growth and preemption


def grown(bench: Bench, *names: str, length: int = 4) -> list[Sequence]:
    """Sequences that decode."""
    made = [bench.add(name, length) for name in names]
    while not all(s.generated for s in made):
        bench.step()
    return made


def until_preempted(bench: Bench) -> Sequence:
    for _ in range(400):
        bench.step()
        if bench.scheduler.preempted:
            return bench.scheduler.preempted[0]
    raise AssertionError("nobody was preempted")


def test_the_last_in_order_makes_room() -> None:
    bench = Bench(blocks=6)
    a, b, c = grown(bench, "a", "b", "c")
    victim = until_preempted(bench)
    assert victim is c
    assert c.preemptions == 1
    assert not c.cache.is_open
    assert bench.running == ["a", "b"]
    assert bench.waiting == ["c"]
    assert a.preemptions == b.preemptions == 0


def test_a_preempted_sequence_comes_before_those_that_never_ran() -> None:
    bench = Bench(blocks=6, max_sequences=3)
    _, _, c = grown(bench, "a", "b", "c")
    bench.add("new", 4)
    assert until_preempted(bench) is c
    assert bench.waiting == ["c", "new"]


def test_it_goes_on_where_it_was_when_its_blocks_are_still_there() -> None:
    bench = Bench(blocks=12)
    a, b = grown(bench, "a", "b", length=20)
    bench.scheduler._preempt(b)
    assert bench.saved == ["b"]
    computed = len(b.tokens) - 1
    rows = bench.step()
    assert bench.restored == ["b"]
    assert [(row.sequence.id, row.start, row.stop) for row in rows if row.sequence is b] == [("b", computed, computed + 1)]
    assert b.saved is None
    assert a.preemptions == 0


def test_it_computes_again_from_the_start_when_they_are_not() -> None:
    bench = Bench(blocks=12)
    _, b = grown(bench, "a", "b", length=20)
    bench.scheduler._preempt(b)
    bench.manager.clear()
    (row,) = [row for row in bench.step() if row.sequence is b]
    assert (row.start, row.stop) == (0, 21)
    assert bench.restored == []
    assert b.saved is None


@pytest.mark.case("B048")
def test_it_does_not_go_on_with_blocks_that_another_computed() -> None:
    """The same history under the same key, but not the same bytes: another request may have computed them after a replay."""
    bench = Bench(blocks=16, max_sequences=1)
    (a,) = grown(bench, "a", length=20)
    tokens = list(a.tokens)
    bench.scheduler._preempt(a)
    assert bench.saved == ["a"]
    bench.manager.clear()
    twin = bench.engine.prepare(Request(tokens, greedy(), priority=-9, arrived=bench.now))
    bench.scheduler.add(twin)
    bench.step()
    assert twin.generated == 1
    bench.end(twin)
    (row,) = [row for row in bench.step() if row.sequence is a]
    assert row.start == 0
    assert bench.restored == []


def test_nothing_is_saved_that_cannot_be_put_back() -> None:
    """A private copy of a cached block is lost when it is released; without reuse every block is."""
    bench = Bench(blocks=16, prefix_reuse=False)
    (a,) = grown(bench, "a", length=20)
    bench.scheduler._preempt(a)
    assert bench.saved == []
    twins = Bench(blocks=16)
    first, second = twins.add("first", 20, number=3), twins.add("second", 20, number=3)
    twins.step()
    twins.scheduler._preempt(second)
    assert twins.saved == []
    twins.scheduler._preempt(first)
    assert twins.saved == ["first"]


@pytest.mark.parametrize("computed", [0, 4, 8])
def test_a_replay_that_did_not_end_is_begun_again(computed: int) -> None:
    """Its window is half another's, and the block it would save as unfinished is the shared one."""
    bench = Bench(blocks=20, budget=4)
    (warm,) = grown(bench, "warm", length=33)
    ids = warm.tokens[:33]
    bench.end(warm)
    again = bench.engine.prepare(Request(ids, greedy(), arrived=bench.now))
    bench.scheduler.add(again)
    bench.scheduler.schedule()
    assert (again.resumed_at, again.computed) == (32, 24)
    again.computed += computed
    bench.scheduler._preempt(again)
    assert bench.saved == []
    (row,) = bench.step()
    assert (row.start, row.write_from, row.window_from) == (24, 32, 24)


def test_a_recompute_takes_no_longer_hit_than_the_first_time() -> None:
    """Blocks that another sequence has stored meanwhile would make another text of it."""
    bench = Bench(blocks=40)
    (a,) = grown(bench, "a", length=40)
    ids = a.tokens[:40]
    assert a.resumed_at == 0
    bench.scheduler._preempt(a)
    a.saved = None
    (row,) = [row for row in bench.step() if row.sequence is a]
    assert row.start == 0
    bench.end(a)
    second = bench.engine.prepare(Request(ids, greedy(), arrived=bench.now))
    bench.scheduler.add(second)
    bench.step()
    assert second.resumed_at == 32


def test_exact_sequences_adopt_nothing_but_their_own() -> None:
    bench = Bench(blocks=40)
    (warm,) = grown(bench, "warm", length=40)
    ids = warm.tokens[:40]
    bench.end(warm)
    exact = bench.engine.prepare(Request(ids, greedy(), prefill="exact", arrived=bench.now))
    scored = bench.engine.prepare(Request(ids, greedy(prompt_logprobs=0), arrived=bench.now))
    for sequence in (exact, scored):
        bench.scheduler.add(sequence)
    bench.step()
    assert exact.resumed_at == scored.resumed_at == 0
    assert exact.tiers is not None
    assert (exact.tiers.hbm, exact.tiers.compute) == (0, 40)


def test_a_sequence_alone_that_cannot_grow_is_told_apart() -> None:
    bench = Bench(blocks=4)
    (a,) = grown(bench, "a")
    for _ in range(40):
        rows = bench.step()
        if bench.scheduler.too_long:
            break
    assert bench.scheduler.too_long == [a]
    assert rows == []
    assert len(a.tokens) == 4 * WINDOW + 1
    assert bench.running == ["a"]


# Leaving


def test_those_that_wait_too_long_are_given_up_but_not_those_that_have_started() -> None:
    bench = Bench(blocks=6, max_queue_wait_s=5.0)
    grown(bench, "a", "b", "c")
    preempted = until_preempted(bench)
    bench.add("late", 4)
    bench.now += 5.5
    bench.step()
    assert [s.id for s in bench.scheduler.expired] == ["late"]
    assert bench.waiting == [preempted.id]


def test_no_limit_on_waiting_when_it_is_zero() -> None:
    bench = Bench(max_sequences=1, max_queue_wait_s=0.0)
    grown(bench, "a")
    bench.add("b", 4)
    bench.now += 1e6
    bench.step()
    assert bench.scheduler.expired == []
    assert bench.waiting == ["b"]


def test_removal_gives_everything_back_wherever_a_sequence_is() -> None:
    bench = Bench(max_sequences=1)
    (a,) = grown(bench, "a", length=20)
    b = bench.add("b", 4)
    bench.end(b)
    bench.end(a)
    assert bench.running == bench.waiting == []
    stats = bench.manager.stats()
    assert (stats.used, stats.windows_used) == (0, 0)


@pytest.mark.case("B044")
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_arrivals_and_removals_leaves_nothing_behind(seed: int) -> None:
    """Few windows, few blocks, shared prefixes: the first in order moves at every step, blocks have owners, all is free at the end."""
    numbers = random.Random(seed)
    bench = Bench(blocks=24, max_sequences=numbers.choice([2, 5]), budget=numbers.choice([3, 32]))
    left, alive = 120, []
    for _ in range(20_000):
        if left and numbers.random() < 0.5:
            left -= 1
            priority, mode = numbers.choice([0, 0, 0, -2, 3]), numbers.choice(["bounded", "bounded", "exact"])
            alive.append(bench.add(f"r{left}", numbers.randrange(1, 90), number=numbers.randrange(4), priority=priority, mode=mode))
        bench.now += 0.05
        rows = bench.step()
        assert rows or not alive
        if bench.scheduler.running:
            first = min(bench.scheduler.running, key=bench.scheduler.rank)
            assert any(row.sequence is first for row in rows)
        for sequence in list(alive):
            if sequence.generated >= 30 or numbers.random() < 0.004:
                alive.remove(sequence)
                bench.end(sequence)
        if not left and not alive:
            break
    assert not alive
    assert bench.running == bench.waiting == []
    bench.manager.check([])
    assert bench.manager.stats().used == 0
