"""Grammars: what they accept, what is refused and how fast, and that control tokens are never text."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from forebay.engine.grammar import (
    MAX_BYTES,
    MAX_DEPTH,
    Grammar,
    GrammarSpec,
    choice_spec,
    json_object_spec,
    json_spec,
    regex_spec,
)
from forebay.engine.grammar_check import GrammarChecker, TimeLimitError
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar takes the whole text and could end there."""
    matcher = grammar.matcher()
    return all(matcher.consume_token(i) for i in tokenizer.encode_special(text)) and matcher.is_accepting()


def mask(grammar: Grammar, tokenizer: Tokenizer, text: str) -> set[int]:
    """Ids allowed behind `text`."""
    matcher = grammar.matcher()
    assert matcher.consume_tokens(tokenizer.encode_special(text))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: tokenizer.vocab_size]).tolist())


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


LIST = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
    "$ref": "#/$defs/n",
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PERSON, ['{"name": "Ada", "age": 36}', '{"name":""}', '{\n  "name": "é\\n"\n}'],
         ['{"age": 1}', '{"name": 1}', '{"name": "a", "age": -1}', ' {"name": "a"}']),
        ({"enum": ["red", 5, None]}, ['"red"', "5", "null"], ["red", "6", '"re"']),
        ({"type": "string", "pattern": "^a+$|b"}, ['"aa"', '"xby"'], ['"ca"', '"ac"']),
        ({"type": "string", "format": "date"}, ['"2026-11-29"'], ['"2026-13-29"', '"today"']),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, ["[]", "[true, false]"], ["[true,true,true]", "[1]"]),
        (LIST, ['{"next": {"next": {}}}'], ['{"next": 1}']),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["7", "null"], ['"7"', "7.5"]),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
         ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"type": "number", "multipleOf": 0.5, "maximum": 3}, ["2.5"], ["2.3", "3.5"]),
        (True, ["1", '{"x": [null]}'], ["nul"]),
    ],
)  # fmt: skip
def test_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compiler.compile(json_spec(schema, "schema"))
    for text in good:
        assert accepts(grammar, tokenizer, text), text
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    for text in bad:
        assert not accepts(grammar, tokenizer, text), text


def test_any_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(json_object_spec())
    assert accepts(grammar, tokenizer, '{"a": {"b": [1, "x", null, true]}}')
    assert not accepts(grammar, tokenizer, "[1]")
    assert not accepts(grammar, tokenizer, '{"a": 1} ')


