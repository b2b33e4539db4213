"""The Triton kernel behind `moe_ops.sort_assignments`."""

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
    def sort(indices, order, offsets, count, BA: tl.constexpr):
        """Program e: where expert e's assignments begin, and their numbers in ascending order. offsets [experts + 1]."""
        e = tl.program_id(0)
        before = 0
        start = 0
        while start < count:
            at = start + tl.arange(0, BA)
            other = tl.load(indices + at, mask=at < count, other=-1)
            before += tl.sum(((other >= 0) & (other < e)).to(tl.int32), 0)
            start += BA
        tl.store(offsets + e, before)
        start = 0
        while start < count:
            at = start + tl.arange(0, BA)
            mine = (tl.load(indices + at, mask=at < count, other=-1) == e).to(tl.int32)
            tl.store(order + before + tl.cumsum(mine, 0) - 1, at, mask=mine != 0)
            before += tl.sum(mine, 0)
            start += BA
        if e == tl.num_programs(0) - 1:
            tl.store(offsets + e + 1, before)

    return SimpleNamespace(sort=sort)
