"""Messages behind a real engine whose answers are throws of dice: how long it reasons, and forms that turn out to be impossible."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from engines import Memo
from structured_service import HI, SCHEMA, run

HARD = "^(.*a){1,40}.{100}$"  # accepted, since nobody can tell, and then its states multiply
ASK: dict[str, Any] = {"messages": HI, "max_tokens": 900, "temperature": 1, "seed": 1}
FIELD = "output_config.format.schema"


def form(schema: Any) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def thinking(budget: Any) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_reasoning_ends_with_its_budget(kind: str) -> None:
    """Dice never end it themselves. What is left of max_tokens is for the answer; a budget that leaves nothing of it is no error."""

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for budget in (1, 40, 900, 5000):
            body = {**ASK, **form(SCHEMA), "thinking": {"type": kind, "budget_tokens": budget}}
            answer = await http.post("/messages", json=body)
            assert answer.status_code == 200, answer.text
            assert "thinking" not in answer.headers.get("x-forebay-ignored", "")
            message = answer.json()
            spent = message["usage"]["output_tokens_details"]["thinking_tokens"]
            assert spent == min(budget, 900)
            if budget < 900:
                assert message["stop_reason"] == "end_turn"
                assert set(json.loads(message["content"][-1]["text"])) == set(SCHEMA["properties"])
            else:
                assert message["stop_reason"] == "max_tokens"
                assert [block["type"] for block in message["content"]] == ["thinking"]
                assert message["usage"]["output_tokens"] == 900

    run(session)


@pytest.mark.parametrize(("budget", "said"), [("40", "expected an integer"), (True, "expected an integer"), (-1, "at least 0")])
def test_a_budget_that_is_none(budget: Any, said: str) -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for stream in (False, True):
            answer = await http.post("/messages", json={**ASK, **thinking(budget), "stream": stream})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert "'thinking.budget_tokens'" in answer.json()["error"]["message"]
            assert said in answer.json()["error"]["message"]

    run(session)


def test_a_form_that_becomes_too_complex_is_told_by_its_own_name(caplog: pytest.LogCaptureFixture) -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        body = {**ASK, **form({"type": "string", "pattern": HARD})}
        for stream in (False, True):
            answer = await http.post("/messages", json={**body, "stream": stream})
            assert answer.status_code == 400, answer.text
            told = answer.json()
            assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
            assert f"{FIELD} asks for a form that cannot be followed" in told["error"]["message"]
            assert "response_format" not in answer.text
        answer = await http.post("/messages", json={**body, **thinking(5), "stream": True})  # so that something has been sent before
        assert answer.status_code == 200
        found = events(answer.text)
        kinds = [event["type"] for event in found if event["type"] not in ("ping", "content_block_delta")]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert (found[-1]["type"], found[-1]["error"]["type"]) == ("error", "invalid_request_error")
        assert f"{FIELD} asks for" in found[-1]["error"]["message"]
        assert not any(event["type"] in ("message_delta", "message_stop") for event in found)
        assert answer.text.endswith("\n\n")

    run(session)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_tool_whose_form_becomes_too_complex(caplog: pytest.LogCaptureFixture) -> None:
    """The grammar of calls is of all tools, so the field is `tools`, in both protocols."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": HARD}}, "required": ["a"]}
    tools = [{"name": "write", "input_schema": schema, "strict": True}]

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for more in ({}, {"stream": True}):
            body = {**ASK, "tools": tools, "tool_choice": {"type": "any"}, **more}
            answer = await http.post("/messages", json=body)
            error = answer.json()["error"] if answer.status_code == 400 else events(answer.text)[-1]["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith("tools asks for"), error

    run(session)
    assert not [record for record in caplog.records if record.exc_info]
