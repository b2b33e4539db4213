"""Chat completions through the official client: whole answers, choices, usage, reasoning controls, histories."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from forebay.engine.types import OutputEvent, TierCounts, Times
from forebay.model.chat import EncodedPrompt, ParseOptions
from forebay.server.chunks import Choice, explain
from forebay.server.config import load
from forebay.server.limits import ServerOptions
from script_engine import Script, Served, serve

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PLAIN = {"thinking": {"type": "disabled"}}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def reasoning_tokens(answer: ChatCompletion) -> int | None:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.usage.completion_tokens_details.reasoning_tokens


@pytest.fixture(scope="module")
def options() -> ServerOptions:
    return ServerOptions(aliases=("other-name", "deepseek-chat"))


def test_whole_answer_has_every_field(served: Served, client: openai.OpenAI) -> None:
    served.engine.say("I think.</think>An answer.")
    served.engine.cached = 7
    answer = client.chat.completions.create(model="script", messages=HI, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "An answer.", "stop")
    assert choice.message.reasoning_content == "I think."
    assert choice.message.tool_calls is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "script"
    assert (answer.system_fingerprint or "").startswith("fp_")
    request = served.engine.requests[0]
    prompt = len(request.prompt_ids)
    sampled = len(served.engine.ids("I think.</think>An answer.")) + 1
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, sampled, prompt + sampled)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 7
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(served.engine.ids("I think."))
    assert (usage.prompt_cache_hit_tokens, usage.prompt_cache_miss_tokens) == (7, prompt - 7)


def test_model_names_and_aliases(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["script", "other-name", "deepseek-chat"]
    assert client.models.retrieve("other-name").id == "other-name"
    assert client.chat.completions.create(model="other-name", messages=HI).model == "other-name"
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-nothing", messages=HI)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert "script" in error.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-nothing")


def test_alias_that_fixes_the_mode_yields_to_the_request(served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="deepseek-chat", messages=HI)
    client.chat.completions.create(model="deepseek-chat", messages=HI, reasoning_effort="low")
    client.chat.completions.create(model="deepseek-chat", messages=HI, extra_body={"thinking": {"type": "enabled"}})
    assert [r.prompt.thinking for r in served.engine.requests if r.prompt] == [False, False, True]


def test_a_request_without_model_takes_the_served_one(served: Served, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="", messages=HI).model == "script"


def test_async_client_streams_many_at_once(served: Served) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(text: str) -> str:
                stream = await client.chat.completions.create(model="script", messages=[{"role": "user", "content": text}], stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(f"number {i}") for i in range(32)))

    def echo(request: Any) -> Script:
        number = served.engine.tokenizer.decode(request.prompt_ids).partition("number ")[2][:2].strip("<")
        return Script([*served.engine.ids(f"</think>{number}"), served.engine.tokenizer.eos_id])

    served.engine.answer = echo
    answers = asyncio.run(run())
    assert [int(text) for text in answers] == list(range(32))


def test_choices_share_the_prompt_and_count_it_once(served: Served, client: openai.OpenAI) -> None:
    texts = ["one", "two words", "three words here"]
    served.engine.answer = lambda request: Script([*served.engine.ids(texts[request.params.seed - 5]), served.engine.tokenizer.eos_id])
    answer = client.chat.completions.create(model="script", messages=HI, n=3, seed=5, extra_body=PLAIN)
    assert [(c.index, c.message.content) for c in answer.choices] == list(enumerate(texts))
    prompt = len(served.engine.requests[0].prompt_ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == sum(len(served.engine.ids(text)) + 1 for text in texts)
    assert len({r.request_id for r in served.engine.requests}) == 3

    streamed = dict.fromkeys(range(3), "")
    finishes = []
    for chunk in client.chat.completions.create(model="script", messages=HI, n=3, seed=5, stream=True, extra_body=PLAIN):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes.append(choice.index)
    assert list(streamed.values()) == texts
    assert sorted(finishes) == [0, 1, 2]


@pytest.mark.parametrize("raises", [False, True])
def test_one_failing_choice_fails_the_request(served: Served, client: openai.OpenAI, raises: bool) -> None:
    tokens = served.engine.ids("word " * 50)

    def answer(request: Any) -> Script:
        return Script(tokens, delay_s=0.001, fail_at=3 if request.params.seed == 1 else None, raises=raises)

    served.engine.answer = answer
    with pytest.raises(openai.InternalServerError) as error:
        client.chat.completions.create(model="script", messages=HI, n=2, seed=0)
    assert "device on fire" not in error.value.message
    served.wait(lambda: not served.engine.running)
    assert len(served.engine.aborted) == 1 + raises  # the other one, and the one that raised


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 65_536 - 100), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6, "max_tokens": 5}, 6), ({"max_tokens": 10**9}, 65_536 - 100),
     ({"thinking": {"type": "disabled"}}, 8_192), ({"reasoning_effort": 100}, 65_536 - 100), ({"max_tokens": 7.0}, 7)],
)  # fmt: skip
def test_output_limit(served: Served, client: openai.OpenAI, fields: dict[str, Any], limit: int) -> None:
    client.chat.completions.create(model="script", messages=HI, extra_body=fields)
    request = served.engine.requests[0]
    room = 65_536 - len(request.prompt_ids)
    assert request.params.max_tokens == (room if limit > 60_000 else limit)


def test_default_output_limit_by_mode() -> None:
    options = ServerOptions()
    assert options.default_output(thinking=True, effort=75) == 65_536
    assert options.default_output(thinking=True, effort=100) == 131_072
    assert options.default_output(thinking=False, effort=None) == 8_192


def test_context_overflow_has_the_sentence_that_agents_look_for(served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="script", messages=HI)
    length = len(served.engine.requests[0].prompt_ids)
    served.engine.max_context = length + 1
    client.chat.completions.create(model="script", messages=HI)
    assert served.engine.requests[-1].params.max_tokens == 1
    served.engine.max_context = length
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="script", messages=HI, max_tokens=50)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    assert (
        f"This model's maximum context length is {length} tokens. However, you requested {length + 50} tokens ({length} in the messages, "
        "50 in the completion). Please reduce the length of the messages or completion." in error.value.message
    )


@pytest.mark.case("B060")
@pytest.mark.parametrize(
    ("effort", "number"),
    [("low", 50), ("high", 75), ("max", 100), ("minimal", 50), ("medium", 75), ("xhigh", 75), ("HIGH", 75), ("33", 33),
     (1, 1), (25, 25), (50, 50), (75, 75), (99, 99), (100, 100)],
)  # fmt: skip
def test_effort_values(served: Served, client: openai.OpenAI, effort: Any, number: int) -> None:
    raw = client.chat.completions.with_raw_response.create(model="script", messages=HI, reasoning_effort=effort)
    prompt = served.engine.text(0)
    assert f"Reasoning Effort: {number} (range 1-100" in prompt
    assert raw.headers["x-forebay-effort"] == str(number)


@pytest.mark.case("B060")
@pytest.mark.parametrize("effort", [0, 101, 1.5, -1, True, "", "hihg", [], {}])
def test_effort_values_refused(client: openai.OpenAI, effort: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="script", messages=HI, extra_body={"reasoning_effort": effort})
    assert error.value.param == "reasoning_effort"


@pytest.mark.case("B061")
def test_default_effort_is_the_operators_and_the_switch_the_callers(served: Served) -> None:
    with serve(served.engine, ServerOptions(default_effort=33)) as other, other.client() as client:
        create = client.chat.completions.with_raw_response.create
        efforts = [
            create(model="script", messages=HI).headers["x-forebay-effort"],
            create(model="script", messages=HI, reasoning_effort=1).headers["x-forebay-effort"],
            create(model="script", messages=HI, extra_body=PLAIN).headers["x-forebay-effort"],
            create(model="script", messages=HI, reasoning_effort="none").headers["x-forebay-effort"],
        ]
        assert efforts == ["33", "1", "off", "off"]
        served.engine.say("Thought.</think>Said.")
        answer = client.chat.completions.create(model="script", messages=HI, extra_body={"forebay": {"explain": True}})
        assert answer.forebay["effort"] == 33
        assert reasoning_tokens(answer) == len(served.engine.ids("Thought."))
    with serve(served.engine, ServerOptions(thinking_default=False)) as other, other.client() as client:
        client.chat.completions.create(model="script", messages=HI)
        prompt = served.engine.requests[-1].prompt
        assert prompt is not None
        assert not prompt.thinking


def test_explain_tells_where_the_prompt_came_from(served: Served, client: openai.OpenAI) -> None:
    served.engine.cached = 4
    explain = {"forebay": {"explain": True}}
    told = client.chat.completions.create(model="script", messages=HI, extra_body=explain).forebay
    prompt = len(served.engine.requests[0].prompt_ids)
    assert told["tiers"] == {"hbm": 4, "ssd": 0, "compute": prompt - 4}
    assert (told["window"], told["replayed"], told["preemptions"], told["effort"]) == ("none", 0, 0, 75)
    assert (told["lineage"], told["restore_s"]) == (0, 0.0)
    assert 0 <= told["queue_s"] <= told["ttft_s"] <= told["total_s"]
    several = client.chat.completions.create(model="script", messages=HI, n=2, extra_body=explain).forebay
    assert len(several["choices"]) == 2
    chunks = list(client.chat.completions.create(model="script", messages=HI, stream=True, extra_body=explain))
    assert chunks[-1].forebay["tiers"]["hbm"] == 4
    assert not hasattr(client.chat.completions.create(model="script", messages=HI), "forebay")


def test_explain_of_choices_that_came_from_several_tiers() -> None:
    """The choice that computed the prompt stands at the top; the one that shares its blocks is told beside it."""
    payer = TierCounts(hbm=256, ssd=512, compute=232, window="replay", replayed=128, lineage=2, restore_s=0.0123456789)
    sharer = TierCounts(hbm=1000, window="live", lineage=2)
    choices = [
        Choice(i, last=OutputEvent(f"r{i}", [], [], finish_reason="stop", tiers=tiers, times=Times(1.0, 1.5, 2.0, 2.5, 3.0)))
        for i, tiers in enumerate((sharer, payer))
    ]
    prompt = EncodedPrompt([0] * 1000, "", False, None, "content", ParseOptions(), False)
    told = explain(prompt, choices)
    top = {
        "tiers": {"hbm": 256, "ssd": 512, "compute": 232}, "window": "replay", "replayed": 128, "lineage": 2, "restore_s": 0.012346,
        "queue_s": 0.5, "ttft_s": 1.0, "total_s": 2.0, "preemptions": 0,
    }  # fmt: skip
    other = {**top, "tiers": {"hbm": 1000, "ssd": 0, "compute": 0}, "window": "live", "replayed": 0, "restore_s": 0.0}
    assert told == {"thinking": False, "effort": None, **top, "choices": [other, top]}


def test_include_reasoning_false_hides_but_counts(served: Served, client: openai.OpenAI) -> None:
    served.engine.say("secret</think>open")
    for extra in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        answer = client.chat.completions.create(model="script", messages=HI, extra_body=extra)
        assert not hasattr(answer.choices[0].message, "reasoning_content")
        assert reasoning_tokens(answer)
        chunks = client.chat.completions.create(model="script", messages=HI, stream=True, extra_body=extra)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "open"
        assert not any(hasattr(delta, "reasoning_content") for delta in deltas)


@pytest.mark.case("B062")
@pytest.mark.parametrize("reasoning", [{"reasoning_content": "I should look."}, {}, {"reasoning_content": None}, {"reasoning_content": ""}])
def test_reasoning_comes_back_in_histories(served: Served, client: openai.OpenAI, reasoning: dict[str, Any]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
    history: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], **reasoning},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    client.chat.completions.create(model="script", messages=history, tools=[LOOK])
    prompt = served.engine.text(0)
    assert f"<think>{reasoning.get('reasoning_content') or ''}</think>" in prompt
    assert "<tool_result>rain</tool_result>" in prompt


@pytest.mark.case("B071")
def test_empty_contents_of_call_turns_render_alike(served: Served, client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
        history: Any = [*HI, {"role": "assistant", "tool_calls": [call], **content}, result]
        client.chat.completions.create(model="script", messages=history, tools=[LOOK])
    assert len({tuple(r.prompt_ids) for r in served.engine.requests}) == 1
    client.chat.completions.create(model="script", messages=[*HI, {"role": "assistant", "content": ""}, *HI])
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="script", messages=[*HI, {"role": "user", "content": None}])
    assert error.value.param == "messages[1].content"


@pytest.mark.case("B073")
def test_developer_is_system_level_text(served: Served, client: openai.OpenAI) -> None:
    for place in (0, 1, 2):
        for role in ("developer", "system"):
            history: Any = [{"role": "system", "content": "Base."}, *HI, {"role": "assistant", "content": "Yes?"}, *HI]
            history.insert(place, {"role": role, "content": "Be brief."})
            client.chat.completions.create(model="script", messages=history)
    texts = [served.engine.text(i) for i in range(len(served.engine.requests))]
    assert texts[0::2] == texts[1::2]
    assert all("Be brief." in text for text in texts)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="script", messages=[*HI, {"role": "wizard", "content": "x"}])
    assert error.value.param == "messages[1].role"


def _collected(client: openai.OpenAI, **fields: Any) -> tuple[Any, Any, str | None]:
    """(content, calls, finish reason) of a stream."""
    content, calls, finish = "", {}, None
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                entry = calls.setdefault(call.index, {"name": call.function.name, "arguments": ""})
                entry["arguments"] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return content, [calls[i] for i in sorted(calls)], finish


@pytest.mark.case("B074")
@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("said", ["Sunny.", CALL, "Let me see.\n\n" + CALL + CALL])
@pytest.mark.parametrize("limit", [None, 12])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
def test_finish_reason_agrees_with_the_message(
    served: Served, client: openai.OpenAI, choice: Any, said: str, limit: int | None, parallel: bool, thinking: bool
) -> None:
    # A forced call without thinking starts inside the block of calls, which the prompt has opened.
    forced = choice not in ("none", "auto") and not thinking
    served.engine.say(("Hm.</think>" if thinking else "") + (said.partition("calls>")[2] if forced and CALL in said else said))
    fields: dict[str, Any] = {
        "model": "script", "messages": HI, "tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": parallel,
        "extra_body": {"thinking": {"type": "enabled" if thinking else "disabled"}}, **({"max_tokens": limit} if limit else {}),
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0]
    calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls or ()]
    assert (whole.message.content or "", calls, whole.finish_reason) == _collected(client, **fields)
    assert whole.message.tool_calls != []
    if whole.finish_reason == "tool_calls":
        assert calls
        assert all(json.loads(call["arguments"]) == {"city": "Oslo"} for call in calls)
    elif whole.finish_reason == "stop":
        assert not calls
    if limit is None:
        assert whole.finish_reason == ("tool_calls" if calls else "stop")
    if not parallel:
        assert len(calls) <= 1
    if choice == "none":
        assert not calls


def test_request_fields_reach_the_engine(served: Served, client: openai.OpenAI) -> None:
    body = {
        "temperature": 0.5, "top_p": 0.4, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2, "presence_penalty": -0.3,
        "repetition_penalty": 1.1, "logit_bias": {"5": -100, "6": 3.5}, "seed": -4, "max_tokens": 9, "min_tokens": 2,
        "stop": ["a", "b"], "stop_token_ids": [8], "allowed_token_ids": [1, 2], "include_stop_str_in_output": True, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 3,
        "priority": -5, "cache_salt": "tenant-1", "forebay": {"prefill": "exact", "replay": "bounded", "max_lineage": 0},
    }  # fmt: skip
    client.chat.completions.create(model="script", messages=HI, extra_body=body)
    request = served.engine.requests[0]
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.frequency_penalty, p.presence_penalty) == (0.5, 0.4, 7, 0.1, 0.2, -0.3)
    assert (p.repetition_penalty, p.logit_bias, p.seed, p.max_tokens, p.min_tokens) == (1.1, {5: -100.0, 6: 3.5}, -4, 9, 2)
    assert (p.stop, p.stop_token_ids, p.allowed_token_ids, p.include_stop, p.ignore_eos) == (("a", "b"), (8,), (1, 2), True, True)
    assert (p.logprobs, request.priority, request.salt, request.prefill) == (3, -5, "tenant-1", "exact")
    assert (request.replay, request.max_lineage) == ("bounded", 0)


def test_defaults_of_sampling(served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="script", messages=HI)
    client.chat.completions.create(model="script", messages=HI, extra_body={**PLAIN, "temperature": None, "stop": None})
    own = {"forebay": {"explain": None, "prefill": None, "replay": None, "max_lineage": None}}
    client.chat.completions.create(model="script", messages=HI, extra_body=own)
    assert {(r.prefill, r.replay, r.max_lineage) for r in served.engine.requests} == {(None, None, None)}, "the server's settings hold"
    thinking, plain = (r.params for r in served.engine.requests[:2])
    assert (thinking.temperature, thinking.top_p, thinking.seed, thinking.stop) == (1.0, 0.95, None, ())
    assert (plain.temperature, plain.top_p) == (1.0, 1.0)


def test_what_is_ignored_is_named(served: Served, client: openai.OpenAI) -> None:
    body = {"metadata": {"a": "b"}, "store": True, "user": "me", "made_up_field": 1, "bad\nname": 2, "x" * 65: 3, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(model="script", messages=HI, extra_body=body)
    assert raw.headers["x-forebay-ignored"].split(", ") == ["metadata", "store", "user", "made_up_field", "2 more"]
    assert b'forebay_unknown_fields_total{field="made_up_field"} 1.0' in served.engine.metrics.render()
    raw = client.chat.completions.with_raw_response.create(model="script", messages=HI)
    assert "x-forebay-ignored" not in raw.headers


def test_token_ids_on_request(served: Served, client: openai.OpenAI) -> None:
    tokens = [*served.engine.ids("Hello."), served.engine.tokenizer.eos_id]
    served.engine.answer = Script(tokens)
    extra = {**PLAIN, "return_token_ids": True}
    answer = client.chat.completions.create(model="script", messages=HI, extra_body=extra)
    prompt = served.engine.requests[0].prompt_ids
    assert answer.prompt_token_ids == prompt
    assert answer.choices[0].token_ids == tokens
    chunks = list(client.chat.completions.create(model="script", messages=HI, stream=True, extra_body=extra))
    assert [i for c in chunks for choice in c.choices for i in getattr(choice, "token_ids", [])] == tokens
    assert chunks[0].prompt_token_ids == prompt
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])


def test_options_come_from_the_configuration() -> None:
    config, _ = load(flags={
        "model.name": ("--set", "flash"), "model.aliases": ("--set", "a,b"), "engine.default_effort": ("--set", "none"),
        "server.body_limit_bytes": ("--set", "2MiB"), "server.keepalive_comment_s": ("--set", "0"),
        "engine.max_output_tokens.plain": ("--set", "77"),
    })  # fmt: skip
    options = ServerOptions.from_config(config)
    assert (options.model_name, options.aliases, options.thinking_default) == ("flash", ("a", "b"), False)
    assert (options.max_body, options.keepalive_comment_s, options.output_plain) == (2 << 20, 0, 77)
    defaults, _ = load()
    assert ServerOptions.from_config(defaults) == ServerOptions()
