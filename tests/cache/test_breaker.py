"""The breaker opens, waits, probes once at a time and closes."""

from __future__ import annotations

import threading

from forebay.cache.breaker import Breaker


class Now:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_one_timeout_or_three_errors_in_a_row_open_it() -> None:
    breaker = Breaker()
    assert breaker.failed(timed_out=True)
    assert breaker.state == "open" and not breaker.allows() and breaker.opened == 1
    breaker = Breaker()
    assert not breaker.failed(timed_out=False) and not breaker.failed(timed_out=False)
    breaker.succeeded()
    assert not breaker.failed(timed_out=False) and not breaker.failed(timed_out=False)
    assert breaker.allows()
    assert breaker.failed(timed_out=False)
    assert breaker.opened == 1


def test_late_results_of_calls_begun_before_change_nothing() -> None:
    breaker = Breaker()
    breaker.failed(timed_out=True)
    breaker.succeeded()
    assert breaker.state == "open"
    assert not breaker.failed(timed_out=True)
    assert breaker.opened == 1
    breaker.probed(well=True)  # nobody was probing
    assert breaker.state == "open"


def test_pauses_double_up_to_the_longest_and_start_again_after_real_success() -> None:
    now = Now()
    breaker = Breaker(now=now)
    assert breaker.probe_due_in() is None
    breaker.failed(timed_out=True)
    pauses = []
    for _ in range(7):
        pause = breaker.probe_due_in()
        assert pause is not None
        pauses.append(round(pause, 3))
        assert not breaker.try_probe()
        now.seconds += pause + 1e-6
        assert breaker.try_probe()
        assert breaker.state == "half_open" and breaker.probe_due_in() is None
        breaker.probed(well=False)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert breaker.opened == 1

    # Well when probed and ill at work: the pause stays long.
    now.seconds += 5
    assert breaker.try_probe()
    breaker.probed(well=True)
    assert breaker.allows()
    breaker.failed(timed_out=True)
    assert round(breaker.probe_due_in() or 0, 3) == 5.0 and breaker.opened == 2

    now.seconds += 5
    assert breaker.try_probe()
    breaker.probed(well=True)
    breaker.succeeded()
    breaker.failed(timed_out=True)
    assert round(breaker.probe_due_in() or 0, 3) == 0.2


def test_one_probe_at_a_time() -> None:
    breaker = Breaker(closed=False)
    assert breaker.opened == 0 and breaker.probe_due_in() == 0.0
    barrier, won = threading.Barrier(8), []

    def race() -> None:
        barrier.wait()
        if breaker.try_probe():
            won.append(1)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1]
