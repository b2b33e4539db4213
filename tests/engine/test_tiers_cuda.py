"""The tiers behind a CUDA device: what is copied out is what the kernels wrote, and what comes back is what was copied."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from forebay.cache.embedded import find_binary
from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.engine.types import Request, SamplingParams
from forebay.model.errors import ConfigError
from noise_model import noise_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# As torch operations, and as kernels with captured steps, which the host is ahead of.
by_either = pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"))]
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompt(length: int, number: int = 0) -> list[int]:
    return [5 + (k * k * 7 + 31 * number) % 4000 for k in range(length)]


def url() -> str | None:
    """A pool of windows, if this machine has its server."""
    try:
        find_binary()
    except ConfigError:
        return None
    return "embedded"


def open_llm(folder: Path, kernels: bool, pool: str | None) -> LLM:
    tiers = TierOptions(dir=folder, redis_url=pool, ssd_bytes=1 << 30)
    sizes = {"kv_tokens": 30_000, "max_sequences": 32, "encoder_tokens": 512, "decoder_tokens": 512}
    llm = LLM(str(noise_checkpoint()), device="cuda", kernels=kernels, tiers=tiers, **sizes)
    assert (llm.engine.flights is not None) == kernels
    return llm


@by_either
@pytest.mark.case("B033")
def test_stored_bytes_are_the_devices(tmp_path: Path, kernels: bool) -> None:
    """Many sequences at once, so that copies and later steps overlap on the stream as much as they can."""
    with open_llm(tmp_path, kernels, url()) as llm:
        prompts = [prompt(200 + 37 * i, i + 1) for i in range(32)]
        llm.generate(prompts, GREEDY)
        manager, store = llm.engine.manager, llm.engine.reservoir.store  # type: ignore[union-attr]
        assert store is not None and store.flush(30)
        compared = 0
        for ids in prompts:
            chain = manager.sequence().chain
            chain.extend(ids)
            fetch = store.fetch(chain.keys, lambda: None)
            fetch.promote()
            deadline = time.monotonic() + 30
            while not fetch.finished:
                assert time.monotonic() < deadline and fetch.failed_at is None
                for position, data in fetch.take():
                    block = manager.index.find(chain.keys[position])
                    assert block is not None
                    assert torch.equal(manager.pool.data[block].cpu(), torch.from_numpy(data.copy())), position
                    compared += 1
                    fetch.free([position])
                time.sleep(0.001)
        assert compared == sum(len(ids) // manager.layout.block_tokens for ids in prompts)


@by_either
@pytest.mark.skipif(url() is None, reason="there is no server for windows")
def test_every_tier_gives_the_same_text(tmp_path: Path, kernels: bool) -> None:
    """From device memory, from SSD, and after a restart, all with a window that somebody kept: the greedy text of the cold run.

    Kernels multiply few rows in another order than many, so with them only those who resume alike, from whatever tier, say the same.
    """
    ids = prompt(3000)
    with open_llm(tmp_path, kernels, "embedded") as llm:
        cold = llm.generate([ids], GREEDY)[0]
        warm = llm.generate([ids], GREEDY)[0]
        assert (warm.tiers.window, warm.tiers.lineage, warm.tiers.hbm) == ("swa", 0, 2976)
        assert kernels or warm.token_ids == cold.token_ids
        assert llm.generate([ids], GREEDY)[0].token_ids == warm.token_ids
        apart = llm.run([Request(ids, GREEDY, salt="another")])[0]
        assert apart.tiers.compute == len(ids) and apart.token_ids == cold.token_ids, "who shares nothing with anybody is another cold run"
        store = llm.engine.reservoir.store  # type: ignore[union-attr]
        assert store is not None and store.flush(30)
        llm.engine.manager.clear()
        restored = llm.generate([ids], GREEDY)[0]
        assert (restored.tiers.window, restored.tiers.ssd) == ("swa", 2976)
        assert restored.token_ids == warm.token_ids
    with open_llm(tmp_path, kernels, None) as llm:
        again = llm.generate([ids], GREEDY)[0]
        assert (again.tiers.window, again.tiers.ssd, again.tiers.lineage) == ("replay", 2976, 1)
