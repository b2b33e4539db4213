"""The grammar of tool calls, walked by texts and by dice."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest

from forebay.engine.grammar import Grammar, json_spec, regex_spec
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.tool_grammar import ToolForm, calls_spec
from forebay.engine.tool_values import MAX_NODES, ValueReader
from forebay.model.chat import OutputParser, ParseOptions
from forebay.model.errors import RequestError
from forebay.model.tokenizer import DSML, Tokenizer

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
        ({"properties": {"a": {"type": "string", "not": {"const": "b"}}}}, "not"),
        ({"properties": {"a": {"type": "string", "frobnicate": 1}}}, "frobnicate"),
        ({"properties": {"a": {"if": {"const": "a"}, "then": False}}}, "if, then"),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"allOf": [{"contentEncoding": "base64"}]}]}}}, "contentEncoding"),
        ({"properties": {"a": {"type": "string", "format": "klingon"}}}, "klingon"),
        ({"properties": {"a": {"type": "integer", "enum": ["a"]}}}, "no value"),
        ({"properties": {"a": {"enum": []}}}, "no value"),
        ({"properties": {"a": {"type": "string", "enum": ["abc"], "maxLength": 2}}}, "no value"),
        ({"properties": {"a": {"type": "string", "allOf": [{"pattern": "^a+$"}, {"pattern": "^b+$"}]}}}, "no answer"),
        ({"properties": {"a": {"type": "strin"}}}, "strin"),
        ({"properties": {"a": {"type": "string", "enum": "a"}}}, "enum"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, "oneOf"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "leads nowhere"),
        ({"properties": {"a" * 257: {}}}, "longer than 256"),
        ({"properties": {}, "additionalProperties": {"type": "integer"}}, "additionalProperties"),
    ],
)
def test_a_strict_tool_that_cannot_be_enforced(compiler: GrammarCompiler, parameters: dict[str, Any], names: str) -> None:
    with pytest.raises(RequestError) as error:
        compiler.compile(calls_spec([ToolForm("f", parameters, True, "tools.0.function.parameters")], "block", single=True))
    assert error.value.code == "invalid_json_schema"
    assert names in error.value.message
    # Where only names and markup are held, nothing of it matters.
    compiler.compile(calls_spec([ToolForm("f", parameters, False, "tools.0.function.parameters")], "block", single=True))


S: dict[str, Any] = {"type": "string"}
REF = {"$defs": {"S": {**S, "maxLength": 4}, "E": {"enum": ["a", "b", 1]}}}

# (schema of a property, texts that it allows, others that it does not): siblings hold together, whatever their order.
TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({**S, "anyOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c", ""]),
    ({"$ref": "#/$defs/S", "minLength": 2}, ["ab", "abcd"], ["a", "abcde"]),
    ({"anyOf": [S, {"type": "null"}], "maxLength": 2}, ["", "ab"], ["abc"]),
    ({**S, "enum": ["a", "bbbb"], "maxLength": 2}, ["a"], ["bbbb", "b"]),
    ({"allOf": [{**S, "maxLength": 2}, {"maxLength": 10}]}, ["ab"], ["abc"]),
    ({"allOf": [{"maxLength": 10}, {**S, "maxLength": 2}]}, ["ab"], ["abc"]),
    ({**S, "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "axb"], ["a", "b", "xab"]),
    ({"anyOf": [S, {"type": "integer"}], "enum": ["a", 1]}, ["a"], ["b", "1"]),
    ({"anyOf": [S], "oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"type": ["string", "null"], "enum": ["a"]}, ["a"], ["null", ""]),
    ({"$ref": "#/$defs/E", "enum": ["b", "c"]}, ["b"], ["a", "c"]),
    ({"const": "a", "enum": ["a", "b"]}, ["a"], ["b"]),
    ({"enum": ["aa", "b"], "pattern": "^a"}, ["aa"], ["b"]),
    ({"anyOf": [{**S, "maxLength": 1}, {**S, "minLength": 3}]}, ["a", "abc"], ["ab"]),
    ({**S, "minimum": 5, "description": "x", "nullable": True}, ["a"], []),
    ({**S, "format": "uuid"}, ["12345678-9abc-DEF0-1234-56789abcdef0"], ["x", "12345678"]),
    ({**S, "format": "date"}, ["2026-02-28", "2024-02-29", "2000-02-29", "2026-12-31"],
     ["2026-13-01", "today", "2026-02-29", "1900-02-29", "2026-11-31", "2026-02-30"]),
    ({**S, "format": "time"}, ["23:59:59Z", "01:02:03.5+01:00"], ["24:00:00Z", "1:2"]),
    ({**S, "format": "date-time"}, ["2026-02-28T23:59:59Z"], ["2026-02-28", "2026-02-28 x"]),
    ({**S, "format": "duration"}, ["P1D", "PT1H30M5S", "P2W"], ["1D"]),
    ({**S, "format": "email"}, ["a.b@example.com"], ["a@", "a b@c.de"]),
    ({**S, "format": "hostname"}, ["a-b.example"], ["-a", "a_b"]),
    ({**S, "format": "ipv4"}, ["192.168.0.255"], ["256.1.1.1", "1.2.3"]),
    ({**S, "format": "ipv6"}, ["::1", "2001:db8::8:800:200c:417a", "1:2:3:4:5:6:7:8", "::"], ["1:2", ":::", "12345::"]),
]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_all_that_restricts_a_text_of_a_strict_tool_holds(compiler: GrammarCompiler, tokenizer: Tokenizer, number: int) -> None:
    schema, good, bad = TEXTS[number]
    parameters = {"properties": {"a": schema}, "required": ["a"], **REF}
    grammar = compiler.compile(calls_spec([ToolForm("f", parameters, True, "t")], "content", single=True))
    judge = jsonschema.Draft202012Validator({**schema, **REF}, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in good:
        assert accepts(grammar, tokenizer, block(call("f", ("a", "true", text)))), text
        assert judge.is_valid(text), text
    for text in bad:
        assert not accepts(grammar, tokenizer, block(call("f", ("a", "true", text)))), text


@pytest.mark.parametrize("impossible", [False, {"enum": []}, {"anyOf": []}, {"type": []}])
def test_a_property_without_a_value_cannot_be_given(compiler: GrammarCompiler, tokenizer: Tokenizer, impossible: Any) -> None:
    for closed in (True, False):
        for others in ({}, {"y": {"type": "integer"}}):
            parameters = {"properties": {"x": impossible, **others}, "additionalProperties": not closed}
            grammar = compiler.compile(calls_spec([ToolForm("f", parameters, False, "t")], "content", single=True))
            assert accepts(grammar, tokenizer, block(call("f")))
            for string, value in (("true", "a"), ("false", "1")):
                assert not accepts(grammar, tokenizer, block(call("f", ("x", string, value))))
            # Nor may its tag be opened and never filled.
            head, _ = block(call("f", ("x", "true", "@"))).split('" string')
            assert not all(grammar_takes(grammar, tokenizer, head + '" string="'))
            assert accepts(grammar, tokenizer, block(call("f", ("y", "false", "1")))) == (bool(others) or not closed)


def grammar_takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> list[bool]:
    matcher = grammar.matcher()
    return [matcher.consume_token(i) for i in tokenizer.encode_special(text)]


def test_an_unknown_type_is_any(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    parameters = {"properties": {"x": {"type": "strin"}, "y": {"type": 5}}}
    grammar = compiler.compile(calls_spec([ToolForm("f", parameters, False, "t")], "content", single=True))
    assert accepts(grammar, tokenizer, block(call("f", ("x", "true", "a"), ("y", "false", "1"))))
    assert accepts(grammar, tokenizer, block(call("f", ("x", "false", "[1]"), ("y", "true", "1"))))


WAYS = ("anyOf", "oneOf", "allOf")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strict", [True, False])
def test_references_are_followed_once(way: str, strict: bool) -> None:
    """However often they are named: what doubles at every step would otherwise be 2 ** 30 schemas."""
    last: dict[str, Any] = {"type": "string", "maxLength": 3}
    circle = {"$defs": {"a": {way: [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    reader = ValueReader(circle, strict=strict)
    assert not reader.read({"$ref": "#/$defs/a"}, "x").texts
    assert reader._nodes < 10
    chain = {f"d{i}": {way: [{"$ref": f"#/$defs/d{i + 1}"}] * (1 if strict and way == "oneOf" else 2)} for i in range(30)}
    deep = ValueReader({"$defs": {**chain, "d30": last}}, strict=strict)
    assert len(deep.read({"$ref": "#/$defs/d0"}, "x").texts) == 1
    assert deep._nodes < 300


def test_what_is_looked_at_is_bounded() -> None:
    wide = {"anyOf": [{"maxLength": i} for i in range(MAX_NODES + 1)]}
    with pytest.raises(RequestError, match="too complex"):
        ValueReader({}, strict=False).read(wide, "x")
    endless: dict[str, Any] = {"type": "string"}
    for i in range(300):
        endless = {"$defs": {**endless.get("$defs", {}), f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]}}}
    with pytest.raises(RequestError, match="too complex"):
        ValueReader(endless, strict=False).read({"$ref": "#/$defs/d0"}, "x")
    many = {"allOf": [{"anyOf": [{"pattern": f"{way}{i}"} for i in range(40)]} for way in "abcd"]}
    with pytest.raises(RequestError, match="too complex"):
        ValueReader({}, strict=True).read(many, "x")


def test_other_tools_are_bounded_too() -> None:
    large = {"properties": {f"p{i}": {"description": "x" * 100} for i in range(6000)}}
    with pytest.raises(RequestError, match="bytes long"):
        calls_spec([ToolForm("f", large, False, "t")], "block", single=True)
    tools = [ToolForm(f"f{i}", {"properties": {f"{i}{j}{'x' * 200}": {} for j in range(300)}}, False, "t") for i in range(20)]
    with pytest.raises(RequestError, match="characters"):
        calls_spec(tools, "block", single=True)


def test_only_the_definitions_that_are_used_are_written() -> None:
    defs = {"used": {"type": "integer", "minimum": 1}, "list": {"items": {"$ref": "#/$defs/used"}}, "idle": {"const": "x" * 1000}}
    parameters = {"properties": {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/list"}} for i in range(9)}, "$defs": defs}
    spec = calls_spec([ToolForm("f", parameters, True, "t")], "block", single=True)
    assert "xxxx" not in spec.lark
    assert spec.lark.count('"minimum": 1') == 9


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
