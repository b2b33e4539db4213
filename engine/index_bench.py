"""What the index of a large SSD store costs: memory and disk per block, and the time from opening it until it answers.

`measure` fills a store with blocks of a few bytes, since the index does not see their size, and opens it again in a process of its own
(`python -m forebay.engine.index_bench FOLDER CHAINS`), whose memory is that of the store and nothing else.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from blake3 import blake3

from forebay.cache.ssd import SsdStore, StoredBlock, staging_bytes
from forebay.engine.cache_bench import TENANT, WAIT_S, BenchError, Report, Row, forget, opened

CHAIN = 782  # blocks of one prefix: 100,000 tokens of the released model
BLOCK_BYTES = 64
RECORD_BYTES = 4096  # the least that a record takes on disk
PROBES = 50  # chains looked up each time
MOST_BYTES_A_BLOCK = 250.0
MOST_READY_S = 10.0


def measure(folder: Path, *, blocks: int, repeats: int, report: Report) -> list[Row]:
    """Fill a store in `folder` (empty) with `blocks` blocks and open it again `repeats` times.

    Raises:
        BenchError: too little disk, or the store lost blocks.
        ConfigError: the folder cannot be used.
    """
    chains = max(1, blocks // CHAIN)
    blocks = chains * CHAIN
    needed = blocks * (RECORD_BYTES + 512) + (2 << 30)
    if (free := shutil.disk_usage(folder).free) < needed:
        where = f"{needed >> 30} GiB of disk in {folder}, {free >> 30} GiB are free"
        raise BenchError(f"an index of {blocks:,} blocks needs {where}; take fewer with --blocks")
    began = time.perf_counter()
    fill(folder, chains, report)
    filled = time.perf_counter() - began
    indexed = sum(file.stat().st_size for file in index_files(folder))
    found = []
    for repeat in range(repeats):
        forget(index_files(folder))
        command = [sys.executable, "-m", "forebay.engine.index_bench", str(folder), str(chains)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"the store could not be opened again: {done.stderr.strip().splitlines()[-1:]}")
        found.append(json.loads(done.stdout))
        report(f"index, run {repeat + 1} of {repeats}: ready after {found[-1]['ready_s']:.3f} s")
    memory, ready, look_up = (tuple(one[name] for one in found) for name in ("grown", "ready_s", "look_up_ms"))
    return [
        Row("index, memory", "B/block", tuple(grown / blocks for grown in memory), most=MOST_BYTES_A_BLOCK),
        Row("index, file", "B/block", (indexed / blocks,), most=MOST_BYTES_A_BLOCK),
        Row("restart until a prefix is found", "s", ready, most=MOST_READY_S),
        Row("looking a prefix up", "ms", look_up),
        Row("filling the index", "blocks/s", (blocks / filled,)),
    ]


def keys_of(chain: int) -> list[bytes]:
    """32 bytes for each block of a chain, the same in every process."""
    stream = blake3(chain.to_bytes(8, "little")).digest(32 * CHAIN)
    return [stream[i : i + 32] for i in range(0, len(stream), 32)]


def fill(folder: Path, chains: int, report: Report) -> None:
    payload = np.zeros((CHAIN, BLOCK_BYTES), np.uint8)
    told = time.monotonic()
    with opened(folder, BLOCK_BYTES, np.zeros(staging_bytes(CHAIN, BLOCK_BYTES), np.uint8)) as ssd:
        for chain in range(chains):
            blocks = [StoredBlock(key, depth, 0) for depth, key in enumerate(keys_of(chain))]
            if ssd.put(blocks, payload, TENANT) != CHAIN:
                raise BenchError("the store dropped blocks while it was filled")
            # One chain waits while the next is made: the queue is bounded.
            if ssd.stats().queue_blocks > 16 * CHAIN and not ssd.flush(WAIT_S):
                raise BenchError(f"the store wrote nothing for {WAIT_S:g} s")
            if time.monotonic() - told > 5:
                told = time.monotonic()
                report(f"index, {(chain + 1) * CHAIN:,} of {chains * CHAIN:,} blocks")
        if not ssd.flush(WAIT_S):
            raise BenchError(f"the store wrote nothing for {WAIT_S:g} s")


def index_files(folder: Path) -> list[Path]:
    return [file for name in ("index.sqlite", "index.sqlite-wal") if (file := folder / name).exists()]


def probe(folder: Path, chains: int) -> dict[str, object]:
    """Open the store of `fill` and look up chains all over it: seconds until the first is found, milliseconds of each, bytes grown."""
    numbers = np.random.default_rng()
    first, *others = [keys_of(int(chain)) for chain in numbers.integers(0, chains, 1 + PROBES)]
    before = resident_bytes()
    began = time.perf_counter()
    with opened(folder, BLOCK_BYTES, np.zeros(staging_bytes(CHAIN, BLOCK_BYTES), np.uint8)) as ssd:
        while len(ssd.lookup(first)) < CHAIN:
            if time.perf_counter() - began > WAIT_S:
                raise BenchError(f"the prefix was not found in {WAIT_S:g} s")
            time.sleep(0.001)
        ready = time.perf_counter() - began
        milliseconds = [look_up(ssd, keys) for keys in others]
        grown = resident_bytes() - before
    return {"ready_s": ready, "look_up_ms": statistics.median(milliseconds), "grown": max(grown, 0)}


def look_up(ssd: SsdStore, keys: list[bytes]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    if len(ssd.lookup(keys)) != len(keys):
        raise BenchError("the store does not know all blocks that it has written")
    return (time.perf_counter() - began) * 1000


def resident_bytes() -> int:
    """Memory of this process that is its own: without files that are mapped and could be dropped."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    return sum(int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]), int(sys.argv[2]))))
