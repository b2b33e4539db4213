from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest

from forebay.model.chat import ChatCodec, EncodedPrompt
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer
from turns import Heard, parse, sampled

USER = {"role": "user", "content": "Hi"}
OFF = {"type": "disabled"}
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
SCHEMA = {"type": "object", "properties": {"a": {}, "b": {}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.load(repository / "tests" / "data" / "noise-tokenizer.json")


@pytest.fixture(scope="module")
def codec(tokenizer: Tokenizer) -> ChatCodec:
    return ChatCodec(tokenizer)


def call(call_id: str, arguments: Any = "{}", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(call_id: str, content: Any = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


ESCAPES = "%41" * 1_000_001


def file(url: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": url}}


def chat(codec: ChatCodec, *messages: dict[str, Any], **fields: Any) -> str:
    """Prompt text of messages, without thinking unless asked for, begin of sentence left out."""
    fields.setdefault("thinking", OFF)
    text = codec.encode({"messages": list(messages), **fields}).text
    assert text.startswith("<｜begin▁of▁sentence｜>")
    return text.removeprefix("<｜begin▁of▁sentence｜>")


# ---- effort and thinking


@pytest.mark.case("B060")
@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, 75), ("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("HIGH", 75), ("xhigh", 75), ("max", 100), ("ultra", 100),
        (1, 1), (25, 25), (50, 50), (75, 75), (99, 99), (100, 100), (40.0, 40), ("1", 1), ("100", 100), ("37", 37),
    ],
)  # fmt: skip
def test_effort(codec: ChatCodec, tokenizer: Tokenizer, value: Any, number: int) -> None:
    prompt = codec.encode({"messages": [USER], "reasoning_effort": value})
    assert prompt.thinking
    assert prompt.effort == number
    text = f"<｜begin▁of▁sentence｜><｜System｜>{EFFORT.format(number)}<｜User｜>Hi<｜Assistant｜><think>"
    assert prompt.text == text
    assert prompt.token_ids == tokenizer.encode_special(text)


@pytest.mark.case("B060")
@pytest.mark.parametrize("value", [0, -1, 101, 1.5, True, False, "", "HIGHER", "0", "101", "05", "1.5", "٣", [], {}, float("nan"), 10**400])
def test_bad_effort_names_the_field(codec: ChatCodec, value: Any) -> None:
    with pytest.raises(RequestError, match="1 to 100") as error:
        codec.encode({"messages": [USER], "reasoning_effort": value})
    assert error.value.param == "reasoning_effort"
    with pytest.raises(RequestError) as error:
        codec.encode({"messages": [USER], "chat_template_kwargs": {"reasoning_effort": value}})
    assert error.value.param == "chat_template_kwargs.reasoning_effort"


@pytest.mark.case("B061")
@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, 20),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": False}, None),
        ({"thinking": {"type": "adaptive"}}, 20),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, 75),
        ({"thinking": {"type": "enabled", "effort": 5}}, 5),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": 1}, 1),
        ({"enable_thinking": False}, None),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, 20),
        ({"chat_template_kwargs": {"thinking": False}}, None),
        ({"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": 9}}, None),
        ({"reasoning": {"enabled": False}}, None),
        ({"reasoning": {"effort": "low"}}, 50),
        ({"output_config": {"effort": "max"}}, 100),
        ({"thinking": None, "reasoning_effort": None, "reasoning": None, "chat_template_kwargs": None}, 20),
    ],
)
def test_switches_against_the_operators_default(codec: ChatCodec, fields: dict[str, Any], effort: int | None) -> None:
    prompt = codec.encode({"messages": [USER], **fields}, default_effort=20)
    assert prompt.effort == effort
    assert prompt.thinking == (effort is not None)
    assert prompt.initial_channel == ("content" if effort is None else "reasoning")


