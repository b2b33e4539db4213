"""Rows of paged planes."""

from __future__ import annotations

import torch

from forebay.model.ops import formats
from forebay.model.ops.gather import entry_places, gather_index, gather_main, gather_rows
from forwards import difference


def test_both_ways_of_reading_a_plane_agree() -> None:
    """A block stride that is a whole number of rows, one that is not, and a plane that does not begin where the block does."""
    g = torch.Generator().manual_seed(0)
    block, place = torch.randint(0, 9, (7, 5), generator=g), torch.randint(0, 4, (7, 5), generator=g)
    for block_bytes in (4 * 6 + 4 * 3, 4 * 6 + 5, 4 * 6 + 4 * 6):
        data = torch.randint(0, 256, (9, block_bytes), generator=g, dtype=torch.uint8)
        for offset in {0, block_bytes - 24}:
            plane = data[:, offset : offset + 24].view(-1, 4, 6)
            found = gather_rows(plane, block, place)
            for i in range(7):
                for j in range(5):
                    b, p = int(block[i, j]), int(place[i, j])
                    assert torch.equal(found[i, j], data[b, offset + 6 * p : offset + 6 * p + 6]), (block_bytes, offset)


def test_places_follow_the_block_table() -> None:
    tables = torch.tensor([[7, 3, 9], [2, 8, 0]])
    block, place = entry_places(tables, torch.tensor([0, 1, 0]), torch.tensor([[0, 5, 11], [3, 4, -1], [-1, 8, -1]]), 4)
    assert block.tolist() == [[7, 3, 9], [2, 8, 0], [0, 9, 0]]
    assert place.tolist() == [[0, 1, 3], [3, 0, 0], [0, 0, 0]]


def test_entries_are_dequantised_and_missing_ones_are_zero() -> None:
    g = torch.Generator().manual_seed(1)
    main, key = torch.randn(2, 4, 32, generator=g), torch.randn(2, 4, 32, generator=g)
    planes = [torch.cat((torch.zeros_like(part[:1]), part)) for part in (*formats.main_encode(main), *formats.index_encode(key))]
    block, place = entry_places(torch.tensor([[2, 1]]), torch.tensor([0]), torch.tensor([[0, 6, -1]]), 4)
    found = gather_main(planes[0], planes[1], block, place)[0]
    truth = formats.main_decode(*formats.main_encode(main))
    assert difference(found, torch.stack((truth[1, 0], truth[0, 2], torch.zeros(32)))) is None
    found = gather_index(planes[2], planes[3], block, place)[0]
    truth = formats.index_decode(*formats.index_encode(key))
    assert difference(found, torch.stack((truth[1, 0], truth[0, 2], torch.zeros(32)))) is None
