"""Sparse attention over stored bytes, on a GPU or in Triton's interpreter, against decoding everything and the torch operation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.kernels import attend as kernels
from forebay.model.ops.kernels import attend_ops
from forebay.model.ops.kernels.attend_ops import Entries, Plan, Rows, attend, plan
from forebay.model.ops.rope import inverse_frequencies, rotate, turn_at
from forebay.model.ops.sparse_attention import sparse_attention

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((attend_ops, "attend"),)


@dataclass(frozen=True)
class Shape:
    heads: int
    dim: int
    rope: int
    window: int
    topk: int
    ratio: int = 1
    magnitude: float = 1.0


TINY = Shape(2, 32, 8, 8, 8, 2)
DEMO = Shape(8, 128, 32, 64, 40, 2)
LONG = Shape(4, 128, 16, 130, 100)  # three tiles of window and two of entries, the last of both in part
REAL = Shape(64, 512, 64, 128, 512)


class Problem:
    """Three sequences: one in the middle of a long text, one that begins here, and one whose window has a floor; and padding."""

    spans = ((300, 3, 0), (0, 2, 0), (250, 3, 245))  # first position, rows, floor

    def __init__(self, shape: Shape, spans: tuple[tuple[int, int, int], ...] | None = None, padding: int = 1) -> None:
        self.shape, spans = shape, self.spans if spans is None else spans
        g = torch.Generator().manual_seed(shape.dim + shape.topk)
        n = sum(count for _, count, _ in spans) + padding
        self.q = torch.randn((n, shape.heads, shape.dim), generator=g).mul(shape.magnitude).bfloat16()
        self.sink, self.scale = torch.randn(shape.heads, generator=g), shape.dim**-0.5

        def window_rows(*lead: int) -> Tensor:
            codes, scales = formats.fp8_encode(torch.randn((*lead, shape.dim), generator=g) * 2 ** torch.randn((*lead, 1), generator=g))
            return torch.cat((codes, scales), -1)

        slots, layers, layer = 5, 2, 1
        self.rings = window_rows(slots, layers, shape.window)[:, layer]
        self.fresh = window_rows(n)
        # A pool of blocks with another plane before the codes, and bytes between the planes that belong to nobody.
        per_block = 16 // shape.ratio
        codes = per_block * 48
        scales = codes + per_block * shape.dim // 2 + 32
        pool = torch.full((80, scales + per_block * shape.dim // 16 + 48), 255, dtype=torch.uint8)
        packed, factors = formats.main_encode(torch.randn((80, per_block, shape.dim), generator=g) * 3)
        pool[:, codes : codes + per_block * shape.dim // 2] = packed.flatten(1)
        pool[:, scales : scales + per_block * shape.dim // 16] = factors.flatten(1)
        self.packed, self.factors = packed, factors
        table = torch.stack([torch.randperm(79, generator=g)[:40] + 1 for _ in spans]).int()
        selected = torch.full((n, shape.topk), -1, dtype=torch.int32)
        span, position, start, offset, floor = [], [], [], [], []
        row = 0
        for number, (first, count, lowest) in enumerate(spans):
            start.append(first)
            offset.append(row)
            floor.append(lowest)
            for i in range(first, first + count):
                span.append(number)
                position.append(i)
                stored = (i + 1) // shape.ratio
                chosen = torch.randperm(stored, generator=g)[: shape.topk].sort()[0]
                selected[row, : len(chosen)] = chosen
                row += 1
        span += [-1] * padding
        position += [-1] * padding
        turn = turn_at(torch.tensor(position).clamp(min=0), inverse_frequencies(shape.rope, 10000.0))

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        slot = int32([3, 1, 4][: len(spans)])
        self.turn = turn
        both = torch.stack((turn.cos[:, ::2], turn.sin[:, 1::2]), 1)
        self.rows = Rows(torch.tensor(position), int32(span), int32(start), int32(offset), int32(floor), slot, table, both)
        self.entries: Entries | None = Entries(selected, pool, per_block, codes, scales)

    def expected(self) -> Tensor:
        """Key by key."""
        shape, rows = self.shape, self.rows
        slots = shape.window + (0 if self.entries is None else shape.topk)
        kv, valid = torch.zeros((len(self.q), slots, shape.dim)), torch.zeros((len(self.q), slots), dtype=torch.bool)
        for row, (i, s) in enumerate(zip(rows.position.tolist(), rows.span.tolist(), strict=True)):
            lowest = max(int(rows.floor[s]), i - shape.window + 1)
            for t, j in enumerate(range(lowest, i + 1)):
                if j >= int(rows.start[s]):
                    stored = self.fresh[int(rows.offset[s]) + j - int(rows.start[s])]
                else:
                    stored = self.rings[int(rows.slot[s]), j % shape.window]
                kv[row, t], valid[row, t] = formats.fp8_decode(stored[None, : shape.dim], stored[None, shape.dim :])[0], True
            if self.entries is not None:
                for t, entry in enumerate(self.entries.selected[row].tolist()):
                    if entry >= 0:
                        block, place = int(rows.table[s, entry // self.entries.per_block]), entry % self.entries.per_block
                        kv[row, shape.window + t] = formats.main_decode(self.packed[block, place], self.factors[block, place])
                        valid[row, shape.window + t] = True
        q = rotate(self.q, self.turn)
        return rotate(sparse_attention(q, kv, valid, self.sink, self.scale), self.turn, inverse=True)

    def found(self, split: Plan | None = None) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        attend(self.q, self.rings, self.fresh, self.entries, self.sink, self.scale, self.rows, out, split)
        return out


def assert_near(found: Tensor, expected: Tensor, limit: float = 4e-3) -> None:
    """Two bf16 roundings may fall the other way (2^-8 of a number); of the whole, less than `limit`."""
    assert found.isfinite().all()
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= limit, float(error)


def one_split(shape: Shape) -> Plan:
    return Plan(0, 1, 1)


def every_tile(shape: Shape, tiles: int, topk: int) -> Plan:
    near, far = -(-shape.window // (64 * tiles)), -(-topk // (64 * tiles))
    return Plan(tiles, near, near + far)


@pytest.mark.parametrize("shape", [TINY, DEMO, LONG], ids=["tiny", "demo", "long"])
def test_equals_the_torch_operation(shape: Shape) -> None:
    """Nearly the same tiles, so nearly every number is the same to the bit."""
    problem = Problem(shape)
    found, expected = problem.found(one_split(shape)), problem.expected()
    assert_near(found, expected, 1e-3)
    assert (found == expected).float().mean() > 0.95
    assert not found[-1].any()  # padding


@pytest.mark.parametrize("tiles", [1, 4])
def test_parts_join(tiles: int) -> None:
    problem = Problem(LONG)
    assert_near(problem.found(every_tile(LONG, tiles, LONG.topk)), problem.expected())


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_with_only_a_window(split: bool) -> None:
    problem = Problem(replace(LONG, topk=1))
    problem.entries = None
    assert_near(problem.found(every_tile(LONG, 1, 0) if split else one_split(LONG)), problem.expected())


@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 300.0, 6 * 448.0])
@pytest.mark.parametrize("split", [False, True])
def test_scores_of_any_size(magnitude: float, split: bool) -> None:
    """All equal, and so large that single keys take everything."""
    problem = Problem(replace(DEMO, magnitude=magnitude))
    assert_near(problem.found(every_tile(DEMO, 1, DEMO.topk) if split else one_split(DEMO)), problem.expected())


@pytest.mark.parametrize("split", [False, True])
def test_sink(split: bool) -> None:
    """So large that nothing is left, and so small that it takes nothing."""
    problem = Problem(DEMO)
    for value in (-1e4, 1e4):
        problem.sink = torch.full((DEMO.heads,), value)
        found = problem.found(every_tile(DEMO, 1, DEMO.topk) if split else one_split(DEMO))
        if value > 0:
            assert not found.any()
        else:
            assert_near(found[:-1], problem.expected()[:-1])
            assert found.isfinite().all()


def test_every_stored_number() -> None:
    """All codes with the least, the largest and some other scale, of both formats, read back exactly: one key a row, no sink."""
    shape = Shape(1, 512, 8, 1, 1)
    problem = Problem(shape, ((200, 3, 0),), padding=0)
    problem.sink = torch.full((1,), -1e30)
    every = torch.arange(256, dtype=torch.uint8)
    every = torch.where((every & 127) == 127, 0, every)  # NaN
    problem.fresh = torch.cat((every.repeat(3, 2), torch.tensor([[105], [127], [182]], dtype=torch.uint8).expand(-1, 16)), 1)
    problem.entries = None
    assert torch.equal(problem.found(), problem.expected())
    problem = Problem(shape, ((200, 3, 0),), padding=0)
    problem.sink = torch.full((1,), -1e30)
    problem.rows = replace(problem.rows, floor=torch.tensor([1000], dtype=torch.int32))  # no window key
    assert problem.entries is not None
    problem.packed[:] = torch.arange(256, dtype=torch.uint8)
    problem.factors[:, :, :] = torch.cat((torch.tensor([1, 2, 7, 8, 0x7E], dtype=torch.uint8), torch.arange(20, 47, dtype=torch.uint8)))
    start, per_block = problem.entries.codes, problem.entries.per_block
    problem.entries.pool[:, start : start + per_block * 256] = problem.packed.flatten(1)
    problem.entries.pool[:, problem.entries.scales : problem.entries.scales + per_block * 32] = problem.factors.flatten(1)
    assert torch.equal(problem.found(), problem.expected())


def test_real_dimensions() -> None:
    problem = Problem(REAL, ((600, 1, 0),), padding=0)
    expected = problem.expected()
    assert_near(problem.found(one_split(REAL)), expected, 1e-3)
    chosen = plan(1, REAL.window, REAL.topk)
    assert chosen.splits == 10
    assert_near(problem.found(chosen), expected)


def test_plan_covers_all_tiles() -> None:
    for rows in (1, 7, 13, 14, 26, 40, 64, 100, 128, 132, 133, 512):
        for window, topk in ((128, 512), (128, 0), (8, 8), (64, 100)):
            chosen = plan(rows, window, topk)
            keys = chosen.tiles * chosen.tile
            near, far = chosen.window_splits * keys, (chosen.splits - chosen.window_splits) * keys
            assert chosen.splits == 1 or (near >= window and far >= topk)
    assert plan(512, 128, 512).splits == 1


def run_ptx(source: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The instructions that the kernels' assembly consists of, on int64 tensors of 32-bit registers."""
    registers = dict(inputs)

    def read(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def halves(word: Tensor) -> Tensor:
        pair = torch.stack((word & 0xFFFF, word >> 16), -1)
        return torch.where(pair >= 0x8000, pair - 0x10000, pair).to(torch.int16).view(torch.bfloat16)

    for line in source.strip("{}\n").splitlines():
        op, _, rest = line.rstrip(";").partition(" ")
        names = [x.strip() for x in rest.split(",")]
        if op == ".reg":
            continue
        args = [read(x) for x in names[1:]]
        if op == "shl.b32":
            value = (args[0] << args[1]) & 0xFFFFFFFF
        elif op == "shr.b32":
            value = args[0] >> args[1]
        elif op == "and.b32":
            value = args[0] & args[1]
        elif op == "lop3.b32":
            assert int(args[3]) == 0xEA  # (0xF0 & 0xCC) | 0xAA
            value = (args[0] & args[1]) | args[2]
        elif op == "prmt.b32":
            both, value = args[0] | args[1] << 32, torch.zeros_like(args[0])
            for i in range(4):
                value |= ((both >> 8 * (int(args[2]) >> 4 * i & 7)) & 0xFF) << 8 * i
        else:
            assert op == "mul.rn.bf16x2", line
            product = (halves(args[0]).float() * halves(args[1]).float()).bfloat16().view(torch.int16).to(torch.int64) & 0xFFFF
            value = product[..., 0] | product[..., 1] << 16
        registers[names[0]] = value
    return {name: registers[name] for name in ("$0", "$1", "$2", "$3")}


def decoded(source: str, words: tuple[Tensor, ...], scale: Tensor) -> Tensor:
    """[..., 2, 4]: code j of word h, times 2^48, as the packed instructions decode it."""
    bits = scale.bfloat16().view(torch.int16).to(torch.int64) & 0xFFFF
    inputs = {f"${4 + i}": word for i, word in enumerate((*words, bits | bits << 16))}
    pairs = torch.stack(list(run_ptx(source, inputs).values()), -1)
    values = torch.stack((pairs & 0xFFFF, pairs >> 16), -2)
    return torch.where(values >= 0x8000, values - 0x10000, values).to(torch.int16).view(torch.bfloat16).double() * 2.0**48


def test_packed_fp4_is_exact() -> None:
    """All pairs of words with one code varied and random others, under every scale."""
    g = torch.Generator().manual_seed(4)
    words = torch.randint(2**32, (512,), generator=g)
    words = torch.cat((words, torch.arange(16) * 0x11111111))
    scales = torch.arange(127, dtype=torch.uint8)
    factor = (scales.to(torch.int32) << 20).view(torch.float32) * 2.0**99 * 2.0**99
    found = decoded(kernels.FP4_PAIRS, (words[:, None].expand(-1, 127),), factor[None].expand(len(words), -1))
    packed = torch.stack([words >> 8 * i & 255 for i in range(4)], -1).to(torch.uint8)
    expected = formats.e2m1_decode(packed).double().view(-1, 1, 2, 4) * formats.e4m3_decode(scales).double().view(1, -1, 1, 1)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_packed_fp8_is_exact() -> None:
    """Every code in every place, under every scale that the quantiser writes, and larger ones."""
    codes = torch.arange(256)
    codes = codes[(codes & 127) != 127]
    low = codes | codes.roll(1) << 8 | codes.roll(2) << 16 | codes.roll(3) << 24
    words = torch.stack((low, low.roll(5)))
    scales = torch.arange(105, 183, dtype=torch.uint8)
    factor = (scales.to(torch.int32) << 23).view(torch.float32) * 2.0**72
    found = decoded(kernels.FP8_PAIRS, tuple(x[:, None].expand(-1, len(scales)) for x in words), factor[None].expand(len(codes), -1))
    packed = torch.stack([words >> 8 * i & 255 for i in range(4)], -1).to(torch.uint8)
    values = formats.e4m3_decode(packed).double().permute(1, 0, 2)[:, None]
    expected = values * formats.exp2_from_byte(scales).double().view(1, -1, 1, 1)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("split", [False, True])
def test_queries_that_are_rotated_already(split: bool) -> None:
    problem = Problem(DEMO)
    expected = problem.found(every_tile(DEMO, 1, DEMO.topk) if split else None)
    rotated, out = rotate(problem.q, problem.turn), torch.empty_like(problem.q)
    attend(
        rotated, problem.rings, problem.fresh, problem.entries, problem.sink, problem.scale, problem.rows, out,
        every_tile(DEMO, 1, DEMO.topk) if split else None, rotate=False,
    )  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tile", [32, 64])
def test_tunings(tile: int) -> None:
    """Tiles of other sizes, and parts that are given."""
    problem = Problem(LONG)
    out = torch.full_like(problem.q, float("nan"))
    split = attend_ops.tuned(LONG.window, LONG.topk, tiles=2, tile=tile)
    parts = attend_ops.scratch(len(out), LONG.heads, LONG.dim, split.splits, "cpu")
    args = problem.q, problem.rings, problem.fresh, problem.entries, problem.sink, problem.scale, problem.rows, out
    attend(*args, parts=parts, tuning={"tiles": 2, "tile": tile})
    assert_near(out, problem.expected())


def test_tuning_space_is_of_plans() -> None:
    for rows in (1, 8, 64, 128, 512, 2048):
        plans = [attend_ops.tuned(128, 512, **knobs) for knobs in attend_ops.tuning_space(rows)]
        assert len(set(plans)) == len(plans) >= 5
        assert rows < attend_ops.PROCESSORS or all(p.splits == 1 for p in plans)


def test_refuses_what_it_cannot_read() -> None:
    problem = Problem(TINY)
    with pytest.raises(ValueError, match="at most 64 heads, got 65"):
        attend(problem.q[:, :1].expand(-1, 65, -1), problem.rings, problem.fresh, None, problem.sink, 1.0, problem.rows, problem.q)
    with pytest.raises(ValueError, match="a window row must have dim"):
        attend(problem.q, problem.rings[..., :-1], problem.fresh, None, problem.sink, 1.0, problem.rows, problem.q)


def test_bench_cases_are_honest() -> None:
    """The smallest runs as it is; its floors are what the docstring says."""
    case = attend_ops.bench_cases()[0]
    assert (case.bytes_floor, case.flops) == (512 * 288 + 128 * 528 + 4 * 64 * 512, 4 * 640 * 64 * 512)
