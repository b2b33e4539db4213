"""Answers held to a form by a running engine: valid whatever the model would say, in any batch, and through preemption.

MEMO has no opinion: with equal logits for all that is allowed its answers are throws of dice, which find what a model would rarely write.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema

from engines import Memo, assert_idle, short
from forebay.engine.constraint import Constraint, MaskWorker
from forebay.engine.grammar import Grammar, choice_spec, json_object_spec, json_spec, regex_spec
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.llm import LLM
from forebay.engine.tool_grammar import ToolForm, calls_spec
from forebay.engine.types import Request, SamplingParams
from forebay.model.chat import EncodedPrompt
from forebay.model.errors import RequestError

SHORT = {"type": "string", "maxLength": 12}


class Line(pydantic.BaseModel):
    item: Annotated[str, pydantic.Field(max_length=8)]
    amount: Annotated[int, pydantic.Field(ge=1, le=99)]


class Order(pydantic.BaseModel):
    """What clients send: references, unions, enumerations, defaults, dates."""

    day: datetime.date
    state: Literal["open", "sent"]
    lines: Annotated[list[Line], pydantic.Field(max_length=2)]
    note: Annotated[str, pydantic.Field(max_length=8)] | None = None
    parent: Order | None = None


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object of these properties and no others; `required` are names, all of them by default."""
    needed = required.split() or list(properties)
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


INT, BOOL, NULL = {"type": "integer"}, {"type": "boolean"}, {"type": "null"}
SCHEMAS: dict[str, Any] = {
    "flat": closed(name=SHORT, age=INT),
    "optional": closed("b", a=SHORT, b=SHORT, c=SHORT, d=SHORT),
    "nested": closed(a=closed(b=BOOL)),
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [SHORT, BOOL], "items": False, "minItems": 2},
    "objects": {"type": "array", "items": closed(id=INT), "maxItems": 3},
    "enum": {"enum": ["red", "green", 3, None, True]},
    "const": closed(kind={"const": "point"}),
    "bounds": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "any of": {"anyOf": [INT, closed(x=NULL)]},
    "all of": {
        "allOf": [{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": SHORT}, "required": ["b"]}],
        "type": "object",
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "one of": {"oneOf": [{"type": "string", "maxLength": 3}, INT]},
    "recursive": {"$defs": {"node": closed(v=INT, next={"anyOf": [{"$ref": "#/$defs/node"}, NULL]})}, "$ref": "#/$defs/node"},
    "map": {"type": "object", "additionalProperties": BOOL, "maxProperties": 2},
    "types": {"type": ["integer", "null"]},
    "nullable": closed(a={"type": ["string", "null"], "maxLength": 5}),
    "odd names": closed(**{'é 名\n"\\': SHORT, "": INT, "\u2028": NULL}),
    "no quotes": {"type": "string", "pattern": '^[^"a-z]{1,3}$'},
    "patterns together": {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 6}]},
    "names by pattern": {"type": "object", "patternProperties": {"^x_[a-c]{1,2}$": INT}, "additionalProperties": False, "maxProperties": 2},
    "beside a reference": {"$defs": {"n": INT}, "type": "array", "items": {"$ref": "#/$defs/n", "minimum": 5, "maximum": 7}, "maxItems": 3},
    "a branch without an end": {
        "$defs": {"n": closed(next={"$ref": "#/$defs/n"})},
        **closed("y", x={"$ref": "#/$defs/n"}, y={"anyOf": [{"$ref": "#/$defs/n"}, NULL]}),
    },
    "old bounds": {"type": "integer", "minimum": 5, "exclusiveMinimum": True, "maximum": 8},
    "pydantic": to_strict_json_schema(Order),
}
SEEDS = range(4)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Memo().engine.tokenizer)
    yield compiler
    compiler.close()


def dice(**options: Any) -> Memo:
    """MEMO without an opinion."""
    memo = Memo(4096, **{"kv_tokens": 16384, "max_sequences": 16, **options})
    memo.runner.script = lambda tokens: 2  # padding, which no form allows and which ends nothing
    return memo


def thrown(max_tokens: int = 600, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **params})


def said(memo: Memo, request_id: str) -> str:
    return "".join(delta.text for event in memo.events[request_id] for delta in event.deltas if delta.channel == "content")


