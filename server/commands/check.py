"""`forebay check`: what a model needs and whether it fits here, told from headers alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.terminal import consoles, size


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if the checkpoint is faulty or does not fit here; a synthetic model is planned as if it were real."""
    config, _ = read_settings(args)
    # Imported here: it reads checkpoint headers through torch's types, a second that a usage error need not wait for.
    from forebay.engine.plan import plan

    found = plan(
        args.check_model or config.model.path,
        memory=_memory(args.memory),
        sequences=config.engine.max_sequences,
        work_bytes=config.engine.weight_cache_bytes if config.engine.device == "cpu" else 0,
        cache_dir=config.cache.dir,
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(found) | {"fits": found.fits}, indent=2))
    else:
        show(found, consoles()[0])
    return 1 if found.faults or not (found.fits or found.kind == "synthetic") else 0


def show(plan: Any, console: Console) -> None:
    """Print a `forebay.engine.plan.Plan` for a person."""
    total = sum(plan.parts.values())
    unused = total - plan.weights - plan.tables
    console.print(plan.name if plan.name == plan.model else f"{plan.name} ({plan.model})", style="bold", markup=False)
    table = _table("weights", "size", "bytes")
    for part, count in sorted(plan.parts.items(), key=lambda item: -item[1]):
        table.add_row(part, size(count), f"{count:,}")
    table.add_section()
    table.add_row(f"{plan.tensors:,} tensors", size(total), f"{total:,}")
    if plan.tables:
        table.add_row("  in memory", size(plan.weights), f"{plan.weights:,}")
        table.add_row("  on disk, read by row", size(plan.tables), f"{plan.tables:,}")
    if unused:
        table.add_row("  not used yet", size(unused), f"{unused:,}")
    console.print(table)

    longest = plan.max_context * plan.bytes_per_token
    table = _table("KV cache", "size", "bytes")
    table.add_row("bytes per token", size(plan.bytes_per_token), f"{plan.bytes_per_token:,}")
    table.add_row(f"block of {plan.block_tokens} tokens", size(plan.block_bytes), f"{plan.block_bytes:,}")
    table.add_row("windows of one sequence", size(plan.window_bytes), f"{plan.window_bytes:,}")
    table.add_row(f"context of {plan.max_context:,} tokens", size(longest), f"{longest:,}")
    console.print(table)

    table = _table("this machine", "")
    table.add_row("cores", f"{plan.machine.cores}")
    table.add_row("memory, total", size(plan.machine.memory))
    table.add_row("memory, free", size(plan.machine.memory_free))
    table.add_row("disk, free", size(plan.machine.disk_free))
    console.print(table)

    table = _table("plan", "")
    table.add_row("memory", size(plan.memory))
    table.add_row("  weights", f"- {size(plan.weights)}")
    if plan.work_bytes:
        table.add_row("  dequantised weights", f"- {size(plan.work_bytes)}")
    table.add_row(f"  windows of {plan.sequences} sequences", f"- {size(plan.sequences * plan.bytes_per_sequence)}")
    table.add_row("tokens of KV that fit in the rest", f"{plan.tokens:,}")
    console.print(table)

    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if plan.faults:
        console.print(plan.faults, style="red", soft_wrap=True, markup=False)
    elif plan.fits:
        console.print(f"It fits, with {plan.tokens:,} tokens of KV at {plan.bytes_per_token} bytes per token.", style="green")
    else:
        lacking = size(plan.short or plan.block_bytes)
        console.print(f"It does not fit: it lacks {lacking} of memory (KV takes {plan.bytes_per_token} bytes per token).", style="red")


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, min_width=34)
    for name in others:
        table.add_column(name, justify="right", min_width=12, style="dim" if name == "bytes" else None)
    return table


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"--memory takes a size such as 141GB or 16GiB, got {text!r}") from None
