"""`forebay cache`: what the SSD store holds, whether it is sound, and how to be rid of it; works beside a running server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forebay.engine import cache_admin
from forebay.engine.tiers import EMBEDDED, TierOptions
from forebay.model.errors import ConfigError, ForebayError
from forebay.server.cli import read_settings
from forebay.server.config import tier_options
from forebay.server.terminal import consoles, size

SHOWN_DIGITS = cache_admin.MIN_DIGITS  # of the names of models and tenants, which are digests; --json has all
LEGEND = (
    "payload: bytes of KV, without what records and index take on disk",
    f"tenant: the digest of a cache_salt; {cache_admin.NO_SALT}: requests without one",
    "exact: blocks with no bounded replay behind them",
)
NAMING = f"its cache_salt, by its name in `forebay cache ls` ({SHOWN_DIGITS} or more digits), or {cache_admin.NO_SALT} for no salt"
RUNNING_NOTE = "A running server keeps what is in its memory, and stores it again when it is used: stop it first to be rid of that too."


def run(args: argparse.Namespace) -> int:
    """Run one action.

    Returns 1 if `verify` found blocks that are not sound or `purge` left something, 130 if the answer was no, else 0.

    Raises:
        ForebayError: `purge` found no block of the tenant.
        ConfigError: see `forebay.engine.cache_admin`, or there is nobody to ask.
    """
    options = tier_options(read_settings(args)[0])
    out, err = consoles()
    actions = {"stats": _stats, "ls": _ls, "verify": _verify, "purge": _purge}
    return actions[args.action](args, options, out, err)


def _stats(args: argparse.Namespace, options: TierOptions, out: Console, err: Console) -> int:
    found = cache_admin.stats(options)
    if args.json:
        _print_json(found)
        return 0
    table = _table(found["dir"], "")
    table.add_row("blocks", f"{found['blocks']:,}")
    for lineage, blocks in sorted(found["lineages"].items()):
        if blocks:
            table.add_row(f"  {_replays(lineage)}", f"{blocks:,}")
    table.add_row("payload", size(found["payload_bytes"]))
    table.add_row("of the budget", f"{size(found['bytes'])} of {size(found['budget_bytes'])}, {found['bytes'] / found['budget_bytes']:.0%}")
    table.add_row(f"segments ({found['segments']:,}), on disk", size(found["segment_bytes"]))
    table.add_row("index, on disk", size(found["index_bytes"]))
    table.add_row("disk, free", f"{size(found['disk_free_bytes'])}, of which {size(found['free_bytes'])} stay free")
    table.add_row("kept after last use", f"{found['ttl_s'] / 3600:g} h")
    out.print(table)
    if not found["complete"]:
        out.print("note: the index was lost and is being read back; there may be more blocks", soft_wrap=True)
    return 0


def _ls(args: argparse.Namespace, options: TierOptions, out: Console, err: Console) -> int:
    groups = cache_admin.ls(options)
    if args.json:
        _print_json(groups)
        return 0
    if not groups:
        out.print(f"{options.dir} holds no blocks", markup=False, soft_wrap=True)
        return 0
    table = _table("model", "tenant", "blocks", "payload", "last use", "oldest", "exact")
    now = time.time()
    for group in groups:
        ages = (_age(now - group["newest_use"]), _age(now - group["oldest_use"]))
        exact = group["lineages"].get(0, 0) / group["blocks"]
        tenant = cache_admin.NO_SALT if group["tenant"] == cache_admin.NO_SALT_NAME else group["tenant"][:SHOWN_DIGITS]
        table.add_row(group["identity"][:SHOWN_DIGITS], tenant, f"{group['blocks']:,}", size(group["bytes"]), *ages, f"{exact:.0%}")
    out.print(table)
    for line in LEGEND:
        out.print(line, style="dim", soft_wrap=True)
    return 0


def _verify(args: argparse.Namespace, options: TierOptions, out: Console, err: Console) -> int:
    with _bar(err, "Reading") as progress:
        found = cache_admin.verify(options, progress)
    bad = sum(found["bad"].values())
    if args.json:
        _print_json(found)
    else:
        were = "was" if found["blocks"] == 1 else "were"
        payload = f"{size(found['bytes'])} of payload"
        out.print(f"{_counted(found['blocks'], 'block')} ({payload}) {were} read, {found['sound']:,} sound", soft_wrap=True)
        for kind, count in found["bad"].items():
            if count:
                was, has = ("was", "has") if count == 1 else ("were", "have")
                out.print(f"{_counted(count, 'block')} {was} damaged ({kind}) and {has} been deleted", style="red", soft_wrap=True)
        if found["unreadable"]:
            out.print(f"{_counted(found['unreadable'], 'block')} could not be read and stayed", style="red", soft_wrap=True)
    return 1 if bad or found["unreadable"] else 0


def _purge(args: argparse.Namespace, options: TierOptions, out: Console, err: Console) -> int:
    """Blocks and, whoever they are of, snapshots: a tenant that has no blocks may be a slip, and then everything stays."""
    if args.tenant is None and not args.yes and not _agreed(options, err):
        return 130
    with _bar(err, "Deleting") as progress:
        blocks = cache_admin.purge(options, args.tenant, progress)
    if args.tenant is not None and not blocks["blocks"]:
        if args.json:
            _print_json(blocks | {"snapshots": None})
        raise ForebayError(f"cache: there are no blocks of tenant {args.tenant!r}, so nothing is deleted; name it by {NAMING}")
    snapshots = cache_admin.purge_snapshots(options)
    if args.json:
        _print_json(blocks | {"snapshots": None if snapshots is None else dataclasses.asdict(snapshots)})
    else:
        whose = "" if args.tenant is None else f" of tenant {args.tenant!r}"
        done = f"{_counted(blocks['blocks'], 'block')}{whose} deleted, {size(blocks['bytes'])} of payload"
        out.print(done, markup=False, soft_wrap=True)
        if snapshots is not None and snapshots.error is None:
            every = "" if args.tenant is None else " of all tenants (their names do not tell; they are made again)"
            out.print(f"{_counted(snapshots.deleted, 'snapshot')}{every} deleted in {snapshots.where}", markup=False, soft_wrap=True)
        elif options.redis_url == EMBEDDED:
            out.print("Snapshots in an embedded Redis end with the server that started it.", soft_wrap=True)
        if blocks["blocks"] or (snapshots is not None and snapshots.deleted):
            out.print(RUNNING_NOTE, style="dim", soft_wrap=True)
    if snapshots is not None and snapshots.error is not None:
        err.print(f"snapshots in {snapshots.where} may be left: {snapshots.error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _agreed(options: TierOptions, err: Console) -> bool:
    """Ask on the terminal; without one, somebody has to say --yes.

    Raises:
        ConfigError: nobody is there to ask.
    """
    found = cache_admin.stats(options)
    if not sys.stdin.isatty():
        raise ConfigError("cache: purge deletes everything; say --yes, or name a --tenant")
    what = f"all {_counted(found['blocks'], 'block')} ({size(found['payload_bytes'])} of payload) in {options.dir}"
    what += " and the snapshots in Redis" if options.redis_url not in (None, EMBEDDED) else ""
    err.print(f"Delete {what}? [y/N] ", end="", markup=False, soft_wrap=True)
    try:
        answer = input()
    except EOFError:
        err.print()
        return False
    return answer.strip().lower() in ("y", "yes")


@contextlib.contextmanager
def _bar(err: Console, verb: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere; yields what to tell the progress to."""
    if not err.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(verb), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, min_width=12)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _replays(count: int) -> str:
    return "exact" if not count else f"{count} replay{'s' if count > 1 else ''} behind them"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
