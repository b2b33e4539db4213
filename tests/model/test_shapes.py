"""Networks of other shapes: whatever order, ratios, windows and sizes a configuration names, equal to the slow plain pass."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from forebay.engine.launch import build_engine
from forebay.engine.llm import LLM
from forebay.engine.options import EngineOptions
from forebay.model.checkpoint import RowReader, Weights
from forebay.model.config import ModelConfig
from forebay.model.engram_map import EngramTable
from forebay.model.names import TensorSpec, expected_tensors
from forebay.model.ops import formats
from forebay.model.ops.elementwise import silu
from forebay.model.ops.linear import quantised_linear
from forwards import Hand, assert_same, difference, step
from noise_model import TOKENIZER
from reference import Net, Reference, ReferenceWeights, Tensors

BASE = ModelConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=6, num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32,
    o_groups=2, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
    compress_ratios=(0, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 5), index_n_heads=4, index_head_dim=32,
    index_topk=6, candidate_source_layer_id=3, candidate_topk_blocks=4, candidate_block_size=2, engram_head_dim=32, engram_n_heads=1,
    engram_vocab_size=50, engram_max_ngram_size=3, engram_compressed_vocab_size=61, max_position_embeddings=4096,
)  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "ratio 1 before ratio 2": {
        "compress_ratios": (1, 1, 0, 2, 2, 2), "kv_source_layer_ids": (0, 3), "index_source_layer_ids": (0, 1, 3, 5),
        "candidate_source_layer_id": 3,
    },
    "ratios 4 and 3, window 6": {
        "compress_ratios": (4, 4, 0, 3, 3, 1), "kv_source_layer_ids": (0, 3, 5), "index_source_layer_ids": (0, 1, 3, 5),
        "sliding_window": 6, "candidate_source_layer_id": None, "index_topk": 3,
    },
    "odd window, Engram where the decoder begins": {
        "sliding_window": 5, "engram_layer_ids": (0, 3), "engram_num_embeddings": (112, 128), "index_topk": 3,
    },
    "window of one, one source": {
        "sliding_window": 1, "compress_ratios": (0, 0, 2, 2, 2, 2), "kv_source_layer_ids": (2,), "index_source_layer_ids": (2, 4),
        "candidate_source_layer_id": None,
    },
    "wide window, two streams, one expert": {
        "sliding_window": 70, "hc_mult": 2, "num_experts_per_tok": 1, "n_shared_experts": 0, "norm_topk_prob": False, "index_topk": 64,
        "o_groups": 1, "index_n_heads": 1,
    },
    "a pool smaller than the selection": {"index_topk": 9, "candidate_topk_blocks": 2, "candidate_block_size": 3},
    "candidates of an encoder source, seven experts": {
        "compress_ratios": (2, 2, 2, 2, 1, 1), "kv_source_layer_ids": (0, 4), "index_source_layer_ids": (0, 2, 3, 4),
        "candidate_source_layer_id": 0, "n_routed_experts": 7, "num_experts_per_tok": 3, "gate_temp": 2.0, "routed_scaling_factor": 2.5,
        "num_attention_heads": 6, "head_dim": 64, "index_head_dim": 64, "qk_rope_head_dim": 16, "o_groups": 3, "swiglu_limit": 0.5,
    },
    "everything is a source": {
        "compress_ratios": (1, 2, 1, 2, 1, 2), "kv_source_layer_ids": (0, 1, 2, 3, 4, 5), "index_source_layer_ids": (0, 1, 2, 3, 4, 5),
        "candidate_source_layer_id": 5, "rms_norm_eps": 1e-6, "hc_sinkhorn_iters": 3, "vocab_size": 33,
    },
}  # fmt: skip


class RandomCheckpoint:
    """Random weights of any configuration, spread so that scores, gates and experts differ from token to token."""

    has_drafts = has_vision = False
    notes: tuple[str, ...] = ()
    tokenizer_path: Path = TOKENIZER

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.specs = config, expected_tensors(config)
        self.fingerprint = config.fingerprint()
        self.total_bytes = sum(spec.nbytes for spec in self.specs.values())

    def tensor(self, name: str) -> Tensor:
        spec: TensorSpec = self.specs[name]
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if spec.dtype == "F8_E8M0":
            weight = self.specs[name.removesuffix("scale") + "weight"]
            packed = weight.dtype == "I8"
            power = -round(math.log2((1.5 if packed else 64.0) * math.sqrt(weight.shape[1] * (2 if packed else 1))))
            return torch.randint(127 + power - 1, 127 + power + 2, spec.shape, generator=g, dtype=torch.uint8)
        if spec.dtype == "I8":
            return torch.randint(0, 256, spec.shape, generator=g, dtype=torch.uint8)
        numbers = torch.randn(spec.shape, generator=g)
        if spec.dtype == "F8_E4M3":
            return (numbers * 64).clamp(-400, 400).to(torch.float8_e4m3fn).view(torch.uint8)
        if name.endswith(("norm.weight", "_scale")):
            numbers = 1 + numbers / 10
        elif len(spec.shape) > 1 and name != "embed.weight":
            numbers = numbers * (2 if "gate" in name else 1) / math.sqrt(spec.shape[-1])
        return numbers.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)

    def engram_table(self, layer: int) -> RowReader:
        name = f"layers.{layer}.engram.embed"
        return EngramTable(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"))

    def token_map(self) -> Tensor:
        return (torch.arange(self.config.vocab_size) % self.config.engram_compressed_vocab_size).int()

    def parts(self) -> dict[str, int]:
        return {}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def shaped(request: pytest.FixtureRequest) -> Net:
    source = cast(Weights, RandomCheckpoint(replace(BASE, **SHAPES[request.param])))
    engine = build_engine(source, model_name="shape", prefill="exact", options=EngineOptions(kv_tokens=2048), chat=False)
    llm = SimpleNamespace(engine=engine, tokenizer=engine.tokenizer, config=source.config)
    return Net(cast(LLM, llm), ReferenceWeights(engine.runner.backbone, source))


def test_equals_the_reference(shaped: Net) -> None:
    tokens = shaped.tokens(41)
    ref = Reference(shaped.weights, tokens)
    wanted = ref.run(0, 41)
    assert wanted.std() > 0.1
    assert bool(torch.isfinite(wanted).all())
    with Hand(shaped.llm, tokens) as hand:
        assert difference(hand.feed(0, 41), wanted) is None
        stored = hand.stored(41)
        for source in hand.runner.layout.sources:
            assert difference(stored[f"layer{source.layer}.entries"], ref.entries(source.layer)) is None, source.layer
    with Hand(shaped.llm, tokens) as hand:
        assert difference(hand.feed(0, 1, 5, 12, 25, 41), wanted) is None
        assert_same(hand.stored(41), stored)


def test_decode_equals_the_reference(shaped: Net) -> None:
    """Several prompt lengths in one batch, then single steps."""
    tokens, prompts = shaped.tokens(22, seed=1), (5, 14, 18)
    hands = [Hand(shaped.llm, tokens, prompt) for prompt in prompts]
    found = [[part] for part in step(shaped.llm, [h.row(0, prompt) for h, prompt in zip(hands, prompts, strict=True)])]
    for p in range(5, 22):
        members = [i for i, prompt in enumerate(prompts) if prompt <= p]
        for i, part in zip(members, step(shaped.llm, [hands[i].row(p, p + 1) for i in members]), strict=True):
            found[i].append(part)
    for hand, prompt, parts in zip(hands, prompts, found, strict=True):
        hand.__exit__()
        assert difference(torch.cat(parts), Reference(shaped.weights, tokens, prompt_tokens=prompt).run(0, 22)) is None, prompt


def test_experts_one_by_one(shaped: Net) -> None:
    """The mixture of every layer, token by token and expert by expert in ascending order, then the shared expert."""
    config, load = shaped.llm.config, shaped.weights.tensors
    g = torch.Generator().manual_seed(3)
    for number, layer in enumerate(shaped.llm.engine.runner.backbone.layers):
        x = torch.randn(19, config.hidden_size, generator=g).to(torch.bfloat16)
        indices, weights = layer.moe.route(x, None)
        rows = []
        for i in range(len(x)):
            routed = torch.zeros(1, config.hidden_size)
            for expert, weight in sorted(zip(indices[i].tolist(), weights[i], strict=True)):
                routed = routed + feed_forward(load.at(f"layers.{number}.ffn.experts.{expert}"), "mxfp4", x[i : i + 1], config, weight)
            if config.n_shared_experts:
                routed = routed + feed_forward(load.at(f"layers.{number}.ffn.shared_experts"), "fp8", x[i : i + 1], config, None)
            rows.append(routed.to(torch.bfloat16))
        assert difference(layer.moe(x, indices, weights), torch.cat(rows)) is None, number


def feed_forward(load: Tensors, kind: str, x: Tensor, config: ModelConfig, weight: Tensor | None) -> Tensor:
    """One expert on one token, [1, hidden] fp32 (bf16 values)."""
    w1, w2, w3 = (getattr(load, kind)(name) for name in ("w1", "w2", "w3"))
    rounded = formats.fp8_round(x)
    gate, up = quantised_linear(rounded, w1).float(), quantised_linear(rounded, w3).float()
    if config.swiglu_limit:
        gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
    h = silu(gate) * up if weight is None else weight * (silu(gate) * up)
    return quantised_linear(formats.fp8_round(h.to(torch.bfloat16)), w2).float()


@pytest.mark.case("B003")
def test_resume_equals_the_reference(shaped: Net) -> None:
    """At places no block begins at, bounded in both halves: cached bytes untouched, the rest and the logits as REF has them."""
    window = shaped.llm.config.sliding_window
    length = window + 25
    tokens = shaped.tokens(length, seed=2)
    layout = shaped.llm.engine.runner.layout
    ratios = {source.layer: source.ratio for source in layout.sources}
    cold_ref = Reference(shaped.weights, tokens)
    cold_ref.run(0, length, decoder_from=length)
    with Hand(shaped.llm, tokens) as cold:
        cold.feed(0, length, decoder_from=length)
        for hit in (window + 3, window + 12):
            start = hit - window
            anchor = max(length - window, start)
            ref = Reference(shaped.weights, tokens, cold_ref.memory.prefix(hit, ratios))
            # An open group that began before the replay is not rebuilt by one window: the first row's group must be stored or complete.
            if any(hit // m * m < start for m in ratios.values()):
                continue
            wanted = ref.run(start, length, write_from=hit, window_from=start, decoder_from=anchor, decoder_window_from=anchor)
            with Hand(shaped.llm, tokens) as hand:
                hand.copy_entries(cold)
                row = hand.row(start, length, write_from=hit, window_from=start, decoder_from=anchor, decoder_window_from=anchor)
                assert difference(step(shaped.llm, [row])[0], wanted) is None, hit
                for layer, rows in hand.entries().items():
                    assert difference(rows[: length // ratios[layer]], ref.entries(layer)) is None, (hit, layer)
