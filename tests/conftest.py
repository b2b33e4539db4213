"""What every test shares: quiet threads, an environment without the developer's own settings, the golden data."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("FOREBAY_GOLDEN") or REPOSITORY.parent / "shared" / "golden")

# Before torch is imported: one thread, and no spinning while it waits (two spinning threads on two busy cores are up to 80 times slower).
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "1"

# Settings from the developer's shell must not change what a test sees, nor reach the servers it starts.
for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
    del os.environ[name]


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder with expected outputs of an independent implementation; tests that need it are skipped where it is absent."""
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden data is not at {GOLDEN}; set FOREBAY_GOLDEN to its folder")
    return GOLDEN


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout these tests belong to."""
    return REPOSITORY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mistyped case id would silently cover nothing."""
    for item in items:
        for mark in item.iter_markers("case"):
            if not mark.args or not all(isinstance(a, str) and re.fullmatch(r"B\d{3}", a) for a in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: mark case takes ids such as 'B054', got {mark.args}")
