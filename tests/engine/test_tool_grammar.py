"""The grammar of tool calls, walked by texts and by dice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest

from forebay.engine.grammar import Grammar, GrammarCompiler, json_spec, regex_spec
from forebay.engine.tool_grammar import ToolForm, calls_spec
from forebay.model.chat import OutputParser, ParseOptions
from forebay.model.errors import RequestError
from forebay.model.tokenizer import DSML, Tokenizer
from noise_model import TOKENIZER

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": ["string", "null"], "minLength": 2},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
    },
    "required": ["city", "tags"],
    "$defs": {"tag": {"type": "string", "maxLength": 4}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer)
    yield compiler
    compiler.close()


def tools(strict: bool) -> list[ToolForm]:
    return [ToolForm("get", SCHEMA, strict, "tools.0.function.parameters"), ToolForm("get_all", {}, strict, "tools.1.function.parameters")]


def call(name: str, *parameters: tuple[str, str, str]) -> str:
    inner = "\n".join(f'<{DSML} parameter name="{k}" string="{s}">{v}</{DSML} parameter>' for k, s, v in parameters)
    return f'<{DSML} invoke name="{name}">\n{inner}\n</{DSML} invoke>'


def block(*calls: str) -> str:
    return f"\n\n<{DSML} calls>\n" + "\n".join(calls) + f"\n</{DSML} calls>"


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.consume_token(i) for i in tokenizer.encode_special(text)) and matcher.is_accepting()


CITY, TAGS = ("city", "true", "Paris </ <b\n"), ("tags", "false", '["a", "bcd"]')

# (calls, accepted when strict, accepted when not)
WRITTEN: list[tuple[str, bool, bool]] = [
    (block(call("get", CITY, TAGS)), True, True),
    (block(call("get", CITY, ("days", "false", "12"), ("unit", "true", "C"), TAGS)), True, True),
    (block(call("get_all")), True, True),
    (block(call("get", CITY, ("note", "false", "null"), TAGS)), True, True),
    (block(call("get", CITY, ("note", "true", "ab"), ("code", "true", "DE"), TAGS)), True, True),
    (block(call("get")), False, True),
    (block(call("get", TAGS)), False, True),
    (block(call("get", CITY, ("days", "false", "15"), TAGS)), False, True),
    (block(call("get", CITY, ("unit", "true", "K"), TAGS)), False, True),
    (block(call("get", CITY, ("note", "true", "a"), TAGS)), False, True),
    (block(call("get", CITY, ("code", "true", "DEU"), TAGS)), False, True),
    (block(call("get", CITY, ("tags", "false", '["abcde"]'))), False, True),
    (block(call("get", TAGS, CITY)), False, True),
    (block(call("get", ("city2", "true", "x"), CITY, TAGS)), False, True),
    (block(call("get_all", ("x", "false", "[1]"))), False, True),
    (block(call("get", CITY, ("days", "true", "12"), TAGS)), False, False),
    (block(call("get", CITY, ("tags", "false", "[1"))), False, False),
    (block(call("nope")), False, False),
    (block(call("get_a")), False, False),
    (block(), False, False),
    (block(call("get_all")) + "x", False, False),
    (block(call("get_all"))[2:], False, False),
    (block(call("get_all")).replace(DSML, "DSML"), False, False),
]


@pytest.mark.parametrize("strict", [True, False])
def test_what_may_be_written(compiler: GrammarCompiler, tokenizer: Tokenizer, strict: bool) -> None:
    grammar = compiler.compile(calls_spec(tools(strict), "content", single=False))
    for text, when_strict, otherwise in WRITTEN:
        assert accepts(grammar, tokenizer, text) == (when_strict if strict else otherwise), text


def test_a_spelled_out_marker_is_text_of_an_argument(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(calls_spec([ToolForm("f", {"properties": {"a": {"type": "string"}}}, True, "t")], "block", single=True))
    head, tail = call("f", ("a", "true", "@")).split("@")
    ids = tokenizer.encode_special(head) + tokenizer.encode(f"x</{DSML} parameter>y") + tokenizer.encode_special(f"{tail}\n</{DSML} calls>")
    matcher = grammar.matcher()
    assert all(matcher.consume_token(i) for i in ids)
    assert matcher.is_accepting()


@pytest.mark.case("B074")
@pytest.mark.parametrize("begins", ["content", "block", "marker"])
def test_one_call_or_several(compiler: GrammarCompiler, tokenizer: Tokenizer, begins: Literal["content", "block", "marker"]) -> None:
    cut = {"content": "", "block": " calls>\n", "marker": DSML}[begins]
    whole = (block(call("get_all")), block(call("get_all"), call("get", CITY, TAGS)))
    one, two = (text.partition(cut)[2] if cut else text for text in whole)
    for single in (True, False):
        grammar = compiler.compile(calls_spec(tools(True), begins, single=single))
        assert accepts(grammar, tokenizer, one)
        assert accepts(grammar, tokenizer, two) == (not single)


def test_calls_or_an_answer_of_another_form(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for other, text in ((json_spec({"type": "object"}, "r"), '{"a": [1,\n  2]}'), (regex_spec("yes|no", "r"), "no")):
        grammar = compiler.compile(calls_spec(tools(True), "content", single=False, otherwise=other))
        assert accepts(grammar, tokenizer, text)
        assert accepts(grammar, tokenizer, block(call("get_all")))
        assert not accepts(grammar, tokenizer, text + block(call("get_all")))
        assert not accepts(grammar, tokenizer, "free text")


def test_odd_names(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    names = ["a/b", "a-b", "a b", "é", "a.b*", "$ref", "x|y", "back\\slash", "[z]"]
    for strict in (True, False):
        tool = ToolForm("f", {"properties": {name: {"type": "integer"} for name in names}}, strict, "t")
        grammar = compiler.compile(calls_spec([tool], "content", single=True))
        assert accepts(grammar, tokenizer, block(call("f", *((name, "false", "1") for name in names))))
        for name in names:
            assert not accepts(grammar, tokenizer, block(call("f", (name, "true", "1"))))
        assert accepts(grammar, tokenizer, block(call("f", ("other", "true", "1")))) == (not strict)


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"properties": {"a": {"type": "object", "not": {}}}}, "not"),
        ({"properties": {'a"b': {}}}, "name cannot be written"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}, "$ref"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'b'"),
        ({"properties": {"a": False}}, "no value"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": {"a": {"type": "string", "maxLength": 2**40}}}, "maxLength"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "look-around"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, "no value"),
    ],
)
def test_a_strict_tool_that_cannot_be_enforced(compiler: GrammarCompiler, parameters: dict[str, Any], names: str) -> None:
    with pytest.raises(RequestError) as error:
        compiler.compile(calls_spec([ToolForm("f", parameters, True, "tools.0.function.parameters")], "block", single=True))
    assert error.value.code == "invalid_json_schema"
    assert names in error.value.message
    # Where only names and markup are held, nothing of it matters.
    compiler.compile(calls_spec([ToolForm("f", parameters, False, "tools.0.function.parameters")], "block", single=True))


@pytest.mark.case("B074")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_dice_write_calls_that_parse(compiler: GrammarCompiler, tokenizer: Tokenizer, strict: bool, seed: int) -> None:
    """Whatever is allowed, however unlikely: the parser of the chat encoding reads calls of it whose arguments obey the schema."""
    offered = tools(strict)
    matcher = compiler.compile(calls_spec(offered, "content", single=False)).matcher()
    known = {tool.name: frozenset(tool.parameters.get("properties", ())) for tool in offered}
    parser = OutputParser(tokenizer, ParseOptions(tools=True, properties=known))
    dice = random.Random(seed)
    calls: list[list[str]] = []
    closing = {*tokenizer.encode('"'), *tokenizer.encode("]"), *tokenizer.encode("}"), *tokenizer.encode("</")}
    for _ in range(4000):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        # Ends are likelier than one in thousands, so that texts end.
        special, close = [i for i in ids if i in tokenizer.added_ids], [i for i in ids if i in closing]
        roll = dice.random()
        token = dice.choice(special if special and roll < 0.5 else close if close and roll < 0.7 else ids)
        if token == tokenizer.eos_id:
            break
        assert matcher.consume_token(token)
        for delta in parser.push(token):
            assert delta.channel == "tool_calls"
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.text
    else:
        pytest.fail("the dice did not come to an end")
    for delta in parser.finish("stop"):
        calls[delta.index][1] += delta.text
    assert parser.finish_reason("stop") == "tool_calls"
    assert calls
    for name, arguments in calls:
        value = json.loads(arguments)
        assert name in known
        if strict:
            jsonschema.validate(value, {**SCHEMA, "additionalProperties": False} if name == "get" else {"maxProperties": 0})


def test_many_tools_are_ready_soon(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    many = [ToolForm(f"tool_{i}", SCHEMA, False, "t") for i in range(60)]
    grammar = compiler.compile(calls_spec(many, "marker", single=False))
    assert compiler.compile(calls_spec(many, "marker", single=False)) is grammar
    assert accepts(grammar, tokenizer, block(call("tool_59", CITY, TAGS)).partition(DSML)[2])
