"""Raw prompts, as completions and /tokenize take them: text in which the spelling of a control token is that token, or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay.model.chat import context_overflow, undivided
from forebay.model.tokenizer import LongRunError, Tokenizer, TooManyTokensError
from forebay.server.field_errors import bad, empty, invalid, wrong_type
from forebay.server.token_fields import check_token_ids

FIM = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")

Prompt = str | list[int]


def read_prompts(value: Any, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a completions body: one text, several, one list of ids, or several.

    Raises RequestError naming the item of `prompt` that is none of these, is empty, or is an id outside the vocabulary.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, an array of strings, or token ids", value)
    if not value:
        raise empty("prompt")
    first = value[0]
    if isinstance(first, str):
        for i, item in enumerate(value):
            if not isinstance(item, str):
                raise wrong_type(f"prompt[{i}]", "a string like the first item", item)
        return list(value)
    if not isinstance(first, list):
        return [read_ids(value, "prompt", tokenizer)]
    for i, item in enumerate(value):
        if not isinstance(item, list):
            raise wrong_type(f"prompt[{i}]", "an array of token ids like the first item", item)
    return [read_ids(item, f"prompt[{i}]", tokenizer) for i, item in enumerate(value)]


def read_ids(value: list[Any], path: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt. Raises RequestError naming the first item that is no id of a token, and if there are none at all."""
    if not value:
        raise bad(path, f"Invalid '{path}': empty array. Expected at least one token id.", "empty_array")
    ids = integers(value, path)
    if min(ids) < 0 or max(ids) >= tokenizer.vocab_size or tokenizer.image_id in ids:
        check_token_ids(path, ids, tokenizer)  # finds which one
    return ids


def integers(value: list[Any], path: str) -> list[int]:
    """`value` as integers, which may be written as `5.0`. Raises RequestError naming the first item that is something else."""
    if set(map(type, value)) <= {int}:  # the usual case, at the speed of the interpreter's loops
        return value
    found = []
    for i, item in enumerate(value):
        if type(item) is float and item.is_integer():
            found.append(int(item))
        elif type(item) is int:
            found.append(item)
        else:
            raise wrong_type(f"{path}[{i}]", "a token id", item)
    return found


def text_ids(
    text: str,
    tokenizer: Tokenizer,
    *,
    path: str,
    bos: bool = True,
    control: bool = True,
    max_tokens: int | None = None,
    slack: int = 2,
    asked_output: int = 0,
) -> list[int]:
    """Ids of a raw text; proportional to its length, most of it without the GIL.

    Args:
        path: the field it came in, for errors.
        bos: put begin of sentence in front unless the text starts with it.
        control: the spelling of a control token is that token.
        max_tokens: refuse a text that must have more tokens than these, as its bytes tell, before the work of finding them, and one that
            turns out to have more than `slack` times as many as soon as that is clear.
        asked_output: tokens of output that the request asks for, which that refusal tells.

    Raises RequestError: too long (context_length_exceeded), or it spells the placeholder of images.
    """
    _check_length(text, tokenizer, path, max_tokens, asked_output)
    encode = tokenizer.encode_special if control else tokenizer.encode_long
    try:
        ids = encode(text, None if max_tokens is None else slack * max_tokens)
    except TooManyTokensError as error:
        raise context_overflow(error.least, max_tokens or 0, asked_output, path) from None
    except LongRunError as error:
        raise undivided(error, path) from None
    if tokenizer.image_id is not None and tokenizer.image_id in ids:
        raise invalid(path, f"{tokenizer.token_text(tokenizer.image_id)} is the placeholder of images, which a raw prompt cannot have")
    return with_bos(ids, tokenizer) if bos else ids


def fill_ids(
    before: str, after: str, tokenizer: Tokenizer, *, bos: bool = True, max_tokens: int | None = None, asked_output: int = 0
) -> list[int]:
    """The prompt whose answer belongs between two texts (fill in the middle). The texts are files: what they spell stays text.

    `max_tokens` and `asked_output` are as for `text_ids`.

    Raises RequestError: too long, or a vocabulary without the markers.
    """
    _check_length(before, tokenizer, "prompt", max_tokens, asked_output)
    _check_length(after, tokenizer, "suffix", max_tokens, asked_output)
    begin, hole, end = (tokenizer.special_id(spelling) for spelling in FIM)
    if begin is None or hole is None or end is None:
        text = "Unsupported value: 'suffix' needs fill-in-the-middle tokens, which the served checkpoint does not have."
        raise bad("suffix", text, "unsupported_value")
    parts = []
    for path, text in (("prompt", before), ("suffix", after)):
        try:
            parts.append(tokenizer.encode_long(text, None if max_tokens is None else 2 * max_tokens))
        except TooManyTokensError as error:
            raise context_overflow(error.least, max_tokens or 0, asked_output, path) from None
        except LongRunError as error:
            raise undivided(error, path) from None
    head, tail = parts
    ids = [begin, *head, hole, *tail, end]
    return with_bos(ids, tokenizer) if bos else ids


def with_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """`ids` after begin of sentence, unless they start with it."""
    if tokenizer.bos_id is None or (ids and ids[0] == tokenizer.bos_id):
        return ids
    return [tokenizer.bos_id, *ids]


def total(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of all prompts."""
    return sum(len(ids) for ids in prompts)


def _check_length(text: str, tokenizer: Tokenizer, path: str, max_tokens: int | None, asked_output: int) -> None:
    if max_tokens is None:
        return
    least = len(text.encode()) // tokenizer.longest_token
    if least > max_tokens:
        raise context_overflow(least, max_tokens, asked_output, path)
