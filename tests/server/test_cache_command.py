"""`forebay cache` on a real store, beside the process that has it open."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cache.embedded import EmbeddedRedis
from forebay.cache.records import tenant_id
from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.cache.ssd import SsdOptions, SsdStore, StoredBlock, staging_bytes
from forebay.cache.swa import SwaOptions, SwaPool
from forebay.server import cli

BLOCK_BYTES = 9000
SHAPE = SnapshotShape(encoder_layers=2, decoder_layers=2, window=4, row_bytes=8)
Printed = pytest.CaptureFixture[str]


@dataclass
class Filled:
    """A store with 5 exact blocks of the default tenant and 3 of "alice" that have a replay behind them."""

    folder: Path
    store: SsdStore
    default: list[bytes]
    alice: list[bytes]
    payload: np.ndarray

    def files(self) -> bytes:
        return b"".join(file.read_bytes() for file in (self.folder / "segments").iterdir())


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    folder = tmp_path / "kv"
    staging = np.zeros(staging_bytes(16, BLOCK_BYTES), np.uint8)
    store = SsdStore(SsdOptions(folder, 1 << 30, free_bytes=0), identity="tiny", block_bytes=BLOCK_BYTES, staging=staging)
    payload = np.random.default_rng(1).integers(0, 256, (8, BLOCK_BYTES), np.uint8)
    keys = [bytes([i]) * 32 for i in range(8)]
    store.put([StoredBlock(key, depth, 0) for depth, key in enumerate(keys[:5])], payload[:5], tenant_id(""))
    store.put([StoredBlock(key, depth, 1) for depth, key in enumerate(keys[5:])], payload[5:], tenant_id("alice"))
    assert store.flush(30)
    yield Filled(folder, store, keys[:5], keys[5:], payload)
    store.close()


def command(action: str, folder: Path, *arguments: str, redis: str = "none") -> list[str]:
    return ["cache", action, "--cache-dir", str(folder), "--redis-url", redis, *arguments]


def printed_json(capsys: Printed) -> Any:
    return json.loads(capsys.readouterr().out)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def say(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))


def test_stats(filled: Filled, capsys: Printed) -> None:
    assert cli.main(command("stats", filled.folder, "--json", "--set", "cache.ssd_bytes=64MiB")) == 0
    found = printed_json(capsys)
    assert (found["blocks"], found["segments"], found["complete"]) == (8, 1, True)
    assert {int(lineage): blocks for lineage, blocks in found["lineages"].items() if blocks} == {0: 5, 1: 3}
    assert (found["dir"], found["budget_bytes"], found["ttl_s"]) == (str(filled.folder), 64 << 20, 259_200)
    assert found["segment_bytes"] >= found["payload_bytes"] == 8 * BLOCK_BYTES
    assert cli.main(command("stats", filled.folder)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["blocks", "8"] in lines
    assert ["payload", "70.31", "KiB"] in lines
    assert ["exact", "5"] in lines
    assert ["1", "replay", "behind", "them", "3"] in lines
    assert not any("2 replays" in " ".join(line) for line in lines)


def test_ls_groups_by_model_and_tenant(filled: Filled, capsys: Printed) -> None:
    assert cli.main(command("ls", filled.folder, "--json")) == 0
    first, second = printed_json(capsys)
    assert first["identity"] == second["identity"]
    assert (first["tenant"], first["blocks"], first["bytes"], first["lineages"]) == (tenant_id("").hex(), 5, 5 * BLOCK_BYTES, {"0": 5})
    assert (second["tenant"], second["blocks"], second["lineages"]) == (tenant_id("alice").hex(), 3, {"1": 3})
    assert first["oldest_use"] <= first["newest_use"]
    assert cli.main(command("ls", filled.folder)) == 0
    out = capsys.readouterr().out
    assert "exact: blocks with no bounded replay behind them\n" in out and "payload: bytes of KV" in out
    rows = [line.split() for line in out.splitlines() if first["identity"][:8] in line]
    assert [(row[1], row[2], row[-1]) for row in rows] == [("default", "5", "100%"), (second["tenant"][:8], "3", "0%")]


def test_verify_deletes_what_is_bad_and_says_so(filled: Filled, capsys: Printed) -> None:
    assert cli.main(command("verify", filled.folder)) == 0
    assert "8 blocks (70.31 KiB of payload) were read, 8 sound" in capsys.readouterr().out
    (segment,) = (filled.folder / "segments").iterdir()
    at = segment.read_bytes().index(filled.payload[2].tobytes())
    with segment.open("r+b") as file:
        file.seek(at + 77)
        file.write(bytes([filled.payload[2][77] ^ 1]))
    assert cli.main(command("verify", filled.folder)) == 1
    out = capsys.readouterr().out
    assert "8 blocks (70.31 KiB of payload) were read, 7 sound" in out
    assert "1 block was damaged (checksum) and has been deleted" in out
    assert filled.store.lookup(filled.default) == [0, 0]
    assert cli.main(command("verify", filled.folder, "--json")) == 0
    report = printed_json(capsys)
    assert (report["blocks"], report["sound"], report["unreadable"]) == (7, 7, 0)


def test_purge_of_a_tenant_spares_the_others(filled: Filled, capsys: Printed) -> None:
    assert cli.main(command("purge", filled.folder, "--tenant", "alice")) == 0
    out = capsys.readouterr().out
    assert "3 blocks of tenant 'alice' deleted, 26.37 KiB of payload" in out
    assert "A running server keeps" in out
    assert filled.store.lookup(filled.alice) == []
    assert filled.store.lookup(filled.default) == [0] * 5
    left = filled.files()
    assert [payload.tobytes() in left for payload in filled.payload] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("digits", [8, 11, 32])
def test_purge_of_a_tenant_by_the_name_that_ls_shows(filled: Filled, digits: int) -> None:
    assert cli.main(command("purge", filled.folder, "--tenant", tenant_id("alice").hex()[:digits])) == 0
    assert filled.store.lookup(filled.alice) == []
    assert filled.store.lookup(filled.default) == [0] * 5


@pytest.mark.parametrize("name", ["bob", "Alice", tenant_id("alice").hex()[:7], tenant_id("alice").hex() + "0"])
def test_purge_of_nobody_deletes_nothing_and_says_how_tenants_are_named(
    filled: Filled, snapshots: tuple[str, SwaPool], capsys: Printed, name: str
) -> None:
    url, pool = snapshots
    assert cli.main(command("purge", filled.folder, "--tenant", name, redis=url)) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"forebay: cache: there are no blocks of tenant {name!r}, so nothing is deleted; name it by its ")
    assert pool.get([b"k" * 32]) is not None
    assert cli.main(command("purge", filled.folder, "--tenant", name, "--json")) == 1
    assert printed_json(capsys) == {"blocks": 0, "bytes": 0, "snapshots": None}
    assert filled.store.lookup(filled.default + filled.alice) == [0] * 5 + [1] * 3


def test_purge_does_not_choose_between_two_tenants(filled: Filled, capsys: Printed) -> None:
    """A salt that is spelled like another tenant's name."""
    name = tenant_id("alice").hex()
    filled.store.put([StoredBlock(b"n" * 32, 0, 0)], filled.payload[:1], tenant_id(name[:8]))
    filled.store.put([StoredBlock(b"d" * 32, 0, 0)], filled.payload[:1], tenant_id("default"))
    assert filled.store.flush(30)
    for given, others in ((name[:8], (name, tenant_id(name[:8]).hex())), ("default", (tenant_id("").hex(), tenant_id("default").hex()))):
        assert cli.main(command("purge", filled.folder, "--tenant", given)) == 2
        err = capsys.readouterr().err
        assert all(other in err for other in others)
    assert filled.store.lookup(filled.alice) == [1] * 3
    assert cli.main(command("purge", filled.folder, "--tenant", tenant_id("default").hex())) == 0
    assert filled.store.lookup([b"d" * 32]) == []
    assert filled.store.lookup(filled.default) == [0] * 5


