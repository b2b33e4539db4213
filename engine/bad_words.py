"""Words of several tokens that may not be written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_TOKENS = 16_384  # of all bad words of a request together: bounds the work of a step


class BadWords:
    """What would complete one of some sequences of tokens.

    A sequence counts as written when the output holds all of its tokens in a row, so its last one is banned behind the others. Text that
    other tokens spell is not found, nor a beginning in the prompt.

    Attributes:
        now: the ids that may not come next, each once, in order.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: sequences of at least one token."""
        self._behind: dict[int | None, list[tuple[list[int], int]]] = {}  # by the token before the last: those before, and the last
        for *before, last in dict.fromkeys(tuple(word) for word in words):
            self._behind.setdefault(before[-1] if before else None, []).append((before, last))
        self._tail: deque[int] = deque(maxlen=max(map(len, words), default=1) - 1)
        self.now = self._banned(None)

    def observe(self, token: int) -> None:
        """The output goes on with this token."""
        self._tail.append(token)
        self.now = self._banned(token)

    def _banned(self, token: int | None) -> list[int]:
        found = {last for _, last in self._behind.get(None, ())}
        if token is not None and (after := self._behind.get(token)):
            tail = list(self._tail)
            found |= {last for before, last in after if tail[-len(before) :] == before}
        return sorted(found)
