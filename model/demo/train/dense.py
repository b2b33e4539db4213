"""A differentiable memory for training: whole sequences, rounded as the served memory rounds them, with the indexer's loss.

Selection itself has no gradient. The indexer learns from what attention does: for each group of layers that share a selected list, the
attention mass of all heads on the listed entries is the target of the softmax over their index scores (the recipe of DeepSeek's sparse
attention; here the mass is that of every layer of the group, and for the source of candidates also that of the layers which may only
choose among them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from forebay.model.batch import HalfState
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.demo.train import kernels
from forebay.model.demo.train.batches import TrainRows
from forebay.model.indexer import Indexer
from forebay.model.memory import Window
from forebay.model.ops.rope import Turn

SCORES_AT_ONCE = 1 << 29  # index score products held at once
LIST_STEP = 64  # what the kernels want the length of a list to be a multiple of
SCORED_WHOLE = 2048  # entries of a sequence up to which all scores keep their gradient; beyond, the chosen ones are computed again


@dataclass
class Chosen:
    """One selected list with what its loss needs.

    Attributes:
        scores: [n, topk] with gradient, -inf unused. mass: [n, topk], attention of all heads of the layers that share the list.
        emphasis: [n], what a row counts for.
        scores_of: the same index's scores of other entries, [n, k] int32 rows of the stored entries -> [n, k] with gradient.
        readers: layers that choose among this index's candidates: what they attend to, it must find.
    """

    scores: Tensor
    mass: Tensor
    emphasis: Tensor
    scores_of: Callable[[Tensor], Tensor]
    readers: list[int] = field(default_factory=list)


class TrainMemory:
    """The memory of one forward pass over B sequences of L tokens; make a new one for each.

    Args:
        topk: entries per row, a multiple of 64; the configuration's in serving, more while training begins.
        emphasis: [B * L] fp32, what each row counts for in `index_loss`; None for no such loss.
    """

    def __init__(self, config: ModelConfig, length: int, topk: int, emphasis: Tensor | None = None) -> None:
        self.config, self.length, self.topk = config, length, topk
        self.emphasis, self.with_loss = emphasis, emphasis is not None
        self.main: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.chosen: dict[int, Chosen] = {}

    def window(self, layer: int, kv: Tensor, state: HalfState) -> Window:
        return Window(kernels.fp8_round(kv), ())

    def keep_window(self, layer: int, window: Window, state: HalfState) -> None:
        pass

    def store_entries(self, plan: LayerPlan, main: Tensor, key: Tensor, sequence: Tensor, entries: Tensor, state: HalfState) -> None:
        """Entries come complete and in order, [B * L/ratio, …]."""
        assert main.shape[0] == len(state.spans) * (self.length // plan.ratio)
        self.main[plan.index], self.keys[plan.index] = kernels.main_round(main), kernels.index_round(key)

    def open_group(self, layer: int, slots: Tensor, place: int) -> Tensor:
        """Sequences begin with a group."""
        return torch.zeros((slots.numel(), 2, self.config.head_dim), device=slots.device)

    def keep_group(self, layer: int, slots: Tensor, places: Tensor, values: Tensor) -> None:
        pass

    def choose(self, indexer: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        """Rows of the stored entries each row attends to: [n, topk or less] int32 into all sequences' entries, -1 unused, in no order."""
        q, weights = indexer.queries(x.detach(), latent.detach(), turn)
        q, keys = q.to(torch.bfloat16), self.keys[indexer.source]
        count = self.length // indexer.ratio
        base = state.tables[state.rows.sequence, 0] * count
        visible = (state.rows.positions + 1) // indexer.ratio
        if indexer.makes:
            state.restricted = visible > indexer.pool * indexer.size
        whole = count <= SCORED_WHOLE
        width = min(self.topk, -(-count // LIST_STEP) * LIST_STEP)
        found = torch.full((x.shape[0], width), -1, dtype=torch.int64, device=x.device)
        raws = []
        for part, owners in self._tiles(count, indexer.heads, state):
            own = keys.view(-1, count, keys.shape[1])[owners]
            with torch.set_grad_enabled(whole and self.with_loss and torch.is_grad_enabled()):
                raw = _scores(q[part], weights[part], own)
            scores = raw.detach().masked_fill(torch.arange(count, device=x.device) >= visible[part].unsqueeze(1), -torch.inf)
            if indexer.makes and state.restricted is not None:
                self._candidates(indexer, scores, visible[part], part, state)
            if indexer.reads and state.candidates is not None and state.restricted is not None:
                scores = self._restrict(indexer, scores, part, state)
            if count <= width:
                found[part, :count] = torch.where(scores > -torch.inf, torch.arange(count, device=x.device), -1)
            else:
                best = torch.topk(scores, width, dim=-1, sorted=False)
                found[part] = best.indices.masked_fill(best.values == -torch.inf, -1)
            if whole and self.with_loss:
                raws.append(raw)
        flat = torch.where(found >= 0, found + base.unsqueeze(1), -1).to(torch.int32)
        if self.emphasis is not None:
            every = torch.cat(raws) if whole else None

            def scores_of(entries: Tensor) -> Tensor:
                if every is not None:
                    return every.gather(1, (entries - base.unsqueeze(1)).clamp(min=0))
                return _listed_scores(q, weights, keys, entries)

            rows = cast(TrainRows, state.rows)
            emphasis = self.emphasis if rows.flat is None else self.emphasis[rows.flat]
            mass = torch.zeros(flat.shape, dtype=torch.float32, device=x.device)
            self.chosen[indexer.layer] = Chosen(scores_of(flat).masked_fill(flat < 0, -torch.inf), mass, emphasis, scores_of)
            if indexer.reads:
                self._read(indexer, flat)
        return flat

    def attend(self, q: Tensor, window: Window, plan: LayerPlan, sink: Tensor, scale: float, state: HalfState) -> Tensor:
        rows = cast(TrainRows, state.rows)
        entries = entry_index = None
        if plan.kv_source is not None and plan.index_source is not None:
            entries, entry_index = self.main[plan.kv_source], state.selected[plan.index_source]
        out, mass = kernels.gathered_attention(
            q, window.keys, rows.near_start, rows.near_count, entries, entry_index, sink, scale, with_mass=self.with_loss
        )
        if mass is not None and plan.index_source in self.chosen:
            self.chosen[plan.index_source].mass += mass.detach()
        return out

    def _read(self, indexer: Indexer, flat: Tensor) -> None:
        """Let the candidate source answer for what this layer attends to: its scores of the entries chosen here."""
        source = self.config.candidate_source_layer_id
        if source in self.chosen:
            owner = self.chosen[source]
            owner.readers.append(indexer.layer)
            owner.scores = torch.cat((owner.scores, owner.scores_of(flat).masked_fill(flat < 0, -torch.inf)), 1)

    def index_loss(self) -> Tensor:
        """Divergence of the index scores from the attention mass, mean over rows and lists; rows weigh by emphasis and mass.

        The list of the candidate source is joined with those of the layers that choose among its candidates. An entry of both stands there
        twice with a part of the mass each, so its score is asked to be lower than its whole mass would have it, by log 2 at most.
        """
        losses = []
        for chosen in self.chosen.values():
            mass = torch.cat((chosen.mass, *(self.chosen[layer].mass for layer in chosen.readers)), 1)
            total = mass.sum(-1, keepdim=True)
            target = mass / (total + 1e-6)
            logs = torch.log_softmax(chosen.scores.float().masked_fill(chosen.scores == -torch.inf, -1e9), -1)
            weight = chosen.emphasis * ((total.squeeze(-1) / self.config.num_attention_heads).clamp(max=1.0) + 0.05)
            each = (target * (target.clamp_min(1e-9).log() - logs.clamp(min=-50.0))).sum(-1)
            losses.append((each * weight).sum() / weight.sum())
        return torch.stack(losses).mean()

    def _tiles(self, count: int, heads: int, state: HalfState) -> Iterator[tuple[slice, slice]]:
        """Rows few enough to score at once, of whole sequences or of a part of one: (rows, sequences)."""
        rows = cast(TrainRows, state.rows)
        at_once = SCORES_AT_ONCE // (heads * count)
        if rows.flat is None and at_once >= self.length:
            step, total = at_once // self.length, len(rows.lengths)
            for first in range(0, total, step):
                last = min(first + step, total)
                yield slice(first * self.length, last * self.length), slice(first, last)
            return
        runs: list[tuple[int, int, int]] = []  # of spans that follow each other in one sequence: first row, rows, sequence
        for offset, length, owner in zip(rows.offsets, rows.lengths, state.tables[:, 0].tolist(), strict=True):
            if runs and runs[-1][2] == owner:
                runs[-1] = (runs[-1][0], runs[-1][1] + length, owner)
            else:
                runs.append((offset, length, owner))
        step = max(64, at_once)
        for offset, length, owner in runs:
            for first in range(0, length, step):
                yield slice(offset + first, offset + min(first + step, length)), slice(owner, owner + 1)

    def _candidates(self, indexer: Indexer, scores: Tensor, visible: Tensor, part: slice, state: HalfState) -> None:
        blocks = -(-scores.shape[1] // indexer.size)
        padded = torch.nn.functional.pad(scores, (0, blocks * indexer.size - scores.shape[1]), value=-torch.inf)
        best = padded.unflatten(1, (-1, indexer.size)).amax(-1)
        best.scatter_(1, ((visible - 1).clamp(min=0) // indexer.size).unsqueeze(1), torch.inf)
        if state.candidates is None:
            state.candidates = torch.zeros((state.rows.rows, blocks), dtype=torch.bool, device=scores.device)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, torch.topk(best, min(indexer.pool, blocks), dim=-1, sorted=False).indices, True)
        state.candidates[part] = allowed

    def _restrict(self, indexer: Indexer, scores: Tensor, part: slice, state: HalfState) -> Tensor:
        assert state.candidates is not None
        assert state.restricted is not None
        allowed = state.candidates[part] | ~state.restricted[part].unsqueeze(1)
        return scores.masked_fill(~allowed.repeat_interleave(indexer.size, 1)[:, : scores.shape[1]], -torch.inf)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [s*r, heads, dim], weights [s*r, heads], keys [s, m, dim] of s sequences -> [s*r, m] bf16 (spec §5.2)."""
    sequences, entries, dim = keys.shape
    dots = q.reshape(sequences, -1, dim) @ keys.transpose(1, 2)  # [s, r*heads, m]
    return (torch.relu(dots.view(q.shape[0], -1, entries)) * weights.unsqueeze(-1)).sum(1)


def _listed_scores(q: Tensor, weights: Tensor, keys: Tensor, index: Tensor) -> Tensor:
    """Scores of the listed entries only, with gradient: [n, topk]; any number where unused."""
    listed = keys.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, -1)
    dots = torch.bmm(q, listed.transpose(1, 2))
    return (torch.relu(dots) * weights.unsqueeze(-1)).sum(1)
