"""The indexer over paged keys: selection and candidates against brute force, at every length it may meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import Tensor

from forebay.model.batch import HalfState, RowSet, Span
from forebay.model.config import LayerPlan, ModelConfig
from forebay.model.indexer import Indexer
from forebay.model.loading import Loader
from forebay.model.memory import CacheMemory
from forebay.model.ops import formats
from forebay.model.ops.backend import SERVING
from forebay.model.ops.linear import PlainWeight, TileCache
from forebay.model.ops.rope import turn_at

HEADS, DIM = 2, 32  # the score scale is then 1/8
INF = torch.inf
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=64,
    o_groups=1, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
    compress_ratios=(1, 1), kv_source_layer_ids=(0,), index_source_layer_ids=(0, 1), index_n_heads=HEADS, index_head_dim=DIM,
    index_topk=4, candidate_source_layer_id=0, candidate_topk_blocks=3, candidate_block_size=8,
)  # fmt: skip


@dataclass
class Plane:
    index_codes: Tensor
    index_scales: Tensor
    main_codes: Tensor
    main_scales: Tensor


class Identity:
    """In place of a layer's weights: queries and head weights are what the test passes in."""

    ops = SERVING

    def fp8(self, name: str) -> PlainWeight:
        return PlainWeight(torch.eye(HEADS * DIM), TileCache(1 << 20))

    def plain(self, name: str) -> PlainWeight:
        return PlainWeight(torch.eye(HEADS), TileCache(1 << 20))


def indexers(topk: int, pool: int, size: int, ratio: int = 1) -> tuple[Indexer, Indexer]:
    """The candidate source (layer 0) and a Reindex layer (layer 1) over its keys."""
    config = replace(CONFIG, index_topk=topk, candidate_topk_blocks=pool, candidate_block_size=size, compress_ratios=(ratio, ratio))
    plans: Sequence[LayerPlan] = config.topology().layers
    source, reader = (Indexer(config, plan, cast(Loader, Identity())) for plan in plans)
    assert source.makes
    assert reader.reads
    return source, reader


