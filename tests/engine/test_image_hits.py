"""Prefixes from the cache that end inside a picture, in chunks that cut it anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from engines import WINDOW, assert_idle, fresh, greedy, prompt, seeing, shown
from forebay.engine.llm import LLM
from forebay.engine.types import Output, Request

PICTURE = np.random.default_rng(1).integers(0, 256, (84, 300, 3), dtype=np.uint8)
LENGTH = 20  # positions of it


def ask(llm: LLM, most: int | None, salt: str = "") -> list[Output]:
    """Prompts with the picture behind 0 to 7 tokens; no more than `most` tokens of each are taken from the cache."""
    requests = []
    for before in range(WINDOW):
        ids, image = shown(prompt(before + 9, before), before, PICTURE, llm)
        assert image.stop - image.start == LENGTH
        requests.append(Request(ids, greedy(3), images=(image,), resume_at_most=most, salt=salt))
    return llm.run(requests)


@pytest.mark.case("B082")
@pytest.mark.parametrize("rows", [3, LENGTH + 3])
def test_hits_that_end_in_a_picture_and_chunks_that_cut_it(rows: int) -> None:
    """Whatever the edge: as in one piece, with the picture encoded again."""
    whole, narrow = fresh(seeing()), fresh(seeing(encoder_tokens=rows, decoder_tokens=64))
    assert narrow.engine.encoder is not None
    inside = set[int]()
    for llm in (whole, narrow):
        ask(llm, None)
    for edge in range(WINDOW, LENGTH + 2 * WINDOW, WINDOW):
        narrow.engine.encoder.cache.clear()
        for before, (wanted, got) in enumerate(zip(ask(whole, edge), ask(narrow, edge), strict=True)):
            assert got.token_ids == wanted.token_ids, (before, edge)
            assert got.tiers.cached == wanted.tiers.cached <= edge
            if wanted.tiers.cached:
                inside.add(wanted.tiers.cached - before)
    assert [out.token_ids for out in ask(narrow, 0, "apart")] == [out.token_ids for out in ask(whole, 0, "apart")]
    assert inside >= set(range(WINDOW + 1, LENGTH + 1)), "hits end at every position of the picture behind its first blocks"
    for llm in (whole, narrow):
        assert_idle(llm.engine)
