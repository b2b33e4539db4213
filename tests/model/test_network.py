"""The whole network: equal to a slow plain pass, and to itself however its tokens are spread over steps."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.engine.llm import LLM
from forebay.model.ops import formats
from forwards import Hand, assert_same, difference, step
from reference import Net, Reference


def whole(net: Net, tokens: list[int], prompt: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and stored bytes of one forward pass alone."""
    with Hand(net.llm, tokens, prompt) as hand:
        return hand.feed(0, len(tokens)), hand.stored(len(tokens))


@pytest.mark.case("B005")
def test_equals_the_reference(net: Net) -> None:
    """Logits and stored bytes of every entry, bit for bit; long enough for selection and candidates to bind on the tiny network."""
    tokens = net.tokens(90)
    logits, stored = whole(net, tokens)
    ref = Reference(net.weights, tokens)
    assert difference(logits, ref.run(0, len(tokens))) is None
    for source in net.llm.engine.runner.layout.sources:
        assert difference(stored[f"layer{source.layer}.entries"], ref.entries(source.layer)) is None, source.layer


@pytest.mark.case("B012")
def test_no_cliff_where_lists_begin_to_overflow(tiny_net: Net) -> None:
    """Lengths around the selection size k = 8 of ratio 1 and ratio 2 sources, and around the candidate pool: equal to the reference."""
    for length in (6, 7, 8, 9, 10, 11, 15, 16, 17, 18, 19):
        tokens = tiny_net.tokens(length, seed=length)
        assert difference(whole(tiny_net, tokens)[0], Reference(tiny_net.weights, tokens).run(0, length)) is None, length


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_change_nothing(net: Net, chunk: int) -> None:
    """(Chunks of one token: the splits of B015 and the step budgets below.)"""
    tokens = net.tokens(70)
    logits, stored = whole(net, tokens)
    with Hand(net.llm, tokens) as hand:
        assert difference(hand.feed(*range(0, 70, chunk), 70), logits) is None
        assert_same(hand.stored(70), stored, f"chunks of {chunk}")


def test_uneven_cuts_change_nothing(net: Net) -> None:
    """Cuts at odd places, inside groups, blocks and windows; the stored state is compared at every cut."""
    tokens, rng = net.tokens(57, seed=1), random.Random(1)
    logits, _ = whole(net, tokens)
    for _ in range(2):
        cuts = [0, *sorted(rng.sample(range(1, 57), 3)), 57]
        with Hand(net.llm, tokens) as hand:
            for a, b in pairwise(cuts):
                assert difference(hand.feed(a, b), logits[a:b]) is None, (cuts, a)
                with Hand(net.llm, tokens) as fresh:
                    fresh.feed(0, b)
                    assert_same(hand.stored(b), fresh.stored(b), f"cuts {cuts} at {b}")


@pytest.mark.parametrize("encoder_tokens", [1, 7, 64])
def test_score_does_not_depend_on_the_step_budget(golden: Path, tiny_net: Net, encoder_tokens: int) -> None:
    llm = LLM(str(golden / "tiny-a" / "checkpoint"), kv_tokens=512, encoder_tokens=encoder_tokens)
    tokens = tiny_net.tokens(30 if encoder_tokens == 1 else 70, seed=2)
    assert difference(llm.score(tokens), tiny_net.llm.score(tokens)) is None


def test_seven_others_in_the_batch_change_nothing(net: Net) -> None:
    """Eight sequences of other lengths that start at other steps, mixed prompts and single tokens: each as if it were alone."""
    rng, lengths = random.Random(3), [31, 5, 23, 44, 18, 1, 27, 38]
    sequences = [net.tokens(n, seed=10 + n) for n in lengths]
    prompts = [max(1, n - rng.randint(0, 12)) for n in lengths]
    alone = [whole(net, tokens, prompt) for tokens, prompt in zip(sequences, prompts, strict=True)]
    with ExitStack() as stack:
        hands = [stack.enter_context(Hand(net.llm, t, p)) for t, p in zip(sequences, prompts, strict=True)]
        done, found = [0] * 8, [[] for _ in range(8)]  # type: ignore[var-annotated]
        mixed = 0
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            members = [i for i in range(8) if done[i] < lengths[i] and rng.random() < 0.8]
            rng.shuffle(members)
            rows = []
            for i in members:
                size = rng.choice((1, 2, 7, 20)) if done[i] < prompts[i] else 1
                rows.append(hands[i].row(done[i], min(done[i] + size, prompts[i] if done[i] < prompts[i] else lengths[i])))
            if not rows:
                continue
            mixed += len({row.stop - row.start for row in rows}) > 1
            for i, row, logits in zip(members, rows, step(net.llm, rows), strict=True):
                found[i].append(logits)
                done[i] = row.stop
        assert mixed >= 5
        for i in range(8):
            assert difference(torch.cat(found[i]), alone[i][0]) is None, f"sequence {i}"
            assert_same(hands[i].stored(lengths[i]), alone[i][1], f"sequence {i}")


