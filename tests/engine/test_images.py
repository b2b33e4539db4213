"""Requests with images: what is encoded when, and that an answer depends on the picture and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines import assert_idle, fresh, greedy, prompt, seeing, shown, tiny
from forebay.engine.encoder import EmbeddingCache
from forebay.engine.llm import LLM
from forebay.engine.types import EngineError, Output, PromptImage, Request
from forebay.model.errors import RequestError
from forebay.model.image_pixels import patchify
from forebay.model.vision import VisionTower


def picture(number: int, height: int = 84, width: int = 84) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def request(llm: LLM, length: int, *pictures: tuple[int, int], number: int = 0, count: int = 8, **more: Any) -> Request:
    """A prompt of `length` text tokens with pictures (position in the text, number), in this order."""
    ids, images = prompt(length, number), list[PromptImage]()
    for at, which in reversed(pictures):
        ids, image = shown(ids, at, picture(which), llm)
        moved = image.stop - image.start
        later = [PromptImage(i.start + moved, i.stop + moved, i.plan, i.canvas, i.digest) for i in images]
        images = [image, *later]
    return Request(ids, greedy(count), images=tuple(images), **more)


@pytest.fixture
def llm() -> Iterator[LLM]:
    found = fresh(seeing())
    assert found.engine.encoder is not None
    found.engine.encoder.cache.clear()
    yield found
    assert_idle(found.engine)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Patches of every picture that a tower encodes from now on."""
    found: list[int] = []
    plain = VisionTower.encode

    def encode(tower: VisionTower, patches: Tensor, plan: Any, *rest: Any) -> Tensor:
        found.append(plan.patch_count)
        return plain(tower, patches, plan, *rest)

    monkeypatch.setattr(VisionTower, "encode", encode)
    return found


def text(output: Output) -> list[int]:
    return output.token_ids


def test_what_is_seen_decides(llm: LLM) -> None:
    """Another picture gives another answer; no picture at the same ids yet another, as its positions are text then."""
    first, again, other = (llm.run([request(llm, 20, (9, n), salt=str(salt))])[0] for salt, n in enumerate((1, 1, 2)))
    assert text(first) == text(again) != text(other)
    ids = list(request(llm, 20, (9, 1)).prompt_ids)
    blind = llm.run([Request(ids, greedy(8), salt="blind")])[0]
    assert text(blind) not in (text(first), text(other))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 11, 16])
def test_chunks_and_company_change_nothing(rows: int, llm: LLM) -> None:
    """Spans are cut anywhere; the Engram's look-back ends at them, in later chunks and in generated tokens too."""
    wanted = [request(llm, 25, (3, 1), (14, 2), number=1), request(llm, 9, (9, 3), number=2), request(llm, 12, (0, 4), number=3)]
    alone = [text(llm.run([one])[0]) for one in wanted]
    narrow = fresh(seeing(encoder_tokens=rows, decoder_tokens=64))
    together = [request(narrow, 25, (3, 1), (14, 2), number=1), request(narrow, 9, (9, 3), number=2), request(narrow, 12, (0, 4), number=3)]
    assert [text(output) for output in narrow.run([*together, Request(prompt(30, 9), greedy(20))])[:3]] == alone


