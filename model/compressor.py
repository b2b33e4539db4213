"""The compressor of a kv source: latents of completed groups, stored as main KV and index key (spec/model.md §4, §5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.batch import Groups, HalfState
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.loading import Loader
from forebay.model.ops.compress import pool_groups
from forebay.model.ops.linear import bf16_linear, fp32_linear
from forebay.model.ops.rope import turn_at


class Compressor:
    """Owned by kv sources only. Ratio 1 has no gate and no state; a larger ratio pools its group with a per-channel softmax."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Loader, freqs: Tensor) -> None:
        self.plan, self.layer, self.ratio, self.eps, self.freqs = plan, plan.index, plan.ratio, config.rms_norm_eps, freqs
        self.ops = load.ops
        compressor, indexer = load.at("compressor"), load.at("indexer")
        self.wkv = compressor.plain("wkv.weight")
        self.wgate = compressor.plain("wgate.weight") if plan.ratio > 1 else None
        self.norm = compressor.tensor("norm.weight")
        self.wk = indexer.plain("wk.weight")
        self.k_norm = indexer.tensor("k_norm.weight")

    def write(self, x: Tensor, state: HalfState) -> None:
        """Emit the entries that the rows complete. x: [n, D] bf16 attention input. Rows below a span's write floor emit nothing."""
        groups = state.groups(self.ratio)
        if self.wgate is None:
            if not groups.count:
                return
            pooled = bf16_linear(_rows(x, groups.done), self.wkv)
        else:
            k, gate = fp32_linear(x, self.wkv), fp32_linear(x, self.wgate)
            earlier = self._earlier(groups, state)  # first: the tokens of open groups may go where these lie
            self._keep(k, gate, groups, state)
            if not groups.count:
                return
            pooled = self._pool(k, gate, groups, earlier)
        latent = self.ops.rms_norm(pooled, self.norm, self.eps)
        # The first token of the group gives an entry its position.
        whole = self.ratio == 1 and groups.done is None
        turn = state.turn(self.freqs) if whole else turn_at(groups.entries * self.ratio, self.freqs)
        key = self.ops.rotate(self.ops.rms_norm(bf16_linear(self.ops.index_input(latent), self.wk), self.k_norm, self.eps), turn)
        main = self.ops.rotate(latent, turn)
        state.memory.store_entries(self.plan, main, key, groups.sequence, groups.entries, state)
        state.note(f"layer{self.layer}.latent", latent)

    def _earlier(self, groups: Groups, state: HalfState) -> list[Tensor | None]:
        """What the memory has of each place of the completed groups but the last, [k, 2, dim] fp32; None where all tokens are here."""
        slots = state.rows.slots[groups.sequence] if groups.count else None
        found: list[Tensor | None] = []
        for place, (_, here) in enumerate(groups.members):
            found.append(None if here is None or slots is None else state.memory.open_group(self.layer, slots, place))
        return found

    def _pool(self, k: Tensor, gate: Tensor, groups: Groups, earlier: list[Tensor | None]) -> Tensor:
        """Completed groups, pooled, [k, dim] bf16. k, gate: [n, dim] fp32; earlier: `_earlier`."""
        both = torch.stack((k, gate), 1)
        parts = []
        for (row, here), stored in zip(groups.members, earlier, strict=True):
            if row is None:
                assert stored is not None
                parts.append(stored)
            elif here is None or stored is None:
                parts.append(both.index_select(0, row))
            else:
                parts.append(torch.where(here[:, None, None], both.index_select(0, row), stored))
        parts.append(_rows(both, groups.done))
        whole = torch.stack(parts, 1)
        return pool_groups(whole[:, :, 0], whole[:, :, 1])

    def _keep(self, k: Tensor, gate: Tensor, groups: Groups, state: HalfState) -> None:
        """Remember the tokens of groups that stay open."""
        rows, places = groups.open_rows, groups.open_places
        if rows is not None and places is not None:
            slots = state.rows.slots[state.rows.sequence[rows]]
            state.memory.keep_group(self.layer, slots, places, torch.stack((k[rows], gate[rows]), 1))


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)
