"""`forebay config`: every setting, its value and where it came from."""

from __future__ import annotations

import argparse
from typing import Any, get_args

import annotated_types
from pydantic.fields import FieldInfo

from forebay.server import config as settings
from forebay.server.cli import read_settings


def run(args: argparse.Namespace) -> int:
    """Print the effective settings as YAML, or with `--describe` what each of them means."""
    config, origins = read_settings(args)
    if args.describe:
        print("\n".join(_describe(key, info) for key, info in settings.fields()))
    else:
        print(settings.to_yaml(config, origins), end="")
    return 0


def _describe(key: str, info: FieldInfo) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    notes = ", ".join(str(note) for note in (_range(info), extra.get("unit")) if note)
    head = f"{key} ({notes})" if notes else key
    return f"{head}\n    {info.description}; default {_plain(info.default)}"


def _range(info: FieldInfo) -> str:
    """`1 to 65535`, `above 0`, `cpu or cuda`; empty where any value goes."""
    if words := [str(word) for word in get_args(info.annotation) if isinstance(word, str)]:
        return " or ".join(words)
    low = next((f"{m.ge:.16g}" for m in info.metadata if isinstance(m, annotated_types.Ge)), None)
    above = next((f"above {m.gt:.16g}" for m in info.metadata if isinstance(m, annotated_types.Gt)), None)
    high = next((f"{m.le:.16g}" for m in info.metadata if isinstance(m, annotated_types.Le)), None)
    if high is None:
        return above or (f"at least {low}" if low else "")
    return f"{above or low} to {high}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == ():
        return "none"
    return str(value)
