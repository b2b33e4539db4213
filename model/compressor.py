"""The compressor of a kv source: latents of completed groups, stored as main KV and index key (spec/model.md §4, §5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.model.batch import HalfState
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.loading import Loader
from forebay.model.ops.compress import pool_groups
from forebay.model.ops.linear import bf16_linear, fp32_linear
from forebay.model.ops.rms_norm import rms_norm
from forebay.model.ops.rope import rotate, turn_at


class Compressor:
    """Owned by kv sources only. Ratio 1 has no gate and no state; a larger ratio pools its group with a per-channel softmax."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, load: Loader, freqs: Tensor) -> None:
        self.plan, self.layer, self.ratio, self.eps, self.freqs = plan, plan.index, plan.ratio, config.rms_norm_eps, freqs
        compressor, indexer = load.at("compressor"), load.at("indexer")
        self.wkv = compressor.plain("wkv.weight")
        self.wgate = compressor.plain("wgate.weight") if plan.ratio > 1 else None
        self.norm = compressor.tensor("norm.weight")
        self.wk = indexer.plain("wk.weight")
        self.k_norm = indexer.tensor("k_norm.weight")

    def write(self, x: Tensor, state: HalfState) -> None:
        """Emit the entries that the rows complete. x: [n, D] bf16 attention input. Rows below a span's write floor emit nothing."""
        rows = state.rows
        floor = torch.tensor([s.write_from // self.ratio for s in state.spans], dtype=torch.int64, device=x.device)
        entry = rows.positions // self.ratio
        emits = ((rows.positions + 1) % self.ratio == 0) & (entry >= floor[rows.sequence])
        done = emits.nonzero().flatten()
        if self.wgate is None:
            if done.numel() == 0:
                return
            pooled = bf16_linear(x.index_select(0, done), self.wkv)
        else:
            pooled = self._pool(x, done, state)
            if done.numel() == 0:
                return
        latent = rms_norm(pooled, self.norm, self.eps)
        entries, sequence = entry[done], rows.sequence[done]
        # The first token of the group gives an entry its position.
        turn = turn_at(entries * self.ratio, self.freqs)
        key = rotate(rms_norm(bf16_linear(latent, self.wk), self.k_norm, self.eps), turn)
        main = rotate(latent, turn)
        state.memory.store_entries(self.plan, main, key, sequence, entries, state)
        state.note(f"layer{self.layer}.latent", latent)

    def _pool(self, x: Tensor, done: Tensor, state: HalfState) -> Tensor:
        """Pooled groups that end at rows `done`; tokens of an earlier chunk come from, and the open group's go to, the pending memory."""
        assert self.wgate is not None
        rows, ratio = state.rows, self.ratio
        k, gate = fp32_linear(x, self.wkv), fp32_linear(x, self.wgate)
        starts = torch.tensor(rows.starts, dtype=torch.int64, device=x.device)
        sequence, last = rows.sequence[done], rows.positions[done]
        members_k, members_gate = [], []
        for t in range(ratio):
            back = ratio - 1 - t
            if back == 0:
                members_k.append(k.index_select(0, done))
                members_gate.append(gate.index_select(0, done))
                continue
            here = (last - back) >= starts[sequence]
            row = torch.where(here, done - back, 0)
            stored = state.memory.open_group(self.layer, rows.slots[sequence], t)
            members_k.append(torch.where(here.unsqueeze(-1), k.index_select(0, row), stored[:, 0]))
            members_gate.append(torch.where(here.unsqueeze(-1), gate.index_select(0, row), stored[:, 1]))
        stops = torch.tensor(rows.stops, dtype=torch.int64, device=x.device)
        open_rows = (rows.positions >= stops[rows.sequence] // ratio * ratio).nonzero().flatten()
        if open_rows.numel():
            slot, place = rows.slots[rows.sequence[open_rows]], rows.positions[open_rows] % ratio
            state.memory.keep_group(self.layer, slot, place, torch.stack((k[open_rows], gate[open_rows]), 1))
        return pool_groups(torch.stack(members_k, 1), torch.stack(members_gate, 1))
