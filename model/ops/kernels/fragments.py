"""Layouts: which thread has which element of a tensor, for kernels that say so (see `skinny`). All are None where Triton interprets."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


class Layouts(NamedTuple):
    """Of the weights, activations and sums of one product."""

    weights: Any = None
    inputs: Any = None
    sums: Any = None
    totals: Any = None  # of the sums, added up over the warps that share inputs


@cache
def layouts(interpreted: bool, kw: int, mw: int, m: int, c: int, n: int) -> Layouts:
    """For kw times mw warps, where mw of them share the M rows in turns of 16; C >= 4 and N >= 8, all powers of two.

    A warp's `mma` has 16 rows: lane 4 * r + k has rows r and r + 8 and the k-th of four runs of elements, and of the activations column r.
    """
    if interpreted:
        return Layouts()
    from triton.experimental.gluon import language as gl

    def along(axis: int, first: int, last: int) -> list[list[int]]:
        """Bits `first` up to `last` of a coordinate of four."""
        return [[value if i == axis else 0 for i in range(4)] for value in (1 << bit for bit in range(first, last))]

    def bits(size: int) -> int:
        return size.bit_length() - 1

    weights = gl.DistributedLinearLayout(
        reg_bases=[*along(3, 0, 3), *along(1, 3, 4), *along(2, 2, bits(c)), *along(1, 4 + bits(mw), bits(m))],
        lane_bases=[*along(2, 0, 2), *along(1, 0, 3)], warp_bases=[*along(1, 4, 4 + bits(mw)), *along(0, 0, bits(kw))],
        block_bases=[], shape=[kw, m, c, 8],
    )  # fmt: skip
    inputs = gl.DistributedLinearLayout(
        reg_bases=[*along(2, 0, 3), *along(1, 2, bits(c)), *along(3, 3, bits(n))], lane_bases=[*along(1, 0, 2), *along(3, 0, 3)],
        warp_bases=[[0, 0, 0, 0]] * bits(mw) + along(0, 0, bits(kw)), block_bases=[], shape=[kw, c, 8, n],
    )  # fmt: skip
    sums = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[kw, mw, 1], instr_shape=[1, 16, 8])
    return Layouts(weights, inputs, sums, gl.SliceLayout(0, sums))


class Outputs(NamedTuple):
    """Of sums on their way out, when every thread has a few."""

    parts: Any = None  # [KW, M, N], what is to be added up in one thread
    totals: Any = None  # [M, N], or where the M rows are two halves, [M / 2, N]


@cache
def outputs(interpreted: bool, kw: int, mw: int, m: int, n: int, pair: bool) -> Outputs:
    """For sums of `layouts`. Lanes have pairs of rows of a group of 32, so that such a group is within a warp, and warps have columns."""
    if interpreted:
        return Outputs()
    from triton.experimental.gluon import language as gl

    def bits(size: int) -> int:
        return size.bit_length() - 1

    rows, half = bits(m), bits(m) - pair
    columns = [[0, 1 << bit] for bit in range(bits(n))]
    lanes = [[1 << bit, 0] for bit in range(1, min(half, 5))]
    lanes, columns = lanes + columns[: 5 - len(lanes)], columns[5 - len(lanes) :]
    warps = (columns + [[0, 0]] * bits(kw * mw))[: bits(kw * mw)]
    registers = [[1, 0], *columns[bits(kw * mw) :], *([1 << bit, 0] for bit in range(5, half))]

    def wider(bases: list[list[int]]) -> list[list[int]]:
        return [[0, *basis] for basis in bases]

    parts = gl.DistributedLinearLayout(
        reg_bases=[*wider(registers), *([0, 1 << bit, 0] for bit in range(half, rows)), *([1 << bit, 0, 0] for bit in range(bits(kw)))],
        lane_bases=wider(lanes), warp_bases=wider(warps), block_bases=[], shape=[kw, m, n],
    )  # fmt: skip
    return Outputs(parts, gl.DistributedLinearLayout(registers, lanes, warps, [], [1 << half, n]))


@cache
def table(interpreted: bool, rows: int, columns: int, warps: int, wide: int) -> Any:
    """The layout of a table with `rows` lanes of a warp along the rows and runs of `wide` columns in a thread; `columns` = 0 for a list."""
    if interpreted:
        return None
    from triton.experimental.gluon import language as gl

    if columns == 0:
        return gl.BlockedLayout([1], [32], [warps], [0])
    return gl.BlockedLayout([1, wide], [rows, 32 // rows], [warps, 1], [1, 0])


def sliced(axis: int, rank: int, layout: Any) -> Any:
    """The layout of a list that becomes one axis of a tensor."""
    if layout is None:
        return None
    from triton.experimental.gluon import language as gl

    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


def of_eights(layout: Any) -> Any:
    """The layout of weights whose rows are two axes, the second of eight rows (which lanes have)."""
    if layout is None:
        return None
    from triton.experimental.gluon import language as gl

    def split(bases: list[list[int]]) -> list[list[int]]:
        return [[a, b // 8, b % 8, c, d] for a, b, c, d in bases]

    kw, m, c, e = layout.shape
    return gl.DistributedLinearLayout(
        split(layout.reg_bases), split(layout.lane_bases), split(layout.warp_bases), [], [kw, m // 8, 8, c, e]
    )  # fmt: skip


def of_scales(layout: Any) -> Any:
    """The layout of one scale for each chunk of weights."""
    if layout is None:
        return None
    from triton.experimental.gluon import language as gl

    return gl.SliceLayout(len(layout.shape) - 1, layout)
