"""Builds an engine from the name of a model."""

from __future__ import annotations

import gc
import logging
import math
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
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
from forebay.engine.encoder import EmbeddingCache, Encoder
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.plan import Machine
from forebay.engine.reservoir import Reservoir
from forebay.engine.runner import Runner
from forebay.engine.tiers import EMBEDDED, TierOptions, ssd_budget
from forebay.engine.types import PrefillMode
from forebay.engine.worker import Engine
from forebay.model.chat import ENCODING_VERSION, ChatCodec, ChatVision
from forebay.model.checkpoint import Weights
from forebay.model.config import ModelConfig, VisionConfig
from forebay.model.errors import ConfigError
from forebay.model.network import Backbone
from forebay.model.source import resolve
from forebay.model.tokenizer import Tokenizer
from forebay.model.vision import VisionTower

DEFAULT_KV_TOKENS = 262_144
KV_SHARE = 0.4  # of a CPU's free memory, at most, when `kv_tokens` is not given
TORCH_SHARE = 0.5  # of a GPU's free memory is left to torch operations, whose working memory is not known beforehand
MOST_BLOCKS = 1 << 20  # chosen for a GPU: the host's lists of more would take hundreds of megabytes; 134M tokens of the released model
TRITON = (3, 6)  # with the layouts and instructions that some of them spell out
HOPPER = (9, 0)  # compute capability that the GPU kernels are written for

Progress = Callable[[int, int, str], None]

log = logging.getLogger("forebay.engine")


def check_device(device: str) -> None:
    """Raise ConfigError unless the device is one that networks run on and is there."""
    if device != "cpu" and re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}", param="device")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu", param="device")