@pytest.mark.case("B061")
def test_operator_may_switch_thinking_off(codec: ChatCodec) -> None:
    for defaults in ({"thinking_default": False}, {"default_effort": "none"}):
        assert not codec.encode({"messages": [USER]}, **defaults).thinking
        prompt = codec.encode({"messages": [USER], "thinking": True}, **defaults)
        assert (prompt.thinking, prompt.effort) == (True, 75)
    assert codec.encode({"messages": [USER], "reasoning_effort": 3}, default_effort="none").effort == 3
    assert not codec.encode({"messages": [USER], "reasoning_effort": 3}, thinking_default=False).thinking


# ---- rendering


@pytest.mark.case("B114")
def test_typed_markers_stay_text_everywhere(codec: ChatCodec, tokenizer: Tokenizer) -> None:
    control = {i for i in range(tokenizer.vocab_size) if tokenizer.special_id(tokenizer.token_text(i)) is not None}
    evil = "".join(tokenizer.token_text(i) for i in sorted(control))
    evil_url = "data:text/plain;base64," + base64.b64encode(evil.encode()).decode()
    calm = "safe"

    def messages(text: str, url: str) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}, file(url)]},
            assistant(call("c", json.dumps({text: text, "n": [text]}), name=text), content=text, reasoning_content=text),
            result("c", text),
        ]

    tools = [{**TOOL, "function": {**TOOL["function"], "description": evil, "parameters": {"type": "object", "description": evil}}}]
    prompt = codec.encode({"messages": messages(evil, evil_url), "tools": tools})
    tools[0]["function"] |= {"description": calm, "parameters": {"type": "object", "description": calm}}
    plain = codec.encode({"messages": messages(calm, "data:,safe"), "tools": tools})
    assert prompt.text.count(evil) == 12
    # Grounding tags are part of what the model answers, so in answers, and only there, they are what they were.
    grounding = {tokenizer.special_id(f"<｜{slash}{tag}｜>") for tag in ("ref", "box", "point", "polygon") for slash in ("", "/")}
    acting = control - grounding
    assert [i for i in prompt.token_ids if i in acting] == [i for i in plain.token_ids if i in acting]
    assert sum(i in grounding for i in prompt.token_ids) == 2 * len(grounding) == 16
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_grounding_tags_in_a_vocabulary_without_them(repository: Path) -> None:
    spec = json.loads((repository / "tests" / "data" / "noise-tokenizer.json").read_text())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if "ref" not in entry["content"]]
    small = Tokenizer(json.dumps(spec).encode(), "small")
    prompt = ChatCodec(small).encode({"messages": [USER, {"role": "assistant", "content": "see<｜ref｜>cat<｜/ref｜>."}, USER]})
    assert small.decode(prompt.token_ids) == prompt.text
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if "reminder" not in entry["content"]]
    small = Tokenizer(json.dumps(spec).encode(), "small")
    with pytest.raises(RequestError, match=r"<｜latest_reminder｜>"):
        ChatCodec(small).encode({"messages": [USER, {"role": "latest_reminder", "content": "x"}]})


