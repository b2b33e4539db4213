"""Safetensors files: header in, mapped tensors out, and a writer for the same layout.

A file is 8 bytes of little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}` and the payload.
The header is parsed here, not by a library, so that every fault of a damaged file can be named before anything is
mapped: the payload must be covered exactly by the tensors, without holes, overlaps or bytes past the end.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forebay.model.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library

# Stored dtype -> (bytes per element, torch dtype of the view). The 8-bit formats come out as raw bytes: torch's float8
# types convert numerically on the slightest touch, and E8M0 bytes must never be converted (spec/model.md §8).
DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "F8_E4M3": (1, torch.uint8),
    "F8_E8M0": (1, torch.uint8),
    "I8": (1, torch.uint8),
    "BF16": (2, torch.bfloat16),
    "F32": (4, torch.float32),
}
_STORED_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: absolute byte range [start, stop) of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Shard:
    """One safetensors file. The header is read and checked at once, the payload mapped when first used.

    Attributes:
        path: the file.
        entries: its tensors by name, in file order.

    Raises:
        CheckpointError: the file cannot be read, its header is damaged, or its size is not what the header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header(path)

    @cached_property
    def _map(self) -> mmap.mmap:
        # A shared read-only mapping: unlike a private writable one it is not counted as committed memory, so a 100 GB
        # Engram table maps on any machine.
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def _bytes(self) -> Tensor:  # [file size] uint8
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=torch.uint8)

    def raw(self, name: str) -> Tensor:
        """The stored bytes of a tensor, mapped: [nbytes] uint8, read-only (writing to it ends the process)."""
        entry = self.entries[name]
        return self._bytes[entry.start : entry.stop]

    def tensor(self, name: str) -> Tensor:
        """The tensor as a mapped read-only view, dtype by `DTYPES`; copied only if the file stores it misaligned."""
        entry = self.entries[name]
        size, dtype = DTYPES[entry.dtype]
        raw = self.raw(name)
        if entry.start % size:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def expect_random_access(self, name: str) -> None:
        """Tell the kernel that single rows of this tensor will be read, so that it does not read ahead around each."""
        entry = self.entries[name]
        start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        if entry.nbytes and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM, start, entry.stop - start)


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path.name}: {size} bytes, too short for a safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path.name}: corrupt header, its length field says {length} bytes (limit {MAX_HEADER_BYTES})")
            if 8 + length > size:
                raise CheckpointError(f"{path.name}: truncated, the header needs {8 + length} bytes and the file has {size}")
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: corrupt header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: corrupt header: not a JSON object")
    header.pop("__metadata__", None)
    entries = sorted((_entry(path, name, value, 8 + length) for name, value in header.items()), key=lambda e: (e.start, e.stop))
    position = 8 + length
    for entry in entries:
        if entry.start != position:
            raise CheckpointError(f"{path.name}: corrupt header: {entry.name} begins at byte {entry.start}, expected {position}")
        position = entry.stop
    if position > size:
        first = next(e for e in entries if e.stop > size)
        sizes = f"the header describes {position} bytes and the file has {size}"
        raise CheckpointError(f"{path.name}: truncated, {sizes}; first tensor cut off: {first.name}")
    if position < size:
        raise CheckpointError(f"{path.name}: the file has {size} bytes, its header describes only {position}")
    return {entry.name: entry for entry in entries}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(path: Path, name: str, value: Any, base: int) -> TensorEntry:
    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)

    if (
        not isinstance(value, dict)
        or not isinstance(value.get("dtype"), str)
        or not whole(value.get("shape"))
        or not whole(value.get("data_offsets"))
    ):
        raise CheckpointError(f"{path.name}: corrupt header: {name} lacks a valid dtype, shape or data_offsets")
    if len(value["data_offsets"]) != 2 or value["data_offsets"][0] > value["data_offsets"][1]:
        raise CheckpointError(f"{path.name}: corrupt header: {name} has data_offsets {value['data_offsets']}")
    start, stop = value["data_offsets"]
    dtype, shape = value["dtype"], tuple(value["shape"])
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype][0]:
        raise CheckpointError(f"{path.name}: corrupt header: {name} is {dtype} {list(shape)} but has {stop - start} bytes")
    return TensorEntry(name, dtype, shape, base + start, base + stop)


def stored_dtype(tensor: Tensor) -> str | None:
    """The safetensors name of a tensor's dtype; None for uint8, which may be any of the 8-bit formats."""
    return _STORED_NAMES.get(tensor.dtype)


def write_shards(folder: Path, tensors: Mapping[str, tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write `{name: (stored dtype, tensor)}` as `model-0000i-of-0000n.safetensors` and their index, names in given order.

    Bytes depend on the arguments alone. Within a file tensors are ordered by element size, largest first, so that all of
    them are aligned.
    """
    groups: list[dict[str, tuple[str, Tensor]]] = [{}]
    filled = 0
    for name, (dtype, tensor) in tensors.items():
        size = tensor.numel() * DTYPES[dtype][0]
        if filled and filled + size > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, tensor)
        filled += size
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_file(folder / file, group)
        weight_map.update(dict.fromkeys(group, file))
    total = sum(t.numel() * DTYPES[d][0] for d, t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _write_file(path: Path, tensors: Mapping[str, tuple[str, Tensor]]) -> None:
    ordered = sorted(tensors.items(), key=lambda item: -DTYPES[item[1][0]][0])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, tensor) in ordered:
        stop = position + tensor.numel() * DTYPES[dtype][0]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (_, tensor) in ordered:
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def damaged_values(entry: TensorEntry, raw: Tensor, *, sample: bool) -> Iterator[int | None]:
    """Walk the bytes of a tensor ([nbytes] uint8) in chunks; yields None per sound chunk, the element's index at a NaN or infinity.

    With `sample`, 64 evenly spaced chunks of 64 KiB of a larger tensor are read instead of all of it.
    """
    chunk = 1 << 24
    starts = range(0, entry.nbytes, chunk)
    if sample and entry.nbytes > 64 << 20:
        chunk = 1 << 16
        step = (entry.nbytes - chunk) // 63 // 64 * 64
        starts = range(0, step * 64, step)
    size = DTYPES[entry.dtype][0]
    for start in starts:
        piece = raw[start : start + chunk]
        if entry.dtype == "F8_E4M3":
            bad = (piece & 0x7F) == 0x7F
        elif entry.dtype == "F8_E8M0":
            bad = piece == 0xFF
        elif entry.dtype == "I8":
            yield None
            continue
        else:
            aligned = piece if (entry.start % size) == 0 else piece.clone()
            bad = ~torch.isfinite(aligned.view(DTYPES[entry.dtype][1]))
        yield start // size + int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else None
