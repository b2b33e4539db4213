"""Kernels that begin while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel of a decode step takes some microseconds, of which it spends two or three on being launched, on its first loads and on waiting for
its last programs. Launched with `OPTIONS`, its programs may start once every program of the kernel before has passed its `_await` or ended,
and they take what has become free. So what comes before `_await` in a kernel overlaps with the kernel before: there it may only touch what
no kernel of a step writes (weights, tables, sizes), or what is older than the kernel before.

Rules, since nothing checks them:

- Every program calls `_await`, whatever its work, before it reads what the kernel before may have written and before it writes anything. A
  kernel is over when all its programs are; so, as each has waited for the one before, all kernels before that are over too.
- Every program of a kernel is on the device by the time that the next one starts, so waiting for each other (`streams`) stays safe.
- A kernel launched without `OPTIONS`, such as a library's, starts when everything before it is over.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """`_await` for kernels in Triton, and in Gluon as `_await_gluon`; `OPTIONS` of their launches.

    It returns when the kernel before is over and its writes can be read, and lets the next one start. Where a kernel was launched without
    `OPTIONS`, or after one that is over, it does nothing.

    interpreted: whether TRITON_INTERPRET is set; then it does nothing either.
    """
    global tl, wait, release, _await, _await_gluon
    import triton
    import triton.language as tl  # the interpreter wants to find it

    if interpreted:

        @triton.jit
        def _await():
            pass

        return SimpleNamespace(_await=_await, _await_gluon=_await, OPTIONS={})

    from triton.experimental import gluon
    from triton.language.extra.cuda import gdc_launch_dependents as release
    from triton.language.extra.cuda import gdc_wait as wait

    @triton.jit
    def _await():
        wait()
        release()

    @gluon.jit
    def _await_gluon():
        wait()
        release()

    return SimpleNamespace(_await=_await, _await_gluon=_await_gluon, OPTIONS={"launch_pdl": True})
