"""Who runs: order, admission, resumes, growth, preemption and what is saved of it, expiry (B041, B043, B044, B048)."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from itertools import takewhile
from typing import Any, cast

import numpy as np
import pytest

from engines import WINDOW, Memo, greedy, next_of, short
from forebay.cache.prefix import KeyChain
from forebay.cache.restore import Restorer
from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.engine.batcher import Batcher, Row
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import SavedWindow, Sequence
from forebay.engine.types import Request, TierCounts


class Bench:
    """A scheduler over a real cache, a clock set by hand, and steps that compute nothing."""

    def __init__(self, *, blocks: int = 16, budget: int = 64, **options: Any) -> None:
        self.memo = Memo(kv_tokens=blocks * WINDOW, encoder_tokens=budget, **options)
        self.manager, self.engine = self.memo.manager, self.memo.engine
        self.now = 1000.0
        self.saved: list[str] = []
        self.restored: list[str] = []
        batcher = Batcher(budget, 512)
        self.scheduler = Scheduler(
            self.manager, batcher, self.engine.options, save=self._save, restore=self._restore, clock=lambda: self.now
        )
        self._order = 0

    def _save(self, sequence: Sequence, contents: tuple[int, ...]) -> None:
        assert sequence.cache.is_open
        self.saved.append(sequence.id)
        none = cast(Any, None)
        assert sequence.cache.plan is not None
        sequence.saved = SavedWindow(none, none, none, None, sequence.computed, contents, sequence.cache.plan)

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
    assert again.first_plan is not None
    assert (again.first_plan.resume, again.computed) == (32, 24)
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
    assert a.first_plan is not None
    assert a.first_plan.resume == 0
    bench.scheduler._preempt(a)
    a.saved = None
    (row,) = [row for row in bench.step() if row.sequence is a]
    assert row.start == 0
    bench.end(a)
    second = bench.engine.prepare(Request(ids, greedy(), arrived=bench.now))
    bench.scheduler.add(second)
    bench.step()
    assert second.first_plan is not None
    assert second.first_plan.resume == 32


def warmed(bench: Bench, length: int = 40) -> list[int]:
    """A prompt whose blocks are cached, as a cold run left them."""
    (warm,) = grown(bench, "warm", length=length)
    bench.end(warm)
    return warm.tokens[:length]


def asked(bench: Bench, ids: list[int], **request: Any) -> Sequence:
    sequence = bench.engine.prepare(Request(ids, request.pop("params", greedy()), arrived=bench.now, **request))
    sequence.order = bench._order
    bench._order += 1
    bench.scheduler.add(sequence)
    return sequence


def test_exact_sequences_adopt_what_cold_runs_left_and_scored_ones_nothing() -> None:
    bench = Bench(blocks=60)
    ids = warmed(bench)
    exact, scored = asked(bench, ids, prefill="exact"), asked(bench, ids, params=greedy(prompt_logprobs=0))
    rows = {row.sequence.id: row for row in bench.step()}
    assert exact.tiers is not None
    assert scored.tiers is not None
    # MEMO has three layers: three windows less a token each are computed again, in both halves.
    assert exact.tiers == TierCounts(hbm=32, compute=8, window="replay", replayed=3 * (WINDOW - 1))
    assert scored.tiers == TierCounts(compute=40)
    row = rows[exact.id]
    assert (row.start, row.stop, row.write_from, row.window_from) == (11, 40, 32, 11)
    assert (row.decoder_from, row.decoder_window_from) == (11, 11)


def test_exact_sequences_adopt_nothing_that_a_replay_computed() -> None:
    bench = Bench(blocks=60)
    ids = [*warmed(bench)[:32], *short(16, 9)]
    replayed = asked(bench, ids)
    bench.step()
    assert replayed.tiers is not None
    assert (replayed.tiers.hbm, replayed.tiers.lineage) == (32, 1)
    bench.end(replayed)
    sequences = {
        "default": asked(bench, [*ids, 9]),
        "exact prefill": asked(bench, [*ids, 9], prefill="exact"),
        "no replays": asked(bench, [*ids, 9], max_lineage=0),
        "one replay": asked(bench, [*ids, 9], max_lineage=1),
        "exact replay": asked(bench, [*ids, 9], replay="exact"),
    }
    bench.step()
    found = {name: (s.tiers.hbm, s.tiers.lineage) for name, s in sequences.items() if s.tiers}
    assert found == {
        "default": (48, 2),
        "exact prefill": (32, 0),
        "no replays": (32, 0),
        "one replay": (48, 1),  # one is behind what it adopts, so its own may not add one
        "exact replay": (32, 0),
    }


def test_the_engines_wishes_hold_where_a_request_has_none() -> None:
    bench = Bench(blocks=60, replay="exact", max_lineage=0)
    ids = [*warmed(bench)[:32], *short(16, 9)]
    exact = asked(bench, ids)
    bounded = asked(bench, [*ids[:32], *short(16, 10)], replay="bounded")
    bench.step()
    assert exact.tiers == TierCounts(hbm=32, compute=16, window="replay", replayed=2 * (WINDOW - 1))
    assert bounded.tiers == exact.tiers, "a bounded replay would leave one behind, which the server forbids"


def test_a_recompute_adopts_nothing_with_more_replays_behind_it() -> None:
    """The first time its blocks were a cold run's; now others, computed after a replay, are cached in their place."""
    bench = Bench(blocks=60, max_sequences=1)
    ids = warmed(bench)
    a = asked(bench, ids, replay="exact")
    bench.step()
    assert a.tiers is not None
    assert (a.tiers.hbm, a.tiers.lineage) == (32, 0)
    assert a.first_plan is not None
    assert a.first_plan.faithful
    bench.scheduler._preempt(a)
    a.saved = None
    bench.manager.clear()
    ghost = bench.manager.sequence()
    plan = bench.manager.open(ghost, ids)
    assert plan is not None
    ghost.plan = replace(plan, lineage=1)
    bench.manager.commit(ghost, ids, 40)
    bench.manager.release(ghost)
    (row,) = bench.step()
    assert row.sequence is a
    assert row.start == row.write_from == 0
    assert a.cache.plan is not None
    assert (a.cache.plan.resume, a.cache.plan.lineage) == (0, 0)


