"""`forebay keys`: make API keys and list them."""

from __future__ import annotations

import argparse
import fcntl
import os
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from forebay.model.errors import ConfigError
from forebay.server.access import Key, hashed, new_key, parse_file
from forebay.server.cli import read_settings

_FIELDS = ("tenant", "requests_per_minute", "tokens_per_minute", "concurrency", "priority", "cache_salt")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError: no file named, a file that is wrong, a name that is taken or a limit out of range."""
    file = args.file or read_settings(args)[0].server.api_keys_file
    if file is None:
        raise ConfigError("keys: which file? Name it with --file, or in the setting server.api_keys_file")
    if args.action == "list":
        print("\n".join(_line(key) for key in parse_file(file.read_text("utf-8"), str(file))))
        return 0
    key = new_key()
    fields: dict[str, Any] = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    if args.admin:
        fields["admin"] = True
    known = parse_file(file.read_text("utf-8"), str(file)) if file.exists() else []
    salt = bytes.fromhex(known[-1].hash.partition(":")[0]) if known else None  # one for all: a server hashes each key it is shown once
    try:
        entry = Key(name=args.name, hash=hashed(key.encode(), salt), **fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = f"{first['msg'][:1].lower()}{first['msg'][1:]}, got {first['input']!r}"
        raise ConfigError(f"keys add: {'.'.join(str(part) for part in first['loc'])}: {text}") from None
    append(file, entry)
    print(key)
    return 0


def append(file: Path, entry: Key) -> None:
    """Add a line to the file, which is made if need be, for its owner only. Raises ConfigError if the name is taken."""
    with os.fdopen(os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # two that are added at once
        text = opened.read()
        if any(key.name == entry.name for key in parse_file(text, str(file))):
            raise ConfigError(f"keys add: {file} has a key {entry.name!r} already; delete its line first, or choose another name")
        line = orjson.dumps(entry.model_dump(exclude_defaults=True)).decode()
        opened.write(f"{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")
        opened.flush()
        os.fsync(opened.fileno())


def _line(key: Key) -> str:
    given = key.model_dump(exclude_defaults=True, exclude={"name", "hash"})
    return " ".join([key.name, *(f"{name}={value}" for name, value in given.items())])
