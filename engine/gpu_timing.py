"""Times of device work: captured graphs of several repeats between two events, and the ceilings that such times are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

SAMPLES = 25  # timed replays behind a median
GOAL_MS = 2.0  # what one replay should take at least, so that the events' own time does not count
MOST_REPEATS = 50


@dataclass(frozen=True)
class Ceilings:
    """What this device did in this run: bytes/s of a copy (read and written), FLOP/s of bf16 and (where it has them) FP8 products."""

    copy: float
    bf16: float
    fp8: float | None


@dataclass(frozen=True)
class Floor:
    """Least seconds for some bytes and some FLOPs."""

    bytes_s: float
    flops_s: float

    @property
    def seconds(self) -> float:
        return max(self.bytes_s, self.flops_s)


def floor_of(moved: float, flops: float, ceilings: Ceilings) -> Floor:
    """`moved` bytes read and written at the speed of a copy; FLOPs at the bf16 peak."""
    return Floor(moved / ceilings.copy, flops / ceilings.bf16)


def repeats_for(once_ms: float) -> int:
    """How often work of `once_ms` goes into one graph."""
    return max(1, min(MOST_REPEATS, round(GOAL_MS / max(once_ms, 1e-6))))


def graph_seconds(work: Callable[[], object], *, flush: torch.Tensor | None = None, samples: int = SAMPLES) -> tuple[float, list[float]]:
    """Median seconds of `work`, and all samples.

    Without `flush`, one graph has several repeats: what fits in the L2 cache stays there. With it (a buffer larger than the cache, of a
    multiple of 8 bytes), a graph has one run, and the buffer is read before each, outside of the timed part; starting the graph is then
    included. It is read, not written, so that the cache holds what it holds in a step, weights that were read: lines that were written
    would go back to memory while the work is timed (28 us instead of 22 for a kernel that only reads 71 MB).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and allocates what a graph may not
            work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        work()
        end.record(stream)
    torch.cuda.synchronize()
    repeats = 1 if flush is not None else repeats_for(begin.elapsed_time(end))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            work()
    graph.replay()
    seconds = []
    for _ in range(samples):
        if flush is not None:
            torch.amax(flush.view(torch.int64))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000 / repeats)
    return statistics.median(seconds), seconds


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy of 1 GiB, by a kernel that reads and writes it (the device's own copy engine is slower); products of 8,192 x 8,192 matrices
    of random numbers."""
    here = torch.zeros(1 << 29, dtype=torch.bfloat16, device=device)
    there = torch.empty_like(here)
    copy = 2 * here.nbytes / graph_seconds(lambda: torch.add(here, 1, out=there))[0]
    n = 8192
    a, b = (torch.randn((n, n), device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    bf16 = 2 * n**3 / graph_seconds(lambda: torch.mm(a, b.T, out=out))[0]
    fp8 = None
    if torch.cuda.get_device_capability(device) >= (8, 9):
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        fp8 = 2 * n**3 / graph_seconds(lambda: torch._scaled_mm(x, y.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True))[0]
    return Ceilings(copy, bf16, fp8)


class Kernel(NamedTuple):
    """One piece of work that a device did. Copies and fills are named `Memcpy ...` and `Memset ...`."""

    name: str
    seconds: float

    @property
    def copies(self) -> bool:
        return self.name.startswith(("Memcpy", "Memset"))


class Done(Protocol):
    def synchronize(self) -> None: ...


class Timer(Protocol):
    """What a benchmark of steps asks of a device; `CudaTimer` is the real one."""

    def now(self) -> float:
        """Seconds of the host's clock."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def each(self, work: Callable[[], object], samples: int) -> list[float]:
        """Device seconds of each of several runs, one behind the other."""

    def done(self) -> Done:
        """Something to wait on until everything launched so far is done."""

    def mark(self) -> None:
        """Launch a kernel that does nothing and has a name of its own."""

    def kernels(self, work: Callable[[], object]) -> list[Kernel]:
        """What the device does while `work` runs, in order."""

    def allocated(self) -> int:
        """Bytes that tensors take on the device."""

    def peak(self, work: Callable[[], object]) -> int:
        """The most bytes that tensors took on the device while `work` ran."""


class CudaTimer:
    """A `Timer` by CUDA events, the profiler's activity records, and the allocator's statistics."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def each(self, work: Callable[[], object], samples: int) -> list[float]:
        """The host must be faster than the device, as with replays of a graph: its gaps would count."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
        work()  # in front, so that the device is busy when the first mark is set
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(marks)]

    def done(self) -> Done:
        event = torch.cuda.Event()
        event.record()
        return event

    def mark(self) -> None:
        torch.cuda._sleep(1)

    def kernels(self, work: Callable[[], object]) -> list[Kernel]:
        from torch.profiler import ProfilerActivity, profile

        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            work()
            self.synchronize()
        events = [e for e in found.events() or () if e.device_type.name == "CUDA" and not e.is_user_annotation]
        events.sort(key=lambda e: e.time_range.start)
        return [Kernel(e.name, e.time_range.elapsed_us() / 1e6) for e in events]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self, work: Callable[[], object]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device)
