"""Image parts of requests: their forms and limits, decoding in processes of their own, and what a server without vision answers."""

from __future__ import annotations

import base64
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from forebay.model.chat import ChatCodec
from forebay.model.errors import ConfigError, RequestError
from forebay.server.config import load
from forebay.server.image_address import Policy
from forebay.server.image_header import read_header
from forebay.server.images import FoundImage, find_images, read_data_url
from forebay.server.limits import ImageOptions, ServerOptions
from image_hosts import FORBIDDEN, VISION, asks, data_url, origin, picture, reply
from script_engine import ScriptEngine, Served, serve

PNG = picture()
B64 = base64.b64encode(PNG).decode()
URL = data_url(PNG)


def find(body: dict[str, Any], options: ImageOptions | None = None, *, fetching: bool = True) -> list[FoundImage]:
    options = options or ImageOptions()
    return find_images(body, options, Policy(options.hosts), fetching=fetching)


def refusal(body: dict[str, Any], options: ImageOptions | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        find(body, options)
    return caught.value


def one(part: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": "text", "text": "Look:"}, part]}]}


def declares(width: int, height: int) -> bytes:
    """A small PNG whose header declares a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + PNG[33:]


# ---- what a part may be


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, "image_url"),
        ({"type": "image_url", "image_url": URL}, "image_url"),
        ({"type": "input_image", "image_url": URL, "detail": "original"}, "image_url"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B64}}, "source"),
        ({"type": "image", "source": {"type": "url", "url": URL}}, "source"),
        ({"type": "file", "file": {"filename": "a.png", "file_data": URL}}, "file.file_data"),
        ({"type": "input_file", "file_data": URL}, "file_data"),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_every_spelling_of_a_part(part: dict[str, Any], where: str, role: str) -> None:
    assert find(one(part, role)) == [FoundImage("messages.0.content.1", f"messages.0.content.1.{where}", PNG, (8, 6))]


@pytest.mark.parametrize(
    "url",
    [
        f"data:;base64,{B64}", f"DATA:image/png;BASE64,{B64}", f"data:image/png;charset=utf-8;base64,{B64}",
        f"data:image/jpeg;base64,{B64}",
        f"data:image/png;base64,{B64.rstrip('=')}", "data:image/png;base64," + "\r\n".join(B64[i : i + 20] for i in range(0, len(B64), 20)),
        f"data:image/png;base64, {B64} \n", f"data:image/png;base64,{B64.replace('+', '%2B').replace('=', '%3D').replace('/', '%2f')}",
        "data:image/png," + "".join(f"%{b:02X}" for b in PNG),
    ],
)  # fmt: skip
def test_spellings_of_a_data_url(url: str) -> None:
    assert find(asks(url)) == [FoundImage("messages.0.content.0", "messages.0.content.0.image_url", PNG, (8, 6))]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:", "invalid_image_url"), ("data:image/png;base64", "invalid_image_url"), (f"data:{'x' * 300},AAAA", "invalid_image_url"),
        ("data:image/png;base64,", "image_parse_error"), ("data:image/png;base64,A", "image_parse_error"),
        ("data:image/png;base64,AA$A", "image_parse_error"), (f"data:image/png;base64,{B64}é", "image_parse_error"),
        (f"data:image/png;base64,{B64[:8]}=={B64[8:]}", "image_parse_error"), (f"data:image/png,{B64}", "image_parse_error"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "image_parse_error"),
        (data_url(b"%PDF-1.7"), "image_parse_error"),
        (data_url(b"BM" + bytes(60), "bmp"), "image_parse_error"), (data_url(PNG[:18]), "image_parse_error"),
        (data_url(declares(0, 5)), "image_parse_error"), (data_url(declares(8193, 1)), "image_too_large"),
        (data_url(declares(60_000, 60_000)), "image_too_large"), (data_url(declares(2**31, 2**31)), "image_too_large"),
        ("picture.png", "invalid_image_url"), ("", "missing_required_parameter"), (None, "missing_required_parameter"), (5, "invalid_type"),
        ("https://images.example/a.png", "invalid_image_url"),  # nothing is fetched unless the operator says so
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_url_is_told_with_its_place(url: Any, code: str) -> None:
    error = refusal(asks(URL, url))
    assert (error.code, error.param) == (code, "messages.0.content.1.image_url")


def test_other_fields_of_a_part() -> None:
    error = refusal(one({"type": "image_url", "image_url": {"url": URL, "detail": "fine"}}))
    assert (error.code, error.param) == ("invalid_value", "messages.0.content.1.image_url.detail")
    error = refusal(one({"type": "input_image", "file_id": "file-1"}))
    assert (error.code, error.param) == ("unsupported_value", "messages.0.content.1.file_id")
    error = refusal(one({"type": "image", "source": {"type": "file", "file_id": "x"}}))
    assert (error.code, error.param) == ("unsupported_value", "messages.0.content.1.source.type")
    assert refusal(one({"type": "image", "source": "x"})).code == "invalid_type"
    # What is no image is not looked at, whatever its form.
    for messages in (None, 5, [], [5], [{"role": "user"}], [{"content": "x"}], [{"content": [5, {"type": "text"}, {"type": ["image"]}]}]):
        assert find({"messages": messages}) == []


def test_limits_on_number_size_and_pixels() -> None:
    big = data_url(declares(5000, 10))
    assert len(find(asks(big, *[URL] * 13))) == 14
    error = refusal(asks(*[URL] * 14, big))
    assert (error.code, error.param) == ("image_too_large", "messages.0.content.14.image_url")
    assert "4096" in error.message
    assert len(find(asks(*[URL] * 600))) == 600
    error = refusal(asks(*[URL] * 601))
    assert error.message == "Too many images: max 600 images per request, got 601"
    error = refusal(asks(*[data_url(declares(8000, 8000))] * 9))
    assert (error.code, error.param) == ("image_too_large", "messages.0.content.8.image_url")
    size = len(PNG)
    assert len(find(asks(URL), ImageOptions(max_bytes=size))) == 1
    assert refusal(asks(URL), ImageOptions(max_bytes=size - 1)).code == "image_too_large"
    assert len(find(asks(URL, URL), ImageOptions(max_request_bytes=2 * size))) == 2
    assert refusal(asks(URL, URL), ImageOptions(max_request_bytes=2 * size - 1)).param == "messages.0.content.1.image_url"


@pytest.mark.case("B103")
@pytest.mark.parametrize("text", ["data:image/png;base64," + "A" * (44 << 20), "data:image/png," + "%00" * (33 << 20)])
def test_the_size_is_checked_before_decoding(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(RequestError) as caught:
        read_data_url(text, 32 << 20)
    assert caught.value.code == "image_too_large"
    assert time.process_time() - begun < 0.2
    # White space is not data.
    assert len(read_data_url("data:;base64," + ("A" * 76 + "\r\n") * 1000, 57_000)) == 57_000


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_headers_tell_the_size_that_pillow_finds(kind: str) -> None:
    for size in ((1, 1), (320, 7), (33, 300)):
        for options in ({}, {"progressive": True, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}, {"lossless": True}):
            data = picture(kind, size, **options)
            header = read_header(data)
            assert (header.kind, header.width, header.height) == (kind.lower(), *size)
            for end in (0, 3, 10, 13, 20):
                with pytest.raises(RequestError):
                    read_header(data[: min(end, len(data))] if kind != "GIF" else data[: min(end, 9)])
    assert read_header(picture("WEBP", (9, 5), "RGBA")).width == 9


def test_a_header_that_never_comes_costs_little() -> None:
    begun = time.process_time()
    for filler in (b"\xff" * (8 << 20), b"\xff\xe1\x00\x02" * (2 << 20), b"\xff\x01" * (4 << 20)):
        with pytest.raises(RequestError):
            read_header(b"\xff\xd8\xff\xe0\x00\x02" + filler)
    assert time.process_time() - begun < 1


# ---- no file is ever opened


@pytest.fixture(scope="module")
def seeing() -> Iterator[Served]:
    """A server whose model sees images, which may fetch from this machine."""
    engine = ScriptEngine()
    engine.codec = ChatCodec(engine.tokenizer, vision=VISION)
    images = ImageOptions(fetch=True, hosts=("127.0.0.1", "*"), workers=1)
    with serve(engine, ServerOptions(images=images)) as served:
        yield served


PATHS = ["{}", "file://{}", "FILE://localhost{}", "file:{}", "../../x", "..\\..\\x", "/proc/self/environ", "~/.netrc", "data:{}",
         "data:file://{}", "data:image/png;file={};base64", "data:image/png,{}", "data:image/png;base64,{}", "http://{}",
         "image.png"]  # fmt: skip


_watched: list[list[str]] = []  # a hook cannot be removed


@pytest.fixture
def opened() -> list[str]:
    """Every path that this process opens or lists, while the test runs."""
    seen: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            _watched[0].append(str(arguments[0]))

    if not _watched:
        sys.addaudithook(watch)
    _watched[:] = [seen]
    return seen


@pytest.mark.case("B105")
@pytest.mark.parametrize("form", PATHS)
def test_a_path_is_never_opened(form: str, opened: list[str], tmp_path: Path, seeing: Served) -> None:
    target, link = tmp_path / "secret.png", tmp_path / "link.png"
    target.write_bytes(PNG)
    link.symlink_to(target)
    for path in (str(target), str(link), "/etc/hosts"):
        opened.clear()
        for body in (
            asks(form.format(path)),
            one({"type": "input_image", "image_url": form.format(path)}),
            one({"type": "image", "source": {"type": "url", "url": form.format(path)}}),
            one({"type": "file", "file": {"file_data": form.format(path)}}),
        ):
            answer = httpx.post(f"{seeing.url}/v1/chat/completions", json={**body, "user": "../../secret"})
            assert answer.status_code == 400, answer.text
            assert "content[" in (answer.json()["error"]["param"] or "")
        assert [p for p in opened if p in (path, str(target), "/etc/hosts", "/proc/self/environ") or "secret" in p] == []
    assert not seeing.engine.requests


@pytest.mark.case("B105")
@pytest.mark.parametrize("name", ["cache_salt", "user", "safety_identifier", "prompt_cache_key", "request_id", "rid", "session_id"])
def test_names_that_look_like_paths_open_nothing(name: str, opened: list[str], seeing: Served, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    for value in (f"{tmp_path}/secret.png", f"../..{tmp_path}/secret.png", "../../secret"):
        opened.clear()
        answer = httpx.post(f"{seeing.url}/v1/chat/completions", json={**asks(URL), name: value})
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["param"] == name
        assert [path for path in opened if "secret" in path] == []


# ---- settings


def test_settings(tmp_path: Path) -> None:
    def options(text: str) -> ImageOptions:
        file = tmp_path / "forebay.yaml"
        file.write_text(text)
        return ServerOptions.from_config(load(file)[0]).images

    assert options("") == ImageOptions() and not ImageOptions().fetch
    given = options("server: {images: {fetch: true, hosts: [a.example, '*.b.example:8443'], max_bytes: 1MiB, cache_bytes: 0}}")
    assert (given.fetch, given.hosts, given.max_bytes, given.cache_bytes) == (True, ("a.example", "*.b.example:8443"), 1 << 20, 0)
    for text, reason in (
        ("server: {images: {fetch: true}}", "server.images.hosts"),
        ("server: {images: {hosts: ['http://a.example']}}", "server.images.hosts"),
        ("server: {images: {fetch_floor: -1}}", "bytes per second"),
        ("server: {images: {max_byte: 5}}", "server.images.max_bytes"),
    ):
        with pytest.raises(ConfigError, match=reason):
            options(text)


# ---- over HTTP


def bodies(url: str) -> dict[str, dict[str, Any]]:
    """The same request in every protocol."""
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {
        "/v1/chat/completions": asks(url),
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
        "/tokenize": asks(url),
    }


@pytest.mark.case("B101")
def test_without_vision_every_image_is_refused_and_none_fetched(served: Served) -> None:
    with origin(reply(PNG)) as host:
        for url in ("https://images.example/a.png", f"http://127.0.0.1:{host.port}/", f"http://localhost:{host.port}/", URL):
            for path, body in bodies(url).items():
                answer = httpx.post(served.url + path, json=body)
                assert answer.status_code == 400, (path, answer.text)
                error = answer.json()["error"]
                code, text = ("unsupported_value", "not served")
                if "http://" in url:
                    code, text = ("invalid_image_url", "cannot be used")
                assert text in error["message"], (path, error)
                assert error.get("code", code) == code
        assert host.connections == 0
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://10.0.0.1/", "invalid_image_url"), (data_url(b"no picture"), "image_parse_error"),
        (data_url(declares(9000, 9)), "image_too_large"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_each_protocols_terms(served: Served, url: str, code: str) -> None:
    places = {"/v1/chat/completions": "messages[0].content[0].image_url", "/v1/responses": "input[0].content[0].image_url"}
    for path, body in bodies(url).items():
        answer = httpx.post(served.url + path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        if path.startswith("/v1/messages"):
            assert "messages[0].content[0].source" in error["message"], error
        else:
            assert (error["code"], error["param"]) == (code, places.get(path, "messages[0].content[0].image_url"))


def test_official_clients_see_the_refusal(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="script", messages=asks("http://169.254.169.254/latest")["messages"])
    assert caught.value.code == "invalid_image_url"
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other, pytest.raises(anthropic.BadRequestError):
        other.messages.create(model="script", max_tokens=5, messages=bodies(URL)["/v1/messages"]["messages"])


@pytest.mark.case("B101")
def test_with_vision_forbidden_urls_reach_nobody() -> None:
    engine = ScriptEngine()
    engine.codec = ChatCodec(engine.tokenizer, vision=VISION)
    with origin(reply(PNG)) as host, origin(reply(PNG), host="::1") as other:
        images = ImageOptions(fetch=True, hosts=("*", f"*:{host.port}", f"*:{other.port}"))
        with serve(engine, ServerOptions(images=images)) as served:
            for form in FORBIDDEN:
                url = form.replace("P", str(other.port if "::1]" in form else host.port))
                answer = httpx.post(f"{served.url}/v1/chat/completions", json=asks(URL, url))
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "invalid_image_url"), url
                assert error["param"] == "messages[0].content[1].image_url"
        assert host.connections == other.connections == 0
    assert not engine.requests
