"""Messages bodies as prompts: beside the vendor's own conversion, field by field, and what must never reach the prompt."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.model.chat import ChatCodec, EncodedPrompt
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer
from forebay.server.errors import HttpError
from forebay.server.limits import ServerOptions
from forebay.server.messages_blocks import seal
from forebay.server.messages_input import Translated, translate
from forebay.server.protocol import parse_chat
from script_engine import TOKENIZER

CODEC = ChatCodec(Tokenizer.load(TOKENIZER))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b", "a"]}
TOOLS = [
    {"name": "f", "description": "Does f.", "input_schema": SCHEMA},
    {"name": "g", "description": "Does g.", "input_schema": {"type": "object", "properties": {}}},
]
USER = {"role": "user", "content": "q"}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
OFF = {"thinking": {"type": "disabled"}}
THOUGHT = {"type": "thinking", "thinking": "t", "signature": "s"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
PAPER = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 'x\n"y"', "a": 1}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(call: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def translated(body: dict[str, Any], **options: Any) -> Translated:
    return translate(body, **{"thinking_default": False, **options})


def prompt(body: dict[str, Any], **options: Any) -> EncodedPrompt:
    found = translated(body, **options)
    with found.own_terms():
        return CODEC.encode(parse_chat(found.chat, ServerOptions(), Tokenizer.load(TOKENIZER)).body)


def vendor(body: dict[str, Any]) -> str:
    """The prompt that the vendor's library makes of a body."""
    request = recipe.MessagesRequest({"model": "DeepSeek-V4.1-Flash", "max_tokens": 9, **body}).convert(recipe.ConversionOptions())
    return recipe.DeepseekV41Encoding().render_conversation(request.conversation).prompt


