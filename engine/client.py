"""The engine for an event loop: requests in, streams of events out, a thread that steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Literal

from forebay.engine.metrics import Metrics
from forebay.engine.types import EngineError, OutputEvent, Request, UnavailableError
from forebay.engine.worker import Engine
from forebay.model.chat import ChatCodec
from forebay.model.tokenizer import Tokenizer

State = Literal["loading", "ready", "draining", "dead"]

IDLE_WAIT_S = 1.0  # how often an idle engine shows that it lives
FAILURES_TO_DIE = 3  # steps in a row that may break before the engine gives up

log = logging.getLogger("forebay.engine")


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
        self._queues: dict[str, asyncio.Queue[OutputEvent]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="forebay-engine", daemon=True)
        self._stopping = False
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

    async def submit(self, request: Request) -> AsyncIterator[OutputEvent]:
        """Events of one request, the last one with a `finish_reason`. Leaving the iterator early aborts the request.

        Raises (before the first event): UnavailableError, QueueFullError, RequestError.
        """
        if self.state != "ready":
            self.metrics.request_rejected("draining" if self.state == "draining" else "unavailable")
            raise UnavailableError(f"the server is {self.state}" + (f": {self.reason}" if self.reason else ""), code=self.state)
        queue: asyncio.Queue[OutputEvent] = asyncio.Queue()
        self._queues[request.request_id] = queue
        done = False
        try:
            # Building the sequence walks the whole prompt: off the loop when it is long.
            if len(request.prompt_ids) > 4096:
                await asyncio.to_thread(self.engine.submit, request)
            else:
                self.engine.submit(request)
            while not done:
                event = await queue.get()
                done = event.finish_reason is not None
                yield event
        finally:
            self._queues.pop(request.request_id, None)
            if not done:
                self.engine.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    async def drain(self, grace_s: float) -> bool:
        """Take no more requests, refuse the queued ones, let the running ones finish. True if all did within `grace_s` seconds."""
        if self.state == "dead":
            return False
        self.state, self.reason = "draining", "the server is shutting down"
        self.metrics.ready(False)
        deadline = time.monotonic() + grace_s
        self.engine.refuse_waiting(UnavailableError("the server is shutting down", code="draining"))
        while self.engine.busy and time.monotonic() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.05)
        finished = not self.engine.busy
        if not finished:
            self.engine.end_all(UnavailableError("the server shut down before this request finished", code="draining"))
            await asyncio.sleep(0.1)
        return finished

    async def stop(self) -> None:
        """Stop stepping. Requests that still run end with an error."""
        if self.state != "dead":
            self.state, self.reason = "dead", "stopped"
        self.metrics.ready(False)
        self._stopping = True
        self.engine.wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    def _run(self) -> None:
        """The stepping thread."""
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
                    self._die(f"{failures} steps in a row failed")
                    return
                continue
            failures = 0
            if not report.rows:
                # Nothing fits right now (or only bookkeeping was done): do not spin.
                self.engine.wake.wait(0.005)
                self.engine.wake.clear()
        self.engine.fail_all(UnavailableError("the server stopped", code="stopped"))

    def _die(self, reason: str) -> None:
        self.state, self.reason = "dead", reason
        self.metrics.ready(False)
        self.engine.fail_all(EngineError(f"the engine stopped: {reason}", code="engine_dead"))

    def _sink(self, events: list[OutputEvent]) -> None:
        """Once per step, from the stepping thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[OutputEvent]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)
