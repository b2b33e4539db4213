"""Fields of chat completions that shape the answer: form of reasoning, pace of chunks, echo, bans, scores, histories, spellings."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.server.config import load
from forebay.server.limits import ServerOptions
from forebay.server.turns import Turns
from script_engine import Script, ScriptEngine, Served, serve

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PLAIN = {"thinking": {"type": "disabled"}}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
HTTP = httpx.Client(timeout=20)


def ask(served: Served, **body: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/chat/completions", json={"messages": HI, **body})


def chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    response = ask(served, stream=True, **body)
    assert response.status_code == 200, response.text
    *blocks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def joined(received: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in received for choice in chunk["choices"])


def prompt_text(served: Served) -> str:
    return served.engine.text()


def message_of(served: Served, **body: Any) -> dict[str, Any]:
    response = ask(served, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


# ---- reasoning


@pytest.mark.parametrize(
    ("said", "expected"),
    [("Why?</think>So.", "<think>Why?</think>So."), ("</think>So.", "So."), ("Only thought", "<think>Only thought</think>"),
     ("Look.</think>" + CALL, "<think>Look.</think>")],
)  # fmt: skip
def test_reasoning_inside_the_content(served: Served, said: str, expected: str) -> None:
    served.engine.say(said)
    message = message_of(served, separate_reasoning=False, tools=[LOOK])
    assert message["content"] == expected
    assert "reasoning_content" not in message
    assert ("tool_calls" in message) == ("DSML" in said)
    received = chunks(served, separate_reasoning=False, tools=[LOOK])
    assert joined(received) == expected
    assert joined(received, "reasoning_content") == ""
    assert message_of(served, separate_reasoning=False, include_reasoning=False, tools=[LOOK])["content"] in ("So.", "", None)


def test_reasoning_in_one_chunk(served: Served) -> None:
    served.engine.say("I think for a while, <b> and more.</think>An answer of several tokens.")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(served, stream_reasoning=False)]
    assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["I think for a while, <b> and more."]
    assert len([d for d in deltas if d.get("content")]) > 3
    served.engine.say("Never closed")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(served, stream_reasoning=False)]
    assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["Never closed"]
    served.engine.say("No thought, many tokens.")
    assert len(chunks(served, stream_reasoning=False, **PLAIN)) > 4


@pytest.mark.parametrize("interval", [1, 2, 5, 1000])
def test_interval_of_chunks(served: Served, interval: int) -> None:
    tokens = [*served.engine.ids("One sentence that has quite a few tokens in it."), served.engine.tokenizer.eos_id]
    served.engine.answer = Script(tokens)
    received = chunks(served, stream_interval=interval, return_token_ids=True, **PLAIN)
    assert joined(received) == "One sentence that has quite a few tokens in it."
    counts = [len(chunk["choices"][0]["token_ids"]) for chunk in received if "token_ids" in chunk["choices"][0]]
    assert sum(counts) == len(tokens)
    assert counts[0] == 1
    assert set(counts[1:-1]) <= {interval}


@pytest.mark.parametrize(("field", "names"), [("reasoning", {"reasoning"}), ("both", {"reasoning", "reasoning_content"})])
def test_name_of_reasoning(served: Served, field: Any, names: set[str]) -> None:
    served.engine.say("Why?</think>So.")
    with serve(served.engine, ServerOptions(reasoning_field=field)) as other:
        message = message_of(other)
        assert {name for name in message if name.startswith("reasoning")} == names
        assert {message[name] for name in names} == {"Why?"}
        received = chunks(other)
        assert all(joined(received, name) == "Why?" for name in names)
        assert {key for c in received for key in c["choices"][0]["delta"] if key.startswith("reasoning")} == names


# ---- echo, bans, scores


@pytest.mark.parametrize(
    ("last", "fields", "expected"),
    [
        ({"content": "Roses are", "prefix": True}, {}, "Roses are"),
        ({"content": "Roses are"}, {"continue_final_message": True}, "Roses are"),
        ({"content": [{"type": "text", "text": "Roses"}, {"type": "refusal", "refusal": "are"}], "prefix": True}, {}, "Roses\n\nare"),
    ],
)
def test_echo_repeats_what_is_continued(served: Served, last: dict[str, Any], fields: dict[str, Any], expected: str) -> None:
    served.engine.say(" red.")
    body = {"messages": [*HI, {"role": "assistant", **last}], **fields}
    assert message_of(served, echo=True, **body)["content"] == f"{expected} red."
    assert prompt_text(served).endswith(expected)
    assert joined(chunks(served, echo=True, **body)) == f"{expected} red."
    assert message_of(served, **body)["content"] == " red."
    error = ask(served, echo=True).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "echo")


def test_bad_words_are_banned_with_and_without_a_space(served: Served) -> None:
    tokenizer = served.engine.tokenizer
    word = next(w for w in ("the", "of", "in", "a", "e") if all(len(tokenizer.encode(t)) == 1 for t in (w, f" {w}")))
    assert ask(served, bad_words=[word], logit_bias={"5": 2}).status_code == 200
    bias = served.engine.requests[-1].params.logit_bias
    assert bias == {5: 2.0, tokenizer.encode(word)[0]: -100.0, tokenizer.encode(f" {word}")[0]: -100.0}
    assert ask(served, bad_words=[word, "two words"]).status_code == 200
    several = served.engine.requests[-1].params.bad_words
    assert set(several) == {tuple(tokenizer.encode(text)) for text in ("two words", " two words")}


@pytest.mark.parametrize("alternatives", [0, 2])
def test_scores_of_the_prompt(served: Served, alternatives: int) -> None:
    answer = ask(served, prompt_logprobs=alternatives, return_token_ids=True).json()
    ids, scores = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert served.engine.requests[-1].params.prompt_logprobs == alternatives
    assert len(scores) == len(ids)
    assert scores[0] is None
    for place, (token_id, entry) in enumerate(zip(ids, scores, strict=True)):
        if entry is not None:
            chosen = entry[str(token_id)]
            assert chosen["decoded_token"] == served.engine.tokenizer.token_text(token_id)
            assert chosen["logprob"] == (-0.5 if alternatives else -0.5 - place / 1024)
            assert chosen["rank"] == (1 if alternatives else None)
            assert len(entry) == max(alternatives, 1)
    assert "prompt_logprobs" not in ask(served).json()


def test_scores_of_a_long_prompt_are_refused_by_their_number(served: Served) -> None:
    with serve(served.engine, ServerOptions(max_scored=100)) as other:
        error = ask(other, prompt_logprobs=20).json()["error"]
        assert (error["param"], error["code"]) == ("prompt_logprobs", "invalid_value")
        assert "100" in error["message"]


def test_banned_words_are_looked_up_once_and_not_on_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body holds a thousand words; the loop, on which every other client's tokens pass, has no part in finding their tokens."""
    tokenizer, looked = served.engine.tokenizer, []
    loop = next(thread for thread in threading.enumerate() if thread.name == "server")
    many, one = tokenizer.encode_many, tokenizer.encode

    def encode_many(texts: list[str], *args: Any) -> Any:
        looked.append((threading.current_thread() is loop, list(texts)))
        return many(texts, *args)

    def encode(text: str) -> list[int]:
        looked.append((threading.current_thread() is loop, [text]))
        return one(text)

    monkeypatch.setattr(tokenizer, "encode_many", encode_many)
    monkeypatch.setattr(tokenizer, "encode", encode)
    bodies = {"/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
    for path, body in bodies.items():
        looked.clear()
        response = HTTP.post(f"{served.url}{path}", json={**body, "bad_words": ["a"] * 1000 + [" a"] * 24, "logit_bias": {"5": 3}})
        assert response.status_code == 200, response.text
        asked = [entry for entry in looked if "a" in entry[1]]
        assert asked == [(False, ["a", " a"])], path
        bias = served.engine.requests[-1].params.logit_bias
        assert bias == {5: 3, one("a")[0]: -100.0, one(" a")[0]: -100.0}


def test_a_prediction_is_reported_as_not_used(served: Served) -> None:
    guess = {"type": "content", "content": "Hello there."}
    response = ask(served, prediction=guess)
    assert response.headers["x-forebay-ignored"] == "prediction"
    none_used = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert none_used.items() <= response.json()["usage"]["completion_tokens_details"].items()
    last = chunks(served, prediction=guess, stream_options={"include_usage": True})[-1]
    assert none_used.items() <= last["usage"]["completion_tokens_details"].items()
    assert not none_used.keys() & ask(served).json()["usage"]["completion_tokens_details"].keys()


def test_a_running_request_keeps_no_text_of_its_prompt(served: Served) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}), ("/v1/responses", {"input": "Hi"}), ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ):  # fmt: skip
        HTTP.post(f"{served.url}{path}", json=body).raise_for_status()
        prompt = served.engine.requests[-1].prompt
        assert prompt is not None and prompt.text == "" and prompt.token_ids


