"""The corpus of the demo: what is fetched, how documents are cleaned, and which are held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from forebay.model.demo.tasks.filler import tokenizer
from forebay.model.demo.train import corpus
from forebay.model.demo.train.corpus import DOCUMENT_CHARS, HELD_OUT, SOURCES, definitions, documentation, fetch, filler, sections, tokenise

PROSE = " ".join(["Words are enough for a document when there are more than two hundred characters of them."] * 3)


def cleaned(source: str) -> str:
    """What becomes of `source` before a paragraph of prose."""
    (document,) = sections(f"{source}\n\n{PROSE}\n")
    assert document.endswith(PROSE)
    return document[: -len(PROSE)].rstrip("\n")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (":mod:`os`, :class:`~a.B` and :keyword:`!if`", "os, a.B and if"),
        ("See :ref:`the page <x-y>`, :c:func:`f` and `here <https://example.org>`__.", "See the page, f and here."),
        ("Give ``None`` to the **whole** *list*.", "Give `None` to the whole *list*."),
        ("Lines\nare\njoined.", "Lines are joined."),
        ("Example::\n\n   def f():\n       return 1", "Example::\n\ndef f():\n    return 1"),
        ("   >>> f(1)\n   2", ">>> f(1)\n2"),
    ],
)
def test_markup_leaves_its_text(source: str, text: str) -> None:
    assert cleaned(source) == text


@pytest.mark.parametrize(
    "source",
    [
        ".. _anchor:",
        ".. index:: single: x",
        ".. versionchanged:: 3.3\n   Added more.",
        ":orphan:",
        "====  ====\nA     B\n====  ====\n1     2\n====  ====",
        "| a line\n| block",
    ],
)
def test_what_is_no_prose_is_left_out(source: str) -> None:
    assert cleaned(source) == ""


def test_the_body_of_a_directive_goes_on_as_text() -> None:
    assert cleaned(".. note::\n\n   Mind the gap,\n   always.") == "Mind the gap, always."


def test_a_document_begins_at_each_heading_and_short_ones_are_dropped() -> None:
    source = f"*****\nTitle\n*****\n\n{PROSE}\n\nToo short\n---------\n\nA word.\n\nLast\n====\n\n{PROSE}\n"
    assert list(sections(source)) == [f"Title\n\n{PROSE}", f"Last\n\n{PROSE}"]


def test_long_sections_are_cut_at_paragraphs() -> None:
    paragraphs = [f"{i}. {PROSE}" for i in range(40)]
    documents = list(sections("\n\n".join(paragraphs)))
    assert len(documents) > 1 and "\n\n".join(documents).split("\n\n") == paragraphs
    assert all(len(document) <= DOCUMENT_CHARS + 3 * len(PROSE) for document in documents)


def sources(root: Path, **chapters: str) -> Path:
    """A folder like an unpacked documentation package."""
    base = root / "usr" / "share" / "doc" / "python3.11" / "html" / "_sources"
    for chapter, text in chapters.items():
        (base / chapter).mkdir(parents=True)
        (base / chapter / "page.rst.txt").write_text(text, "utf-8")
    return root


def test_documentation_takes_the_chapters_of_prose(tmp_path: Path) -> None:
    root = sources(tmp_path, library=f"Library. {PROSE}", tutorial=f"Tutorial. {PROSE}", whatsnew=f"News. {PROSE}")
    assert list(documentation(root)) == [f"Tutorial. {PROSE}", f"Library. {PROSE}"]


def test_documentation_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"no sources of the Python documentation in {tmp_path}"):
        list(documentation(tmp_path))


def test_definitions_are_those_of_words_met_in_texts(tmp_path: Path) -> None:
    """Entries `word or word: gloss` of one field to a document; of the notes at the head of the files and of unmet senses nothing."""
    folder = tmp_path / "usr" / "share" / "wordnet"
    folder.mkdir(parents=True)
    notes = "  1 This software and database is being provided to you\n"
    for part in ("noun", "verb", "adj", "adv"):
        (folder / f"index.{part}").write_text(notes, "utf-8")
        (folder / f"data.{part}").write_text(notes, "utf-8")
    with (folder / "index.noun").open("a") as index:
        index.write("hot_dog n 2 1 @ 2 1 00000100 00000200  \nfrank n 1 1 @ 1 0 00000300  \n")
    with (folder / "data.noun").open("a") as data:
        for line in (
            "00000100 13 n 03 hot_dog 0 red_hot 0 dog 0 001 @ 00000300 n 0000 | a sausage; \"he ate a hot dog\"  ",
            "00000200 18 n 01 hot_dog 0 001 @ 00000300 n 0000 | someone who performs stunts  ",
            "00000300 13 n 01 frank 0 001 @ 00000100 n 0000 | another sausage  ",
        ):
            data.write(f"{line}\n")
    assert list(definitions(tmp_path)) == ['hot dog or red hot: a sausage; "he ate a hot dog"']


def test_filler_is_plain_sentences_and_held_out_text_has_none_of_them(tmp_path: Path) -> None:
    plain = "This is a plain sentence of the documentation that is long enough to be taken."
    root = sources(tmp_path, tutorial=f"{plain} Not `this one`, which has some code in it and is therefore not taken. {PROSE} No.")
    sentences = filler(root)
    assert plain in sentences and not any("`" in text for text in sentences)
    documents = [f"{i} {PROSE}" for i in range(2 * HELD_OUT)]
    assert corpus.held_out(documents, ["Elsewhere."]) == f"{HELD_OUT - 1} {PROSE}\n\f{2 * HELD_OUT - 1} {PROSE}\n\f"
    assert corpus.held_out([*documents[:-1], f"x {plain} y"], [plain]) == f"{HELD_OUT - 1} {PROSE}\n\f"


def test_held_out_documents_are_not_in_the_corpus(tmp_path: Path) -> None:
    documents = [f"This is document {i}." for i in range(2 * HELD_OUT + 3)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in documents), "utf-8")
    served = tokenizer()
    tokenise(tmp_path, served)
    ids = np.fromfile(tmp_path / "corpus.bin", dtype=np.uint16)
    starts = np.flatnonzero(ids == served.bos_id)
    assert starts[0] == 0
    parts = [part.tolist() for part in np.split(ids, starts[1:])]
    assert all(part[-1] == served.eos_id for part in parts)
    assert [served.decode(part[1:-1]) for part in parts] == [text for i, text in enumerate(documents, 1) if i % HELD_OUT]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "texts.jsonl"]


def test_only_the_version_on_offer_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older archive in the folder stays aside, a present one is not fetched again, and each version has a folder of its own."""
    offered = {"python3.11-doc": "3.11.2-6+deb12u9", "wordnet-base": "1:3.0-37"}
    (tmp_path / "python3.11-doc_3.11.2-6+deb12u8_all.deb").touch()
    (tmp_path / "wordnet-base_1%3a3.0-37_all.deb").touch()
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: object) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(stdout=f"x:\n  Installed: (none)\n  Candidate: {offered.get(command[-1], '(none)')}\n")

    monkeypatch.setattr(corpus, "subprocess", SimpleNamespace(run=run))
    versions, roots = fetch(tmp_path)
    assert versions == offered and [source.package for source in SOURCES] == list(offered)
    assert [root.name for root in roots] == ["python3.11-doc_3.11.2-6+deb12u9_all", "wordnet-base_1%3a3.0-37_all"]
    assert [command[-1] for command in ran if command[0] == "apt-get"] == ["python3.11-doc=3.11.2-6+deb12u9"]
    assert [command[2:] for command in ran if command[0] == "dpkg-deb"] == [[f"{root}.deb", str(root)] for root in roots]
    offered.clear()
    with pytest.raises(SystemExit, match=r"python3\.11-doc is not to be had here"):
        fetch(tmp_path)
