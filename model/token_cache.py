"""Ids of prompt text that was tokenised before: the turns of a chat resend its whole history, of which only the end is new.

A text is cut into pieces at places where the tokenizer would part it anyway, so that the ids of the pieces in a row are exactly the ids of
the whole. Pieces start at the beginning of the text: what is appended leaves all of them but the last as they were.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from blake3 import blake3

PIECE = 4096  # characters from which a piece may end
WINDOW = 4096  # characters searched at a time, so that other threads get their turn
BATCH = 1 << 18  # characters tokenised in one call, which holds the GIL while it takes texts over and takes up to 400 bytes for each
MAX_RUN = 1 << 21  # bytes of a piece, all of which is tokenised at once; more is refused where texts can be cut at all
MAX_WHOLE = 1 << 24  # the same where they cannot
ID_BYTES = array("I").itemsize
OVERHEAD = 250  # bytes of an entry beside its ids: digest, headers, link

# The splitting rules of DeepSeek's tokenizers.
_DIGITS = (r"\p{N}{1,3}", r"\p{N}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

# Between a letter or digit and a space, between an ASCII letter and any other ASCII character, between a line break and anything that is
# no space, and at both ends of runs of ASCII digits (among ASCII characters) and of CJK characters: see `may_cut`.
_CUT = re.compile(
    r"(?<=[^\W_])(?= )|(?<=[A-Za-z])(?=[\x00-@\[-`{-\x7f])|(?<=[\r\n])(?=\S)"
    r"|(?<=[0-9])(?=[\x00-/:-\x7f])|(?<=[\x00-/:-\x7f])(?=[0-9])"
    rf"|(?<={_CJK[:-1]})(?=[^{_CJK[1:-2]}])|(?<=[^{_CJK[1:-2]}])(?={_CJK[:-1]})"
)


def may_cut(spec: Mapping[str, Any]) -> bool:
    """Whether this `tokenizer.json` parts every text where `pieces` cuts it, so that it may be tokenised piece by piece.

    True for the splitting rules of DeepSeek's tokenizers, by what they are. Their digit and CJK rules come first and set runs apart
    from all that is around them, which the later rules do not see; they never join a letter or a line break with what follows. Of the
    alternatives of the word rule, none has a letter followed by anything but letters and marks, and none has a line break followed by
    anything but more space; the only one that looks ahead, at the end of a run of spaces, comes after the one that takes a run up to its
    last line break, and a run that a piece starts with is followed by the same text in the piece and in the whole. Other rules may do
    the same, but that is not known.
    """
    splitter, normalizer, model = ((spec.get(name) or {}) for name in ("pre_tokenizer", "normalizer", "model"))
    steps = splitter.get("pretokenizers") or []
    if splitter.get("type") != "Sequence" or len(steps) != 4:
        return False
    digits, cjk, words = (_rule(step) for step in steps[:3])
    as_bytes = steps[3].get("type") == "ByteLevel" and not steps[3].get("add_prefix_space") and not steps[3].get("use_regex")
    unchanged = not normalizer or (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers"))
    marks = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    by_word = model.get("type") == "BPE" and not any(model.get(name) for name in marks)
    return digits in _DIGITS and cjk == _CJK and words == _WORDS and as_bytes and unchanged and by_word


def _rule(step: Mapping[str, Any]) -> str | None:
    """The regular expression of a step that sets every match apart; what may be written in two ways is written in one."""
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return None
    rule = (step.get("pattern") or {}).get("Regex")
    if not isinstance(rule, str):
        return None
    return rule.replace('\\"', '"').replace("\r", r"\r").replace("\n", r"\n")


def pieces(text: str) -> list[str]:
    """`text` in pieces of at least `PIECE` characters, cut where `may_cut` allows; text without such places stays whole."""
    out: list[str] = []
    start, place = 0, PIECE
    while place < len(text):
        found = _CUT.search(text, place, place + WINDOW)
        if found is None:
            place += WINDOW
            continue
        out.append(text[start : found.start()])
        start, place = found.start(), found.start() + PIECE
    out.append(text[start:] if start else text)
    return out


class Encoding(Protocol):
    """A tokenised text: its length in tokens is known at once, its ids are made on demand."""

    def __len__(self) -> int: ...

    @property
    def ids(self) -> list[int]: ...


class TooManyTokensError(Exception):
    """The texts have `least` tokens or more."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class LongRunError(Exception):
    """A text has `size` bytes in a row that the tokenizer does not divide, `limit` are allowed: their tokens are found all at once."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size} bytes without a place to cut, {limit} are allowed")
        self.size, self.limit = size, limit


def check_runs(parts: Iterable[str], *, cut: bool) -> None:
    """Refuse (LongRunError) a piece that is too long to be tokenised at once; `cut` tells whether it is what was left by `pieces`."""
    limit = MAX_RUN if cut else MAX_WHOLE
    for part in parts:
        if len(part) > limit // 4 and (size := len(part.encode("utf-8", "surrogatepass"))) > limit:
            raise LongRunError(size, limit)


class TokenCache:
    """Tokenises texts, taking pieces seen before from memory. Every method may be called from several threads at once.

    The least recently used pieces go when there are more than `max_bytes`. What is kept is a digest and the ids, never the text.

    Attributes:
        bytes: held now, about. hits, misses: characters taken from memory and tokenised, so far.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Sequence[Encoding]], *, cut: bool, max_bytes: int) -> None:
        """`encode` tokenises each text. `cut`: texts may be tokenised in pieces (see `may_cut`), otherwise only whole."""
        self._encode, self._cut, self._max_bytes = encode, cut, max_bytes
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = self.hits = self.misses = 0

    def encode_many(self, texts: Sequence[str], salt: str = "", limit: int | None = None) -> list[list[int]]:
        """The ids of each text. Only texts given with the same `salt` share what is remembered: how long it takes tells nobody else.

        Raises TooManyTokensError as soon as it is clear that there are more than `limit`, before ids are made of them; LongRunError.
        """
        parts = [pieces(text) if self._cut else [text] for text in texts]
        every = self._every(parts, salt, limit)
        total = sum(map(len, every)) // ID_BYTES
        if limit is not None and total > limit:
            raise TooManyTokensError(total)
        known = iter(every)
        return [memoryview(b"".join([next(known) for _ in part])).cast("I").tolist() for part in parts]

    def count(self, texts: Sequence[str], salt: str = "") -> int:
        """How many ids the texts have. Nothing is held for it but the pieces and what is remembered, however many there are."""
        flat = [piece for text in texts for piece in (pieces(text) if self._cut else [text])]
        keys, found, new = self._search(flat, salt)
        lengths = {key: len(ids) // ID_BYTES for key, ids in zip(keys, found, strict=True) if ids is not None}
        fresh: dict[bytes, bytes] = {}
        room = self._max_bytes // 2
        for batch in _batches(new):
            encodings = self._encode([new[key] for key in batch])
            lengths |= {key: len(one) for key, one in zip(batch, encodings, strict=True)}
            room -= sum(lengths[key] * ID_BYTES + OVERHEAD for key in batch)
            if room >= 0:
                fresh |= {key: array("I", one.ids).tobytes() for key, one in zip(batch, encodings, strict=True)}
            else:
                fresh.clear()
        self._keep(fresh)
        return sum(lengths[key] for key in keys)

    def _every(self, parts: Sequence[Sequence[str]], salt: str, limit: int | None) -> list[bytes]:
        """The ids of each piece."""
        keys, found, new = self._search([piece for part in parts for piece in part], salt)
        room = None if limit is None else limit - sum(len(ids) for ids in found if ids is not None) // ID_BYTES
        fresh = self._tokenise(new, room, limit or 0)
        self._keep(fresh)
        return [fresh[key] if ids is None else ids for key, ids in zip(keys, found, strict=True)]

    def _search(self, flat: Sequence[str], salt: str) -> tuple[list[bytes], list[bytes | None], dict[bytes, str]]:
        """(key of each piece, its ids if they are remembered, the pieces that are not). Raises LongRunError."""
        check_runs(flat, cut=self._cut)
        prefix = blake3(salt.encode("utf-8", "surrogatepass")).digest()
        keys = [blake3(prefix + piece.encode("utf-8", "surrogatepass")).digest() for piece in flat]
        found = self._look_up(keys)
        new = {key: piece for key, piece, ids in zip(keys, flat, found, strict=True) if ids is None}
        with self._lock:
            self.misses += (missed := sum(map(len, new.values())))
            self.hits += sum(map(len, flat)) - missed
        return keys, found, new

    def _look_up(self, keys: Sequence[bytes]) -> list[bytes | None]:
        known = self._known
        with self._lock:
            found = [known.get(key) for key in keys]
            for key, ids in zip(keys, found, strict=True):
                if ids is not None:
                    known.move_to_end(key)
        return found

    def _tokenise(self, new: Mapping[bytes, str], room: int | None, limit: int) -> dict[bytes, bytes]:
        """Ids of the pieces, of which there may be `room` of the `limit`."""
        fresh: dict[bytes, bytes] = {}
        for batch in _batches(new):
            encodings = self._encode([new[key] for key in batch])
            if room is not None:
                room -= sum(map(len, encodings))
                if room < 0:
                    raise TooManyTokensError(limit - room)
            fresh |= {key: array("I", one.ids).tobytes() for key, one in zip(batch, encodings, strict=True)}
        return fresh

    def _keep(self, fresh: Mapping[bytes, bytes]) -> None:
        """Remember, unless one request would drive out what all others rely on."""
        if sum(map(_size, fresh.values())) > self._max_bytes // 2:
            return
        known = self._known
        with self._lock:
            for key, ids in fresh.items():
                if key not in known:
                    known[key] = ids
                    self.bytes += _size(ids)
            while self.bytes > self._max_bytes:
                self.bytes -= _size(known.popitem(last=False)[1])


def _batches(new: Mapping[bytes, str]) -> Iterator[list[bytes]]:
    """The keys, so that their pieces have about `BATCH` characters at a time."""
    batch: list[bytes] = []
    size = 0
    for key, piece in new.items():
        batch.append(key)
        size += len(piece)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(ids: bytes) -> int:
    return len(ids) + OVERHEAD
