"""When the chunks of a stream go out, for clients that want fewer: every k tokens, or reasoning in one piece."""

from __future__ import annotations

from dataclasses import replace

from forebay.engine.types import OutputEvent, TokenLogprob
from forebay.model.chat import Delta


class Pacer:
    """Joins the events of one choice. The first event and the last are never held back by the interval."""

    def __init__(self, interval: int, *, whole_reasoning: bool) -> None:
        """`interval`: tokens from one event to the next. `whole_reasoning`: nothing before the reasoning is over."""
        self._interval = interval
        self._whole_reasoning = whole_reasoning
        self._began = False
        self._deltas: list[Delta] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, event: OutputEvent) -> OutputEvent | None:
        """The event to send now: all that came since the last one; None to wait."""
        if self._whole_reasoning and any(delta.channel != "reasoning" for delta in event.deltas):
            self._whole_reasoning = False
            self._began = False  # what was held goes out now
        self._deltas += event.deltas
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs or ()
        early = self._whole_reasoning or (self._began and len(self._token_ids) < self._interval)
        if early and event.finish_reason is None:
            return None
        self._began = True
        logprobs = None if event.logprobs is None else self._logprobs
        joined = replace(event, deltas=self._deltas, token_ids=self._token_ids, logprobs=logprobs)
        self._deltas, self._token_ids, self._logprobs = [], [], []
        return joined