# ---- what is ignored, and limits


def test_names_inside_objects_and_overruled_ones_are_told(served: Served) -> None:
    body = {
        "chat_template_kwargs": {"thinking": True, "add_nothing": 1}, "reasoning": {"effort": "low", "summary": "auto"},
        "max_tokens": 5, "max_completion_tokens": 6, "functions": [], "tools": [LOOK], "stream_interval": 3, "service_tier": "flex",
        "stream_options": {"include_obfuscation": True}, "metadata": {"a": "b"}, "user": "u",
    }  # fmt: skip
    response = ask(served, **body, stream=True)
    assert set(response.headers["x-forebay-ignored"].split(", ")) == {
        "chat_template_kwargs.add_nothing", "reasoning.summary", "max_tokens", "functions", "service_tier",
        "stream_options.include_obfuscation", "metadata", "user",
    }  # fmt: skip
    assert served.engine.requests[-1].params.max_tokens == 6
    response = ask(served, stream_interval=3, stream_reasoning=True)
    assert response.headers["x-forebay-ignored"] == "stream_interval, stream_reasoning"
    assert response.json()["service_tier"] == "default"
    options = {"include_usage": True, "include_obfuscation": False}  # nothing is obfuscated, as asked
    assert "x-forebay-ignored" not in ask(served, stream=True, stream_options=options).headers
    style = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "description": "d", "bogus": 1}, "bogus": 2}
    inside = {
        "thinking": {"type": "disabled", "bogus": 1}, "response_format": style, "output_config": {"effort": "low", "bogus": 1},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}], "bogus": 1}, "tools": [LOOK],
    }  # fmt: skip
    assert set(ask(served, **inside).headers["x-forebay-ignored"].split(", ")) == {
        "thinking.bogus", "response_format.bogus", "response_format.json_schema.bogus", "response_format.json_schema.description",
        "output_config.bogus", "tool_choice.bogus",
    }  # fmt: skip