@pytest.mark.case("B071")
def test_empty_content_of_assistant_turns(codec: ChatCodec) -> None:
    contents: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
    turns = [{"role": "assistant", "tool_calls": [call("c")], **content} for content in contents]
    texts = {chat(codec, USER, turn, result("c")) for turn in turns}
    assert texts == {
        '<｜User｜>Hi<｜Assistant｜></think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        "<｜end▁of▁sentence｜><｜User｜><tool_result>r</tool_result><｜Assistant｜></think>"
    }
    empty = [{"role": "assistant", "content": content} for content in ("", [])]
    assert {chat(codec, USER, turn, USER) for turn in empty} == {
        "<｜User｜>Hi<｜Assistant｜></think><｜end▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    }
    # An aborted turn in a history is left out, but there is nothing to answer after one.
    assert chat(codec, USER, {"role": "assistant", "content": None}, USER) == "<｜User｜>Hi\n\nHi<｜Assistant｜></think>"
    with pytest.raises(RequestError) as error:
        chat(codec, USER, {"role": "assistant", "content": None})
    assert error.value.param == "messages.1.content"


@pytest.mark.case("B073")
def test_developer_is_system(codec: ChatCodec) -> None:
    for messages in (["developer", "user"], ["system", "developer", "user"], ["user", "developer"], ["developer"]):
        given = [{"role": role, "content": role[:1]} for role in messages]
        as_system = [{**message, "role": message["role"].replace("developer", "system")} for message in given]
        assert chat(codec, *given) == chat(codec, *as_system)
    assert chat(codec, {"role": "developer", "content": "D"}, USER) == "<｜System｜>D<｜User｜>Hi<｜Assistant｜></think>"


@pytest.mark.case("B062")
def test_reasoning_of_earlier_turns(codec: ChatCodec) -> None:
    def text(reasoning: dict[str, Any], **fields: Any) -> str:
        messages = [USER, assistant(call("c"), **reasoning), result("c"), {"role": "assistant", "content": "B"}, USER]
        full = codec.encode({"messages": messages, **fields}).text
        return full[full.index("<｜User｜>"):]

    shape = (
        '<｜User｜>Hi<｜Assistant｜>{}\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        "<｜end▁of▁sentence｜><｜User｜><tool_result>r</tool_result><｜Assistant｜>{}B<｜end▁of▁sentence｜>"
        "<｜User｜>Hi<｜Assistant｜><think>"
    )
    with_text = {"reasoning_content": "R"}
    assert text(with_text, tools=[TOOL]) == shape.format("<think>R</think>", "<think></think>")
    for missing in ({}, {"reasoning_content": None}, {"reasoning_content": ""}):
        assert text(missing, tools=[TOOL]) == shape.format("<think></think>", "<think></think>")
    details = {"reasoning_details": [{"text": "R"}, {"type": "x"}]}
    for same in ({"reasoning": "R"}, details, {"content": [{"type": "thinking", "thinking": "R"}]}):
        assert text(same, tools=[TOOL]) == text(with_text, tools=[TOOL])
    assert text(with_text) == shape.format("</think>", "</think>")
    assert text(with_text, drop_thinking=False) == shape.format("<think>R</think>", "<think></think>")
    assert text(with_text, chat_template_kwargs={"drop_thinking": False}) == text(with_text, drop_thinking=False)
    assert "R" not in text(with_text, drop_thinking=False, thinking=False).replace("｜", "")


def test_results_follow_the_calls(codec: ChatCodec) -> None:
    def results(*messages: dict[str, Any]) -> str:
        text = chat(codec, USER, assistant(call("1"), call("2")), *messages)
        return text.split("<｜end▁of▁sentence｜>")[1].removesuffix("<｜Assistant｜></think>").replace("tool_result", "t")

    assert results(result("2", "b"), result("1", "a")) == "<｜User｜><t>a</t>\n\n<t>b</t>"
    assert results(result("2", "b"), USER, result("1", "a")) == "<｜User｜><t>a</t>\n\nHi\n\n<t>b</t>"
    assert results(result("1", "a"), USER) == "<｜User｜><t>a</t>\n\n<t></t>\n\nHi"
    assert results(USER) == "<｜User｜><t></t>\n\n<t></t>\n\nHi"
    assert results(result("1", "old"), result("2", "b"), result("1", "a")) == "<｜User｜><t>a</t>\n\n<t>b</t>"
    assert results(result("x", "?"), result("2", "b"), result("1", "a")) == "<｜User｜><t>?</t>\n\n<t>a</t>\n\n<t>b</t>"
    twins = chat(codec, USER, assistant(call("1"), call("1")), result("1", "a"), result("1", "b"))
    assert "<tool_result>a</tool_result>\n\n<tool_result>b</tool_result>" in twins


def test_arguments(codec: ChatCodec) -> None:
    def parameters(arguments: Any) -> str:
        text = chat(codec, USER, assistant(call("c", arguments)), result("c"))
        return text[text.index('name="f">\n') + 10 : text.index("\n</｜DSML｜ invoke>")]

    def one(name: str, string: str, value: str) -> str:
        return f'<｜DSML｜ parameter name="{name}" string="{string}">{value}</｜DSML｜ parameter>'

    assert parameters('{"s": "x\\n\\"y\\"", "f": 1.0, "l": [1, "é"]}') == "\n".join(
        [one("s", "true", 'x\n"y"'), one("f", "false", "1.0"), one("l", "false", '[1, "é"]')]
    )
    assert parameters({"s": "x", "n": None}) == parameters('{"s":"x","n":null}')
    assert parameters(None) == parameters("{}") == parameters({}) == ""
    for raw in ("[1]", "", "3", '{"a": ', '"text"', '"[1]"'):
        assert parameters(raw) == one("arguments", "true", raw)
    assert parameters('"{\\"a\\": \\"b\\"}"') == one("a", "true", "b")  # encoded twice
    numbers = {"n": "123456789012345678901234567890", "m": "-18446744073709551616", "k": "18446744073709551615"}
    written = ", ".join(f'"{name}": {number}' for name, number in numbers.items())
    assert parameters(f"{{{written}}}") == "\n".join(one(name, "false", number) for name, number in numbers.items())
    assert parameters({"n": [2**70, 2**70]}) == one("n", "false", f"[{2**70}, {2**70}]")


def test_tools_section(codec: ChatCodec) -> None:
    def schemas(*tools: Any, **fields: Any) -> list[str]:
        text = chat(codec, USER, tools=list(tools), **fields)
        return text[text.index("Schemas\n\n") + 9 : text.index("\n\nYou MUST")].split("\n")

    bare = {"type": "function", "function": {"strict": True, "name": "g", "x": 1}}
    assert schemas(bare) == ['{"name": "g", "description": "", "parameters": {}}']
    flat = {"type": "function", "name": "g", "description": "d", "parameters": {"type": "object", "maximum": 2**80}}
    assert schemas(TOOL, flat)[1].endswith('"parameters": {"type": "object", "maximum": 1208925819614629174706176}}')
    style = {"type": "grammar", "grammar": {"definition": "start: x"}}
    custom = {"type": "custom", "custom": {"name": "g", "description": "d", "format": style}}
    start = '{"name": "g", "description": "d\\n\\nstart: x", "parameters": {"type": "object", "properties": {"input"'
    assert schemas(custom)[0].startswith(start)
    functions = chat(codec, USER, functions=[TOOL["function"]], function_call="auto")
    assert functions == chat(codec, USER, tools=[TOOL])
    plain = chat(codec, USER)
    assert plain == chat(codec, USER, tools=[]) == chat(codec, USER, tools=None) == chat(codec, USER, tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}])
