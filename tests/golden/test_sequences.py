"""Whole sequences: prefill, what `trace` shows of it, and decode fed with the golden tokens.

Decode is compared twice. The reference multiplies a lone row by other code than many rows, whose sums differ in the last bit; ours
must not, so that a step does not depend on its batch. With the reference's order put in place of ours, decode is equal bit for bit:
selections, caches, logits. With our own order it is held to the bounds that the golden README gives for single roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from forebay.engine.llm import LLM
from forebay.engine.types import SamplingParams
from forebay.model.batch import HalfState
from forebay.model.indexer import Indexer
from forebay.model.ops import formats
from forebay.model.ops.rope import Turn
from forwards import GoldenSequence, Hand, difference, reference_sums

LoadSequence = Callable[[str], GoldenSequence]
NAMES = ["T5", "T8", "T13", "T24", "T41", "T96", "T130"]
STEPS = 32  # golden decode steps; the first is the prefill's last row


def rmsd(a: Tensor, b: Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


def mean_kl(found: Tensor, wanted: Tensor) -> float:
    p = wanted.log_softmax(-1)
    return (p.exp() * (p - found.log_softmax(-1))).sum(-1).mean().item()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """The bounds of the golden README for an implementation whose single roundings differ."""
    assert mean_kl(found, wanted) <= 0.015
    assert rmsd(found, wanted) <= 0.15
    assert (found.argmax(1) == wanted.argmax(1)).float().mean().item() >= 0.8
    # Where the better of two tokens is clear, it is the same one.
    two = wanted.topk(2).values
    clear = (two[:, 0] - two[:, 1]) > 3 * (found - wanted).square().mean(1).sqrt()
    assert torch.equal(found.argmax(1)[clear], wanted.argmax(1)[clear])


@pytest.mark.parametrize("name", NAMES)
def test_prefill_logits(tiny_a: LLM, sequences: LoadSequence, same_sums: bool, name: str) -> None:
    """At least four rows in five bit for bit."""
    g = sequences(name)
    found, wanted = tiny_a.score(g.ids), g.tensors["logits"]
    assert found.shape == wanted.shape
    assert_near(found, wanted)
    equal = (found == wanted).all(1)
    if same_sums:
        assert equal.float().mean().item() >= 0.8, f"{int(equal.sum())} of {len(equal)} rows are bit-equal, rmsd {rmsd(found, wanted):.4f}"


@pytest.mark.parametrize("name", NAMES)
def test_trace_equals_golden(tiny_a: LLM, sequences: LoadSequence, same_sums: bool, name: str) -> None:
    """Selections, stored entries, router choices, Engram rows and the encoder's output.

    Where this CPU sums in another order, the first four are still equal on the short sequences; a bf16 rounding in a thousand of the
    encoder's output may fall otherwise, and the fp32 coefficients are held to the README's relative 1e-5.
    """
    g = sequences(name)
    if not same_sums and len(g.ids) > 13:
        pytest.skip("on this CPU sums differ in the last bit, and a long sequence drifts from the first changed selection on")
    trace = tiny_a.trace(g.ids)
    config, layers = tiny_a.config, tiny_a.config.topology().layers
    wanted = {"encoder.decoder_attn_in": 0.0, "encoder.collapsed": 0.0, "encoder.out_h": 1e-6, "encoder.out_pre_mix": 1e-6}
    for layer in layers:
        key = f"layer{layer.index}"
        wanted |= {f"{key}.router_indices": 0.0, f"{key}.router_weights": 1e-6}
        if layer.engram:
            wanted[f"{key}.engram_rows"] = 0.0
        if layer.owns_index:
            wanted[f"{key}.topk"] = 0.0
        if layer.owns_kv:
            wanted |= dict.fromkeys((f"{key}.main_kv_code", f"{key}.main_kv_scale", f"{key}.main_kv", f"{key}.index_k"), 0.0)
    for key, off in wanted.items():
        found, truth = trace[key], g.tensors[key]
        if key.endswith(".topk"):
            assert (found[:, truth.shape[1] :] == -1).all(), key
            found = found[:, : truth.shape[1]]
        assert found.shape == truth.shape, key
        if not same_sums and key == "encoder.out_h":
            assert (found != truth).float().mean().item() <= 0.001, key
            torch.testing.assert_close(found, truth, rtol=2**-6, atol=0)  # a rounding of each stream update
            continue
        far = (found.double() - truth.double()).abs()
        if not same_sums and key == "encoder.out_pre_mix":
            far /= truth.double().abs()
            off = 1e-5
        assert far.max().item() <= off, f"{key} differs by up to {far.max().item():.3g}"
    for layer in layers:
        if layer.owns_kv:
            entry = config.head_dim // 2 + config.head_dim // 16 + config.index_head_dim // 2 + config.index_head_dim // 32
            assert trace[f"layer{layer.index}.kv_bytes"].shape == (len(g.ids) // layer.ratio, entry)
    assert torch.equal(trace["logits"], tiny_a.score(g.ids))


@dataclass
class Decoded:
    """One sequence after prefill and 31 steps: logits [32, vocab], the prompt's selections, notes by step, and what is stored."""

    golden: GoldenSequence
    logits: Tensor
    prompt: dict[str, Tensor]
    notes: list[dict[str, Tensor]]
    entries: dict[int, Tensor]
    windows: Tensor


