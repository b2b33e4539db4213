"""What is built once, kept by weight, given up and not remembered too long; and the process in which grammars are tried."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.engine import grammar_check, grammar_compiler
from forebay.engine.grammar import MAX_LARK, GrammarSpec, choice_spec, json_spec, regex_spec
from forebay.engine.grammar_check import CheckerError, GrammarChecker, TimeLimitError
from forebay.engine.grammar_compiler import GrammarCompiler, found, salted
from forebay.engine.grammar_store import LEAST_WEIGHT, Refusal, WeighedStore
from forebay.engine.types import UnavailableError
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer
from noise_model import TOKENIZER

SLOW = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(3, 30)]}
HEAVY = {"type": "integer", "multipleOf": 9973}  # about 5 MB


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer)
    yield compiler
    compiler.close()


# ---- what is kept


def test_the_heaviest_owner_makes_room() -> None:
    store: WeighedStore[int] = WeighedStore(10 * LEAST_WEIGHT)
    for i in range(3):
        store.put(b"a%d" % i, i, 1, "a")
    for i in range(50):
        store.put(b"b%d" % i, i, 2 * LEAST_WEIGHT, "b")
        assert store.weight <= store.most
    assert [store.get(b"a%d" % i) for i in range(3)] == [0, 1, 2]
    assert [i for i in range(50) if store.get(b"b%d" % i) is not None] == [47, 48, 49]
    store.get(b"b47")
    store.put(b"b50", 50, 2 * LEAST_WEIGHT, "b")
    assert store.get(b"b47") == 47  # used since
    assert store.get(b"b48") is None
    store.put(b"huge", 1, 11 * LEAST_WEIGHT, "c")
    assert store.get(b"huge") is None
    for key in list(store._entries):
        store.drop(key)
    assert (store.weight, len(store), store._owned, store._sums) == (0, 0, {}, {})


def test_an_entry_is_forgotten_in_time() -> None:
    now = [0.0]
    store: WeighedStore[int] = WeighedStore(1 << 30, lambda: now[0])
    store.put(b"x", 1, 1, "", seconds=5.0)
    now[0] = 4.9
    assert store.get(b"x") == 1
    now[0] = 5.0
    assert store.get(b"x") is None
    assert store.weight == 0


def test_grammars_weigh_what_they_take(compiler: GrammarCompiler) -> None:
    compiler.compile(json_spec({"type": "integer"}, "s"))
    light = compiler.store.weight
    compiler.compile(json_spec(HEAVY, "s"))
    assert light == LEAST_WEIGHT
    assert compiler.store.weight > 3 << 20


def test_many_heavy_grammars_stay_within_the_limit(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, kept=12 << 20)
    try:
        for i in range(5):
            compiler.compile(json_spec({"type": "integer", "multipleOf": 9973 - 2 * i}, "s"))
            assert compiler.store.weight <= 12 << 20
        assert 1 <= len(compiler.store) < 5
    finally:
        compiler.close()


def test_one_grammar_may_not_take_too_much(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_GRAMMAR", 1 << 20)
    with pytest.raises(RequestError, match=r"takes \d+ MiB of memory, the limit is 1"):
        compiler.compile(json_spec(HEAVY, "s"))
    # Its text is looked at before it is tried.
    with pytest.raises(RequestError, match=f"the limit is {MAX_LARK}"):
        compiler.compile(GrammarSpec("start: " + '"a" ' * (MAX_LARK // 4), param="s"))
    assert compiler.store.weight <= 2 * LEAST_WEIGHT


def test_a_kept_refusal_keeps_nothing_else_alive(compiler: GrammarCompiler) -> None:
    class Body:
        pass

    def ask() -> weakref.ref[Body]:
        body = Body()
        with pytest.raises(RequestError):
            compiler.compile(regex_spec("(?=a)b", "r"))
        return weakref.ref(body)

    gone = ask()
    gc.collect()
    assert gone() is None
    kept = compiler.kept(regex_spec("(?=a)b", "r").key)
    assert isinstance(kept, Refusal)
    assert (kept.param, kept.code) == ("r", "invalid_json_schema")


def test_salts_keep_tenants_apart(compiler: GrammarCompiler) -> None:
    spec = choice_spec(["a"], "c")
    keys = {salted(spec.key, salt) for salt in ("", "x", "y", "x/y")}
    assert len(keys) == 4
    first = compiler.outcome(salted(spec.key, "x"), lambda: spec, "x")
    assert compiler.kept(salted(spec.key, "x")) is first
    assert compiler.kept(salted(spec.key, "y")) is None


def test_a_grammar_is_built_once_for_all_who_ask_at_once(compiler: GrammarCompiler) -> None:
    spec = json_spec({"type": "integer", "multipleOf": 49999}, "s")
    together = threading.Barrier(8)
    written: list[int] = []
    got: list[object] = []

    def ask(number: int) -> None:
        def write() -> GrammarSpec:
            written.append(number)
            return spec

        together.wait()
        got.append(found(compiler.outcome(spec.key, write)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert not compiler._building


def test_that_it_took_too_long_is_remembered_for_a_while_only(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    compiler.store = WeighedStore(1 << 30, lambda: now[0])
    compiler.seconds = 0.3
    spec = json_spec(SLOW, "s")
    with pytest.raises(RequestError, match=r"takes more than 0.3 s"):
        compiler.compile(spec)
    assert isinstance(compiler.kept(spec.key), Refusal)
    now[0] = grammar_compiler.SLOW_KEPT_S
    assert compiler.kept(spec.key) is None


def test_what_could_not_be_tried_is_not_remembered(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = choice_spec(["a"], "c")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/does/not/exist")
        with pytest.raises(UnavailableError) as error:
            compiler.compile(spec)
        assert (error.value.status, error.value.code) == (503, "grammar_unavailable")
    assert compiler.kept(spec.key) is None
    assert compiler.compile(spec)


# ---- the process


def stop_later(checker: GrammarChecker, number: signal.Signals) -> threading.Thread:
    """Send the process of a checker a signal while it is at work."""

    def stop() -> None:
        time.sleep(0.2)
        assert checker._process is not None
        checker._process.send_signal(number)

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


EASY = GrammarSpec('start: "a"').text(256)


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    checker.check(EASY, 20.0)
    yield checker
    checker.close()


def test_a_process_that_gets_no_processor_says_nothing_of_the_grammar(checker: GrammarChecker) -> None:
    assert checker._process is not None
    checker._process.send_signal(signal.SIGSTOP)
    with pytest.raises(CheckerError):
        checker.check(EASY, 0.2)
    assert not checker.check(EASY, 20.0).error
    checker._process.send_signal(signal.SIGSTOP)
    with pytest.raises(CheckerError):
        checker.check("x" * (1 << 20), 0.2)  # more than a pipe holds
    assert not checker.check(EASY, 20.0).error


def test_a_process_that_is_killed_says_nothing_of_the_grammar(checker: GrammarChecker) -> None:
    thread = stop_later(checker, signal.SIGKILL)
    with pytest.raises(CheckerError):
        checker.check(json_spec(SLOW, "s").text(256), 60.0)
    thread.join()


def test_a_process_that_runs_out_of_memory_blames_the_grammar(checker: GrammarChecker) -> None:
    thread = stop_later(checker, signal.SIGABRT)  # how the library ends when it gets no memory
    with pytest.raises(TimeLimitError):
        checker.check(json_spec(SLOW, "s").text(256), 60.0)
    thread.join()


def test_closing_does_not_wait_for_a_grammar(checker: GrammarChecker) -> None:
    thread = threading.Timer(0.2, checker.close)
    thread.start()
    with pytest.raises(CheckerError):
        checker.check(json_spec(SLOW, "s").text(256), 120.0)
    thread.join()


PARENT = f"""
import sys
from forebay.engine.grammar_check import GrammarChecker
checker = GrammarChecker()
checker.check({EASY!r}, 20.0)
print(checker._process.pid, flush=True)
checker.check(sys.argv[1], 600.0)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs proc(5)")
def test_a_busy_process_ends_with_its_server(repository: Path) -> None:
    endless = json_spec({"type": "integer", "multipleOf": 99_999_989}, "s").text(256)
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, endless], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        before = grammar_check.processor_s(child)
        assert before is not None
        until = time.monotonic() + 60
        while (grammar_check.processor_s(child) or 0.0) < before + 0.2:  # it is at it
            assert time.monotonic() < until
            time.sleep(0.02)
        parent.kill()
        parent.wait()
    until = time.monotonic() + 30
    while alive(child):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_processor_time_is_limited_anew_for_every_grammar() -> None:
    """By the kernel, so it holds also when nobody watches any more."""
    process = subprocess.Popen(
        [sys.executable, "-I", grammar_check.__file__, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline()
        for _ in range(3):
            process.stdin.write(json.dumps([EASY, 0.1]).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())[0] == ""
        endless = json_spec({"type": "integer", "multipleOf": 99_999_989}, "s").text(256)
        process.stdin.write(json.dumps([endless, 0.1]).encode() + b"\n")
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGXCPU
