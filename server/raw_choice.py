"""One choice of a completions answer: raw text and, in the legacy layout, its log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forebay.engine.types import OutputEvent, TokenLogprob, Usage
from forebay.model.tokenizer import Tokenizer
from forebay.server.logprobs import FLOOR, prompt_entries

FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class LegacyLogprobs:
    """Parallel arrays with one entry for each token, the end of sentence included, so that they can be counted like ids.

    An entry is given out with the text it begins in, hence a stop string held back holds entries back too. Entries of text that a stop
    string took away come last, and their offset is the end of the text.
    """

    def __init__(self, tokenizer: Tokenizer, alternatives: int, *, ids_as_text: bool = False) -> None:
        """At most `alternatives` beside the token itself. With `ids_as_text` a token is named `token_id:N`."""
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._ids_as_text = ids_as_text
        self._detokenizer = tokenizer.detokenizer()
        self._end = 0  # characters of all tokens so far
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()  # offset, id, entry

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> None:
        """Tokens in order; None stands for a token that nothing was predicted for, the first of a prompt."""
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._waiting.append((self._end, token_id, logprob))
            self._end += len(self._detokenizer.push(token_id))

    def close_prompt(self) -> None:
        """The prompt ends here: the text of the answer is decoded on its own."""
        self._end += len(self._detokenizer.flush())

    def take(self, shown: int, *, last: bool) -> dict[str, list[Any]]:
        """Entries of tokens that begin within the first `shown` characters, or all with `last`; each only once."""
        arrays: dict[str, list[Any]] = {name: [] for name in FIELDS}
        while self._waiting and (last or self._waiting[0][0] < shown):
            offset, token_id, logprob = self._waiting.popleft()
            arrays["tokens"].append(self._name(token_id))
            arrays["token_logprobs"].append(None if logprob is None else max(logprob.logprob, FLOOR))
            arrays["top_logprobs"].append(None if logprob is None else self._top(logprob))
            arrays["text_offset"].append(min(offset, shown))
        return arrays

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The alternatives, best first, and always the token itself."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top[: self._alternatives], (logprob.token_id, logprob.logprob)):
            top.setdefault(self._name(token_id), max(value, FLOOR))
        return top

    def _name(self, token_id: int) -> str:
        """Text of a token; part of a character is written `bytes:\\xe2\\x80`, since names are keys and must differ."""
        if self._ids_as_text:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class RawChoice:
    """What is known of one choice so far. Both the streamed and the whole answer are made of its pieces, so they cannot differ.

    Attributes:
        last: the event that ended it.
        completion_tokens: sampled tokens so far.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        echo: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        ids_as_text: bool = False,
        with_token_ids: bool = False,
        only_prompt: bool = False,
    ) -> None:
        """`echo` is text to put in front. `only_prompt`: the engine cannot do without sampling a token; it is not part of the answer.

        `logprobs` and `prompt_logprobs` are numbers of alternatives; the latter asks for a field of its own, also without `echo`.
        """
        self.index = index
        self.last: OutputEvent | None = None
        self.completion_tokens = 0
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._tokenizer = tokenizer
        self._feed = LegacyLogprobs(tokenizer, logprobs, ids_as_text=ids_as_text) if logprobs is not None else None
        self._prompt_logprobs = prompt_logprobs
        self._with_token_ids = with_token_ids
        self._only_prompt = only_prompt
        self._shown = 0
        self._started = False
        self._kept: list[dict[str, Any]] = []

    @property
    def usage(self) -> Usage:
        """Of a finished choice, as the client is told."""
        assert self.last is not None
        assert self.last.usage is not None
        return Usage(self.last.usage.prompt_tokens, self.completion_tokens, 0, self.last.usage.cached_tokens)

    def pieces(self, event: OutputEvent) -> list[dict[str, Any]]:
        """Entries of `choices` that one event becomes: what it added, if anything, and the finish reason with empty text."""
        text, token_ids = "", event.token_ids
        extra: dict[str, Any] = {}
        if not self._started:
            self._started = True
            text = self._begin(event)
            if self._with_token_ids:
                extra["prompt_token_ids"] = list(self._prompt_ids)
            if self._prompt_logprobs is not None:
                extra["prompt_logprobs"] = self._scores(event)
        if self._only_prompt:
            token_ids = []
        else:
            text += "".join(delta.text for delta in event.deltas)
            if self._feed is not None:
                self._feed.push(token_ids, event.logprobs or ())
        self.completion_tokens += len(token_ids)
        self._shown += len(text)
        ended = event.finish_reason is not None
        logprobs = None if self._feed is None else self._feed.take(self._shown, last=ended)
        if self._with_token_ids:
            extra["token_ids"] = list(token_ids)
        pieces = []
        if text or extra or (logprobs and logprobs["tokens"]):
            pieces.append({"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": None, **extra})
        if ended:
            self.last = event
            finish: dict[str, Any] = {"text": "", "index": self.index, "logprobs": None, "finish_reason": event.finish_reason}
            if self._only_prompt:
                finish["finish_reason"] = "length"
            elif event.matched_stop is not None:
                finish["stop_reason"] = event.matched_stop
            pieces.append(finish)
        return pieces

    def keep(self, event: OutputEvent) -> None:
        """Add one event to the whole answer."""
        self._kept += self.pieces(event)

    def whole(self) -> dict[str, Any]:
        """The entry of `choices` in a whole answer; call it after the last event."""
        choice = dict(self._kept[-1])
        choice["text"] = "".join(piece["text"] for piece in self._kept)
        if self._feed is not None:
            found = [piece["logprobs"] for piece in self._kept if piece["logprobs"] is not None]
            choice["logprobs"] = {name: [value for arrays in found for value in arrays[name]] for name in FIELDS}
        if "prompt_logprobs" in self._kept[0]:
            choice["prompt_logprobs"] = self._kept[0]["prompt_logprobs"]
        if self._with_token_ids:
            choice["prompt_token_ids"] = list(self._prompt_ids)
            choice["token_ids"] = [token_id for piece in self._kept for token_id in piece.get("token_ids", ())]
        return choice

    def _scores(self, event: OutputEvent) -> list[dict[str, Any] | None]:
        assert event.prompt_logprobs is not None
        most = self._prompt_logprobs
        scores = [score and replace(score, top=score.top[:most]) for score in event.prompt_logprobs]
        return prompt_entries(self._tokenizer, self._prompt_ids, scores)

    def _begin(self, event: OutputEvent) -> str:
        """Text that comes before the first token."""
        if self._echo is None:
            return ""
        if self._feed is not None:
            assert event.prompt_logprobs is not None
            self._feed.push(self._prompt_ids, event.prompt_logprobs)
            self._feed.close_prompt()
        return self._echo


def usage(prompts: Sequence[Sequence[RawChoice]]) -> dict[str, Any]:
    """Usage of a finished answer, from the choices of each prompt: every prompt once, cached tokens are those of the choice that computed
    it, outputs summed."""
    parts = [[choice.usage for choice in choices] for choices in prompts]
    prompt = sum(used[0].prompt_tokens for used in parts)
    cached = sum(min(part.cached_tokens for part in used) for used in parts)
    completion = sum(part.completion_tokens for used in parts for part in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }
