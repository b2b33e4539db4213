"""Bounded replay (spec/model.md §12): rows that only rebuild windows, and prompts whose decoder half runs on the last window alone."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forebay.engine.llm import LLM
from forebay.engine.types import SamplingParams
from forwards import Hand, difference, step
from reference import Memory, Net, Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Resume:
    """A prompt whose first `hit` tokens are cached: the window before them is replayed, the rest computed."""

    def __init__(self, net: Net, tokens: list[int], hit: int, memory: Memory, *, bounded: bool) -> None:
        self.net, self.tokens, self.hit = net, tokens, hit
        self.window = net.llm.engine.runner.layout.window
        self.ratios = {s.layer: s.ratio for s in net.llm.engine.runner.layout.sources}
        self.start = hit - self.window
        self.decoder = max(len(tokens) - self.window, self.start) if bounded else self.start
        self.ref = Reference(net.weights, tokens, memory.prefix(hit, self.ratios))
        self.wanted = self.ref.run(
            self.start, len(tokens), write_from=hit, window_from=self.start, decoder_from=self.decoder, decoder_window_from=self.decoder
        )

    def run(self, cold: Hand, *cuts: int) -> tuple[Tensor, Hand]:
        """Through the network, with cuts between the start and the end; the caller closes the hand."""
        hand = Hand(self.net.llm, self.tokens)
        hand.copy_entries(cold, self.hit)
        parts, edges = [], [self.start, *cuts, len(self.tokens)]
        for a, b in pairwise(edges):
            row = hand.row(
                a, b, write_from=max(a, self.hit), window_from=self.start, decoder_from=self.decoder, decoder_window_from=self.decoder
            )
            parts.append(step(self.net.llm, [row])[0])
        return torch.cat(parts), hand

    def digest(self, hand: Hand) -> str:
        """Of all bytes below the write floor."""
        total = hashlib.sha256()
        for layer, rows in hand.entries().items():
            total.update(rows[: self.hit // self.ratios[layer]].numpy().tobytes())
        return total.hexdigest()

    def check_entries(self, hand: Hand) -> None:
        for layer, rows in hand.entries().items():
            wanted = self.ref.entries(layer)
            assert len(wanted) == len(self.tokens) // self.ratios[layer]
            report = difference(rows[: len(wanted)], wanted)
            assert report is None, f"source {layer}, hit {self.hit}: {report}"


def cold_run(net: Net, tokens: list[int]) -> tuple[Memory, Hand]:
    """What a cold pass leaves in REF and in the network; global KV is written by the encoder half alone."""
    ref = Reference(net.weights, tokens)
    ref.run(0, len(tokens), decoder_from=len(tokens))
    hand = Hand(net.llm, tokens)
    hand.feed(0, len(tokens), decoder_from=len(tokens))
    return ref.memory, hand


@pytest.mark.case("B003")
def test_stored_entries_survive_a_resume_at_any_place(tiny_net: Net) -> None:
    """Five odd and five even hits, off block boundaries too. The pair across an odd hit is written once, by the suffix, and equals REF."""
    tokens, changed = tiny_net.tokens(56, seed=20), 0
    memory, cold = cold_run(tiny_net, tokens)
    with cold:
        for hit in (9, 17, 27, 35, 47, 10, 16, 28, 36, 46):
            resume = Resume(tiny_net, tokens, hit, memory, bounded=False)
            before = resume.digest(cold)
            logits, hand = resume.run(cold)
            with hand:
                assert resume.digest(hand) == before, hit
                assert difference(logits, resume.wanted) is None, hit
                resume.check_entries(hand)
                changed += not torch.equal(hand.entries()[2][:28], cold.entries()[2][:28])
        assert changed >= 5  # replay is an approximation: what the suffix writes does differ from the cold run


@pytest.mark.case("B003")
@pytest.mark.parametrize(
    ("name", "hit", "bounded"), [("tiny_net", 26, False), ("tiny_net", 29, True), ("tiny_net", 43, True), ("noise_net", 43, True)]
)
def test_a_resume_does_not_depend_on_its_chunks(request: pytest.FixtureRequest, name: str, hit: int, bounded: bool) -> None:
    """Cuts inside the replayed window, at the hit, and in the suffix."""
    net: Net = request.getfixturevalue(name)
    tokens = net.tokens(50, seed=21)
    memory, cold = cold_run(net, tokens)
    start = hit - net.llm.engine.runner.layout.window
    with cold:
        resume = Resume(net, tokens, hit, memory, bounded=bounded)
        for cuts in ((), (hit,), (start + 3, hit - 1, hit + 1), tuple(range(start + 7, 50, 7))):
            logits, hand = resume.run(cold, *cuts)
            with hand:
                assert difference(logits, resume.wanted) is None, cuts
                resume.check_entries(hand)


def test_decode_goes_on_from_rebuilt_windows(tiny_net: Net) -> None:
    """Windows, open group and entries after a bounded resume carry the next tokens as REF's do; odd lengths leave a group open."""
    for hit, length in ((24, 41), (33, 42), (40, 43)):
        tokens = tiny_net.tokens(length + 5, seed=hit)
        memory, cold = cold_run(tiny_net, tokens[:length])
        with cold:
            resume = Resume(tiny_net, tokens[:length], hit, memory, bounded=True)
            _, hand = resume.run(cold)
            with hand:
                assert tiny_net.llm.engine.manager.ensure(hand.sequence.cache, len(tokens))
                hand.sequence.tokens = resume.ref.tokens = tokens
                wanted = resume.ref.run(length, len(tokens))
                for p in range(length, len(tokens)):
                    row = hand.row(
                        p, p + 1, window_from=resume.start, decoder_from=resume.decoder, decoder_window_from=resume.decoder
                    )
                    assert difference(step(tiny_net.llm, [row])[0], wanted[p - length :][:1]) is None, (hit, p)