@pytest.mark.parametrize("name", SCHEMAS)
def test_dice_obey_the_schema(compiler: GrammarCompiler, name: str) -> None:
    memo = dice()
    grammar = compiler.compile(json_spec(SCHEMAS[name], "schema"))
    ids = [memo.add(short(9, seed), thrown(seed=seed), grammar=grammar) for seed in SEEDS]
    memo.finish()
    ended = 0
    for request_id in ids:
        if memo.last(request_id).finish_reason == "stop":
            ended += 1
            value = json.loads(said(memo, request_id))
            schema = {"type": "integer", "exclusiveMinimum": 5, "maximum": 8} if name == "old bounds" else SCHEMAS[name]
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            assert memo.tokens(request_id)[-1] == memo.engine.eos_id
        else:  # digits may go on for ever
            assert memo.last(request_id).finish_reason == "length"
    assert ended >= len(SEEDS) - 1
    assert_idle(memo.engine)


def mixed(compiler: GrammarCompiler) -> list[tuple[Grammar | None, Any]]:
    """Sixteen forms, free text among them, and how to judge them."""
    forms: list[tuple[Grammar | None, Any]] = []
    for i, schema in enumerate(list(SCHEMAS.values())[:8]):
        forms += [(compiler.compile(json_spec(schema, "schema")), schema)] if i % 4 else [(None, None)]
    forms += [(compiler.compile(regex_spec(r"[ab]{3,9}(x|\d\d)", "regex")), re.compile(r"[ab]{3,9}(x|[0-9]{2})"))] * 3
    forms += [(compiler.compile(choice_spec(["yes", "no", "may be"], "choice")), ("yes", "no", "may be"))] * 3
    return [*forms, (None, None), (compiler.compile(json_spec(SCHEMAS["map"], "schema")), SCHEMAS["map"])]


def judge(text: str, form: Any) -> None:
    if isinstance(form, dict):
        jsonschema.validate(json.loads(text), form)
    elif isinstance(form, re.Pattern):
        assert form.fullmatch(text)
    elif form is not None:
        assert text in form


def test_a_batch_of_many_forms(compiler: GrammarCompiler) -> None:
    """Sixteen at once say just what each says alone, and the streamed pieces are the whole."""
    forms = mixed(compiler)
    assert len(forms) == 16

    def run(memo: Memo, i: int) -> str:
        return memo.add(short(7 + i, i), thrown(300, seed=i, ignore_eos=forms[i][0] is None), grammar=forms[i][0])

    together = dice()
    ids = [run(together, i) for i in range(16)]
    together.finish()
    for i, request_id in enumerate(ids):
        alone = dice()
        only = run(alone, i)
        alone.finish()
        assert together.tokens(request_id) == alone.tokens(only)
        whole = together.engine.tokenizer.decode(together.tokens(request_id), skip_special=True)
        assert said(together, request_id) == whole
        if together.last(request_id).finish_reason == "stop":
            judge(whole, forms[i][1])


@pytest.mark.case("B049")
def test_forced_preemption_changes_nothing(compiler: GrammarCompiler) -> None:
    """Every fourth step the last in order is preempted, and has to go on in the middle of its form."""
    forms = [*mixed(compiler)[1:4], *mixed(compiler)[5:12]] * 2

    def run(force: bool) -> tuple[list[str], int]:
        memo = dice()
        ids = [memo.add(short(9 + i, i), thrown(200, seed=40 + i), grammar=grammar) for i, (grammar, _) in enumerate(forms)]
        steps = 0
        while memo.engine.busy:
            memo.step()
            steps += 1
            running = [s for s in memo.scheduler.running if s.decoding]
            if force and steps % 4 == 0 and running:
                memo.scheduler._preempt(max(running, key=memo.scheduler.rank))
        for request_id, (_, form) in zip(ids, forms, strict=True):
            if memo.last(request_id).finish_reason == "stop":
                judge(said(memo, request_id), form)
        return [said(memo, request_id) for request_id in ids], sum(memo.last(i).preemptions for i in ids)

    calm, none = run(force=False)
    disturbed, many = run(force=True)
    assert none == 0
    assert many > 10
    assert disturbed == calm


def test_choices_of_one_prompt_each_keep_their_own_place(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(json_spec(SCHEMAS["flat"], "schema"))
    memo = dice()
    ids = [memo.add(short(20), thrown(seed=seed), grammar=grammar, share="s") for seed in range(6)]
    memo.finish()
    texts = [said(memo, request_id) for request_id in ids]
    assert len(set(texts)) == 6
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS["flat"])


