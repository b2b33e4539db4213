"""Runs rows on a GPU: steps of generated tokens as captured graphs, everything else kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from forebay.cache.blocks import BlockPool
from forebay.cache.windows import WindowPool
from forebay.engine.batcher import Row
from forebay.engine.runner import Runner
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.step import BUCKETS, DecodeRow, DecodeStep
from forebay.model.memory import CacheMemory


class FusedRunner(Runner):
    """`Runner` over a `FusedBackbone`. Graphs are captured when a bucket is first needed, or all at once by `warm`."""

    def __init__(
        self, backbone: FusedBackbone, blocks: BlockPool, windows: WindowPool, *, max_tokens: int, buckets: SequenceOf[int] = BUCKETS
    ) -> None:
        """max_tokens: of the longest sequence."""
        super().__init__(backbone, blocks, windows)  # type: ignore[arg-type]
        self.fused, self.buckets = backbone, sorted(buckets)
        self.max_blocks = min(blocks.total, self.layout.blocks_for(max_tokens))
        self._steps: dict[int, DecodeStep] = {}
        self._pool = torch.cuda.graph_pool_handle() if backbone.device.type == "cuda" else None

    def warm(self, rows: int) -> None:
        """Capture the graphs of all buckets that batches of up to `rows` rows need, the largest first, whose memory the others share."""
        needed = [b for i, b in enumerate(self.buckets) if i == 0 or self.buckets[i - 1] < rows]
        for bucket in reversed(needed):
            self.step_of(bucket)

    def step_of(self, rows: int) -> DecodeStep:
        """The step of the smallest bucket with room for `rows` rows."""
        bucket = next(b for b in self.buckets if b >= rows)
        if bucket not in self._steps:
            assert isinstance(self.memory, CacheMemory)
            self._steps[bucket] = DecodeStep(self.fused, self.memory, bucket, self.max_blocks, self._pool)
        return self._steps[bucket]

    def run(
        self, rows: SequenceOf[Row], record: dict[str, list[Tensor]] | None = None, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        if record is not None or not rows or len(rows) > self.buckets[-1] or not all(map(_decodes, rows)):
            return super().run(rows, record, tokens=tokens)
        depth, decode = self.fused.config.engram_max_ngram_size - 1, []
        for row in rows:
            known, at = row.sequence.tokens, row.start
            lookback = [known[at - i] if at >= i else -1 for i in range(1, depth + 1)]
            decode.append(DecodeRow(known[at] if tokens is None else 0, lookback, self.span(row)))
        step = self.step_of(len(rows))
        logits = step.run(decode, tokens)
        for i, each in enumerate(decode):
            for capture in each.span.captures:
                codes, scales = step.captured(i, self.fused.config.head_dim)
                layers = slice(None if capture.decoder else self.layout.encoder_layers)
                place = (capture.boundary - 1) % self.layout.window
                capture.codes[layers, place], capture.scales[layers, place] = codes[layers], scales[layers]
        return logits, [None] * len(rows)


def _decodes(row: Row) -> bool:
    """Whether a row is one generated token that runs both halves and is sampled."""
    scores = row.sequence.scores_prompt and row.start < row.sequence.prompt_tokens
    return row.stop - row.start == 1 and row.decoder_rows == 1 and row.wants_logits and not scores
