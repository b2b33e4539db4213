"""Connections and routes: hang-ups, queues, limits of heads and bodies, health, the table of routes, logs and counters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.model.chat import EncodedPrompt
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine, Served, serve

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
KIB = 1024
LIMIT = 256 * KIB


@pytest.fixture(scope="module")
def options() -> ServerOptions:
    return ServerOptions(max_body=LIMIT, large=LIMIT // 4)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server that gives heads and bodies little time."""
    with serve(ScriptEngine(), ServerOptions(head_timeout_s=0.3, body_timeout_s=0.3)) as served:
        yield served


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20, verify=False) as client:
        yield client


def connect(served: Served) -> socket.socket:
    return socket.create_connection((served.host, served.port), timeout=20)


def request_bytes(body: dict[str, Any], *, headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n".encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def count(served: Served, route: str, status: int) -> float:
    for line in served.engine.metrics.render().decode().splitlines():
        if line.startswith(f'forebay_http_requests_total{{route="{route}",status="{status}"}}'):
            return float(line.split()[-1])
    raise AssertionError("no such series")


# ---- hang-ups


@pytest.mark.case("B046")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "half-close", "reset", "kill"])
def test_a_client_that_left_is_aborted_at_once(served: Served, stream: bool, how: str) -> None:
    """After five tokens the engine waits, so nothing but the closed connection can end the request."""
    engine = served.engine

    def answer(request: Any) -> Script:
        return Script(engine.ids("word " * 500), delay_s=0.001)

    engine.answer = answer
    gone = count(served, CHAT, 499)
    request = request_bytes({"messages": HI, "stream": stream, "max_tokens": 10_000})
    if how == "kill":
        code = f"import socket, sys, time; s = socket.create_connection({(served.host, served.port)}); "
        code += "s.sendall(sys.stdin.buffer.read()); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-SE", "-c", code], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(request)
        process.stdin.close()
    else:
        connection = connect(served)
        connection.sendall(request)
    served.wait(lambda: sum(engine.events.get(r.request_id, 0) for r in engine.requests) >= 5)
    engine.hold = True
    if how == "kill":
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    elif how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    served.wait(lambda: not engine.running)
    assert engine.aborted == [engine.requests[0].request_id]
    served.wait(lambda: count(served, CHAT, 499) == gone + 1)
    if how == "half-close":
        connection.close()


@pytest.mark.case("B046")
def test_a_client_that_left_while_queued_is_dropped(served: Served) -> None:
    engine = served.engine
    engine.max_running, engine.hold = 1, True
    first, second = connect(served), connect(served)
    first.sendall(request_bytes({"messages": HI, "stream": True}))
    served.wait(lambda: len(engine.running) == 1)
    second.sendall(request_bytes({"messages": HI, "n": 3}))
    served.wait(lambda: len(engine.waiting) == 3)
    second.close()
    served.wait(lambda: not engine.waiting)
    assert len(engine.running) == 1
    engine.hold = False
    assert first.recv(65536).startswith(b"HTTP/1.1 200")
    first.close()


@pytest.mark.case("B046")
def test_a_client_that_left_while_its_prompt_is_encoded_never_reaches_the_engine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = served.engine.codec.encode

    def slow(*args: Any, **kwargs: Any) -> EncodedPrompt:
        begun.set()
        assert go_on.wait(20)
        return encode(*args, **kwargs)

    monkeypatch.setattr(served.engine.codec, "encode", slow)
    gone = count(served, CHAT, 499)
    connection = connect(served)
    connection.sendall(request_bytes({"messages": HI}))
    assert begun.wait(20)
    connection.close()
    served.wait(lambda: count(served, CHAT, 499) == gone + 1)
    go_on.set()
    assert not served.engine.requests


def test_a_client_that_left_in_its_body(served: Served) -> None:
    gone = count(served, CHAT, 499)
    connection = connect(served)
    connection.sendall(request_bytes({"messages": HI})[:-5])
    connection.close()
    served.wait(lambda: count(served, CHAT, 499) == gone + 1)


# ---- queue


