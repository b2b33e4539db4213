"""Kernels that begin while the one before them ends, in a captured graph, against the same kernels one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.model.ops.kernels import moe_ops
from forebay.model.ops.kernels.moe_ops import Meeting, Tuning

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


TURNS = Tuning(split=8, rows=16, batch=16, programs=1)  # one row: programs that take a tile after another


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("tuning", [None, Tuning(split=2, rows=32, chunks=8, stages=3), TURNS])
def test_a_chain_in_a_graph(n: int, tuning: Tuning | None) -> None:
    """Two buffers, in turns, so that a kernel too early would read what is older, or write over what is still read."""
    device, width, links = torch.device("cuda"), 4096, 12
    draw = torch.Generator(device).manual_seed(n)
    codes = torch.randint(0, 256, (links, width, width), dtype=torch.uint8, device=device, generator=draw)
    codes[(codes & 127) == 127] = 7
    scales = torch.randint(113, 117, (links, width // 32, width // 32), dtype=torch.uint8, device=device, generator=draw)
    start = torch.randn((n, width), device=device, generator=draw).bfloat16()
    meeting = Meeting(17 * n * width, 4096, device)
    tuned = None if n > moe_ops.FEW else tuning
    rounded = tuning is not TURNS
    buffers = [torch.empty_like(start) for _ in range(2)]

    def chain(wait: bool) -> Tensor:
        buffers[0].copy_(start)
        for i in range(links):
            x, out = buffers[i % 2], buffers[1 - i % 2]
            moe_ops.fp8_linear(x, codes[i], scales[i], out, meeting, round_output=rounded, tuning=tuned)
            if wait:
                torch.cuda.synchronize()
        return buffers[links % 2]

    want = chain(True).clone()
    assert want.isfinite().all() and want.float().norm() > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize(("outs", "width"), [(4096, 1280), (4096, 640), (10528, 1024)])
def test_tiles_in_turns(outs: int, width: int) -> None:
    device = torch.device("cuda")
    draw = torch.Generator(device).manual_seed(outs)
    codes = torch.randint(0, 256, (outs, width), dtype=torch.uint8, device=device, generator=draw)
    codes[(codes & 127) == 127] = 7
    scales = torch.randint(113, 117, (outs // 32, width // 32), dtype=torch.uint8, device=device, generator=draw)
    x = torch.randn((1, width), device=device, generator=draw).bfloat16()
    found, want = (torch.empty((n, outs), dtype=torch.bfloat16, device=device) for n in (1, 2))
    moe_ops.fp8_linear(x, codes, scales, found, Meeting(0, 0, device), tuning=TURNS)
    moe_ops.fp8_linear(x.repeat(2, 1), codes, scales, want, Meeting(0, 0, device))  # by another kernel, as they are two rows
    assert torch.allclose(found.float(), want[:1].float(), rtol=2**-7, atol=float(want.abs().max()) * 2**-12)
