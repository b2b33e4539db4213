from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.engine.output import OutputProcessor, StopMatcher
from forebay.model.chat import Delta, OutputParser, ParseOptions
from forebay.model.tokenizer import Tokenizer
from turns import Heard, byte_ids, heard, sampled

THINK = ParseOptions("reasoning")
TOOLS = ParseOptions("content", tools=True)
CALL = '\n\n<⟦D⟧ calls>\n<⟦D⟧ invoke name="f">\n<⟦D⟧ parameter name="a" string="true">{}</⟦D⟧ parameter>\n</⟦D⟧ invoke>\n</⟦D⟧ calls>'


@pytest.fixture(scope="module")
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.load(repository / "tests" / "data" / "noise-tokenizer.json")


def processor(tokenizer: Tokenizer, stop: Sequence[str] = (), options: ParseOptions | None = None, **more: bool) -> OutputProcessor:
    parser = OutputParser(tokenizer, options) if options else None
    return OutputProcessor(tokenizer, stop, tokenizer.stop_ids, parser=parser, **more)


def run(output: OutputProcessor, ids: Sequence[int], reason: str = "length") -> Heard:
    """Push until the choice ends by itself or `ids` are used up."""
    deltas: list[Delta] = []
    for token_id in ids:
        deltas += output.push(token_id)
        if output.finished:
            break
    else:
        deltas += output.finish(reason)  # type: ignore[arg-type]
    result = heard(deltas, output.finish_reason)
    assert result.content == output.text
    return result


