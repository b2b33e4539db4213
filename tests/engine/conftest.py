"""A compiler of grammars over the demo's tokenizer, one for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.model.tokenizer import Tokenizer
from noise_model import TOKENIZER


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer)
    yield compiler
    compiler.close()
