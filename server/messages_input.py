"""An Anthropic Messages body becomes a chat-completions body, which the rest of the server knows how to check, encode and run.

Nothing that changes from turn to turn without meaning may reach the prompt, or no turn would find its predecessor in the cache: markers
of the client's cache control, and the billing line that Claude Code writes at the top of its system prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forebay.model.errors import ForebayError
from forebay.server.chat_names import IGNORED
from forebay.server.errors import HttpError
from forebay.server.field_errors import array_at, bad, empty, missing, unsupported, wrong_type
from forebay.server.field_paths import FieldPaths
from forebay.server.ignored import unread
from forebay.server.messages_blocks import (
    Block,
    LeftOut,
    Part,
    each_block,
    object_in,
    part_of,
    result_content,
    text_at,
    text_part,
    thinking_of,
)
from forebay.server.messages_tools import choice, functions
from forebay.server.protocol import KNOWN
from forebay.server.turns import Job

_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")

# The same in both protocols. Those of the second line are not Anthropic's.
SAME = (
    "max_tokens", "temperature", "top_p", "top_k", "stream",
    "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "cache_salt", "extra_key", "priority", "request_id",
    "rid", "forebay",
)  # fmt: skip
_READ = frozenset({"model", "messages", "system", "thinking", "output_config", "output_format", "stop_sequences", "tools", "tool_choice"})
_IGNORED = frozenset(
    {
        "metadata", "cache_control", "context_management", "container", "mcp_servers", "service_tier", "speed", "inference_geo", "betas",
        "diagnostics", "user_profile_id",
    }
)  # fmt: skip

# Of chat completions, and harmless here: how much a stream tells, and what the answer has no place for.
_HARMLESS = frozenset({"stream_options", "stream_interval", "stream_reasoning", "return_token_ids", "return_tokens_as_token_ids"})
# The others of chat completions would change the answer: they are refused unless they ask for what is done anyhow.
_CHAT_ONLY = KNOWN - IGNORED - _HARMLESS - _READ - _IGNORED - frozenset(SAME)
_AS_IT_IS: dict[str, Any] = {
    "n": 1, "best_of": 1, "parallel_tool_calls": True, "add_generation_prompt": True, "include_reasoning": True, "separate_reasoning": True,
    "response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0, "min_tokens": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Translated:
    """A Messages request in the terms of chat completions.

    Attributes:
        chat: the body, without `model`. model: the name as it was asked for, None if there is none.
        shows_thinking: thinking blocks are to have their text.
        ignored: fields for the response header. unknown: fields that no client is known to send.
    """

    chat: dict[str, Any]
    model: Any
    shows_thinking: bool
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    paths: FieldPaths

    def forget_parts(self, job: Job) -> None:
        """Let go of the places of the body's parts: the engine finds fault only with the form of the answer, or with the whole prompt."""
        grammar = job.requests[0].grammar
        self.paths.client = {} if grammar is None else {grammar.spec.param: self.paths.find(grammar.spec.param)}

    def drop_conversation(self) -> None:
        """Let go of what may be megabytes, once the chat body has been taken over."""
        self.chat.pop("messages", None)
        self.chat.pop("tools", None)

    @contextmanager
    def own_terms(self) -> Iterator[None]:
        """Errors about the chat body name the client's fields, and a prompt that is too long has the sentence that clients look for."""
        try:
            yield
        except ForebayError as error:
            if error.lengths is not None:
                raise _too_long(*error.lengths, self.chat.get("max_tokens") or 0) from error
            self.paths.translate(error)
            raise


def _too_long(tokens: int, limit: int, asked: int) -> HttpError:
    text = f"prompt is too long: {tokens} tokens > {limit} maximum"
    if tokens < limit:  # the prompt alone would fit
        text = f"input length and `max_tokens` exceed context limit: {tokens} + {asked} > {limit}, decrease input length or `max_tokens`"
    return HttpError(400, text, code="context_length_exceeded", param="messages")