@pytest.mark.case("B050")
def test_a_full_queue_refuses_at_once(served: Served) -> None:
    engine = served.engine
    engine.max_running, engine.max_queued, engine.hold = 1, 16, True

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=200), verify=False) as client:
            bodies = [{"messages": HI, "stream": i % 2 == 0} for i in range(100)]
            requests = [asyncio.create_task(client.post(served.url + CHAT, json=body)) for body in bodies]
            while sum(task.done() for task in requests) < 83:
                await asyncio.sleep(0.005)
            assert len(engine.waiting) == 16
            engine.hold = False
            return await asyncio.gather(*requests)

    responses = asyncio.run(run())
    taken = [r for r in responses if r.status_code == 200]
    refused = [r for r in responses if r.status_code == 503]
    assert (len(taken), len(refused)) == (17, 83)
    for response in refused:
        assert 1 <= int(response.headers["retry-after"]) <= 30
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("server_error", "overloaded", None)


# ---- heads and bodies


def padded(size: int) -> bytes:
    """A good body of exactly `size` bytes."""
    body = json.dumps({"messages": HI, "metadata": "@"}).encode()
    return body.replace(b"@", b"x" * (size - len(body) + 1))


@pytest.mark.case("B116")
@pytest.mark.parametrize(
    ("size", "status"),
    [(KIB, 200), (50 * KIB, 200), (70 * KIB, 200), (LIMIT, 200), (LIMIT + 1, 413), (3 * LIMIT, 413), (30 * LIMIT, 413)],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_up_to_the_limit(served: Served, http: httpx.Client, size: int, status: int, chunked: bool) -> None:
    body = padded(size)
    pieces = (body[i : i + 30_000] for i in range(0, size, 30_000))
    response = http.post(served.url + CHAT, content=pieces if chunked else body)
    assert response.status_code == status
    if status == 413:
        assert response.json()["error"]["code"] == "request_too_large"
        assert "262144 bytes" in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"
    assert http.post(served.url + CHAT, json={"messages": HI}).status_code == 200


@pytest.mark.case("B116")
def test_big_bodies_are_fine_by_default() -> None:
    with serve(ScriptEngine()) as served:
        assert httpx.post(served.url + CHAT, content=padded(10 << 20), timeout=30).status_code == 200


@pytest.mark.case("B116")
def test_a_declared_size_is_refused_before_the_body(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {LIMIT * 1000}\r\nexpect: 100-continue\r\n\r\n".encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer


@pytest.mark.case("B116")
def test_a_wrong_length_harms_nobody(served: Served, http: httpx.Client) -> None:
    body = json.dumps({"messages": HI}).encode()
    for length in ("7", "-1", "x", "1e3"):
        with connect(served) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode() + body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    assert http.post(served.url + CHAT, json={"messages": HI}).status_code == 200


@pytest.mark.case("B116")
def test_a_body_shorter_than_declared_is_given_up(hasty: Served) -> None:
    body = json.dumps({"messages": HI}).encode()
    with connect(hasty) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) + 9}\r\n\r\n".encode() + body)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


@pytest.mark.case("B116")
def test_a_body_that_trickles_is_given_up(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode())
        answer = b""
        connection.settimeout(0.05)
        while not answer:  # a byte now and then keeps no pause longer than the limit
            connection.sendall(b" ")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.case("B116")
def test_a_body_that_trickles_after_a_fast_beginning_is_given_up(hasty: Served) -> None:
    """It holds its memory meanwhile; what came fast is no reason to wait for the rest."""
    began = time.monotonic()
    with connect(hasty) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000\r\n\r\n".encode() + b" " * 1_500_000)
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 5  # at 64 KiB a second the beginning alone would have earned 23 s


@pytest.mark.case("B116")
@pytest.mark.parametrize(
    "head",
    [b"x-a: 1\r\n" * 100_000, b"x-a: " + b"y" * 10_000_000 + b"\r\n", b"x" * 100_000 + b": 1\r\n", b"x-a: " + b"y" * 10_000_000],
    ids=["many", "long value", "long name", "endless"],
)
def test_a_head_beyond_its_limit(served: Served, http: httpx.Client, head: bytes) -> None:
    with connect(served) as connection:
        with contextlib.suppress(OSError):  # the server may have stopped listening to it
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode() + head)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"request_head_too_large"' in answer
    assert http.get(served.url + "/health").status_code == 200


