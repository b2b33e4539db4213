"""Weights of the fused network: each matrix on the device in the form it is stored in, joined where one kernel reads several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from forebay.model.checkpoint import RowReader, Weights
from forebay.model.config import QUANT_GROUP, LayerPlan, ModelConfig
from forebay.model.errors import ConfigError
from forebay.model.loading import Meter
from forebay.model.ops.device_linear import ExpertBank, Fp8Matrix
from forebay.model.ops.hyper_connections import spread_scale
from forebay.model.ops.kernels.streams_ops import Connection, cut

DEVICE_TABLE_BYTES = 4 << 30  # an Engram table up to this size is put on the device; a larger one stays where it is stored


@dataclass(frozen=True)
class CompressorWeights:
    """wkv: [dim, D] bf16, of ratio 2 with the gate below it, [2 * dim, D]. norm [dim], wk [index dim, dim], k_norm [index dim] bf16."""

    wkv: Tensor
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b: latent -> index queries. heads: [index heads, D] bf16, the weights of the heads."""

    wq_b: Fp8Matrix
    heads: Tensor


@dataclass(frozen=True)
class DeviceTable:
    """An Engram table in memory that kernels read: codes [rows, width], scales [rows, width / 32] uint8; row ids count modulo `modulo`."""

    codes: Tensor
    scales: Tensor
    modulo: int | None = None


