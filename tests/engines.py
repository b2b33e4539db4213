"""Engines for tests: TINY, a real network of four layers, and MEMO, which has no network but checks what the cache hands it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from blake3 import blake3
from prometheus_client import CollectorRegistry
from torch import Tensor

from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.manager import CacheManager
from forebay.cache.windows import WindowPool
from forebay.engine.batcher import Row
from forebay.engine.llm import LLM
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.runner import Runner
from forebay.engine.types import Output, OutputEvent, PrefillMode, PromptImage, Request, SamplingParams
from forebay.engine.worker import Engine
from forebay.model.chat import ChatCodec
from forebay.model.config import ModelConfig
from forebay.model.image_pixels import render
from forebay.model.image_plan import plan
from forebay.model.network import Backbone
from forebay.model.tokenizer import Tokenizer
from forebay.model.vision import image_digest
from noise_model import CONFIG, TOKENIZER, write_random

WINDOW = 8  # tokens, and tokens of a block, of TINY and MEMO

_TEXT = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 8,
    "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 1, "n_routed_experts": 4, "sliding_window": WINDOW, "compress_ratios": [2, 2, 1, 1],
    "kv_source_layer_ids": [0, 2], "index_source_layer_ids": [0, 2, 3], "index_n_heads": 2, "index_topk": 8, "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 4, "candidate_block_size": 4, "hc_mult": 2, "hc_sinkhorn_iters": 2, "engram_layer_ids": [1],
    "engram_num_embeddings": [24562], "max_position_embeddings": 4096,
}  # fmt: skip
TINY: dict[str, Any] = {**CONFIG, "text_config": {**CONFIG["text_config"], **_TEXT}}


# With eyes: a picture of up to 84 by 84 pixels becomes a span of 8 positions.
SEEING: dict[str, Any] = {
    **TINY,
    "vision_config": {
        "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 14,
        "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 7056,
    },
}  # fmt: skip


@functools.cache
def tiny_config() -> ModelConfig:
    return ModelConfig.from_dict(TINY)


@functools.cache
def tiny_checkpoint() -> Path:
    """Folder of TINY, gone with the process: sources of ratio 2 and 1, a reusing and a reindexing layer, candidates, Engram."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_random(folder, TINY, seed=7)
    return folder


@functools.cache
def seeing_checkpoint() -> Path:
    """Folder of TINY with a vision half, gone with the process."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-seeing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_random(folder, SEEING, seed=7)
    return folder


@functools.cache
def seeing(prefill: PrefillMode = "bounded", **options: Any) -> LLM:
    """An engine over TINY with a vision half, as `tiny`."""
    return LLM(str(seeing_checkpoint()), prefill=prefill, **{"max_sequences": 8, "decoder_tokens": 64, "kv_tokens": 4096, **options})


def shown(ids: Sequence[int], at: int, pixels: np.ndarray, llm: LLM) -> tuple[list[int], PromptImage]:
    """A prompt of `ids` with a picture [h, w, 3] uint8 before position `at`, and the picture's place in it."""
    vision, image_id = llm.config.vision, llm.config.image_token_id
    assert vision is not None and image_id is not None and llm.engine.encoder is not None
    cut = plan(pixels.shape[1], pixels.shape[0], vision)
    digest = image_digest(blake3(pixels.tobytes()).digest(), cut, llm.engine.encoder.tower.identity)
    whole = [*ids[:at], *[image_id] * cut.tokens, *ids[at:]]
    return whole, PromptImage(at, at + cut.tokens, cut, render(pixels, cut), digest)


@functools.cache
def tiny(prefill: PrefillMode = "bounded", **options: Any) -> LLM:
    """An engine over TINY, shared by all tests that ask for the same options; `fresh` empties its cache."""
    return LLM(str(tiny_checkpoint()), prefill=prefill, **{"max_sequences": 8, "decoder_tokens": 64, "kv_tokens": 4096, **options})


