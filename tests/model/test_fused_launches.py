"""How many kernels a layer of the fused network launches, counted without a GPU: Triton's by their launches, torch's by what computes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines import tiny_checkpoint
from forebay.engine.fused_runner import FusedRunner
from forebay.engine.llm import LLM
from forebay.model.fused.network import FusedBackbone
from forebay.model.source import resolve
from forwards import Hand, step

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="it counts what the interpreter launches"),
]

FREE = {"detach", "view", "slice", "select", "split", "split_with_sizes", "empty", "empty_like", "t", "transpose", "unbind"}


class Launches(TorchDispatchMode):
    """Names of all kernels while it is active, without what Triton's interpreter does itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from triton.runtime import interpreter

        self.names: list[str] = []
        self.inside = False
        launch = interpreter.GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(executor.fn.__name__)
            self.inside = True
            launch(executor, *args, **kwargs)
            self.inside = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not self.inside and name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_kernels_of_a_reusing_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows: 11, whether each is its sequence's only one or not."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backbone = FusedBackbone(resolve(str(tiny_checkpoint())).open(), device="cpu")
    launches, reusing = Launches(monkeypatch), list[str]()
    plain = backbone._layer

    def layer(number: int, *args: Any) -> Any:
        before = len(launches.names)
        result = plain(number, *args)
        if backbone.layers[number].plan.role == "reuse":
            reusing.extend(launches.names[before:])
        return result

    monkeypatch.setattr(backbone, "_layer", layer)
    with LLM(str(tiny_checkpoint()), max_sequences=8, decoder_tokens=64, kv_tokens=2048) as llm, Hand(llm, list(range(100, 120))) as hand:
        runner = llm.engine.runner
        llm.engine.runner = FusedRunner(backbone, runner.blocks, runner.windows, max_tokens=256, buckets=(1,))
        for start, stop in ((0, 2), (2, 3)):
            reusing.clear()
            with launches:
                step(llm, [hand.row(start, stop, wants_logits=True)])
            assert 0 < len(reusing) <= 11, reusing