PATTERNS = ["a+b", "^a+b$", "yes|no", "^yes$|^no$", "(a|b)/[^$^|]+", r"\d{3}-\w+\$", "[]a]x", r"é.\u0041", "(?i)ja"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_matches_the_whole(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    grammar = compiler.compile(regex_spec(pattern, "regex"))
    reference = re.compile(pattern, re.ASCII if "d{3}" in pattern else 0)
    texts = ["ab", "aab", "xab", "abx", "yes", "no", "yesno", "a/x", "b/$", "123-ab$", "123-é$", "]x", "ax", "éxA", "JA", ""]
    assert [text for text in texts if accepts(grammar, tokenizer, text)] == [text for text in texts if reference.fullmatch(text)]


def test_choices(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(choice_spec(["get", "get all", 'say "x"\n', "é"], "choice"))
    for text in ("get", "get all", 'say "x"\n', "é"):
        assert accepts(grammar, tokenizer, text)
    for text in ("ge", "get al", "get get", ""):
        assert not accepts(grammar, tokenizer, text)


def test_control_tokens_are_never_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Also those that the tokenizer file does not flag as special, where any text may stand."""
    inside = mask(compiler.compile(json_object_spec()), tokenizer, '{"a": "x')
    assert len(inside) > 3000
    assert not inside & tokenizer.added_ids
    free = mask(compiler.compile(regex_spec("(?s:.*)", "regex")), tokenizer, "x")
    assert free & tokenizer.added_ids == {tokenizer.eos_id}
    # Spelled out by ordinary tokens it is text.
    matcher = compiler.compile(regex_spec("(?s:.*)", "regex")).matcher()
    assert all(matcher.consume_token(i) for i in tokenizer.encode("</think>"))


def test_a_complete_answer_can_only_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    assert mask(compiler.compile(json_spec(PERSON, "s")), tokenizer, '{"name": "a", "age": 1}') == {tokenizer.eos_id}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "object", "not": {"required": ["a"]}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "then"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "string", "format": "klingon"}, "klingon"),
        ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"type": "strng"}, "strng"),
        ({"$ref": "#/$defs/gone"}, "$ref that leads nowhere: Pointer '/$defs/gone'"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#"}, "$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(compiler: GrammarCompiler, schema: Any, names: str) -> None:
    with pytest.raises(RequestError) as error:
        compiler.compile(json_spec(schema, "response_format.json_schema.schema"))
    assert error.value.code == "invalid_json_schema"
    assert error.value.param == "response_format.json_schema.schema"
    assert names in error.value.message
    assert len(error.value.message) < 500
    assert "x-guidance" not in error.value.message


def test_a_lenient_schema_says_what_it_leaves_out(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "not": {}, "properties": {"a": {"type": "string", "format": "klingon"}}, "required": ["a"]}
    grammar = compiler.compile(json_spec(schema, "s", strict=False))
    assert any("not" in warning for warning in grammar.warnings)
    assert any("klingon" in warning for warning in grammar.warnings)
    assert accepts(grammar, tokenizer, '{"a": "Qapla"}')
    assert not accepts(grammar, tokenizer, '{"a": 1}')
    with pytest.raises(RequestError):
        compiler.compile(json_spec({"allOf": [{"type": "string"}, {"type": "integer"}]}, "s", strict=False))


def nested(key: str, depth: int) -> Any:
    schema: Any = {"type": "string"}
    for i in range(depth):
        schema = {key: [schema, {"type": "object", "properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]}]}
    return schema


def deep(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, Any] = {
    "oneOf 30 deep": nested("oneOf", 30),
    "allOf 30 deep": nested("allOf", 30),
    "anyOf 30 deep": nested("anyOf", 30),
    "product of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]
    },
    "maxItems 2^63": {"type": "array", "items": {"type": "integer"}, "maxItems": 2**63},
    "minItems 10^9": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "maxLength 2^62": {"type": "string", "maxLength": 2**62},
    "(a|a)*b": {"type": "string", "pattern": "(a|a)*b"},
    "bounded repeats": {"type": "string", "pattern": "(x{1,1000}){1,1000}"},
    "patterns to intersect": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(3, 30)]},
    "a large multipleOf": {"type": "integer", "multipleOf": 999_983},
    "wide bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "5 MB of names": {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 20} for i in range(80_000)}},
    "5 MB of values": {"enum": [f"v{i}{'x' * 40}" for i in range(100_000)]},
    "1000 deep": deep(1000),
    "500 names": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
}


@pytest.mark.case("B108")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_never_take_long(compiler: GrammarCompiler, name: str, strict: bool) -> None:
    """Each is refused by name of its field or ready, and a first mask too, within seconds."""
    began = time.monotonic()
    refused: RequestError | None = None
    try:
        compiler.compile(json_spec(HOSTILE[name], "schema", strict=strict)).matcher().compute_bitmask()
    except RequestError as error:
        refused = error
    assert refused is None or (refused.param, refused.code) == ("schema", "invalid_json_schema")
    assert time.monotonic() - began < 30.0


@pytest.mark.case("B108")
def test_a_grammar_that_takes_too_long_is_given_up_and_remembered(compiler: GrammarCompiler) -> None:
    spec = json_spec(HOSTILE["patterns to intersect"], "other")
    with pytest.raises(RequestError, match="takes more than 2 s"):
        compiler.compile(spec)
    assert compiler.kept(spec.key) is not None
    assert compiler.compile(json_spec(PERSON, "after")).warnings == ()


def test_limits_of_size_and_depth() -> None:
    with pytest.raises(RequestError, match=str(MAX_DEPTH)):
        json_spec(deep(MAX_DEPTH), "s")
    with pytest.raises(RequestError, match=str(MAX_BYTES)):
        json_spec({"const": "x" * MAX_BYTES}, "s")
    with pytest.raises(RequestError, match=str(MAX_BYTES)):
        regex_spec("x" * (MAX_BYTES + 1), "r")
    for wrong in ([], "object", 5, None):
        with pytest.raises(RequestError) as error:
            json_spec(wrong, "s")
        assert error.value.code == "invalid_type"
    for texts in ([], [""], [1], "ab", ["\ud800"]):
        with pytest.raises(RequestError):
            choice_spec(texts, "c")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="anchor"):
        regex_spec("a^b", "r")
    with pytest.raises(RequestError, match="surrogate"):
        regex_spec("a\udc00", "r")
    with pytest.raises(RequestError, match="surrogate"):
        json_spec({"const": "\ud800"}, "s")
    with pytest.raises(RequestError, match="not JSON"):
        json_spec({"const": float("nan")}, "s")


ODD = ["a\u2028b", "\x7f", "a\x00", "\x85", "\x0b\x0c", "<[MARKER]>", "\uf8ff", "<[\uf8ff]>", "\\u0041", '"\\', "\U0001f600", "a\r\nb"]


@pytest.mark.parametrize("text", ODD)
def test_odd_characters_stand_for_themselves(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    assert accepts(compiler.compile(choice_spec([text, "x"], "c")), tokenizer, text)
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert accepts(compiler.compile(json_spec({"const": text}, "s")), tokenizer, written)
    escaped = re.sub(r'[\[\]\\"]', r"\\\g<0>", text)
    assert accepts(compiler.compile(regex_spec(escaped, "r")), tokenizer, text)


def test_a_lenient_schema_leaves_out_patterns_that_cannot_be_enforced(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    bad = {"type": "string", "pattern": "(?=a)b"}
    schema = {
        "type": "object",
        "properties": {"a": bad, "b": {"type": "string", "pattern": "^x+$"}, "pattern": {"type": "string", "pattern": r"\bw\b"}},
        "patternProperties": {r"(a)\1": {"type": "integer"}},
        "required": ["a", "b"],
    }
    grammar = compiler.compile(json_spec(schema, "s", strict=False))
    text = " ".join(grammar.warnings)
    for part in ("look-around", "(?=a)b", "backreferences", "lookarounds"):
        assert part in text
    assert accepts(grammar, tokenizer, '{"a": "anything", "b": "xx", "pattern": "w"}')
    assert not accepts(grammar, tokenizer, '{"a": "anything", "b": "y"}')
    with pytest.raises(RequestError, match="cannot be enforced"):
        compiler.compile(json_spec(schema, "s"))


def test_a_client_cannot_set_the_librarys_options(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {**PERSON, "x-guidance": {"whitespace_pattern": "x+", "lenient": True}}
    grammar = compiler.compile(json_spec(schema, "s"))
    assert not accepts(grammar, tokenizer, '{xx"name": "a"}')


def test_the_process_that_tries_grammars_is_restarted() -> None:
    checker = GrammarChecker()
    spec = GrammarSpec('start: "a"')
    try:
        assert not checker.check(spec.text(256), 5.0).error
        process = checker._process
        assert process is not None
        process.kill()
        process.wait()
        assert not checker.check(spec.text(256), 5.0).error
        slow = json_spec(HOSTILE["patterns to intersect"], "s")
        with pytest.raises(TimeLimitError):
            checker.check(slow.text(256), 0.3)
        assert checker._process is None
        assert not checker.check(spec.text(256), 5.0).error
    finally:
        checker.close()
