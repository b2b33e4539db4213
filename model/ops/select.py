"""Top-k selection of entries with a defined answer at ties (spec/model.md §5.3, §5.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def select_top(
    scores: Tensor, k: int, widths: Sequence[int | None], columns: Tensor | None = None, visible: Tensor | None = None
) -> Tensor:
    """The k best columns of each row.

    Scores are bf16 and tie often. A tie at the cut goes to the lower column, so that the answer depends on nothing but the history before
    a row: what a prefix computes is then the same whatever follows it, and may be cached. The reference instead takes what `torch.topk`
    gives over a row as wide as its whole prompt; a row with a `width` follows it, to be compared with its output.

    Args:
        scores: [n, m] bf16, -inf where a column may not be chosen.
        k: how many.
        widths: per row, None for ties to the lower column, or the number of columns of the reference's score row, padded with -inf.
        columns: [n, m] int64, the position of each score in its full row, ascending, -1 unused; None when column i is position i.
        visible: [n] int64, for rows that may choose among `columns` only. Where those are fewer than k, the choice goes on among the
            masked columns as among equals, and what it takes of them below `visible` counts. None leaves such places empty.
    Returns:
        [n, k] int64 positions in the full row, ascending, -1 where nothing (finite) was left to choose.
    """
    m = scores.shape[1]
    take = min(k, m)
    best = torch.topk(scores, take, dim=-1)
    chosen = best.indices if columns is None else columns.gather(1, best.indices)
    chosen = chosen.masked_fill(best.values == -torch.inf, -1)
    if take < k:
        chosen = torch.nn.functional.pad(chosen, (0, k - take), value=-1)
    undecided = (chosen < 0).any(-1) if visible is not None else None
    if m > k:
        # More columns reach the last chosen score than were chosen: the cut runs through a tie.
        cut = best.values.amin(-1, keepdim=True)
        tied = ((scores >= cut).sum(-1) > take) & (cut.squeeze(-1) > -torch.inf)
        undecided = tied if undecided is None else undecided | tied
    if undecided is not None:
        for width, members in _by_width(undecided.nonzero().flatten().tolist(), widths).items():
            if width is None:
                chosen[members] = _lowest(scores[members], k, *(part[members] if part is not None else None for part in (columns, visible)))
                continue
            # One spare column takes what unused places scatter.
            full = torch.full((len(members), width + 1), -torch.inf, dtype=scores.dtype, device=scores.device)
            part = scores[members]
            if columns is None:
                limit = min(width, m)
                full[:, :limit] = part[:, :limit]
            else:
                place = columns[members]
                used = place >= 0
                full.scatter_(1, torch.where(used, place, width), part)
            found = torch.topk(full[:, :width], min(k, width), dim=-1).indices
            if visible is not None:
                found = found.masked_fill(found >= visible[members].unsqueeze(1), -1)
            chosen[members, : found.shape[1]] = found
    last = torch.iinfo(torch.int64).max
    ordered = chosen.masked_fill(chosen < 0, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)


def _lowest(scores: Tensor, k: int, columns: Tensor | None, visible: Tensor | None) -> Tensor:
    """`select_top` where equals are taken from the lowest column on, for rows with at least k columns."""
    if columns is not None:
        assert visible is not None
        width = max(k, int(visible.max()))
        full = scores.new_full((scores.shape[0], width + 1), -torch.inf)
        scores = full.scatter_(1, torch.where(columns >= 0, columns, width), scores)[:, :width]
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)  # chosen first, as by topk: a broken row must not break the others
    cut = torch.topk(scores, k, dim=-1).values[:, -1:]
    above, equal = scores > cut, scores == cut
    room = k - above.sum(-1, keepdim=True)
    found = (above | (equal & (equal.cumsum(-1) <= room))).nonzero()[:, 1].view(-1, k)
    return found if visible is None else found.masked_fill(found >= visible.unsqueeze(1), -1)


def _by_width(rows: list[int], widths: Sequence[int | None]) -> dict[int | None, list[int]]:
    groups: dict[int | None, list[int]] = {}
    for row in rows:
        groups.setdefault(widths[row], []).append(row)
    return groups


def block_maxima(scores: Tensor, size: int) -> Tensor:
    """Best score of each run of `size` columns, the last run padded with -inf: [n, m] -> [n, ceil(m/size)]."""
    short = -scores.shape[1] % size
    if short:
        scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    return scores.unflatten(1, (-1, size)).amax(-1)
