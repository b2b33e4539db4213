"""Instruments with their names, their labels and their zeros: what metrics.py and tier_metrics.py are made of."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OTHER = "other"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}", re.ASCII)

Family = TypeVar("Family", Counter, Gauge, Histogram)


class Instruments:
    """Makes the instruments of one registry; `forebay_` goes before every name, and prometheus_client adds `_total` to counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"forebay_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"forebay_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"forebay_{name}", text, labels, buckets=buckets, registry=self._registry)


def each(family: Family, values: Iterable[str], *before: str) -> dict[str, Family]:
    """The children of a family by its last label, all created now; `before` are the values of the labels ahead of it."""
    return {value: family.labels(*before, value) for value in values}


class Bounded:
    """A counter by one label whose values come from outside. `learn` names beyond the known ones get a series; the rest are "other"."""

    def __init__(self, counter: Counter, known: Iterable[str], learn: int = 0) -> None:
        self._counter = counter
        self._children = each(counter, (*known, OTHER))
        self._room = learn
        self._lock = threading.Lock()

    def inc(self, value: str, by: int = 1) -> None:
        child = self._children.get(value)
        if child is None:
            child = self._learn(value)
        child.inc(by)

    def _learn(self, value: str) -> Counter:
        with self._lock:
            if value not in self._children and self._room > 0 and _NAME.fullmatch(value):
                self._room -= 1
                self._children[value] = self._counter.labels(value)
        return self._children.get(value, self._children[OTHER])


class Totals:
    """Counters that follow totals kept elsewhere. A total below its last value has begun again at zero; the counters never fall."""

    def __init__(self, children: Mapping[str, Counter]) -> None:
        self._children = children
        self._last: dict[str, float] = {}

    def follow(self, totals: Mapping[str, float]) -> None:
        """Add what each total has grown by. A name without a counter of its own goes to "other", which must exist if there can be any."""
        for name, total in totals.items():
            last = self._last.get(name, 0.0)
            self._last[name] = total
            (self._children.get(name) or self._children[OTHER]).inc(max(0.0, total - last if total >= last else total))


def ratio(used: float, total: float) -> float:
    """`used / total` between 0 and 1; 0 of nothing is 0."""
    return min(1.0, max(0.0, used / total)) if total > 0 else 0.0
