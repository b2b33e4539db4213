"""Bodies of Responses become chat bodies: items, tools, fields, and errors that name the client's own fields."""

from __future__ import annotations

import functools
import json
from typing import Any

import deepseek_recipe as recipe
import openai
import pytest

from forebay.model.chat import ChatCodec
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer
from forebay.server.limits import ServerOptions
from forebay.server.messages_blocks import seal
from forebay.server.protocol import KNOWN
from forebay.server.responses_input import ResponsesCall, read_responses
from script_engine import TOKENIZER, Served

ASK: dict[str, Any] = {"role": "user", "content": "Hi"}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "description": "Look.", "parameters": PARAMETERS, "strict": False}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Patch.",
                         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip


@functools.cache
def vocabulary() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(vocabulary())


def understand(**body: Any) -> ResponsesCall:
    return read_responses({"input": "Hi", **body}, ServerOptions(), vocabulary())


def messages(items: list[Any], **body: Any) -> list[dict[str, Any]]:
    return understand(input=items, **body).call.body["messages"]


def reasoning(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


def said(text: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}


def call(number: int, name: str = "look", arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": arguments, **fields}


def result(number: int, output: Any = "ok", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": f"c{number}", "output": output}


# ---- the prompt


def test_prompt_is_the_vendors(codec: ChatCodec) -> None:
    """The same conversation through the vendor's own reading of this protocol gives the same prompt."""
    body: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "env"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            reasoning("Let me see.", encrypted_content="x"),
            said("I look."),
            call(1, arguments='{"path": "a<b>\\n"}'),
            call(2),
            result(1, "one"),
            result(2, [{"type": "input_text", "text": "two"}, {"type": "input_text", "text": "three"}]),
            reasoning("More."),
            said("Done."),
            said("Really."),
            reasoning("Again."),
            said("Anything else?"),
            {"role": "user", "content": "No."},
        ],
        "tools": [LOOK, {"type": "web_search"}],
        "reasoning": {"effort": "high"},
    }
    theirs = recipe.ResponsesRequest(json.dumps(body)).convert(recipe.ConversionOptions())
    rendered = recipe.DeepseekV41Encoding().render_conversation(theirs.conversation)
    ours = read_responses(body, ServerOptions(), vocabulary())
    assert codec.encode(ours.call.body).text == rendered.prompt
    assert "web_search" not in rendered.prompt


def test_items_of_one_answer_become_one_message() -> None:
    items = [ASK, reasoning("R"), said("A"), said("B"), call(1, arguments='{"path": "x"}'), call(2), result(2), result(1), said("End"), ASK]
    got = messages(items)
    assert [m["role"] for m in got] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert got[1] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        "reasoning_content": "R",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path": "x"}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    }
    assert got[2] == {"role": "tool", "content": "ok", "tool_call_id": "c2"}


def test_reasoning_after_a_message_begins_the_next_answer() -> None:
    got = messages([ASK, reasoning("1"), said("A"), reasoning("2"), said("B")])
    assert [(m["role"], m.get("reasoning_content")) for m in got] == [("user", None), ("assistant", "1"), ("assistant", "2")]
    # Calls without their results keep their answer open: the results that follow would lose them otherwise.
    got = messages([ASK, reasoning("1"), call(1), reasoning("2"), call(2), result(1), result(2)])
    assert [m["role"] for m in got] == ["user", "assistant", "tool", "tool"]
    assert got[1]["reasoning_content"] == "1\n2"


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (reasoning("raw", summary=[{"type": "summary_text", "text": "s"}]), "raw"),
        ({"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]}, "a\nb"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "opaque"}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": seal("é raw")}, "é raw"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": seal("raw")}, "raw"),
        ({"type": "reasoning", "summary": [], "encrypted_content": seal("raw")[:-1]}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": 5}, None),
        (reasoning("seen", encrypted_content=seal("raw")), "seen"),
    ],
)
def test_text_of_reasoning_items(item: dict[str, Any], text: str | None) -> None:
    assert messages([ASK, item, said("A")])[1].get("reasoning_content") == text


def test_calls_of_every_kind_are_history(codec: ChatCodec) -> None:
    items = [
        ASK,
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** "x"\n'},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
        {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "delete_file", "path": "a"}},
        call(5, "read", namespace="files"),
        result(1, kind="custom_tool_call_output"),
        result(2, kind="local_shell_call_output"),
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}]},
        {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
        result(5, None),
    ]
    got = messages(items)
    assert [(c["type"], c[c["type"]]) for c in got[1]["tool_calls"]] == [
        ("custom", {"name": "apply_patch", "input": '*** "x"\n'}),
        ("function", {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}),
        ("function", {"name": "shell", "arguments": {"commands": ["ls"]}}),
        ("function", {"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a"}}),
        ("function", {"name": "files::read", "arguments": "{}"}),
    ]
    results = {m["tool_call_id"]: m["content"] for m in got if m["role"] == "tool"}
    assert results["c1"] == results["c2"] == "ok"
    assert json.loads(results["c3"])[0]["stdout"] == "a"
    assert json.loads(results["c4"]) == {"status": "completed"}
    assert results["c5"] == ""
    prompt = codec.encode(understand(input=items).call.body).text
    assert '<｜DSML｜ parameter name="input" string="true">*** "x"\n</｜DSML｜ parameter>' in prompt
    assert '<｜DSML｜ invoke name="files::read">' in prompt


