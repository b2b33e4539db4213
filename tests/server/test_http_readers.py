"""Clients that read slowly, or not at all, and what a stream costs while it is open."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from forebay.server import sse
from forebay.server.app import App
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine, Served, serve

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PLAIN = {"thinking": {"type": "disabled"}}
LIMIT_S = 0.4


@pytest.fixture(scope="module")
def options() -> ServerOptions:
    return ServerOptions(write_timeout_s=LIMIT_S, write_floor=20_000)


def ask(served: Served, *, stream: bool = True, headers: str = "", pause_s: float = 0.0, **fields: Any) -> socket.socket:
    """Send a request on a connection with little room for the answer, and read nothing. The body comes `pause_s` after the head."""
    body = json.dumps({"messages": HI, "stream": stream, "max_tokens": 1_000_000, **PLAIN, **fields}).encode()
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((served.host, served.port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode()
    if pause_s:
        connection.sendall(head)
        time.sleep(pause_s)
        head = b""
    connection.sendall(head + body)
    return connection


def drain(connection: socket.socket) -> tuple[bytes, bool]:
    """(everything that still arrives, whether it ended by a reset)."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        return received, True
    return received, False


def long_answer(served: Served) -> None:
    """About 4 MB of stream, more than any buffer on the way takes."""
    served.engine.answer = Script(served.engine.ids("word ") * 20_000, finish="length", per_event=1)


@pytest.mark.parametrize("choices", [1, 2])
def test_a_client_that_stops_reading_is_cut_and_its_neighbour_is_not(
    served: Served, choices: int, caplog: pytest.LogCaptureFixture
) -> None:
    long_answer(served)
    with caplog.at_level("INFO"), ask(served, n=choices) as stuck:
        served.wait(lambda: len(served.engine.running) == choices)
        served.engine.answer = Script(served.engine.ids("fine "), finish="length", per_event=1)
        with served.client() as client:
            for _ in range(20):  # all the while
                answer = client.chat.completions.create(model="script", messages=HI, stream=True, extra_body=PLAIN)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "fine "
        served.wait(lambda: not served.engine.running)
        assert len(served.engine.aborted) == choices
        received, reset = drain(stuck)
        assert reset or b"[DONE]" not in received
        assert b'"finish_reason":"length"' not in received
        served.wait(lambda: "slow_reader" in caplog.text)
    assert "a client was cut off" in caplog.text


def test_a_client_that_reads_slowly_but_steadily_gets_everything(served: Served) -> None:
    served.engine.answer = Script(served.engine.ids("word ") * 2500, finish="length", per_event=1)
    with ask(served) as slow:
        received = b""
        began = time.monotonic()
        while b"[DONE]" not in received:
            piece = slow.recv(16_384)
            assert piece, "it was cut"
            received += piece
            if time.monotonic() - began < 5 * LIMIT_S:
                time.sleep(0.02)
    assert received.count(b'"content":"') > 2500
    assert not served.engine.aborted


@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
@pytest.mark.parametrize("size", [300, 20_000, 60_000])
def test_an_answer_nobody_reads_does_not_keep_its_connection(headers: str, size: int) -> None:
    """A whole answer is in the buffer when its request is over: what is left of it must not hold the connection for ever."""
    engine = ScriptEngine(max_context=1 << 20)
    engine.answer = Script(engine.ids("word ") * size, finish="length", per_event=size * 5)
    with serve(engine, ServerOptions(write_timeout_s=LIMIT_S, write_floor=20_000, keep_alive_s=1)) as served:
        connections = served.server.server_state.connections
        with ask(served, stream=False, headers=headers):
            served.wait(lambda: bool(engine.requests))
            served.wait(lambda: not engine.running and not connections)


def test_a_disconnect_frees_the_request_within_a_step(served: Served) -> None:
    engine = served.engine
    engine.hold = True
    long_answer(served)
    connections = [ask(served) for _ in range(8)]
    served.wait(lambda: len(engine.running) == 8)
    for connection in connections:
        connection.close()
    served.wait(lambda: not engine.running)  # although no step ends and nothing is written
    assert len(engine.aborted) == 8
    assert engine.hold


def test_a_disconnect_is_seen_behind_a_large_body(served: Served) -> None:
    """Reading pauses when much of a body has arrived; it must go on, or nobody learns that the client has left."""
    served.engine.hold = True
    for size in (10_000, 70_000, 1_000_000):
        with ask(served, pause_s=0.05, metadata={"padding": "x" * size}):
            served.wait(lambda: len(served.engine.running) == 1)
        served.wait(lambda: not served.engine.running)


