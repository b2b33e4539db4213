"""How much a JSON text may hold before it is parsed: a value costs tens of bytes once parsed, whatever it cost to send."""

from __future__ import annotations

import re

MAX_VALUES = 1_000_000
# Possessive, and a string may end with the text: every byte is looked at once, also in a string that is never closed.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'

_STRINGS = re.compile(STRING, re.DOTALL)


def too_many_values(text: str | bytes) -> bool:
    """Whether a JSON text holds more than `MAX_VALUES` values; none of it is parsed."""
    if len(text) <= MAX_VALUES:
        return False
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return _separators(data) > MAX_VALUES and _separators(_STRINGS.sub(b"", data)) > MAX_VALUES


def _separators(data: bytes) -> int:
    """No fewer than the values in `data`, but for the first; more where its strings hold such characters."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")
