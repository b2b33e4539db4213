"""A cluster of three: snapshots on every node, a slot that moves, a node that pauses and a node that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from redis.crc import key_slot

from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.cache.swa import KEY_PREFIX, SwaOptions, SwaPool
from redis_servers import Server, free_port, until

SHAPE = SnapshotShape(encoder_layers=2, decoder_layers=2, window=8, row_bytes=33)
SLOTS = 16384
RANGES = ((0, 5460), (5461, 10922), (10923, 16383))


def make(canary: int = 1) -> Snapshot:
    return Snapshot(256, 128, None, 1, np.full(SHAPE.encoder, canary, np.uint8), None)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Three primaries; they know each other and every slot has an owner."""
    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            folder: Path = tmp_path_factory.mktemp(f"node{number}")
            server = Server(
                cluster_enabled="yes", cluster_config_file="nodes.conf", dir=folder, cluster_node_timeout=2000, cluster_port=free_port(),
                cluster_require_full_coverage="no",
            )  # fmt: skip
            nodes.append(stack.enter_context(server))
        for number, (node, (first, last)) in enumerate(zip(nodes, RANGES, strict=True)):
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, node.settings["cluster-port"])
        until(lambda: all(_formed(node) for node in nodes), 15)
        yield nodes


def _formed(node: Server) -> bool:
    info = node.client().cluster("INFO")
    return info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(SLOTS) and info["cluster_known_nodes"] == "3"


@pytest.fixture
def pool(nodes: list[Server]) -> Iterator[SwaPool]:
    for node in nodes:
        node.client().flushall()
    pool = SwaPool(SwaOptions(nodes[0].url, cluster=True, timeout_s=0.25), identity="a model", shape=SHAPE)
    until(lambda: pool.stats().breaker == "closed")
    yield pool
    pool.close(0.1)


def owner(key: bytes) -> int:
    slot = key_slot(KEY_PREFIX + key)
    return next(number for number, (first, last) in enumerate(RANGES) if first <= slot <= last)


def keys_of(each: int) -> list[list[bytes]]:
    """`each` keys for every node."""
    found: list[list[bytes]] = [[] for _ in RANGES]
    while any(len(keys) < each for keys in found):
        key = os.urandom(32)
        if len(found[owner(key)]) < each:
            found[owner(key)].append(key)
    return found


@pytest.mark.slow
def test_every_node_stores_and_serves(nodes: list[Server], pool: SwaPool) -> None:
    keys = keys_of(10)
    for number, group in enumerate(keys):
        for key in group:
            assert pool.put(key, make(number))
    assert pool.flush(5)
    assert [node.client().dbsize() for node in nodes] == [10, 10, 10]
    for number, group in enumerate(keys):
        for key in group:
            found = pool.get([os.urandom(32), key])
            assert found is not None and found[1].encoder.max() == number
    assert pool.purge() == 30
    assert [node.client().dbsize() for node in nodes] == [0, 0, 0]


@pytest.mark.slow
def test_a_slot_that_moves(nodes: list[Server], pool: SwaPool) -> None:
    """ASK while it is under way, MOVED afterwards: hits or misses, and hits in the end."""
    key = keys_of(1)[0][0]
    slot = key_slot(KEY_PREFIX + key)
    pool.put(key, make(7))
    assert pool.flush(5) and pool.get([key]) is not None
    source, target = nodes[0].client(), nodes[1].client()
    source_id, target_id = (c.execute_command("CLUSTER", "MYID") for c in (source, target))
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    source.execute_command("MIGRATE", "127.0.0.1", nodes[1].port, KEY_PREFIX + key, 0, 5000)
    until(lambda: pool.get([key]) is not None)
    for client in (target, source, nodes[2].client()):
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    until(lambda: pool.get([key]) is not None)
    fresh = make(8)
    until(lambda: pool.put(key, fresh) and pool.flush(5) and pool.get([key]) is not None)
    assert target.exists(KEY_PREFIX + key)
    # Back, for the other tests.
    source.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", target_id)
    target.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", source_id)
    target.execute_command("MIGRATE", "127.0.0.1", nodes[0].port, KEY_PREFIX + key, 0, 5000)
    for client in (source, target, nodes[2].client()):
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", source_id)
    until(lambda: pool.get([key]) is not None)


@pytest.mark.slow
@pytest.mark.case("B040")
def test_a_node_that_pauses_and_a_node_that_dies(nodes: list[Server], pool: SwaPool) -> None:
    keys = keys_of(4)
    for group in keys:
        for key in group:
            pool.put(key, make())
    assert pool.flush(5)
    victim = nodes[2]
    victim.signal(signal.SIGSTOP)
    try:
        times, lost = [], 0
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for group in keys:
                began = time.monotonic()
                lost += pool.get([group[0]]) is None
                times.append(time.monotonic() - began)
        assert lost and max(times) < 0.25 + 0.2
    finally:
        victim.signal(signal.SIGCONT)
    until(lambda: all(pool.get([key]) is not None for group in keys for key in group))
    victim.kill()
    times = []
    survivors = keys[0] + keys[1]

    def served() -> bool:
        began = time.monotonic()
        assert pool.get([keys[2][0]]) is None
        times.append(time.monotonic() - began)
        return all(pool.get([key]) is not None for key in survivors)

    until(served)
    assert max(times) < 0.25 + 0.2
    victim.start()  # the same name and slots, without its data
    for key in keys[2]:
        until(lambda key=key: pool.put(key, make()) and pool.flush(5) and pool.get([key]) is not None, 15)
