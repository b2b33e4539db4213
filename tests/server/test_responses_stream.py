"""Streams of /v1/responses event by event: every cut into tokens, the vendor's own events, silence, failures, hang-ups, upgrades."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import httpx
import openai
import pytest

from forebay.engine.types import QueueFullError, QueueTimeoutError
from forebay.model.errors import RequestError
from forebay.server.access import hashed
from forebay.server.errors import Failure
from forebay.server.limits import ServerOptions
from forebay.server.responses_events import failed_code
from forebay.server.responses_parts import InputText
from responses_wire import FILES, PATCH, PLAIN, WRITE, accumulated, byte_tokens, calls, events, parsed, post, steady
from script_engine import Script, ScriptEngine, Served, serve

SAID = [
    "Plain.",
    "Hm.\n\nSo: <i>.</think>\nFirst < second\n\nThird 漢🙂\n\n",
    "Hm.</think>Look:" + calls(("write", {"text": 'if x < y: print("</b>")\n'}), ("apply_patch", {"input": '*** é漢🙂 "q" \\\n'})),
    "</think>" + calls(("files::read", {}), ("unknown", {"a": "b"})),
    "Never closed" + calls(("write", {"text": ""})),
    "Hm.</think>Cut" + calls(("apply_patch", {"input": "half"})).split("</｜DSML｜ parameter")[0],
]
TOOLS = [WRITE, PATCH, FILES]


@pytest.mark.case("B065")
@pytest.mark.parametrize("said", SAID)
def test_every_cut_into_tokens_gives_the_same_answer(served: Served, said: str) -> None:
    """One byte per token, in steps of every size: the deltas put together are the whole answer, whose text does not depend on the cut."""
    tokens = byte_tokens(served.engine, said)
    seen = set()
    for per_event in (1, 2, 3, 5, 8, len(tokens)):
        served.engine.answer = Script(tokens, per_event=per_event)
        whole = post(served, tools=TOOLS, reasoning={"summary": "auto"}).json()
        received = events(served, tools=TOOLS, reasoning={"summary": "auto"})
        assert accumulated(received) == received[-1]["response"]["output"]
        assert steady(received[-1]["response"]) == steady(whole)
        assert "\ufffd" not in json.dumps(whole, ensure_ascii=False)
        seen.add(json.dumps(steady(whole)))
    served.engine.say(said)
    whole = steady(post(served, tools=TOOLS, reasoning={"summary": "auto"}).json())
    seen.add(json.dumps({**whole, "usage": json.loads(next(iter(seen)))["usage"]}))
    assert len(seen) == 1


def vendor(body: dict[str, Any], pieces: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events and the accumulated answer that the vendor's library makes of the same text."""
    asked = recipe.ResponsesRequest(json.dumps({"model": "DeepSeek-V4.1-Flash", "input": "Hi", **body}))
    echo, request = asked.echo(), asked.convert(recipe.ConversionOptions())
    generator = recipe.ResponsesRequest.chunk_generator(request, "r", "script").with_echo(echo)
    stream = recipe.StreamProcessor(generator, request.parsing_options)
    made = stream.push(recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=9, prompt_cache_hit_tokens=3)))
    for piece in pieces:
        made += stream.push(recipe.InferenceChunk.text(piece, 1))
    made += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    made += stream.finish()
    answer = recipe.ResponsesResponse("r", "script", 1, 9, 3)
    told = [json.loads(event.to_json()) for event in made]
    for event in made:
        answer.accumulate(event)
    return told, json.loads(answer.to_json())


def outline(received: list[dict[str, Any]]) -> list[Any]:
    """Events with neighbouring deltas joined, without numbers, ids and the response object."""
    lines: list[Any] = []
    for event in received:
        line = {k: v for k, v in event.items() if k not in ("sequence_number", "response", "item_id")}
        if event["type"] == "response.function_call_arguments.done":
            line.pop("name", None)  # ours says it too
        line["item"] = bare(event.get("item"))
        if "delta" in event and lines and lines[-1]["type"] == event["type"]:
            lines[-1]["delta"] += event["delta"]
        else:
            lines.append(line)
    return lines


def bare(item: Any) -> Any:
    return {k: v for k, v in item.items() if k not in ("id", "encrypted_content", "call_id")} if isinstance(item, dict) else item