def test_many_ignored_names_are_counted(served: Served) -> None:
    header = ask(served, **{f"made_up_{i}": i for i in range(100)}).headers["x-forebay-ignored"].split(", ")
    assert header == [*(f"made_up_{i}" for i in range(20)), "80 more"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_output_limit_that_does_not_fit(served: Served, field: str) -> None:
    served.engine.max_context = 200
    assert ask(served, **{field: 500}).status_code == 200
    prompt = served.engine.requests[-1].prompt_ids
    room = 200 - len(prompt)
    assert served.engine.requests[-1].params.max_tokens == room
    with serve(served.engine, ServerOptions(overflow_policy="error")) as strict:
        assert ask(strict, **{field: room}).status_code == 200
        assert ask(strict).status_code == 200  # a default is never too large
        error = ask(strict, **{field: room + 1}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert f"you requested 201 tokens ({len(prompt)} in the messages, {room + 1} in the completion)" in error["message"]


def test_a_limit_beyond_the_largest_is_lowered(served: Served) -> None:
    served.engine.max_context = 1 << 20
    for asked in (393_215, 393_216, 393_217, 10**6):
        ask(served, max_tokens=asked)
        assert served.engine.requests[-1].params.max_tokens == min(asked, 393_216)


@pytest.mark.parametrize(
    ("fields", "limit", "top_p"),
    [({}, 65_536, 0.95), (PLAIN, 8_192, 1.0), ({"reasoning_effort": "max"}, 131_072, 0.95), ({"reasoning_effort": "none"}, 8_192, 1.0)],
)
def test_defaults_by_mode(served: Served, fields: dict[str, Any], limit: int, top_p: float) -> None:
    served.engine.max_context = 1 << 20
    ask(served, **fields)
    params = served.engine.requests[-1].params
    assert (params.max_tokens, params.top_p, params.temperature) == (limit, top_p, 1.0)


def test_up_to_eight_choices(served: Served) -> None:
    served.engine.say("</think>x")
    assert [c["index"] for c in ask(served, n=8).json()["choices"]] == list(range(8))
    assert len({r.share for r in served.engine.requests}) == 1  # they share the prefill


# ---- tools in every spelling


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
        {"tools": [{"function": {"name": "look", "parameters": SCHEMA}}]},
        {"tools": [{"type": "function", "function": {"name": "look", "description": None, "parameters": SCHEMA, "strict": None}}]},
        {"functions": [{"name": "look", "parameters": SCHEMA}]},
        {"functions": [{"name": "look", "parameters": SCHEMA}], "function_call": "auto"},
    ],
)
def test_spellings_of_a_function_render_alike(served: Served, fields: dict[str, Any]) -> None:
    served.engine.say("</think>" + CALL)
    message = message_of(served, tools=[LOOK])
    plain = prompt_text(served)
    told = message_of(served, **fields)
    assert prompt_text(served) == plain
    for side in (message, told):
        (call,) = side["tool_calls"]
        assert re.fullmatch(r"call_00_[A-Za-z0-9]{24}", call["id"])
        assert call["function"] == {"name": "look", "arguments": '{"city": "Oslo"}'}


