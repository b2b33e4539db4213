"""Decode steps and prefill chunks of a network on a GPU, beside their floors: times, kernels of a layer, memory.

Nothing is prefilled: sequences of any length get random but valid bytes as their past, so a step at a million tokens takes no longer to
set up than one at a thousand.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.engine.active_bytes import step_bytes
from forebay.engine.fused_runner import FusedRunner
from forebay.engine.gpu_timing import Kernel, Timer
from forebay.engine.runner import Runner
from forebay.model.batch import Span
from forebay.model.config import ModelConfig
from forebay.model.fused.step import DecodeRow

WARM = 3  # steps before any that is timed
SPARE = 128  # tokens that a sequence may grow by while it is measured
TOP = 25  # kernels listed by name
NAME = 120  # characters of a kernel's name
ENCODER_ONLY = 1 << 40  # as `decoder_from`: no row runs the decoder half

Ids = NDArray[np.int64]


class Rig:
    """A runner whose memory is full of random bytes, and sequences that say they have been there for long.

    The runner's pools must be idle: blocks and slots are used without asking for them.
    """

    def __init__(self, runner: FusedRunner, timer: Timer, seed: int = 1) -> None:
        self.runner, self.timer, self.backbone, self.config = runner, timer, runner.fused, runner.fused.config
        self.layout = runner.layout
        self._order = np.random.default_rng(seed).permutation(np.arange(1, runner.blocks.total + 1))
        self._lines: dict[tuple[int, int], list[list[int]]] = {}
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere but in the null block and slot. Every byte is a pair of FP4 codes; E4M3 codes lose a bit, so that none
        is a NaN, and scales lie where those of normed vectors do."""
        blocks, windows = self.runner.blocks, self.runner.windows
        draw = torch.Generator(blocks.data.device).manual_seed(seed)
        blocks.data[1:].random_(0, 256, generator=draw)
        for views in blocks.views.values():
            views.main_scales[1:].random_(40, 47, generator=draw)  # 0.25 to 0.44
            views.index_scales[1:].random_(124, 128, generator=draw)  # 1/8 to 1
        windows.codes[1:].random_(0, 256, generator=draw).bitwise_and_(0xF7)
        windows.scales[1:].random_(118, 122, generator=draw)
        windows.pending[1:].normal_(generator=draw)

    def tables(self, count: int, context: int) -> list[list[int]]:
        """Block tables of `count` sequences, random and distinct while there are blocks enough, with room to grow."""
        key = count, context
        if key not in self._lines:
            length = max(self.layout.blocks_for(context), min(self.runner.max_blocks, self.layout.blocks_for(context + SPARE)))
            at = np.arange(count * length) % len(self._order)
            self._lines[key] = self._order[at].reshape(count, length).tolist()
        return self._lines[key]

    def steps_from(self, count: int, context: int, steps: int) -> list[list[DecodeRow]]:
        """The rows of consecutive steps, from the beginning again where the block tables end."""
        room = len(self.tables(count, context)[0]) * self.layout.block_tokens - context + 1
        return [self.decode_rows(count, context, i % room) for i in range(steps)]

    def spans(self, count: int, context: int, rows: int = 1, *, decoder_rows: int | None = None) -> list[Span]:
        """The last `rows` positions of sequences of `context` tokens; of them the last `decoder_rows` (default: all) run the decoder half,
        whose windows then begin with them."""
        start, floor, first = context - rows, 0, 0
        if decoder_rows is not None:
            first = context - decoder_rows if decoder_rows else ENCODER_ONLY
            floor = first
        tables = self.tables(count, context)
        return [Span(start, context, start, 0, first, floor, None, i + 1, table) for i, table in enumerate(tables)]

    def decode_rows(self, count: int, context: int, ahead: int = 0) -> list[DecodeRow]:
        """A step's rows; `ahead`: steps after the one at `context`."""
        depth, at = self.config.engram_max_ngram_size - 1, context - 1 + ahead
        ids = self.ids(context, count * (depth + 1)).reshape(count, depth + 1).tolist()
        tables = self.tables(count, context)
        return [DecodeRow(line[0], line[1:], at, i + 1, 0, 0, at, table) for i, (line, table) in enumerate(zip(ids, tables, strict=True))]

    def ids(self, seed: int, count: int) -> Ids:
        """Random token ids, none of an image, the same for the same arguments."""
        return np.random.default_rng(seed).integers(0, self.config.image_token_id or self.config.vocab_size, count)

    def decode_eager(self, count: int, context: int, record: dict[str, list[Tensor]] | None = None) -> Tensor:
        """The step at `context` kernel by kernel -> logits [count, vocab]."""
        rows, device = self.decode_rows(count, context), self.backbone.device
        tokens = torch.tensor([row.token for row in rows], device=device)
        lookback = torch.tensor([row.lookback for row in rows], dtype=torch.int64, device=device)
        logits = forward(self.runner, tokens, lookback, self.spans(count, context), record)
        assert logits is not None
        return logits

    def chunk(self, context: int, rows: int, decoder_rows: int = 0) -> Callable[[], Tensor | None]:
        """The prefill of the last `rows` tokens of a prompt of `context`, ready to run again and again."""
        tokens, lookback = history(self.ids(context, rows + self.config.engram_max_ngram_size - 1), self.config, self.backbone.device)
        spans = self.spans(1, context, rows, decoder_rows=decoder_rows)
        return lambda: forward(self.runner, tokens, lookback, spans)


