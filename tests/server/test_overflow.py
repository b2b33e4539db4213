"""A request that does not fit into the context is refused in the one sentence that agents look for (spec/http-api.md §2.3), everywhere."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from forebay.server.limits import ServerOptions
from script_engine import ScriptEngine, Served, serve

LIMIT = 300
SENTENCE = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens \((\d+) in the messages, (\d+) in the "
    r"completion\)\. Please reduce the length of the messages or completion\."
)
OPENAI: dict[str, tuple[Any, str, str]] = {  # route -> what makes its body of a text, the field to blame, the name of its output limit
    "/v1/chat/completions": (lambda text: {"messages": [{"role": "user", "content": text}]}, "messages", "max_tokens"),
    "/v1/chat/completions#input": (lambda text: {"input": text}, "input", "max_output_tokens"),
    "/v1/responses": (lambda text: {"input": [{"role": "user", "content": text}]}, "input", "max_output_tokens"),
    "/v1/completions": (lambda text: {"prompt": text}, "prompt", "max_tokens"),
    "/v1/completions#fill": (lambda text: {"prompt": "a", "suffix": text}, "prompt", "max_tokens"),
    "/v1/completions#several": (lambda text: {"prompt": ["a", text]}, "prompt", "max_tokens"),
}


def error_of(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{served.url}{path.partition('#')[0]}", json=body, timeout=60)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("words", [150, 400, 1000, 100_000, 1_000_000])  # a little, twice, many times too long
@pytest.mark.parametrize("path", OPENAI)
def test_the_sentence_of_the_openai_family(served: Served, path: str, words: int) -> None:
    served.engine.max_context = LIMIT
    make, field, limit_name = OPENAI[path]
    for asked in (0, 7):
        error = error_of(served, path, {**make("hello, " * words), **({limit_name: asked} if asked else {})})
        found = SENTENCE.fullmatch(error["message"])
        assert found, error["message"]
        limit, requested, prompt, output = map(int, found.groups())
        assert limit == LIMIT
        assert output == (asked or (16 if "/v1/completions" in path else 0))  # completions without a limit ask for 16
        assert requested == prompt + output
        assert LIMIT <= prompt <= 7 * words + 200  # bytes at most
        assert error["code"] == "context_length_exceeded"
        assert error["param"].split("[")[0] == field or "fill" in path
    assert not served.engine.requests


@pytest.mark.parametrize("words", [150, 1_000_000])
def test_the_sentence_in_a_stream_of_responses(served: Served, words: int) -> None:
    served.engine.max_context = LIMIT
    body = {"input": "hello, " * words, "stream": True}
    text = httpx.post(f"{served.url}/v1/responses", json=body, timeout=60).text
    last = json.loads(text.rstrip().rpartition("\ndata: ")[2])
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")
    assert SENTENCE.fullmatch(last["response"]["error"]["message"])


@pytest.mark.parametrize("words", [150, 400, 1_000_000])
def test_the_sentence_of_the_anthropic_family(served: Served, words: int) -> None:
    served.engine.max_context = LIMIT
    error = error_of(served, "/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hello, " * words}]})
    found = re.fullmatch(rf"prompt is too long: (\d+) tokens > {LIMIT} maximum", error["message"])
    assert found and int(found[1]) >= LIMIT


def test_an_output_that_does_not_fit_is_told_the_same_way() -> None:
    with serve(ScriptEngine(max_context=LIMIT), ServerOptions(overflow_policy="error")) as served:
        for path, (make, _, limit_name) in OPENAI.items():
            found = SENTENCE.fullmatch(error_of(served, path, {**make("hello"), limit_name: LIMIT})["message"])
            assert found and int(found[2]) == int(found[3]) + LIMIT
