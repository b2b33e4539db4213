"""What images of requests may cost: limits in every protocol's terms, refusals before anything is decoded, memory, and the loop's time."""

from __future__ import annotations

import asyncio
import io
import logging
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from engines import seeing_checkpoint
from forebay.engine.preview import preview
from forebay.model.chat import ChatCodec
from forebay.server.app import App
from forebay.server.image_header import read_header
from forebay.server.limits import ImageOptions, ServerOptions
from forebay.server.loading import LoadingEngine
from image_hosts import VISION, asks, data_url, origin, picture, reply
from script_engine import ScriptEngine, Served, serve
from seeing_service import CHAT, COUNT, INPUT_TOKENS, MESSAGES, RESPONSES, image_block, image_part

PNG = picture()


def declares(width: int, height: int) -> bytes:
    """A small PNG whose header declares a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + PNG[33:]


def seeing(images: ImageOptions | None = None, **options: Any) -> Any:
    engine = ScriptEngine(**options)
    engine.codec = ChatCodec(engine.tokenizer, vision=VISION)
    return serve(engine, ServerOptions(images=images or ImageOptions()))


@pytest.fixture(scope="module")
def eyes() -> Iterator[Served]:
    with seeing() as served:
        yield served


def bodies(*files: bytes) -> dict[str, dict[str, Any]]:
    """The same images by path, in a tool result of each protocol."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    ask = {"role": "user", "content": "Look"}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image_block(data) for data in files]}
    messages = {"messages": [ask, used, {"role": "user", "content": [result]}], "max_tokens": 9}
    output = [{"type": "input_image", "image_url": data_url(data)} for data in files]
    chat = [
        ask,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": list(map(image_part, files))},
    ]
    made = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    responses = {"input": [ask, made, {"type": "function_call_output", "call_id": "a", "output": output}]}
    return {CHAT: {"messages": chat}, "/tokenize": {"messages": chat}, MESSAGES: messages, COUNT: messages, RESPONSES: responses,
            INPUT_TOKENS: responses}  # fmt: skip


PLACES = {MESSAGES: "messages[2].content[0].content[{}].source", RESPONSES: "input[2].output[{}].image_url"}
PLACES |= {COUNT: PLACES[MESSAGES], INPUT_TOKENS: PLACES[RESPONSES]}


@pytest.mark.parametrize(
    ("files", "code", "said", "at"),
    [
        ([PNG, declares(9000, 9)], "image_too_large", "9000 by 9 pixels, and at most 8192 a side", 1),
        ([*[PNG] * 14, declares(5000, 10)], "image_too_large", "at most 4096 a side", 14),
        ([declares(8000, 8000)] * 9, "image_too_large", "more than 512000000 pixels together", 8),
        ([PNG] * 601, "too_many_images", "max 600 images per request, got 601", None),
        ([PNG, b"no picture at all"], "image_parse_error", "unsupported image", 1),
    ],
    ids=["side", "side of many", "pixels", "number", "damaged"],
)
def test_limits_are_told_with_their_place(eyes: Served, files: list[bytes], code: str, said: str, at: int | None) -> None:
    for path, body in bodies(*files).items():
        answer = httpx.post(eyes.url + path, json=body, timeout=30)
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"], (path, error)
        place = "messages" if at is None else PLACES.get(path, "messages[2].content[{}].image_url").format(at)
        if error.get("param") is not None:
            assert (error["code"], error["param"]) == (code, "input" if at is None and path in (RESPONSES, INPUT_TOKENS) else place)
        elif at is not None:
            assert place in error["message"]
    assert not eyes.engine.requests


def test_a_file_is_found_out_in_every_protocol(eyes: Served) -> None:
    """What only decoding shows."""
    for path, body in bodies(PNG, picture("JPEG", (99, 99))[:700]).items():
        answer = httpx.post(eyes.url + path, json=body)
        if path in (COUNT, INPUT_TOKENS, "/tokenize"):
            assert answer.status_code == 200, "the header is whole, and nothing else is looked at"
            continue
        error = answer.json()["error"]
        assert answer.status_code == 400
        place = PLACES.get(path, "messages[2].content[{}].image_url").format(1)
        assert place in (error["message"], error.get("param")) or place in error["message"]
    assert not eyes.engine.requests


