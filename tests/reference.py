"""REF: a slow plain forward pass of one sequence, to hold the network against.

Written from spec/model.md §2-§5 and §12.1 over the checkpoint's tensors and the elementary operations; of the network's own layers it uses
what is a function of one row (mHC, Engram, experts). No paging, no rings, no batching, no selection shortcuts, no tiles: what a row
may see is decided position by position, what was stored is kept in dictionaries. It has the floors of bounded replay, so it imitates a
resume and a bounded prompt too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.engine.llm import LLM
from forebay.model.checkpoint import Weights
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.engram_map import class_history
from forebay.model.network import Backbone, Layer, Streams
from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import collapse, mix
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, PlainWeight, TileCache, bf16_linear, fp32_linear, quantised_linear
from forebay.model.ops.rms_norm import rms_norm
from forebay.model.ops.rope import Turn, inverse_frequencies, rotate, turn_at
from forebay.model.ops.sparse_attention import sparse_attention
from forebay.model.source import resolve


@dataclass
class Memory:
    """What a sequence has left behind, by layer and then by position or entry."""

    window: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # position -> [dim] fp32
    main: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # entry -> [dim] fp32
    index: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # entry -> [index dim] fp32
    raw: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # entry -> stored bytes
    half: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)  # position -> k and gate, ratios above 1

    def prefix(self, tokens: int, ratios: dict[int, int]) -> Memory:
        """What a cached prefix of `tokens` tokens keeps of it: complete entries, and nothing else."""
        kept = [
            {layer: {j: v for j, v in rows.items() if j < tokens // ratios[layer]} for layer, rows in part.items()}
            for part in (self.main, self.index, self.raw)
        ]
        return Memory(main=kept[0], index=kept[1], raw=kept[2])


class Tensors:
    """The tensors of a checkpoint under a prefix."""

    def __init__(self, source: Weights, prefix: str = "", cache: TileCache | None = None) -> None:
        self.source, self.prefix, self.cache = source, prefix, cache or TileCache(64 << 20)

    def at(self, name: str) -> Tensors:
        return Tensors(self.source, f"{self.prefix}{name}.", self.cache)

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self.prefix + name)

    def plain(self, name: str) -> PlainWeight:
        return PlainWeight(self.tensor(name), self.cache)

    def fp8(self, name: str, rows: tuple[int, int] | None = None) -> Fp8Weight:
        return Fp8Weight(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"), self.cache, rows=rows)

    def mxfp4(self, name: str) -> Mxfp4Weight:
        return Mxfp4Weight(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"), self.cache)


class AttentionWeights:
    """Tensors below layers.N.attn (spec §11)."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Tensors) -> None:
        rank, pairs = config.o_lora_rank, config.qk_rope_head_dim
        self.plan = plan
        self.wq_a, self.wq_b, self.wkv, self.wo_b = (load.fp8(name) for name in ("wq_a", "wq_b", "wkv", "wo_b"))
        self.wo_a = [load.fp8("wo_a", rows=(g * rank, (g + 1) * rank)) for g in range(config.o_groups)]
        self.q_norm, self.kv_norm, self.sink = load.tensor("q_norm.weight"), load.tensor("kv_norm.weight"), load.tensor("attn_sink")
        if plan.ratio == 0:
            self.freqs = inverse_frequencies(pairs, config.rope_theta)
        else:
            yarn = {"factor": config.rope_factor, "beta_fast": config.rope_beta_fast, "beta_slow": config.rope_beta_slow}
            self.freqs = inverse_frequencies(pairs, config.compress_rope_theta, original=config.rope_original_max_position, **yarn)
        if plan.owns_kv:
            self.compress = load.plain("compressor.wkv.weight")
            self.gate = load.plain("compressor.wgate.weight") if plan.ratio > 1 else None
            self.norm = load.tensor("compressor.norm.weight")
            self.wk, self.k_norm = load.plain("indexer.wk.weight"), load.tensor("indexer.k_norm.weight")
        if plan.owns_index:
            self.index_q, self.index_w = load.fp8("indexer.wq_b"), load.plain("indexer.weights_proj.weight")


