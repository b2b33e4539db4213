"""Names for `x-forebay-ignored`, the header that tells which fields of a request change nothing: the same rules for every protocol."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from forebay.server.errors import Headers

MAX_NAMED = 20
MAX_NAME = 64
_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-[]")


def ignored(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, the first `MAX_NAMED` of them; then `N more`, among which are names that may not stand in a header."""
    once = dict.fromkeys(names)
    shown = [name for name in once if is_name(name)][:MAX_NAMED]
    more = len(once) - len(shown)
    return (*shown, f"{more} more") if more else tuple(shown)


def unread(value: Any, path: str, read: Collection[str]) -> list[str]:
    """Paths of what an object holds beside the names that are read; none for anything else than an object."""
    if not isinstance(value, Mapping):
        return []
    return [f"{path}.{name}" for name, inner in value.items() if name not in read and inner is not None]


def header(names: tuple[str, ...]) -> Headers:
    """The header, if there is something to tell. `names` come from `ignored`."""
    return [(b"x-forebay-ignored", ", ".join(names).encode("ascii"))] if names else []


def is_name(name: str) -> bool:
    """Whether the client's own text may stand in a response header."""
    return 0 < len(name) <= MAX_NAME and _CHARACTERS.issuperset(name)
