"""An agent's session of forty turns on the demo checkpoint, through Messages and through Responses at once, with the official clients.

What the model writes is sent back as each client keeps it, so every prompt has to begin with the one before it and all that was sampled:
then the cache has it, and the usage says so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anthropic
import httpx2
import openai

from forebay.engine.client import EngineClient
from forebay.engine.llm import LLM
from forebay.engine.types import OutputEvent, Request
from forebay.server.app import App
from forebay.server.limits import ServerOptions

TURNS = 40
CITIES = ("Oslo", "Paris", "Rome")
RULES = "You are an agent.\n" + "\n".join(f"{i}. Rule {i}: é, 漢字 and <tags> stay as they are." for i in range(25))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
EPHEMERAL = {"type": "ephemeral"}

Turn = tuple[int, int, list[str]]  # input tokens, the cached ones among them, ids of the calls that were made
Ask = Callable[[int, list[str]], Awaitable[Turn]]  # of the number of the turn and the calls that wait for a result


class Watched(EngineClient):
    """The engine's client, which writes down the ids that went in and came out."""

    runs: list[tuple[Request, list[int]]]

    async def submit(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        said: list[int] = []
        self.runs.append((request, said))
        async with aclosing(super().submit(request)) as events:
            async for event in events:
                said += event.token_ids
                yield event


def plan(turn: int) -> tuple[str, bool, int]:
    """What the user says if no call waits, whether a call is wanted, and the output limit: most answers are cut off, to save time."""
    city = CITIES[turn // 14]
    return f"What is the weather in {city}? {turn}", turn % 14 == 0, 200 if turn % 14 < 2 else 1


def claude(client: anthropic.AsyncAnthropic) -> Ask:
    """A turn of Claude Code, streamed."""
    messages: list[dict[str, Any]] = []
    tools = [{"name": "get_weather", "description": "Weather of a city", "input_schema": CITY}]

    async def turn(number: int, waiting: list[str]) -> Turn:
        text, wants, limit = plan(number)
        results = [{"type": "tool_result", "tool_use_id": i, "content": [{"type": "text", "text": "12 degrees"}]} for i in waiting]
        messages.append({"role": "user", "content": results or [{"type": "text", "text": text}]})
        *before, last = messages
        marked = {**last, "content": [*last["content"][:-1], {**last["content"][-1], "cache_control": EPHEMERAL}]}
        billing = f"x-anthropic-billing-header: cc_version=2.1.36.{number:03x};"
        async with client.messages.stream(
            model="claude-opus-4-8",
            max_tokens=limit,
            system=[{"type": "text", "text": billing}, {"type": "text", "text": RULES, "cache_control": EPHEMERAL}],  # type: ignore[list-item,typeddict-item]
            messages=[*before, marked],  # type: ignore[list-item]
            tools=tools,  # type: ignore[arg-type]
            thinking={"type": "adaptive"},
            tool_choice={"type": "any" if wants else "auto", "disable_parallel_tool_use": True},  # type: ignore[arg-type]
            output_config={"effort": "low"},
            extra_body={"temperature": 0, "cache_salt": "messages"},
        ) as stream:
            message = await stream.get_final_message()
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
        used, cached = message.usage, message.usage.cache_read_input_tokens or 0
        return used.input_tokens + cached, cached, [block.id for block in message.content if block.type == "tool_use"]

    return turn


def codex(client: openai.AsyncOpenAI) -> Ask:
    """A turn of Codex, streamed: it keeps items as they are done, without their ids and states."""
    items: list[Any] = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]}]
    tools = [{"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": CITY, "strict": False}]

    async def turn(number: int, waiting: list[str]) -> Turn:
        text, wants, limit = plan(number)
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        items.extend([{"type": "function_call_output", "call_id": i, "output": "12 degrees"} for i in waiting] or [said])
        calls: list[str] = []
        response = None
        async for event in await client.responses.create(
            model="demo",
            max_output_tokens=limit,
            instructions=RULES,
            input=items,
            tools=[*tools, {"type": "web_search"}],  # type: ignore[arg-type]
            tool_choice="required" if wants else "auto",
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            store=False,
            stream=True,
            temperature=0,
            extra_body={"cache_salt": "responses"},
        ):
            if event.type == "response.output_item.done":
                item = {name: value for name, value in event.item.to_dict().items() if name not in ("id", "status")}
                items.append(item)
                calls += [str(item["call_id"])] if item["type"] == "function_call" else []
            elif event.type in ("response.completed", "response.incomplete"):
                response = event.response  # type: ignore[union-attr]
        assert response is not None and response.usage is not None
        return response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens, calls

    return turn


async def session(ask: Ask, together: asyncio.Barrier) -> list[Turn]:
    """All turns, each `together` with the same one of the other session: two prompts in a step cost little more than one."""
    turns: list[Turn] = []
    for number in range(TURNS):
        await together.wait()
        turns.append(await ask(number, turns[-1][2] if turns else []))
    return turns


async def both() -> tuple[list[list[Turn]], list[tuple[str, str, str]]]:
    """The turns of both sessions, and for each request of the engine its salt, its prompt and what was sampled."""
    llm = LLM("demo", chat=True, max_sequences=4, kv_tokens=16384)
    assert llm.engine.codec is not None
    engine = Watched(llm.engine, llm.engine.codec, "demo")
    engine.runs = []
    await engine.start()
    app = App(engine, ServerOptions())
    try:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), timeout=120) as http:
            first = claude(anthropic.AsyncAnthropic(base_url="http://x", api_key="none", http_client=http, max_retries=0))
            second = codex(openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0))
            pair = asyncio.Barrier(2)
            sessions = list(await asyncio.gather(session(first, pair), session(second, pair)))
            text = llm.tokenizer.decode  # the model may spell a word with other tokens than the tokenizer, so texts are compared
            return sessions, [(request.salt, text(list(request.prompt_ids)), text(said)) for request, said in engine.runs]
    finally:
        app.close()
        await engine.stop()
        llm.close()


def test_forty_turns_come_out_of_the_cache() -> None:
    sessions, runs = asyncio.run(both())
    for name, turns in zip(("messages", "responses"), sessions, strict=True):
        ran = [(prompt, said) for salt, prompt, said in runs if salt.endswith(name)]
        assert len(ran) == len(turns) == TURNS
        assert sum(len(calls) for _, _, calls in turns) >= 3
        for number, ((before, said), (after, _)) in enumerate(itertools.pairwise(ran)):
            assert after.startswith(before + said), f"{name}: turn {number + 1} does not extend {said!r}"
        asked, cached = sum(tokens for tokens, _, _ in turns), sum(tokens for _, tokens, _ in turns)
        assert cached >= 0.9 * asked, f"{name}: {cached} of {asked} input tokens were cached"
