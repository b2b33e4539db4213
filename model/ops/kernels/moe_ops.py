"""Router, experts and FP8 linears for few rows (1 to 64), each one kernel that reads the weights once (spec/model.md §8).

Buffers in which programs meet belong to `Meeting`; one object serves one CUDA stream at a time. Nothing waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.kernels import dependent, fragments


class Tuning(NamedTuple):
    """How a kernel shares its work; every choice gives the same numbers but for the order of sums. All but `fast` are powers of two.

    split: warps of a program that share the inputs. side: warps that share the weight rows. rows: weight rows of a program, at least 16
    for each of `side`; 32 where outputs are FP8-rounded. chunks: runs of 16 bytes of weights that a warp has of a row, at least 4.
    batch: rows of activations at a time, at least 8; 0 takes what there are, up to 64. parts: programs that share the inputs (the router).
    stages: rounds of weights on their way or at work (not of the router).
    registers: most of a thread, 0 for what the compiler likes. programs: of a processor, each for several tiles of weight rows, where there
    is one row of activations; 0 for one tile each (linears).
    most: rows at a time of experts that have more than `batch`, and of the shared one; 0 for `batch`.
    fast: decode weights by packed bit tricks (exact for scales from 2^-58 to 2^65); otherwise by plain arithmetic.
    """

    split: int = 4
    side: int = 1
    rows: int = 32
    chunks: int = 4
    batch: int = 0
    parts: int = 1
    stages: int = 4
    registers: int = 0
    most: int = 0
    lines: bool = True
    programs: int = 0
    fast: bool = True


FEW = 16  # rows of activations that `fp8_linear`'s weights wait for; with more, both are shared by a program's warps
WIDE = Tuning(side=4, rows=64, parts=0)
LINEAR = Tuning(split=8, rows=16, batch=16, stages=6)
ROUTE = Tuning(split=4, rows=16, chunks=16, batch=16, parts=10, registers=96)
MANY_ROUTE = Tuning(split=2, side=2, rows=64, batch=32)
UP = Tuning(batch=8, most=16, stages=3, registers=128)
DOWN = Tuning(split=2, side=2, rows=64, batch=8, most=16, registers=96)
MANY_UP = UP._replace(stages=2)  # of more than one row: less shared memory leaves more of the L1 cache for them
MANY_DOWN = DOWN._replace(stages=3, registers=128)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels(file: str) -> SimpleNamespace:
    found: SimpleNamespace = import_module(f"forebay.model.ops.kernels.{file}").load(_interpreted())
    return found


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    tuned = tuning or (ROUTE if n <= 64 else MANY_ROUTE._replace(parts=4 if n < 512 else 1))
    batch, (split, chunks) = _batch(tuned, n), _within(tuned, d // 8)
    warps, step = split * tuned.side, split * chunks * 8
    chunk = -(-d // (tuned.parts * step)) * step
    splits, blocks, tiles = -(-d // chunk), -(-n // batch), -(-experts // tuned.rows)
    helpers = 1 if _interpreted() else _helpers(min(batch, _power(n)), blocks, tiles * splits)
    meeting.check(splits * n * experts, 2 * blocks)
    none, wide, picked = meeting.arrived, _power(experts), _power(topk)
    mask = none if image_mask is None else image_mask.view(torch.uint8)
    _kernels("route").route[(blocks, tiles, splits)](
        x, gate, bias, bias_image, mask, none if position is None else position, meeting.partial, meeting.arrived, indices, weights, n,
        temperature, scale, D=d, E=experts, EP=wide, TOPK=topk, KP=picked, CHUNK=chunk, SPLITS=splits, HELPERS=helpers,
        TR=min(warps, batch // helpers, _power(n)), MASKED=image_mask is not None, PADDED=position is not None, NORMALISE=normalise,
        TABLE=_table(1, wide, warps, 4),
        PICKED=_table(1, picked, warps, 1), **_shape(tuned, split, chunks, batch), **dependent.load(_interpreted()).OPTIONS,
    )  # fmt: skip


def _helpers(rows: int, blocks: int, programs: int) -> int:
    """Programs that choose for a block of so many rows, a power of two; they are the last of the programs of the block."""
    helpers = 1
    while 8 * helpers <= rows and 2 * helpers <= programs and 2 * helpers * blocks <= 32:  # waiting for each other, all must find room
        helpers *= 2
    return helpers


def _batch(tuning: Tuning, n: int) -> int:
    """Rows of activations that a program has at a time."""
    return max(8, min(tuning.batch or 64, _power(n)))


def _within(tuning: Tuning, chunks: int) -> tuple[int, int]:
    """Warps that share the inputs and chunks of each, no more than a row of so many chunks has use for."""
    each = max(4, min(tuning.chunks, _power(chunks)))
    return max(1, min(tuning.split, _power(-(-chunks // each)))), each


def _shape(tuning: Tuning, split: int, chunks: int, batch: int) -> dict[str, Any]:
    """Arguments for the shape of a product."""
    found = fragments.layouts(_interpreted(), split, tuning.side, tuning.rows, chunks, batch)
    return {
        "KW": split, "M": tuning.rows, "C": chunks, "N": batch, "num_warps": split * tuning.side,
        **({"maxnreg": tuning.registers} if tuning.registers else {}),
        "WEIGHTS": found.weights, "INPUTS": found.inputs, "SUMS": found.sums, "TOTALS": found.totals,
    }  # fmt: skip


def _table(rows: int, columns: int, warps: int, wide: int) -> Any:
    return fragments.table(_interpreted(), rows, columns, warps, wide)


def _numeric(tuning: Tuning) -> dict[str, Any]:
    interpreted = _interpreted()
    return {"FAST": tuning.fast and not interpreted, "EXACT": interpreted}


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

    On a GPU `rounded` must be older than the kernel launched just before, the router, as it is read before that is over (`dependent`).

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
    many, interpreted = up[0].shape[0], _interpreted()
    first, second = up_tuning or (UP if n == 1 else MANY_UP), down_tuning or (DOWN if n == 1 else MANY_DOWN)
    if down_tuning is None and d % second.rows:
        second = second._replace(rows=32)
    k, programs = _kernels("expert"), min(count, many)
    same = {"D": d, "I": inter, "TOPK": topk, "AP": _power(count), "SHARED": shared, "ONE": n == 1, "EACH": many < count}
    for tuning, channels in ((first, inter), (second, d)):
        if channels % tuning.rows:
            raise ValueError(f"{channels} channels are no multiple of {tuning.rows}")

    def shape(tuning: Tuning, inputs: int, pair: bool, shared_rows: int) -> dict[str, Any]:
        split, chunks = _within(tuning, inputs // 32)
        batch, rows, side = _batch(tuning, n), tuning.rows << pair, tuning.side
        most = max(batch, min(tuning.most or batch, _power(n)))
        eight = chunks * (rows // shared_rows)
        warps = split * side

        def of(m: int, c: int, batch: int, name: str) -> dict[str, Any]:
            found = fragments.layouts(interpreted, split, side, m, c, batch)
            ends = fragments.outputs(interpreted, split, side, m, batch, pair)
            return {f"INPUTS{name}": found.inputs, f"PARTS{name}": ends.parts, f"TOTALS{name}": ends.totals}

        found = fragments.layouts(interpreted, split, side, rows, chunks, batch)
        made = {
            "KW": split, "M": tuning.rows, "C": chunks, "N": batch, "N2": most, "N8": most, "num_warps": warps,
            **({"maxnreg": tuning.registers} if tuning.registers else {}),
            "WEIGHTS": found.weights, "SUMS": found.sums, "LIST": _table(32, 0, warps, 1), "HIT": _table(32, batch, warps, batch),
            "HIT2": _table(32, most, warps, most), "STAGES": tuning.stages,
            **of(rows, chunks, batch, ""), **of(rows, chunks, most, "2"), **of(shared_rows, eight, most, "8"),
            **_numeric(tuning), **same, **dependent.load(interpreted).OPTIONS,
        }  # fmt: skip
        if not pair:
            eighth = fragments.layouts(interpreted, split, side, shared_rows, eight, most)
            made |= {"M8": shared_rows, "C8": eight, "WEIGHTS8": eighth.weights}
        return made

    k.expert_up[(inter // first.rows, shared + programs)](
        rounded.view(torch.int64), up[0].view(torch.int16), up[1], rounded.view(torch.int32),
        (shared_up or up)[0].view(torch.int16), (shared_up or up)[1], indices, weights, h, count, n, limit, CLAMP=limit > 0,
        **shape(first, d, True, first.rows * 2),
    )  # fmt: skip
    halved = max(second.rows // 2, 16 * second.side)
    made, wide, picked, blocks = shape(second, inter, False, halved), min(8, second.rows), _power(topk), d // second.rows
    meeting.check(0, blocks)
    lanes = max(1, 32 // (second.rows // wide))
    k.expert_down[(blocks, shared * (second.rows // halved) + programs)](
        h.view(torch.int64), down[0].view(torch.int16), down[1], h.view(torch.int32), (shared_down or down)[0].view(torch.int16),
        (shared_down or down)[1], indices, parts, meeting.arrived, out, count, n, KP=picked, TR=min(64, _power(n)),
        TABLE=_table(lanes, second.rows, made["num_warps"], wide), PICKED=_table(lanes, picked, made["num_warps"], picked), **made,
    )  # fmt: skip


def linear_tuning(outs: int, k_in: int) -> Tuning:
    """What `fp8_linear` takes for up to `FEW` rows by default."""
    if outs // LINEAR.rows < 132:  # all of a program's weights at once
        return LINEAR._replace(stages=11)
    return LINEAR._replace(split=4, programs=4) if k_in < 2048 else LINEAR


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
    from forebay.model.ops.kernels.fp8 import layouts as held_layouts

    n = x.shape[0]
    outs, k_in = codes.shape
    if n == 0:
        return
    if n > FEW:
        return _wide(x, codes, scales, out, meeting, groups, round_output, tuning or WIDE)
    tuned = tuning or linear_tuning(outs, k_in)
    if round_output:
        tuned = tuned._replace(rows=max(32, tuned.rows))
    if tuned.rows > 32:
        raise ValueError(f"a program has one row of scales, that of 32 outputs, got {tuned.rows}")
    batch, (split, chunks) = _batch(tuned, n), _within(tuned, k_in // 16)
    rounds = -(-(k_in // 16) // (split * chunks))
    held = held_layouts(_interpreted(), split, tuned.side, tuned.rows, chunks)
    if groups > 1 and outs // groups % tuned.rows:
        raise ValueError(f"{outs // groups} outputs of a group are no multiple of {tuned.rows}")
    in_turns = tuned.programs > 0 and n == groups == 1 and rounds > 1 and outs % tuned.rows == 0 and not round_output
    if in_turns and not _interpreted() and outs // tuned.rows > tuned.programs * processors(x.device):
        _kernels("fp8").fp8_one[(tuned.programs * processors(x.device),)](
            x.view(torch.int32), codes.view(torch.int16), scales, out, 16, K=k_in, O=outs, ROUNDS=_power(rounds), HELD_INPUTS=held.inputs,
            LINES=held.lines, TAKEN=held.taken, **_shape(tuned, split, chunks, batch), **dependent.load(False).OPTIONS,
        )  # fmt: skip
        return
    _kernels("fp8").fp8_linear[(-(-outs // tuned.rows), -(-n // batch))](
        x.view(torch.int32), codes.view(torch.int16), scales, out, n, x.stride(0) // 2, 16, K=k_in, O=outs, GROUPS=groups,
        STAGES=max(2, min(tuned.stages, rounds + 1)), ROUNDS=_power(rounds), ONE=n == 1, ROUND=round_output, HELD_SCALES=held.scales,
        HELD_INPUTS=held.inputs, **_numeric(tuned), **_shape(tuned, split, chunks, batch),
        **dependent.load(_interpreted()).OPTIONS,
    )  # fmt: skip


def _wide(
    x: Tensor, codes: Tensor, scales: Tensor, out: Tensor, meeting: Meeting, groups: int, round_output: bool, tuned: Tuning
) -> None:  # fmt: skip
    """`fp8_linear` of rows whose reading takes a good part of the time."""
    from forebay.model.ops.kernels.fp8_wide import layouts

    n, (outs, k_in), batch = x.shape[0], codes.shape, _batch(tuned, x.shape[0])
    rows = min(tuned.rows, max(32, _power(outs)))
    while groups > 1 and outs // groups % rows:
        rows //= 2
    tiles, blocks, most, side = -(-outs // rows), -(-n // batch), -(-k_in // 64), min(tuned.side, rows // 16)
    parts = min(most, 16, tuned.parts or max(1, 264 // (tiles * blocks)))
    steps = -(-most // parts)
    parts = -(-most // steps)
    meeting.check(parts * n * outs if parts > 1 else 0, tiles * blocks)
    found = layouts(_interpreted(), side, rows, batch)
    _kernels("fp8_wide").fp8_wide[(tiles, blocks, parts)](
        x, codes.view(torch.int16), scales, out, meeting.partial, meeting.arrived, n, x.stride(0), K=k_in, O=outs, GROUPS=groups, M=rows,
        N=batch, STEPS=steps, PARTS=parts, STAGES=tuned.stages, ROUND=round_output, FAST=tuned.fast and not _interpreted(),
        EXACT=_interpreted(), WEIGHTS=found.weights, SOURCE=found.source, INPUTS=found.inputs, SUMS=found.sums, TOTALS=found.totals,
        num_warps=side, **dependent.load(_interpreted()).OPTIONS,
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
