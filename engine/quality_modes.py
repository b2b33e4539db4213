"""Ways to run one network whose answers are compared: what is bounded, how KV is kept, and which entries a row attends to.

Those that change what is kept or chosen are memories (`model/memory.py`) that stand in for the served one, over the same block tables.
They do without what the measurement does not use: windows are neither snapshotted nor saved for a preempted sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from forebay.engine.llm import LLM
from forebay.engine.types import EngineError, PrefillMode
from forebay.model.batch import HalfState
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.indexer import Indexer
from forebay.model.memory import CacheMemory, Memory, Window
from forebay.model.ops import formats
from forebay.model.ops.gather import entry_places
from forebay.model.ops.rope import Turn

SHUFFLE_BYTES = 64 << 20  # working memory of one tile of random numbers
BOUNDARIES = (1, 4, 16, 64)  # bounded replays behind an answer


@dataclass(frozen=True)
class Mode:
    """One way to run.

    Attributes:
        name, says: for tables and for people.
        prefill: whether the decoder half runs over the last window of a prompt or over all of it.
        boundaries: block boundaries at which a prompt is resumed by bounded replay before its answer begins.
        memory: makes the memory that stands in for the served one; None for that itself.
    """

    name: str
    says: str
    prefill: PrefillMode = "bounded"
    boundaries: int = 0
    memory: Callable[[CacheMemory, ModelConfig], Memory] | None = None


class WindowOnlyMemory(CacheMemory):
    """Nothing global is attended to: every layer sees its window and no more."""

    def choose(self, indexer: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        """[n, 1], all -1."""
        return torch.full((state.rows.rows, 1), -1, dtype=torch.int64, device=x.device)


class ShuffledMemory(CacheMemory):
    """The indexer is not asked: as many entries as it would choose are drawn from the visible ones, the same for a position every time."""

    def choose(self, indexer: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        """[n, topk] int64 ascending, -1 filled."""
        topk, positions = indexer.topk, state.rows.positions
        visible = (positions + 1) // indexer.ratio
        ramp = torch.arange(topk, device=x.device)
        chosen = torch.where(ramp < visible.unsqueeze(1), ramp, -1)
        crowded = (visible > topk).nonzero().flatten()
        if crowded.numel() == 0:
            return chosen
        entries = torch.arange(int(visible.max()), device=x.device)
        step = max(1, SHUFFLE_BYTES // (8 * entries.numel()))
        for first in range(0, crowded.numel(), step):
            rows = crowded[first : first + step]
            draws = _hash(positions[rows].unsqueeze(1), entries, indexer.layer)
            draws.masked_fill_(entries >= visible[rows].unsqueeze(1), -1)
            chosen[rows] = draws.topk(topk).indices.sort(-1).values
        return chosen


class EveryEntryMemory(CacheMemory):
    """Every visible entry is attended to, as with an `index_topk` that nothing exceeds."""

    def choose(self, indexer: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        """[n, most visible] int64 ascending, -1 filled."""
        visible = (state.rows.positions + 1) // indexer.ratio
        ramp = torch.arange(max(1, int(visible.max())), device=x.device)
        return torch.where(ramp < visible.unsqueeze(1), ramp, -1)


@dataclass(frozen=True)
class WideMemory(CacheMemory):
    """Entries, index keys and windows in bf16, at the addresses where the served memory has FP4 and FP8.

    Attributes:
        main: source layer -> [blocks, entries per block, head_dim] bf16; `index` the same with the index dim.
        ring: [slots, layers, window, head_dim] bf16.
        rounds: quantise before keeping; everything read is then what the served memory gives, bit for bit.
    """

    main: Mapping[int, Tensor]
    index: Mapping[int, Tensor]
    ring: Tensor
    rounds: bool

    def window(self, layer: int, kv: Tensor, state: HalfState) -> Window:
        fresh = (formats.fp8_round(kv) if self.rounds else kv).to(torch.bfloat16)
        ring = self.ring[state.rows.slots, layer].flatten(0, 1)
        return Window(torch.cat((ring, fresh, fresh.new_zeros((1, kv.shape[1])))).float(), (fresh,))

    def keep_window(self, layer: int, window: Window, state: HalfState) -> None:
        rows, (values,) = state.rows, window.rows
        kept = values if rows.keep is None else values.index_select(0, rows.keep)
        self.ring[:, layer].index_put_((rows.keep_slots, rows.keep_places), kept)

    def store_entries(self, plan: LayerPlan, main: Tensor, key: Tensor, sequence: Tensor, entries: Tensor, state: HalfState) -> None:
        if self.rounds:
            main, key = formats.main_decode(*formats.main_encode(main)), formats.index_decode(*formats.index_encode(key))
        per_block = self.block_tokens // plan.ratio
        block, place = state.tables[sequence, entries // per_block], entries % per_block
        self.main[plan.index][block, place] = main.to(torch.bfloat16)
        self.index[plan.index][block, place] = key.to(torch.bfloat16)

    def index_keys(self, source: int, ratio: int, sequence: Tensor, entries: Tensor, state: HalfState) -> Tensor:
        return self.index[source][entry_places(state.tables, sequence, entries, self.block_tokens // ratio)].float()

    def main_entries(self, source: int, ratio: int, sequence: Tensor, entries: Tensor, state: HalfState) -> Tensor:
        return self.main[source][entry_places(state.tables, sequence, entries, self.block_tokens // ratio)].float()


def wide_memory(served: CacheMemory, config: ModelConfig, *, rounds: bool = False) -> WideMemory:
    """An empty wide memory beside `served`."""
    codes = served.window_codes
    planes = {layer: source.main_codes for layer, source in served.sources.items()}

    def zeros(dim: int) -> dict[int, Tensor]:
        return {n: torch.zeros((*p.shape[:2], dim), dtype=torch.bfloat16, device=codes.device) for n, p in planes.items()}

    ring = torch.zeros(codes.shape, dtype=torch.bfloat16, device=codes.device)
    return WideMemory(**_parts(served), main=zeros(config.head_dim), index=zeros(config.index_head_dim), ring=ring, rounds=rounds)


EXACT = Mode("exact", "both halves of the network run over the whole prompt", prefill="exact")
BOUNDED = Mode("bounded decoder", "the default: the decoder half runs over the last window of a prompt")
REPLAYED = tuple(
    Mode(f"bounded encoder {k}", f"the default, resumed by bounded replay at {k} {'boundary' if k == 1 else 'boundaries'}", boundaries=k)
    for k in BOUNDARIES
)
WIDE = Mode("bf16 KV", "the default with entries, index keys and windows in bf16", memory=wide_memory)
DENSE = Mode("dense", "the default with every visible entry attended to", memory=lambda served, _: EveryEntryMemory(**_parts(served)))
WINDOW_ONLY = Mode("window only", "the default without global attention", memory=lambda served, _: WindowOnlyMemory(**_parts(served)))
SHUFFLED = Mode("shuffled", "the default with random entries selected", memory=lambda served, _: ShuffledMemory(**_parts(served)))
MODES = (EXACT, BOUNDED, *REPLAYED, WIDE, DENSE, WINDOW_ONLY, SHUFFLED)


@contextmanager
def running(llm: LLM, mode: Mode) -> Iterator[None]:
    """Let `llm`, which must be idle and have its own memory, run in `mode`. What is cached before and in it is forgotten.

    Raises:
        EngineError: it is busy, or the memory of another mode stands in for its own; it runs GPU kernels, which no other memory changes.
    """
    runner, manager = llm.engine.runner, llm.engine.manager
    served = runner.memory
    if llm.engine.busy or type(served) is not CacheMemory:  # the memories of modes derive from it
        raise EngineError("the mode of an engine can be changed only while it is idle, and not twice")
    if mode.memory is not None and runner.kernels:
        raise EngineError(f"GPU kernels do not run in the mode {mode.name!r}; torch operations do: open the model with kernels=False")
    manager.clear()
    if mode.memory is not None:
        runner.memory = mode.memory(served, runner.backbone.config)
    try:
        yield
    finally:
        runner.memory = served
        manager.clear()


def _parts(served: CacheMemory) -> dict[str, Any]:
    return {part.name: getattr(served, part.name) for part in fields(CacheMemory)}


def _hash(positions: Tensor, entries: Tensor, layer: int) -> Tensor:
    """Numbers below 2^32 that look random, [n, m] int64, for positions [n, 1] and entries [m]."""
    mask = 0xFFFFFFFF
    value = (positions * 0x85EBCA77 + entries * 0x9E3779B1 + layer * 0xC2B2AE3D) & mask
    value = ((value ^ (value >> 15)) * 0x2C1B3C6D) & mask
    value = ((value ^ (value >> 12)) * 0x297A2D39) & mask
    return value ^ (value >> 15)
