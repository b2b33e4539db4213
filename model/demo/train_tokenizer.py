"""How `tokenizer.json` beside this file was made: `python -m forebay.model.demo.train_tokenizer [OUTPUT]`.

A byte-level BPE of 4,096 entries with the pre-tokeniser of the released model and the special tokens of its encoding
(spec/chat-encoding.md §2-3) at small ids. The training text is the language reference, the docstrings and some source of
the Python standard library (Copyright Python Software Foundation, PSF License Version 2), of the interpreter that runs
this. The result is committed and part of the demo checkpoint's identity: running this under another Python version
gives another tokenizer and so another demo network.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
# Of the encoding, none hidden by `skip_special_tokens`; the last one is not normalised, as in the released file.
PLAIN = (
    "<｜System｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>",
    "<｜read_url｜>", "<｜deepseek_image｜>",
)  # fmt: skip
# Grounding marks: flagged special in the released file although they belong to the visible answer.
GROUNDING = tuple(f"<｜{slash}{name}｜>" for name in ("polygon", "point", "box", "ref") for slash in ("/", ""))
SOURCES = ("argparse", "ast", "dataclasses", "functools", "json/decoder", "pathlib", "random", "statistics", "textwrap", "typing")
WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> Iterator[str]:
    """Texts in a fixed order."""
    for _, text in sorted(topics.topics.items()):
        yield text
    library = Path(sysconfig.get_path("stdlib"))
    for name in SOURCES:
        yield (library / f"{name}.py").read_text("utf-8")
    for file in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield docstring


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PLAIN) - len(GROUNDING),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in FIRST],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    for text in PLAIN:
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=text != PLAIN[-1])])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in GROUNDING])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


if __name__ == "__main__":
    train().save(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("tokenizer.json")), pretty=False)
