"""Linear layers: golden products, storage edges, and rows that do not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from forebay.model.ops import formats, linear
from forebay.model.ops.linear import (
    Fp8Weight,
    Mxfp4Weight,
    PlainWeight,
    StackedWeight,
    TileCache,
    Weight,
    bf16_linear,
    fp32_linear,
    least_tile,
    matmul,
    quantised_linear,
)  # fmt: skip
from forwards import difference

Components = Callable[[str], dict[str, Tensor]]
SIZES = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70]


def cache(budget: int = 64 << 20) -> TileCache:
    return TileCache(budget)


def make(kind: str, out: int, width: int, seed: int = 0) -> Weight:
    g = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        codes = torch.randn(out, width, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
        return Fp8Weight(codes, torch.randint(118, 126, (-(-out // 32), -(-width // 32)), generator=g, dtype=torch.uint8), cache())
    if kind == "mxfp4":
        packed = torch.randint(0, 256, (out, width // 2), generator=g, dtype=torch.uint8)
        return Mxfp4Weight(packed, torch.randint(118, 126, (out, width // 32), generator=g, dtype=torch.uint8), cache())
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return PlainWeight((torch.randn(out, width, generator=g) / width**0.5).to(dtype), cache())


def inputs(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(9))


def test_fp8_linear_equals_golden(components: Components) -> None:
    """70 rows: the last row of scales covers 6 of them."""
    g = components("weight_formats")
    weight = Fp8Weight(g["fp8_gemm.weight_e4m3"], g["fp8_gemm.scale_e8m0"], cache())
    assert difference(weight.widen(0, 70), g["fp8_gemm.dequant_fp32"]) is None
    assert difference(weight.widen(40, 70), g["fp8_gemm.dequant_fp32"][40:]) is None
    assert difference(quantised_linear(formats.fp8_round(g["fp8_gemm.x"]), weight), g["fp8_gemm.y"]) is None


def test_a_run_of_fp8_rows_is_that_part_of_the_matrix(components: Components) -> None:
    g = components("weight_formats")
    for first, last in ((0, 70), (0, 32), (32, 70), (5, 69), (33, 34)):
        part = Fp8Weight(g["fp8_gemm.weight_e4m3"], g["fp8_gemm.scale_e8m0"], cache(), rows=(first, last))
        assert part.out_features == last - first
        assert difference(part.widen(0, last - first), g["fp8_gemm.dequant_fp32"][first:last]) is None


def test_mxfp4_linear_equals_golden(components: Components) -> None:
    g = components("weight_formats")
    weight = Mxfp4Weight(g["mxfp4_gemm.weight_i8"].view(torch.uint8), g["mxfp4_gemm.scale_e8m0"], cache())
    x = g["mxfp4_gemm.x"]
    assert difference(quantised_linear(formats.fp8_round(x), weight), g["mxfp4_gemm.y"]) is None
    torch.testing.assert_close(fp32_linear(x, weight), g["mxfp4_gemm.y_weight_only"], rtol=1e-6, atol=1e-6)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param > 1 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("MKL's kernels for AVX2 split the rows of a tile between threads, and then a row's place among them shows")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize(("out", "width"), [(96, 64), (33, 256), (8, 2048), (200, 1024)])
def test_a_row_does_not_depend_on_the_batch(kind: str, out: int, width: int, threads: int) -> None:
    """Any number of rows, any place among them, bit for bit. (The number of threads itself may change the order of a sum.)"""
    weight, x = make(kind, out, width), inputs(70, width)
    alone = torch.cat([matmul(x[i : i + 1], weight) for i in range(70)])
    for n in SIZES:
        assert difference(matmul(x[:n], weight), alone[:n]) is None, n
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    assert difference(matmul(x[order], weight), alone[order]) is None
    torch.testing.assert_close(alone, x @ weight.widen(0, out).T, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "bf16"])
def test_column_tiles_change_nothing_but_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of several tiles: same numbers for every batch size, and each tile widens its own rows."""
    monkeypatch.setattr(linear, "COLUMN_TILE_BYTES", 4 * 256 * 64)
    weight, x = make(kind, 200, 256), inputs(70, 256)
    assert weight.column_tile == 64
    alone = torch.cat([matmul(x[i : i + 1], weight) for i in range(70)])
    for n in SIZES:
        assert difference(matmul(x[:n], weight), alone[:n]) is None, n
    torch.testing.assert_close(alone, x @ weight.widen(0, 200).T, rtol=2e-5, atol=2e-4)
    assert [tuple(t.shape) for t in weight.cache._tiles.values()] == [(256, 64), (256, 64), (256, 64), (256, 8)]


