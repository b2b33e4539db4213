"""Windows on the way: copies taken while a chunk runs, and resumes from them (spec/model.md §12, cache/replay.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forebay.cache.replay import KnownWindow, Mode, ResumePlan, plan_resume
from forwards import Hand, assert_same, difference, step
from reference import Memory, Net, Reference

EXTRA = 4  # tokens decoded behind a prompt


def window_of(net: Net) -> int:
    return net.llm.engine.runner.layout.window


def cut_of(net: Net) -> int:
    return net.llm.engine.runner.layout.encoder_layers


# Copies


def stop_at(net: Net, tokens: list[int], boundary: int, decoder_from: int) -> Tensor:
    """The window of a run that ends just there."""
    with Hand(net.llm, tokens) as hand:
        hand.feed(0, boundary, decoder_from=decoder_from, decoder_window_from=decoder_from)
        return hand.ring()


def captured(net: Net, tokens: list[int], cuts: tuple[int, ...], boundaries: list[int], decoder_from: int = 0) -> dict[int, Tensor]:
    with Hand(net.llm, tokens) as hand:
        hand.sequence.copy_at = boundaries
        hand.feed(*cuts, decoder_from=decoder_from, decoder_window_from=decoder_from)
        return hand.sequence.copies


@pytest.mark.parametrize("boundary", [8, 16])
def test_a_copy_inside_a_chunk_is_the_ring_of_a_run_that_stops_there(tiny_net: Net, boundary: int) -> None:
    """Chunks that begin at every place before the boundary, and end on it, behind it, or more than a window later."""
    tokens = tiny_net.tokens(boundary + 20, seed=50)
    wanted = stop_at(tiny_net, tokens, boundary, 0)
    for start in range(boundary):
        for stop in (boundary + start % 7, boundary + 8 + start % 12):
            cuts = (0, start, stop) if start else (0, stop)
            found = captured(tiny_net, tokens, cuts, [boundary])
            assert found.keys() == {boundary}
            assert difference(found[boundary], wanted) is None, cuts


@pytest.mark.parametrize("anchor", [3, 16, 17, 28])
def test_a_bounded_prompt_leaves_whole_decoder_rows_or_none(tiny_net: Net, anchor: int) -> None:
    """Encoder rows always; decoder rows of a boundary only when the decoder half ran for all of its window."""
    tokens, boundaries, cut = tiny_net.tokens(36, seed=51), [8, 16, 24, 32], cut_of(tiny_net)
    wanted = {b: stop_at(tiny_net, tokens, b, anchor) for b in boundaries}
    for cuts in ((0, 36), (0, 13, 36), (0, 16, 24, 36), (0, *range(15, 37))):
        found = captured(tiny_net, tokens, cuts, boundaries, anchor)
        assert sorted(found) == boundaries
        for b in boundaries:
            assert difference(found[b][:cut], wanted[b][:cut]) is None, (cuts, b)
            if anchor <= b - 8:
                assert difference(found[b][cut:], wanted[b][cut:]) is None, (cuts, b)


@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_a_window_longer_than_its_chunks(noise_net: Net, mode: Mode) -> None:
    tokens, cut = noise_net.tokens(100, seed=52), cut_of(noise_net)
    anchor = 0 if mode == "exact" else 68
    found = captured(noise_net, tokens, (0, 7, 30, 33, 61, 75, 100), [32, 64, 96], anchor)
    for b in (32, 64, 96):
        part = slice(None) if anchor <= b - 32 else slice(cut)
        assert difference(found[b][part], stop_at(noise_net, tokens, b, anchor)[part]) is None


def test_copies_of_several_sequences_in_one_step(tiny_net: Net) -> None:
    """Each from its own rows, beside one that keeps none and one that only decodes, and the rings are what they are without copies."""
    llm = tiny_net.llm
    lines = [tiny_net.tokens(n, seed=53 + n) for n in (30, 21, 26, 17)]
    hands = [Hand(llm, line) for line in lines]
    plain = [Hand(llm, line) for line in lines]
    try:
        for group in (hands, plain):
            group[1].feed(0, 5)
            group[3].feed(0, 16)
        hands[0].sequence.copy_at = [8, 24]
        hands[1].sequence.copy_at = [8, 16]
        hands[3].sequence.copy_at = [16]  # passed already
        for group in (hands, plain):
            a, b, c, d = group
            step(llm, [a.row(0, 30, decoder_from=22, decoder_window_from=22), d.row(16, 17), b.row(5, 21), c.row(0, 26, decoder_from=26)])
        for i, boundary, decoder_from in ((0, 8, 22), (0, 24, 22), (1, 8, 0), (1, 16, 0)):
            part = slice(None) if decoder_from <= boundary - 8 else slice(cut_of(tiny_net))
            assert difference(hands[i].sequence.copies[boundary][part], stop_at(tiny_net, lines[i], boundary, decoder_from)[part]) is None
        assert not hands[2].sequence.copies
        assert not hands[3].sequence.copies
        for hand, other, line in zip(hands, plain, lines, strict=True):
            assert_same(hand.stored(len(line)), other.stored(len(line)))
    finally:
        for hand in (*hands, *plain):
            hand.__exit__()


def test_a_copy_does_not_change_with_later_steps(tiny_net: Net) -> None:
    tokens = tiny_net.tokens(40, seed=54)
    with Hand(tiny_net.llm, tokens) as hand:
        hand.sequence.copy_at = [16]
        hand.feed(0, 20)
        before = hand.sequence.copies[16].clone()
        hand.feed(20, 30, 40)
        assert torch.equal(hand.sequence.copies[16], before)


# Resumes


class Cold:
    """A prompt's cold run, with copies of its window at every boundary, and the tokens decoded after it."""

    def __init__(self, net: Net, length: int, seed: int, prefill: Mode = "bounded") -> None:
        self.net, self.length, self.prefill = net, length, prefill
        self.tokens = net.tokens(length + EXTRA, seed=seed)
        self.window = window_of(net)
        self.anchor = 0 if prefill == "exact" else max(0, length - self.window)
        self.hand = Hand(net.llm, self.tokens)
        self.hand.sequence.copy_at = list(range(self.window, length + 1, self.window))
        self.logits = self.hand.feed(0, length, decoder_from=self.anchor, decoder_window_from=self.anchor)
        self.kept = self.hand.sequence.copies
        self.stored = self.hand.stored(length)
        self.after = self._decode(self.hand, ResumePlan(0, 0, 0, self.anchor, self.anchor))

    def __enter__(self) -> Cold:
        return self

    def __exit__(self, *error: object) -> None:
        self.hand.__exit__()

    def _decode(self, hand: Hand, plan: ResumePlan) -> Tensor:
        at = replace(plan, start=self.length, resume=self.length)
        return hand.follow(at, self.length + EXTRA, *range(self.length + 1, self.length + EXTRA))

    def plan(self, hit: int, *windows: KnownWindow, replay: Mode = "bounded") -> ResumePlan:
        geometry = self.net.llm.engine.manager.geometry
        return plan_resume(self.length, hit, geometry, windows=windows, prefill=self.prefill, replay=replay)

    def resume(self, plan: ResumePlan, *cuts: int, window: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """-> logits of the prompt's rows, logits of what is decoded after them, and what the prompt leaves stored."""
        with Hand(self.net.llm, self.tokens) as hand:
            hand.copy_entries(self.hand, plan.resume)
            if window is not None:
                cut = cut_of(self.net)
                hand.runner.windows.load(hand.slot, window[:cut], window[cut:] if plan.with_decoder else None)
            logits = hand.follow(plan, self.length, *cuts)
            stored = hand.stored(self.length)
            return logits, self._decode(hand, plan), stored

    def check_faithful(self, plan: ResumePlan, *cuts: int, window: Tensor | None = None) -> None:
        """Everything computed from the resume point on has the bits of the cold run."""
        assert plan.faithful
        logits, after, stored = self.resume(plan, *cuts, window=window)
        rows = self.length - max(self.anchor, plan.resume)
        assert difference(logits[-rows:], self.logits[-rows:]) is None, (plan, cuts)
        if self.prefill == "bounded":
            assert difference(logits, self.logits) is None, (plan, cuts)
        assert difference(after, self.after) is None, (plan, cuts)
        # Ring rows that the next token no longer reads need not be right: the oldest one of all.
        for found in (stored, wanted := dict(self.stored)):
            found["windows"] = found["windows"][:, 1:]
        assert_same(stored, wanted, str(plan))


@pytest.mark.parametrize("length", [41, 47, 48, 52])
def test_a_window_makes_a_resume_that_equals_the_cold_run(tiny_net: Net, length: int) -> None:
    """Prompts that end at every distance behind the resume point; the window at the last boundary, or at the one before."""
    with Cold(tiny_net, length, seed=60 + length) as cold:
        plans = set()
        for hit, boundary in ((24, 24), (24, 8), (length, 40), (length, 32)):
            plan = cold.plan(hit, KnownWindow(boundary, "live"), replay="exact")
            if plan.boundary is None:
                assert (boundary, length < 48) == (40, True)  # after the decoder half's first row
                continue
            plans.add((plan.resume, plan.start))
            for cuts in ((), tuple(range(plan.start + 3, length, 5))):
                cold.check_faithful(plan, *cuts, window=cold.kept[boundary])
        assert len(plans) == (3 if length < 48 else 4)


@pytest.mark.parametrize("length", [41, 48])
def test_exact_windows_resume_an_exact_prefill(tiny_net: Net, length: int) -> None:
    with Cold(tiny_net, length, seed=70 + length, prefill="exact") as cold:
        for hit, boundary in ((40, 40), (24, 16)):
            plan = cold.plan(hit, KnownWindow(boundary, "swa", decoder_floor=0))
            assert (plan.boundary, plan.start, plan.with_decoder) == (boundary, boundary, True)
            for cuts in ((), tuple(range(boundary + 5, length, 5))):
                cold.check_faithful(plan, *cuts, window=cold.kept[boundary])


@pytest.mark.parametrize(("prefill", "replayed"), [("bounded", 42), ("exact", 84)])
@pytest.mark.parametrize("past", [1, 8])
def test_exact_replay_equals_the_cold_run(tiny_net: Net, prefill: Mode, replayed: int, past: int) -> None:
    """Six encoder layers of the twelve, a window less a token for each; a block more when the decoder half begins before the hit ends."""
    length = 96 + past
    with Cold(tiny_net, length, seed=80 + past, prefill=prefill) as cold:
        plan = cold.plan(96, replay="exact")
        assert plan.replayed == replayed + (8 if prefill == "bounded" and past < 8 else 0)
        for cuts in ((), (plan.start + 7, 96)):
            cold.check_faithful(plan, *cuts)


def test_a_shorter_replay_is_an_approximation(tiny_net: Net) -> None:
    """A window less and the rows are not the cold run's, so the comparisons above can fail."""
    for prefill in ("bounded", "exact"):
        with Cold(tiny_net, 104, seed=90, prefill=prefill) as cold:  # type: ignore[arg-type]
            plan = cold.plan(96, replay="exact")
            for later in (0, 8):
                begun = replace(plan, start=plan.start + later, window_from=plan.start + later)
                if prefill == "exact":
                    begun = replace(begun, decoder_from=begun.start, decoder_window_from=begun.start)
                logits = cold.resume(begun)[0]
                assert (difference(logits[-8:], cold.logits[-8:]) is not None) == (later > 0)


@pytest.mark.parametrize("length", [225, 260])
def test_the_noise_network_resumes_as_cold(noise_net: Net, length: int) -> None:
    with Cold(noise_net, length, seed=95) as cold:
        for boundary in (192, 224):
            plan = cold.plan(224, KnownWindow(boundary, "swa"), replay="exact")
            if plan.boundary is not None:
                cold.check_faithful(plan, window=cold.kept[boundary])
        plan = cold.plan(224, replay="exact")
        assert plan.replayed >= 6 * 31
        cold.check_faithful(plan, min(224, plan.start + 100))


# Resumes that are not the cold run: the reference does the same


Rows = dict[int, dict[int, Tensor]]  # layer -> position -> window row


def seeded(net: Net, tokens: list[int], memory: Memory, hit: int, rows: Rows) -> Reference:
    """A reference that has the entries of a prefix and the rows of a window."""
    ratios = {s.layer: s.ratio for s in net.llm.engine.runner.layout.sources}
    start = memory.prefix(hit, ratios)
    start.window = {layer: dict(found) for layer, found in rows.items()}
    return Reference(net.weights, tokens, start)


def check_against_reference(net: Net, cold: Cold, plan: ResumePlan, window: Tensor, rows: Rows, memory: Memory) -> None:
    length = cold.length
    ref = seeded(net, cold.tokens[:length], memory, plan.resume, rows)
    wanted = ref.run(
        plan.start, length, write_from=plan.resume, window_from=plan.window_from,
        decoder_from=plan.decoder_from, decoder_window_from=plan.decoder_window_from,
    )  # fmt: skip
    ref.tokens = cold.tokens
    floors = {"window_from": plan.window_from, "decoder_window_from": plan.decoder_window_from}
    after = torch.cat([ref.run(p, p + 1, **floors) for p in range(length, length + EXTRA)])
    for cuts in ((), tuple(range(plan.start + 3, length, 3))):
        logits, decoded, stored = cold.resume(plan, *cuts, window=window)
        assert difference(logits, wanted) is None, (plan, cuts)
        assert difference(decoded, after) is None, (plan, cuts)
        for layer, ratio in ref.ratios.items():
            name = f"layer{layer}.entries"
            if name in stored:
                assert difference(stored[name], ref.entries(layer)[: length // ratio]) is None, (plan, cuts, layer)


@pytest.mark.parametrize(("name", "length"), [("tiny_net", 41), ("tiny_net", 47), ("noise_net", 100)])
def test_rows_that_run_again_on_what_the_window_reaches(request: pytest.FixtureRequest, name: str, length: int) -> None:
    """The window at the last boundary, less than a window before the prompt's end, and no decoder rows with it."""
    net: Net = request.getfixturevalue(name)
    window, cut = window_of(net), cut_of(net)
    boundary = (length - 1) // window * window
    with Cold(net, length, seed=100) as cold:
        plan = cold.plan(length, KnownWindow(boundary, "swa"))
        assert (plan.start, plan.approximates, plan.lineage) == (length - window, True, 1)
        ref = Reference(net.weights, cold.tokens[:length])
        ref.run(0, length, decoder_from=cold.anchor, decoder_window_from=cold.anchor)
        rows = {layer: {p: ref.memory.window[layer][p] for p in range(boundary - window, boundary)} for layer in range(cut)}
        check_against_reference(net, cold, plan, cold.kept[boundary], rows, ref.memory)


@pytest.mark.parametrize(("name", "length"), [("tiny_net", 41), ("tiny_net", 47), ("noise_net", 100)])
@pytest.mark.parametrize("floor", ["bounded", "exact"])
def test_decoder_rows_stand_in(request: pytest.FixtureRequest, name: str, length: int, floor: Mode) -> None:
    """The window was kept where a shorter prompt ended, so its decoder rows are there: of a bounded prefill, or of an exact one."""
    net: Net = request.getfixturevalue(name)
    window = window_of(net)
    boundary = (length - 1) // window * window
    from_ = 0 if floor == "exact" else boundary - window
    with Cold(net, length, seed=101) as cold:
        tokens = cold.tokens[:boundary]
        kept = captured(net, tokens, (0, boundary), [boundary], from_)[boundary]
        plan = cold.plan(length, KnownWindow(boundary, "swa", decoder_floor=from_))
        assert plan == ResumePlan(
            boundary, boundary, boundary - window, boundary, boundary - window, "swa", boundary, with_decoder=True, faithful=False
        )
        ref = Reference(net.weights, tokens)
        ref.run(0, boundary, decoder_from=from_, decoder_window_from=from_)
        rows = {layer: {p: found[p] for p in range(boundary - window, boundary)} for layer, found in ref.memory.window.items()}
        check_against_reference(net, cold, plan, kept, rows, ref.memory)
        # More exact than the cold run's own, so not equal to it.
        assert difference(cold.resume(plan, window=kept)[0], cold.logits[-(length - boundary) :]) is not None
