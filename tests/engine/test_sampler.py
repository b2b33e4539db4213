"""The sampler: distributions (B018), penalties, filters, seeds, independence of the batch, log-probabilities, foreign ids (B111)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from forebay.engine import draws, logit_rows, token_logprobs
from forebay.engine.logit_edits import edit
from forebay.engine.sampler import LOGPROB_FLOOR, NonFiniteLogitsError, Sampler, SamplingState, prompt_logprobs
from forebay.engine.types import EngineError, SamplingParams
from forebay.model.errors import RequestError

EOS = 1


def expected(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution of one row by the textbook: fp64, a stable full sort, one filter after the other."""
    x = logits.astype(np.float64)
    order = np.argsort(-x, kind="stable")
    prob = np.exp((x - x.max()) / p.temperature)
    prob[prob < p.min_p * prob.max()] = 0.0
    if p.top_k:
        prob[order[p.top_k :]] = 0.0
    prob /= prob.sum()
    before = np.cumsum(prob[order]) - prob[order]
    prob[order[before >= p.top_p]] = 0.0
    return np.asarray(prob / prob.sum())


def chi_square_z(counts: np.ndarray, prob: np.ndarray) -> float:
    """Standard-normal score of a chi-square statistic (Wilson-Hilferty); cells expected below 5 are one cell."""
    assert counts[prob == 0].sum() == 0, "a token outside the support was drawn"
    want = prob * counts.sum()
    big = want >= 5
    got, want = np.append(counts[big], counts[~big].sum()), np.append(want[big], want[~big].sum())
    if want[-1] < 5:
        got, want = np.append(got[:-2], got[-2:].sum()), np.append(want[:-2], want[-2:].sum())
    freedom = len(want) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((got - want) ** 2 / want).sum())
    k = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - k)) / math.sqrt(k))


def draw(sampler: Sampler, logits: torch.Tensor, states: list[SamplingState], steps: int) -> np.ndarray:
    """Counts [rows, vocab] of `steps` draws per row from fixed logits."""
    counts = np.zeros(logits.shape, np.int64)
    for _ in range(steps):
        ids = sampler.sample(logits, states).token_ids
        for row, (token, state) in enumerate(zip(ids, states, strict=True)):
            counts[row, token] += 1
            state.generated += 1  # the next draw, without feeding penalties
    return counts


def mixed(rows: int, **extra: Any) -> list[SamplingParams]:
    """Distinct settings for every row."""
    return [
        SamplingParams(
            temperature=0.4 + 0.02 * i,
            top_p=(1.0, 0.95, 0.9, 0.8, 0.5, 0.3)[i % 6],
            top_k=(0, 0, 40, 5, 20)[i % 5],
            min_p=(0.0, 0.0, 0.0, 0.05, 0.1, 0.3, 0.0)[i % 7],
            **extra,
        )
        for i in range(rows)
    ]


