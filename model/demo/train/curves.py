"""The curves of a training run as one picture: `python -m forebay.model.demo.train.curves --log FILE --out FILE.png`.

Needs matplotlib (extra `quality`). Reads the run's `log.jsonl`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from forebay.model.demo.train.plan import PHASES

RECALL = "recall "  # what evaluations of long texts are called, with their length after it


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, sorted by step; of a step that was taken twice (a run that went on from an earlier state) the later line."""
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines() if line.strip()]
    found = {(line["step"], "loss" in line): line for line in lines if "parameters" not in line}
    return [found[key] for key in sorted(found)]


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Write a PNG: losses, held-out answers by task, recall by length; phases as vertical lines.

    Raises SystemExit without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the curves need matplotlib: pip install -e '.[quality]'")
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    loss, tasks, recall = figure.subplots(1, 3)
    trained = [line for line in lines if "loss" in line]
    asked = [line for line in lines if any(key.startswith(RECALL) for key in line)]
    for name in ("loss", "index"):
        loss.plot([line["step"] for line in trained], [line[name] for line in trained], label=name, linewidth=1)
    loss.set(yscale="log", ylabel="loss, nats a token", title="Losses (the last phases train answers only)")
    shown = {key: None for line in asked for key in line if "@" in key or key.startswith(RECALL)}
    for number, name in enumerate(shown):
        panel = recall if name.startswith(RECALL) else tasks
        seen = [line for line in asked if name in line]
        colour = colormaps["tab20"](number % 20)
        panel.plot([line["step"] for line in seen], [100 * line[name] for line in seen], label=name, color=colour, marker=".", linewidth=1)
    tasks.set(ylim=(-3, 103), ylabel="answers right, %", title="Held-out exercises, task@effort")
    recall.set(ylim=(-3, 103), title="Recall of planted facts, by tokens of the text")
    end = 0
    for phase in PHASES:
        for panel in (loss, tasks, recall):
            panel.axvline(end, color="#bbbbbb", linewidth=0.8, linestyle=":")
        loss.text(end, 1.0, f" {phase.name}", transform=loss.get_xaxis_transform(), va="top", fontsize=8, color="#666666")
        end += phase.steps
    for panel in (loss, tasks, recall):
        panel.set_xlabel("step")
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.legend(fontsize=7, frameon=False)
    figure.savefig(file, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl of the run")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    args = parser.parse_args()
    draw(read(args.log), args.out)


if __name__ == "__main__":
    main()
