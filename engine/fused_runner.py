"""Runs rows on a GPU: steps of generated tokens as captured graphs, everything else kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from forebay.cache.blocks import BlockPool
from forebay.cache.windows import WindowPool
from forebay.engine.batcher import Row
from forebay.engine.runner import Runner
from forebay.model.batch import Span
from forebay.model.config import ModelConfig
from forebay.model.fused.compiling import compiling
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.rows import SCORE_BYTES, FusedBatch
from forebay.model.fused.step import BUCKETS, BlockTables, DecodeRow, DecodeStep
from forebay.model.memory import CacheMemory

# Lengths of prompts, or of their chunks, whose kernels are compiled at the start: few rows and many, multiples of 16, for which kernels
# read wider, and others. By powers of two, as scans are compiled for numbers of runs of 16 rows.
REHEARSED = (1, 13, 27, 50, 64, 77, 200, 400, 500, 512, 1000, 1024, 2000, 2048, 4001, 4096, 8192)
# Generated tokens beside a chunk of a prompt, as numbers that no captured step has.
TOGETHER = (27, 50)
# Of these also as chunks at the end of long prompts, whose entries are chosen in other ways, by the next power of two.
LATE = (1, 77, 512)
CONTEXTS = tuple(1 << power for power in range(10, 21))
SPARE_BYTES = 2 << 30  # for libraries, compiled kernels, and what an allocator cannot use


class FusedRunner(Runner):
    """`Runner` over a `FusedBackbone`. Graphs are captured when a bucket is first needed, or all at once by `warm`."""

    kernels = True

    def __init__(
        self, backbone: FusedBackbone, blocks: BlockPool, windows: WindowPool, *, max_tokens: int, buckets: SequenceOf[int] = BUCKETS
    ) -> None:
        """max_tokens: of the longest sequence."""
        super().__init__(backbone, blocks, windows)  # type: ignore[arg-type]
        self.fused, self.buckets = backbone, sorted(buckets)
        self.max_blocks = min(blocks.total, self.layout.blocks_for(max_tokens))
        self._depth = backbone.config.engram_max_ngram_size - 1
        self._tables = BlockTables(windows.total + 1, self.max_blocks, backbone.device)
        self._steps: dict[int, DecodeStep] = {}
        self._compiled: set[int] = set()
        self._pool = torch.cuda.graph_pool_handle() if backbone.device.type == "cuda" else None

    def warm(
        self, rows: int, progress: Callable[[int, int, str], None] | None = None, *, chunk: int = 512, lengths: SequenceOf[int] = REHEARSED
    ) -> None:
        """Capture the graphs of all buckets that batches of up to `rows` rows need, the largest first, whose memory the others share.

        On a GPU, all their kernels and most of those of prompts are compiled before, many at once; what was compiled is kept on disk.

        progress: as of `build_engine`, told what is going on. chunk: rows of a step that runs a prompt. lengths: of prompts or chunks,
        up to `chunk`, whose kernels are compiled.
        """
        tell = progress or (lambda done, total, text: None)
        needed = [b for i, b in enumerate(self.buckets) if i == 0 or self.buckets[i - 1] < rows]
        if self.device.type == "cuda":
            tell(0, 0, "compiling kernels")
            self._compile(needed, [length for length in lengths if length <= chunk], [n for n in TOGETHER if n <= rows])
        for number, bucket in enumerate(reversed(needed), 1):
            tell(0, 0, f"capturing decode steps: {number} of {len(needed)}")
            self.step_of(bucket)

    def step_of(self, rows: int) -> DecodeStep:
        """The step of the smallest bucket with room for `rows` rows."""
        bucket = next(b for b in self.buckets if b >= rows)
        if bucket not in self._steps:
            if self._pool is not None and bucket not in self._compiled:
                self._compile([bucket])
            step = self._new_step(bucket)
            if self._pool is not None:
                step.capture(self._pool)
            self._steps[bucket] = step
        return self._steps[bucket]

    def _compile(self, buckets: list[int], lengths: SequenceOf[int] = (), together: SequenceOf[int] = ()) -> None:
        """Compile the kernels of decode steps, of prompts of these lengths, and of so many generated tokens beside prompts."""
        with compiling():
            for bucket in buckets:
                self._new_step(bucket).rehearse()
            for length in lengths:
                self._rehearse(length, length)
                if length in LATE:
                    for context in CONTEXTS:
                        if length < context <= self.max_blocks * self.layout.block_tokens:
                            self._rehearse(length, context)
            if lengths:
                last = lengths[-1]
                beside = Span(0, last, 0, 0, last, 0, None, 0, [0] * self.layout.blocks_for(last))
                for count in together:
                    self._pass([*[Span(0, 1, 0, 0, 0, 0, None, 0, [0])] * count, beside])
        self._compiled.update(buckets)

    def _new_step(self, bucket: int) -> DecodeStep:
        assert isinstance(self.memory, CacheMemory)
        return DecodeStep(self.fused, self.memory, bucket, self.max_blocks, self._tables)

    def _rehearse(self, rows: int, context: int) -> None:
        """The last rows of a prompt through both halves and the head, on the null slot and block."""
        start, blocks = context - rows, [0] * self.layout.blocks_for(context)
        first = max(start, context - self.layout.window)
        for low in {start, first} if not start else {start}:  # an exact prefill and a bounded one
            for shown in (False, True) if self.fused.config.vision is not None else (False,):
                self._pass([Span(start, context, start, 0, low, low, None, 0, blocks)], shown)

    def _pass(self, spans: list[Span], shown: bool = False) -> None:
        """`shown`: as if all rows were of an image, which some kernels are compiled for."""
        assert isinstance(self.memory, CacheMemory)
        rows = sum(span.stop - span.start for span in spans)
        ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        lookback = torch.full((rows, self._depth), -1, dtype=torch.int64, device=self.device)
        mask = torch.ones(rows, dtype=torch.bool, device=self.device) if shown else None
        batch = self.fused.Batch(ids, lookback, spans, self.memory, self.layout.window, mask)
        chosen = batch.decoder_rows()
        assert chosen is not None
        self.fused.logits(self.fused.decode(self.fused.encode(batch), chosen)[-1:])

    def run(
        self, rows: SequenceOf[Row], record: dict[str, list[Tensor]] | None = None, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """As `Runner.run`. Logits of a step of generated tokens are the graph's own memory: the next step overwrites them, so whoever
        wants them longer copies them; what reads them on the same stream before that step is started needs no copy."""
        if record is not None or not rows or not all(map(_decodes, rows)):
            return super().run(rows, record, tokens=tokens)
        most = self.buckets[-1]
        if len(rows) <= most:
            return self._decode(rows, tokens), [None] * len(rows)
        parts = [slice(first, first + most) for first in range(0, len(rows), most)]
        logits = [self._decode(rows[part], None if tokens is None else tokens[part]).clone() for part in parts]
        return torch.cat(logits), [None] * len(rows)

    def batch(self, rows: SequenceOf[Row], record: dict[str, list[Tensor]] | None = None, tokens: Tensor | None = None) -> FusedBatch:  # type: ignore[override]
        """As `Runner.batch`, but nothing waits for the device: the chunks of a prompt are prepared while it runs those before them."""
        depth, lines = self._depth, []
        for row in rows:
            line = [-1] * max(0, depth - row.start) + row.sequence.text(max(0, row.start - depth), row.stop)
            line += [0] * (depth + row.stop - row.start - len(line))  # of `tokens`
            lines.append(np.lib.stride_tricks.sliding_window_view(np.asarray(line, dtype=np.int64), depth + 1)[:, ::-1])
        window = torch.from_numpy(np.concatenate(lines))
        if self.device.type == "cuda":
            window = window.pin_memory().to(self.device, non_blocking=True)
        ids = window[:, 0].clamp_min(0) if tokens is None else tokens
        assert isinstance(self.memory, CacheMemory)
        mask, images = self.seen(rows)
        return FusedBatch(
            ids, window[:, 1:].contiguous(), [self.span(row) for row in rows], self.memory, self.layout.window, mask, record, images
        )

    def _decode(self, rows: SequenceOf[Row], tokens: Tensor | None) -> Tensor:
        """Logits [n, vocab] of rows that fit in a bucket."""
        depth, decode, captures = self._depth, [], []
        for place, row in enumerate(rows):
            sequence, at = row.sequence, row.start
            known, cache = sequence.tokens, sequence.cache
            lookback = sequence.text(max(0, at - depth), at)[::-1] + [-1] * max(0, depth - at)
            token = known[at] if tokens is None else 0
            decode.append(DecodeRow(token, lookback, at, cache.slot, row.window_from, row.decoder_window_from, row.write_from, cache.table))
            if sequence.copy_at:
                captures += [(place, capture) for capture in self._captures(row)]
        step = self.step_of(len(rows))
        logits = step.run(decode, tokens)
        for place, capture in captures:
            codes, scales = step.captured(place, self.fused.config.head_dim)
            layers = slice(None if capture.decoder else self.layout.encoder_layers)
            at = (capture.boundary - 1) % self.layout.window
            capture.codes[layers, at], capture.scales[layers, at] = codes[layers], scales[layers]
        return logits


def _decodes(row: Row) -> bool:
    """Whether a row is one generated token that runs both halves and is sampled."""
    if row.stop - row.start != 1 or not row.wants_logits or row.start < row.decoder_from:
        return False
    if row.start < row.sequence.prompt_tokens and row.sequence.images_in(row.start, row.stop):
        return False  # a graph reads embeddings of tokens
    return row.start >= row.sequence.prompt_tokens or not row.sequence.scores_prompt


def working_bytes(config: ModelConfig, sequences: int, rows: int, tokens: int) -> int:
    """Device memory that steps take beside weights and KV, an upper estimate.

    Args: sequences, running at once; rows of a step that runs a prompt; tokens of the longest sequence.
    """
    heads, wide, dim = config.num_attention_heads * config.head_dim, config.moe_intermediate_size, config.hidden_size
    experts = config.num_experts_per_tok
    # Queries and the attention's output; experts' inner and outer values and those of the shared one; streams and layer inputs.
    row = 2 * (2 * heads + (experts + 3) * wide + (experts + 2) * dim + (2 * config.hc_mult + 8) * dim)
    decoding = min(sequences, BUCKETS[-1])
    captured = decoding * (tokens * 5 // 2 + 2 * row + 10 * 4 * heads + 8 * config.vocab_size)  # scores, with the maxima of their runs
    return SPARE_BYTES + 2 * (rows + sequences) * row + 2 * SCORE_BYTES + captured
