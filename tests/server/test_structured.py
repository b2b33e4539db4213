"""Structured output over HTTP: every field that asks for a form, behind a real engine whose answers are throws of dice."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from engines import Memo
from structured_service import HI, PAD, SCHEMA, body_of, json_format, run

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True}},
]
LOOSE = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]  # type: ignore[dict-item]


async def ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The choice of an answer; streamed, put together from its chunks."""
    body = body_of(**fields)
    response = await http.post("/chat/completions", json=body)
    assert response.status_code == 200, response.text[:500]
    if not body.get("stream"):
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    finish = None
    for block in response.text.split("\n\n"):
        data = block.removeprefix("data: ")
        if not data or data == "[DONE]" or data.startswith(":"):
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                kept = message["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                kept["name"] += call["function"].get("name") or ""
                kept["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return {"message": message, "finish_reason": finish}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    given = choice["message"].get("tool_calls") or []
    if isinstance(given, dict):
        return [(call["name"], call["arguments"]) for _, call in sorted(given.items())]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in given]


PATTERN = r"[ab]{2,5}(x|y)"
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "strict": ({"response_format": json_format()}, SCHEMA),
    "lenient": ({"response_format": json_format(strict=False)}, SCHEMA),
    "llama.cpp": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    "top-level schema": ({"json_schema": SCHEMA}, SCHEMA),
    "guided_json": ({"guided_json": SCHEMA}, SCHEMA),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    "structured json": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, SCHEMA),
    "regex": ({"response_format": {"type": "regex", "regex": PATTERN}}, re.compile(PATTERN)),
    "top-level regex": ({"regex": PATTERN}, re.compile(PATTERN)),
    "guided_regex": ({"guided_regex": PATTERN}, re.compile(PATTERN)),
    "structured regex": ({"structured_outputs": {"regex": PATTERN}}, re.compile(PATTERN)),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, re.compile("yes|no")),
    "structured choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, re.compile("yes|no")),
}


def judge(text: str, form: Any) -> None:
    if isinstance(form, re.Pattern):
        assert form.fullmatch(text), text
    else:
        jsonschema.validate(json.loads(text), form)


@pytest.mark.case("B076")
def test_every_field_that_asks_for_a_form() -> None:
    """With reasoning and without, streamed and whole, which are the same; the reasoning is free and the content valid alone."""

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for seed, (fields, form) in enumerate(FORMS.values()):
            for thinking in (True, False):
                whole, streamed = await asyncio.gather(
                    ask(http, **fields, thinking=thinking, seed=seed), ask(http, **fields, thinking=thinking, seed=seed, stream=True)
                )
                message = whole["message"]
                assert whole["finish_reason"] == streamed["finish_reason"] == "stop"
                judge(message["content"], form)
                assert streamed["message"]["content"] == message["content"]
                assert streamed["message"]["reasoning_content"] == (message.get("reasoning_content") or "")
                assert bool(message.get("reasoning_content")) == thinking

    run(session)


@pytest.mark.case("B076")
def test_a_form_with_tools_and_with_stop() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        kinds = set()
        for seed in range(8):
            choice = await ask(http, response_format=json_format(), tools=TOOLS, thinking=seed % 2 == 0, seed=seed)
            if choice["finish_reason"] == "tool_calls":
                assert not choice["message"]["content"]
                check_calls(choice)
            elif choice["finish_reason"] == "stop":
                judge(choice["message"]["content"], SCHEMA)
            kinds.add(choice["finish_reason"])
        assert {"stop", "tool_calls"} <= kinds
        cut = await ask(http, response_format=json_format(), thinking=False, stop=['"kind"'], seed=3)
        assert cut["finish_reason"] == "stop"
        assert cut["message"]["content"].lstrip().startswith("{")
        assert '"kind"' not in cut["message"]["content"]

    run(session)


def check_calls(choice: dict[str, Any]) -> list[str]:
    """Names of the calls; the finish reason and the arguments are what they should be."""
    calls = calls_of(choice)
    if choice["finish_reason"] == "tool_calls":
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object", "maxProperties": 0})
    else:
        assert choice["finish_reason"] == "length" or not calls
    return [name for name, _ in calls]