def test_an_image_that_would_vanish() -> None:
    with seeing(ImageOptions(max_side=100_000)) as served:
        answer = httpx.post(served.url + CHAT, json=asks(data_url(declares(1, 90_000))))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[0].content[0].image_url")
        assert "1 by 90000 pixels is too thin" in error["message"]
        assert not served.engine.requests


def test_a_prompt_that_is_too_long_is_refused_before_its_images_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with seeing(max_context=100) as served:
        pool = served.app._turns.images.pool
        fits, over = asks(*[data_url(PNG)] * 8), asks(*[data_url(PNG)] * 9)  # of 10 tokens each
        answer = httpx.post(served.url + CHAT, json={**fits, "thinking": {"type": "disabled"}})
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 8 * 10 + 7 + 4
        monkeypatch.setattr(pool, "render", None)
        for stream in (False, True):
            answer = httpx.post(served.url + CHAT, json={**over, "thinking": {"type": "disabled"}, "stream": stream})
            assert answer.status_code == 400
            assert "maximum context length is 100 tokens. However, you requested 102 tokens" in answer.json()["error"]["message"]
        huge = asks(*[data_url(PNG)] * 500)  # known from the sizes alone, before any text is encoded
        assert httpx.post(served.url + CHAT, json=huge).json()["error"]["code"] == "context_length_exceeded"
        listed = httpx.post(f"{served.url}/tokenize", json=huge)
        assert listed.status_code == 400 and "at most 400 tokens are listed" in listed.json()["error"]["message"]
        assert len(served.engine.requests) == 1