@pytest.mark.parametrize("rows", [5, 64])
def test_what_the_network_is_told(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every position, computed from the request alone: whether an image is there, what is seen, and which tokens are before it; those
    are barriers in the text after an image, in generated tokens too."""
    llm = fresh(seeing(encoder_tokens=rows, decoder_tokens=64))
    assert llm.engine.encoder is not None
    one = request(llm, 14, (3, 1), (13, 2), count=4)
    tower, plain, covered = llm.engine.encoder.tower, llm.engine.runner.batch, 0
    seen = {i.start: tower.encode(patchify(i.canvas, tower.config), i.plan) for i in one.images}

    def batch(composed: Any, *rest: Any) -> Any:
        nonlocal covered
        found = plain(composed, *rest)
        (row,) = composed
        inside = [next((i for i in one.images if i.start <= p < i.stop), None) for p in range(row.stop)]
        here = inside[row.start :]
        mask = torch.zeros(len(here), dtype=torch.bool) if found.image_mask is None else found.image_mask
        assert mask.tolist() == [i is not None for i in here]
        told = {part.first + k: rows for part in found.images for k, rows in enumerate(part.embeddings)}
        assert told.keys() == {k for k, i in enumerate(here) if i is not None}
        for k, image in enumerate(here):
            p = row.start + k
            if image is not None:
                assert torch.equal(told[k], seen[image.start][p - image.start])
            else:
                assert int(found.token_ids[k]) == row.sequence.tokens[p]
            before = [row.sequence.tokens[q] if q >= 0 and inside[q] is None else -1 for q in range(p - 1, p - 4, -1)]
            assert found.lookback[k].tolist() == before
        covered = max(covered, row.stop)
        return found

    monkeypatch.setattr(llm.engine.runner, "batch", batch)
    llm.run([one])
    assert covered == len(one.prompt_ids) + 3


def test_a_cached_picture_is_not_encoded(llm: LLM, encoded: list[int]) -> None:
    """Neither one whose KV is cached, nor one whose embeddings are remembered; blocks that differ in a picture are not shared."""
    first = llm.run([request(llm, 40, (4, 1), (30, 2))])[0]
    assert len(encoded) == 2
    again = llm.run([request(llm, 40, (4, 1), (30, 2), replay="exact")])[0]
    assert len(encoded) == 2 and again.tiers.cached > 24 and text(again) == text(first)
    llm.engine.encoder.cache.clear()  # type: ignore[union-attr]
    longer = request(llm, 60, (4, 1), (30, 2))
    found = llm.run([longer])[0]
    assert found.tiers.cached >= 40 and len(encoded) <= 3, "the first picture lies behind the resume point"
    other = llm.run([request(llm, 40, (4, 3), (30, 2))])[0]
    assert other.tiers.cached == 0
    assert llm.run([request(llm, 40, (4, 1), (30, 2), salt="apart")])[0].tiers.cached == 0


def test_the_same_picture_twice_is_encoded_once(llm: LLM, encoded: list[int]) -> None:
    """By each tenant: how long an answer takes must not tell what others have shown."""
    llm.run([request(llm, 20, (2, 5), (10, 5)), request(llm, 20, (3, 5), number=4)])
    assert len(encoded) == 1
    llm.run([request(llm, 20, (2, 5), salt="another")])
    assert len(encoded) == 2


def test_generated_tokens_go_on_beside_pictures(llm: LLM, encoded: list[int]) -> None:
    """A step encodes one picture at most, and every step gives those who decode a token."""
    engine = llm.engine
    engine.sink = lambda events: None
    engine.submit(Request(prompt(10), greedy(30)))
    for _ in range(3):
        engine.step()
    engine.submit(request(llm, 30, *((2 * n, 20 + n) for n in range(6)), number=1))
    while len(encoded) < 6:
        before, done = len(encoded), engine.choices.accepted
        engine.step()
        assert len(encoded) - before <= 1 and engine.choices.accepted - done >= 1
    while engine.busy:
        engine.step()


def test_one_picture_does_not_wait_for_another_prompts_many(llm: LLM, encoded: list[int]) -> None:
    """Those who lack a picture take turns; the long prompt goes on too."""
    engine = llm.engine
    first: dict[str, int] = {}
    steps = 0
    engine.sink = lambda events: first.update({e.request_id: steps for e in events if e.token_ids and e.request_id not in first})
    many = request(llm, 40, *((2 * n, 20 + n) for n in range(12)), number=1)
    engine.submit(many)
    engine.step()
    one = request(llm, 10, (4, 7), number=2)
    engine.submit(one)
    while engine.busy:
        steps += 1
        engine.step()
    assert first[one.request_id] <= 4 < first[many.request_id]


def test_only_pictures_that_are_next_are_held(llm: LLM) -> None:
    """Of a long prompt no more than a step's rows reach, and none once they are computed, whatever else was remembered."""
    narrow = fresh(seeing(encoder_tokens=16, decoder_tokens=64))
    engine, most, decoding = narrow.engine, 0, set[int]()
    engine.sink = lambda events: None
    engine.submit(request(narrow, 60, *((4 * n, 40 + n) for n in range(12)), count=6))
    while engine.busy:
        engine.step()
        for sequence in engine.scheduler.running:
            held = sum(e is not None for e in sequence.embeddings)
            most = max(most, held)
            if sequence.generated > 1:
                decoding.add(held)
    assert 1 <= most <= 3 and decoding == {0}


def test_a_picture_that_breaks_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = VisionTower.encode

    def encode(tower: VisionTower, patches: Tensor, plan: Any, *rest: Any) -> Tensor:
        if plan.tokens > 8:
            raise torch.OutOfMemoryError("no room")
        return plain(tower, patches, plan, *rest)

    monkeypatch.setattr(VisionTower, "encode", encode)
    good = request(llm, 20, (5, 1))
    ids, image = shown(prompt(20, 1), 5, picture(2, 84, 200), llm)
    bad = Request(ids, greedy(8), images=(image,))
    events: dict[str, Any] = {}
    llm.engine.sink = lambda found: events.update({e.request_id: e for e in found if e.finish_reason})
    llm.engine.submit(bad)
    llm.engine.submit(good)
    while llm.engine.busy:
        llm.engine.step()
    assert events[good.request_id].finish_reason == "length"
    assert events[bad.request_id].finish_reason == "error" and isinstance(events[bad.request_id].error, EngineError)
    assert events[bad.request_id].error.code == "encode_failed"


def test_preempted_in_the_middle_of_a_span(llm: LLM) -> None:
    """It computes its pictures' positions again, with embeddings that are asked for again."""
    one = request(llm, 30, (3, 1), (20, 2))
    wanted = text(llm.run([one])[0])
    narrow = fresh(seeing(encoder_tokens=5, decoder_tokens=64))
    engine = narrow.engine
    tokens: list[int] = []
    engine.sink = lambda events: tokens.extend(t for e in events for t in e.token_ids)
    engine.submit(request(narrow, 30, (3, 1), (20, 2)))
    for number in range(200):
        if not engine.busy:
            break
        if number in (2, 4, 9) and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[0])
        engine.step()
    assert tokens == wanted


