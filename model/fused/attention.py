"""Attention of one layer on a GPU (spec/model.md §3 to §5): projections, stores, indexer, sparse attention, output projections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.fused.half import Half
from forebay.model.fused.rows import Scan
from forebay.model.fused.weights import IndexerWeights, LayerWeights
from forebay.model.fused.work import Work, product
from forebay.model.ops.kernels import attend_ops, index_ops, select_ops, store_ops
from forebay.model.ops.kernels.index_ops import Keys
from forebay.model.ops.kernels.store_ops import SourcePlanes


class FusedAttention:
    """All layers' attention; stateless but for sizes."""

    def __init__(self, config: ModelConfig, work: Work) -> None:
        self.config, self.work = config, work
        self.heads, self.dim, self.eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        # A power of two, as at the released sizes, changes no comparison of scores: then nothing is multiplied.
        scale = (config.index_head_dim * config.index_n_heads) ** -0.5
        self.index_scale = None if math.frexp(scale)[0] == 0.5 else scale

    def store_global(self, layer: LayerWeights, x: Tensor, half: Half) -> None:
        """Write the entries that the rows complete. x [n, D] bf16, the layer's input."""
        weights, plan = layer.compressor, layer.plan
        assert weights is not None
        acting = half.rows.acting[plan.ratio]
        if plan.ratio == 1 and acting.numel() == 0:
            return
        source = _short(x, weights.wkv) if plan.ratio == 1 else product(x, weights.wkv)
        pending = None
        if plan.ratio > 1:
            pending = half.memory.pending[:, half.memory.pending_index[plan.index]]
        turn = half.rows.turns[True, plan.ratio]
        planes = _planes(half, plan.index, plan.ratio)
        store_ops.store_entries(
            source, weights.norm, weights.wk, weights.k_norm, turn, self.eps, half.rows.step, acting, half.blocks, planes, pending
        )

    def __call__(self, layer: LayerWeights, x: Tensor, rounded: Tensor, half: Half) -> Tensor:
        """x [n, D] bf16 and the same FP8-rounded -> [n, D] bf16. Entries of these rows must be stored already."""
        config, plan, step, n = self.config, layer.plan, half.rows.step, x.shape[0]
        turn = half.rows.turns[plan.ratio > 0, 1]
        low = self._new(x, n, layer.w_in.codes.shape[0])
        layer.w_in(rounded, low, self.work.meeting)
        low_q, low_kv = low[:, : config.q_lora_rank], low[:, config.q_lora_rank :]
        latent = self._new(x, n, config.q_lora_rank)
        fresh, rings = half.fresh[plan.index - half.first], half.windows[:, plan.index]
        ring = rings if step.alone else None
        store_ops.store_window(low_q, low_kv, layer.q_norm, layer.kv_norm, turn, self.eps, step, fresh, ring, values=latent)
        if layer.indexer is not None:
            half.selected[plan.index] = self.select(plan, layer.indexer, x, latent, half)
            half.note(f"layer{plan.index}.topk", half.selected[plan.index])
        q = self._new(x, n, self.heads * self.dim)
        layer.wq_b(latent, q, self.work.meeting)  # right before attention, which reads all but this ahead of its end
        out = torch.empty_like(q)
        rows = attend_ops.Rows(step.position, step.span, step.start, step.offset, step.floor, step.slot, step.table, turn)
        q, heads = q.view(n, self.heads, self.dim), out.view(n, self.heads, self.dim)
        entries = self._entries(plan, half)
        topk = 0 if entries is None else entries.selected.shape[1]
        split = attend_ops.plan(n, self.heads, self.dim, rings.shape[1], topk)
        parts = attend_ops.borrowed(self.work.meeting, n, self.heads, self.dim, split.splits)
        attend_ops.attend(q, rings, fresh, entries, layer.sink, self.scale, rows, heads, split, parts)
        inner = self._new(x, n, layer.wo_a.codes.shape[0])
        layer.wo_a(out, inner, self.work.meeting, round_output=True)
        y = torch.empty_like(x)
        layer.wo_b(inner, y, self.work.meeting)
        return y

    def select(self, plan: LayerPlan, weights: IndexerWeights, x: Tensor, latent: Tensor, half: Half) -> Tensor:
        """Chosen entries of every row [n, topk] int32; the candidate source also leaves its candidates.

        A row that sees no more entries than fit in its candidates has all its blocks among them, in order, so a layer that reads
        candidates scores them alone, whatever the row's length.
        """
        config, n, topk, rows = self.config, x.shape[0], self.config.index_topk, half.rows
        assert plan.kv_source is not None
        index_heads, index_dim, size = config.index_n_heads, config.index_head_dim, config.candidate_block_size
        raw = self._new(x, n, index_heads * index_dim)
        weights.wq_b(latent, raw, self.work.meeting)
        raw = raw.view(n, index_heads, index_dim)
        q = index_ops.round_queries(raw, rows.turns[True, 1], index_ops.empty_queries(n, index_heads, index_dim, x.device))
        head_weights = _short(x, weights.heads)
        if self.index_scale is not None:
            head_weights *= self.index_scale
        planes = half.memory.sources[plan.kv_source]
        keys = Keys(planes.index_codes, planes.index_scales, rows.step.table)
        visible, chosen = rows.visible[plan.ratio], torch.empty((n, topk), dtype=torch.int32, device=x.device)
        if plan.makes_candidates:
            half.candidates = torch.empty((n, config.candidate_topk_blocks), dtype=torch.int32, device=x.device)
        for scan in (rows.lone if plan.reads_candidates else rows.scans)[plan.ratio]:
            part = slice(scan.first, scan.last)
            args = q[part], head_weights[part], keys, scan.tiles, rows.step.span[part], visible[part]
            if plan.reads_candidates:
                assert half.candidates is not None
                blocks = half.candidates[part]
                scores = self._new(x, scan.last - scan.first, blocks.shape[1] * size)
                index_ops.score_candidates(*args, blocks, size, scores)
                select_ops.top_candidates(scores, blocks, size, topk, chosen[part])
            else:
                self._scan(plan, scan, args, topk, chosen[part], half)
        return chosen

    def _scan(
        self, plan: LayerPlan, scan: Scan, args: tuple[Tensor, Tensor, Keys, index_ops.Tiles, Tensor, Tensor], topk: int, chosen: Tensor,
        half: Half,
    ) -> None:  # fmt: skip
        """Score all entries, choose among them and, at the candidate source, among their blocks."""
        count, size, visible = scan.last - scan.first, self.config.candidate_block_size, args[5]
        columns = max(scan.columns, size)
        scores, maxima = self._new(args[0], count, columns), None
        if plan.makes_candidates:
            maxima = self._new(args[0], count, -(-columns // size))
        index_ops.score_keys(*args, scores, maxima=maxima, size=size)
        select_ops.top_columns(scores, visible, topk, chosen)
        if maxima is not None:
            assert half.candidates is not None
            candidates = half.candidates[scan.first : scan.last]
            select_ops.top_columns(maxima, visible, candidates.shape[1], candidates, unit=size)

    def _entries(self, plan: LayerPlan, half: Half) -> attend_ops.Entries | None:
        if plan.kv_source is None or plan.index_source is None:
            return None
        planes = _planes(half, plan.kv_source, plan.ratio)
        return attend_ops.Entries(half.selected[plan.index_source], half.blocks, planes.per_block, planes.main_codes, planes.main_scales)

    def _new(self, like: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=like.device)


def _short(x: Tensor, weight: Tensor) -> Tensor:
    """`product`, rounded to bf16."""
    return torch.mm(x, weight.T) if x.is_cuda else product(x, weight).bfloat16()


def _planes(half: Half, source: int, ratio: int) -> SourcePlanes:
    """Where a source's entries lie in a block: its planes are views of the blocks, and begin in block 0 where they begin in every block."""
    views, base = half.memory.sources[source], int(half.blocks.storage_offset())
    planes = views.main_codes, views.main_scales, views.index_codes, views.index_scales
    return SourcePlanes(ratio, views.main_codes.shape[1], *(int(plane.storage_offset()) - base for plane in planes))
