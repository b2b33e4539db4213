"""The tiers behind a CUDA device: what is copied out is what the kernels wrote, and what comes back is what was copied."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from forebay.engine.llm import LLM
from forebay.engine.tiers import TierOptions
from forebay.engine.types import SamplingParams
from noise_model import noise_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompt(length: int, number: int = 0) -> list[int]:
    return [5 + (k * k * 7 + 31 * number) % 4000 for k in range(length)]


def open_llm(folder: Path, url: str | None = "embedded") -> LLM:
    """Torch operations: with kernels, few rows and many are multiplied in other orders, and so is a text that resumes."""
    tiers = TierOptions(dir=folder, redis_url=url, ssd_bytes=1 << 30)
    return LLM(str(noise_checkpoint()), device="cuda", kernels=False, kv_tokens=30_000, tiers=tiers)


@pytest.mark.case("B033")
def test_stored_bytes_are_the_devices(tmp_path: Path) -> None:
    """Many sequences at once, so that copies and later steps overlap on the stream as much as they can."""
    with open_llm(tmp_path) as llm:
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


def test_every_tier_gives_the_same_text(tmp_path: Path) -> None:
    """From device memory, from SSD, and after a restart, all with a window that somebody kept: the greedy text of the cold run."""
    ids = prompt(3000)
    with open_llm(tmp_path) as llm:
        cold = llm.generate([ids], GREEDY)[0]
        warm = llm.generate([ids], GREEDY)[0]
        assert (warm.tiers.window, warm.tiers.lineage, warm.tiers.hbm) == ("swa", 0, 2976)
        assert warm.token_ids == cold.token_ids
        store = llm.engine.reservoir.store  # type: ignore[union-attr]
        assert store is not None and store.flush(30)
        llm.engine.manager.clear()
        restored = llm.generate([ids], GREEDY)[0]
        assert (restored.tiers.window, restored.tiers.ssd) == ("swa", 2976)
        assert restored.token_ids == cold.token_ids
    with open_llm(tmp_path, None) as llm:
        again = llm.generate([ids], GREEDY)[0]
        assert (again.tiers.window, again.tiers.ssd, again.tiers.lineage) == ("replay", 2976, 1)