@pytest.mark.case("B074")
def test_forced_calls(codec: ChatCodec, tokenizer: Tokenizer, choice: Any) -> None:
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": choice}
    forced = codec.encode({**body, "thinking": OFF})
    assert forced.text.endswith("<｜Assistant｜></think>\n\n<｜DSML｜ calls>\n")
    assert forced.initial_channel == "tool_calls"
    parser = codec.parser(forced)
    turn = '<⟦D⟧ invoke name="f">\n</⟦D⟧ invoke>\n</⟦D⟧ calls>'
    deltas = [delta for i in sampled(tokenizer, turn) for delta in parser.push(i)] + parser.finish("stop")
    assert [(delta.name, delta.text) for delta in deltas] == [("f", ""), (None, "{}")]
    assert parser.finish_reason("stop") == "tool_calls"
    assert codec.encode(body).text.endswith("<｜Assistant｜><think>")
    silent = codec.parser(forced)
    silent.finish("stop")
    assert silent.finish_reason("stop") == "stop"


@pytest.mark.case("B074")
def test_one_call_without_parallel_calls(codec: ChatCodec, tokenizer: Tokenizer) -> None:
    body = {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": False, "thinking": OFF}
    two = '<⟦D⟧ calls>\n<⟦D⟧ invoke name="f">\n</⟦D⟧ invoke>\n<⟦D⟧ invoke name="g">\n</⟦D⟧ invoke>\n</⟦D⟧ calls>'
    assert parse(tokenizer, two, codec.encode(body).parse).calls == [("f", "{}")]
    assert len(parse(tokenizer, two, codec.encode({**body, "parallel_tool_calls": True}).parse).calls) == 2


def test_response_format(codec: ChatCodec) -> None:
    intro = "<｜System｜>\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    schema = {"type": "object", "b": 1, "a": [1.0, 2**70]}
    rest = "<｜User｜>Hi<｜Assistant｜></think>"
    assert chat(codec, USER, response_format={"type": "json_object"}) == intro + '{"type": "json_object"}' + rest
    written = intro + '{"type": "object", "b": 1, "a": [1.0, 1180591620717411303424]}' + rest
    assert chat(codec, USER, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}) == written
    assert chat(codec, USER, response_format={"type": "json_object", "schema": schema}) == written
    assert chat(codec, USER, response_format={"type": "text"}) == chat(codec, USER)


