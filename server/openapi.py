"""GET /openapi.json: every route that is served, by every path and method, what it takes and every status it can answer with.

Made from the table of routes and the models that check the bodies, so that it cannot say what the server does not do. What another module
checks by hand (messages, items, tools) is described by its outline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from forebay import __version__
from forebay.server.chat_fields import ChatRequest
from forebay.server.completions import CHAT_ONLY, IDLE, CompletionFields
from forebay.server.front import Route
from forebay.server.limits import ServerOptions
from forebay.server.messages_schema import count_tokens_body, messages_body
from forebay.server.responses_schema import input_tokens_body, responses_body
from forebay.server.tokens import TEXTS, TokenizeFields

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string", "examples": ["text"]}, "text": _TEXT}},
}
_TEXT_OR_PARTS: Schema = {"anyOf": [_TEXT, _PARTS]}


def _body(required: list[str], **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _turns(*roles: str) -> Schema:
    message = _body(["role"], role={"enum": list(roles)}, content={"anyOf": [_TEXT, _PARTS, {"type": "null"}]})
    example = {"role": "user", "content": "Hello"}
    return {"type": "array", "minItems": 1, "items": message, "examples": [[example]]}


_MEANINGS = {
    200: "The answer.",
    204: "The method is allowed to other origins.",
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or one that is not known.",
    403: "The API key may not do that.",
    404: "No such model.",
    408: "The request took too long to arrive.",
    413: "The body is larger than the limit.",
    405: "The method is only for an upgrade to a WebSocket.",
    426: "WebSockets are not offered; send the request by POST.",
    415: "The Content-Encoding is not one that the server undoes.",
    429: "The API key has used up its rate or has too many requests running; `Retry-After` says when the next one passes.",
    431: "The request's headers are larger than the limit.",
    500: "The server failed; its log has the cause under the request id.",
    503: "Loading, draining, overloaded, or the engine has stopped.",
    529: "Loading, draining or overloaded.",
}
_HEADERS = {401: ["WWW-Authenticate"], 429: ["Retry-After"], 503: ["Retry-After"], 529: ["Retry-After"]}
_ALWAYS = (400, 408, 431, 500, 503)  # of every route: from the connection, and in case of a fault of ours
_KEYED = (401, 403)
_POSTED = (404, 413, 415, 429)
_REFUSED = {("/v1/responses", "GET"): (405, 426)}  # methods that are there to be refused, and with what


def _fields(*models: type[BaseModel]) -> Schema:
    """The properties of models, the last one's first, their definitions written out in place."""
    found: Schema = {}
    for model in models:
        schema = model.model_json_schema()
        found |= {name: _resolved(value, schema.get("$defs", {})) for name, value in schema["properties"].items()}
    return found


# What pydantic calls the bounds of a field whose validator comes before them.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _resolved(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _resolved(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {_BOUNDS.get(name, name): _resolved(value, definitions) for name, value in node.items() if name not in ("title", "default")}
    return [_resolved(value, definitions) for value in node] if isinstance(node, list) else node


def _nullable(*kinds: Schema) -> Schema:
    return {"anyOf": [*kinds, {"type": "null"}]}


def _limited() -> Schema:
    """Fields of `ChatRequest` with limits that are the server's, not the field's."""
    stop = {"type": "string", "minLength": 1, "maxLength": ServerOptions.max_stop_length}
    ids = {"type": "array", "items": _IDS["items"], "maxItems": ServerOptions.max_token_ids}
    return {
        "n": _nullable({"type": "integer", "minimum": 1, "maximum": ServerOptions.max_choices}),
        "stop": _nullable(stop, {"type": "array", "items": stop, "maxItems": ServerOptions.max_stops}),
        "stop_token_ids": _nullable(ids),
        "allowed_token_ids": _nullable({**ids, "minItems": 1}),
    }


