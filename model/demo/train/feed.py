"""Rows for training from worker processes. What a step gets depends on seed, phase and step alone: not on how many processes there are, how
fast they are, or where a run was stopped and went on."""

from __future__ import annotations

import multiprocessing
import queue
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.model.demo.train.plan import Phase
from forebay.model.demo.train.stream import Packed, packed

STREAMS = 16  # independent sequences of rows that the rows of a step are taken from in turn
CHUNK = 50  # steps after which the sequences begin anew, so that a run can go on in the middle of a phase
AHEAD = 64  # rows each stream may be ahead
PATIENCE_S = 120.0
GLANCE_S = 2.0  # how often a process that has to wait looks whether the other side still lives


def stream_rows(seed: int, phase: Phase, corpus: Path, stream: int, step: int) -> Iterator[Packed]:
    """Rows of one stream from a step of the phase on: of the rows 0, 1, … of every step those whose number is `stream` modulo STREAMS."""
    weights = {"prompt_weight": phase.prompt_weight, "text_weight": phase.text_weight}
    share = len(range(stream, phase.rows, STREAMS))
    while True:
        chunk, done = divmod(step, CHUNK)
        number = seed + zlib.crc32(f"{phase.name} {chunk}".encode())
        rows = packed(number, phase.mix, phase.length, corpus=corpus, worker=stream, **weights)
        for _ in range(done * share):
            next(rows)
        for _ in range((CHUNK - done) * share):
            yield next(rows)
        step += CHUNK - done


def _produce(queues: dict[int, Any], seed: int, phase: Phase, corpus: Path, step: int) -> None:
    """Fill the queues of some streams, in turn, until the parent is gone."""
    parent = multiprocessing.parent_process()
    for each in queues.values():
        each.cancel_join_thread()  # nobody will read what is left when this process ends
    sources = {stream: stream_rows(seed, phase, corpus, stream, step) for stream in queues}
    shares = {stream: len(range(stream, phase.rows, STREAMS)) for stream in queues}
    while True:
        for stream, source in sources.items():
            for _ in range(shares[stream]):
                row = next(source)
                while True:
                    try:
                        queues[stream].put(row, timeout=GLANCE_S)
                        break
                    except queue.Full:
                        if parent is None or not parent.is_alive():
                            return


class Feed:
    """The rows of one phase from one of its steps on.

    Args:
        processes: how many make them, at most.
    """

    def __init__(self, seed: int, phase: Phase, corpus: Path, step: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.phase = phase
        self.queues: list[Any] = [context.Queue(AHEAD) for _ in range(STREAMS)]
        streams = min(STREAMS, phase.rows)  # the others have no rows
        used = max(1, min(processes, streams))
        self.processes = []
        for number in range(used):
            own = {stream: self.queues[stream] for stream in range(number, streams, used)}
            process = context.Process(target=_produce, args=(own, seed, phase, corpus, step), daemon=True)
            process.start()
            self.processes.append(process)

    def take(self) -> list[Packed]:
        """The rows of the next step.

        Raises:
            RuntimeError: a process that makes rows has died or made none for two minutes.
        """
        return [self._row(self.queues[row % STREAMS]) for row in range(self.phase.rows)]

    def _row(self, rows: Any) -> Packed:
        began = time.monotonic()
        while True:
            try:
                row: Packed = rows.get(timeout=GLANCE_S)
                return row
            except queue.Empty:
                dead = [process.exitcode for process in self.processes if process.exitcode is not None]
                if dead or time.monotonic() - began > PATIENCE_S:
                    why = f"a process ended with {dead[0]}" if dead else f"none in {PATIENCE_S:.0f} s"
                    raise RuntimeError(f"no rows for phase {self.phase.name}: {why}") from None

    def close(self) -> None:
        """End the processes; rows that were not taken are lost."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(5.0)
