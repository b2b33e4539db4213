"""The tiers beyond the device on the block size of the released model: SSD store, snapshots and index, each beside its ceiling."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from forebay.engine import cache_bench, index_bench, snapshot_bench
from forebay.engine.cache_bench import Row
from forebay.server.cli import read_settings
from forebay.server.commands.scratch import scratch


def measure(args: argparse.Namespace, out: Console, err: Console) -> tuple[dict[str, Any], bool]:
    """Measure in a temporary folder on the disk of `cache.dir`. Returns the figures; the flag is always true: a slow disk is no failure."""

    def report(line: str) -> None:
        err.print(line, style="dim", markup=False, soft_wrap=True)

    config, _ = read_settings(args)
    with scratch(config) as folder:
        ssd, index = folder / "ssd", folder / "index"
        ssd.mkdir()
        rows = cache_bench.measure(ssd, repeats=args.repeats, blocks=args.prefix, report=lambda line: report(f"SSD store, {line}"))
        shutil.rmtree(ssd)
        rows += snapshot_bench.measure(repeats=args.repeats, report=lambda line: report(f"snapshots, {line}"))
        index.mkdir()
        rows += index_bench.measure(index, blocks=args.blocks, repeats=args.repeats, report=report)
    figures = {
        "measured": f"{args.prefix:,} blocks of the released model, an index of {args.blocks:,}, in {folder.parent}; {args.repeats} runs",
        "prefix": args.prefix,
        "blocks": args.blocks,
        "rows": [_plain(row) for row in rows],
    }
    _show(figures, out)
    return figures, True


def _plain(row: Row) -> dict[str, Any]:
    asked = {name: value for name in ("least_share", "least", "most") if (value := getattr(row, name)) is not None}
    beside = {"ceiling": row.ceiling, "ceiling_of": row.ceiling_of, "share": row.share} if row.ceiling else {}
    verdict = {} if row.reached is None else {"reached": row.reached}
    return {"what": row.what, "unit": row.unit, "value": row.value, **beside, **asked, **verdict, "samples": list(row.samples)}


def _show(figures: dict[str, Any], out: Console) -> None:
    out.print(figures["measured"], style="bold", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("median", "", "ceiling", "share", "asked for"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for row in figures["rows"]:
        share = f"{row['share']:.2f}" if "share" in row else ""
        ceiling = f"{_number(row['ceiling'])}" if "ceiling" in row else ""
        style = None if "reached" not in row else "green" if row["reached"] else "red"
        table.add_row(row["what"], _number(row["value"]), row["unit"], ceiling, share, _asked(row), style=style)
    out.print(table)
    for of in dict.fromkeys(row["ceiling_of"] for row in figures["rows"] if "ceiling_of" in row):
        ceiling = next(row["ceiling"] for row in figures["rows"] if row.get("ceiling_of") == of)
        out.print(f"ceiling {_number(ceiling)} MB/s: {of}", style="dim", markup=False)


def _asked(row: dict[str, Any]) -> str:
    if "least_share" in row:
        return f"share ≥ {row['least_share']:g}"
    if "least" in row:
        return f"≥ {_number(row['least'])}"
    return f"≤ {_number(row['most'])}" if "most" in row else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