def test_custom_tools_are_functions_of_one_text(served: Served) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
    inner = {"name": "patch", "format": grammar}
    for tool in ({"type": "custom", "custom": inner}, {"type": "custom", **inner}):
        assert ask(served, tools=[tool], tool_choice={"type": "custom", "custom": {"name": "patch"}}).status_code == 200
        assert "start: /a+/" in prompt_text(served)
        assert '"input"' in prompt_text(served)


@pytest.mark.parametrize(
    "empty", [{"tools": []}, {"tools": None}, {"functions": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}]
)
def test_no_tools_in_every_spelling(served: Served, empty: dict[str, Any]) -> None:
    assert ask(served).status_code == 200
    plain = prompt_text(served)
    assert "tool_calls" not in message_of(served, **empty)
    assert prompt_text(served) == plain


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ({"type": "function", "name": "g"}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "g"}]}}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "maybe", "tools": []}}, "tool_choice.allowed_tools.mode"),
        ({"type": "web"}, "tool_choice.type"),
        ("sometimes", "tool_choice"),
        (5, "tool_choice"),
    ],
)
def test_choices_that_name_nothing(served: Served, choice: Any, param: str) -> None:
    error = ask(served, tools=[LOOK], tool_choice=choice).json()["error"]
    assert error["param"] == param
    if "'g'" in error["message"]:
        assert "no function named 'g' was specified in the 'tools' parameter" in error["message"]


