"""Copies beside the steps: done at once on a CPU; on a GPU whole, in order, and without the host waiting for what the device does."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from forebay.cache.side_copies import SideCopies

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def busy(milliseconds: float) -> None:
    """Keep the current stream at work for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def host(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)[:, None].expand(-1, 4096).contiguous().pin_memory()


def test_on_a_cpu_everything_is_done_at_once() -> None:
    copies, target, calls = SideCopies("cpu"), torch.zeros(2, 4, dtype=torch.uint8), list[int]()
    copies.upload([(target[0], torch.full((4,), 7, dtype=torch.uint8))])
    copies.after(lambda: calls.append(1))
    assert calls == [1]
    assert target[0].tolist() == [7] * 4
    copies.fence()
    copies.collect()
    copies.wait()
    data, ready = copies.download(target[0].clone())
    assert ready is None
    assert data.tolist() == [7] * 4
    copies.reserve([10])


@needs_cuda
def test_uploads_come_after_earlier_steps_and_before_fenced_ones() -> None:
    copies, target, calls = SideCopies("cuda"), torch.zeros(3, 4096, dtype=torch.uint8, device="cuda"), list[int]()
    source = host(1, 2, 3)
    seen = torch.empty_like(target)
    busy(50)
    seen.copy_(target)  # a step started before: it must not see what comes in
    began = time.monotonic()
    copies.upload([(target[i], source[i]) for i in range(3)])
    copies.after(lambda: calls.append(1))
    copies.collect()
    assert calls == []
    copies.fence()
    after = target + 0
    assert time.monotonic() - began < 0.03  # the host did not wait
    copies.wait()
    assert calls == [1]
    assert not seen.any()
    assert torch.equal(after.cpu(), source)


@needs_cuda
def test_downloads_hold_what_was_there() -> None:
    copies = SideCopies("cuda")
    copies.reserve([3 * 4096] * 2)
    data = host(4, 5, 6).cuda()
    busy(50)
    began = time.monotonic()
    taken, ready = copies.download(data.clone())
    data.zero_()
    assert time.monotonic() - began < 0.03
    assert ready is not None
    ready()
    assert torch.equal(taken, host(4, 5, 6))
