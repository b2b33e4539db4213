"""Rotary tables and rotation against golden ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.model.ops.rope import Turn, inverse_frequencies, rope_table, rotate, turn_at
from forwards import difference

Components = Callable[[str], dict[str, Tensor]]


def frequencies(kind: str, dim: int) -> Tensor:
    if kind == "window":
        return inverse_frequencies(dim, 10000.0)
    return inverse_frequencies(dim, 160000.0, factor=16.0, original=65536, beta_fast=32.0, beta_slow=1.0)


@pytest.mark.parametrize("kind", ["window", "compressed"])
@pytest.mark.parametrize(("model", "dim"), [("real", 64), ("tiny-a", 8)])
def test_tables_equal_golden(components: Components, model: str, dim: int, kind: str) -> None:
    g = components("rope")
    freqs = frequencies(kind, dim)
    assert difference(freqs, g[f"{model}.{kind}.inv_freq"]) is None
    positions = g["real.positions"] if model == "real" else torch.arange(200)
    for table, part in zip(rope_table(positions, freqs), ("cos", "sin"), strict=True):
        assert difference(table, g[f"{model}.{kind}.{part}"]) is None


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_angles_are_products_in_single_precision(components: Components, kind: str) -> None:
    """Near position 10^6 an exact product gives another table: ours must be off from it, as the reference is, and by no more."""
    g = components("rope")
    cos, _ = rope_table(g["real.positions"], frequencies(kind, 64))
    off = (cos.double() - g[f"real.{kind}.cos_fp64"]).abs().max().item()
    assert 1e-3 < off < 0.03


def test_yarn_check_values_of_the_specification() -> None:
    freqs = frequencies("compressed", 64)
    wanted = {0: 1.0, 1: 0.687656022, 15: 3.635538584e-3, 16: 2.265625e-3, 17: 1.396801255e-3, 20: 2.969777783e-4, 24: 1.953125e-5,
              25: 5.372312671e-6, 31: 5.680529037e-7}  # fmt: skip
    for pair, value in wanted.items():
        assert freqs[pair].item() == pytest.approx(value, rel=1e-6)


def test_no_magnitude_scaling(components: Components) -> None:
    cos, sin = rope_table(components("rope")["real.positions"], frequencies("compressed", 64))
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos), rtol=0, atol=1e-6)


def test_rotation_equals_golden(components: Components) -> None:
    """Neighbouring channels are pairs; the first 16 of 80 channels pass through."""
    g = components("rope")
    turn = turn_at(g["apply.positions"], frequencies("compressed", 64))
    found = rotate(g["apply.x"], turn)
    assert difference(found, g["apply.rotated"]) is None
    assert difference(rotate(found, turn, inverse=True), g["apply.rotated_then_inverse"]) is None
    assert torch.equal(found[..., :16], g["apply.x"][..., :16])
    assert difference(rotate(g["apply.x"][:, 1], turn), g["apply.rotated"][:, 1]) is None  # without a head dimension


def test_pairs_are_neighbours() -> None:
    x = torch.tensor([[9.0, 1.0, 0.0, 0.0, 2.0]], dtype=torch.bfloat16)
    quarter = Turn(torch.zeros(1, 4), torch.tensor([[-1.0, 1.0, -1.0, 1.0]]))
    assert rotate(x, quarter).tolist() == [[9.0, 0.0, 1.0, -2.0, 0.0]]
    assert rotate(rotate(x, quarter), quarter, inverse=True).tolist() == x.tolist()


def test_a_row_does_not_depend_on_the_batch() -> None:
    x = torch.randn(70, 4, 32, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    positions = torch.arange(70) * 9973
    freqs = frequencies("compressed", 8)
    whole = rotate(x, turn_at(positions, freqs))
    for n in (1, 2, 3, 5, 16, 33):
        for first in (0, 7, 30):
            part = slice(first, first + n)
            assert difference(rotate(x[part], turn_at(positions[part], freqs)), whole[part]) is None
