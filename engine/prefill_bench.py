"""Prefill through the engine on a GPU, the memory that steps take, and the same work as torch operations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.manager import CacheManager
from forebay.cache.windows import WindowPool
from forebay.engine.active_bytes import wide_bytes
from forebay.engine.active_flops import prefill_flops, prefill_index_flops
from forebay.engine.fused_runner import FusedRunner
from forebay.engine.gpu_timing import Ceilings, Timer
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.runner import Runner
from forebay.engine.step_bench import Rig, forward, history
from forebay.engine.types import Request, SamplingParams
from forebay.engine.worker import Engine
from forebay.model.batch import Span
from forebay.model.checkpoint import Weights
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.step import DecodeRow
from forebay.model.network import Backbone
from forebay.model.tokenizer import Tokenizer

TORCH_CACHE = 40 << 30  # of weights that torch operations may keep widened to fp32


def open_engine(
    weights: Weights, device: str, *, sequences: int, kv_tokens: int, encoder_tokens: int, buckets: list[int], max_tokens: int
) -> Engine:  # fmt: skip
    """The engine as `build_engine` makes it for GPU kernels, but with the few batch sizes that are measured; captures nothing yet.

    Raises:
        ConfigError: a size that the kernels cannot take.
    """
    backbone = FusedBackbone(weights, device=device)
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()  # what making the weights has used and no longer needs
    decoder = max(sequences, weights.config.sliding_window)
    options = EngineOptions(
        max_sequences=sequences, encoder_tokens=encoder_tokens, decoder_tokens=decoder, kv_tokens=kv_tokens, aging_s=0.0, overlap=True
    )
    blocks, windows = _pools(weights, kv_tokens, sequences, device)
    runner = FusedRunner(backbone, blocks, windows, max_tokens=max_tokens, buckets=buckets)
    manager = CacheManager(runner.layout, blocks, windows, weights.fingerprint, True)
    tokenizer = Tokenizer.load(weights.tokenizer_path, chat=False)
    metrics = Metrics(CollectorRegistry(), model="bench", window_tokens=runner.layout.window)
    return Engine(runner, manager, tokenizer, options, metrics)


def _pools(weights: Weights, kv_tokens: int, sequences: int, device: str) -> tuple[BlockPool, WindowPool]:
    layout = KVLayout.of(weights.config)
    blocks = BlockPool(layout, layout.blocks_for(kv_tokens) + 1, device)
    return blocks, WindowPool(layout, weights.config, sequences + 1, device)


def run_prompt(engine: Engine, ids: list[int]) -> None:
    """A request for one token, from submission to its end."""
    engine.sink = lambda events: None
    engine.submit(Request(ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    while engine.busy:
        engine.step()


def prefill(rig: Rig, engine: Engine, tokens: int, chunk: int, ceilings: Ceilings, repeats: int) -> dict[str, Any]:
    """A prompt of `tokens` tokens in chunks of `chunk` rows, to its first token; every prompt is new, so nothing is reused.

    The first run is not timed: its kernels may be compiled meanwhile.
    """
    timer, config, seconds = rig.timer, rig.config, []
    engine.scheduler.batcher.encoder_tokens = chunk
    for repeat in range(repeats + 1):
        ids = rig.ids(1_000_003 * chunk + repeat, tokens if repeat else min(tokens, 2 * chunk)).tolist()
        seconds += _waited(timer, partial(run_prompt, engine, ids), 1)
    median, flops, index = statistics.median(seconds[1:]), prefill_flops(config, tokens), prefill_index_flops(config, tokens)
    return {
        "tokens": tokens, "chunk": chunk, "seconds": median, "samples_s": seconds[1:], "first_s": seconds[0],
        "tokens_per_s": tokens / median, "flops": flops, "index_flops": index, "flops_per_s": flops / median,
        "fraction": flops / median / ceilings.bf16,
    }  # fmt: skip


def held_bytes(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of all tensors that an object of ours reaches, shared memory counted once."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        inside: list[object] = list(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        inside = list(thing)
    elif type(thing).__module__.startswith("forebay."):
        inside = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    else:
        return 0
    return sum(held_bytes(part, seen) for part in inside)


def memory(rig: Rig, contexts: list[int], batch: int, rows: int) -> dict[str, Any]:
    """What is allocated, and the most that steps add to it: a decode step and a prefill chunk of `rows` at each context.

    Each is run before it is measured, so what it keeps is there; `above` counts that too: everything but weights and pools.
    """
    timer, runner, layout = rig.timer, rig.runner, rig.layout
    blocks, windows = runner.blocks.data, runner.windows
    weights = held_bytes(rig.backbone.layers) + sum(held_bytes(x) for x in (rig.backbone.embed, rig.backbone.head, rig.backbone.norm))
    pools = {"blocks": blocks.untyped_storage().nbytes(), "windows": held_bytes([windows.data, windows.pending])}
    found: list[dict[str, Any]] = []
    for context in contexts:
        chunk = rig.chunk(context, min(rows, context), min(rows, context, layout.window))
        works = (("decode", batch, partial(rig.decode_eager, batch, context)), ("prefill", min(rows, context), chunk))
        for name, count, work in works:
            work()
            peak = timer.peak(work)
            above = peak - weights - sum(pools.values())
            seconds = statistics.median(timer.each(work, 3)) if name == "prefill" else None
            found.append({"work": name, "rows": count, "context": context, "peak": peak, "above": above, "seconds": seconds})
    growth = {
        name: max(row["above"] for row in found if row["work"] == name) - min(row["above"] for row in found if row["work"] == name)
        for name in ("decode", "prefill")
    }
    return {
        "bytes_per_token": pools["blocks"] / (blocks.shape[0] * layout.block_tokens),
        "bytes_per_token_of_layout": layout.bytes_per_token, "weights": weights, **pools,
        "at_rest": timer.allocated(), "works": found, "growth": growth, "wide": wide_bytes(rig.config, max(contexts)),
    }  # fmt: skip


def against_torch(weights: Weights, device: str, timer: Timer, tokens: int, repeats: int) -> dict[str, Any]:
    """A short prompt, and a decode step behind it, as torch operations and as kernels over the same small model; each waited for.

    The torch operations are the reference network, whose weights stay widened to fp32 as far as `TORCH_CACHE` goes. The kernels' decode
    step is a replayed graph. `..._distance`: how far apart the logits are, as a share of their norm; the same random network twice.
    """
    config, at = weights.config, torch.device(device)
    depth, floor = config.engram_max_ngram_size - 1, max(0, tokens - config.sliding_window)
    blocks, windows = _pools(weights, tokens + 1, 1, device)
    ids = torch.randint(config.vocab_size, (depth + tokens + 1,), generator=torch.Generator().manual_seed(1)).numpy()
    prompt, last = history(ids[:-1], config, at), history(ids[tokens:], config, at)
    table = list(range(1, blocks.total + 1))
    whole = Span(0, tokens, 0, 0, floor, floor, None, 1, table)
    single = Span(tokens, tokens + 1, tokens, 0, 0, floor, None, 1, table)
    newest, *before = ids[tokens:][::-1].tolist()
    row = DecodeRow(newest, before, tokens, 1, 0, floor, tokens, table)
    found: dict[str, Any] = {"tokens": tokens, "layers": config.num_hidden_layers, "experts": config.n_routed_experts}
    logits: dict[str, list[Tensor]] = {}
    for name in ("torch", "kernels"):
        if name == "torch":
            runner = Runner(Backbone(weights, device=device, weight_cache_bytes=TORCH_CACHE), blocks, windows)
            step: Callable[[], Tensor | None] = partial(forward, runner, *last, [single])
        else:
            fused = FusedRunner(FusedBackbone(weights, device=device), blocks, windows, max_tokens=tokens + 1, buckets=[1])
            fused.warm(1, chunk=tokens, lengths=(tokens,))
            runner, step = fused, partial(fused.step_of(1).run, [row])
        for what, work in (("prefill", partial(forward, runner, *prompt, [whole])), ("decode", step)):
            result = work()
            assert result is not None
            logits.setdefault(what, []).append(result[-1].float().cpu())
            found[f"{name}_{what}_s"] = statistics.median(_waited(timer, work, repeats))
    for what, (there, here) in logits.items():
        found[f"{what}_ratio"] = found[f"torch_{what}_s"] / found[f"kernels_{what}_s"]
        found[f"{what}_distance"] = float((here - there).norm() / there.norm())
    return found


def _waited(timer: Timer, work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run and the wait for it."""
    seconds = []
    for _ in range(repeats):
        timer.synchronize()
        began = timer.now()
        work()
        timer.synchronize()
        seconds.append(timer.now() - began)
    return seconds
