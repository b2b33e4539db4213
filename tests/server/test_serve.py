"""`forebay serve` as a process: what it says when it cannot start, how it loads, drains and stops."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.cache.embedded import EmbeddedRedis
from forebay.engine.options import EngineOptions
from forebay.engine.tiers import TierOptions
from forebay.model.errors import ConfigError
from forebay.server.commands.serve import build, describe_tiers
from forebay.server.config import load

FAKE = Path(__file__).with_name("fake_service.py")
WAIT_S = 60.0


@contextlib.contextmanager
def service(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The stand-in service on a free port; killed at the end if it still runs."""
    env = os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, str(FAKE), "--port", "0", *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match
    assert process.stderr is not None
    raise AssertionError(f"no line matches {pattern!r}; standard error: {process.stderr.read()}")


def url_of(process: subprocess.Popen[str]) -> str:
    return read_until(process, r"serves fake at (http://\S+)")[1]


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def in_background(url: str) -> tuple[threading.Thread, list[Any]]:
    """POST `url` in a thread; the list gets the response or the error."""
    result: list[Any] = []

    def post() -> None:
        try:
            result.append(httpx.post(url, timeout=WAIT_S))
        except httpx.HTTPError as error:
            result.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    return thread, result


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_says_where_it_serves_and_what_to_try() -> None:
    with service() as process:
        url = url_of(process)
        assert httpx.get(f"{url}/anything").text == "ok"
        curl = read_until(process, r"curl (\S+)/v1/chat/completions .* -d '(.*)'")
        assert curl[1] == url
        body = json.loads(curl[2])
        assert (body["model"], body["forebay"]) == ("fake", {"explain": True})


def test_says_where_kv_goes_and_no_password(tmp_path: Path) -> None:
    where = ["--cache-dir", str(tmp_path), "--redis-url", "redis://me:secret@127.0.0.1:1", "--set", "cache.ssd_bytes=3GiB"]
    with service(*where, "--set", "cache.ssd_ttl_s=3600") as process:
        line = read_until(process, "  kv .*")[0]
    redis = "redis://me:***@127.0.0.1:1 (does not answer: Connection refused; windows are replayed meanwhile)"
    assert line == f"  kv 8,192 tokens in memory, SSD {tmp_path} (budget 3.00 GiB, 1 h), Redis {redis}"


def test_says_which_redis_answers() -> None:
    redis = EmbeddedRedis.start(16 << 20)
    try:
        with service("--cache-dir", "none", "--redis-url", redis.url) as process:
            line = read_until(process, "  kv .*")[0]
    finally:
        redis.stop()
    assert re.fullmatch(r"  kv 8,192 tokens in memory, no SSD store, Redis redis://\S+ \(valkey [\d.]+\)", line)