CHOICES: dict[str, tuple[Any, set[str]]] = {
    "none": ("none", set()),
    "auto": ("auto", {"weather", "now"}),
    "required": ("required", {"weather", "now"}),
    "any": ("any", {"weather", "now"}),
    "named": ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    "flat": ({"type": "function", "name": "now"}, {"now"}),
    "allowed": ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "now"}}]}}, {"now"}),
}


@pytest.mark.case("B074")
@pytest.mark.parametrize("name", CHOICES)
def test_tool_choices(name: str) -> None:
    """Thinking or not × parallel or not × streamed or not × cut short or not: the finish reason always says what there is."""
    choice, may = CHOICES[name]

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        several = 0
        for seed in range(4):
            for thinking in (True, False):
                for parallel in (True, False):
                    for short in (False, True):
                        loose = name not in ("none", "auto") and seed % 2 == 0  # held to its schema all the same if it is asked for
                        fields: dict[str, Any] = {"tools": LOOSE if loose else TOOLS, "tool_choice": choice, "thinking": thinking}
                        most = 26 if short or name in ("none", "auto") else 900
                        fields |= {"parallel_tool_calls": parallel, "seed": seed, "max_tokens": most}
                        whole, streamed = await asyncio.gather(ask(http, **fields), ask(http, **fields, stream=True))
                        names = check_calls(whole)
                        assert calls_of(streamed) == calls_of(whole)
                        assert streamed["finish_reason"] == whole["finish_reason"]
                        assert set(names) <= may
                        assert len(names) <= 1 or (parallel and name not in ("named", "flat"))
                        several += len(names) > 1
                        if name not in ("none", "auto") and not short:
                            assert whole["finish_reason"] in ("tool_calls", "length")
                            assert not whole["message"]["content"]
        assert several or name in ("none", "auto", "named", "flat")

    run(session)


@pytest.mark.case("B074")
def test_an_automatic_call_is_well_formed_once_it_is_opened() -> None:
    """The model opens a call by itself, and then would go on with anything."""

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        tokenizer = memo.engine.tokenizer
        opening = tokenizer.encode_special("Let me see.\n\n<｜DSML｜")

        def script(tokens: Any) -> int:
            start = len(tokens) - 1 - list(tokens)[::-1].index(tokenizer.think_end_id)
            place = len(tokens) - start - 1
            return opening[place] if place < len(opening) else PAD

        memo.runner.script = script
        for strict in (True, False):
            tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]  # type: ignore[dict-item]
            for seed in range(6):
                fields = {"tools": tools, "thinking": False, "seed": seed, "parallel_tool_calls": seed % 2 == 0}
                choice = await ask(http, **fields, max_tokens=1500, temperature=0.4)  # so that the opening is said for certain
                if choice["finish_reason"] == "length":
                    continue
                assert choice["message"]["content"] == "Let me see."
                assert choice["finish_reason"] == "tool_calls"
                calls = calls_of(choice)
                assert len(calls) == 1 or seed % 2 == 0
                for name, arguments in calls:
                    assert name in ("weather", "now")
                    value = json.loads(arguments)
                    if strict:
                        jsonschema.validate(value, WEATHER if name == "weather" else {"maxProperties": 0})

    run(session)


BUDGETS = [
    {"thinking_token_budget": 7},
    {"thinking": {"type": "enabled", "budget_tokens": 7}},
    {"reasoning": {"enabled": True, "max_tokens": 7}},
    {"reasoning": {"max_tokens": 30}, "thinking_token_budget": 7},
]


