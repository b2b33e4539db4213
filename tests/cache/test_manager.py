from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from forebay.cache.blocks import CacheBookkeepingError
from forebay.cache.manager import CacheManager, Offer, Policy, SequenceCache
from forebay.cache.prefix import ImageSpan
from forebay.cache.replay import Geometry, KnownWindow, ResumePlan

MakeManager = Callable[..., CacheManager]

W = 8  # window and block of the tiny layout


def prompt(n: int, start: int = 0) -> list[int]:
    return [start + i for i in range(n)]


def run(manager: CacheManager, tokens: Sequence[int], salt: str = "") -> int:
    """A whole request; returns how many tokens it took from the cache."""
    seq = manager.sequence(salt)
    plan = manager.open(seq, tokens)
    assert plan is not None
    manager.commit(seq, tokens, len(tokens))
    manager.release(seq)
    return plan.resume


def opened(manager: CacheManager, tokens: Sequence[int]) -> SequenceCache:
    seq = manager.sequence()
    assert manager.open(seq, tokens) is not None
    return seq


def commit(manager: CacheManager, seq: SequenceCache, tokens: Sequence[int], upto: int) -> list[int]:
    """Commit; what it says of every block that it caches is so. Returns these."""
    committed = manager.commit(seq, tokens, upto)
    assert seq.plan is not None
    for each in committed:
        assert each.block == seq.table[each.depth] == manager.index.find(each.key)
        assert each.key == manager_keys(manager, tokens)[each.depth]
        assert each.lineage == manager.index.lineage(each.block) == seq.plan.lineage
    return [each.block for each in committed]


def test_open_takes_the_whole_prompt_and_one_block(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=16, windows=2)
    seq = opened(manager, prompt(3 * W + 1))
    assert len(seq.table) == 5
    assert seq.slot != 0
    assert manager.stats().used == 5
    assert manager.stats().windows_used == 1
    manager.check([seq])
    manager.release(seq)
    assert manager.stats().free == 16
    assert (seq.table, seq.slot, seq.is_open) == ([], 0, False)


