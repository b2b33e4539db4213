"""Forward passes by hand: sequences whose rows a test chooses itself, and what they leave in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from forebay.cache.replay import ResumePlan
from forebay.engine.batcher import Row
from forebay.engine.llm import LLM
from forebay.engine.output import OutputProcessor
from forebay.engine.sampler import SamplingState
from forebay.engine.sequence import Sequence as EngineSequence
from forebay.engine.types import PromptImage, Request, SamplingParams
from forebay.model.image_plan import ImagePlan
from forebay.model.ops.linear import Weight

ENCODER_ONLY = 1 << 40  # as `decoder_from`: no row runs the decoder half


class Hand:
    """One sequence in an engine's cache, moved forward row by row.

    Its blocks and its window are poisoned first, so whatever is read before it was written shows as NaN or as other logits.
    """

    def __init__(self, llm: LLM, tokens: Sequence[int], prompt_tokens: int | None = None) -> None:
        """`tokens` are all that will ever be fed. With `prompt_tokens`, these count as the prompt, and ties are the reference's."""
        engine = llm.engine
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(list(tokens), params)
        output = OutputProcessor(llm.tokenizer, (), frozenset(), parser=None)
        self.llm, self.runner, self.manager = llm, engine.runner, engine.manager
        cache = self.manager.sequence()
        self.sequence = EngineSequence(request, cache, SamplingState(params, tokens, 0), output, "exact", 1, 0)
        if prompt_tokens is not None:
            self.sequence.prompt_tokens = self.sequence.tie_tokens = prompt_tokens
        plan = self.manager.open(cache, list(tokens), reuse=False)
        assert plan is not None, "the test's pool is too small"
        self.slot, self.table = cache.slot, torch.tensor(cache.table)
        self.runner.windows.poison(self.slot)
        self.runner.blocks.poison(cache.table)

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.release(self.sequence.cache, keep=False)

    def show(self, start: int, embeddings: Tensor) -> None:
        """From here on an image is at positions `start` on, with these embeddings [k, D]."""
        stop, size = start + embeddings.shape[0], 14
        plan = ImagePlan((size, size), (1, 1), (1, stop - start - 3), (size, size), (0, 0))
        image = PromptImage(start, stop, plan, np.zeros((size, size, 3), np.uint8), bytes(32))
        self.sequence.request = replace(self.sequence.request, images=(*self.sequence.request.images, image))
        self.sequence.embeddings.append(embeddings)

    def row(
        self,
        start: int,
        stop: int,
        *,
        write_from: int | None = None,
        window_from: int = 0,
        decoder_from: int = 0,
        decoder_window_from: int = 0,
        wants_logits: bool = False,
    ) -> Row:
        floor = start if write_from is None else write_from
        return Row(self.sequence, start, stop, floor, window_from, decoder_from, decoder_window_from, wants_logits)

    def feed(self, *cuts: int, decoder_from: int = 0, decoder_window_from: int = 0) -> Tensor:
        """Run [cuts[0], cuts[1]), [cuts[1], cuts[2]), ... -> logits of the rows that ran the decoder half, [n, vocab]."""
        rows = [self.row(a, b, decoder_from=decoder_from, decoder_window_from=decoder_window_from) for a, b in pairwise(cuts)]
        return torch.cat([step(self.llm, [row])[0] for row in rows])

    def entries(self) -> dict[int, Tensor]:
        """Stored bytes by source layer, [entries the table has room for, entry bytes]; row j is entry j."""
        found = {}
        for layer, views in self.runner.blocks.views.items():
            planes = (views.main_codes, views.main_scales, views.index_codes, views.index_scales)
            found[layer] = torch.cat([p[self.table].flatten(0, 1) for p in planes], 1)
        return found

    def stored(self, tokens: int) -> dict[str, Tensor]:
        """All bytes that `tokens` tokens leave: entries, the window ring's valid rows and the open group."""
        layout = self.runner.layout
        ratios = {source.layer: source.ratio for source in layout.sources}
        found = {f"layer{layer}.entries": rows[: tokens // ratios[layer]] for layer, rows in self.entries().items()}
        valid = torch.arange(max(0, tokens - layout.window), tokens) % layout.window
        found["windows"] = self.runner.windows.data[self.slot][:, valid].clone()
        for layer, place in self.runner.windows.pending_index.items():
            held = tokens % ratios[layer]
            found[f"layer{layer}.open"] = self.runner.windows.pending[self.slot, place, :held].clone()
        return found

    def copy_entries(self, other: Hand, tokens: int | None = None) -> None:
        """Take over the blocks of another sequence, as if both had been admitted on the same cached prefix.

        With `tokens`, only what that many tokens leave; the rest of the table holds poison.
        """
        count = min(len(self.table), len(other.table))
        data = self.runner.blocks.data
        data[self.table[:count]] = data[other.table[:count]]
        if tokens is None:
            return
        ratios = {source.layer: source.ratio for source in self.runner.layout.sources}
        for layer, views in self.runner.blocks.views.items():
            for plane in (views.main_codes, views.main_scales, views.index_codes, views.index_scales):
                per_block = plane.shape[1]
                for j in range(tokens // ratios[layer], len(self.table) * per_block):
                    plane[self.table[j // per_block], j % per_block] = 0xFF

    def follow(self, plan: ResumePlan, stop: int, *cuts: int) -> Tensor:
        """Resume as planned and go on to `stop`, with cuts on the way -> logits of the rows that ran the decoder half, [n, vocab]."""
        parts = []
        for a, b in pairwise((plan.start, *cuts, stop)):
            row = self.row(
                a, b, write_from=max(a, plan.write_from), window_from=plan.window_from,
                decoder_from=plan.decoder_from, decoder_window_from=plan.decoder_window_from,
            )  # fmt: skip
            parts.append(step(self.llm, [row])[0])
        return torch.cat(parts)

    def ring(self) -> Tensor:
        """The window as it is now, [layers, window, row_bytes] u8."""
        return self.runner.windows.copy(self.slot)


def step(llm: LLM, rows: Sequence[Row], record: dict[str, list[Tensor]] | None = None) -> list[Tensor]:
    """One forward pass over `rows` -> per row the logits of its decoder rows, [decoder rows, vocab] fp32."""
    runner = llm.engine.runner
    batch = runner.batch(rows, record)
    streams = runner.backbone.encode(batch)
    chosen = batch.decoder_rows()
    if chosen is None:
        return [torch.empty((0, llm.config.vocab_size)) for _ in rows]
    logits = runner.backbone.logits(runner.backbone.decode(streams, chosen))
    return list(logits.split([row.decoder_rows for row in rows]))


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str = "") -> None:
    """Every tensor bit-equal, the first difference named."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        report = difference(found[name], value)
        assert report is None, f"{where} {name}: {report}"


def difference(found: Tensor, wanted: Tensor) -> str | None:
    """None if bit-equal (NaN equals NaN), else where and how far they differ."""
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"dtype {found.dtype}, wanted {wanted.dtype}"
    a, b = found.contiguous(), wanted.contiguous()
    wrong = a.view(torch.uint8) != b.view(torch.uint8) if a.numel() else torch.zeros(0, dtype=torch.bool)
    if not bool(wrong.any()):
        return None
    rows = sorted({int(i) for i in (wrong.view(a.shape[0], -1).any(1)).nonzero().flatten()})
    far = (a.double() - b.double()).abs().max().item()
    return f"rows {rows[:8]}{'...' if len(rows) > 8 else ''} of {a.shape[0]} differ, by at most {far:.3g}"


def ulps(found: Tensor, wanted: Tensor) -> int:
    """Largest distance of two fp32 tensors of equal signs in units in the last place."""
    return int((found.contiguous().view(torch.int32).long() - wanted.contiguous().view(torch.int32).long()).abs().max())


@contextmanager
def reference_sums() -> Iterator[None]:
    """Every product of a row as the reference computes it in decode: alone, by torch's linear."""
    ours = Weight.multiply

    def theirs(weight: Weight, x: Tensor) -> Tensor:
        w = weight.tile(0, weight.out_features).T.contiguous()
        return torch.cat([torch.nn.functional.linear(x[i : i + 1], w) for i in range(x.shape[0])])

    Weight.multiply = theirs  # type: ignore[method-assign]
    try:
        yield
    finally:
        Weight.multiply = ours  # type: ignore[method-assign]


@dataclass(frozen=True)
class GoldenSequence:
    """One sequence of a tiny checkpoint: `ids`, and the tensors of its file and of its trace, if it has one."""

    name: str
    ids: list[int]
    tensors: dict[str, Tensor]
    trace: dict[str, Tensor] | None

    @classmethod
    def load(cls, folder: Path, name: str) -> GoldenSequence:
        listed: list[dict[str, Any]] = json.loads((folder / "sequences.json").read_text("utf-8"))["sequences"]
        ids = next(s["input_ids"] for s in listed if s["name"] == name)
        trace = folder / f"trace_{name}.safetensors"
        return cls(name, ids, load_file(folder / f"seq_{name}.safetensors"), load_file(trace) if trace.is_file() else None)
