"""`forebay check`: what a model needs and whether it fits here, told from headers alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.engine.tiers import TierOptions
from forebay.model.errors import ConfigError
from forebay.server.cli import read_settings
from forebay.server.config import tier_options
from forebay.server.terminal import consoles, size

if TYPE_CHECKING:
    from forebay.engine.plan import Plan
    from forebay.engine.tier_check import RedisCheck, SsdCheck


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if the server would not start: the checkpoint is faulty or does not fit here (a synthetic model is planned
    as if it were real), or a tier cannot be set up."""
    config, _ = read_settings(args)
    # Imported here: it reads checkpoint headers through torch's types, a second that a usage error need not wait for.
    from forebay.engine.plan import plan
    from forebay.engine.tier_check import check_redis, check_ssd

    found = plan(
        args.check_model or config.model.path,
        memory=_memory(args.memory),
        sequences=config.engine.max_sequences,
        work_bytes=config.engine.weight_cache_bytes if config.engine.device == "cpu" else 0,
    )
    tiers = tier_options(config)
    ssd, redis = check_ssd(tiers), check_redis(tiers)
    if args.json:
        parts = {name: None if part is None else dataclasses.asdict(part) for name, part in (("ssd", ssd), ("redis", redis))}
        print(json.dumps(dataclasses.asdict(found) | {"fits": found.fits} | parts, indent=2))
    else:
        console = consoles()[0]
        show(found, console)
        show_tiers(ssd, redis, tiers, found, console)
        show_verdict(found, console)
    broken = any(part is not None and part.fault for part in (ssd, redis))
    return 1 if broken or found.faults or not (found.fits or found.kind == "synthetic") else 0


def show(plan: Plan, console: Console) -> None:
    """Print the plan for a person."""
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


def show_verdict(plan: Plan, console: Console) -> None:
    """Print what is odd, and whether it fits."""
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if plan.faults:
        console.print(plan.faults, style="red", soft_wrap=True, markup=False)
    elif plan.fits:
        console.print(f"It fits, with {plan.tokens:,} tokens of KV at {plan.bytes_per_token} bytes per token.", style="green")
    else:
        lacking = size(plan.short or plan.block_bytes)
        console.print(f"It does not fit: it lacks {lacking} of memory (KV takes {plan.bytes_per_token} bytes per token).", style="red")


def show_tiers(ssd: SsdCheck | None, redis: RedisCheck | None, options: TierOptions, plan: Plan, console: Console) -> None:
    """Print what the SSD store and the snapshots have to live in."""
    table = _table("tiers", "")
    if ssd is None:
        table.add_row("SSD store", "off")
    else:
        table.add_row("SSD store", ssd.dir if ssd.exists else f"{ssd.dir}, to be made")
        table.add_row("  budget", f"{size(ssd.budget_bytes)}, {options.ssd_ttl_s / 3600:g} h")
        table.add_row("  tokens of KV in it", f"{int(ssd.budget_bytes // plan.block_bytes * plan.block_tokens):,}")
        table.add_row("  disk, free", size(ssd.disk_free_bytes))
        table.add_row("  punches holes", {True: "yes", False: "no", None: "not known"}[ssd.punches_holes])
    if redis is None:
        table.add_row("snapshots in Redis", "off")
    else:
        table.add_row("snapshots in Redis", f"{redis.where}: {redis.server or 'no answer'}")
        if redis.server:
            table.add_row("  memory", f"{size(redis.maxmemory) if redis.maxmemory else 'no limit'}, {redis.policy or 'policy not known'}")
    console.print(table)
    for name, part in (("SSD store", ssd), ("Redis", redis)):
        if part is not None:
            for note in part.notes:
                console.print(f"note: {name}: {note}", soft_wrap=True, markup=False)
            if part.fault:
                console.print(f"{name}: {part.fault}", style="red", soft_wrap=True, markup=False)


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