def test_a_stream_is_one_task(served: Served) -> None:
    """Tasks are most of the memory of an open stream: it has the one that answers it, and no others that wait for something."""
    loop_of: list[asyncio.AbstractEventLoop] = []
    app, counted = served.app, threading.Event()
    tasks: list[int] = []

    def count() -> None:
        tasks.append(len(asyncio.all_tasks()))
        counted.set()

    def all_tasks() -> int:
        counted.clear()
        loop_of[0].call_soon_threadsafe(count)
        assert counted.wait(20)
        return tasks[-1]

    front = app._front.answer

    async def remember(exchange: Any) -> None:
        loop_of[:] = [asyncio.get_running_loop()]
        await front(exchange)

    app._front.answer = remember  # type: ignore[method-assign]
    try:
        httpx.get(served.url + "/health")
        served.engine.hold = True
        idle = all_tasks()
        connections = [ask(served) for _ in range(20)]
        served.wait(lambda: len(served.engine.running) == 20)
        assert all_tasks() - idle == 20
    finally:
        app._front.answer = front  # type: ignore[method-assign]
        served.engine.hold = False
        for connection in connections:
            connection.close()


# ---- silence


class Sent:
    """An exchange that keeps what is sent; `stuck` holds the next write like a full buffer."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()
        self.fail_stream: Any = None

    async def start(self, status: int, headers: Any) -> None:
        self.data.append(b"%d" % status)

    async def send(self, message: Any) -> None:
        await self.go.wait()
        self.data.append(message["body"])


def test_comments_go_on_through_every_silence_and_stop_with_the_stream() -> None:
    async def body() -> None:
        sent = Sent()
        async with sse.EventStream(sent, keepalive_s=0.02) as out:  # type: ignore[arg-type]
            while sent.data.count(sse.KEEP_ALIVE) < 3:
                await asyncio.sleep(0.01)
            await out.write(b"data: 1\n\n")
            before = sent.data.count(sse.KEEP_ALIVE)
            while sent.data.count(sse.KEEP_ALIVE) < before + 2:
                await asyncio.sleep(0.01)
            await out.close(sse.DONE)
            ended = list(sent.data)
            await asyncio.sleep(0.1)
            assert sent.data == ended
        assert ended[0] == b"200"
        assert ended[-1] == sse.DONE
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


def test_comments_of_a_reader_that_is_stuck_do_not_pile_up() -> None:
    async def body() -> None:
        sent = Sent()
        async with sse.EventStream(sent, keepalive_s=0.01) as out:  # type: ignore[arg-type]
            await out.write(b"data: 1\n\n")
            sent.go.clear()
            await asyncio.sleep(0.2)
            sent.go.set()
            await asyncio.sleep(0)
            await out.close(sse.DONE)
        assert sent.data.count(sse.KEEP_ALIVE) <= 1
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


def test_no_keep_alive_when_it_is_off() -> None:
    async def body() -> None:
        sent = Sent()
        async with sse.EventStream(sent, keepalive_s=0):  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
        assert sent.data == []

    asyncio.run(body())


def test_the_application_alone_notices_a_client_that_leaves() -> None:
    """Under a server without our protocol, `receive` is what tells."""
    engine = ScriptEngine()
    engine.hold = True
    app = App(engine, ServerOptions())

    async def body() -> None:
        sent = json.dumps({"messages": HI, "stream": True}).encode()
        left = asyncio.Event()
        received = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("nothing was to be sent")

        headers = [(b"content-length", str(len(sent)).encode())]
        task = asyncio.create_task(app({"type": "http", "method": "POST", "path": CHAT, "headers": headers}, receive, send))
        while not engine.running:
            await asyncio.sleep(0.002)
        left.set()
        await task
        assert not engine.running
        assert len(engine.aborted) == 1

    asyncio.run(body())
    app.close()


def test_a_steady_process_leaves_what_is_there_to_itself() -> None:
    code = (
        "import gc, sys; from forebay.server.wire import steady_process; steady_process(); "
        "print(gc.get_freeze_count() > 10_000, gc.isenabled(), gc.get_threshold()[0], sys.getswitchinterval())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "50000", "0.001"]
