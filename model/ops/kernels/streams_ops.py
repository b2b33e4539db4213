"""The residual streams between two sub-layers as one kernel (spec/model.md §7).

`StreamStep` fuses `hyper_connections.mix`, `.collapse`, `rms_norm`, `formats.fp8_round` and the next `project` and `coefficients`: one
reading and one writing of the streams. It owns the buffers in which programs meet, so one object serves one CUDA stream at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.hyper_connections import Coefficients
from forebay.model.ops.kernels import dependent
from forebay.model.ops.kernels.engram_ops import engram_gate, engram_gather

__all__ = ["Connection", "Input", "StreamStep", "Tuning", "Wide", "bench_cases", "cut", "engram_gate", "engram_gather"]

log = logging.getLogger(__name__)

GROUP = 32
_PLACES = 2  # for the sums of a row block, used in turn


class Connection(NamedTuple):
    """Parameters of one sub-layer's mHC: fn [2S + S*S, S*D] fp32; scale (spread over the columns) and base [2S + S*S] fp32.

    parts: what `cut` makes of fn, for many rows at once; without it, every program cuts what it reads.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    parts: Tensor | None = None


def cut(fn: Tensor, streams: int) -> Tensor:
    """fn [N, S*D] fp32 as the sum of three bf16 tensors, exact but for numbers below 2^-110: -> [3, N, D, S] (6 bytes a number)."""
    rest = fn.unflatten(1, (streams, -1)).transpose(1, 2).contiguous()
    parts = []
    for _ in range(3):
        high = (rest.view(torch.int32) & -65536).view(torch.float32)
        parts.append(high.bfloat16())
        rest = rest - high
    return torch.stack(parts)


class Input(NamedTuple):
    """Where a sub-layer's input goes: x [n, D] bf16; optionally its FP8 rounding as values (rounded [n, D] bf16) and as stored (codes
    [n, D] uint8 with scales [n, D/32] uint8)."""

    x: Tensor
    rounded: Tensor | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> SimpleNamespace:
    from forebay.model.ops.kernels import streams

    return streams.load(_interpreted())


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Tuning(NamedTuple):
    """Rows and columns of a tile, columns of a program, stages of loads in flight, warps, registers a thread may take (0: any number),
    programs of one multiprocessor."""

    rows: int
    columns: int
    chunk: int
    stages: int = 1
    warps: int = 4
    registers: int = 0
    resident: int = 2


class Wide(NamedTuple):
    """Of `streams_wide`'s kernel: tiles of 16 rows between two meetings, tiles in flight, places for a tile's sums, turns whose collapsed
    input is kept, tiles after a turn until whole sums of it are made, registers of a thread of those that sum and of those that norm."""

    tiles: int = 4
    stages: int = 5
    slots: int = 4
    kept: int = 3
    late: int = 3
    registers: int = 72
    norm_registers: int = 64


class Tiles(NamedTuple):
    """Rows and columns of a tile, columns of a program, programs that share a row block, row blocks that are worked on at once."""

    rows: int
    columns: int
    chunk: int
    splits: int
    groups: int


def default_tuning(n: int) -> Tuning:
    if n == 1:
        return Tuning(1, 32, 32)
    if n <= 16:
        return Tuning(16, 32, 32)
    if n <= 64:
        return Tuning(64, 32, 32)
    # few values, since each is a kernel to compile; a row block of 5,120 columns is 80, 32 or 20 programs, and an H200 holds 264 at once
    if n <= 192:
        return Tuning(64, 32, 64, 2)
    return Tuning(64, 32, 160, 2) if n <= 2048 else Tuning(64, 32, 256, 2)


# From which on `streams_wide`'s kernel is used, where there is a Hopper GPU. On an H200, 4,096 rows take 144 us with it and 234 without,
# 512 rows 31 and 36 us.
WIDE_ROWS = 512


def tuning_space(n: int) -> list[Tuning]:
    """What a sweep on a new machine should try for n rows; the first is what is used without one."""
    first = default_tuning(n)
    if n <= 128:
        others = [Tuning(r, c, c, 1, w) for r in ((1,) if n == 1 else (16, 32)) for c in (32, 64, 128) for w in (2, 4)]
    else:
        others = [Tuning(r, c, k, s, 4) for r in (16, 64) for c in (32, 64) for k in (128, 256, 512) for s in (2, 3)]
    return [first, *(t for t in others if t != first)]