def test_items_that_mean_nothing_here_are_left_out_and_named() -> None:
    kinds = ["web_search_call", "compaction", "mcp_list_tools", "computer_call", "something_of_next_year"]
    asked = understand(input=[ASK, *({"type": kind, "id": "x"} for kind in kinds), said("A")])
    assert [m["role"] for m in asked.call.body["messages"]] == ["user", "assistant"]
    assert set(asked.call.ignored) == {f"input.{kind}" for kind in kinds}


@pytest.mark.parametrize("content", [None, "", [], [{"type": "output_text", "text": ""}]])
def test_empty_messages_of_an_answer_do_no_harm(codec: ChatCodec, content: Any) -> None:
    def prompt(*items: dict[str, Any]) -> str:
        return codec.encode(understand(input=[ASK, *items, call(1), result(1)], tools=[LOOK]).call.body).text

    assert prompt({"type": "message", "role": "assistant", "content": content}) == prompt()


def test_files_and_pictures_are_passed_on_as_chat_parts(codec: ChatCodec) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    text = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGV5"}
    got = messages([{"role": "user", "content": [picture, text]}, call(1), result(1, [picture])])
    assert got[0]["content"][0] == picture
    assert got[0]["content"][1] == {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,SGV5"}}
    assert got[2]["content"] == [picture]
    assert "Hey" in codec.encode({"messages": messages([{"role": "user", "content": [text]}])}).text


# ---- tools and fields


def test_tools(codec: ChatCodec) -> None:
    tools = [
        LOOK,
        PATCH,
        {
            "type": "namespace",
            "name": "files",
            "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS, "defer_loading": True}],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "x"},
    ]
    asked = understand(tools=tools)
    offered = [tool[tool["type"]] for tool in asked.call.body["tools"]]
    assert [tool["name"] for tool in offered] == ["look", "apply_patch", "files::read"]
    assert offered[0]["strict"] is False
    assert offered[1]["strict"] is True  # its arguments have no other form than the text that the client gets
    assert "strict" not in offered[2]
    assert {n: (t.name, t.namespace, t.custom) for n, t in asked.tools.items()} == {
        "look": ("look", None, False),
        "apply_patch": ("apply_patch", None, True),
        "files::read": ("read", "files", False),
    }
    assert [tool["type"] for tool in asked.echo["tools"]] == ["function", "custom", "namespace"]
    assert set(asked.call.ignored) == {"tools.web_search", "tools.local_shell", "tools.mcp", "tools[].defer_loading"}
    prompt = codec.encode(asked.call.body).text
    assert "start: /.+/" in prompt  # the grammar is told to the model
    assert "web_search" not in prompt


@pytest.mark.parametrize(
    ("choice", "expected", "ignored"),
    [
        ("auto", "auto", False),
        ("none", "none", False),
        ("required", "required", False),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}, False),
        ({"type": "custom", "name": "apply_patch"}, {"type": "custom", "custom": {"name": "apply_patch"}}, False),
        ({"type": "function", "name": "read", "namespace": "files"}, {"type": "function", "function": {"name": "files::read"}}, False),
        ({"type": "web_search_preview"}, "auto", True),
        ({"type": "mcp", "server_label": "x"}, "auto", True),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "look"}]}},
            True,
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none", True),
    ],
)
def test_tool_choice(codec: ChatCodec, choice: Any, expected: Any, ignored: bool) -> None:
    tools = [LOOK, PATCH, {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}, {"type": "web_search"}]
    asked = understand(tools=tools, tool_choice=choice)
    assert asked.call.body["tool_choice"] == expected
    assert ("tool_choice" in asked.call.ignored) is ignored
    assert codec.encode(asked.call.body).token_ids


