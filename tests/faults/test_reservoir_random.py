"""10,000 random operations against the tiers, with every fault there is, held against a model of what may be returned.

The store and the snapshot pool live in a process of their own (tests/tier_process.py), which is killed without warning now and then;
files are damaged from outside; the Redis is a real one that is flushed, paused, killed and started again. The model knows what was ever
put under which identity and key, and how late it may still be returned. Nothing else may come back; what was acknowledged, and touched by
no fault, must. A second part does the same to whole engines, whose blocks hold the tokens themselves.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from blake3 import blake3
from prometheus_client import CollectorRegistry

from engines import WINDOW, Memo, MemoRunner, _memo_parts, assert_idle, continuation, greedy, short
from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.manager import CacheManager
from forebay.cache.prefix import KeyChain, root_key
from forebay.cache.records import tenant_id
from forebay.cache.windows import WindowPool
from forebay.engine.batcher import Row
from forebay.engine.launch import open_tiers
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.tiers import TierOptions
from forebay.engine.worker import Engine
from redis_servers import Server, until
from tier_process import SNAPSHOT_TTL_S, TTL_S, Nursery, Settings, TierProcess, block_bytes, window_rows

DEFAULT_SEED = 20_261_129  # RESERVOIR_SEED=n runs another one; what happens in a run depends on its timing as well
OPERATIONS = 10_000
IDENTITIES = ("model A layout 1", "model A layout 2")
TENANTS = ("alice", "bob", "")
Clock = Callable[[], float]
SLACK_S = 61.0  # by which the store may prolong a life (a hit is not renewed within a minute of the last)
BUDGET = 64 << 20
TINY_BUDGET = 300_000
PROMPTLY_S = 2.0  # a request never waits longer for Redis, whose deadline is 0.05 s; this machine may be busy


class Model:
    """What may, and what must, be returned.

    Attributes:
        put: lineages ever put, by identity and key. Bytes follow from identity, key and lineage.
        used: latest possible last use.
        sure: blocks that are acknowledged and undamaged, with the time of their last use.
        gone: dropped blocks, and expired ones that were reaped; `buried` are those of them whose records are destroyed.
        suspect: blocks whose record may be damaged without anybody knowing yet: a put would only renew it.
    """

    def __init__(self) -> None:
        self.put: dict[tuple[str, bytes], set[int]] = {}
        self.used: dict[tuple[str, bytes], float] = {}
        self.sure: dict[tuple[str, bytes], float] = {}
        self.gone: set[tuple[str, bytes]] = set()
        self.buried: set[tuple[str, bytes]] = set()
        self.suspect: set[tuple[str, bytes]] = set()
        self.windows: dict[tuple[str, bytes], set[tuple[int, bool]]] = {}
        self.windows_used: dict[tuple[str, bytes], float] = {}


class Chaos:
    def __init__(self, folder: Path, server: Server, nursery: Nursery, seed: int) -> None:
        self.n = random.Random(seed)
        self.folder, self.server, self.nursery = folder, server, nursery
        self.model, self.seen = Model(), Counter[str]()
        self.trail: deque[str] = deque(maxlen=30)
        self.spent: Counter[str] = Counter()
        self.now = 1_800_000_000.0
        self.budget = BUDGET
        self.full = self.broken = self.paused = False
        self.unsettled: dict[tuple[str, bytes], float] = {}  # accepted and not yet known to be written, and when
        self.unsettled_drops: set[tuple[str, bytes]] = set()
        self.writers: dict[bytes, set[str]] = {}  # under which identities a key was put since everything was written
        self.begun: list[list[tuple[str, bytes]]] = []  # blocks of fetches that were begun
        self.rebuilding = False
        self.recent: deque[tuple[str, bytes]] = deque(maxlen=8)  # windows put lately
        self.chains = [self._chain(number, tenant) for number in range(14) for tenant in TENANTS]
        self.process = self._start()

    def _chain(self, number: int, tenant: str) -> tuple[str, list[bytes]]:
        """Histories that share beginnings: those of equal number // 3 their first blocks."""
        tokens = [(number // 3 * 100 + i if i < 14 else number * 1000 + i) for i in range(random.Random(number).randrange(8, 44))]
        chain = KeyChain(root_key("model", "layout", tenant), 4)
        chain.extend(tokens)
        return tenant, chain.keys

    def _start(self) -> TierProcess:
        process = self.nursery.child(Settings(self.folder, self.server.url, IDENTITIES, self.budget, self.now))
        process("open")
        return process

    def run(self, count: int) -> None:
        operations = {
            self.put: 26, self.get: 26, self.touch: 3, self.drop: 1.2, self.begin: 2, self.cancel: 2, self.flush: 3, self.advance: 3,
            self.put_window: 9, self.get_window: 11, self.reap: 0.4, self.crash: 1, self.crash_while_writing: 0.6, self.restart: 0.5,
            self.corrupt: 1.2, self.truncate: 0.4, self.delete: 0.4, self.lose_index: 0.12, self.damage_index: 0.12, self.litter: 0.4,
            self.fill_disk: 0.4, self.break_disk: 0.4, self.shrink: 0.15, self.flush_redis: 0.5, self.kill_redis: 0.3,
            self.pause_redis: 0.4, self.damage_window: 1, self.leaks: 0.7,
        }  # fmt: skip
        for number, operation in enumerate(self.n.choices(list(operations), list(operations.values()), k=count)):
            self.seen[operation.__name__] += 1
            self.trail.append(f"{number} {operation.__name__}")
            began = time.monotonic()
            operation()
            self.spent[operation.__name__] += time.monotonic() - began
        self.epilogue()

    # What requests do

    def put(self) -> None:
        identity, tenant, keys = self._pick()
        first = self.n.randrange(len(keys)) if self.n.random() < 0.3 else 0
        lineage = self.n.choice((0, 0, 0, 1, 2))
        blocks = [(key, depth, lineage) for depth, key in enumerate(keys) if depth >= first]
        accepted = self.process("put", identity, tenant_id(tenant), blocks)
        for key, _, lineage in blocks[:accepted]:
            self._put((identity, key), lineage)
        if self.n.random() < 0.4:
            self.flush()

    def get(self) -> None:
        identity, _, keys = self._pick()
        most = self.n.choice((None, None, None, 0, 1))
        lineages, got = self.process("get", identity, keys, most)
        assert len(got) <= len(lineages) <= len(keys)
        for key, lineage, data in zip(keys, lineages, got, strict=False):
            name = identity, key
            assert most is None or lineage <= most
            versions = self.model.put.get(name, set())
            assert lineage in versions, "the store knows a block that was never put"
            # Between lookup and read a better version may have taken its place.
            assert any(data == block_bytes(identity, key, version).tobytes() for version in versions if version <= lineage), "wrong bytes"
            assert name not in self.model.gone, "a dropped block, or one that had expired, came back"
            assert self.now <= self.model.used[name] + TTL_S + SLACK_S, "an expired block was returned"
            self._use(name)
        self.seen["blocks got"] += len(got)
        self._must_have(identity, keys, got, most)
        if not self.broken and not self.rebuilding:
            # These were sound, and the next one, if it was damaged, is deleted now.
            self.model.suspect.difference_update((identity, key) for key in keys[: len(got) + 1])
        for key in keys[len(got) : len(got) + 1]:
            self.unsettled.pop((identity, key), None)  # if it was put, then perhaps before this

    def _must_have(self, identity: str, keys: Sequence[bytes], got: Sequence[bytes], most: int | None) -> None:
        if most is not None or self.broken:
            return
        for place, key in enumerate(keys):
            used = self.model.sure.get((identity, key))
            if used is None or self.now > used + TTL_S:
                return
            assert place < len(got), f"an acknowledged block is missing: {place} of {len(keys)}"
            self.seen["sure blocks"] += 1

    def touch(self) -> None:
        identity, _, keys = self._pick()
        for key in self.process("touch", identity, keys):
            assert any(key == known for _, chain in self.chains for known in chain)
        for key in keys:
            self._use((identity, key))

    def drop(self) -> None:
        identity, _, keys = self._pick()
        keys = keys[self.n.randrange(len(keys)) :]
        self.process("drop", identity, keys)
        for key in keys:
            if not self.rebuilding:  # what is read back from its record after that is back
                self.model.gone.add((identity, key))
                self.unsettled_drops.add((identity, key))
            for either in IDENTITIES:
                self.model.sure.pop((either, key), None)
                self.unsettled.pop((either, key), None)

    def begin(self) -> None:
        identity, _, keys = self._pick()
        self.process("begin", identity, keys)
        self.begun.append([(identity, key) for key in keys])
        self._use_begun()

    def cancel(self) -> None:
        self._use_begun()
        number = self.n.randrange(100)
        self.process("cancel", number)
        if self.begun:
            self.begun.pop(number % len(self.begun))

    def flush(self) -> None:
        """What was accepted is written now, unless something was in its way."""
        assert self.process("flush"), "the writer stands still"
        self._use_rebuilt()
        if not self.full and self.budget == BUDGET and self.process("stats")["admitting"]:
            self._settle()
        self.unsettled.clear()
        self.unsettled_drops.clear()
        self.writers.clear()

    def put_window(self) -> None:
        identity, _, keys = self._pick()
        key, lineage, decoder = self.n.choice(keys[-2:]), self.n.choice((0, 1)), self.n.random() < 0.5
        began = time.monotonic()
        if self.process("put_window", identity, key, lineage, decoder):
            self.model.windows.setdefault((identity, key), set()).add((lineage, decoder))
            self.model.windows_used[identity, key] = self.now
            self.recent.append((identity, key))
        assert time.monotonic() - began < PROMPTLY_S

    def get_window(self) -> None:
        identity, _, keys = self._pick()
        asked = self.n.sample(keys[-3:], min(2, len(keys)))
        if self.recent and self.n.random() < 0.5:
            identity, key = self.n.choice(self.recent)
            asked = [*asked[:1], key]
        began = time.monotonic()
        found = self.process("get_window", identity, asked)
        assert time.monotonic() - began < PROMPTLY_S, "a request waited for Redis"
        if found is None:
            return
        key, lineage, encoder, decoder = found
        assert key in asked
        assert (lineage, decoder is not None) in self.model.windows.get((identity, key), set()), "a window that was never put"
        assert encoder == window_rows(identity, key, lineage, "encoder").tobytes(), "wrong rows"
        assert decoder is None or decoder == window_rows(identity, key, lineage, "decoder").tobytes(), "wrong rows"
        assert self.now < self.model.windows_used[identity, key] + SNAPSHOT_TTL_S, "an expired window was returned"
        self.model.windows_used[identity, key] = self.now
        self.seen["windows got"] += 1

    def advance(self) -> None:
        self._use_begun()
        self._use_rebuilt()
        steps = (1.0, 40.0, 200.0, 700.0, 40 * 3600.0, 71 * 3600.0, 73 * 3600.0)
        self.now += self.n.choices(steps, (30, 30, 30, 6, 4, 4, 5))[0]
        self.process("clock", self.now)
        self._use_begun()
        self._use_rebuilt()

    def reap(self) -> None:
        """From now on nothing of what is expired or dropped may come back, not even from the records."""
        self.flush()
        self.process("reap")
        self._use_rebuilt()
        self.model.gone.update(name for name, used in self.model.used.items() if self.now > used + TTL_S + SLACK_S)
        self.model.buried.update(self.model.gone)

    # What goes wrong

    def crash(self) -> None:
        """kill -9 between two operations."""
        self.process.kill()
        self._recover()

    def crash_while_writing(self) -> None:
        """kill -9 somewhere in the work of a put."""
        identity, tenant, keys = self._pick()
        blocks = [(key, depth, 0) for depth, key in enumerate(keys)]
        self.process.ask("put", identity, tenant_id(tenant), blocks)
        self.process.ask("flush")
        for key in keys:
            self._put((identity, key), 0)
        time.sleep(self.n.random() * 0.004)  # the fault itself: at any moment
        self.process.kill()
        self._recover()

    def restart(self) -> None:
        """A clean stop writes what is queued and leaves nothing behind."""
        settled = not self.full and self.budget == BUDGET and self.process("stats")["admitting"]
        left = self.process("close")
        assert left == []
        self.process.end()
        if settled:
            self._settle()
            self.unsettled_drops.clear()
        self._recover()

    def corrupt(self) -> None:
        """One bit, anywhere in a file."""
        with self._some_segment() as path:
            at = self.n.randrange(path.stat().st_size or 1)
            self._damaged(path, at, at + 1)
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)  # empty: the store cut the file's unused end off meanwhile
                bit = 1 << self.n.randrange(8)
                if byte:
                    file.seek(at)
                    file.write(bytes([byte[0] ^ bit]))

    def truncate(self) -> None:
        with self._some_segment() as path:
            size = path.stat().st_size
            cut = self.n.randrange(size or 1)
            self._damaged(path, cut, size)
            os.truncate(path, cut)

    def delete(self) -> None:
        with self._some_segment() as path:
            self._damaged(path, 0, 1 << 62)
            path.unlink()

    def _damaged(self, path: Path, low: int, high: int) -> None:
        """[low, high) of a segment is about to be damaged: blocks that lie there need not come back."""
        with suppress(sqlite3.Error):
            db = sqlite3.connect(f"file:{self.folder / 'index.sqlite'}?mode=ro", uri=True)
            rows = db.execute(
                "SELECT key FROM blocks JOIN segments ON segments.id = segment WHERE name = ? AND offset < ? AND offset + 8192 > ?",
                (path.name, high, low),
            ).fetchall()
            db.close()
            for (key,) in rows:
                for identity in IDENTITIES:
                    self.model.sure.pop((identity, key), None)
                    self.model.suspect.add((identity, key))
            for name in self.unsettled:  # these may be written there just now
                self.model.suspect.add(name)
            self.unsettled.clear()
            return
        self._unsure()

    def lose_index(self) -> None:
        """Under the running process or while it is down."""
        self._unsure(index_lost=True)
        self._maybe_down(lambda: [path.unlink(missing_ok=True) for path in self.folder.glob("index.sqlite*")])

    def damage_index(self) -> None:
        """Only while it is down: sqlite promises nothing about pages that change under it."""
        self._unsure(index_lost=True)
        self.process.kill()
        path = self.folder / "index.sqlite"
        match self.n.randrange(3):
            case 0:
                with open(path, "r+b") as file:
                    file.write(self.n.randbytes(200))
            case 1:
                path.write_bytes(b"")
            case 2:
                os.truncate(path, 4096)
        self._recover()

    def litter(self) -> None:
        """Files that do not belong there."""
        name = self.n.choice(("segments/x.tmp", "segments/0000000000000000-deadbeef.seg", "segments/y.part"))
        (self.folder / name).write_bytes(self.n.randbytes(self.n.randrange(9000)))

    def fill_disk(self) -> None:
        """For some operations every write fails."""
        self.full = True
        self.process("full", True)
        self._requests()
        self.unsettled.clear()
        self.full = False
        self.process("full", False)

    def break_disk(self) -> None:
        """For some operations every read fails."""
        self.broken = True
        self.process("broken", True)
        self._requests()
        self._use_begun()
        self.broken = False
        self.process("broken", False)

    def shrink(self) -> None:
        """The budget is tiny for some operations."""
        for budget in (TINY_BUDGET, BUDGET):
            self.budget = budget
            self.model.sure.clear()
            self.process.kill()
            self._recover()
            if budget == TINY_BUDGET:
                self._requests()
                assert self.process("flush")
                self._requests()

    def _requests(self) -> None:
        for _ in range(self.n.randrange(1, 6)):
            self.put()
            self.get()
            self.get_window()

    def flush_redis(self) -> None:
        if not self.paused:
            with self._client() as client:
                client.flushall()

    def kill_redis(self) -> None:
        """And bring it back, empty, some operations later."""
        self.server.kill()
        self.paused = False
        for _ in range(self.n.randrange(3)):
            self.get_window()
            self.put_window()
        self.server.start()

    def pause_redis(self) -> None:
        self.server.signal(signal.SIGSTOP)
        try:
            for _ in range(self.n.randrange(1, 4)):
                self.get_window()
                self.put_window()
                self.get()
        finally:
            self.server.signal(signal.SIGCONT)

    def damage_window(self) -> None:
        """A bit, a cut, or another one's value."""
        with self._client() as client:
            keys = sorted(client.scan_iter())
            if not keys:
                return
            key = self.n.choice(keys)
            value = client.get(key) or b"\0"
            match self.n.randrange(3):
                case 0:
                    at = self.n.randrange(len(value))
                    value = value[:at] + bytes([value[at] ^ 1 << self.n.randrange(8)]) + value[at + 1 :]
                case 1:
                    value = value[: self.n.randrange(len(value))]
                case 2:
                    value = client.get(self.n.choice(keys)) or b""
            client.set(key, value, px=100_000)

    def leaks(self) -> None:
        self._use_begun()
        self.begun.clear()  # they are cancelled
        assert self.process("leaks") == []

    def epilogue(self) -> None:
        """All faults are over: everything works again, and nothing is left at the end."""
        self.process.kill()
        self._recover()
        until(lambda: not self.process("stats")["rebuilding"])
        until(lambda: set(self.process("breakers")) == {"closed"})
        for identity in IDENTITIES:
            for tenant, keys in self.chains:
                self._heal(identity, tenant, keys)
                # A Redis that is well may still answer too late for the reservoir's patience on a machine that is busy.
                until(lambda i=identity, k=keys: self._keeps_window(i, k))  # type: ignore[misc]
                found = self.process("get_window", identity, keys[-1:])
                assert found is not None
                assert found[2] == window_rows(identity, keys[-1], 0, "encoder").tobytes()
        assert self.process("close") == []
        self.process.end()
        self._check_index()

    def _keeps_window(self, identity: str, keys: list[bytes]) -> bool:
        kept = self.process("put_window", identity, keys[-1], 0, True) and self.process("flush_windows")
        return bool(kept) and self.process("get_window", identity, keys[-1:]) is not None

    def _heal(self, identity: str, tenant: str, keys: list[bytes]) -> None:
        """As requests do: what is not there, or turns out to be damaged, is put again, until all of it is there."""
        blocks = [(key, depth, 0) for depth, key in enumerate(keys)]
        for _ in range(len(keys) + 1):
            assert self.process("put", identity, tenant_id(tenant), blocks) == len(keys)
            for key in keys:
                self._put((identity, key), 0)
            assert self.process("flush")
            lineages, got = self.process("get", identity, keys, None)
            assert got == [block_bytes(identity, key, 0).tobytes() for key in keys[: len(got)]]
            if len(got) == len(keys):
                assert lineages == [0] * len(keys)
                return
        raise AssertionError("blocks are put and do not come back")

    # Help

    def _pick(self) -> tuple[str, str, list[bytes]]:
        identity = self.n.choice(IDENTITIES)
        tenant, keys = self.n.choice(self.chains)
        return identity, tenant, keys

    def _use(self, name: tuple[str, bytes]) -> None:
        for identity in IDENTITIES:  # a touch does not ask whose record it is; keys of different models differ, except here
            self.model.used[identity, name[1]] = self.now

    def _use_begun(self) -> None:
        """What is read counts as used, and it may be read at any moment."""
        for names in self.begun:
            for name in names:
                self._use(name)

    def _use_rebuilt(self) -> None:
        """Blocks read back from their records count as used then, and that may be at any moment until it is done."""
        if self.rebuilding:
            for name in self.model.put:
                self._use(name)
            self.rebuilding = self.process("stats")["rebuilding"]

    def _put(self, name: tuple[str, bytes], lineage: int) -> None:
        self.model.put.setdefault(name, set()).add(lineage)
        self._use(name)
        self.model.gone.discard(name)
        self.model.buried.discard(name)
        rivals = [(other, name[1]) for other in IDENTITIES if other != name[0]]
        # One key, one record. Which of two is written last is open until both are, for they have different writers.
        self.writers.setdefault(name[1], set()).add(name[0])
        if len(self.writers[name[1]]) > 1:
            self.unsettled.pop(name, None)
        else:
            self.unsettled[name] = self.now
        for rival in rivals:
            self.model.sure.pop(rival, None)
            self.unsettled.pop(rival, None)

    def _settle(self) -> None:
        """What was accepted is acknowledged now. While records are read back, an older one may still take its place."""
        if not self.rebuilding:
            self.model.sure.update({name: at for name, at in self.unsettled.items() if name not in self.model.suspect})

    def _unsure(self, index_lost: bool = False) -> None:
        """Something was damaged: nothing has to be there any more."""
        self.model.sure.clear()
        self.unsettled.clear()
        self.model.suspect.update(self.model.put)
        if index_lost:
            self.rebuilding = True
            for name in self.model.put:
                self._use(name)
            self.model.gone &= self.model.buried

    def _recover(self) -> None:
        """After the process has ended. What was not acknowledged may or may not be there; a drop nobody waited for may be lost."""
        self.unsettled.clear()
        self.model.gone -= self.unsettled_drops
        self.unsettled_drops.clear()
        self.writers.clear()
        self.full = self.broken = False
        self._use_begun()
        self.begun.clear()
        self.process = self._start()

    def _maybe_down(self, fault: Any) -> None:
        if self.n.random() < 0.5:
            fault()
            return
        self.process.kill()
        fault()
        self._recover()

    @contextmanager
    def _some_segment(self) -> Iterator[Path]:
        """A segment with something in it; its damage is none if there is no such file, or no longer."""
        self.flush()
        files = []
        for path in sorted((self.folder / "segments").glob("*.seg")):
            with suppress(FileNotFoundError):
                files += [path] * (path.stat().st_size > 0)
        with suppress(FileNotFoundError):
            yield self.n.choice(files or [self.folder / "none"])

    def _client(self) -> Any:
        return redis.Redis.from_url(self.server.url, socket_timeout=5)

    def _check_index(self) -> None:
        """Counts that triggers keep agree with what they count, and every block lies in a file."""
        db = sqlite3.connect(self.folder / "index.sqlite")
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        live = dict(db.execute("SELECT segment, count(*) FROM blocks GROUP BY segment").fetchall())
        segments = db.execute("SELECT id, name, live FROM segments").fetchall()
        assert {number: count for number, _, count in segments if count} == live
        for _, name, count in segments:
            assert not count or (self.folder / "segments" / name).exists()
        assert dict(db.execute("SELECT min(lineage, 8), count(*) FROM blocks GROUP BY 1").fetchall()).items() <= dict(
            db.execute("SELECT lineage, blocks FROM lineages").fetchall()
        ).items()
        db.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.case("B028", "B035", "B037")
def test_ten_thousand_random_operations(tmp_path: Path, nursery: Nursery) -> None:
    seed = int(os.environ.get("RESERVOIR_SEED", DEFAULT_SEED))
    print(f"RESERVOIR_SEED={seed}")  # shown when the test fails
    with Server() as server:
        chaos = Chaos(tmp_path / "kv", server, nursery, seed)
        try:
            chaos.run(OPERATIONS)
        finally:
            print("the last operations:", ", ".join(chaos.trail))
    print(sorted(chaos.seen.items()))
    assert chaos.seen["blocks got"] > 1_000
    assert chaos.seen["sure blocks"] > 500
    assert chaos.seen["windows got"] > 100


# Whole engines


class TieredRunner(MemoRunner):
    """MEMO's runner, which also takes the copies of windows that are kept for later."""

    def _write(self, row: Row) -> None:
        captures = self._captures(row)
        super()._write(row)
        for capture in captures:
            for place in range(max(row.start, capture.boundary - WINDOW), capture.boundary):
                capture.codes[:, place % WINDOW, 0] = row.sequence.tokens[place] % 251


class TieredMemo(Memo):
    """MEMO with an SSD store and a snapshot pool."""

    def __init__(self, tiers: TierOptions, clock: Clock, fingerprint: str, **options: Any) -> None:
        chosen = EngineOptions(**{"max_sequences": 6, "kv_tokens": 40 * WINDOW, "encoder_tokens": 48, **options})
        config, tokenizer, codec = _memo_parts(256)
        layout = KVLayout.of(config)
        blocks = BlockPool(layout, layout.blocks_for(chosen.kv_tokens or 0) + 1)
        windows = WindowPool(layout, config, chosen.max_sequences + 1)
        self.manager = CacheManager(layout, blocks, windows, fingerprint, poison=True)
        self.reservoir = open_tiers(self.manager, tiers, "cpu", clock)
        assert self.reservoir is not None
        self.runner = TieredRunner(config, blocks, windows)
        self.metrics = Metrics(CollectorRegistry(), ssd=True)
        self.engine = Engine(self.runner, self.manager, tokenizer, chosen, self.metrics, codec=codec, reservoir=self.reservoir)
        self.scheduler = self.engine.scheduler
        self.events = {}
        self.engine.sink = self._collect

    def step(self) -> int:
        self.engine.wake.clear()
        rows = super().step()
        if not rows and self.engine.busy:
            self.engine.wake.wait(0.002)
        return rows


class EngineChaos:
    """Requests of three tenants to an engine whose tiers are damaged all the time; blocks hold the tokens, so MEMO sees a wrong byte."""

    def __init__(self, folder: Path, server: Server, seed: int) -> None:
        self.n = random.Random(seed)
        self.folder, self.server = folder, server
        self.now = 1_800_000_000.0
        self.seen = Counter[str]()
        self.fingerprint = "memo"
        self.running: dict[str, tuple[str, list[int], int]] = {}  # id -> salt, prompt, tokens wanted
        self.known: set[tuple[str, str, bytes]] = set()  # fingerprint, salt, history: what may be found
        self.memo = self._start()

    def _start(self, budget: int = 1 << 30) -> TieredMemo:
        block = KVLayout.of(_memo_parts(256)[0]).block_bytes
        tiers = TierOptions(
            dir=self.folder, ssd_bytes=budget, ssd_free_bytes=0, staging_bytes=6 * block, redis_url=self.server.url,
            swa_ttl_s=SNAPSHOT_TTL_S,
        )  # fmt: skip
        return TieredMemo(tiers, lambda: self.now, self.fingerprint)

    def run(self, count: int) -> None:
        operations = {
            self.request: 40, self.steps: 60, self.abort: 2, self.forget: 2, self.advance: 3, self.damage: 4, self.lose_index: 0.3,
            self.flush_redis: 2, self.kill_redis: 0.5, self.pause_redis: 0.7, self.restart: 2.5,
        }  # fmt: skip
        for operation in self.n.choices(list(operations), list(operations.values()), k=count):
            self.seen[operation.__name__] += 1
            operation()
        self._stop()

    def request(self) -> None:
        if len(self.running) >= 9:
            return
        ids, salt = short(self.n.randrange(1, 90), self.n.randrange(5)), self.n.choice(TENANTS)
        ids += [8 + self.n.randrange(200) for _ in range(self.n.randrange(8))]
        wanted = self.n.randrange(1, 20)
        replay, most = self.n.choice((None, "exact")), self.n.choice((None, None, 0))
        name = self.memo.add(ids, greedy(wanted), salt=salt, replay=replay, max_lineage=most)
        self.running[name] = salt, ids, wanted

    def steps(self) -> None:
        for _ in range(self.n.randrange(1, 6)):
            self.memo.step()
        self._collect()

    def abort(self) -> None:
        if self.running:
            name = self.n.choice(list(self.running))
            self.memo.engine.abort(name)
            salt, ids, _ = self.running.pop(name)
            self._remember(name, ids, salt)

    def forget(self) -> None:
        """Everything on the device."""
        self.memo.manager.clear()

    def advance(self) -> None:
        self.now += self.n.choice((10.0, 100.0, 700.0, 71 * 3600.0, 73 * 3600.0))

    def damage(self) -> None:
        """A file is cut, deleted, or has a flipped bit."""
        files = sorted((self.folder / "segments").glob("*.seg"))
        if not files:
            return
        path = self.n.choice(files)
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            match self.n.randrange(4):
                case 0:
                    path.unlink()
                case 1:
                    os.truncate(path, self.n.randrange(size + 1))
                case _ if size:
                    with open(path, "r+b") as file:
                        file.seek(at := self.n.randrange(size))
                        byte = file.read(1) or b"\0"
                        file.seek(at)
                        file.write(bytes([byte[0] ^ 1 << self.n.randrange(8)]))

    def lose_index(self) -> None:
        for path in self.folder.glob("index.sqlite*"):
            path.unlink(missing_ok=True)

    def flush_redis(self) -> None:
        with redis.Redis.from_url(self.server.url, socket_timeout=5) as client:
            client.flushall()

    def kill_redis(self) -> None:
        self.server.kill()
        for _ in range(3):
            self.request()
            self.steps()
        self.server.start()

    def pause_redis(self) -> None:
        self.server.signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                self.request()
                self.steps()
        finally:
            self.server.signal(signal.SIGCONT)

    def restart(self) -> None:
        """Perhaps as another model, or with hardly any disk."""
        self._stop()
        self.fingerprint = self.n.choice(("memo", "memo", "other memo"))
        self.memo = self._start(self.n.choice((1 << 30, 1 << 30, 200_000)))

    def _stop(self) -> None:
        self.memo.finish()
        self._collect()
        assert not self.running
        assert_idle(self.memo.engine)
        reservoir = self.memo.reservoir
        assert reservoir is not None and reservoir.store is not None
        rows = reservoir.store._readers
        until(lambda: rows.rows_free() == len(rows._staging))
        assert not rows._loads and not rows._fetches and not rows._waiting_rows
        assert not reservoir.live
        self.memo.engine.close()

    def _collect(self) -> None:
        for name in list(self.running):
            events = self.memo.events.get(name, [])
            if not events or events[-1].finish_reason is None:
                continue
            salt, ids, wanted = self.running.pop(name)
            last = self.memo.last(name)
            assert last.error is None
            assert self.memo.tokens(name) == continuation(ids, wanted), "a wrong answer"
            tiers = last.tiers
            assert tiers is not None
            assert tiers.hbm + tiers.ssd + tiers.compute == len(ids)
            self.seen["hbm"] += tiers.hbm
            self.seen["ssd"] += tiers.ssd
            self.seen[f"window {tiers.window}"] += 1
            self._may_know(salt, ids, tiers.cached)
            self._remember(name, ids, salt)

    def _may_know(self, salt: str, ids: list[int], cached: int) -> None:
        """Only what this tenant has computed with this model, now or before, or computes in a request beside it."""
        others = [ids for other, ids, _ in self.running.values() if other == salt]
        beside = any(len(other) >= cached and other[:cached] == ids[:cached] for other in others)
        assert not cached or beside or (self.fingerprint, salt, _digest(ids[:cached])) in self.known, "a hit across tenants or models"

    def _remember(self, name: str, ids: list[int], salt: str) -> None:
        history = ids + self.memo.tokens(name)
        for end in range(WINDOW, len(history) + 1, WINDOW):
            self.known.add((self.fingerprint, salt, _digest(history[:end])))


def _digest(ids: Sequence[int]) -> bytes:
    return blake3(b"".join(i.to_bytes(4, "little") for i in ids)).digest()


@pytest.mark.slow
@pytest.mark.case("B028", "B037", "B040")
def test_engines_over_damaged_tiers(tmp_path: Path) -> None:
    seed = int(os.environ.get("RESERVOIR_SEED", DEFAULT_SEED))
    print(f"RESERVOIR_SEED={seed}")  # shown when the test fails
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with Server() as server:
        chaos = EngineChaos(tmp_path / "kv", server, seed)
        chaos.run(1_500)
    print(sorted(chaos.seen.items()))
    assert chaos.seen["ssd"] > 1_000 and chaos.seen["hbm"] > 1_000
    assert min(chaos.seen[f"window {origin}"] for origin in ("none", "swa", "replay")) > 10
    until(lambda: threading.active_count() <= threads)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