def test_continuing_a_message(codec: ChatCodec, tokenizer: Tokenizer) -> None:
    def start(**turn: Any) -> EncodedPrompt:
        thinking = turn.pop("thinking", True)
        messages = [USER, {"role": "assistant", **turn}]
        prompt = codec.encode({"messages": messages, "continue_final_message": True, "thinking": thinking})
        with_prefix = codec.encode({"messages": [USER, {"role": "assistant", "prefix": True, **turn}], "thinking": thinking})
        assert prompt == with_prefix
        assert prompt.continues
        return prompt

    both = start(content="B", reasoning_content="R")
    assert both.text.endswith("<｜Assistant｜><think>R</think>B")
    assert both.initial_channel == "content"
    assert parse(tokenizer, "\n\nmore", both.parse) == Heard("", "\n\nmore", [], "stop")
    reasoning = start(content="", reasoning_content="R")
    assert reasoning.text.endswith("<｜Assistant｜><think>R")
    assert parse(tokenizer, "\nmore⟦/think⟧\nB", reasoning.parse) == Heard("\nmore", "B", [], "stop")
    assert start(content="B", reasoning_content="R", thinking=False).text.endswith("Hi<｜Assistant｜></think>B")
    for body in (
        {"tools": [TOOL]},
        {"response_format": {"type": "json_object"}},
        {"messages": [USER]},
        {"messages": [USER, assistant(call("c"))]},
    ):
        with pytest.raises(RequestError):
            codec.encode({"messages": [USER, {"role": "assistant", "content": "B"}], "continue_final_message": True, **body})


def test_tasks(codec: ChatCodec, tokenizer: Tokenizer) -> None:
    assert chat(codec, {**USER, "task": "title"}) == "<｜User｜>Hi<｜title｜>"
    prompt = codec.encode({"messages": [{**USER, "task": "action"}]})
    assert prompt.text.endswith("Hi<｜Assistant｜><think><｜action｜>")
    assert prompt.token_ids[-1] == tokenizer.special_id("<｜action｜>")
    assert parse(tokenizer, "Do it", prompt.parse).content == "Do it"


