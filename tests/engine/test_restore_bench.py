"""`restore_bench`, small: what is measured, not how fast it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import tiny_checkpoint
from forebay.engine import restore_bench, scheduler
from forebay.engine.cache_bench import BenchError
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions

TOKENS, STREAMS, REPEATS = 320, 3, 2


def open_model(tiers: TierOptions, tokens: int, sequences: int) -> LLM:
    return LLM(str(tiny_checkpoint()), tiers=tiers, kv_tokens=tokens, max_sequences=sequences)


def test_every_step_is_timed_by_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "RESTORED_AT_ONCE", 8)
    lines: list[str] = []
    found = restore_bench.measure(
        open_model, tmp_path, tokens=TOKENS, streams=STREAMS, context=20, steps=5, repeats=REPEATS, report=lines.append
    )  # fmt: skip
    assert len(found.alone) == 5 * STREAMS * REPEATS
    assert len(found.restoring) >= 4 * STREAMS * REPEATS  # 40 blocks, 8 in a step
    assert len(found.resuming) >= STREAMS * REPEATS
    assert len(found.restore_s) == REPEATS
    assert min(found.alone + found.restoring + found.resuming + found.restore_s) > 0
    assert len(lines) == 1 + REPEATS


def test_a_prefix_from_elsewhere_is_no_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_bench, "_leave", lambda engine, prefix: None)
    with pytest.raises(BenchError, match="was to come from the store"):
        restore_bench.measure(open_model, tmp_path, tokens=TOKENS, streams=1, context=20, steps=1, repeats=1, report=lambda line: None)
