"""POST /v1/messages and count_tokens through the official client: answers, streams, errors, and what lies on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import deepseek_recipe as recipe
import httpx
import pydantic
import pytest
from anthropic.types import Message, ToolUseBlock

from forebay.engine.types import QueueFullError, UnavailableError
from forebay.model.errors import ForebayError
from forebay.server.limits import ServerOptions
from script_engine import Script, ScriptEngine, Served, serve

HI: list[Any] = [{"role": "user", "content": "Hi"}]
THINK: Any = {"type": "adaptive"}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "number"}}}
TOOLS: list[Any] = [{"name": "write", "description": "Writes.", "input_schema": PARAMETERS}]
ASK: dict[str, Any] = {"model": "script", "max_tokens": 4096, "messages": HI}


def call(*parameters: str, name: str = "write") -> str:
    inner = "\n".join(parameters)
    return f'<｜DSML｜ invoke name="{name}">\n{inner}\n</｜DSML｜ invoke>\n'


def string(name: str, value: str) -> str:
    return f'<｜DSML｜ parameter name="{name}" string="true">{value}</｜DSML｜ parameter>'


def number(name: str, value: str) -> str:
    return f'<｜DSML｜ parameter name="{name}" string="false">{value}</｜DSML｜ parameter>'


def calls(*each: str) -> str:
    return f"\n\n<｜DSML｜ calls>\n{''.join(each)}</｜DSML｜ calls>"


TWO_CALLS = calls(call(string("text", 'é "漢"\n🙂\\'), number("n", "1.50")), call(name="rest"))
SAID = {
    "plain": ("Hello there.", {}),
    "thinking": ("Let me see.\n</think>\n\nHello.", {"thinking": THINK}),
    "thinking only": ("Let me see", {"thinking": THINK}),
    "no thoughts": ("</think>Hello.", {"thinking": THINK}),
    "text and calls": (f"Hmm.</think>Look 🙂:{TWO_CALLS}", {"thinking": THINK, "tools": TOOLS}),
    "calls alone": (f"</think>{TWO_CALLS}", {"thinking": THINK, "tools": TOOLS}),
    "calls without thinking": (f"Go.{TWO_CALLS}", {"tools": TOOLS}),
    "nothing": ("", {}),
    "not a call": ("a < b </ c <x>\n\n\n", {"tools": TOOLS}),
}


@pytest.fixture(scope="module")
def module_messages(module_server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=module_server.url, api_key="none", max_retries=0, timeout=20.0) as client:
        yield client


@pytest.fixture
def client(served: Served, module_messages: anthropic.Anthropic) -> anthropic.Anthropic:
    """The official client, pointed at `served`."""
    return module_messages


def events(served: Served, path: str = "/v1/messages", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked for its frame."""
    response = httpx.post(f"{served.url}{path}", json={**ASK, "stream": True, **body}, timeout=20)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def same(message: Message) -> dict[str, Any]:
    """A message without its ids, which are new with every answer."""
    found = message.model_dump()
    del found["id"]
    for block in found["content"]:
        block.pop("id", None)
        block.pop("signature", None)
    return found


def recipe_answer(text: str, body: dict[str, Any], cut: int) -> dict[str, Any]:
    """The whole message that the vendor's library makes of an output cut into pieces of `cut` characters."""
    asked = recipe.MessagesRequest({**ASK, **body, "model": "DeepSeek-V4.1-Flash"}).convert(recipe.ConversionOptions())
    processor = recipe.StreamProcessor(recipe.MessagesRequest.chunk_generator(asked, "msg_1", "script"), asked.parsing_options)
    response = recipe.MessagesResponse("msg_1", "script", 1, 10, 3)
    pieces = [recipe.InferenceChunk.text(text[i : i + cut], 1) for i in range(0, len(text), cut)]
    ready = recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=10, prompt_cache_hit_tokens=3))
    for piece in [ready, *pieces, recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)]:
        for chunk in processor.push(piece):
            response.accumulate(chunk)
    for chunk in processor.finish():
        response.accumulate(chunk)
    return json.loads(response.to_json())


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("per_event", [1, 5, 1000])
def test_the_stream_adds_up_to_the_whole_answer(served: Served, client: anthropic.Anthropic, name: str, per_event: int) -> None:
    said, body = SAID[name]
    served.engine.cached = 3
    served.engine.say(said, per_event=per_event)
    whole = client.messages.create(**{**ASK, **body})
    with client.messages.stream(**{**ASK, **body}) as stream:
        streamed = stream.get_final_message()
    assert same(streamed) == same(whole)
    assert whole.role == "assistant" and whole.model == "script" and whole.id.startswith("msg_")
    assert whole.stop_reason == ("tool_use" if "invoke" in said else "end_turn")
    assert all(block.signature for block in whole.content if block.type == "thinking")
    vendors = recipe_answer(said, {"thinking": {"type": "disabled"}, **body}, cut=7)
    empty = [{"type": "text", "text": ""}]
    for block in vendors["content"]:
        block.pop("id", None)
        block.pop("signature", None)
    vendors["content"] = [block for block in vendors["content"] if block != {"type": "thinking", "thinking": ""}]
    ours = [{key: block[key] for key in block if key in ("type", "text", "thinking", "name", "input")} for block in same(whole)["content"]]
    assert ours == (vendors["content"] or empty)
    assert whole.stop_reason == vendors["stop_reason"]


