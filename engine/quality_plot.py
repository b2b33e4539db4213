"""The figures of the quality bench as one picture. Needs matplotlib, which is not installed by default (extra `quality`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from forebay.model.errors import ConfigError

INK, GREY = "#222222", "#999999"
BLUE, ORANGE, GREEN, RED = "#1f5fa8", "#d9731a", "#2f8f4e", "#b3322c"
SHADES = ("#f2c48d", "#e89a4a", "#d9731a", "#8f4708")  # the more boundaries, the darker


def need_matplotlib() -> None:
    """Raise ConfigError unless pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'forebay[quality]' (in a checkout: .venv/bin/pip install -e '.[quality]')")


def draw(figures: dict[str, Any], file: Path) -> None:
    """Write a PNG of what `figures` (the JSON of the bench) has; a panel whose part was not measured says so.

    Raises:
        ConfigError: there is no matplotlib.
        OSError: the file cannot be written.
    """
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    panels = (_drift_recall, _drift_text, _by_length, _effort, _by_mode, _by_task)
    for ax, panel in zip(axes.flat, panels, strict=True):
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.8)
        ax.set_axisbelow(True)
        if not panel(ax, figures):
            ax.text(0.5, 0.5, "not measured", ha="center", va="center", color=GREY, transform=ax.transAxes)
            ax.set_xticks([])
            ax.set_yticks([])
    figure.suptitle(f"{figures.get('measured', '')}   {figures.get('date', '')[:10]}", color=INK, fontsize=13)
    figure.savefig(file, format="png")


def _scores(figures: dict[str, Any], part: str, **wanted: Any) -> list[dict[str, Any]]:
    """Scores with a share, depth None unless asked for."""
    wanted = {"depth": None, **wanted}
    return [s for s in figures["scores"] if s["part"] == part and "share" in s and all(s.get(k) == v for k, v in wanted.items())]


def _errors(scores: list[dict[str, Any]]) -> list[list[float]]:
    """Distances to the ends of the intervals, percent."""
    return [[100 * (s["share"] - s["low"]) for s in scores], [100 * (s["high"] - s["share"]) for s in scores]]


def _percent(ax: Any, label: str) -> None:
    ax.set_ylim(-3, 104)
    ax.set_ylabel(label)


def _places(ax: Any, names: list[str]) -> None:
    ax.set_xticks(range(len(names)), names)
    ax.set_xlim(-0.4, len(names) - 0.6)


def _replays(name: str) -> int:
    """Boundaries of a mode, by its name."""
    last = name.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def _drift_recall(ax: Any, figures: dict[str, Any]) -> bool:
    recall = sorted(_scores(figures, "drift"), key=lambda s: _replays(s["mode"]))
    text = sorted((r for r in figures["text"] if "kl" in r and _is_default(r["mode"])), key=lambda r: r["boundaries"])
    steps = sorted({_replays(s["mode"]) for s in recall} | {r["boundaries"] for r in text})
    if not steps:
        return False
    if recall:
        at = [steps.index(_replays(s["mode"])) for s in recall]
        label = f"recall, about {recall[0]['length']:,} tokens (n = {recall[0]['n']}, of {recall[0]['texts']} texts)"
        ax.errorbar(at, [100 * s["share"] for s in recall], _errors(recall), color=BLUE, marker="o", capsize=3, label=label)
    if text:
        beside = [steps.index(r["boundaries"]) + 0.06 for r in text]
        errors = [[100 * (r["top1"] - r["top1_low"]) for r in text], [100 * (r["top1_high"] - r["top1"]) for r in text]]
        label = f"same most likely token as exact (n = {text[0]['tokens']})"
        ax.errorbar(beside, [100 * r["top1"] for r in text], errors, color=ORANGE, marker="s", capsize=3, label=label)
    _places(ax, [str(k) for k in steps])
    _percent(ax, "%")
    ax.set_xlabel("replay boundaries behind the answer")
    ax.set_title("Drift: recall and agreement")
    ax.legend(loc="lower left", frameon=False)
    return True


def _drift_text(ax: Any, figures: dict[str, Any]) -> bool:
    text = sorted((r for r in figures["text"] if "kl" in r and _is_default(r["mode"])), key=lambda r: r["boundaries"])
    exact = next((r for r in figures["text"] if r["mode"] == "exact" and "kl" in r), None)
    if not text or exact is None:
        return False
    at = list(range(len(text)))
    known = [(r["kl"], r["kl"], r["kl"]) if r["kl_low"] is None else (r["kl_low"], r["kl"], r["kl_high"]) for r in text]
    spread = [[kl - low for low, kl, _ in known], [high - kl for _, kl, high in known]]
    lines = [ax.errorbar(at, [r["kl"] for r in text], spread, color=RED, marker="o", capsize=3, label="KL from exact (left)")]
    ax.set_ylabel("nats")
    ax.set_ylim(bottom=0)
    other = ax.twinx()
    other.spines["top"].set_visible(False)
    lines += other.plot(at, [r["perplexity"] for r in text], color=GREEN, marker="s", label="perplexity (right)")
    lines.append(other.axhline(exact["perplexity"], color=GREEN, linestyle=":", label=f"perplexity, exact: {exact['perplexity']:.2f}"))
    low, high = min(r["perplexity"] for r in [*text, exact]), max(r["perplexity"] for r in [*text, exact])
    room = max(high - low, 0.02 * high)
    other.set_ylim(low - room, high + room)
    other.set_ylabel("perplexity")
    _places(ax, [str(r["boundaries"]) for r in text])
    ax.set_xlabel("replay boundaries behind the text")
    ax.set_title("Drift: prediction of held-out prose")
    ax.legend(handles=lines, loc="upper left", frameon=False)
    return True


