"""What a training run leaves to go on with: fp32 masters, optimiser states, and how far it came; replaced as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.model.demo.train.trainer import Trainer

NAME, NEXT, LAST = "saved", "saving", "before"  # folders in a run's folder


def save(trainer: Trainer, run: Path, step: int) -> None:
    """Write the state after `step` steps. Killed at any moment, `latest` finds this one or the one before."""
    folder = run / NEXT
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    values = {name: value.detach().float().cpu().contiguous() for name, value in trainer.masters.values.items()}
    save_file(values, folder / "masters.safetensors")
    torch.save([optimizer.state_dict() for optimizer in trainer.optimizers], folder / "optimizers.pt")
    (folder / "progress.json").write_text(json.dumps({"step": step}) + "\n", "utf-8")
    if (run / NAME).exists():
        shutil.rmtree(run / LAST, ignore_errors=True)
        os.replace(run / NAME, run / LAST)
    os.replace(folder, run / NAME)
    shutil.rmtree(run / LAST, ignore_errors=True)


def latest(run: Path) -> Path | None:
    """Folder of the newest whole state of a run."""
    for name in (NAME, LAST):
        if (run / name / "progress.json").exists():
            return run / name
    return None


def load_masters(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Masters by name, and steps done."""
    return load_file(folder / "masters.safetensors"), json.loads((folder / "progress.json").read_text("utf-8"))["step"]


def restore(trainer: Trainer, run: Path) -> int:
    """Bring a trainer where the run was; -> steps done, 0 for a run that has left nothing."""
    folder = latest(run)
    if folder is None:
        return 0
    values, step = load_masters(folder)
    trainer.masters.load(values)
    for optimizer, state in zip(trainer.optimizers, torch.load(folder / "optimizers.pt", weights_only=True), strict=True):
        optimizer.load_state_dict(state)
    return step
