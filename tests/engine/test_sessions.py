"""A session of 4,000 tokens on NOISE, continued after everything that can happen to its cache (spec/model.md §12).

The first turn is served once. Every case gets a copy of the store it left and, where windows are to be there, the snapshots it left in
Redis, and continues with suffixes of several lengths. What is right: with a window, or with exact replay, the text of a cold run without
any cache; with bounded replay, the text of REF (tests/reference.py), which computes the same rows from the session's own entries.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.engine.types import Output, OutputEvent, Request, SamplingParams, TierCounts
from forebay.model.ops import formats
from forebay.model.source import resolve
from noise_model import noise_checkpoint
from redis_servers import Server, until
from reference import Memory, Reference, ReferenceWeights

WINDOW = 32  # tokens, and tokens of a block, of NOISE
PROMPT = 3_961  # of the first turn
OUTPUT = 50
SESSION = PROMPT + OUTPUT
HIT = (SESSION - 1) // WINDOW * WINDOW  # the last generated token was never computed
ANSWER = 8
HOUR = 3600.0

# New tokens of a next turn. A window at HIT is right for what is wanted of it (decoder rows from `anchor` on) only from EDGE on; below
# it, the resume begins one boundary earlier. EDGE also ends the prompt on a block boundary.
EDGE = HIT + WINDOW - SESSION
SUFFIXES = (EDGE - 1, EDGE, EDGE + WINDOW, 60)
REPLAYED = (1, EDGE, 60)  # those that are also held against REF

Clock = Callable[[], float]

CHILD = """
import json, os, sys
sys.path[:0] = json.loads(os.environ["PYTHONPATH_OF_TEST"])
import torch
torch.set_num_threads(1)
from pathlib import Path
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.engine.types import SamplingParams
job = json.loads(sys.stdin.readline())
llm = LLM(job["model"], kv_tokens=8192, tiers=TierOptions(dir=Path(job["dir"]), redis_url=job["redis"], redis_timeout_s=2.0))
def say(**what):
    print(json.dumps(what), flush=True)
say(pid=llm.engine.reservoir._embedded.pid if job["redis"] == "embedded" else 0)
if job["progress"]:
    inner = llm._step
    def step():
        inner()
        say(writes=llm.engine.reservoir.store.stats().writes)
    llm._step = step
out = llm.generate([job["ids"]], SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True))[0]
t = out.tiers
written = job["end"] == "wait" and llm.engine.reservoir.store.flush(20) and llm.engine.reservoir.pool.flush(20)
say(tokens=out.token_ids, text=out.text, hbm=t.hbm, ssd=t.ssd, compute=t.compute, window=t.window, replayed=t.replayed,
    lineage=t.lineage, written=bool(written))
if job["end"] == "wait":
    sys.stdin.readline()