def gaussian(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one(
    logits: list[float], params: SamplingParams, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None
) -> int:
    state = SamplingState(params, prompt or [], seed)
    for token in output or []:
        state.observe(token)
    return Sampler(len(logits), frozenset({EOS})).sample(torch.tensor([logits]), [state]).token_ids[0]


def edited(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The logits after penalties, bias and masks, as the sampler sees them."""
    state, x = SamplingState(params, prompt, 0), torch.tensor([logits])
    for token in output:
        state.observe(token)
    state.bind(Sampler(len(logits), frozenset({EOS})), x.device)
    edit(x, [state])
    return [float(v) for v in x[0]]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.case("B018")
def test_64_rows_with_distinct_parameters_follow_their_own_distribution() -> None:
    logits, params = gaussian(64, 50), mixed(64)
    assert len({(p.temperature, p.top_p, p.top_k, p.min_p) for p in params}) == 64
    counts = draw(Sampler(50, frozenset()), logits, [SamplingState(p, [], 100 + i) for i, p in enumerate(params)], 2000)
    scores = [chi_square_z(counts[i], expected(logits[i].numpy(), p)) for i, p in enumerate(params)]
    assert max(scores) < 4.0, scores
    # The test tells rows apart: against the neighbour's distribution nearly all of them fail.
    wrong = [np.abs(counts[i] / 2000 - expected(logits[(i + 1) % 64].numpy(), params[(i + 1) % 64])).sum() for i in range(64)]
    assert min(wrong) > 0.3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.05),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.999, temperature=0.5),
        SamplingParams(top_k=300, top_p=0.7),
        SamplingParams(min_p=0.5, top_p=0.9, temperature=2.0),
    ],
)
def test_flat_wide_distributions(params: SamplingParams) -> None:
    """Nearly flat logits over several thousand ids, where the nucleus is large and most first draws are rejected."""
    vocab, rows, steps = 3001, 50, 200
    logits = gaussian(1, vocab, 3, scale=0.5)
    states = [SamplingState(params, [], i) for i in range(rows)]
    counts = draw(Sampler(vocab, frozenset()), logits.expand(rows, vocab), states, steps)
    assert chi_square_z(counts.sum(0), expected(logits[0].numpy(), params)) < 4.0


def test_ties_at_every_boundary_go_to_lower_ids() -> None:
    logits = torch.zeros(8, 100)
    settings = [SamplingParams(top_p=0.25), SamplingParams(top_k=30), SamplingParams(top_k=40, top_p=0.5), SamplingParams(top_p=0.001)]
    counts = draw(Sampler(100, frozenset()), logits, [SamplingState(settings[i % 4], [], i) for i in range(8)], 400)
    for row, size in enumerate((25, 30, 20, 1) * 2):
        assert set(np.flatnonzero(counts[row])) == set(range(size))
    logits[:, 99] = 1.0
    counts = draw(Sampler(100, frozenset()), logits, [SamplingState(SamplingParams(top_k=4), [], i) for i in range(8)], 100).sum(0)
    assert set(np.flatnonzero(counts)) == {0, 1, 2, 99}


def test_greedy_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    rng = np.random.default_rng(0)
    for vocab in (7, 64, 4096, 4099, 129_280):
        values = torch.from_numpy(rng.integers(0, 4, (5, vocab)).astype(np.float32))
        values[4] = 0.0
        values[3, -1] = 9.0
        states = [SamplingState(SamplingParams(temperature=0), [], 0) for _ in range(5)]
        got = Sampler(vocab, frozenset()).sample(values, states).token_ids
        assert got == [int(np.flatnonzero(r == r.max())[0]) for r in values.numpy()]
        # torch's own argmax is what other devices use
        assert values.argmax(-1).tolist() == got
        # the same rows through the path of edited rows
        banned = [SamplingState(SamplingParams(temperature=0, logit_bias={got[i]: -100}), [], 0) for i in range(5)]
        second = Sampler(vocab, frozenset()).sample(values, banned).token_ids
        for i in range(5):
            rest = values[i].numpy().copy()
            rest[got[i]] = -np.inf
            assert second[i] == int(np.flatnonzero(rest == rest.max())[0])


@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=0.0), SamplingParams(top_k=1), SamplingParams(temperature=1e-6), SamplingParams(min_p=1.0)]
)
def test_settings_that_leave_only_the_best_token(params: SamplingParams) -> None:
    assert {one([0.0, 1.0, 1.5, 1.4999], params, seed) for seed in range(50)} == {2}


def test_filters_that_keep_everything() -> None:
    logits = gaussian(4, 20)
    params = [SamplingParams(top_k=20), SamplingParams(top_k=10**9), SamplingParams(min_p=1e-30), SamplingParams(top_p=1.0)]
    counts = draw(Sampler(20, frozenset()), logits, [SamplingState(p, [], i) for i, p in enumerate(params)], 1500)
    for i in range(4):
        assert chi_square_z(counts[i], expected(logits[i].numpy(), SamplingParams())) < 4.0


def test_extreme_logits_do_not_break_the_draw() -> None:
    big = 3e38
    cold = SamplingParams(top_k=3, temperature=2e-5)
    for params in (SamplingParams(), SamplingParams(top_p=0.5), cold, SamplingParams(repetition_penalty=1e-40)):
        assert one([-big, big, -big, 0.0], params, prompt=[1]) == 1
    assert one([0.0, -90.0, -200.0], SamplingParams(top_p=0.9999999)) == 0


def test_penalty_formulas() -> None:
    logits = [2.0, -2.0, 1.0, -1.0, 0.5]
    p = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={2: 3.0, 4: -1.5})
    # ids 0 and 1 in the prompt, 2 twice and 1 once in the output
    assert edited(logits, p, [0, 1, 1], [2, 2, 1]) == [1.0, -4.0 - 0.75, 0.5 - 0.5 - 0.5 + 3.0, -1.0, 0.5 - 1.5]
    # frequency and presence look at the output only
    q = SamplingParams(frequency_penalty=-1.0, presence_penalty=-0.5)
    assert edited(logits, q, [0, 1], [3, 3, 3]) == [2.0, -2.0, 1.0, -1.0 + 3.0 + 0.5, 0.5]
    # repetition alone over the output, with the bias entry of the same id kept
    r = SamplingParams(repetition_penalty=0.5, logit_bias={0: 1.0})
    assert edited(logits, r, [], [0, 3]) == [5.0, -2.0, 1.0, -0.5, 0.5]


def test_penalties_over_a_long_output_match_a_dense_count() -> None:
    rng = np.random.default_rng(1)
    vocab, prompt, output = 500, rng.integers(0, 500, 90).tolist(), rng.integers(0, 500, 700).tolist()
    logits = gaussian(1, vocab, 4)[0]
    p = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=-0.4)
    count = np.bincount(output, minlength=vocab)
    seen = (count > 0) | (np.bincount(prompt, minlength=vocab) > 0)
    x = logits.numpy().astype(np.float64)
    want = np.where(seen, np.where(x > 0, x / 1.3, x * 1.3), x) - 0.2 * count + 0.4 * (count > 0)
    np.testing.assert_allclose(edited(logits.tolist(), p, prompt, output), want, rtol=1e-5, atol=1e-5)


def test_observe_before_the_first_sample_equals_observe_after() -> None:
    """A sequence that moves to another worker is rebuilt from its tokens."""
    sampler, logits = Sampler(64, frozenset({EOS})), gaussian(1, 64, 5)
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: -100, 6: 2.0}, min_tokens=3, top_p=0.9)
    first, tokens = SamplingState(params, [3, 4, 10**6, -1], 77), []
    for _ in range(30):
        tokens += sampler.sample(logits, [first]).token_ids
        first.observe(tokens[-1])
    rebuilt = SamplingState(params, [3, 4, 10**6, -1], 77)
    for token in tokens[:17]:
        rebuilt.observe(token)
    again = []
    for _ in range(13):
        again += sampler.sample(logits, [rebuilt]).token_ids
        rebuilt.observe(again[-1])
    assert again == tokens[17:]
    assert 5 not in tokens
    assert EOS not in tokens[:3]


def test_logit_bias_and_allowed_tokens() -> None:
    logits = [5.0, 0.0, 4.0, 1000.0]
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert one(logits, SamplingParams(**greedy, logit_bias={3: -100})) == 0, "-100 bans whatever the logit"
    assert one(logits, SamplingParams(**greedy, logit_bias={3: -99.5})) == 3, "anything else is a sum"
    assert one([5.0, 0.0, 4.0, 3.0], SamplingParams(**greedy, logit_bias={1: 100})) == 1
    assert {one(logits, SamplingParams(allowed_token_ids=(0, 2)), s) for s in range(40)} == {0, 2}
    assert one(logits, SamplingParams(allowed_token_ids=(2,), top_p=0.5)) == 2
    # a ban of everything that is allowed gives way
    assert one(logits, SamplingParams(allowed_token_ids=(2,), logit_bias={2: -100})) == 2
    assert one(logits, SamplingParams(**greedy, logit_bias=dict.fromkeys(range(4), -100.0))) == 3


def test_bad_words_are_never_completed() -> None:
    best = [0.0, 0.0, 1.0, 9.0, 5.0, 20.0]
    words: dict[str, Any] = {"bad_words": [(3, 4), (5,), [4, 3, 4], (2, 2, 2), (3, 3), (3, 4)]}
    greedy = SamplingParams(temperature=0, **words)
    assert one(best, greedy) == 3, "5 alone is one"
    assert one(best, greedy, output=[3]) == 2, "4 and 3 would each be the second of two"
    assert one(best, greedy, output=[3, 2]) == 3, "the beginning has to be just before"
    assert one([0.0, 0.0, 9.0, 0.0, 0.0, 0.0], greedy, output=[2, 2]) != 2
    assert one([0.0, 0.0, 9.0, 0.0, 0.0, 0.0], greedy, output=[2, 0, 2]) == 2
    state = SamplingState(greedy, [3], 0)  # a beginning in the prompt is none
    assert Sampler(6, frozenset({EOS})).sample(torch.tensor([best]), [state]).token_ids == [3]
    drawn = {one(best, SamplingParams(temperature=2.0, **words), seed, None, [3]) for seed in range(60)}
    assert drawn <= {0, 1, 2}
    # they give way where nothing would be left, and to a form
    assert one(best, SamplingParams(allowed_token_ids=(4,), bad_words=[(3, 4)]), output=[3]) == 4
    assert one(best, SamplingParams(allowed_token_ids=(4, 0), bad_words=[(3, 4)], logit_bias={0: -100}), output=[3]) == 4
    assert one(best, SamplingParams(allowed_token_ids=(EOS, 4), bad_words=[(3, 4)], min_tokens=5), output=[3]) == 4


def test_bad_words_hold_in_any_batch_and_after_a_move() -> None:
    sampler, logits = Sampler(32, frozenset({EOS})), gaussian(1, 32, 5)
    words = [(i, j) for i in range(32) for j in range(32) if (i * j) % 3 == 0]
    params = SamplingParams(bad_words=words, top_p=0.95)
    states = [SamplingState(params if n % 2 == 0 else SamplingParams(), [], n) for n in range(6)]
    written: list[list[int]] = [[] for _ in states]
    for _ in range(40):
        for state, token, kept in zip(states, sampler.sample(logits.expand(6, 32).contiguous(), states).token_ids, written, strict=True):
            kept.append(token)
            state.observe(token)
    for n in (0, 2, 4):
        assert all((a * b) % 3 for a, b in itertools.pairwise(written[n]))
        moved = SamplingState(params, [], n)
        for place, token in enumerate(written[n]):
            assert sampler.sample(logits, [moved]).token_ids == [token], place
            moved.observe(token)
    assert any((a * b) % 3 == 0 for a, b in itertools.pairwise(written[1]))


@pytest.mark.parametrize("words", [[()], [3], ["ab", ()], "", [[3], None]])
def test_bad_words_are_lists_of_ids(words: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Sampler(9, frozenset()).check(SamplingParams(bad_words=words or [[]]))
    assert caught.value.param == "bad_words"
    with pytest.raises(RequestError, match="bad_words must hold token ids from 0 to 8"):
        Sampler(9, frozenset()).check(SamplingParams(bad_words=[(1, 9)]))
    with pytest.raises(RequestError, match="16384 tokens together, got 16400"):
        Sampler(9, frozenset()).check(SamplingParams(bad_words=[(1,) * 164] * 100))


def test_min_tokens_holds_back_ends() -> None:
    logits = [0.0, 9.0, 8.0, 7.0]
    p = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(2,))
    assert [one(logits, p, output=[3] * n) for n in range(4)] == [3, 3, EOS, EOS]
    assert one(logits, SamplingParams(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=(2,))) == EOS
    # nothing else is allowed: the end comes early rather than never
    assert one(logits, SamplingParams(temperature=0, min_tokens=2, allowed_token_ids=(EOS,))) == EOS
    assert {one(logits, SamplingParams(min_tokens=1, temperature=2.0), s) for s in range(60)} <= {0, 2, 3}


def run(sampler: Sampler, rows: list[tuple[torch.Tensor, SamplingState]], steps: int) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in rows]
    for step in range(steps):
        logits = torch.stack([x.roll(step) for x, _ in rows])
        for n, token in enumerate(sampler.sample(logits, [s for _, s in rows]).token_ids):
            out[n].append(token)
            rows[n][1].observe(token)
    return out


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return str(request.param)


@pytest.mark.parametrize("vocab", [4096, 4099])
def test_a_row_does_not_depend_on_the_batch(vocab: int, threads: int, device: str) -> None:
    """64 rows together, in another order, in halves and each alone: the same tokens and bit-equal log-probabilities."""
    params = [
        *mixed(48, repetition_penalty=1.1, presence_penalty=0.3, logprobs=3),
        *(SamplingParams(temperature=0, logprobs=5, frequency_penalty=0.5 * (i % 2)) for i in range(8)),
        *(SamplingParams(logprobs=0, logit_bias={i: 5.0}, min_tokens=9, allowed_token_ids=tuple(range(i, 900))) for i in range(8)),
    ]
    sampler, logits = Sampler(vocab, frozenset({EOS})), gaussian(64, vocab, 8).to(device)

    def states() -> list[SamplingState]:
        made = [SamplingState(p, [i, i + 1], i * 31 - 7) for i, p in enumerate(params)]
        for i, state in enumerate(made):
            for token in range(i % 5):
                state.observe(token * 3)
        return made

    whole = sampler.sample(logits, states())
    order = np.random.default_rng(2).permutation(64)
    shuffled_states = states()
    shuffled = sampler.sample(logits[torch.from_numpy(order).to(device)], [shuffled_states[i] for i in order])
    halves = [sampler.sample(logits[a : a + 32], states()[a : a + 32]) for a in (0, 32)]
    for i in range(64):
        alone = sampler.sample(logits[i : i + 1], [states()[i]])
        at = int(np.flatnonzero(order == i)[0])
        assert whole.token_ids[i] == alone.token_ids[0] == shuffled.token_ids[at] == halves[i // 32].token_ids[i % 32]
        assert whole.logprobs[i] == alone.logprobs[0] == shuffled.logprobs[at] == halves[i // 32].logprobs[i % 32]


def test_generations_do_not_depend_on_the_batch() -> None:
    """Several steps with history: a sequence keeps its tokens when its neighbours come and go."""
    params, sampler, logits = mixed(12, frequency_penalty=0.7, repetition_penalty=1.2), Sampler(257, frozenset()), gaussian(12, 257, 9)
    together = run(sampler, [(logits[i], SamplingState(p, [i], i)) for i, p in enumerate(params)], 25)
    for i, p in enumerate(params):
        assert run(sampler, [(logits[i], SamplingState(p, [i], i))], 25) == [together[i]]


def test_masses_are_the_same_bits_for_one_row_and_for_64(threads: int) -> None:
    """What the independence rests on: softmax by row, whole-number sums."""
    for vocab in (4096, 129_280):
        x = gaussian(64 if vocab < 10_000 else 8, vocab, 10)
        mass = x.softmax(-1).mul(draws.UNIT).floor()
        ids, total = draws.draw(mass, torch.full((len(x), 1), 0.37, dtype=torch.float64))
        for i in range(len(x)):
            row = x[i : i + 1].clone().softmax(-1).mul(draws.UNIT).floor()
            assert torch.equal(row[0], mass[i])
            alone_id, alone_total = draws.draw(row, torch.full((1, 1), 0.37, dtype=torch.float64))
            assert (alone_id[0], alone_total[0]) == (ids[i], total[i])
            assert int(total[i]) == sum(int(v) for v in row[0].double().tolist()), "the sum is exact"
            want = math.floor(0.37 * total[i].item())
            assert int(ids[i]) == int(np.searchsorted(np.cumsum(row[0].double().numpy()), want, side="right"))


def test_draws_work_on_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = draws.draw

    def watched(mass: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(mass.clone())
        return original(mass, u)

    monkeypatch.setattr(draws, "draw", watched)
    Sampler(500, frozenset()).sample(gaussian(4, 500, 16, scale=8.0), [SamplingState(p, [], 0) for p in mixed(4)])
    assert len(seen) >= 2
    assert all(torch.equal(mass, mass.floor()) for mass in seen)


def test_the_ends_of_the_unit_interval_draw_tokens_with_mass() -> None:
    mass = torch.zeros(2, 192)
    mass[:, 70], mass[:, 75], mass[1, 3] = 5.0, 2.0, 1.0
    below_one = 1.0 - 2.0**-53
    for u, want in ((0.0, [70, 3]), (below_one, [75, 75]), (0.5, [70, 70])):
        ids, total = draws.draw(mass, torch.full((2, 1), u, dtype=torch.float64))
        assert ids.tolist() == want
        assert total.flatten().tolist() == [7.0, 8.0]


def test_seeds() -> None:
    sampler, logits = Sampler(1000, frozenset()), torch.zeros(1, 1000)

    def tokens(seed: int | None) -> list[int]:
        return run(sampler, [(logits[0], SamplingState(SamplingParams(), [], seed))], 40)[0]

    assert tokens(5) == tokens(5)
    sequences = [tuple(tokens(s)) for s in (0, 1, 2, -1, 2**63 - 1, -(2**63), None, None)]
    assert len(set(sequences)) == 8
    fresh = SamplingState(SamplingParams(), [])
    assert -(2**63) <= fresh.seed < 2**63
    assert fresh.seed != SamplingState(SamplingParams(), []).seed
    # A fixed value, so that seeds mean the same on every machine and in every version.
    assert SamplingState(SamplingParams(), [], 42).uniform(0) == 0.37859171382511214


def test_uniforms_are_uniform_over_seeds_positions_and_draws() -> None:
    def cells(values: list[float]) -> np.ndarray:
        assert all(0.0 <= v < 1.0 for v in values)
        return np.bincount((np.array(values) * 50).astype(int), minlength=50)

    flat = np.full(50, 0.02)
    assert chi_square_z(cells([SamplingState(SamplingParams(), [], s).uniform(0) for s in range(5000)]), flat) < 4.0
    state = SamplingState(SamplingParams(), [], 3)
    assert chi_square_z(cells([state.uniform(d) for d in range(5000)]), flat) < 4.0
    by_position = []
    for _ in range(5000):
        by_position.append(state.uniform(0))
        state.observe(0)
    assert chi_square_z(cells(by_position), flat) < 4.0
    assert abs(np.corrcoef(by_position[:-1], by_position[1:])[0, 1]) < 0.06


@pytest.mark.parametrize("vocab", [128, 130])
def test_sample_leaves_its_inputs_alone(vocab: int) -> None:
    logits = gaussian(3, vocab, 11)
    copy = logits.clone()
    filters: dict[str, Any] = {"top_p": 0.5, "top_k": 9, "min_p": 0.01, "allowed_token_ids": (1, 2, 4)}
    params = SamplingParams(repetition_penalty=1.5, logit_bias={4: -100}, logprobs=4, **filters)
    states = [SamplingState(p, [1], 0) for p in (params, SamplingParams(), SamplingParams(temperature=0, presence_penalty=1))]
    first = Sampler(vocab, frozenset()).sample(logits, states)
    assert torch.equal(logits, copy)
    assert first == Sampler(vocab, frozenset()).sample(logits, states)
    wide = torch.zeros(vocab, 6)
    wide[:, ::2] = copy.T
    assert first == Sampler(vocab, frozenset()).sample(wide[:, ::2].T, states), "a strided view is as good"


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = gaussian(1, 200, 12)
    table = logits[0].double().log_softmax(-1)
    params = SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.8, logit_bias={7: 100}, logprobs=20)
    result = Sampler(200, frozenset()).sample(logits, [SamplingState(params, list(range(50)), 0)])
    entry = result.logprobs[0]
    assert entry is not None
    assert entry.token_id == result.token_ids[0] == 7
    assert entry.logprob == pytest.approx(float(table[7]), abs=1e-5)
    order = sorted(range(200), key=lambda i: (-float(logits[0, i]), i))[:20]
    assert [i for i, _ in entry.top] == order
    assert [v for _, v in entry.top] == pytest.approx([float(table[i]) for i in order], abs=1e-5)


def test_logprobs_per_row_counts_ties_and_floor() -> None:
    x = torch.zeros(5, 60)
    x[1, 40:] = 1.0
    x[2, 30] = 3e38  # everything else has probability zero
    params = [SamplingParams(temperature=0, logprobs=k) for k in (3, 6, 2, 0)] + [SamplingParams(temperature=0)]
    found = Sampler(60, frozenset()).sample(x, [SamplingState(p, [], 0) for p in params]).logprobs
    assert found[4] is None
    assert found[3] is not None
    assert found[3].top == ()
    assert found[0] is not None
    assert [i for i, _ in found[0].top] == [0, 1, 2]
    assert found[1] is not None
    assert [i for i, _ in found[1].top] == [40, 41, 42, 43, 44, 45]
    assert found[2] is not None
    assert found[2].top == ((30, 0.0), (0, LOGPROB_FLOOR))
    json.dumps([(e.logprob, e.top) for e in found if e], allow_nan=False)
    tiny = Sampler(3, frozenset()).sample(torch.zeros(1, 3), [SamplingState(SamplingParams(temperature=0, logprobs=20), [], 0)]).logprobs[0]
    assert tiny is not None
    assert len(tiny.top) == 3


@pytest.mark.case("B109")
def test_prompt_logprobs_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = gaussian(37, 90, 13)
    ids = [(i * 7) % 90 for i in range(37)]
    whole = prompt_logprobs(logits, ids, 4)
    table = logits.double().log_softmax(-1)
    assert [e.token_id for e in whole] == ids
    assert [e.logprob for e in whole] == pytest.approx([float(table[n, i]) for n, i in enumerate(ids)], abs=1e-5)
    largest = 0
    original = token_logprobs.logprobs_of

    def watched(rows: torch.Tensor, chosen: list[int], ks: list[int]) -> object:
        nonlocal largest
        largest = max(largest, rows.numel())
        return original(rows, chosen, ks)

    monkeypatch.setattr(token_logprobs, "logprobs_of", watched)
    monkeypatch.setitem(logit_rows._TILE, "cpu", 500)
    assert prompt_logprobs(logits, ids, 4) == whole
    assert largest == 450
    assert all(e.top == () for e in prompt_logprobs(logits, ids, 0))
    logits[30, 3] = math.nan
    with pytest.raises(NonFiniteLogitsError) as caught:
        prompt_logprobs(logits, ids, 4)
    assert caught.value.rows == (30,)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_name_their_rows_and_spare_the_others(poison: float) -> None:
    sampler, logits = Sampler(80, frozenset()), gaussian(6, 80, 14)
    params = mixed(6, logprobs=2)
    clean = sampler.sample(logits, [SamplingState(p, [], i) for i, p in enumerate(params)])
    logits[1, 79] = poison
    logits[4, 0] = poison
    states = [SamplingState(p, [], i) for i, p in enumerate(params)]
    with pytest.raises(EngineError, match="row 1, 4") as caught:
        sampler.sample(logits, states)
    assert isinstance(caught.value, NonFiniteLogitsError)
    assert caught.value.rows == (1, 4)
    keep = [i for i in range(6) if i not in caught.value.rows]
    again = sampler.sample(logits[keep], [states[i] for i in keep])
    assert again.token_ids == [clean.token_ids[i] for i in keep]
    assert again.logprobs == [clean.logprobs[i] for i in keep]


def test_finite_rows_whose_sum_overflows_are_fine() -> None:
    assert one([3e38, 3e38, 3e38, 0.0], SamplingParams(temperature=0)) == 0


@pytest.mark.case("B111")
def test_foreign_ids_are_refused_at_the_door_and_harmless_behind_it() -> None:
    sampler = Sampler(50, frozenset({EOS}))
    for bad in (-1, 50, 2**31, 10**12, True):
        for name, value in (("logit_bias", {bad: 1.0}), ("stop_token_ids", (bad,)), ("allowed_token_ids", (3, bad))):
            with pytest.raises(RequestError) as caught:
                sampler.check(SamplingParams(**{name: value}))  # type: ignore[arg-type]
            assert caught.value.param == name
            assert "0 to 49" in caught.value.message or bad is True  # True fails as a key before the vocabulary is asked
    with pytest.raises(RequestError):
        sampler.check(SamplingParams(allowed_token_ids=()))
    sampler.check(SamplingParams(logit_bias={0: 1.0, 49: -100}, stop_token_ids=(49,), allowed_token_ids=(0,)))
    logits = gaussian(2, 50, 15)
    hostile = SamplingParams(
        logit_bias={-1: 50.0, 50: 50.0, 60: -100.0, 2**31: 100.0}, stop_token_ids=(-3, 64, 2**40), min_tokens=5, repetition_penalty=1.9
    )
    neighbour = SamplingParams(temperature=0)
    got = sampler.sample(logits, [SamplingState(hostile, [-1, 50, 129_279, 2**31], 1), SamplingState(neighbour, [], 0)])
    assert got.token_ids[1] == int(logits[1].argmax())
    same = SamplingParams(min_tokens=5, repetition_penalty=1.9)
    assert got.token_ids[0] == sampler.sample(logits[:1], [SamplingState(same, [], 1)]).token_ids[0]


def test_wrong_shapes_and_types_are_refused() -> None:
    sampler, state = Sampler(50, frozenset()), SamplingState(SamplingParams(), [], 0)
    for logits in (torch.zeros(2, 50), torch.zeros(1, 49), torch.zeros(1, 50, dtype=torch.bfloat16), torch.zeros(50)):
        with pytest.raises(EngineError, match="fp32"):
            sampler.sample(logits, [state])
    with pytest.raises(EngineError, match="fp32"):
        prompt_logprobs(torch.zeros(2, 50), [1], 0)
    assert sampler.sample(torch.zeros(0, 50), []).token_ids == []
