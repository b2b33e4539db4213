"""The picture of a training run."""

from __future__ import annotations

import json
from pathlib import Path

from forebay.model.demo.train import curves

LOG = Path(__file__).parents[2] / "model" / "demo" / "checkpoint" / "training.jsonl"


def test_the_log_of_the_shipped_run_is_drawn(tmp_path: Path) -> None:
    lines = curves.read(LOG)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert lines[-1]["done"]
    curves.draw(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_steps_taken_twice_count_once(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    twice = [{"step": 40, "loss": 1.5}, {"step": 40, "loss": 1.4}]
    steps = [{"step": 0, "parameters": 1}, {"step": 20, "loss": 2.0}, *twice, {"step": 40, "recall 64": 1.0}]
    log.write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert curves.read(log) == [steps[1], steps[4], twice[1]]