@pytest.mark.parametrize("said", [
    "Hm.\nSo.</think>An answer < b.",
    "Hm.</think>Look:" + calls(("write", {"text": "a\nb"}), ("apply_patch", {"input": 'p"\n'})),
    "Hm.</think>" + calls(("write", {})),
])  # fmt: skip
def test_events_are_the_vendors(served: Served, said: str) -> None:
    """Same events in the same order with the same fields as the vendor's library makes, and the same items in its accumulated answer."""
    body: dict[str, Any] = {"tools": [WRITE, PATCH], "reasoning": {"effort": "high"}, "instructions": "Be brief."}
    served.engine.say(said)
    theirs, answer = vendor(body, re.findall(r"\s*\S+\s*", said))
    ours = events(served, **body)
    assert outline(ours) == outline(theirs)
    mine = ours[-1]["response"]
    assert [bare(item) for item in mine["output"]] == [bare(item) for item in answer["output"]]
    missing = set(answer) - set(mine)
    assert missing <= {"content_filters", "frequency_penalty", "presence_penalty", "max_tool_calls", "moderation", "prompt_cache_key",
                       "prompt_cache_retention", "safety_identifier"}  # fmt: skip
    for name in set(answer) & set(mine) - {"id", "output", "created_at", "completed_at", "usage", "tools", "top_p"}:
        assert mine[name] == answer[name], name
    assert set(answer["usage"]) == set(mine["usage"])


@pytest.mark.case("B054")
def test_arguments_are_streamed_as_they_come(served: Served) -> None:
    text = "".join(random.Random(1).choice('abc \n"\\{}é漢<>/') for _ in range(2000))
    for name, argument, kind in (("write", "text", "function_call_arguments"), ("apply_patch", "input", "custom_tool_call_input")):
        served.engine.answer = Script(byte_tokens(served.engine, "Go.</think>" + calls((name, {argument: text}))))
        received = events(served, tools=TOOLS)
        assert sum(event["type"] == f"response.{kind}.delta" for event in received) > 1000
        item = accumulated(received)[-1]
        assert (json.loads(item["arguments"])["text"] if name == "write" else item["input"]) == text


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
def test_input_of_a_custom_tool_out_of_json(cut: int) -> None:
    values = ["", 'q"\\/\b\f\n\r\t', "é漢🙂\u2028", "\\u0041", "a" * 50]
    for value in values:
        plain = json.dumps({"input": value}, ensure_ascii=False)
        for arguments in (json.dumps({"input": value}), plain, ' {  "input" :"' + json.dumps(value)[1:] + " }"):
            read = InputText()
            got = "".join(read.push(arguments[i : i + cut]) for i in range(0, len(arguments), cut)) + read.finish()
            assert (got, read.text, read.complete) == (value, value, True)
    pair = '{"input": "a\\ud83d\\u0041"}'
    for broken, text in (('{"input": "half', "half"), (pair, "a\ufffdA"), ('{"input": "a\\', "a"), ("{", "{"), ("", "")):
        read = InputText()
        got = "".join(read.push(broken[i : i + cut]) for i in range(0, len(broken), cut)) + read.finish()
        assert (got, read.complete) == (text, False)


# ---- admission and silence


def test_stream_starts_before_the_first_token(served: Served) -> None:
    """Prefill may take minutes; Codex must see that the request was taken."""
    served.engine.hold = True
    body = {"input": "Hi", "stream": True, **PLAIN}
    with httpx.stream("POST", f"{served.url}/v1/responses", json=body, timeout=20) as response:
        seen = ""
        for text in response.iter_text():
            seen += text
            if served.engine.hold and "response.in_progress" in seen:
                assert not any(served.engine.events.get(r.request_id) for r in served.engine.requests)
                served.engine.hold = False
    assert parsed(seen)[-1]["type"] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_refused_by_the_engine_is_a_status(served: Served, stream: bool) -> None:
    served.engine.max_running = served.engine.max_queued = 0
    answer = post(served, stream=stream)
    assert answer.status_code in (429, 503)
    assert answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert not served.engine.requests


