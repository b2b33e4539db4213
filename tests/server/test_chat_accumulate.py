"""A stream adds up to the whole answer, however the text was cut into tokens and the tokens into steps."""

from __future__ import annotations

import copy
import json
import random
from codecs import IncrementalDecoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from forebay.engine.output import OutputProcessor
from forebay.engine.types import OutputEvent, TokenLogprob, Usage
from forebay.model.chat import Delta, EncodedPrompt, OutputParser, ParseOptions
from forebay.model.tokenizer import Tokenizer
from forebay.server.chunks import Choice, ChunkWriter, Head, usage
from forebay.server.logprobs import LogprobFeed
from forebay.server.pacing import Pacer
from script_engine import TOKENIZER, Script, Served
from turns import byte_ids

MARKERS = ("</think>", "<think>", "｜DSML｜")
TOKENS = Tokenizer.load(TOKENIZER)
MARKER_IDS = {TOKENS.special_id(marker) for marker in MARKERS}
PIECES: dict[bytes, int] = {}
for number in range(TOKENS.vocab_size):
    if number not in (TOKENS.stop_ids | TOKENS.silent_ids):
        PIECES.setdefault(TOKENS.token_bytes(number), number)
LONGEST = max(map(len, PIECES))
HEAD = Head("chatcmpl-x", 1, "m", "fp_x")
# Turns that the vendor's parser reads into arguments that are not what the model wrote or not JSON; what is read here instead.
MALFORMED = {
    "json_invalid_value": '{"k": "not json"}', "json_value_with_spaces": '{"k": 3}', "duplicate_parameter": '{"q": "one"}',
    "missing_string_attr": '{"q": "abc"}',
}  # fmt: skip


def cut(turn: str, draw: random.Random | None) -> list[int]:
    """Ids of `turn`, whose markers are their control ids, cut at random into any tokens that spell it; without `draw` byte by byte."""
    ids: list[int] = []
    while turn:
        marker = next((m for m in MARKERS if turn.startswith(m)), None)
        if marker is not None:
            ids.append(TOKENS.special_id(marker) or 0)
            turn = turn[len(marker) :]
            continue
        end = min((place for m in MARKERS if (place := turn.find(m)) >= 0), default=len(turn))
        data, turn = turn[:end].encode(), turn[end:]
        if draw is None:
            ids += byte_ids(TOKENS, data)
            continue
        while data:
            fits = [size for size in range(1, min(LONGEST, len(data)) + 1) if data[:size] in PIECES]
            size = draw.choice(fits)
            ids.append(PIECES[data[:size]])
            data = data[size:]
    return ids


def run(ids: list[int], options: ParseOptions, finish: Any, stop: list[str], draw: random.Random | None, scored: bool) -> list[OutputEvent]:
    """The events of a choice that samples `ids`, in steps of random sizes; without `draw` one token a step."""
    output = OutputProcessor(TOKENS, stop, TOKENS.stop_ids, parser=OutputParser(TOKENS, options))
    events: list[OutputEvent] = []
    place = 0
    while output.finish_reason is None:
        event = OutputEvent("r", [], [], logprobs=[] if scored else None)
        for token_id in ids[place : place + (draw.randint(1, 6) if draw else 1)]:
            event.token_ids.append(token_id)
            if event.logprobs is not None:
                event.logprobs.append(TokenLogprob(token_id, -0.5 - place / 1024, ((token_id, -0.5),)))
            event.deltas += output.push(token_id)
            place += 1
            if output.finished:
                break
        if output.finish_reason is None and place >= len(ids):
            event.deltas += output.finish(finish)
        if output.finish_reason is not None:
            event.finish_reason, event.matched_stop = output.finish_reason, output.matched_stop
            event.usage = Usage(3, place, output.reasoning_tokens, 2)
        events.append(event)
    return events


def opened(events: list[OutputEvent], prompt: EncodedPrompt, style: dict[str, Any]) -> Choice:
    """The choice that these events are to fill."""
    choice = Choice(0, **style)
    if events[0].logprobs is not None:
        choice.feed = LogprobFeed(TOKENS, in_reasoning=prompt.parse.start == "reasoning")
    return choice


def sent(events: list[OutputEvent], prompt: EncodedPrompt, style: dict[str, Any], pacer: Pacer | None) -> list[dict[str, Any]]:
    """The chunks of a stream of these events."""
    choice = opened(events, prompt, style)
    writer = ChunkWriter(HEAD, prompt, [choice], include_usage=True)
    data = b""
    for event in events:
        if (ready := pacer.add(event) if pacer else event) is not None:
            data += writer.event(choice, ready)
    data += writer.tail({"usage": usage(prompt, [choice])})
    return [json.loads(block.removeprefix(b"data: ")) for block in data.split(b"\n\n")[:-1]]


