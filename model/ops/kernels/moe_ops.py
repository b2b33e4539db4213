"""Router, routed experts and FP8 linears for few rows (1 to 64), each one kernel that reads the weights once (spec/model.md §8).

Buffers in which programs meet belong to `Meeting`; one object serves one CUDA stream at a time. Nothing waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PROGRAMS = 264  # two for each multiprocessor of an H200, at least, where there is that much to share


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> SimpleNamespace:
    from forebay.model.ops.kernels import moe

    return moe.load(_interpreted())


def _dot() -> Any:
    """Type of the factors of a product: the interpreter's product of bf16 is wrong."""
    tl = _kernels().tl
    return tl.float32 if _interpreted() else tl.bfloat16


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Meeting:
    """Partial sums (`floats` fp32) and counters, zero between launches, of kernels that share a sum between programs."""

    def __init__(self, floats: int, counters: int, device: torch.device | str) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(counters, dtype=torch.int32, device=device)

    def check(self, floats: int, counters: int) -> None:
        if floats > self.partial.numel() or counters > self.arrived.numel():
            raise ValueError(f"{floats} partial sums and {counters} counters are more than these buffers hold")


def route(
    x: Tensor, gate: Tensor, bias: Tensor, bias_image: Tensor, image_mask: Tensor | None, indices: Tensor, weights: Tensor,
    meeting: Meeting, *, scale: float, normalise: bool, temperature: float = 1.0,
) -> None:  # fmt: skip
    """`fp32_linear` by the gate, then `router.route`.

    x [n, D] and gate [experts, D] bf16, biases [experts] fp32, image_mask [n] bool or uint8 -> indices [n, topk] int32 best first, weights
    [n, topk] fp32. Floor: the gate, 3.93 MB for 384 experts; 3.9 MFLOP a row.
    """
    n, d = x.shape
    experts, topk = gate.shape[0], indices.shape[1]
    if n == 0:
        return
    k, block, step = _kernels(), min(64, _power(experts)), min(128, _power(d))
    blocks, rows = -(-experts // block), -(-n // 16)
    most = -(-d // step)
    splits = min(most, 20, max(1, 132 // (blocks * rows)))
    chunk = -(-most // splits) * step
    splits = -(-d // chunk)
    meeting.check(splits * n * experts, rows)
    mask = meeting.arrived if image_mask is None else image_mask.view(torch.uint8)
    k.route[(rows, blocks, splits)](
        x, gate, bias, bias_image, mask, meeting.partial, meeting.arrived, indices, weights, n, temperature, scale, D=d, E=experts,
        EP=_power(experts), TOPK=topk, BE=block, BK=step, CHUNK=chunk, SPLITS=splits, TR=min(4, _power(n)), MASKED=image_mask is not None,
        NORMALISE=normalise, DOT=_dot(), num_warps=4,
    )  # fmt: skip


def sort_assignments(indices: Tensor, experts: int, order: Tensor, offsets: Tensor) -> None:
    """indices [n, topk] int32 -> order [n * topk] int32, assignments expert by expert, and offsets [experts + 1] int32 into it.

    Floor: 8 bytes an assignment, but every expert's program reads all assignments, from L2.
    """
    count = indices.numel()
    if count == 0:
        offsets.zero_()
        return
    _kernels().sort[(experts,)](indices, order, offsets, count, BA=min(1024, _power(count)), num_warps=4)


def experts(
    rounded: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], indices: Tensor, weights: Tensor, limit: float,
    shared: Tensor | None, h: Tensor, parts: Tensor, out: Tensor, meeting: Meeting,
) -> None:  # fmt: skip
    """`RoutedExperts` and the sum with the shared expert's output, in two kernels.

    Args:
        rounded: [n, D] bf16, FP8-rounded. up: codes [E, 2I, D/2] uint8 (w1, then w3) and scales [E, 2I, D/32] uint8.
        down: codes [E, D, I/2] and scales [E, D, I/32]. indices [n, topk] int32, no expert twice in a row; weights [n, topk] fp32.
        shared: [n, D] bf16 or None. Written: h [n * topk, I] bf16, parts [n * topk, D] bf16, out [n, D] bf16. n * topk is at most 1,024.

    Floor: 18.8 MB for each distinct expert of the batch at the released sizes (4.25 bits a weight, 35.4 M weights), 71 MFLOP an
    assignment.
    """
    n, d = rounded.shape
    inter, topk = h.shape[1], indices.shape[1]
    count = n * topk
    if count == 0:
        return
    if count > 1024:
        raise ValueError(f"{count} assignments are more than 1,024, what this kernel is for")
    k, dot, exact = _kernels(), _dot(), _interpreted()
    slots, wide = _power(count), 64
    tall = min(64, _power(inter))
    k.expert_up[(count, -(-inter // tall))](
        rounded.view(torch.int32), *up, indices, weights, h, count, limit, D=d, I=inter, TOPK=topk, AP=slots, BN=tall,
        G=min(4, _power(d // 32)), CLAMP=limit > 0, DOT=dot, EXACT=exact, num_warps=4, num_stages=4,
    )  # fmt: skip
    tiles = -(-d // wide)
    meeting.check(0, tiles)
    k.expert_down[(count, tiles)](
        h.view(torch.int32), *down, indices, meeting.arrived if shared is None else shared, parts, meeting.arrived, out, count, n,
        D=d, I=inter, TOPK=topk, KP=_power(topk), AP=slots, BN=wide, G=min(4, _power(inter // 32)), TR=min(8, _power(n)),
        SHARED=shared is not None, DOT=dot, EXACT=exact, num_warps=4, num_stages=4,
    )  # fmt: skip


def fp8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, out: Tensor, meeting: Meeting, *, groups: int = 1, round_output: bool = False
) -> None:
    """`quantised_linear` of an `Fp8Weight`, or with `groups` `Ops.grouped_linear`: output group g has the inputs [g * K, (g + 1) * K) of x.

    x [n, groups * K] bf16 (FP8-rounded where the layer asks for it), codes [O, K] and scales [O/32, K/32] uint8 -> out [n, O] bf16, with
    `round_output` FP8-rounded for the next linear. O/groups is a multiple of 32 where there are several groups.

    Floor: O * K bytes, 2 * O * K FLOP a row.
    """
    n = x.shape[0]
    outs, k_in = codes.shape
    if n == 0:
        return
    per = outs // groups
    tall = 64 if groups == 1 or per % 64 == 0 else 32
    k, g = _kernels(), min(4, _power(k_in // 32))
    blocks, rows, most = -(-outs // tall), -(-n // 16), -(-(k_in // 32) // g)
    splits = min(most, max(1, -(-_PROGRAMS // (blocks * rows))), 16)
    chunk = -(-most // splits) * g
    splits = -(-(k_in // 32) // chunk)
    meeting.check(splits * n * outs if splits > 1 else 0, blocks * rows)
    k.fp8_linear[(blocks, rows, splits)](
        x, codes, scales, out, meeting.partial, meeting.arrived, n, x.stride(0), K=k_in, O=outs, GROUPS=groups, BN=tall, G=g, CHUNK=chunk,
        SPLITS=splits, ROUND=round_output, DOT=_dot(), EXACT=_interpreted(), num_warps=4, num_stages=4,
    )  # fmt: skip


Case = tuple[str, Callable[[torch.device], tuple[Any, ...]], Callable[..., Any], int, int]


def bench_cases() -> list[Case]:
    """(name, make_inputs(device), run(*inputs), least bytes, FLOPs) at the released dimensions; 64 experts, as the synthetic model."""
    d, inter, count, topk = 5120, 2304, 64, 6
    cases: list[Case] = []

    def codes(*shape: int, device: torch.device, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    def route_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x, gate = (torch.randn((rows, d), device=device).bfloat16() for rows in (n, 384))
            bias = torch.randn(384, device=device)
            found = torch.empty((n, topk), dtype=torch.int32, device=device), torch.empty((n, topk), device=device)
            return x, gate, bias, bias, None, *found, Meeting(20 * n * 384, 64, device)

        return make

    def run_route(*inputs: Any) -> None:
        route(*inputs, scale=1.5, normalise=True)

    def expert_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            up = codes(count, 2 * inter, d // 2, device=device), codes(count, 2 * inter, d // 32, device=device, low=115, high=122)
            down = codes(count, d, inter // 2, device=device), codes(count, d, inter // 32, device=device, low=115, high=122)
            picked = torch.arange(n * topk, device=device, dtype=torch.int32).view(n, topk) % count  # as many distinct experts as can be
            bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
            h, parts = torch.empty((n * topk, inter), **bf16), torch.empty((n * topk, d), **bf16)
            x, out = torch.randn((n, d), **bf16), torch.empty((n, d), **bf16)
            return x, up, down, picked, torch.rand((n, topk), device=device), 10.0, x.clone(), h, parts, out, Meeting(1, 256, device)

        return make

    def linear_inputs(n: int, outs: int, k: int, groups: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x = torch.randn((n, groups * k), device=device).bfloat16()
            w = codes(outs, k, device=device, high=120), codes(outs // 32, k // 32, device=device, low=110, high=120)
            out = torch.empty((n, outs), dtype=torch.bfloat16, device=device)
            return x, *w, out, Meeting(17 * n * outs, 8192, device), groups

        return make

    def run_linear(*inputs: Any) -> None:
        fp8_linear(*inputs[:-1], groups=inputs[-1])

    for n in (1, 8, 64):
        cases.append((f"router n={n}", route_inputs(n), run_route, 384 * d * 2 + n * d * 2, 2 * n * 384 * d))
        moved = min(count, n * topk) * 3 * inter * d * 17 // 32
        cases.append((f"experts n={n}", expert_inputs(n), experts, moved, 6 * n * topk * inter * d))
        for name, outs, k, groups in (
            ("wq_a", 1280, d, 1), ("wq_b", 32768, 1280, 1), ("wo_a", 8192, 4096, 8), ("wo_b", d, 8192, 1), ("shared up", 2 * inter, d, 1),
        ):  # fmt: skip
            cases.append((f"fp8 {name} n={n}", linear_inputs(n, outs, k, groups), run_linear, outs * k, 2 * n * outs * k))
    return cases
