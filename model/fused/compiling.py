"""Compiling kernels before they are needed, many at once: a server should not meet one for the first time in the middle of a step.

Much of a compilation holds Python's lock, so it is shared out to processes, `python -m forebay.model.fused.compiling`, which know nothing
of the GPU. What they compile gets into Triton's cache on disk, from where it is loaded in milliseconds, in later runs too.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

Job = dict[str, Any]


@contextmanager
def compiling(workers: int | None = None) -> Iterator[None]:
    """Kernels launched inside are compiled and not run; when this ends, all of them are ready.

    A forward pass inside thus says which kernels it needs, whatever its tensors hold: the torch operations between them do run, on what
    was never computed, so nothing may be looked up by what a kernel should have written. A kernel that a worker fails at is compiled at
    its first launch, which then says what is wrong.

    Args: workers, all usable cores by default.
    """
    from triton.runtime.jit import JITFunction

    launch, compile_now = JITFunction.run, JITFunction._do_compile
    seen: set[tuple[str, str, str]] = set()
    crew = _Crew(workers or len(os.sched_getaffinity(0)))

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    def hand_out(self: Any, key: str, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool) -> None:
        name = self.__module__, self.fn.__name__, str(key)
        if name not in seen:
            seen.add(name)
            crew.add({
                "module": name[0], "name": name[1], "signature": signature, "constexprs": constexprs, "attrs": attrs,
                "target": self.device_caches[device][2], "options": dict(options.__dict__), "hash": self.cache_key,
            })  # fmt: skip

    JITFunction.run, JITFunction._do_compile = compile_only, hand_out
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = launch, compile_now
        crew.finish()


class _Crew:
    """Threads that each feed a process of their own, one job after another."""

    def __init__(self, workers: int) -> None:
        self._jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._feed, name=f"forebay-compile-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> None:
        with suppress(Exception):  # what cannot be sent is compiled here, when it is launched
            self._jobs.put(pickle.dumps(job))

    def finish(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _feed(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with (
            suppress(OSError, EOFError),
            subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            ) as worker,
        ):
            assert worker.stdin is not None and worker.stdout is not None
            while (job := self._jobs.get()) is not None:
                worker.stdin.write(job)
                worker.stdin.flush()
                pickle.load(worker.stdout)


def compile_job(job: Job) -> None:
    """Compile one kernel into Triton's cache: what `JITFunction` would do at a launch, for a given target instead of the device's."""
    import triton
    from triton.compiler import ASTSource

    module = importlib.import_module(job["module"])
    kernels = vars(module.load(False)) if hasattr(module, "load") else vars(module)
    kernel = next(k for k in kernels.values() if getattr(getattr(k, "fn", None), "__name__", None) == job["name"])
    kernel.hash = job["hash"]  # of its source; Triton's depends on which kernels were hashed before, and the cache goes by it
    form: Any = ASTSource
    if getattr(kernel, "is_gluon", bool)():
        form = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    source = form(kernel, job["signature"], job["constexprs"], job["attrs"])
    compiled = triton.compile(source, target=job["target"], options=job["options"])
    with suppress(Exception):  # the C code that launches it needs the driver's library, and is made at the first launch otherwise
        importlib.import_module("triton.backends.nvidia.driver").CudaLauncher(source, compiled.metadata)


def serve() -> None:
    """Compile what comes in; say of each whether it went well."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not get among the answers
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        fault = ""
        try:
            compile_job(job)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        pickle.dump(fault, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
