"""The names table: which tensors a checkpoint of a given configuration holds (spec/model.md §11)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forebay.model.config import QUANT_GROUP, ModelConfig
from forebay.model.shards import DTYPES
from forebay.model.vision_config import CHANNELS

VISION_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFT_PREFIX = "mtp."
PATCH_EMBEDDING = "vision.patch_embed.proj.weight"


@dataclass(frozen=True)
class TensorSpec:
    """What a checkpoint must hold under one name: shape, safetensors dtype, and the part of the network it belongs to."""

    shape: tuple[int, ...]
    dtype: str
    part: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text backbone by name; scales follow their weights."""
    c = config
    specs: dict[str, TensorSpec] = {"embed.weight": TensorSpec((c.vocab_size, c.hidden_size), "BF16", "embedding")}
    for plan in c.topology().layers:
        at = f"layers.{plan.index}."
        specs |= _layer(c, at, c.n_routed_experts)
        if plan.owns_kv:
            specs |= _compressor(c, f"{at}attn.", plan.ratio)
        if plan.owns_index:
            specs |= _fp8(f"{at}attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "indexer")
            specs[f"{at}attn.indexer.weights_proj.weight"] = TensorSpec((c.index_n_heads, c.hidden_size), "BF16", "indexer")
        if plan.engram:
            specs |= _engram(c, f"{at}engram.", c.engram_num_embeddings[c.engram_layer_ids.index(plan.index)])
    specs["norm.weight"] = TensorSpec((c.hidden_size,), "BF16", "norms")
    specs["head.weight"] = TensorSpec((c.vocab_size, c.hidden_size), "BF16", "head")
    return specs


def optional_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """The `mtp.*` tensors of the draft stages the configuration names; part `drafter`. Empty without stages."""
    c = config
    last = c.num_nextn_predict_layers - 1
    specs: dict[str, TensorSpec] = {}
    for stage in range(c.num_nextn_predict_layers):
        specs |= _layer(c, f"mtp.{stage}.", c.dspark_n_routed_experts)
    if specs:
        specs |= _fp8("mtp.0.main_proj", c.hidden_size, c.hidden_size * len(c.dspark_target_layer_ids), "drafter")
        for name, shape in (
            ("mtp.0.main_norm.weight", (c.hidden_size,)),
            (f"mtp.{last}.norm.weight", (c.hidden_size,)),
            (f"mtp.{last}.markov_head.embed.weight", (c.vocab_size, c.dspark_markov_rank)),
            (f"mtp.{last}.markov_head.head.weight", (c.vocab_size, c.dspark_markov_rank)),
            (f"mtp.{last}.confidence_head.proj.weight", (1, c.hidden_size + c.dspark_markov_rank)),
        ):
            specs[name] = TensorSpec(shape, "BF16", "drafter")
    return {name: TensorSpec(spec.shape, spec.dtype, "drafter") for name, spec in specs.items()}


def vision_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Tower, aligner and delimiter vectors; part `vision`. Optional, and empty without a vision half (spec/vision.md §10).

    All are BF16: with these, the released tensors add up to the released number of payload bytes.
    """
    v, shapes = config.vision, dict[str, tuple[int, ...]]()
    if v is None:
        return {}
    dim, out = v.hidden_size, config.hidden_size
    shapes[PATCH_EMBEDDING] = (dim, v.patch_values)
    shapes["vision.patch_embed.proj.bias"] = (dim,)
    for block in range(v.num_hidden_layers):
        at = f"vision.blocks.{block}."
        shapes |= {f"{at}norm1.weight": (dim,), f"{at}attn.wqkv.weight": (3 * dim, dim), f"{at}attn.wqkv.bias": (3 * dim,)}
        shapes |= {f"{at}attn.wo.weight": (dim, dim), f"{at}attn.wo.bias": (dim,), f"{at}norm2.weight": (dim,)}
        shapes |= {f"{at}mlp.w1.weight": (2 * v.intermediate_size, dim), f"{at}mlp.w2.weight": (dim, v.intermediate_size)}
    shapes["vision.norm.weight"] = (dim,)
    shapes |= {"aligner.w1.weight": (out, dim * v.downsample_ratio**2), "aligner.w1.bias": (out,)}
    shapes |= {"aligner.w2.weight": (out, out), "aligner.w2.bias": (out,)}
    shapes |= dict.fromkeys(("image_start", "image_newline", "image_end"), (out,))
    return {name: TensorSpec(shape, "BF16", "vision") for name, shape in shapes.items()}


def stored_as(name: str, spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The spec with the stored shape where that is as good: the patch embedding may be kept as the convolution it is, [dim, 3, P, P].

    Flattened, that has the channel, y, x order of a patch.
    """
    square = len(shape) == 4 and shape[1] == CHANNELS and shape[2] == shape[3]
    if name == PATCH_EMBEDDING and square and (shape[0], math.prod(shape[1:])) == spec.shape:
        return replace(spec, shape=shape)
    return spec


def _fp8(name: str, rows: int, columns: int, part: str) -> dict[str, TensorSpec]:
    """FP8 E4M3 matrix with one E8M0 scale per 32x32 tile."""
    tiles = (-(-rows // QUANT_GROUP), -(-columns // QUANT_GROUP))
    return {f"{name}.weight": TensorSpec((rows, columns), "F8_E4M3", part), f"{name}.scale": TensorSpec(tiles, "F8_E8M0", part)}


def _mxfp4(name: str, rows: int, columns: int) -> dict[str, TensorSpec]:
    """Two E2M1 codes per byte with one E8M0 scale per 32 columns."""
    return {
        f"{name}.weight": TensorSpec((rows, columns // 2), "I8", "experts"),
        f"{name}.scale": TensorSpec((rows, -(-columns // QUANT_GROUP)), "F8_E8M0", "experts"),
    }


def _layer(c: ModelConfig, at: str, experts: int) -> dict[str, TensorSpec]:
    """What every layer has: attention projections, mHC, router, experts."""
    dim, heads, width = c.hidden_size, c.num_attention_heads, c.moe_intermediate_size
    mixes = (2 + c.hc_mult) * c.hc_mult
    specs = {f"{at}{name}.weight": TensorSpec((dim,), "BF16", "norms") for name in ("attn_norm", "ffn_norm")}
    for block in ("attn", "ffn"):
        specs[f"{at}hc_{block}_fn"] = TensorSpec((mixes, c.hc_mult * dim), "F32", "mhc")
        specs[f"{at}hc_{block}_base"] = TensorSpec((mixes,), "F32", "mhc")
        specs[f"{at}hc_{block}_scale"] = TensorSpec((3,), "F32", "mhc")
    specs |= _fp8(f"{at}attn.wq_a", c.q_lora_rank, dim, "attention")
    specs[f"{at}attn.q_norm.weight"] = TensorSpec((c.q_lora_rank,), "BF16", "attention")
    specs |= _fp8(f"{at}attn.wq_b", heads * c.head_dim, c.q_lora_rank, "attention")
    specs |= _fp8(f"{at}attn.wkv", c.head_dim, dim, "attention")
    specs[f"{at}attn.kv_norm.weight"] = TensorSpec((c.head_dim,), "BF16", "attention")
    specs[f"{at}attn.attn_sink"] = TensorSpec((heads,), "F32", "attention")
    specs |= _fp8(f"{at}attn.wo_a", c.o_groups * c.o_lora_rank, heads * c.head_dim // c.o_groups, "attention")
    specs |= _fp8(f"{at}attn.wo_b", dim, c.o_groups * c.o_lora_rank, "attention")
    specs[f"{at}ffn.gate.weight"] = TensorSpec((experts, dim), "BF16", "router")
    specs[f"{at}ffn.gate.bias"] = TensorSpec((experts,), "F32", "router")
    specs[f"{at}ffn.gate.bias_vl"] = TensorSpec((experts,), "F32", "router")
    if c.n_shared_experts:
        shared = width * c.n_shared_experts
        specs |= _fp8(f"{at}ffn.shared_experts.w1", shared, dim, "shared experts")
        specs |= _fp8(f"{at}ffn.shared_experts.w3", shared, dim, "shared experts")
        specs |= _fp8(f"{at}ffn.shared_experts.w2", dim, shared, "shared experts")
    for expert in range(experts):
        specs |= _mxfp4(f"{at}ffn.experts.{expert}.w1", width, dim)
        specs |= _mxfp4(f"{at}ffn.experts.{expert}.w3", width, dim)
        specs |= _mxfp4(f"{at}ffn.experts.{expert}.w2", dim, width)
    return specs


def _compressor(c: ModelConfig, at: str, ratio: int) -> dict[str, TensorSpec]:
    """What a kv source adds; only groups of more than one token are weighted by a gate."""
    specs = {f"{at}compressor.wkv.weight": TensorSpec((c.head_dim, c.hidden_size), "BF16", "compressor")}
    if ratio > 1:
        specs[f"{at}compressor.wgate.weight"] = TensorSpec((c.head_dim, c.hidden_size), "BF16", "compressor")
    specs[f"{at}compressor.norm.weight"] = TensorSpec((c.head_dim,), "BF16", "compressor")
    specs[f"{at}indexer.wk.weight"] = TensorSpec((c.index_head_dim, c.head_dim), "BF16", "indexer")
    specs[f"{at}indexer.k_norm.weight"] = TensorSpec((c.index_head_dim,), "BF16", "indexer")
    return specs


def _engram(c: ModelConfig, at: str, rows: int) -> dict[str, TensorSpec]:
    width = c.engram_head_dim
    specs = {
        f"{at}embed.weight": TensorSpec((rows, width), "F8_E4M3", "engram tables"),
        f"{at}embed.scale": TensorSpec((rows, width // QUANT_GROUP), "F8_E8M0", "engram tables"),
    }
    specs |= _fp8(f"{at}wkv", (c.hc_mult + 1) * c.hidden_size, c.engram_columns * width, "engram")
    specs[f"{at}q_weight"] = TensorSpec((c.hc_mult, c.hidden_size), "BF16", "engram")
    specs[f"{at}k_weight"] = TensorSpec((c.hc_mult, c.hidden_size), "BF16", "engram")
    return specs


def bytes_by_part(specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Stored bytes per part of the network, in the order the parts first appear."""
    sums: dict[str, int] = {}
    for spec in specs.values():
        sums[spec.part] = sums.get(spec.part, 0) + spec.nbytes
    return sums
