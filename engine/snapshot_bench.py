"""Storing and loading a window snapshot over TCP, beside a plain loop that receives as many bytes over the same interface."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from forebay.cache.embedded import EmbeddedRedis
from forebay.cache.layout import KVLayout
from forebay.cache.snapshot import Snapshot, SnapshotShape
from forebay.cache.swa import SwaOptions, SwaPool
from forebay.engine.cache_bench import SEED, WAIT_S, BenchError, Report, Row
from forebay.model.config import Topology, real_config

MEMORY = 512 << 20  # of the server
CALLS = 20  # loads and stores in a repeat


def measure(*, repeats: int, report: Report) -> list[Row]:
    """Rates of SET and GET of the encoder windows of the released model through `SwaPool`, checks included, against a server of our own.

    Raises:
        BenchError: a snapshot was dropped, or came back late, damaged or not at all.
        ConfigError: there is no server program.
    """
    config = real_config()
    shape = SnapshotShape.of(KVLayout.of(config), Topology.of(config).cut)
    size = (shape.encoder_layers, shape.window, shape.row_bytes)
    encoder = np.random.default_rng(SEED).integers(0, 256, size, np.uint8)
    snapshot = Snapshot(boundary=shape.window * 100, encoder_floor=0, decoder_floor=None, lineage=0, encoder=encoder, decoder=None)
    server = EmbeddedRedis.start(MEMORY)
    try:
        # A deadline that a busy machine cannot miss: how long a call takes is the question here.
        pool = SwaPool(SwaOptions(server.url, timeout_s=5.0, connect_timeout_s=5.0), identity="bench", shape=shape)
        try:
            with plain_sender(encoder.nbytes) as receive:
                rates = run(pool, snapshot, receive, repeats, report)
        finally:
            pool.close()
    finally:
        server.stop()
    plain = statistics.median(rates["plain"])
    what = f"a snapshot, {encoder.nbytes / 1e6:.2f} MB"
    return [
        Row(f"GET of {what}", "MB/s", tuple(rates["get"]), plain, "plain receive loop", least=1000.0),
        Row(f"SET of {what}", "MB/s", tuple(rates["set"]), plain, "plain receive loop"),
    ]


def run(pool: SwaPool, snapshot: Snapshot, receive: Callable[[], float], repeats: int, report: Report) -> dict[str, list[float]]:
    """Rates in MB/s of each call, the ways interleaved."""
    rates: dict[str, list[float]] = {"set": [], "get": [], "plain": []}
    size = snapshot.encoder.nbytes
    for repeat in range(repeats):
        for _ in range(CALLS):
            key = os.urandom(32)
            began = time.perf_counter()
            if not pool.put(key, snapshot):
                raise BenchError("the snapshot was dropped before it was sent")
            if not pool.flush(WAIT_S):  # a GET before that would be answered from the queue
                raise BenchError(f"the server did not take a snapshot in {WAIT_S:g} s")
            rates["set"].append(size / (time.perf_counter() - began) / 1e6)
            began = time.perf_counter()
            found = pool.get([key])
            rates["get"].append(size / (time.perf_counter() - began) / 1e6)
            if found is None or not np.array_equal(found[1].encoder, snapshot.encoder):
                raise BenchError(f"the snapshot did not come back as it was stored: {pool.stats()}")
            rates["plain"].append(size / receive() / 1e6)
        shown = ", ".join(f"{way} {statistics.median(values[-CALLS:]):,.0f}" for way, values in rates.items())
        report(f"run {repeat + 1} of {repeats}, MB/s: {shown}")
    return rates


@contextlib.contextmanager
def plain_sender(size: int) -> Iterator[Callable[[], float]]:
    """A process that sends `size` bytes for each byte it gets over loopback TCP; yields a call that receives them and gives its seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = multiprocessing.get_context("spawn").Process(target=send_loop, args=(listener.getsockname()[1], size), daemon=True)
        sender.start()
        listener.settimeout(WAIT_S)
        connection = listener.accept()[0]
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        into = memoryview(bytearray(size))

        def receive() -> float:
            began, at = time.perf_counter(), 0
            connection.sendall(b"x")
            while at < size:
                count = connection.recv_into(into[at:])
                if not count:
                    raise BenchError("the plain sender ended")
                at += count
            return time.perf_counter() - began

        yield receive
    sender.join(WAIT_S)


def send_loop(port: int, size: int) -> None:
    """Body of that process; ends when the other side closes."""
    data = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            connection.sendall(data)
