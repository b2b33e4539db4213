"""How long a long agent prompt takes from the bytes of its body to token ids: new, and as the next turn of one that was served before."""

from __future__ import annotations

import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import orjson

from forebay.model.chat import ChatCodec
from forebay.model.tokenizer import Tokenizer
from forebay.server.body import parse_object
from forebay.server.limits import ServerOptions
from forebay.server.protocol import parse_chat

SIZES = (500, 2_000, 6_000, 16_000)  # characters of a tool's result: a line that matched up to a whole file
SYSTEM = 20_000
TOOLS = 20
CONTEXT = 1 << 20


def measure(tokenizer_file: Path, size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each of `repeats` prompts of `size` bytes, `cold` and `extended`: whole, by part, and of CPU. The first is not counted."""
    tokenizer = Tokenizer.load(tokenizer_file)
    source = _source()
    found: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        codec = ChatCodec(tokenizer)
        body = agent_body(source, size, number)
        parts = {"cold": _serve(codec, tokenizer, body)}
        body["messages"] += _turn(source, len(body["messages"]), 3_000, size)
        parts["extended"] = _serve(codec, tokenizer, body)
        for name, times in parts.items():
            for part, seconds in times.items():
                if number:
                    found.setdefault(name + part, []).append(seconds)
    return found


def _serve(codec: ChatCodec, tokenizer: Tokenizer, body: dict[str, Any]) -> dict[str, float]:
    """Seconds between the body and its ids, as the chat route gets from one to the other; parts of it; CPU of all threads."""
    data, options = orjson.dumps(body), ServerOptions()
    worked, began = time.process_time(), time.perf_counter()
    parsed = parse_object(data, options.max_depth)
    read = time.perf_counter()
    call = parse_chat(parsed, options, tokenizer)
    validated = time.perf_counter()
    codec.encode(call.body, default_effort="high", thinking_default=True, max_tokens=CONTEXT)
    ended = time.perf_counter()
    return {
        "": ended - began,
        ": JSON": read - began,
        ": validate": validated - read,
        ": encode and tokenise": ended - validated,
        ", CPU": time.process_time() - worked,
    }


def agent_body(source: str, size: int, number: int) -> dict[str, Any]:
    """A request as a coding agent sends it: instructions, tools, then turns of calls and results, about `size` bytes as JSON."""
    start = number * 100_000 % len(source)
    text = source[start:] + source[:start]
    body: dict[str, Any] = {
        "messages": [{"role": "system", "content": text[:SYSTEM]}, {"role": "user", "content": "The tests fail. Please find out why."}],
        "tools": [_tool(text, i) for i in range(TOOLS)],
        "stream": True,
    }
    draw, place, held = random.Random(number), SYSTEM, len(orjson.dumps(body))
    while held < size:
        turn = _turn(text, len(body["messages"]), draw.choice(SIZES), place)
        place += 20_000
        held += len(orjson.dumps(turn))
        body["messages"] += turn
    return body


def _turn(text: str, number: int, length: int, place: int) -> list[dict[str, Any]]:
    place %= len(text) - 40_000
    arguments = json.dumps({"path": f"src/module_{number}.py", "pattern": text[place : place + 200]})
    call = {"id": f"call_{number}", "type": "function", "function": {"name": f"tool_{number % TOOLS}", "arguments": arguments}}
    thought = f"I look at {text[place : place + 300]}"
    return [
        {"role": "assistant", "content": "Looking.", "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": text[place : place + length]},
    ]


def _tool(text: str, number: int) -> dict[str, Any]:
    properties = {f"option_{k}": {"type": "string", "description": text[k * 90 : k * 90 + 80]} for k in range(6)}
    description = text[number * 700 : number * 700 + 400]
    parameters = {"type": "object", "properties": properties, "required": ["option_0"]}
    return {"type": "function", "function": {"name": f"tool_{number}", "description": description, "parameters": parameters}}


def _source() -> str:
    """Text such as agents send, present wherever this runs: Python's own library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(file.read_text("utf-8", "replace") for file in sorted(folder.glob("*.py")))