llm.close()
"""


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def suffix(length: int) -> list[int]:
    """New tokens of a turn; suffixes of different lengths differ from their first token on."""
    return [100 + (length * 131 + i * i * 17 + i) % 3800 for i in range(length)]


def first_prompt() -> list[int]:
    return [64 + (i * i * 31 + i * 7) % 3900 for i in range(PROMPT)]


def open_llm(folder: Path, redis_url: str | None = "embedded", clock: Clock = time.time, **options: Any) -> LLM:
    """`redis_timeout_s`: generous, since this machine may be busy; cases about slow servers give their own."""
    timeout = options.pop("redis_timeout_s", 2.0)
    tiers = TierOptions(dir=folder, redis_url=redis_url, redis_timeout_s=timeout)
    return LLM(str(noise_checkpoint()), tiers=tiers, clock=clock, **{"kv_tokens": 8192, **options})


class Session:
    """The first turn: its tokens, what it left in store and Redis, and what each next turn must say."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._copies = folder, 0
        self._cold_llm = LLM(str(noise_checkpoint()), prefix_reuse=False, kv_tokens=8192)
        self._cold: dict[int, Output] = {}
        self._replayed: dict[int, list[int]] = {}
        self.llm = open_llm(folder / "first")
        first = self.llm.generate([first_prompt()], greedy(OUTPUT))[0]
        assert first.tiers == TierCounts(compute=PROMPT)
        self.answer = first.token_ids
        self.tokens = [*first_prompt(), *first.token_ids]
        assert len(self.tokens) == SESSION
        self.flush(self.llm)
        self.snapshots = self._dump(self.llm)
        self.memory = self._entries()
        self.weights = ReferenceWeights(self.llm.engine.runner.backbone, resolve(str(noise_checkpoint())).open())
        self._saved = folder / "saved"
        shutil.copytree(folder / "first", self._saved)

    def close(self) -> None:
        self.llm.close()

    def prompt(self, length: int) -> list[int]:
        return [*self.tokens, *suffix(length)]

    def copy(self) -> Path:
        """A store of its own for one case, as the first turn left it."""
        self._copies += 1
        target = self._folder / f"copy{self._copies}"
        shutil.copytree(self._saved, target)
        return target

    def give_windows(self, llm: LLM) -> None:
        """Put the first turn's snapshots into the Redis of this LLM."""
        with client(llm) as server:
            for key, value in self.snapshots.items():
                server.set(key, value, px=600_000)

    def cold(self, length: int) -> Output:
        """The next turn without any cache."""
        if length not in self._cold:
            self._cold[length] = self._cold_llm.generate([self.prompt(length)], greedy(ANSWER))[0]
        return self._cold[length]

    def replayed(self, length: int) -> list[int]:
        """What REF says when the window before HIT is replayed: tokens."""
        if length not in self._replayed:
            tokens, start = self.prompt(length), HIT - WINDOW
            anchor = len(tokens) - WINDOW
            ref = Reference(self.weights, tokens, self.memory.prefix(HIT, self.ratios))
            logits = ref.run(start, len(tokens), write_from=HIT, window_from=start, decoder_from=anchor, decoder_window_from=anchor)
            said = []
            for _ in range(ANSWER):
                said.append(int(logits[-1].argmax()))
                ref.tokens.append(said[-1])
                logits = ref.run(len(ref.tokens) - 1, len(ref.tokens))
            self._replayed[length] = said
        return self._replayed[length]

    @staticmethod
    def flush(llm: LLM) -> None:
        reservoir = llm.engine.reservoir
        assert reservoir is not None
        assert reservoir.store is None or reservoir.store.flush(30)
        assert reservoir.pool is None or reservoir.pool.flush(30)

    @property
    def ratios(self) -> dict[int, int]:
        return {s.layer: s.ratio for s in self.llm.engine.runner.layout.sources}

    @staticmethod
    def _dump(llm: LLM) -> dict[bytes, bytes]:
        with client(llm) as server:
            found = {key: server.get(key) for key in server.scan_iter()}
        assert len(found) >= 4, "windows at the last two boundaries of the prompt and of the output"
        return found

    def _entries(self) -> Memory:
        """The session's stored entries, decoded: the memory of a REF that has seen it."""
        manager, blocks = self.llm.engine.manager, self.llm.engine.runner.blocks
        chain = manager.sequence().chain
        chain.extend(self.tokens, HIT)
        held = manager.index.match(chain.keys)
        assert len(held) * WINDOW == HIT
        memory, table = Memory(), torch.tensor(held)
        for layer, views in blocks.views.items():
            planes = (views.main_codes, views.main_scales, views.index_codes, views.index_scales)
            codes, scales, index_codes, index_scales = (p[table].flatten(0, 1)[: HIT // self.ratios[layer]] for p in planes)
            memory.main[layer] = dict(enumerate(formats.main_decode(codes, scales)))
            memory.index[layer] = dict(enumerate(formats.index_decode(index_codes, index_scales)))
            memory.raw[layer] = dict(enumerate(torch.cat((codes, scales, index_codes, index_scales), 1)))
        return memory


@contextlib.contextmanager
def client(llm: LLM) -> Iterator[Any]:
    reservoir = llm.engine.reservoir
    assert reservoir is not None and reservoir.pool is not None
    with redis.Redis.from_url(reservoir.pool.options.url, socket_timeout=10) as server:
        yield server


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    found = Session(tmp_path_factory.mktemp("session"))
    yield found
    found.close()


class Turn:
    """One next turn through an LLM, with what the metrics counted for it."""

    def __init__(self, session: Session, llm: LLM, length: int, count: int = ANSWER) -> None:
        self.session, self.length = session, length
        before = _counters(llm)
        self.output = llm.generate([session.prompt(length)], greedy(count))[0]
        self.tiers = self.output.tiers
        self._metrics_agree(before, _counters(llm))

    def came_from(self, *, hbm: int = 0, ssd: int = 0, window: str, lineage: int = 0, replayed: int | None = None) -> Turn:
        """Tiers are exactly these; `replayed` by default what the window asks for."""
        if replayed is None:
            replayed = WINDOW if window == "replay" or (window in ("swa", "live") and self.length < EDGE) else 0
        compute = SESSION + self.length - hbm - ssd
        wanted = TierCounts(hbm, ssd, compute, window, replayed, lineage, self.tiers.restore_s)  # type: ignore[arg-type]
        assert self.tiers == wanted, self.length
        assert (self.tiers.restore_s > 0) == (ssd > 0)
        assert self.output.usage.cached_tokens == hbm + ssd
        return self

    def says_cold(self) -> None:
        cold = self.session.cold(self.length)
        assert (self.output.token_ids, self.output.text) == (cold.token_ids, cold.text), self.length

    def says_replayed(self) -> None:
        assert self.output.token_ids == self.session.replayed(self.length), self.length

    def _metrics_agree(self, before: dict[str, float], after: dict[str, float]) -> None:
        t = self.tiers
        grown = {name: after[name] - before[name] for name in after}
        assert {tier: grown[f"global.{tier}"] for tier in ("hbm", "ssd", "compute")} == {"hbm": t.hbm, "ssd": t.ssd, "compute": t.compute}
        resumes = {tier: grown[f"resumes.{tier}"] for tier in ("live", "swa", "replay")}
        assert resumes == {tier: float(tier == t.window) for tier in resumes}
        assert grown["replays"] == (t.window == "replay")
        assert grown["lineage"] == (t.window != "none")
        assert grown["prompt"] == t.hbm + t.ssd + t.compute


def _counters(llm: LLM) -> dict[str, float]:
    def value(name: str, **labels: str) -> float:
        return sum(
            sample.value for family in llm.engine.metrics.registry.collect() for sample in family.samples
            if sample.name == f"forebay_{name}" and all(sample.labels.get(key) == label for key, label in labels.items())
        )  # fmt: skip

    found = {f"global.{tier}": value("kv_tokens_total", group="global", tier=tier) for tier in ("hbm", "ssd", "compute")}
    found |= {f"resumes.{tier}": value("window_resumes_total", tier=tier) for tier in ("live", "swa", "replay")}
    found |= {"replays": value("replays_total"), "lineage": value("lineage_resumes_total"), "prompt": value("prompt_tokens_total")}
    return found


def finish(llm: LLM, done: Callable[[], bool] | None = None) -> None:
    """Step until nothing is left, or until `done`."""
    engine = llm.engine
    while engine.busy and not (done is not None and done()):
        engine.wake.clear()
        if not engine.step().rows and engine.busy:
            engine.wake.wait(0.01)


def held(llm: LLM, session: Session) -> int:
    """Tokens of the session that the device has."""
    chain = llm.engine.manager.sequence().chain
    chain.extend(session.tokens, HIT)
    return len(llm.engine.manager.index.match(chain.keys)) * WINDOW


def test_warm(session: Session) -> None:
    """(a) Everything is there: any length, on and off block boundaries, says what a cold run says."""
    for length in SUFFIXES:
        Turn(session, session.llm, length).came_from(hbm=HIT, window="swa").says_cold()
    # The same turns again: they hit their own blocks now, and the windows that their first time left.
    for length in SUFFIXES:
        total = SESSION + length
        turn = Turn(session, session.llm, length)
        assert (turn.tiers.hbm, turn.tiers.window, turn.tiers.lineage) == ((total - 1) // WINDOW * WINDOW, "swa", 0), length
        turn.says_cold()


def test_a_running_sequence_lends_its_window(session: Session) -> None:
    """(a) The first turn still runs when the next request comes: the window is its own, and both texts are the cold ones."""
    llm = open_llm(session.copy())
    try:
        session.give_windows(llm)
        engine, events = llm.engine, dict[str, list[OutputEvent]]()

        def collect(found: list[OutputEvent]) -> None:
            for event in found:
                events.setdefault(event.request_id, []).append(event)

        engine.sink = collect
        ids = session.tokens[:PROMPT]
        runs = engine.submit(Request(ids, greedy(OUTPUT)))
        finish(llm, lambda: runs.generated >= OUTPUT - 2)
        with client(llm) as server:
            server.flushall()  # so it can only come from the running sequence
        other = engine.submit(Request(session.prompt(EDGE), greedy(ANSWER)))
        finish(llm)
        assert [token for event in events[runs.id] for token in event.token_ids] == session.answer
        assert [token for event in events[other.id] for token in event.token_ids] == session.cold(EDGE).token_ids
        assert other.tiers is not None
        assert (other.tiers.hbm + other.tiers.ssd, other.tiers.window, other.tiers.lineage) == (HIT, "live", 0)
    finally:
        llm.close()


def test_after_eviction_from_the_device(session: Session) -> None:
    """(b) Little by little, until nothing of the session is left there: HBM and SSD share the hit, the text stays."""
    llm = open_llm(session.copy(), kv_tokens=4_608)
    try:
        session.give_windows(llm)
        Turn(session, llm, SUFFIXES[0]).came_from(ssd=HIT, window="swa").says_cold()
        for number, length in enumerate(SUFFIXES[1:3]):
            llm.generate([[70 + (number * 977 + i * i * 13) % 3900 for i in range(1_500)]], greedy(2))
            left = held(llm, session)
            assert 0 < left < HIT
            Turn(session, llm, length).came_from(hbm=left, ssd=HIT - left, window="swa").says_cold()
        llm.generate([[70 + (i * i * 13 + 5) % 3900 for i in range(4_606)]], greedy(1))
        assert held(llm, session) == 0
        Turn(session, llm, SUFFIXES[3]).came_from(ssd=HIT, window="swa").says_cold()
    finally:
        llm.close()


class TestAfterARestart:
    """(c)"""

    def test_without_windows(self, session: Session) -> None:
        """The embedded server went with the process: blocks come from SSD, the window is replayed, and the text is REF's."""
        llm = open_llm(session.copy())
        try:
            Turn(session, llm, REPLAYED[0]).came_from(ssd=HIT, window="replay", lineage=1).says_replayed()
            session.flush(llm)
            # The replay has left its window at HIT, which serves the other turns as well: it is what they would have replayed.
            for length in REPLAYED[1:]:
                Turn(session, llm, length).came_from(hbm=HIT, window="swa", lineage=1).says_replayed()
        finally:
            llm.close()

    def test_with_windows(self, session: Session) -> None:
        """A Redis that lives on: nothing is lost, the text is the cold one."""
        folder = session.copy()
        with Server() as server:
            for key, value in session.snapshots.items():
                server.client().set(key, value, px=600_000)
            for length in SUFFIXES:
                llm = open_llm(folder, server.url)
                Turn(session, llm, length).came_from(ssd=HIT, window="swa").says_cold()
                llm.close()

    def test_exact_replay(self, session: Session) -> None:
        """Six encoder layers need six windows, less a row each; the text is the cold one and nothing approximates."""
        llm = open_llm(session.copy(), replay="exact")
        try:
            for length in (SUFFIXES[0], SUFFIXES[2]):
                left = held(llm, session)
                turn = Turn(session, llm, length)
                turn.came_from(hbm=left, ssd=HIT - left, window="replay", replayed=_exact(llm, HIT, length)).says_cold()
                session.flush(llm)
                with client(llm) as server:
                    assert server.dbsize()  # the windows are as good as any; without them, the next turn replays again
                    server.flushall()
        finally:
            llm.close()

    def test_max_lineage(self, session: Session) -> None:
        """What a bounded replay left is lineage 1, on the disk too; who wants none of it gets exact ones, and then all do."""
        folder, length = session.copy(), SUFFIXES[2]
        end = (SESSION + length - 1) // WINDOW * WINDOW
        assert end > HIT
        llm = open_llm(folder)
        Turn(session, llm, length).came_from(ssd=HIT, window="replay", lineage=1)
        llm.close()
        llm = open_llm(folder)
        try:
            Turn(session, llm, length, 2).came_from(ssd=end, window="replay", lineage=2)
            session.flush(llm)
            with client(llm) as server:
                server.flushall()
            request = llm.engine.submit(Request(session.prompt(length), greedy(ANSWER), replay="exact", max_lineage=0))
            finish(llm)
            assert request.tiers is not None
            assert (request.tiers.cached, request.tiers.lineage) == (HIT, 0)
            assert request.tokens[SESSION + length :] == session.cold(length).token_ids
            # The exact blocks have taken the place of the others, on the device and on the disk.
            session.flush(llm)
            llm.engine.manager.clear()
            Turn(session, llm, length).came_from(ssd=end, window="swa").says_cold()
        finally:
            llm.close()

    def test_another_process(self, session: Session) -> None:
        """With another PYTHONHASHSEED, twice: keys do not depend on the process."""
        folder = session.copy()
        for seed, length in (("1", EDGE), ("4711", 60)):
            with child(folder, session.prompt(length), ANSWER, hash_seed=seed) as (said, _):
                said()
                found = said()
            assert {name: found[name] for name in ("hbm", "ssd", "window", "lineage")} == {
                "hbm": 0, "ssd": HIT, "window": "replay", "lineage": 1,
            }  # fmt: skip
            assert found["tokens"] == session.replayed(length)


def _exact(llm: LLM, hit: int, length: int) -> int:
    """Tokens that an exact replay before `hit` computes again."""
    exact_from = min(hit, SESSION + length - WINDOW) // WINDOW * WINDOW
    return hit - exact_from + llm.engine.runner.layout.encoder_layers * (WINDOW - 1)


class TestAfterAKill:
    """(d)"""

    def test_of_an_idle_server(self, session: Session, tmp_path: Path) -> None:
        """kill -9 when the first turn is written: all of it is there; the embedded Redis has died with its parent."""
        with child(tmp_path / "kv", first_prompt(), OUTPUT, hash_seed="7") as (said, process):
            server = said()["pid"]
            assert Path(f"/proc/{server}").exists()
            first = said()
            assert first["tokens"] == session.answer
            assert first["written"]
            process.kill()
            process.wait()
        until(lambda: not _runs(server))
        llm = open_llm(tmp_path / "kv")
        try:
            Turn(session, llm, EDGE).came_from(ssd=HIT, window="replay", lineage=1).says_replayed()
        finally:
            llm.close()

    def test_in_the_middle(self, session: Session, tmp_path: Path) -> None:
        """kill -9 after a random step: some head of the session is there, whole; what it left is never wrong."""
        seed = int(time.time())
        for number in range(2):
            folder, numbers = tmp_path / f"kv{number}", random.Random(seed + number)
            steps = numbers.randrange(3, 12)
            with child(folder, first_prompt(), OUTPUT, progress=True) as (said, process):
                said()
                for _ in range(steps):
                    written = said()["writes"]
                process.kill()
                process.wait()
            llm = open_llm(folder, replay="exact")
            try:
                turn = Turn(session, llm, EDGE)
                where = f"seed {seed + number}, killed after {steps} steps"
                assert HIT >= turn.tiers.ssd >= written * WINDOW, where  # more may have been written than the child could tell
                assert (turn.tiers.hbm, turn.tiers.lineage, turn.tiers.ssd % WINDOW) == (0, 0, 0), where
                turn.says_cold()
            finally:
                llm.close()


class TestRedis:
    def test_flushed(self, session: Session) -> None:
        """(e) All snapshots are gone: full hits, the window is replayed, and it is back with the next turns."""
        llm = open_llm(session.copy())
        try:
            session.give_windows(llm)
            Turn(session, llm, SUFFIXES[0]).came_from(ssd=HIT, window="swa").says_cold()
            session.flush(llm)
            for length in REPLAYED:
                with client(llm) as server:
                    server.flushall()
                Turn(session, llm, length).came_from(hbm=HIT, window="replay", lineage=1).says_replayed()
                session.flush(llm)
            # These turns left windows of their own, and these have the replay behind them, as the blocks before them do.
            turn = Turn(session, llm, REPLAYED[-1])
            assert (turn.tiers.hbm, turn.tiers.window, turn.tiers.lineage) == (
                (SESSION + REPLAYED[-1] - 1) // WINDOW * WINDOW, "swa", 1,
            )  # fmt: skip
            turn.says_replayed()
        finally:
            llm.close()

    def test_killed(self, session: Session) -> None:
        """(f) The server dies and comes back empty: replay meanwhile, and windows again afterwards."""
        llm = open_llm(session.copy())
        try:
            session.give_windows(llm)
            embedded = _embedded(llm)
            old = embedded.pid
            os.kill(old, signal.SIGKILL)
            Turn(session, llm, REPLAYED[0]).came_from(ssd=HIT, window="replay", lineage=1).says_replayed()
            until(lambda: embedded.restarts >= 1)
            assert embedded.pid != old
            until(lambda: _breaker(llm) == "closed")
            session.give_windows(llm)
            for length in SUFFIXES[1:]:
                Turn(session, llm, length).came_from(hbm=HIT, window="swa").says_cold()
        finally:
            llm.close()

    def test_slow(self, session: Session) -> None:
        """(f) The server stops answering: one request waits for it, once and briefly; it goes on, and so do the hits, without a restart."""
        llm = open_llm(session.copy(), redis_timeout_s=0.5)
        try:
            session.give_windows(llm)
            Turn(session, llm, SUFFIXES[0]).came_from(ssd=HIT, window="swa").says_cold()
            session.flush(llm)
            pid = _embedded(llm).pid
            os.kill(pid, signal.SIGSTOP)
            try:
                Turn(session, llm, REPLAYED[0]).came_from(hbm=HIT, window="replay", lineage=1).says_replayed()
                assert _breaker(llm) != "closed"
                Turn(session, llm, REPLAYED[2]).came_from(hbm=HIT, window="replay", lineage=1).says_replayed()
            finally:
                os.kill(pid, signal.SIGCONT)
            until(lambda: _breaker(llm) == "closed")
            Turn(session, llm, SUFFIXES[1]).came_from(hbm=HIT, window="swa").says_cold()
        finally:
            llm.close()


class TestClock:
    """(g) The clock goes on while the server is down, or up."""

    def test_71_hours(self, session: Session) -> None:
        """Blocks are served, and being used they live as long again; windows are long over, though Redis still has them."""
        folder, now = session.copy(), [time.time() + 71 * HOUR]
        llm = open_llm(folder, clock=lambda: now[0])
        try:
            session.give_windows(llm)
            Turn(session, llm, REPLAYED[0]).came_from(ssd=HIT, window="replay", lineage=1).says_replayed()
        finally:
            llm.close()
        now[0] += 71 * HOUR
        llm = open_llm(folder, clock=lambda: now[0])
        try:
            Turn(session, llm, REPLAYED[1]).came_from(ssd=HIT, window="replay", lineage=1).says_replayed()
            now[0] += 71 * HOUR  # while it runs; what is on the device does not age
            Turn(session, llm, REPLAYED[2]).came_from(hbm=HIT, window="replay", lineage=1).says_replayed()
        finally:
            llm.close()
        now[0] += 71 * HOUR  # the hit on the device counted for the disk too
        llm = open_llm(folder, clock=lambda: now[0])
        try:
            Turn(session, llm, SUFFIXES[0]).came_from(ssd=HIT, window="replay", lineage=1)
        finally:
            llm.close()

    def test_73_hours(self, session: Session) -> None:
        """Nothing is served, and nothing is left on the disk."""
        folder, late = session.copy(), time.time() + 73 * HOUR
        assert any((folder / "segments").iterdir())
        old = {path.name for path in (folder / "segments").iterdir()}
        llm = open_llm(folder, clock=lambda: late)
        try:
            session.give_windows(llm)
            Turn(session, llm, SUFFIXES[3]).came_from(window="none").says_cold()
            assert llm.engine.reservoir is not None and llm.engine.reservoir.store is not None
            llm.engine.reservoir.store.reap()
            assert not old & {path.name for path in (folder / "segments").iterdir()}
        finally:
            llm.close()


def _embedded(llm: LLM) -> Any:
    assert llm.engine.reservoir is not None
    return llm.engine.reservoir._embedded


def _breaker(llm: LLM) -> str:
    assert llm.engine.reservoir is not None and llm.engine.reservoir.pool is not None
    return llm.engine.reservoir.pool.stats().breaker


def _runs(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def child(
    folder: Path, ids: list[int], count: int, *, hash_seed: str = "0", progress: bool = False
) -> Iterator[tuple[Callable[[], dict[str, Any]], subprocess.Popen[bytes]]]:
    """Another process that serves one request and waits; what it says, line by line, and itself."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH_OF_TEST": json.dumps(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None and process.stdout is not None
    job = {
        "model": str(noise_checkpoint()), "dir": str(folder), "redis": "embedded", "ids": ids, "tokens": count, "progress": progress,
        "end": "wait",
    }  # fmt: skip
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()

    def said() -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the child has ended"
        return dict(json.loads(line))

    try:
        yield said, process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # it closes its LLM and ends
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
