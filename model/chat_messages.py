"""The `messages` of a chat request become turns in prompt order.

Lenient where the meaning is clear, because agents resend their whole history with every request and a refusal wedges the session: missing
results of calls, surplus ones and results in another order are put right here.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

import deepseek_recipe as recipe

from forebay.model.chat_images import FILE_PARTS, is_image
from forebay.model.chat_values import ExactIntegers, array_at, bad, boolean_at, json_at, kind_of, object_at, shown, string_at
from forebay.model.errors import RequestError
from forebay.model.json_limits import MAX_VALUES, too_many_values

TASKS = ("action", "query", "authority", "domain", "title", "read_url")
PICTURES = "pictures are not served by this model, which sees none; send text only"
MAX_ESCAPES = 1_000_000  # in a data URL: each becomes an object while it is undone


@dataclass(frozen=True)
class Turn:
    """One message, checked and with its content joined to one text. `images` are the parts that its stand-ins are for, in their order."""

    role: Literal["system", "user", "assistant", "tool", "latest_reminder"]
    content: str = ""
    reasoning: str = ""
    calls: tuple[recipe.ToolCall, ...] = ()
    call_id: str | None = None
    task: str | None = None
    prefix: bool = False
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Content:
    """What the content of a message says."""

    text: str
    reasoning: str = ""
    images: tuple[str, ...] = ()


def parse_messages(
    body: Mapping[str, Any], exact: ExactIntegers, strict_tool_messages: bool = False, stand_in: str | None = None
) -> list[Turn]:
    """Turns in prompt order: empty system and unset assistant messages gone, results behind their calls and in their order.

    `stand_in` is written where an image is; without one, images are refused.

    Raises RequestError; with `strict_tool_messages` also for results and calls that do not match each other.
    """
    if body.get("messages") is None:
        raise bad("messages is missing", "messages", "missing_required_parameter")
    messages = array_at(body["messages"], "messages")
    if not messages:
        raise bad("messages must not be empty", "messages", "empty_array")
    turns: list[Turn] = []
    places: list[int] = []  # of the turns in `messages`
    latest: dict[str, str] = {}  # id of the latest call of each tool
    for i, entry in enumerate(messages):
        param = f"messages.{i}"
        turn = _parse_message(object_at(entry, param), param, i == len(messages) - 1, latest, exact, stand_in)
        if turn is not None:
            turns.append(turn)
            places.append(i)
            latest |= {call.name: call.id for call in turn.calls}
    if strict_tool_messages:
        _require_results(turns, places)
    return order_results(turns)


def _parse_message(
    message: Mapping[str, Any], param: str, last: bool, latest: dict[str, str], exact: ExactIntegers, stand_in: str | None
) -> Turn | None:
    role = message.get("role")
    task = message.get("task")
    if task is not None and (role != "user" or not last or task not in TASKS):
        raise bad(f"task must be one of {', '.join(TASKS)}, on a last message of role user", f"{param}.task", "unsupported_value")
    prefix = message.get("prefix")
    if prefix is not None and boolean_at(prefix, f"{param}.prefix") and not (last and role == "assistant"):
        raise bad("prefix is only for a last message of role assistant", f"{param}.prefix")
    if role in ("system", "developer"):
        content = _content(message, param, stand_in)
        return Turn("system", content.text, images=content.images) if content.text else None
    if role == "user":
        content = _content(message, param, stand_in)
        return Turn("user", content.text, task=task, images=content.images)
    if role == "latest_reminder":
        return Turn("latest_reminder", _content(message, param, stand_in).text)
    if role == "tool":
        call_id = string_at(message.get("tool_call_id"), f"{param}.tool_call_id")
        content = _content(message, param, stand_in)
        return Turn("tool", content.text, call_id=call_id, images=content.images)
    if role == "function":
        name = string_at(message.get("name"), f"{param}.name")
        content = _content(message, param, stand_in)
        return Turn("tool", content.text, call_id=latest.get(name), images=content.images)
    if role == "assistant":
        return _parse_assistant(message, param, last, exact, stand_in)
    known = "system, developer, user, assistant, tool, function or latest_reminder"
    raise bad(f"{param}.role must be {known}, got {shown(role)}", f"{param}.role")


def _parse_assistant(message: Mapping[str, Any], param: str, last: bool, exact: ExactIntegers, stand_in: str | None) -> Turn | None:
    calls = _parse_calls(message, param, exact)
    content, reasoning = "", ""
    given = message.get("content")
    if given is not None:
        said = _content(message, param, stand_in)
        content, reasoning = said.text, said.reasoning
    elif message.get("refusal") is not None:
        content = string_at(message["refusal"], f"{param}.refusal")
    for name in ("reasoning_content", "reasoning"):
        if message.get(name) is not None:
            reasoning = string_at(message[name], f"{param}.{name}")
            break
    else:
        if message.get("reasoning_details") is not None:
            details = array_at(message["reasoning_details"], f"{param}.reasoning_details")
            texts = [entry.get("text") for entry in details if isinstance(entry, Mapping)]
            reasoning = "".join(string_at(text, f"{param}.reasoning_details") for text in texts if text is not None) or reasoning
    if given is None and not (content or reasoning or calls):
        if last:
            raise bad("invalid assistant message: content or tool_calls must be set", f"{param}.content")
        return None  # an aborted turn of an agent's history
    return Turn("assistant", content, reasoning, calls, prefix=bool(message.get("prefix")))


def _parse_calls(message: Mapping[str, Any], param: str, exact: ExactIntegers) -> tuple[recipe.ToolCall, ...]:
    calls: list[recipe.ToolCall] = []
    if message.get("tool_calls") is not None:
        for i, entry in enumerate(array_at(message["tool_calls"], f"{param}.tool_calls")):
            where = f"{param}.tool_calls.{i}"
            call = object_at(entry, where)
            call_id = string_at(call.get("id"), f"{where}.id")
            if call.get("type") == "custom":
                custom = object_at(call.get("custom"), f"{where}.custom")
                arguments = json.dumps({"input": string_at(custom.get("input"), f"{where}.custom.input")}, ensure_ascii=False)
                calls.append(recipe.ToolCall(call_id, _call_name(custom, f"{where}.custom"), arguments))
                continue
            function = object_at(call.get("function"), f"{where}.function")
            arguments = _arguments(function.get("arguments"), f"{where}.function.arguments", exact)
            calls.append(recipe.ToolCall(call_id, _call_name(function, f"{where}.function"), arguments))
    elif message.get("function_call") is not None:
        where = f"{param}.function_call"
        function = object_at(message["function_call"], where)
        arguments = _arguments(function.get("arguments"), f"{where}.arguments", exact)
        calls.append(recipe.ToolCall(where, _call_name(function, where), arguments))
    return tuple(calls)


def _call_name(function: Mapping[str, Any], param: str) -> str:
    name = string_at(function.get("name"), f"{param}.name")
    if not name:
        raise bad(f"{param}.name must not be empty", f"{param}.name", "empty_string")
    return name


def _arguments(value: Any, param: str, exact: ExactIntegers) -> str:
    """JSON text of a call's arguments: an object encoded twice is decoded once, integers beyond 64 bits travel as stand-ins.

    What is in a string passed the limits of the body as one value, so its own values are counted here.
    """
    if value is None:
        return "{}"
    if isinstance(value, Mapping):
        return json.dumps(json_at(value, param, exact), ensure_ascii=False)
    text = string_at(value, param)
    if text.lstrip().startswith('"') and isinstance(inner := _loads(text), str):
        _require_few(inner, param)
        if isinstance(_loads(inner), dict):
            text = string_at(inner, param)
    else:
        _require_few(text, param)
    if re.search(r"\d{19}", text) and isinstance(parsed := _loads(text), dict):
        try:
            return json.dumps(json_at(parsed, param, exact), ensure_ascii=False)
        except RequestError:  # not JSON the library can take; it writes such arguments as they are
            return text
    return text


def _require_few(text: str, param: str) -> None:
    if too_many_values(text):
        raise bad(f"{param} holds too many values: at most {MAX_VALUES:,}", param)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _content(message: Mapping[str, Any], param: str, stand_in: str | None) -> _Content:
    """A message's content; parts are joined with a blank line."""
    value = message.get("content")
    where = f"{param}.content"
    if isinstance(value, str):
        return _Content(string_at(value, where))
    if not isinstance(value, (list, tuple)):
        raise bad(f"{where} must be a string or an array of parts, got {kind_of(value)}", where, "invalid_type")
    texts: list[str] = []
    thoughts: list[str] = []
    images: list[str] = []
    for i, entry in enumerate(value):
        part = object_at(entry, f"{where}.{i}")
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text"):
            texts.append(string_at(part.get("text"), f"{where}.{i}.text"))
        elif kind == "refusal":
            texts.append(string_at(part.get("refusal"), f"{where}.{i}.refusal"))
        elif kind == "thinking" and message.get("role") == "assistant":
            thoughts.append(string_at(part.get("thinking"), f"{where}.{i}.thinking"))
        elif is_image(part):
            texts.append(_stand_in(message, part, f"{where}.{i}", stand_in))
            images.append(f"{where}.{i}")
        elif kind in FILE_PARTS:
            texts.append(_file_text(part, f"{where}.{i}"))
        else:
            raise bad(f"content parts of type {shown(kind)} are not supported", f"{where}.{i}.type", "unsupported_value")
    return _Content("\n\n".join(texts), "\n\n".join(thoughts), tuple(images))