def test_ignore_eos_and_min_tokens_do_not_break_a_form(compiler: GrammarCompiler) -> None:
    memo = dice()
    grammar = compiler.compile(choice_spec(["yes", "no"], "choice"))
    ids = [memo.add(short(8), thrown(50, seed=1, **more), grammar=grammar) for more in ({"ignore_eos": True}, {"min_tokens": 30})]
    memo.finish()
    for request_id in ids:
        assert said(memo, request_id) in ("yes", "no")
        assert memo.last(request_id).finish_reason == "stop"


def test_a_form_that_becomes_too_complex_ends_its_own_request(compiler: GrammarCompiler) -> None:
    memo = dice()
    hard = compiler.compile(json_spec({"type": "string", "pattern": "^(.*a){1,40}.{100}$"}, "schema"))
    bad = memo.add(short(8), thrown(2000, seed=1), grammar=hard)
    good = memo.add(short(9, 1), thrown(seed=2), grammar=compiler.compile(json_spec(SCHEMAS["flat"], "schema")))
    memo.finish()
    event = memo.last(bad)
    assert event.finish_reason == "error"
    assert event.error is not None
    assert isinstance(event.error, RequestError)
    assert (event.error.code, event.error.param) == ("grammar_failed", "schema")
    jsonschema.validate(json.loads(said(memo, good)), SCHEMAS["flat"])
    assert_idle(memo.engine)


class Unhurried(MaskWorker):
    """No mask is ever ready in the step that needs it, and every third not in the next one either."""

    calls = 0

    def finish(self, constraints: Sequence[Constraint], late: Sequence[Constraint] = ()) -> set[int]:
        self.calls += 1
        super().finish(constraints, late)
        return {id(c) for c in constraints if not c.error} | {id(c) for c in late if self.calls % 3 == 0}


@pytest.mark.parametrize("tight", [False, True])
def test_a_late_mask_only_delays(compiler: GrammarCompiler, tight: bool) -> None:
    """Whoever sits a step out says the same as with masks in time: alone, as choices of one prompt, and preempted."""
    forms = mixed(compiler)

    def answers(worker: MaskWorker | None) -> tuple[list[str], float]:
        memo = dice(kv_tokens=512, prefix_reuse=True) if tight else dice()
        if worker is not None:
            memo.engine.chooser.masks = worker
        ids = [memo.add(short(20, i), thrown(120, seed=i), grammar=grammar) for i, (grammar, _) in enumerate(forms)]
        grammar = compiler.compile(json_spec(SCHEMAS["flat"], "schema"))
        ids += [memo.add(short(12, 3), thrown(120, seed=i), grammar=grammar, share="x") for i in range(3)]
        memo.finish()
        assert_idle(memo.engine)
        assert not memo.engine.chooser.late
        return [said(memo, request_id) for request_id in ids], memo.value("preemptions_total")

    plain, _ = answers(None)
    slow, preempted = answers(Unhurried())
    assert slow == plain
    assert bool(preempted) == tight


def test_an_aborted_late_one_is_forgotten(compiler: GrammarCompiler) -> None:
    memo = dice()
    memo.engine.chooser.masks = Unhurried()
    grammar = compiler.compile(json_spec(SCHEMAS["flat"], "schema"))
    request_id = memo.add(short(8), thrown(50), grammar=grammar)
    memo.step()
    assert set(memo.engine.chooser.late) == {request_id}
    memo.engine.abort(request_id)
    memo.finish()
    assert not memo.engine.chooser.late
    assert_idle(memo.engine)


# ---- with the encoding of a chat


