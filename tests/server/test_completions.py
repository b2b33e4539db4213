"""POST /v1/completions through the official client: raw prompts in, raw text and legacy log-probabilities out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from forebay.engine.constraint import Allowed, Constraint
from forebay.engine.types import TokenLogprob
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine, Served, serve

PATH = "/v1/completions"
TEXT = "Grüße, 東京! 👩🏽‍🚀 <think>markers stay</think> <｜User｜> and ｜DSML｜ too.\n\nEnd"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20.0) as client:
        yield client


def post(served: Served, body: dict[str, Any], path: str = PATH) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=20.0)


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Chunks of a stream, which ends as it must."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def collect(chunks: list[Completion]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream: text and log-probabilities joined, one finish reason for each choice."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            into = found.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": None})
            assert into["finish_reason"] is None, "something came after the end"
            into["text"] += choice.text
            into["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                given = choice.logprobs.model_dump()
                into["logprobs"] = {k: (into["logprobs"] or {}).get(k, []) + v for k, v in given.items()}
    return found


def whole(answer: Completion) -> dict[int, dict[str, Any]]:
    return {
        c.index: {"text": c.text, "finish_reason": c.finish_reason, "logprobs": c.logprobs and c.logprobs.model_dump()}
        for c in answer.choices
    }


# ---- prompts


def test_a_text_prompt_is_encoded_raw_behind_begin_of_sentence(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="script", prompt="<｜User｜>Hi<think>")
    tokenizer = served.engine.tokenizer
    (request,) = served.engine.requests
    assert list(request.prompt_ids) == [tokenizer.bos_id, *tokenizer.encode_special("<｜User｜>Hi<think>")]
    assert tokenizer.user_id in request.prompt_ids
    assert (request.prompt, request.params.max_tokens, request.params.temperature, request.params.top_p) == (None, 16, 1.0, 1.0)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model, answer.choices[0].text) == ("text_completion", "script", "Hello there.")
    assert (answer.choices[0].finish_reason, answer.choices[0].logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_begin_of_sentence_is_never_doubled_and_can_be_left_out(served: Served, client: openai.OpenAI) -> None:
    bos = served.engine.tokenizer.bos_id
    client.completions.create(model="script", prompt="<｜begin▁of▁sentence｜>Hi")
    client.completions.create(model="script", prompt="Hi", extra_body={"add_special_tokens": False})
    client.completions.create(model="script", prompt="")
    client.completions.create(model="script", prompt=[72, 73])
    first, second, third, fourth = (list(request.prompt_ids) for request in served.engine.requests)
    assert first == [bos, *second]
    assert (third, fourth) == ([bos], [72, 73])
    assert refused(post(served, {"prompt": "", "add_special_tokens": False}))["param"] == "prompt"


@pytest.mark.parametrize("prompt", [["One", "Two", "Three"], [[72], [73, 74], [75]]])
def test_choices_are_numbered_prompt_by_prompt(served: Served, client: openai.OpenAI, prompt: Any) -> None:
    engine = served.engine
    served.engine.answer = lambda request: Script(engine.ids(f"{list(request.prompt_ids)} {request.params.seed}"))
    answer = client.completions.create(model="script", prompt=prompt, n=2, seed=5, max_tokens=99)
    assert [choice.index for choice in answer.choices] == list(range(6))
    prompts = [[engine.tokenizer.bos_id, *engine.ids(p)] if isinstance(p, str) else p for p in prompt]
    assert [choice.text for choice in answer.choices] == [f"{ids} {seed}" for ids in prompts for seed in (5, 6)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(engine.ids(c.text)) for c in answer.choices)
    shares = {request.share for request in engine.requests}
    assert len(shares) == 3
    stream = collect(list(client.completions.create(model="script", prompt=prompt, n=2, seed=5, max_tokens=99, stream=True)))
    assert stream == whole(answer)


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        (None, "prompt", "missing_required_parameter"),
        ([], "prompt", "empty_array"),
        ([[]], "prompt[0]", "empty_array"),
        (7, "prompt", "invalid_type"),
        ({"text": "x"}, "prompt", "invalid_type"),
        (True, "prompt", "invalid_type"),
        ([True], "prompt[0]", "invalid_type"),
        ([1, "a"], "prompt[1]", "invalid_type"),
        (["a", 1], "prompt[1]", "invalid_type"),
        (["a", None], "prompt[1]", "invalid_type"),
        ([[5], 6], "prompt[1]", "invalid_type"),
        ([[5], [6, 7.5]], "prompt[1][1]", "invalid_type"),
        ([5, -1], "prompt[1]", "invalid_value"),
        ([5, 10**6], "prompt[1]", "invalid_value"),
        ([5, 2**31], "prompt[1]", "invalid_value"),
        ([5, 2**63], "prompt[1]", "invalid_value"),
        ([[5], [10**30]], "prompt[1][0]", "invalid_value"),
        ("look: <｜deepseek_image｜>", "prompt", "invalid_value"),
        (["a", "<｜deepseek_image｜>"], "prompt[1]", "invalid_value"),
        (["x"] * 257, "prompt", "array_above_max_length"),
    ],
)
@pytest.mark.case("B111")
def test_what_is_no_prompt_is_refused_by_its_place(served: Served, prompt: Any, param: str, code: str) -> None:
    error = refused(post(served, {"prompt": prompt}))
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]
    assert not served.engine.requests


@pytest.mark.case("B111")
def test_the_edge_ids_of_the_vocabulary(served: Served) -> None:
    tokenizer = served.engine.tokenizer
    assert post(served, {"prompt": [0, 5.0, tokenizer.vocab_size - 1]}).status_code == 200
    assert served.engine.requests[-1].prompt_ids == [0, 5, tokenizer.vocab_size - 1]
    for bad in (tokenizer.vocab_size, tokenizer.image_id):
        assert refused(post(served, {"prompt": [bad]}))["param"] == "prompt[0]"


def test_a_prompt_that_does_not_fit(served: Served) -> None:
    served.engine.max_context = 10
    error = refused(post(served, {"prompt": [5] * 10, "max_tokens": 4}))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "maximum context length is 10 tokens. However, you requested 14 tokens (10 in the messages, 4 in the" in error["message"]
    error = refused(post(served, {"prompt": ["a", "x" * 100_000]}))
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
    assert "maximum context length is 10 tokens" in error["message"]
    assert post(served, {"prompt": [5] * 9, "max_tokens": 400}).status_code == 200
    assert served.engine.requests[-1].params.max_tokens == 1


# ---- what is generated


def test_text_is_raw(served: Served, client: openai.OpenAI) -> None:
    served.engine.say(TEXT)
    answer = client.completions.create(model="script", prompt="x", max_tokens=500)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"


def test_stop_strings_apply_to_the_whole_text(served: Served, client: openai.OpenAI) -> None:
    served.engine.say(TEXT)
    answer = client.completions.create(model="script", prompt="x", max_tokens=500, stop=["stay</think>", "nowhere"])
    assert answer.choices[0].text == TEXT.partition("stay</think>")[0]
    assert (answer.choices[0].finish_reason, answer.choices[0].model_extra) == ("stop", {"stop_reason": "stay</think>"})


def test_the_limit_ends_it(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="script", prompt="x", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    client.completions.create(model="script", prompt="x", extra_body={"max_completion_tokens": 3})
    assert served.engine.requests[-1].params.max_tokens == 3


def test_sampling_fields_are_those_of_chat(served: Served) -> None:
    body = {
        "prompt": "x", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -1,
        "repetition_penalty": 1.5, "seed": 3, "logit_bias": {"5": -2}, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True,
        "include_stop_str_in_output": True, "allowed_token_ids": [5, 6],
    }  # fmt: skip
    assert post(served, body).status_code == 200
    p = served.engine.requests[-1].params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.frequency_penalty, p.presence_penalty) == (0.5, 0.9, 7, 0.1, 1, -1)
    assert (p.repetition_penalty, p.seed, p.logit_bias, p.min_tokens, p.stop_token_ids) == (1.5, 3, {5: -2}, 2, (9,))
    assert (p.ignore_eos, p.include_stop, p.allowed_token_ids) == (True, True, (5, 6))
    for field, value in [("temperature", 3), ("stop", [""]), ("n", 9), ("seed", "1"), ("logit_bias", {"x": 1}), ("stop_token_ids", [-1])]:
        assert refused(post(served, {"prompt": "x", field: value}))["param"].startswith(field)


# ---- fill in the middle


def test_suffix_asks_for_the_middle(served: Served, client: openai.OpenAI) -> None:
    tokenizer = served.engine.tokenizer
    begin, hole, end = (tokenizer.special_id(f"<｜fim▁{name}｜>") for name in ("begin", "hole", "end"))
    served.engine.say("x):\n    ")
    answer = client.completions.create(model="script", prompt="def f(", suffix="return x  # </think>", echo=True)
    expected = [begin, *tokenizer.encode("def f("), hole, *tokenizer.encode("return x  # </think>"), end]
    assert list(served.engine.requests[0].prompt_ids) == [tokenizer.bos_id, *expected]
    assert tokenizer.think_end_id not in served.engine.requests[0].prompt_ids
    assert answer.choices[0].text == "def f(x):\n    "
    post(served, {"prompt": "def f(", "suffix": "return x  # </think>", "add_special_tokens": False})
    assert list(served.engine.requests[1].prompt_ids) == expected
    post(served, {"prompt": "Hi", "suffix": ""})
    assert list(served.engine.requests[2].prompt_ids) == [tokenizer.bos_id, *tokenizer.encode("Hi")]


@pytest.mark.parametrize("prompt", [["a", "b"], [5, 6], [[5]]])
def test_suffix_needs_one_text(served: Served, prompt: Any) -> None:
    assert refused(post(served, {"prompt": prompt, "suffix": "z"}))["param"] == "suffix"
    assert post(served, {"prompt": ["a"], "suffix": "z"}).status_code == 200


# ---- log-probabilities and echo


def test_legacy_logprobs(served: Served, client: openai.OpenAI) -> None:
    engine = served.engine
    engine.say("Hi 東!")
    answer = client.completions.create(model="script", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    ids = [*engine.ids("Hi 東!"), engine.tokenizer.eos_id or 0]
    assert logprobs.token_logprobs == [-0.25 - i / 1024 for i in range(len(ids))]
    assert logprobs.tokens is not None
    assert logprobs.tokens[0] == engine.tokenizer.token_text(ids[0])
    assert logprobs.tokens[-1] == "<｜end▁of▁sentence｜>"  # counted like the ids, for clients that index by them
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[-1] == len("Hi 東!")
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.top_logprobs is not None
    assert all(2 <= len(top) <= 3 and name in top for name, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


def test_zero_alternatives_still_name_the_token(served: Served, client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="script", prompt="x", logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{n: v} for n, v in zip(logprobs.tokens or [], logprobs.token_logprobs or [], strict=True)]


def test_part_of_a_character_has_a_name_of_its_own(served: Served, client: openai.OpenAI) -> None:
    engine = served.engine
    ids = engine.byte_ids("東")
    entries = [TokenLogprob(i, float("-inf"), tuple((other, -1.0) for other in ids)) for i in ids]
    engine.answer = Script(ids, logprobs=entries)
    choice = client.completions.create(model="script", prompt="x", logprobs=3).choices[0]
    assert (choice.text, choice.logprobs and choice.logprobs.tokens) == ("東", [f"bytes:\\x{byte:02x}" for byte in "東".encode()])
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)
    assert choice.logprobs.token_logprobs == [-9999.0] * 3
    named = client.completions.create(model="script", prompt="x", logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    assert named.choices[0].logprobs is not None
    assert named.choices[0].logprobs.tokens == [f"token_id:{i}" for i in ids]


@pytest.mark.parametrize("prompt", ["Grüße <think> ", [0, 72, 73, 300, 301], [0]])
@pytest.mark.parametrize("alternatives", [None, 0, 2])
def test_echo_puts_the_prompt_in_front(served: Served, client: openai.OpenAI, prompt: Any, alternatives: int | None) -> None:
    engine = served.engine
    choice = client.completions.create(model="script", prompt=prompt, echo=True, logprobs=alternatives).choices[0]
    ids = [*engine.requests[0].prompt_ids, *engine.ids("Hello there."), engine.tokenizer.eos_id or 0]
    assert choice.text == engine.tokenizer.decode(ids, skip_special=True)
    assert engine.requests[0].params.prompt_logprobs == alternatives
    if isinstance(prompt, str):
        assert choice.text.startswith(prompt)
    if alternatives is None:
        assert choice.logprobs is None
        return
    assert choice.logprobs is not None
    found = choice.logprobs.model_dump()
    assert {len(values) for values in found.values()} == {len(ids)}
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert all(value is not None for value in found["token_logprobs"][1:])
    for token_id, name, offset in zip(ids, found["tokens"], found["text_offset"], strict=True):
        if token_id not in engine.tokenizer.silent_ids and not name.startswith("bytes:"):
            assert choice.text[offset : offset + len(name)] == name
    stream = client.completions.create(model="script", prompt=prompt, echo=True, logprobs=alternatives, stream=True)
    assert collect(list(stream))[0]["logprobs"] == found


def test_scoring_generates_nothing(served: Served, client: openai.OpenAI) -> None:
    """What evaluation harnesses send."""
    answer = client.completions.create(model="script", prompt=[[72, 73, 74], [75]], echo=True, logprobs=1, max_tokens=0)
    texts = [served.engine.tokenizer.decode(ids) for ids in ([72, 73, 74], [75])]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert [len((c.logprobs and c.logprobs.token_logprobs) or []) for c in answer.choices] == [3, 1]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
    chunks = list(client.completions.create(model="script", prompt=[[72, 73, 74], [75]], echo=True, logprobs=1, max_tokens=0, stream=True))
    assert collect(chunks) == whole(answer)
    assert refused(post(served, {"prompt": "x", "max_tokens": 0}))["param"] == "max_tokens"


def test_scoring_has_a_limit() -> None:
    with serve(ScriptEngine(), ServerOptions(max_scored=100)) as served:
        body = {"prompt": [[5] * 10, [6] * 10], "echo": True, "logprobs": 4, "max_tokens": 1}
        assert post(served, body).status_code == 200
        error = refused(post(served, {**body, "logprobs": 5}))
        assert error["param"] == "echo"
        assert "100" in error["message"]
        assert "120" in error["message"]
        assert post(served, {**body, "logprobs": 5, "echo": False}).status_code == 200


# ---- streams


@pytest.mark.parametrize("stop", [None, "too.", "👩🏽‍🚀 <", "\n\nEnd"])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_adds_up_to_the_whole(served: Served, client: openai.OpenAI, stop: str | None, logprobs: int | None, echo: bool) -> None:
    """One token for each byte, in steps of every size, and ends within characters and stop strings."""
    engine = served.engine
    tokens = [*engine.byte_ids(TEXT), engine.tokenizer.eos_id or 0]
    rng = random.Random(5)
    for case in range(12):
        per_event = (1, 2, 3, 7)[case % 4]
        cut = len(tokens) if case < 4 else rng.randrange(1, len(tokens))
        engine.answer = Script(tokens, per_event=per_event)
        asked: dict[str, Any] = {"model": "script", "prompt": "東a", "max_tokens": cut, "stop": stop, "logprobs": logprobs, "echo": echo}
        answer = whole(client.completions.create(**asked))
        assert collect(list(client.completions.create(**asked, stream=True))) == answer
        text = bytes(TEXT.encode()[: min(cut, len(tokens) - 1)]).decode("utf-8", "replace")
        text = text.partition(stop)[0] if stop else text
        assert answer[0]["text"] == ("東a" if echo else "") + text
        if logprobs is not None:
            offsets = answer[0]["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            assert offsets[-1] <= len(answer[0]["text"])


def test_every_split_of_a_text_into_tokens_gives_the_same_text(served: Served, client: openai.OpenAI) -> None:
    engine = served.engine
    rng = random.Random(1)
    data = TEXT.encode()
    for _ in range(10):
        cuts = sorted({0, len(data), *rng.sample(range(1, len(data)), 5)})
        tokens = []
        for start, end in pairwise(cuts):
            piece = data[start:end]
            try:
                tokens += engine.ids(piece.decode())
            except UnicodeDecodeError:
                tokens += engine.byte_ids(piece)
        engine.answer = Script([*tokens, engine.tokenizer.eos_id or 0], per_event=rng.randrange(1, 5))
        stream = client.completions.create(model="script", prompt="x", max_tokens=900, stream=True)
        assert collect(list(stream))[0]["text"] == TEXT


def usages(chunks: list[dict[str, Any]]) -> list[int]:
    """Places of the chunks that have a usage."""
    return [i for i, chunk in enumerate(chunks) if chunk.get("usage")]


def test_where_usage_stands_in_a_stream(served: Served) -> None:
    served.engine.cached = 1
    body = {"prompt": ["a", "b c"], "n": 2, "stream": True}
    total = post(served, {**body, "stream": False}).json()["usage"]
    assert total["prompt_tokens_details"] == {"cached_tokens": 2}
    assert total["prompt_cache_hit_tokens"] + total["prompt_cache_miss_tokens"] == total["prompt_tokens"]
    plain = events(post(served, body))
    assert plain[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in plain)
    for options in ({}, {"include_usage": False}):
        assert not any("usage" in chunk for chunk in events(post(served, {**body, "stream_options": options})))
    error = post(served, {"prompt": "a", "stream_options": {"include_usage": True}})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "stream_options")
    apart = events(post(served, {**body, "stream_options": {"include_usage": True}}))
    assert (apart[-1]["choices"], apart[-1]["usage"]) == ([], total)
    assert all(chunk["usage"] is None for chunk in apart[:-1])
    running = events(post(served, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts)
    assert running[-1]["usage"] == total
    for chunks in (plain, apart, running):
        assert len({(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
        assert chunks[0]["object"] == "text_completion"


def test_a_failure_after_the_start_is_an_error_event(served: Served, client: openai.OpenAI) -> None:
    served.engine.answer = Script(served.engine.ids("Hello there, all of you."), fail_at=2)
    chunks: list[Completion] = []
    stream = client.completions.create(model="script", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="request id"):
        chunks.extend(stream)
    assert chunks
    assert all(choice.finish_reason is None for chunk in chunks for choice in chunk.choices)
    served.engine.answer = Script([5], fail_at=0)
    assert post(served, {"prompt": "x", "stream": True}).status_code == 500


def test_token_ids_on_request(served: Served) -> None:
    body = {"prompt": [[72], [73, 74]], "return_token_ids": True}
    engine = served.engine
    answer = post(served, body).json()
    said = [*engine.ids("Hello there."), engine.tokenizer.eos_id]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == body["prompt"]
    assert [c["token_ids"] for c in answer["choices"]] == [said, said]
    found: dict[int, list[int]] = {0: [], 1: []}
    for chunk in events(post(served, {**body, "stream": True})):
        for choice in chunk["choices"]:
            found[choice["index"]] += choice.get("token_ids", [])
    assert found == {0: said, 1: said}


def test_where_the_prompt_came_from_on_request(served: Served) -> None:
    body = {"prompt": [5, 6, 7], "n": 2, "forebay": {"explain": True, "prefill": "exact"}}
    told = post(served, body).json()["forebay"]
    assert (told["tiers"]["compute"], told["thinking"], len(told["choices"])) == (3, False, 2)
    assert served.engine.requests[0].prefill == "exact"
    tail = events(post(served, {**body, "stream": True}))[-1]
    assert (tail["choices"], tail["forebay"]["tiers"]["compute"]) == ([], 3)


# ---- fields


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("logprobs", 21, "integer_above_max_value"),
        ("logprobs", True, "invalid_type"),
        ("logprobs", -1, "integer_below_min_value"),
        ("max_tokens", -1, "integer_below_min_value"),
        ("max_tokens", "5", "invalid_type"),
        ("echo", "yes", "invalid_type"),
        ("suffix", 3, "invalid_type"),
        ("best_of", 2, "unsupported_parameter"),
        ("best_of", 0, "integer_below_min_value"),
        ("add_special_tokens", 1, "invalid_type"),
        ("messages", [{"role": "user", "content": "Hi"}], "unsupported_parameter"),
        ("tools", [{}], "unsupported_parameter"),
        ("top_logprobs", 3, "unsupported_parameter"),
        ("truncate_prompt_tokens", 3, "unsupported_parameter"),
    ],
)
def test_fields_are_checked_by_name(served: Served, field: str, value: Any, code: str) -> None:
    error = refused(post(served, {"prompt": "x", field: value}))
    assert (error["param"], error["code"]) == (field, code)
    assert field in error["message"]


def test_best_of_and_n(served: Served) -> None:
    assert refused(post(served, {"prompt": "x", "n": 3, "best_of": 2}))["param"] == "best_of"
    assert post(served, {"prompt": "x", "n": 3, "best_of": 3}).status_code == 200
    assert refused(post(served, {"prompt": ["x"] * 33, "n": 8}))["param"] == "prompt"


def test_what_says_nothing_about_raw_text_is_named(served: Served) -> None:
    body = {"prompt": "x", "reasoning_effort": "high", "tools": [], "user": "me", "unheard_of": 1, "echo": None, "suffix": None}
    response = post(served, body)
    assert response.status_code == 200
    assert set(response.headers["x-forebay-ignored"].split(", ")) == {"reasoning_effort", "user", "unheard_of"}


def test_models_and_aliases_of_the_path(served: Served, http: httpx.Client) -> None:
    for path in ("/completions", "/beta/completions", "/beta/v1/completions", PATH + "/"):
        assert post(served, {"prompt": "x"}, path).status_code == 200
    response = post(served, {"prompt": "x", "model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert http.get(served.url + PATH).headers["allow"] == "POST"
    assert post(served, {"prompt": "x", "request_id": "mine"}).json()["id"] == "cmpl-mine"


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_refused_while_not_ready(served: Served, state: Any) -> None:
    served.engine.state = state
    assert post(served, {"prompt": "x"}).status_code == 503
    served.engine.state = "ready"


def test_a_client_that_leaves_frees_every_choice(served: Served) -> None:
    served.engine.answer = lambda request: Script(served.engine.byte_ids("x" * 400), delay_s=0.01)
    body = {"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 400}
    with httpx.stream("POST", served.url + PATH, json=body, timeout=20.0) as response:
        next(response.iter_lines())
    served.wait(lambda: len(served.engine.aborted) == 4)


def test_a_large_prompt_is_encoded_off_the_loop(served: Served, http: httpx.Client) -> None:
    served.engine.max_context = 2_000_000
    text = "word " * 100_000
    answer = post(served, {"prompt": text, "max_tokens": 1, "echo": True})
    assert answer.json()["choices"][0]["text"].startswith(text)
    assert http.get(served.url + "/health").status_code == 200


def test_prompt_logprobs_in_a_field_of_their_own(served: Served) -> None:
    body = {"prompt": [[72, 73], [74]], "prompt_logprobs": 1}
    first, second = post(served, body).json()["choices"]
    assert second["prompt_logprobs"] == [None]
    assert first["prompt_logprobs"][0] is None
    assert first["prompt_logprobs"][1]["73"]["rank"] == 1
    assert (first["text"], first["logprobs"]) == ("Hello there.", None)
    both = post(served, {**body, "echo": True, "logprobs": 3}).json()["choices"][0]
    assert served.engine.requests[-1].params.prompt_logprobs == 3
    assert both["prompt_logprobs"] == first["prompt_logprobs"]
    assert len(both["logprobs"]["top_logprobs"][1]) == 3
    few = post(served, {**body, "prompt_logprobs": 3, "echo": True, "logprobs": 1}).json()["choices"][0]
    assert len(few["logprobs"]["top_logprobs"][1]) == 1
    assert len(few["prompt_logprobs"][1]) == 3


def test_fewer_chunks_on_request(served: Served) -> None:
    served.engine.answer = Script(served.engine.byte_ids("x" * 40))
    body = {"prompt": "a", "max_tokens": 40, "stream": True, "logprobs": 0}
    every, tenth = (events(post(served, {**body, "stream_interval": k})) for k in (1, 10))
    assert len(tenth) < len(every) / 4
    for chunks in (every, tenth):
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "x" * 40
        assert sum(len((c["logprobs"] or {"tokens": []})["tokens"]) for chunk in chunks for c in chunk["choices"]) == 40


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, '{"a":"x"}', '{"a":"z"}'),
        ({"response_format": {"type": "json_object"}}, '{"q":1}', "[1]"),
        ({"guided_regex": "[ab]+"}, "abba", "abc"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
    ],
)
def test_a_form_holds_from_the_first_token(served: Served, asked: dict[str, Any], good: str, bad: str) -> None:
    assert post(served, {"prompt": ["Answer:", "And:"], "n": 2, "max_tokens": 50, **asked}).status_code == 200
    grammars = [request.grammar for request in served.engine.requests]
    assert len(grammars) == 4
    assert len({id(grammar) for grammar in grammars}) == 1
    assert grammars[0] is not None
    assert grammars[0].spec.begins == "content"

    def accepted(text: str) -> bool:
        """Every token of it and then the end."""
        constraint = Constraint(served.engine.tokenizer, grammars[0], reasoning=False)
        for token_id in [*served.engine.tokenizer.encode(text), served.engine.tokenizer.eos_id or 0]:
            if not is_allowed(constraint.allowed(), token_id):
                return False
            constraint.observe(token_id)
        return True

    assert accepted(good)
    assert not accepted(bad)


def is_allowed(limits: Allowed | None, token_id: int) -> bool:
    if limits is None:
        return True
    if limits.only is not None:
        return token_id in limits.only
    if limits.bits is not None:
        return bool(limits.bits[token_id // 32] >> (token_id % 32) & 1)
    return token_id not in limits.banned


def test_a_form_that_cannot_be_is_refused(served: Served) -> None:
    for field, value, param in [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": 3}}, "response_format.json_schema.schema"),
        ("response_format", {"type": "grammar"}, "response_format.type"),
        ("response_format", "json", "response_format"),
        ("guided_regex", "(", "guided_regex"),
    ]:
        assert refused(post(served, {"prompt": "x", field: value}))["param"] == param
    response = post(served, {"prompt": "x", "response_format": {"type": "text"}})
    assert (response.status_code, served.engine.requests[-1].grammar) == (200, None)
