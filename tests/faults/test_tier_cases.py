"""Faults of caches beyond the device that operators of such servers met: what is kept, for how long, and how it is counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines import WINDOW, assert_idle, greedy, prompt, same, short
from forebay.engine.tiers import TierOptions
from redis_servers import Server, until
from tiered import (
    ANSWER,
    HOUR,
    RECORD_BYTES,
    Clock,
    TieredMemo,
    cold,
    keys_of,
    metrics,
    segments,
    settle,
    tiered,
    total,
)


@pytest.mark.case("B020")
def test_b020_a_long_session_keeps_its_head_on_the_device() -> None:
    llm = tiered(kv_tokens=400 * WINDOW)
    long = prompt(360 * WINDOW)
    llm.generate(long, greedy(1))
    index, keys = llm.engine.manager.index, keys_of(llm, long)
    for i in range(20):
        llm.generate(prompt(3 * WINDOW, i + 1), greedy(1))
        held = [key in index for key in keys]
        assert held == sorted(held, reverse=True)  # tails leave before heads
    again = llm.generate([*long, 99], greedy(1))[0]
    assert again.tiers.hbm >= 0.9 * len(long)
    assert llm.engine.manager.stats().evictions > 0
    assert_idle(llm.engine)


@pytest.mark.case("B020")
def test_b020_a_long_session_keeps_its_head_on_disk(tmp_path: Path) -> None:
    clock = Clock()
    long = prompt(270 * WINDOW)
    with tiered(tmp_path, clock=clock, tiers={"ssd_bytes": 300 * RECORD_BYTES}) as llm:
        store, keys = llm.engine.reservoir.store, keys_of(llm, long)
        llm.generate(long, greedy(1))
        settle(llm)
        assert store.stats().bytes == pytest.approx(0.9 * 300 * RECORD_BYTES, rel=0.02)
        for i in range(20):
            clock.advance(1.0)
            llm.generate(prompt(2 * WINDOW, i + 1), greedy(1))
            settle(llm)
            held = [bool(store.lookup([key])) for key in keys]
            assert held == sorted(held, reverse=True)  # tails leave before heads
            assert store.stats().bytes <= 300 * RECORD_BYTES
        assert store.stats().evicted >= 10
        llm.engine.manager.clear()
        again = llm.generate([*long, 99], greedy(1))[0]
        assert again.tiers.ssd >= 0.9 * len(long)
        assert (again.tiers.hbm, again.usage.cached_tokens) == (0, again.tiers.ssd)


@pytest.mark.case("B022")
@pytest.mark.parametrize("tier", ["hbm", "ssd"])
def test_b022_a_session_whose_windows_are_gone(tmp_path: Path, redis: Server, tier: str) -> None:
    """Two sessions of 2,000 tokens: the window of one lapses between its turns."""
    clock = Clock()
    with tiered(tmp_path, redis.url, clock=clock) as llm:
        first = llm.generate(prompt(2000), greedy(9))[0]
        settle(llm)
        session = [*prompt(2000), *first.token_ids, *prompt(40, 3)]
        clock.advance(599.0)
        before = metrics(llm)
        in_time = llm.generate(session, ANSWER)[0]
        after = metrics(llm)
        assert in_time.tiers.window == "swa"
        assert total(after, "window_misses_total") == total(before, "window_misses_total")
        same(in_time, cold([session], ANSWER)[0])

        other = llm.generate(prompt(2000, 7), greedy(9))[0]
        settle(llm)
        clock.advance(601.0)
        if tier == "ssd":
            llm.engine.manager.clear()
        before = metrics(llm)
        late = llm.generate([*prompt(2000, 7), *other.token_ids, *prompt(40, 8)], ANSWER)[0]
        after = metrics(llm)
    grown = {name: after[name] - before[name] for name in after}
    assert (getattr(late.tiers, tier), late.tiers.cached, late.usage.cached_tokens) == (2008, 2008, 2008)
    assert (late.tiers.window, late.tiers.replayed, late.tiers.lineage) == ("replay", WINDOW, 1)
    assert total(after, "window_misses_total") - total(before, "window_misses_total") == 1
    assert (grown["replays_total{}"], grown["replayed_tokens_total{}"]) == (1, WINDOW)
    assert grown[f"kv_tokens_total{{global,{tier}}}"] == 2008
    assert grown["kv_tokens_total{global,compute}"] == late.tiers.compute == 41
    # What a replay gives does not depend on the tier that had the rest.
    with tiered() as plain:
        plain.generate(prompt(2000, 7), greedy(9))
        same(late, plain.generate([*prompt(2000, 7), *other.token_ids, *prompt(40, 8)], ANSWER)[0])


@pytest.mark.case("B023")
@pytest.mark.parametrize("windows", ["swa", "replay"])
@pytest.mark.parametrize("tier", ["hbm", "ssd", "restart"])
def test_b023_prompts_of_whole_blocks_are_sent_again(tmp_path: Path, redis: Server, tier: str, windows: str) -> None:
    prompts, url = [prompt(blocks * WINDOW, blocks) for blocks in (1, 2, 3)], redis.url if windows == "swa" else None
    llm = tiered(tmp_path, url)
    try:
        rounds = [llm.generate(prompts, ANSWER)]
        for _ in range(2):
            settle(llm)
            if tier == "ssd":
                llm.engine.manager.clear()
            elif tier == "restart":
                llm.close()
                llm = tiered(tmp_path, url)
            rounds.append(llm.generate(prompts, ANSWER))
    finally:
        llm.close()
    for ids, plain, first, *repeats in zip(prompts, cold(prompts, ANSWER), *rounds, strict=True):
        same(first, plain)
        for answer in repeats:
            # A hit leaves a token to compute, and one of a single window is not worth adopting.
            expected = 16 if len(ids) == 3 * WINDOW else 0
            assert getattr(answer.tiers, "hbm" if tier == "hbm" else "ssd") == answer.usage.cached_tokens == expected
            assert answer.tiers.compute == len(ids) - expected
            assert answer.tiers.window == (windows if expected else "none")
            if windows == "swa" or not expected:
                same(answer, first)
        same(*repeats)


@pytest.mark.case("B027")
def test_b027_age_counts_while_the_server_is_down(tmp_path: Path) -> None:
    clock, ids = Clock(), prompt(100)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        with tiered(folder, clock=clock) as llm:
            llm.generate(ids, greedy(1))
        (folder / "segments" / "0000-half.seg").write_bytes(b"FBKV" + bytes(9000))  # nobody's
        (folder / "segments" / "block.tmp").write_bytes(b"half a block")
        (folder / "segments" / "left.tmp").write_bytes(b"")
    stored = segments(folders[0])

    clock.advance(71 * HOUR)
    with tiered(folders[0], clock=clock) as llm:
        answer = llm.generate(ids, ANSWER)[0]
        assert answer.tiers.ssd == 96
        until(lambda: metrics(llm)["ssd_removed_files_total{}"] == 3)  # counted by the keeper when it is done
        assert not [*folders[0].glob("**/*.tmp"), *folders[0].glob("**/0000-half.seg")]
        assert set(segments(folders[0])) >= set(stored[1:])
        settle(llm)

    clock.advance(2 * HOUR)
    with tiered(folders[1], clock=clock) as llm:
        assert llm.generate(ids, greedy(1))[0].tiers.cached == 0
        settle(llm)
        llm.engine.reservoir.store.reap()
        until(lambda: metrics(llm)["ssd_removed_files_total{}"] == 3)
        page = metrics(llm)
        assert (page["kv_expired_total{ssd}"], page["ssd_removed_files_total{}"]) == (12, 3)
        assert page["kv_blocks{stored,ssd}"] == 12  # computed and stored again just now
        left = segments(folders[1])
        assert len(left) == 1  # the old one is gone

    # 71 h after its use at 71 h, the first store still has it.
    clock.advance(69 * HOUR)
    with tiered(folders[0], clock=clock) as llm:
        assert llm.generate(ids, greedy(1))[0].tiers.ssd == 96


@pytest.mark.case("B027")
def test_b027_what_expired_while_nobody_ran_is_deleted_unasked(tmp_path: Path) -> None:
    clock = Clock()
    with tiered(tmp_path, clock=clock) as llm:
        llm.generate(prompt(100), greedy(1))
    clock.advance(73 * HOUR)
    with tiered(tmp_path, clock=clock) as llm:
        until(lambda: llm.engine.reservoir.store.stats().blocks == 0 and not segments(tmp_path))
        assert metrics(llm)["kv_expired_total{ssd}"] == 12


@pytest.mark.case("B091")
def test_b091_only_what_was_asked_for_counts(tmp_path: Path) -> None:
    with tiered(tmp_path) as llm:
        ids = prompt(1000)
        llm.generate(ids[:800], greedy(1))
        settle(llm)
        llm.engine.manager.clear()
        llm.generate(ids[:601], greedy(1))
        before = metrics(llm)
        answer = llm.generate(ids, greedy(1))[0]
        after = metrics(llm)
    grown = {name: after[name] - before[name] for name in after}
    assert (answer.tiers.hbm, answer.tiers.ssd, answer.tiers.compute) == (600, 200, 200)
    assert [grown[f"prefix_{what}_total{{hbm}}"] for what in ("queries", "hits")] == [1000, 600]
    assert [grown[f"prefix_{what}_total{{ssd}}"] for what in ("queries", "hits")] == [400, 200]
    assert [grown[f"kv_tokens_total{{global,{tier}}}"] for tier in ("hbm", "ssd", "compute")] == [600, 200, 200]
    assert grown["prompt_tokens_total{}"] == 1000
    assert answer.usage.cached_tokens == 800


@pytest.mark.case("B039")
@pytest.mark.parametrize(("slots", "wanted"), [(1, 1000), (4, 3000), (8, 6000)])
def test_b039_ten_thousand_requests_leave_no_window_taken(tmp_path: Path, redis: Server, slots: int, wanted: int) -> None:
    """With 1, 4 and 8 window slots, under preemption, hits in both tiers, aborts and failing steps. A window of ours is one page, the
    slot of a sequence; there is no speculation yet, so nothing is taken back from a window either."""
    disk = tmp_path if slots < 8 else None
    tiers = TierOptions(dir=disk, redis_url=redis.url, ssd_bytes=1 << 20, ssd_free_bytes=0, staging_bytes=1 << 16)
    memo = TieredMemo(tiers, kv_tokens=24 * WINDOW, encoder_tokens=64, max_sequences=slots, max_queued_requests=64)
    faults = random.Random(-slots)  # of their own, since how many steps there are depends on Redis
    numbers, names, asked, origins, ssd = random.Random(slots), [], {}, set(), 0

    def sometimes(rows: Sequence[Any]) -> None:
        if faults.random() < 0.004:
            raise RuntimeError("broken step")

    memo.runner.before = sometimes
    try:
        while len(names) < wanted or memo.engine.busy:
            while len(names) < wanted and memo.engine.queued < 16:
                ids = short(numbers.choice([3, 3, 3, 9, 9, 20, 45]), numbers.randrange(40))
                if names and numbers.random() < 0.05:  # the next turn of a session
                    earlier = numbers.choice(names[-50:])
                    ids = [*asked[earlier], *memo.tokens(earlier), *short(10, numbers.randrange(9))][:90]
                names.append(memo.add(ids, greedy(numbers.choice([1, 1, 1, 2, 9]))))
                asked[names[-1]] = ids
            if faults.random() < 0.03:
                memo.engine.abort(names[-1])
            try:
                rows = memo.engine.step().rows
            except RuntimeError:
                rows = 1
            if not rows:
                memo.engine.wake.wait(0.001)
            running, stats = memo.scheduler.running, memo.manager.stats()
            memo.manager.windows.check()
            assert stats.windows_used == len(running) <= slots
            assert len({s.cache.slot for s in running}) == len(running)
            assert stats.free + stats.used + stats.cached == stats.total
            if faults.random() < 0.02:
                memo.manager.check([s.cache for s in running])
    finally:
        memo.engine.close()
    for name in names:
        last = memo.last(name)
        if last.tiers is not None:
            origins.add(last.tiers.window)
            ssd += last.tiers.ssd
    reasons = {reason: memo.value("requests_finished_total", reason=reason) for reason in ("length", "abort", "error")}
    assert sum(reasons.values()) == len(names) == wanted
    assert min(reasons.values()) > 0
    assert origins >= {"none", "swa", "replay"}
    assert (ssd > 0) == (disk is not None)
    assert_idle(memo.engine)
    stats = memo.manager.stats()
    assert (stats.free + stats.cached, memo.manager.windows.free) == (stats.total, slots)
    assert not memo.reservoir.live
