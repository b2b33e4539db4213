"""What `forebay check` finds out about the folder of the SSD store and the Redis of the snapshots."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.cache.embedded import EmbeddedRedis
from forebay.engine.tier_check import check_redis, check_ssd, judge
from forebay.engine.tiers import MOST_BUDGET, TierOptions, ssd_budget
from forebay.model.errors import ConfigError

GOOD = {"redis_version": "7.2.4", "maxmemory": 1 << 30, "maxmemory_policy": "volatile-ttl", "role": "master", "cluster_enabled": 0}


def test_tiers_that_are_off_are_not_looked_at() -> None:
    assert check_ssd(TierOptions()) is None
    assert check_redis(TierOptions()) is None


def test_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = check_ssd(TierOptions(dir=tmp_path, ssd_bytes=5000, ssd_free_bytes=0))
    assert found is not None
    assert (found.exists, found.budget_bytes, found.fault) == (True, 5000, None)
    assert found.punches_holes is not None
    assert found.disk_bytes == shutil.disk_usage(tmp_path).total
    assert list(tmp_path.iterdir()) == []


def test_folder_that_will_be_made_is_judged_by_its_parent(tmp_path: Path) -> None:
    found = check_ssd(TierOptions(dir=tmp_path / "a" / "b"))
    assert found is not None
    assert (found.exists, found.fault) == (False, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/forebay"])
def test_folder_that_cannot_be_used_is_a_fault(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    found = check_ssd(TierOptions(dir=tmp_path / name))
    assert found is not None and found.fault is not None
    assert "cannot be written" in found.fault and "--cache-dir none" in found.fault


def test_full_disk_is_a_note(tmp_path: Path) -> None:
    found = check_ssd(TierOptions(dir=tmp_path, ssd_free_bytes=1 << 60))
    assert found is not None and found.fault is None
    assert any("nothing is written until there is more" in note for note in found.notes)


def test_budget_is_a_tenth_of_the_disk_within_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ssd_budget(tmp_path / "not" / "there", 77) == 77
    assert ssd_budget(tmp_path / "not" / "there", None) == min(shutil.disk_usage(tmp_path).total // 10, MOST_BUDGET)
    huge = shutil.disk_usage(tmp_path)._replace(total=1 << 50)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: huge)
    assert ssd_budget(tmp_path, None) == 256 << 30


def test_embedded_redis_is_started_asked_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EmbeddedRedis] = []
    start = EmbeddedRedis.start

    def remember(maxmemory_bytes: int | None = None) -> EmbeddedRedis:
        started.append(start(maxmemory_bytes))
        return started[-1]

    monkeypatch.setattr(EmbeddedRedis, "start", remember)
    found = check_redis(TierOptions(redis_url="embedded", swa_bytes=123 << 20))
    assert found is not None
    assert found.server is not None and found.server.startswith("valkey ")
    assert (found.where, found.maxmemory, found.policy, found.fault, found.notes) == ("embedded", 123 << 20, "volatile-ttl", None, ())
    assert len(started) == 1
    assert not Path(f"/proc/{started[0].pid}").exists()


def test_missing_server_program_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(maxmemory_bytes: int | None = None) -> EmbeddedRedis:
        raise ConfigError("no server program; install one")

    monkeypatch.setattr(EmbeddedRedis, "start", missing)
    found = check_redis(TierOptions(redis_url="embedded"))
    assert found is not None and found.fault == "no server program; install one"


def test_redis_that_does_not_answer_is_a_note() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        found = check_redis(TierOptions(redis_url=f"redis://me:secret@127.0.0.1:{taken.getsockname()[1]}/3"))
    assert found is not None
    assert (found.server, found.fault) == (None, None)
    assert "windows are replayed" in found.notes[0]
    assert found.silence == "does not answer: Connection refused"
    assert "secret" not in repr(found)


def test_redis_that_says_nothing_is_given_up() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        began = time.monotonic()
        found = check_redis(TierOptions(redis_url=f"redis://127.0.0.1:{mute.getsockname()[1]}"), timeout_s=0.1)
    assert time.monotonic() - began < 1.5
    assert found is not None and found.silence is not None and found.silence.startswith("does not answer: ")


@pytest.mark.case("B040")
def test_wrong_password_is_a_note_without_it() -> None:
    server = EmbeddedRedis.start(16 << 20)
    try:
        found = check_redis(TierOptions(redis_url=f"redis://:secret@127.0.0.1:{server.port}"))
        right = check_redis(TierOptions(redis_url=server.url))
    finally:
        server.stop()
    assert found is not None and found.server is None
    assert "windows are replayed" in found.notes[0]
    assert found.silence is not None and found.silence.startswith("refuses: ")
    assert "secret" not in repr(found)
    assert right is not None and right.maxmemory == 16 << 20 and right.notes == () and right.silence is None
    assert server.url not in repr(right)


def test_url_that_nobody_can_read_is_a_fault() -> None:
    found = check_redis(TierOptions(redis_url="redis://host:port"))
    assert found is not None and found.fault is not None


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({}, None),
        ({"redis_version": "6.2.0"}, None),
        ({"redis_version": "6.0.16"}, "too old for snapshots, which need 6.2"),
        ({"redis_version": "10.0.1"}, None),
        ({"maxmemory": 0}, "its memory has no limit"),
        ({"maxmemory_policy": "noeviction"}, "takes no snapshots when it is full"),
        ({"maxmemory_policy": "allkeys-lru"}, None),
        ({"role": "slave"}, "it is a replica"),
        ({"cluster_enabled": 1}, "a node of a cluster, but cache.redis_cluster is false"),
    ],
)
def test_what_a_server_says_about_itself(fields: dict[str, Any], note: str | None) -> None:
    notes = judge("redis://h", GOOD | fields, cluster=False).notes
    assert [note is not None and note in found for found in notes] == ([True] if note else [])


def test_single_server_is_no_cluster() -> None:
    assert "no cluster, but cache.redis_cluster is true" in judge("redis://h", GOOD, cluster=True).notes[0]
    assert judge("redis://h", GOOD | {"cluster_enabled": 1}, cluster=True).notes == ()


def test_name_is_the_servers_own() -> None:
    assert judge("redis://h", GOOD, cluster=False).server == "redis 7.2.4"
    assert judge("redis://h", GOOD | {"valkey_version": "9.1.2"}, cluster=False).server == "valkey 9.1.2"


def test_a_way_that_cannot_be_looked_at_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot be used: File name too long; choose another --cache-dir"):
        ssd_budget(Path("/tmp", "x" * 300, "kv"), None)
