"""The official checkpoint layout: which tensors there are, and reading them from sharded safetensors (spec/model.md §11).

Opening validates every header first and reports all faults in one `CheckpointError`; only then are values looked at.
Tensors are mapped, so nothing is read before it is used and the Engram tables cost no memory of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.model.config import ModelConfig
from forebay.model.engram_map import EngramTable, compress_vocabulary, hash_constants
from forebay.model.errors import CheckpointError
from forebay.model.names import (
    DRAFT_PREFIX,
    VISION_PREFIXES,
    TensorSpec,
    bytes_by_part,
    expected_tensors,
    optional_tensors,
    stored_as,
    vision_tensors,
)
from forebay.model.shards import DTYPES, Shard, damaged_values, stored_dtype, write_shards

__all__ = [
    "Checkpoint",
    "Progress",
    "RowReader",
    "TensorSpec",
    "Weights",
    "bytes_by_part",
    "expected_tensors",
    "optional_tensors",
    "write_checkpoint",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FAULT_KINDS = (  # in the order they are reported
    "damaged or missing files",
    "index and files disagree",
    "missing tensors",
    "wrong shapes",
    "wrong dtypes",
    "unknown tensors",
    "damaged values",
)
SHOWN_PER_KIND = 20
SAMPLE_BYTES = 4096

Progress = Callable[[int, int, str], None]


class Weights(Protocol):
    """What the network is built from: a `Checkpoint` on disk or a `SyntheticCheckpoint`."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def has_drafts(self) -> bool: ...
    @property
    def has_vision(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def tokenizer_path(self) -> Path: ...
    def tensor(self, name: str) -> Tensor: ...
    def engram_table(self, layer: int) -> RowReader: ...
    def token_map(self) -> Tensor: ...
    def parts(self) -> dict[str, int]: ...


class RowReader(Protocol):
    """An Engram table: `read(ids [n, columns] int64) -> [n, columns * width] bf16`."""

    def read(self, ids: Tensor) -> Tensor: ...


class Checkpoint:
    """A validated checkpoint folder.

    Attributes:
        path: the folder.
        config: its configuration.
        specs: every tensor the folder holds (backbone, then drafter, then vision) with shape, dtype and part.
        notes: sentences on what the folder lacks or holds unused, to be shown to the operator.
    """

    def __init__(
        self, path: Path, config: ModelConfig, shards: Mapping[str, Shard], specs: Mapping[str, TensorSpec], notes: tuple[str, ...]
    ) -> None:
        self.path = path
        self.config = config
        self.specs = specs
        self.notes = notes
        self._shards = shards  # tensor name -> its file

    @classmethod
    def open(cls, path: str | Path, *, scan: bool = True, progress: Progress | None = None) -> Checkpoint:
        """Validate a folder's headers against its config and, with `scan`, its values; nothing else is read.

        Args:
            scan: read every tensor once (of the Engram tables a sample) and refuse NaN and infinities.
            progress: called with (bytes read, bytes to read, tensor name) before each tensor and once at the end.

        Raises:
            ConfigError: `config.json` is missing or describes another architecture.
            CheckpointError: all missing, extra, misshapen tensors and damaged files, in one message.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: a checkpoint is a folder with config.json and safetensors files")
        config = ModelConfig.load(folder)
        hash_constants(config)
        faults = _Faults()
        found = _collect(folder, faults)
        specs, notes = _match(config, found, faults)
        faults.raise_any(folder)
        checkpoint = cls(folder, config, {name: found.shards[name] for name in specs}, specs, notes)
        if scan:
            checkpoint.scan(progress)
        return checkpoint

    def tensor(self, name: str) -> Tensor:
        """A mapped read-only view: BF16 and F32 as themselves, F8_E4M3, F8_E8M0 and packed I8 as uint8 bytes.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        return self._shard(name).tensor(name)

    def engram_table(self, layer: int) -> EngramTable:
        """The n-gram table of an Engram layer, rows read from the mapped file when asked for."""
        names = [f"layers.{layer}.engram.embed.{kind}" for kind in ("weight", "scale")]
        for name in names:
            self._shard(name).expect_random_access(name)
        return EngramTable(self.tensor(names[0]), self.tensor(names[1]), name=names[0])

    def token_map(self) -> Tensor:
        """Token id -> Engram class, [vocab] int32, derived from the folder's tokenizer (spec §9.1)."""
        return compress_vocabulary(self.tokenizer_path, self.config)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def has_drafts(self) -> bool:
        """Whether the folder holds the draft stages its configuration names."""
        return any(spec.part == "drafter" for spec in self.specs.values())

    @property
    def has_vision(self) -> bool:
        return any(spec.part == "vision" for spec in self.specs.values())

    @property
    def total_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def parts(self) -> dict[str, int]:
        return bytes_by_part(self.specs)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over config, tokenizer, and of every tensor name, dtype, shape, first and last 4 KiB.

        Does not depend on how the tensors are spread over files. A change in the middle of a large tensor that leaves
        both its ends alone is not seen: the work is bounded by the number of tensors.
        """
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        digest.update(hashlib.sha256(self.tokenizer_path.read_bytes()).digest() if self.tokenizer_path.exists() else b"no tokenizer")
        for name in sorted(self.specs):
            spec, raw = self.specs[name], self._shards[name].raw(name)
            digest.update(f"{name} {spec.dtype} {spec.shape}".encode())
            digest.update(raw[:SAMPLE_BYTES].numpy().tobytes())
            digest.update(raw[max(SAMPLE_BYTES, raw.numel() - SAMPLE_BYTES) :].numpy().tobytes())
        return digest.hexdigest()

    def scan(self, progress: Progress | None = None) -> None:
        """Read all values once, in file order, and refuse NaN and infinities (of the Engram tables: a sample).

        Raises:
            CheckpointError: naming file, tensor and element of each damaged tensor.
        """
        faults = _Faults()
        total, done = self.total_bytes, 0
        for shard, name in self._in_file_order():
            entry = shard.entries[name]
            sample = self.specs[name].part == "engram tables"
            if progress:
                progress(done, total, name)
            for bad in damaged_values(entry, shard.raw(name), sample=sample):
                if bad is not None:
                    where = f"not a finite number at element {bad} of {list(entry.shape)}"
                    faults.add("damaged values", f"{name} in {shard.path.name}: {where}")
                    break
            done += entry.nbytes
        faults.raise_any(self.path)
        if progress:
            progress(total, total, "")

    def _in_file_order(self) -> Iterator[tuple[Shard, str]]:
        for shard in dict.fromkeys(self._shards.values()):
            for name in shard.entries:
                if name in self.specs:
                    yield shard, name

    def _shard(self, name: str) -> Shard:
        try:
            return self._shards[name]
        except KeyError:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}") from None


class _Faults:
    """Everything wrong with a checkpoint, by kind, for one error message."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[str]] = {kind: [] for kind in FAULT_KINDS}

    def add(self, kind: str, line: str) -> None:
        self.kinds[kind].append(line)

    def raise_any(self, folder: Path) -> None:
        kinds = {kind: found for kind, found in self.kinds.items() if found}
        if not kinds:
            return
        lines = [f"{folder} cannot be served: " + ", ".join(f"{kind} ({len(found)})" for kind, found in kinds.items())]
        for kind, found in kinds.items():
            lines.append(f"{kind}:")
            lines += [f"  {line}" for line in found[:SHOWN_PER_KIND]]
            if len(found) > SHOWN_PER_KIND:
                lines.append(f"  … and {len(found) - SHOWN_PER_KIND} more")
        raise CheckpointError("\n".join(lines))


@dataclass(frozen=True)
class _Inventory:
    """What the files hold. `accounted` are names already covered by a reported fault, so that none is reported twice."""

    shards: dict[str, Shard]
    accounted: set[str]
    blind: bool


def _collect(folder: Path, faults: _Faults) -> _Inventory:
    """Open the headers of all files and hold them against the index."""
    weight_map: dict[str, str] = {}
    indexed = (folder / INDEX_NAME).exists()
    if indexed:
        weight_map = _read_index(folder / INDEX_NAME)
    elif not (folder / SINGLE_NAME).exists():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
        hint = f" (only {', '.join(others[:3])})" if others else ""
        raise CheckpointError(f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}{hint}")
    found = _Inventory({}, set(), blind=False)
    unreadable = set()
    for file in sorted(set(weight_map.values())) if indexed else [SINGLE_NAME]:
        try:
            shard = Shard(folder / file)
        except CheckpointError as error:
            unreadable.add(file)
            holds = sum(f == file for f in weight_map.values())
            faults.add("damaged or missing files", error.message + (f" (the index puts {holds} tensors there)" if indexed else ""))
            continue
        for name in shard.entries:
            if indexed and weight_map.get(name) != file:
                says = f"puts it in {weight_map[name]}" if name in weight_map else "does not list it"
                faults.add("index and files disagree", f"{name} is in {file}, the index {says}")
                found.accounted.add(name)
            found.shards.setdefault(name, shard)
    for name, file in weight_map.items():
        if file in unreadable:
            found.accounted.add(name)
        elif name not in found.shards:
            faults.add("index and files disagree", f"{name} is not in {file}, where the index puts it")
            found.accounted.add(name)
    return _Inventory(found.shards, found.accounted, blind=bool(unreadable) and not indexed)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a tensor index with a weight_map: {type(error).__name__}: {error}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object of tensor names and file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} is mapped to {file!r}, which is not the name of a safetensors file in the folder")
    return weight_map