def cut_by_hand(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Text before the stop that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


@pytest.mark.case("B064")
def test_stop_strings_in_any_cut(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    matched = 0
    for _ in range(1500):
        text = "".join(draw.choice("aab漢\n ") for _ in range(draw.randint(0, 24)))
        lengths = [draw.randint(1, draw.choice([2, 4, 12])) for _ in range(draw.randint(1, 4))]
        stops = ["".join(draw.choice("aab漢\n ") for _ in range(length)) for length in lengths]
        expected, hit = cut_by_hand(text, stops)
        matched += hit is not None
        for cut in ("whole", "bytes", draw):
            output = processor(tokenizer, stops)
            got = run(output, sampled(tokenizer, text, cut))
            assert got == Heard(content=expected, finish_reason="stop" if hit else "length"), (text, stops)
            assert output.matched_stop == hit
            assert output.finished == ("stop" if hit else None)
    assert 300 < matched < 1400


@pytest.mark.case("B064")
def test_nothing_of_a_stop_is_ever_sent(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, ["STOP!", "STORE"])
    sent = ""
    for char in "a STO":
        sent += "".join(delta.text for delta in output.push(byte_ids(tokenizer, char.encode())[0]))
    assert sent == "a "
    assert [delta.text for delta in output.push(byte_ids(tokenizer, b"N")[0])] == ["STON"]  # neither stop any more
    for char in "E STOR":
        sent += "".join(delta.text for delta in output.push(byte_ids(tokenizer, char.encode())[0]))
    assert sent == "a E "
    assert output.push(byte_ids(tokenizer, b"E")[0]) == []
    assert (output.finished, output.finish_reason, output.matched_stop) == ("stop", "stop", "STORE")
    assert output.push(byte_ids(tokenizer, b"x")[0]) == output.finish("length") == []
    assert output.finish_reason == "stop"


@pytest.mark.case("B064")
def test_no_more_is_held_than_may_match() -> None:
    matcher = StopMatcher(["abab", "bc"])
    assert matcher.feed("xaba") == ("x", None)
    assert matcher.feed("a") == ("aba", None)
    assert matcher.feed("b") == ("", None)
    assert matcher.flush() == "ab"
    assert matcher.feed("c") == ("c", None)  # what was flushed is no part of a match


def test_stop_string_may_be_kept(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, ["END"], include_stop=True)
    assert run(output, sampled(tokenizer, "the END of")).content == "the END"


def test_stop_ids(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    assert run(output, [*tokenizer.encode("done"), tokenizer.eos_id, *tokenizer.encode("x")]) == Heard(content="done", finish_reason="stop")
    assert (output.finished, output.matched_stop) == ("stop", None)
    output = processor(tokenizer, ["never"])
    assert run(output, [*tokenizer.encode("done nev"), tokenizer.user_id]) == Heard(content="done nev", finish_reason="stop")
    assert output.matched_stop == tokenizer.user_id
    chosen = tokenizer.encode("x")[0]
    output = OutputProcessor(tokenizer, [], frozenset({chosen}), parser=None)
    ids = [*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b"), chosen]
    assert run(output, ids) == Heard(content="ab", finish_reason="stop")


@pytest.mark.case("B064")
def test_stop_strings_apply_to_answers_only(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, ["x"], THINK)
    assert run(output, sampled(tokenizer, "a x b⟦/think⟧c x d")) == Heard("a x b", "c ", [], "stop")
    output = processor(tokenizer, ["x", "calls", "\n\n"], TOOLS)
    called = run(output, [*sampled(tokenizer, "c" + CALL.format("an x")), tokenizer.eos_id])
    assert called == Heard("", "c", [("f", '{"a": "an x"}')], "tool_calls")
    output = processor(tokenizer, ["x"], TOOLS)
    assert run(output, sampled(tokenizer, "an x" + CALL.format("b"))) == Heard("", "an ", [], "stop")
    # Held for a stop, given back when a call follows.
    output = processor(tokenizer, ["end."], TOOLS)
    called = run(output, [*sampled(tokenizer, "the en" + CALL.format("b")), tokenizer.eos_id])
    assert called == Heard("", "the en", [("f", '{"a": "b"}')], "tool_calls")
    # Newlines that might precede a call count when none does.
    for end in ([tokenizer.eos_id], tokenizer.encode("b")):
        output = processor(tokenizer, ["\n\n"], TOOLS)
        assert run(output, [*tokenizer.encode("a\n\n"), *end]) == Heard("", "a", [], "stop")
        assert output.matched_stop == "\n\n"


@pytest.mark.case("B065")
def test_characters_over_several_tokens(tokenizer: Tokenizer) -> None:
    text = "👩‍👩‍👧‍👦 🇫🇷 e\u0301 漢字"
    ids = byte_ids(tokenizer, text.encode())
    for options in (None, THINK, TOOLS):
        output = processor(tokenizer, ["never"], options)
        result = run(output, ids)
        assert result.content + result.reasoning == text
        assert "\ufffd" not in text
        for end in ("length", tokenizer.eos_id):
            output = processor(tokenizer, [], options)
            cut = run(output, [*ids[:-1], end] if isinstance(end, int) else ids[:-1])
            assert cut.content + cut.reasoning == text[:-1] + "\ufffd" == tokenizer.decode(ids[:-1])
    # A stop string of characters that come in pieces.
    output = processor(tokenizer, ["字"])
    assert run(output, ids).content == text[:-1]


@pytest.mark.case("B058")
def test_ends_of_reasoning(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_id
    for turn, end, expected in (
        ("⟦/think⟧yes", eos, Heard("", "yes", [], "stop")),
        ("why", eos, Heard("why", "", [], "stop")),
        ("why", None, Heard("why", "", [], "length")),
        ("why⟦/think⟧yes⟦/think⟧", eos, Heard("why", "yes", [], "stop")),
    ):
        output = processor(tokenizer, [], THINK)
        assert run(output, sampled(tokenizer, turn) + ([end] if end is not None else [])) == expected
        assert output.reasoning_tokens == len(tokenizer.encode(expected.reasoning))


@pytest.mark.case("B058")
def test_end_of_sentence_is_never_text(tokenizer: Tokenizer) -> None:
    for options in (None, THINK, TOOLS):
        parser = OutputParser(tokenizer, options) if options else None
        output = OutputProcessor(tokenizer, [], frozenset(), parser=parser)  # ignore_eos
        result = run(output, [*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")])
        assert result.content + result.reasoning == "ab"


@pytest.mark.case("B074")
@pytest.mark.parametrize(("reason", "expected"), [("stop", "tool_calls"), ("length", "length"), ("abort", "abort"), ("error", "error")])
def test_finish_reasons(tokenizer: Tokenizer, reason: str, expected: str) -> None:
    result = run(processor(tokenizer, [], TOOLS), sampled(tokenizer, CALL.format("b")), reason)
    assert result == Heard("", "", [("f", '{"a": "b"}')], expected)
    without = run(processor(tokenizer, [], TOOLS), sampled(tokenizer, "no call"), reason)
    assert without.finish_reason == reason


def test_raw_text_shows_markers(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    assert run(output, sampled(tokenizer, "a⟦/think⟧<⟦D⟧ calls>")).content == "a</think><｜DSML｜ calls>"
    assert output.reasoning_tokens == 0


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_long_text_is_whole_and_held_in_few_pieces(tokenizer: Tokenizer, stop: list[str]) -> None:
    output = processor(tokenizer, stop)
    ids = tokenizer.encode("water ") * 2000
    deltas = [delta.text for token_id in ids for delta in output.push(token_id)]
    assert output.text == "".join(deltas) == tokenizer.decode(ids)
    assert len(output._content) + len(output._pieces) < len(ids) / 100 + 256
