"""What a model needs and what fits: bytes per part, KV per token, tokens that fit. Reads headers only, never weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.cache.layout import KVLayout
from forebay.model.checkpoint import Checkpoint
from forebay.model.errors import CheckpointError, ConfigError
from forebay.model.names import TensorSpec, bytes_by_part, expected_tensors, optional_tensors, vision_tensors
from forebay.model.source import resolve

TABLES = "engram tables"  # the part that stays mapped: a token touches a few rows of it
UNUSED = ("drafter",)  # parts a checkpoint may hold and this engine does not load yet

SYNTHETIC_NOTES = (
    "a synthetic model has no vision tower",
    "its weights are drawn from one small pool of random numbers, so it can be served in much less memory than a checkpoint of this size",
)


@dataclass(frozen=True)
class Machine:
    """This machine, in bytes. `memory_free` is what programs can take without swapping; `disk_free` is beside the model or the cache."""

    cores: int
    memory: int
    memory_free: int
    disk_free: int

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """The machine we run on; `folder` says which disk to look at (its nearest existing parent counts)."""
        while not folder.exists():
            folder = folder.parent
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        return cls(len(os.sched_getaffinity(0)), total, free, shutil.disk_usage(folder).free)


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, lengths in tokens.

    Attributes:
        parts: stored bytes of each part of the network.
        weights: bytes that must be in memory: all parts but the Engram tables and what is not used yet.
        tables: bytes of the Engram tables, mapped from disk; only the rows a token needs are read.
        bytes_per_token: global KV of one token.
        bytes_per_sequence: window KV and open compressor groups of one running sequence, whatever its length.
        sequences: running sequences the plan makes room for.
        memory: memory planned with; on a GPU that of the device.
        tokens: tokens of global KV that fit beside weights and sequences; 0 if those alone do not fit.
        short: bytes lacking for weights, work space and sequences; 0 if they fit.
        faults: why the checkpoint cannot be served (missing, extra and misshapen tensors), or None.
        notes: what the checkpoint lacks or holds unused.
    """

    model: str
    name: str
    kind: str
    path: str | None
    tensors: int
    parts: dict[str, int]
    weights: int
    tables: int
    bytes_per_token: int | float
    block_tokens: int
    block_bytes: int
    window_bytes: int
    bytes_per_sequence: int
    max_context: int
    sequences: int
    work_bytes: int
    memory: int
    tokens: int
    short: int
    machine: Machine
    faults: str | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.short and self.tokens > 0


def plan(model: str, *, memory: int | None = None, sequences: int = 64, work_bytes: int = 0) -> Plan:
    """Plan a model without loading it.

    Args:
        model: demo, a checkpoint folder, or synthetic:v41-flash[,experts=N].
        memory: bytes to plan with; None takes what this machine has free.
        sequences: running sequences to make room for.
        work_bytes: memory the engine takes beside weights and KV (its cache of dequantised weights).

    Raises:
        ConfigError: no such model, or its configuration is of another architecture.
    """
    source = resolve(model)
    config = source.config
    specs: Mapping[str, TensorSpec] = expected_tensors(config) | optional_tensors(config)
    if source.path is not None:
        specs = {**specs, **vision_tensors(config)}
    faults: str | None = None
    notes: tuple[str, ...] = SYNTHETIC_NOTES if source.kind == "synthetic" else ()
    if source.path is not None:
        try:
            checkpoint = Checkpoint.open(source.path, scan=False)
        except CheckpointError as error:
            faults = error.message
        else:
            specs, notes = checkpoint.specs, checkpoint.notes
    parts = bytes_by_part(specs)
    layout = KVLayout.of(config)
    tables = parts.get(TABLES, 0)
    weights = sum(size for part, size in parts.items() if part != TABLES and part not in UNUSED)
    machine = Machine.here(source.path or Path.cwd())
    memory = machine.memory_free if memory is None else memory
    per_sequence = layout.window_bytes + layout.pending_bytes
    left = memory - weights - work_bytes - sequences * per_sequence
    return Plan(
        model=model,
        name=source.name,
        kind=source.kind,
        path=str(source.path) if source.path is not None else None,
        tensors=len(specs),
        parts=parts,
        weights=weights,
        tables=tables,
        bytes_per_token=layout.bytes_per_token,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        window_bytes=layout.window_bytes,
        bytes_per_sequence=per_sequence,
        max_context=config.max_position_embeddings,
        sequences=sequences,
        work_bytes=work_bytes,
        memory=memory,
        tokens=max(left, 0) // layout.block_bytes * layout.block_tokens,
        short=max(-left, 0),
        machine=machine,
        faults=faults,
        notes=notes,
    )


def kv_tokens_in(model: str, kv_bytes: int) -> int:
    """Tokens of global KV of `model` that `kv_bytes` hold, in whole blocks.

    Raises:
        ConfigError: no such model, or not even one block fits.
    """
    layout = KVLayout.of(resolve(model).config)
    if kv_bytes < layout.block_bytes:
        raise ConfigError(f"cache.kv_bytes is {kv_bytes}, one block of this model takes {layout.block_bytes}", param="cache.kv_bytes")
    return kv_bytes // layout.block_bytes * layout.block_tokens


def tokenizer_file(model: str) -> Path:
    """The `tokenizer.json` of a model, by its `--model` value.

    Raises:
        ConfigError: there is no such model, or it is a synthetic one, which is not a folder.
    """
    folder = resolve(model).path
    if folder is None:
        raise ConfigError(f"{model} has no tokenizer of its own", param="model")
    return folder / "tokenizer.json"
