"""FP8 matrices and banks of MXFP4 experts on a device: few rows read the stored weights, many rows use the tensor cores.

Both give what `linear.quantised_linear`, `Ops.grouped_linear` and `moe.MoE` give up to the order of sums: bf16 holds every stored weight
exactly, products are summed in fp32 and rounded once. Nothing waits for the device. Buffers belong to a workspace (`moe_ops.Meeting`) and
serve one CUDA stream at a time; those of the few-rows path have one size for ever, so captured graphs may point to them, while those of
the many-rows path grow, so that path is not for graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forebay.model.ops.kernels import gemm_ops, moe_ops
from forebay.model.ops.kernels.moe_ops import Meeting

FEW_ROWS = 64  # up to so many rows, reading the weights takes longer than the products
FEW_ASSIGNMENTS = 1024  # what `moe_ops.experts` takes


class _Scratch:
    """The buffers of one workspace by purpose; one is replaced when a larger one is asked for."""

    _of: ClassVar[WeakKeyDictionary[Meeting, _Scratch]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}

    @classmethod
    def of(cls, workspace: Meeting) -> _Scratch:
        found = cls._of.get(workspace)
        if found is None:
            found = cls._of[workspace] = cls()
        return found

    def get(self, purpose: str, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """[rows, columns], contents undefined."""
        size, key = rows * columns, (purpose, dtype)
        if key not in self.kept or self.kept[key].numel() < size:
            self.kept.pop(key, None)
            self.kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self.kept[key][:size].view(rows, columns)


def _aligned(stored: Tensor) -> Tensor:
    """As bytes that kernels can read 16 at a time; a copy of what lies elsewhere, as in a mapped file."""
    stored = stored.view(torch.uint8).contiguous()
    return stored if stored.storage_offset() % 16 == 0 and stored.data_ptr() % 16 == 0 else stored.clone()


class Fp8Matrix:
    """E4M3 codes [O, K] with E8M0 scales [O/32, K/32], both uint8 and contiguous, O and K multiples of 32.

    `groups`: the matrix is block-diagonal; outputs O / groups at a time have K inputs of their own in a row of groups * K.
    `keep_wide`: keep the weights in bf16 as well (2 bytes each: 10.1 GB for the attention of the released model's 40 layers), so
    that many rows take one kernel; otherwise they are widened for each call.
    """

    def __init__(self, codes: Tensor, scales: Tensor, groups: int = 1, keep_wide: bool = False) -> None:
        outs, width = codes.shape
        if outs % (32 * groups) or width % 32 or scales.shape != (outs // 32, width // 32):
            raise ValueError(f"codes {tuple(codes.shape)} in {groups} groups and scales {tuple(scales.shape)} do not belong together")
        self.codes, self.scales, self.groups = _aligned(codes), _aligned(scales), groups
        self.outs, self.width = outs, width  # output channels; inputs of a group
        self.wide: Tensor | None = None
        if keep_wide:
            self.wide = torch.empty((outs, width), dtype=torch.bfloat16, device=codes.device)
            gemm_ops.widen(self.codes, self.scales, self.wide)

    def __call__(self, rounded: Tensor, out: Tensor, workspace: Meeting, *, round_output: bool = False) -> None:
        """rounded [n, groups * K] bf16 (FP8-rounded where the layer asks for it) -> out [n, O] bf16, contiguous; with `round_output`
        FP8-rounded for the next linear.

        Floor: O * K bytes for few rows, 2 * O * K FLOP a row for many; without kept bf16 weights, many rows also take 5 * O * K bytes.
        """
        n = rounded.shape[0]
        if n <= FEW_ROWS:
            moe_ops.fp8_linear(rounded, self.codes, self.scales, out, workspace, groups=self.groups, round_output=round_output)
            return
        weight = self.wide
        if weight is None:
            weight = _Scratch.of(workspace).get("weight", self.outs, self.width, rounded.device)
            gemm_ops.widen(self.codes, self.scales, weight)
        _product(rounded, weight, self.groups, out)
        if round_output:
            gemm_ops.round_rows(out)


@contextmanager
def _fp32_sums() -> Iterator[None]:
    """bf16 products inside keep their partial sums in fp32. The setting is the process's, whose other users get theirs back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def _product(x: Tensor, weight: Tensor, groups: int, out: Tensor) -> None:
    """x [n, groups * K] times weight [O, K], a part of the outputs for each group, in one kernel."""
    if not x.is_cuda:
        x, weight = x.float(), weight.float()  # a CPU's sums of bf16 products are not all in fp32
    n, wide = x.shape[0], x.is_cuda
    parts = x.view(n, groups, -1).transpose(0, 1), weight.view(groups, -1, weight.shape[1]).transpose(1, 2)
    if not wide:
        out.copy_(torch.bmm(*parts).transpose(0, 1).reshape(n, -1))
        return
    with _fp32_sums():
        if groups == 1:
            torch.mm(x, weight.T, out=out)
        else:  # each group's outputs lie O apart: the library writes them where they belong
            torch.bmm(*parts, out=out.view(n, groups, -1).transpose(0, 1))


class ExpertBank:
    """The feed-forward part of a layer behind its router.

    Args:
        up: codes [E, 2I, D/2] uint8 (w1 over w3, low nibble = even input) and E8M0 scales [E, 2I, D/32].
        down: codes [E, D, I/2] and scales [E, D, I/32]. shared_up [2I, D], shared_down [D, I]: the shared expert, or None.
        limit: clamp of the SwiGLU, 0 for none.
    """

    def __init__(
        self, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], shared_up: Fp8Matrix | None, shared_down: Fp8Matrix | None,
        limit: float,
    ) -> None:  # fmt: skip
        self.up, self.down, self.limit = (_aligned(up[0]), _aligned(up[1])), (_aligned(down[0]), _aligned(down[1])), limit
        self.shared = (shared_up, shared_down) if shared_up is not None and shared_down is not None else None
        self.count, self.inter = up[0].shape[0], down[0].shape[2] * 2

    def __call__(self, rounded: Tensor, indices: Tensor, weights: Tensor, out: Tensor, workspace: Meeting) -> None:
        """rounded [n, D] bf16, FP8-rounded; indices [n, topk] int32 (-1 in a padded row), weights [n, topk] fp32 -> out [n, D] bf16.

        `rounded` must be older than what was launched last, which is the router (`kernels.dependent`).

        Floor: 18.8 MB for each distinct expert at the released sizes, or 71 MFLOP an assignment (the shared expert is one more).
        """
        if rounded.shape[0] <= FEW_ROWS and indices.numel() <= FEW_ASSIGNMENTS:
            self._few(rounded, indices, weights, out, workspace)
        else:
            self._many(rounded, indices, weights, out, workspace)

    def _few(self, rounded: Tensor, indices: Tensor, weights: Tensor, out: Tensor, workspace: Meeting) -> None:
        d, device, scratch = rounded.shape[1], rounded.device, _Scratch.of(workspace)
        # of one size for every number of rows: a captured graph keeps pointing to them
        h = scratch.get(f"few h {self.inter}", FEW_ASSIGNMENTS + FEW_ROWS, self.inter, device)
        parts = scratch.get(f"few parts {d}", FEW_ASSIGNMENTS + FEW_ROWS, d, device)
        total = indices.numel() + rounded.shape[0]
        up, down = ((m.codes, m.scales) for m in self.shared) if self.shared else (None, None)
        moe_ops.experts(rounded, self.up, self.down, indices, weights, self.limit, up, down, h[:total], parts[:total], out, workspace)

    def _many(self, rounded: Tensor, indices: Tensor, weights: Tensor, out: Tensor, workspace: Meeting) -> None:
        (n, d), device, count, scratch = rounded.shape, rounded.device, indices.numel(), _Scratch.of(workspace)
        rows = gemm_ops.tuned(count, self.count)[0].rows
        tiles = 3 * gemm_ops.tiles_of(count, self.count, rows)
        total = count + n if self.shared else count
        up, down = ((m.codes, m.scales) for m in self.shared) if self.shared else (None, None)
        gemm_ops.experts(
            rounded, self.up, self.down, indices, weights, self.limit, up, down, scratch.get("order", 1, count, device, torch.int32)[0],
            scratch.get("tiles", 1, tiles, device, torch.int32), scratch.get("pairs", n, gemm_ops.padded(d), device),
            scratch.get("h", total, gemm_ops.padded(self.inter), device), scratch.get("parts", total, d, device), out,
        )  # fmt: skip
