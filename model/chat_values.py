"""Checked values of a request body: each has the type the field asks for, or a RequestError names the field as a dotted path."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping
from typing import Any

from forebay.model.errors import RequestError

MAX_DEPTH = 100  # nesting of JSON in schemas; the prompt library stops at 128
MAX_INTEGER_BITS = 4096


def bad(message: str, param: str | None, code: str = "invalid_value") -> RequestError:
    return RequestError(message, param=param, code=code)


class ExactIntegers:
    """Carries integers beyond 64 bits through the prompt library, which would round them: each travels as a stand-in of 19 digits."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._prefix = ""
        self._values: dict[str, str] = {}

    def stand_in(self, value: int) -> int:
        """`value` itself if it fits into 64 bits, otherwise a number that appears nowhere in the request."""
        if -(2**63) <= value < 2**64:
            return value
        if value.bit_length() > MAX_INTEGER_BITS:
            raise bad(f"the request holds an integer of more than {MAX_INTEGER_BITS} bits", None)
        if not self._prefix:
            try:
                text = json.dumps(self._body, ensure_ascii=False, default=str)
            except (ValueError, TypeError, RecursionError) as error:
                raise bad(f"the request is not JSON: {error}"[:200], None) from None
            while not self._prefix or self._prefix in text:
                self._prefix = str(10**11 + secrets.randbelow(8 * 10**11))
        digits = f"{self._prefix}{len(self._values):07d}"
        self._values[digits] = str(value)
        return int(digits)

    def restore(self, text: str) -> str:
        """Put the integers back into rendered text."""
        if not self._values:
            return text
        return re.sub(self._prefix + r"\d{7}", lambda found: self._values.get(found[0], found[0]), text)


def string_at(value: Any, param: str) -> str:
    """A str that has a UTF-8 form."""
    if not isinstance(value, str):
        raise bad(f"{param} must be a string, got {kind_of(value)}", param, "invalid_type")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad(f"{param} is not valid Unicode: lone surrogate at character {error.start}", param) from None
    return value


def kind_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value for an error message: short scalars as they are, anything else by its kind."""
    short = value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() <= 64)
    return repr(value[:40]) if isinstance(value, str) else repr(value) if short else kind_of(value)


def object_at(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise bad(f"{param} must be an object, got {kind_of(value)}", param, "invalid_type")
    return value


def array_at(value: Any, param: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise bad(f"{param} must be an array, got {kind_of(value)}", param, "invalid_type")
    return list(value)


def boolean_at(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise bad(f"{param} must be true or false, got {kind_of(value)}", param, "invalid_type")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    return default if value is None else boolean_at(value, name)


def template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    value = body.get("chat_template_kwargs")
    return {} if value is None else object_at(value, "chat_template_kwargs")


def switch(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """A switch given at the top or in chat_template_kwargs."""
    value = body.get(name)
    if value is not None:
        return boolean_at(value, name)
    value = template_options(body).get(name)
    return default if value is None else boolean_at(value, f"chat_template_kwargs.{name}")


def json_at(value: Any, param: str, exact: ExactIntegers, depth: int = 0) -> Any:
    """A copy of a JSON value that the library can take."""
    if depth > MAX_DEPTH:
        raise bad(f"{param} is nested more than {MAX_DEPTH} levels deep", param)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return string_at(value, param)
    if isinstance(value, int):
        return exact.stand_in(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise bad(f"{param} holds {value}, which is not a JSON number", param)
        return value
    if isinstance(value, Mapping):
        return {string_at(key, param): json_at(item, param, exact, depth + 1) for key, item in value.items()}
    return [json_at(item, param, exact, depth + 1) for item in array_at(value, param)]
