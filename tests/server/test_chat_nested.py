"""Names inside messages, tools and reasoning controls of a chat body: each is read, told in `x-forebay-ignored`, or refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from forebay.server.chat_nested import names_in_messages, names_in_tools
from script_engine import Served

HI: list[Any] = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
LOOK: Any = {"type": "function", "function": FUNCTION}
CALL: Any = {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
HTTP = httpx.Client(timeout=20)


def ask(served: Served, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}{path}", json={"messages": HI, **body})


def named(served: Served, path: str = "/v1/chat/completions", **body: Any) -> set[str]:
    response = ask(served, path, **body)
    assert response.status_code == 200, response.text
    return set(response.headers.get("x-forebay-ignored", "").split(", ")) - {""}


def after(**assistant: Any) -> dict[str, Any]:
    """A body in which the user speaks after an assistant's message."""
    return {"messages": [*HI, {"role": "assistant", "content": "x", **assistant}, *HI]}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


FILE = {"file_data": "data:text/plain;base64,QQ=="}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"messages": [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "Hi", "name": "bob"}]}, {"[].name"}),
        (after(audio={"id": "x"}, annotations=[], refusal=None), {"[].audio"}),
        (after(refusal="no"), {"[].refusal"}),
        (after(content=None, refusal="no"), set()),
        (after(reasoning_content="r", reasoning="r"), set()),
        (after(reasoning_content="r", reasoning="other", reasoning_details=[{"text": "t"}]), {"[].reasoning", "[].reasoning_details"}),
        (after(reasoning_details=[{"text": "t"}]), set()),
        (after(tool_calls=[CALL], function_call={"name": "f"}), {"[].function_call"}),
        (after(function_call={"name": "f", "bogus": 1}), {"[].function_call.bogus"}),
        (after(tool_calls=[{**CALL, "bogus": 1, "type": "what"}]), {"[].tool_calls[].bogus", "[].tool_calls[].type"}),
        (after(tool_calls=[{**CALL, "function": {**CALL["function"], "bogus": 1}}]), {"[].tool_calls[].function.bogus"}),
        (after(tool_calls=[{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}]), set()),
        ({"messages": [*after(tool_calls=[CALL])["messages"][:2], {"role": "tool", "tool_call_id": "a", "content": "r", "name": "f"}]},
         {"[].name"}),
        (part("text", text="x", cache_control={"type": "ephemeral"}, annotations=[]), {"[].content[].cache_control"}),
        (part("input_text", text="x"), set()),
        (part("refusal", refusal="x", text="y"), {"[].content[].text"}),
        (part("file", file={**FILE, "filename": "a.txt"}, bogus=1), {"[].content[].bogus", "[].content[].file.filename"}),
        (part("input_file", **FILE, filename="a.txt"), {"[].content[].filename"}),
        ({"messages": HI * 500 + [{"role": "user", "content": "x", "name": f"n{i}"} for i in range(50)]}, {"[].name"}),
    ],
)  # fmt: skip
def test_names_in_messages(served: Served, body: dict[str, Any], names: set[str]) -> None:
    expected = {f"messages{name}" for name in names}
    assert named(served, **body) == expected
    assert named(served, "/tokenize", **body) == expected


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"tools": [{**LOOK, "bogus": 1}, {**LOOK, "function": {**FUNCTION, "name": "g", "bogus": 1}}]},
         {"tools[].bogus", "tools[].function.bogus"}),
        ({"tools": [{"type": "function", **FUNCTION, "cache_control": {"type": "ephemeral"}}]}, {"tools[].cache_control"}),
        ({"tools": [{**LOOK, "name": "g"}]}, {"tools[].name"}),
        ({"functions": [{**FUNCTION, "bogus": 1}], "function_call": {"name": "f"}}, {"functions[].bogus"}),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "text"}}}]}, set()),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "what"}}}]}, {"tools[].custom.format"}),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "definition": "start: /a/", "bogus": 1}}]},
         {"tools[].format.bogus"}),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "f", "bogus": 1}}}, {"tool_choice.function.bogus"}),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "name": "f", "bogus": 1}], "bogus": 1}}},
         {"tool_choice.allowed_tools.bogus", "tool_choice.allowed_tools.tools[].bogus"}),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f", "bogus": 1}]}},
         {"tool_choice.tools[].bogus"}),
    ],
)  # fmt: skip
def test_names_in_tools(served: Served, body: dict[str, Any], names: set[str]) -> None:
    assert named(served, **body) == names
    response = HTTP.post(f"{served.url}/v1/chat/completions", json={"input": "Hi", **body})
    assert set(response.headers.get("x-forebay-ignored", "").split(", ")) - {""} == names


