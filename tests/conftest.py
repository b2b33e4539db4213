"""What every test shares: quiet threads, an environment without the developer's own settings, the golden data."""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("FOREBAY_GOLDEN") or REPOSITORY.parent / "shared" / "golden")

# Before torch is imported: one thread, and no spinning while it waits (two spinning threads on two busy cores are up to 80 times slower).
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "1"

# Settings from the developer's shell must not change what a test sees, nor reach the servers it starts.
for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
    del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Without a GPU, Triton is imported as its interpreter wants it, before anything else in torch imports it.

    What Triton's own language is made of is then interpreted, or compiled, for as long as the process lives.
    """
    import torch

    if find_spec("triton") is not None and not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            import_module("triton.language")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder with expected outputs of an independent implementation; tests that need it are skipped where it is absent."""
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden data is not at {GOLDEN}; set FOREBAY_GOLDEN to its folder")
    return GOLDEN


@pytest.fixture(scope="session")
def same_sums(golden: Path) -> bool:
    """Whether this CPU computes as the machine the golden data came from did: only then can all bits be equal.

    MKL chooses its kernels by the maker of the CPU, its products as well as torch's `exp`: on Intel's with AVX-512 they agree with the
    golden data; on AMD's, whatever they can do, and with AVX2 they add up in another order and round `exp` otherwise. Then the tests
    allow for what single roundings cost. Found out with plain torch, without our code: the 256-term products of the mHC projections,
    recorded in the traces.
    """
    import torch
    from safetensors.torch import load_file

    folder = golden / "tiny-a"
    weights, trace = load_file(folder / "checkpoint" / "model.safetensors"), load_file(folder / "trace_T13.safetensors")
    for layer in range(12):
        x = trace[f"layer{layer}.in_h"].flatten(1).float()
        mixes = torch.nn.functional.linear(x, weights[f"layers.{layer}.hc_attn_fn"])
        if not torch.equal(mixes * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20), trace[f"layer{layer}.hc_attn.mixes"]):
            return False
    return True


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout these tests belong to."""
    return REPOSITORY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mistyped case id would silently cover nothing."""
    for item in items:
        for mark in item.iter_markers("case"):
            if not mark.args or not all(isinstance(a, str) and re.fullmatch(r"B\d{3}", a) for a in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: mark case takes ids such as 'B054', got {mark.args}")
