"""Refusals of fields: one sentence that names the field's path, its rule and what was sent, with OpenAI's codes; and checked values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import ErrorDetails

from forebay.model.errors import RequestError
from forebay.server.body import json_type

Salt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]  # of the cache: part of the key of its blocks


def bad(path: str, message: str, code: str) -> RequestError:
    """A refusal with a sentence of its own."""
    return RequestError(message, param=path, code=code)


def invalid(path: str, rule: str) -> RequestError:
    """A value that breaks `rule`."""
    return bad(path, f"Invalid '{path}': {rule}.", "invalid_value")


def unsupported(name: str, why: str) -> RequestError:
    """A field whose silent loss would change the answer."""
    return bad(name, f"Unsupported parameter: '{name}' is not offered by this server ({why}).", "unsupported_parameter")


def missing(path: str) -> RequestError:
    """A field without which the request means nothing."""
    return bad(path, f"Missing required parameter: '{path}'.", "missing_required_parameter")


def wrong_type(path: str, expected: str, value: Any) -> RequestError:
    """A value of another JSON type than `expected`, which has its article."""
    return bad(path, f"Invalid type for '{path}': expected {expected}, but got {json_type(value)} instead.", "invalid_type")


def empty(path: str) -> RequestError:
    """An array that must have items."""
    return bad(path, f"Invalid '{path}': empty array. Expected at least one item.", "empty_array")


def too_many(path: str, limit: int, count: int) -> RequestError:
    """An array or object with more than `limit` items."""
    return bad(path, f"Invalid '{path}': expected at most {limit} items, got {count}.", "array_above_max_length")


def string_at(value: Any, path: str) -> str:
    """A string. Raises RequestError: missing, another type."""
    if value is None:
        raise missing(path)
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    return value


def object_at(value: Any, path: str) -> dict[str, Any]:
    """An object. Raises RequestError: missing, another type."""
    if value is None:
        raise missing(path)
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def array_at(value: Any, path: str, limit: int | None = None, expected: str = "an array") -> list[Any]:
    """An array of at most `limit` items. Raises RequestError: missing, another type (`expected` says what else it could be), too many."""
    if value is None:
        raise missing(path)
    if not isinstance(value, list):
        raise wrong_type(path, expected, value)
    if limit is not None and len(value) > limit:
        raise too_many(path, limit, len(value))
    return value


def boolean_at(value: Any, path: str) -> bool:
    """A boolean. Raises RequestError: missing, another type."""
    if value is None:
        raise missing(path)
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def short(value: Any) -> str:
    """A value for an error message, at most 48 characters."""
    text = repr(value)
    return text if len(text) <= 48 else f"{text[:44]}…{text[-1] if isinstance(value, str) else ''}"


_EXPECTED = {
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


_BOUND = {"greater_than_equal": "of at least", "greater_than": "above", "less_than_equal": "of at most", "less_than": "below"}


def refusal(error: ErrorDetails, own: Iterable[str] = ()) -> RequestError:
    """The RequestError of one pydantic error; `own` are the names that `forebay` takes."""
    kind, loc, value, context = error["type"], error["loc"], error["input"], error.get("ctx", {})
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)[1:]
    if kind == "missing":
        return missing(path)
    if kind == "extra_forbidden":  # only of `forebay`
        text = f"Unknown parameter: '{path}'. 'forebay' takes {', '.join(own)}."
        return bad(path, text, "unknown_parameter")
    if kind in _EXPECTED:
        return wrong_type(path, _EXPECTED[kind], value)
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        bound = next(iter(context.values()))
        code = f"{'decimal' if isinstance(bound, float) else 'integer'}_{'below_min' if kind.startswith('greater') else 'above_max'}_value"
        limit = f"{_BOUND[kind]} {bound:g}" if isinstance(bound, float) else f"{_BOUND[kind]} {bound}"
        return bad(path, f"Invalid '{path}': expected a value {limit}, got {short(value)}.", code)
    if kind == "finite_number":
        return bad(path, f"Invalid '{path}': expected a finite number, got {short(value)}.", "invalid_value")
    if kind == "too_short":
        return empty(path)
    if kind == "string_too_short":
        return bad(path, f"Invalid '{path}': empty string. Expected at least one character.", "empty_string")
    if kind == "string_too_long":
        text = f"Invalid '{path}': expected at most {context['max_length']} characters, got {len(value)}."
        return bad(path, text, "string_above_max_length")
    if kind == "string_pattern_mismatch":
        return bad(path, f"Invalid '{path}': '@', '/', '\\' and NUL are not allowed, got {short(value)}.", "invalid_value")
    if kind == "literal_error":
        return bad(path, f"Invalid value for '{path}': expected {context['expected']}, got {short(value)}.", "invalid_value")
    return bad(path, f"Invalid '{path}': {error['msg']}.", "invalid_value")
