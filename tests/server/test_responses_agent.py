"""What coding agents send to /v1/responses: the request of Codex, and a session of 40 turns whose prompts extend each other."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from responses_wire import accumulated, calls, events, post
from script_engine import Served

SHELL: dict[str, Any] = {
    "type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
    "parameters": {"type": "object", "required": ["command"], "additionalProperties": False,
                   "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}}},
}  # fmt: skip
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files.",
                         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}}  # fmt: skip
AGENTS: dict[str, Any] = {
    "type": "namespace", "name": "agents", "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn", "description": "Starts one.", "strict": False,
               "parameters": {"type": "object", "properties": {"task": {"type": "string"}}}}],
}  # fmt: skip
TOOLS = [SHELL, PATCH, AGENTS, {"type": "web_search", "external_web_access": False}]


def told(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def codex(**fields: Any) -> dict[str, Any]:
    """A request as Codex sends it."""
    return {
        "model": "script",
        "instructions": "You are a coding agent. " * 50,
        "input": [
            told("developer", "<permissions>workspace-write</permissions>"),
            told("user", "<environment_context>cwd: /w</environment_context>"),
            told("user", "Fix the bug."),
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "client_metadata": {"x-codex-installation-id": "1"},
        **fields,
    }


def test_request_of_codex(served: Served) -> None:
    served.engine.say("Look.</think>" + calls(("apply_patch", {"input": "*** Begin Patch\n*** End Patch"})))
    answer = post(served, **codex())
    assert answer.status_code == 200
    assert {"tools.web_search", "prompt_cache_key", "client_metadata"} == set(answer.headers["x-forebay-ignored"].split(", "))
    received = events(served, **codex())
    reasoning, patch = accumulated(received)
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Look."}]
    assert reasoning["encrypted_content"]
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin Patch\n*** End Patch")
    usage = received[-1]["response"]["usage"]
    assert all(isinstance(usage[name], int) for name in ("input_tokens", "output_tokens", "total_tokens"))
    prompt = served.engine.text(0)
    order = ["You are a coding agent.", '"agents::spawn"', "<permissions>", "<environment_context>", "Fix the bug."]
    assert sorted(order, key=prompt.index) == order
    assert "web_search" not in prompt
    asked = served.engine.requests[0].prompt
    assert asked is not None and (asked.parse.max_calls, asked.effort) == (1, 75)


def test_null_reasoning_and_no_include(served: Served) -> None:
    served.engine.say("Look.</think>Done.")
    received = events(served, **codex(reasoning=None, include=[], parallel_tool_calls=True))
    reasoning = accumulated(received)[0]
    assert reasoning["summary"] == []
    assert "encrypted_content" not in reasoning


def test_namespace_tool_comes_back_by_its_own_name(served: Served) -> None:
    served.engine.say("Hm.</think>" + calls(("agents::spawn", {"task": "t"})))
    received = events(served, **codex())
    call = accumulated(received)[-1]
    assert (call["name"], call["namespace"]) == ("spawn", "agents")
    done = next(event for event in received if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], json.loads(done["arguments"])) == ("spawn", {"task": "t"})
    history = [*codex()["input"], call, {"type": "function_call_output", "call_id": call["call_id"], "output": "started"}]
    post(served, **codex(input=history))
    prompt = served.engine.text()
    assert '<｜DSML｜ invoke name="agents::spawn">' in prompt


def _turn(rng: random.Random, number: int) -> str:
    """What the model says in one turn: always reasoning, sometimes a comment, one to three calls; at the end an answer."""
    thought = f"Step {number}: {rng.choice(['look', 'think', 'try'])}.\n\n- a < b\n- 漢字"
    comment = rng.choice(["", f"Now number {number}.", "I see:\n\n```\nx\n```"])
    if number == 39:
        return f"{thought}</think>All done."
    made = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(3)
        if kind == 0:
            made.append(("apply_patch", {"input": f'*** Begin Patch\n+{number} "q" \\ </b>\n*** End Patch'}))
        elif kind == 1:
            made.append(("agents::spawn", {"task": f"task {number}"}))
        else:
            made.append(("shell", {"workdir": f"/w/{number}"}))
    return f"{thought}</think>{comment}" + calls(*made)


@pytest.mark.parametrize("streamed", [False, True])
def test_session_of_forty_turns_extends_its_prompt(served: Served, client: openai.OpenAI, streamed: bool) -> None:
    """Each prompt begins, token by token, with the prompt of the turn before and all that the model answered: it can be cached."""
    rng = random.Random(5)
    engine = served.engine
    history: list[Any] = codex()["input"]
    written: list[int] = []  # prompt and answer of the turn before
    total = cached = 0
    for number in range(40):
        said = _turn(rng, number)
        engine.cached = len(written)
        engine.say(said)
        asked = codex(input=history, parallel_tool_calls=True)
        if streamed:
            # As Codex does: items as they are done, without their ids and states.
            received = events(served, **asked)
            items = [event["item"] for event in received if event["type"] == "response.output_item.done"]
            items = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items]
            usage = received[-1]["response"]["usage"]
        else:
            metadata = asked.pop("client_metadata")
            answer = client.responses.create(**{**asked, "stream": False, "extra_body": {"client_metadata": metadata}})
            items = [item.to_dict() for item in answer.output]
            usage = answer.to_dict()["usage"]
        request = engine.requests[-1]
        assert list(request.prompt_ids[: len(written)]) == written, f"turn {number} does not extend the turn before"
        written = [*request.prompt_ids, *engine.ids(said), engine.tokenizer.eos_id or 0]
        total += usage["input_tokens"]
        cached += usage["input_tokens_details"]["cached_tokens"]
        history += items
        for item in items:
            if item["type"] in ("function_call", "custom_tool_call"):
                output = f"result of {number}\n" * rng.randint(1, 9)
                history.append({"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output})
    assert items[-1]["content"][0]["text"] == "All done."
    assert cached / total >= 0.9
