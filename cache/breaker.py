"""A circuit breaker: after a server has stalled or failed, nobody waits for it until a probe has found it well again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

log = logging.getLogger("forebay.cache")

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Thread-safe. Closed: calls go through. Open: nobody calls. Half open: one probe is under way, everybody else still stays away.

    One timeout opens it, since a timeout has cost its caller the whole deadline; errors come back at once, so it takes `errors` in a row.
    The pause before a probe starts at `first_pause_s`, doubles up to `longest_pause_s` while openings follow each other, and starts
    again from the first after a call that succeeded: a server that answers probes and fails at work is not tried five times a second.

    Probing is the owner's duty, from a thread on which no request waits: `probe_due_in`, `try_probe`, `probed`.
    """

    def __init__(
        self,
        errors: int = 3,
        first_pause_s: float = 0.2,
        longest_pause_s: float = 5.0,
        closed: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`closed=False`: start open with a probe due at once, for a server that must be met before it can be used."""
        self._errors = errors
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._now = now
        self._lock = threading.Lock()
        self._state: BreakerState = "closed" if closed else "open"
        self._in_a_row = 0
        self._pause_s = first_pause_s
        self._probe_at = now()
        self._opened = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def opened(self) -> int:
        """Times it went from closed to open."""
        return self._opened

    def allows(self) -> bool:
        return self._state == "closed"

    def succeeded(self) -> None:
        """A call came back well. One that began before the breaker opened does not close it."""
        with self._lock:
            if self._state == "closed":
                self._in_a_row = 0
                self._pause_s = self._first_pause_s

    def failed(self, *, timed_out: bool) -> bool:
        """A call failed. True if that opened the breaker."""
        with self._lock:
            if self._state != "closed":
                return False
            self._in_a_row += 1
            if not timed_out and self._in_a_row < self._errors:
                return False
            self._opened += 1
            self._open()
        log.warning("Redis does not answer%s: windows are replayed until it does", " in time" if timed_out else "")
        return True

    def probe_due_in(self) -> float | None:
        """Seconds until the next probe, 0 if it is due; None while closed or while a probe is under way."""
        with self._lock:
            return max(0.0, self._probe_at - self._now()) if self._state == "open" else None

    def try_probe(self) -> bool:
        """True for the one caller that may probe now and must report with `probed`."""
        with self._lock:
            if self._state != "open" or self._now() < self._probe_at:
                return False
            self._state = "half_open"
            return True

    def probed(self, well: bool) -> None:
        """The outcome of the probe."""
        with self._lock:
            if self._state != "half_open":
                return
            if well:
                self._state = "closed"
                self._in_a_row = 0
            else:
                self._open()
        if well:
            log.warning("Redis answers: windows are kept and found again")

    def _open(self) -> None:
        self._state = "open"
        self._in_a_row = 0
        self._probe_at = self._now() + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_pause_s)