# Windows of running sequences, and blocks from elsewhere


class Shelf:
    """A store whose reads come in when the test says so: `lookup`, and a `fetch` that is its own handle."""

    def __init__(self) -> None:
        self.lineages: dict[bytes, int] = {}
        self.reads: list[Read] = []

    def lookup(self, keys: list[bytes], max_lineage: int | None = None) -> list[int]:
        found = [self.lineages.get(key, -1) for key in keys]
        return list(takewhile(lambda n: n >= 0 and (max_lineage is None or n <= max_lineage), found))

    def fetch(self, keys: list[bytes], wake: Any, lineages: Any) -> Read:
        self.reads.append(Read(keys))
        return self.reads[-1]


class Read:
    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.come: list[int] = []
        self.given: list[int] = []
        self.failed_at: int | None = None
        self.still_since = 0.0
        self.promoted = self.cancelled = False

    def take(self, most: int | None = None) -> list[tuple[int, np.ndarray]]:
        came = self.come[:most]
        self.come = self.come[len(came) :]
        return [(i, np.full(BLOCK_BYTES, self.keys[i][0], np.uint8)) for i in came]

    def free(self, positions: list[int]) -> None:
        self.given += positions

    def promote(self) -> None:
        self.promoted = True

    def cancel(self) -> None:
        self.cancelled = True


BLOCK_BYTES = Memo(kv_tokens=WINDOW).manager.layout.block_bytes


