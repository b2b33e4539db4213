"""Training runs the served network: the logits of the exported checkpoint, gradients everywhere, steps that learn, a run that resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import noise_model
from engines import TINY, greedy, tiny_config
from forebay.engine.llm import LLM
from forebay.model.batch import RowSet
from forebay.model.checkpoint import Checkpoint, write_checkpoint
from forebay.model.config import ModelConfig
from forebay.model.demo.train import run
from forebay.model.demo.train.batches import TrainRows, all_rows, answer_rows
from forebay.model.demo.train.masters import fp8_tiles
from forebay.model.demo.train.optimizer import is_matrix, orthogonal
from forebay.model.demo.train.stream import Packed
from forebay.model.demo.train.trainer import Trainer, _targets
from forebay.model.engram_map import compress_vocabulary
from forebay.model.ops import formats
from forebay.model.random_weights import encode_fp8

CPU = torch.device("cpu")
TOPK = 8  # of TINY


def trainer(config: ModelConfig | None = None, seed: int = 3) -> Trainer:
    config = config or tiny_config()
    return Trainer(config, compress_vocabulary(noise_model.TOKENIZER, config), CPU, seed=seed, lr=3e-3, weight_decay=0.05)


def rows(length: int, count: int = 2) -> list[Packed]:
    rng = np.random.default_rng(5)
    answers = [(length // 2, length // 2 + 9), (length - 20, length)]
    made = []
    for _ in range(count):
        weights = np.zeros(length, np.float32)
        for start, stop in answers:
            weights[start:stop] = 1
        made.append(Packed(rng.integers(64, 3900, length).astype(np.int32), weights, answers, {}))
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, LLM]:
    """A network a few steps old, so that nothing is at its first value, and the engine over its checkpoint."""
    made = trainer()
    for _ in range(2):
        made.backward(rows(96), TOPK, bounded=False, index_weight=0.3)
        made.update(1.0)
    folder = tmp_path_factory.mktemp("trained")
    write_checkpoint(folder, TINY, made.masters.stored())
    shutil.copyfile(noise_model.TOKENIZER, folder / "tokenizer.json")
    return made, LLM(str(folder), kv_tokens=4096)


def divergence(left: Tensor, right: Tensor) -> float:
    """Mean KL of next-token distributions."""
    a, b = torch.log_softmax(left, -1), torch.log_softmax(right, -1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def test_training_computes_what_is_served(trained: tuple[Trainer, LLM]) -> None:
    made, llm = trained
    packed = rows(96)
    batch, _ = made.batch(packed, TOPK)
    with torch.no_grad():
        logits = made.network.logits(made.network.decode(made.network.encode(batch), all_rows(batch))).view(2, 96, -1)
    for row, mine in zip(packed, logits, strict=True):
        served = llm.score(row.tokens.tolist())
        # Sums in bf16 products run in another order; a row where that flips an expert or an entry differs more.
        assert divergence(served, mine) < 2e-3
        assert float((served - mine).abs().median()) < 0.04 * float(served.std())


def test_bounded_training_is_bounded_serving(trained: tuple[Trainer, LLM]) -> None:
    """The rows of an answer see what a request sees whose prompt ends where the answer begins."""
    made, llm = trained
    (row,) = rows(96, 1)
    start, _ = row.answers[0]
    batch, _ = made.batch([row], TOPK)
    with torch.no_grad():
        chosen = answer_rows(batch, [row.answers], made.config.sliding_window)
        mine = made.network.logits(made.network.decode(made.network.encode(batch), chosen))
    first = start - made.config.sliding_window
    tokens = row.tokens.tolist()
    (answer,) = llm.generate(tokens[:start], greedy(1, logprobs=8))
    assert answer.logprobs is not None
    mine_first = torch.log_softmax(mine[start - 1 - first], -1)
    found = dict(answer.logprobs[0].top)
    assert max(abs(mine_first[token].item() - logprob) for token, logprob in found.items()) < 0.25


def test_rows_see_the_window_they_would_see_when_served() -> None:
    window = 8
    spans = [(0, 30, 0), (20, 41, 20), (3, 9, 5)]
    mine = TrainRows(spans, window, CPU)
    served = RowSet(spans, torch.arange(3), window, CPU)
    assert torch.equal(mine.positions, served.positions)
    assert torch.equal(mine.sequence, served.sequence)
    for row in range(mine.rows):
        seen = served.window_index[row][served.window_valid[row]] - len(spans) * window  # past the rings: rows of this batch
        assert seen.tolist() == list(range(int(mine.near_start[row]), int(mine.near_start[row] + mine.near_count[row])))


def test_answers_take_the_window_before_them_and_are_predicted_from_there() -> None:
    made = trainer()
    packed = rows(96)
    batch, _ = made.batch(packed, TOPK)
    chosen = answer_rows(batch, [row.answers for row in packed], 8)
    at, target, weight = _targets(packed, 8, bounded=True)
    assert chosen.index is not None
    flat = np.concatenate([row.tokens for row in packed])
    assert (flat[chosen.index.numpy()[at] + 1] == target).all()
    assert (weight == 1).all()
    assert len(target) == sum(stop - start for row in packed for start, stop in row.answers)
    for span, (first, stop) in zip(chosen.spans, [(a - 8, b) for row in packed for a, b in row.answers], strict=True):
        assert (span.start, span.stop, span.decoder_window_from) == (first, stop, first)
    exact_at, exact_target, _ = _targets(packed, 8, bounded=False)
    assert (flat[exact_at + 1] == exact_target).all()
    assert sorted(exact_target) == sorted(target)


def test_every_parameter_learns() -> None:
    made = trainer()
    made.backward(rows(96), TOPK, bounded=False, index_weight=0.3)
    still = {name for name, value in made.masters.values.items() if value.grad is None or not bool(value.grad.abs().sum() > 0)}
    assert all(name.endswith(("gate.bias", "gate.bias_vl")) for name in still), still
    assert all(bool(torch.isfinite(v.grad).all()) for v in made.masters.values.values() if v.grad is not None)


def test_a_few_steps_learn_by_heart_in_both_modes() -> None:
    made = trainer()
    packed = rows(64)
    before, _ = made.right(packed, TOPK)
    for step in range(30):
        made.backward(packed, TOPK, bounded=step % 2 == 1, index_weight=0.3)
        made.update(1.0)
    after, right = made.right(packed, TOPK)
    assert after < 0.2 * before
    assert right == 1.0


def test_the_indexer_learns_what_attention_wants() -> None:
    made = trainer()
    packed = rows(96)
    losses = []
    for _ in range(25):
        _, loss, _ = made.backward(packed, TOPK, bounded=False, index_weight=1.0)
        losses.append(float(loss))
        made.update(1.0)
    assert min(losses) < 0.87 * losses[0]


def test_expert_biases_move_against_the_load() -> None:
    made = trainer()
    made.backward(rows(64), TOPK, bounded=False, index_weight=0.0)
    loads = {at: counts.clone() for at, counts in made.masters.loads.items()}
    made.update(1.0)
    for at, counts in loads.items():
        bias = made.masters.values[at.removesuffix("experts") + "gate.bias"].detach()
        busiest, idlest = int(counts.argmax()), int(counts.argmin())
        assert float(bias[busiest]) < 0 < float(bias[idlest])
    assert not made.masters.loads


def test_tiles_round_as_the_stored_format() -> None:
    values = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 96)
    codes, scales = encode_fp8(values.numpy(), tile_rows=32)
    stored = formats.e4m3_decode(codes) * formats.exp2_from_byte(scales).repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)
    assert torch.equal(fp8_tiles(values).float(), stored)


def test_every_matrix_is_used_in_its_stored_form() -> None:
    """What layers multiply with is what the exported checkpoint holds, and the gradient reaches the master."""
    masters = trainer().masters
    stored = masters.stored()
    name = "layers.0.attn.wq_b.weight"
    widened = formats.e4m3_decode(stored[name]) * formats.exp2_from_byte(stored["layers.0.attn.wq_b.scale"]).repeat_interleave(
        32, 0
    ).repeat_interleave(32, 1)
    assert torch.equal(masters.form(name).float(), widened)
    assert torch.equal(masters.form("head.weight"), stored["head.weight"])
    assert masters.form("layers.0.hc_attn_fn") is masters.values["layers.0.hc_attn_fn"]
    masters.form(name).float().sum().backward()
    assert torch.equal(masters.values[name].grad, torch.ones_like(masters.values[name]))


def test_muon_makes_orthogonal() -> None:
    g = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonal(g))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_every_parameter_has_one_optimizer() -> None:
    made = trainer()
    found = [p for optimizer in made.optimizers for group in optimizer.param_groups for p in group["params"]]
    biases = [name for name in made.masters.values if name.endswith(("gate.bias", "gate.bias_vl"))]
    assert len(found) == len({id(p) for p in found}) == len(made.masters.values) - len(biases)
    assert is_matrix("layers.0.ffn.experts.up")
    assert not is_matrix("embed.weight")


def test_masters_travel(tmp_path: Path) -> None:
    made = trainer()
    run.save_masters(made, tmp_path, 7)
    values, step = run.load_masters(tmp_path)
    other = trainer(seed=9)
    other.masters.load(values)
    assert step == 7
    for name, value in made.masters.values.items():
        assert torch.equal(other.masters.values[name], value.to(torch.bfloat16).float()), name


def test_training_goes_on_from_a_checkpoint(trained: tuple[Trainer, LLM], tmp_path: Path) -> None:
    made, _ = trained
    write_checkpoint(tmp_path, TINY, made.masters.stored())
    shutil.copyfile(noise_model.TOKENIZER, tmp_path / "tokenizer.json")
    other = trainer(seed=8)
    other.masters.take(Checkpoint.open(tmp_path))
    for name in made.masters.values:
        mine, theirs = made.masters.form(name), other.masters.form(name)
        if name.endswith(("experts.up", "experts.down")):
            mine, theirs = formats.index_round(mine), formats.index_round(theirs)
        elif name.endswith("engram.embed.weight"):
            mine, theirs = formats.fp8_round(mine), formats.fp8_round(theirs)
        assert torch.equal(mine.bfloat16(), theirs.bfloat16()), name
