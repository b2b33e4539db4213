"""Linear layers over the stored formats, with row-tiled GEMMs whose result for a row never depends on its neighbours.

Weights stay as stored (FP8 tiles, MXFP4 groups, bf16). To multiply, a weight is widened to fp32 one column tile at a time; widened tiles
are kept in a `TileCache` of bounded size, least recently used first out, so a checkpoint needs about its own size in memory.

Batch invariance on CPU: BLAS picks kernels, and so summation orders, by matrix shape. Every product here therefore has exactly `ROW_TILE`
rows (the last tile is padded with zeros) and column tiles that depend on the weight alone, so a row is computed by the same code whoever
shares the step. Few rows are padded to a smaller tile where that one is found to give the same bits (`least_tile`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from forebay.model.ops import formats

ROW_TILE = 16
SMALL_TILES = (4, 8)  # rows that a product of few rows may be padded to instead
COLUMN_TILE_BYTES = 32 << 20  # fp32 bytes of one widened column tile
GROUP = formats.GROUP


class TileCache:
    """Widened weight tiles within a byte budget, by (weight, first row); not shared between threads that run steps.

    `row_tile` is the number of rows of every CPU product over its weights; None multiplies all rows at once, faster and not
    batch-invariant.
    """

    def __init__(self, budget_bytes: int, row_tile: int | None = ROW_TILE) -> None:
        self.budget = budget_bytes
        self.row_tile = row_tile
        self.used = 0
        self._tiles: OrderedDict[tuple[object, int], Tensor] = OrderedDict()

    def get(self, key: tuple[object, int], widen: Callable[[], Tensor]) -> Tensor:
        """The tile, made by `widen` if it is not kept, and from then on kept if it fits."""
        tile = self._tiles.get(key)
        if tile is not None:
            if self.used > self.budget // 2:  # else nothing is dropped soon, and the order of use need not be known
                self._tiles.move_to_end(key)
            return tile
        tile = widen()
        size = tile.numel() * tile.element_size()
        if size > self.budget:
            return tile
        while self.used + size > self.budget:
            _, old = self._tiles.popitem(last=False)
            self.used -= old.numel() * old.element_size()
        self._tiles[key] = tile
        self.used += size
        return tile


class Weight:
    """A stored matrix [out, in] that can widen any run of its output rows to fp32 [in, rows] (transposed: ready for x @ w)."""

    def __init__(self, out_features: int, in_features: int, cache: TileCache) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.cache = cache
        tile = max(1, COLUMN_TILE_BYTES // (4 * in_features))
        self.column_tile = max(GROUP, tile // GROUP * GROUP)
        self.whole = out_features <= self.column_tile

    def widen(self, start: int, stop: int) -> Tensor:
        """fp32 [stop - start, in] of output rows start..stop."""
        raise TypeError(f"{type(self).__name__} is abstract")

    def tile(self, start: int, stop: int) -> Tensor:
        """fp32 [in, stop - start]: output rows start..stop, transposed."""
        return self.cache.get((self, start), lambda: self.widen(start, stop).T.contiguous())

    def multiply(self, x: Tensor) -> Tensor:
        """x [n, in] fp32 times this -> [n, out] fp32, row-invariant on CPU unless the cache's `row_tile` is None."""
        rows = x.shape[0]
        step = (self.cache.row_tile if x.is_cpu else None) or max(rows, 1)
        if 0 < rows <= step and self.whole:
            if rows < step:
                step = least_tile(rows, step, self.in_features, self.out_features, torch.get_num_threads())
            if rows == step:
                return torch.mm(x, self.tile(0, self.out_features))
            padded = torch.cat((x, _zeros(step - rows, self.in_features)))  # a third of what `pad` costs
            return torch.mm(padded, self.tile(0, self.out_features))[:rows]
        out = torch.empty((rows, self.out_features), dtype=torch.float32, device=x.device)
        full = rows // step * step
        tail = functional.pad(x[full:], (0, 0, 0, step - (rows - full))) if full < rows else None
        for start in range(0, self.out_features if rows else 0, self.column_tile):
            stop = min(start + self.column_tile, self.out_features)
            w = self.tile(start, stop)
            target = out[:, start:stop]
            for row in range(0, full, step):
                torch.mm(x[row : row + step], w, out=target[row : row + step])
            if tail is not None:
                target[full:] = torch.mm(tail, w)[: rows - full]
        return out


