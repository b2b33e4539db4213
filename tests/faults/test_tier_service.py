"""Faults of caches beyond the device that only a served process can show: restarts, kills, damage and full disks while clients ask."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import WINDOW, greedy, tiny, tiny_checkpoint
from forebay.model.chat import ChatCodec
from redis_servers import Server, until
from tiered import ask, samples, segments, tiered, total

WAIT_S = 60.0
SOURCES = str(Path(__file__).parents[2] / "src")

# Becomes the program named by its arguments, without the right of root to read what nobody may read.
WITHOUT_OVERRIDE = "import ctypes, os, sys; [ctypes.CDLL(None).prctl(24, right) for right in (1, 2)]; os.execv(sys.argv[1], sys.argv[1:])"


@dataclass
class Service:
    """A running `forebay serve` over TINY."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log: Path

    def ask(self, text: str, **fields: Any) -> dict[str, Any]:
        """A chat answer of few tokens, greedy, with the `forebay` object; anything but 200 fails the test."""
        body = {
            "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 3, "ignore_eos": True,
            "return_token_ids": True, "forebay": {"explain": True}, **fields,
        }  # fmt: skip
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def metrics(self) -> dict[str, float]:
        page = self.client.get("/metrics")
        assert page.status_code == 200
        return samples(page.text)

    def written(self) -> None:
        """Wait until nothing waits to be written to any tier."""
        until(lambda: total(self.metrics(), "write_queue_items") == 0)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0