def translate(body: Mapping[str, Any], *, thinking_default: bool, counting: bool = False) -> Translated:
    """The chat body that means the same as `body`, which is left as it is.

    Args:
        thinking_default: whether a request without `thinking` thinks.
        counting: only the prompt matters. Limits of the output are left out, and so is the rule that a last assistant message is to be
            continued where that cannot be: clients also count parts of a conversation.

    Raises RequestError naming a field of `body`. What the chat encoding finds later is to be raised inside `own_terms`.
    """
    body = {name: value for name, value in body.items() if value is not None}
    paths = FieldPaths()
    chat = {name: body[name] for name in SAME if name in body and not (counting and name in ("max_tokens", "stream"))}
    for name in sorted(_CHAT_ONLY & body.keys()):
        value, usual = body[name], _AS_IT_IS.get(name, False)
        if value not in ("", [], {}) and not (type(value) is type(usual) and value == usual):
            raise unsupported(name, "it belongs to chat completions, POST /v1/chat/completions")
    known = _IGNORED | _HARMLESS | _CHAT_ONLY | IGNORED
    ignored = [name for name in body if name in known and name not in _READ]
    unknown = tuple(name for name in body if name not in known and name not in _READ and name not in SAME)

    if "stop_sequences" in body:
        chat["stop"] = array_at(body["stop_sequences"], "stop_sequences")
        paths.put("stop", "stop_sequences")
    shows = True
    thinks, budget = thinking_default, dict[str, Any]()
    if "thinking" in body:
        thinking = object_in(body, "thinking", "")
        thinks = text_at(thinking, "type", "thinking") != "disabled"
        shows = thinking.get("display") != "omitted"
        ignored += unread(thinking, "thinking", ("type", "display", *(("budget_tokens",) if thinks else ())))
        ignored += ["thinking.display"] if thinking.get("display") not in (None, "omitted", "summarized") else []
        if thinks and not counting and thinking.get("budget_tokens") is not None:
            budget["budget_tokens"] = thinking["budget_tokens"]  # any: one of the output limit or more is never used up
    chat["thinking"] = {"type": "enabled" if thinks else "disabled", **budget}
    ignored += _output(body, chat, paths)
    left_out = LeftOut()
    if "tools" in body:
        chat["tools"], not_offered = functions(body["tools"], paths, left_out)
        ignored += not_offered
    if "tool_choice" in body:
        chat["tool_choice"], parallel = choice(body["tool_choice"])
        ignored += unread(body["tool_choice"], "tool_choice", ("type", "name", "disable_parallel_tool_use"))
        if not parallel:
            chat["parallel_tool_calls"] = False
    history = _History(paths, left_out)
    if "system" in body:
        history.system(body["system"], "system")
    history.read(body.get("messages"))
    if not (counting and (chat.get("tools") or "response_format" in chat)):
        history.continue_last()
    chat["messages"] = history.messages
    ignored += left_out.names
    return Translated(chat, body.get("model"), shows, tuple(ignored), unknown, paths)


def _output(body: Mapping[str, Any], chat: dict[str, Any], paths: FieldPaths) -> list[str]:
    """Effort and format of the answer; gives the names that are ignored."""
    ignored: list[str] = []
    style, where = body.get("output_format"), "output_format"  # its name before it moved into output_config
    if "output_config" in body:
        config = object_in(body, "output_config", "")
        if config.get("effort") is not None:
            chat["reasoning_effort"] = config["effort"]
            paths.put("reasoning_effort", "output_config.effort")
        if config.get("format") is not None:
            style, where = config["format"], "output_config.format"
        ignored += unread(config, "output_config", ("effort", "format"))
    if style is not None:
        if not isinstance(style, Mapping):
            raise wrong_type(where, "an object", style)
        kind = text_at(style, "type", where)
        if kind != "json_schema":
            raise bad(f"{where}.type", f"Unsupported value: '{where}.type' must be json_schema, got '{kind[:64]}'.", "unsupported_value")
        schema = object_in(style, "schema", where)
        ignored += unread(style, where, ("type", "schema"))
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        paths.put("response_format", where)
        paths.put("response_format.json_schema", where)
        paths.put("response_format.json_schema.strict", where)
    return ignored


