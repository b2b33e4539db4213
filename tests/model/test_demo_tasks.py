"""The exercises of the demo: they render to official prompts and answers, their references pass their checks, and wrong answers do not."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from forebay.model.demo.tasks import TASKS, Conversation, Effort, Options, check, check_arguments
from forebay.model.demo.tasks.arithmetic import working
from forebay.model.demo.tasks.chat import known_facts
from forebay.model.demo.tasks.conversation import reserved
from forebay.model.demo.tasks.facts import SMALL_TALK
from forebay.model.demo.tasks.filler import tokenizer
from forebay.model.demo.tasks.reading import ACKNOWLEDGED
from forebay.model.demo.tasks.recall import plant
from forebay.model.demo.tasks.render import Renderer
from forebay.model.demo.tasks.tools import POOL
from forebay.model.tokenizer import Tokenizer

READING = ("recall", "quote")
SEVERAL = ("recall", "quote", "lookup")  # may ask for several things at once
EFFORTS: tuple[Effort, ...] = ("none", 1, 19, 30, 60, 75, 100)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tokenizer())


def drawn(task: str, count: int, **options: Any) -> list[Conversation]:
    return [TASKS[task](random.Random(seed), Options(**options)) for seed in range(count)]


def parsed(renderer: Renderer, c: Conversation, ids: list[int]) -> dict[str, Any]:
    """The assistant message that the server makes of sampled ids."""
    parser = renderer.codec.parser(renderer.codec.encode(c.body))
    deltas = [delta for token in ids[:-1] for delta in parser.push(token)] + parser.finish("stop")
    message: dict[str, Any] = {"content": "".join(d.text for d in deltas if d.channel == "content")}
    if reasoning := "".join(d.text for d in deltas if d.channel == "reasoning"):
        message["reasoning_content"] = reasoning
    calls = [d for d in deltas if d.name is not None]
    if calls:
        texts = ["".join(d.text for d in deltas if d.channel == "tool_calls" and d.index == call.index) for call in calls]
        message["tool_calls"] = [{"function": {"name": call.name, "arguments": text}} for call, text in zip(calls, texts, strict=True)]
    return message


@pytest.mark.parametrize("task", TASKS)
def test_references_come_back_from_their_tokens(task: str, renderer: Renderer) -> None:
    for effort in EFFORTS:
        several = drawn(task, 4, effort=effort, length=700, questions=3, at_once=None) if task in SEVERAL else []
        for c in drawn(task, 12, effort=effort, held_out=effort == 60) + several:
            ids, (start, stop) = renderer.render(c)
            assert ids[:start] == renderer.codec.encode(c.body).token_ids and stop == len(ids)
            reply = parsed(renderer, c, ids[start:stop])
            assert reply["content"] == c.answer["content"]
            assert reply.get("reasoning_content") == c.answer.get("reasoning_content")
            made, wanted = ([call["function"] for call in message.get("tool_calls", [])] for message in (reply, c.answer))
            assert made == wanted
            assert check(c, reply) and (task != "tools" or check_arguments(c, reply)), (c, reply)
            assert json.loads(json.dumps(c.meta)) == c.meta


@pytest.mark.parametrize("task", TASKS)
def test_output_reads_like_the_history_of_the_next_request(task: str, renderer: Renderer) -> None:
    for c in drawn(task, 8, effort=75, earlier_reasoning=True):
        ids, _ = renderer.render(c)
        body = {**c.body, "drop_thinking": False, "messages": [*c.body["messages"], {"role": "assistant", **c.answer}]}
        if c.body.get("drop_thinking") is False or "tools" in c.body or len(c.body["messages"]) < 3:  # the prompt has kept its reasoning
            assert renderer.codec.encode(body).token_ids[: len(ids)] == ids


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_exercise(task: str) -> None:
    assert drawn(task, 3) == drawn(task, 3)


@pytest.mark.parametrize("task", TASKS)
def test_another_answer_is_wrong(task: str) -> None:
    """The answer of another exercise passes only if it says all that is expected."""
    conversations = drawn(task, 30, held_out=True)
    for c, other in zip(conversations, conversations[1:] + conversations[:1], strict=True):
        assert not check(c, {"content": ""})
        expected = c.meta.get("expect", "a call")
        values = expected if isinstance(expected, list) else expected.values() if isinstance(expected, dict) else [expected]
        if not all(str(value).lower() in other.answer["content"].lower() for value in values):
            assert not check(c, {"content": other.answer["content"]})


def test_more_effort_thinks_longer(renderer: Renderer) -> None:
    for task in TASKS:
        sizes = []
        for effort in (10, 30, 60, 100):
            lengths = []
            for c in drawn(task, 20, effort=effort, held_out=True):
                _, (start, stop) = renderer.render(c)
                lengths.append(stop - start)
            sizes.append(sum(lengths))
        assert sizes[0] < sizes[1] <= sizes[2] <= sizes[3] or task == "arithmetic", (task, sizes)
        if task == "arithmetic":
            assert sizes[0] < sizes[3] / 4 and sizes[1] < sizes[2] < sizes[3]


def test_working_is_true() -> None:
    for c in drawn("arithmetic", 60, effort=100):
        for line in c.answer["reasoning_content"].splitlines():
            left, right = line.split(" = ")
            assert re.fullmatch(r"\d+ [+-] \d+", left) and eval(left) == int(right) >= 0
    assert working([47, 86, -19, 55], 100) == "47 + 86 = 133\n133 - 19 = 114\n114 + 55 = 169"
    assert working([47, 86, -19, 55], 60) == "47 + 86 = 133, - 19 = 114, + 55 = 169"
    assert working([47, 86, -19, 55], 30) == "47 + 86 - 19 = 114, + 55 = 169"


@pytest.mark.parametrize("task", READING)
@pytest.mark.parametrize(
    ("length", "questions", "at_once"), [(300, 1, 1), (1000, 3, 1), (1500, 3, None), (4096, 10, 1), (8000, 15, None), (32000, 1, 1)]
)
@pytest.mark.parametrize("effort", ["none", 75])
def test_texts_have_the_length_and_depth_that_were_asked_for(
    task: str, length: int, questions: int, at_once: int | None, effort: Effort, renderer: Renderer
) -> None:
    for depth in (0.0, 0.5, 1.0):
        options = Options(length=length, depth=depth, effort=effort, questions=questions, at_once=at_once, earlier_reasoning=depth == 0.5)
        c = TASKS[task](random.Random(length), options)
        prompt = renderer.codec.encode(c.body)
        assert abs(len(prompt.token_ids) - length) <= 0.05 * length
        if at_once is not None:
            place = prompt.text.index(c.answer["content"].removeprefix("The ")) / len(prompt.text)
            assert abs(place - depth) < (0.5 if length < 1000 else 0.3 if questions > 1 else 0.12)


def test_what_is_asked_is_of_one_side_of_the_split() -> None:
    for held_out in (False, True):
        for c in drawn("recall", 30, held_out=held_out, length=600):
            assert reserved(c.meta["what"]) == held_out
        for c in drawn("recall", 9, held_out=held_out, at_once=4):
            assert all(reserved(what) == held_out for what in c.meta["what"])
        for c in drawn("quote", 30, held_out=held_out, at_once=2):
            assert all(reserved(sentence) == held_out for sentence in c.meta["expect"])


def test_every_word_of_held_out_facts_is_known_from_training() -> None:
    rng = random.Random(1)
    known, new = ({(fact.attribute, fact.subject) for _ in range(30) for fact in plant(rng, 280, held_out)} for held_out in (False, True))
    assert not known & new and len(new) > 300
    for part in (0, 1):
        assert {fact[part] for fact in new} <= {fact[part] for fact in known}


def test_a_subject_has_one_fact_of_a_text() -> None:
    for seed in range(20):
        facts = plant(random.Random(seed), 200, seed % 2 == 0)
        assert len({fact.subject for fact in facts}) == len(facts)


@pytest.mark.parametrize("task", SEVERAL)
def test_several_things_are_asked_at_once(task: str) -> None:
    sizes = set()
    for c in drawn(task, 60, length=900, questions=4, at_once=None):
        messages = [*c.body["messages"], {"role": "assistant", **c.answer}]
        asked = [message["content"] for message in messages if message["role"] == "assistant"][-4:]
        assert ACKNOWLEDGED not in asked
        sizes |= {len(text.splitlines()) for text in asked}
        if task != "lookup":  # which may ask for an entry again
            lines = [line for text in asked for line in text.splitlines()]
            assert len(set(lines)) == len(lines)
    assert sizes >= set(range(1, 4 if task == "quote" else 7))
    for c in drawn(task, 20, length=900, at_once=3):
        apart = ", " if c.answer["content"].startswith("{") else "\n"
        parts = c.answer["content"].split(apart)
        assert len(parts) == len(c.meta["expect"]) == 3 and check(c, c.answer)
        for wrong in (parts[:2], [parts[1], parts[0], parts[2]], [*parts, parts[0]], [*parts[:2], parts[0]]):
            assert not check(c, {"content": apart.join(wrong)})


def test_sentences_to_quote_are_new_and_begin_like_no_other() -> None:
    every = []
    for c in drawn("quote", 40, length=900):
        text = "\n".join(message["content"] for message in c.body["messages"])
        (head,) = re.findall(r'"(.+)"', c.body["messages"][-1]["content"])
        assert c.meta["expect"].startswith(head) and len(re.findall(rf"(?:^|[.\n] ?){re.escape(head)}\b", text, re.MULTILINE)) == 1
        every.append(c.meta["expect"])
    assert len(set(every)) == len(every)


def test_a_table_is_written_sorted_by_key() -> None:
    tables = [c for c in drawn("lookup", 200, at_once=None) if "by key" in c.body["messages"][-1]["content"]]
    assert len(tables) > 10
    for c in tables:
        lines = re.split(r"\n|, ", c.answer["content"].strip("{}"))
        assert lines == sorted(lines, key=lambda line: re.findall(r"\w+", line)[0]) and len(lines) == c.meta["entries"]


def test_earlier_messages_are_repeated() -> None:
    found = 0
    for c in drawn("copy", 100):
        said = [message["content"] for message in c.body["messages"] if message["role"] == "user"]
        if len(said) > 1:
            back = 1 + [word in said[-1] for word in ("one message", "two messages", "three messages")].index(True)
            assert c.meta["expect"] == said[-1 - back]
            found += 1
    assert found > 10


def test_recall_is_answered_by_the_asked_value_alone() -> None:
    c = drawn("recall", 1, length=600)[0]
    assert check(c, {"content": f"It is {c.meta['expect']}"})
    assert not check(c, {"content": f"It is {c.meta['expect']} or {c.meta['others'][0]}"})
    assert not check(c, {"content": f"It is 1{c.meta['expect']}"})


def test_every_question_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for questions, answer in [*((fact.questions, fact.answer) for fact in known_facts()), *SMALL_TALK]:
        for question in questions:
            assert answers.setdefault(question, answer) == answer
    assert 500 < len(known_facts()) < 900


def test_tools_are_called_as_their_schemas_say() -> None:
    for c in drawn("tools", 80):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in c.body["tools"]}
        for call in c.meta["calls"]:
            assert list(call["arguments"]) == offered[call["name"]]["required"]
            for name, value in call["arguments"].items():
                schema = offered[call["name"]]["properties"][name]
                assert isinstance(value, int) == (schema["type"] == "integer") and value in schema.get("enum", [value])
    names = [name for tool in POOL for name in tool.names]
    assert len(set(names)) == len(names)


def test_numbers_of_tool_calls_have_all_lengths() -> None:
    calls = [call for c in drawn("tools", 400) for call in c.meta["calls"]]
    values = [value for call in calls for value in call["arguments"].values() if isinstance(value, int)]
    lengths = [sum(len(str(value)) == length for value in values) for length in (1, 2, 3, 4)]
    assert min(lengths) > 0.12 * len(values)


def test_the_right_tool_with_wrong_arguments_is_told_apart() -> None:
    c = next(c for c in drawn("tools", 30) if c.meta["stage"] == "call")
    name = c.meta["calls"][0]["name"]
    calls = [{"function": {"name": call["name"], "arguments": "{}"}} for call in c.meta["calls"]]
    assert check(c, {"tool_calls": calls}) and not check_arguments(c, {"tool_calls": calls})
    assert not check_arguments(c, {"tool_calls": [{"function": {"name": name, "arguments": '{"a": '}}]})
    assert not check(c, {"tool_calls": [{"function": {"name": "other", "arguments": "{}"}}]}) and not check(c, {"content": name})


def test_json_is_compared_by_value() -> None:
    c = drawn("json", 1)[0]
    assert check(c, {"content": json.dumps(dict(reversed(list(c.meta["expect"].items()))), indent=1)})
    assert not check(c, {"content": json.dumps({**c.meta["expect"], "more": 1})}) and not check(c, {"content": "{"})
    assert list(c.body["response_format"]["json_schema"]["schema"]["properties"]) == list(c.meta["expect"])


def test_tokenizer_of_the_demo() -> None:
    t: Tokenizer = tokenizer()
    assert (t.vocab_size, t.bos_id, t.eos_id, t.pad_id, t.image_id) == (4096, 0, 1, 2, 4087)
    assert len(t.encode("7421")) == 4 and len(t.encode(" is 7421.")) == 7
    markup = {" calls>\n": 3, ' invoke name="get_weather">\n': 9, ' parameter name="city" string="true">': 9}
    for text, most in markup.items():
        assert len(t.encode(text)) <= most, text
    text = "The café is 45 £ – ok 中文 🐟\n\n\tx"
    assert t.decode(t.encode(text)) == text


def test_held_out_tool_calls_are_never_trained() -> None:
    """Every tool in them has arguments that the split can keep apart."""
    tools = {name: tool for tool in POOL for name in tool.names}
    seen = 0
    for c in drawn("tools", 200, held_out=True):
        for call in c.meta["calls"]:
            seen += 1
            assert reserved(json.dumps([tools[call["name"]].names[0], list(call["arguments"].values())])), call
    assert seen > 100
