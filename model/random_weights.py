"""Random weights in the stored formats: the encoders from fp32 to FP8 and MXFP4, and tensors for a network that says noise.

Every byte is the same on every machine: numbers come from the raw PCG64 stream (numpy promises that one, not its
distributions) and pass only through integer arithmetic, IEEE additions, multiplications and divisions, and powers of two.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.model.config import QUANT_GROUP, ModelConfig
from forebay.model.names import expected_tensors, vision_tensors

# Deviation and mean of the plain tensors by the end of their name; all others get deviation 1/sqrt(columns).
_PLAIN: tuple[tuple[str, float, float], ...] = (
    ("norm.weight", 0.05, 1.0),
    ("norm1.weight", 0.05, 1.0),
    ("norm2.weight", 0.05, 1.0),
    ("embed.weight", 1.0, 0.0),
    ("_base", 0.5, 0.0),
    ("_scale", 0.1, 0.5),
    ("attn_sink", 0.5, 0.0),
    ("gate.bias", 0.02, 0.0),
    ("gate.bias_vl", 0.02, 0.0),
    (".bias", 0.02, 0.0),
    ("image_start", 1.0, 0.0),  # as embeddings
    ("image_newline", 1.0, 0.0),
    ("image_end", 1.0, 0.0),
    ("q_weight", 0.1, 1.0),
    ("k_weight", 0.1, 1.0),
)
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def random_tensors(config: ModelConfig, seed: int, *, silent_ids: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """All tensors of a backbone, and of the vision half if the configuration has one, in stored formats (8-bit ones as uint8).

    They are scaled so that activations keep their size. The output rows of `silent_ids` are zero: greedy decoding never picks them, so no
    text ends before its limit.
    """
    tensors: dict[str, Tensor] = {}
    for name, spec in (expected_tensors(config) | vision_tensors(config)).items():
        if name.endswith(".scale"):
            continue
        if spec.dtype in ("BF16", "F32"):
            values = _values(name, spec.shape, seed)
            if name == "head.weight":
                values[list(silent_ids)] = 0
            tensors[name] = torch.from_numpy(values).to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
            continue
        scale = name.removesuffix(".weight") + ".scale"
        if spec.dtype == "I8":
            tensors[name], tensors[scale] = encode_mxfp4(_values(name, (spec.shape[0], 2 * spec.shape[1]), seed))
        elif spec.part == "engram tables":
            tensors[name], tensors[scale] = encode_fp8(_values(name, spec.shape, seed), tile_rows=1)
        else:
            tensors[name], tensors[scale] = encode_fp8(_values(name, spec.shape, seed), tile_rows=QUANT_GROUP)
    return tensors


def encode_fp8(values: NDArray[np.float32], *, tile_rows: int) -> tuple[Tensor, Tensor]:
    """fp32 [rows, columns] -> E4M3 bytes [rows, columns] and E8M0 bytes [tiles of `tile_rows`, tiles of 32 columns]."""
    rows, columns = values.shape
    padded = np.pad(values, ((0, -rows % tile_rows), (0, -columns % QUANT_GROUP)))
    tiles = padded.reshape(padded.shape[0] // tile_rows, tile_rows, padded.shape[1] // QUANT_GROUP, QUANT_GROUP)
    powers = _power_at_least(np.abs(tiles).max(axis=(1, 3)) / np.float32(448))
    scaled = np.ldexp(tiles, -powers[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    codes = torch.from_numpy(np.ascontiguousarray(scaled)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.from_numpy((powers + 127).astype(np.uint8))


def encode_mxfp4(values: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """fp32 [rows, columns] -> E2M1 pairs [rows, columns / 2], even column in the low nibble, and E8M0 bytes per 32 columns."""
    rows, columns = values.shape
    groups = values.reshape(rows, columns // QUANT_GROUP, QUANT_GROUP)
    powers = _power_at_least(np.abs(groups).max(axis=2) / np.float32(6))
    codes = e2m1_codes(np.ldexp(groups, -powers[:, :, None]).reshape(rows, columns))
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), torch.from_numpy((powers + 127).astype(np.uint8))


def e2m1_codes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest of ±0 .5 1 1.5 2 3 4 6, as a 4-bit code with the sign in bit 3."""
    size = np.abs(values)
    codes = np.where(values < 0, np.uint8(8), np.uint8(0))
    for edge, upwards in _E2M1_STEPS:  # a tie goes to the even code
        codes += (size >= edge) if upwards else (size > edge)
    return codes


def _power_at_least(numbers: NDArray[np.float32]) -> NDArray[np.int32]:
    """ceil(log2(x)) from the exponent, for positive normal numbers."""
    fraction, exponent = np.frexp(numbers)
    return np.asarray(exponent - (fraction == 0.5), dtype=np.int32)


def deviation_and_mean(name: str, columns: int) -> tuple[float, float]:
    """How the numbers of a tensor are spread (before quantisation), by its official name and number of columns."""
    if name == "head.weight":
        return float(1.5 / np.sqrt(np.float64(columns))), 0.0  # logits of deviation 1.5
    for end, deviation, mean in _PLAIN:
        if name.endswith(end):
            return deviation, mean
    return float(1 / np.sqrt(np.float64(columns))), 0.0


def normal_numbers(key: str, count: int, seed: int) -> NDArray[np.float32]:
    """Nearly normal numbers of deviation 1: sums of four 16-bit integers, exact up to the last multiplication."""
    words = np.random.PCG64([seed, zlib.crc32(key.encode())]).random_raw(count)
    quarters = np.asarray(words).astype("<u8").view("<u2").reshape(-1, 4)
    total = quarters.sum(axis=1, dtype=np.int32) - 2 * 65535
    return np.asarray(total.astype(np.float32) * np.float32(1 / 37837.2), dtype=np.float32)


def _values(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    deviation, mean = deviation_and_mean(name, shape[-1])
    numbers = normal_numbers(name, int(np.prod(shape)), seed) * np.float32(deviation) + np.float32(mean)
    return numbers.reshape(shape)


def special_ids(tokenizer: Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids of the added tokens of a `tokenizer.json` that the network can produce."""
    added = json.loads(tokenizer.read_text("utf-8"))["added_tokens"]
    return tuple(token["id"] for token in added if token["id"] < config.vocab_size)