@pytest.mark.parametrize(
    ("name", "good"),
    [("a", True), ("mcp__x.y:z-1", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a b", False), ("é", False)],
)
def test_names_of_tools(served: Served, name: str, good: bool) -> None:
    response = ask(served, tools=[{"type": "function", "function": {"name": name}}])
    assert response.status_code == (200 if good else 400)
    if not good:
        assert response.json()["error"]["param"] == "tools[0].function.name"
    error = ask(served, tools=[LOOK, LOOK]).json()["error"]
    assert "must be unique" in error["message"]


# ---- histories


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": i, "function": {"name": "look", "arguments": "{}"}} for i in ids]}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"result of {call_id}"}


BROKEN: list[tuple[list[dict[str, Any]], str]] = [
    ([*HI, result("a")], "messages[1]"),
    ([*HI, calls("a", "b"), result("a")], "messages[1]"),
    ([*HI, calls("a", "b"), result("a"), *HI], "messages[1]"),
    ([*HI, calls("a"), *HI, result("a")], "messages[1]"),
    ([*HI, calls("a"), result("a"), result("a")], "messages[3]"),
    ([*HI, calls("a"), result("z")], "messages[2]"),
    ([*HI, calls("a"), result("a"), calls("b"), calls("c"), result("c")], "messages[3]"),
    ([*HI, {"role": "function", "name": "look", "content": "x"}], "messages[1]"),
]


@pytest.mark.parametrize(("history", "param"), BROKEN, ids=range(len(BROKEN)))
def test_calls_and_results_that_do_not_match(served: Served, history: list[Any], param: str) -> None:
    """Mended by default, since a refusal would wedge an agent's session; refused by name if the operator wants that."""
    assert ask(served, messages=history, tools=[LOOK]).status_code == 200
    with serve(served.engine, ServerOptions(strict_tool_messages=True)) as strict:
        response = ask(strict, messages=history, tools=[LOOK])
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_message_sequence", param)
        good = [*HI, calls("a", "b"), result("b"), result("a"), *HI, calls("a"), result("a")]
        assert ask(strict, messages=good, tools=[LOOK]).status_code == 200


def test_legacy_function_histories(served: Served) -> None:
    old = [*HI, {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"city": "Oslo"}'}},
           {"role": "function", "name": "look", "content": "rain"}]  # fmt: skip
    new = [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {
        "name": "look", "arguments": '{"city": "Oslo"}'}}]}, {"role": "tool", "tool_call_id": "a", "content": "rain"}]  # fmt: skip
    texts = []
    for history in (old, new):
        assert ask(served, messages=history, functions=[LOOK["function"]]).status_code == 200
        texts.append(prompt_text(served))
    assert texts[0] == texts[1]


@pytest.mark.case("B062")
def test_names_of_reasoning_in_histories(served: Served) -> None:
    details = [{"type": "reasoning.text", "text": "I should "}, {"type": "reasoning.encrypted", "data": "x"}, {"text": "look."}]
    texts = []
    for given in (
        {"reasoning_content": "I should look."}, {"reasoning": "I should look."}, {"reasoning_details": details},
        {"reasoning_content": "I should look.", "reasoning": "something else", "reasoning_details": details},
        {"content": [{"type": "thinking", "thinking": "I should look."}]},
    ):  # fmt: skip
        assert ask(served, messages=[*HI, {**calls("a"), **given}, result("a")], tools=[LOOK]).status_code == 200
        texts.append(prompt_text(served))
    assert "<think>I should look.</think>" in texts[0]
    assert len(set(texts)) == 1


def test_files_of_text(served: Served) -> None:
    data = "data:text/plain;base64,aGVsbG8gZmlsZQ=="
    for part in ({"type": "file", "file": {"file_data": data, "filename": "a.txt"}}, {"type": "input_file", "file_data": data}):
        assert ask(served, messages=[{"role": "user", "content": [{"type": "text", "text": "Read."}, part]}]).status_code == 200
        assert "Read.\n\nhello file" in prompt_text(served)
    for part, param in (
        ({"type": "file", "file": {"file_id": "file-1"}}, "messages[0].content[0].file.file_id"),
        ({"type": "input_file", "file_url": "https://x/y"}, "messages[0].content[0].file_url"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}, "messages[0].content[0].file.file_data"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
        ({"type": "video_url", "video_url": {}}, "messages[0].content[0].type"),
    ):
        error = ask(served, messages=[{"role": "user", "content": [part]}]).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_value", param)


