"""What a body costs before anything of it runs: codings, values inside strings, memory of all bodies at once, threads that hang."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from forebay.model import json_limits
from forebay.server import body as body_module
from forebay.server import constraints, turns
from forebay.server.body import check_encoding, decode
from forebay.server.errors import HttpError
from forebay.server.limits import Bodies, Lanes, ServerOptions
from script_engine import ScriptEngine, Served, serve

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
MIB = 1 << 20


def post(served: Served, content: bytes, **headers: str) -> httpx.Response:
    return httpx.post(served.url + CHAT, content=content, headers={"content-type": "application/json", **headers}, timeout=60)


def chat(served: Served, **fields: Any) -> httpx.Response:
    return post(served, json.dumps({"messages": HI, "max_tokens": 1, **fields}).encode())


# ---- codings


def test_two_codings_are_undone_and_three_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps({"messages": HI}).encode()
    for codings in range(5):
        encoding = ", ".join(["deflate"] * codings)
        response = post(served, data, **({"content-encoding": encoding} if codings else {}))
        assert response.status_code == (200 if codings <= 2 else 415)
        data = zlib.compress(data)
    check_encoding("gzip, identity, , zstd,identity")
    monkeypatch.setattr(body_module, "_inflate", None)  # it must not come to that
    response = post(served, data, **{"content-encoding": ",".join(["deflate"] * 3001)})
    assert response.status_code == 415 and "3001" in response.json()["error"]["message"]


@pytest.mark.parametrize(("size", "lane"), [(10_000, "small"), (900_000, "small"), (1_200_000, "large"), (20_000_000, "large")])
@pytest.mark.parametrize("codings", [1, 2])
def test_a_body_that_is_large_inside_has_the_lane_of_large_ones(
    served: Served, size: int, lane: str, codings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is for those that wait for no megabytes; there no more is unpacked than it has."""
    where: list[tuple[str, int]] = []

    def spy(data: bytes, encoding: str, limit: int) -> bytes:
        plain = decode(data, encoding, limit)
        where.append((threading.current_thread().name, len(plain)))
        return plain

    monkeypatch.setattr(turns, "decode", spy)
    data = json.dumps({"messages": HI, "metadata": {"x": "y" * size}}).encode()
    for _ in range(codings):
        data = zlib.compress(data)
    response = post(served, data, **{"content-encoding": ",".join(["deflate"] * codings)})
    assert response.status_code in (200, 400)
    ((thread, plain),) = where
    assert ("large" in thread) == (lane == "large") and plain > size


# ---- JSON inside of strings


