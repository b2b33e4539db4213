"""A decode step of a fixed number of rows, captured once as a CUDA graph and replayed for every token."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.model.fused.half import Half
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.rows import HalfRows, Scan
from forebay.model.memory import CacheMemory
from forebay.model.ops.kernels.index_ops import Tiles
from forebay.model.ops.kernels.store_ops import Step

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # each one costs some compiling at the start, so there are few
NULL_BLOCK = NULL_SLOT = 0  # of padded rows; the pools never give these out

_FIELDS = ("span", "position", "stop", "slot", "floor", "decoder_floor", "write_from", "token")
_PADDING = {"span": -1, "position": -1, "stop": 0, "slot": NULL_SLOT, "floor": 0, "decoder_floor": 0, "write_from": 0, "token": 0}
_TOKEN = _FIELDS.index("token")


class DecodeRow(NamedTuple):
    """One generated token to run.

    Attributes:
        token: its id; any number where the device has it already.
        lookback: ids before it, nearest first, -1 before the beginning.
        position, slot: of the token, and its sequence's window slot.
        floor, decoder_floor: lowest positions that windows of the two halves read. write_from: below it no entry is written.
        blocks: its sequence's block table: a list that only grows as long as it is this one.
    """

    token: int
    lookback: Sequence[int]
    position: int
    slot: int
    floor: int
    decoder_floor: int
    write_from: int
    blocks: list[int]


class BlockTables:
    """Block tables on the device, by window slot, for the decode steps of all sizes. Only what a table has gained is ever sent.

    Attributes:
        data: [slots, blocks] int32.
    """

    def __init__(self, slots: int, blocks: int, device: torch.device) -> None:
        """blocks: of the longest sequence."""
        self.device, self.slots, self.blocks = device, slots, blocks
        self.data = torch.full((slots, blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._sent: list[tuple[list[int], int]] = [([], 0) for _ in range(slots)]  # the list, and how much of it is there

    def update(self, tables: Iterable[tuple[int, list[int]]]) -> None:
        """Send what is new in tables of slots: nothing in most steps, then a block each, and a whole table for a new sequence.

        A sequence at its longest may own a block more than it can fill, which is left out.
        """
        places: list[np.ndarray] = []
        values: list[int] = []
        news: list[tuple[int, list[int], int]] = []
        for slot, blocks in tables:
            known, count = self._sent[slot]
            length = min(len(blocks), self.blocks)
            if known is blocks and count == length:
                continue
            if known is not blocks or count > length:
                count = 0
            places.append(np.arange(slot * self.blocks + count, slot * self.blocks + length))
            values += blocks[count:length]
            news.append((slot, blocks, length))
        if not news:
            return
        parcel = torch.empty((2, len(values)), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        parcel.numpy()[:] = np.concatenate(places), values
        there = parcel.to(self.device, non_blocking=True)  # torch keeps pinned memory that is given back until it has been read
        self.data.view(-1).index_copy_(0, there[0], there[1].to(torch.int32))
        for slot, blocks, length in news:
            self._sent[slot] = blocks, length


class DecodeStep:
    """Rows of a bucket on the device; a batch of fewer is padded with rows that read and write nothing of anybody's.

    Everything that a step needs from the host is a few integers a row, sent in one copy from pinned memory, and what block tables gained.
    The host may be a step ahead of the device: there are two such buffers, and each is filled again when its last copy is done. All
    device work is on one stream, so inputs change and outputs are replaced only after what was started before has used them. On a CPU
    (in tests) the same code runs without a graph.
    """

    def __init__(
        self,
        backbone: FusedBackbone,
        memory: CacheMemory,
        rows: int,
        max_blocks: int,
        tables: BlockTables | None = None,
    ) -> None:
        """max_blocks: of the longest sequence. tables: shared by steps of all sizes. On a GPU, `capture` before the first `run`."""
        assert memory.windows is not None
        self.backbone, self.memory, self.rows, self.max_blocks = backbone, memory, rows, max_blocks
        self.device, cuda = backbone.device, backbone.device.type == "cuda"
        self.tables = tables or BlockTables(memory.windows.shape[0], max_blocks, self.device)
        self.depth = max(0, backbone.config.engram_max_ngram_size - 1)
        padding = [_PADDING[name] for name in _FIELDS] + [-1] * self.depth
        self._blank = np.repeat(np.array(padding, dtype=np.int32)[:, None], rows, 1)
        self._hosts = [torch.empty(self._blank.shape, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [torch.cuda.Event() if cuda else None for _ in self._hosts]
        self._turn = 0
        self._sent = torch.empty(self._blank.shape, dtype=torch.int32, device=self.device)
        self._numbers = torch.arange(rows, dtype=torch.int32, device=self.device)
        self.engram: dict[int, Tensor] = {}
        for layer in backbone.layers:
            buffer = None if layer.engram is None else backbone.engram.buffer(layer.engram, rows)
            if buffer is not None:
                self.engram[layer.plan.index] = buffer
        self._send([])
        self.encoder_fresh: Tensor | None = None
        self.decoder_fresh: Tensor | None = None
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the step kernel by kernel, over padding: compiles what is not compiled yet, and makes the buffers that outlive a step."""
        self._forward()

    @torch.inference_mode()
    def capture(self, pool: object | None) -> None:
        """Make the graph. pool: memory that graphs share, of `torch.cuda.graph_pool_handle`."""
        self._forward()  # nothing may be compiled or made for the first time while a graph is captured
        self.graph = torch.cuda.CUDAGraph()
        # Graphs and events of a network that is gone must not be destroyed in the middle of a capture, which that would end.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            # Threads of the tiers may ask for pinned memory meanwhile.
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
                self._forward()
        finally:
            if collects:
                gc.enable()

    def run(self, rows: Sequence[DecodeRow], tokens: Tensor | None = None) -> Tensor:
        """One step -> logits [n, vocab] fp32; overwritten by the next run of any step.

        Nothing here waits for the device, unless the network reads Engram tables that are not on it.

        Args: tokens, [n] int64 on the device: ids that the host does not know yet, instead of those of `rows`.

        Raises:
            ValueError: a position beyond the longest sequence.
        """
        if max(row.position for row in rows) >= self.max_blocks * self.memory.block_tokens:
            raise ValueError(f"this step was made for sequences of {self.max_blocks} blocks")
        self.tables.update((row.slot, row.blocks) for row in rows)
        self._send(rows)
        if tokens is not None:
            self._sent[_TOKEN, : len(rows)] = tokens
        if self.engram:
            self._fetch(rows, tokens)
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

    def _send(self, rows: Sequence[DecodeRow]) -> None:
        self._turn = 1 - self._turn
        buffer, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        host = buffer.numpy()
        host[:] = self._blank
        if rows:
            lines = [
                (i, r.position, r.position + 1, r.slot, max(0, r.floor), max(0, r.decoder_floor), r.write_from, r.token, *r.lookback)
                for i, r in enumerate(rows)
            ]
            host[:, : len(rows)] = np.array(lines, dtype=np.int32).T
        self._sent.copy_(buffer, non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self.device))

    def _fetch(self, rows: Sequence[DecodeRow], tokens: Tensor | None) -> None:
        """Read what Engram layers need from tables that are not on the device; tokens that only the device knows are waited for."""
        backbone = self.backbone
        ids = torch.tensor([row.token for row in rows], dtype=torch.int64) if tokens is None else tokens.cpu()
        lookback = torch.tensor([list(row.lookback) for row in rows], dtype=torch.int64)
        for layer in backbone.layers:
            buffer = self.engram.get(layer.plan.index)
            if buffer is not None and layer.engram is not None:
                buffer[: len(rows)] = backbone.engram.fetch(layer.engram, ids, lookback)

    def _forward(self) -> None:
        backbone = self.backbone
        sent = dict(zip(_FIELDS, self._sent.unbind(0), strict=False))
        lookback = self._sent[len(_FIELDS) :].T.to(torch.int64)
        position, token = sent["position"].to(torch.int64), sent["token"].to(torch.int64)
        active = (sent["span"] >= 0).to(torch.int32)
        visible = {ratio: ((position + 1) // ratio).to(torch.int32) for ratio in backbone.ratios}
        table = self.tables.data.index_select(0, sent["slot"])
        halves = []
        width = backbone.config.candidate_topk_blocks * backbone.config.candidate_block_size
        for floor in ("floor", "decoder_floor"):
            where = sent["span"], sent["position"], sent["stop"], self._numbers, sent["slot"]
            step = Step(position, *where, sent[floor], sent["write_from"], table)
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
