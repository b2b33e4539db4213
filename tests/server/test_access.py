"""API keys: which routes need one, how it may be sent, what a refusal says, where keys come from, and how the file is looked at again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.model.errors import ConfigError
from forebay.server import access, cli
from forebay.server.access import KeyRing, hashed, identify
from forebay.server.errors import HttpError
from forebay.server.limits import ServerOptions
from script_engine import ScriptEngine, Served, serve

ALICE = "alice-0123456789abcdef"
ROBOT = "robot-0123456789abcdef"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.fixture(scope="module")
def options() -> ServerOptions:
    return ServerOptions(api_keys=f"alice:{ALICE},{ROBOT}")


def raw(served: Served, method: str, path: str, headers: str = "") -> tuple[int, bytes]:
    """Status and answer of a request whose path no client library has tidied up."""
    with contextlib.closing(socket.create_connection((served.host, served.port), timeout=20)) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer[9:12]), answer


def escaped(path: str) -> str:
    """`/v1%2fmodels`: slashes but the first percent-encoded."""
    return f"/{path[1:].replace('/', '%2f')}"


def spellings(path: str) -> set[str]:
    """Ways to write a path that some server or proxy takes for the same one."""
    return {
        path, f"{path}/", f"{path}//", f"/{path}", path.replace("/", "//"), escaped(path), escaped(path).replace("%2f", "%2F"),
        path.upper(), f"{path}?x=1", f"{path}/?key={ALICE}", f"{path}/.", f"/x/..{path}", f"/health/..{path}", f"{path}%00", f"{path};a=b",
        f"/{path[1:2]}%{ord(path[-1]):02x}", f"{path[:-1]}%{ord(path[-1]):02x}", f"/health/live{path}", f"{path}/health", f"{path}%20",
    }  # fmt: skip


@pytest.mark.case("B112")
def test_no_route_answers_without_a_key_but_the_open_ones(served: Served) -> None:
    """Every route of the running application, by every path, spelling and method, without a key and with wrong ones."""
    routes = served.app.routes
    open_paths = {path for route in routes if route.open for path in route.paths}
    guarded = {path for route in routes if not route.open for path in route.paths}
    assert {route.name for route in routes if route.open} == {"/", "/health/live", "/health/ready", "/version", "/metrics", "/openapi.json"}
    assert len(guarded) >= 6
    for path in guarded:
        for spelling in spellings(path):
            for method in METHODS if spelling in (path, f"{path}/", escaped(path)) else ("GET", "POST", "OPTIONS", "HEAD"):
                status, answer = raw(served, method, spelling)
                assert status in (401, 404), (method, spelling, answer[:80])
    assert raw(served, "CONNECT-ISH", CHAT)[0] == 400  # no method at all
    near = (ALICE.upper(), ALICE[:-1], f"{ALICE}x", f" {ALICE[1:]}", f"{ALICE},{ROBOT}", hashed(ALICE.encode()))
    wrong = (*near, "", "*", "null", "x" * 5000)
    for path in guarded:
        for key in wrong:
            for headers in (f"authorization: Bearer {key}\r\n", f"x-api-key: {key}\r\n", f"authorization: Basic {key}\r\n"):
                assert raw(served, "GET", path, headers)[0] == 401, (path, headers)
    for header in (f"authorization: {ALICE}", f"cookie: api-key={ALICE}", f"authorization: Token {ALICE}", f"key: {ALICE}"):
        assert raw(served, "POST", CHAT, f"{header}\r\n")[0] == 401
    assert not served.engine.requests
    for path in open_paths:
        assert raw(served, "GET", path)[0] == 200
        assert raw(served, "GET", path, "authorization: Bearer wrong\r\n")[0] == 200


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
def test_a_key_may_be_sent_in_three_ways_on_every_route(served: Served, name: str) -> None:
    for key in (ALICE, ROBOT):
        headers = {name: f"Bearer {key}" if name == "authorization" else key}
        for path in (path for route in served.app.routes if not route.open for path in route.paths):
            assert httpx.get(served.url + path, headers=headers).status_code in (200, 405, 426), path
        assert httpx.post(served.url + CHAT, headers=headers, json={"messages": HI}).status_code == 200
    lower = {"authorization": f"bearer  {ALICE}"}
    assert httpx.get(f"{served.url}/v1/models", headers=lower).status_code == 200
    stale = {"authorization": "Bearer some-old-key", "x-api-key": ALICE}  # a client with both settings
    assert httpx.get(f"{served.url}/v1/models", headers=stale).status_code == 200


def test_a_refusal_is_an_envelope_of_the_family(served: Served) -> None:
    response = httpx.post(served.url + CHAT, json={"messages": HI})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert "Authorization: Bearer" in error["message"]
    response = httpx.post(f"{served.url}/anthropic/v1/messages", json={}, headers={"x-api-key": "nobody-knows-this-one"})
    assert response.status_code == 401
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert "s-one" not in body["error"]["message"].replace("ending in -one", "")
    assert "hunter22" not in httpx.get(f"{served.url}/v1/models", headers={"x-api-key": "hunter22"}).text  # short: nothing of it


def test_keys_are_nowhere_in_log_metrics_or_repr(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-key-that-someone-mistyped"
    for key in (ALICE, wrong):
        for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
            httpx.post(served.url + CHAT, headers={name: value, "x-request-id": f"as-{name}"}, json={"messages": HI})
            httpx.post(f"{served.url}/v1/models", headers={name: value})
    served.wait(lambda: sum(r.name == "forebay.access" for r in caplog.records) >= 8)
    lines = [r.getMessage() for r in caplog.records if r.name == "forebay.access"]
    said = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("forebay")) + httpx.get(f"{served.url}/metrics").text
    said += repr(served.options) + repr(KeyRing(served.options).callers()) + repr(served.app)
    assert ALICE not in said and wrong not in said and ROBOT not in said
    done = [json.loads(line) for line in lines if '"status": 200' in line]
    assert [(line["key"], line["tenant"]) for line in done] == [("alice", "alice")] * 2
    refused = [json.loads(line) for line in lines if '"status": 401' in line]
    assert len(refused) == 4
    assert all("key" not in line and line["error"] == "invalid_api_key" for line in refused)


def test_every_route_logs_one_line_without_content(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Route, status, id, key and tenant; nothing of the path, the query, the headers or the body of a request."""
    caplog.set_level(logging.DEBUG, logger="forebay.access")
    secret = "tell-nobody"
    expected = []
    for route in served.app.routes:
        for path in route.paths:
            headers = {"x-api-key": ALICE, "user-agent": secret, "x-request-id": f"log-{len(expected)}"}
            body = {"messages": [{"role": "user", "content": secret}], "prompt": secret, "input": secret, "max_tokens": 3, "model": secret}
            query = f"?q={secret}" if not route.below else f"/{secret}?q={secret}"
            response = httpx.request(route.methods[0], served.url + path + query, headers=headers, json=body)
            assert response.headers["x-request-id"] == headers["x-request-id"]
            expected.append((headers["x-request-id"], response.status_code, not route.open))
    served.wait(lambda: sum('"log-' in r.getMessage() for r in caplog.records if r.name == "forebay.access") >= len(expected))
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "forebay.access" and '"log-' in r.getMessage()]
    assert [(line["request_id"], line["status"], line.get("key") == line.get("tenant") == "alice") for line in lines] == expected
    assert secret not in json.dumps(lines)
    known = {route.name for route in served.app.routes} | {"/v1/models/{id}"}
    assert {line["route"] for line in lines} <= known
    assert all(line["seconds"] >= 0 and line["method"] in METHODS for line in lines)