def test_values_inside_of_arguments_are_counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the body they are one value, a string."""
    inner = '{"n":1234567890123456789012,"a":[' + ",".join(["[]"] * 1000) + "]}"
    texts = {"plain": inner, "no integer": inner.replace("1234567890123456789012", "1"), "twice": json.dumps(inner), "open": inner[:-2]}

    def ask(arguments: str) -> httpx.Response:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "tool", "tool_call_id": "1", "content": "x"}
        return chat(served, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, answer])

    assert {ask(text).status_code for text in texts.values()} == {200}
    monkeypatch.setattr(json_limits, "MAX_VALUES", 900)
    for text in texts.values():
        error = ask(text).json()["error"]
        assert error["param"] == "messages[1].tool_calls[0].function.arguments" and "too many values" in error["message"]
    assert ask(json.dumps({"code": "[],{}," * 500})).status_code == 200  # text, not values


def test_long_schemas_in_strings_are_refused_unparsed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = "[" + ",".join(["[]"] * 600_000) + "]"
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(constraints, "json", SimpleNamespace(loads=lambda text: parsed.append(len(text)) or loads(text)))
    for fields in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}, {"json_schema": schema}):
        error = chat(served, **fields).json()["error"]
        assert "characters long" in error["message"] and next(iter(fields)) in error["param"]
    assert not parsed
    assert chat(served, guided_json='{"type": "integer"}' + " " * 1000).status_code == 200
    assert parsed


def test_schemas_in_strings_are_parsed_off_the_loop_if_they_are_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    read = constraints.read
    monkeypatch.setattr(constraints, "read", lambda body: threads.append(threading.current_thread().name) or read(body))
    schema = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4000)}})
    chat(served, guided_json=schema)
    assert len(threads) == 1 and threads[0].startswith("forebay-encode")


# ---- memory of all bodies


def test_the_budget_is_kept_and_leaves_room_for_small_bodies() -> None:
    bodies = Bodies(800)
    assert bodies.change(0, 600, 10)
    assert not bodies.change(0, 101, 10) and bodies.used == 600
    assert bodies.change(0, 100, 10)
    assert not bodies.change(0, 11, 10)
    assert bodies.change(0, 10, 10) and bodies.used == 710
    assert not bodies.change(600, 601, 10)
    assert bodies.change(600, 0, 10) and bodies.used == 110
    alone = Bodies(800)
    assert alone.change(0, 800, 10) and alone.used == 800
    assert not alone.change(800, 801, 10)


def test_more_bodies_than_fit_are_refused_until_there_is_room() -> None:
    options = ServerOptions(max_body=8 * MIB, max_bodies=16 * MIB)
    with serve(ScriptEngine(), options) as served:
        bodies = served.app._turns.bodies
        half: list[socket.socket] = []
        for _ in range(2):
            connection = socket.create_connection((served.host, served.port), timeout=20)
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {7 * MIB}\r\n\r\n".encode() + b" " * (6 * MIB))
            half.append(connection)
        served.wait(lambda: bodies.used == 12 * MIB)
        large = json.dumps({"messages": HI, "metadata": {"x": "y" * (7 * MIB // 2)}}).encode()
        response = post(served, large)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert chat(served).status_code == 200  # a small one has its place
        for connection in half:
            connection.close()
        served.wait(lambda: bodies.used == 0)
        assert post(served, large).status_code != 503
        served.wait(lambda: bodies.used == 0)
        page = httpx.get(f"{served.url}/metrics").text
        assert 'forebay_rejected_total{reason="queue_full"} 1' in page.replace(".0\n", "\n")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_body_counts_until_its_prompt_is_made(served: Served, path: str, packed: bool) -> None:
    """Not for as long as the answer takes."""
    bodies = served.app._turns.bodies
    served.engine.hold = True
    fields = {CHAT: {"messages": HI}, "/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
    data = json.dumps({**fields.get(path, {"messages": HI, "max_tokens": 5}), "zzz": "y" * 2 * MIB}).encode()
    headers = {"content-encoding": "deflate"} if packed else {}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, served.url + path, content=zlib.compress(data) if packed else data, headers=headers, timeout=60)
        served.wait(lambda: bool(served.engine.running))
        assert bodies.used == 0
        served.engine.hold = False
        assert asked.result().status_code == 200
    assert bodies.used == 0


def test_a_packed_body_counts_as_what_it_may_be_until_that_is_known(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, seen = served.app._turns.bodies, list[int]()

    def spy(data: bytes, encoding: str, limit: int) -> bytes:
        seen.append(bodies.used)
        return decode(data, encoding, limit)

    monkeypatch.setattr(turns, "decode", spy)
    data = zlib.compress(json.dumps({"messages": HI, "zzz": "y" * 3 * MIB}).encode())
    assert post(served, data, **{"content-encoding": "deflate"}).status_code == 200
    assert seen == [len(data), served.options.max_body]


# ---- threads


def test_cancelled_work_is_let_go_of_at_once() -> None:
    """With the megabytes that it is about, although the thread that would do it is busy."""

    class Megabytes:
        pass

    async def run() -> None:
        lanes, go_on = Lanes(10), threading.Event()
        busy = asyncio.ensure_future(lanes.run(11, lambda: go_on.wait(20)))
        data = Megabytes()
        known = weakref.ref(data)
        waiting = asyncio.ensure_future(lanes.run(11, lambda data=data: data))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.01)
        del data, waiting
        gc.collect()
        assert known() is None
        go_on.set()
        assert await busy
        assert await lanes.run(11, lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await lanes.run(1, lambda: 1 // 0)
        lanes.close()
        with pytest.raises(RuntimeError):
            await lanes.run(1, lambda: 1)

    asyncio.run(run())


def test_small_lane_has_two_threads_and_the_large_one_a_single() -> None:
    async def most_at_once(size: int) -> int:
        lanes, most, now, lock = Lanes(10), 0, 0, threading.Lock()
        pause = threading.Event()

        def work() -> None:
            nonlocal most, now
            with lock:
                now += 1
                most = max(most, now)
            pause.wait(0.02)
            with lock:
                now -= 1

        await asyncio.gather(*(lanes.run(size, work) for _ in range(8)))
        lanes.close()
        return most

    assert asyncio.run(most_at_once(1)) == 2
    assert asyncio.run(most_at_once(11)) == 1


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    code = """
import asyncio, threading
from forebay.server.limits import Lanes
async def main():
    lanes = Lanes(10)
    work = asyncio.ensure_future(lanes.run(1, threading.Event().wait))
    await asyncio.sleep(0.2)
    work.cancel()
    lanes.close()
asyncio.run(main())
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "ended\n"


def test_over_many_codings_is_an_error_of_the_header() -> None:
    with pytest.raises(HttpError) as error:
        check_encoding("gzip,gzip,gzip")
    assert error.value.status == 415
