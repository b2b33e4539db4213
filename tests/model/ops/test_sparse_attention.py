"""Attention over lists of keys against the golden one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.model.ops.sparse_attention import row_products, sparse_attention
from forwards import difference

Components = Callable[[str], dict[str, Tensor]]
SCALE = 32**-0.5


def golden_case(g: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = g["attn.idx"].long()
    return g["attn.q"], g["attn.kv"].float()[index.clamp(min=0)], index >= 0, g["attn.sink"]


def random_case(n: int, slots: int = 100, heads: int = 4, dim: int = 32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(n, heads, dim, generator=g).to(torch.bfloat16)
    kv = torch.randn(n, slots, dim, generator=g).to(torch.bfloat16).float()
    return q, kv, torch.rand(n, slots, generator=g) < 0.8, torch.randn(heads, generator=g)


def dense(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """One softmax in double precision; the sink only adds to the denominator."""
    scores = torch.einsum("nhd,nsd->nhs", q.double(), kv.double()) * SCALE
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    scores = torch.cat((scores, sink.double().expand(len(q), -1).unsqueeze(-1)), -1)
    return torch.einsum("nhs,nsd->nhd", scores.softmax(-1)[..., :-1], kv.double())


def test_equals_golden(components: Components) -> None:
    """Bit for bit, a list of 136 slots with gaps, and a row without any key."""
    g = components("primitives")
    found = sparse_attention(*golden_case(g), SCALE)
    assert difference(found, g["attn.out"]) is None
    assert not found[3].any()
    assert (g["attn.idx"][3] < 0).all()


def test_probabilities_are_rounded(components: Components) -> None:
    g = components("primitives")
    assert difference(g["attn.out"], g["attn.out_fp32_probabilities"]) is not None  # else the golden could not tell
    torch.testing.assert_close(sparse_attention(*golden_case(g), SCALE), g["attn.out_fp32_probabilities"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("slots", [1, 8, 63, 64, 65, 128, 200])
def test_is_one_softmax_over_all_slots(slots: int) -> None:
    case = random_case(20, slots)
    torch.testing.assert_close(sparse_attention(*case, SCALE).double(), dense(*case), rtol=0.02, atol=0.01)


def test_what_is_hidden_does_not_matter() -> None:
    """Not even its value: whatever finite number an unused slot holds."""
    q, kv, valid, sink = random_case(20, 130)
    other = torch.where(valid.unsqueeze(-1), kv, torch.full_like(kv, 1e4))
    assert difference(sparse_attention(q, other, valid, sink, SCALE), sparse_attention(q, kv, valid, sink, SCALE)) is None


def test_large_scores_do_not_overflow() -> None:
    q, kv, valid, sink = random_case(4)
    q = q * 1000
    torch.testing.assert_close(sparse_attention(q, kv, valid, sink, SCALE).double(), dense(q, kv, valid, sink), rtol=0.02, atol=0.02)


def test_sink_takes_weight_and_gives_no_value() -> None:
    q, kv, valid, _ = random_case(3)
    assert not sparse_attention(q, kv, valid, torch.full((4,), 80.0), SCALE).float().abs().gt(1e-20).any()
    free = sparse_attention(q, kv, valid, torch.full((4,), -80.0), SCALE)
    scores = torch.einsum("nhd,nsd->nhs", q.double(), kv.double()) * SCALE
    plain = scores.masked_fill(~valid.unsqueeze(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(free.double(), torch.einsum("nhs,nsd->nhd", plain, kv.double()), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(("slots", "heads", "dim"), [(16, 4, 32), (96, 8, 64), (65, 8, 128), (640, 64, 512)])
def test_a_row_does_not_depend_on_the_batch(slots: int, heads: int, dim: int) -> None:
    rows = 70 if dim < 512 else 5
    q, kv, valid, sink = random_case(rows, slots, heads, dim, seed=dim)
    whole = sparse_attention(q, kv, valid, sink, SCALE)
    for n in (1, 2, 3, 4, 17, 64):
        for first in (0, 1, 40):
            part = slice(first, first + n)
            if len(q[part]):
                assert difference(sparse_attention(q[part], kv[part], valid[part], sink, SCALE), whole[part]) is None, (first, n)


@pytest.mark.parametrize(("i", "k", "j"), [(4, 32, 64), (4, 64, 32), (8, 32, 500), (16, 64, 1), (64, 512, 1), (64, 512, 64)])
def test_row_products_do_not_depend_on_the_batch(i: int, k: int, j: int) -> None:
    g = torch.Generator().manual_seed(i * k)
    a, b = torch.randn(40, i, k, generator=g), torch.randn(40, k, j, generator=g)
    whole = row_products(a, b)
    torch.testing.assert_close(whole, a @ b, rtol=1e-4, atol=1e-4)
    turned = b.transpose(1, 2).contiguous().transpose(1, 2)
    for n in (1, 2, 3, 8, 39):
        assert difference(row_products(a[1 : 1 + n], b[1 : 1 + n]), whole[1 : 1 + n]) is None
        assert difference(row_products(a[1 : 1 + n], turned[1 : 1 + n]), row_products(a, turned)[1 : 1 + n]) is None


@pytest.mark.parametrize("slots", [64, 65, 128, 200])
def test_the_first_block_is_no_exception(slots: int) -> None:
    """As if a block without keys came before it: the formula with a running maximum from the beginning, bit for bit."""
    q, kv, valid, sink = random_case(9, slots, 4, 64, seed=slots)
    running, denominator, out = torch.full((9, 4), -1e30), torch.zeros(9, 4), torch.zeros(9, 4, 64)
    for start in range(0, slots, 64):
        block, seen = kv[:, start : start + 64], valid[:, None, start : start + 64]
        score = (row_products(q.float(), block.transpose(1, 2)) * SCALE).masked_fill(~seen, -torch.inf)
        top = torch.maximum(running, score.amax(-1))
        p, decay = (score - top.unsqueeze(-1)).exp(), (running - top).exp()
        denominator = denominator * decay + p.sum(-1)
        out = out * decay.unsqueeze(-1) + row_products(p.to(torch.bfloat16).float(), block)
        running = top
    wanted = (out / (denominator + (sink - running).exp()).unsqueeze(-1)).to(torch.bfloat16)
    assert torch.equal(sparse_attention(q, kv, valid, sink, SCALE), wanted)
    assert torch.equal(sparse_attention(q[4:5], kv[4:5], valid[4:5], sink, SCALE), wanted[4:5])
