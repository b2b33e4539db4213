"""Triton kernels of the indexer; `index_ops` documents what they compute and wraps them.

Keys stay packed in memory: a byte holds two channels, the even one low. Even and odd channels are kept apart, so nothing is interleaved:
a product is that of the even channels plus that of the odd ones. An E2M1 code becomes a float by placing its three bits at the float's
bit 22, which is 2^-126 of its value; half of that power goes to the scale of the key, half to the query, so that nothing overflows.

Operands of a product are cast to `DOT`: bf16 on a GPU, where it is exact for FP4 values, and fp32 in Triton's interpreter, whose bf16
product is wrong. `ROUND` asks for rounding to bf16 by integer arithmetic, since the interpreter cuts off.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton
    import triton
    import triton.language as tl

    @triton.jit
    def queries(q, cos, sin, out, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
        """One row: rotation of the last W channels of each head, then FP4 in groups of 32 and back. Heads are padded to HP."""
        row = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, HP)[:, None, None]
        channel = tl.arange(0, D // 32)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        at = row * H * D + head * D + channel
        live = head < H
        x = tl.load(q + at, mask=live, other=0.0).to(tl.float32)
        other = tl.load(q + row * H * D + head * D + (channel ^ 1), mask=live, other=0.0).to(tl.float32)
        turned = channel >= D - W
        place = row * W + channel - (D - W)
        c = tl.load(cos + place, mask=turned, other=1.0)
        s = tl.load(sin + place, mask=turned, other=0.0)
        bits = (x * c + other * s).to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(turned, rounded, x)
        top = tl.maximum(tl.max(tl.abs(x), 2, keep_dims=True), 7.052966104933725e-38) * 0.16666667163372040  # 6 * 2^-126 at least
        exponent = ((top.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 255
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        a = tl.abs(scaled)
        value = tl.where(a > 0.25, 0.5, 0.0) + tl.where(a >= 0.75, 0.5, 0.0) + tl.where(a > 1.25, 0.5, 0.0)
        value += tl.where(a >= 1.75, 0.5, 0.0) + tl.where(a > 2.5, 1.0, 0.0) + tl.where(a >= 3.5, 1.0, 0.0) + tl.where(a > 5.0, 2.0, 0.0)
        value = tl.where(x < 0.0, -value, value) * scale
        bad = tl.max(tl.where(x != x, 1, 0), 2, keep_dims=True)  # a NaN spoils its group, to be noticed in the logits
        value = tl.where(bad > 0, float("nan"), value)
        tl.store(out + at, value.to(tl.bfloat16), mask=live)

    @triton.jit
    def scores(
        q, weights, codes, scales, table, blocks, tile_first, tile_rows, span, visible, out, maxima,
        code_block, code_row, scale_block, scale_row, table_stride, block_stride, out_stride, maxima_stride, columns,
        H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, ENTRIES: tl.constexpr, SIZE: tl.constexpr,
        RESTRICTED: tl.constexpr, MAXIMA: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, ROUND: tl.constexpr,
    ):  # fmt: skip
        """BK keys of one span, dequantised once, against the rows of a tile; grid (ceil(columns / BK), tiles).

        RESTRICTED: column c is entry blocks[row, c // SIZE] * SIZE + c % SIZE, of a tile of one row. MAXIMA: also the largest score of
        each SIZE columns, +inf where the newest visible one is. ENTRIES: entries of one block of the pool.
        """
        tile = tl.program_id(1)
        row = tl.load(tile_first + tile).to(tl.int64)
        last = row + tl.load(tile_rows + tile)
        column = tl.program_id(0) * BK + tl.arange(0, BK)
        seen = tl.load(visible + tl.maximum(last - 1, row))  # the rows of a span ascend: its last one sees most
        entry = column
        there = column < columns
        if RESTRICTED:
            block = tl.load(blocks + row * block_stride + column // SIZE, mask=there, other=-1)
            entry = block * SIZE + column % SIZE
            there = there & (block >= 0)
        there = there & (entry < seen)
        begin = tl.program_id(0) * BK
        needed = begin < seen
        if RESTRICTED:
            needed = begin < columns
        if needed:
            sequence = tl.load(span + row).to(tl.int64)
            page = tl.load(table + sequence * table_stride + entry // ENTRIES, mask=there, other=0).to(tl.int64)
            place = entry % ENTRIES
            group = tl.arange(0, D // 32)
            byte = group[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            at = page * code_block + place * code_row
            packed = tl.load(codes + at[:, None, None] + byte, mask=there[:, None, None], other=0).to(tl.int32)
            at = page * scale_block + place * scale_row
            power = tl.load(scales + at[:, None] + group[None, :], mask=there[:, None], other=0).to(tl.int32)
            power = ((power + 63) << 23).to(tl.float32, bitcast=True)[:, :, None]
            even = (((packed & 7) << 22) | ((packed & 8) << 28)).to(tl.float32, bitcast=True)
            odd = (((packed & 0x70) << 18) | ((packed & 0x80) << 24)).to(tl.float32, bitcast=True)
            even = tl.reshape(even * power, [BK, D // 2]).to(DOT)
            odd = tl.reshape(odd * power, [BK, D // 2]).to(DOT)
            head = tl.arange(0, HP)
            pair = tl.arange(0, D // 2) * 2
            while row < last:
                spot = (row * H + head)[None, :] * D + pair[:, None]
                live = head[None, :] < H
                low = (tl.load(q + spot, mask=live, other=0.0).to(tl.float32) * 9.223372036854775808e18).to(DOT)
                high = (tl.load(q + spot + 1, mask=live, other=0.0).to(tl.float32) * 9.223372036854775808e18).to(DOT)
                part = tl.dot(odd, high, tl.dot(even, low))
                weight = tl.load(weights + row * H + head, mask=head < H, other=0.0).to(tl.float32)[None, :]
                if ROUND:
                    bits = part.to(tl.int32, bitcast=True)
                    part = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                    part = tl.where(part < 0.0, 0.0, part) * weight
                    bits = part.to(tl.int32, bitcast=True)
                    part = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                    total = tl.sum(part, 1)
                    bits = total.to(tl.int32, bitcast=True)
                    total = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
                else:
                    part = part.to(tl.bfloat16).to(tl.float32)
                    part = (tl.where(part < 0.0, 0.0, part) * weight).to(tl.bfloat16).to(tl.float32)  # a NaN stays one
                    total = tl.sum(part, 1).to(tl.bfloat16).to(tl.float32)
                mine = tl.load(visible + row)
                total = tl.where(there & (entry < mine), total, float("-inf"))
                tl.store(out + row * out_stride + column, total.to(tl.bfloat16), mask=column < columns)
                if MAXIMA:
                    best = tl.where(total == total, total, float("inf"))
                    best = tl.max(tl.reshape(best, [BK // SIZE, SIZE]), 1)
                    run = tl.program_id(0) * (BK // SIZE) + tl.arange(0, BK // SIZE)
                    best = tl.where((run == (mine - 1) // SIZE) & (run * SIZE < mine), float("inf"), best)
                    tl.store(maxima + row * maxima_stride + run, best.to(tl.bfloat16), mask=run * SIZE < columns)
                row += 1

    return SimpleNamespace(queries=queries, scores=scores)
