"""API keys with the real command and the demo model: tenants share no cached token, unless told to; metrics on a port of their own."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.server import cli

WAIT_S = 120.0
TEXT = (
    "The harbour was closed for the winter and the boats lay on the quay. Nobody knew when the ferry would come back, so the people of the "
    "town took the road over the hills. In spring the ice broke and the first ship brought letters, coffee and a piano for the school. The "
    "children learned three songs before the summer came and sang them on the market place every Sunday, whatever the weather was like. "
)


@contextlib.contextmanager
def demo(*settings: str, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """The demo on a free port, without tiers beyond memory: its URL, and the lines up to the last one."""
    arguments = [part for setting in ("cache.dir=none", "cache.redis_url=none", *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "forebay.server.cli", "serve", "--model", "demo", "--port", "0", *arguments]
    env = os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  ") and " chat --url" in line:
                break
        assert lines, process.stderr.read()
        match = re.search(r"http://\S+", lines[0])
        assert match
        try:
            yield match[0], lines
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)
        assert process.returncode == 0


def cached(url: str, key: str, **fields: Any) -> int:
    """Tokens of the prompt that came from the cache."""
    body = {"messages": [{"role": "user", "content": 3 * TEXT}], "max_tokens": 2, "reasoning_effort": "none", **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    count = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


def made(file: Path, capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    assert cli.main(["keys", "add", name, "--file", str(file), *arguments]) == 0
    return capsys.readouterr().out.strip()


def test_tenants_share_nothing_and_keys_of_a_tenant_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    alice, anna = made(file, capsys, "alice", "--tenant", "team"), made(file, capsys, "anna", "--tenant", "team")
    salted = made(file, capsys, "sally", "--tenant", "team", "--cache-salt", "own")
    with demo(f"server.api_keys_file={file}", "server.metrics_bind=127.0.0.1:0", FOREBAY_API_KEYS="bob:key-of-bob") as (url, lines):
        assert cached(url, alice) == 0
        whole = cached(url, alice)
        assert whole >= 64
        assert cached(url, anna) == whole  # another key of the tenant
        assert cached(url, "key-of-bob") == 0  # another tenant: nothing, though the text is the same
        assert cached(url, "key-of-bob") == whole
        assert cached(url, salted) == 0  # a salt of its own within the tenant
        assert cached(url, alice, cache_salt="own") == whole
        for salt in ("team", "own"):
            assert cached(url, "key-of-bob", cache_salt=salt) == 0  # no salt leads into another tenant's cache
        carol = made(file, capsys, "carol")  # noticed while it runs
        time.sleep(1.1)
        assert cached(url, carol) == 0
        refused = httpx.post(f"{url}/v1/chat/completions", json={}, timeout=WAIT_S)
        assert refused.status_code == 401

        assert any("  4 API keys" in line for line in lines)
        curl = next(line for line in lines if "curl" in line)
        assert "-H 'Authorization: Bearer YOUR_KEY'" in curl
        page = next(re.search(r"http://\S+/metrics", line) for line in lines if "  metrics " in line)
        assert page is not None
        text = httpx.get(page[0], timeout=WAIT_S).text
        assert "forebay_requests_finished_total" in text and 'forebay_rejected_total{reason="unauthorized"} 1.0' in text
        assert not re.search("team|alice|bob|sally", text)
        assert httpx.get(f"{url}/metrics", timeout=WAIT_S).status_code == 404
        assert httpx.get(page[0].replace("/metrics", "/health/ready"), timeout=WAIT_S).status_code == 200
        assert httpx.get(page[0].replace("/metrics", "/v1/models"), timeout=WAIT_S).status_code == 404


def test_tenants_share_if_told_to() -> None:
    with demo("server.share_cache=true", FOREBAY_API_KEYS="key-of-alice,bob:key-of-bob") as (url, _):
        assert cached(url, "key-of-alice") == 0
        assert cached(url, "key-of-bob") >= 64
        assert cached(url, "key-of-bob", cache_salt="mine") == 0


@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        ([], {"FOREBAY_API_KEYS": ""}, "environment FOREBAY_API_KEYS is set but holds no key"),
        (["server.api_keys_file=/nowhere/keys"], {}, "the file of API keys /nowhere/keys cannot be read: No such file or directory"),
        (["server.metrics_bind=9090"], {}, "server.metrics_bind (flag --set): must be HOST:PORT"),
        (["server.metrics_bind=127.0.0.1:70000"], {}, "with a port from 0 to 65535"),
        (["server.metrics_bind=203.0.113.7:0"], {}, "203.0.113.7 is no address of this machine; set server.metrics_bind to one that is"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(settings: list[str], environment: dict[str, str], message: str) -> None:
    command = [sys.executable, "-m", "forebay.server.cli", "serve", "--port", "0", *(p for s in settings for p in ("--set", s))]
    env = os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_metrics_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        setting = f"server.metrics_bind=127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "forebay.server.cli", "serve", "--port", "0", "--set", setting]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert "is in use; stop the program that has it or choose another with server.metrics_bind" in done.stderr


def test_keys_are_not_among_the_settings_that_are_shown() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "FOREBAY_API_KEYS": "alice:secret-of-alice"}
    done = subprocess.run([sys.executable, "-m", "forebay.server.cli", "config"], env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0
    assert "metrics_bind: null" in done.stdout and "secret" not in done.stdout
    assert done.stderr == ""
