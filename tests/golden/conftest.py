"""The tiny checkpoints and their expected outputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from forebay.engine.llm import LLM
from forwards import GoldenSequence

LoadSequence = Callable[[str], GoldenSequence]


@pytest.fixture(scope="session")
def tiny_a(golden: Path) -> LLM:
    return LLM(str(golden / "tiny-a" / "checkpoint"), prefill="exact", kv_tokens=8192)


@pytest.fixture(scope="session")
def sequences(golden: Path) -> LoadSequence:
    """sequences("T13") -> its tokens and expected tensors."""
    return cache(lambda name: GoldenSequence.load(golden / "tiny-a", name))


@pytest.fixture(scope="session")
def lone_rows(same_sums: bool) -> None:
    """For tests that let a lone row be summed as the reference summed it: by MKL in its own mode, not in the one that forebay asks for.

    MKL reads its mode once, so these tests run in a process of their own, which `test_lone_rows` starts.
    """
    if os.environ.get("MKL_CBWR") != "OFF":
        pytest.skip("runs in the process that test_lone_rows starts")
    if not same_sums:
        pytest.skip("this CPU adds up in another order than the machine the golden data came from")