def test_input_in_place_of_messages(served: Served) -> None:
    served.engine.say("</think>" + CALL)
    items = [
        {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I should look."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": "Rain, sun."},
        {"role": "user", "content": "And now?"},
    ]
    flat = {"type": "function", "name": "look", "parameters": SCHEMA}
    fields = {"instructions": "Be brief.", "max_output_tokens": 77, "tools": [flat], "text": {"format": {"type": "text"}}}
    response = HTTP.post(f"{served.url}/v1/chat/completions", json={"input": items, **fields})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert "x-forebay-ignored" not in response.headers
    assert served.engine.requests[-1].params.max_tokens == 77
    told = prompt_text(served)
    same = [
        {"role": "system", "content": "Be brief."}, *HI, {**calls("a", "b"), "reasoning_content": "I should look."},
        {"role": "tool", "tool_call_id": "a", "content": "rain"}, {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "assistant", "content": "Rain, sun."}, {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    assert ask(served, messages=same, tools=[LOOK]).status_code == 200
    assert prompt_text(served) == told
    assert HTTP.post(f"{served.url}/v1/chat/completions", json={"input": "Hi"}).status_code == 200
    assert ask(served, input="never read").headers["x-forebay-ignored"] == "input"
    served.engine.max_context = 10
    error = HTTP.post(f"{served.url}/v1/chat/completions", json={"input": "Hi"}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_a_chat_body_with_input_is_read_as_responses_reads_it(served: Served) -> None:
    """The same items give the same prompt on both routes: all reasoning, and items of any type."""
    items: list[Any] = [
        *HI,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "First."}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Second."}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "b", "output": "file"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    body = {"input": items, "instructions": "Be brief.", "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]}
    body["text"] = {"format": {"type": "json_object"}, "verbosity": "low"}
    asked = [HTTP.post(f"{served.url}{path}", json=body) for path in ("/v1/chat/completions", "/v1/responses")]
    assert [response.status_code for response in asked] == [200, 200], asked[0].text
    chat, responses = (list(request.prompt_ids) for request in served.engine.requests)
    assert chat == responses
    assert "<think>First.\nSecond.</think>" in prompt_text(served)
    for response in asked:
        assert set(response.headers["x-forebay-ignored"].split(", ")) == {"input.web_search_call", "text.verbosity"}
    # What is wrong is told of the client's own field.
    for more, param in (
        ({"type": "function_call", "call_id": "d", "name": "", "arguments": "{}"}, "input[10].name"),
        ({"role": "user", "content": [{"type": "input_text", "text": 5}]}, "input[10].content[0].text"),
    ):
        error = HTTP.post(f"{served.url}/v1/chat/completions", json={**body, "input": [*items, more]}).json()["error"]
        assert error["param"] == param and param in error["message"]
    told = HTTP.post(f"{served.url}/v1/chat/completions", json={**body, "text": {"format": {"type": "xml"}}}).json()["error"]
    assert told["param"] == "text.format.type"
    both = HTTP.post(f"{served.url}/v1/chat/completions", json={"input": "Hi", "max_output_tokens": 5, "max_completion_tokens": 7})
    assert both.headers["x-forebay-ignored"] == "max_output_tokens"
    assert served.engine.requests[-1].params.max_tokens == 7


# ---- json answers


@pytest.mark.case("B076")
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "style", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}]
)
@pytest.mark.parametrize("extra", [{}, {"tools": [LOOK]}, {"stop": ["NEVER"]}])
def test_json_is_content_and_reasoning_is_not(served: Served, thinking: bool, style: Any, extra: dict[str, Any]) -> None:
    served.engine.say(('Is {"a": 2} right?</think>' if thinking else "") + '\n```json\n{"a": 1}\n```')
    fields = {"response_format": style, "thinking": thinking, **extra}
    message = message_of(served, **fields)
    received = chunks(served, **fields)
    for content, reasoning in (
        (message["content"], message.get("reasoning_content", "")), (joined(received), joined(received, "reasoning_content")),
    ):  # fmt: skip
        assert json.loads(content) == {"a": 1}
        assert reasoning == ('Is {"a": 2} right?' if thinking else "")


