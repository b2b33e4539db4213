"""The connection under a request: what arrives ahead of the answer, clients that end their side, other protocols, broken bytes."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from typing import Any

import pytest

from forebay.server import wire
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine, Served, serve

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"


def connect(served: Served) -> socket.socket:
    return socket.create_connection((served.host, served.port), timeout=20)


def head_and_body(headers: str = "", version: str = "1.1", **fields: Any) -> tuple[bytes, bytes]:
    data = json.dumps({"messages": HI, **fields}).encode()
    return f"POST {CHAT} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n".encode(), data


def request(headers: str = "", version: str = "1.1", **fields: Any) -> bytes:
    return b"".join(head_and_body(headers, version, **fields))


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def statuses(received: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


def sends_until_closed(connection: socket.socket, data: bytes) -> float:
    """Seconds for which the server lets `data` be sent again and again; at most 10."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 10:
            connection.sendall(data)
            time.sleep(0.05)
    return time.monotonic() - began


def hold(served: Served, text: str = "word " * 50) -> None:
    served.engine.answer = Script(served.engine.ids(text))
    served.engine.hold = True


def running(served: Served) -> bool:
    return len(served.engine.running) == 1


# ---- requests sent ahead


@pytest.mark.parametrize("pace", ["one packet", "one by one", "bytes"])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_sent_ahead_are_answered_in_order(served: Served, pace: str, stream: bool) -> None:
    three = [request(stream=stream), HEALTH, request("connection: close\r\n", stream=False)]
    data = b"".join(three)
    with connect(served) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in {"one packet": [data], "one by one": three, "bytes": [data[i : i + 7] for i in range(0, len(data), 7)]}[pace]:
            connection.sendall(piece)
            time.sleep(0.001)
        received = read_all(connection)
    assert statuses(received) == [200, 200, 200]
    assert received.find(b"[DONE]" if stream else b"Hello") < received.find(b'"status":"ok"') < received.rfind(b"Hello")


