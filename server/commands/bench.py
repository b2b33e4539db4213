"""`forebay bench`: ratios measured in one run on this machine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from forebay.model.errors import ConfigError
from forebay.server.terminal import consoles

if TYPE_CHECKING:  # this brings torch
    from forebay.engine.llm import LLM


def run(args: argparse.Namespace) -> int:
    """Run one measurement, print it, and write it to `--json FILE` if asked. Returns 1 if a stream failed or starved."""
    counts = ("streams", "prompt_tokens", "max_tokens", "repeats", "tokens", "steps", "prefix", "blocks", "samples", "context")
    for name in (*counts, "rate", "seconds", "open", "prompt_kb", "prompt", "rows", "torch_tokens"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise ConfigError(f"bench: --{name.replace('_', '-')} must be at least 1, got {value}")
    out, err = consoles()
    if args.bench == "serve":
        from forebay.server.commands import bench_serve

        figures, fine = bench_serve.measure(args, out, err)
    elif args.bench == "cache":
        from forebay.server.commands import bench_cache

        figures, fine = bench_cache.measure(args, out, err)
    elif args.bench == "resume":
        from forebay.server.commands import bench_resume

        figures, fine = bench_resume.measure(args, out, err)
    elif args.bench == "frontend":
        from forebay.server.commands import bench_frontend

        figures, fine = bench_frontend.measure(args, out, err)
    elif args.bench == "restore":
        from forebay.server.commands import bench_restore

        figures, fine = bench_restore.measure(args, out, err)
    elif args.bench == "kernels":
        from forebay.server.commands import bench_kernels

        figures, fine = bench_kernels.measure(args, out, err)
    elif args.bench == "step":
        from forebay.server.commands import bench_step

        figures, fine = bench_step.measure(args, out, err)
    elif args.bench == "quality":
        from forebay.server.commands import bench_quality

        figures, fine = bench_quality.measure(args, out, err)
    else:
        # Imported here: this brings torch.
        from forebay.server.commands import bench_model

        figures, fine = bench_model.measure(args, out, err)
    if args.json and args.bench != "quality":  # which writes its file itself, after every piece of work
        try:
            args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {args.json} cannot be written: {error.strerror}") from None
    if args.bench == "quality" and args.plot:
        bench_quality.draw(figures, args.plot, err)
    return 0 if fine else 1


def path_taken(model: LLM) -> str:
    """The device of an opened model and what ran it there, where there is a choice."""
    runner = model.engine.runner
    how = "GPU kernels" if runner.kernels else "torch operations" if runner.device.type == "cuda" else ""
    return f"{runner.device}, {how}" if how else f"{runner.device}"


def numbers(text: str, flag: str) -> list[int]:
    """Whole numbers from 1 on, of a list with commas.

    Raises:
        ConfigError: it is no such list.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"bench: {flag} takes numbers from 1 on, such as 1,8,64, got {text!r}")
    return found