def _stand_in(message: Mapping[str, Any], part: Mapping[str, Any], param: str, stand_in: str | None) -> str:
    """What is written for an image, which is not for every message to have (spec/vision.md §6)."""
    if stand_in is None:
        place = {"file": f"{param}.file.file_data", "input_file": f"{param}.file_data"}.get(part["type"], param)
        raise bad(PICTURES, place, "unsupported_value")
    if message.get("role") in ("assistant", "latest_reminder"):
        text = f"Image in {message['role']} message is not supported; send it in a user message or a tool result"
        raise bad(text, param, "invalid_value")
    return stand_in


def _file_text(part: Mapping[str, Any], param: str) -> str:
    """Text of a file given as a data URL, in chat's or in Responses' spelling of the part."""
    if part.get("type") == "file":
        param = f"{param}.file"
        part = object_at(part.get("file"), param)
    for name in ("file_id", "file_url"):
        if part.get("file_data") is None and part.get(name) is not None:
            raise bad(f"{param}.{name}: files are neither kept nor fetched here; send file_data", f"{param}.{name}", "unsupported_value")
    url = string_at(part.get("file_data"), f"{param}.file_data")
    found = re.match(r"data:([\w.+-]+/[\w.+-]+)?((?:;[^;,]*)*),", url)
    if found is None or not (found[1] or "text/plain").startswith("text/"):
        raise bad("only text files are supported, as data:text/…;base64 URLs", f"{param}.file_data", "unsupported_value")
    if url.count("%") > MAX_ESCAPES:
        text = f"{param}.file_data has more than {MAX_ESCAPES:,} percent escapes; send it as base64"
        raise bad(text, f"{param}.file_data")
    try:
        data = unquote_to_bytes(url[found.end():])
        return (base64.b64decode(data) if found[2].endswith(";base64") else data).decode("utf-8")
    except ValueError as error:
        raise bad(f"{param}.file_data is not UTF-8 text: {error}"[:200], f"{param}.file_data") from None


