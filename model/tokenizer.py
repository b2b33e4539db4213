"""The checkpoint's tokenizer: text to ids with and without control tokens, and ids back to text one token at a time.

The vocabulary is byte-level BPE, so every id stands for a fixed byte string; detokenising is joining bytes and decoding UTF-8.
Ids of control tokens are resolved by their spelling, because small checkpoints place them elsewhere than the released one.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from forebay.model.errors import CheckpointError
from forebay.model.token_cache import BATCH, WINDOW, Encoding, LongRunError, TooManyTokensError, check_runs, may_cut, pieces

__all__ = ["Detokenizer", "LongRunError", "Tokenizer", "TooManyTokensError"]

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"

CHAT_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK_START, THINK_END, DSML)


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level piece stands for (the table introduced by GPT-2)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


class Tokenizer:
    """A loaded `tokenizer.json`. Immutable; every method may be called from several threads at once.

    Attributes:
        vocab_size: highest id + 1.
        fingerprint: hex sha256 of the file.
        may_cut: whether text may be tokenised piece by piece (`token_cache.pieces`).
        longest_token: bytes of the longest token, so that a text of n bytes has at least n / longest_token tokens.
        bos_id, eos_id, pad_id, system_id, user_id, assistant_id, think_start_id, think_end_id, dsml_id, image_id:
            ids by spelling, None where the vocabulary lacks the token.
        stop_ids: ids that end a chat turn: end of sentence, and the markers that could only open another turn.
        silent_ids: ids that never become text (beginning and end of sentence, padding).
        added_ids: ids of all added tokens.
    """

    def __init__(self, data: bytes, source: str) -> None:
        """Build from the bytes of a `tokenizer.json`; `source` names it in errors. Raises CheckpointError."""
        try:
            spec: dict[str, Any] = json.loads(data)
            added = {entry["content"]: int(entry["id"]) for entry in spec.get("added_tokens") or []}
            vocab: dict[str, int] = spec["model"]["vocab"]
            decoder = (spec.get("decoder") or {}).get("type")
            self._full = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            # The same model without the added vocabulary: spellings of control tokens are ordinary text to it.
            self._plain = tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{source} is not a usable tokenizer.json: {error}") from error
        if decoder != "ByteLevel":
            raise CheckpointError(f"{source}: the decoder must be ByteLevel, got {decoder}")

        self.vocab_size = max([*vocab.values(), *added.values()], default=-1) + 1
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.may_cut = may_cut(spec)
        self._added = added
        self._spelled = _Spellings.of(spec)
        self.added_ids = frozenset(added.values())
        self._bytes = _token_table(vocab, added, self.vocab_size)
        self._texts = [_complete_text(piece) for piece in self._bytes]
        self.longest_token = max((len(piece) for piece in self._bytes), default=1) or 1

        self.bos_id = added.get(BOS)
        self.eos_id = added.get(EOS)
        self.pad_id = added.get(PAD)
        self.system_id = added.get(SYSTEM)
        self.user_id = added.get(USER)
        self.assistant_id = added.get(ASSISTANT)
        self.think_start_id = added.get(THINK_START)
        self.think_end_id = added.get(THINK_END)
        self.dsml_id = added.get(DSML)
        self.image_id = added.get(IMAGE)
        self.stop_ids = frozenset(added[t] for t in (EOS, BOS, SYSTEM, USER, ASSISTANT) if t in added)
        self.silent_ids = frozenset(added[t] for t in (BOS, EOS, PAD) if t in added)

    @classmethod
    def load(cls, path: Path, *, chat: bool = True) -> Tokenizer:
        """Load `path`, a `tokenizer.json` or the folder that holds one.

        With `chat`, a vocabulary without the tokens of the chat encoding is refused. Raises CheckpointError.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            data = file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read the tokenizer {file}: {error.strerror or error}") from error
        tokenizer = cls(data, str(file))
        if chat:
            tokenizer.require_chat_tokens()
        return tokenizer

    def require_chat_tokens(self) -> None:
        """Raise CheckpointError naming every token that chat needs and this vocabulary lacks."""
        if missing := [t for t in CHAT_TOKENS if t not in self._added]:
            raise CheckpointError(f"the tokenizer lacks tokens that chat needs: {', '.join(missing)}")

    def special_id(self, spelling: str) -> int | None:
        """Id of the added token with exactly this spelling."""
        return self._added.get(spelling)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. A spelled-out control token is text like any other and never becomes the control id."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call that releases the GIL while it works."""
        return [e.ids for e in self.encodings(texts)]

    def encodings(self, texts: Sequence[str]) -> Sequence[Encoding]:
        """`encode_many`, with ids that are made when they are asked for: making millions of them holds the GIL."""
        encodings: Sequence[Encoding] = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return encodings

    def encode_special(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of a raw prompt, in which the spelling of a control token is that token. Nothing is put in front.

        Raises TooManyTokensError if there are more than `limit`, soon after that is clear; LongRunError.
        """
        if self._spelled is None:
            check_runs((text,), cut=False)
            ids = self._full.encode_batch_fast([text], add_special_tokens=False)[0].ids
            if limit is not None and len(ids) > limit:
                raise TooManyTokensError(len(ids))
            return ids
        return self._in_batches(self._spelled.split(text), limit)

    def encode_long(self, text: str, limit: int | None = None) -> list[int]:
        """`encode` of a text of any length in bounded memory. Raises like `encode_special`."""
        return self._in_batches([text], limit)

    def _in_batches(self, parts: Iterable[str | int], limit: int | None) -> list[int]:
        """Ids of a row of plain texts and of ids."""
        found = array("I")
        waiting: list[str | int] = []
        size = 0

        def flush() -> None:
            encoded = iter(self.encodings([part for part in waiting if isinstance(part, str)]))
            for part in waiting:
                if isinstance(part, int):
                    found.append(part)
                else:
                    found.extend(next(encoded).ids)
            waiting.clear()
            if limit is not None and len(found) > limit:
                raise TooManyTokensError(len(found))

        for part in parts:
            for piece in [part] if isinstance(part, int) else pieces(part) if self.may_cut else [part]:
                if isinstance(piece, str):
                    check_runs((piece,), cut=self.may_cut)
                waiting.append(piece)
                size += len(piece) if isinstance(piece, str) else 16
                if size >= BATCH:
                    flush()
                    size = 0
        flush()
        return found.tolist()

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`, U+FFFD for bytes that are not UTF-8. `skip_special` leaves out `silent_ids` and nothing else."""
        skip = self.silent_ids if skip_special else frozenset()
        return b"".join([self.token_bytes(i) for i in ids if i not in skip]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, possibly part of a character. Empty for rows of the embedding that no token uses."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(self._bytes, self._texts, self.silent_ids)


class _Spellings:
    """Finds added tokens in raw text as the library does: of those that begin first the longest, unnormalised ones before the others."""

    def __init__(self, groups: Sequence[Mapping[str, int]]) -> None:
        self._groups = [(group, re.compile(_any_of(sorted(group))), max(map(len, group))) for group in groups if group]

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> _Spellings | None:
        """None for tokens that take in what is around them, or texts that are normalised: those the library alone knows to find."""
        entries = spec.get("added_tokens") or []
        normalizer = spec.get("normalizer")
        if normalizer and (normalizer.get("type") != "Sequence" or normalizer.get("normalizers")):
            return None
        flags = ("lstrip", "rstrip", "single_word")
        if any(entry.get(flag) for entry in entries for flag in flags) or not all(entry["content"] for entry in entries):
            return None
        first = {entry["content"]: int(entry["id"]) for entry in entries if not entry.get("normalized")}
        return cls([first, {entry["content"]: int(entry["id"]) for entry in entries if entry.get("normalized")}])

    def split(self, text: str) -> Iterator[str | int]:
        """The text as plain parts and ids of added tokens, in a row."""
        return self._split(text, 0)

    def _split(self, text: str, level: int) -> Iterator[str | int]:
        if level == len(self._groups):
            if text:
                yield text
            return
        ids, pattern, longest = self._groups[level]
        start = place = 0
        while place < len(text):  # a little at a time: a search holds the GIL
            match = pattern.search(text, place, place + WINDOW + longest)
            if match is None or match.start() >= place + WINDOW:
                place += WINDOW
                continue
            yield from self._split(text[start : match.start()], level + 1)
            yield ids[match.group()]
            start = place = match.end()
        yield from self._split(text[start:], level + 1)


def _any_of(spellings: Sequence[str]) -> str:
    """A pattern for the longest of some sorted texts that fits, as a tree: its time does not depend on how many there are."""
    ended = not spellings[0]
    branches = [_branch(list(group)) for _, group in itertools.groupby(spellings[ended:], lambda text: text[0])]
    return f"(?:{'|'.join(branches)}){'?' if ended else ''}" if branches else ""


def _branch(spellings: list[str]) -> str:
    first, last = spellings[0], spellings[-1]  # sorted: what these share, all of them do
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    shared = first[:length]
    return re.escape(shared) + _any_of([text[len(shared) :] for text in spellings])


class Detokenizer:
    """Text of a growing sequence of ids. Gives only complete characters, so joined output equals `Tokenizer.decode` of all ids."""

    def __init__(self, token_bytes: list[bytes], token_texts: list[str | None], silent_ids: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._texts = token_texts
        self._silent = silent_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is incomplete. Control ids and unused ids give nothing."""
        if not 0 <= token_id < len(self._bytes) or token_id in self._silent:
            return ""
        text = self._texts[token_id]
        if text is not None and not self._pending:
            return text
        text = self._decoder.decode(self._bytes[token_id])
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Close the text: U+FFFD if it ends inside a character, otherwise nothing. The decoder can be used again after it."""
        if not self._pending:
            return ""
        self._pending = False
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


def _token_table(vocab: dict[str, int], added: dict[str, int], size: int) -> list[bytes]:
    """Bytes of every id; empty for ids that no token has."""
    byte_of = _byte_of_char()
    table = [b""] * size
    for piece, token_id in vocab.items():
        try:
            table[token_id] = bytes([byte_of[c] for c in piece])
        except KeyError:  # a control token kept in the base vocabulary: spelled in plain text
            table[token_id] = piece.encode("utf-8")
    for content, token_id in added.items():
        table[token_id] = content.encode("utf-8")
    return table


def _complete_text(piece: bytes) -> str | None:
    """Text of a token that is whole characters, else None."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
