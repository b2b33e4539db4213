"""The selection kernels, interpreted, against `select_top`: the same columns at every tie, length and odd number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.model.ops.kernels import select_ops
from forebay.model.ops.select import block_maxima, select_top

INF = torch.inf
pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((select_ops, "top_columns top_candidates run_maxima"),)


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


def reference(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """`select_top`, and all that a row sees where that is no more than k."""
    found = select_top(hide(scores, visible), k, [None] * len(scores))
    for row in (visible <= k).nonzero().flatten().tolist():
        count = int(visible[row])
        found[row] = torch.cat((torch.arange(count), torch.full((k - count,), -1)))
    return found


def small(monkeypatch: pytest.MonkeyPatch, direct: int = 16, tile: int = 64, runs: int = 64) -> None:
    """Rows of more than `direct` columns have at most `runs` runs; a program holds `tile` columns at a time."""
    for name, value in (("DIRECT", direct), ("TILE", tile), ("RUNS", runs)):
        monkeypatch.setattr(select_ops, name, value)


@pytest.mark.parametrize(
    ("m", "k", "direct", "tile", "runs"),
    [
        (1, 1, 64, 64, 64), (5, 8, 64, 64, 64), (7, 8, 64, 64, 64), (9, 8, 64, 64, 64), (65, 16, 128, 128, 64), (65, 16, 128, 32, 64),
        (65, 16, 16, 32, 64), (300, 17, 16, 64, 64), (301, 3, 16, 32, 128),
    ],
)  # fmt: skip
def test_equals_the_reference(m: int, k: int, direct: int, tile: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched whole, in one piece or several, and by runs."""
    small(monkeypatch, direct, tile, runs)
    scores, visible = adversarial(m)
    assert top(scores, visible, k).tolist() == reference(scores, visible, k).tolist()
    if m > 1:
        hidden = hide(scores, visible)
        assert top(hidden, None, k).tolist() == select_top(hidden, k, [None] * 9).tolist()