def _by_length(ax: Any, figures: dict[str, Any]) -> bool:
    scores = _scores(figures, "recall", what="recall")
    if not scores:
        return False
    lengths = [s["length"] for s in scores]
    asked, texts = (sorted(s[name] for s in scores) for name in ("n", "texts"))
    label = f"all depths (n = {asked[0]} to {asked[-1]}, of {texts[0]} to {texts[-1]} texts)"
    ax.errorbar(range(len(lengths)), [100 * s["share"] for s in scores], _errors(scores), color=BLUE, marker="o", capsize=3, label=label)
    for depth, colour in ((0, GREEN), (4, RED)):
        part = {s["length"]: s["share"] for s in _scores(figures, "recall", what="recall", depth=depth)}
        at = [i for i, length in enumerate(lengths) if length in part]
        name = "facts in the first fifth" if depth == 0 else "facts in the last fifth"
        ax.plot(at, [100 * part[lengths[i]] for i in at], color=colour, linestyle=":", marker=".", label=name)
    _places(ax, [f"{s['mean_prompt_tokens']:,.0f}" for s in scores])
    _percent(ax, "recall, %")
    ax.set_xlabel("tokens of a prompt, on average")
    ax.set_title("Recall by length, bounded decoder")
    ax.legend(loc="lower left", frameon=False)
    return True


def _effort(ax: Any, figures: dict[str, Any]) -> bool:
    scores = sorted(_scores(figures, "effort"), key=lambda s: s["effort"])
    if not scores:
        return False
    efforts = sorted({s["effort"] for s in scores})
    other = ax.twinx()
    other.spines["top"].set_visible(False)
    lines = []
    modes = list(dict.fromkeys(s["mode"] for s in scores))
    for number, (mode, colour, mark) in enumerate(zip(modes, (BLUE, RED, GREEN, GREY), "o^Dv", strict=False)):
        mine = [s for s in scores if s["mode"] == mode]
        at = [s["effort"] + number - (len(modes) - 1) / 2 for s in mine]
        label = f"right, {mode} (n = {mine[0]['n']})"
        lines.append(ax.errorbar(at, [100 * s["share"] for s in mine], _errors(mine), color=colour, marker=mark, capsize=3, label=label))
        tokens = other.plot(at, [s["mean_tokens"] for s in mine], color=ORANGE if number == 0 else colour, linestyle=":", marker=".")
        if number == 0:
            tokens[0].set_label("tokens of an answer (dotted, right)")
            lines += tokens
    _percent(ax, "right, %")
    other.set_ylim(0, 1.15 * max(s["mean_tokens"] for s in scores))
    other.set_ylabel("tokens")
    ax.set_xticks(efforts)
    ax.set_xlabel("reasoning effort")
    ax.set_title("Arithmetic by effort, after a long lead")
    ax.legend(handles=lines, loc="lower right", frameon=False, fontsize=8)
    return True


def _by_mode(ax: Any, figures: dict[str, Any]) -> bool:
    scores = _scores(figures, "modes")
    lengths = sorted({s["length"] for s in scores})
    if not scores:
        return False
    modes = list(dict.fromkeys(s["mode"] for s in scores))
    default = _scores(figures, "recall", what="recall", mode="bounded decoder")
    if any(s["length"] in lengths for s in default):
        modes.insert(1, "bounded decoder")
    wide = 0.8 / len(lengths)
    for i, (length, colour) in enumerate(zip(lengths, (BLUE, ORANGE, GREEN), strict=False)):
        found = {s["mode"]: s for s in [*scores, *default] if s["length"] == length}
        names = [name for name in modes if name in found]
        at = [modes.index(name) - 0.4 + wide * (i + 0.5) for name in names]
        chosen = [found[name] for name in names]
        ax.bar(at, [100 * s["share"] for s in chosen], wide * 0.92, color=colour, label=f"about {length:,} tokens")
        ax.errorbar(at, [100 * s["share"] for s in chosen], _errors(chosen), fmt="none", ecolor=INK, capsize=2, linewidth=1)
    ax.set_xticks(range(len(modes)), [name.replace(" ", "\n") for name in modes], fontsize=8)
    _percent(ax, "recall, %")
    ax.set_ylim(0, 116)  # room for the legend above the bars
    ax.set_yticks(range(0, 101, 20))
    ax.set_title("Recall by mode")
    ax.legend(loc="upper right", frameon=False, ncols=len(lengths))
    return True


def _by_task(ax: Any, figures: dict[str, Any]) -> bool:
    scores = _scores(figures, "tasks")
    if not scores:
        return False
    tasks = list(dict.fromkeys(s["what"] for s in scores))
    modes = list(dict.fromkeys(s["mode"] for s in scores))
    for number, (mode, colour, mark) in enumerate(zip(modes, (INK, BLUE, *SHADES, GREEN, RED, GREY), "osDDDD^vx", strict=False)):
        found = {s["what"]: s for s in scores if s["mode"] == mode}
        at = [tasks.index(what) + 0.09 * (number - (len(modes) - 1) / 2) for what in found]
        chosen = list(found.values())
        ax.errorbar(
            [100 * s["share"] for s in chosen], at, xerr=_errors(chosen), color=colour, marker=mark, markersize=4, linestyle="none",
            linewidth=1, label=mode,
        )  # fmt: skip
    ax.set_yticks(range(len(tasks)), tasks, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(-3, 104)
    ax.set_xlabel("right, %")
    ax.grid(axis="x", color="#eeeeee")
    ax.set_title("Other tasks by mode, after a long lead")
    ax.legend(loc="lower left", frameon=True, framealpha=0.9, edgecolor="none", fontsize=8)
    return True


def _is_default(mode: str) -> bool:
    return mode.startswith("bounded ")
