"""One training step of the demo: the product's network over a batch, its losses, the optimisers, the balance of the experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forebay.model.checkpoint import Weights
from forebay.model.config import ModelConfig
from forebay.model.demo.train.batches import Shape, TrainBatch, all_rows, answer_rows
from forebay.model.demo.train.dense import TrainMemory
from forebay.model.demo.train.masters import MasterLoader, Masters
from forebay.model.demo.train.optimizer import optimizers
from forebay.model.demo.train.stream import Packed
from forebay.model.network import Backbone

LOGITS_AT_ONCE = 16384  # rows of the head computed, and computed again for the gradient, together
EMPHASIS = 10.0  # what a row that predicts a token of an answer counts for in the indexer's loss, where others count 1
BALANCE = 1e-3  # how far a router bias moves per step (spec §8: biases choose, they never weigh)


class _Source:
    """What `Backbone` asks of a checkpoint when its weights are masters."""

    def __init__(self, config: ModelConfig, token_map: Tensor) -> None:
        self.config, self._map = config, token_map

    def token_map(self) -> Tensor:
        return self._map


class Trainer:
    """The network in training.

    Args:
        token_map: [vocab] classes of the tokenizer's entries (`engram_map`).
    """

    def __init__(self, config: ModelConfig, token_map: Tensor, device: torch.device, *, seed: int, lr: float, weight_decay: float) -> None:
        self.config, self.device, self.peak = config, device, lr
        self.masters = Masters(config, seed, device)
        source: Weights = _Source(config, token_map.to(device))  # type: ignore[assignment]  # only its configuration and map are used
        self.network = Backbone(source, device=device, load=MasterLoader(self.masters))
        self.optimizers = optimizers(self.masters.values, lr, weight_decay)
        self._shapes: dict[tuple[int, int], Shape] = {}

    def batch(self, rows: Sequence[Packed], topk: int, *, with_loss: bool = True) -> tuple[TrainBatch, TrainMemory]:
        """Packed rows of one length as what the network takes."""
        self.masters.renew()
        length = len(rows[0].tokens)
        key = (len(rows), length)
        if key not in self._shapes:
            self._shapes[key] = Shape.make(*key, self.config.sliding_window, self.device)
        emphasis = torch.from_numpy(_emphasis(rows)).to(self.device) if with_loss else None
        memory = TrainMemory(self.config, length, topk, emphasis=emphasis)
        tokens = torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64)).to(self.device, non_blocking=True)
        depth = self.config.engram_max_ngram_size - 1
        return self._shapes[key].batch(tokens, memory, self.config.sliding_window, depth), memory

    def hidden(self, batch: TrainBatch, rows: Sequence[Packed], *, bounded: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Final hidden states of the rows that predict a trained token, with those tokens and their weights."""
        window = self.config.sliding_window
        streams = self.network.encode(batch)
        chosen = answer_rows(batch, [row.answers for row in rows], window) if bounded else all_rows(batch)
        hidden = self.network.decode(streams, chosen)
        at, target, weight = _targets(rows, window, bounded=bounded)
        place = torch.from_numpy(at).to(self.device)
        return hidden.index_select(0, place), torch.from_numpy(target).to(self.device), torch.from_numpy(weight).to(self.device)

    def backward(
        self, rows: Sequence[Packed], topk: int, *, bounded: bool, index_weight: float
    ) -> tuple[Tensor, Tensor, int]:
        """Add the gradients of one batch; -> loss, index loss (on the device), trained tokens."""
        batch, memory = self.batch(rows, topk)
        hidden, target, weight = self.hidden(batch, rows, bounded=bounded)
        loss = self._cross_entropy(hidden, target, weight)
        index_loss = memory.index_loss()
        (loss + index_weight * index_loss).backward()
        return loss.detach(), index_loss.detach(), target.numel()

    def update(self, scale: float) -> Tensor:
        """Apply the gradients at `scale` times the peak learning rate; -> norm of the gradients, before it is clipped to 1."""
        parameters = [p for p in self.masters.values.values() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.peak * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._balance()
        return norm

    def _balance(self) -> None:
        """Move the biases of experts that got too much down and of those that got too little up (auxiliary-loss-free balancing)."""
        with torch.no_grad():
            for at, counts in self.masters.loads.items():
                bias = self.masters.values[at.removesuffix("experts") + "gate.bias"]
                load = counts.float()
                bias.add_(BALANCE * torch.sign(load.mean() - load))
                self.masters.values[at.removesuffix("experts") + "gate.bias_vl"].copy_(bias)
        self.masters.loads.clear()

    def _cross_entropy(self, hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        for first in range(0, hidden.shape[0], LOGITS_AT_ONCE):
            part = slice(first, first + LOGITS_AT_ONCE)
            total = total + torch.utils.checkpoint.checkpoint(self._summed, hidden[part], target[part], weight[part], use_reentrant=False)
        return total / weight.sum()

    def _summed(self, hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        losses = functional.cross_entropy(self.network.logits(hidden), target, reduction="none")
        return (losses * weight).sum()

    @torch.no_grad()
    def right(self, rows: Sequence[Packed], topk: int, *, bounded: bool = True) -> tuple[float, float]:
        """(mean loss, share of answers whose every token is the most likely one): what greedy decoding would write."""
        batch, _ = self.batch(rows, topk, with_loss=False)
        hidden, target, weight = self.hidden(batch, rows, bounded=bounded)
        logits = torch.cat([self.network.logits(part) for part in hidden.split(LOGITS_AT_ONCE)])
        losses = functional.cross_entropy(logits, target, reduction="none")
        hits = (logits.argmax(-1) == target).cpu().numpy()
        answers, first = [], 0
        for row in rows:
            for start, stop in row.answers:
                count = stop - max(start, 1)
                answers.append(bool(hits[first : first + count].all()))
                first += count
        return float((losses * weight).sum() / weight.sum()), float(np.mean(answers))


def _emphasis(rows: Sequence[Packed]) -> np.ndarray:
    """[B * L] fp32: 1, and more where a token of an answer is predicted: there the choice of entries decides."""
    out = np.ones((len(rows), len(rows[0].tokens)), dtype=np.float32)
    for line, row in zip(out, rows, strict=True):
        for start, stop in row.answers:
            line[start - 1 : stop - 1] = EMPHASIS
    return out.reshape(-1)


def _targets(rows: Sequence[Packed], window: int, *, bounded: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which decoder rows predict a trained token, those tokens, and their weights."""
    at, target, weight = [], [], []
    base = 0
    for row in rows:
        if not bounded:
            wanted = np.flatnonzero(row.weights[1:] > 0)
            at.append(base + wanted)
            target.append(row.tokens[wanted + 1])
            weight.append(row.weights[wanted + 1])
            base += len(row.tokens)
            continue
        for start, stop in row.answers:
            first = max(0, start - window)
            wanted = np.arange(max(start, 1) - 1, stop - 1)
            at.append(base + wanted - first)
            target.append(row.tokens[wanted + 1])
            weight.append(np.maximum(row.weights[wanted + 1], 1e-6))
            base += stop - first
    return np.concatenate(at), np.concatenate(target).astype(np.int64), np.concatenate(weight).astype(np.float32)
