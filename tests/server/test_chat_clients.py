"""LiteLLM and LangChain as they are installed, pointed at a running server: their own parsing is the assertion."""

from __future__ import annotations

import importlib
import json
from typing import Any

import langchain_openai
import pytest
from langchain_core import messages

from script_engine import Served

CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look", "description": "Look.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
# Of the libraries' own use of pydantic.
pytestmark = [pytest.mark.filterwarnings("ignore:Items? '"), pytest.mark.filterwarnings("ignore:Accessing the 'model_")]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its price list is fetched otherwise
        return importlib.import_module("litellm")


@pytest.fixture
def ask(litellm: Any, served: Served) -> Any:
    """`litellm.completion` against the server, through its generic provider and through its DeepSeek one."""

    def completion(provider: str, **fields: Any) -> Any:
        base = served.url if provider == "deepseek" else f"{served.url}/v1"
        return litellm.completion(model=f"{provider}/script", api_base=base, api_key="none", num_retries=0, **{"messages": HI, **fields})

    return completion


PROVIDERS = ["hosted_vllm", "openai", "deepseek"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_whole(ask: Any, served: Served, provider: str) -> None:
    served.engine.say("I think.</think>An answer.")
    answer = ask(provider, temperature=0.2, max_tokens=50)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, answer.choices[0].finish_reason) == ("An answer.", "I think.", "stop")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(served.engine.ids("I think."))
    assert answer.usage.prompt_tokens == len(served.engine.requests[-1].prompt_ids)
    assert served.engine.requests[-1].params.max_tokens == 50


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_stream_adds_up(litellm: Any, ask: Any, served: Served, provider: str) -> None:
    served.engine.say("I think.</think>An answer of 🙂 more tokens.")
    served.engine.cached = 5
    chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
    answer = litellm.stream_chunk_builder(chunks, messages=HI)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("An answer of 🙂 more tokens.", "I think.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.usage.completion_tokens == len(served.engine.ids("I think.</think>An answer of 🙂 more tokens.")) + 1


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_tools_round_trip(litellm: Any, ask: Any, served: Served, provider: str, stream: bool) -> None:
    served.engine.say("Look there.</think>" + CALL)
    answer = ask(provider, tools=[LOOK], tool_choice="auto", stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=HI)
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"city": "Oslo"})
    served.engine.say("</think>It rains.")
    history = [*HI, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert ask(provider, messages=history, tools=[LOOK]).choices[0].message.content == "It rains."
    prompt = served.engine.text()
    assert "<think>Look there.</think>" in prompt
    assert "<tool_result>rain</tool_result>" in prompt


def test_litellm_errors_are_its_own(litellm: Any, ask: Any, served: Served) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask("openai", temperature=3)
    served.engine.max_context = 5
    with pytest.raises(litellm.ContextWindowExceededError):
        ask("openai")


# ---- LangChain


@pytest.fixture
def chat(served: Served) -> Any:
    return langchain_openai.ChatOpenAI(model="script", base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=20)


def test_langchain_whole_and_stream(chat: Any, served: Served) -> None:
    served.engine.say("I think.</think>An answer of more tokens.")
    served.engine.cached = 4
    whole = chat.invoke("Hi")
    assert whole.content == "An answer of more tokens."
    assert whole.response_metadata["finish_reason"] == "stop"
    sampled = len(served.engine.ids("I think.</think>An answer of more tokens.")) + 1
    assert (whole.usage_metadata["output_tokens"], whole.usage_metadata["input_token_details"]["cache_read"]) == (sampled, 4)
    assert whole.usage_metadata["output_token_details"]["reasoning"] == len(served.engine.ids("I think."))
    chunks = list(chat.stream("Hi", stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata
    assert len(chunks) > 3


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_tools_round_trip(chat: Any, served: Served, stream: bool) -> None:
    served.engine.say("Look there.</think>Wait.\n\n" + CALL)
    bound = chat.bind_tools([LOOK], tool_choice="required", parallel_tool_calls=False)
    if stream:
        pieces = list(bound.stream("Hi"))
        answer = pieces[0]
        for piece in pieces[1:]:
            answer += piece
    else:
        answer = bound.invoke("Hi")
    assert answer.content == "Wait."
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("look", {"city": "Oslo"})
    assert not answer.invalid_tool_calls
    served.engine.say("</think>It rains.")
    history = [messages.HumanMessage("Hi"), answer, messages.ToolMessage("rain", tool_call_id=call["id"])]
    assert bound.invoke(history).content == "It rains."
    prompt = served.engine.text()
    assert "<tool_result>rain</tool_result>" in prompt


def test_langchain_structured_output(chat: Any, served: Served) -> None:
    schema = {**LOOK["function"]["parameters"], "title": "Place", "additionalProperties": False}
    served.engine.say('A city.</think>{"city": "Oslo"}')
    assert chat.with_structured_output(schema, method="json_schema").invoke("Hi") == {"city": "Oslo"}
    served.engine.say("A city.</think>" + CALL.replace("look", "Place"))
    assert chat.with_structured_output(schema, method="function_calling").invoke("Hi") == {"city": "Oslo"}
