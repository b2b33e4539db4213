"""The bodies of Messages and count_tokens as JSON schemas, for /openapi.json. `messages_input.py` is what checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.server.messages_input import SAME

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_SWITCH: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_NULL: Schema = {"type": "null"}


def _block(kind: str, *required: str, **fields: Schema) -> Schema:
    properties = {"type": {"const": kind}, **fields, "cache_control": {"anyOf": [_OBJECT, _NULL]}}
    return {"type": "object", "required": ["type", *required], "properties": properties}


_TEXT_BLOCK = _block("text", "text", text=_TEXT)
_BASE64 = {
    "type": "object", "required": ["type", "media_type", "data"],
    "properties": {"type": {"const": "base64"}, "media_type": _TEXT, "data": _TEXT},
}  # fmt: skip
_URL = {"type": "object", "required": ["type", "url"], "properties": {"type": {"const": "url"}, "url": _TEXT}}
_PAPER: Schema = {
    "anyOf": [
        {"type": "object", "required": ["type", "data"], "properties": {"type": {"const": "text"}, "data": _TEXT}},
        {
            "type": "object", "required": ["type", "content"],
            "properties": {"type": {"const": "content"}, "content": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]}},
        },
    ]
}  # fmt: skip
_SHOWN = [
    _TEXT_BLOCK,
    _block("image", "source", source={"anyOf": [_BASE64, _URL]}),
    _block("document", "source", source=_PAPER, title=_TEXT, context=_TEXT),
    _block("search_result", title=_TEXT, source=_TEXT, content={"type": "array", "items": _TEXT_BLOCK}),
]
_RESULT = _block(
    "tool_result", "tool_use_id", tool_use_id=_NAME, is_error=_SWITCH,
    content={"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _SHOWN}}, _NULL]},
)  # fmt: skip
_SAID = [
    _TEXT_BLOCK,
    _block("thinking", "thinking", thinking=_TEXT, signature=_TEXT),
    _block("redacted_thinking"),
    _block("tool_use", "id", "name", id=_NAME, name=_NAME, input=_OBJECT),
]


def _message(role: str, blocks: list[Schema]) -> Schema:
    content = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": blocks}}]}
    properties = {"role": {"const": role}, "content": content}
    return {"type": "object", "required": ["role", "content"], "properties": properties}


_MESSAGES: Schema = {
    "type": "array", "minItems": 1, "examples": [[{"role": "user", "content": "Hello"}]],
    "items": {"anyOf": [_message("user", [*_SHOWN, _RESULT]), _message("assistant", _SAID), _message("system", [_TEXT_BLOCK])]},
}  # fmt: skip
_TOOL: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "type": {"anyOf": [{"type": "string", "examples": ["custom", "bash_20250124"]}, _NULL]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"}, "description": _TEXT, "input_schema": _OBJECT, "strict": _SWITCH,
    },
}  # fmt: skip
_CHOICE: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}, "name": _TEXT, "disable_parallel_tool_use": _SWITCH},
}
_THINKING: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "examples": ["enabled", "adaptive", "disabled"]}, "budget_tokens": {"type": "integer", "minimum": 0},
        "display": {"type": "string", "examples": ["summarized", "omitted"]},
    },
}  # fmt: skip
_FORMAT: Schema = {"type": "object", "required": ["type", "schema"], "properties": {"type": {"const": "json_schema"}, "schema": _OBJECT}}
_EFFORT: Schema = {"type": "string", "examples": ["low", "medium", "high", "max"]}

_PROMPT: Schema = {
    "messages": _MESSAGES,
    "system": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}, _NULL]},
    "thinking": {"anyOf": [_THINKING, _NULL]},
    "output_config": {"type": "object", "properties": {"effort": {"anyOf": [_EFFORT, _NULL]}, "format": {"anyOf": [_FORMAT, _NULL]}}},
    "output_format": {"anyOf": [_FORMAT, _NULL]},
    "tools": {"anyOf": [{"type": "array", "items": _TOOL}, _NULL]},
    "tool_choice": {"anyOf": [_CHOICE, _NULL]},
}


def messages_body(fields: Mapping[str, Schema]) -> Schema:
    """Of POST /v1/messages. `fields`: those of chat completions by their names, some of which are the same here."""
    stops = {"anyOf": [{"type": "array", "items": {"type": "string", "minLength": 1}}, _NULL]}
    shared = {name: fields[name] for name in SAME}
    return {"type": "object", "required": ["messages"], "properties": {"model": _TEXT, **_PROMPT, **shared, "stop_sequences": stops}}


def count_tokens_body() -> Schema:
    """Of POST /v1/messages/count_tokens: the part of a Messages body that makes the prompt."""
    return {"type": "object", "required": ["messages"], "properties": {"model": _TEXT, **_PROMPT}}
