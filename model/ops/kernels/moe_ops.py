"""Router, experts and FP8 linears for few rows (1 to 64), each one kernel that reads the weights once (spec/model.md §8).

Buffers in which programs meet belong to `Meeting`; one object serves one CUDA stream at a time. Nothing waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tuning(NamedTuple):
    """How a kernel shares its work; every choice gives the same numbers but for the order of sums.

    rows: weight rows (output channels) of a program, 32 or more. groups: groups of 32 inputs a round, at least 4. warps; stages: rounds of
    loads in flight. programs: how many there should be at least, where the inputs can be split (linears and the router). slots: programs
    that share the shared expert's part of a run of channels; a part has 32 channels or more. sum_rows: rows summed at a time.
    fast: decode weights by packed bit tricks (exact for scales from 2^-58 to 2^65); otherwise by plain arithmetic.
    """

    rows: int = 64
    groups: int = 4
    warps: int = 4
    stages: int = 4
    programs: int = 264  # two for each multiprocessor of an H200
    slots: int = 1
    sum_rows: int = 32
    fast: bool = True


LINEAR, ROUTE, UP, DOWN = Tuning(), Tuning(programs=132, stages=3), Tuning(groups=8, stages=3), Tuning(groups=8)


def tuning_space(kernel: str) -> list[Tuning]:
    """What a sweep on a new machine should try for "linear", "up", "down" or "route"; the first is what is used without one."""
    first = {"linear": LINEAR, "up": UP, "down": DOWN, "route": ROUTE}[kernel]
    if kernel == "route":
        others = [first._replace(warps=w, stages=s, programs=p) for w in (4, 8) for s in (2, 3) for p in (66, 132, 264)]
    else:
        shapes = [(rows, warps) for rows, warps in ((32, 2), (32, 4), (64, 4), (128, 4), (128, 8))]
        ways = (132, 264, 396, 528) if kernel == "linear" else (0,)
        others = [
            first._replace(rows=rows, warps=warps, groups=g, stages=s, programs=p or first.programs, slots=max(1, rows // 64))
            for rows, warps in shapes for g in (4, 8) for s in (3, 4, 6) for p in ways
        ]  # fmt: skip
        others.append(first._replace(fast=False))
    return [first, *(t for t in others if t != first)]


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
    meeting: Meeting, *, scale: float, normalise: bool, temperature: float = 1.0, position: Tensor | None = None,
    tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """`fp32_linear` by the gate, then `router.route`.

    x [n, D] and gate [experts, D] bf16, biases [experts] fp32, image_mask [n] bool or uint8, position [n] int64 -> indices [n, topk] int32
    best first, weights [n, topk] fp32. A row of position < 0 is padding: indices -1, weights 0.

    Floor: the gate, 3.93 MB for 384 experts; 3.9 MFLOP a row.
    """
    n, d = x.shape
    experts, topk = gate.shape[0], indices.shape[1]
    if n == 0:
        return
    tuned = tuning or ROUTE
    k, block, step = _kernels(), min(64, _power(experts)), min(128, _power(d))
    blocks, rows = -(-experts // block), -(-n // 16)
    most = -(-d // step)
    splits = min(most, 20, max(1, tuned.programs // (blocks * rows)))
    chunk = -(-most // splits) * step
    splits = -(-d // chunk)
    meeting.check(splits * n * experts, rows)
    none = meeting.arrived
    mask = none if image_mask is None else image_mask.view(torch.uint8)
    k.route[(rows, blocks, splits)](
        x, gate, bias, bias_image, mask, none if position is None else position, meeting.partial, meeting.arrived, indices, weights, n,
        temperature, scale, D=d, E=experts, EP=_power(experts), TOPK=topk, BE=block, BK=step, CHUNK=chunk, SPLITS=splits,
        TR=min(4, _power(n)), MASKED=image_mask is not None, PADDED=position is not None, NORMALISE=normalise, DOT=_dot(),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip


def sort_assignments(indices: Tensor, experts: int, order: Tensor, offsets: Tensor) -> None:
    """indices [n, topk] int32 -> order [n * topk] int32, assignments expert by expert, and offsets [experts + 1] int32 into it.

    Assignments to expert -1 (padding) are left out: offsets[experts] is how many there are.

    Floor: 8 bytes an assignment, but every expert's program reads all assignments, from L2.
    """
    count = indices.numel()
    if count == 0:
        offsets.zero_()
        return
    _kernels().sort[(experts,)](indices, order, offsets, count, BA=min(1024, _power(count)), num_warps=4)


def _words(weight: Tensor) -> Tensor:
    """Codes as int32."""
    return weight.view(torch.int32)


def experts(
    rounded: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], indices: Tensor, weights: Tensor, limit: float,
    shared_up: tuple[Tensor, Tensor] | None, shared_down: tuple[Tensor, Tensor] | None, h: Tensor, parts: Tensor, out: Tensor,
    meeting: Meeting, *, up_tuning: Tuning | None = None, down_tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """A whole mixture of experts after its router, in two kernels: `MoE.__call__` on an input that is FP8-rounded.

    Args:
        rounded: [n, D] bf16, FP8-rounded. up: codes [E, 2I, D/2] uint8 (w1, then w3) and scales [E, 2I, D/32] uint8.
        down: codes [E, D, I/2] and scales [E, D, I/32]. indices [n, topk] int32, no expert twice in a row, all -1 in a row of padding,
        for which no weights are read and out is 0; weights [n, topk] fp32.
        shared_up, shared_down: the shared expert, FP8: codes [2I, D] (w1, then w3) and scales [2I/32, D/32]; [D, I] and [D/32, I/32].
        Written: h [n * topk + n, I] bf16, parts [n * topk + n, D] bf16, out [n, D] bf16; without a shared expert the last n rows of the
        first two are not needed. n * topk is at most 1,024.

    Floor: 18.8 MB for each distinct expert of the batch at the released sizes (4.25 bits a weight, 35.4 M weights), 35.4 MB for the shared
    one; 71 MFLOP an assignment.
    """
    n, d = rounded.shape
    inter, topk = h.shape[1], indices.shape[1]
    count = n * topk
    if count == 0:
        return
    if count > 1024:
        raise ValueError(f"{count} assignments are more than 1,024, what this kernel is for")
    shared = shared_up is not None and shared_down is not None
    k, slots, rows = _kernels(), _power(count), max(16, min(64, _power(n)))
    same: dict[str, Any] = {"TOPK": topk, "AP": slots, "ROWS": rows, "DOT": _dot(), "EXACT": _interpreted(), "D": d, "I": inter}
    few = n <= 16  # tiles of more rows take the room of wider rounds
    first, second = up_tuning or (UP if few else UP._replace(groups=4)), down_tuning or (DOWN if few else DOWN._replace(groups=4, stages=3))
    tall, shares = _tall(first, inter), 1
    if shared:
        shares = max(1, min(first.slots, tall // 32))
    k.expert_up[(count + shares * shared, -(-inter // tall))](
        rounded.view(torch.int64), _words(up[0]), up[1], _words(shared_up[0] if shared_up else up[0]), shared_up[1] if shared_up else up[1],
        indices, weights, h, count, n, limit, BN=tall, G=max(4, min(first.groups, _power(d // 32))), SLOTS=shares, CLAMP=limit > 0,
        FAST=first.fast and not _interpreted(), num_warps=first.warps, num_stages=first.stages, **same,
    )  # fmt: skip
    tall, shares = _tall(second, d), 1
    if shared:
        shares = max(1, min(second.slots, tall // 32))
    tiles = -(-d // tall)
    meeting.check(0, tiles)
    k.expert_down[(count + shares * shared, tiles)](
        h.view(torch.int64), _words(down[0]), down[1], _words(shared_down[0] if shared_down else down[0]),
        shared_down[1] if shared_down else down[1], indices, parts, meeting.arrived, out, count, n, KP=_power(topk), BN=tall,
        G=max(4, min(second.groups, _power(inter // 32))), SLOTS=shares, TR=min(second.sum_rows, _power(n)), SHARED=shared,
        FAST=second.fast and not _interpreted(), num_warps=second.warps, num_stages=second.stages, **same,
    )  # fmt: skip


def _tall(tuning: Tuning, channels: int) -> int:
    return max(32, min(tuning.rows, _power(channels)))


def fp8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, out: Tensor, meeting: Meeting, *, groups: int = 1, round_output: bool = False,
    tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """`quantised_linear` of an `Fp8Weight`, or with `groups` `Ops.grouped_linear`: output group g has the inputs [g * K, (g + 1) * K) of x.

    x [n, groups * K] bf16 (FP8-rounded where the layer asks for it; rows may be apart by a multiple of 4), codes [O, K] and scales
    [O/32, K/32] uint8 -> out [n, O] bf16, with `round_output` FP8-rounded for the next linear. O/groups is a multiple of 32 where there
    are several groups. Up to 64 rows share one reading of the weights.

    Floor: O * K bytes, 2 * O * K FLOP a row.
    """
    n = x.shape[0]
    outs, k_in = codes.shape
    if n == 0:
        return
    tuned, per, wide = tuning or LINEAR, outs // groups, k_in // 32
    tall = _tall(tuned, outs)
    while groups > 1 and per % tall:
        tall //= 2
    k, g, rows = _kernels(), max(4, min(tuned.groups, _power(wide))), max(16, min(64, _power(n)))
    blocks, row_blocks, most = -(-outs // tall), -(-n // rows), -(-wide // g)
    splits = min(most, max(1, -(-tuned.programs // (blocks * row_blocks))), 16)
    chunk = -(-most // splits) * g
    splits = -(-wide // chunk)
    meeting.check(splits * n * outs if splits > 1 else 0, blocks * row_blocks)
    k.fp8_linear[(blocks, row_blocks, splits)](
        x.view(torch.int64), _words(codes), scales, out, meeting.partial, meeting.arrived, n, x.stride(0) // 4, K=k_in, O=outs,
        GROUPS=groups, BN=tall, G=g, CHUNK=chunk, SPLITS=splits, ROWS=rows, ROUND=round_output, FAST=tuned.fast and not _interpreted(),
        DOT=_dot(), EXACT=_interpreted(), num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip


Case = tuple[str, Callable[[torch.device], tuple[Any, ...]], Callable[..., Any], int, int]


def bench_cases() -> list[Case]:
    """(name, make_inputs(device), run(*inputs), least bytes, FLOPs) at the released dimensions; 64 experts, as the synthetic model.

    `run` also takes `tuning`, that of the experts `up_tuning` and `down_tuning`.
    """
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

    def run_route(*inputs: Any, tuning: Tuning | None = None) -> None:
        route(*inputs, scale=1.5, normalise=True, tuning=tuning)

    def expert_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            up = codes(count, 2 * inter, d // 2, device=device), codes(count, 2 * inter, d // 32, device=device, low=115, high=122)
            down = codes(count, d, inter // 2, device=device), codes(count, d, inter // 32, device=device, low=115, high=122)
            picked = torch.arange(n * topk, device=device, dtype=torch.int32).view(n, topk) % count  # as many distinct experts as can be
            bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
            h, parts = torch.empty((n * topk + n, inter), **bf16), torch.empty((n * topk + n, d), **bf16)
            x, out = torch.randn((n, d), **bf16), torch.empty((n, d), **bf16)
            s_up = codes(2 * inter, d, device=device, high=120), codes(2 * inter // 32, d // 32, device=device, low=110, high=120)
            s_down = codes(d, inter, device=device, high=120), codes(d // 32, inter // 32, device=device, low=110, high=120)
            return x, up, down, picked, torch.rand((n, topk), device=device), 10.0, s_up, s_down, h, parts, out, Meeting(1, 256, device)

        return make

    def linear_inputs(n: int, outs: int, k: int, groups: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x = torch.randn((n, groups * k), device=device).bfloat16()
            w = codes(outs, k, device=device, high=120), codes(outs // 32, k // 32, device=device, low=110, high=120)
            out = torch.empty((n, outs), dtype=torch.bfloat16, device=device)
            return x, *w, out, Meeting(17 * n * outs, 8192, device), groups

        return make

    def run_linear(*inputs: Any, tuning: Tuning | None = None) -> None:
        fp8_linear(*inputs[:-1], groups=inputs[-1], tuning=tuning)

    for n in (1, 8, 64):
        cases.append((f"router n={n}", route_inputs(n), run_route, 384 * d * 2 + n * d * 2, 2 * n * 384 * d))
        moved = min(count, n * topk) * 3 * inter * d * 17 // 32 + 3 * inter * d
        cases.append((f"experts n={n}", expert_inputs(n), experts, moved, 6 * n * (topk + 1) * inter * d))
        for name, outs, k, groups in (
            ("w_in", 1792, d, 1), ("wq_b", 32768, 1280, 1), ("wo_a", 8192, 4096, 8), ("wo_b", d, 8192, 1), ("shared up", 2 * inter, d, 1),
        ):  # fmt: skip
            cases.append((f"fp8 {name} n={n}", linear_inputs(n, outs, k, groups), run_linear, outs * k, 2 * n * outs * k))
    return cases