def test_a_server_without_keys_is_open_whatever_is_sent() -> None:
    with serve(ScriptEngine()) as served:
        for headers in ({}, {"authorization": "Bearer x"}, {"x-api-key": "y"}):
            assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def test_the_page_of_metrics_can_need_a_key_with_admin(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, line("plain", "key-plain"), line("boss", "key-boss", admin=True), line("late", "key-late", disabled=True))
    with serve(ScriptEngine(), ServerOptions(api_keys_file=file, metrics_key=True)) as served:
        statuses = {k: httpx.get(f"{served.url}/metrics", headers={"x-api-key": k}).status_code for k in ("", "key-plain", "key-boss")}
        assert statuses == {"": 401, "key-plain": 403, "key-boss": 200}
        response = httpx.get(f"{served.url}/v1/models", headers={"x-api-key": "key-late"})
        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")
        assert response.json()["error"]["code"] == "permission_denied"


def test_operators_routes_can_have_a_door_of_their_own() -> None:
    with serve(ScriptEngine(), ServerOptions(metrics_apart=True)) as served:
        assert httpx.get(f"{served.url}/metrics").status_code == 404
        assert "/metrics" not in json.dumps(httpx.get(f"{served.url}/openapi.json").json()["paths"])
        assert served.app.admin is not None
        statuses = {path: asgi_status(served.app.admin, path) for path in ("/metrics", "/health/live", CHAT, "/v1/models", "/version")}
        assert statuses == {"/metrics": 200, "/health/live": 200, CHAT: 404, "/v1/models": 404, "/version": 404}


