"""The Engram read as kernels (spec/model.md §9): rows gathered and rounded for `wkv`, and the gate that adds its output to the streams."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from torch import Tensor

from forebay.model.ops.kernels import dependent


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> SimpleNamespace:
    from forebay.model.ops.kernels import engram

    return engram.load(_interpreted())


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


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
    block = 4
    targets = tuple(ids if a is None else a for a in (rounded, out_codes, out_scales))
    _kernels().engram_gather[(-(-rows // block),)](
        codes, scales, ids, *targets, rows, modulo or 1, W=width, BR=block, FOLD=modulo is not None,
        ROUNDED=rounded is not None, CODES=out_codes is not None, EXACT=_interpreted(), num_warps=2,
        **dependent.load(_interpreted()).OPTIONS,
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
        EXACT=_interpreted(), num_warps=8 if d > 1024 else 1, **dependent.load(_interpreted()).OPTIONS,
    )  # fmt: skip
