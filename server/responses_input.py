"""A Responses body becomes a chat-completions body (spec/http-api.md §7.1): a pure function, and the way back for names in errors.

Fields that Responses does not define but chat completions of this server does (`top_k`, `seed`, `cache_salt`, …) mean what they mean
there. What is ignored is named; what would silently change the conversation is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from forebay.model.errors import ForebayError
from forebay.model.tokenizer import Tokenizer
from forebay.server.chat_names import IGNORED
from forebay.server.field_errors import array_at, bad, boolean_at, invalid, object_at, short, string_at, unsupported, wrong_type
from forebay.server.field_paths import FieldPaths
from forebay.server.ignored import MAX_NAMED, unread
from forebay.server.limits import ServerOptions
from forebay.server.protocol import KNOWN, ChatCall, parse_chat
from forebay.server.responses_items import FORMAT_PATHS, chat_format, read_conversation
from forebay.server.responses_tools import ToolName, read_choice, read_tools

# Codex sends no limit and takes an answer that met one for a failure that it repeats.
DEFAULT_OUTPUT = 131_072

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"

_OWN = frozenset(
    {
        "model", "input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "parallel_tool_calls",
        "temperature", "top_p", "top_logprobs", "stream", "include", "previous_response_id", "conversation", "background", "truncation",
        "prompt", "store", "n",
    }
)  # fmt: skip
_IGNORED = IGNORED | {"client_metadata", "context_management", "max_tool_calls", "stream_options"}
_NOT_HERE = frozenset({"messages", "return_token_ids"})  # of chat completions; nothing in this protocol's answer could carry them
_READ_OF_REASONING = frozenset({"effort", "enabled", "max_tokens", "exclude", "summary", "generate_summary"})
_READ_OF_CHOICE = frozenset({"type", "name", "namespace", "function", "custom", "allowed_tools", "mode", "tools"})


@dataclass(frozen=True)
class ResponsesCall:
    """A validated request.

    Attributes:
        call: the chat request that it became.
        echo: fields of the response object that repeat the request.
        tools: of the client, by their names in the prompt.
        summary: reasoning is also wanted as its summary. encrypted: reasoning items carry an opaque token.
    """

    call: ChatCall
    echo: dict[str, Any]
    tools: dict[str, ToolName]
    paths: FieldPaths
    summary: bool
    encrypted: bool


def read_responses(body: dict[str, Any], options: ServerOptions, tokenizer: Tokenizer) -> ResponsesCall:
    """Check a body and translate it. Raises RequestError naming the client's field."""
    body = {name: value for name, value in body.items() if value is not None}
    ignored = _check_state(body)
    paths: dict[str, str] = {"messages": "input"}
    history = read_conversation(body, options.max_messages)
    tools = read_tools(body.get("tools"), options.max_tools)
    choice, choice_left_out = read_choice(body.get("tool_choice"), tools, sent=bool(body.get("tools")))
    include = [string_at(name, f"include[{i}]") for i, name in enumerate(array_at(body.get("include", []), "include", 64))]
    reasoning = object_at(body.get("reasoning", {}), "reasoning")
    text = object_at(body.get("text", {}), "text")

    unknown = tuple(name for name in body if name not in KNOWN | _OWN | _IGNORED)
    chat = {name: value for name, value in body.items() if name in KNOWN and name not in _OWN | _IGNORED | _NOT_HERE}
    chat |= {name: body[name] for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls") if name in body}
    chat["messages"] = history.messages
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
        paths["max_completion_tokens"] = "max_output_tokens"
    if tools.offered:
        chat |= {"tools": tools.offered, "tool_choice": choice}
    elif choice not in (None, "auto", "none"):
        chat["tool_choice"] = choice
    if LOGPROBS in include or "top_logprobs" in body:
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    if effort := {name: reasoning[name] for name in ("effort", "enabled", "max_tokens", "exclude") if reasoning.get(name) is not None}:
        chat["reasoning"] = effort
    style = object_at(text.get("format") or {"type": "text"}, "text.format")
    if "format" in text:
        chat["response_format"] = chat_format(style)
        paths |= FORMAT_PATHS
    summary = _summary(reasoning)

    ignored += [name for name in body if name in (_IGNORED | _NOT_HERE) - _OWN]
    ignored += [f"include.{name}" for name in include if name not in (ENCRYPTED, LOGPROBS)]
    ignored += unread(reasoning, "reasoning", _READ_OF_REASONING) + unread(text, "text", ("format",))
    ignored += ["tool_choice"] if choice_left_out else unread(body.get("tool_choice"), "tool_choice", _READ_OF_CHOICE)
    ignored += [*tools.left_out, *(f"input.{kind}" for kind in history.left_out)]
    where = FieldPaths({**paths, **tools.paths, **history.paths})
    try:
        call = parse_chat(chat, options, tokenizer, also=[*ignored, *unknown], rename=where.find)
    except ForebayError as error:
        where.translate(error)
        raise
    echo = {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": summary},
        "temperature": body.get("temperature", 1.0),
        "text": {"format": style, "verbosity": text.get("verbosity")},
        "tool_choice": choice if choice_left_out and isinstance(choice, str) else body.get("tool_choice", "auto"),
        "tools": tools.echo,
        "top_logprobs": body.get("top_logprobs", 0),
        "top_p": body.get("top_p", 1.0),
        "user": body.get("user"),
    }
    call = replace(call, unknown=unknown[:MAX_NAMED], default_output=DEFAULT_OUTPUT)
    return ResponsesCall(call, echo, tools.names, where, summary is not None, ENCRYPTED in include)


def _check_state(body: dict[str, Any]) -> list[str]:
    """Refuse what needs a store of responses; gives the names of what is ignored instead."""
    for name in ("previous_response_id", "conversation"):
        if name in body:
            raise unsupported(name, "responses are not stored; send the whole conversation in 'input'")
    if "prompt" in body:
        raise unsupported("prompt", "there are no stored prompt templates; send 'instructions' and 'input'")
    ignored: list[str] = []
    for name in ("background", "store"):
        boolean_at(body.get(name, False), name)
    if body.get("background"):
        raise unsupported("background", "responses are not stored, so nobody could fetch it later")
    if body.get("store"):
        ignored.append("store")
    truncation = body.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid("truncation", f"expected auto or disabled, got {short(truncation)}")
    if truncation == "auto":  # a conversation that does not fit is refused, never cut
        ignored.append("truncation")
    for name, off in (("prompt_logprobs", False), ("echo", False), ("separate_reasoning", True)):
        if body.get(name, off) is not off:
            raise unsupported(name, "a response has no place for it")
    if isinstance(body.get("n"), bool):  # which is equal to 1
        raise wrong_type("n", "an integer", body["n"])
    if body.get("n", 1) != 1:
        raise bad("n", f"Unsupported value: 'n' is 1 for responses, got {short(body['n'])}.", "unsupported_value")
    return ignored


def _summary(reasoning: dict[str, Any]) -> str | None:
    for name in ("summary", "generate_summary"):
        value = reasoning.get(name)
        if value is not None and value != "none":
            if value not in ("auto", "concise", "detailed"):
                raise invalid(f"reasoning.{name}", f"expected auto, concise or detailed, got {short(value)}")
            return str(value)
    return None
