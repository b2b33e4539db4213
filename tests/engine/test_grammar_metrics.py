"""Numbers of structured output: every grammar and mask is counted once, by what became of it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from engines import Memo, short
from forebay.engine.grammar import choice_spec, json_spec
from forebay.engine.grammar_check import CheckerError, TimeLimitError
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.grammar_metrics import RESULTS
from forebay.engine.metrics import Metrics
from forebay.engine.types import SamplingParams, UnavailableError
from forebay.model.errors import RequestError


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"forebay_grammar_{name}", labels) or 0.0


def test_what_became_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(CollectorRegistry())
    compiler = GrammarCompiler(Memo().engine.tokenizer, metrics=metrics.grammars)
    try:
        for _ in range(3):
            compiler.compile(choice_spec(["yes", "no"], "choice"))  # built once, kept twice
            with pytest.raises(RequestError):
                compiler.compile(json_spec({"enum": []}, "schema"))
        for error, expected in ((TimeLimitError("slow"), RequestError), (CheckerError("gone"), UnavailableError)):
            with monkeypatch.context() as patch:
                for checker in compiler._checkers:
                    patch.setattr(checker, "check", lambda *a, error=error: (_ for _ in ()).throw(error))
                with pytest.raises(expected):
                    compiler.compile(choice_spec([str(error)], "choice"))
        assert [value(metrics, "compiles_total", result=result) for result in RESULTS] == [1, 1, 1, 1]
        assert value(metrics, "compile_seconds_count") == 4
        assert 0 < value(metrics, "compile_seconds_sum") < 60
        assert value(metrics, "kept_bytes") == compiler.store.weight > 0
    finally:
        compiler.close()


def test_masks_are_counted_where_they_are_computed() -> None:
    memo = Memo(4096)
    memo.runner.script = lambda tokens: 2
    compiler = GrammarCompiler(memo.engine.tokenizer, metrics=memo.metrics.grammars)
    try:
        grammar = compiler.compile(choice_spec(["ab cd ef", "xy"], "choice"))
        held = [memo.add(short(8, i), SamplingParams(temperature=1, seed=i, max_tokens=60), grammar=grammar) for i in range(3)]
        free = memo.add(short(8, 9), SamplingParams(temperature=0, max_tokens=30))
        memo.finish()
    finally:
        compiler.close()
    # One mask a token, the last one's aside where the grammar was complete: then only the end is left, and no mask is needed.
    tokens = sum(len(memo.tokens(request_id)) - 1 for request_id in held)
    assert memo.value("grammar_mask_seconds_count") == tokens
    assert len(memo.tokens(free)) == 30
    assert 0 < memo.value("grammar_mask_seconds_sum") < 60
    assert memo.value("grammar_mask_wait_seconds_total") == pytest.approx(memo.engine.chooser.masks.waited_s, abs=0.01)
    assert memo.value("grammar_masks_late_total") == 0


def test_late_choices_are_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.grammars.waited(0.25, 2)
    metrics.grammars.waited(-1.0, 0)
    assert value(metrics, "masks_late_total") == 2
    assert value(metrics, "mask_wait_seconds_total") == 0.25
