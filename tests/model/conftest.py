"""Networks that forward passes are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from noise_model import noise_checkpoint
from reference import Net


@pytest.fixture(scope="session")
def noise_net() -> Net:
    return Net.load(str(noise_checkpoint()))


@pytest.fixture(scope="session")
def tiny_net(golden: Path) -> Net:
    return Net.load(str(golden / "tiny-a" / "checkpoint"))


@pytest.fixture(params=["tiny-a", "noise"])
def net(request: pytest.FixtureRequest) -> Net:
    """The golden checkpoint with a window of 8 tokens, and NOISE with one of 32."""
    return request.getfixturevalue("noise_net" if request.param == "noise" else "tiny_net")
