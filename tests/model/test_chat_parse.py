"""Turns written and miswritten by a model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from forebay.model.chat import OutputParser, ParseOptions
from forebay.model.tokenizer import Tokenizer
from turns import Heard, heard, parse, sampled

THINK = ParseOptions("reasoning")
PLAIN = ParseOptions("content")
TOOLS = ParseOptions("reasoning", tools=True)
ANSWER = ParseOptions("content", tools=True)
KNOWN = ParseOptions("content", tools=True, properties={"f": frozenset({"a", "b"}), "g": frozenset({"input"})})
JSON = ParseOptions("reasoning", json=True)


def param(name: str, value: str, string: bool = True) -> str:
    return f'<⟦D⟧ parameter name="{name}" string="{str(string).lower()}">{value}</⟦D⟧ parameter>\n'


def invoke(*params: str, name: str = "f") -> str:
    return f'<⟦D⟧ invoke name="{name}">\n' + ("".join(params) or "\n") + "</⟦D⟧ invoke>\n"


def block(*invokes: str) -> str:
    return "\n\n<⟦D⟧ calls>\n" + "".join(invokes) + "</⟦D⟧ calls>"


@pytest.fixture(scope="module")
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.load(repository / "tests" / "data" / "noise-tokenizer.json")


CASES: list[tuple[str, ParseOptions, str, str, Heard]] = [
    # name, options, turn, reason of the end, what the client has
    ("plain", THINK, "\nwhy\n\n⟦/think⟧\n\nbecause\n", "stop", Heard("why", "because\n", [], "stop")),
    ("never_closed", THINK, "why\n", "stop", Heard("why\n", "", [], "stop")),
    ("cut_in_reasoning", THINK, "why", "length", Heard("why", "", [], "length")),
    ("closed_twice", THINK, "a⟦/think⟧b⟦/think⟧c", "stop", Heard("a", "bc", [], "stop")),
    ("opened_again", THINK, "⟦think⟧a⟦think⟧b⟦/think⟧c⟦think⟧d", "stop", Heard("ab", "c<think>d", [], "stop")),
    ("no_thinking", PLAIN, "\n\nhi⟦/think⟧ you", "stop", Heard("", "hi you", [], "stop")),
    ("typed_close", THINK, "a</think>b⟦/think⟧c", "stop", Heard("a</think>b", "c", [], "stop")),
    ("angle_before_close", TOOLS, "a\n<⟦/think⟧b", "stop", Heard("a\n<", "b", [], "stop")),
    ("angles", TOOLS, "a < b </ c\n\n⟦/think⟧d <\n\n< e </", "stop", Heard("a < b </ c", "d <\n\n< e </", [], "stop")),
    ("no_tools", PLAIN, "a" + block(invoke()), "stop", Heard("", "a" + block(invoke()).replace("⟦D⟧", "｜DSML｜"), [], "stop")),
    ("one_call", TOOLS, "r⟦/think⟧a" + block(invoke(param("a", "x"))), "stop", Heard("r", "a", [("f", '{"a": "x"}')], "tool_calls")),
    ("call_cut_off", ANSWER, block(invoke(param("a", "x"))), "length", Heard("", "", [("f", '{"a": "x"}')], "length")),
    ("two_calls", ANSWER, block(invoke(), invoke(param("b", " [1] ", False), name="g")), "stop",
     Heard("", "", [("f", "{}"), ("g", '{"b": [1]}')], "tool_calls")),
    ("in_reasoning", TOOLS, "r" + block(invoke()) + "⟦/think⟧x", "stop", Heard("r", "", [("f", "{}")], "tool_calls")),
    ("bare_invoke", ANSWER, "a\n\n" + invoke(), "stop", Heard("", "a", [("f", "{}")], "tool_calls")),
    ("bare_parameter", ANSWER, "a" + param("a", "x").strip(), "stop",
     Heard("", 'a<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>', [], "stop")),
    ("old_names", ANSWER, '<⟦D⟧tool_calls><⟦D⟧invoke name="f"></⟦D⟧invoke></⟦D⟧tool_calls>', "stop",
     Heard("", "", [("f", "{}")], "tool_calls")),
    ("after_the_block", ANSWER, block(invoke()) + "tail" + block(invoke()), "stop", Heard("", "", [("f", "{}")], "tool_calls")),
    ("between", ANSWER, block("junk", invoke(), "junk </x>", invoke(name="g")), "stop",
     Heard("", "", [("f", "{}"), ("g", "{}")], "tool_calls")),
    ("self_closing", ANSWER, block('<⟦D⟧ invoke name="f"/>'), "stop", Heard("", "", [("f", "{}")], "tool_calls")),
    ("body_is_json", ANSWER, block('<⟦D⟧ invoke name="f">\n{"a": 1}\n</⟦D⟧ invoke>'), "stop",
     Heard("", "", [("f", '{"a": 1}')], "tool_calls")),
    ("body_is_not", ANSWER, block('<⟦D⟧ invoke name="f">\n[1]\n</⟦D⟧ invoke>'), "stop", Heard("", "", [("f", "{}")], "tool_calls")),
    ("values", ANSWER,
     block(invoke(param("a", "\n x\t\"\\é\x01"), param("b", "1.0", False), param("c", "", False), param("d", "NaN", False))), "stop",
     Heard("", "", [("f", '{"a": "\\n x\\t\\"\\\\é\\u0001", "b": 1.0, "c": "", "d": "NaN"}')], "tool_calls")),
    ("big_number", ANSWER, block(invoke(param("a", "12345678901234567890123", False))), "stop",
     Heard("", "", [("f", '{"a": 12345678901234567890123}')], "tool_calls")),
    ("empty_string", ANSWER, block(invoke(param("a", ""))), "stop", Heard("", "", [("f", '{"a": ""}')], "tool_calls")),
    ("no_string_attribute", ANSWER, block(invoke('<⟦D⟧ parameter name="a">5</⟦D⟧ parameter>')), "stop",
     Heard("", "", [("f", '{"a": 5}')], "tool_calls")),
    ("duplicates", ANSWER, block(invoke(param("a", "1"), param("a", "2"), param("a", "3", False))), "stop",
     Heard("", "", [("f", '{"a": "1"}')], "tool_calls")),
    ("markup_in_value", ANSWER, block(invoke(param("a", "x > y 2>&1 </ < </｜DSML｜ parameter> ⟦/think⟧⟦think⟧ ⟦D⟧ <⟦D⟧ call> z"))), "stop",
     Heard("", "", [("f", '{"a": "x > y 2>&1 </ < </｜DSML｜ parameter> </think><think> ｜DSML｜ <｜DSML｜ call> z"}')], "tool_calls")),
    ("next_parameter", ANSWER,
     block('<⟦D⟧ invoke name="f">\n<⟦D⟧ parameter name="a" string="true">x\n', param("b", "2", False), "</⟦D⟧ invoke>"), "stop",
     Heard("", "", [("f", '{"a": "x\\n", "b": 2}')], "tool_calls")),
    ("invoke_ends_parameter", ANSWER, block('<⟦D⟧ invoke name="f">\n<⟦D⟧ parameter name="a" string="true">x</⟦D⟧ invoke>'), "stop",
     Heard("", "", [("f", '{"a": "x"}')], "tool_calls")),
    ("block_ends_all", ANSWER, block('<⟦D⟧ invoke name="f">\n<⟦D⟧ parameter name="a" string="true">x'), "stop",
     Heard("", "", [("f", '{"a": "x"}')], "tool_calls")),
    ("next_invoke", ANSWER, block('<⟦D⟧ invoke name="f">\n', param("a", "x"), invoke(name="g")), "stop",
     Heard("", "", [("f", '{"a": "x"}'), ("g", "{}")], "tool_calls")),
    ("open_value", ANSWER, '<⟦D⟧ calls><⟦D⟧ invoke name="f"><⟦D⟧ parameter name="a" string="true">x<', "stop",
     Heard("", "", [("f", '{"a": "x<')], "tool_calls")),
    ("open_json_value", ANSWER, '<⟦D⟧ calls><⟦D⟧ invoke name="f"><⟦D⟧ parameter name="a" string="false">1}', "stop",
     Heard("", "", [("f", '{"a": ')], "tool_calls")),
    ("open_invoke", ANSWER, '<⟦D⟧ calls><⟦D⟧ invoke name="f">' + param("a", "x"), "length", Heard("", "", [("f", '{"a": "x"')], "length")),
    ("open_invoke_empty", ANSWER, '<⟦D⟧ calls><⟦D⟧ invoke name="f">\n', "stop", Heard("", "", [("f", "{")], "tool_calls")),
    ("open_tag", ANSWER, 'a\n\n<⟦D⟧ calls>\n<⟦D⟧ invoke name="f', "stop", Heard("", "a", [], "stop")),
    ("open_block", ANSWER, "a\n\n<⟦D⟧ calls>", "stop", Heard("", "a", [], "stop")),
    ("open_block_tag", ANSWER, "a\n\n<⟦D⟧ cal", "length", Heard("", "a", [], "length")),
    ("unknown_tag", ANSWER, "a\n\n<⟦D⟧ callsign> b", "stop", Heard("", "a\n\n<｜DSML｜ callsign> b", [], "stop")),
    ("no_tag", TOOLS, "a <⟦D⟧, b⟦D⟧⟦/think⟧c</⟦D⟧ calls>", "stop", Heard("a <｜DSML｜, b｜DSML｜", "c</｜DSML｜ calls>", [], "stop")),
    ("nameless", ANSWER, "a<⟦D⟧ invoke nam=\"f\">", "stop", Heard("", 'a<｜DSML｜ invoke nam="f">', [], "stop")),
    ("endless_attribute", ANSWER, 'a<⟦D⟧ invoke name="' + "y" * 5000, "stop",
     Heard("", 'a<｜DSML｜ invoke name="' + "y" * 5000, [], "stop")),
    ("long_attribute", ANSWER, f'<⟦D⟧ invoke name="{"y" * 4000}"/>', "stop", Heard("", "", [("y" * 4000, "{}")], "tool_calls")),
    ("too_long_attribute", ANSWER, f'<⟦D⟧ invoke name="{"y" * 4200}"/>', "stop",
     Heard("", f'<｜DSML｜ invoke name="{"y" * 4200}"/>', [], "stop")),
    ("unquoted_rest", ANSWER, "see <⟦D⟧ calls, which", "stop", Heard("", "see <｜DSML｜ calls, which", [], "stop")),
    ("wrapped", KNOWN, block(invoke(param("arguments", '{"a": 1, "b": "x"}', False))), "stop",
     Heard("", "", [("f", '{"a": 1, "b": "x"}')], "tool_calls")),
    ("wrapped_as_string", KNOWN, block(invoke(param("input", '{"a": 1}'))), "stop", Heard("", "", [("f", '{"a": 1}')], "tool_calls")),
    ("wrapped_foreign", KNOWN, block(invoke(param("input", '{"c": 1}', False))), "stop",
     Heard("", "", [("f", '{"input": {"c": 1}}')], "tool_calls")),
    ("wrapped_with_more", KNOWN, block(invoke(param("input", '{"a": 1}', False), param("b", "2"))), "stop",
     Heard("", "", [("f", '{"input": {"a": 1}, "b": "2"}')], "tool_calls")),
    ("wrapped_open", KNOWN, '<⟦D⟧ invoke name="f">' + param("input", '{"a": 1}', False), "stop",
     Heard("", "", [("f", '{"input": {"a": 1}')], "tool_calls")),
    ("input_declared", KNOWN, block(invoke(param("input", '{"a": 1}', False), name="g")), "stop",
     Heard("", "", [("g", '{"input": {"a": 1}}')], "tool_calls")),
    ("forced", ParseOptions("calls", tools=True), invoke(param("a", "x")) + "</⟦D⟧ calls>", "stop",
     Heard("", "", [("f", '{"a": "x"}')], "tool_calls")),
    ("continued", ParseOptions("content", continues=True), "\n\nb", "stop", Heard("", "\n\nb", [], "stop")),
    ("grounding", PLAIN, "<｜ref｜>cat<｜/ref｜>", "stop", Heard("", "<｜ref｜>cat<｜/ref｜>", [], "stop")),
    ("fenced_json", JSON, "so\n```json\n⟦/think⟧\n```json\n{\"a\": \"```\"}\n```\n", "stop",
     Heard("so\n```json", '{"a": "```"}', [], "stop")),
    ("bare_json", JSON, "⟦/think⟧{\"a\": 1}\n", "stop", Heard("", '{"a": 1}\n', [], "stop")),
    ("fence_cut_off", JSON, "⟦/think⟧``", "length", Heard("", "``", [], "length")),
]  # fmt: skip


@pytest.mark.case("B056")
@pytest.mark.case("B058")
@pytest.mark.case("B074")
@pytest.mark.case("B076")
@pytest.mark.parametrize(("options", "turn", "reason", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_turns_in_any_cut(tokenizer: Tokenizer, options: ParseOptions, turn: str, reason: str, expected: Heard) -> None:
    draw = random.Random(2)
    for cut in ("whole", "bytes", draw, draw, draw, draw):
        assert parse(tokenizer, turn, options, reason, cut) == expected


@pytest.mark.case("B054")
def test_every_token_of_a_string_argument_is_sent_at_once(tokenizer: Tokenizer) -> None:
    value = 'line "quoted" \\ and\nmore </b > 2>&1\n' * 140
    assert len(value) > 4000
    parser = OutputParser(tokenizer, ANSWER)
    deltas = [d for i in sampled(tokenizer, '<⟦D⟧ calls>\n<⟦D⟧ invoke name="write">\n') for d in parser.push(i)]
    assert [(d.name, d.text) for d in deltas] == [("write", "")]
    deltas += [d for i in sampled(tokenizer, '<⟦D⟧ parameter name="text" string="true">') for d in parser.push(i)]
    streamed = 0
    ids = tokenizer.encode(value)
    for token_id in ids:
        fresh = parser.push(token_id)
        streamed += bool(fresh)
        deltas += fresh
    waiting = sum(tokenizer.token_text(token_id).endswith(("<", "</")) for token_id in ids)  # these may open a tag
    assert streamed == len(ids) - waiting > 1000
    deltas += [d for i in sampled(tokenizer, "</⟦D⟧ parameter>\n</⟦D⟧ invoke>\n</⟦D⟧ calls>") for d in parser.push(i)]
    assert parser.finish("stop") == []
    assert json.loads(heard(deltas).calls[0][1]) == {"text": value}


def test_call_ids_differ_between_turns(tokenizer: Tokenizer) -> None:
    seen = set()
    for _ in range(20):
        parser = OutputParser(tokenizer, ANSWER)
        deltas = [d for i in sampled(tokenizer, block(invoke(), invoke())) for d in parser.push(i)]
        seen |= {d.call_id for d in deltas if d.call_id}
    assert len(seen) == 40


def test_channel_and_reasoning_tokens(tokenizer: Tokenizer) -> None:
    parser = OutputParser(tokenizer, TOOLS)
    why = tokenizer.encode("because of this\n\n")
    for token_id in why:
        assert parser.channel == "reasoning"
        parser.push(token_id)
    parser.push(tokenizer.think_end_id or 0)
    assert (parser.channel, parser.reasoning_tokens) == ("content", len(why))
    for token_id in sampled(tokenizer, "so" + block(invoke())):
        parser.push(token_id)
    assert (parser.channel, parser.reasoning_tokens) == ("tool_calls", len(why))

    recovered = OutputParser(tokenizer, TOOLS)
    for token_id in why + sampled(tokenizer, "<⟦D⟧ calls>"):
        recovered.push(token_id)
    assert (recovered.channel, recovered.reasoning_tokens) == ("tool_calls", len(why) + 1)  # the `<` was read before it was known
    text = OutputParser(tokenizer, TOOLS)
    ids = why + sampled(tokenizer, "<⟦D⟧ unknown>")
    for token_id in ids:
        text.push(token_id)
    assert text.reasoning_tokens == len(ids)


@pytest.mark.case("B065")
def test_bytes_cut_by_a_marker(tokenizer: Tokenizer) -> None:
    parser = OutputParser(tokenizer, THINK)
    half = sampled(tokenizer, "a漢", "bytes")[:-1]
    deltas = [d for i in [*half, tokenizer.think_end_id or 0, *sampled(tokenizer, "b漢", "bytes")] for d in parser.push(i)]
    assert heard(deltas) == Heard("a\ufffd", "b漢")


def test_random_turns_do_not_depend_on_the_cut(tokenizer: Tokenizer) -> None:
    draw = random.Random(4)
    pieces = [
        "⟦D⟧", "⟦/think⟧", "⟦think⟧", "<", "</", ">", "\n", "\n\n",
        " calls>", " invoke", ' name="f"', ' name="a"', " parameter", ' string="true"',
        ' string="false"', "1", "x", '"', "/", "漢",
        "<⟦D⟧ calls>\n", '<⟦D⟧ invoke name="f">\n', "</⟦D⟧ invoke>", "</⟦D⟧ calls>",
        '<⟦D⟧ parameter name="a" string="true">', '<⟦D⟧ parameter name="input" string="false">',
        "</⟦D⟧ parameter>", '{"a": 1}', "```", "```json\n",
    ]  # fmt: skip
    for _ in range(1500):
        turn = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 14)))
        options = draw.choice([THINK, PLAIN, TOOLS, ANSWER, KNOWN, JSON, ParseOptions("calls", tools=True, max_calls=1)])
        whole = parse(tokenizer, turn, options)
        assert parse(tokenizer, turn, options, cut="bytes") == whole, turn
        assert parse(tokenizer, turn, options, cut=draw) == whole, turn
        for _, arguments in whole.calls[:-1]:  # only the last call can be open at the end
            assert isinstance(json.loads(arguments), dict), turn
