"""Differentiable operations for training the demo network on one GPU, each fused where eager torch would pass over memory many times.

Every operation has two forms: plain torch (`*_reference`), which autograd differentiates and which runs on CPU, and an autograd function
over the Triton kernels of `triton_kernels`, which runs on CUDA, or anywhere under TRITON_INTERPRET=1. The public function picks by device.
Sums of key gradients are atomic, so the last bits of the kernels' gradients change from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import collapse, mix
from forebay.model.ops.rms_norm import rms_norm
from forebay.model.ops.swiglu import swiglu

TILE = 16  # rows each expert's run is padded to: 32 bytes of bf16, as the grouped products ask of a dimension cut at run time
HEADS, ENTRIES = 16, 64  # heads as padded for a product; entries per tile

# Shapes of the kernels' tiles, the last number the warps of a program; none of these spills registers on sm_90.
_WINDOW_FORWARD = (128, 32, 8)  # (row, head) pairs, keys
_WINDOW_BACKWARD = (128, 32, 8)
_ENTRIES_WARPS = (4, 4)  # forward, backward
_SINKHORN = (64, 4)  # rows
_STREAMS = (1, 1)  # rows; a row to a warp, so that sums over a row need no barrier
_NORM_PROGRAMS = 132 * 32  # that share the rows and sum the gradient of a norm's weight
_PROJECT_FORWARD = (64, 64, 4)  # rows, columns of fn
_PROJECT_BACKWARD = (64, 128, 8)
_PROJECT_PROGRAMS = 132  # that share the rows of one column block
_SWIGLU = (8, 4)  # rows
_ROUND = (64, 4)  # groups


def _fused(x: Tensor) -> bool:
    return x.is_cuda or _interpreted()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> SimpleNamespace:
    from forebay.model.demo.train import triton_kernels

    return triton_kernels.load(_interpreted())


def _apply(function: Any, *args: Any) -> Any:
    """function.apply(*args); torch leaves it untyped."""
    return function.apply(*args)


def _dot() -> Any:
    """Type of the factors of a product: the interpreter's product of bf16 is wrong."""
    tl = _kernels().tl
    return tl.float32 if _interpreted() else tl.bfloat16