def decode(
    llm: LLM, golden: list[GoldenSequence], *around: AbstractContextManager[None], fed: list[list[int]] | None = None
) -> dict[str, Decoded]:
    """All sequences in one batch through the runner: their prompts together, then, within `around`, a decode row of each per step.

    Golden tokens are fed and ties of index scores settled as the reference does; or the tokens of `fed`, with ties to the lower entry.
    """
    runner = llm.engine.runner
    notes: list[list[dict[str, Tensor]]] = [[] for _ in golden]
    with ExitStack() as stack:
        chosen = fed or [g.tensors["decode.tokens"].tolist() for g in golden]
        tokens = [g.ids + c[: STEPS - 1] for c, g in zip(chosen, golden, strict=True)]
        hands = [stack.enter_context(Hand(llm, t, None if fed else len(g.ids))) for t, g in zip(tokens, golden, strict=True)]
        of_prompts: dict[str, list[Tensor]] = {}
        logits = [runner.run([h.row(0, len(g.ids), wants_logits=True) for h, g in zip(hands, golden, strict=True)], of_prompts)[0]]
        lengths = [len(g.ids) for g in golden]
        prompts = {key: torch.cat(parts).split(lengths) for key, parts in of_prompts.items() if key.endswith(".topk")}
        for context in around:
            stack.enter_context(context)
        for step in range(STEPS - 1):
            record: dict[str, list[Tensor]] = {}
            rows = [h.row(len(g.ids) + step, len(g.ids) + step + 1, wants_logits=True) for h, g in zip(hands, golden, strict=True)]
            logits.append(runner.run(rows, record)[0])
            for i in range(len(golden)):
                notes[i].append({key: parts[0][i] for key, parts in record.items() if key.endswith((".topk", ".router_indices"))})
        windows = [runner.windows.data[h.slot].clone() for h in hands]
        return {
            g.name: Decoded(
                g, torch.stack([part[i] for part in logits]), {key: parts[i] for key, parts in prompts.items()}, notes[i],
                hands[i].entries(), windows[i],
            )
            for i, g in enumerate(golden)
        }


@pytest.fixture(scope="module")
def decoded(tiny_a: LLM, sequences: LoadSequence) -> dict[str, Decoded]:
    """With our own sums."""
    return decode(tiny_a, [sequences(name) for name in NAMES])


@pytest.fixture(scope="module")
def decoded_alike(tiny_a: LLM, sequences: LoadSequence, lone_rows: None) -> dict[str, Decoded]:
    """With the reference's sums in decode (its prefill multiplies many rows at once, as ours does)."""
    return decode(tiny_a, [sequences(name) for name in NAMES], reference_sums())


@pytest.mark.parametrize("name", NAMES)
class TestDecodeWithTheReferencesSums:
    """Everything bit for bit."""

    def test_selections_and_experts(self, decoded_alike: dict[str, Decoded], name: str) -> None:
        run, compared = decoded_alike[name], 0
        for key, wanted in run.golden.tensors.items():
            if key.startswith("decode.layer"):
                found = torch.stack([step[key.removeprefix("decode.")] for step in run.notes]).int()
                assert difference(found, wanted) is None, key
                compared += 1
        assert compared == 12 + 5

    def test_logits_and_greedy_tokens(self, decoded_alike: dict[str, Decoded], name: str) -> None:
        run, g = decoded_alike[name], decoded_alike[name].golden.tensors
        assert difference(run.logits, g["decode.logits"]) is None
        assert run.logits.argmax(1).tolist() == g["decode.tokens"].tolist()

    def test_own_index_keys_are_scored(self, decoded_alike: dict[str, Decoded], name: str) -> None:
        """Not the last publisher's: the reference's decode defect (spec §5.5) is not copied."""
        run = decoded_alike[name]
        lists = {layer: [run.golden.tensors[f"{kind}.layer{layer}.topk"] for kind in ("decode", "decode_literal")] for layer in (2, 4)}
        seen = [layer for layer, (right, literal) in lists.items() if not torch.equal(right, literal)]
        for layer in seen:
            found = torch.stack([step[f"layer{layer}.topk"] for step in run.notes]).int()
            assert difference(found, run.golden.tensors[f"decode_literal.layer{layer}.topk"]) is not None
        assert seen or len(run.golden.ids) < 8


@contextmanager
def forced_selection(golden: list[GoldenSequence], kind: str) -> Iterator[None]:
    """In decode steps of all `golden` at once, every indexer gives the lists that the golden files have under `kind`."""
    ours = Indexer.select

    def select(self: Indexer, x: Tensor, latent: Tensor, turn: Turn, state: HalfState) -> Tensor:
        steps = [p - len(g.ids) for p, g in zip(state.rows.positions.tolist(), golden, strict=True)]
        return torch.stack([g.tensors[f"{kind}.layer{self.layer}.topk"][step].long() for g, step in zip(golden, steps, strict=True)])

    Indexer.select = select  # type: ignore[method-assign]
    try:
        yield
    finally:
        Indexer.select = ours  # type: ignore[method-assign]


