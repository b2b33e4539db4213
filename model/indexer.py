"""The indexer of an index source: which entries each row attends to (spec/model.md §5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.model.batch import HalfState, Numbers, host_rows
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.loading import Loader
from forebay.model.memory import StoredMemory
from forebay.model.ops.index_score import index_scores
from forebay.model.ops.linear import bf16_linear, quantised_linear
from forebay.model.ops.rope import Turn
from forebay.model.ops.select import block_maxima, select_top

Flags = NDArray[np.bool_]
# A tile of scored rows: their numbers (None is all rows), scores [n, m] bf16 with -inf where a column may not be chosen, the entry of each
# column [n, m] (None where column i is entry i), and the full-row widths of `select_top`.
Scored = tuple[Tensor | None, Tensor, Tensor | None, list[int | None]]

SCAN_BYTES = 32 << 20  # fp32 working memory of one scoring tile


class Indexer:
    """Queries and head weights of one layer; the keys belong to its kv source."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Loader) -> None:
        assert plan.kv_source is not None
        self.layer, self.source, self.ratio = plan.index, plan.kv_source, plan.ratio
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.makes, self.reads = plan.makes_candidates, plan.reads_candidates
        self.pool, self.size = config.candidate_topk_blocks, config.candidate_block_size
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.ops, self.wq_b = load.ops, load.fp8("wq_b")
        self.weights_proj = load.plain("weights_proj.weight")

    def queries(self, x: Tensor, latent: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Index queries [n, heads, dim], FP4 values, and the weights of the heads [n, heads] bf16; arguments as of `select`."""
        q = quantised_linear(latent, self.wq_b).unflatten(-1, (self.heads, self.dim))
        return self.ops.index_round(self.ops.rotate(q, turn)), bf16_linear(x, self.weights_proj) * self.scale

    def select(self, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        """Chosen entries of every row, [n, topk] int64 ascending, -1 filled. At the candidate source also sets `state.candidates`.

        Args: x [n, D] bf16 attention input; latent [n, q_lora] fp32, the FP8-rounded query latent; turn, the rotation of each row.
        """
        seen = (host_rows(state.rows)[1] + 1) // self.ratio
        visible = torch.from_numpy(seen).to(x.device)
        # Everything visible is chosen while it fits, without looking at a single key.
        ramp = torch.arange(self.topk, device=x.device)
        chosen = torch.where(ramp < visible.unsqueeze(1), ramp, -1)
        scored = seen > self.topk
        if self.makes:
            state.restricted = torch.from_numpy(seen > self.pool * self.size)
            state.candidates = torch.full((len(seen), self.pool), -1, dtype=torch.int64, device=x.device)
        restricted = state.restricted.numpy() if state.restricted is not None and (self.makes or self.reads) else np.zeros_like(scored)
        scored |= restricted
        if scored.any():
            q, weights = self.queries(x, latent, turn)
            for part, scores, columns, widths in self._scores(seen, scored, restricted if self.reads else None, q, weights, visible, state):
                rows_seen = _rows(visible, part)
                if self.makes:
                    self._candidates(part, scores, rows_seen, widths, state)
                best = select_top(scores, self.topk, widths, columns, None if columns is None else rows_seen)
                if columns is None and self.pool * self.size < self.topk:  # rows scored for their candidates only choose all they see
                    best = torch.where((rows_seen > self.topk).unsqueeze(1), best, _rows(chosen, part))
                chosen = best if part is None else chosen.index_copy_(0, part, best)
        state.note(f"layer{self.layer}.topk", chosen)
        return chosen

    def _scores(
        self,
        seen: Numbers,
        scored: Flags,
        restricted: Flags | None,
        q: Tensor,
        weights: Tensor,
        visible: Tensor,
        state: HalfState,
    ) -> Iterator[Scored]:
        """Tiles of scored rows. `seen` is `visible` on the host; `restricted`, rows that may only choose among their candidates."""
        dense = scored if restricted is None else scored & ~restricted
        if restricted is not None and (narrow := np.flatnonzero(scored & restricted)).size:
            yield from self._restricted(torch.from_numpy(narrow).to(q.device), q, weights, visible, state)
        lone: list[int] = []
        for number, (offset, length) in enumerate(zip(state.rows.offsets, state.rows.lengths, strict=True)):
            if length == 1:
                if dense[offset]:
                    lone.append(offset)
                continue
            part = np.flatnonzero(dense[offset : offset + length]) + offset
            if part.size:
                yield from self._shared(number, torch.from_numpy(part).to(q.device), q, weights, visible, state)
        if lone:
            yield from self._separate(seen, lone, q, weights, visible, state)

    def _shared(
        self, number: int, part: Tensor, q: Tensor, weights: Tensor, visible: Tensor, state: HalfState
    ) -> Iterator[Scored]:
        """Rows of one sequence read its keys once."""
        top = int(visible[part[-1]])
        entries = torch.arange(top, device=q.device).unsqueeze(0)
        keys = self._keys(torch.tensor([number], device=q.device), entries, state)[0]
        step = max(1, SCAN_BYTES // (4 * self.heads * top))
        for first in range(0, part.numel(), step):
            rows = part[first : first + step]
            scores = index_scores(q[rows], weights[rows], keys)
            scores = scores.masked_fill(entries >= visible[rows].unsqueeze(1), -torch.inf)
            yield rows, scores, None, self._widths(rows, visible, state)

    def _separate(
        self, seen: Numbers, part: list[int], q: Tensor, weights: Tensor, visible: Tensor, state: HalfState
    ) -> Iterator[Scored]:
        """Lone rows (decode), each with its own keys; rows of like length share a padded tile."""
        groups: dict[int, list[int]] = {}
        for row in part:
            groups.setdefault((int(seen[row]) - 1).bit_length(), []).append(row)
        for members in groups.values():
            step = max(1, SCAN_BYTES // (4 * int(seen[members].max()) * (self.heads + self.dim)))
            for first in range(0, len(members), step):
                tile = members[first : first + step]
                rows = None if len(tile) == len(seen) else torch.tensor(tile, dtype=torch.int64, device=q.device)
                top = int(seen[tile].max())
                hidden, entries = None, torch.arange(top, device=q.device).expand(len(tile), top)
                if len(tile) > 1:
                    hidden = entries >= _rows(visible, rows).unsqueeze(1)
                    entries = entries.masked_fill(hidden, -1)
                keys = self._keys(_rows(state.rows.sequence, rows), entries, state)
                scores = index_scores(_rows(q, rows), _rows(weights, rows), keys)
                yield rows, scores if hidden is None else scores.masked_fill_(hidden, -torch.inf), None, self._widths(rows, visible, state)

    def _restricted(
        self, part: Tensor, q: Tensor, weights: Tensor, visible: Tensor, state: HalfState
    ) -> Iterator[Scored]:
        """Rows that may only choose inside their candidate blocks: those entries alone are read."""
        assert state.candidates is not None
        width = self.pool * self.size
        step = max(1, SCAN_BYTES // (4 * width * (self.heads + self.dim)))
        for first in range(0, part.numel(), step):
            rows = None if part.numel() == visible.numel() <= step else part[first : first + step]
            blocks = _rows(state.candidates, rows)
            entries = (blocks.unsqueeze(-1) * self.size + torch.arange(self.size, device=q.device)).flatten(1)
            bad = (entries < 0) | (entries >= _rows(visible, rows).unsqueeze(1))  # of an unused block, -1, all entries are below 0
            entries = entries.masked_fill(bad, -1)
            keys = self._keys(_rows(state.rows.sequence, rows), entries, state)
            scores = index_scores(_rows(q, rows), _rows(weights, rows), keys).masked_fill_(bad, -torch.inf)
            yield rows, scores, entries, self._widths(rows, visible, state)

    def _keys(self, sequence: Tensor, entries: Tensor, state: HalfState) -> Tensor:
        """entries [n, m] of sequences [n] -> [n, m, dim] fp32."""
        return cast(StoredMemory, state.memory).index_keys(self.source, self.ratio, sequence, entries, state)

    def _widths(self, rows: Tensor | None, visible: Tensor, state: HalfState) -> list[int | None]:
        """How each row's ties are settled. The reference's score row spans the whole prompt, and for a generated token what is visible."""
        if all(span.tie_tokens is None for span in state.spans):
            return [None] * (visible.numel() if rows is None else rows.numel())
        positions, sequence = _rows(state.rows.positions, rows).tolist(), _rows(state.rows.sequence, rows).tolist()
        out: list[int | None] = []
        for position, number, seen in zip(positions, sequence, _rows(visible, rows).tolist(), strict=True):
            prompt = state.spans[number].tie_tokens
            out.append(None if prompt is None else prompt // self.ratio if position < prompt else seen)
        return out

    def _candidates(self, part: Tensor | None, scores: Tensor, visible: Tensor, widths: list[int | None], state: HalfState) -> None:
        """Best blocks of each row, the newest visible one pinned; never a block without a visible entry."""
        assert state.candidates is not None
        best = block_maxima(scores, self.size)
        best.scatter_(1, ((visible - 1) // self.size).unsqueeze(1), torch.inf)
        block_widths = [None if width is None else -(-width // self.size) for width in widths]
        found = select_top(best, self.pool, block_widths)
        state.candidates = found if part is None else state.candidates.index_copy_(0, part, found)


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Rows of x; None is all of them."""
    return x if rows is None else x.index_select(0, rows)
