"""A server-sent event stream over raw ASGI: the status is sent late, silence is broken, errors end it honestly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from forebay.server.errors import Failure, Headers
from forebay.server.exchange import Exchange

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream:
    """Async context manager. Nothing is sent before the first `write` or keep-alive comment, so failures until then get a real status;
    after it, `Exchange.refuse` ends the stream with an error event.

    Args:
        keepalive_s: the silence in seconds after which `beat()` is sent; 0 is off.
        failing: the events that end a stream which cannot go on.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        keepalive_s: float,
        beat: Callable[[], bytes] = lambda: KEEP_ALIVE,
        failing: Callable[[Failure], bytes] = Failure.event,
    ) -> None:
        self._exchange = exchange
        self._sign, self._failing = beat, failing
        self._send = exchange.send
        self._interval = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._starting = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None  # only while a comment is sent: a task for each stream would be most of its memory
        self.committed = False

    async def __aenter__(self) -> EventStream:
        if self._interval > 0:
            self._timer = self._loop.call_later(self._interval, self._silent)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._rest()

    async def write(self, data: bytes) -> None:
        """Send whole events, in one write."""
        if not self.committed:
            await self._commit()
        self._last = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self, data: bytes) -> None:
        """Send the last events and end the answer."""
        self._rest()
        if not self.committed:
            await self._commit()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, failure: Failure) -> None:
        """End a stream that has started with an error event: never with a finish reason, never in silence."""
        await self.close(self._failing(failure))

    async def _commit(self) -> None:
        # The lock keeps a keep-alive and the first token from both sending the status.
        async with self._starting:
            if not self.committed:
                await self._exchange.start(200, STREAM_HEADERS)
                self._exchange.fail_stream = self.fail
                self.committed = True

    def _silent(self) -> None:
        """The timer: nothing was sent for `keepalive_s`, unless something was since it was set."""
        due = self._last + self._interval
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._silent)
        else:
            self._timer = None
            self._beat = self._loop.create_task(self._break_silence())

    async def _break_silence(self) -> None:
        await self.write(self._sign())
        self._timer = self._loop.call_at(self._last + self._interval, self._silent)

    def _rest(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
