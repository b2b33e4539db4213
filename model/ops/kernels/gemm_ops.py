"""Products for many rows (65 to 8,192 and more), where arithmetic is what takes time: widened FP8 weights, MXFP4 experts in groups.

Nothing waits for the device: experts get as many programs as the worst case has tiles, and those past the last tile end at once.
The tile sizes are module constants, for a sweep to set. TILE_ROWS is the number of rows a widened weight is used for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS, TILE_GROUPS = 128, 64, 4  # the up product: assignments, channels of gate and of up, groups of 32 inputs a step
DOWN_ROWS, DOWN_COLUMNS, DOWN_GROUPS = 128, 128, 2  # two programs fit on a multiprocessor: one widens while the other multiplies
UP_WARPS, UP_STAGES, DOWN_WARPS, DOWN_STAGES = 8, 3, 8, 4


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> SimpleNamespace:
    from forebay.model.ops.kernels import gemm

    return gemm.load(_interpreted())


def _dot() -> Any:
    """Type of the factors of a product: the interpreter's product of bf16 is wrong."""
    tl = _kernels().tl
    return tl.float32 if _interpreted() else tl.bfloat16


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def widen(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """E4M3 codes [O, K] with E8M0 scales [O/32, K/32], uint8 -> out [O, K] bf16, exact. Floor: 3 bytes a weight."""
    rows, width = codes.shape
    tall, wide = 16, min(256, _power(width))
    _kernels().widen[(-(-rows // tall), -(-width // wide))](
        codes, scales, out, rows, K=width, BR=tall, BK=wide, EXACT=_interpreted(), num_warps=4
    )


def round_rows(y: Tensor) -> None:
    """`formats.fp8_round` in place: y contiguous bf16, channels a multiple of 32. Floor: 4 bytes a value."""
    count = y.numel() // 32
    if count:
        _kernels().round_rows[(-(-count // 64),)](y, count, B=64, num_warps=4)


def glu(gate_up: Tensor, limit: float, h: Tensor) -> None:
    """`swiglu` without routing weight, then `fp8_round`: gate_up [n, 2I] bf16 -> h [n, I] bf16. Floor: 6 bytes an output."""
    count, inter = h.numel() // 32, h.shape[1]
    if count:
        _kernels().glu[(-(-count // 32),)](gate_up, h, count, limit, I=inter, B=32, CLAMP=limit > 0, EXACT=_interpreted(), num_warps=4)


def experts(
    rounded: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], indices: Tensor, weights: Tensor, limit: float,
    shared: Tensor | None, order: Tensor, offsets: Tensor, pairs: Tensor, h: Tensor, parts: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """`RoutedExperts` and the sum with the shared expert's output, for many assignments, in four kernels after the sort.

    Args:
        rounded: [n, D] bf16, FP8-rounded. up: codes [E, 2I, D/2] uint8 (w1, then w3) and scales [E, 2I, D/32] uint8.
        down: codes [E, D, I/2] and scales [E, D, I/32]. indices [n, topk] int32, no expert twice in a row, all of a padded row -1 (its
            output is zeros); weights [n, topk] fp32. order [n * topk], offsets [E + 1] int32: `moe_ops.sort_assignments`.
        shared: [n, D] bf16 or None. Written: pairs [n, D], h [n * topk, I], parts [n * topk, D], out [n, D], all bf16.

    Floor: 6 * D * I FLOP an assignment (71 MFLOP at the released sizes) at the rate of bf16.
    """
    n, d = rounded.shape
    inter, topk, count = h.shape[1], indices.shape[1], indices.numel()
    if count == 0:
        return
    k, dot, exact = _kernels(), _dot(), _interpreted()
    number = up[0].shape[0]
    places = _power(number)
    k.split[(n, -(-d // 2048))](rounded.view(torch.int32), pairs.view(torch.int16), n, D=d, BD=1024, num_warps=4)
    rows, columns = min(TILE_ROWS, max(16, _power(count))), min(TILE_COLUMNS, _power(inter))
    tiles = min(count, count // rows + number)  # every expert has at most one tile that is not full
    k.up[(-(-inter // columns), tiles)](
        pairs, *up, order, offsets, weights, h, limit, D=d, I=inter, E=number, EP=places, TOPK=topk, BM=rows, BN=columns,
        G=min(TILE_GROUPS, _power(d // 32)), CLAMP=limit > 0, DOT=dot, EXACT=exact, num_warps=UP_WARPS, num_stages=UP_STAGES,
    )  # fmt: skip
    rows, columns = min(DOWN_ROWS, max(16, _power(count))), min(DOWN_COLUMNS, _power(d))
    tiles = min(count, count // rows + number)
    k.down[(-(-d // columns), tiles)](
        h, *down, order, offsets, parts, D=d, I=inter, E=number, EP=places, BM=rows, BN=columns,
        G=min(DOWN_GROUPS, _power(inter // 32)), DOT=dot, EXACT=exact, num_warps=DOWN_WARPS, num_stages=DOWN_STAGES,
    )  # fmt: skip
    k.combine[(n, -(-d // 1024))](
        parts, indices, parts if shared is None else shared, out, D=d, TOPK=topk, KP=_power(topk), BD=min(1024, _power(d)),
        SHARED=shared is not None, EXACT=exact, num_warps=4,
    )  # fmt: skip


Case = tuple[str, Callable[[torch.device], tuple[Any, ...]], Callable[..., Any], int, int]


def bench_cases() -> list[Case]:
    """(name, make_inputs(device), run(*inputs), least bytes, FLOPs) at the released dimensions; 64 experts, as the synthetic model.

    Beside each linear stands `torch.mm` of a bf16 weight of its shape: what is left is the widening.
    """
    from forebay.model.ops.device_linear import ExpertBank, Fp8Matrix
    from forebay.model.ops.kernels.moe_ops import Meeting

    d, inter, number, topk = 5120, 2304, 64, 6
    cases: list[Case] = []

    def codes(*shape: int, device: torch.device, low: int = 0, high: int = 120) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    def matrix(outs: int, k: int, groups: int, device: torch.device) -> Fp8Matrix:
        return Fp8Matrix(codes(outs, k, device=device), codes(outs // 32, k // 32, device=device, low=110), groups=groups)

    def linear_inputs(n: int, outs: int, k: int, groups: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x = torch.randn((n, groups * k), device=device).bfloat16()
            out = torch.empty((n, outs), dtype=torch.bfloat16, device=device)
            return matrix(outs, k, groups, device), x, out, Meeting(17 * 64 * outs, 8192, device)

        return make

    def plain_inputs(n: int, outs: int, k: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x, w = (torch.randn(shape, device=device).bfloat16() for shape in ((n, k), (outs, k)))
            return x, w.T

        return make

    def expert_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            up = codes(number, 2 * inter, d // 2, device=device, high=256), codes(number, 2 * inter, d // 32, device=device, low=115)
            down = codes(number, d, inter // 2, device=device, high=256), codes(number, d, inter // 32, device=device, low=115)
            bank = ExpertBank(up, down, matrix(2 * inter, d, 1, device), matrix(d, inter, 1, device), 10.0)
            picked = torch.rand((n, number), device=device).topk(topk).indices.to(torch.int32)
            x = torch.randn((n, d), device=device).bfloat16()
            round_rows(x)
            return bank, x, picked, torch.rand((n, topk), device=device), torch.empty_like(x), Meeting(1 << 22, 8192, device)

        return make

    def call(function: Callable[..., Any], *inputs: Any) -> None:
        function(*inputs)

    shapes = (("w_in", 1792, d, 1), ("wq_b", 32768, 1280, 1), ("wo_a", 8192, 4096, 8), ("wo_b", d, 8192, 1))
    for n in (128, 512, 2048, 8192):
        for name, outs, k, groups in shapes:
            moved = outs * k + 2 * n * (outs + groups * k)
            cases.append((f"gemm fp8 {name} n={n}", linear_inputs(n, outs, k, groups), call, moved, 2 * n * outs * k))
            if groups == 1:
                cases.append((f"torch.mm bf16 {name} n={n}", plain_inputs(n, outs, k), torch.mm, moved + outs * k, 2 * n * outs * k))
        moved = number * 3 * inter * d * 17 // 32 + 3 * inter * d + 4 * n * d
        cases.append((f"gemm experts n={n}", expert_inputs(n), call, moved, 6 * n * (topk + 1) * inter * d))
    return cases
