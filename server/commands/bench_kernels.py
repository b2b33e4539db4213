"""Kernels on a GPU, each beside its floor."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console

from forebay.engine import gpu_report, gpu_timing, kernel_bench
from forebay.model.errors import ConfigError


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the chosen cases. The flag is false if a kernel failed.

    Raises:
        ConfigError: no CUDA device, or no case has such a name.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels: this machine has no CUDA device that torch can use")
    chosen = kernel_bench.cases(args.only)
    if not chosen:
        raise ConfigError(f"bench: --only {' '.join(args.only)} names no kernel")
    if args.tune and not (chosen := kernel_bench.variants(chosen)):
        raise ConfigError("bench: --tune has candidates for the attention only")
    device = torch.device("cuda")

    def report(line: str) -> None:
        err.print(line, style="dim", markup=False, soft_wrap=True)

    ceilings = gpu_timing.measure_ceilings(device)
    rows, left = kernel_bench.measure(chosen, device, ceilings, budget=args.budget, report=report)
    figures = {**gpu_report.header(device, ceilings), "rows": rows, "not run": left}
    table = gpu_report.markdown(figures)
    out.print(table, markup=False, soft_wrap=True)
    if args.tune and (fine := [row for row in rows if "error" not in row]):
        for case in dict.fromkeys(row["name"].partition(":")[0] for row in fine):
            best = min((row for row in fine if row["name"].startswith(f"{case}:")), key=lambda row: row["cold_s"])
            out.print(f"best: {best['name']}, {best['cold_s'] * 1e6:.1f} us", markup=False, soft_wrap=True)
    if left:
        out.print(f"not run, --budget was spent: {', '.join(left)}", markup=False, soft_wrap=True)
    if args.markdown:
        args.markdown.write_text(table, "utf-8")
    return figures, args.tune or not any("error" in row for row in rows)
