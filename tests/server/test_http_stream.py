"""Streams byte by byte: shape of chunks, held-back text, tool calls, log probabilities, keep-alive and errors in the middle."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from forebay.engine.types import QueueFullError, TokenLogprob, UnavailableError
from forebay.server.app import create_app
from forebay.server.errors import describe
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine, Served, serve

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PLAIN = {"thinking": {"type": "disabled"}}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "write", "parameters": PARAMETERS}}]


def events(served: Served, **body: Any) -> Iterator[str]:
    """Payloads of the data lines of a stream, `[DONE]` included."""
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json={"messages": HI, "stream": True, **body}, timeout=20) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        for block in response.read().decode().split("\n\n")[:-1]:
            lines = block.split("\n")
            assert len(lines) == 1
            if not lines[0].startswith(":"):
                assert lines[0].startswith("data: ")
                yield lines[0][6:]


def chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    *payloads, done = events(served, **body)
    assert done == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def joined(received: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in received for choice in chunk["choices"])


def block(text: str) -> str:
    return (
        f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="write">\n<｜DSML｜ parameter name="text" string="true">{text}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


@pytest.mark.case("B068")
@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("Thinking.</think>Answer.", {}), ("Thinking.</think>Look:\n\n" + block("x"), {}), ("Only thinking", {}),
        ("Plain answer.", PLAIN), (block("x") + "\n", PLAIN),
    ],
)  # fmt: skip
def test_every_chunk_has_the_official_shape(served: Served, said: str, fields: dict[str, Any]) -> None:
    served.engine.say(said)
    received = chunks(served, tools=TOOLS, **fields)
    for chunk in received:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk"
        assert None not in chunk["choices"][0]["delta"].values()
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in received}) == 1
    deltas = [c["choices"][0]["delta"] for c in received]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert all(len(delta) == 1 for delta in deltas[1:])
    reasons = [c["choices"][0]["finish_reason"] for c in received]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == ("tool_calls" if "DSML" in said else "stop")


@pytest.mark.case("B066")
@pytest.mark.parametrize("asked", [None, {}, {"include_usage": None}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_once_and_where_it_was_asked_for(served: Served, asked: dict[str, Any] | None) -> None:
    received = chunks(served, **({} if asked is None else {"stream_options": asked}))
    include = (asked or {}).get("include_usage")
    if include is True:
        assert all(chunk["usage"] is None for chunk in received[:-1])
        assert received[-1]["choices"] == []
        assert received[-1]["usage"]["total_tokens"] > 0
        return
    assert all(chunk["choices"] for chunk in received)
    assert not any("usage" in chunk for chunk in received)
    assert received[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.case("B066")
def test_usage_of_several_choices_is_told_once_at_the_end(served: Served, client: openai.OpenAI) -> None:
    texts = ["one", "two words and more of them", "three"]
    served.engine.answer = lambda request: Script([*served.engine.ids(texts[request.params.seed]), served.engine.tokenizer.eos_id])
    received = chunks(served, n=3, seed=0, stream_options={"include_usage": True}, **PLAIN)
    told = [chunk for chunk in received if chunk["usage"]]
    assert told == received[-1:]
    whole = client.chat.completions.create(model="script", messages=HI, n=3, seed=0, extra_body=PLAIN)
    assert whole.usage is not None
    assert told[0]["usage"] == whole.usage.model_dump(exclude_none=True)


@pytest.mark.case("B066")
@pytest.mark.parametrize("include", [True, False, None])
def test_running_usage_is_on_every_chunk(served: Served, include: bool | None) -> None:
    served.engine.say("I think.</think>An answer.")
    received = chunks(served, stream_options={"continuous_usage_stats": True, "include_usage": include})
    usages = [chunk["usage"] for chunk in received]
    completion = [usage["completion_tokens"] for usage in usages]
    assert completion == sorted(completion)
    assert (completion[0], completion[-1]) == (1, len(served.engine.ids("I think.</think>An answer.")) + 1)
    assert {usage["prompt_tokens"] for usage in usages} == {len(served.engine.requests[0].prompt_ids)}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert "prompt_cache_hit_tokens" not in usages[0]  # not known before the end
    assert ("prompt_cache_hit_tokens" in usages[-1]) == (include is True)


@pytest.mark.case("B066")
@pytest.mark.parametrize("stream", [False, None])
@pytest.mark.parametrize("asked", [{}, {"include_usage": False}, {"include_usage": True}])
def test_stream_options_without_stream_are_refused(client: openai.OpenAI, stream: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="'stream' is true") as caught:
        client.chat.completions.create(model="script", messages=HI, extra_body={"stream": stream, "stream_options": asked})
    assert caught.value.param == "stream_options"
    client.chat.completions.create(model="script", messages=HI, extra_body={"stream": stream, "stream_options": None})


@pytest.mark.case("B054")
def test_arguments_are_streamed_as_they_come(served: Served, client: openai.OpenAI) -> None:
    text = "".join(random.Random(1).choice('abc \n"\\{}é漢<>/') for _ in range(4000))
    served.engine.answer = Script([*served.engine.ids("Go.</think>" + block("@").split("@")[0]), *served.engine.byte_ids(text),
                                   *served.engine.ids(block("@").split("@")[1]), served.engine.tokenizer.eos_id])  # fmt: skip
    calls = [c for chunk in chunks(served, tools=TOOLS) for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert set(calls[0]) == {"index", "id", "type", "function"}
    assert calls[0]["function"] == {"name": "write", "arguments": ""}
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert len(calls) > 100
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"text": text}
    whole = client.chat.completions.create(model="script", messages=HI, tools=TOOLS)
    assert whole.choices[0].message.tool_calls is not None
    assert whole.choices[0].message.tool_calls[0].function.arguments == arguments


@pytest.mark.case("B058")
@pytest.mark.parametrize(
    ("said", "finish", "limit", "reasoning", "content"),
    [
        ("</think>No thinking.", "stop", None, "", "No thinking."),
        ("Never closed", "stop", None, "Never closed", ""),
        ("Cut off while thinking", "length", 2, None, ""),
        ("One.</think>Two.</think>Three.", "stop", None, "One.", "Two.Three."),
    ],
)
def test_unclosed_thinking(
    served: Served, client: openai.OpenAI, said: str, finish: str, limit: int | None, reasoning: str | None, content: str
) -> None:
    served.engine.say(said)
    limits = {"max_tokens": limit} if limit else {}
    whole = client.chat.completions.create(model="script", messages=HI, extra_body=limits).choices[0]
    received = chunks(served, **limits)
    if reasoning is None:
        reasoning = served.engine.tokenizer.decode(served.engine.ids(said)[:limit])
    assert (whole.message.reasoning_content, whole.message.content, whole.finish_reason) == (reasoning, content, finish)
    assert (joined(received, "reasoning_content"), joined(received)) == (reasoning, content)
    assert received[-1]["choices"][0]["finish_reason"] == finish
    assert "end▁of" not in json.dumps(received, ensure_ascii=False)


@pytest.mark.case("B064")
@pytest.mark.parametrize("stop", ["S", "ST", "STOP", "STOPPING-NOW", ["STOX", "STOP"], ["P", "STOPPED"], "漢字"])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8])
def test_no_character_of_a_stop_string_appears(served: Served, stop: Any, cut: int) -> None:
    said = "Fine STO STOPPIN STOPPING-NOW 漢字 rest"
    first = min(said.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in said)
    served.engine.answer = Script(served.engine.byte_ids(said), per_event=cut)
    received = chunks(served, stop=stop, logprobs=True, **PLAIN)
    assert joined(received) == said[:first]
    last = received[-1]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] in ([stop] if isinstance(stop, str) else stop)
    entries = [e for chunk in received for e in ((chunk["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == said[:first]


@pytest.mark.case("B064")
def test_held_back_text_is_released(served: Served) -> None:
    said = "STO STOPPIN ST"
    served.engine.answer = Script(served.engine.byte_ids(said))
    assert joined(chunks(served, stop=["STOPPING-NOW"], **PLAIN)) == said


@pytest.mark.case("B064")
def test_stop_strings_apply_to_the_answer_only(served: Served) -> None:
    served.engine.say("I must not say END here.</think>The END of it")
    received = chunks(served, stop="END")
    assert joined(received, "reasoning_content") == "I must not say END here."
    assert joined(received) == "The "


@pytest.mark.case("B065")
@pytest.mark.parametrize("text", ["🙂👍🏽", "漢字かな", "e\u0301a\u0308", "🇳🇴🇨🇭", "plain", "a🙂b"])
@pytest.mark.parametrize("per_event", [1, 2, 3])
def test_characters_are_never_split(served: Served, client: openai.OpenAI, text: str, per_event: int) -> None:
    served.engine.answer = Script([*served.engine.byte_ids(text), served.engine.tokenizer.eos_id], per_event=per_event)
    received = chunks(served, **PLAIN)
    assert joined(received) == text
    assert "\ufffd" not in json.dumps(received, ensure_ascii=False)
    assert client.chat.completions.create(model="script", messages=HI, extra_body=PLAIN).choices[0].message.content == text


@pytest.mark.case("B065")
def test_invalid_and_incomplete_characters(served: Served, client: openai.OpenAI) -> None:
    data = b"ok \xff\xc3( " + "🙂".encode()[:3]
    served.engine.answer = Script(served.engine.byte_ids(data), finish="length")
    expected = data.decode("utf-8", "replace")
    received = chunks(served, **PLAIN)
    assert joined(received) == expected
    assert received[-1]["choices"][0]["finish_reason"] == "length"
    assert client.chat.completions.create(model="script", messages=HI, extra_body=PLAIN).choices[0].message.content == expected


@pytest.mark.case("B069")
@pytest.mark.parametrize("per_event", [1, 2, 5])
@pytest.mark.parametrize("alternatives", [0, 5])
def test_one_logprob_entry_for_each_token(served: Served, client: openai.OpenAI, per_event: int, alternatives: int) -> None:
    tokens = [*served.engine.ids("Smile: "), *served.engine.byte_ids("🙂"), *served.engine.ids(" done, <b> and more\n\n")]
    served.engine.answer = Script(tokens, finish="length", per_event=per_event)
    fields = {"logprobs": True, "top_logprobs": alternatives, **PLAIN}
    whole = client.chat.completions.create(model="script", messages=HI, extra_body=fields)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert whole.usage is not None
    assert len(logprobs.content) == len(tokens) == whole.usage.completion_tokens
    for place, entry in enumerate(logprobs.content):
        assert entry.bytes == list(served.engine.tokenizer.token_bytes(tokens[place]))
        assert entry.logprob == -0.25 - place / 1024
        assert [alternative.logprob for alternative in entry.top_logprobs] == [-0.25 - k for k in range(alternatives)]
        if alternatives:
            assert entry.top_logprobs[0].bytes == entry.bytes
    assert b"".join(bytes(e.bytes or b"") for e in logprobs.content).decode() == whole.choices[0].message.content
    streamed = [e for c in chunks(served, **fields) for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == [e.model_dump() for e in logprobs.content]


@pytest.mark.case("B069")
@pytest.mark.parametrize("per_event", [1, 3])
def test_logprobs_by_channel(served: Served, per_event: int) -> None:
    served.engine.answer = Script(
        [*served.engine.ids("\n\nWhy: <i>\n</think>\nBecause.\n\n" + block("x < y")), served.engine.tokenizer.eos_id], per_event=per_event
    )
    received = chunks(served, logprobs=True, tools=TOOLS, return_tokens_as_token_ids=True)
    texts = {"content": b"", "reasoning_content": b""}
    for chunk in received:
        choice = chunk["choices"][0]
        for key, entries in (choice["logprobs"] or {}).items():
            assert key in choice["delta"]
            texts[key] += b"".join(bytes(e["bytes"]) for e in entries)
            assert all(e["token"].startswith("token_id:") for e in entries)
    # Newlines that the parser dropped may share a token with text that it kept.
    assert texts["reasoning_content"].decode().strip("\n") == joined(received, "reasoning_content") == "Why: <i>"
    assert texts["content"].decode().strip("\n") == joined(received) == "Because."


@pytest.mark.case("B069")
def test_no_number_is_infinite(served: Served) -> None:
    tokens = served.engine.ids("Hello")
    served.engine.answer = Script(tokens, logprobs=[TokenLogprob(t, -math.inf, ((t, -math.inf),)) for t in tokens])
    received = chunks(served, logprobs=True, top_logprobs=1, **PLAIN)
    values = [e["logprob"] for c in received for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert values == [-9999.0] * len(tokens)


def test_steps_with_many_tokens_make_one_chunk_for_each_channel(served: Served) -> None:
    served.engine.answer = Script([*served.engine.ids("I think so.</think>Yes, surely."), served.engine.tokenizer.eos_id], per_event=100)
    deltas = [c["choices"][0]["delta"] for c in chunks(served)]
    assert deltas[1:] == [{"reasoning_content": "I think so."}, {"content": "Yes, surely."}, {"content": ""}]


def test_cut_into_tokens_does_not_matter(served: Served) -> None:
    said = "Let me\n\nthink <a>.</think>\nFirst < second\n\n" + block('if x < y: print("</b>")\n') + "\n"
    seen = set()
    for per_event in (1, 2, 3, 7, 1000):
        served.engine.answer = Script([*served.engine.ids(said), served.engine.tokenizer.eos_id], per_event=per_event)
        received = chunks(served, tools=TOOLS)
        arguments = "".join(call["function"]["arguments"] for c in received for call in c["choices"][0]["delta"].get("tool_calls", []))
        seen.add((joined(received, "reasoning_content"), joined(received), arguments))
    assert seen == {("Let me\n\nthink <a>.", "First < second", json.dumps({"text": 'if x < y: print("</b>")\n'}))}


# ---- errors and silence


def test_error_after_the_start_is_an_event(served: Served, client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    served.engine.answer = Script(served.engine.ids("Some words before it breaks"), fail_at=3)
    *before, error, done = events(served, **PLAIN)
    assert done == "[DONE]"
    assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
    assert json.loads(error)["error"]["type"] == "server_error"
    assert "device on fire" not in error
    assert all(json.loads(payload)["choices"][0]["finish_reason"] is None for payload in before)
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="script", messages=HI, stream=True, extra_body=PLAIN))
    assert "device on fire" in caplog.text


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_start_is_a_status(served: Served, client: openai.OpenAI, stream: bool, raises: bool) -> None:
    served.engine.answer = Script(served.engine.ids("never"), fail_at=0, raises=raises)
    with pytest.raises(openai.InternalServerError) as error:
        client.chat.completions.create(model="script", messages=HI, stream=stream)
    assert error.value.status_code == 500
    assert error.value.request_id is not None
    assert error.value.request_id in error.value.message


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_aborted_by_the_engine_is_an_error(served: Served, state: Any) -> None:
    def answer(request: Any) -> Script:
        served.engine.state = state
        return Script(served.engine.ids("Some words"), finish="abort")

    served.engine.answer = answer
    *_, error, done = events(served, **PLAIN)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == ("draining" if state == "draining" else "engine_unavailable")


def test_cause_told_is_that_of_the_engine_not_its_next_state() -> None:
    # By the time the answer is written, a drain whose time is over has become a stopped engine.
    failure = describe(UnavailableError("the server shut down before this request finished", code="draining"), request_id="r", state="dead")
    assert (failure.status, failure.code) == (503, "draining")
    assert failure.message.startswith("The server is shutting down")


def test_cancelled_with_the_server_is_an_answer_not_a_traceback(served: Served) -> None:
    sent: list[Any] = []

    async def main() -> None:
        async def receive() -> Any:
            await asyncio.sleep(60)  # a body that never comes

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [(b"content-length", b"9")]}
        task = asyncio.create_task(create_app(served.engine, ServerOptions())(scope, receive, send))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    asyncio.run(main())
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "draining"


@pytest.fixture
def impatient() -> Iterator[Served]:
    """A server that breaks silence after 50 ms."""
    with serve(ScriptEngine(), ServerOptions(keepalive_comment_s=0.05)) as served:
        yield served


def test_silence_is_broken_by_comments(impatient: Served) -> None:
    impatient.engine.hold = True
    impatient.engine.say("Late.")
    body = {"messages": HI, "stream": True, **PLAIN}
    seen = ""
    with httpx.stream("POST", f"{impatient.url}/v1/chat/completions", json=body, timeout=20) as response:
        assert response.status_code == 200
        for text in response.iter_text():
            seen += text
            if impatient.engine.hold and seen.count(": keep-alive\n\n") >= 2:
                assert "data:" not in seen
                impatient.engine.hold = False
    assert seen.endswith("data: [DONE]\n\n")
    impatient.engine.hold = True
    with impatient.client() as client:
        stream = client.chat.completions.create(model="script", messages=HI, stream=True, extra_body=PLAIN)
        impatient.engine.hold = False
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "Late."


def test_refusal_after_a_comment_is_an_event(impatient: Served) -> None:
    def answer(request: Any) -> Script:
        return Script(impatient.engine.ids("x"), delay_s=0.3, fail_at=0, error=QueueFullError("the wait took too long"))

    impatient.engine.answer = answer
    *before, error, done = events(impatient, **PLAIN)
    assert (before, done) == ([], "[DONE]")
    assert json.loads(error)["error"]["code"] == "overloaded"
