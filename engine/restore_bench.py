"""What decoding streams notice of a long prefix that comes back from the SSD store beside them: the time between their tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.engine.cache_bench import SEED, WAIT_S, BenchError, Report
from forebay.engine.llm import LLM
from forebay.engine.resume_bench import prompt_of
from forebay.engine.sequence import Sequence
from forebay.engine.tiers import TierOptions
from forebay.engine.types import OutputEvent, Request, SamplingParams
from forebay.engine.worker import Engine

TAIL_TOKENS = 1  # of the prompt beyond the whole blocks that are restored; it is what the resumed request computes beside its replay
WARM_UP_STEPS = 4
RESTORE_STEPS = 256  # that a restore may take, on the average

Open = Callable[[TierOptions, int, int], LLM]


@dataclass
class Found:
    """Seconds between tokens of the decoding streams, all streams of a step together, by what else the step did.

    Attributes:
        alone: nothing else was going on.
        restoring: blocks were on their way, and the step had decode rows only.
        resuming: the step also computed what the restored request lacked.
        restore_s: from arrival of a request until all its blocks were in, one per restore; `restored_bytes` is what one brings.
        captured: decode steps were captured graphs, a step ahead of the host.
    """

    alone: list[float] = field(default_factory=list)
    restoring: list[float] = field(default_factory=list)
    resuming: list[float] = field(default_factory=list)
    restore_s: list[float] = field(default_factory=list)
    restored_bytes: int = 0
    captured: bool = False


def measure(
    open_model: Open, folder: Path, *, tokens: int, streams: int, context: int, steps: int, repeats: int, report: Report
) -> Found:  # fmt: skip
    """Decode `streams` sequences without a pause; `repeats` times, restore a prefix of `tokens` tokens meanwhile.

    Once more before, untimed: whatever is done for the first time, such as compiling a kernel, is in no figure. The prefix is computed
    once and leaves the device before every restore; the store reads around the page cache. Preparing the request (hashing its blocks),
    which another thread of a server does, is in no step and not timed.

    Args:
        open_model: opens the model with these tiers, this many tokens of KV and this many sequences.
        folder: for the store; empty.
        context: tokens of each stream's prompt.
        steps: steps timed before each restore with nothing beside them.

    Raises:
        BenchError: the prefix did not come from the store.
        ConfigError: the folder cannot be used.
    """
    most = (repeats + 1) * (WARM_UP_STEPS + steps + RESTORE_STEPS)
    model = open_model(TierOptions(dir=folder), tokens + streams * (context + most) + 4096, streams + 1)
    try:
        return run(model, tokens, streams, context, steps, repeats, most, report)
    finally:
        model.close()


def run(model: LLM, tokens: int, streams: int, context: int, steps: int, repeats: int, most: int, report: Report) -> Found:
    engine, numbers, found = model.engine, random.Random(SEED), Found()
    size = engine.manager.layout.block_tokens
    prefix = prompt_of(numbers, model, tokens // size * size + TAIL_TOKENS)
    events: list[OutputEvent] = []
    engine.sink = events.extend
    _finish(engine, _submit(engine, prefix, 1))
    reservoir = engine.reservoir
    if reservoir is None or reservoir.store is None or not reservoir.store.flush(WAIT_S):
        raise BenchError("the prefix could not be stored")
    report(f"a prefix of {len(prefix):,} tokens is stored")
    running = [_submit(engine, prompt_of(numbers, model, context), most) for _ in range(streams)]
    while not all(sequence.decoding for sequence in running):
        engine.step()
    found.captured = hasattr(engine.runner, "step_of") and engine.flights is not None
    for repeat in range(repeats + 1):
        for _ in range(WARM_UP_STEPS):  # the first one after a restore is scheduled, and the host gets ahead again
            engine.step()
        for _ in range(steps if repeat else 0):
            found.alone += _gap(engine, streams)[0]
        _leave(engine, prefix)
        _restore(engine, prefix, streams, found if repeat else Found())
        if repeat:
            report(f"restore {repeat} of {repeats}: {found.restore_s[-1] * 1000:,.1f} ms")
    for sequence in running:
        if sequence.generated >= most:
            raise BenchError("the decoding streams ended before the restores did")
        engine.abort(sequence.id)
    while engine.busy:
        engine.step()
    found.restored_bytes = tokens // size * engine.manager.layout.block_bytes
    return found


def _leave(engine: Engine, prefix: list[int]) -> None:
    """Take the blocks of the prefix out of device memory, and nothing else."""
    manager = engine.manager
    chain = manager.sequence().chain
    chain.extend(prefix)
    manager.index.forget([block for key in chain.keys if (block := manager.index.find(key)) is not None])


def _restore(engine: Engine, prefix: list[int], streams: int, found: Found) -> None:
    """One restore, from its request's arrival to its first token; every step is timed."""
    began = time.perf_counter()
    request = _submit(engine, prefix, 1)
    while request.times.first_token is None:
        gaps, alone = _gap(engine, streams)
        (found.restoring if alone else found.resuming).extend(gaps)
        if time.perf_counter() - began > WAIT_S:
            raise BenchError(f"a restore took longer than {WAIT_S:g} s")
    tiers = request.tiers
    # A few of the last blocks are computed, or replayed, whatever there is.
    if tiers is None or tiers.ssd < len(prefix) - 3 * engine.manager.layout.block_tokens:
        raise BenchError(f"the prefix was to come from the store, it came from {tiers}")
    found.restore_s.append(tiers.restore_s)


def _gap(engine: Engine, streams: int) -> tuple[list[float], bool]:
    """Run a step: what the streams waited for their token, and whether it had decode rows only."""
    began = time.perf_counter()
    done = engine.step()
    if done.decode_rows < streams:
        raise BenchError(f"{done.decode_rows} of {streams} streams decoded in a step")
    return [time.perf_counter() - began] * streams, done.rows == done.decode_rows


def _submit(engine: Engine, prompt: list[int], most: int) -> Sequence:
    return engine.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)))


def _finish(engine: Engine, sequence: Sequence) -> None:
    while sequence.generated < sequence.limit and engine.busy:
        engine.step()
    while engine.busy:
        engine.step()
