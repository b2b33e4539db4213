"""Networks that forward passes are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference import Net


@pytest.fixture(scope="session")
def demo_net() -> Net:
    return Net.load("demo")


@pytest.fixture(scope="session")
def tiny_net(golden: Path) -> Net:
    return Net.load(str(golden / "tiny-a" / "checkpoint"))


@pytest.fixture(params=["tiny-a", "demo"])
def net(request: pytest.FixtureRequest) -> Net:
    """The golden checkpoint with a window of 8 tokens, and the demo with one of 32."""
    return request.getfixturevalue("demo_net" if request.param == "demo" else "tiny_net")
