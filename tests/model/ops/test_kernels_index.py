"""The indexer's kernels, interpreted, against the torch operations."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.gather import entry_places, gather_index
from forebay.model.ops.index_score import index_scores
from forebay.model.ops.kernels import index_ops, select_ops
from forebay.model.ops.kernels.index_ops import Keys, Tiles, Tuning
from forebay.model.ops.rope import inverse_frequencies, rotate, turn_at
from forebay.model.ops.select import block_maxima

INF = torch.inf
pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((index_ops, "round_queries query_values score_keys score_candidates"), (select_ops, "top_columns"))


@pytest.mark.parametrize(("heads", "dim", "width"), [(32, 128, 64), (3, 32, 8), (2, 64, 64)])
def test_queries(heads: int, dim: int, width: int) -> None:
    g = torch.Generator().manual_seed(heads)
    q = torch.randn((5, heads, dim), generator=g)
    q[1] = 0.0
    q[2] *= torch.exp2(torch.randint(-40, 40, (heads, dim), generator=g).float())
    q[3] = torch.randint(-24, 25, (heads, dim), generator=g) / 4  # on the borders between codes
    q[4] *= 6 * 448
    q[0, 0, 0] = torch.nan
    q = q.to(torch.bfloat16)
    frequencies = inverse_frequencies(width, 160000.0)
    position = torch.tensor([0, 1, 77, 0, 1_000_000])
    turn = turn_table(position, frequencies)
    expected = formats.index_round(rotate(q, turn_at(position, frequencies)))
    found = index_ops.query_values(index_ops.round_queries(q, turn, index_ops.empty_queries(5, heads, dim, "cpu")))
    whole = expected.isnan().unflatten(-1, (-1, 32)).any(-1, keepdim=True).expand(-1, -1, -1, 32).flatten(2)
    assert torch.equal(found.isnan(), whole) and whole.any()
    assert torch.equal(found[~whole], expected[~whole])


def test_queries_of_unlike_groups() -> None:
    """A group of 2^-28 of the largest of its head is still exact, E5M2's least codes included."""
    q = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0]).repeat(16).view(1, 1, 128).repeat(1, 2, 1)
    q[0, 0, 32:64] *= 2.0**-28
    q[0, 1, :96] *= 2.0**-9
    q = q.to(torch.bfloat16)
    turn = turn_table(torch.zeros(1, dtype=torch.int64), inverse_frequencies(64, 160000.0))
    found = index_ops.query_values(index_ops.round_queries(q, turn, index_ops.empty_queries(1, 2, 128, "cpu")))
    assert torch.equal(found, q.float())


def turn_table(position: Tensor, frequencies: Tensor) -> Tensor:
    """As `store_ops.turn_table` lays it out, of the reference's numbers."""
    turn = turn_at(position, frequencies)
    return torch.stack((turn.cos[:, ::2], turn.sin[:, 1::2]), 1).contiguous()


