"""The state that holds one choice to a form: when it begins, when it ends, and going back."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from forebay.engine.constraint import Constraint, MaskWorker
from forebay.engine.grammar import GrammarSpec, choice_spec, json_object_spec, json_spec
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.sampler import Sampler, SamplingState
from forebay.engine.tool_grammar import ToolForm, calls_spec
from forebay.engine.types import SamplingParams
from forebay.model.tokenizer import DSML, Tokenizer


def allowed(constraint: Constraint, tokenizer: Tokenizer) -> set[int]:
    """Ids that may come next."""
    every = set(range(tokenizer.vocab_size))
    found = constraint.allowed()
    if found is None:
        return every
    if found.bits is not None:
        bits = np.unpackbits(found.bits.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        return set(np.flatnonzero(bits).tolist())
    return set(found.only) if found.only is not None else every - set(found.banned)


def say(constraint: Constraint, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode_special(text):
        assert token in allowed(constraint, tokenizer), tokenizer.token_text(token)
        constraint.observe(token)
        assert not constraint.error


@pytest.mark.case("B076")
def test_a_form_holds_from_the_end_of_the_reasoning(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = Constraint(tokenizer, compiler.compile(json_object_spec()), reasoning=True)
    say(constraint, tokenizer, "I think: {not json")
    free = allowed(constraint, tokenizer)
    # An answer is due, so the turn may not end in the reasoning, nor open a call there.
    assert not free & (tokenizer.stop_ids | {tokenizer.dsml_id})
    assert tokenizer.think_end_id in free
    assert len(free) > 4000
    say(constraint, tokenizer, "</think>")
    assert {tokenizer.token_text(i)[0] for i in allowed(constraint, tokenizer)} == {"{"}
    say(constraint, tokenizer, '{"a": 1}')
    assert allowed(constraint, tokenizer) == {tokenizer.eos_id}
    constraint.observe(tokenizer.eos_id or 0)
    assert not constraint.error


def test_a_form_without_reasoning_holds_at_once(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = Constraint(tokenizer, compiler.compile(choice_spec(["yes", "no"], "c")), reasoning=False)
    assert {tokenizer.token_text(i)[0] for i in allowed(constraint, tokenizer)} <= {"y", "n"}
    constraint.observe(tokenizer.encode("x")[0])
    assert "does not fit" in constraint.error


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("form", [False, True])
def test_a_budget_ends_the_reasoning(compiler: GrammarCompiler, tokenizer: Tokenizer, budget: int, form: bool) -> None:
    grammar = compiler.compile(json_object_spec()) if form else None
    constraint = Constraint(tokenizer, grammar, reasoning=True, budget=budget)
    for token in tokenizer.encode("one two three four five six")[:budget]:
        assert len(allowed(constraint, tokenizer)) > 4000
        constraint.observe(token)
    assert allowed(constraint, tokenizer) == {tokenizer.think_end_id}
    constraint.observe(tokenizer.think_end_id or 0)
    assert (len(allowed(constraint, tokenizer)) == tokenizer.vocab_size) == (not form)


def test_a_budget_does_not_cut_a_call(tokenizer: Tokenizer) -> None:
    """A tag is waited for until it is known to be none; a call has ended the reasoning by itself."""

    def after(text: str, **options: bool) -> Constraint:
        constraint = Constraint(tokenizer, None, reasoning=True, budget=2, **options)
        for token in tokenizer.encode_special(text):
            constraint.observe(token)
        return constraint

    end = {tokenizer.think_end_id}
    opened = f"one two three <{DSML}"
    for text in (opened, f"{opened} ca", f"{opened} calls>\n<{DSML} invoke name=", f"{opened} invoke name=\"f\">\n"):
        constraint = after(text)
        assert constraint.allowed() is None, text
        assert after(text, calls=False).allowed() is not None, text
        constraint.rollback(len(tokenizer.encode_special(text)) - 3)
        assert allowed(constraint, tokenizer) == end
    for text in ("one two three <", f"one two {DSML} three", f"{opened} nothing>", f"{opened} calls are", f"one two </{DSML} calls>"):
        expected = end if not text.endswith("are") else None
        constraint = after(text)
        assert (allowed(constraint, tokenizer) if expected else constraint.allowed()) == expected, text
    assert allowed(after(f"{opened} calls" + " a" * 300), tokenizer) == end


def test_a_call_is_held_to_its_form_when_it_is_opened(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(calls_spec([ToolForm("f", {}, True, "t")], "marker", single=True))
    for reasoning in (False, True):
        constraint = Constraint(tokenizer, grammar, reasoning=reasoning)
        say(constraint, tokenizer, f"Use {DSML} as you like, also </{DSML} x>" + ("</think>then" if reasoning else ""))
        assert len(allowed(constraint, tokenizer)) == tokenizer.vocab_size
        say(constraint, tokenizer, f"\n\n<{DSML}")
        assert {tokenizer.token_text(i)[0] for i in allowed(constraint, tokenizer)} == {" "}
        say(constraint, tokenizer, f' calls>\n<{DSML} invoke name="f">\n\n</{DSML} invoke>\n</{DSML} calls>')
        assert allowed(constraint, tokenizer) == {tokenizer.eos_id}


@pytest.mark.case("B049")
@pytest.mark.parametrize("kind", ["json", "calls", "budget"])
def test_going_back_is_never_having_gone(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str) -> None:
    """As a speculation's rejected drafts: any tokens that are allowed, some taken back, against a fresh one that saw only the rest."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}}
    specs = {"json": json_spec(schema, "s"), "calls": calls_spec([ToolForm("f", schema, True, "t")], "marker", single=False)}
    grammar = compiler.compile(specs[kind]) if kind in specs else None
    budget = 9 if kind == "budget" else None
    for seed in range(4):
        dice = random.Random(seed)
        constraint = Constraint(tokenizer, grammar, reasoning=True, budget=budget)
        kept: list[int] = []
        marks = [tokenizer.think_end_id, tokenizer.dsml_id, tokenizer.eos_id, *tokenizer.encode("<"), *tokenizer.encode('"')]
        for _ in range(150):
            may = allowed(constraint, tokenizer)
            likely = [i for i in marks if i in may and i is not None]
            token = dice.choice(likely) if likely and dice.random() < 0.4 else dice.choice(sorted(may))
            constraint.observe(token)
            kept.append(token)
            if token == tokenizer.eos_id or dice.random() < 0.25:
                back = dice.randint(1, min(8, len(kept)))
                constraint.rollback(back)
                del kept[len(kept) - back :]
            assert not constraint.error
            fresh = Constraint(tokenizer, grammar, reasoning=True, budget=budget)
            for earlier in kept:
                fresh.observe(earlier)
            assert fresh.matching == constraint.matching
            assert allowed(fresh, tokenizer) == allowed(constraint, tokenizer)


