"""The server that `forebay bench frontend` measures, run as a program: the real application over a backend that only emits tokens.

Everything between the socket and the engine's events is what `forebay serve` runs: uvicorn, the application, the tokenizer, the chat
encoding, `EngineClient` with its thread, `OutputProcessor`. Only the model is missing: `ScriptedEngine` gives each running request one
token per step. `--peer fastapi` puts a usual FastAPI application over the same backend.

Control goes over the standard streams, one line of JSON out for each line in: the first line out is the port, `gather N` forgets the
steps so far and holds the next one until N requests run, `report` gives when each step was emitted, the end of input stops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from forebay.engine.client import EngineClient
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.output import OutputProcessor
from forebay.engine.types import OutputEvent, Request, TierCounts, Times, Usage
from forebay.engine.worker import StepReport
from forebay.model.chat import ChatCodec
from forebay.model.errors import ForebayError
from forebay.model.tokenizer import Tokenizer
from forebay.server.app import create_app
from forebay.server.limits import ServerOptions
from forebay.server.wire import steady_process, uvicorn_config

WORDS = (" the", " and", " of", " to", " in", " a")
CONTEXT = 1 << 20
BACKLOG = 4096


class Running:
    """A request of the scripted engine and how far it is."""

    def __init__(self, request: Request, output: OutputProcessor, limit: int) -> None:
        self.request, self.output, self.limit = request, output, limit
        self.done = 0
        self.first_step = -1


class ScriptedEngine:
    """The engine as `EngineClient` drives it, without a model: a step gives every running request the same one-word token.

    Args:
        interval: seconds from one step to the next; 0 is as fast as it goes.
    """

    def __init__(self, tokenizer: Tokenizer, *, interval: float) -> None:
        self.tokenizer, self.codec = tokenizer, ChatCodec(tokenizer)
        self.metrics = Metrics(CollectorRegistry(), model="scripted")
        self.options = EngineOptions()
        self.max_context = CONTEXT
        self.sink: Callable[[list[OutputEvent]], None] = lambda events: None
        self.wake = threading.Event()
        self.token = word_token(tokenizer)
        self.steps: list[float] = []  # when each was emitted, on the monotonic clock
        self.first: dict[str, int] = {}  # the step in which a request got its first token
        self._interval, self._gather, self._due = interval, 0, 0.0
        self._lock = threading.Lock()
        self._running: dict[str, Running] = {}
        self._inbox: list[Running] = []
        self._aborts: list[str] = []
        self._ending: ForebayError | None = None

    def restart(self, gather: int) -> None:
        """Forget the steps so far; none comes before `gather` requests run at once. Call it while nothing runs."""
        with self._lock:
            self._gather = gather
            self.steps, self.first = [], {}

    def prepare(self, request: Request) -> Running:
        parser = self.codec.parser(request.prompt) if request.prompt is not None else None
        stops = frozenset(request.params.stop_token_ids)
        output = OutputProcessor(self.tokenizer, request.params.stop, stops, parser=parser)
        return Running(request, output, request.params.max_tokens or 1)

    def enqueue(self, running: Running) -> None:
        with self._lock:
            self._inbox.append(running)
        self.wake.set()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborts.append(request_id)
        self.wake.set()

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self._inbox or self._aborts or self._running)

    def step(self) -> StepReport:
        """Wait until the next step is due, then emit it."""
        with self._lock:
            arrived, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
        self._running |= {running.request.request_id: running for running in arrived}
        events = [self._last(running, "abort", []) for name in aborts if (running := self._running.pop(name, None)) is not None]
        if self._ending is not None:
            events += [self._last(running, "error", []) for running in self._running.values()]
            self._running.clear()
        if len(self._running) < self._gather or not self._running:
            if events:
                self.sink(events)
            return StepReport(0.0, 0, 0, 0)
        self._gather = 0
        time.sleep(max(0.0, self._due - time.monotonic()))
        began = time.monotonic()
        self._due = max(self._due, began - self._interval) + self._interval
        rows = list(self._running.values())
        for running in rows:
            events.append(self._emit(running))
        self.steps.append(began)
        self.sink(events)
        return StepReport(time.monotonic() - began, len(rows), len(rows), len(rows))

    def _emit(self, running: Running) -> OutputEvent:
        name = running.request.request_id
        if not running.done:
            self.first[name] = len(self.steps)
        running.done += 1
        deltas = running.output.push(self.token)
        if running.done < running.limit:
            return OutputEvent(name, deltas, [self.token])
        del self._running[name]
        return self._last(running, "length", deltas + running.output.finish("length"))

    def _last(self, running: Running, reason: Any, deltas: list[Any]) -> OutputEvent:
        now, length = time.monotonic(), len(running.request.prompt_ids)
        return OutputEvent(
            running.request.request_id,
            deltas,
            [self.token],
            finish_reason=reason,
            usage=Usage(length, running.done, 0, 0),
            tiers=TierCounts(compute=length),
            times=Times(running.request.arrived, now, now, now, now),
            error=self._ending if reason == "error" else None,
        )

    def refuse_waiting(self, failure: ForebayError) -> None:
        """Nothing waits here."""

    def end_all(self, failure: ForebayError) -> None:
        self._ending = failure
        self.wake.set()

    fail_all = end_all

    def close(self) -> None:
        """Nothing is open."""


def word_token(tokenizer: Tokenizer) -> int:
    """A token that is a whole word with a space in front."""
    ids = [tokenizer.encode(word) for word in WORDS]
    return next(found[0] for found in ids if len(found) == 1)


async def serve(args: argparse.Namespace) -> None:
    """Serve until standard input ends."""
    engine = ScriptedEngine(Tokenizer.load(args.tokenizer), interval=args.interval)
    client = EngineClient(engine, engine.codec, "scripted")  # type: ignore[arg-type]
    options = ServerOptions()
    await client.start()
    if args.peer == "fastapi":
        from forebay.server.commands.frontend_peer import fastapi_app

        config = uvicorn.Config(fastapi_app(client), loop="uvloop", log_config=None, access_log=False, lifespan="off")
    else:
        config = uvicorn_config(create_app(client, options), options)
        steady_process()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()

    def control() -> None:
        for line in sys.stdin:
            answer: dict[str, Any] = {}
            if line.startswith("gather"):
                engine.restart(int(line.split()[1]))
            else:
                answer = {"steps": engine.steps, "first": engine.first, "word": engine.tokenizer.token_text(engine.token)}
            print(json.dumps(answer), flush=True)
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)

    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=control, daemon=True).start()
    await server.serve([listener])
    await client.stop()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--peer", choices=["none", "fastapi"], default="none")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    uvloop.run(serve(args))


if __name__ == "__main__":
    main()
