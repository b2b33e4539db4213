"""Fetching images: where from, how much, how long. Hosts are real listeners on this machine."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.model.errors import ForebayError, RequestError
from forebay.server.errors import HttpError
from forebay.server.image_address import Policy, is_public, parse_url, split_entry
from forebay.server.image_fetch import Budget, ImageFetcher
from forebay.server.images import find_images
from forebay.server.limits import ImageOptions
from forebay.server.pictures import ImageDesk
from image_hosts import FORBIDDEN, VISION, Origin, asks, origin, picture, reply

PNG = picture()


def local(host: Origin, **options: Any) -> ImageOptions:
    """Options that let `host` be fetched from."""
    return ImageOptions(**{"fetch": True, "hosts": (f"127.0.0.1:{host.port}",), "allow_private": True, **options})


def fetch(url: str, options: ImageOptions, budget: int = 1 << 30) -> bytes:
    async def run() -> bytes:
        fetcher = ImageFetcher(options, Policy(options.hosts, allow_private=options.allow_private))
        try:
            return await fetcher.fetch(parse_url(url), Budget(budget, budget))
        finally:
            await fetcher.close()

    return asyncio.run(run())


def refusal(url: str, options: ImageOptions, code: str = "invalid_image_url", budget: int = 1 << 30) -> str:
    with pytest.raises(RequestError) as caught:
        fetch(url, options, budget)
    assert caught.value.code == code, caught.value
    return caught.value.message


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The name server: name -> its answers, one after another. What is left says how often it was asked."""
    table: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host not in table:
            return real(host, port, *rest, **options)
        if not table[host]:
            raise socket.gaierror(socket.EAI_NONAME, "asked too often")
        found = table[host].pop(0)
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return table


def test_what_comes_is_claimed_as_it_comes() -> None:
    """So that many large files that are fetched at once are not in memory before anybody has asked for room."""
    file = picture() + bytes(3 << 20)
    claimed: list[int] = []

    def claim(size: int) -> None:
        claimed.append(size)
        if sum(claimed) > 2 << 20:
            raise HttpError(503, "no room", code="overloaded", retry_after=1)

    async def run(url: str, options: ImageOptions, budget: Budget) -> bytes:
        fetcher = ImageFetcher(options, Policy(options.hosts, allow_private=options.allow_private))
        try:
            return await fetcher.fetch(parse_url(url), budget)
        finally:
            await fetcher.close()

    with origin(reply(file)) as host:
        options, url = local(host), f"http://127.0.0.1:{host.port}/a.png"
        with pytest.raises(HttpError) as caught:
            asyncio.run(run(url, options, Budget(1 << 30, 1 << 30, claim)))
        assert caught.value.status == 503 and 2 << 20 < sum(claimed) < 3 << 20
        claimed.clear()
        small = Budget(1 << 30, 1 << 30, claimed.append)
        assert len(asyncio.run(run(url, options, small))) == len(file) == sum(claimed)


# ---- where from


@pytest.mark.case("B101")
def test_an_allowed_host_is_fetched_from_and_learns_nothing_about_us() -> None:
    with origin(reply(PNG, content_type="text/plain")) as host:
        assert fetch(f"http://127.0.0.1:{host.port}/a/b.png?c=d#e", local(host)) == PNG
        path, headers = host.requests[0]
    assert path == "/a/b.png?c=d"
    assert headers["host"] == f"127.0.0.1:{host.port}"
    assert headers["accept-encoding"] == "identity"
    assert not headers.keys() & {"cookie", "authorization", "referer"}


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255",
    "224.0.0.1", "240.0.0.1", "192.0.0.192", "198.18.0.1", "168.63.129.16", "100.100.100.200", "::1", "::", "fe80::1", "fc00::1",
    "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "64:ff9b:1::1", "fec0::1",
]  # fmt: skip
PUBLIC = ["93.184.216.34", "1.1.1.1", "2606:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1"]


@pytest.mark.case("B101")
def test_which_addresses_are_public() -> None:
    assert [a for a in PRIVATE if is_public(ipaddress.ip_address(a))] == []
    assert [a for a in PUBLIC if not is_public(ipaddress.ip_address(a))] == []


@pytest.mark.case("B101")
def test_private_addresses_are_for_the_operator_to_allow_and_metadata_never() -> None:
    policy = Policy(("*",), allow_private=True)
    for address in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "::1", "fc00::1", "1.1.1.1"):
        policy.check_address(ipaddress.ip_address(address))
    for address in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fe80::1", "0.0.0.0", "224.0.0.1"):
        with pytest.raises(RequestError, match="not public"):
            policy.check_address(ipaddress.ip_address(address))


