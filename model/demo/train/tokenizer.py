"""How `checkpoint/tokenizer.json` was made: `python -m forebay.model.demo.train.tokenizer DATA_DIR OUTPUT`.

A byte-level BPE of 4,096 entries with the pre-tokeniser of the released model, except that every digit is a token of its own, and with
the special tokens of its encoding (spec/chat-encoding.md §2-3). It is trained on the kinds of text that the network is trained on: rendered
exercises without their markers, and every third document that `forebay.model.demo.train.corpus` left in DATA_DIR, held-out ones among them
(the quality bench's prose is new to the weights, but not all of it to the vocabulary). The result is committed and part of the checkpoint's
identity: it stays as it is when tasks change. It was trained on the tasks as they were before `quote` and before recall asked for one-word
subjects, so that a run today gives another one. It derives from texts of others: see NOTICE.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from forebay.model import tokenizer as served
from forebay.model.chat import ChatCodec
from forebay.model.demo.tasks import TASKS, Options
from forebay.model.demo.tasks.filler import sentence
from forebay.model.demo.tasks.recall import plant
from forebay.model.demo.train.corpus import texts

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
WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = 4
EXERCISES = 2500  # of each task
CORPUS_SHARE = 3  # every third document


def train(sample: Iterable[str], size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on `sample`; the special tokens get the same ids for the same size whatever the sample."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=max(0, size - len(PLAIN) - len(GROUNDING)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in FIRST],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    for text in PLAIN:
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=text != PLAIN[-1])])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in GROUNDING])
    return tokenizer


def exercises() -> Iterator[str]:
    """Texts between the markers of rendered exercises. The lengths of `recall` depend on the tokenizer, so it gives only its sentences."""
    bare = served.Tokenizer(train([], 0).to_str().encode(), "a vocabulary of bytes")
    codec = ChatCodec(bare)  # only for its texts
    marker = re.compile("|".join(re.escape(text) for text in (*FIRST, *PLAIN)))
    rng = random.Random(SEED)
    for task, make in TASKS.items():
        for _ in range(EXERCISES):
            if task == "recall":
                yield " ".join([*(fact.sentence for fact in plant(rng, 4, False)), *(sentence(rng) for _ in range(10))])
                continue
            c = make(rng, Options())
            finished = {**c.body, "messages": [*c.body["messages"], c.answer], "drop_thinking": False}
            yield from (text for text in marker.split(codec.encode(finished).text) if text)


def sample(folder: Path) -> Iterator[str]:
    """The training texts, in a fixed order."""
    yield from exercises()
    for i, text in enumerate(texts(folder)):
        if i % CORPUS_SHARE == 0:
            yield text


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("what is needed: the folder of demo-data, and the file to write")
    trained = train(sample(Path(sys.argv[1])))
    assert trained.get_vocab_size() == VOCAB_SIZE
    trained.save(sys.argv[2], pretty=False)
