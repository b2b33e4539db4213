"""Products for many rows (65 to 8,192 and more), where arithmetic is what takes time: widened FP8 weights, and mixtures of experts.

Nothing waits for the device: experts get as many programs as the worst case has tiles, and those past the last tile end at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tuning(NamedTuple):
    """How a product of experts is cut; every choice gives the same numbers but for the order of sums.

    rows: of the input in a tile, for which weights are widened once. columns: weight rows of a program, 64 or more. warps. step: channels
    of a round, 64 or 128; both products must have the same rows and the same step. stages: rounds of loads in flight, for routed experts
    and for the shared one, whose codes take more room. quarters: do not fill up tiles of up to three quarters (of 64 rows or more).
    """

    rows: int = 256
    columns: int = 128
    warps: int = 8
    step: int = 128
    stages: int = 3
    shared_stages: int = 3
    quarters: bool = False  # measured 10 % slower at 2,048 rows, whatever padding it saves


# By assignments for each expert on average. Measured with 64 experts: FEW is best at 19 and 48, SOME at 192 (2.63 ms; MANY 2.76, FEW 2.87),
# MANY at 768 (8.86 ms; SOME 8.95, FEW 10.7).
FEW, SOME, MANY = Tuning(64, 128, 4, 64, 4, 3), Tuning(128, 128, 4, 64, 3, 3), Tuning()
MOST_FEW, MOST_SOME = 64, 512


def tuning_space() -> list[Tuning]:
    """What a sweep on a new machine should try for either product; the first is what is used for many rows without one."""
    first = MANY
    shapes = ((256, 128, 8), (128, 256, 8), (128, 128, 4), (64, 256, 8), (64, 128, 4))
    others = [Tuning(*shape, step, stages, 3) for shape in shapes for step in (64, 128) for stages in (3, 4, 5)]
    return [first, *(t for t in others if t != first)]


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


def padded(channels: int) -> int:
    """Channels of an input of these kernels, as they are kept."""
    return -(-channels // 128) * 128


@cache
def _table(device: torch.device) -> Tensor:
    from forebay.model.ops.kernels.products import TABLE

    return torch.tensor(TABLE, dtype=torch.int32, device=device)


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


def tiles_of(count: int, experts: int, rows: int) -> int:
    """Tiles of `rows` that `count` assignments may need: every expert has at most one that is not full."""
    return count // rows + experts


def tuned(assignments: int, experts: int) -> tuple[Tuning, Tuning]:
    """For the up and the down product."""
    tuning = FEW if assignments <= MOST_FEW * experts else SOME if assignments <= MOST_SOME * experts else MANY
    return tuning, tuning


def experts(
    rounded: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], indices: Tensor, weights: Tensor, limit: float,
    shared_up: tuple[Tensor, Tensor] | None, shared_down: tuple[Tensor, Tensor] | None, order: Tensor, tiles: Tensor, pairs: Tensor,
    h: Tensor, parts: Tensor, out: Tensor, *, up_tuning: Tuning | None = None, down_tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """A whole mixture of experts after its router, for many assignments, in four kernels: `MoE.__call__` on an input that is FP8-rounded.

    Args:
        rounded: [n, D] bf16, FP8-rounded. up: codes [E, 2I, D/2] uint8 (w1, then w3) and scales [E, 2I, D/32] uint8.
        down: codes [E, D, I/2] and scales [E, D, I/32]. indices [n, topk] int32, no expert twice in a row, all of a padded row -1 (its
            output is zeros); weights [n, topk] fp32.
        shared_up, shared_down: the shared expert, FP8: codes [2I, D] (w1, then w3) and scales [2I/32, D/32]; [D, I] and [D/32, I/32].
        Written: order [n * topk] and tiles [3 * `tiles_of`] int32, pairs [n, `padded(D)`], h [n * topk + n, `padded(I)`],
        parts [n * topk + n, D], out [n, D], all bf16; without a shared expert the last n rows of h and parts are not needed.

    Floor: 6 * D * I FLOP an assignment (71 MFLOP at the released sizes) at the rate of bf16; the shared expert is one more for each row.

    Raises:
        ValueError: more rows than 32-bit numbers can tell apart, some 170,000 at the released sizes.
    """
    n, d = rounded.shape
    inter, topk, count, number = down[0].shape[2] * 2, indices.shape[1], indices.numel(), up[0].shape[0]
    if count == 0:
        return
    if max((count + n) * padded(inter), n * padded(d)) >= 1 << 31:
        raise ValueError(f"{n} rows are too many for one call")
    first, second = tuned(count, number)
    first, second = up_tuning or first, down_tuning or second
    slots, words = tiles_of(count, number, first.rows), padded(d) // 4
    if tiles.numel() < 3 * slots:
        raise ValueError(f"{tiles.numel()} numbers are too few for {slots} tiles")
    if (first.rows, first.step) != (second.rows, second.step):
        raise ValueError(f"{first} and {second} do not go together")
    k, dot, exact, table, rows = _kernels(), _dot(), _interpreted(), _table(rounded.device), first.rows
    wide = min(256, _power(words))
    some = min(8, _power(n))
    k.prepare[(number + -(-n // some) * -(-words // wide),)](
        indices, order, tiles, rounded.view(torch.int64), pairs.view(torch.int16), n, count, slots, E=number, D=d, PARTS=-(-words // wide),
        BM=rows, BA=min(4096, _power(count)), BU=wide, ROWS=some, STEP=first.step, num_warps=8,
    )  # fmt: skip
    shared = -(-n // rows) if shared_up is not None and shared_down is not None else 0
    same: dict[str, Any] = {"D": d, "I": inter, "SHARED": shared > 0, "DOT": dot, "EXACT": exact}
    k.up[(-(-padded(inter) // (first.columns // 2)), shared + slots)](
        pairs, *_words(*up, d), *_words(*(shared_up or up), d), table, order, tiles, weights, h, limit, n, count, slots, shared, TOPK=topk,
        CLAMP=limit > 0, **_constants(first), **same,
    )  # fmt: skip
    k.down[(-(-d // second.columns), shared + slots)](
        h, *_words(*down, inter), *_words(*(shared_down or down), inter), table, order, tiles, parts, n, count, slots, shared,
        **_constants(second), **same,
    )  # fmt: skip
    k.combine[(n, -(-d // 1024))](
        parts, indices, parts[count:] if shared else parts, out, D=d, TOPK=topk, KP=_power(topk), BD=min(1024, _power(d)),
        SHARED=shared > 0, EXACT=exact, num_warps=4,
    )  # fmt: skip


def _constants(tuning: Tuning) -> dict[str, int]:
    return {
        "BM": tuning.rows, "BN": tuning.columns, "STEP": tuning.step, "STAGES": tuning.stages, "SHARED_STAGES": tuning.shared_stages,
        "QUARTERS": tuning.quarters, "DUP": min(tuning.step // 32, max(1, 32 * tuning.warps // tuning.columns)), "num_warps": tuning.warps,
    }  # fmt: skip


def _words(codes: Tensor, scales: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Codes as int32; scales too, where a row of them is whole words."""
    return codes.view(torch.int32), scales.view(torch.int32) if inputs % 128 == 0 else scales