def test_a_long_enough_replay_is_exact(tiny_net: Net) -> None:
    """L * (W - 1) rows before the hit rebuild every window exactly: all later logits equal the cold run's, bit for bit (hits 90 and 91)."""
    tokens = tiny_net.tokens(110, seed=22)
    config = tiny_net.llm.config
    depth = config.num_hidden_layers * (config.sliding_window - 1)
    with Hand(tiny_net.llm, tokens) as cold:
        exact = cold.feed(0, 110)
        for hit in (90, 91):
            start = hit - depth
            with Hand(tiny_net.llm, tokens) as hand:
                hand.copy_entries(cold)
                row = hand.row(start, 110, write_from=hit, window_from=start, decoder_from=start, decoder_window_from=start)
                assert difference(step(tiny_net.llm, [row])[0][hit - start :], exact[hit:]) is None
                for layer, rows in hand.entries().items():
                    assert difference(rows[:55], cold.entries()[layer][:55]) is None


class TestBoundedPrompt:
    """The decoder half runs on the last W rows of a prompt, which see nothing older in their windows."""

    @pytest.mark.parametrize("past", [-7, -1, 0, 1, 2, 29])
    def test_equals_the_reference(self, net: Net, past: int) -> None:
        """Prompts around one window long, and of many."""
        window = net.llm.engine.runner.layout.window
        tokens = net.tokens(window + past, seed=30 + past)
        anchor = max(0, len(tokens) - window)
        wanted = Reference(net.weights, tokens).run(0, len(tokens), decoder_from=anchor, decoder_window_from=anchor)
        assert len(wanted) == min(window, len(tokens))
        with Hand(net.llm, tokens) as hand:
            assert difference(hand.feed(0, len(tokens), decoder_from=anchor, decoder_window_from=anchor), wanted) is None
            stored = hand.stored(len(tokens))
        with Hand(net.llm, tokens) as hand:
            hand.feed(0, len(tokens))
            exact = hand.stored(len(tokens))
        for name in stored.keys() - {"windows"}:
            assert difference(stored[name], exact[name]) is None  # global KV is that of the exact pass
        cut = net.llm.config.topology().cut
        assert difference(stored["windows"][:cut], exact["windows"][:cut]) is None

    @pytest.mark.parametrize(
        ("name", "length", "chunk"), [("tiny_net", 20, 1), ("tiny_net", 50, 7), ("tiny_net", 80, 64), ("noise_net", 70, 7)]
    )
    def test_chunks_change_nothing(self, request: pytest.FixtureRequest, name: str, length: int, chunk: int) -> None:
        """The anchor is the prompt's end, not the chunk's, so cuts inside the last window do not matter either."""
        net: Net = request.getfixturevalue(name)
        tokens, anchor = net.tokens(length, seed=31), length - net.llm.engine.runner.layout.window
        with Hand(net.llm, tokens) as hand:
            wanted = hand.feed(0, length, decoder_from=anchor, decoder_window_from=anchor)
            stored = hand.stored(length)
        with Hand(net.llm, tokens) as hand:
            found = hand.feed(*range(0, length, chunk), length, decoder_from=anchor, decoder_window_from=anchor)
            assert difference(found, wanted) is None
            for name, value in hand.stored(length).items():
                assert difference(value, stored[name]) is None, name

    def test_enough_rows_make_the_last_logits_exact(self, tiny_net: Net) -> None:
        config, tokens = tiny_net.llm.config, tiny_net.tokens(100, seed=32)
        anchor = 99 - len(config.topology().decoder) * (config.sliding_window - 1)
        with Hand(tiny_net.llm, tokens) as hand:
            exact = hand.feed(0, 100)[-1]
        with Hand(tiny_net.llm, tokens) as hand:
            assert difference(hand.feed(0, 100, decoder_from=anchor, decoder_window_from=anchor)[-1], exact) is None

    def test_costs_little(self, tiny_net: Net) -> None:
        """Against the exact pass the last logits move by about what the golden notes measured (rmsd 0.04), and not by nothing."""
        squares = []
        for seed in range(6):
            tokens = tiny_net.tokens(100, seed=40 + seed)
            with Hand(tiny_net.llm, tokens) as hand:
                exact = hand.feed(0, 100)[-1]
            with Hand(tiny_net.llm, tokens) as hand:
                bounded = hand.feed(0, 100, decoder_from=92, decoder_window_from=92)[-1]
            squares.append((exact - bounded).square().mean().item())
        assert 0.001 < (sum(squares) / 6) ** 0.5 < 0.15

    @pytest.mark.parametrize("encoder_tokens", [1, 7])
    def test_the_engine_generates_what_the_reference_does(self, golden_model: str, tiny_net: Net, encoder_tokens: int) -> None:
        """Cold, and resumed from cached blocks with one window replayed."""
        llm = LLM(golden_model, kv_tokens=512, encoder_tokens=encoder_tokens)
        window = llm.engine.runner.layout.window
        tokens = tiny_net.tokens(31, seed=33)
        anchor = len(tokens) - window
        ref = Reference(tiny_net.weights, list(tokens))
        logits = ref.run(0, len(tokens), decoder_from=anchor, decoder_window_from=anchor)
        cold = llm.generate([tokens], GREEDY)[0]
        assert cold.tiers.cached == 0
        assert cold.token_ids == greedy(ref, logits)
        again = llm.generate([tokens], GREEDY)[0]
        hit = again.tiers.hbm
        assert hit == (len(tokens) - 1) // window * window
        assert again.tiers.replayed == window
        ratios = {s.layer: s.ratio for s in llm.engine.runner.layout.sources}
        ref = Reference(tiny_net.weights, list(tokens), ref.memory.prefix(hit, ratios))
        floor = max(anchor, hit - window)
        logits = ref.run(
            hit - window, len(tokens), write_from=hit, window_from=hit - window, decoder_from=anchor, decoder_window_from=floor
        )
        assert again.token_ids == greedy(ref, logits)


def greedy(ref: Reference, logits: Tensor) -> list[int]:
    """REF's own continuation of its tokens."""
    out = []
    for _ in range(GREEDY.max_tokens or 0):
        out.append(int(logits[-1].argmax()))
        ref.tokens.append(out[-1])
        logits = ref.run(len(ref.tokens) - 1, len(ref.tokens))
    return out


@pytest.fixture(scope="module")
def golden_model(golden: object) -> str:
    return f"{golden}/tiny-a/checkpoint"
