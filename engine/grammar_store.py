"""Keeps what was built of grammars, by weight: one tenant's cannot drive out all of another's."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from forebay.model.errors import RequestError

T = TypeVar("T")

LEAST_WEIGHT = 64 << 10  # bytes, of even the smallest entry: bounds their number


@dataclass(frozen=True)
class Refusal:
    """Why a grammar cannot be used. An exception itself would keep the frames that it went through, with the bodies of requests in them."""

    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: RequestError) -> Refusal:
        return cls(error.message, error.param, error.code)

    def error(self) -> RequestError:
        return RequestError(self.message, param=self.param, code=self.code)


@dataclass
class _Entry(Generic[T]):
    value: T
    weight: int
    owner: str
    until: float | None


class WeighedStore(Generic[T]):
    """The latest entries that weigh `most` bytes together. Not for several threads at once.

    Where room is needed, the owner whose entries weigh most loses the one it has not used for longest.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._entries: dict[bytes, _Entry[T]] = {}
        self._owned: dict[str, OrderedDict[bytes, int]] = {}  # weights, the latest last
        self._sums: dict[str, int] = {}
        self.weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> T | None:
        """An entry that has not expired, which is then the latest of its owner."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.until is not None and self._clock() >= entry.until:
            self.drop(key)
            return None
        self._owned[entry.owner].move_to_end(key)
        return entry.value

    def put(self, key: bytes, value: T, weight: int, owner: str, seconds: float | None = None) -> None:
        """Keep `value`, which weighs `weight` bytes, for `owner`; after `seconds` it is forgotten."""
        self.drop(key)
        weight = max(weight, LEAST_WEIGHT)
        self._entries[key] = _Entry(value, weight, owner, None if seconds is None else self._clock() + seconds)
        self._owned.setdefault(owner, OrderedDict())[key] = weight
        self._sums[owner] = self._sums.get(owner, 0) + weight
        self.weight += weight
        while self.weight > self.most:
            heaviest = max(self._sums, key=self._sums.__getitem__)
            self.drop(next(iter(self._owned[heaviest])))

    def drop(self, key: bytes) -> None:
        """Forget an entry, if there is one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        owned = self._owned[entry.owner]
        del owned[key]
        self._sums[entry.owner] -= entry.weight
        self.weight -= entry.weight
        if not owned:
            del self._owned[entry.owner], self._sums[entry.owner]
