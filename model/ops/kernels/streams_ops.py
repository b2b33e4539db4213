"""The residual streams between two sub-layers, and the Engram read, as one kernel each (spec/model.md §7, §9).

`StreamStep` fuses `hyper_connections.mix`, `.collapse`, `rms_norm`, `formats.fp8_round` and the next `project` and `coefficients`: one
reading and one writing of the streams. It owns the buffers in which programs meet, so one object serves one CUDA stream at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.hyper_connections import Coefficients

GROUP = 32
_PROGRAMS = 264  # the most that `Tuning.programs` can ask for; buffers are made for so many
_TAIL = 1024  # values a warp takes in one round of the norm


class Connection(NamedTuple):
    """Parameters of one sub-layer's mHC: fn [2S + S*S, S*D] fp32; scale (spread over the columns) and base [2S + S*S] fp32."""

    fn: Tensor
    scale: Tensor
    base: Tensor


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


class Tiles(NamedTuple):
    """Shape of the step kernel's work: rows and columns of a tile, columns of a program, programs of a row, rows of the tail, warps."""

    rows: int
    columns: int
    chunk: int
    splits: int
    tail: int
    warps: int


class Tuning(NamedTuple):
    """What `tiles` may be told: rows of a tile, columns of a tile, programs there should be at least, warps (0: by the rows), stages."""

    rows: int = 16
    columns: int = 32
    programs: int = 132  # as many as an H200 has multiprocessors
    warps: int = 0
    stages: int = 2


def tuning_space(n: int) -> list[Tuning]:
    """What a sweep on a new machine should try for n rows; the first is what is used without one."""
    first = default_tuning(n)
    if n <= 128:
        others = [Tuning(16, c, p, w, s) for c in (16, 32, 64) for p in (66, 132, 264) for w in (2, 4, 8) for s in (1, 2, 3)]
    else:
        others = [Tuning(r, c, 132, w, s) for r in (16, 32, 64) for c in (16, 32, 64) for w in (4, 8) for s in (1, 2, 3, 4)]
    return [first, *(t for t in others if t != first)]


def default_tuning(n: int) -> Tuning:
    return Tuning() if n <= 1024 else Tuning(stages=3)


