"""Where grammars are waited for: apart from other work, once for all who ask, in turns, in a line of limited length."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx
import pytest

from engines import Memo
from forebay.engine.grammar import Grammar, GrammarSpec, choice_spec, json_spec
from forebay.engine.grammar_compiler import GrammarCompiler, Outcome
from forebay.engine.grammar_store import WeighedStore
from forebay.engine.types import QueueFullError
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer
from forebay.server.grammar_desk import GrammarDesk, Obtain
from noise_model import TOKENIZER
from structured_service import body_of, json_format, run

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]
T = TypeVar("T")


class Gated(GrammarCompiler):
    """Builds when it is told to, and remembers for whom, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.gate = threading.Semaphore(0)
        self.built: list[str] = []

    def outcome(self, key: bytes, write: Callable[[], GrammarSpec], owner: str = "") -> Outcome:
        self.built.append(owner)
        assert self.gate.acquire(timeout=60)
        return super().outcome(key, write, owner)

    def open(self) -> None:
        self.gate.release(1000)


@pytest.fixture
def compiler() -> Iterator[Gated]:
    compiler = Gated(Tokenizer.load(TOKENIZER))
    yield compiler
    compiler.open()
    compiler.close()


async def at_once(work: Callable[[], T]) -> T:
    return work()


def ask(desk: GrammarDesk, text: str, owner: str = "", salt: str = "") -> asyncio.Task[Grammar]:
    spec = choice_spec([text], "c")

    def work(obtain: Obtain) -> Grammar:
        return obtain(spec.key, lambda: spec)

    return asyncio.ensure_future(desk.hold(work, at_once, owner=owner, salt=salt))


def with_desk(compiler: Gated, session: Callable[[GrammarDesk], Coroutine[Any, Any, None]], **settings: int) -> None:
    async def work() -> None:
        desk = GrammarDesk(compiler, **settings)
        try:
            await asyncio.wait_for(session(desk), 120)
        finally:
            desk.close()
        assert not desk._works
        assert not desk._running

    asyncio.run(work())


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_all_who_ask_at_once_wait_for_one(compiler: Gated) -> None:
    async def session(desk: GrammarDesk) -> None:
        tasks = [ask(desk, "a") for _ in range(20)]
        await settled(lambda: len(compiler.built) == 1)
        assert desk.waiting == 0
        tasks[0].cancel()  # who came first may leave
        compiler.open()
        assert len(set(map(id, await asyncio.gather(*tasks[1:])))) == 1
        assert compiler.built == [""]
        await ask(desk, "a")
        assert compiler.built == [""]
        await ask(desk, "a", salt="x")  # others' grammars are nobody's business
        assert compiler.built == ["", ""]

    with_desk(compiler, session)


def test_what_is_kept_waits_for_nobody(compiler: Gated) -> None:
    async def session(desk: GrammarDesk) -> None:
        compiler.gate.release()
        await ask(desk, "kept")
        busy = [ask(desk, f"b{i}") for i in range(10)]
        await settled(lambda: desk.waiting == 8)
        await ask(desk, "kept")
        compiler.open()
        await asyncio.gather(*busy)

    with_desk(compiler, session)


def test_owners_take_turns(compiler: Gated) -> None:
    async def session(desk: GrammarDesk) -> None:
        many = [ask(desk, f"a{i}", "a") for i in range(10)]
        await settled(lambda: len(compiler.built) == 1)
        others = [ask(desk, f"{owner}{i}", owner) for owner in "bc" for i in range(2)]
        await settled(lambda: desk.waiting == 13)
        compiler.open()
        await asyncio.gather(*many, *others)
        assert sorted(compiler.built[:4]) == ["a", "a", "b", "c"]
        assert compiler.built[:7].count("a") == 3

    with_desk(compiler, session, threads=1)


def test_a_full_line_turns_away_who_has_most_in_it(compiler: Gated) -> None:
    async def session(desk: GrammarDesk) -> None:
        first = [ask(desk, f"a{i}", "a") for i in range(9)]
        await settled(lambda: desk.waiting == 8)
        with pytest.raises(QueueFullError) as error:
            await ask(desk, "a9", "a")
        assert (error.value.status, error.value.code) == (503, "overloaded")
        assert error.value.retry_after >= 1
        others = [ask(desk, f"b{i}", "b") for i in range(4)]
        await settled(lambda: sum(task.done() for task in first) == 4)  # the latest of who has most
        assert all(isinstance(task.exception(), QueueFullError) for task in first[5:])
        with pytest.raises(QueueFullError):
            await ask(desk, "b4", "b")
        compiler.open()
        await asyncio.gather(*first[:5], *others)

    with_desk(compiler, session, threads=1, most=8)