def added_up(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a client makes of chunks, rules of the official protocol only: append texts, calls by index."""
    answer: dict[str, Any] = {key: chunks[0][key] for key in ("id", "created", "model", "system_fingerprint")}
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    choice: dict[str, Any] = {"message": message, "logprobs": {}}
    for chunk in chunks:
        answer |= {"usage": chunk["usage"]} if chunk.get("usage") else {}
        for part in chunk["choices"]:
            delta = part["delta"]
            message |= {"role": delta["role"]} if "role" in delta else {}
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                entry = calls.setdefault(call["index"], {**call, "function": {"name": "", "arguments": ""}})
                for name, text in call["function"].items():
                    entry["function"][name] += text
            for name, entries in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(entries)
            choice |= {name: part[name] for name in ("finish_reason", "stop_reason") if part.get(name) is not None}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {**answer, "choices": [choice]}


def comparable(whole: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """A whole answer without what a stream has no way to say: null content, the index of the only choice, empty lists."""
    choice = whole["choices"][0]
    message = {name: value for name, value in choice["message"].items() if name != "refusal"}
    message["content"] = message["content"] or ""
    message.setdefault("reasoning_content", "")
    logprobs = {name: entries for name, entries in (choice["logprobs"] or {}).items() if entries}
    kept = {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
    return {**{key: whole[key] for key in told if key != "choices"}, "choices": [{"message": message, "logprobs": logprobs, **kept}]}


def whole_of(events: list[OutputEvent], prompt: EncodedPrompt, style: dict[str, Any]) -> dict[str, Any]:
    choice = opened(events, prompt, style)
    for event in events:
        choice.keep(event)
    answer = HEAD.fields("chat.completion")
    return {**answer, "choices": [choice.whole(thinking=prompt.thinking, with_token_ids=False)], "usage": usage(prompt, [choice])}


def prompt_for(options: ParseOptions) -> EncodedPrompt:
    return EncodedPrompt([0, 1, 2], "", options.start == "reasoning", None, "content", options, options.continues)


prose = st.lists(
    st.sampled_from([
        "word", " and", " ", "\n", "\n\n", "<", "</", "<b>", ">", "é", "漢字", "🙂👍🏽", "🇳🇴", "e\u0301", "STOP", "STO", "ST", '"', "\\",
        "{", "```json\n", "```", "\ufffd", "\x00", "DSML", "calls>", " invoke name=\"look\">",
    ]),
    max_size=8,
).map("".join)  # fmt: skip
arguments = st.lists(st.tuples(st.sampled_from(["city", "days", "x y"]), st.booleans(), prose), max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> str:
    """What a model may write behind a prompt that opened reasoning: well formed, or broken off, or with a marker too many."""
    text = draw(prose) + draw(st.sampled_from(["</think>", "</think>\n\n", "", "</think>x</think>"])) + draw(prose)
    for _ in range(draw(st.integers(0, 2))):
        values = "".join(
            f'<｜DSML｜ parameter name="{name}" string="{str(quoted).lower()}">{value}</｜DSML｜ parameter>\n'
            for name, quoted, value in draw(arguments)
        )
        text += f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n{values}</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@pytest.mark.case("B058")
@pytest.mark.case("B064")
@pytest.mark.case("B065")
@pytest.mark.case("B069")
@pytest.mark.case("B074")
@settings(max_examples=120, deadline=None)
@given(
    turn=turns(), seed=st.integers(0, 2**32), start=st.sampled_from(["reasoning", "content"]), tools=st.booleans(), as_json=st.booleans(),
    stop=st.lists(st.sampled_from(["STOP", "STOPS", "T", "漢字", "🙂", "\n\n", "</", "word and"]), max_size=2),
    finish=st.sampled_from(["stop", "length"]), scored=st.booleans(), hidden=st.booleans(), wrapped=st.booleans(),
    interval=st.sampled_from([0, 1, 2, 7]), together=st.booleans(),
)  # fmt: skip
@example(  # the text that follows a marker begins as the marker is spelled
    turn="</think><word", seed=0, start="reasoning", tools=False, as_json=False, stop=[], finish="stop", scored=True, hidden=False,
    wrapped=False, interval=2, together=False,
)  # fmt: skip
def test_chunks_add_up_to_the_whole_answer(
    turn: str, seed: int, start: Any, tools: bool, as_json: bool, stop: list[str], finish: str, scored: bool, hidden: bool, wrapped: bool,
    interval: int, together: bool,
) -> None:  # fmt: skip
    options = ParseOptions(start=start, tools=tools, json=as_json)
    prompt = prompt_for(options)
    style = {"shows_reasoning": not hidden, "wraps_reasoning": wrapped}
    seen = set()
    for draw in (None, random.Random(seed), random.Random(seed + 1)):
        events = run(cut(turn, draw), options, finish, stop, draw, scored)
        whole = whole_of(events, prompt, style)
        chunks = sent(events, prompt, style, Pacer(interval, whole_reasoning=together) if interval else None)
        told = added_up(chunks)
        assert told == comparable(whole, told)
        message = told["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        seen.add((message["content"], message["reasoning_content"], str(calls), told["choices"][0]["finish_reason"]))
        assert (told["choices"][0]["finish_reason"] == "tool_calls") <= bool(calls)
        state = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
        final = state.get_final_completion() if finish == "stop" else state.current_completion_snapshot
        assert (final.choices[0].message.content or "") == message["content"]
        assert [(c.function.name, c.function.arguments) for c in final.choices[0].message.tool_calls or ()] == calls
    assert len(seen) == 1, "the cut into tokens shows"


def golden_cases(golden: Path) -> Iterator[tuple[dict[str, Any], ParseOptions]]:
    for case in json.loads((golden / "chat" / "completions.json").read_text(encoding="utf-8")):
        given = case["parse_options"]
        stage = given["thinking_initial_stage"] or "Content"
        tools = [tool["function"] for tool in case["request"].get("tools", [])]
        options = ParseOptions(
            start="calls" if given["starts_in_tool_calls"] else "reasoning" if stage.startswith("Reasoning") else "content",
            continues=stage.endswith("Continuation"),
            tools=given["parse_tool_calls"],
            properties={tool["name"]: frozenset(tool["parameters"]["properties"]) for tool in tools},
            json=given["parse_json_output"],
        )
        yield case, options


@pytest.mark.case("B056")
@pytest.mark.case("B058")
@pytest.mark.case("B076")
def test_streams_of_the_golden_completions(golden: Path) -> None:
    """The recorded answers, as streams cut in several ways, add up to what was recorded."""
    count = 0
    for case, options in golden_cases(golden):
        prompt, expected = prompt_for(options), case["expected"]
        for draw in (None, random.Random(1), random.Random(2)):
            events = run(cut(case["completion"], draw), options, case["backend_finish"].lower(), [], draw, False)
            told = added_up(sent(events, prompt, {}, None))
            assert told == comparable(whole_of(events, prompt, {}), told), case["name"]
            message = told["choices"][0]["message"]
            assert message["reasoning_content"] == (expected["reasoning"] or ""), case["name"]
            assert message["content"] == expected["content"], case["name"]
            calls = [(c["name"], MALFORMED.get(case["name"], c["arguments"])) for c in expected["tool_calls"] or []]
            assert [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())] == calls, case["name"]
            assert told["choices"][0]["finish_reason"] == expected["finish_reason"], case["name"]
        count += 1
    assert count > 30


COUNTED = {"reasoning_tokens", "_tag_tokens", "_deltas"}  # of tokens, so they do depend on the cut
TABLES = {"_bytes", "_texts", "_silent", "_markers", "_options", "_stop_ids"}  # that never change


def memory(thing: Any) -> Any:
    """All that an object knows of the text it has read, without the places where that was cut."""
    if isinstance(thing, IncrementalDecoder):
        return thing.getstate()
    if isinstance(thing, list) and all(isinstance(piece, str) for piece in thing):
        return "".join(thing)
    if type(thing).__module__.startswith("forebay."):
        known = {name: memory(value) for name, value in vars(thing).items() if name not in COUNTED | TABLES}
        if isinstance(thing, OutputProcessor):
            known["_content"] += known.pop("_pieces")
        return known
    return thing


def twin(output: OutputProcessor) -> OutputProcessor:
    """An independent copy; only the tables of the vocabulary are shared."""
    reader = TOKENS.detokenizer()
    return copy.deepcopy(output, {id(table): table for table in (reader._bytes, reader._texts)})


def heard(deltas: list[Delta]) -> list[tuple[str, int, str | None, str]]:
    """Deltas with neighbours of one kind joined: what a client has, whatever the pieces."""
    told: list[tuple[str, int, str | None, str]] = []
    for delta in deltas:
        if told and delta.name is None and told[-1][:2] == (delta.channel, delta.index):
            told[-1] = (*told[-1][:3], told[-1][3] + delta.text)
        else:
            told.append((delta.channel, delta.index, delta.name, delta.text))
    return told


@pytest.mark.parametrize("stop", [[], ["wo", "</", "}"], ["\n\n", "答"]], ids=["no stop", "stops", "line break"])
def test_no_split_into_tokens_shows(golden: Path, stop: list[str]) -> None:
    """Every split of every recorded answer, by induction over its places.

    Byte by byte there is one state at each place. Any token of the vocabulary leads from the state in front of it to the state behind it,
    with the same deltas on the way; so any chain of tokens does, and with it whatever is told at the end.
    """
    tokens = 0
    for case, options in golden_cases(golden):
        units = cut(case["completion"], None)
        data = [TOKENS.token_bytes(unit) if unit not in MARKER_IDS else b"" for unit in units]
        walk = OutputProcessor(TOKENS, stop, TOKENS.stop_ids, parser=OutputParser(TOKENS, options))
        states, said = [twin(walk)], [list[Delta]()]
        for unit in units:
            said.append(said[-1] + walk.push(unit))
            states.append(twin(walk))
        for start, before in enumerate(states[:-1]):
            if before.finished:
                break
            piece = data[start]
            for end in range(start + 2, min(start + LONGEST, len(units)) + 1):
                if not data[end - 1] or not piece:
                    break
                piece += data[end - 1]
                if (token := PIECES.get(piece)) is None:
                    continue
                after = twin(before)
                deltas = said[start] + after.push(token)
                assert heard(deltas) == heard(said[end]), (case["name"], start, piece)
                assert (after.finish_reason, after.matched_stop) == (states[end].finish_reason, states[end].matched_stop)
                if not after.finished:
                    assert memory(after) == memory(states[end]), (case["name"], start, piece)
                tokens += 1
    assert tokens > 1000


def vendor_answer(case: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """What the vendor's own library makes of a completion in pieces: its chunks, accumulated by itself."""
    body = {"model": "DeepSeek-V4.1-Flash", "stream": True, "messages": [{"role": "user", "content": "Say it in json."}], **case["request"]}
    body["thinking"] = {"type": "enabled" if case["request"].get("thinking", True) else "disabled"}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    processor = recipe.StreamProcessor(recipe.ChatCompletionRequest.chunk_generator(request, "x", "m"), request.parsing_options)
    answer = recipe.ChatCompletionResponse("x", "m", 1, 3, 2)
    chunks = processor.push(recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=3, prompt_cache_hit_tokens=2)))
    for piece in pieces:
        chunks += processor.push(recipe.InferenceChunk.text(piece, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(getattr(recipe.InferenceFinishReason, case["backend_finish"])))
    for chunk in [*chunks, *processor.finish()]:
        answer.accumulate(chunk)
    return json.loads(answer.to_json())


def test_streams_equal_the_vendors_accumulated_answers(golden: Path) -> None:
    """The vendor's chunks of the same text, cut otherwise and accumulated by the vendor, are the same message with the same ending."""
    compared = 0
    for case, options in golden_cases(golden):
        if case["name"] in MALFORMED or not case["streaming_split_invariant"]:
            continue
        for draw in (None, random.Random(5), random.Random(6)):
            ids = cut(case["completion"], draw)
            pieces, rest = [], case["completion"]
            while rest:
                size = draw.randint(1, 5) if draw else 1
                pieces.append(rest[:size])
                rest = rest[size:]
            theirs = vendor_answer(case, pieces)["choices"][0]
            events = run(ids, options, case["backend_finish"].lower(), [], draw, False)
            ours = added_up(sent(events, prompt_for(options), {}, None))["choices"][0]
            assert ours["finish_reason"] == theirs["finish_reason"], case["name"]
            assert ours["message"]["content"] == (theirs["message"].get("content") or ""), case["name"]
            assert ours["message"]["reasoning_content"] == (theirs["message"].get("reasoning_content") or ""), case["name"]
            calls = [[c["function"] for c in side["message"].get("tool_calls") or ()] for side in (ours, theirs)]
            assert calls[0] == calls[1], case["name"]
        compared += 1
    assert compared > 30


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_body_equals_the_whole_one_over_the_wire(served: Served, client: openai.OpenAI, n: int) -> None:
    """The official client's own accumulator, on a real connection; only what is drawn anew for each answer may differ."""
    said = "Hm 🙂.</think>Let me look: \n\n" + (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="city" string="true">Tromsø</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    served.engine.answer = Script([*cut(said, random.Random(7)), TOKENS.eos_id or 0], per_event=2)
    look: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields: dict[str, Any] = {"model": "script", "messages": [{"role": "user", "content": "Hi"}], "tools": [look], "n": n, "logprobs": True}
    whole = client.chat.completions.create(**fields).model_dump()
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion().model_dump()
    assert {c["finish_reason"] for c in whole["choices"]} == {"tool_calls"}
    assert streamed["usage"] == whole["usage"]
    for ours, theirs in zip(streamed["choices"], whole["choices"], strict=True):
        for side in (ours, theirs):
            for call in side["message"]["tool_calls"]:
                del call["id"]
                call["function"].pop("parsed_arguments", None)
        assert ours["message"]["reasoning_content"] == theirs["message"]["reasoning_content"] == "Hm 🙂."
        for name in ("content", "tool_calls", "role"):
            assert ours["message"][name] == theirs["message"][name]
        assert ours["logprobs"]["content"] == theirs["logprobs"]["content"]
        assert ours["finish_reason"] == theirs["finish_reason"]