def _reasoning() -> Schema:
    """What tells whether and how much to think."""
    switch, budget = _nullable({"type": "boolean"}), _nullable({"type": "integer", "minimum": 0})
    effort = _nullable({"type": "string", "examples": ["none", "low", "high", "max"]}, {"type": "integer", "minimum": 1, "maximum": 100})
    kinds = {"enum": ["enabled", "disabled", "adaptive"]}
    return {
        "reasoning_effort": effort,
        "thinking": _nullable({"type": "boolean"}, _body(["type"], type=kinds, budget_tokens=budget, effort=effort)),
        "thinking_token_budget": budget,
        "enable_thinking": switch,
        "drop_thinking": switch,
        "reasoning": _nullable(_body([], enabled=switch, effort=effort, exclude=switch, max_tokens=budget)),
        "chat_template_kwargs": _nullable(
            _body([], thinking=switch, enable_thinking=switch, reasoning_effort=effort, drop_thinking=switch)
        ),
        "output_config": _nullable(_body([], effort=effort)),
    }


def _tools() -> Schema:
    entries = _nullable({**_OBJECTS, "maxItems": ServerOptions.max_tools})
    return {
        "tools": entries,
        "tool_choice": _nullable({"enum": ["auto", "none", "required", "any"]}, _OBJECT),
        "functions": entries,
        "function_call": _nullable({"enum": ["auto", "none"]}, _body(["name"], name=_TEXT)),
    }


def _forms() -> Schema:
    """What binds the answer."""
    schema = _body(["schema"], name=_nullable(_TEXT), schema=_OBJECT, strict=_nullable({"type": "boolean"}))
    json, choice = {"anyOf": [_OBJECT, _TEXT, {"type": "boolean"}]}, {"type": "array", "items": _TEXT}
    kinds = {"enum": ["text", "json_object", "json_schema", "regex"]}
    return {
        "response_format": _nullable(_body(["type"], type=kinds, json_schema=schema, regex=_TEXT, schema=_OBJECT)),
        "structured_outputs": _nullable(_body([], json=json, regex=_TEXT, choice=choice, json_object={"type": "boolean"})),
        "guided_json": _nullable(json),
        "guided_regex": _nullable(_TEXT),
        "guided_choice": _nullable(choice),
        "json_schema": _nullable(json),
        "regex": _nullable(_TEXT),
    }


def _chat() -> Schema:
    turns = {**_turns("system", "developer", "user", "assistant", "tool"), "maxItems": ServerOptions.max_messages}
    own = {"messages": turns, "input": {"anyOf": [_TEXT, _OBJECTS]}}
    return _body(["messages"], **_fields(ChatRequest) | own | _limited() | _reasoning() | _tools() | _forms())


def _completions() -> Schema:
    prompt = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}
    shared = {name: value for name, value in _fields(ChatRequest).items() if name not in CHAT_ONLY | IDLE}
    return _body(["prompt"], **shared | _fields(CompletionFields) | _limited() | _forms() | {"prompt": prompt})


def _tokenize() -> Schema:
    turns = _turns("system", "developer", "user", "assistant", "tool")
    own = {**_fields(TokenizeFields), **dict.fromkeys(TEXTS, _TEXT), "messages": turns}
    own |= dict.fromkeys(("add_generation_prompt", "continue_final_message"), _nullable({"type": "boolean"}))
    return _body([], **own, **_reasoning(), **_tools(), response_format=_forms()["response_format"])


def _detokenize() -> Schema:
    return _body(["tokens"], model=_TEXT, tokens=_IDS)


BODIES: Mapping[str, Callable[[], Schema]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/messages": lambda: messages_body(_fields(ChatRequest) | _limited()),
    "/v1/messages/count_tokens": count_tokens_body,
    "/v1/responses": lambda: responses_body(_fields(ChatRequest) | _limited()),
    "/v1/responses/input_tokens": input_tokens_body,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
"""Route name -> the schema of its body. A route that takes one and is not here would be served undescribed; a test looks for it."""

STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})

