"""Prefill and decode of the network alone, without HTTP: bounded against exact prefill, and step time by context length."""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.engine import gpu_timing
from forebay.engine.active_flops import prefill_flops
from forebay.engine.llm import LLM
from forebay.engine.types import EngineError, PrefillMode, Request, SamplingParams
from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.commands.bench import numbers, path_taken
from forebay.server.config import Config

SEED = 20_261_129  # prompts are the same in every run
WARM_UP_STEPS = 3  # decode steps after a prefill that are not timed


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run `bench prefill`, `decode` or `invariance`. Returns the figures; the flag is always true, since nothing is judged here."""
    config, _ = read_settings(args)
    torch.set_num_threads(config.engine.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    figures = {"prefill": prefill, "decode": decode, "invariance": invariance}[args.bench](args, config, err)
    _show(figures, out)
    return figures, True


def prefill(args: argparse.Namespace, config: Config, err: Console) -> dict[str, Any]:
    """Seconds of a prompt's prefill (to its first token) in both modes, interleaved; every prompt is new, so nothing is reused."""
    modes: tuple[PrefillMode, ...] = ("bounded", "exact")
    model = _model(config, config.engine.prefill, args.tokens + 1)
    draw = random.Random(SEED)
    for mode in modes:
        # Kernels of a GPU are compiled for the rows of a step.
        _prefill_once(model, _prompt(draw, model, min(args.tokens, max(256, 2 * model.engine.options.budgets[0]))), mode)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(args.repeats):
        for mode in modes:
            seconds[mode].append(_prefill_once(model, _prompt(draw, model, args.tokens), mode))
        shown = ", ".join(f"{mode} {values[-1]:.3f} s" for mode, values in seconds.items())
        err.print(f"run {repeat + 1} of {args.repeats}: {shown}", style="dim")
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    figures: dict[str, Any] = {
        "measured": f"prefill of {args.tokens:,} tokens, {_where(config, model)}",
        "tokens": args.tokens,
        "seconds": seconds,
        "rows": {mode: {"median, ms": median * 1000, "tokens/s": args.tokens / median} for mode, median in medians.items()},
        "ratio": medians["bounded"] / medians["exact"],
        "ratio_of": "bounded / exact",
    }
    if config.engine.device.startswith("cuda"):
        ceilings = gpu_timing.measure_ceilings(torch.device(config.engine.device))
        figures["ceilings"] = asdict(ceilings)
        for mode, row in figures["rows"].items():
            rate = prefill_flops(model.config, args.tokens, exact=mode == "exact") / medians[mode]
            row |= {"TFLOP/s": rate / 1e12, "of bf16 peak, %": 100 * rate / ceilings.bf16}
    return figures


def decode(args: argparse.Namespace, config: Config, err: Console) -> dict[str, Any]:
    """Seconds of a decode step of one sequence at each context length, the lengths visited in turn."""
    contexts = _contexts(args.contexts)
    many = args.batches or ("1,8,64" if config.engine.device.startswith("cuda") else "")
    counts = numbers(many, "--streams") if many else []
    longest = max(contexts) + WARM_UP_STEPS + args.steps + 2
    model = _model(config, config.engine.prefill, longest, sequences=len(contexts))
    draw = random.Random(SEED)
    prompts = {length: _prompt(draw, model, length) for length in contexts}
    seconds: dict[str, list[float]] = {f"{length:,}": [] for length in contexts}
    for repeat in range(args.repeats):
        for length, prompt in prompts.items():
            steps = _decode_steps(model, args.steps, prompt)
            seconds[f"{length:,}"] += steps
            err.print(f"visit {repeat + 1} of {args.repeats} to {length:,}: {statistics.median(steps) * 1000:.2f} ms a step", style="dim")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first, last = f"{min(contexts):,}", f"{max(contexts):,}"
    where = _where(config, model)
    model.close()
    del model  # another one follows, whose weights may need its memory
    gc.collect()
    return {
        "measured": f"decode step of one sequence, {where}",
        "contexts": contexts,
        "seconds": seconds,
        "rows": {name: {"median, ms": median * 1000, "steps/s": 1 / median} for name, median in medians.items()},
        "ratio": medians[last] / medians[first],
        "ratio_of": f"{last} / {first}",
        "streams": streams(args, config, err, counts, min(contexts)) if counts else None,
    }


def streams(args: argparse.Namespace, config: Config, err: Console, counts: list[int], context: int) -> dict[str, Any]:
    """Steps of so many sequences through the whole engine, as it serves them.

    With captured graphs also: what the device takes for the network's graph, what the host takes for a step (the same steps without the
    network, the sampling included), and what of it shows: the step less the device's part.
    """
    model = _model(config, config.engine.prefill, context + 2 * args.steps + 256, sequences=max(counts))
    draw, engine = random.Random(SEED), model.engine
    rows: dict[str, dict[str, float]] = {}
    for count in counts:
        prompts = [_prompt(draw, model, context) for _ in range(count)]
        seconds = statistics.median(_decode_steps(model, args.steps, *prompts))
        row = rows[f"{count}"] = {"step, ms": seconds * 1000, "tokens/s": count / seconds}
        step_of, buckets = getattr(engine.runner, "step_of", None), getattr(engine.runner, "buckets", [0])
        if step_of is not None and count <= buckets[-1]:  # more run as several graphs
            step, timer = step_of(count), timer_of(engine.runner.device)
            device = statistics.median(timer.each(step.replay, args.steps))
            step.replay = lambda: None
            try:
                host = statistics.median(_decode_steps(model, args.steps, *prompts))
            finally:
                del step.replay
            row |= {"graph, ms": device * 1000, "host, ms": host * 1000, "shows, ms": max(0.0, seconds - device) * 1000}
        err.print(f"{count} streams: {seconds * 1000:.2f} ms a step", style="dim")
    return {"measured": f"decode of many sequences at {context:,} tokens, {_where(config, model)}", "context": context, "rows": rows}


