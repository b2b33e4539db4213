"""The client side of `forebay bench frontend`: many raw streams from one event loop, and what the server process used meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from forebay.server.commands.bench_serve import BenchError

CONNECTING = 128  # connections being made at once
END = b"data: [DONE]"
STOP_S = 20.0
STALL_S = 60.0  # without any byte for so long, a measurement has failed
WARM_STREAMS, WARM_TOKENS = 32, 2  # before the measurement: what is made with the first requests is no cost of the others
LITELLM = Path(__file__).with_name("frontend_litellm.py")


@dataclass
class Shape:
    """What is asked of the server: `streams` at once with `tokens` each, a step every `interval` seconds once all of them are open.

    `peer` is the server to measure in place of ours, `python` the interpreter that has it, if it is not this one.
    """

    streams: int
    tokens: int
    interval: float
    peer: str = "none"
    python: str = sys.executable


@dataclass
class Outcome:
    """What came of it. Seconds, bytes; `latencies` from a token's emission to its arrival here, one per token."""

    streams: int
    finished: int
    errors: list[str]
    latencies: list[float]
    tokens: int  # that arrived while all streams ran
    cpu: float  # seconds of the whole server process meanwhile
    seconds: float
    open_bytes: float  # resident memory per open stream, above that before the first


@dataclass
class Stream(asyncio.Protocol):
    """One request over a connection of its own. `arrivals` are (time, words so far)."""

    load: Load
    name: str
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    words: int = 0
    tail: bytes = b""
    error: str | None = None
    ended: bool = False
    began: bool = False

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
        self.transport = transport
        transport.write(self.load.request(self.name))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.began:
            self.began = True
            if not data.startswith(b"HTTP/1.1 200"):
                self.error = data[:300].decode("utf-8", "replace")
        data = self.tail + data
        found = data.count(self.load.word)
        self.tail = data[-(len(END) - 1) :] if not found else data[data.rfind(self.load.word) + len(self.load.word) :][-(len(END) - 1) :]
        if found:
            if not self.words:
                self.load.started += 1
            self.words += found
            self.arrivals.append((now, self.words))
            self.load.words += found
        self.load.progress = now
        if END in data:
            self.ended = True
            self.load.ended += 1
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended:
            self.load.ended += 1
            self.error = self.error or f"the connection closed after {self.words} tokens"


class Load:
    """All streams of one measurement against one server process."""

    def __init__(self, shape: Shape, word: bytes) -> None:
        self.shape, self.word = shape, word
        self.streams: list[Stream] = []
        self.started = self.ended = self.words = 0
        self.progress = time.monotonic()
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": "Say the same word again and again."}],
            "max_tokens": shape.tokens,
            "thinking": {"type": "disabled"},
            "stream": True,
        }
        self._body = json.dumps(body).encode()

    def request(self, name: str) -> bytes:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nx-request-id: {name}\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(self._body) + self._body

    async def run(self, server: Server) -> Outcome:
        """Open all streams, sample the server while all of them run, wait for their ends."""
        shape, loop = self.shape, asyncio.get_running_loop()
        before = server.memory()
        streams = self.streams
        gate = asyncio.Semaphore(CONNECTING)

        async def connect(number: int) -> None:
            async with gate:
                stream = Stream(self, f"bench-{number}")
                streams.append(stream)
                try:
                    await loop.create_connection(lambda: stream, "127.0.0.1", server.port)
                except OSError as error:
                    stream.error, stream.ended = f"not accepted: {error}", True
                    self.ended += 1

        await asyncio.gather(*(connect(number) for number in range(shape.streams)))
        await self._until(lambda: self.started + self.ended >= shape.streams)
        began, cpu, words = time.monotonic(), server.cpu(), self.words
        opened = server.memory() - before
        await self._until(lambda: self.ended > 0)
        seconds, cpu, words = time.monotonic() - began, server.cpu() - cpu, self.words - words
        await self._until(lambda: self.ended >= shape.streams)
        steps, first = server.report()
        latencies: list[float] = []
        for stream in streams:
            start, seen = first.get(stream.name, 0), 0
            for now, count in stream.arrivals:
                latencies += [now - steps[start + token] for token in range(seen, count)]
                seen = count
        short = {f"{s.words} of {shape.tokens} tokens" for s in streams if s.words != shape.tokens}
        errors = sorted({s.error for s in streams if s.error} | short)
        fine = sum(s.error is None and s.words == shape.tokens for s in streams)
        return Outcome(shape.streams, fine, errors, latencies, words, cpu, seconds, opened / shape.streams)

    async def _until(self, condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.01)
            if time.monotonic() - self.progress > STALL_S:
                raise BenchError(f"nothing arrived for {STALL_S:.0f} s; {self.ended} of {self.shape.streams} streams had ended")


class Server:
    """A server process of ours, its counters and its reports."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stdin is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout
        line = self._out.readline().strip()
        if not line.isdigit():
            raise BenchError("the server of the measurement did not start; the lines above say why")
        self.port = int(line)
        self.word = ""

    def cpu(self) -> float:
        """Seconds of CPU of all its threads so far, user and system."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def gather(self, streams: int) -> None:
        """Begin anew: the next step waits until so many requests run."""
        self._ask(f"gather {streams}")

    def report(self) -> tuple[list[float], dict[str, int]]:
        """(when each step was emitted, the first step of each request by the client's id)."""
        answer = self._ask("report")
        self.word = answer["word"]
        return answer["steps"], {name.rpartition(".")[0] or name: step for name, step in answer["first"].items()}

    def _ask(self, line: str) -> dict[str, Any]:
        print(line, file=self._in, flush=True)
        answer: dict[str, Any] = json.loads(self._out.readline())
        return answer


@contextlib.contextmanager
def started(shape: Shape, tokenizer: Path) -> Iterator[Server]:
    """The server process, stopped at the end."""
    if shape.peer == "litellm":  # -I: its imports are its own environment's
        command = [shape.python, "-I", str(LITELLM)]
    else:
        command = [sys.executable, "-m", "forebay.server.commands.frontend_server", "--tokenizer", str(tokenizer), "--peer", shape.peer]
    command += ["--interval", str(shape.interval)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def run(shape: Shape, tokenizer: Path) -> Outcome:
    """One measurement with a server of its own, after `WARM_STREAMS` requests that are not counted. Raises BenchError if they fail."""

    async def both(server: Server) -> Outcome:
        word = server.report() and server.word.encode()
        warm = await Load(replace(shape, streams=WARM_STREAMS, tokens=WARM_TOKENS), word).run(server)
        if warm.finished < WARM_STREAMS:
            raise BenchError(f"the server does not serve: {'; '.join(warm.errors)}")
        server.gather(shape.streams)
        return await Load(shape, word).run(server)

    with started(shape, tokenizer) as server:
        return uvloop.run(both(server))
