"""Random operations on two stores of one directory, against a model of what may be returned."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.cache import ssd_admin
from forebay.cache.ssd import SsdOptions, SsdStore, staging_bytes
from ssd_stores import BLOCK, RECORD, WAIT_S, Clock, chain, put, read, segments

CHAINS = [chain(f"model {i}", 12) for i in range(5)]
TENANTS = [bytes([i]) * 16 for i in range(5)]  # of each chain
TTL_S = 1000.0
BUDGET = 40  # blocks
a_chain = st.integers(0, len(CHAINS) - 1)
a_length = st.integers(1, 12)
a_store = st.integers(0, 1)


class Stores(RuleBasedStateMachine):
    """`stored` holds what must be found unless it was damaged or evicted: key -> (lineage, last use). Found blocks are always right."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-ssd-model"))
        self.clock = Clock()
        self.stored: dict[bytes, tuple[int, float]] = {}
        self.lossy = False  # something was damaged or evicted: blocks may be missing
        self.stores: list[SsdStore] = [self._open(), self._open()]

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    def _open(self) -> SsdStore:
        options = SsdOptions(self.folder, BUDGET * (RECORD + 256), free_bytes=0, ttl_s=TTL_S, segment_bytes=9 * RECORD, readers=2)
        return SsdStore(options, identity="m", block_bytes=BLOCK, staging=np.zeros(staging_bytes(6, BLOCK), np.uint8), clock=self.clock)

    def _alive(self, key: bytes) -> bool:
        return key in self.stored and self.stored[key][1] + TTL_S >= self.clock.now

    @rule(store=a_store, which=a_chain, length=a_length, lineage=st.integers(0, 3))
    def put(self, store: int, which: int, length: int, lineage: int) -> None:
        keys = CHAINS[which][:length]
        put(self.stores[store], keys, lineage=lineage, tenant=TENANTS[which])
        # What takes the place of a record needs room of its own before that one can go.
        written = sum(not self._possible(key) or self.stored[key][0] > lineage for key in keys)
        self.lossy |= len(self.stored) + written > BUDGET
        for key in keys:
            lineage_before = self.stored[key][0] if self._possible(key) else lineage
            self.stored[key] = min(lineage, lineage_before), self.clock.now
        self.lossy |= len(self.stored) > BUDGET

    @rule(store=a_store, which=a_chain, length=a_length)
    def fetch(self, store: int, which: int, length: int) -> None:
        keys = CHAINS[which][:length]
        lineages = self.stores[store].lookup(keys)
        got = read(self.stores[store], keys)  # checks the bytes
        assert self.stores[store].flush(WAIT_S)
        expected = next((i for i, key in enumerate(keys) if not self._alive(key)), len(keys))
        assert got <= len(lineages)
        if not self.lossy:
            assert got >= expected
        for key, lineage in zip(keys, lineages, strict=False):
            assert self._possible(key), "a block that was never stored, was purged or has expired"
            assert lineage >= self.stored[key][0]
        for key in keys[:got]:
            self.stored[key] = self.stored[key][0], self.clock.now

    def _possible(self, key: bytes) -> bool:
        return key in self.stored and self.stored[key][1] + TTL_S + TTL_S / 100 >= self.clock.now

    @rule(store=a_store, which=a_chain)
    def touch(self, store: int, which: int) -> None:
        self.stores[store].touch(CHAINS[which])
        assert self.stores[store].flush(WAIT_S)
        for key in CHAINS[which]:
            if self._alive(key):
                self.stored[key] = self.stored[key][0], self.clock.now
        missing = self.stores[store].take_missing()
        assert self.lossy or not any(self._alive(key) for key in missing)

    @rule(seconds=st.sampled_from([1.0, 60.0, 400.0, 995.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(store=a_store)
    def reap(self, store: int) -> None:
        self.stores[store].reap()
        for key in list(self.stored):
            if not self._possible(key):
                del self.stored[key]

    @rule(store=a_store)
    def restart(self, store: int) -> None:
        self.stores[store].close()
        self.stores[store] = self._open()

    @rule(store=a_store, which=a_chain, at=st.integers(0, 11))
    def drop(self, store: int, which: int, at: int) -> None:
        keys = CHAINS[which][at : at + 3]
        self.stores[store].drop(keys)
        for key in keys:
            self.stored.pop(key, None)
        assert self.stores[store].lookup(keys) == []
        assert self.stores[store].flush(WAIT_S)

    @rule(which=st.one_of(st.none(), a_chain))
    def purge(self, which: int | None) -> None:
        ssd_admin.purge(self.folder, None if which is None else TENANTS[which])
        for key in list(self.stored) if which is None else CHAINS[which]:
            self.stored.pop(key, None)

    @rule(number=st.integers(0, 9), part=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, number: int, part: float, kind: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the keeper unlinks empty segments when it likes
            files = segments(self.folder)
            if not files:
                return
            self.lossy = True
            path = files[number % len(files)]
            at = int(path.stat().st_size * part)
            if kind == "delete":
                path.unlink()
                return
            with path.open("r+b") as file:
                if kind == "cut":
                    file.truncate(at)
                else:
                    file.seek(at)
                    value = file.read(1)
                    file.seek(at)
                    file.write(bytes(byte ^ 1 for byte in value))

    @rule()
    def verify(self) -> None:
        report = ssd_admin.verify(self.folder)
        assert self.lossy or report["sound"] == report["blocks"]
        assert ssd_admin.verify(self.folder)["sound"] == report["sound"]

    @invariant()
    def budget(self) -> None:
        if hasattr(self, "stores"):
            stats = self.stores[0].stats()
            assert stats.bytes <= BUDGET * (RECORD + 256)
            assert stats.blocks == sum(stats.lineages.values()) <= BUDGET
            assert stats.io_errors["index"] == 0
            for store in self.stores:
                assert store._readers.rows_free() == 6


Stores.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
TestStores = pytest.mark.slow(Stores.TestCase)