# Straight-through rounding


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.dtype = x.dtype
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def straight_through(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """rounding(x), in whatever float type it returns, with the gradient of the identity in the type of x."""
    return cast(Tensor, _apply(_StraightThrough, x, rounding))


def fp8_round(x: Tensor) -> Tensor:
    """`formats.fp8_round`, [..., n] bf16 or fp32 -> bf16, which holds its values exactly; straight-through."""
    return straight_through(x, lambda y: _round(y, formats.fp8_round, 0, formats.GROUP))


def index_round(x: Tensor) -> Tensor:
    """`formats.index_round`, [..., n] bf16 or fp32 -> bf16, which holds its values exactly; straight-through."""
    return straight_through(x, lambda y: _round(y, formats.index_round, 1, formats.GROUP))


def main_round(x: Tensor) -> Tensor:
    """Main FP4 and back, [..., n] bf16 or fp32 -> bf16, which holds its values exactly; straight-through."""
    return straight_through(x, lambda y: _round(y, lambda z: formats.main_decode(*formats.main_encode(z)), 2, formats.MAIN_GROUP))


def _round(x: Tensor, reference: Callable[[Tensor], Tensor], form: int, group: int) -> Tensor:
    if not _fused(x):
        return reference(x).to(torch.bfloat16)
    k = _kernels()
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    groups, (block, warps) = x.numel() // group, _ROUND
    k.round_groups[(k.cdiv(groups, block),)](x, out, groups, FORM=form, G=group, BG=block, num_warps=warps)
    return out


# Attention


def gathered_attention(
    q: Tensor,
    window_keys: Tensor,
    window_start: Tensor,
    window_count: Tensor,
    entries: Tensor | None,
    entry_index: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    with_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of each row over a run of window keys and a list of entries, K = V, one softmax with a sink (spec/model.md §3.4).

    o_h = sum_t e^(s_t - M) v_t / (sum_t e^(s_t - M) + e^(sink_h - M)), s_t = scale * q_h . k_t; 0 where a row has neither key nor entry.
    With g = dL/do, lse the logarithm of the denominator (M added), p_t = e^(s_t - lse) and delta = o . g:
    ds_t = p_t (g . v_t - delta), dq = scale * sum_t ds_t k_t, dk_t = sum_h (scale * ds_t q_h + p_t g_h) over all rows that read key t, and
    dsink_h = -sum_rows e^(sink_h - lse) delta.

    Args:
        q: [n, H, d] bf16, H at most 16 and d a power of two (from 16) on the kernels.
        window_keys: [m, d] bf16. Row i reads keys window_start[i] … window_start[i] + window_count[i] - 1, all within m. Neighbouring rows
            should share keys: 128 / H rows are computed together, in time that grows with the number of keys any of them reads.
        window_start, window_count: [n] int32; a count may be 0.
        entries: [e, d] bf16 with entry_index [n, K] int32, rows of entries, -1 for none, K a multiple of 64; or None, None.
        sink: [H] fp32.
        with_mass: whether to return the mass.
    Returns:
        out [n, H, d] bf16; mass [n, K] fp32, each entry slot's probability summed over heads, without gradient, or None.
    """
    assert (entries is None) == (entry_index is None)
    if not _fused(q):
        return gathered_attention_reference(
            q, window_keys, window_start, window_count, entries, entry_index, sink, scale, with_mass=with_mass
        )
    assert q.shape[1] <= HEADS
    assert entry_index is None or (entry_index.shape[1] % ENTRIES == 0 and entry_index.dtype == torch.int32)
    assert window_start.dtype == window_count.dtype == torch.int32
    args = (q, window_keys, window_start, window_count, entries, entry_index, sink, scale, with_mass and entries is not None)
    return cast(tuple[Tensor, Tensor | None], _apply(_GatheredAttention, *args))


def gathered_attention_reference(
    q: Tensor,
    window_keys: Tensor,
    window_start: Tensor,
    window_count: Tensor,
    entries: Tensor | None,
    entry_index: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    with_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`gathered_attention` in torch; holds every row's keys as fp32."""
    reach = torch.arange(max(1, int(window_count.max())), device=q.device)
    valid = reach < window_count.unsqueeze(1)
    place = (window_start.unsqueeze(1) + reach).clamp(max=window_keys.shape[0] - 1).long()
    kv = functional.embedding(place, window_keys.float())
    if entries is not None and entry_index is not None:
        kv = torch.cat((kv, functional.embedding(entry_index.clamp(min=0).long(), entries.float())), 1)
        valid = torch.cat((valid, entry_index >= 0), 1)
    score = torch.bmm(q.float(), kv.transpose(1, 2)) * scale
    score = score.masked_fill(~valid.unsqueeze(1), -torch.inf)
    score = torch.cat((score, sink.view(1, -1, 1).expand(q.shape[0], -1, 1)), -1)
    p = score.softmax(-1)[..., :-1]
    out = torch.bmm(p, kv).to(q.dtype)
    if not with_mass or entry_index is None:
        return out, None
    return out, p[..., reach.numel() :].detach().sum(1)


class _GatheredAttention(torch.autograd.Function):
    """The window by tiles of neighbouring rows, then each row's entries on top of the window's part: two kernels each way."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        window_keys: Tensor,
        start: Tensor,
        count: Tensor,
        entries: Tensor | None,
        index: Tensor | None,
        sink: Tensor,
        scale: float,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor | None]:
        k, dot = _kernels(), _dot()
        q, window_keys, sink = q.contiguous(), window_keys.contiguous(), sink.float().contiguous()
        n, heads, dim = q.shape
        out = torch.empty_like(q)
        lse = torch.empty((n, heads), dtype=torch.float32, device=q.device)
        (pairs, keys, warps), (entry_warps, _) = _WINDOW_FORWARD, _ENTRIES_WARPS
        near, near_lse = (out, lse) if entries is None else (torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse))
        k.window_forward[(k.cdiv(n * heads, pairs),)](
            q, window_keys, start, count, sink, near, near_lse, n, window_keys.shape[0], scale,
            H=heads, D=dim, BQ=pairs, BK=keys, LAST=entries is None, DOT=dot, num_warps=warps,
        )  # fmt: skip
        mass = None
        if entries is not None and index is not None:
            entries, index = entries.contiguous(), index.contiguous()
            mass = torch.empty(index.shape, dtype=torch.float32, device=q.device) if with_mass else None
            k.entries_forward[(n,)](
                q, entries, index, sink, near, near_lse, out, lse, mass if mass is not None else lse, scale,
                H=heads, HP=HEADS, D=dim, K=index.shape[1], BK=ENTRIES, MASS=with_mass, DOT=dot, num_warps=entry_warps,
            )  # fmt: skip
        if mass is not None:
            ctx.mark_non_differentiable(mass)
        ctx.save_for_backward(q, window_keys, start, count, entries, index, sink, out, lse)
        ctx.scale = scale
        return out, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, dot = _kernels(), _dot()
        q, window_keys, start, count, entries, index, sink, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        n, heads, dim = q.shape
        delta = torch.empty_like(lse)
        dkeys = torch.zeros(window_keys.shape, dtype=torch.float32, device=q.device)
        dq = torch.empty_like(q)
        (pairs, keys, warps), (_, entry_warps) = _WINDOW_BACKWARD, _ENTRIES_WARPS
        near = dq if entries is None else torch.empty_like(q, dtype=torch.float32)
        k.window_backward[(k.cdiv(n * heads, pairs),)](
            q, window_keys, start, count, out, grad, lse, delta, near, dkeys, n, window_keys.shape[0], ctx.scale,
            H=heads, D=dim, BQ=pairs, BK=keys, DOT=dot, num_warps=warps,
        )  # fmt: skip
        dentries = None
        if entries is not None:
            sums = torch.zeros(entries.shape, dtype=torch.float32, device=q.device)
            k.entries_backward[(n,)](
                q, entries, index, grad, lse, delta, near, dq, sums, ctx.scale,
                H=heads, HP=HEADS, D=dim, K=index.shape[1], BK=ENTRIES, DOT=dot, num_warps=entry_warps,
            )  # fmt: skip
            dentries = sums.to(entries.dtype)
        dsink = -((sink - lse).exp() * delta).sum(0)
        return dq, dkeys.to(window_keys.dtype), None, None, dentries, None, dsink, None, None


# Hyper-connections


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`comb` of `ops.hyper_connections.coefficients` from its raw [n, S, S] fp32 -> [n, S, S] fp32; S a power of two.

    exp(x - row maximum) over its row sum, plus eps, over column sums plus eps; then iterations - 1 times over row and column sums plus eps.
    """
    if not _fused(logits):
        return sinkhorn_reference(logits, iterations, eps)
    return cast(Tensor, _apply(_Sinkhorn, logits, iterations, eps))


def sinkhorn_reference(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`sinkhorn` in torch."""
    comb = (logits - logits.amax(-1, keepdim=True)).exp()
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        k = _kernels()
        logits = logits.contiguous()
        comb = torch.empty_like(logits)
        n, size, _ = logits.shape
        rows, warps = _SINKHORN
        k.sinkhorn_forward[(k.cdiv(n, rows),)](logits, comb, n, eps, iterations=iterations, S=size, BR=rows, num_warps=warps)
        ctx.save_for_backward(logits)
        ctx.args = iterations, eps
        return comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k = _kernels()
        (logits,) = ctx.saved_tensors
        out = torch.empty_like(logits)
        n, size, _ = logits.shape
        (iterations, eps), (rows, warps) = ctx.args, _SINKHORN
        k.sinkhorn_backward[(k.cdiv(n, rows),)](
            logits, grads[0].contiguous(), out, n, eps, iterations=iterations, S=size, BR=rows, num_warps=warps
        )
        return out, None, None


def mix_streams(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`ops.hyper_connections.mix`: X'_k = post_k * y + sum_j comb[j, k] * X_j.

    Args: streams [n, S, D] bf16, out [n, D] bf16, post [n, S] fp32, comb [n, S, S] fp32; on the kernels S = 4 and D a power of two.
    Returns: [n, S, D] bf16.
    """
    if not _fused(streams):
        return mix(streams, out, post, comb)
    assert streams.shape[1] == 4
    return cast(Tensor, _apply(_Mix, streams, out, post, comb))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        k = _kernels()
        streams, out, post, comb = streams.contiguous(), out.contiguous(), post.contiguous(), comb.contiguous()
        mixed = torch.empty_like(streams)
        n, _, dim = streams.shape
        rows, warps = _STREAMS
        k.mix_forward[(k.cdiv(n, rows),)](streams, out, post, comb, mixed, n, D=dim, BR=rows, num_warps=warps)
        ctx.save_for_backward(streams, out, post, comb)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k = _kernels()
        saved = ctx.saved_tensors
        results = tuple(torch.empty_like(x) for x in saved)
        n, _, dim = saved[0].shape
        rows, warps = _STREAMS
        k.mix_backward[(k.cdiv(n, rows),)](*saved, grads[0].contiguous(), *results, n, D=dim, BR=rows, num_warps=warps)
        return results


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A sub-layer's normalised input, `rms_norm(collapse(streams, pre), weight, eps)`; the collapsed row is rounded to bf16 in between.

    Args: streams [n, S, D] bf16, pre [n, S] fp32, weight [D]; D a power of two on the kernels. Returns: [n, D] bf16.
    """
    if not _fused(streams):
        return rms_norm(collapse(streams, pre), weight, eps)
    return cast(Tensor, _apply(_CollapseNorm, streams, pre, weight, eps))


class _CollapseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
        k = _kernels()
        streams, pre, weight = streams.contiguous(), pre.contiguous(), weight.contiguous()
        n, size, dim = streams.shape
        out = torch.empty((n, dim), dtype=streams.dtype, device=streams.device)
        rows, warps = _STREAMS
        k.collapse_norm_forward[(k.cdiv(n, rows),)](streams, pre, weight, out, n, eps, S=size, D=dim, BR=rows, num_warps=warps)
        ctx.save_for_backward(streams, pre, weight)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k = _kernels()
        streams, pre, weight = ctx.saved_tensors
        n, size, dim = streams.shape
        rows, warps = _STREAMS
        programs = min(k.cdiv(n, rows), _NORM_PROGRAMS)
        dstreams, dpre = torch.empty_like(streams), torch.empty_like(pre)
        parts = torch.empty((programs, dim), dtype=torch.float32, device=streams.device)
        k.collapse_norm_backward[(programs,)](
            streams, pre, weight, grads[0].contiguous(), dstreams, dpre, parts, n, ctx.eps, S=size, D=dim, BR=rows, num_warps=warps
        )
        return dstreams, dpre, parts.sum(0).to(weight.dtype), None


def mhc_project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """The streams' raw coefficients, (fn . v) / sqrt(mean(v^2) + eps), v a row's streams one after the other.

    With y the result, r the reciprocal root and L = S*D: dv = r (fn^T g - (g . y) r v / L), dfn = sum_rows r g v^T.

    Args: streams [n, S, D] bf16, fn [N, S*D] fp32; on the kernels N at most 32 and S*D a multiple of 128. Returns: [n, N] fp32.
    """
    if not _fused(streams):
        return mhc_project_reference(streams, fn, eps)
    assert fn.shape[0] <= 32 and fn.shape[1] % 128 == 0
    return cast(Tensor, _apply(_Project, streams, fn, eps))


def mhc_project_reference(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """`mhc_project` in torch, with fp32 copies of the streams."""
    flat = streams.flatten(1).float()
    return functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, fn: Tensor, eps: float) -> Tensor:
        k = _kernels()
        streams, fn = streams.contiguous(), fn.float().contiguous()
        n, (columns, size) = streams.shape[0], fn.shape
        out = torch.empty((n, columns), dtype=torch.float32, device=fn.device)
        reciprocal = torch.empty(n, dtype=torch.float32, device=fn.device)
        rows, block, warps = _PROJECT_FORWARD
        k.project_forward[(k.cdiv(n, rows),)](
            streams, fn, out, reciprocal, n, eps, L=size, N=columns, NP=32, BR=rows, BL=block, num_warps=warps
        )
        ctx.save_for_backward(streams, fn, out, reciprocal)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k = _kernels()
        streams, fn, out, reciprocal = ctx.saved_tensors
        n, (columns, size) = streams.shape[0], fn.shape
        rows, block, warps = _PROJECT_BACKWARD
        programs = min(k.cdiv(n, rows), _PROJECT_PROGRAMS)
        dstreams = torch.empty_like(streams)
        parts = torch.empty((programs, *fn.shape), dtype=torch.float32, device=fn.device)
        k.project_backward[(size // block, programs)](
            streams, fn, out, reciprocal, grads[0].contiguous(), dstreams, parts, n,
            L=size, N=columns, NP=32, BR=rows, BL=block, num_warps=warps,
        )  # fmt: skip
        return dstreams, parts.sum(0), None


# Mixture of experts


def grouped_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    limit: float,
    round_input: Callable[[Tensor], Tensor],
) -> Tensor:
    """The routed half of `model.moe.MoE`, no token dropped: sum over a row's experts of their outputs.

    gate and up are rounded to bf16, h = bf16(weight * silu(min(gate, limit)) * clamp(up, ±limit)) goes through round_input, with the
    gradient of the identity, and each expert's output is rounded to bf16 before the sum. Its order is that of `indices`, which makes no
    difference for two experts. On CUDA nothing waits for the device.

    Args:
        x: [n, D] bf16, already rounded as the input of the experts. indices: [n, k] int64, no expert twice in a row. weights: [n, k] fp32.
        w_up: [E, 2I, D] bf16, gate rows then up rows. w_down: [E, D, I] bf16. D and I are multiples of 8.
        limit: of the clamped SwiGLU, 0 for none.
        round_input: the rounding of a quantised linear's input, such as `formats.fp8_round`; its result must fit bf16.
    Returns:
        [n, D] fp32.
    """
    if not _fused(x):
        return grouped_experts_reference(x, indices, weights, w_up, w_down, limit, round_input)
    place, source, offsets = expert_layout(indices, w_up.shape[0])
    rows = cast(Tensor, _apply(_Dispatch, x, place, source))
    weight = weights.new_zeros(source.shape[0]).index_copy(0, place, weights.flatten())
    h = cast(Tensor, _apply(_Swiglu, _apply(_GroupedLinear, rows, w_up, offsets), weight, limit))
    h = straight_through(h, lambda y: round_input(y).to(torch.bfloat16))
    return cast(Tensor, _apply(_Combine, _apply(_GroupedLinear, h, w_down, offsets), place, source, indices.shape[1]))


def grouped_experts_reference(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    limit: float,
    round_input: Callable[[Tensor], Tensor],
) -> Tensor:
    """`grouped_experts` in torch, one expert after the other."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(w_up.shape[0]):
        row, slot = (indices == e).nonzero(as_tuple=True)
        if not row.numel():
            continue
        gate, up = functional.linear(x[row].float(), w_up[e].float()).to(torch.bfloat16).chunk(2, -1)
        h = straight_through(swiglu(gate, up, limit, weights[row, slot]), round_input)
        total = total.index_add(0, row, functional.linear(h.float(), w_down[e].float()).to(torch.bfloat16).float())
    return total


def expert_layout(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the experts' common buffer, of static size R = n*k + E * TILE (up to the next TILE), computed on the device alone.

    Each expert has a run of whole tiles, at least one, so that an unused expert's weights get a gradient of 0; the last has the rest too.

    Args: indices [n, k] int64.
    Returns:
        place [n*k] int64, the buffer row of each assignment; source [R] int64, the row of x that a buffer row holds, n for none;
        offsets [E] int32, where each expert's run ends.
    """
    n, topk = indices.shape
    flat = indices.flatten()
    chosen, order = flat.to(torch.int16).sort(stable=True)
    bounds = torch.searchsorted(chosen, torch.arange(experts + 1, dtype=torch.int16, device=flat.device))
    begin, count = bounds[:-1], bounds.diff()
    runs = ((count + TILE - 1) // TILE * TILE).clamp(min=TILE)
    ends = runs.cumsum(0)
    row = torch.arange(n * topk, device=flat.device) + (ends - runs - begin)[chosen.long()]
    place = torch.empty_like(flat).scatter_(0, order, row)
    size = -(-n * topk // TILE) * TILE + experts * TILE
    source = torch.full((size,), n, dtype=torch.int64, device=flat.device).scatter_(0, row, order // topk)
    ends[-1] = size
    return place, source, ends.to(torch.int32)


def _rows_of(x: Tensor, source: Tensor) -> Tensor:
    """x [n, D] by source [R], zeros where it is n."""
    return torch.cat((x, x.new_zeros((1, x.shape[1])))).index_select(0, source)


class _Dispatch(torch.autograd.Function):
    """x [n, D] -> the experts' buffer [R, D]; backwards the sum over a row's assignments, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return _rows_of(x, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        parts = grads[0].index_select(0, place).view(ctx.rows, -1, grads[0].shape[1])
        return parts.sum(1, dtype=torch.float32).to(grads[0].dtype), None, None


class _Combine(torch.autograd.Function):
    """The experts' outputs [R, D] bf16 -> the sum of each row's [n, D] fp32."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, place: Tensor, source: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(source)
        ctx.dtype = out.dtype
        return out.index_select(0, place).view(-1, topk, out.shape[1]).sum(1, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (source,) = ctx.saved_tensors
        return _rows_of(grads[0].to(ctx.dtype), source), None, None, None


class _GroupedLinear(torch.autograd.Function):
    """x [R, in] bf16 in runs that end at offsets [E] int32, w [E, out, in] bf16 -> [R, out] bf16, fp32 sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w, offsets)
        return functional.grouped_mm(x, w.transpose(-2, -1), offs=offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        grad = grads[0].contiguous()
        dw = functional.grouped_mm(grad.T, x, offs=offsets)  # [out, R] x [R, in], a product for each run
        return functional.grouped_mm(grad, w, offs=offsets), dw, None


class _Swiglu(torch.autograd.Function):
    """`ops.swiglu.swiglu` of gate and up side by side: [R, 2I] bf16, weight [R] fp32 -> [R, I] bf16."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, weight: Tensor, limit: float) -> Tensor:
        k = _kernels()
        rows, inner = up.shape[0], up.shape[1] // 2
        h = torch.empty((rows, inner), dtype=up.dtype, device=up.device)
        padded, (block, warps) = 1 << (inner - 1).bit_length(), _SWIGLU
        k.swiglu_forward[(k.cdiv(rows, block),)](
            up, weight, h, rows, limit, I=inner, BI=padded, BR=block, CLAMP=limit > 0, num_warps=warps
        )
        ctx.save_for_backward(up, weight)
        ctx.limit = limit
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k = _kernels()
        up, weight = ctx.saved_tensors
        rows, inner = up.shape[0], up.shape[1] // 2
        dup, dweight = torch.empty_like(up), torch.empty_like(weight)
        padded, (block, warps) = 1 << (inner - 1).bit_length(), _SWIGLU
        k.swiglu_backward[(k.cdiv(rows, block),)](
            up, weight, grads[0].contiguous(), dup, dweight, rows, ctx.limit,
            I=inner, BI=padded, BR=block, CLAMP=ctx.limit > 0, num_warps=warps,
        )  # fmt: skip
        return dup, dweight, None
