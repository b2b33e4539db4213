"""Requests with images to a model that sees them, over the real application and a real engine: every protocol, and the cache."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from forebay.engine.types import PromptImage
from forebay.model.image_pixels import render
from forebay.model.image_plan import ImagePlan, plan
from forebay.model.vision import VisionTower
from image_hosts import data_url, picture
from seeing_service import (
    CHAT,
    COUNT,
    INPUT_TOKENS,
    MESSAGES,
    PLAIN,
    RESPONSES,
    Seeing,
    chat_body,
    image_block,
    image_part,
    in_every_protocol,
    said,
    seeing_server,
    streamed,
    tokens,
)

IMAGE_ID = 4087
TYPED = "<｜deepseek_image｜>"
EXACT = {"forebay": {"prefill": "exact", "replay": "exact"}}  # a prefix from the cache then gives the text of a cold run
_salts = itertools.count()


def png(pixels: NDArray[np.uint8], **options: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", **options)
    return data.getvalue()


def noise(number: int, width: int = 84, height: int = 84) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


ONE, TWO = png(noise(1)), png(noise(2))
WIDE = picture("PNG", (2000, 200), "RGBA")  # with transparency; of 44 positions, 30 of detail "low"


def declares(width: int, height: int) -> bytes:
    """A small PNG whose header declares a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return ONE[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + ONE[33:]


def alone() -> dict[str, str]:
    """What keeps a request from sharing anything with others."""
    return {"cache_salt": f"alone {next(_salts)}"}


@pytest.fixture(scope="module")
def eyes() -> Iterator[Seeing]:
    with seeing_server() as served:
        yield served


@pytest.fixture
def seen(eyes: Seeing) -> Iterator[Seeing]:
    assert eyes.engine.encoder is not None
    eyes.requests.clear()
    eyes.engine.encoder.cache.clear()
    yield eyes
    eyes.settle()


def spans(ids: Any) -> list[tuple[int, int]]:
    """Where the image's id stands in a prompt."""
    places = [i for i, token in enumerate(ids) if token == IMAGE_ID]
    starts = [i for i in places if i - 1 not in places]
    return [(start, next(i for i in itertools.count(start) if i not in places)) for start in starts]


# ---- the same in every protocol


@pytest.mark.parametrize(
    "parts", [("What is", ONE, "this?"), (ONE, "What is this?"), ("Compare.", ONE, TWO, "Well?", ONE)], ids=["between", "first", "several"]
)
def test_every_protocol_shows_the_same_picture(seen: Seeing, parts: tuple[str | bytes, ...]) -> None:
    vision = seen.client.codec.vision
    assert vision is not None
    texts = set()
    for path, body in in_every_protocol(*parts).items():
        whole = seen.ask(path, {**body, **alone()})
        stream = seen.post(path, {**body, **alone(), "stream": True})
        texts |= {said(path, whole), streamed(path, stream.text)}
        assert tokens(path, whole) == (len(seen.requests[0].prompt_ids), 0), path
    assert len(texts) == 1 and texts != {""}
    assert len(seen.requests) == 6
    first = seen.requests[0]
    files = [part for part in parts if isinstance(part, bytes)]
    wanted = []
    for data, image in zip(files, first.images, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        cut = plan(pixels.shape[1], pixels.shape[0], vision.config)
        canvas = render(pixels, cut)
        assert np.array_equal(image.canvas, canvas)
        wanted.append(PromptImage(image.start, image.stop, cut, canvas, vision.digest(blake3(canvas.tobytes()).digest(), cut)))
    for request in seen.requests:
        assert list(request.prompt_ids) == list(first.prompt_ids)
        assert list(request.images) == wanted
    assert sum(stop - start for start, stop in spans(first.prompt_ids)) == sum(image.plan.tokens for image in wanted) == 8 * len(files)
    text = seen.llm.tokenizer.decode(
        [token for i, token in enumerate(first.prompt_ids) if not any(s.start < i < s.stop for s in first.images)]
    )
    assert text.endswith("<｜User｜>" + "\n\n".join(p if isinstance(p, str) else TYPED for p in parts) + "<｜Assistant｜></think>")


def test_counts_are_those_of_the_prompt_and_nothing_is_decoded(seen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = in_every_protocol("Look:", picture("JPEG", (640, 200)), WIDE)
    prompt = len(seen.requests[0].prompt_ids) if seen.ask(CHAT, bodies[CHAT]) else 0
    monkeypatch.setattr(seen.app._turns.images.pool, "render", None)
    assert seen.ask(COUNT, bodies[MESSAGES]) == {"input_tokens": prompt}
    assert seen.ask(INPUT_TOKENS, bodies[RESPONSES])["input_tokens"] == prompt
    listed = seen.ask("/tokenize", {**bodies[CHAT], "return_token_strs": True, "return_prompt": True})
    assert listed["count"] == prompt and listed["tokens"] == list(seen.requests[0].prompt_ids)
    assert listed["prompt"].count(TYPED) == 2
    # More than the engine has room for is counted too.
    many = in_every_protocol(*[WIDE] * 200)[MESSAGES]
    assert seen.ask(COUNT, many)["input_tokens"] > 200 * 44 > seen.client.max_context


def test_choices_share_the_picture(seen: Seeing) -> None:
    answer = seen.ask(CHAT, chat_body("Hm", ONE, n=3, **alone()))
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
    assert len(seen.requests) == 3
    assert all(request.images is seen.requests[0].images and request.share for request in seen.requests)
    assert answer["usage"]["prompt_tokens"] == len(seen.requests[0].prompt_ids)


@pytest.mark.case("B090")
def test_options_that_look_at_the_prompt(seen: Seeing) -> None:
    """Scores of the prompt, ids of it, seeds, stops and one token: positions of images count like any other."""
    body = chat_body("Hm", ONE, prompt_logprobs=0, return_token_ids=True, logprobs=True, n=2, seed=3, **alone())
    answer = seen.ask(CHAT, {**body, "temperature": 1})
    ids = list(seen.requests[0].prompt_ids)
    assert answer["prompt_token_ids"] == ids and len(answer["prompt_logprobs"]) == len(ids)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 2
    again = seen.ask(CHAT, {**body, "temperature": 1, **alone()})
    assert [choice["message"] for choice in again["choices"]] == [choice["message"] for choice in answer["choices"]]
    assert seen.ask(CHAT, chat_body("Hm", ONE, max_tokens=1, stop=["x"], **alone()))["usage"]["completion_tokens"] == 1


# ---- where images may be


def test_images_of_tool_results_follow_their_results(seen: Seeing) -> None:
    """Results are put into the order of the calls, and their images with them; each protocol has its own form of this."""
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in "ab"]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    given = {"b": [image_part(TWO)], "a": [{"type": "text", "text": "one"}, image_part(ONE)]}
    results = [{"role": "tool", "tool_call_id": name, "content": parts} for name, parts in given.items()]
    ask, end = {"role": "user", "content": "Look"}, {"role": "user", "content": [image_part(WIDE), {"type": "text", "text": "And this?"}]}
    chat = {"messages": [ask, {"role": "assistant", "content": None, "tool_calls": calls}, *results, end], "tools": [tool], **PLAIN}
    blocks = {"b": [image_block(TWO)], "a": [{"type": "text", "text": "one"}, image_block(ONE)]}
    messages = {
        "messages": [
            ask,
            {"role": "assistant", "content": [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in "ab"]},
            {
                "role": "user",
                "content": [
                    *({"type": "tool_result", "tool_use_id": name, "content": content} for name, content in blocks.items()),
                    image_block(WIDE),
                    {"type": "text", "text": "And this?"},
                ],
            },
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
        "temperature": 0,
        "max_tokens": 6,
    }
    outputs = {
        "b": [{"type": "input_image", "image_url": data_url(TWO)}],
        "a": [{"type": "input_text", "text": "one"}, {"type": "input_image", "image_url": data_url(ONE)}],
    }
    responses = {
        "input": [
            ask,
            *({"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"} for name in "ab"),
            *({"type": "function_call_output", "call_id": name, "output": output} for name, output in outputs.items()),
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": data_url(WIDE)}, {"type": "input_text", "text": "And this?"}],
            },
        ],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
        "temperature": 0,
        "max_output_tokens": 6,
        "thinking": False,
    }
    for path, body in {CHAT: chat, MESSAGES: messages, RESPONSES: responses}.items():
        seen.ask(path, {**body, **alone()})
    first = seen.requests[0]
    text = seen.llm.tokenizer.decode(first.prompt_ids)
    eight, wide = TYPED * 8, TYPED * 44
    result = "<tool_result>one\n\n{}</tool_result>\n\n<tool_result>{}</tool_result>\n\n{}\n\nAnd this?"
    assert result.format(eight, eight, wide) in text
    assert np.array_equal(first.images[0].canvas, noise(1)) and np.array_equal(first.images[1].canvas, noise(2))
    for request in seen.requests:
        assert list(request.prompt_ids) == list(first.prompt_ids) and request.images == first.images


def test_images_in_other_messages(seen: Seeing) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": [image_part(ONE)]}, {"role": "user", "content": "Well?"}]
        seen.ask(CHAT, {"messages": messages, **PLAIN})
        assert len(seen.requests[-1].images) == 1
    for role in ("assistant", "latest_reminder"):
        messages = [{"role": role, "content": [{"type": "text", "text": "x"}, image_part(ONE)]}, {"role": "user", "content": "Well?"}]
        answer = seen.post(CHAT, {"messages": messages, **PLAIN})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "messages[0].content[1]", "invalid_value")
        assert f"Image in {role} message is not supported" in error["message"]


def test_a_surplus_result_takes_its_image_with_it(seen: Seeing) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": "a", "content": [image_part(data)]} for data in (ONE, TWO)]
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, *results], **PLAIN}
    seen.ask(CHAT, body)
    (image,) = seen.requests[0].images
    assert np.array_equal(image.canvas, noise(2))
    assert seen.ask("/tokenize", body)["count"] == len(seen.requests[0].prompt_ids)


