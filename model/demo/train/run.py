"""`make demo-train`: trains the demo in resumable pieces on one GPU.

    python -m forebay.model.demo.train.run --data DIR --out DIR [--seconds N]

A piece ends when its time is over, on SIGTERM, or when the recipe is done; the next call with the same `--out` goes on where it ended, with
the same rows as if it had never ended. What it needs for that lies in `--out`, written anew every few minutes while all of it is finite;
`log.jsonl` has the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from forebay.model.checkpoint import Checkpoint
from forebay.model.config import ModelConfig
from forebay.model.demo import TOKENIZER
from forebay.model.demo.config import CONFIG
from forebay.model.demo.train import plan, saved
from forebay.model.demo.train.evaluation import batches
from forebay.model.demo.train.feed import Feed
from forebay.model.demo.train.trainer import Trainer
from forebay.model.engram_map import compress_vocabulary

LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 20, 500, 500  # steps
FEED_AHEAD = 60  # steps before the end of a phase at which the processes of the next one are started


class Log:
    """One JSON object a line, in the run's log and on standard output."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.began, self.step = file, time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def write(self, **figures: object) -> None:
        line = json.dumps({"step": self.step, "seconds": round(self.seconds, 1), **figures})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def position(step: int) -> Iterator[tuple[plan.Phase, int]]:
    """Phases from `step` on, each with how many of its steps are done."""
    for phase in plan.PHASES:
        if step < phase.steps:
            yield phase, max(step, 0)
        step -= phase.steps


def build(device: torch.device) -> Trainer:
    """The demo's network with its first weights."""
    torch.backends.cuda.matmul.allow_tf32 = True
    config = ModelConfig.from_dict(CONFIG)
    token_map = compress_vocabulary(TOKENIZER, config)
    return Trainer(config, token_map, device, seed=plan.SEED, lr=plan.LEARNING_RATE, weight_decay=plan.WEIGHT_DECAY)


def train(args: argparse.Namespace) -> int:
    """One piece; -> steps done in all."""
    if not (args.data / "corpus.bin").is_file():
        raise SystemExit(f"{args.data} has no corpus.bin: `make demo-data` makes it")
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = build(torch.device(args.device))
    step = saved.restore(trainer, args.out)
    if args.begin:
        if step:
            raise SystemExit(f"{args.out} has a run of {step} steps: --begin is for a new one")
        begin = Checkpoint.open(args.begin)
        if begin.config != trainer.config:
            raise SystemExit(f"{args.begin} is another network than model/demo/config.py describes")
        trainer.masters.take(begin)
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with (args.out / "log.jsonl").open("a", encoding="utf-8") as file:
        log = Log(file)
        log.step = step
        log.write(
            parameters=sum(p.numel() for p in trainer.masters.values.values()),
            of=sum(phase.steps for phase in plan.PHASES),
            seed=plan.SEED,
            device=torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
            torch=torch.__version__,
            python=platform.python_version(),
            begin=str(args.begin or ""),
        )
        feeds: list[Feed] = []
        try:
            _phases(trainer, args, log, feeds, ended)
        finally:
            for feed in feeds:
                feed.close()
            signal.signal(signal.SIGTERM, before)
        _save(trainer, args.out, log)
        log.write(done=log.step >= sum(phase.steps for phase in plan.PHASES), **evaluate(trainer, trainer.config.index_topk))
    return log.step


def _phases(trainer: Trainer, args: argparse.Namespace, log: Log, feeds: list[Feed], ended: list[int]) -> None:
    """Train from `log.step` on until the recipe, the time or the patience of whoever sent SIGTERM ends."""
    phases, corpus = list(position(log.step)), args.data / "corpus.bin"
    for number, (phase, done) in enumerate(phases):
        if len(feeds) == number:
            feeds.append(Feed(plan.SEED, phase, corpus, done, args.workers))
        for at in range(done, phase.steps):
            if at == max(done, phase.steps - FEED_AHEAD) and number + 1 < len(phases):
                feeds.append(Feed(plan.SEED, phases[number + 1][0], corpus, 0, args.workers))
            _step(trainer, phase, feeds[number], log)
            if log.step % SAVE_EVERY == 0:
                _save(trainer, args.out, log)
            if log.step % EVALUATE_EVERY == 0:
                log.write(phase=phase.name, **evaluate(trainer, phase.topk))
            if ended or log.seconds > args.seconds:
                return
        feeds[number].close()


def _step(trainer: Trainer, phase: plan.Phase, feed: Feed, log: Log) -> None:
    began = time.monotonic()
    rows = feed.take()
    waited = time.monotonic() - began
    loss, index_loss, trained = trainer.backward(rows, phase.topk, bounded=phase.bounded, index_weight=phase.index_weight)
    norm = trainer.update(plan.rate(log.step))
    log.step += 1
    if log.step % LOG_EVERY == 0:  # reading a figure waits for the device
        figures = {"loss": round(float(loss), 4), "index": round(float(index_loss), 4), "norm": round(float(norm), 3), "trained": trained}
        log.write(phase=phase.name, waited=round(waited, 3), **figures)
        if not (math.isfinite(figures["loss"]) and math.isfinite(figures["norm"])):
            raise SystemExit(f"loss {figures['loss']}, gradient {figures['norm']} at step {log.step}; the state saved last is from before")


def _save(trainer: Trainer, out: Path, log: Log) -> None:
    """Save the state, unless a weight is no longer finite: then what was saved before must live."""
    if not all(bool(value.isfinite().all()) for value in trainer.masters.values.values()):
        raise SystemExit(f"a weight is not finite at step {log.step}; the state saved last is from before")
    saved.save(trainer, out, log.step)


def evaluate(trainer: Trainer, topk: int) -> dict[str, Any]:
    """Share of held-out answers that would come out right, by task."""
    return {name: round(trainer.right(rows, topk)[1], 3) for name, rows in batches(random.Random(7))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `make demo-data` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: state and log; read to go on")
    parser.add_argument("--begin", type=Path, help="checkpoint folder whose weights a new run begins with, instead of random ones")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the piece after about this long")
    parser.add_argument("--device", default="cuda", help="cpu is for tests of this program: a step of the recipe takes hundreds of GB")
    cores = os.cpu_count() or 2
    parser.add_argument("--workers", type=int, default=max(1, cores - 2), help="processes that make data; changes nothing else")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("training needs a CUDA device, and torch sees none here")
    train(args)


if __name__ == "__main__":
    main()
