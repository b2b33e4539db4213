"""Turns of a chat as tests write them: sampled ids from a short notation, and deltas added up to what a client would have.

In the notation ⟦/think⟧, ⟦think⟧ and ⟦D⟧ are the control ids; everything else, spelled-out markers included, is ordinary text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from forebay.model.chat import Delta, OutputParser, ParseOptions
from forebay.model.tokenizer import Tokenizer


@dataclass
class Heard:
    """What a client has after all deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None


def sampled(tokenizer: Tokenizer, turn: str, cut: str | random.Random = "whole") -> list[int]:
    """Ids of `turn`: text as the tokenizer would cut it ("whole"), one byte per token ("bytes"), or cut at random places."""
    markers = {"⟦D⟧": tokenizer.dsml_id, "⟦/think⟧": tokenizer.think_end_id, "⟦think⟧": tokenizer.think_start_id}
    ids: list[int] = []
    for part in re.split("(⟦D⟧|⟦/think⟧|⟦think⟧)", turn):
        marker = markers.get(part)
        if marker is not None:
            ids.append(marker)
        elif cut == "whole":
            ids += tokenizer.encode(part)
        elif cut == "bytes":
            ids += byte_ids(tokenizer, part.encode())
        else:
            assert isinstance(cut, random.Random)
            while part:
                size = cut.randint(1, 6)
                ids += tokenizer.encode(part[:size])
                part = part[size:]
    return ids


@lru_cache(maxsize=4)
def _single_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    single = _single_bytes(tokenizer)
    return [single[bytes([b])] for b in data]


def heard(deltas: Iterable[Delta], finish_reason: str | None = None) -> Heard:
    """Add up deltas, checking on the way that they are well formed and that channels come in order."""
    result = Heard(finish_reason=finish_reason)
    order = ["reasoning", "content", "tool_calls"]
    at = 0
    ids = set()
    for delta in deltas:
        assert order.index(delta.channel) >= at, f"{delta.channel} after {order[at]}"
        at = order.index(delta.channel)
        if delta.channel != "tool_calls":
            assert delta.text
            assert (delta.index, delta.call_id, delta.name) == (0, None, None)
            setattr(result, delta.channel, getattr(result, delta.channel) + delta.text)
        elif delta.name is not None:
            assert delta.index == len(result.calls)
            assert delta.call_id
            assert delta.call_id not in ids
            ids.add(delta.call_id)
            result.calls.append((delta.name, delta.text))
        else:
            assert delta.call_id is None
            assert delta.text
            assert delta.index == len(result.calls) - 1
            name, arguments = result.calls[-1]
            result.calls[-1] = (name, arguments + delta.text)
    return result


def parse(
    tokenizer: Tokenizer, turn: str, options: ParseOptions, reason: str = "stop", cut: str | random.Random = "whole"
) -> Heard:
    """Run `turn` through a parser."""
    parser = OutputParser(tokenizer, options)
    deltas = [delta for token_id in sampled(tokenizer, turn, cut) for delta in parser.push(token_id)]
    deltas += parser.finish(reason)
    assert parser.finish(reason) == []
    return heard(deltas, parser.finish_reason(reason))