def test_caches_after_decode(tiny_a: LLM, sequences: LoadSequence, lone_rows: None) -> None:
    """`end.*` was dumped after the decode that has the reference's defect, so its selections are forced: then all caches are equal."""
    golden, dim = [sequences(name) for name in ("T5", "T13", "T96")], tiny_a.config.head_dim
    runs = decode(tiny_a, golden, reference_sums(), forced_selection(golden, "decode_literal"))
    exact = 0
    for name, run in runs.items():
        g = run.golden.tensors
        for source in tiny_a.engine.runner.layout.sources:
            main, keys = g[f"end.layer{source.layer}.main_kv_cache"], g[f"end.layer{source.layer}.index_k_cache"]
            widths = [source.main_codes.row, source.main_scales.row, source.index_codes.row, source.index_scales.row]
            planes = run.entries[source.layer][: len(main)].split(widths, 1)
            assert len(main) == (len(run.golden.ids) + STEPS - 1) // source.ratio
            assert difference(formats.main_decode(planes[0], planes[1]).to(torch.bfloat16), main) is None, (name, source.layer)
            assert difference(formats.index_decode(planes[2], planes[3]).to(torch.bfloat16), keys) is None, (name, source.layer)
        same = torch.equal(run.logits, g["decode_literal.logits"])
        exact += same
        for layer in range(12 if same else 10):  # one rounding of T13 falls differently in the last two layers
            ring = formats.fp8_decode(run.windows[layer, :, :dim], run.windows[layer, :, dim:])
            assert difference(ring.to(torch.bfloat16), g[f"end.layer{layer}.window_kv_cache"]) is None, (name, layer)
    assert exact >= 2


@pytest.mark.parametrize("name", NAMES)
def test_decode_with_our_own_sums(decoded: dict[str, Decoded], same_sums: bool, name: str) -> None:
    run = decoded[name]
    assert_near(run.logits, run.golden.tensors["decode.logits"])
    if same_sums and name in ("T8", "T130"):  # no rounding happens to fall differently
        torch.testing.assert_close(run.logits, run.golden.tensors["decode.logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_scoring_prompt_and_continuation_at_once(tiny_a: LLM, sequences: LoadSequence, name: str) -> None:
    """As near as decode, up to ties that the longer prompt's row width settles otherwise (the golden README's "stepwise" has them too)."""
    g = sequences(name)
    found = tiny_a.score(g.ids + g.tensors["decode.tokens"].tolist()[: STEPS - 1])
    assert_near(found[len(g.ids) - 1 :], g.tensors["decode.logits"])


def steps_alike(a: Decoded, b: Decoded) -> int:
    """How many tokens of two runs come from the same selections, in the prompt and in all steps before."""
    if any(not torch.equal(a.prompt[key], b.prompt[key]) for key in a.prompt):
        return 0
    for step, (x, y) in enumerate(zip(a.notes, b.notes, strict=True)):
        if any(not torch.equal(x[key], y[key]) for key in x if key.endswith(".topk")):
            return step + 1
    return STEPS


def test_greedy_generation(tiny_a: LLM, sequences: LoadSequence, decoded: dict[str, Decoded]) -> None:
    """The tokens of the golden file, all together and one alone, up to the first whose lead over the second is within rounding noise.

    `generate` settles ties of index scores by the lower entry, so that prefixes can be cached, the reference by what topk does; a tie
    changes the selection and with it the tokens. So there are three comparisons. With the reference's rule, by hand, the tokens are the
    golden ones. What is generated is what the runner gives by hand with generate's rule, all of it. And it is golden too as long as the two
    rules chose the same entries: most of T8 at least, which meets its first tie late and is decoded to the last bits on Intel and AMD.
    """
    golden = [sequences(name) for name in NAMES]
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    together = tiny_a.generate([g.ids for g in golden], params)
    ours = decode(tiny_a, golden, fed=[shared.token_ids for shared in together])
    by_hand, generated = 0, {}
    for g, shared in zip(golden, together, strict=True):
        wanted = g.tensors["decode.tokens"].tolist()
        noise = (decoded[g.name].logits - g.tensors["decode.logits"]).square().mean(1).sqrt()
        unclear = (g.tensors["decode.top1_margin"] <= 3 * noise).nonzero().flatten().tolist()
        clear = unclear[0] if unclear else STEPS
        by_hand += clear
        assert decoded[g.name].logits.argmax(1).tolist()[:clear] == wanted[:clear], g.name
        assert shared.token_ids == ours[g.name].logits.argmax(1).tolist(), g.name
        alike = generated[g.name] = min(clear, steps_alike(decoded[g.name], ours[g.name]))
        assert shared.token_ids[:alike] == wanted[:alike], g.name
    assert by_hand >= 100
    assert generated["T8"] >= 16
    alone = tiny_a.generate([golden[4].ids], replace(params, max_tokens=12))[0]
    assert alone.token_ids == together[4].token_ids[:12]
