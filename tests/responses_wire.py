"""What the tests of Responses share: reading a stream event by event, scripts of byte tokens, answers without what is random in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

from script_engine import ScriptEngine, Served

PLAIN = {"thinking": {"type": "disabled"}}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
WRITE: dict[str, Any] = {"type": "function", "name": "write", "description": "Write.", "parameters": PARAMETERS, "strict": False}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Patch a file."}
FILES: dict[str, Any] = {"type": "namespace", "name": "files", "description": "Files.",
                         "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}]}  # fmt: skip


def calls(*invocations: tuple[str, dict[str, str]]) -> str:
    """A block of calls as the model writes it; all arguments are strings."""
    text = ""
    for name, arguments in invocations:
        parameters = "".join(f'<｜DSML｜ parameter name="{k}" string="true">{v}</｜DSML｜ parameter>\n' for k, v in arguments.items())
        text += f'<｜DSML｜ invoke name="{name}">\n{parameters}</｜DSML｜ invoke>\n'
    return f"\n\n<｜DSML｜ calls>\n{text}</｜DSML｜ calls>"


def byte_tokens(engine: ScriptEngine, text: str) -> list[int]:
    """A completion in which every byte is a token of its own, except for the markers."""
    ids: list[int] = []
    for piece in re.split("(</think>|｜DSML｜)", text):
        ids += engine.ids(piece) if piece in ("</think>", "｜DSML｜") else engine.byte_ids(piece)
    return [*ids, engine.tokenizer.eos_id or 0]


def post(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/responses", json={"input": "Hi", **body}, timeout=20)


def events(served: Served, **body: Any) -> list[dict[str, Any]]:
    """All events of a stream; their form, order and sequence numbers are checked."""
    response = post(served, **{**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parsed(response.text)


def parsed(text: str) -> list[dict[str, Any]]:
    received = list(_parsed(text))
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    kinds = [event["type"] for event in received]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    ends = [kind for kind in kinds if kind in ("response.completed", "response.incomplete", "response.failed")]
    assert ends == kinds[-1:]
    return received


def _parsed(text: str) -> Iterator[dict[str, Any]]:
    assert text.endswith("\n\n")
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def accumulated(received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items put together from deltas alone, each checked against the events that end it."""
    items: list[dict[str, Any]] = []
    for event in received:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(json.loads(json.dumps(event["item"])))
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert item is items[-1], "an event of an item that had ended"
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            if "encrypted_content" in event["item"]:  # of the whole text, so it comes last
                item["encrypted_content"] = event["item"]["encrypted_content"]
            if item["type"] == "message":
                item["phase"] = event["item"]["phase"]
            assert item == event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        elif kind == "reasoning_summary_part.added":
            assert event["summary_index"] == len(item["summary"])
            item["summary"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
            if kind == "output_text.delta":
                item["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        elif kind == "reasoning_summary_text.delta":
            item["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            part = item["content"][event["content_index"]]
            assert (part["text"], part.get("logprobs")) == (event["text"], event.get("logprobs"))
        elif kind == "reasoning_summary_text.done":
            assert item["summary"][event["summary_index"]]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        elif kind == "custom_tool_call_input.done":
            assert item["input"] == event["input"]
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "reasoning_summary_part.done":
            assert item["summary"][event["summary_index"]] == event["part"]
        else:
            raise AssertionError(f"unexpected event {kind}")
        if kind.endswith(".delta"):
            assert event["delta"], "an empty delta"
    return items


def steady(answer: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(answer, dict):
        return {name: _steady(name, value) for name, value in answer.items() if name not in ("created_at", "completed_at")}
    return [steady(value) for value in answer] if isinstance(answer, list) else answer


def _steady(name: str, value: Any) -> Any:
    if name in ("id", "item_id") and isinstance(value, str):
        return re.sub(r"_[0-9a-f]{32}", "", value)
    if name == "call_id":
        return value[:7]
    return "token" if name == "encrypted_content" and value else steady(value)
