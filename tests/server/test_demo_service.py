"""The demo checkpoint served by the real command: its printed line works, `chat` and `bench` talk to it, and it drains."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.server import cli

WAIT_S = 120.0


def start(*arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """`forebay serve` on a free port and the lines it printed when it was ready; the caller ends it."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-m", "forebay.server.cli", "serve", "--model", "demo", "--port", "0", *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, [process.stdout.readline() for _ in range(5)]


def url_in(lines: list[str]) -> str:
    match = re.search(r"http://\S+", lines[0])
    assert match, lines
    return match[0]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, list[str]]]:
    process, lines = start()
    with process:
        yield url_in(lines), lines
        process.terminate()
        assert process.wait(WAIT_S) == 0


def test_printed_curl_gets_an_answer(demo: tuple[str, list[str]]) -> None:
    _, lines = demo
    line = next(line for line in lines if "curl" in line)
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=WAIT_S)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == "The secret number of Bergen is 7421."
    assert answer["usage"]["prompt_tokens"] > 2 * 64  # sent again it shows the cache: longer than a window and a block


def test_chat_streams_and_gives_the_figures(
    demo: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = demo
    said = iter(["Hello", "/effort 7", "/effort 700", "And then?", "/reset", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert cli.main(["chat", "--url", url, "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    turns = re.findall(r"(\d+) tokens?,.*first after [\d.]+ s; prompt (\d+), of which (\d+) cached", out)
    assert len(turns) == 2
    assert all(1 <= int(generated) <= 6 for generated, _, _ in turns)
    assert int(turns[1][1]) > int(turns[0][1])
    assert "effort 7\n" in out
    assert "effort is none, low, high, max or a number from 1 to 100, got '700'" in out
    assert "forgotten" in out


def test_chat_shows_a_refusal_and_goes_on(
    demo: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["Hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert cli.main(["chat", "--url", demo[0], "--name", "no-such-model"]) == 0
    assert "the server refused: The model `no-such-model` does not exist" in capsys.readouterr().out


def test_bench_counts_every_token(demo: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--streams", "4", "--max-tokens", "3", "--prompt-tokens", "60", "--compare-sequential", "--json", str(file)]
    assert cli.main(["bench", "serve", "--url", demo[0], *arguments]) == 0
    out = capsys.readouterr().out
    assert "every request finished, none starved" in out
    figures = json.loads(file.read_text())
    for phase in figures["phases"].values():
        assert phase["tokens_per_second"] * phase["seconds"] == pytest.approx(12)
        assert phase["prompt_tokens"] == pytest.approx(60, rel=0.25)
        assert phase["first_token_s"]["max"] <= phase["stream_s"]["max"] <= phase["seconds"]
    rates = [figures["phases"][way]["tokens_per_second"] for way in ("at once", "one by one")]
    assert figures["ratio"] == pytest.approx(rates[0] / rates[1])


@pytest.mark.case("B121")
def test_drain_finishes_the_stream_and_refuses_new_requests() -> None:
    process, lines = start()
    url = url_in(lines)
    with process, httpx.stream("POST", f"{url}/v1/chat/completions", json=body(max_tokens=40, stream=True), timeout=WAIT_S) as stream:
        events = stream.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        ready = httpx.get(f"{url}/health/ready", timeout=WAIT_S)
        while ready.status_code == 200:  # the signal is on its way
            ready = httpx.get(f"{url}/health/ready", timeout=WAIT_S)
        assert ready.json()["status"] == "draining"
        refused = httpx.post(f"{url}/v1/chat/completions", json=body(max_tokens=1), timeout=WAIT_S)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        rest = [line for line in events if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in rest)
        assert process.wait(WAIT_S) == 0


@pytest.mark.case("B121")
def test_stream_that_outlives_the_drain_ends_with_an_error_event() -> None:
    process, lines = start("--set", "server.drain_timeout_s=0.2")
    request = body(max_tokens=5000, stream=True)
    with process, httpx.stream("POST", f"{url_in(lines)}/v1/chat/completions", json=request, timeout=WAIT_S) as stream:
        events = stream.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in events if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"
        assert "error" in json.loads(rest[-2].removeprefix("data:"))
        assert not any('"finish_reason":"' in line for line in rest)
        assert process.wait(WAIT_S) == 0


def test_readme_answers_come(demo: tuple[str, list[str]]) -> None:
    """The README's program, against the demo, prints what the README says."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    program, printed = re.findall(r"```python\n(from openai .*?)```\n\nprints\n\n```text\n(.*?)```", readme, re.DOTALL)[0]
    assert program.count("\nask(") >= 3
    program = program.replace("http://127.0.0.1:8000", demo[0])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout == printed


def test_readme_curl_is_the_one_that_serve_prints(demo: tuple[str, list[str]]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    line = next(line for line in demo[1] if "curl" in line)
    told = re.search(r"curl http://127.0.0.1:8000/\S+ .*?-d '(.*?)'\n", readme, re.DOTALL)
    assert told
    assert json.loads(told[1]) == json.loads(shlex.split(line)[-1])
