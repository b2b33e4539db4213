"""Random weights of the released shapes, made when asked for: plans, speed and memory can be tried without 500 GB of files.

8-bit matrices are slices of one shared pool of random codes, so that even the full expert set costs next to no memory
on a CPU; Engram rows are computed from their ids. The text is noise. The tokenizer is the demo's, with fewer entries than
the vocabulary; output rows beyond it, and those of its special tokens, are zero, so greedy decoding stays inside it.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from forebay.model.config import ModelConfig, real_config
from forebay.model.demo import TOKENIZER
from forebay.model.engram_map import hash_constants
from forebay.model.errors import CheckpointError, ConfigError
from forebay.model.names import TensorSpec, bytes_by_part, expected_tensors
from forebay.model.random_weights import deviation_and_mean, e2m1_codes, normal_numbers, special_ids

MIN_LAYERS = 6
_BASE = 4_194_301  # prime: rows of a matrix, whatever their length, do not repeat in step with it
_POOL = (64 << 20) + _BASE
_FP8_DEVIATION = 64.0  # of the codes; the scale bytes bring it to what the matrix needs
_FP4_DEVIATION = 1.5


def synthetic_config(*, experts: int | None = None, layers: int | None = None) -> ModelConfig:
    """The released configuration, optionally with fewer experts or layers.

    With `layers`, the halves stay halves: two window layers, an encoder at ratio 2 with the released sources that fit,
    and a decoder of the same length at ratio 1; draft stages are dropped.

    Raises:
        ConfigError: fewer than 1 or more than 384 experts; layers odd, fewer than 6 or more than 40.
    """
    config = real_config()
    if experts is not None:
        if not 1 <= experts <= config.n_routed_experts:
            raise ConfigError(f"experts must be between 1 and {config.n_routed_experts}, got {experts}", param="model")
        config = replace(config, n_routed_experts=experts, num_experts_per_tok=min(experts, config.num_experts_per_tok))
    if layers is not None:
        if layers % 2 or not MIN_LAYERS <= layers <= config.num_hidden_layers:
            raise ConfigError(f"layers must be even and between {MIN_LAYERS} and {config.num_hidden_layers}, got {layers}", param="model")
        if layers < config.num_hidden_layers:
            half = layers // 2
            engram = [layer for layer in config.engram_layer_ids if layer < half]
            config = replace(
                config,
                num_hidden_layers=layers,
                compress_ratios=(0, 0) + (2,) * (half - 2) + (1,) * half,
                kv_source_layer_ids=(*(s for s in (2, 8, 14) if s < half), half),
                index_source_layer_ids=(*(s for s in (2, 8, 14) if s < half), *range(half, layers, 4)),
                candidate_source_layer_id=half,
                engram_layer_ids=tuple(engram),
                engram_num_embeddings=config.engram_num_embeddings[: len(engram)],
                num_nextn_predict_layers=0,
                dspark_target_layer_ids=(),
            )
    return config


class SyntheticCheckpoint:
    """Looks like a `Checkpoint`; every tensor is a function of (config, seed, name)."""

    has_drafts = False
    has_vision = False
    notes = ("synthetic weights: random numbers in the released shapes, without draft stages and vision tower; the text is noise",)

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        hash_constants(config)
        self.config = config
        self.seed = seed
        self.specs = expected_tensors(config)

    def tensor(self, name: str) -> Tensor:
        """As `Checkpoint.tensor`: 8-bit formats as uint8, often a read-only slice shared with other tensors.

        Raises:
            CheckpointError: no such tensor, or an Engram table, which exists only row by row.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointError(f"the synthetic checkpoint holds no tensor {name!r}")
        if spec.part == "engram tables":
            raise CheckpointError(f"{name} of a synthetic checkpoint exists only row by row: use engram_table()")
        if spec.dtype in ("BF16", "F32"):
            return self._plain(name, spec)
        if name.endswith(".scale"):
            weight = self.specs[name.removesuffix(".scale") + ".weight"]
            packed = weight.dtype == "I8"
            deviation, _ = deviation_and_mean(name, weight.shape[1] * (2 if packed else 1))
            power = round(math.log2(deviation / (_FP4_DEVIATION if packed else _FP8_DEVIATION)))
            return torch.full(spec.shape, 127 + power, dtype=torch.uint8)
        pool = self._fp4_pool if spec.dtype == "I8" else self._fp8_pool
        size, start = math.prod(spec.shape), self._start(name)
        if start + size <= _POOL:
            return pool[start : start + size].view(spec.shape)
        return pool[:_BASE].roll(-start).repeat(-(-size // _BASE))[:size].view(spec.shape)

    def engram_table(self, layer: int) -> SyntheticEngramTable:
        rows, width = self.specs[f"layers.{layer}.engram.embed.weight"].shape
        return SyntheticEngramTable(self._fp8_pool[:_BASE], rows, width, salt=self._start(f"engram {layer}"))

    def token_map(self) -> Tensor:
        """Token id -> Engram class, [vocab] int32; here only a fold, as no tokenizer of this size is at hand."""
        return (torch.arange(self.config.vocab_size) % self.config.engram_compressed_vocab_size).to(torch.int32)

    @property
    def tokenizer_path(self) -> Path:
        return TOKENIZER

    @property
    def total_bytes(self) -> int:
        """What the tensors would take if they were stored, Engram tables included."""
        return sum(spec.nbytes for spec in self.specs.values())

    def parts(self) -> dict[str, int]:
        return bytes_by_part(self.specs)

    @cached_property
    def fingerprint(self) -> str:
        text = f"synthetic 1 {self.config.fingerprint()} {self.seed}"
        return hashlib.sha256(text.encode() + TOKENIZER.read_bytes()).hexdigest()

    @cached_property
    def _base(self) -> Tensor:  # [_BASE] fp32, deviation 1
        return torch.from_numpy(normal_numbers("synthetic", _BASE, self.seed))

    @cached_property
    def _fp8_pool(self) -> Tensor:  # [_POOL] uint8
        codes = (self._base * _FP8_DEVIATION).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes.repeat(-(-_POOL // _BASE))[:_POOL]

    @cached_property
    def _fp4_pool(self) -> Tensor:  # [_POOL] uint8, two codes per byte
        low = torch.from_numpy(e2m1_codes((self._base * _FP4_DEVIATION).numpy()))
        codes = low | low.roll(_BASE // 2) << 4
        return codes.repeat(-(-_POOL // _BASE))[:_POOL]

    def _start(self, name: str) -> int:
        return zlib.crc32(f"{self.seed} {name}".encode()) % _BASE // 64 * 64

    def _plain(self, name: str, spec: TensorSpec) -> Tensor:
        deviation, mean = deviation_and_mean(name, spec.shape[-1])
        dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        base = (self._base * deviation + mean).to(dtype).roll(-self._start(name))
        size = math.prod(spec.shape)
        values = base.repeat(-(-size // _BASE))[:size].view(spec.shape)
        if name == "head.weight":
            values[tokenizers.Tokenizer.from_file(str(TOKENIZER)).get_vocab_size() :] = 0
            values[list(special_ids(TOKENIZER, self.config))] = 0
        return values


class SyntheticEngramTable:
    """An Engram table whose rows are slices of the code pool, chosen by their id."""

    def __init__(self, pool: Tensor, rows: int, width: int, *, salt: int) -> None:
        self.rows = rows
        self.width = width
        self._pool = pool
        self._salt = salt

    def read(self, ids: Tensor) -> Tensor:
        """[n, columns] int64 -> [n, columns * width] bf16, deviation 1.

        Raises:
            IndexError: an id outside the table.
        """
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.rows):
            raise IndexError(f"row ids must lie in [0, {self.rows})")
        starts = ((ids + self._salt) * 0x5851F42D4C957F2D).remainder(self._pool.numel() - self.width)
        codes = self._pool[starts[..., None] + torch.arange(self.width)]
        values = codes.view(torch.float8_e4m3fn).to(torch.float32) / _FP8_DEVIATION
        return values.to(torch.bfloat16).view(*ids.shape[:-1], -1)