@pytest.mark.case("B116")
def test_a_head_that_trickles_is_given_up(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.settimeout(0.05)
        answer, head = b"", iter(f"POST {CHAT} HTTP/1.1\r\nx-slow: " + "y" * 10_000)
        while not answer:
            connection.sendall(next(head).encode())
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_keeps_working(hasty: Served) -> None:
    """The deadline is for a head that has begun, not for a connection between requests."""
    with connect(hasty) as connection:
        for _ in range(2):
            threading.Event().wait(0.5)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http_gets_the_envelope(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(b"\x16\x03\x01hello\r\n\r\n")
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


# ---- the event loop stays free


@pytest.mark.case("B119")
def test_health_and_small_requests_answer_while_a_large_prompt_is_encoded(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, begun, go_on = served.engine.codec.encode, threading.Event(), threading.Event()
    statuses: list[int] = []

    def slow(body: Any, **kwargs: Any) -> EncodedPrompt:
        if len(body["messages"][0]["content"]) > served.options.large:
            begun.set()
            assert go_on.wait(20)
            body = {"messages": HI}
        return encode(body, **kwargs)

    def send_large() -> None:
        content = "word " * (served.options.large // 4)
        response = httpx.post(served.url + CHAT, json={"messages": [{"role": "user", "content": content}]}, timeout=30)
        statuses.append(response.status_code)

    monkeypatch.setattr(served.engine.codec, "encode", slow)
    threads = [threading.Thread(target=send_large) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    for path in ("/health", "/health/live", "/metrics"):
        assert http.get(served.url + path).status_code == 200
    for stream in (True, False):
        assert http.post(served.url + CHAT, json={"messages": HI, "stream": stream}).status_code == 200
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert statuses == [200] * 4


@pytest.mark.case("B119")
def test_health_answers_while_a_real_prompt_is_tokenised() -> None:
    """Real encoding of some megabytes: were the loop blocked, no probe could finish before it."""
    with serve(ScriptEngine(max_context=1000)) as served, httpx.Client(verify=False) as probe:
        body = json.dumps({"messages": [{"role": "user", "content": "Some ordinary words, 12345 of them.\n" * 20_000}]}).encode()
        finished: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: finished.append(httpx.post(served.url + CHAT, content=body, timeout=60)))
        thread.start()
        probes = 0
        while not finished:
            assert probe.get(served.url + "/health").status_code == 200
            probes += not finished
        thread.join()
        assert finished[0].json()["error"]["code"] == "context_length_exceeded"
        assert probes > 5


# ---- health


@pytest.mark.parametrize(
    ("state", "age", "live", "ready", "retry"),
    [("ready", 0.0, 200, 200, None), ("loading", 999.0, 200, 503, "5"), ("draining", 0.0, 200, 503, "1"), ("dead", 0.0, 503, 503, "2"),
     ("ready", 61.0, 503, 503, "2")],
)  # fmt: skip
def test_health(served: Served, http: httpx.Client, state: Any, age: float, live: int, ready: int, retry: str | None) -> None:
    served.engine.state, served.engine.age, served.engine.reason = state, age, "weights 31 %" if state == "loading" else ""
    for method in ("GET", "HEAD"):
        for path in ("/health/live", "/livez"):
            assert http.request(method, served.url + path).status_code == live
        for path in ("/health/ready", "/health", "/healthz", "/readyz", "/ready", "/ping", "/v1/health", "/health/"):
            response = http.request(method, served.url + path)
            assert response.status_code == ready
            assert response.headers.get("retry-after") == retry
            assert bool(response.content) == (method == "GET")
    body = http.get(served.url + "/health/ready").json()
    if ready == 200:
        assert body == {"status": "ok"}
    else:
        assert body["status"] == ("dead" if age == 61 else state)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert ("31 %" in body["error"]["message"]) == (state == "loading")
    assert http.get(served.url + "/v1/models").status_code == 200


@pytest.mark.parametrize(("state", "code"), [("loading", "model_loading"), ("draining", "draining"), ("dead", "engine_unavailable")])
@pytest.mark.parametrize("stream", [True, False])
def test_requests_are_refused_while_not_ready(served: Served, http: httpx.Client, state: Any, code: str, stream: bool) -> None:
    served.engine.state = state
    response = http.post(served.url + CHAT, json={"messages": HI, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (503, code)
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers.get("connection") == ("close" if state == "draining" else None)
    assert not served.engine.requests


# ---- routes


OPEN = {"/health/live", "/health/ready", "/", "/version", "/openapi.json", "/metrics"}


@pytest.mark.case("B112")
def test_only_the_declared_routes_answer(served: Served, http: httpx.Client) -> None:
    assert {route.name for route in served.app.routes if route.open} == OPEN
    assert {CHAT, "/v1/models"} <= {route.name for route in served.app.routes if not route.open}
    for route in served.app.routes:
        for path in route.paths:
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
                for variant in (path, path.rstrip("/") + "/"):
                    if (route.name, method) == ("/v1/responses", "GET"):
                        continue  # it is there to refuse a WebSocket
                    status = http.request(method, served.url + variant).status_code
                    assert (status != 405) == (method in route.methods), (method, variant, status)
                    assert status != 404
    paths = {path for route in served.app.routes for path in route.paths}
    unknown = {p.upper() for p in paths} | {f"/{p}" for p in paths} | {p.replace("/", "//") for p in paths} | {f"{p}//" for p in paths}
    unknown |= {f"/x{p}" for p in paths} | {f"{p}.json" for p in paths} | {f"/v1/../{p}x" for p in paths}
    unknown |= {"/v1", "/v1/embeddings", "/docs", "/v1/chat", "/%2e%2e/etc/passwd", "/" + "x" * 3000}
    below = tuple(f"{path}/" for route in served.app.routes if route.below for path in route.paths)
    for path in unknown - paths - {"//"}:
        if path.endswith("//") and path[:-1].startswith(below):
            continue  # the list of models, asked for with one slash too many
        with connect(served) as connection:  # raw, since client libraries tidy paths up
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 404 "), (path, answer[:100])
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error.get("code") in ("unknown_url", "model_not_found") or error["type"] == "not_found_error", (path, error)


@pytest.mark.case("B077")
def test_wrong_paths_and_methods(served: Served, http: httpx.Client) -> None:
    response = http.get(served.url + CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"
    response = http.post(served.url + "/v1/embeddings", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
    assert http.post(served.url + "/health").headers["allow"] == "GET, HEAD"
    for alias in ("/chat/completions", "/beta/chat/completions", "/beta/v1/chat/completions", CHAT + "/", CHAT + "?beta=true"):
        assert http.post(served.url + alias, json={"messages": HI}).status_code == 200


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/messages", "give it the base URL without /v1"),
        ("/v1/chat/completion", "The nearest route is /v1/chat/completions"),
        ("/xyzzy", "GET /openapi.json lists the routes"),
    ],
)
def test_an_unknown_path_is_told_the_way_out(served: Served, path: str, hint: str) -> None:
    error = httpx.post(served.url + path, json={}).json()
    assert hint in error["error"]["message"]
    assert (error.get("type") == "error") == ("messages" in path)  # in the words of the protocol


def test_model_ids_may_contain_slashes() -> None:
    with serve(ScriptEngine(), ServerOptions(model_name="deepseek-ai/DeepSeek-V4.1-Flash")) as served:
        for path in ("/v1/models/deepseek-ai/DeepSeek-V4.1-Flash", "/models/deepseek-ai%2FDeepSeek-V4.1-Flash/"):
            assert httpx.get(served.url + path).json()["id"] == "deepseek-ai/DeepSeek-V4.1-Flash"


# ---- ids, logs, counters, origins


def test_request_ids(served: Served, http: httpx.Client) -> None:
    response = http.post(served.url + CHAT, json={"messages": HI}, headers={"x-request-id": "trace-1:a_b.c"})
    assert response.headers["x-request-id"] == "trace-1:a_b.c"
    assert response.json()["id"] == "chatcmpl-trace-1:a_b.c"
    for bad in ("x" * 129, "a b", "ü", ""):
        response = http.post(served.url + CHAT, json={"messages": HI}, headers={"x-request-id": bad.encode()})
        assert response.headers["x-request-id"] != bad
        assert len(response.headers["x-request-id"]) == 32
    assert http.post(served.url + CHAT, json={"messages": HI, "rid": "mine"}).json()["id"] == "chatcmpl-mine"
    served.engine.hold = True  # the same id twice at once
    with connect(served) as one, connect(served) as two:
        for connection in (one, two):
            connection.sendall(request_bytes({"messages": HI}, headers="x-request-id: same\r\n"))
        served.wait(lambda: len(served.engine.running) == 2)
        served.engine.hold = False
        assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert two.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_log_has_numbers_and_no_content(served: Served, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forebay.access")
    served.engine.say("Secret thought.</think>Secret answer.")
    body = {"messages": [{"role": "user", "content": "Secret question"}], "stream": True}
    http.post(served.url + CHAT, json=body, headers={"x-request-id": "logged"})
    http.get(served.url + "/health")
    http.get(served.url + "/nowhere/secret")

    def logged() -> list[dict[str, Any]]:
        lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "forebay.access"]
        return [line for line in lines if line["request_id"] != "same"]  # of the test before

    served.wait(lambda: len(logged()) >= 2)
    lines = logged()
    assert [(line["route"], line["status"]) for line in lines] == [(CHAT, 200), ("other", 404)]
    assert lines[0]["request_id"] == "logged"
    assert lines[0]["completion_tokens"] == len(served.engine.ids("Secret thought.</think>Secret answer.")) + 1
    assert (lines[0]["effort"], lines[0]["finish"], lines[0]["stream"]) == (75, "stop", True)
    assert "ecret" not in json.dumps(lines)


def test_faults_are_logged_with_the_request_id(served: Served, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    served.engine.answer = Script([5], fail_at=0)
    response = http.post(served.url + CHAT, json={"messages": HI}, headers={"x-request-id": "broken-1"})
    assert response.status_code == 500
    record = next(r for r in caplog.records if r.name == "forebay.server")
    assert "broken-1" in record.getMessage()
    assert record.exc_info is not None
    assert "device on fire" in str(record.exc_info[1])


def test_http_counters_have_bounded_labels(served: Served, http: httpx.Client) -> None:
    before = {key: count(served, *key) for key in [("other", 404), (CHAT, 400), ("/v1/models", 200), ("/v1/models/{id}", 404)]}
    for i in range(3):
        http.get(f"{served.url}/made/up/{i}")
    http.post(served.url + CHAT, json={})
    http.get(served.url + "/models")
    http.get(served.url + "/v1/models/made-up")
    grown = {key: count(served, *key) - value for key, value in before.items()}
    assert grown == {("other", 404): 3, (CHAT, 400): 1, ("/v1/models", 200): 1, ("/v1/models/{id}", 404): 1}
    page = http.get(served.url + "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "made" not in page.text.replace("forebay_unknown_fields", "")


def test_refusals_are_counted_by_reason(served: Served, http: httpx.Client) -> None:
    def rejected(reason: str) -> float:
        lines = served.engine.metrics.render().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f'forebay_rejected_total{{reason="{reason}"}}'))

    before = {reason: rejected(reason) for reason in ("invalid", "context_length", "too_large", "draining")}
    http.post(served.url + CHAT, json={})
    http.post(served.url + CHAT, content=padded(LIMIT + 1))
    served.engine.max_context = 3
    http.post(served.url + CHAT, json={"messages": HI})
    served.engine.state = "draining"
    http.post(served.url + CHAT, json={"messages": HI})
    assert {reason: rejected(reason) - value for reason, value in before.items()} == dict.fromkeys(before, 1)


def test_other_origins_are_off_by_default(served: Served, http: httpx.Client) -> None:
    response = http.get(served.url + "/v1/models", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers
    assert http.options(served.url + CHAT, headers={"origin": "https://a.example"}).status_code == 405


@pytest.mark.parametrize(
    ("allowed", "told"), [(("https://a.example",), "https://a.example"), (("*",), "*"), (("https://b.example",), None)]
)
def test_other_origins_when_allowed(allowed: tuple[str, ...], told: str | None) -> None:
    with serve(ScriptEngine(), ServerOptions(cors_origins=allowed)) as served:
        headers = {"origin": "https://a.example", "access-control-request-headers": "authorization"}
        response = httpx.options(served.url + CHAT, headers=headers)
        assert response.status_code == 204
        assert response.headers.get("access-control-allow-origin") == told
        assert response.headers["access-control-allow-headers"] == "authorization"
        response = httpx.post(served.url + CHAT, json={}, headers=headers)
        assert (response.status_code, response.headers.get("access-control-allow-origin")) == (400, told)


def test_home_and_version(served: Served, http: httpx.Client) -> None:
    for method in ("GET", "HEAD"):
        for path in ("/", "/api/hello"):
            assert http.request(method, served.url + path).status_code == 200
    version = http.get(served.url + "/version").json()
    assert version["model"] == "script"
    assert version["version"]


@pytest.mark.case("B123")
def test_connection_beyond_the_limit_is_answered_503() -> None:
    with serve(ScriptEngine(), ServerOptions(max_connections=2)) as served, contextlib.ExitStack() as held:
        host, port = served.url.removeprefix("http://").split(":")
        for _ in range(2):
            held.enter_context(socket.create_connection((host, int(port))))
        time.sleep(0.1)
        with socket.create_connection((host, int(port))) as extra:
            extra.settimeout(10)
            extra.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b"".join(iter(lambda: extra.recv(65536), b""))
        held.close()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        served.wait(lambda: httpx.get(served.url + "/health/live").status_code == 200)
