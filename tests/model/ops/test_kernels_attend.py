"""Sparse attention over stored bytes, on a GPU or in Triton's interpreter, against decoding everything and the torch operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forebay.model.ops import formats
from forebay.model.ops.kernels import attend as kernels
from forebay.model.ops.kernels import attend_ops
from forebay.model.ops.kernels.attend_ops import Plan, attend, plan
from forebay.model.ops.kernels.moe_ops import Meeting
from forebay.model.ops.rope import rotate
from stored_attention import DEMO, LONG, REAL, TINY, Problem, Shape, assert_near

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = ((attend_ops, "attend"),)


def one_split(shape: Shape) -> Plan:
    return Plan()


def every_tile(shape: Shape, tiles: int, topk: int, heads: int = 0) -> Plan:
    return attend_ops.tuned(shape.window, topk, tiles=tiles, heads=heads)


@pytest.mark.parametrize("shape", [TINY, DEMO, LONG], ids=["tiny", "demo", "long"])
def test_equals_the_torch_operation(shape: Shape) -> None:
    """Nearly the same tiles, so nearly every number is the same to the bit."""
    problem = Problem(shape)
    found, expected = problem.found(one_split(shape)), problem.expected()
    assert_near(found, expected, 1e-3)
    assert (found == expected).float().mean() > 0.95
    assert not found[-1].any()  # padding


@pytest.mark.parametrize(("tiles", "heads"), [(1, 0), (4, 2), (3, 3)])
def test_parts_join(tiles: int, heads: int) -> None:
    """Parts of either kind of key and of both, fewer heads a program; padding, and rows with fewer tiles of keys than parts."""
    problem = Problem(LONG)
    found = problem.found(every_tile(LONG, tiles, LONG.topk, heads))
    assert_near(found, problem.expected())
    assert not found[-1].any()


def test_fewer_heads_change_nothing() -> None:
    problem = Problem(DEMO, ((300, 1, 0), (0, 1, 0)))
    assert torch.equal(problem.found(attend_ops.tuned(DEMO.window, DEMO.topk, heads=3)), problem.found(one_split(DEMO)))


@pytest.mark.parametrize("entries", [False, True])
def test_any_program_may_come_last(entries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in any order, over what other launches left in the buffers; counters end at zero, as graphs need."""
    from triton.runtime import interpreter

    problem = Problem(LONG, ((300, 1, 0), (0, 1, 0)))
    if not entries:
        problem.entries = None
    topk, n = LONG.topk if entries else 0, len(problem.q)
    split = every_tile(LONG, 1, topk, 2)
    meeting, results, plain = Meeting(n * split.splits * 4 * 130, 64, "cpu"), [], interpreter.interpreter_builder.set_grid_idx
    for turn in (0, split.splits - 1):  # a GPU has its own order
        meeting.partial.fill_(float("nan"))
        monkeypatch.setattr(
            interpreter.interpreter_builder, "set_grid_idx",
            lambda x, y, z, turn=turn: plain(x, (turn - y) % split.splits, z),
        )  # fmt: skip
        parts, out = attend_ops.borrowed(meeting, n, 4, 128, split.splits), torch.full_like(problem.q, float("nan"))
        args = problem.q, problem.rings, problem.fresh, problem.entries, problem.sink, problem.scale, problem.rows, out
        attend_ops.attend(*args, split, parts)
        assert not meeting.arrived.any()
        results.append(out)
    monkeypatch.undo()
    assert_near(results[0], problem.expected())
    assert all(torch.equal(result, results[0]) for result in results)
    with pytest.raises(ValueError, match="more than these buffers hold"):
        attend_ops.borrowed(meeting, n, 4, 128, split.splits + 1)


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
    chosen = plan(1, REAL.heads, REAL.dim, REAL.window, REAL.topk)
    assert (chosen.splits, chosen.heads) == (10, 8)
    assert_near(problem.found(attend_ops.tuned(REAL.window, REAL.topk, tiles=3, heads=32)), expected)


def test_plan_covers_all_tiles() -> None:
    for rows in (1, 4, 7, 13, 14, 26, 40, 64, 100, 128, 132, 133, 512):
        for window, topk, heads in ((128, 512, 64), (128, 0, 64), (8, 8, 4), (64, 100, 8)):
            chosen = plan(rows, heads, 128, window, topk)
            tiles = -(-window // chosen.tile) - (-topk // chosen.tile)
            assert chosen.splits == 1 or (chosen.splits - 1) * chosen.tiles < tiles <= chosen.splits * chosen.tiles
            programs = rows * chosen.splits * -(-heads // (chosen.heads or heads))
            assert chosen.splits == 1 or programs <= attend_ops.PROCESSORS
    assert plan(512, 64, 512, 128, 512).splits == 1


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
    with pytest.raises(ValueError, match="at most 16 parts, got 17"):
        attend(problem.q, problem.rings, problem.fresh, None, problem.sink, 1.0, problem.rows, problem.q, Plan(1, 17))
    with pytest.raises(ValueError, match="a window row must have dim"):
        attend(problem.q, problem.rings[..., :-1], problem.fresh, None, problem.sink, 1.0, problem.rows, problem.q)


def test_bench_cases_are_honest() -> None:
    """The smallest runs as it is; its floors are what the docstring says."""
    case = attend_ops.bench_cases()[0]
    assert (case.bytes_floor, case.flops) == (512 * 288 + 128 * 528 + 4 * 64 * 512, 4 * 640 * 64 * 512)