def test_canvases_are_counted_until_the_answer_ends() -> None:
    """One request alone may have all the room; what does not fit beside others is to be sent again later."""
    one = 3 * 84 * 98
    with seeing(ImageOptions(max_canvases=3 * one)) as served:
        different = [data_url(picture(size=(8, 6), kind=kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
        answer = httpx.post(served.url + CHAT, json=asks(*different))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "image_too_large")
        assert f"takes {4 * one} bytes, and the limit is {3 * one}" in answer.json()["error"]["message"]
        assert httpx.post(served.url + CHAT, json=asks(*[different[0]] * 9)).status_code == 200, "equal ones share their canvas"
        served.engine.hold = True
        held = threading.Thread(target=httpx.post, args=(served.url + CHAT,), kwargs={"json": asks(*different[:3]), "timeout": 60})
        held.start()
        served.wait(lambda: bool(served.engine.running))
        canvases = served.app._turns.images.canvases
        assert canvases.used == 3 * one
        answer = httpx.post(served.url + CHAT, json=asks(different[3]))
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
        assert httpx.post(served.url + COUNT, json=bodies(PNG)[COUNT]).status_code == 200, "counting holds none"
        served.engine.hold = False
        held.join(20)
        served.wait(lambda: not canvases.used)
        # A client that leaves gives its share back too.
        served.engine.hold = True
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(served.url + CHAT, json=asks(different[0]), timeout=1)
        served.wait(lambda: not canvases.used and not served.engine.running)
        served.engine.hold = False
        assert served.app._turns.bodies.used == 0


@pytest.mark.case("B116")
def test_a_ten_megabyte_image_is_taken_by_default(eyes: Served) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (1900, 1900, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).save(data, "PNG", compress_level=0)
    assert data.tell() > 10 << 20
    eyes.engine.requests.clear()
    answer = httpx.post(eyes.url + CHAT, json=asks(data_url(data.getvalue())), timeout=60)
    assert answer.status_code == 200, answer.text
    (image,) = eyes.engine.requests[0].images
    assert image.canvas.nbytes < 300_000, "what is kept is what the model sees"


@pytest.mark.case("B119")
def test_health_answers_while_ten_images_are_decoded(eyes: Served) -> None:
    """Other requests too; were the loop blocked, no probe could finish before it."""
    files = [picture("PNG", (2400 + 7 * number, 1800), compress_level=1) for number in range(10)]
    finished: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: finished.append(httpx.post(eyes.url + CHAT, json=asks(*map(data_url, files)), timeout=60)))
    thread.start()
    waits: list[float] = []
    with httpx.Client() as probe:
        while not finished:
            begun = time.monotonic()
            assert probe.get(f"{eyes.url}/health").status_code == 200
            waits.append(time.monotonic() - begun)
            assert probe.post(eyes.url + CHAT, json=asks(data_url(PNG))).status_code == 200
    thread.join()
    assert finished[0].status_code == 200
    assert len(waits) > 10 and sorted(waits)[len(waits) // 2] < 0.2


def test_no_pixels_in_logs_or_metrics(eyes: Served, caplog: pytest.LogCaptureFixture) -> None:
    url = data_url(picture(size=(33, 44)))
    with caplog.at_level(logging.DEBUG):
        for path, body in bodies(picture(size=(33, 44))).items():
            assert httpx.post(eyes.url + path, json=body).status_code == 200
        assert httpx.post(eyes.url + CHAT, json=asks(url, data_url(picture("JPEG", (99, 99))[:700]))).status_code == 400
    text = caplog.text + httpx.get(f"{eyes.url}/metrics").text + "".join(map(repr, eyes.engine.requests))
    assert url.partition(",")[2][:24] not in text and "[[[" not in text and "\\x" not in text


def test_images_in_documents_are_left_out_and_named(eyes: Served) -> None:
    """A document and a search result are one text each."""
    inside = [{"type": "text", "text": "words"}, image_block(PNG)]
    document = {"type": "document", "source": {"type": "content", "content": inside}}
    result = {"type": "search_result", "title": "t", "source": "s", "content": inside}
    body = {"messages": [{"role": "user", "content": [document, result, image_block(PNG)]}], "max_tokens": 9}
    eyes.engine.requests.clear()
    answer = httpx.post(eyes.url + MESSAGES, json=body)
    assert answer.status_code == 200
    assert len(eyes.engine.requests[0].images) == 1
    named = set(answer.headers["x-forebay-ignored"].replace(" ", "").split(","))
    assert {"messages[].content[].content[].image", "messages[].content[].source.content[].image"} <= named


def test_an_image_by_url_is_fetched_to_be_counted_but_not_decoded() -> None:
    with origin(reply(picture("PNG", (640, 200)))) as host:
        images = ImageOptions(fetch=True, hosts=(f"127.0.0.1:{host.port}",), allow_private=True)
        with seeing(images) as served:
            served.app._turns.images.pool.render = None  # type: ignore[assignment,method-assign]
            counted = []
            for url in (f"http://127.0.0.1:{host.port}/a.png", data_url(picture("PNG", (640, 200)))):
                counted.append(httpx.post(f"{served.url}/tokenize", json=asks(url)).json()["count"])
                source = {"type": "url", "url": url}
                blocks = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
                counted.append(httpx.post(served.url + COUNT, json={**blocks, "thinking": {"type": "adaptive"}}).json()["input_tokens"])
            assert len(set(counted)) == 1, counted
            assert len(host.requests) == 2


def test_a_model_that_loads_counts_images_too() -> None:
    """The stand-in for the engine knows from the configuration how pictures are cut."""
    found = preview(str(seeing_checkpoint()))
    assert found.vision is not None
    assert (found.vision.image_id, found.vision.config) == (VISION.image_id, VISION.config)
    app = App(LoadingEngine(found.tokenizer, "eyes", found.longest, lambda: "half of it", found.vision), ServerOptions())

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://eyes") as http:
            counted = await http.post(COUNT, json=bodies(PNG, PNG)[COUNT])
            blind = await http.post(COUNT, json=bodies()[COUNT])
            assert counted.json()["input_tokens"] == blind.json()["input_tokens"] + 2 * 10 + 1  # and a blank line
            assert (await http.post(CHAT, json=bodies(PNG)[CHAT])).status_code == 503

    try:
        asyncio.run(run())
    finally:
        app.close()


def test_the_size_of_a_gif_covers_its_first_frame() -> None:
    """A screen smaller than its picture, which decoders widen; comments and colours before it are passed over."""
    plain = bytearray(picture("GIF", (30, 20), comment=b"," * 300))
    for screen in ((30, 20), (4, 4), (50, 3)):
        data = bytes(plain[:6]) + struct.pack("<HH", *screen) + bytes(plain[10:])
        header = read_header(data)
        assert (header.width, header.height) == Image.open(io.BytesIO(data)).size == (max(30, screen[0]), max(20, screen[1]))
        for end in range(10, len(data), 7):
            assert read_header(data[:end]).kind == "gif"
