"""What happens between a waiting request and tiers that hang; whole restores are tested with the scheduler (tests/engine)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from forebay.cache import restore as restore_file
from forebay.cache.manager import BOUNDED
from forebay.cache.replay import Geometry
from forebay.cache.restore import Restore, Restorer

WAIT_S = 20.0
KEYS = [bytes([i]) * 32 for i in range(8)]


class Hung:
    """A store that does not answer until `go`."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Semaphore(0), threading.Event()
        self.lookups = 0

    def lookup(self, keys: Sequence[bytes], max_lineage: int | None = None) -> list[int]:
        self.lookups += 1
        self.asked.release()
        assert self.go.wait(WAIT_S)
        return []


@pytest.fixture
def hung() -> Iterator[Hung]:
    store = Hung()
    yield store
    store.go.set()


def begin(restorer: Restorer) -> Restore:
    return restorer.start(KEYS, 0, 100, BOUNDED)


def test_nobody_looks_for_what_a_request_that_has_gone_wanted(hung: Hung) -> None:
    restorer = Restorer(Geometry(8, 8, 2, 2), cast(Any, hung), None, lambda: None, threads=1)
    first = begin(restorer)
    assert hung.asked.acquire(timeout=WAIT_S)
    gone, last = begin(restorer), begin(restorer)
    gone.cancel()
    hung.go.set()
    for restore in (first, gone, last):
        assert restore._found.wait(WAIT_S)
    assert hung.lookups == 2


def test_lookups_do_not_pile_up_behind_a_store_that_hangs(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_file, "MOST_LOOKUPS", 3)
    restorer = Restorer(Geometry(8, 8, 2, 2), cast(Any, hung), None, lambda: None, threads=1)
    found = [begin(restorer) for _ in range(5)]
    assert [restore.ready for restore in found] == [False, False, False, True, True]
    hung.go.set()
    for restore in found:
        assert restore._found.wait(WAIT_S)
    again = begin(restorer)  # what was taken of the room has been given back
    assert again._found.wait(WAIT_S)
    assert hung.lookups == 4
