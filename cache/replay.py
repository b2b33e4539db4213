"""Where a request with cached blocks resumes, as a pure function (architecture §4 and §5, spec/model.md §12).

Only global KV is cached by block. What a prompt needs besides is the sliding window before the first position it computes, and that comes
from a window somebody has (a running sequence, a snapshot in Redis), or from replay: tokens before the resume point run again and write no
global KV. A plan is **faithful** when everything computed after it has the bits of a cold run, given that the blocks have.

With P the prompt's length, W the window, h the resume point (a block boundary) and a = P - W the position from which a bounded prefill
runs the decoder half:

- A window at boundary s <= h makes rows from s on exact. With s <= a the decoder half finds all rows it wants among them: faithful, if
  no more replays are behind the window than behind the blocks. That is why windows are kept at the last two boundaries: the last one
  alone lies after `a` whenever less than a window is new.
- With s > a the encoder outputs of [a, s) are kept nowhere. Decoder rows stored with the window stand in for them (more exact than the
  cold run's own, so not equal to it); without these, [a, s) runs again on what the window reaches.
- Bounded replay runs [h - W, h) again, reading nothing below h - W: an approximation, and always W tokens.
- Exact replay starts early enough that every layer's window is right: one window less a token for each layer that runs.
- An exact prefill runs both halves over everything and takes only plans that leave it exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.cache.records import MOST_LINEAGE

Origin = Literal["none", "live", "swa", "replay"]
Mode = Literal["bounded", "exact"]


@dataclass(frozen=True)
class Geometry:
    """What a plan needs of a model: tokens of a window and of a block, layers of each half that own a window."""

    window: int
    block_tokens: int
    encoder_layers: int
    decoder_layers: int


@dataclass(frozen=True)
class KnownWindow:
    """A window that can be loaded: rows [boundary - W, boundary) of the encoder half, and of the decoder half too unless `decoder_floor`
    is None. The floor is where the decoder rows before it began: 0 when they are those of an exact prefill."""

    boundary: int
    origin: Literal["live", "swa"]
    lineage: int = 0
    decoder_floor: int | None = None


@dataclass(frozen=True)
class ResumePlan:
    """Positions in tokens: the fields of the first Row, and where the window comes from.

    Attributes:
        resume: tokens whose global KV is taken from the cache; a block boundary. Positions below it write none.
        start: first position computed.
        window_from, decoder_window_from: positions below are never read as window keys, by the encoder and the decoder half.
        decoder_from: positions below do not run the decoder half.
        origin: of the window before `start`.
        boundary: of the window to load, None if none is.
        with_decoder: the window's decoder rows are loaded as well.
        faithful: the result equals a cold run's, if the adopted blocks do.
        approximates: rows that later blocks depend on are computed from truncated windows: these blocks have one more replay behind them.
        windows_from: windows at boundaries from here on are as `lineage` says and can be kept; earlier ones are not.
        lineage: bounded replays behind what this sequence computes.
    """

    resume: int
    start: int
    window_from: int
    decoder_from: int
    decoder_window_from: int
    origin: Origin = "none"
    boundary: int | None = None
    with_decoder: bool = False
    faithful: bool = True
    approximates: bool = False
    windows_from: int = field(default=0, compare=False)
    lineage: int = 0

    @property
    def write_from(self) -> int:
        return self.resume

    @property
    def replayed(self) -> int:
        """Tokens computed although their global KV was there."""
        return self.resume - self.start


def plan_resume(
    prompt_tokens: int,
    hit_tokens: int,
    geometry: Geometry,
    *,
    windows: Iterable[KnownWindow] = (),
    prefill: Mode = "bounded",
    replay: Mode = "bounded",
    lineages: Sequence[int] = (),
    max_lineage: int | None = None,
) -> ResumePlan:
    """The cheapest resume of a prompt of `prompt_tokens` whose first `hit_tokens` are cached.

    The hit is cut to whole blocks and so that at least one token is computed, since the last prompt token's logits are kept nowhere. A
    hit of one window or less is not adopted: replaying it costs as much as computing it, and computing it is exact.

    Cost is tokens computed. A faithful plan is preferred to a cheaper one as long as it costs no more than bounded replay, so that a
    text depends on what is cached only when the window is gone. With `replay="exact"` or `prefill="exact"` only faithful plans are taken.

    Args:
        windows: those that belong to this prompt's beginning; boundaries beyond the hit are ignored.
        lineages: of the cached blocks, one per block; missing ones count as 0.
        max_lineage: plans that leave more replays than this behind what they compute are not taken; None for no limit.
    """
    size, window = geometry.block_tokens, geometry.window
    resume = min(hit_tokens, prompt_tokens - 1) // size * size
    anchor = 0 if prefill == "exact" else max(0, prompt_tokens - window)
    cold = ResumePlan(0, 0, 0, anchor, anchor)
    if resume <= window:
        return cold
    behind = max(lineages[: resume // size], default=0)
    faithful: list[ResumePlan] = [cold]
    others: list[ResumePlan] = []
    for known in windows:
        plan = _from_window(known, resume, anchor, behind, geometry, prefill)
        if plan is not None:
            (faithful if plan.faithful else others).append(plan)
    faithful.append(_exact_replay(resume, anchor, behind, geometry, prefill, replay))
    best = min(faithful, key=_cost)
    if prefill == "exact" or replay == "exact":
        return best
    start = resume - window
    bounded = ResumePlan(
        resume, start, start, anchor, anchor, "replay", faithful=False, approximates=True, windows_from=resume, lineage=_one_more(behind)
    )
    # One that has no replay behind it and yet differs from a cold run (by its decoder rows) counts as one here.
    allowed = [plan for plan in (bounded, *others) if max_lineage is None or max(plan.lineage, 1) <= max_lineage]
    if best.start >= bounded.start or not allowed:
        return best
    return min(allowed, key=lambda plan: (plan.lineage, _cost(plan)))


def wanted_boundaries(prompt_tokens: int, hit_tokens: int, geometry: Geometry, prefill: Mode = "bounded") -> list[int]:
    """Boundaries whose window would serve such a prompt, best first; empty when nothing would be adopted."""
    size, window = geometry.block_tokens, geometry.window
    resume = min(hit_tokens, prompt_tokens - 1) // size * size
    if resume <= window:
        return []
    last, before = resume, resume - size
    exact_at_last = prefill == "exact" or last <= prompt_tokens - window
    return [place for place in ((last, before) if exact_at_last else (before, last)) if place > 0]


def kept_boundaries(prompt_tokens: int, geometry: Geometry) -> list[int]:
    """Boundaries at which a prompt's window is kept: the last two that a repetition of it can resume at, and its end if it is one."""
    size = geometry.block_tokens
    last = (prompt_tokens - 1) // size * size
    places = {last - size, last, prompt_tokens // size * size}
    return sorted(place for place in places if place >= geometry.window and place > 0)


def least_hit_blocks(window: int, block_tokens: int) -> int:
    """Blocks in the shortest chain `plan_resume` would adopt."""
    return window // block_tokens + 1


def _one_more(lineage: int) -> int:
    return min(lineage + 1, MOST_LINEAGE)


def _cost(plan: ResumePlan) -> tuple[int, int]:
    """Tokens to compute, as the negative of where that begins; among equals a window is better than a replay."""
    return -plan.start, plan.origin == "replay"


def _from_window(known: KnownWindow, resume: int, anchor: int, behind: int, geometry: Geometry, prefill: Mode) -> ResumePlan | None:
    """The best plan with this window, None when it is of no use."""
    s, floor = known.boundary, known.decoder_floor
    if not 0 < s <= resume or s % geometry.block_tokens:
        return None
    low, lineage = max(0, s - geometry.window), max(behind, known.lineage)
    if prefill == "exact":
        exact = floor == 0 and lineage == 0
        return ResumePlan(resume, s, low, 0, 0, known.origin, s, with_decoder=True, windows_from=s) if exact else None
    if s <= anchor:
        # A window with more replays behind it than the blocks is not the one that a cold run over these blocks would have.
        fits = known.lineage <= behind
        return ResumePlan(resume, s, low, anchor, anchor, known.origin, s, faithful=fits, windows_from=s, lineage=lineage)
    if floor is not None and floor <= low:
        return ResumePlan(
            resume, s, low, s, low, known.origin, s, with_decoder=True, faithful=False, windows_from=s, lineage=lineage
        )
    more = _one_more(lineage)
    return ResumePlan(
        resume, anchor, low, anchor, anchor, known.origin, s, faithful=False, approximates=True, windows_from=resume, lineage=more
    )


def _exact_replay(resume: int, anchor: int, behind: int, geometry: Geometry, prefill: Mode, replay: Mode) -> ResumePlan:
    """Replay that starts so early that every row of interest is exact (spec/model.md §12.1)."""
    reach = geometry.window - 1
    if prefill == "exact":
        start = max(0, resume - (geometry.encoder_layers + geometry.decoder_layers) * reach)
        return ResumePlan(resume, start, start, start, start, "replay", windows_from=resume, lineage=behind)
    # Rows from `anchor` on need exact encoder outputs, rows from `resume` on exact encoder windows.
    exact_from = min(resume, anchor)
    if replay == "exact":
        # From the boundary before, the window there is exact too and can be kept: the next repetition of the prompt need not replay again.
        exact_from -= exact_from % geometry.block_tokens
    start = max(0, exact_from - geometry.encoder_layers * reach)
    return ResumePlan(resume, start, start, anchor, anchor, "replay", windows_from=exact_from, lineage=behind)
