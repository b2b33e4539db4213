"""Chat bodies that hold their conversation as the `input` of /v1/responses, as some agents send them for some models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.model.errors import RequestError
from forebay.server.body import json_type
from forebay.server.field_errors import bad

_MESSAGE = (None, "message")
# type -> (where the text of a call stands, the key that a chat call has for it)
_CALLS = {"function_call": "function", "custom_tool_call": "custom"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def take_input(body: dict[str, Any], limit: int) -> tuple[str, ...]:
    """Replace `input` and `instructions` by `messages`, and Responses' names of what belongs to them by chat's.

    Returns the place in the client's body of each message, such as `input.3`. Raises RequestError: wrong type, an unknown kind of item,
    more than `limit` items.
    """
    given = body.pop("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad("input", f"Invalid type for 'input': expected a string or an array, but got {json_type(given)} instead.", "invalid_type")
    if len(given) > limit:
        raise bad("input", f"Invalid 'input': expected at most {limit} items, got {len(given)}.", "array_above_max_length")
    if not given:
        raise bad("input", "Invalid 'input': empty array. Expected at least one item.", "empty_array")
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    instructions: Any = body.pop("instructions", None)
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        places.append("instructions")
    for i, item in enumerate(given):
        if not isinstance(item, Mapping):
            text = f"Invalid type for 'input[{i}]': expected an object, but got {json_type(item)} instead."
            raise bad(f"input[{i}]", text, "invalid_type")
        message = _message(item, f"input[{i}]", messages[-1] if messages else {})
        if message is not None:
            messages.append(message)
            places.append(f"input.{i}")
    body["messages"] = messages
    if "max_output_tokens" in body:
        body.setdefault("max_completion_tokens", body.pop("max_output_tokens"))
    told = body.get("text")
    if isinstance(told, dict) and isinstance(style := told.get("format"), dict) and "response_format" not in body:
        if not told.keys() - {"format"}:
            del body["text"]  # the rest of it is named as ignored
        flat = {name: value for name, value in style.items() if name != "type"}
        body["response_format"] = {"type": style.get("type"), "json_schema": flat} if style.get("type") == "json_schema" else style
    return tuple(places)


def _message(item: Mapping[str, Any], path: str, last: dict[str, Any]) -> dict[str, Any] | None:
    """The chat message of an item; None if it became part of `last`."""
    kind = item.get("type")
    if kind in _MESSAGE:
        fields = {name: value for name, value in item.items() if name not in ("type", "id", "status")}
        if last.get("role") == "assistant" and last.get("content") is None and fields.get("role") == "assistant":
            last.update(fields)  # its reasoning came first
            return None
        return fields
    if kind in _OUTPUTS:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    mine = last.get("role") == "assistant" and isinstance(last.get("tool_calls", []), list)
    opened: dict[str, Any] = last if mine else {"role": "assistant", "content": None}
    if kind in _CALLS:
        name = _CALLS[kind]
        inner = {key: item.get(key) for key in ("name", "arguments" if name == "function" else "input")}
        opened.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": name, name: inner})
    elif kind == "reasoning":
        if opened is last and last.get("content") is not None:  # it belongs to the message that follows
            opened = {"role": "assistant", "content": None}
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        opened["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    else:
        known = ", ".join(["message", *_CALLS, *_OUTPUTS, "reasoning"])
        raise bad(f"{path}.type", f"Invalid value for '{path}.type': expected {known}, got {str(kind)[:40]!r}.", "unsupported_value")
    return None if opened is last else opened


def client_error(error: RequestError, places: tuple[str, ...]) -> RequestError:
    """`error` in terms of the client's body: the path of a message becomes that of the item it was made from."""
    first, _, rest = (error.param or "").partition(".")
    number, _, inner = rest.partition(".")
    if not places or first != "messages":
        return error
    place = "input"
    if number.isdigit() and int(number) < len(places):
        place = places[int(number)] if places[int(number)] == "instructions" or not inner else f"{places[int(number)]}.{inner}"
    text = error.message.replace(error.param or "", place)
    return RequestError(text, param=place, code=error.code)
