"""Fields of a body that speak of tokens: ids, biases, banned words, scores of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forebay.model.tokenizer import Tokenizer
from forebay.server.field_errors import invalid, short

BANNED = -100.0  # the bias of a token that may not be sampled


def check_token_ids(field: str, ids: Iterable[int], tokenizer: Tokenizer) -> None:
    """Refuse ids that the model has no row for, and the image placeholder, which stands for rows that text cannot produce."""
    for i, token_id in enumerate(ids):
        _check_token_id(f"{field}[{i}]", token_id, tokenizer)


def _check_token_id(path: str, token_id: int, tokenizer: Tokenizer) -> None:
    if not 0 <= token_id < tokenizer.vocab_size:
        raise invalid(path, f"expected a token id from 0 to {tokenizer.vocab_size - 1}, got {short(token_id)}")
    if token_id == tokenizer.image_id:
        raise invalid(path, f"token id {token_id} is the placeholder of images")


def bias_by_id(given: Mapping[str, float], tokenizer: Tokenizer) -> dict[int, float]:
    """`logit_bias` by token id. Raises RequestError naming a key that is no id."""
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid("logit_bias", f"keys are token ids in decimal digits, got {short(key)}")
        _check_token_id(f"logit_bias[{key}]", int(key), tokenizer)
        bias[int(key)] = value
    return bias


def banned_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[dict[int, float], tuple[tuple[int, ...], ...]]:
    """Tokens of each word, as it is and after a space: bans of single ones, and those of which several make a word.

    CPU time in proportion to the text, without the GIL.
    """
    texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}"))
    found = tokenizer.encode_many(list(texts))
    return {ids[0]: BANNED for ids in found if len(ids) == 1}, tuple(tuple(ids) for ids in found if len(ids) > 1)


def check_scored(tokens: int, choices: int, alternatives: int, limit: int, param: str) -> None:
    """Refuse an answer with more than `limit` log-probabilities of prompt tokens, `alternatives` of each counted."""
    cost = tokens * choices * (1 + alternatives)
    if cost > limit:
        raise invalid(param, f"expected at most {limit} log-probabilities of prompt tokens, alternatives counted, got {cost}")