def asgi_status(app: Any, path: str) -> int:
    async def get() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
            return (await client.get(path)).status_code

    return asyncio.run(get())


# ---- where keys come from


def line(name: str, key: str, **fields: Any) -> str:
    return json.dumps({"name": name, "hash": hashed(key.encode()), **fields})


def write(file: Path, *lines: str) -> None:
    file.write_text("# who may call\n\n" + "\n".join(lines) + "\n")


def who(ring: KeyRing, key: str) -> str | None:
    caller = ring.find(key.encode())
    return caller.name if caller else None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock of the key ring, in a list of one. Files that are written now were written long before."""
    clock = [1000.0]
    monkeypatch.setattr(access, "time", type("Clock", (), {"monotonic": lambda: clock[0], "time": lambda: time.time() + clock[0]}))
    return clock


def test_a_changed_file_counts_without_a_restart(tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    write(file, line("a", "key-a"), line("b", "key-b", tenant="b-and-c"))
    ring = KeyRing(ServerOptions(api_keys_file=file, api_keys="env:key-env"))
    assert [who(ring, key) for key in ("key-a", "key-b", "key-c", "key-env")] == ["a", "b", None, "env"]
    write(file, line("b", "key-b"), line("c", "key-c"))
    assert who(ring, "key-a") == "a"  # not looked at again yet
    now[0] += access.RECHECK_S
    assert [who(ring, key) for key in ("key-a", "key-b", "key-c", "key-env")] == [None, "b", "c", "env"]
    for broken in ('{"name": "d"', '{"name": "d"}', line("b", "x") + "\n" + line("b", "y"), line("env", "z"), "\xff"):
        file.write_text(broken, encoding="latin-1")
        now[0] += access.RECHECK_S
        assert [who(ring, key) for key in ("key-a", "key-b", "key-c", "key-env")] == [None, "b", "c", "env"]
        assert caplog.records.pop().levelno == logging.ERROR
    file.unlink()
    now[0] += access.RECHECK_S
    assert who(ring, "key-b") == "b"
    assert "cannot be read" in caplog.records[-1].getMessage()
    file.write_text("")  # all of them taken away: nobody, which is not everybody
    now[0] += access.RECHECK_S
    assert [who(ring, key) for key in ("key-b", "key-env")] == [None, "env"]
    with pytest.raises(HttpError):
        identify(ring, {})


def test_a_file_that_is_being_written_is_not_read_yet(tmp_path: Path, now: list[float]) -> None:
    file = tmp_path / "keys"
    write(file, line("a", "key-a"), line("b", "key-b"))
    ring = KeyRing(ServerOptions(api_keys_file=file))
    write(file, line("b", "key-b"))  # as an editor begins that writes in place
    written = time.time() + now[0] + access.RECHECK_S
    os.utime(file, (written, written))
    now[0] += access.RECHECK_S
    assert who(ring, "key-a") == "a"
    write(file, line("b", "key-b"), line("a", "key-a"), line("c", "key-c"))
    now[0] += 2 * access.SETTLED_S
    assert [who(ring, key) for key in ("key-a", "key-b", "key-c")] == ["a", "b", "c"]


def test_a_file_of_keys_that_is_none_keeps_nobody_waiting(tmp_path: Path, now: list[float]) -> None:
    file = tmp_path / "keys"
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="cannot be read: not a regular file"):
        KeyRing(ServerOptions(api_keys_file=file))
    file.unlink()
    write(file, line("a", "key-a"))
    ring = KeyRing(ServerOptions(api_keys_file=file))
    file.unlink()
    os.mkfifo(file)
    now[0] += access.RECHECK_S
    assert who(ring, "key-a") == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a", "hash": "x"}', "line 3: hash: "),
        ('{"name": "a b"}', "line 3: name: "),
        ("[1]", "line 3: line: "),
        ("name: a", "line 3: not a JSON object"),
        (line("a", "x", requests_per_minute=0), "line 3: requests_per_minute: input should be greater than or equal to 1"),
        (line("a", "x", requests_per_minute="60"), "line 3: requests_per_minute: input should be a valid integer"),
        (line("a", "x", rpm=3), "line 3: rpm: extra inputs"),
        (line("a", "x", cache_salt="a/b"), "line 3: cache_salt: "),
        (line("a", "x", tenant="a/b"), "line 3: tenant: "),
        (line("a", "x") + "\n" + line("a", "y"), "the name 'a' is given twice"),
        ("", "holds no key; add one with `forebay keys add NAME --file"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    write(file, text)
    with pytest.raises(ConfigError) as error:
        KeyRing(ServerOptions(api_keys_file=file))
    assert message in error.value.message
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyRing(ServerOptions(api_keys_file=tmp_path / "absent"))


@pytest.mark.parametrize(
    "text", ["", " , ", "a:", ":secret", "a b:secret", "x:sec ret", "x:se\x7fcret", "a:secret,a:other", "x" * 257, "schlüssel"]
)
def test_wrong_keys_in_the_environment_are_refused_and_not_shown(text: str) -> None:
    """A variable that is set but empty most of all: a secret that was not mounted must not open the server."""
    with pytest.raises(ConfigError, match="FOREBAY_API_KEYS") as error:
        KeyRing(ServerOptions(api_keys=text))
    assert "ecret" not in error.value.message and "schl" not in error.value.message


@pytest.mark.case("B112")
def test_a_wrong_key_costs_as_many_hashes_as_there_are_salts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever matches, and if none does: one for keys of the environment, however many; one for each line of a file of old."""
    ring = KeyRing(ServerOptions(api_keys=",".join(f"key-number-{i}" for i in range(50))))
    hashes: list[bytes] = []
    digest = access._digest

    def count(key: bytes, salt: bytes) -> bytes:
        hashes.append(key)
        return digest(key, salt)

    monkeypatch.setattr(access, "_digest", count)
    for key, name in (("key-number-0", "key-1"), ("key-number-49", "key-50"), ("key-number-x", None), ("x", None)):
        hashes.clear()
        assert who(ring, key) == name
        assert hashes == [key.encode()]
    hashes.clear()
    assert who(ring, "key-number-49") == "key-50"  # known by now
    assert not hashes
    file = tmp_path / "keys"
    write(file, *(line(f"k{i}", f"key-number-{i}") for i in range(7)))
    ring = KeyRing(ServerOptions(api_keys_file=file))
    hashes.clear()
    assert (who(ring, "key-number-3"), who(ring, "nobody")) == ("k3", None)
    assert len(hashes) == 14


