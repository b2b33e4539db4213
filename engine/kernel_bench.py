"""Every kernel at the sizes of the released model, beside its floor and, for selection, `torch.topk`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from forebay.engine.gpu_timing import Ceilings, floor_of, graph_seconds

FILES = ("attend_ops", "store_ops", "index_ops", "select_ops", "streams_ops", "moe_ops", "gemm_ops")
FLUSH_BYTES = 256 << 20


class Case(NamedTuple):
    """One row: `prepare(device)` makes inputs and returns what is timed, with the inputs."""

    file: str
    name: str
    prepare: Callable[[torch.device], tuple[Callable[[], object], Any]]
    moved: int
    flops: int


def normalised(file: str, given: Any) -> Case:
    """A case from a tuple (name, make_inputs, run, bytes, FLOPs); inputs that are a tuple are spread over `run`'s arguments."""
    name, make, run, moved, flops = given

    def prepare(device: torch.device) -> tuple[Callable[[], object], Any]:
        inputs = make(device)
        return (lambda: run(*inputs) if isinstance(inputs, tuple) else run(inputs)), inputs

    return Case(file, name, prepare, int(moved), int(flops))


def cases(only: list[str] | None = None) -> list[Case]:
    """All cases, or those whose file or name has one of `only` in it."""
    found = []
    for file in FILES:
        module = importlib.import_module(f"forebay.model.ops.kernels.{file}")
        found += [normalised(file, given) for given in module.bench_cases()]
    return [case for case in found if not only or any(part in f"{case.file} {case.name}" for part in only)]


def measure(
    chosen: list[Case], device: torch.device, ceilings: Ceilings, *, budget: float | None = None,
    clock: Callable[[], float] = time.monotonic, report: Callable[[str], None] = print, timed: Callable[..., Any] = graph_seconds,
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Rows, and the names of cases that were not begun since `budget` seconds had passed. A case that fails is a row with `error`."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    rows: list[dict[str, Any]] = []
    began = clock()
    for number, case in enumerate(chosen):
        if budget is not None and clock() - began >= budget:
            return rows, [left.name for left in chosen[number:]]
        row: dict[str, Any] = {"file": case.file, "name": case.name, "bytes": case.moved, "flops": case.flops}
        try:
            work, inputs = case.prepare(device)
            floor = floor_of(case.moved, case.flops, ceilings)
            warm, _ = timed(work)
            cold, _ = timed(work, flush=flush)
            row |= {"cold_s": cold, "warm_s": warm, "bytes_floor_s": floor.bytes_s, "flops_floor_s": floor.flops_s}
            row["fraction"] = floor.seconds / cold
            if (other := baseline(case, inputs)) is not None:
                row |= {"baseline": other[0], "baseline_s": timed(other[1], flush=flush)[0]}
            del other
            del work, inputs
        except Exception as error:  # a kernel that does not compile must not end the others' run
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        rows.append(row)
        report(f"{case.name}: {row.get('error') or format(row['cold_s'] * 1e6, '.1f') + ' us'}")
    return rows, []


def baseline(case: Case, inputs: Any) -> tuple[str, Callable[[], object]] | None:
    """What torch has for the same result: `topk`, or for an FP8 product of one group a bf16 one of the same shape (twice the bytes)."""
    if case.file == "select_ops":
        return "torch.topk", partial(torch.topk, inputs[0], inputs[2], sorted=False)
    if case.name.startswith("fp8 ") and inputs[-1] == 1:
        x, weight = inputs[0], torch.randn(inputs[1].shape, device=inputs[1].device).bfloat16()
        return "torch.mm, bf16", partial(torch.mm, x, weight.T)
    return None


def variants(chosen: list[Case]) -> list[Case]:
    """Each attention case once for every candidate of `attend_ops.tuning_space`; other kernels have none."""
    from forebay.model.ops.kernels import attend_ops

    def prepared(case: Case, knobs: dict[str, Any], device: torch.device) -> tuple[Callable[[], object], Any]:
        inputs = case.prepare(device)[1]
        plan, (n, heads, dim) = attend_ops.tuned(attend_ops.WINDOW, attend_ops.TOPK, **knobs), inputs[0].shape
        mine = (*inputs[:-2], plan, attend_ops.scratch(n, heads, dim, plan.splits, device))
        return partial(attend_ops.attend, *mine), mine

    found = []
    for case in chosen:
        if case.file == "attend_ops":
            for knobs in attend_ops.tuning_space(int(case.name.split()[1])):
                text = ", ".join(f"{key}={value}" for key, value in knobs.items())
                found.append(case._replace(name=f"{case.name}: {text}", prepare=partial(prepared, case, knobs)))
    return found
