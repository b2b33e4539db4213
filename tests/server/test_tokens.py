"""POST /tokenize and /detokenize: the ids that a route would prefill, in the forms of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

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
    assert request.prompt is not None
    assert answer["prompt"] == request.prompt.text
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


def test_text_longer_than_the_context_is_counted_too(served: Served) -> None:
    served.engine.max_context = 5
    assert tokenize(served, {"prompt": "word " * 50})["count"] > 50
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
