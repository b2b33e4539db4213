"""The `forebay` command: errors in one sentence, `config`, `check`, and a start that does not wait for torch."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forebay.server import cli

Printed = pytest.CaptureFixture[str]


def refused(arguments: list[str], capsys: Printed) -> str:
    """Runs a command line that must fail; returns its one sentence."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("forebay: ")
    return printed.err.removeprefix("forebay: ").strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serv"], "there is no command 'serv'; the nearest is 'serve'; see `forebay --help`"),
        (["serve", "--prot", "80"], "serve: there is no flag '--prot'; the nearest is '--port'"),
        (["serve", "--prot=80"], "serve: there is no flag '--prot=80'; the nearest is '--port'"),
        (["bench", "serve", "--stream", "4"], "bench: there is no flag '--stream'; the nearest is '--streams'"),
        (["bench", "prefil"], "bench: there is no command 'prefil'; the nearest is 'prefill'; see `forebay bench --help`"),
        (["config", "--set", "engine.max_seqs=3"], "--set: there is no setting 'engine.max_seqs'; the nearest is 'engine.max_sequences'"),
        (["config", "--set", "engine"], "--set takes key=value, such as --set engine.max_sequences=16; got 'engine'"),
        (["config", "--port"], "config: argument --port: expected one argument; see `forebay config --help`"),
        (["config", "--port=-1"], "server.port (flag --port): must be greater than or equal to 0, got '-1'"),
        (["config", "--config", "nope.yaml"], "the configuration file nope.yaml does not exist"),
        (["bench", "serve", "--streams", "0"], "bench: --streams must be at least 1, got 0"),
        (["chat", "--max-tokens", "0"], "chat: --max-tokens must be at least 1, got 0"),
        (["chat", "--url", "http://[::1"], "chat: --url 'http://[::1' is no address of a server: Invalid port: ':1'"),
        (["bench", "cache", "--prefix", "0"], "bench: --prefix must be at least 1, got 0"),
        (["cache", "prune"], "cache: there is no command 'prune'; the nearest is 'purge'; see `forebay cache --help`"),
        (["cache", "ls", "--tenant", "x"], "cache: there is no flag '--tenant'; the nearest is '--set'"),
        (["cache", "ls", "--port", "80"], "cache: there is no flag '--port'; the nearest is '--set'"),
        (["check", "demo", "--memory", "much"], "--memory takes a size such as 141GB or 16GiB, got 'much'"),
    ],
)
def test_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: Printed) -> None:
    assert refused(arguments, capsys) == sentence


def test_missing_model_is_one_sentence(capsys: Printed) -> None:
    assert "'/no/such/folder' is not a folder" in refused(["check", "/no/such/folder"], capsys)


