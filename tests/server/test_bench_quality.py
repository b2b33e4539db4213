"""`forebay bench quality` as a command: what it writes, shows and refuses. What it measures is tested in tests/engine/test_quality.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import tiny_checkpoint
from forebay.engine import quality
from forebay.engine.quality_ask import QualityError
from forebay.server import cli

QUIET = ["--set", "engine.threads=1", "--set", "cache.kv_tokens=8192"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than quick."""
    made = quality.Plan.quick

    def quick(samples: int) -> quality.Plan:
        small = replace(made(samples), lengths=(300,), compared=(300,), single=(300,), drift=300, boundaries=(1, 64), unseen=300)
        return replace(small, excerpts=2, prompt=200, follows=20, plain=60)

    monkeypatch.setattr(quality.Plan, "quick", quick)
    monkeypatch.setattr(quality, "EFFORTS", (10, 100))
    monkeypatch.setattr("forebay.engine.quality_ask.ANSWER_TOKENS", (4, 6))


def run(*arguments: str) -> int:
    return cli.main(["bench", "quality", "--model", str(tiny_checkpoint()), "--quick", *arguments, *QUIET])


@pytest.mark.usefixtures("small")
def test_figures_say_what_was_measured_where_and_with_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert run("--only", "text,drift,effort", "--samples", "2", "--seed", "5", "--json", str(file)) == 0
    figures: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert figures["seed"] == 5 and figures["samples"] == 2 and figures["parts"] == ["text", "drift", "effort"]
    assert figures["date"].startswith("20") and figures["machine"]["cpus"] >= 1 and figures["versions"]["torch"]
    assert len(figures["model"]["fingerprint"]) > 40
    efforts = [score for score in figures["scores"] if score["part"] == "effort"]
    assert [(score["effort"], score["mode"], score["n"]) for score in efforts] == [
        (10, "bounded decoder", 2), (100, "bounded decoder", 2), (10, "bounded encoder 16", 1), (100, "bounded encoder 16", 1),
    ]  # fmt: skip
    assert efforts[2]["lineage"] == [16, 16]
    assert all(score["low"] <= score["share"] <= score["high"] for score in efforts)
    drift = {score["mode"]: score for score in figures["scores"] if score["part"] == "drift" and "depth" not in score}
    assert drift["bounded encoder 1"]["lineage"] == [1, 1]
    assert drift["bounded encoder 64"]["n"] == 0 and drift["bounded encoder 64"]["too_short"] == 2  # 300 tokens are 37 blocks
    assert {row["mode"] for row in figures["text"]} >= {"exact", "bounded decoder", "bf16 KV"}
    out, err = capsys.readouterr()
    assert figures["complete"] and "Incomplete" not in err
    out = " ".join(out.split())  # titles are wrapped
    assert "n/a" in out and "tokens in pieces of 4,096" in out and "Against the default mode" in out
    assert "Arithmetic by reasoning effort" in out and "Wilson's, one trial per text" in out and "Asked of the demo" in out
    assert "0%, about" in err and " left: text, exact" in err


@pytest.mark.parametrize("kernels", ["true", "false"])
def test_torch_operations_are_measured(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """GPU kernels know none of the memories that modes stand for."""
    asked: dict[str, Any] = {}

    def opened(path: str, **options: Any) -> None:
        asked.update(options)
        raise QualityError("enough")

    monkeypatch.setattr("forebay.server.commands.bench_quality.LLM", opened)
    assert run("--set", f"engine.kernels={kernels}") == 1
    assert asked["kernels"] is False


@pytest.mark.usefixtures("small")
def test_abort_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise QualityError("one replay too many")

    monkeypatch.setattr(quality.Instrument, "_effort", fail)
    file = tmp_path / "figures.json"
    assert run("--only", "drift,effort", "--samples", "2", "--json", str(file)) == 1
    figures: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert figures["complete"] is False and figures["samples"] == 2 and figures["wall_seconds"] > 0
    assert {score["part"] for score in figures["scores"]} == {"drift"}
    assert list(tmp_path.iterdir()) == [file]
    out, err = capsys.readouterr()
    assert "bounded encoder 1" in out
    assert "Incomplete: 3 pieces of work were finished; " in err
    assert "has the figures of all of them" in err and "one replay too many" in err


@pytest.mark.usefixtures("small")
def test_file_that_cannot_be_written_any_more_is_not_said_to_have_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, written = Path.write_text, []

    def full(self: Path, *arguments: Any) -> int:
        if self.name == ".figures.json.part":
            written.append(self)
            if len(written) > left:
                write(self, "half of it")
                raise OSError(28, "No space left on device")
        return write(self, *arguments)

    monkeypatch.setattr(Path, "write_text", full)
    file = tmp_path / "figures.json"
    for left, said in ((0, "Incomplete: 1 pieces of work were finished\n"), (1, f"; {file} has the figures of 1 of them\n")):
        written.clear()
        assert run("--only", "effort", "--samples", "1", "--json", str(file)) == 2
        assert list(tmp_path.iterdir()) == [file] * left  # neither a part of a file nor half of one
        err = capsys.readouterr().err
        assert said in err and "cannot be written: No space left on device" in err
    assert len(json.loads(file.read_text("utf-8"))["seconds"]) == 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_file_that_cannot_be_written_is_refused_before_the_work(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flag == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr("forebay.server.commands.bench_quality._open", lambda config: pytest.fail("work has begun"))
    (tmp_path / "file").write_text("kept")
    for name, said in (
        (".", "it is a folder"), ("/dev/null", "it is no file"), ("file/x.json", "Not a directory"), ("no/x.json", "No such file"),
        ("n" * 300, "File name too long"),
    ):  # fmt: skip
        assert run(flag, str(tmp_path / name)) == 2
        err = capsys.readouterr().err
        assert f"{flag}: {tmp_path / name} cannot be written" in err and said in err, name
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anything
    assert run(flag, str(tmp_path / "file")) == 2
    assert "no right to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.usefixtures("small")
def test_picture_is_written_beside_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("--only", "effort", "--samples", "1", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "a.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "recal"], "no part 'recal'; the parts are text, recall, drift, modes, tasks, effort"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--json", "/nowhere/at/all.json"], "--json: /nowhere/at/all.json cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_work(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert sentence in capsys.readouterr().err


def test_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert run("--plot", "x.png") == 2
    assert "pip install 'forebay[quality]'" in capsys.readouterr().err
