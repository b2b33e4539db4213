"""Time to the first token of a long prompt by where its KV comes from, on a model that is opened in this process."""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.engine import resume_bench
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.commands.bench import path_taken
from forebay.server.commands.scratch import scratch


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the benchmark on the disk of `cache.dir`. Returns the figures; the flag is always true: a slow machine is no failure."""
    config, _ = read_settings(args)
    torch.set_num_threads(config.engine.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    engine = config.engine
    on: str = engine.device

    def open_model(tiers: TierOptions, tokens: int) -> LLM:
        nonlocal on
        model = LLM(
            config.model.path,
            device=engine.device,
            prefill=engine.prefill,
            tiers=tiers,
            max_sequences=2,
            encoder_tokens=engine.encoder_tokens,
            decoder_tokens=engine.decoder_tokens,
            kv_tokens=tokens,
            weight_cache_bytes=engine.weight_cache_bytes,
            batch_invariant=engine.batch_invariant,
            replay=config.cache.replay,
            kernels=engine.kernels,
        )
        on = path_taken(model)
        if tokens > model.engine.max_context:
            model.close()
            raise ConfigError(f"bench: {tokens} tokens of KV are needed, the context of {config.model.path} is {model.engine.max_context}")
        return model

    def report(line: str) -> None:
        err.print(line, style="dim", markup=False, soft_wrap=True)

    with scratch(config) as folder:
        seconds = resume_bench.measure(open_model, folder, tokens=args.tokens, repeats=args.repeats, report=report)
    figures = _figures(args, f"{config.model.path} on {on}, {torch.get_num_threads()} threads", seconds)
    _show(figures, out)
    return figures, True


def _figures(args: argparse.Namespace, where: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    rows = {}
    for way, limit in resume_bench.LIMITS.items():
        ratio = medians[way] / medians["cold"]
        rows[way] = {"median_s": medians[way], "ratio": ratio} | ({} if limit is None else {"most": limit, "reached": ratio <= limit})
    return {"measured": f"first token of {args.tokens:,} tokens, {where}", "tokens": args.tokens, "rows": rows, "seconds": seconds}


def _show(figures: dict[str, Any], out: Console) -> None:
    out.print(figures["measured"], style="bold", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("the prompt's KV")
    for name in ("median, ms", "/ cold", "asked for"):
        table.add_column(name, justify="right")
    for way, row in figures["rows"].items():
        style = None if "reached" not in row else "green" if row["reached"] else "red"
        asked = f"≤ {row['most']:g}" if "most" in row else ""
        table.add_row(way, f"{row['median_s'] * 1000:,.1f}", f"{row['ratio']:.3f}", asked, style=style)
    out.print(table)
