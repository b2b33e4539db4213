"""Single values of a `config.json`, checked against the type of the field they are for."""

from __future__ import annotations

from typing import Any

from forebay.model.errors import ConfigError

MAX_NUMBER = 1e38  # of a float setting: it is used in fp32


def coerce(name: str, value: Any, kind: str, where: str) -> Any:
    """The value as the type annotation `kind` has it: tuple of integers, int, float, bool; any other passes through.

    Raises:
        ConfigError: it is of another type; the message has `where` and `name`.
    """
    if kind.startswith("tuple"):
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise ConfigError(f"{where}: {name} must be a list of integers, got {value!r}")
        return tuple(value)
    if kind.startswith("int"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise ConfigError(f"{where}: {name} must be an integer, got {value!r}")
        return int(value)
    if kind.startswith("float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_NUMBER < value < MAX_NUMBER:
            raise ConfigError(f"{where}: {name} must be a finite number, got {value!r}")
        return float(value)
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {name} must be true or false, got {value!r}")
        return value
    return value
