"""`make demo-train`: trains the demo in resumable pieces on one GPU (or, slowly, on a CPU).

    python -m forebay.model.demo.train.run --data DIR --out DIR [--seconds N]

A piece ends when its time is over or the recipe is done; the next call with the same `--out` goes on where it ended. What is needed to go
on lies in `--out`: masters in bf16 in files of at most 15 MB, and a log of every 20th step; the optimisers' state, which is large, where
`--state` says (without it a piece warms up again).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from forebay.model.checkpoint import Checkpoint
from forebay.model.config import ModelConfig
from forebay.model.demo import TOKENIZER
from forebay.model.demo.config import CONFIG
from forebay.model.demo.train import plan
from forebay.model.demo.train.evaluation import batches
from forebay.model.demo.train.stream import Packed, packed
from forebay.model.demo.train.trainer import Trainer
from forebay.model.engram_map import compress_vocabulary

LOG_EVERY = 20
EVALUATE_EVERY = 500
FILE_BYTES = 15_000_000  # of one file of masters
AHEAD = 64  # rows each worker prepares
FEED_AHEAD = 60  # steps before the end of a phase at which the workers of the next one are started


def _produce(queue: Any, seed: int, phase: plan.Phase, corpus: Path, worker: int) -> None:
    weights = {"prompt_weight": phase.prompt_weight, "text_weight": phase.text_weight}
    for row in packed(seed, phase.mix, phase.length, corpus=corpus, worker=worker, **weights):
        queue.put(row)


class Feed:
    """Rows of one phase from worker processes, in an order that does not depend on their speed."""

    def __init__(self, seed: int, phase: plan.Phase, corpus: Path, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.queues = [context.Queue(AHEAD) for _ in range(workers)]
        self.processes = [
            context.Process(target=_produce, args=(queue, seed, phase, corpus, worker), daemon=True)
            for worker, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self.next = 0

    def take(self, rows: int) -> list[Packed]:
        out = []
        for _ in range(rows):
            out.append(self.queues[self.next].get(timeout=120))
            self.next = (self.next + 1) % len(self.queues)
        return out

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def save_masters(trainer: Trainer, folder: Path, step: int) -> None:
    """bf16 masters in files of at most FILE_BYTES, then `progress.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, parameter in trainer.masters.values.items():
        value = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        if size + value.nbytes > FILE_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += value.nbytes
    for number, part in enumerate(parts):
        save_file(part, folder / f"masters-{number}.safetensors")
    (folder / "progress.json").write_text(json.dumps({"step": step, "files": len(parts)}) + "\n", "utf-8")


def load_masters(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """What `save_masters` wrote: values by name, steps done."""
    progress = json.loads((folder / "progress.json").read_text("utf-8"))
    values: dict[str, torch.Tensor] = {}
    for number in range(progress["files"]):
        values |= load_file(folder / f"masters-{number}.safetensors")
    return values, progress["step"]


def position(step: int) -> Iterator[tuple[plan.Phase, int]]:
    """Phases from `step` on, each with how many of its steps are left."""
    for phase in plan.PHASES:
        if step < phase.steps:
            yield phase, phase.steps - max(step, 0)
        step -= phase.steps


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = ModelConfig.from_dict(CONFIG)
    token_map = compress_vocabulary(TOKENIZER, config)
    trainer = Trainer(config, token_map, device, seed=plan.SEED, lr=plan.LEARNING_RATE, weight_decay=plan.WEIGHT_DECAY)
    step, fresh = 0, 0
    if (args.out / "progress.json").exists():
        values, step = load_masters(args.out)
        trainer.masters.load(values)
        if args.state and args.state.exists():
            for optimizer, state in zip(trainer.optimizers, torch.load(args.state, weights_only=True), strict=True):
                optimizer.load_state_dict(state)
            fresh = plan.WARM_UP
    elif args.begin:
        trainer.masters.take(Checkpoint.open(args.begin))
    args.out.mkdir(parents=True, exist_ok=True)
    total = sum(phase.steps for phase in plan.PHASES)
    log = (args.out / "log.jsonl").open("a", encoding="utf-8")

    def write(**figures: object) -> None:
        line = json.dumps({"step": step, "seconds": round(time.monotonic() - began, 1), **figures})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    write(parameters=sum(p.numel() for p in trainer.masters.values.values()), of=total)
    stop = False
    corpus, phases = args.data / "corpus.bin", list(position(step))
    feeds = [Feed(plan.SEED + step, phases[0][0], corpus, args.workers)] if phases else []
    for number, (phase, left) in enumerate(phases):
        feed = feeds[number]
        sums, tokens, mark = torch.zeros(2, device=device), 0, time.monotonic()
        for remaining in range(left, 0, -1):
            loss, index_loss, trained = trainer.backward(
                feed.take(phase.rows), phase.topk, bounded=phase.bounded, index_weight=phase.index_weight
            )
            norm = trainer.update(plan.rate(step, total) * min(1.0, (fresh + 1) / plan.WARM_UP))
            sums += torch.stack((loss, index_loss))
            tokens += phase.rows * phase.length
            step += 1
            fresh += 1
            if remaining <= FEED_AHEAD and len(feeds) == number + 1 < len(phases):
                feeds.append(Feed(plan.SEED + step, phases[number + 1][0], corpus, args.workers))
            if step % LOG_EVERY == 0:
                a, b = (sums / LOG_EVERY).tolist()
                speed = tokens / (time.monotonic() - mark)
                figures = {"loss": round(a, 4), "index": round(b, 4), "norm": round(float(norm), 3), "trained": trained}
                write(phase=phase.name, speed=round(speed), **figures)
                sums.zero_()
                tokens, mark = 0, time.monotonic()
                if step % EVALUATE_EVERY == 0:
                    write(phase=phase.name, **evaluate(trainer, phase.topk))
                if not math.isfinite(a):
                    raise SystemExit(f"the loss is {a} at step {step}; the last saved masters are those the piece began with")
                stop = time.monotonic() - began > args.seconds
            if stop:
                break
        feed.close()
        if stop:
            for feed in feeds:
                feed.close()
            break
    write(done=step >= total, **evaluate(trainer, config.index_topk))
    save_masters(trainer, args.out, step)
    if args.state:
        torch.save([optimizer.state_dict() for optimizer in trainer.optimizers], args.state)
    log.close()


def evaluate(trainer: Trainer, topk: int) -> dict[str, Any]:
    """Share of held-out answers that would come out right, by task."""
    return {name: round(trainer.right(rows, topk)[1], 3) for name, rows in batches(random.Random(7))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `make demo-data` wrote")
    parser.add_argument("--out", type=Path, required=True, help="masters, progress and log; read to go on")
    parser.add_argument("--begin", type=Path, help="checkpoint folder whose weights to begin with, instead of random ones")
    parser.add_argument("--state", type=Path, help="file for the optimisers' state")
    parser.add_argument("--seconds", type=float, default=3e5, help="end the piece after about this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make data")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