@pytest.mark.parametrize("stream", [False, True])
def test_not_ready_is_503(served: Served, stream: bool) -> None:
    served.engine.state = "loading"
    answer = post(served, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    """A server that breaks silence after 50 ms."""
    with serve(ScriptEngine(), ServerOptions(keepalive_comment_s=0.05)) as served:
        yield served


def test_silence_is_broken_by_events(impatient: Served) -> None:
    """Comments do not reset Codex's idle timer."""
    impatient.engine.hold = True
    impatient.engine.say("Late.")
    seen = ""
    with httpx.stream("POST", f"{impatient.url}/v1/responses", json={"input": "Hi", "stream": True, **PLAIN}, timeout=20) as response:
        for text in response.iter_text():
            seen += text
            if impatient.engine.hold and seen.count("event: response.in_progress\n") >= 4:
                impatient.engine.hold = False
    received = parsed(seen)  # with sequence numbers that count on
    beats = [event for event in received if event["type"] == "response.in_progress"]
    assert len(beats) >= 4
    assert all(event["response"] == received[0]["response"] for event in beats)
    assert "\n:" not in seen
    assert received[-1]["response"]["output"][0]["content"][0]["text"] == "Late."
    impatient.engine.hold = True
    with impatient.client() as client, client.responses.stream(model="script", input="Hi", extra_body=PLAIN) as stream:
        for number, event in enumerate(stream):
            if number == 4:
                assert event.type == "response.in_progress"
                impatient.engine.hold = False
        assert stream.get_final_response().output_text == "Late."


def test_long_whole_answers_keep_the_line_busy() -> None:
    options = ServerOptions(nonstream_keepalive=True, nonstream_wait_s=0.05, keepalive_comment_s=0.05)
    with serve(ScriptEngine(), options) as served:
        served.engine.say("Late.", delay_s=0.1)
        answer = post(served, **PLAIN)
        assert answer.text.startswith("\n")
        assert answer.json()["output"][0]["content"][0]["text"] == "Late."


def test_fewer_and_larger_events_on_request(served: Served) -> None:
    served.engine.say("One two three four five.</think>Six seven eight nine ten.")
    paced = events(served, stream_interval=4, stream_reasoning=False)
    plain = events(served)
    assert steady(paced[-1]["response"]) == steady(plain[-1]["response"])
    assert accumulated(paced) == paced[-1]["response"]["output"]
    kinds = [event["type"] for event in paced]
    assert kinds.count("response.reasoning_text.delta") == 1
    assert kinds.count("response.output_text.delta") < sum(event["type"] == "response.output_text.delta" for event in plain)


# ---- failures


def test_overflow_on_a_stream_is_an_event(served: Served, client: openai.OpenAI) -> None:
    """What makes Codex compact its history; on a status it only shows the text."""
    served.engine.max_context = 30
    rejected = served.engine.metrics.render().decode()
    received = events(served, input="word " * 100, max_output_tokens=7)
    assert [event["type"] for event in received] == ["response.created", "response.in_progress", "response.failed"]
    failed = received[-1]["response"]
    assert (failed["status"], failed["error"]["code"], failed["output"]) == ("failed", "context_length_exceeded", [])
    length = int(failed["error"]["message"].split("(")[1].split()[0])
    assert failed["error"]["message"] == (
        f"This model's maximum context length is 30 tokens. However, you requested {length + 7} tokens ({length} in the messages, 7 in the "
        "completion). Please reduce the length of the messages or completion."
    )
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="script", input="word " * 100)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    assert ", 0 in the completion)" in error.value.message
    assert not served.engine.requests
    series = 'forebay_rejected_total{reason="context_length"}'
    before, after = (next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))
                     for text in (rejected, served.engine.metrics.render().decode()))  # fmt: skip
    assert after == before + 2


def test_overflow_that_the_engine_finds_is_an_event_too(served: Served, client: openai.OpenAI) -> None:
    """With the field's own name in a whole answer."""
    error = RequestError("messages is too long for this pool", param="messages", code="context_length_exceeded")
    served.engine.say("Late.", fail_at=0, error=error)
    received = events(served)
    assert [event["type"] for event in received] == ["response.created", "response.in_progress", "response.failed"]
    assert received[-1]["response"]["error"]["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="script", input="Hi")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_overflow_that_needs_no_tokenizer(served: Served) -> None:
    served.engine.max_context = 30
    for received in (events(served, input="word " * 50_000), events(served, input=[{"role": "user", "content": "word " * 50_000}])):
        assert received[-1]["response"]["error"]["code"] == "context_length_exceeded"


def test_parameter_errors_on_a_stream_are_statuses(served: Served) -> None:
    part = {"input": [{"role": "user", "content": [{"type": "x"}]}]}
    for body, param in (({"temperature": 3}, "temperature"), (part, "input[0].content[0].type")):
        answer = post(served, stream=True, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("raises", [False, True])
def test_failure_in_the_middle(served: Served, client: openai.OpenAI, caplog: pytest.LogCaptureFixture, raises: bool) -> None:
    said = "Hm.</think>Some words" + calls(("write", {"text": "never written"}))
    served.engine.say(said, fail_at=len(served.engine.ids(said)) - 6, raises=raises)
    received = events(served, tools=TOOLS)
    failed = received[-1]
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["error"]["code"], response["usage"]) == ("failed", "server_error", None)
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "incomplete"),
    ]  # fmt: skip
    assert sum(event["type"] == "response.output_item.done" for event in received) == 2  # nobody runs half a call
    assert "device on fire" not in json.dumps(received)
    assert "device on fire" in caplog.text
    with client.responses.stream(model="script", input="Hi", tools=[WRITE]) as stream:  # type: ignore[list-item]
        assert [event.type for event in stream][-1] == "response.failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="script", input="Hi")