class _History:
    """Builds the messages of the chat body and remembers where each came from."""

    def __init__(self, paths: FieldPaths, left_out: LeftOut) -> None:
        self.messages: list[dict[str, Any]] = []
        self._paths, self._left_out = paths, left_out

    def read(self, messages: Any) -> None:
        if not array_at(messages, "messages"):
            raise empty("messages")
        for i, message in enumerate(messages):
            where = f"messages.{i}"
            if not isinstance(message, Mapping):
                raise wrong_type(where, "an object", message)
            role = text_at(message, "role", where)
            content = message.get("content")
            if content is None:
                raise missing(f"{where}.content")
            if role in ("system", "developer"):
                self.system(content, f"{where}.content")
            elif role not in ("user", "assistant"):
                text = f"Invalid value for '{where}.role': expected user, assistant or system, got '{role[:64]}'."
                raise bad(f"{where}.role", text, "invalid_value")
            elif isinstance(content, str):
                if content or role == "user":
                    self._add({"role": role, "content": content}, where)
            elif role == "user":
                self._user(content, where)
            else:
                self._assistant(content, where)

    def system(self, content: Any, where: str) -> None:
        """Text that stands above the conversation, wherever it is; blocks that are empty or only a billing line are left out."""
        if isinstance(content, str):
            if text := _BILLING.sub("", content, 1) if _BILLING.match(content) else content:
                self._add({"role": "system", "content": text}, where)
                self._paths.put(f"messages[{len(self.messages) - 1}].content", where)
            return
        parts: list[tuple[Part, str]] = []
        for block, kind, path in each_block(content, where, self._left_out):
            part = part_of(block, kind, path, self._left_out)
            if kind == "text" and _BILLING.match(part["text"]):
                part = text_part(_BILLING.sub("", part["text"], 1))
            if part != text_part(""):
                parts.append((part, path))
        if parts:
            self._add_parts("system", parts, where)

    def continue_last(self) -> None:
        """A conversation that ends with the beginning of an answer asks for the rest of it."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or "tool_calls" in last:
            return
        content = last["content"]
        if content if isinstance(content, str) else any(part["text"] for part in content or ()):
            last["prefix"] = True

    def _user(self, content: Any, where: str) -> None:
        parts: list[tuple[Part, str]] = []
        results = False
        for block, kind, path in each_block(content, f"{where}.content", self._left_out):
            if kind != "tool_result":
                parts.append((part_of(block, kind, path, self._left_out), path))
                continue
            results = True
            number = len(self.messages)
            content = result_content(block, path, self._left_out)
            self._add({"role": "tool", "tool_call_id": text_at(block, "tool_use_id", path), "content": content}, path)
            self._paths.put(f"messages[{number}].tool_call_id", f"{path}.tool_use_id")
            for k, part in enumerate(content if isinstance(content, list) else ()):
                self._put_image(part, f"messages[{number}].content[{k}]", f"{path}.content.{k}")
        if parts or not results:
            self._add_parts("user", parts, where)

    def _assistant(self, content: Any, where: str) -> None:
        number = f"messages[{len(self.messages)}]"
        texts: list[tuple[Part, str]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, kind, path in each_block(content, f"{where}.content", self._left_out):
            # The rest is of another server: thoughts that only it can read, and calls of tools that it has run itself.
            if kind == "text":
                texts.append((part_of(block, kind, path, self._left_out), path))
            elif kind == "thinking":
                thoughts.append(thinking_of(block, path))
                self._paths.put(f"{number}.reasoning_content", f"{path}.thinking")
            elif kind == "tool_use":
                call = f"{number}.tool_calls[{len(calls)}]"
                self._paths.put(call, path)
                self._paths.put(f"{call}.function", path)
                self._paths.put(f"{call}.function.arguments", f"{path}.input")
                calls.append(_call(block, path))
            else:
                self._left_out.add(kind, path)
        message: dict[str, Any] = {"reasoning_content": "\n\n".join(thoughts)} if any(thoughts) else {}
        if calls:
            message["tool_calls"] = calls
        if texts:
            self._add_parts("assistant", texts, where, message)
        elif message:
            self._add({"role": "assistant", "content": None, **message}, where)

    def _add(self, message: dict[str, Any], where: str) -> None:
        self._paths.put(f"messages[{len(self.messages)}]", where)
        self.messages.append(message)

    def _add_parts(self, role: str, parts: list[tuple[Part, str]], where: str, more: Block | None = None) -> None:
        number = len(self.messages)
        self._add({"role": role, "content": [part for part, _ in parts], **(more or {})}, where)
        for k, (part, path) in enumerate(parts):
            self._paths.put(f"messages[{number}].content[{k}]", path)
            self._put_image(part, f"messages[{number}].content[{k}]", path)

    def _put_image(self, part: Part, chat: str, path: str) -> None:
        if part["type"] == "image_url":
            self._paths.put(f"{chat}.image_url", f"{path}.source")


def _call(block: Block, where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, (str, Mapping)):
        raise wrong_type(f"{where}.input", "an object", arguments)
    function = {"name": text_at(block, "name", where), "arguments": arguments or {}}
    return {"id": text_at(block, "id", where), "type": "function", "function": function}