@pytest.mark.parametrize("tile_rows", [32, 64, 4096])
def test_stacked_weights_give_what_each_gives(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a column tile begins in one part and ends in the next."""
    monkeypatch.setattr(linear, "COLUMN_TILE_BYTES", 4 * 128 * tile_rows)
    parts = [make("fp8", 96, 128, 1), make("mxfp4", 40, 128, 2), make("bf16", 70, 128, 3)]
    stacked = StackedWeight(parts, cache())
    assert stacked.out_features == 206
    assert difference(stacked.widen(0, 206), torch.cat([p.widen(0, p.out_features) for p in parts])) is None
    assert difference(stacked.widen(90, 150), torch.cat([p.widen(0, p.out_features) for p in parts])[90:150]) is None
    x = inputs(37, 128)
    for found, part in zip(stacked.split(matmul(x, stacked)), parts, strict=True):
        torch.testing.assert_close(found, matmul(x, part), rtol=2e-5, atol=2e-4)


def test_no_rows_and_dtypes() -> None:
    weight = make("bf16", 40, 64)
    assert matmul(torch.empty(0, 64), weight).shape == (0, 40)
    x = inputs(3, 64).to(torch.bfloat16)
    assert fp32_linear(x, weight).dtype == torch.float32
    assert bf16_linear(x, weight).dtype == torch.bfloat16
    assert torch.equal(bf16_linear(x, weight), fp32_linear(x, weight).to(torch.bfloat16))


def test_inputs_and_weights_are_left_as_they_are() -> None:
    weight, x = make("fp8", 64, 64), inputs(5, 64)
    assert isinstance(weight, Fp8Weight)
    before, codes = x.clone(), weight.codes.clone()
    first = matmul(x, weight)
    again = matmul(x, weight)
    assert torch.equal(first, again)
    assert torch.equal(x, before)
    assert torch.equal(weight.codes, codes)


class TestTileCache:
    def test_keeps_within_its_budget_and_drops_the_longest_unused(self) -> None:
        tiles = TileCache(3 * 400)
        made: list[int] = []

        def get(key: int, floats: int = 100) -> None:
            tiles.get((key, 0), lambda: made.append(key) or torch.zeros(floats))  # type: ignore[func-returns-value]

        for key in (1, 2, 3, 1, 4):  # 4 drops 2: 1 was used since
            get(key)
        assert made == [1, 2, 3, 4]
        assert tiles.used == 1200
        get(1)
        get(3)
        assert made == [1, 2, 3, 4]
        get(2)
        assert made == [1, 2, 3, 4, 2]
        assert tiles.used <= tiles.budget

    def test_a_tile_above_the_budget_is_made_each_time_and_drops_nothing(self) -> None:
        tiles = TileCache(400)
        tiles.get((1, 0), lambda: torch.zeros(100))
        for _ in range(2):
            assert tiles.get((2, 0), lambda: torch.zeros(101)).numel() == 101
        assert tiles.used == 400

        def never() -> Tensor:
            raise AssertionError("the tile is kept")

        tiles.get((1, 0), never)

    def test_a_tile_never_serves_a_later_weight(self) -> None:
        """An id is given again once its object is gone; a tile must not outlive the weight it was made for."""
        tiles, x = TileCache(1 << 24), inputs(4, 32)
        for seed in range(200):
            values = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            assert difference(matmul(x, PlainWeight(values, tiles)), matmul(x, PlainWeight(values, cache()))) is None

    @pytest.mark.parametrize("budget", [0, 4 * 256 * 40, 1 << 30])
    def test_results_do_not_depend_on_it(self, budget: int) -> None:
        tiles, x = TileCache(budget), inputs(20, 256)
        parts = [PlainWeight(torch.randn(40, 256, generator=torch.Generator().manual_seed(s)), tiles) for s in range(3)]
        for _ in range(2):
            for part in parts:
                assert difference(matmul(x, part), matmul(x, PlainWeight(part.weight, cache()))) is None
        assert tiles.used <= budget


class TestLeastTile:
    @pytest.mark.parametrize(("out", "width"), [(256, 256), (1024, 128), (24, 1024), (12, 256), (40, 384), (1280, 384)])
    def test_few_rows_have_the_bits_of_a_full_tile(self, out: int, width: int, threads: int) -> None:
        x, w = inputs(16, width), torch.randn(width, out, generator=torch.Generator().manual_seed(out))
        full = torch.mm(x, w)
        for rows in range(1, 17):
            tile = least_tile(rows, 16, width, out, threads)
            assert tile in (4, 8, 16)
            assert tile >= rows
            for first in range(17 - rows):
                padded = torch.nn.functional.pad(x[first : first + rows], (0, 0, 0, tile - rows))
                assert difference(torch.mm(padded, w)[:rows], full[first : first + rows]) is None, (rows, tile)

    def test_a_tile_that_sums_in_another_order_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where BLAS has a kernel of its own for few rows."""
        product = torch.mm

        def other(x: Tensor, w: Tensor) -> Tensor:
            return product(x.flip(1), w.flip(0)) if x.shape[0] == 4 else product(x, w)

        monkeypatch.setattr(torch, "mm", other)
        assert least_tile.__wrapped__(3, 16, 257, 65, 1) == least_tile.__wrapped__(5, 16, 257, 65, 1) != 4

    def test_only_tiles_that_hold_the_rows_and_divide_a_full_one(self) -> None:
        assert least_tile(3, 3, 64, 64, 1) == 3
        assert least_tile(5, 6, 64, 64, 1) == 6
        assert least_tile(9, 16, 64, 64, 1) == 16
