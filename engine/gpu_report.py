"""Figures of a GPU run: where and when they were measured, and a Markdown table of them."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
from dataclasses import asdict
from typing import Any

import torch

from forebay.engine.gpu_timing import Ceilings


def header(device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    """Date, device, driver, clocks where they can be read, versions and ceilings."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
        state = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip().splitlines()[:1]
    except (OSError, subprocess.TimeoutExpired):
        state = []
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device),
        "driver and clocks": state[0] if state else None,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "ceilings": asdict(ceilings),
    }


def where(figures: dict[str, Any]) -> str:
    """The line above a table: device, date, versions and ceilings."""
    c = figures["ceilings"]
    peak = f"copy {c['copy'] / 1e12:.2f} TB/s, bf16 {c['bf16'] / 1e12:.0f} TFLOP/s"
    return f"{figures['device']}, {figures['date']}, torch {figures['torch']}, triton {figures['triton']}; {peak}"


def markdown(figures: dict[str, Any]) -> str:
    """The table of `bench kernels`. Times in microseconds, with the L2 cache flushed and with inputs left in it."""
    lines = [
        where(figures),
        "",
        "| kernel | flushed, µs | cached, µs | floor, µs | floor / flushed | baseline, µs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in figures["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | failed: {row['error'].replace('|', '/')} | | | | |")
            continue
        floor = max(row["bytes_floor_s"], row["flops_floor_s"])
        beside = f"{row['baseline_s'] * 1e6:.1f} ({row['baseline']})" if "baseline" in row else ""
        times = f"{row['cold_s'] * 1e6:.1f} | {row['warm_s'] * 1e6:.1f} | {floor * 1e6:.2f} | {row['fraction']:.0%}"
        lines.append(f"| {row['name']} | {times} | {beside} |")
    return "\n".join(lines) + "\n"
