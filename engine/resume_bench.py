"""Time to the first token of a long prompt by where its KV comes from: computed, device memory, SSD, and SSD without Redis."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from forebay.cache.embedded import EmbeddedRedis
from forebay.engine.cache_bench import SEED, BenchError, Report
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.engine.types import Output, SamplingParams

SPARE_TOKENS = 64  # of the block pool, beside one prompt: a second one evicts the first
REDIS_BYTES = 64 << 20
# What each way must take at most, as a share of cold.
LIMITS = {"cold": None, "in memory": 0.15, "on SSD": 0.2, "on SSD, Redis down": 0.25}

Open = Callable[[TierOptions, int], LLM]


def measure(open_model: Open, folder: Path, *, tokens: int, repeats: int, report: Report) -> dict[str, list[float]]:
    """Seconds from arrival to first token of prompts of `tokens` tokens, by way (the keys of `LIMITS`).

    The block pool holds one prompt, so that each new one sends the last to the SSD store alone. Redis is stopped for the last way.

    Args:
        open_model: opens the model with these tiers and this many tokens of KV.
        folder: for the store; empty.

    Raises:
        BenchError: a prompt did not come from where it should have.
        ConfigError: there is no server program for Redis, or the folder cannot be used.
    """
    redis = EmbeddedRedis.start(REDIS_BYTES)
    try:
        # Patient: a pause of this process, which a server hardly has, would make a replay of a resume from a snapshot.
        model = open_model(TierOptions(dir=folder, redis_url=redis.url, redis_timeout_s=1.0), tokens + SPARE_TOKENS)
        try:
            return run(model, redis, tokens, repeats, report)
        finally:
            model.close()
    finally:
        redis.stop()


def run(model: LLM, redis: EmbeddedRedis, tokens: int, repeats: int, report: Report) -> dict[str, list[float]]:
    numbers = random.Random(SEED)
    seconds: dict[str, list[float]] = {way: [] for way in LIMITS}

    def time(way: str, prompt: list[int]) -> None:
        output = model.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))[0]
        check(way, output, model)
        assert output.times.first_token is not None
        seconds[way].append(output.times.first_token - output.times.arrived)
        report(f"{way}: {seconds[way][-1] * 1000:,.1f} ms, {output.tiers}")

    model.generate([prompt_of(numbers, model, min(tokens, 256))], SamplingParams(temperature=0.0, max_tokens=1))
    kept = []
    for _ in range(repeats):
        first, second = prompt_of(numbers, model, tokens), prompt_of(numbers, model, tokens)
        time("cold", first)
        time("in memory", first)
        time("cold", second)
        time("on SSD", first)
        kept.append(second)
    redis.stop()
    for prompt in kept:
        time("on SSD, Redis down", prompt)
    return seconds


def check(way: str, output: Output, model: LLM) -> None:
    """A figure is worth something only if the prompt came from where it was thought to be."""
    tiers, length = output.tiers, len(output.prompt_ids)
    # The last blocks are computed whatever there is, and a few of the first may have stayed on the device.
    most = length - 3 * model.engine.manager.layout.block_tokens
    came = {
        "cold": tiers.compute == length,
        "in memory": tiers.hbm >= most and not tiers.ssd,
        "on SSD": tiers.ssd >= most and tiers.window == "swa",
        "on SSD, Redis down": tiers.ssd >= most and tiers.window == "replay",
    }
    if not came[way]:
        raise BenchError(f"a prompt of {length:,} tokens was to come from {way!r}, it came from {tiers}")


def prompt_of(numbers: random.Random, model: LLM, tokens: int) -> list[int]:
    """Random ordinary tokens."""
    special = model.tokenizer.stop_ids
    return numbers.choices([i for i in range(model.tokenizer.vocab_size) if i not in special and i != model.tokenizer.image_id], k=tokens)
