"""`forebay bench frontend`, small: what is measured, not how fast it is."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import resource
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forebay.model.chat import ChatCodec
from forebay.model.tokenizer import Tokenizer
from forebay.server import cli
from forebay.server.commands import bench_frontend, frontend_litellm, frontend_load, frontend_prompt
from forebay.server.commands.bench_frontend import Row
from forebay.server.commands.frontend_load import Shape
from noise_model import TOKENIZER

SMALL = ["--streams", "8", "--rate", "400", "--seconds", "1", "--open", "40", "--prompt-kb", "60", "--repeats", "1"]
PEER = importlib.util.find_spec("fastapi") is not None


def test_every_stream_is_measured_beside_the_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_frontend, "MANY_STEP_S", 0.05)
    file = tmp_path / "figures.json"
    beside = [] if PEER else ["--no-peer"]
    assert cli.main(["bench", "frontend", *SMALL, "--tokenizer", str(TOKENIZER), "--json", str(file), *beside]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    assert set(figures["lost"].values()) == {0}
    assert figures["errors"] == []
    assert (figures["streams"], figures["open"], figures["peer"]) == (8, 40, "fastapi" if PEER else None)
    rows = {row["what"]: row for row in figures["rows"]}
    for row in rows.values():
        assert row["value"] == statistics.median(row["samples"])
        assert len(row["samples"]) == 1
        assert (row["bar"] is None) == ("reached" not in row)
    bars = {what: row["bar"] for what, row in rows.items() if row["bar"] is not None}
    assert bars == {
        "8 streams: CPU per token and stream": 40,
        "8 streams: added latency, p99": 25,
        "held open: memory per stream": 60,
        "prompt, cold": 350,
        "prompt, extended": 40,
    }
    latency = rows["8 streams: added latency, p50"]["value"]
    assert 0 < latency <= rows["8 streams: added latency, p99"]["value"]
    assert rows["8 streams: CPU per token and stream"]["value"] > 0
    if PEER:
        assert rows["8 streams: added latency, p50"]["peer"] > 0
    out = capsys.readouterr().out
    assert "none refused or lost" in out and "≤ 25 ms" in out


def test_a_stream_that_is_cut_short_is_told() -> None:
    """The server stops in the middle: what did not arrive counts as lost, with the reason."""
    shape = Shape(streams=4, tokens=1_000_000, interval=0.01)

    async def cut_short(server: frontend_load.Server) -> frontend_load.Outcome:
        load = frontend_load.Load(shape, server.report() and server.word.encode())
        measured = frontend_load.asyncio.create_task(load.run(server))
        while load.words < 20:
            await frontend_load.asyncio.sleep(0.01)
        for stream in load.streams[:2]:
            stream.transport.abort()
        while load.ended < 2:
            await frontend_load.asyncio.sleep(0.01)
        for stream in load.streams[2:]:
            stream.transport.abort()
        return await measured

    with frontend_load.started(shape, TOKENIZER) as server:
        outcome = frontend_load.uvloop.run(cut_short(server))
    assert (outcome.streams, outcome.finished) == (4, 0)
    assert any("closed after" in error for error in outcome.errors)
    assert len(outcome.latencies) > 0


def test_the_server_is_warm_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go through the whole server first, and nothing of them is in the figures."""
    served: list[tuple[frontend_load.Server, int, dict[str, int]]] = []
    real = frontend_load.Load.run

    async def run(load: frontend_load.Load, server: frontend_load.Server) -> frontend_load.Outcome:
        outcome = await real(load, server)
        served.append((server, outcome.finished, server.report()[1]))
        return outcome

    monkeypatch.setattr(frontend_load.Load, "run", run)
    outcome = frontend_load.run(Shape(streams=3, tokens=5, interval=0.01), TOKENIZER)
    (warm, warmed, _), (server, finished, first) = served
    assert warm is server
    assert (warmed, finished) == (frontend_load.WARM_STREAMS, 3)
    assert set(first.values()) == {0} and len(first) == 3  # the measured streams begin together, with steps counted anew
    assert (outcome.finished, len(outcome.latencies)) == (3, 15)
    assert min(outcome.latencies) >= 0


def test_a_peer_that_does_not_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    assert cli.main(["bench", "frontend", *SMALL, "--tokenizer", str(TOKENIZER), "--peer-python", str(python)]) != 0
    assert "did not start" in capsys.readouterr().err


def test_the_scripted_backend_of_litellm_gives_each_request_a_word_per_step() -> None:
    """The part of the peer that is ours: it needs nothing that is not installed."""
    steps = frontend_litellm.Steps(0.001)

    async def one(name: str, count: int) -> list[str]:
        return [word async for word in steps.words(name, count)]

    async def all_of_them() -> list[list[str]]:
        await one("warm", 2)
        steps.restart(3)
        return list(await asyncio.gather(*(one(f"r{i}", 4) for i in range(3))))

    assert asyncio.run(all_of_them()) == [[frontend_litellm.WORD] * 4] * 3
    assert steps.first == {"r0": 0, "r1": 0, "r2": 0}
    assert len(steps.times) == 4 and steps.times == sorted(steps.times)


def test_a_row_reaches_its_bar_or_does_not() -> None:
    assert Row("a", "ms", (1.0, 9.0, 2.0), 2.0).figures() == {
        "what": "a", "unit": "ms", "samples": (1.0, 9.0, 2.0), "bar": 2.0, "peer": None, "value": 2.0, "reached": True,
    }  # fmt: skip
    assert Row("a", "ms", (2.1,), 2.0).figures()["reached"] is False
    assert "reached" not in Row("a", "ms", (2.1,)).figures()


def test_percentiles() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [bench_frontend.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 51.0, 100.0, 100.0]
    assert bench_frontend.percentile([], 0.5) == 0.0


def test_too_few_files_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: asked.append(limits))
    assert bench_frontend.raise_files(2500, Console(stderr=True, width=200)) == 1000 - bench_frontend.SPARE_FILES
    assert bench_frontend.raise_files(100, Console(stderr=True)) == 100
    assert asked == [(1000, 1000)]
    assert "only 1000 open files are allowed" in capsys.readouterr().err


def test_the_long_prompt_is_one_that_an_agent_sends() -> None:
    source = frontend_prompt._source()
    bodies = [frontend_prompt.agent_body(source, 300_000, number) for number in range(2)]
    assert bodies[0] != bodies[1]
    for body in bodies:
        assert 300_000 <= len(json.dumps(body)) < 360_000
        roles = [message["role"] for message in body["messages"]]
        assert roles[:4] == ["system", "user", "assistant", "tool"]
        prompt = ChatCodec(Tokenizer.load(TOKENIZER)).encode(body)
        assert all(message["content"] in prompt.text for message in body["messages"])


def test_a_model_without_a_tokenizer_needs_one_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "frontend", "--model", "synthetic:v41-flash,layers=6", *SMALL]) == 2
    assert "has no tokenizer of its own" in capsys.readouterr().err
    assert cli.main(["bench", "frontend", "--open", "0"]) == 2
    assert "--open must be at least 1, got 0" in capsys.readouterr().err
