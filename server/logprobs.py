"""Log-probability entries of a choice, each with the text it stands for (spec/http-api.md §4.3).

An entry is given out with the text that its token became. So held-back text (a stop string that may still match, half a character) holds
its entries back too, and tokens that the parser consumed (markers, tags, a matched stop string) never get one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from forebay.engine.types import TokenLogprob
from forebay.model.chat import Delta
from forebay.model.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for minus infinity, which is not JSON

Entry = dict[str, Any]


class LogprobFeed:
    """Pairs the tokens of one choice with the text deltas they became. Only reasoning and content have entries."""

    def __init__(self, tokenizer: Tokenizer, *, ids_as_text: bool = False, in_reasoning: bool = False) -> None:
        """With `ids_as_text`, an entry's `token` is `token_id:N` instead of the token's text; `in_reasoning`: the answer begins there."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._markers = {tokenizer.think_start_id, tokenizer.think_end_id, tokenizer.dsml_id}
        self._in_reasoning = in_reasoning
        self._ids_as_text = ids_as_text
        self._waiting: deque[tuple[TokenLogprob, str]] = deque()  # a token and the text it added to all text so far
        self._rest = ""  # what the last token given out has yet to show

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Tokens of a step, in order; they wait for their text."""
        for token_id, logprob in zip(token_ids, logprobs or (), strict=False):
            if token_id in self._tokenizer.stop_ids:
                continue
            if token_id in self._markers:
                if self._waiting and (tail := self._detokenizer.flush()):
                    self._waiting[-1] = (self._waiting[-1][0], self._waiting[-1][1] + tail)
                # These never become text, and what they spell could be taken for the beginning of what follows.
                silent = token_id == self._tokenizer.think_end_id or (token_id == self._tokenizer.think_start_id and self._in_reasoning)
                self._in_reasoning &= token_id != self._tokenizer.think_end_id
                if not silent:
                    self._waiting.append((logprob, self._tokenizer.token_text(token_id)))
            else:
                self._waiting.append((logprob, self._detokenizer.push(token_id)))

    def take(self, delta: Delta) -> list[Entry]:
        """Entries of the tokens whose text begins in `delta`. Deltas come in the order in which they were produced."""
        if delta.channel == "tool_calls":
            self._waiting.clear()
            self._rest = ""
            return []
        text = self._show_rest(delta.text)
        entries: list[Entry] = []
        while text and self._waiting:
            logprob, piece = self._waiting.popleft()
            if not _begins(text, piece):
                piece = piece.lstrip("\n")  # the parser drops newlines at the start of a channel
                if not piece or not _begins(text, piece):
                    continue
            # A token without text holds the first bytes of a character and goes out with the token that completes it.
            entries.append(self._entry(logprob))
            text, self._rest = text[len(piece) :], piece[len(text) :]
        return entries

    def _show_rest(self, text: str) -> str:
        """What of `text` follows the token given out last."""
        rest = self._rest
        if not _begins(text, rest):
            rest = ""
        self._rest = rest[len(text) :]
        return text[len(rest) :]

    def _entry(self, logprob: TokenLogprob) -> Entry:
        top = [self._alternative(token_id, value) for token_id, value in logprob.top]
        return {**self._alternative(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _alternative(self, token_id: int, value: float) -> Entry:
        data = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._ids_as_text else data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(value, FLOOR), "bytes": list(data)}


def prompt_entries(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenLogprob | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first, by id, the token itself and its alternatives.

    `rank` counts from 1 and is null for a token that is not among the alternatives asked for.
    """
    told: list[dict[str, dict[str, Any]] | None] = []
    for token_id, score in zip(ids, scores, strict=True):
        if score is None:
            told.append(None)
            continue
        ranked: dict[int, tuple[float, int | None]] = {token_id: (score.logprob, None)}
        ranked |= {other: (value, rank) for rank, (other, value) in enumerate(score.top, 1)}
        told.append(
            {
                str(other): {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": tokenizer.token_text(other)}
                for other, (value, rank) in ranked.items()
            }
        )
    return told


def _begins(text: str, piece: str) -> bool:
    """Whether one of the two begins with the other."""
    return text.startswith(piece) or piece.startswith(text)