def fresh(llm: LLM) -> LLM:
    """The engine with nothing cached. It must be idle, and every block and window free or cached."""
    assert_idle(llm.engine)
    llm.engine.manager.clear()
    return llm


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing is owned, nothing is remembered of any request."""
    assert not engine.busy
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not engine.choices.known
    assert not engine.choices.leaders
    engine.manager.check([])
    stats = engine.manager.stats()
    assert stats.used == 0
    assert stats.windows_used == 0


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **more})


def prompt(length: int, number: int = 0) -> list[int]:
    """Ordinary tokens; prompts of different numbers share no block."""
    return [64 + (number * 977 + i * i * 31 + i * 7) % 3900 for i in range(length)]


def same(left: Output, right: Output) -> None:
    """The same answer, to the last bit of its log-probabilities; not where its prompt came from."""
    assert left.token_ids == right.token_ids
    assert left.text == right.text
    assert left.logprobs == right.logprobs
    assert left.prompt_logprobs == right.prompt_logprobs
    assert (left.finish_reason, left.matched_stop) == (right.finish_reason, right.matched_stop)


# MEMO


def next_of(tokens: Sequence[int]) -> int:
    """A token that depends on every token before it: an ordinary byte of MEMO's vocabulary."""
    value = 7
    for token in tokens[-40:]:
        value = (value * 31 + token + 1) % 1_000_003
    return 8 + (value + len(tokens)) % 200