def test_refused_after_the_start_is_an_event(served: Served) -> None:
    for error, code in ((QueueTimeoutError("the wait took too long"), "server_error"), (QueueFullError("full"), "server_error")):

        def answer(request: Any, error: Any = error) -> Script:
            return Script(served.engine.ids("x"), delay_s=0.3, fail_at=0, error=error)

        served.engine.answer = answer
        response = events(served, **PLAIN)[-1]["response"]
        assert response["error"]["code"] == code
        assert "try again in" in response["error"]["message"]


def test_limits_of_a_key(tmp_path: Path) -> None:
    """Codex reads the delay out of a failed stream and waits; of a 429 it shows a fixed text."""
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"name": "robot", "hash": hashed(b"robot-0123456789abcdef"), "requests_per_minute": 1}) + "\n")
    with serve(ScriptEngine(), ServerOptions(api_keys_file=keys)) as served:
        headers = {"authorization": "Bearer robot-0123456789abcdef"}

        def ask(**body: Any) -> httpx.Response:
            return httpx.post(f"{served.url}/v1/responses", json={"input": "Hi", **PLAIN, **body}, headers=headers, timeout=20)

        assert ask().status_code == 200
        streamed = ask(stream=True)
        failed = parsed(streamed.text)[-1]["response"]
        assert (streamed.status_code, failed["error"]["code"]) == (200, "rate_limit_exceeded")
        assert re.search(r"Please try again in \d+s\.", failed["error"]["message"])
        whole = ask()
        assert (whole.status_code, whole.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(whole.headers["retry-after"]) > 0
        assert len(served.engine.requests) == 1
        metrics = served.engine.metrics.render().decode().splitlines()
        rejected = next(line for line in metrics if line.startswith('forebay_rejected_total{reason="rate_limited"'))
        assert float(rejected.split()[-1]) == 2


@pytest.mark.parametrize(("state", "code"), [("ready", "engine_unavailable"), ("draining", "draining")])
def test_aborted_by_the_engine(served: Served, state: Any, code: str) -> None:
    def answer(request: Any) -> Script:
        served.engine.state = state
        return Script(served.engine.ids("Some words"), finish="abort")

    served.engine.answer = answer
    assert events(served, **PLAIN)[-1]["response"]["error"]["code"] == "server_error"
    served.engine.state = "ready"
    answered = post(served, **PLAIN)
    assert (answered.status_code, answered.json()["error"]["code"]) == (503, code)


def test_codes_of_failures_decide_who_tries_again() -> None:
    def code(status: int, name: str) -> str:
        return failed_code(Failure(status, "", "", None, name))

    assert code(400, "context_length_exceeded") == "context_length_exceeded"
    assert code(400, "invalid_value") == "invalid_prompt"
    assert code(429, "rate_limit_exceeded") == "rate_limit_exceeded"
    assert {code(500, "internal_error"), code(503, "overloaded"), code(503, "draining"), code(429, "queue_full")} == {"server_error"}


# ---- hang-ups and upgrades


@pytest.mark.case("B046")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 5])
def test_a_client_that_left_is_aborted_at_once(served: Served, stream: bool, after: int) -> None:
    """Before the first token and after some; nothing but the closed connection can end the request."""
    engine = served.engine
    engine.answer = Script(engine.ids("word " * 500), delay_s=0.001)
    engine.hold = after == 0
    data = json.dumps({"input": "Hi", "stream": stream, "max_output_tokens": 10_000, **PLAIN}).encode()
    connection = socket.create_connection((served.host, served.port), timeout=20)
    connection.sendall(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    served.wait(lambda: bool(engine.running) and sum(engine.events.get(r.request_id, 0) for r in engine.requests) >= after)
    if stream and after == 0:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    engine.hold = True
    connection.close()
    served.wait(lambda: not engine.running)
    assert engine.aborted == [engine.requests[0].request_id]


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
def test_a_websocket_is_told_to_use_http(served: Served, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Codex tries one first and falls back on 426; 405 made one version give up."""
    with socket.create_connection((served.host, served.port), timeout=20) as connection:
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        connection.sendall(head.encode() + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head_received, _, body = received.partition(b"\r\n\r\n")
    assert head_received.startswith(b"HTTP/1.1 426 ")
    assert b"application/json" in head_received
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == ("upgrade_required", "invalid_request_error")
    assert "WebSocket library" not in caplog.text


def test_any_other_get_is_405(served: Served) -> None:
    answer = httpx.get(f"{served.url}/v1/responses")
    assert (answer.status_code, answer.headers["allow"], answer.json()["error"]["code"]) == (405, "POST", "method_not_allowed")
