"""Times of device work: captured graphs of several repeats between two events, and the ceilings that such times are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

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

    Without `flush`, one graph has several repeats: what fits in the L2 cache stays there. With it (a buffer larger than the cache), a
    graph has one run, and the buffer is written before each, outside of the timed part; starting the graph is then included.
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
            flush.zero_()
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
