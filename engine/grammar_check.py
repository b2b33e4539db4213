"""Tries grammars in a process of its own, so that one that would take for ever, or all memory, can be given up.

The library bounds the work of most grammars by itself, but not of all: an intersection of two dozen patterns or a large `multipleOf` keeps
it busy for minutes, and a thread cannot be stopped. What comes back from here in time is built again by the caller, in about the same time.

As a program: reads grammars, one JSON string a line, answers each with a line, the JSON of [error, warnings], and imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

MEMORY = 2 << 30  # bytes of address space of the process
MARKER = 256  # id of the one control token of the vocabulary that grammars are tried with: all single bytes and this

LIMITS = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 60_000,  # about 4 ms of one mask
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
}


def parser_limits() -> LLParserLimits:
    """What one matcher may use. Exceeding it ends the request that it belongs to."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS, verbose_errors=False, precompute_large_lexemes=False)


def build(tokenizer: Any, text: str) -> LLMatcher:
    """A matcher over `text`, a grammar in the library's JSON form. It may be in an error state (`get_error`)."""
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())


class TimeLimitError(Exception):
    """The grammar was not ready in time, or took more memory than it may."""


class GrammarChecker:
    """A process that tries grammars, started at the first use and again after it had to be killed. One grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def check(self, text: str, seconds: float, start_s: float = 20.0) -> tuple[str, list[str]]:
        """(error or "", warnings) of a grammar. Raises TimeLimitError after `seconds`; a first call also waits for the process."""
        with self._lock:
            process = self._process if self._process is not None and self._process.poll() is None else self._start(start_s)
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(text) + "\n")
                process.stdin.flush()
                line = self._lines.get(timeout=seconds)
                if not line:
                    raise TimeLimitError("the process that tried it ended")
            except (queue.Empty, OSError) as error:
                self._kill()
                raise TimeLimitError(str(error)) from None
            except BaseException:
                self._kill()
                raise
            found: tuple[str, list[str]] = tuple(json.loads(line))
            return found

    def _start(self, seconds: float) -> subprocess.Popen[str]:
        # By path and isolated: the package, and with it torch, is not imported.
        process = subprocess.Popen([sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process, self._lines = process, queue.SimpleQueue()
        lines = self._lines
        threading.Thread(target=_read, args=(process, lines), name="forebay-grammar-check", daemon=True).start()
        try:
            if lines.get(timeout=seconds):
                return process
        except queue.Empty:
            pass
        self._kill()
        raise TimeLimitError("the process that tries grammars does not start")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process; a later check starts another one."""
        with self._lock:
            self._kill()

    def __del__(self) -> None:
        if self._process is not None:
            self._process.kill()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Lines of the process as they come, at its end an empty one."""
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put(line)
    lines.put("")


class _Bytes:
    """The vocabulary of the process, in the shape that the library reads."""

    eos_token_id = 257
    bos_token_id = None
    is_tokenizer_wrapper = True
    tokens = [bytes([i]) for i in range(256)] + [b"<marker>", b"<end>"]
    special_token_ids = (MARKER, 257)

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _serve() -> None:
    import resource

    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    print("ready", flush=True)
    for line in sys.stdin:
        matcher = build(tokenizer, json.loads(line))
        error = matcher.get_error()
        if not error:
            matcher.compute_bitmask()
            error = matcher.get_error()
        print(json.dumps([error, [] if error else matcher.get_grammar_warnings()]), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()