class ReferenceWeights:
    """What all references of one checkpoint share."""

    def __init__(self, backbone: Backbone, source: Weights) -> None:
        self.net, self.config, self.topology = backbone, backbone.config, backbone.topology
        self.tensors = load = Tensors(source)
        self.embed = load.tensor("embed.weight")
        self.attention = [AttentionWeights(self.config, p, load.at(f"layers.{p.index}.attn")) for p in self.topology.layers]


class Reference:
    """One sequence. `prompt_tokens` fixes the width over which score ties are broken; without it they go to the lower entry."""

    def __init__(
        self, weights: ReferenceWeights, tokens: list[int], memory: Memory | None = None, prompt_tokens: int | None = None
    ) -> None:
        self.weights, self.net, self.tokens, self.memory = weights, weights.net, tokens, memory or Memory()
        self.config, self.topology = weights.config, weights.topology
        self.prompt_tokens = prompt_tokens
        self.selected: dict[tuple[int, int], list[int]] = {}  # (index source, position) -> entries, ascending
        self.pool: dict[int, set[int]] = {}  # position -> entries a Reindex layer may choose

    @property
    def ratios(self) -> dict[int, int]:
        return {plan.index: plan.ratio for plan in self.topology.layers}

    def run(
        self, start: int, stop: int, *, write_from: int = 0, window_from: int = 0, decoder_from: int = 0, decoder_window_from: int = 0
    ) -> Tensor:
        """Positions [start, stop) -> logits of those from `decoder_from` on, [rows, vocab] fp32."""
        with torch.inference_mode():
            positions = list(range(start, stop))
            x = self.weights.embed[self.tokens[start:stop]].unsqueeze(1).repeat(1, self.config.hc_mult, 1)
            pre = torch.tensor([1.0] + [0.0] * (self.config.hc_mult - 1)).repeat(len(positions), 1)
            cut = self.topology.cut
            for layer in self.net.layers[:cut]:
                x, pre = self._layer(layer, x, pre, positions, window_from, write_from)
            first = self.net.layers[cut]
            x = self._engram(first, x, positions)
            self._store(first, first.attention_input(Streams(x, pre)), positions, write_from)
            kept = [i for i, p in enumerate(positions) if p >= decoder_from]
            if not kept:
                return torch.empty((0, self.config.vocab_size))
            x, pre, positions = x[kept], pre[kept], [positions[i] for i in kept]
            for layer in self.net.layers[cut:]:
                x, pre = self._layer(layer, x, pre, positions, decoder_window_from, None if layer is first else write_from)
            return self.net.logits(collapse(x, pre))

    def entries(self, layer: int) -> Tensor:
        """Stored bytes of a source in entry order, [entries, bytes]."""
        rows = self.memory.raw[layer]
        return torch.stack([rows[j] for j in range(len(rows))])

    def _layer(
        self, layer: Layer, x: Tensor, pre: Tensor, positions: list[int], floor: int, write_from: int | None
    ) -> tuple[Tensor, Tensor]:
        """`write_from` None: its entries are stored already, and so is its Engram read done."""
        if write_from is not None:
            x = self._engram(layer, x, positions)
        attn = layer.hc_attn(x)
        seen = layer.attention_input(Streams(x, pre))
        if write_from is not None:
            self._store(layer, seen, positions, write_from)
        y = self._attend(layer.plan.index, seen, positions, floor)
        x = mix(x, y, attn.post, attn.comb)
        ffn = layer.hc_ffn(x)
        seen = rms_norm(collapse(x, attn.pre), layer.ffn_norm, layer.eps)
        y = layer.moe(seen, *layer.moe.route(seen, None))
        return mix(x, y, ffn.post, ffn.comb), ffn.pre

    def _engram(self, layer: Layer, x: Tensor, positions: list[int]) -> Tensor:
        if layer.engram is None or self.net.token_map is None:
            return x
        pad = int(self.net.token_map[self.config.engram_pad_token_id])
        classes = class_history(self.tokens, [], self.net.token_map, pad, max_ngram=self.config.engram_max_ngram_size)
        return layer.engram(x, layer.engram.rows(classes[positions]), None)

    def _store(self, layer: Layer, seen: Tensor, positions: list[int], write_from: int) -> None:
        """Spec §4, §12.1: every group that a row completes becomes an entry, unless it ends below the write floor."""
        plan, w = layer.plan, self.weights.attention[layer.plan.index]
        if not plan.owns_kv:
            return
        m = plan.ratio
        halves = self.memory.half.setdefault(plan.index, {})
        if w.gate is not None:
            k, gate = fp32_linear(seen, w.compress), fp32_linear(seen, w.gate)
            halves.update({p: (k[i], gate[i]) for i, p in enumerate(positions)})
        for i, p in enumerate(positions):
            j = p // m
            if (p + 1) % m or j < write_from // m:
                continue
            if w.gate is None:
                pooled = bf16_linear(seen[i : i + 1], w.compress)
            else:
                ks, gates = zip(*(halves[j * m + t] for t in range(m)), strict=True)
                weight = (torch.stack(gates) - torch.stack(gates).amax(0)).exp()
                total, sums = sum(weight[1:], start=weight[0]), torch.zeros(())
                for t in range(m):
                    sums = sums + ks[t] * (weight[t] / total)
                pooled = sums.to(torch.bfloat16).unsqueeze(0)
            latent = rms_norm(pooled, w.norm, self.config.rms_norm_eps)
            turn = turn_at(torch.tensor([j * m]), w.freqs)
            key = rms_norm(bf16_linear(latent, w.wk), w.k_norm, self.config.rms_norm_eps)
            main, index = formats.main_encode(rotate(latent, turn)), formats.index_encode(rotate(key, turn))
            self.memory.main.setdefault(plan.index, {})[j] = formats.main_decode(*main)[0]
            self.memory.index.setdefault(plan.index, {})[j] = formats.index_decode(*index)[0]
            self.memory.raw.setdefault(plan.index, {})[j] = torch.cat((*main, *index), 1)[0]

    def _attend(self, layer: int, seen: Tensor, positions: list[int], floor: int) -> Tensor:
        """Spec §3: query, window KV, selection, joint softmax, output projection."""
        c, w = self.config, self.weights.attention[layer]
        plan, slots, dim = w.plan, c.sliding_window, c.head_dim
        turn = turn_at(torch.tensor(positions), w.freqs)
        latent = rms_norm(quantised_linear(formats.fp8_round(seen), w.wq_a), w.q_norm, c.rms_norm_eps)
        q = rotate(quantised_linear(formats.fp8_round(latent), w.wq_b).unflatten(-1, (c.num_attention_heads, dim)), turn)
        kv = rotate(rms_norm(quantised_linear(formats.fp8_round(seen), w.wkv), w.kv_norm, c.rms_norm_eps), turn)
        window = self.memory.window.setdefault(layer, {})
        window.update({p: formats.fp8_decode(*formats.fp8_encode(kv[i : i + 1]))[0] for i, p in enumerate(positions)})
        if plan.owns_index:
            self._select(w, seen, latent, turn, positions)
        lists, valid = [], []
        for p in positions:
            # Lists have fixed lengths: slots count in the blocks of 64 even when nothing is in them (§3.4).
            keys = [window[n] for n in range(max(floor, p - slots + 1, 0), p + 1)]
            used = [True] * len(keys) + [False] * (slots - len(keys))
            keys += [torch.zeros(dim)] * (slots - len(keys))
            if plan.index_source is not None and plan.kv_source is not None:
                chosen = self.selected[plan.index_source, p]
                spare = c.index_topk - len(chosen)
                keys += [self.memory.main[plan.kv_source][j] for j in chosen] + [torch.zeros(dim)] * spare
                used += [True] * len(chosen) + [False] * spare
            lists.append(torch.stack(keys))
            valid.append(used)
        out = sparse_attention(q, torch.stack(lists), torch.tensor(valid), w.sink, dim**-0.5)
        turned = rotate(out, turn, inverse=True).unflatten(1, (c.o_groups, -1))
        low = [fp32_linear(turned[:, g].flatten(1), part).to(torch.bfloat16) for g, part in enumerate(w.wo_a)]
        return quantised_linear(formats.fp8_round(torch.cat(low, -1)), w.wo_b)

    def _select(self, w: AttentionWeights, seen: Tensor, latent: Tensor, turn: Turn, positions: list[int]) -> None:
        """Spec §5: score every visible entry, restrict to the candidate pool where there is one, take the best."""
        plan, c = w.plan, self.config
        assert plan.kv_source is not None
        q = rotate(quantised_linear(formats.fp8_round(latent), w.index_q).unflatten(-1, (c.index_n_heads, c.index_head_dim)), turn)
        q = formats.index_decode(*formats.index_encode(q))
        head_weights = bf16_linear(seen, w.index_w) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        stored = self.memory.index.get(plan.kv_source, {})
        for i, p in enumerate(positions):
            visible = (p + 1) // plan.ratio
            wide = self.prompt_tokens is not None and p < self.prompt_tokens
            full = (self.prompt_tokens or 0) // plan.ratio if wide else visible
            scores = torch.full((max(full, visible),), -torch.inf, dtype=torch.bfloat16)
            if visible:
                keys = torch.stack([stored[j] for j in range(visible)])
                dots = (q[i] @ keys.T).to(torch.bfloat16)  # of FP4 values: exact in any order
                total = torch.zeros(visible)
                for part in dots.relu() * head_weights[i].unsqueeze(-1):
                    total = total + part.float()
                scores[:visible] = total.to(torch.bfloat16)
            if plan.makes_candidates:
                self.pool[p] = self._candidates(scores, visible)
            if plan.reads_candidates:
                outside = [j for j in range(len(scores)) if j not in self.pool[p]]
                scores[outside] = -torch.inf
            # A pool smaller than the selection: the choice goes on among the masked scores, and keeps what is visible (§5.4).
            chosen = [j for j in self._best(scores, c.index_topk) if j < visible]
            self.selected[plan.index, p] = sorted(chosen)

    def _candidates(self, scores: Tensor, visible: int) -> set[int]:
        """Spec §5.4: entries of the best blocks, the newest visible one among them."""
        size = self.config.candidate_block_size
        blocks = [scores[b : b + size].max() for b in range(0, len(scores), size)]
        if visible:
            blocks[(visible - 1) // size] = torch.tensor(torch.inf, dtype=scores.dtype)
        if not blocks:
            return set()
        kept = [b for b in self._best(torch.stack(blocks), self.config.candidate_topk_blocks) if blocks[b] > -torch.inf]
        return {b * size + t for b in kept for t in range(size)}

    def _best(self, scores: Tensor, k: int) -> list[int]:
        """The k best columns; among equals the lower one, or what `torch.topk` gives where the reference's ties are wanted."""
        if self.prompt_tokens is not None:
            return list(torch.topk(scores, min(k, len(scores))).indices.tolist())
        values = scores.tolist()
        return sorted(range(len(values)), key=lambda j: (-values[j], j))[:k]


@dataclass
class Net:
    """A loaded network and what its references share."""

    llm: LLM
    weights: ReferenceWeights

    @classmethod
    def load(cls, model: str) -> Net:
        llm = LLM(model, prefill="exact", kv_tokens=8192)
        return cls(llm, ReferenceWeights(llm.engine.runner.backbone, resolve(model).open()))

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Text-like: repeats make n-grams, and scores that tie."""
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, min(self.llm.config.vocab_size - 16, 400), (count,), generator=g)
        ids[5::7] = ids[2 if count > 2 else 0]
        return ids.tolist()
