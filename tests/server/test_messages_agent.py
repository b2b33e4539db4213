"""Coding agents on the Messages protocol: what Claude Code sends, and a long session in which every turn finds the one before it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from engines import tiny_checkpoint
from forebay.engine.client import EngineClient
from forebay.engine.llm import LLM
from forebay.engine.types import Request
from forebay.server.app import App
from forebay.server.limits import ServerOptions
from script_engine import Script, Served

TURNS = 40
BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27", "prompt-caching-scope-2026-01-05"]
RULES = "You are an agent that edits code.\n\n" + "\n".join(f"{i}. Follow rule {i}: é, 漢字 and <tags> stay." for i in range(150))
EPHEMERAL = {"type": "ephemeral"}
STRING = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name} does what it says. " * 8,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"path": STRING, "text": STRING, "options": {"type": "object"}, "line": {"type": "integer"}},
            "required": ["path"],
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
    }
    for name in ("Read", "Edit", "Write", "Bash", "Glob", "Grep", "Task", "mcp__files__list", *(f"mcp__other__tool_{i}" for i in range(12)))
]


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    headers = {"x-app": "cli", "user-agent": "claude-cli/2.1.36 (external, cli)", "x-claude-code-session-id": "s"}
    with anthropic.Anthropic(base_url=served.url, auth_token="t", max_retries=0, timeout=20, default_headers=headers) as agent:
        yield agent


def agent_body(turn: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What Claude Code sends: a billing line that is new with every request, markers of cache control that move on with the end."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.36.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919 % 65536:05x};"
    marked = [dict(message) for message in messages]
    for message in marked[-2:]:
        *rest, last = message["content"]
        message["content"] = [*rest, {**last, "cache_control": EPHEMERAL}]
    return {
        "model": "claude-opus-4-8",
        "max_tokens": 32000,
        "betas": BETAS,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", "cache_control": EPHEMERAL},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": TOOLS,
        "messages": marked,
    }


def parameter(name: str, value: str, *, quoted: bool = True) -> str:
    return f'<｜DSML｜ parameter name="{name}" string="{str(quoted).lower()}">{value}</｜DSML｜ parameter>'


def spoken(rng: random.Random, turn: int) -> str:
    """One answer as the model writes it: thought, text and one to three calls."""
    words = ["tree", "é", "漢字", "🙂", "<b>", '"quoted"', "a\\b", "\n", "1.0", "  "]
    said = " ".join(rng.choice(words) for _ in range(12)).strip()
    calls = []
    for k in range(rng.randint(1, 3)):
        parameters = [parameter("path", f"/src/{turn}/{k}.py")]
        if rng.random() < 0.6:
            parameters.append(parameter("text", said * rng.randint(1, 4)))
        if rng.random() < 0.5:
            parameters.append(parameter("options", '{"deep": [1, 2.5, null], "é": {"on": true}}', quoted=False))
        if rng.random() < 0.5:
            parameters.append(parameter("line", str(rng.randint(1, 2**70)), quoted=False))
        inner = "\n".join(parameters)
        calls.append(f'<｜DSML｜ invoke name="{rng.choice(TOOLS)["name"]}">\n{inner}\n</｜DSML｜ invoke>\n')
    block = f"\n\n<｜DSML｜ calls>\n{''.join(calls)}</｜DSML｜ calls>"
    text = rng.choice([f"I will do step {turn}: {said}.", ""])
    return f"Thought {turn}: {said}.</think>{text}{block}"


def results(rng: random.Random, content: list[Any], turn: int) -> list[dict[str, Any]]:
    """The tool results of one answer, in any order and shape, with a reminder behind them now and then."""
    found = []
    for block in content:
        if block["type"] == "tool_use":
            said = f"result of {block['name']}\n" + "line\n" * rng.randint(0, 30)
            part = {"type": "text", "text": said}
            shape: Any = rng.choice([said, [part], [part, {"type": "text", "text": "more"}]])
            failed = {"is_error": True} if turn % 7 == 0 else {}
            found.append({"type": "tool_result", "tool_use_id": block["id"], "content": shape, **failed})
    rng.shuffle(found)
    if rng.random() < 0.4:
        found.append({"type": "text", "text": f"<system-reminder>It is turn {turn}.</system-reminder>"})
    return found


def replayed(message: Any) -> dict[str, Any]:
    """An answer as the client puts it into its history."""
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


def test_forty_turns_extend_each_other_token_by_token(served: Served, client: anthropic.Anthropic) -> None:
    rng = random.Random(5)
    said: list[list[int]] = []

    def answer(request: Request) -> Script:
        ids = [*served.engine.ids(spoken(rng, len(said))), served.engine.tokenizer.eos_id or 0]
        said.append(ids)
        return Script(ids, per_event=rng.randint(1, 9))

    served.engine.answer = answer
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Fix the tests, please."}]}]
    for turn in range(TURNS):
        with client.beta.messages.stream(**agent_body(turn, messages)) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        assert message.model == "claude-opus-4-8"
        messages.append(replayed(message))
        messages.append({"role": "user", "content": results(rng, messages[-1]["content"], turn)})
    prompts = [list(request.prompt_ids) for request in served.engine.requests]
    assert len(prompts) == TURNS
    reused = 0
    for before, answered, after in zip(prompts, said, prompts[1:], strict=False):
        assert after[: len(before) + len(answered)] == before + answered
        assert len(after) > len(before) + len(answered)
        reused += len(before) + len(answered)
    assert reused >= 0.9 * sum(map(len, prompts))
    assert "billing" not in served.engine.text()


def test_an_interrupted_turn_goes_on_from_where_it_was(served: Served, client: anthropic.Anthropic) -> None:
    """The connection drops in the middle of a call; the history has half an answer, a call without result, and what the user says then."""
    served.engine.say(spoken(random.Random(1), 1), per_event=4)
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Fix the tests, please."}]}]
    partial: list[dict[str, Any]] = []
    with client.beta.messages.stream(**agent_body(0, messages)) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                partial = [block.model_dump(exclude_none=True) for block in stream.current_message_snapshot.content]
                break
    assert [block["type"] for block in partial] in (["thinking", "text", "tool_use"], ["thinking", "tool_use"])
    served.engine.say("</think>Stopped.")
    messages.append({"role": "assistant", "content": partial})
    said = ["[Request interrupted by user]", "No!"]
    messages.append({"role": "user", "content": [{"type": "text", "text": text} for text in said]})
    message = client.beta.messages.create(**agent_body(1, messages))
    assert message.content[-1].type == "text" and message.content[-1].text == "Stopped."
    before, after = (list(request.prompt_ids) for request in served.engine.requests[-2:])
    assert after[: len(before)] == before
    prompt = served.engine.text()
    assert "<tool_result></tool_result>\n\n[Request interrupted by user]\n\nNo!<｜Assistant｜><think>" in prompt


def test_the_requests_around_a_session(served: Served, client: anthropic.Anthropic) -> None:
    """Probes, counting of parts, a title by the small model, a sub-agent with other tools."""
    assert httpx.head(f"{served.url}/").status_code == httpx.head(f"{served.url}/api/hello").status_code == 200
    messages = [{"role": "user", "content": [{"type": "text", "text": "Fix the tests, please."}]}]
    body = agent_body(0, messages)
    kept = ("model", "betas", "thinking", "system", "tools", "messages", "context_management")
    counted = client.beta.messages.count_tokens(**{name: body[name] for name in kept})
    message = client.beta.messages.create(**body)
    assert counted.input_tokens == message.usage.input_tokens
    alone = client.beta.messages.count_tokens(model="claude-opus-4-8", messages=[{"role": "user", "content": "x"}], tools=TOOLS)  # type: ignore[arg-type]
    assert 0 < alone.input_tokens < counted.input_tokens
    title = client.beta.messages.create(
        model="claude-haiku-4-5",
        max_tokens=64,
        system="Write a title.",
        messages=[{"role": "user", "content": "Fix the tests"}, {"role": "assistant", "content": "Title: "}],
        extra_body={"temperature": 0},
    )
    assert title.usage.output_tokens_details is not None and title.usage.output_tokens_details.thinking_tokens == 0
    prompt = served.engine.requests[-1].prompt
    assert prompt is not None and prompt.continues and not prompt.thinking
    helper = client.beta.messages.create(**{**body, "tools": TOOLS[:3], "system": "You search."})
    assert helper.usage.input_tokens < message.usage.input_tokens


def test_the_start_of_a_stream_tells_what_the_real_cache_had() -> None:
    """Behind the real engine the second turn's first event already has the tokens that came from the cache, and the last one agrees."""

    async def session() -> list[list[dict[str, Any]]]:
        llm = LLM(str(tiny_checkpoint()), chat=True, max_sequences=8, decoder_tokens=64, kv_tokens=4096)
        assert llm.engine.codec is not None
        client = EngineClient(llm.engine, llm.engine.codec, "tiny")
        await client.start()
        app = App(client, ServerOptions())
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=20) as http:
                messages = [{"role": "user", "content": "Read this, please: " + "many words " * 40}]
                answers = []
                for _ in range(2):
                    body = {"max_tokens": 20, "stream": True, "messages": messages}
                    response = await http.post("/v1/messages", json=body)
                    assert response.status_code == 200, response.text
                    text = response.text
                    answers.append([json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block])
                    messages = [*messages, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"}]
                return answers
        finally:
            app.close()
            await client.stop()
            llm.close()

    for turn, events in enumerate(asyncio.run(session())):
        start, end = events[0]["message"]["usage"], events[-2]["usage"]
        assert events[-1]["type"] == "message_stop"
        assert (start["input_tokens"], start["cache_read_input_tokens"]) == (end["input_tokens"], end["cache_read_input_tokens"])
        cached, fresh = start["cache_read_input_tokens"], start["input_tokens"]
        assert cached == 0 if turn == 0 else cached > 4 * fresh
