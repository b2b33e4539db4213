"""Nothing that a client sends is lost without a word: honoured, named in `x-forebay-ignored`, or refused by name, in every protocol."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from forebay.server.ignored import ignored, unread
from script_engine import Served

HI: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}


def named(served: Served, path: str, **fields: Any) -> list[str]:
    response = httpx.post(f"{served.url}{path}", json={**BODIES[path], **fields}, timeout=20)
    assert response.status_code == 200, response.text
    header = response.headers.get("x-forebay-ignored")
    return header.split(", ") if header else []


@pytest.mark.parametrize("path", BODIES)
def test_twenty_names_and_how_many_more(served: Served, path: str) -> None:
    made_up = [f"made_up_{i}" for i in range(30)]
    assert named(served, path, **dict.fromkeys(made_up, 1)) == [*made_up[:20], "10 more"]
    assert named(served, path, **dict.fromkeys(made_up[:20], 1)) == made_up[:20]
    # The client's own text that must not stand in a header is counted at least.
    assert named(served, path, made_up=1, **{"bad\r\nname": 2, "x" * 65: 3, "ü": 4}) == ["made_up", "3 more"]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("/v1/responses", {"reasoning": {"effort": "low", "bogus": 1}}, ["reasoning.bogus"]),
        ("/v1/responses", {"text": {"bogus": 2, "verbosity": "low"}}, ["text.bogus", "text.verbosity"]),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "bogus": 3}}}, ["text.format.bogus"]),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False, "bogus": 3}}},
            ["text.format.bogus"],
        ),
        ("/v1/responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [], "bogus": 4}}, ["tool_choice.bogus"]),
        ("/v1/chat/completions", {"response_format": {"type": "text", "bogus": 1}}, ["response_format.bogus"]),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "bogus": 1}}, ["thinking.bogus"]),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"bogus": 1}}, ["stream_options.bogus"]),
        ("/v1/chat/completions", {"structured_outputs": {"regex": "a+", "backend": "x"}}, ["structured_outputs.backend"]),
        ("/v1/messages", {"thinking": {"type": "enabled", "bogus": 1}}, ["thinking.bogus"]),
        ("/v1/messages", {"thinking": {"type": "enabled", "display": "loud"}}, ["thinking.display"]),
        ("/v1/messages", {"output_config": {"effort": "low", "bogus": 1}}, ["output_config.bogus"]),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}, "bogus": 1}}},
            ["output_config.format.bogus"],
        ),
        (
            "/v1/messages",
            {"tool_choice": {"type": "auto", "bogus": 1}, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
            ["tool_choice.bogus"],
        ),
        (
            "/v1/messages",
            {"stream_options": {"include_usage": True}, "user": "u", "n": 1, "logprobs": False, "response_format": {"type": "text"}},
            ["stream_options", "user", "n", "logprobs", "response_format"],
        ),
    ],
)
def test_names_inside_objects(served: Served, path: str, fields: dict[str, Any], names: list[str]) -> None:
    assert sorted(named(served, path, **fields)) == sorted(names)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3}, {"n": True}, {"logprobs": True}, {"top_logprobs": 2}, {"prompt_logprobs": 1}, {"stop": "x"}, {"stop": ["x"]},
        {"response_format": {"type": "json_object"}}, {"logit_bias": {"5": 1}}, {"min_tokens": 5}, {"max_completion_tokens": 5},
        {"stop_token_ids": [5]}, {"allowed_token_ids": [5]}, {"bad_words": ["a"]}, {"ignore_eos": True}, {"functions": [{"name": "f"}]},
        {"function_call": "auto"}, {"parallel_tool_calls": False}, {"guided_regex": "a"}, {"structured_outputs": {"json": {}}},
        {"guided_json": {"type": "object"}}, {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}, {"enable_thinking": True},
        {"chat_template_kwargs": {"thinking": True}}, {"continue_final_message": True}, {"echo": True}, {"include_reasoning": False},
        {"thinking_token_budget": 5}, {"truncate_prompt_tokens": 5}, {"input": "Hi"}, {"modalities": ["audio"]}, {"best_of": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_messages_refuse_what_only_chat_completions_could_do(served: Served, fields: dict[str, Any]) -> None:
    response = httpx.post(f"{served.url}/v1/messages", json={**BODIES["/v1/messages"], **fields}, timeout=20)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"Unsupported parameter: '{next(iter(fields))}'")
    assert not served.engine.requests


def test_a_boolean_is_no_number_of_answers(served: Served) -> None:
    for path in ("/v1/responses", "/v1/chat/completions", "/v1/completions"):
        response = httpx.post(f"{served.url}{path}", json={**BODIES[path], "n": True}, timeout=20)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n"), path
        assert "a boolean" in response.json()["error"]["message"]


def test_names_are_told_once_and_in_order() -> None:
    assert ignored(["a", "b", "a", "tools[3]"]) == ("a", "b", "tools[3]")
    assert ignored(["a\n", "", "a"]) == ("a", "2 more")
    assert ignored([]) == ()
    assert unread({"a": 1, "b": None, "c": 2}, "x", ("a",)) == ["x.c"]
    assert unread("text", "x", ()) == []
