"""The engine without HTTP: generate, score, trace, and what errors leave behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from engines import WINDOW, assert_idle, fresh, greedy, prompt, same, tiny, tiny_checkpoint
from forebay.engine.llm import LLM
from forebay.engine.options import EngineOptions
from forebay.engine.types import EngineError, SamplingParams
from forebay.model.errors import ConfigError, RequestError
from forwards import Hand


def test_text_ids_and_lists_of_either() -> None:
    llm = fresh(tiny())
    ids = llm.tokenizer.encode_special("Hello there")
    by_text = llm.generate("Hello there", greedy(4))
    by_ids = llm.generate(ids, greedy(4))
    both = llm.generate(["Hello there", "Hello there"], [greedy(4), greedy(2)])
    assert [o.prompt_ids for o in (*by_text, *by_ids, *both)] == [ids] * 4
    assert by_text[0].token_ids == by_ids[0].token_ids == both[0].token_ids
    assert both[1].token_ids == both[0].token_ids[:2]
    assert by_text[0].text == llm.tokenizer.decode(by_text[0].token_ids)


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first() -> None:
    llm = fresh(tiny())
    prompts = [prompt(5 + i, i) for i in range(5)]
    outputs = llm.generate(prompts, [greedy(9 - 2 * i) for i in range(5)])
    assert [o.prompt_ids for o in outputs] == prompts
    assert [len(o.token_ids) for o in outputs] == [9, 7, 5, 3, 1]
    assert [o.usage.completion_tokens for o in outputs] == [9, 7, 5, 3, 1]


def test_repr_of_an_output_does_not_grow_with_it() -> None:
    llm = fresh(tiny())
    (output,) = llm.generate([prompt(200)], greedy(9, logprobs=3, prompt_logprobs=1))
    text = repr(output)
    assert "_ids" not in text and "logprobs" not in text
    assert "prompt_tokens=200" in text and "completion_tokens=9" in text
    assert len(text) < 1000


def test_more_prompts_than_the_queue_holds() -> None:
    llm = fresh(tiny("bounded", max_queued_requests=2, max_sequences=2))
    assert [len(o.token_ids) for o in llm.generate([prompt(4, i) for i in range(9)], greedy(2))] == [2] * 9


def test_n_choices_have_seeds_of_their_own() -> None:
    llm = fresh(tiny())
    params = SamplingParams(temperature=1.0, seed=2**63 - 2, max_tokens=6, ignore_eos=True, n=3)
    outputs = llm.generate([prompt(6), prompt(9)], params)
    assert [o.prompt_ids for o in outputs] == [prompt(6)] * 3 + [prompt(9)] * 3
    assert len({tuple(o.token_ids) for o in outputs[:3]}) == 3
    second = llm.generate(prompt(6), SamplingParams(temperature=1.0, seed=2**63 - 1, max_tokens=6, ignore_eos=True))
    third = llm.generate(prompt(6), SamplingParams(temperature=1.0, seed=-(2**63), max_tokens=6, ignore_eos=True))
    assert [o.token_ids for o in outputs[1:3]] == [second[0].token_ids, third[0].token_ids]


def test_without_a_seed_answers_differ() -> None:
    llm = fresh(tiny())
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    assert len({tuple(o.token_ids) for o in llm.generate([prompt(6)] * 4, params)}) == 4


def test_logit_bias_and_allowed_ids_reach_the_sampler() -> None:
    llm = fresh(tiny())
    plain, biased, allowed = llm.generate(
        [prompt(6)] * 3, [greedy(3), greedy(3, logit_bias={77: 100.0}), greedy(3, allowed_token_ids=(70, 71))]
    )
    assert 77 not in plain.token_ids
    assert biased.token_ids == [77, 77, 77]
    assert set(allowed.token_ids) <= {70, 71}


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_exact_logits(temperature: float) -> None:
    """Of one forward pass over prompt and output."""
    llm = fresh(tiny("exact"))
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=5, ignore_eos=True, logprobs=3, logit_bias={90: 2.0})
    (output,) = llm.generate(prompt(19), params)
    everything = output.prompt_ids + output.token_ids
    with Hand(llm, everything) as hand:
        table = hand.feed(0, len(everything)).log_softmax(-1)
    assert output.logprobs is not None
    for place, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = table[18 + place]
        assert (entry.token_id, entry.logprob) == (token, row[token].item())
        assert [value for _, value in entry.top] == row.topk(3).values.tolist()


def test_prompt_logprobs_are_exact_and_do_not_depend_on_the_generation() -> None:
    """Also where bounded prefill is the rule, in chunks, beside others, and for prompts longer than what is scored at once."""
    llm = fresh(tiny("bounded", encoder_tokens=33))
    ids = prompt(100)
    with Hand(llm, ids) as hand:
        table = hand.feed(0, 100).log_softmax(-1)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=7, ignore_eos=True, prompt_logprobs=2)
    greedy_one, drawn, _ = llm.generate([ids, ids, prompt(40, 2)], [greedy(1, prompt_logprobs=2), sampled, greedy(9)])
    assert greedy_one.prompt_logprobs == drawn.prompt_logprobs
    found = greedy_one.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == 100
    for place, entry in enumerate(found[1:], 1):
        assert entry is not None
        assert (entry.token_id, entry.logprob) == (ids[place], table[place - 1, ids[place]].item())
        assert [value for _, value in entry.top] == table[place - 1].topk(2).values.tolist()
    assert greedy_one.tiers.hbm == drawn.tiers.hbm == 0


def test_scoring_a_prompt_of_one_token() -> None:
    (output,) = fresh(tiny()).generate([[70]], greedy(2, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


# Score and trace


def test_score_leaves_nothing_and_takes_nothing() -> None:
    llm = fresh(tiny("bounded", encoder_tokens=33))
    ids = prompt(50, 3)
    first = llm.score(ids)
    assert first.shape == (50, llm.engine.vocab_size)
    assert first.dtype == torch.float32
    assert llm.engine.manager.stats().indexed == 0
    llm.generate(ids, greedy(2))
    assert torch.equal(llm.score(ids), first)
    assert_idle(llm.engine)


def test_trace_names_what_it_documents() -> None:
    llm = fresh(tiny())
    ids, config = prompt(21, 4), llm.config
    found = llm.trace(ids)
    width, streams = config.hidden_size, config.hc_mult
    shapes = {
        "logits": (21, config.vocab_size),
        "encoder.out_h": (21, streams, width),
        "encoder.out_pre_mix": (21, streams),
        "encoder.collapsed": (21, width),
        "encoder.decoder_attn_in": (21, width),
        "layer0.topk": (21, config.index_topk),
        "layer1.router_indices": (21, config.num_experts_per_tok),
        "layer1.engram_rows": (21, config.engram_columns),
        "layer0.main_kv": (10, config.head_dim),
        "layer2.main_kv": (21, config.head_dim),
        "layer2.index_k": (21, config.index_head_dim),
    }
    assert {name: tuple(found[name].shape) for name in shapes} == shapes
    assert torch.equal(found["logits"], llm.score(ids))
    assert torch.equal(found["encoder.decoder_attn_in"], found["layer2.attn_in"])


def test_score_and_trace_refuse_what_does_not_fit() -> None:
    llm = fresh(tiny("bounded", max_context=40))
    for call in (llm.score, llm.trace):
        with pytest.raises(RequestError) as error:
            call(prompt(41))
        assert error.value.param == "token_ids"
        with pytest.raises(RequestError):
            call([5000])
        with pytest.raises(RequestError):
            call([])
    assert_idle(llm.engine)


# Errors


def test_one_bad_request_runs_none() -> None:
    llm = fresh(tiny("bounded", max_context=40))
    steps = llm.engine.metrics.registry.get_sample_value("forebay_step_tokens_total")
    for prompts, params, field in (
        ([prompt(5), prompt(40)], greedy(3), "prompt"),
        ([prompt(5), []], greedy(3), "prompt"),
        ([prompt(5), prompt(6)], [greedy(3), greedy(3, stop_token_ids=(5000,))], "stop_token_ids"),
        ([prompt(5), prompt(6)], [greedy(3)], "params"),
        ([], greedy(3), "prompts"),
    ):
        with pytest.raises(RequestError) as error:
            llm.generate(prompts, params)
        assert error.value.param == field
        assert_idle(llm.engine)
    assert llm.engine.metrics.registry.get_sample_value("forebay_step_tokens_total") == steps


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_broken_step_the_engine_is_as_new(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fresh(tiny())
    (before,) = llm.generate(prompt(9), greedy(4))
    fresh(llm)
    runner = llm.engine.runner
    run, calls = runner.run, []

    def breaks(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise error
        return run(*args)

    monkeypatch.setattr(runner, "run", breaks)
    with pytest.raises(error):
        llm.generate([prompt(9), prompt(70, 1), prompt(6, 2)], greedy(40))
    assert_idle(llm.engine)
    monkeypatch.undo()
    fresh(llm)
    same(llm.generate(prompt(9), greedy(4))[0], before)


def test_a_request_that_fails_alone_is_raised() -> None:
    llm = fresh(tiny())
    head = llm.engine.runner.backbone.logits
    llm.engine.runner.backbone.logits = lambda hidden: head(hidden) + torch.nan
    try:
        with pytest.raises(EngineError, match="not finite"):
            llm.generate(prompt(9), greedy(4))
    finally:
        del llm.engine.runner.backbone.logits
    assert_idle(llm.engine)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny_checkpoint()), max_sequence=4)
    assert error.value.param == "max_sequence"
    with pytest.raises(ConfigError):
        LLM(str(tiny_checkpoint()), prefill="fast")


def test_a_model_that_is_let_go_is_freed() -> None:
    """With its weights and pools: programs load one model after another."""
    llm = LLM(str(tiny_checkpoint()), max_sequences=2, kv_tokens=64)
    llm.generate(prompt(WINDOW), greedy(2))
    alive = [weakref.ref(part) for part in (llm.engine, llm.engine.runner.backbone, llm.engine.runner.blocks.data)]
    del llm
    gc.collect()
    assert [part() for part in alive] == [None] * 3


def test_prompts_may_be_arrays_and_nothing_else_that_is_not_ids() -> None:
    llm, params = fresh(tiny()), greedy(3)
    expected = llm.generate(prompt(20), params)[0].token_ids
    for form in (np.array(prompt(20)), torch.tensor(prompt(20)), [np.array(prompt(20))], [[np.int64(i) for i in prompt(20)]]):
        assert fresh(llm).generate(form, params)[0].token_ids == expected  # without the cache: a resume by replay is an approximation
    for junk in ([[1.5, 2.0]], [[True]], [None], [[["a"]]]):
        with pytest.raises(RequestError, match="prompts"):
            llm.generate(junk, params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", None), ("temperature", float("nan")), ("temperature", True), ("top_k", 1.5), ("seed", 1.5),
        ("max_tokens", 1.5), ("max_tokens", 0), ("logprobs", True), ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("stop", [""]),
        ("stop", 5), ("stop_token_ids", 7), ("ignore_eos", 1), ("n", 0), ("min_tokens", -1),
    ],
)  # fmt: skip
def test_sampling_params_name_the_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)


@pytest.mark.parametrize(("name", "value"), [("max_sequences", "x"), ("encoder_tokens", 1.5), ("prefix_reuse", 1), ("kv_tokens", True)])
def test_engine_options_name_the_field(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions(**{name: value})
    assert caught.value.param == name


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="device must be 'cpu' or 'cuda'"):
        LLM(str(tiny_checkpoint()), device="tpu")


@pytest.mark.parametrize("junk", [None, {}, {"a": 1}, b"abc", "\ud800", ["\ud800"], 5, []])
def test_prompts_of_other_kinds_are_refused(junk: object) -> None:
    with pytest.raises(RequestError):
        tiny().generate(junk, greedy(2))


@pytest.mark.parametrize("junk", ["abc", [1.5], None, [[1]], []])
def test_scores_of_other_kinds_are_refused(junk: object) -> None:
    with pytest.raises(RequestError) as caught:
        tiny().score(junk)
    assert caught.value.param == "token_ids"


def test_parameters_of_other_kinds_are_refused() -> None:
    for junk in (5, {"max_tokens": 3}, [None]):
        with pytest.raises(RequestError, match="params"):
            tiny().generate([[5, 6]], junk)
