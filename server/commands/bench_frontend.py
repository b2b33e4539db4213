"""`forebay bench frontend`: what the server itself costs, with a backend that does nothing but emit tokens."""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from forebay.engine.plan import tokenizer_file
from forebay.server.cli import read_settings
from forebay.server.commands import frontend_prompt
from forebay.server.commands.frontend_load import Outcome, Shape, run

MANY_STEP_S = 1.25  # between the tokens of the streams that are only held open
MANY_TOKENS = 6
SPARE_FILES = 64

# What the figures beside ours are of.
PEERS = {
    "litellm": "litellm: LiteLLM's proxy as it is installed, over a backend in its process that emits the same words as text at the same "
    "pace; unlike forebay's it encodes no prompt and detokenises nothing",
    "fastapi": "fastapi: no product, but an application of ours in FastAPI's usual ways over forebay's own backend, tokenizer and chat "
    "encoding; for LiteLLM's proxy give --peer-python",
}


@dataclass(frozen=True)
class Row:
    """One figure: its median over the rounds, every round, the bar it is to stay under, and the peer's median."""

    what: str
    unit: str
    samples: tuple[float, ...]
    bar: float | None = None
    peer: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    def figures(self) -> dict[str, Any]:
        reached = {} if self.bar is None else {"reached": self.value <= self.bar}
        return {**asdict(self), "value": self.value, **reached}


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the benchmark. Returns its figures, and whether every stream got all of its tokens. A slow machine is no failure."""
    config, _ = read_settings(args)
    tokenizer: Path = args.tokenizer or tokenizer_file(config.model.path)
    peer = _peer(args, err)
    many = min(args.open, raise_files(args.open, err))
    interval = args.streams / args.rate
    paced = Shape(args.streams, max(8, round(args.seconds / interval)), interval, python=args.peer_python or "")
    held = Shape(many, MANY_TOKENS, MANY_STEP_S, python=args.peer_python or "")
    outcomes: dict[str, list[Outcome]] = {}
    load_before = os.getloadavg()[0]
    for number in range(args.repeats):
        for name, shape in {"paced": paced, "held": held}.items():
            for who in ("none", *([peer] if peer else [])):
                whose = "forebay" if who == "none" else who
                err.print(f"round {number + 1} of {args.repeats}: {shape.streams} streams, {whose}", style="dim")
                outcomes.setdefault(f"{name} {whose}", []).append(run(replace(shape, peer=who), tokenizer))
    err.print(f"a prompt of {args.prompt_kb} KB", style="dim")
    parts = frontend_prompt.measure(tokenizer, args.prompt_kb * 1000, args.repeats)
    rows = _rows(args, outcomes, peer, parts)
    lost = {name: _lost(found) for name, found in outcomes.items()}
    figures = {
        "streams": args.streams,
        "rate": args.rate,
        "open": many,
        "prompt_kb": args.prompt_kb,
        "rounds": args.repeats,
        "peer": peer,
        "cores": len(os.sched_getaffinity(0)),
        "load": [load_before, os.getloadavg()[0]],
        "rows": [row.figures() for row in rows],
        "lost": lost,
        "errors": sorted({error for found in outcomes.values() for one in found for error in one.errors})[:5],
    }
    _show(figures, rows, out)
    return figures, not any(count for name, count in lost.items() if name.endswith("forebay"))


def _peer(args: argparse.Namespace, err: Console) -> str | None:
    """The server to measure beside ours, one of `PEERS`."""
    if not args.peer:
        return None
    if args.peer_python:
        return "litellm"
    if importlib.util.find_spec("fastapi"):
        return "fastapi"
    err.print("no peer: give --peer-python, or install fastapi (pip install 'forebay[bench]')", style="yellow")
    return None


def raise_files(streams: int, err: Console) -> int:
    """Allow this process, and the server that it starts, a file for each stream. Returns how many can be open, and says if fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        err.print(f"only {hard} open files are allowed (ulimit -Hn), so {hard - SPARE_FILES} streams are opened", style="yellow")
        needed = hard
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed - SPARE_FILES


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0 for none."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _lost(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.streams - outcome.finished for outcome in outcomes)


def _rows(args: argparse.Namespace, outcomes: dict[str, list[Outcome]], peer: str | None, parts: dict[str, list[float]]) -> list[Row]:
    def row(what: str, unit: str, name: str, of: Any, bar: float | None) -> Row:
        theirs = statistics.median(map(of, outcomes[f"{name} {peer}"])) if peer else None
        return Row(what, unit, tuple(map(of, outcomes[f"{name} forebay"])), bar, theirs)

    at = f"{args.streams} streams"
    return [
        row(f"{at}: CPU per token and stream", "µs", "paced", lambda o: o.cpu / max(1, o.tokens) * 1e6, 40),
        row(f"{at}: added latency, p50", "ms", "paced", lambda o: percentile(o.latencies, 0.5) * 1e3, None),
        row(f"{at}: added latency, p99", "ms", "paced", lambda o: percentile(o.latencies, 0.99) * 1e3, 25),
        row(f"{at}: tokens per second", "", "paced", lambda o: o.tokens / o.seconds, None),
        row("held open: memory per stream", "KB", "held", lambda o: o.open_bytes / 1000, 60),
        row("held open: CPU per token and stream", "µs", "held", lambda o: o.cpu / max(1, o.tokens) * 1e6, None),
        *(
            Row(f"prompt, {name}", "ms", tuple(second * 1e3 for second in seconds), {"cold": 350, "extended": 40}.get(name))
            for name, seconds in parts.items()
        ),
    ]


def _show(figures: dict[str, Any], rows: Sequence[Row], out: Console) -> None:
    load, cores = figures["load"], figures["cores"]
    title = f"{figures['streams']} streams at {figures['rate']} tokens/s in total, then {figures['open']} held open"
    out.print(f"{title}; {cores} cores, load {load[0]:.1f} before and {load[1]:.1f} after", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("forebay", "bar", *([figures["peer"]] if figures["peer"] else [])):
        table.add_column(name, justify="right")
    for row in rows:
        bar = "" if row.bar is None else f"≤ {row.bar:g} {row.unit}"
        style = "" if row.bar is None else "green" if row.value <= row.bar else "red"
        theirs = [] if not figures["peer"] else ["" if row.peer is None else f"{row.peer:,.1f}"]
        table.add_row(row.what, f"[{style}]{row.value:,.1f} {row.unit}[/]" if style else f"{row.value:,.1f} {row.unit}", bar, *theirs)
    out.print(table)
    if figures["peer"]:
        out.print(PEERS[figures["peer"]], style="dim", markup=False)
    for name, count in figures["lost"].items():
        if count:
            out.print(f"{name}: {count} streams refused or cut short", style="red", markup=False)
    for error in figures["errors"]:
        out.print(error, style="red", markup=False)
    if not any(figures["lost"].values()):
        out.print("every stream finished, none refused or lost", style="green")
