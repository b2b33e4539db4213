"""POST /v1/responses through the official client: whole answers and streams, tools, formats, log-probabilities, counting."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from forebay.server.limits import ServerOptions
from forebay.server.messages_blocks import unsealed
from responses_wire import FILES, PATCH, PLAIN, WRITE, accumulated, calls, events, post, steady
from script_engine import Script, ScriptEngine, Served, serve

ADAPTER: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def test_whole_answer_has_every_field(served: Served, client: openai.OpenAI) -> None:
    served.engine.say("I think.</think>An answer.")
    served.engine.cached = 7
    raw = client.responses.with_raw_response.create(
        model="script", input="Hi", instructions="Be brief.", max_output_tokens=99, user="me", reasoning={"effort": "low"}
    )
    answer = raw.parse()
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, reasoning.summary, reasoning.encrypted_content) == ("I think.", [], None)
    assert message.type == "message"
    assert (message.role, message.status, message.phase) == ("assistant", "completed", "final_answer")
    assert answer.output_text == "An answer."
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "script")
    assert (answer.error, answer.incomplete_details) == (None, None)
    assert answer.completed_at is not None
    assert 0 <= answer.completed_at - answer.created_at < 60
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (1.0, 0.95, 99)
    assert (answer.instructions, answer.user, answer.metadata) == ("Be brief.", "me", {})
    assert answer.reasoning is not None
    assert (answer.reasoning.effort, answer.reasoning.summary) == ("low", None)
    assert (answer.truncation, answer.service_tier, answer.background, answer.previous_response_id) == ("disabled", "default", False, None)
    request = served.engine.requests[0]
    prompt, sampled = len(request.prompt_ids), len(served.engine.ids("I think.</think>An answer.")) + 1
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (prompt, sampled, prompt + sampled)
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert answer.usage.output_tokens_details.reasoning_tokens == len(served.engine.ids("I think."))
    assert request.params.max_tokens == 99
    assert raw.headers["x-forebay-effort"] == "50"
    Response.model_validate(raw.http_response.json())
    assert raw.http_response.json()["store"] is False


def test_alias_and_slash(served: Served) -> None:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        assert client.responses.create(model="script", input="Hi", extra_body=PLAIN).output_text == "Hello there."
        assert client.post("/v1/responses/", body={"input": "Hi", **PLAIN}, cast_to=Response).output_text == "Hello there."


@pytest.mark.parametrize("said", ["Hm.</think>Fine.", "Hm.</think>Look:" + calls(("write", {"text": "a"}), ("files::read", {"text": "b"}))])
def test_stream_accumulates_to_the_whole_answer(served: Served, client: openai.OpenAI, said: str) -> None:
    served.engine.say(said)
    asked: Any = {"model": "script", "input": "Hi", "tools": [WRITE, FILES], "include": ["reasoning.encrypted_content"],
                  "reasoning": {"effort": "high", "summary": "auto"}, "instructions": "Be brief."}  # fmt: skip
    whole = client.responses.create(**asked).to_dict()
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.reasoning_summary_text.delta"} <= set(kinds)
    received = events(served, **asked)
    for event in received:
        ADAPTER.validate_python(event)
    assert accumulated(received) == received[-1]["response"]["output"]
    assert steady(received[-1]["response"]) == steady(whole)
    texts = [part.text for item in final.output if item.type == "message" for part in item.content if part.type == "output_text"]
    assert "".join(texts) == final.output_text == ("Fine." if "Fine" in said else "Look:")
    assert [item.type for item in final.output] == [item["type"] for item in whole["output"]]
    reasoning = whole["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert unsealed(reasoning["encrypted_content"]) == "Hm."
    assert received[0]["response"] == received[1]["response"]
    assert (received[0]["response"]["status"], received[0]["response"]["output"]) == ("in_progress", [])


def test_tools_round_trip(served: Served, client: openai.OpenAI) -> None:
    served.engine.say("I look.</think>Wait." + calls(("write", {"text": "<b> & \n"}), ("files::read", {"text": "a"})))
    tools: Any = [WRITE, FILES]
    first = client.responses.create(model="script", input="Hi", tools=tools)
    assert first.status == "completed"
    _, message, write, read = first.output
    assert message.type == "message"
    assert message.phase == "commentary"
    assert isinstance(write, ResponseFunctionToolCall)
    assert isinstance(read, ResponseFunctionToolCall)
    assert (write.name, json.loads(write.arguments), write.namespace, write.status) == ("write", {"text": "<b> & \n"}, None, "completed")
    assert (read.name, read.arguments, read.namespace) == ("read", '{"text": "a"}', "files")
    assert write.call_id != read.call_id
    assert [tool.type for tool in first.tools] == ["function", "namespace"]
    history: Any = [
        {"role": "user", "content": "Hi"},
        *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": read.call_id, "output": "text of the file"},
        {"type": "function_call_output", "call_id": write.call_id, "output": "written"},
    ]
    served.engine.say("Good.</think>Done.")
    second = client.responses.create(model="script", input=history, tools=tools)
    assert second.output_text == "Done."
    before, after = served.engine.requests
    said = served.engine.ids("I look.</think>Wait." + calls(("write", {"text": "<b> & \n"}), ("files::read", {"text": "a"})))
    assert list(after.prompt_ids[: len(before.prompt_ids) + len(said)]) == [*before.prompt_ids, *said]
    # Results stand in the order of the calls.
    assert served.engine.text().index("written") < served.engine.text().index("text of the file")


@pytest.mark.parametrize("text", ['*** Begin\n+é漢🙂 "q" \\ \t</b>\n*** End', "", "x"])
def test_custom_tool(served: Served, client: openai.OpenAI, text: str) -> None:
    served.engine.say("Hm.</think>" + calls(("apply_patch", {"input": text})))
    tools: Any = [PATCH, WRITE]
    call = client.responses.create(model="script", input="Hi", tools=tools).output[-1]
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", text)
    received = events(served, tools=tools)
    assert accumulated(received)[-1]["input"] == text
    kinds = [event["type"] for event in received]
    assert "response.function_call_arguments.delta" not in kinds
    assert kinds.count("response.custom_tool_call_input.done") == 1
    history: Any = [{"role": "user", "content": "Hi"}, call.to_dict(),
                    {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "applied"}]  # fmt: skip
    client.responses.create(model="script", input=history, tools=tools)
    prompt = served.engine.text()
    assert f'<｜DSML｜ parameter name="input" string="true">{text}</｜DSML｜ parameter>' in prompt


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ('<｜DSML｜ parameter name="input" string="false">{"a": 1}</｜DSML｜ parameter>\n', '{"a":1}'),
        ('<｜DSML｜ parameter name="patch" string="true">p</｜DSML｜ parameter>\n', '{"patch": "p"}'),
        ("", "{}"),
        (
            '<｜DSML｜ parameter name="why" string="true">w</｜DSML｜ parameter>\n'
            '<｜DSML｜ parameter name="input" string="true">p"\n</｜DSML｜ parameter>\n',
            'p"\n',
        ),
    ],
)
def test_custom_tool_called_in_another_shape_loses_nothing(served: Served, client: openai.OpenAI, said: str, text: str) -> None:
    served.engine.say(f'Hm.</think><｜DSML｜ calls>\n<｜DSML｜ invoke name="apply_patch">\n{said}</｜DSML｜ invoke>\n</｜DSML｜ calls>')
    tools: Any = [PATCH]
    call = client.responses.create(model="script", input="Hi", tools=tools).output[-1]
    assert call.type == "custom_tool_call"
    assert call.input == text
    assert accumulated(events(served, tools=tools))[-1]["input"] == text


class Answer(BaseModel):
    city: str
    people: int


def test_structured_output(served: Served, client: openai.OpenAI) -> None:
    served.engine.say('Hm.</think>{"city": "Oslo", "people": 7}')
    parsed = client.responses.parse(model="script", input="Hi", text_format=Answer)
    assert parsed.output_parsed == Answer(city="Oslo", people=7)
    with client.responses.stream(model="script", input="Hi", text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(city="Oslo", people=7)
    prompt = served.engine.requests[0].prompt
    assert prompt is not None
    assert prompt.parse.json
    assert '"people"' in served.engine.text(0)  # the schema is told to the model
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"


def test_logprobs(served: Served, client: openai.OpenAI) -> None:
    tokens = served.engine.ids("Smile: 🙂 done")
    served.engine.answer = Script([*tokens, served.engine.tokenizer.eos_id or 0])
    asked: Any = {"model": "script", "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": PLAIN}
    whole = client.responses.create(**asked)
    part = whole.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.logprob for entry in part.logprobs] == [-0.25 - place / 1024 for place in range(len(tokens))]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == whole.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    del asked["extra_body"]
    received = events(served, **asked, **PLAIN)
    assert accumulated(received) == received[-1]["response"]["output"]
    assert received[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry.to_dict() for entry in part.logprobs]
    assert served.engine.requests[0].params.logprobs == 2
    plain = events(served, **PLAIN)
    assert all(event["logprobs"] == [] for event in plain if "logprobs" in event)


@pytest.mark.parametrize("stream", [False, True])
def test_cut_off_answers_are_incomplete(served: Served, stream: bool) -> None:
    served.engine.say("Hm.</think>Look:" + calls(("write", {"text": "a long text"})))
    length = len(served.engine.ids("Hm.</think>Look:" + calls(("write", {"text": "a long"})).split("</｜DSML｜")[0]))
    for limit, last, status in ((2, "reasoning", "incomplete"), (6, "message", "incomplete"), (length, "function_call", "incomplete")):
        body = {"tools": [WRITE], "max_output_tokens": limit}
        if stream:
            received = events(served, **body)
            assert received[-1]["type"] == "response.incomplete"
            answer = received[-1]["response"]
            assert accumulated(received) == answer["output"]
        else:
            answer = post(served, **body).json()
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (answer["output"][-1]["type"], answer["output"][-1]["status"]) == (last, status)
        assert all(item["status"] == "completed" for item in answer["output"][:-1])
        assert answer["completed_at"] is None
        assert answer["usage"]["output_tokens"] == limit


def test_no_limit_is_a_large_limit(served: Served, client: openai.OpenAI) -> None:
    """Codex sends none and repeats an answer that met one."""
    client.responses.create(model="script", input="Hi")
    request = served.engine.requests[0]
    assert request.params.max_tokens == served.engine.max_context - len(request.prompt_ids)
    served.engine.max_context = 10**6
    client.responses.create(model="script", input="Hi", extra_body=PLAIN)
    assert served.engine.requests[1].params.max_tokens == 131_072


def test_reasoning_can_be_hidden(served: Served) -> None:
    served.engine.say("Secret.</think>Open.")
    for body in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        answer = post(served, **body)
        assert [item["type"] for item in answer.json()["output"]] == ["message"]
        assert "Secret" not in answer.text
        assert answer.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_empty_answer_is_an_answer(served: Served, client: openai.OpenAI) -> None:
    served.engine.answer = Script([served.engine.tokenizer.eos_id or 0])
    answer = client.responses.create(model="script", input="Hi", extra_body=PLAIN)
    assert (answer.status, answer.output, answer.output_text) == ("completed", [], "")
    assert [event["type"] for event in events(served, **PLAIN)] == ["response.created", "response.in_progress", "response.completed"]


def test_ignored_names_are_told(served: Served, client: openai.OpenAI) -> None:
    tools: Any = [WRITE, {"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]
    raw = client.responses.with_raw_response.create(model="script", input="Hi", tools=tools, prompt_cache_key="k", metadata={"a": "b"})
    assert set(raw.headers["x-forebay-ignored"].split(", ")) == {
        "tools.web_search", "tools.code_interpreter", "prompt_cache_key", "metadata",
    }  # fmt: skip
    assert [tool.type for tool in raw.parse().tools] == ["function"]


def test_explain(served: Served) -> None:
    served.engine.cached = 5
    answer = post(served, forebay={"explain": True}, **PLAIN).json()
    assert answer["forebay"]["tiers"]["hbm"] == 5
    assert events(served, forebay={"explain": True}, **PLAIN)[-1]["response"]["forebay"]["tiers"]["hbm"] == 5


def test_tenant_fields_reach_the_engine(served: Served) -> None:
    post(served, cache_salt="team", priority=-3, seed=4, top_k=9, forebay={"prefill": "exact"})
    request = served.engine.requests[0]
    assert (request.salt, request.priority, request.params.seed, request.params.top_k, request.prefill) == ("team", -3, 4, 9, "exact")


# ---- counting


def test_input_tokens(served: Served, client: openai.OpenAI) -> None:
    asked: Any = {"model": "script", "input": [{"role": "user", "content": "漢字 and more"}], "instructions": "Be brief.", "tools": [WRITE]}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert not served.engine.requests
    answer = client.responses.create(**asked)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens == len(served.engine.requests[0].prompt_ids)


def test_input_tokens_answers_while_the_queue_is_full(served: Served, client: openai.OpenAI) -> None:
    served.engine.max_running = served.engine.max_queued = 0
    assert client.responses.input_tokens.count(model="script", input="Hi").input_tokens > 0
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.input_tokens.count(model="script", input=[{"role": "narrator", "content": "x"}])  # type: ignore[typeddict-item]
    assert error.value.param == "input[0].role"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.input_tokens.count(model="gpt-nothing", input="Hi")
    assert error.value.code == "model_not_found"


def test_what_needs_a_store_is_not_there(client: openai.OpenAI) -> None:
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as error:
            act("resp_1")
        assert error.value.code == "unknown_url"


def test_body_of_a_megabyte(served: Served) -> None:
    """Read in a thread, with the same result."""
    with serve(ScriptEngine(max_context=10**7), ServerOptions(large=1 << 16, off_loop=1 << 10)) as large:
        items = [{"role": "user", "content": "word " * 1000}] * 50
        answer = post(large, input=items, **PLAIN).json()
        assert answer["usage"]["input_tokens"] == len(large.engine.requests[0].prompt_ids) > 50_000