@pytest.mark.parametrize("name", SAID)
def test_one_byte_a_token_changes_nothing(served: Served, client: anthropic.Anthropic, name: str) -> None:
    """Every text of the answer cut into single bytes, and markers as markers."""
    said, body = SAID[name]
    served.engine.say(said)
    usual = same(client.messages.create(**{**ASK, **body}))
    ids: list[int] = []
    tokenizer = served.engine.tokenizer
    for token in served.engine.ids(said):
        piece = tokenizer.decode([token])
        ids += [token] if tokenizer.special_id(piece) == token else served.engine.byte_ids(tokenizer.token_bytes(token))
    for per_event in (1, 2, 3, 7):
        served.engine.answer = Script([*ids, tokenizer.eos_id or 0], per_event=per_event)
        with client.messages.stream(**{**ASK, **body}) as stream:
            streamed = same(stream.get_final_message())
        whole = same(client.messages.create(**{**ASK, **body}))
        assert streamed == whole
        for found in (whole, usual):
            found["usage"]["output_tokens"] = found["usage"]["output_tokens_details"] = None
        assert whole == usual


def test_the_events_of_a_stream(served: Served) -> None:
    served.engine.cached = 3
    served.engine.say(f"Hmm.</think>Look:{TWO_CALLS}")
    found = events(served, thinking=THINK, tools=TOOLS)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    start = found[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    prompt = len(served.engine.requests[0].prompt_ids)
    counts = {"input_tokens": prompt - 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    assert counts.items() <= start["usage"].items()
    assert counts.items() <= found[-2]["usage"].items()
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks = [event for event in found if event["type"] == "content_block_start"]
    assert [block["index"] for block in blocks] == [0, 1, 2, 3]
    assert [block["content_block"]["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert blocks[1]["content_block"] == {"type": "text", "text": ""}
    assert blocks[2]["content_block"]["input"] == {} and blocks[2]["content_block"]["name"] == "write"
    assert blocks[2]["content_block"]["id"].startswith("toolu_") and blocks[2]["content_block"]["id"] != blocks[3]["content_block"]["id"]
    for index in range(4):
        own = [event["type"] for event in found if event.get("index") == index]
        assert own == ["content_block_start", *["content_block_delta"] * (len(own) - 2), "content_block_stop"]
    deltas = [event["delta"] for event in found if event.get("index") == 0 and "delta" in event]
    assert [delta["type"] for delta in deltas] == ["thinking_delta"] * (len(deltas) - 1) + ["signature_delta"]
    assert deltas[-1]["signature"]
    arguments = [event["delta"]["partial_json"] for event in found if event.get("index") == 2 and "delta" in event]
    assert len(arguments) > 5
    assert json.loads("".join(arguments)) == {"text": 'é "漢"\n🙂\\', "n": 1.5}


def test_arguments_keep_their_spelling(served: Served) -> None:
    """Numbers of any size pass through a whole answer as the model wrote them."""
    served.engine.say(calls(call(number("n", "1.0"), number("m", str(2**70)), number("k", '{"a":1e400}'))))
    body = httpx.post(f"{served.url}/v1/messages", json={**ASK, "tools": TOOLS}).text
    assert f'"input":{{"n": 1.0, "m": {2**70}, "k": {{"a":1e400}}}}' in body


def test_thinking_that_is_not_shown(served: Served, client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    served.engine.say("Weigh it.</think>Yes.")
    whole = client.messages.create(**ASK, thinking=thinking)
    first, second = whole.content
    assert first.type == "thinking" and first.thinking == "" and second.type == "text" and second.text == "Yes."
    with client.messages.stream(**ASK, thinking=thinking) as stream:
        streamed = stream.get_final_message()
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in events(served, thinking=thinking))
    # The next turn's prompt has the thought all the same.
    turns: list[Any] = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Why?"}]
    client.messages.create(**{**ASK, "messages": turns}, thinking=thinking, tools=TOOLS)
    assert "<think>Weigh it.</think>Yes." in prompt_of(served)


def prompt_of(served: Served) -> str:
    return served.engine.text()


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(served: Served, client: anthropic.Anthropic, stream: bool) -> None:
    def ask(**body: Any) -> Message:
        if not stream:
            return client.messages.create(**{**ASK, **body})
        with client.messages.stream(**{**ASK, **body}) as answer:
            return answer.get_final_message()

    served.engine.say("One two STOP three")
    found = ask(stop_sequences=["STOP", "never"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "STOP")
    assert found.content[0].type == "text" and found.content[0].text == "One two "
    found = ask(max_tokens=2)
    assert (found.stop_reason, found.stop_sequence, found.usage.output_tokens) == ("max_tokens", None, 2)
    served.engine.max_context = client.messages.count_tokens(model="script", messages=HI).input_tokens + 3
    assert ask(max_tokens=1000).stop_reason == "model_context_window_exceeded"
    assert ask(max_tokens=3).stop_reason == "max_tokens"
    served.engine.max_context = 65536
    # Cut off inside a call: what is there of it, and a reason that says so.
    served.engine.say(calls(call(string("text", "a long text"), number("n", "5"))).split("long")[0])
    for limits in ({}, {"max_tokens": len(served.engine.answer.tokens) - 1}):  # type: ignore[union-attr]
        found = ask(tools=TOOLS, **limits)
        assert found.stop_reason == "max_tokens"
        assert isinstance(found.content[0], ToolUseBlock) and found.content[0].input == {}


def test_counting_equals_what_a_request_is_charged(served: Served, client: anthropic.Anthropic) -> None:
    served.engine.cached = 5
    picture_free: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "What is é 漢 🙂?" * 50, "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "write", "input": {"n": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
    ]
    for body in (
        {"messages": HI},
        {"messages": picture_free, "tools": TOOLS, "system": "You write.", "thinking": THINK},
        {"messages": picture_free, "tools": TOOLS, "tool_choice": {"type": "none"}},
    ):
        counted = client.messages.count_tokens(**{"model": "script", **body})  # type: ignore[arg-type]
        used = client.messages.create(**{**ASK, **body}).usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0) == len(served.engine.requests[-1].prompt_ids)
        assert used.cache_read_input_tokens == 5


def test_counting_needs_no_place_in_the_engine(served: Served, client: anthropic.Anthropic) -> None:
    served.engine.max_running, served.engine.max_queued = 0, 0
    served.engine.max_context = 20
    long: Any = [{"role": "user", "content": "word " * 500}]
    counted = client.messages.count_tokens(model="script", messages=long).input_tokens
    assert counted > 500
    assert not served.engine.requests
    assert served.engine.metrics.render().decode().count('reason="context_length"} 0.0') == 1
    part: Any = [{"role": "assistant", "content": "I was about to"}]
    assert client.messages.count_tokens(model="script", messages=part, tools=TOOLS).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=HI)


@pytest.mark.parametrize("path", ["/v1/messages", "/anthropic/v1/messages", "/messages", "/v1/messages/", "/v1/messages?beta=true"])
def test_paths(served: Served, path: str) -> None:
    assert httpx.post(f"{served.url}{path}", json=ASK).json()["type"] == "message"
    if "?" not in path and path != "/messages":
        counted = httpx.post(f"{served.url}{path.removesuffix('/')}/count_tokens", json={"messages": HI}).json()
        assert counted == {"input_tokens": len(served.engine.requests[-1].prompt_ids)}


def test_model_names(served: Served, client: anthropic.Anthropic) -> None:
    assert client.messages.create(**{**ASK, "model": "claude-sonnet-9"}).model == "claude-sonnet-9"
    with (
        serve(ScriptEngine(), ServerOptions(map_claude_models=False, aliases=("claude-ours",))) as strict,
        anthropic.Anthropic(base_url=strict.url, api_key="none", max_retries=0) as other,
    ):
        assert other.messages.create(**{**ASK, "model": "claude-ours"}).model == "claude-ours"
        with pytest.raises(anthropic.NotFoundError) as error:
            other.messages.create(**{**ASK, "model": "claude-sonnet-9"})
    assert "claude-ours" in error.value.message


def test_defaults_can_be_changed() -> None:
    options = ServerOptions(messages_thinking=True, aliases=("deepseek-chat",))
    with serve(ScriptEngine(), options) as served:
        for model, thinks in (("script", True), ("deepseek-chat", False)):
            httpx.post(f"{served.url}/v1/messages", json={**ASK, "model": model}).raise_for_status()
            prompt = served.engine.requests[-1].prompt
            assert prompt is not None and prompt.thinking is thinks


def test_headers(served: Served, client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {**ASK, "metadata": {"user_id": "u"}, "made_up": 1, "bad\nname": 1, "tools": [{"type": "web_search_20250305"}]}
    answer = httpx.post(f"{served.url}/v1/messages", json=body, headers={"x-request-id": "mine.1"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine.1"
    assert answer.headers["x-forebay-ignored"] == "metadata, tools[0], made_up, 1 more"
    assert answer.json()["id"] == "msg_mine.1"
    assert client.messages.create(**ASK)._request_id
    assert 'forebay_unknown_fields_total{field="made_up"}' in served.engine.metrics.render().decode()


class Point(pydantic.BaseModel):
    x: int
    names: list[str]


def test_an_answer_in_a_given_form(served: Served, client: anthropic.Anthropic) -> None:
    served.engine.say('{"x": 1, "names": ["é"]}')
    assert client.messages.parse(**ASK, output_format=Point).parsed_output == Point(x=1, names=["é"])
    impossible = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}
    error = refused(client, anthropic.BadRequestError, extra_body={"output_config": {"format": impossible}})
    assert "output_config.format.schema" in error["message"] and "nonsense" in error["message"]


# ---- what goes wrong


def refused(client: anthropic.Anthropic, kind: type[anthropic.APIStatusError], **body: Any) -> dict[str, Any]:
    """The error that the client raises, for a whole answer and a stream."""
    found: list[dict[str, Any]] = []
    for stream in (False, True):
        with pytest.raises(kind) as error:
            client.messages.create(**{**ASK, **body}, stream=stream)
        assert isinstance(error.value.body, dict)
        assert error.value.body["type"] == "error"
        assert error.value.body["request_id"] == error.value.request_id == error.value.response.headers["request-id"]
        found.append(error.value.body["error"])
    assert found[0] == found[1]
    assert set(found[0]) == {"type", "message"}
    return found[0]


def test_refusals_before_the_engine(served: Served, client: anthropic.Anthropic) -> None:
    error = refused(client, anthropic.BadRequestError, messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}])
    assert error["type"] == "invalid_request_error"
    assert "messages[0].content[0].text" in error["message"]
    error = refused(client, anthropic.NotFoundError, model="gpt-5")
    assert error["type"] == "not_found_error"
    assert "script" in error["message"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "no picture"}}
    error = refused(client, anthropic.BadRequestError, messages=[{"role": "user", "content": [image]}])
    assert "messages[0].content[0]" in error["message"]
    answer = httpx.post(f"{served.url}/v1/messages", content=b'{"messages": [')
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = httpx.get(f"{served.url}/v1/messages")
    assert (answer.status_code, answer.headers["allow"], answer.json()["type"]) == (405, "POST", "error")
    answer = httpx.post(f"{served.url}/anthropic/v1/complete")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_a_prompt_that_is_too_long(served: Served, client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="script", messages=HI).input_tokens
    served.engine.max_context = counted
    error = refused(client, anthropic.BadRequestError)
    assert error == {"type": "invalid_request_error", "message": f"prompt is too long: {counted} tokens > {counted} maximum"}
    long = refused(client, anthropic.BadRequestError, messages=[{"role": "user", "content": "word" * 5000}])["message"]
    assert long.startswith("prompt is too long: ") and long.endswith(f" tokens > {counted} maximum")


def test_a_server_that_has_no_room(served: Served, client: anthropic.Anthropic) -> None:
    served.engine.max_running, served.engine.max_queued = 0, 0
    assert refused(client, anthropic.OverloadedError)["type"] == "overloaded_error"
    for state in ("loading", "draining"):
        served.engine.state = state  # type: ignore[assignment]
        assert refused(client, anthropic.OverloadedError)["type"] == "overloaded_error"
        with pytest.raises(anthropic.OverloadedError) as error:
            client.messages.create(model="script", messages=HI, max_tokens=5)
        assert int(error.value.response.headers["retry-after"]) >= 1
        assert client.messages.count_tokens(model="script", messages=HI).input_tokens > 2  # nobody waits for the engine to count
    served.engine.state = "dead"
    assert refused(client, anthropic.InternalServerError)["type"] == "api_error"
    served.engine.state = "ready"


def test_a_body_that_is_too_large() -> None:
    with (
        serve(ScriptEngine(), ServerOptions(max_body=4096)) as served,
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        error = refused(client, anthropic.ContentTooLargeError, messages=[{"role": "user", "content": "x" * 5000}])
    assert error["type"] == "request_too_large"


def test_keys_and_rates() -> None:
    key = "k-0123456789abcdef"
    with serve(ScriptEngine(), ServerOptions(api_keys=f"alice:{key}")) as served:
        with anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0) as client:
            error = refused(client, anthropic.AuthenticationError)
            assert error["type"] == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.count_tokens(model="script", messages=HI)
        for given in ({"api_key": key}, {"auth_token": key}):
            with anthropic.Anthropic(base_url=served.url, max_retries=0, **given) as client:  # type: ignore[arg-type]
                assert client.messages.create(**ASK).stop_reason == "end_turn"


def test_a_rate_limit(served: Served, client: anthropic.Anthropic) -> None:
    """Whoever says 429, here the engine: the client's class and the envelope's type are those of a rate limit."""

    class TooFastError(ForebayError):
        status, kind = 429, "rate_limit_exceeded"

    served.engine.answer = Script([1], fail_at=0, error=TooFastError("Please try again in 2s."))
    assert refused(client, anthropic.RateLimitError)["type"] == "rate_limit_error"


def refused_whole(client: anthropic.Anthropic) -> dict[str, Any]:
    """The error of a whole answer."""
    with pytest.raises(anthropic.APIStatusError) as error:
        client.messages.create(**ASK)
    body = error.value.body
    assert isinstance(body, dict) and (body["type"], body["request_id"]) == ("error", error.value.request_id)
    return dict(body["error"])


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("error", [ForebayError("device on fire"), UnavailableError("drained", code="draining"), QueueFullError("full")])
def test_a_stream_that_fails_ends_with_an_error(served: Served, client: anthropic.Anthropic, raises: bool, error: ForebayError) -> None:
    served.engine.say("One two three four", fail_at=3, error=error, raises=raises)
    found = events(served)
    assert [event["type"] for event in found if event["type"] not in ("content_block_delta", "ping")] == [
        "message_start", "content_block_start", "error",
    ]  # fmt: skip
    assert found[-1]["error"]["type"] == ("api_error" if type(error) is ForebayError else "overloaded_error")
    assert found[-1]["request_id"] in found[-1]["error"]["message"] or type(error) is not ForebayError
    with pytest.raises(anthropic.APIStatusError), client.messages.stream(**ASK) as stream:
        stream.get_final_message()
    told = refused_whole(client)
    assert told["type"] == found[-1]["error"]["type"]
    served.engine.say("One two three four", fail_at=0, error=error, raises=raises)
    with pytest.raises(anthropic.APIStatusError) as early:
        client.messages.create(**ASK, stream=True)
    assert early.value.status_code == (500 if type(error) is ForebayError else 529)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left_is_aborted(served: Served, client: anthropic.Anthropic, stream: bool) -> None:
    served.engine.hold = True
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.3).messages.create(**ASK, stream=stream)
    served.wait(lambda: len(served.engine.aborted) == 1 and not served.engine.running)