class PlainWeight(Weight):
    """bf16 or fp32 [out, in]."""

    def __init__(self, weight: Tensor, cache: TileCache) -> None:
        super().__init__(weight.shape[0], weight.shape[1], cache)
        self.weight = weight

    def widen(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop].float()


class Fp8Weight(Weight):
    """E4M3 [out, in] uint8 with E8M0 scales [ceil(out/32), ceil(in/32)] uint8, one per 32x32 tile (spec §8 storage).

    `rows` takes a run of output rows only, as one group of a block-diagonal matrix.
    """

    def __init__(self, codes: Tensor, scales: Tensor, cache: TileCache, rows: tuple[int, int] | None = None) -> None:
        first, last = rows or (0, codes.shape[0])
        super().__init__(last - first, codes.shape[1], cache)
        self.codes, self.scales, self.first = codes, scales, first

    def widen(self, start: int, stop: int) -> Tensor:
        start, stop = start + self.first, stop + self.first
        values = formats.e4m3_decode(self.codes[start:stop])
        rows = torch.arange(start, stop, device=self.codes.device) // GROUP
        scale = formats.exp2_from_byte(self.scales).index_select(0, rows).repeat_interleave(GROUP, 1)
        return values * scale[:, : self.in_features]


class Mxfp4Weight(Weight):
    """E2M1 pairs [out, in/2] uint8 (low nibble = even k) with E8M0 scales [out, in/32] uint8 (spec §8 storage)."""

    def __init__(self, packed: Tensor, scales: Tensor, cache: TileCache) -> None:
        super().__init__(packed.shape[0], packed.shape[1] * 2, cache)
        self.packed, self.scales = packed, scales

    def widen(self, start: int, stop: int) -> Tensor:
        return formats.mxfp4_decode(self.packed[start:stop], self.scales[start:stop])


class StackedWeight(Weight):
    """Several weights of one input, one under the other: one product instead of many."""

    def __init__(self, parts: Sequence[Weight], cache: TileCache) -> None:
        super().__init__(sum(p.out_features for p in parts), parts[0].in_features, cache)
        self.parts = list(parts)

    def widen(self, start: int, stop: int) -> Tensor:
        found, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, part.out_features)
            if low < high:
                found.append(part.widen(low, high))
            first += part.out_features
        return torch.cat(found)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """[n, out] -> one [n, part's out] per part."""
        return y.split_with_sizes([part.out_features for part in self.parts], -1)


@cache
def least_tile(rows: int, full: int, width: int, out: int, threads: int) -> int:
    """To how many rows a CPU product of `rows` rows is padded: the least of `SMALL_TILES` with the bits of a tile of `full`, or `full`.

    Which shapes share a kernel is BLAS's secret and differs between machines and numbers of threads, so it is tried out, once for each
    shape [width, out] of a weight. Sums of random numbers in another order would differ in many of the bits that are compared.
    """
    numbers = torch.Generator().manual_seed(width * out + full)
    for tile in SMALL_TILES:
        if rows <= tile < full and full % tile == 0:
            for _ in range(3):
                x, w = torch.randn((full, width), generator=numbers), torch.randn((width, out), generator=numbers)
                if not torch.equal(torch.cat([torch.mm(part, w) for part in x.split(tile)]), torch.mm(x, w)):
                    break
            else:
                return tile
    return full


@cache
def _zeros(rows: int, width: int) -> Tensor:
    return torch.zeros((rows, width), dtype=torch.float32)


def matmul(x: Tensor, weight: Weight) -> Tensor:
    """`Weight.multiply`: x [n, in] times weight -> [n, out]."""
    return weight.multiply(x)


def fp32_linear(x: Tensor, weight: Weight) -> Tensor:
    """fp32(x) times the widened weight, fp32 out: router, ratio-2 compressor, mHC projection, head. x [n, in] any float."""
    return weight.multiply(x.float().contiguous())


def bf16_linear(x: Tensor, weight: Weight) -> Tensor:
    """bf16 in, fp32 accumulation, bf16 out: index keys, index weights, ratio-1 compressor. x [n, in] bf16."""
    return weight.multiply(x.float().contiguous()).bfloat16()


def quantised_linear(rounded: Tensor, weight: Weight) -> Tensor:
    """An FP8 or MXFP4 linear whose input already went through `formats.fp8_round` (shared by several weights). -> [n, out] bf16."""
    return weight.multiply(rounded).bfloat16()
