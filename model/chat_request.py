"""An OpenAI chat-completions body becomes a checked conversation in the terms of the vendor's prompt library.

What is malformed raises a RequestError that names the field as a dotted path, such as `messages.3.content.0.type`. No field that would
change the prompt is ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import deepseek_recipe as recipe

from forebay.model.chat_messages import Turn, parse_messages
from forebay.model.chat_values import (
    ExactIntegers,
    array_at,
    bad,
    boolean_at,
    flag,
    json_at,
    object_at,
    shown,
    string_at,
    switch,
    template_options,
)

EFFORTS: dict[str, int | None] = {
    "none": None, "minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100, "ultra": 100,
}  # fmt: skip
DEFAULT_EFFORT = 75
CUSTOM_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class ToolSchema:
    """A tool that the answer may call; `param` names the field of its parameters in errors."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    param: str


@dataclass(frozen=True)
class AnswerForm:
    """What form the answer is to have. The prompt says the same to the model; whoever samples can see to it.

    Attributes:
        kind, value: `json_object` and None, `json_schema` and the schema, `regex` and the pattern, or `text` and None.
        strict: the schema is to be obeyed to the letter. `param` names its field in errors.
        tools: those that may be called. `required`: at least one of them is. `single`: at most one.
    """

    kind: Literal["text", "json_object", "json_schema", "regex"] = "text"
    value: Any = None
    strict: bool = False
    param: str = "response_format"
    tools: tuple[ToolSchema, ...] = ()
    required: bool = False
    single: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """What the prompt depends on.

    Attributes:
        conversation: for the library's renderer; effort and reasoning of earlier turns are put in afterwards.
        effort: 1..100 with thinking, None without.
        earlier_reasoning: texts to write into the finished assistant turns, in order; None leaves them as the library renders them.
        continues: the last assistant message is to be continued.
        start: the channel in which the answer starts; `calls` if the prompt opens the block of calls.
        task: quick-instruction task of the last message.
        tools: whether the answer may call tools. json: whether its content is to be JSON.
        properties: declared property names by tool. `max_calls`: 1 without parallel calls.
        form: what form the answer is to have.
        stand_in: what the library is told to write where an image is; None for a model that sees none.
    """

    conversation: recipe.Conversation
    thinking: bool
    effort: int | None
    earlier_reasoning: list[str] | None
    continues: bool
    start: Literal["reasoning", "content", "calls"]
    task: str | None
    tools: bool
    json: bool
    properties: dict[str, frozenset[str]]
    max_calls: int | None
    exact: ExactIntegers
    form: AnswerForm = field(default_factory=AnswerForm)
    stand_in: str | None = None