def test_silence_is_broken_by_pings() -> None:
    """A ping keeps the connection; the first one brings the start with it, whose usage is put right at the end."""
    with serve(ScriptEngine(), ServerOptions(keepalive_comment_s=0.05)) as served:
        served.engine.cached = 2
        served.engine.say("Hello", delay_s=0.2)
        found = events(served)
        first = next(i for i, event in enumerate(found) if event["type"] == "content_block_start")
        assert [event["type"] for event in found[:first]] == ["message_start", *["ping"] * (first - 1)]
        assert first >= 3
        prompt = len(served.engine.requests[0].prompt_ids)
        assert (found[0]["message"]["usage"]["input_tokens"], found[0]["message"]["usage"]["cache_read_input_tokens"]) == (prompt, 0)
        assert (found[-2]["usage"]["input_tokens"], found[-2]["usage"]["cache_read_input_tokens"]) == (prompt - 2, 2)
        with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client, client.messages.stream(**ASK) as stream:
            message = stream.get_final_message()
        assert message.usage.cache_read_input_tokens == 2
        assert message.content[0].type == "text" and message.content[0].text == "Hello"
        # A failure after the first ping cannot change the status any more.
        served.engine.say("Hello", delay_s=0.2, fail_at=0)
        assert [event["type"] for event in events(served)][-1] == "error"


def test_where_a_prompt_came_from(served: Served) -> None:
    body = {**ASK, "forebay": {"explain": True}}
    told = httpx.post(f"{served.url}/v1/messages", json=body).json()["forebay"]
    assert told["tiers"]["compute"] == len(served.engine.requests[-1].prompt_ids)
    assert events(served, forebay={"explain": True})[-2]["forebay"]["tiers"] == told["tiers"]