def timer_of(device: torch.device) -> gpu_timing.Timer:
    """How device work is timed; tests have another."""
    return gpu_timing.CudaTimer(device)


def invariance(args: argparse.Namespace, config: Config, err: Console) -> dict[str, Any]:
    """Seconds of a prefill and of a decode step of many sequences, with products over row tiles of one size and over all rows at once.

    Raises:
        ConfigError: on a GPU, where nothing asks for batch invariance and both ways would run the same code.
    """
    if config.engine.device != "cpu":
        raise ConfigError(f"bench: batch invariance is for the CPU, on {config.engine.device} it changes nothing; use --device cpu")
    models = {
        name: _model(config, config.engine.prefill, args.tokens + 1, sequences=args.streams, batch_invariant=flag)
        for name, flag in (("invariant", True), ("not invariant", False))
    }
    draw = random.Random(SEED)
    for model in models.values():
        _prefill_once(model, _prompt(draw, model, min(args.tokens, 256)))
    seconds: dict[str, list[float]] = {}
    for repeat in range(args.repeats):
        prompt = _prompt(draw, models["invariant"], args.tokens)
        short = [_prompt(draw, models["invariant"], 64) for _ in range(args.streams)]
        for name, model in models.items():
            seconds.setdefault(f"prefill, {name}", []).append(_prefill_once(model, prompt))
            steps = _decode_steps(model, 16, *short)
            seconds.setdefault(f"decode step of {args.streams}, {name}", []).append(statistics.median(steps))
        shown = ", ".join(f"{name} {values[-1] * 1000:.0f} ms" for name, values in seconds.items())
        err.print(f"run {repeat + 1} of {args.repeats}: {shown}", style="dim", soft_wrap=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    where = _where(config, models["invariant"])
    step, plain = (medians[f"decode step of {args.streams}, {name}"] for name in models)
    return {
        "measured": f"price of batch invariance: prefill of {args.tokens:,} tokens, decode of {args.streams} sequences, {where}",
        "tokens": args.tokens,
        "streams": args.streams,
        "seconds": seconds,
        "rows": {name: {"median, ms": median * 1000} for name, median in medians.items()},
        "prefill_ratio": medians["prefill, invariant"] / medians["prefill, not invariant"],
        "ratio": step / plain,
        "ratio_of": "decode step, invariant / not invariant",
    }


def _where(config: Config, model: LLM) -> str:
    return f"{config.model.path} on {path_taken(model)}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def _model(config: Config, mode: PrefillMode, context: int, *, sequences: int = 1, batch_invariant: bool | None = None) -> LLM:
    engine = config.engine
    model = LLM(
        config.model.path,
        device=engine.device,
        prefill=mode,
        max_sequences=max(sequences, 2),
        encoder_tokens=engine.encoder_tokens,
        decoder_tokens=engine.decoder_tokens,
        kv_tokens=config.cache.kv_tokens or (sequences + 1) * (context + 1024),
        weight_cache_bytes=engine.weight_cache_bytes,
        batch_invariant=engine.batch_invariant if batch_invariant is None else batch_invariant,
        aging_s=0.0,
        kernels=engine.kernels,
    )
    if context > model.engine.max_context:
        raise ConfigError(f"bench: {context} tokens are needed, the context of {config.model.path} is {model.engine.max_context}")
    return model


def _prompt(numbers: random.Random, model: LLM, tokens: int) -> list[int]:
    """Random ordinary tokens."""
    special = model.tokenizer.stop_ids
    ids = [i for i in range(model.tokenizer.vocab_size) if i not in special and i != model.tokenizer.image_id]
    return numbers.choices(ids, k=tokens)


def _prefill_once(model: LLM, prompt: list[int], mode: PrefillMode | None = None) -> float:
    began = time.perf_counter()
    model.run([Request(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), prefill=mode)])
    return time.perf_counter() - began


def _decode_steps(model: LLM, count: int, *prompts: list[int]) -> list[float]:
    """Prefill (or reuse) prompts, then time `count` steps in which all of them decode and nothing else runs."""
    engine = model.engine
    engine.sink = lambda events: None
    # Those that are prefilled first decode, a token a step, while the others still prefill.
    spare = WARM_UP_STEPS + (sum(map(len, prompts)) // engine.options.budgets[0] + len(prompts) if len(prompts) > 1 else 0)
    for prompt in prompts:
        engine.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=spare + count + 1, ignore_eos=True)))
    seconds = []
    while engine.busy:
        report = engine.step()
        if report.rows == report.decode_rows == len(prompts):
            seconds.append(report.seconds)
    if len(seconds) < count:
        raise EngineError(f"{len(seconds)} decode steps ran, {count} were asked for")
    return seconds[-count:]


def _contexts(text: str) -> list[int]:
    try:
        contexts = [int(part) for part in text.split(",")]
    except ValueError:
        contexts = []
    if len(contexts) < 2 or min(contexts) < 1:
        raise ConfigError(f"bench: --contexts takes two or more lengths such as 1024,16384, got {text!r}")
    return contexts


def _show(figures: dict[str, Any], out: Console) -> None:
    _table(figures, out)
    out.print(f"{figures['ratio_of']}: {figures['ratio']:.3f}", style="bold")
    if figures.get("streams"):
        _table(figures["streams"], out)


def _table(figures: dict[str, Any], out: Console) -> None:
    out.print(figures["measured"], style="bold", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    columns = next(iter(figures["rows"].values()))
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in figures["rows"].items():
        table.add_row(name, *(f"{row[column]:,.2f}" if column in row else "" for column in columns))
    out.print(table)
