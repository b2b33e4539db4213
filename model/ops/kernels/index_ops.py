"""The indexer on a GPU: rounded queries, and scores of keys that stay FP4 in the pool.

References: `ops.rope.rotate` then `ops.formats.index_round` for queries, `ops.index_score.index_scores` over `ops.gather.gather_index` for
scores. Sums over channels and over heads are taken in a fixed order that is not the reference's, so a score may be one ulp of bf16 off
where an fp32 sum lies next to a tie; it does not depend on how many keys or rows are scored.

Measured on an H200 (2026-11-30, 32 heads of 128), twice: 1M keys of one row 22.5 and 23.3 us out of a graph of repeats; 27.3 and 27.2
after the L2 cache was filled by reading, and 29.9 and 29.3 after it was filled by writing, since it is written back meanwhile. A kernel
that only copies the same pages took 19.0, 22.3 and 28.2, one that does nothing 1.1, 3.4 and 3.0. 64 rows over 16K keys each: 23.8, 28.7 and
31.2. 64 rows over the same 64K keys: 80 in a graph (before its keys were unpacked by six operations instead of seven).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.model.ops.kernels import dependent, index

log = logging.getLogger(__name__)

QUERY_PAD = 16  # bytes behind the codes of a head: its power of two, fp32, and room that keeps heads aligned


@dataclass(frozen=True)
class Tuning:
    """How a scan is cut. None of it changes a score.

    keys: keys of a piece, a power of two, at least 64 for the FP8 tensor cores. A piece within one page looks its page up once.
    programs: programs of a scan for each multiprocessor. warps: of a program. stages: of the pipeline of a scan; the page and then the keys
    take half of them each, so 3 has one piece's keys under way, 5 two; 1: none.
    split: bytes of a key that are loaded at a time, 16, 32 or 64, and parted in registers. fp8: else bf16 products.
    rows: of a tile that pass over the keys together, a power of two up to 8; 1 where no tile has more.
    registers: at most so many a thread, so that more programs fit on a multiprocessor; 0: as the compiler likes.
    copy: let the tensor memory accelerator copy the keys' codes, where their strides allow it.
    """

    keys: int = 128
    programs: int = 2
    warps: int = 4
    stages: int = 5
    split: int = 64
    fp8: bool = True
    registers: int = 0
    rows: int = 4
    copy: bool = True


@dataclass(frozen=True)
class Paged:
    """How `index_lone` cuts a scan, in words of `Tuning`. keys: 64 or 128, a page at most. stages: pieces that are copied ahead."""

    keys: int = 128
    programs: int = 3
    stages: int = 3
    registers: int = 168


PAGED = {128: Paged(), 64: Paged(keys=64, programs=4, registers=128)}  # by entries of a page
LONE = Tuning(programs=3, registers=168)  # for tiles of one row where that kernel cannot be used
SHARED = Tuning(keys=64, stages=3)  # for tiles of several
CANDIDATES = Tuning()


class Keys(NamedTuple):
    """Index keys of one source, as `CacheMemory` has them.

    codes: [blocks, entries, dim / 2] uint8. scales: [blocks, entries, dim / 32] uint8. table: [spans, blocks of a span] int32.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor


class Tiles(NamedTuple):
    """Runs of rows that share a scan: rows first[t] to first[t] + rows[t] - 1 belong to one span. Both [tiles] int32.

    Decode has a tile for each span; a tile of 0 rows (padding of a captured graph) does nothing. At most 4,096 tiles for a scan, which
    reads the keys of a tile once and loops over its rows: 16 to 64 rows make prefill independent of the memory's speed.

    longest: no tile has more rows; 0 is not known. 1 lets a scan keep its queries in place (decode).
    """

    first: Tensor
    rows: Tensor
    longest: int = 0


def empty_queries(n: int, heads: int, dim: int, device: torch.device | str) -> Tensor:
    """Room for `round_queries`: [n, heads, dim + 16] uint8."""
    return torch.empty((n, heads, dim + QUERY_PAD), dtype=torch.uint8, device=device)