@pytest.mark.case("B114")
def test_a_typed_placeholder_stands_for_nothing(seen: Seeing) -> None:
    """Nor does what the encoding writes for an image meanwhile, if somebody saw it."""
    result = {"role": "tool", "tool_call_id": "a", "content": TYPED}
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": f'{{"x": "{TYPED}"}}'}}
    messages = [
        {"role": "system", "content": TYPED},
        {"role": "user", "content": f"{TYPED} <image 0123> <｜image｜> {TYPED}"},
        {"role": "assistant", "content": TYPED, "reasoning_content": TYPED, "tool_calls": [call]},
        result,
        {"role": "user", "content": [{"type": "text", "text": TYPED}, image_part(ONE), {"type": "text", "text": TYPED}]},
    ]
    seen.ask(CHAT, {"messages": messages[:4], **PLAIN})
    assert IMAGE_ID not in seen.requests[0].prompt_ids and seen.requests[0].images == ()
    seen.ask(CHAT, {"messages": messages, **PLAIN})
    request = seen.requests[1]
    assert spans(request.prompt_ids) == [(image.start, image.stop) for image in request.images] and len(request.images) == 1
    assert seen.llm.tokenizer.decode(request.prompt_ids).count(TYPED) == 8 + 8
    # Raw prompts have no images.
    answer = seen.post("/v1/completions", {"prompt": f"a {TYPED}", "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


# ---- the cache


def test_the_same_picture_is_taken_from_the_cache(seen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = count_encodings(monkeypatch)
    text = "Some words before it"
    cold = seen.ask(CHAT, chat_body(text, ONE, text * 3, **EXACT, **alone()))
    for path, body in in_every_protocol(text, ONE, text * 3).items():
        first, again = seen.ask(path, body), seen.ask(path, body)
        total, cached = tokens(path, again)
        assert total == tokens(path, first)[0] == cold["usage"]["prompt_tokens"]
        assert cached > seen.requests[-1].images[0].stop
    hot = seen.ask(CHAT, chat_body(text, ONE, text * 3, **EXACT))
    assert said(CHAT, hot) == said(CHAT, cold) and encoded == [8, 8], "one picture, encoded once for each tenant"
    # The same pixels in another file are the same picture; others at the same place are not.
    same = seen.ask(CHAT, chat_body(text, png(noise(1), optimize=True, compress_level=1), text * 3))
    assert tokens(CHAT, same)[1] > seen.requests[-1].images[0].stop
    other = seen.ask(CHAT, chat_body(text, TWO, text * 3, **EXACT))
    assert tokens(CHAT, other)[1] <= seen.requests[-1].images[0].start
    assert said(CHAT, other) == said(CHAT, seen.ask(CHAT, chat_body(text, TWO, text * 3, **EXACT, **alone()))) != said(CHAT, cold)


@pytest.mark.case("B036")
def test_pictures_whose_digests_are_nearly_equal_share_nothing(seen: Seeing) -> None:
    """The last 16 bits agree; also one file with two details."""
    left, right = _twins(seen)
    text = "Some words that fill two blocks and more of the cache before the picture"
    answers = [(seen.ask(CHAT, chat_body(text, data, "Well?", **EXACT)), data) for data in (left, right)]
    digests = [request.images[0].digest for request in seen.requests]
    assert digests[0] != digests[1] and digests[0][-2:] == digests[1][-2:]
    for answer, data in answers:
        assert tokens(CHAT, answer)[1] <= seen.requests[0].images[0].start
        assert said(CHAT, answer) == said(CHAT, seen.ask(CHAT, chat_body(text, data, "Well?", **EXACT, **alone())))
    seen.requests.clear()
    for detail, length in (("high", 44), ("low", 30), ("auto", 44), ("original", 44), ("low", 30)):
        parts = [{"type": "text", "text": text}, image_part(WIDE, detail=detail)]
        body = {"messages": [{"role": "user", "content": parts}], **PLAIN, **EXACT}
        answer = seen.ask(CHAT, body)
        image = seen.requests[-1].images[0]
        assert image.stop - image.start == length
        if len(seen.requests) <= 2:
            assert tokens(CHAT, answer)[1] <= image.start
            assert said(CHAT, answer) == said(CHAT, seen.ask(CHAT, {**body, **alone()}))
    assert len({request.images[0].digest for request in seen.requests}) == 2


def _twins(seen: Seeing) -> tuple[bytes, bytes]:
    """Two pictures that differ in one value and whose digests have the same last 16 bits."""
    vision = seen.client.codec.vision
    assert vision is not None
    cut, known = plan(84, 84, vision.config), dict[bytes, NDArray[np.uint8]]()
    for number in itertools.count():
        pixels = noise(5)
        pixels[0, 0] = (*divmod(number, 256), 7)
        other = known.setdefault(vision.digest(blake3(pixels.tobytes()).digest(), cut)[-2:], pixels)
        if other is not pixels:
            return png(other), png(pixels)
    raise AssertionError


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every picture that a tower encodes from now on."""
    found: list[int] = []
    plain = VisionTower.encode

    def encode(tower: VisionTower, patches: Tensor, cut: ImagePlan, *rest: Any) -> Tensor:
        made = plain(tower, patches, cut, *rest)
        found.append(made.shape[0])
        return made

    monkeypatch.setattr(VisionTower, "encode", encode)
    return found


@pytest.mark.case("B019")
def test_as_many_positions_as_rows(seen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 14 by 14 pixels to 1344 by 1344, odd shapes among them, behind texts of different lengths."""
    encoded = count_encodings(monkeypatch)
    sizes = [(14, 14), (15, 1344), (1344, 13), (337, 911), (41, 43), (1344, 1344), (1, 1), (83, 85)]
    for number, (width, height) in enumerate(sizes):
        text = "a b c"[: 2 * (number % 4)]
        answer = seen.ask(CHAT, chat_body(text, picture(size=(width, height), kind="PNG"), **alone()))
        request = seen.requests[-1]
        (image,) = request.images
        assert encoded[-1] == image.stop - image.start == image.plan.tokens
        assert spans(request.prompt_ids) == [(image.start, image.stop)]
        assert answer["usage"]["prompt_tokens"] == len(request.prompt_ids)
    assert len(encoded) == len(sizes)


@pytest.mark.case("B019")
def test_a_picture_of_too_few_rows_ends_its_request_alone(seen: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = VisionTower.encode

    def encode(tower: VisionTower, patches: Tensor, cut: ImagePlan, *rest: Any) -> Tensor:
        made = plain(tower, patches, cut, *rest)
        return made[:-1] if cut.tokens == 44 else made

    monkeypatch.setattr(VisionTower, "encode", encode)
    answers = [seen.start(CHAT, chat_body("Hm", data, **alone())) for data in (ONE, WIDE, TWO)]
    good, bad, other = (answer.result(60) for answer in answers)
    assert (good.status_code, other.status_code) == (200, 200)
    assert (bad.status_code, bad.json().get("error", {}).get("code")) == (500, "internal_error")
    again = seen.post(CHAT, chat_body("Hm", WIDE, **alone()))
    assert again.status_code == 500, "nothing of it was remembered"