class History:
    """One sequence's keys in blocks of 64 tokens that lie in no order, and rows that read them."""

    def __init__(self, codes: Tensor, scales: Tensor, ratio: int = 1) -> None:
        self.ratio, self.per_block = ratio, 64 // ratio
        self.keys = formats.index_decode(codes, scales)
        blocks = -(-len(codes) // self.per_block)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks)) + 1
        planes = []
        for rows in (codes, scales):
            padded = torch.full((blocks * self.per_block, rows.shape[1]), 0xFF, dtype=torch.uint8)  # never written: NaN scales
            padded[: len(rows)] = rows
            plane = torch.zeros((blocks + 1, self.per_block, rows.shape[1]), dtype=torch.uint8)
            plane[order] = padded.view(blocks, self.per_block, -1)
            planes.append(plane)
        none = torch.empty(0)
        self.memory = CacheMemory(64, {0: Plane(planes[0], planes[1], none, none)}, none, none, none, {})
        self.table = order.tolist()

    def state(self, spans: Sequence[tuple[int, int]], prompt: int) -> HalfState:
        """Rows [start, stop) of each span, all reading this history."""
        rows = RowSet([(a, b, 0) for a, b in spans], torch.arange(len(spans)), 8, torch.device("cpu"))
        described = [Span(a, b, a, 0, 0, 0, prompt, i, self.table) for i, (a, b) in enumerate(spans)]
        return HalfState(rows, described, torch.tensor([self.table] * len(spans)), self.memory, None)

    def select(self, indexer: Indexer, state: HalfState, queries: Tensor, weights: Tensor) -> Tensor:
        """queries [HEADS, DIM] and weights [HEADS] for every row -> [rows, topk]."""
        n = state.rows.rows
        latent = queries.flatten().expand(n, -1).contiguous()
        x = weights.to(torch.bfloat16).expand(n, -1).contiguous()
        return indexer.select(x, latent, turn_at(state.rows.positions, torch.zeros(4)), state)

    def scores(self, queries: Tensor, weights: Tensor) -> Tensor:
        """[entries] bf16 by the formula, rounding by rounding."""
        total = torch.zeros(len(self.keys))
        for h in range(HEADS):
            dots = (self.keys.double() @ queries[h].double()).to(torch.bfloat16).clamp(min=0)
            total += (dots * (weights[h].to(torch.bfloat16) * 0.125)).float()
        return total.to(torch.bfloat16)


def topk(scores: Tensor, visible: int, width: int, k: int, allowed: set[int] | None = None) -> list[int]:
    row = torch.full((max(width, visible),), -INF, dtype=torch.bfloat16)
    row[:visible] = scores[:visible]
    if allowed is not None:
        row[[j for j in range(visible) if j not in allowed]] = -INF
    best = torch.topk(row, min(k, len(row)))
    chosen = sorted(int(j) for j, s in zip(best.indices, best.values, strict=True) if s > -INF)
    return chosen + [-1] * (k - len(chosen))


def pool_of(scores: Tensor, visible: int, width: int, pool: int, size: int) -> set[int]:
    """Entries of the best blocks; the newest visible block is always one of them."""
    row = torch.full((max(width, visible),), -INF, dtype=torch.bfloat16)
    row[:visible] = scores[:visible]
    best = torch.stack([row[b : b + size].max() for b in range(0, len(row), size)])
    best[(visible - 1) // size] = INF
    top = torch.topk(best, min(pool, len(best)))
    return {int(b) * size + t for b, s in zip(top.indices, top.values, strict=True) if s > -INF for t in range(size)}


def random_history(entries: int, ratio: int = 1, seed: int = 0) -> tuple[History, Tensor, Tensor]:
    """Keys, queries and head weights coarse enough for scores to tie."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (entries, DIM // 2), generator=g, dtype=torch.uint8) & 0xBB  # magnitudes up to 1.5
    scales = torch.randint(126, 128, (entries, 1), generator=g, dtype=torch.uint8)
    queries = torch.randint(-2, 3, (HEADS, DIM), generator=g).float()
    return History(codes, scales, ratio), queries, torch.tensor([0.5, -1.0])


@pytest.mark.case("B013")
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("shape", ["one forward", "chunks", "lone rows"])
def test_candidates_at_every_history_length(ratio: int, shape: str) -> None:
    """Lengths 1 to 40 around blocks of 8: the newest partial block is always in the pool, the future never chosen, the rest brute force."""
    k, pool, size, tokens = 4, 3, 8, 40 * ratio
    source, reader = indexers(k, pool, size, ratio)
    history, queries, weights = random_history(40, ratio)
    scores = history.scores(queries, weights)
    cuts = {"one forward": [0, tokens], "chunks": [0, 7, 8, 25, 33, tokens], "lone rows": list(range(tokens + 1))}[shape]
    if shape == "lone rows":  # decode rows of many sequences share a step
        states = [history.state([(p, p + 1) for p in range(first, tokens, 9)], tokens) for first in range(9)]
    else:
        states = [history.state([(a, b)], tokens) for a, b in pairwise(cuts)]
    seen = 0
    for state in states:
        own = history.select(source, state, queries, weights)
        chosen = history.select(reader, state, queries, weights)
        assert state.candidates is not None
        assert state.restricted is not None
        for i, position in enumerate(state.rows.positions.tolist()):
            visible, width = (position + 1) // ratio, tokens // ratio
            seen += 1
            assert own[i].tolist() == topk(scores, visible, width, k), position
            if not visible:
                assert (chosen[i] < 0).all()
                continue
            allowed = pool_of(scores, visible, width, pool, size)
            assert set(range((visible - 1) // size * size, visible)) <= allowed
            assert chosen[i].tolist() == topk(scores, visible, width, k, allowed), position
            assert all(j < visible for j in chosen[i].tolist())
            if bool(state.restricted[i]):
                published = {b * size + t for b in state.candidates[i].tolist() if b >= 0 for t in range(size)}
                assert published == allowed, position
            else:
                assert set(range(visible)) <= allowed  # the pool holds everything: no restriction is right
    assert seen == tokens


@pytest.mark.parametrize("chunk", [40, 7, 1])
@pytest.mark.parametrize(("k", "pool", "size"), [(4, 1, 3), (12, 3, 1), (16, 2, 8), (30, 2, 8)])
def test_a_pool_smaller_than_the_selection(k: int, pool: int, size: int, chunk: int) -> None:
    """Such small configurations only: the reference's top-k goes on among the masked scores and keeps what of them is visible."""
    source, reader = indexers(k, pool, size)
    history, queries, weights = random_history(40)
    scores, filled = history.scores(queries, weights), 0
    for start in range(0, 40, chunk):
        state = history.state([(start, min(start + chunk, 40))], 40)
        history.select(source, state, queries, weights)
        chosen = history.select(reader, state, queries, weights)
        for i, position in enumerate(state.rows.positions.tolist()):
            visible = position + 1
            allowed = pool_of(scores, visible, 40, pool, size)
            row = torch.full((40,), -INF, dtype=torch.bfloat16)
            row[:visible] = scores[:visible]
            row[[j for j in range(40) if j not in allowed]] = -INF
            wanted = sorted(j for j in torch.topk(row, k).indices.tolist() if j < visible)
            if visible <= pool * size:  # no restriction yet
                wanted = [j for j in topk(scores, visible, 40, k) if j >= 0]
            assert [j for j in chosen[i].tolist() if j >= 0] == wanted, position
            filled += any(j not in allowed for j in wanted)
    assert filled


@pytest.mark.case("B012")
@pytest.mark.parametrize("ratio", [1, 2])
def test_no_cliff_where_selection_begins(ratio: int) -> None:
    """k-2 to k+3 entries around k = 16, with needles at the start and in the middle."""
    source, _ = indexers(16, 100, 8, ratio)
    for visible in range(14, 20):
        history, queries, weights = random_history(visible, ratio, seed=visible)
        queries[0] = 2.0
        best = formats.index_encode(torch.full((1, DIM), 6.0))
        codes, scales = formats.index_encode(history.keys)
        for needle in (0, visible // 2):
            codes[needle], scales[needle] = best[0][0], best[1][0]
        history = History(codes, scales, ratio)
        tokens = visible * ratio
        for start in (0, tokens - 1):
            state = history.state([(start, tokens)], tokens)
            chosen = history.select(source, state, queries, weights)[-1].tolist()
            assert chosen == topk(history.scores(queries, weights), visible, visible, 16)
            assert {0, visible // 2} <= set(chosen)


@pytest.mark.case("B011")
@pytest.mark.parametrize("size", [4096, 65536, 130_001, 260_000, 1 << 20])
def test_planted_entries_are_found_at_every_size(size: int) -> None:
    """The released selection sizes (512 entries, 2048 blocks of 8): a lone row at the end finds what lies early, through the pool too."""
    source, reader = indexers(512, 2048, 8)
    g = torch.Generator().manual_seed(size)
    codes = torch.randint(0, 256, (size, DIM // 2), generator=g, dtype=torch.uint8)
    scales = torch.full((size, 1), 124, dtype=torch.uint8)
    planted = torch.randperm(size // 4, generator=g)[:60].sort().values
    queries = torch.where(torch.rand(HEADS, DIM, generator=g) < 0.5, -3.0, 3.0)
    codes[planted] = formats.pack_nibbles(torch.where(queries[0] < 0, 15, 7).to(torch.uint8))  # ±6 along the first query
    scales[planted, 0] = torch.arange(124, 184).to(torch.uint8) // 20 + 120
    history, weights = History(codes, scales), torch.tensor([1.0, 0.25])
    scores = history.scores(queries, weights)
    cut = scores.float().sort(descending=True).values[511]
    state = history.state([(size - 1, size)], size)
    for indexer in (source, reader):
        chosen = history.select(indexer, state, queries, weights)[0]
        assert set(planted.tolist()) <= set(chosen.tolist())
        assert len(set(chosen.tolist())) == 512
        assert (scores[chosen].float() >= cut).all() or indexer is reader
        if indexer is source:
            assert chosen.tolist() == topk(scores, size, size, 512)
    assert state.restricted is not None
    assert bool(state.restricted[0]) == (size > 16384)
    if state.restricted[0]:
        assert chosen.tolist() == topk(scores, size, size, 512, pool_of(scores, size, size, 2048, 8))


def test_what_a_row_selects_does_not_depend_on_the_step() -> None:
    """One span alone, the same span beside others of other lengths, and its rows one by one."""
    source, reader = indexers(8, 4, 4)
    history, queries, weights = random_history(120, seed=3)
    whole = history.state([(0, 120)], 120)
    wanted = [history.select(each, whole, queries, weights) for each in (source, reader)]
    for spans in ([(100, 120), (3, 4), (50, 51), (0, 30)], [(119, 120), (118, 119), (60, 61), (5, 6)]):
        state = history.state(spans, 120)
        for each, truth in zip((source, reader), wanted, strict=True):
            assert torch.equal(history.select(each, state, queries, weights), truth[state.rows.positions])


def test_small_scan_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = indexers(8, 4, 4)
    history, queries, weights = random_history(120, seed=4)
    spans = [(0, 100), (70, 71), (71, 72), (119, 120)]
    state = history.state(spans, 120)
    wanted = [history.select(each, state, queries, weights) for each in (source, reader)]
    monkeypatch.setattr("forebay.model.indexer.SCAN_BYTES", 4 * HEADS * 120 * 3)
    state = history.state(spans, 120)
    for each, truth in zip((source, reader), wanted, strict=True):
        assert torch.equal(history.select(each, state, queries, weights), truth)


def test_a_generated_token_is_judged_over_what_it_sees() -> None:
    """The width that settles ties: the whole prompt's for prompt rows, the visible entries for later ones (as the reference does)."""
    source, _ = indexers(8, 100, 8)
    codes, scales = formats.index_encode(torch.ones(60, DIM))
    history, queries, weights = History(codes, scales), torch.ones(HEADS, DIM), torch.tensor([1.0, 1.0])
    state = history.state([(30, 60)], prompt=45)
    chosen = history.select(source, state, queries, weights)
    scores = history.scores(queries, weights)
    for i, position in enumerate(range(30, 60)):
        width = 45 if position < 45 else position + 1
        assert chosen[i].tolist() == topk(scores, position + 1, width, 8)
