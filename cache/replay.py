"""Where a request with cached blocks resumes, as a pure function.

Only global KV is cached. The window KV below the resume point is rebuilt by bounded replay: exactly one window of tokens before it runs
again through the encoder half, fused with the suffix in one row (architecture §4, spec/model.md §12.1):

    row = (start = h - W, stop, write_from = h, window_from = h - W)

Replayed rows read nothing below `window_from` and write no entry of a group that ends at or below `write_from`, so stored bytes never
change; they do write window rows and the compressor's open group. `h` is a block boundary, which every ratio divides, so no group
straddles it. The replay start is off a group boundary when a ratio does not divide the window: that first group is already stored and
its missing half is never needed. Without a resume the row is (0, stop, 0, 0) and the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResumePlan:
    """Positions in tokens: the fields of the first Row, and how much of the prompt each part covers.

    Attributes:
        resume: tokens whose global KV is taken from the cache; a block boundary.
        write_from: positions below it write no global KV.
        window_from: positions below it are never read as window keys.
        start: first position computed.
        replayed: tokens computed only to rebuild window KV; `start + replayed == resume`.
    """

    resume: int
    write_from: int
    window_from: int
    start: int
    replayed: int


def plan_resume(prompt_tokens: int, hit_tokens: int, window: int, block_tokens: int | None = None) -> ResumePlan:
    """Cheapest correct resume of a prompt of `prompt_tokens` whose first `hit_tokens` are cached.

    The hit is cut to whole blocks (`block_tokens`, by default the window) and so that at least one token is computed, since the last
    prompt token's logits are kept nowhere. A hit of one window or less is not adopted: replaying it costs as much as computing it, and
    computing it is exact.
    """
    block = block_tokens or window
    resume = min(hit_tokens, prompt_tokens - 1) // block * block
    if resume <= window:
        return ResumePlan(0, 0, 0, 0, 0)
    return ResumePlan(resume, resume, resume - window, resume - window, window)


def least_hit_blocks(window: int, block_tokens: int) -> int:
    """Blocks in the shortest chain `plan_resume` would adopt."""
    return window // block_tokens + 1
