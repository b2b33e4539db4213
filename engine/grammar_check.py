"""Tries grammars in a process of its own, so that one that would take for ever, or all memory, can be given up.

The library bounds the work of most grammars by itself, but not of all: an intersection of two dozen patterns or a large `multipleOf` keeps
it busy for minutes, and a thread cannot be stopped. What comes back from here in time is built again by the caller, in about the same time.

As a program: reads grammars, the JSON of [grammar, seconds] a line, answers each with a line, the JSON of [error, warnings, bytes], and
imports nothing of ours. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

MEMORY = 2 << 30  # bytes of address space of the process
MARKER = 256  # id of the one control token of the vocabulary that grammars are tried with: all single bytes and this
STALL = 3.0  # so many times its seconds a grammar is waited for while the process gets too little of a processor

LIMITS = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 60_000,  # about 4 ms of one mask
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # about 0.6 kB each: 30 MB of one choice at the very most, 2 MB in 10,000 tokens of ordinary JSON
    "max_grammar_size": 200_000,
}

# Ends that the grammar at hand has brought about: out of address space, stack or processor time. Others are not its fault.
_OWN_FAULT = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGXCPU}
_PR_SET_PDEATHSIG = 1


def parser_limits() -> LLParserLimits:
    """What one matcher may use. Exceeding it ends the request that it belongs to."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS, verbose_errors=False, precompute_large_lexemes=False)


def build(tokenizer: Any, text: str) -> LLMatcher:
    """A matcher over `text`, a grammar in the library's JSON form. It may be in an error state (`get_error`)."""
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())


class TimeLimitError(Exception):
    """The grammar was not ready after its seconds of processor time, or took more memory than it may."""


class CheckerError(Exception):
    """The process did not start, died or stood still: nothing is known of the grammar."""


class Checked(NamedTuple):
    """What was found: `error` or "", what was left out, and the `size` in bytes of memory that the grammar keeps."""

    error: str
    warnings: list[str]
    size: int


class GrammarChecker:
    """A process that tries grammars, started at the first use and again after it had to be killed. One grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def check(self, text: str, seconds: float, start_s: float = 20.0) -> Checked:
        """Try a grammar; a first call also waits for the process.

        Raises:
            TimeLimitError: after `seconds`.
            CheckerError: the process failed, so it says nothing about the grammar.
        """
        with self._lock:
            process = self._process if self._process is not None and self._process.poll() is None else self._start(start_s)
            try:
                return self._ask(process, text, seconds)
            except BaseException:
                self._kill()
                raise

    def _ask(self, process: subprocess.Popen[bytes], text: str, seconds: float) -> Checked:
        began, before = time.monotonic(), processor_s(process.pid)
        _send(process, json.dumps([text, seconds]).encode() + b"\n", began + STALL * seconds)
        wait = seconds
        while True:
            try:
                line = self._lines.get(timeout=wait)
                break
            except queue.Empty:
                now = processor_s(process.pid)
                spent = seconds if now is None or before is None else now - before
                over = time.monotonic() - began >= STALL * seconds
                if spent >= (0.5 if over else 0.9) * seconds:
                    raise TimeLimitError(f"took more than {seconds:g} s") from None
                if over:
                    raise CheckerError("the process that tries grammars stands still") from None
                wait = max(0.05, min(seconds - spent, STALL * seconds - (time.monotonic() - began)))
        if not line:
            code = process.wait()
            if code in _OWN_FAULT:
                raise TimeLimitError(f"the process that tried it ended with signal {-code}")
            raise CheckerError(f"the process that tries grammars ended with status {code}")
        return Checked(*json.loads(line))

    def _start(self, seconds: float) -> subprocess.Popen[bytes]:
        born: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        lines = self._lines = queue.SimpleQueue()
        threading.Thread(target=_live, args=(born, lines), name="forebay-grammar-check", daemon=True).start()
        process = born.get()
        if isinstance(process, OSError):
            raise CheckerError(f"the process that tries grammars does not start: {process.strerror}")
        self._process = process
        with contextlib.suppress(queue.Empty):
            if lines.get(timeout=seconds):
                return process
        self._kill()
        raise CheckerError("the process that tries grammars does not start")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def close(self) -> None:
        """End the process, and with it a check under way; a later check starts another one."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._kill()

    def __del__(self) -> None:
        if self._process is not None:
            self._process.kill()


def _live(born: queue.SimpleQueue[subprocess.Popen[bytes] | OSError], lines: queue.SimpleQueue[bytes]) -> None:
    """Start the process and pass its lines on, at its end an empty one.

    In a thread that lives as long: the kernel ends the process when the thread that started it is gone.
    """
    # By path and isolated: the package, and with it torch, is not imported.
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        born.put(error)
        return
    born.put(process)
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put(line)
    lines.put(b"")
    process.wait()


def _send(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    """Write to a process that may not be reading. Raises CheckerError."""
    assert process.stdin is not None
    fd = process.stdin.fileno()
    os.set_blocking(fd, False)
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    view = memoryview(data)
    try:
        while view:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise CheckerError("the process that tries grammars reads nothing")
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view):]
    except OSError as error:
        raise CheckerError(f"the process that tries grammars has gone: {error.strerror}") from None


def processor_s(pid: int) -> float | None:
    """Seconds of processor time that a process has used, None where the system does not tell (proc(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


# ---- in the process


class _Bytes:
    """The vocabulary of the process, in the shape that the library reads."""

    eos_token_id = 257
    bos_token_id = None
    is_tokenizer_wrapper = True
    tokens = [bytes([i]) for i in range(256)] + [b"<marker>", b"<end>"]
    special_token_ids = (MARKER, 257)

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _Allocated(ctypes.Structure):
    """mallinfo2(3)"""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def memory_meter() -> Callable[[], int]:
    """A function that gives the bytes allocated in this process: by its allocator's books, else as far as they are resident."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        page = os.sysconf("SC_PAGE_SIZE")
        return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page
    mallinfo.restype = _Allocated

    def allocated() -> int:
        found = mallinfo()
        return int(found.uordblks + found.hblkhd)

    return allocated


def _end_with(parent: int) -> bool:
    """Be killed when the process that started this one is gone. False if it is gone already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    return os.getppid() == parent


def _limit_processor(seconds: float) -> None:
    """Be killed after so much more processor time: nobody else does it if the parent cannot."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _try(tokenizer: Any, text: str, meter: Callable[[], int]) -> Checked:
    before = meter()
    try:
        matcher = build(tokenizer, text)
        if not (error := matcher.get_error()):
            matcher.compute_bitmask()
            error = matcher.get_error()
        return Checked(error, [] if error else matcher.get_grammar_warnings(), max(0, meter() - before))
    except MemoryError:
        return Checked("too large for the memory that it may use", [], 0)


def _serve(parent: int) -> None:
    import resource

    import llguidance

    if not _end_with(parent):
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    meter = memory_meter()
    print("ready", flush=True)
    for line in sys.stdin:
        text, seconds = json.loads(line)
        _limit_processor(seconds)
        print(json.dumps(_try(tokenizer, text, meter)), flush=True)
        if os.getppid() != parent:
            return


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _serve(int(sys.argv[1]))