def history(ids: Ids, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [n] and those before each, nearest first [n, max_ngram - 1], of n + max_ngram - 1 ids in a row."""
    window = torch.from_numpy(ids).unfold(0, config.engram_max_ngram_size, 1).flip(1).to(device)
    return window[:, 0].contiguous(), window[:, 1:].contiguous()


def forward(
    runner: Runner, tokens: Tensor, lookback: Tensor, spans: list[Span], record: dict[str, list[Tensor]] | None = None
) -> Tensor | None:  # fmt: skip
    """A forward pass kernel by kernel -> logits of the rows that run the decoder half, None if none does."""
    backbone = runner.backbone
    batch = backbone.Batch(tokens, lookback, spans, runner.memory, runner.layout.window, record=record)
    flow = backbone.encode(batch)
    chosen = batch.decoder_rows()
    return None if chosen is None else backbone.logits(backbone.decode(flow, chosen))


def chosen_experts(rig: Rig, count: int, context: int) -> tuple[list[int], float]:
    """Distinct routed experts of each layer, read from the router's indices in a pass kernel by kernel over the rows of the step; and how
    far the captured step's logits are from that pass's, as a share of their norm."""
    captured = rig.runner.step_of(count).run(rig.decode_rows(count, context)).float().clone()
    record: dict[str, list[Tensor]] = {}
    logits = rig.decode_eager(count, context, record)
    found = []
    for plan in rig.backbone.topology.layers:
        indices = torch.cat([part.flatten() for part in record[f"layer{plan.index}.router_indices"]]).unique()
        found.append(int((indices >= 0).sum()))
    return found, float((captured - logits).norm() / logits.norm())


def decode(rig: Rig, count: int, context: int, copy: float, samples: int) -> dict[str, Any]:
    """A decode step of `count` sequences of `context` tokens. copy: bytes/s, for the floor.

    device_s: of a replay, events between replays one behind the other. host_s: what the host does for a step, from the rows' integers to
    the launch, and never waits. alone_s: a step and the wait for it. ahead_s: a step while the host prepares the next one during it.
    """
    timer, step = rig.timer, rig.runner.step_of(count)
    for each in reversed(rig.steps_from(count, context, WARM)):
        step.run(each)  # in the end the rows whose experts are counted
    device = timer.each(step.replay, samples)
    steps = rig.steps_from(count, context, samples)
    host, alone = [], []
    for each in steps:
        timer.synchronize()
        began = timer.now()
        step.run(each)
        host.append(timer.now() - began)
        timer.synchronize()
        alone.append(timer.now() - began)
    began, before = timer.now(), timer.done()
    for each in steps:
        step.run(each)
        done = timer.done()
        before.synchronize()  # one step ahead, as the engine goes
        before = done
    timer.synchronize()
    ahead = (timer.now() - began) / samples
    experts, distance = chosen_experts(rig, count, context)
    parts = step_bytes(rig.config, [context] * count, experts)
    median, floor = statistics.median(device), sum(parts.values()) / copy
    return {
        "batch": count, "context": context, "device_s": median, "samples_s": device, "host_s": statistics.median(host),
        "alone_s": statistics.median(alone), "ahead_s": ahead, "exposed_s": max(0.0, ahead - median), "bytes": parts,
        "floor_s": floor, "fraction": floor / median, "experts": experts, "graph_distance": distance, "tokens_per_s": count / median,
    }  # fmt: skip


@contextmanager
def _marked(rig: Rig, layers: list[int]) -> Iterator[None]:
    """While this holds, every layer that runs is between two marks, and its number is added to `layers`."""
    inner = rig.backbone._layer

    def run(number: int, *args: Any, **more: Any) -> Any:
        rig.timer.mark()
        flow = inner(number, *args, **more)
        rig.timer.mark()
        layers.append(number)
        return flow

    rig.backbone._layer = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del rig.backbone._layer


def layer_kernels(rig: Rig, work: Callable[[], object]) -> tuple[dict[int, list[Kernel]], list[Kernel]]:
    """What the device does in each layer while `work` runs, and in all, without the marks.

    Raises:
        RuntimeError: the profiler does not see the marks.
    """
    names: set[str] = set()
    for _ in range(3):  # a profiler may miss what runs while it starts for the first time
        names = names or {kernel.name for kernel in rig.timer.kernels(rig.timer.mark)}
    layers: list[int] = []
    with _marked(rig, layers):
        kernels = rig.timer.kernels(work)
    parts: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if kernel.name in names:
            parts.append([])
        else:
            parts[-1].append(kernel)
    if len(names) != 1 or len(parts) != 2 * len(layers) + 1:
        raise RuntimeError(f"the profiler saw {len(parts) - 1} marks of {2 * len(layers)}, named {sorted(names)}")
    return dict(zip(layers, parts[1::2], strict=True)), [kernel for part in parts for kernel in part]


def by_name(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """The kernels that take the most time, together."""
    found = []
    for name, group in groupby(sorted(kernels, key=lambda k: k.name[:NAME]), key=lambda k: k.name[:NAME]):
        seconds = [kernel.seconds for kernel in group]
        found.append({"name": name, "count": len(seconds), "seconds": sum(seconds)})
    return sorted(found, key=lambda row: -row["seconds"])[:TOP]


def launches(rig: Rig, work: Callable[[], object]) -> dict[str, Any]:
    """Kernels and device time of `work` by layer, role and name. It is run once before, so that everything is compiled."""
    work()
    layers, kernels = layer_kernels(rig, work)
    plans = rig.backbone.topology.layers
    rows: list[dict[str, Any]] = []
    roles: dict[str, dict[str, Any]] = {}
    reuse, shown = list[Kernel](), ""
    for number, part in layers.items():
        seconds = sum(kernel.seconds for kernel in part)
        # In front of an Engram read a layer carries that read too; the last one of a half may do something for all of it.
        engram = number + 1 < len(plans) and plans[number + 1].engram
        ends = number + 1 in (rig.backbone.topology.cut, len(plans))
        role = plans[number].role + (" before engram" if engram else " at the end" if ends else "")
        copies = sum(kernel.copies for kernel in part)
        rows.append({"layer": number, "role": role, "kernels": len(part) - copies, "copies": copies, "seconds": seconds})
        entry = roles.setdefault(role, {"layers": 0, "kernels": [], "copies": 0, "seconds": 0.0})
        entry["layers"] += 1
        entry["kernels"] = sorted({*entry["kernels"], len(part) - copies})
        entry["copies"] = max(entry["copies"], copies)  # and fills, which a library may make before a product
        entry["seconds"] += seconds
        if plans[number].role == "reuse" and (not reuse or (role == "reuse" and shown != "reuse")):
            reuse, shown = part, role
    return {
        "kernels": len(kernels), "kernel_s": sum(kernel.seconds for kernel in kernels), "roles": roles, "layers": rows,
        "reuse": [{"name": kernel.name[:NAME], "seconds": kernel.seconds} for kernel in reuse], "names": by_name(kernels),
    }  # fmt: skip


def decode_launches(rig: Rig, count: int, context: int) -> dict[str, Any]:
    """`launches` of a decode step that is not replayed but launched kernel by kernel, exactly what its graph holds."""
    step = rig.runner.step_of(count)
    step.run(rig.decode_rows(count, context))
    kept = dict(vars(step))  # its results are tensors of the graph

    @torch.inference_mode()
    def work() -> None:
        step._forward()

    try:
        return {"work": "decode", "rows": count, "context": context, **launches(rig, work)}
    finally:
        vars(step).update(kept)


def prefill_launches(rig: Rig, context: int, rows: int) -> dict[str, Any]:
    """`launches` of the last chunk of a prompt, whose last window runs the decoder half too."""
    rows = min(rows, context)
    last = min(rows, rig.layout.window)
    return {"work": "prefill", "rows": rows, "context": context, **launches(rig, rig.chunk(context, rows, last))}
