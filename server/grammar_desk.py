"""Where requests wait for the grammars of their answers, apart from all other work: building one may take seconds.

What is kept is there at once. The rest is built in threads of its own, each grammar once however many ask for it, and in turns: no caller's
grammars keep those of others waiting for longer than the ones under way take.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from forebay.engine.grammar import Grammar, GrammarSpec
from forebay.engine.grammar_compiler import GrammarCompiler, Outcome, found, salted
from forebay.engine.types import QueueFullError
from forebay.server.limits import Lane

T = TypeVar("T")

THREADS = 2  # grammars built at once
MOST = 64  # that wait
MAX_ROUNDS = 64  # grammars of one request

Write = Callable[[], GrammarSpec]
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
Obtain = Callable[[bytes, Write], Grammar]
"""Gives the grammar of a key; `write` writes it down if it has to be built. Raises RequestError for one that cannot be used."""


@dataclass(frozen=True)
class _Missing:
    """A grammar that is not kept, and how to write it down."""

    key: bytes
    write: Write


class _MissingError(Exception):
    """Ends an attempt that lacks a grammar."""

    def __init__(self, missing: _Missing) -> None:
        super().__init__("a grammar has to be built")
        self.missing = missing


class _Work:
    """One grammar to be built, and how many wait for it."""

    def __init__(self, key: bytes, owner: str, build: Callable[[], Outcome], loop: asyncio.AbstractEventLoop) -> None:
        self.key, self.owner, self.build = key, owner, build
        self.done: asyncio.Future[Outcome] = loop.create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whether or not somebody still waits
        self.waiters = 0
        self.started = False


class GrammarDesk:
    """All grammars of one server. Used from the event loop only."""

    def __init__(self, compiler: GrammarCompiler, *, threads: int = THREADS, most: int = MOST) -> None:
        """`threads`: grammars built at once. `most`: how many may wait."""
        self.compiler, self.most = compiler, most
        self._pool = Lane("forebay-grammar", threads)
        self._free = threads
        self._works: dict[bytes, _Work] = {}
        self._lines: OrderedDict[str, deque[_Work]] = OrderedDict()  # by owner; the next one's turn is first
        self._running: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    async def hold(self, work: Callable[[Obtain], T], run: Run, *, owner: str, salt: str) -> T:
        """What `work` makes of the grammars it obtains.

        `work` is called by `run` with all that is known, and again whenever one that it lacked is there. `owner` is whose turn and memory
        it takes; with another `salt` a grammar is another one.

        Raises:
            RequestError: what `work` raises.
            QueueFullError: too many wait. UnavailableError: grammars cannot be built.
        """
        have: dict[bytes, Outcome] = {}

        def obtain(key: bytes, write: Write) -> Grammar:
            key = salted(key, salt)
            known = have.get(key) or self.compiler.kept(key)
            if known is None:
                raise _MissingError(_Missing(key, write))
            return found(known)

        def attempt() -> T | _Missing:
            # An exception that came through a future would keep its frames, and all grammars in them, until the garbage is collected.
            try:
                return work(obtain)
            except _MissingError as error:
                return error.missing

        try:
            for _ in range(MAX_ROUNDS):
                result = await run(attempt)
                if not isinstance(result, _Missing):
                    return result
                have[result.key] = await self._built(result, owner)
            raise RuntimeError(f"a request needs more than {MAX_ROUNDS} grammars")
        finally:
            have.clear()

    async def _built(self, missing: _Missing, owner: str) -> Outcome:
        work = self._works.get(missing.key)
        if work is None:
            build = partial(self.compiler.outcome, missing.key, missing.write, owner)
            work = _Work(missing.key, owner, build, asyncio.get_running_loop())
            self._queue(work)
        work.waiters += 1
        try:
            return await asyncio.shield(work.done)
        finally:
            work.waiters -= 1
            if not work.waiters and not work.started and not work.done.done():
                self._drop(work)

    def _queue(self, work: _Work) -> None:
        """Put it in line. A full line has room for an owner with less in it than another, whose latest is turned away."""
        if self._free <= 0 and self.waiting >= self.most:
            longest = max(self._lines.values(), key=len, default=deque())
            if len(longest) <= len(self._lines.get(work.owner, ())) + 1:
                raise self._full()
            latest = longest[-1]
            self._drop(latest)
            latest.done.set_exception(self._full())
        self._works[work.key] = work
        self._lines.setdefault(work.owner, deque()).append(work)
        self._go_on()

    def _full(self) -> QueueFullError:
        return QueueFullError(f"{self.most} forms of answers wait to be prepared already; please try again later", retry_after=2.0)

    def _drop(self, work: _Work) -> None:
        line = self._lines[work.owner]
        line.remove(work)
        if not line:
            del self._lines[work.owner]
        del self._works[work.key]

    def _go_on(self) -> None:
        while self._free > 0 and self._lines:
            owner = min(self._lines, key=lambda name: self._running.get(name, 0))  # of equals the first, whose turn it is
            line = self._lines.pop(owner)
            work = line.popleft()
            if line:
                self._lines[owner] = line
            work.started = True
            self._free -= 1
            self._running[owner] = self._running.get(owner, 0) + 1
            task = asyncio.ensure_future(asyncio.wrap_future(self._pool.submit(work.build)))
            task.add_done_callback(partial(self._ended, work))

    def _ended(self, work: _Work, task: asyncio.Future[Outcome]) -> None:
        self._free += 1
        self._running[work.owner] -= 1
        if not self._running[work.owner]:
            del self._running[work.owner]
        del self._works[work.key]
        if not work.done.done():
            if task.cancelled():
                work.done.cancel()
            elif (error := task.exception()) is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(task.result())
        self._go_on()

    def close(self) -> None:
        """Let the threads end; what waits is given up."""
        self._pool.close()
        for work in [work for line in self._lines.values() for work in line]:
            self._drop(work)
            work.done.cancel()
