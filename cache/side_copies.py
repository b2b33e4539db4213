"""Copies between a device's pools and host memory, beside the steps: on streams of their own, from and to pinned memory.

The thread that runs steps only starts them. Two rules keep bytes whole, and both are waits of one stream for another, never of the host:
a copy waits for the steps that were started before it, which may still use the rows it fills; and `fence` makes steps started from then
on wait for the copies started so far. On a CPU everything is done at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SideCopies:
    """Used by one thread, the one that runs steps; what `download` returns may be waited for anywhere."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._in = self._out = None
        if self.device.type == "cuda":
            self._in, self._out = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._fresh = False  # something was started that no fence covers
        self._pending: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def upload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start filling device tensors: (target, source), where a source of a CUDA device is pinned and does not change until `after`."""
        if self._in is None:
            for target, source in copies:
                target.copy_(source)
        elif copies:
            self._in.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._in):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            self._fresh = True

    def after(self, done: Callable[[], None]) -> None:
        """Have `done` called by `collect` or `wait` once all uploads so far are finished; at once on a CPU."""
        if self._in is None:
            done()
            return
        event = torch.cuda.Event(blocking=True)
        event.record(self._in)
        self._pending.append((event, done))

    def fence(self) -> None:
        """Steps started from now on see what the uploads so far have brought."""
        if self._in is not None and self._fresh:
            torch.cuda.current_stream(self.device).wait_stream(self._in)
            self._fresh = False

    def collect(self) -> None:
        """Call what waits for uploads that are finished by now."""
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()[1]()

    def wait(self) -> None:
        """Wait until all uploads are finished, and call what waits for them. For when no step is delayed by it."""
        while self._pending:
            event, done = self._pending.popleft()
            event.synchronize()
            done()

    def download(self, data: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
        """A host tensor that gets the bytes of `data`, and what to call before it is read (None: it is there).

        `data` belongs to this copy: nobody changes it. It may be the host tensor itself on a CPU.
        """
        if self._out is None:
            return data, None
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
        data.record_stream(self._out)  # its memory is not given to a later step before the copy is finished
        event = torch.cuda.Event(blocking=True)
        event.record(self._out)
        return host, event.synchronize

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have pinned memory for as many downloads of these bytes at once, so that the first ones need not ask the system for it."""
        if self._out is not None:
            kept = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            kept.clear()  # torch keeps pinned memory that is given back, for the next one that asks