Case = tuple[str, Callable[[torch.device], tuple[Any, ...]], Callable[..., Any], int, int]


def bench_cases() -> list[Case]:
    """(name, make_inputs(device), run(*inputs), least bytes, FLOPs) at the released dimensions; 64 experts, as the synthetic model.

    Beside each linear stands `torch.mm` of a bf16 weight of its shape, which is what it does where its weights are kept wide; the last
    inputs of a case of experts are the tunings of its two products.
    """
    from forebay.model.ops.device_linear import Fp8Matrix
    from forebay.model.ops.kernels.moe_ops import Meeting

    d, inter, number, topk = 5120, 2304, 64, 6
    cases: list[Case] = []

    def codes(*shape: int, device: torch.device, low: int = 0, high: int = 120) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    def stored(outs: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return codes(outs, k, device=device), codes(outs // 32, k // 32, device=device, low=110)

    def linear_inputs(n: int, outs: int, k: int, groups: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x = torch.randn((n, groups * k), device=device).bfloat16()
            out = torch.empty((n, outs), dtype=torch.bfloat16, device=device)
            return Fp8Matrix(*stored(outs, k, device), groups, keep_wide=True), x, out, Meeting(17 * 64 * outs, 8192, device), groups > 1

        return make

    def run_linear(matrix: Fp8Matrix, x: Tensor, out: Tensor, work: Meeting, round_output: bool) -> None:
        matrix(x, out, work, round_output=round_output)

    def plain_inputs(n: int, outs: int, k: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            x, w = (torch.randn(shape, device=device).bfloat16() for shape in ((n, k), (outs, k)))
            return x, w.T

        return make

    def expert_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            up = codes(number, 2 * inter, d // 2, device=device, high=256), codes(number, 2 * inter, d // 32, device=device, low=115)
            down = codes(number, d, inter // 2, device=device, high=256), codes(number, d, inter // 32, device=device, low=115)
            picked = torch.rand((n, number), device=device).topk(topk).indices.to(torch.int32)
            bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
            int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
            x, total = torch.randn((n, d), **bf16), n * topk + n
            round_rows(x)
            written = (
                torch.empty(n * topk, **int32), torch.empty(3 * tiles_of(n * topk, number, 16), **int32), torch.empty((n, d), **bf16),
                torch.empty((total, inter), **bf16), torch.empty((total, d), **bf16), torch.empty((n, d), **bf16),
            )  # fmt: skip
            shared = stored(2 * inter, d, device), stored(d, inter, device)
            return x, up, down, picked, torch.rand((n, topk), device=device), 10.0, *shared, *written, *tuned(n * topk, number)

        return make

    def run_experts(*inputs: Any) -> None:
        experts(*inputs[:-2], up_tuning=inputs[-2], down_tuning=inputs[-1])

    shapes = (("w_in", 1792, d, 1), ("wq_b", 32768, 1280, 1), ("wo_a", 8192, 4096, 8), ("wo_b", d, 8192, 1))
    for n in (128, 512, 2048, 8192):
        for name, outs, k, groups in shapes:
            moved = 2 * outs * k + 2 * n * (outs + groups * k)
            cases.append((f"gemm fp8 {name} n={n}", linear_inputs(n, outs, k, groups), run_linear, moved, 2 * n * outs * k))
            if groups == 1:
                cases.append((f"torch.mm bf16 {name} n={n}", plain_inputs(n, outs, k), torch.mm, moved, 2 * n * outs * k))
        moved = number * 3 * inter * d * 17 // 32 + 3 * inter * d + 4 * n * d
        cases.append((f"gemm experts n={n}", expert_inputs(n), run_experts, moved, 6 * n * (topk + 1) * inter * d))
    moved = 2 * (129280 * d + 128 * (129280 + d))
    cases.append(("torch.mm bf16 head n=128", plain_inputs(128, 129280, d), torch.mm, moved, 2 * 128 * 129280 * d))
    return cases