@pytest.mark.case("B101")
@pytest.mark.parametrize("form", FORBIDDEN)
def test_forbidden_forms_are_refused_without_a_look_up(form: str, names: dict[str, list[list[str]]]) -> None:
    names["example.com"] = []
    with origin(reply(PNG)) as host, origin(reply(PNG), host="::1") as other:
        options = ImageOptions(fetch=True, hosts=("*", f"*:{host.port}", f"*:{other.port}"))
        url = form.replace("P", str(other.port if "::1]" in form else host.port))
        for fetching in (True, False):
            with pytest.raises(RequestError) as caught:
                find_images(asks(url), options, Policy(options.hosts), fetching=fetching)
            assert (caught.value.code, caught.value.param) == ("invalid_image_url", "messages.0.content.0.image_url")
        assert host.connections == other.connections == 0


@pytest.mark.case("B101")
def test_a_name_is_resolved_once_and_every_address_of_it_checked(names: dict[str, list[list[str]]]) -> None:
    with origin(reply(PNG)) as host:
        open_to_all = ImageOptions(fetch=True, hosts=(f"*:{host.port}",), connect_timeout_s=0.5)
        for addresses in (["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"]):
            names["trap.example"] = [addresses, ["93.184.216.34"]]
            assert "not public" in refusal(f"http://trap.example:{host.port}/", open_to_all)
            assert len(names["trap.example"]) == 1
        assert host.connections == 0
        # The other way round: what was checked is what is connected to, whatever a second answer would be.
        names["pinned.example"] = [["127.0.0.1"], ["10.255.255.1"]]
        assert fetch(f"http://Pinned.Example:{host.port}/", local(host, hosts=(f"pinned.example:{host.port}",))) == PNG
        assert names["pinned.example"] == [["10.255.255.1"]]
        assert host.requests[0][1]["host"] == f"pinned.example:{host.port}"
        # Of two addresses the second will do.
        names["two.example"] = [["127.0.0.2", "127.0.0.1"]]
        assert fetch(f"http://two.example:{host.port}/", local(host, hosts=(f"two.example:{host.port}",))) == PNG


@pytest.mark.case("B101")
def test_the_list_of_hosts() -> None:
    policy = Policy(("images.example", "*.cdn.example", "odd.example:8443", "[2606:4700::1]:8080"))

    for url in ("http://images.example/", "https://IMAGES.example./a", "https://a.b.cdn.example/", "https://odd.example:8443/"):
        policy.check(parse_url(url))
    policy.check(parse_url("http://[2606:4700:0:0::1]:8080/"))
    for url in (
        "http://other.example/", "http://images.example.evil.example/", "http://xcdn.example/", "http://cdn.example/",
        "http://images.example:8443/", "https://odd.example/", "http://1.1.1.1/", "http://[2606:4700::1]/",
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            policy.check(parse_url(url))
        assert caught.value.code == "invalid_image_url"
    with pytest.raises(RequestError):
        Policy(()).check(parse_url("http://images.example/"))
    for entry in ("http://a.example", "a.example/x", "a.example:0", "a.example:x", "*a.example", "a..b", "", "a b", "[::1"):
        with pytest.raises(ValueError):
            split_entry(entry)


@pytest.mark.case("B101")
def test_redirects_are_checked_like_the_first_url() -> None:
    targets: dict[str, str] = {}

    def answer(connection: socket.socket, path: str) -> None:
        if path in targets:
            reply(b"", status="302 Found", location=targets[path])(connection, path)
        else:
            reply(PNG)(connection, path)

    with origin(answer) as host, origin(reply(PNG)) as secret:
        base, options = f"http://127.0.0.1:{host.port}", local(host)
        targets |= {"/1": "/2", "/2": f"{base}/3", "/3": f"//127.0.0.1:{host.port}/end", "/0": "/1"}
        assert fetch(f"{base}/1", options) == PNG
        assert [path for path, _ in host.requests] == ["/1", "/2", "/3", "/end"]
        assert "more than 3 times" in refusal(f"{base}/0", options)
        for target in (
            f"http://127.0.0.1:{secret.port}/", f"http://localhost:{secret.port}/", f"http://2130706433:{secret.port}/",
            f"http://[::ffff:127.0.0.1]:{secret.port}/", f"http://user@127.0.0.1:{secret.port}/", "http://169.254.169.254/",
            "file:///etc/hosts", "ftp://127.0.0.1/", "/etc/hosts\\..", "data:image/png;base64,AAAA", "http://other.example/",
        ):  # fmt: skip
            targets["/bad"] = target
            refusal(f"{base}/bad", options)
        assert secret.connections == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_certificates_are_those_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, list[list[str]]]) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=t", "-addext", "subjectAltName=DNS:good.example"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with origin(reply(PNG), tls=context) as host:
        options = local(host, hosts=(f"*:{host.port}",))
        names["good.example"] = [["127.0.0.1"]] * 2
        with pytest.raises(HttpError):  # nobody vouches for it
            fetch(f"https://good.example:{host.port}/", options)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch(f"https://good.example:{host.port}/", options) == PNG
        names["bad.example"] = [["127.0.0.1"]]
        with pytest.raises(HttpError):
            fetch(f"https://bad.example:{host.port}/", options)
        assert len(host.requests) == 1