def test_half_a_head_behind_a_large_body_is_no_large_head(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(request(metadata={"x": "y" * 150_000}) + HEALTH[:20])
        time.sleep(0.1)
        connection.sendall(HEALTH[20:-2] + b"connection: close\r\n\r\n")
        received = read_all(connection)
    assert statuses(received)[1:] == [200] and received.count(b'"status":"ok"') == 1


@pytest.mark.case("B046")
@pytest.mark.parametrize("ahead", [HEALTH, HEALTH[:20], request(metadata={"x": "y" * 300_000})[:200_000]], ids=["whole", "half", "large"])
@pytest.mark.parametrize("together", [True, False])
def test_a_client_that_sent_ahead_and_left_is_noticed(served: Served, ahead: bytes, together: bool) -> None:
    hold(served)
    connection = connect(served)
    if together:
        connection.sendall(request() + ahead)
        served.wait(lambda: running(served))
    else:
        connection.sendall(request())
        served.wait(lambda: running(served))
        connection.sendall(ahead)
    connection.close()
    served.wait(lambda: not served.engine.running)
    assert served.engine.aborted == [served.engine.requests[0].request_id]


def test_what_is_kept_of_requests_sent_ahead_is_bounded(served: Served) -> None:
    """More than that is read and dropped; the client sends again what was not answered."""
    hold(served)
    with connect(served) as connection:
        connection.sendall(request())
        served.wait(lambda: running(served))
        connections = served.server.server_state.connections
        for _ in range(50):
            connection.sendall(HEALTH * 1000)
            assert all(len(protocol._later) <= wire._PIPELINED + 256 * 1024 for protocol in connections)  # type: ignore[union-attr]
        served.engine.hold = False
        received = read_all(connection)
    assert statuses(received) == [200] and received.count(b"word") > 40


def test_very_many_requests_in_one_packet_end_the_connection(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(request() + HEALTH * 2000)
        received = read_all(connection)
    assert set(statuses(received)[:1]) == {200} and len(statuses(received)) < 200
    assert 400 not in statuses(received)[:1]


# ---- a client that ended its side


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_ended_its_side_after_its_request_is_answered(served: Served, stream: bool, queued: bool) -> None:
    """Spec §1.6: that is no disconnect."""
    hold(served)
    with connect(served) as connection:
        connection.sendall(request(stream=stream))
        if queued:
            served.wait(lambda: running(served))
        connection.shutdown(socket.SHUT_WR)
        served.wait(lambda: running(served))
        time.sleep(0.3)
        assert running(served)
        served.engine.hold = False
        received = read_all(connection)
    assert statuses(received)[-1] == 200 and set(statuses(received)[:-1]) <= {102}
    assert received.count(b"word") > 40 and received.rstrip().endswith(b"0" if stream else b"}")


def test_an_answer_that_comes_soon_has_nothing_in_front(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(request() + HEALTH)
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    assert statuses(received) == [200, 200]


@pytest.mark.case("B046")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["ended", "at once"])
def test_a_client_that_ended_its_side_and_then_left_is_noticed(served: Served, stream: bool, first: str) -> None:
    """To the server that looks the same until something is sent to it."""
    hold(served)
    connection = connect(served)
    connection.sendall(request(stream=stream))
    if first == "ended":
        connection.shutdown(socket.SHUT_WR)
        served.wait(lambda: running(served))
    connection.close()
    served.wait(lambda: bool(served.engine.requests) and not served.engine.running)
    assert served.engine.aborted == [served.engine.requests[0].request_id]


def test_a_client_of_http_1_0_that_ends_its_side_has_left(served: Served) -> None:
    hold(served)
    with connect(served) as connection:
        connection.sendall(request(version="1.0"))
        served.wait(lambda: running(served))
        connection.shutdown(socket.SHUT_WR)
        served.wait(lambda: not served.engine.running)


def test_a_client_that_ends_its_side_within_a_request_has_left(served: Served) -> None:
    for part in (request()[:-3], HEALTH[:-2], request() + request()[:-3], HEALTH + HEALTH[:9]):
        with connect(served) as connection:
            connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            received = read_all(connection)
        assert set(statuses(received)) <= {200}
    served.wait(lambda: not served.server.server_state.connections)


# ---- wishes for another protocol


@pytest.mark.parametrize("packets", ["one", "two", "bytes"])
@pytest.mark.parametrize("headers", [H2C, "Connection: keep-alive, upgrade\r\nUpgrade: TLS/1.0, HTTP/2.0\r\n"])
def test_a_wish_for_another_protocol_leaves_the_request_whole(served: Served, packets: str, headers: str) -> None:
    """As the HTTP client of Java sends every first request; the answer says nothing of it, and so HTTP/1.1 goes on."""
    head, body = head_and_body(headers)
    data = head + body
    pieces = {"one": [data], "two": [head, body], "bytes": [data[i : i + 1] for i in range(len(data))]}[packets]
    with connect(served) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.1 if packets == "two" else 0)
        connection.sendall(request("connection: close\r\n"))
        received = read_all(connection)
    assert statuses(received) == [200, 200] and received.count(b"Hello there.") == 2
    assert b"upgrade" not in received.lower()


def test_a_wish_for_another_protocol_with_a_chunked_body(served: Served) -> None:
    body = json.dumps({"messages": HI}).encode()
    with connect(served) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n{H2C}\r\n".encode())
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert statuses(read_all(connection)) == [200, 200]


def test_a_wish_for_a_websocket_is_refused(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
        assert statuses(read_all(connection)) == [426]
    with connect(served) as connection:
        connection.sendall(b"CONNECT a:443 HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n")
        assert statuses(connection.recv(65536))[0] >= 400


# ---- bytes that are not HTTP


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("together", [True, False])
def test_no_error_is_written_into_an_answer(served: Served, stream: bool, together: bool) -> None:
    hold(served)
    with connect(served) as connection:
        connection.sendall(request(stream=stream) + (b"\0nonsense\r\n\r\n" if together else b""))
        served.wait(lambda: running(served))
        if not together:
            connection.sendall(b"\0nonsense\r\n\r\n")
        served.engine.hold = False
        received = read_all(connection)
    assert statuses(received)[0] == 200 and received.count(b"word") > 40
    head, _, answer = received.partition(b"\r\n\r\n")
    if stream:
        first = answer.index(b"0\r\n\r\n", answer.index(b"[DONE]")) + 5
    else:
        first = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    assert answer[first:] == b"" or statuses(answer[first:]) == [400]


@pytest.mark.parametrize("data", [b"CONNECT-ISH / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000])
def test_a_client_that_reads_to_the_end_need_not_wait_for_it(served: Served, data: bytes) -> None:
    """The server ends its side with the answer, and goes on dropping what comes, so that the client is not sent a reset."""
    with connect(served) as connection:
        began = time.monotonic()
        connection.sendall(data)
        received = read_all(connection)
        assert time.monotonic() - began < wire._LINGER_S / 2
        assert statuses(received) in ([400], [431]) and received.endswith(b"}}")
        for _ in range(10):
            connection.sendall(b"more" * 1000)
            time.sleep(0.01)
    served.wait(lambda: not served.server.server_state.connections)


def test_a_client_that_goes_on_without_end_is_closed_soon(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(b"CONNECT-ISH / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sends_until_closed(connection, b"more") < 3 * wire._LINGER_S


@pytest.mark.case("B116")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_body_that_is_too_large_reads_why(chunked: bool) -> None:
    """Node's fetch and Python's urllib give up at a reset, and never look whether they have an answer."""
    data, length = b" " * 20_000_000, "content-length: 20000000"
    if chunked:
        data, length = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data), "transfer-encoding: chunked"
    with serve(ScriptEngine(), ServerOptions(max_body=1 << 20)) as served:
        with connect(served) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode() + data)
            received = read_all(connection)
        assert statuses(received) == [413] and received.endswith(b"}}")
        served.wait(lambda: not served.server.server_state.connections)


def test_a_broken_chunk_is_answered_once(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode() + b'5\r\n{"mes\r\n')
        time.sleep(0.1)
        connection.sendall(b"nonsense\r\n")
        assert statuses(read_all(connection)) == [400]
    assert not served.engine.requests


def test_a_head_that_is_too_large_behind_a_request_is_not_told_in_its_answer() -> None:
    with serve(ScriptEngine(), ServerOptions(max_head=2000, head_timeout_s=1.0)) as served:
        hold(served)
        with connect(served) as connection:
            connection.sendall(request() + b"GET /health HTTP/1.1\r\nx: " + b"y" * 5000)
            served.wait(lambda: running(served))
            served.engine.hold = False
            received = read_all(connection)
    assert statuses(received)[0] == 200 and received.index(b"word") < len(received) and received.count(b"word") > 40
    assert received.find(b"HTTP/1.1 431") in (-1, received.rfind(b"HTTP/1.1"))


# ---- heads that programs read differently


@pytest.mark.parametrize("hosts", [b"", b"host: x\r\nhost: y\r\n"], ids=["none", "two"])
def test_a_request_has_one_host(served: Served, hosts: bytes) -> None:
    with connect(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
        received = read_all(connection)
    assert statuses(received) == [400] and b"must have one Host header" in received
    with connect(served) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert statuses(read_all(connection)) == [200]


@pytest.mark.case("B112")
def test_a_trailer_is_no_header() -> None:
    """A proxy in front looks at the head alone: what it keeps out must not come in behind the body."""
    body = json.dumps({"messages": HI}).encode()
    chunks, trailer = b"%x\r\n%b\r\n0\r\n" % (len(body), body), b"authorization: Bearer right\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n".encode()
    with serve(ScriptEngine(), ServerOptions(api_keys="right")) as served:
        for data, status in ((head + trailer + b"\r\n" + chunks + b"\r\n", 200), (head + b"\r\n" + chunks + trailer + b"\r\n", 401)):
            with connect(served) as connection:
                connection.sendall(data)  # in one packet it is all there before the application looks at the head
                assert statuses(read_all(connection)) == [status]


def test_lengths_that_contradict_each_other_are_refused(served: Served) -> None:
    """What is read as one request here and as two by a proxy in front lets one client write into the answers of another."""
    body = json.dumps({"messages": HI}).encode()
    chunked, chunks = "transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for headers, data in (
        (f"content-length: {len(body)}\r\n{chunked}", chunks),
        (f"{chunked}content-length: 4\r\n", chunks),
        (f"content-length: {len(body)}\r\ncontent-length: 3\r\n", body),
        ("content-length: 3, 3\r\n", body),
        (f"content-length : {len(body)}\r\n", body),
        (f"content-length:\r\n {len(body)}\r\n", body),
        ("transfer-encoding: xchunked\r\n", chunks),
        ("transfer-encoding: chunked, gzip\r\n", chunks),
        ("transfer-encoding: \x0bchunked\r\n", chunks),
        ("transfer-encoding:\r\n chunked\r\n", chunks),
        (f"{chunked}{chunked}", chunks),
        (chunked, chunks.replace(b"\r\n", b"\n")),
        (chunked, chunks[:-5] + b"0x0\r\n\r\n"),
        (chunked, b"10000000000000000\r\n" + body),
    ):
        with connect(served) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode() + data + HEALTH)
            assert statuses(read_all(connection)) == [400], headers
    assert not served.engine.requests


def test_line_feeds_between_requests_keep_no_connection() -> None:
    with serve(ScriptEngine(), ServerOptions(keep_alive_s=1.0)) as served, connect(served) as connection:
        connection.sendall(HEALTH)
        assert statuses(connection.recv(65536)) == [200]
        assert sends_until_closed(connection, b"\r\n") < 3
