"""From sampled ids to what a client sees: text, channels, stop strings and the reason a choice ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from forebay.engine.types import FinishReason
from forebay.model.chat import Delta, OutputParser
from forebay.model.tokenizer import Tokenizer

PIECES = 256  # of text that are kept apart


class StopMatcher:
    """Finds the first stop string in growing text and holds back what may be the beginning of one.

    Reads character by character (one Knuth-Morris-Pratt automaton for each stop), so how the text was cut does not matter. First is the
    stop that is complete first; of several complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text now certain, the stop string that follows it or None). After a match the matcher is spent."""
        if not self._held and self._first.isdisjoint(text):
            return text, None
        seen = self._held + text
        active = bool(self._held)
        for place, char in enumerate(text, len(self._held)):
            if not active and char not in self._first:
                continue
            hit = ""
            for k, stop in enumerate(self._stops):
                matched = self._matched[k]
                while matched and stop[matched] != char:
                    matched = self._failure[k][matched - 1]
                if stop[matched] == char:
                    matched += 1
                self._matched[k] = matched
                if matched == len(stop) > len(hit):
                    hit = stop
            if hit:
                self._held = ""
                return seen[: place + 1 - len(hit)], hit
            active = any(self._matched)
        keep = len(seen) - max(self._matched)
        self._held = seen[keep:]
        return seen[:keep], None

    def flush(self) -> str:
        """What was held back; the text ends, or goes on elsewhere."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table


class OutputProcessor:
    """The output side of one choice.

    Push every sampled id until `finished` is set or the engine ends the choice, then, in the second case, call `finish` once. Stop strings
    apply to answer content only. With a parser the channels are those of a chat turn; without one all text is content.

    Attributes:
        finished: "stop" once a stop id or a stop string ended the choice.
        finish_reason: the word for the client, None until the end.
        matched_stop: the stop string or stop id that ended the choice; None for the end-of-sentence id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        stop_token_ids: frozenset[int],
        *,
        parser: OutputParser | None,
        include_stop: bool = False,
    ) -> None:
        """`include_stop` leaves a matched stop string in the text; a stop id never becomes text."""
        self._stop_ids = stop_token_ids
        self._eos_id = tokenizer.eos_id
        self._parser = parser
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stop) if any(stop) else None
        self._include_stop = include_stop
        self._content: list[str] = []  # joined from time to time: a piece for each token would be ten times its text
        self._pieces: list[str] = []
        self.finished: Literal["stop"] | None = None
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | int | None = None

    @property
    def text(self) -> str:
        """All content given out so far."""
        return "".join(self._content + self._pieces)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, without the marker that ends it."""
        return self._parser.reasoning_tokens if self._parser else 0

    def push(self, token_id: int) -> list[Delta]:
        """Add a sampled id; gives the output that became certain by it. After the end it gives nothing."""
        if self.finish_reason is not None:
            return []
        if token_id in self._stop_ids:
            self.finished = "stop"
            if token_id != self._eos_id:
                self.matched_stop = token_id
            return self.finish("stop")
        if self._parser is not None:
            return self._until_stop(self._parser.push(token_id))[0]
        text = self._detokenizer.push(token_id)
        return self._until_stop([Delta("content", text)])[0] if text else []

    def finish(self, reason: FinishReason) -> list[Delta]:
        """End the choice for `reason` ("stop", "length", "abort" or "error") and give what was held back. A second call gives nothing."""
        if self.finish_reason is not None:
            return []
        if self._parser is not None:
            deltas = self._parser.finish(reason)
        else:
            tail = self._detokenizer.flush()
            deltas = [Delta("content", tail)] if tail else []
        deltas, stopped = self._until_stop(deltas)
        if stopped:  # what was held back completed a stop string
            return deltas
        self._release(deltas)
        self.finish_reason = cast(FinishReason, self._parser.finish_reason(reason)) if self._parser is not None else reason
        return deltas

    def _until_stop(self, deltas: list[Delta]) -> tuple[list[Delta], bool]:
        """(deltas up to the first stop string, whether there is one); a stop string ends the choice."""
        if self._matcher is None:
            for delta in deltas:
                if delta.channel == "content":
                    self._keep(delta.text)
            return deltas, False
        out: list[Delta] = []
        for delta in deltas:
            if delta.channel != "content":
                self._release(out)
                out.append(delta)
                continue
            text, hit = self._matcher.feed(delta.text)
            if hit is not None and self._include_stop:
                text += hit
            self._give(out, text)
            if hit is not None:
                self.finished = "stop"
                self.finish_reason = "stop"
                self.matched_stop = hit
                return out, True
        return out, False

    def _release(self, out: list[Delta]) -> None:
        """Give out content that was held back for a stop string."""
        if self._matcher is not None:
            self._give(out, self._matcher.flush())

    def _give(self, out: list[Delta], text: str) -> None:
        if text:
            self._keep(text)
            out.append(Delta("content", text))

    def _keep(self, text: str) -> None:
        self._pieces.append(text)
        if len(self._pieces) == PIECES:
            self._content.append("".join(self._pieces))
            self._pieces.clear()
