"""Reading and writing rows of paged planes (cache/layout.py) by block and place."""

from __future__ import annotations

from torch import Tensor

from forebay.model.ops import formats


def gather_rows(plane: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """plane [blocks, entries, row] uint8, block and place [...] int64 -> [..., row] uint8.

    A block's stride is a whole number of rows in practice; the plane is then one strided matrix of rows and a plain row copy does it,
    an order of magnitude faster on CPU than two-index gathering.
    """
    stride, row = plane.stride(0), plane.shape[2]
    if plane.stride(2) == 1 and plane.stride(1) == row and stride % row == 0:
        per_block = stride // row
        count = (plane.shape[0] - 1) * per_block + plane.shape[1]
        rows = plane.as_strided((count, row), (row, 1), plane.storage_offset())
        return rows.index_select(0, (block * per_block + place).reshape(-1)).view(*block.shape, row)
    return plane[block, place]


def entry_places(tables: Tensor, sequence: Tensor, entries: Tensor, per_block: int) -> tuple[Tensor, Tensor]:
    """Block and place of entries; -1 (no entry) points at the null block, whose zero bytes decode to zeros.

    Args: tables [spans, blocks] int64, sequence [n] int64, entries [n, k] int64. Returns two [n, k] int64.
    """
    missing = entries < 0
    safe = entries.clamp(min=0)
    block = tables[sequence.unsqueeze(-1), safe // per_block].masked_fill(missing, 0)
    return block, (safe % per_block).masked_fill(missing, 0)


def gather_main(codes: Tensor, scales: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """Main KV entries, dequantised: [..., head_dim] fp32."""
    return formats.main_decode(gather_rows(codes, block, place), gather_rows(scales, block, place))


def gather_index(codes: Tensor, scales: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """Index keys, dequantised: [..., index_head_dim] fp32."""
    return formats.index_decode(gather_rows(codes, block, place), gather_rows(scales, block, place))
