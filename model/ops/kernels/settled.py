"""Waiting for the tensor cores, where the compiler would not.

On Hopper a product whose left factor is in registers runs on while the program goes on. Triton lets the last products of a loop's round do
so, counting on the assembler to leave their registers alone; before CUDA 13.3 it does not, and what the next round computes goes into
registers that those products still read: sums are wrong then, now and then (https://github.com/triton-lang/triton/issues/9433).
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

_SAME = "mov.b32 $0, $1;"


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """`_settled(acc, EXACT)`; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, triton, _settled, SAME
    import triton
    import triton.language as tl

    SAME = tl.constexpr(_SAME)

    @triton.jit
    def _settled(acc, EXACT: tl.constexpr):
        """acc fp32, sums of products, which are over when it is there. For the sums of a product in a loop, where it ends a round."""
        if not EXACT:
            acc = tl.inline_asm_elementwise(SAME, "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)
        return acc

    return SimpleNamespace(_settled=_settled)