def test_stable_flags_reach_their_settings(capsys: Printed) -> None:
    flags = ["--model", "demo", "--host", "0.0.0.0", "--port", "81", "--device", "cuda", "--cache-dir", "/c", "--redis-url", "redis://h:1"]
    assert cli.main(["config", *flags]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["path"] == "demo"
    assert (printed["server"]["host"], printed["server"]["port"]) == ("0.0.0.0", 81)
    assert printed["engine"]["device"] == "cuda"
    assert (printed["cache"]["dir"], printed["cache"]["redis_url"]) == ("/c", "redis://h:1")


def test_settings_of_one_command_can_be_handed_to_another(capsys: Printed, tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text("engine: {threads: 2}")
    arguments = ["config", "--config", str(file), "--port", "81", "--set", "engine.aging_s=3", "--set", "model.name=a b"]
    assert cli.main(arguments) == 0
    first = capsys.readouterr().out
    assert cli.main(["config", *cli.setting_arguments(cli.parse(arguments))]) == 0
    assert capsys.readouterr().out == first


def test_describe_tells_unit_and_range(capsys: Printed) -> None:
    assert cli.main(["config", "--describe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "server.port (0 to 65535)" in lines
    assert "engine.aging_s (at least 0, seconds)" in lines
    assert "engine.device (cpu or cuda)" in lines


def test_check_prints_the_released_model(capsys: Printed) -> None:
    assert cli.main(["check", "synthetic:v41-flash"]) == 0
    out = capsys.readouterr().out
    assert "890 bytes per token" in out
    for figure in ("288,777,830,400", "202,758,032,400", "113,920", "2,703,360"):
        assert figure in out


def test_check_as_json_adds_up(capsys: Printed) -> None:
    gib = 1 << 30
    assert cli.main(["check", "synthetic:v41-flash", "--memory", "320GiB", "--set", "engine.max_sequences=8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes_per_token"] == 890
    assert plan["tensors"] == 93_418 + 2_401
    assert sum(plan["parts"].values()) - plan["parts"]["drafter"] == 501_382_611_408
    assert plan["weights"] + plan["tables"] == 501_382_611_408  # the drafter is not loaded yet
    assert plan["fits"] is True
    taken = plan["weights"] + plan["work_bytes"] + 8 * plan["bytes_per_sequence"]
    left = 320 * gib - taken - plan["tokens"] * 890
    assert 0 <= left < plan["block_bytes"]


def test_check_tells_what_the_tiers_live_in(capsys: Printed, kv_folder: Path) -> None:
    flags = ["check", "demo", "--set", "cache.ssd_bytes=7GiB", "--set", "cache.swa_bytes=33MiB"]
    assert cli.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ssd"]["dir"], found["ssd"]["budget_bytes"], found["ssd"]["fault"]) == (str(kv_folder), 7 << 30, None)
    assert (found["redis"]["where"], found["redis"]["maxmemory"], found["redis"]["fault"]) == ("embedded", 33 << 20, None)
    assert cli.main(flags) == 0
    rows = [line.strip() for line in capsys.readouterr().out.splitlines()]
    tokens = (7 << 30) // found["block_bytes"] * found["block_tokens"]
    assert any(row.startswith("budget") and row.endswith("7.00 GiB, 72 h") for row in rows)
    assert any(row.startswith("tokens of KV in it") and row.endswith(f"{tokens:,}") for row in rows)
    assert any(row.startswith("snapshots in Redis") and "embedded: valkey" in row for row in rows)


def test_check_without_tiers(capsys: Printed) -> None:
    assert cli.main(["check", "demo", "--cache-dir", "none", "--redis-url", "none"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["SSD", "store", "off"] in rows
    assert ["snapshots", "in", "Redis", "off"] in rows


def test_check_of_a_folder_that_cannot_be_used_fails(capsys: Printed, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["check", "demo", "--cache-dir", str(tmp_path / "file" / "kv"), "--redis-url", "redis://:secret@127.0.0.1:9"]) == 1
    out = capsys.readouterr().out
    assert "SSD store: " in out and "cannot be written" in out
    assert "snapshots in Redis" in out and "no answer" in out
    assert "note: Redis: no snapshots while this lasts, windows are replayed" in out
    assert "secret" not in out


def test_check_of_too_little_memory_says_how_much_is_lacking(capsys: Printed) -> None:
    assert cli.main(["check", "demo", "--memory", "100MiB"]) == 1
    assert "It does not fit" in capsys.readouterr().out


def test_check_lists_what_a_checkpoint_lacks(capsys: Printed, tmp_path: Path, golden: Path) -> None:
    (tmp_path / "config.json").write_bytes((golden / "tiny-a" / "checkpoint" / "config.json").read_bytes())
    assert cli.main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "model.safetensors" in out
    assert "bytes per token" in out


def test_chat_without_a_server_is_one_sentence(capsys: Printed) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("forebay: there is no server at http://127.0.0.1:9")
    assert err.count("\n") == 1


def test_file_that_cannot_be_used_is_one_sentence(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **names: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/models/v41/config.json")

    monkeypatch.setattr("forebay.engine.plan.plan", refuse)
    assert cli.main(["check", "demo"]) == 1
    assert capsys.readouterr().err == "forebay: /models/v41/config.json: Permission denied\n"


def test_threads_are_set_up_before_torch_is_loaded(repository: Path) -> None:
    code = "import sys, forebay.server.cli, forebay.server.commands.serve, forebay.server.commands.chat; print('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(repository / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout == "False\n"


def test_reader_that_leaves_early_is_no_error(repository: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(repository / "src")}
    command = f"{sys.executable} -m forebay.server.cli config --describe | head -n 1"
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_full_disk_behind_the_output_is_one_sentence() -> None:
    code = "import sys; from forebay.server import cli; sys.exit(cli.main(['config']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == "forebay: output: No space left on device"
    assert "Traceback" not in done.stderr
