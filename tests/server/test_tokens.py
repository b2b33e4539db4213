"""POST /tokenize and /detokenize: the ids that a route would prefill, in the forms of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from forebay.server import exchange, tokens
from script_engine import Served

TEXT = "Grüße <think> 東京\n👩🏽‍🚀 <｜User｜>"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=20.0)


def tokenize(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    response = post(served, "/tokenize", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == served.engine.max_context
    return dict(answer)


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


@pytest.mark.parametrize("name", ["prompt", "content", "text"])
def test_text_is_what_completions_would_prefill(served: Served, name: str) -> None:
    post(served, "/v1/completions", {"prompt": TEXT})
    prefilled = list(served.engine.requests[-1].prompt_ids)
    assert tokenize(served, {name: TEXT}) == {
        "count": len(prefilled), "max_model_len": 65536, "tokens": prefilled, "token_strs": None,
    }  # fmt: skip
    for off in ("add_special_tokens", "add_special"):
        assert tokenize(served, {name: TEXT, off: False})["tokens"] == prefilled[1:]


def test_markers_can_be_left_as_text(served: Served) -> None:
    engine = served.engine
    assert engine.tokenizer.user_id in tokenize(served, {"content": TEXT})["tokens"]
    plain = tokenize(served, {"content": TEXT, "parse_special": False, "add_special": False})["tokens"]
    assert plain == engine.tokenizer.encode(TEXT)
    assert engine.tokenizer.user_id not in plain


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "max"},
        {"tools": [TOOL]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Well"}], "continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_messages_are_what_chat_would_prefill(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    assert post(served, "/v1/chat/completions", body).status_code == 200
    request = served.engine.requests[-1]
    answer = tokenize(served, {**body, "return_prompt": True})
    assert answer["tokens"] == list(request.prompt_ids)
    assert answer["prompt"] == served.engine.tokenizer.decode(request.prompt_ids)
    assert len(served.engine.requests) == 1


def test_strings_of_tokens(served: Served) -> None:
    engine = served.engine
    answer = tokenize(served, {"prompt": TEXT, "return_token_strs": True})
    assert answer["token_strs"] == [engine.tokenizer.token_text(i) for i in answer["tokens"]]
    assert answer["token_strs"][0] == "<｜begin▁of▁sentence｜>"
    pieces = tokenize(served, {"content": "a 東\U0001f680", "with_pieces": True, "add_special": False})["tokens"]
    assert [piece["id"] for piece in pieces] == engine.tokenizer.encode("a 東\U0001f680")
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == "a 東\U0001f680"
    assert any(isinstance(piece["piece"], list) for piece in pieces)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"text": "a", "content": "b"}, "text"),
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
        ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "look: <｜deepseek_image｜>"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": MESSAGES, "reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_refusals_name_the_field(served: Served, body: dict[str, Any], param: str) -> None:
    error = refused(post(served, "/tokenize", body))
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("body", [{"prompt": "word " * 150}, {"messages": [{"role": "user", "content": "word " * 150}]}])
def test_text_longer_than_the_context_is_listed_up_to_four_times_its_length(served: Served, body: dict[str, Any]) -> None:
    served.engine.max_context = 50
    field = next(iter(body))
    listed = tokenize(served, body)
    assert 150 < listed["count"] == len(listed["tokens"]) <= 200
    longer = json.loads(json.dumps(body).replace("word " * 150, "word " * 250))
    error = refused(post(served, "/tokenize", longer))
    assert error["param"] == field and "at most 200 tokens" in error["message"] and error["code"] == "string_above_max_length"
    for name in ("with_pieces", "return_token_strs"):
        error = refused(post(served, "/tokenize", {**body, name: True}))
        assert error["param"] == name and "50 tokens" in error["message"]
    error = refused(post(served, "/detokenize", {"tokens": [5] * 201}))
    assert error["param"] == "tokens" and "200" in error["message"]
    assert post(served, "/detokenize", {"tokens": [5] * 200}).status_code == 200


def test_answers_in_slices_are_whole(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Ab 12, é漢\n" * 400
    whole = tokenize(served, {"prompt": text, "return_token_strs": True, "return_prompt": True})
    pieces = tokenize(served, {"prompt": text, "with_pieces": True})
    for size in (1, 7, 1000, len(whole["tokens"]), len(whole["tokens"]) - 1):
        monkeypatch.setattr(tokens, "_SLICE", size)
        monkeypatch.setattr(exchange, "_PART", 1000)
        assert tokenize(served, {"prompt": text, "return_token_strs": True, "return_prompt": True}) == whole
        assert tokenize(served, {"prompt": text, "with_pieces": True}) == pieces
    assert tokenize(served, {"prompt": "", "add_special_tokens": False, "return_token_strs": True})["tokens"] == []


def test_a_long_text_is_given_up_before_it_is_tokenised(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million tokens would be gigabytes: no more of them are found than it takes to know that they are too many."""
    served.engine.max_context = 1000
    seen: list[int] = []
    tokenizer = served.engine.tokenizer
    encodings = tokenizer.encodings

    def encode(texts: Sequence[str]) -> Any:
        seen.append(sum(map(len, texts)))
        return encodings(texts)

    monkeypatch.setattr(tokenizer, "encodings", encode)
    refused(post(served, "/tokenize", {"prompt": "1 " * 40_000}))
    assert 0 < sum(seen) < 600_000
    refused(post(served, "/tokenize", {"prompt": "1 " * 2_000_000}))
    assert sum(seen) < 600_000


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_counts_know_no_limit_and_make_no_ids(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served.engine.max_context = 1000

    def count(content: str) -> int:
        chat = [{"role": "user", "content": content}]
        body: dict[str, Any] = {"messages": chat} if "messages" in path else {"input": chat, "reasoning": {"effort": "none"}}
        response = post(served, path, body)
        assert response.status_code == 200, response.text
        return int(response.json()["input_tokens"])

    few = count("1 ")
    cache = served.engine.codec.token_cache
    monkeypatch.setattr(cache, "_max_bytes", 1 << 16)
    assert count("1 " * 300_000) == few + 2 * 299_999
    assert cache.bytes <= 1 << 16
    listed = tokenize(served, {"messages": [{"role": "user", "content": "1 " * 700}], "thinking": {"type": "disabled"}})["count"]
    assert count("1 " * 700) == listed


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}), ("/v1/responses/input_tokens", {"input": "x"})],
)
def test_counts_need_no_engine(served: Served, state: Any, path: str, body: dict[str, Any]) -> None:
    served.engine.state = state
    assert post(served, path, body).json()["input_tokens"] > 2
    assert tokenize(served, {"messages": [{"role": "user", "content": "word " * 50}]})["count"] > 50


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_there_and_back(served: Served, path: str) -> None:
    ids = post(served, "/v1/tokenize", {"prompt": TEXT}).json()["tokens"]
    whole = "<｜begin▁of▁sentence｜>" + TEXT  # special tokens are kept
    assert post(served, path, {"tokens": ids}).json() == {"prompt": whole, "text": whole, "content": whole}
    assert post(served, path, {"tokens": [float(i) for i in ids]}).json()["text"] == whole
    assert post(served, path, {"tokens": []}).json()["text"] == ""
    half = served.engine.byte_ids("東")[:2]
    assert post(served, path, {"tokens": half}).json()["text"] == bytes("東".encode()[:2]).decode("utf-8", "replace")