def said(answer: dict[str, Any]) -> list[int]:
    """Ids of the answer."""
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def tiers(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["forebay"]["tiers"]
    assert sum(found.values()) == answer["usage"]["prompt_tokens"]
    return found


@contextmanager
def served(folder: Path, redis: str = "none", *arguments: str, before: Sequence[str] = (), **environment: str) -> Iterator[Service]:
    """`before`: a command that runs the server in its place. Killed at the end if it still runs."""
    log = folder.parent / f"{folder.name}.log"
    command = [
        *before, sys.executable, "-m", "forebay.server.cli", "serve", "--model", str(tiny_checkpoint()), "--port", "0",
        "--cache-dir", str(folder), "--redis-url", redis, "--set", "cache.ssd_free_bytes=0", "--set", "cache.kv_tokens=32768", *arguments,
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": SOURCES} | environment
    with log.open("a") as errors, subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+", process.stdout.readline())
            assert match, log.read_text()
            with httpx.Client(base_url=match[0], timeout=WAIT_S) as client:
                yield Service(process, client, log)
        finally:
            if process.poll() is None:
                process.kill()


def text(number: int, length: int = 400) -> str:
    """A question; different numbers share no block beyond the chat's own beginning."""
    words = random.Random(number)
    return " ".join(words.choice(("river", "stone", "lamp", "cloud", "garden", "winter", "copper", "letter")) for _ in range(length // 6))


def own(question: str) -> str:
    """A tenant for this question alone, so that it takes no other's beginning."""
    return f"{zlib.crc32(question.encode()):08x}"


@pytest.mark.case("B025")
def test_b025_a_restart_and_a_kill_lose_nothing_that_was_written(tmp_path: Path) -> None:
    folder, texts = tmp_path / "kv", [text(number) for number in range(50)]
    with served(folder, PYTHONHASHSEED="1") as service:
        first = [service.ask(question, cache_salt=own(question)) for question in texts]
        service.stop()

    def reused(service: Service, questions: Sequence[str], expected: Sequence[dict[str, Any]]) -> float:
        """Share of the prompts that came from disk; each has a tenant of its own, so that none takes another's beginning."""
        exact = {"explain": True, "replay": "exact"}
        found = [service.ask(question, forebay=exact, cache_salt=own(question)) for question in questions]
        assert [said(answer) for answer in found] == [said(answer) for answer in expected]
        return sum(tiers(answer)["ssd"] for answer in found) / sum(answer["usage"]["prompt_tokens"] for answer in found)

    more = [text(number) for number in range(50, 60)]
    with served(folder, PYTHONHASHSEED="2") as service:
        assert reused(service, texts, first) >= 0.95
        page = service.metrics()
        assert page["kv_transferred_bytes_total{read,ssd}"] > 0
        assert page["kv_tokens_total{global,ssd}"] >= 0.95 * page["prompt_tokens_total{}"]
        second = [service.ask(question, cache_salt=own(question)) for question in more]
        service.written()
        acknowledged = service.metrics()["kv_blocks{stored,ssd}"]
        # Killed while it writes: only what was under way may be lost.
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(service.ask, text(number, 900)) for number in range(100, 120)]
            until(lambda: service.metrics()["kv_blocks{stored,ssd}"] > acknowledged + 150)
            acknowledged = service.metrics()["kv_blocks{stored,ssd}"]
            service.process.kill()
            service.process.wait()
            assert sum(isinstance(job.exception(), httpx.HTTPError) for job in asked) > 0

    with served(folder, PYTHONHASHSEED="3") as service:
        assert service.metrics()["kv_blocks{stored,ssd}"] >= acknowledged
        assert reused(service, [*more, *texts[:10]], [*second, *first[:10]]) >= 0.95
        assert total(service.metrics(), "kv_corruptions_total") == 0
        service.stop()


@pytest.mark.case("B023")
@pytest.mark.case("B037")
def test_b023_b037_whole_blocks_and_tenants_over_http(tmp_path: Path) -> None:
    """Prompts of whole blocks, the three shortest sizes that a chat can have, in memory and on disk; and a long one, by tenant."""
    folder = tmp_path / "kv"
    codec, questions = ChatCodec(tiny().tokenizer), dict[int, str]()
    for length in range(1, 60):
        question = "abcdefghij klmnop qrstuv wxyz 0123456789 ABCDEFGHIJ KLMNOP QRSTUV"[:length]
        size = len(codec.encode({"messages": [{"role": "user", "content": question}]}).token_ids)
        if size % WINDOW == 0:
            questions.setdefault(size, question)
    questions = {size: questions[size] for size in sorted(questions)[:3]}
    assert len(questions) == 3
    with served(folder, "embedded", "--set", "cache.swa_bytes=16MiB") as service:
        plain = {size: service.ask(question, cache_salt=f"cold {size}") for size, question in questions.items()}
        service.ask(next(iter(questions.values())), cache_salt="a")
        for size, question in questions.items():
            service.ask(question, cache_salt="a")
            service.written()
            for _ in range(2):
                answer = service.ask(question, cache_salt="a")
                assert tiers(answer)["compute"] >= 1
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (size - WINDOW if size > 2 * WINDOW else 0)
                assert said(answer) == said(plain[size])
        # Another tenant pays for everything, as the first one did.
        question = text(1, 1500)
        costs = []
        for salt in ("mine", "yours", "mine"):
            before = service.metrics()["step_tokens_total{}"]
            answer = service.ask(question, cache_salt=salt)
            costs.append(service.metrics()["step_tokens_total{}"] - before)
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (len(costs) == 3)
        assert costs[1] == costs[0] > 10 * costs[2]
        service.stop()
    with served(folder, "none", "--set", "cache.replay=exact") as service:
        for size, question in questions.items():
            answer = service.ask(question, cache_salt="a")
            assert tiers(answer)["ssd"] + tiers(answer)["hbm"] == (size - WINDOW if size > 2 * WINDOW else 0)
            assert said(answer) == said(plain[size])
        assert tiers(service.ask(text(1, 1500), cache_salt="c"))["compute"] > 200
        service.stop()


@pytest.mark.case("B028")
def test_b028_files_are_damaged_under_a_running_server(tmp_path: Path) -> None:
    """Eight files, each treated in one of four ways while four clients ask on; with exact replay every answer is the cold one."""
    folder, texts = tmp_path / "kv", [text(number) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for question in texts:  # a file for each question: every process writes its own
            write(folder, question)
        files = segments(folder)
        assert len(files) == 8
        exact = ("--set", "cache.replay=exact")
        before = [sys.executable, "-c", WITHOUT_OVERRIDE] if os.geteuid() == 0 else []
        with served(folder, "none", *exact, before=before) as service:
            plain = [said(service.ask(question, cache_salt=f"cold {own(question)}")) for question in texts]
            for number, path in enumerate(files):
                if number % 4 == 0:
                    path.unlink()
                elif number % 4 == 1:
                    os.truncate(path, path.stat().st_size // 2)
                elif number % 4 == 2:
                    with path.open("r+b") as file:
                        file.seek(4096 * 5 + 300)
                        byte = file.read(1)[0]
                        file.seek(4096 * 5 + 300)
                        file.write(bytes([byte ^ 0x10]))
                else:
                    path.chmod(0)
            answers = list(pool.map(lambda question: service.ask(question, cache_salt=own(question)), [*texts, *texts, *texts]))
            assert [said(answer) for answer in answers] == plain * 3
            page = service.metrics()
            assert page["kv_corruptions_total{missing,ssd}"] >= 2
            assert page["kv_corruptions_total{length,ssd}"] >= 2
            assert page["kv_corruptions_total{checksum,ssd}"] >= 2
            assert page["ssd_errors_total{read}"] >= 2
            assert not [key for key, value in page.items() if re.match(r"http_requests_total{[^,]*,5", key) and value]
            assert service.client.get("/health/ready").status_code == 200
            # The index goes as well, in the middle of it all.
            going = threading.Event()

            def on_and_on() -> int:
                rounds = 0
                while not going.is_set():
                    question = texts[rounds % 8]
                    assert said(service.ask(question, cache_salt=own(question))) == plain[rounds % 8]
                    rounds += 1
                return rounds

            jobs = [pool.submit(on_and_on) for _ in range(3)]
            for path in folder.glob("index.sqlite*"):
                path.unlink()
            until(lambda: service.metrics()["kv_blocks{stored,ssd}"] > 0)
            going.set()
            assert all(job.result() > 0 for job in jobs)
            for path in files:
                if path.exists():
                    path.chmod(0o600)
            service.stop()
        assert "Traceback" not in service.log.read_text()


def write(folder: Path, question: str) -> None:
    """Store the blocks of a question in a file of their own, as a server would; each has a tenant of its own."""
    with tiered(folder) as llm:
        prompt = ChatCodec(llm.tokenizer).encode({"messages": [{"role": "user", "content": question}]})
        ask(llm, prompt.token_ids, greedy(1), salt=own(question))


@pytest.mark.case("B040")
def test_b040_redis_comes_late_and_goes_again(tmp_path: Path) -> None:
    """Absent at the start, there, killed, and there again: 200 all along, and the breaker can be seen."""
    server, session = Server(), text(3)
    exact = ("--set", "cache.replay=exact", "--set", "cache.dir=none")
    try:
        with served(tmp_path / "kv", server.url, *exact) as service:
            plain = said(service.ask(session))

            def window() -> str:
                answer = service.ask(session)
                assert said(answer) == plain
                return str(answer["forebay"]["window"])

            for salt in ("first", "second"):
                until(lambda: window() == "replay" and service.metrics()["swa_breaker{open}"] == 1)
                server.start()
                until(lambda: service.metrics()["swa_breaker{closed}"] == 1, 12.0)
                # What a request stores from now on is found by the next.
                service.ask(session, cache_salt=salt)
                service.written()
                assert service.ask(session, cache_salt=salt)["forebay"]["window"] == "swa"
                server.kill()
            assert service.metrics()["swa_breaker_opened_total{}"] >= 2
            assert service.log.read_text().count("Traceback") == 0
            service.stop()
    finally:
        server.kill()


def can_mount() -> bool:
    """Whether we may have a file system of our own."""
    tool = shutil.which("unshare")
    if tool is None:
        return False
    return subprocess.run([tool, "-rm", "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode == 0


@pytest.mark.case("B129")
@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
def test_b129_a_disk_that_others_fill(tmp_path: Path) -> None:
    """50 MB, of which 20 are to stay free: we stop at that; somebody else takes every byte, and gives them back."""
    folder, floor = tmp_path / "disk" / "kv", 20 << 20
    folder.parent.mkdir()
    mount = 'mount -t tmpfs -o size=50m none "$1" && shift && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, "sh", str(folder.parent)]
    limits = ("--set", f"cache.ssd_free_bytes={floor}", "--set", "cache.ssd_bytes=1GiB", "--set", "cache.replay=exact")
    with served(folder, "none", *limits, before=inside) as service:
        disk = Path(f"/proc/{service.process.pid}/root{folder.parent}")

        def free() -> int:
            status = os.statvfs(disk)
            return status.f_bavail * status.f_frsize

        assert free() <= 50 << 20
        first = service.ask(text(0))
        filler = disk / "filler"
        filler.write_bytes(bytes(free() - floor - (4 << 20)))  # so much is left for us
        for number in range(1, 10):
            service.ask(text(number, 3500), max_tokens=1)
            service.written()
            assert free() >= floor - (1 << 20)  # sqlite's log comes on top of what is foreseen
        page = service.metrics()
        assert page["kv_evictions_total{ssd}"] + page["kv_drops_total{no_space,ssd}"] > 0
        assert page["kv_blocks{stored,ssd}"] > 0

        with (disk / "more").open("wb", buffering=0) as more:
            try:
                while more.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass
        assert free() < 1 << 16
        errors = total(page, "ssd_errors_total")
        for number in (0, 10, 11):
            service.ask(text(number))
        page = service.metrics()
        assert total(page, "kv_drops_total") > 0
        assert total(page, "ssd_errors_total") >= errors
        assert service.client.get("/health/ready").status_code == 200
        assert service.log.read_text().count("/v1/chat/completions") >= 8  # the access log goes on

        filler.unlink()
        (disk / "more").unlink()

        def stored(number: int) -> bool:
            before = service.metrics()["kv_stores_total{ssd}"]
            service.ask(text(number))
            service.written()
            return service.metrics()["kv_stores_total{ssd}"] > before

        assert any(stored(number) for number in range(20, 40))
        assert said(service.ask(text(0), cache_salt="again")) == said(first)
        assert free() >= floor - (1 << 20)
        # Nothing that was written by halves is left: every file ends with a record.
        assert all(path.stat().st_size % 4096 == 0 for path in segments(disk / "kv"))
        assert total(service.metrics(), "kv_corruptions_total") == 0
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(WAIT_S) == 0
