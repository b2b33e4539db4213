"""The engine for an event loop: streams, refusals, cancellation, drain, death (B046, B050, B117)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from engines import Memo, assert_idle, continuation, greedy, short
from forebay.engine import client as module
from forebay.engine.batcher import Row
from forebay.engine.client import EngineClient
from forebay.engine.types import EngineError, OutputEvent, QueueFullError, Request, SlowReaderError, UnavailableError
from forebay.model.errors import RequestError


class Running:
    """A client over MEMO whose steps can be held."""

    def __init__(self, **options: Any) -> None:
        self.memo = Memo(**options)
        assert self.memo.engine.codec is not None
        self.client = EngineClient(self.memo.engine, self.memo.engine.codec, "memo")
        self.gate = threading.Event()
        self.gate.set()
        self.memo.runner.before = self._before
        self.fail: Callable[[Sequence[Row]], bool] = lambda rows: False

    def _before(self, rows: Sequence[Row]) -> None:
        assert self.gate.wait(20), "the test forgot to open the gate"
        if self.fail(rows):
            raise RuntimeError("device lost")

    async def ask(self, request: Request) -> list[OutputEvent]:
        return [event async for event in self.client.submit(request)]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the condition was not met in time"
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def started(**options: Any) -> AsyncIterator[Running]:
    running = Running(**options)
    await running.client.start()
    try:
        yield running
    finally:
        running.gate.set()
        await running.client.stop()
        assert not running.client._thread.is_alive()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(limited())


def tokens(events: Sequence[OutputEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def slow(number: int = 0, count: int = 10_000) -> Request:
    return Request(short(6, number), greedy(count))


def test_streams_of_many_requests_are_their_own() -> None:
    async def body() -> None:
        async with started(max_sequences=4) as running:
            answers = await asyncio.gather(*(running.ask(Request(short(5 + i, i), greedy(10 + i))) for i in range(20)))
            for i, events in enumerate(answers):
                assert tokens(events) == continuation(short(5 + i, i), 10 + i)
                assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
                assert events[-1].finish_reason == "length"
            assert not running.client._queues
            await running.until(lambda: not running.memo.engine.busy)
            assert_idle(running.memo.engine)

    run(body)


def test_events_arrive_step_by_step() -> None:
    """The stepping thread must not keep the loop from delivering: the n-th event is read before step n + 1 ends."""

    async def body() -> None:
        async with started() as running:
            seen: list[int] = []
            go = threading.Semaphore(1)
            running.memo.runner.before = lambda rows: None if go.acquire(timeout=20) else pytest.fail("no event came")
            async for event in running.client.submit(Request(short(4), greedy(20))):
                seen += event.token_ids
                go.release()  # the next step waits for this one's event to have been read
            assert seen == continuation(short(4), 20)

    run(body)


def test_not_ready_before_the_start_nor_after_the_stop() -> None:
    async def body() -> None:
        running = Running()
        assert running.client.state == "loading"
        with pytest.raises(UnavailableError, match="loading"):
            await running.ask(slow())
        await running.client.start()
        assert running.client.state == "ready"
        assert running.memo.value("ready") == 1
        await running.client.stop()
        assert running.client.state == "dead"
        with pytest.raises(UnavailableError):
            await running.ask(slow())
        assert running.memo.value("ready") == 0
        assert running.memo.value("rejected_total", reason="loading") == 1
        assert running.memo.value("rejected_total", reason="dead") == 1

    run(body)


def test_refusals_come_before_the_first_event() -> None:
    async def body() -> None:
        async with started(max_context=64, max_sequences=1, max_queued_requests=1) as running:
            with pytest.raises(RequestError) as error:
                await running.ask(Request(short(64), greedy()))
            assert error.value.code == "context_length_exceeded"
            running.gate.clear()
            first = asyncio.create_task(running.ask(slow(1)))
            await running.until(lambda: len(running.memo.scheduler.running) == 1)
            second = asyncio.create_task(running.ask(slow(2)))
            await running.until(lambda: running.memo.engine.queued == 1)
            with pytest.raises(QueueFullError):
                await running.ask(slow(3))
            running.gate.set()
            for task in (first, second):
                assert (await task)[-1].finish_reason == "length"
            assert not running.client._queues

    run(body)


def test_an_id_in_use_is_refused_and_its_owner_not_disturbed() -> None:
    async def body() -> None:
        async with started() as running:
            running.gate.clear()
            first = asyncio.create_task(running.ask(Request(short(4), greedy(9), request_id="twice")))
            await running.until(lambda: "twice" in running.client._queues)
            with pytest.raises(RequestError, match="twice"):
                await running.ask(Request(short(5), greedy(9), request_id="twice"))
            running.gate.set()
            assert tokens(await first) == continuation(short(4), 9)

    run(body)


@pytest.mark.case("B046")
def test_leaving_a_stream_aborts_its_request() -> None:
    async def body() -> None:
        async with started() as running:
            memo = running.memo
            stream = running.client.submit(slow())
            async for event in stream:
                if len(tokens([event])) and memo.runner.steps >= 5:
                    break
            at = memo.runner.steps
            await stream.aclose()
            await running.until(lambda: not memo.engine.busy)
            assert memo.runner.steps <= at + 3
            task = asyncio.create_task(running.ask(slow(2)))
            await running.until(lambda: len(memo.scheduler.running) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await running.until(lambda: not memo.engine.busy)
            assert memo.value("requests_finished_total", reason="abort") == 2
            assert not running.client._queues
            assert_idle(memo.engine)

    run(body)


def test_abort_by_id_ends_the_stream() -> None:
    async def body() -> None:
        async with started() as running:
            request = slow()
            events = []
            async for event in running.client.submit(request):
                events.append(event)
                if len(events) == 3:
                    running.client.abort(request.request_id)
            assert events[-1].finish_reason == "abort"
            assert len(events) < 10_000

    run(body)


@pytest.mark.case("B046")
def test_cancelled_while_a_long_prompt_is_prepared_it_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with started(max_context=20_000, kv_tokens=20_480) as running:
            memo = running.memo
            entered, leave = threading.Event(), threading.Event()
            prepare = memo.engine.prepare

            def slowly(request: Request) -> Any:
                entered.set()
                assert leave.wait(20)
                return prepare(request)

            monkeypatch.setattr(memo.engine, "prepare", slowly)
            task = asyncio.create_task(running.ask(Request(short(6000), greedy(10))))
            await running.until(entered.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            leave.set()
            await asyncio.sleep(0.05)
            assert memo.value("requests_queued_total") == 0
            assert not running.client._queues
            assert_idle(memo.engine)

    run(body)


def test_a_long_prompt_is_served_as_a_short_one() -> None:
    async def body() -> None:
        async with started(max_context=20_000, kv_tokens=20_480, encoder_tokens=4096) as running:
            ids = short(6000)
            assert tokens(await running.ask(Request(ids, greedy(3)))) == continuation(ids, 3)

    run(body)


# Drain


def test_drain_lets_the_running_finish_and_refuses_the_rest() -> None:
    async def body() -> None:
        async with started(max_sequences=1) as running:
            running.gate.clear()
            runs = asyncio.create_task(running.ask(slow(1, 30)))
            await running.until(lambda: len(running.memo.scheduler.running) == 1)
            waits = asyncio.create_task(running.ask(slow(2, 30)))
            await running.until(lambda: running.memo.engine.queued == 1)
            drain = asyncio.create_task(running.client.drain(20.0))
            await asyncio.sleep(0)
            assert running.client.state == "draining"
            with pytest.raises(UnavailableError):
                await running.ask(slow(3))
            running.gate.set()
            assert await drain is True
            assert tokens(await runs) == continuation(short(6, 1), 30)
            refused = (await waits)[-1]
            assert isinstance(refused.error, UnavailableError)
            assert refused.error.code == "draining"
            assert running.memo.value("ready") == 0

    run(body)


def test_drain_of_an_idle_engine_is_over_at_once() -> None:
    async def body() -> None:
        async with started() as running:
            assert await running.client.drain(20.0) is True

    run(body)


def test_drain_whose_time_is_over_ends_what_still_runs() -> None:
    async def body() -> None:
        async with started(max_context=1 << 20, kv_tokens=1 << 16) as running:
            task = asyncio.create_task(running.ask(Request(short(6), greedy(60_000))))
            await running.until(lambda: len(running.memo.scheduler.running) == 1)
            assert await running.client.drain(0.05) is False
            last = (await task)[-1]
            assert last.finish_reason == "error"
            assert isinstance(last.error, UnavailableError)
            assert_idle(running.memo.engine)

    run(body)


@pytest.mark.case("B117")
def test_drain_of_an_engine_that_dies_on_the_way_did_not_succeed() -> None:
    async def body() -> None:
        async with started() as running:
            running.gate.clear()
            tasks = [asyncio.create_task(running.ask(slow(i))) for i in range(2)]
            await running.until(lambda: len(running.client._queues) == 2 and len(running.memo.scheduler.running) > 0)
            drain = asyncio.create_task(running.client.drain(20.0))
            await asyncio.sleep(0)
            schedule = running.memo.scheduler.schedule

            def breaks() -> Any:
                schedule()
                raise RuntimeError("broken")

            running.memo.scheduler.schedule = breaks
            running.gate.set()
            assert await drain is False
            assert running.client.state == "dead"
            assert [(await task)[-1].finish_reason for task in tasks] == ["error", "error"]

    run(body)


def test_stop_ends_every_stream() -> None:
    async def body() -> None:
        async with started(max_sequences=1) as running:
            tasks = [asyncio.create_task(running.ask(slow(i))) for i in range(3)]
            await running.until(lambda: running.memo.engine.queued == 2)
            await running.client.stop()
            for task in tasks:
                assert isinstance((await task)[-1].error, UnavailableError)
            assert_idle(running.memo.engine)

    run(body)


# Failure


@pytest.mark.case("B117")
def test_one_broken_step_is_survived() -> None:
    async def body() -> None:
        async with started() as running:
            left = [1]
            running.fail = lambda rows: bool(left) and left.pop() == 1
            last = (await running.ask(slow()))[-1]
            assert isinstance(last.error, EngineError)
            assert running.client.state == "ready"
            assert tokens(await running.ask(Request(short(4), greedy(3)))) == continuation(short(4), 3)

    run(body)


@pytest.mark.case("B117")
def test_an_engine_whose_every_step_breaks_is_dead() -> None:
    """Also when requests come one at a time, each leaving by itself in between."""

    async def body() -> None:
        async with started() as running:
            running.fail = lambda rows: True
            for number in range(module.FAILURES_TO_DIE):
                assert running.client.state == "ready"
                stream = running.client.submit(slow(number))
                last = [event async for event in stream][-1]
                assert isinstance(last.error, EngineError)
                running.client.abort("somebody else")  # a step of bookkeeping is no success
                await running.until(lambda: not running.memo.engine.busy or running.client.state == "dead")
            await running.until(lambda: running.client.state == "dead")
            assert "3 steps in a row" in running.client.reason
            assert running.memo.value("ready") == 0
            with pytest.raises(UnavailableError, match="dead"):
                await running.ask(slow())
            assert await running.client.drain(1.0) is False

    run(body)


@pytest.mark.case("B117")
def test_whoever_waits_when_the_engine_dies_is_told() -> None:
    async def body() -> None:
        async with started(max_sequences=1) as running:
            running.gate.clear()
            tasks = [asyncio.create_task(running.ask(slow(i))) for i in range(6)]
            await running.until(lambda: running.memo.engine.queued == 5)
            running.fail = lambda rows: True
            running.gate.set()
            last = [(await task)[-1] for task in tasks]
            assert all(isinstance(event.error, EngineError) for event in last)
            assert sum(event.error.code == "engine_dead" for event in last if event.error) == 3
            assert running.client.state == "dead"
            # Prepared while it died: refused, not forgotten.
            with pytest.raises(UnavailableError):
                running.memo.engine.submit(slow())

    run(body)


@pytest.mark.case("B117")
def test_a_thread_that_breaks_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with started() as running:
            running.gate.clear()
            task = asyncio.create_task(running.ask(slow()))
            await running.until(lambda: len(running.memo.scheduler.running) == 1)
            monkeypatch.setattr(type(running.memo.engine), "busy", property(lambda engine: 1 / 0))
            running.gate.set()
            assert isinstance((await task)[-1].error, EngineError)
            assert running.client.state == "dead"
            monkeypatch.undo()

    run(body)


@pytest.mark.case("B117")
def test_a_step_that_does_not_end_shows_as_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with started() as running:
            running.gate.clear()
            task = asyncio.create_task(running.ask(slow(0, 3)))
            await running.until(lambda: running.memo.runner.steps == 1)
            now = time.monotonic
            monkeypatch.setattr(module.time, "monotonic", lambda: now() + 30)
            assert running.client.last_progress_age() > 29
            monkeypatch.undo()
            running.gate.set()
            await task
            await running.until(lambda: running.client.last_progress_age() < 5)

    run(body)


def test_a_reader_that_does_not_read_loses_its_request_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a reader is bounded in bytes; then its request ends, at once, whether or not the reader ever comes back."""
    monkeypatch.setattr(module, "UNREAD_BYTES", 100_000)

    async def body() -> None:
        async with started(max_sequences=2) as running:
            stuck = running.client.submit(slow())
            read = [await anext(stuck)]
            go = threading.Semaphore(0)  # each step waits until the other reader has read: it cannot be late itself
            running.memo.runner.before = lambda rows: None if go.acquire(timeout=20) else pytest.fail("no event came")
            other: list[OutputEvent] = []
            go.release(3)
            async for event in running.client.submit(Request(short(6, 1), greedy(400))):
                other.append(event)
                go.release()
            assert tokens(other) == continuation(short(6, 1), 400)
            go.release(10_000)
            await running.until(lambda: not running.memo.engine.busy)
            assert running.memo.value("aborts_total") == 1
            assert_idle(running.memo.engine)
            waiting = running.client._queues
            assert [len(queue._events) for queue in waiting.values()] == [1]
            read += [event async for event in stuck]
            assert isinstance(read[-1].error, SlowReaderError)
            assert read[-1].finish_reason == "error"
            assert tokens(read) == continuation(short(6, 0), len(tokens(read)))
            assert not waiting

    run(body)