def test_what_is_refused(llm: LLM) -> None:
    ids, image = shown(prompt(20), 5, picture(1), llm)
    with pytest.raises(RequestError, match="out of order"):
        llm.engine.prepare(Request(ids, greedy(1), images=(image, image)))
    with pytest.raises(RequestError, match="out of place"):
        llm.engine.prepare(Request(ids[:10], greedy(1), images=(image,)))
    with pytest.raises(RequestError, match="canvas of image 0 is float32"):
        llm.engine.prepare(Request(ids, greedy(1), images=(replace(image, canvas=image.canvas.astype(np.float32)),)))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="digest of image 0 has 3 bytes"):
        llm.engine.prepare(Request(ids, greedy(1), images=(replace(image, digest=b"abc"),)))
    with pytest.raises(RequestError, match="does not see"):
        tiny().engine.prepare(Request(ids, greedy(1), images=(image,)))


def test_the_cache_keeps_a_budget_and_an_age() -> None:
    now = [0.0]
    cache = EmbeddingCache(1000, 10.0, clock=lambda: now[0])
    rows = {name: torch.zeros((count, 10), dtype=torch.bfloat16) for name, count in ((b"a", 20), (b"b", 20), (b"c", 20), (b"d", 51))}
    cache.put(("", b"a"), rows[b"a"])
    cache.put(("", b"b"), rows[b"b"])
    assert cache.get(("", b"a")) is rows[b"a"] and cache.nbytes == 800
    cache.put(("", b"c"), rows[b"c"])  # b was used longest ago
    assert cache.get(("", b"b")) is None and cache.get(("", b"a")) is rows[b"a"] and cache.nbytes == 800
    cache.put(("", b"d"), rows[b"d"])
    assert cache.get(("", b"d")) is None and len(cache) == 2, "larger than the budget"
    now[0] = 9.0
    assert cache.get(("", b"c")) is rows[b"c"]
    now[0] = 12.0
    cache.expire()
    assert cache.get(("", b"a")) is None and len(cache) == 1
    now[0] = 30.0
    cache.expire()
    assert len(cache) == 0 and cache.nbytes == 0