# ---- how much, how long


def sends(head: str, part: bytes, *, pause: float = 0.0, first: bytes = PNG[:64]) -> tuple[Callable[[socket.socket, str], None], list[int]]:
    """An answer that goes on until the client has enough, and the number of bytes it got rid of."""
    sent = [0]

    def answer(connection: socket.socket, path: str) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + first)
        while True:
            connection.sendall(part)
            sent[0] += len(part)
            time.sleep(pause)

    return answer, sent


@pytest.mark.case("B103")
@pytest.mark.parametrize("head", ["connection: close\r\n", "content-length: 1000000000000\r\n", f"content-length: {'9' * 19}\r\n"])
def test_an_endless_body_is_cut_at_the_limit(head: str) -> None:
    answer, sent = sends(head, bytes(65536))
    with origin(answer) as host:
        begun = time.monotonic()
        message = refusal(f"http://127.0.0.1:{host.port}/", local(host, max_bytes=1 << 20), "image_too_large")
        assert "1 MiB" in message
        assert time.monotonic() - begun < 5
        assert sent[0] < 32 << 20  # the limit and what fits into the buffers of both ends


@pytest.mark.case("B103")
def test_chunks_count_as_well_and_a_length_that_lies_does_not_help() -> None:
    def chunks(connection: socket.socket, path: str) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n40\r\n" + PNG[:64] + b"\r\n")
        while True:
            connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")

    with origin(chunks) as host:
        refusal(f"http://127.0.0.1:{host.port}/", local(host, max_bytes=1 << 20), "image_too_large")
        assert "together" in refusal(f"http://127.0.0.1:{host.port}/", local(host), "image_too_large", budget=300_000)
    with origin(reply(PNG, content_length=str(len(PNG) + 5))) as host, pytest.raises(HttpError) as caught:
        fetch(f"http://127.0.0.1:{host.port}/", local(host))
    assert caught.value.status == 503
    with origin(reply(PNG + b"more", content_length=str(len(PNG)))) as host:
        assert fetch(f"http://127.0.0.1:{host.port}/", local(host)) == PNG


@pytest.mark.case("B103")
def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20), 1)
    for encoding in ("gzip", "GZIP", "deflate", "br", "gzip, gzip", "x"):
        with origin(reply(bomb, content_encoding=encoding)) as host:
            assert "compressed" in refusal(f"http://127.0.0.1:{host.port}/", local(host))
    with origin(reply(PNG, content_encoding="identity")) as host:
        assert fetch(f"http://127.0.0.1:{host.port}/", local(host)) == PNG


@pytest.mark.case("B103")
@pytest.mark.parametrize(("pause", "seconds"), [(0.1, 2.0), (5.0, 2.0)])
def test_a_sender_that_trickles_is_cut(pause: float, seconds: float) -> None:
    answer, _ = sends("content-length: 1000000\r\n", b"x", pause=pause)
    with origin(answer) as host:
        begun = time.monotonic()
        refusal(f"http://127.0.0.1:{host.port}/", local(host, fetch_window_s=0.5, connect_timeout_s=0.5))
        assert time.monotonic() - begun < seconds


@pytest.mark.case("B103")
def test_an_answer_that_never_begins_or_never_ends_has_its_time() -> None:
    def trickles_its_head(connection: socket.socket, path: str) -> None:
        for letter in b"HTTP/1.1 200 OK\r\nx: " + b"x" * 10_000:
            connection.sendall(bytes([letter]))
            time.sleep(0.05)

    fast, _ = sends("connection: close\r\n", bytes(4096), pause=0.01)
    for answer in (trickles_its_head, fast):
        with origin(answer) as host:
            begun = time.monotonic()
            assert "longer than 0.8 s" in refusal(f"http://127.0.0.1:{host.port}/", local(host, fetch_timeout_s=0.8))
            assert time.monotonic() - begun < 3
    with origin(lambda connection, path: time.sleep(3)) as host:
        assert "stopped sending" in refusal(f"http://127.0.0.1:{host.port}/", local(host, connect_timeout_s=0.3))


