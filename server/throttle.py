"""How much each API key may ask for, and when a client that was turned away is told to come again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar

from forebay.server.access import Caller, Key
from forebay.server.errors import Headers, HttpError

Clock = Callable[[], int]  # nanoseconds

SECOND = 10**9
MINUTE = 60 * SECOND
MAX_PROMISE_S = 30  # a full queue: more than this nobody can foresee
_STARTS = 64  # that the rate is measured over


class Bucket:
    """A token bucket that holds one minute's worth and refills steadily. Its level may fall below zero: tokens are counted when spent.

    Kept as the time at which it will be full again (the generic cell rate algorithm), in whole nanoseconds, so that waiting for
    exactly as long as `wait` says is enough.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._step = max(MINUTE // per_minute, 1)
        self._full_at = 0

    def resize(self, per_minute: int) -> None:
        """Another rate from now on; what was taken stays taken."""
        self.per_minute, self._step = per_minute, max(MINUTE // per_minute, 1)

    def wait(self, now: int) -> int:
        """Nanoseconds until one may be taken; 0 if it may be now."""
        return max(self._full_at - now - (self.per_minute - 1) * self._step, 0)

    def left(self, now: int) -> int:
        """How many may be taken now."""
        return max(self.per_minute - math.ceil(self.full_in(now) / self._step), 0)

    def full_in(self, now: int) -> int:
        """Nanoseconds until it is full."""
        return max(self._full_at - now, 0)

    def take(self, count: int, now: int) -> None:
        """Take `count`, or give back as many as that is below zero."""
        self._full_at = max(self._full_at, now) + count * self._step


class Account:
    """What one key has running and has used up. It outlives a change of the key's limits."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.concurrency: int | None = None
        self.running = 0
        self.usual_s = 1.0  # how long its requests take, a moving mean

    def limit(self, key: Key) -> None:
        """Take over the limits of `key` as they are now."""
        self.requests = _resized(self.requests, key.requests_per_minute)
        self.tokens = _resized(self.tokens, key.tokens_per_minute)
        self.concurrency = key.concurrency


def _resized(bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute)
    return bucket


class Ticket:
    """One request under way. `spend` counts its tokens, `close` ends it; both may be called at any time and more than once."""

    def __init__(self, account: Account, clock: Clock) -> None:
        self._account, self._clock = account, clock
        self._began = clock()
        self._open = True
        account.running += 1

    def spend(self, tokens: int) -> None:
        """Count tokens of the prompt or of the answer; fewer than none gives some back."""
        bucket = self._account.tokens
        if bucket is not None and tokens:
            bucket.take(tokens, self._clock())

    def close(self) -> None:
        if self._open:
            self._open = False
            account = self._account
            account.running -= 1
            account.usual_s += ((self._clock() - self._began) / SECOND - account.usual_s) / 8


current: ContextVar[Ticket | None] = ContextVar("current", default=None)
"""The ticket of the request that this task answers; None where nothing is counted."""


class Throttle:
    """The limits of all keys."""

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def admit(self, caller: Caller) -> tuple[Ticket, Headers]:
        """Let a request in; its ticket and the `x-ratelimit-` headers of its answer. A refused request uses nothing up.

        Raises HttpError 429 with `Retry-After` (whole seconds). For the two rates it is exact: the next request after that time passes.
        """
        account = self._accounts.setdefault(caller.name, Account())
        if caller.key is not None:
            account.limit(caller.key)
        now = self._clock()
        for bucket, what in ((account.requests, "requests"), (account.tokens, "tokens")):
            if bucket is not None and (wait := bucket.wait(now)):
                text = f"Rate limit reached for API key {caller.name}: {bucket.per_minute} {what} per minute."
                raise _too_many(text, math.ceil(wait / SECOND), _headers(account, now))
        if account.concurrency is not None and account.running >= account.concurrency:
            text = f"API key {caller.name} has {account.running} requests running, and may have {account.concurrency}."
            usual = min(math.ceil(account.usual_s / account.concurrency), 60)
            raise _too_many(text, usual, _headers(account, now))
        if account.requests is not None:
            account.requests.take(1, now)
        return Ticket(account, self._clock), _headers(account, now)


def _too_many(text: str, seconds: int, headers: Headers) -> HttpError:
    seconds = max(seconds, 1)
    headers = [*headers, (b"retry-after", b"%d" % seconds)]
    return HttpError(429, f"{text} Please try again in {seconds}s.", code="rate_limit_exceeded", headers=headers)


def _headers(account: Account, now: int) -> Headers:
    headers: Headers = []
    for bucket, what in ((account.requests, b"requests"), (account.tokens, b"tokens")):
        if bucket is not None:
            headers += [
                (b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute),
                (b"x-ratelimit-remaining-" + what, b"%d" % bucket.left(now)),
                (b"x-ratelimit-reset-" + what, _span(bucket.full_in(now))),
            ]
    return headers


def _span(nanoseconds: int) -> bytes:
    """`0s`, `150ms`, `1.5s`, `6m0s`: the spelling that OpenAI's clients know."""
    if nanoseconds < SECOND and nanoseconds:
        return b"%dms" % math.ceil(nanoseconds / 10**6)
    if nanoseconds < MINUTE:
        return f"{nanoseconds / SECOND:.3f}".rstrip("0").rstrip(".").encode() + b"s"
    minutes, rest = divmod(math.ceil(nanoseconds / SECOND), 60)
    return b"%dm%ds" % (minutes, rest)


class Pace:
    """How fast waiting requests start, and from it when one that found the queue full had better come again.

    Those who were turned away and have not been able to come back yet are counted: the k-th of them needs k starts.
    """

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._starts: deque[int] = deque(maxlen=_STARTS)
        self._promised: deque[int] = deque(maxlen=4096)

    def started(self) -> None:
        """A request has its first output."""
        self._starts.append(self._clock())

    def promise(self, otherwise: float) -> float:
        """Seconds, 1 to 30. `otherwise` is returned while nothing has been measured."""
        now = self._clock()
        while self._promised and self._promised[0] <= now:
            self._promised.popleft()
        if len(self._starts) > 1:
            # To now, not to the last start: the longer nothing starts, the longer it takes.
            seconds = (now - self._starts[0]) / len(self._starts) / SECOND * (len(self._promised) + 1)
        else:
            seconds = otherwise
        seconds = min(max(seconds, 1.0), float(MAX_PROMISE_S))
        self._promised.append(now + math.ceil(seconds) * SECOND)
        return seconds