# ---- silence before whole answers


@pytest.fixture
def patient() -> Iterator[Served]:
    """A server that breaks the silence before a whole answer after 50 ms."""
    with serve(ScriptEngine(), ServerOptions(nonstream_keepalive=True, nonstream_wait_s=0.05, keepalive_comment_s=0.05)) as served:
        yield served


def test_line_feeds_before_a_whole_answer(patient: Served) -> None:
    patient.engine.say("</think>Late.")
    patient.engine.hold = True
    seen = b""
    with httpx.stream("POST", f"{patient.url}/v1/chat/completions", json={"messages": HI}, timeout=20) as response:
        assert response.status_code == 200
        assert response.headers["x-forebay-effort"] == "75"
        for data in response.iter_bytes():
            seen += data
            if seen.count(b"\n") >= 2:
                patient.engine.hold = False
    assert set(seen.partition(b"{")[0]) == {ord("\n")}
    assert json.loads(seen)["choices"][0]["message"]["content"] == "Late."
    with patient.client() as client:
        patient.engine.answer = Script(patient.engine.ids("</think>Late too."), delay_s=0.1)
        answer = client.chat.completions.create(model="script", messages=HI)
        assert answer.choices[0].message.content == "Late too."


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/v1/chat/completions", {"messages": HI}, "encode"),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, "encode"),
        ("/v1/responses", {"input": "Hi"}, "encode"),
        ("/v1/completions", {"prompt": "Hi", "response_format": {"type": "json_object"}}, "hold"),
    ],
)
def test_line_feeds_while_the_prompt_is_still_prepared(
    patient: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], work: str
) -> None:
    """The engine has not been asked yet when the first ones come: encoding may take long, and so may a grammar."""
    real = getattr(Turns, work)

    async def slow(self: Turns, *args: Any, **options: Any) -> Any:
        while not seen:
            await asyncio.sleep(0.01)
        assert not patient.engine.requests
        return await real(self, *args, **options)

    monkeypatch.setattr(Turns, work, slow)
    patient.engine.requests.clear()
    patient.engine.say("</think>Late.")
    seen = b""
    with httpx.stream("POST", f"{patient.url}{path}", json=body, timeout=20) as response:
        assert response.status_code == 200
        for data in response.iter_bytes():
            seen += data
    assert seen.startswith(b"\n") and "error" not in {name for name, value in json.loads(seen).items() if value}
    assert len(patient.engine.requests) == 1


def test_error_after_a_line_feed_is_an_envelope(patient: Served) -> None:
    patient.engine.answer = Script(patient.engine.ids("word " * 9), delay_s=0.05, fail_at=3)
    response = ask(patient)
    assert response.status_code == 200
    assert response.text.startswith("\n")
    assert response.json()["error"]["code"] == "internal_error"
    assert ask(patient, messages=[]).status_code == 400


def test_no_line_feeds_unless_asked_for(served: Served) -> None:
    with serve(ScriptEngine(), ServerOptions(nonstream_wait_s=0.01, keepalive_comment_s=0.01)) as other:
        other.engine.answer = Script(other.engine.ids("</think>x"), delay_s=0.1)
        began = time.monotonic()
        response = ask(other)
        assert time.monotonic() - began > 0.1
        assert response.text.startswith("{")
        assert "content-length" in response.headers


def test_settings_reach_the_options() -> None:
    config, _ = load(flags={
        "server.overflow_policy": ("--set", "error"), "server.reasoning_field": ("--set", "both"),
        "server.strict_tool_messages": ("--set", "true"), "server.nonstream_keepalive": ("--set", "true"),
    })  # fmt: skip
    options = ServerOptions.from_config(config)
    assert (options.overflow_policy, options.reasoning_field) == ("error", "both")
    assert (options.strict_tool_messages, options.nonstream_keepalive) == (True, True)