class MemoRunner(Runner):
    """Writes the tokens themselves into blocks, window and pending memory, and checks at every step that the whole history is there.

    So it notices a block or window that is not the sequence's own, stale, lost, restored wrongly or never written. `script` chooses the
    next token from the history; `before` is called with the rows of every step and may raise.
    """

    def __init__(self, config: ModelConfig, blocks: BlockPool, windows: WindowPool) -> None:
        super().__init__(cast(Backbone, SimpleNamespace(config=config, device=torch.device("cpu"))), blocks, windows)
        self.script: Callable[[Sequence[int]], int] = next_of
        self.before: Callable[[Sequence[Row]], None] = lambda rows: None
        self.spoil: set[str] = set()  # ids of requests whose logits are not finite
        self.steps = 0
        self.ahead = 0  # steps whose tokens the host had not seen
        self._fed: dict[str, int] = {}
        self._table = blocks.data.numpy()
        self._rings = windows.data.numpy()

    def run(
        self, rows: Sequence[Row], record: dict[str, list[Tensor]] | None = None, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        self.steps += 1
        self.ahead += tokens is not None
        self.before(rows)
        self._fed = {} if tokens is None else {row.sequence.id: int(token) for row, token in zip(rows, tokens, strict=True)}
        for row in rows:
            self._write(row)
        for row in rows:
            self._check(row)
        wanted = [row.sequence for row in rows if row.wants_logits]
        logits = torch.zeros((len(wanted), self.backbone.config.vocab_size))
        for place, sequence in enumerate(wanted):
            logits[place, self.script(self._history(sequence))] = 9.0
            if sequence.id in self.spoil:
                logits[place, 3] = torch.nan
        scores = [row.sequence.scores_prompt and row.start < row.sequence.prompt_tokens for row in rows]
        return logits, [torch.zeros((row.decoder_rows, 1)) if due else None for row, due in zip(rows, scores, strict=True)]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros((hidden.shape[0], self.backbone.config.vocab_size))

    def _history(self, sequence: Any) -> list[int]:
        return [*sequence.tokens, self._fed[sequence.id]] if sequence.id in self._fed else sequence.tokens

    def _write(self, row: Row) -> None:
        cache, size = row.sequence.cache, self.layout.block_tokens
        tokens = self._history(row.sequence)
        for place in range(row.start, row.stop):
            token = tokens[place]
            if place >= row.write_from:
                assert self.blocks.references(cache.table[place // size]) == 1, "a block that others may read is written"
                self._table[cache.table[place // size], place % size] = token % 251
            self._rings[cache.slot, :, place % WINDOW, 0] = token % 251
            if place + 1 in row.sequence.copy_at:
                row.sequence.copies[place + 1] = self.windows.copy(cache.slot)
        self.windows.pending[cache.slot] = float(tokens[row.stop - 1])

    def _check(self, row: Row) -> None:
        tokens, cache, size = self._history(row.sequence), row.sequence.cache, self.layout.block_tokens
        history = [token % 251 for token in tokens[: row.stop]]
        stored = self._table[cache.table[: -(-row.stop // size)], :size].flatten()[: row.stop].tolist()
        assert stored == history, "blocks do not hold the sequence's tokens"
        low = max(row.window_from, row.stop - WINDOW)
        ring = [int(self._rings[cache.slot, 0, place % WINDOW, 0]) for place in range(low, row.stop)]
        assert ring == history[low:], "the window does not hold the sequence's last tokens"


@functools.cache
def _memo_parts(vocab: int) -> tuple[ModelConfig, Tokenizer, ChatCodec]:
    config = ModelConfig(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=3, num_attention_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32,
        o_groups=1, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=1, sliding_window=WINDOW,
        compress_ratios=(2, 2, 1), kv_source_layer_ids=(0, 2), index_source_layer_ids=(0, 2), index_n_heads=1, index_head_dim=32,
        index_topk=4, candidate_source_layer_id=None, candidate_topk_blocks=1, candidate_block_size=1, max_position_embeddings=1 << 20,
    )  # fmt: skip
    tokenizer = Tokenizer.load(TOKENIZER)
    return config, tokenizer, ChatCodec(tokenizer)


class Memo:
    """An engine over MEMO that collects its events by request. The control tokens are in its tokenizer, but only in a `vocab` of 4096."""

    def __init__(self, vocab: int = 256, **options: Any) -> None:
        chosen = EngineOptions(**{"max_sequences": 8, "kv_tokens": 1024, **options})
        config, tokenizer, codec = _memo_parts(vocab)
        layout = KVLayout.of(config)
        blocks = BlockPool(layout, layout.blocks_for(chosen.kv_tokens or 0) + 1)
        windows = WindowPool(layout, config, chosen.max_sequences + 1)
        manager = CacheManager(layout, blocks, windows, "memo", chosen.prefix_reuse, poison=chosen.poison)
        self.runner = MemoRunner(config, blocks, windows)
        self.metrics = Metrics(CollectorRegistry())
        self.engine = Engine(self.runner, manager, tokenizer, chosen, self.metrics, codec=codec)
        self.manager, self.scheduler = manager, self.engine.scheduler
        self.events: dict[str, list[OutputEvent]] = {}
        self.engine.sink = self._collect

    def _collect(self, events: list[OutputEvent]) -> None:
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)

    def add(self, ids: Sequence[int], params: SamplingParams | None = None, **request: Any) -> str:
        """Submit; returns the request's id."""
        return self.engine.submit(Request(ids, params or greedy(), **request)).id

    def step(self) -> int:
        """One step, with every reference and slot accounted for after it; rows that ran."""
        rows = self.engine.step().rows
        self.manager.check([s.cache for s in self.scheduler.running + self.leaving()])
        return rows

    def leaving(self) -> list[Any]:
        """Sequences that ended while a row of theirs was in flight."""
        return [s for s, _ in self.engine.flights.leaving] if self.engine.flights is not None else []

    def finish(self, most: int = 20_000) -> int:
        """Step until nothing is left; the number of steps."""
        steps = 0
        while self.engine.busy:
            assert steps < most, "the engine does not come to an end"
            self.step()
            steps += 1
        return steps

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events.get(request_id, []) for token in event.token_ids]

    def last(self, request_id: str) -> OutputEvent:
        """The final event, of which there is one."""
        final = [event for event in self.events[request_id] if event.finish_reason is not None]
        assert final == self.events[request_id][-1:], "one final event, and nothing after it"
        return final[0]

    def value(self, name: str, **labels: str) -> float:
        """A sample of the metrics, `forebay_` left out."""
        return self.metrics.registry.get_sample_value(f"forebay_{name}", labels) or 0.0


def continuation(ids: Sequence[int], count: int) -> list[int]:
    """What MEMO answers when nothing goes wrong."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(next_of(tokens))
    return tokens[len(ids) :]


def short(length: int, number: int = 0) -> list[int]:
    """A prompt in MEMO's vocabulary; different numbers share no block."""
    return [8 + (number * 57 + i * i * 3 + i + number // 200 * (i + 1) * 11) % 240 for i in range(length)]