def test_metrics_that_need_a_key_need_keys() -> None:
    with pytest.raises(ConfigError, match=r"server\.metrics_key"):
        KeyRing(ServerOptions(metrics_key=True))
    assert not KeyRing(ServerOptions(metrics_key=True, api_keys="some-key")).open


def test_the_command_makes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    limits = ["--tenant", "team", "--requests-per-minute", "60", "--priority", "-5"]
    assert cli.main(["keys", "add", "alice", "--file", str(file), *limits]) == 0
    alice = capsys.readouterr().out.strip()
    file.write_text(file.read_text().rstrip("\n"))  # an editor that ends without a newline
    monkeypatch.setenv("FOREBAY_SERVER__API_KEYS_FILE", str(file))
    assert cli.main(["keys", "add", "bob", "--admin", "--concurrency", "2"]) == 0
    bob = capsys.readouterr().out.strip()
    assert alice != bob and len(alice) > 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert alice not in file.read_text() and bob not in file.read_text()
    ring = KeyRing(ServerOptions(api_keys_file=file))
    first, second = ring.callers()
    assert (who(ring, alice), first.tenant, first.key and first.key.priority) == ("alice", "team", -5)
    assert (who(ring, bob), second.tenant, second.key and second.key.admin) == ("bob", "bob", True)
    assert first.key and second.key and first.key.hash.partition(":")[0] == second.key.hash.partition(":")[0]
    assert cli.main(["keys", "list"]) == 0
    assert capsys.readouterr().out == "alice tenant=team requests_per_minute=60 priority=-5\nbob concurrency=2 admin=True\n"
    for arguments, message in [
        (["add", "bob"], "has a key 'bob' already"),
        (["add", "b/ob"], "name: string should match"),
        (["add", "c", "--tokens-per-minute", "0"], "tokens_per_minute: input should be greater than or equal to 1, got 0"),
    ]:
        assert cli.main(["keys", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.delenv("FOREBAY_SERVER__API_KEYS_FILE")
    assert cli.main(["keys", "list"]) == 2
    assert "--file" in capsys.readouterr().err


def test_a_check_of_a_key_is_cheap() -> None:
    """With a thousand keys a wrong one costs a few milliseconds, a known one microseconds."""
    ring = KeyRing(ServerOptions(api_keys=",".join(f"key-number-{i}" for i in range(1000))))
    assert who(ring, "key-number-999")
    began = time.process_time()
    for _ in range(100):
        assert who(ring, "key-number-999")
    assert (time.process_time() - began) / 100 < 0.0005
    began = time.process_time()
    assert who(ring, "key-number-1000") is None
    assert time.process_time() - began < 0.05