def without_kernels(config: ModelConfig, device: str) -> str | None:
    """Why the GPU kernels cannot run a model on a CUDA device, None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed (the extra `gpu`)"
    if tuple(int(part) for part in version("triton").split(".")[:2]) < TRITON:
        return f"they need triton {TRITON[0]}.{TRITON[1]} or newer, {version('triton')} is installed"
    if (found := torch.cuda.get_device_capability(device)) < HOPPER:
        return f"they need compute capability {HOPPER[0]}.{HOPPER[1]}, this GPU has {found[0]}.{found[1]}"
    if (index := torch.device(device).index) is not None and index != torch.cuda.current_device():
        return f"they run on the current CUDA device, which {device} is not; choose a GPU by CUDA_VISIBLE_DEVICES"
    from forebay.model.fused.weights import check_shapes

    try:
        check_shapes(config)
    except ConfigError as error:
        return error.message
    return None


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
    kernels: bool = True,
) -> Engine:
    """An engine over opened weights. With `chat`, the tokenizer must have the tokens of the chat encoding.

    `clock` tells the age of what the tiers keep, in seconds since the epoch. With `kernels` the network runs as Triton kernels and
    captured graphs on a CUDA device that can run them, else as torch operations.

    Raises:
        ConfigError: the device is not there, or a tier cannot be opened.
    """
    options = options or EngineOptions()
    check_device(device)
    if prefill not in ("bounded", "exact"):
        raise ConfigError(f"prefill must be 'bounded' or 'exact', got {prefill!r}", param="prefill")
    config = weights.config
    tokenizer = Tokenizer.load(weights.tokenizer_path, chat=chat)
    layout = KVLayout.of(config)
    fused = kernels and device.startswith("cuda")
    if fused and (why := without_kernels(config, device)) is not None:
        log.warning("the GPU kernels cannot run this model, torch operations do: %s", why)
        fused = False
    options = options.settled(fused)
    tower = VisionTower(weights, device=device) if weights.has_vision else None  # before KV takes what is free
    vision = None if tower is None else ChatVision.of(config, tower.identity)
    codec = ChatCodec(tokenizer, vision=vision) if chat else None
    beside = 0 if tower is None else options.image_cache_bytes + encode_bytes(tower.config)
    runner = (_fused_runner if fused else _torch_runner)(weights, layout, device, options, progress, beside)
    blocks, windows = runner.blocks, runner.windows
    identity = f"{weights.fingerprint}/{tokenizer.fingerprint}/{ENCODING_VERSION}"
    manager = CacheManager(layout, blocks, windows, identity, options.prefix_reuse, poison=options.poison)
    tiers = tiers or TierOptions()
    reservoir = open_tiers(manager, tiers, device, clock) if options.prefix_reuse else None
    persistent = reservoir is not None and reservoir.store is not None
    metrics = Metrics(CollectorRegistry(), model=model_name, window_tokens=layout.window, ssd=persistent)
    encoder = None
    if tower is not None:
        encoder = Encoder(tower, EmbeddingCache(options.image_cache_bytes, options.image_cache_ttl_s), metrics.images)
    return Engine(runner, manager, tokenizer, options, metrics, prefill=prefill, codec=codec, reservoir=reservoir, encoder=encoder)


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


def encode_bytes(vision: VisionConfig) -> int:
    """Device memory that encoding the largest image takes beside the tower, about: 38 bytes a patch and channel on an H200."""
    patches = (vision.max_image_tokens - 3) * vision.downsample_ratio**2
    return 40 * patches * vision.hidden_size


def _torch_runner(
    weights: Weights, layout: KVLayout, device: str, options: EngineOptions, progress: Progress | None, beside: int = 0
) -> Runner:
    """The network as torch operations, on any device. `beside`: bytes of the device that are not for KV."""
    backbone = Backbone(
        weights,
        device=device,
        weight_cache_bytes=options.weight_cache_bytes,
        batch_invariant=options.batch_invariant,
        progress=progress,
    )
    config = weights.config
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # what a network that is gone has held, or loading this one, is free as well
        free = torch.cuda.mem_get_info(device)[0]
        most = _kv_limit(layout, config, options, free, int(free * TORCH_SHARE) + beside)
    else:
        most = int((Machine.here(Path.cwd()).memory_free - beside) * KV_SHARE)
    blocks, windows = _pools(layout, config, options, device, most)
    return Runner(backbone, blocks, windows)


def _fused_runner(
    weights: Weights, layout: KVLayout, device: str, options: EngineOptions, progress: Progress | None, beside: int = 0
) -> Runner:
    """The network as GPU kernels, its decode graphs captured. `beside`: bytes of the device that are not for KV."""
    from forebay.engine.fused_runner import FusedRunner, working_bytes
    from forebay.model.fused.network import FusedBackbone

    config = weights.config
    torch.cuda.empty_cache()  # of a network that is gone; the free memory decides what is kept beside the weights
    backbone = FusedBackbone(weights, device=device, progress=progress)
    torch.cuda.empty_cache()  # what loading has used and no longer needs is free as well
    longest, chunk = _longest(options, config), max(options.budgets)
    working = working_bytes(config, options.max_sequences, chunk, longest) + beside
    most = _kv_limit(layout, config, options, torch.cuda.mem_get_info(device)[0], working)
    blocks, windows = _pools(layout, config, options, device, most)
    runner = FusedRunner(backbone, blocks, windows, max_tokens=longest)
    runner.warm(options.max_sequences, progress, chunk=chunk)
    return runner


def _kv_limit(layout: KVLayout, config: ModelConfig, options: EngineOptions, free: int, working: int) -> int:
    """Bytes of blocks that a GPU gets, of `free` bytes beside the weights; `working` is what steps may take. 0 if `kv_tokens` says it.

    Raises:
        ConfigError: there is not room for the longest sequence.
    """
    if options.kv_tokens is not None:
        return 0
    reserved = working + (options.max_sequences + 1) * (layout.window_bytes + layout.pending_bytes)
    return _kv_bytes(layout, free, reserved, options.kv_memory_fraction, _longest(options, config))


def _kv_bytes(layout: KVLayout, free: int, reserved: int, fraction: float = 0.9, longest: int = 1) -> int:
    """Bytes of blocks that a GPU has room for: a fraction of `free` bytes beside the weights, less `reserved` ones for steps and windows.

    Raises:
        ConfigError: there is not room for `longest` tokens, or for one block.
    """
    rest = free - reserved
    most = int(rest * fraction)
    tokens = (most // layout.block_bytes - 1) * layout.block_tokens  # one is the null block
    if tokens >= max(longest, 1):
        return most
    cause = f"{free / 1e9:.1f} GB are free beside the weights, and steps and windows may take {reserved / 1e9:.1f} GB"
    if rest >= 2 * layout.block_bytes:
        cause += f"; of the rest KV gets {fraction:g} (kv_memory_fraction)"
    advice = ["lower max_sequences, max_context or encoder_tokens", "give kv_tokens"]
    if tokens > 0:
        advice[0] = f"lower max_context to {tokens}, or max_sequences or encoder_tokens"
    # Rounded up, and a little more, since `most` is rounded down.
    enough = math.ceil(1000 * (layout.blocks_for(longest) + 1) * layout.block_bytes / rest + 0.01) / 1000 if rest > 0 else math.inf
    if enough <= 1:
        advice.insert(0, f"raise kv_memory_fraction to {enough:g}")
    elif tokens <= 0 and rest >= 2 * layout.block_bytes:
        advice[0] = f"raise kv_memory_fraction and {advice[0]}"
    if tokens > 0:
        what, param = f"GPU memory is left for {tokens:,} tokens of KV, the longest sequence has {longest:,}", "max_context"
    else:
        what, param = "no GPU memory is left for KV", "kv_memory_fraction" if enough <= 1 else "kv_tokens"
    raise ConfigError(f"{what}: {cause}; {', or '.join(advice)}", param=param)


def _longest(options: EngineOptions, config: ModelConfig) -> int:
    """Tokens of the longest sequence."""
    return min(options.max_context or config.max_position_embeddings, config.max_position_embeddings)


def _pools(layout: KVLayout, config: ModelConfig, options: EngineOptions, device: str, most: int) -> tuple[BlockPool, WindowPool]:
    """Memory for KV, the null block and the null slot included.

    `most`: bytes of blocks, when `kv_tokens` is not given. A GPU's are used, since nothing else needs them and they keep prefixes; a CPU's
    as far as two of the longest sequences take them.
    """
    tokens = options.kv_tokens
    if tokens is None:
        affordable = most // layout.block_bytes * layout.block_tokens
        if device == "cpu":
            tokens = max(layout.block_tokens, min(max(2 * _longest(options, config), DEFAULT_KV_TOKENS), affordable))
        else:
            tokens = min(affordable - layout.block_tokens, MOST_BLOCKS * layout.block_tokens)  # and the null block
    return BlockPool(layout, layout.blocks_for(tokens) + 1, device), WindowPool(layout, config, options.max_sequences + 1, device)


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
    kernels: bool = True,
) -> EngineClient:
    """Resolve, open and check a model, and build the engine that serves it. Blocks for as long as loading takes.

    `tiers`, `clock` and `kernels` as in `build_engine`.
    """
    torch.set_num_threads(threads)
    source = resolve(model)
    check_device(device)
    weights = source.open(scan=True, progress=progress, device=device)
    name = model_name or source.name
    engine = build_engine(
        weights, model_name=name, device=device, prefill=prefill, options=options, progress=progress, tiers=tiers, clock=clock,
        kernels=kernels,
    )  # fmt: skip
    assert engine.codec is not None
    # A server keeps its weights and tables for ever; later collections need not walk them. The process of an `LLM` is its caller's.
    gc.collect()
    gc.freeze()
    return EngineClient(engine, engine.codec, name)
