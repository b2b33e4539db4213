"""Plans: tokens that fit, the machine's figures, and faults of a checkpoint told beside its sizes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forebay.engine.plan import Machine, kv_tokens_in, plan
from forebay.model.errors import ConfigError

BLOCK = 113_920  # bytes of 128 tokens of the released model


def test_size_of_the_kv_cache_is_turned_into_whole_blocks() -> None:
    assert kv_tokens_in("synthetic:v41-flash", 3 * BLOCK + BLOCK - 1) == 3 * 128


def test_size_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"is {BLOCK - 1}, one block of this model takes {BLOCK}"):
        kv_tokens_in("synthetic:v41-flash", BLOCK - 1)


def test_last_block_and_missing_byte() -> None:
    """The memory that holds exactly one block fits; one byte less lacks one byte of it."""
    found = plan("demo", memory=10**9, sequences=4, work_bytes=1000)
    fixed = found.weights + 1000 + 4 * found.bytes_per_sequence
    just = plan("demo", memory=fixed + found.block_bytes, sequences=4, work_bytes=1000)
    assert (just.tokens, just.short, just.fits) == (found.block_tokens, 0, True)
    less = plan("demo", memory=fixed + found.block_bytes - 1, sequences=4, work_bytes=1000)
    assert (less.tokens, less.short, less.fits) == (0, 0, False)
    lacking = plan("demo", memory=fixed - 7, sequences=4, work_bytes=1000)
    assert (lacking.tokens, lacking.short, lacking.fits) == (0, 7, False)


def test_sizes_of_a_checkpoint_are_those_of_its_files(golden: Path) -> None:
    folder = golden / "tiny-a" / "checkpoint"
    found = plan(str(folder))
    stored = (folder / "model.safetensors").stat().st_size
    assert 0 < stored - found.weights - found.tables < 0.2 * stored  # the rest is the header
    assert found.faults is None


def test_faulty_checkpoint_is_planned_with_its_faults(golden: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(golden / "tiny-a" / "checkpoint" / name, tmp_path / name)
    whole = plan(str(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    broken = plan(str(tmp_path))
    assert broken.faults is not None
    assert "model.safetensors" in broken.faults
    assert broken.parts == whole.parts


def test_machine_is_described_for_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    machine = Machine.here(tmp_path / "not" / "yet")
    assert 0 < machine.memory_free <= machine.memory
    assert machine.cores >= 1
    assert machine.disk_free > 0