def test_odd_messages(codec: ChatCodec) -> None:
    assert chat(codec, {"role": "system", "content": ""}, USER) == "<｜User｜>Hi<｜Assistant｜></think>"
    assert chat(codec, USER, {"role": "system", "content": []}, USER) == "<｜User｜>Hi\n\nHi<｜Assistant｜></think>"
    assert chat(codec, {"role": "user", "content": ""}) == "<｜User｜><｜Assistant｜></think>"
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": ""}, file("data:text/csv,b%2Cc")]
    assert chat(codec, {"role": "user", "content": parts, "name": "N"}) == "<｜User｜>a\n\n\n\nb,c<｜Assistant｜></think>"
    old = [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, {"role": "function", "name": "f", "content": "r"}]
    assert chat(codec, USER, *old) == chat(codec, USER, assistant(call("c")), result("c"))
    custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x\ny"}}
    assert chat(codec, USER, assistant(custom), result("c")) == chat(codec, USER, assistant(call("c", {"input": "x\ny"})), result("c"))
    assert chat(codec, USER, {"role": "assistant", "content": None, "refusal": "No."}, USER).count("No.") == 1


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages.0"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "robot", "content": "Hi"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [file("data:image/png,x")]}]}, "messages.0.content.0.file.file_data"),
        ({"messages": [{"role": "user", "content": [file(f"data:text/plain,{ESCAPES}")]}]}, "messages.0.content.0.file.file_data"),
        ({"messages": [{"role": "user", "content": [file("data:text/plain;base64,/w==")]}]}, "messages.0.content.0.file.file_data"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages.0.content.0.file"),
        ({"messages": [{"role": "user", "content": "a\ud83d"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "task": "sing"}]}, "messages.0.task"),
        ({"messages": [{"role": "user", "content": "a", "prefix": True}]}, "messages.0.prefix"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}, USER]}, "messages.0.prefix"),
        ({"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": 3}]}, "messages.1.reasoning_content"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages.1.tool_calls.0.id"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.1.tool_calls.0.function"),
        ({"messages": [USER, assistant(call("a", name=""))]}, "messages.1.tool_calls.0.function.name"),
        ({"messages": [USER, assistant(call("a", 3))]}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": [USER, {"role": "tool", "content": "r"}]}, "messages.1.tool_call_id"),
        ({"messages": [USER, {"role": "tool", "tool_call_id": "a", "content": None}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "function", "content": "r"}]}, "messages.1.name"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": 1}, "thinking"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"drop_thinking": "x"}}, "chat_template_kwargs.drop_thinking"),
        ({"reasoning": "high"}, "reasoning"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": float("inf")}}}]}, "tools.0.function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools.1"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"continue_final_message": True}, "messages.0"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_refusals_name_the_field(codec: ChatCodec, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        codec.encode({"messages": [USER], **fields})
    assert error.value.param == param
    assert error.value.status == 400
    assert len(error.value.message) < 300


def test_bodies_that_are_no_objects(codec: ChatCodec) -> None:
    for body in (None, [], "x", 3):
        with pytest.raises(RequestError):
            codec.encode(body)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as error:
        codec.encode({})
    assert error.value.param == "messages"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_deep_nesting(codec: ChatCodec) -> None:
    def tool(levels: int) -> list[Any]:
        return [{"type": "function", "function": {"name": "f", "parameters": nested(levels)}}]

    assert chat(codec, USER, tools=tool(90)).count('{"a": ') >= 90
    for levels in (101, 130, 900):
        with pytest.raises(RequestError) as error:
            chat(codec, USER, tools=tool(levels))
        assert error.value.param == "tools.0.function.parameters"
    text = json.dumps(nested(500))
    assert text in chat(codec, USER, assistant(call("c", text)), result("c"))
    assert "[" * 100_000 in chat(codec, USER, assistant(call("c", "[" * 100_000)), result("c"))


def random_json(draw: random.Random, depth: int = 0) -> Any:
    numbers = [0, -1, 2**70, 10**5000, 1.5, float("nan")]
    scalars: list[Any] = [None, True, False, *numbers, "", "x", "\ud800", "a\0b", "auto", "required", "none", "</think>"]
    kind = draw.random()
    if depth > 3 or kind < 0.55:
        return draw.choice(scalars)
    if kind < 0.75:
        return [random_json(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    keys = ["role", "content", "type", "text", "name", "function", "parameters", "properties", "id", "tool_calls", "arguments", "\ud800"]
    return {draw.choice(keys): random_json(draw, depth + 1) for _ in range(draw.randint(0, 4))}


def mutate(draw: random.Random, value: Any) -> Any:
    """`value` with random places replaced by random JSON."""
    if draw.random() < 0.02:
        return random_json(draw)
    if isinstance(value, dict):
        return {key: mutate(draw, item) for key, item in value.items() if draw.random() > 0.01}
    if isinstance(value, list):
        return [mutate(draw, item) for item in value if draw.random() > 0.01]
    return value


def test_random_bodies_are_encoded_or_refused(codec: ChatCodec) -> None:
    draw = random.Random(5)
    body = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {**assistant(call("1", '{"a": 1}'), call("2", {"b": 2**70})), "content": "c", "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            {"role": "function", "name": "f", "content": "r"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "b"},
        ],
        "tools": [TOOL, {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": {"definition": "x"}}}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "thinking": {"type": "enabled", "effort": 10},
        "chat_template_kwargs": {"drop_thinking": False},
        "parallel_tool_calls": False,
    }
    encoded = refused = 0
    for _ in range(1500):
        try:
            prompt = codec.encode(mutate(draw, body) if draw.random() < 0.9 else random_json(draw))
        except RequestError:
            refused += 1
        else:
            assert prompt.token_ids[0] == 0
            encoded += 1
    assert encoded > 100
    assert refused > 500


# ---- the vendor's library as a second opinion


def random_conversation(draw: random.Random) -> dict[str, Any]:
    words = ["a", "Hello\n", "漢字 😀", "</think>", "<｜User｜>", "x" * 30, "  ", '{"k": 1}']
    text = lambda: "".join(draw.choice(words) for _ in range(draw.randint(1, 3)))  # noqa: E731
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": text()})
    for turn in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        if draw.random() < 0.2:
            messages.append({"role": "user", "content": [{"type": "text", "text": text()}, {"type": "text", "text": text()}]})
        if draw.random() < 0.5:
            ids = [f"{turn}{n}" for n in range(draw.randint(1, 3))]
            arguments = [json.dumps({text(): draw.choice([1, 2.5, None, [text()], text(), {"z": -1e-7}])}, ensure_ascii=False) for _ in ids]
            calls = [call(i, a) for i, a in zip(ids, arguments, strict=True)]
            messages.append(assistant(*calls, reasoning_content=draw.choice([None, "", text()])))
            draw.shuffle(ids)
            messages += [result(i, text()) for i in ids]
        if draw.random() < 0.6:
            messages.append({"role": "assistant", "content": text(), "reasoning_content": draw.choice([None, text()])})
            if draw.random() < 0.2:
                messages.append({"role": "system", "content": text()})
    messages.append({"role": "user", "content": text()})
    body: dict[str, Any] = {"messages": messages, "thinking": draw.choice([OFF, {"type": "enabled"}])}
    if draw.random() < 0.5:
        body["tools"] = [TOOL]
        body["tool_choice"] = draw.choice(["auto", "none", "auto"] + ["required"] * (body["thinking"] == OFF))
    if draw.random() < 0.3:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "é": [1.0]}}}
    if draw.random() < 0.5:
        body["reasoning_effort"] = draw.choice(["low", "high", "xhigh", "max", "minimal", "medium", "ultra"])
    return body


def test_random_conversations_render_like_the_vendors_conversion(codec: ChatCodec, repository: Path) -> None:
    special = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    vocabulary = recipe.Tokenizer.from_file(str(repository / "tests" / "data" / "noise-tokenizer.json"))
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(vocabulary)
    options = recipe.ConversionOptions().with_special_tokens(special)
    draw = random.Random(9)
    for _ in range(300):
        body = random_conversation(draw)
        conversation = recipe.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", **body}).convert(options).conversation
        prompt = codec.encode(body)
        assert prompt.text == encoding.render_conversation(conversation).prompt, body
        assert prompt.token_ids == encoding.encode(conversation), body


def test_a_prompt_that_must_be_too_long_is_refused_before_tokenising(codec: ChatCodec) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 400_000}]}
    with pytest.raises(RequestError) as caught:
        codec.encode(body, max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert codec.encode({"messages": [{"role": "user", "content": "word " * 100}]}, max_tokens=1000).token_ids
