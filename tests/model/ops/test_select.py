"""Top-k selection: torch.topk over the whole row is the answer, ties included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.model.ops.select import block_maxima, select_top

Components = Callable[[str], dict[str, Tensor]]
INF = torch.inf


def truth(row: Tensor, k: int, width: int) -> list[int]:
    """torch.topk over one row of `width` columns, in ascending order, -1 filled."""
    full = torch.full((width,), -INF, dtype=row.dtype)
    full[: min(width, len(row))] = row[:width]
    best = torch.topk(full, min(k, width))
    chosen = sorted(int(i) for i, v in zip(best.indices, best.values, strict=True) if v > -INF)
    return chosen + [-1] * (k - len(chosen))


def tied_rows(n: int, m: int, levels: int, seed: int) -> Tensor:
    """Scores of few distinct values, -inf after a visible prefix that differs by row."""
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randint(0, levels, (n, m), generator=g).float() / 4 - 1).to(torch.bfloat16)
    visible = torch.randint(1, m + 1, (n, 1), generator=g)
    return scores.masked_fill(torch.arange(m) >= visible, -INF)


@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("levels", [1, 3, 40, 10000])
@pytest.mark.parametrize("m", [5, 64, 65, 300])
def test_equals_topk_over_the_full_row(k: int, levels: int, m: int) -> None:
    scores = tied_rows(20, m, levels, seed=m * levels)
    for extra in (0, 1, 77):
        widths = [m + extra] * 20
        assert select_top(scores, k, widths).tolist() == [truth(row, k, m + extra) for row in scores]


def test_the_width_is_each_rows_own() -> None:
    """Rows of several sequences in one tile: also rows whose own width is below the tile's."""
    scores = tied_rows(30, 100, 3, seed=5)
    widths = []
    for i, row in enumerate(scores):
        seen = int((row > -INF).sum())
        widths.append((seen, seen + 1, 100, 250)[i % 4])
    assert select_top(scores, 8, widths).tolist() == [truth(row, 8, w) for row, w in zip(scores, widths, strict=True)]


def test_a_row_does_not_depend_on_the_batch() -> None:
    scores = tied_rows(40, 200, 4, seed=6)
    whole = select_top(scores, 16, [200] * 40)
    for n in (1, 2, 7):
        assert torch.equal(select_top(scores[3 : 3 + n], 16, [200] * n), whole[3 : 3 + n])
    narrow = scores[:, :150]
    hidden = (scores[:, 150:] == -INF).all(1)
    assert torch.equal(select_top(narrow[hidden], 16, [200] * int(hidden.sum())), whole[hidden])  # a tile cut at what is visible


def test_chosen_columns_of_a_subset() -> None:
    """Columns at given positions of the full row, as candidate entries are: the same answer as the full row with the rest at -inf."""
    g = torch.Generator().manual_seed(7)
    width, m, k = 240, 48, 16
    full = torch.full((25, width), -INF, dtype=torch.bfloat16)
    scores = torch.full((25, m), -INF, dtype=torch.bfloat16)
    columns = torch.full((25, m), -1, dtype=torch.int64)
    for i in range(25):
        used = m - int(torch.randint(0, 20, (1,), generator=g))
        place = torch.randperm(width, generator=g)[:used].sort().values
        value = (torch.randint(0, 4, (used,), generator=g).float() / 2).to(torch.bfloat16)
        columns[i, :used], scores[i, :used], full[i, place] = place, value, value
    expected = [truth(row, k, width) for row in full]
    assert select_top(scores, k, [width] * 25, columns).tolist() == expected
    spread = torch.stack([columns[:, :24], columns[:, 24:]], 1)  # unused places in the middle too
    gap = torch.full((25, 2, 3), -1, dtype=torch.int64)
    wide = torch.cat((spread, gap), 2).flatten(1)
    halves = torch.stack([scores[:, :24], scores[:, 24:]], 1)
    wide_scores = torch.cat((halves, torch.full((25, 2, 3), -INF, dtype=torch.bfloat16)), 2).flatten(1)
    assert select_top(wide_scores, k, [width] * 25, wide).tolist() == expected


