"""The engine for an event loop: requests in, streams of events out, a thread that steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from forebay.engine.metrics import Metrics
from forebay.engine.types import EngineError, OutputEvent, Request, SlowReaderError, UnavailableError
from forebay.engine.worker import Engine
from forebay.model.chat import ChatCodec
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer

State = Literal["loading", "ready", "draining", "dead"]

IDLE_WAIT_S = 1.0  # how often an idle engine shows that it lives
FAILURES_TO_DIE = 3  # steps in a row that may break before the engine gives up
LONG_PROMPT = 4096  # tokens from which a request is prepared in a thread
LAST_STEP_S = 5.0  # how long a drain whose time is over waits for the step in flight
UNREAD_BYTES = 1 << 20  # of events that wait for a reader; beyond it the request ends
UNREAD_EVENTS = 64  # that may wait without being weighed

log = logging.getLogger("forebay.engine")


class _Mailbox:
    """Events of one request that its reader has yet to take. A reader that is always late gets several at once.

    `full` is called when more than `UNREAD_BYTES` wait: they are dropped, and an error is all that the reader still finds.
    """

    __slots__ = ("_events", "_full", "_loop", "_name", "_shut", "_size", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, full: Callable[[str], None]) -> None:
        self._loop, self._name, self._full = loop, name, full
        self._events: list[OutputEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._size = 0
        self._shut = False

    def put(self, event: OutputEvent) -> None:
        if self._shut:
            return
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        elif len(self._events) > UNREAD_EVENTS:
            self._size += _weight(event)
            if self._size > UNREAD_BYTES:
                self._shut = True
                text = f"The answer was not read: more than {UNREAD_BYTES >> 20} MiB of it waited, so the request was ended."
                self._events = [OutputEvent(self._name, [], [], finish_reason="error", error=SlowReaderError(text))]
                self._full(self._name)

    async def take(self) -> list[OutputEvent]:
        """All events that wait, at least one."""
        if not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        events, self._events, self._size = self._events, [], 0
        return events


def _weight(event: OutputEvent) -> int:
    """Bytes of an event, about."""
    scores = sum(100 + 100 * len(entry.top) for entry in event.logprobs or ())
    return 500 + scores + sum(200 + len(delta.text) for delta in event.deltas)


class EngineClient:
    """Runs an `Engine` in its own thread and hands its events to asyncio streams."""

    def __init__(self, engine: Engine, codec: ChatCodec, model_name: str) -> None:
        self.engine, self.codec, self.model_name = engine, codec, model_name
        self.tokenizer: Tokenizer = engine.tokenizer
        self.metrics: Metrics = engine.metrics
        self.max_context = engine.max_context
        self.default_effort = engine.options.default_effort
        self.state: State = "loading"
        self.reason = "the engine has not started"
        self._queues: dict[str, _Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="forebay-engine", daemon=True)
        self._stopping = False
        self._dead = False
        self._progress = time.monotonic()
        engine.sink = self._sink

    async def start(self) -> None:
        """Start stepping; events go to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self.state, self.reason = "ready", ""
        self.metrics.ready(True)

    def last_progress_age(self) -> float:
        """Seconds since the engine last finished a step or showed that it was idle."""
        return time.monotonic() - self._progress

    async def submit(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        """Events of one request, the last one with a `finish_reason`. Leaving the iterator early aborts the request.

        A reader that leaves more than `UNREAD_BYTES` of events waiting gets an error as the last one, and the request is aborted.

        Raises (before the first event): UnavailableError, QueueFullError, RequestError.
        """
        if self.state != "ready":
            self.metrics.request_rejected(self.state)
            raise UnavailableError(f"the server is {self.state}" + (f": {self.reason}" if self.reason else ""), code=self.state)
        # Walks the whole prompt: off the loop when it is long. Nothing is queued by it, so it may be cancelled at any time.
        long = len(request.prompt_ids) > LONG_PROMPT
        sequence = await asyncio.to_thread(self.engine.prepare, request) if long else self.engine.prepare(request)
        name = request.request_id
        if name in self._queues:
            raise RequestError(f"a request with the id {name!r} is running", param="request_id")
        queue = self._queues[name] = _Mailbox(asyncio.get_running_loop(), name, self.engine.abort)
        done = True
        try:
            self.engine.enqueue(sequence)
            done = False
            while not done:
                for event in await queue.take():
                    done = event.finish_reason is not None
                    yield event
            # What the end of an answer takes may wait until the tokens of the same step are out on all other streams.
            await asyncio.sleep(0)
        finally:
            del self._queues[name]
            if not done:
                self.engine.abort(name)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    async def drain(self, grace_s: float) -> bool:
        """Take no more requests, refuse the queued ones, let the running ones finish. True if all did within `grace_s` seconds."""
        if self.state == "dead":
            return False
        self.state, self.reason = "draining", "the server is shutting down"
        self.metrics.ready(False)
        self.engine.refuse_waiting(UnavailableError("the server is shutting down", code="draining"))
        if await self._idle_within(grace_s):
            return not self._dead
        self.engine.end_all(UnavailableError("the server shut down before this request finished", code="draining"))
        await self._idle_within(LAST_STEP_S)
        return False

    async def _idle_within(self, seconds: float) -> bool:
        """Whether the engine runs out of work in that time."""
        deadline = time.monotonic() + seconds
        while self.engine.busy and self._thread.is_alive():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(min(0.02, seconds))
        return True

    async def stop(self) -> None:
        """Stop stepping. Requests that still run end with an error."""
        if self.state != "dead":
            self.state, self.reason = "dead", "stopped"
        self.metrics.ready(False)
        self._stopping = True
        self.engine.wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)
        await asyncio.to_thread(self.engine.close)

    def _run(self) -> None:
        """The stepping thread. However it ends, nobody is left waiting for an event."""
        try:
            reason = self._step_until_stopped()
        except BaseException:
            log.exception("the stepping thread broke")
            reason = "its thread broke"
        if reason is None:
            self.engine.fail_all(UnavailableError("the server stopped", code="stopped"))
            return
        self.state, self.reason, self._dead = "dead", reason, True
        self.metrics.ready(False)
        self.engine.fail_all(EngineError(f"the engine stopped: {reason}", code="engine_dead"))

    def _step_until_stopped(self) -> str | None:
        """Step while there is work; why the engine cannot go on, or None when it was stopped."""
        failures = 0
        while not self._stopping:
            self._progress = time.monotonic()
            if not self.engine.busy:
                self.engine.wake.wait(IDLE_WAIT_S)
                self.engine.wake.clear()
                continue
            try:
                report = self.engine.step()
            except Exception:
                failures += 1
                log.exception("a step failed (%d of %d before the engine stops)", failures, FAILURES_TO_DIE)
                if failures >= FAILURES_TO_DIE:
                    return f"{failures} steps in a row failed"
                continue
            if report.rows:
                failures = 0
            else:
                # Nothing fits right now (or only bookkeeping was done): do not spin.
                self.engine.wake.wait(0.005)
                self.engine.wake.clear()
        return None

    def _sink(self, events: list[OutputEvent]) -> None:
        """Once per step, from the stepping thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[OutputEvent]) -> None:
        queues = self._queues
        for event in events:
            queue = queues.get(event.request_id)
            if queue is not None:
                queue.put(event)
