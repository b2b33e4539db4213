"""The bodies of Responses and input_tokens as JSON schemas, for /openapi.json. `responses_input.py` is what checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_ID: Schema = {"type": "string", "minLength": 1}
_SWITCH: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_NULL: Schema = {"type": "null"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _maybe(*kinds: Schema) -> Schema:
    return {"anyOf": [*kinds, _NULL]}


_TEXT_PART = _object("type", "text", type={"enum": ["input_text", "output_text", "text"]}, text=_TEXT)
_PARTS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            _TEXT_PART,
            _object("type", "refusal", type={"const": "refusal"}, refusal=_TEXT),
            _object(
                "type", "image_url", type={"const": "input_image"}, image_url=_TEXT, detail={"enum": ["auto", "low", "high", "original"]}
            ),
            _object("type", "file_data", type={"const": "input_file"}, file_data=_TEXT, filename=_TEXT),
        ]
    },
}
_OUTPUT: Schema = _maybe(_TEXT, _PARTS)
_ROLES: Schema = {"enum": ["system", "developer", "user", "assistant"]}
_ITEMS: list[Schema] = [
    _object("role", "content", type={"const": "message"}, role=_ROLES, content={"anyOf": [_TEXT, _PARTS]}),
    _object(
        "type", type={"const": "reasoning"},
        summary=_maybe({"type": "array", "items": _object("type", "text", type={"const": "summary_text"}, text=_TEXT)}),
        content=_maybe({"type": "array", "items": _object("type", "text", type={"const": "reasoning_text"}, text=_TEXT)}),
        encrypted_content=_maybe(_TEXT),
    ),
    _object(
        "type", "call_id", "name",
        type={"const": "function_call"}, call_id=_ID, name=_ID, arguments=_TEXT, namespace=_maybe(_TEXT),
    ),
    _object("type", "call_id", "output", type={"const": "function_call_output"}, call_id=_ID, output=_OUTPUT),
    _object("type", "call_id", "name", "input", type={"const": "custom_tool_call"}, call_id=_ID, name=_ID, input=_TEXT),
    _object("type", "call_id", "output", type={"const": "custom_tool_call_output"}, call_id=_ID, output=_OUTPUT),
]  # fmt: skip
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"}
_FUNCTION: Schema = _object(
    "type", "name", type={"const": "function"}, name=_NAME, description=_maybe(_TEXT), parameters=_maybe(_OBJECT), strict=_maybe(_SWITCH)
)
_CUSTOM: Schema = _object("type", "name", type={"const": "custom"}, name=_NAME, description=_maybe(_TEXT), format=_maybe(_OBJECT))
_NAMESPACE: Schema = _object("type", "name", "tools", type={"const": "namespace"}, name=_TEXT, tools={"type": "array", "items": _FUNCTION})
_CHOICE: Schema = _maybe(
    {"enum": ["auto", "none", "required"]},
    _object("type", "name", type={"enum": ["function", "custom"]}, name=_TEXT),
    _object(
        "type", "tools", type={"const": "allowed_tools"}, mode={"enum": ["auto", "required"]}, tools={"type": "array", "items": _OBJECT}
    ),
)
_EFFORT: Schema = {"type": "string", "examples": ["none", "minimal", "low", "medium", "high", "max"]}
_REASONING: Schema = _object(effort=_maybe(_EFFORT), summary=_maybe({"enum": ["auto", "concise", "detailed", "none"]}))
_FORMAT: Schema = {
    "anyOf": [
        _object("type", type={"enum": ["text", "json_object"]}),
        _object("type", "schema", type={"const": "json_schema"}, name=_maybe(_TEXT), schema=_OBJECT, strict=_maybe(_SWITCH)),
    ]
}

_PROMPT: Schema = {
    "model": _TEXT,
    "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}}], "examples": ["Hello"]},
    "instructions": _maybe(_TEXT),
    "reasoning": _maybe(_REASONING),
    "text": _maybe(_object(format=_maybe(_FORMAT))),
    "tools": _maybe({"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM, _NAMESPACE]}}),
    "tool_choice": _CHOICE,
    "parallel_tool_calls": _maybe(_SWITCH),
    "truncation": _maybe({"enum": ["auto", "disabled"]}),
}
_OTHER_NAMES = {"max_output_tokens": "max_completion_tokens"}
_SAME = ("temperature", "top_p", "top_logprobs", "stream", "cache_salt", "priority", "seed", "top_k", "min_p", "forebay")


def responses_body(fields: Mapping[str, Schema]) -> Schema:
    """Of POST /v1/responses. `fields`: those of chat completions by their names, some of which are the same here."""
    shared = {name: fields[name] for name in _SAME} | {name: fields[other] for name, other in _OTHER_NAMES.items()}
    own = {"include": _maybe(_TEXTS), "store": _maybe(_SWITCH), "background": _maybe({"const": False})}
    return _object("input", **_PROMPT, **shared, **own)


def input_tokens_body() -> Schema:
    """Of POST /v1/responses/input_tokens: the part of a Responses body that makes the prompt."""
    return _object("input", **_PROMPT)
