"""A training run's masters to the official format: `python -m forebay.model.demo.train.export --run DIR --out FOLDER`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from forebay.model.checkpoint import write_checkpoint
from forebay.model.config import ModelConfig
from forebay.model.demo import TOKENIZER
from forebay.model.demo.config import CONFIG
from forebay.model.demo.train import saved
from forebay.model.demo.train.masters import Masters

SHARD_BYTES = 8 << 20


def export(run: Path, folder: Path) -> int:
    """Write the checkpoint; -> steps it was trained for. Raises SystemExit for a run that has saved nothing."""
    state = saved.latest(run)
    if state is None:
        raise SystemExit(f"{run} holds no saved state of a training run")
    values, step = saved.load_masters(state)
    holder = Masters(ModelConfig.from_dict(CONFIG), 0, torch.device("cpu"))
    holder.load(values)
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        old.unlink()
    write_checkpoint(folder, CONFIG, holder.stored(), max_shard_bytes=SHARD_BYTES)
    if TOKENIZER.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint; its old shards are replaced")
    args = parser.parse_args()
    print(f"{args.out}: {export(args.run, args.out)} steps")


if __name__ == "__main__":
    main()