def test_one_that_failed_works_again_when_taken_back(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = Constraint(tokenizer, compiler.compile(json_object_spec()), reasoning=False)
    say(constraint, tokenizer, '{"a": ')
    before = allowed(constraint, tokenizer)
    constraint.observe(tokenizer.encode("x")[0])
    assert constraint.error
    constraint.rollback(1)
    assert allowed(constraint, tokenizer) == before


def test_masks_are_computed_in_the_background(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(json_object_spec())
    many = [Constraint(tokenizer, grammar, reasoning=i % 2 == 1) for i in range(6)]
    worker = MaskWorker()
    assert [c.pending for c in many] == [True, False] * 3
    worker.start(many[:4])
    worker.finish(many)
    assert not any(c.pending for c in many)
    first = allowed(many[0], tokenizer)
    assert all(allowed(c, tokenizer) == first for c in many[::2])
    worker.close()


class Slow(Constraint):
    """Its masks take until it is told."""

    gate = threading.Event()

    def compute(self) -> None:
        self.gate.wait(20)
        super().compute()


@pytest.mark.case("B108")
def test_a_mask_that_takes_too_long_fails_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(json_object_spec())
    slow = Slow(tokenizer, grammar, reasoning=False)
    others = [Constraint(tokenizer, grammar, reasoning=False) for _ in range(3)]
    worker = MaskWorker(longest_s=0.2)
    worker.start([others[0], slow, *others[1:]])
    late = worker.finish([others[0], slow, *others[1:]])
    until = time.monotonic() + 60
    while late:
        assert time.monotonic() < until
        late = worker.finish([], [others[0], slow, *others[1:]])
    assert "longer than 0.2 s" in slow.error
    assert not any(c.error or c.pending for c in others)
    Slow.gate.set()
    worker.close()


class Timed(Constraint):
    """Whose mask takes its time, or fails."""

    seconds = 0.0
    failure: BaseException | None = None

    def compute(self) -> None:
        time.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        super().compute()


def timed(compiler: GrammarCompiler, tokenizer: Tokenizer, seconds: float = 0.0, failure: BaseException | None = None) -> Timed:
    made = Timed(tokenizer, compiler.compile(json_object_spec()), reasoning=False)
    made.seconds, made.failure = seconds, failure
    return made


def test_every_mask_has_its_own_time(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Many that are quick enough may take longer together than one may."""
    many = [timed(compiler, tokenizer, 0.05) for _ in range(12)]
    worker = MaskWorker(longest_s=0.4, step_s=60.0)
    assert worker.finish(many) == set()
    assert not any(c.error or c.pending for c in many)
    worker.close()


def test_what_fails_in_a_mask_is_its_own_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    class PanicError(BaseException):
        """As the library's."""

    bad = [timed(compiler, tokenizer, failure=error) for error in (MemoryError("x"), PanicError("x"))]
    good = timed(compiler, tokenizer)
    worker = MaskWorker()
    assert worker.finish([*bad, good]) == set()
    assert all("failed" in c.error for c in bad)
    assert not good.error
    assert not good.pending
    worker.close()


def test_what_fails_in_the_library_is_its_own_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    class Broken:
        def consume_token(self, token: int) -> bool:
            raise RuntimeError("x")

        def is_stopped(self) -> bool:
            return False

    constraint = Constraint(tokenizer, compiler.compile(json_object_spec()), reasoning=False)
    constraint._matcher = Broken()  # type: ignore[assignment]
    constraint.observe(5)
    assert "failed" in constraint.error


def test_a_step_waits_for_so_long_and_the_late_ones_are_told(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    slow = Slow(tokenizer, compiler.compile(json_object_spec()), reasoning=False)
    Slow.gate.clear()
    quick = [timed(compiler, tokenizer) for _ in range(3)]
    worker = MaskWorker(longest_s=60.0, step_s=0.1)
    assert worker.finish([*quick, slow]) == {id(slow)}
    # Not waited for again while others have something to do, nor begun twice.
    more = [timed(compiler, tokenizer)]
    late = worker.finish(more, [slow])
    assert id(slow) in late
    assert worker._line.count(slow) == 0
    Slow.gate.set()
    until = time.monotonic() + 60
    while late := worker.finish([], [*more, slow]):
        assert time.monotonic() < until
    assert not any(c.error or c.pending for c in (*quick, *more, slow))
    worker.close()


def test_those_who_were_quick_go_first(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    order: list[int] = []
    gate = threading.Event()

    class Noted(Constraint):
        def compute(self) -> None:
            gate.wait(60)
            order.append(round(self.cost))
            super().compute()

    made = []
    for cost in (0, 3, 1, 2):
        made.append(Noted(tokenizer, compiler.compile(json_object_spec()), reasoning=False))
        made[-1].cost = float(cost)
    worker = MaskWorker(step_s=60.0, longest_s=60.0)
    worker.start(made)
    gate.set()
    worker.finish(made)
    assert order == [0, 1, 2, 3]
    worker.close()


def test_a_grammar_that_gets_too_complex_fails_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Accepted, since nobody can tell, and then its states multiply."""
    grammar = compiler.compile(json_spec({"type": "string", "pattern": "^(.*a){1,40}.{100}$"}, "s"))
    constraint = Constraint(tokenizer, grammar, reasoning=False)
    dice = random.Random(1)
    for _ in range(400):
        may = allowed(constraint, tokenizer)
        if constraint.error:
            break
        constraint.observe(dice.choice(sorted(may)))
    assert "too complex" in constraint.error


# ---- in the sampler


def sample(state: SamplingState, logits: torch.Tensor) -> int:
    return Sampler(logits.shape[0], frozenset({1})).sample(logits[None], [state]).token_ids[0]


def state_of(constraint: Constraint, **params: object) -> SamplingState:
    return SamplingState(SamplingParams(**{"temperature": 0.0, "max_tokens": 9, **params}), [5], 7, constraint)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [4096, 4200, 256])
def test_only_what_is_allowed_is_chosen(compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float, width: int) -> None:
    """Whatever the model prefers, and whether the logits are wider than the tokenizer or narrower."""
    constraint = Constraint(tokenizer, compiler.compile(GrammarSpec('start: "a" | "b"')), reasoning=False)
    logits = torch.randn(width, generator=torch.Generator().manual_seed(3)) * 5
    logits[-1] = 50.0
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    state = state_of(constraint, temperature=temperature)
    assert sample(state, logits) in (a, b)
    if temperature == 0:
        assert sample(state, logits) == (a if logits[a] >= logits[b] else b)
    state.observe(a)
    assert sample(state, logits) == tokenizer.eos_id


def test_other_wishes_give_way_to_a_form(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    grammar = compiler.compile(GrammarSpec('start: "a" | "b"'))
    logits = torch.zeros(4096)
    logits[b] = 1.0

    def chosen(**params: object) -> int:
        return sample(state_of(Constraint(tokenizer, grammar, reasoning=False), **params), logits)

    assert chosen() == b
    assert chosen(logit_bias={b: -100.0}) == a  # possible within the form
    assert chosen(frequency_penalty=0.5, logit_bias={a: 2.0}) == a
    assert chosen(logit_bias={a: -100.0, b: -100.0}) == b  # impossible: the form wins
    assert chosen(allowed_token_ids=(c,)) == b
    done = state_of(Constraint(tokenizer, grammar, reasoning=False), min_tokens=5)
    done.observe(a)
    assert sample(done, logits) == tokenizer.eos_id


def test_a_batch_of_held_and_free_rows(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Each row chooses as if alone."""
    texts = "abcdefgh"
    logits = torch.randn((16, 4096), generator=torch.Generator().manual_seed(5)) * 4

    def states() -> list[SamplingState]:
        found = []
        for i in range(16):
            grammar = compiler.compile(choice_spec([texts[i % 8], "z" * i + "y"], "c"))
            held = Constraint(tokenizer, grammar, reasoning=False) if i % 3 else None
            params = SamplingParams(temperature=(0.0, 1.0)[i % 2], top_p=(1.0, 0.9)[i % 4 == 1], top_k=(0, 5)[i % 5 == 2], max_tokens=4)
            found.append(SamplingState(params, [3, 4], i, held))
        return found

    sampler = Sampler(4096, frozenset({1}))
    together = sampler.sample(logits, states()).token_ids
    alone = [sampler.sample(logits[i : i + 1], [state]).token_ids[0] for i, state in enumerate(states())]
    assert together == alone
    for i, token in enumerate(together):
        if i % 3:
            assert tokenizer.token_text(token)[0] in (texts[i % 8], "z", "y")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_masks_on_a_device_are_those_of_the_host(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(json_object_spec())
    logits = torch.randn((8, 4096), generator=torch.Generator().manual_seed(9))

    def run(device: str) -> list[int]:
        states = [state_of(Constraint(tokenizer, grammar, reasoning=i % 2 == 0, budget=i % 3)) for i in range(8)]
        return Sampler(4096, frozenset({1})).sample(logits.to(device), states).token_ids

    assert run("cpu") == run("cuda")