def test_fields_become_those_of_chat(codec: ChatCodec) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    asked = understand(
        model="m", instructions="Be brief.", max_output_tokens=77, temperature=0.5, top_p=0.5, parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=3, text={"format": {"type": "json_schema", "name": "n", "schema": schema}, "verbosity": "low"},
        stream=True, store=True, metadata={"a": "b"}, truncation="auto", prompt_cache_key="k", client_metadata={"x": 1}, top_k=5,
        stream_options={"include_obfuscation": True}, cache_salt="s", priority=3, brand_new_field=1,
    )  # fmt: skip
    call, fields = asked.call, asked.call.fields
    assert (fields.model, fields.temperature, fields.top_p, fields.top_k, fields.stream) == ("m", 0.5, 0.5, 5, True)
    assert (call.asked_output, fields.logprobs, fields.top_logprobs, fields.parallel_tool_calls) == (77, True, 3, False)
    assert (call.salt, fields.priority) == ("s", 3)
    assert call.body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert call.body["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert codec.encode(call.body).effort == 50
    assert (asked.summary, asked.encrypted) == (True, True)
    assert call.unknown == ("brand_new_field",)
    named = {"store", "metadata", "truncation", "prompt_cache_key", "client_metadata", "stream_options", "text.verbosity"}
    assert named | {"brand_new_field"} <= set(call.ignored)
    assert not {"instructions", "include", "top_k", "max_output_tokens"} & set(call.ignored)
    assert asked.echo["reasoning"] == {"effort": "low", "summary": "auto"}


def test_output_limit() -> None:
    def limit(**body: Any) -> int | None:
        asked = understand(**body).call
        return asked.sampling(0, thinking=True, effort=75, room=10**6, options=ServerOptions()).max_tokens

    assert limit() == 131_072
    assert limit(max_output_tokens=5) == 5
    assert limit(max_completion_tokens=6) == 6
    assert limit(max_tokens=7) == 7


def test_every_chat_field_is_taken_or_named() -> None:
    """A field that chat completions know is passed on, refused, or named: never dropped in silence."""
    for name in sorted(KNOWN - {"messages", "input", "tools", "functions", "tool_choice", "model", "stream", "n"}):
        for value in ("x", 1, True, {"type": "text"}, ["x"], 0.5):
            refusal = ""
            try:
                asked = understand(**{name: value})
            except RequestError as error:
                if "type" in (error.code or ""):
                    continue  # not a value of that field
                refusal = f"{error.param} {error.message}"
            if refusal:
                assert name in refusal
                break
            honoured = name in asked.call.body or getattr(asked.call.fields, name, None) is not None or name in asked.echo
            assert honoured or name in asked.call.ignored, name
            break


# ---- refusals


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": []}, "empty_array", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": ["x"]}, "invalid_type", "input[0]"),
        ({"input": [{"content": "x"}]}, "missing_required_parameter", "input[0].type"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "invalid_type", "input[0].type"),
        ({"input": [ASK, {"type": "message", "content": "x"}]}, "invalid_value", "input[1].role"),
        ({"input": [ASK, {"role": "narrator", "content": "x"}]}, "invalid_value", "input[1].role"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "invalid_type", "input[0].content"),
        ({"input": [{"role": "assistant", "content": 5}, ASK]}, "invalid_type", "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "invalid_type", "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "invalid_type", "input[0].content[0].text"),
        ({"input": [ASK, {"role": "user", "content": [{"type": "input_audio"}]}]}, "unsupported_value", "input[1].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_parameter", "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "unsupported_parameter", "input[0]"),
        ({"input": [ASK, reasoning("R"), said("A"), call(1), {**call(2), "call_id": 5}]}, "invalid_type", "input[4].call_id"),
        ({"input": [ASK, said("A"), {**call(1), "name": None}]}, "missing_required_parameter", "input[2].name"),
        ({"input": [ASK, said("A"), call(1), {**call(2), "arguments": 5}]}, "invalid_type", "input[3].arguments"),
        ({"input": [ASK, {"type": "custom_tool_call", "call_id": "c", "name": "p"}]}, "invalid_type", "input[1].input"),
        ({"input": [ASK, call(1), result(1, 5)]}, "invalid_type", "input[2].output"),
        ({"input": [ASK, call(1), result(1, [{"type": "input_text", "text": 1}])]}, "invalid_type", "input[2].output[0].text"),
        ({"input": [ASK, call(1), {"type": "function_call_output", "output": "x"}]}, "invalid_type", "input[2].call_id"),
        ({"input": [ASK, said("A"), said(5)]}, "invalid_type", "input[2].content[0].text"),
        ({"instructions": ["x"]}, "invalid_type", "instructions"),
        ({"tools": {}}, "invalid_type", "tools"),
        ({"tools": [5]}, "invalid_type", "tools[0]"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "invalid_value", "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "invalid_value", "tools[0].parameters"),
        ({"tools": [LOOK, {"type": "web_search"}, LOOK]}, "invalid_value", "tools[2]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [LOOK, {**LOOK, "name": 5}]}]}, "invalid_type", "tools[0].tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "missing_required_parameter", "tools[0].tools"),
        ({"n": True}, "invalid_type", "n"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "gone"}}, "invalid_value", "tool_choice"),
        ({"tools": [LOOK], "tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
        ({"max_output_tokens": "5"}, "invalid_type", "max_output_tokens"),
        ({"temperature": 3}, "decimal_above_max_value", "temperature"),
        ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
        ({"reasoning": {"effort": "enormous"}}, "invalid_value", "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "invalid_value", "reasoning.summary"),
        ({"reasoning": "high"}, "invalid_type", "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "unsupported_value", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "invalid_type", "text.format.schema"),
        ({"text": "x"}, "invalid_type", "text"),
        ({"include": "x"}, "invalid_type", "include"),
        ({"include": [5]}, "invalid_type", "include[0]"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", "prompt"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"background": "yes"}, "invalid_type", "background"),
        ({"truncation": "middle"}, "invalid_value", "truncation"),
        ({"n": 2}, "unsupported_value", "n"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ({"separate_reasoning": False}, "unsupported_parameter", "separate_reasoning"),
        ({"stream": "yes"}, "invalid_type", "stream"),
    ],
)  # fmt: skip
def test_refusals_name_the_clients_field(served: Served, client: openai.OpenAI, body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/responses", body={"model": "script", "input": "Hi", **body}, cast_to=object)
    assert (error.value.code, error.value.param) == (code, param)
    assert param in error.value.message
    assert "messages" not in error.value.message.replace("content", "")
    assert not served.engine.requests


def test_limits_count_items_and_tools() -> None:
    options = ServerOptions(max_messages=3, max_tools=2)
    for body, param in (
        ({"input": [ASK] * 4}, "input"),
        ({"input": "Hi", "tools": [{**LOOK, "name": f"f{i}"} for i in range(3)]}, "tools"),
        ({"input": "Hi", "tools": [{"type": "namespace", "name": "n", "tools": [LOOK] * 3}]}, "tools[0].tools"),
    ):
        with pytest.raises(RequestError) as error:
            read_responses(body, options, vocabulary())
        assert (error.value.code, error.value.param) == ("array_above_max_length", param)


def test_unknown_model_is_400(client: openai.OpenAI) -> None:
    """Codex repeats a 404 five times."""
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="gpt-nothing", input="Hi")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert "script" in error.value.message


def test_one_that_names_no_model_gets_the_main_one(served: Served, client: openai.OpenAI) -> None:
    answer: Any = client.post("/responses", body={"input": "Hi"}, cast_to=object)
    assert answer["model"] == "script"
