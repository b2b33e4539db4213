"""Requests that must be refused: each with its status, the OpenAI envelope and the field's name, and the server goes on."""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from typing import Any

import httpx
import openai
import pytest

from forebay.model.errors import RequestError
from forebay.server.body import decode, parse_object
from forebay.server.errors import HttpError
from forebay.server.limits import ServerOptions
from forebay.server.protocol import KNOWN
from script_engine import Script, Served

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
MIB = 1 << 20


@pytest.fixture(scope="module")
def options() -> ServerOptions:
    return ServerOptions(max_body=8 * MIB)


HTTP = httpx.Client(timeout=30, verify=False)  # one connection for all: refusals must not break it


def post(served: Served, body: Any = None, *, content: bytes | None = None, headers: dict[str, str] | None = None) -> httpx.Response:
    content = json.dumps(body).encode() if content is None else content
    return HTTP.post(served.url + CHAT, content=content, headers={"content-type": "application/json", **(headers or {})})


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal; checks the envelope."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 1000
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    return error


def still_serves(served: Served) -> None:
    assert post(served, {"messages": HI}).status_code == 200


# (body, param, code); a body of bytes is sent as it is
BAD: list[tuple[Any, str | None, str]] = [
    (b"", None, "invalid_json"),
    (b"{", None, "invalid_json"),
    (b'{"messages": [}', None, "invalid_json"),
    (b'{"messages": "\xff"}', None, "invalid_json"),
    (b'{"messages": "\\ud800"}', None, "invalid_json"),
    (b"\x00\x01\x02", None, "invalid_json"),
    (b"model=script&n=1", None, "invalid_json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature", "invalid_json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_p": -Infinity}', "top_p", "invalid_json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "presence_penalty": 1e999}', "presence_penalty", "invalid_json"),
    (b'{"messages": [{"role": "user", "content": NaN}]}', "messages[0].content", "invalid_json"),
    (b"[" * 201 + b"]" * 201, None, "invalid_json"),
    (b"[" * 100_000, None, "invalid_json"),
    (b'{"messages": ' + b'{"a":' * 200 + b"1" + b"}" * 201, None, "invalid_json"),
    ([], None, "invalid_type"),
    ("text", None, "invalid_type"),
    (None, None, "invalid_type"),
    ({}, "messages", "missing_required_parameter"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": {"role": "user"}}, "messages", "invalid_type"),
    ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [*HI, {"role": "assistant"}]}, "messages[1].content", "invalid_value"),
    ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "invalid_type"),
    ({"messages": HI, "model": 5}, "model", "invalid_type"),
    ({"messages": HI, "stream": "yes"}, "stream", "invalid_type"),
    ({"messages": HI, "stream": 1}, "stream", "invalid_type"),
    ({"messages": HI, "stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"messages": HI, "stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
    ({"messages": HI, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"messages": HI, "max_tokens": -5}, "max_tokens", "integer_below_min_value"),
    ({"messages": HI, "max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"messages": HI, "max_tokens": 5.5}, "max_tokens", "invalid_type"),
    ({"messages": HI, "max_tokens": True}, "max_tokens", "invalid_type"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"messages": HI, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"messages": HI, "temperature": "1"}, "temperature", "invalid_type"),
    ({"messages": HI, "temperature": False}, "temperature", "invalid_type"),
    ({"messages": HI, "temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"messages": HI, "temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"messages": HI, "top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"messages": HI, "top_k": -2}, "top_k", "integer_below_min_value"),
    ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"messages": HI, "stop": 5}, "stop", "invalid_type"),
    ({"messages": HI, "stop": ""}, "stop[0]", "empty_string"),
    ({"messages": HI, "stop": ["a", 5]}, "stop[1]", "invalid_type"),
    ({"messages": HI, "seed": 1.5}, "seed", "invalid_type"),
    ({"messages": HI, "seed": 2**63}, "seed", "integer_above_max_value"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias[5]", "decimal_above_max_value"),
    ({"messages": HI, "logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"messages": HI, "cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    ({"messages": HI, "cache_salt": ""}, "cache_salt", "empty_string"),
    ({"messages": HI, "priority": 101}, "priority", "integer_above_max_value"),
    ({"messages": HI, "forebay": {"explain": "yes"}}, "forebay.explain", "invalid_type"),
    ({"messages": HI, "forebay": {"prefill": "fast"}}, "forebay.prefill", "invalid_value"),
    ({"messages": HI, "forebay": {"replay": "none"}}, "forebay.replay", "invalid_value"),
    ({"messages": HI, "forebay": {"max_lineage": -1}}, "forebay.max_lineage", "integer_below_min_value"),
    ({"messages": HI, "forebay": {"max_lineage": 2**31}}, "forebay.max_lineage", "integer_above_max_value"),
    ({"messages": HI, "forebay": {"max_lineage": True}}, "forebay.max_lineage", "invalid_type"),
    ({"messages": HI, "forebay": {"max_lineage": 0.5}}, "forebay.max_lineage", "invalid_type"),
    ({"messages": HI, "forebay": {"max_lineages": 0}}, "forebay.max_lineages", "unknown_parameter"),
    ({"messages": HI, "forebay": {"explain": True, "Replay": None}}, "forebay.Replay", "unknown_parameter"),
    ({"messages": HI, "forebay": {str(i): 0 for i in range(17)}}, "forebay", "array_above_max_length"),
    ({"messages": HI, "forebay": True}, "forebay", "invalid_type"),
    ({"messages": HI, "tools": {}}, "tools", "invalid_type"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
    ({"messages": HI, "response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported_value"),
    ({"messages": HI, "thinking": {"type": "maybe"}}, "thinking.type", "invalid_value"),
    ({"messages": HI, "user": 5}, "user", "invalid_type"),
    ({"messages": HI, "user_id": "x" * 513}, "user_id", "string_above_max_length"),
    ({"messages": HI, "modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    ({"messages": HI, "audio": {"voice": "a"}}, "audio", "unsupported_parameter"),
    ({"messages": HI, "chat_template": "{{x}}"}, "chat_template", "unsupported_parameter"),
    ({"messages": HI, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "unsupported_parameter"),
    ({"messages": HI, "guided_grammar": "root ::= x"}, "guided_grammar", "unsupported_parameter"),
    ({"messages": HI, "bad_words": ["a", ""]}, "bad_words[1]", "empty_string"),
    ({"messages": HI, "bad_words": "a"}, "bad_words", "invalid_type"),
    ({"messages": HI, "echo": True}, "echo", "unsupported_parameter"),
    ({"messages": HI, "echo": "yes"}, "echo", "invalid_type"),
    ({"messages": HI, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "unsupported_value"),
    ({"messages": HI, "stream_interval": 0}, "stream_interval", "integer_below_min_value"),
    ({"messages": HI, "stream_reasoning": "no"}, "stream_reasoning", "invalid_type"),
    ({"messages": HI, "separate_reasoning": 0}, "separate_reasoning", "invalid_type"),
    ({"messages": HI, "n": 9}, "n", "unsupported_value"),
    ({"messages": HI, "user_id": "é" * 300}, "user_id", "string_above_max_length"),
    ({"messages": HI, "max_tokens": None, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "invalid_value"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": []}, "input", "empty_array"),
    ({"input": ["Hi"]}, "input[0]", "invalid_type"),
    ({"input": [*HI, {"type": "item_reference", "id": "a"}]}, "input[1]", "unsupported_parameter"),
    ({"input": [*HI, {"role": "user", "content": 5}]}, "input[1].content", "invalid_type"),
    ({"input": [*HI, {"type": "function_call", "name": "f"}]}, "input[1].call_id", "invalid_type"),
    ({"input": "Hi", "instructions": 5}, "instructions", "invalid_type"),
    ({"messages": HI, "add_generation_prompt": False}, "add_generation_prompt", "unsupported_parameter"),
]


@pytest.mark.case("B077")
@pytest.mark.parametrize(("body", "param", "code"), BAD, ids=range(len(BAD)))
def test_bad_bodies(served: Served, body: Any, param: str | None, code: str) -> None:
    response = post(served, content=body) if isinstance(body, bytes) else post(served, body)
    error = refused(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    if param is not None:
        assert param.partition("[")[0].split(".")[0] in error["message"]
    assert not served.engine.requests


def test_unknown_option_of_our_own_object_is_told_the_known_ones(served: Served) -> None:
    message = refused(post(served, {"messages": HI, "forebay": {"lineage": 0}}))["message"]
    assert message == "Unknown parameter: 'forebay.lineage'. 'forebay' takes explain, prefill, replay, max_lineage."


@pytest.mark.case("B077")
@pytest.mark.parametrize("stream", [True, False])
def test_bad_requests_have_a_real_status_when_streaming(served: Served, stream: bool) -> None:
    assert refused(post(served, {"messages": HI, "stream": stream, "model": "nope"}), 404)["code"] == "model_not_found"
    assert refused(post(served, {"messages": [{"role": "x"}], "stream": stream}))["param"] == "messages[0].role"
    served.engine.max_context = 5
    assert refused(post(served, {"messages": HI, "stream": stream}))["code"] == "context_length_exceeded"


@pytest.mark.case("B077")
def test_content_types_do_not_matter_but_encodings_do(served: Served) -> None:
    body = json.dumps({"messages": HI}).encode()
    for kind in ("application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded", ""):
        assert post(served, content=body, headers={"content-type": kind}).status_code == 200
    raw_deflate = zlib.compress(body)[2:-4]
    for encoding, data in {
        "gzip": gzip.compress(body), "deflate": zlib.compress(body), "Deflate": raw_deflate, "identity": body,
        "deflate, gzip": gzip.compress(zlib.compress(body)),
    }.items():  # fmt: skip
        assert post(served, content=data, headers={"content-encoding": encoding}).status_code == 200
    for encoding in ("br", "compress", "gzip, br", "x" * 100):
        assert refused(post(served, content=body, headers={"content-encoding": encoding}), 415)["code"] == "unsupported_media_type"
    assert refused(post(served, content=body, headers={"content-encoding": "gzip"}))["code"] == "invalid_body"
    assert refused(post(served, content=gzip.compress(body)[:-9], headers={"content-encoding": "gzip"}))["code"] == "invalid_body"


@pytest.mark.case("B116")
def test_a_compressed_bomb_is_cut_at_the_limit(served: Served) -> None:
    bomb = gzip.compress(b"[" + b" " * (64 * MIB) + b"]")
    assert len(bomb) < MIB
    error = refused(post(served, content=bomb, headers={"content-encoding": "gzip"}), 413)
    assert "8 MiB" in error["message"]
    still_serves(served)


@pytest.mark.case("B109")
@pytest.mark.parametrize(
    "field", ["prompt_logprobs", "top_logprobs", "logprobs", "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens"]
)
@pytest.mark.parametrize("value", [-1, 129_280, 10**9, 10**6, 2**63, 2**64, True, "5", 2.5, [1]])
def test_greedy_options_are_refused_by_name(served: Served, field: str, value: Any) -> None:
    response = post(served, {"messages": HI, "logprobs": True, "max_tokens": 10, field: value})
    lowered = "max" in field and value in (129_280, 10**6, 10**9)  # to what fits
    if lowered or (field == "logprobs" and value is True):
        assert response.status_code == 200
        return
    error = refused(response)
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.case("B109")
def test_the_limits_are_told(served: Served) -> None:
    limits = [("n", 10**6, "8"), ("top_logprobs", 21, "20"), ("prompt_logprobs", 10**9, "20"), ("max_tokens", 2**63, str(2**31))]
    for field, value, limit in limits:
        assert limit in refused(post(served, {"messages": HI, "logprobs": True, field: value}))["message"]


# Items of a wrong type would each be worth an error of their own if they were looked at before they were counted.
EXPENSIVE = {
    "stop strings": ({"stop": [5] * 500_000}, "stop", "array_above_max_length"),
    "bad words": ({"bad_words": [5] * 500_000}, "bad_words", "array_above_max_length"),
    "bad word length": ({"bad_words": ["x", "x" * MIB]}, "bad_words[1]", "string_above_max_length"),
    "logit bias": ({"logit_bias": {f"x{i}": "y" for i in range(50_000)}}, "logit_bias", "array_above_max_length"),
    "tools": ({"tools": [5] * 10_000}, "tools", "array_above_max_length"),
    "messages": ({"messages": [5] * 20_000}, "messages", "array_above_max_length"),
    "stop length": ({"stop": "x" * MIB}, "stop[0]", "string_above_max_length"),
    "stop ids": ({"stop_token_ids": ["x"] * 100_000}, "stop_token_ids", "array_above_max_length"),
    "allowed ids": ({"allowed_token_ids": ["x"] * 100_000}, "allowed_token_ids", "array_above_max_length"),
}


@pytest.mark.case("B110")
@pytest.mark.parametrize("name", EXPENSIVE)
def test_cheap_requests_cannot_buy_expensive_work(served: Served, name: str) -> None:
    fields, param, code = EXPENSIVE[name]
    error = refused(post(served, {"messages": HI, **fields}))
    assert (error["param"], error["code"]) == (param, code)
    assert not served.engine.requests


TOO_MANY: dict[str, Any] = {
    "stop": ["x"] * 500_000,
    "logit_bias": {str(i): 1 for i in range(50_000)},
    "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(10_000)],
    "messages": HI * 20_000,
}


@pytest.mark.case("B110")
@pytest.mark.parametrize("field", TOO_MANY)
def test_refusing_too_many_items_costs_little(served: Served, field: str) -> None:
    """CPU time of client and server together; of three tries the least, since other threads of the tests count as well."""
    content = json.dumps({"messages": HI, field: TOO_MANY[field]}).encode()
    spent = []
    for _ in range(3):
        before = time.process_time()
        assert refused(post(served, content=content))["param"] == field
        spent.append(time.process_time() - before)
    assert min(spent) < 0.1, spent


@pytest.mark.case("B111")
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_that_the_model_lacks_never_reach_it(served: Served, field: str) -> None:
    tokenizer = served.engine.tokenizer
    placeholder = [tokenizer.image_id] if tokenizer.image_id is not None else []
    for token_id in [-1, tokenizer.vocab_size, 2**31, 2**63, *placeholder]:
        value: Any = {str(token_id): 1} if field == "logit_bias" else [0, token_id]
        error = refused(post(served, {"messages": HI, field: value}))
        assert error["param"].startswith(field)
    for token_id in ("1.5", "０", "0x1", " 5", "5 ", "+5", "", "9" * 500):
        assert refused(post(served, {"messages": HI, "logit_bias": {token_id: 1}}))["param"].startswith("logit_bias")
    for value in ([1.5], ["5"], [True], "5", [None]):
        if field != "logit_bias":
            assert refused(post(served, {"messages": HI, field: value}))["param"].startswith(field)
    assert not served.engine.requests
    last = tokenizer.vocab_size - 1
    good: Any = {str(last): 1} if field == "logit_bias" else [0, last]
    assert post(served, {"messages": HI, field: good}).status_code == 200


@pytest.mark.case("B111")
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_none_are_refused_and_neighbours_undisturbed(served: Served, client: openai.OpenAI, field: str) -> None:
    served.engine.answer = Script([*served.engine.ids("</think>A quiet neighbour speaks."), served.engine.tokenizer.eos_id], delay_s=0.002)
    stream = client.chat.completions.create(model="script", messages=HI, stream=True)
    for value in ("NaN", "Infinity", "-Infinity", "1e38", "-1e38", "1e999"):
        body = b'{"messages": [{"role": "user", "content": "x"}], "%b": %b}' % (field.encode(), value.encode())
        assert refused(post(served, content=body))["param"] == field
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "A quiet neighbour speaks."


STRANGE: list[Any] = [
    True, False, 0, -1, 1.5, 2**63, 2**70, -(10.0**300), "", "x", "\x00", "5", "<｜end▁of▁sentence｜>", "ﷺ🙂" * 50, [], [[]], [None], ["x"],
    [5], [{}], {}, {"": None}, {"type": 5}, {"type": "function"}, {"x": {"y": [1]}},
]  # fmt: skip


@pytest.mark.parametrize("field", sorted(KNOWN | {"forebay.explain", "never_heard_of"}))
def test_any_value_in_any_field_is_served_or_refused(served: Served, field: str) -> None:
    served.engine.say("</think>Fine.")
    for value in STRANGE:
        body: dict[str, Any] = {"messages": HI, "max_tokens": 4}
        response = post(served, {**body, "stream": True, field: value} if field != "stream" else {**body, field: value})
        if response.status_code != 200:
            refused(response, 404 if field == "model" and isinstance(value, str) else 400)
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert '"error"' not in response.text


@pytest.mark.parametrize("place", ["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name", "prefix", "task"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "function", "developer"])
def test_any_value_in_any_message_is_served_or_refused(served: Served, role: str, place: str) -> None:
    for value in STRANGE:
        message = {"role": role, "content": "x", "tool_call_id": "a", "name": "b", place: value}
        response = post(served, {"messages": [*HI, message], "max_tokens": 4})
        if response.status_code != 200:
            assert refused(response)["param"].startswith("messages")


def test_engine_refusals_keep_their_field(served: Served) -> None:
    """The engine checks once more; a rule only it knows still names the field."""
    rule = RequestError("messages are too long for the KV pool of 1024 tokens", param="messages")
    served.engine.answer = Script([5], fail_at=0, raises=True, error=rule)
    error = refused(post(served, {"messages": HI, "stream": True}))
    assert (error["param"], error["code"]) == ("messages", "invalid_value")


# ---- the parser of bodies by itself


@pytest.mark.parametrize("depth", [1, 199, 200])
def test_nesting_up_to_the_limit(depth: int) -> None:
    data = b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)
    assert isinstance(parse_object(data, 200), dict)
    with pytest.raises(HttpError, match="at most"):
        parse_object(b'{"a":' * depth + b"{}" + b"}" * depth, depth)


def test_brackets_in_strings_are_not_nesting() -> None:
    assert parse_object(b'{"a": "' + b"[" * 5000 + b'\\""}', 200) == {"a": "[" * 5000 + '"'}
    with pytest.raises(HttpError) as error:
        parse_object(b'{"a": "' + b"[{" * 5000 + b'\\"", }', 200)
    assert "line 1, column" in error.value.message


def test_last_of_two_keys_wins() -> None:
    assert parse_object(b'{"a": 1, "a": 2}', 200) == {"a": 2}


@pytest.mark.parametrize("number", [2**63, 2**64, 10**18, 10**19, -(2**70), 10**300])
def test_integers_are_exact(number: int) -> None:
    found = parse_object(b'{"a": [%d, 1.5, "1234567890123456789012"]}' % number, 200)
    assert found == {"a": [number, 1.5, "1234567890123456789012"]}
    assert type(found["a"][0]) is int


def test_byte_order_mark_is_skipped() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}', 200) == {"a": 1}


def test_decode_at_the_limit() -> None:
    data = b"x" * 1000
    assert decode(gzip.compress(data), "gzip", 1000) == data
    assert decode(gzip.compress(data[:500]) + gzip.compress(data[500:]), "gzip", 1000) == data
    with pytest.raises(HttpError) as error:
        decode(gzip.compress(data), "gzip", 999)
    assert error.value.status == 413


def test_body_of_empty_gzip_members_is_refused_at_once() -> None:
    began = time.process_time()
    with pytest.raises(HttpError, match="members"):
        decode(gzip.compress(b"") * 1_000_000, "gzip", 64 * MIB)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("size", [0, 1, 300_000, 700_000])
@pytest.mark.parametrize("fill", ["random", "zeros"])
def test_compressed_body_in_pieces(size: int, fill: str) -> None:
    data = random.Random(size).randbytes(size) if fill == "random" else bytes(size)
    for packed, name in ((gzip.compress(data), "gzip"), (zlib.compress(data), "deflate"), (zlib.compress(data)[2:-4], "deflate")):
        assert decode(packed, name, size) == data
        with pytest.raises(HttpError) as caught:
            decode(packed[:-1], name, size + 1)
        assert caught.value.status == 400


def test_string_that_never_ends_costs_no_more_than_its_length(served: Served) -> None:
    began = time.process_time()
    refused(post(served, content=b'{"a": "' + b'\\"' * 30_000))  # small: parsed on the event loop
    refused(post(served, content=b'{"a": "' + b'\\"' * 500_000))
    assert time.process_time() - began < 2.0


def test_body_of_very_many_values_is_refused_before_it_is_parsed(served: Served) -> None:
    for content in (b'{"messages": [' + b"[]," * 1_100_000 + b"[]]}", b'{"a": [' + b"1," * 1_100_000 + b"NaN]}"):
        assert "too many values" in refused(post(served, content=content))["message"]
    # The same characters inside a text are no values.
    assert parse_object(b'{"a": "' + b'[],\\"' * 600_000 + b'"}', 200)["a"].count("[") == 600_000


def test_path_of_a_number_that_is_not_finite(served: Served) -> None:
    error = refused(post(served, content=b'{"x": [{}, {"t": [1, {"u": NaN}]}], "y": []}'))
    assert error["param"] == "x[1].t[1].u"


def test_errors_do_not_echo_keys_of_megabytes(served: Served) -> None:
    key = "k" * MIB
    for content in (f'{{"{key}": NaN}}', f'{{"messages": [], "logit_bias": {{"{key}": "x"}}}}'):
        response = post(served, content=content.encode())
        assert response.status_code == 400
        assert len(response.content) < 4000