def tiles(n: int, width: int, tuning: Tuning | None = None) -> Tiles:
    """Few rows: a program has one tile and the last one ends the row block. Many: a program has its rows to itself."""
    tuned = tuning or default_tuning(n)
    rows, programs = tuned.rows, min(tuned.programs, _PROGRAMS)
    blocks = -(-n // rows)
    columns = min(tuned.columns, _power(width))  # wider tiles spill registers on sm_90
    most = -(-width // columns)
    splits = min(most, max(1, -(-programs // blocks))) if blocks < programs // 2 else 1
    chunk = -(-most // splits) * columns
    return Tiles(rows, columns, chunk, -(-width // chunk), min(rows, _power(n)), tuned.warps or rows // 4)


class StreamStep:
    """The step kernel for batches of up to `max_rows` rows. S is 2 or 4, D a multiple of 32.

    Floor of a whole step at D = 5120, S = 4: 41 KB of streams read and written, y 10 KB and the input 10 KB written: 102,400 bytes a row
    (FP8 codes 5.3 KB more), 24 us for 1,024 rows at 4.2 TB/s; fn is 1.97 MB a launch. 0.98 MFLOP a row for the projection, three times
    that on the tensor cores (fn in three parts of bf16).
    """

    def __init__(
        self, max_rows: int, streams: int, width: int, eps: float, hc_eps: float, iterations: int, device: torch.device | str
    ) -> None:
        if streams not in (2, 4) or width % GROUP:
            raise ValueError(f"the kernel takes 2 or 4 streams of a multiple of {GROUP} channels, got {streams} of {width}")
        self.streams, self.width, self.eps, self.hc_eps, self.iterations = streams, width, eps, hc_eps, iterations
        self.count = 2 * streams + streams * streams
        self.padded = max(16, _power(self.count + 2))
        self.tuning: Tuning | None = None  # None: by the number of rows
        need = min(16 * _PROGRAMS + 2 * 64 * -(-_PROGRAMS // 2), max_rows * -(-width // 16))
        need = max(need, max_rows)
        self.partial = torch.empty(need * self.padded, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(-(-max_rows // 16), dtype=torch.int32, device=device)

    def mix(
        self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, out: Tensor,
        pre: Tensor | None = None, norm: Tensor | None = None, into: Input | None = None,
        following: Connection | None = None, coefficients: Coefficients | None = None,
    ) -> None:  # fmt: skip
        """streams [n, S, D] and y [n, D] bf16, post [n, S], comb [n, S, S] fp32 -> out [n, S, D] bf16 (may be `streams` itself).

        With `into`: also the next sub-layer's input, collapsed by pre [n, S] fp32 and normed by norm [D]. With `following`: also
        `coefficients`, the next sub-layer's, from the new streams.
        """
        self._run(streams, out, y, None, post, comb, pre, norm, into, following, coefficients)

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
        tuned = self.tuning or default_tuning(n)
        t = tiles(n, self.width, tuned)
        meets = following is not None or norm is not None
        if t.splits * n * self.padded > self.partial.numel():
            raise ValueError(f"{n} rows are more than these buffers were made for")
        none = self.arrived  # stands for what the kernel is told not to touch
        fn, scale, base = following if following is not None else (none, none, none)
        made: tuple[Tensor, ...] = coefficients if coefficients is not None else (none, none, none)
        x, rounded, codes, scales = into if into is not None else (none, None, None, None)
        tail = _TAIL * t.warps // t.tail
        groups = max(1, min(_power(self.width // GROUP), tail // GROUP))
        k = _kernels()
        given = (streams, out, y, tokens, post, comb, pre, fn, scale, base, norm, x, rounded, codes, scales)
        k.step[(-(-n // t.rows), t.splits)](
            *(none if a is None else a for a in given), *made, self.partial, self.arrived, n, self.eps, self.hc_eps,
            S=self.streams, D=self.width, N=self.count, NP=self.padded, BR=t.rows, BD=t.columns, CHUNK=t.chunk,
            SPLITS=t.splits, TR=t.tail, TS=max(1, min(_power(t.splits), tail // self.padded)), TG=groups,
            ITERATIONS=self.iterations, FIRST=tokens is not None, MIX=post is not None, STORE=out is not None,
            PROJECT=following is not None, COLLAPSE=into is not None, NORM=meets and norm is not None,
            ROUNDED=rounded is not None, CODES=codes is not None, EXACT=_interpreted(), num_warps=t.warps, num_stages=tuned.stages,
        )  # fmt: skip


def engram_gather(
    codes: Tensor, scales: Tensor, ids: Tensor, rounded: Tensor | None = None, out_codes: Tensor | None = None,
    out_scales: Tensor | None = None, *, modulo: int | None = None,
) -> None:  # fmt: skip
    """FP8-rounded table rows, the input of an Engram's `wkv`.

    codes [rows, width] and scales [rows, width/32] uint8 on the device or in pinned host memory; ids [n, columns] int64 on the device ->
    rounded [n, columns * width] bf16 and, or, out_codes of the same shape with out_scales [n, columns * width / 32], both uint8. A value
    that is not a number makes its group so (codes 0x7F). With `modulo`, at most the table's rows, ids (not negative) count modulo that.

    Floor: 24 rows of 264 bytes read (over the host link if the table is there) and 12,288 bytes written a token (6,336 as codes).
    """
    rows, width = ids.numel(), codes.shape[1]
    if rows == 0:
        return
    k, block = _kernels(), 4
    targets = tuple(ids if a is None else a for a in (rounded, out_codes, out_scales))
    k.engram_gather[(-(-rows // block),)](
        codes, scales, ids, *targets, rows, modulo or 1, W=width, BR=block, FOLD=modulo is not None,
        ROUNDED=rounded is not None, CODES=out_codes is not None, EXACT=_interpreted(), num_warps=2,
    )  # fmt: skip


def engram_gate(streams: Tensor, z: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, text_mask: Tensor | None, out: Tensor) -> None:
    """`engram_gate.engram_gate` for z [n, (S + 1) * D] bf16 as `wkv` gives it; weights [S, D]; out [n, S, D] bf16 may be `streams`.

    text_mask: [n] uint8 or bool. Floor: 133,120 bytes a row at D = 5120, S = 4, the value read once; weights 82 KB a launch.
    """
    n, s, d = streams.shape
    if n == 0:
        return
    text = z if text_mask is None else text_mask.view(torch.uint8)
    _kernels().engram_gate[(n, s)](
        streams, z, q_weight, k_weight, text, out, eps, S=s, D=d, DP=_power(d), MASKED=text_mask is not None,
        EXACT=_interpreted(), num_warps=8 if d > 1024 else 1,
    )  # fmt: skip


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
            following = Connection(numbers(count, s * d) * 0.01, numbers(count), numbers(count))
            into = Input(empty(n, d, dtype=torch.bfloat16), None, empty(n, d, dtype=torch.uint8), empty(n, d // 32, dtype=torch.uint8))
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
        moved = n * (2 * s * d * 2 + d * 2 + d * 2 + d + d // 32) + count * s * d * 4
        cases.append((f"mhc step n={n}", step_inputs(n), StreamStep.mix, moved, 2 * n * count * s * d))
        cases.append((f"engram gate n={n}", gate_inputs(n), engram_gate, n * (3 * s + 1) * d * 2 + s * d * 4, 8 * n * s * d))
        cases.append((f"engram gather n={n}", gather_inputs(n), engram_gather, n * 24 * (264 + 8 + 512), 0))
    return cases
