"""Model configuration and topology.

Reads the nested Hugging Face `config.json` and the flat `inference/config.json` of DeepSeek-V4.1 into one
`ModelConfig` (spec/model.md §1), and derives from it what each layer is (§2.1).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.model.config_fields import coerce
from forebay.model.errors import ConfigError
from forebay.model.vision_config import VisionConfig

__all__ = [
    "ARCHITECTURE",
    "MAIN_KV_GROUP",
    "MODEL_TYPE",
    "QUANT_GROUP",
    "LayerPlan",
    "ModelConfig",
    "Topology",
    "VisionConfig",
    "real_config",
]

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"
QUANT_GROUP = 32  # FP8 tiles, MXFP4 groups and activation groups (spec §6.4)
MAIN_KV_GROUP = 16  # channels per scale of the main KV (spec §6.1)

# inference/config.json name -> HF name (spec §1.2); names not listed are identical.
FLAT_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "original_seq_len": "rope_original_max_position",
    "rope_factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "engram_pad_id": "engram_pad_token_id",
}


@dataclass(frozen=True)
class ModelConfig:
    """Numbers of one checkpoint, under their Hugging Face names (spec/model.md §1.1)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    norm_topk_prob: bool = True
    gate_temp: float = 1.0
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_max_position: int = 65536
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16_000_000
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int | None = None
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` from a checkpoint folder (or the file itself).

        Raises:
            ConfigError: no such file, not JSON, another architecture, a missing or impossible field.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            raw = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist: a checkpoint folder needs its config.json") from None
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{file} holds {type(raw).__name__}, expected a JSON object")
        return cls.from_dict(raw, where=str(file))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, where: str = "config") -> ModelConfig:
        """Build from a nested HF config or a flat `inference/config.json` dictionary."""
        architectures = raw.get("architectures")
        model_type = raw.get("model_type")
        named = architectures if isinstance(architectures, list) else [architectures]
        if architectures is not None and ARCHITECTURE not in named:
            raise ConfigError(f"{where} describes {', '.join(map(str, named))}; Forebay serves {ARCHITECTURE}")
        if model_type is not None and model_type != MODEL_TYPE:
            raise ConfigError(f"{where} has model_type {model_type!r}; Forebay serves {MODEL_TYPE!r}")
        nested = raw.get("text_config")
        flat: dict[str, Any] = {}
        if isinstance(nested, dict):
            flat.update({k: v for k, v in raw.items() if k in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")})
            flat.update(nested)
            _check_quantization(raw.get("quantization_config"), where)
            vision = raw.get("vision_config")
            if vision is not None and not isinstance(vision, dict):
                raise ConfigError(f"{where}: vision_config must be an object, got {vision!r}")
        else:
            flat.update({FLAT_NAMES.get(k, k): v for k, v in raw.items()})
            vision = raw if raw.get("vision_n_layers") else None
            if raw.get("dtype", "fp8") not in ("fp8",) or raw.get("expert_dtype", "fp4") != "fp4":
                raise ConfigError(f"{where}: dtype must be 'fp8' and expert_dtype 'fp4' in a flat config")
        flat["vision"] = None if vision is None else VisionConfig.from_dict(vision, where=where)
        scaling = flat.get("rope_scaling")
        if isinstance(scaling, dict):
            kind = scaling.get("rope_type", scaling.get("type", "yarn"))
            if kind != "yarn":
                raise ConfigError(f"{where}: rope_scaling.rope_type is {kind!r}, only 'yarn' is known")
            for ours, theirs in (
                ("rope_factor", "factor"),
                ("rope_beta_fast", "beta_fast"),
                ("rope_beta_slow", "beta_slow"),
                ("rope_original_max_position", "original_max_position_embeddings"),
            ):
                if theirs in scaling:
                    flat[ours] = scaling[theirs]
        if flat.get("scoring_func", "sqrtsoftplus") != "sqrtsoftplus":
            raise ConfigError(f"{where}: scoring_func {flat['scoring_func']!r} is unknown, expected 'sqrtsoftplus'")
        if flat.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"{where}: hidden_act {flat['hidden_act']!r} is unknown, expected 'silu'")
        if flat.get("max_position_embeddings") is None and flat.get("max_seq_len") is not None:
            flat["max_position_embeddings"] = flat["max_seq_len"]
        values: dict[str, Any] = {}
        missing = []
        for name, spec in cls.__dataclass_fields__.items():
            if name in flat and flat[name] is not None:
                values[name] = coerce(name, flat[name], str(spec.type), where)
            elif spec.default is not _MISSING:
                values[name] = spec.default
            elif name in _NO_CANDIDATES:
                values[name] = _NO_CANDIDATES[name]
            else:
                missing.append(name)
        if missing:
            hints = []
            for name in missing:
                near = difflib.get_close_matches(name, [key for key, value in flat.items() if value is not None], n=1)
                hints.append(f"{name} (did you mean {near[0]!r}?)" if near else name)
            raise ConfigError(f"{where} lacks {', '.join(hints)}")
        if values["candidate_source_layer_id"] is not None and values["candidate_source_layer_id"] < 0:
            values["candidate_source_layer_id"] = None  # how flat configs say that there is none
        values["compress_ratios"] = values["compress_ratios"][: values["num_hidden_layers"]]
        return cls(**values)

    @property
    def rope_pairs(self) -> int:
        return self.qk_rope_head_dim // 2

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: orders 2..max, each with its heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def topology(self) -> Topology:
        return Topology.of(self)

    def fingerprint(self) -> str:
        """SHA-256 over every field, hex; part of the cache identity."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


_NO_CANDIDATES = {"candidate_source_layer_id": None, "candidate_topk_blocks": 0, "candidate_block_size": 0}
_MISSING = ModelConfig.__dataclass_fields__["vocab_size"].default


def _check_quantization(section: Any, where: str) -> None:
    """`quantization_config` sits at the top level only (spec §1.1); anything but the released formats is refused."""
    if not isinstance(section, dict):
        raise ConfigError(f"{where} lacks quantization_config at its top level (quant_method fp8, expert_dtype fp4)")
    wanted = {"quant_method": "fp8", "weight_block_size": [QUANT_GROUP, QUANT_GROUP], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    for key, value in wanted.items():
        if section.get(key, value) != value:
            raise ConfigError(f"{where}: quantization_config.{key} is {section[key]!r}, this reader knows {value!r}")


def _validate(c: ModelConfig) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)

    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups",
        "o_lora_rank", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
    ):  # fmt: skip
        need(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
    layers = c.num_hidden_layers
    need(len(c.compress_ratios) == layers, f"compress_ratios has {len(c.compress_ratios)} numbers for {layers} layers")
    need(all(r >= 0 for r in c.compress_ratios), "compress_ratios must not be negative")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        ascending = list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids)
        need(ascending, f"{name} must be ascending layer numbers below {layers}: {list(ids)}")
    need(len(c.kv_source_layer_ids) > 0, "kv_source_layer_ids must name at least one layer")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for source in getattr(c, name):
            need(c.compress_ratios[source] > 0, f"{name} has layer {source}, whose number in compress_ratios is 0")
    for layer, ratio in enumerate(c.compress_ratios):
        if ratio == 0:
            continue
        kv = [s for s in c.kv_source_layer_ids if s <= layer]
        index = [s for s in c.index_source_layer_ids if s <= layer]
        for name, sources in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
            need(bool(sources), f"layer {layer} has ratio {ratio} in compress_ratios, but {name} has no layer at or below it")
        source, other = kv[-1], c.compress_ratios[kv[-1]]
        unlike = f"compress_ratios gives layer {layer} ratio {ratio}, but its source {source} (kv_source_layer_ids) ratio {other}"
        need(other == ratio, unlike)
        scored = f"layer {layer} would use the list of layer {index[-1]} (index_source_layer_ids)"
        need(index[-1] >= source, f"{scored} for the entries of layer {source} (kv_source_layer_ids)")
    if c.candidate_source_layer_id is not None:
        need(c.candidate_source_layer_id in c.index_source_layer_ids, "candidate_source_layer_id must be an index source")
        need(c.candidate_topk_blocks >= 1, "candidate_topk_blocks must be at least 1")
        need(c.candidate_block_size >= 1, "candidate_block_size must be at least 1")
    rope_fits = c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim)
    need(rope_fits, "qk_rope_head_dim must be even and fit head_dim and index_head_dim")
    for name in ("rope_theta", "compress_rope_theta"):
        need(getattr(c, name) > 1, f"{name} must be above 1, got {getattr(c, name)}")
    for name in ("rope_factor", "rope_beta_fast", "rope_beta_slow", "gate_temp"):
        need(getattr(c, name) > 0, f"{name} must be above 0, got {getattr(c, name)}")
    for name in ("rms_norm_eps", "hc_eps", "n_shared_experts", "num_nextn_predict_layers"):
        need(getattr(c, name) >= 0, f"{name} must not be negative, got {getattr(c, name)}")
    for name in ("eos_token_id", "engram_pad_token_id"):
        need(0 <= getattr(c, name) < c.vocab_size, f"{name} is {getattr(c, name)}, the vocabulary has {c.vocab_size} tokens")
    need(c.engram_max_ngram_size >= 1, f"engram_max_ngram_size must be at least 1, got {c.engram_max_ngram_size}")
    need(c.head_dim % QUANT_GROUP == 0, f"head_dim must be a multiple of {QUANT_GROUP}")
    need(c.index_head_dim % QUANT_GROUP == 0, f"index_head_dim must be a multiple of {QUANT_GROUP}")
    for name in ("hidden_size", "q_lora_rank", "moe_intermediate_size"):
        need(getattr(c, name) % QUANT_GROUP == 0, f"{name} must be a multiple of {QUANT_GROUP} (activation groups)")
    need(c.num_attention_heads % c.o_groups == 0, "num_attention_heads must be a multiple of o_groups")
    need(c.o_groups * c.o_lora_rank % QUANT_GROUP == 0, f"o_groups*o_lora_rank must be a multiple of {QUANT_GROUP}")
    need(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts")
    need(len(c.engram_num_embeddings) == len(c.engram_layer_ids), "engram_num_embeddings needs one number per engram layer")
    if c.vision is not None:
        placed = c.image_token_id is not None and 0 <= c.image_token_id < c.vocab_size
        need(placed, f"image_token_id must be a token below {c.vocab_size} for the vision half, got {c.image_token_id}")
    if c.engram_layer_ids:
        need(c.engram_head_dim % QUANT_GROUP == 0, f"engram_head_dim must be a multiple of {QUANT_GROUP}")
        need(c.engram_max_ngram_size >= 2, "engram_max_ngram_size must be at least 2")
        need(c.engram_n_heads >= 1, "engram_n_heads must be at least 1")
        need(c.engram_compressed_vocab_size >= 1, "engram_compressed_vocab_size must be given with engram layers")


@dataclass(frozen=True)
class LayerPlan:
    """What one layer is (spec §2.1).

    `kv_source` / `index_source` name the layer whose entries / selected list it reads (None on window-only layers).
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index: bool
    reads_candidates: bool
    makes_candidates: bool
    engram: bool

    @property
    def role(self) -> str:
        """`window`, `full` (own KV and indexer), `reindex` (own indexer only) or `reuse`."""
        if self.ratio == 0:
            return "window"
        if self.owns_kv:
            return "full"
        return "reindex" if self.owns_index else "reuse"


@dataclass(frozen=True)
class Topology:
    """All layers, and where the decoder half begins: at the last kv source (spec §2.3)."""

    layers: tuple[LayerPlan, ...]
    cut: int

    @classmethod
    def of(cls, c: ModelConfig) -> Topology:
        plans = []
        for layer, ratio in enumerate(c.compress_ratios):
            kv = max((s for s in c.kv_source_layer_ids if s <= layer), default=None) if ratio else None
            index = max((s for s in c.index_source_layer_ids if s <= layer), default=None) if ratio else None
            candidate = c.candidate_source_layer_id
            owns_index = layer in c.index_source_layer_ids
            plans.append(
                LayerPlan(
                    index=layer,
                    ratio=ratio,
                    kv_source=kv,
                    index_source=index,
                    owns_kv=layer in c.kv_source_layer_ids,
                    owns_index=owns_index,
                    # Only later index sources over the candidate source's own entries are restricted (spec §5.4).
                    reads_candidates=owns_index and candidate is not None and layer > candidate and kv == _kv_of(c, candidate),
                    makes_candidates=candidate is not None and layer == candidate,
                    engram=layer in c.engram_layer_ids,
                )
            )
        return cls(tuple(plans), c.kv_source_layer_ids[-1])

    @property
    def encoder(self) -> tuple[LayerPlan, ...]:
        return self.layers[: self.cut]

    @property
    def decoder(self) -> tuple[LayerPlan, ...]:
        return self.layers[self.cut :]


def _kv_of(c: ModelConfig, layer: int) -> int | None:
    return max((s for s in c.kv_source_layer_ids if s <= layer), default=None)


def real_config() -> ModelConfig:
    """The released DeepSeek-V4.1-Flash configuration (spec/model.md §1.1), for plans and synthetic models."""
    return ModelConfig(
        vocab_size=129280, hidden_size=5120, num_hidden_layers=40, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64,
        q_lora_rank=1280, o_groups=8, o_lora_rank=1024, moe_intermediate_size=2304, n_routed_experts=384, num_experts_per_tok=6,
        sliding_window=128, compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20, kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36), index_n_heads=32, index_head_dim=128, index_topk=512,
        candidate_source_layer_id=20, candidate_topk_blocks=2048, candidate_block_size=8, engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682), engram_compressed_vocab_size=99092, num_nextn_predict_layers=3,
        dspark_block_size=5, dspark_noise_token_id=128799, dspark_target_layer_ids=(37, 38, 39), dspark_markov_rank=256,
        dspark_n_routed_experts=128, dspark_num_experts_per_tok=3, image_token_id=129264,
        vision=VisionConfig(
            num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816, patch_size=14, downsample_ratio=3,
        ),
    )  # fmt: skip
