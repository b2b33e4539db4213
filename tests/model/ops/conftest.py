"""Golden tensors of single operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

Components = Callable[[str], dict[str, Tensor]]


@pytest.fixture(scope="session")
def components(golden: Path) -> Components:
    """components("rope") -> the tensors of components/rope.safetensors."""
    folder = golden / "components"
    return cache(lambda name: load_file(folder / f"{name}.safetensors"))
