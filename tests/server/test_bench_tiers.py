"""`forebay bench cache` and `bench resume`, small: what is measured, not how fast it is."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from forebay.engine import cache_bench
from forebay.engine.cache_bench import BenchError, Row
from forebay.server import cli
from forebay.server.commands.bench import path_taken
from forebay.server.commands.scratch import scratch
from forebay.server.config import load

QUIET = ["--set", "engine.threads=1"]


def figures_of(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert cli.main(["bench", *arguments, "--json", str(file), *QUIET]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def test_every_figure_stands_beside_its_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "disk" / "kv"
    arguments = ["cache", "--prefix", "8", "--blocks", "1564", "--repeats", "2", "--cache-dir", str(folder)]
    figures = figures_of(arguments, tmp_path)
    rows = {row["what"]: row for row in figures["rows"]}
    for row in rows.values():
        assert row["value"] == statistics.median(row["samples"]) > 0
        if "ceiling" in row:
            assert row["share"] == pytest.approx(row["value"] / row["ceiling"])
    asked = {what: (row.get("least_share"), row.get("least"), row.get("most")) for what, row in rows.items() if "reached" in row}
    assert asked == {
        "write-behind, on the disk": (0.6, None, None),
        "cold restore of a prefix": (0.8, None, None),
        "cold restore in random order": (0.7, None, None),
        "GET of a snapshot, 1.35 MB": (None, 1000, None),
        "index, memory": (None, None, 250),
        "index, file": (None, None, 250),
        "restart until a prefix is found": (None, None, 10),
    }
    assert all("ceiling" in row for row in rows.values() if row["unit"] == "MB/s")
    out = capsys.readouterr().out
    assert "share ≥ 0.8" in out and "plain cold read" in out
    assert list(tmp_path.rglob(".forebay-bench*")) == []
    assert not folder.exists()


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (Row("a", "MB/s", (1.0, 8.0, 9.0), 10.0, "b", least_share=0.8), True),
        (Row("a", "MB/s", (1.0, 7.9, 9.0), 10.0, "b", least_share=0.8), False),
        (Row("a", "MB/s", (1000.0,), 9000.0, "b", least=1000.0), True),
        (Row("a", "s", (10.1,), most=10.0), False),
        (Row("a", "s", (10.0,), most=10.0), True),
        (Row("a", "s", (10.0,)), None),
    ],
)
def test_what_is_asked_for_is_judged_by_the_median(row: Row, reached: bool | None) -> None:
    assert row.reached is reached


def test_file_that_was_forgotten_is_out_of_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    assert cache_bench.cached_share([file]) == 1.0
    cache_bench.forget([file])
    assert cache_bench.cached_share([file]) == 0.0
    file.read_bytes()
    assert cache_bench.cached_share([file]) == 1.0


def test_wrong_bytes_are_no_figure() -> None:
    keys = [b"a", b"b"]
    payload = np.array([[1, 2], [3, 4]], np.uint8)
    cache_bench.check(payload[::-1].copy(), payload, keys[::-1], keys)
    with pytest.raises(BenchError, match="block 1 came back with other bytes"):
        cache_bench.check(payload * [[1], [2]], payload, keys, keys)


def test_scratch_folder_is_beside_the_store_and_goes(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    kv.mkdir()
    config, _ = load(None, {"cache.dir": ("--cache-dir", str(kv))})
    with scratch(config) as folder:
        assert folder.parent == tmp_path
        (folder / "x").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_disk_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["bench", "cache", "--cache-dir", str(tmp_path / "file" / "kv")]) == 2
    assert capsys.readouterr().err.endswith("cannot be written (Not a directory); choose another --cache-dir\n")


def test_index_larger_than_the_disk_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "cache", "--prefix", "2", "--repeats", "1", "--blocks", str(10**12), "--cache-dir", str(tmp_path / "kv")]
    assert cli.main(arguments) == 1
    assert "take fewer with --blocks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_first_token_by_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That each prompt came from its tier is checked by the benchmark itself, which would end with an error."""
    figures = figures_of(["resume", "--tokens", "512", "--repeats", "1", "--cache-dir", str(tmp_path / "kv")], tmp_path)
    counts = {way: len(values) for way, values in figures["seconds"].items()}
    assert counts == {"cold": 2, "in memory": 1, "on SSD": 1, "on SSD, Redis down": 1}
    cold = statistics.median(figures["seconds"]["cold"])
    for way, row in figures["rows"].items():
        assert row["ratio"] == pytest.approx(statistics.median(figures["seconds"][way]) / cold)
    assert [row.get("most") for row in figures["rows"].values()] == [None, 0.15, 0.2, 0.25]
    assert "on SSD, Redis down" in capsys.readouterr().out
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("kernels", [True, False])
def test_resume_runs_what_the_server_would(kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def opened(path: str, **options: Any) -> None:
        asked.update(options)
        raise BenchError("enough")

    monkeypatch.setattr("forebay.server.commands.bench_resume.LLM", opened)
    setting = f"engine.kernels={str(kernels).lower()}"
    assert cli.main(["bench", "resume", "--tokens", "512", "--cache-dir", str(tmp_path / "kv"), "--set", setting, *QUIET]) == 1
    assert asked["kernels"] is kernels


@pytest.mark.parametrize(
    ("device", "kernels", "shown"),
    [("cpu", False, "cpu"), ("cuda:0", True, "cuda:0, GPU kernels"), ("cuda:0", False, "cuda:0, torch operations")],
)
def test_figures_say_what_ran(device: str, kernels: bool, shown: str) -> None:
    runner = SimpleNamespace(device=torch.device(device), kernels=kernels)
    assert path_taken(cast(Any, SimpleNamespace(engine=SimpleNamespace(runner=runner)))) == shown


def test_prompt_longer_than_the_context_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "resume", "--tokens", "40000", "--cache-dir", str(tmp_path / "kv"), *QUIET]) == 2
    assert "40064 tokens of KV are needed, the context of demo is 32768" in capsys.readouterr().err
