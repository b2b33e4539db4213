"""The selection kernels, interpreted, against `select_top`: the same columns at every tie, length and odd number."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from forebay.model.ops.kernels import select_ops
from forebay.model.ops.select import block_maxima, select_top

INF = torch.inf
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def adversarial(m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores [9, m] and visible lengths: ties, all equal, both zeros, denormals, infinities, random numbers of all sizes."""
    g = torch.Generator().manual_seed(seed + m)
    scores = torch.randn((9, m), generator=g)
    scores[0] = 1.0
    scores[1] = torch.randint(0, 3, (m,), generator=g).float() - 1
    scores[2] = torch.where(torch.rand(m, generator=g) < 0.5, 0.0, -0.0)
    scores[3] = torch.randn(m, generator=g) * 1e-39
    scores[4] = torch.randn(m, generator=g) * torch.exp2(torch.randint(-100, 100, (m,), generator=g).float())
    scores[5, torch.rand(m, generator=g) < 0.7] = -INF
    scores[6, torch.rand(m, generator=g) < 0.1] = INF
    scores[7] = -torch.arange(m).float()
    scores[8] = torch.arange(m).float()
    visible = torch.randint(1, m + 1, (9,), generator=g, dtype=torch.int32)
    visible[0] = visible[4] = m
    return scores.to(torch.bfloat16), visible


def hide(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[1]) >= visible.unsqueeze(1), -INF)


def top(scores: Tensor, visible: Tensor | None, k: int) -> Tensor:
    out = torch.full((len(scores), k), -7, dtype=torch.int32)
    return select_ops.top_columns(scores, visible, k, out)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (5, 8), (7, 8), (8, 8), (9, 8), (65, 16), (300, 17)])
@pytest.mark.parametrize("direct", [4096, 16])
def test_equals_the_reference(m: int, k: int, direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched whole, and by runs."""
    monkeypatch.setattr(select_ops, "DIRECT", direct)
    scores, visible = adversarial(m)
    expected = select_top(hide(scores, visible), k, [None] * 9)
    assert top(scores, visible, k).tolist() == expected.tolist()
    assert top(hide(scores, visible), None, k).tolist() == expected.tolist()


def test_visible_lengths_around_k_and_zero() -> None:
    scores, _ = adversarial(40)
    visible = torch.tensor([0, 1, 6, 7, 8, 9, 39, 40, 50], dtype=torch.int32)
    assert top(scores, visible, 8).tolist() == select_top(hide(scores, visible), 8, [None] * 9).tolist()


def test_nan_counts_as_the_best() -> None:
    scores = torch.tensor([[1, torch.nan, 3, INF, 2, -torch.nan]], dtype=torch.bfloat16)
    assert top(scores, None, 3).tolist() == [[1, 3, 5]]


def test_a_long_row_in_runs() -> None:
    """More columns than one program holds at a time, ties at the cut, needles early on."""
    g = torch.Generator().manual_seed(1)
    scores = (torch.randn((3, 70_001), generator=g) * 4).round().to(torch.bfloat16)
    scores[1] = 2.0
    scores[0, 5:300:3] = 100.0
    visible = torch.tensor([70_001, 69_999, 40_000], dtype=torch.int32)
    assert select_ops.run_size(70_001, 512) == 16
    assert top(scores, visible, 512).tolist() == select_top(hide(scores, visible), 512, [None] * 3).tolist()


def test_rows_of_a_wider_buffer() -> None:
    scores, visible = adversarial(100)
    assert torch.equal(top(scores[:, :60], visible.clamp(max=60), 8), top(scores[:, :60].contiguous(), visible.clamp(max=60), 8))


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("m", [1, 63, 130])
def test_run_maxima_and_candidate_blocks(m: int, pin: bool) -> None:
    scores, visible = adversarial(m)
    best = block_maxima(hide(scores, visible), 8)
    if pin:
        best.scatter_(1, ((visible.long() - 1) // 8).unsqueeze(1), INF)
    out = torch.empty_like(best)
    assert torch.equal(select_ops.run_maxima(scores, visible, 8, out, pin=pin), best)
    blocks = select_ops.top_columns(out, visible, 4, torch.empty((9, 4), dtype=torch.int32), unit=8)
    assert blocks.tolist() == select_top(best, 4, [None] * 9).tolist()


@pytest.mark.parametrize("direct", [4096, 16])
def test_candidates(direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the entries of candidate blocks: the answer is in positions of the sequence."""
    monkeypatch.setattr(select_ops, "DIRECT", direct)
    pool, size, k = 16, 4, 10
    scores, visible = adversarial(400)
    g = torch.Generator().manual_seed(2)
    blocks = torch.full((9, pool), -1, dtype=torch.int32)
    for row in range(9):
        there = -(-int(visible[row]) // size)
        used = min(pool, there)
        blocks[row, :used] = torch.randperm(there, generator=g)[:used].sort().values
    entries = (blocks.long().unsqueeze(-1) * size + torch.arange(size)).flatten(1)
    bad = (entries < 0) | (entries >= visible.unsqueeze(1))
    part = scores.gather(1, entries.clamp(min=0, max=399)).masked_fill(bad, -INF)
    expected = select_top(part, k, [None] * 9, entries.masked_fill(bad, -1), visible.long())
    found = select_ops.top_candidates(part, blocks, size, k, torch.empty((9, k), dtype=torch.int32))
    plenty = (part > -INF).sum(1) >= k
    assert plenty.sum() >= 5
    assert found[plenty].tolist() == expected[plenty].tolist()
    lowest = select_top(part, k, [None] * 9)  # by column of `part`, whose entries ascend
    assert found.tolist() == torch.where(lowest >= 0, entries.gather(1, lowest.clamp(min=0)), -1).tolist()


def test_a_pool_below_k_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the 8 entries"):
        select_ops.top_candidates(
            torch.zeros((1, 8), dtype=torch.bfloat16), torch.zeros((1, 2), dtype=torch.int32), 4, 9, torch.empty((1, 9), dtype=torch.int32)
        )