def test_what_nobody_waits_for_any_more_is_not_built(compiler: Gated) -> None:
    async def session(desk: GrammarDesk) -> None:
        first = ask(desk, "a")
        await settled(lambda: len(compiler.built) == 1)
        gone = [ask(desk, "b") for _ in range(2)]
        await settled(lambda: desk.waiting == 1)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert desk.waiting == 0
        compiler.open()
        await first
        assert len(compiler.built) == 1

    with_desk(compiler, session, threads=1)


def test_a_refusal_is_told_to_all_who_wait(compiler: Gated) -> None:
    async def session(desk: GrammarDesk) -> None:
        spec = json_spec({"type": "string", "format": "klingon"}, "s")

        def work(obtain: Obtain) -> Grammar:
            return obtain(spec.key, lambda: spec)

        tasks = [asyncio.ensure_future(desk.hold(work, at_once, owner="", salt="")) for _ in range(5)]
        compiler.open()
        for task in tasks:
            with pytest.raises(RequestError, match="klingon"):
                await task

    with_desk(compiler, session)


def choose(http: httpx.AsyncClient, text: str) -> asyncio.Task[httpx.Response]:
    """A request whose answer can only be `text`."""
    return asyncio.create_task(http.post("/chat/completions", json=body_of(guided_choice=[text], thinking=False)))


def test_other_work_does_not_wait_for_grammars() -> None:
    """With every thread that builds grammars at one and more in line, requests without new ones are answered."""

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        turns = http._transport.app._turns  # type: ignore[attr-defined]
        gated = Gated(memo.engine.tokenizer)
        turns.grammars.close()
        turns.grammars = turns.desk.compiler = gated
        gated.gate.release()
        assert (await http.post("/chat/completions", json=body_of(guided_choice=["kept"], thinking=False))).status_code == 200
        asked = [choose(http, f"new {i}") for i in range(6)]
        await settled(lambda: turns.desk.waiting == 4)
        for fields in ({"max_tokens": 3}, {"guided_choice": ["kept"]}):
            answer = await http.post("/chat/completions", json=body_of(**fields, thinking=False))
            assert answer.status_code == 200
        assert (await http.post("http://x/tokenize", json={"prompt": "hello"})).status_code == 200
        assert not any(task.done() for task in asked)
        gated.open()
        for i, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.json()["choices"][0]["message"]["content"] == f"new {i}"

    run(session)


def test_nothing_keeps_a_grammar_that_is_not_kept() -> None:
    """No circle of references does: a garbage collection may be minutes away, and each may be megabytes."""

    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        turns = http._transport.app._turns  # type: ignore[attr-defined]
        gc.collect()
        before = {id(thing) for thing in gc.get_objects() if type(thing) is Grammar}  # of servers that other tests have running
        gc.disable()
        try:
            for i in range(3):
                for fields in ({"guided_choice": [f"{i}"]}, {"guided_choice": [f"t{i}"], "tools": TOOLS}):
                    assert (await http.post("/chat/completions", json=body_of(**fields, thinking=False, seed=1))).status_code == 200
            turns.grammars.store = WeighedStore(1)
            await settled(lambda: not memo.engine.busy)
            assert not [thing for thing in gc.get_objects() if type(thing) is Grammar and id(thing) not in before]
        finally:
            gc.enable()

    run(session)


def test_a_full_line_over_http() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        turns = http._transport.app._turns  # type: ignore[attr-defined]
        turns.desk.most = 0
        gated = turns.grammars = turns.desk.compiler = Gated(memo.engine.tokenizer)
        busy = [choose(http, f"{i}") for i in range(2)]
        await settled(lambda: len(gated.built) == 2)
        answer = await http.post("/chat/completions", json=body_of(response_format=json_format()))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        gated.open()
        assert [found.status_code for found in await asyncio.gather(*busy)] == [200, 200]

    run(session)


def test_grammars_and_masks_are_numbers_of_the_server() -> None:
    async def session(http: httpx.AsyncClient, memo: Memo) -> None:
        for _ in range(2):
            assert (await choose(http, "yes")).status_code == 200
        assert (await http.post("/chat/completions", json=body_of(guided_json={"enum": []}))).status_code == 400
        page = (await http.get("http://x/metrics")).text
        assert 'forebay_grammar_compiles_total{result="built"} 1.0' in page
        assert 'forebay_grammar_compiles_total{result="refused"} 1.0' in page
        assert "forebay_grammar_compile_seconds_count 2.0" in page
        assert memo.value("grammar_mask_seconds_count") > 0

    run(session)