class Problem:
    """Two spans with pages in random order inside blocks that hold other planes too."""

    def __init__(self, heads: int, dim: int, entries: int, visible: list[int], span: list[int], *, exact: bool, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        pages, n = 2 * (300 // entries + 1) + 1, len(visible)
        row = dim // 2 + dim // 32
        stride = entries * row + 96
        pool = torch.randint(0, 256, (pages, stride), dtype=torch.uint8, generator=g)
        codes = pool.as_strided((pages, entries, dim // 2), (stride, dim // 2, 1), 32)
        scales = pool.as_strided((pages, entries, dim // 32), (stride, dim // 32, 1), 32 + entries * dim // 2)
        scales.copy_(torch.randint(*((127, 128) if exact else (120, 130)), scales.shape, dtype=torch.uint8, generator=g))
        codes[0], scales[0] = 0, 0
        self.pages = codes, scales
        self.table = (torch.randperm(pages - 1, generator=g) + 1).view(2, -1)
        self.keys = Keys(codes, scales, self.table.to(torch.int32))
        q = torch.randint(-1, 2, (n, heads, dim), generator=g).float() if exact else torch.randn((n, heads, dim), generator=g)
        self.q = formats.index_round(q)
        weights = torch.randint(-2, 3, (n, heads), generator=g).float() if exact else torch.randn((n, heads), generator=g)
        self.weights = weights.to(torch.bfloat16)
        self.visible, self.span, self.entries = torch.tensor(visible, dtype=torch.int32), torch.tensor(span, dtype=torch.int32), entries

    def expected(self, entries: Tensor) -> Tensor:
        """Reference scores of entries [n, m], -1 is -inf."""
        block, place = entry_places(self.table, self.span.long(), entries, self.entries)
        scores = index_scores(self.q, self.weights, gather_index(*self.pages, block, place))
        return scores.masked_fill(entries < 0, -INF)

    def args(self) -> tuple[Tensor, Tensor, Keys]:
        n, heads, dim = self.q.shape
        turn = torch.tensor([1.0, 0.0]).view(1, 2, 1).repeat(n, 1, dim // 4)
        q = index_ops.round_queries(self.q.to(torch.bfloat16), turn, index_ops.empty_queries(n, heads, dim, "cpu"))
        return q, self.weights, self.keys


def assert_scores(found: Tensor, expected: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(found, expected)
        return
    hidden = expected == -INF
    assert torch.equal(found == -INF, hidden)
    a, b = found.float().masked_fill(hidden, 0), expected.float().masked_fill(hidden, 0)
    assert ((a - b).abs() <= b.abs() * 2.0**-7 + 0.02).all()
    assert (a == b).float().mean() > 0.98


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("heads", "dim", "entries"), [(32, 128, 128), (3, 32, 12), (4, 64, 8)])
def test_scan(heads: int, dim: int, entries: int, exact: bool) -> None:
    """Two rows of one span share a scan, a row of the other has its own, a tile without rows does nothing; 0 and 1 visible entries."""
    visible = [130, 131, 1, 257, 0]
    p = Problem(heads, dim, entries, visible, [0, 0, 1, 1, 1], exact=exact)
    tiles = Tiles(torch.tensor([0, 2, 3, 4, 0], dtype=torch.int32), torch.tensor([2, 1, 1, 1, 0], dtype=torch.int32))
    m = 259
    column = torch.arange(m).expand(5, m)
    expected = p.expected(column.masked_fill(column >= p.visible.unsqueeze(1), -1))
    out = torch.full((5, m), -INF, dtype=torch.bfloat16)
    runs = torch.full((5, -(-m // 8)), -INF, dtype=torch.bfloat16)
    index_ops.score_keys(*p.args(), tiles, p.span, p.visible, out, maxima=runs, size=8)
    assert_scores(out, expected, exact)
    best = block_maxima(out, 8)
    for row, seen in enumerate(visible):
        if seen:
            best[row, (seen - 1) // 8] = INF
    assert torch.equal(runs, best)
    alone = torch.full_like(out, -INF)  # a row's scores are the same whoever shares its scan
    one = torch.ones(1, dtype=torch.int32)
    index_ops.score_keys(*p.args(), Tiles(one, one, 1), p.span, p.visible, alone)
    assert torch.equal(alone[1], out[1]) and (alone[0] == -INF).all()


def test_tuning_changes_no_score() -> None:
    """Lone rows of unlike lengths in one scan, behind a tile that sees nothing; `out` is shorter than what some of them see."""
    visible = [0, 290, 5, 128, 129]
    p = Problem(4, 128, 64, visible, [0, 1, 0, 1, 0], exact=False, seed=5)
    tiles = Tiles(torch.arange(5, dtype=torch.int32), torch.ones(5, dtype=torch.int32), 1)
    found = []
    for tuning in (Tuning(), Tuning(copy=False), Tuning(keys=64, split=16), Tuning(keys=32, fp8=False)):
        out = torch.full((5, 200), -INF, dtype=torch.bfloat16)
        found.append(index_ops.score_keys(*p.args(), tiles, p.span, p.visible, out, tuning=tuning))
    assert all(torch.equal(found[0], other) for other in found[1:])
    column = torch.arange(200).expand(5, 200)
    assert_scores(found[0], p.expected(column.masked_fill(column >= p.visible.unsqueeze(1), -1)), False)


def test_candidates() -> None:
    p = Problem(4, 64, 16, [40, 290], [1, 0], exact=True, seed=3)
    blocks = torch.tensor([[0, 2, 4, 9, -1, -1], [1, 5, 30, 31, 35, 36]], dtype=torch.int32)
    entry = (blocks.long().unsqueeze(-1) * 8 + torch.arange(8)).flatten(1)
    entry = entry.masked_fill((entry < 0) | (entry >= p.visible.unsqueeze(1)), -1)
    out = torch.zeros((2, 48), dtype=torch.bfloat16)
    tiles = Tiles(torch.tensor([0, 1], dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    index_ops.score_candidates(*p.args(), tiles, p.span, p.visible, blocks, 8, out)
    assert torch.equal(out, p.expected(entry))


@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("entries", [128, 64])
def test_pages(entries: int, maxima: bool) -> None:
    """Lone rows over pages as the network has them, which Hopper copies whole, give the same bits as any other scan.

    One tile, whose row is not the first, and several, in no order, one of which has no rows and one sees nothing.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    g = torch.Generator().manual_seed(entries)
    pages, lines, heads, columns = 90, entries * 68 // 128 + 3, 32 if maxima else 5, 40 * entries + 8
    pool = torch.randint(0, 256, (pages * lines * 128,), dtype=torch.uint8, generator=g)
    codes = pool.as_strided((pages, entries, 64), (lines * 128, 64, 1), 16)
    scales = pool.as_strided((pages, entries, 4), (lines * 128, 4, 1), 16 + entries * 64)
    scales.copy_(torch.randint(110, 130, scales.shape, dtype=torch.uint8, generator=g))
    table = (torch.randperm(pages - 2, generator=g) + 1).to(torch.int32).view(2, -1)
    visible = torch.tensor([1, 3 * entries, 17, 39 * entries + 5, 40 * entries, 0, 1000, 3], dtype=torch.int32)
    span = torch.tensor([0, 1, 0, 1, 0, 1, 1, -1], dtype=torch.int32)
    q = torch.randn((8, heads, 128), generator=g).to(torch.bfloat16)
    turn = torch.tensor([1.0, 0.0]).view(1, 2, 1).repeat(8, 1, 32)
    q = index_ops.round_queries(q, turn, index_ops.empty_queries(8, heads, 128, "cpu"))
    weights = torch.randn((8, heads), generator=g).to(torch.bfloat16)
    for first, rows in (([3], [1]), ([7], [0]), ([6, 4, 0, 7, 5, 3, 1], [1, 1, 1, 0, 1, 1, 1])):
        tiles = Tiles(torch.tensor(first, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32), 1)
        found = []
        for tuning in (index_ops.PAGED[entries], Tuning()):
            out = torch.full((8, columns), 7.0, dtype=torch.bfloat16)
            best = torch.full((8, columns // 8), 7.0, dtype=torch.bfloat16)
            given = best if maxima else None
            index_ops.score_keys(q, weights, Keys(codes, scales, table), tiles, span, visible, out, maxima=given, tuning=tuning)
            live = {r for r, many in zip(first, rows, strict=True) if many}
            for row, seen in enumerate(visible.tolist()):
                assert bool((out[row, :seen] != 7).float().mean() > 0.9) if row in live and seen else bool((out[row, :seen] == 7).all())
                assert bool(((out[row, seen:] == 7) | (out[row, seen:] == -INF)).all())
                out[row, seen:] = 0
                best[row, -(-seen // 8) :] = 0
            found.append((out, best))
        assert (found[0][0].float().std() > 1 or not any(rows)) and bool(torch.isfinite(found[0][0]).all())
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("where", ["scattered", "together", "too many"])
@pytest.mark.parametrize("m", [700, 4096, 65_536, 130_000, 260_001, 1_048_576])
def test_planted_needles(m: int, where: str) -> None:
    """Stored keys that answer the query, first and last among them, are those that are found, in pages of a random order.

    As in steps of a server, the long ones are what a row sees of room for a million.
    """
    if m > 700 and not torch.cuda.is_available():
        pytest.skip("too long for the interpreter")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(m)
    k, heads, entries = min(512, m // 50), 32 if m > 700 else 2, 64 if where == "together" else 128
    pages, count, columns = -(-m // entries) + 1, k + (k // 4 if where == "too many" else 0), m + 8 if m <= 4096 else (1 << 20) + 8
    pool = torch.randint(0, 256, (pages, entries * 68 + 128), dtype=torch.uint8, generator=g).to(device)
    codes = pool.as_strided((pages, entries, 64), (entries * 68 + 128, 64, 1))
    scales = pool.as_strided((pages, entries, 4), (entries * 68 + 128, 4, 1), entries * 64)
    scales.fill_(122)
    table = torch.zeros((1, -(-columns // entries)), dtype=torch.int64)
    table[0, : pages - 1] = torch.randperm(pages - 1, generator=g) + 1
    needles = torch.cat((torch.tensor([0, m - 1]), torch.randperm(m - 2, generator=g)[: count - 2] + 1))
    if where == "together":
        needles = torch.cat((needles[: k // 8], torch.arange(m // 3, m // 3 + k - k // 8)))
    needles = needles.unique()
    block, place = (x[0].to(device) for x in entry_places(table, torch.zeros(1, dtype=torch.int64), needles.unsqueeze(0), entries))
    signs = torch.randint(0, 2, (128,), generator=g)
    codes[block, place] = (7 | signs[0::2] << 3 | 7 << 4 | signs[1::2] << 7).to(torch.uint8).to(device)
    scales[block, place] = 127
    q = (1.0 - 2.0 * signs).expand(1, heads, 128).to(torch.bfloat16).contiguous()
    turn = torch.tensor([1.0, 0.0]).view(1, 2, 1).repeat(1, 1, 32)
    rounded = index_ops.round_queries(q, turn, index_ops.empty_queries(1, heads, 128, "cpu"))
    one, zero, visible = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.tensor([m], dtype=torch.int32)
    scores = torch.full((1, columns), torch.nan, dtype=torch.bfloat16, device=device)
    maxima = torch.full((1, columns // 8 + 1), torch.nan, dtype=torch.bfloat16, device=device)
    keys, weights = Keys(codes, scales, table.to(torch.int32)), torch.ones((1, heads), dtype=torch.bfloat16)
    index_ops.score_keys(rounded, weights, keys, Tiles(zero, one, 1), zero, visible, scores, maxima=maxima)
    for given in (None, maxima):
        found = select_ops.top_columns(scores, visible, k, torch.empty((1, k), dtype=torch.int32), maxima=given)[0]
        assert len(found.unique()) == k and bool((found[1:] > found[:-1]).all())
        assert set(needles[:k].tolist()) <= set(found.tolist())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from forebay.model.ops.kernels import dependent, index_lone

kernel, layouts = index_lone.scan, (index_lone.CODE_LINES, index_lone.SCALE_LINES)
constants = dict(H=32, KEYS=64, ENTRIES=64, LINES=890, MAXIMA=True, TILES=1, STAGES=3)
kinds = {"q": "*u8"} | dict.fromkeys("weights out maxima".split(), "*bf16")
kinds |= dict.fromkeys("table tile_first tile_rows span visible".split(), "*i32")
kinds |= {"codes": f"tensordesc<u8[32, 128],{layouts[0]!r}>", "scales": f"tensordesc<i32[2, 32],{layouts[1]!r}>"}
names = kernel.arg_names
signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
values = {(names.index(name),): value for name, value in constants.items()}
options = {"num_warps": 4, "maxnreg": 128} | dependent.load(False).OPTIONS
ptx = triton.compile(GluonASTSource(kernel, signature, values, whole), target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
print(*(ptx.count(text) for text in ("griddepcontrol.wait", "cp.async.bulk.tensor", "wgmma.mma_async")))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_the_lone_scan_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU too, by whichever Triton is installed: keys come by TMA, and tensor cores multiply."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    waits, copies, products = map(int, done.stdout.split())
    assert waits == 1 and copies >= 2 and products >= 4