class TierBench(Bench):
    """With a store behind it that has the first `stored` blocks of a prompt."""

    def __init__(self, ids: list[int], stored: int, lineage: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.shelf = Shelf()
        keys = KeyChain(self.manager.sequence().chain.root, WINDOW)
        keys.extend(ids)
        self.keys = keys.keys
        self.shelf.lineages = dict.fromkeys(self.keys[:stored], lineage)
        self.woken = threading.Event()
        restorer = Restorer(self.manager.geometry, cast(Any, self.shelf), None, self.woken.set)
        self.scheduler.restorer = restorer

    def found(self, sequence: Sequence) -> Read:
        """Wait until the tiers have said what they have."""
        assert sequence.restore is not None
        assert sequence.restore._found.wait(5)
        return self.shelf.reads[-1]


LONG = short(60, 5)


def test_whoever_waits_for_blocks_is_admitted_between_schedules() -> None:
    bench = TierBench(LONG, stored=5)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    assert bench.scheduler.meanwhile()
    assert bench.running == [sequence.id] and sequence.restoring and read.promoted
    read.come = [0, 1, 2]
    assert bench.scheduler.meanwhile()
    read.come = [3, 4]
    assert not bench.scheduler.meanwhile(), "it has all its blocks and wants rows"
    assert bench.scheduler.started == []
    (row,) = bench.step()
    assert (row.start, row.stop, bench.scheduler.started) == (32, 60, [sequence])
    assert bench.step() is not None and bench.scheduler.started == []


def test_what_has_to_be_scheduled_is_not_left_to_meanwhile() -> None:
    bench = Bench(blocks=8, max_queue_wait_s=60.0)
    first = bench.add("a", 20)
    assert not bench.scheduler.meanwhile(), "its rows are to be computed"
    bench.step()
    large = bench.add("b", 40)
    assert bench.scheduler.meanwhile() and bench.running == ["a"], "there is no room for it"
    bench.now += 61
    assert not bench.scheduler.meanwhile(), "it has waited too long"
    bench.step()
    assert bench.scheduler.expired == [large] and bench.scheduler.meanwhile()
    bench.add("c", 60)
    assert bench.scheduler.meanwhile()
    bench.end(first)
    assert not bench.scheduler.meanwhile() and bench.running == ["c"]


def test_whoever_found_no_room_tries_again_when_it_needs_less() -> None:
    """The blocks that there are stay as many: one of its history is no longer idle, since somebody shares it instead of loading its own."""
    bench = TierBench(LONG, stored=5, blocks=17, max_sequences=4)
    loading = asked(bench, LONG)
    read = bench.found(loading)
    assert bench.scheduler.meanwhile() and loading.restoring
    ghost = bench.manager.sequence()
    assert bench.manager.open(ghost, LONG[:40], reuse=False) is not None
    bench.manager.commit(ghost, LONG[:40], 40)
    bench.manager.release(ghost)
    waits = asked(bench, [*LONG[:40], *short(20, 7)])
    assert waits.restore is None or waits.restore._found.wait(5)
    assert bench.scheduler.meanwhile() and bench.waiting == [waits.id]
    room = bench.manager.available_blocks()
    read.come = [0, 1, 2]
    assert bench.scheduler.meanwhile() and bench.waiting == [waits.id]
    assert bench.manager.available_blocks() == room
    assert not bench.scheduler.meanwhile() and not bench.waiting and waits.cache.table[:5] == loading.cache.table[:3] + [
        bench.manager.index.find(key) for key in bench.keys[3:5]
    ]  # fmt: skip


def test_a_prefix_that_is_lost_and_computed_by_another_counts() -> None:
    """Its blocks are as many as when there was no room, and there are as many beside; but they are another's now and not idle."""
    bench = Bench(blocks=17, max_sequences=4)
    warm = bench.manager.sequence()
    assert bench.manager.open(warm, LONG[:40], reuse=False) is not None
    bench.manager.commit(warm, LONG[:40], 40)
    bench.manager.release(warm)
    large = bench.add("large", 62)  # 9 blocks of 17
    bench.step()
    waits = asked(bench, [*LONG[:40], *short(20, 7)])
    assert bench.scheduler.meanwhile() and bench.waiting == [waits.id]
    room = bench.manager.available_blocks()
    bench.manager.clear()
    other = bench.manager.sequence()
    bench.end(large)
    fill = bench.manager.sequence()
    assert bench.manager.open(other, LONG[:40]) is not None
    assert bench.manager.open(fill, short(8 * (bench.manager.available_blocks() - room - 1), 11)) is not None
    bench.manager.commit(other, LONG[:40], 40)
    assert bench.manager.available_blocks() == room
    assert not bench.scheduler.meanwhile() and waits.cache.table[:4] == other.table[:4]


def test_a_preempted_sequence_without_room_keeps_nobody_from_going_ahead() -> None:
    bench = Bench(blocks=20)
    running = grown(bench, "a", "b", "c", length=40)[1]
    preempted, index = until_preempted(bench), bench.manager.index
    assert preempted.id == "c" and preempted.saved is not None and len(preempted.saved.contents) > 5
    for _ in range(2):
        assert bench.scheduler.meanwhile() and preempted.saved is not None
        blocks, gains = index.match(preempted.cache.chain.keys), index.gains
        index.acquire(blocks[:1])  # it would need one less; now it needs as many again
        index.release(blocks[:1])
        assert index.gains == gains + 1 and bench.scheduler.meanwhile()
    bench.end(running)
    assert not bench.scheduler.meanwhile(), "there is room"
    bench.step()
    assert bench.restored == ["c"]


def test_an_admission_that_fails_can_be_tried_again() -> None:
    """Whether its window cannot be loaded, or what was saved of it cannot be put back: it owns nothing."""
    bench = WindowBench()
    failing = cast(Any, lambda *given: 1 / 0)
    bench.scheduler.live = {bench.keys[5]: window_at(bench, 48, 3)}
    loads, bench.scheduler._load_window = bench.scheduler._load_window, failing  # type: ignore[method-assign]
    sequence = asked(bench, [*bench.ids[:48], *short(20, 4)])
    assert sequence.restore is None or sequence.restore._found.wait(5)
    for attempt in (bench.scheduler.meanwhile, bench.scheduler.schedule, bench.scheduler.schedule):
        with pytest.raises(ZeroDivisionError):
            attempt()
        bench.manager.check([])
        assert bench.waiting == [sequence.id] and not bench.running
    bench.scheduler._load_window = loads  # type: ignore[method-assign]
    while not sequence.generated:
        bench.step()
    assert sequence.tiers == TierCounts(hbm=48, compute=20, window="live")
    bench.step()
    bench.scheduler._preempt(sequence)
    restores, bench.scheduler._restore = bench.scheduler._restore, failing
    with pytest.raises(ZeroDivisionError):
        bench.scheduler.schedule()
    bench.manager.check([])
    bench.scheduler._restore = restores
    (row,) = bench.step()
    assert bench.restored == [sequence.id] and row.stop == len(sequence.tokens) - 1


def test_blocks_come_in_before_anything_is_computed() -> None:
    bench = TierBench(LONG, stored=5)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    assert bench.step() == []
    assert read.promoted
    assert bench.running == [sequence.id]
    assert sequence.restoring
    assert sequence.tiers is None
    assert bench.scheduler.started == []
    for i in (0, 1, 2, 3):
        read.come = [i]
        assert bench.step() == []
    bench.now += 1.5
    read.come = [4]
    (row,) = bench.step()
    assert (row.start, row.stop, row.write_from) == (32, 60, 40)
    assert bench.scheduler.started == [sequence]
    assert sequence.tiers == TierCounts(ssd=40, compute=20, window="replay", replayed=8, lineage=1, restore_s=1.5)
    assert read.given == [0, 1, 2, 3, 4]
    assert read.cancelled
    assert sequence.restore is None
    assert [int(bench.manager.pool.data[b, 0]) for b in sequence.cache.table[:5]] == [key[0] for key in bench.keys[:5]]
    # The next one finds them on the device.
    bench.end(sequence)
    again = asked(bench, LONG)
    assert again.restore is not None
    assert again.restore._found.wait(5)
    bench.step()
    assert again.tiers is not None
    assert (again.tiers.hbm, again.tiers.ssd, again.tiers.restore_s) == (56, 0, 0.0)


def test_a_step_with_decoding_sequences_takes_a_part_of_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.engine.scheduler.RESTORED_AT_ONCE", 2)
    bench = TierBench(LONG, stored=5)
    other = bench.add("other", 3)
    while not other.decoding:
        bench.step()
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    bench.step()
    read.come = [0, 1, 2, 3, 4]
    for given in (2, 4):
        assert [row.sequence for row in bench.step()] == [other]
        assert len(read.given) == given
    bench.end(other)
    assert [row.sequence for row in bench.step()] == [sequence]
    assert read.given == [0, 1, 2, 3, 4]


def test_what_the_device_has_by_now_is_not_loaded_over_it() -> None:
    bench = TierBench(LONG, stored=5)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    other = bench.manager.sequence()
    assert bench.manager.open(other, LONG[:24], reuse=False) is not None
    bench.manager.pool.data[other.table] = 200
    bench.manager.commit(other, LONG[:24], 24)
    bench.manager.release(other)
    bench.step()
    assert sequence.cache.loading == range(3, 5)
    read.come = [0, 1, 2, 3, 4]
    (row,) = bench.step()
    assert row.write_from == 40
    assert [int(bench.manager.pool.data[b, 0]) for b in sequence.cache.table[:5]] == [200, 200, 200, bench.keys[3][0], bench.keys[4][0]]
    assert read.given == [0, 1, 2, 3, 4]
    assert sequence.tiers is not None
    assert (sequence.tiers.hbm, sequence.tiers.ssd) == (24, 16)


def test_one_whose_tiers_have_not_answered_is_overtaken_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TierBench(LONG, stored=5)
    held, lookup = threading.Event(), bench.shelf.lookup
    bench.shelf.lookup = lambda *args: held.wait(10) and lookup(*args)  # type: ignore[method-assign]
    slow = asked(bench, LONG)
    quick = bench.add("quick", 3)
    assert quick.restore is not None
    assert quick.restore._found.wait(5)
    (row,) = bench.step()
    assert row.sequence is quick
    assert bench.waiting == [slow.id]
    now = time.monotonic()
    monkeypatch.setattr("forebay.cache.restore.time.monotonic", lambda: now + 60)
    rows = bench.step()
    assert [(row.sequence.id, row.start) for row in rows if row.sequence is slow] == [(slow.id, 0)]
    assert slow.tiers == TierCounts(compute=60)
    held.set()
    assert slow.restore is None


def test_a_read_that_fails_leaves_what_came_before_it() -> None:
    bench = TierBench(LONG, stored=6)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    bench.step()
    read.come, read.failed_at = [0, 1, 2], 3
    (row,) = bench.step()
    assert read.cancelled
    assert (row.start, row.write_from) == (16, 24)
    assert sequence.tiers == TierCounts(ssd=24, compute=36, window="replay", replayed=8, lineage=1, restore_s=0.0)


def test_a_read_that_fails_at_once_means_computing() -> None:
    bench = TierBench(LONG, stored=6)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    bench.step()
    read.failed_at = 0
    (row,) = bench.step()
    assert (row.start, row.stop, row.write_from) == (0, 60, 0)
    assert sequence.tiers == TierCounts(compute=60)


def test_a_read_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TierBench(LONG, stored=6)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    bench.step()
    read.come = [0, 1]
    bench.step()
    now = time.monotonic()
    monkeypatch.setattr("forebay.cache.restore.time.monotonic", lambda: now + 60)
    (row,) = bench.step()
    assert read.cancelled
    assert (row.start, row.write_from) == (8, 16)
    assert sequence.tiers is not None
    assert (sequence.tiers.ssd, sequence.tiers.compute) == (16, 44)


def test_a_read_that_waits_for_its_turn_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TierBench(LONG, stored=6)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    now = time.monotonic()
    monkeypatch.setattr("forebay.cache.restore.time.monotonic", lambda: now)
    bench.step()
    for later in (1, 2, 60):
        read.still_since = now + later - 1  # the disk brought a block for somebody else
        monkeypatch.setattr("forebay.cache.restore.time.monotonic", lambda later=later: now + later)
        assert bench.step() == []
    read.come = list(range(6))
    (row,) = bench.step()
    assert row.write_from == 48
    assert sequence.tiers is not None
    assert sequence.tiers.ssd == 48


@pytest.mark.parametrize("came", [0, 2])
def test_one_that_leaves_while_its_blocks_come_leaves_nothing(came: int) -> None:
    bench = TierBench(LONG, stored=6)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    bench.step()
    read.come = list(range(came))
    bench.step()
    bench.end(sequence)
    assert read.cancelled
    bench.manager.check([])
    stats = bench.manager.stats()
    assert (stats.used, stats.windows_used, stats.indexed) == (0, 0, came)


def test_one_that_is_preempted_while_its_blocks_come_begins_anew() -> None:
    bench = TierBench(LONG, stored=6)
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    bench.step()
    read.come = [0, 1]
    bench.step()
    bench.scheduler._preempt(sequence)
    assert bench.saved == []
    assert sequence.first_plan is None
    assert read.cancelled
    second = bench.found(sequence)
    assert second is not read
    assert second.keys == bench.keys[2:6]
    bench.step()
    second.come = [0, 1, 2, 3]
    (row,) = bench.step()
    assert (row.start, row.write_from) == (40, 48)
    assert sequence.tiers is not None
    assert (sequence.tiers.ssd, sequence.tiers.hbm) == (48, 0), "the blocks were loaded for it, in two goes"


def test_blocks_with_too_many_replays_behind_them_are_not_asked_for() -> None:
    bench = TierBench(LONG, stored=6, lineage=2)
    picky = asked(bench, LONG, max_lineage=1)
    assert picky.restore is not None
    assert picky.restore._found.wait(5)
    assert bench.shelf.reads == []
    bench.step()
    assert picky.tiers == TierCounts(compute=60)
    other = asked(bench, [*LONG[:48], 9, 9], salt="other")
    assert other.restore is not None
    assert other.restore._found.wait(5)
    assert bench.shelf.reads == []


def test_what_left_the_device_while_it_waited_is_looked_for_again() -> None:
    bench = TierBench(LONG, stored=6, max_sequences=1)
    warm = bench.manager.sequence()
    assert bench.manager.open(warm, LONG[:24], reuse=False) is not None
    bench.manager.commit(warm, LONG[:24], 24)
    bench.manager.release(warm)
    (busy,) = grown(bench, "busy")
    sequence = asked(bench, LONG)
    read = bench.found(sequence)
    assert read.keys == bench.keys[3:6]
    bench.manager.clear()
    bench.end(busy)
    bench.step()
    assert read.cancelled
    second = bench.found(sequence)
    assert second.keys == bench.keys[:6]
    bench.step()
    second.come = list(range(6))
    (row,) = bench.step()
    assert row.write_from == 48


class Snapshots:
    """A snapshot pool that remembers what it was asked for."""

    def __init__(self) -> None:
        self.held: dict[bytes, Snapshot] = {}
        self.asked: list[list[bytes]] = []

    def get(self, keys: list[bytes]) -> tuple[bytes, Snapshot] | None:
        self.asked.append(list(keys))
        return next(((key, self.held[key]) for key in keys if key in self.held), None)


class WindowBench(Bench):
    """With a snapshot pool behind it, and a prompt of 49 tokens whose blocks are cached."""

    def __init__(self) -> None:
        super().__init__(blocks=60)
        self.ids = warmed(self, 49)
        chain = KeyChain(self.manager.sequence().chain.root, WINDOW)
        chain.extend([*self.ids, *short(31, 3)])
        self.keys = chain.keys
        self.snapshots = Snapshots()
        self.scheduler.restorer = Restorer(self.manager.geometry, None, cast(Any, self.snapshots), lambda: None)

    def run(self, ids: list[int], **request: Any) -> Sequence:
        sequence = asked(self, ids, **request)
        if sequence.restore is not None:
            assert sequence.restore._found.wait(5)
        self.scheduler.schedule()
        return sequence


def test_a_snapshot_is_looked_for_where_the_prompt_would_resume() -> None:
    bench = WindowBench()
    bench.snapshots.held = {bench.keys[4]: window_at(bench, 40, 5)}
    sequence = bench.run(bench.ids)
    assert bench.snapshots.asked == [[bench.keys[4], bench.keys[5]]]  # 48 lies less than a window before the end
    assert sequence.tiers == TierCounts(hbm=48, compute=1, window="swa", replayed=8)
    assert sequence.computed == 40
    assert (bench.manager.windows.data[sequence.cache.slot, : bench.manager.layout.encoder_layers] == 5).all()
    longer = bench.run([*bench.ids[:48], *short(30, 4)])
    assert bench.snapshots.asked[1] == [bench.keys[5], bench.keys[4]]
    assert longer.tiers == TierCounts(hbm=48, compute=30, window="swa", replayed=8)
    # One that a running sequence has is not asked for.
    bench.scheduler.live = {bench.keys[5]: window_at(bench, 48, 7)}
    third = bench.run([*bench.ids[:48], *short(30, 5)])
    assert len(bench.snapshots.asked) == 2
    assert third.tiers == TierCounts(hbm=48, compute=30, window="live")
    assert bench.run(short(60, 8)).tiers == TierCounts(compute=60)
    assert bench.run(bench.ids, params=greedy(prompt_logprobs=0)).tiers == TierCounts(compute=49)
    assert len(bench.snapshots.asked) == 2


def test_a_snapshot_that_is_none_of_these_is_not_taken() -> None:
    bench = WindowBench()
    bench.snapshots.held = {bench.keys[4]: window_at(bench, 48, 5)}
    sequence = bench.run(bench.ids)
    assert len(bench.snapshots.asked) == 1
    assert sequence.tiers == TierCounts(hbm=48, compute=1, window="replay", replayed=8, lineage=1)


def test_a_broken_tier_is_one_that_has_nothing() -> None:
    bench = WindowBench()
    bench.snapshots.get = lambda keys: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    sequence = bench.run(bench.ids)
    assert sequence.tiers == TierCounts(hbm=48, compute=1, window="replay", replayed=8, lineage=1)


def test_a_window_after_a_replay_does_for_bounded_resumes_alone() -> None:
    bench = WindowBench()
    bench.snapshots.held = {bench.keys[5]: window_at(bench, 48, 5, lineage=1)}
    ids = [*bench.ids[:48], *short(30, 4)]
    assert bench.run(ids).tiers == TierCounts(hbm=48, compute=30, window="swa", lineage=1)
    ids = [*bench.ids[:48], *short(30, 5)]
    assert bench.run(ids, replay="exact").tiers == TierCounts(hbm=48, compute=30, window="replay", replayed=2 * (WINDOW - 1))
    assert bench.run(ids, prefill="exact").tiers == TierCounts(hbm=48, compute=30, window="replay", replayed=3 * (WINDOW - 1))


def test_windows_are_kept_at_a_prompts_last_boundaries_that_are_computed() -> None:
    bench = WindowBench()
    assert bench.run(short(60, 8)).copy_at == [48, 56]
    assert bench.run(short(64, 9)).copy_at == [48, 56, 64]
    assert bench.run(short(7, 9)).copy_at == []
    replayed = bench.run([*bench.ids[:48], *short(9, 4)])
    assert replayed.computed == 40
    assert replayed.copy_at == [48, 56]
    exact = bench.run([*bench.ids[:48], 9, 9], replay="exact")
    assert exact.computed < 40
    assert exact.copy_at == [40, 48], "an exact replay makes the window before the resume point right too"
    bench.snapshots.held = {bench.keys[5]: window_at(bench, 48, 5)}
    taken = bench.run([*bench.ids[:48], *short(9, 5)])
    assert taken.computed == 48
    assert taken.copy_at == [56], "the one at 48 is somebody's already"


def test_a_preempted_sequence_keeps_the_windows_of_what_it_generated() -> None:
    bench = WindowBench()
    sequence = bench.run(short(30, 8))
    assert sequence.copy_at == [16, 24]
    sequence.computed = 0
    while sequence.generated < 20:
        bench.step()
    bench.scheduler._preempt(sequence)
    bench.manager.clear()
    sequence.saved = None
    sequence.windows = {16: cast(Any, "copied")}
    bench.scheduler.schedule()
    assert sequence.cache.is_open
    assert sequence.copy_at == [24, 40, 48]


def window_at(bench: Bench, boundary: int, fill: int, lineage: int = 0, decoder_floor: int | None = None) -> Snapshot:
    layout = bench.manager.layout
    shape = SnapshotShape.of(layout, layout.encoder_layers)
    decoder = np.full(shape.decoder, fill + 1, np.uint8) if decoder_floor is not None else None
    return Snapshot(boundary, boundary - WINDOW, decoder_floor, lineage, np.full(shape.encoder, fill, np.uint8), decoder)


def test_a_running_sequences_window_is_taken_over() -> None:
    bench = Bench(blocks=60)
    ids = warmed(bench, 49)
    chain = KeyChain(bench.manager.sequence().chain.root, WINDOW)
    chain.extend(ids)
    bench.scheduler.live = {chain.keys[5]: window_at(bench, 48, 3), chain.keys[2]: window_at(bench, 24, 5)}
    bench.scheduler.restorer = Restorer(bench.manager.geometry, None, None, lambda: None)
    sequence = asked(bench, [*ids[:48], *short(20, 3)])
    rows = bench.scheduler.schedule()
    assert [(row.start, row.write_from, row.window_from) for row in rows] == [(48, 48, 40)]
    assert sequence.tiers == TierCounts(hbm=48, compute=20, window="live")
    data = bench.manager.windows.data[sequence.cache.slot]
    cut = bench.manager.layout.encoder_layers
    assert (data[:cut] == 3).all()
    assert not (data[cut:] == 4).any()
    other = bench.add("other", 49, number=11)
    while not other.generated:
        bench.step()
    stranger = asked(bench, [*other.tokens[:48], *short(20, 3)])
    assert stranger.restore is not None
    assert stranger.restore._found.wait(5)
    bench.scheduler.schedule()
    assert stranger.tiers == TierCounts(hbm=48, compute=20, window="replay", replayed=8, lineage=1), "the window is another history's"


def preempted_for_good(bench: Bench, sequence: Sequence) -> None:
    """It cannot go on where it was; what it had adopted is there."""
    bench.scheduler._preempt(sequence)
    sequence.saved = None
    bench.scheduler.look_for(sequence)
    if sequence.restore is not None:
        assert sequence.restore._found.wait(5)
    bench.scheduler.schedule()
    assert sequence.cache.is_open


def test_a_recompute_after_a_replay_replays_again() -> None:
    """A window that somebody has by now would make another text of it."""
    bench = WindowBench()
    sequence = bench.run([*bench.ids[:48], *short(20, 4)])
    assert sequence.cache.plan is not None
    first = sequence.cache.plan
    assert first.approximates
    bench.scheduler.live = {bench.keys[5]: window_at(bench, 48, 3)}
    bench.snapshots.held = dict(bench.scheduler.live)
    preempted_for_good(bench, sequence)
    assert sequence.cache.plan == first
    assert len(bench.snapshots.asked) == 1


def test_a_recompute_of_what_was_faithful_is_faithful() -> None:
    """Its window is gone, and an approximation would make another text of it."""
    bench = WindowBench()
    bench.scheduler.live = {bench.keys[5]: window_at(bench, 48, 3)}
    sequence = bench.run([*bench.ids[:48], *short(20, 4)])
    assert sequence.tiers == TierCounts(hbm=48, compute=20, window="live")
    bench.scheduler.live = {}
    preempted_for_good(bench, sequence)
    plan = sequence.cache.plan
    assert plan is not None
    assert (plan.resume, plan.origin, plan.faithful, plan.replayed) == (48, "replay", True, 2 * (WINDOW - 1))
    assert sequence.tiers == TierCounts(hbm=48, compute=20, window="live"), "counted once, as it began"
    # Or from a window again, if there is one.
    bench.snapshots.held = {bench.keys[5]: window_at(bench, 48, 3)}
    preempted_for_good(bench, sequence)
    plan = sequence.cache.plan
    assert plan is not None
    assert (plan.origin, plan.start) == ("swa", 48)


def test_decoder_rows_are_loaded_when_they_are_needed() -> None:
    bench = Bench(blocks=60)
    ids = warmed(bench, 49)
    chain = KeyChain(bench.manager.sequence().chain.root, WINDOW)
    chain.extend(ids)
    bench.scheduler.live = {chain.keys[5]: window_at(bench, 48, 3, decoder_floor=40)}
    bench.scheduler.restorer = Restorer(bench.manager.geometry, None, None, lambda: None)
    sequence = asked(bench, ids)
    (row,) = bench.scheduler.schedule()
    assert (row.start, row.decoder_from, row.decoder_window_from) == (48, 48, 40)
    data = bench.manager.windows.data[sequence.cache.slot]
    cut = bench.manager.layout.encoder_layers
    assert (data[:cut] == 3).all()
    assert (data[cut:] == 4).all()


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


def test_a_queue_is_looked_through_only_when_somebody_may_have_waited_too_long() -> None:
    class Counted(list[Sequence]):
        looked = 0

        def __iter__(self) -> Any:
            self.looked += 1
            return super().__iter__()

    bench = Bench(max_sequences=1, max_queue_wait_s=5.0)
    grown(bench, "runs")
    queue = bench.scheduler.waiting = Counted()
    late, first, second = bench.add("late", 4, priority=-1), bench.add("first", 4), bench.add("second", 4, priority=-2)
    first.request.arrived -= 2.0  # sooner than those that come before it
    bench.scheduler.take_out(first)
    bench.scheduler.add(first)
    bench.scheduler.take_out(late)
    bench.now += 2.9
    bench.scheduler.add(late)
    queue.looked = 0
    assert bench.scheduler.meanwhile() and queue.looked == 0
    bench.now += 0.2
    assert not bench.scheduler.meanwhile() and queue.looked > 0
    bench.step()
    assert bench.scheduler.expired == [first]
    bench.now += 1.8
    assert bench.scheduler.meanwhile()
    queue.looked = 0
    assert bench.scheduler.meanwhile() and queue.looked == 0
    bench.now += 0.2
    bench.step()
    assert bench.scheduler.expired == [second, late]
    queue.looked = 0
    bench.now += 100.0
    assert bench.scheduler.meanwhile() and queue.looked == 0


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
