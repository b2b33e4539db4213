"""REF: a slow plain forward pass of one sequence, to hold the network against.

Written from spec/model.md §2-§5 and §12.1 over the layers' own weights and the elementary operations: no paging, no rings, no batching, no
selection shortcuts, no tiles. What a row may see is decided position by position; what was stored is kept in dictionaries. It has the
floors of bounded replay, so it imitates a resume and a bounded prompt too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.model.attention import Attention
from forebay.model.engram_map import class_history
from forebay.model.network import Backbone, Layer, Streams
from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import collapse, mix
from forebay.model.ops.linear import bf16_linear, fp32_linear, quantised_linear
from forebay.model.ops.rms_norm import rms_norm
from forebay.model.ops.rope import rope_table, rotate
from forebay.model.ops.sparse_attention import sparse_attention


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


class Reference:
    """One sequence. `prompt_tokens` fixes the width over which score ties are broken, as in the network."""

    def __init__(self, backbone: Backbone, tokens: list[int], memory: Memory | None = None, prompt_tokens: int | None = None) -> None:
        self.net, self.tokens, self.memory = backbone, tokens, memory or Memory()
        self.config, self.topology = backbone.config, backbone.topology
        self.prompt_tokens = len(tokens) if prompt_tokens is None else prompt_tokens
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
            x = self.net.embed[self.tokens[start:stop]].unsqueeze(1).repeat(1, self.config.hc_mult, 1)
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
        y = self._attend(layer.attention, seen, positions, floor)
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
        compressor, m = layer.attention.compressor, layer.plan.ratio
        if compressor is None:
            return
        halves = self.memory.half.setdefault(layer.plan.index, {})
        if compressor.wgate is not None:
            k, gate = fp32_linear(seen, compressor.wkv), fp32_linear(seen, compressor.wgate)
            halves.update({p: (k[i], gate[i]) for i, p in enumerate(positions)})
        for i, p in enumerate(positions):
            j = p // m
            if (p + 1) % m or j < write_from // m:
                continue
            if compressor.wgate is None:
                pooled = bf16_linear(seen[i : i + 1], compressor.wkv)
            else:
                ks, gates = zip(*(halves[j * m + t] for t in range(m)), strict=True)
                weight = (torch.stack(gates) - torch.stack(gates).amax(0)).exp()
                total, sums = weight[0], torch.zeros(())
                for t in range(1, m):
                    total = total + weight[t]
                for t in range(m):
                    sums = sums + ks[t] * (weight[t] / total)
                pooled = sums.to(torch.bfloat16).unsqueeze(0)
            self._put(layer.plan.index, j, rms_norm(pooled, compressor.norm, layer.eps), layer, m)

    def _put(self, source: int, j: int, latent: Tensor, layer: Layer, m: int) -> None:
        compressor = layer.attention.compressor
        assert compressor is not None
        cos, sin = rope_table(torch.tensor([j * m]), layer.attention.freqs)
        main = formats.main_encode(rotate(latent, cos, sin))
        key = formats.index_encode(rotate(rms_norm(bf16_linear(latent, compressor.wk), compressor.k_norm, layer.eps), cos, sin))
        self.memory.main.setdefault(source, {})[j] = formats.main_decode(*main)[0]
        self.memory.index.setdefault(source, {})[j] = formats.index_decode(*key)[0]
        self.memory.raw.setdefault(source, {})[j] = torch.cat((*main, *key), 1)[0]

    def _attend(self, a: Attention, seen: Tensor, positions: list[int], floor: int) -> Tensor:
        """Spec §3: query, window KV, selection, joint softmax, output projection."""
        plan, width = a.plan, self.config.sliding_window
        cos, sin = rope_table(torch.tensor(positions), a.freqs)
        latent = rms_norm(quantised_linear(formats.fp8_round(seen), a.wq_a), a.q_norm, a.eps)
        q = rotate(quantised_linear(formats.fp8_round(latent), a.wq_b).unflatten(-1, (a.heads, a.dim)), cos, sin)
        kv = rotate(rms_norm(quantised_linear(formats.fp8_round(seen), a.wkv), a.kv_norm, a.eps), cos, sin)
        window = self.memory.window.setdefault(plan.index, {})
        window.update({p: formats.fp8_decode(*formats.fp8_encode(kv[i : i + 1]))[0] for i, p in enumerate(positions)})
        if a.indexer is not None:
            self._select(a, seen, latent, cos, sin, positions)
        out = []
        for i, p in enumerate(positions):
            # Lists have fixed lengths: slots count in the blocks of 64 even when nothing is in them (§3.4).
            keys = [window[n] for n in range(max(floor, p - width + 1, 0), p + 1)]
            lists = [keys + [torch.zeros(a.dim)] * (width - len(keys))]
            valid = [True] * len(keys) + [False] * (width - len(keys))
            if plan.index_source is not None and plan.kv_source is not None:
                chosen = self.selected[plan.index_source, p]
                lists.append([self.memory.main[plan.kv_source][j] for j in chosen] + [torch.zeros(a.dim)] * (a.topk - len(chosen)))
                valid += [True] * len(chosen) + [False] * (a.topk - len(chosen))
            rows = torch.stack([row for part in lists for row in part]).unsqueeze(0)
            out.append(sparse_attention(q[i : i + 1], rows, torch.tensor([valid]), a.sink, a.scale))
        turned = rotate(torch.cat(out), cos, sin, inverse=True).unflatten(1, (a.groups, -1))
        low = [fp32_linear(turned[:, g].flatten(1), w).to(torch.bfloat16) for g, w in enumerate(a.wo_a)]
        return quantised_linear(formats.fp8_round(torch.cat(low, -1)), a.wo_b)

    def _select(self, a: Attention, seen: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, positions: list[int]) -> None:
        """Spec §5: score every visible entry, restrict to the candidate pool where there is one, take the best."""
        plan, indexer, c = a.plan, a.indexer, self.config
        assert indexer is not None and plan.kv_source is not None
        q = rotate(quantised_linear(formats.fp8_round(latent), indexer.wq_b).unflatten(-1, (c.index_n_heads, c.index_head_dim)), cos, sin)
        q = formats.index_decode(*formats.index_encode(q))
        w = bf16_linear(seen, indexer.weights_proj) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        stored = self.memory.index.get(plan.kv_source, {})
        for i, p in enumerate(positions):
            visible = (p + 1) // plan.ratio
            full = self.prompt_tokens // plan.ratio if p < self.prompt_tokens else visible
            scores = torch.full((max(full, visible),), -torch.inf, dtype=torch.bfloat16)
            for j in range(visible):
                dots = (q[i] * stored[j]).sum(-1).to(torch.bfloat16)  # FP4 values: the sum is exact in any order
                total = torch.zeros(())
                for part in dots.relu() * w[i]:
                    total = total + part.float()
                scores[j] = total.to(torch.bfloat16)
            if plan.makes_candidates:
                self.pool[p] = self._candidates(scores, visible)
            if plan.reads_candidates:
                outside = [j for j in range(len(scores)) if j not in self.pool[p]]
                scores[outside] = -torch.inf
            best = torch.topk(scores, min(c.index_topk, len(scores)))
            chosen = [int(j) for j, s in zip(best.indices, best.values, strict=True) if s > -torch.inf]
            self.selected[plan.index, p] = sorted(chosen)

    def _candidates(self, scores: Tensor, visible: int) -> set[int]:
        """Spec §5.4: entries of the best blocks, the newest visible one among them."""
        size = self.config.candidate_block_size
        blocks = [scores[b : b + size].max() for b in range(0, len(scores), size)]
        if visible:
            blocks[(visible - 1) // size] = torch.tensor(torch.inf, dtype=scores.dtype)
        best = torch.topk(torch.stack(blocks), min(self.config.candidate_topk_blocks, len(blocks))) if blocks else None
        if best is None:
            return set()
        kept = [int(b) for b, s in zip(best.indices, best.values, strict=True) if s > -torch.inf]
        return {b * size + t for b in kept for t in range(size)}
