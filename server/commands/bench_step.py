"""The network on a GPU beside its floors: decode steps, kernels of a layer, prefill, memory."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from rich.console import Console

from forebay.engine import gpu_report, gpu_timing, step_bench, step_report
from forebay.engine.step_run import PARTS, Run, Wanted, pairs
from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.commands.bench import numbers

MODEL = "synthetic:v41-flash,experts=64"


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the chosen parts. The flag is false if one failed; a bar that is missed is no failure.

    Raises:
        ConfigError: no CUDA device, or lists that are none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench step: this machine has no CUDA device that torch can use")
    config, origins = read_settings(args)
    if unknown := [part for part in args.part or () if part not in PARTS]:
        raise ConfigError(f"bench: --part takes some of {', '.join(PARTS)}, got {unknown[0]!r}")
    model = MODEL if origins.get("model.path", "default") == "default" else config.model.path
    if args.layers is not None:
        model = f"{model},layers={args.layers}"
    wanted = Wanted(
        tuple(args.part or PARTS),
        pairs(numbers(args.batches, "--batches"), numbers(args.contexts, "--contexts"), args.most_tokens),
        args.samples, numbers(args.chunks, "--chunks"), args.prompt, args.repeats, args.rows, (args.torch_model, args.torch_tokens),
    )  # fmt: skip
    began = time.monotonic()
    device = torch.device("cuda")
    ceilings = gpu_timing.measure_ceilings(device)
    torch.cuda.empty_cache()

    def report(line: str) -> None:
        err.print(f"{time.monotonic() - began:6.1f} s  {line}", style="dim", markup=False, soft_wrap=True)
        if args.json:  # what there is so far: a run that is stopped loses nothing
            args.json.write_text(json.dumps(run.figures), "utf-8")

    run = Run(wanted, model, "cuda", gpu_timing.CudaTimer(device), ceilings, args.budget, report)
    figures = {**gpu_report.header(device, ceilings), **run.all()}
    figures["bars"] = step_report.bars(figures)
    table = step_report.markdown(figures)
    out.print(table, markup=False, soft_wrap=True)
    if figures["launches"]:
        out.print(step_report.busiest(figures, step_bench.TOP), markup=False, soft_wrap=True)
    if figures["not run"]:
        out.print(f"not run, --budget was spent: {', '.join(figures['not run'])}", markup=False, soft_wrap=True)
    if args.markdown:
        args.markdown.write_text(table, "utf-8")
    return figures, not figures["errors"]