def test_second_run_resumes_from_whole_blocks(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(5 * W + 3)
    assert run(manager, tokens) == 0
    seq = manager.sequence()
    plan = manager.open(seq, [*tokens[: 4 * W], *prompt(2 * W, 500)])
    assert plan is not None
    assert (plan.resume, plan.start, plan.window_from, plan.write_from) == (4 * W, 3 * W, 3 * W, 4 * W)
    assert manager.writable_from(seq) == 4 * W
    stats = manager.stats()
    assert (stats.hits, stats.misses) == (4, 5 + 1)
    assert (stats.free, stats.used, stats.cached) == (16 - 7 - 1, 7, 1)
    manager.check([seq])


@pytest.mark.case("B023")
@pytest.mark.parametrize(("blocks", "resume"), [(1, 0), (2, 0), (3, 2 * W), (4, 3 * W)])
def test_a_fully_cached_prompt_still_computes(make_manager: MakeManager, blocks: int, resume: int) -> None:
    manager = make_manager()
    tokens = prompt(blocks * W)
    assert run(manager, [*tokens, *prompt(9, 900)]) == 0
    for _ in range(3):
        assert run(manager, tokens) == resume < len(tokens)


def test_a_hit_of_one_window_is_not_adopted(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, prompt(3 * W))
    seq = opened(manager, [*prompt(W), *prompt(2 * W, 700)])
    assert seq.plan is not None
    assert seq.plan.resume == 0
    assert manager.writable_from(seq) == 0
    assert not set(seq.table) & set(manager.index.match(manager_keys(manager, prompt(3 * W))))
    assert (manager.stats().hits, manager.stats().misses) == (0, 2 + 2)
    # Its own first block stays private, the rest continues the cached chain.
    assert commit(manager, seq, [*prompt(W), *prompt(2 * W, 700)], 3 * W) == seq.table[1:3]
    manager.check([seq])


def manager_keys(manager: CacheManager, tokens: Sequence[int]) -> list[bytes]:
    seq = manager.sequence()
    seq.chain.extend(tokens)
    return seq.chain.keys


def test_tenants_models_and_pictures_never_share(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=64)
    tokens = prompt(4 * W)
    assert run(manager, tokens, "a") == 0
    assert run(manager, tokens, "b") == 0
    assert run(manager, tokens, "a") == 3 * W
    picture = manager.sequence("a", images=(ImageSpan(2 * W, 2 * W + 3, bytes(32)),))
    plan = manager.open(picture, tokens)
    assert plan is not None
    assert plan.resume == 2 * W


def test_reuse_can_be_off_for_the_server_or_one_request(make_manager: MakeManager) -> None:
    off = make_manager(prefix_reuse=False)
    assert [run(off, prompt(4 * W)) for _ in range(2)] == [0, 0]
    assert off.stats().cached == 0
    on = make_manager()
    run(on, prompt(4 * W))
    seq = on.sequence()
    plan = on.open(seq, prompt(4 * W), reuse=False)
    assert plan is not None
    assert plan.resume == 0
    on.check([seq])


def test_commit_moves_the_write_floor_block_by_block(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(3 * W)
    seq = opened(manager, tokens)
    floors = []
    for upto in (1, W - 1, W, W + 1, 3 * W - 1, 3 * W):
        manager.commit(seq, tokens, upto)
        floors.append(manager.writable_from(seq))
        assert len(manager.index) * W == floors[-1]
    assert floors == [0, 0, W, W, 2 * W, 3 * W]
    with pytest.raises(CacheBookkeepingError, match="exceeds"):
        manager.commit(seq, tokens, 3 * W + 1)
    with pytest.raises(CacheBookkeepingError, match="exceeds"):
        manager.commit(seq, prompt(9 * W), 9 * W)


def test_ensure_grows_or_changes_nothing(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=6)
    seq = opened(manager, prompt(2 * W))  # 3 blocks
    assert manager.ensure(seq, 3 * W)
    assert len(seq.table) == 3
    assert manager.ensure(seq, 3 * W + 1)
    assert len(seq.table) == 4
    before = list(seq.table)
    assert not manager.ensure(seq, 7 * W)
    assert seq.table == before
    assert manager.available_blocks() == 2
    assert manager.ensure(seq, 6 * W)
    assert manager.available_blocks() == 0
    manager.check([seq])


def test_growth_evicts_cached_blocks_only_as_needed(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=8)
    old = prompt(4 * W)
    run(manager, old)
    seq = opened(manager, prompt(3 * W, 300))
    assert manager.stats().cached == 4
    assert manager.ensure(seq, 5 * W)
    stats = manager.stats()
    assert (stats.cached, stats.evictions, stats.free) == (3, 1, 0)
    assert len(manager.index.match(manager_keys(manager, old))) == 3


def test_preempted_sequence_resumes_from_its_own_blocks(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(2 * W + 3)
    seq = opened(manager, tokens)
    tokens += prompt(2 * W, 600)
    assert manager.ensure(seq, len(tokens))
    manager.commit(seq, tokens, len(tokens))
    held = list(seq.table)
    manager.release(seq)
    plan = manager.open(seq, tokens)
    assert plan is not None
    assert plan.resume == 4 * W
    assert seq.table[:4] == held[:4]
    manager.check([seq])


def test_identical_sequences_side_by_side_keep_their_own_blocks(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=20)
    tokens = prompt(4 * W)
    one, two = opened(manager, tokens), opened(manager, tokens)
    tables = list(one.table), list(two.table)
    assert commit(manager, one, tokens, 2 * W) == one.table[:2]
    assert commit(manager, two, tokens, 4 * W) == two.table[2:4]
    assert commit(manager, one, tokens, 4 * W) == []
    assert (one.table, two.table) == tables
    manager.check([one, two])
    manager.release(one)
    manager.check([two])
    manager.release(two)
    manager.check([])
    assert manager.stats().cached == 4
    assert run(manager, tokens) == 3 * W


def test_a_twin_renews_the_cached_copy_when_it_ends(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=20)
    tokens, other = prompt(4 * W), prompt(3 * W, 700)
    one, two = opened(manager, tokens), opened(manager, tokens)
    manager.commit(one, tokens, 4 * W)
    manager.commit(two, tokens, 4 * W)
    manager.release(one)
    run(manager, other)
    manager.release(two)
    manager.index.evict(3)
    assert len(manager.index.match(manager_keys(manager, tokens))) == 4
    assert manager.index.match(manager_keys(manager, other)) == []


def test_a_private_twin_is_cached_after_the_first_copy_was_evicted(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=8)
    tokens = prompt(4 * W)
    one, two = opened(manager, tokens[: 2 * W]), opened(manager, tokens[: 2 * W])
    manager.commit(one, tokens, W)
    manager.commit(two, tokens, W)  # stays private
    manager.release(one)
    assert manager.ensure(two, 8 * W)  # needs every block, so the cached first copy goes
    assert len(manager.index) == 0
    assert commit(manager, two, tokens, 2 * W) == two.table[:2]
    manager.check([two])


@pytest.mark.case("B041")
def test_no_hold_and_wait(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=64)
    prompts = [prompt(40 * W, start) for start in (0, 1000)]
    for tokens in prompts:
        run(manager, tokens[: 28 * W])
    assert manager.stats().cached == 56
    one, two = manager.sequence(), manager.sequence()
    first = manager.open(one, prompts[0])
    assert first is not None
    assert first.resume == 28 * W
    assert len(one.table) == 41
    before = manager.stats()
    assert manager.open(two, prompts[1]) is None
    assert manager.stats() == before  # the waiting one holds nothing and took nothing
    assert (two.table, two.slot) == ([], 0)
    manager.check([one])
    manager.commit(one, prompts[0], 40 * W)
    manager.release(one)
    second = manager.open(two, prompts[1])
    assert second is not None
    assert second.resume == 23 * W  # what the first one's eviction left: the head
    manager.check([two])


def test_the_hit_itself_is_not_promised_as_room(make_manager: MakeManager) -> None:
    """6 blocks are cached and idle and 2 free; a prompt that adopts the 6 and needs 3 more must wait, though 8 look available."""
    manager = make_manager(blocks=10)
    tokens = prompt(8 * W)
    run(manager, tokens[: 6 * W])
    other = opened(manager, prompt(W, 800))
    assert manager.available_blocks() == 8
    assert manager.open(manager.sequence(), tokens) is None
    manager.check([other])
    manager.release(other)
    assert manager.open(manager.sequence(), tokens) is not None


@pytest.mark.case("B043")
def test_what_never_fits_is_known_at_once(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=8)
    assert manager.capacity_tokens == 8 * W
    assert manager.never_fits(8 * W + 1)
    assert not manager.never_fits(8 * W)
    assert manager.open(manager.sequence(), prompt(8 * W + 1)) is None
    # A prompt that fills the pool alone is admitted, also when it is cached in part or the pool is full of other prefixes.
    for start in (0, 0, 400):
        seq = opened(manager, prompt(8 * W, start))
        assert len(seq.table) == 8
        manager.commit(seq, prompt(8 * W, start), 8 * W)
        manager.check([seq])
        manager.release(seq)


@pytest.mark.case("B044")
def test_scarce_windows_make_requests_wait_and_evict_nothing(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=100, windows=2)
    run(manager, prompt(90 * W))
    held = [opened(manager, prompt(90 * W)), opened(manager, prompt(80 * W))]
    before = manager.stats()
    assert manager.open(manager.sequence(), prompt(2 * W, 5000)) is None
    assert manager.stats() == before
    assert before.evictions == 0
    freed = held[0].slot
    manager.release(held.pop(0))
    held.append(opened(manager, prompt(2 * W, 5000)))
    assert held[-1].slot == freed
    manager.check(held)


@pytest.mark.case("B044")
def test_whatever_is_reported_available_can_be_had(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=30, windows=6)
    for start in (0, 200, 400):
        run(manager, prompt(6 * W, start))
    held = [opened(manager, [*prompt(3 * W), 7777]), opened(manager, [*prompt(4 * W, 200), 8888])]
    seq = opened(manager, [9999])
    room = manager.available_blocks()
    assert not manager.ensure(seq, (len(seq.table) + room + 1) * W)
    assert manager.ensure(seq, (len(seq.table) + room) * W)
    assert manager.available_blocks() == 0
    manager.check([*held, seq])


@pytest.mark.case("B020")
def test_a_long_prefix_survives_short_traffic(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=200)
    long = prompt(180 * W)
    run(manager, long)
    for i in range(20):
        run(manager, prompt(W + 5, 10_000 + 100 * i))
    assert run(manager, long) >= 0.9 * len(long)


@pytest.mark.case("B001")
def test_recycled_slots_do_not_shorten_a_prefix(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=32, windows=2)
    tokens = prompt(5 * W)
    run(manager, tokens)
    for _ in range(3):
        for i in range(3):
            run(manager, prompt(W, 2000 + 50 * i))
        seq = opened(manager, tokens)
        assert seq.plan is not None
        # The window is never assumed to be anywhere: a full one is replayed.
        assert (seq.plan.resume, seq.plan.replayed) == (4 * W, W)
        manager.release(seq)


@pytest.mark.case("B003")
def test_adopted_blocks_are_below_the_write_floor(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=40)
    tokens = prompt(5 * W + 5)
    run(manager, tokens)
    adopted = set(manager.index.match(manager_keys(manager, tokens)))
    for length in (2 * W + 1, 3 * W, 4 * W - 1, 5 * W + 2):
        seq = opened(manager, [*tokens[:length], *prompt(W, 3000 + 100 * length)])
        assert seq.plan is not None
        assert seq.plan.write_from == manager.writable_from(seq) == length // W * W
        assert not adopted & set(seq.table[manager.writable_from(seq) // W :])
        manager.release(seq)


def test_release_without_keeping_forgets_only_its_own(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, prompt(3 * W))
    tokens = [*prompt(3 * W), *prompt(2 * W + 1, 600)]
    seq = opened(manager, tokens)
    manager.commit(seq, tokens, len(tokens))
    manager.release(seq)  # preempted once
    assert manager.open(seq, tokens) is not None
    manager.commit(seq, tokens, len(tokens))
    manager.release(seq, keep=False)
    manager.check([])
    assert len(manager.index.match(manager_keys(manager, tokens))) == 3
    manager.release(seq)  # a second release is harmless
    manager.check([])


def test_clear_while_running(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(4 * W)
    run(manager, tokens)
    seq = opened(manager, tokens)
    manager.clear()
    manager.check([seq])
    assert manager.stats().indexed == 0
    manager.commit(seq, tokens, 4 * W)  # its blocks are still right, and become reusable again
    manager.check([seq])
    manager.release(seq)
    assert manager.stats().cached == 4


def test_misuse_is_refused(make_manager: MakeManager) -> None:
    manager = make_manager()
    seq = opened(manager, prompt(3))
    with pytest.raises(CacheBookkeepingError, match="open already"):
        manager.open(seq, prompt(3))
    with pytest.raises(CacheBookkeepingError, match="at least one token"):
        manager.open(manager.sequence(), [])
    manager.release(seq)
    with pytest.raises(CacheBookkeepingError, match="not open"):
        manager.ensure(seq, 5)


def test_contents_name_the_bytes_and_not_the_tokens(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=10, windows=2)
    tokens = prompt(3 * W + 1)
    seq, twin = opened(manager, tokens), opened(manager, tokens)
    assert manager.contents(seq) == ()
    manager.commit(seq, tokens, len(tokens))
    first = manager.contents(seq)
    assert len(set(first)) == 3
    assert 0 not in first
    manager.commit(twin, tokens, len(tokens))
    assert manager.contents(twin) == (0, 0, 0)  # private copies: gone when released
    for each in (seq, twin):
        manager.release(each)
    again = opened(manager, tokens)
    assert manager.contents(again) == first
    manager.release(again)
    run(manager, prompt(9 * W, start=500))  # evicts them
    assert run(manager, tokens) == 0
    other = opened(manager, tokens)
    assert len(manager.contents(other)) == 3
    assert not set(manager.contents(other)) & set(first)


def test_poison_fills_whatever_is_handed_out(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=4, windows=1, poison=True)
    tokens = prompt(2 * W)
    seq = opened(manager, tokens)
    assert manager.ensure(seq, 3 * W + 1)
    data, window = manager.pool.data, manager.windows.data
    for _ in range(2):
        assert len(seq.table) == 4
        assert (data[seq.table] == 0xFF).all()
        assert (window[seq.slot] == 0xFF).all()
        assert manager.windows.pending[seq.slot].isnan().all()
        assert not data[0].any()
        data[seq.table] = 1
        window[seq.slot] = 1
        manager.commit(seq, tokens, 2 * W)
        manager.release(seq)
        seq = opened(manager, prompt(3 * W, start=500))  # its memory comes from free blocks and from evicted ones


# Plans


EXACT = Policy("exact", "exact", 0)


def test_the_geometry_is_the_layouts(make_manager: MakeManager) -> None:
    manager = make_manager()
    layout = manager.layout
    assert manager.geometry == Geometry(W, W, layout.encoder_layers, 4 - layout.encoder_layers)


def test_the_prompt_and_not_what_was_generated_anchors_the_decoder_half(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(5 * W)
    run(manager, tokens)
    seq = manager.sequence()
    plan = manager.open(seq, tokens, prompt_tokens=3 * W + 2)
    assert plan is not None
    assert (plan.resume, plan.decoder_from) == (3 * W, 2 * W + 2)
    assert len(seq.table) == 6


def test_policies_reach_the_plan(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=60)
    tokens = prompt(7 * W + 4)
    run(manager, tokens)
    window = KnownWindow(6 * W, "live", decoder_floor=0)
    found = []
    for policy in (Policy(), Policy(replay="exact"), EXACT):
        for windows in ((), (window,)):
            seq = manager.sequence()
            plan = manager.open(seq, tokens, policy=policy, offer=Offer(windows=windows))
            assert plan is not None
            found.append((plan.resume, plan.start, plan.origin, plan.faithful))
            manager.release(seq)
    encoder = manager.geometry.encoder_layers
    assert encoder == 3
    assert found == [
        (7 * W, 6 * W, "replay", False),
        (7 * W, 6 * W, "live", True),
        (7 * W, 6 * W - encoder * (W - 1), "replay", True),
        (7 * W, 6 * W, "live", True),
        (7 * W, 7 * W - 4 * (W - 1), "replay", True),
        (7 * W, 6 * W, "live", True),
    ]


def test_lineage_is_counted_through_resumes_and_can_be_refused(make_manager: MakeManager) -> None:
    """Each turn adopts what the last one left and replays: one more behind its own blocks."""
    manager = make_manager(blocks=60)
    tokens: list[int] = []
    for turn in range(4):
        tokens += prompt(3 * W, 100 * turn)
        seq = manager.sequence()
        plan = manager.open(seq, tokens)
        assert plan is not None
        assert (plan.resume, plan.lineage) == (3 * W * turn, turn)
        assert [c.lineage for c in manager.commit(seq, tokens, len(tokens))] == [turn] * 3
        manager.release(seq)
    for most, resume in ((0, 3 * W), (1, 6 * W), (2, 9 * W), (3, 11 * W), (None, 11 * W)):
        seq = manager.sequence()
        plan = manager.open(seq, tokens, policy=Policy(max_lineage=most))
        assert plan is not None
        assert plan.resume == resume
        assert plan.lineage == (4 if most is None else most)
        assert plan.faithful == (most is not None)
        manager.release(seq)
    manager.check([])


def test_better_blocks_take_the_place_of_replayed_ones(make_manager: MakeManager) -> None:
    """The users of the old ones keep them to the end, as private blocks; what comes later adopts the better ones."""
    manager = make_manager(blocks=60)
    tokens = prompt(6 * W)
    run(manager, tokens[: 2 * W + 1])
    replayed = opened(manager, tokens)
    assert replayed.plan is not None
    assert replayed.plan.lineage == 1
    old = commit(manager, replayed, tokens, 6 * W)
    assert len(old) == 4
    reader = manager.sequence()
    assert manager.open(reader, [*tokens, 999]) is not None
    assert reader.table[2:6] == old
    cold = manager.sequence()
    assert manager.open(cold, tokens, reuse=False) is not None
    better = commit(manager, cold, tokens, 4 * W)
    assert better == cold.table[2:4]  # the first two are as good as cached
    manager.check([replayed, reader, cold])
    assert manager.index.match(manager_keys(manager, tokens)) == [*replayed.table[:2], *better, *old[2:]]
    assert reader.table[2:6] == old
    assert [serial == 0 for serial in manager.contents(reader)] == [False, False, True, True, False, False]
    late = manager.sequence()
    plan = manager.open(late, [*tokens, 998])
    assert plan is not None
    assert plan.lineage == 2, "blocks 4 and 5 still have a replay behind them"
    for seq in (replayed, cold, reader, late):
        manager.release(seq)
        manager.check([s for s in (replayed, cold, reader, late) if s.is_open])
    assert manager.stats().used == 0
    assert manager.stats().indexed == 6


# Blocks and windows on offer


def block_bytes(manager: CacheManager, value: int) -> torch.Tensor:
    return torch.full((manager.layout.block_bytes,), value, dtype=torch.uint8)


def offered(
    manager: CacheManager, tokens: Sequence[int], blocks: int, start: int = 0, lineage: int = 0, policy: Policy | None = None
) -> SequenceCache:
    seq = manager.sequence()
    assert manager.open(seq, tokens, offer=Offer(start, [lineage] * blocks), policy=policy or Policy()) is not None
    return seq


def test_what_is_on_offer_is_admitted_with_memory_and_loaded(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(6 * W + 3)
    seq = offered(manager, tokens, 5)
    assert seq.plan is not None
    assert (seq.plan.resume, seq.loading, len(seq.table)) == (5 * W, range(5), 8)
    assert manager.writable_from(seq) == 0
    with pytest.raises(CacheBookkeepingError, match="still to be loaded"):
        manager.commit(seq, tokens, 6 * W)
    for number in range(5):
        assert seq.loading == range(number, 5)
        manager.load(seq, [(number, block_bytes(manager, number + 1), 0)])
        manager.check([seq])
        assert manager.writable_from(seq) == (number + 1) * W
    assert not seq.loading
    assert [int(manager.pool.data[block].unique()) for block in seq.table[:5]] == [1, 2, 3, 4, 5]
    assert manager.index.match(seq.chain.keys) == seq.table[:5]
    assert seq.from_ssd == set(seq.chain.keys[:5])
    assert seq.own_from == 5
    # What follows is its own.
    assert commit(manager, seq, tokens, len(tokens)) == seq.table[5:6]
    manager.release(seq)
    assert run(manager, tokens) == 6 * W


def test_an_offer_continues_what_the_device_has(make_manager: MakeManager) -> None:
    """Found out a while ago: by now the device may have more of it, or too little for the rest to follow."""
    cases = ((2, 2, 3, 5), (3, 2, 3, 5), (6, 2, 3, 6), (2, 3, 2, 2), (2, 0, 5, 5), (0, 0, 5, 5), (2, 2, 0, 2), (3, 0, 2, 3))
    for held, start, count, resume in cases:
        manager = make_manager(blocks=40)
        tokens = prompt(6 * W + 3)
        if held:
            run(manager, tokens[: held * W])
        seq = offered(manager, tokens, count, start)
        assert seq.plan is not None
        assert seq.plan.resume == resume * W, (held, start, count)
        assert seq.loading == range(held, max(held, resume)) or not seq.loading
        assert seq.loading.stop - seq.loading.start == resume - held
        assert manager.writable_from(seq) == held * W
        assert manager.stats().hits == held
        manager.load(seq, [(n, block_bytes(manager, n), 0) for n in seq.loading])
        manager.check([seq])
        manager.release(seq)
        manager.check([])


def test_an_offer_leaves_a_token_to_compute_and_obeys_the_policy(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=40)
    tokens = prompt(4 * W)
    seq = offered(manager, tokens, 4)
    assert (seq.plan.resume if seq.plan else None, seq.loading) == (3 * W, range(3))
    short = manager.sequence()
    plan = manager.open(short, tokens, at_most=2 * W, offer=Offer(0, [0] * 4))
    assert plan is not None
    assert plan.resume == 2 * W
    unwanted = manager.sequence()
    assert manager.open(unwanted, tokens, reuse=False, offer=Offer(0, [0] * 4)) is not None
    assert not unwanted.loading
    picky = manager.sequence()
    plan = manager.open(picky, tokens, policy=Policy(max_lineage=1), offer=Offer(0, [1, 1, 2, 0]))
    assert plan is not None
    assert (plan.resume, plan.lineage) == (0, 0), "a replay would leave two behind, and an exact one begins at the start"
    one = manager.sequence()
    plan = manager.open(one, tokens, offer=Offer(0, [0]))  # not worth a replay
    assert plan is not None
    assert (plan.resume, one.loading) == (0, range(0))
    manager.check([seq, short, unwanted, picky, one])


def test_offered_lineages_count(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=40)
    tokens = prompt(5 * W + 1)
    run(manager, tokens[: 2 * W])
    seq = manager.sequence()
    plan = manager.open(seq, tokens, offer=Offer(2, [0, 3, 1]))
    assert plan is not None
    assert (plan.resume, plan.lineage) == (5 * W, 4)
    manager.load(seq, [(n, block_bytes(manager, n), lineage) for n, lineage in zip(range(2, 5), (0, 3, 1), strict=True)])
    assert [manager.index.lineage(block) for block in seq.table[:5]] == [0, 0, 0, 3, 1]


def test_no_room_for_an_offer_changes_nothing(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=8)
    other = opened(manager, prompt(3 * W, 500))
    before = manager.stats()
    seq = manager.sequence()
    assert manager.open(seq, prompt(6 * W), offer=Offer(0, [0] * 5)) is None
    assert manager.stats() == before
    assert (seq.table, seq.loading, seq.own_from, seq.is_open) == ([], range(0), None, False)
    manager.check([other])


def test_blocks_are_loaded_in_order(make_manager: MakeManager) -> None:
    manager = make_manager()
    seq = offered(manager, prompt(6 * W), 5)
    for wrong in (1, 4, 5, -1):
        with pytest.raises(CacheBookkeepingError, match="the next one is 0"):
            manager.load(seq, [(wrong, block_bytes(manager, 1), 0)])
    manager.load(seq, [(0, block_bytes(manager, 1), 0), (1, block_bytes(manager, 2), 0)])
    with pytest.raises(CacheBookkeepingError, match="the next one is 2"):
        manager.load(seq, [(1, block_bytes(manager, 2), 0)])
    assert seq.loading == range(2, 5)
    manager.check([seq])
    manager.release(seq)
    with pytest.raises(CacheBookkeepingError, match="not open"):
        manager.load(seq, [(2, block_bytes(manager, 3), 0)])


def test_a_block_cached_meanwhile_is_shared(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=40)
    tokens = prompt(6 * W)
    one, two = offered(manager, tokens, 5), offered(manager, tokens, 5)
    manager.load(one, [(n, block_bytes(manager, n + 1), 0) for n in range(3)])
    mine = list(two.table)
    free = manager.stats().free
    manager.load(two, [(n, block_bytes(manager, 99), 0) for n in range(4)])
    manager.check([one, two])
    assert two.table[:3] == one.table[:3]
    assert two.table[3:] == mine[3:]
    assert manager.stats().free == free + 3  # its own memory for them was given back
    assert [int(manager.pool.data[block].unique()) for block in two.table[:4]] == [1, 2, 3, 99]
    assert two.from_ssd == set(two.chain.keys[:4])
    manager.load(one, [(3, block_bytes(manager, 5), 0), (4, block_bytes(manager, 5), 0)])
    assert one.table[3] == two.table[3]
    for seq in (one, two):
        manager.release(seq)
    manager.check([])
    assert manager.stats().indexed == 5


@pytest.mark.parametrize(("cached", "loaded", "shared"), [(1, 0, False), (1, 1, True), (1, 2, True), (0, 0, True)])
def test_a_loaded_block_replaces_one_with_more_replays_behind_it(
    make_manager: MakeManager, cached: int, loaded: int, shared: bool
) -> None:
    manager = make_manager(blocks=40)
    tokens = prompt(4 * W)
    computing = opened(manager, tokens)
    assert computing.plan is not None
    computing.plan = ResumePlan(0, 0, 0, 3 * W, 3 * W, lineage=cached)
    seq = offered(manager, tokens, 3, lineage=loaded)
    manager.commit(computing, tokens, 2 * W)
    manager.load(seq, [(n, block_bytes(manager, 77), loaded) for n in range(3)])
    manager.check([computing, seq])
    assert (seq.table[:2] == computing.table[:2]) == shared
    best = manager.index.match(seq.chain.keys)
    assert best == seq.table[:3]
    assert [manager.index.lineage(block) for block in best] == [min(cached, loaded)] * 2 + [loaded]
    for each in (computing, seq):
        manager.release(each)
        manager.check([s for s in (computing, seq) if s.is_open])


def test_loading_goes_on_after_the_cache_was_cleared(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=40)
    tokens = prompt(6 * W)
    seq = offered(manager, tokens, 5)
    manager.load(seq, [(0, block_bytes(manager, 1), 0), (1, block_bytes(manager, 2), 0)])
    manager.clear()
    manager.check([seq])
    manager.load(seq, [(n, block_bytes(manager, n + 1), 0) for n in (2, 3, 4)])
    manager.check([seq])
    assert manager.stats().indexed == 0
    assert manager.contents(seq) == (0,) * 5
    assert [int(manager.pool.data[block].unique()) for block in seq.table[:5]] == [1, 2, 3, 4, 5]
    # They are the sequence's own all the same, and cached again with what it computes.
    assert [c.depth for c in manager.commit(seq, tokens, 6 * W)] == [0, 1, 2, 3, 4, 5]
    manager.check([seq])
    manager.release(seq)
    assert run(manager, tokens) == 5 * W


@pytest.mark.parametrize("came", [0, 1, 3])
def test_a_load_that_fails_keeps_what_came(make_manager: MakeManager, came: int) -> None:
    """The sequence is released and opened again on what is there."""
    manager = make_manager()
    tokens = prompt(6 * W)
    seq = offered(manager, tokens, 5)
    manager.load(seq, [(n, block_bytes(manager, n), 0) for n in range(came)])
    manager.release(seq)
    manager.check([])
    assert manager.stats().indexed == came
    plan = manager.open(seq, tokens)
    assert plan is not None
    assert plan.resume == (came * W if came > 1 else 0)
    assert not seq.loading
    manager.check([seq])


# Going on where it was


def test_reopen_gives_back_the_very_blocks(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=20)
    tokens = prompt(3 * W + 2)
    seq = opened(manager, tokens)
    manager.commit(seq, tokens, len(tokens))
    table, contents, plan = list(seq.table), manager.contents(seq), seq.plan
    assert plan is not None
    manager.release(seq)
    longer = [*tokens, *prompt(2 * W, 300)]
    assert manager.reopen(seq, longer, contents, plan) is True
    manager.check([seq])
    assert seq.table[:3] == table[:3]
    assert len(seq.table) == 7
    assert seq.plan == plan
    assert (manager.writable_from(seq), seq.own_from) == (3 * W, 0)
    with pytest.raises(CacheBookkeepingError, match="open already"):
        manager.reopen(seq, longer, contents, plan)
    manager.commit(seq, longer, 5 * W)
    manager.release(seq, keep=False)
    assert manager.stats().indexed == 0


def test_reopen_needs_no_hit_that_a_newcomer_would_adopt(make_manager: MakeManager) -> None:
    manager = make_manager()
    tokens = prompt(W + 3)
    seq = opened(manager, tokens)
    manager.commit(seq, tokens, len(tokens))
    contents, plan = manager.contents(seq), seq.plan
    assert plan is not None
    manager.release(seq)
    assert manager.reopen(seq, tokens, contents, plan)
    assert manager.writable_from(seq) == W


def test_reopen_is_refused_when_the_contents_are_gone_or_others(make_manager: MakeManager) -> None:
    manager = make_manager(blocks=12, windows=2)
    tokens = prompt(3 * W + 2)

    def leave() -> tuple[SequenceCache, tuple[int, ...], ResumePlan]:
        seq = opened(manager, tokens)
        manager.commit(seq, tokens, len(tokens))
        contents, plan = manager.contents(seq), seq.plan
        assert plan is not None
        manager.release(seq)
        return seq, contents, plan

    seq, contents, plan = leave()
    manager.index.evict(1)
    before = manager.stats()
    assert manager.reopen(seq, tokens, contents, plan) is False
    assert manager.stats() == before
    assert not seq.is_open
    run(manager, tokens)  # the same tokens again, in other bytes
    assert manager.reopen(seq, tokens, contents, plan) is False
    # Better ones in the place of one of them.
    manager.clear()
    seq, contents, plan = leave()
    node = manager.index._by_key[seq.chain.keys[1]]
    node.lineage = 1
    cold = manager.sequence()
    assert manager.open(cold, tokens, reuse=False) is not None
    manager.commit(cold, tokens, 2 * W)
    manager.release(cold)
    assert manager.reopen(seq, tokens, contents, plan) is False
    manager.check([])
    # No room is another matter: it may come.
    manager.clear()
    seq, contents, plan = leave()
    others = [opened(manager, prompt(3 * W, 100 * i)) for i in (5, 6)]
    before = manager.stats()
    assert manager.reopen(seq, tokens, contents, plan) is None
    assert manager.stats() == before
    manager.release(others[0])
    assert manager.reopen(seq, tokens, contents, plan) is True
    manager.check([seq, others[1]])


def test_one_that_goes_on_with_anothers_blocks_forgets_only_its_own(make_manager: MakeManager) -> None:
    """A choice that took over its leader's prompt: what it cannot be trusted with is what it computed itself."""
    manager = make_manager()
    tokens = prompt(3 * W + 2)
    leader = opened(manager, tokens)
    manager.commit(leader, tokens, len(tokens))
    contents, plan = manager.contents(leader), leader.plan
    assert plan is not None
    follower = manager.sequence()
    assert manager.reopen(follower, tokens, contents, plan) is True
    manager.check([leader, follower])
    longer = [*tokens, *prompt(2 * W, 700)]
    assert manager.ensure(follower, len(longer))
    assert len(manager.commit(follower, longer, 5 * W)) == 2
    manager.release(leader)
    manager.release(follower, keep=False)
    manager.check([])
    assert len(manager.index.match(manager_keys(manager, longer))) == 3