def parse_chat_request(
    body: Any, default_effort: int | str, thinking_default: bool, strict_tool_messages: bool = False, sees: bool = False
) -> ChatRequest:
    """Check `body` and convert it; `sees`: for a model that sees images, which are refused otherwise. Raises RequestError."""
    if not isinstance(body, Mapping):
        raise bad(f"the body must be an object, got {type(body).__name__}", None, "invalid_type")
    exact = ExactIntegers(body)
    thinking, effort = resolve_reasoning(body, default_effort, thinking_default)
    tools = parse_tools(body, exact)
    choice, allowed = parse_tool_choice(body, {tool.name for tool in tools})
    form = parse_response_format(body)
    schema = {"type": "regex", "regex": form.value} if form.kind == "regex" else json_at(form.value, form.param, exact)
    # The library marks what it is told stands for an image: something that nobody can have typed.
    stand_in = f"<image {secrets.token_hex(16)}>" if sees else None
    turns = parse_messages(body, exact, strict_tool_messages, stand_in)

    with_tools = bool(tools) and choice != "none"
    continues = flag(body, "continue_final_message", False) or bool(turns and turns[-1].prefix)
    if continues:
        _check_continuation(turns, len(body["messages"]) - 1, with_tools, form.kind != "text")
    elif not flag(body, "add_generation_prompt", True):
        raise bad("add_generation_prompt false needs continue_final_message", "add_generation_prompt", "unsupported_value")
    task = turns[-1].task if turns else None
    forced = choice == "required" and with_tools and not thinking and task is None
    reasons = thinking and task is None and not (continues and turns[-1].content)
    single = not flag(body, "parallel_tool_calls", True) or _names_one(body)
    offered = with_tools and task is None
    callable_tools = tuple(tool for tool in tool_schemas(body) if offered and (allowed is None or tool.name in allowed))
    keep_reasoning = thinking and not with_tools and not switch(body, "drop_thinking", True)
    finished = [turn for turn in (turns[:-1] if continues else turns) if turn.role == "assistant"]
    try:
        conversation = recipe.Conversation(
            [_library_message(turn, continues and turn is turns[-1], stand_in) for turn in turns],
            thinking_mode=thinking,
            tools=tools if with_tools else None,
            tool_choice="required" if forced else "auto",
            response_format="json_object" if form.kind == "json_object" else "text",
            response_schema=schema,
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise bad(f"the conversation cannot be encoded: {error}", "messages") from error
    return ChatRequest(
        conversation=conversation,
        thinking=thinking,
        effort=effort,
        earlier_reasoning=[turn.reasoning for turn in finished] if keep_reasoning else None,
        continues=continues,
        start="calls" if forced else "reasoning" if reasons else "content",
        task=task,
        tools=with_tools and task is None,
        json=form.kind in ("json_object", "json_schema"),
        properties={tool.name: _property_names(tool.parameters) for tool in tools},
        max_calls=1 if single else None,
        exact=exact,
        form=replace(form, tools=callable_tools, required=choice == "required" and task is None, single=single),
        stand_in=stand_in,
    )


def _library_message(turn: Turn, prefix: bool, stand_in: str | None) -> recipe.Message:
    images = [recipe.UrlImageSource("", path=part) for part in turn.images]  # it says which part each of its markers is for
    match turn.role:
        case "system":
            return recipe.SystemMessage(turn.content, images, image_token=stand_in)
        case "user":
            return recipe.UserMessage(turn.content, images, image_token=stand_in)
        case "tool":  # already in order; without an id the library leaves it where it is
            return recipe.ToolMessage(turn.content, None, images, image_token=stand_in)
        case "latest_reminder":
            return recipe.LatestReminderMessage(turn.content)
    return recipe.AssistantMessage(turn.content, turn.reasoning or None, list(turn.calls) or None, prefix)


def _check_continuation(turns: list[Turn], last: int, with_tools: bool, with_format: bool) -> None:
    if not turns or turns[-1].role != "assistant":
        raise bad("only a last message of role assistant without tool calls can be continued", f"messages.{last}")
    if with_tools:
        raise bad("tools cannot be used while continuing a message", "tools")
    if with_format:
        raise bad("response_format cannot be used while continuing a message", "response_format")


# ---- reasoning


def effort_number(value: Any, param: str) -> int | None:
    """Effort 1..100 for a name, an integer or its decimal spelling; None for "none". Raises RequestError."""
    if isinstance(value, str):
        name = value.lower()
        if name in EFFORTS:
            return EFFORTS[name]
        if re.fullmatch(r"[1-9][0-9]?|100", name):
            return int(name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= 100 and value == int(value):
        return int(value)
    raise bad(f"{param} must be one of {', '.join(EFFORTS)} or an integer from 1 to 100, got {shown(value)}", param)


def resolve_reasoning(body: Mapping[str, Any], default_effort: int | str, thinking_default: bool) -> tuple[bool, int | None]:
    """Whether the answer begins with reasoning, and with which effort. An explicit switch wins over what an effort implies."""
    options = template_options(body)
    thinking, reasoning = body.get("thinking"), body.get("reasoning")
    thinking_object = object_at(thinking, "thinking") if thinking is not None and not isinstance(thinking, bool) else {}
    reasoning_object = object_at(reasoning, "reasoning") if reasoning is not None else {}
    output = body.get("output_config")
    output_object = object_at(output, "output_config") if output is not None else {}

    explicit: bool | None = None
    if isinstance(thinking, bool):
        explicit = thinking
    elif thinking is not None:
        kind = thinking_object.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise bad(f"thinking.type must be enabled, disabled or adaptive, got {shown(kind)}", "thinking.type")
        explicit = kind != "disabled"
    else:
        for source, name, param in (
            (body, "enable_thinking", "enable_thinking"),
            (options, "thinking", "chat_template_kwargs.thinking"),
            (options, "enable_thinking", "chat_template_kwargs.enable_thinking"),
            (reasoning_object, "enabled", "reasoning.enabled"),
        ):
            if source.get(name) is not None:
                explicit = boolean_at(source[name], param)
                break

    effort: int | None = None
    said_none = False
    for source, name, param in (
        (body, "reasoning_effort", "reasoning_effort"),
        (thinking_object, "effort", "thinking.effort"),
        (thinking_object, "reasoning_effort", "thinking.reasoning_effort"),
        (reasoning_object, "effort", "reasoning.effort"),
        (options, "reasoning_effort", "chat_template_kwargs.reasoning_effort"),
        (output_object, "effort", "output_config.effort"),
    ):
        if source.get(name) is not None:
            effort = effort_number(source[name], param)
            said_none = effort is None
            break
    else:
        effort = effort_number(default_effort, "default_effort")
        thinking_default = thinking_default and effort is not None
    on = explicit if explicit is not None else (thinking_default and not said_none)
    return on, (effort or DEFAULT_EFFORT) if on else None


# ---- tools and format


def parse_tools(body: Mapping[str, Any], exact: ExactIntegers) -> list[recipe.ToolDefinition]:
    """Definitions in request order, from `tools` or the older `functions`."""
    entries: list[tuple[Any, str]] = []
    if body.get("tools") is not None:
        entries = [(entry, f"tools.{i}") for i, entry in enumerate(array_at(body["tools"], "tools"))]
    elif body.get("functions") is not None:
        functions = array_at(body["functions"], "functions")
        entries = [(entry, f"functions.{i}") for i, entry in enumerate(functions)]
    tools: list[recipe.ToolDefinition] = []
    seen: set[str] = set()
    for entry, param in entries:
        tool = _parse_tool(object_at(entry, param), param, exact)
        if tool.name in seen:
            raise bad(f"tool names must be unique, {tool.name!r} is used twice", param)
        seen.add(tool.name)
        tools.append(tool)
    return tools


def _parse_tool(entry: Mapping[str, Any], param: str, exact: ExactIntegers) -> recipe.ToolDefinition:
    kind = entry.get("type")
    if kind not in (None, "function", "custom"):
        raise bad(f"tools of type {shown(kind)} are not offered", f"{param}.type", "unsupported_value")
    inner = "custom" if kind == "custom" else "function"
    where = f"{param}.{inner}" if inner in entry else param
    function = object_at(entry[inner], where) if inner in entry else entry
    name = string_at(function.get("name"), f"{where}.name")
    if not TOOL_NAME.fullmatch(name):
        raise bad(f"{where}.name must be 1 to 128 of the characters A-Z a-z 0-9 _ . : -", f"{where}.name")
    description = function.get("description")
    text = "" if description is None else string_at(description, f"{where}.description")
    if kind == "custom":
        style = function.get("format")
        if isinstance(style, Mapping) and style.get("type") == "grammar":
            grammar = object_at(style.get("grammar", style), f"{where}.format.grammar")
            text += "\n\n" + string_at(grammar.get("definition"), f"{where}.format.grammar.definition")
        parameters: Any = CUSTOM_PARAMETERS
    else:
        schema = function.get("parameters")
        if schema is None:
            schema = {}
        if object_at(schema, f"{where}.parameters").get("type", "object") != "object":
            raise bad(f"{where}.parameters must be a schema of type object", f"{where}.parameters")
        parameters = json_at(schema, f"{where}.parameters", exact)
    return recipe.ToolDefinition(name, text, parameters)


def _property_names(schema: Any) -> frozenset[str]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def tool_schemas(body: Mapping[str, Any]) -> list[ToolSchema]:
    """Of every tool, in order, what its calls are held to, as the client wrote it. For a body that `parse_tools` has checked."""
    name = "tools" if body.get("tools") is not None else "functions"
    found = []
    for i, entry in enumerate(body.get(name) or ()):
        custom = name == "tools" and entry.get("type") == "custom"
        inner = "custom" if custom else "function"
        function, where = (entry[inner], f"{name}.{i}.{inner}") if name == "tools" and inner in entry else (entry, f"{name}.{i}")
        strict = function.get("strict", entry.get("strict"))
        if strict is not None and not isinstance(strict, bool):
            raise bad(f"{where}.strict must be true or false, got {shown(strict)}", f"{where}.strict", "invalid_type")
        parameters = CUSTOM_PARAMETERS if custom else function.get("parameters") or {}
        found.append(ToolSchema(function["name"], parameters, bool(strict), f"{where}.parameters"))
    return found


def parse_tool_choice(body: Mapping[str, Any], names: set[str]) -> tuple[Literal["auto", "none", "required"], frozenset[str] | None]:
    """The mode of `tool_choice` (or the older `function_call`), and the names it restricts calls to; a named tool is `required`."""
    param = "tool_choice" if body.get("tool_choice") is not None else "function_call"
    choice = body.get(param)
    if choice is None or choice in ("auto", "none"):
        return ("none" if choice == "none" else "auto"), None
    wanted: list[str] | None = None
    if choice in ("required", "any"):
        mode: Any = "required"
    else:
        entry = object_at(choice, param)
        kind = entry.get("type", "function")
        if kind == "allowed_tools":
            inner = object_at(entry.get("allowed_tools", entry), f"{param}.allowed_tools")
            mode = inner.get("mode", "auto")
            allowed = array_at(inner.get("tools", []), f"{param}.allowed_tools.tools")
            wanted = [_chosen_name(tool, f"{param}.allowed_tools.tools.{i}") for i, tool in enumerate(allowed)]
        elif kind in ("function", "custom", "tool"):
            mode = "required"
            wanted = [_chosen_name(entry, param)]
        else:
            raise bad(f"{param}.type must be function, custom or allowed_tools, got {shown(kind)}", f"{param}.type")
        if mode not in ("auto", "required"):
            raise bad(f"{param}.allowed_tools.mode must be auto or required, got {shown(mode)}", f"{param}.allowed_tools.mode")
    for name in wanted or ():
        if name not in names:
            raise bad(f"Invalid value for '{param}': no function named {shown(name)} was specified in the 'tools' parameter.", param)
    if mode == "required" and not names:
        raise bad(f"{param} asks for a call, but there are no tools", param)
    if wanted == []:
        raise bad(f"{param}.allowed_tools.tools must name at least one tool", f"{param}.allowed_tools.tools", "empty_array")
    return ("required" if mode == "required" else "auto"), None if wanted is None else frozenset(wanted)


def _names_one(body: Mapping[str, Any]) -> bool:
    """Whether a checked `tool_choice` is one tool: it is then called once."""
    choice = body.get("tool_choice") or body.get("function_call")
    return isinstance(choice, Mapping) and choice.get("type", "function") != "allowed_tools"


def _chosen_name(entry: Any, param: str) -> str:
    outer = object_at(entry, param)
    key = next((key for key in ("function", "custom") if key in outer), None)
    inner, where = (outer, param) if key is None else (outer[key], f"{param}.{key}")
    return string_at(object_at(inner, where).get("name"), f"{where}.name")


def parse_response_format(body: Mapping[str, Any]) -> AnswerForm:
    """The form that `response_format` asks for, without tools."""
    if body.get("response_format") is None:
        return AnswerForm()
    style = object_at(body["response_format"], "response_format")
    kind = style.get("type")
    if kind == "text":
        return AnswerForm()
    if kind == "json_object":
        if style.get("schema") is None:
            return AnswerForm("json_object")
        param = "response_format.schema"
        return AnswerForm("json_schema", object_at(style["schema"], param), param=param)
    if kind == "json_schema":
        inner = object_at(style.get("json_schema"), "response_format.json_schema")
        param = "response_format.json_schema.schema"
        strict = inner.get("strict") is not None and boolean_at(inner["strict"], "response_format.json_schema.strict")
        return AnswerForm("json_schema", object_at(inner.get("schema"), param), strict, param)
    if kind == "regex":
        param = "response_format.regex"
        return AnswerForm("regex", string_at(style.get("regex"), param), param=param)
    known = "text, json_object, json_schema or regex"
    raise bad(f"response_format.type must be {known}, got {shown(kind)}", "response_format.type", "unsupported_value")
