"""Engines with tiers beyond the device, a clock that tests move, and ways to look at what the tiers did."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engines import WINDOW, Memo, greedy, tiny_checkpoint
from forebay.cache.prefix import KeyChain, root_key
from forebay.engine.launch import open_tiers
from forebay.engine.llm import LLM
from forebay.engine.metrics import Metrics
from forebay.engine.tiers import TierOptions
from forebay.engine.types import Output, Request, SamplingParams
from forebay.engine.worker import Engine

HOUR = 3600.0
ANSWER = greedy(8, logprobs=1)
RECORD_BYTES = 4096 + 256  # what a block of TINY is charged against the budget: a page, and its row in the index


class Clock:
    """Seconds since the epoch; they pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def tiered(
    folder: Path | None = None, url: str | None = None, *, clock: Callable[[], float] = time.time, model: Path | None = None,
    tiers: dict[str, Any] | None = None, **options: Any,
) -> LLM:  # fmt: skip
    """An engine over TINY with the tiers named; the caller closes it."""
    usual = {"dir": folder, "redis_url": url, "ssd_bytes": 1 << 28, "ssd_free_bytes": 0, "redis_timeout_s": 1.0}
    chosen = TierOptions(**{**usual, **(tiers or {})})
    known = {"max_sequences": 8, "decoder_tokens": 64, "kv_tokens": 8192, **options}
    return LLM(str(model or tiny_checkpoint()), tiers=chosen, clock=clock, **known)


@functools.cache
def _plain() -> LLM:
    return LLM(str(tiny_checkpoint()), max_sequences=8, decoder_tokens=64, kv_tokens=8192, prefix_reuse=False)


def cold(prompts: Sequence[Any], params: SamplingParams) -> list[Output]:
    """What an engine without any cache answers."""
    return _plain().generate(list(prompts), params)


def settle(llm: LLM) -> None:
    """Wait until what was computed is in the tiers."""
    reservoir = llm.engine.reservoir
    assert reservoir is not None
    if reservoir.store is not None:
        assert reservoir.store.flush(10.0)
    if reservoir.pool is not None:
        assert reservoir.pool.flush(10.0)


def ask(llm: LLM, ids: Sequence[int], params: SamplingParams, **request: Any) -> Output:
    """One request with fields that `LLM.generate` has no argument for (`salt`)."""
    engine, got = llm.engine, []
    engine.sink = got.extend
    sequence = engine.submit(Request(list(ids), params, **request))
    while engine.busy:
        llm._step()
    engine.sink = lambda events: None
    last = got[-1]
    assert last.error is None
    return Output(
        request_id=sequence.id, prompt_ids=list(ids), token_ids=[t for e in got for t in e.token_ids], text=sequence.output.text,
        finish_reason=last.finish_reason, usage=last.usage, tiers=last.tiers, times=last.times,
        logprobs=[p for e in got for p in e.logprobs or []] if params.logprobs is not None else None,
        matched_stop=last.matched_stop, preemptions=last.preemptions,
    )  # fmt: skip


def samples(page: bytes | str) -> dict[str, float]:
    """A page of metrics as `name{values of the labels, by name}`, `forebay_` left out."""
    text = page.decode() if isinstance(page, bytes) else page
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("forebay_") + f"{{{labels}}}"] = sample.value
    return found


def metrics(llm: LLM) -> dict[str, float]:
    return samples(llm.engine.metrics.render())


def total(page: dict[str, float], name: str) -> float:
    """Sum over all label values of a metric."""
    return sum(value for key, value in page.items() if key.partition("{")[0] == name)


def keys_of(llm: LLM, ids: Sequence[int], salt: str = "") -> list[bytes]:
    """Keys of the full blocks of `ids`."""
    manager = llm.engine.manager
    chain = KeyChain(root_key(manager.fingerprint, manager.layout.identity, salt), manager.layout.block_tokens)
    chain.extend(ids)
    return chain.keys


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.seg"))


class TieredMemo(Memo):
    """MEMO with tiers: its runner checks that restored blocks and loaded windows hold the tokens they should."""

    def __init__(self, tiers: TierOptions, *, clock: Callable[[], float] = time.time, **options: Any) -> None:
        super().__init__(**options)
        reservoir = open_tiers(self.manager, tiers, "cpu", clock)
        assert reservoir is not None
        self.reservoir = reservoir
        self.metrics = Metrics(CollectorRegistry(), window_tokens=WINDOW, ssd=tiers.dir is not None)
        old = self.engine
        self.engine = Engine(
            self.runner, self.manager, old.tokenizer, old.options, self.metrics, codec=old.codec,
            reservoir=reservoir,
        )  # fmt: skip
        self.scheduler = self.engine.scheduler
        self.engine.sink = self._collect


def other_tokenizer(folder: Path) -> Path:
    """A copy of TINY's checkpoint whose tokenizer file differs from it in one pair of ids."""
    shutil.copytree(tiny_checkpoint(), folder)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocab = spec["model"]["vocab"]
    left, right = [piece for piece, number in vocab.items() if number in (3000, 3001)]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    os.unlink(path)
    path.write_text(json.dumps(spec))
    return folder