def tiles(n: int, width: int, tuning: Tuning, programs: int | None) -> Tiles:
    """`programs`: the most that can be on the device at once; None where they need not be."""
    columns = min(tuning.columns, max(GROUP, _power(width)))
    most = -(-width // columns)
    chunk = columns * min(max(tuning.chunk // columns, -(-most // (programs or most))), most)
    splits, blocks = -(-width // chunk), -(-n // tuning.rows)
    return Tiles(tuning.rows, columns, chunk, splits, blocks if programs is None else max(1, min(blocks, programs // splits)))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _wide_module() -> ModuleType | None:
    try:
        from forebay.model.ops.kernels import streams_wide
    except (ImportError, AttributeError) as error:
        log.warning("the mHC kernel for many rows does not fit this Triton, the slower one runs: %s", error)
        return None
    return streams_wide


def _wide_kernel(device: torch.device, streams: int, width: int) -> ModuleType | None:
    """The module of the kernel of many rows; None where it does not run."""
    if device.type != "cuda" or _interpreted() or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    kernel = _wide_module()
    if kernel is None or streams != kernel.STREAMS or width % kernel.COLUMNS:
        return None
    return kernel if width // kernel.COLUMNS <= min(64, _processors(device)) else None


def _programs(device: torch.device, tuning: Tuning) -> int | None:
    """How many programs can wait for each other; None where none can, as in the interpreter, which runs one after the other."""
    return _processors(device) * tuning.resident if device.type == "cuda" and not _interpreted() else None


def _sizes(rows: int) -> set[int]:
    """The numbers of rows up to `rows` at which `default_tuning` or the number of row blocks may ask for the most."""
    return {n for n in (1, 2, 16, 64, 192, 2048) if n <= rows} | {rows}


class StreamStep:
    """The step kernel for batches of up to `max_rows` rows. S is 2 or 4, D a multiple of 32.

    Its programs wait for each other, so all of them must be on the device at once: there are never more than fit, and the launch is a
    cooperative one, which fails where they do not.

    Floor of a whole step at D = 5120, S = 4: 41 KB of streams read and written, y 10 KB read, the input and its FP8 rounding 10 KB each
    written: 112,640 bytes a row, 27 us for 1,024 rows at 4.2 TB/s; fn is 1.97 MB a launch (2.95 MB as parts). 0.98 MFLOP a row for the
    projection, three times that on the tensor cores (fn in three parts of bf16).
    """

    def __init__(
        self, max_rows: int, streams: int, width: int, eps: float, hc_eps: float, iterations: int, device: torch.device | str,
        tuning: Tuning | Wide | None = None,
    ) -> None:  # fmt: skip
        """`tuning`: instead of the default by the number of rows; a `Wide` has the kernel of many rows used for any number of them."""
        if streams not in (2, 4) or width % GROUP:
            raise ValueError(f"the kernel takes 2 or 4 streams of a multiple of {GROUP} channels, got {streams} of {width}")
        self.streams, self.width, self.eps, self.hc_eps, self.iterations = streams, width, eps, hc_eps, iterations
        self.count = 2 * streams + streams * streams
        self.padded = max(16, _power(self.count + 1))
        self.tuning = None if isinstance(tuning, Wide) else tuning
        self.wide, self.wide_rows = (tuning, 1) if isinstance(tuning, Wide) else (Wide(), WIDE_ROWS)
        device = torch.device(device)
        needed = [self._tiles(n, self.tuning or default_tuning(n), device) for n in _sizes(max_rows)]
        sums = max(_PLACES * t.groups * t.splits * t.rows for t in needed)
        self.partial = torch.empty(sums * self.padded, dtype=torch.float32, device=device)
        self.inner = torch.empty(sums, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max(_PLACES * t.groups for t in needed), dtype=torch.int32, device=device)
        kernel = None if self.tuning is not None or max_rows < self.wide_rows else _wide_kernel(device, streams, width)
        self._kernel = kernel
        if kernel is not None:
            groups = self._wide_groups(max_rows, device)
            splits, rows = width // kernel.COLUMNS, kernel.TILE * self.wide.tiles
            sums = kernel.PLACES * rows * (splits * kernel.SUMS + max(32, _power(splits)))
            self.shared = torch.empty(groups * sums, dtype=torch.float32, device=device)
            self.raw = torch.empty((max_rows, kernel.SUMS), dtype=torch.float32, device=device)
            self.met = torch.zeros(groups * kernel.PLACES, dtype=torch.int32, device=device)

    def mix(
        self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, out: Tensor,
        pre: Tensor | None = None, norm: Tensor | None = None, into: Input | None = None,
        following: Connection | None = None, coefficients: Coefficients | None = None,
    ) -> None:  # fmt: skip
        """streams [n, S, D] and y [n, D] bf16, post [n, S], comb [n, S, S] fp32 -> out [n, S, D] bf16 (may be `streams` itself).

        With `into`: also the next sub-layer's input, collapsed by pre [n, S] fp32 and normed by norm [D]. With `following`: also
        `coefficients`, the next sub-layer's, from the new streams.
        """
        if self._kernel is None or len(y) < self.wide_rows or any(a is None for a in (pre, norm, into, following, coefficients)):
            self._run(streams, out, y, None, post, comb, pre, norm, into, following, coefficients)
        else:
            self._run_wide(streams, y, post, comb, out, pre, norm, into, following, coefficients)  # type: ignore[arg-type]

    def read(
        self, streams: Tensor, pre: Tensor, norm: Tensor, into: Input, following: Connection | None, coefficients: Coefficients | None
    ) -> None:
        """Input and coefficients from streams that are as they should be (after an Engram read)."""
        self._run(streams, None, None, None, None, None, pre, norm, into, following, coefficients)

    def first(
        self, embedding: Tensor, tokens: Tensor, out: Tensor, norm: Tensor, into: Input, following: Connection, coefficients: Coefficients
    ) -> None:
        """All streams from rows `tokens` [n] int32 or int64 of the embedding [vocab, D] bf16; layer 0 is fed the first of them."""
        self._run(None, out, embedding, tokens, None, None, None, norm, into, following, coefficients)

    def last(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, pre: Tensor, hidden: Tensor) -> None:
        """The network's final hidden state [n, D] bf16, not normed; the streams are not written."""
        self._run(streams, None, y, None, post, comb, pre, None, Input(hidden), None, None)

    def _run(
        self, streams: Tensor | None, out: Tensor | None, y: Tensor | None, tokens: Tensor | None, post: Tensor | None,
        comb: Tensor | None, pre: Tensor | None, norm: Tensor | None, into: Input | None, following: Connection | None,
        coefficients: Coefficients | None,
    ) -> None:  # fmt: skip
        any_tensor = streams if streams is not None else tokens
        assert any_tensor is not None
        n = any_tensor.shape[0]
        if n == 0:
            return
        tuned, device = self.tuning or default_tuning(n), any_tensor.device
        t = self._tiles(n, tuned, device)
        if _PLACES * t.groups * t.splits * t.rows > self.inner.numel():
            raise ValueError(f"{n} rows are more than these buffers were made for")
        none = self.arrived  # stands for what the kernel is told not to touch
        fn, scale, base, parts = following if following is not None else (none, none, none, None)
        made: tuple[Tensor, ...] = coefficients if coefficients is not None else (none, none, none)
        x, rounded, codes, scales = into if into is not None else (none, None, None, None)
        given = (streams, out, y, tokens, post, comb, pre, fn, parts, scale, base, norm, x, rounded, codes, scales)
        meets = following is not None or norm is not None
        options: dict[str, Any] = {"num_warps": tuned.warps, "num_stages": 1, **dependent.load(_interpreted()).OPTIONS}
        if tuned.registers:
            options["maxnreg"] = tuned.registers
        if meets and not _interpreted():
            options["launch_cooperative_grid"] = True
        _kernels().step[(t.groups * t.splits,)](
            *(none if a is None else a for a in given), *made, self.partial, self.inner, self.arrived, n, t.groups, self.eps, self.hc_eps,
            S=self.streams, D=self.width, N=self.count, NP=self.padded, BR=t.rows, BD=t.columns, CHUNK=t.chunk, STAGES=tuned.stages,
            SPLITS=t.splits, SP=_power(t.splits), TR=_power(-(-t.rows // t.splits)), ITERATIONS=self.iterations,
            FIRST=tokens is not None, MIX=post is not None, STORE=out is not None, PROJECT=following is not None,
            COLLAPSE=into is not None, NORM=norm is not None, ROUNDED=rounded is not None, CODES=codes is not None,
            PARTS=parts is not None and t.rows > 1, EXACT=_interpreted(), **options,
        )  # fmt: skip

    def _wide_groups(self, n: int, device: torch.device) -> int:
        """How many row blocks are worked on at once."""
        assert self._kernel is not None
        return max(1, min(-(-n // self._kernel.TILE), _processors(device) * self._kernel.COLUMNS // self.width))

    def _run_wide(
        self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, out: Tensor, pre: Tensor, norm: Tensor, into: Input,
        following: Connection, coefficients: Coefficients,
    ) -> None:  # fmt: skip
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        kernel, n, w = self._kernel, len(y), self.wide
        assert kernel is not None
        if n > len(self.raw):
            raise ValueError(f"{n} rows are more than these buffers were made for")
        splits, groups, rows = self.width // kernel.COLUMNS, self._wide_groups(n, y.device), kernel.TILE
        box = [rows, kernel.COLUMNS]
        x, rounded, codes, scales = (y if a is None else a for a in into)
        kernel.step_wide[(groups * splits,)](
            TensorDescriptor.from_tensor(streams.view(n, -1), box, kernel.TILES_SHARED),
            TensorDescriptor.from_tensor(out.view(n, -1), box, kernel.TILES_SHARED),
            TensorDescriptor.from_tensor(y, box, kernel.TILES_SHARED),
            TensorDescriptor.from_tensor(post, [rows, 4], kernel.FOUR_SHARED),
            TensorDescriptor.from_tensor(comb.view(n, -1), [rows, 16], kernel.MATRIX_SHARED),
            TensorDescriptor.from_tensor(pre, [rows, 4], kernel.FOUR_SHARED),
            following.fn, following.scale, following.base, norm, x, rounded, codes, scales, *coefficients, self.shared, self.raw, self.met,
            n, groups, self.eps, self.hc_eps,
            D=self.width, TILES=w.tiles, STAGES=w.stages, SLOTS=w.slots, KEPT=w.kept, SPLITS=splits, SP=max(32, _power(splits)),
            TR=_power(-(-rows * w.tiles // splits)), ITERATIONS=self.iterations, ROUNDED=into.rounded is not None,
            CODES=into.codes is not None, LATE=w.late, REGISTERS=w.registers, NORM_REGISTERS=w.norm_registers, num_warps=8,
            launch_cooperative_grid=True,
        )  # fmt: skip

    def _tiles(self, n: int, tuning: Tuning, device: torch.device) -> Tiles:
        return tiles(n, self.width, tuning, _programs(device, tuning))


Case = tuple[str, Callable[[torch.device], tuple[Any, ...]], Callable[..., Any], int, int]


def bench_cases() -> list[Case]:
    """(name, make_inputs(device), run(*inputs), least bytes, FLOPs) at the released dimensions."""
    s, d, count = 4, 5120, 24
    cases: list[Case] = []

    def step_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            def numbers(*shape: int) -> Tensor:
                return torch.randn(shape, device=device)

            def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.empty(shape, device=device, dtype=dtype)

            streams, y = numbers(n, s, d).bfloat16(), numbers(n, d).bfloat16()
            fn = numbers(count, s * d) * 0.01
            following = Connection(fn, numbers(count), numbers(count), cut(fn, s))
            into = Input(empty(n, d, dtype=torch.bfloat16), empty(n, d, dtype=torch.bfloat16))
            made = Coefficients(empty(n, s), empty(n, s), empty(n, s, s))
            stepper = StreamStep(n, s, d, 1e-20, 1e-6, 20, device)
            post, comb, pre = numbers(n, s).sigmoid(), numbers(n, s, s).softmax(-1), numbers(n, s).sigmoid()
            return stepper, streams, y, post, comb, torch.empty_like(streams), pre, numbers(d).bfloat16(), into, following, made

        return make

    def gate_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            streams = torch.randn((n, s, d), device=device).bfloat16()
            z = torch.randn((n, (s + 1) * d), device=device).bfloat16()
            q, k = (torch.randn((s, d), device=device).bfloat16() for _ in range(2))
            return streams, z, q, k, 1e-20, None, torch.empty_like(streams)

        return make

    def gather_inputs(n: int) -> Callable[[torch.device], tuple[Any, ...]]:
        def make(device: torch.device) -> tuple[Any, ...]:
            codes = torch.randint(0, 120, (1 << 22, 256), device=device, dtype=torch.uint8)
            scales = torch.randint(110, 130, (1 << 22, 8), device=device, dtype=torch.uint8)
            ids = torch.randint(0, 1 << 22, (n, 24), device=device)
            return codes, scales, ids, torch.empty((n, 24 * 256), device=device, dtype=torch.bfloat16)

        return make

    for n in (1, 8, 64, 512, 4096):
        moved = n * (2 * s * d * 2 + 3 * d * 2) + count * s * d * 4
        cases.append((f"mhc step n={n}", step_inputs(n), StreamStep.mix, moved, 2 * n * count * s * d))
        cases.append((f"engram gate n={n}", gate_inputs(n), engram_gate, n * (3 * s + 1) * d * 2 + s * d * 4, 8 * n * s * d))
        cases.append((f"engram gather n={n}", gather_inputs(n), engram_gather, n * 24 * (264 + 8 + 512), 0))
    return cases
