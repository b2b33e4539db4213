"""`LLM.chat`: chat requests without a server, with pictures as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engines import assert_idle, greedy, seeing, tiny
from forebay.engine.llm import LLM
from forebay.engine.types import SamplingParams
from forebay.model.errors import ConfigError, RequestError

ONE, TWO = (np.random.default_rng(number).integers(0, 256, (84, 84, 3), dtype=np.uint8) for number in (1, 2))
WIDE = np.random.default_rng(3).integers(0, 256, (200, 2000, 3), dtype=np.uint8)


def body(*parts: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "thinking": False, **more}


IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return seeing(chat=True)


def test_pictures_decide_what_is_said(llm: LLM) -> None:
    ask = body("Look:", IMAGE, "and", IMAGE)
    first, again, turned = (llm.chat(ask, greedy(6), images)[0] for images in ((ONE, TWO), (ONE, TWO), (TWO, ONE)))
    assert first.prompt_ids == again.prompt_ids == turned.prompt_ids
    assert first.prompt_ids.count(4087) == 2 * 8
    assert again.tiers.cached > 0
    assert turned.tiers.cached == 0 and turned.token_ids != first.token_ids
    assert_idle(llm.engine)


def test_choices_tools_and_detail(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    outputs = llm.chat(body(IMAGE, tools=[tool]), SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True), [ONE])
    assert len(outputs) == 3 and len({tuple(output.token_ids) for output in outputs}) > 1
    lengths = [
        llm.chat(body({"type": "image_url", "image_url": {"url": "", "detail": detail}}), greedy(1), [WIDE])[0].prompt_ids.count(4087)
        for detail in ("high", "low", "auto")
    ]
    assert lengths == [44, 30, 44]
    assert llm.chat(body("No picture"), greedy(2))[0].usage.completion_tokens == 2


def test_what_is_refused(llm: LLM) -> None:
    for images in ([], [ONE, TWO]):
        with pytest.raises(RequestError, match=f"{len(images)} images for 1 image parts") as caught:
            llm.chat(body(IMAGE), greedy(1), images)
        assert caught.value.param == "images"
    with pytest.raises(RequestError, match="no content"):
        llm.chat(body(IMAGE), greedy(1), [ONE[:, :0]])
    with pytest.raises(RequestError, match="uint8"):
        llm.chat(body(IMAGE), greedy(1), [ONE.astype(np.float32)])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="maximum context length"):
        llm.chat(body(*[IMAGE] * 120), greedy(1), [WIDE] * 120)
    with pytest.raises(ConfigError, match="without chat=True"):
        tiny().chat(body("Hi"))
    with pytest.raises(RequestError, match="which sees none"):
        tiny(chat=True).chat(body(IMAGE), greedy(1), [ONE])