def history(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


SAME = {
    "one text": {"messages": [USER]},
    "system text": {"system": "Be brief.", "messages": [USER]},
    "system blocks": {"system": [text("One."), text("Two.")], "messages": [USER]},
    "texts of a message": {"messages": history(("user", [text("a"), text(""), text("b")]))},
    "two user messages": {"messages": [USER, {"role": "user", "content": "r"}]},
    "system in the middle": {"system": "lead", "messages": history(("user", "q"), ("system", "mid"), ("user", "z"))},
    "thoughts of earlier turns": {"messages": history(("user", "q"), ("assistant", [THOUGHT, text("A")]), ("user", "z"))},
    "an empty answer": {"messages": history(("user", "q"), ("assistant", [text("")]), ("user", "z"))},
    "tools": {"tools": TOOLS, "messages": [USER]},
    "a call and its result": {
        "tools": TOOLS,
        "messages": history(
            ("user", "q"),
            ("assistant", [THOUGHT, text("A"), text("B"), CALL]),
            ("user", [result("t1", [text("r1"), text("r2")]), text("and now?")]),
        ),
    },
    "results in another order": {
        "tools": TOOLS,
        "messages": history(
            ("user", "q"),
            ("assistant", [CALL, {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]),
            ("user", [result("t2", "two"), result("t1", "one")]),
        ),
    },
    "a failed call": {
        "tools": TOOLS,
        "messages": history(("user", "q"), ("assistant", [CALL]), ("user", [result("t1", "no", is_error=True)])),
    },
    "effort": {"messages": [USER], "output_config": {"effort": "max"}},
    "no tools for now": {"tools": TOOLS, "tool_choice": {"type": "none"}, "messages": [USER]},
}


@pytest.mark.parametrize("mode", [THINK, OFF], ids=["thinking", "plain"])
@pytest.mark.parametrize("name", SAME)
def test_the_prompt_is_the_vendors(name: str, mode: dict[str, Any]) -> None:
    body = {**SAME[name], **mode}
    before = copy.deepcopy(body)
    assert prompt(body).text == vendor(copy.deepcopy(body))
    assert body == before


def test_who_does_not_ask_does_not_think() -> None:
    assert not prompt({"messages": [USER]}).thinking
    assert not prompt({"messages": [USER], "output_config": {"effort": "high"}}).thinking
    assert prompt({"messages": [USER]}, thinking_default=True).thinking
    assert not prompt({"messages": [USER], **OFF}, thinking_default=True).thinking
    for kind in ("enabled", "adaptive", "between_tools", "of next year"):
        assert prompt({"messages": [USER], "thinking": {"type": kind}}).thinking
    for name, effort in (("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75), ("max", 100)):
        assert prompt({"messages": [USER], **THINK, "output_config": {"effort": name}}).effort == effort


BILLING = "x-anthropic-billing-header: cc_version=2.1.36.{}; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("shape", ["block", "line", "first line of a block", "spaced", "alone"])
def test_the_billing_line_never_reaches_the_prompt(shape: str, number: int) -> None:
    line = BILLING.format(number, "0" * number)
    system: Any = {
        "block": [text(line), text("You are a coding agent.", cache_control={"type": "ephemeral"})],
        "line": f"{line}\nYou are a coding agent.",
        "first line of a block": [text(f"{line}\r\n\nYou are a coding agent.".replace("\r", ""))],
        "spaced": [text(f"\n {line}\n"), text("You are a coding agent.")],
        "alone": line,
    }[shape]
    kept = {} if shape == "alone" else {"system": "You are a coding agent."}
    assert prompt({"system": system, "messages": [USER]}).token_ids == prompt({**kept, "messages": [USER]}).token_ids


def test_a_billing_line_in_the_conversation_is_the_users_text() -> None:
    said = BILLING.format(1, 2)
    assert said in prompt({"messages": history(("user", [text(said)]))}).text
    assert said in prompt({"system": f"Never repeat this:\n{said}", "messages": [USER]}).text


def test_cache_control_never_reaches_the_prompt() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    plain = {
        "system": [text("S")],
        "tools": TOOLS,
        "messages": history(("user", [text("q")]), ("assistant", [CALL]), ("user", [result("t1", [text("r")])])),
    }
    marked = {
        "system": [text("S", **mark)],
        "tools": [{**tool, **mark, "defer_loading": False, "eager_input_streaming": True, "input_examples": [{}]} for tool in TOOLS],
        "messages": history(
            ("user", [text("q", **mark)]), ("assistant", [{**CALL, **mark}]), ("user", [result("t1", [text("r", **mark)], **mark)])
        ),
        **mark,
    }
    assert prompt(marked).token_ids == prompt(plain).token_ids


def test_histories_that_other_servers_wrote() -> None:
    """Blocks that only another server can read are left out; what a user sent and cannot be shown is named."""
    body = {
        "messages": history(
            ("user", [text("q"), {"type": "container_upload", "file_id": "x"}, {"type": "tool_reference", "tool_name": "f"}]),
            (
                "assistant",
                [
                    {"type": "redacted_thinking", "data": "zzz"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    text("A"),
                ],
            ),
            ("user", [{"type": "search_result", "title": "T", "source": "S", "content": [text("c")]}, PAPER]),
        )
    }
    whole = prompt(body).text
    assert "q\n\n[Unsupported content: container_upload]\n\n[Unsupported content: tool_reference]" in whole
    assert "<｜Assistant｜></think>A<｜end▁of▁sentence｜>" in whole
    assert "T\nS\nc\n\nT\nD" in whole
    assert not any(word in whole for word in ("zzz", "web_search"))
    assert [name.removeprefix("messages[].content[].") for name in translated(body).ignored] == [
        "container_upload", "tool_reference", "redacted_thinking", "server_tool_use", "web_search_tool_result",
    ]  # fmt: skip


def test_what_blocks_and_tools_hold_beside_what_is_read_is_named_once() -> None:
    marked = {**text("q"), "cache_control": {"type": "ephemeral"}, "citations": None}
    body = {
        "system": [{**text("s"), "cache_control": {"type": "ephemeral"}}],
        "tools": [{**tool, "defer_loading": True, "cache_control": None, "input_examples": []} for tool in TOOLS],
        "messages": history(
            ("user", [marked, marked]), ("assistant", [{**CALL, "caller": {"type": "direct"}}]), ("user", [result("t1", [marked])])
        ),
    }
    assert set(translated(body).ignored) == {
        "tools[].defer_loading", "system[].cache_control", "messages[].content[].cache_control", "messages[].content[].caller",
        "messages[].content[].content[].cache_control",
    }  # fmt: skip


def test_interrupted_turns() -> None:
    """What an agent sends after its user pressed escape: a call without result, half an answer, a thought alone, nothing at all."""
    body = {"tools": TOOLS, **THINK, "messages": history(("user", "q"), ("assistant", [text("Let me"), CALL]), ("user", "stop"))}
    assert "<tool_result></tool_result>\n\nstop" in prompt(body).text
    thought = {"type": "thinking", "thinking": "half a th", "signature": ""}
    body["messages"] = history(("user", "q"), ("assistant", [thought]), ("user", "stop"))
    assert "<think>half a th</think><｜end▁of▁sentence｜><｜User｜>stop" in prompt(body).text
    for nothing in ([], ""):
        body["messages"] = history(("user", "q"), ("assistant", nothing), ("user", "stop"))
        assert "q\n\nstop<｜Assistant｜>" in prompt(body).text
    orphan = history(("user", [result("gone", "late")]), ("user", "go on"))
    assert "<tool_result>late</tool_result>\n\ngo on" in prompt({**body, "messages": orphan}).text
    failed = history(("user", "q"), ("assistant", [CALL]), ("user", [result("t1", [], is_error=True)]))
    assert "<tool_result>Error: </tool_result>" in prompt({**body, "messages": failed}).text


def test_an_answer_that_was_begun_is_continued() -> None:
    for content in ("The answer is ", [text("The answer is ")]):
        found = prompt({"messages": history(("user", "q"), ("assistant", content))})
        assert found.text.endswith("<｜Assistant｜></think>The answer is ")
        assert found.continues
    for content in ("", [], [text("")]):
        assert not prompt({"messages": history(("user", "q"), ("assistant", content))}).continues
    with_tools = {"tools": TOOLS, "messages": history(("user", "q"), ("assistant", "The answer is "))}
    with pytest.raises(RequestError) as error:
        prompt(with_tools)
    assert error.value.param == "tools"
    assert prompt(with_tools, counting=True).text.endswith("The answer is <｜end▁of▁sentence｜><｜Assistant｜></think>")


def test_thoughts_that_are_not_shown_come_back_with_their_signature() -> None:
    said = "weigh  it\n– 漢字 🙂"
    hidden = {"type": "thinking", "thinking": "", "signature": seal(said)}
    turns = history(("user", "q"), ("assistant", [hidden, CALL]), ("user", [result("t1", "r")]))
    shown = copy.deepcopy(turns)
    shown[1]["content"][0] = {"type": "thinking", "thinking": said, "signature": "msg_1"}
    body = {"tools": TOOLS, **THINK}
    assert prompt({**body, "messages": turns}).token_ids == prompt({**body, "messages": shown}).token_ids
    for broken in (seal(said)[:-3], seal(said)[:12] + "é", "thought1./w==", 5, None):
        turns[1]["content"][0]["signature"] = broken
        assert "<think></think>\n\n" in prompt({**body, "messages": turns}).text


def test_tools_of_the_protocol() -> None:
    """Tools that the client runs are functions; those that the server would have to run are left out and named."""
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "custom", "name": "f", "description": "Does f.", "input_schema": SCHEMA},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "memory_20250818", "name": "memory"},
    ]
    found = translated({"tools": tools, "messages": [USER]})
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == ["bash", "f", "str_replace_based_edit_tool", "memory"]
    assert found.ignored == ("tools.0", "tools.4", "tools[].max_characters")
    assert '"restart": {"type": "boolean"}' in prompt({"tools": tools, "messages": [USER]}).text


def test_fields_of_the_answer() -> None:
    asked = {"type": "json_schema", "schema": SCHEMA}
    body = {
        "messages": [USER], "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "seed": 3,
        "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "metadata": {"user_id": "u"},
        "betas": ["b"], "made_up": 1,
        "output_config": {"effort": "low", "format": asked, "task_budget": {}}, "thinking": {"type": "enabled", "budget_tokens": 1},
    }  # fmt: skip
    found = translated(body)
    wanted = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "seed": 3, "tool_choice": "required"}
    assert wanted.items() <= found.chat.items()
    assert found.chat["parallel_tool_calls"] is False
    assert found.chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert found.ignored == ("metadata", "betas", "output_config.task_budget")
    assert found.chat["thinking"] == {"type": "enabled", "budget_tokens": 1}
    unthinking = translated({**body, "thinking": {"type": "disabled", "budget_tokens": 1}})
    assert "thinking.budget_tokens" in unthinking.ignored and unthinking.chat["thinking"] == {"type": "disabled"}
    assert found.unknown == ("made_up",)
    assert translated({"messages": [USER], "output_format": asked}).chat["response_format"] == found.chat["response_format"]
    named = translated({"messages": [USER], "tool_choice": {"type": "tool", "name": "f"}, "tools": TOOLS})
    assert named.chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert "max_tokens" not in translated(body, counting=True).chat


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("messages", {}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "q"}),
    ("messages.0", {"messages": ["q"]}),
    ("messages.0.role", {"messages": [{"content": "q"}]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "q"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": history(("user", 5))}),
    ("messages.0.content.0", {"messages": history(("user", ["q"]))}),
    ("messages.0.content.0.type", {"messages": history(("user", [{"text": "q"}]))}),
    ("messages.0.content.0.text", {"messages": history(("user", [{"type": "text"}]))}),
    ("messages.0.content", {"messages": history(("user", "\ud800"))}),
    ("messages.0.content.1.text", {"messages": history(("user", [text("a"), text("\ud800")]))}),
    ("messages.1.content.2.text", {"messages": history(("user", "q"), ("user", [result("x", "r"), text("a"), text("\ud800")]))}),
    ("messages.0.content.0.tool_use_id", {"messages": history(("user", [{"type": "tool_result"}]))}),
    ("messages.0.content.0.content", {"messages": history(("user", [result("x", 5)]))}),
    ("messages.0.content.0.content.1.text", {"messages": history(("user", [result("x", [text("a"), text("\ud800")])]))}),
    ("messages.1.content.1.input", {"messages": history(("user", "q"), ("assistant", [text("a"), {**CALL, "input": [1]}]))}),
    ("messages.1.content.1.input", {"messages": history(("user", "q"), ("assistant", [text("a"), {**CALL, "input": {"a": "\ud800"}}]))}),
    ("messages.1.content.0.name", {"messages": history(("user", "q"), ("assistant", [{**CALL, "name": ""}]))}),
    ("messages.1.content.0.id", {"messages": history(("user", "q"), ("assistant", [{"type": "tool_use", "name": "f", "input": {}}]))}),
    ("messages.1.content.0.thinking", {"messages": history(("user", "q"), ("assistant", [{"type": "thinking"}]))}),
    ("messages.0.content.0.source", {"messages": history(("user", [{"type": "image"}]))}),
    ("messages.0.content.0.source.type", {"messages": history(("user", [{"type": "image", "source": {"type": "file", "file_id": "f"}}]))}),
    ("messages.0.content.1.source.type", {"messages": history(("user", [text("q"), PDF]))}),
    ("messages.0.content.0.content.0.source.type", {"messages": history(("user", [result("x", [PDF])]))}),
    ("messages.0.content.0.source.type", {"messages": history(("user", [{**PDF, "source": {"type": "file", "file_id": "f"}}]))}),
    ("system", {"messages": [USER], "system": 5}),
    ("system", {"messages": [USER], "system": "\ud800"}),
    ("system.1.text", {"messages": [USER], "system": [text(""), text("\ud800")]}),
    ("thinking", {"messages": [USER], "thinking": True}),
    ("thinking.type", {"messages": [USER], "thinking": {}}),
    ("output_config", {"messages": [USER], "output_config": []}),
    ("output_config.effort", {"messages": [USER], "output_config": {"effort": "huge"}}),
    ("output_config.format.type", {"messages": [USER], "output_config": {"format": {"type": "regex"}}}),
    ("output_config.format.schema", {"messages": [USER], "output_config": {"format": {"type": "json_schema"}}}),
    ("stop_sequences", {"messages": [USER], "stop_sequences": "x"}),
    ("stop_sequences[1]", {"messages": [USER], "stop_sequences": ["x", ""]}),
    ("max_tokens", {"messages": [USER], "max_tokens": 0}),
    ("temperature", {"messages": [USER], "temperature": 3}),
    ("stream", {"messages": [USER], "stream": "yes"}),
    ("tools", {"messages": [USER], "tools": {}}),
    ("tools.0", {"messages": [USER], "tools": ["f"]}),
    ("tools.1.name", {"messages": [USER], "tools": [{"type": "web_search_20250305"}, {"name": "no spaces", "input_schema": SCHEMA}]}),
    ("tools.0.input_schema", {"messages": [USER], "tools": [{"name": "f", "input_schema": 5}]}),
    ("tools.1", {"messages": [USER], "tools": [TOOLS[0], TOOLS[0]]}),
    ("tool_choice.type", {"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "all"}}),
    ("tool_choice", {"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "tool", "name": "h"}}),
    ("tool_choice", {"messages": [USER], "tool_choice": {"type": "any"}}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_errors_name_the_clients_field(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        prompt(body)
    named = error.value.param or ""
    assert named.replace("[", ".").replace("]", "") == path.replace("[", ".").replace("]", "")
    assert "tool_calls" not in error.value.message
    assert "input_schema" in error.value.message or "parameters" not in error.value.message


def test_a_prompt_that_is_too_long_has_the_sentence_that_agents_look_for() -> None:
    error = RequestError("anything", code="context_length_exceeded")
    for lengths, wanted in (
        ((900, 512), "prompt is too long: 900 tokens > 512 maximum"),
        ((512, 512), "prompt is too long: 512 tokens > 512 maximum"),
        ((500, 512), "input length and `max_tokens` exceed context limit: 500 + 64 > 512"),
    ):
        error.lengths = lengths
        with pytest.raises(HttpError) as raised, translated({"messages": [USER], "max_tokens": 64}).own_terms():
            raise error
        assert wanted in raised.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "content", "name", "id"]), inner, max_size=3)
    ),
    max_leaves=8,
)
KINDS = ["text", "image", "thinking", "tool_use", "tool_result", "document", "search_result", "redacted_thinking", "else"]
KEYS = ["text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content", "is_error", "source", "title"]
BLOCK = st.fixed_dictionaries({"type": st.sampled_from(KINDS) | JSON}, optional=dict.fromkeys(KEYS, JSON))
CONTENT = JSON | st.text(max_size=5) | st.lists(BLOCK, max_size=3)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": CONTENT})
TOOL = st.fixed_dictionaries({"name": st.text("fgh", max_size=2)}, optional={"type": JSON, "input_schema": JSON})
FIELDS = [
    "thinking", "output_config", "output_format", "tool_choice", "stop_sequences", "max_tokens", "stream", "temperature", "metadata",
]  # fmt: skip
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4)},
    optional={**dict.fromkeys(FIELDS, JSON), "system": JSON | st.lists(BLOCK, max_size=2), "tools": JSON | st.lists(TOOL)},
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BODY)
def test_any_json_is_a_prompt_or_a_clear_refusal(body: dict[str, Any]) -> None:
    before = json.dumps(body)
    with contextlib.suppress(RequestError):
        assert prompt(body).token_ids
    assert json.dumps(body) == before