@pytest.mark.case("B103")
def test_another_type_is_cut_at_its_first_bytes_whatever_it_is_called() -> None:
    answer, sent = sends("content-type: image/png\r\n", bytes(4096), first=b"<!doctype html><html>", pause=0.005)
    with origin(answer) as host:
        refusal(f"http://127.0.0.1:{host.port}/", local(host), "image_parse_error")
        assert sent[0] < 1 << 20
    for body in (b"", b"\x89PNG", b"<svg/>"):
        with origin(reply(body)) as host:
            refusal(f"http://127.0.0.1:{host.port}/", local(host), "image_parse_error")


@pytest.mark.parametrize(
    ("status", "refused"),
    [("404 Not Found", True), ("401 Unauthorized", True), ("204 No Content", True), ("206 Partial Content", True),
     ("304 Not Modified", True),
     ("302 Found", True), ("500 Oops", False), ("503 Busy", False), ("429 Slow Down", False)],
)  # fmt: skip
def test_what_the_host_answers(status: str, refused: bool) -> None:
    body = b"" if status[:3] in ("204", "304") else PNG
    with origin(reply(body, status=status)) as host, pytest.raises(ForebayError) as caught:
        fetch(f"http://127.0.0.1:{host.port}/", local(host))
    expected = (400, "invalid_image_url") if refused else (503, "image_unavailable")
    assert (caught.value.status, caught.value.code) == expected
    assert status[:3] in caught.value.message


def test_a_host_that_cannot_be_reached_may_answer_later(names: dict[str, list[list[str]]]) -> None:
    with origin(reply(PNG)) as host:
        options = local(host, hosts=("*", f"*:{host.port}"))
    for answer in (lambda connection, path: None, lambda connection, path: connection.sendall(b"no http\r\n\r\n")):
        with origin(answer) as other, pytest.raises(HttpError) as caught:
            fetch(f"http://127.0.0.1:{other.port}/", local(other))
        assert (caught.value.status, caught.value.retry_after) == (503, 2)
    with pytest.raises(HttpError, match="cannot be reached"):
        fetch(f"http://127.0.0.1:{host.port}/", options)
    names["nowhere.example"] = []
    assert "does not exist" in refusal("http://nowhere.example/", options)


# ---- a whole request


def resolve(body: dict[str, Any], options: ImageOptions) -> int:
    """Images of a body; the number of them that are planned."""

    async def run() -> int:
        desk = ImageDesk(options, VISION)
        try:
            return len(await desk.plan(desk.find(body), lambda size: None))
        finally:
            desk.close()

    return asyncio.run(run())


@pytest.mark.case("B103")
def test_a_request_fetches_16_at_a_time_and_equal_urls_once() -> None:
    waiting: set[str] = set()
    most = [0]

    def answer(connection: socket.socket, path: str) -> None:
        waiting.add(path)
        time.sleep(0.3)
        most[0] = max(most[0], len(waiting))
        waiting.discard(path)  # before the client can know that it is done
        reply(PNG)(connection, path)

    with origin(answer) as host:
        urls = [f"http://127.0.0.1:{host.port}/{i % 40}" for i in range(80)]
        assert resolve(asks(*urls), local(host)) == 80
        assert sorted(path for path, _ in host.requests) == sorted(f"/{i}" for i in range(40))
        assert 8 < most[0] <= 16


@pytest.mark.case("B103")
def test_the_first_finding_ends_the_other_fetches() -> None:
    slow, sent = sends("content-length: 1000000\r\n", bytes(8192), pause=0.05)

    def answer(connection: socket.socket, path: str) -> None:
        slow(connection, path) if path == "/slow" else reply(b"no", status="404 Not Found")(connection, path)

    with origin(answer) as host:
        base, begun = f"http://127.0.0.1:{host.port}", time.monotonic()
        with pytest.raises(RequestError) as caught:
            resolve(asks(f"{base}/slow", f"{base}/gone"), local(host))
        assert caught.value.param == "messages.0.content.1.image_url"
        assert time.monotonic() - begun < 3
        seen = sent[0]
        time.sleep(0.5)
        assert sent[0] <= seen + (3 << 13)
