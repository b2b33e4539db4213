from __future__ import annotations

import pytest

from forebay.cache.replay import ResumePlan, least_hit_blocks, plan_resume

NOTHING = ResumePlan(resume=0, write_from=0, window_from=0, start=0, replayed=0)


@pytest.mark.parametrize(
    ("prompt", "hit", "window", "block", "resume"),
    [
        (1000, 0, 128, 128, 0),
        (1000, 127, 128, 128, 0),
        (1000, 128, 128, 128, 0),  # one window: as dear as computing it
        (1000, 255, 128, 128, 0),  # cut to one block
        (1000, 256, 128, 128, 256),
        (1000, 383, 128, 128, 256),
        (1000, 896, 128, 128, 896),
        (897, 896, 128, 128, 896),  # one token is left to compute
        (896, 896, 128, 128, 768),  # fully cached: the last block is computed again
        (256, 256, 128, 128, 0),
        (384, 384, 128, 128, 256),
        (1, 0, 128, 128, 0),
        (100, 14, 7, 14, 14),  # block longer than the window
        (14, 14, 7, 14, 0),
        (100, 27, 7, 14, 14),
    ],
)
def test_resume_point(prompt: int, hit: int, window: int, block: int, resume: int) -> None:
    plan = plan_resume(prompt, hit, window, block)
    if not resume:
        assert plan == NOTHING
    else:
        assert plan == ResumePlan(resume=resume, write_from=resume, window_from=resume - window, start=resume - window, replayed=window)


def test_every_plan_computes_a_token_and_replays_exactly_one_window() -> None:
    window, block = 8, 8
    for prompt in range(1, 60):
        for hit in range(prompt + 9):
            plan = plan_resume(prompt, hit, window)
            assert plan == plan_resume(prompt, hit, window, block)
            assert plan.resume % block == 0
            assert plan.resume < prompt
            assert plan.resume <= hit
            assert plan.start + plan.replayed == plan.resume == plan.write_from
            assert plan.window_from == plan.start >= 0
            assert plan.replayed == (window if plan.resume else 0)
            # Nothing adoptable is thrown away.
            assert plan.resume == 0 or min(hit, prompt - 1) - plan.resume < block


def test_least_hit_is_the_shortest_adopted_chain() -> None:
    for window, block in ((8, 8), (7, 14), (128, 128), (6, 12)):
        least = least_hit_blocks(window, block)
        assert plan_resume(10_000, least * block, window, block).resume == least * block
        assert plan_resume(10_000, (least - 1) * block, window, block).resume == 0