def test_ties_that_cannot_be_seen_by_values_alone() -> None:
    """Everything equal: the answer is still the full row's, for every width."""
    scores = torch.zeros((1, 64), dtype=torch.bfloat16)
    for width in (64, 65, 100, 4096):
        assert select_top(scores, 8, [width]).tolist() == [truth(scores[0], 8, width)]


@pytest.mark.case("B012")
@pytest.mark.parametrize("length", [14, 15, 16, 17, 18, 19])
def test_no_cliff_at_the_selection_size(length: int) -> None:
    """k = 16: needles at the start and in the middle stay chosen when the list first overflows."""
    scores = tied_rows(1, length, 5, seed=length)
    scores[0] = scores[0].masked_fill(scores[0] == -INF, -1.0)
    scores[0, 0] = scores[0, length // 2] = 5.0
    chosen = select_top(scores, 16, [length]).tolist()[0]
    assert {0, length // 2} <= set(chosen)
    assert chosen == truth(scores[0], 16, length)
    assert sum(i >= 0 for i in chosen) == min(16, length)


@pytest.mark.case("B011")
@pytest.mark.parametrize("size", [4096, 65536, 130_000, 260_000, 1 << 20])
def test_early_high_scores_are_found_at_every_size(size: int) -> None:
    g = torch.Generator().manual_seed(size)
    scores = torch.randn(2, size, generator=g).to(torch.bfloat16)
    planted = torch.randperm(size // 2, generator=g)[:100].sort().values
    scores[:, planted] = 50 + torch.arange(100).to(torch.bfloat16)
    chosen = select_top(scores, 512, [size, size + 1000])
    for row in range(2):
        assert set(planted.tolist()) <= set(chosen[row].tolist())
        kth = scores[row].float().sort(descending=True).values[511]
        assert (scores[row, chosen[row]].float() >= kth).all()
        assert len(set(chosen[row].tolist())) == 512
    maxima = block_maxima(scores, 8)
    assert maxima.shape == (2, size // 8)
    blocks = select_top(maxima, 2048 if size > 16384 else 256, [size // 8] * 2)
    assert set((planted // 8).tolist()) <= set(blocks[0].tolist())


def test_block_maxima() -> None:
    scores = torch.tensor([[1, 5, 2, -3, 7, 0, -INF], [-INF] * 7])
    assert block_maxima(scores, 3).tolist() == [[5, 7, -INF], [-INF, -INF, -INF]]
    assert block_maxima(scores, 7).tolist() == [[7], [-INF]]
    assert block_maxima(scores[:, :6], 3).tolist() == [[5, 7], [-INF, -INF]]


@pytest.mark.parametrize(("pool", "size"), [(2, 8), (3, 4), (5, 2), (100, 4)])
def test_candidate_masks_equal_golden(components: Components, pool: int, size: int) -> None:
    """Block maxima with the newest visible block pinned, and the best of them, as the indexer combines them."""
    g = components("primitives")
    scores, visible = g["candidates.scores"], g["candidates.visible"].long()
    hidden = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
    best = block_maxima(scores.masked_fill(hidden, -INF), size)
    best.scatter_(1, ((visible - 1) // size).unsqueeze(1).clamp(min=0), INF)
    blocks = select_top(best, pool, [best.shape[1]] * len(best))
    mask = torch.zeros((len(scores), best.shape[1] * size), dtype=torch.uint8)
    for row, chosen in enumerate(blocks.tolist()):
        for block in chosen:
            if block >= 0:
                mask[row, block * size : (block + 1) * size] = 1
    wanted = g[f"candidates.top{pool}_block{size}"]
    seen = ~hidden  # entries that are not visible yet may be in the golden mask: the causal mask comes on top of it
    assert torch.equal(mask[:, : scores.shape[1]] & seen, wanted & seen)


def test_a_row_that_is_not_finite_is_chosen_from_like_any_other() -> None:
    """It fails its own request later on; the other rows of the step must not notice."""
    scores = torch.full((2, 8), -torch.inf, dtype=torch.bfloat16)
    scores[0, :3] = torch.nan
    scores[1, :3] = torch.tensor([1.0, 3.0, 2.0])
    columns = torch.tensor([[0, 1, 2, -1, -1, -1, -1, -1], [1, 3, 4, -1, -1, -1, -1, -1]])
    found = select_top(scores, 4, [None, None], columns, torch.tensor([5, 5]))
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 3, 4]]
