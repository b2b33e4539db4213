"""Golden tensors of single operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from on_device import on_device

Components = Callable[[str], dict[str, Tensor]]


@pytest.fixture(scope="session")
def components(golden: Path) -> Components:
    """components("rope") -> the tensors of components/rope.safetensors."""
    folder = golden / "components"
    return cache(lambda name: load_file(folder / f"{name}.safetensors"))


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that a test module names in `KERNELS`, (owner, names), compiled and on the GPU where there is one, else interpreted."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed (the extra `gpu`)")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        return
    for owner, names in request.module.KERNELS:
        for name in names.split():
            plain = getattr(owner, name)
            wrapped = on_device(plain)
            monkeypatch.setattr(owner, name, wrapped)
            if getattr(request.module, name, None) is plain:
                monkeypatch.setattr(request.module, name, wrapped)
