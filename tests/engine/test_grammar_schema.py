"""Schemas in the library's words: patterns keep their meaning, what has no end is refused or left out, old keywords are understood."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from forebay.engine.grammar import json_spec
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.grammar_schema import pattern, plain
from forebay.engine.tool_grammar import ToolForm, calls_spec
from forebay.model.errors import RequestError


def allows(compiler: GrammarCompiler, schema: Any, value: Any) -> bool:
    matcher = compiler.compile(json_spec(schema, "schema")).matcher()
    ids = compiler.tokenizer.encode_special(json.dumps(value, ensure_ascii=False))
    return all(matcher.consume_token(i) for i in ids) and matcher.is_accepting()


# (pattern, texts that ECMA-262 finds it in, others)
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ('^[^"]*$', ["", "a\n\\"], ['"', 'a"b']),
    (r"^[^\\]+$", ["a", '"'], ["\\"]),
    (r'^[^"\n]$', ["a", "\\", "\t"], ['"', "\n"]),
    (r"^[\x00-\x1f]$", ["\n", "\x01"], ['"', "\\", "a"]),
    (r"^\P{P}$", ["a", "\n"], ['"', "\\"]),
    (r"^[^\S]$", ["\n", " "], ["a", '"']),
    ("^[a&&b]$", ["a", "&", "b"], ["ab"]),
    ("^[+--]$", ["+", ",", "-"], ["a", "*"]),
    ("^[--0]$", ["-", ".", "0"], ["+", "1"]),
    ("^[a~~b]$", ["a", "~"], ["c"]),
    ("^[[a]$", ["[", "a"], ["]"]),
    ("^[[a]]$", ["[]", "a]"], ["a"]),
    (r"^[\]a]$", ["]", "a"], ["\\"]),
    (r"\[[^\]]*\]", ["x[a]", "[]"], ["[a", "]"]),
]


@pytest.mark.parametrize(("text", "good", "bad"), PATTERNS)
def test_patterns_mean_what_json_schema_says(compiler: GrammarCompiler, text: str, good: list[str], bad: list[str]) -> None:
    for extra in ({}, {"maxLength": 9}):
        schema = {"type": "string", "pattern": text, **extra}
        assert [value for value in good if not allows(compiler, schema, value)] == []
        assert [value for value in bad if allows(compiler, schema, value)] == []
    names = {"type": "object", "patternProperties": {text: {"type": "null"}}, "additionalProperties": False}
    assert [value for value in good if not allows(compiler, names, {value: None})] == []
    assert [value for value in bad if allows(compiler, names, {value: None})] == []


@pytest.mark.parametrize("text", ["a", "", "[", "a[", "[]", "[^]", "\\", "[a\\", r"\p", "(", "[a-]", r"\d+\.[0-9]{2}", "é|ü"])
def test_what_is_no_class_is_left_alone(text: str) -> None:
    assert pattern(text) == text


def node(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ME, NULL = {"$ref": "#"}, {"type": "null"}
DEAD = {"$defs": {"n": node(next={"$ref": "#/$defs/n"})}}
N = {"$ref": "#/$defs/n"}
ENDLESS: dict[str, Any] = {
    "itself": node(a=ME),
    "items": {"type": "array", "items": ME, "minItems": 1},
    "tuple": {"type": "array", "prefixItems": [NULL, ME], "minItems": 2},
    "old tuple": {"type": "array", "items": [ME], "minItems": 1},
    "a definition": {**DEAD, **N},
    "each other": {"$defs": {"a": node(b={"$ref": "#/$defs/b"}), "b": node(a={"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"},
    "any name": {"type": "object", "additionalProperties": ME, "minProperties": 1},
    "a name": {"type": "object", "additionalProperties": ME, "required": ["k"]},
    "every branch": {"anyOf": [node(a=ME), {"type": "array", "items": ME, "minItems": 1}]},
    "one branch": {"oneOf": [node(a=ME)]},
    "all of": {"allOf": [{"type": "object"}, node(a=ME)]},
    "by its place": {"type": "object", "properties": {"a": {"$ref": "#/properties/a/items"}, "b": NULL}, "required": ["a"],
                     "$defs": {}} | {"properties": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/properties/a"}}}},
    "in an array": {"anyOf": [{"$ref": "#/anyOf/0"}, node(a={"$ref": "#/anyOf/1"})]},
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_refused(compiler: GrammarCompiler, name: str, strict: bool) -> None:
    """An answer to it would only end at its limit of tokens."""
    with pytest.raises(RequestError, match="allows no answer at all") as caught:
        compiler.compile(json_spec(ENDLESS[name], "schema", strict=strict))
    assert caught.value.code == "invalid_json_schema"


# (schema, values that it allows, others): a branch without an end is never begun
PRUNED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({**DEAD, "anyOf": [N, NULL]}, [None], [{}, {"next": {}}]),
    ({**DEAD, "type": "object", "properties": {"x": N, "y": NULL}, "additionalProperties": False}, [{}, {"y": None}], [{"x": {}}]),
    ({**DEAD, "type": "array", "items": N}, [[]], [[{}]]),
    ({**DEAD, "type": "array", "prefixItems": [NULL, N], "minItems": 1}, [[None]], [[None, {}]]),
    ({**DEAD, "type": "object", "additionalProperties": N}, [{}], [{"a": {}}]),
    ({**DEAD, "type": ["object", "null"], "properties": {"x": N}, "required": ["x"]}, [None], [{}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), PRUNED)
def test_a_branch_without_an_end_is_never_begun(compiler: GrammarCompiler, schema: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert allows(compiler, schema, value)
    for value in bad:
        ids = compiler.tokenizer.encode_special(json.dumps(value)[:-1])
        matcher = compiler.compile(json_spec(schema, "schema")).matcher()
        assert not allows(compiler, schema, value)
        assert "{" in json.dumps(value)
        assert not all(matcher.consume_token(i) for i in ids) or value == {}


RECURSIVE: list[tuple[dict[str, Any], Any]] = [
    (node(v={"anyOf": [ME, NULL]}), {"v": {"v": None}}),
    ({"type": "array", "items": ME}, [[], [[]]]),
    ({"type": "object", "properties": {"a": ME}, "additionalProperties": False}, {"a": {"a": {}}}),
    ({"$defs": {"t": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "required": ["kids"]}},
      "$ref": "#/$defs/t"}, {"kids": [{"kids": []}]}),
    ({"type": "object", "properties": {"a/b c": ME, "d": {"anyOf": [{"$ref": "#/properties/a~1b%20c"}, NULL]}}, "required": ["d"]},
     {"d": {"d": None}}),
    ({"$id": "https://example.com/a", "type": "object", "properties": {"a": {"$id": "b", "type": "array", "items": {"$ref": "#"}}},
      "required": ["a"]}, {"a": [[]]}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value"), RECURSIVE)
def test_recursion_with_an_end_is_kept(compiler: GrammarCompiler, schema: Any, value: Any) -> None:
    assert allows(compiler, schema, value)


def test_strict_tools_are_held_to_it_too(compiler: GrammarCompiler) -> None:
    for parameters in ({**node(a=N), **DEAD}, {"properties": {"a": N}, **DEAD}):
        with pytest.raises(RequestError, match=r"allows no (answer|value) at all"):
            compiler.compile(calls_spec([ToolForm("f", parameters, True, "tools.0")], "block", single=True))
    parameters = {"properties": {"a": {"anyOf": [N, {"type": "integer"}]}}, "required": ["a"], **DEAD}
    matcher = compiler.compile(calls_spec([ToolForm("f", parameters, True, "tools.0")], "block", single=True)).matcher()
    start = '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="false">'
    assert all(matcher.consume_token(i) for i in compiler.tokenizer.encode_special(start))
    assert not matcher.consume_token(compiler.tokenizer.encode("{")[0])


def test_old_keywords_are_understood(compiler: GrammarCompiler) -> None:
    old = {"type": "integer", "minimum": 5, "exclusiveMinimum": True, "maximum": 9.0, "exclusiveMaximum": False}
    assert [value for value in range(12) if allows(compiler, old, value)] == [6, 7, 8, 9]
    assert plain({"exclusiveMaximum": True})[0] == {}
    assert plain({"maxLength": 3.0, "minItems": 1.5})[0] == {"maxLength": 3, "minItems": 1.5}
    assert allows(compiler, {"type": "array", "items": NULL, "uniqueItems": False, "maxItems": 2.0}, [None, None])


def test_values_and_names_are_no_keywords() -> None:
    """What looks like a keyword where values or names stand is left alone."""
    schema = {
        "properties": {
            "pattern": {"enum": [{"pattern": "[[]", "uniqueItems": False}]},
            "uniqueItems": False,
            "minLength": {"const": {"maxLength": 2.0}},
        },
        "$defs": {"items": {"default": {"pattern": "[^a]"}, "type": "string"}},
    }  # fmt: skip
    assert plain(schema)[0] == schema


def test_repeated_names(compiler: GrammarCompiler) -> None:
    """A grammar cannot see that a free name comes twice, which JSON then takes for one."""
    free = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}
    with pytest.raises(RequestError, match="minProperties"):
        compiler.compile(json_spec(free, "schema"))
    assert any("minProperties" in warning for warning in compiler.compile(json_spec(free, "schema", strict=False)).warnings)
    for fine in ({**free, "minProperties": 1}, {**free, "required": ["a"]}, {**free, "required": ["a", "b"], "additionalProperties": NULL}):
        assert not compiler.compile(json_spec(fine, "schema")).warnings


def chain(length: int) -> dict[str, Any]:
    """Definitions of which each needs the one before it, the hardest order; and each of many is in one group."""
    defs = {f"d{i}": node(a={"$ref": f"#/$defs/d{i - 1}"}) for i in range(length, 0, -1)}
    return {"$defs": {**defs, "d0": NULL}, "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(length)]}


def test_time_is_linear() -> None:
    began = time.process_time()
    for schema in (chain(5000), {**chain(5000), "$defs": chain(5000)["$defs"] | {"d0": ME}}):
        plain(schema)
    for text in ("[" * 400_000, "[a" * 200_000 + "]", "[]" * 200_000, r"\p" * 200_000, r"\p{" * 100_000):
        pattern(text)
    assert time.process_time() - began < 5.0