def round_queries(q: Tensor, turn: Tensor, out: Tensor) -> Tensor:
    """Index queries rotated and rounded to FP4 values, in the form that scans read.

    A head is `dim` E5M2 codes, of each group of 32 channels the even ones first, then an fp32 power of two that `index` describes. The
    codes are exact unless a group's scale is below 2^-28 of the largest of its head, where fp32 sums would lose it too. A NaN or infinity
    makes its group NaN.

    Args:
        q: [n, heads, dim] bf16. turn: [n, 2, pairs] fp32, of `store_ops.turn_table`, older than what was launched last.
        out: [n, heads, dim + 16] uint8, of `empty_queries`. Returned.
    Floor: 3 bytes a channel and 16 a head, 12.5 KB a row of 32 heads of 128, and the rotation's 8 * pairs.
    """
    n, heads, dim = q.shape
    if n:  # without fused multiply-add, as the reference rounds both products of the rotation
        some = min(4, _power(heads))
        _kernels().queries[(n, -(-heads // some))](
            q, turn, out, H=heads, HP=some, D=dim, W=2 * turn.shape[2], num_warps=4, enable_fp_fusion=False, **_options()
        )
    return out


def query_values(q: Tensor) -> Tensor:
    """The values that `round_queries` keeps: [n, heads, dim + 16] uint8 -> [n, heads, dim] fp32."""
    dim = q.shape[2] - QUERY_PAD
    codes = q[:, :, :dim].contiguous().view(torch.float8_e5m2).float()
    power = q[:, :, dim : dim + 4].contiguous().view(torch.float32)
    ordered = codes.unflatten(2, (-1, 2, 16)).transpose(3, 4).flatten(2)
    return ordered * (power * 2.0**-6)


def score_keys(
    q: Tensor,
    weights: Tensor,
    keys: Keys,
    tiles: Tiles,
    span: Tensor,
    visible: Tensor,
    out: Tensor,
    *,
    maxima: Tensor | None = None,
    size: int = 8,
    tuning: Tuning | Paged | None = None,
) -> Tensor:
    """Scores of all keys that a row sees; column i is entry i.

    The grid is fixed and shares out what the tiles see, so the cost follows `visible`, not the capacity of `out`. Of a captured step,
    `q` and `weights` alone may be what the kernel before it leaves (see `dependent`): keys and all numbers are read before it is over.

    Floor: 68 bytes a key of 128 channels, once for each tile (1M keys: 17 us at 4.2 TB/s), and 2 bytes a score; 2 * heads * dim FLOPs a
    score (8,192: 8,192 rows over 32K keys are 2.2 TFLOP, 1.5 ms at 1,424 TFLOP/s).

    Args:
        q: [n, heads, dim + 16] uint8, of `round_queries`. weights: [n, heads] bf16.
        span: [n] int32. visible: [n] int32, ascending within a tile.
        out: [n, m] bf16. Columns that a row does not see are -inf or, behind what its whole tile sees, left as they are. Returned.
        maxima: [n, ceil(m / size)] bf16 for the candidates: the best of each `size` columns, +inf for the newest; left alike.
    """
    columns, count, lone = out.shape[1], tiles.first.shape[0], tiles.longest == 1
    if count > 4096:
        raise ValueError(f"a scan takes at most 4096 tiles, got {count}")
    if lone and columns and count and tuning is None and _pages_fit(q, keys, count, size):
        tuning = PAGED[keys.codes.shape[1]]
    if isinstance(tuning, Paged):
        _score_pages(q, weights, keys, tiles, span, visible, out, maxima, tuning)
        return out
    tuning = tuning or (LONE if lone else SHARED)
    if tuning.keys % size:
        raise ValueError(f"blocks of {size} columns do not fit pieces of {tuning.keys} keys")
    if columns and count:
        copied = _descriptor(keys, tuning)
        _kernels().scan[(_programs(q.device, tuning),)](
            q, weights, keys.codes if copied is None else copied, keys.scales, keys.table, tiles.first, tiles.rows, span, visible,
            out, out if maxima is None else maxima,
            keys.codes.stride(0), keys.scales.stride(0), keys.table.stride(0), out.stride(0), 0 if maxima is None else maxima.stride(0),
            columns, count, **_common(q, keys, tuning), COPY=copied is not None, SIZE=size, MAXIMA=maxima is not None,
            ROWS=1 if lone else tuning.rows, TILES=max(2, _power(count)), STAGES=tuning.stages,
            num_warps=tuning.warps, enable_fp_fusion=True, **_limit(tuning), **_options(),
        )  # fmt: skip
    return out


def score_candidates(
    q: Tensor,
    weights: Tensor,
    keys: Keys,
    tiles: Tiles,
    span: Tensor,
    visible: Tensor,
    blocks: Tensor,
    size: int,
    out: Tensor,
    *,
    tuning: Tuning = CANDIDATES,
) -> Tensor:
    """Scores of the entries of each row's candidate blocks: column c is entry blocks[row, c // size] * size + c % size.

    As of `score_keys`, all but `q` and `weights` must be older than the kernel before.

    Floor: 70 bytes an entry (2,048 blocks of 8: 1.1 MB a row); 2 * heads * dim FLOPs a score.

    Args:
        tiles: one row each. blocks: [n, pool] int32, -1 where there is none. Others as of `score_keys`.
        out: [n, pool * size] bf16, -inf where there is no visible entry. Returned.
    """
    columns, count = out.shape[1], tiles.first.shape[0]
    if columns and count:
        _kernels().candidates[(-(-columns // tuning.keys), count)](
            q, weights, keys.codes, keys.scales, keys.table, blocks, tiles.first, tiles.rows, span, visible, out,
            keys.codes.stride(0), keys.scales.stride(0), keys.table.stride(0), blocks.stride(0), out.stride(0), columns,
            **_common(q, keys, tuning), SIZE=size, num_warps=tuning.warps, enable_fp_fusion=True, **_options(),
        )  # fmt: skip
    return out


def _pages_fit(q: Tensor, keys: Keys, count: int, size: int) -> bool:
    """Whether `index_lone` can score these keys: on Hopper, in pages like the network's, for blocks of 8 columns and up to 128 tiles."""
    codes, scales = keys.codes, keys.scales
    if _interpreted() or not codes.is_cuda or torch.cuda.get_device_capability(codes.device)[0] != 9 or _lone_kernel() is None:
        return False
    rows = codes.shape[1] in PAGED and codes.stride()[1:] == (64, 1) and scales.stride()[1:] == (4, 1)
    lines = codes.stride(0) == scales.stride(0) and codes.stride(0) % 128 == 0 and (codes.data_ptr() | scales.data_ptr()) % 16 == 0
    return rows and lines and q.shape[1] <= 32 and q.shape[2] == 128 + QUERY_PAD and count <= 128 and size == 8


def _score_pages(
    q: Tensor, weights: Tensor, keys: Keys, tiles: Tiles, span: Tensor, visible: Tensor, out: Tensor, maxima: Tensor | None, tuning: Paged
) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kernels = _lone_kernel()
    assert kernels is not None
    (blocks, entries, _), lines = keys.codes.shape, keys.codes.stride(0) // 128
    columns, count = out.shape[1], tiles.first.shape[0]
    codes, scales = (
        plane.as_strided(((blocks - 1) * lines + entries * plane.shape[2] // 128, 128), (128, 1)) for plane in (keys.codes, keys.scales)
    )
    programs = min(_programs(q.device, tuning), -(-columns // tuning.keys) * count)
    kernels.scan[(programs,)](
        q, weights, TensorDescriptor.from_tensor(codes, [tuning.keys // 2, 128], kernels.CODE_LINES),
        TensorDescriptor.from_tensor(scales.view(torch.int32), [tuning.keys // 32, 32], kernels.SCALE_LINES),
        keys.table, tiles.first, tiles.rows, span, visible, out, out if maxima is None else maxima,
        keys.table.stride(0), out.stride(0), 0 if maxima is None else maxima.stride(0), columns, count, visible.shape[0],
        keys.table.shape[1], H=q.shape[1], KEYS=tuning.keys, ENTRIES=entries, LINES=lines, MAXIMA=maxima is not None,
        TILES=_power(count), STAGES=tuning.stages, num_warps=4, maxnreg=tuning.registers, **_options(),
    )  # fmt: skip


@cache
def _lone_kernel() -> ModuleType | None:
    """The kernel for lone rows, where this Triton has what it needs."""
    try:
        from forebay.model.ops.kernels import index_lone
    except (ImportError, AttributeError) as error:
        log.warning("the scan of lone rows does not fit this Triton, the slower one runs: %s", error)
        return None
    return index_lone


def _common(q: Tensor, keys: Keys, tuning: Tuning) -> dict[str, object]:
    """Constants that both kernels take."""
    heads, dim = q.shape[1], q.shape[2] - QUERY_PAD
    if dim not in (32, 64, 128):
        raise ValueError(f"index keys have 32, 64 or 128 channels, got {dim}")
    scales, interpreted = keys.scales, _interpreted()
    word = scales.stride(0) % 4 == 0 and scales.stride(1) % 4 == 0 and scales.data_ptr() % 4 == 0
    return {
        "H": heads, "HP": max(16, _power(heads)), "D": dim, "CODE_ROW": keys.codes.stride(1), "SCALE_ROW": scales.stride(1),
        "ENTRIES": keys.codes.shape[1], "BK": tuning.keys, "SPLIT": tuning.split, "WORD": word, "FP8": tuning.fp8, "ASM": not interpreted,
    }  # fmt: skip


def _descriptor(keys: Keys, tuning: Tuning) -> object | None:
    """What the tensor memory accelerator needs to copy the codes of a piece, or of each of its two pages; None where it cannot."""
    codes, entries = keys.codes, keys.codes.shape[1]
    fits = entries % 8 == 0 and (entries % tuning.keys == 0 or 2 * entries == tuning.keys)
    if not tuning.copy or _interpreted() or not fits or codes.shape[2] != 64:
        return None
    if codes.data_ptr() % 16 or codes.stride(0) % 16 or codes.stride(1) % 16:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(codes, [1, min(entries, tuning.keys), 64])


def _limit(tuning: Tuning) -> dict[str, int]:
    return {"maxnreg": tuning.registers} if tuning.registers and not _interpreted() else {}


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _options() -> dict[str, object]:
    options: dict[str, object] = dependent.load(_interpreted()).OPTIONS
    return options


def _programs(device: torch.device, tuning: Tuning | Paged) -> int:
    if device.type != "cuda":
        return 3  # the interpreter runs them one after another
    return tuning.programs * torch.cuda.get_device_properties(device).multi_processor_count


def _power(x: int) -> int:
    """The smallest power of two from x on."""
    return 1 << max(0, x - 1).bit_length()


def _kernels() -> SimpleNamespace:
    return index.load(_interpreted())


def bench_cases() -> list[tuple[str, Callable[[str], tuple[object, ...]], Callable[..., object], int, int]]:
    """(name, inputs on a device, run, bytes at least, FLOPs) at the model's sizes: 32 heads of 128, 128 entries a block, 64 at ratio 2."""

    def case(
        spans: int, rows: int, m: int, restricted: bool, entries: int = 128
    ) -> tuple[str, Callable[[str], tuple[object, ...]], Callable[..., object], int, int]:
        n = spans * rows
        columns = 2048 * 8 if restricted else m

        def inputs(device: str) -> tuple[object, ...]:
            pages = spans * m // entries + 1
            pool = torch.randint(0, 256, (pages, 113_920), dtype=torch.uint8, device=device)
            codes = pool.as_strided((pages, entries, 64), (113_920, 64, 1), 36_864)
            scales = pool.as_strided((pages, entries, 4), (113_920, 4, 1), 45_056)
            scales.copy_(torch.randint(118, 124, scales.shape, dtype=torch.uint8, device=device))
            table = (torch.randperm(pages - 1, device=device) + 1).to(torch.int32).view(spans, -1)
            turn = torch.tensor([1.0, 0.0], device=device).view(1, 2, 1).expand(n, 2, 32).contiguous()
            q = round_queries(torch.randn((n, 32, 128), device=device).to(torch.bfloat16), turn, empty_queries(n, 32, 128, device))
            weights = torch.rand((n, 32), device=device).to(torch.bfloat16)
            step = 1 if restricted else rows
            first = torch.arange(0, n, step, dtype=torch.int32, device=device)
            span = torch.arange(n, dtype=torch.int32, device=device) // rows
            visible = torch.full((n,), m, dtype=torch.int32, device=device)
            blocks = torch.rand((n, m // 8), device=device).topk(2048).indices.sort().values.to(torch.int32) if restricted else None
            out = torch.empty((n, columns), dtype=torch.bfloat16, device=device)
            return q, weights, Keys(codes, scales, table), Tiles(first, torch.full_like(first, step), step), span, visible, blocks, out

        def run(
            q: Tensor, weights: Tensor, keys: Keys, tiles: Tiles, span: Tensor, visible: Tensor, blocks: Tensor | None, out: Tensor,
            tuning: Tuning | Paged | None = None,
        ) -> Tensor:  # fmt: skip
            if blocks is None:
                return score_keys(q, weights, keys, tiles, span, visible, out, tuning=tuning)
            return score_candidates(q, weights, keys, tiles, span, visible, blocks, 8, out)

        read = n * columns * 68 if restricted else spans * m * 68
        name = f"index {'candidates' if restricted else 'scan'}, {spans} x {rows} rows, {m} keys"
        name += f", {entries} a block" if entries < 128 else ""
        return name, inputs, run, read + 2 * n * columns, 2 * 32 * 128 * n * columns

    million = 1 << 20
    return [
        case(1, 1, million, False),
        case(1, 1, million // 2, False, 64),
        case(1, 1, 4096, False),
        case(64, 1, 16384, False),
        case(8, 1, million // 8, False),
        case(1, 64, 65536, False),
        case(1, 64, 65536, False, 64),
        case(8, 1, million // 8, True),
    ]