def test_reasoning_budgets() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for fields in BUDGETS:
            body = {"messages": HI, "temperature": 1, "max_tokens": 30, "seed": 1, "ignore_eos": True, **fields}
            answer = (await http.post("/chat/completions", json=body)).json()
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7
            assert answer["usage"]["completion_tokens"] == 30
            assert answer["choices"][0]["message"]["content"]
        body = {"messages": HI, "max_tokens": 9, "thinking_token_budget": 0, "ignore_eos": True, "seed": 1}
        answer = (await http.post("/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
        assert answer["choices"][0]["message"]["content"]

    run(session)


SCHEMA_FIELD, BAD_SCHEMA = "response_format.json_schema.schema", "invalid_json_schema"


def strict_tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": {"type": "object", **parameters}}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": json_format(schema={"type": "object", "not": {}})}, SCHEMA_FIELD, BAD_SCHEMA),
    ({"response_format": json_format(schema={"$ref": "#"})}, SCHEMA_FIELD, BAD_SCHEMA),
    ({"response_format": json_format(False, {"allOf": [{"type": "string"}, {"type": "null"}]})}, SCHEMA_FIELD, BAD_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_FIELD, "invalid_type"),
    ({"response_format": json_format("yes")}, "response_format.json_schema.strict", "invalid_type"),
    ({"response_format": {"type": "regex", "regex": "(?=a)"}}, "response_format.regex", BAD_SCHEMA),
    ({"response_format": {"type": "regex"}}, "response_format.regex", "invalid_type"),
    ({"response_format": {"type": "grammar", "grammar": "x"}}, "response_format.type", "unsupported_value"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported_value"),
    ({"guided_json": {"type": "strng"}}, "guided_json", BAD_SCHEMA),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_json": [1]}, "guided_json", "invalid_type"),
    ({"guided_regex": 5}, "guided_regex", "invalid_type"),
    ({"guided_regex": "("}, "guided_regex", BAD_SCHEMA),
    ({"guided_choice": [1]}, "guided_choice", "invalid_type"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_type"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported_parameter"),
    ({"ebnf": "root ::= x"}, "ebnf", "unsupported_parameter"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "unsupported_parameter"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "invalid_type"),
    ({"structured_outputs": "json"}, "structured_outputs", "invalid_type"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json", "invalid_value"),
    ({"guided_regex": "a", "messages": [*HI, {"role": "assistant", "content": "b", "prefix": True}]}, "guided_regex", "invalid_value"),
    ({"tools": [strict_tool("f", {"properties": {"a": {"not": {}}}})]}, "tools[0].function.parameters.properties.a", BAD_SCHEMA),
    ({"tools": [strict_tool("f", {"properties": {"a": {"type": "null", "not": {}}}}), *TOOLS]}, "tools[0].function.parameters", BAD_SCHEMA),
    ({"tools": [TOOLS[0], strict_tool("g", {"minProperties": 2})["function"]]}, "tools[1].parameters", BAD_SCHEMA),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "invalid_type"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.allowed_tools.tools", "empty_array"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "integer_below_min_value"),
    ({"thinking_token_budget": "5"}, "thinking_token_budget", "invalid_type"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens", "invalid_type"),
    ({"reasoning": {"max_tokens": 1.5}}, "reasoning.max_tokens", "invalid_type"),
]  # fmt: skip


def test_refusals_name_the_field() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for fields, param, code in REFUSED:
            response = await http.post("/chat/completions", json={"messages": HI, "max_tokens": 3, **fields})
            assert response.status_code == 400, (fields, response.text[:300])
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, code), error
            assert param in error["message"]

    run(session)


def test_what_a_lenient_schema_leaves_out_is_in_a_header() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        schema = {**SCHEMA, "not": {"required": ["x"]}}
        response = await http.post("/chat/completions", json=body_of(response_format=json_format(strict=False, schema=schema)))
        assert response.status_code == 200
        assert '"not"' in response.headers["x-schema-warnings"]
        response = await http.post("/chat/completions", json=body_of(response_format=json_format()))
        assert "x-schema-warnings" not in response.headers
        assert "response_format" not in response.headers.get("x-forebay-ignored", "")

    run(session)


def test_a_pattern_that_cannot_be_enforced_is_left_out_of_a_lenient_schema() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "name": {"type": "string", "maxLength": 12, "pattern": "(?=a)b"}}}
        body = body_of(response_format=json_format(strict=False, schema=schema), thinking=False)
        response = await http.post("/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert "look-around" in response.headers["x-schema-warnings"]
        judge(response.json()["choices"][0]["message"]["content"], SCHEMA)
        response = await http.post("/chat/completions", json={**body, "tools": TOOLS, "seed": 1})
        assert response.status_code == 200, response.text
        assert "look-around" in response.headers["x-schema-warnings"]
        response = await http.post("/chat/completions", json=body_of(response_format=json_format(schema=schema)))
        assert (response.status_code, response.json()["error"]["param"]) == (400, SCHEMA_FIELD)

    run(session)


HARD = "^(.*a){1,40}.{100}$"  # accepted, since nobody can tell, and then its states multiply


def test_a_form_that_becomes_too_complex_is_the_clients_error(caplog: pytest.LogCaptureFixture) -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        body = body_of(guided_json={"type": "string", "pattern": HARD}, thinking=False, max_tokens=2000, seed=1)
        response = await http.post("/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "grammar_failed", "guided_json")
        assert error["type"] == "invalid_request_error"
        body |= {"thinking": True, "thinking_token_budget": 5, "stream": True}  # so that something has been sent before
        streamed = await http.post("/chat/completions", json=body)
        assert streamed.status_code == 200
        last = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
        assert (last["error"]["code"], last["error"]["param"]) == ("grammar_failed", "guided_json")

    run(session)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_tool_of_many_references_holds_nobody_up() -> None:
    """Twice two references to itself, thirty deep, would be 2 ** 30 schemas to look at."""

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for way in ("anyOf", "oneOf", "allOf"):
            defs = {f"d{i}": {way: [{"$ref": f"#/$defs/d{(i + 1) % 30}"}] * 2} for i in range(30)}
            for strict in (False, True):
                parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": defs}
                tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]
                response = await http.post("/chat/completions", json=body_of(tools=tools, thinking=False, max_tokens=4))
                assert response.status_code == (400 if strict else 200), response.text

    run(session)


def test_official_client_parses_into_a_model() -> None:
    class Step(pydantic.BaseModel):
        kind: Literal["think", "act"]
        weight: int

    class Plan(pydantic.BaseModel):
        title: str
        steps: list[Step]

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0)
        parsed = 0
        for seed in range(4):
            extra = {"thinking_token_budget": 5}
            try:
                answer = await client.chat.completions.parse(
                    model="dice", messages=HI, response_format=Plan, temperature=1, seed=seed, max_tokens=3000, extra_body=extra
                )
            except openai.LengthFinishReasonError:
                continue  # dice like long titles
            plan = answer.choices[0].message.parsed
            assert plan is not None
            parsed += 1
        assert parsed

    run(session)


@pytest.mark.case("B108", "B119")
def test_a_hostile_schema_disturbs_nobody() -> None:
    """While it is tried and refused, a stream goes on at its pace and the health page answers."""
    hostile = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(3, 30)]}

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        stop = asyncio.Event()
        gaps: list[float] = []

        async def watch() -> None:
            while not stop.is_set():
                before = time.monotonic()
                response = await http.get("http://x/health/ready")
                assert response.status_code == 200
                await asyncio.sleep(0.02)
                gaps.append(time.monotonic() - before)

        async def keep_generating() -> int:
            done = 0
            while not stop.is_set():
                await ask(http, thinking=False, max_tokens=50, ignore_eos=True, seed=done)
                done += 1
            return done

        others = asyncio.create_task(keep_generating())
        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0.3)
        before = len(gaps)
        began = time.monotonic()
        refused = await http.post("/chat/completions", json=body_of(response_format=json_format(schema=hostile)))
        took = time.monotonic() - began
        during = gaps[before:]
        stop.set()
        await watcher
        assert await others > 3
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "invalid_json_schema"
        assert took < 30
        assert len(during) > 10
        assert max(during) < 0.5

    run(session)
