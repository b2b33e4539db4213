"""Builds an engine from the name of a model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from forebay.cache.blocks import BlockPool
from forebay.cache.embedded import EmbeddedRedis
from forebay.cache.layout import KVLayout
from forebay.cache.manager import CacheManager
from forebay.cache.snapshot import SnapshotShape
from forebay.cache.ssd import SsdOptions, SsdStore, staging_bytes
from forebay.cache.swa import SwaOptions, SwaPool
from forebay.cache.windows import WindowPool
from forebay.engine.client import EngineClient
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.plan import Machine
from forebay.engine.reservoir import Reservoir
from forebay.engine.runner import Runner
from forebay.engine.tiers import EMBEDDED, TierOptions, ssd_budget
from forebay.engine.types import PrefillMode
from forebay.engine.worker import Engine
from forebay.model.chat import ENCODING_VERSION, ChatCodec
from forebay.model.checkpoint import Weights
from forebay.model.errors import ConfigError
from forebay.model.network import Backbone
from forebay.model.source import resolve
from forebay.model.tokenizer import Tokenizer

DEFAULT_KV_TOKENS = 262_144
KV_SHARE = 0.4  # of free memory, at most, when `kv_tokens` is not given

Progress = Callable[[int, int, str], None]


def build_engine(
    weights: Weights,
    *,
    model_name: str,
    device: str = "cpu",
    prefill: PrefillMode = "bounded",
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    chat: bool = True,
    tiers: TierOptions | None = None,
    clock: Callable[[], float] = time.time,
) -> Engine:
    """An engine over opened weights. With `chat`, the tokenizer must have the tokens of the chat encoding.

    `clock` tells the age of what the tiers keep, in seconds since the epoch.

    Raises:
        ConfigError: the device is not there, or a tier cannot be opened.
    """
    options = options or EngineOptions()
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}", param="device")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu", param="device")
    if prefill not in ("bounded", "exact"):
        raise ConfigError(f"prefill must be 'bounded' or 'exact', got {prefill!r}", param="prefill")
    config = weights.config
    tokenizer = Tokenizer.load(weights.tokenizer_path, chat=chat)
    codec = ChatCodec(tokenizer) if chat else None
    backbone = Backbone(
        weights,
        device=device,
        weight_cache_bytes=options.weight_cache_bytes,
        batch_invariant=options.batch_invariant,
        progress=progress,
    )
    layout = KVLayout.of(config)
    blocks = BlockPool(layout, _pool_blocks(layout, options, config.max_position_embeddings, device), device)
    windows = WindowPool(layout, config, options.max_sequences + 1, device)
    identity = f"{weights.fingerprint}/{tokenizer.fingerprint}/{ENCODING_VERSION}"
    manager = CacheManager(layout, blocks, windows, identity, options.prefix_reuse, poison=options.poison)
    tiers = tiers or TierOptions()
    reservoir = open_tiers(manager, tiers, device, clock) if options.prefix_reuse else None
    persistent = reservoir is not None and reservoir.store is not None
    metrics = Metrics(CollectorRegistry(), model=model_name, window_tokens=layout.window, ssd=persistent)
    runner = Runner(backbone, blocks, windows)
    return Engine(runner, manager, tokenizer, options, metrics, prefill=prefill, codec=codec, reservoir=reservoir)


def open_tiers(manager: CacheManager, options: TierOptions, device: str, clock: Callable[[], float]) -> Reservoir | None:
    """The SSD store and the snapshot pool of a cache, None when neither is wanted.

    Raises:
        ConfigError: the folder cannot be used, or the URL is none.
    """
    if options.dir is None and options.redis_url is None:
        return None
    layout, identity = manager.layout, f"{manager.fingerprint} {manager.layout.identity}"
    store, pool, embedded = None, None, None
    if options.dir is not None:
        size = max(staging_bytes(4, layout.block_bytes), options.staging_bytes)
        staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        budget = ssd_budget(options.dir, options.ssd_bytes)
        ssd = SsdOptions(options.dir, budget, options.ssd_free_bytes, options.ssd_ttl_s, queue_bytes=options.ssd_queue_bytes)
        store = SsdStore(ssd, identity=identity, block_bytes=layout.block_bytes, staging=staging.numpy(), clock=clock)
    try:
        if options.redis_url is not None:
            url = options.redis_url
            if url == EMBEDDED:
                embedded = EmbeddedRedis.start(options.swa_bytes)
                url = embedded.url
            swa = SwaOptions(url, options.redis_cluster, options.swa_ttl_s, options.redis_timeout_s)
            pool = SwaPool(swa, identity=identity, shape=SnapshotShape.of(layout, layout.encoder_layers), clock=clock)
    except BaseException:
        if embedded is not None:
            embedded.stop()
        if store is not None:
            store.close()
        raise
    return Reservoir(manager, store=store, pool=pool, embedded=embedded)


def _pool_blocks(layout: KVLayout, options: EngineOptions, max_position: int, device: str) -> int:
    """Blocks of the pool, the null block included; called when the weights are in the device's memory already."""
    tokens = options.kv_tokens
    if tokens is None:
        free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else Machine.here(Path.cwd()).memory_free
        context = min(options.max_context or max_position, max_position)
        affordable = int(free * KV_SHARE / layout.block_bytes) * layout.block_tokens
        tokens = max(layout.block_tokens, min(max(2 * context, DEFAULT_KV_TOKENS), affordable))
    return layout.blocks_for(tokens) + 1


def build_client(
    *,
    model: str,
    model_name: str | None = None,
    device: str = "cpu",
    threads: int = 1,
    prefill: PrefillMode = "bounded",
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    tiers: TierOptions | None = None,
    clock: Callable[[], float] = time.time,
) -> EngineClient:
    """Resolve, open and check a model, and build the engine that serves it. Blocks for as long as loading takes.

    `tiers` and `clock` as in `build_engine`.
    """
    torch.set_num_threads(threads)
    source = resolve(model)
    weights = source.open(scan=True, progress=progress)
    name = model_name or source.name
    engine = build_engine(
        weights, model_name=name, device=device, prefill=prefill, options=options, progress=progress, tiers=tiers, clock=clock
    )
    assert engine.codec is not None
    # A server keeps its weights and tables for ever; later collections need not walk them. The process of an `LLM` is its caller's.
    gc.collect()
    gc.freeze()
    return EngineClient(engine, engine.codec, name)
