"""One Redis for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from redis_servers import Server


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def redis(shared_redis: Server) -> Server:
    """An empty Redis."""
    shared_redis.client().flushall()
    return shared_redis