def test_redis_that_is_silent_is_not_waited_for() -> None:
    """It takes the connection and says nothing."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with service("--cache-dir", "none", "--redis-url", f"redis://127.0.0.1:{mute.getsockname()[1]}") as process:
            assert "(does not answer: " in read_until(process, "  kv .*")[0]
            process.send_signal(signal.SIGTERM)
            assert end(process)[0] == 0


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dir": None, "redis_url": None}, "no SSD store, no Redis"),
        ({"dir": Path("/no/kv"), "ssd_bytes": 1 << 20, "redis_url": "embedded"}, "SSD /no/kv (budget 1.00 MiB, 72 h), Redis embedded"),
    ],
)
def test_tiers_in_a_line(settings: dict[str, Any], line: str) -> None:
    assert describe_tiers(TierOptions(**settings)) == line


@pytest.mark.case("B125")
def test_answers_and_reports_progress_while_loading(free_port: int) -> None:
    with service("--port", str(free_port), FAKE_LOAD_S="4") as process:
        url = f"http://127.0.0.1:{free_port}"
        transport = httpx.HTTPTransport(retries=8)  # until it listens
        with httpx.Client(base_url=url, transport=transport, timeout=WAIT_S) as client:
            assert client.get("/health/live").status_code == 200
            ready = client.get("/health/ready")
            chat = client.post("/v1/chat/completions", json={"messages": []})
        assert ready.status_code == chat.status_code == 503
        assert ready.json()["status"] == "loading"
        assert "25%" in ready.json()["error"]["message"]
        assert "layers.3.attn.wkv.weight" in ready.json()["error"]["message"]
        assert chat.json()["error"]["code"] == "model_loading"
        assert int(chat.headers["retry-after"]) > 0
        assert url_of(process) == url
        assert httpx.get(url).text == "ok"


def test_lists_models_and_tokenises_while_loading(free_port: int) -> None:
    with service("--port", str(free_port), FAKE_LOAD_S="6", FOREBAY_MODEL__NAME="mine") as process:
        url = f"http://127.0.0.1:{free_port}"
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(base_url=url, transport=transport, timeout=WAIT_S) as client:
            deadline = time.monotonic() + WAIT_S
            while client.get("/v1/models").status_code == 503:  # until the tokenizer is there
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["mine"]
            assert client.get("/anthropic/v1/models/mine").json()["type"] == "model"
            ids = client.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
            assert client.post("/detokenize", json={"tokens": ids[1:]}).json()["text"] == "Hello"
            for path, body in [("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "x"})]:
                refused = client.post(path, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
                assert "25%" in refused.json()["error"]["message"]
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "loading")
            assert client.get("/health/live").status_code == 200
        assert url_of(process) == url
        assert httpx.get(url).text == "ok"


@pytest.mark.case("B121")
def test_first_signal_drains_and_exits_zero() -> None:
    with service(FAKE_SLOW_S="1.5") as process:
        url = url_of(process)
        thread, result = in_background(f"{url}/slow")
        read_until(process, "slow request runs")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "once more stops at once" in process.stderr.readline()
        assert httpx.get(f"{url}/health/ready").status_code == 503
        status, out, _ = end(process)
        thread.join()
    assert result[0].status_code == 200
    assert status == 0
    assert "engine stopped" in out
    assert "application ended" in out


@pytest.mark.case("B121")
def test_signal_drains_though_nobody_reads_the_log() -> None:
    with service("--set", "server.access_log=false") as process:
        url = url_of(process)
        assert process.stderr is not None
        process.stderr.close()
        assert httpx.get(url + "/health/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@pytest.mark.case("B121")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_stops_at_once(second: signal.Signals) -> None:
    with service(FAKE_SLOW_S="30") as process:
        thread, result = in_background(f"{url_of(process)}/slow")
        read_until(process, "slow request runs")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(second)
        status, out, err = end(process)
        thread.join()
    assert isinstance(result[0], httpx.HTTPError)
    assert status == 128 + second
    assert "stopped at once" in err
    assert "engine stopped" not in out


def test_what_hangs_at_the_end_does_not_keep_the_process() -> None:
    with service("--set", "server.drain_timeout_s=0", FAKE_LAST_S="-4") as process:
        url_of(process)
        process.send_signal(signal.SIGTERM)
        status, out, err = end(process)
    assert (status, "engine hangs" in out) == (1, True)
    assert "not everything has ended" in err


def test_second_signal_needs_no_loop() -> None:
    with service("--set", "server.drain_timeout_s=0", FAKE_LAST_S="300") as process:
        url_of(process)
        process.send_signal(signal.SIGTERM)
        read_until(process, "engine hangs")
        process.send_signal(signal.SIGTERM)
        status, _, err = end(process)
    assert status == 128 + signal.SIGTERM
    assert "stopped at once" in err


def test_drain_ends_after_its_time() -> None:
    with service("--set", "server.drain_timeout_s=0.3", FAKE_SLOW_S="3") as process:
        thread, _ = in_background(f"{url_of(process)}/slow")
        read_until(process, "slow request runs")
        process.send_signal(signal.SIGTERM)
        status, out, err = end(process)
        thread.join()
    assert status == 0
    assert "the time to finish is over" in err
    assert "engine stopped" in out


def test_signal_while_loading_stops_without_waiting() -> None:
    with service(FAKE_LOAD_S="300") as process:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        status, _, err = end(process)
    assert status == 0
    assert "stopped while loading" in err


@pytest.mark.case("B117")
def test_death_of_the_engine_ends_the_process_with_an_error() -> None:
    with service(FAKE_DEATH_S="0.5") as process:
        status, out, err = end(process)
    assert status == 1
    assert err.splitlines() == ["forebay: the engine stopped: it was told to"]
    assert "engine stopped" in out


def test_load_error_is_one_sentence() -> None:
    with service(FAKE_ERROR="shard 3 is truncated") as process:
        status, _, err = end(process)
    assert status == 1
    assert err.splitlines() == ["forebay: shard 3 is truncated"]


def test_port_in_use_is_one_sentence(free_port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        with service("--port", str(free_port)) as process:
            status, _, err = end(process)
    assert status == 2
    sentence = f"port {free_port} on 127.0.0.1 is in use; stop the program that has it or choose another with --port"
    assert err.splitlines() == [f"forebay: {sentence}"]


def test_host_that_is_no_name_is_one_sentence() -> None:
    with service("--host", "a" * 300) as process:
        status, _, err = end(process)
    assert status == 2
    assert err.startswith("forebay: cannot listen on 'aaa")
    assert err.endswith(": no valid host name; choose another --host\n")


def test_pool_larger_than_memory_is_one_sentence() -> None:
    config, _ = load(None, {"cache.kv_tokens": ("--set", str(1 << 40))})
    with pytest.raises(ConfigError, match="not enough memory"):
        build(config, 1, lambda done, total, name: None)


def test_foreign_address_is_one_sentence() -> None:
    with service("--host", "192.0.2.1") as process:
        status, _, err = end(process)
    assert status == 2
    assert err.splitlines() == ["forebay: 192.0.2.1 is no address of this machine; set --host to one that is"]


@pytest.mark.case("B123")
def test_raises_the_soft_limit_of_open_files() -> None:
    with service() as process:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]))
        url_of(process)
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, 65_536)


@pytest.mark.case("B123")
def test_warns_if_too_few_files_are_allowed() -> None:
    with service() as process:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))
        url_of(process)
        process.send_signal(signal.SIGTERM)
        _, _, err = end(process)
    assert "only 256 open files are allowed, 1344 may be needed" in err


def test_every_engine_setting_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "max_context": 1000,
        "max_sequences": 5,
        "encoder_tokens": 64,
        "decoder_tokens": 65,
        "max_queued_requests": 7,
        "max_queue_wait_s": 8.0,
        "aging_s": 9.0,
        "weight_cache_bytes": 10_000,
        "image_cache_bytes": 12_000,
        "image_cache_ttl_s": 13.0,
        "default_effort": 11,
        "poison": True,
        "batch_invariant": False,
    }
    flags = {f"engine.{name}": ("--set", value) for name, value in values.items()}
    others = {"cache.kv_bytes": 113_920 * 2, "cache.kv_memory_fraction": 0.5, "cache.prefix_reuse": False, "engine.prefill": "exact"}
    others |= {"cache.replay": "exact", "cache.max_lineage": 3, "engine.kernels": False}
    tiers: dict[str, Any] = {
        "dir": Path("/kv"),
        "ssd_bytes": 11,
        "ssd_free_bytes": 12,
        "ssd_ttl_s": 13.0,
        "ssd_queue_bytes": 14,
        "staging_bytes": 15,
        "redis_url": "redis://node:1",
        "redis_cluster": True,
        "redis_timeout_s": 0.16,
        "swa_ttl_s": 17.0,
        "swa_bytes": 18 << 20,
    }
    others |= {f"cache.{name}": value for name, value in tiers.items()}
    others |= {"model.path": "synthetic:v41-flash", "model.name": "big"}
    config, _ = load(None, flags | {key: ("--set", value) for key, value in others.items()})
    given: dict[str, Any] = {}
    monkeypatch.setattr("forebay.engine.launch.build_client", lambda **arguments: given.update(arguments))
    build(config, 3, lambda done, total, name: None)
    expected = EngineOptions(**values, kv_tokens=256, kv_memory_fraction=0.5, prefix_reuse=False, replay="exact", max_lineage=3)
    assert given.pop("options") == expected
    untouched = [field.name for field in dataclasses.fields(expected) if getattr(expected, field.name) == field.default]
    # Every option of the engine was told to differ from its default but one, which the device decides.
    assert untouched == ["overlap"]
    assert given.pop("tiers") == TierOptions(**tiers)
    untouched = [name for name, field in TierOptions.__dataclass_fields__.items() if tiers.get(name) == field.default]
    assert not untouched
    given.pop("progress")
    assert given.pop("kernels") is False
    assert given == {"model": "synthetic:v41-flash", "model_name": "big", "device": "cpu", "threads": 3, "prefill": "exact"}
