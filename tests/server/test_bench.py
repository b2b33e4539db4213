"""`forebay bench prefill` and `decode` on the demo checkpoint: what is measured, not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from forebay.server import cli

QUIET = ["--set", "engine.threads=1"]


def figures_of(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert cli.main(["bench", *arguments, "--json", str(file), *QUIET]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def test_prefill_compares_medians_of_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(["prefill", "--tokens", "80", "--repeats", "3"], tmp_path)
    assert {mode: len(values) for mode, values in figures["seconds"].items()} == {"bounded": 3, "exact": 3}
    medians = [median(figures["seconds"][mode]) for mode in ("bounded", "exact")]
    assert figures["ratio"] == pytest.approx(medians[0] / medians[1])
    assert f"bounded / exact: {figures['ratio']:.3f}" in capsys.readouterr().out


def test_decode_times_the_asked_steps_at_each_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(["decode", "--contexts", "40,200", "--steps", "3", "--repeats", "2"], tmp_path)
    assert {name: len(values) for name, values in figures["seconds"].items()} == {"40": 6, "200": 6}
    assert figures["ratio"] == pytest.approx(median(figures["seconds"]["200"]) / median(figures["seconds"]["40"]))
    assert "200 / 40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["decode", "--contexts", "1024"], "--contexts takes two or more lengths such as 1024,16384, got '1024'"),
        (["decode", "--contexts", "1,many"], "--contexts takes two or more lengths"),
        (["invariance", "--device", "cuda"], "batch invariance is for the CPU, on cuda it changes nothing; use --device cpu"),
        (["prefill", "--tokens", "40000"], "40001 tokens are needed, the context of demo is 32768"),
    ],
)
def test_impossible_measurement_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments, *QUIET]) == 2
    assert sentence in capsys.readouterr().err