@dataclass(frozen=True)
class EngramWeights:
    """slot: place in `engram_layer_ids`. table: on the device, or a reader of one that is not. q, k: [S, D] bf16."""

    slot: int
    table: DeviceTable | RowReader
    wkv: Fp8Matrix
    q: Tensor
    k: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. attn, ffn: mHC of the two sub-layers. Norms bf16 [D]; gate [experts, D] bf16, biases [experts] fp32."""

    plan: LayerPlan
    attn: Connection
    ffn: Connection
    attn_norm: Tensor
    ffn_norm: Tensor
    w_in: Fp8Matrix
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Fp8Matrix
    sink: Tensor
    wo_a: Fp8Matrix
    wo_b: Fp8Matrix
    gate: Tensor
    bias: Tensor
    bias_image: Tensor
    experts: ExpertBank
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    engram: EngramWeights | None


class _StackedSource(Protocol):
    def stacked_experts(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class FusedLoader:
    """Takes layers out of a source. Reports progress as `Loader` does."""

    def __init__(self, source: Weights, device: torch.device, meter: Meter, wide: int = 0) -> None:
        """wide: layers from the first on whose attention also keeps its matrices in bf16, for prompts (`wide_bytes`)."""
        self.source, self.config, self.device, self.meter, self.wide = source, source.config, device, meter, wide
        check_shapes(self.config)

    def tensor(self, name: str) -> Tensor:
        found = self.source.tensor(name)
        self.meter.add(found.numel() * found.element_size(), name)
        return found.to(self.device, copy=found.storage_offset() != 0).contiguous()  # a mapped file aligns nothing; kernels read words

    def matrix(self, names: list[str], groups: int = 1, wide: bool = False) -> Fp8Matrix:
        """FP8 matrices of one input, one below the other. wide: also in bf16."""
        codes, scales = ([self.tensor(f"{name}.{part}") for name in names] for part in ("weight", "scale"))
        if len(names) == 1:
            return Fp8Matrix(codes[0], scales[0], groups=groups, keep_wide=wide)
        return Fp8Matrix(torch.cat(codes), torch.cat(scales), groups=groups, keep_wide=wide)

    def layer(self, plan: LayerPlan) -> LayerWeights:
        config, at = self.config, f"layers.{plan.index}."
        attn, ffn, wide = f"{at}attn.", f"{at}ffn.", plan.index < self.wide
        return LayerWeights(
            plan=plan,
            attn=self._connection(f"{at}hc_attn"),
            ffn=self._connection(f"{at}hc_ffn"),
            attn_norm=self.tensor(f"{at}attn_norm.weight"),
            ffn_norm=self.tensor(f"{at}ffn_norm.weight"),
            w_in=self.matrix([f"{attn}wq_a", f"{attn}wkv"], wide=wide),
            q_norm=self.tensor(f"{attn}q_norm.weight"),
            kv_norm=self.tensor(f"{attn}kv_norm.weight"),
            wq_b=self.matrix([f"{attn}wq_b"], wide=wide),
            sink=self.tensor(f"{attn}attn_sink"),
            wo_a=self.matrix([f"{attn}wo_a"], groups=config.o_groups, wide=wide),
            wo_b=self.matrix([f"{attn}wo_b"], wide=wide),
            gate=self.tensor(f"{ffn}gate.weight"),
            bias=self.tensor(f"{ffn}gate.bias"),
            bias_image=self.tensor(f"{ffn}gate.bias_vl"),
            experts=self._experts(plan.index, ffn),
            compressor=self._compressor(attn, plan.ratio) if plan.owns_kv else None,
            indexer=self._indexer(attn) if plan.owns_index else None,
            engram=self._engram(plan.index, f"{at}engram.") if plan.engram else None,
        )

    def _connection(self, name: str) -> Connection:
        scale = spread_scale(self.tensor(f"{name}_scale"), self.config.hc_mult)
        fn = self.tensor(f"{name}_fn")
        return Connection(fn, scale.contiguous(), self.tensor(f"{name}_base"), cut(fn, self.config.hc_mult))

    def _compressor(self, attn: str, ratio: int) -> CompressorWeights:
        parts = [self.tensor(f"{attn}compressor.wkv.weight")]
        if ratio > 1:
            parts.append(self.tensor(f"{attn}compressor.wgate.weight"))
        norm, wk = self.tensor(f"{attn}compressor.norm.weight"), self.tensor(f"{attn}indexer.wk.weight")
        return CompressorWeights(torch.cat(parts), norm, wk, self.tensor(f"{attn}indexer.k_norm.weight"))

    def _indexer(self, attn: str) -> IndexerWeights:
        return IndexerWeights(self.matrix([f"{attn}indexer.wq_b"]), self.tensor(f"{attn}indexer.weights_proj.weight"))

    def _experts(self, layer: int, ffn: str) -> ExpertBank:
        shared_up, shared_down = None, None
        if self.config.n_shared_experts:
            at = f"{ffn}shared_experts."
            shared_up, shared_down = self.matrix([f"{at}w1", f"{at}w3"]), self.matrix([f"{at}w2"])
        if hasattr(self.source, "stacked_experts"):
            stacked = cast(_StackedSource, self.source).stacked_experts(layer)
            self.meter.add(sum(x.numel() for x in stacked), f"{ffn}experts")
        else:
            stacked = self._stack(ffn)
        return ExpertBank((stacked[0], stacked[1]), (stacked[2], stacked[3]), shared_up, shared_down, self.config.swiglu_limit)

    def _stack(self, ffn: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """up codes [E, 2I, D/2] (w1 over w3) and scales, down codes [E, D, I/2] and scales; each expert goes straight to its place."""
        config = self.config
        count, width, dim = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        shapes = ((2 * width, dim // 2), (2 * width, dim // QUANT_GROUP), (dim, width // 2), (dim, width // QUANT_GROUP))
        up, up_scale, down, down_scale = (torch.empty((count, *shape), dtype=torch.uint8, device=self.device) for shape in shapes)
        for expert in range(count):
            at = f"{ffn}experts.{expert}."
            for row, name in ((0, "w1"), (width, "w3")):
                up[expert, row : row + width] = self.tensor(f"{at}{name}.weight").view(torch.uint8)
                up_scale[expert, row : row + width] = self.tensor(f"{at}{name}.scale")
            down[expert] = self.tensor(f"{at}w2.weight").view(torch.uint8)
            down_scale[expert] = self.tensor(f"{at}w2.scale")
        return up, up_scale, down, down_scale

    def _engram(self, layer: int, at: str) -> EngramWeights:
        table: Any = self.source.engram_table(layer)
        codes, scales = getattr(table, "codes", None), getattr(table, "scales", None)
        if codes is not None and scales is not None and codes.numel() + scales.numel() <= DEVICE_TABLE_BYTES:
            table = DeviceTable(codes.to(self.device), scales.to(self.device), getattr(table, "modulo", None))
        slot = self.config.engram_layer_ids.index(layer)
        return EngramWeights(slot, table, self.matrix([f"{at}wkv"]), self.tensor(f"{at}q_weight"), self.tensor(f"{at}k_weight"))


def wide_bytes(config: ModelConfig, layers: int) -> int:
    """Memory for the attention matrices of so many layers in bf16, 253 MB a layer at the released sizes.

    Products of many rows need them so, and a chunk of a prompt that finds them need not make them from the FP8 codes.
    """
    heads, dim, rank = config.num_attention_heads * config.head_dim, config.hidden_size, config.q_lora_rank
    inner = config.o_groups * config.o_lora_rank
    numbers = dim * (rank + config.head_dim) + rank * heads + config.o_lora_rank * heads + inner * dim
    return 2 * numbers * layers


def check_shapes(config: ModelConfig) -> None:
    """What the kernels are written for.

    Raises:
        ConfigError: a size they cannot take, by name.
    """
    multiples: list[tuple[str, int]] = [
        (name, getattr(config, name))
        for name in ("hidden_size", "q_lora_rank", "head_dim", "index_head_dim", "o_lora_rank", "moe_intermediate_size", "engram_head_dim")
    ]
    rules: list[tuple[str, int, Callable[[int], bool], str]] = [
        *((name, value, lambda v: v % QUANT_GROUP == 0, f"a multiple of {QUANT_GROUP}") for name, value in multiples),
        ("hc_mult", config.hc_mult, lambda v: v in (2, 4), "2 or 4"),
        ("num_attention_heads", config.num_attention_heads, lambda v: v <= 64, "at most 64"),
        ("index_head_dim", config.index_head_dim, lambda v: v in (32, 64, 128), "32, 64 or 128"),
        ("num_experts_per_tok", config.num_experts_per_tok, lambda v: v <= 16, "at most 16"),  # a step of 64 rows takes 1,024 assignments
        ("compress_ratios", max(config.compress_ratios), lambda v: v <= 2, "at most 2"),
    ]
    for name, value, good, text in rules:
        if not good(value):
            raise ConfigError(f"{name} must be {text} for the GPU kernels, got {value}", param=name)
    if config.candidate_topk_blocks * config.candidate_block_size < config.index_topk:
        raise ConfigError("candidate_topk_blocks * candidate_block_size must not be below index_topk for GPU kernels", param="index_topk")