_ERRORS: Schema = {
    "openai": _body(["error"], error=_body(
        ["message", "type", "param", "code"],
        message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]},
    )),
    "anthropic": _body(
        ["type", "error", "request_id"],
        type={"const": "error"}, error=_body(["type", "message"], type=_TEXT, message=_TEXT), request_id=_TEXT,
    ),
    "health": _body(["status", "error"], status=_TEXT, error=_OBJECT),
}  # fmt: skip


def document(routes: Iterable[Route], names: Sequence[str], *, open_to_all: bool) -> dict[str, Any]:
    """The document of a server with these routes and models of these `names`; `open_to_all` if it has no API keys."""
    bodies = {name: _naming(make(), names) for name, make in BODIES.items()}
    paths: dict[str, Any] = {}
    for route in routes:
        for path in route.paths:
            paths[path] = _item(route, path, bodies, open_to_all=open_to_all, ids=())
            if route.below:
                paths[f"{path}/{{id}}"] = _item(route, f"{path}/{{id}}", bodies, open_to_all=open_to_all, ids=names)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay", "version": __version__, "description": "One model, for clients of OpenAI's and Anthropic's APIs."},
        "paths": paths,
        "components": {"schemas": {f"{name}-error": schema for name, schema in _ERRORS.items()}, "securitySchemes": schemes},
    }


def statuses(route: Route, method: str, *, open_to_all: bool, named: bool = False) -> list[int]:
    """Every status that a request with a method of the route can be answered with, sorted."""
    found = {*_REFUSED.get((route.name, method), (200,)), *_ALWAYS}
    if not (route.open or open_to_all):
        found.update(_KEYED)
    if method == "POST":
        found.update(_POSTED)
        if open_to_all:
            found.discard(429)
    if named:
        found.add(404)
    if route.family == "anthropic":
        found.add(529)
    return sorted(found)


def _naming(body: Schema, names: Sequence[str]) -> Schema:
    """The body with the models that there are."""
    if "model" in body["properties"]:
        body["properties"]["model"] = {"enum": [*names, None]}
    return body


def _item(route: Route, path: str, bodies: Mapping[str, Schema], *, open_to_all: bool, ids: Sequence[str]) -> dict[str, Any]:
    item: dict[str, Any] = {}
    for method in route.methods:
        answers: dict[str, Any] = {}
        for status in statuses(route, method, open_to_all=open_to_all, named=bool(ids)):
            answers[str(status)] = _answer(route, status, method)
        operation: dict[str, Any] = {"operationId": f"{method.lower()} {path}", "summary": route.name, "responses": answers}
        if method == "POST" and (body := bodies.get(route.name)) is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        if ids:
            known = {name: {"value": name} for name in ids}
            parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}, "examples": known}
            operation["parameters"] = [parameter]
        if not (route.open or open_to_all):
            operation["security"] = [{"bearer": []}, {"x-api-key": []}, {"api-key": []}]
        item[method.lower()] = operation
    return item


def _answer(route: Route, status: int, method: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": _MEANINGS[status]}
    names = ["X-Request-Id", *_HEADERS.get(status, ())]
    answer["headers"] = {name: {"schema": _TEXT} for name in names}
    if method == "HEAD":
        return answer
    if status != 200:
        # A request that never became one (its head was refused, or there are too many connections) knows no family.
        own = {"$ref": f"#/components/schemas/{route.family}-error"}
        other = {"health": status == 503 and route.name.startswith("/health"), "openai": route.family != "openai"}
        kinds = [own, *({"$ref": f"#/components/schemas/{name}-error"} for name, also in other.items() if also)]
        answer["content"] = {"application/json": {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}}
    elif route.name == "/metrics":
        answer["content"] = {"text/plain": {"schema": _TEXT}}
    else:
        answer["content"] = {"application/json": {"schema": _OBJECT}}
        if route.name in STREAMS:
            answer["content"]["text/event-stream"] = {}  # version 3.1 has no words for what one event looks like
    return answer