def test_a_reader_that_is_late_gets_everything() -> None:
    async def body() -> None:
        async with started() as running:
            stream = running.client.submit(Request(short(4), greedy(500)))
            read = [await anext(stream)]
            await running.until(lambda: not running.memo.engine.busy)
            read += [event async for event in stream]
            assert tokens(read) == continuation(short(4), 500)
            assert read[-1].finish_reason == "length"

    run(body)


def test_a_step_reaches_the_loop_in_one_call() -> None:
    """However many streams a step feeds, the loop is woken once for it."""

    async def body() -> None:
        async with started(max_sequences=8) as running:
            calls: list[int] = []
            deliver = running.client._deliver
            running.client._deliver = lambda events: (calls.append(len(events)), deliver(events))  # type: ignore[method-assign, func-returns-value]
            running.gate.clear()
            asked = [asyncio.create_task(running.ask(Request(short(5, i), greedy(20)))) for i in range(8)]
            await running.until(lambda: running.memo.engine.queued + len(running.client._queues) >= 8)
            running.gate.set()
            await asyncio.gather(*asked)
            assert sum(calls) >= 8 * 20
            assert len(calls) < 8 * 20 / 3

    run(body)


def test_last_tokens_go_out_before_any_answer_is_wound_up() -> None:
    """Streams that end in the same step do not wait for one another's usage, logs and clean-up."""

    async def body() -> None:
        async with started(max_sequences=8) as running:
            seen: list[tuple[str, int]] = []

            async def read(number: int) -> None:
                async for event in running.client.submit(Request(short(5, number), greedy(10))):
                    if event.finish_reason is not None:
                        seen.append(("last token", number))
                seen.append(("wound up", number))

            running.gate.clear()
            running.client.engine.submit(slow(99, 1))  # its step holds the thread while the others arrive
            await running.until(lambda: len(running.memo.scheduler.running) == 1)
            asked = [asyncio.create_task(read(i)) for i in range(4)]
            await running.until(lambda: len(running.client._queues) == 4)
            running.gate.set()
            await asyncio.gather(*asked)
            assert [what for what, _ in seen] == ["last token"] * 4 + ["wound up"] * 4

    run(body)
