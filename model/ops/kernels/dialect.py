"""What Gluon (the language under Triton's, in which a kernel says which thread has which element) and Triton do not have in common.

Kernels that use these run compiled, in Gluon, and in Triton's interpreter, which knows no layouts and no copies to shared memory, and
computes with fp32 factors, as its bf16 product is wrong.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import dependent, fragments, streams

# Two integers of two or four bf16 each -> pairs of their first, their second and so on.
PAIRS_OF_2 = """{
prmt.b32 $0, $2, $3, 0x5410;
prmt.b32 $1, $2, $3, 0x7632;
}"""
PAIRS_OF_4 = """{
.reg .b32 a, b, c, d;
mov.b64 {a, b}, $4;
mov.b64 {c, d}, $5;
prmt.b32 $0, a, c, 0x5410;
prmt.b32 $1, a, c, 0x7632;
prmt.b32 $2, b, d, 0x5410;
prmt.b32 $3, b, d, 0x7632;
}"""


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The language, its `jit`, the helpers and `dependent`'s `_await`, by name; `interpreted` is whether TRITON_INTERPRET is set."""
    global tl, gl, mma, copying, barrier, sliced, _add
    global _bf16, _round_fp8, _sigmoid, _range, _to, _zeros, _barrier, _running, _dot, _part, _parts2, _parts4, TWO, FOUR
    global _plain, _folded, _halves, _ring, _copy, _commit, _wait, _take, _spread, _axis, _await
    import triton
    import triton.language as tl

    jit = triton.jit
    streams.load(interpreted)
    _await = dependent.load(interpreted)._await_gluon
    _bf16, _round_fp8, _sigmoid = streams._bf16, streams._round_fp8, streams._sigmoid
    sliced, of_scales, of_eights = (triton.constexpr_function(f) for f in (fragments.sliced, fragments.of_scales, fragments.of_eights))
    if not interpreted:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import async_copy as copying
        from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma

        tl, jit = gl, gluon.jit
        TWO, FOUR = gl.constexpr(PAIRS_OF_2), gl.constexpr(PAIRS_OF_4)
        _bf16, _round_fp8, _sigmoid = jit(_bf16.fn), jit(_round_fp8.fn), jit(_sigmoid.fn)
        barrier = getattr(gl, "thread_barrier", None) or gl.barrier

    if interpreted:

        @jit
        def _range(size: tl.constexpr, LAYOUT: tl.constexpr):
            return tl.arange(0, size)

        @jit
        def _to(x, LAYOUT: tl.constexpr):
            return x

        @jit
        def _zeros(A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr):
            return tl.zeros([A, B, C], tl.float32)

        @jit
        def _barrier():
            tl.debug_barrier()

        @jit
        def _running(x, LAYOUT: tl.constexpr):
            """The sum of a list's elements up to each."""
            return tl.cumsum(x, 0)

        @jit
        def _dot(acc, a, b, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr):
            return tl.dot(tl.reshape(a, [KW, M, 8 * C]), tl.reshape(b, [KW, 8 * C, N]), acc, input_precision="ieee")

        @jit
        def _part(v, i: tl.constexpr):
            """The i-th bf16 of the several in an integer, as a factor."""
            return ((v >> (16 * i)).to(tl.int32) << 16).to(tl.float32, bitcast=True)

        @jit
        def _parts2(v):
            """Both bf16 of an int32, as factors."""
            return _part(v, 0), _part(v, 1)

        @jit
        def _parts4(v):
            """The four bf16 of an int64, as factors."""
            return _part(v, 0), _part(v, 1), _part(v, 2), _part(v, 3)

        @jit
        def _plain(v):
            """bf16 as a factor."""
            return v.to(tl.float32)

        @jit
        def _halves(x):
            """The first and the second half of a table's rows."""
            return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), [1, 2, 0]))

        @jit
        def _ring(STAGES: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
            """Shared memory for so many rounds of codes."""
            return 0

        @jit
        def _copy(ring, stage, pointers, mask):
            """Begin to bring what is at the pointers into a place of the ring; zeros where not mask."""

        @jit
        def _commit():
            """Every call ends a group of copies."""

        @jit
        def _wait(COUNT: tl.constexpr):
            """Until no more than the last COUNT groups are on their way."""

        @jit
        def _take(ring, stage, pointers, mask, LAYOUT: tl.constexpr):
            """What a place of the ring has, which is what is at the pointers."""
            return tl.load(pointers, mask=mask, other=0)
    else:

        @jit
        def _range(size: tl.constexpr, LAYOUT: tl.constexpr):
            return gl.arange(0, size, layout=LAYOUT)

        @jit
        def _to(x, LAYOUT: tl.constexpr):
            return gl.convert_layout(x, LAYOUT)

        @jit
        def _zeros(A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr):
            return gl.zeros([A, B, C], gl.float32, layout=LAYOUT)

        @jit
        def _barrier():
            barrier()

        @jit
        def _add(a, b):
            return a + b

        @jit
        def _running(x, LAYOUT: tl.constexpr):
            return gl.associative_scan(gl.convert_layout(x, LAYOUT), 0, _add)

        @jit
        def _dot(acc, a, b, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr):
            a = gl.convert_layout(gl.reshape(a, [KW, M, 8 * C]), gl.DotOperandLayout(0, SUMS, 8), assert_trivial=False)
            b = gl.convert_layout(gl.reshape(b, [KW, 8 * C, N]), gl.DotOperandLayout(1, SUMS, 8), assert_trivial=False)
            return mma(a, b, acc)

        @jit
        def _parts2(v):
            return gl.inline_asm_elementwise(TWO, "=&r,=&r,r,r", args=[v], dtype=(gl.bfloat16,) * 2, is_pure=True, pack=2)

        @jit
        def _parts4(v):
            return gl.inline_asm_elementwise(FOUR, "=&r,=&r,=&r,=&r,l,l", args=[v], dtype=(gl.bfloat16,) * 4, is_pure=True, pack=2)

        @jit
        def _plain(v):
            return v

        @jit
        def _halves(x):
            return gl.split(gl.permute(gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), [1, 2, 0]))

        @jit
        def _ring(STAGES: tl.constexpr, KW: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
            LAYOUT: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
            return gl.allocate_shared_memory(gl.int16, [STAGES, KW, M, C, 8], LAYOUT)

        @jit
        def _copy(ring, stage, pointers, mask):
            copying.async_copy_global_to_shared(ring.index(stage), pointers, mask=mask, cache_modifier=".cg")

        @jit
        def _commit():
            copying.commit_group()

        @jit
        def _wait(COUNT: tl.constexpr):
            copying.wait_group(COUNT)

        @jit
        def _take(ring, stage, pointers, mask, LAYOUT: tl.constexpr):
            return ring.index(stage).load(LAYOUT)

    @jit
    def _spread(x, axis: tl.constexpr, rank: tl.constexpr, LAYOUT: tl.constexpr):
        """A list laid along an axis."""
        x = _to(x, sliced(axis, rank, LAYOUT))
        for a in tl.static_range(rank):
            if a != axis:
                x = tl.expand_dims(x, a)
        return x

    @jit
    def _axis(size: tl.constexpr, axis: tl.constexpr, rank: tl.constexpr, LAYOUT: tl.constexpr):
        """0 up to size laid along an axis."""
        x = _range(size, sliced(axis, rank, LAYOUT))
        for a in tl.static_range(rank):
            if a != axis:
                x = tl.expand_dims(x, a)
        return x

    @jit
    def _folded(x, shape: tl.constexpr, LAYOUT: tl.constexpr):
        """The same elements, in order, as a tensor of another shape."""
        return _to(tl.reshape(x, shape), LAYOUT)

    names = (
        "_bf16", "_round_fp8", "_sigmoid", "_range", "_to", "_zeros", "_barrier", "_running", "_dot", "_parts2", "_parts4", "_plain",
        "_folded", "_halves", "_ring", "_copy", "_commit", "_wait", "_take", "_spread", "_axis", "_await",
    )  # fmt: skip
    return SimpleNamespace(tl=tl, jit=jit, of_scales=of_scales, of_eights=of_eights, **{name: globals()[name] for name in names})
