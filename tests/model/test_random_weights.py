"""Random weights: the same bytes everywhere, in the stored formats, of a size that activations bear."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from forebay.model.checkpoint import Checkpoint
from forebay.model.random_weights import encode_fp8, encode_mxfp4, special_ids
from noise_model import TOKENIZER, noise_checkpoint, write_noise

DIGEST = "0d96ee77d7655e3fc2cd72b0768d46c006a392014e0fd9bf9deed55bf3c32d82"  # changes only with a new NOISE


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noise")
    write_noise(folder)
    return folder


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        total.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def test_bytes_are_the_same_everywhere(noise: Path) -> None:
    assert digest(noise) == DIGEST == digest(noise_checkpoint())


def test_special_tokens_are_never_preferred(noise: Path) -> None:
    checkpoint = Checkpoint.open(noise, scan=False)
    head = checkpoint.tensor("head.weight").float()
    silent = list(special_ids(TOKENIZER, checkpoint.config))
    assert not head[silent].any()
    spoken = torch.ones(head.shape[0], dtype=torch.bool)
    spoken[silent] = False
    assert bool(head[spoken].abs().amax(1).gt(0).all())


def test_weights_keep_activations_in_size(noise: Path) -> None:
    """Every stored matrix maps numbers of deviation 1 to numbers of deviation about 1."""
    checkpoint = Checkpoint.open(noise, scan=False)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    powers = torch.pow(2.0, torch.arange(256) - 127.0)
    for name, spec in checkpoint.specs.items():
        if spec.dtype not in ("F8_E4M3", "I8") or spec.part == "engram tables":
            continue
        stored = checkpoint.tensor(name)
        scale = powers[checkpoint.tensor(name.removesuffix("weight") + "scale").int()]
        if spec.dtype == "I8":
            codes = torch.stack([stored & 15, stored >> 4], 2).flatten(1).int()
            matrix = values[codes & 7] * (1 - 2 * (codes >> 3)) * scale.repeat_interleave(32, 1)
        else:
            matrix = stored.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        assert 0.9 < float(matrix.std()) * matrix.shape[1] ** 0.5 < 1.1, name


def test_encoders_match_the_formats(golden: Path) -> None:
    stored = safetensors.torch.load_file(golden / "components" / "weight_formats.safetensors")
    grid = stored["e4m3.value_fp32"]
    codes = stored["e4m3.byte"].view(torch.uint8)
    finite = ~torch.isnan(grid)
    tile = torch.zeros(8, 32)
    tile.view(-1)[: int(finite.sum())] = grid[finite]
    encoded, scale = encode_fp8(tile.numpy(), tile_rows=8)
    assert scale.tolist() == [[127]]
    assert torch.equal(encoded.view(-1)[: int(finite.sum())], codes[finite])

    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, 6, 0, 0.3] + [0.0] * 20, dtype=np.float32)
    packed, scale = encode_mxfp4(ties[None])
    unpacked = torch.stack([packed & 15, packed >> 4], 2).view(-1)
    assert scale.tolist() == [[127]]
    assert unpacked[:12].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 7, 0, 1]
    _, scale = encode_mxfp4(ties[None] * np.float32(1.01))
    assert scale.tolist() == [[128]]  # 6.06 needs the next power of two
    rows = np.linspace(-1, 1, 40 * 48, dtype=np.float32).reshape(40, 48)
    codes40, scales40 = encode_fp8(rows, tile_rows=32)
    assert codes40.shape == (40, 48)
    assert scales40.shape == (2, 2)