WEATHER = {
    "type": "object",
    "properties": {"city": SHORT, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}


def prompt_of(memo: Memo, **fields: Any) -> EncodedPrompt:
    assert memo.engine.codec is not None
    return memo.engine.codec.encode({"messages": [{"role": "user", "content": "Hi"}], **fields})


def channel(memo: Memo, request_id: str, name: str) -> str:
    return "".join(delta.text for event in memo.events[request_id] for delta in event.deltas if delta.channel == name)


@pytest.mark.case("B076")
@pytest.mark.parametrize("thinking", [True, False])
def test_the_form_is_the_contents_and_not_the_reasonings(compiler: GrammarCompiler, thinking: bool) -> None:
    memo = dice()
    prompt = prompt_of(memo, thinking=thinking)
    grammar = compiler.compile(json_spec(SCHEMAS["flat"], "schema"))
    request = {"prompt": prompt, "grammar": grammar, "reasoning_budget": 30}
    ids = [memo.add(prompt.token_ids, thrown(900, seed=seed), **request) for seed in range(5)]
    memo.finish()
    for request_id in ids:
        usage = memo.last(request_id).usage
        assert usage is not None
        assert (usage.reasoning_tokens == 30) == thinking  # dice hardly ever throw the marker that ends it
        assert bool(channel(memo, request_id, "reasoning")) == thinking
        if memo.last(request_id).finish_reason == "stop":
            jsonschema.validate(json.loads(channel(memo, request_id, "content")), SCHEMAS["flat"])
    assert any(memo.last(request_id).finish_reason == "stop" for request_id in ids)


@pytest.mark.case("B074")
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_required_calls_are_made(compiler: GrammarCompiler, thinking: bool, single: bool) -> None:
    memo = dice()
    entry = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    prompt = prompt_of(memo, thinking=thinking, tools=[entry], tool_choice="required", parallel_tool_calls=not single)
    spec = calls_spec([ToolForm("weather", WEATHER, True, "tools")], "content" if thinking else "block", single=single)
    request = {"prompt": prompt, "grammar": compiler.compile(spec), "reasoning_budget": 12}
    ids = [memo.add(prompt.token_ids, thrown(900, seed=seed), **request) for seed in range(5)]
    memo.finish()
    several = 0
    for request_id in ids:
        if (end := memo.last(request_id).finish_reason) == "length":
            continue
        assert end == "tool_calls"
        assert not channel(memo, request_id, "content")
        calls: dict[int, str] = {}
        for event in memo.events[request_id]:
            for delta in event.deltas:
                if delta.channel == "tool_calls":
                    assert delta.name in (None, "weather")
                    calls[delta.index] = calls.get(delta.index, "") + delta.text
        assert calls
        several += len(calls) > 1
        assert len(calls) == 1 or not single
        for arguments in calls.values():
            jsonschema.validate(json.loads(arguments), {**WEATHER, "additionalProperties": False})
    assert single or several


# ---- with a model that means something


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", chat=True, kv_tokens=32768, max_sequences=16) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.case("B076")
def test_the_demo_answers_in_every_form_at_once(demo: LLM) -> None:
    """Sixteen mixed requests in one batch at temperature 1, with reasoning and without, twice over with the same seeds."""
    codec = demo.engine.codec
    assert codec is not None
    pattern = r"[A-Z][a-z]{1,8}, [0-9]{1,3} years"
    person = closed(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150})
    schemas = (person, SCHEMAS["nested"], SCHEMAS["enum"], SCHEMAS["array"])
    forms: list[tuple[Grammar | None, Any]] = [
        *((demo.grammars.compile(json_spec(schema, "schema")), schema) for schema in schemas),
        (demo.grammars.compile(json_object_spec()), {"type": "object"}),
        (demo.grammars.compile(regex_spec(pattern, "regex")), re.compile(pattern)),
        (demo.grammars.compile(choice_spec(["red", "green"], "choice")), ("red", "green")),
        (None, None),
    ]
    requests, texts = [], []
    for i in range(16):
        body = {"messages": [{"role": "user", "content": "Tell me of a person, as JSON."}], "thinking": i >= 8}
        prompt = codec.encode(body)
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=160)
        requests.append((prompt, params, forms[i % 8][0]))
    for _ in range(2):
        made = [Request(p.token_ids, params, prompt=p, grammar=g, reasoning_budget=24) for p, params, g in requests]
        outputs = demo.run(made)
        texts.append([(output.text, output.token_ids) for output in outputs])
    assert texts[0] == texts[1]
    ended = [i for i, output in enumerate(outputs) if output.finish_reason == "stop" and forms[i % 8][0] is not None]
    assert len(ended) >= 10
    for i in ended:
        judge(outputs[i].text, forms[i % 8][1])
        assert outputs[i].text
    assert all(output.usage.reasoning_tokens <= 24 for output in outputs)
    assert_idle(demo.engine)
