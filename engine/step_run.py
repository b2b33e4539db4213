"""Everything that `bench step` measures, part by part."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.engine import prefill_bench, step_bench
from forebay.engine.fused_runner import FusedRunner
from forebay.engine.gpu_timing import Ceilings, Timer
from forebay.model.errors import ConfigError
from forebay.model.source import resolve

PARTS = ("step", "launches", "memory", "prefill", "torch")


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        pairs: (batch, context) of decode steps. samples: of each.
        chunks: rows of a prefill step, each tried. prompt: its tokens. repeats: timed prompts of each. rows: of the chunk whose kernels are
            counted. compared: the model, and tokens of the prompt, that torch operations run too.
    """

    parts: tuple[str, ...]
    pairs: list[tuple[int, int]]
    samples: int
    chunks: list[int]
    prompt: int
    repeats: int
    rows: int
    compared: tuple[str, int]

    def kv_tokens(self, block: int) -> int:
        """Of the pool: the largest batch with room to grow, or two prompts."""
        decode = max(batch * (-(-(context + step_bench.SPARE) // block) + 1) * block for batch, context in self.pairs)
        return max(decode, 2 * self.prompt + block)


def pairs(batches: list[int], contexts: list[int], most: int) -> list[tuple[int, int]]:
    """Batch and context of the steps whose sequences have at most `most` tokens together, batch by batch.

    Raises:
        ConfigError: there are none.
    """
    found = [(batch, context) for batch in batches for context in contexts if batch * context <= most]
    if not found:
        raise ConfigError(f"bench: no batch and context of these have at most {most} tokens together (--most-tokens)")
    return found


class Run:
    """Parts done one by one: one that fails is named under `errors`, one that was not begun in time under `not run`."""

    def __init__(
        self, wanted: Wanted, model: str, device: str, timer: Timer, ceilings: Ceilings, budget: float | None, report: Callable[[str], None]
    ) -> None:
        """
        Raises:
            ConfigError: there is no such model.
        """
        self.source = resolve(model)
        self.wanted, self.device, self.timer, self.ceilings = wanted, device, timer, ceilings
        self.budget, self.report, self.began = budget, report, timer.now()
        self.figures: dict[str, Any] = {
            "model": model, "open_s": None, "warm_s": None, "steps": [], "launches": [], "memory": None, "prefill": [], "compared": None,
            "errors": {}, "traces": {}, "not run": [],
        }  # fmt: skip

    def all(self) -> dict[str, Any]:
        """Every part that is wanted."""
        if set(self.wanted.parts) - {"torch"}:
            self._do("network", self._network)
            gc.collect()  # its memory is needed
        if "torch" in self.wanted.parts:
            self._do("torch operations", self._against_torch)
        return self.figures

    def _do(self, name: str, work: Callable[[], None]) -> None:
        if self.budget is not None and self.timer.now() - self.began >= self.budget:
            self.figures["not run"].append(name)
            return
        first = self.timer.now()
        try:
            work()
        except Exception as error:  # one part that fails must not end the others
            self.figures["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            self.figures["traces"][name] = traceback.format_exc(limit=-8)
            self.report(self.figures["traces"][name])
        self.report(f"{name}: {self.figures['errors'].get(name) or f'{self.timer.now() - first:.1f} s'}")

    def _network(self) -> None:
        """What is measured on the network itself."""
        wanted, figures, timer, parts = self.wanted, self.figures, self.timer, self.wanted.parts
        weights = self.source.open(device=self.device)
        config = weights.config
        buckets = sorted({batch for batch, _ in wanted.pairs})
        engine = prefill_bench.open_engine(
            weights, self.device, sequences=buckets[-1], kv_tokens=wanted.kv_tokens(config.sliding_window),
            encoder_tokens=max(wanted.chunks), buckets=buckets, max_tokens=config.max_position_embeddings,
        )  # fmt: skip
        runner = engine.runner
        assert isinstance(runner, FusedRunner)
        rig = step_bench.Rig(runner, timer)
        timer.synchronize()
        figures["open_s"] = timer.now() - self.began
        self.report(f"network made: {figures['open_s']:.1f} s")

        def warm() -> None:
            first = timer.now()
            runner.warm(buckets[-1], lambda done, total, text: self.report(text), chunk=max(wanted.rows, *wanted.chunks))
            timer.synchronize()
            figures["warm_s"] = timer.now() - first

        def add(part: str, name: str, measure: Callable[..., dict[str, Any]], *given: Any) -> None:
            self._do(name, lambda: figures[part].append(measure(*given)))

        self._do("kernels compiled, steps captured", warm)  # if this fails, each part meets the failure where it belongs
        for batch, context in wanted.pairs if "step" in parts else ():
            name = f"step of {batch} at {context:,}"
            add("steps", name, step_bench.decode, rig, batch, context, self.ceilings.copy, wanted.samples)
        for batch, context in wanted.pairs if "launches" in parts else ():
            add("launches", f"kernels of a step of {batch} at {context:,}", step_bench.decode_launches, rig, batch, context)
        if "launches" in parts:
            context = max(wanted.rows, min(context for _, context in wanted.pairs))
            add("launches", f"kernels of a chunk of {wanted.rows:,}", step_bench.prefill_launches, rig, context, wanted.rows)
        if "memory" in parts:
            contexts = sorted({context for _, context in wanted.pairs})
            self._do("memory", lambda: figures.update(memory=prefill_bench.memory(rig, contexts, buckets[0], wanted.rows)))
        for chunk in wanted.chunks if "prefill" in parts else ():
            name = f"prefill of {wanted.prompt:,} in chunks of {chunk:,}"
            add("prefill", name, prefill_bench.prefill, rig, engine, wanted.prompt, chunk, self.ceilings, wanted.repeats)
        engine.close()

    def _against_torch(self) -> None:
        name, tokens = self.wanted.compared
        weights = resolve(name).open(device=self.device)
        self.figures["compared"] = prefill_bench.against_torch(weights, self.device, self.timer, tokens, self.wanted.repeats)