def test_other_protocols_tell_their_own_names(served: Served) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"max_tokens": 5, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    assert named(served, "/v1/messages", **body) == set()
    history = [
        *HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "x"}]},
    ]
    assert named(served, "/v1/messages", messages=[*history, *HI], max_tokens=5) == set()


def test_what_is_no_object_is_left_to_the_encoding() -> None:
    assert names_in_messages("x") == names_in_messages([1, None, {"role": []}]) == []
    assert names_in_messages([{"role": "assistant", "tool_calls": [{"function": 5}], "content": [7, {"type": []}]}]) == []
    assert names_in_tools({"tools": [5, {"function": 7}, {"type": "custom", "custom": 7}], "tool_choice": {"allowed_tools": 3}}) == []


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, {"enable_thinking"}),
        ({"enable_thinking": True, "reasoning": {"enabled": False}}, {"reasoning.enabled"}),
        ({"chat_template_kwargs": {"thinking": False, "enable_thinking": True}}, {"chat_template_kwargs.enable_thinking"}),
        ({"reasoning_effort": 5, "thinking": {"type": "enabled", "effort": "max"}, "reasoning": {"effort": "max"}},
         {"thinking.effort", "reasoning.effort"}),
        ({"output_config": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": 3}}, {"output_config.effort"}),
        ({"drop_thinking": False, "chat_template_kwargs": {"drop_thinking": True}}, {"chat_template_kwargs.drop_thinking"}),
        ({"drop_thinking": True, "tools": [LOOK]}, {"drop_thinking"}),
        ({"drop_thinking": True, "tools": [LOOK], "tool_choice": "none"}, set()),
        ({"thinking": True, "reasoning_effort": "low", "thinking_token_budget": 4, "include_reasoning": False}, set()),
        ({"task": "title"}, {"task"}),
    ],
)  # fmt: skip
def test_controls_that_give_way(served: Served, body: dict[str, Any], names: set[str]) -> None:
    assert named(served, **body) == names


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"reasoning": {"exclude": "yes"}}, "reasoning.exclude", "invalid_type"),
        ({"drop_thinking": 1, "tools": [LOOK]}, "drop_thinking", "invalid_type"),
        ({"chat_template_kwargs": {"drop_thinking": "x"}, "tools": [LOOK]}, "chat_template_kwargs.drop_thinking", "invalid_type"),
        ({"messages": [*HI, {"role": "assistant", "content": "x", "tool_calls": [CALL], "prefix": True}]},
         "messages[1].prefix", "invalid_value"),
        ({"modalities": ["text", "image"]}, "modalities", "unsupported_value"),
        ({"modalities": ["x"]}, "modalities", "unsupported_value"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": 7, "schema": {"type": "object"}}}},
         "response_format.json_schema.name", "invalid_type"),
    ],
)  # fmt: skip
def test_values_that_would_be_lost_are_refused(served: Served, body: dict[str, Any], param: str, code: str) -> None:
    error = ask(served, **body).json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert f"'{param}'" in error["message"]
    assert not served.engine.requests


def test_tokenize_tells_what_is_not_part_of_a_prompt(served: Served) -> None:
    told = named(served, "/tokenize", temperature=0.5, stream=True, cache_salt="a", bogus=1, reasoning_effort=5, tools=[LOOK])
    assert told == {"temperature", "stream", "cache_salt", "bogus"}


def test_names_of_the_body_come_before_those_in_its_lists(served: Served) -> None:
    many = [{**HI[0], f"made_up_{i}": 1} for i in range(25)]
    header = ask(served, messages=many, metadata={"a": "b"}, bogus=1).headers["x-forebay-ignored"].split(", ")
    assert header == ["metadata", "bogus", *(f"messages[].made_up_{i}" for i in range(18)), "7 more"]
    # Nothing is looked for in more messages than a request may have.
    assert ask(served, messages=[1] * 10_001).json()["error"]["code"] == "array_above_max_length"
