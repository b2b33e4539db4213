"""Names of fields of a chat-completions body by what becomes of them: ignored, refused, or read by the chat encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.server.ignored import unread

# Known fields of OpenAI and of other servers that change nothing here; a response header names those that were sent.
IGNORED = frozenset({
    "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
    "verbosity", "prediction", "web_search_options", "moderation", "user", "user_id", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "vllm_xargs", "lora_path",
    "data_parallel_rank", "return_hidden_states", "input_ids", "cache_prompt", "id_slot", "n_keep", "timings_per_token",
})  # fmt: skip

# Fields whose silent loss would change the meaning of the answer.
UNSUPPORTED = frozenset({
    "audio", "chat_template", "truncate_prompt_tokens", "guided_grammar", "ebnf", "grammar", "best_of", "use_beam_search",
})  # fmt: skip

# Read by the chat encoding from the body itself.
ENCODED = frozenset({
    "messages", "tools", "tool_choice", "functions", "function_call", "response_format", "reasoning_effort", "thinking",
    "enable_thinking", "reasoning", "drop_thinking", "continue_final_message", "chat_template_kwargs", "output_config", "input",
})  # fmt: skip

# What is read of these objects; the other names in them change nothing.
_READ_INSIDE = {
    "chat_template_kwargs": frozenset({"thinking", "enable_thinking", "reasoning_effort", "drop_thinking"}),
    "reasoning": frozenset({"enabled", "effort", "exclude", "max_tokens"}),
    "thinking": frozenset({"type", "budget_tokens", "effort", "reasoning_effort"}),
    "output_config": frozenset({"effort"}),
    "stream_options": frozenset({"include_usage", "continuous_usage_stats"}),
    "structured_outputs": frozenset({"json", "regex", "choice", "json_object"}),
    "tool_choice": frozenset({"type", "name", "function", "custom", "allowed_tools", "mode", "tools"}),
    "function_call": frozenset({"name"}),
}

# The same of a response format, by its type. Every schema has a name, which says nothing about the answer.
_READ_OF_FORMAT = {
    "text": frozenset({"type"}), "json_object": frozenset({"type", "schema"}), "json_schema": frozenset({"type", "json_schema"}),
    "regex": frozenset({"type", "regex"}),
}  # fmt: skip
_READ_OF_SCHEMA = frozenset({"name", "schema", "strict"})

# Names that give way to another one when both are sent.
_OVERRULED = {
    "max_tokens": "max_completion_tokens", "functions": "tools", "function_call": "tool_choice", "extra_key": "cache_salt",
    "rid": "request_id", "input": "messages",
}  # fmt: skip

# The same of places in the body, the one that counts first: what tells whether to think, how much, and whether to drop earlier reasoning.
_FIRST_OF = (
    ("thinking", "enable_thinking", "chat_template_kwargs.thinking", "chat_template_kwargs.enable_thinking", "reasoning.enabled"),
    (
        "reasoning_effort", "thinking.effort", "thinking.reasoning_effort", "reasoning.effort", "chat_template_kwargs.reasoning_effort",
        "output_config.effort",
    ),
    ("drop_thinking", "chat_template_kwargs.drop_thinking"),
)  # fmt: skip


def names_without_effect(body: Mapping[str, Any]) -> list[str]:
    """Known names, and names inside known objects, that change nothing in a checked body."""
    names = [name for name in body if name in IGNORED]
    names += [name for name, other in _OVERRULED.items() if name in body and other in body]
    for places in _FIRST_OF:
        names += [place for place in places if _is_there(body, place)][1:]
    if body.get("drop_thinking") is True and _offers_tools(body):
        names.append("drop_thinking")  # next to tools the reasoning of earlier turns is always kept
    if not body.get("stream"):
        names += [name for name in ("stream_interval", "stream_reasoning") if name in body]
    for name, read in _READ_INSIDE.items():
        names += unread(body.get(name), name, read)
    if body.get("stream_options", {}).get("include_obfuscation") is False:
        names.remove("stream_options.include_obfuscation")  # there is none
    style = body.get("response_format")
    if isinstance(style, dict) and isinstance(kind := style.get("type"), str) and kind in _READ_OF_FORMAT:
        names += unread(style, "response_format", _READ_OF_FORMAT[kind])
        if kind == "json_schema":
            names += unread(style.get("json_schema"), "response_format.json_schema", _READ_OF_SCHEMA)
    return names


def _offers_tools(body: Mapping[str, Any]) -> bool:
    return bool(body.get("tools", body.get("functions"))) and "none" not in (body.get("tool_choice"), body.get("function_call"))


def _is_there(body: Mapping[str, Any], place: str) -> bool:
    outer, dot, inner = place.partition(".")
    value = body.get(outer)
    if dot:
        value = value.get(inner) if isinstance(value, Mapping) else None
    return value is not None
