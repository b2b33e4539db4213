"""Bodies compressed with zstd, as Codex sends them: the same limits as for gzip."""

from __future__ import annotations

import json
import random
import time
import tracemalloc

import httpx
import pytest
import zstandard

from forebay.server.body import decode
from forebay.server.errors import HttpError
from script_engine import Served

MIB = 1 << 20
CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


def packed(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def test_a_body_may_be_sent_as_zstd(served: Served) -> None:
    for data in (packed(BODY), packed(BODY[:9]) + packed(BODY[9:]), packed(BODY, 19)):
        response = httpx.post(served.url + CHAT, content=data, headers={"content-encoding": "zstd"})
        assert response.status_code == 200, response.text
    refused = {"not zstd": BODY, "cut": packed(BODY)[:-3], "cut in its head": packed(BODY)[:5], "more behind it": packed(BODY) + b"{}"}
    for name, data in refused.items():
        response = httpx.post(served.url + CHAT, content=data, headers={"content-encoding": "zstd"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_body"), name
    assert httpx.post(served.url + CHAT, content=BODY, headers={"content-encoding": "br"}).headers["accept-encoding"].endswith("zstd")


def test_random_data_comes_back_up_to_the_limit() -> None:
    data = random.Random(1).randbytes(3 * MIB) + b"x" * MIB
    assert decode(packed(data), "zstd", 4 * MIB) == data
    assert decode(packed(packed(data)), "zstd, zstd", 4 * MIB) == data
    with pytest.raises(HttpError) as error:
        decode(packed(data), "zstd", 4 * MIB - 1)
    assert error.value.status == 413


@pytest.mark.case("B116")
def test_a_bomb_is_cut_at_the_limit() -> None:
    """A gigabyte in 34 KB: neither its time nor its memory is spent."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    bomb = b"".join(compressor.compress(b"\0" * MIB) for _ in range(1024)) + compressor.flush()
    assert len(bomb) < MIB // 8
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(HttpError) as error:
        decode(bomb, "zstd", 8 * MIB)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.value.status == 413
    assert peak < 64 * MIB and seconds < 2


def test_a_window_that_would_take_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = b"".join([wide.compress(random.Random(2).randbytes(9 * MIB)), wide.flush()])
    with pytest.raises(HttpError) as error:
        decode(data, "zstd", 64 * MIB)
    assert (error.value.status, error.value.code) == (400, "invalid_body")


def test_many_empty_frames_are_refused_at_once() -> None:
    began = time.process_time()
    with pytest.raises(HttpError, match="more than 10000 zstd frames"):
        decode(packed(b"") * 100_000, "zstd", MIB)
    assert time.process_time() - began < 2
