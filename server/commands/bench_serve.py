"""Many streams at once against a server, and the same requests one after another."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.model.errors import ForebayError
from forebay.server.access import own_headers
from forebay.server.cli import read_settings, setting_arguments
from forebay.server.commands.scratch import scratch
from forebay.server.limits import ENVIRONMENT

WORDS = ("river", "stone", "water", "gate", "mill", "wheel", "slow", "deep", "still", "channel", "bank", "weir", "lock", "pool", "flow")
STOP_TIMEOUT_S = 20.0


class BenchError(ForebayError):
    """The measurement could not be made."""


@dataclass
class Stream:
    """One request and when its chunks came, in seconds on the monotonic clock."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass
class Phase:
    """One round of all requests, at once or one after another."""

    streams: list[Stream]
    seconds: float

    @property
    def finished(self) -> list[Stream]:
        return [s for s in self.streams if s.error is None]

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.finished) / self.seconds

    def starved(self, at_once: int) -> int:
        """Streams that got their first token only after another of the streams that ran beside them had all of its tokens."""
        if at_once == 1 or not self.finished:
            return 0
        earliest_end = min(s.chunks[-1] for s in self.finished)
        return sum(s.chunks[0] > earliest_end for s in self.finished)


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the benchmark. Returns its figures, and whether every stream finished and none starved."""
    with _server(args, err) as url:
        phases = asyncio.run(_run(args, url, err))
    figures = _figures(args, url, phases)
    _show(figures, out)
    return figures, all(not p["failed"] and not p["starved"] for p in figures["phases"].values())


@contextlib.contextmanager
def _server(args: argparse.Namespace, err: Console) -> Iterator[str]:
    """The server given by `--url`, or one of our own on a free port, stopped at the end."""
    if args.url:
        yield args.url.rstrip("/")
        return
    config, origins = read_settings(args)
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "forebay.server.cli", "serve", *setting_arguments(args), "--port", "0"]
        # Ours alone, so it needs no keys.
        command += ["--set", "server.access_log=false", "--set", "server.api_keys_file=none", "--set", "server.metrics_bind=none"]
        environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
        for name in ("max_sequences", "decoder_tokens"):  # each running stream takes one of both
            if (given := getattr(config.engine, name)) is not None and given < args.streams:
                command += ["--set", f"engine.{name}={args.streams}"]
        if origins["cache.dir"] == "default":  # prompts nobody will send again do not belong among the user's
            command += ["--set", f"cache.dir={stack.enter_context(scratch(config))}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                first = process.stdout.readline()
                url = first.rpartition(" at ")[2].strip()
                if not url.startswith("http"):
                    raise BenchError("the server did not start; the line above says why")
                err.print(f"measuring {url}", style="dim", markup=False)
                yield url
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


async def _run(args: argparse.Namespace, url: str, err: Console) -> dict[str, list[Phase]]:
    """All rounds, the two ways of running interleaved."""
    limits = httpx.Limits(max_connections=args.streams, max_keepalive_connections=args.streams)
    ways = {"at once": args.streams} | ({"one by one": 1} if args.compare_sequential else {})
    phases: dict[str, list[Phase]] = {way: [] for way in ways}
    timeout = httpx.Timeout(30.0, read=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=own_headers() if args.url else {}) as client:
        model = await _model(client, url)
        words = await _words_for(client, model, args.prompt_tokens)
        for repeat in range(args.repeats):
            for way, at_once in ways.items():
                err.print(f"round {repeat + 1} of {args.repeats}: {args.streams} requests {way}", style="dim")
                bodies = [_body(model, words, args.max_tokens) for _ in range(args.streams)]
                phases[way].append(await _phase(client, bodies, at_once))
    return phases


async def _model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get("/v1/models")
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"there is no server at {url} ({error})") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenchError(f"the server at {url} lists no models") from None


async def _words_for(client: httpx.AsyncClient, model: str, tokens: int) -> int:
    """Words whose chat prompt has about `tokens` tokens, found from two prompts; also warms the server up."""
    few, many = [await _request(client, _body(model, count, 1)) for count in (16, 144)]
    for stream in (few, many):
        if stream.error:
            raise BenchError(f"the server refused a request: {stream.error}")
    per_word = (many.prompt_tokens - few.prompt_tokens) / 128
    return max(1, round(16 + (tokens - few.prompt_tokens) / per_word))


def _body(model: str, words: int, max_tokens: int) -> dict[str, Any]:
    """A request of its own: the first word is new each time, so no prefix of an earlier one can be reused."""
    text = " ".join([secrets.token_hex(4), *(secrets.choice(WORDS) for _ in range(words - 1))])
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _phase(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], at_once: int) -> Phase:
    start = time.monotonic()
    if at_once == 1:
        streams = [await _request(client, body) for body in bodies]
    else:
        streams = await asyncio.gather(*(_request(client, body) for body in bodies))
    return Phase(streams, time.monotonic() - start)


async def _request(client: httpx.AsyncClient, body: dict[str, Any]) -> Stream:
    stream = Stream(time.monotonic())
    usage: dict[str, Any] = {}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                stream.error = f"{response.status_code} {response.text[:300]}"
                return stream
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    stream.error = str(chunk["error"].get("message"))
                usage = chunk.get("usage") or usage
                if any(choice["delta"].keys() - {"role"} or choice["finish_reason"] for choice in chunk.get("choices", ())):
                    stream.chunks.append(now)
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.tokens, stream.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    if stream.error is None and (stream.tokens != body["max_tokens"] or not stream.chunks):
        stream.error = f"{stream.tokens} of {body['max_tokens']} tokens arrived"
    return stream


def _figures(args: argparse.Namespace, url: str, phases: dict[str, list[Phase]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"url": url, "streams": args.streams, "max_tokens": args.max_tokens, "rounds": args.repeats, "phases": {}}
    for way, rounds in phases.items():
        finished = [stream for phase in rounds for stream in phase.finished]
        errors = sorted({stream.error for phase in rounds for stream in phase.streams if stream.error})
        figures["phases"][way] = {
            "seconds": statistics.median(phase.seconds for phase in rounds),
            "tokens_per_second": statistics.median(phase.tokens_per_second for phase in rounds),
            "prompt_tokens": statistics.median(stream.prompt_tokens for stream in finished) if finished else 0,
            "first_token_s": _spread([stream.first for stream in finished]),
            "inter_token_s": _spread([gap for stream in finished for gap in stream.gaps]),
            "stream_s": _spread([stream.chunks[-1] - stream.sent for stream in finished]),
            "failed": sum(stream.error is not None for phase in rounds for stream in phase.streams),
            "starved": sum(phase.starved(args.streams if way == "at once" else 1) for phase in rounds),
            "errors": errors[:5],
        }
    if "one by one" in phases:
        pairs = zip(phases["at once"], phases["one by one"], strict=True)
        ratios = [many.tokens_per_second / one.tokens_per_second for many, one in pairs if one.finished]
        figures["ratio"] = statistics.median(ratios) if ratios else None
    return figures


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile and maximum; zeros for no values."""
    ordered = sorted(values) or [0.0]
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)} | {"max": ordered[-1]}


