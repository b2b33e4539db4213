"""Looking at, checking and purging a store, beside one that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.cache import ssd_admin
from forebay.cache.records import identity_digest
from forebay.cache.segments import scan
from forebay.model.errors import ConfigError
from ssd_stores import BLOCK, RECORD, Clock, chain, opened, put, read, segments

A, B = b"a" * 16, b"b" * 16


def test_stats_and_groups(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as store, opened(tmp_path, identity="other", clock=clock) as other:
        put(store, chain("a", 3), tenant=A)
        clock.now += 10
        put(store, chain("b", 2), tenant=A, lineage=2)
        put(store, chain("c", 4), tenant=B)
        put(other, chain("d", 1), tenant=A)
        summary = ssd_admin.stats(tmp_path)
        assert (summary["blocks"], summary["bytes"], summary["segments"], summary["complete"]) == (10, 10 * (RECORD + 256), 2, True)
        assert summary["segment_bytes"] == 10 * RECORD
        assert 0 < summary["index_bytes"] < 1 << 21
        groups = ssd_admin.ls(tmp_path)
        assert [(group["identity"], group["tenant"], group["blocks"]) for group in groups] == [
            (identity_digest("model").hex(), A.hex(), 5), (identity_digest("model").hex(), B.hex(), 4),
            (identity_digest("other").hex(), A.hex(), 1),
        ]  # fmt: skip
        assert groups[0]["lineages"] == {0: 3, 2: 2}
        assert (groups[0]["bytes"], groups[0]["newest_use"] - groups[0]["oldest_use"]) == (5 * BLOCK, 10)


def test_verify_finds_and_deletes_what_is_bad(tmp_path: Path) -> None:
    keys = chain("a", 30)
    steps: list[tuple[int, int]] = []
    with opened(tmp_path, segment_bytes=10 * RECORD) as store:
        put(store, keys)
        assert ssd_admin.verify(tmp_path)["sound"] == 30
        first, second, third = segments(tmp_path)
        data = bytearray(first.read_bytes())
        data[3 * RECORD + 4000] ^= 1
        data[4 * RECORD + 20] ^= 1
        first.write_bytes(data)
        second.unlink()
        with third.open("r+b") as file:
            file.truncate(9 * RECORD)
        report = ssd_admin.verify(tmp_path, lambda done, total: steps.append((done, total)))
        assert (report["blocks"], report["sound"], report["unreadable"]) == (30, 17, 0)
        assert report["bad"] == {"checksum": 1, "header": 1, "length": 1, "missing": 10, "identity": 0}
        assert steps[-1] == (30, 30)
        assert store.stats().blocks == 17
        assert ssd_admin.verify(tmp_path)["sound"] == 17


@pytest.mark.parametrize("tenant", [A, None])
def test_purged_bytes_are_gone(tmp_path: Path, tenant: bytes | None) -> None:
    a, b = chain("a", 20), chain("b", 10)
    with opened(tmp_path) as store:
        put(store, a[:10], tenant=A)
        put(store, b, tenant=B)
        put(store, a[10:], tenant=A, first=10)
        report = ssd_admin.purge(tmp_path, tenant)
        kept = 10 if tenant else 0
        assert report == {"blocks": 30 - kept, "bytes": (30 - kept) * BLOCK}
        assert store.lookup(a) == []
        assert read(store, b) == kept
        assert sum(path.stat().st_blocks * 512 for path in segments(tmp_path)) == kept * RECORD
        found = []
        for path in segments(tmp_path):
            with path.open("rb") as file:
                found += [header.key for _, header in scan(file.fileno())]
        assert found == b[:kept]
        put(store, a)
        assert read(store, a) == 20


def test_purge_works_without_an_index(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, chain("a", 5), tenant=A)
        put(store, chain("b", 5), tenant=B)
    (tmp_path / "index.sqlite").unlink()
    assert ssd_admin.purge(tmp_path, A)["blocks"] == 5
    assert ssd_admin.stats(tmp_path)["blocks"] == 5
    with opened(tmp_path) as store:
        assert store.lookup(chain("a", 5)) == []
        assert read(store, chain("b", 5)) == 5


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    for action in (ssd_admin.stats, ssd_admin.ls, ssd_admin.verify, ssd_admin.purge):
        with pytest.raises(ConfigError, match="is not an SSD cache"):
            action(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
