"""Top-k selection of entries with a defined answer at ties (spec/model.md §5.3, §5.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

GROUPED = 8  # columns of a group
GROUPED_FROM = 8192  # scores from which looking at groups first is worth it
_NOTHING = -0x7F81  # highest 16 bits of the rank of -inf


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
    place, found = _best(scores, take)
    chosen = (place if columns is None else columns.gather(1, place)).masked_fill(~found, -1)
    if take < k:
        chosen = functional.pad(chosen, (0, k - take), value=-1)
    undecided = (chosen < 0).any(-1) if visible is not None else None
    if m > k and any(width is not None for width in widths):
        # More columns reach the last chosen score than were chosen: the cut runs through a tie.
        cut = scores.gather(1, place).amin(-1, keepdim=True)
        tied = ((scores >= cut).sum(-1) > take) & (cut.squeeze(-1) > -torch.inf)
        undecided = tied if undecided is None else undecided | tied
    if undecided is not None:
        for width, members in _by_width(undecided.nonzero().flatten().tolist(), widths).items():
            if width is None:
                if columns is not None and visible is not None:
                    chosen[members] = _go_on(scores[members], k, columns[members], visible[members])
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


def _go_on(scores: Tensor, k: int, columns: Tensor, visible: Tensor) -> Tensor:
    """`select_top` of rows with too few columns to choose from: what is missing comes from the lowest masked ones on."""
    width = max(k, int(visible.max()))
    full = scores.new_full((scores.shape[0], width + 1), -torch.inf)
    place, _ = _best(full.scatter_(1, torch.where(columns >= 0, columns, width), scores)[:, :width], k)
    return place.masked_fill(place >= visible.unsqueeze(1), -1)


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best columns of each row in no order, the lower first among equals, and which of them are more than -inf.

    Score and column make one integer, different in every column. So `topk` has no ties to settle, and the best of many columns lie in
    the k groups of columns with the best maxima.
    """
    n, m = scores.shape
    # Broken rows choose what is broken, as by topk: they must not break the others. Adding 0 makes -0 what it equals.
    bits = scores.float().nan_to_num_(torch.inf, torch.inf, -torch.inf).add_(0.0).view(torch.int32)
    narrow = m <= 1 << 16 and scores.dtype == torch.bfloat16  # which leaves 16 bits free
    rank = (bits >> 31).bitwise_and_(0x7FFF0000 if narrow else 0x7FFFFFFF).bitwise_xor_(bits)  # as integers in the order of the numbers
    if not narrow:
        rank = rank.to(torch.int64).bitwise_left_shift_(32)
    rank.bitwise_or_(torch.arange(m - 1, -1, -1, dtype=rank.dtype, device=rank.device))
    if m >= 2 * GROUPED * k and rank.numel() >= GROUPED_FROM:
        short = -m % GROUPED
        groups = (functional.pad(rank, (0, short), value=torch.iinfo(rank.dtype).min) if short else rank).view(n, GROUPED, -1)
        best = torch.topk(groups.amax(1), k, sorted=False).indices
        rank = groups.gather(2, best.unsqueeze(1).expand(n, GROUPED, k)).flatten(1)
    rank = torch.topk(rank, k, sorted=False).values
    columns = m - 1 - rank.bitwise_and(0xFFFF if narrow else 0xFFFFFFFF).to(torch.int64)
    return columns, rank >> (16 if narrow else 48) > _NOTHING


def _by_width(rows: list[int], widths: Sequence[int | None]) -> dict[int | None, list[int]]:
    groups: dict[int | None, list[int]] = {}
    for row in rows:
        groups.setdefault(widths[row], []).append(row)
    return groups


def block_maxima(scores: Tensor, size: int) -> Tensor:
    """Best score of each run of `size` columns, the last run padded with -inf: [n, m] -> [n, ceil(m/size)]."""
    short = -scores.shape[1] % size
    if short:
        scores = functional.pad(scores, (0, short), value=-torch.inf)
    return scores.unflatten(1, (-1, size)).amax(-1)