def _show(figures: dict[str, Any], out: Console) -> None:
    phases = figures["phases"]
    prompt = next(iter(phases.values()))["prompt_tokens"]
    out.print(f"{figures['streams']} requests, prompts of {prompt:.0f} tokens, {figures['max_tokens']} tokens each", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for way in phases:
        table.add_column(way, justify="right")
    table.add_row("total, s", *(f"{phase['seconds']:.2f}" for phase in phases.values()))
    table.add_row("tokens/s", *(f"{phase['tokens_per_second']:.1f}" for phase in phases.values()))
    for label, key in (("first token", "first_token_s"), ("between tokens", "inter_token_s"), ("whole answer", "stream_s")):
        for at in ("p50", "p95", "max"):
            table.add_row(f"{label}, {at}, ms", *(f"{phase[key][at] * 1000:,.0f}" for phase in phases.values()))
    out.print(table)
    for way, phase in phases.items():
        for error in phase["errors"]:
            out.print(f"{way}: {error}", style="red", markup=False)
    failed, starved = sum(p["failed"] for p in phases.values()), sum(p["starved"] for p in phases.values())
    if failed or starved:
        out.print(f"{failed} requests failed, {starved} starved", style="red")
    else:
        out.print("every request finished, none starved", style="green")
    if figures.get("ratio"):
        out.print(f"at once: {figures['ratio']:.2f} times the tokens per second of one by one", style="bold")
