"""The corpus of the demo: `python -m forebay.model.demo.train.corpus OUT_DIR`, on a Debian machine with its package archive in reach.

Plain text from two documentation packages (SOURCES), cleaned of markup. Packages are fetched by name and unpacked under OUT_DIR, each
version into a folder of its own, nothing is installed. Writes

    texts.jsonl     one document a line, as a JSON string, held-out ones included
    corpus.bin      uint16 tokens of the demo's tokenizer, each document between begin and end of sentence, without the held-out 2 %
    sources.json    versions of the packages as found

`--filler` also writes anew `tasks/filler.txt`, the sentences that fill long contexts, and `tasks/held_out.txt`, held-out documents for the
quality bench. Both are part of the published demo, whose network was trained with this filler.

What "held out" means: corpus.bin, from which training takes its prose, has no held-out document. Two things are drawn from all documents
all the same. The tokenizer's sample has a third of the held-out ones (8 of the 19 in held_out.txt): they had a say in its merges. And 21
of the 1,600 sentences of filler.txt occur only in held-out documents, so that training sees them one by one; documents with such a
sentence are not in held_out.txt.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.model.demo.tasks.filler import tokenizer
from forebay.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """A Debian package, the upstream version that the published network was trained with, its licence (its text is in LICENSES/), and
    what is used of it."""

    package: str
    version: str
    licence: str
    used: str


SOURCES = (
    Source("python3.11-doc", "3.11.2", "PSF License Version 2, Copyright Python Software Foundation", "the sources of the documentation"),
    Source("wordnet-base", "1:3.0", "WordNet 3.0 licence, Copyright Princeton University", "definitions and example sentences"),
)
HELD_OUT = 50  # every 50th document
DOCUMENT_CHARS = 4000  # longer sections are cut at paragraphs
DEFINITIONS = 24  # per document
CHAPTERS = ("tutorial", "library", "reference", "howto", "faq", "using", "extending", "installing", "distributing")
FILLER_SENTENCES = 1600
HELD_OUT_BYTES = 40_000  # of tasks/held_out.txt

HEADING = re.compile(r"^(.+)\n([=\-~^\"*+#'`.])\2{2,}$", re.MULTILINE)
ROLE = re.compile(r":[a-z:+-]+:`[!~]?([^`<]*?)(?: ?<[^`>]*>)?`")
LINK = re.compile(r"`([^`<]*?) ?<[^`>]*>`_+")


def archive_name(package: str, version: str) -> str:
    """The file that apt downloads for this version of a package without machine code."""
    return f"{package}_{version.replace(':', '%3a')}_all.deb"


def fetch(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """Fetch the packages into `folder` and unpack each version into a folder of its own, so that versions do not mix.

    Returns:
        exact versions by package.
        where each of SOURCES is unpacked.
    """
    versions, roots = {}, []
    for source in SOURCES:
        policy = subprocess.run(["apt-cache", "policy", source.package], check=True, capture_output=True, text=True).stdout
        found = re.search(r"Candidate: (\S+)", policy)
        if not found or found[1] == "(none)":
            raise SystemExit(f"the package {source.package} is not to be had here: run apt-get update, or use Debian 12")
        versions[source.package] = found[1]
        if not found[1].startswith(source.version):
            print(f"{source.package} is {found[1]}, the published network was trained with {source.version}")
        archive = folder / archive_name(source.package, found[1])
        if not archive.exists():
            wanted = f"{source.package}={found[1]}"
            subprocess.run(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", wanted], cwd=folder, check=True)
        roots.append(archive.with_suffix(""))
        subprocess.run(["dpkg-deb", "-x", str(archive), str(roots[-1])], check=True)
    return versions, roots


def documentation(root: Path) -> Iterator[str]:
    """Sections of the Python documentation as plain text."""
    base = next(iter(sorted(root.glob("usr/share/doc/python3*/html/_sources"))), None)
    if base is None:
        raise SystemExit(f"no sources of the Python documentation in {root} (looked for usr/share/doc/python3*/html/_sources)")
    for chapter in CHAPTERS:
        for file in sorted((base / chapter).rglob("*.txt")):
            yield from sections(file.read_text("utf-8"))


def sections(text: str) -> Iterator[str]:
    """Documents of one reST file: paragraphs without markup, cut where a heading stands and where they get long.

    Left out are directives (their first paragraph: a body after an empty line is text), fields without arguments, simple tables, line
    blocks, lines over titles, and documents of at most 200 characters. Roles and links leave their text, literals single backquotes,
    strong text its words. *Emphasis*, grid tables (their rows joined) and fields with arguments stay: the published network was trained
    with them.
    """
    text = HEADING.sub(lambda m: f"\n\n\0{m[1]}\n\n", text)
    text = LINK.sub(r"\1", ROLE.sub(r"\1", text)).replace("``", "`").replace("**", "")
    document: list[str] = []
    size = 0
    for paragraph in re.split(r"\n\s*\n", text):
        block = paragraph.strip("\n")
        if not block.strip() or re.match(r"\s*(\.\. |:[a-z-]+:|[=+|]{3}|\*{3})", block) or "|" in block[:3]:
            continue
        heading = block.lstrip().startswith("\0")
        if document and (heading or size > DOCUMENT_CHARS):
            if size > 200:
                yield "\n\n".join(document)
            document, size = [], 0
        block = block.lstrip().lstrip("\0") if heading else _dedent(block)
        document.append(block)
        size += len(block)
    if size > 200:
        yield "\n\n".join(document)


def _dedent(block: str) -> str:
    """Prose loses its line breaks, examples keep theirs."""
    lines = block.split("\n")
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    lines = [line[indent:].rstrip() for line in lines]
    code = any(line.startswith((">>>", "...", " ", "def ", "import ", "from ", "class ")) for line in lines)
    return "\n".join(lines) if code else " ".join(lines)


def definitions(root: Path) -> Iterator[str]:
    """Definitions of the words that were met in tagged texts, a few dozen of one field to a document."""
    folder = root / "usr/share/wordnet"
    for part in ("noun", "verb", "adj", "adv"):
        common = set()
        for line in (folder / f"index.{part}").read_text("utf-8").splitlines():
            fields = line.split()
            if not line.startswith(" ") and int(fields[-1 - int(fields[2])]) > 0:  # senses that occur in tagged texts
                common |= set(fields[-int(fields[2]) :][: int(fields[-1 - int(fields[2])])])
        fieldwise: dict[str, list[str]] = {}
        for line in (folder / f"data.{part}").read_text("utf-8").splitlines():
            if line.startswith(" ") or line[:8] not in common:
                continue
            head, _, gloss = line.partition(" | ")
            columns = head.split()
            words = [columns[4 + 2 * i].split("(")[0].replace("_", " ") for i in range(min(2, int(columns[3], 16)))]
            fieldwise.setdefault(columns[1], []).append(f"{' or '.join(words)}: {gloss.strip()}")
        for _, entries in sorted(fieldwise.items()):
            for i in range(0, len(entries), DEFINITIONS):
                yield "\n".join(entries[i : i + DEFINITIONS])


def filler(root: Path) -> list[str]:
    """Plain sentences of the documentation, held-out documents included."""
    found = set()
    for document in documentation(root):
        for paragraph in document.split("\n\n"):
            for text in re.findall(r"(?:(?<=[.!?] )|^)[A-Z][A-Za-z ,'-]{50,160}\.(?= |$)", paragraph):
                found.add(text)
    return sorted(random.Random(5).sample(sorted(found), min(FILLER_SENTENCES, len(found))))


def held_out(documents: Sequence[str], sentences: Sequence[str]) -> str:
    """Held-out documents up to `HELD_OUT_BYTES`, each ending with a form feed; none of which a filler sentence was taken from."""
    out, size = [], 0
    for document in documents[HELD_OUT - 1 :: HELD_OUT]:
        if any(text in document for text in sentences):
            continue
        size += len(document.encode()) + 2
        if size > HELD_OUT_BYTES:
            break
        out.append(f"{document}\n\f")
    return "".join(out)


def texts(folder: Path) -> Iterator[str]:
    """Documents that `write` left in `folder`."""
    with (folder / "texts.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def tokenise(folder: Path, served: Tokenizer) -> None:
    """Write corpus.bin: all documents but every `HELD_OUT`th."""
    documents = [text for i, text in enumerate(texts(folder), 1) if i % HELD_OUT]
    assert served.bos_id is not None and served.eos_id is not None
    tokens: list[int] = []
    for ids in served.encode_many(documents):
        tokens += [served.bos_id, *ids, served.eos_id]
    np.array(tokens, dtype=np.uint16).tofile(folder / "corpus.bin")
    print(f"corpus.bin: {len(tokens)} tokens, {sum(len(text.encode()) for text in documents) / len(tokens):.2f} bytes per token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the corpus goes")
    parser.add_argument("--filler", action="store_true", help="write tasks/filler.txt and tasks/held_out.txt anew")
    parser.add_argument("--texts-only", action="store_true", help="stop before the tokenizer is needed")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    versions, (python, wordnet) = fetch(folder)
    (folder / "sources.json").write_text(json.dumps(versions, indent=1) + "\n")
    documents = [*documentation(python), *definitions(wordnet)]
    random.Random(3).shuffle(documents)
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(document, ensure_ascii=False) + "\n")
    print(f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.1f} million characters")
    if options.filler:
        target, sentences = Path(__file__).parent.parent / "tasks", filler(python)
        (target / "filler.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
        (target / "held_out.txt").write_text(held_out(documents, sentences), encoding="utf-8")
    if not options.texts_only:
        tokenise(folder, tokenizer())


if __name__ == "__main__":
    main()