@pytest.mark.parametrize("name", ["alice", tenant_id("alice").hex()[:8]])
def test_purge_of_a_tenant_whose_index_was_lost(filled: Filled, name: str) -> None:
    filled.store.close()
    for file in filled.folder.glob("index.sqlite*"):
        file.unlink()
    assert cli.main(command("purge", filled.folder, "--tenant", name)) == 0
    left = filled.files()
    assert [payload.tobytes() in left for payload in filled.payload] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("name", ["", "default"])
def test_purge_of_the_tenant_without_a_salt(filled: Filled, capsys: Printed, name: str) -> None:
    assert cli.main(command("purge", filled.folder, "--tenant", name, "--json")) == 0
    assert printed_json(capsys) == {"blocks": 5, "bytes": 5 * BLOCK_BYTES, "snapshots": None}
    assert filled.store.lookup(filled.alice) == [1] * 3


@pytest.mark.parametrize("answer", ["n\n", "\n", "Yesterday\n", ""])
def test_purge_of_everything_asks_first(filled: Filled, capsys: Printed, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    say(monkeypatch, answer)
    assert cli.main(command("purge", filled.folder)) == 130
    assert "Delete all 8 blocks (" in capsys.readouterr().err
    assert filled.store.lookup(filled.default) == [0] * 5


def test_purge_after_a_yes(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "y\n")
    assert cli.main(command("purge", filled.folder)) == 0
    assert filled.store.lookup(filled.default) == filled.store.lookup(filled.alice) == []
    assert not any(payload.tobytes() in filled.files() for payload in filled.payload)


def test_purge_with_nobody_to_ask_wants_yes(filled: Filled, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert cli.main(command("purge", filled.folder)) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "forebay: cache: purge deletes everything; say --yes, or name a --tenant\n")
    assert filled.store.lookup(filled.default) == [0] * 5


def test_purge_from_another_process_is_seen_by_the_server_at_once(filled: Filled) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    line = [sys.executable, "-m", "forebay.server.cli", *command("purge", filled.folder, "--yes", "--json")]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["blocks"] == 8
    assert done.stderr == ""
    assert filled.store.lookup(filled.default) == []
    filled.store.put([StoredBlock(filled.default[0], 0, 0)], filled.payload[:1], tenant_id(""))
    assert filled.store.flush(30)
    assert filled.store.lookup(filled.default) == [0]


@pytest.fixture
def snapshots() -> Iterator[tuple[str, SwaPool]]:
    """The URL of a Redis with one snapshot, and the pool that stored it."""
    server = EmbeddedRedis.start(16 << 20)
    pool = SwaPool(SwaOptions(server.url, timeout_s=5.0), identity="tiny", shape=SHAPE)
    try:
        encoder = np.zeros(SHAPE.encoder, np.uint8)
        assert pool.put(b"k" * 32, Snapshot(8, 0, None, 0, encoder, None))
        assert pool.flush(30)
        yield server.url, pool
    finally:
        pool.close()
        server.stop()


@pytest.mark.parametrize("whose", [["--yes"], ["--tenant", "alice"]])
def test_purge_deletes_the_snapshots_too(filled: Filled, snapshots: tuple[str, SwaPool], capsys: Printed, whose: list[str]) -> None:
    url, pool = snapshots
    assert pool.get([b"k" * 32]) is not None
    assert cli.main(command("purge", filled.folder, *whose, redis=url)) == 0
    assert pool.get([b"k" * 32]) is None
    out = capsys.readouterr().out
    assert "1 snapshot " in out
    assert ("of all tenants" in out) == ("--tenant" in whose)
    assert url.split(":")[2].partition("@")[0] not in out  # the password


def test_purge_without_an_answer_from_redis_says_what_is_left(filled: Filled, capsys: Printed) -> None:
    assert cli.main(command("purge", filled.folder, "--yes", redis="redis://:secret@127.0.0.1:9")) == 1
    printed = capsys.readouterr()
    assert "8 blocks deleted" in printed.out
    assert "snapshots in redis://127.0.0.1:9 may be left" in printed.err
    assert "secret" not in printed.out + printed.err
    assert filled.store.lookup(filled.default) == []


@pytest.mark.parametrize("action", ["stats", "ls", "verify", "purge"])
def test_what_is_no_store_is_one_sentence(action: str, tmp_path: Path, capsys: Printed) -> None:
    def refusal(folder: str) -> str:
        assert cli.main(["cache", action, "--cache-dir", folder, *(["--yes"] if action == "purge" else [])]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    (tmp_path / "photos").mkdir()
    assert f"there is no SSD store in {tmp_path / 'missing'}; name its folder with --cache-dir" in refusal(str(tmp_path / "missing"))
    assert f"{tmp_path / 'photos'} is not an SSD" in refusal(str(tmp_path / "photos"))
    assert list((tmp_path / "photos").iterdir()) == []
    assert "cache.dir is none" in refusal("none")


def test_empty_store(tmp_path: Path, capsys: Printed) -> None:
    staging = np.zeros(staging_bytes(1, BLOCK_BYTES), np.uint8)
    SsdStore(SsdOptions(tmp_path, 1 << 30), identity="tiny", block_bytes=BLOCK_BYTES, staging=staging).close()
    assert cli.main(command("ls", tmp_path)) == 0
    assert f"{tmp_path} holds no blocks" in capsys.readouterr().out.replace("\n", "")
    assert cli.main(command("verify", tmp_path)) == 0
    assert cli.main(command("stats", tmp_path)) == 0
    capsys.readouterr()
    assert cli.main(command("purge", tmp_path, "--yes")) == 0
    assert capsys.readouterr().out == "0 blocks deleted, 0 B of payload\n"
