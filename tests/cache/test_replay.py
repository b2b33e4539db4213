"""Where a prompt resumes: every branch by hand, and all small cases against a simulation of which rows have the bits of a cold run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest

from forebay.cache.replay import (
    Geometry,
    KnownWindow,
    Mode,
    ResumePlan,
    kept_boundaries,
    least_hit_blocks,
    plan_resume,
    wanted_boundaries,
)

G = Geometry(window=8, block_tokens=8, encoder_layers=2, decoder_layers=2)
REAL = Geometry(window=128, block_tokens=128, encoder_layers=20, decoder_layers=20)
WIDE = Geometry(window=7, block_tokens=14, encoder_layers=2, decoder_layers=1)
SHALLOW = Geometry(window=8, block_tokens=8, encoder_layers=1, decoder_layers=1)


def live(boundary: int, lineage: int = 0, floor: int | None = None) -> KnownWindow:
    return KnownWindow(boundary, "live", lineage, floor)


def swa(boundary: int, lineage: int = 0, floor: int | None = None) -> KnownWindow:
    return KnownWindow(boundary, "swa", lineage, floor)


def cold(prompt: int, window: int = 8, prefill: Mode = "bounded") -> ResumePlan:
    anchor = 0 if prefill == "exact" else max(0, prompt - window)
    return ResumePlan(0, 0, 0, anchor, anchor)


def bounded(prompt: int, resume: int, lineage: int = 1, window: int = 8) -> ResumePlan:
    start, anchor = resume - window, prompt - window
    return ResumePlan(resume, start, start, anchor, anchor, "replay", faithful=False, approximates=True, lineage=lineage)


@pytest.mark.parametrize(
    ("prompt", "hit", "geometry", "resume"),
    [
        (1000, 0, REAL, 0),
        (1000, 127, REAL, 0),
        (1000, 128, REAL, 0),  # one window: as dear as computing it
        (1000, 255, REAL, 0),  # cut to one block
        (1000, 256, REAL, 256),
        (1000, 383, REAL, 256),
        (1000, 896, REAL, 896),
        (897, 896, REAL, 896),  # one token is left to compute
        (896, 896, REAL, 768),  # fully cached: the last block is computed again
        (256, 256, REAL, 0),
        (384, 384, REAL, 256),
        (384, 9999, REAL, 256),
        (1, 0, REAL, 0),
        (100, 14, WIDE, 14),  # block longer than the window
        (14, 14, WIDE, 0),
        (100, 27, WIDE, 14),
    ],
)
def test_resume_point_of_a_bounded_replay(prompt: int, hit: int, geometry: Geometry, resume: int) -> None:
    plan = plan_resume(prompt, hit, geometry)
    if resume:
        assert plan == bounded(prompt, resume, window=geometry.window)
        assert plan.replayed == geometry.window
    else:
        assert plan == cold(prompt, geometry.window)
        assert plan.replayed == 0
    assert plan.write_from == resume


# name, prompt, hit, options, plan
CASES: list[tuple[str, int, int, dict[str, Any], ResumePlan]] = [
    ("a prompt within a window", 5, 0, {}, ResumePlan(0, 0, 0, 0, 0)),
    ("nothing cached, exact prefill", 100, 0, {"prefill": "exact"}, ResumePlan(0, 0, 0, 0, 0)),
    ("a short hit takes no window either", 100, 15, {"windows": [live(8)]}, cold(100)),
    ("a short hit, exact", 100, 8, {"windows": [live(8, floor=0)], "prefill": "exact"}, ResumePlan(0, 0, 0, 0, 0)),
    # A window at the last boundary, far enough from the prompt's end for the decoder half.
    ("last boundary", 100, 64, {"windows": [live(64)]}, ResumePlan(64, 64, 56, 92, 92, "live", 64)),
    ("last boundary, one window before the end", 72, 64, {"windows": [swa(64)]}, ResumePlan(64, 64, 56, 64, 64, "swa", 64)),
    ("decoder rows are not needed then", 72, 64, {"windows": [swa(64, floor=0)]}, ResumePlan(64, 64, 56, 64, 64, "swa", 64)),
    # Less than a window from the end: the decoder half wants encoder outputs that nobody has.
    (
        "last boundary, less than a window before the end", 71, 64, {"windows": [swa(64)]},
        ResumePlan(64, 63, 56, 63, 63, "swa", 64, faithful=False, approximates=True, lineage=1),
    ),
    (
        "the same after a window with replays behind it", 65, 64, {"windows": [swa(64, 2)]},
        bounded(65, 64),  # it costs a token more, and leaves less behind it
    ),
    (
        "decoder rows stand in", 71, 64, {"windows": [swa(64, floor=56)]},
        ResumePlan(64, 64, 56, 64, 56, "swa", 64, with_decoder=True, faithful=False),
    ),
    (
        "those of an exact prefill too", 71, 64, {"windows": [live(64, floor=0)]},
        ResumePlan(64, 64, 56, 64, 56, "live", 64, with_decoder=True, faithful=False),
    ),
    (
        "but not when they begin inside the window", 71, 64, {"windows": [swa(64, floor=57)]},
        ResumePlan(64, 63, 56, 63, 63, "swa", 64, faithful=False, approximates=True, lineage=1),
    ),
    # The last but one: costs a block more, as much as bounded replay, and is faithful.
    ("last but one boundary", 71, 64, {"windows": [swa(56)]}, ResumePlan(64, 56, 48, 63, 63, "swa", 56)),
    ("both, in either order", 71, 64, {"windows": [swa(64, floor=0), swa(56)]}, ResumePlan(64, 56, 48, 63, 63, "swa", 56)),
    ("both, in the other order", 71, 64, {"windows": [swa(56), swa(64, floor=0)]}, ResumePlan(64, 56, 48, 63, 63, "swa", 56)),
    ("both, and the last one is faithful", 80, 64, {"windows": [swa(56), swa(64)]}, ResumePlan(64, 64, 56, 72, 72, "swa", 64)),
    ("an older one costs more than replay", 100, 64, {"windows": [live(48)]}, bounded(100, 64)),
    (
        "an older one, faithful only", 71, 64, {"windows": [live(56), live(48)], "replay": "exact"},
        ResumePlan(64, 56, 48, 63, 63, "live", 56),
    ),
    # Windows that do not fit.
    ("beyond the hit", 100, 64, {"windows": [live(72), live(80, floor=0)]}, bounded(100, 64)),
    ("beyond what a prompt can resume at", 64, 64, {"windows": [live(64, floor=0)]}, bounded(64, 56)),
    ("not at a block boundary", 100, 64, {"windows": [live(60), live(0)]}, bounded(100, 64)),
    # Replay.
    ("bounded", 100, 64, {}, bounded(100, 64)),
    ("exact", 100, 64, {"replay": "exact"}, ResumePlan(64, 50, 50, 92, 92, "replay")),
    ("exact, for the decoder half's rows", 70, 64, {"replay": "exact"}, ResumePlan(64, 42, 42, 62, 62, "replay")),
    ("exact, just not from the start", 100, 16, {"replay": "exact"}, ResumePlan(16, 2, 2, 92, 92, "replay")),
    ("exact would begin at the start", 22, 16, {"replay": "exact"}, cold(22)),
    (
        "an equal window is better than exact replay", 70, 64, {"windows": [live(48)], "replay": "exact"},
        ResumePlan(64, 48, 40, 62, 62, "live", 48),
    ),
    (
        "exact replay is better than an older window", 70, 64, {"windows": [live(40)], "replay": "exact"},
        ResumePlan(64, 42, 42, 62, 62, "replay"),
    ),
    (
        "nothing approximate under exact replay", 71, 64, {"windows": [live(64, floor=0)], "replay": "exact"},
        ResumePlan(64, 42, 42, 63, 63, "replay"),
    ),
    # Exact prefill.
    ("exact prefill replays for both halves", 100, 64, {"prefill": "exact"}, ResumePlan(64, 36, 36, 36, 36, "replay")),
    ("whatever the replay mode", 100, 64, {"prefill": "exact", "replay": "exact"}, ResumePlan(64, 36, 36, 36, 36, "replay")),
    ("exact prefill near the start", 100, 24, {"prefill": "exact"}, ResumePlan(0, 0, 0, 0, 0)),
    (
        "exact prefill, all rows", 65, 64, {"prefill": "exact", "windows": [live(64, floor=0)]},
        ResumePlan(64, 64, 56, 0, 0, "live", 64, with_decoder=True),
    ),
    (
        "decoder rows of a bounded prefill", 100, 64, {"prefill": "exact", "windows": [live(64, floor=1)]},
        ResumePlan(64, 36, 36, 36, 36, "replay"),
    ),
    ("no decoder rows", 100, 64, {"prefill": "exact", "windows": [live(64)]}, ResumePlan(64, 36, 36, 36, 36, "replay")),
    ("rows after a replay", 100, 64, {"prefill": "exact", "windows": [live(64, 1, 0)]}, ResumePlan(64, 36, 36, 36, 36, "replay")),
    (
        "exact prefill, an older window", 100, 64, {"prefill": "exact", "windows": [live(48, floor=0)]},
        ResumePlan(64, 48, 40, 0, 0, "live", 48, with_decoder=True),
    ),
    # Lineage.
    ("replay adds one to the most of what is adopted", 100, 32, {"lineages": [0, 2, 1, 0, 9]}, bounded(100, 32, 3)),
    ("unknown ones count as none", 100, 32, {"lineages": [1]}, bounded(100, 32, 2)),
    (
        "a window adds none", 100, 32, {"lineages": [0, 2, 1, 0], "windows": [live(32, 1)]},
        ResumePlan(32, 32, 24, 92, 92, "live", 32, lineage=2),
    ),
    ("exact replay adds none", 100, 32, {"lineages": [0, 2], "replay": "exact"}, ResumePlan(32, 18, 18, 92, 92, "replay", lineage=2)),
    # A window of a sequence that replayed, over blocks that were computed without: not a cold run's.
    (
        "a window with more behind it than the blocks", 100, 32, {"lineages": [0, 0, 0, 0], "windows": [live(32, 1)]},
        ResumePlan(32, 32, 24, 92, 92, "live", 32, faithful=False, lineage=1),
    ),
    ("is no exact resume", 100, 32, {"windows": [live(32, 1)], "replay": "exact"}, ResumePlan(32, 18, 18, 92, 92, "replay")),
    ("and yields to a sound one", 100, 32, {"windows": [live(32, 1), swa(24)]}, ResumePlan(32, 24, 16, 92, 92, "swa", 24)),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "hit", "options", "plan"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_plans(prompt: int, hit: int, options: dict[str, Any], plan: ResumePlan) -> None:
    assert plan_resume(prompt, hit, G, **options) == plan


def test_windows_and_blocks_of_different_length() -> None:
    assert plan_resume(100, 30, WIDE) == bounded(100, 28, window=7)
    assert plan_resume(100, 30, WIDE, replay="exact") == ResumePlan(28, 16, 16, 93, 93, "replay")
    assert plan_resume(100, 30, WIDE, windows=[live(28)]) == ResumePlan(28, 28, 21, 93, 93, "live", 28)
    assert plan_resume(100, 30, WIDE, windows=[live(14)]) == bounded(100, 28, window=7)
    assert plan_resume(30, 30, WIDE, windows=[swa(28, floor=21)]) == ResumePlan(
        28, 28, 21, 28, 21, "swa", 28, with_decoder=True, faithful=False
    )
    assert plan_resume(30, 30, WIDE, windows=[swa(28, floor=22)]) == ResumePlan(
        28, 23, 21, 23, 23, "swa", 28, faithful=False, approximates=True, lineage=1
    )


def test_a_limit_on_lineage_holds_for_the_resume_too() -> None:
    """Without a window, none behind what is computed means exact replay or a cold start; more leave room for a bounded one."""
    assert plan_resume(70, 64, G, max_lineage=1) == bounded(70, 64)
    exact = plan_resume(70, 64, G, max_lineage=0)
    assert exact.faithful and exact.origin == "replay" and exact.resume == 64
    assert plan_resume(22, 16, G, max_lineage=0) == cold(22)
    assert plan_resume(100, 64, G, max_lineage=1, lineages=[1] * 8).faithful
    assert plan_resume(70, 64, G, windows=[swa(64)], max_lineage=0) == exact, "truncated rows would leave one behind"


def test_an_exact_replay_leaves_the_window_that_the_next_one_needs() -> None:
    """One block below the last: what a repetition of the prompt resumes from when less than a window of it is new."""
    for prompt in range(60, 90):
        plan = plan_resume(prompt, (prompt - 1) // 8 * 8, G, replay="exact")
        assert plan.windows_from in kept_boundaries(prompt, G)
        again = plan_resume(prompt, plan.resume, G, windows=[swa(plan.windows_from)], replay="exact")
        assert (again.origin, again.start) == ("swa", plan.windows_from)
    assert bounded(70, 64).windows_from == 0 and plan_resume(70, 64, G).windows_from == 64


def test_one_encoder_layer_makes_exact_replay_the_cheaper_one() -> None:
    assert plan_resume(100, 64, SHALLOW) == ResumePlan(64, 57, 57, 92, 92, "replay")
    assert plan_resume(66, 64, SHALLOW) == bounded(66, 64)  # the decoder half's rows begin before the hit ends


def test_the_real_model_pays_for_exactness() -> None:
    """Twenty windows less a token each for a bounded prefill, forty for an exact one."""
    assert plan_resume(16_384, 16_000, REAL).replayed == 128
    assert plan_resume(16_384, 16_000, REAL, replay="exact").replayed == 20 * 127
    assert plan_resume(16_384, 16_000, REAL, prefill="exact").replayed == 40 * 127


# All small cases


SMALL = (Geometry(4, 4, 2, 1), Geometry(4, 4, 1, 2), Geometry(3, 6, 2, 1), Geometry(2, 2, 3, 1), Geometry(1, 2, 2, 2))


def small_cases(
    geometry: Geometry,
) -> Iterator[tuple[int, int, tuple[KnownWindow, ...], Mode, Mode, ResumePlan]]:
    size, most = geometry.block_tokens, 4 * geometry.block_tokens + geometry.window
    known = [
        KnownWindow(b, origin, lineage, floor)
        for b in range(size, 5 * size, size)
        for origin, lineage, floor in (("live", 0, None), ("swa", 0, 0), ("swa", 0, b - geometry.window), ("live", 1, 0), ("swa", 0, b))
    ]  # type: ignore[misc]
    for windows in ((), *((w,) for w in known), *combinations(known[::2], 2)):
        for prompt in range(1, most, 1 if len(windows) < 2 else 2):
            for hit in range(0, prompt + 2, 1 if not windows else size):
                for prefill, replay in (("bounded", "bounded"), ("bounded", "exact"), ("exact", "bounded"), ("exact", "exact")):
                    plan = plan_resume(prompt, hit, geometry, windows=windows, prefill=prefill, replay=replay)  # type: ignore[arg-type]
                    yield prompt, hit, windows, prefill, replay, plan  # type: ignore[misc]


@pytest.mark.parametrize("geometry", SMALL, ids=str)
def test_what_holds_for_every_plan(geometry: Geometry) -> None:
    window, size = geometry.window, geometry.block_tokens
    seen = set()
    for prompt, hit, windows, prefill, replay, plan in small_cases(geometry):
        where = (prompt, hit, windows, prefill, replay, plan)
        # A token is computed, and no more than by a cold run; replay writes nothing below the resume point.
        assert 0 <= plan.start <= plan.resume < prompt, where
        assert plan.write_from == plan.resume, where
        assert plan.replayed == plan.resume - plan.start, where
        # Nothing adoptable is thrown away.
        assert plan.resume % size == 0, where
        usable = min(hit, prompt - 1) // size * size
        assert plan.resume == usable > window or plan.start == plan.resume == 0, where
        # The decoder half runs for the last token, and nobody reads what was not computed or loaded.
        assert plan.decoder_window_from <= plan.decoder_from < prompt, where
        assert max(0, plan.window_from) == plan.window_from <= plan.start, where
        assert (plan.origin in ("live", "swa")) == (plan.boundary is not None) == (plan.window_from < plan.start), where
        if plan.boundary is not None:
            assert any((w.boundary, w.origin) == (plan.boundary, plan.origin) for w in windows), where
            assert plan.window_from == plan.boundary - window <= plan.boundary <= plan.resume, where
        assert (plan.origin == "none") == (plan.resume == 0), where
        # Faithful, or approximate in a way that is counted.
        assert not plan.faithful or (plan.lineage == 0 and not plan.approximates), where
        assert not plan.approximates or plan.lineage >= 1, where
        if "exact" in (prefill, replay):
            assert plan.faithful, where
        elif plan.resume:
            assert plan.start >= plan.resume - window, where  # never dearer than bounded replay
        # A faithful window within the price of bounded replay is taken, whatever else there is.
        if prefill == "bounded" and usable > window:
            anchor = max(0, prompt - window)
            sound = [w.boundary for w in windows if w.lineage == 0 and usable - window <= w.boundary <= min(usable, anchor)]
            if sound:
                assert plan.faithful, where
                assert plan.start >= max(sound), where
        seen.add((plan.origin, plan.with_decoder, plan.faithful, plan.approximates))
    assert len(seen) >= 4


def has_the_bits_of_a_cold_run(
    plan: ResumePlan, prompt: int, geometry: Geometry, prefill: Mode, windows: Sequence[KnownWindow] = ()
) -> bool:
    """Follow through all layers which rows are those of a cold run, given that the adopted blocks are.

    A row is right when its input is, and when it sees just the window keys that it sees in the cold run, all of them right.
    """
    window = geometry.window
    cold_floor = 0 if prefill == "exact" else max(0, prompt - window)
    known = next((w for w in windows if (w.boundary, w.origin) == (plan.boundary, plan.origin)), None)
    loaded = range(plan.boundary - window, plan.start) if plan.boundary is not None else range(0)
    ok = [True] * prompt  # by position, from `start` on
    exact_rows = known is not None and known.lineage == 0
    for layer in range(geometry.encoder_layers + geometry.decoder_layers):
        encoder = layer < geometry.encoder_layers
        first = plan.start if encoder else max(plan.start, plan.decoder_from)
        floor, right_floor = (plan.window_from, 0) if encoder else (plan.decoder_window_from, cold_floor)
        in_ring = exact_rows if encoder else exact_rows and plan.with_decoder and known is not None and known.decoder_floor == cold_floor
        keys = {p: ok[p] for p in range(first, prompt)}
        keys.update({p: in_ring for p in loaded if p < first})
        if not encoder and max(cold_floor, plan.resume) < first:
            return False  # rows that a cold run has
        before = list(ok)
        for p in range(first, prompt):
            wanted = range(max(right_floor, p - window + 1), p + 1)
            found = range(max(floor, p - window + 1), p + 1)
            ok[p] = before[p] and wanted == found and all(keys.get(n, False) for n in found)
        # What is written as global KV or goes on to the decoder half, and what the first generated token reads.
        if encoder:
            if not all(ok[plan.resume :]):
                return False
        elif not all(ok[max(cold_floor, plan.resume) :]):
            return False
        if not all(keys.get(n, False) for n in range(max(right_floor, prompt - window + 1), prompt)):
            return False
    return True


@pytest.mark.parametrize("geometry", SMALL, ids=str)
def test_faithful_plans_and_no_others_have_the_bits_of_a_cold_run(geometry: Geometry) -> None:
    """But one: a window's oldest row lets the row before its boundary run again, and nobody promises that this row is right.

    (After an exact replay it is not, in a window kept at the resume point.)
    """
    approximate = 0
    for prompt, hit, windows, prefill, replay, plan in small_cases(geometry):
        if prompt % 3 == 0 and len(windows) == 2:
            continue
        right = has_the_bits_of_a_cold_run(plan, prompt, geometry, prefill, windows)
        assert right or not plan.faithful, (prompt, hit, windows, prefill, replay, plan)
        approximate += not plan.faithful
        if right and geometry.window > 1:  # windows of one token have nothing to truncate
            assert plan.faithful or plan.start + 1 == plan.boundary, (prompt, hit, windows, prefill, replay, plan)
    assert approximate > 100 or geometry.window == 1


def test_the_simulation_knows_an_approximation() -> None:
    """One token less of exact replay, a bounded one, and a window with other decoder rows are seen for what they are."""
    right = ResumePlan(64, 48, 48, 62, 62, "replay")
    assert has_the_bits_of_a_cold_run(right, 70, G, "bounded")
    assert not has_the_bits_of_a_cold_run(ResumePlan(64, 49, 49, 62, 62, "replay"), 70, G, "bounded")
    assert not has_the_bits_of_a_cold_run(bounded(70, 64), 70, G, "bounded")
    assert has_the_bits_of_a_cold_run(ResumePlan(64, 36, 36, 36, 36, "replay"), 70, G, "exact")
    assert not has_the_bits_of_a_cold_run(ResumePlan(64, 37, 37, 37, 37, "replay"), 70, G, "exact")
    stand_in = plan_resume(71, 64, G, windows=[swa(64, floor=56)])
    assert not has_the_bits_of_a_cold_run(stand_in, 71, G, "bounded", [swa(64, floor=56)])


# Boundaries


@pytest.mark.parametrize(
    ("prompt", "hit", "prefill", "places"),
    [
        (100, 0, "bounded", []),
        (100, 8, "bounded", []),  # nothing would be adopted
        (16, 16, "bounded", []),
        (100, 64, "bounded", [64, 56]),
        (72, 64, "bounded", [64, 56]),
        (71, 64, "bounded", [56, 64]),  # the last one alone lies after the decoder half's first row
        (65, 64, "bounded", [56, 64]),
        (64, 64, "bounded", [56, 48]),  # resumes at 56, one window before the end
        (64, 999, "bounded", [56, 48]),
        (15, 15, "bounded", []),
        (65, 64, "exact", [64, 56]),
        (17, 16, "bounded", [8, 16]),
    ],
)
def test_wanted_boundaries(prompt: int, hit: int, prefill: Mode, places: list[int]) -> None:
    assert wanted_boundaries(prompt, hit, G, prefill) == places


@pytest.mark.parametrize("geometry", SMALL, ids=str)
def test_the_first_wanted_window_is_one_that_a_plan_takes(geometry: Geometry) -> None:
    for prompt in range(1, 6 * geometry.block_tokens):
        for hit in range(prompt + 2):
            places = wanted_boundaries(prompt, hit, geometry)
            assert bool(places) == (plan_resume(prompt, hit, geometry).resume > 0)
            assert all(0 < place < prompt and place <= hit and place % geometry.block_tokens == 0 for place in places)
            for place in places[: len(places) - 1]:
                plan = plan_resume(prompt, hit, geometry, windows=[swa(place)], replay="exact")
                assert plan.faithful
                assert plan.boundary == place or plan.start >= place
            assert wanted_boundaries(prompt, hit, geometry, "exact") == sorted(places, reverse=True)


@pytest.mark.parametrize(
    ("prompt", "geometry", "places"),
    [
        (1, G, []),
        (8, G, [8]),
        (9, G, [8]),
        (16, G, [8, 16]),
        (17, G, [8, 16]),
        (24, G, [8, 16, 24]),
        (100, G, [88, 96]),
        (104, G, [88, 96, 104]),
        (13, WIDE, []),
        (28, WIDE, [14, 28]),
        (30, WIDE, [14, 28]),
    ],
)
def test_kept_boundaries(prompt: int, geometry: Geometry, places: list[int]) -> None:
    assert kept_boundaries(prompt, geometry) == places


@pytest.mark.parametrize("geometry", SMALL, ids=str)
def test_what_is_kept_serves_a_repetition_and_a_longer_prompt(geometry: Geometry) -> None:
    """The same prompt again, and the same with one more window or one more token behind it, resume faithfully for a block at most.

    A block longer than the window costs more than bounded replay, so there the plan is faithful only on request.
    """
    window, size = geometry.window, geometry.block_tokens
    replay: Mode = "bounded" if window == size else "exact"
    for prompt in range(2 * size + 1, 6 * size):
        kept = [swa(place) for place in kept_boundaries(prompt, geometry)]
        full = prompt // size * size
        for longer in (prompt, prompt + 1, prompt + window):
            plan = plan_resume(longer, full, geometry, windows=kept, replay=replay)
            assert plan.resume == min(full, (longer - 1) // size * size) or plan.resume == 0
            if plan.resume:
                assert plan.faithful, (prompt, longer, plan)
                assert plan.replayed <= size


def test_least_hit_is_the_shortest_adopted_chain() -> None:
    for geometry in (G, WIDE, REAL, Geometry(6, 12, 1, 1)):
        size = geometry.block_tokens
        least = least_hit_blocks(geometry.window, size)
        assert plan_resume(10_000, least * size, geometry).resume == least * size
        assert plan_resume(10_000, (least - 1) * size, geometry).resume == 0