@pytest.mark.case("B015")
@pytest.mark.parametrize(("name", "length"), [("tiny_net", 64), ("noise_net", 24)])
def test_prefill_then_decode_for_every_split(request: pytest.FixtureRequest, name: str, length: int) -> None:
    """All tokens as prefill(k) and single steps, for every k, 1 among them: the logits and all stored bytes of one prefill."""
    net: Net = request.getfixturevalue(name)
    tokens = net.tokens(length, seed=4)
    logits, stored = whole(net, tokens)
    with ExitStack() as stack:
        hands = {k: stack.enter_context(Hand(net.llm, tokens)) for k in range(1, length)}
        for k, found in zip(hands, step(net.llm, [hand.row(0, k) for k, hand in hands.items()]), strict=True):
            assert difference(found, logits[:k]) is None, k
        for p in range(1, length):
            members = [k for k in hands if k <= p]
            for k, found in zip(members, step(net.llm, [hands[k].row(p, p + 1) for k in members]), strict=True):
                assert difference(found, logits[p : p + 1]) is None, f"position {p} after a prefill of {k}"
        for k, hand in hands.items():
            assert_same(hand.stored(length), stored, f"prefill of {k}")


@pytest.mark.case("B015")
def test_generated_tokens_equal_the_reference(tiny_net: Net) -> None:
    """Real decode, where ties are settled over what is visible: each split equals REF with the same prompt length."""
    tokens, prompts = tiny_net.tokens(40, seed=5), (9, 17, 30, 31)
    with ExitStack() as stack:
        hands = [stack.enter_context(Hand(tiny_net.llm, tokens, prompt)) for prompt in prompts]
        found = [[part] for part in step(tiny_net.llm, [h.row(0, prompt) for h, prompt in zip(hands, prompts, strict=True)])]
        for p in range(9, 40):
            members = [i for i, prompt in enumerate(prompts) if prompt <= p]
            for i, part in zip(members, step(tiny_net.llm, [hands[i].row(p, p + 1) for i in members]), strict=True):
                found[i].append(part)
        for hand, prompt, parts in zip(hands, prompts, found, strict=True):
            ref = Reference(tiny_net.weights, tokens, prompt_tokens=prompt)
            assert difference(torch.cat(parts), ref.run(0, 40)) is None, prompt
            for source in hand.runner.layout.sources:
                assert difference(hand.stored(40)[f"layer{source.layer}.entries"], ref.entries(source.layer)) is None


def test_where_blocks_lie_does_not_matter(net: Net) -> None:
    """Tables in another order, and a pool with other sequences' leftovers."""
    tokens = net.tokens(70, seed=6)
    logits, stored = whole(net, tokens)
    with ExitStack() as stack:
        others = [stack.enter_context(Hand(net.llm, net.tokens(9, seed=s))) for s in range(3)]
        for other in others:
            other.feed(0, 9)
        hand = stack.enter_context(Hand(net.llm, tokens))
        hand.sequence.cache.table.reverse()
        hand.table = torch.tensor(hand.sequence.cache.table)
        assert difference(hand.feed(0, 23, 70), logits) is None
        assert_same(hand.stored(70), stored)


def test_steps_write_nothing_but_their_own_rows(net: Net) -> None:
    """No byte of another block, and none of another window slot, changes."""
    runner, tokens = net.llm.engine.runner, net.tokens(50, seed=7)
    with Hand(net.llm, net.tokens(20)) as other, Hand(net.llm, tokens) as hand:
        other.feed(0, 20)
        mine = set(hand.table.tolist())
        others = [b for b in range(len(runner.blocks.data)) if b not in mine]
        slots = [s for s in range(len(runner.windows.data)) if s != hand.slot]
        before = runner.blocks.data[others].clone(), runner.windows.data[slots].clone(), runner.windows.pending[slots].clone()
        hand.feed(0, 31, 32, 50)
        after = runner.blocks.data[others], runner.windows.data[slots], runner.windows.pending[slots]
        for a, b in zip(before, after, strict=True):
            assert difference(a, b) is None
        assert not runner.blocks.data[0].any()


def test_attention_tiles_change_nothing(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt too long for one tile of gathered keys."""
    tokens = net.tokens(60, seed=8)
    logits, stored = whole(net, tokens)
    slots = net.llm.config.sliding_window + net.llm.config.index_topk
    monkeypatch.setattr("forebay.model.memory.ATTEND_BYTES", 4 * slots * net.llm.config.head_dim * 7)
    found, bytes_ = whole(net, tokens)
    assert difference(found, logits) is None
    assert_same(bytes_, stored)


def test_ring_slots_hold_their_position(net: Net) -> None:
    """Position p lies in row p mod window, and older rows of a longer chunk are gone."""
    window = net.llm.engine.runner.layout.window
    tokens = net.tokens(2 * window + 3, seed=9)
    with Hand(net.llm, tokens) as hand:
        ref = Reference(net.weights, tokens)
        ref.run(0, len(tokens))
        hand.feed(0, len(tokens))
        ring = hand.runner.windows.data[hand.slot]
        dim = net.llm.config.head_dim
        for layer in range(net.llm.config.num_hidden_layers):
            rows = formats.fp8_decode(ring[layer, :, :dim], ring[layer, :, dim:])
            for p in range(len(tokens) - window, len(tokens)):
                assert torch.equal(rows[p % window], ref.memory.window[layer][p]), (layer, p)
