"""Many requests with images at once, in one process: nobody is forgotten, and a picture that was forgotten is encoded again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from image_hosts import picture
from seeing_service import CHAT, Seeing, chat_body, said, seeing_server

SPAN_BYTES = 8 * 64 * 2  # of the embeddings of one picture


def colour(number: int) -> bytes:
    return picture(size=(60 + number, 84))


async def post(eyes: Seeing, front: int, body: dict[str, Any]) -> Any:
    return await eyes.fronts[front].post(CHAT, json=body)


@pytest.mark.case("B081")
def test_two_front_ends_share_a_cache_that_forgets() -> None:
    """Three pictures are remembered of ten. Requests come through two front ends, and some are given up."""
    draw = random.Random(1)
    with seeing_server(image_cache_bytes=3 * SPAN_BYTES, prefix_reuse=False) as eyes:
        bodies = [chat_body(f"Picture {number}:", colour(number), max_tokens=2) for number in range(10)]
        wanted = [said(CHAT, eyes.ask(CHAT, body)) for body in bodies]
        assert len(set(wanted)) > 5
        encoder = eyes.engine.encoder
        assert encoder is not None

        async def session() -> int:
            slots, given_up = asyncio.Semaphore(16), 0

            async def one(number: int, front: int, patience: float | None) -> None:
                nonlocal given_up
                async with slots:
                    request = asyncio.create_task(post(eyes, front, bodies[number]))
                    await asyncio.wait([request], timeout=patience)
                    if not request.done():
                        request.cancel()  # which the front end takes for the end of the server
                        await asyncio.wait([request])
                        given_up += 1
                        return
                assert request.result().status_code == 200, request.result().text
                assert said(CHAT, request.result().json()) == wanted[number]

            await asyncio.gather(*(one(draw.randrange(10), draw.randrange(2), draw.choice([None] * 6 + [0.01])) for _ in range(500)))
            return given_up

        assert eyes.run(session()) > 10
        assert len(encoder.cache) <= 3 and encoder.cache.nbytes <= 3 * SPAN_BYTES


@pytest.mark.case("B078")
def test_two_hundred_at_once_are_all_answered() -> None:
    with seeing_server() as eyes:
        bodies = [chat_body("What is this?", colour(number), max_tokens=2, cache_salt=str(number % 3)) for number in range(20)]

        async def session() -> list[Any]:
            return await asyncio.gather(*(post(eyes, number % 2, bodies[number % 20]) for number in range(200)))

        answers = eyes.run(session())
        assert [answer.status_code for answer in answers] == [200] * 200
        texts = [said(CHAT, answer.json()) for answer in answers]
        assert np.all([text != "" for text in texts])
        assert len({answer.json()["usage"]["prompt_tokens"] for answer in answers}) == 1
