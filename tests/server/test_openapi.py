"""The OpenAPI document: it describes what is served, and schemathesis finds nothing else served than it describes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.server.chat_names import ENCODED, IGNORED, UNSUPPORTED
from forebay.server.completions import CHAT_ONLY, IDLE, CompletionFields
from forebay.server.limits import ServerOptions
from forebay.server.openapi import BODIES
from forebay.server.protocol import KNOWN
from forebay.server.tokens import TokenizeFields
from script_engine import ScriptEngine, Served, serve

KEY = "openapi-0123456789"


@pytest.fixture(scope="module")
def document(module_server: Served) -> dict[str, Any]:
    return httpx.get(f"{module_server.url}/openapi.json").json()


def test_every_served_path_and_method_is_described(served: Served, document: dict[str, Any]) -> None:
    expected = {(path, method.lower()) for route in served.app.routes for path in route.paths for method in route.methods}
    described = {(path, method) for path, item in document["paths"].items() for method in item if "{id}" not in path}
    assert described == expected
    assert {path for path in document["paths"] if "{id}" in path} == {f"{p}/{{id}}" for r in served.app.routes if r.below for p in r.paths}
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


def test_every_route_with_a_body_has_a_schema(served: Served, document: dict[str, Any]) -> None:
    assert {route.name for route in served.app.routes if "POST" in route.methods} <= BODIES.keys()
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {"maximum": 2.0, "minimum": 0.0, "type": "number"}
    assert "$ref" not in str(chat)


def test_every_field_that_is_read_is_described(document: dict[str, Any]) -> None:
    """What is refused or ignored whatever its value is not; limits of the server stand beside those of the field.

    `best_of` is taken if it is 1 or `n`; a user's name is checked, though nothing comes of it.
    """
    described = {
        path: document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize")
    }
    chat = (KNOWN - IGNORED - UNSUPPORTED) | {"best_of", "user", "user_id"}
    assert described["/v1/chat/completions"].keys() == chat
    own = {"prompt", "response_format", *CompletionFields.model_fields}
    assert described["/v1/completions"].keys() == (chat - ENCODED - CHAT_ONLY - IDLE) | own
    told = {"messages", "tools", "reasoning_effort", "thinking", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
    assert described["/tokenize"].keys() >= told | {"prompt", "content", "text", *TokenizeFields.model_fields}
    assert described["/v1/chat/completions"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert described["/v1/completions"]["stop"]["anyOf"][1]["maxItems"] == 16


def test_keys_are_described_where_there_are_any(document: dict[str, Any]) -> None:
    assert "security" not in str(document["paths"])
    with serve(ScriptEngine(), ServerOptions(api_keys=KEY)) as served:
        paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    chat = paths["/v1/chat/completions"]["post"]
    assert [list(way) for way in chat["security"]] == [["bearer"], ["x-api-key"], ["api-key"]]
    assert {"401", "403", "429"} <= chat["responses"].keys()
    assert "security" not in paths["/health"]["get"] and "401" not in paths["/health"]["get"]["responses"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    """A server with a key, so that refusals of keys are among what is tried."""
    with serve(ScriptEngine(), ServerOptions(api_keys=KEY)) as served:
        served.engine.say("Hello there.")
        yield served


@pytest.mark.slow
def test_schemathesis_finds_no_fault_and_nothing_undocumented(guarded: Served, tmp_path: Path) -> None:
    """Good and bad requests made from the document: no 5xx, no status and content type that it does not name, answers as it says."""
    tool = Path(sys.executable).with_name("schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance"
    command = [
        str(tool), "run", f"{guarded.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--checks", f"{checks},unsupported_method", "--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1",
        "--generation-deterministic", "--request-timeout", "20",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert guarded.engine.requests  # some were good
    assert not guarded.engine.running and not guarded.engine.waiting
