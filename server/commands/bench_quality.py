"""What a model gets right, and what the server's approximations take from that, as tables, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from forebay import __version__
from forebay.engine import quality, quality_plot
from forebay.engine.llm import LLM
from forebay.engine.quality_items import demo_exercises
from forebay.engine.quality_modes import BOUNDED
from forebay.engine.quality_results import DEPTHS, PARTS, RECALL, Results, Score, bars
from forebay.engine.quality_results import figures as measured
from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.commands.bench import path_taken
from forebay.server.config import Config

LIBRARIES = ("torch", "numpy", "tokenizers", "deepseek-recipe")
SAMPLES, QUICK_SAMPLES = 100, 16
KV_TOKENS = 131_072
FILE_WIDTH = 130
DEFAULT = BOUNDED.name
LEAD_SURE = "95 %: Wilson's, for this lead"
SURE = "95 %: t over texts; where all texts agree Wilson's, one trial per text"
CPUINFO = Path("/proc/cpuinfo")


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Run the bench. Returns the figures; the flag is always true: a model that is not good is no failure of the bench.

    What has been measured is written to the file of `--json` after every piece of work, so that it outlives an abort; `complete` is false
    in it until the last one.

    Raises:
        ConfigError: a file cannot be written, which is tried before the work; there is no such part.
        QualityError: the model or the block pool is too small for what is asked, or an answer does not rest on what its mode names.
    """
    config, _ = read_settings(args)
    parts = [part.strip() for part in args.only.split(",")] if args.only else list(PARTS)
    if args.plot is not None:
        quality_plot.need_matplotlib()
    # Before the work of half an hour, not after it.
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None:
            with _writing(flag, file):
                pass
    plan = quality.Plan.quick(args.samples or QUICK_SAMPLES) if args.quick else quality.Plan.full(args.samples or SAMPLES)
    torch.set_num_threads(config.engine.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    began = time.monotonic()
    saved = 0  # pieces of work whose figures are in the file
    with _open(config) as llm:
        threads = torch.get_num_threads()
        known = {
            "measured": f"quality of {config.model.path} on {path_taken(llm)}, {threads} thread{'s' if threads > 1 else ''}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": _processor(), "cpus": len(os.sched_getaffinity(0)), "threads": threads, "system": platform.platform()},
            "versions": {"forebay": __version__, "python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
            "model": {"path": config.model.path, "fingerprint": llm.engine.manager.fingerprint},
            "seed": args.seed,
            "samples": plan.samples,
            "samples_few": plan.few,
            "quick": args.quick,
            "parts": parts,
        }

        def figures(results: Results) -> dict[str, Any]:
            return {**known, "wall_seconds": round(time.monotonic() - began, 1), **measured(results)}

        def keep(results: Results) -> None:
            nonlocal saved
            if args.json is not None:
                with _writing("--json", args.json) as part:
                    part.write_text(json.dumps(figures(results), indent=2) + "\n", "utf-8")
                    part.replace(os.path.realpath(args.json))
                saved = len(results.seconds)

        instrument = quality.Instrument(llm, demo_exercises(), plan, args.seed)
        try:
            with _Progress(err) as progress:
                instrument.measure(parts, progress.report, keep)
        finally:
            results = instrument.results
            _show(results, out)
            if not results.complete and results.seconds:
                said = f"Incomplete: {len(results.seconds)} pieces of work were finished"
                said += f"; {args.json} has the figures of {'all' if saved == len(results.seconds) else saved} of them" if saved else ""
                err.print(said, style="red", markup=False, soft_wrap=True)
        found = figures(results)
    out.print(f"{known['measured']}, {found['wall_seconds'] / 60:.1f} minutes", style="dim", markup=False, soft_wrap=True)
    return found, True


def draw(figures: dict[str, Any], file: Path, err: Console) -> None:
    """Write the picture; after the JSON, so that this cannot be lost by it."""
    with _writing("--plot", file) as part:
        quality_plot.draw(figures, part)
        part.replace(os.path.realpath(file))
    err.print(f"{file} is written", style="dim", markup=False, soft_wrap=True)


def _open(config: Config) -> LLM:
    engine = config.engine
    return LLM(
        config.model.path,
        device=engine.device,
        chat=True,
        kv_tokens=config.cache.kv_tokens or KV_TOKENS,
        encoder_tokens=engine.encoder_tokens,
        decoder_tokens=engine.decoder_tokens,
        weight_cache_bytes=engine.weight_cache_bytes,
        batch_invariant=engine.batch_invariant,
        max_queue_wait_s=0.0,
        kernels=False,  # modes have memories that only torch operations read
    )


@contextmanager
def _writing(flag: str, file: Path) -> Iterator[Path]:
    """An empty file beside `file` to fill and to replace it by, so that this is whole whenever the bench is stopped; gone afterwards.

    Raises:
        ConfigError: `file` is no file, or it or the one beside it cannot be written.
    """
    target = Path(os.path.realpath(file))  # a link stays one
    part = target.with_name(f".{target.name}.part")
    try:
        if target.exists() and not target.is_file():
            raise ConfigError(f"{flag}: {file} cannot be written: it is {'a folder' if target.is_dir() else 'no file'}")
        if target.exists() and not os.access(target, os.W_OK):
            raise ConfigError(f"{flag}: {file} cannot be written: no right to")
        try:
            part.write_bytes(b"")
            yield part
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: {file} cannot be written: {error.strerror or error}") from None


class _Progress:
    """A bar with the time left on a terminal, a line per piece of work elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.percentage:>3.0f}%"), BarColumn(bar_width=30), TextColumn("{task.fields[left]}"),
                TextColumn("[dim]{task.description}"), console=console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=None, left="")

    def __enter__(self) -> _Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def report(self, label: str, done: float, total: float) -> None:
        """`label` begins; `done` of `total` estimated seconds of work are done."""
        passed = time.monotonic() - self._began
        # The first estimate is a guess of this machine's speed, later ones go by what was seen.
        left = (total - done) * (passed / done if done > 0.02 * total else 1.0)
        shown = f"about {left / 60:.0f} min left" if left > 90 else f"about {left:.0f} s left"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, description=label, left=shown)
        else:
            self._console.print(f"{done / total if total else 1:4.0%}, {shown}: {label}", style="dim", markup=False, soft_wrap=True)


def _show(results: Results, out: Console) -> None:
    """The tables; a narrow terminal gets those of recall without their columns by depth, which the JSON has."""
    if not out.is_terminal:
        out.width = FILE_WIDTH  # a file has room for whole words
    if results.text:
        title = "Held-out prose (95 % intervals by the spread between excerpts)"
        if results.plain:
            plain = results.plain
            read = f"(exact; {plain['tokens']:,} tokens in pieces of {plain['piece']:,})"
            title += f": perplexity {plain['perplexity']:.2f}, {plain['bits_per_byte']:.3f} bits per byte {read}"
        table = _table(title, "mode", "perplexity after the prompt", "KL from exact, nats", "same top token", "n", "excerpts")
        for row in results.text:
            if row.get("too_short"):
                table.add_row(row["mode"], "n/a", "", "", "", "")
                continue
            agreement = f"{row['top1']:.1%} ({row['top1_low']:.1%}–{row['top1_high']:.1%})"
            spread = f"{row['kl']:.4f}" + (f" ({row['kl_low']:.4f}–{row['kl_high']:.4f})" if row["kl_low"] is not None else "")
            table.add_row(row["mode"], f"{row['perplexity']:.3f}", spread, agreement, str(row["tokens"]), str(row["excerpts"]))
        out.print(table)
    depths = [f"at {(d + 0.5) / DEPTHS:.0%}" for d in range(DEPTHS) if out.width >= FILE_WIDTH]
    for part in ("recall", "drift", "modes"):
        if scores := list(results.of(part)):
            table = _table(f"{PARTS[part].capitalize()} ({SURE})", "mode", "tokens", "replays", "right", "95 %", "n", "texts", *depths)
            for score in scores:
                by_depth = [next(results.of(part, **_same(score), depth=d), None) for d in range(len(depths))]
                shown = [f"{s.share:.0%}" if s is not None and s.share is not None else "" for s in by_depth]
                tokens = f"{score.prompt_length if score.n else score.length:,.0f}"
                name = score.mode if score.what == RECALL else score.what
                table.add_row(name, tokens, _lineage(score), *_shares(score), str(score.texts), *shown)
            out.print(table)
    _show_tasks(results, out)
    if scores := list(results.of("effort")):
        title = f"{PARTS['effort'].capitalize()} ({LEAD_SURE})"
        table = _table(title, "mode", "effort", "prompt", "right", "95 %", "n", "tokens of an answer", "cut off")
        for score in scores:
            length = f"{score.tokens / score.n:.1f}" if score.n else ""
            table.add_row(score.mode, str(score.effort), f"{score.prompt_length:,.0f}", *_shares(score), length, str(score.unfinished))
        out.print(table)
    _show_differences(results, out)
    if found_bars := bars(results):
        table = _table("Asked of the demo", "what", "measured", "asked for")
        for bar in found_bars:
            table.add_row(bar.what, f"{bar.value:.3f}", bar.asked, style="green" if bar.reached else "red")
        out.print(table)


def _show_tasks(results: Results, out: Console) -> None:
    """The default mode's tasks, and those that are asked in other modes with a column for each."""
    default = list(results.of("tasks", mode=DEFAULT))
    if default:
        title = f"{PARTS['tasks'].capitalize()}: {DEFAULT} ({LEAD_SURE})"
        table = _table(title, "task", "prompt", "right", "95 %", "n", "tokens of an answer", "cut off")
        for score in default:
            length = f"{score.tokens / score.n:.1f}" if score.n else ""
            table.add_row(score.what, f"{score.prompt_length:,.0f}", *_shares(score), length, str(score.unfinished))
        out.print(table)
    others = [score for score in results.of("tasks") if score.mode != DEFAULT]
    if others:
        modes = list(dict.fromkeys(score.mode for score in others))
        table = _table(f"{PARTS['tasks'].capitalize()}: other modes (right, {LEAD_SURE})", "task", "n", *modes)
        for what in dict.fromkeys(score.what for score in others):
            found = {score.mode: score for score in others if score.what == what}
            cells = [" ".join(_shares(found[mode])[:2]) if mode in found else "" for mode in modes]
            table.add_row(what, "/".join(dict.fromkeys(str(score.n) for score in found.values())), *cells)
        out.print(table)


def _show_differences(results: Results, out: Console) -> None:
    """Other modes against the default one, about the same questions."""
    found = [(score, against) for score in results.scores if (against := results.against_default(score)) is not None]
    if not found:
        return
    title = f"Against the default mode, the same questions ({SURE}; p of McNemar's test, which takes questions as independent)"
    table = _table(title, "what", "mode", "difference", "95 %", "p", "gained", "lost", "n", "texts")
    for score, d in found:
        what = score.what if score.effort is None else f"{score.what}, effort {score.effort}"
        what = what if score.length is None else f"{score.what}, {score.prompt_length:,.0f} tokens ({score.part})"
        bounds = f"{d.low * 100:+.0f} to {d.high * 100:+.0f}"
        counts = (str(d.gained), str(d.lost), str(d.n), str(d.texts))
        table.add_row(what, score.mode, f"{d.value * 100:+.1f}", bounds, f"{d.p:.2g}", *counts)
    out.print(table)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=len(name) < 8)
    return table


def _shares(score: Score) -> tuple[str, str, str]:
    """Share, interval and trials; what was too short for the mode is no trial."""
    if score.share is None:
        return "n/a", "", "0"
    between = score.interval
    return f"{score.share:.1%}", f"{between.low * 100:.0f}–{between.high * 100:.0f}", str(score.n)


def _same(score: Score) -> dict[str, Any]:
    return {"what": score.what, "mode": score.mode, "length": score.length}


def _lineage(score: Score) -> str:
    if score.lineage is None:
        return ""
    low, high = score.lineage
    return str(low) if low == high else f"{low}–{high}"


def _processor() -> str:
    if CPUINFO.is_file():
        for line in CPUINFO.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
