"""`forebay bench restore`: what decoding streams notice of a prefix that comes back from the SSD store."""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.engine import restore_bench
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.commands.scratch import scratch

MOST_GROWTH = 1.2  # of the 99th percentile between tokens, in steps that restore and compute nothing else


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the benchmark on the disk of `cache.dir`. Returns the figures; the flag is always true: a slow machine is no failure."""
    config, _ = read_settings(args)
    torch.set_num_threads(config.engine.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    engine = config.engine

    def open_model(tiers: TierOptions, tokens: int, sequences: int) -> LLM:
        model = LLM(
            config.model.path,
            device=engine.device,
            prefill=engine.prefill,
            tiers=tiers,
            max_sequences=sequences,
            encoder_tokens=engine.encoder_tokens,
            decoder_tokens=engine.decoder_tokens,
            kv_tokens=tokens,
            weight_cache_bytes=engine.weight_cache_bytes,
            batch_invariant=engine.batch_invariant,
            replay=config.cache.replay,
            kernels=engine.kernels,
        )
        if args.tokens + 1 >= model.engine.max_context:
            model.close()
            raise ConfigError(f"bench: --tokens {args.tokens}: the context of {config.model.path} is {model.engine.max_context}")
        gc.collect()
        gc.freeze()  # as a server does, whose collections do not walk the model
        return model

    def report(line: str) -> None:
        err.print(line, style="dim", markup=False, soft_wrap=True)

    with scratch(config) as folder:
        found = restore_bench.measure(
            open_model, folder, tokens=args.tokens, streams=args.streams, context=args.context, steps=args.steps,
            repeats=args.repeats, report=report,
        )  # fmt: skip
    how = ", GPU kernels" if found.captured else ", torch operations" if engine.device.startswith("cuda") else ""
    where = f"{config.model.path} on {engine.device}{how}, {torch.get_num_threads()} threads"
    figures = _figures(args, where, found)
    _show(figures, out)
    return figures, True


def _figures(args: argparse.Namespace, where: str, found: restore_bench.Found) -> dict[str, Any]:
    ways = {"alone": found.alone, "restoring": found.restoring, "restoring and resuming": found.restoring + found.resuming}
    rows = {way: {"p50_s": percentile(gaps, 50), "p99_s": percentile(gaps, 99), "gaps": len(gaps)} for way, gaps in ways.items() if gaps}
    growth = {way: row["p99_s"] / rows["alone"]["p99_s"] for way, row in rows.items() if way != "alone"}
    seconds = statistics.median(found.restore_s)
    return {
        "measured": f"{args.streams} streams while {args.tokens:,} tokens come from SSD, {where}",
        "tokens": args.tokens,
        "streams": args.streams,
        "rows": rows,
        "p99_growth": growth,
        "most": MOST_GROWTH,
        "reached": growth["restoring"] <= MOST_GROWTH if "restoring" in growth else None,
        "restore_s": found.restore_s,
        "restored_bytes": found.restored_bytes,
        "restore_gb_per_s": found.restored_bytes / seconds / 1e9,
    }


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that `share` percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def _show(figures: dict[str, Any], out: Console) -> None:
    out.print(figures["measured"], style="bold", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("between tokens")
    for name in ("p50, ms", "p99, ms", "p99 / alone", "gaps"):
        table.add_column(name, justify="right")
    for way, row in figures["rows"].items():
        ratio = figures["p99_growth"].get(way)
        table.add_row(
            way, f"{row['p50_s'] * 1000:,.2f}", f"{row['p99_s'] * 1000:,.2f}", "" if ratio is None else f"{ratio:.3f}", f"{row['gaps']:,}"
        )  # fmt: skip
    out.print(table)
    style = None if figures["reached"] is None else "green" if figures["reached"] else "red"
    out.print(f"p99 restoring / alone: asked for ≤ {figures['most']:g}", style=style)
    out.print(f"restored: {figures['restore_gb_per_s']:.3f} GB/s, from arrival until all blocks are in")
