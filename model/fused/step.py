"""A decode step of a fixed number of rows, captured once as a CUDA graph and replayed for every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forebay.model.batch import Span
from forebay.model.fused.half import Half
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.rows import HalfRows, Scan
from forebay.model.memory import CacheMemory
from forebay.model.ops.kernels.index_ops import Tiles
from forebay.model.ops.kernels.store_ops import Step

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
NULL_BLOCK = NULL_SLOT = 0  # of padded rows; the pools never give these out

_FIELDS = ("span", "position", "stop", "slot", "floor", "decoder_floor", "write_from", "token")
_PADDING = {"span": -1, "position": -1, "stop": 0, "slot": NULL_SLOT, "floor": 0, "decoder_floor": 0, "write_from": 0, "token": 0}


@dataclass(frozen=True)
class DecodeRow:
    """One generated token to run: its id, those before it, nearest first (-1 before the beginning), and where its sequence lives."""

    token: int
    lookback: Sequence[int]
    span: Span


class DecodeStep:
    """Rows of a bucket on the device; a batch of fewer is padded with rows that read and write nothing of anybody's.

    Everything that a step needs from the host is a few integers a row, sent in one copy from pinned memory, and the block tables, of which
    only what changed is sent. On a CPU (in tests) the same code runs without a graph.
    """

    def __init__(self, backbone: FusedBackbone, memory: CacheMemory, rows: int, max_blocks: int, pool: object | None = None) -> None:
        """max_blocks: of the longest sequence. pool: memory that graphs share, of `torch.cuda.graph_pool_handle`."""
        self.backbone, self.memory, self.rows, self.max_blocks = backbone, memory, rows, max_blocks
        self.device, cuda = backbone.device, backbone.device.type == "cuda"
        self.depth = max(0, backbone.config.engram_max_ngram_size - 1)
        self._host = torch.zeros((len(_FIELDS) + self.depth, rows), dtype=torch.int32, pin_memory=cuda)
        self._sent = torch.zeros_like(self._host, device=self.device)
        self._line = torch.zeros(max_blocks, dtype=torch.int32, pin_memory=cuda)
        self.tables = torch.full((rows, max_blocks), NULL_BLOCK, dtype=torch.int32, device=self.device)
        self._known: list[list[int]] = [[] for _ in range(rows)]  # what `tables` holds
        self._numbers = torch.arange(rows, dtype=torch.int32, device=self.device)
        self.engram: dict[int, Tensor] = {}
        for layer in backbone.layers:
            buffer = None if layer.engram is None else backbone.engram.buffer(layer.engram, rows)
            if buffer is not None:
                self.engram[layer.plan.index] = buffer
        self._stage([])
        self._send()
        self.encoder_fresh: Tensor | None = None
        self.decoder_fresh: Tensor | None = None
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        if cuda:
            self._capture(pool)

    @torch.inference_mode()
    def _capture(self, pool: object | None) -> None:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._forward()  # compiles what is not compiled yet
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):  # type: ignore[arg-type]
            self._forward()

    def run(self, rows: Sequence[DecodeRow], tokens: Tensor | None = None) -> Tensor:
        """One step -> logits [n, vocab] fp32; overwritten by the next run.

        Args: tokens, [n] int64 on the device: ids that the host does not know yet, instead of those of `rows`.
        """
        self._stage(rows)
        self._send()
        if tokens is not None:
            self._sent[_FIELDS.index("token"), : len(rows)] = tokens
        if self.engram:
            self._fetch(rows)
        self.replay()
        assert self.logits is not None
        return self.logits[: len(rows)]

    def replay(self) -> None:
        """The step itself, over what was sent last."""
        if self.graph is not None:
            self.graph.replay()
        else:
            with torch.inference_mode():
                self._forward()

    def captured(self, row: int, dim: int) -> tuple[Tensor, Tensor]:
        """The row's window bytes of every layer: codes [layers, head_dim] and scales [layers, head_dim / 32]."""
        assert self.encoder_fresh is not None and self.decoder_fresh is not None
        both = torch.cat((self.encoder_fresh[:, row], self.decoder_fresh[:, row]))
        return both[:, :dim], both[:, dim:]

    def _stage(self, rows: Sequence[DecodeRow]) -> None:
        host = self._host.numpy()
        for i, name in enumerate(_FIELDS):
            host[i] = _PADDING[name]
        host[len(_FIELDS) :] = -1
        for i, row in enumerate(rows):
            s = row.span
            host[: len(_FIELDS), i] = (
                i, s.start, s.stop, s.slot, max(0, s.window_from), max(0, s.decoder_window_from), s.write_from, row.token,
            )  # fmt: skip
            host[len(_FIELDS) :, i] = row.lookback
            self._table(i, s.blocks)

    def _table(self, row: int, blocks: Sequence[int]) -> None:
        """Send what is new in a row's block table: nothing, or one block, in most steps."""
        known = self._known[row]
        same = len(known) if len(blocks) >= len(known) and list(blocks[: len(known)]) == known else 0
        if same == len(blocks):
            return
        if len(blocks) > self.max_blocks:
            raise ValueError(f"a table of {len(blocks)} blocks is longer than the {self.max_blocks} that this step was made for")
        new = np.asarray(blocks[same:], dtype=np.int32)
        self.tables[row, same : len(blocks)].copy_(torch.from_numpy(new))
        self._known[row] = list(blocks)

    def _send(self) -> None:
        self._sent.copy_(self._host, non_blocking=True)

    def _fetch(self, rows: Sequence[DecodeRow]) -> None:
        """Read what Engram layers need from tables that are not on the device."""
        backbone = self.backbone
        for layer in backbone.layers:
            buffer = self.engram.get(layer.plan.index)
            if buffer is not None and layer.engram is not None:
                ids = torch.tensor([row.token for row in rows], dtype=torch.int64)
                lookback = torch.tensor([list(row.lookback) for row in rows], dtype=torch.int64)
                buffer[: len(rows)] = backbone.engram.fetch(layer.engram, ids, lookback)

    def _forward(self) -> None:
        backbone = self.backbone
        sent = dict(zip(_FIELDS, self._sent.unbind(0), strict=False))
        lookback = self._sent[len(_FIELDS) :].T.to(torch.int64)
        position, token = sent["position"].to(torch.int64), sent["token"].to(torch.int64)
        active = (sent["span"] >= 0).to(torch.int32)
        visible = {ratio: ((position + 1) // ratio).to(torch.int32) for ratio in backbone.ratios}
        halves = []
        width = backbone.config.candidate_topk_blocks * backbone.config.candidate_block_size
        for floor in ("floor", "decoder_floor"):
            where = sent["span"], sent["position"], sent["stop"], self._numbers, sent["slot"]
            step = Step(position, *where, sent[floor], sent["write_from"], self.tables)
            tiles = Tiles(self._numbers, active, 1)
            columns = {ratio: self.max_blocks * self.memory.block_tokens // ratio for ratio in backbone.ratios}
            halves.append(
                HalfRows(
                    step,
                    visible,
                    dict.fromkeys(backbone.ratios, self._numbers),
                    {ratio: [Scan(0, self.rows, columns[ratio], tiles)] for ratio in backbone.ratios},
                    {ratio: [Scan(0, self.rows, width, tiles)] for ratio in backbone.ratios},
                )
            )
        cut, count = backbone.topology.cut, len(backbone.layers)
        history = backbone.engram.history(token, lookback, None)
        first = Half(halves[0], self.memory, cut, 0, None, None, self.engram)
        second = Half(halves[1], self.memory, count - cut, cut, None, None, self.engram)
        flow = backbone.run_encoder(token, history, first)
        self.hidden = backbone.run_decoder(flow, history, second)
        self.logits = backbone.logits(self.hidden)
        self.encoder_fresh, self.decoder_fresh = first.fresh, second.fresh
