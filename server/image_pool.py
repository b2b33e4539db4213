"""Decoding images outside this process: programs with no rights (server/image_worker.py), of which each has one image at a time.

What comes back is no more than the model sees of an image, its canvas.

A file that crashes its decoder, or makes it take too much time or memory, ends that process alone and its request is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from forebay.engine.types import UnavailableError
from forebay.model.errors import ForebayError, RequestError
from forebay.model.image_plan import ImagePlan
from forebay.server.image_header import unreadable
from forebay.server.limits import ImageOptions

PROGRAM = Path(__file__).resolve().with_name("image_worker.py")
PASSED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")  # of the environment, which holds API keys
# As in the program, which can import nothing of ours.
REQUEST = struct.Struct("<QIIIIIIII")
ANSWER = struct.Struct("<BBQ")
OK, UNREADABLE, TOO_LARGE = range(3)
START_S = 20.0  # a machine under load may take so long to start an interpreter
_log = logging.getLogger("forebay.images")


@dataclass(frozen=True)
class Rendered:
    """What the model sees of an image: `rgb` holds height × width × 3 bytes of its canvas, row by row; `digest` is their blake3."""

    rgb: bytes
    digest: bytes


class DecodePool:
    """At most `options.workers` programs, started when they are first needed.

    Attributes:
        failures: images whose process ended without an answer.
    """

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._threads = ThreadPoolExecutor(max_workers=options.workers, thread_name_prefix="forebay-image")
        self._idle: queue.SimpleQueue[_Program] = queue.SimpleQueue()
        self._programs = [_Program(options) for _ in range(options.workers)]
        for program in self._programs:
            self._idle.put(program)
        self.failures = 0

    async def render(self, data: bytes, size: tuple[int, int], plan: ImagePlan) -> Rendered:
        """The first frame of a file of the declared `size`, width and height in pixels, on the canvas of its plan.

        Raises:
            RequestError: image_parse_error, image_too_large; also for an image that its process did not survive.
            ForebayError: the program cannot start, which is told as a fault of the server.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._render, data, size, plan)

    def close(self) -> None:
        """End all programs, also those that are at work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for program in self._programs:
            program.end(for_good=True)

    def _render(self, data: bytes, size: tuple[int, int], plan: ImagePlan) -> Rendered:
        program = self._idle.get()
        try:
            rgb = program.run(data, size, plan)
            return Rendered(rgb, blake3(rgb).digest())
        except _GoneError:
            self.failures += 1
            limit = f"{self._options.decode_timeout_s:g} s and {self._options.decode_memory // (1 << 20)} MiB"
            raise unreadable(f"its decoder failed, or would have needed more than {limit}") from None
        finally:
            self._idle.put(program)


class _GoneError(Exception):
    """The process of an image ended, or was ended, without a whole answer. `said`: what came on standard error."""

    def __init__(self, said: bytes = b"") -> None:
        super().__init__()
        self.said = said


class _Program:
    """One running image_worker.py, used by one thread at a time."""

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        self._lock = threading.Lock()  # between its thread and whoever ends it

    def run(self, data: bytes, size: tuple[int, int], plan: ImagePlan) -> bytes:
        process, limit = self._process, self._options.decode_timeout_s
        if process is None or process.poll() is not None:
            process, limit = self._start(), limit + START_S
        timer = threading.Timer(limit + 1, self.end)  # the process has a clock of its own, which should be first
        timer.daemon = True
        timer.start()
        try:
            head = REQUEST.pack(len(data), *size, *plan.canvas, *plan.picture, *plan.paste)
            return self._ask(process, (head, data), plan.canvas[0] * plan.canvas[1] * 3, time.monotonic() + limit + 2)
        except (_GoneError, OSError) as error:
            said = error.said if isinstance(error, _GoneError) else b""
            text = said + _last_words(process)
            self.end()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            if len(text) > 1:  # an exit status is one byte
                reason = text.decode("utf-8", "replace").strip()[-1000:]
                raise ForebayError(f"the image decoder does not run: {reason}") from None  # no fault of the image
            raise _GoneError from error
        finally:
            timer.cancel()

    def end(self, *, for_good: bool = False) -> None:
        """Kill the program and the process of its image; `for_good` it is not started again. May be called from any thread.

        Its pipes stay open: another thread may be reading from them, and their numbers must not become somebody else's meanwhile.
        """
        with self._lock:
            process, self._process = self._process, None
            self._over |= for_good
        if process is None or process.returncode is not None:  # once it is reaped, its number may be somebody else's
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self.end()
        arguments = [sys.executable, "-E", "-P", str(PROGRAM), str(self._options.decode_memory), str(self._options.decode_timeout_s)]
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        with self._lock:
            if self._over:
                raise UnavailableError("the image decoders have ended", code="draining")
            self._process = process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: tuple[bytes, ...], expected: int, deadline: float) -> bytes:
        """The answer's bytes, of which there must be `expected`."""
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for piece in request:
            view = memoryview(piece)
            while view:
                view = view[process.stdin.write(view):]
        answers, ends = process.stdout.fileno(), process.stderr.fileno()
        answer, wanted, ended = bytearray(), ANSWER.size, False
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            selector.register(ends, selectors.EVENT_READ)
            while len(answer) < wanted or not ended:
                ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                if not ready:
                    raise _GoneError
                if answers in ready:
                    part = os.read(answers, 1 << 20)
                    if not part:
                        raise _GoneError
                    answer += part
                    if wanted == ANSWER.size <= len(answer):
                        wanted += self._payload_size(answer, expected)
                elif ends in ready:
                    status = os.read(ends, 1 << 16)
                    if status != b"\0":
                        raise _GoneError(status)
                    ended = True
        if len(answer) != wanted:
            raise _GoneError
        return self._read(answer)

    @staticmethod
    def _payload_size(answer: bytearray, expected: int) -> int:
        status, filtered, size = ANSWER.unpack_from(answer)
        if size != expected if status == OK else size > 1024:
            raise _GoneError
        if not filtered:
            _warn_unfiltered()
        return size

    @staticmethod
    def _read(answer: bytearray) -> bytes:
        status, _, _ = ANSWER.unpack_from(answer)
        payload = bytes(memoryview(answer)[ANSWER.size:])
        if status == OK:
            return payload
        reason = "".join(c for c in payload.decode("utf-8", "replace") if c.isprintable())
        if status == TOO_LARGE:
            raise RequestError(f"The image is too large: {reason}.", code="image_too_large")
        raise unreadable(reason)


def _last_words(process: subprocess.Popen[bytes]) -> bytes:
    """What is left on standard error of a program that has ended, or is about to."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    if process.returncode is None or process.stderr is None:
        return b""
    return process.stderr.read()


_warned = threading.Event()


def _warn_unfiltered() -> None:
    if not _warned.is_set():
        _warned.set()
        _log.warning("this system cannot filter system calls (seccomp): image decoders have limits on time, memory and files only")
