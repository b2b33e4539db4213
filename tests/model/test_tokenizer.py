from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path

import pytest
import tokenizers

from forebay.model.chat import ChatCodec
from forebay.model.errors import CheckpointError
from forebay.model.tokenizer import CHAT_TOKENS, Tokenizer
from noise_model import TOKENIZER
from turns import byte_ids

TEXTS = [
    "",
    "plain words, 12345 and\r\n\t tabs",
    "漢字かなカナ, Ελληνικά, עברית",
    "👩‍👩‍👧‍👦 🇫🇷 é é \u2028 \x00 \x7f",
    "<think></think><｜User｜>｜DSML｜<｜end▁of▁sentence｜><｜deepseek_image｜>",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def spec(folder: Path) -> dict:
    return json.loads((folder / "tokenizer.json").read_text())


def save(tmp_path: Path, content: dict) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_ids_come_from_spellings(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = {entry["content"]: entry["id"] for entry in spec(folder)["added_tokens"]}
    assert tokenizer.think_end_id == ids["</think>"]
    assert tokenizer.dsml_id == ids["｜DSML｜"]
    turns = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>")
    assert tokenizer.stop_ids == {ids[t] for t in turns}
    assert tokenizer.special_id("<｜fim▁hole｜>") == ids["<｜fim▁hole｜>"]
    assert tokenizer.special_id("the") is None

    other = spec(folder)
    swap = {ids["</think>"]: ids["<think>"], ids["<think>"]: ids["</think>"]}
    for entry in other["added_tokens"]:
        entry["id"] = swap.get(entry["id"], entry["id"])
    moved = Tokenizer.load(save(tmp_path, other))
    assert moved.think_end_id == tokenizer.think_start_id
    assert moved.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_special(text)) == text


@pytest.mark.case("B114")
def test_plain_text_never_gives_control_ids(tokenizer: Tokenizer, folder: Path) -> None:
    control = {entry["id"]: entry["content"] for entry in spec(folder)["added_tokens"]}
    for content in control.values():
        for text in (content, f"a{content}b", f" {content}{content}\n"):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(control), text
            assert tokenizer.decode(ids) == text


def test_raw_prompts_may_contain_control_tokens(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.encode_special(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_special("a</think>b") == [*tokenizer.encode("a"), tokenizer.think_end_id, *tokenizer.encode("b")]


def test_decode_equals_the_library(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    draw = random.Random(7)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(0, 12))]
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False), ids


def test_skip_special_keeps_grounding_tags(tokenizer: Tokenizer) -> None:
    ref = tokenizer.special_id("<｜ref｜>")
    ids = [tokenizer.bos_id, ref, *tokenizer.encode("cat"), tokenizer.think_end_id, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids, skip_special=True) == "<｜ref｜>cat</think>"
    assert tokenizer.decode(ids).startswith("<｜begin▁of▁sentence｜>")


@pytest.mark.case("B065")
def test_detokenizer_gives_whole_characters_only(tokenizer: Tokenizer) -> None:
    text = "e\u0301 漢字 👩‍👩‍👧‍👦 🇫🇷 ok"
    stream = tokenizer.detokenizer()
    pieces = [stream.push(i) for i in byte_ids(tokenizer, text.encode())]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


@pytest.mark.case("B065")
def test_detokenizer_equals_full_decode_of_any_bytes(tokenizer: Tokenizer) -> None:
    draw = random.Random(11)
    for _ in range(500):
        text = "".join(draw.choice("aé漢😀\n") for _ in range(draw.randint(0, 6))).encode()
        data = bytearray(text)
        for _ in range(draw.randint(0, 3)):
            data.insert(draw.randint(0, len(data)), draw.randrange(256))
        ids = byte_ids(tokenizer, bytes(data[: draw.randint(0, len(data))]))
        stream = tokenizer.detokenizer()
        joined = "".join([stream.push(i) for i in ids]) + stream.flush()
        assert joined == tokenizer.decode(ids)


@pytest.mark.case("B065")
def test_incomplete_tail_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert "".join([stream.push(i) for i in byte_ids(tokenizer, "a😀".encode()[:-1])]) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(tokenizer.encode("b")[0]) == "b"


def test_ids_without_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert [stream.push(i) for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size, 10**9, -1)] == [""] * 6
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_text(byte_ids(tokenizer, b"\xe6")[0]) == "\ufffd"


def test_missing_chat_tokens_are_all_named(folder: Path, tmp_path: Path) -> None:
    content = spec(folder)
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] not in ("</think>", "｜DSML｜")]
    path = save(tmp_path, content)
    with pytest.raises(CheckpointError, match=r"</think>, ｜DSML｜"):
        Tokenizer.load(tmp_path)
    without = Tokenizer.load(path, chat=False)
    assert without.think_end_id is None
    assert without.decode(without.encode("still fine")) == "still fine"
    with pytest.raises(CheckpointError, match=r"</think>, ｜DSML｜"):
        ChatCodec(without)
    content["added_tokens"] = []
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(save(tmp_path, content))
    assert all(token in error.value.message for token in CHAT_TOKENS)


def test_unusable_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match="not a usable"):
        Tokenizer.load(tmp_path)
    for change in ({"decoder": {"type": "Fuse"}}, {"model": {"type": "Nope"}}, {"added_tokens": 3}):
        with pytest.raises(CheckpointError):
            Tokenizer.load(save(tmp_path, spec(folder) | change))


def test_threads_get_the_same_ids(tokenizer: Tokenizer) -> None:
    texts = [f"{i} some words, and 漢字 {i * 17} </think>" * 20 for i in range(8)]
    expected = [tokenizer.encode(text) for text in texts]
    got: list[list[int]] = [[] for _ in texts]

    def work(i: int) -> None:
        got[i] = tokenizer.encode(texts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    assert tokenizer.encode_many(texts) == expected