def _match(config: ModelConfig, found: _Inventory, faults: _Faults) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """Hold the tensors found against the names table; returns the specs of what is there, and notes for the operator."""
    notes = []
    wanted = expected_tensors(config)
    drafts = optional_tensors(config)
    if any(name.startswith(DRAFT_PREFIX) for name in found.shards):
        if drafts:
            wanted |= drafts
        else:
            notes.append("mtp.* tensors are present but num_nextn_predict_layers is 0: they are not used")
    elif drafts:
        notes.append(f"the checkpoint lacks its {config.num_nextn_predict_layers} draft stages (mtp.*): it is served without drafting")
    vision = vision_tensors(config)
    if any(name.startswith(VISION_PREFIXES) for name in found.shards):
        if vision:
            wanted |= vision
        else:
            notes.append("vision tensors are present but the configuration has no vision_config: they are not used")
    elif vision:
        notes.append("the checkpoint lacks its vision tower (vision.*, aligner.*): it is served for text only")

    specs: dict[str, TensorSpec] = {}
    for name, spec in wanted.items():
        shard = found.shards.get(name)
        if shard is None:
            if name not in found.accounted and not found.blind:
                faults.add("missing tensors", f"{name} ({spec.part}): {spec.dtype} {list(spec.shape)}")
            continue
        entry = shard.entries[name]
        spec = stored_as(name, spec, entry.shape)
        if entry.shape != spec.shape:
            faults.add("wrong shapes", f"{name} in {shard.path.name}: {list(entry.shape)}, the configuration needs {list(spec.shape)}")
        if entry.dtype != spec.dtype:
            faults.add("wrong dtypes", f"{name} in {shard.path.name}: {entry.dtype}, expected {spec.dtype}")
        specs[name] = spec
    for name, shard in found.shards.items():
        if name in wanted:
            continue
        entry = shard.entries[name]
        tolerated = name.startswith((*(() if vision else VISION_PREFIXES), *(() if drafts else (DRAFT_PREFIX,))))
        if not tolerated:
            faults.add("unknown tensors", f"{name} in {shard.path.name}: {entry.dtype} {list(entry.shape)}")
        elif entry.dtype not in DTYPES:
            faults.add("wrong dtypes", f"{name} in {shard.path.name}: {entry.dtype}, known are {', '.join(DTYPES)}")
    return specs, tuple(notes)


def write_checkpoint(path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], max_shard_bytes: int = 5 << 30) -> None:
    """Write the official layout into an existing folder: `config.json`, numbered shards, their index.

    Args:
        config: the nested Hugging Face dictionary.
        tensors: by official name. uint8 tensors get the stored dtype of the names table (F8_E4M3, F8_E8M0 or I8); the
            torch types float8_e4m3fn, float8_e8m0fnu, int8, bfloat16 and float32 keep their own.

    Raises:
        CheckpointError: a tensor has a dtype the format does not know, or is uint8 under a name the table does not know.
    """
    folder = Path(path)
    parsed = ModelConfig.from_dict(dict(config))
    table = expected_tensors(parsed) | optional_tensors(parsed)
    stored: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        dtype = stored_dtype(tensor) or (table[name].dtype if name in table and tensor.dtype == torch.uint8 else None)
        if dtype is None:
            raise CheckpointError(f"{name}: {tensor.dtype} cannot be stored")
        stored[name] = (dtype, tensor)
    write_shards(folder, stored, max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
