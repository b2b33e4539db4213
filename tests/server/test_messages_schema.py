"""What /openapi.json says of the bodies of Messages and Responses: what clients send fits it, and what is refused does not."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jsonschema
import pytest

from forebay.server.messages_schema import count_tokens_body, messages_body
from forebay.server.responses_schema import input_tokens_body, responses_body

FIELDS: dict[str, Any] = defaultdict(dict)  # those of chat completions, which their own model describes
MARK = {"cache_control": {"type": "ephemeral"}}
TEXT: dict[str, Any] = {"type": "text", "text": "q", **MARK}
CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT], "is_error": True}
CLAUDE: dict[str, Any] = {
    "model": "claude-opus-4-8", "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive"}, "betas": ["b"],
    "output_config": {"effort": "medium"}, "system": [TEXT], "metadata": {"user_id": "u"},
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, **MARK}, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, TEXT, CALL]},
        {"role": "user", "content": [RESULT, TEXT]},
    ],
}  # fmt: skip
SAID: dict[str, Any] = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]}
CODEX: dict[str, Any] = {
    "model": "m", "instructions": "You code.", "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "medium", "summary": "auto"}, "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "k",
    "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}, {"type": "custom", "name": "p"}],
    "input": [
        SAID,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ],
}  # fmt: skip
BODIES = {
    "messages": (messages_body(FIELDS), CLAUDE),
    "count": (count_tokens_body(), CLAUDE),
    "responses": (responses_body(FIELDS), CODEX),
    "input tokens": (input_tokens_body(), {**CODEX, "input": "q"}),
}


def fits(schema: dict[str, Any], body: dict[str, Any]) -> bool:
    checker = jsonschema.Draft202012Validator(schema)
    checker.check_schema(checker.schema)
    return bool(checker.is_valid(body))


@pytest.mark.parametrize("name", BODIES)
def test_what_agents_send_fits(name: str) -> None:
    schema, body = BODIES[name]
    assert fits(schema, body)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages", {"tools": [{"input_schema": {}}]}),
        ("messages", {"thinking": {}}),
        ("count", {"tool_choice": {"type": "all"}}),
        ("responses", {"input": []}),
        ("responses", {"input": [{"role": "tool", "content": "x"}]}),
        ("responses", {"background": True}),
        ("input tokens", {"tool_choice": "always"}),
    ],
)
def test_what_is_refused_does_not(name: str, wrong: dict[str, Any]) -> None:
    schema, body = BODIES[name]
    assert not fits(schema, {**body, **wrong})