def _require_results(turns: list[Turn], places: list[int]) -> None:
    """Refuse what `order_results` would mend. `places` are the numbers of the messages that the turns were made from."""
    caller = 0  # message of the latest calls
    missing: list[str] = []
    answered: set[str | None] | None = None  # None where no result may stand
    for turn, place in [*zip(turns, places, strict=True), (None, 0)]:
        if turn is not None and turn.role == "tool":
            param = f"messages.{place}"
            if answered is None:
                text = f"{param}: messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
                raise bad(text, param, "invalid_message_sequence")
            if turn.call_id in missing:
                missing.remove(turn.call_id)
            elif turn.call_id in answered:
                raise bad(f"{param}: duplicate value for 'tool_call_id' of {shown(turn.call_id)}", param, "invalid_message_sequence")
            else:
                text = f"{param}: 'tool_call_id' {shown(turn.call_id)} is not the id of a call in messages.{caller}"
                raise bad(text, param, "invalid_message_sequence")
            answered.add(turn.call_id)
            continue
        if missing:
            param = f"messages.{caller}"
            text = (
                f"{param}: an assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
                f"The following tool_call_ids did not have response messages: {', '.join(missing)[:200]}"
            )
            raise bad(text, param, "invalid_message_sequence")
        answered = None
        if turn is not None and turn.calls:
            caller, missing, answered = place, [call.id for call in turn.calls], set()


def order_results(turns: list[Turn]) -> list[Turn]:
    """Put the results after each assistant turn into the order of its calls.

    A call without a result gets an empty one, of two results of one call the last counts. Results of unknown calls and all other messages
    keep their places.
    """
    ordered: list[Turn] = []
    start = 0
    while start < len(turns):
        end = start + 1
        while end < len(turns) and turns[end].role != "assistant":
            end += 1
        head, rest = turns[start], turns[start + 1 : end]
        ordered += [head, *_answers(head.calls, rest)] if head.calls else [head, *rest]
        start = end
    return ordered


def _answers(calls: tuple[recipe.ToolCall, ...], rest: list[Turn]) -> list[Turn]:
    numbers: dict[str | None, list[int]] = {}  # calls by id; an id may be used twice
    for number, call in enumerate(calls):
        numbers.setdefault(call.id, []).append(number)
    results: dict[int, Turn] = {}
    slots: list[int] = []  # places in `rest` of results whose call is known
    for place, turn in enumerate(rest):
        if turn.role == "tool" and turn.call_id in numbers:
            queue = numbers[turn.call_id]
            results[queue.pop(0) if len(queue) > 1 else queue[0]] = turn
            slots.append(place)
    # As many slots as calls: surplus ones vanish, missing ones follow the last.
    answers: dict[int, list[Turn]] = {place: [] for place in slots}
    leading: list[Turn] = []
    for number in range(len(calls)):
        target = answers[slots[min(number, len(slots) - 1)]] if slots else leading
        target.append(results.get(number, Turn("tool")))
    return leading + [turn for place, other in enumerate(rest) for turn in answers.get(place, [other])]
