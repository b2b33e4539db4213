"""`forebay chat`: talk to a running server in the terminal, reasoning dimmed, with the figures of each turn."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Generator, Iterator
from typing import Any

import httpx
from rich.console import Console

from forebay.model.errors import ConfigError, ForebayError
from forebay.server.access import own_headers
from forebay.server.terminal import consoles

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # gives input() its line editing and history

HELP = """\
/effort N   reasoning effort: none, low, high, max or 1 to 100
/reset      forget the conversation
/quit       leave (also Ctrl-D); Ctrl-C stops an answer"""
STYLES = {"reasoning": "dim", "call": "cyan"}
ANSWER_TIMEOUT = httpx.Timeout(10.0, read=None)  # the server sends comments while it is silent; a long prefill is no failure


class ServerRefusedError(ForebayError):
    """The server answered with an error, or not at all."""


class Turn:
    """What one answer was: its text by channel, why it ended and what it cost."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: dict[int, dict[str, str]] = {}
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.sent = time.monotonic()
        self.first: float | None = None
        self.last: float | None = None

    def add(self, chunk: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Take one streamed chunk; yields (channel, text) to be shown."""
        if error := chunk.get("error"):
            raise ServerRefusedError(f"the answer broke off: {error.get('message', error)}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", []):
            delta = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            for channel, field in (("reasoning", "reasoning_content"), ("content", "content")):
                if text := delta.get(field):
                    setattr(self, channel, getattr(self, channel) + text)
                    yield channel, text
            for call in delta.get("tool_calls") or []:
                known = self.calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
                function = call.get("function") or {}
                known["name"] += function.get("name") or ""
                known["arguments"] += function.get("arguments") or ""
                yield "call", (function.get("name") or "") + (function.get("arguments") or "")

    def figures(self) -> str:
        """`412 tokens, 38.1 tokens/s, first after 0.21 s; prompt 1,024 of which 896 cached`."""
        generated, prompt = self.usage.get("completion_tokens"), self.usage.get("prompt_tokens")
        if generated is None or self.first is None or self.last is None:
            return "stopped"
        parts = [f"{generated:,} token{'s' if generated != 1 else ''}"]
        if generated > 1 and self.last > self.first:
            parts.append(f"{(generated - 1) / (self.last - self.first):.1f} tokens/s")
        parts.append(f"first after {self.first - self.sent:.2f} s")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tail = "" if self.finish_reason in ("stop", "tool_calls") else f"; ended by {self.finish_reason}"
        return f"{', '.join(parts)}; prompt {prompt:,}, of which {cached:,} cached{tail}"


class Chat:
    """One conversation with one server."""

    def __init__(self, client: httpx.Client, model: str, console: Console, *, effort: int | str | None, max_tokens: int | None) -> None:
        self._client = client
        self._model = model
        self._console = console
        self._max_tokens = max_tokens
        self.effort = effort
        self.messages: list[dict[str, Any]] = []

    def say(self, text: str) -> Turn:
        """Send one user message and show the answer as it comes. Ctrl-C ends the turn, not the program."""
        self.messages.append({"role": "user", "content": text})
        turn = Turn()
        try:
            # Closed at once, so that Ctrl-C drops the connection and the server stops generating.
            with contextlib.closing(self._stream(turn)) as pieces:
                for channel, piece in pieces:
                    self._console.print(piece, end="", style=STYLES.get(channel), markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            turn.finish_reason = "interrupt"
        except ForebayError:
            self.messages.pop()
            raise
        self._console.print()
        if turn.content or turn.reasoning:
            self.messages.append({"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning})
        else:
            self.messages.pop()
        return turn

    def _stream(self, turn: Turn) -> Generator[tuple[str, str], None, None]:
        body: dict[str, Any] = {"model": self._model, "messages": self.messages, "stream": True, "stream_options": {"include_usage": True}}
        if self.effort is not None:
            body["reasoning_effort"] = self.effort
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        channel = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServerRefusedError(_refusal(response))
                for chunk in events(response.iter_lines()):
                    for now, text in turn.add(chunk):
                        turn.last = time.monotonic()
                        turn.first = turn.first or turn.last
                        if channel and now != channel:
                            yield now, "\n\n"
                        channel = now
                        yield now, text
        except httpx.HTTPError as error:
            raise ServerRefusedError(f"the connection to the server broke: {error}") from None


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`; comments are skipped."""
    for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def run(args: argparse.Namespace) -> int:
    """Converse until /quit or the end of the input. Raises ServerRefusedError if there is no server at the address."""
    console, _ = consoles()
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"chat: --max-tokens must be at least 1, got {args.max_tokens}")
    url = _address(args.url)
    try:
        http = httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT, headers=own_headers())
    except httpx.InvalidURL as error:
        raise ConfigError(f"chat: --url {args.url!r} is no address of a server: {error}") from None
    with http as client:
        model = args.name or first_model(client, url)
        chat = Chat(client, model, console, effort=_effort(args.effort) if args.effort else None, max_tokens=args.max_tokens)
        console.print(f"{model} at {url}; /help lists the commands", style="dim")
        while (line := _read(console)) is not None:
            if not line.startswith("/"):
                _take_turn(chat, line, console)
            elif not _command(chat, line, console):
                break
    return 0


def _address(given: str) -> str:
    """As people give it: also without http:// in front, or with the /v1 that an OpenAI client wants."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1")


def first_model(client: httpx.Client, url: str) -> str:
    """The first model that the server lists."""
    try:
        response = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerRefusedError(f"there is no server at {url} ({error}); start one with `forebay serve` or give its --url") from None
    if response.status_code != 200:
        raise ServerRefusedError(_refusal(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ServerRefusedError(f"the server at {url} lists no models: it does not speak the OpenAI API") from None


def _refusal(response: httpx.Response) -> str:
    try:
        return f"the server refused: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"


def _read(console: Console) -> str | None:
    """The next line that is not empty; None at the end of the input. Ctrl-C clears the line."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print()
            continue
        if line:
            return line


def _take_turn(chat: Chat, line: str, console: Console) -> None:
    try:
        turn = chat.say(line)
    except ForebayError as error:
        console.print(error.message, style="red", markup=False)
    else:
        console.print(turn.figures(), style="dim", markup=False, soft_wrap=True)


def _command(chat: Chat, line: str, console: Console) -> bool:
    """Carry out a `/word`; False means leave."""
    word, _, rest = line.partition(" ")
    if word in ("/quit", "/exit"):
        return False
    if word == "/reset":
        chat.messages.clear()
        console.print("forgotten", style="dim")
    elif word == "/effort" and not rest.strip():
        console.print(f"effort {'as the server has it' if chat.effort is None else chat.effort}", style="dim")
    elif word == "/effort":
        try:
            chat.effort = _effort(rest.strip())
            console.print(f"effort {chat.effort}", style="dim")
        except ConfigError as error:
            console.print(error.message, style="red", markup=False)
    else:
        if word != "/help":
            console.print(f"there is no command {word!r}", style="red", markup=False)
        console.print(HELP, style="dim", markup=False)
    return True


def _effort(text: str) -> int | str:
    if text in ("none", "low", "high", "max"):
        return text
    if text.isdecimal() and 1 <= int(text) <= 100:
        return int(text)
    raise ConfigError(f"effort is none, low, high, max or a number from 1 to 100, got {text!r}")
