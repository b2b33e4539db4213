"""Responses behind a real engine whose answers are throws of dice: how long it reasons, and forms that turn out to be impossible."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from engines import Memo
from responses_wire import parsed
from structured_service import SCHEMA, run

HARD = "^(.*a){1,40}.{100}$"  # accepted, since nobody can tell, and then its states multiply
ASK: dict[str, Any] = {"input": "Hi", "max_output_tokens": 900, "temperature": 1, "seed": 1}


def form(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}}


def test_the_output_limit_counts_reasoning() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for stream in (False, True):
            answer = await http.post("/responses", json={**ASK, "max_output_tokens": 30, "stream": stream})
            response = parsed(answer.text)[-1]["response"] if stream else answer.json()
            assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
            usage = response["usage"]
            assert usage["output_tokens"] == usage["output_tokens_details"]["reasoning_tokens"] == 30

    run(session)


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning"])
def test_reasoning_ends_with_its_budget(name: str) -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        limit = {name: 40 if name != "reasoning" else {"max_tokens": 40, "summary": "auto"}}
        response = (await http.post("/responses", json={**ASK, **form(SCHEMA), **limit})).json()
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 40
        assert set(json.loads(response["output"][-1]["content"][0]["text"])) == set(SCHEMA["properties"])

    run(session)


def test_a_form_that_becomes_too_complex_is_told_by_its_own_name(caplog: pytest.LogCaptureFixture) -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        body = {**ASK, **form({"type": "string", "pattern": HARD}), "thinking": False}
        answer = await http.post("/responses", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "grammar_failed", "text.format.schema")
        assert error["message"].startswith("text.format.schema asks for a form that cannot be followed")
        body |= {"thinking": True, "reasoning": {"max_tokens": 5}, "stream": True}  # so that something has been sent before
        found = parsed((await http.post("/responses", json=body)).text)
        failed = found[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
        assert failed["error"]["message"].startswith("text.format.schema asks for a form that cannot be followed")
        assert failed["output"][0]["type"] == "reasoning"

    run(session)
    assert not [record for record in caplog.records if record.exc_info]
