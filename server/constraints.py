"""From a body to what the engine holds its answers to: the form of the content, calls of tools, the length of the reasoning.

`response_format` and the tools are read by the chat encoding, since the prompt tells them to the model too (`EncodedPrompt.form`). The
names other servers have for the same (`structured_outputs`, `guided_json`, …) change nothing in the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from forebay.engine.grammar import (
    MAX_BYTES,
    Grammar,
    GrammarSpec,
    check_schema,
    choice_spec,
    json_object_spec,
    json_spec,
    regex_spec,
)
from forebay.engine.tool_grammar import Begins, ToolForm, calls_spec
from forebay.model.chat import AnswerForm, EncodedPrompt
from forebay.model.errors import RequestError
from forebay.server.field_errors import bad, invalid
from forebay.server.grammar_desk import Obtain

# Fields that ask for a form, by what they ask for.
_FORMS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "regex": "regex", "json_schema": "json"}
_INNER = frozenset({"json", "regex", "choice", "json_object"})
_HARMLESS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "backend", "disable_fallback"})
STRUCTURED = frozenset({*_FORMS, "structured_outputs", "thinking_token_budget"})

MAX_WARNINGS = 10
MAX_SCHEMA_TEXT = 2 * MAX_BYTES  # of a schema given as a string, with whatever white space it has


@dataclass(frozen=True)
class Wanted:
    """What a body asks for beyond `response_format` and tools: `kind` of form with its `value`, and most tokens of reasoning."""

    kind: str | None = None
    value: Any = None
    param: str = ""
    budget: int | None = None


@dataclass(frozen=True)
class Held:
    """What the answers of a request are held to. `warnings`: what was left out of it, for a header."""

    grammar: Grammar | None = None
    reasoning_budget: int | None = None
    warnings: tuple[str, ...] = ()


FREE = Held()


def read(body: Mapping[str, Any]) -> Wanted:
    """The fields of a checked body; cheap, whatever their size. Raises RequestError naming one that is wrong or in another's way."""
    found = [(kind, body[name], name) for name, kind in _FORMS.items() if _asks(body.get(name), kind)]
    outputs = body.get("structured_outputs")
    if _asks(outputs):
        if not isinstance(outputs, Mapping):
            raise bad("structured_outputs", "Invalid type for 'structured_outputs': expected an object.", "invalid_type")
        for name, value in outputs.items():
            param = f"structured_outputs.{name}"
            if name in _INNER:
                if _asks(value, name):
                    found.append((name, value, param))
            elif _asks(value) and name not in _HARMLESS:
                text = f"Unsupported parameter: '{param}' is not offered. Use json, regex, choice or json_object."
                raise bad(param, text, "unsupported_parameter")
    style = body.get("response_format")
    if found and isinstance(style, Mapping) and style.get("type") not in (None, "text"):
        raise invalid(found[0][2], "it cannot be used together with 'response_format'")
    if len(found) > 1:
        raise invalid(found[1][2], f"it cannot be used together with '{found[0][2]}'")
    budget = _budget(body)
    if not found:
        return Wanted(budget=budget)
    kind, value, param = found[0]
    if kind == "json" and isinstance(value, str):
        if len(value) > MAX_SCHEMA_TEXT:  # passed the limits of the body as one value; white space is not part of a schema's size
            raise invalid(param, f"it is {len(value)} characters long, the limit is {MAX_SCHEMA_TEXT}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(param, f"it is a string, but not of JSON: {str(error)[:100]}") from None
    return Wanted(kind, value, param, budget)


def _asks(value: Any, kind: str = "") -> bool:
    """Whether a field asks for a form. An empty schema is any JSON, and an empty list of choices a mistake to be told."""
    if (kind, value) in (("json", {}), ("choice", [])):
        return True
    return value is not None and value is not False and value not in ("", {}, [])


def _budget(body: Mapping[str, Any]) -> int | None:
    """Most tokens of reasoning: the smallest of the limits that are given."""
    limits = []
    for outer, name in ((None, "thinking_token_budget"), ("thinking", "budget_tokens"), ("reasoning", "max_tokens")):
        holder = body if outer is None else body.get(outer)
        value = holder.get(name) if isinstance(holder, Mapping) else None
        if value is None:
            continue
        param = name if outer is None else f"{outer}.{name}"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad(param, f"Invalid type for '{param}': expected an integer.", "invalid_type")
        if value < 0:
            raise bad(param, f"Invalid '{param}': expected a value of at least 0, got {value}.", "integer_below_min_value")
        limits.append(value)
    return min(limits, default=None)


def asks(wanted: Wanted, form: AnswerForm) -> bool:
    """Whether `hold` has a grammar to build."""
    return wanted.kind is not None or form.kind != "text" or bool(form.tools)


def hold(wanted: Wanted, prompt: EncodedPrompt | None, obtain: Obtain, raw: AnswerForm | None = None) -> Held:
    """Obtain what the answers to `prompt` are held to.

    Without a prompt the answer is raw text, and `raw` is the form it is to have. Raises RequestError naming the field of a form that
    cannot be used.
    """
    form = prompt.form if prompt is not None else raw or AnswerForm()
    content = _content(wanted, form)
    if content is not None and prompt is not None and prompt.continues:
        raise invalid(content.param, "a message that is continued has no form of its own")
    reasons = prompt is not None and prompt.initial_channel == "reasoning"
    budget = wanted.budget if reasons else None
    # By itself first, also beside tools: what is wrong with it is told of its own field.
    alone = _obtain(content, obtain) if content is not None and not (form.tools and form.required) else None
    if not form.tools:
        return Held(alone, budget, alone.warnings[:MAX_WARNINGS] if alone is not None else ())
    opened = form.required and prompt is not None and prompt.parse.start == "calls"
    begins: Begins = "block" if opened else "content" if form.required or alone is not None else "marker"
    other = alone.spec if alone is not None else None
    strict = any(tool.strict for tool in form.tools)
    try:
        tools = [ToolForm(tool.name, tool.parameters, tool.strict, tool.param) for tool in form.tools]
        for tool in tools:
            check_schema(tool.parameters, tool.param)
        grammar = _bound(tools, begins, obtain, other, form) or _calls(tools, begins, obtain, single=form.single, otherwise=other)
    except RequestError as error:
        if strict:
            _blame([tool for tool in tools if tool.strict], obtain)
        if form.required or form.single or content is not None or strict:
            raise
        return Held(None, budget, (f"tools: {error.message}",))  # the model may call them all the same, unaided
    warnings = (*(alone.warnings if alone is not None else ()), *grammar.warnings)
    return Held(grammar, budget, tuple(dict.fromkeys(warnings))[:MAX_WARNINGS])


def _obtain(spec: GrammarSpec, obtain: Obtain) -> Grammar:
    return obtain(spec.key, lambda: spec)


def _calls(
    tools: Sequence[ToolForm], begins: Begins, obtain: Obtain, *, single: bool, otherwise: GrammarSpec | None = None, param: str = "tools"
) -> Grammar:
    """The grammar of calls. Its rules, which may be long, are only written if it has to be built."""
    parts = [[tool.name, tool.parameters, tool.strict, tool.param] for tool in tools]
    key = _key(parts, begins, single, param, otherwise and otherwise.lark)
    return obtain(key, lambda: calls_spec(tools, begins, single=single, otherwise=otherwise, param=param))


def _bound(tools: Sequence[ToolForm], begins: Begins, obtain: Obtain, otherwise: GrammarSpec | None, form: AnswerForm) -> Grammar | None:
    """The grammar of calls that are asked for, with their arguments held to schemas that are not `strict` too, if all of them can be.

    Whoever forces a call reads its arguments with a program (spec/http-api.md §3.4), so a missing one is worse than a fixed order.
    """
    held = [_held(tool) for tool in tools] if form.required else []
    if held == list(tools):
        return None
    try:
        return _calls(held, begins, obtain, single=form.single, otherwise=otherwise) if held else None
    except RequestError:
        return None  # a schema says what cannot be enforced, which is no fault of one that is not strict


def _held(tool: ToolForm) -> ToolForm:
    """The tool as a strict one, if its schema declares all that may be given."""
    schema = tool.parameters
    if tool.strict or not isinstance(schema.get("properties"), Mapping) or schema.get("additionalProperties", False) is not False:
        return tool
    return replace(tool, strict=True, parameters={**schema, "additionalProperties": False})


def _blame(tools: list[ToolForm], obtain: Obtain) -> None:
    """Find one among strict tools that cannot be used by itself, and raise what is wrong with it; by halves, since each try takes time."""
    while tools:
        half = tools[: max(1, len(tools) // 2)]
        try:
            _calls(half, "block", obtain, single=True, param=half[0].param)
        except RequestError:
            if len(half) == 1:
                raise
            tools = half
        else:
            tools = tools[len(half) :]


def _key(*parts: Any) -> bytes:
    """A digest of JSON values."""
    try:
        data = orjson.dumps(parts)
    except TypeError:  # integers that are too long for it
        data = json.dumps(parts).encode()
    return hashlib.blake2b(data, digest_size=32, person=b"calls").digest()


def _content(wanted: Wanted, form: AnswerForm) -> GrammarSpec | None:
    """The form of the content, None for free text."""
    if wanted.kind == "json":
        return json_spec(wanted.value, wanted.param, strict=False)
    if wanted.kind == "json_object":
        return json_object_spec(wanted.param)
    if wanted.kind == "regex":
        return regex_spec(wanted.value, wanted.param)
    if wanted.kind == "choice":
        return choice_spec(wanted.value, wanted.param)
    if form.kind == "json_object":
        return json_object_spec()
    if form.kind == "json_schema":
        return json_spec(form.value, form.param, strict=form.strict)
    if form.kind == "regex":
        return regex_spec(form.value, form.param)
    return None


def warning_header(held: Held) -> list[tuple[bytes, bytes]]:
    """`x-schema-warnings`, if there is something to say."""
    if not held.warnings:
        return []
    text = "; ".join(" ".join(warning.split())[:200] for warning in held.warnings)
    return [(b"x-schema-warnings", text.encode("ascii", "replace"))]