@pytest.mark.case("B111")
@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        (None, "tokens"), ("5", "tokens"), ({"0": 5}, "tokens"), ([5, -1], "tokens[1]"), ([5, "5"], "tokens[1]"), ([True], "tokens[0]"),
        ([5, 5.5], "tokens[1]"), ([10**7], "tokens[0]"), ([0, 2**63], "tokens[1]"), ([[5]], "tokens[0]"), ([None], "tokens[0]"),
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused_by_its_place(served: Served, tokens: Any, param: str) -> None:
    error = refused(post(served, "/detokenize", {"tokens": tokens}))
    assert error["param"] == param
    assert param in error["message"]


def test_the_last_id_and_the_one_after_it(served: Served) -> None:
    size = served.engine.tokenizer.vocab_size
    assert post(served, "/detokenize", {"tokens": [size - 1]}).status_code == 200
    assert str(size - 1) in refused(post(served, "/detokenize", {"tokens": [size]}))["message"]


def test_models_and_names_that_change_nothing(served: Served) -> None:
    for path, body in [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), ("/tokenize", {"messages": MESSAGES})]:
        response = post(served, path, {**body, "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        response = post(served, path, {**body, "model": "script", "unheard_of": 1})
        assert (response.status_code, response.headers["x-forebay-ignored"]) == (200, "unheard_of")
    response = post(served, "/tokenize", {"messages": MESSAGES, "add_special_tokens": True})
    assert response.headers["x-forebay-ignored"] == "add_special_tokens"


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_they_answer_without_the_engine(served: Served, state: Any) -> None:
    served.engine.state = state
    ids = tokenize(served, {"prompt": "Hi"})["tokens"]
    assert post(served, "/detokenize", {"tokens": ids[1:]}).json()["text"] == "Hi"
    assert tokenize(served, {"messages": MESSAGES})["count"] > 5


def test_large_texts_leave_the_loop_free(served: Served) -> None:
    """Probes answer while megabytes are tokenised."""
    served.engine.max_context = 1 << 20
    text = "The quick brown fox. " * 60_000
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{served.url}/tokenize", json={"prompt": text}, timeout=120.0)))
    slowest, started = 0.0, time.monotonic()
    with httpx.Client(timeout=60.0) as client:
        client.get(served.url + "/health")
        thread.start()
        while thread.is_alive():
            began = time.monotonic()
            assert client.get(served.url + "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.005)
    thread.join()
    whole = time.monotonic() - started
    ids = found[0].json()["tokens"]
    assert served.engine.tokenizer.decode(ids[1:]) == text
    print(f"{whole:.2f} s to tokenise, slowest probe {slowest:.2f} s")
    assert slowest < 0.8 * whole  # on the loop, one probe would wait for all of it
