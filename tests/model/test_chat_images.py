"""Images in the chat encoding: where their spans stand in the prompt, which part of the body each is of, and what stands for none."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.model.chat import ChatCodec, ChatVision
from forebay.model.chat_images import is_image
from forebay.model.config import ModelConfig
from forebay.model.errors import RequestError
from forebay.model.image_plan import ImagePlan, plan
from forebay.model.tokenizer import IMAGE, Tokenizer
from noise_model import CONFIG, TOKENIZER
from vision_model import RELEASED, TINY_VISION

VISION = ChatVision(4087, RELEASED, "tower")


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(Tokenizer.load(TOKENIZER), vision=VISION)


def image(kind: str = "image_url") -> dict[str, Any]:
    if kind == "file":
        return {"type": "file", "file": {"file_data": "data:image/png;base64,AAAA"}}
    if kind == "input_file":
        return {"type": "input_file", "file_data": "DATA:image/png;base64,AAAA"}
    return {"type": kind, "image_url": {"url": "x"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def plans(**sizes: int) -> dict[str, ImagePlan]:
    """Plans of pictures of so many pixels by 100, by `m0c1` for content 1 of message 0."""
    return {f"messages.{name[1]}.content.{name[3]}": plan(size, 100, RELEASED) for name, size in sizes.items()}


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "file", "input_file"])
def test_every_spelling_becomes_a_span(codec: ChatCodec, kind: str) -> None:
    body = {"messages": [user(text("a"), image(kind), text("b"))], "thinking": False}
    prompt = codec.encode(body, plans=plans(m0c1=100))
    (placed,) = prompt.images
    assert placed.part == "messages.0.content.1" and placed.stop - placed.start == 184
    assert [i for i, token in enumerate(prompt.token_ids) if token == 4087] == list(range(placed.start, placed.stop))
    assert prompt.text.endswith(f"<｜User｜>a\n\n{IMAGE}\n\nb<｜Assistant｜></think>")
    plain = codec.encode({**body, "messages": [user(text("a"), text("\0"), text("b"))]}).token_ids
    cut = len(codec.encode({**body, "messages": [user(text("a\n\n"))]}).token_ids) - 2
    assert placed.start == cut and len(prompt.token_ids) == len(plain) - 1 + 184
    assert codec.count(body, plans=plans(m0c1=100)) == len(prompt.token_ids)


def test_spans_follow_their_parts_when_results_change_places(codec: ChatCodec) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    body = {
        "messages": [
            user(image(), text("x")),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "b", "content": [image()]},
            {"role": "tool", "tool_call_id": "b", "content": [image(), image()]},
            {"role": "tool", "tool_call_id": "a", "content": [text("r"), image()]},
        ]
    }
    given = plans(m0c0=100, m2c0=2000, m3c0=400, m3c1=500, m4c1=300)
    prompt = codec.encode(body, plans=given)
    wanted = ["messages.0.content.0", "messages.4.content.1", "messages.3.content.0", "messages.3.content.1"]
    assert [placed.part for placed in prompt.images] == wanted, "of two results of a call the last counts"
    assert [placed.stop - placed.start for placed in prompt.images] == [given[part].tokens for part in wanted]
    assert codec.count(body, plans=given) == len(prompt.token_ids)
    assert codec.encode(body, plans=given).token_ids == prompt.token_ids, "nothing of the stand-in is left in the prompt"


@pytest.mark.case("B114")
@pytest.mark.parametrize("typed", [IMAGE, "<｜image｜>", f"a{IMAGE * 3}", f"<image {'0' * 32}>"])
def test_what_is_typed_is_text(codec: ChatCodec, typed: str) -> None:
    blind = ChatCodec(Tokenizer.load(TOKENIZER))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"k": "{typed}"}}'}}
    messages = [
        {"role": "system", "content": typed},
        user(text(typed)),
        {"role": "assistant", "content": typed, "reasoning_content": typed, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": typed},
    ]
    prompt = codec.encode({"messages": messages})
    assert 4087 not in prompt.token_ids and prompt.images == ()
    assert prompt.token_ids == blind.encode({"messages": messages}).token_ids
    (placed,) = codec.encode({"messages": [*messages, user(text(typed), image(), text(typed))]}, plans=plans(m4c1=100)).images
    assert placed.part == "messages.4.content.1"


def test_where_there_may_be_none(codec: ChatCodec) -> None:
    for role in ("assistant", "latest_reminder"):
        with pytest.raises(RequestError, match=f"Image in {role} message is not supported") as caught:
            codec.encode({"messages": [{"role": role, "content": [image()]}, user(text("x"))]}, plans=plans(m0c0=100))
        assert (caught.value.param, caught.value.code) == ("messages.0.content.0", "invalid_value")
    with pytest.raises(RequestError, match="an image that cannot be read") as caught:
        codec.encode({"messages": [user(image(), image())]}, plans=plans(m0c0=100))
    assert caught.value.param == "messages.0.content.1"
    with pytest.raises(RequestError, match="only text files"):
        codec.encode({"messages": [user({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}})]})
    assert not is_image({"type": "file", "file": 5}) and not is_image({"type": ["image"]}) and not is_image(text("data:image/png,"))


def test_images_count_towards_the_limit(codec: ChatCodec) -> None:
    body = {"messages": [user(*[image()] * 3)], "thinking": False}
    given = plans(m0c0=100, m0c1=100, m0c2=100)
    length = len(codec.encode(body, plans=given).token_ids)
    assert codec.encode(body, plans=given, max_tokens=length, slack=1).token_ids
    for limit, slack in ((length - 1, 1), (length // 2 - 1, 2), (50, 1)):
        with pytest.raises(RequestError) as caught:
            codec.encode(body, plans=given, max_tokens=limit, slack=slack)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.lengths is not None and slack * limit < caught.value.lengths[0] <= length


def test_the_id_is_the_configurations_whatever_the_vocabulary_calls_it() -> None:
    """A vocabulary of another revision spells the placeholder otherwise (spec/vision.md §5)."""
    data = TOKENIZER.read_text("utf-8").replace(IMAGE, "<｜image2｜>").encode()
    other = ChatCodec(Tokenizer(data, "other"), vision=VISION)
    prompt = other.encode({"messages": [user(image())]}, plans=plans(m0c0=100))
    assert prompt.token_ids.count(4087) == 184


def test_the_eyes_of_a_configuration() -> None:
    assert ChatVision.of(ModelConfig.from_dict(CONFIG)) is None
    found = ChatVision.of(ModelConfig.from_dict({**CONFIG, "vision_config": TINY_VISION}), "t")
    assert found is not None and (found.image_id, found.tower, found.config.patch_size) == (4087, "t", 14)
    cut = plan(100, 100, RELEASED)
    digests = {vision.digest(pixels, cut) for vision in (found, VISION) for pixels in (bytes(32), bytes(31) + b"1")}
    assert len(digests) == 4 and {len(digest) for digest in digests} == {32}
