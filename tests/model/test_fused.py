"""The fused network in Triton's interpreter against the reference network: prompts, generated tokens, and resumed ones."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from engines import tiny_checkpoint, tiny_config
from forebay.engine.fused_runner import FusedRunner
from forebay.engine.llm import LLM
from forebay.model.errors import ConfigError
from forebay.model.fused.network import FusedBackbone
from forebay.model.fused.rows import Parcel, _scans
from forebay.model.fused.weights import check_shapes
from forebay.model.source import resolve
from forwards import ENCODER_ONLY, Hand, step

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def backbone() -> FusedBackbone:
    return FusedBackbone(resolve(str(tiny_checkpoint())).open(), device="cpu")


def reference() -> LLM:
    return LLM(str(tiny_checkpoint()), max_sequences=8, decoder_tokens=64, kv_tokens=2048)


def fused(backbone: FusedBackbone) -> LLM:
    """The same engine over the fused network, with buckets that leave padded rows."""
    llm = reference()
    runner = llm.engine.runner
    llm.engine.runner = FusedRunner(backbone, runner.blocks, runner.windows, max_tokens=256, buckets=(1, 4))
    return llm


def ids(length: int, number: int = 0) -> list[int]:
    return [(i * i * 37 + 11 * i + 501 * number) % 3900 + 100 for i in range(length)]


def distance(here: Tensor, there: Tensor) -> float:
    return float((here.float() - there.float()).norm() / there.float().norm())


def test_prompts_agree(backbone: FusedBackbone) -> None:
    """Two sequences in one batch, one of them in two chunks; memory that was never written is poison."""
    records: list[dict[str, list[Tensor]]] = []
    results = []
    for make in (reference, lambda: fused(backbone)):
        record: dict[str, list[Tensor]] = {}
        with make() as llm, Hand(llm, ids(14)) as long, Hand(llm, ids(4, 1)) as brief:
            step(llm, [long.row(0, 9, decoder_from=ENCODER_ONLY)], record)  # the decoder half's windows stay poison below their floor
            logits = step(llm, [brief.row(0, 4), long.row(9, 14, decoder_from=11, decoder_window_from=11)], record)
            results.append((logits, long.stored(14), brief.stored(4)))
        records.append(record)
    there, here = records
    assert all(map(torch.equal, here["layer0.attn_in"], there["layer0.attn_in"]))
    assert all(map(torch.equal, here["layer1.engram_rows"], there["layer1.engram_rows"]))
    same = torch.cat([(a == b).all(1) for a, b in zip(here["layer0.topk"], there["layer0.topk"], strict=True)])
    assert same.float().mean() >= 0.8
    # One ulp grows about 1.3 times a layer in a random network, and other entries are chosen now and then; unrelated numbers are 1.4 apart.
    for name, limit in (("layer0.attn_out", 0.05), ("layer0.ffn_out", 0.06), ("layer1.ffn_out", 0.2)):
        assert all(distance(a, b) <= limit for a, b in zip(here[name], there[name], strict=True)), name
    (wanted, *stored), (found, *kept) = results
    assert all(distance(a, b) <= 0.5 for a, b in zip(found, wanted, strict=True))
    for a, b in zip(kept, stored, strict=True):
        nearly(a, b)


def test_generated_tokens_agree(backbone: FusedBackbone) -> None:
    """A token of two sequences in a step of four rows: the others are padding. One ends at a boundary, and its window is copied."""
    results = []
    lengths = (2, 11)
    for make in (reference, lambda: fused(backbone)):
        with make() as llm, Hand(llm, ids(3)) as a, Hand(llm, ids(12, 1)) as b:
            hands = (a, b)
            for hand, length in zip(hands, lengths, strict=True):
                step(llm, [hand.row(0, length)])
            b.sequence.copy_at = [12]
            rows = [hand.row(n, n + 1, wants_logits=True) for hand, n in zip(hands, lengths, strict=True)]
            logits = llm.engine.runner.run(rows)[0]
            results.append((logits, [hand.stored(n + 1) for hand, n in zip(hands, lengths, strict=True)]))
            held = torch.arange(12 - llm.config.sliding_window, 12) % llm.config.sliding_window
            assert torch.equal(b.sequence.copies[12][:, held], b.ring()[:, held])
            if isinstance(llm.engine.runner, FusedRunner):
                assert set(llm.engine.runner._steps) == {4}
    (wanted, stored), (found, kept) = results
    assert distance(found, wanted) <= 0.5
    for one, other in zip(kept, stored, strict=True):
        nearly(one, other)


def nearly(kept: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """What sequences leave in memory: equal bytes of the first layer, but for sums in another order, and mostly equal ones behind it."""
    assert kept.keys() == stored.keys()
    for name, wanted in stored.items():
        found = kept[name]
        assert found.shape == wanted.shape
        if wanted.dtype == torch.float32:
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4), name
        else:
            assert (found != wanted).float().mean() <= (0.002 if name == "layer0.entries" else 0.5), name  # other bytes differ in 0.99
    assert (kept["windows"][0] != stored["windows"][0]).float().mean() <= 0.002


def test_parcel_keeps_shapes() -> None:
    import numpy as np

    parcel = Parcel()
    parts = [np.arange(5), np.zeros(0, dtype=np.int64), np.arange(6).reshape(2, 3)]
    for part in parts:
        parcel.add(part)
    for sent, part in zip(parcel.send(torch.device("cpu")), parts, strict=True):
        assert sent.dtype == torch.int32
        assert sent.tolist() == part.tolist()


def test_scans_cover_every_row_once() -> None:
    import numpy as np

    span = np.repeat([0, 1, 2], [40, 1, 7])
    seen = np.concatenate([np.arange(40), [1_000_000], np.arange(90, 97)])
    covered = []
    for first, last, columns, starts, counts in _scans(seen, span):
        assert columns == seen[first:last].max()
        for start, count in zip(starts, counts, strict=True):
            rows = range(first + start, first + start + count)
            assert len(set(span[list(rows)])) == 1
            covered += rows
    assert covered == list(range(48))


def test_sizes_that_kernels_cannot_take_are_named() -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError, match="q_lora_rank must be a multiple of 32"):
        check_shapes(replace(tiny_config(), q_lora_rank=48))