@pytest.mark.parametrize("direct", [16384, 16])
def test_what_lies_behind_the_visible_is_never_read_as_a_choice(direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a captured graph: much capacity, few columns that count, anything behind them, and in the working memory too."""
    small(monkeypatch, direct)
    k, m = 8, 333
    scores, _ = adversarial(m)
    visible = torch.tensor([0, 1, 7, 8, 9, 31, 33, 65, 332], dtype=torch.int32)
    dirty = torch.where(torch.arange(m) % 2 > 0, torch.nan, INF).to(torch.bfloat16).expand(9, m)
    dirty = torch.where(torch.arange(m) < visible.unsqueeze(1), scores, dirty)
    memory = select_ops.scratch(9, m, k, "cpu")
    memory.maxima.fill_(INF)
    memory.groups.fill_(2**30)
    memory.short.fill_(2**30)
    out = torch.full((9, k), -7, dtype=torch.int32)
    assert (memory.size > 0) == (direct == 16)
    select_ops.top_columns(dirty, visible, k, out, memory)
    assert out.tolist() == reference(scores, visible, k).tolist()


def test_few_columns_need_no_scores() -> None:
    scores = torch.full((2, 8), torch.nan, dtype=torch.bfloat16)
    scores[1] = -INF
    assert top(scores, torch.tensor([3, 4], dtype=torch.int32), 4).tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]


@pytest.mark.parametrize(("m", "k", "pin"), [(130, 8, False), (317, 3, True)])
def test_given_maxima(m: int, k: int, pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima of 4 columns, the newest run's too large: the same answer."""
    small(monkeypatch)
    scores, visible = adversarial(m)
    maxima = torch.full((9, -(-m // 4)), torch.nan, dtype=torch.bfloat16)
    select_ops.run_maxima(scores, visible, 4, maxima, pin=pin)
    memory = select_ops.scratch(9, m, k, "cpu", size=4)
    assert memory.size >= 8
    out = torch.empty((9, k), dtype=torch.int32)
    select_ops.top_columns(scores, visible, k, out, memory, maxima=maxima, size=4)
    assert out.tolist() == reference(scores, visible, k).tolist()


@pytest.mark.parametrize("cluster", [40, 200])
def test_more_equal_columns_than_are_written_down(cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose best columns lie together, and rows of few values: the search goes over all columns then."""
    small(monkeypatch, tile=128, runs=128)
    g = torch.Generator().manual_seed(cluster)
    scores = torch.rand((4, 1001), generator=g)
    scores[0, 500 : 500 + cluster] += 2.0
    scores[1, 7 : 7 + cluster] = 3.0
    scores[2, ::3] = 5.0
    scores[3, 1001 - cluster :] = torch.arange(cluster).float()
    scores, visible = scores.to(torch.bfloat16), torch.tensor([1001, 1001, 999, 1000], dtype=torch.int32)
    assert select_ops.run_size(4, 1001) == 8
    assert top(scores, visible, 8).tolist() == reference(scores, visible, 8).tolist()


def test_the_most_columns_that_can_be_chosen() -> None:
    with pytest.raises(ValueError, match="k must be at most 4096"):
        select_ops.scratch(4, 10_001, 4097, "cpu")


def test_visible_lengths_around_k_and_zero() -> None:
    scores, _ = adversarial(40)
    visible = torch.tensor([0, 1, 6, 7, 8, 9, 39, 40, 50], dtype=torch.int32)
    assert top(scores, visible, 8).tolist() == reference(scores, visible.clamp(max=40), 8).tolist()


@pytest.mark.parametrize("direct", [16384, 1])
def test_nan_counts_as_the_best(direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either sign, as many as there are +inf: the lower column wins."""
    small(monkeypatch, direct)
    scores = torch.tensor([[1, torch.nan, 3, INF, 2, -torch.nan, *range(7), INF, torch.nan]], dtype=torch.bfloat16)
    scores.view(torch.int16)[0, 5] = -1  # a NaN with its sign set
    assert top(scores, None, 3).tolist() == [[1, 3, 5]]
    assert top(scores.flip(1).contiguous(), None, 3).tolist() == [[0, 1, 9]]


def test_a_long_row_in_runs() -> None:
    """More columns than one program holds at a time, ties at the cut, needles early on."""
    g = torch.Generator().manual_seed(1)
    scores = (torch.randn((3, 70_001), generator=g) * 4).round().to(torch.bfloat16)
    scores[1] = 2.0
    scores[0, 5:300:3] = 100.0
    visible = torch.tensor([70_001, 69_999, 40_000], dtype=torch.int32)
    assert select_ops.run_size(3, 70_001) == 8  # a row of odd length, so that its last run is short
    expected = select_top(hide(scores, visible), 512, [None] * 3).tolist()
    assert top(scores, visible, 512).tolist() == expected
    maxima = torch.full((3, 8751), torch.nan, dtype=torch.bfloat16)
    select_ops.run_maxima(scores, visible, 8, maxima, pin=True)
    out = torch.empty((3, 512), dtype=torch.int32)
    assert select_ops.top_columns(scores, visible, 512, out, maxima=maxima).tolist() == expected


@pytest.mark.parametrize(("m", "k"), [(4096, 512), (16_385, 512), (131_072, 2048), (260_001, 512), (1_048_576, 512)])
def test_adversarial_rows_of_real_length(m: int, k: int) -> None:
    """Lengths around k, odd ones and whole rows, by one search or by runs; on a GPU also of many rows at once."""
    if m > 4096 and not torch.cuda.is_available():
        pytest.skip("too long for the interpreter")
    scores, visible = adversarial(m)
    expected = reference(scores, visible, k)
    assert torch.equal(top(scores, visible, k).long(), expected)
    if m <= 16_385 and torch.cuda.is_available():
        many = top(scores.repeat(16, 1), visible.repeat(16), k)
        assert torch.equal(many.long(), expected.repeat(16, 1))
    for lengths in ([0, 1, k - 1, k, k + 1, k + 2, m // 2 + 1, m - 1, m], [m - 7, m - 8, m - 9, 20_001, 2049, 1025, 4097, 8191, 513]):
        seen = torch.tensor(lengths, dtype=torch.int32).clamp(max=m)
        assert torch.equal(top(scores, seen, k).long(), reference(scores, seen, k))


def test_rows_of_a_wider_buffer() -> None:
    scores, visible = adversarial(100)
    assert torch.equal(top(scores[:, :60], visible.clamp(max=60), 8), top(scores[:, :60].contiguous(), visible.clamp(max=60), 8))


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("m", [1, 63, 130])
def test_run_maxima_and_candidate_blocks(m: int, pin: bool) -> None:
    scores, visible = adversarial(m)
    best = block_maxima(hide(scores, visible), 8)
    seen = torch.arange(best.shape[1]) * 8 < visible.unsqueeze(1)
    if pin:
        best.scatter_(1, ((visible.long() - 1) // 8).unsqueeze(1), INF)
    out = torch.full_like(best, torch.nan)
    assert torch.equal(select_ops.run_maxima(scores, visible, 8, out, pin=pin)[seen], best[seen])
    blocks = select_ops.top_columns(out, visible, 4, torch.empty((9, 4), dtype=torch.int32), unit=8)
    assert blocks.tolist() == reference(best, (visible + 7) // 8, 4).tolist()


@pytest.mark.parametrize("direct", [16384, 16])
def test_candidates(direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the entries of candidate blocks: the answer is in positions of the sequence."""
    small(monkeypatch, direct)
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


def test_bench_cases_run_small() -> None:
    for case in select_ops.bench_cases():
        assert case.bytes_floor > 0
        if case.name == "top 512 of 1 x 16384":
            inputs = case.make_inputs(torch.device("cpu"))
            scores, k = inputs[0], inputs[2]
            assert case.run(*inputs).tolist() == select_top(scores, k, [None]).tolist()
    assert set(select_ops.tuning_space()) <= set(vars(select_ops))
